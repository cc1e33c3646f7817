use super::baselines::Baseline;
use super::generated::{PUBLISHED_SIZES, at_default_prices, generated_host, generated_hosts, part, published_host, vm};
use super::*;
use proptest::prelude::*;

/// The least gain of a move, and the price of a moved page, if a page with hotness 1 at twice the local distance costs 1.
const FIXED_MOVE_COST: f64 = 4096.0;
const MOVE_COST: f64 = 0.02;

const PRICES: Prices = Prices {
    remote_page: 1.0,
    moved_page: MOVE_COST,
    min_gain: FIXED_MOVE_COST,
    first_min_gain: FIXED_MOVE_COST,
    saved_page: 0.5,
    split_page: 0.25,
    merged_page: 0.001,
    crowded_vcpu: 0.0,
};

fn host(nodes: u32, vcpus: f64, pages: f64) -> PlacementProblem {
    PlacementProblem { prices: PRICES, ..generated::host(nodes, vcpus, pages) }
}

/// The part with its memory bound to nodes.
fn bound(part: PlannedPart, nodes: &[u32]) -> PlannedPart {
    PlannedPart { bound_nodes: Some(nodes.iter().copied().collect()), ..part }
}

fn at_test_prices(problem: PlacementProblem) -> PlacementProblem {
    PlacementProblem { prices: PRICES, ..problem }
}

fn plan_quickly(problem: &PlacementProblem) -> PlacementPlan {
    plan(problem, &mut || false)
}

/// A plan whose search is due after so many questions whether it is. Returns also how often it asked in all.
fn plan_in_steps(problem: &PlacementProblem, max_steps: u64) -> (PlacementPlan, u64) {
    let mut steps = 0;
    let plan = plan(problem, &mut || {
        steps += 1;
        steps > max_steps
    });
    (plan, steps)
}

/// The host after a plan was carried out.
fn carry_out(problem: &PlacementProblem, plan: &PlacementPlan) -> PlacementProblem {
    let mut after = problem.clone();
    for (vm, planned) in after.vms.iter_mut().zip(&plan.moves) {
        vm.is_placed |= planned.pattern != Pattern::Leave;
        for (position, part) in vm.parts.iter_mut().enumerate() {
            let pages = part.total_pages();
            match &planned.pattern {
                Pattern::Leave => {}
                Pattern::Nodes(nodes) => {
                    part.pages = [(nodes[position], pages)].into();
                    part.cpu_shares = [(nodes[position], 1.0)].into();
                }
                Pattern::Spread(nodes) => {
                    let chosen: Vec<&NodeCapacity> =
                        problem.nodes.iter().filter(|node| nodes.contains(&node.id)).collect();
                    let total = |axis: fn(&NodeCapacity) -> f64| chosen.iter().map(|node| axis(node)).sum::<f64>();
                    let (all_vcpus, all_pages) = (total(|node| node.vcpus), total(|node| node.pages));
                    part.cpu_shares = chosen.iter().map(|node| (node.id, node.vcpus / all_vcpus)).collect();
                    part.pages = chosen.iter().map(|node| (node.id, pages * node.pages / all_pages)).collect();
                }
            }
        }
    }
    after
}

#[test]
fn nodes_with_more_virtual_cpus_than_cpus_are_crowded() {
    let mut problem = host(2, 8.0, 1e6);
    // Half of the time of its four virtual CPUs each, and a machine of eight.
    problem.vms =
        vec![vm("spread", vec![part(4.0, 1e5, &[0, 1], &[0, 1])]), vm("large", vec![part(8.0, 1e5, &[0], &[0])])];
    // Machines, each on a node.
    let crowded = |placed: &[(usize, u32)], other_vcpus: f64| {
        let mut problem = problem.clone();
        // A machine of which only the virtual CPUs are known.
        problem.vms.push(PlannedVm { fixed: true, ..vm("other", vec![part(other_vcpus, 0.0, &[1], &[1])]) });
        let parts: Vec<_> = placed.iter().map(|&(vm, node)| (vm, vec![vec![(node, 1.0)]])).collect();
        let parts = parts.iter().map(|(vm, parts)| (*vm, &parts[..])).collect();
        let crowded = crowded_nodes(&problem, &parts);
        crowded.iter().map(|node| (node.node, node.vcpus, node.vcpu_capacity)).collect::<Vec<_>>()
    };
    assert_eq!(crowded(&[(1, 1)], 0.0), [(1, 10.0, 8.0)]);
    assert_eq!(crowded(&[(0, 0)], 0.0), [(0, 12.0, 8.0)]);
    assert_eq!(crowded(&[(0, 0), (1, 1)], 0.0), []);
    // With those of a machine that stays.
    assert_eq!(crowded(&[(0, 0), (1, 1)], 2.0), [(1, 10.0, 8.0)]);
    // Node 0 has too many already, and nothing comes to it.
    assert_eq!(crowded(&[(0, 1)], 0.0), []);
}

#[test]
fn machine_that_was_placed_moves_for_a_larger_gain_only() {
    let prices = Prices { min_gain: 2e5, first_min_gain: 2e4, ..PRICES };
    let is_moved = |remote_pages: f64, is_placed: bool| {
        let mut problem = PlacementProblem { prices, ..host(2, 8.0, 1e6) };
        let memory = PlannedPart { pages: [(0, 1e5), (1, remote_pages)].into(), ..part(4.0, 0.0, &[], &[0]) };
        problem.vms = vec![PlannedVm { is_placed, ..vm("machine", vec![memory]) }];
        !plan_quickly(&problem).is_empty()
    };
    // A remote page costs 1, and its move 0.02.
    assert_eq!([1e4, 1e5, 3e5].map(|remote| is_moved(remote, false)), [false, true, true]);
    assert_eq!([1e4, 1e5, 3e5].map(|remote| is_moved(remote, true)), [false, false, true]);
}

#[test]
fn local_machine_is_bound_to_its_node() {
    let binds = |part: PlannedPart, other_vcpus: f64| {
        let mut problem = host(2, 8.0, 1e6);
        let busy = PlannedVm { fixed: true, ..vm("other", vec![self::part(other_vcpus, 0.0, &[1], &[1])]) };
        problem.vms = vec![vm("local", vec![part]), busy];
        let plan = plan_quickly(&problem);
        assert!(plan.is_empty() && plan.moves[1].binds_to.is_none(), "{plan:?}");
        plan.moves[0].binds_to.clone()
    };
    let local = || PlannedPart { roaming_nodes: (0..2).collect(), ..part(4.0, 1e5, &[1], &[1]) };
    let with_memory = |pages: [(u32, f64); 2]| PlannedPart { pages: pages.into(), ..local() };
    assert_eq!(binds(local(), 4.0), Some(vec![1]));
    let roaming_elsewhere = PlannedPart { roaming_nodes: [0].into_iter().collect(), ..local() };
    assert_eq!(binds(roaming_elsewhere, 4.0), None, "its threads on this node are bound already");
    assert_eq!(binds(with_memory([(0, 1e3), (1, 99e3)]), 4.0), Some(vec![1]));
    assert_eq!(binds(with_memory([(0, 3e3), (1, 97e3)]), 4.0), None, "3 % are remote");
    let restricted = PlannedPart { cpu_nodes: Some([0].into_iter().collect()), ..local() };
    assert_eq!(binds(restricted, 4.0), None, "its owner does not permit the node");
    // Bound there, it could not leave a node with too many virtual CPUs. Node 0 is full, too.
    let mut problem = host(2, 8.0, 1e6);
    let busy = |node: u32| PlannedVm { fixed: true, ..vm("other", vec![part(8.0, 0.0, &[node], &[node])]) };
    problem.vms = vec![vm("local", vec![local()]), busy(0), busy(1)];
    assert_eq!(plan_quickly(&problem).moves[0].binds_to, None);
}

#[test]
fn virtual_cpus_of_machines_that_stay_take_room() {
    // Eight CPUs on each of two nodes. The machine is local on node 0.
    let pattern = |others: [f64; 2], is_local: bool| {
        let mut problem = host(2, 8.0, 1e6);
        let other = |(node, vcpus): (usize, f64)| PlannedVm {
            fixed: true,
            ..vm("other", vec![part(vcpus, 0.0, &[node as u32], &[node as u32])])
        };
        let nodes: &[u32] = if is_local { &[0] } else { &[0, 1] };
        problem.vms = vec![vm("planned", vec![part(4.0, 1e5, nodes, nodes)])];
        problem.vms.extend(others.into_iter().enumerate().map(other));
        plan_quickly(&problem).moves[0].pattern.clone()
    };
    assert_eq!(pattern([4.0, 0.0], true), Pattern::Leave);
    assert_eq!(pattern([6.0, 4.0], true), Pattern::Nodes(vec![1]), "node 0 would run 10 of 8");
    assert_eq!(pattern([8.0, 3.0], false), Pattern::Nodes(vec![1]));
    assert_eq!(pattern([3.0, 8.0], false), Pattern::Nodes(vec![0]));
    // On a full host no node is better, and memory decides.
    assert_eq!(pattern([12.0, 12.0], true), Pattern::Leave);
    assert!(matches!(pattern([12.0, 12.0], false), Pattern::Nodes(_)));
    assert_eq!(pattern([6.0, 6.0], true), Pattern::Spread(vec![0, 1]), "no node has room for more than two");
}

#[test]
fn scattered_small_machines_get_a_node_each() {
    let mut problem = host(2, 8.0, 1e6);
    problem.vms = (0..4).map(|i| vm(&format!("vm{i}"), vec![part(4.0, 4e5, &[0, 1], &[0, 1])])).collect();
    let plan = plan_quickly(&problem);
    let on = |node: u32| plan.moves.iter().filter(|planned| planned.pattern == Pattern::Nodes(vec![node])).count();
    assert_eq!((on(0), on(1)), (2, 2), "{plan:?}");
    assert_eq!((plan.remote_reads, plan.overload, plan.gap), ((8e5, 0.0), Load::default(), 0.0));
    assert!(plan.moves.iter().all(|planned| planned.reason == PlanReason::OneNode && planned.moved_pages == 2e5));
    let again = plan_quickly(&carry_out(&problem, &plan));
    assert!(again.is_empty() && again.moves.iter().all(|planned| planned.reason == PlanReason::AlreadyLocal));
}

#[test]
fn wide_machine_is_split_by_its_virtual_nodes() {
    let mut problem = host(2, 8.0, 1e6);
    // The memory of both virtual nodes was allocated on node 0.
    problem.vms = vec![vm("wide", vec![part(8.0, 4e5, &[0], &[0]), part(8.0, 4e5, &[0], &[1])])];
    let plan = plan_quickly(&problem);
    assert_eq!(plan.moves[0].pattern, Pattern::Nodes(vec![0, 1]));
    assert_eq!((plan.moves[0].reason, plan.moves[0].moved_pages), (PlanReason::NodePerPart, 4e5));
}

#[test]
fn remote_pages_count_without_hotness_and_distance() {
    let mut problem = host(2, 8.0, 1e6);
    problem.distances.extend([((0, 1), 40), ((1, 0), 40)]);
    // Half of its memory is on the other node, and a quarter of the run time of the second one is there.
    let cold = PlannedPart { hotness: 0.1, ..part(2.0, 1e5, &[0, 1], &[0]) };
    let shared = PlannedPart { cpu_shares: [(0, 0.75), (1, 0.25)].into(), ..part(2.0, 1e5, &[0], &[0]) };
    problem.vms = vec![vm("cold", vec![cold]), vm("shared", vec![shared])];
    let nothing = baselines::place(&problem, Baseline::Nothing);
    assert_eq!(nothing.remote_pages, 5e4 + 2.5e4);
    assert_eq!(nothing.remote_reads, 3.0 * (0.1 * 5e4 + 2.5e4));
    assert_eq!(plan_quickly(&problem).remote_pages, 0.0);
}

#[test]
fn machine_that_fits_on_no_node_is_spread_over_near_nodes() {
    let mut problem = host(4, 8.0, 1e6);
    for (from, to) in [(0, 2), (0, 3), (1, 2), (1, 3)] {
        problem.distances.extend([((from, to), 30), ((to, from), 30)]);
    }
    problem.vms = vec![vm("large", vec![part(12.0, 1.5e6, &[0, 3], &[0, 3])])];
    let plan = plan_quickly(&problem);
    assert!(
        matches!(&plan.moves[0].pattern, Pattern::Spread(nodes) if [[0, 1], [2, 3]].iter().any(|near| nodes == near)),
        "{plan:?}"
    );
    assert_eq!(plan.moves[0].reason, PlanReason::NoSingleNode);
}

#[test]
fn hot_machine_gets_the_node_and_the_cold_one_stays() {
    let mut problem = host(2, 8.0, 1e5);
    // The memory of both is on node 0, and only one of them can run there.
    problem.nodes[0] = NodeCapacity { id: 0, vcpus: 4.0, pages: 1.3e6, hugetlb_pages: 0.0 };
    let mut cold = vm("cold", vec![part(4.0, 6e5, &[0], &[1])]);
    cold.parts[0].hotness = 0.5;
    problem.vms = vec![cold, vm("hot", vec![part(4.0, 6e5, &[0], &[1])])];
    let plan = plan_quickly(&problem);
    assert_eq!((&plan.moves[0].pattern, plan.moves[0].reason), (&Pattern::Leave, PlanReason::NodesFull));
    assert_eq!(plan.moves[1].pattern, Pattern::Nodes(vec![0]));
    assert_eq!((plan.remote_reads, plan.overload), ((9e5, 3e5), Load::default()));
    // The cold one would gain as well by that node, which has no room for both.
    let gain = |planned: &PlannedMove| planned.gain.net();
    let next = plan.moves[0].next_best.as_ref().expect("it is not fixed");
    assert_eq!((&next.pattern, next.excess.vcpus), (&Pattern::Nodes(vec![0]), 4.0), "{next:?}");
    assert!(next.gain.net() > 0.0 && next.gain.net() < gain(&plan.moves[1]), "{plan:?}");
    let next = plan.moves[1].next_best.as_ref().expect("it is not fixed");
    assert_eq!((&next.pattern, next.excess), (&Pattern::Spread(vec![0, 1]), Load::default()), "{next:?}");
    assert!(next.gain.net() < gain(&plan.moves[1]), "{plan:?}");
}

#[test]
fn fixed_and_bound_machines_are_respected() {
    let mut problem = host(2, 8.0, 1e6);
    let remote = || vec![part(2.0, 1e5, &[0], &[1])];
    problem.vms = vec![
        PlannedVm { fixed: true, ..vm("pinned", remote()) },
        PlannedVm { allowed_nodes: Some([1].into_iter().collect()), ..vm("bound", remote()) },
    ];
    let plan = plan_quickly(&problem);
    assert_eq!((&plan.moves[0].pattern, plan.moves[0].reason), (&Pattern::Leave, PlanReason::Fixed));
    assert_eq!(plan.moves[1].pattern, Pattern::Nodes(vec![1]));
    assert_eq!(plan.moves[0].next_best, None);
}

#[test]
fn next_best_placement_of_a_local_machine_is_not_its_own_place() {
    let mut problem = host(2, 8.0, 1e6);
    problem.vms = vec![vm("local", vec![part(2.0, 1e5, &[1], &[1])])];
    let plan = plan_quickly(&problem);
    let next = plan.moves[0].next_best.as_ref().expect("it is not fixed");
    assert_eq!((&next.pattern, next.excess), (&Pattern::Nodes(vec![0]), Load::default()));
    assert!(next.gain.net() < 0.0, "its memory is moved for nothing: {next:?}");
}

#[test]
fn memory_stays_within_the_nodes_of_its_policy() {
    let mut problem = host(2, 8.0, 1e6);
    let remote = |nodes: &[u32]| bound(part(2.0, 1e5, &[0], &[1]), nodes);
    problem.vms = vec![
        vm("follows its CPUs", vec![remote(&[0, 1])]),
        vm("its CPUs follow", vec![remote(&[0])]),
        vm("bound to another node", vec![remote(&[1]), remote(&[0])]),
        vm("contradiction", vec![remote(&[])]),
        PlannedVm { allowed_nodes: Some([1].into_iter().collect()), ..vm("cpuset", vec![remote(&[0])]) },
    ];
    let plan = plan_quickly(&problem);
    let nodes = |nodes: &[u32]| Pattern::Nodes(nodes.to_vec());
    assert!(plan.moves[0].pattern != Pattern::Leave, "{plan:?}");
    assert_eq!(plan.moves[1].pattern, nodes(&[0]));
    assert_eq!(plan.moves[2].pattern, nodes(&[1, 0]));
    for stays in &plan.moves[3..] {
        assert_eq!((&stays.pattern, stays.reason), (&Pattern::Leave, PlanReason::NoPermittedNode));
    }
}

#[test]
fn little_remote_memory_is_not_worth_moving() {
    let mut problem = host(2, 8.0, 1e6);
    problem.vms = vec![vm("almost local", vec![part(2.0, 1000.0, &[0], &[1])])];
    let plan = plan_quickly(&problem);
    assert!(plan.is_empty() && plan.moves[0].reason == PlanReason::NotWorthMoving);
}

/// A machine on a node with pages that equal some on other nodes.
fn vm_with_equal_pages(pages: f64, node: u32, equal_pages: &[(u32, f64)]) -> PlannedVm {
    let equal_pages = equal_pages.iter().copied().collect();
    vm("equal", vec![PlannedPart { equal_pages, huge_share: 1.0, ..part(2.0, pages, &[node], &[node]) }])
}

#[test]
fn equal_pages_draw_a_machine_within_nodes_if_they_are_worth_it() {
    let mut problem = PlacementProblem { merges_within_nodes: true, ..host(2, 8.0, 1e6) };
    problem.vms = vec![vm_with_equal_pages(2e5, 0, &[(1, 1e5)])];
    let plan = plan_quickly(&problem);
    assert_eq!((&plan.moves[0].pattern, plan.moves[0].reason), (&Pattern::Nodes(vec![1]), PlanReason::NearEqualPages));
    assert_eq!(plan.moves[0].saved_pages, (0.0, 1e5));
    // 1e5 pages at 0.5; 2e5 moved at 0.02; 1e5 merged at 0.001; 188 of 331 MiB in huge pages of 512 pages at 0.25.
    let gain = plan.gain;
    assert_eq!((gain.memory, gain.remote_reads), (5e4, 0.0));
    assert!((gain.cpu + 4100.0).abs() < 1e-6, "{gain:?}");
    assert!((gain.huge_pages + 0.25 * 1e5 * 188.0 * 512.0 / (331.0 * 256.0)).abs() < 1e-6, "{gain:?}");
    assert!((gain.net() - (gain.memory + gain.cpu + gain.huge_pages)).abs() < 1e-6);
    assert!(plan_quickly(&carry_out(&problem, &plan)).is_empty());

    // Merged pages that stay on node 0 would be read remotely.
    problem.vms[0].parts[0].kept_pages = [(0, 5e4)].into();
    let plan = plan_quickly(&problem);
    assert_eq!((plan.is_empty(), plan.moves[0].reason), (true, PlanReason::AlreadyLocal));
    problem.vms[0].parts[0].kept_pages.clear();
    problem.prices.saved_page = 0.3;
    assert!(plan_quickly(&problem).is_empty(), "memory is cheap");
}

#[test]
fn pages_that_merge_across_nodes_are_read_where_the_equal_ones_are() {
    let mut problem = host(2, 8.0, 1e6);
    problem.vms = vec![vm_with_equal_pages(1e5, 0, &[(1, 8e4)])];
    let plan = plan_quickly(&problem);
    assert_eq!(plan.moves[0].pattern, Pattern::Nodes(vec![1]));
    // They save the same memory on any node.
    assert_eq!((plan.remote_reads, plan.moves[0].saved_pages), ((8e4, 0.0), (8e4, 8e4)));
    assert_eq!((plan.gain.memory, plan.gain.remote_reads, plan.gain.huge_pages), (0.0, 8e4, 0.0));
    problem.vms[0].parts[0].hotness = 0.05;
    assert_eq!(plan_quickly(&problem).moves[0].reason, PlanReason::NotWorthMoving, "a cold machine");
}

#[test]
fn gain_of_a_requested_placement_is_that_of_the_plan() {
    let mut problem = PlacementProblem { merges_within_nodes: true, ..host(2, 8.0, 1e6) };
    problem.vms = vec![vm_with_equal_pages(2e5, 0, &[(1, 1e5)])];
    let plan = plan_quickly(&problem);
    assert_eq!(gain_of_placement(&problem, 0, &[vec![(1, 1.0)]]), plan.gain);
    assert_eq!(gain_of_placement(&problem, 0, &[vec![(0, 1.0)]]).net(), 0.0);
}

/// A machine whose memory is hugetlb pages on a node, with its CPU time on another one.
fn hugetlb_vm(name: &str, pages: f64, memory_node: u32, cpu_node: u32) -> PlannedVm {
    let memory = part(2.0, pages, &[memory_node], &[cpu_node]);
    vm(name, vec![PlannedPart { hugetlb_pages: memory.pages.clone(), ..memory }])
}

#[test]
fn machine_with_hugetlb_pages_gets_a_node_where_they_are_free() {
    let mut problem = host(3, 8.0, 1e6);
    problem.nodes[0].hugetlb_pages = 3e5;
    problem.nodes[2].hugetlb_pages = 3e5;
    // Its node gets other CPUs only.
    problem.nodes[0].vcpus = 0.0;
    problem.vms = vec![hugetlb_vm("vm", 3e5, 0, 1)];
    let plan = plan_quickly(&problem);
    assert_eq!((&plan.moves[0].pattern, plan.overload), (&Pattern::Nodes(vec![2]), Load::default()));
    // Memory without hugetlb pages does not help.
    problem.nodes[2].hugetlb_pages = 2e5;
    let plan = plan_quickly(&problem);
    assert_eq!((&plan.moves[0].pattern, plan.overload), (&Pattern::Spread(vec![0, 2]), Load::default()));
}

#[test]
fn machines_exchange_their_hugetlb_pages() {
    let mut problem = host(2, 4.0, 1e5);
    problem.nodes.iter_mut().for_each(|node| node.hugetlb_pages = 3e5);
    problem.vms = vec![hugetlb_vm("a", 3e5, 0, 1), hugetlb_vm("b", 3e5, 1, 0)];
    // Node 1 has no free hugetlb pages for the machine that is bound to it, unless the other one leaves.
    problem.vms[0].allowed_nodes = Some("1".parse().unwrap());
    let plan = plan_quickly(&problem);
    let patterns: Vec<&Pattern> = plan.moves.iter().map(|planned| &planned.pattern).collect();
    assert_eq!(patterns, [&Pattern::Nodes(vec![1]), &Pattern::Nodes(vec![0])]);
    assert_eq!(plan.overload, Load::default());
}

#[test]
fn host_without_machines_or_nodes_has_an_empty_plan() {
    assert!(plan_quickly(&host(2, 8.0, 1e6)).is_empty());
    let mut problem = host(0, 0.0, 0.0);
    problem.vms = vec![vm("homeless", vec![part(1.0, 10.0, &[], &[])])];
    assert!(plan_quickly(&problem).is_empty());
}

#[test]
fn wide_and_many_machines_are_planned_within_two_percent() {
    for (count, vcpus) in PUBLISHED_SIZES {
        let plan = plan_quickly(&at_test_prices(published_host(count, vcpus)));
        assert!(plan.gap <= 0.02, "{count} x {vcpus}: {:?}", plan.gap);
        assert_eq!((plan.remote_reads.1, plan.overload), (0.0, Load::default()), "{count} x {vcpus}");
    }
}

#[test]
fn baselines_are_placed_by_their_rules() {
    let mut problem = host(2, 8.0, 1e6);
    let small = |name: &str| vm(name, vec![part(2.0, 4e5, &[1], &[0])]);
    problem.vms = vec![small("a"), small("b"), small("c"), PlannedVm { fixed: true, ..small("pinned") }];
    let [nothing, interleave, first_fit, _] = Baseline::ALL.map(|baseline| baselines::place(&problem, baseline));
    assert_eq!((nothing.remote_reads, nothing.moved_pages), (16e5, 0.0));
    // Half of all accesses of the three machines, and all of the pinned one.
    assert_eq!((interleave.remote_reads, interleave.moved_pages), (6e5 + 4e5, 6e5));
    // The memory of two machines fills node 0. The third fits on node 1, beside the memory of the pinned one.
    assert_eq!((first_fit.remote_reads, first_fit.moved_pages), (4e5, 8e5));
    let plan = plan_quickly(&problem);
    assert_eq!((plan.remote_reads.1, plan.overload), (4e5, Load::default()), "{plan:?}");
}

#[test]
fn numad_binds_large_processes_first_and_ignores_virtual_nodes() {
    let mut problem = host(2, 8.0, 1e6);
    problem.vms = vec![
        // The memory of both virtual nodes is crossed, and numad sees a process that is on both nodes.
        vm("wide", vec![part(4.0, 3e5, &[1], &[0]), part(4.0, 3e5, &[0], &[1])]),
        vm("small", vec![part(2.0, 1e5, &[0], &[1])]),
        PlannedVm { fixed: true, ..vm("pinned", vec![part(1.0, 1e5, &[0], &[1])]) },
    ];
    let placed = numad::place(&problem);
    assert!(matches!(&placed[0].pattern, Pattern::Spread(nodes) if nodes.len() == 1), "it fits on a node: {placed:?}");
    assert_eq!(placed[2].pattern, Pattern::Leave);
    assert_eq!((placed[0].amounts.remote_reads, placed[0].amounts.moved_pages), (0.0, 3e5));
    // A machine that no node holds is spread, and each virtual node reads half of its memory remotely.
    problem.vms = vec![vm("wide", vec![part(8.0, 6e5, &[0], &[0]), part(8.0, 6e5, &[1], &[1])])];
    let placed = numad::place(&problem);
    assert_eq!(placed[0].pattern, Pattern::Spread(vec![0, 1]), "{placed:?}");
    assert_eq!((placed[0].amounts.remote_reads, placed[0].amounts.moved_pages), (6e5, 0.0));
    assert!(plan_quickly(&problem).is_empty(), "it was placed well");
}

/// The lowest cost of all choices of columns.
fn brute_force_cost(problem: &PlacementProblem) -> f64 {
    let columns: Vec<Vec<Column>> = problem.vms.iter().map(|vm| columns::columns(problem, vm)).collect();
    let costs = LoadCosts::new(problem);
    let mut best = f64::INFINITY;
    let mut chosen = vec![0; columns.len()];
    loop {
        best = best.min(total_cost(problem, &columns, costs, &chosen));
        let Some(next) = (0..chosen.len()).find(|&vm| chosen[vm] + 1 < columns[vm].len()) else { return best };
        chosen[..next].fill(0);
        chosen[next] += 1;
    }
}

fn cost_of_plan(problem: &PlacementProblem, plan: &PlacementPlan) -> f64 {
    let columns: Vec<Vec<Column>> = problem.vms.iter().map(|vm| columns::columns(problem, vm)).collect();
    let position = |(columns, planned): (&Vec<Column>, &PlannedMove)| {
        columns.iter().position(|column| column.pattern == planned.pattern).unwrap()
    };
    let chosen: Vec<usize> = columns.iter().zip(&plan.moves).map(position).collect();
    total_cost(problem, &columns, LoadCosts::new(problem), &chosen)
}

fn small_machine() -> impl Strategy<Value = PlannedVm> {
    let part = (1u8..5, 1u32..9, 0u32..3, 0u32..3, 1u8..5, 0u8..3).prop_map(
        |(vcpus, pages, memory, cpu, hotness, hugetlb)| {
            let part = part(f64::from(vcpus), f64::from(pages) * 1e5, &[memory], &[cpu]);
            let hugetlb_pages =
                part.pages.iter().map(|(&node, pages)| (node, pages * f64::from(hugetlb) / 2.0)).collect();
            PlannedPart { hotness: f64::from(hotness) / 4.0, hugetlb_pages, ..part }
        },
    );
    (prop::collection::vec(part, 1..3), prop::bool::weighted(0.1))
        .prop_map(|(parts, fixed)| PlannedVm { fixed, ..vm("vm", parts) })
}

fn small_hosts() -> impl Strategy<Value = PlacementProblem> {
    prop::collection::vec(small_machine(), 0..4).prop_map(|vms| {
        let mut problem = PlacementProblem { vms, ..host(3, 8.0, 1.2e6) };
        for node in &mut problem.nodes {
            // A quarter of a million are free.
            let used = problem.vms.iter().flat_map(|vm| &vm.parts).filter_map(|part| part.hugetlb_pages.get(&node.id));
            node.hugetlb_pages = 2.5e5 + used.sum::<f64>();
        }
        problem
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn plans_of_small_hosts_are_optimal(problem in small_hosts()) {
        let plan = plan_quickly(&problem);
        let (cost, optimum) = (cost_of_plan(&problem, &plan), brute_force_cost(&problem));
        prop_assert!(cost <= optimum + 1.01, "{cost} > {optimum}: {plan:?}");
        prop_assert!(plan.gap <= 0.02);
    }

    #[test]
    fn plans_of_equal_machines_are_optimal(problem in small_hosts(), copies in 2usize..4) {
        let first = problem.vms.first().cloned();
        let vms = first.into_iter().flat_map(|vm| vec![vm; copies]).chain(problem.vms.get(1).cloned()).collect();
        let problem = PlacementProblem { vms, ..problem };
        let plan = plan_quickly(&problem);
        prop_assert!(cost_of_plan(&problem, &plan) <= brute_force_cost(&problem) + 1.01, "{plan:?}");
    }

    #[test]
    fn gap_of_a_search_that_ends_early_is_a_bound(problem in small_hosts(), max_steps in 0u64..40) {
        let (plan, _) = plan_in_steps(&problem, max_steps);
        let columns: Vec<Vec<Column>> = problem.vms.iter().map(|vm| columns::columns(&problem, vm)).collect();
        let unavoidable = unavoidable_cost(&problem, &columns, LoadCosts::new(&problem));
        let cost = cost_of_plan(&problem, &plan);
        let bound = cost - plan.gap * (cost - unavoidable);
        prop_assert!(bound <= brute_force_cost(&problem) + 1.01, "{bound}: {plan:?}");
    }

    #[test]
    fn parts_come_only_to_nodes_of_their_bindings(
        problem in small_hosts(),
        bindings in prop::collection::vec(prop::option::of(prop::collection::btree_set(0u32..3, 0..3)), 8),
    ) {
        let mut problem = problem;
        let parts = problem.vms.iter_mut().flat_map(|vm| &mut vm.parts);
        parts.zip(bindings).for_each(|(part, nodes)| part.bound_nodes = nodes.map(|nodes| nodes.into_iter().collect()));
        let plan = plan_quickly(&problem);
        for (vm, planned) in problem.vms.iter().zip(&plan.moves) {
            for (position, part) in vm.parts.iter().enumerate() {
                let nodes = match &planned.pattern {
                    Pattern::Leave => Vec::new(),
                    Pattern::Nodes(nodes) => vec![nodes[position]],
                    Pattern::Spread(nodes) => nodes.clone(),
                };
                prop_assert!(nodes.iter().all(|&node| vm.permits(part, node)), "{vm:?} {planned:?}");
            }
        }
    }

    #[test]
    fn plan_needs_no_more_hugetlb_pages_than_there_are(mut problem in small_hosts(), is_overloaded: bool) {
        if is_overloaded {
            problem.nodes.iter_mut().for_each(|node| node.vcpus = 2.0);
        }
        let plan = plan_quickly(&problem);
        prop_assert!(plan.overload.hugetlb_pages <= 1e-6, "{plan:?}");
    }

    #[test]
    fn plan_costs_no_more_than_leaving_everything(problem in small_hosts()) {
        let plan = plan_quickly(&problem);
        let columns: Vec<Vec<Column>> = problem.vms.iter().map(|vm| columns::columns(&problem, vm)).collect();
        let leave = total_cost(&problem, &columns, LoadCosts::new(&problem), &vec![0; problem.vms.len()]);
        prop_assert!(cost_of_plan(&problem, &plan) <= leave + 1e-6);
    }

    #[test]
    fn plan_is_no_worse_than_baselines_without_overload(problem in small_hosts()) {
        let plan = plan_quickly(&problem);
        for baseline in [Baseline::Interleave, Baseline::FirstFit, Baseline::Numad] {
            let result = baselines::place(&problem, baseline);
            if result.overload == Load::default() {
                // The plan counts the cost of moving, too.
                let moving = problem.vms.len() as f64 * FIXED_MOVE_COST + MOVE_COST * result.moved_pages;
                prop_assert!(plan.remote_reads.1 <= result.remote_reads + moving + 1.0, "{baseline:?}: {plan:?}");
            }
        }
    }

    /// Of two optimal plans, the one for the higher price of memory saves no less.
    #[test]
    fn higher_price_of_memory_saves_no_less(
        problem in small_hosts(),
        equal_pages in prop::collection::vec(prop::collection::btree_map(0u32..3, 0.0f64..1.0, 0..3), 8),
        prices in (0.0f64..0.5, 0.1f64..0.5),
    ) {
        let mut problem = PlacementProblem { merges_within_nodes: true, ..problem };
        for (part, shares) in problem.vms.iter_mut().flat_map(|vm| &mut vm.parts).zip(equal_pages) {
            let pages = part.total_pages();
            part.equal_pages = shares.into_iter().map(|(node, share)| (node, share * pages)).collect();
        }
        let saved = |price: f64| {
            let prices = Prices { saved_page: price, ..PRICES };
            let plan = plan_quickly(&PlacementProblem { prices, ..problem.clone() });
            plan.moves.iter().map(|planned| planned.saved_pages.1).sum::<f64>()
        };
        let (low, step) = prices;
        // Each plan may cost a page more than the optimum.
        let tolerance = 2.02 * PRICES.remote_page / step;
        prop_assert!(saved(low + step) >= saved(low) - tolerance);
    }

    #[test]
    fn plan_of_a_planned_host_moves_no_more(problem in small_hosts()) {
        let first = plan_quickly(&problem);
        let after = carry_out(&problem, &first);
        let second = plan_quickly(&after);
        prop_assert!(second.remote_reads.1 <= first.remote_reads.1 + 1.0 || second.overload < first.overload, "{first:?} {second:?}");
    }
}

/// Steps of the search within which all generated hosts are proven.
const MAX_STEPS_OF_GENERATED_HOSTS: u64 = 500_000;

#[test]
fn plans_of_generated_hosts_are_optimal() {
    let mut machine_counts = Vec::new();
    for problem in &generated_hosts().map(at_test_prices).collect::<Vec<_>>() {
        machine_counts.push(problem.vms.len());
        let (plan, _) = plan_in_steps(problem, MAX_STEPS_OF_GENERATED_HOSTS);
        assert_eq!(plan.gap, 0.0, "{plan:?}");
        assert!(plan.remote_reads.1 <= 0.15 * plan.remote_reads.0, "{plan:?}");
        assert_eq!(plan.overload, Load::default());
        let first_fit = baselines::place(problem, Baseline::FirstFit);
        let fits = first_fit.overload == Load::default();
        assert!(!fits || plan.remote_reads.1 <= first_fit.remote_reads + 1e5, "{plan:?}");
        let after = plan_quickly(&carry_out(problem, &plan));
        assert!(after.is_empty(), "{after:?}");
    }
    let range = machine_counts.iter().min().zip(machine_counts.iter().max());
    assert_eq!(range, Some((&3, &59)));
}

#[test]
fn plan_of_an_overloaded_host_is_optimal() {
    let mut problem = at_test_prices(generated_host(9000, 1.0));
    problem.nodes.iter_mut().for_each(|node| node.vcpus *= 0.75);
    assert!(host_excess(&problem).vcpus > 0.0);
    let (plan, _) = plan_in_steps(&problem, MAX_STEPS_OF_GENERATED_HOSTS);
    assert!(plan.gap <= 0.02, "{plan:?}");
}

#[test]
fn search_ends_when_it_is_due() {
    // Six machines fit on each node, and two must be spread.
    let all: Vec<u32> = (0..8).collect();
    let mut problem = host(8, 64.0, 6.4e7);
    problem.vms = (0..50).map(|i| vm(&format!("vm{i}"), vec![part(10.0, 3e6, &all, &all)])).collect();
    for max_steps in [0, 1, 100, 2000] {
        let (plan, steps) = plan_in_steps(&problem, max_steps);
        assert!(steps <= max_steps + 3, "{steps} steps");
        assert!(plan.gap > 0.0, "the optimum takes more steps");
    }
}

/// The generated hosts and the four published sizes. The plan reads at least 30 percent less remotely than numad's
/// heuristic, in all and on each host on which numad overloads no node. On no host does it read more than numad and what is
/// not worth moving.
#[test]
fn plans_read_less_remotely_than_numad() {
    let published = PUBLISHED_SIZES.iter().map(|&(count, vcpus)| at_test_prices(published_host(count, vcpus)));
    let (mut planned, mut by_numad) = (0.0, 0.0);
    for problem in generated_hosts().map(at_test_prices).chain(published) {
        let plan = plan_quickly(&problem);
        let numad = baselines::place(&problem, Baseline::Numad);
        planned += plan.remote_reads.1;
        by_numad += numad.remote_reads;
        let not_worth_moving = FIXED_MOVE_COST * problem.vms.len() as f64 + MOVE_COST * numad.moved_pages;
        assert!(plan.remote_reads.1 <= numad.remote_reads + not_worth_moving, "{numad:?} {plan:?}");
        if numad.remote_reads > 0.0 && numad.overload == Load::default() {
            assert!(plan.remote_reads.1 <= 0.7 * numad.remote_reads, "{numad:?} {plan:?}");
        }
        assert_eq!(plan.overload, Load::default());
    }
    assert!(planned <= 0.7 * by_numad, "{planned} {by_numad}");
}

/// Steps of the search within which plans at these prices are within two percent.
const MAX_STEPS_AT_DEFAULT_PRICES: u64 = 20_000;

#[test]
fn plans_at_default_prices_read_less_remotely_than_numad() {
    let published = PUBLISHED_SIZES.iter().map(|&(count, vcpus)| at_test_prices(published_host(count, vcpus)));
    for problem in generated_hosts().map(at_test_prices).step_by(10).chain(published).map(at_default_prices) {
        let (plan, steps) = plan_in_steps(&problem, MAX_STEPS_AT_DEFAULT_PRICES);
        let numad = baselines::place(&problem, Baseline::Numad);
        assert!(plan.gap <= 0.02, "{} after {steps} steps of {} machines", plan.gap, problem.vms.len());
        assert!(plan.remote_reads.1 <= numad.remote_reads, "{numad:?} {plan:?}");
        assert_eq!(plan.overload, Load::default());
        assert!(plan.gain.net() >= 0.0, "{plan:?}");
    }
}

#[test]
fn equal_machines_that_leave_gaps_on_nodes_are_placed_and_proven() {
    let all: Vec<u32> = (0..8).collect();
    let mut problem = host(8, 16.0, 1.6e7);
    problem.vms = (0..20).map(|i| vm(&format!("vm{i}"), vec![part(6.0, 3e6, &all, &all)])).collect();
    let (plan, _) = plan_in_steps(&at_default_prices(problem), 2000);
    assert_eq!((plan.gap, plan.overload), (0.0, Load::default()));
    // Two machines fit on each node. The others share what these leave on pairs of nodes.
    let (on_one, spread): (Vec<_>, Vec<_>) =
        plan.moves.iter().map(|planned| &planned.pattern).partition(|pattern| matches!(pattern, Pattern::Nodes(_)));
    assert_eq!((on_one.len(), spread.len()), (16, 4));
    assert!(spread.iter().all(|pattern| matches!(pattern, Pattern::Spread(nodes) if nodes.len() == 2)), "{spread:?}");
}

#[test]
fn parts_of_about_half_a_node_are_placed_and_proven() {
    // Six parts of 5 to 7 virtual CPUs and five of 4, on eight nodes of 8.
    let problem = at_default_prices(generated_host(8000, 1.0));
    let (plan, steps) = plan_in_steps(&problem, 20_000);
    assert_eq!((plan.gap, plan.overload), (0.0, Load::default()), "{steps} steps: {plan:?}");
}

#[test]
fn machine_is_spread_over_more_nodes_where_each_has_little_room() {
    // Each of the three nodes has room for four of its 10 CPUs beside the machine that is there.
    let mut problem = host(3, 16.0, 1.6e7);
    problem.vms = (0..3).map(|node| vm("fixed", vec![part(12.0, 1e6, &[node], &[node])])).collect();
    problem.vms.iter_mut().for_each(|vm| vm.fixed = true);
    problem.vms.push(vm("spread", vec![part(10.0, 3e6, &[0], &[2])]));
    let plan = plan_quickly(&at_default_prices(problem));
    assert_eq!(plan.moves[3].pattern, Pattern::Spread(vec![0, 1, 2]));
    assert_eq!(plan.overload, Load::default());
}

/// Virtual CPUs on each node after a plan.
fn planned_vcpus(problem: &PlacementProblem, plan: &PlacementPlan) -> Vec<f64> {
    let placed = carry_out(problem, plan);
    let vcpus = vcpus_on_nodes(&placed, 0..placed.vms.len(), &BTreeMap::new());
    problem.nodes.iter().map(|node| vcpus.get(&node.id).copied().unwrap_or(0.0)).collect()
}

/// Equal machines on four nodes with 20 CPUs, at default prices, with their memory and CPU time on these nodes.
fn equal_machines(count: u32, vcpus: f64, nodes: &[u32]) -> PlacementProblem {
    let mut problem = host(4, 20.0, 1.6e7);
    problem.vms = (0..count).map(|i| vm(&format!("vm{i}"), vec![part(vcpus, 3e5, nodes, nodes)])).collect();
    at_default_prices(problem)
}

#[test]
fn machines_spread_over_an_idle_host() {
    for (count, vcpus) in [(4, 5.0), (8, 5.0), (4, 12.0)] {
        let problem = equal_machines(count, vcpus, &[0, 1, 2, 3]);
        let plan = plan_quickly(&problem);
        assert_eq!(planned_vcpus(&problem, &plan), [f64::from(count) * vcpus / 4.0; 4], "{plan:?}");
        assert_eq!(plan.gap, 0.0);
    }
}

#[test]
fn machines_spread_evenly_over_an_overcommitted_host() {
    // Eight machines of 20 virtual CPUs, and 16 of 10: twice as many as there are CPUs.
    for (count, vcpus) in [(8, 20.0), (16, 10.0)] {
        let problem = equal_machines(count, vcpus, &[0, 1, 2, 3]);
        let plan = plan_quickly(&problem);
        assert_eq!(planned_vcpus(&problem, &plan), [40.0; 4], "{plan:?}");
        assert_eq!((plan.overload.vcpus, plan.gap), (80.0, 0.0));
    }
}

#[test]
fn machines_leave_a_crowded_node_for_idle_ones() {
    let problem = equal_machines(4, 5.0, &[0]);
    let plan = plan_quickly(&problem);
    assert_eq!(planned_vcpus(&problem, &plan), [5.0; 4], "{plan:?}");
    let reasons: Vec<PlanReason> = plan.moves.iter().map(|planned| planned.reason).collect();
    assert_eq!(reasons.iter().filter(|&&reason| reason == PlanReason::LessCrowded).count(), 3, "{reasons:?}");
    // Even shares are 5, and nodes may have three quarters of a machine more. A crowded one costs 36 CPU s/h.
    assert_eq!(plan.gain.crowding, 36.0 * (20.0 - 8.75), "{:?}", plan.gain);
    assert!(plan.gain.net() > 0.0, "{:?}", plan.gain);
    assert!(plan_quickly(&carry_out(&problem, &plan)).is_empty());
}

#[test]
fn remote_reads_weigh_more_than_even_shares() {
    // The memory of both stays on a node, such as merged pages.
    let mut problem = equal_machines(2, 8.0, &[0]);
    for vm in &mut problem.vms {
        vm.parts[0].kept_pages = [(0, 3e5)].into();
    }
    let plan = plan_quickly(&problem);
    assert!(plan.is_empty(), "{plan:?}");
    problem.prices.crowded_vcpu *= 10.0;
    assert!(!plan_quickly(&problem).is_empty(), "crowding alone would move one");
}

#[test]
fn virtual_cpus_come_to_pinned_memory() {
    let pinned = |memory: &[u32], cpus: &[u32]| PlannedVm {
        has_pinned_memory: true,
        ..vm("passthrough", vec![part(4.0, 1e5, memory, cpus)])
    };
    let plan_of = |vm: PlannedVm| plan_quickly(&PlacementProblem { vms: vec![vm], ..host(2, 8.0, 1e6) });
    let plan = plan_of(pinned(&[1], &[0]));
    let planned = &plan.moves[0];
    assert_eq!((&planned.pattern, planned.reason), (&Pattern::Nodes(vec![1]), PlanReason::NearPinnedMemory));
    assert_eq!((planned.moved_pages, planned.remote_reads), (0.0, (1e5, 0.0)));
    for (memory, cpus) in [(&[0, 1][..], &[0][..]), (&[1], &[1])] {
        let plan = plan_of(pinned(memory, cpus));
        assert_eq!((&plan.moves[0].pattern, plan.moves[0].reason), (&Pattern::Leave, PlanReason::Fixed), "{memory:?}");
    }
    let fixed = PlannedVm { fixed: true, ..pinned(&[1], &[0]) };
    assert!(plan_of(fixed).is_empty());
}
