//! One property suite over every policy there is: registering a policy puts it under all of these.

use mission_core::host::fair::{FairQueue, Level, QueueShare, Request, Shares, Turn};
use mission_core::host::{GroupId, MemberId};
use mission_core::policy::{self, JobView, POLICIES, Policy, TransferView, Weights};
use mission_core::shares::{cap, split};
use mission_core::types::{Pattern, TransferId};
use proptest::prelude::*;
use std::collections::{BTreeMap, VecDeque};

/// One active transfer: which of the jobs it is of, whether it is a broadcast, bytes served, and bytes waited for by host.
type Drawn = (usize, bool, u64, Vec<(u8, u64)>);

/// Active transfers of a few jobs each with a priority and maybe a deadline, in the order in which they began.
fn transfers(most: usize) -> impl Strategy<Value = Vec<TransferView>> {
    let job = (0.01f64..100.0, prop::option::of(-10.0f64..100.0));
    let transfer = (0usize..6, any::<bool>(), 0u64..1 << 40, prop::collection::vec((0u8..5, 0u64..1 << 35), 0..4));
    (prop::collection::vec(job, 6), prop::collection::vec(transfer, 1..most))
        .prop_map(|(jobs, all)| all.into_iter().enumerate().map(|(index, drawn)| view(index, &jobs, drawn)).collect())
}

fn view(index: usize, jobs: &[(f64, Option<f64>)], (job, broadcast, served_bytes, waits): Drawn) -> TransferView {
    let (priority, deadline_secs) = jobs[job];
    let name = format!("job{job:03}");
    let to_receive: BTreeMap<_, _> = waits.iter().map(|(host, bytes)| (format!("h{host}").into(), *bytes)).collect();
    let to_send = waits.iter().map(|(host, bytes)| (format!("h{}", host + 1).into(), *bytes)).collect();
    TransferView {
        transfer: TransferId { job: name.as_str().into(), from: format!("from{index}").into(), to: "to".into() },
        job: JobView {
            job: name.as_str().into(),
            user: None,
            class: None,
            arrival: job as u64,
            priority,
            deadline_secs,
            age_secs: 1.0,
        },
        arrival: index as u64,
        pattern: if broadcast { Pattern::Broadcast } else { Pattern::Shuffle },
        evidence: "drawn".into(),
        machines: waits.len() as u32,
        asked_bytes: served_bytes,
        served_bytes,
        to_receive,
        to_send,
        bytes_per_sec: 0.0,
        age_secs: 1.0,
    }
}

/// Every policy with every parameter that it documents.
fn specs() -> impl Strategy<Value = String> {
    let mut all: Vec<String> = POLICIES.iter().map(|entry| entry.name.to_owned()).collect();
    all.push("performance-centric:count=machines".into());
    all.push("deadline:link=1Gbit/s".into());
    prop::sample::select(all)
}

fn weights(spec: &str, transfers: &[TransferView]) -> (Policy, Weights) {
    let policy = policy::policy(spec).unwrap();
    let weights = policy::weights(&policy, transfers);
    (policy, weights)
}

fn group(view: &TransferView) -> GroupId {
    view.job.arrival
}

fn member(view: &TransferView) -> MemberId {
    1000 + view.arrival
}

/// As a host has them.
fn queue_shares(spec: &str, transfers: &[TransferView]) -> Shares {
    let (policy, weights) = weights(spec, transfers);
    let share = |queue, weight| QueueShare { queue, weight };
    let level = policy.level();
    let queues = match level {
        Level::Groups => {
            let of = |name: &str| transfers.iter().find(|view| *view.job.job == *name).map(group).unwrap();
            weights.jobs.iter().map(|(job, weight)| share(of(job), *weight)).collect()
        }
        Level::Members => {
            transfers.iter().zip(&weights.transfers).map(|(view, weight)| share(member(view), *weight)).collect()
        }
    };
    Shares { level, queues }
}

proptest! {
    #[test]
    fn weights_add_up_to_one_and_nobody_is_starved(spec in specs(), transfers in transfers(40)) {
        let (_, weights) = weights(&spec, &transfers);
        prop_assert_eq!(weights.transfers.len(), transfers.len());
        prop_assert!((weights.transfers.iter().sum::<f64>() - 1.0).abs() < 1e-9);
        prop_assert!((weights.jobs.iter().map(|(_, weight)| weight).sum::<f64>() - 1.0).abs() < 1e-9);
        prop_assert!(weights.transfers.iter().all(|weight| *weight > 0.0));
        for (job, weight) in &weights.jobs {
            let own = transfers.iter().zip(&weights.transfers).filter(|(view, _)| view.job.job == *job);
            prop_assert!((own.map(|(_, weight)| weight).sum::<f64>() - weight).abs() < 1e-9);
        }
    }

    #[test]
    fn flow_counts_use_the_budget_and_never_more(spec in specs(), transfers in transfers(40), budget in 1u32..100) {
        let flows = split(budget, &weights(&spec, &transfers).1.transfers);
        prop_assert_eq!(flows.iter().sum::<u32>(), budget);
        if budget as usize >= 2 * transfers.len() {
            prop_assert!(flows.iter().all(|flows| *flows >= 1));
        }
    }

    #[test]
    fn limits_are_never_below_what_a_weight_is_worth(spec in specs(), transfers in transfers(40), budget in 1u32..100) {
        for share in queue_shares(&spec, &transfers).queues {
            let worth = f64::from(budget) * share.weight;
            let limit = f64::from(cap(budget, share.weight));
            prop_assert!(limit >= worth - 1e-6 && limit < worth + 1.0 + 1e-6);
        }
    }

    #[test]
    fn the_order_in_which_transfers_are_listed_does_not_matter(
        spec in specs(), transfers in transfers(20), seed in any::<u64>(),
    ) {
        let listed: BTreeMap<_, _> = transfers
            .iter()
            .map(|view| view.transfer.clone())
            .zip(weights(&spec, &transfers).1.transfers)
            .collect();
        let mut other = transfers.clone();
        other.sort_by_key(|view| (view.arrival + 1).wrapping_mul(seed | 1));
        for (view, weight) in other.iter().zip(weights(&spec, &other).1.transfers) {
            prop_assert!((listed[&view.transfer] - weight).abs() < 1e-12);
        }
    }

    #[test]
    fn no_slot_is_empty_while_work_waits(
        spec in specs(), transfers in transfers(8), budget in 1u32..20,
        steps in prop::collection::vec((any::<prop::sample::Index>(), 1u64..5 << 20, any::<bool>()), 1..200),
    ) {
        let mut queue = FairQueue::default();
        queue.set_shares(&queue_shares(&spec, &transfers));
        let mut running = VecDeque::new();
        let mut ticket = 0;
        for (which, bytes, ends) in steps {
            if ends && !running.is_empty() {
                let turn: Turn = running.pop_front().unwrap();
                queue.done(turn.group, turn.member, turn.request.bytes, turn.request.bytes);
            } else {
                ticket += 1;
                let view = which.get(&transfers);
                queue.push(group(view), member(view), Request { client: 0, ticket, bytes });
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

    /// With slots enough for nobody's limit to bind, whoever waits all the time is never farther from another than one
    /// chunk of each.
    #[test]
    fn bytes_follow_weights_within_one_chunk_of_each(
        spec in specs(), transfers in transfers(6), sizes in prop::collection::vec(1u64..4 << 20, 300),
    ) {
        const MOST: f64 = (4 << 20) as f64;
        let all = queue_shares(&spec, &transfers);
        let mut queue = FairQueue::default();
        queue.set_shares(&all);
        for view in &transfers {
            for offset in 0..2 {
                let bytes = sizes[(7 * view.arrival as usize + offset) % sizes.len()];
                queue.push(group(view), member(view), Request { client: 0, ticket: 0, bytes });
            }
        }
        let mut served: BTreeMap<u64, f64> = all.queues.iter().map(|share| (share.queue, 0.0)).collect();
        for bytes in &sizes {
            let turn = queue.pop(1).unwrap();
            let moved = turn.request.bytes;
            *served.get_mut(&all.level.queue(turn.group, turn.member)).unwrap() += moved as f64;
            queue.push(turn.group, turn.member, Request { bytes: *bytes, ..turn.request });
            queue.done(turn.group, turn.member, moved, moved);
            for a in &all.queues {
                for b in &all.queues {
                    // All begin at once: the bound of `host/fair.rs` without its last part.
                    let apart = served[&a.queue] / a.weight - served[&b.queue] / b.weight;
                    prop_assert!(apart <= MOST / a.weight + MOST / b.weight + 1.0, "{} and {}", a.queue, b.queue);
                }
            }
        }
    }
}

/// A transfer of a job of its own.
fn alone(index: usize, priority: f64, broadcast: bool) -> TransferView {
    let mut jobs = vec![(1.0, None); index + 1];
    jobs[index].0 = priority;
    view(index, &jobs, (index, broadcast, 0, vec![(0, 1)]))
}

/// The paper's example of two jobs and ten flows (paper 001, table 4.4).
#[test]
fn table_4_4_comes_out_exactly() {
    let alike = [alone(0, 1.0, false), alone(1, 1.0, true)];
    let second_first = [alone(0, 1.0, false), alone(1, 2.0, false)];
    for (spec, transfers, flows) in [
        ("fifo", &alike, [7, 3]),
        ("priority", &second_first, [3, 7]),
        ("fair", &alike, [5, 5]),
        ("performance-centric", &alike, [3, 7]),
    ] {
        assert_eq!(split(10, &weights(spec, transfers).1.transfers), flows, "{spec}");
    }
}

/// A broadcast and a shuffle of one job beside a shuffle of another (docs/explanation/design-control.md).
#[test]
fn a_job_of_two_transfers_gets_two_shares_of_a_transfer_policy_and_one_of_a_job_policy() {
    let jobs = [(1.0, None), (1.0, None)];
    let drawn = |index, job, broadcast| view(index, &jobs, (job, broadcast, 0, vec![(0, 1)]));
    let mix = [drawn(0, 0, true), drawn(1, 0, false), drawn(2, 1, false)];
    assert_eq!(weights("performance-centric", &mix).1.transfers, [0.5, 0.25, 0.25]);
    assert_eq!(weights("fair", &mix).1.transfers, [0.25, 0.25, 0.5]);
    assert_eq!(weights("fair", &mix).1.jobs.iter().map(|(_, weight)| *weight).collect::<Vec<_>>(), [0.5, 0.5]);
    let twice = [(2.0, None), (1.0, None)];
    let of = |index, job| view(index, &twice, (job, false, 0, vec![(0, 1)]));
    let counted = weights("performance-centric", &[of(0, 0), of(1, 1)]).1.transfers;
    assert_eq!(counted, [2.0 / 3.0, 1.0 / 3.0], "priorities count under the default");
}

fn ranks(spec: &str, transfers: &[TransferView]) -> Vec<usize> {
    let weights = weights(spec, transfers).1.transfers;
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by(|&one, &other| weights[other].total_cmp(&weights[one]));
    order
}

#[test]
fn the_policies_of_the_literature_order_as_their_papers_say() {
    let jobs = [(1.0, Some(5.0)), (1.0, Some(0.5)), (1.0, None)];
    let drawn = |index, served, waits: &[(u8, u64)]| view(index, &jobs, (index, false, served, waits.to_vec()));
    // Largest in all, but on two hosts; small; in the middle.
    let sizes = [drawn(0, 0, &[(0, 60), (2, 60)]), drawn(1, 20_000_000, &[(0, 10)]), drawn(2, 5, &[(0, 90)])];
    assert_eq!(ranks("smallest-bottleneck-first", &sizes), [1, 0, 2]);
    assert_eq!(ranks("least-attained", &sizes), [0, 2, 1], "10 MB end the first queue; in it the oldest is first");
    assert_eq!(ranks("deadline", &sizes), [1, 0, 2]);
    // 10 bytes in half a second need 160 bit/s: at 100 they are too late, and yield even to who has no deadline.
    assert_eq!(ranks("deadline:link=100bit/s", &sizes)[2], 1);
    // Ranks are far apart, and no transfer starves.
    let counted = weights("smallest-bottleneck-first", &sizes).1.transfers;
    assert!((counted[1] / counted[0] - 8.0).abs() < 1e-9 && (counted[0] / counted[2] - 8.0).abs() < 1e-9);
}

/// Every order that Sincronia finds is at most four times the best (its theorem 1): here, against every order.
#[test]
fn sincronia_is_near_the_best_of_all_orders() {
    let mut random = mission_core::random::SplitMix(7);
    for _ in 0..200 {
        let jobs = vec![(1.0, None); 4];
        let transfers: Vec<TransferView> = (0..4)
            .map(|index| {
                let waits = (0..3).map(|host| (host, random.next() % 100)).collect();
                view(index, &jobs, (index, false, 0, waits))
            })
            .collect();
        // Completion of each is when its busiest port has moved it and all before it.
        let total = |order: &[usize]| {
            let mut loads: BTreeMap<(bool, String), u64> = BTreeMap::new();
            let mut sum = 0;
            for &index in order {
                let mut end = 0;
                for (sends, ports) in [(false, &transfers[index].to_receive), (true, &transfers[index].to_send)] {
                    for (host, bytes) in ports {
                        let load = loads.entry((sends, host.to_string())).or_default();
                        *load += bytes;
                        end = end.max(if *bytes > 0 { *load } else { 0 });
                    }
                }
                sum += end;
            }
            sum
        };
        let mut best = u64::MAX;
        let mut order = [0, 1, 2, 3];
        permute(&mut order, 0, &mut |order| best = best.min(total(order)));
        let found = total(&ranks("sincronia", &transfers));
        assert!(found <= 4 * best, "{found} and {best}");
    }
}

fn permute(order: &mut [usize; 4], at: usize, visit: &mut dyn FnMut(&[usize])) {
    if at == order.len() {
        visit(order);
    }
    for other in at..order.len() {
        order.swap(at, other);
        permute(order, at + 1, visit);
        order.swap(at, other);
    }
}

#[test]
fn an_unknown_policy_is_refused_with_those_there_are() {
    for (spec, mend) in [
        ("fast", "use one of performance-centric"),
        ("fair:x=1", "no parameter"),
        ("fifo:x", "name=value"),
        ("deadline:link=fast", "link="),
    ] {
        let error = policy::policy(spec).err().unwrap();
        assert!(error.contains(mend), "{error}");
    }
}
