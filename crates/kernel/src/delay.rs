//! Delay lines: frames of one interface are written to another after a fixed time. The other way takes no time.
//!
//! This takes the place of netem, which not every kernel has. One thread serves all lines of a lab. It reads frames from packet
//! sockets (packet(7)) and writes each at the time of its arrival, by the kernel's timestamp, plus the delay. The
//! lateness of each is counted, because a busy machine delays the thread, and then the measurement is not valid.
//! Senders must compute checksums themselves ([`checksums_off`]): a packet socket gives frames as they are.
//!
//! A line delays what a switch sends to a host, and not what the host sends: those frames the kernel passes on itself
//! (`bpf/pass.bpf.c`). So the thread has a frame once on its way, and behind the queue of the switch's port, which sends no
//! faster than its link. Where many hosts send to one at once, their frames would come to the thread by all their links together.

use crate::switch::attach_with;
use libbpf_rs::TC_INGRESS;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::io::{self, Error};
use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

static PASS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/pass.bpf.o"));
/// Nothing else is attached to the interfaces of a line.
const PRIORITY: u32 = 1;
/// Width of a bucket of the lateness histogram, in nanoseconds.
pub const BUCKET_NS: u64 = 20_000;
/// 10 ms; the last bucket holds all that was later.
const BUCKETS: usize = 512;
/// Longest frame: an MTU of 9,000 and Ethernet's header, with a tag.
const FRAME_BYTES: usize = 9100;
/// Frames read from one socket before the others have a turn, and before what is due is written.
const READ_AT_ONCE: usize = 64;
/// Of a socket, so that nothing is lost while the thread waits for a CPU: 80 ms at 400 Mbit/s, as the kernel counts buffers.
const SOCKET_BYTES: libc::c_int = 8 << 20;
/// If the machine's clock has moved by so much against the steady one since it was read last, it was set, and the
/// kernel's timestamps are not used.
const SET_NS: i64 = 10_000_000;
/// linux/if_packet.h
const PACKET_IGNORE_OUTGOING: libc::c_int = 23;
/// linux/ethtool.h
const ETHTOOL_STXCSUM: u32 = 0x17;
const STOP: u64 = u64::MAX;
const TIMER: u64 = u64::MAX - 1;

/// What all lines have counted since they began.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Counted {
    /// Frames written.
    pub frames: u64,
    /// Frames lost because a line or a socket was full.
    pub dropped: u64,
    /// Frames that an interface did not take: its link is cut.
    pub refused: u64,
    /// Sum over all frames, in nanoseconds after the time at which each was due.
    pub late_ns: u64,
    pub late_ns_max: u64,
    /// Frames by lateness, [`BUCKET_NS`] a bucket; the last has all that were later.
    pub late: Vec<u64>,
    pub bucket_ns: u64,
}

struct Counters {
    frames: AtomicU64,
    dropped: AtomicU64,
    refused: AtomicU64,
    late_ns: AtomicU64,
    late_ns_max: AtomicU64,
    late: [AtomicU64; BUCKETS],
}

impl Counters {
    fn new() -> Counters {
        let zero = || AtomicU64::new(0);
        Counters {
            frames: zero(),
            dropped: zero(),
            refused: zero(),
            late_ns: zero(),
            late_ns_max: zero(),
            late: std::array::from_fn(|_| zero()),
        }
    }

    fn wrote(&self, late_ns: u64) {
        self.frames.fetch_add(1, Relaxed);
        self.late_ns.fetch_add(late_ns, Relaxed);
        self.late_ns_max.fetch_max(late_ns, Relaxed);
        self.late[((late_ns / BUCKET_NS) as usize).min(BUCKETS - 1)].fetch_add(1, Relaxed);
    }
}

/// Delay lines that run until this is dropped.
pub struct Delays {
    counters: Arc<Counters>,
    lines: Arc<Vec<Line>>,
    stop: OwnedFd,
    thread: Option<thread::JoinHandle<()>>,
    /// A process forked from this one has no such thread to wait for.
    pid: u32,
}

impl Delays {
    /// Joins pairs of interfaces, by their indexes in the network namespace of the calling thread: the one towards a host, and
    /// the one towards a switch.
    ///
    /// # Arguments
    /// * `delay`: from the arrival of a frame for the host until it is written.
    /// * `frames_max`: most that a line may hold; what comes then is lost and counted.
    ///
    /// # Errors
    /// Not privileged, an interface that does not exist, or no thread can be started.
    pub fn start(pairs: &[(u32, u32)], delay: Duration, frames_max: usize) -> io::Result<Delays> {
        // As long as the interfaces live the kernel passes on what comes from hosts.
        let others = pairs.iter().map(|(host, switch)| (*host, switch.to_ne_bytes().to_vec()));
        attach_with(PASS, "mission_pass", others, TC_INGRESS, PRIORITY)
            .map_err(|error| Error::other(format!("{error:#}")))?;
        let made = pairs.iter().map(|(host, switch)| -> io::Result<Line> {
            // Protocol 0: nothing comes in.
            Ok(Line { from_switch: packet_socket(*switch, libc::ETH_P_ALL)?, to_host: packet_socket(*host, 0)? })
        });
        let lines = Arc::new(made.collect::<io::Result<Vec<_>>>()?);
        let counters = Arc::new(Counters::new());
        // SAFETY: plain system calls; what they give is owned by nobody else.
        let (stop, timer, events) = unsafe {
            (
                owned(libc::eventfd(0, libc::EFD_CLOEXEC))?,
                owned(libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_CLOEXEC | libc::TFD_NONBLOCK))?,
                owned(libc::epoll_create1(libc::EPOLL_CLOEXEC))?,
            )
        };
        watch(&events, &stop, STOP)?;
        watch(&events, &timer, TIMER)?;
        for (number, line) in lines.iter().enumerate() {
            watch(&events, &line.from_switch, number as u64)?;
        }
        let all = Lines {
            counters: counters.clone(),
            queues: lines.iter().map(|_| VecDeque::new()).collect(),
            lines: lines.clone(),
            timer,
            events,
            delay_ns: delay.as_nanos() as u64,
            frames_max,
            due: BinaryHeap::new(),
            number: 0,
            armed_ns: 0,
            ahead_ns: clock_ns(libc::CLOCK_REALTIME) as i64 - clock_ns(libc::CLOCK_MONOTONIC) as i64,
            spare: Vec::new(),
            scratch: vec![0; FRAME_BYTES],
        };
        let thread = thread::Builder::new().name("lab-delay".into()).spawn(move || all.run())?;
        Ok(Delays { counters, lines, stop, thread: Some(thread), pid: std::process::id() })
    }

    /// What was counted so far.
    pub fn counted(&self) -> Counted {
        let own = &self.counters;
        let lost: u64 = self.lines.iter().map(|line| u64::from(lost(&line.from_switch))).sum();
        own.dropped.fetch_add(lost, Relaxed);
        Counted {
            frames: own.frames.load(Relaxed),
            dropped: own.dropped.load(Relaxed),
            refused: own.refused.load(Relaxed),
            late_ns: own.late_ns.load(Relaxed),
            late_ns_max: own.late_ns_max.load(Relaxed),
            late: own.late.iter().map(|count| count.load(Relaxed)).collect(),
            bucket_ns: BUCKET_NS,
        }
    }
}

impl Drop for Delays {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            return;
        }
        let one = 1u64;
        // SAFETY: an open descriptor, and eight bytes, as eventfd(2) wants them.
        unsafe { libc::write(self.stop.as_raw_fd(), std::ptr::from_ref(&one).cast(), size_of::<u64>()) };
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Has an interface's TCP and UDP compute checksums itself, in the network namespace of the calling thread.
///
/// # Errors
/// Not privileged, or there is no such interface.
pub fn checksums_off(interface: &str) -> io::Result<()> {
    #[repr(C)]
    struct Value {
        command: u32,
        data: u32,
    }
    let mut value = Value { command: ETHTOOL_STXCSUM, data: 0 };
    // SAFETY: the structures outlive the call, and the name is cut to leave its final zero.
    unsafe {
        let socket = owned(libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0))?;
        let mut request: libc::ifreq = zeroed();
        for (to, from) in request.ifr_name[..libc::IFNAMSIZ - 1].iter_mut().zip(interface.bytes()) {
            *to = from as libc::c_char;
        }
        request.ifr_ifru.ifru_data = std::ptr::from_mut(&mut value).cast();
        checked(libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL, &mut request))?;
    }
    Ok(())
}

/// Sockets of a delay line.
struct Line {
    from_switch: OwnedFd,
    to_host: OwnedFd,
}

/// What the thread has.
struct Lines {
    counters: Arc<Counters>,
    lines: Arc<Vec<Line>>,
    timer: OwnedFd,
    events: OwnedFd,
    delay_ns: u64,
    frames_max: usize,
    /// Of each line, in the order of arrival.
    queues: Vec<VecDeque<Vec<u8>>>,
    /// When the frames are due, a number that orders those of one moment, and their line.
    due: BinaryHeap<Reverse<(u64, u64, usize)>>,
    number: u64,
    /// What the timer is set to; 0: nothing.
    armed_ns: u64,
    /// The machine's clock, before the steady one.
    ahead_ns: i64,
    /// Memory of frames that were written.
    spare: Vec<Vec<u8>>,
    /// What is read next comes here first: a frame in a queue takes no more memory than it is long.
    scratch: Vec<u8>,
}

impl Lines {
    fn run(mut self) {
        // A queue must not stall while a program computes; if real-time priority is not allowed, the lateness shows it.
        // SAFETY: a plain system call on this thread.
        unsafe {
            let priority = libc::sched_param { sched_priority: 1 };
            libc::sched_setscheduler(0, libc::SCHED_FIFO, &priority);
        }
        // A frame is never due before the one that came before it: a clock that was set must not reorder them.
        let mut latest = vec![0u64; self.lines.len()];
        // SAFETY: plain data of the kernel's.
        let mut events: [libc::epoll_event; 64] = unsafe { zeroed() };
        loop {
            // SAFETY: the events outlive the call, which writes at most as many.
            let count =
                unsafe { libc::epoll_wait(self.events.as_raw_fd(), events.as_mut_ptr(), events.len() as i32, -1) };
            for event in &events[..count.max(0) as usize] {
                match event.u64 {
                    STOP => return,
                    TIMER => {
                        let mut times = 0u64;
                        // SAFETY: eight bytes, as timerfd_create(2) gives them.
                        unsafe { libc::read(self.timer.as_raw_fd(), std::ptr::from_mut(&mut times).cast(), 8) };
                        self.armed_ns = 0;
                    }
                    number => self.read(number as usize, &mut latest[number as usize]),
                }
            }
            self.write_due();
            self.arm();
        }
    }

    /// Takes what has come to a line.
    fn read(&mut self, line: usize, latest: &mut u64) {
        let now_ns = clock_ns(libc::CLOCK_MONOTONIC);
        let ahead_ns = clock_ns(libc::CLOCK_REALTIME) as i64 - now_ns as i64;
        let was_set = (ahead_ns - self.ahead_ns).abs() > SET_NS;
        self.ahead_ns = ahead_ns;
        for _ in 0..READ_AT_ONCE {
            let Some((len, stamp_ns)) = receive(&self.lines[line].from_switch, &mut self.scratch) else { return };
            if self.queues[line].len() >= self.frames_max {
                self.counters.dropped.fetch_add(1, Relaxed);
                continue;
            }
            let mut frame = self.spare.pop().unwrap_or_default();
            frame.clear();
            frame.extend_from_slice(&self.scratch[..len]);
            // However long ago that was: a thread that did not run meanwhile is late by as much.
            let came_ns = if was_set || stamp_ns == 0 { now_ns } else { (stamp_ns as i64 - ahead_ns) as u64 };
            *latest = (came_ns + self.delay_ns).max(*latest);
            self.due.push(Reverse((*latest, self.number, line)));
            self.number += 1;
            self.queues[line].push_back(frame);
        }
    }

    fn write_due(&mut self) {
        while let Some(Reverse((due_ns, _, line))) = self.due.peek().copied() {
            let now_ns = clock_ns(libc::CLOCK_MONOTONIC);
            if due_ns > now_ns {
                return;
            }
            self.due.pop();
            let frame = self.queues[line].pop_front().expect("a frame for each time");
            // SAFETY: an open socket, and memory of that length.
            let sent = unsafe {
                let socket = self.lines[line].to_host.as_raw_fd();
                libc::send(socket, frame.as_ptr().cast(), frame.len(), libc::MSG_DONTWAIT)
            };
            if sent >= 0 {
                self.counters.wrote(now_ns - due_ns);
            } else if matches!(Error::last_os_error().raw_os_error(), Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM))
            {
                self.counters.dropped.fetch_add(1, Relaxed);
            } else {
                self.counters.refused.fetch_add(1, Relaxed);
            }
            self.spare.push(frame);
        }
    }

    /// Sets the timer to when the next frame is due.
    fn arm(&mut self) {
        let Some(Reverse((due_ns, ..))) = self.due.peek() else { return };
        if *due_ns == self.armed_ns {
            return;
        }
        self.armed_ns = *due_ns;
        // SAFETY: plain data of the kernel's, which outlives the call.
        unsafe {
            let mut time: libc::itimerspec = zeroed();
            time.it_value.tv_sec = (due_ns / 1_000_000_000) as libc::time_t;
            time.it_value.tv_nsec = (due_ns % 1_000_000_000) as libc::c_long;
            let (timer, absolute) = (self.timer.as_raw_fd(), libc::TFD_TIMER_ABSTIME);
            libc::timerfd_settime(timer, absolute, &time, std::ptr::null_mut());
        }
    }
}

/// The length of a frame, and when it came by the machine's clock, in nanoseconds; 0: unknown. `None`: there is none.
fn receive(socket: &OwnedFd, frame: &mut [u8]) -> Option<(usize, u64)> {
    #[repr(align(8))]
    struct Control([u8; 64]);
    let mut control = Control([0; 64]);
    // SAFETY: all that the message points to outlives the call; what follows reads what the kernel has written there.
    unsafe {
        let mut part = libc::iovec { iov_base: frame.as_mut_ptr().cast(), iov_len: frame.len() };
        let mut message: libc::msghdr = zeroed();
        message.msg_iov = &mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = control.0.len();
        let len = libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_DONTWAIT);
        if len < 0 {
            return None;
        }
        let header = libc::CMSG_FIRSTHDR(&message);
        if header.is_null() || (*header).cmsg_type != libc::SCM_TIMESTAMPNS {
            return Some((len as usize, 0));
        }
        let stamp: libc::timespec = std::ptr::read_unaligned(libc::CMSG_DATA(header).cast());
        Some((len as usize, stamp.tv_sec as u64 * 1_000_000_000 + stamp.tv_nsec as u64))
    }
}

/// A socket that reads what comes in by an interface of this protocol (linux/if_ether.h; 0: nothing), and writes to it.
fn packet_socket(interface: u32, protocol: libc::c_int) -> io::Result<OwnedFd> {
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: plain system calls; addresses and options outlive them. Bound before it gets a protocol, so that nothing of
    // another interface comes in between.
    unsafe {
        let socket = owned(libc::socket(libc::AF_PACKET, kind, 0))?;
        set(&socket, libc::SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)?;
        set(&socket, libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 1)?;
        set(&socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, SOCKET_BYTES)?;
        set(&socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, SOCKET_BYTES)?;
        let mut address: libc::sockaddr_ll = zeroed();
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = (protocol as u16).to_be();
        address.sll_ifindex = interface as i32;
        let len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        checked(libc::bind(socket.as_raw_fd(), std::ptr::from_ref(&address).cast(), len))?;
        Ok(socket)
    }
}

/// Frames that the kernel could not keep for a socket since this was last asked.
fn lost(socket: &OwnedFd) -> u32 {
    // SAFETY: plain data of the kernel's, and its size.
    unsafe {
        let mut statistics: libc::tpacket_stats = zeroed();
        let mut len = size_of::<libc::tpacket_stats>() as libc::socklen_t;
        let (level, name) = (libc::SOL_PACKET, libc::PACKET_STATISTICS);
        let to = std::ptr::from_mut(&mut statistics).cast();
        let status = libc::getsockopt(socket.as_raw_fd(), level, name, to, &mut len);
        if status == 0 { statistics.tp_drops } else { 0 }
    }
}

fn set(socket: &OwnedFd, level: libc::c_int, name: libc::c_int, value: libc::c_int) -> io::Result<()> {
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: an open socket, and a value of that size.
    checked(unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, std::ptr::from_ref(&value).cast(), len) })?;
    Ok(())
}

fn watch(events: &OwnedFd, descriptor: &OwnedFd, number: u64) -> io::Result<()> {
    let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: number };
    // SAFETY: open descriptors, and an event that outlives the call.
    checked(unsafe { libc::epoll_ctl(events.as_raw_fd(), libc::EPOLL_CTL_ADD, descriptor.as_raw_fd(), &mut event) })?;
    Ok(())
}

fn clock_ns(clock: libc::clockid_t) -> u64 {
    // SAFETY: plain data of the kernel's, which outlives the call.
    unsafe {
        let mut time: libc::timespec = zeroed();
        libc::clock_gettime(clock, &mut time);
        time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
    }
}

fn checked(status: libc::c_int) -> io::Result<libc::c_int> {
    if status < 0 { Err(Error::last_os_error()) } else { Ok(status) }
}

/// # Safety
/// Nobody else owns the descriptor.
unsafe fn owned(descriptor: libc::c_int) -> io::Result<OwnedFd> {
    checked(descriptor)?;
    // SAFETY: open, and the caller's.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lateness_is_counted_by_buckets() {
        let counters = Counters::new();
        for late_ns in [0, 19_999, 20_000, 30_000_000] {
            counters.wrote(late_ns);
        }
        let counted: Vec<u64> = counters.late.iter().map(|count| count.load(Relaxed)).collect();
        assert_eq!((counted[0], counted[1], counted[BUCKETS - 1]), (2, 1, 1));
        assert_eq!(counters.late_ns_max.load(Relaxed), 30_000_000);
    }

    #[test]
    fn an_interface_that_is_not_there_is_refused() {
        assert!(Delays::start(&[(u32::MAX >> 1, u32::MAX >> 1)], Duration::from_millis(1), 16).is_err());
        assert!(checksums_off("no-such-one").is_err());
    }
}
