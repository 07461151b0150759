//! Flight Controllers: the pure half of every transport, and the choice between them (DESIGN 4.3).
//!
//! A Flight Controller turns (demands, environment) into a [`Leg`] of a flight plan, or refuses with its reason. A new
//! transport is one file here, one line in [`FLIGHT_CONTROLLERS`], and its Carrier in `crates/transport`.

mod dctcp;
mod ictcp;
mod mptcp;
mod shm;
mod tcp;
mod tls;

use crate::defaults;
use crate::types::{Demands, Encryption, Transport};
use serde::{Deserialize, Serialize};

/// What the hosts of a cluster have in common, as measured and never as configured.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Environment {
    /// Transports whose Carriers every host has.
    pub carriers: Vec<Transport>,
    /// Network interfaces that carry traffic: the fewest of any host.
    pub interfaces: u32,
    /// Of the link of a host: the smallest; `None`: some host does not know its own.
    pub link_bits_per_sec: Option<u64>,
    /// Whether ECN marks arrive end to end, and why that is believed ([`crate::ecn`]); `None`: not known.
    pub ecn: Option<(bool, String)>,
    /// Congestion controls that every host may use.
    pub congestion_controls: Vec<String>,
    /// The engine's own channel is encrypted and authenticated, so keys may travel over it.
    pub engine_tls: bool,
}

/// Where a leg may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reach {
    SameHost,
    Anywhere,
}

/// One way to carry a transfer, with the reason in words that a person can read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leg {
    pub transport: Transport,
    pub reach: Reach,
    pub encryption: Encryption,
    /// `None`: whatever the host's default is.
    pub congestion_control: Option<String>,
    /// Minimum retransmission timeout to ask for.
    pub rto_min_us: Option<u32>,
    /// Of Multipath TCP: how many subflows one connection shall have. All that a fetch brings from one source takes that one
    /// connection.
    #[serde(default)]
    pub subflows: Option<u32>,
    pub reason: String,
}

/// What hosts need to know to carry a transfer: the first leg that reaches a source is used; what it does not deliver
/// is a recorded fallback to the next.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlightPlan {
    pub legs: Vec<Leg>,
    pub chunk_bytes: u64,
    /// What was considered and not taken, with the reason.
    pub refused: Vec<(Transport, String)>,
}

/// The pure half of a transport.
pub trait FlightController: Sync {
    fn transport(&self) -> Transport;
    /// A leg, or the reason why there is none.
    fn plan(&self, demands: &Demands, environment: &Environment) -> Result<Leg, String>;
}

pub use dctcp::has_dctcp;

/// In order of preference (DESIGN 4.3): same host, two paths, ECN; the rest only where demanded, or at last.
pub const FLIGHT_CONTROLLERS: &[&dyn FlightController] =
    &[&shm::Shm, &mptcp::Mptcp, &dctcp::Dctcp, &tls::Tls, &ictcp::Ictcp, &tcp::Tcp];

/// Chooses the transport of a job's transfers.
///
/// # Errors
/// The job is refused: one line that names what is missing. Encryption that was demanded is never dropped.
pub fn choose(demands: &Demands, environment: &Environment) -> Result<FlightPlan, String> {
    if let Some(contradiction) = contradiction(demands) {
        return Err(contradiction);
    }
    let mut plan = FlightPlan { legs: Vec::new(), chunk_bytes: defaults::CHUNK_BYTES, refused: Vec::new() };
    for controller in FLIGHT_CONTROLLERS {
        let transport = controller.transport();
        if demands.transport.is_some_and(|wanted| wanted != transport) {
            continue;
        }
        if !environment.carriers.contains(&transport) {
            plan.refused.push((transport, format!("not every host can carry {}", transport.name())));
            continue;
        }
        match controller.plan(demands, environment) {
            // After one leg that reaches everywhere, the rest are what a host falls back to.
            Ok(leg) => plan.legs.push(leg),
            Err(reason) => plan.refused.push((transport, reason)),
        }
    }
    // Memory alone would leave what lies on other hosts out of reach, unless just that was demanded.
    let reaches = |leg: &Leg| leg.reach == Reach::Anywhere || demands.transport == Some(leg.transport);
    if plan.legs.iter().any(reaches) {
        return Ok(plan);
    }
    let reasons: Vec<_> = plan.refused.iter().map(|(transport, why)| format!("{}: {why}", transport.name())).collect();
    Err(match demands.encrypt {
        Encryption::None => format!("no transport can carry this job ({})", reasons.join("; ")),
        _ => format!("encryption was demanded and cannot be had ({})", reasons.join("; ")),
    })
}

/// Demands that exclude each other, in one line that names the mend.
pub fn contradiction(demands: &Demands) -> Option<String> {
    let transport = demands.transport?;
    if demands.encrypt == Encryption::None || transport == Transport::Tls {
        return None;
    }
    let what = if transport == Transport::Shm { "memory".to_owned() } else { transport.name().to_owned() };
    Some(format!("plain {what} is not encrypted: leave the transport out, or demand tls"))
}

/// Why a plain transport is not taken.
fn refuse_plain(demands: &Demands) -> Result<(), String> {
    match demands.encrypt {
        Encryption::None => Ok(()),
        _ => Err("encryption was demanded, and this is plain".into()),
    }
}

fn reason_of_choice(demands: &Demands, own: Transport, otherwise: &str) -> String {
    match demands.transport {
        Some(transport) if transport == own => "required by the job".into(),
        _ => otherwise.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(carriers: &[Transport]) -> Environment {
        Environment { carriers: carriers.to_vec(), interfaces: 1, ..Environment::default() }
    }

    fn demands(encrypt: Encryption, transport: Option<Transport>) -> Demands {
        Demands { encrypt, transport }
    }

    fn transports(plan: &FlightPlan) -> Vec<&str> {
        plan.legs.iter().map(|leg| leg.transport.name()).collect()
    }

    #[test]
    fn tcp_is_what_is_left() {
        let plan = choose(&Demands::default(), &environment(&Transport::ALL)).unwrap();
        assert_eq!(transports(&plan), ["shm", "tcp"]);
        assert_eq!(plan.legs[0].reach, Reach::SameHost);
        let refused: Vec<_> = plan.refused.iter().map(|(transport, _)| transport.name()).collect();
        assert_eq!(refused, ["mptcp", "dctcp", "tls", "ictcp"]);
    }

    #[test]
    fn ictcp_is_taken_where_it_is_demanded_and_every_host_knows_its_link() {
        let mut environment = environment(&Transport::ALL);
        let wanted = demands(Encryption::None, Some(Transport::Ictcp));
        assert!(choose(&wanted, &environment).unwrap_err().contains("MISSION_LINK_RATE"));
        environment.link_bits_per_sec = Some(1_000_000_000);
        assert_eq!(transports(&choose(&wanted, &environment).unwrap()), ["ictcp"]);
        assert_eq!(transports(&choose(&Demands::default(), &environment).unwrap()), ["shm", "tcp"]);
    }

    #[test]
    fn two_interfaces_choose_mptcp_and_measured_ecn_dctcp() {
        let mut environment = environment(&Transport::ALL);
        environment.interfaces = 2;
        environment.ecn = Some((true, "seen".into()));
        environment.congestion_controls = vec!["dctcp".into()];
        let plan = choose(&Demands::default(), &environment).unwrap();
        assert_eq!(transports(&plan), ["shm", "mptcp", "dctcp", "tcp"]);
        environment.ecn = Some((false, "packets were lost and none was marked".into()));
        assert_eq!(transports(&choose(&Demands::default(), &environment).unwrap()), ["shm", "mptcp", "tcp"]);
    }

    #[test]
    fn demanded_encryption_is_never_dropped() {
        let plain = environment(&[Transport::Tcp, Transport::Shm]);
        let refusal = choose(&demands(Encryption::Opportunistic, None), &plain).unwrap_err();
        assert!(refusal.contains("cannot be had"), "{refusal}");
        let without_engine_tls = environment(&[Transport::Tcp, Transport::Tls]);
        let refusal = choose(&demands(Encryption::Authenticated, None), &without_engine_tls).unwrap_err();
        assert!(refusal.contains("TLS"), "{refusal}");
        let plan = choose(&demands(Encryption::Opportunistic, None), &without_engine_tls).unwrap();
        assert_eq!(transports(&plan), ["tls"]);
    }

    #[test]
    fn encrypted_plain_memory_is_a_contradiction() {
        let refusal = choose(&demands(Encryption::Authenticated, Some(Transport::Shm)), &environment(&Transport::ALL));
        assert!(refusal.unwrap_err().contains("plain memory is not encrypted"));
    }

    #[test]
    fn a_demanded_transport_that_is_missing_refuses_the_job() {
        let refusal = choose(&demands(Encryption::None, Some(Transport::Mptcp)), &environment(&[Transport::Tcp]));
        assert!(refusal.unwrap_err().contains("mptcp"));
    }
}
