//! Switch ports: loads `bpf/port.bpf.c`, attaches it to the egress of each port, and reads what it counts.
//!
//! The program stays as long as its interfaces, whatever becomes of the process that loaded it; another finds it again by an
//! interface ([`Switch::open`]). All calls concern the network namespace of the calling thread.

use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions};
use libbpf_rs::{
    ErrorExt as _, MapCore as _, MapFlags, MapHandle, ObjectBuilder, RingBufferBuilder, TC_EGRESS, TcAttachPoint,
    TcHook, TcHookBuilder, set_print,
};
use serde::{Deserialize, Serialize};
use std::mem::{size_of, zeroed};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Once;
use std::time::Duration;

pub type Error = libbpf_rs::Error;
pub type Result<T> = std::result::Result<T, Error>;

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/port.bpf.o"));
const PORTS_PER_GROUP: usize = 16;
const BUCKETS: usize = 64;
/// After what chooses the port ([`crate::bond`]).
const PRIORITY: u32 = 2;

/// How a port behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[repr(C)]
pub struct PortSettings {
    pub bytes_per_second: u64,
    /// Most that it may hold, whatever a shared buffer has left.
    pub limit_bytes: u64,
    /// A packet that finds more than this is marked; 0: none is.
    #[serde(default)]
    pub ecn_bytes: u64,
    /// Longest frame of the wire, Ethernet's header included.
    pub mtu_bytes: u64,
    /// What the filter behind the port lets go at once after a rest.
    #[serde(default)]
    pub burst_bytes: u64,
}

/// Ports that have a buffer in common, or one port that has its own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Group {
    /// 0: what each port may hold is its own.
    #[serde(default)]
    pub shared_bytes: u64,
    /// Dynamic threshold: a port may hold `alpha` times what is free.
    #[serde(default = "one")]
    pub alpha: f64,
    /// By index of the interface; at most 16.
    pub ports: Vec<(u32, PortSettings)>,
}

fn one() -> f64 {
    1.0
}

/// What a port has counted since it was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PortCounters {
    pub interface: u32,
    pub settings: PortSettings,
    /// What was let through.
    pub packets: u64,
    pub bytes: u64,
    pub drops: u64,
    pub dropped_bytes: u64,
    pub marks: u64,
    /// Frames longer than the wire's: segmentation was left to the device.
    pub oversized: u64,
    /// Bytes that its rate would have let through and the machine was too slow for.
    pub lost_bytes: u64,
    pub queue_bytes_max: u64,
    /// What the virtual queue held at `drained_ns` of the monotonic clock.
    pub queue_bytes: u64,
    pub drained_ns: u64,
    /// Time with something queued.
    pub busy_ns: u64,
    /// Nanoseconds that the queue had each length: of `limit_bytes` / 64 a bucket.
    pub nanoseconds: Vec<u64>,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct GroupConfig {
    ports: u32,
    unused: u32,
    shared_bytes: u64,
    alpha_256: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct RawPort {
    bytes_per_second: u64,
    limit_bytes: u64,
    burst_bytes: u64,
    queue_bytes: u64,
    credit_bytes: u64,
    drained_ns: u64,
    traced_ns: u64,
    packets: u64,
    bytes: u64,
    drops: u64,
    dropped_bytes: u64,
    marks: u64,
    oversized: u64,
    queue_bytes_max: u64,
    lost_bytes: u64,
    busy_ns: u64,
    nanoseconds: [u64; BUCKETS + 1],
}

#[derive(Clone, Copy)]
#[repr(C)]
struct RawGroup {
    lock: u32,
    unused: u32,
    port: [RawPort; PORTS_PER_GROUP],
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Place {
    group: u32,
    port: u32,
}

impl Place {
    fn flat(self) -> u32 {
        self.group * PORTS_PER_GROUP as u32 + self.port
    }
}

/// The ports of one bridge.
pub struct Switch {
    groups: MapHandle,
    group_configs: MapHandle,
    port_configs: MapHandle,
    places: MapHandle,
    tracing: MapHandle,
    samples: MapHandle,
}

impl Switch {
    /// Loads the program and attaches it to the egress of every port.
    ///
    /// # Errors
    /// Not privileged, a kernel without BTF, or an interface that does not exist.
    pub fn build(groups: &[Group]) -> Result<Switch> {
        if let Some(group) = groups.iter().find(|group| group.ports.len() > PORTS_PER_GROUP) {
            let text = format!(
                "{} ports share a buffer, and a group has {PORTS_PER_GROUP} at most: make more groups",
                group.ports.len()
            );
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, text).into());
        }
        let mut builder = ObjectBuilder::default();
        let open = builder.name("mission_port")?.open_memory(OBJECT)?;
        let object = open.load()?;
        let map = |name: &str| {
            let found = object.maps().find(|map| map.name() == name).expect("the program has this map");
            MapHandle::try_from(&found)
        };
        let switch = Switch::of(map)?;
        for (number, group) in groups.iter().enumerate() {
            let config = GroupConfig {
                ports: group.ports.len() as u32,
                unused: 0,
                shared_bytes: group.shared_bytes,
                alpha_256: (group.alpha * 256.0) as u64,
            };
            switch.group_configs.update(&(number as u32).to_ne_bytes(), bytes_of(&config), MapFlags::ANY)?;
            for (slot, (interface, settings)) in group.ports.iter().enumerate() {
                let place = Place { group: number as u32, port: slot as u32 };
                switch.places.update(&interface.to_ne_bytes(), bytes_of(&place), MapFlags::ANY)?;
                switch.configure(place, settings)?;
            }
        }
        let program = object.progs().next().expect("the program has one entry");
        for (interface, _) in groups.iter().flat_map(|group| &group.ports) {
            attach(program.as_fd(), *interface, TC_EGRESS, PRIORITY)?;
        }
        Ok(switch)
    }

    /// The switch of which `interface` is a port.
    ///
    /// # Errors
    /// It is a port of none.
    pub fn open(interface: u32) -> Result<Switch> {
        // A query is about no program; the type wants a descriptor of one.
        let any = std::io::stdin();
        let mut hook = TcHook::new(any.as_fd());
        let id = hook.ifindex(interface as i32).attach_point(TC_EGRESS).handle(1).priority(PRIORITY).query()?;
        let options = ProgInfoQueryOptions::default().include_map_ids(true);
        let info = ProgInfoIter::with_query_opts(options).find(|info| info.id == id);
        let maps: Vec<MapHandle> = info
            .map_or(Vec::new(), |info| info.map_ids)
            .into_iter()
            .map(MapHandle::from_map_id)
            .collect::<Result<_>>()?;
        let map = |name: &str| {
            let found = maps.iter().find(|map| map.name() == name);
            let missing =
                || std::io::Error::new(std::io::ErrorKind::NotFound, "this interface is not a port of the switch");
            found.ok_or_else(|| missing().into()).and_then(MapHandle::try_from)
        };
        Switch::of(map)
    }

    /// From the program's maps, by name.
    fn of(map: impl Fn(&str) -> Result<MapHandle>) -> Result<Switch> {
        Ok(Switch {
            groups: map("groups")?,
            group_configs: map("group_configs")?,
            port_configs: map("port_configs")?,
            places: map("places")?,
            tracing: map("tracing")?,
            samples: map("samples")?,
        })
    }

    /// Changes a port while it runs.
    ///
    /// # Errors
    /// The interface is none of its ports.
    pub fn set(&self, interface: u32, settings: &PortSettings) -> Result<()> {
        self.configure(self.place(interface)?, settings)
    }

    /// What all ports have counted, by index of the interface.
    pub fn counters(&self) -> Result<Vec<PortCounters>> {
        let mut all = Vec::new();
        for key in self.places.keys() {
            let interface = u32::from_ne_bytes(key.try_into().expect("indexes have four bytes"));
            let place = self.place(interface)?;
            let group: RawGroup = read(&self.groups, place.group, MapFlags::LOCK)?;
            let settings: PortSettings = read(&self.port_configs, place.flat(), MapFlags::ANY)?;
            let port = group.port[place.port as usize];
            all.push(PortCounters {
                interface,
                settings,
                packets: port.packets,
                bytes: port.bytes,
                drops: port.drops,
                dropped_bytes: port.dropped_bytes,
                marks: port.marks,
                oversized: port.oversized,
                lost_bytes: port.lost_bytes,
                queue_bytes_max: port.queue_bytes_max,
                queue_bytes: port.queue_bytes,
                drained_ns: port.drained_ns,
                busy_ns: port.busy_ns,
                nanoseconds: port.nanoseconds.to_vec(),
            });
        }
        all.sort_by_key(|port| port.interface);
        Ok(all)
    }

    /// Begins or ends to sample queue lengths, at most one of each port in 100 us.
    pub fn trace(&self, on: bool) -> Result<()> {
        self.tracing.update(&0u32.to_ne_bytes(), &u32::from(on).to_ne_bytes(), MapFlags::ANY)
    }

    /// Samples since the last call: nanoseconds of the monotonic clock, interface, bytes of the virtual queue, and of the
    /// real backlog. The kernel keeps some 30,000; what is not fetched in time is lost.
    pub fn samples(&self) -> Result<Vec<(u64, u32, u32, u32)>> {
        let mut interfaces = std::collections::HashMap::new();
        for key in self.places.keys() {
            let interface = u32::from_ne_bytes(key.try_into().expect("indexes have four bytes"));
            interfaces.insert(self.place(interface)?.flat(), interface);
        }
        let mut samples = Vec::new();
        let mut builder = RingBufferBuilder::new();
        builder.add(&self.samples, |raw| {
            let word = |at: usize| u32::from_ne_bytes(raw[at..at + 4].try_into().expect("four bytes"));
            let ns = u64::from_ne_bytes(raw[..8].try_into().expect("eight bytes"));
            let place = Place { group: word(8), port: word(12) };
            if let Some(interface) = interfaces.get(&place.flat()) {
                samples.push((ns, *interface, word(16), word(20)));
            }
            0
        })?;
        builder.build()?.poll(Duration::ZERO)?;
        Ok(samples)
    }

    fn place(&self, interface: u32) -> Result<Place> {
        let found = self.places.lookup(&interface.to_ne_bytes(), MapFlags::ANY)?;
        let missing = || std::io::Error::new(std::io::ErrorKind::NotFound, "the switch has no such port");
        Ok(of_bytes(&found.ok_or_else(missing)?))
    }

    fn configure(&self, place: Place, settings: &PortSettings) -> Result<()> {
        self.port_configs.update(&place.flat().to_ne_bytes(), bytes_of(settings), MapFlags::ANY)
    }
}

/// Attaches a program to one way of an interface; of several, the one with the lowest priority runs first.
///
/// # Arguments
/// * `way`: [`TC_EGRESS`] or [`libbpf_rs::TC_INGRESS`].
fn attach(program: BorrowedFd<'_>, interface: u32, way: TcAttachPoint, priority: u32) -> Result<()> {
    let mut builder = TcHookBuilder::new(program);
    let mut hook = builder.ifindex(interface as i32).handle(1).priority(priority).hook(way);
    // The library prints to standard error if the hook already exists, which is not an error; real errors are returned.
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let _ = set_print(None);
    });
    hook.create().and_then(|mut hook| hook.attach()).context("cannot attach the program to an interface")?;
    Ok(())
}

/// Loads a program that has one map, from interfaces to what it is to know of each, and attaches it to these.
pub(crate) fn attach_with(
    object: &[u8],
    name: &str,
    known: impl IntoIterator<Item = (u32, Vec<u8>)>,
    way: TcAttachPoint,
    priority: u32,
) -> Result<()> {
    let object = ObjectBuilder::default().name(name)?.open_memory(object)?.load()?;
    let map = object.maps().next().expect("the program has one map");
    let program = object.progs().next().expect("the program has one entry");
    for (interface, value) in known {
        map.update(&interface.to_ne_bytes(), &value, MapFlags::ANY)?;
        attach(program.as_fd(), interface, way, priority)?;
    }
    Ok(())
}

/// A plain structure of the program's, with no padding and no invalid values.
trait Plain: Copy {}
impl Plain for PortSettings {}
impl Plain for GroupConfig {}
impl Plain for RawGroup {}
impl Plain for Place {}

fn bytes_of<T: Plain>(value: &T) -> &[u8] {
    // SAFETY: plain data of that size.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }
}

fn of_bytes<T: Plain>(bytes: &[u8]) -> T {
    assert_eq!(bytes.len(), size_of::<T>(), "program and loader disagree");
    // SAFETY: plain data, of which every value is valid.
    unsafe {
        let mut value: T = zeroed();
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), std::ptr::from_mut(&mut value).cast(), size_of::<T>());
        value
    }
}

fn read<T: Plain>(map: &MapHandle, key: u32, flags: MapFlags) -> Result<T> {
    let found = map.lookup(&key.to_ne_bytes(), flags)?;
    Ok(of_bytes(&found.expect("an array has every entry")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_ports_than_a_group_has_are_refused() {
        let settings = PortSettings {
            bytes_per_second: 12_500_000,
            limit_bytes: 64 << 10,
            ecn_bytes: 0,
            mtu_bytes: 1514,
            burst_bytes: 0,
        };
        let ports = (0..=PORTS_PER_GROUP as u32).map(|interface| (interface, settings)).collect();
        let refused = Switch::build(&[Group { ports, shared_bytes: 0, alpha: 0.0 }]).err().unwrap();
        assert!(refused.to_string().contains("17 ports share a buffer"), "{refused}");
    }
}
