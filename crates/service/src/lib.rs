//! The control service: one Mission Control for several clusters ([`mission_core::service`] decides).
//!
//! One thread has the replica and all connections ([`service`]); it waits for sockets, and for what the threads that
//! talk with the [`store`] have to say. A [`connection`] is plain or TLS, and speaks HTTP ([`http`]): a question of a
//! person's tool or browser, or the beginning of a session, on which both ends say lines of JSON. What people look at is in [`looking`], the
//! console itself in `console/`.

mod connection;
mod http;
mod looking;
mod metrics;
pub mod service;
pub mod settings;
pub mod store;
mod storing;
