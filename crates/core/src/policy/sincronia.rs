//! The order of Sincronia (Agarwal, Rajakrishnan, Narayan, Agarwal, Shmoys and Vahdat 2018, algorithm 1).

use super::{Entry, Policy, TransferPolicy, TransferView, no_parameters, ranks};
use crate::types::HostId;
use std::collections::BTreeMap;

pub const ENTRY: Entry = Entry {
    name: "sincronia",
    meaning: "bottleneck, select, scale, iterate: last is who has most bytes per priority on the busiest host",
    make: |parameters| {
        no_parameters("sincronia", parameters)?;
        Ok(Policy::Transfers(Box::new(Sincronia)))
    },
};

struct Sincronia;

/// One direction of one host's link.
type Port<'a> = (bool, &'a HostId);

fn ports(transfer: &TransferView) -> impl Iterator<Item = (Port<'_>, f64)> {
    let receives = transfer.to_receive.iter().map(|(host, bytes)| ((false, host), *bytes as f64));
    receives.chain(transfer.to_send.iter().map(|(host, bytes)| ((true, host), *bytes as f64)))
}

impl TransferPolicy for Sincronia {
    fn counts(&self, transfers: &[TransferView]) -> Vec<f64> {
        let demands: Vec<BTreeMap<Port<'_>, f64>> =
            transfers.iter().map(|transfer| ports(transfer).collect()).collect();
        let mut weights: Vec<f64> = transfers.iter().map(|transfer| transfer.job.priority).collect();
        let mut load: BTreeMap<Port<'_>, f64> = BTreeMap::new();
        for (port, bytes) in demands.iter().flatten() {
            *load.entry(*port).or_default() += bytes;
        }
        let mut left: Vec<usize> = (0..transfers.len()).collect();
        let mut order = Vec::new();
        while !left.is_empty() {
            // The bottleneck: the port with most bytes of transfers without a rank.
            let bottleneck = load.iter().max_by(|one, other| one.1.total_cmp(other.1)).map(|(port, _)| *port);
            let on = |index: usize| bottleneck.and_then(|port| demands[index].get(&port)).copied().unwrap_or(0.0);
            // Select the last: the least weight for each byte there. Ties: the newest.
            let last = left.iter().copied().min_by(|&one, &other| {
                let ratio = |index: usize| if on(index) > 0.0 { weights[index] / on(index) } else { f64::INFINITY };
                let newest = transfers[other].arrival.cmp(&transfers[one].arrival);
                ratio(one).total_cmp(&ratio(other)).then(newest)
            });
            let last = last.expect("some are left");
            // Scale: reduce the weights of the others on this port.
            if on(last) > 0.0 {
                let per_byte = weights[last] / on(last);
                for &index in left.iter().filter(|index| **index != last) {
                    weights[index] = (weights[index] - per_byte * on(index)).max(0.0);
                }
            }
            for (port, bytes) in &demands[last] {
                if let Some(load) = load.get_mut(port) {
                    *load -= bytes;
                }
            }
            left.retain(|index| *index != last);
            order.push(last);
        }
        order.reverse();
        ranks::counts(&order)
    }
}
