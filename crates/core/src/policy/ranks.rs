//! From an order of transfers to weights.

/// What rank k divides by, again and again: the first of two has 8/9.
const STEP: f64 = 8.0;
/// The least that a rank counts beside the first, so that nobody starves.
const LEAST: f64 = 0.01;

/// How much each of so many transfers counts, where `order` names them from the first to the last: rank k counts
/// max(8^-k, 0.01).
pub fn counts(order: &[usize]) -> Vec<f64> {
    let mut counts = vec![LEAST; order.len()];
    for (rank, &index) in order.iter().enumerate() {
        counts[index] = STEP.powi(-(rank.min(64) as i32)).max(LEAST);
    }
    counts
}
