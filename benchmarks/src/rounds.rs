//! The order in which alternatives run, by the design of `pagefold ab`.

use pagefold_ab::decide::design::draw_round_orders;
use std::time::SystemTime;

/// The order of the alternatives in each round. It is drawn anew for each run of the benchmark; the samples are kept in
/// the order in which they were taken.
pub fn draw_orders<T: Clone>(alternatives: &[T], rounds: usize) -> Vec<Vec<T>> {
    // The low bits of the time, as a seed.
    let seed = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_nanos() as u64);
    let orders = draw_round_orders(alternatives.len(), rounds, seed);
    orders.iter().map(|order| order.iter().map(|&index| alternatives[index].clone()).collect()).collect()
}
