//! Numbers of jobs and transfers: the same in every process without any agreement.

use crate::checksum;
use mission_core::host::fair::{Level, QueueShare, Shares};
use mission_core::host::{GroupId, MemberId};
use mission_core::service::OF_CLUSTER;
use mission_core::shares::Share;
use mission_core::types::{JobId, Stage, TransferId};
use std::borrow::Cow;
use std::sync::Arc;

/// Numbers of one cluster's jobs and transfers. If clusters share a host's slots, a job's name is prefixed by its
/// cluster's, to distinguish jobs of the same name.
#[derive(Clone, Debug, Default)]
pub struct Numbers {
    cluster: Option<Arc<str>>,
}

impl Numbers {
    /// `cluster`: its name in the control service, if it is a member of one.
    pub fn new(cluster: Option<&str>) -> Numbers {
        Numbers { cluster: cluster.map(Into::into) }
    }

    /// The group of a job.
    pub fn group_of(&self, job: &JobId) -> GroupId {
        checksum::of(self.name(job).as_bytes())
    }

    /// The member of a transfer.
    pub fn member_of(&self, transfer: &TransferId) -> MemberId {
        checksum::of([&*self.name(&transfer.job), "\0", &transfer.from, "\0", &transfer.to].concat().as_bytes())
    }

    /// Shares by the numbers of their jobs and transfers; jobs of other clusters have their names already.
    pub fn shares_of(&self, level: Level, shares: &[Share]) -> Shares {
        let share = |share: &Share| {
            let transfer = |(from, to): &(Stage, Stage)| {
                self.member_of(&TransferId { job: share.job.clone(), from: from.clone(), to: to.clone() })
            };
            let queue = share.stages.as_ref().map_or_else(|| self.group_of(&share.job), transfer);
            QueueShare { queue, weight: share.weight }
        };
        Shares { level, queues: shares.iter().map(share).collect() }
    }

    fn name<'a>(&self, job: &'a JobId) -> Cow<'a, str> {
        match &self.cluster {
            Some(cluster) if !job.contains(OF_CLUSTER) => Cow::Owned([cluster, OF_CLUSTER, job].concat()),
            _ => Cow::Borrowed(job),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_has_the_same_number_in_its_own_cluster_and_in_others() {
        let (a, b) = (Numbers::new(Some("a")), Numbers::new(Some("b")));
        let own: JobId = "etl".into();
        assert_ne!(a.group_of(&own), b.group_of(&own));
        assert_eq!(a.group_of(&own), b.group_of(&["a", OF_CLUSTER, "etl"].concat().into()));
        let of = |numbers: &Numbers, job: &str| {
            numbers.member_of(&TransferId { job: job.into(), from: "m".into(), to: "r".into() })
        };
        assert_eq!(of(&a, "etl"), of(&b, &["a", OF_CLUSTER, "etl"].concat()));
        assert_eq!(Numbers::default().group_of(&own), checksum::of(b"etl"));
    }
}
