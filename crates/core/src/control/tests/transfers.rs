//! What workers say of their transfers: each byte counts once, however often and in whatever order it is reported.

use super::*;
use crate::defaults::TRANSFERS_PER_JOB;
use crate::mission::Earlier;
use crate::random::SplitMix;

fn record(from: &str, started: f64, served: u64, over: bool) -> TransferReport {
    TransferReport {
        job: "job".into(),
        from: from.into(),
        to: "to".into(),
        asked_bytes: served,
        served_bytes: served,
        fetches: served,
        started,
        ended: started,
        over,
        ..TransferReport::default()
    }
}

impl World {
    fn reports(&mut self, worker: &str, number: u64, records: Vec<TransferReport>) {
        self.says(worker, WorkerReport { number, records, ..WorkerReport::default() });
    }

    /// Of each transfer: bytes as the Mission Controller counts them, and fetches as reports do.
    fn counted(&mut self) -> BTreeMap<String, (u64, u64)> {
        let job = self.controller.status(None).jobs.remove(0);
        let count =
            |own: status::TransferNow| (own.status.from.to_string(), (own.status.served_bytes, own.reported.fetches));
        job.transfers.into_iter().map(count).collect()
    }
}

fn world() -> World {
    let mut world = World::new(&["a", "b"]);
    world.admit("job", "client");
    world
}

#[test]
fn what_a_worker_forgets_stays_counted_and_what_it_moves_later_is_added() {
    let mut world = world();
    world.reports("a", 1, vec![record("map", 1.0, 10, false)]);
    world.reports("b", 1, vec![record("map", 1.0, 5, false)]);
    world.reports("a", 2, vec![record("map", 1.0, 10, true)]);
    world.reports("a", 2, vec![record("map", 1.0, 10, true)]);
    assert_eq!(world.counted()["map"], (15, 15), "it came twice");
    world.reports("a", 3, vec![record("map", 9.0, 7, false)]);
    assert_eq!(world.counted()["map"], (22, 22));
    // Late: sent before, over another way.
    world.reports("a", 1, vec![record("map", 1.0, 10, false)]);
    assert_eq!(world.counted()["map"], (22, 22));
    // Nobody has heard that this one is over.
    world.reports("a", 9, vec![record("map", 20.0, 1, false)]);
    assert_eq!(world.counted()["map"], (23, 23));
}

/// Reports come late, twice and out of order, and records begin anew.
#[test]
fn every_byte_counts_once() {
    /// Reports for which a record is quiet before it is forgotten; no report is as late.
    const QUIET: u64 = 4;
    let mut random = SplitMix(5);
    for _ in 0..200 {
        let mut world = world();
        let names = ["x", "y", "z"];
        let mut moved: BTreeMap<&str, u64> = BTreeMap::new();
        // The open record of each transfer: when it began, its bytes, and the report in which it changed last.
        let mut open: BTreeMap<&str, (u64, u64, u64)> = BTreeMap::new();
        let mut on_its_way: Vec<(u64, Vec<TransferReport>)> = Vec::new();
        for number in 1..80 + 2 * QUIET {
            for name in names {
                // At the end all are quiet.
                if number < 80 && random.next().is_multiple_of(6) {
                    let bytes = 1 + random.next() % 100;
                    *moved.entry(name).or_default() += bytes;
                    let own = open.entry(name).or_insert((number, 0, number));
                    (own.1, own.2) = (own.1 + bytes, number);
                }
            }
            let mut records = Vec::new();
            for name in names {
                let Some(&(began, bytes, last)) = open.get(name) else { continue };
                let over = number >= last + QUIET;
                if over || number <= last + 1 {
                    records.push(record(name, began as f64, bytes, over));
                }
                if over {
                    open.remove(name);
                }
            }
            on_its_way.push((number, records));
            on_its_way.retain(|(sent, records)| {
                let arrives = random.next().is_multiple_of(2) || number + 2 > sent + QUIET;
                if arrives {
                    world.reports("a", *sent, records.clone());
                }
                // Some are sent a second time.
                !(arrives && (!random.next().is_multiple_of(10) || number + 2 > sent + QUIET))
            });
        }
        for (sent, records) in on_its_way {
            world.reports("a", sent, records);
        }
        let expected = moved.iter().map(|(name, bytes)| (name.to_string(), (*bytes, *bytes))).collect();
        assert_eq!(world.counted(), expected);
    }
}

/// R3: a living job's finished transfers were kept for ever, each with every worker's report.
#[test]
fn a_job_that_lives_long_knows_its_last_transfers_and_the_sum_of_the_others() {
    let mut world = world();
    let all = TRANSFERS_PER_JOB as u64 + 500;
    for number in 0..all {
        for (worker, bytes) in [("a", 3), ("b", 4)] {
            let name = format!("map-{number}");
            world.reports(worker, 2 * number + 1, vec![record(&name, 1.0, bytes, false)]);
            world.reports(worker, 2 * number + 2, vec![record(&name, 1.0, bytes, true)]);
        }
    }
    // One of the first is under way again, and another only said.
    world.reports("a", 2 * all + 1, vec![TransferReport { asked_bytes: 50, ..record("map-3", 7.0, 0, false) }]);
    let job = world.controller.status(None).jobs.remove(0);
    assert_eq!(job.transfers.len(), TRANSFERS_PER_JOB + 1);
    assert!(job.transfers.iter().all(|own| *own.status.from != *"map-499"), "the oldest went");
    let earlier = Earlier { transfers: 500, asked_bytes: 3500, served_bytes: 3500 };
    assert_eq!((job.status.earlier, job.earlier_reported.unwrap().fetches), (earlier, 3500));
    assert_eq!(world.controller.held()["transfers"], TRANSFERS_PER_JOB + 1);
    // A job that is over leaves nothing.
    world.event(Event::Leave { job: "job".into(), client: "client".into() });
    world.pass(Duration::from_secs(60));
    assert!(!world.left().iter().any(|(what, _)| *what == "transfers"), "{:?}", world.left());
}
