//! Bytes that mean nothing, sent to learn what the network does with them.

use crate::carrier::{self, Ask, Context};
use crate::checksum;
use crate::object::ObjectId;
use mission_core::defaults::{ECN_PROBE_BYTES, RTO_MIN_US};
use mission_core::ecn::Seen;
use mission_core::flight::{Leg, Reach};
use mission_core::host::fetches::Fault;
use mission_core::types::{Encryption, Transport};
use std::net::SocketAddr;
use std::sync::LazyLock;
use std::thread;

/// The one object that every server has; random names never meet it.
pub const OBJECT: ObjectId = ObjectId([0; 16]);
/// Asked for at last: its answer tells what became of all before it.
const LAST_BYTES: usize = 1;

static ZEROS: [u8; ECN_PROBE_BYTES as usize] = [0; ECN_PROBE_BYTES as usize];
static CHECKSUMS: LazyLock<Vec<u64>> = LazyLock::new(|| checksum::of_blocks(&ZEROS));

/// The first `len` bytes of the object and the checksums of their blocks, if it has so many.
pub fn first(start: u64, len: u64) -> Option<(&'static [u8], Vec<u64>)> {
    let bytes = ZEROS.get(..usize::try_from(len).ok()?).filter(|bytes| start == 0 && !bytes.is_empty())?;
    let checksums = if bytes.len() == ZEROS.len() { CHECKSUMS.clone() } else { checksum::of_blocks(bytes) };
    Some((bytes, checksums))
}

/// Has the senders send at once, by DCTCP, and says what became of their packets.
///
/// # Errors
/// One of them cannot be reached, or does not send.
pub fn ecn(senders: &[SocketAddr], context: &Context) -> Result<Seen, Fault> {
    let all = thread::scope(|scope| {
        let asked: Vec<_> = senders.iter().map(|sender| scope.spawn(|| one(*sender, context))).collect();
        asked.into_iter().map(|asked| asked.join().expect("it does not panic")).collect::<Result<Vec<_>, _>>()
    })?;
    let sum = |sum: Seen, own: Seen| Seen {
        marks: sum.marks + own.marks,
        lost: sum.lost + own.lost,
        without: sum.without + own.without,
    };
    Ok(all.into_iter().fold(Seen::default(), sum))
}

fn one(sender: SocketAddr, context: &Context) -> Result<Seen, Fault> {
    let leg = Leg {
        transport: Transport::Dctcp,
        reach: Reach::Anywhere,
        encryption: Encryption::None,
        congestion_control: Some(Transport::Dctcp.name().into()),
        rto_min_us: Some(RTO_MIN_US),
        subflows: None,
        reason: String::new(),
    };
    let carrier = carrier::carrier(leg.transport).expect("every transport of byte streams has one");
    let mut connection = carrier.connect(sender, &leg, context)?;
    for len in [ECN_PROBE_BYTES as usize, LAST_BYTES] {
        connection.ask(&Ask { object: OBJECT, part: 0, start: 0 }, len as u64)?;
        connection.receive(&mut vec![0; len]).map_err(|broken| broken.fault)?;
    }
    let told = connection.sender();
    // Without ECN it changes itself to another congestion control.
    let without = u64::from(told.congestion_control != Transport::Dctcp.name());
    Ok(Seen { marks: told.marks.into(), lost: told.retransmits.into(), without })
}
