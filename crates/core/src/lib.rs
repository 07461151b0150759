//! Mission Control's decisions.
//!
//! Everything here is pure: it takes `now` and an event and returns commands. No socket, file, clock or thread, so the
//! same code runs beside Dask's scheduler, in a worker's data plane, in a simulator and in a unit test. The
//! `clippy.toml` of this crate keeps it so.
//!
//! Read in this order: [`types`], [`policy`], [`shares`], [`standing`], [`pattern`], [`graph`], [`flight`], [`cluster`], then the state machines
//! that put them together: [`mission`] (one per cluster) and [`host`] (slots and fetches of each host's processes);
//! [`swarm`], the coordination of a broadcast; and [`ecn`], the detection of switches that mark. [`incast`] is the
//! model of many senders that answer one receiver; [`budget`] and [`ictcp`] are two mitigations, and [`turns`] is used
//! with the first. [`pacing`] keeps what a process sends to a rate.

pub mod budget;
pub mod cluster;
pub mod control;
pub mod defaults;
pub mod ecn;
pub mod flight;
pub mod graph;
pub mod host;
pub mod ictcp;
pub mod incast;
pub mod lanes;
pub mod mission;
pub mod pacing;
pub mod pattern;
pub mod policy;
pub mod random;
pub mod report;
mod seconds;
pub mod service;
pub mod shares;
pub mod standing;
pub mod strangers;
pub mod stream;
pub mod swarm;
pub mod threads;
pub mod turns;
pub mod types;
pub mod units;
pub mod versions;
