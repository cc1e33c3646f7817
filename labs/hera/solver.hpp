/*
 * The blocks of one rank, and their operations: steps, regridding, and sums of the conserved quantities.
 *
 * A step is three sweeps, one for each direction, alternately forwards and backwards (as G. Strang, SIAM J. Numer.
 * Anal. 5, 1968, for two). Before a sweep each block gets the ghost cells of that direction: copies, averages of a
 * finer neighbor's cells, or a coarser one's cells as they are. Where levels meet, both sides use the fluxes of the
 * finer side (M. J. Berger, P. Colella, J. Comput. Phys. 82, 64-84, 1989). All levels take the same time step, so
 * fluxes of the finer side are computed first, and the coarser side uses them directly, without a later correction.
 * Refined cells take the values of the coarse cell. That is as accurate as the scheme, and keeps mixtures in
 * equilibrium and pure cells pure.
 *
 * Every block is computed from the same numbers in the same order on any rank, maxima do not depend on order, and sums
 * are added in the order of the curve. So results are bit-identical for any number of ranks, and in all modes.
 *
 * Besides the conserved quantities, a block has fields that follow from them, as codes keep them for output and for
 * other physics: the state of the mixture, its slopes and curvatures. They are computed at the end of each step.
 *
 * Writes: arrays of materials that are absent from a line of cells are left alone, as codes with many materials do.
 * `Writes` has two more modes: all arrays, as in a code without that check, and only changed values.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#pragma once

#include "forest.hpp"
#include "memory.hpp"
#include "physics.hpp"

#include <map>
#include <memory>
#include <utility>

enum class Writes { all, present, changed };

struct Problem {
    int materials = 6, roots = 4, levels = 2, spheres = 3;
    double cfl = 0.4, mach = 3;
    bool periodic = false, slow = false;
    Writes writes = Writes::present;
};

/* The state of the mixture, which follows from the conserved quantities. */
enum State { kDensity, kPressure, kVelocity, kSound = kVelocity + 3, kTemperature, kInternal, kStates };
/* Fields: each state, its slopes in three directions, and the sum of its curvatures. */
constexpr int kFields = kStates * 5;
/* Fields have no ghosts. */
constexpr int kInside[3] = { 1, kSide, kSide * kSide }, kCells = kSide * kSide * kSide;

/* Amplitude of the initial velocities (the speed of sound in air is 1.2): nothing is exactly at rest. */
constexpr double kStir = 1e-3;

constexpr double kPi = 3.14159265358979323846;

/* Position of the shock at the start. */
constexpr double kShock = 0.16;

constexpr int kStride[3] = { 1, kWide, kWide * kWide };
/* Doubles of an array, in whole pages of up to 64 KiB: 8000 of them are cells and ghosts. */
constexpr size_t kLength = 8192;
static_assert(kWide * kWide * kWide <= kLength);

inline int place_of(int x, int y, int z)
{
    return x + y * kStride[1] + z * kStride[2];
}

/* A sum with compensated rounding (A. Neumaier, Z. Angew. Math. Mech. 54, 39-51, 1974). */
class Sum {
public:
    void add(double value)
    {
        double next = sum_ + value;
        carried_ += std::fabs(sum_) >= std::fabs(value) ? (sum_ - next) + value : (value - next) + sum_;
        sum_ = next;
    }
    double value() const { return sum_ + carried_; }

private:
    double sum_ = 0, carried_ = 0;
};

/* Totals of the whole box. */
struct Totals {
    double mass[kMostMaterials] = {}, energy = 0, momentum[3] = {};
    double unlike_one = 0; /* by how much the volume fractions of a cell differ from 1 in sum, at most */
    uint64_t checksum = 0; /* of all bits of all cells */
    double vorticity = 0; /* square of it, over the box */
    long cells = 0, pure = 0; /* pure: of one material */
};

/* A ball of one material in a shell of another. */
struct Ball {
    double centre[3], core, shell; /* core, shell: outer radii */
    int in_core, in_shell;
};

template <class Array> class Solver {
public:
    Forest forest;
    double fastest = 0;   /* wave that any rank's cells have had since this was last asked for */
    double dropped = 0;   /* mass that this rank has dropped as residues, of all materials */
    uint64_t updates = 0; /* of cells, by sweeps of this rank */

    Solver(const Problem &problem, Memory &memory, Comm &comm)
        : forest(problem.roots, problem.levels, problem.periodic, comm.size), problem_(problem), memory_(memory),
          comm_(comm), count_(problem.materials), quantities_(2 * problem.materials + 4)
    {
        instrument_.on = problem.slow;
        place_balls();
        for (int level = 0; level < problem.levels; level++) {
            blocks_.clear();
            for (int l = 0; l < static_cast<int>(forest.leaves.size()); l++)
                if (is_mine(l))
                    fill(forest.leaves[l], make(l));
            if (level + 1 < problem.levels)
                forest = forest.adapted(wanted_levels());
        }
        /* The speed of waves at the start. */
        derive();
        for (auto &[leaf, block] : blocks_)
            lines(*block, 0, [&](Line &line, int) { line.solve(0, instrument_); });
    }

    /* Maximum length of the next step: from the finest cells and the fastest wave of the last step. */
    double step_for(double fastest) const
    {
        return problem_.cfl / (fastest * (problem_.roots << forest.finest()) * kSide);
    }

    void step(double dt, bool backwards)
    {
        fastest = 0;
        for (int turn = 0; turn < 3; turn++) {
            int direction = backwards ? 2 - turn : turn;
            fill_ghosts(direction);
            match_fluxes(direction, dt);
            for (auto &[leaf, block] : blocks_)
                sweep(*block, direction, dt, width_of_cells(leaf));
        }
    }

    /* Compute the fields of all blocks from the conserved quantities. */
    void derive()
    {
        for (auto &[leaf, block] : blocks_)
            derive(*block, width_of_cells(leaf));
    }

    /* Release memory that has become zeros. */
    void release()
    {
        for (auto &[leaf, block] : blocks_)
            block->arrays.release(), block->fields.release();
    }

    /* Refine and coarsen, and move blocks to their new owners. Returns whether any block was refined or coarsened. */
    bool regrid()
    {
        Forest next = forest.adapted(wanted_levels());
        if (next == forest)
            return false;
        move_to(std::move(next));
        return true;
    }

    Totals totals();

private:
    struct Block {
        typename Array::Arrays arrays, fields;
        uint32_t interior = 0, ghosts[6] = {}; /* which materials are there */
        std::vector<double> finer[2]; /* fluxes of the finer neighbor on this side; empty without one */

        Block(Memory &memory, int quantities)
            : arrays(memory, quantities, kLength), fields(memory, kFields, kCells)
        {
        }
        uint32_t present(int direction) const { return interior | ghosts[2 * direction] | ghosts[2 * direction + 1]; }
    };

    /* A box of cells of a block, in array coordinates. */
    struct Box {
        int low[3], size[3];
    };

    Problem problem_;
    Memory &memory_;
    Comm &comm_;
    int count_, quantities_;
    std::map<int, std::unique_ptr<Block>> blocks_; /* of this rank, by leaf */
    std::vector<Ball> balls_;
    Instrument instrument_;
    Line line_;

    bool is_mine(int leaf) const { return forest.owner[leaf] == comm_.rank; }
    double width_of_cells(int leaf) const { return forest.width(forest.leaves[leaf]) / kSide; }
    int volume_of(int material) const { return material; }
    int mass_of(int material) const { return count_ + material; }
    int momentum_of(int direction) const { return 2 * count_ + direction; }
    int energy_of() const { return 2 * count_ + 3; }
    static int slope_of(int state, int direction) { return kStates + 4 * state + direction; }
    static int curvature_of(int state) { return kStates + 4 * state + 3; }

    Block &make(int leaf) { return *(blocks_[leaf] = std::make_unique<Block>(memory_, quantities_)); }

    void put(Array &array, int at, double value) const
    {
        if (problem_.writes != Writes::changed || bits_of(std::as_const(array)[at]) != bits_of(value))
            array[at] = value;
    }

    /*
     * Spheres of all materials but the first, at points of a sequence that spreads them evenly (M. Roberts, The
     * Unreasonable Effectiveness of Quasirandom Sequences, 2018).
     */
    void place_balls()
    {
        int others = count_ - 1;
        for (int b = 0; b < problem_.spheres && others > 0; b++) {
            Ball ball;
            /* Powers of the inverse of the real root of x^4 = x + 1. */
            constexpr double kStep[3] = { 0.8191725133961645, 0.6710436067037893, 0.5497004779019703 };
            for (int d = 0; d < 3; d++) {
                double place = 0.5 + kStep[d] * (b + 1);
                ball.centre[d] = 0.22 + 0.56 * (place - std::floor(place));
            }
            ball.shell = 0.08 + 0.01 * (b % 3);
            ball.core = 0.7 * ball.shell;
            ball.in_core = 1 + 2 * b % others;
            ball.in_shell = 1 + (2 * b + 1) % others;
            balls_.push_back(ball);
        }
    }

    static double distance(const double *a, const double *b)
    {
        double squares = 0;
        for (int d = 0; d < 3; d++)
            squares += (a[d] - b[d]) * (a[d] - b[d]);
        return std::sqrt(squares);
    }

    /* Later balls cover earlier ones. */
    int material_at(const double *place) const
    {
        for (size_t b = balls_.size(); b-- > 0;) {
            double from = distance(place, balls_[b].centre);
            if (from < balls_[b].shell)
                return from < balls_[b].core ? balls_[b].in_core : balls_[b].in_shell;
        }
        return 0;
    }

    /* The initial state: everything at rest at pressure 1, except for a shock in the air that moves to the right. */
    void fill(const Leaf &leaf, Block &block)
    {
        /* Behind the shock: L. D. Landau, E. M. Lifshitz, Fluid Mechanics, section 89 (Rankine and Hugoniot). */
        const Material &air = kMaterials[0];
        double squared = problem_.mach * problem_.mach, gamma = air.gamma;
        double shocked_density = air.density * (gamma + 1) * squared / ((gamma - 1) * squared + 2);
        double shocked_pressure = 1 + 2 * gamma / (gamma + 1) * (squared - 1);
        double speed = problem_.mach * std::sqrt(gamma / air.density) * (1 - air.density / shocked_density);

        constexpr int kSamples = 4;
        double cell = forest.width(leaf) / kSide;
        for (int z = 0; z < kSide; z++) {
            for (int y = 0; y < kSide; y++) {
                for (int x = 0; x < kSide; x++) {
                    int in[3] = { x, y, z }, at = place_of(x + kGhosts, y + kGhosts, z + kGhosts);
                    double low[3], centre[3];
                    for (int d = 0; d < 3; d++) {
                        low[d] = forest.width(leaf) * leaf.at[d] + cell * in[d];
                        centre[d] = low[d] + 0.5 * cell;
                    }
                    int samples[kMostMaterials] = {};
                    bool near = std::any_of(balls_.begin(), balls_.end(), [&](const Ball &ball) {
                        double from = distance(centre, ball.centre);
                        return std::fabs(from - ball.shell) < cell || std::fabs(from - ball.core) < cell;
                    });
                    if (!near)
                        samples[material_at(centre)] = kSamples * kSamples * kSamples;
                    for (int s = 0; near && s < kSamples * kSamples * kSamples; s++) {
                        double place[3] = { low[0] + cell * (s % kSamples + 0.5) / kSamples,
                                    low[1] + cell * (s / kSamples % kSamples + 0.5) / kSamples,
                                    low[2] + cell * (s / kSamples / kSamples + 0.5) / kSamples };
                        samples[material_at(place)]++;
                    }
                    bool shocked = centre[0] < kShock && !near && material_at(centre) == 0;
                    double pressure = shocked ? shocked_pressure : 1, energy = 0, mass = 0;
                    for (int k = 0; k < count_; k++) {
                        if (samples[k] == 0)
                            continue;
                        double volume = samples[k] / double(kSamples * kSamples * kSamples);
                        double density = shocked ? shocked_density : kMaterials[k].density;
                        block.arrays[volume_of(k)][at] = volume;
                        block.arrays[mass_of(k)][at] = volume * density;
                        energy += volume * kMaterials[k].energy(pressure);
                        mass += volume * density;
                        block.interior |= 1u << k;
                    }
                    for (int d = 0; d < 3; d++) {
                        /* Three waves of different directions that fit into the box. */
                        double phase = centre[d] + 2 * centre[(d + 1) % 3] + 3 * centre[(d + 2) % 3];
                        double velocity = kStir * std::sin(2 * kPi * phase) + (shocked && d == 0 ? speed : 0);
                        block.arrays[momentum_of(d)][at] = mass * velocity;
                        energy += 0.5 * mass * velocity * velocity;
                    }
                    block.arrays[energy_of()][at] = energy;
                }
            }
        }
    }

    /*
     * Append a box of a block to a message: which materials are present, and all arrays but those of absent materials.
     * With `average`, the box has cells twice as wide, each the average of eight.
     */
    void pack(const Block &block, const Box &box, bool average, Message &message) const
    {
        uint32_t mask = block.interior;
        message.push_back(mask);
        for (int q = 0; q < quantities_; q++) {
            if (q < 2 * count_ && !(mask >> q % count_ & 1))
                continue;
            const Array &array = block.arrays[q];
            for (int z = 0; z < box.size[2]; z++) {
                for (int y = 0; y < box.size[1]; y++) {
                    for (int x = 0; x < box.size[0]; x++) {
                        if (!average) {
                            message.push_back(array[place_of(box.low[0] + x, box.low[1] + y, box.low[2] + z)]);
                            continue;
                        }
                        int at = place_of(box.low[0] + 2 * x, box.low[1] + 2 * y, box.low[2] + 2 * z);
                        double sum = 0;
                        for (int c = 0; c < 8; c++)
                            sum += array[at + place_of(c & 1, c >> 1 & 1, c >> 2)];
                        message.push_back(0.125 * sum);
                    }
                }
            }
        }
    }

    /*
     * Copy a box from a message; materials that were present only before (`stale`) become 0. With `inject`, the box has
     * cells half as wide: each received value fills eight. Returns the received materials.
     */
    uint32_t unpack(Block &block, const Box &box, bool inject, uint32_t stale, const double *&message) const
    {
        uint32_t mask = static_cast<uint32_t>(*message++);
        if (problem_.writes == Writes::all)
            stale = ~0u;
        for (int q = 0; q < quantities_; q++) {
            bool comes = q >= 2 * count_ || mask >> q % count_ & 1;
            if (!comes && !(stale >> q % count_ & 1))
                continue;
            Array &array = block.arrays[q];
            int times = inject ? 2 : 1;
            for (int z = 0; z < box.size[2]; z++) {
                for (int y = 0; y < box.size[1]; y++) {
                    for (int x = 0; x < box.size[0]; x++) {
                        double value = comes ? *message++ : 0;
                        int at = place_of(box.low[0] + times * x, box.low[1] + times * y, box.low[2] + times * z);
                        if (!inject) {
                            put(array, at, value);
                            continue;
                        }
                        for (int c = 0; c < 8; c++)
                            put(array, at + place_of(c & 1, c >> 1 & 1, c >> 2), value);
                    }
                }
            }
        }
        return mask;
    }

    /* The cells of one leaf that are ghosts of another, and their positions there. */
    struct Overlap {
        Box from, to;
        bool average, inject;
    };

    Overlap ghosts_between(int target, int source, int direction, int side) const
    {
        const Leaf &ours = forest.leaves[target], &theirs = forest.leaves[source];
        Overlap overlap;
        overlap.average = theirs.level > ours.level;
        overlap.inject = theirs.level < ours.level;
        int half = kSide / 2, layers = overlap.average ? 4 : overlap.inject ? 1 : 2;
        for (int d = 0; d < 3; d++) {
            if (d == direction) {
                overlap.from.low[d] = side ? kGhosts : kGhosts + kSide - layers;
                overlap.from.size[d] = overlap.inject ? 1 : kGhosts;
                overlap.to.low[d] = side ? kGhosts + kSide : 0;
                overlap.to.size[d] = overlap.from.size[d];
                continue;
            }
            bool equal = theirs.level == ours.level;
            overlap.from.size[d] = overlap.to.size[d] = equal ? kSide : half;
            overlap.from.low[d] = kGhosts + (overlap.inject ? half * (ours.at[d] & 1) : 0);
            overlap.to.low[d] = kGhosts + (overlap.average ? half * (theirs.at[d] & 1) : 0);
        }
        return overlap;
    }

    /* Walk over all pairs of leaves that meet at a face across a direction, in an order that all ranks share. */
    template <class Visit> void pairs(int direction, Visit visit) const
    {
        for (int target = 0; target < static_cast<int>(forest.leaves.size()); target++) {
            for (int side = 0; side < 2; side++) {
                const Neighbors &behind = forest.behind(target, direction, side);
                for (int n = 0; n < behind.count; n++)
                    visit(target, behind.leaf[n], side, behind.kind);
            }
        }
    }

    void fill_ghosts(int direction)
    {
        std::vector<Message> out(comm_.size);
        pairs(direction, [&](int target, int source, int side, int) {
            if (is_mine(source) && !is_mine(target)) {
                Overlap overlap = ghosts_between(target, source, direction, side);
                pack(*blocks_.at(source), overlap.from, overlap.average, out[forest.owner[target]]);
            }
        });
        std::vector<Message> in = comm_.exchange(out);
        std::vector<const double *> next(comm_.size);
        for (int r = 0; r < comm_.size; r++)
            next[r] = in[r].data();
        std::map<int, uint32_t> stale[2];
        for (auto &[leaf, block] : blocks_) {
            for (int side = 0; side < 2; side++) {
                stale[side][leaf] = block->ghosts[2 * direction + side];
                block->ghosts[2 * direction + side] = 0;
                if (forest.behind(leaf, direction, side).kind == Neighbors::wall)
                    mirror(*block, direction, side, stale[side][leaf]);
            }
        }
        Message own;
        pairs(direction, [&](int target, int source, int side, int) {
            if (!is_mine(target))
                return;
            Overlap overlap = ghosts_between(target, source, direction, side);
            Block &block = *blocks_.at(target);
            const double *&message = next[forest.owner[source]];
            if (is_mine(source)) {
                own.clear();
                pack(*blocks_.at(source), overlap.from, overlap.average, own);
                message = own.data();
            }
            uint32_t came = unpack(block, overlap.to, overlap.inject, stale[side][target], message);
            block.ghosts[2 * direction + side] |= came;
        });
    }

    /* Ghost cells behind a wall mirror the cells before it, with reversed velocity. */
    void mirror(Block &block, int direction, int side, uint32_t stale)
    {
        block.ghosts[2 * direction + side] = block.interior;
        uint32_t written = problem_.writes == Writes::all ? ~0u : block.interior | stale;
        int a = (direction + 1) % 3, b = (direction + 2) % 3;
        for (int q = 0; q < quantities_; q++) {
            if (q < 2 * count_ && !(written >> q % count_ & 1))
                continue;
            Array &array = block.arrays[q];
            for (int layer = 0; layer < kGhosts; layer++) {
                int ghost = side ? kGhosts + kSide + layer : kGhosts - 1 - layer;
                int before = side ? kGhosts + kSide - 1 - layer : kGhosts + layer;
                for (int at = 0; at < kSide * kSide; at++) {
                    int across = (kGhosts + at % kSide) * kStride[a] + (kGhosts + at / kSide) * kStride[b];
                    double value = std::as_const(array)[across + before * kStride[direction]];
                    /* Not the negative of it, which may be a negative zero. */
                    put(array, across + ghost * kStride[direction], q == momentum_of(direction) ? 0 - value : value);
                }
            }
        }
    }

    /* Load so many cells of a line, for the materials of `mask` that are present in them. */
    void load(const Block &block, int first, int cells, int direction, uint32_t mask, Line &line) const
    {
        int stride = kStride[direction];
        line.cells = cells;
        line.active = 0;
        for (int k = 0; k < count_; k++) {
            if (!(mask >> k & 1))
                continue;
            const Array &volume = block.arrays[volume_of(k)], &mass = block.arrays[mass_of(k)];
            bool present = false;
            for (int i = 0; i < cells; i++) {
                line.volume[line.active][i] = volume[first + i * stride];
                present |= line.volume[line.active][i] != 0;
            }
            if (!present)
                continue;
            for (int i = 0; i < cells; i++)
                line.mass[line.active][i] = mass[first + i * stride];
            line.material[line.active++] = k;
        }
        for (int d = 0; d < 3; d++) {
            const Array &momentum = block.arrays[momentum_of((direction + d) % 3)];
            for (int i = 0; i < cells; i++)
                line.momentum[d][i] = momentum[first + i * stride];
        }
        const Array &energy = block.arrays[energy_of()];
        for (int i = 0; i < cells; i++)
            line.energy[i] = energy[first + i * stride];
    }

    /* Call a function for each line of a block; `first` is its first ghost. */
    template <class Visit> void lines(Block &block, int direction, Visit visit)
    {
        int a = (direction + 1) % 3, b = (direction + 2) % 3;
        for (int at = 0; at < kSide * kSide; at++) {
            int first = (kGhosts + at % kSide) * kStride[a] + (kGhosts + at / kSide) * kStride[b];
            /* Without ghosts, which have no values yet. */
            bool whole = block.ghosts[2 * direction] != 0;
            int skip = whole ? 0 : kGhosts * kStride[direction];
            load(block, first + skip, whole ? kWide : kSide, direction, block.present(direction), line_);
            line_.fastest = line_.dropped = 0;
            visit(line_, first);
            fastest = std::max(fastest, line_.fastest);
        }
    }

    /* Quantities of a flux, in this order: fractions, masses, momentum along and across, energy, velocity. */
    int fluxes() const { return 2 * count_ + 5; }

    /*
     * Compute the fluxes of finer blocks through faces that they share with coarser ones, and send them there. Fluxes
     * depend on two cells on each side, and on the time step over the width of a cell.
     */
    void match_fluxes(int direction, double dt)
    {
        constexpr int kHalf = kSide / 2, kFaces = kHalf * kHalf;
        std::vector<Message> out(comm_.size);
        std::map<std::pair<int, int>, Message> own;
        pairs(direction, [&](int fine, int coarse, int side, int kind) {
            if (kind == Neighbors::coarser && is_mine(fine)) {
                Message &message = is_mine(coarse) ? own[{ fine, side }] : out[forest.owner[coarse]];
                pack_fluxes(*blocks_.at(fine), direction, side, dt / width_of_cells(fine), message);
            }
        });
        std::vector<Message> in = comm_.exchange(out);
        std::vector<const double *> next(comm_.size);
        for (int r = 0; r < comm_.size; r++)
            next[r] = in[r].data();
        for (auto &[leaf, block] : blocks_)
            block->finer[0].clear(), block->finer[1].clear();
        pairs(direction, [&](int fine, int coarse, int side, int kind) {
            if (kind != Neighbors::coarser || !is_mine(coarse))
                return;
            std::vector<double> &all = blocks_.at(coarse)->finer[!side];
            all.resize(fluxes() * kSide * kSide);
            const double *&message = next[forest.owner[fine]];
            if (is_mine(fine))
                message = own.at({ fine, side }).data();
            const Leaf &leaf = forest.leaves[fine];
            int a = kHalf * (leaf.at[(direction + 1) % 3] & 1), b = kHalf * (leaf.at[(direction + 2) % 3] & 1);
            for (int q = 0; q < fluxes(); q++)
                for (int f = 0; f < kFaces; f++)
                    all[(q * kSide + b + f / kHalf) * kSide + a + f % kHalf] = *message++;
        });
    }

    /* Append the fluxes through one side of a block, averaged over faces of cells twice as wide. */
    void pack_fluxes(const Block &block, int direction, int side, double lambda, Message &message)
    {
        constexpr int kHalf = kSide / 2;
        int a = (direction + 1) % 3, b = (direction + 2) % 3;
        std::vector<double> fine(fluxes() * kSide * kSide);
        for (int at = 0; at < kSide * kSide; at++) {
            int first = (kGhosts + at % kSide) * kStride[a] + (kGhosts + at / kSide) * kStride[b];
            first += side ? kSide * kStride[direction] : 0;
            load(block, first, 2 * kGhosts, direction, block.present(direction), line_);
            line_.solve(lambda, instrument_);
            auto put = [&](int q, double value) { fine[q * kSide * kSide + at] = value; };
            for (int m = 0; m < line_.active; m++) {
                put(volume_of(line_.material[m]), line_.flux.volume[m][1]);
                put(mass_of(line_.material[m]), line_.flux.mass[m][1]);
            }
            for (int d = 0; d < 3; d++)
                put(momentum_of(d), line_.flux.momentum[d][1]);
            put(energy_of(), line_.flux.energy[1]);
            put(energy_of() + 1, line_.flux.velocity[1]);
        }
        for (int q = 0; q < fluxes(); q++) {
            for (int f = 0; f < kHalf * kHalf; f++) {
                const double *four = &fine[(q * kSide + 2 * (f / kHalf)) * kSide + 2 * (f % kHalf)];
                message.push_back(0.25 * ((four[0] + four[1]) + (four[kSide] + four[kSide + 1])));
            }
        }
    }

    /* Replace the flux of a line through one cell face with that of the finer neighbor. */
    void take_fluxes(const std::vector<double> &all, int at, int face, Line &line) const
    {
        auto of = [&](int q) { return all[q * kSide * kSide + at]; };
        for (int m = 0; m < line.active; m++) {
            line.flux.volume[m][face] = of(volume_of(line.material[m]));
            line.flux.mass[m][face] = of(mass_of(line.material[m]));
        }
        for (int d = 0; d < 3; d++)
            line.flux.momentum[d][face] = of(momentum_of(d));
        line.flux.energy[face] = of(energy_of());
        line.flux.velocity[face] = of(energy_of() + 1);
    }

    void sweep(Block &block, int direction, double dt, double width)
    {
        uint32_t interior = 0;
        double lambda = dt / width;
        int at = 0, stride = kStride[direction];
        lines(block, direction, [&](Line &line, int first) {
            line.solve(lambda, instrument_);
            if (!block.finer[0].empty())
                take_fluxes(block.finer[0], at, kGhosts - 1, line);
            if (!block.finer[1].empty())
                take_fluxes(block.finer[1], at, kGhosts + kSide - 1, line);
            line.update(lambda, instrument_);
            at++;
            dropped += line.dropped * width * width * width;
            uint32_t active = 0;
            auto store = [&](int quantity, const double *values) {
                Array &array = block.arrays[quantity];
                for (int i = kGhosts; i < kGhosts + kSide; i++)
                    put(array, first + i * stride, values[i]);
            };
            for (int m = 0; m < line.active; m++) {
                int k = line.material[m];
                active |= 1u << k;
                store(volume_of(k), line.volume[m]);
                store(mass_of(k), line.mass[m]);
                auto is_there = [](double volume) { return volume != 0; };
                if (std::any_of(line.volume[m] + kGhosts, line.volume[m] + kGhosts + kSide, is_there))
                    interior |= 1u << k;
            }
            for (int d = 0; d < 3; d++)
                store(momentum_of((direction + d) % 3), line.momentum[d]);
            store(energy_of(), line.energy);
            constexpr double kNothing[kWide] = {};
            for (int k = 0; k < count_ && problem_.writes == Writes::all; k++) {
                if (!(active >> k & 1)) {
                    store(volume_of(k), kNothing);
                    store(mass_of(k), kNothing);
                }
            }
        });
        block.interior = interior;
        updates += kSide * kSide * kSide;
    }

    /* The state of the mixture in each cell, as in Line::states; and its differences between cells of the block. */
    void derive(Block &block, double width)
    {
        const auto &cells = std::as_const(block.arrays);
        for (int c = 0; c < kCells; c++) {
            int at = place_of(kGhosts + c % kSide, kGhosts + c / kSide % kSide, kGhosts + c / kSide / kSide);
            double rho = 0, xi = 0, stiff = 0, squares = 0;
            for (int k = 0; k < count_; k++) {
                if (block.interior >> k & 1) {
                    double volume = cells[volume_of(k)][at];
                    rho += cells[mass_of(k)][at];
                    xi += volume * kMaterials[k].xi();
                    stiff += volume * (kMaterials[k].xi() * kMaterials[k].gamma * kMaterials[k].pi);
                }
            }
            for (int d = 0; d < 3; d++) {
                double velocity = cells[momentum_of(d)][at] / rho;
                put(block.fields[kVelocity + d], c, velocity);
                squares += velocity * velocity;
            }
            double internal = cells[energy_of()][at] - 0.5 * rho * squares;
            double pressure = (internal - stiff) / xi, stiffness = 0, heat = 0;
            for (int k = 0; k < count_; k++) {
                if (block.interior >> k & 1) {
                    double part = cells[volume_of(k)][at] * kMaterials[k].xi() * (pressure + kMaterials[k].pi);
                    stiffness += kMaterials[k].gamma * part;
                    heat += part;
                }
            }
            put(block.fields[kDensity], c, rho);
            put(block.fields[kPressure], c, pressure);
            put(block.fields[kSound], c, std::sqrt(stiffness / xi / rho));
            /* For a heat capacity of 1 of all materials. */
            put(block.fields[kTemperature], c, heat / rho);
            put(block.fields[kInternal], c, internal / rho);
        }
        for (int state = 0; state < kStates; state++) {
            const Array &of = std::as_const(block.fields)[state];
            for (int c = 0; c < kCells; c++) {
                int in[3] = { c % kSide, c / kSide % kSide, c / kSide / kSide };
                double here = of[c], curvature = 0;
                for (int d = 0; d < 3; d++) {
                    double before = in[d] > 0 ? of[c - kInside[d]] : here;
                    double behind = in[d] + 1 < kSide ? of[c + kInside[d]] : here;
                    /* One-sided at the sides of the block. */
                    double across = width * ((in[d] > 0) + (in[d] + 1 < kSide));
                    put(block.fields[slope_of(state, d)], c, (behind - before) / across);
                    curvature += (before - 2 * here + behind) / (width * width);
                }
                put(block.fields[curvature_of(state)], c, curvature);
            }
        }
    }

    std::vector<int> wanted_levels();
    void move_to(Forest next);
};

/*
 * The wanted level of each leaf. The finest where materials meet, in the block or its ghosts. One level finer where
 * pressure jumps by a tenth from cell to cell; one coarser where it changes by less than a hundredth.
 */
template <class Array> std::vector<int> Solver<Array>::wanted_levels()
{
    std::vector<double> mine;
    for (int direction = 0; direction < 3; direction++)
        fill_ghosts(direction);
    std::vector<double> pressure(kLength);
    for (auto &[leaf, block] : blocks_) {
        uint32_t present = block->interior;
        for (uint32_t ghosts : block->ghosts)
            present |= ghosts;
        const auto &arrays = std::as_const(block->arrays);
        auto at_inside = [](int i) { return i >= kGhosts && i < kGhosts + kSide; };
        double steepest = 0;
        for (int z = 1; z <= kGhosts + kSide; z++) {
            for (int y = 1; y <= kGhosts + kSide; y++) {
                for (int x = 1; x <= kGhosts + kSide; x++) {
                    int at = place_of(x, y, z);
                    /* Ghosts of one direction only, without edges and corners. */
                    if (at_inside(x) + at_inside(y) + at_inside(z) < 2)
                        continue;
                    double rho = 0, xi = 0, stiff = 0, squares = 0;
                    for (int k = 0; k < count_; k++) {
                        if (present >> k & 1) {
                            double volume = arrays[volume_of(k)][at];
                            rho += arrays[mass_of(k)][at];
                            xi += volume * kMaterials[k].xi();
                            stiff += volume * kMaterials[k].energy(0);
                        }
                    }
                    for (int d = 0; d < 3; d++)
                        squares += arrays[momentum_of(d)][at] * arrays[momentum_of(d)][at];
                    pressure[at] = (arrays[energy_of()][at] - 0.5 * squares / rho - stiff) / xi;
                }
            }
        }
        for (int d = 0; d < 3; d++) {
            for (int z = kGhosts; z < kGhosts + kSide; z++) {
                for (int y = kGhosts; y < kGhosts + kSide; y++) {
                    for (int x = kGhosts; x < kGhosts + kSide; x++) {
                        int at = place_of(x, y, z);
                        for (int other : { at - kStride[d], at + kStride[d] }) {
                            double jump = std::fabs(pressure[other] - pressure[at]);
                            double both = std::fabs(pressure[other]) + std::fabs(pressure[at]);
                            steepest = std::max(steepest, jump / (1 + 0.5 * both));
                        }
                    }
                }
            }
        }
        bool mixed = (present & (present - 1)) != 0;
        int level = forest.leaves[leaf].level;
        mine.push_back(mixed || steepest > 0.1 ? level + 1 : steepest < 0.01 ? level - 1 : level);
    }
    std::vector<double> all = comm_.all_gather(mine);
    return std::vector<int>(all.begin(), all.end());
}

template <class Array> void Solver<Array>::move_to(Forest next)
{
    const int half = kSide / 2;
    /* The part of an old leaf that goes to a new one. */
    auto overlap_of = [&](const Leaf &old, const Leaf &leaf) {
        Overlap overlap;
        overlap.average = old.level > leaf.level;
        overlap.inject = old.level < leaf.level;
        for (int d = 0; d < 3; d++) {
            overlap.from.size[d] = overlap.to.size[d] = old.level == leaf.level ? kSide : half;
            overlap.from.low[d] = kGhosts + (overlap.inject ? half * (leaf.at[d] & 1) : 0);
            overlap.to.low[d] = kGhosts + (overlap.average ? half * (old.at[d] & 1) : 0);
        }
        return overlap;
    };
    auto sources = [&](const Leaf &leaf, auto visit) {
        if (int same = forest.find(leaf); same >= 0) {
            visit(same);
        } else if (int parent = leaf.level ? forest.find(leaf.parent()) : -1; parent >= 0) {
            visit(parent);
        } else {
            for (int c = 0; c < 8; c++)
                visit(forest.find(leaf.child(c)));
        }
    };
    std::vector<Message> out(comm_.size);
    for (size_t l = 0; l < next.leaves.size(); l++) {
        sources(next.leaves[l], [&](int old) {
            if (is_mine(old) && next.owner[l] != comm_.rank) {
                Overlap overlap = overlap_of(forest.leaves[old], next.leaves[l]);
                pack(*blocks_.at(old), overlap.from, overlap.average, out[next.owner[l]]);
            }
        });
    }
    std::vector<Message> in = comm_.exchange(out);
    std::vector<const double *> place(comm_.size);
    for (int r = 0; r < comm_.size; r++)
        place[r] = in[r].data();
    std::map<int, std::unique_ptr<Block>> blocks;
    Message own;
    for (size_t l = 0; l < next.leaves.size(); l++) {
        if (next.owner[l] != comm_.rank)
            continue;
        const Leaf &leaf = next.leaves[l];
        std::unique_ptr<Block> &block = blocks[static_cast<int>(l)];
        sources(leaf, [&](int old) {
            if (is_mine(old) && forest.leaves[old].level == leaf.level) {
                block = std::move(blocks_.at(old));
                return;
            }
            if (!block)
                block = std::make_unique<Block>(memory_, quantities_);
            Overlap overlap = overlap_of(forest.leaves[old], leaf);
            const double *&message = place[forest.owner[old]];
            if (is_mine(old)) {
                own.clear();
                pack(*blocks_.at(old), overlap.from, overlap.average, own);
                message = own.data();
            }
            block->interior |= unpack(*block, overlap.to, overlap.inject, 0, message);
        });
    }
    blocks_ = std::move(blocks);
    forest = std::move(next);
}

/* Compute all sums, and check every cell. */
template <class Array> Totals Solver<Array>::totals()
{
    const int sums = count_ + 4, numbers = sums + 6;
    std::vector<double> mine;
    for (auto &[leaf, block] : blocks_) {
        const auto &arrays = std::as_const(block->arrays);
        std::vector<Sum> sum(sums);
        double unlike_one = 0, pure = 0, vorticity = 0;
        /* FNV-1a (draft-eastlake-fnv), of words instead of bytes, starting with the position of the block. */
        uint64_t hash = 0xcbf29ce484222325u;
        auto take = [&](uint64_t word) {
            hash = (hash ^ word) * 0x100000001b3u;
            hash ^= hash >> 32;
        };
        take(forest.leaves[leaf].key());
        for (int c = 0; c < kSide * kSide * kSide; c++) {
            int at = place_of(kGhosts + c % kSide, kGhosts + c / kSide % kSide, kGhosts + c / kSide / kSide);
            double fractions = 0;
            for (int k = 0; k < count_; k++) {
                double volume = arrays[volume_of(k)][at], mass = arrays[mass_of(k)][at];
                if (!(volume >= 0 && volume <= 1 && mass >= 0 && (volume == 0) == (mass == 0)))
                    fail("a cell holds %g of the volume and %g of mass of %s", volume, mass, kMaterials[k].name);
                fractions += volume;
                pure += volume == 1;
                sum[k].add(mass);
                take(bits_of(volume));
                take(bits_of(mass));
            }
            unlike_one = std::max(unlike_one, std::fabs(fractions - 1));
            for (int q = 0; q < 4; q++) {
                double value = arrays[2 * count_ + q][at];
                sum[count_ + q].add(value);
                take(bits_of(value));
            }
            const auto &fields = std::as_const(block->fields);
            for (int f = 0; f < kFields; f++)
                take(bits_of(fields[f][c]));
            for (int d = 0; d < 3; d++) {
                int a = (d + 1) % 3, b = (d + 2) % 3;
                double turn = fields[slope_of(kVelocity + b, a)][c] - fields[slope_of(kVelocity + a, b)][c];
                vorticity += turn * turn;
            }
        }
        double cell = std::pow(width_of_cells(leaf), 3);
        for (const Sum &part : sum)
            mine.push_back(part.value() * cell);
        mine.push_back(unlike_one);
        mine.push_back(pure);
        /* In halves, each of which a double represents exactly. */
        mine.push_back(hash >> 32);
        mine.push_back(hash & 0xffffffff);
        mine.push_back(kSide * kSide * kSide);
        mine.push_back(vorticity * cell);
    }
    std::vector<double> all = comm_.all_gather(mine);
    Totals totals;
    std::vector<Sum> sum(sums);
    totals.checksum = 0xcbf29ce484222325u;
    for (const double *leaf = all.data(); leaf < all.data() + all.size(); leaf += numbers) {
        for (int s = 0; s < sums; s++)
            sum[s].add(leaf[s]);
        totals.unlike_one = std::max(totals.unlike_one, leaf[sums]);
        totals.pure += static_cast<long>(leaf[sums + 1]);
        uint64_t hash = static_cast<uint64_t>(leaf[sums + 2]) << 32 | static_cast<uint64_t>(leaf[sums + 3]);
        totals.checksum = (totals.checksum ^ hash) * 0x100000001b3u;
        totals.checksum ^= totals.checksum >> 32;
        totals.cells += static_cast<long>(leaf[sums + 4]);
        totals.vorticity += leaf[sums + 5];
    }
    for (int k = 0; k < count_; k++)
        totals.mass[k] = sum[k].value();
    for (int d = 0; d < 3; d++)
        totals.momentum[d] = sum[count_ + d].value();
    totals.energy = sum[count_ + 3].value();
    return totals;
}
