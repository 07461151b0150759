//! DCTCP (RFC 8257) for kernels that have none: `bpf/dctcp.bpf.c`, registered as a congestion control of that name.
//!
//! A congestion control is the whole machine's. It is there while a [`Registration`] lives, or, once that is pinned, until
//! its pin is removed; connections that use it go on to their ends.

use crate::switch::Result;
use libbpf_rs::{Link, MapCore as _, Object, ObjectBuilder, ProgramInput};
use std::path::Path;

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/dctcp.bpf.o"));

pub struct Registration {
    link: Link,
}

impl Registration {
    /// Registers it.
    ///
    /// # Errors
    /// Not privileged, a kernel without BTF, or there is a congestion control of that name already.
    pub fn new() -> Result<Registration> {
        let mut object = load()?;
        let mut map = object.maps_mut().find(|map| map.name() == "dctcp").expect("the program has this map");
        Ok(Registration { link: map.attach_struct_ops()? })
    }

    /// Keeps it registered until `path`, in a file system of the kernel's for that, is removed.
    pub fn pin(mut self, path: &Path) -> Result<()> {
        // Dropped with its descriptor, which would keep it too: as long as this process lives.
        self.link.pin(path)?;
        Ok(())
    }
}

/// Alpha, in 1/1,024, after a window of `all` segments of which `marked` were marked (RFC 8257, 3.3); by the program itself.
pub fn alpha_after(alpha: u32, marked: u32, all: u32) -> Result<u32> {
    let object = load()?;
    let program =
        object.progs_mut().find(|program| program.name() == "alpha_after").expect("the program has this entry");
    let mut words: Vec<u8> = [alpha, marked, all].iter().flat_map(|word| word.to_ne_bytes()).collect();
    let input = ProgramInput { context_in: Some(&mut words), ..ProgramInput::default() };
    Ok(program.test_run(input)?.return_value)
}

fn load() -> Result<Object> {
    ObjectBuilder::default().name("mission_dctcp")?.open_memory(OBJECT)?.load()
}
