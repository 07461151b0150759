//! The control service in virtual time: replicas, a store with leases, and the adapters of clusters, while processes are
//! killed and stopped, the network between any two of them is cut, and the store is away.
//!
//! Checked after every step: no replica speaks for the service while another one has the leader's key; what a cluster
//! obeys never comes from an older leader than the last. Checked in the end, when all is well again: one leader, every
//! cluster has its weights, those of one island are the same for all of it, and no answered change is lost.
//!
//! `SERVICE_SEEDS=100000` runs more seeds than usual, `SERVICE_SEED=7` one.

mod world;

use world::World;

const SEEDS: u64 = 300;

// What core itself must not do: read how many seeds are wanted, and say what was done.
#[allow(clippy::disallowed_methods)]
fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text}: use a number")))
}

#[test]
#[allow(clippy::disallowed_macros)]
fn one_leads_and_nothing_answered_is_lost() {
    let seeds = match number("SERVICE_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("SERVICE_SEEDS").unwrap_or(SEEDS),
    };
    let (mut elections, mut answered) = (0, 0);
    for seed in seeds {
        let mut world = World::new(seed);
        let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| world.run()));
        assert!(ran.is_ok(), "repeat it with: SERVICE_SEED={seed} cargo test --release -p mission-core --test service");
        elections += world.elections;
        answered += world.drained.len();
    }
    println!("{elections} elections, {answered} changes answered");
    assert!(elections > 2 && answered > 0);
}
