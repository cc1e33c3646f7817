//! On which CPUs vCPUs should run, so that siblings, the vCPUs of one machine, are on different run queues.
//!
//! Each vCPU gets a home CPU among those that it may use. In this order, the plan minimizes the pairs of siblings with
//! one home, the pairs of siblings on SMT threads of one core, the squares of the loads of the CPUs, and the moves
//! between nodes and CPUs. The first is minimal: a semi-matching is optimal if no path of moves takes a vCPU from a CPU
//! to one with two fewer (Harvey, Ladner, Lovász, Tamir: Semi-matchings for bipartite graphs and load balancing, Journal
//! of Algorithms 59, 2006, theorem 3.1). The others are improved by moves and exchanges until none helps.
//!
//! Where a machine has no more vCPUs than CPUs, its other CPUs are distributed among its vCPUs, too: their sets stay
//! disjoint, and a vCPU whose home is busy may run elsewhere.

use pagefold_base::IdSet;
use std::collections::{BTreeMap, VecDeque};

/// The most rounds over all vCPUs in which moves and exchanges are tried.
const MAX_IMPROVEMENT_ROUNDS: usize = 32;

/// A CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuPosition {
    /// Its core: the same number for all SMT threads of a core.
    pub core: u32,
    /// Its NUMA node.
    pub node: u32,
}

/// A vCPU to place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VcpuToSpread {
    /// Its machine, by an arbitrary number.
    pub machine: usize,
    /// The CPUs that it may use; at least one.
    pub permitted: IdSet,
    /// The CPU on which it is now.
    pub present_cpu: u32,
    /// How much it runs and waits to run, in tenths of a CPU; at least 1, because an idle vCPU may become busy.
    pub load: u64,
}

/// The vCPUs and CPUs of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpreadProblem {
    /// The online CPUs.
    pub cpus: BTreeMap<u32, CpuPosition>,
    /// The load of vCPUs that stay where they are, for each CPU, in tenths.
    pub base_load: BTreeMap<u32, u64>,
    /// The vCPUs.
    pub vcpus: Vec<VcpuToSpread>,
}

/// Where vCPUs should run, in the order of the problem.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpreadPlan {
    /// The CPU of each vCPU.
    pub homes: Vec<u32>,
    /// The CPUs on which each may run, among them its home.
    pub cpus: Vec<IdSet>,
}

/// The pairs of vCPUs of one machine that share a CPU, for homes given by machine and CPU.
pub fn stacked_pairs(homes: impl IntoIterator<Item = (usize, u32)>) -> u64 {
    let mut counts: BTreeMap<(usize, u32), u64> = BTreeMap::new();
    homes.into_iter().for_each(|home| *counts.entry(home).or_default() += 1);
    counts.values().map(|count| count * (count - 1) / 2).sum()
}

/// Plans homes and CPU sets. Permitted CPUs that are not online do not count.
pub fn plan(problem: &SpreadProblem) -> SpreadPlan {
    let machine_count = problem.vcpus.iter().map(|vcpu| vcpu.machine + 1).max().unwrap_or(0);
    let mut homes = vec![u32::MAX; problem.vcpus.len()];
    for machine in 0..machine_count {
        let members: Vec<usize> =
            (0..problem.vcpus.len()).filter(|&vcpu| problem.vcpus[vcpu].machine == machine).collect();
        let permitted: Vec<IdSet> = members.iter().map(|&vcpu| usable(problem, vcpu)).collect();
        for (&vcpu, home) in members.iter().zip(semi_matching(&permitted)) {
            homes[vcpu] = home.unwrap_or(problem.vcpus[vcpu].present_cpu);
        }
    }
    let mut search = Search::new(problem, homes);
    search.improve();
    let cpus = widen(problem, &search.homes);
    SpreadPlan { homes: search.homes, cpus }
}

fn usable(problem: &SpreadProblem, vcpu: usize) -> IdSet {
    problem.vcpus[vcpu].permitted.iter().filter(|cpu| problem.cpus.contains_key(cpu)).collect()
}

/// A CPU for each vCPU of a machine out of its set, with the fewest pairs on one CPU; `None` for an empty set.
pub fn semi_matching(permitted: &[IdSet]) -> Vec<Option<u32>> {
    let mut homes: Vec<Option<u32>> = Vec::new();
    for position in 0..permitted.len() {
        homes.push(None);
        // The CPUs from which vCPUs can be moved on, in the order of their distance from the new vCPU.
        let mut reached: BTreeMap<u32, usize> = BTreeMap::new();
        let mut waiting = VecDeque::from([position]);
        let count = |homes: &[Option<u32>], cpu: u32| homes.iter().filter(|home| **home == Some(cpu)).count();
        while let Some(vcpu) = waiting.pop_front() {
            for cpu in permitted[vcpu].iter() {
                if reached.contains_key(&cpu) {
                    continue;
                }
                reached.insert(cpu, vcpu);
                waiting.extend((0..position).filter(|&other| homes[other] == Some(cpu)));
            }
        }
        // Taking the CPU with the fewest vCPUs keeps the matching optimal after each vCPU.
        let Some(mut cpu) = reached.keys().copied().min_by_key(|&cpu| count(&homes, cpu)) else { continue };
        while let Some(&vcpu) = reached.get(&cpu) {
            let Some(previous) = homes[vcpu].replace(cpu) else { break };
            cpu = previous;
        }
    }
    homes
}

/// What a plan costs, most important first.
type Cost = [i64; 5];

struct Search<'p> {
    problem: &'p SpreadProblem,
    permitted: Vec<IdSet>,
    homes: Vec<u32>,
    /// vCPUs of a machine on a CPU, and on a core.
    on_cpu: BTreeMap<(usize, u32), i64>,
    on_core: BTreeMap<(usize, u32), i64>,
    load: BTreeMap<u32, i64>,
}

impl<'p> Search<'p> {
    fn new(problem: &'p SpreadProblem, homes: Vec<u32>) -> Self {
        let permitted = (0..problem.vcpus.len()).map(|vcpu| usable(problem, vcpu)).collect();
        let load = problem.base_load.iter().map(|(&cpu, &load)| (cpu, load.cast_signed())).collect();
        let (on_cpu, on_core) = (BTreeMap::new(), BTreeMap::new());
        let mut search = Self { problem, permitted, homes, on_cpu, on_core, load };
        for vcpu in 0..search.homes.len() {
            search.add(vcpu, search.homes[vcpu], 1);
        }
        search
    }

    fn core(&self, cpu: u32) -> u32 {
        self.problem.cpus.get(&cpu).map_or(cpu, |position| position.core)
    }

    /// Counts a vCPU on a CPU, or no longer, and returns the change of the cost.
    fn add(&mut self, vcpu: usize, cpu: u32, sign: i64) -> Cost {
        let VcpuToSpread { machine, present_cpu, load, .. } = self.problem.vcpus[vcpu];
        let load = load.cast_signed();
        let core = self.core(cpu);
        // The pairs and squares with the vCPU, less those without it.
        let others = |count: &mut i64| {
            let without = if sign > 0 { *count } else { *count - 1 };
            *count += sign;
            without
        };
        let siblings = others(self.on_cpu.entry((machine, cpu)).or_default());
        let on_core = others(self.on_core.entry((machine, core)).or_default());
        let total = self.load.entry(cpu).or_default();
        let without = if sign > 0 { *total } else { *total - load };
        *total = without + if sign > 0 { load } else { 0 };
        let node = |cpu: u32| self.problem.cpus.get(&cpu).map(|position| position.node);
        let moves_node = i64::from(node(cpu) != node(present_cpu));
        [siblings, on_core - siblings, moves_node, load * (2 * without + load), i64::from(cpu != present_cpu)]
            .map(|cost| sign * cost)
    }

    /// The change of the cost if vCPUs move to other homes, which is undone unless it is below 0.
    fn try_moves(&mut self, moves: &[(usize, u32)]) -> bool {
        let mut change: Cost = [0; 5];
        let mut sum = |cost: Cost| change.iter_mut().zip(cost).for_each(|(sum, cost)| *sum += cost);
        for &(vcpu, _) in moves {
            sum(self.add(vcpu, self.homes[vcpu], -1));
        }
        for &(vcpu, to) in moves {
            sum(self.add(vcpu, to, 1));
        }
        let is_better = change < [0; 5];
        if is_better {
            moves.iter().for_each(|&(vcpu, to)| self.homes[vcpu] = to);
        } else {
            moves.iter().for_each(|&(vcpu, to)| {
                self.add(vcpu, to, -1);
            });
            moves.iter().for_each(|&(vcpu, _)| {
                self.add(vcpu, self.homes[vcpu], 1);
            });
        }
        is_better
    }

    fn improve(&mut self) {
        for _ in 0..MAX_IMPROVEMENT_ROUNDS {
            let mut is_better = false;
            for vcpu in 0..self.homes.len() {
                for cpu in
                    self.permitted[vcpu].clone().iter().filter(|&cpu| cpu != self.homes[vcpu]).collect::<Vec<_>>()
                {
                    is_better |= cpu != self.homes[vcpu] && self.try_moves(&[(vcpu, cpu)]);
                }
                for other in 0..vcpu {
                    let (to, back) = (self.homes[other], self.homes[vcpu]);
                    let fits = self.permitted[vcpu].contains(to) && self.permitted[other].contains(back);
                    is_better |= to != back && fits && self.try_moves(&[(vcpu, to), (other, back)]);
                }
            }
            if !is_better {
                break;
            }
        }
    }
}

/// Distributes the CPUs that a machine has left over among its vCPUs, within the nodes of their homes.
fn widen(problem: &SpreadProblem, homes: &[u32]) -> Vec<IdSet> {
    let mut sets: Vec<Vec<u32>> = homes.iter().map(|&home| vec![home]).collect();
    let mut members: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    problem
        .vcpus
        .iter()
        .enumerate()
        .for_each(|(position, vcpu)| members.entry(vcpu.machine).or_default().push(position));
    for vcpus in members.values() {
        if stacked_pairs(vcpus.iter().map(|&vcpu| (0, homes[vcpu]))) > 0 {
            continue;
        }
        for (&cpu, position) in problem.cpus.iter().filter(|(cpu, _)| !vcpus.iter().any(|&vcpu| homes[vcpu] == **cpu)) {
            let at = |vcpu: usize| problem.cpus.get(&homes[vcpu]);
            let may_use = |&vcpu: &usize| {
                problem.vcpus[vcpu].permitted.contains(cpu) && at(vcpu).is_some_and(|home| home.node == position.node)
            };
            // A sibling's SMT thread is a worse place than another thread of the same core.
            let preference = |&vcpu: &usize| (at(vcpu).is_none_or(|home| home.core != position.core), sets[vcpu].len());
            if let Some(vcpu) = vcpus.iter().copied().filter(may_use).min_by_key(preference) {
                sets[vcpu].push(cpu);
            }
        }
    }
    sets.into_iter().map(|set| set.into_iter().collect()).collect()
}

/// Whether machines whose vCPUs may run on these sets never stack two of them.
pub fn are_disjoint(sets: &[IdSet]) -> bool {
    let mut seen = std::collections::BTreeSet::new();
    sets.iter().flat_map(IdSet::iter).all(|cpu| seen.insert(cpu))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// CPUs in pairs of SMT threads, half of them on each of two nodes.
    fn smt_host(cpu_count: u32) -> BTreeMap<u32, CpuPosition> {
        (0..cpu_count).map(|cpu| (cpu, CpuPosition { core: cpu / 2, node: 2 * cpu / cpu_count })).collect()
    }

    fn flat_host(cpu_count: u32) -> BTreeMap<u32, CpuPosition> {
        (0..cpu_count).map(|cpu| (cpu, CpuPosition { core: cpu, node: 0 })).collect()
    }

    fn vcpu(machine: usize, permitted: &str, load: u64) -> VcpuToSpread {
        VcpuToSpread { machine, permitted: permitted.parse().unwrap(), present_cpu: 0, load }
    }

    fn check(cpus: BTreeMap<u32, CpuPosition>, vcpus: Vec<VcpuToSpread>, expected: &[&str]) {
        let sets = plan(&SpreadProblem { cpus, base_load: BTreeMap::new(), vcpus }).cpus;
        assert_eq!(sets.iter().map(ToString::to_string).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn siblings_get_disjoint_sets() {
        check(flat_host(2), vec![vcpu(0, "0-1", 10), vcpu(0, "0-1", 10)], &["0", "1"]);
        let two = |machine| [vcpu(machine, "0-1", 10), vcpu(machine, "0-1", 10)];
        check(flat_host(2), [two(0), two(1)].concat(), &["0", "1", "0", "1"]);
        // CPUs that are left over are distributed.
        check(flat_host(5), vec![vcpu(0, "0-4", 10), vcpu(0, "0-4", 10)], &["0,2,4", "1,3"]);
    }

    #[test]
    fn siblings_are_on_different_cores() {
        let plan = plan(&SpreadProblem {
            cpus: smt_host(4),
            base_load: BTreeMap::new(),
            vcpus: vec![vcpu(0, "0-3", 10), vcpu(0, "0-3", 10)],
        });
        let cores: Vec<u32> = plan.homes.iter().map(|home| home / 2).collect();
        assert_ne!(cores[0], cores[1], "{plan:?}");
        assert!(plan.cpus.iter().all(|set| set.iter().all(|cpu| set.contains(cpu ^ 1))), "a core each: {plan:?}");
    }

    #[test]
    fn machines_are_interleaved_so_that_loads_are_even() {
        let busy = |machine| vcpu(machine, "0-3", 10);
        let vcpus = vec![busy(0), busy(0), busy(1), busy(1), vcpu(2, "0-3", 1), vcpu(2, "0-3", 1)];
        let plan = plan(&SpreadProblem { cpus: flat_host(4), base_load: BTreeMap::new(), vcpus });
        let mut homes = plan.homes[..4].to_vec();
        homes.sort_unstable();
        assert_eq!(homes, [0, 1, 2, 3], "each busy vCPU has a CPU of its own: {plan:?}");
        assert_ne!(plan.homes[4], plan.homes[5]);
    }

    #[test]
    fn load_of_other_machines_is_avoided() {
        let base_load = [(0, 10), (1, 10)].into();
        let plan = plan(&SpreadProblem { cpus: flat_host(4), base_load, vcpus: vec![vcpu(0, "0-3", 10); 2] });
        assert!(plan.homes.iter().all(|home| *home >= 2), "{plan:?}");
    }

    #[test]
    fn permitted_cpus_are_kept_and_nodes_are_not_left() {
        check(flat_host(4), vec![vcpu(0, "3", 10), vcpu(0, "2-3", 10), vcpu(0, "1-7", 10)], &["3", "2", "1"]);
        // On two nodes without SMT, the present node is kept, and sets do not cross.
        let cpus = (0..4).map(|cpu| (cpu, CpuPosition { core: cpu, node: cpu / 2 })).collect();
        check(cpus, vec![vcpu(0, "0-3", 10)], &["0-1"]);
    }

    #[test]
    fn more_vcpus_than_cpus_are_stacked_evenly() {
        let plan =
            plan(&SpreadProblem { cpus: flat_host(2), base_load: BTreeMap::new(), vcpus: vec![vcpu(0, "0-1", 10); 5] });
        let on_first = plan.homes.iter().filter(|home| **home == 0).count();
        assert!(on_first == 2 || on_first == 3, "{plan:?}");
        assert!(plan.cpus.iter().all(|set| set.iter().count() == 1));
    }

    #[test]
    fn disjoint_sets_are_recognized() {
        let sets = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<IdSet>>();
        assert!(are_disjoint(&sets(&["0,2", "1,3"])) && are_disjoint(&[]));
        assert!(!are_disjoint(&sets(&["0-2", "2"])));
    }

    /// The fewest pairs of any assignment.
    fn fewest_pairs(permitted: &[IdSet], homes: &mut Vec<u32>) -> u64 {
        let Some(set) = permitted.get(homes.len()) else {
            return stacked_pairs(homes.iter().map(|&home| (0, home)));
        };
        let mut fewest = u64::MAX;
        for cpu in set.iter() {
            homes.push(cpu);
            fewest = fewest.min(fewest_pairs(permitted, homes));
            homes.pop();
        }
        fewest
    }

    fn problems() -> impl Strategy<Value = SpreadProblem> {
        let vcpu = (0..2_usize, prop::collection::btree_set(0..4_u32, 1..4), 0..4_u32, 1..11_u64);
        (prop::collection::vec(vcpu, 1..8), any::<bool>()).prop_map(|(vcpus, has_smt)| SpreadProblem {
            cpus: if has_smt { smt_host(4) } else { flat_host(4) },
            base_load: BTreeMap::new(),
            vcpus: vcpus
                .into_iter()
                .map(|(machine, permitted, present_cpu, load)| VcpuToSpread {
                    machine,
                    permitted: permitted.into_iter().collect(),
                    present_cpu,
                    load,
                })
                .collect(),
        })
    }

    proptest! {
        #[test]
        fn stacking_is_minimal_and_sets_are_permitted(problem in problems()) {
            let plan = plan(&problem);
            let pairs = stacked_pairs(problem.vcpus.iter().map(|vcpu| vcpu.machine).zip(plan.homes.iter().copied()));
            let fewest: u64 = (0..2).map(|machine| {
                let of_machine = problem.vcpus.iter().filter(|vcpu| vcpu.machine == machine);
                fewest_pairs(&of_machine.map(|vcpu| vcpu.permitted.clone()).collect::<Vec<_>>(), &mut Vec::new())
            }).sum();
            prop_assert_eq!(pairs, fewest, "{:?}", plan);
            for ((vcpu, home), set) in problem.vcpus.iter().zip(&plan.homes).zip(&plan.cpus) {
                prop_assert!(set.contains(*home) && set.is_subset(&vcpu.permitted), "{plan:?}");
            }
            for machine in 0..2 {
                let of_machine = |(vcpu, _): &(&VcpuToSpread, &IdSet)| vcpu.machine == machine;
                let sets: Vec<IdSet> =
                    problem.vcpus.iter().zip(&plan.cpus).filter(of_machine).map(|(_, set)| set.clone()).collect();
                prop_assert!(pairs > 0 || are_disjoint(&sets), "{plan:?}");
            }
        }
    }
}
