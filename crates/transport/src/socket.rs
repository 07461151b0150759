//! Sets options of a TCP socket, and reads back what the kernel has in force.

use socket2::SockRef;
use std::io;
use std::net::TcpStream;
use std::os::fd::AsRawFd;

/// Minimum retransmission timeout of one socket, in microseconds (linux/tcp.h, since 6.15).
const TCP_RTO_MIN_US: libc::c_int = 45;

/// Sets the congestion control and reads back which it is.
///
/// # Errors
/// This user may not use it, or the kernel does not have it.
pub fn set_congestion_control(stream: &TcpStream, name: &str) -> io::Result<()> {
    SockRef::from(stream).set_tcp_congestion(name.as_bytes())
}

/// For options that socket2 does not have.
fn set_option<T>(stream: &TcpStream, level: libc::c_int, option: libc::c_int, value: T) -> io::Result<()> {
    let len = size_of::<T>() as libc::socklen_t;
    // SAFETY: an open socket, and a value of the size that is given.
    let status = unsafe { libc::setsockopt(stream.as_raw_fd(), level, option, (&raw const value).cast(), len) };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The default of this host's sockets.
pub fn default_congestion_control() -> String {
    let read = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control");
    read.map_or_else(|_| "cubic".into(), |name| name.trim().to_owned())
}

pub fn congestion_control(stream: &TcpStream) -> String {
    let raw = SockRef::from(stream).tcp_congestion().unwrap_or_default();
    let end = raw.iter().position(|byte| *byte == 0).unwrap_or(raw.len());
    String::from_utf8_lossy(&raw[..end]).into_owned()
}

/// # Errors
/// The kernel does not have the option (before 6.15).
pub fn set_rto_min_us(stream: &TcpStream, value: u32) -> io::Result<()> {
    set_option(stream, libc::IPPROTO_TCP, TCP_RTO_MIN_US, value as libc::c_int)
}

/// Sets the socket's rate limit, in bits per second; TCP paces itself if the interface does not.
///
/// # Errors
/// The kernel refuses it.
pub fn set_pace(stream: &TcpStream, bits_per_second: u64) -> io::Result<()> {
    set_option(stream, libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE, bits_per_second / 8)
}

/// Sets the receive window, in bytes; the kernel never shrinks a window that it has offered.
///
/// # Errors
/// It is no TCP socket.
pub fn set_receive_window(stream: &TcpStream, bytes: u32) -> io::Result<()> {
    set_option(stream, libc::IPPROTO_TCP, libc::TCP_WINDOW_CLAMP, bytes.min(i32::MAX as u32) as libc::c_int)
}

/// Reads the window back: the kernel has a minimum. `None`: not a TCP socket.
pub fn receive_window(stream: &TcpStream) -> Option<u32> {
    option_u32(stream, libc::TCP_WINDOW_CLAMP)
}

/// Reads it back: the kernel rounds to its ticks. `None` if the option does not exist.
pub fn rto_min_us(stream: &TcpStream) -> Option<u32> {
    option_u32(stream, TCP_RTO_MIN_US)
}

fn option_u32(stream: &TcpStream, option: libc::c_int) -> Option<u32> {
    let mut value: libc::c_int = 0;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: an open socket, and room of the size that is given.
    let status =
        unsafe { libc::getsockopt(stream.as_raw_fd(), libc::IPPROTO_TCP, option, (&raw mut value).cast(), &mut len) };
    (status == 0).then_some(value as u32)
}

/// Subflows of a Multipath TCP connection; `None` where the socket is not one, or has fallen back to plain TCP.
pub fn mptcp_info(stream: &TcpStream) -> Option<u32> {
    // linux/mptcp.h: of `struct mptcp_info` the further subflows lie at 0, the flags at 8, all subflows (since 6.6) at 80.
    const SOL_MPTCP: libc::c_int = 284;
    const MPTCP_INFO: libc::c_int = 1;
    const FLAG_FALLBACK: u8 = 1;
    let mut info = [0u8; 256];
    let mut len = info.len() as libc::socklen_t;
    // SAFETY: an open socket, and room of the size that is given.
    let status =
        unsafe { libc::getsockopt(stream.as_raw_fd(), SOL_MPTCP, MPTCP_INFO, info.as_mut_ptr().cast(), &mut len) };
    if status != 0 || info[8] & FLAG_FALLBACK != 0 {
        return None;
    }
    Some(if len > 80 { u32::from(info[80]) } else { u32::from(info[0]) + 1 })
}

/// The fields of `struct tcp_info` that describe the state of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpInfo {
    /// Doublings of the timeout that are in force.
    pub backoff: u8,
    /// Segments in flight; of these lost, by the sender's estimate; and retransmitted.
    pub unacked: u32,
    pub lost: u32,
    pub retransmitted: u32,
    pub rtt_deviation_us: u32,
    pub ssthresh: u32,
    /// Recent delivery rate in bytes per second; 0 before Linux 4.9.
    pub delivery_rate: u64,
    /// Bytes that the peer has acknowledged.
    pub acked_bytes: u64,
    /// Retransmission timeout now, not the minimum.
    pub rto_us: u32,
    pub rtt_us: u32,
    /// As the receiving side sees it; 0: not known yet.
    pub receiver_rtt_us: u32,
    /// Payload of a full segment that the peer sends.
    pub mss: u32,
    pub bytes_received: u64,
    pub cwnd: u32,
    /// Segments retransmitted since the start; includes loss probes.
    pub retransmits: u32,
    /// Retransmission timeouts since the start; 0 before Linux 6.7, where the kernel does not count them.
    pub timeouts: u32,
    /// Segments that arrived, and of these the marked ones, as the peer reports; 0 before Linux 4.18.
    pub delivered: u32,
    pub delivered_ce: u32,
}

/// The kernel's counters; the libc header is older than the kernel, so the structure is read by offset (linux/tcp.h).
pub fn tcp_info(stream: &TcpStream) -> TcpInfo {
    let mut raw = [0u8; 256];
    let mut len = raw.len() as libc::socklen_t;
    // SAFETY: an open socket, and room of the size that is given; the kernel writes at most that much.
    let status = unsafe {
        libc::getsockopt(stream.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, raw.as_mut_ptr().cast(), &mut len)
    };
    if status != 0 {
        return TcpInfo::default();
    }
    let u32_at = |at: usize| u32::from_ne_bytes(raw[at..at + 4].try_into().expect("four bytes"));
    let u16_at = |at: usize| u16::from_ne_bytes(raw[at..at + 2].try_into().expect("two bytes"));
    let u64_at = |at: usize| u64::from_ne_bytes(raw[at..at + 8].try_into().expect("eight bytes"));
    TcpInfo {
        backoff: raw[4],
        unacked: u32_at(24),
        lost: u32_at(32),
        retransmitted: u32_at(36),
        rtt_deviation_us: u32_at(72),
        ssthresh: u32_at(76),
        acked_bytes: u64_at(120),
        delivery_rate: if len >= 168 { u64_at(160) } else { 0 },
        rto_us: u32_at(8),
        mss: u32_at(20),
        receiver_rtt_us: u32_at(92),
        bytes_received: u64_at(128),
        rtt_us: u32_at(68),
        cwnd: u32_at(80),
        retransmits: u32_at(100),
        delivered: if len >= 200 { u32_at(192) } else { 0 },
        delivered_ce: if len >= 200 { u32_at(196) } else { 0 },
        timeouts: if len >= 248 { u32::from(u16_at(240)) } else { 0 },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (client, listener.accept().unwrap().0)
    }

    #[test]
    fn reno_can_be_had_by_everyone_and_is_read_back() {
        let (client, _server) = pair();
        set_congestion_control(&client, "reno").unwrap();
        assert_eq!(congestion_control(&client), "reno");
        assert!(set_congestion_control(&client, "no-such").is_err());
    }

    #[test]
    fn the_kernel_tells_timers_of_a_connection_that_moved_something() {
        let (mut client, mut server) = pair();
        client.write_all(b"x").unwrap();
        server.read_exact(&mut [0]).unwrap();
        let info = tcp_info(&client);
        assert!(info.rto_us > 0 && info.cwnd > 0, "{info:?}");
    }
}
