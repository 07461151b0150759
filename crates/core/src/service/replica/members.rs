//! Members and their sessions: who may join, messages, and the welcome.

use super::*;

impl Replica {
    pub(super) fn said(&mut self, now: Time, session: SessionId, message: ToService, commands: &mut Vec<Command>) {
        let moved = self.moved();
        let leads = self.leading.is_some();
        let Some(own) = self.sessions.get_mut(&session) else { return };
        own.heard_at = now;
        own.words += 1;
        if !leads {
            commands.push(Command::Say { session, message: moved });
            return;
        }
        match (message, &mut own.member) {
            (
                ToService::Hello { protocol, cluster, incarnation, jobs, hosts, transfers, carried, flows_per_host },
                _,
            ) => {
                // Else one connection could bring ever new clusters, and their jobs stay in the store.
                if let Some(named) = own.member.as_ref().map(|own| own.cluster.clone()).filter(|own| *own != cluster) {
                    let why = format!("this session is of cluster {named}: {cluster} needs one of its own");
                    self.sessions.remove(&session);
                    commands.push(Command::Say { session, message: FromService::Rejected { why } });
                    commands.push(Command::Close { session });
                    return;
                }
                if let Err(why) = self.may_join(now, session, protocol, &cluster, incarnation) {
                    commands.push(Command::Say { session, message: FromService::Rejected { why } });
                    return;
                }
                if let Err(why) = limits::check_hosts(&hosts) {
                    commands.push(Command::Say { session, message: FromService::Rejected { why } });
                    return;
                }
                if let Some(bad) = jobs.iter().find(|job| !makes_sense(job)) {
                    commands.push(Command::Say { session, message: nonsense(bad) });
                    return;
                }
                let old = |(id, own): (&SessionId, &Session)| {
                    let same = own.member.as_ref().is_some_and(|member| member.cluster == cluster);
                    (same && *id != session).then_some(*id)
                };
                for old in self.sessions.iter().filter_map(old).collect::<Vec<_>>() {
                    self.sessions.remove(&old);
                    commands.push(Command::Close { session: old });
                }
                let mut member = Member {
                    cluster,
                    known: Known { incarnation, hosts },
                    unkept: jobs.iter().map(|job| job.job.clone()).collect(),
                    jobs: jobs.into_iter().map(|job| (job.job.clone(), job)).collect(),
                    transfers: BTreeMap::new(),
                    carried: BTreeMap::new(),
                    flows_per_host,
                    island: None,
                };
                member.take(now, transfers, carried);
                let own = self.sessions.get_mut(&session).expect("it was there");
                (own.member, own.version) = (Some(member), 0);
            }
            (ToService::Job { spec }, Some(_)) if !makes_sense(&spec) => {
                commands.push(Command::Say { session, message: nonsense(&spec) });
                self.sessions.remove(&session);
                commands.push(Command::Close { session });
            }
            (ToService::Job { spec }, Some(member)) => {
                member.unkept.insert(spec.job.clone());
                member.jobs.insert(spec.job.clone(), spec);
            }
            (ToService::JobEnded { job }, Some(member)) => {
                member.jobs.remove(&job);
                member.unkept.remove(&job);
                member.transfers.retain(|transfer, _| transfer.job != job);
                member.carried.retain(|transfer, _| transfer.job != job);
            }
            (ToService::Hosts { hosts }, Some(_)) if limits::check_hosts(&hosts).is_err() => {
                let why = limits::check_hosts(&hosts).err().unwrap_or_default();
                self.sessions.remove(&session);
                commands.push(Command::Say { session, message: FromService::Rejected { why } });
                commands.push(Command::Close { session });
            }
            (ToService::Hosts { hosts }, Some(member)) => member.known.hosts = hosts,
            (ToService::Transfers { changed, carried, ended }, Some(member)) => {
                for transfer in &ended {
                    member.transfers.remove(transfer);
                    member.carried.remove(transfer);
                }
                member.take(now, changed, carried);
            }
            // An earlier message is missing.
            (ToService::Here { words, .. }, Some(_)) if words != own.words => {
                self.sessions.remove(&session);
                commands.push(Command::Close { session });
            }
            (ToService::Here { .. }, Some(_)) => {
                let version = own.version;
                if let Some(epoch) = self.epoch().filter(|_| self.acts(now)) {
                    commands.push(Command::Say { session, message: FromService::Here { epoch, version } });
                }
                return;
            }
            // It has not sent a hello.
            (_, None) => {
                self.sessions.remove(&session);
                commands.push(Command::Close { session });
            }
        }
        if let Some(own) = &mut self.leading {
            own.stale = true;
        }
        self.limit(session, commands);
    }

    /// Ends the session of a member that exceeds the limits.
    fn limit(&mut self, session: SessionId, commands: &mut Vec<Command>) {
        let Some(member) = self.sessions.get(&session).and_then(|own| own.member.as_ref()) else { return };
        if let Err(why) = limits::check(member) {
            self.sessions.remove(&session);
            commands.push(Command::Say { session, message: FromService::Rejected { why } });
            commands.push(Command::Close { session });
        }
    }

    /// # Errors
    /// One line with a hint.
    fn may_join(
        &self,
        now: Time,
        session: SessionId,
        protocol: u32,
        cluster: &ClusterId,
        incarnation: u64,
    ) -> Result<(), String> {
        check_name("cluster", cluster)?;
        if self.sessions.len() > limits::MEMBERS_MAX {
            return Err(format!("the service already has {} clusters, its limit", limits::MEMBERS_MAX));
        }
        if protocol != PROTOCOL {
            let older = if protocol < PROTOCOL { "cluster" } else { "service" };
            return Err(format!(
                "cluster {cluster} speaks version {protocol} and the service {PROTOCOL}: update the {older}'s Mission Control"
            ));
        }
        let taken = |(id, own): (&SessionId, &Session)| {
            own.member.as_ref().is_some_and(|member| {
                member.cluster == *cluster && member.known.incarnation != incarnation && *id != session
            }) && now.since(own.heard_at) < SILENT
        };
        if self.sessions.iter().any(taken) {
            return Err(format!(
                "another cluster has joined as {cluster}: give this one a name of its own with MISSION_CLUSTER=NAME, or \
                 wait {} s after the other has ended",
                SILENT.as_secs()
            ));
        }
        Ok(())
    }

    /// Ends the sessions of silent members; they return with their complete state.
    pub(super) fn leave_silent(&mut self, now: Time, commands: &mut Vec<Command>) {
        let silent = |(session, own): (&SessionId, &Session)| (now.since(own.heard_at) >= SILENT).then_some(*session);
        for session in self.sessions.iter().filter_map(silent).collect::<Vec<_>>() {
            self.sessions.remove(&session);
            commands.push(Command::Close { session });
            if let Some(own) = &mut self.leading {
                own.stale = true;
            }
        }
    }

    /// Welcomes members whose clusters and jobs are stored now.
    pub(super) fn welcome(&mut self, now: Time, commands: &mut Vec<Command>) {
        let own = self.leading.as_mut().expect("it acts");
        let Some(service) = self.books.service else { return };
        for (session, session_own) in self.sessions.iter_mut().filter(|(_, own)| own.version == 0) {
            let Some(member) = &mut session_own.member else { continue };
            let has = |job: &JobId| self.books.jobs.contains_key(&(member.cluster.clone(), job.clone()));
            if self.books.clusters.get(&member.cluster) != Some(&member.known) || !member.jobs.keys().all(has) {
                continue;
            }
            let island = &own.islands[&member.cluster];
            let weights = own.said.get(island).filter(|_| own.settled);
            member.island = weights.map(|_| island.clone());
            session_own.version = 1;
            let state = State {
                policy: self.books.policy.as_ref().unwrap_or(&self.default_policy).clone(),
                weights: weights.map(|weights| (**weights).clone()),
                changes: changes_of(&self.books, &member.cluster),
                drained: self.books.drained.clone(),
            };
            let message = FromService::Welcome { service, epoch: own.epoch, version: 1, state };
            commands.push(Command::Say { session: *session, message });
        }
        if !own.settled {
            let here = |cluster: &ClusterId| {
                let of = |session: &Session| {
                    session.version > 0 && session.member.as_ref().is_some_and(|m| m.cluster == *cluster)
                };
                self.sessions.values().any(of)
            };
            own.settled = now.since(own.since) >= SETTLE || self.books.clusters.keys().all(here);
        }
    }
}

impl Member {
    /// Takes transfers that have begun or changed, and how they are carried.
    pub(super) fn take(&mut self, now: Time, changed: Vec<TransferView>, carried: Vec<(TransferId, Carried)>) {
        for view in changed.into_iter().filter(|view| limits::makes_sense(&view.transfer)) {
            let view = limits::sound(view);
            self.transfers.insert(view.transfer.clone(), Seen { view, at: now });
        }
        for (transfer, own) in carried {
            if self.transfers.contains_key(&transfer) {
                self.carried.insert(transfer, limits::sound_carried(own));
            }
        }
    }
}

impl Session {
    pub(super) fn say(&mut self, session: SessionId, epoch: Epoch, update: Update, commands: &mut Vec<Command>) {
        self.version += 1;
        commands.push(Command::Say { session, message: FromService::Update { epoch, version: self.version, update } });
    }
}

/// Whether a job is valid: a member may send anything.
fn makes_sense(spec: &JobSpec) -> bool {
    spec.check().is_ok() && check_priority(&spec.job, spec.priority).is_ok()
}

fn nonsense(spec: &JobSpec) -> FromService {
    let name: String = spec.job.chars().take(40).collect();
    FromService::Rejected {
        why: format!("job {name:?} has an invalid name or priority: use those that mission_control.job allows"),
    }
}

pub(super) fn changes_of(books: &Books, cluster: &ClusterId) -> BTreeMap<JobId, Change> {
    let own = books.changes.iter().filter(|((own, _), _)| own == cluster);
    own.map(|((_, job), change)| (job.clone(), change.clone())).collect()
}
