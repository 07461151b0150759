//! From an order of transfers to weights.

/// Each rank has this many times less weight than the one before: the first of two has 8/9.
const STEP: f64 = 8.0;
/// The smallest weight relative to the first, so that no transfer starves.
const LEAST: f64 = 0.01;

/// Relative weights of transfers that `order` names from first to last: rank k has max(8^-k, 0.01).
pub fn counts(order: &[usize]) -> Vec<f64> {
    let mut counts = vec![LEAST; order.len()];
    for (rank, &index) in order.iter().enumerate() {
        counts[index] = STEP.powi(-(rank.min(64) as i32)).max(LEAST);
    }
    counts
}
