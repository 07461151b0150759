//! Probes: synthetic data, sent to learn how the network treats it.

use crate::carrier::{self, Ask, Context, End};
use crate::checksum;
use crate::object::ObjectId;
use mission_core::defaults::{ECN_PROBE_BYTES, RTO_MIN_US};
use mission_core::ecn::Seen;
use mission_core::flight::{Leg, Reach};
use mission_core::host::fetches::Fault;
use mission_core::types::{Encryption, Transport};
use std::net::SocketAddr;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, LazyLock, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// The one object that every server has; random names never collide with it.
pub const OBJECT: ObjectId = ObjectId([0; 16]);
/// Time limit of a probe, from the first connection to the last byte.
const PROBE_TIME: Duration = Duration::from_secs(10);
/// Connections of the senders; none once the probe is over.
type Streams = Mutex<Option<Vec<Arc<dyn End>>>>;

/// The last request: its answer has the counts of all before it.
const LAST_BYTES: usize = 1;

static ZEROS: [u8; ECN_PROBE_BYTES as usize] = [0; ECN_PROBE_BYTES as usize];
static CHECKSUMS: LazyLock<Vec<u64>> = LazyLock::new(|| checksum::of_blocks(&ZEROS));

/// The first `len` bytes of the object and the checksums of their blocks, if it has so many.
pub fn first(start: u64, len: u64) -> Option<(&'static [u8], Vec<u64>)> {
    let bytes = ZEROS.get(..usize::try_from(len).ok()?).filter(|bytes| start == 0 && !bytes.is_empty())?;
    let checksums = if bytes.len() == ZEROS.len() { CHECKSUMS.clone() } else { checksum::of_blocks(bytes) };
    Some((bytes, checksums))
}

/// Has the senders send at the same time, by DCTCP, and reports what happened to their packets.
///
/// # Errors
/// One of them cannot be reached, or does not send.
pub fn ecn(senders: &[SocketAddr], context: &Context) -> Result<Seen, Fault> {
    let (streams, (done, ends)) = (Mutex::new(Some(Vec::new())), mpsc::channel());
    let end = Instant::now() + PROBE_TIME;
    let all = thread::scope(|scope| {
        for sender in senders {
            let (streams, done) = (&streams, done.clone());
            scope.spawn(move || done.send(one(*sender, context, streams)));
        }
        drop(done);
        let mut all = Vec::new();
        let result = loop {
            match ends.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(Ok(seen)) => all.push(seen),
                Ok(Err(fault)) => break Err(fault),
                Err(RecvTimeoutError::Disconnected) => break Ok(all),
                Err(RecvTimeoutError::Timeout) => {
                    let (late, of, time) = (senders.len() - all.len(), senders.len(), PROBE_TIME.as_secs());
                    break Err(Fault::Connection(format!(
                        "{late} of {of} senders did not end their probe in {time} s"
                    )));
                }
            }
        };
        // A thread that waits for a sender that trickles would wait for ever.
        let streams = streams.lock().expect("no panic while held").take();
        streams.into_iter().flatten().for_each(|stream| stream.end());
        result
    })?;
    let sum = |sum: Seen, own: Seen| Seen {
        marks: sum.marks + own.marks,
        lost: sum.lost + own.lost,
        without: sum.without + own.without,
    };
    Ok(all.into_iter().fold(Seen::default(), sum))
}

fn one(sender: SocketAddr, context: &Context, streams: &Streams) -> Result<Seen, Fault> {
    let leg = Leg {
        transport: Transport::Dctcp,
        reach: Reach::Anywhere,
        encryption: Encryption::None,
        congestion_control: Some(Transport::Dctcp.name().into()),
        rto_min_us: Some(RTO_MIN_US),
        subflows: None,
        reason: String::new(),
        except: None,
    };
    let carrier = carrier::carrier(leg.transport).expect("every transport of byte streams has one");
    let mut connection = carrier.connect(sender, &leg, context)?;
    match streams.lock().expect("no panic while held").as_mut() {
        Some(streams) => streams.push(connection.watch().0),
        None => return Err(Fault::Connection("the probe is over".into())),
    }
    for len in [ECN_PROBE_BYTES as usize, LAST_BYTES] {
        connection.ask(&Ask { object: OBJECT, part: 0, start: 0, transfer: None }, len as u64)?;
        connection.receive(&mut vec![0; len]).map_err(|broken| broken.fault)?;
    }
    let told = connection.sender();
    // Without ECN it changes itself to another congestion control.
    let without = u64::from(told.congestion_control != Transport::Dctcp.name());
    Ok(Seen { marks: told.marks.into(), lost: told.retransmits.into(), without })
}
