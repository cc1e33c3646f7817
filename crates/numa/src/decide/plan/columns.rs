//! The patterns of a machine, with their cost and load.

use super::{Column, Load, NodeCapacity, Pattern, PlacementProblem, PlannedPart, PlannedVm};
use crate::decide::pricing::{self, PricedAmounts};
use std::collections::BTreeMap;

/// Patterns of a machine at most beside leaving it, those of the lowest cost. All patterns of two parts on 8 nodes, or of
/// three parts on four nodes, are within it.
const MAX_COLUMNS: usize = 256;

/// Machines are spread over so many nodes more than suffice at most, because the room that others leave on a node may be
/// small.
const MORE_NODES: usize = 2;

/// All columns of a machine; the first one leaves it as it is.
pub(super) fn columns(problem: &PlacementProblem, vm: &PlannedVm) -> Vec<Column> {
    let mut columns = vec![leave_column(problem, vm)];
    if !vm.is_movable() || vm.parts.is_empty() {
        columns.extend(pinned_memory_column(problem, vm));
        return columns;
    }
    let mut assigned = node_columns(problem, vm);
    // Where it fits on single nodes, other machines may still leave no room for it there.
    let least_nodes = if assigned.is_empty() { 1 } else { 2 };
    let is_permitted = |&position: &usize| vm.parts.iter().all(|part| vm.permits(part, problem.nodes[position].id));
    let permitted: Vec<usize> = (0..problem.nodes.len()).filter(is_permitted).collect();
    assigned.extend(spread_columns(problem, vm, &permitted, least_nodes));
    assigned.sort_by(|left, right| left.cost.total_cmp(&right.cost));
    assigned.truncate(MAX_COLUMNS);
    columns.extend(assigned);
    columns
}

/// The machine as it is.
pub(super) fn leave_column(problem: &PlacementProblem, vm: &PlannedVm) -> Column {
    let mut load = vec![Load::default(); problem.nodes.len()];
    let mut amounts = PricedAmounts::default();
    for part in &vm.parts {
        let cpu_shares = known_cpu_shares(problem, part);
        for (position, node) in problem.nodes.iter().enumerate() {
            let cpu_share = cpu_shares.get(&node.id).copied().unwrap_or(0.0);
            let on_node = Load { vcpus: part.vcpus * cpu_share, ..memory_on(part, node.id) };
            load[position] = load[position].plus(on_node, 1.0);
        }
        amounts = amounts.plus(lasting_amounts(problem, part, &cpu_shares, &part.pages), 1.0);
    }
    column(problem, vm, Pattern::Leave, amounts, load)
}

/// The virtual CPUs of each part on the node of its pinned memory; `None` if nothing is pinned, or not nearly all memory of
/// each part is on one permitted node.
fn pinned_memory_column(problem: &PlacementProblem, vm: &PlannedVm) -> Option<Column> {
    if vm.fixed || vm.parts.is_empty() {
        return None;
    }
    let nodes: Vec<u32> =
        vm.parts.iter().map(|part| part.main_node().filter(|&node| vm.permits(part, node))).collect::<Option<_>>()?;
    let mut load = vec![Load::default(); problem.nodes.len()];
    let mut amounts = PricedAmounts::default();
    for (part, &node) in vm.parts.iter().zip(&nodes) {
        for (position, of_node) in problem.nodes.iter().enumerate() {
            let vcpus = if of_node.id == node { part.vcpus } else { 0.0 };
            load[position] = load[position].plus(Load { vcpus, ..memory_on(part, of_node.id) }, 1.0);
        }
        amounts = amounts.plus(lasting_amounts(problem, part, &[(node, 1.0)].into(), &part.pages), 1.0);
    }
    Some(column(problem, vm, Pattern::Nodes(nodes), amounts, load))
}

/// The memory of a part on a node.
fn memory_on(part: &PlannedPart, node: u32) -> Load {
    let hugetlb_pages = part.hugetlb_pages.get(&node).copied().unwrap_or(0.0);
    Load { vcpus: 0.0, pages: part.pages.get(&node).copied().unwrap_or(0.0) - hugetlb_pages, hugetlb_pages }
}

/// What a machine uses and saves with the memory of each part on these nodes, in these shares.
pub(super) fn placed_amounts(problem: &PlacementProblem, vm: &PlannedVm, parts: &[Vec<(u32, f64)>]) -> PricedAmounts {
    let vcpus = |id: u32| problem.nodes.iter().find(|node| node.id == id).map_or(0.0, |node| node.vcpus);
    let mut amounts = PricedAmounts::default();
    for (part, nodes) in vm.parts.iter().zip(parts) {
        let all_vcpus: f64 = nodes.iter().map(|&(node, _)| vcpus(node)).sum();
        let cpu_shares = nodes.iter().map(|&(node, _)| (node, vcpus(node) / all_vcpus.max(1e-9))).collect();
        let pages: BTreeMap<u32, f64> = nodes.iter().map(|&(node, share)| (node, share * part.total_pages())).collect();
        amounts = amounts.plus(lasting_amounts(problem, part, &cpu_shares, &pages), 1.0);
        let arriving = |(node, pages): (&u32, &f64)| (pages - part.pages.get(node).copied().unwrap_or(0.0)).max(0.0);
        amounts.moved_pages += pages.iter().map(arriving).sum::<f64>();
    }
    amounts
}

/// A column with its cost.
pub(super) fn column(
    problem: &PlacementProblem,
    vm: &PlannedVm,
    pattern: Pattern,
    amounts: PricedAmounts,
    load: Vec<Load>,
) -> Column {
    // Costs are not negative: what a pattern saves less than the best one counts as its cost.
    let most_saved: f64 = vm.parts.iter().map(|part| most_saved_pages(problem, part)).sum();
    let min_gain = if pattern == Pattern::Leave { 0.0 } else { vm.min_gain(&problem.prices) };
    Column { cost: cost(problem, min_gain, amounts, most_saved), pattern, amounts, load }
}

fn cost(problem: &PlacementProblem, min_gain: f64, amounts: PricedAmounts, most_saved: f64) -> f64 {
    let lost = PricedAmounts { saved_pages: amounts.saved_pages - most_saved, ..amounts };
    min_gain - pricing::price(&problem.prices, lost).net()
}

/// The pages that a part saves at most by merging, wherever it is.
fn most_saved_pages(problem: &PlacementProblem, part: &PlannedPart) -> f64 {
    let pages = part.equal_pages.values().copied();
    if problem.merges_within_nodes { pages.fold(0.0, f64::max) } else { pages.sum() }
}

/// What a part reads remotely and saves with its CPUs and memory in these places.
///
/// Pages that will merge across nodes are read from the node of the equal ones. Within nodes, only those of the part that
/// has equal ones on its own node merge.
pub(super) fn lasting_amounts(
    problem: &PlacementProblem,
    part: &PlannedPart,
    cpu_shares: &BTreeMap<u32, f64>,
    pages: &BTreeMap<u32, f64>,
) -> PricedAmounts {
    let total = part.total_pages();
    let saved = if total <= 0.0 {
        0.0
    } else if problem.merges_within_nodes {
        let equal = |node: &u32| part.equal_pages.get(node).copied().unwrap_or(0.0);
        pages.iter().map(|(node, pages)| pages / total * equal(node)).sum()
    } else {
        most_saved_pages(problem, part).min(total)
    };
    // Pages that merge with those of other nodes are read there afterwards.
    let leaving_share = if problem.merges_within_nodes || total <= 0.0 { 0.0 } else { saved / total };
    let remote = |count: &dyn Fn(&BTreeMap<u32, f64>) -> f64| {
        let merged = if leaving_share > 0.0 { count(&part.equal_pages) } else { 0.0 };
        count(pages) * (1.0 - leaving_share) + merged + count(&part.kept_pages)
    };
    let remote_reads = part.hotness * remote(&|pages| weighted_remote_pages(problem, cpu_shares, pages));
    let remote_pages = remote(&|pages| sum_pairs(cpu_shares, pages, |from, to| f64::from(from != to)));
    PricedAmounts { remote_pages, ..PricedAmounts::for_merge(saved, part.hotness, part.huge_share, remote_reads) }
}

/// The shares of nodes in the run time of a part. If they are not known, its virtual CPUs run everywhere alike.
pub(super) fn known_cpu_shares(problem: &PlacementProblem, part: &PlannedPart) -> BTreeMap<u32, f64> {
    if !part.cpu_shares.is_empty() {
        return part.cpu_shares.clone();
    }
    let total: f64 = problem.nodes.iter().map(|node| node.vcpus).sum();
    problem.nodes.iter().map(|node| (node.id, node.vcpus / total.max(1e-9))).collect()
}

/// Pages weighted by the extra distance from the CPUs that read them.
pub(super) fn weighted_remote_pages(
    problem: &PlacementProblem,
    cpu_shares: &BTreeMap<u32, f64>,
    pages: &BTreeMap<u32, f64>,
) -> f64 {
    sum_pairs(cpu_shares, pages, |from, to| problem.extra_distance(from, to))
}

/// Pages times the shares of the CPUs that read them, weighted by the pair of nodes.
fn sum_pairs(cpu_shares: &BTreeMap<u32, f64>, pages: &BTreeMap<u32, f64>, weight: impl Fn(u32, u32) -> f64) -> f64 {
    let pairs =
        cpu_shares.iter().flat_map(|(&from, &share)| pages.iter().map(move |(&to, &pages)| (from, to, share * pages)));
    pairs.map(|(from, to, pages)| pages * weight(from, to)).sum()
}

/// Each part wholly on a node. Empty if a part fits on no permitted node. Parts are added one after the other, and the
/// cheapest beginnings are kept.
fn node_columns(problem: &PlacementProblem, vm: &PlannedVm) -> Vec<Column> {
    let mut beginnings = vec![Column {
        pattern: Pattern::Nodes(Vec::new()),
        amounts: PricedAmounts::default(),
        cost: 0.0,
        load: vec![Load::default(); problem.nodes.len()],
    }];
    let mut most_saved = 0.0;
    for part in &vm.parts {
        let mut longer = Vec::new();
        most_saved += most_saved_pages(problem, part);
        for column in &beginnings {
            let is_permitted = |&position: &usize| vm.permits(part, problem.nodes[position].id);
            for position in (0..problem.nodes.len()).filter(is_permitted) {
                longer.extend(with_part((problem, vm), column, (part, most_saved), position));
            }
        }
        longer.sort_by(|left, right| left.cost.total_cmp(&right.cost));
        // More than are returned, since a cheap beginning may lack room for the later parts.
        longer.truncate(4 * MAX_COLUMNS);
        beginnings = longer;
    }
    beginnings
}

/// A column with one more part on a node; `None` if the machine alone would exceed the node. `most_saved` is what its parts
/// would save at most.
fn with_part(
    (problem, vm): (&PlacementProblem, &PlannedVm),
    column: &Column,
    (part, most_saved): (&PlannedPart, f64),
    position: usize,
) -> Option<Column> {
    let node = &problem.nodes[position];
    let mut longer = column.clone();
    longer.load[position] = longer.load[position].plus(part.load(), 1.0);
    if !longer.load[position].fits(node) {
        return None;
    }
    let (cpu_shares, pages) = ([(node.id, 1.0)].into(), [(node.id, part.total_pages())].into());
    longer.amounts = longer.amounts.plus(lasting_amounts(problem, part, &cpu_shares, &pages), 1.0);
    longer.amounts.moved_pages += part.total_pages() - part.pages.get(&node.id).copied().unwrap_or(0.0);
    if let Pattern::Nodes(nodes) = &mut longer.pattern {
        nodes.push(node.id);
    }
    longer.cost = cost(problem, vm.min_gain(&problem.prices), longer.amounts, most_saved);
    Some(longer)
}

/// All parts over the fewest nodes that suffice, but at least so many, or over `MORE_NODES` more at most, starting from each
/// node with the nearest others.
fn spread_columns(problem: &PlacementProblem, vm: &PlannedVm, allowed: &[usize], least_nodes: usize) -> Vec<Column> {
    let load = vm.parts.iter().fold(Load::default(), |sum, part| sum.plus(part.load(), 1.0));
    let mut found: Vec<Column> = Vec::new();
    for &first in allowed {
        let mut nearest = allowed.to_vec();
        let distance = |position: usize| problem.extra_distance(problem.nodes[first].id, problem.nodes[position].id);
        // Of nodes at the same distance, the next ones: those with the lowest numbers would be in all columns.
        let steps = |position: usize| (position + problem.nodes.len() - first) % problem.nodes.len();
        nearest
            .sort_by(|&left, &right| distance(left).total_cmp(&distance(right)).then(steps(left).cmp(&steps(right))));
        let mut room = NodeCapacity { id: problem.nodes[first].id, vcpus: 0.0, pages: 0.0, hugetlb_pages: 0.0 };
        let mut count = 0;
        while count < nearest.len() && (count < least_nodes || !load.fits(&room)) {
            room.vcpus += problem.nodes[nearest[count]].vcpus;
            room.pages += problem.nodes[nearest[count]].pages;
            room.hugetlb_pages += problem.nodes[nearest[count]].hugetlb_pages;
            count += 1;
        }
        for count in count..=nearest.len().min(count + MORE_NODES) {
            let mut chosen = nearest[..count].to_vec();
            chosen.sort_unstable();
            let column = spread_column(problem, vm, &chosen);
            if !found.iter().any(|other| other.pattern == column.pattern) {
                found.push(column);
            }
        }
    }
    found
}

/// All parts over these nodes, in proportion to their capacity.
pub(super) fn spread_column(problem: &PlacementProblem, vm: &PlannedVm, chosen: &[usize]) -> Column {
    let total = |axis: fn(&super::NodeCapacity) -> f64| chosen.iter().map(|&at| axis(&problem.nodes[at])).sum::<f64>();
    let (vcpus, pages) = (total(|node| node.vcpus).max(1e-9), total(|node| node.pages).max(1e-9));
    let mut load = vec![Load::default(); problem.nodes.len()];
    let mut amounts = PricedAmounts::default();
    for part in &vm.parts {
        let cpu_shares = chosen.iter().map(|&at| (problem.nodes[at].id, problem.nodes[at].vcpus / vcpus)).collect();
        let part_pages: BTreeMap<u32, f64> = chosen
            .iter()
            .map(|&at| (problem.nodes[at].id, part.total_pages() * problem.nodes[at].pages / pages))
            .collect();
        amounts = amounts.plus(lasting_amounts(problem, part, &cpu_shares, &part_pages), 1.0);
        for &at in chosen {
            let node = problem.nodes[at].id;
            let memory = Load { vcpus: 0.0, ..part.load() };
            load[at] = load[at].plus(memory, problem.nodes[at].pages / pages);
            load[at].vcpus += part.vcpus * cpu_shares[&node];
            amounts.moved_pages += (part_pages[&node] - part.pages.get(&node).copied().unwrap_or(0.0)).max(0.0);
        }
    }
    let nodes = chosen.iter().map(|&at| problem.nodes[at].id).collect();
    column(problem, vm, Pattern::Spread(nodes), amounts, load)
}
