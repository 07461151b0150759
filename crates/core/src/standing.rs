//! The shares in force, with their version, and the changes from one version to the next.
//!
//! Weights add up to 1, so each transfer that begins or ends changes all of them, most of them by the same factor. So a
//! message has this factor, and the weights that it does not give: if one of a thousand transfers begins, two numbers
//! cross the network.

use crate::host::fair::Level;
use crate::shares::{FlowsPerHost, Share};
use crate::types::{JobId, Stage};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// All shares, as of a version. `level`: whether jobs have the shares ([`Level::Groups`]) or transfers
/// ([`Level::Members`]).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Standing {
    /// Larger than that of all shares before; 0: of no version.
    #[serde(default)]
    pub version: u64,
    pub flows_per_host: FlowsPerHost,
    pub level: Level,
    pub shares: Vec<Share>,
}

/// The change from the shares of one version to those of a later one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SharesChanged {
    pub version: u64,
    /// Applies only to this version.
    pub after: u64,
    /// Every weight is multiplied by it, except those of `changed`.
    pub factor: f64,
    /// New ones, and those that the factor does not give.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub changed: Vec<Share>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gone: Vec<ShareOf>,
}

/// Who has a share: a job, or one of its transfers.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ShareOf {
    pub job: JobId,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stages: Option<(Stage, Stage)>,
}

/// Relative tolerance. Multiplying rounds by 1e-16; each change adds at most this error.
const CLOSE: f64 = 1e-12;
/// All shares are sent again this often, so that rounding errors stay below 1e-9 in total.
const ALL_EVERY: u64 = 1000;

impl ShareOf {
    fn of(share: &Share) -> ShareOf {
        ShareOf { job: share.job.clone(), stages: share.stages.clone() }
    }
}

impl Standing {
    /// The change from these to newer ones; `None`: all of them have to be sent.
    pub fn changes_to(&self, new: &Standing) -> Option<SharesChanged> {
        let alike = self.flows_per_host == new.flows_per_host && self.level == new.level;
        if !alike || new.version <= self.version || new.version / ALL_EVERY != self.version / ALL_EVERY {
            return None;
        }
        let old: BTreeMap<ShareOf, f64> = self.shares.iter().map(|share| (ShareOf::of(share), share.weight)).collect();
        let factor = usual_factor(&old, &new.shares);
        let close = |share: &&Share| {
            let before = old.get(&ShareOf::of(share)).map(|weight| weight * factor);
            !before.is_some_and(|before| (before - share.weight).abs() <= CLOSE * share.weight)
        };
        let changed: Vec<Share> = new.shares.iter().filter(close).cloned().collect();
        let there: BTreeSet<ShareOf> = new.shares.iter().map(ShareOf::of).collect();
        let gone: Vec<ShareOf> = old.into_keys().filter(|of| !there.contains(of)).collect();
        let shorter = changed.len() + gone.len() < new.shares.len().max(1);
        shorter.then_some(SharesChanged { version: new.version, after: self.version, factor, changed, gone })
    }

    /// These with a change applied; `None`: the change is for another version.
    pub fn after(&self, changes: &SharesChanged) -> Option<Standing> {
        if changes.after != self.version {
            return None;
        }
        let gone: BTreeSet<&ShareOf> = changes.gone.iter().collect();
        let mut changed: BTreeMap<ShareOf, &Share> =
            changes.changed.iter().map(|share| (ShareOf::of(share), share)).collect();
        let kept = self.shares.iter().filter(|share| !gone.contains(&ShareOf::of(share)));
        let kept = kept.map(|share| match changed.remove(&ShareOf::of(share)) {
            Some(new) => new.clone(),
            None => Share { weight: share.weight * changes.factor, ..share.clone() },
        });
        // This keeps the order of arrival: new shares come last.
        let mut shares: Vec<Share> = kept.collect();
        shares.extend(changes.changed.iter().filter(|share| changed.contains_key(&ShareOf::of(share))).cloned());
        Some(Standing { version: changes.version, shares, ..*self })
    }
}

/// The factor by which most weights have changed.
fn usual_factor(old: &BTreeMap<ShareOf, f64>, new: &[Share]) -> f64 {
    let factor = |share: &Share| old.get(&ShareOf::of(share)).map(|weight| share.weight / weight);
    let mut factors: Vec<f64> = new.iter().filter_map(factor).filter(|factor| factor.is_finite()).collect();
    if factors.is_empty() {
        return 1.0;
    }
    factors.sort_by(f64::total_cmp);
    // The one that begins the longest run of equal ones.
    let (mut best, mut longest, mut start) = (factors[0], 0, 0);
    for end in 1..=factors.len() {
        if end < factors.len() && (factors[end] - factors[start]).abs() <= CLOSE * factors[start].abs() {
            continue;
        }
        if end - start > longest {
            (best, longest) = (factors[start + (end - start) / 2], end - start);
        }
        start = end;
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SplitMix;

    fn standing(version: u64, weights: &[(u32, f64)]) -> Standing {
        let total: f64 = weights.iter().map(|(_, weight)| weight).sum();
        let share = |(job, weight): &(u32, f64)| Share {
            job: format!("job-{job}").into(),
            stages: None,
            weight: weight / total,
        };
        Standing {
            version,
            flows_per_host: FlowsPerHost::Fixed(10),
            level: Level::Groups,
            shares: weights.iter().map(share).collect(),
        }
    }

    fn by_name(standing: &Standing) -> BTreeMap<ShareOf, f64> {
        standing.shares.iter().map(|share| (ShareOf::of(share), share.weight)).collect()
    }

    #[test]
    fn one_of_a_thousand_that_begins_is_one_share_and_a_factor() {
        let old: Vec<(u32, f64)> = (0..1000).map(|job| (job, f64::from(job % 7 + 1))).collect();
        let mut new = old.clone();
        new.push((1000, 3.0));
        let (old, new) = (standing(1, &old), standing(2, &new));
        let changes = old.changes_to(&new).unwrap();
        assert_eq!((changes.changed.len(), changes.gone.len()), (1, 0));
        let back = new.changes_to(&Standing { version: 3, ..old.clone() }).unwrap();
        assert_eq!((back.changed.len(), back.gone.len()), (0, 1));
        assert_eq!(old.after(&changes).unwrap().version, 2);
        assert_eq!(new.after(&changes), None, "it leads from another version");
    }

    #[test]
    fn all_are_said_where_that_is_shorter_or_says_something_else() {
        let old = standing(1, &[(1, 1.0), (2, 1.0)]);
        assert_eq!(old.changes_to(&standing(2, &[(3, 1.0)])), None);
        assert_eq!(old.changes_to(&Standing { level: Level::Members, ..standing(2, &[(1, 1.0), (2, 1.0)]) }), None);
        assert_eq!(old.changes_to(&standing(ALL_EVERY, &[(1, 1.0), (2, 1.0), (3, 1.0)])), None);
        assert!(old.changes_to(&standing(2, &[(1, 1.0), (2, 1.0), (3, 1.0)])).is_some());
    }

    #[test]
    fn whoever_hears_only_what_has_changed_has_the_shares_to_a_billionth() {
        for seed in 0..20 {
            let mut random = SplitMix(seed);
            let mut below = |most: u64| random.next() % most;
            let mut weights: BTreeMap<u32, f64> = BTreeMap::new();
            let (mut said, mut heard) = (standing(0, &[]), standing(0, &[]));
            let mut by_changes = 0;
            for version in 1..900 {
                for _ in 0..below(3) + 1 {
                    let job = below(40) as u32;
                    match below(4) {
                        0 => _ = weights.remove(&job),
                        _ => _ = weights.insert(job, (below(1000) + 1) as f64),
                    }
                }
                let all: Vec<(u32, f64)> = weights.iter().map(|(job, weight)| (*job, *weight)).collect();
                let new = standing(version, &all);
                heard = match said.changes_to(&new) {
                    Some(changes) => {
                        by_changes += 1;
                        heard.after(&changes).unwrap()
                    }
                    None => new.clone(),
                };
                said = new;
                let (heard, said) = (by_name(&heard), by_name(&said));
                assert!(heard.keys().eq(said.keys()), "seed {seed}, version {version}");
                for (of, weight) in &said {
                    assert!((heard[of] - weight).abs() <= 1e-9 * weight, "seed {seed}, version {version}: {of:?}");
                }
            }
            assert!(by_changes > 500, "seed {seed}: {by_changes}");
        }
    }
}
