//! Multipath TCP (RFC 8684): "selected when the host has more than one interface" (paper 001, table 4.5). What are flows to
//! other transports are subflows of one connection here (paper 001, 4.1.2).

use super::{Environment, FlightController, Leg, Reach, reason_of_choice, refuse_plain};
use crate::types::{Demands, Encryption, Transport};

pub struct Mptcp;

impl FlightController for Mptcp {
    fn transport(&self) -> Transport {
        Transport::Mptcp
    }

    fn leg(&self, demands: &Demands, receiver: &Environment, source: &Environment) -> Result<Leg, String> {
        refuse_plain(demands)?;
        let paths = receiver.interfaces.min(source.interfaces);
        if paths < 2 && demands.transport != Some(Transport::Mptcp) {
            return Err("a host has only one interface".into());
        }
        Ok(Leg {
            transport: Transport::Mptcp,
            reach: Reach::Anywhere,
            encryption: Encryption::None,
            congestion_control: None,
            // Multipath sockets have no such option (tried on Linux 6.18).
            rto_min_us: None,
            // As many as there are paths: more on one path would only compete with each other.
            subflows: Some(paths.max(1)),
            except: None,
            reason: reason_of_choice(demands, Transport::Mptcp, "both hosts have more than one interface"),
        })
    }
}
