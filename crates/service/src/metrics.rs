//! Metrics of a replica, in Prometheus' text format (exposition format 0.0.4).

use mission_core::service::{JobNow, Role, Status};
use std::fmt::Write;

/// Most jobs with metrics of their own, those with the highest rates: each is a permanent series in Prometheus.
pub const JOBS_MAX: usize = 200;

/// A label's value: what the format escapes.
fn label(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

struct Text(String);

impl Text {
    fn metric(&mut self, name: &str, meaning: &str, rows: impl IntoIterator<Item = (String, f64)>) {
        let text = &mut self.0;
        // Writing to a text cannot fail.
        let _ = writeln!(text, "# HELP mission_control_service_{name} {meaning}");
        let _ = writeln!(text, "# TYPE mission_control_service_{name} gauge");
        for (labels, value) in rows {
            let _ = writeln!(text, "mission_control_service_{name}{labels} {value}");
        }
    }
}

pub fn text(status: &Status) -> String {
    let mut text = Text(String::new());
    let one = |value: f64| [(String::new(), value)];
    let of_cluster = |cluster: &str| format!("{{cluster=\"{}\"}}", label(cluster));
    text.metric("leads", "1 where this replica leads.", one(f64::from(u8::from(status.role == Role::Leader))));
    text.metric(
        "has_leader",
        "1 where this replica knows a leader.",
        one(f64::from(u8::from(status.leader.is_some()))),
    );
    text.metric(
        "epoch",
        "Epoch of this replica while it leads; each new leader has a larger one.",
        one(status.epoch.unwrap_or(0) as f64),
    );
    text.metric("revision", "Revision of the store that this replica has read.", one(status.revision as f64));
    text.metric("problems", "Problems: mission service status lists them.", one(status.problems.len() as f64));
    text.metric("sessions", "Clusters that are connected to this replica.", one(status.sessions as f64));
    text.metric("writes_waiting", "Writes that the store has not confirmed yet.", one(status.writes as f64));
    text.metric("hosts_drained", "Hosts that operators have drained.", one(status.drained.len() as f64));
    text.metric("jobs", "Jobs of all clusters.", one(status.jobs_there as f64));
    let clusters = || status.clusters.iter();
    text.metric(
        "cluster_joined",
        "1 where a cluster has a session with this replica.",
        clusters().map(|own| (of_cluster(&own.cluster), f64::from(u8::from(own.joined)))),
    );
    let hosts = clusters().map(|own| (of_cluster(&own.cluster), own.hosts.len() as f64));
    text.metric("cluster_hosts", "Hosts of a cluster.", hosts);
    let transfers = clusters().map(|own| (of_cluster(&own.cluster), own.transfers as f64));
    text.metric("cluster_transfers", "Active transfers of a cluster.", transfers);
    let rates = clusters().map(|own| (of_cluster(&own.cluster), own.bytes_per_sec));
    text.metric("cluster_bytes_per_second", "Rate of all transfers of a cluster, last measurement.", rates);
    let of_job = |cluster: &str, job: &str| format!("{{cluster=\"{}\",job=\"{}\"}}", label(cluster), label(job));
    let weight = |own: &JobNow| (of_job(&own.cluster, &own.job), own.weight.unwrap_or(0.0));
    text.metric(
        "job_weight",
        "Fraction of its hosts' bytes; 0: no transfer is active.",
        status.jobs.iter().map(weight),
    );
    let rate = |own: &JobNow| (of_job(&own.cluster, &own.job), own.bytes_per_sec);
    text.metric(
        "job_bytes_per_second",
        "Rate of all transfers of a job, last measurement.",
        status.jobs.iter().map(rate),
    );
    text.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use mission_core::service::{Leader, Replica};
    use mission_core::units::Time;

    #[test]
    fn a_replica_that_waits_says_so_and_names_are_escaped() {
        let own = Leader { address: "http://127.0.0.1:1".into(), tokens: "".into() };
        let text = text(&Replica::new(own, "fair".into(), 1).status(Time(0), JOBS_MAX, &[]));
        for line in ["mission_control_service_leads 0", "mission_control_service_has_leader 0"] {
            assert!(text.lines().any(|own| own == line), "{text}");
        }
        assert_eq!(label("a\"b\\c\nd"), "a\\\"b\\\\c\\nd");
    }
}
