use super::*;
use crate::pattern::Asked;
use crate::policy::external::Counts;
use crate::shares;
use crate::types::{Demands, Encryption, Transport};

fn handled(mission: &mut MissionController, now: Time, event: Event) -> Vec<Command> {
    let mut commands = Vec::new();
    mission.handle(now, event, &mut commands);
    commands
}
fn controller(policy: &str) -> MissionController {
    let environment = Environment { carriers: vec![Transport::Tcp, Transport::Tls], ..Environment::default() };
    MissionController::new(policy, FlowsPerHost::Fixed(10), environment).unwrap()
}

fn transfer(job: &str) -> TransferId {
    TransferId { job: job.into(), from: "map".into(), to: "reduce".into() }
}

fn progress(job: &str, asked_bytes: u64, served_bytes: u64) -> Event {
    let (worker, waits_for) = ("w".into(), BTreeMap::new());
    Event::Progress { worker, transfer: transfer(job), asked_bytes, served_bytes, moved: false, waits_for, over: false }
}

/// Flows of ten, by job, if the last command sends new shares.
fn flows(commands: &[Command]) -> Vec<(String, u32)> {
    let Some(Command::Shares(Standing { shares, .. })) = commands.last() else { return Vec::new() };
    let weights: Vec<f64> = shares.iter().map(|share| share.weight).collect();
    shares.iter().map(|share| share.job.to_string()).zip(shares::split(10, &weights)).collect()
}

#[test]
fn shares_follow_the_jobs_that_are_active() {
    let mut mission = controller("fifo");
    let mut now = Time(0);
    let mut at = |event| {
        now = now + defaults::WEIGHTS_APART;
        handled(&mut mission, now, event)
    };
    assert_eq!(flows(&at(progress("one", 100, 0))), [("one".into(), 10)]);
    assert_eq!(flows(&at(progress("two", 100, 0))), [("one".into(), 7), ("two".into(), 3)]);
    assert!(at(progress("two", 100, 50)).is_empty(), "nothing changed");
    assert_eq!(flows(&at(progress("one", 100, 100))), [("two".into(), 10)]);
}

#[test]
fn what_comes_and_goes_at_once_is_weighed_once() {
    let mut mission = controller("fair");
    assert_eq!(handled(&mut mission, Time(0), progress("one", 100, 0)).len(), 2);
    assert!(handled(&mut mission, Time(1), progress("two", 100, 0)).is_empty());
    assert!(handled(&mut mission, Time(2), progress("three", 100, 0)).is_empty());
    // Any later event, once the time has come.
    let later = Time(0) + defaults::WEIGHTS_APART;
    assert_eq!(flows(&handled(&mut mission, later, Event::Tick)).len(), 3);
}

#[test]
fn a_worker_that_left_keeps_no_job_active() {
    let mut mission = controller("fair");
    handled(&mut mission, Time(0), progress("one", 100, 40));
    handled(&mut mission, Time(0), progress("two", 100, 0));
    handled(&mut mission, Time(0), Event::WorkerLeft { worker: "w".into() });
    assert!(mission.status().iter().all(|job| !job.active));
    assert_eq!(mission.status()[0].transfers[0].served_bytes, 40);
}

#[test]
fn a_broadcast_doubles_the_weight_of_its_job_while_it_is_active() {
    let mut mission = controller("performance-centric");
    handled(&mut mission, Time(0), progress("shuffles", 1, 0));
    handled(&mut mission, Time(0), progress("broadcasts", 1, 0));
    let mut commands = Vec::new();
    for (at, receiver) in [(100_000_000, "r0"), (200_000_000, "r1")] {
        let asked = Asked { receiver: receiver.into(), objects: 1, object: "o".into(), part: 0, parts: 1, whole: true };
        commands = handled(&mut mission, Time(at), Event::Asked { transfer: transfer("broadcasts"), asked });
    }
    assert_eq!(flows(&commands), [("shuffles".into(), 3), ("broadcasts".into(), 7)]);
}

#[test]
fn a_job_whose_encryption_cannot_be_had_is_refused() {
    let mut mission = controller("fair");
    let demands = Demands { encrypt: Encryption::Authenticated, transport: None };
    let spec = JobSpec { demands, ..JobSpec::named("secret".into()) };
    let commands = handled(&mut mission, Time(0), Event::JobArrived { spec, admitted: false });
    assert!(matches!(&commands[0], Command::Refuse { reason, .. } if reason.contains("TLS")));
    // Sent once, and not again whenever plans are computed.
    let joined = |worker: &str| Event::WorkerJoined {
        worker: worker.into(),
        host: "h".into(),
        address: worker.into(),
        environment: Environment::default(),
    };
    handled(&mut mission, Time(0), joined("one"));
    let again = handled(&mut mission, Time(0), joined("another"));
    assert!(!again.iter().any(|command| matches!(command, Command::Refuse { .. })), "{again:?}");
}

#[test]
fn priority_0_is_bad_input() {
    let spec = JobSpec { priority: 0.0, ..JobSpec::named("j".into()) };
    let said = handled(&mut controller("priority"), Time(0), Event::JobArrived { spec, admitted: false });
    assert!(matches!(&said[..], [Command::Invalid { why }] if why.contains("above 0")), "{said:?}");
}

#[test]
fn plans_are_sent_once_and_again_when_the_environment_changes() {
    let mut mission = controller("fair");
    let spec = JobSpec::named("j".into());
    assert_eq!(handled(&mut mission, Time(0), Event::JobArrived { spec: spec.clone(), admitted: false }).len(), 1);
    assert!(handled(&mut mission, Time(0), Event::JobArrived { spec, admitted: false }).is_empty());
    let environment =
        Environment { carriers: vec![Transport::Tcp, Transport::Mptcp], interfaces: 2, ..Environment::default() };
    let (worker, address) = ("w".into(), "w:1".into());
    let joined = Event::WorkerJoined { worker, host: "h".into(), address, environment };
    let commands = handled(&mut mission, Time(0), joined);
    assert!(matches!(&commands[0], Command::Plan { plan, .. } if plan.legs[0].transport == Transport::Mptcp));
}

#[test]
fn an_external_policy_is_asked_and_what_makes_no_sense_leaves_the_last_weights() {
    let mut mission = controller("python:mine");
    for job in ["a", "b"] {
        handled(&mut mission, Time(0), progress(job, 10, 0));
    }
    let weights = |mission: &MissionController| mission.shares.iter().map(|share| share.weight).collect::<Vec<_>>();
    let commands = handled(&mut mission, Time(2_000_000_000), Event::Tick);
    let Some(Command::Weigh { transfers }) = commands.last().cloned() else { panic!("{commands:?}") };
    assert_eq!(weights(&mission), [0.5, 0.5], "until it has answered");
    let said = |counts: &[(&str, f64)]| {
        let counts = counts.iter().map(|(job, count)| (JobId::from(*job), *count)).collect();
        Event::Weighed { asked: transfers.clone(), counts: Ok(Counts::Jobs(counts)) }
    };
    let commands = handled(&mut mission, Time(2_000_000_000), said(&[("a", 3.0), ("b", 1.0)]));
    assert!(matches!(&commands[..], [Command::Weights { .. }, Command::Shares(_)]), "{commands:?}");
    assert_eq!(weights(&mission), [0.75, 0.25]);
    for nonsense in [
        said(&[("a", 1.0)]),
        said(&[("a", f64::NAN), ("b", 1.0)]),
        said(&[("a", 0.0), ("b", 1.0)]),
        Event::Weighed { asked: transfers.clone(), counts: Err("it raised KeyError".into()) },
    ] {
        handled(&mut mission, Time(2_000_000_000), nonsense);
        assert!(mission.policy_error().is_some_and(|why| why.contains("python:mine")));
        assert_eq!(weights(&mission), [0.75, 0.25]);
    }
}

/// They were those of the jobs with an active transfer: one that had none began anew, with the mean of the others.
#[test]
fn the_weights_of_one_external_policy_stay_until_the_next_has_answered_for_idle_jobs_too() {
    let mut mission = controller("python:mine");
    for job in ["a", "b"] {
        handled(&mut mission, Time(0), progress(job, 10, 0));
    }
    let commands = handled(&mut mission, Time(2_000_000_000), Event::Tick);
    let Some(Command::Weigh { transfers }) = commands.last().cloned() else { panic!("{commands:?}") };
    let counts = Counts::Jobs(BTreeMap::from([("a".into(), 3.0), ("b".into(), 1.0)]));
    handled(&mut mission, Time(2_000_000_000), Event::Weighed { asked: transfers, counts: Ok(counts) });
    handled(&mut mission, Time(3_000_000_000), progress("b", 10, 10));
    handled(&mut mission, Time(3_000_000_000), Event::Policy { policy: "python:another".into() });
    handled(&mut mission, Time(4_000_000_000), progress("b", 20, 10));
    let weights: Vec<f64> = mission.shares.iter().map(|share| share.weight).collect();
    assert_eq!(weights, [0.75, 0.25]);
}
