//! Numbers of jobs and transfers: the same in every process, so that nothing has to be agreed.

use crate::checksum;
use mission_core::host::fair::{Level, QueueShare, Shares};
use mission_core::host::{GroupId, MemberId};
use mission_core::shares::Share;
use mission_core::types::{JobId, Stage, TransferId};

/// The group of a job.
pub fn group_of(job: &JobId) -> GroupId {
    checksum::of(job.as_bytes())
}

/// The member of a transfer.
pub fn member_of(transfer: &TransferId) -> MemberId {
    checksum::of([&transfer.job, "\0", &transfer.from, "\0", &transfer.to].concat().as_bytes())
}

/// Shares by the numbers of their jobs and transfers.
pub fn shares_of(level: Level, shares: &[Share]) -> Shares {
    let share = |share: &Share| {
        let transfer = |(from, to): &(Stage, Stage)| {
            member_of(&TransferId { job: share.job.clone(), from: from.clone(), to: to.clone() })
        };
        let queue = share.stages.as_ref().map_or_else(|| group_of(&share.job), transfer);
        QueueShare { queue, weight: share.weight }
    };
    Shares { level, queues: shares.iter().map(share).collect() }
}
