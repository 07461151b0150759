//! Endpoints of one process as the processes of a host: the speaker works, dies, or is silent.

use crate::auth;
use crate::endpoint::Endpoint;
use crate::endpoint::tests::settings;
use crate::object::{ObjectId, to_hex};
use mission_core::control::{Message, WorkerReport};
use mission_core::host::fair::Level;
use mission_core::mission;
use mission_core::pattern::Asked;
use mission_core::shares::{FlowsPerHost, Share};
use mission_core::standing::Standing;
use mission_core::types::TransferId;
use std::thread;
use std::time::{Duration, Instant};

/// Longest wait for what takes milliseconds.
const SOON: Duration = Duration::from_secs(20);

struct Process {
    endpoint: Endpoint,
    version: u64,
}

impl Process {
    fn start(token: &[u8], standing: &Standing) -> Process {
        let endpoint = Endpoint::new(settings(token, 1 << 20, None)).unwrap();
        endpoint.joined(vec![mission::Command::Shares(standing.clone())], vec![], 0);
        Process { endpoint, version: 0 }
    }

    fn hear(&mut self, message: Message) {
        self.version += 1;
        assert_eq!(self.endpoint.hear(self.version, message).missing_after, None);
    }

    fn spoken_for_by(&mut self, speaker: &Process) {
        let speaker = Some(speaker.address());
        self.hear(Message { speaker, ..Message::default() });
    }

    fn address(&self) -> std::sync::Arc<str> {
        self.endpoint.address().to_string().into()
    }

    fn asks(&self, job: &str) {
        let transfer = TransferId { job: job.into(), from: "m".into(), to: "r".into() };
        let asked = Asked {
            receiver: "task".into(),
            objects: 1,
            object: ObjectId::random().to_string().into(),
            part: 0,
            parts: 1,
            whole: false,
        };
        self.endpoint.asks(transfer, asked);
    }

    fn report(&self) -> Option<WorkerReport> {
        self.endpoint.report(0.0, None)
    }
}

/// Reports that fetches began.
fn jobs(report: &WorkerReport) -> Vec<&str> {
    report.asked.iter().map(|asked| &*asked.transfer.job).collect()
}

fn standing(version: u64, jobs: u32) -> Standing {
    let share = |job: u32| Share { job: format!("job-{job}").into(), stages: None, weight: 1.0 / f64::from(jobs) };
    Standing {
        version,
        flows_per_host: FlowsPerHost::Fixed(4),
        level: Level::Groups,
        shares: (0..jobs).map(share).collect(),
    }
}

fn token() -> Vec<u8> {
    to_hex(&auth::random::<16>()).into_bytes()
}

/// Until it is so; what it gives then.
fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + SOON;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A speaker and two others, whose first reports have gone out.
fn host(token: &[u8]) -> (Process, Vec<Process>) {
    let all = standing(1, 1);
    let mut speaker = Process::start(token, &all);
    let own = speaker.address();
    speaker.hear(Message { speaker: Some(own), ..Message::default() });
    let mut others: Vec<Process> = (0..2).map(|_| Process::start(token, &all)).collect();
    others.iter_mut().for_each(|other| other.spoken_for_by(&speaker));
    (speaker, others)
}

/// Waits until this process's reports go to the speaker, and the speaker passes them on.
fn meet(speaker: &Process, other: &Process) {
    wait_for("it finds its speaker", || {
        other.asks("warm-up");
        let direct = other.report();
        let others = speaker.report().map(|report| report.others).unwrap_or_default();
        (direct.is_none() && others.iter().any(|(address, _)| *address == other.address())).then_some(())
    });
    // It is informed that all was passed on.
    wait_for("the speaker has said all", || speaker.report().is_none().then_some(()));
}

#[test]
fn one_says_what_all_have_to_say_and_passes_on_what_it_hears() {
    let token = token();
    let (mut speaker, others) = host(&token);
    others.iter().for_each(|other| meet(&speaker, other));
    for other in &others {
        other.asks("etl");
        assert_eq!(other.report(), None, "the speaker says it");
    }
    let mut heard = Vec::new();
    wait_for("the speaker has both", || {
        heard.extend(speaker.report().map(|report| report.others).unwrap_or_default());
        heard.retain(|(_, report)| jobs(report) != ["warm-up"]);
        (heard.len() == 2).then_some(())
    });
    for other in &others {
        let (_, report) = heard.iter().find(|(address, _)| *address == other.address()).expect("it is one of them");
        assert_eq!(jobs(report), ["etl"]);
    }
    // What has changed, and all of it.
    let second = standing(2, 3);
    for (version, command) in [
        (2, mission::Command::Shares(second.clone())),
        (3, mission::Command::SharesChanged(second.changes_to(&standing(3, 4)).unwrap())),
    ] {
        speaker.hear(Message { commands: vec![command], ..Message::default() });
        for other in &others {
            wait_for("the shares are in force", || (other.endpoint.in_force.version() == version).then_some(()));
        }
    }
    let weights = others[0].endpoint.fetcher.weights();
    assert_eq!(weights.len(), 4);
    assert!(weights.values().all(|weight| (weight - 0.25).abs() < 1e-9), "{weights:?}");
    assert_eq!(others[1].report(), None);
    let acknowledged = wait_for("it is said which shares are in force", || {
        speaker.report()?.others.into_iter().map(|(_, report)| report.shares).max()
    });
    assert_eq!(acknowledged, 3);
}

#[test]
fn what_a_speaker_keeps_for_too_long_goes_the_straight_way_and_nothing_is_lost_with_it() {
    let token = token();
    let (speaker, others) = host(&token);
    let other = &others[0];
    meet(&speaker, other);
    other.asks("etl");
    assert_eq!(other.report(), None);
    // It is not asked to report: its process hangs.
    let said = wait_for("it is said directly", || other.report());
    let own: Vec<&WorkerReport> = said.others.iter().map(|(_, report)| report).chain([&said]).collect();
    assert!(own.iter().any(|report| jobs(report) == ["etl"]), "{said:?}");
    assert!(said.others.iter().all(|(address, _)| *address == other.address()));
    // It continues, and is found again.
    meet(&speaker, other);
    other.asks("sort");
    assert_eq!(other.report(), None);
    drop(speaker);
    let said = wait_for("the connection is gone", || other.report());
    assert!(said.others.iter().any(|(_, report)| jobs(report) == ["sort"]), "{said:?}");
    other.asks("more");
    assert!(other.report().is_some(), "there is nobody to say it");
}

#[test]
fn another_may_speak_and_last_words_go_the_straight_way() {
    let token = token();
    let (mut speaker, mut others) = host(&token);
    meet(&speaker, &others[0]);
    let words = others[0].endpoint.report(0.0, Some("etl".into())).expect("they are said in order with all else");
    assert_eq!(words.last_of, Some("etl".into()));
    // The old speaker has another speaker from now on.
    let (next, other) = others.split_at_mut(1);
    let (next, other) = (&mut next[0], &mut other[0]);
    let address = next.address();
    next.hear(Message { speaker: Some(address), ..Message::default() });
    speaker.spoken_for_by(next);
    other.spoken_for_by(next);
    meet(next, &speaker);
    meet(next, other);
}

#[test]
fn whoever_does_not_know_the_token_neither_speaks_nor_hears() {
    let token = token();
    let (speaker, _others) = host(&token);
    let mut stranger = Process::start(b"another", &standing(1, 1));
    stranger.spoken_for_by(&speaker);
    thread::sleep(Duration::from_millis(200));
    stranger.asks("etl");
    assert!(stranger.report().is_some());
}
