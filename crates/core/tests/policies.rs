//! One property suite over every policy there is: registering a policy puts it under all of these.

use mission_core::host::GroupId;
use mission_core::host::fair::{FairQueue, GroupShare, Request, Turn};
use mission_core::policy::{self, JobView, POLICIES};
use mission_core::shares::Share;
use mission_core::shares::split;
use mission_core::types::JobId;
use proptest::prelude::*;
use std::collections::{BTreeMap, VecDeque};

fn jobs(most: usize) -> impl Strategy<Value = Vec<JobView>> {
    let one = (0.01f64..100.0, 0u32..50, any::<bool>());
    prop::collection::vec(one, 1..most).prop_map(|all| {
        let view = |(index, (priority, machines, broadcasts)): (usize, (f64, u32, bool))| JobView {
            job: format!("job{index:03}").into(),
            arrival: index as u64,
            priority,
            machines,
            broadcasts,
        };
        all.into_iter().enumerate().map(view).collect()
    })
}

/// Every policy with every parameter that it documents.
fn specs() -> impl Strategy<Value = String> {
    let mut all: Vec<String> = POLICIES.iter().map(|entry| entry.name.to_owned()).collect();
    all.push("performance-centric:count=machines".into());
    prop::sample::select(all)
}

fn shares(spec: &str, jobs: &[JobView], budget: u32) -> Vec<Share> {
    let weights = policy::weights(policy::policy(spec).unwrap().as_ref(), jobs);
    let flows = split(budget, &weights);
    let share =
        |(index, job): (usize, &JobView)| Share { job: job.job.clone(), weight: weights[index], flows: flows[index] };
    jobs.iter().enumerate().map(share).collect()
}

fn group(job: &JobId) -> GroupId {
    job.trim_start_matches("job").parse().unwrap()
}

fn group_shares(shares: &[Share]) -> Vec<GroupShare> {
    let share = |share: &Share| GroupShare { group: group(&share.job), weight: share.weight, cap: share.flows };
    shares.iter().map(share).collect()
}

proptest! {
    #[test]
    fn weights_add_up_to_one_and_nobody_is_starved(spec in specs(), jobs in jobs(40)) {
        let weights = policy::weights(policy::policy(&spec).unwrap().as_ref(), &jobs);
        prop_assert!((weights.iter().sum::<f64>() - 1.0).abs() < 1e-9);
        prop_assert!(weights.iter().all(|weight| *weight > 0.0));
    }

    #[test]
    fn caps_use_the_budget_and_never_more(spec in specs(), jobs in jobs(40), budget in 1u32..100) {
        let shares = shares(&spec, &jobs, budget);
        prop_assert_eq!(shares.iter().map(|share| share.flows).sum::<u32>(), budget);
        if budget as usize >= 2 * jobs.len() {
            prop_assert!(shares.iter().all(|share| share.flows >= 1));
        }
    }

    #[test]
    fn the_order_in_which_jobs_are_listed_does_not_matter(spec in specs(), jobs in jobs(20), seed in any::<u64>()) {
        let policy = policy::policy(&spec).unwrap();
        let listed: BTreeMap<_, _> =
            jobs.iter().map(|job| job.job.clone()).zip(policy::weights(policy.as_ref(), &jobs)).collect();
        let mut other = jobs.clone();
        other.sort_by_key(|job| (job.arrival + 1).wrapping_mul(seed | 1));
        for (job, weight) in other.iter().zip(policy::weights(policy.as_ref(), &other)) {
            prop_assert!((listed[&job.job] - weight).abs() < 1e-12);
        }
    }

    #[test]
    fn no_slot_is_empty_while_work_waits(
        spec in specs(), jobs in jobs(8), budget in 1u32..20,
        steps in prop::collection::vec((any::<prop::sample::Index>(), 1u64..5 << 20, any::<bool>()), 1..200),
    ) {
        let mut queue = FairQueue::default();
        queue.set_shares(&group_shares(&shares(&spec, &jobs, budget)));
        let mut running = VecDeque::new();
        let mut ticket = 0;
        for (job, bytes, ends) in steps {
            if ends && !running.is_empty() {
                let turn: Turn = running.pop_front().unwrap();
                queue.done(turn.group, turn.member, turn.request.bytes, turn.request.bytes);
            } else {
                ticket += 1;
                let group = group(&job.get(&jobs).job);
                queue.push(group, group, Request { client: 0, ticket, bytes });
            }
            while queue.in_use() < budget {
                let Some(turn) = queue.pop(budget) else { break };
                running.push_back(turn);
            }
            prop_assert_eq!(running.len(), queue.in_use() as usize);
            let idle = running.len() < budget as usize;
            prop_assert!(!idle || queue.waiting() == 0, "a slot is empty and work waits");
        }
    }

    /// With slots enough for nobody's cap to bind, backlogged jobs are never farther apart than one chunk each.
    #[test]
    fn bytes_follow_weights_within_one_chunk_per_job(
        spec in specs(), jobs in jobs(6), sizes in prop::collection::vec(1u64..4 << 20, 300),
    ) {
        const MOST: f64 = (4 << 20) as f64;
        let all = shares(&spec, &jobs, 1);
        let mut queue = FairQueue::default();
        queue.set_shares(&group_shares(&all));
        for (index, share) in all.iter().enumerate() {
            for offset in 0..2 {
                let (group, bytes) = (group(&share.job), sizes[(7 * index + offset) % sizes.len()]);
                queue.push(group, group, Request { client: 0, ticket: 0, bytes });
            }
        }
        let mut served: BTreeMap<JobId, f64> = all.iter().map(|share| (share.job.clone(), 0.0)).collect();
        for bytes in &sizes {
            let turn = queue.pop(1).unwrap();
            let moved = turn.request.bytes;
            let job = &all.iter().find(|share| group(&share.job) == turn.group).unwrap().job;
            *served.get_mut(job).unwrap() += moved as f64;
            queue.push(turn.group, turn.member, Request { bytes: *bytes, ..turn.request });
            queue.done(turn.group, turn.member, moved, moved);
            for a in &all {
                for b in &all {
                    // Goyal, Vin and Cheng 1996, theorem 1.
                    let apart = served[&a.job] / a.weight - served[&b.job] / b.weight;
                    prop_assert!(apart <= MOST / a.weight + MOST / b.weight + 1.0, "{} and {}", a.job, b.job);
                }
            }
        }
    }
}

/// The paper's example of two jobs and ten flows (paper 001, table 4.4).
#[test]
fn table_4_4_comes_out_exactly() {
    let job = |name: &str, arrival, priority, broadcasts| JobView {
        job: name.into(),
        arrival,
        priority,
        machines: 0,
        broadcasts,
    };
    let jobs = [job("one", 0, 1.0, false), job("two", 1, 2.0, true)];
    for (spec, flows) in [("fifo", [7, 3]), ("priority", [3, 7]), ("fair", [5, 5]), ("performance-centric", [3, 7])] {
        let got: Vec<u32> = shares(spec, &jobs, 10).iter().map(|share| share.flows).collect();
        assert_eq!(got, flows, "{spec}");
    }
}

#[test]
fn an_unknown_policy_is_refused_with_those_there_are() {
    for (spec, mend) in
        [("fast", "use one of performance-centric"), ("fair:x=1", "no parameter"), ("fifo:x", "name=value")]
    {
        let error = policy::policy(spec).err().unwrap();
        assert!(error.contains(mend), "{error}");
    }
}
