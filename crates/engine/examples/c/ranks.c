/*
 * Processes with the same table, and a work array of mostly zeros in each: like the ranks of an MPI program. They merge
 * after a barrier that all of them have reached, and print the savings. A thread of each process monitors them.
 *
 *     cc -O2 -pthread ranks.c $(pkg-config --cflags --libs pagefold) -o ranks && ./ranks 4 64
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#define _GNU_SOURCE
#include <pagefold.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static void fail(const char *what)
{
	fprintf(stderr, "%s: %s\n", what, pagefold_error());
	exit(1);
}

/* The content of a word follows from its index. */
static uint64_t word(uint64_t place)
{
	place *= 0x9e3779b97f4a7c15u;
	return (place ^ place >> 31) | 1;
}

/* The PSS of this process, in KiB: shared pages count in proportion to the number of their processes. */
static long pss(void)
{
	FILE *file = fopen("/proc/self/smaps_rollup", "r");
	char line[256];
	long kib = 0;
	while (file && fgets(line, sizeof line, file))
		if (sscanf(line, "Pss: %ld", &kib) == 1)
			break;
	if (file)
		fclose(file);
	return kib;
}

/* Status that a second thread reads while the first one merges. */
struct monitor {
	pagefold_engine *engine;
	atomic_bool ends;
	/* From the last reading; read these after the thread has ended. */
	pagefold_member_status member_status;
	pagefold_domain_status domain_status;
};

static void *watch(void *argument)
{
	struct monitor *monitor = argument;
	/* It reads once more after the request to end, so that it sees all merges before that request. */
	for (int last = 0; !last;) {
		last = atomic_load(&monitor->ends);
		/* The first of these calls waits while this process merges. */
		if (pagefold_get_member_status(monitor->engine, &monitor->member_status) ||
		    pagefold_get_domain_status(monitor->engine, &monitor->domain_status))
			fail("watch");
		usleep(10000);
	}
	return NULL;
}

static int rank_of_many(int rank, size_t bytes, const char *domain, pthread_barrier_t *barrier)
{
	pagefold_options options = PAGEFOLD_OPTIONS_INIT;
	options.max_slowdown = -1; /* no bound: the program has no other work here */
	options.threads = 2;
	pagefold_engine *engine = pagefold_join(domain, &options);
	if (!engine)
		fail("join");
	uint64_t *table = pagefold_allocate(engine, bytes), *work = pagefold_allocate(engine, bytes);
	if (!table || !work)
		fail("allocate");
	size_t words = bytes / sizeof *table;
	for (size_t i = 0; i < words; i++)
		table[i] = word(i);
	memset(work, 0, bytes);
	work[words / 2] = word(rank);
	struct monitor monitor = { .engine = engine };
	pthread_t watching;
	if (pthread_create(&watching, NULL, watch, &monitor)) {
		fprintf(stderr, "cannot start the monitor thread\n");
		exit(1);
	}
	pthread_barrier_wait(barrier);
	long before = pss();

	/* No rank writes here. The first merge publishes what each rank holds; the second merge finds the duplicates. */
	pagefold_merge_counters counters, sum = { 0 };
	for (int round = 0; round < 2; round++) {
		pthread_barrier_wait(barrier);
		if (pagefold_merge(engine, &counters))
			fail("merge");
		sum.pages_merged += counters.pages_merged;
		sum.zeros_freed += counters.zeros_freed;
		sum.program_time_ns += counters.program_time_ns;
	}
	pthread_barrier_wait(barrier);
	atomic_store(&monitor.ends, 1);
	pthread_join(watching, NULL);
	printf("rank %d: %lu pages merged, %lu of zeros freed in %.1f ms; %ld MiB before, %ld after; "
	       "%lu merges seen, and %ld MiB saved by all ranks\n",
	       rank, (unsigned long)sum.pages_merged, (unsigned long)sum.zeros_freed, sum.program_time_ns / 1e6,
	       before / 1024, pss() / 1024, (unsigned long)monitor.member_status.merge_count,
	       (long)(monitor.domain_status.saved_bytes >> 20));

	pthread_barrier_wait(barrier);
	table[0] = word(rank); /* private to this rank from here on */
	int wrong = table[0] != word(rank) || work[words / 2] != word(rank);
	for (size_t i = 1; i < words; i++)
		wrong |= table[i] != word(i) || (i != words / 2 && work[i] != 0);
	if (pagefold_free(engine, table, bytes) || pagefold_free(engine, work, bytes))
		fail("free");
	pagefold_leave(engine);
	return wrong;
}

int main(int argc, char **argv)
{
	int ranks = argc > 1 ? atoi(argv[1]) : 4;
	size_t bytes = (argc > 2 ? strtoul(argv[2], NULL, 10) : 64) << 20;
	char domain[64];
	snprintf(domain, sizeof domain, "ranks-%d", getpid());
	pthread_barrier_t *barrier = mmap(NULL, sizeof *barrier, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pthread_barrierattr_t shared;
	pthread_barrierattr_init(&shared);
	pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
	if (ranks < 1 || bytes == 0 || barrier == MAP_FAILED || pthread_barrier_init(barrier, &shared, ranks)) {
		fprintf(stderr, "usage: ranks RANKS MIB\n");
		return 2;
	}
	for (int rank = 0; rank < ranks; rank++) {
		fflush(stdout);
		if (fork() == 0)
			return rank_of_many(rank, bytes, domain, barrier);
	}
	int wrong = 0, status;
	while (wait(&status) > 0)
		wrong |= status != 0;
	puts(wrong ? "memory differs" : "all memory as it was written");
	return wrong;
}
