//! Names of a host's arbiters; each contains a generation.

use std::collections::BTreeSet;

/// Generations from here on are a stranger's: no arbiter is replaced that often.
pub(super) const GENERATIONS: u64 = 1 << 40;
/// How many names of arbiters are tried in one election: a stranger may have taken some.
pub(super) const NAMES_MAX: usize = 8;

pub(super) fn name(key: &str, generation: u64) -> String {
    format!("{}{generation}", prefix(key))
}

fn prefix(key: &str) -> String {
    format!("{}-slots-", crate::host::socket_name(key))
}

/// Generations whose names are taken, highest first.
pub(super) fn generations(key: &str) -> Vec<u64> {
    let prefix = format!("@{}", prefix(key));
    let text = std::fs::read_to_string("/proc/thread-self/net/unix").unwrap_or_default();
    let names = text.lines().filter_map(|line| line.split_whitespace().last()?.strip_prefix(&prefix)?.parse().ok());
    let taken: BTreeSet<u64> = names.filter(|generation| *generation < GENERATIONS).collect();
    taken.into_iter().rev().collect()
}
