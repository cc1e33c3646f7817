//! Weights a plan by the memory that machines access.
//!
//! The working set W(t, T) of a program is the memory that it has accessed in the interval T before the time t (P. J.
//! Denning, "The working set model for program behavior", Communications of the ACM 11 (5), 1968). Here T is DAMON's
//! sampling interval, and the working set is the mean over the time of the measurement.
//!
//! ```text
//! accessed share of a part = working set of the part / resident memory of the part
//! hotness of a part        = CPU time of the machine / pages of the machine x accessed share of the part
//! ```
//!
//! Without a measurement, every page of a machine is assumed to be read equally often, at the rate of the CPU time for
//! each page. The accessed share is the probability that a page is read at all within the interval. Pages outside of the
//! working set have no remote reads. Reads of a small working set are served by the caches of the CPU, which the kernel's
//! accessed bits do not show, so the rate of the pages within it is not raised in turn. Of a machine with several virtual
//! nodes, each node gets the machine's reads in proportion to its working set.

use super::plan::PlacementProblem;
use crate::problem::MIN_HOTNESS;
use pagefold_base::{AddressRange, Bytes};

/// At most this many ranges of a part are monitored. The RAM of a virtual machine has few regions.
const MAX_RANGES: usize = 16;

/// The memory of a part that was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkingSet {
    /// Bytes that are accessed within a sampling interval, on average.
    pub accessed: Bytes,
    /// Bytes in memory.
    pub resident: Bytes,
}

impl WorkingSet {
    /// The working set of some ranges of memory, if this share of their addresses is accessed.
    pub fn new(ranges: &[ResidentRange], accessed_share: f64) -> Self {
        let addresses: Bytes = ranges.iter().map(|memory| memory.range.bytes()).sum();
        let accessed = Bytes((addresses.0 as f64 * accessed_share).round() as u64);
        let resident: Bytes = ranges.iter().map(|memory| memory.resident).sum();
        Self { accessed: accessed.min(resident), resident }
    }

    /// The share of the memory that is accessed; 0 if there is none.
    pub fn accessed_share(self) -> f64 {
        self.accessed.0 as f64 / (self.resident.0 as f64).max(1.0)
    }
}

/// Which figures weight the pages of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HotnessSource {
    /// CPU time, as requested.
    RunTime,
    /// CPU time, because the working sets could not be measured, for this reason.
    NotMeasured(String),
    /// CPU time and the working sets: of each part of each machine, in the order of the problem.
    WorkingSets(Vec<Vec<WorkingSet>>),
}

/// A range of addresses with the bytes of it that are in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResidentRange {
    /// The range.
    pub range: AddressRange,
    /// The bytes in memory.
    pub resident: Bytes,
}

/// The ranges to monitor, ascending, for the regions of a part, which are ascending, too: adjacent regions together, and
/// those with the most memory. Ranges without memory are left out. The others are taken to be accessed alike.
pub fn ranges_to_monitor(regions: &[ResidentRange]) -> Vec<ResidentRange> {
    let mut ranges: Vec<ResidentRange> = Vec::new();
    for region in regions.iter().filter(|region| region.resident > Bytes::ZERO) {
        match ranges.last_mut() {
            Some(last) if last.range.end == region.range.start => {
                last.range.end = region.range.end;
                last.resident += region.resident;
            }
            _ => ranges.push(*region),
        }
    }
    ranges.sort_by_key(|memory| std::cmp::Reverse(memory.resident));
    ranges.truncate(MAX_RANGES);
    ranges.sort_by_key(|memory| memory.range.start);
    ranges
}

/// Weights each part of a problem by its working set. The hottest part has the hotness 1 again. If no part has a working
/// set, the hotness stays that of the CPU time.
pub fn weight_by_working_sets(problem: &mut PlacementProblem, working_sets: &[Vec<WorkingSet>]) {
    let shares: Vec<f64> = working_sets.iter().flatten().map(|set| set.accessed_share()).collect();
    let parts = || problem.vms.iter().flat_map(|vm| &vm.parts);
    let weights: Vec<f64> = parts().zip(&shares).map(|(part, share)| part.hotness * share).collect();
    let hottest = weights.iter().copied().fold(0.0, f64::max);
    if hottest == 0.0 {
        return;
    }
    // Hotness is relative, and prices are not.
    problem.prices.remote_page *= hottest;
    problem.prices.split_page *= hottest;
    for (part, weight) in problem.vms.iter_mut().flat_map(|vm| &mut vm.parts).zip(weights) {
        part.hotness = (weight / hottest).max(MIN_HOTNESS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::plan::{PlannedPart, PlannedVm};
    use proptest::prelude::*;

    fn range(start: u64, end: u64, resident: u64) -> ResidentRange {
        ResidentRange { range: AddressRange { start, end }, resident: Bytes(resident) }
    }

    #[test]
    fn adjacent_ranges_are_monitored_together_and_empty_ones_not() {
        let regions = [range(0, 10, 5), range(10, 20, 10), range(20, 30, 0), range(30, 40, 1)];
        assert_eq!(ranges_to_monitor(&regions), [range(0, 20, 15), range(30, 40, 1)]);
    }

    #[test]
    fn ranges_with_most_memory_are_monitored_in_the_order_of_addresses() {
        let regions: Vec<ResidentRange> =
            (0..40).map(|number| range(20 * number, 20 * number + 10, 1 + number)).collect();
        let monitored = ranges_to_monitor(&regions);
        assert_eq!(monitored, regions[40 - MAX_RANGES..]);
    }

    #[test]
    fn working_set_counts_accessed_addresses_and_is_resident() {
        // A fifth of the addresses has memory, and a tenth of the addresses is accessed: half of the memory.
        let half = WorkingSet::new(&[range(0, 1000, 200)], 0.1);
        assert_eq!((half.accessed, half.resident, half.accessed_share()), (Bytes(100), Bytes(200), 0.5));
        assert_eq!(WorkingSet::new(&[range(0, 1000, 200)], 0.3).accessed_share(), 1.0);
        assert_eq!(WorkingSet::new(&[], 0.0).accessed_share(), 0.0);
    }

    fn problem(hotness: &[&[f64]]) -> PlacementProblem {
        let vm = |hotness: &&[f64]| PlannedVm {
            parts: hotness.iter().map(|&hotness| PlannedPart { hotness, ..PlannedPart::default() }).collect(),
            ..PlannedVm::default()
        };
        PlacementProblem { vms: hotness.iter().map(vm).collect(), ..PlacementProblem::default() }
    }

    fn working_set(percent: u64) -> WorkingSet {
        WorkingSet { accessed: Bytes(percent), resident: Bytes(100) }
    }

    fn hotness(problem: &PlacementProblem) -> Vec<f64> {
        problem.vms.iter().flat_map(|vm| &vm.parts).map(|part| part.hotness).collect()
    }

    #[test]
    fn parts_are_weighted_by_their_own_working_sets() {
        let mut weighted = problem(&[&[1.0, 1.0], &[0.5]]);
        weight_by_working_sets(&mut weighted, &[vec![working_set(20), working_set(0)], vec![working_set(80)]]);
        assert_eq!(hotness(&weighted), [0.5, MIN_HOTNESS, 1.0]);
    }

    #[test]
    fn run_time_counts_if_no_memory_is_accessed() {
        let mut weighted = problem(&[&[1.0], &[0.5]]);
        weight_by_working_sets(&mut weighted, &[vec![working_set(0)], vec![working_set(0)]]);
        assert_eq!(hotness(&weighted), [1.0, 0.5]);
    }

    proptest! {
        #[test]
        fn equal_shares_keep_the_order_of_the_run_time(
            run_times in proptest::collection::vec(0.01f64..1.0, 1..9),
            percent in 1u64..100,
        ) {
            let parts: Vec<&[f64]> = run_times.iter().map(std::slice::from_ref).collect();
            let mut weighted = problem(&parts);
            weight_by_working_sets(&mut weighted, &vec![vec![working_set(percent)]; run_times.len()]);
            let hottest = run_times.iter().copied().fold(0.0, f64::max);
            for (weighted, run_time) in hotness(&weighted).into_iter().zip(&run_times) {
                prop_assert!((weighted - (run_time / hottest).max(MIN_HOTNESS)).abs() < 1e-9);
            }
        }
    }
}
