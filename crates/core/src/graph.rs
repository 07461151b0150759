//! Patterns of transfers from the engine's task graph, stage by stage, before a byte moves.
//! Design: docs/explanation/design-control.md, "Plans and patterns".
//!
//! Tasks are numbers; stages have a job and a name. Each task is added once, after its inputs; each edge costs constant
//! work, so a graph that grows while it runs is never walked twice. The pattern of an edge can change again when a task
//! has put an object: of an object with several parts, each consumer takes its own.

use crate::types::{JobId, Pattern, Stage};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasherDefault, Hasher};

/// What a task is to the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    Work,
    /// Only selects or splits (Dask's `getitem`, `split-*`): a part of the edge, not a stage.
    Select,
    /// The barrier of a shuffle whose edges are hidden behind it (Dask's P2P).
    Barrier,
}

/// A map by task number whose order does not matter.
#[allow(clippy::disallowed_types)]
type FastMap<V> = std::collections::HashMap<u64, V, BuildHasherDefault<NumberHasher>>;

/// Tasks are numbered by the caller: one multiplication (Fibonacci hashing, Knuth volume 3, 6.4) spreads them enough.
#[derive(Default)]
struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, _: &[u8]) {
        unreachable!("tasks are u64")
    }
    fn write_u64(&mut self, number: u64) {
        self.0 = number.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(26);
    }
}

#[derive(Default)]
pub struct Graph {
    /// By number; numbers are not used again.
    stages: BTreeMap<StageNumber, StageNode>,
    numbers: BTreeMap<(JobId, Stage), StageNumber>,
    next_stage: StageNumber,
    tasks: FastMap<Node>,
    /// By the stages that data moves from and to.
    edges: BTreeMap<(StageNumber, StageNumber), Edge>,
    /// The same edges, to and from.
    into: BTreeSet<(StageNumber, StageNumber)>,
    /// Edges with unreported changes.
    changed: BTreeSet<(StageNumber, StageNumber)>,
}

type StageNumber = u32;

struct StageNode {
    job: JobId,
    name: Stage,
    /// Number of its tasks that do work.
    tasks: u32,
    /// Most parts of an object that one of them put; 0: none was seen.
    parts: u32,
}

struct Node {
    stage: StageNumber,
    kind: Kind,
    /// Consumers in the stage that last took from this task; reset when another stage takes.
    taken_by: (StageNumber, u32),
    /// For [`Kind::Select`] and [`Kind::Barrier`]: the tasks behind them that do work, at most [`BEHIND_MAX`].
    behind: Vec<u64>,
}

/// Selecting nodes have one or few inputs; a barrier's inputs are all of one stage, so a sample shows the stage.
const BEHIND_MAX: usize = 4;

/// All that is known of the edges between two stages.
#[derive(Clone, Copy, Debug, Default)]
struct Edge {
    consumers: u32,
    /// Edges in all, and those that pass through a selecting node.
    inputs: u64,
    pieces: u64,
    /// Most inputs of one consumer, and most consumers of one producer.
    fan_in: u32,
    fan_out: u32,
    barrier: bool,
}

/// What the graph shows of the data that moves between two stages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Classified {
    pub pattern: Pattern,
    /// Tasks of the second stage that take from the first.
    pub consumers: u32,
    /// The evidence for the pattern.
    pub why: String,
}

/// Two stages of the engine's graph, by job and name.
pub type Between = ((JobId, Stage), (JobId, Stage));

impl Graph {
    /// Adds a task and its inputs; inputs that were never added are outside the graph and do not count.
    pub fn add(&mut self, task: u64, job: &JobId, stage: &Stage, kind: Kind, inputs: &[u64]) {
        let stage = self.stage_number(job, stage);
        if self.tasks.contains_key(&task) {
            return;
        }
        if kind != Kind::Work {
            let mut behind = Vec::new();
            for input in inputs {
                match self.tasks.get(input) {
                    Some(node) if node.kind == Kind::Work => behind.push(*input),
                    Some(node) => behind.extend(&node.behind),
                    None => {}
                }
                if behind.len() >= BEHIND_MAX {
                    behind.truncate(BEHIND_MAX);
                    break;
                }
            }
            self.tasks.insert(task, Node { stage, kind, taken_by: (StageNumber::MAX, 0), behind });
            return;
        }
        if let Some(own) = self.stages.get_mut(&stage) {
            own.tasks += 1;
        }
        self.tasks.insert(task, Node { stage, kind, taken_by: (StageNumber::MAX, 0), behind: Vec::new() });
        self.take_all(stage, inputs);
    }

    /// A task takes more results than it was added with.
    pub fn takes(&mut self, task: u64, inputs: &[u64]) {
        if let Some(stage) = self.tasks.get(&task).filter(|node| node.kind == Kind::Work).map(|node| node.stage) {
            self.take_all(stage, inputs);
        }
    }

    /// One task of a stage takes these results.
    fn take_all(&mut self, stage: StageNumber, inputs: &[u64]) {
        // A task takes from few stages: a scan is faster than a map.
        let mut taken: Vec<(StageNumber, u32)> = Vec::new();
        for input in inputs {
            let Some(node) = self.tasks.get(input) else { continue };
            if node.kind == Kind::Work {
                self.take(stage, *input, None, &mut taken);
            } else {
                let kind = node.kind;
                let behind = node.behind.clone();
                behind.iter().for_each(|producer| self.take(stage, *producer, Some(kind), &mut taken));
            }
        }
        for (from, inputs) in taken {
            let edge = self.edges.entry((from, stage)).or_default();
            edge.consumers += 1;
            edge.fan_in = edge.fan_in.max(inputs);
            self.into.insert((stage, from));
            self.changed.insert((from, stage));
        }
    }

    fn take(&mut self, stage: StageNumber, producer: u64, through: Option<Kind>, taken: &mut Vec<(StageNumber, u32)>) {
        let Some(node) = self.tasks.get_mut(&producer) else { return };
        node.taken_by = if node.taken_by.0 == stage { (stage, node.taken_by.1 + 1) } else { (stage, 1) };
        let (from, fan_out) = (node.stage, node.taken_by.1);
        match taken.iter_mut().find(|(known, _)| *known == from) {
            Some((_, count)) => *count += 1,
            None => taken.push((from, 1)),
        }
        let edge = self.edges.entry((from, stage)).or_default();
        edge.inputs += 1;
        edge.pieces += u64::from(through == Some(Kind::Select));
        edge.barrier |= through == Some(Kind::Barrier);
        edge.fan_out = edge.fan_out.max(fan_out);
    }

    /// A task has put an object of so many parts.
    pub fn put(&mut self, task: u64, parts: u32) {
        let Some(stage) = self.tasks.get(&task).map(|node| node.stage) else { return };
        let Some(own) = self.stages.get_mut(&stage) else { return };
        // Only the difference between one part and several matters.
        let new = own.parts.min(2) < parts.min(2);
        own.parts = own.parts.max(parts);
        if new {
            self.changed.extend(self.edges.range((stage, 0)..=(stage, StageNumber::MAX)).map(|(edge, _)| *edge));
        }
    }

    /// The engine has forgotten this task; the statistics of its edges stay as long as its job.
    pub fn forget(&mut self, task: u64) {
        self.tasks.remove(&task);
    }

    /// The job is over.
    pub fn forget_job(&mut self, job: &JobId) {
        let all = (job.clone(), Stage::from(""))..;
        let of_job =
            self.numbers.range(all).take_while(|((own, _), _)| own == job).map(|(key, number)| (key.clone(), *number));
        for (key, stage) in of_job.collect::<Vec<_>>() {
            self.numbers.remove(&key);
            self.stages.remove(&stage);
            let after = self.edges.range((stage, 0)..=(stage, StageNumber::MAX)).map(|(edge, _)| *edge);
            let before = self.into.range((stage, 0)..=(stage, StageNumber::MAX)).map(|(to, from)| (*from, *to));
            for (from, to) in after.chain(before).collect::<Vec<_>>() {
                self.edges.remove(&(from, to));
                self.into.remove(&(to, from));
                self.changed.remove(&(from, to));
            }
        }
    }

    pub fn tasks(&self) -> usize {
        self.tasks.len()
    }

    /// Stages and edges that are remembered.
    pub fn remembered(&self) -> (usize, usize) {
        (self.stages.len(), self.edges.len())
    }

    /// Changes since the last call.
    pub fn changed(&mut self) -> Vec<(Between, Classified)> {
        let changed = std::mem::take(&mut self.changed);
        changed.into_iter().filter_map(|(from, to)| self.classified(from, to)).collect()
    }

    fn classified(&self, from: StageNumber, to: StageNumber) -> Option<(Between, Classified)> {
        let edge = self.edges.get(&(from, to))?;
        let (producers, consumers) = (self.stages.get(&from)?, self.stages.get(&to)?);
        let (pattern, why) = classify(producers, edge);
        let name = |node: &StageNode| (node.job.clone(), node.name.clone());
        Some(((name(producers), name(consumers)), Classified { pattern, consumers: edge.consumers, why }))
    }

    fn stage_number(&mut self, job: &JobId, stage: &Stage) -> StageNumber {
        let key = (job.clone(), stage.clone());
        if let Some(&number) = self.numbers.get(&key) {
            return number;
        }
        let number = self.next_stage;
        self.next_stage += 1;
        self.stages.insert(number, StageNode { job: key.0.clone(), name: key.1.clone(), tasks: 0, parts: 0 });
        self.numbers.insert(key, number);
        number
    }
}

/// The pattern of an edge, and why.
fn classify(producers: &StageNode, edge: &Edge) -> (Pattern, String) {
    let (from_many, to_many) = (edge.fan_in > 1, edge.fan_out > 1);
    let in_pieces = 2 * edge.pieces > edge.inputs;
    let parts = producers.parts;
    let takes = format!("each task takes from up to {}, each result goes to up to {}", edge.fan_in, edge.fan_out);
    match (from_many, to_many) {
        _ if edge.barrier => (Pattern::Shuffle, "all tasks wait behind the barrier of a shuffle".into()),
        (_, true) if in_pieces && (from_many || producers.tasks > 1) => {
            (Pattern::Shuffle, format!("{takes}, in pieces"))
        }
        (_, true) if in_pieces => (Pattern::OneToOne, "one result, of which each task takes a piece".into()),
        // Until fetches show that all tasks take the same parts.
        (_, true) if parts > 1 => (Pattern::Shuffle, format!("{takes}; its objects have up to {parts} parts")),
        // Neighbours that take a few whole outputs each (a stencil) move less than all to all; what they move they
        // move whole and more than once, as a broadcast does.
        (_, true) => (Pattern::Broadcast, format!("{takes}, whole")),
        (true, false) => (Pattern::Gather, takes),
        (false, false) => (Pattern::OneToOne, takes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(graph: &Graph, from: &str, to: &str) -> Pattern {
        let number = |name: &str| graph.numbers[&("job".into(), name.into())];
        graph.classified(number(from), number(to)).map_or(Pattern::Unknown, |(_, own)| own.pattern)
    }

    /// `count` tasks numbered from `first`, with the inputs that `inputs` gives each.
    fn add(graph: &mut Graph, name: &str, kind: Kind, first: u64, count: u64, inputs: impl Fn(u64) -> Vec<u64>) {
        (0..count).for_each(|i| graph.add(first + i, &"job".into(), &name.into(), kind, &inputs(i)));
    }

    #[test]
    fn pieces_of_every_output_into_every_task_are_a_shuffle() {
        let mut graph = Graph::default();
        add(&mut graph, "map", Kind::Work, 0, 4, |_| vec![]);
        add(&mut graph, "getitem", Kind::Select, 100, 12, |i| vec![i / 3]);
        add(&mut graph, "reduce", Kind::Work, 200, 3, |i| (0..4).map(|m| 100 + 3 * m + i).collect());
        assert_eq!(pattern(&graph, "map", "reduce"), Pattern::Shuffle);
        assert_eq!(graph.changed().len(), 1, "selecting nodes are no stage");
    }

    #[test]
    fn all_outputs_into_each_task_are_a_broadcast() {
        let mut graph = Graph::default();
        add(&mut graph, "centres", Kind::Work, 0, 2, |_| vec![]);
        add(&mut graph, "assign", Kind::Work, 10, 5, |_| vec![0, 1]);
        assert_eq!(pattern(&graph, "centres", "assign"), Pattern::Broadcast);
    }

    #[test]
    fn one_output_into_many_tasks_is_a_broadcast_and_many_into_one_a_gather() {
        let mut graph = Graph::default();
        add(&mut graph, "load", Kind::Work, 0, 1, |_| vec![]);
        add(&mut graph, "work", Kind::Work, 10, 5, |_| vec![0]);
        add(&mut graph, "sum", Kind::Work, 20, 1, |_| (10..15).collect());
        assert_eq!(pattern(&graph, "load", "work"), Pattern::Broadcast);
        assert_eq!(pattern(&graph, "work", "sum"), Pattern::Gather);
        assert_eq!(pattern(&graph, "load", "sum"), Pattern::Unknown);
    }

    #[test]
    fn a_hidden_shuffle_shows_by_its_barrier() {
        let mut graph = Graph::default();
        add(&mut graph, "transfer", Kind::Work, 0, 4, |_| vec![]);
        add(&mut graph, "barrier", Kind::Barrier, 10, 1, |_| vec![0, 1, 2, 3]);
        add(&mut graph, "unpack", Kind::Work, 20, 4, |_| vec![10]);
        assert_eq!(pattern(&graph, "transfer", "unpack"), Pattern::Shuffle);
    }

    #[test]
    fn a_graph_that_grows_changes_its_pattern() {
        let mut graph = Graph::default();
        add(&mut graph, "a", Kind::Work, 0, 3, |_| vec![]);
        add(&mut graph, "b", Kind::Work, 10, 1, |_| vec![0]);
        assert_eq!(pattern(&graph, "a", "b"), Pattern::OneToOne);
        add(&mut graph, "b", Kind::Work, 11, 3, |_| vec![0]);
        assert_eq!(pattern(&graph, "a", "b"), Pattern::Broadcast);
    }

    #[test]
    fn a_task_that_takes_more_later_changes_its_pattern() {
        let mut graph = Graph::default();
        add(&mut graph, "map", Kind::Work, 0, 4, |_| vec![]);
        add(&mut graph, "reduce", Kind::Work, 10, 1, |_| vec![]);
        graph.takes(10, &[0, 1, 2, 3]);
        assert_eq!(pattern(&graph, "map", "reduce"), Pattern::Gather);
        graph.takes(99, &[0]);
        assert_eq!(graph.changed().len(), 1, "what was never added takes nothing");
    }

    #[test]
    fn objects_of_several_parts_make_a_shuffle_before_a_byte_is_fetched() {
        let mut graph = Graph::default();
        add(&mut graph, "map", Kind::Work, 0, 4, |_| vec![]);
        add(&mut graph, "reduce", Kind::Work, 10, 4, |_| vec![0, 1, 2, 3]);
        add(&mut graph, "sum", Kind::Work, 20, 1, |_| vec![0, 1, 2, 3]);
        assert_eq!(pattern(&graph, "map", "reduce"), Pattern::Broadcast, "nothing is known of the results");
        graph.changed();
        graph.put(2, 4);
        assert_eq!(graph.changed().len(), 2);
        graph.put(3, 5);
        assert_eq!(graph.changed(), [], "that is nothing new");
        assert_eq!(pattern(&graph, "map", "reduce"), Pattern::Shuffle);
        let mut whole = Graph::default();
        add(&mut whole, "map", Kind::Work, 0, 4, |_| vec![]);
        add(&mut whole, "reduce", Kind::Work, 10, 4, |_| vec![0, 1, 2, 3]);
        whole.put(2, 1);
        assert_eq!(pattern(&whole, "map", "reduce"), Pattern::Broadcast);
    }

    #[test]
    fn what_is_new_is_said_once_and_a_job_is_forgotten_whole() {
        let mut graph = Graph::default();
        for number in 0..100u64 {
            let job = JobId::from(format!("job-{number}"));
            for task in 0..8 {
                let inputs = if task < 4 { vec![] } else { vec![8 * number, 8 * number + 1] };
                graph.add(
                    8 * number + task,
                    &job,
                    &(if task < 4 { "map" } else { "reduce" }).into(),
                    Kind::Work,
                    &inputs,
                );
            }
            // One more job takes from all of them.
            graph.add(10_000 + number, &"all".into(), &"sum".into(), Kind::Work, &[8 * number]);
            assert_eq!(graph.changed().len(), 2, "the others said nothing new");
            assert_eq!(graph.changed(), []);
        }
        for number in 0..100 {
            graph.put(8 * number, 3);
            graph.forget_job(&format!("job-{number}").into());
            (0..8).for_each(|task| graph.forget(8 * number + task));
        }
        assert_eq!((graph.remembered(), graph.changed()), ((1, 0), vec![]));
        graph.forget_job(&"all".into());
        assert_eq!((graph.remembered(), graph.into.len(), graph.tasks()), ((0, 0), 0, 100));
    }
}
