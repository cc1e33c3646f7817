//! CPU time of ksmd as a sum over its operations, and the fit of their costs to measured scans.
//!
//! The model is linear: each operation has one cost. During a pause, ksmd's data leave the CPU's caches. So a batch has a
//! cost of its own, and so has the first comparison with a page of a tree after a pause.
//!
//! The costs are the non-negative values with the least sum of squared relative errors over the measured scans (Lawson and
//! Hanson, "Solving Least Squares Problems", 1974, chapter 23), found by coordinate descent.

use super::counters::{KsmdCounters, WorkCounts};

/// What ksmd does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operation {
    /// Looking up a page that is not skipped.
    Visit,
    /// Skipping a page by smart scan.
    Skip,
    /// Computing the checksum of a page.
    Checksum,
    /// Comparing a page with one of the stable tree.
    StableComparison,
    /// Comparing a page with one of the unstable tree, which is looked up in the page tables of its process first.
    UnstableComparison,
    /// Mapping a merged frame or the zero page in place of a page.
    Merge,
    /// Splitting a huge page.
    Split,
    /// Allocating the metadata of a page (`rmap_item`).
    Allocation,
    /// Beginning a batch after a pause, in which other data came into the CPU's caches.
    Batch,
    /// What a comparison costs more if it is the first with that page of a tree since the last pause.
    FirstComparison,
}

impl Operation {
    /// All operations.
    pub const ALL: [Self; 10] = [
        Self::Visit,
        Self::Skip,
        Self::Checksum,
        Self::StableComparison,
        Self::UnstableComparison,
        Self::Merge,
        Self::Split,
        Self::Allocation,
        Self::Batch,
        Self::FirstComparison,
    ];

    /// Its name in reports and files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Visit => "visit",
            Self::Skip => "skip",
            Self::Checksum => "checksum",
            Self::StableComparison => "stable comparison",
            Self::UnstableComparison => "unstable comparison",
            Self::Merge => "merge",
            Self::Split => "split",
            Self::Allocation => "allocation",
            Self::Batch => "batch",
            Self::FirstComparison => "first comparison",
        }
    }
}

/// How often ksmd did each operation, in the order of [`Operation::ALL`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OperationCounts([u64; Operation::ALL.len()]);

impl OperationCounts {
    /// The counts since the start of a model, from its counters.
    pub fn new(counters: &KsmdCounters, work: &WorkCounts) -> Self {
        Self(Operation::ALL.map(|operation| match operation {
            Operation::Visit => counters.pages_scanned,
            Operation::Skip => counters.pages_skipped,
            Operation::Checksum => work.checksums,
            Operation::StableComparison => work.stable_comparisons,
            Operation::UnstableComparison => work.unstable_comparisons,
            Operation::Merge => work.merges,
            Operation::Split => work.splits,
            Operation::Allocation => work.allocated_items,
            Operation::Batch => work.batches,
            Operation::FirstComparison => work.first_comparisons,
        }))
    }

    /// The counts after an earlier moment.
    pub fn since(&self, earlier: &Self) -> Self {
        let mut counts = self.0;
        counts.iter_mut().zip(earlier.0).for_each(|(count, earlier)| *count = count.saturating_sub(earlier));
        Self(counts)
    }

    /// How often ksmd did an operation.
    pub fn count(&self, operation: Operation) -> u64 {
        self.0[operation as usize]
    }
}

/// The CPU time of each operation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CostModel {
    nanoseconds: [f64; Operation::ALL.len()],
}

/// A measured scan: what ksmd did, and its CPU time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasuredScan {
    /// What the model did in this scan.
    pub operations: OperationCounts,
    /// The CPU time of the real ksmd, in nanoseconds.
    pub cpu_ns: f64,
}

/// Changes of a cost below this part of it end the descent.
const DESCENT_TOLERANCE: f64 = 1e-9;
/// Rounds of the descent at most.
const MAX_DESCENT_ROUNDS: u32 = 100_000;

impl CostModel {
    /// A model with these costs in nanoseconds.
    pub fn new(costs: impl IntoIterator<Item = (Operation, f64)>) -> Self {
        let mut model = Self::default();
        costs.into_iter().for_each(|(operation, cost)| model.nanoseconds[operation as usize] = cost);
        model
    }

    /// The cost of an operation in nanoseconds.
    pub fn nanoseconds(&self, operation: Operation) -> f64 {
        self.nanoseconds[operation as usize]
    }

    /// The CPU time of these operations, in nanoseconds.
    pub fn cpu_ns(&self, operations: &OperationCounts) -> f64 {
        self.nanoseconds.iter().zip(operations.0).map(|(cost, count)| cost * count as f64).sum()
    }

    /// The CPU time that the model gives a scan relative to the measured one, minus 1.
    pub fn relative_error(&self, scan: &MeasuredScan) -> f64 {
        self.cpu_ns(&scan.operations) / scan.cpu_ns - 1.0
    }

    /// The costs that fit these scans best. An operation that happens in none of them costs 0.
    pub fn fit(scans: &[MeasuredScan]) -> Self {
        let scans: Vec<&MeasuredScan> = scans.iter().filter(|scan| scan.cpu_ns > 0.0).collect();
        // Each row is divided by its CPU time, so that the right side is 1 and residuals are relative.
        let column = |operation: Operation| -> Vec<f64> {
            scans.iter().map(|scan| scan.operations.count(operation) as f64 / scan.cpu_ns).collect()
        };
        let columns = Operation::ALL.map(column);
        let mut model = Self::default();
        let mut residuals = vec![1.0; scans.len()];
        for _ in 0..MAX_DESCENT_ROUNDS {
            let mut largest_change = 0.0_f64;
            for (column, cost) in columns.iter().zip(&mut model.nanoseconds) {
                let square: f64 = column.iter().map(|value| value * value).sum();
                if square <= 0.0 {
                    continue;
                }
                let gradient: f64 = column.iter().zip(&residuals).map(|(value, residual)| value * residual).sum();
                let improved = (*cost + gradient / square).max(0.0);
                let change = improved - *cost;
                residuals.iter_mut().zip(column).for_each(|(residual, value)| *residual -= change * value);
                largest_change = largest_change.max(change.abs() / improved.abs().max(1.0));
                *cost = improved;
            }
            if largest_change < DESCENT_TOLERANCE {
                break;
            }
        }
        model
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn counts(values: [u64; 10]) -> OperationCounts {
        OperationCounts(values)
    }

    #[test]
    fn known_costs_are_found_again() {
        let truth =
            CostModel { nanoseconds: [120.0, 15.0, 700.0, 90.0, 150.0, 2500.0, 20_000.0, 60.0, 50_000.0, 400.0] };
        let scans = [
            [1000, 0, 1000, 0, 0, 0, 0, 1000, 1, 0],
            [1000, 0, 1000, 9000, 0, 0, 0, 0, 1, 900],
            [1000, 0, 1000, 9000, 8000, 0, 0, 0, 1, 1700],
            [1000, 0, 1000, 500, 40, 900, 0, 0, 1, 100],
            [1000, 0, 0, 0, 0, 0, 0, 0, 1, 0],
            [100, 900, 100, 700, 300, 0, 0, 0, 1, 60],
            [1000, 0, 1000, 700, 0, 800, 3, 0, 1, 90],
            [4000, 0, 4000, 44_000, 44_000, 0, 0, 4000, 1, 9000],
            [1000, 0, 1000, 0, 0, 0, 0, 0, 10, 0],
            [1000, 0, 1000, 9000, 8000, 0, 0, 0, 10, 7000],
        ]
        .map(|values| MeasuredScan { operations: counts(values), cpu_ns: truth.cpu_ns(&counts(values)) });
        let found = CostModel::fit(&scans);
        for operation in Operation::ALL {
            let (found, truth) = (found.nanoseconds(operation), truth.nanoseconds(operation));
            assert!((found / truth - 1.0).abs() < 1e-3, "{operation:?}: {found} and not {truth}");
        }
        assert!(scans.iter().all(|scan| found.relative_error(scan).abs() < 1e-6));
    }

    #[test]
    fn missing_operations_cost_nothing_and_no_cost_is_negative() {
        let scan = |visits, checksums, cpu_ns| MeasuredScan {
            operations: counts([visits, 0, checksums, 0, 0, 0, 0, 0, 0, 0]),
            cpu_ns,
        };
        // Scans with checksums were faster, as by noise.
        let found = CostModel::fit(&[scan(100, 0, 1000.0), scan(100, 100, 900.0)]);
        assert_eq!(found.nanoseconds(Operation::Merge), 0.0);
        assert_eq!(found.nanoseconds(Operation::Checksum), 0.0);
        assert!((900.0..1000.0).contains(&found.cpu_ns(&counts([100, 0, 0, 0, 0, 0, 0, 0, 0, 0]))), "{found:?}");
        assert_eq!(CostModel::fit(&[]), CostModel::default());
    }

    #[test]
    fn counts_of_a_model_are_those_of_its_counters() {
        let counters = KsmdCounters { pages_scanned: 9, pages_skipped: 4, ..KsmdCounters::default() };
        let work = WorkCounts { stable_comparisons: 2, unstable_comparisons: 3, merges: 1, ..WorkCounts::default() };
        let all = OperationCounts::new(&counters, &work);
        let count = |operation| all.count(operation);
        assert_eq!(
            [Operation::Visit, Operation::Skip, Operation::StableComparison, Operation::Merge].map(count),
            [9, 4, 2, 1]
        );
        assert_eq!(all.since(&all), OperationCounts::default());
    }

    proptest! {
        /// A fit is never worse than the truth with noise.
        #[test]
        fn fit_is_as_near_as_the_true_costs(
            truth in prop::array::uniform10(1.0..5000.0_f64),
            rows in prop::collection::vec((prop::array::uniform10(0_u64..10_000), 0.9..1.1_f64), 10..20),
        ) {
            let truth = CostModel { nanoseconds: truth };
            let scans: Vec<MeasuredScan> = rows
                .into_iter()
                .map(|(values, noise)| MeasuredScan {
                    operations: counts(values),
                    cpu_ns: noise * truth.cpu_ns(&counts(values)),
                })
                .filter(|scan| scan.cpu_ns > 0.0)
                .collect();
            let error = |model: &CostModel| scans.iter().map(|scan| model.relative_error(scan).powi(2)).sum::<f64>();
            let found = CostModel::fit(&scans);
            prop_assert!(error(&found) <= error(&truth) * (1.0 + 1e-6) + 1e-12);
        }
    }
}
