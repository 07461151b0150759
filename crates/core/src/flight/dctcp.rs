//! DCTCP (RFC 8257): the tcp carrier with that congestion control, where ECN marks arrive end to end.

use super::{Environment, FlightController, Leg, Reach, reason_of_choice, refuse_plain};
use crate::defaults::RTO_MIN_US;
use crate::types::{Demands, Encryption, Transport};

pub struct Dctcp;

/// Whether a host can use DCTCP.
pub fn has_dctcp(environment: &Environment) -> bool {
    let allowed = environment.congestion_controls.iter().any(|name| name == Transport::Dctcp.name());
    allowed && environment.carriers.contains(&Transport::Dctcp)
}

impl FlightController for Dctcp {
    fn transport(&self) -> Transport {
        Transport::Dctcp
    }

    fn leg(&self, demands: &Demands, receiver: &Environment, source: &Environment) -> Result<Leg, String> {
        refuse_plain(demands)?;
        if !(has_dctcp(receiver) && has_dctcp(source)) {
            return Err("a host's kernel has no dctcp congestion control".into());
        }
        match &receiver.ecn {
            _ if demands.transport == Some(Transport::Dctcp) => {}
            Some((true, _)) => {}
            Some((false, why)) => return Err(format!("ECN marks do not arrive end to end: {why}")),
            None => return Err("it is not known whether ECN marks arrive end to end".into()),
        }
        Ok(Leg {
            transport: Transport::Dctcp,
            reach: Reach::Anywhere,
            encryption: Encryption::None,
            congestion_control: Some("dctcp".into()),
            rto_min_us: Some(RTO_MIN_US),
            subflows: None,
            except: None,
            reason: reason_of_choice(demands, Transport::Dctcp, "ECN marks arrive end to end"),
        })
    }
}
