//! The patterns of a machine, with their cost and load.

use super::{
    Column, FIXED_MOVE_COST, Load, MOVE_COST, NodeCapacity, Pattern, PlacementProblem, PlannedPart, PlannedVm,
};
use std::collections::BTreeMap;

/// Patterns of a machine at most, those of the lowest cost. All patterns of two parts on 16 nodes, or of four parts on
/// four nodes, are within it.
const MAX_COLUMNS: usize = 256;

/// All columns of a machine; the first one leaves it as it is.
pub(super) fn columns(problem: &PlacementProblem, vm: &PlannedVm) -> Vec<Column> {
    let mut columns = vec![leave_column(problem, vm)];
    if vm.fixed || vm.parts.is_empty() {
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
fn leave_column(problem: &PlacementProblem, vm: &PlannedVm) -> Column {
    let mut load = vec![Load::default(); problem.nodes.len()];
    let mut remote_reads = 0.0;
    for part in &vm.parts {
        let cpu_shares = known_cpu_shares(problem, part);
        for (position, node) in problem.nodes.iter().enumerate() {
            let cpu_share = cpu_shares.get(&node.id).copied().unwrap_or(0.0);
            load[position].vcpus += part.vcpus * cpu_share;
            let hugetlb_pages = part.hugetlb_pages.get(&node.id).copied().unwrap_or(0.0);
            load[position].pages += part.pages.get(&node.id).copied().unwrap_or(0.0) - hugetlb_pages;
            load[position].hugetlb_pages += hugetlb_pages;
        }
        remote_reads += part.hotness * remote_pages(problem, &cpu_shares, &part.pages);
    }
    Column { pattern: Pattern::Leave, remote_reads, moved_pages: 0.0, cost: remote_reads, load }
}

/// The shares of nodes in the run time of a part. If they are not known, its virtual CPUs run everywhere alike.
fn known_cpu_shares(problem: &PlacementProblem, part: &PlannedPart) -> BTreeMap<u32, f64> {
    if !part.cpu_shares.is_empty() {
        return part.cpu_shares.clone();
    }
    let total: f64 = problem.nodes.iter().map(|node| node.vcpus).sum();
    problem.nodes.iter().map(|node| (node.id, node.vcpus / total.max(1e-9))).collect()
}

/// Pages weighted by the extra distance from the CPUs that read them.
pub(super) fn remote_pages(
    problem: &PlacementProblem,
    cpu_shares: &BTreeMap<u32, f64>,
    pages: &BTreeMap<u32, f64>,
) -> f64 {
    let pairs =
        cpu_shares.iter().flat_map(|(&from, &share)| pages.iter().map(move |(&to, &pages)| (from, to, share * pages)));
    pairs.map(|(from, to, pages)| pages * problem.extra_distance(from, to)).sum()
}

/// Each part wholly on a node. Empty if a part fits on no permitted node. Parts are added one after the other, and the
/// cheapest beginnings are kept.
fn node_columns(problem: &PlacementProblem, vm: &PlannedVm) -> Vec<Column> {
    let mut beginnings = vec![Column {
        pattern: Pattern::Nodes(Vec::new()),
        remote_reads: 0.0,
        moved_pages: 0.0,
        cost: 0.0,
        load: vec![Load::default(); problem.nodes.len()],
    }];
    for part in &vm.parts {
        let mut longer = Vec::new();
        for column in &beginnings {
            let is_permitted = |&position: &usize| vm.permits(part, problem.nodes[position].id);
            for position in (0..problem.nodes.len()).filter(is_permitted) {
                longer.extend(with_part(problem, column, part, position));
            }
        }
        longer.sort_by(|left, right| left.cost.total_cmp(&right.cost));
        // More than are returned, since a cheap beginning may lack room for the later parts.
        longer.truncate(4 * MAX_COLUMNS);
        beginnings = longer;
    }
    beginnings
}

/// A column with one more part on a node; `None` if the machine alone would exceed the node.
fn with_part(problem: &PlacementProblem, column: &Column, part: &PlannedPart, position: usize) -> Option<Column> {
    let node = &problem.nodes[position];
    let mut longer = column.clone();
    longer.load[position] = longer.load[position].plus(part.load(), 1.0);
    if !longer.load[position].fits(node) {
        return None;
    }
    let moved = part.total_pages() - part.pages.get(&node.id).copied().unwrap_or(0.0);
    longer.moved_pages += moved;
    if let Pattern::Nodes(nodes) = &mut longer.pattern {
        nodes.push(node.id);
    }
    longer.cost = longer.remote_reads + MOVE_COST * longer.moved_pages + FIXED_MOVE_COST;
    Some(longer)
}

/// All parts over the fewest nodes that suffice, but at least so many, starting from each node with the nearest others.
fn spread_columns(problem: &PlacementProblem, vm: &PlannedVm, allowed: &[usize], least_nodes: usize) -> Vec<Column> {
    let load = vm.parts.iter().fold(Load::default(), |sum, part| sum.plus(part.load(), 1.0));
    let mut found: Vec<Column> = Vec::new();
    for &first in allowed {
        let mut nearest = allowed.to_vec();
        let distance = |position: usize| problem.extra_distance(problem.nodes[first].id, problem.nodes[position].id);
        nearest.sort_by(|&left, &right| distance(left).total_cmp(&distance(right)).then(left.cmp(&right)));
        let mut room = NodeCapacity { id: problem.nodes[first].id, vcpus: 0.0, pages: 0.0, hugetlb_pages: 0.0 };
        let mut count = 0;
        while count < nearest.len() && (count < least_nodes || !load.fits(&room)) {
            room.vcpus += problem.nodes[nearest[count]].vcpus;
            room.pages += problem.nodes[nearest[count]].pages;
            room.hugetlb_pages += problem.nodes[nearest[count]].hugetlb_pages;
            count += 1;
        }
        let mut chosen = nearest[..count].to_vec();
        chosen.sort_unstable();
        let column = spread_column(problem, vm, &chosen);
        if !found.iter().any(|other| other.pattern == column.pattern) {
            found.push(column);
        }
    }
    found
}

/// All parts over these nodes, in proportion to their capacity.
pub(super) fn spread_column(problem: &PlacementProblem, vm: &PlannedVm, chosen: &[usize]) -> Column {
    let total = |axis: fn(&super::NodeCapacity) -> f64| chosen.iter().map(|&at| axis(&problem.nodes[at])).sum::<f64>();
    let (vcpus, pages) = (total(|node| node.vcpus).max(1e-9), total(|node| node.pages).max(1e-9));
    let mut load = vec![Load::default(); problem.nodes.len()];
    let (mut remote_reads, mut moved_pages) = (0.0, 0.0);
    for part in &vm.parts {
        let cpu_shares = chosen.iter().map(|&at| (problem.nodes[at].id, problem.nodes[at].vcpus / vcpus)).collect();
        let part_pages: BTreeMap<u32, f64> = chosen
            .iter()
            .map(|&at| (problem.nodes[at].id, part.total_pages() * problem.nodes[at].pages / pages))
            .collect();
        remote_reads += part.hotness * remote_pages(problem, &cpu_shares, &part_pages);
        for &at in chosen {
            let node = problem.nodes[at].id;
            let memory = Load { vcpus: 0.0, ..part.load() };
            load[at] = load[at].plus(memory, problem.nodes[at].pages / pages);
            load[at].vcpus += part.vcpus * cpu_shares[&node];
            moved_pages += (part_pages[&node] - part.pages.get(&node).copied().unwrap_or(0.0)).max(0.0);
        }
    }
    let cost = remote_reads + MOVE_COST * moved_pages + FIXED_MOVE_COST;
    let nodes = chosen.iter().map(|&at| problem.nodes[at].id).collect();
    Column { pattern: Pattern::Spread(nodes), remote_reads, moved_pages, cost, load }
}
