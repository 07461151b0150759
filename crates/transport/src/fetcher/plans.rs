//! Which legs a job uses to each sender.

use super::{CLOSES, Shared, State, runs};
use mission_core::cluster::Senders;
use mission_core::flight::{self, Environment, FlightPlan, Leg};
use mission_core::host::fetches::FetchError;
use mission_core::host::process::Event;
use mission_core::types::{Demands, JobId};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

/// A flight plan, and those of its legs that lead to other hosts and that this process has a carrier for.
pub(super) struct Planned {
    pub(super) plan: FlightPlan,
    pub(super) legs: Arc<[Leg]>,
    pub(super) own: Arc<Environment>,
    senders: Arc<Senders>,
    /// The legs that hold for each sender, computed when first requested.
    to: Mutex<HashMap<SocketAddr, Arc<[Leg]>>>,
}

impl Planned {
    pub(super) fn new(plan: FlightPlan, own: Arc<Environment>, senders: Arc<Senders>) -> Arc<Planned> {
        let legs = plan.legs.iter().filter(|leg| runs::is_carried(leg)).cloned().collect();
        Arc::new(Planned { plan, legs, own, senders, to: Mutex::default() })
    }

    /// The legs over which a sender is reached, best first; those of the plan where none of them is known to hold.
    pub(super) fn to(&self, sender: SocketAddr) -> Arc<[Leg]> {
        let mut known = self.to.lock().expect("no panic while held");
        let find = || {
            let legs = self.plan.between(&self.own, self.senders.at(&sender.to_string()));
            let legs: Arc<[Leg]> = legs.into_iter().filter(runs::is_carried).collect();
            if legs.is_empty() { self.legs.clone() } else { legs }
        };
        known.entry(sender).or_insert_with(find).clone()
    }
}

impl Shared {
    /// The plan that the Mission Controller sent; where it has sent none yet, its choice is made here, by the same code.
    pub(super) fn plan(&self, job: &JobId, demands: &Demands) -> Result<Arc<Planned>, FetchError> {
        let mut state = self.lock();
        if state.closing {
            return Err(FetchError::Cancelled(CLOSES.into()));
        }
        let choose = |state: &State| flight::choose(demands, std::slice::from_ref(&state.own));
        match state.plans.get(job) {
            Some(Ok(known)) if known.plan.demands.encrypt >= demands.encrypt => Ok(known.clone()),
            // A message with results of several jobs is encrypted as the strictest of them demands.
            Some(Ok(_)) => {
                let plan = choose(&state).map_err(FetchError::Denied)?;
                Ok(Planned::new(plan, state.own.clone(), state.senders.clone()))
            }
            Some(Err(why)) => Err(FetchError::Denied(why.clone())),
            None => {
                let plan = choose(&state).map_err(FetchError::Denied)?;
                Ok(self.planned(&mut state, job, plan))
            }
        }
    }

    /// Another plan for a job; what is under way on the old one ends.
    pub(super) fn planned(&self, state: &mut State, job: &JobId, plan: FlightPlan) -> Arc<Planned> {
        let planned = Planned::new(plan, state.own.clone(), state.senders.clone());
        let (group, legs) = (self.context.numbers.group_of(job), planned.legs.len().min(u8::MAX.into()) as u8);
        state.groups.insert(group, job.clone());
        state.plans.insert(job.clone(), Ok(planned.clone()));
        self.handle(state, Event::Planned { group, legs });
        let of_job = state.fetches.iter().filter(|(_, active)| active.transfer.job == *job).map(|(fetch, _)| *fetch);
        for fetch in of_job.collect::<Vec<_>>() {
            self.reaches(state, fetch, group, &planned);
        }
        planned
    }

    /// The same plans, where other legs of them may hold now.
    pub(super) fn plan_again(&self, state: &mut State) {
        let plans = state.plans.iter().filter_map(|(job, planned)| Some((job.clone(), planned.as_ref().ok()?.clone())));
        for (job, before) in plans.collect::<Vec<_>>() {
            let after = Planned::new(before.plan.clone(), state.own.clone(), state.senders.clone());
            let known = before.to.lock().expect("no panic while held").clone();
            if known.iter().all(|(sender, legs)| after.to(*sender) == *legs) {
                // Active ranges continue.
                state.plans.insert(job, Ok(after));
            } else {
                self.planned(state, &job, before.plan.clone());
            }
        }
    }
}
