//! A lower bound of the cost of a plan of which a part is chosen already.
//!
//! The capacity of each node is relaxed with a multiplier for each resource (Lagrangian relaxation: M. L. Fisher,
//! Management Science 27, 1981). Each open machine then takes its cheapest column, without regard to the others. For a
//! load `u`, a capacity `c`, an overload cost `p` and any multiplier `m` from 0 to `p`:
//!
//! ```text
//! p x max(u - c, 0)  >=  m x (u - c)  +  (p - m) x max(u - c, 0)
//! ```
//!
//! The excess on the right counts for the chosen columns, and for each open machine that is added to them alone; the
//! excess of all is not less. So a column that no longer fits costs its overload, and the bound grows as nodes fill up.
//!
//! This alone would fill each node to the last CPU, where three machines of 6 CPUs do not fit on 16. So the room on all
//! nodes together is relaxed too, counted by dual feasible functions (S. P. Fekete and J. Schepers, Mathematical
//! Programming 91, 2001): of loads larger than a `k + 1`-th of a node, `k` fit; and a load takes a whole node if it leaves no
//! room for another load that is counted. Where the loads of a node count for more than one node, it is overloaded, so that
//! a part of its overload cost bounds the excess count.

use microlp::{ComparisonOp, OptimizationDirection, Problem, Variable};

use super::{Column, Load, LoadCosts, PlacementProblem, host_excess};

/// Steps without a better bound after which the step length is reduced.
const STEPS_PER_LENGTH: usize = 5;

/// The factor by which the step length is reduced.
const LENGTH_REDUCTION: f64 = 0.7;

/// The step length, relative to that of B. T. Polyak (USSR Computational Mathematics and Mathematical Physics 9, 1969),
/// below which the bound hardly grows.
const MIN_STEP_LENGTH: f64 = 1e-3;

/// Loads that exceed a node by less than this share count as if they fitted. [`Counting::AtLeast`] applies it only beside
/// loads that count as a node.
const LOAD_TOLERANCE: f64 = 0.05;

/// Loads are counted that are larger than a half of a node, a third, and so on.
const PLACES: [f64; 7] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];

/// The least loads of [`Counting::AtLeast`], relative to a node, are the most frequent ones in this range.
const LEAST_LOADS: std::ops::RangeInclusive<f64> = 0.25..=0.5;

/// How many of them are tried for each kind of resource.
const MAX_LEAST_LOADS: usize = 6;

/// Loads that differ by less are the same.
const SAME_LOAD: f64 = 1e-6;

/// A linear program with more choices takes too long: one with 1,650 took 19 ms.
const MAX_CHOICES_OF_LINEAR_PROGRAM: usize = 4096;

/// Kinds of resources of a node: virtual CPUs, pages, hugetlb pages, and its even share of virtual CPUs.
const KINDS: usize = 4;

/// A smaller coefficient is left out: microlp needs those of a row within six orders of magnitude.
const MIN_COEFFICIENT: f64 = 1e-4;

/// A resource of a node. Amounts are relative to its capacity, so that all multipliers are of similar size.
#[derive(Clone, Copy, Debug)]
struct Resource {
    /// Its position in the order of [`KINDS`].
    kind: usize,
    capacity: f64,
    overload_cost: f64,
}

/// What a load counts for, relative to a node. The loads of a node that is not overloaded count for one at most.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Counting {
    /// Loads above a `places + 1`-th of a node take a place, of which it has so many, and larger ones take several.
    Places(f64),
    /// Loads from this one on, which is a half of a node at most, count as they are. Those that leave no room for this one
    /// count as a node.
    AtLeast(f64),
}

impl Counting {
    fn count(self, load: f64) -> f64 {
        match self {
            Self::Places(places) => (((places + 1.0) * (1.0 - LOAD_TOLERANCE) * load).ceil() - 1.0).max(0.0) / places,
            Self::AtLeast(least) if load < least - SAME_LOAD => 0.0,
            Self::AtLeast(least) if load >= 1.0 - least + LOAD_TOLERANCE => 1.0,
            Self::AtLeast(_) => load,
        }
    }

    /// By how much the count of a node's loads exceeds one at most, relative to its overload.
    ///
    /// Places: `count <= (places + 1) / places * (1 - tolerance) * load`, where the overload is at least the tolerance.
    ///
    /// Least loads: if no load counts as a node, the excess count is the overload. If `k` loads do, each is at least
    /// `1 - least + tolerance`. Beside other loads with the sum `m`, the excess count is `k - 1 + m`, and the overload is
    /// at least `k * (1 - least + tolerance) + m - 1`. The ratio is largest for `least = 0.5`: for `k = 1`, where `m` is at
    /// least `0.5 - SAME_LOAD` or zero, and for `k = 2` and `m = 0`.
    fn excess_per_overload(self) -> f64 {
        match self {
            Self::Places(places) => (places + 1.0) / places + 1.0 / (places * LOAD_TOLERANCE),
            Self::AtLeast(_) => 0.5 / (LOAD_TOLERANCE - SAME_LOAD),
        }
    }
}

/// A count of loads on all nodes together, which have room for as many as there are nodes.
#[derive(Clone, Debug)]
struct LoadCount {
    counting: Counting,
    /// The nodes' resources whose loads are counted.
    resources: Vec<usize>,
}

impl LoadCount {
    /// What the loads of a column count for.
    fn count(&self, uses: &[Use]) -> f64 {
        let counted = uses.iter().filter(|used| self.resources.contains(&used.resource));
        counted.map(|used| self.counting.count(used.amount)).sum()
    }

    fn excess_per_overload(&self) -> f64 {
        self.counting.excess_per_overload()
    }

    /// Whether a choice of columns exceeds the room. Otherwise the count bounds nothing.
    fn may_exceed(&self, choices: &[Vec<Choice>]) -> bool {
        let most = |choices: &Vec<Choice>| choices.iter().map(|choice| self.count(&choice.uses)).fold(0.0, f64::max);
        choices.iter().map(most).sum::<f64>() > self.resources.len() as f64
    }
}

/// The multipliers of the resources of nodes, and of the counts of loads after them.
#[derive(Clone, Debug)]
pub(super) struct Multipliers {
    values: Vec<f64>,
    /// What remains of the overload cost of each resource, after the counts of its loads.
    overload_costs: Vec<f64>,
}

/// What a column uses of a resource.
#[derive(Clone, Copy, Debug)]
struct Use {
    resource: usize,
    amount: f64,
}

/// A column of an open machine.
#[derive(Clone, Debug)]
pub(super) struct Choice {
    /// The position of the column.
    pub(super) column: usize,
    cost: f64,
    uses: Vec<Use>,
    /// What its loads count for in each count of loads.
    counts: Vec<f64>,
}

/// A plan of which a part is chosen.
#[derive(Clone, Debug)]
pub(super) struct PartialPlan {
    resources: Vec<Resource>,
    load_counts: Vec<LoadCount>,
    /// The choices of each machine.
    pub(super) choices: Vec<Vec<Choice>>,
    /// The chosen one of a machine's choices; `None` while the machine is open.
    pub(super) assigned: Vec<Option<usize>>,
    /// The cost of the chosen columns, without overload.
    cost: f64,
    /// How much of each resource they use.
    used: Vec<f64>,
    /// What they count for in each count of loads.
    counted: Vec<f64>,
}

/// Cost and use of resources of a partial plan, to which it can return.
#[derive(Clone, Debug)]
pub(super) struct Totals {
    cost: f64,
    used: Vec<f64>,
    counted: Vec<f64>,
}

/// A lower bound, with the choices of which it is made.
#[derive(Clone, Debug)]
pub(super) struct Relaxation {
    /// No completion of the plan costs less.
    pub(super) bound: f64,
    /// For each open machine, the position of its cheapest choice.
    pub(super) cheapest: Vec<usize>,
    /// For each open machine, the value of its cheapest choice, and of the next one.
    pub(super) values: Vec<(f64, f64)>,
    /// The change of the bound with each multiplier.
    slope: Vec<f64>,
}

impl PartialPlan {
    /// Nothing is chosen, except for machines with a single column.
    pub(super) fn new(problem: &PlacementProblem, columns: &[Vec<Column>], costs: LoadCosts) -> Self {
        let mut resources = Vec::new();
        let mut scales = Vec::new();
        let kinds = if costs.crowded_vcpu > 0.0 { KINDS } else { KINDS - 1 };
        for node in &problem.nodes {
            let capacities = [
                (node.vcpus, costs.vcpu),
                (node.pages, costs.page),
                (node.hugetlb_pages, costs.hugetlb_page),
                (costs.even_vcpus(node), costs.crowded_vcpu),
            ];
            for (kind, (capacity, cost)) in capacities.into_iter().enumerate().take(kinds) {
                let scale = capacity.max(1.0);
                resources.push(Resource { kind, capacity: capacity / scale, overload_cost: cost * scale });
                scales.push(scale);
            }
        }
        let of_kinds = |load: &Load| [load.vcpus, load.pages, load.hugetlb_pages, load.vcpus].into_iter().take(kinds);
        let choice = |(position, column): (usize, &Column)| {
            let loads = column.load.iter().flat_map(of_kinds);
            let amounts = loads.zip(&scales).enumerate();
            let uses = amounts.map(|(resource, (amount, scale))| Use { resource, amount: amount / scale });
            let uses: Vec<Use> = uses.filter(|used| used.amount > 0.0).collect();
            Choice { column: position, cost: column.cost, uses, counts: Vec::new() }
        };
        let mut choices: Vec<Vec<Choice>> =
            columns.iter().map(|columns| columns.iter().enumerate().map(choice).collect()).collect();
        let mut load_counts = load_counts(&resources, host_excess(problem), &choices);
        load_counts.retain(|count| count.may_exceed(&choices));
        for choice in choices.iter_mut().flatten() {
            choice.counts = load_counts.iter().map(|count| count.count(&choice.uses)).collect();
        }
        let (used, counted) = (vec![0.0; resources.len()], vec![0.0; load_counts.len()]);
        let assigned = vec![None; choices.len()];
        let mut plan = Self { resources, load_counts, assigned, choices, cost: 0.0, used, counted };
        for vm in 0..columns.len() {
            if plan.choices[vm].len() == 1 {
                plan.assign(vm, 0);
            }
        }
        plan
    }

    /// Multipliers to begin with. A resource of which the whole host has too little costs its overload wherever it is
    /// used; any other one is free.
    pub(super) fn first_multipliers(&self, host_excess: Load) -> Multipliers {
        let is_scarce = is_scarce(host_excess);
        let of_resource = |resource: &Resource| if is_scarce[resource.kind] { resource.overload_cost } else { 0.0 };
        let mut values: Vec<f64> = self.resources.iter().map(of_resource).collect();
        values.resize(self.resources.len() + self.load_counts.len(), 0.0);
        self.multipliers(values)
    }

    /// These multipliers, limited by the overload costs.
    fn multipliers(&self, mut values: Vec<f64>) -> Multipliers {
        let mut overload_costs: Vec<f64> = self.resources.iter().map(|resource| resource.overload_cost).collect();
        let (of_resources, of_counts) = values.split_at_mut(self.resources.len());
        for (load_count, multiplier) in self.load_counts.iter().zip(of_counts) {
            let of_counted = load_count.resources.iter().map(|&resource| overload_costs[resource]);
            let least = of_counted.fold(f64::INFINITY, f64::min);
            // Rounding may leave less than nothing of an overload cost.
            *multiplier = multiplier.clamp(0.0, (least / load_count.excess_per_overload()).max(0.0));
            for &resource in &load_count.resources {
                overload_costs[resource] -= *multiplier * load_count.excess_per_overload();
            }
        }
        for (multiplier, overload_cost) in of_resources.iter_mut().zip(&mut overload_costs) {
            *overload_cost = overload_cost.max(0.0);
            *multiplier = multiplier.clamp(0.0, *overload_cost);
        }
        Multipliers { values, overload_costs }
    }

    /// The machines that are open.
    pub(super) fn open_machines(&self) -> impl Iterator<Item = usize> {
        (0..self.choices.len()).filter(|&vm| self.assigned[vm].is_none())
    }

    /// Choose a column for an open machine.
    pub(super) fn assign(&mut self, vm: usize, position: usize) {
        self.assigned[vm] = Some(position);
        let choice = &self.choices[vm][position];
        self.cost += choice.cost;
        for used in &choice.uses {
            self.used[used.resource] += used.amount;
        }
        self.counted.iter_mut().zip(&choice.counts).for_each(|(counted, count)| *counted += count);
    }

    /// Cost and use of resources at present.
    pub(super) fn totals(&self) -> Totals {
        Totals { cost: self.cost, used: self.used.clone(), counted: self.counted.clone() }
    }

    /// Open a machine again, with the totals from before it was assigned.
    pub(super) fn reopen(&mut self, vm: usize, totals: &Totals) {
        self.assigned[vm] = None;
        self.cost = totals.cost;
        self.used.clone_from(&totals.used);
        self.counted.clone_from(&totals.counted);
    }

    /// What a choice of an open machine adds to the bound.
    pub(super) fn value(&self, choice: &Choice, multipliers: &Multipliers) -> f64 {
        let of_counts = multipliers.values[self.resources.len()..].iter().zip(&choice.counts);
        let counted: f64 = of_counts.map(|(multiplier, count)| multiplier * count).sum();
        choice.uses.iter().fold(choice.cost + counted, |sum, used| {
            let (fitting, excess) = self.split(used);
            sum + multipliers.values[used.resource] * fitting + multipliers.overload_costs[used.resource] * excess
        })
    }

    /// How much of a use fits beside the chosen columns, and how much does not. What fits into a node that is free
    /// counts as fitting.
    fn split(&self, used: &Use) -> (f64, f64) {
        let over = self.used[used.resource] - self.resources[used.resource].capacity;
        let excess = (over + used.amount).max(0.0) - over.max(0.0);
        (used.amount - excess, excess)
    }

    /// The bound with these multipliers.
    pub(super) fn relax(&self, multipliers: &Multipliers) -> Relaxation {
        let count = self.choices.len();
        let mut relaxed = Relaxation {
            bound: self.cost,
            cheapest: vec![0; count],
            values: vec![(0.0, 0.0); count],
            slope: Vec::with_capacity(multipliers.values.len()),
        };
        let mut excess = Vec::with_capacity(self.resources.len());
        for (position, (resource, used)) in self.resources.iter().zip(&self.used).enumerate() {
            let over = used - resource.capacity;
            relaxed.bound +=
                multipliers.values[position] * over.min(0.0) + multipliers.overload_costs[position] * over.max(0.0);
            relaxed.slope.push(over.min(0.0));
            excess.push(over.max(0.0));
        }
        for (position, (load_count, counted)) in self.load_counts.iter().zip(&self.counted).enumerate() {
            let over = counted - load_count.resources.len() as f64;
            relaxed.bound += multipliers.values[self.resources.len() + position] * over;
            relaxed.slope.push(over);
        }
        for vm in self.open_machines() {
            let (mut cheapest, mut value, mut next_value) = (0, f64::INFINITY, f64::INFINITY);
            for (position, choice) in self.choices[vm].iter().enumerate() {
                let candidate = self.value(choice, multipliers);
                if candidate < value {
                    (cheapest, value, next_value) = (position, candidate, value);
                } else {
                    next_value = next_value.min(candidate);
                }
            }
            relaxed.cheapest[vm] = cheapest;
            relaxed.values[vm] = (value, next_value);
            relaxed.bound += value;
            let choice = &self.choices[vm][cheapest];
            for used in &choice.uses {
                let (fitting, beyond) = self.split(used);
                relaxed.slope[used.resource] += fitting;
                excess[used.resource] += beyond;
            }
            let counts = relaxed.slope[self.resources.len()..].iter_mut().zip(&choice.counts);
            counts.for_each(|(slope, count)| *slope += count);
        }
        for (slope, load_count) in relaxed.slope[self.resources.len()..].iter_mut().zip(&self.load_counts) {
            let overload: f64 = load_count.resources.iter().map(|&resource| excess[resource]).sum();
            *slope -= load_count.excess_per_overload() * overload;
        }
        relaxed
    }

    /// The whole plan if each open machine takes its cheapest choice, and its cost.
    pub(super) fn complete(&self, relaxed: &Relaxation) -> (Vec<usize>, f64) {
        let mut totals = self.totals();
        let mut chosen = Vec::with_capacity(self.choices.len());
        for (vm, choices) in self.choices.iter().enumerate() {
            let choice = &choices[self.assigned[vm].unwrap_or(relaxed.cheapest[vm])];
            chosen.push(choice.column);
            if self.assigned[vm].is_none() {
                totals.cost += choice.cost;
                choice.uses.iter().for_each(|used| totals.used[used.resource] += used.amount);
            }
        }
        let overload = self.resources.iter().zip(&totals.used);
        let overload_cost: f64 =
            overload.map(|(resource, used)| resource.overload_cost * (used - resource.capacity).max(0.0)).sum();
        (chosen, totals.cost + overload_cost)
    }
}

impl PartialPlan {
    /// The multipliers of the highest bound, from the dual of the linear program in which machines may take shares of
    /// choices; `None` if the program is too large, or microlp fails. `unit` is a small cost.
    pub(super) fn best_multipliers(&self, unit: f64) -> Option<Multipliers> {
        if self.open_machines().map(|vm| self.choices[vm].len()).sum::<usize>() > MAX_CHOICES_OF_LINEAR_PROGRAM {
            return None;
        }
        let mut program = Problem::new(OptimizationDirection::Maximize);
        let variables = self.add_multipliers(&mut program, unit);
        for vm in self.open_machines() {
            // The value of the cheapest choice.
            let value = program.add_var(1.0, (f64::NEG_INFINITY, f64::INFINITY));
            for choice in &self.choices[vm] {
                let (cost, uses) = self.uses_of_multipliers(choice);
                let is_used = |(_, used): &(usize, f64)| used.abs() > MIN_COEFFICIENT;
                let uses = uses.into_iter().enumerate().filter(is_used);
                let terms: Vec<_> =
                    uses.map(|(position, used)| (variables[position], -used)).chain([(value, 1.0)]).collect();
                program.add_constraint(terms.as_slice(), ComparisonOp::Le, cost / unit);
            }
        }
        let solution = program.solve().ok()?.into_solution().ok()?;
        Some(self.multipliers(variables.iter().map(|&variable| solution.var_value(variable) * unit).collect()))
    }

    /// Add the multipliers to a linear program, with what they change in the bound by the chosen columns, and their limits.
    fn add_multipliers(&self, program: &mut Problem, unit: f64) -> Vec<Variable> {
        let over: Vec<f64> =
            self.resources.iter().zip(&self.used).map(|(resource, used)| used - resource.capacity).collect();
        let mut add = |change: f64| program.add_var(change, (0.0, f64::INFINITY));
        let mut variables: Vec<Variable> = over.iter().map(|over| add(over.min(0.0))).collect();
        for (load_count, counted) in self.load_counts.iter().zip(&self.counted) {
            let excess: f64 = load_count.resources.iter().map(|&resource| over[resource].max(0.0)).sum();
            variables
                .push(add(counted - load_count.resources.len() as f64 - load_count.excess_per_overload() * excess));
        }
        for (position, resource) in self.resources.iter().enumerate() {
            let counts = self.load_counts.iter().zip(&variables[self.resources.len()..]);
            let counts = counts.filter(|(load_count, _)| load_count.resources.contains(&position));
            let terms: Vec<_> = counts
                .map(|(load_count, &variable)| (variable, load_count.excess_per_overload()))
                .chain([(variables[position], 1.0)])
                .collect();
            program.add_constraint(terms.as_slice(), ComparisonOp::Le, resource.overload_cost / unit);
        }
        variables
    }

    /// The value of a choice with multipliers of zero, and what each multiplier adds to it.
    fn uses_of_multipliers(&self, choice: &Choice) -> (f64, Vec<f64>) {
        let mut uses = vec![0.0; self.resources.len()];
        uses.extend(&choice.counts);
        let mut cost = choice.cost;
        for used in &choice.uses {
            let (fitting, excess) = self.split(used);
            uses[used.resource] = fitting;
            cost += excess * self.resources[used.resource].overload_cost;
            for (count, load_count) in uses[self.resources.len()..].iter_mut().zip(&self.load_counts) {
                if load_count.resources.contains(&used.resource) {
                    *count -= excess * load_count.excess_per_overload();
                }
            }
        }
        (cost, uses)
    }
}

/// Whether the whole host has too little of each kind of resource. The even shares together are more than all need.
fn is_scarce(host_excess: Load) -> [bool; KINDS] {
    [host_excess.vcpus, host_excess.pages, host_excess.hugetlb_pages, 0.0].map(|excess| excess > 0.0)
}

/// The counts of loads for each kind of resource of which the whole host has enough, but not for even shares: their costs
/// are low, and the counts would double the linear program.
fn load_counts(resources: &[Resource], host_excess: Load, choices: &[Vec<Choice>]) -> Vec<LoadCount> {
    let of_kind = |(kind, is_scarce): (usize, bool)| {
        let is_counted = |resource: &Resource| !is_scarce && resource.kind == kind && resource.capacity >= 1.0;
        let counted: Vec<usize> = (0..resources.len()).filter(|&at| is_counted(&resources[at])).collect();
        let least = frequent_loads(choices, &counted).into_iter().map(Counting::AtLeast);
        let countings = PLACES.into_iter().map(Counting::Places).chain(least);
        countings.map(|counting| LoadCount { counting, resources: counted.clone() }).collect::<Vec<_>>()
    };
    let all = is_scarce(host_excess).into_iter().take(KINDS - 1).enumerate().flat_map(of_kind);
    all.filter(|count| !count.resources.is_empty()).collect()
}

/// The loads in the range of [`LEAST_LOADS`] that most columns have, the most frequent first.
fn frequent_loads(choices: &[Vec<Choice>], resources: &[usize]) -> Vec<f64> {
    let uses = choices.iter().flatten().flat_map(|choice| &choice.uses);
    let amounts = uses.filter(|used| resources.contains(&used.resource)).map(|used| used.amount);
    let mut amounts: Vec<f64> = amounts.filter(|amount| LEAST_LOADS.contains(amount)).collect();
    amounts.sort_by(f64::total_cmp);
    let mut groups: Vec<&[f64]> = amounts.chunk_by(|left, right| right - left < SAME_LOAD).collect();
    groups.sort_by_key(|group| std::cmp::Reverse(group.len()));
    groups.iter().take(MAX_LEAST_LOADS).map(|group| group[0]).collect()
}

/// The search for the multipliers with the highest bound: steps along the slope (subgradient method).
pub(super) struct Ascent {
    /// The best multipliers so far.
    pub(super) multipliers: Multipliers,
    /// Their bound.
    pub(super) best: Relaxation,
    /// The multipliers of the last step.
    current: Multipliers,
    /// The bound of the last step.
    pub(super) last: Relaxation,
    length: f64,
    steps_without_progress: usize,
}

impl Ascent {
    /// Start from these multipliers.
    pub(super) fn new(plan: &PartialPlan, multipliers: &Multipliers) -> Self {
        let best = plan.relax(multipliers);
        let last = best.clone();
        let (multipliers, current) = (multipliers.clone(), multipliers.clone());
        Self { multipliers, best, current, last, length: 1.0, steps_without_progress: 0 }
    }

    /// Make a step towards a bound of `target`, at least by `min_progress`. Returns whether further steps may improve the
    /// bound.
    pub(super) fn step(&mut self, plan: &PartialPlan, target: f64, min_progress: f64) -> bool {
        // A multiplier that is 0 and would fall stays.
        let slopes = self.last.slope.iter().zip(&self.current.values).filter(|(slope, at)| **slope > 0.0 || **at > 0.0);
        let norm: f64 = slopes.map(|(slope, _)| slope * slope).sum();
        if norm < 1e-12 || self.length < MIN_STEP_LENGTH {
            return false;
        }
        let step = self.length * (target - self.last.bound).max(min_progress) / norm;
        let stepped = self.current.values.iter().zip(&self.last.slope).map(|(at, slope)| at + step * slope);
        self.current = plan.multipliers(stepped.collect());
        self.last = plan.relax(&self.current);
        if self.last.bound > self.best.bound {
            self.best.clone_from(&self.last);
            self.multipliers.clone_from(&self.current);
            self.steps_without_progress = 0;
        } else {
            self.steps_without_progress += 1;
            if self.steps_without_progress == STEPS_PER_LENGTH {
                self.steps_without_progress = 0;
                self.length *= LENGTH_REDUCTION;
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn loads_that_fit_count_for_one_node_and_others_for_a_share_of_the_overload(
            loads in prop::collection::vec(prop_oneof![0.0..1.2, (1u32..17).prop_map(|vcpus| f64::from(vcpus) / 16.0)], 0..6),
        ) {
            let overload = (loads.iter().sum::<f64>() - 1.0).max(0.0);
            let least = [0.25, 5.0 / 16.0, 0.4, 7.0 / 16.0, 0.5].map(Counting::AtLeast);
            for counting in PLACES.map(Counting::Places).into_iter().chain(least) {
                let count: f64 = loads.iter().map(|&load| counting.count(load)).sum();
                let most = 1.0 + counting.excess_per_overload() * overload;
                prop_assert!(count <= most + 1e-9, "{count} > {most}: {counting:?}");
            }
        }
    }

    proptest! {
        #[test]
        fn multipliers_are_limited_by_what_is_left_of_the_overload_costs(
            costs in prop::collection::vec(1e-3..1e9_f64, 2 * KINDS),
            values in prop::collection::vec(prop_oneof![Just(0.0), 0.0..1e3, Just(1e300)], 2 * KINDS + 3 * PLACES.len()),
        ) {
            let resource = |(number, &overload_cost)| Resource { kind: number % KINDS, capacity: 1.0, overload_cost };
            let resources: Vec<Resource> = costs.iter().enumerate().map(resource).collect();
            let load_counts = load_counts(&resources, Load::default(), &[]);
            prop_assert_eq!(resources.len() + load_counts.len(), values.len());
            let plan = PartialPlan {
                resources,
                load_counts,
                choices: Vec::new(),
                assigned: Vec::new(),
                cost: 0.0,
                used: Vec::new(),
                counted: Vec::new(),
            };
            let limited = plan.multipliers(values);
            for (resource, cost) in costs.iter().enumerate() {
                let of_counts = plan.load_counts.iter().zip(&limited.values[2 * KINDS..]);
                let spent: f64 = of_counts
                    .filter(|(load_count, _)| load_count.resources.contains(&resource))
                    .map(|(load_count, multiplier)| multiplier * load_count.excess_per_overload())
                    .sum();
                let left = limited.overload_costs[resource];
                prop_assert!(left >= 0.0 && spent + left <= cost * (1.0 + 1e-9), "{spent} + {left} > {cost}");
                prop_assert!((0.0..=left).contains(&limited.values[resource]));
            }
        }
    }

    #[test]
    fn loads_above_a_third_take_one_of_two_places() {
        let counts = [5.0, 6.0, 11.0, 12.0, 16.0].map(|vcpus| Counting::Places(2.0).count(vcpus / 16.0));
        assert_eq!(counts, [0.0, 0.5, 0.5, 1.0, 1.0]);
    }

    #[test]
    fn loads_that_leave_no_room_for_the_least_one_take_a_node() {
        let counts = [3.0, 3.5, 4.0, 5.0, 7.0].map(|vcpus| Counting::AtLeast(3.5 / 8.0).count(vcpus / 8.0));
        assert_eq!(counts, [0.0, 3.5 / 8.0, 0.5, 1.0, 1.0]);
    }
}
