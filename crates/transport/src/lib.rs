//! Mission Control's data plane: what moves the bytes that [`mission_core`] decides on.
//!
//! An [`endpoint::Endpoint`] is one process's instance of it: a [`store`] of objects, a [`server`] that sends parts of
//! them, a [`fetcher`] that fetches parts of others' (and keeps [`copies`] of broadcasts), and the [`arbiter`] through
//! which all processes of a host share its slots. Bytes cross in the order: store -> server -> carrier -> fetcher ->
//! [`segment`]. Threads block; there is no async runtime (docs/explanation/design-data.md, "Threads").

pub mod arbiter;
pub mod auth;
pub mod carrier;
pub mod checksum;
mod clock;
mod connections;
pub mod control;
pub mod copies;
pub mod endpoint;
pub mod facts;
pub mod fetcher;
mod handover;
pub mod host;
mod in_force;
pub mod incast;
mod limit;
mod local;
pub mod news;
pub mod object;
pub mod parts;
pub mod prefix;
mod probe;
pub mod segment;
pub mod server;
mod session;
pub mod socket;
pub mod spool;
pub mod store;
pub mod streams;
pub mod threads;
pub mod tls;
mod tracker;
pub mod uplink;
pub mod windows;
pub mod wire;
