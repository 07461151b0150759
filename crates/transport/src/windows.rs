//! The acting half of ICTCP: once per round trip reads from the kernel how many bytes each governed connection
//! received, and sets the receive windows that [`mission_core::ictcp`] chooses.
//!
//! The kernel never takes back a window that it has offered: what a connection offers before it is governed, 64 KiB, can
//! still come. And it forgets the limit of a socket when its buffer grows, or when its first full segments arrive: so
//! buffers are fixed, and limits are set each time.

use crate::{host, socket};
use mission_core::ictcp::{FlowId, Sample, Windows};
use mission_core::units::Time;
use socket2::SockRef;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::TcpStream;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Instant;

/// Receive buffer of a governed socket; the kernel limits it to `net.core.rmem_max`. A window is at most half of it:
/// enough for 10 Gbit/s over 800 us, or 85 us where that is the kernel's own 212,992.
const BUFFER_BYTES: usize = 2 << 20;

/// Governs the receive windows of one process: several on a host each grant all of the link's free capacity, and the
/// next sample shows the excess.
pub struct Governor(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    flows: BTreeMap<FlowId, Arc<TcpStream>>,
    next: FlowId,
    closing: bool,
}

/// A connection is governed until this is dropped.
pub struct Governed {
    id: FlowId,
    shared: Arc<Shared>,
}

impl Governor {
    /// Of an interface that can receive so many bits per second.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(bits_per_second: u64) -> io::Result<Governor> {
        let state = State { flows: BTreeMap::new(), next: 0, closing: false };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let own = shared.clone();
        let builder = thread::Builder::new().name("mission-windows".into()).stack_size(256 << 10);
        builder.spawn(move || own.run(bits_per_second))?;
        Ok(Governor(shared))
    }

    /// # Errors
    /// The socket is not a TCP connection.
    pub fn govern(&self, stream: Arc<TcpStream>) -> io::Result<Governed> {
        SockRef::from(&*stream).set_recv_buffer_size(BUFFER_BYTES)?;
        socket::set_receive_window(&stream, Windows::first(sample(&stream).mss))?;
        let mut state = self.0.state.lock().expect("no panic while held");
        let id = state.next;
        state.next += 1;
        state.flows.insert(id, stream);
        self.0.changed.notify_all();
        Ok(Governed { id, shared: self.0.clone() })
    }
}

impl Drop for Governor {
    fn drop(&mut self) {
        self.0.state.lock().expect("no panic while held").closing = true;
        self.0.changed.notify_all();
    }
}

impl Drop for Governed {
    fn drop(&mut self) {
        self.shared.state.lock().expect("no panic while held").flows.remove(&self.id);
    }
}

impl Shared {
    fn run(&self, bits_per_second: u64) {
        let mut windows = Windows::new(bits_per_second);
        let started = Instant::now();
        let interfaces = host::interfaces();
        let mut state = self.state.lock().expect("no panic while held");
        loop {
            let idle = |state: &mut State| state.flows.is_empty() && !state.closing;
            state = self.changed.wait_while(state, idle).expect("no panic while held");
            let look_at = Instant::now() + windows.period();
            while let left = look_at.saturating_duration_since(Instant::now())
                && !left.is_zero()
                && !state.closing
            {
                state = self.changed.wait_timeout(state, left).expect("no panic while held").0;
            }
            if state.closing {
                return;
            }
            let now = Time(started.elapsed().as_nanos() as u64);
            let samples = state.flows.iter().map(|(id, stream)| (*id, sample(stream))).collect();
            for (id, window) in windows.look(now, arrived(&interfaces), &samples) {
                // A connection that is gone is noticed by its own reader.
                let _ = socket::set_receive_window(&state.flows[&id], window);
            }
        }
    }
}

fn sample(stream: &TcpStream) -> Sample {
    let info = socket::tcp_info(stream);
    let rtt_us = if info.receiver_rtt_us > 0 { info.receiver_rtt_us } else { info.rtt_us };
    let rtt = std::time::Duration::from_micros(rtt_us.into());
    Sample { received: info.bytes_received, rtt, mss: info.mss.max(1) }
}

/// Bytes that this thread's network namespace has received over those of its interfaces that have an address, headers counted.
fn arrived(interfaces: &BTreeSet<String>) -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap_or_default();
    let received = |line: &str| {
        let (name, counts) = line.split_once(':')?;
        let bytes: u64 = counts.split_whitespace().next()?.parse().ok()?;
        interfaces.contains(name.trim()).then_some(bytes)
    };
    text.lines().filter_map(received).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::time::Duration;

    #[test]
    fn what_is_offered_follows_what_is_used_and_ends_with_the_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        let governor = Governor::start(1 << 40).unwrap();
        let governed = governor.govern(Arc::new(client.try_clone().unwrap())).unwrap();
        let first = socket::receive_window(&client).unwrap();
        // The link is never full, so a window that is used grows.
        let sender = thread::spawn(move || while server.write_all(&[0; 64 << 10]).is_ok() {});
        let deadline = Instant::now() + Duration::from_secs(20);
        let mut scratch = vec![0; 64 << 10];
        while socket::receive_window(&client).unwrap() <= 2 * first {
            client.read_exact(&mut scratch).unwrap();
            assert!(Instant::now() < deadline, "the window stays at {first} bytes");
        }
        drop(governed);
        assert!(governor.0.state.lock().unwrap().flows.is_empty());
        drop(client);
        sender.join().unwrap();
    }
}
