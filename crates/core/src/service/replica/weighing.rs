//! Computes weights of members' transfers, and sends them to the members for which they change.

use super::*;

impl Replica {
    pub(super) fn weigh(&mut self, now: Time, commands: &mut Vec<Command>) {
        let own = self.leading.as_mut().expect("it acts");
        let due = if own.stale { WEIGHTS_APART } else { WEIGHTS_EVERY };
        if !own.settled || own.weighed_at.is_some_and(|at| now.since(at) < due) {
            return;
        }
        (own.weighed_at, own.stale) = (Some(now), false);
        let mut reported: BTreeMap<&ClusterId, Vec<Reported<'_>>> = BTreeMap::new();
        for member in self.sessions.values().filter_map(|session| session.member.as_ref()) {
            let Some(island) = own.islands.get(&member.cluster) else { continue };
            let of = member.transfers.values().map(|seen| {
                let since = now.since(seen.at).as_secs_f64();
                Reported { cluster: &member.cluster, view: &seen.view, since }
            });
            reported.entry(island).or_default().extend(of);
        }
        let mut said = BTreeMap::new();
        let mut updates: BTreeMap<ClusterId, Update> = BTreeMap::new();
        for (island, reported) in reported {
            let new = shares::weigh(&own.policy, &self.books, &reported);
            let old = own.said.get(island);
            // With nothing active no member needs new shares: the previous ones do no harm.
            let (all, update) = match old {
                Some(old) if new.parts.is_empty() || **old == new => (old.clone(), None),
                _ => {
                    let parts = old.and_then(|old| old.changes_to(&new)).map(Arc::new);
                    let all = Arc::new(new);
                    let whole = parts.is_none().then(|| all.clone());
                    (all, Some(Update { weights: whole, parts, ..Update::default() }))
                }
            };
            updates.extend(update.map(|update| (island.clone(), update)));
            said.insert(island.clone(), all);
        }
        own.said = said;
        for (session, session_own) in self.sessions.iter_mut().filter(|(_, own)| own.version > 0) {
            let Some(member) = &mut session_own.member else { continue };
            let Some(island) = own.islands.get(&member.cluster) else { continue };
            let update = if member.island.as_ref() == Some(island) {
                updates.get(island).cloned()
            } else {
                let all = own.said.get(island).filter(|all| !all.parts.is_empty());
                all.map(|all| Update { weights: Some(all.clone()), ..Update::default() })
            };
            if let Some(update) = update {
                member.island = Some(island.clone());
                session_own.say(*session, own.epoch, update, commands);
            }
        }
    }
}
