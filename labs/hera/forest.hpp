/*
 * The blocks: leaves of an octree over each cell of a coarse grid of roots^3, 2:1 balanced across faces. A block has
 * the same number of cells at each level, of half the width at the next. Every rank knows all leaves, in the order of a
 * space-filling curve (G. M. Morton, IBM, 1966), and owns a segment of it; only the owner knows the cells.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#pragma once

#include "comm.hpp"

#include <algorithm>
#include <array>
#include <unordered_map>

struct Leaf {
    int level;
    int at[3]; /* in blocks of its level */

    uint64_t key() const
    {
        uint64_t key = level;
        for (int d = 0; d < 3; d++)
            key = key << 16 | static_cast<uint64_t>(at[d]);
        return key;
    }
    Leaf parent() const { return { level - 1, { at[0] / 2, at[1] / 2, at[2] / 2 } }; }
    Leaf child(int c) const
    {
        return { level + 1, { at[0] * 2 + (c & 1), at[1] * 2 + (c >> 1 & 1), at[2] * 2 + (c >> 2 & 1) } };
    }
    /* Its position among its siblings, one bit for each direction. */
    int place() const { return (at[0] & 1) | (at[1] & 1) << 1 | (at[2] & 1) << 2; }
};

/* The neighbors behind a face of a leaf: none, one of the same or the next coarser level, or four of the next finer
 * one. */
struct Neighbors {
    enum { wall, same, coarser, finer } kind = wall;
    int count = 0, leaf[4] = {};
};

class Forest {
public:
    std::vector<Leaf> leaves;
    std::vector<int> owner; /* of each leaf */

    /* Only the roots. */
    Forest(int roots, int levels, bool periodic, int ranks)
        : roots_(roots), levels_(levels), ranks_(ranks), periodic_(periodic)
    {
        std::vector<Leaf> all;
        for (int z = 0; z < roots; z++)
            for (int y = 0; y < roots; y++)
                for (int x = 0; x < roots; x++)
                    all.push_back({ 0, { x, y, z } });
        set(std::move(all));
    }

    /* Position of a leaf, or -1. */
    int find(const Leaf &leaf) const
    {
        auto found = index_.find(leaf.key());
        return found == index_.end() ? -1 : found->second;
    }

    const Neighbors &behind(int leaf, int direction, int side) const
    {
        return neighbors_[leaf][direction * 2 + side];
    }

    /* Width of a block, as a fraction of the box. */
    double width(const Leaf &leaf) const { return 1.0 / (roots_ << leaf.level); }

    int finest() const { return levels_ - 1; }

    /*
     * The forest in which leaves have their wanted levels, which differ from the present ones by at most one.
     * Refinement has priority: leaves around are refined for balance, and a parent replaces its children only if all of
     * them and the balance permit it.
     */
    Forest adapted(std::vector<int> wanted) const
    {
        for (size_t l = 0; l < leaves.size(); l++)
            wanted[l] = std::max(0, std::min(levels_ - 1, wanted[l]));
        for (bool changed = true; changed;) {
            changed = false;
            auto raise = [&](size_t leaf, int level) {
                if (wanted[leaf] < level) {
                    wanted[leaf] = level;
                    changed = true;
                }
            };
            for (size_t l = 0; l < leaves.size(); l++) {
                for (const Neighbors &around : neighbors_[l])
                    for (int n = 0; n < around.count; n++)
                        raise(around.leaf[n], wanted[l] - 1);
                for (int c = 0; c < 8 && wanted[l] < leaves[l].level; c++) {
                    int sibling = find(leaves[l].parent().child(c));
                    if (sibling < 0 || wanted[sibling] >= leaves[l].level)
                        raise(l, leaves[l].level);
                }
            }
        }
        std::vector<Leaf> next;
        for (size_t l = 0; l < leaves.size(); l++) {
            const Leaf &leaf = leaves[l];
            if (wanted[l] > leaf.level)
                for (int c = 0; c < 8; c++)
                    next.push_back(leaf.child(c));
            else if (wanted[l] == leaf.level)
                next.push_back(leaf);
            else if (leaf.place() == 0)
                next.push_back(leaf.parent());
        }
        Forest forest(*this);
        forest.set(std::move(next));
        return forest;
    }

    bool operator==(const Forest &other) const
    {
        auto equal = [](const Leaf &a, const Leaf &b) { return a.key() == b.key(); };
        return std::equal(leaves.begin(), leaves.end(), other.leaves.begin(), other.leaves.end(), equal);
    }

private:
    int roots_, levels_, ranks_;
    bool periodic_;
    std::unordered_map<uint64_t, int> index_;
    std::vector<std::array<Neighbors, 6>> neighbors_;

    /* The start of a leaf on the curve through blocks of the finest level. */
    uint64_t on_curve(const Leaf &leaf) const
    {
        uint64_t place = 0;
        for (int bit = 0; bit < 16; bit++)
            for (int d = 0; d < 3; d++)
                place |= (static_cast<uint64_t>(leaf.at[d]) << (levels_ - 1 - leaf.level) >> bit & 1) << (3 * bit + d);
        return place;
    }

    void set(std::vector<Leaf> all)
    {
        leaves = std::move(all);
        std::sort(leaves.begin(), leaves.end(),
              [this](const Leaf &a, const Leaf &b) { return on_curve(a) < on_curve(b); });
        index_.clear();
        owner.clear();
        neighbors_.assign(leaves.size(), {});
        for (size_t l = 0; l < leaves.size(); l++) {
            index_[leaves[l].key()] = static_cast<int>(l);
            /* All levels take the same steps, so that every block is the same amount of work. */
            owner.push_back(static_cast<int>(l * ranks_ / leaves.size()));
        }
        for (size_t l = 0; l < leaves.size(); l++)
            for (int face = 0; face < 6; face++)
                neighbors_[l][face] = look(leaves[l], face / 2, face % 2);
    }

    Neighbors look(const Leaf &leaf, int direction, int side) const
    {
        Neighbors found;
        Leaf beside = leaf;
        int across = roots_ << leaf.level;
        beside.at[direction] += side ? 1 : -1;
        if (beside.at[direction] < 0 || beside.at[direction] >= across) {
            if (!periodic_)
                return found;
            beside.at[direction] = (beside.at[direction] + across) % across;
        }
        if (int same = find(beside); same >= 0) {
            found.kind = Neighbors::same;
            found.leaf[found.count++] = same;
        } else if (int coarser = leaf.level ? find(beside.parent()) : -1; coarser >= 0) {
            found.kind = Neighbors::coarser;
            found.leaf[found.count++] = coarser;
        } else {
            found.kind = Neighbors::finer;
            for (int c = 0; c < 8; c++)
                if ((c >> direction & 1) == !side)
                    found.leaf[found.count++] = find(beside.child(c));
            if (std::count(found.leaf, found.leaf + 4, -1))
                fail("the forest is out of balance");
        }
        return found;
    }
};
