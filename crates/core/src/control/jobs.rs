//! The jobs of a cluster: to which job a task belongs, the names of jobs, which of them somebody has named, whose queued
//! task goes next, the end of jobs.
//!
//! A job is over when its last task is done and no client submits for it. Then its workers send their last reports on it.

use super::{Change, Command, Controller, Message, NewTask, Origin, Record, record};
use crate::mission;
use crate::types::{Encryption, JobId, JobSpec, WorkerId, fit_name};
use crate::units::Time;
use std::collections::BTreeSet;
use std::collections::btree_map::{BTreeMap, Entry};
use std::sync::Arc;
use std::time::Duration;

/// A client: a program that submits work.
pub type ClientId = Arc<str>;

#[derive(Default)]
pub struct Jobs {
    jobs: BTreeMap<JobId, Job>,
    /// Whose name it is.
    owners: BTreeMap<JobId, ClientId>,
    tasks: BTreeMap<u64, JobId>,
    /// Jobs that somebody has named: a program, an annotation, a span, or an operator who changed it.
    named: BTreeSet<JobId>,
    /// Tasks that were given to a worker, and how many there are of each job.
    assigned: BTreeSet<u64>,
    assigned_of: BTreeMap<JobId, usize>,
}

struct Job {
    spec: JobSpec,
    tasks: u64,
    /// Clients that are going to submit for it, with the number of announcements.
    clients: Vec<ClientId>,
}

/// After the last task of a job, for its workers' last reports: a worker that does not answer may be gone.
pub const LAST_WORDS: Duration = Duration::from_secs(5);
/// Letters of a client's name that distinguish its job from another client's job of the same name.
const SUFFIX: usize = 8;

impl Jobs {
    /// The requested name, unless another client's job has it: one that runs, or one whose last reports are awaited,
    /// which would be added to a new job of that name.
    pub fn name(&mut self, wanted: &JobId, client: &ClientId) -> JobId {
        // Ids of clients end with a UUID of version 1 (RFC 9562, 5.1): its first group is of the time, the last one of the host.
        let groups: Vec<&str> = client.rsplit('-').collect();
        let own = groups.get(4).unwrap_or(&groups[0]);
        let suffix: String = own.chars().take(SUFFIX).collect();
        let others = (2..).map(|number| format!("{wanted}@{suffix}.{number}").into());
        let names = [wanted.clone(), format!("{wanted}@{suffix}").into()].into_iter().chain(others);
        for name in names {
            if self.owners.entry(name.clone()).or_insert_with(|| client.clone()) == client {
                return name;
            }
        }
        unreachable!("there are more numbers than names that are taken")
    }

    /// A job of this name was rejected, or its last reports have arrived: unless one runs, another client may use the
    /// name.
    pub fn release_name(&mut self, job: &JobId) {
        if !self.jobs.contains_key(job) {
            self.owners.remove(job);
        }
    }

    pub fn spec(&self, job: &JobId) -> Option<&JobSpec> {
        self.jobs.get(job).map(|own| &own.spec)
    }

    pub fn of(&self, task: u64) -> Option<&JobId> {
        self.tasks.get(&task)
    }

    /// Adds or respecifies a job; true if it is new.
    pub fn arrive(&mut self, spec: JobSpec) -> bool {
        match self.jobs.get_mut(&spec.job) {
            Some(own) if own.spec == spec => false,
            Some(own) => {
                own.spec = spec;
                true
            }
            None => {
                self.jobs.insert(spec.job.clone(), Job { spec, tasks: 0, clients: Vec::new() });
                true
            }
        }
    }

    /// A task of a job that has arrived; once per task.
    pub fn add(&mut self, task: u64, job: &JobId) {
        if let Some(own) = self.jobs.get_mut(job)
            && self.tasks.insert(task, job.clone()).is_none()
        {
            own.tasks += 1;
        }
    }

    /// A task is forgotten; returns its job if that is over.
    pub fn remove(&mut self, task: u64) -> Option<JobId> {
        self.ends(task);
        let job = self.tasks.remove(&task)?;
        let own = self.jobs.get_mut(&job)?;
        own.tasks -= 1;
        self.over(job)
    }

    /// A task was given to a worker, or to another one.
    pub fn begins(&mut self, task: u64) {
        if let Some(job) = self.tasks.get(&task)
            && self.assigned.insert(task)
        {
            *self.assigned_of.entry(job.clone()).or_default() += 1;
        }
    }

    /// A task has no worker any more.
    pub fn ends(&mut self, task: u64) {
        if let Some(job) = self.tasks.get(&task)
            && self.assigned.remove(&task)
        {
            one_less(&mut self.assigned_of, job.clone());
        }
    }

    /// Somebody has named this job: it takes part where jobs share by weight.
    pub fn name_it(&mut self, job: &JobId) {
        if self.jobs.contains_key(job) && !self.named.contains(job) {
            self.named.insert(job.clone());
        }
    }

    pub fn is_named(&self, job: &JobId) -> bool {
        self.named.contains(job)
    }

    /// Jobs that were named, and are not over.
    pub fn named(&self) -> usize {
        self.named.len()
    }

    /// Of these jobs, the one whose queued task goes to a worker next: the one with the fewest assigned tasks for its
    /// priority, the first of equals. `None` stands for all jobs that nobody has named; together they count as one job
    /// of priority 1.
    pub fn next(&self, waiting: &[Option<JobId>]) -> usize {
        let named = |job: &JobId| self.assigned_of.get(job).copied().unwrap_or(0);
        let load = |job: &Option<JobId>| match job {
            Some(job) => named(job) as f64 / self.jobs.get(job).map_or(1.0, |own| own.spec.priority),
            None => self.assigned.len().saturating_sub(self.named.iter().map(named).sum()) as f64,
        };
        let loads: Vec<f64> = waiting.iter().map(load).collect();
        (0..loads.len()).reduce(|best, at| if loads[at] < loads[best] { at } else { best }).unwrap_or(0)
    }

    /// A client is going to submit for a job that has arrived.
    pub fn expect(&mut self, job: &JobId, client: &ClientId) {
        if let Some(own) = self.jobs.get_mut(job) {
            own.clients.push(client.clone());
        }
    }

    /// The client stops submitting for this job; returns the job if that is over.
    pub fn leave(&mut self, job: &JobId, client: &ClientId) -> Option<JobId> {
        let own = self.jobs.get_mut(job)?;
        let place = own.clients.iter().position(|other| other == client)?;
        own.clients.swap_remove(place);
        self.over(job.clone())
    }

    /// A client is gone; returns the jobs that are over.
    pub fn client_gone(&mut self, client: &ClientId) -> Vec<JobId> {
        let mut left = Vec::new();
        for (job, own) in &mut self.jobs {
            let before = own.clients.len();
            own.clients.retain(|other| other != client);
            if own.clients.len() < before {
                left.push(job.clone());
            }
        }
        left.into_iter().filter_map(|job| self.over(job)).collect()
    }

    fn over(&mut self, job: JobId) -> Option<JobId> {
        let own = self.jobs.get(&job)?;
        if own.tasks > 0 || !own.clients.is_empty() {
            return None;
        }
        self.jobs.remove(&job);
        self.named.remove(&job);
        Some(job)
    }

    pub fn len(&self) -> usize {
        self.jobs.len()
    }

    pub fn tasks(&self) -> usize {
        self.tasks.len()
    }

    /// Names that are taken.
    pub fn names(&self) -> usize {
        self.owners.len()
    }
}

/// A job that is over: the workers whose last reports are awaited, and the deadline.
pub struct Ending {
    pub awaits: BTreeSet<WorkerId>,
    pub until: Time,
}

impl Controller {
    pub(super) fn admit(&mut self, now: Time, mut spec: JobSpec, client: &ClientId, commands: &mut Vec<Command>) {
        if let Err(why) = spec.check() {
            return commands.push(Command::Invalid { why });
        }
        let refused = self.mission.admits(&spec).err().or_else(|| self.lacks(&spec));
        let job = self.jobs.name(&spec.job, client);
        if let Some(reason) = &refused {
            commands.push(record(Record::Refused { job: job.clone(), reason: reason.clone() }));
            if !self.ending.contains_key(&job) {
                self.jobs.release_name(&job);
            }
        } else {
            spec.job = job.clone();
            self.arrive(now, spec, true, commands);
            self.jobs.name_it(&job);
            self.jobs.expect(&job, client);
        }
        commands.push(Command::Admitted { job, refused });
    }

    /// Why no worker can do what a job demands of its transfers, if none has a data plane.
    pub(super) fn lacks(&self, spec: &JobSpec) -> Option<String> {
        let demanded = spec.demands.transport.is_some() || spec.demands.encrypt != Encryption::None;
        let (worker, why) = self.without.first_key_value().filter(|_| demanded && self.workers.is_empty())?;
        Some(format!("no worker has a data plane; {worker}: {why}"))
    }

    pub(super) fn change(&mut self, now: Time, job: &JobId, change: Change, commands: &mut Vec<Command>) {
        let Some(spec) = self.jobs.spec(job) else {
            let error = Some(format!("there is no job {job:?} now"));
            return commands.push(Command::Changed { error, refused: None });
        };
        let changed = changed(spec.clone(), &change);
        let wrong = crate::types::check_priority(job, changed.priority).err();
        if let Some(error) = wrong.or_else(|| crate::flight::contradiction(&changed.demands)) {
            return commands.push(Command::Changed { error: Some(error), refused: None });
        }
        let refused = self.mission.admits(&changed).err();
        if refused.is_none() {
            let known = self.changed.entry(job.clone()).or_default();
            known.priority = change.priority.or(known.priority);
            known.transport = change.transport.or(known.transport);
            self.arrive(now, changed, false, commands);
            // An operator means this job among the others.
            self.jobs.name_it(job);
        }
        commands.push(Command::Changed { error: None, refused });
    }

    pub(super) fn tasks(&mut self, now: Time, origin: Origin, tasks: Vec<NewTask>, commands: &mut Vec<Command>) {
        let is_named = origin.spec.is_some() || origin.span.as_ref().is_some_and(|span| !span.is_empty());
        let spec = self.spec_of(origin);
        let job = spec.job.clone();
        if let Err(why) = spec.check() {
            return commands.push(Command::Invalid { why });
        }
        self.arrive(now, spec, false, commands);
        if is_named {
            self.jobs.name_it(&job);
        }
        for NewTask { task, stage, kind, inputs } in inputs_first(tasks) {
            self.jobs.add(task, &job);
            let added = mission::Event::TaskAdded { task, job: job.clone(), stage, kind, inputs };
            self.decide(now, added, commands);
        }
    }

    /// The job of new tasks: as the program says, else that of the task that submitted them, else that of the part of the
    /// program, else one for the client.
    pub(super) fn spec_of(&mut self, origin: Origin) -> JobSpec {
        let Origin { client, spec, by, span } = origin;
        if let Some(spec) = spec {
            return spec;
        }
        let parent = by.and_then(|by| self.jobs.of(by)).and_then(|job| self.jobs.spec(job));
        if let Some(parent) = parent {
            return parent.clone();
        }
        // The program did not intend it as the name of a job.
        let span = span.filter(|span| !span.is_empty()).map(|span| fit_name(&span).into());
        JobSpec::named(self.jobs.name(&span.unwrap_or_else(|| fit_name(&client).into()), &client))
    }

    pub(super) fn arrive(&mut self, now: Time, spec: JobSpec, admitted: bool, commands: &mut Vec<Command>) {
        let spec = match self.changed.get(&spec.job) {
            Some(change) => changed(spec, change),
            None => spec,
        };
        let new = self.jobs.arrive(spec.clone());
        if new {
            commands.push(record(Record::Job(spec.clone())));
        }
        if new || admitted {
            self.job_arrived(now, spec.clone(), commands);
            self.decide(now, mission::Event::JobArrived { spec, admitted }, commands);
        }
    }

    /// The job is over; its workers have a moment to send their last reports.
    pub(super) fn end(&mut self, now: Time, job: JobId, commands: &mut Vec<Command>) {
        let awaits = self.workers.keys().cloned().collect();
        self.ending.insert(job.clone(), Ending { awaits, until: now + LAST_WORDS });
        self.tell_all(Message { report: Some(job.clone()), ..Message::default() }, commands);
        if self.workers.is_empty() {
            self.finish(now, &job, commands);
        }
    }

    pub(super) fn finish(&mut self, now: Time, job: &JobId, commands: &mut Vec<Command>) {
        if self.ending.remove(job).is_none() || self.jobs.spec(job).is_some() {
            return; // it has come back meanwhile
        }
        self.jobs.release_name(job);
        self.changed.remove(job);
        let ended = self.jobs_now(|own| own.job == *job);
        commands.extend(ended.into_iter().map(|own| record(Record::JobEnded(Box::new(own)))));
        self.recomputed.remove(job);
        self.transfers.forget(job);
        self.shuffles.forget(job);
        self.job_ended(now, job.clone(), commands);
        self.decide(now, mission::Event::JobEnded { job: job.clone() }, commands);
        self.tell_all(Message { forget_job: Some(job.clone()), ..Message::default() }, commands);
    }

    /// Notifies the engine and its workers when the second named job arrives, and when it leaves: from then on jobs share
    /// threads, queues and messages by weight, or the engine's own order holds.
    pub(super) fn contend(&mut self, commands: &mut Vec<Command>) {
        let contended = self.jobs.named() >= 2;
        if contended != self.contended {
            self.contended = contended;
            commands.push(Command::Contention { contended });
            self.tell_all(Message { contended: Some(contended), ..Message::default() }, commands);
        }
    }

    /// Whether reports on a job may still arrive.
    pub(super) fn is_known(&self, job: &JobId) -> bool {
        self.jobs.spec(job).is_some() || self.ending.contains_key(job)
    }
}

fn one_less<K: Ord>(counts: &mut BTreeMap<K, usize>, key: K) {
    if let Entry::Occupied(mut count) = counts.entry(key) {
        *count.get_mut() -= 1;
        if *count.get() == 0 {
            count.remove();
        }
    }
}

/// New tasks, each after those of them that it takes from. Engines refuse cycles; if there is one, it is cut somewhere.
pub(super) fn inputs_first(tasks: Vec<NewTask>) -> Vec<NewTask> {
    let places: BTreeMap<u64, usize> = tasks.iter().enumerate().map(|(place, new)| (new.task, place)).collect();
    let mut tasks: Vec<Option<NewTask>> = tasks.into_iter().map(Some).collect();
    let mut sorted = Vec::with_capacity(tasks.len());
    let mut waiting = vec![false; tasks.len()];
    for first in 0..tasks.len() {
        let mut pending = vec![first];
        while let Some(&place) = pending.last() {
            waiting[place] = true;
            let inputs = tasks[place].as_ref().map_or(&[][..], |new| &new.inputs);
            let waits = |input: &u64| places.get(input).copied().filter(|own| !waiting[*own] && tasks[*own].is_some());
            let before: Vec<usize> = inputs.iter().filter_map(waits).collect();
            if before.is_empty() {
                sorted.extend(tasks[place].take());
                pending.pop();
            }
            pending.extend(before);
        }
    }
    sorted
}

fn changed(spec: JobSpec, change: &Change) -> JobSpec {
    let mut spec = spec;
    spec.priority = change.priority.unwrap_or(spec.priority);
    spec.demands.transport = change.transport.unwrap_or(spec.demands.transport);
    spec
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrive(jobs: &mut Jobs, name: &str) -> JobId {
        let job = JobId::from(name);
        jobs.arrive(JobSpec::named(job.clone()));
        job
    }

    #[test]
    fn a_job_is_over_with_its_last_task_once_no_client_submits_for_it() {
        let (mut jobs, client) = (Jobs::default(), ClientId::from("Client-1"));
        let name = jobs.name(&"etl".into(), &client);
        let job = arrive(&mut jobs, &name);
        jobs.expect(&job, &client);
        jobs.add(1, &job);
        jobs.add(1, &job);
        jobs.add(2, &job);
        assert_eq!(jobs.remove(1), None);
        assert_eq!(jobs.leave(&job, &client), None);
        assert_eq!(jobs.remove(2), Some(job.clone()));
        assert_eq!((jobs.len(), jobs.tasks(), jobs.names()), (0, 0, 1), "its last words are still to come");
        jobs.release_name(&job);
        assert_eq!(jobs.names(), 0);
    }

    #[test]
    fn clients_that_are_gone_hold_no_job() {
        let (mut jobs, one, other) = (Jobs::default(), ClientId::from("Client-1"), ClientId::from("Client-2"));
        let (a, b) = (arrive(&mut jobs, "a"), arrive(&mut jobs, "b"));
        for client in [&one, &one, &other] {
            jobs.expect(&a, client);
        }
        jobs.expect(&b, &one);
        jobs.add(1, &b);
        assert!(jobs.client_gone(&one).is_empty(), "one has another client, the other a task");
        assert_eq!(jobs.client_gone(&other), [a]);
        assert_eq!(jobs.remove(1), Some(b));
    }

    #[test]
    fn tasks_come_after_their_inputs_and_a_cycle_is_cut() {
        let order = |given: &[(u64, &[u64])]| {
            let new = given.iter().map(|(task, inputs)| NewTask {
                task: *task,
                stage: "s".into(),
                kind: crate::graph::Kind::Work,
                inputs: inputs.to_vec(),
            });
            inputs_first(new.collect()).into_iter().map(|new| new.task).collect::<Vec<_>>()
        };
        assert_eq!(order(&[(1, &[2, 3, 9]), (2, &[3]), (3, &[]), (4, &[1, 2])]), [3, 2, 1, 4]);
        assert_eq!(order(&[(1, &[2]), (2, &[3]), (3, &[1, 3])]), [3, 2, 1]);
    }

    #[test]
    fn the_job_with_the_fewest_assigned_tasks_for_its_priority_is_next() {
        let mut jobs = Jobs::default();
        for (name, priority) in [("a", 1.0), ("b", 3.0), ("nobody's", 1.0)] {
            jobs.arrive(JobSpec { priority, ..JobSpec::named(name.into()) });
        }
        let (a, b) = (JobId::from("a"), JobId::from("b"));
        let waiting = [Some(a.clone()), Some(b.clone()), None];
        [&a, &b].into_iter().for_each(|job| jobs.name_it(job));
        assert_eq!((jobs.named(), jobs.is_named(&a), jobs.is_named(&"nobody's".into())), (2, true, false));
        (1..=20).for_each(|task| jobs.add(task, &a));
        (21..=40).for_each(|task| jobs.add(task, &b));
        (41..=60).for_each(|task| jobs.add(task, &"nobody's".into()));
        let mut free = [1..=20, 21..=40, 41..=60];
        let mut given = [0; 3];
        for _ in 0..25 {
            let next = jobs.next(&waiting);
            jobs.begins(free[next].next().unwrap());
            given[next] += 1;
        }
        assert_eq!(given, [5, 15, 5]);
        // It was given to another worker: that is one task as before.
        jobs.begins(1);
        assert_eq!(jobs.next(&waiting), 0, "the first of equals");
        jobs.begins(6);
        assert_eq!(jobs.next(&waiting), 1);
        [1, 2].into_iter().for_each(|task| jobs.ends(task));
        assert_eq!(jobs.next(&waiting), 0);
        (1..=60).for_each(|task| _ = jobs.remove(task));
        assert_eq!((jobs.named(), jobs.len()), (0, 0), "they are over");
        assert!(jobs.assigned.is_empty() && jobs.assigned_of.is_empty());
    }

    #[test]
    fn two_clients_have_two_jobs_of_one_name() {
        let mut jobs = Jobs::default();
        let (one, other) = (ClientId::from("Client-worker-0aaaaaaaa1"), ClientId::from("Client-0bbbbbbbb2"));
        assert_eq!(&*jobs.name(&"etl".into(), &one), "etl");
        assert_eq!(&*jobs.name(&"etl".into(), &one), "etl");
        assert_eq!(&*jobs.name(&"etl".into(), &other), "etl@0bbbbbbb");
        // Clients of one host differ in the first group.
        let host = |first: &str| ClientId::from(format!("Client-{first}-ca3a-11f0-8001-02fc00000005"));
        assert_eq!(&*jobs.name(&"etl".into(), &host("7c5a1d00")), "etl@7c5a1d00");
        assert_eq!(&*jobs.name(&"etl".into(), &host("7c5a1d01")), "etl@7c5a1d01");
        // If they do not, a number distinguishes them.
        let alike = ClientId::from("Client-7c5a1d01-ca3b-11f0-8001-02fc00000005");
        assert_eq!(&*jobs.name(&"etl".into(), &alike), "etl@7c5a1d01.2");
        assert_eq!(&*jobs.name(&"etl".into(), &host("7c5a1d01")), "etl@7c5a1d01", "it keeps its own");
        jobs.release_name(&"etl".into());
        assert_eq!(&*jobs.name(&"etl".into(), &other), "etl", "the first one's was rejected");
        // A client keeps a name while its job runs.
        arrive(&mut jobs, "etl");
        jobs.release_name(&"etl".into());
        assert_eq!(&*jobs.name(&"etl".into(), &one), "etl@0aaaaaaa");
    }
}
