//! A cluster in virtual time: Mission Controller, hosts, Throttle Controllers and the coordination of a broadcast,
//! under all kinds of faults, with a check after every step.
//!
//! A seed decides all of it: how many hosts and processes there are, jobs, weights, delays of messages, connections that
//! break, processes that are stopped and go on, or that leave, and changes of priority and budget. A seed that fails is
//! printed as a command that repeats it.
//!
//! `VIRTUAL_SEEDS=1000000` runs more than the usual ten thousand, `VIRTUAL_SEED=7` one. `VIRTUAL_HOSTS=10000` drives so
//! many hosts in place of a thousand.

mod broadcast;
mod checks;
mod world;

use std::sync::atomic::{AtomicU64, Ordering};

const SEEDS: u64 = 10_000;
/// A tenth of what `make long` drives: that takes 38 s on one thread, more than all other tests in Rust.
const HOSTS: u64 = 1_000;

// What core itself must not do: read how many seeds are wanted, and say what was done.
#[allow(clippy::disallowed_methods)]
fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text}: use a number")))
}

#[allow(clippy::disallowed_macros)]
fn say(text: &str) {
    println!("{text}");
}

/// Runs every seed, on as many threads as there are CPUs.
fn seeds(what: &str, run: impl Fn(u64) -> u64 + Sync) {
    if let Some(seed) = number("VIRTUAL_SEED") {
        run(seed);
        return;
    }
    let (count, next, steps) = (number("VIRTUAL_SEEDS").unwrap_or(SEEDS), AtomicU64::new(0), AtomicU64::new(0));
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let seed = next.fetch_add(1, Ordering::Relaxed)
                    && seed < count
                {
                    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(seed)));
                    let Ok(done) = done else {
                        next.store(count, Ordering::Relaxed);
                        panic!(
                            "seed {seed} fails; repeat it with: VIRTUAL_SEED={seed} cargo test --release -p mission-core \
                             --test virtual_cluster {what}"
                        );
                    };
                    steps.fetch_add(done, Ordering::Relaxed);
                }
            });
        }
    });
    say(&format!("{what}: {count} seeds, {} steps", steps.into_inner()));
}

#[test]
fn hosts_share_their_slots_and_every_byte_arrives_once() {
    seeds("hosts_share_their_slots_and_every_byte_arrives_once", |seed| world::World::new(seed).run());
}

/// The state machines own nothing of the machine that they run on, so a simulator drives as many as it wants.
#[test]
fn a_data_centre_of_hosts_is_driven_in_one_process() {
    let hosts = number("VIRTUAL_HOSTS").unwrap_or(HOSTS);
    let steps = world::World::of(7, Some(hosts as usize)).run();
    say(&format!("{hosts} hosts: {steps} steps"));
}

#[test]
fn receivers_of_a_broadcast_get_every_piece_from_somebody_who_has_it() {
    seeds("receivers_of_a_broadcast_get_every_piece_from_somebody_who_has_it", broadcast::run);
}
