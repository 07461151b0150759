//! The pattern of a delegated transfer, from what is fetched.
//! Design: docs/explanation/design-control.md, "Plans and patterns".

use crate::types::Pattern;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// One fetch, as far as the pattern depends on it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Asked {
    /// The receiver: the task, not its worker, so that a task that runs again counts once.
    pub receiver: Arc<str>,
    /// Objects of which a part is requested.
    pub objects: u32,
    /// One of those objects and the part, as a sample: fetches that share it take the same parts.
    pub object: Arc<str>,
    pub part: u32,
    /// Parts that each object has.
    pub parts: u32,
    /// All parts of every object are requested together.
    #[serde(default)]
    pub whole: bool,
}

/// Receivers and parts of a transfer that are remembered. A job may last as long as its client: the first ones have shown what the pattern is.
const REMEMBERED_MAX: usize = 10_000;

/// What was fetched so far in one transfer; constant work per fetch.
#[derive(Default)]
pub struct Evidence {
    /// First receiver of each sampled part, and whether a second one came.
    takers: BTreeMap<(Arc<str>, u32), (Arc<str>, bool)>,
    receivers: std::collections::BTreeSet<Arc<str>>,
    /// Receivers and sampled parts of before: only their numbers are known, and the pattern that they showed.
    settled: Option<(usize, usize, Pattern)>,
    shared: u32,
    most_objects: u32,
    most_parts: u32,
}

impl Evidence {
    pub fn add(&mut self, asked: &Asked) {
        self.most_objects = self.most_objects.max(asked.objects);
        // What is taken whole might as well have one part.
        self.most_parts = self.most_parts.max(if asked.whole { 1 } else { asked.parts });
        if self.receivers.len() < REMEMBERED_MAX {
            self.receivers.insert(asked.receiver.clone());
        }
        let part = (asked.object.clone(), asked.part);
        if self.takers.len() >= REMEMBERED_MAX && !self.takers.contains_key(&part) {
            return;
        }
        let first = self.takers.entry(part).or_insert_with(|| (asked.receiver.clone(), false));
        if first.0 != asked.receiver && !first.1 {
            first.1 = true;
            self.shared += 1;
        }
    }

    /// Tasks that fetched. One that fetches again after [`Evidence::settle`] counts twice.
    pub fn receivers(&self) -> u32 {
        (self.receivers.len() + self.settled.map_or(0, |own| own.0)) as u32
    }

    /// Parts of which it is known who took them.
    fn parts(&self) -> usize {
        self.takers.len() + self.settled.map_or(0, |own| own.1)
    }

    /// Keeps the counts, and forgets who took what: the transfer is quiet.
    pub fn settle(&mut self) {
        if !self.receivers.is_empty() {
            self.settled = Some((self.receivers() as usize, self.parts(), self.pattern()));
            (self.receivers, self.takers) = Default::default();
        }
    }

    /// Whether half of so many tasks have fetched, or as many as are remembered. Not after [`Evidence::settle`]: who takes
    /// a part that was taken before is not known then.
    pub fn has_half_of(&self, tasks: u32) -> bool {
        if self.settled.is_some() {
            return false;
        }
        let half = u64::from(tasks).div_ceil(2).min(REMEMBERED_MAX as u64);
        u64::from(self.receivers()) >= half
    }

    /// The evidence, in words.
    pub fn words(&self) -> String {
        let (receivers, parts, shared) = (self.receivers(), self.parts(), self.shared);
        format!("{receivers} tasks fetched; {shared} of {parts} sampled parts went to several")
    }

    /// Every receiver its own parts of many objects: shuffle; the same parts to many receivers: broadcast; one receiver
    /// from many: gather; else one-to-one. One taker of a part of many-part objects is the first receiver of a shuffle;
    /// several that each take other objects, and these whole, are one gather after another, as in iterations.
    pub fn pattern(&self) -> Pattern {
        // A few that come later do not change what many have shown.
        if let Some((receivers, _, pattern)) = self.settled
            && self.receivers.len() < receivers
        {
            return pattern;
        }
        if self.receivers() == 0 {
            Pattern::Unknown
        } else if 2 * self.shared as usize >= self.parts() {
            Pattern::Broadcast
        } else if self.most_objects > 1 && self.most_parts > 1 && (self.parts() < 2 || self.receivers() > 1) {
            Pattern::Shuffle
        } else if self.most_objects > 1 {
            Pattern::Gather
        } else {
            Pattern::OneToOne
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evidence(fetches: &[(&str, u32, &str, u32, u32)]) -> Pattern {
        let mut evidence = Evidence::default();
        for &(receiver, objects, object, part, parts) in fetches {
            let asked = Asked { receiver: receiver.into(), objects, object: object.into(), part, parts, whole: false };
            evidence.add(&asked);
        }
        evidence.pattern()
    }

    #[test]
    fn patterns_follow_from_what_is_fetched() {
        assert_eq!(evidence(&[]), Pattern::Unknown);
        assert_eq!(evidence(&[("r0", 8, "o", 0, 4)]), Pattern::Shuffle);
        assert_eq!(evidence(&[("r0", 8, "o", 0, 4), ("r1", 8, "o", 1, 4)]), Pattern::Shuffle);
        assert_eq!(evidence(&[("r0", 1, "o", 0, 1), ("r1", 1, "o", 0, 1)]), Pattern::Broadcast);
        assert_eq!(evidence(&[("r0", 8, "o", 0, 1)]), Pattern::Gather);
        assert_eq!(evidence(&[("r0", 8, "a", 0, 1), ("r1", 8, "b", 0, 1)]), Pattern::Gather);
        assert_eq!(evidence(&[("r0", 1, "o", 0, 1)]), Pattern::OneToOne);
        assert_eq!(evidence(&[("r0", 1, "a", 0, 1), ("r1", 1, "b", 0, 1)]), Pattern::OneToOne);
    }

    #[test]
    fn what_is_remembered_of_a_long_job_has_a_limit_and_is_enough() {
        let mut evidence = Evidence::default();
        for number in 0..3 * REMEMBERED_MAX as u32 {
            let (receiver, object) = (number.to_string().into(), "o".into());
            evidence.add(&Asked { receiver, objects: 8, object, part: number, parts: 1 << 20, whole: false });
        }
        assert_eq!((evidence.receivers() as usize, evidence.takers.len()), (REMEMBERED_MAX, REMEMBERED_MAX));
        assert_eq!(evidence.pattern(), Pattern::Shuffle);
        assert!(evidence.has_half_of(1 << 20) && !Evidence::default().has_half_of(1));
    }

    #[test]
    fn one_receiver_that_takes_all_parts_of_all_objects_gathers() {
        assert_eq!(evidence(&[("r", 8, "o", 0, 2), ("r", 8, "o", 1, 2)]), Pattern::Gather);
    }

    #[test]
    fn receivers_that_each_take_other_objects_whole_gather() {
        let mut evidence = Evidence::default();
        for (receiver, object) in [("r0", "a"), ("r1", "b")] {
            let (receiver, object) = (receiver.into(), object.into());
            evidence.add(&Asked { receiver, objects: 8, object, part: 0, parts: 2, whole: true });
        }
        assert_eq!(evidence.pattern(), Pattern::Gather);
    }

    #[test]
    fn a_task_that_runs_again_does_not_make_a_broadcast() {
        assert_eq!(evidence(&[("r0", 8, "o", 0, 4), ("r0", 8, "o", 0, 4), ("r1", 8, "o", 1, 4)]), Pattern::Shuffle);
    }
}
