//! ICTCP: the tcp carrier; the receiver sets each sender's window by the free capacity of its link ([`crate::ictcp`]).
//!
//! Used only if a transfer demands it. By default, Mission Control limits the number of flows ([`crate::budget`]): that
//! needs no link rate, and works even with ports smaller than two segments per sender.

use super::{Environment, FlightController, Leg, Reach, reason_of_choice, refuse_plain};
use crate::defaults::RTO_MIN_US;
use crate::types::{Demands, Encryption, Transport};

pub struct Ictcp;

impl FlightController for Ictcp {
    fn transport(&self) -> Transport {
        Transport::Ictcp
    }

    fn leg(&self, demands: &Demands, receiver: &Environment, _: &Environment) -> Result<Leg, String> {
        refuse_plain(demands)?;
        if demands.transport != Some(Transport::Ictcp) {
            return Err("it is used only if a job demands it: limiting flows does more (--flows-per-host auto)".into());
        }
        if receiver.link_bits_per_sec.is_none() {
            return Err("a host does not know its link's rate: set MISSION_LINK_RATE=10Gbit/s for its workers".into());
        }
        Ok(Leg {
            transport: Transport::Ictcp,
            reach: Reach::Anywhere,
            encryption: Encryption::None,
            congestion_control: None,
            rto_min_us: Some(RTO_MIN_US),
            subflows: None,
            except: None,
            reason: reason_of_choice(demands, Transport::Ictcp, ""),
        })
    }
}
