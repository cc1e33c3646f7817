//! The choice of a column for each machine by branch and bound, depth first.
//!
//! At each node of the tree the machine is assigned that loses most if it does not get its cheapest column, and its
//! columns are tried from the cheapest on. A column is left out if the bound (`relaxation`) shows that it leads to no
//! better plan. Equal machines take their columns in one order only, since exchanging them changes nothing.
//!
//! The tree is searched for each of the `TOLERANCES`, and begins with the best plan so far. If there is no time for the
//! last of them, the ones before have bounded the gap.

use super::relaxation::{Ascent, Multipliers, PartialPlan, Relaxation, Totals};
use super::{Column, LoadCosts, PlacementProblem, host_excess};

/// The gaps at which a part of the tree is left out, relative to the avoidable cost of the best plan.
const TOLERANCES: [f64; 2] = [0.02, 0.0];

/// Steps of the multipliers at the root, and at each other node of the tree, where they start from their parent's.
const MAX_ROOT_STEPS: usize = 400;
const MAX_STEPS: usize = 10;

/// A choice of a column for each machine.
#[derive(Clone, Debug)]
pub(super) struct BoundedChoice {
    /// The position of the column of each machine.
    pub(super) chosen: Vec<usize>,
    /// Its cost.
    pub(super) cost: f64,
    /// No choice costs less.
    pub(super) bound: f64,
}

/// A node of the tree whose machine is being assigned.
struct Branch {
    vm: usize,
    /// The bound with each choice of the machine, and the position of the choice, ascending.
    order: Vec<(f64, usize)>,
    /// The next of them.
    next: usize,
    multipliers: Multipliers,
    totals: Totals,
}

struct Tree<'t> {
    plan: PartialPlan,
    /// The machine before each machine that is equal to it.
    equal_before: &'t [Option<usize>],
    best: BoundedChoice,
    unavoidable: f64,
    tolerance: f64,
    /// Costs that differ by less count as equal.
    cost_tolerance: f64,
    is_due: &'t mut dyn FnMut() -> bool,
    is_stopped: bool,
}

/// Improve a choice and bound its gap, until `is_due`. `unavoidable` is the cost that no choice avoids.
pub(super) fn improve(
    problem: &PlacementProblem,
    columns: &[Vec<Column>],
    costs: LoadCosts,
    first: BoundedChoice,
    unavoidable: f64,
    is_due: &mut dyn FnMut() -> bool,
) -> BoundedChoice {
    let plan = PartialPlan::new(problem, columns, costs);
    let equal_before = equal_machines(problem);
    let mut multipliers = plan.first_multipliers(host_excess(problem));
    let mut best = first;
    for tolerance in TOLERANCES {
        let known_bound = best.bound;
        let mut tree = Tree {
            plan: plan.clone(),
            equal_before: &equal_before,
            best: BoundedChoice { bound: best.cost, ..best },
            unavoidable,
            tolerance,
            cost_tolerance: problem.cost_tolerance(),
            is_due,
            is_stopped: false,
        };
        multipliers = tree.search(&multipliers);
        let is_stopped = tree.is_stopped;
        best = tree.best;
        best.bound = best.bound.min(best.cost).max(known_bound);
        if is_stopped {
            break;
        }
    }
    best
}

/// For each machine, the last one before it that differs by name only.
fn equal_machines(problem: &PlacementProblem) -> Vec<Option<usize>> {
    let is_equal = |left: usize, right: usize| {
        let (left, right) = (&problem.vms[left], &problem.vms[right]);
        left.parts == right.parts
            && left.allowed_nodes == right.allowed_nodes
            && left.fixed == right.fixed
            && left.has_pinned_memory == right.has_pinned_memory
            && left.is_placed == right.is_placed
    };
    (0..problem.vms.len()).map(|vm| (0..vm).rev().find(|&before| is_equal(before, vm))).collect()
}

impl Tree<'_> {
    /// Search the tree. Afterwards, no choice costs less than the bound of the best one, nor than the best one. Returns
    /// the multipliers of the root.
    fn search(&mut self, multipliers: &Multipliers) -> Multipliers {
        let (mut root, mut multipliers) = self.bound(multipliers, MAX_ROOT_STEPS);
        if self.is_left_out(root.bound) {
            return multipliers;
        }
        self.leave_out_choices(&root, &multipliers);
        // The steps stall where many machines are equal.
        if let Some(best) = self.plan.best_multipliers(self.cost_tolerance) {
            let relaxed = self.plan.relax(&best);
            if relaxed.bound > root.bound {
                (root, multipliers) = (relaxed, best);
                if self.is_left_out(root.bound) {
                    return multipliers;
                }
                self.leave_out_choices(&root, &multipliers);
            }
        }
        let mut path: Vec<Branch> = self.branch(&multipliers).into_iter().collect();
        while let Some(branch) = path.last_mut() {
            self.plan.reopen(branch.vm, &branch.totals);
            let next = branch.order.get(branch.next).copied();
            // All later choices have higher bounds.
            let Some((_, position)) = next.filter(|&(bound, _)| !self.is_left_out(bound)) else {
                path.pop();
                continue;
            };
            branch.next += 1;
            self.plan.assign(branch.vm, position);
            let deeper = self.branch(&branch.multipliers);
            path.extend(deeper);
        }
        multipliers
    }

    /// Whether a part of the tree with this bound is left out, because it holds no better plan, or for want of time.
    fn is_left_out(&mut self, bound: f64) -> bool {
        let avoidable = self.best.cost - self.unavoidable;
        let is_left_out =
            self.is_stopped || bound >= self.best.cost - (self.tolerance * avoidable).max(self.cost_tolerance);
        if is_left_out {
            self.best.bound = self.best.bound.min(bound);
        }
        is_left_out
    }

    /// Leave out the choices that lead to no better plan wherever they are in the tree.
    fn leave_out_choices(&mut self, root: &Relaxation, multipliers: &Multipliers) {
        let open: Vec<usize> = self.plan.open_machines().collect();
        for vm in open {
            let mut choices = std::mem::take(&mut self.plan.choices[vm]);
            choices.retain(|choice| {
                // The cheapest one has exactly the bound of the root, and so stays.
                let loss = self.plan.value(choice, multipliers) - root.values[vm].0;
                !self.is_left_out(root.bound + loss)
            });
            self.plan.choices[vm] = choices;
        }
    }

    /// The best bound within so many steps of the multipliers, which begin with these. Plans found on the way count.
    fn bound(&mut self, multipliers: &Multipliers, max_steps: usize) -> (Relaxation, Multipliers) {
        let mut ascent = Ascent::new(&self.plan, multipliers);
        self.note_completion(&ascent.last);
        for _ in 0..max_steps {
            self.is_stopped = self.is_stopped || (self.is_due)();
            let is_done = self.is_stopped || ascent.best.bound >= self.best.cost - self.cost_tolerance;
            if is_done || !ascent.step(&self.plan, self.best.cost, self.cost_tolerance) {
                break;
            }
            self.note_completion(&ascent.last);
        }
        (ascent.best, ascent.multipliers)
    }

    fn note_completion(&mut self, relaxed: &Relaxation) {
        let (chosen, cost) = self.plan.complete(relaxed);
        if cost < self.best.cost - 1e-6 * self.cost_tolerance {
            self.best.chosen = chosen;
            self.best.cost = cost;
        }
    }

    /// Begin a node of the tree; `None` if no better plan is below it.
    fn branch(&mut self, multipliers: &Multipliers) -> Option<Branch> {
        let (relaxed, multipliers) = self.bound(multipliers, MAX_STEPS);
        if self.is_left_out(relaxed.bound) {
            return None;
        }
        let regret = |vm: usize| relaxed.values[vm].1 - relaxed.values[vm].0;
        let by_regret =
            |left: &usize, right: &usize| regret(*left).total_cmp(&regret(*right)).then_with(|| right.cmp(left));
        let mut vm = self.plan.open_machines().max_by(by_regret)?;
        let mut least = 0;
        while let Some(before) = self.equal_before[vm] {
            if let Some(position) = self.plan.assigned[before] {
                least = position;
                break;
            }
            vm = before;
        }
        let value = |position: usize| self.plan.value(&self.plan.choices[vm][position], &multipliers);
        let bound = |position: usize| relaxed.bound + (value(position) - relaxed.values[vm].0);
        let mut order: Vec<(f64, usize)> =
            (least..self.plan.choices[vm].len()).map(|position| (bound(position), position)).collect();
        order.sort_by(|left, right| left.0.total_cmp(&right.0));
        Some(Branch { vm, order, next: 0, multipliers, totals: self.plan.totals() })
    }
}
