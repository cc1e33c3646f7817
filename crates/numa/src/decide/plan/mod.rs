//! Plans the placement of virtual machines on NUMA nodes.
//!
//! Each virtual machine consists of parts: one for each virtual node, or a single one. For each machine the planner lists
//! patterns (`columns`): leave it as it is, or put each part on one node. An integer program chooses one pattern for
//! each machine, so that CPUs and memory of each node suffice and the cost is minimal. The cost of a pattern is constant:
//!
//! ```text
//! remote reads  = sum over parts of hotness x pages x (distance / 10 - 1)
//! cost          = remote reads + MOVE_COST x moved pages + fixed cost of moving a machine
//! ```
//!
//! A load above the capacity of a node is possible, at a high cost, because a host may be overloaded already. A greedy
//! search with exchanges (`search`) finds a first plan, which the solver then improves or proves. The gap to the
//! solver's lower bound is part of the result.

pub mod baselines;
mod columns;
mod numad;
mod search;
#[cfg(test)]
mod tests;

use microlp::{ComparisonOp, OptimizationDirection, Problem, SolveOptions, Variable};
use pagefold_base::IdSet;
use std::collections::BTreeMap;
use std::time::Duration;

/// The cost of moving a page, in remote reads of a page with hotness 1 at twice the local distance. A moved page is
/// copied once; a remote page costs on each of its reads until the next plan.
pub(super) const MOVE_COST: f64 = 0.02;

/// The cost of moving any part of a machine, in the same unit: 16 MiB of remote pages. It keeps machines from being
/// moved for next to nothing.
const FIXED_MOVE_COST: f64 = 4096.0;

/// The cost of a page above the capacity of a node: more than any remote read.
const MEMORY_OVERLOAD_COST: f64 = 1000.0;

/// The cost of a virtual CPU above the capacity of a node, relative to the mean pages of a virtual CPU.
const CPU_OVERLOAD_COST: f64 = 100.0;

/// The relative gap at which the solver may stop.
const TARGET_GAP: f64 = 0.001;

/// A node of the host as the planner sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NodeCapacity {
    /// Its number.
    pub id: u32,
    /// Virtual CPUs that it may run: its CPUs times the permitted over-commit.
    pub vcpus: f64,
    /// Pages that machines may use, including those that they use now.
    pub pages: f64,
}

/// A part of a machine: a virtual node, or the whole machine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PlannedPart {
    /// Its virtual CPUs.
    pub vcpus: f64,
    /// The shares of nodes in the run time of its virtual CPUs; empty if unknown.
    pub cpu_shares: BTreeMap<u32, f64>,
    /// Its pages by node.
    pub pages: BTreeMap<u32, f64>,
    /// How often its pages are read, relative to other parts: 1 for the hottest.
    pub hotness: f64,
    /// The nodes to which a policy strictly binds its memory (`MPOL_BIND`); `None` if there is no such policy.
    pub bound_nodes: Option<IdSet>,
}

impl PlannedPart {
    /// Its pages on all nodes.
    pub fn total_pages(&self) -> f64 {
        self.pages.values().sum()
    }
}

/// A machine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PlannedVm {
    /// Its name.
    pub name: String,
    /// Its parts.
    pub parts: Vec<PlannedPart>,
    /// The nodes that it may use; all if `None`.
    pub allowed_nodes: Option<IdSet>,
    /// Whether it must stay as it is, for example because its memory is pinned.
    pub fixed: bool,
}

impl PlannedVm {
    /// Whether it may have a part on a node.
    pub fn permits(&self, part: &PlannedPart, node: u32) -> bool {
        [&self.allowed_nodes, &part.bound_nodes].into_iter().flatten().all(|nodes| nodes.contains(node))
    }

    /// Whether it may have each part on one of the nodes of the host at least.
    pub fn is_placeable(&self, nodes: impl Iterator<Item = u32> + Clone) -> bool {
        self.parts.iter().all(|part| nodes.clone().any(|node| self.permits(part, node)))
    }
}

/// Virtual CPUs and pages: on a node, or above its capacity.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct Load {
    /// Virtual CPUs.
    pub vcpus: f64,
    /// Pages.
    pub pages: f64,
}

impl Load {
    /// The load after more is added, or a multiple of it.
    fn plus(self, added: Self, factor: f64) -> Self {
        Self { vcpus: self.vcpus + factor * added.vcpus, pages: self.pages + factor * added.pages }
    }

    /// The part of the load above the capacity of a node.
    fn excess(self, node: &NodeCapacity) -> Self {
        Self { vcpus: (self.vcpus - node.vcpus).max(0.0), pages: (self.pages - node.pages).max(0.0) }
    }
}

/// What to plan.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PlacementProblem {
    /// The nodes, ascending by number.
    pub nodes: Vec<NodeCapacity>,
    /// The distance of a node's CPUs to the memory of another node; 10 is local. A missing pair is 10 or 20.
    pub distances: BTreeMap<(u32, u32), u32>,
    /// The machines.
    pub vms: Vec<PlannedVm>,
}

impl PlacementProblem {
    /// The extra cost of a remote read relative to a local one: 0 for the same node.
    fn extra_distance(&self, from: u32, to: u32) -> f64 {
        let default = if from == to { 10 } else { 20 };
        f64::from(self.distances.get(&(from, to)).copied().unwrap_or(default).max(10)) / 10.0 - 1.0
    }
}

/// The placement of a machine.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pattern {
    /// As it is.
    Leave,
    /// Each part on a node, by the number of the node.
    Nodes(Vec<u32>),
    /// Each part over these nodes, in proportion to their capacity: where no single node has room.
    Spread(Vec<u32>),
}

/// A pattern with its cost and load.
#[derive(Clone, Debug, PartialEq)]
struct Column {
    pattern: Pattern,
    remote_reads: f64,
    moved_pages: f64,
    cost: f64,
    /// The load of each node, in the order of the problem's nodes.
    load: Vec<Load>,
}

/// The planned placement of a machine.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedMove {
    /// The pattern.
    pub pattern: Pattern,
    /// Remote reads as it is and as planned, in pages with hotness 1 at twice the local distance.
    pub remote_reads: (f64, f64),
    /// Pages to move.
    pub moved_pages: f64,
    /// Why.
    pub reason: PlanReason,
}

/// Why a machine has its pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanReason {
    /// It is fixed.
    Fixed,
    /// It may use no node, or a part of it may not.
    NoPermittedNode,
    /// It has no remote reads.
    AlreadyLocal,
    /// No pattern has fewer remote reads.
    NoBetterPlacement,
    /// Fewer remote reads would not repay moving it.
    NotWorthMoving,
    /// A better pattern is taken by other machines.
    NodesFull,
    /// All of it fits on one node.
    OneNode,
    /// Each part gets a node.
    NodePerPart,
    /// No single node has room for it.
    NoSingleNode,
}

/// A plan.
#[derive(Clone, Debug, PartialEq)]
pub struct PlacementPlan {
    /// The placement of each machine, in the order of the problem.
    pub moves: Vec<PlannedMove>,
    /// Remote reads of all machines as they are and as planned.
    pub remote_reads: (f64, f64),
    /// The part of the cost that can be avoided at all which a better choice of the listed patterns could save at most; 0
    /// if there is none. `None` if the solver failed.
    pub gap: Option<f64>,
    /// The load above the capacity of nodes.
    pub overload: Load,
}

impl PlacementPlan {
    /// Whether nothing is to be moved.
    pub fn is_empty(&self) -> bool {
        self.moves.iter().all(|planned| planned.pattern == Pattern::Leave)
    }
}

/// Plan the placement of all machines within `time_limit` for the solver.
pub fn plan(problem: &PlacementProblem, time_limit: Duration) -> PlacementPlan {
    let columns: Vec<Vec<Column>> = problem.vms.iter().map(|vm| columns::columns(problem, vm)).collect();
    let costs = OverloadCosts::new(problem);
    let first = search::search(problem, &columns, costs);
    let (chosen, gap) = solve(problem, &columns, costs, &first, time_limit);
    let moves: Vec<PlannedMove> = problem
        .vms
        .iter()
        .zip(&columns)
        .zip(&chosen)
        .map(|((vm, columns), &chosen)| planned_move(problem, vm, columns, chosen))
        .collect();
    let sum = |part: fn(&PlannedMove) -> f64| moves.iter().map(part).sum::<f64>();
    PlacementPlan {
        remote_reads: (sum(|planned| planned.remote_reads.0), sum(|planned| planned.remote_reads.1)),
        overload: overload(problem, chosen_columns(&columns, &chosen)),
        moves,
        gap,
    }
}

fn planned_move(problem: &PlacementProblem, vm: &PlannedVm, columns: &[Column], chosen: usize) -> PlannedMove {
    let (leave, column) = (&columns[0], &columns[chosen]);
    let best = columns.iter().map(|column| column.remote_reads).fold(f64::INFINITY, f64::min);
    let cheapest = columns.iter().map(|column| column.cost).fold(f64::INFINITY, f64::min);
    let reason = match &column.pattern {
        _ if !vm.is_placeable(problem.nodes.iter().map(|node| node.id)) => PlanReason::NoPermittedNode,
        _ if vm.fixed => PlanReason::Fixed,
        Pattern::Leave if leave.remote_reads <= 1e-6 => PlanReason::AlreadyLocal,
        Pattern::Leave if leave.remote_reads <= best => PlanReason::NoBetterPlacement,
        Pattern::Leave if leave.cost <= cheapest => PlanReason::NotWorthMoving,
        Pattern::Leave => PlanReason::NodesFull,
        Pattern::Spread(_) => PlanReason::NoSingleNode,
        Pattern::Nodes(nodes) if nodes.iter().all(|node| *node == nodes[0]) => PlanReason::OneNode,
        Pattern::Nodes(_) => PlanReason::NodePerPart,
    };
    PlannedMove {
        pattern: column.pattern.clone(),
        remote_reads: (leave.remote_reads, column.remote_reads),
        moved_pages: column.moved_pages,
        reason,
    }
}

/// The costs of load above the capacity of a node.
#[derive(Clone, Copy, Debug)]
struct OverloadCosts {
    vcpu: f64,
    page: f64,
}

impl OverloadCosts {
    fn new(problem: &PlacementProblem) -> Self {
        let parts = || problem.vms.iter().flat_map(|vm| &vm.parts);
        let vcpus: f64 = parts().map(|part| part.vcpus).sum();
        let pages: f64 = parts().map(PlannedPart::total_pages).sum();
        Self { vcpu: CPU_OVERLOAD_COST * (pages / vcpus.max(1.0)).max(1.0), page: MEMORY_OVERLOAD_COST }
    }

    fn cost(self, overload: Load) -> f64 {
        self.vcpu * overload.vcpus + self.page * overload.pages
    }
}

/// The load above the capacity of nodes, if these columns are chosen.
fn overload<'c>(problem: &PlacementProblem, chosen: impl Iterator<Item = &'c Column> + Clone) -> Load {
    let on_node =
        |position: usize| chosen.clone().fold(Load::default(), |sum, column| sum.plus(column.load[position], 1.0));
    let excess = problem.nodes.iter().enumerate().map(|(position, node)| on_node(position).excess(node));
    excess.fold(Load::default(), |sum, excess| sum.plus(excess, 1.0))
}

/// The chosen column of each machine.
fn chosen_columns<'c>(
    columns: &'c [Vec<Column>],
    chosen: &'c [usize],
) -> impl Iterator<Item = &'c Column> + Clone + use<'c> {
    columns.iter().zip(chosen).map(|(columns, &chosen)| &columns[chosen])
}

/// The cost of a choice of columns.
fn total_cost(problem: &PlacementProblem, columns: &[Vec<Column>], costs: OverloadCosts, chosen: &[usize]) -> f64 {
    let sum: f64 = chosen_columns(columns, chosen).map(|column| column.cost).sum();
    sum + costs.cost(overload(problem, chosen_columns(columns, chosen)))
}

/// Improve or prove a choice by an integer program. Returns the better choice and its gap.
fn solve(
    problem: &PlacementProblem,
    columns: &[Vec<Column>],
    costs: OverloadCosts,
    first: &[usize],
    time_limit: Duration,
) -> (Vec<usize>, Option<f64>) {
    let first_cost = total_cost(problem, columns, costs, first);
    // No choice costs less than the sum of the cheapest patterns, which needs no solver.
    let cheapest = |columns: &Vec<Column>| columns.iter().map(|column| column.cost).fold(f64::INFINITY, f64::min);
    let simple_bound: f64 = columns.iter().map(cheapest).sum();
    let unavoidable = unavoidable_cost(problem, columns, costs);
    let first_gap = relative_gap(first_cost - unavoidable, simple_bound - unavoidable);
    if first_gap <= TARGET_GAP {
        return (first.to_vec(), Some(first_gap));
    }
    let mut program = Problem::new(OptimizationDirection::Minimize);
    let variables: Vec<Vec<Variable>> = columns
        .iter()
        .map(|columns| columns.iter().map(|column| program.add_binary_var(column.cost)).collect())
        .collect();
    for variables in &variables {
        let sum: Vec<(Variable, f64)> = variables.iter().map(|&variable| (variable, 1.0)).collect();
        program.add_constraint(&sum[..], ComparisonOp::Eq, 1.0);
    }
    let mut warm_start: Vec<(Variable, f64)> = Vec::new();
    for (position, node) in problem.nodes.iter().enumerate() {
        type Axis = fn(&Load) -> f64;
        let axes: [(Axis, f64, f64); 2] =
            [(|load| load.vcpus, node.vcpus, costs.vcpu), (|load| load.pages, node.pages, costs.page)];
        for (axis, capacity, cost) in axes {
            let total: f64 = columns.iter().flatten().map(|column| axis(&column.load[position])).sum();
            if total <= 0.0 {
                continue;
            }
            // Rows are scaled to the capacity, because the solver needs coefficients of similar size.
            let scale = capacity.max(1.0);
            let excess = program.add_var(cost * scale, (0.0, f64::INFINITY));
            let mut sum: Vec<(Variable, f64)> = columns
                .iter()
                .flatten()
                .zip(variables.iter().flatten())
                .map(|(column, &variable)| (variable, axis(&column.load[position]) / scale))
                .filter(|&(_, load)| load > 1e-9)
                .collect();
            sum.push((excess, -1.0));
            program.add_constraint(&sum[..], ComparisonOp::Le, capacity / scale);
        }
    }
    for (variables, &chosen) in variables.iter().zip(first) {
        warm_start.extend(
            variables
                .iter()
                .enumerate()
                .map(|(position, &variable)| (variable, f64::from(u8::from(position == chosen)))),
        );
    }
    let mut options = SolveOptions::default();
    options.time_limit = Some(time_limit);
    // The solver's gap is relative to the whole cost.
    options.mip_gap = TARGET_GAP * ((first_cost - unavoidable) / first_cost.max(1.0)).clamp(0.0, 1.0);
    options.warm_start = Some(warm_start);
    let Ok(outcome) = program.solve_with(options) else { return (first.to_vec(), None) };
    let bound = outcome.stats().best_bound.map_or(simple_bound, |bound| bound.max(simple_bound));
    let solved = outcome.solution().map(|solution| {
        let largest = |variables: &Vec<Variable>| {
            let values = variables.iter().map(|&variable| solution.var_value(variable));
            values.enumerate().max_by(|left, right| left.1.total_cmp(&right.1)).map_or(0, |(position, _)| position)
        };
        variables.iter().map(largest).collect::<Vec<usize>>()
    });
    let candidates = [Some(first.to_vec()), solved, Some(vec![0; columns.len()])].into_iter().flatten();
    let cost = |chosen: &Vec<usize>| total_cost(problem, columns, costs, chosen);
    let best = candidates.min_by(|left, right| cost(left).total_cmp(&cost(right))).unwrap_or_else(|| first.to_vec());
    let gap = relative_gap(cost(&best) - unavoidable, bound - unavoidable);
    (best, Some(gap))
}

/// The cost of machines without a choice, and of load above the capacity of the whole host.
fn unavoidable_cost(problem: &PlacementProblem, columns: &[Vec<Column>], costs: OverloadCosts) -> f64 {
    let fixed: f64 = columns.iter().filter(|columns| columns.len() == 1).map(|columns| columns[0].cost).sum();
    let parts = || problem.vms.iter().flat_map(|vm| &vm.parts);
    let capacity = |axis: fn(&NodeCapacity) -> f64| problem.nodes.iter().map(axis).sum::<f64>();
    let vcpus: f64 = parts().map(|part| part.vcpus).sum::<f64>() - capacity(|node| node.vcpus);
    let pages: f64 = parts().map(PlannedPart::total_pages).sum::<f64>() - capacity(|node| node.pages);
    fixed + costs.cost(Load { vcpus: vcpus.max(0.0), pages: pages.max(0.0) })
}

/// The gap between a cost and its lower bound; no cost is negative. Costs that differ by less than a page count as equal.
fn relative_gap(cost: f64, bound: f64) -> f64 {
    let bound = bound.max(0.0);
    if cost <= bound + 1.0 { 0.0 } else { (cost - bound) / cost }
}
