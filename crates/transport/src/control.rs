//! Messages from the Mission Controller to this process, and reports of this process to it ([`mission_core::control`]).
//! The engine transports both.

use crate::endpoint::Endpoint;
use crate::handover;
use crate::in_force::Took;
use crate::object::ObjectId;
use mission_core::control::{Described, Fetched, Message, Taken, Untaken, WorkerReport};
use mission_core::mission;
use mission_core::pattern::Asked;
use mission_core::report::TransferReport;
use mission_core::types::{self, JobId, TransferId};
use mission_core::versions::{Inbox, Received};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};

/// What was received, and what is to be reported.
#[derive(Default)]
pub(crate) struct Control(Mutex<State>);

#[derive(Default)]
struct State {
    /// `None` until this process has joined.
    inbox: Option<Inbox>,
    /// The version that the last report had.
    said: u64,
    /// And the version of the shares that it had.
    in_force: u64,
    /// A message is missing: the caller is to request it again.
    misses: bool,
    /// Fetches that began since.
    asked: Vec<Fetched>,
    described: Vec<Described>,
    took: Vec<Taken>,
    untaken: Vec<Untaken>,
}

/// What a message requires from the caller that delivers messages.
#[derive(Debug, PartialEq)]
pub struct Left {
    /// A message before it is missing: request all after this version again. This message was not executed.
    pub missing_after: Option<u64>,
    /// Send the last report on this job: [`Endpoint::report`].
    pub report: Option<JobId>,
    /// Probe these: [`Endpoint::probe_ecn`].
    pub probe_ecn: Vec<SocketAddr>,
    /// Share threads and messages by the weights of jobs from now on, or no more.
    pub contended: Option<bool>,
}

impl Control {
    pub(crate) fn took(&self, taken: Taken) {
        self.lock().took.push(taken);
    }

    pub(crate) fn untaken(&self, untaken: Untaken) {
        self.lock().untaken.push(untaken);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no panic while held")
    }
}

impl Endpoint {
    /// This process has joined: its initial state, as of a version.
    pub fn joined(&self, commands: Vec<mission::Command>, locations: Vec<Location>, version: u64) {
        self.in_force.begin_anew();
        commands.into_iter().for_each(|command| self.command(command));
        self.fetcher.locations(addresses(locations));
        self.control.lock().inbox = Some(Inbox::from(version));
    }

    /// Executes commands about jobs.
    pub fn command(&self, command: mission::Command) {
        if !matches!(command, mission::Command::Shares(_) | mission::Command::SharesChanged(_)) {
            return self.fetcher.command(command);
        }
        if self.in_force.take(command.clone()) == Took::InForce {
            self.session.pass(&command);
        }
    }

    /// Executes a message, unless it was received before or a message before it is missing.
    pub fn hear(&self, version: u64, message: Message) -> Left {
        let mut left = Left { missing_after: None, report: None, probe_ecn: Vec::new(), contended: None };
        {
            let mut state = self.control.lock();
            // Messages from before this process has joined will be sent again.
            let Some(inbox) = &mut state.inbox else { return left };
            match inbox.receive(version) {
                Received::InOrder => state.misses = false,
                Received::Old => return left,
                Received::Gap => {
                    left.missing_after = Some(inbox.last());
                    state.misses = true;
                    return left;
                }
            }
        }
        let Message {
            commands,
            free,
            lost,
            why,
            locations,
            describe,
            take,
            keep,
            report,
            forget_job,
            probe_ecn,
            speaker,
            contended,
        } = message;
        commands.into_iter().for_each(|command| self.command(command));
        self.fetcher.locations(addresses(locations));
        for asked in describe {
            let job = asked.job.clone();
            // Without memory for a manifest, name one that does not exist: the targets of the objects report that.
            let none = |_| Described { job, manifest: ObjectId::random().into(), bytes: 1 };
            let described = handover::describe(&self.store, &self.fetcher, asked).unwrap_or_else(none);
            self.control.lock().described.push(described);
        }
        take.into_iter().for_each(|take| self.taker.take(take));
        keep.into_iter().for_each(|keep| self.taker.keep(keep));
        free.into_iter().for_each(|object| _ = self.free(&object.into()));
        if !lost.is_empty() {
            let lost: Vec<ObjectId> = lost.into_iter().map(Into::into).collect();
            self.fetcher.lost(&lost, &why);
        }
        if let Some(job) = forget_job {
            self.fetcher.forget_job(&job);
        }
        if let Some(speaker) = speaker.and_then(|address| address.parse().ok()) {
            self.session.appointed(speaker);
        }
        left.report = report;
        left.contended = contended;
        left.probe_ecn = probe_ecn.iter().filter_map(|address| address.parse().ok()).collect();
        left
    }

    /// The version of the last message that was executed.
    pub fn heard(&self) -> u64 {
        self.control.lock().inbox.as_ref().map_or(0, Inbox::last)
    }

    /// A fetch begins: for the pattern of its transfer.
    pub fn asks(&self, transfer: TransferId, asked: Asked) {
        self.control.lock().asked.push(Fetched { transfer, asked });
    }

    /// This process is about to end: it sends the rest of its reports itself.
    pub fn leaves_session(&self) {
        self.session.leave();
    }

    /// Whether there is something to report, or the host's session or the caller waits for the next
    /// [`Endpoint::report`].
    pub fn has_news(&self) -> bool {
        if self.fetcher.has_news() || self.session.has_news() || self.store.copies.has_news() {
            return true;
        }
        let shares = self.in_force.version();
        let state = self.control.lock();
        let State { inbox, said, in_force, misses, asked, described, took, untaken } = &*state;
        let nothing = asked.is_empty() && described.is_empty() && took.is_empty() && untaken.is_empty();
        *misses || !nothing || shares != *in_force || inbox.as_ref().map_or(0, Inbox::last) != *said
    }

    /// Builds the report to the Mission Controller: what has changed here since the last one, unless the host's speaker
    /// reports it, and what other processes of this host have reported. `None`: nothing. `cpu`: CPU seconds of this
    /// process. `last_of`: the last report on a job.
    pub fn report(&self, cpu: f64, last_of: Option<JobId>) -> Option<WorkerReport> {
        let mut records = self.fetcher.report().unwrap_or_default();
        let all = self.session.says_all();
        if all || last_of.is_some() {
            // An earlier report may arrive later than this one, or was lost with the speaker that was to pass it on.
            let said: BTreeSet<TransferId> = records.iter().map(TransferReport::transfer).collect();
            let is_meant = |own: &TransferReport| all || last_of.as_ref().is_some_and(|job| **job == *own.job);
            let rest = self.fetcher.transfers().into_iter();
            records.extend(rest.filter(|own| is_meant(own) && !said.contains(&own.transfer())));
        }
        let others = self.session.reports_of_others();
        let shares = self.in_force.version();
        let copied: Vec<types::ObjectId> = self.store.copies.news().into_iter().map(Into::into).collect();
        let mut state = self.control.lock();
        let seen = state.inbox.as_ref().map_or(0, Inbox::last);
        let said = std::mem::replace(&mut state.said, seen);
        let report = WorkerReport {
            records,
            asked: std::mem::take(&mut state.asked),
            copied,
            described: std::mem::take(&mut state.described),
            took: std::mem::take(&mut state.took),
            untaken: std::mem::take(&mut state.untaken),
            cpu,
            seen,
            shares,
            number: 0,
            last_of,
            others,
            facts: Vec::new(),
        };
        let in_force = std::mem::replace(&mut state.in_force, shares);
        drop(state);
        let nothing = WorkerReport { cpu, seen, shares, ..WorkerReport::default() };
        let is_new = seen != said || shares != in_force || report != nothing;
        self.session.report(is_new.then_some(report)).map(WorkerReport::folded)
    }
}

/// The addresses that have an object.
pub type Location = (types::ObjectId, Vec<Arc<str>>);

fn addresses(locations: Vec<Location>) -> Vec<(ObjectId, Vec<SocketAddr>)> {
    let parse = |(object, at): Location| {
        (ObjectId::from(object), at.iter().filter_map(|address| address.parse().ok()).collect())
    };
    locations.into_iter().map(parse).collect()
}

impl From<types::ObjectId> for ObjectId {
    fn from(id: types::ObjectId) -> ObjectId {
        ObjectId(id.0.to_be_bytes())
    }
}

impl From<ObjectId> for types::ObjectId {
    fn from(id: ObjectId) -> types::ObjectId {
        types::ObjectId(u128::from_be_bytes(id.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_names_of_an_object_are_written_alike() {
        let id = ObjectId::random();
        let core = types::ObjectId::from(id);
        assert_eq!(core.to_string(), id.to_string());
        assert_eq!(ObjectId::from(core), id);
    }
}
