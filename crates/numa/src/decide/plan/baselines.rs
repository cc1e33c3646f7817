//! Simple placements that a plan is compared with.

use super::columns::{columns, spread_column};
use super::{Column, Load, Pattern, PlacementProblem, PlannedVm, numad, overload};
use crate::decide::pricing::{self, PricedAmounts, PricedGain};

/// A simple placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Baseline {
    /// Everything stays as it is.
    Nothing,
    /// Memory and virtual CPUs of each machine over all nodes (`numactl --interleave=all`).
    Interleave,
    /// Each machine on the first node with room for it, in the given order; over all nodes if there is none.
    FirstFit,
    /// As numad places them, by its published heuristic, which knows neither cpusets nor policies.
    Numad,
}

impl Baseline {
    /// All baselines.
    pub const ALL: [Self; 4] = [Self::Nothing, Self::Interleave, Self::FirstFit, Self::Numad];

    /// Its name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Interleave => "interleave",
            Self::FirstFit => "first fit",
            Self::Numad => "numad",
        }
    }
}

/// The result of a placement of all machines.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BaselineResult {
    /// Remote reads, in pages with hotness 1 at twice the local distance.
    pub remote_reads: f64,
    /// Pages on other nodes than the CPUs that read them.
    pub remote_pages: f64,
    /// Pages to move.
    pub moved_pages: f64,
    /// What it gains against leaving everything.
    pub gain: PricedGain,
    /// The load above the capacity of nodes.
    pub overload: Load,
    /// Machines on nodes that they may not use.
    pub unpermitted_machines: usize,
}

/// Place all machines in a simple way. Fixed machines stay.
pub fn place(problem: &PlacementProblem, baseline: Baseline) -> BaselineResult {
    let chosen = match baseline {
        Baseline::Nothing => place_each(problem, |_, mut options, _| options.swap_remove(0)),
        Baseline::Interleave => place_each(problem, |vm, _, _| spread_over_all(problem, vm)),
        Baseline::FirstFit => place_each(problem, |vm, options, placed| {
            first_fit(problem, placed, &options).unwrap_or_else(|| spread_over_all(problem, vm))
        }),
        Baseline::Numad => numad::place(problem),
    };
    let sum =
        |chosen: &[Column]| chosen.iter().fold(PricedAmounts::default(), |sum, column| sum.plus(column.amounts, 1.0));
    let (amounts, left) = (sum(&chosen), sum(&place_each(problem, |_, mut options, _| options.swap_remove(0))));
    BaselineResult {
        remote_reads: amounts.remote_reads,
        remote_pages: amounts.remote_pages,
        moved_pages: amounts.moved_pages,
        gain: pricing::price(&problem.prices, amounts.plus(left, -1.0)),
        overload: overload(problem, chosen.iter()),
        unpermitted_machines: problem
            .vms
            .iter()
            .zip(&chosen)
            .filter(|(vm, column)| !is_permitted(vm, &column.pattern))
            .count(),
    }
}

fn is_permitted(vm: &PlannedVm, pattern: &Pattern) -> bool {
    match pattern {
        Pattern::Leave => true,
        Pattern::Nodes(nodes) => vm.parts.iter().zip(nodes).all(|(part, node)| vm.permits(part, *node)),
        Pattern::Spread(nodes) => vm.parts.iter().all(|part| nodes.iter().all(|node| vm.permits(part, *node))),
    }
}

/// Choose a column for each machine that is not fixed, from its options, after those that were placed before it.
fn place_each(
    problem: &PlacementProblem,
    choose: impl Fn(&PlannedVm, Vec<Column>, &[Column]) -> Column,
) -> Vec<Column> {
    let mut placed: Vec<Column> = Vec::new();
    for vm in &problem.vms {
        let mut options = columns(problem, vm);
        let is_free = vm.is_movable() && !problem.nodes.is_empty();
        let column = if is_free { choose(vm, options, &placed) } else { options.swap_remove(0) };
        placed.push(column);
    }
    placed
}

fn spread_over_all(problem: &PlacementProblem, vm: &PlannedVm) -> Column {
    let every_node: Vec<usize> = (0..problem.nodes.len()).collect();
    spread_column(problem, vm, &every_node)
}

/// The column with the lowest node numbers that causes no overload.
fn first_fit(problem: &PlacementProblem, placed: &[Column], options: &[Column]) -> Option<Column> {
    let fits = |column: &&Column| overload(problem, placed.iter().chain([*column])) == Load::default();
    let on_nodes = options.iter().filter(|column| matches!(column.pattern, Pattern::Nodes(_)));
    on_nodes.filter(fits).min_by(|left, right| left.pattern.cmp(&right.pattern)).cloned()
}
