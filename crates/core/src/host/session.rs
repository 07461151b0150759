//! A process's half of its host's session: whether its reports go to the speaker of its host, or directly to the
//! Mission Controller.
//!
//! The speaker confirms each report that it has passed on. A report without confirmation in time is sent directly, and
//! so are all that follow until the speaker is found again. Nothing waits for the speaker. A report that arrives twice,
//! or late, does no harm: it has a number, and totals.

use crate::control::WorkerReport;
use crate::units::Time;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// A speaker that has not confirmed a report after this time has failed: four reports (`REPORT_EVERY`).
pub const PASSED_WITHIN: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
pub enum Event {
    /// The speaker takes reports.
    Joined,
    /// Its connection is gone.
    Left,
    /// The speaker has passed on all reports up to this number.
    Passed { number: u64 },
    /// Sent every `REPORT_EVERY` while there are changes or [`Session::has_news`]: the changes, if any.
    Report { report: Option<Box<WorkerReport>> },
}

#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// To the speaker.
    HandOver(Box<WorkerReport>),
    /// To the Mission Controller.
    Say(Box<WorkerReport>),
    /// Close the connection to the speaker, which is silent.
    Leave,
}

/// Where the reports of one process go.
pub struct Session {
    /// Of this process's data plane.
    address: Arc<str>,
    joined: bool,
    number: u64,
    /// Unconfirmed reports, oldest first, and since when.
    kept: VecDeque<(Time, WorkerReport)>,
    /// Reports to send again, directly.
    unsure: Vec<WorkerReport>,
    /// Something may have been lost with a speaker.
    says_all: bool,
}

impl Session {
    /// `address`: of this process's data plane.
    pub fn new(address: Arc<str>) -> Session {
        Session { address, joined: false, number: 0, kept: VecDeque::new(), unsure: Vec::new(), says_all: false }
    }

    /// Whether the next report is to have all totals, and not only those that have changed: a speaker that ended may have
    /// taken the last ones with it.
    pub fn says_all(&mut self) -> bool {
        std::mem::take(&mut self.says_all)
    }

    /// Whether it needs the next [`Event::Report`], also of no changes: something waits to be confirmed or sent again.
    pub fn has_news(&self) -> bool {
        self.says_all || !self.kept.is_empty() || !self.unsure.is_empty()
    }

    pub fn handle(&mut self, now: Time, event: Event, commands: &mut Vec<Command>) {
        match event {
            Event::Joined => self.joined = true,
            Event::Left => self.leave(),
            Event::Passed { number } => self.kept.retain(|(_, report)| report.number > number),
            Event::Report { report } => {
                if self.kept.front().is_some_and(|(since, _)| now.since(*since) >= PASSED_WITHIN) {
                    commands.push(Command::Leave);
                    self.leave();
                }
                self.report(now, report.map(|report| *report), commands);
            }
        }
    }

    fn leave(&mut self) {
        self.says_all |= self.joined;
        self.joined = false;
        self.unsure.extend(self.kept.drain(..).map(|(_, report)| report));
    }

    fn report(&mut self, now: Time, report: Option<WorkerReport>, commands: &mut Vec<Command>) {
        let report = report.map(|report| {
            self.number += 1;
            WorkerReport { number: self.number, ..report }
        });
        match report {
            Some(report) if self.joined && self.unsure.is_empty() && may_be_handed_over(&report) => {
                self.kept.push_back((now, report.clone()));
                commands.push(Command::HandOver(Box::new(report)));
            }
            None if self.unsure.is_empty() => {}
            report => {
                let mut report = report.unwrap_or_default();
                let unsure = self.unsure.drain(..).map(|own| (self.address.clone(), own));
                // Before its own report: they are older.
                report.others = unsure.chain(std::mem::take(&mut report.others)).collect();
                commands.push(Command::Say(Box::new(report)));
            }
        }
    }
}

/// Reports about lifecycles of objects, and last reports on a job, go in order with the engine's own messages.
fn may_be_handed_over(report: &WorkerReport) -> bool {
    let WorkerReport { copied, described, took, untaken, last_of, others, .. } = report;
    let empty = copied.is_empty() && described.is_empty() && took.is_empty() && untaken.is_empty();
    empty && last_of.is_none() && others.is_empty()
}
