/*
 * Compares the flow along a line with exact solutions of Riemann problems: one gas, two gases, and a liquid that
 * expands into a gas. Errors must be small, decrease with the cell width as in a scheme of first order, and leave one
 * cell with two materials. Prints a line for each problem, and exits with 1 if a check fails.
 *
 * Exact: E. F. Toro, Riemann Solvers and Numerical Methods for Fluid Dynamics, chapter 4, with p + pi in the place of
 * p, for stiffened gases.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#include "physics.hpp"

#include <array>

namespace {

struct State {
    int material;
    double rho, velocity, pressure;

    const Material &of() const { return kMaterials[material]; }
    double head() const { return pressure + of().pi; }
    double sound() const { return std::sqrt(of().gamma * head() / rho); }
};

/* Two states at rest on both sides of 0.5, and the time of the comparison. */
struct Problem {
    const char *name;
    State left, right;
    double end;
};

constexpr Problem kProblems[] = {
    { "one gas", { 0, 1, 0, 1 }, { 0, 0.125, 0, 0.1 }, 0.15 },
    { "two gases", { 0, 1, 0, 5 }, { 1, 0.138, 0, 1 }, 0.1 },
    { "liquid and gas", { 3, 10, 0, 20 }, { 0, 1, 0, 1 }, 0.1 },
};

/* The velocity change by a wave into a state, for a pressure behind the wave (Toro, 4.2). */
double change(const State &state, double pressure)
{
    double gamma = state.of().gamma, ratio = (pressure + state.of().pi) / state.head();
    if (pressure > state.pressure) {
        double a = 2 / ((gamma + 1) * state.rho), b = (gamma - 1) / (gamma + 1) * state.head();
        return (pressure - state.pressure) * std::sqrt(a / (pressure + state.of().pi + b));
    }
    return 2 * state.sound() / (gamma - 1) * (std::pow(ratio, (gamma - 1) / (2 * gamma)) - 1);
}

/* Density, velocity and pressure at a speed x / t (Toro, 4.5). */
std::array<double, 3> exact(const Problem &problem, double speed)
{
    double low = 1e-6, high = 1e4;
    for (int halving = 0; halving < 200; halving++) {
        double middle = 0.5 * (low + high);
        bool above = change(problem.left, middle) + change(problem.right, middle) > 0;
        (above ? high : low) = middle;
    }
    double pressure = low;
    double velocity = 0.5 * (change(problem.right, pressure) - change(problem.left, pressure));
    /* From here on as if the wave ran to the left. */
    bool is_left = speed < velocity;
    const State &state = is_left ? problem.left : problem.right;
    double sign = is_left ? 1 : -1, at = sign * speed, behind = sign * velocity;
    double gamma = state.of().gamma, ratio = (pressure + state.of().pi) / state.head(), sound = state.sound();
    if (pressure > state.pressure) {
        double shock = -sound * std::sqrt((gamma + 1) / (2 * gamma) * ratio + (gamma - 1) / (2 * gamma));
        double part = (gamma - 1) / (gamma + 1);
        if (at < shock)
            return { state.rho, state.velocity, state.pressure };
        return { state.rho * (ratio + part) / (part * ratio + 1), velocity, pressure };
    }
    double sound_behind = sound * std::pow(ratio, (gamma - 1) / (2 * gamma));
    if (at < -sound)
        return { state.rho, state.velocity, state.pressure };
    if (at > behind - sound_behind)
        return { state.rho * std::pow(ratio, 1 / gamma), velocity, pressure };
    double within = 2 / (gamma + 1) * (sound + at), slower = 2 / (gamma + 1) * (sound - (gamma - 1) / 2 * at) / sound;
    return { state.rho * std::pow(slower, 2 / (gamma - 1)), sign * within,
         state.head() * std::pow(slower, 2 * gamma / (gamma - 1)) - state.of().pi };
}

struct Outcome {
    double error[3]; /* of density, velocity and pressure: sums of differences over sums of values */
    int mixed;       /* cells with both materials */
};

/* Compute a problem with so many cells, in segments as long as a block. */
Outcome compute(const Problem &problem, int cells)
{
    struct Cell {
        double volume[2], mass[2], momentum, energy;
    };
    /* Two indices of one material, if it is on both sides. */
    const State *sides[2] = { &problem.left, &problem.right };
    bool one = problem.left.material == problem.right.material;
    std::vector<Cell> now(cells), next;
    for (int i = 0; i < cells; i++) {
        int side = i >= cells / 2, place = one ? 0 : side;
        now[i] = {};
        now[i].volume[place] = 1;
        now[i].mass[place] = sides[side]->rho;
        now[i].energy = sides[side]->of().energy(sides[side]->pressure);
    }
    Instrument instrument;
    Line line;
    double width = 1.0 / cells, fastest = 0;
    for (const State *side : sides)
        fastest = std::max(fastest, side->sound());
    /* Waves of the solution are faster than those of the initial state. */
    fastest *= 2;
    for (double time = 0; time < problem.end;) {
        double step = std::min(0.4 * width / fastest, problem.end - time);
        line.fastest = 0;
        next = now;
        for (int first = 0; first < cells; first += kSide) {
            line.cells = kWide;
            line.active = one ? 1 : 2;
            for (int i = 0; i < kWide; i++) {
                const Cell &cell = now[std::min(std::max(first + i - kGhosts, 0), cells - 1)];
                for (int a = 0; a < line.active; a++) {
                    line.material[a] = sides[a]->material;
                    line.volume[a][i] = cell.volume[a];
                    line.mass[a][i] = cell.mass[a];
                }
                line.momentum[0][i] = cell.momentum;
                line.momentum[1][i] = line.momentum[2][i] = 0;
                line.energy[i] = cell.energy;
            }
            line.solve(step / width, instrument);
            line.update(step / width, instrument);
            for (int i = 0; i < kSide; i++) {
                Cell &cell = next[first + i];
                for (int a = 0; a < line.active; a++) {
                    cell.volume[a] = line.volume[a][i + kGhosts];
                    cell.mass[a] = line.mass[a][i + kGhosts];
                }
                cell.momentum = line.momentum[0][i + kGhosts];
                cell.energy = line.energy[i + kGhosts];
            }
        }
        now.swap(next);
        fastest = line.fastest;
        time += step;
    }
    Outcome outcome = {};
    double norm[3] = {};
    for (int i = 0; i < cells; i++) {
        const Cell &cell = now[i];
        double rho = cell.mass[0] + cell.mass[1], xi = 0, stiff = 0;
        for (int a = 0; a < 2; a++) {
            xi += cell.volume[a] * sides[a]->of().xi();
            stiff += cell.volume[a] * sides[a]->of().energy(0);
        }
        double velocity = cell.momentum / rho;
        double found[3] = { rho, velocity, (cell.energy - 0.5 * cell.momentum * velocity - stiff) / xi };
        std::array<double, 3> wanted = exact(problem, ((i + 0.5) * width - 0.5) / problem.end);
        for (int q = 0; q < 3; q++) {
            outcome.error[q] += std::fabs(found[q] - wanted[q]);
            norm[q] += std::fabs(wanted[q]);
        }
        outcome.mixed += cell.volume[0] > 0 && cell.volume[1] > 0;
    }
    for (int q = 0; q < 3; q++)
        outcome.error[q] /= norm[q];
    return outcome;
}

} // namespace

int main()
{
    bool wrong = false;
    for (const Problem &problem : kProblems) {
        Outcome coarse = compute(problem, 256), fine = compute(problem, 1024);
        printf("%s: density %.4f %.4f, velocity %.4f %.4f, pressure %.4f %.4f, mixed cells %d\n", problem.name,
               coarse.error[0], fine.error[0], coarse.error[1], fine.error[1], coarse.error[2], fine.error[2],
               fine.mixed);
        /* Of order 1/2 at contacts and 1 at shocks: a quarter of the width leaves half of the error, or less. */
        for (int q = 0; q < 3; q++)
            wrong |= !(fine.error[q] < 0.05 && fine.error[q] < 0.55 * coarse.error[q]);
        wrong |= fine.mixed > 1;
    }
    return wrong;
}
