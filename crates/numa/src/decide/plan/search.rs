//! A first plan: machines one after the other, the heaviest first, then exchanges.

use super::{Column, Load, LoadCosts, PlacementProblem};

/// Rounds of exchanges at most.
const MAX_ROUNDS: usize = 20;

/// Columns of a machine that are tried in an exchange of two machines.
const MAX_EXCHANGED_COLUMNS: usize = 12;

/// The load of each node.
struct Loads<'p> {
    problem: &'p PlacementProblem,
    costs: LoadCosts,
    loads: Vec<Load>,
}

impl Loads<'_> {
    fn add(&mut self, column: &Column, factor: f64) {
        for (load, &added) in self.loads.iter_mut().zip(&column.load) {
            *load = load.plus(added, factor);
        }
    }

    /// The cost of the load of nodes if these columns were added.
    fn load_cost_with(&self, added: &[&Column]) -> f64 {
        let nodes = self.problem.nodes.iter().zip(&self.loads).enumerate();
        let cost = |(position, (node, load)): (usize, (_, &Load))| {
            let sum = added.iter().fold(*load, |sum, column| sum.plus(column.load[position], 1.0));
            self.costs.of_node(sum, node)
        };
        nodes.map(cost).sum()
    }

    /// The cheapest of a machine's columns, with the load that it brings.
    fn cheapest(&self, columns: &[Column]) -> usize {
        let cost = |column: &Column| column.cost + self.load_cost_with(&[column]);
        let costs = columns.iter().map(cost).enumerate();
        costs.min_by(|left, right| left.1.total_cmp(&right.1)).map_or(0, |(position, _)| position)
    }
}

/// The position of the chosen column of each machine. Exchanges end when `is_due`.
pub(super) fn search(
    problem: &PlacementProblem,
    columns: &[Vec<Column>],
    costs: LoadCosts,
    is_due: &mut dyn FnMut() -> bool,
) -> Vec<usize> {
    let mut loads = Loads { problem, costs, loads: vec![Load::default(); problem.nodes.len()] };
    let mut order: Vec<usize> = (0..columns.len()).collect();
    let weight = |vm: usize| problem.vms[vm].parts.iter().map(|part| part.hotness * part.total_pages()).sum::<f64>();
    // Machines without a choice first, then those whose remote reads cost most.
    order.sort_by(|&left, &right| {
        let fixed = |vm: usize| columns[vm].len() > 1;
        fixed(left).cmp(&fixed(right)).then(weight(right).total_cmp(&weight(left)))
    });
    let mut chosen = vec![0; columns.len()];
    for vm in order {
        chosen[vm] = loads.cheapest(&columns[vm]);
        loads.add(&columns[vm][chosen[vm]], 1.0);
    }
    for _ in 0..MAX_ROUNDS {
        if is_due() {
            break;
        }
        let improved =
            improve_single(&mut loads, columns, &mut chosen) | improve_pairs(&mut loads, columns, &mut chosen, is_due);
        if !improved {
            break;
        }
    }
    chosen
}

fn improve_single(loads: &mut Loads<'_>, columns: &[Vec<Column>], chosen: &mut [usize]) -> bool {
    let mut improved = false;
    for (columns, chosen) in columns.iter().zip(chosen) {
        loads.add(&columns[*chosen], -1.0);
        let cost = |position: usize| columns[position].cost + loads.load_cost_with(&[&columns[position]]);
        let cheapest = loads.cheapest(columns);
        if cost(cheapest) < cost(*chosen) - 1e-6 * loads.problem.cost_tolerance() {
            *chosen = cheapest;
            improved = true;
        }
        loads.add(&columns[*chosen], 1.0);
    }
    improved
}

fn improve_pairs(
    loads: &mut Loads<'_>,
    columns: &[Vec<Column>],
    chosen: &mut [usize],
    is_due: &mut dyn FnMut() -> bool,
) -> bool {
    let mut improved = false;
    for first in 0..columns.len() {
        if is_due() {
            return improved;
        }
        for second in first + 1..columns.len() {
            loads.add(&columns[first][chosen[first]], -1.0);
            loads.add(&columns[second][chosen[second]], -1.0);
            let cost = |left: usize, right: usize| {
                let (left, right) = (&columns[first][left], &columns[second][right]);
                left.cost + right.cost + loads.load_cost_with(&[left, right])
            };
            let mut best = (chosen[first], chosen[second]);
            let mut best_cost = cost(best.0, best.1) - 1e-6 * loads.problem.cost_tolerance();
            for left in 0..columns[first].len().min(MAX_EXCHANGED_COLUMNS) {
                for right in 0..columns[second].len().min(MAX_EXCHANGED_COLUMNS) {
                    if columns[first][left].cost + columns[second][right].cost < best_cost
                        && cost(left, right) < best_cost
                    {
                        best = (left, right);
                        best_cost = cost(left, right);
                        improved = true;
                    }
                }
            }
            (chosen[first], chosen[second]) = best;
            loads.add(&columns[first][best.0], 1.0);
            loads.add(&columns[second][best.1], 1.0);
        }
    }
    improved
}
