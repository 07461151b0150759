//! Writes of a leader: the difference between members' states and the books, and operators' changes.

use super::*;

/// Splits entries into writes, by number and by bytes.
fn writes_of(entries: Vec<Entry>) -> Vec<Vec<Entry>> {
    let mut writes: Vec<Vec<Entry>> = Vec::new();
    let mut bytes = 0;
    for entry in entries {
        let own = entry.0.len() + entry.1.as_ref().map_or(0, String::len);
        match writes.last_mut() {
            Some(last) if last.len() < WRITE_MAX && bytes + own <= WRITE_BYTES => {
                bytes += own;
                last.push(entry);
            }
            _ => {
                bytes = own;
                writes.push(vec![entry]);
            }
        }
    }
    writes
}

impl Replica {
    pub(super) fn asks(&mut self, now: Time, ask: AskId, asked: Asked, commands: &mut Vec<Command>) {
        let checked = match &asked {
            _ if !self.acts(now) => Err(Refused::Elsewhere(match &self.leader {
                Some(leader) => format!("this replica does not lead: ask the leader, {}", leader.address),
                None => "the service has no leader now: see 'mission service status'".into(),
            })),
            Asked::Policy { policy } if policy.starts_with(policy::external::PREFIX) => Err(Refused::Wrong(
                "a policy in Python runs beside one cluster's scheduler: choose a policy of the service".into(),
            )),
            Asked::Policy { policy } => policy::policy(policy).map(drop).map_err(Refused::Wrong),
            Asked::Change { cluster, job, change } => {
                let key = (cluster.clone(), job.clone());
                match self.books.jobs.contains_key(&key) {
                    true if self.writes.values().any(|write| write.ask.is_some()) => {
                        Err(Refused::Elsewhere("another change is being written: retry".into()))
                    }
                    true => {
                        change.priority.map_or(Ok(()), |priority| check_priority(job, priority).map_err(Refused::Wrong))
                    }
                    false => {
                        Err(Refused::Wrong(format!("cluster {cluster} has no job {job}: see 'mission service status'")))
                    }
                }
            }
            Asked::Undrain { host } if !self.books.drained.contains(host) => {
                Err(Refused::Wrong(format!("{host} is not drained")))
            }
            Asked::Drain { .. } | Asked::Undrain { .. } => Ok(()),
        };
        if let Err(why) = checked {
            commands.push(Command::Answer { ask, result: Err(why) });
            return;
        }
        let input = match asked {
            Asked::Policy { policy } => Input::Policy(policy),
            Asked::Change { cluster, job, change } => {
                let mut whole = self.books.changes.get(&(cluster.clone(), job.clone())).cloned().unwrap_or_default();
                whole.priority = change.priority.or(whole.priority);
                whole.transport = change.transport.or(whole.transport);
                Input::Change(cluster, job, whole)
            }
            Asked::Drain { host } => Input::Drained(host),
            Asked::Undrain { host } => Input::NotDrained(host),
        };
        self.write(now, vec![input.entry()], Some(ask), commands);
    }

    fn write(&mut self, now: Time, entries: Vec<Entry>, ask: Option<AskId>, commands: &mut Vec<Command>) {
        let epoch = self.epoch().expect("only a leader writes");
        let write = self.next_write;
        self.next_write += 1;
        let keys = entries.iter().map(|(key, _)| key.clone()).collect();
        self.writes.insert(write, Write { keys, ask, since: now, revision: None, given_up: false });
        commands.push(Command::Write { write, epoch, entries });
    }

    pub(super) fn written(
        &mut self,
        now: Time,
        write: WriteId,
        result: Result<(), Refused>,
        commands: &mut Vec<Command>,
    ) {
        let Some(write) = self.writes.remove(&write) else { return };
        if let (Err(_), Some(own)) = (&result, &mut self.leading) {
            own.failed_at = Some(now);
        }
        commands.extend(write.ask.map(|ask| Command::Answer { ask, result }));
    }

    /// Finishes writes that these books include: nothing is written, or decided, on older books.
    pub(super) fn finish(&mut self, now: Time, commands: &mut Vec<Command>) {
        let revision = self.books.revision;
        let done = |(write, own): (&WriteId, &Write)| own.revision.is_some_and(|own| own <= revision).then_some(*write);
        for write in self.writes.iter().filter_map(done).collect::<Vec<_>>() {
            self.unwritten = true;
            self.written(now, write, Ok(()), commands);
        }
    }

    /// Gives up unanswered writes: it is unknown whether they happened.
    pub(super) fn give_up(&mut self, now: Time, commands: &mut Vec<Command>) {
        self.writes.retain(|_, own| now.since(own.since) < WRITE_FORGOTTEN);
        let late = |own: &Write| !own.given_up && now.since(own.since) >= WRITE_WITHIN;
        for own in self.writes.values_mut().filter(|own| late(own)) {
            own.given_up = true;
            let seconds = WRITE_WITHIN.as_secs();
            let why = format!(
                "the store did not answer within {seconds} s; the change may still happen: check later, then retry"
            );
            let result = if own.revision.is_some() { Ok(()) } else { Err(Refused::Unknown(why)) };
            commands.extend(own.ask.take().map(|ask| Command::Answer { ask, result }));
        }
    }

    /// Writes the differences between clusters' states and the books.
    pub(super) fn reconcile(&mut self, now: Time, commands: &mut Vec<Command>) {
        let under_way: BTreeSet<&String> = self.writes.values().flat_map(|write| &write.keys).collect();
        let own = self.leading.as_mut().expect("it acts");
        let members: BTreeMap<&ClusterId, &Member> = self
            .sessions
            .values()
            .filter_map(|session| session.member.as_ref())
            .map(|member| (&member.cluster, member))
            .collect();
        let mut inputs = Vec::new();
        if self.books.service.is_none() {
            inputs.push(Input::Service(self.draw));
        }
        for (cluster, member) in &members {
            if self.books.clusters.get(*cluster) != Some(&member.known) {
                inputs.push(Input::Cluster((*cluster).clone(), member.known.clone()));
            }
            for (job, spec) in &member.jobs {
                let known = self.books.jobs.get(&((*cluster).clone(), job.clone()));
                if known.is_none_or(|known| known.spec != *spec) {
                    let arrival = known.map_or(own.next_arrival, |known| known.arrival);
                    inputs.push(Input::Job((*cluster).clone(), Job { spec: spec.clone(), arrival }));
                    own.next_arrival = own.next_arrival.max(arrival + 1);
                }
            }
        }
        own.absent.retain(|cluster, _| self.books.clusters.contains_key(cluster) && !members.contains_key(cluster));
        for cluster in self.books.clusters.keys().filter(|cluster| !members.contains_key(*cluster)) {
            own.absent.entry(cluster.clone()).or_insert(now);
        }
        let forgotten = |cluster: &ClusterId| {
            let late = own.absent.get(cluster).is_some_and(|since| now.since(*since) >= FORGET_AFTER);
            late || !self.books.clusters.contains_key(cluster)
        };
        for cluster in self.books.clusters.keys().filter(|cluster| forgotten(cluster)) {
            inputs.push(Input::ClusterGone(cluster.clone()));
        }
        let over = |cluster: &ClusterId, job: &JobId| match members.get(cluster) {
            Some(member) => !member.jobs.contains_key(job),
            None => forgotten(cluster),
        };
        for (cluster, job) in self.books.jobs.keys().filter(|(cluster, job)| over(cluster, job)) {
            inputs.push(Input::JobGone(cluster.clone(), job.clone()));
        }
        for (cluster, job) in self.books.changes.keys() {
            if !self.books.jobs.contains_key(&(cluster.clone(), job.clone())) && over(cluster, job) {
                inputs.push(Input::ChangeGone(cluster.clone(), job.clone()));
            }
        }
        if own.failed_at.is_some_and(|at| now.since(at) < WRITE_AGAIN) {
            inputs.clear();
        }
        let entries: Vec<Entry> = inputs.iter().map(Input::entry).filter(|(key, _)| !under_way.contains(key)).collect();
        for some in writes_of(entries) {
            self.write(now, some, None, commands);
        }
        let (books, epoch) = (&self.books, self.epoch().expect("it acts"));
        for (session, own) in self.sessions.iter_mut().filter(|(_, own)| own.version > 0) {
            let Some(member) = &mut own.member else { continue };
            let (cluster, jobs) = (&member.cluster, &member.jobs);
            let kept = |job: &JobId| {
                let known = books.jobs.get(&(cluster.clone(), job.clone()));
                known.is_some_and(|known| jobs.get(job) == Some(&known.spec))
            };
            let kept: Vec<JobId> = member.unkept.iter().filter(|job| kept(job)).cloned().collect();
            for job in kept {
                member.unkept.remove(&job);
                commands.push(Command::Say { session: *session, message: FromService::Kept { epoch, job } });
            }
        }
    }
}
