//! The transport of unchanged programs: every TCP socket of a cgroup gets the wanted options before its first packet,
//! and the options in force are read back. `bpf/transport.bpf.c`; in force while a [`Setter`] lives.

use crate::switch::Result;
use libbpf_rs::{Link, MapCore as _, MapFlags, MapHandle, ObjectBuilder};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/transport.bpf.o"));
const NAME_BYTES: usize = 16;

/// What sockets shall have; what is absent stays as the program or the kernel has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Wanted {
    pub congestion_control: Option<String>,
    pub rto_min_us: Option<u32>,
    pub window_clamp_bytes: Option<u32>,
    pub pacing_bytes_per_second: Option<u32>,
    /// Asks for ECN, whatever the congestion control.
    pub ecn: bool,
}

/// What so many connections were found to have.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Agreed {
    pub congestion_control: String,
    pub rto_min_us: u32,
    pub window_clamp_bytes: u32,
    pub pacing_bytes_per_second: u32,
    pub connections: u64,
}

/// A library that gives a program Multipath TCP, to be loaded ahead of its own; `preload/mptcp.c`.
pub static MPTCP_PRELOAD: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/mptcp.so"));

pub struct Setter {
    agreements: MapHandle,
    _link: Link,
}

impl Setter {
    /// Attaches to a cgroup (version 2), by its folder.
    ///
    /// # Errors
    /// Not privileged, or the folder is no cgroup.
    pub fn new(cgroup: &Path, wanted: &Wanted) -> Result<Setter> {
        let object = ObjectBuilder::default().name("mission_socket")?.open_memory(OBJECT)?.load()?;
        let map = |name: &str| {
            let found = object.maps().find(|map| map.name() == name).expect("the program has this map");
            MapHandle::try_from(&found)
        };
        map("wanted")?.update(&0u32.to_ne_bytes(), &bytes_of(wanted), MapFlags::ANY)?;
        let folder = File::open(cgroup)?;
        let program = object.progs_mut().next().expect("the program has one entry");
        let link = program.attach_cgroup(folder.as_raw_fd())?;
        Ok(Setter { agreements: map("agreements")?, _link: link })
    }

    /// What the connections made so far have in force, read from the kernel.
    pub fn agreed(&self) -> Result<Vec<Agreed>> {
        let mut all = Vec::new();
        for key in self.agreements.keys() {
            let Some(count) = self.agreements.lookup(&key, MapFlags::ANY)? else { continue };
            let name = key[..NAME_BYTES].split(|byte| *byte == 0).next().unwrap_or_default();
            let word = |at: usize| u32::from_ne_bytes(key[at..at + 4].try_into().expect("four bytes"));
            all.push(Agreed {
                congestion_control: String::from_utf8_lossy(name).into_owned(),
                rto_min_us: word(NAME_BYTES),
                window_clamp_bytes: word(NAME_BYTES + 4),
                pacing_bytes_per_second: word(NAME_BYTES + 8),
                connections: u64::from_ne_bytes(count.try_into().expect("eight bytes")),
            });
        }
        all.sort();
        Ok(all)
    }
}

/// As the program reads it: a name and four words.
fn bytes_of(wanted: &Wanted) -> Vec<u8> {
    let mut bytes = vec![0; NAME_BYTES];
    let name = wanted.congestion_control.as_deref().unwrap_or_default().as_bytes();
    let len = name.len().min(NAME_BYTES - 1);
    bytes[..len].copy_from_slice(&name[..len]);
    let words = [wanted.rto_min_us, wanted.window_clamp_bytes, wanted.pacing_bytes_per_second, Some(wanted.ecn.into())];
    bytes.extend(words.iter().flat_map(|word| word.unwrap_or(0).to_ne_bytes()));
    bytes
}
