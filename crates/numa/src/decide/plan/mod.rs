//! Plans the placement of virtual machines on NUMA nodes.
//!
//! Each virtual machine consists of parts: one for each virtual node, or a single one. For each machine the planner lists
//! patterns (`columns`): leave it as it is, put each part on one node, or spread it. One pattern is chosen for each
//! machine, so that CPUs and memory of each node suffice and the cost is minimal. The cost of a pattern is constant, in CPU
//! seconds an hour ([`pricing`]):
//!
//! ```text
//! remote reads = sum over parts of hotness x pages x (distance / 10 - 1)
//! cost         = price of the remote reads, of pages that another pattern would save, of moving and merging pages, and of
//!                split huge pages, and the least gain if the machine moves
//! ```
//!
//! Pages that are merged stay on their node, and are read from there. Pages that will merge are known by their content
//! ([`super::content_overlap`]).
//!
//! A load above the capacity of a node is possible, at a high cost, because a host may be overloaded already. Virtual CPUs
//! above a node's even share of all of them have a low cost, so that machines also spread over an idle host, and over one
//! that has more virtual CPUs than its nodes may run. A greedy search with exchanges (`search`) finds a first plan, which
//! branch and bound (`branch_and_bound`) improves or proves.
//! The gap to its lower bound (`relaxation`) is part of the result.

pub mod baselines;
mod branch_and_bound;
mod columns;
#[cfg(any(test, feature = "generated-hosts"))]
pub mod generated;
pub mod numad;
mod relaxation;
mod search;
#[cfg(test)]
mod tests;

use super::pricing::{self, PricedAmounts, PricedGain, Prices};
use branch_and_bound::BoundedChoice;
use pagefold_base::IdSet;
use pagefold_base::memory::MAX_REMOTE_SHARE_OF_PLACED_MACHINE;
use std::collections::BTreeMap;

/// The cost of a page above the capacity of a node, in the unit of the prices: more than any remote read.
const MEMORY_OVERLOAD_COST: f64 = 1000.0;

/// The cost of a virtual CPU above the capacity of a node, relative to the mean pages of a virtual CPU.
const CPU_OVERLOAD_COST: f64 = 100.0;

/// Base pages of a hugetlb page of 2 MiB.
const PAGES_PER_HUGETLB_PAGE: f64 = 512.0;

/// A node of the host as the planner sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NodeCapacity {
    /// Its number.
    pub id: u32,
    /// Virtual CPUs that it may run: its CPUs times the permitted over-commit.
    pub vcpus: f64,
    /// Pages that machines may use, including those that they use now, without hugetlb pages.
    pub pages: f64,
    /// Base pages of hugetlb pages that machines may use, including those that they use now.
    pub hugetlb_pages: f64,
}

impl NodeCapacity {
    /// The load that it can take.
    fn load(&self) -> Load {
        Load { vcpus: self.vcpus, pages: self.pages, hugetlb_pages: self.hugetlb_pages }
    }
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
    /// Base pages of hugetlb pages by node; `pages` includes them.
    pub hugetlb_pages: BTreeMap<u32, f64>,
    /// Pages by node that stay there wherever the part is: merged pages, and those of files. `pages` does not include them.
    pub kept_pages: BTreeMap<u32, f64>,
    /// The part of them that is merged.
    pub merged_pages: BTreeMap<u32, f64>,
    /// Pages that will merge with equal ones on a node, by node; `pages` includes them.
    pub equal_pages: BTreeMap<u32, f64>,
    /// The share of its pages in transparent huge pages.
    pub huge_share: f64,
    /// How often its pages are read, relative to other parts: 1 for the hottest.
    pub hotness: f64,
    /// The nodes to which a policy strictly binds its memory (`MPOL_BIND`); `None` if there is no such policy.
    pub bound_nodes: Option<IdSet>,
    /// The nodes on which each of its virtual CPUs may run by the affinity that its owner gave it; `None` if unknown.
    pub cpu_nodes: Option<IdSet>,
    /// The nodes on which those of its threads may run now that may run on several.
    pub roaming_nodes: IdSet,
}

impl PlannedPart {
    /// Its pages on all nodes.
    pub fn total_pages(&self) -> f64 {
        self.pages.values().sum()
    }

    /// The node of nearly all its pages; `None` if there is none.
    fn main_node(&self) -> Option<u32> {
        let (&node, &pages) = self.pages.iter().max_by(|left, right| left.1.total_cmp(right.1))?;
        let is_main = pages > 0.0 && pages >= (1.0 - MAX_REMOTE_SHARE_OF_PLACED_MACHINE) * self.total_pages();
        is_main.then_some(node)
    }

    /// What it needs in all.
    fn load(&self) -> Load {
        let hugetlb_pages: f64 = self.hugetlb_pages.values().sum();
        Load { vcpus: self.vcpus, pages: self.total_pages() - hugetlb_pages, hugetlb_pages }
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
    /// Whether it must stay as it is.
    pub fixed: bool,
    /// Whether devices pin its memory, so that only its virtual CPUs can be placed.
    pub has_pinned_memory: bool,
    /// Whether it was placed before: another move must gain more.
    pub is_placed: bool,
}

impl PlannedVm {
    /// Whether it may have a part on a node.
    pub fn permits(&self, part: &PlannedPart, node: u32) -> bool {
        [&self.allowed_nodes, &part.bound_nodes, &part.cpu_nodes]
            .into_iter()
            .flatten()
            .all(|nodes| nodes.contains(node))
    }

    /// Whether its memory can be moved.
    pub fn is_movable(&self) -> bool {
        !self.fixed && !self.has_pinned_memory
    }

    /// What moving it must gain at least.
    fn min_gain(&self, prices: &Prices) -> f64 {
        if self.is_placed { prices.min_gain } else { prices.first_min_gain }
    }

    /// Whether it may have each part on one of the nodes of the host at least.
    pub fn is_placeable(&self, nodes: impl Iterator<Item = u32> + Clone) -> bool {
        self.parts.iter().all(|part| nodes.clone().any(|node| self.permits(part, node)))
    }
}

/// Virtual CPUs and memory: on a node, or above its capacity.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct Load {
    /// Virtual CPUs.
    pub vcpus: f64,
    /// Pages without hugetlb pages.
    pub pages: f64,
    /// Base pages of hugetlb pages.
    pub hugetlb_pages: f64,
}

impl Load {
    /// The load after more is added, or a multiple of it.
    fn plus(self, added: Self, factor: f64) -> Self {
        Self {
            vcpus: self.vcpus + factor * added.vcpus,
            pages: self.pages + factor * added.pages,
            hugetlb_pages: self.hugetlb_pages + factor * added.hugetlb_pages,
        }
    }

    /// The part of the load above the capacity of a node.
    fn excess(self, node: &NodeCapacity) -> Self {
        self.beyond(node.load())
    }

    /// The part of the load beyond another load.
    fn beyond(self, other: Self) -> Self {
        Self {
            vcpus: (self.vcpus - other.vcpus).max(0.0),
            pages: (self.pages - other.pages).max(0.0),
            hugetlb_pages: (self.hugetlb_pages - other.hugetlb_pages).max(0.0),
        }
    }

    /// Whether a node without other load has the capacity.
    fn fits(self, node: &NodeCapacity) -> bool {
        self.vcpus <= node.vcpus && self.pages <= node.pages && self.hugetlb_pages <= node.hugetlb_pages
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
    /// The prices.
    pub prices: Prices,
    /// Whether KSM merges equal pages of one node only (`merge_across_nodes=0`).
    pub merges_within_nodes: bool,
}

impl Column {
    /// What it gains against leaving the machine.
    fn gain_against(&self, leave: &Self, prices: &Prices) -> PricedGain {
        pricing::price(prices, self.amounts.plus(leave.amounts, -1.0))
    }

    /// Whether one of the two leaves the machine, and the other moves none of it.
    fn is_same_placement(&self, other: &Self) -> bool {
        let is_near = |(own, other): (&Load, &Load)| {
            (own.vcpus - other.vcpus).abs() < VCPU_TOLERANCE && (own.pages - other.pages).abs() < 1.0
        };
        [self, other].iter().any(|column| column.pattern == Pattern::Leave)
            && (self.amounts.moved_pages - other.amounts.moved_pages).abs() < 1.0
            && self.load.iter().zip(&other.load).all(is_near)
    }

    /// The cost of what lasts: without moving.
    fn lasting_cost(&self, prices: &Prices) -> f64 {
        -pricing::price(prices, PricedAmounts { moved_pages: 0.0, ..self.amounts }).net()
    }
}

impl PlacementProblem {
    /// The extra cost of a remote read relative to a local one: 0 for the same node.
    pub fn extra_distance(&self, from: u32, to: u32) -> f64 {
        let default = if from == to { 10 } else { 20 };
        f64::from(self.distances.get(&(from, to)).copied().unwrap_or(default).max(10)) / 10.0 - 1.0
    }

    /// Costs that differ by less count as equal: a page at the highest price.
    fn cost_tolerance(&self) -> f64 {
        self.prices.unit()
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
    amounts: PricedAmounts,
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
    /// Pages that it will save by merging with equal ones, as it is and as planned.
    pub saved_pages: (f64, f64),
    /// The node of each part, if the machine stays where it is and its virtual CPUs shall be bound there.
    pub binds_to: Option<Vec<u32>>,
    /// What the pattern gains against leaving the machine.
    pub gain: PricedGain,
    /// Why.
    pub reason: PlanReason,
    /// The pattern of the lowest cost beside this one; `None` if there is no other.
    pub next_best: Option<Alternative>,
}

/// Another pattern for a machine, if all other machines are placed as planned.
#[derive(Clone, Debug, PartialEq)]
pub struct Alternative {
    /// The pattern.
    pub pattern: Pattern,
    /// What it gains against leaving the machine.
    pub gain: PricedGain,
    /// The load above the capacity of nodes that it adds to the plan's.
    pub excess: Load,
}

/// Why a machine has its pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanReason {
    /// It is fixed, or its memory is pinned.
    Fixed,
    /// Its virtual CPUs come to its pinned memory.
    NearPinnedMemory,
    /// It may use no node, or a part of it may not.
    NoPermittedNode,
    /// It has no remote reads.
    AlreadyLocal,
    /// No pattern gains anything.
    NoBetterPlacement,
    /// The gain of another pattern would not repay moving it.
    NotWorthMoving,
    /// A better pattern is taken by other machines.
    NodesFull,
    /// It will save more memory beside equal pages of other machines.
    NearEqualPages,
    /// All of it fits on one node.
    OneNode,
    /// Each part gets a node.
    NodePerPart,
    /// No single node has room for it.
    NoSingleNode,
    /// It leaves nodes that run more virtual CPUs than others, and gains nothing else.
    LessCrowded,
}

/// A plan.
#[derive(Clone, Debug, PartialEq)]
pub struct PlacementPlan {
    /// The placement of each machine, in the order of the problem.
    pub moves: Vec<PlannedMove>,
    /// Remote reads of all machines as they are and as planned.
    pub remote_reads: (f64, f64),
    /// Pages of all machines on other nodes than the CPUs that read them, as planned.
    pub remote_pages: f64,
    /// What the plan gains against leaving everything.
    pub gain: PricedGain,
    /// The part of the cost that can be avoided at all which a better choice of the listed patterns could save at most; 0
    /// if there is none.
    pub gap: f64,
    /// The load above the capacity of nodes.
    pub overload: Load,
}

impl PlacementPlan {
    /// Whether nothing is to be moved.
    pub fn is_empty(&self) -> bool {
        self.moves.iter().all(|planned| planned.pattern == Pattern::Leave)
    }
}

/// Plan the placement of all machines. The search of a better plan ends when `is_due`; it is asked often, and must not
/// take its answer back. A plan whose search ended before depends on the problem only.
pub fn plan(problem: &PlacementProblem, is_due: &mut dyn FnMut() -> bool) -> PlacementPlan {
    let columns: Vec<Vec<Column>> = problem.vms.iter().map(|vm| columns::columns(problem, vm)).collect();
    let costs = LoadCosts::new(problem);
    let cost = |chosen: &[usize]| total_cost(problem, &columns, costs, chosen);
    let (found, leave) = (search::search(problem, &columns, costs, is_due), vec![0; columns.len()]);
    let first = if cost(&found) < cost(&leave) { found } else { leave.clone() };
    let first = BoundedChoice { cost: cost(&first), chosen: first, bound: 0.0 };
    let unavoidable = unavoidable_cost(problem, &columns, costs);
    let best = branch_and_bound::improve(problem, &columns, costs, first, unavoidable, is_due);
    let gap = relative_gap(best.cost - unavoidable, best.bound - unavoidable, problem.cost_tolerance());
    let chosen = best.chosen;
    let has_room = |position: usize| {
        let load = load_on_node(chosen_columns(&columns, &chosen), position);
        load.vcpus <= problem.nodes[position].vcpus + VCPU_TOLERANCE
    };
    let uncrowded: IdSet =
        (0..problem.nodes.len()).filter(|&position| has_room(position)).map(|at| problem.nodes[at].id).collect();
    let moves: Vec<PlannedMove> = (0..problem.vms.len())
        .map(|position| {
            let planned =
                planned_move(problem, &problem.vms[position], &columns[position], chosen[position], &uncrowded);
            PlannedMove {
                gain: PricedGain {
                    crowding: crowding_gain(problem, &columns, costs, &chosen, position),
                    ..planned.gain
                },
                next_best: next_best(problem, &columns, costs, &chosen, position),
                ..planned
            }
        })
        .collect();
    let sum = |part: fn(&PlannedMove) -> f64| moves.iter().map(part).sum::<f64>();
    let crowded = |chosen: &[usize]| crowded_vcpus(problem, &columns, costs, chosen);
    let crowding = costs.crowding_gain(crowded(&leave), crowded(&chosen));
    let gain = moves.iter().fold(PricedGain::default(), |sum, planned| sum.plus(planned.gain));
    PlacementPlan {
        remote_reads: (sum(|planned| planned.remote_reads.0), sum(|planned| planned.remote_reads.1)),
        remote_pages: chosen_columns(&columns, &chosen).map(|column| column.amounts.remote_pages).sum(),
        gain: PricedGain { crowding, ..gain },
        overload: overload(problem, chosen_columns(&columns, &chosen)),
        moves,
        gap,
    }
}

/// What a placement of a machine, by its position, gains against leaving it: each part on these nodes, with the shares of
/// its memory. Its virtual CPUs run on the CPUs of the nodes, beside those of the other machines as they are.
pub fn gain_of_placement(problem: &PlacementProblem, position: usize, parts: &[Vec<(u32, f64)>]) -> PricedGain {
    let vm = &problem.vms[position];
    let placed = columns::placed_amounts(problem, vm, parts);
    let leave = columns::leave_column(problem, vm).amounts;
    let costs = LoadCosts::new(problem);
    let crowded = |placed: BTreeMap<usize, &[Vec<(u32, f64)>]>| {
        let vcpus = vcpus_on_nodes(problem, 0..problem.vms.len(), &placed);
        let on_node = |node: &NodeCapacity| vcpus.get(&node.id).copied().unwrap_or(0.0);
        problem.nodes.iter().map(|node| costs.crowded_vcpus(on_node(node), node)).sum()
    };
    let crowding = costs.crowding_gain(crowded(BTreeMap::new()), crowded([(position, parts)].into()));
    PricedGain { crowding, ..pricing::price(&problem.prices, placed.plus(leave, -1.0)) }
}

/// The virtual CPUs of machines on each node, if those in `placed` have their parts on these nodes, and the rest runs as
/// it does now. `machines` and `placed` have positions in the problem.
pub fn vcpus_on_nodes(
    problem: &PlacementProblem,
    machines: impl IntoIterator<Item = usize>,
    placed: &BTreeMap<usize, &[Vec<(u32, f64)>]>,
) -> BTreeMap<u32, f64> {
    let mut vcpus: BTreeMap<u32, f64> = BTreeMap::new();
    for position in machines {
        let vm = &problem.vms[position];
        for (index, part) in vm.parts.iter().enumerate() {
            let shares = match placed.get(&position) {
                Some(parts) => parts[index].iter().copied().collect(),
                None => columns::known_cpu_shares(problem, part),
            };
            shares.into_iter().for_each(|(node, share)| *vcpus.entry(node).or_default() += share * part.vcpus);
        }
    }
    vcpus
}

/// A node that would run more virtual CPUs than it may.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CrowdedNode {
    /// The node.
    pub node: u32,
    /// Virtual CPUs that would run on it.
    pub vcpus: f64,
    /// Virtual CPUs that it may run.
    pub vcpu_capacity: f64,
}

/// A part of a virtual CPU that does not matter: shares of run time are not exact.
pub(crate) const VCPU_TOLERANCE: f64 = 0.01;

/// The nodes of the placed machines that would run more virtual CPUs than they may, and more than now. `placed` has
/// positions in the problem.
pub fn crowded_nodes(problem: &PlacementProblem, placed: &BTreeMap<usize, &[Vec<(u32, f64)>]>) -> Vec<CrowdedNode> {
    let on_nodes = |placed| vcpus_on_nodes(problem, 0..problem.vms.len(), placed);
    let (now, then) = (on_nodes(&BTreeMap::new()), on_nodes(placed));
    let of = |vcpus: &BTreeMap<u32, f64>, id: u32| vcpus.get(&id).copied().unwrap_or(0.0);
    let on_node =
        |node: &NodeCapacity| CrowdedNode { node: node.id, vcpus: of(&then, node.id), vcpu_capacity: node.vcpus };
    let is_crowded = |node: &CrowdedNode| {
        let most = node.vcpu_capacity.max(of(&now, node.node));
        node.vcpus > most + VCPU_TOLERANCE
    };
    problem.nodes.iter().map(on_node).filter(is_crowded).collect()
}

/// What the merged pages of a machine that are on other nodes than all its CPUs gain at most, as it is: the memory that
/// they save, if all but one of the pages of each frame are the machine's, less their remote reads. `None` if there are
/// none. The CPU time of merging is spent, and huge pages are split already.
pub fn gain_of_remote_merges(problem: &PlacementProblem, vm: &PlannedVm) -> Option<PricedGain> {
    let mut amounts = PricedAmounts::default();
    for part in &vm.parts {
        let cpu_shares = columns::known_cpu_shares(problem, part);
        let is_remote = |node: &u32| cpu_shares.get(node).is_none_or(|share| *share <= 0.0);
        let merged = part.merged_pages.iter().filter(|(node, _)| is_remote(node));
        let merged: BTreeMap<u32, f64> = merged.map(|(&node, &pages)| (node, pages)).collect();
        amounts.saved_pages += merged.values().sum::<f64>();
        amounts.remote_reads += part.hotness * columns::weighted_remote_pages(problem, &cpu_shares, &merged);
    }
    (amounts.saved_pages > 0.0).then(|| pricing::price(&problem.prices, amounts))
}

/// The move of a machine to the chosen column, without its alternative. `uncrowded` are the nodes whose virtual CPUs may
/// be bound there.
fn planned_move(
    problem: &PlacementProblem,
    vm: &PlannedVm,
    columns: &[Column],
    chosen: usize,
    uncrowded: &IdSet,
) -> PlannedMove {
    let (leave, column) = (&columns[0], &columns[chosen]);
    let lasting_cost = |column: &Column| column.lasting_cost(&problem.prices);
    let best = columns.iter().map(lasting_cost).fold(f64::INFINITY, f64::min);
    let tolerance = 1e-6 * problem.cost_tolerance();
    let saves_more = column.amounts.saved_pages > leave.amounts.saved_pages + 1e-6;
    let cheapest = columns.iter().map(|column| column.cost).fold(f64::INFINITY, f64::min);
    let reason = match &column.pattern {
        _ if !vm.is_placeable(problem.nodes.iter().map(|node| node.id)) => PlanReason::NoPermittedNode,
        Pattern::Leave if !vm.is_movable() => PlanReason::Fixed,
        _ if !vm.is_movable() => PlanReason::NearPinnedMemory,
        Pattern::Leave if lasting_cost(leave) <= best + tolerance => match leave.amounts.remote_reads <= 1e-6 {
            true => PlanReason::AlreadyLocal,
            false => PlanReason::NoBetterPlacement,
        },
        Pattern::Leave if leave.cost <= cheapest => PlanReason::NotWorthMoving,
        Pattern::Leave => PlanReason::NodesFull,
        Pattern::Nodes(_) | Pattern::Spread(_) if lasting_cost(column) >= lasting_cost(leave) - tolerance => {
            PlanReason::LessCrowded
        }
        Pattern::Spread(_) => PlanReason::NoSingleNode,
        Pattern::Nodes(_) if saves_more => PlanReason::NearEqualPages,
        Pattern::Nodes(nodes) if nodes.iter().all(|node| *node == nodes[0]) => PlanReason::OneNode,
        Pattern::Nodes(_) => PlanReason::NodePerPart,
    };
    let stays = column.pattern == Pattern::Leave && !vm.fixed;
    PlannedMove {
        pattern: column.pattern.clone(),
        remote_reads: (leave.amounts.remote_reads, column.amounts.remote_reads),
        moved_pages: column.amounts.moved_pages,
        saved_pages: (leave.amounts.saved_pages, column.amounts.saved_pages),
        binds_to: stays.then(|| nodes_to_bind(vm, uncrowded)).flatten(),
        gain: column.gain_against(leave, &problem.prices),
        reason,
        next_best: None,
    }
}

/// What a machine gains by its chosen column against leaving it, by crowded virtual CPUs.
fn crowding_gain(
    problem: &PlacementProblem,
    columns: &[Vec<Column>],
    costs: LoadCosts,
    chosen: &[usize],
    position: usize,
) -> f64 {
    let mut left = chosen.to_vec();
    left[position] = 0;
    let crowded = |chosen: &[usize]| crowded_vcpus(problem, columns, costs, chosen);
    costs.crowding_gain(crowded(&left), crowded(chosen))
}

/// The column of the lowest cost beside the chosen one of a machine, by its position.
fn next_best(
    problem: &PlacementProblem,
    columns: &[Vec<Column>],
    costs: LoadCosts,
    chosen: &[usize],
    position: usize,
) -> Option<Alternative> {
    let own = &columns[position];
    let planned = &own[chosen[position]];
    let (index, column) = own
        .iter()
        .enumerate()
        .filter(|&(index, column)| index != chosen[position] && !column.is_same_placement(planned))
        .min_by(|(_, left), (_, right)| left.cost.total_cmp(&right.cost))?;
    let changed: Vec<usize> =
        chosen.iter().enumerate().map(|(at, &chosen)| if at == position { index } else { chosen }).collect();
    let of = |chosen| overload(problem, chosen_columns(columns, chosen));
    Some(Alternative {
        pattern: column.pattern.clone(),
        gain: PricedGain {
            crowding: crowding_gain(problem, columns, costs, &changed, position),
            ..column.gain_against(&own[0], &problem.prices)
        },
        excess: of(&changed).beyond(of(chosen)),
    })
}

/// The node of each part of a machine, if each has nearly all of its memory on the node on which it runs, and may run
/// elsewhere: bound there, it stays local. `None` if one of the nodes is not permitted, or is crowded: its virtual CPUs
/// may have to run elsewhere then.
fn nodes_to_bind(vm: &PlannedVm, uncrowded: &IdSet) -> Option<Vec<u32>> {
    let local_node = |part: &PlannedPart| {
        let node = part.main_node()?;
        let run_share = part.cpu_shares.get(&node).copied().unwrap_or(0.0);
        let is_local = run_share >= 1.0 - MAX_REMOTE_SHARE_OF_PLACED_MACHINE;
        (is_local && vm.permits(part, node) && uncrowded.contains(node)).then_some(node)
    };
    let nodes: Vec<u32> = vm.parts.iter().map(local_node).collect::<Option<_>>()?;
    let may_leave = vm.parts.iter().zip(&nodes).any(|(part, node)| part.roaming_nodes.contains(*node));
    may_leave.then_some(nodes)
}

/// The costs of load above the capacity of a node, and of virtual CPUs above its even share.
#[derive(Clone, Copy, Debug)]
struct LoadCosts {
    vcpu: f64,
    page: f64,
    /// For a base page of a hugetlb page. A hugetlb page costs more than an overload by all virtual CPUs, because the
    /// kernel gives none beyond those that are free.
    hugetlb_page: f64,
    /// For a virtual CPU above the even share of a node; 0 if even shares do not matter.
    crowded_vcpu: f64,
    /// The even share of a node, relative to its capacity of virtual CPUs.
    even_share: f64,
    /// How far a node may be above its even share, because parts do not divide evenly.
    uneven_vcpus: f64,
}

impl LoadCosts {
    fn new(problem: &PlacementProblem) -> Self {
        // Machines of which only the virtual CPUs are known do not make those of the others cheaper.
        let parts = || problem.vms.iter().flat_map(|vm| &vm.parts).filter(|part| part.total_pages() > 0.0);
        let vcpus: f64 = parts().map(|part| part.vcpus).sum();
        let pages: f64 = parts().map(PlannedPart::total_pages).sum();
        let unit = problem.prices.unit();
        let vcpu = unit * CPU_OVERLOAD_COST * (pages / vcpus.max(1.0)).max(1.0);
        let page = unit * MEMORY_OVERLOAD_COST;
        let even_share = host_load(problem).vcpus / host_capacity(problem).vcpus.max(1e-9);
        let costs = Self {
            vcpu,
            page,
            hugetlb_page: page.max(vcpu * vcpus / PAGES_PER_HUGETLB_PAGE),
            crowded_vcpu: problem.prices.crowded_vcpu,
            even_share,
            uneven_vcpus: uneven_vcpus(problem, even_share),
        };
        // The capacities spread the machines of a host that is nearly full.
        let is_bounded = even_share <= 1.0 && problem.nodes.iter().all(|node| costs.even_vcpus(node) >= node.vcpus);
        Self { crowded_vcpu: if is_bounded { 0.0 } else { costs.crowded_vcpu }, ..costs }
    }

    /// The virtual CPUs of a node above which it is crowded.
    fn even_vcpus(self, node: &NodeCapacity) -> f64 {
        self.even_share * node.vcpus + self.uneven_vcpus
    }

    /// The cost of the load of a node.
    fn of_node(self, load: Load, node: &NodeCapacity) -> f64 {
        self.of_overload(load.excess(node)) + self.crowded_vcpu * self.crowded_vcpus(load.vcpus, node)
    }

    /// The part of the virtual CPUs on a node that is above its even share.
    fn crowded_vcpus(self, vcpus: f64, node: &NodeCapacity) -> f64 {
        (vcpus - self.even_vcpus(node)).max(0.0)
    }

    /// What fewer crowded virtual CPUs gain. It is not the negative zero.
    fn crowding_gain(self, before: f64, after: f64) -> f64 {
        0.0 + self.crowded_vcpu * (before - after)
    }

    fn of_overload(self, overload: Load) -> f64 {
        self.vcpu * overload.vcpus + self.page * overload.pages + self.hugetlb_page * overload.hugetlb_pages
    }
}

/// By how much the load of a node is above the mean at most, if parts are put on nodes one after the other, each on the one
/// with the least load: `(1 - 1 / nodes)` times the largest part (R. L. Graham, SIAM Journal on Applied Mathematics 17,
/// 1969). Parts above the even share of each node need more wherever they are, and do not count.
fn uneven_vcpus(problem: &PlacementProblem, even_share: f64) -> f64 {
    let largest_share = problem.nodes.iter().map(|node| even_share * node.vcpus).fold(0.0, f64::max);
    let parts = problem.vms.iter().flat_map(|vm| &vm.parts).map(|part| part.vcpus);
    let largest = parts.filter(|&vcpus| vcpus <= largest_share + VCPU_TOLERANCE).fold(0.0, f64::max);
    (1.0 - 1.0 / (problem.nodes.len() as f64).max(1.0)) * largest
}

/// The load above the capacity of nodes, if these columns are chosen.
fn overload<'c>(problem: &PlacementProblem, chosen: impl Iterator<Item = &'c Column> + Clone) -> Load {
    let nodes = problem.nodes.iter().enumerate();
    let excess = nodes.map(|(position, node)| load_on_node(chosen.clone(), position).excess(node));
    excess.fold(Load::default(), |sum, excess| sum.plus(excess, 1.0))
}

/// The load of a node, by its position, if these columns are chosen.
fn load_on_node<'c>(chosen: impl Iterator<Item = &'c Column>, position: usize) -> Load {
    chosen.fold(Load::default(), |sum, column| sum.plus(column.load[position], 1.0))
}

/// The chosen column of each machine.
fn chosen_columns<'c>(
    columns: &'c [Vec<Column>],
    chosen: &'c [usize],
) -> impl Iterator<Item = &'c Column> + Clone + use<'c> {
    columns.iter().zip(chosen).map(|(columns, &chosen)| &columns[chosen])
}

/// The cost of a choice of columns.
fn total_cost(problem: &PlacementProblem, columns: &[Vec<Column>], costs: LoadCosts, chosen: &[usize]) -> f64 {
    let sum: f64 = chosen_columns(columns, chosen).map(|column| column.cost).sum();
    let of_node = |(position, node)| costs.of_node(load_on_node(chosen_columns(columns, chosen), position), node);
    sum + problem.nodes.iter().enumerate().map(of_node).sum::<f64>()
}

/// Virtual CPUs above the even shares of nodes.
fn crowded_vcpus(problem: &PlacementProblem, columns: &[Vec<Column>], costs: LoadCosts, chosen: &[usize]) -> f64 {
    let crowded =
        |(position, node)| costs.crowded_vcpus(load_on_node(chosen_columns(columns, chosen), position).vcpus, node);
    problem.nodes.iter().enumerate().map(crowded).sum()
}

/// The cost of machines without a choice, and of load above the capacity of the whole host.
fn unavoidable_cost(problem: &PlacementProblem, columns: &[Vec<Column>], costs: LoadCosts) -> f64 {
    let fixed: f64 = columns.iter().filter(|columns| columns.len() == 1).map(|columns| columns[0].cost).sum();
    fixed + costs.of_overload(host_excess(problem))
}

/// The load above the capacity of the whole host.
fn host_excess(problem: &PlacementProblem) -> Load {
    host_load(problem).beyond(host_capacity(problem))
}

/// What all machines need.
fn host_load(problem: &PlacementProblem) -> Load {
    let parts = problem.vms.iter().flat_map(|vm| &vm.parts);
    parts.fold(Load::default(), |sum, part| sum.plus(part.load(), 1.0))
}

/// What all nodes offer.
fn host_capacity(problem: &PlacementProblem) -> Load {
    problem.nodes.iter().fold(Load::default(), |sum, node| sum.plus(node.load(), 1.0))
}

/// The gap between a cost and its lower bound; no cost is negative.
fn relative_gap(cost: f64, bound: f64, tolerance: f64) -> f64 {
    let bound = bound.max(0.0);
    // A bit more than the tolerance, because of rounding.
    if cost <= bound + 1.01 * tolerance { 0.0 } else { (cost - bound) / cost }
}
