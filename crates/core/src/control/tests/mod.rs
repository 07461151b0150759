//! The lifecycles of workers, jobs and objects, as an engine's adapter would report them.

mod delegates;
mod doubt;
mod handover;
mod jobs;
mod service;
mod streams;
mod transfers;
mod workers;

use super::jobs::inputs_first;
use super::*;
use crate::defaults::HAND_OVER_WITHIN;
use crate::graph::Kind;
use crate::report::TransferReport;
use crate::types::{Demands, Encryption, Transport};
use std::collections::VecDeque;
use std::time::Duration;

struct World {
    controller: Controller,
    now: Time,
    /// Messages to each worker, oldest first.
    sent: BTreeMap<WorkerId, VecDeque<Arc<Message>>>,
    records: Vec<Record>,
    recompute: BTreeSet<u64>,
    /// The manifest of the last request to each worker to take an object.
    asked: BTreeMap<(String, ObjectId), ObjectId>,
}

impl World {
    fn new(workers: &[&str]) -> World {
        let environment = Environment { carriers: vec![Transport::Tcp], interfaces: 1, ..Environment::default() };
        World::with(&environment, workers)
    }

    fn with(environment: &Environment, workers: &[&str]) -> World {
        let controller = Controller::new("fair", FlowsPerHost::Fixed(10), environment.clone()).unwrap();
        let mut world = World {
            controller,
            now: Time(0),
            sent: BTreeMap::new(),
            records: Vec::new(),
            recompute: BTreeSet::new(),
            asked: BTreeMap::new(),
        };
        for worker in workers {
            world.join(worker, environment.clone());
        }
        world.event(Event::Flush);
        world.sent.clear();
        world
    }

    fn join(&mut self, worker: &str, environment: Environment) {
        let (host, address) = (format!("host of {worker}").into(), format!("{worker}:1").into());
        self.event(Event::Join {
            worker: worker.into(),
            host,
            address,
            environment,
            problems: vec![],
            protocol: PROTOCOL,
        });
        self.event(Event::Known { worker: worker.into() });
    }

    /// Gives the commands that are neither messages nor records.
    fn event(&mut self, event: Event) -> Vec<Command> {
        let mut commands = Vec::new();
        self.controller.handle(self.now, event, &mut commands);
        let mut rest = Vec::new();
        for command in commands {
            match command {
                Command::Tell { worker, message, .. } => self.sent.entry(worker).or_default().push_back(message),
                Command::Record { record } => self.records.push(*record),
                Command::Recompute { tasks } => self.recompute.extend(tasks),
                other => rest.push(other),
            }
        }
        rest
    }

    fn pass(&mut self, time: Duration) {
        self.now = self.now + time;
        self.event(Event::Tick);
    }

    fn admit(&mut self, job: &str, client: &str) -> JobId {
        let spec = JobSpec::named(job.into());
        let said = self.event(Event::Admit { spec, client: client.into() });
        let [Command::Admitted { job, refused: None }, ..] = &said[..] else { panic!("{said:?}") };
        job.clone()
    }

    fn task(&mut self, task: u64, job: &str, by: Option<u64>) {
        let spec = (!job.is_empty()).then(|| JobSpec::named(job.into()));
        let origin = Origin { client: "client".into(), spec, by, span: None };
        let new = NewTask { task, stage: "stage".into(), kind: Kind::Work, inputs: vec![] };
        self.event(Event::Tasks { origin, tasks: vec![new] });
    }

    fn carries(&mut self, task: u64, object: u128, owner: &str) -> Vec<Command> {
        let carried = Carried { object: ObjectId(object), owner: owner.into(), parts: 1, bytes: 5, copies: 1 };
        self.event(Event::Carries { task, objects: vec![carried], alive: true })
    }

    /// Objects that a worker was asked to free, and that were reported to it as lost, since the last call.
    fn heard(&mut self, worker: &str) -> (Vec<u128>, Vec<u128>) {
        let all = self.sent.remove(worker).unwrap_or_default();
        let ids = |of: fn(&Message) -> &Vec<ObjectId>| {
            all.iter().flat_map(|message| of(message).iter().map(|id| id.0)).collect()
        };
        (ids(|message| &message.free), ids(|message| &message.lost))
    }

    fn left(&self) -> Vec<(&'static str, usize)> {
        self.controller.held().into_iter().filter(|(_, count)| *count > 0).collect()
    }
}
