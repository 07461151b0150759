//! Shared memory between processes of one host: one network namespace. Shares do not apply to it.

use super::{Environment, FlightController, Leg, Reach, reason_of_choice, refuse_plain};
use crate::types::{Demands, Encryption, Transport};

pub struct Shm;

impl FlightController for Shm {
    fn transport(&self) -> Transport {
        Transport::Shm
    }

    fn leg(&self, demands: &Demands, _: &Environment, _: &Environment) -> Result<Leg, String> {
        refuse_plain(demands)?;
        Ok(Leg {
            transport: Transport::Shm,
            reach: Reach::SameHost,
            encryption: Encryption::None,
            congestion_control: None,
            rto_min_us: None,
            subflows: None,
            except: None,
            reason: reason_of_choice(demands, Transport::Shm, "both ends are on one host"),
        })
    }
}
