//! What processes do: they ask, their ranges run, and they leave.

use super::*;

impl World {
    pub(super) fn process(&mut self, id: ProcessId, event: process::Event) {
        let mut commands = Vec::new();
        self.workers[id].process.handle(self.now, event, &mut commands);
        for command in commands {
            match command {
                process::Command::Connect(run) => self.connect(id, run),
                process::Command::Run(run) => self.run_begins(id, run, true),
                process::Command::Chain(run) => {
                    let under = self.workers[id].running.get_mut(&run.ticket).expect("what it follows is under way");
                    assert!(under.next.replace(run).is_none(), "two follow one");
                }
                process::Command::Cut { ticket } => self.cut(id, ticket),
                process::Command::FellBack { leg, .. } => assert_eq!(leg, 0, "there are two legs"),
                process::Command::Finished { fetch, result, .. } => self.finish(id, fetch, result),
                process::Command::Send(message) => self.up(id, message),
                process::Command::Replace => {
                    self.leave_link(id);
                    self.after(Duration::from_millis(1), Happens::Elect { process: id, waited: false });
                }
                process::Command::WakeAt(at) => {
                    if self.workers[id].wake.is_none_or(|wake| at < wake) {
                        self.workers[id].wake = Some(at);
                        self.at(at, Happens::Wake { process: id });
                    }
                }
            }
        }
    }

    pub(super) fn ask(&mut self, id: ProcessId) {
        self.asks_left -= 1;
        let job = self.random.next() as usize % self.jobs.len();
        let stage = self.random.next() % 2;
        let member = member_of(group_of(job), stage);
        let others: Vec<ProcessId> =
            (0..self.workers.len()).filter(|other| *other != id && self.workers[*other].alive).collect();
        if others.is_empty() {
            return;
        }
        let mut pieces = Vec::new();
        for _ in 0..1 + self.random.next() % 12 {
            let len = match self.random.next() % 8 {
                0 => 0,
                1 => 1 + self.random.next() % CHUNK,
                _ => self.random.next() % (6 * CHUNK),
            };
            let sources: BTreeSet<ProcessId> =
                (0..1 + self.random.next() % 3).map(|_| others[self.random.next() as usize % others.len()]).collect();
            pieces.push((len, sources.into_iter().collect::<Vec<_>>()));
        }
        let fetch = self.next_fetch;
        self.next_fetch += 1;
        self.open += 1;
        let transfer = TransferId { job: job_name(job).into(), from: format!("from{stage}").into(), to: "to".into() };
        let total: u64 = pieces.iter().map(|(len, _)| len).sum();
        self.workers[id].asked.entry(transfer.clone()).or_default().0 += total;
        let all = pieces.iter().flat_map(|(_, sources)| sources.iter().map(|own| *own as SourceId));
        let one_run = if self.chance() < 0.1 { all.collect() } else { BTreeSet::new() };
        let event = process::Event::Asked {
            fetch,
            group: group_of(job),
            member,
            pieces: pieces
                .iter()
                .map(|(len, sources)| Piece {
                    len: *len,
                    sources: sources.iter().map(|own| *own as SourceId).collect(),
                })
                .collect(),
            chunk_bytes: CHUNK,
            one_run,
            seed: self.random.next(),
        };
        let own = Fetch { transfer, pieces, arrived: Ranges::default(), abandoned: false };
        self.workers[id].fetches.insert(fetch, own);
        if self.chance() < 0.05 {
            let wait = Duration::from_millis(self.random.next() % 2000);
            let error = FetchError::Cancelled("interrupted".into());
            self.after(wait, Happens::Abandon { process: id, fetch, error });
        }
        self.process(id, event);
    }

    fn finish(&mut self, id: ProcessId, fetch: FetchId, result: Result<(), FetchError>) {
        let own = self.workers[id].fetches.remove(&fetch).expect("a fetch ends once");
        self.open -= 1;
        self.finished += 1;
        let total: u64 = own.pieces.iter().map(|(len, _)| len).sum();
        let record = self.workers[id].asked.get_mut(&own.transfer).expect("it was asked");
        match result {
            Ok(()) => assert_eq!(own.arrived.bytes, total, "fetch {fetch} ended without all of its bytes"),
            Err(error) => {
                record.0 -= total - own.arrived.bytes;
                let survives = |sources: &Vec<ProcessId>| sources.iter().any(|source| self.workers[*source].alive);
                let possible = own.pieces.iter().all(|(len, sources)| *len == 0 || survives(sources));
                let damaged = matches!(error, FetchError::Damaged(_));
                assert!(
                    own.abandoned || damaged || !possible,
                    "fetch {fetch} failed though all of it is there: {error}"
                );
            }
        }
    }

    /// A source is connected to; decides the outcome. It holds no slot.
    fn connect(&mut self, id: ProcessId, run: Run) {
        let harm = self.now < self.calm_at;
        let source = &self.workers[run.source as usize];
        let refused = || Outcome::NotConnected { fault: Fault::Connection("refused".into()) };
        // A host that is gone is silent, a stopped process still accepts, and a process that has ended refuses.
        let (wait, outcome) = match self.random.next() % 30 {
            0..10 if !source.alive => (CONNECT, refused()),
            _ if !source.alive => (Duration::from_micros(100), refused()),
            0 if harm => (CONNECT, refused()),
            1 if harm => (Duration::from_micros(100), refused()),
            other => (Duration::from_micros(100 + other * 100), Outcome::Connected),
        };
        let under = Under { run, connects: true, began: self.now, trickles: false, cut: false, next: None };
        assert!(self.workers[id].running.insert(run.ticket, under).is_none(), "its ticket runs already");
        self.after(wait, Happens::RunEnds { process: id, run, outcome, stalled: false });
    }

    /// A range is requested; decides its outcome.
    fn run_begins(&mut self, id: ProcessId, run: Run, on_a_new_connection: bool) {
        let source = run.source as usize;
        let harm = self.now < self.calm_at;
        let begins = Duration::from_micros(100 + self.random.next() % 5_000);
        let bytes_per_second = 1e6 * (5.0 + self.chance() * 95.0);
        let takes = begins + Duration::from_secs_f64(run.len as f64 / bytes_per_second);
        let verified = self.random.next() % (run.len + 1);
        let broken = |fault| Outcome::Broken { verified, fault };
        let nothing = |fault| Outcome::Broken { verified: 0, fault };
        let connection = || Fault::Connection("reset".into());
        let mut trickles = false;
        let (wait, outcome) = if !self.workers[source].alive {
            (begins, Outcome::NotConnected { fault: connection() })
        } else if !harm {
            (takes, Outcome::Whole)
        } else {
            match self.random.next() % 60 {
                0 => (takes / 2, broken(connection())),
                1 => (takes, nothing(Fault::Damaged("checksum".into()))),
                2 => (begins, nothing(Fault::Busy { retry_after: Duration::from_millis(20) })),
                3 if on_a_new_connection => (begins, Outcome::NotConnected { fault: connection() }),
                4 if on_a_new_connection && !run.fresh => (begins, Outcome::Stale),
                5 if self.random.next().is_multiple_of(4) => {
                    trickles = true;
                    (LONGEST, Outcome::Whole)
                }
                _ => (takes, Outcome::Whole),
            }
        };
        let fresh = Under { run, connects: false, began: self.now, trickles, cut: false, next: None };
        if let Some(before) = self.workers[id].running.insert(run.ticket, fresh) {
            panic!("two runs with one ticket: {:?} and {run:?}", before.run);
        }
        let asked = !matches!(outcome, Outcome::NotConnected { .. });
        if asked {
            self.after(begins / 2, Happens::Streaming { process: id, run });
        }
        self.after(wait, Happens::RunEnds { process: id, run, outcome, stalled: false });
    }

    fn cut(&mut self, id: ProcessId, ticket: Ticket) {
        let Some(under) = self.workers[id].running.get_mut(&ticket) else { return };
        under.cut = true;
        let run = under.run;
        let fault = Fault::Connection("cut".into());
        let outcome = if under.connects {
            Outcome::NotConnected { fault }
        } else {
            Outcome::Broken { verified: self.random.next() % (run.len + 1) / 2, fault }
        };
        self.after(Duration::from_micros(100), Happens::RunEnds { process: id, run, outcome, stalled: true });
    }

    pub(super) fn run_ends(&mut self, id: ProcessId, run: Run, outcome: Outcome, stalled: bool) {
        let Some(under) = self.workers[id].running.get(&run.ticket).filter(|under| under.run == run) else { return };
        if under.cut && !stalled {
            return; // its connection is shut down: only that ends it
        }
        let source = &self.workers[run.source as usize];
        if !stalled && matches!(outcome, Outcome::Whole | Outcome::Broken { .. }) && (source.stopped || !source.alive) {
            // The bytes do not come after all.
            let wait = if source.alive { STALL } else { Duration::from_millis(1) };
            let verified = self.random.next() % (run.len + 1);
            let outcome = Outcome::Broken { verified, fault: Fault::Connection("silent".into()) };
            self.after(wait, Happens::RunEnds { process: id, run, outcome, stalled: true });
            return;
        }
        let moved = match &outcome {
            Outcome::Whole => run.len,
            Outcome::Broken { verified, .. } => *verified,
            _ => 0,
        };
        let under = self.workers[id].running.remove(&run.ticket).expect("looked at above");
        let fetch = self.workers[id].fetches.get_mut(&run.fetch).expect("a fetch outlives its runs");
        fetch.arrived.arrive(run.piece, run.start, moved);
        let transfer = fetch.transfer.clone();
        self.workers[id].asked.get_mut(&transfer).expect("it was asked").1 += moved;
        let whole = outcome == Outcome::Whole;
        let stale = outcome == Outcome::Stale;
        match under.next {
            // The next answer follows on the same connection.
            Some(next) if whole => {
                self.run_begins(id, next, false);
                self.process(id, process::Event::Ended { run, outcome });
            }
            next => {
                self.process(id, process::Event::Ended { run, outcome });
                if let Some(next) = next.filter(|_| !stale) {
                    self.process(id, process::Event::Ended { run: next, outcome: Outcome::Unasked });
                }
            }
        }
    }

    pub(super) fn watch(&mut self, id: ProcessId) {
        let now = self.now;
        let received = |under: &Under| {
            let rate = if under.trickles { 10.0 } else { 1e7 };
            ((now.since(under.began).as_secs_f64() * rate) as u64).min(under.run.len)
        };
        let all: Vec<(Ticket, u64)> = self.workers[id]
            .running
            .iter()
            .filter(|(_, own)| !own.connects)
            .map(|(ticket, under)| (*ticket, received(under)))
            .collect();
        for (ticket, bytes) in all {
            self.process(id, process::Event::Received { ticket, bytes });
        }
    }

    pub(super) fn leave(&mut self, id: ProcessId) {
        if !self.workers[id].alive || self.workers.iter().filter(|worker| worker.alive).count() <= 2 {
            return;
        }
        let own: Vec<ArbiterId> = (0..self.arbiters.len())
            .filter(|at| self.arbiters[*at].as_ref().is_some_and(|arbiter| arbiter.owner == id))
            .collect();
        own.into_iter().for_each(|arbiter| self.end_arbiter(arbiter));
        self.leave_link(id);
        let worker = &mut self.workers[id];
        (worker.alive, worker.stopped) = (false, false);
        worker.running.clear();
        let asks = worker.deferred.iter().filter(|what| matches!(what, Happens::Ask { .. })).count();
        self.asks_left -= asks as u32;
        worker.deferred.clear();
        self.open -= worker.fetches.len();
        worker.fetches.clear();
        self.outbox.forget(&id);
        // What went with it is known to be lost, soon.
        let mut lost = Vec::new();
        for (process, worker) in self.workers.iter().enumerate() {
            for (fetch, own) in &worker.fetches {
                let gone = |(len, sources): &(u64, Vec<ProcessId>)| {
                    *len > 0 && sources.iter().all(|source| !self.workers[*source].alive)
                };
                if own.pieces.iter().any(gone) {
                    lost.push((process, *fetch));
                }
            }
        }
        for (process, fetch) in lost {
            let wait = Duration::from_millis(self.random.next() % 200);
            let error = FetchError::Lost("its worker left".into());
            self.after(wait, Happens::Abandon { process, fetch, error });
        }
        // Sometimes another comes in its place.
        if self.chance() < 0.5 {
            let host = self.workers[id].host;
            self.start(host);
        }
    }
}
