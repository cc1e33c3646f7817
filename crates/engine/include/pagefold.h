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
	double min_runtime;  /* minimum run time of the program, in seconds: merges that are expected to be profitable
	                        may spend max_slowdown of all this time from the beginning on */
	int merge_while_pinned; /* nonzero: merge although memory of this process is pinned for a device or io_uring; the
	                        caller guarantees that no engine memory is pinned */
	int split_huge_pages; /* nonzero: split huge pages wherever that saves memory, even with a max_slowdown */
} pagefold_options;

#define PAGEFOLD_OPTIONS_INIT { sizeof(pagefold_options), NULL, 0.02, 1, 0, 0, 0, 0 }

/* Counters of one merge, or of all merges together. */
typedef struct pagefold_merge_counters {
	uint64_t pages_scanned;    /* pages whose contents were scanned */
	uint64_t zeros_freed;      /* pages of zeros that were freed */
	uint64_t pages_merged;     /* pages that map the store now */
	uint64_t unlikely_to_last; /* merged and freed pages that are not expected to last: they were merged before and
	                              written too soon */
	uint64_t contents_stored;  /* pages whose contents were written to the store */
	uint64_t runs_mapped;      /* runs of at most 2048 pages that were mapped as one */
	uint64_t unprofitable;     /* pages of zeros or with a partner that were not merged: their run was unprofitable */
	uint64_t cow_breaks;       /* pages that were written since they were merged or freed */
	uint64_t early_cow_breaks; /* COW breaks of pages that were expected to last, but were written before their merge
	                              was profitable */
	uint64_t zeros_read;       /* freed pages of zeros that were read since, each counted once */
	uint64_t backed_off;       /* pages that were skipped: they were written too soon before, or scanned without a
	                              partner too often */
	uint64_t pages_failed;     /* pages that could not be merged */
	/* merges that did not scan everything: time or memory was short, the merge was not expected to be profitable, or
	   all members are to merge at a later time */
	uint64_t incomplete_merges;
	uint64_t blocked_merges;   /* merges that left work to a later one: another member held the lock for too long, or
	                              files of the domain were removed meanwhile */
	uint64_t program_time_ns;  /* nanoseconds of the program's time */
} pagefold_merge_counters;

/* Status of a member, and size of its domain's store. */
typedef struct pagefold_member_status {
	uint64_t pages;           /* of this member's engine memory, resident or not */
	uint64_t merged;          /* of these, pages that map the store and were not written since */
	uint64_t zeros;           /* of these, pages of zeros that were freed and not written since */
	uint64_t rewritten_pages; /* of these, pages that are skipped now: they were written too soon after a merge */
	uint64_t store_bytes;     /* bytes that the domain's store uses, for all members together */
	uint64_t pinned_bytes;    /* bytes of this process that are pinned long-term, as for a device: they must not be
	                             adopted */
	uint64_t mapping_count;   /* mappings of this process */
	uint64_t note_bytes;      /* bytes of notes on the pages of this member */
	uint64_t merge_count;     /* merges since this process joined, including those that did nothing */
	uint64_t elapsed_ns;      /* nanoseconds since this process joined */
	uint64_t overhead_ns;     /* nanoseconds of these that the engine took from the program. It is compared with
	                             max_slowdown of (elapsed_ns - overhead_ns), except for time that min_runtime allowed in
	                             advance */
} pagefold_member_status;

/* Status of a region of a member, in pages. */
typedef struct pagefold_region_status {
	void *memory;
	size_t bytes;
	uint64_t merged;          /* pages that map the store and were not written since */
	uint64_t zeros;           /* pages of zeros that were freed and not written since */
	uint64_t rewritten_pages; /* pages that are skipped now: they were written too soon after a merge */
	int64_t saved_bytes;      /* gross savings, by the mean of the domain */
} pagefold_region_status;

/* Status of a domain: all its members, each as of its last report. */
typedef struct pagefold_domain_status {
	uint64_t members;
	uint64_t pages;           /* of their engine memory, resident or not */
	uint64_t merged;          /* of these, pages that map the store */
	uint64_t zeros;           /* of these, pages of zeros that were freed */
	uint64_t rewritten_pages; /* of these, pages that are skipped now */
	uint64_t stored_contents; /* contents in the store, one page each */
	int64_t saved_bytes;      /* gross savings: (merged + zeros - stored_contents) pages */
	uint64_t index_bytes;     /* size of the index */
	uint64_t overhead_bytes;  /* the engine's own memory except the store, including the index */
} pagefold_domain_status;

enum pagefold_advice {
	PAGEFOLD_MERGEABLE,   /* merge it, whatever its write history; the default */
	PAGEFOLD_UNMERGEABLE, /* do not merge it; merged pages stay merged until they are written */
	PAGEFOLD_REWRITTEN,   /* it is written again and again: skip it for 68 minutes, merged pages once written */
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
int pagefold_disown(pagefold_engine *engine, void *memory, size_t bytes);

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
 * register or pin engine memory (io_uring, RDMA): the kernel accounts a pin only after it is made. counters may be
 * NULL.
 */
int pagefold_merge_sized(pagefold_engine *engine, pagefold_merge_counters *counters, size_t size);
static inline int pagefold_merge(pagefold_engine *engine, pagefold_merge_counters *counters)
{
	return pagefold_merge_sized(engine, counters, sizeof(pagefold_merge_counters));
}

/*
 * Merge identical pages while the program runs. A thread that writes to a page waits while the merge compares, copies
 * or maps it. Each merging thread works on at most 512 pages at a time, 2 MiB with pages of 4 KiB.
 *
 * Needs Linux 6.4, and one of CAP_SYS_PTRACE, vm.unprivileged_userfaultfd=1 or access to /dev/userfaultfd. Fails
 * without these, and while memory is pinned, as pagefold_merge does. Until it returns, the program may unmap, move or
 * replace engine memory only by functions of this library. The calling thread blocks signals meanwhile. counters may
 * be NULL.
 */
int pagefold_merge_while_running_sized(pagefold_engine *engine, pagefold_merge_counters *counters, size_t size);
static inline int pagefold_merge_while_running(pagefold_engine *engine, pagefold_merge_counters *counters)
{
	return pagefold_merge_while_running_sized(engine, counters, sizeof(pagefold_merge_counters));
}

/*
 * Merge repeatedly while the program runs, in a new thread that uses at most cpu_share of one CPU, from 0 to 1, and
 * blocks signals. It pauses with exponential backoff while merges are unprofitable or memory is pinned. NULL on
 * failure, as above.
 */
pagefold_background *pagefold_merge_in_background(pagefold_engine *engine, double cpu_share);

/*
 * End the thread after its current merge. Call this before pagefold_leave. Fails if the thread had ended by itself, or
 * if its last merge was refused because memory was pinned. background may be NULL.
 */
int pagefold_end_background(pagefold_background *background);

/* Status of this member, and size of its domain's store. */
int pagefold_get_member_status_sized(pagefold_engine *engine, pagefold_member_status *status, size_t size);
static inline int pagefold_get_member_status(pagefold_engine *engine, pagefold_member_status *status)
{
	return pagefold_get_member_status_sized(engine, status, sizeof(pagefold_member_status));
}

/* Counters of all merges of this member together. */
int pagefold_get_merge_totals_sized(pagefold_engine *engine, pagefold_merge_counters *counters, size_t size);
static inline int pagefold_get_merge_totals(pagefold_engine *engine, pagefold_merge_counters *counters)
{
	return pagefold_get_merge_totals_sized(engine, counters, sizeof(pagefold_merge_counters));
}

/*
 * Status of each region of this member, by address. *count is the capacity of regions, and becomes the number of
 * regions of the member. regions may be NULL to get that number alone.
 */
int pagefold_get_region_statuses_sized(pagefold_engine *engine, pagefold_region_status *regions, size_t *count,
                                       size_t size);
static inline int pagefold_get_region_statuses(pagefold_engine *engine, pagefold_region_status *regions, size_t *count)
{
	return pagefold_get_region_statuses_sized(engine, regions, count, sizeof(pagefold_region_status));
}

/* Status of the domain. */
int pagefold_get_domain_status_sized(pagefold_engine *engine, pagefold_domain_status *status, size_t size);
static inline int pagefold_get_domain_status(pagefold_engine *engine, pagefold_domain_status *status)
{
	return pagefold_get_domain_status_sized(engine, status, sizeof(pagefold_domain_status));
}

/* Reason why the last call of this thread failed. Valid until the thread's next call. */
const char *pagefold_error(void);

#ifdef __cplusplus
}
#endif

#endif
