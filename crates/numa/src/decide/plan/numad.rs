//! What numad would do: its heuristic as in numad.c of version 0.5+20150602 (`manage_loads`, `pick_numa_nodes`,
//! `combined_value_of_weighted_resources`), with its defaults.
//!
//! numad takes one process after another, the largest product of CPUs and memory first, and binds it to nodes by their
//! free resources, with a bias to where its memory is. It knows nothing of virtual nodes. Each process is bound once
//! here, as all are when numad starts. Memory on the chosen nodes stays, and all other memory is distributed over them.
//! A virtual CPU counts as a whole CPU. Hugetlb pages count like other memory.

#[cfg(any(test, feature = "generated-hosts"))]
use super::overload;
use super::{Column, Load, Pattern, PlacementProblem, PlannedPart, PlannedVm, columns};
use crate::decide::pricing::PricedAmounts;
use std::collections::BTreeMap;

/// The default of `-u`: a process gets room so that it uses this share of it.
const TARGET_UTILIZATION: f64 = 0.85;

/// How much of a node's memory is left (`MBS_MARGIN`): 100 MiB, in pages of 4 KiB.
const MARGIN_PAGES: f64 = 25_600.0;

/// The factor of the memory that a process has on a node already.
const OWN_MEMORY_BIAS: f64 = 17.0 / 16.0;

/// The factors of needed and of excess memory, and of needed and of excess CPUs.
const MEMORY_WEIGHTS: (f64, f64) = (10.0, 4.0);
const CPU_WEIGHTS: (f64, f64) = (6.0, 1.0);

/// A hundredth of a CPU is the least that a node has.
const MIN_FREE_CPUS: f64 = 0.01;

/// Place all machines as numad does, in the order of the problem. Fixed machines stay.
pub(super) fn place(problem: &PlacementProblem) -> Vec<Column> {
    let mut placed: Vec<Column> = problem.vms.iter().map(|vm| columns::columns(problem, vm).swap_remove(0)).collect();
    let magnitude = |vm: &PlannedVm| total_vcpus(vm) * total_pages(vm);
    let mut order: Vec<usize> = (0..problem.vms.len()).filter(|&position| problem.vms[position].is_movable()).collect();
    order.sort_by(|&left, &right| magnitude(&problem.vms[right]).total_cmp(&magnitude(&problem.vms[left])));
    let used: f64 = problem.vms.iter().map(total_vcpus).sum();
    let has_enough_cpus = used <= problem.nodes.iter().map(|node| node.vcpus).sum();
    for position in order {
        let vm = &problem.vms[position];
        if total_pages(vm) <= 0.0 || problem.nodes.is_empty() {
            continue;
        }
        let free = free_resources(problem, &placed);
        let nodes = pick_nodes(problem, vm, free, has_enough_cpus);
        placed[position] = bind(problem, vm, &nodes);
    }
    placed
}

fn total_vcpus(vm: &PlannedVm) -> f64 {
    vm.parts.iter().map(|part| part.vcpus).sum()
}

fn total_pages(vm: &PlannedVm) -> f64 {
    vm.parts.iter().map(PlannedPart::total_pages).sum()
}

/// What each node has free.
fn free_resources(problem: &PlacementProblem, placed: &[Column]) -> Vec<Load> {
    let used =
        |position: usize| placed.iter().fold(Load::default(), |sum, column| sum.plus(column.load[position], 1.0));
    let free = |(position, node): (usize, &super::NodeCapacity)| {
        let used = used(position);
        Load { vcpus: (node.vcpus - used.vcpus).max(0.0), pages: (node.pages - used.pages).max(0.0), ..Load::default() }
    };
    problem.nodes.iter().enumerate().map(free).collect()
}

/// The positions of the nodes to which a process is bound.
fn pick_nodes(problem: &PlacementProblem, vm: &PlannedVm, mut free: Vec<Load>, has_enough_cpus: bool) -> Vec<usize> {
    let (vcpus, pages) = (total_vcpus(vm), total_pages(vm));
    let needed = Load { vcpus, pages: pages / TARGET_UTILIZATION, ..Load::default() };
    for (node, free) in problem.nodes.iter().zip(&mut free) {
        let own: f64 = vm.parts.iter().filter_map(|part| part.pages.get(&node.id)).sum();
        free.pages = (free.pages + own * OWN_MEMORY_BIAS).min(node.pages);
        free.vcpus = (free.vcpus + vcpus * own / pages).min(node.vcpus).max(MIN_FREE_CPUS);
    }
    let flexible_cpus = (1.0 - TARGET_UTILIZATION) * problem.nodes[0].vcpus / 2.0;
    choose_nodes(problem, needed, free, flexible_cpus, has_enough_cpus)
}

/// The positions of nodes with what a process needs (`pick_numa_nodes`), ascending. Some CPUs may be missing, or all if
/// the host has enough.
fn choose_nodes(
    problem: &PlacementProblem,
    mut needed: Load,
    free: Vec<Load>,
    flexible_cpus: f64,
    has_enough_cpus: bool,
) -> Vec<usize> {
    let first = &problem.nodes[0];
    let memory_nodes = (needed.pages / first.pages.max(1.0)).ceil();
    let cpu_nodes = ((needed.vcpus - flexible_cpus) / first.vcpus.max(MIN_FREE_CPUS)).ceil();
    let least_nodes = (memory_nodes.max(cpu_nodes).max(0.0) as usize).min(problem.nodes.len());
    let magnitudes: Vec<f64> = free.iter().map(|free| magnitude(*free, needed)).collect();
    let chain = |from: usize| nearest(problem, from, &magnitudes);
    let weight = |from: usize| -> f64 {
        let near = chain(from).into_iter().take(least_nodes.max(1));
        near.map(|node| magnitudes[node] / relative_distance(problem, node, from).powi(2)).sum()
    };
    let best = (0..free.len()).max_by(|&left, &right| weight(left).total_cmp(&weight(right)).then(right.cmp(&left)));
    let mut chosen: Vec<usize> = Vec::new();
    for node in chain(best.unwrap_or(0)) {
        let is_met = needed.pages <= 0.0 && (needed.vcpus <= flexible_cpus || has_enough_cpus);
        if chosen.len() >= least_nodes && is_met && !chosen.is_empty() {
            break;
        }
        chosen.push(node);
        // A node with less than the margin adds to what is needed.
        needed.pages = match needed.pages + MARGIN_PAGES <= free[node].pages {
            true => 0.0,
            false => needed.pages + MARGIN_PAGES - free[node].pages,
        };
        needed.vcpus -= free[node].vcpus;
    }
    chosen.sort_unstable();
    chosen
}

/// Where machines are that started one after the other.
#[cfg(any(test, feature = "generated-hosts"))]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StartedPlacement {
    /// Remote reads, in pages with hotness 1 at twice the local distance.
    pub remote_reads: f64,
    /// Pages on other nodes than the CPUs that read them.
    pub remote_pages: f64,
    /// The load above the capacity of nodes.
    pub overload: Load,
}

/// Machines that start one after the other, in the order of the problem, each on nodes that are chosen for it then.
#[cfg(any(test, feature = "generated-hosts"))]
pub struct StartingMachines<'p> {
    problem: &'p PlacementProblem,
    started: Vec<Column>,
}

#[cfg(any(test, feature = "generated-hosts"))]
impl<'p> StartingMachines<'p> {
    /// None has started.
    pub fn new(problem: &'p PlacementProblem) -> Self {
        Self { problem, started: Vec::new() }
    }

    /// The virtual CPUs and pages of the machine that starts next; `None` if all have started.
    pub fn next_request(&self) -> Option<Load> {
        let vm = self.problem.vms.get(self.started.len())?;
        Some(Load { vcpus: total_vcpus(vm), pages: total_pages(vm), ..Load::default() })
    }

    /// What each node has free now.
    pub fn free(&self) -> Vec<Load> {
        free_resources(self.problem, &self.started)
    }

    /// The positions of the nodes that numad advises for the next machine (`numad -w`), by its heuristic. Advice before
    /// the start counts all CPUs, has no memory in place, and asks for no room beyond the request.
    pub fn advice(&self) -> Vec<usize> {
        self.next_request().map_or_else(Vec::new, |needed| {
            let free =
                self.free().into_iter().map(|free| Load { vcpus: free.vcpus.max(MIN_FREE_CPUS), ..free }).collect();
            choose_nodes(self.problem, needed, free, 0.0, false)
        })
    }

    /// What nodes are worth for the next machine by numad's heuristic: the sum of their magnitudes.
    pub fn worth(&self, nodes: &[usize]) -> f64 {
        let needed = self.next_request().unwrap_or_default();
        let free = self.free();
        nodes.iter().map(|&node| magnitude(free[node], needed)).sum()
    }

    /// Starts the next machine on nodes, by their position.
    pub fn start(&mut self, nodes: &[usize]) {
        if let Some(vm) = self.problem.vms.get(self.started.len()) {
            self.started.push(bind(self.problem, vm, nodes));
        }
    }

    /// The placement of the machines that have started.
    pub fn result(&self) -> StartedPlacement {
        let sum = |amount: fn(&PricedAmounts) -> f64| self.started.iter().map(|column| amount(&column.amounts)).sum();
        StartedPlacement {
            remote_reads: sum(|amounts| amounts.remote_reads),
            remote_pages: sum(|amounts| amounts.remote_pages),
            overload: overload(self.problem, self.started.iter()),
        }
    }
}

/// The product of weighted memory and CPUs that a node has free.
fn magnitude(free: Load, needed: Load) -> f64 {
    let weighted = |free: f64, needed: f64, (needed_weight, excess_weight): (f64, f64)| {
        free.min(needed) * needed_weight + (free - needed).max(0.0) * excess_weight
    };
    weighted(free.pages, needed.pages, MEMORY_WEIGHTS) * weighted(free.vcpus, needed.vcpus, CPU_WEIGHTS)
}

fn relative_distance(problem: &PlacementProblem, node: usize, from: usize) -> f64 {
    problem.extra_distance(problem.nodes[node].id, problem.nodes[from].id) + 1.0
}

/// All nodes by their distance from one of them, and those of equal distance by magnitude.
fn nearest(problem: &PlacementProblem, from: usize, magnitudes: &[f64]) -> Vec<usize> {
    let mut nodes: Vec<usize> = (0..problem.nodes.len()).collect();
    nodes.sort_by(|&left, &right| {
        let distances = relative_distance(problem, left, from).total_cmp(&relative_distance(problem, right, from));
        distances.then(magnitudes[right].total_cmp(&magnitudes[left]))
    });
    nodes
}

/// The machine with its virtual CPUs on these nodes, and with the memory of other nodes distributed over them.
fn bind(problem: &PlacementProblem, vm: &PlannedVm, chosen: &[usize]) -> Column {
    let nodes: Vec<u32> = chosen.iter().map(|&position| problem.nodes[position].id).collect();
    let vcpus: f64 = chosen.iter().map(|&position| problem.nodes[position].vcpus).sum();
    let share = |node: &super::NodeCapacity| node.vcpus / vcpus.max(1e-9);
    let cpu_shares: BTreeMap<u32, f64> =
        chosen.iter().map(|&position| (problem.nodes[position].id, share(&problem.nodes[position]))).collect();
    let mut load = vec![Load::default(); problem.nodes.len()];
    let mut amounts = PricedAmounts::default();
    for part in &vm.parts {
        let elsewhere = |pages: &BTreeMap<u32, f64>| -> f64 {
            pages.iter().filter(|(node, _)| !nodes.contains(node)).map(|(_, pages)| pages).sum()
        };
        let bound = |pages: &BTreeMap<u32, f64>| -> BTreeMap<u32, f64> {
            let share = elsewhere(pages) / nodes.len() as f64;
            nodes.iter().map(|node| (*node, pages.get(node).copied().unwrap_or(0.0) + share)).collect()
        };
        let (pages, hugetlb_pages) = (bound(&part.pages), bound(&part.hugetlb_pages));
        amounts = amounts.plus(columns::lasting_amounts(problem, part, &cpu_shares, &pages), 1.0);
        amounts.moved_pages += elsewhere(&part.pages);
        for &position in chosen {
            let node = problem.nodes[position].id;
            load[position].vcpus += part.vcpus * cpu_shares[&node];
            load[position].pages += pages[&node] - hugetlb_pages[&node];
            load[position].hugetlb_pages += hugetlb_pages[&node];
        }
    }
    columns::column(problem, vm, Pattern::Spread(nodes), amounts, load)
}
