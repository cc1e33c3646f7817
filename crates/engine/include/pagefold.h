/*
 * libpagefold: merges identical memory pages of programs that trust each other, in user space.
 *
 * A domain is processes of one user, by a name. A member hands private anonymous memory to its engine and merges at
 * points at which nobody writes to it; see pagefold(3).
 *
 * Functions that return int give 0, or -1 with pagefold_error() saying why. All may be called by any thread. Sizes are
 * in bytes; addresses and sizes of ranges are of whole pages.
 *
 * Structures that functions fill in may grow at their end. A caller says how large the one is that it was compiled with,
 * and the library writes no more than that, and zeros to what it does not know: pagefold_merge(), for one, is an inline
 * function that passes the size to pagefold_merge_sized(). Languages other than C and C++ call that.
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

/* How a member behaves. Begin with PAGEFOLD_OPTIONS_INIT. */
typedef struct pagefold_options {
	size_t size;         /* of this structure */
	const char *root;    /* where domains are kept; NULL: $PAGEFOLD_RUNTIME, else /dev/shm/pagefold-UID */
	double max_slowdown; /* share of the program's own time; negative: no bound */
	unsigned threads;    /* that look and map at the same time; one of them stores */
	int per_node;        /* not 0: a domain, NAME.nodeN, for each NUMA node, and that of the one this runs on now */
	double lifetime;     /* seconds that the program runs at least: merges that are expected to pay may take what
	                        max_slowdown allows of them from the beginning on */
	int merge_while_pinned; /* not 0: merge although memory of this process is pinned for a device or io_uring; the
	                        caller vouches that none of that memory is the engine's */
	int split_huge_pages; /* not 0: split huge pages wherever that saves memory, though max_slowdown is a bound */
} pagefold_options;

#define PAGEFOLD_OPTIONS_INIT { sizeof(pagefold_options), NULL, 0.02, 1, 0, 0, 0, 0 }

/* What merging did. */
typedef struct pagefold_merged {
	uint64_t looked_at;  /* pages whose contents were looked at */
	uint64_t zeros;      /* pages of zeros that were given back */
	uint64_t merged;     /* pages that map the store now */
	uint64_t retried;    /* of these and of the zeros, the ones that are not expected to last: they were merged before
	                        and written too soon */
	uint64_t stored;     /* pages whose contents went to the store */
	uint64_t runs;       /* runs of pages, 2048 at most, that were mapped as one */
	uint64_t not_worth;  /* pages of zeros or with a partner whose run would not pay */
	uint64_t broken;     /* pages that were written since they were merged */
	uint64_t short_lived; /* of those, the ones that were expected to last, and had not for long enough to pay */
	uint64_t read;       /* zeros that were given back and were found read since, each once */
	uint64_t left_alone; /* pages that were written too soon before, or looked at in vain too often */
	uint64_t failed;     /* pages that could not be merged */
	uint64_t cut_short;  /* merges that did not look at everything: there was no time or memory for it, it was not
	                        expected to pay, or all members are to merge at a later moment */
	uint64_t held_up;    /* merges that left something undone because another member had the lock too long,
	                        or files of the domain were removed meanwhile */
	uint64_t nanoseconds; /* of the program's time */
} pagefold_merged;

/* How a member stands, and what its domain's store takes. */
typedef struct pagefold_standing {
	uint64_t pages;    /* of this member's memory, resident or not */
	uint64_t merged;   /* of them, those that map the store and were not written since */
	uint64_t zeros;    /* of them, zeros that were given back and not written since */
	uint64_t hot;      /* of them, those that are left alone now because they were written too soon */
	uint64_t store;    /* bytes that the domain's store takes, of all members together */
	uint64_t pinned;   /* bytes of this process that are pinned for long, as for a device: they must not be adopted */
	uint64_t mappings; /* that this process has */
	uint64_t notes;    /* bytes in which the pages of this member are remembered */
	uint64_t merges;   /* so far, those that did nothing among them */
	uint64_t elapsed;  /* nanoseconds since this process joined */
	uint64_t spent;    /* of them, taken from the program: held against max_slowdown of elapsed - spent, but for what of
	                      lifetime was taken in advance */
} pagefold_standing;

/* How a region of a member stands, in pages. */
typedef struct pagefold_region {
	void *memory;
	size_t bytes;
	uint64_t merged; /* map the store and were not written since */
	uint64_t zeros;  /* zeros that were given back and not written since */
	uint64_t hot;    /* left alone now because they were written too soon */
	int64_t saved;   /* bytes, gross, by the mean of the domain */
} pagefold_region;

/* How a domain stands: all its members, as each of them has told last. */
typedef struct pagefold_domain {
	uint64_t members;
	uint64_t pages;    /* of their memory, resident or not */
	uint64_t merged;   /* of them, those that map the store */
	uint64_t zeros;    /* of them, zeros that were given back */
	uint64_t hot;      /* of them, those that are left alone now */
	uint64_t stored;   /* contents in the store, a page each */
	int64_t saved;     /* bytes, gross: (merged + zeros - stored) pages */
	uint64_t index;    /* bytes of the index */
	uint64_t overhead; /* bytes of all that the engine keeps beside the store, the index among it */
} pagefold_domain;

enum pagefold_advice {
	PAGEFOLD_MERGEABLE,   /* it may be merged, whatever is known of how often it was written: the default */
	PAGEFOLD_UNMERGEABLE, /* nothing more of it is merged */
	PAGEFOLD_HOT,         /* it is written again and again: left alone for 68 minutes, merged pages once written */
};

/*
 * Become a member of a domain, or found it. domain may be NULL in a rank of an MPI job whose launcher gives the job a
 * name (PMIX_NAMESPACE, SLURM_JOB_ID, PMI_JOBID): then it is that of the job. options may be NULL. NULL on failure.
 */
pagefold_engine *pagefold_join(const char *domain, const pagefold_options *options);

/* Leave. What is merged stays merged; memory of pagefold_allocate stays. engine may be NULL. */
void pagefold_leave(pagefold_engine *engine);

/* New memory that may be merged, of so many bytes, rounded up to whole pages. NULL on failure. */
void *pagefold_allocate(pagefold_engine *engine, size_t bytes);

/* Give memory of pagefold_allocate back, all of it. Does not wait for the end of a merge that another thread makes. */
int pagefold_free(pagefold_engine *engine, void *memory, size_t bytes);

/* Hand private anonymous memory of the program over. No device may have it pinned while it is merged. */
int pagefold_adopt(pagefold_engine *engine, void *memory, size_t bytes);

/*
 * Take memory that was handed over back, all or part of it, as before it is unmapped. What of it is merged stays so
 * until it is written.
 */
int pagefold_forsake(pagefold_engine *engine, void *memory, size_t bytes);

/* Say what whole pages are to be taken for. */
int pagefold_advise(pagefold_engine *engine, void *memory, size_t bytes, enum pagefold_advice advice);

/* Make a range read as zeros, and take no memory: what madvise(MADV_DONTNEED) does to ordinary memory. */
int pagefold_clear(pagefold_engine *engine, void *memory, size_t bytes);

/*
 * Merge what is identical now. Nobody may write to, unmap, move or replace memory that is or was the engine's until it
 * returns. Fails while memory of this process is pinned for a device or io_uring (VmPin of /proc/self/status), unless
 * merge_while_pinned is set: what is written to pinned pages after they were merged would be lost. Pins of a moment, as
 * of O_DIRECT reads under way, are not seen. Nor may memory of the engine be registered or pinned (io_uring, RDMA) while
 * any merge runs, in the background or not: the kernel accounts a pin only after it is made. merged may be NULL.
 */
int pagefold_merge_sized(pagefold_engine *engine, pagefold_merged *merged, size_t size);
static inline int pagefold_merge(pagefold_engine *engine, pagefold_merged *merged)
{
	return pagefold_merge_sized(engine, merged, sizeof(pagefold_merged));
}

/*
 * Merge what is identical while the program runs: who writes to pages that are in hand waits for as long as it takes to
 * compare, copy or map those, 512 at most, which are 2 MiB with pages of 4 KiB. Fails where writers cannot be made to
 * wait: it takes Linux 6.4, and CAP_SYS_PTRACE, vm.unprivileged_userfaultfd=1 or access to /dev/userfaultfd; and while
 * memory is pinned, as pagefold_merge does. Nobody may unmap, move or replace memory of the engine but by its own
 * functions until it returns. The calling thread takes no signals meanwhile. merged may be NULL.
 */
int pagefold_merge_while_running_sized(pagefold_engine *engine, pagefold_merged *merged, size_t size);
static inline int pagefold_merge_while_running(pagefold_engine *engine, pagefold_merged *merged)
{
	return pagefold_merge_while_running_sized(engine, merged, sizeof(pagefold_merged));
}

/*
 * Do so again and again, in a thread that takes at most a share of one CPU, from 0 to 1, and no signals, and rests
 * longer and longer while that does not pay or memory is pinned. NULL on failure, as above.
 */
pagefold_background *pagefold_merge_in_background(pagefold_engine *engine, double share);

/*
 * End that, once the merge in hand is done, before pagefold_leave. Not 0 if it had ended by itself or its last merge was
 * refused because memory is pinned, as pagefold_error() tells. background may be NULL.
 */
int pagefold_end_background(pagefold_background *background);

/* How this member stands, and what its domain's store takes. */
int pagefold_standing_of_sized(pagefold_engine *engine, pagefold_standing *standing, size_t size);
static inline int pagefold_standing_of(pagefold_engine *engine, pagefold_standing *standing)
{
	return pagefold_standing_of_sized(engine, standing, sizeof(pagefold_standing));
}

/* What all merges of this member did so far, together. */
int pagefold_so_far_of_sized(pagefold_engine *engine, pagefold_merged *merged, size_t size);
static inline int pagefold_so_far_of(pagefold_engine *engine, pagefold_merged *merged)
{
	return pagefold_so_far_of_sized(engine, merged, sizeof(pagefold_merged));
}

/*
 * How each region of this member stands, by address. *count says for how many there is room, and then how many there
 * are; regions may be NULL to ask for that.
 */
int pagefold_regions_of_sized(pagefold_engine *engine, pagefold_region *regions, size_t *count, size_t size);
static inline int pagefold_regions_of(pagefold_engine *engine, pagefold_region *regions, size_t *count)
{
	return pagefold_regions_of_sized(engine, regions, count, sizeof(pagefold_region));
}

/* How the domain stands. */
int pagefold_domain_of_sized(pagefold_engine *engine, pagefold_domain *domain, size_t size);
static inline int pagefold_domain_of(pagefold_engine *engine, pagefold_domain *domain)
{
	return pagefold_domain_of_sized(engine, domain, sizeof(pagefold_domain));
}

/* Why the last call of this thread failed. Valid until its next one. */
const char *pagefold_error(void);

#ifdef __cplusplus
}
#endif

#endif
