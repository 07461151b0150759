//! One session for each host: one of its workers hears the shares for all of them, and says for all of them what has moved.
//!
//! The **speaker** is the worker that has been there longest. The others give it their reports, and have the shares from it
//! ([`crate::host::session`] is their half). What belongs to the lives of tasks and objects goes to each worker by itself, in
//! order with the engine's own messages. A worker says which shares are in force there: one that does not have them in time is
//! told them directly, so a speaker that stands still delays its host, and stops nothing.

use super::{Command, Controller, Message, WorkerReport};
use crate::host::SILENT;
use crate::mission;
use crate::standing::Standing;
use crate::types::{HostId, WorkerId};
use crate::units::Time;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Shares that are not in force on a worker after this time are told to it directly: four reports (`REPORT_EVERY`).
pub const IN_FORCE_WITHIN: Duration = Duration::from_secs(1);

/// Who speaks for whom, and which shares each worker has.
#[derive(Default)]
pub struct Sessions {
    /// Each worker has a session of its own.
    apart: bool,
    hosts: BTreeMap<HostId, Vec<WorkerId>>,
    speakers: BTreeMap<HostId, WorkerId>,
    /// What was told last, and when.
    last: Option<(Time, Standing)>,
    workers: BTreeMap<WorkerId, Versions>,
}

/// Of the shares.
#[derive(Clone, Copy, Default)]
struct Versions {
    /// Told to this worker by its scheduler.
    told: u64,
    told_at: Time,
    /// In force there, as it said last.
    in_force: u64,
}

impl Sessions {
    /// Who speaks for a worker: another one, or none.
    pub fn speaker_of(&self, host: &HostId, worker: &WorkerId) -> Option<&WorkerId> {
        self.speakers.get(host).filter(|speaker| *speaker != worker)
    }

    fn late(&self, now: Time, worker: &WorkerId, within: Duration) -> bool {
        let Some((said_at, last)) = &self.last else { return false };
        let own = self.workers.get(worker).copied().unwrap_or_default();
        own.in_force < last.version && now.since(*said_at) >= within
    }
}

impl Controller {
    /// Each worker has a session of its own, or each host one.
    pub(super) fn sessions(&mut self, apart: bool, commands: &mut Vec<Command>) {
        self.sessions.apart = apart;
        for host in self.sessions.hosts.keys().cloned().collect::<Vec<_>>() {
            self.appoint(&host, None, commands);
        }
    }

    /// A worker has joined, and has the shares of this version from its briefing.
    pub(super) fn session_joined(&mut self, now: Time, worker: &WorkerId, version: u64, commands: &mut Vec<Command>) {
        let Some(host) = self.workers.get(worker).map(|own| own.host.clone()) else { return };
        self.sessions.workers.insert(worker.clone(), Versions { told: version, told_at: now, in_force: version });
        let workers = self.sessions.hosts.entry(host.clone()).or_default();
        if !workers.contains(worker) {
            workers.push(worker.clone());
        }
        self.appoint(&host, Some(worker), commands);
    }

    pub(super) fn session_left(&mut self, host: &HostId, worker: &WorkerId, commands: &mut Vec<Command>) {
        self.sessions.workers.remove(worker);
        if let Some(workers) = self.sessions.hosts.get_mut(host) {
            workers.retain(|other| other != worker);
            if workers.is_empty() {
                self.sessions.hosts.remove(host);
                self.sessions.speakers.remove(host);
                return;
            }
        }
        self.appoint(host, None, commands);
    }

    /// Has a host's first worker speak for it, and says so to those who do not know: all of them, if it is another one than
    /// before. A worker that is alone has nobody to speak for, unless others have been there.
    fn appoint(&mut self, host: &HostId, joined: Option<&WorkerId>, commands: &mut Vec<Command>) {
        let Some(workers) = self.sessions.hosts.get(host).cloned() else { return };
        let before = self.sessions.speakers.get(host).cloned();
        if before.is_none() && (workers.len() < 2 || self.sessions.apart) {
            return;
        }
        let speaker = before.clone().filter(|own| workers.contains(own)).unwrap_or_else(|| workers[0].clone());
        if self.sessions.apart {
            self.sessions.speakers.remove(host);
            for worker in &workers {
                self.tell_speaker(worker, worker, commands);
            }
            return;
        }
        let new = before.as_ref() != Some(&speaker);
        self.sessions.speakers.insert(host.clone(), speaker.clone());
        for worker in workers.iter().filter(|worker| new || joined == Some(worker)) {
            self.tell_speaker(worker, &speaker, commands);
        }
    }

    fn tell_speaker(&mut self, worker: &WorkerId, speaker: &WorkerId, commands: &mut Vec<Command>) {
        let address = self.workers.get(speaker).map(|own| own.address.clone());
        self.tell(worker, Message { speaker: address, ..Message::default() }.into(), commands);
    }

    /// Says new shares to each host, or to each worker that has no other to speak for it; to those that have the ones before,
    /// what has changed.
    pub(super) fn say_shares(&mut self, now: Time, new: Standing, commands: &mut Vec<Command>) {
        let before = self.sessions.last.take().map(|(_, before)| before);
        let changed = before.as_ref().and_then(|before| before.changes_to(&new));
        let message = |command| Arc::new(Message { commands: vec![command], ..Message::default() });
        let changed = changed.map(|changes| (changes.after, message(mission::Command::SharesChanged(changes))));
        let all = message(mission::Command::Shares(new.clone()));
        let hears = |(worker, own): (&WorkerId, &super::Joined)| {
            self.sessions.speaker_of(&own.host, worker).is_none().then(|| worker.clone())
        };
        for worker in self.workers.iter().filter_map(hears).collect::<Vec<_>>() {
            let told = self.sessions.workers.entry(worker.clone()).or_default();
            let message = match &changed {
                Some((after, message)) if *after == told.told => message.clone(),
                _ => all.clone(),
            };
            (told.told, told.told_at) = (new.version, now);
            self.tell(&worker, message, commands);
        }
        self.sessions.last = Some((now, new));
    }

    /// Tells the shares to those on which they are not in force, and lets another worker speak for a host whose speaker says
    /// nothing of them.
    pub(super) fn look_at_sessions(&mut self, now: Time, commands: &mut Vec<Command>) {
        let Some((_, last)) = &self.sessions.last else { return };
        let (version, mut all) = (last.version, None);
        for worker in self.workers.keys().cloned().collect::<Vec<_>>() {
            let host = self.workers[&worker].host.clone();
            if self.sessions.speaker_of(&host, &worker).is_none() {
                continue; // it was told
            }
            let told = self.sessions.workers.get(&worker).map_or(0, |own| own.told);
            if told == version || !self.sessions.late(now, &worker, IN_FORCE_WITHIN) {
                continue;
            }
            let last = &self.sessions.last.as_ref().expect("there are some").1;
            let shares = || mission::Command::Shares(last.clone());
            let message =
                all.get_or_insert_with(|| Arc::new(Message { commands: vec![shares()], ..Message::default() }));
            let message = message.clone();
            let own = self.sessions.workers.entry(worker.clone()).or_default();
            (own.told, own.told_at) = (version, now);
            self.tell(&worker, message, commands);
        }
        for (host, speaker) in self.sessions.speakers.clone() {
            let told_at = self.sessions.workers.get(&speaker).map_or(now, |own| own.told_at);
            if now.since(told_at) < SILENT || !self.sessions.late(now, &speaker, SILENT) {
                continue;
            }
            let in_time = |worker: &&WorkerId| !self.sessions.late(now, worker, Duration::ZERO);
            let next = self.sessions.hosts.get(&host).and_then(|workers| workers.iter().find(in_time)).cloned();
            let Some(next) = next else { continue };
            if let Some(workers) = self.sessions.hosts.get_mut(&host) {
                // The last one, should it speak again.
                workers.retain(|worker| *worker != speaker);
                workers.push(speaker);
            }
            self.sessions.speakers.insert(host.clone(), next.clone());
            for worker in self.sessions.hosts.get(&host).cloned().unwrap_or_default() {
                self.tell_speaker(&worker, &next, commands);
            }
        }
    }

    /// Takes what a worker says for others of its host, each by the address of its data plane.
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
            // Nobody speaks for a worker of another host, nor for those for whom others speak.
            if let Some(worker) = workers.iter().find(here) {
                let report = WorkerReport { others: Vec::new(), ..report };
                self.report(now, worker, report, commands);
            }
        }
    }

    pub(super) fn in_force(&mut self, worker: &WorkerId, version: u64) {
        if let Some(own) = self.sessions.workers.get_mut(worker) {
            own.in_force = own.in_force.max(version);
        }
    }
}
