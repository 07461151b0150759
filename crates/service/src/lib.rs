//! The control service: one Mission Control for several clusters ([`mission_core::service`] decides).
//!
//! One thread has the replica and all connections ([`service`]); it waits for sockets, and for results of the threads
//! that use the [`store`]. A [`connection`] is plain or TLS, and carries HTTP ([`http`]): a request of a user's tool or
//! browser, or the beginning of a session, on which both ends send lines of JSON. The data for users is in [`looking`],
//! the console itself in `console/`.

mod connection;
mod http;
mod looking;
mod metrics;
mod moment;
pub mod service;
pub mod settings;
pub mod store;
mod storing;
