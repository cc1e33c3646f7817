/*
 * The memory of cells. A block has an array for each quantity, and two for each material. Most contain zeros, because
 * most cells contain one material. The mode selects how that is exploited:
 *
 * | mode   | arrays |
 * |--------|--------|
 * | plain  | ordinary memory |
 * | blocks | groups of 512 doubles behind an indirection in operator[]; a group of zeros is not stored |
 * | ksm    | ordinary memory that the kernel may merge: madvise(MADV_MERGEABLE) |
 * | engine | memory of pagefold_allocate, merged before the first step and at the end of each by pagefold_merge |
 *
 * Two classes of arrays have the same operators: `Plain` for all modes but `blocks`, and `Grouped` for that. The solver
 * is a template over them, so that an access to a `Plain` array is a plain memory access. New arrays are filled with
 * zeros, as constructors of arrays do: memory that was never written would take no memory at all, and flatter every
 * mode but `blocks`.
 *
 * Limits: a group has a fixed size, that of a page of most machines; a freed group gives its page back at once.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#pragma once

#include "comm.hpp"

#include <pagefold.h>

#include <sys/mman.h>
#include <unistd.h>

enum class Mode { plain, blocks, ksm, engine };

constexpr size_t kGroup = 512;

/* Compares bits, because a negative zero differs from memory that was never written. */
inline uint64_t bits_of(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* The allocator of this process for cells. */
class Memory {
public:
    Memory(Mode mode, const char *domain, double max_slowdown, double min_runtime) : mode_(mode)
    {
        if (mode != Mode::engine)
            return;
        pagefold_options options = PAGEFOLD_OPTIONS_INIT;
        options.max_slowdown = max_slowdown;
        options.min_runtime = min_runtime;
        engine_ = pagefold_join(domain, &options);
        if (!engine_)
            fail("cannot join %s: %s", domain, pagefold_error());
    }

    ~Memory() { pagefold_leave(engine_); }
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;

    /* Whole pages of zeros that were written. */
    double *allocate(size_t bytes)
    {
        void *memory = engine_ ? pagefold_allocate(engine_, bytes) : map(bytes);
        if (!memory)
            fail("no %zu bytes: %s", bytes, pagefold_error());
        if (mode_ == Mode::ksm && madvise(memory, bytes, MADV_MERGEABLE))
            fail("the kernel does not merge: it has no CONFIG_KSM");
        memset(memory, 0, bytes);
        bytes_ += bytes;
        return static_cast<double *>(memory);
    }

    void free(double *memory, size_t bytes)
    {
        if (engine_ ? pagefold_free(engine_, memory, bytes) : munmap(memory, bytes))
            fail("cannot free %zu bytes", bytes);
        bytes_ -= bytes;
    }

    /* A group of zeros. */
    double *take_group()
    {
        if (free_groups_.empty()) {
            constexpr size_t kGroups = 256;
            double *groups = static_cast<double *>(map(kGroups * kGroup * sizeof(double)));
            for (size_t g = kGroups; g-- > 0;)
                free_groups_.push_back(groups + g * kGroup);
        }
        double *group = free_groups_.back();
        free_groups_.pop_back();
        bytes_ += kGroup * sizeof(double);
        return group;
    }

    void give_group(double *group)
    {
        if (madvise(group, kGroup * sizeof(double), MADV_DONTNEED))
            fail("cannot give a group back");
        free_groups_.push_back(group);
        bytes_ -= kGroup * sizeof(double);
    }

    /* Merge. No rank writes to its arrays at the same time. */
    void merge()
    {
        pagefold_merge_counters counters = {};
        if (engine_ && pagefold_merge(engine_, &counters))
            fail("cannot merge: %s", pagefold_error());
        last_merge_ = counters;
    }

    /* Counters of the last merge. */
    const pagefold_merge_counters &last_merge() const { return last_merge_; }

    /* Counters of all merges. */
    pagefold_merge_counters merge_totals() const
    {
        pagefold_merge_counters totals = {};
        if (engine_ && pagefold_get_merge_totals(engine_, &totals))
            fail("cannot read the merge counters of the engine: %s", pagefold_error());
        return totals;
    }

    /* The status of the engine. */
    pagefold_member_status status() const
    {
        pagefold_member_status status = {};
        if (engine_ && pagefold_get_member_status(engine_, &status))
            fail("cannot read the status of the engine: %s", pagefold_error());
        return status;
    }

    /* Bytes of arrays as requested; in `blocks`, of the stored groups. */
    size_t bytes() const { return bytes_; }

private:
    Mode mode_;
    pagefold_engine *engine_ = nullptr;
    pagefold_merge_counters last_merge_ = {};
    size_t bytes_ = 0;
    std::vector<double *> free_groups_;

    static void *map(size_t bytes)
    {
        void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED)
            fail("no memory for %zu bytes of cells", bytes);
        return memory;
    }
};

/* An array of doubles in memory. */
class Plain {
public:
    double &operator[](size_t at) { return cells_[at]; }
    double operator[](size_t at) const { return cells_[at]; }

    /* All arrays of a block, in one allocation. */
    class Arrays {
    public:
        Arrays(Memory &memory, size_t count, size_t length) : memory_(memory), bytes_(count * length * sizeof(double))
        {
            double *cells = memory.allocate(bytes_);
            for (size_t a = 0; a < count; a++)
                arrays_.emplace_back(Plain(cells + a * length));
        }
        ~Arrays() { memory_.free(arrays_[0].cells_, bytes_); }
        Arrays(const Arrays &) = delete;
        Arrays &operator=(const Arrays &) = delete;

        Plain &operator[](size_t a) { return arrays_[a]; }
        const Plain &operator[](size_t a) const { return arrays_[a]; }

        void release() {}

    private:
        Memory &memory_;
        size_t bytes_;
        std::vector<Plain> arrays_;
    };

private:
    double *cells_;

    explicit Plain(double *cells) : cells_(cells) {}
};

/* An array of doubles in groups; groups of zeros are not stored. */
class Grouped {
public:
    /* An element that can be assigned. */
    class Element {
    public:
        operator double() const { return static_cast<const Grouped &>(array_)[at_]; }
        void operator=(double value) { array_.put(at_, value); }

    private:
        friend class Grouped;
        Grouped &array_;
        size_t at_;
        Element(Grouped &array, size_t at) : array_(array), at_(at) {}
    };

    Element operator[](size_t at) { return Element(*this, at); }
    double operator[](size_t at) const
    {
        const double *group = groups_[at / kGroup];
        return group ? group[at % kGroup] : 0;
    }

    class Arrays {
    public:
        Arrays(Memory &memory, size_t count, size_t length)
        {
            for (size_t a = 0; a < count; a++)
                arrays_.emplace_back(Grouped(memory, (length + kGroup - 1) / kGroup));
        }
        ~Arrays()
        {
            for (Grouped &array : arrays_)
                array.release_if([](const double *) { return true; });
        }
        Arrays(const Arrays &) = delete;
        Arrays &operator=(const Arrays &) = delete;

        Grouped &operator[](size_t a) { return arrays_[a]; }
        const Grouped &operator[](size_t a) const { return arrays_[a]; }

        /* Release groups that have become zeros. */
        void release()
        {
            for (Grouped &array : arrays_)
                array.release_if([](const double *group) {
                    for (size_t at = 0; at < kGroup; at++)
                        if (bits_of(group[at]))
                            return false;
                    return true;
                });
        }

    private:
        std::vector<Grouped> arrays_;
    };

private:
    Memory *memory_;
    std::vector<double *> groups_;

    Grouped(Memory &memory, size_t groups) : memory_(&memory), groups_(groups) {}

    void put(size_t at, double value)
    {
        double *&group = groups_[at / kGroup];
        if (!group) {
            if (bits_of(value) == 0)
                return;
            group = memory_->take_group();
        }
        group[at % kGroup] = value;
    }

    template <class Condition> void release_if(Condition condition)
    {
        for (double *&group : groups_) {
            if (group && condition(group)) {
                memory_->give_group(group);
                group = nullptr;
            }
        }
    }
};
