/*
 * Compressible flow of several immiscible materials, along one line of cells.
 *
 * Model: five equations for N materials (G. Allaire, S. Clerc, S. Kokh, J. Comput. Phys. 181, 577-616, 2002). A cell
 * has, for each material k, its volume fraction alpha_k and partial density m_k = alpha_k rho_k, and for the mixture
 * its momentum and total energy, per volume. Each material is a stiffened gas, p = (gamma_k - 1) rho_k e_k - gamma_k
 * pi_k, and all materials in a cell have the same pressure and velocity.
 *
 * Scheme: one direction at a time, a Lagrangian step by an acoustic Riemann solver and a remap, both written as one
 * difference of fluxes (S. Kokh, F. Lagoutiere, J. Comput. Phys. 229, 2773-2809, 2010). The remap takes material from
 * the upwind cell, in proportions as near to those of the downwind cell as stability permits (B. Despres, F.
 * Lagoutiere, J. Sci. Comput. 16, 479-524, 2001), for any number of materials (S. Jaouen, F. Lagoutiere, Comput.
 * Methods Appl. Mech. Engrg. 196, 3127-3140, 2007). So interfaces stay one or two cells wide, and cells beside them
 * contain exactly one material: its alpha is 1 there, and exactly 0 for the others. For shocks the scheme is of first
 * order.
 *
 * Units: density of air 1, pressure at rest 1, the box is 1 wide.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#pragma once

#include "comm.hpp"

#include <algorithm>
#include <cmath>
#include <ctime>

constexpr int kMostMaterials = 8;
constexpr int kSide = 16, kGhosts = 2, kWide = kSide + 2 * kGhosts;

struct Material {
    const char *name;
    double gamma, pi, density; /* density: at rest */

    /* 1 / (gamma - 1), the weight in averages of mixtures. */
    double xi() const { return 1 / (gamma - 1); }
    /* Internal energy per volume at a pressure. */
    double energy(double pressure) const { return (pressure + gamma * pi) * xi(); }
};

/*
 * Gases have real values. Liquids and metal have a pi and a density that are scaled down until the speed of sound is
 * about the same in all materials, because all use one time step.
 */
constexpr Material kMaterials[kMostMaterials] = {
    { "air", 1.4, 0, 1 },       { "helium", 1.667, 0, 0.138 }, { "sf6", 1.094, 0, 5.1 },    { "water", 4.4, 30, 10 },
    { "oil", 2.8, 20, 6 },      { "metal", 3, 100, 20 },       { "argon", 1.667, 0, 1.38 }, { "co2", 1.29, 0, 1.53 },
};

/*
 * A smaller fraction of a cell's volume is a residue of material that moved on, and is removed. Its mass moves to the
 * cell of the line that has most of the material. If no cell has enough of it, only a residue of rounding is removed,
 * with its mass.
 */
constexpr double kResidue = 1e-10, kHome = 1e-3, kRounding = 1e-15;

/*
 * Simulates a build with -finstrument-functions: two readings of the clock and an entry in a table for each call, with
 * one call per cell and stage. Computes nothing.
 */
struct Instrument {
    bool on = false;
    uint64_t calls[4] = {}, nanoseconds[4] = {};

    __attribute__((noinline)) void call(int stage)
    {
        timespec entered, left;
        clock_gettime(CLOCK_MONOTONIC, &entered);
        calls[stage]++;
        clock_gettime(CLOCK_MONOTONIC, &left);
        nanoseconds[stage] += (left.tv_sec - entered.tv_sec) * 1000000000 + left.tv_nsec - entered.tv_nsec;
    }
};

/*
 * A line of `cells` cells, the first and the last two of which are ghosts, and the fluxes through its faces. Face f
 * lies between cells f and f + 1; faces 1 to cells - 3 have fluxes. Only materials that are present in the line take
 * part. Momentum 0 is the one along the line.
 */
struct Line {
    int cells = kWide, active = 0, material[kMostMaterials];
    double volume[kMostMaterials][kWide], mass[kMostMaterials][kWide], momentum[3][kWide], energy[kWide];

    /* Per area and time; for volume fractions, the velocity times the fraction that passes. */
    struct {
        double volume[kMostMaterials][kWide], mass[kMostMaterials][kWide], momentum[3][kWide], energy[kWide];
        double velocity[kWide];
    } flux;

    double fastest = 0; /* speed of a wave through any cell that was seen */
    double dropped = 0; /* mass of residues that found no cell to go to */

    void solve(double lambda, Instrument &instrument);
    void update(double lambda, Instrument &instrument);

private:
    double rho_[kWide], velocity_[3][kWide], xi_[kWide], stiff_[kWide], pressure_[kWide], impedance_[kWide];
    double star_velocity_[kWide], star_pressure_[kWide], stretch_[kWide];
    double moved_velocity_[kWide], moved_pressure_[kWide];

    void states(double lambda, Instrument &instrument);
    void pass(int face, int up, int down, int behind, double lambda);
    void tidy(int cell, const long *homes);
};

/*
 * Pressures are rounded to a multiple of 2^-38 of the pressure at rest. So materials in equilibrium, whose pressures
 * result from different sums, have bit-identical pressures, and gas at rest stays exactly at rest. Adding a number
 * whose last place is that multiple rounds to it.
 */
inline double rounded(double pressure)
{
    constexpr double kLastPlace = 24576; /* 1.5 * 2^14 */
    return (pressure + kLastPlace) - kLastPlace;
}

/*
 * Pressure and rho c^2 of a mixture: rho e = sum alpha_k (p + gamma_k pi_k) xi_k, and xi rho c^2 = sum alpha_k xi_k
 * rho_k c_k^2 with rho_k c_k^2 = gamma_k (p + pi_k) (Allaire et al., sections 2.2 and 4.1).
 */
inline void Line::states(double lambda, Instrument &instrument)
{
    for (int i = 0; i < cells; i++) {
        double rho = 0, xi = 0, stiff = 0;
        for (int a = 0; a < active; a++) {
            const Material &k = kMaterials[material[a]];
            rho += mass[a][i];
            xi += volume[a][i] * k.xi();
            stiff += volume[a][i] * (k.xi() * k.gamma * k.pi);
        }
        double kinetic = 0;
        for (int d = 0; d < 3; d++) {
            velocity_[d][i] = momentum[d][i] / rho;
            kinetic += 0.5 * momentum[d][i] * velocity_[d][i];
        }
        double pressure = rounded((energy[i] - kinetic - stiff) / xi);
        double stiffness = 0;
        for (int a = 0; a < active; a++) {
            const Material &k = kMaterials[material[a]];
            stiffness += volume[a][i] * (k.xi() * k.gamma) * (pressure + k.pi);
        }
        stiffness /= xi;
        if (!(rho > 0 && stiffness > 0))
            fail("density %g, pressure %g: there is no sound in that", rho, pressure);
        double sound = std::sqrt(stiffness / rho);
        double wave = std::fabs(velocity_[0][i]) + sound;
        if (!(lambda * wave < 0.95))
            fail("a wave crosses a cell within a step: lower --cfl");
        fastest = std::max(fastest, wave);
        rho_[i] = rho;
        xi_[i] = xi;
        stiff_[i] = stiff;
        pressure_[i] = pressure;
        impedance_[i] = rho * sound;
        if (instrument.on)
            instrument.call(0);
    }
}

/* Fluxes through the faces of a line; lambda is the time step over the width of a cell. */
inline void Line::solve(double lambda, Instrument &instrument)
{
    states(lambda, instrument);
    for (int f = 0; f + 1 < cells; f++) {
        /* Acoustic: two waves, with the impedances of both sides (Kokh and Lagoutiere, 3.1, use one for both). */
        double left = impedance_[f], right = impedance_[f + 1], both = left + right;
        double jump = pressure_[f + 1] - pressure_[f], closing = velocity_[0][f] - velocity_[0][f + 1];
        /* This form gives exactly 0 at a wall, where both sides mirror each other. */
        star_velocity_[f] = (left * velocity_[0][f] + right * velocity_[0][f + 1] - jump) / both;
        /* This form gives exactly the pressure of both sides at rest. */
        star_pressure_[f] = pressure_[f] + left * (jump + right * closing) / both;
        if (instrument.on)
            instrument.call(1);
    }
    for (int i = 1; i + 1 < cells; i++) {
        double opening = star_velocity_[i] - star_velocity_[i - 1];
        double push = star_pressure_[i] - star_pressure_[i - 1];
        double work = star_pressure_[i] * star_velocity_[i] - star_pressure_[i - 1] * star_velocity_[i - 1];
        stretch_[i] = 1 + lambda * opening;
        moved_velocity_[i] = (momentum[0][i] - lambda * push) / rho_[i];
        double squares = moved_velocity_[i] * moved_velocity_[i] + velocity_[1][i] * velocity_[1][i] +
                 velocity_[2][i] * velocity_[2][i];
        double internal = (energy[i] - lambda * work - 0.5 * rho_[i] * squares) / stretch_[i];
        moved_pressure_[i] = (internal - stiff_[i]) / xi_[i];
    }
    for (int f = 1; f + 2 < cells; f++) {
        bool rightward = star_velocity_[f] > 0;
        if (star_velocity_[f] == 0) {
            for (int a = 0; a < active; a++)
                flux.volume[a][f] = flux.mass[a][f] = 0;
            flux.momentum[0][f] = star_pressure_[f];
            flux.momentum[1][f] = flux.momentum[2][f] = flux.energy[f] = flux.velocity[f] = 0;
        } else {
            pass(f, rightward ? f : f + 1, rightward ? f + 1 : f, rightward ? f - 1 : f + 2, lambda);
        }
        if (instrument.on)
            instrument.call(2);
    }
}

/*
 * The flux through a face from the cell `up` to the cell `down`; `behind` is the neighbor of `up` on its other side.
 *
 * The fraction of each material lies between those of both cells. It is also limited so that the next fraction of `up`
 * lies between those of `up` and `behind` for any inflow from there (Kokh and Lagoutiere, section 3.3). Within these
 * limits it is as near to that of `down` as possible, so that the others can add up to 1 (Jaouen and Lagoutiere,
 * section 4).
 */
inline void Line::pass(int face, int up, int down, int behind, double lambda)
{
    double speed = star_velocity_[face], out = lambda * std::fabs(speed);
    double in = lambda * (up == face ? star_velocity_[face - 1] : -star_velocity_[face + 1]);
    double share[kMostMaterials], least[kMostMaterials], most[kMostMaterials];
    bool equal = true;
    for (int a = 0; a < active; a++)
        equal &= volume[a][up] == volume[a][down];
    if (equal || in < 0) {
        /* A cell that flows out on both sides keeps its proportions. */
        for (int a = 0; a < active; a++)
            share[a] = volume[a][up];
    } else {
        double least_after[kMostMaterials + 1], most_after[kMostMaterials + 1], sum = 0;
        /* Finite, because a material without any inflow is multiplied by 0. */
        double room = std::min((1 - in) / out, 1e300);
        least_after[active] = most_after[active] = 0;
        for (int a = active - 1; a >= 0; a--) {
            double own = volume[a][up], theirs = volume[a][down], before = volume[a][behind];
            least[a] = std::max(std::min(own, theirs), own + (own - std::max(own, before)) * room);
            most[a] = std::min(std::max(own, theirs), own + (own - std::min(own, before)) * room);
            least_after[a] = least_after[a + 1] + least[a];
            most_after[a] = most_after[a + 1] + most[a];
        }
        for (int a = 0; a < active; a++) {
            double low = 1 - sum - most_after[a + 1], high = 1 - sum - least_after[a + 1];
            double near = std::min(std::max(volume[a][down], low), high);
            share[a] = std::min(std::max(near, least[a]), most[a]);
            sum += share[a];
        }
    }
    double rho = 0, internal = 0;
    for (int a = 0; a < active; a++) {
        double density = share[a] == 0 ? 0 : share[a] * (mass[a][up] / volume[a][up]) / stretch_[up];
        rho += density;
        internal += share[a] * kMaterials[material[a]].energy(moved_pressure_[up]);
        flux.volume[a][face] = speed * share[a];
        flux.mass[a][face] = speed * density;
    }
    double velocity[3] = { moved_velocity_[up], velocity_[1][up], velocity_[2][up] }, squares = 0;
    for (int d = 0; d < 3; d++) {
        flux.momentum[d][face] = speed * rho * velocity[d];
        squares += velocity[d] * velocity[d];
    }
    flux.momentum[0][face] += star_pressure_[face];
    flux.energy[face] = speed * (internal + 0.5 * rho * squares + star_pressure_[face]);
    flux.velocity[face] = speed;
}

/* Advance the cells of a line, without ghosts, by its fluxes. */
inline void Line::update(double lambda, Instrument &instrument)
{
    for (int i = kGhosts; i + kGhosts < cells; i++) {
        for (int a = 0; a < active; a++) {
            double own = volume[a][i];
            double right = flux.volume[a][i] - own * flux.velocity[i];
            double left = flux.volume[a][i - 1] - own * flux.velocity[i - 1];
            volume[a][i] -= lambda * (right - left);
            mass[a][i] -= lambda * (flux.mass[a][i] - flux.mass[a][i - 1]);
        }
        for (int d = 0; d < 3; d++)
            momentum[d][i] -= lambda * (flux.momentum[d][i] - flux.momentum[d][i - 1]);
        energy[i] -= lambda * (flux.energy[i] - flux.energy[i - 1]);
        if (instrument.on)
            instrument.call(3);
    }
    long homes[kMostMaterials];
    for (int a = 0; a < active; a++) {
        homes[a] = std::max_element(volume[a] + kGhosts, volume[a] + cells - kGhosts) - volume[a];
        if (volume[a][homes[a]] < kHome)
            homes[a] = -1;
    }
    for (int i = kGhosts; i + kGhosts < cells; i++)
        tidy(i, homes);
}

/* Remove residues from a cell, and scale fractions so that they add up to 1. */
inline void Line::tidy(int i, const long *homes)
{
    int largest = 0, present = 0;
    for (int a = 0; a < active; a++) {
        if (volume[a][i] < (homes[a] < 0 ? kRounding : kResidue)) {
            if (homes[a] < 0)
                dropped += std::fabs(mass[a][i]);
            else
                mass[a][homes[a]] += mass[a][i];
            volume[a][i] = mass[a][i] = 0;
            continue;
        }
        if (!(mass[a][i] > 0))
            fail("a cell holds %g of the volume and %g of mass of %s", volume[a][i], mass[a][i],
                 kMaterials[material[a]].name);
        present++;
        largest = volume[a][i] > volume[largest][i] ? a : largest;
    }
    double others = 0;
    for (int a = 0; a < active; a++)
        others += a == largest ? 0 : volume[a][i];
    if (present == 0 || std::fabs(volume[largest][i] + others - 1) > kMostMaterials * kResidue)
        fail("volume fractions add up to 1 + %g", volume[largest][i] + others - 1);
    volume[largest][i] = 1 - others;
}
