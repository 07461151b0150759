//! Which job a task belongs to, how jobs are called, and when one is over.
//!
//! A job is over with its last task, once no client submits for it any more.

use crate::types::{JobId, JobSpec, WorkerId};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A program that submits work.
pub type ClientId = Arc<str>;

#[derive(Default)]
pub struct Jobs {
    jobs: BTreeMap<JobId, Job>,
    /// Whose name it is.
    owners: BTreeMap<JobId, ClientId>,
    tasks: BTreeMap<u64, JobId>,
    /// Where each task is that a worker has, and how many of each job a worker has.
    places: BTreeMap<u64, WorkerId>,
    processing: BTreeMap<(JobId, WorkerId), usize>,
}

struct Job {
    spec: JobSpec,
    tasks: u64,
    /// Clients that are going to submit for it, as often as they said so.
    clients: Vec<ClientId>,
}

/// Letters of a client's name that tell a job of the same name from another's.
const SUFFIX: usize = 8;

impl Jobs {
    /// The name as wanted, unless a job of another client has it.
    pub fn name(&mut self, wanted: &JobId, client: &ClientId) -> JobId {
        let owner = self.owners.entry(wanted.clone()).or_insert_with(|| client.clone());
        if owner == client {
            return wanted.clone();
        }
        let own = client.rsplit('-').next().unwrap_or(client);
        let suffix: String = own.chars().take(SUFFIX).collect();
        format!("{wanted}@{suffix}").into()
    }

    /// A job under this name was rejected: unless one runs under it, another client may use the name.
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

    /// A job is there, as specified from now on; true if that is new.
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

    /// A task is forgotten; gives its job where that is over.
    pub fn remove(&mut self, task: u64) -> Option<JobId> {
        self.ends(task);
        let job = self.tasks.remove(&task)?;
        let own = self.jobs.get_mut(&job)?;
        own.tasks -= 1;
        self.over(job)
    }

    /// A task was given to a worker, or to another one.
    pub fn begins(&mut self, task: u64, worker: &WorkerId) {
        self.ends(task);
        if let Some(job) = self.tasks.get(&task) {
            *self.processing.entry((job.clone(), worker.clone())).or_default() += 1;
            self.places.insert(task, worker.clone());
        }
    }

    /// No worker has a task any more.
    pub fn ends(&mut self, task: u64) {
        let (Some(worker), Some(job)) = (self.places.remove(&task), self.tasks.get(&task)) else { return };
        let place = (job.clone(), worker);
        if let Some(count) = self.processing.get_mut(&place) {
            *count -= 1;
            if *count == 0 {
                self.processing.remove(&place);
            }
        }
    }

    /// How many tasks of a job a worker has.
    pub fn processing(&self, job: &JobId, worker: &WorkerId) -> usize {
        self.processing.get(&(job.clone(), worker.clone())).copied().unwrap_or(0)
    }

    /// A client is going to submit for a job that has arrived.
    pub fn expect(&mut self, job: &JobId, client: &ClientId) {
        if let Some(own) = self.jobs.get_mut(job) {
            own.clients.push(client.clone());
        }
    }

    /// The client submits no more for this job; gives the job where that is over.
    pub fn leave(&mut self, job: &JobId, client: &ClientId) -> Option<JobId> {
        let own = self.jobs.get_mut(job)?;
        let place = own.clients.iter().position(|other| other == client)?;
        own.clients.swap_remove(place);
        self.over(job.clone())
    }

    /// A client is gone, and submits no more; gives the jobs that are over.
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
        self.owners.remove(&job);
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
        assert_eq!(jobs.remove(2), Some(job));
        assert_eq!((jobs.len(), jobs.tasks(), jobs.names()), (0, 0, 0));
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
    fn two_clients_have_two_jobs_of_one_name() {
        let mut jobs = Jobs::default();
        let (one, other) = (ClientId::from("Client-worker-0aaaaaaaa1"), ClientId::from("Client-0bbbbbbbb2"));
        assert_eq!(&*jobs.name(&"etl".into(), &one), "etl");
        assert_eq!(&*jobs.name(&"etl".into(), &one), "etl");
        assert_eq!(&*jobs.name(&"etl".into(), &other), "etl@0bbbbbbb");
        jobs.release_name(&"etl".into());
        assert_eq!(&*jobs.name(&"etl".into(), &other), "etl", "the first one's was rejected");
        // Who bears a name keeps it while the job is there.
        arrive(&mut jobs, "etl");
        jobs.release_name(&"etl".into());
        assert_eq!(&*jobs.name(&"etl".into(), &one), "etl@0aaaaaaa");
    }
}
