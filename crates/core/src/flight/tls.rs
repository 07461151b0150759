//! TLS 1.3 over TCP: replaces TCPcrypt (RFC 8548), which is no longer maintained.

use super::{Environment, FlightController, Leg, Reach, reason_of_choice};
use crate::defaults::RTO_MIN_US;
use crate::types::{Demands, Encryption, Transport};

pub struct Tls;

impl FlightController for Tls {
    fn transport(&self) -> Transport {
        Transport::Tls
    }

    fn leg(&self, demands: &Demands, receiver: &Environment, source: &Environment) -> Result<Leg, String> {
        let engine_tls = receiver.engine_tls && source.engine_tls;
        let encryption = match (demands.encrypt, demands.transport) {
            (Encryption::None, Some(Transport::Tls)) if engine_tls => Encryption::Authenticated,
            (Encryption::None, Some(Transport::Tls)) => Encryption::Opportunistic,
            (Encryption::None, _) => return Err("the job does not ask for encryption".into()),
            (Encryption::Authenticated, _) if !engine_tls => {
                return Err(
                    "the engine's own channel is not TLS, and keys would travel over it in the clear: start the \
                            cluster with TLS, or ask for encrypt=\"opportunistic\""
                        .into(),
                );
            }
            (encrypt, _) => encrypt,
        };
        let kind = match encryption {
            Encryption::Authenticated => {
                "the job demands encryption: both ends authenticate by the cluster's certificates"
            }
            _ => "the job asks for opportunistic encryption: encrypted, not authenticated",
        };
        Ok(Leg {
            transport: Transport::Tls,
            reach: Reach::Anywhere,
            encryption,
            congestion_control: None,
            rto_min_us: Some(RTO_MIN_US),
            subflows: None,
            except: None,
            reason: reason_of_choice(demands, Transport::Tls, kind),
        })
    }
}
