//! Shuffles of the engine: who carries each, whether all input rows came out, and which parts were taken.
//!
//! These are statistics for users. They decide and prove nothing: the worker that joined an output partition has
//! verified it.

use super::{Command, Controller, Event};
use crate::types::{Demands, Encryption, JobId, WorkerId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The engine's name of a shuffle.
pub type ShuffleId = Arc<str>;

/// Who moves the bytes of a shuffle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Carrier {
    /// The data plane.
    Mission,
    /// The engine itself: rows are not counted.
    Dask,
}

/// What is counted as rows of a shuffle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Counted {
    /// Of data frames.
    #[default]
    Rows,
    /// Of arrays.
    Items,
}

/// A shuffle, as it is shown.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShuffleNow {
    pub shuffle: ShuffleId,
    /// Times that it began.
    pub runs: u32,
    pub counted: Counted,
    pub engine: Carrier,
    /// Why the engine carries it itself; else what is special about how it is carried, if anything is.
    pub why: String,
    /// `None`: not all inputs are there yet.
    pub rows_in: Option<u64>,
    /// Rows of output partitions that are not needed.
    pub rows_unwanted: u64,
    pub rows_out: u64,
    pub outputs: u32,
    pub outputs_done: u32,
}

#[derive(Default)]
pub struct Shuffles {
    all: BTreeMap<ShuffleId, Shuffle>,
    begun: u64,
}

struct Shuffle {
    job: JobId,
    runs: u32,
    /// Before all outputs of the run before were done.
    began_again: bool,
    counted: Counted,
    engine: Carrier,
    why: String,
    outputs: u32,
    /// Number of the last run that a worker reported.
    run: u64,
    rows_in: Option<u64>,
    rows_unwanted: u64,
    /// Rows of each output partition that is done. A recomputed one counts once.
    rows_out: BTreeMap<u32, u64>,
    /// Of all of them, once all are done.
    all_rows_out: Option<u64>,
    /// Of each cohort of outputs, the first that is behind it, and how many of it are not done.
    cohorts: Vec<(u32, u32)>,
    /// Place among those that began.
    number: u64,
}

/// Limit on cohorts: no worker makes more.
const COHORTS_MAX: usize = 8;
/// Shuffles of one job that are kept: an endless job always has new ones, and a rechunk may have thousands.
const KEPT: usize = 256;

impl Shuffles {
    pub fn len(&self) -> usize {
        self.all.len()
    }

    pub fn of(&self, job: &JobId) -> Vec<ShuffleNow> {
        let own = self.all.iter().filter(|(_, shuffle)| shuffle.job == *job);
        let now = |(id, own): (&ShuffleId, &Shuffle)| ShuffleNow {
            shuffle: id.clone(),
            runs: own.runs,
            counted: own.counted,
            engine: own.engine,
            why: own.why.clone(),
            rows_in: own.rows_in,
            rows_unwanted: own.rows_unwanted,
            rows_out: own.all_rows_out.unwrap_or_else(|| own.rows_out.values().sum()),
            outputs: own.outputs,
            outputs_done: own.all_rows_out.map_or(own.rows_out.len() as u32, |_| own.outputs),
        };
        own.map(now).collect()
    }

    /// One begins, maybe again.
    fn begin(&mut self, id: ShuffleId, mut shuffle: Shuffle) {
        self.begun += 1;
        shuffle.number = self.begun;
        if let Some(before) = self.all.get(&id) {
            // Late reports of an earlier run are ignored.
            (shuffle.runs, shuffle.run) = (before.runs + 1, before.run + 1);
            // A program may compute the same once more.
            shuffle.began_again = before.all_rows_out.is_none();
        }
        let job = shuffle.job.clone();
        self.all.insert(id, shuffle);
        let own = || self.all.iter().filter(|(_, own)| own.job == job);
        if own().count() > KEPT {
            let oldest = own().min_by_key(|(_, own)| own.number).map(|(id, _)| id.clone());
            oldest.map(|id| self.all.remove(&id));
        }
    }

    pub fn forget(&mut self, job: &JobId) {
        self.all.retain(|_, own| own.job != *job);
    }

    /// The shuffle, if this run is not older than the last one.
    fn run(&mut self, shuffle: &ShuffleId, run: u64) -> Option<&mut Shuffle> {
        let own = self.all.get_mut(shuffle).filter(|own| run >= own.run)?;
        if run > own.run {
            (own.run, own.rows_in, own.rows_unwanted) = (run, None, 0);
            own.rows_out.clear();
            own.cohorts.clear();
            own.all_rows_out = None;
        }
        Some(own)
    }
}

impl Shuffle {
    /// The inputs are known, and with them the sizes of the cohorts. Outputs may be done before this message arrives.
    /// Returns the cohorts that are done.
    ///
    /// A shuffle that began again keeps its parts to the end: it may have begun again because they were needed once more.
    fn divide(&mut self, sizes: &[u32]) -> Vec<u32> {
        let outputs: u64 = sizes.iter().copied().map(u64::from).sum();
        if self.began_again || sizes.len() > COHORTS_MAX || outputs != u64::from(self.outputs) {
            return Vec::new();
        }
        let ends = sizes.iter().scan(0u32, |end, size| {
            *end = end.saturating_add(*size);
            Some((*end, *size))
        });
        self.cohorts = ends.collect();
        let done: Vec<u32> = self.rows_out.keys().copied().collect();
        done.into_iter().filter_map(|output| self.done(output)).collect()
    }

    /// An output is done for the first time. Returns its cohort, if that is complete now and others are not.
    fn done(&mut self, output: u32) -> Option<u32> {
        let cohort = self.cohorts.partition_point(|(end, _)| *end <= output);
        let (_, left) = self.cohorts.get_mut(cohort)?;
        *left = left.saturating_sub(1);
        (*left == 0 && (self.rows_out.len() as u32) < self.outputs).then_some(cohort as u32)
    }
}

impl Controller {
    /// Demands of an engine's shuffle that the data plane carries between these workers: those of its tasks' job. If
    /// the engine would have encrypted it, the data plane does, too, unless the job demands a transport that cannot.
    ///
    /// # Errors
    /// Why the engine has to carry it: a worker has no data plane, or one that cannot encrypt. Or nobody knows the task,
    /// nor what its job demands.
    pub fn shuffle_demands(&self, task: u64, workers: &[WorkerId]) -> Result<Demands, String> {
        if let Some(lacks) = workers.iter().find(|worker| !self.workers.contains_key(*worker)) {
            let why = self.without.get(lacks).map_or("it has not joined; start it with Mission Control", |why| why);
            return Err(format!("worker {lacks} has no data plane: {why}"));
        }
        if self.jobs.of(task).is_none() {
            return Err("its job is not known".into());
        }
        let demands = self.spec_of_task(task).map(|spec| spec.demands).unwrap_or_default();
        if !self.mission.engine_encrypts() || demands.encrypt != Encryption::None || demands.transport.is_some() {
            return Ok(demands);
        }
        match workers.iter().find(|worker| !self.mission.encrypts(worker)) {
            Some(lacks) => {
                Err(format!("the data plane of worker {lacks} cannot encrypt as the engine does: see its log"))
            }
            None => Ok(Demands { encrypt: Encryption::Authenticated, ..demands }),
        }
    }

    /// Why the engine may not carry a shuffle of this task itself; `None`: it may.
    pub fn engine_refuses(&self, task: u64) -> Option<String> {
        let spec = self.spec_of_task(task)?;
        self.lacks_encryption(&spec.job, &spec.demands)
    }

    /// Why the engine alone would not meet the demands of some job; `None`: it would for all.
    pub fn engine_alone_refuses(&self) -> Option<String> {
        self.mission.status().iter().find_map(|job| self.lacks_encryption(&job.job, &job.demands))
    }

    fn lacks_encryption(&self, job: &JobId, demands: &Demands) -> Option<String> {
        let lacks = demands.encrypt != Encryption::None && !self.mission.engine_encrypts();
        lacks.then(|| format!("job {job} demands encryption, which the engine's own connections lack"))
    }

    pub(super) fn shuffle(&mut self, event: Event, commands: &mut Vec<Command>) {
        match event {
            Event::ShuffleBegins { task, shuffle, outputs, counted, engine, why } => {
                let Some(job) = self.jobs.of(task).cloned() else { return };
                let own = Shuffle {
                    job,
                    runs: 1,
                    began_again: false,
                    counted,
                    engine,
                    why,
                    outputs,
                    run: 0,
                    rows_in: None,
                    rows_unwanted: 0,
                    rows_out: BTreeMap::new(),
                    all_rows_out: None,
                    cohorts: Vec::new(),
                    number: 0,
                };
                self.shuffles.begin(shuffle, own);
            }
            Event::ShuffleIn { shuffle, run, rows, unwanted, cohorts } => {
                if let Some(own) = self.shuffles.run(&shuffle, run) {
                    (own.rows_in, own.rows_unwanted) = (Some(rows), unwanted);
                    let taken = own.divide(&cohorts).into_iter();
                    commands.extend(taken.map(|cohort| Command::Taken { shuffle: shuffle.clone(), run, cohort }));
                }
            }
            Event::ShuffleOut { shuffle, run, output, rows } => {
                let own = self.shuffles.run(&shuffle, run).filter(|own| output < own.outputs);
                if let Some(own) = own.filter(|own| own.all_rows_out.is_none()) {
                    if own.rows_out.insert(output, rows).is_none()
                        && let Some(cohort) = own.done(output)
                    {
                        commands.push(Command::Taken { shuffle, run, cohort });
                    }
                    if own.rows_out.len() as u32 == own.outputs {
                        own.all_rows_out = Some(std::mem::take(&mut own.rows_out).values().sum());
                    }
                }
            }
            _ => {}
        }
    }
}
