//! Checks of members' messages: a member has a token, and may still be faulty, or malicious.

use super::*;

/// Of one member: more than any cluster has, and not more than a replica can keep.
const JOBS_MAX: usize = 10_000;
const TRANSFERS_MAX: usize = 100_000;
/// Members, with their sessions.
pub const MEMBERS_MAX: usize = 20_000;
/// Of a name of a stage, in bytes: some are made of many others.
const STAGE_BYTES: usize = 4096;
/// Of what is only shown, in letters; and of those of one transfer.
const TEXT_MAX: usize = 500;
const TEXTS_MAX: usize = 8;
/// Limits of plausible bytes per second, and seconds.
const RATE_MAX: f64 = 1e15;
const SECONDS_MAX: f64 = 1e10;

/// # Errors
/// One line that names the limit, or the name.
pub fn check(member: &Member) -> Result<(), String> {
    let bytes: usize = member.known.hosts.iter().map(|host| host.len() + 3).sum();
    let of = [
        ("jobs", member.jobs.len(), JOBS_MAX),
        ("active transfers", member.transfers.len(), TRANSFERS_MAX),
        // They are one value in the store.
        ("bytes of hosts' names", bytes, WRITE_BYTES),
    ];
    match of.iter().find(|(_, count, most)| count > most) {
        Some((what, count, most)) => Err(format!("{count} {what}: a cluster of the service may have at most {most}")),
        None => Ok(()),
    }
}

/// # Errors
/// One line that names the host.
pub fn check_hosts(hosts: &BTreeSet<HostId>) -> Result<(), String> {
    hosts.iter().try_for_each(|host| check_name("host", host))
}

/// Whether a transfer is one of some cluster's.
pub fn makes_sense(transfer: &TransferId) -> bool {
    let short = |stage: &Arc<str>| stage.len() <= STAGE_BYTES;
    short(&transfer.from) && short(&transfer.to) && check_name("job", &transfer.job).is_ok()
}

/// Sanitizes a view: finite numbers, and texts that can be shown.
pub fn sound(mut view: TransferView) -> TransferView {
    let within = |value: f64, most: f64| if value.is_finite() { value.clamp(0.0, most) } else { 0.0 };
    view.bytes_per_sec = within(view.bytes_per_sec, RATE_MAX);
    view.age_secs = within(view.age_secs, SECONDS_MAX);
    view.job.age_secs = within(view.job.age_secs, SECONDS_MAX);
    view.job.deadline_secs = view.job.deadline_secs.map(|own| own.clamp(-SECONDS_MAX, SECONDS_MAX));
    if view.evidence.len() > TEXT_MAX {
        view.evidence = cut(&view.evidence);
    }
    view
}

pub fn sound_carried(mut carried: Carried) -> Carried {
    if carried.reason.len() > TEXT_MAX {
        carried.reason = cut(&carried.reason);
    }
    carried.fallbacks = carried.fallbacks.into_iter().take(TEXTS_MAX).map(|text| (*cut(&text)).to_owned()).collect();
    let short = |own: &Negotiated| {
        let texts = [Some(&own.transport), Some(&own.congestion_control), own.tls.as_ref(), own.memory.as_ref()];
        texts.into_iter().flatten().all(|text| text.len() <= TEXT_MAX)
    };
    carried.negotiated = carried.negotiated.into_iter().filter(short).take(TEXTS_MAX).collect();
    carried
}

fn cut(text: &str) -> Arc<str> {
    text.chars().take(TEXT_MAX).collect::<String>().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::JobView;
    use crate::types::Pattern;

    fn view(job: &str, stage: &str) -> TransferView {
        let transfer = TransferId { job: job.into(), from: stage.into(), to: "sum".into() };
        let job = JobView {
            job: job.into(),
            user: None,
            class: None,
            arrival: 0,
            priority: 1.0,
            deadline_secs: Some(-1e300),
            age_secs: -5.0,
        };
        TransferView {
            transfer,
            job,
            arrival: 0,
            pattern: Pattern::Gather,
            evidence: "é".repeat(10_000).into(),
            machines: 1,
            asked_bytes: 1,
            served_bytes: u64::MAX,
            to_receive: BTreeMap::new(),
            to_send: BTreeMap::new(),
            bytes_per_sec: 1.7e308,
            age_secs: f64::NAN,
        }
    }

    fn member() -> Member {
        Member {
            cluster: "c".into(),
            known: Known { incarnation: 1, hosts: ["h".into()].into() },
            jobs: BTreeMap::new(),
            transfers: BTreeMap::new(),
            carried: BTreeMap::new(),
            flows_per_host: None,
            unkept: BTreeSet::new(),
            island: None,
        }
    }

    #[test]
    fn numbers_that_make_no_sense_can_still_be_added_up_and_texts_shown() {
        let own = sound(view("j", "read"));
        assert_eq!((own.bytes_per_sec, own.age_secs, own.job.age_secs), (RATE_MAX, 0.0, 0.0));
        assert_eq!(own.job.deadline_secs, Some(-SECONDS_MAX));
        assert_eq!(own.evidence.chars().count(), TEXT_MAX);
        let many = (0..100).map(|number| format!("{number}{}", "x".repeat(1000))).collect();
        let carried = sound_carried(Carried { reason: "y".repeat(1000).into(), fallbacks: many, ..Carried::default() });
        assert_eq!((carried.reason.len(), carried.fallbacks.len()), (TEXT_MAX, TEXTS_MAX));
        assert!(carried.fallbacks.iter().all(|text| text.len() == TEXT_MAX));
    }

    #[test]
    fn what_no_cluster_has_is_not_kept() {
        let mut own = member();
        let (odd, long) = (view("a\u{1b}b", "read"), view("j", &"x".repeat(STAGE_BYTES + 1)));
        let stranger = TransferId { job: "j".into(), from: "never".into(), to: "said".into() };
        own.take(Time(0), vec![odd, long, view("j", "read")], vec![(stranger, Carried::default())]);
        assert_eq!((own.transfers.len(), own.carried.len()), (1, 0));
        assert_eq!(check(&own), Ok(()));
        own.known.hosts = (0..10_000).map(|number| format!("{number}{}", "h".repeat(60)).into()).collect();
        assert!(check(&own).unwrap_err().contains("bytes of hosts' names"));
        assert!(check_hosts(&["a\nb".into()].into()).is_err());
    }
}
