//! One worker process: its fetches and its slots as one state machine, the Throttle Controller.

use super::fetches::{self, FetchError, FetchId, Fetches, Outcome, Piece, Run, SourceId, Tally};
use super::leases::{self, Leases};
use super::{FromArbiter, GroupId, MemberId, Ticket, ToArbiter};
use crate::units::Time;
use std::collections::{BTreeSet, VecDeque};

#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Fetch these pieces; see [`fetches::Event::Asked`].
    Asked {
        fetch: FetchId,
        group: GroupId,
        member: MemberId,
        pieces: Vec<Piece>,
        chunk_bytes: u64,
        one_run: BTreeSet<SourceId>,
        seed: u64,
    },
    /// A run's range was requested, and its bytes are in transit: the next may be requested on its connection.
    Streaming {
        run: Run,
    },
    /// What has arrived so far of the range that runs with this ticket; sent every second.
    Received {
        ticket: Ticket,
        bytes: u64,
    },
    Ended {
        run: Run,
        outcome: Outcome,
    },
    /// A group's flight plan has so many legs that reach other hosts.
    Planned {
        group: GroupId,
        legs: u8,
    },
    /// So many of them reach this source, where that is not all.
    Reaches {
        group: GroupId,
        source: SourceId,
        legs: u8,
    },
    /// Pieces of a fetch lie with these sources too.
    Found {
        fetch: FetchId,
        pieces: Vec<(u32, SourceId)>,
        one_run: BTreeSet<SourceId>,
    },
    Forget {
        group: GroupId,
    },
    Abandon {
        fetch: FetchId,
        error: FetchError,
    },
    Arbiter(FromArbiter),
    /// An arbiter was found or started; `remote`: in another process.
    Joined {
        remote: bool,
    },
    /// The connection to it is gone.
    Lost,
    Tick,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// Connect to the source of this run, and request nothing: it has no slot. The answer is [`Event::Ended`].
    Connect(Run),
    Run(Run),
    /// The answer to [`Event::Streaming`]: request this on the same connection; it runs when the one before it has
    /// ended.
    Chain(Run),
    /// End this run now: shut its connection down.
    Cut {
        ticket: Ticket,
    },
    FellBack {
        fetch: FetchId,
        source: SourceId,
        leg: u8,
        why: String,
    },
    Finished {
        fetch: FetchId,
        result: Result<(), FetchError>,
        tally: Tally,
    },
    Send(ToArbiter),
    /// The arbiter is silent: leave it and elect another.
    Replace,
    WakeAt(Time),
}

/// The Throttle Controller of a process.
#[derive(Default)]
pub struct Process {
    fetches: Fetches,
    leases: Leases,
    /// Kept between events, so that a chunk allocates nothing.
    steps: VecDeque<Step>,
    from_fetches: Vec<fetches::Command>,
    from_leases: Vec<leases::Command>,
}

enum Step {
    Fetches(fetches::Event),
    Leases(leases::Event),
}

impl Process {
    pub fn handle(&mut self, now: Time, event: Event, commands: &mut Vec<Command>) {
        match event {
            Event::Asked { fetch, group, member, pieces, chunk_bytes, one_run, seed } => {
                let asked = fetches::Event::Asked { fetch, group, member, pieces, chunk_bytes, one_run, seed };
                self.steps.push_back(Step::Fetches(asked));
            }
            Event::Streaming { run } => {
                if !self.leases.contended()
                    && let Some(next) = self.fetches.chain(now, &run, &mut self.from_fetches)
                {
                    commands.push(Command::Chain(next));
                }
                self.translate(commands);
            }
            Event::Received { ticket, bytes } => {
                self.steps.push_back(Step::Fetches(fetches::Event::Received { ticket, bytes }));
            }
            Event::Ended { run, outcome } => {
                self.steps.push_back(Step::Fetches(fetches::Event::Ended { run, outcome }));
            }
            Event::Planned { group, legs } => {
                self.steps.push_back(Step::Fetches(fetches::Event::Planned { group, legs }));
            }
            Event::Reaches { group, source, legs } => {
                self.steps.push_back(Step::Fetches(fetches::Event::Reaches { group, source, legs }));
            }
            Event::Found { fetch, pieces, one_run } => {
                self.steps.push_back(Step::Fetches(fetches::Event::Found { fetch, pieces, one_run }));
            }
            Event::Forget { group } => self.steps.push_back(Step::Fetches(fetches::Event::Forget { group })),
            Event::Abandon { fetch, error } => {
                self.steps.push_back(Step::Fetches(fetches::Event::Abandon { fetch, error }));
            }
            Event::Arbiter(message) => self.steps.push_back(Step::Leases(leases::Event::Arbiter(message))),
            Event::Joined { remote } => self.steps.push_back(Step::Leases(leases::Event::Joined { remote })),
            Event::Lost => self.steps.push_back(Step::Leases(leases::Event::Lost)),
            Event::Tick => {
                self.steps.push_back(Step::Leases(leases::Event::Tick));
                let done = self.leases.done_on_host();
                self.steps.push_back(Step::Fetches(fetches::Event::HostDone { done }));
                self.steps.push_back(Step::Fetches(fetches::Event::Tick));
            }
        }
        while let Some(step) = self.steps.pop_front() {
            match step {
                Step::Fetches(event) => self.fetches.handle(now, event, &mut self.from_fetches),
                Step::Leases(event) => self.leases.handle(now, event, &mut self.from_leases),
            }
            self.translate(commands);
        }
    }

    /// Chunks that run.
    pub fn running(&self) -> u32 {
        self.fetches.running()
    }

    /// Kept slots that are not in use.
    pub fn spare(&self) -> usize {
        self.leases.spare()
    }

    /// No fetch is under way, and no chunk has a slot.
    pub fn is_idle(&self) -> bool {
        self.fetches.is_idle() && self.leases.in_use() == 0
    }

    /// Commands between the two halves become events; the rest is for the caller.
    fn translate(&mut self, commands: &mut Vec<Command>) {
        for command in self.from_fetches.drain(..) {
            match command {
                fetches::Command::Want { ticket, group, member, bytes } => {
                    self.steps.push_back(Step::Leases(leases::Event::Want { ticket, group, member, bytes }));
                }
                fetches::Command::Withdraw { ticket } => {
                    self.steps.push_back(Step::Leases(leases::Event::Withdraw { ticket }));
                }
                fetches::Command::Done { ticket, moved } => {
                    self.steps.push_back(Step::Leases(leases::Event::Done { ticket, moved }));
                }
                fetches::Command::Connect(run) => commands.push(Command::Connect(run)),
                fetches::Command::Run(run) => commands.push(Command::Run(run)),
                fetches::Command::Cut { ticket } => commands.push(Command::Cut { ticket }),
                fetches::Command::FellBack { fetch, source, leg, why } => {
                    commands.push(Command::FellBack { fetch, source, leg, why });
                }
                fetches::Command::Finished { fetch, result, tally } => {
                    commands.push(Command::Finished { fetch, result, tally });
                }
                fetches::Command::WakeAt(at) => commands.push(Command::WakeAt(at)),
            }
        }
        for command in self.from_leases.drain(..) {
            match command {
                leases::Command::Granted { ticket } => {
                    self.steps.push_back(Step::Fetches(fetches::Event::Granted { ticket }));
                }
                leases::Command::Send(message) => commands.push(Command::Send(message)),
                leases::Command::Replace => commands.push(Command::Replace),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fair::{Level, QueueShare, Shares};
    use super::super::fetches::{Fault, SourceId, too_slow};
    use super::super::slots::{self, SELF, Slots};
    use super::*;
    use crate::defaults;
    use crate::shares::FlowsPerHost;
    use std::time::Duration;

    /// A process that is its host's arbiter too.
    struct Alone {
        process: Process,
        slots: Slots,
        now: Time,
        /// Every attempt to connect succeeds at once; else the test answers.
        connects: bool,
    }

    impl Alone {
        fn new(flows: u32) -> Alone {
            let slots = Slots::new(Time(0), FlowsPerHost::Fixed(flows), false);
            let mut alone = Alone { process: Process::default(), slots, now: Time(0), connects: true };
            alone.event(Event::Joined { remote: false });
            alone.event(Event::Planned { group: 1, legs: 1 });
            alone
        }

        /// What is to be done outside.
        fn event(&mut self, event: Event) -> Vec<Command> {
            let mut events = VecDeque::from([event]);
            let (mut outside, mut commands, mut said) = (Vec::new(), Vec::new(), Vec::new());
            while let Some(event) = events.pop_front() {
                self.process.handle(self.now, event, &mut commands);
                for command in commands.drain(..) {
                    let message = match command {
                        Command::Send(message) => message,
                        Command::Connect(run) if self.connects => {
                            events.push_back(Event::Ended { run, outcome: Outcome::Connected });
                            continue;
                        }
                        _ => {
                            outside.push(command);
                            continue;
                        }
                    };
                    self.slots.handle(self.now, slots::Event::Message { client: SELF, message }, &mut said);
                    for command in said.drain(..) {
                        if let slots::Command::Send { client: SELF, message } = command {
                            events.push_back(Event::Arbiter(message));
                        }
                    }
                }
            }
            outside
        }

        fn pass(&mut self, time: Duration) -> Vec<Command> {
            self.now = self.now + time;
            let mut said = Vec::new();
            self.slots.handle(self.now, slots::Event::Confirmed, &mut said);
            self.slots.handle(self.now, slots::Event::Tick, &mut said);
            let mut outside = Vec::new();
            for command in said {
                if let slots::Command::Send { client: SELF, message } = command {
                    outside.extend(self.event(Event::Arbiter(message)));
                }
            }
            outside.extend(self.event(Event::Tick));
            outside
        }

        /// Something happens at the arbiter.
        fn other(&mut self, event: slots::Event) -> Vec<Command> {
            let mut said = Vec::new();
            self.slots.handle(self.now, event, &mut said);
            let mut outside = Vec::new();
            for command in said {
                if let slots::Command::Send { client: SELF, message } = command {
                    outside.extend(self.event(Event::Arbiter(message)));
                }
            }
            outside
        }

        fn neighbour(&mut self, message: ToArbiter) -> Vec<Command> {
            self.other(slots::Event::Message { client: 1, message })
        }

        /// Whether another process gets a slot now.
        fn neighbours_slot(&mut self) -> bool {
            self.other(slots::Event::Joined { client: 1 });
            let wants = ToArbiter::Want { ticket: 1, group: 2, member: 2, bytes: 4 };
            let (mut said, message) = (Vec::new(), slots::Event::Message { client: 1, message: wants });
            self.slots.handle(self.now, message, &mut said);
            let granted = said
                .iter()
                .any(|said| matches!(said, slots::Command::Send { client: 1, message: FromArbiter::Grant { .. } }));
            self.other(slots::Event::Left { client: 1 });
            granted
        }

        fn ask(&mut self, pieces: &[Piece], runs_per_source: u32) -> Vec<Command> {
            let all = pieces.iter().flat_map(|piece| piece.sources.iter().copied());
            let one_run = all.filter(|_| runs_per_source == 1).collect();
            let (pieces, chunk_bytes) = (pieces.to_vec(), 4);
            self.event(Event::Asked { fetch: 1, group: 1, member: 1, pieces, chunk_bytes, one_run, seed: 7 })
        }

        /// Answers every run by `reply` until the fetch is over.
        fn play(mut self, pieces: &[Piece], mut reply: impl FnMut(&Run) -> Outcome) -> End {
            let mut queue: VecDeque<Command> = self.ask(pieces, 9).into();
            let mut runs = Vec::new();
            for _ in 0..100_000 {
                match queue.pop_front() {
                    Some(Command::Run(run)) => {
                        runs.push(run);
                        let outcome = reply(&run);
                        queue.extend(self.event(Event::Ended { run, outcome }));
                    }
                    Some(Command::Finished { result, tally, .. }) => {
                        assert!(self.process.is_idle());
                        return End { result, tally, runs };
                    }
                    Some(_) => {}
                    None => queue.extend(self.pass(Duration::from_millis(500))),
                }
            }
            panic!("it never ends: {:?}", runs.last());
        }
    }

    struct End {
        result: Result<(), FetchError>,
        tally: Tally,
        runs: Vec<Run>,
    }

    fn runs(commands: &[Command]) -> Vec<Run> {
        commands.iter().filter_map(|command| if let Command::Run(run) = command { Some(*run) } else { None }).collect()
    }

    fn piece(len: u64, sources: &[SourceId]) -> Piece {
        Piece { len, sources: sources.to_vec() }
    }

    fn broken(verified: u64, why: &str) -> Outcome {
        Outcome::Broken { verified, fault: Fault::Connection(why.into()) }
    }

    fn damaged() -> Outcome {
        Outcome::Broken { verified: 0, fault: Fault::Damaged("checksum".into()) }
    }

    fn gone() -> Outcome {
        Outcome::Broken { verified: 0, fault: Fault::Gone("no such object".into()) }
    }

    #[test]
    fn every_byte_is_asked_for_once() {
        let end = Alone::new(4).play(&[piece(10, &[1]), piece(0, &[1]), piece(4, &[2])], |_| Outcome::Whole);
        assert_eq!((end.result, end.tally.bytes), (Ok(()), 14));
        let mut ranges: Vec<_> = end.runs.iter().map(|run| (run.piece, run.start, run.len)).collect();
        ranges.sort_unstable();
        assert_eq!(ranges, [(0, 0, 4), (0, 4, 4), (0, 8, 2), (2, 0, 4)]);
    }

    #[test]
    fn a_broken_range_resumes_after_its_last_verified_byte() {
        let mut first = true;
        let end = Alone::new(4)
            .play(&[piece(4, &[1])], |_| if std::mem::take(&mut first) { broken(3, "reset") } else { Outcome::Whole });
        assert_eq!(end.result, Ok(()));
        assert_eq!((end.tally.bytes, end.tally.resumed), (4, 1));
        assert_eq!((end.runs[1].start, end.runs[1].len), (3, 1));
    }

    #[test]
    fn a_range_that_broke_after_its_last_byte_is_whole() {
        let end = Alone::new(4).play(&[piece(4, &[1])], |_| broken(4, "reset"));
        assert_eq!((end.result, end.runs.len()), (Ok(()), 1));
    }

    #[test]
    fn a_source_that_fails_or_damages_is_left_for_another() {
        for fault in [broken(0, "refused"), damaged(), gone()] {
            let end = Alone::new(4)
                .play(&[piece(4, &[1, 2])], |run| if run.source == 1 { fault.clone() } else { Outcome::Whole });
            assert_eq!(end.result, Ok(()));
            assert!(end.tally.used.iter().eq([&2]), "{:?}", end.tally);
        }
    }

    /// One damaged chunk put its source away for good, and the other one was gone.
    #[test]
    fn a_source_that_damaged_a_chunk_is_asked_again_where_the_other_is_gone() {
        let mut first = true;
        let end = Alone::new(4).play(&[piece(4, &[1, 2])], |run| match run.source {
            1 if std::mem::take(&mut first) => damaged(),
            1 => Outcome::Whole,
            _ => Outcome::NotConnected { fault: Fault::Connection("refused".into()) },
        });
        assert_eq!(end.result, Ok(()));
    }

    #[test]
    fn an_object_that_nobody_has_is_lost() {
        let end = Alone::new(4).play(&[piece(4, &[1, 2])], |_| gone());
        assert_eq!(end.result, Err(FetchError::Lost("no such object".into())));
        assert_eq!(end.runs.len(), 2, "both were asked");
    }

    #[test]
    fn chunks_that_are_under_way_when_a_source_turns_out_to_be_gone_go_on_to_the_next() {
        let end = Alone::new(4).play(&[piece(8, &[1, 2])], |run| if run.source == 1 { gone() } else { Outcome::Whole });
        assert_eq!(end.result, Ok(()));
    }

    #[test]
    fn a_fetch_without_progress_ends_and_names_the_cause() {
        let end = Alone::new(4).play(&[piece(4, &[1])], |_| broken(0, "connection refused"));
        assert_eq!(end.result, Err(FetchError::Unreachable("connection refused".into())));
        assert!(end.tally.resumed > 10);
    }

    /// A5: a fault of long ago was given as the cause, or none was, and the fetch waited for ever.
    #[test]
    fn a_fetch_that_gets_no_slot_says_so_unless_others_of_its_host_make_progress() {
        let mut host = Alone::new(1);
        let share = |queue, weight| QueueShare { queue, weight };
        let shares = Shares { level: Level::Groups, queues: vec![share(1, 1e-9), share(2, 1.0)] };
        host.other(slots::Event::Shares { flows_per_host: FlowsPerHost::Fixed(1), shares });
        let busy = Outcome::Broken { verified: 0, fault: Fault::Busy { retry_after: Duration::from_millis(1) } };
        let run = runs(&host.ask(&[piece(40, &[1])], 9))[0];
        host.event(Event::Ended { run, outcome: busy });
        // Another process takes the only slot once the first chunk is here, and has a far larger share.
        let want = |ticket| ToArbiter::Want { ticket, group: 2, member: 2, bytes: 4 };
        let run = runs(&host.pass(Duration::from_millis(100)))[0];
        host.other(slots::Event::Joined { client: 1 });
        host.neighbour(want(1));
        let mut left = vec![run];
        while let Some(run) = left.pop() {
            left.extend(runs(&host.event(Event::Ended { run, outcome: Outcome::Whole })));
        }
        // While the other makes progress this one waits, however long; then not for ever.
        let mut outside = Vec::new();
        for ticket in 2..200 {
            outside.extend(host.neighbour(want(ticket)));
            outside.extend(host.neighbour(ToArbiter::Done { ticket: ticket - 1, moved: 4 }));
            outside.extend(host.pass(Duration::from_secs(1)));
        }
        assert!(outside.is_empty(), "{outside:?}");
        for _ in 0..62 {
            outside.extend(host.neighbour(ToArbiter::Pong));
            outside.extend(host.pass(Duration::from_secs(1)));
        }
        let why = "no receiving slot of this host became free in 60 s".to_owned();
        let Some(Command::Finished { result, .. }) = outside.pop() else { panic!("{outside:?}") };
        assert_eq!(result, Err(FetchError::Unreachable(why)));
    }

    #[test]
    fn damaged_chunks_are_fetched_again_and_counted_but_not_for_ever() {
        let mut left = 3;
        let end = Alone::new(4).play(&[piece(4, &[1])], |_| {
            left -= 1;
            if left > 0 { damaged() } else { Outcome::Whole }
        });
        assert_eq!((end.result, end.tally.refetches), (Ok(()), 2));
        let end = Alone::new(4).play(&[piece(4, &[1])], |_| damaged());
        assert_eq!(end.result, Err(FetchError::Damaged("checksum".into())));
        assert_eq!(end.tally.refetches, defaults::CORRUPT_MAX);
        // On a wire that damages bytes at random places, each attempt makes progress.
        let fault = Fault::Damaged("checksum".into());
        let end = Alone::new(4).play(&[piece(40, &[1])], |_| Outcome::Broken { verified: 1, fault: fault.clone() });
        assert_eq!((end.result, end.tally.refetches), (Ok(()), 40));
    }

    #[test]
    fn a_busy_server_gives_its_slot_to_another_source() {
        let mut refused = false;
        let busy = Outcome::Broken { verified: 0, fault: Fault::Busy { retry_after: Duration::from_millis(20) } };
        let end = Alone::new(1).play(&[piece(4, &[1]), piece(4, &[2])], |run| {
            if run.source == 1 && !std::mem::replace(&mut refused, true) { busy.clone() } else { Outcome::Whole }
        });
        assert_eq!((end.result, end.tally.busy), (Ok(()), 1));
        assert_eq!(end.runs.len(), 3);
    }

    /// A11: a thousand chunks of a source that is not to be asked now hid those of all others.
    #[test]
    fn many_chunks_of_a_source_that_fails_hide_no_other() {
        let slow = piece(40_000, &[1]);
        let mut others = 0;
        Alone::new(4).play(&[slow, piece(4, &[2])], |run| {
            others += u32::from(run.source == 2);
            if run.source == 1 && others == 0 { broken(0, "reset") } else { Outcome::Whole }
        });
        assert_eq!(others, 1);
    }

    /// A8: an abandoned fetch does not wait for its active ranges.
    #[test]
    fn a_fetch_that_is_given_up_cuts_its_runs_and_ends_after_them() {
        let mut host = Alone::new(2);
        let runs = runs(&host.ask(&[piece(12, &[1])], 9));
        assert_eq!(runs.len(), 2);
        let abandon = Event::Abandon { fetch: 1, error: FetchError::Cancelled("interrupted".into()) };
        let cut: Vec<Command> = host.event(abandon.clone());
        assert_eq!(cut, runs.iter().map(|run| Command::Cut { ticket: run.ticket }).collect::<Vec<_>>());
        assert!(host.event(abandon).is_empty(), "once");
        assert!(host.event(Event::Ended { run: runs[0], outcome: Outcome::Whole }).is_empty());
        let ended = host.event(Event::Ended { run: runs[1], outcome: broken(0, "cut") });
        assert!(matches!(ended[..], [Command::Finished { result: Err(FetchError::Cancelled(_)), .. }]), "{ended:?}");
        assert!(host.process.is_idle());
        host.pass(Duration::from_secs(1));
        host.pass(Duration::from_secs(1));
        assert_eq!(host.slots.in_use(), 0);
    }

    /// A fetch that was given up while a kept connection turned out to be closed never ended.
    #[test]
    fn a_fetch_that_is_given_up_ends_though_its_connection_was_stale_and_another_chunk_was_to_follow() {
        let mut host = Alone::new(1);
        let run = runs(&host.ask(&[piece(12, &[1])], 9))[0];
        let [Command::Chain(_)] = host.event(Event::Streaming { run })[..] else { panic!("one more") };
        host.event(Event::Abandon { fetch: 1, error: FetchError::Cancelled("interrupted".into()) });
        let ended = host.event(Event::Ended { run, outcome: Outcome::Stale });
        assert!(matches!(ended[..], [Command::Finished { result: Err(FetchError::Cancelled(_)), .. }]), "{ended:?}");
        assert!(host.process.is_idle());
    }

    /// The younger of two fetches of a transfer failed after a minute, because the older asked for all slots.
    #[test]
    fn a_fetch_behind_another_of_its_transfer_waits_as_long_as_that_makes_progress() {
        let mut host = Alone::new(1);
        let mut run = runs(&host.ask(&[piece(4000, &[1])], u32::MAX))[0];
        let (pieces, chunk_bytes) = (vec![piece(4, &[1])], 4);
        let younger =
            Event::Asked { fetch: 2, group: 1, member: 1, pieces, chunk_bytes, one_run: BTreeSet::new(), seed: 7 };
        assert!(host.event(younger).is_empty());
        for _ in 0..200 {
            let mut outside = host.pass(Duration::from_secs(1));
            outside.extend(host.event(Event::Ended { run, outcome: Outcome::Whole }));
            assert!(!outside.iter().any(|command| matches!(command, Command::Finished { .. })), "{outside:?}");
            run = *runs(&outside).last().unwrap();
        }
    }

    /// A6: a source that trickled held a fetch for ever, though another had the piece.
    #[test]
    fn a_source_that_trickles_is_left_for_another() {
        let mut host = Alone::new(1);
        let run = runs(&host.ask(&[piece(4, &[1, 2])], 9))[0];
        let mut cut = Vec::new();
        for second in 1..=defaults::TRICKLE.as_secs() {
            host.pass(Duration::from_secs(1));
            cut.extend(host.event(Event::Received { ticket: run.ticket, bytes: second }));
        }
        assert_eq!(cut, [Command::Cut { ticket: run.ticket }]);
        let ended = host.event(Event::Ended { run, outcome: broken(0, &too_slow()) });
        assert_eq!(runs(&ended).first().map(|run| run.source), Some(2), "{ended:?}");
    }

    /// Lost objects of an owner put it away for all jobs, up to two seconds.
    #[test]
    fn a_fetch_that_failed_says_nothing_of_the_sources_of_the_runs_that_it_cut() {
        let mut host = Alone::new(4);
        for _ in 0..8 {
            let all = runs(&host.ask(&[piece(4, &[1]), piece(4, &[1]), piece(4, &[1])], 9));
            assert_eq!(all.len(), 3, "at once, and of the source that was asked before");
            host.event(Event::Ended { run: all[0], outcome: gone() });
            host.event(Event::Ended { run: all[1], outcome: broken(0, "cut") });
            let ended = host.event(Event::Ended { run: all[2], outcome: broken(0, "cut") });
            let lost =
                |command: &Command| matches!(command, Command::Finished { result: Err(FetchError::Lost(_)), .. });
            assert!(ended.iter().any(lost), "{ended:?}");
        }
    }

    /// A middlebox that cuts every connection before a block is whole.
    #[test]
    fn a_fetch_of_which_no_block_ever_becomes_whole_ends() {
        let mut host = Alone::new(1);
        let mut run = runs(&host.ask(&[piece(4, &[1])], 9))[0];
        for _ in 0..200 {
            let mut commands = host.pass(Duration::from_secs(2));
            commands.extend(host.event(Event::Received { ticket: run.ticket, bytes: 200 << 10 }));
            commands.extend(host.event(Event::Ended { run, outcome: broken(0, "reset") }));
            for _ in 0..10 {
                commands.extend(host.pass(Duration::from_millis(300)));
            }
            match runs(&commands)[..] {
                [next] => run = next,
                _ => {
                    let ends = |command: &Command| matches!(command, Command::Finished { result: Err(_), .. });
                    return assert!(commands.iter().any(ends), "{commands:?}");
                }
            }
        }
        panic!("it never ends");
    }

    /// Several flows break at once, and what follows them is slow: its blocks are progress before its chunk is whole.
    #[test]
    fn after_many_breaks_a_slow_chunk_whose_blocks_are_whole_is_progress() {
        let mut host = Alone::new(1);
        let mut run = runs(&host.ask(&[piece(4, &[1])], 9))[0];
        for _ in 0..defaults::FRUITLESS_MAX {
            let mut commands = host.event(Event::Ended { run, outcome: broken(0, "reset") });
            for _ in 0..10 {
                commands.extend(host.pass(Duration::from_millis(300)));
            }
            run = runs(&commands)[0];
        }
        for step in 1..40 {
            let bytes = step * (defaults::BLOCK_BYTES / 2 + 1);
            let mut commands = host.event(Event::Received { ticket: run.ticket, bytes });
            commands.extend(host.pass(Duration::from_secs(5)));
            let ends = |command: &Command| matches!(command, Command::Finished { .. });
            assert!(!commands.iter().any(ends), "after {} s: {commands:?}", 5 * step);
        }
    }

    #[test]
    fn a_source_that_is_merely_slow_is_not_left() {
        let mut host = Alone::new(1);
        let run = runs(&host.ask(&[piece(4, &[1, 2])], 9))[0];
        for second in 1..600 {
            assert!(host.pass(Duration::from_secs(1)).is_empty());
            let bytes = second * defaults::TRICKLE_BYTES / 9;
            assert!(host.event(Event::Received { ticket: run.ticket, bytes }).is_empty());
        }
    }

    /// A7: the first leg was tried until the fetch failed.
    #[test]
    fn a_leg_that_cannot_be_connected_falls_to_the_next_and_after_the_last_comes_the_first() {
        let mut host = Alone::new(1);
        host.event(Event::Planned { group: 1, legs: 2 });
        let refused = || Outcome::NotConnected { fault: Fault::Connection("refused".into()) };
        let run = runs(&host.ask(&[piece(4, &[1])], 9))[0];
        assert_eq!(run.leg, 0);
        let fell = host.event(Event::Ended { run, outcome: refused() });
        assert!(fell.contains(&Command::FellBack { fetch: 1, source: 1, leg: 0, why: "refused".into() }), "{fell:?}");
        let run = runs(&fell)[0];
        assert_eq!(run.leg, 1);
        // The last one: it waits, and begins with the first.
        assert!(runs(&host.event(Event::Ended { run, outcome: refused() })).is_empty());
        let run = runs(&host.pass(Duration::from_millis(500)))[0];
        assert_eq!(run.leg, 0);
        // Another plan begins with its first leg.
        let fell = host.event(Event::Ended { run, outcome: refused() });
        host.event(Event::Planned { group: 1, legs: 2 });
        let stale = runs(&fell)[0];
        let again = host.event(Event::Ended { run: stale, outcome: refused() });
        assert_eq!(runs(&again)[0].leg, 0);
    }

    /// Where one leg of two reaches a source, that one is tried again and no other.
    #[test]
    fn legs_that_do_not_hold_for_a_source_are_not_tried() {
        let mut host = Alone::new(1);
        host.event(Event::Planned { group: 1, legs: 2 });
        host.event(Event::Reaches { group: 1, source: 1, legs: 1 });
        let refused = || Outcome::NotConnected { fault: Fault::Connection("refused".into()) };
        let run = runs(&host.ask(&[piece(4, &[1])], 9))[0];
        let said = host.event(Event::Ended { run, outcome: refused() });
        assert!(
            runs(&said).is_empty() && !said.iter().any(|said| matches!(said, Command::FellBack { .. })),
            "{said:?}"
        );
        assert_eq!(runs(&host.pass(Duration::from_millis(500)))[0].leg, 0);
    }

    #[test]
    fn one_run_at_a_time_goes_to_a_source_whose_connection_carries_all() {
        let mut host = Alone::new(9);
        let mut first = runs(&host.ask(&[piece(12, &[1]), piece(12, &[2])], 1));
        first.sort_by_key(|run| run.source);
        assert_eq!(first.iter().map(|run| run.source).collect::<Vec<_>>(), [1, 2]);
        let chained = host.event(Event::Streaming { run: first[0] });
        let [Command::Chain(next)] = chained[..] else { panic!("{chained:?}") };
        assert_eq!(next.source, 1);
        host.event(Event::Ended { run: first[0], outcome: Outcome::Whole });
        let ended = host.event(Event::Ended { run: next, outcome: Outcome::Whole });
        assert_eq!(runs(&ended).iter().map(|run| run.source).collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn chunks_that_follow_on_one_connection_share_its_slot_and_only_the_first_is_charged() {
        let mut host = Alone::new(1);
        let first = runs(&host.ask(&[piece(12, &[1])], 9))[0];
        let chain = |host: &mut Alone, run| match host.event(Event::Streaming { run })[..] {
            [Command::Chain(next)] => next,
            ref other => panic!("{other:?}"),
        };
        let second = chain(&mut host, first);
        assert_eq!((second.start, second.ticket, host.process.running()), (4, first.ticket, 1));
        assert!(host.event(Event::Ended { run: first, outcome: Outcome::Whole }).is_empty());
        let third = chain(&mut host, second);
        host.event(Event::Ended { run: second, outcome: broken(3, "reset") });
        // The connection went with the second chunk: the third was never begun.
        assert!(runs(&host.event(Event::Ended { run: third, outcome: Outcome::Unasked })).is_empty());
        assert_eq!(host.process.running(), 0);
        let again = runs(&host.pass(Duration::from_secs(1)));
        assert_eq!(again.len(), 1, "{again:?}");
    }

    fn connects(commands: &[Command]) -> Vec<Run> {
        let connect = |command: &Command| if let Command::Connect(run) = command { Some(*run) } else { None };
        commands.iter().filter_map(connect).collect()
    }

    fn refused() -> Outcome {
        Outcome::NotConnected { fault: Fault::Connection("refused".into()) }
    }

    /// R2: ten slots were held for 3 s each by connections to hosts that did not answer.
    #[test]
    fn a_source_that_cannot_be_reached_holds_no_slot() {
        let mut host = Alone::new(2);
        host.connects = false;
        let said = host.ask(&[piece(12, &[1]), piece(12, &[2])], 9);
        let mut tried = connects(&said);
        tried.sort_by_key(|run| run.source);
        assert_eq!(tried.iter().map(|run| run.source).collect::<Vec<_>>(), [1, 2], "one attempt for each source");
        assert!(runs(&said).is_empty());
        // The first one answers, so both slots carry what it has; the other one is still tried.
        let mut queue = runs(&host.event(Event::Ended { run: tried[0], outcome: Outcome::Connected }));
        assert_eq!(queue.len(), 2);
        let mut carried = 0;
        while let Some(run) = queue.pop() {
            assert_eq!(run.source, 1);
            carried += run.len;
            let said = host.event(Event::Ended { run, outcome: Outcome::Whole });
            assert!(connects(&said).is_empty());
            queue.extend(runs(&said));
        }
        assert_eq!(carried, 12);
        // Nobody answers: it is tried again later, one attempt at a time.
        assert!(connects(&host.event(Event::Ended { run: tried[1], outcome: refused() })).is_empty());
        let again = connects(&host.pass(Duration::from_millis(500)));
        assert_eq!(again.len(), 1);
        assert_eq!(runs(&host.event(Event::Ended { run: again[0], outcome: Outcome::Connected })).len(), 2);
    }

    #[test]
    fn a_source_whose_connection_fails_is_connected_to_before_it_gets_another_slot() {
        let mut host = Alone::new(1);
        let run = runs(&host.ask(&[piece(12, &[1])], 9))[0];
        host.connects = false;
        // What waited for a slot gives that back at once.
        assert!(runs(&host.event(Event::Ended { run, outcome: broken(0, "reset") })).is_empty());
        let said = host.pass(Duration::from_millis(500));
        assert!(runs(&said).is_empty(), "{said:?}");
        let (tried, free) = (connects(&said), host.neighbours_slot());
        assert_eq!((tried.len(), free), (1, true), "one attempt, and the slot is there for others");
        assert_eq!(runs(&host.event(Event::Ended { run: tried[0], outcome: Outcome::Connected })).len(), 1);
    }

    #[test]
    fn all_fetches_that_wait_for_one_connection_know_why_there_is_none() {
        let mut host = Alone::new(1);
        host.connects = false;
        let mut queue = host.ask(&[piece(4, &[1])], 9);
        let pieces = vec![piece(4, &[1])];
        let more = (2, 1, 2, pieces, 4, BTreeSet::new(), 7);
        let (fetch, group, member, pieces, chunk_bytes, one_run, seed) = more;
        queue.extend(host.event(Event::Asked { fetch, group, member, pieces, chunk_bytes, one_run, seed }));
        let mut ends = Vec::new();
        for _ in 0..1000 {
            assert!(connects(&queue).len() <= 1, "one attempt serves both");
            let mut said = Vec::new();
            for command in queue.drain(..) {
                match command {
                    Command::Connect(run) => said.extend(host.event(Event::Ended { run, outcome: refused() })),
                    Command::Finished { fetch, result, .. } => ends.push((fetch, result)),
                    _ => {}
                }
            }
            queue = said;
            queue.extend(host.pass(Duration::from_millis(500)));
        }
        ends.sort_by_key(|(fetch, _)| *fetch);
        let error = || Err(FetchError::Unreachable("refused".into()));
        assert_eq!(ends, [(1, error()), (2, error())]);
        assert!(host.process.is_idle());
    }

    #[test]
    fn a_fetch_that_is_abandoned_while_it_connects_ends_with_that_attempt() {
        let mut host = Alone::new(1);
        host.connects = false;
        let tried = connects(&host.ask(&[piece(4, &[1])], 9))[0];
        let error = FetchError::Cancelled("interrupted".into());
        let said = host.event(Event::Abandon { fetch: 1, error: error.clone() });
        assert_eq!(said, [Command::Cut { ticket: tried.ticket }]);
        let said = host.event(Event::Ended { run: tried, outcome: Outcome::Connected });
        assert!(matches!(&said[..], [Command::Finished { result: Err(own), .. }] if *own == error), "{said:?}");
        assert!(host.process.is_idle());
    }

    /// R5: each piece that had moved cost a walk through all that waited, under the fetcher's only lock.
    #[test]
    fn many_pieces_whose_object_has_moved_come_from_its_new_place() {
        const PIECES: u32 = 100_000;
        let mut host = Alone::new(4);
        host.connects = false;
        let pieces: Vec<Piece> = (0..PIECES).map(|_| piece(4, &[1])).collect();
        let tried = connects(&host.ask(&pieces, 9))[0];
        let found = (0..PIECES).map(|piece| (piece, 2)).collect();
        assert!(host.event(Event::Found { fetch: 1, pieces: found, one_run: BTreeSet::new() }).is_empty());
        host.connects = true;
        let mut queue: VecDeque<Command> = host.event(Event::Ended { run: tried, outcome: refused() }).into();
        let mut came = vec![false; PIECES as usize];
        while !host.process.is_idle() {
            let Some(command) = queue.pop_front() else {
                queue.extend(host.pass(Duration::from_millis(500)));
                continue;
            };
            let Command::Run(run) = command else { continue };
            // Half of them do not lie there either, but with the first source.
            let outcome = match run.source {
                2 if run.piece % 2 == 1 => gone(),
                _ => {
                    assert!(!std::mem::replace(&mut came[run.piece as usize], true), "no piece comes twice");
                    Outcome::Whole
                }
            };
            queue.extend(host.event(Event::Ended { run, outcome }));
        }
        assert!(came.iter().all(|came| *came));
    }

    #[test]
    fn a_process_tries_few_sources_at_once_and_in_the_end_all() {
        let mut host = Alone::new(1);
        host.connects = false;
        let pieces: Vec<Piece> = (0..200).map(|source| piece(4, &[source])).collect();
        let mut queue = host.ask(&pieces, 9);
        let (most, mut open, mut all) = (connects(&queue).len(), 0_usize, BTreeSet::new());
        assert!(most < 200);
        while let Some(command) = queue.pop() {
            let ended = match command {
                Command::Connect(run) => {
                    assert!(all.insert(run.source), "no source is tried a second time");
                    Event::Ended { run, outcome: Outcome::Connected }
                }
                Command::Run(run) => Event::Ended { run, outcome: Outcome::Whole },
                _ => continue,
            };
            queue.extend(host.event(ended));
            open = open.max(connects(&queue).len());
        }
        assert!(open <= most);
        assert_eq!(all.len(), 200);
    }

    #[test]
    fn a_kept_connection_that_the_server_closed_is_no_fault() {
        let mut host = Alone::new(1);
        let run = runs(&host.ask(&[piece(8, &[1])], 9))[0];
        let [Command::Chain(_)] = host.event(Event::Streaming { run })[..] else { panic!("one more") };
        let again = host.event(Event::Ended { run, outcome: Outcome::Stale });
        assert_eq!(again, [Command::Run(Run { fresh: true, ..run })]);
        host.event(Event::Ended { run: Run { fresh: true, ..run }, outcome: Outcome::Whole });
    }
}
