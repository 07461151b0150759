//! What makes two processes of one host, one cluster and one user.

use crate::object::to_hex;
use mission_core::units::{BadQuantity, parse_rate_bits_per_sec};
use std::collections::BTreeSet;
use std::io;
use std::os::fd::AsRawFd;

/// Names the rate of a host's link to its processes, where its drivers do not know.
const LINK_RATE: &str = "MISSION_LINK_RATE";

/// The host that this process is on: its network namespace, on this boot of this machine. All namespaces of a machine
/// share its name and `/dev/shm`, so neither distinguishes hosts (FACTS).
///
/// # Errors
/// There is no `/proc`.
pub fn host_id() -> io::Result<String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let namespace = std::fs::read_link("/proc/self/ns/net")?;
    let inode: String = namespace.to_string_lossy().chars().filter(char::is_ascii_digit).collect();
    Ok(format!("{}-{inode}", boot.trim().split('-').next().unwrap_or_default()))
}

/// A name for a cluster that is unique, derived from its secret: others can see it, and learn nothing from it.
pub fn cluster_name(secret: &[u8]) -> String {
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, &[b"mission-control cluster ", secret].concat());
    to_hex(&digest.as_ref()[..8])
}

/// Name of an abstract Unix socket of this cluster: it exists once in each network namespace.
pub fn socket_name(cluster: &str) -> String {
    format!("mission-control-{cluster}")
}

/// The user on the other end of a Unix socket. A direct system call: a peer of another process namespace has the number
/// 0, which rustix takes for an error.
pub fn uid_of_peer(socket: &impl AsRawFd) -> Option<u32> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: an open socket, and room of the size that is given.
    let status = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut peer).cast(), &mut len)
    };
    (status == 0).then_some(peer.uid)
}

pub fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Interfaces of this network namespace that carry IPv4 or IPv6 now, loopback not counted. The kernel is asked, because
/// `/sys/class/net` shows the namespace in which it was mounted.
pub fn interfaces() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut first = std::ptr::null_mut();
    // SAFETY: room for one pointer.
    if unsafe { libc::getifaddrs(&mut first) } != 0 {
        return names;
    }
    let mut next = first;
    while !next.is_null() {
        // SAFETY: an entry of the list, which is freed below.
        let entry = unsafe { &*next };
        let running = (libc::IFF_UP | libc::IFF_RUNNING) as u32;
        let carries = entry.ifa_flags & running == running && entry.ifa_flags & libc::IFF_LOOPBACK as u32 == 0;
        // SAFETY: where there is an address it has a family.
        let family = unsafe { entry.ifa_addr.as_ref() }.map(|address| i32::from(address.sa_family));
        if carries && matches!(family, Some(libc::AF_INET | libc::AF_INET6)) {
            // SAFETY: every entry has a name that ends with a zero.
            let name = unsafe { std::ffi::CStr::from_ptr(entry.ifa_name) };
            names.insert(name.to_string_lossy().into_owned());
        }
        next = entry.ifa_next;
    }
    // SAFETY: the list that getifaddrs made.
    unsafe { libc::freeifaddrs(first) };
    names
}

/// Bytes that this host's [`interfaces`] have sent since they were made; 0 if that is unknown. Those without an
/// address, such as the parts of a bond, would be counted twice. Of this network namespace, which `/sys` need not show.
pub fn sent_bytes() -> u64 {
    let (text, own) = (std::fs::read_to_string("/proc/thread-self/net/dev").unwrap_or_default(), interfaces());
    let interfaces = text.lines().filter_map(|line| line.split_once(':')).filter(|(name, _)| own.contains(name.trim()));
    // Eight numbers of what came, then of what went, bytes first.
    interfaces.filter_map(|(_, counts)| counts.split_whitespace().nth(8)?.parse::<u64>().ok()).sum()
}

/// Bits per second that this host's interfaces receive together: from `MISSION_LINK_RATE` (`10Gbit/s`), else from the
/// drivers. Only drivers of devices count: a veth always reports 10 Gbit/s. `None`: unknown.
///
/// # Errors
/// `MISSION_LINK_RATE` is not a rate.
pub fn link_rate() -> io::Result<Option<u64>> {
    if let Ok(told) = std::env::var(LINK_RATE) {
        let wrong = |error: BadQuantity| io::Error::new(io::ErrorKind::InvalidInput, format!("{LINK_RATE}: {error}"));
        return parse_rate_bits_per_sec(&told).map(Some).map_err(wrong);
    }
    // A driver that does not know reports -1.
    let megabits = |name: String| {
        let folder = std::path::Path::new("/sys/class/net").join(name);
        let believed = folder.join("device").exists() || folder.join("bonding").exists();
        let speed = std::fs::read_to_string(folder.join("speed")).ok().filter(|_| believed)?;
        speed.trim().parse().ok()
    };
    let known: Option<Vec<u64>> = interfaces().into_iter().map(megabits).collect();
    Ok(known.filter(|known| !known.is_empty()).map(|is_empty| is_empty.iter().sum::<u64>() * 1_000_000))
}
