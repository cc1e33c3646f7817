/*
 * libpagefold: merges identical memory pages of programs that trust each other, in user space.
 *
 * A domain is a named group of processes of one user. A process joins a domain as a member, and merges its engine
 * memory at points at which no thread writes to it. Engine memory is memory of pagefold_allocate(), and private
 * anonymous memory passed to pagefold_adopt(). See pagefold(3).
 *
 * Functions that return int return 0 on success and -1 on failure; pagefold_error() then gives the reason. Any thread
 * may call any function. Sizes are in bytes. Addresses and sizes of ranges must be page-aligned.
 *
 * Structures that functions fill in may grow at their end in later versions. The caller passes the size that it was
 * compiled with. The library writes at most so many bytes, and zeros to fields that it does not know. In C and C++
 * inline functions pass the size: pagefold_merge() calls pagefold_merge_sized(). Programs in other languages call the
 * functions with _sized themselves.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#ifndef PAGEFOLD_H
#define PAGEFOLD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A member of a domain. */
typedef struct pagefold_engine pagefold_engine;

/* A thread that merges. */
typedef struct pagefold_background pagefold_background;

/* Options of a member. Initialize with PAGEFOLD_OPTIONS_INIT. */
typedef struct pagefold_options {
	size_t size;         /* of this structure */
	const char *root;    /* directory of the domains; NULL: $PAGEFOLD_RUNTIME, else /dev/shm/pagefold-UID */
	double max_slowdown; /* bound, as a share of the program's run time without the engine; negative: no bound */
	unsigned threads;    /* that scan and map in parallel; one of them writes to the store */
	int per_node;        /* nonzero: use a domain, NAME.nodeN, for each NUMA node, and join that of the current node */
	double lifetime;     /* minimum run time of the program, in seconds: merges that are expected to be profitable
	                        may spend max_slowdown of all this time from the beginning on */
	int merge_while_pinned; /* nonzero: merge although memory of this process is pinned for a device or io_uring; the
	                        caller guarantees that no engine memory is pinned */
	int split_huge_pages; /* nonzero: split huge pages wherever that saves memory, even with a max_slowdown */
} pagefold_options;

#define PAGEFOLD_OPTIONS_INIT { sizeof(pagefold_options), NULL, 0.02, 1, 0, 0, 0, 0 }

/* Counters of one merge, or of all merges together. */
typedef struct pagefold_merged {
	uint64_t looked_at;  /* pages whose contents were scanned */
	uint64_t zeros;      /* pages of zeros that were freed */
	uint64_t merged;     /* pages that map the store now */
	uint64_t retried;    /* merged and freed pages that are not expected to last: they were merged before and
	                        written too soon */
	uint64_t stored;     /* pages whose contents were written to the store */
	uint64_t runs;       /* runs of at most 2048 pages that were mapped as one */
	uint64_t not_worth;  /* pages of zeros or with a partner that were not merged: their run was unprofitable */
	uint64_t broken;     /* COW breaks: pages that were written since they were merged or freed */
	uint64_t short_lived; /* COW breaks of pages that were expected to last, but were written before their merge was
	                        profitable */
	uint64_t read;       /* freed pages of zeros that were read since, each counted once */
	uint64_t left_alone; /* pages that were skipped: they were written too soon before, or scanned without a partner
	                        too often */
	uint64_t failed;     /* pages that could not be merged */
	uint64_t cut_short;  /* merges that did not scan everything: time or memory was short, the merge was not expected
	                        to be profitable, or all members are to merge at a later time */
	uint64_t held_up;    /* merges that left work to a later one: another member held the lock for too long, or files
	                        of the domain were removed meanwhile */
	uint64_t nanoseconds; /* of the program's time */
} pagefold_merged;

/* Status of a member, and size of its domain's store. */
typedef struct pagefold_standing {
	uint64_t pages;    /* of this member's engine memory, resident or not */
	uint64_t merged;   /* of these, pages that map the store and were not written since */
	uint64_t zeros;    /* of these, pages of zeros that were freed and not written since */
	uint64_t hot;      /* of these, volatile pages: skipped now because they were written too soon after a merge */
	uint64_t store;    /* bytes that the domain's store uses, for all members together */
	uint64_t pinned;   /* bytes of this process that are pinned long-term, as for a device: they must not be adopted */
	uint64_t mappings; /* number of mappings of this process */
	uint64_t notes;    /* bytes of notes on the pages of this member */
	uint64_t merges;   /* number of merges so far, including those that did nothing */
	uint64_t elapsed;  /* nanoseconds since this process joined */
	uint64_t spent;    /* nanoseconds of these that the engine took from the program. It is compared with max_slowdown
	                      of (elapsed - spent), except for time that lifetime allowed in advance */
} pagefold_standing;

/* Status of a region of a member, in pages. */
typedef struct pagefold_region {
	void *memory;
	size_t bytes;
	uint64_t merged; /* pages that map the store and were not written since */
	uint64_t zeros;  /* pages of zeros that were freed and not written since */
	uint64_t hot;    /* volatile pages: skipped now because they were written too soon after a merge */
	int64_t saved;   /* gross savings in bytes, by the mean of the domain */
} pagefold_region;

/* Status of a domain: all its members, each as of its last report. */
typedef struct pagefold_domain {
	uint64_t members;
	uint64_t pages;    /* of their engine memory, resident or not */
	uint64_t merged;   /* of these, pages that map the store */
	uint64_t zeros;    /* of these, pages of zeros that were freed */
	uint64_t hot;      /* of these, volatile pages: skipped now */
	uint64_t stored;   /* contents in the store, one page each */
	int64_t saved;     /* gross savings in bytes: (merged + zeros - stored) pages */
	uint64_t index;    /* bytes of the index */
	uint64_t overhead; /* bytes of the engine's own memory except the store, including the index */
} pagefold_domain;

enum pagefold_advice {
	PAGEFOLD_MERGEABLE,   /* merge it, whatever its write history; the default */
	PAGEFOLD_UNMERGEABLE, /* do not merge it; merged pages stay merged until they are written */
	PAGEFOLD_HOT,         /* volatile, written again and again: skip it for 68 minutes, merged pages once written */
};

/*
 * Join a domain, or create it. In a rank of an MPI job domain may be NULL if the launcher gives the job a name
 * (PMIX_NAMESPACE, SLURM_JOB_ID, PMI_JOBID): the rank then joins the job's domain. options may be NULL. NULL on
 * failure.
 */
pagefold_engine *pagefold_join(const char *domain, const pagefold_options *options);

/* Leave the domain. Merged pages stay merged; memory of pagefold_allocate stays mapped. engine may be NULL. */
void pagefold_leave(pagefold_engine *engine);

/* Allocate memory that may be merged. bytes is rounded up to whole pages. NULL on failure. */
void *pagefold_allocate(pagefold_engine *engine, size_t bytes);

/* Free an entire allocation of pagefold_allocate. Does not wait until a merge in another thread ends. */
int pagefold_free(pagefold_engine *engine, void *memory, size_t bytes);

/* Adopt private anonymous memory of the program. No device may have it pinned while it is merged. */
int pagefold_adopt(pagefold_engine *engine, void *memory, size_t bytes);

/*
 * Disown adopted memory, all or part of it; call this before you unmap it. Merged pages stay merged until they are
 * written.
 */
int pagefold_forsake(pagefold_engine *engine, void *memory, size_t bytes);

/* Set the advice for a page-aligned range. */
int pagefold_advise(pagefold_engine *engine, void *memory, size_t bytes, enum pagefold_advice advice);

/* Make a range read as zeros and free its frames, as madvise(MADV_DONTNEED) does to ordinary memory. */
int pagefold_clear(pagefold_engine *engine, void *memory, size_t bytes);

/*
 * Merge identical pages now. Until it returns, no thread and no signal handler may write to, unmap, move or replace
 * memory that is or was engine memory.
 *
 * It fails while memory of this process is pinned for a device or io_uring (VmPin of /proc/self/status), unless
 * merge_while_pinned is set: data written to pinned pages after they were merged would be lost. It does not see
 * short-lived pins, such as those of O_DIRECT reads in progress. While any merge runs, in the background or not, do not
 * register or pin engine memory (io_uring, RDMA): the kernel accounts a pin only after it is made. merged may be NULL.
 */
int pagefold_merge_sized(pagefold_engine *engine, pagefold_merged *merged, size_t size);
static inline int pagefold_merge(pagefold_engine *engine, pagefold_merged *merged)
{
	return pagefold_merge_sized(engine, merged, sizeof(pagefold_merged));
}

/*
 * Merge identical pages while the program runs. A thread that writes to a page waits while the merge compares, copies
 * or maps it. Each merging thread works on at most 512 pages at a time, 2 MiB with pages of 4 KiB.
 *
 * Needs Linux 6.4, and one of CAP_SYS_PTRACE, vm.unprivileged_userfaultfd=1 or access to /dev/userfaultfd. Fails
 * without these, and while memory is pinned, as pagefold_merge does. Until it returns, the program may unmap, move or
 * replace engine memory only by functions of this library. The calling thread blocks signals meanwhile. merged may be
 * NULL.
 */
int pagefold_merge_while_running_sized(pagefold_engine *engine, pagefold_merged *merged, size_t size);
static inline int pagefold_merge_while_running(pagefold_engine *engine, pagefold_merged *merged)
{
	return pagefold_merge_while_running_sized(engine, merged, sizeof(pagefold_merged));
}

/*
 * Merge repeatedly while the program runs, in a new thread that uses at most a share of one CPU, from 0 to 1, and
 * blocks signals. It pauses with exponential backoff while merges are unprofitable or memory is pinned. NULL on
 * failure, as above.
 */
pagefold_background *pagefold_merge_in_background(pagefold_engine *engine, double share);

/*
 * End the thread after its current merge. Call this before pagefold_leave. Fails if the thread had ended by itself, or
 * if its last merge was refused because memory was pinned. background may be NULL.
 */
int pagefold_end_background(pagefold_background *background);

/* Status of this member, and size of its domain's store. */
int pagefold_standing_of_sized(pagefold_engine *engine, pagefold_standing *standing, size_t size);
static inline int pagefold_standing_of(pagefold_engine *engine, pagefold_standing *standing)
{
	return pagefold_standing_of_sized(engine, standing, sizeof(pagefold_standing));
}

/* Counters of all merges of this member so far, together. */
int pagefold_so_far_of_sized(pagefold_engine *engine, pagefold_merged *merged, size_t size);
static inline int pagefold_so_far_of(pagefold_engine *engine, pagefold_merged *merged)
{
	return pagefold_so_far_of_sized(engine, merged, sizeof(pagefold_merged));
}

/*
 * Status of each region of this member, by address. *count is the capacity of regions, and becomes the number of
 * regions of the member. regions may be NULL to get that number alone.
 */
int pagefold_regions_of_sized(pagefold_engine *engine, pagefold_region *regions, size_t *count, size_t size);
static inline int pagefold_regions_of(pagefold_engine *engine, pagefold_region *regions, size_t *count)
{
	return pagefold_regions_of_sized(engine, regions, count, sizeof(pagefold_region));
}

/* Status of the domain. */
int pagefold_domain_of_sized(pagefold_engine *engine, pagefold_domain *domain, size_t size);
static inline int pagefold_domain_of(pagefold_engine *engine, pagefold_domain *domain)
{
	return pagefold_domain_of_sized(engine, domain, sizeof(pagefold_domain));
}

/* Reason why the last call of this thread failed. Valid until the thread's next call. */
const char *pagefold_error(void);

#ifdef __cplusplus
}
#endif

#endif
