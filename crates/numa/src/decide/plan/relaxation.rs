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

use super::{Column, Load, OverloadCosts, PlacementProblem};

/// Steps without a better bound after which the step length is reduced.
const STEPS_PER_LENGTH: usize = 5;

/// The factor by which the step length is reduced.
const LENGTH_REDUCTION: f64 = 0.7;

/// The step length, relative to that of B. T. Polyak (USSR Computational Mathematics and Mathematical Physics 9, 1969),
/// below which the bound hardly grows.
const MIN_STEP_LENGTH: f64 = 1e-3;

/// A resource of a node. Amounts are relative to its capacity, so that all multipliers are of similar size.
#[derive(Clone, Copy, Debug)]
struct Resource {
    capacity: f64,
    overload_cost: f64,
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
}

/// A plan of which a part is chosen.
#[derive(Clone, Debug)]
pub(super) struct PartialPlan {
    resources: Vec<Resource>,
    /// The choices of each machine.
    pub(super) choices: Vec<Vec<Choice>>,
    /// The chosen one of a machine's choices; `None` while the machine is open.
    pub(super) assigned: Vec<Option<usize>>,
    /// The cost of the chosen columns, without overload.
    cost: f64,
    /// How much of each resource they use.
    used: Vec<f64>,
}

/// Cost and use of resources of a partial plan, to which it can return.
#[derive(Clone, Debug)]
pub(super) struct Totals {
    cost: f64,
    used: Vec<f64>,
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
    pub(super) fn new(problem: &PlacementProblem, columns: &[Vec<Column>], costs: OverloadCosts) -> Self {
        let mut resources = Vec::new();
        let mut scales = Vec::new();
        for node in &problem.nodes {
            for (capacity, cost) in
                [(node.vcpus, costs.vcpu), (node.pages, costs.page), (node.hugetlb_pages, costs.hugetlb_page)]
            {
                let scale = capacity.max(1.0);
                resources.push(Resource { capacity: capacity / scale, overload_cost: cost * scale });
                scales.push(scale);
            }
        }
        let choice = |(position, column): (usize, &Column)| {
            let loads = column.load.iter().flat_map(|load| [load.vcpus, load.pages, load.hugetlb_pages]);
            let amounts = loads.zip(&scales).enumerate();
            let uses = amounts.map(|(resource, (amount, scale))| Use { resource, amount: amount / scale });
            Choice { column: position, cost: column.cost, uses: uses.filter(|used| used.amount > 0.0).collect() }
        };
        let choices: Vec<Vec<Choice>> =
            columns.iter().map(|columns| columns.iter().enumerate().map(choice).collect()).collect();
        let used = vec![0.0; resources.len()];
        let mut plan = Self { resources, assigned: vec![None; choices.len()], choices, cost: 0.0, used };
        for vm in 0..columns.len() {
            if plan.choices[vm].len() == 1 {
                plan.assign(vm, 0);
            }
        }
        plan
    }

    /// Multipliers to begin with. A resource of which the whole host has too little costs its overload wherever it is
    /// used; any other one is free.
    pub(super) fn first_multipliers(&self, host_excess: Load) -> Vec<f64> {
        let scarce = [host_excess.vcpus, host_excess.pages, host_excess.hugetlb_pages].map(|excess| excess > 0.0);
        let resources = self.resources.iter().zip(scarce.into_iter().cycle());
        resources.map(|(resource, is_scarce)| if is_scarce { resource.overload_cost } else { 0.0 }).collect()
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
    }

    /// Cost and use of resources at present.
    pub(super) fn totals(&self) -> Totals {
        Totals { cost: self.cost, used: self.used.clone() }
    }

    /// Open a machine again, with the totals from before it was assigned.
    pub(super) fn reopen(&mut self, vm: usize, totals: &Totals) {
        self.assigned[vm] = None;
        self.cost = totals.cost;
        self.used.clone_from(&totals.used);
    }

    /// What a choice of an open machine adds to the bound.
    pub(super) fn value(&self, choice: &Choice, multipliers: &[f64]) -> f64 {
        choice.uses.iter().fold(choice.cost, |sum, used| {
            let (fitting, excess) = self.split(used);
            sum + multipliers[used.resource] * fitting + self.resources[used.resource].overload_cost * excess
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
    pub(super) fn relax(&self, multipliers: &[f64]) -> Relaxation {
        let count = self.choices.len();
        let mut relaxed = Relaxation {
            bound: self.cost,
            cheapest: vec![0; count],
            values: vec![(0.0, 0.0); count],
            slope: Vec::with_capacity(self.resources.len()),
        };
        for ((resource, used), multiplier) in self.resources.iter().zip(&self.used).zip(multipliers) {
            let over = used - resource.capacity;
            relaxed.bound += multiplier * over.min(0.0) + resource.overload_cost * over.max(0.0);
            relaxed.slope.push(over.min(0.0));
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
            for used in &self.choices[vm][cheapest].uses {
                relaxed.slope[used.resource] += self.split(used).0;
            }
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

/// The search for the multipliers with the highest bound: steps along the slope (subgradient method).
pub(super) struct Ascent {
    /// The best multipliers so far.
    pub(super) multipliers: Vec<f64>,
    /// Their bound.
    pub(super) best: Relaxation,
    /// The multipliers of the last step.
    current: Vec<f64>,
    /// The bound of the last step.
    pub(super) last: Relaxation,
    length: f64,
    steps_without_progress: usize,
}

impl Ascent {
    /// Start from these multipliers.
    pub(super) fn new(plan: &PartialPlan, multipliers: &[f64]) -> Self {
        let best = plan.relax(multipliers);
        let last = best.clone();
        let (multipliers, current) = (multipliers.to_vec(), multipliers.to_vec());
        Self { multipliers, best, current, last, length: 1.0, steps_without_progress: 0 }
    }

    /// Make a step towards a bound of `target`, at least by `min_progress`. Returns whether further steps may improve the
    /// bound.
    pub(super) fn step(&mut self, plan: &PartialPlan, target: f64, min_progress: f64) -> bool {
        // A multiplier that is 0 and would fall stays.
        let slopes = self.last.slope.iter().zip(&self.current).filter(|(slope, at)| **slope > 0.0 || **at > 0.0);
        let norm: f64 = slopes.map(|(slope, _)| slope * slope).sum();
        if norm < 1e-12 || self.length < MIN_STEP_LENGTH {
            return false;
        }
        let step = self.length * (target - self.last.bound).max(min_progress) / norm;
        for ((multiplier, slope), resource) in self.current.iter_mut().zip(&self.last.slope).zip(&plan.resources) {
            *multiplier = (*multiplier + step * slope).clamp(0.0, resource.overload_cost);
        }
        self.last = plan.relax(&self.current);
        if self.last.bound > self.best.bound {
            self.best.clone_from(&self.last);
            self.multipliers.copy_from_slice(&self.current);
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
