//! Patterns of the engine's own edges, from its task graph, stage by stage and incrementally (DESIGN 4.2).
//!
//! Tasks are numbers and stages are names. Each task is added once, after its inputs; each edge costs constant work, so
//! a graph that grows while it runs is never walked twice.

use crate::types::{Pattern, Stage};
use std::collections::BTreeMap;
use std::hash::{BuildHasherDefault, Hasher};

/// What a task is to the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Work,
    /// Only selects or splits (Dask's `getitem`, `split-*`): a part of the edge, not a stage.
    Select,
    /// The barrier of a shuffle whose edges are hidden behind it (Dask's P2P).
    Barrier,
}

/// A map by task number whose order is never looked at.
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
    stages: Vec<(Stage, u32)>,
    stage_numbers: BTreeMap<Stage, u32>,
    tasks: FastMap<Node>,
    edges: BTreeMap<(u32, u32), Edge>,
}

struct Node {
    stage: u32,
    kind: Kind,
    /// Consumers in the stage that last took from this task; reset when another stage takes.
    taken_by: (u32, u32),
    /// For [`Kind::Select`] and [`Kind::Barrier`]: the tasks behind them that do work, at most [`BEHIND_MAX`].
    behind: Vec<u64>,
}

/// Selecting nodes stand on one or few workers; a barrier's inputs are all of one stage, so a sample tells the stage.
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

impl Graph {
    /// Adds a task and its inputs; inputs that were never added are outside the graph and do not count.
    pub fn add(&mut self, task: u64, stage: &Stage, kind: Kind, inputs: &[u64]) {
        let stage = self.stage_number(stage);
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
            self.tasks.insert(task, Node { stage, kind, taken_by: (u32::MAX, 0), behind });
            return;
        }
        self.stages[stage as usize].1 += 1;
        // A task takes from few stages: a scan beats a map.
        let mut taken: Vec<(u32, u32)> = Vec::new();
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
        }
        self.tasks.insert(task, Node { stage, kind, taken_by: (u32::MAX, 0), behind: Vec::new() });
    }

    fn take(&mut self, stage: u32, producer: u64, through: Option<Kind>, taken: &mut Vec<(u32, u32)>) {
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

    /// The engine has forgotten this task; what its edges taught stays.
    pub fn forget(&mut self, task: u64) {
        self.tasks.remove(&task);
    }

    pub fn tasks(&self) -> usize {
        self.tasks.len()
    }

    /// The pattern between two stages; [`Pattern::Unknown`] where no task of the second takes from the first.
    pub fn pattern(&self, from: &Stage, to: &Stage) -> Pattern {
        match (self.stage_numbers.get(from), self.stage_numbers.get(to)) {
            (Some(&from), Some(&to)) => {
                self.edges.get(&(from, to)).map_or(Pattern::Unknown, |e| self.classify(from, e))
            }
            _ => Pattern::Unknown,
        }
    }

    /// All pairs of stages between which data moves, with their patterns.
    pub fn patterns(&self) -> impl Iterator<Item = (&Stage, &Stage, Pattern)> {
        self.edges.iter().map(|(&(from, to), edge)| {
            (&self.stages[from as usize].0, &self.stages[to as usize].0, self.classify(from, edge))
        })
    }

    fn classify(&self, from: u32, edge: &Edge) -> Pattern {
        let producers = self.stages[from as usize].1;
        let from_many = edge.fan_in > 1;
        let to_many = edge.fan_out > 1;
        let in_pieces = 2 * edge.pieces > edge.inputs;
        match (from_many, to_many) {
            _ if edge.barrier => Pattern::Shuffle,
            (true, true) if in_pieces => Pattern::Shuffle,
            // Neighbours that take a few whole outputs each (a stencil) move less than all to all; what they move they
            // move whole and more than once, as a broadcast does.
            (true, true) => Pattern::Broadcast,
            (true, false) => Pattern::Gather,
            (false, true) if in_pieces && producers > 1 => Pattern::Shuffle,
            (false, true) if in_pieces => Pattern::OneToOne,
            (false, true) => Pattern::Broadcast,
            (false, false) => Pattern::OneToOne,
        }
    }

    fn stage_number(&mut self, stage: &Stage) -> u32 {
        if let Some(&number) = self.stage_numbers.get(stage) {
            return number;
        }
        let number = self.stages.len() as u32;
        self.stages.push((stage.clone(), 0));
        self.stage_numbers.insert(stage.clone(), number);
        number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(name: &str) -> Stage {
        Stage::from(name)
    }

    /// `count` tasks numbered from `first`, with the inputs that `inputs` gives each.
    fn add(graph: &mut Graph, name: &str, kind: Kind, first: u64, count: u64, inputs: impl Fn(u64) -> Vec<u64>) {
        (0..count).for_each(|i| graph.add(first + i, &stage(name), kind, &inputs(i)));
    }

    #[test]
    fn pieces_of_every_output_into_every_task_are_a_shuffle() {
        let mut graph = Graph::default();
        add(&mut graph, "map", Kind::Work, 0, 4, |_| vec![]);
        add(&mut graph, "getitem", Kind::Select, 100, 12, |i| vec![i / 3]);
        add(&mut graph, "reduce", Kind::Work, 200, 3, |i| (0..4).map(|m| 100 + 3 * m + i).collect());
        assert_eq!(graph.pattern(&stage("map"), &stage("reduce")), Pattern::Shuffle);
        assert_eq!(graph.patterns().count(), 1, "selecting nodes are no stage");
    }

    #[test]
    fn all_outputs_into_each_task_are_a_broadcast() {
        let mut graph = Graph::default();
        add(&mut graph, "centres", Kind::Work, 0, 2, |_| vec![]);
        add(&mut graph, "assign", Kind::Work, 10, 5, |_| vec![0, 1]);
        assert_eq!(graph.pattern(&stage("centres"), &stage("assign")), Pattern::Broadcast);
    }

    #[test]
    fn one_output_into_many_tasks_is_a_broadcast_and_many_into_one_a_gather() {
        let mut graph = Graph::default();
        add(&mut graph, "load", Kind::Work, 0, 1, |_| vec![]);
        add(&mut graph, "work", Kind::Work, 10, 5, |_| vec![0]);
        add(&mut graph, "sum", Kind::Work, 20, 1, |_| (10..15).collect());
        assert_eq!(graph.pattern(&stage("load"), &stage("work")), Pattern::Broadcast);
        assert_eq!(graph.pattern(&stage("work"), &stage("sum")), Pattern::Gather);
        assert_eq!(graph.pattern(&stage("load"), &stage("sum")), Pattern::Unknown);
    }

    #[test]
    fn a_hidden_shuffle_shows_by_its_barrier() {
        let mut graph = Graph::default();
        add(&mut graph, "transfer", Kind::Work, 0, 4, |_| vec![]);
        add(&mut graph, "barrier", Kind::Barrier, 10, 1, |_| vec![0, 1, 2, 3]);
        add(&mut graph, "unpack", Kind::Work, 20, 4, |_| vec![10]);
        assert_eq!(graph.pattern(&stage("transfer"), &stage("unpack")), Pattern::Shuffle);
    }

    #[test]
    fn a_graph_that_grows_changes_its_pattern() {
        let mut graph = Graph::default();
        add(&mut graph, "a", Kind::Work, 0, 3, |_| vec![]);
        add(&mut graph, "b", Kind::Work, 10, 1, |_| vec![0]);
        assert_eq!(graph.pattern(&stage("a"), &stage("b")), Pattern::OneToOne);
        add(&mut graph, "b", Kind::Work, 11, 3, |_| vec![0]);
        assert_eq!(graph.pattern(&stage("a"), &stage("b")), Pattern::Broadcast);
    }
}
