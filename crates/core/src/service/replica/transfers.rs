//! The active transfers of all clusters, for users: a page of those that match a search.

use super::*;
use crate::host::fair::Level;
use crate::service::messages::ShareId;
use crate::types::{Pattern, Stage, Transport};

/// A search for transfers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Look {
    /// Each of them is in a cluster's, job's or stage's name, the pattern or the transport; in small letters.
    pub words: Vec<String>,
    pub cluster: Option<String>,
    pub job: Option<String>,
    pub sort: Sort,
    /// The least first.
    pub ascending: bool,
    /// How many to skip.
    pub offset: usize,
    pub most: usize,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sort {
    #[default]
    Rate,
    /// Outstanding bytes.
    Left,
    Served,
    Weight,
    Age,
    /// Of cluster, job and stages.
    Name,
}

/// Some of the transfers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Page {
    /// Whether this replica leads: other replicas know no transfers.
    pub leads: bool,
    /// Number of all transfers, and of those that match.
    pub active: usize,
    pub found: usize,
    /// Of those that were found.
    pub bytes_per_sec: f64,
    pub rows: Vec<Row>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    pub cluster: ClusterId,
    pub job: JobId,
    pub from: Stage,
    pub to: Stage,
    pub pattern: Pattern,
    pub evidence: Arc<str>,
    /// Fraction of the bytes of its hosts; under a job policy that of its job.
    pub weight: Option<f64>,
    #[serde(flatten)]
    pub carried: Carried,
    pub asked_bytes: u64,
    pub served_bytes: u64,
    pub bytes_per_sec: f64,
    pub age_secs: f64,
}

/// One that was found, and is not on a page yet.
struct Found<'a> {
    member: &'a Member,
    seen: &'a Seen,
    weight: Option<f64>,
}

impl Replica {
    /// The matching transfers of this replica's members: none if it does not lead.
    pub fn transfers(&self, now: Time, look: &Look) -> Page {
        let members = || self.sessions.values().filter_map(|session| session.member.as_ref());
        let cluster = |member: &&Member| look.cluster.as_deref().is_none_or(|own| own == &*member.cluster);
        let mut found: Vec<Found<'_>> = members().filter(cluster).flat_map(|member| self.of(member, look)).collect();
        // Names decide ties, so that rows do not jump.
        let name = |own: &Found<'_>| (own.member.cluster.clone(), own.seen.view.transfer.clone());
        let value = |own: &Found<'_>| match look.sort {
            Sort::Rate => own.seen.view.bytes_per_sec,
            Sort::Left => own.seen.view.asked_bytes.saturating_sub(own.seen.view.served_bytes) as f64,
            Sort::Served => own.seen.view.served_bytes as f64,
            Sort::Weight => own.weight.unwrap_or(0.0),
            Sort::Age => own.seen.view.age_secs + now.since(own.seen.at).as_secs_f64(),
            Sort::Name => 0.0,
        };
        let before = |a: &Found<'_>, b: &Found<'_>| {
            let ordered = value(b).total_cmp(&value(a)).then_with(|| name(a).cmp(&name(b)));
            if look.ascending { ordered.reverse() } else { ordered }
        };
        let (count, bytes_per_sec) = (found.len(), found.iter().map(|own| own.seen.view.bytes_per_sec).sum());
        let end = look.offset.saturating_add(look.most).min(count);
        if (1..count).contains(&end) {
            found.select_nth_unstable_by(end - 1, before);
            found.truncate(end);
        }
        found.sort_by(before);
        let rows = found.iter().skip(look.offset).map(|own| own.row(now)).collect();
        let leads = self.leading.is_some();
        Page { leads, active: members().map(|member| member.transfers.len()).sum(), found: count, bytes_per_sec, rows }
    }

    fn of<'a>(&'a self, member: &'a Member, look: &'a Look) -> impl Iterator<Item = Found<'a>> {
        let said = self.leading.as_ref().and_then(|own| own.said.get(own.islands.get(&member.cluster)?));
        let weight = move |transfer: &TransferId| {
            let stages = |level: Level| (level == Level::Members).then(|| (transfer.from.clone(), transfer.to.clone()));
            let said = said?;
            let id = ShareId { cluster: member.cluster.clone(), job: transfer.job.clone(), stages: stages(said.level) };
            said.parts.get(&id).map(|part| part.weight)
        };
        let is_job = |transfer: &TransferId| look.job.as_deref().is_none_or(|own| own == &*transfer.job);
        member
            .transfers
            .iter()
            .filter(move |(transfer, seen)| is_job(transfer) && has(member, seen, &look.words))
            .map(move |(transfer, seen)| Found { member, seen, weight: weight(transfer) })
    }
}

fn has(member: &Member, seen: &Seen, words: &[String]) -> bool {
    if words.is_empty() {
        return true;
    }
    let TransferId { job, from, to } = &seen.view.transfer;
    let carried = member.carried.get(&seen.view.transfer);
    let transport = carried.and_then(|own| own.transport).map_or("", Transport::name);
    let pattern = seen.view.pattern.name();
    let text = format!("{}/{job} {from} {to} {pattern} {transport}", member.cluster).to_lowercase();
    words.iter().all(|word| text.contains(word.as_str()))
}

impl Found<'_> {
    fn row(&self, now: Time) -> Row {
        let (view, member) = (&self.seen.view, self.member);
        let TransferId { job, from, to } = view.transfer.clone();
        Row {
            cluster: member.cluster.clone(),
            job,
            from,
            to,
            pattern: view.pattern,
            evidence: view.evidence.clone(),
            weight: self.weight,
            carried: member.carried.get(&view.transfer).cloned().unwrap_or_default(),
            asked_bytes: view.asked_bytes,
            served_bytes: view.served_bytes,
            bytes_per_sec: view.bytes_per_sec,
            age_secs: view.age_secs + now.since(self.seen.at).as_secs_f64(),
        }
    }
}
