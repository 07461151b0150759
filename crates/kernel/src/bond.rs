//! Bonded pairs of interfaces: packets take their links in turn. `bpf/bond.bpf.c`; stays as long as the interfaces.

use crate::switch::{Result, attach_with};
use libbpf_rs::TC_EGRESS;

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/bond.bpf.o"));
/// Before the program of a switch port, which then counts what each link carries.
const PRIORITY: u32 = 1;

/// Bonds pairs of interfaces, given by their indexes, in the namespace of the calling thread.
///
/// # Errors
/// Not privileged, or an interface that does not exist.
pub fn bond(pairs: &[(u32, u32)]) -> Result<()> {
    let members = pairs.iter().map(|(first, second)| (*first, [second.to_ne_bytes(), 0u32.to_ne_bytes()].concat()));
    attach_with(OBJECT, "mission_bond", members, TC_EGRESS, PRIORITY)
}
