//! One session for each host: one of its workers receives the shares and sends the reports for all of them.
//!
//! The **speaker** is the worker that has been there longest. The others send it their reports, and receive the shares
//! from it ([`crate::host::session`] is their half). Messages about the lifecycles of tasks and objects go to each
//! worker directly, in order with the engine's own messages. Each worker reports which shares are in force: one that
//! does not have them in time receives them directly. So a speaker that hangs only delays its host.

use super::{Command, Controller, Message, WorkerReport};
use crate::host::SILENT;
use crate::mission;
use crate::standing::Standing;
use crate::types::{HostId, JobId, WorkerId};
use crate::units::Time;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Shares that are not in force on a worker after this time are sent to it directly: four reports (`REPORT_EVERY`).
pub const IN_FORCE_WITHIN: Duration = Duration::from_secs(1);

/// Last reports on a job are remembered for this long: no report by way of a speaker takes longer, unless that hung.
const LATE_REPORTS: Duration = Duration::from_secs(30);

/// The speaker of each worker, and the shares that each worker has.
#[derive(Default)]
pub struct Sessions {
    /// Each worker has a session of its own.
    apart: bool,
    hosts: BTreeMap<HostId, Vec<WorkerId>>,
    /// The speaker of each host, and since when.
    speakers: BTreeMap<HostId, (WorkerId, Time)>,
    /// The shares that were sent last.
    last: Option<Standing>,
    /// Versions that were sent, and when: those of the last [`SILENT`], and one before, oldest first.
    said: VecDeque<(Time, u64)>,
    workers: BTreeMap<WorkerId, Heard>,
}

#[derive(Default)]
struct Heard {
    /// The last version of the shares that was sent to it directly.
    sent: u64,
    /// The version that is in force there, by its last report.
    in_force: u64,
    /// Jobs on which it has sent its last report: its number, and when.
    last_words: VecDeque<(Time, JobId, u64)>,
    /// Reports before this number are obsolete.
    floor: u64,
}

impl Sessions {
    /// The speaker of a worker, if that is another one.
    pub fn speaker_of(&self, host: &HostId, worker: &WorkerId) -> Option<&WorkerId> {
        self.speakers.get(host).map(|(speaker, _)| speaker).filter(|speaker| *speaker != worker)
    }

    /// Whether a worker lacks shares that were sent this long ago.
    fn late(&self, now: Time, worker: &WorkerId, within: Duration) -> bool {
        let due = self.said.iter().rev().find(|(at, _)| now.since(*at) >= within);
        let in_force = self.workers.get(worker).map_or(0, |own| own.in_force);
        due.is_some_and(|(_, version)| in_force < *version)
    }

    fn says(&mut self, now: Time, version: u64) {
        self.said.push_back((now, version));
        while self.said.get(1).is_some_and(|(at, _)| now.since(*at) >= SILENT) {
            self.said.pop_front();
        }
    }

    /// A worker has sent its last report on a job, under this number.
    pub fn last_words(&mut self, now: Time, worker: &WorkerId, job: &JobId, number: u64) {
        let Some(own) = self.workers.get_mut(worker) else { return };
        own.last_words.push_back((now, job.clone(), number));
        while own.last_words.front().is_some_and(|(at, ..)| now.since(*at) >= LATE_REPORTS) {
            let (_, _, number) = own.last_words.pop_front().expect("it is there");
            own.floor = own.floor.max(number);
        }
    }

    /// Whether this report is of an old job of this name: it precedes the worker's last report on that job.
    pub fn is_of_one_before(&self, worker: &WorkerId, job: &JobId, number: u64) -> bool {
        let Some(own) = self.workers.get(worker) else { return false };
        number < own.floor || own.last_words.iter().any(|(_, of, last)| of == job && number < *last)
    }
}

impl Controller {
    /// Sets whether each worker or each host has a session.
    pub(super) fn sessions(&mut self, now: Time, apart: bool, commands: &mut Vec<Command>) {
        self.sessions.apart = apart;
        for host in self.sessions.hosts.keys().cloned().collect::<Vec<_>>() {
            self.appoint(now, &host, None, commands);
        }
    }

    /// A worker has joined, and has the shares of this version from its briefing.
    pub(super) fn session_joined(&mut self, now: Time, worker: &WorkerId, version: u64, commands: &mut Vec<Command>) {
        let Some(host) = self.workers.get(worker).map(|own| own.host.clone()) else { return };
        let heard = Heard { sent: version, in_force: version, ..Heard::default() };
        self.sessions.workers.insert(worker.clone(), heard);
        let workers = self.sessions.hosts.entry(host.clone()).or_default();
        if !workers.contains(worker) {
            workers.push(worker.clone());
        }
        self.appoint(now, &host, Some(worker), commands);
    }

    pub(super) fn session_left(&mut self, now: Time, host: &HostId, worker: &WorkerId, commands: &mut Vec<Command>) {
        self.sessions.workers.remove(worker);
        if let Some(workers) = self.sessions.hosts.get_mut(host) {
            workers.retain(|other| other != worker);
            if workers.is_empty() {
                self.sessions.hosts.remove(host);
                self.sessions.speakers.remove(host);
                return;
            }
        }
        self.appoint(now, host, None, commands);
    }

    /// Makes a host's first worker its speaker, and informs the workers: all of them, if the speaker has changed. A
    /// worker that is alone needs no speaker, unless there were others.
    fn appoint(&mut self, now: Time, host: &HostId, joined: Option<&WorkerId>, commands: &mut Vec<Command>) {
        let Some(workers) = self.sessions.hosts.get(host).cloned() else { return };
        let before = self.sessions.speakers.get(host).map(|(speaker, _)| speaker.clone());
        if before.is_none() && (workers.len() < 2 || self.sessions.apart) {
            return;
        }
        let speaker = before.clone().filter(|own| workers.contains(own)).unwrap_or_else(|| workers[0].clone());
        if self.sessions.apart {
            self.sessions.speakers.remove(host);
            for worker in &workers {
                self.announce_speaker(worker, worker, commands);
            }
            return;
        }
        let new = before.as_ref() != Some(&speaker);
        if new {
            self.sessions.speakers.insert(host.clone(), (speaker.clone(), now));
        }
        for worker in workers.iter().filter(|worker| new || joined == Some(worker)) {
            self.announce_speaker(worker, &speaker, commands);
        }
    }

    fn announce_speaker(&mut self, worker: &WorkerId, speaker: &WorkerId, commands: &mut Vec<Command>) {
        let address = self.workers.get(speaker).map(|own| own.address.clone());
        self.tell(worker, Message { speaker: address, ..Message::default() }.into(), commands);
    }

    /// Sends new shares to each speaker, and to each worker without one; only the changes, if it has the previous
    /// version.
    pub(super) fn say_shares(&mut self, now: Time, new: Standing, commands: &mut Vec<Command>) {
        let before = self.sessions.last.take();
        let changed = before.as_ref().and_then(|before| before.changes_to(&new));
        let changed = changed.map(|changes| (changes.after, shares(mission::Command::SharesChanged(changes))));
        let all = shares(mission::Command::Shares(new.clone()));
        let hears = |(worker, own): (&WorkerId, &super::Joined)| {
            self.sessions.speaker_of(&own.host, worker).is_none().then(|| worker.clone())
        };
        for worker in self.workers.iter().filter_map(hears).collect::<Vec<_>>() {
            let own = self.sessions.workers.entry(worker.clone()).or_default();
            let message = match &changed {
                Some((after, message)) if *after == own.sent => message.clone(),
                _ => all.clone(),
            };
            own.sent = new.version;
            self.tell(&worker, message, commands);
        }
        self.sessions.says(now, new.version);
        self.sessions.last = Some(new);
    }

    /// Sends the shares to workers where they are not in force in time, and replaces a speaker that does not have them.
    pub(super) fn look_at_sessions(&mut self, now: Time, commands: &mut Vec<Command>) {
        let Some(last) = self.sessions.last.clone() else { return };
        let mut all = None;
        for worker in self.workers.keys().cloned().collect::<Vec<_>>() {
            // A worker that was sent them directly asks for messages that it missed.
            let sent = self.sessions.workers.get(&worker).map_or(0, |own| own.sent);
            if sent == last.version || !self.sessions.late(now, &worker, IN_FORCE_WITHIN) {
                continue;
            }
            let message = all.get_or_insert_with(|| shares(mission::Command::Shares(last.clone()))).clone();
            self.sessions.workers.entry(worker.clone()).or_default().sent = last.version;
            self.tell(&worker, message, commands);
        }
        for (host, (speaker, since)) in self.sessions.speakers.clone() {
            if now.since(since) < SILENT || !self.sessions.late(now, &speaker, SILENT) {
                continue;
            }
            let Some(workers) = self.sessions.hosts.get_mut(&host) else { continue };
            // Last in the order, should it become speaker again.
            workers.retain(|worker| *worker != speaker);
            workers.push(speaker.clone());
            let workers = workers.clone();
            let in_time = workers.iter().find(|worker| !self.sessions.late(now, worker, SILENT));
            // If no shares are in force, it may be the speaker that passes nothing on.
            let next = in_time.unwrap_or(&workers[0]);
            self.sessions.speakers.insert(host.clone(), (next.clone(), now));
            if *next != speaker {
                workers.iter().for_each(|worker| self.announce_speaker(worker, next, commands));
            }
        }
    }

    /// Takes reports that a worker passes on for others of its host, by the address of their data planes.
    pub(super) fn reports_of_others(
        &mut self,
        now: Time,
        speaker: &WorkerId,
        others: Vec<(Arc<str>, WorkerReport)>,
        commands: &mut Vec<Command>,
    ) {
        let Some(host) = self.workers.get(speaker).map(|own| own.host.clone()) else { return };
        let workers = self.sessions.hosts.get(&host).cloned().unwrap_or_default();
        for (address, report) in others {
            let here = |worker: &&WorkerId| self.workers.get(*worker).is_some_and(|own| own.address == address);
            // A worker must not report for another host, nor for workers with another speaker.
            if let Some(worker) = workers.iter().find(here) {
                let report = WorkerReport { others: Vec::new(), ..report };
                self.report(now, worker, report, commands);
            }
        }
    }

    pub(super) fn in_force(&mut self, worker: &WorkerId, version: u64) {
        // A version above the newest one is invalid.
        let most = self.sessions.last.as_ref().map_or(0, |last| last.version);
        if let Some(own) = self.sessions.workers.get_mut(worker) {
            own.in_force = own.in_force.max(version.min(most));
        }
    }
}

fn shares(command: mission::Command) -> Arc<Message> {
    Message { commands: vec![command], ..Message::default() }.into()
}
