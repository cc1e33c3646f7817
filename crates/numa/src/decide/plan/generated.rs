//! Hosts with many machines, for tests and benchmarks of plans.

use super::{NodeCapacity, PlacementProblem, PlannedPart, PlannedVm};
use crate::decide::pricing::{HostCapacity, OperatorPrices, Prices};
use pagefold_base::splitmix::splitmix64;
use std::collections::BTreeMap;

/// A host without machines and prices. Each node has these virtual CPUs and pages.
pub(super) fn host(nodes: u32, vcpus: f64, pages: f64) -> PlacementProblem {
    PlacementProblem {
        nodes: (0..nodes).map(|id| NodeCapacity { id, vcpus, pages, hugetlb_pages: 0.0 }).collect(),
        ..PlacementProblem::default()
    }
}

/// A part whose pages and CPU time are on these nodes in equal shares.
pub(super) fn part(vcpus: f64, pages: f64, memory_nodes: &[u32], cpu_nodes: &[u32]) -> PlannedPart {
    let spread = |total: f64, nodes: &[u32]| nodes.iter().map(|&node| (node, total / nodes.len() as f64)).collect();
    PlannedPart {
        vcpus,
        cpu_shares: spread(1.0, cpu_nodes),
        pages: spread(pages, memory_nodes),
        hotness: 1.0,
        ..PlannedPart::default()
    }
}

pub(super) fn vm(name: &str, parts: Vec<PlannedPart>) -> PlannedVm {
    PlannedVm { name: name.to_owned(), parts, ..PlannedVm::default() }
}

/// Machines of the sizes in published measurements of over-commit, scattered over four nodes with 80 threads.
pub fn published_host(count: u32, vcpus: f64) -> PlacementProblem {
    let mut problem = host(4, 20.0, 1.6e7);
    let parts = if vcpus > 20.0 { 4 } else { 1 };
    let pages = 5e7 / f64::from(count * parts);
    let split = |_| part(vcpus / f64::from(parts), pages, &[0, 1, 2, 3], &[0, 1, 2, 3]);
    problem.vms = (0..count).map(|i| vm(&format!("vm{i}"), (0..parts).map(split).collect())).collect();
    problem
}

/// The published sizes: machines, and virtual CPUs of each.
pub const PUBLISHED_SIZES: [(u32, f64); 4] = [(16, 5.0), (8, 10.0), (4, 20.0), (1, 80.0)];

/// Small and large hosts in turns, 50 of each: with 3 to 59 machines.
pub fn generated_hosts() -> impl Iterator<Item = PlacementProblem> {
    (0..50).flat_map(|seed| [1.0, 3.0].map(|node_scale| generated_host(1000 * seed, node_scale)))
}

/// A host with machines of random sizes that fill most of it, scattered over its nodes. Its nodes have 8 to 32 CPUs and
/// 61 GiB, times `node_scale`.
pub fn generated_host(seed: u64, node_scale: f64) -> PlacementProblem {
    let mut state = seed;
    let mut below = |limit: u64| {
        state += 1;
        splitmix64(state.wrapping_mul(0x9e37_79b9)) % limit
    };
    let node_count = 2 + below(7) as u32;
    let node_pages = 1.6e7 * node_scale;
    let mut problem = host(node_count, (8.0 + 8.0 * below(4) as f64) * node_scale, node_pages);
    for from in 0..node_count {
        for to in 0..node_count {
            // Nodes of one socket are nearer.
            let distance = if from == to {
                10
            } else if from / 2 == to / 2 {
                12
            } else {
                20 + 5 * (from % 2).abs_diff(to % 2)
            };
            problem.distances.insert((from, to), distance);
        }
    }
    let vcpus: f64 = problem.nodes.iter().map(|node| node.vcpus).sum();
    let (mut free_vcpus, mut free_pages) = (vcpus * 0.9, node_pages * f64::from(node_count) * 0.85);
    for number in 0..5 + below(56) {
        let is_wide = below(6) == 0;
        let parts = if is_wide { 2 + below(u64::from(node_count).min(4) - 1) } else { 1 };
        let size = 1.0 + below(8) as f64;
        let pages = (1 + below(30)) as f64 * 2e5;
        if size * parts as f64 > free_vcpus || pages * parts as f64 > free_pages {
            continue;
        }
        free_vcpus -= size * parts as f64;
        free_pages -= pages * parts as f64;
        let mut spread = |total: f64, nodes: u64| -> BTreeMap<u32, f64> {
            (0..nodes).fold(BTreeMap::new(), |mut shares, _| {
                *shares.entry(below(u64::from(node_count)) as u32).or_default() += total / nodes as f64;
                shares
            })
        };
        let parts = (0..parts)
            .map(|_| PlannedPart {
                vcpus: size,
                cpu_shares: spread(1.0, 2),
                pages: spread(pages, 3),
                hotness: 0.1 + 0.1 * (number % 10) as f64,
                ..PlannedPart::default()
            })
            .collect();
        problem.vms.push(vm(&format!("vm{number}"), parts));
    }
    problem
}

/// The problem at default prices, if the hottest machine keeps a CPU busy with 780 MiB.
pub fn at_default_prices(problem: PlacementProblem) -> PlacementProblem {
    let capacity = HostCapacity {
        cpus: problem.nodes.iter().map(|node| node.vcpus).sum(),
        memory_bytes: problem.nodes.iter().map(|node| node.pages).sum::<f64>() * 4096.0,
        page_bytes: 4096.0,
        hottest_cpus_per_page: 1.0 / 2e5,
    };
    PlacementProblem { prices: Prices::new(&OperatorPrices::default(), capacity), ..problem }
}
