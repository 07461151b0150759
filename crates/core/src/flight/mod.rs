//! Flight Controllers: the pure half of every transport, and the choice between them.
//! Design: docs/explanation/design-control.md, "Plans and patterns".
//!
//! A Flight Controller decides whether it can carry what a job demands from one host to another: it returns a [`Leg`],
//! or the reason why not. A plan lists the legs that are available between some hosts of the cluster; a receiver uses
//! the first one that is available to each of its senders. A new transport is one file here, one line in
//! [`FLIGHT_CONTROLLERS`], and its Carrier in `crates/transport`.

mod dctcp;
mod ictcp;
mod mptcp;
mod shm;
mod tcp;
mod tls;

use crate::defaults;
use crate::types::{Demands, Encryption, Transport};
use serde::{Deserialize, Serialize};

/// What a host can do: always measured, never configured.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(default)]
pub struct Environment {
    /// Transports that it has Carriers for.
    pub carriers: Vec<Transport>,
    /// Network interfaces that carry traffic.
    pub interfaces: u32,
    /// Rate of its link; `None`: unknown.
    pub link_bits_per_sec: Option<u64>,
    /// Time dilation: how many times slower this network is than the modelled one; `None`: not such a lab.
    #[serde(default)]
    pub slow_motion: Option<u32>,
    /// Whether ECN marks arrive there, with the evidence ([`crate::ecn`]); `None`: unknown.
    pub ecn: Option<(bool, String)>,
    /// Congestion controls that it may use.
    pub congestion_controls: Vec<String>,
    /// The engine's own channel is encrypted and authenticated, so keys may travel over it.
    pub engine_tls: bool,
    /// The engine encrypts all of its messages, so the data plane has to encrypt, too, whatever a job demands.
    pub requires_encryption: bool,
}

/// Where a leg may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reach {
    SameHost,
    Anywhere,
}

/// One way to carry a transfer, with a readable reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leg {
    pub transport: Transport,
    pub reach: Reach,
    pub encryption: Encryption,
    /// `None`: whatever the host's default is.
    pub congestion_control: Option<String>,
    /// Minimum retransmission timeout to request.
    pub rto_min_us: Option<u32>,
    /// Multipath TCP: how many subflows one connection shall have. A fetch uses a single connection to each source.
    #[serde(default)]
    pub subflows: Option<u32>,
    pub reason: String,
    /// Why this leg is not available between all hosts of the cluster; `None`: it is.
    #[serde(default)]
    pub except: Option<String>,
}

impl Leg {
    /// Whether a connection of this leg can be used for the other leg: reasons do not matter.
    pub fn serves(&self, other: &Leg) -> bool {
        let of = |leg: &Leg| (leg.transport, leg.reach, leg.encryption, leg.rto_min_us, leg.subflows);
        of(self) == of(other) && self.congestion_control == other.congestion_control
    }
}

/// What hosts need to carry a transfer: the first leg that is available to a source is used. If it fails, the fallback
/// to the next is recorded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlightPlan {
    #[serde(default)]
    pub demands: Demands,
    pub legs: Vec<Leg>,
    /// Most bytes that a slot carries before it is granted again.
    pub chunk_bytes: u64,
    /// Transports that were considered and rejected, with the reason.
    pub refused: Vec<(Transport, String)>,
}

/// The pure half of a transport.
pub trait FlightController: Sync {
    fn transport(&self) -> Transport;
    /// A leg that carries from a host like `source` to one like `receiver`, or the reason why there is none.
    fn leg(&self, demands: &Demands, receiver: &Environment, source: &Environment) -> Result<Leg, String>;
}

impl FlightPlan {
    /// Bytes that a slot of `receiver` carries before it is granted again: whole blocks, at least one, and on a slow
    /// link so few that all slots become free within [`defaults::ROUND`].
    pub fn chunk_at(&self, receiver: &Environment) -> u64 {
        let Some(rate) = receiver.link_bits_per_sec else { return self.chunk_bytes };
        let round = defaults::ROUND * receiver.slow_motion.unwrap_or(1);
        let slot_bytes = rate as f64 / 8.0 * round.as_secs_f64() / f64::from(defaults::FLOWS_PER_HOST);
        let blocks = (slot_bytes as u64 / defaults::BLOCK_BYTES).max(1);
        (blocks * defaults::BLOCK_BYTES).min(self.chunk_bytes)
    }

    /// The legs that are available from `source` to `receiver`, best first; all legs if nothing is known of the hosts.
    pub fn between(&self, receiver: &Environment, source: &Environment) -> Vec<Leg> {
        let holds = |leg: &Leg| {
            let controller = FLIGHT_CONTROLLERS.iter().find(|controller| controller.transport() == leg.transport)?;
            let own = fits(*controller, &self.demands, receiver, source).ok()?;
            Some(Leg { subflows: own.subflows, encryption: own.encryption, ..leg.clone() })
        };
        let legs: Vec<Leg> = self.legs.iter().filter_map(holds).collect();
        if legs.iter().any(|leg| leg.reach == Reach::Anywhere) { legs } else { self.legs.clone() }
    }
}

/// The leg of a Flight Controller between two hosts, both of which have its Carrier.
fn fits(
    controller: &dyn FlightController,
    demands: &Demands,
    receiver: &Environment,
    source: &Environment,
) -> Result<Leg, String> {
    let transport = controller.transport();
    if [receiver, source].iter().any(|host| !host.carriers.contains(&transport)) {
        return Err(format!("not every host can carry {}", transport.name()));
    }
    controller.leg(demands, receiver, source)
}

pub use dctcp::has_dctcp;

/// In order of preference (docs/explanation/transports.md): same host, two paths, ECN; the rest only if demanded, or
/// as the last resort.
pub const FLIGHT_CONTROLLERS: &[&dyn FlightController] =
    &[&shm::Shm, &mptcp::Mptcp, &dctcp::Dctcp, &tls::Tls, &ictcp::Ictcp, &tcp::Tcp];

/// Chooses the transports of a job's transfers; `hosts` has one host of each kind. What the job demands must be
/// available between all of them; anything else is used where it is available.
///
/// # Errors
/// The job is refused: one line that names what is missing. Demanded encryption is never dropped.
pub fn choose(demands: &Demands, hosts: &[Environment]) -> Result<FlightPlan, String> {
    let required = hosts.iter().any(|host| host.requires_encryption).then_some(Encryption::Authenticated);
    let demands = Demands { encrypt: demands.encrypt.max(required.unwrap_or_default()), ..*demands };
    if let Some(contradiction) = contradiction(&demands) {
        return Err(contradiction);
    }
    let chunk_bytes = defaults::CHUNK_BYTES;
    let mut plan = FlightPlan { demands, legs: Vec::new(), chunk_bytes, refused: Vec::new() };
    for controller in FLIGHT_CONTROLLERS {
        let transport = controller.transport();
        if demands.transport.is_some_and(|wanted| wanted != transport) {
            continue;
        }
        let pairs = hosts.iter().flat_map(|receiver| hosts.iter().map(move |source| (receiver, source)));
        let (mut leg, mut except) = (None, None);
        for (receiver, source) in pairs {
            match fits(*controller, &demands, receiver, source) {
                Ok(own) => leg = leg.or(Some(own)),
                Err(reason) => except = except.or(Some(reason)),
            }
        }
        let must = demands.transport.is_some() || demands.encrypt != Encryption::None;
        match (leg, except) {
            // After one leg that reaches every host, the rest are fallbacks.
            (Some(leg), None) => plan.legs.push(leg),
            (Some(leg), except) if !must => plan.legs.push(Leg { except, ..leg }),
            (_, reason) => plan.refused.push((transport, reason.unwrap_or_else(|| "there are no hosts".into()))),
        }
    }
    // Shared memory alone cannot reach other hosts; that is accepted only if the job demands it.
    let reaches =
        |leg: &Leg| (leg.reach == Reach::Anywhere || demands.transport == Some(leg.transport)) && leg.except.is_none();
    if plan.legs.iter().any(reaches) {
        return Ok(plan);
    }
    let reasons: Vec<_> = plan.refused.iter().map(|(transport, why)| format!("{}: {why}", transport.name())).collect();
    Err(match demands.encrypt {
        Encryption::None => format!("no transport can carry this job ({})", reasons.join("; ")),
        _ => format!("the job demands encryption, and no encrypted transport is available ({})", reasons.join("; ")),
    })
}

/// Demands that exclude each other, in one line with a hint.
pub fn contradiction(demands: &Demands) -> Option<String> {
    let transport = demands.transport?;
    if demands.encrypt == Encryption::None || transport == Transport::Tls {
        return None;
    }
    let what = if transport == Transport::Shm { "memory".to_owned() } else { transport.name().to_owned() };
    Some(format!("plain {what} is not encrypted: leave the transport out, or demand tls"))
}

/// Rejects an unencrypted transport if the job demands encryption.
fn refuse_plain(demands: &Demands) -> Result<(), String> {
    match demands.encrypt {
        Encryption::None => Ok(()),
        _ => Err("the job demands encryption, and this transport does not encrypt".into()),
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

    #[test]
    fn slow_motion_leaves_chunks_as_they_are_on_the_link_that_it_stands_for() {
        let chunk = |rate, slow_motion| {
            let host = Environment { link_bits_per_sec: Some(rate), slow_motion, ..environment(&[Transport::Tcp]) };
            choose(&Demands::default(), std::slice::from_ref(&host)).unwrap().chunk_at(&host)
        };
        assert_eq!(chunk(1_000_000_000, None), chunk(5_000_000, Some(200)));
        assert!(chunk(5_000_000, None) < chunk(5_000_000, Some(200)));
    }

    #[test]
    fn slow_links_carry_small_chunks() {
        let chunk = |rate| {
            let host = Environment { link_bits_per_sec: rate, ..environment(&[Transport::Tcp]) };
            choose(&Demands::default(), std::slice::from_ref(&host)).unwrap().chunk_at(&host)
        };
        let rates = [None, Some(1_000_000), Some(20_000_000), Some(100_000_000), Some(10_000_000_000)];
        assert_eq!(rates.map(chunk), [4 << 20, 256 << 10, 256 << 10, 1 << 20, 4 << 20]);
    }

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
        let plan = choose(&Demands::default(), &[environment(&Transport::ALL)]).unwrap();
        assert_eq!(transports(&plan), ["shm", "tcp"]);
        assert_eq!(plan.legs[0].reach, Reach::SameHost);
        let refused: Vec<_> = plan.refused.iter().map(|(transport, _)| transport.name()).collect();
        assert_eq!(refused, ["mptcp", "dctcp", "tls", "ictcp"]);
    }

    #[test]
    fn ictcp_is_taken_where_it_is_demanded_and_every_host_knows_its_link() {
        let mut environment = environment(&Transport::ALL);
        let wanted = demands(Encryption::None, Some(Transport::Ictcp));
        assert!(choose(&wanted, &[environment.clone()]).unwrap_err().contains("MISSION_LINK_RATE"));
        environment.link_bits_per_sec = Some(1_000_000_000);
        assert_eq!(transports(&choose(&wanted, &[environment.clone()]).unwrap()), ["ictcp"]);
        assert_eq!(transports(&choose(&Demands::default(), &[environment.clone()]).unwrap()), ["shm", "tcp"]);
    }

    #[test]
    fn two_interfaces_choose_mptcp_and_measured_ecn_dctcp() {
        let mut environment = environment(&Transport::ALL);
        environment.interfaces = 2;
        environment.ecn = Some((true, "seen".into()));
        environment.congestion_controls = vec!["dctcp".into()];
        let plan = choose(&Demands::default(), &[environment.clone()]).unwrap();
        assert_eq!(transports(&plan), ["shm", "mptcp", "dctcp", "tcp"]);
        environment.ecn = Some((false, "packets were lost and none was marked".into()));
        assert_eq!(transports(&choose(&Demands::default(), &[environment.clone()]).unwrap()), ["shm", "mptcp", "tcp"]);
    }

    #[test]
    fn where_the_engine_encrypts_everything_no_leg_is_plain_whatever_a_job_demands() {
        let all = [Transport::Shm, Transport::Tcp, Transport::Tls];
        let encrypts = Environment { engine_tls: true, requires_encryption: true, ..environment(&all) };
        // One host that does not know it yet changes nothing.
        let hosts = [Environment { requires_encryption: false, ..encrypts.clone() }, encrypts];
        for encrypt in [Encryption::None, Encryption::Opportunistic, Encryption::Authenticated] {
            let plan = choose(&demands(encrypt, None), &hosts).unwrap();
            assert!(plan.legs.iter().all(|leg| leg.encryption == Encryption::Authenticated), "{plan:?}");
        }
        assert!(choose(&demands(Encryption::None, Some(Transport::Shm)), &hosts).is_err());
        let without = [Environment { engine_tls: false, ..hosts[1].clone() }];
        assert!(choose(&demands(Encryption::None, None), &without).is_err(), "and not plain either");
    }

    #[test]
    fn demanded_encryption_is_never_dropped() {
        let plain = environment(&[Transport::Tcp, Transport::Shm]);
        let refusal = choose(&demands(Encryption::Opportunistic, None), &[plain]).unwrap_err();
        assert!(refusal.contains("no encrypted transport is available"), "{refusal}");
        let without_engine_tls = environment(&[Transport::Tcp, Transport::Tls]);
        let refusal =
            choose(&demands(Encryption::Authenticated, None), std::slice::from_ref(&without_engine_tls)).unwrap_err();
        assert!(refusal.contains("TLS"), "{refusal}");
        let plan =
            choose(&demands(Encryption::Opportunistic, None), std::slice::from_ref(&without_engine_tls)).unwrap();
        assert_eq!(transports(&plan), ["tls"]);
    }

    #[test]
    fn encrypted_plain_memory_is_a_contradiction() {
        let refusal =
            choose(&demands(Encryption::Authenticated, Some(Transport::Shm)), &[environment(&Transport::ALL)]);
        assert!(refusal.unwrap_err().contains("plain memory is not encrypted"));
    }

    #[test]
    fn a_demanded_transport_that_is_missing_refuses_the_job() {
        let refusal = choose(&demands(Encryption::None, Some(Transport::Mptcp)), &[environment(&[Transport::Tcp])]);
        assert!(refusal.unwrap_err().contains("mptcp"));
    }
    #[test]
    fn one_host_that_is_different_takes_nothing_from_the_others() {
        let two = Environment { interfaces: 2, ..environment(&Transport::ALL) };
        let one = environment(&Transport::ALL);
        let plan = choose(&Demands::default(), &[two.clone(), one.clone()]).unwrap();
        assert_eq!(transports(&plan), ["shm", "mptcp", "tcp"]);
        assert_eq!(plan.legs[1].except.as_deref(), Some("a host has only one interface"));
        let names = |receiver, source| -> Vec<&str> {
            plan.between(receiver, source).iter().map(|leg| leg.transport.name()).collect()
        };
        assert_eq!(names(&two, &two), ["shm", "mptcp", "tcp"]);
        assert_eq!([names(&two, &one), names(&one, &two)], [["shm", "tcp"], ["shm", "tcp"]]);
        assert_eq!(plan.between(&two, &two)[1].subflows, Some(2));
        // Nothing is known of a sender: try the legs of most hosts.
        assert_eq!(names(&two, &Environment::default()), ["shm", "mptcp", "tcp"]);
        // What was demanded must hold everywhere.
        let without = environment(&[Transport::Tcp]);
        let demanded = demands(Encryption::None, Some(Transport::Mptcp));
        assert!(choose(&demanded, &[two.clone(), without]).unwrap_err().contains("not every host can carry mptcp"));
        assert!(choose(&demanded, &[two, one]).is_ok(), "it carries, if only on one path");
    }

    #[test]
    fn marks_are_a_matter_of_the_receiver() {
        let kernel = Environment { congestion_controls: vec!["dctcp".into()], ..environment(&Transport::ALL) };
        let marked = Environment { ecn: Some((true, "seen".into())), ..kernel.clone() };
        let plan = choose(&Demands::default(), &[kernel.clone(), marked.clone()]).unwrap();
        assert_eq!(transports(&plan), ["shm", "dctcp", "tcp"]);
        let first = |receiver, source| plan.between(receiver, source)[1].transport;
        assert_eq!([first(&marked, &kernel), first(&kernel, &marked)], [Transport::Dctcp, Transport::Tcp]);
    }
}
