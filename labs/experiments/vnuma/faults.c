/* faults CPUS ROUNDS: on each CPU a process maps 32 MiB, writes to each page, and unmaps it again, for this number of
 * rounds. Prints the page faults of all. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define BYTES (32l << 20)
#define PAGE_BYTES 4096

static void fail(const char *what) {
	perror(what);
	exit(1);
}

static void run(int cpu, long rounds) {
	cpu_set_t set;
	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	if (sched_setaffinity(0, sizeof set, &set) != 0)
		fail("sched_setaffinity");
	for (long round = 0; round < rounds; round++) {
		char *memory = mmap(0, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (memory == MAP_FAILED || madvise(memory, BYTES, MADV_NOHUGEPAGE) != 0)
			fail("mmap");
		for (long i = 0; i < BYTES; i += PAGE_BYTES)
			memory[i] = 1;
		munmap(memory, BYTES);
	}
}

int main(int count, char **arguments) {
	int cpus = count > 1 ? atoi(arguments[1]) : 1, status = 0, failed = 0;
	long rounds = count > 2 ? atol(arguments[2]) : 1;
	for (int cpu = 0; cpu < cpus; cpu++) {
		pid_t child = fork();
		if (child < 0)
			fail("fork");
		if (child == 0) {
			run(cpu, rounds);
			return 0;
		}
	}
	while (wait(&status) > 0)
		failed |= status != 0;
	if (failed)
		return 1;
	printf("faults %ld\n", cpus * rounds * (BYTES / PAGE_BYTES));
	return 0;
}
