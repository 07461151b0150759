//! Bonded pairs of interfaces: packets take their links in turn. `bpf/bond.bpf.c`; stays as long as the interfaces.

use crate::switch::{Result, attach};
use libbpf_rs::{MapCore as _, MapFlags, ObjectBuilder, TC_EGRESS};
use std::os::fd::AsFd;

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/bond.bpf.o"));
/// Before the program of a switch port, which then counts what each link carries.
const PRIORITY: u32 = 1;

/// Bonds pairs of interfaces, given by their indexes, in the namespace of the calling thread.
///
/// # Errors
/// Not privileged, or an interface that does not exist.
pub fn bond(pairs: &[(u32, u32)]) -> Result<()> {
    let object = ObjectBuilder::default().name("mission_bond")?.open_memory(OBJECT)?.load()?;
    let members = object.maps().next().expect("the program has one map");
    let program = object.progs().next().expect("the program has one entry");
    for (first, second) in pairs {
        let member = [second.to_ne_bytes(), 0u32.to_ne_bytes()].concat();
        members.update(&first.to_ne_bytes(), &member, MapFlags::ANY)?;
        attach(program.as_fd(), *first, TC_EGRESS, PRIORITY)?;
    }
    Ok(())
}
