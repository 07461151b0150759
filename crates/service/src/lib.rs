//! The control service: one Mission Control for several clusters ([`mission_core::service`] decides).

pub mod store;
