//! TCP: always available.

use super::{Environment, FlightController, Leg, Reach, reason_of_choice, refuse_plain};
use crate::defaults::RTO_MIN_US;
use crate::types::{Demands, Encryption, Transport};

pub struct Tcp;

impl FlightController for Tcp {
    fn transport(&self) -> Transport {
        Transport::Tcp
    }

    fn leg(&self, demands: &Demands, _: &Environment, _: &Environment) -> Result<Leg, String> {
        refuse_plain(demands)?;
        Ok(Leg {
            transport: Transport::Tcp,
            reach: Reach::Anywhere,
            encryption: Encryption::None,
            congestion_control: None,
            rto_min_us: Some(RTO_MIN_US),
            subflows: None,
            except: None,
            reason: reason_of_choice(
                demands,
                Transport::Tcp,
                "the default: no faster transport is available at both ends",
            ),
        })
    }
}
