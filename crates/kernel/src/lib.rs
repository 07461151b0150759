//! Mission Control in the kernel: eBPF programs, and what loads and reads them. Linux only, and root's.
//!
//! [`transport`] gives unchanged programs another transport. [`dctcp`] gives kernels that have none a DCTCP. [`switch`] makes
//! the ports of a bridge behave as those of a switch: buffers in bytes, ECN marks, counters, queue lengths. [`bond`] makes two
//! links one. [`delay`] makes links long.
//! Programs are C in `bpf/`, compiled by `build.rs` and embedded.

pub mod bond;
pub mod dctcp;
pub mod delay;
pub mod switch;
pub mod transport;
