// A process with memory that `pagefold numa apply` cannot treat as any other. Arguments KIND=PAGES, in base pages:
//
//   plain=N    private memory
//   mapped=N   private memory that is not written
//   hugetlb=N  private memory in hugetlb pages of 2 MiB; N is a multiple of 512
//   pinned=N   private memory that io_uring pins as registered buffers, as a device driver does (FOLL_LONGTERM)
//   counted=N  the same as an ordinary user, so that the kernel counts it in VmPin
//   bound=N    private memory with the policy MPOL_BIND for the node where the process runs; half of it is written
//   busy=N     private memory in a mapping of its own, which the process reads all the time
//
// It prints `READY pid=PID`. For each line on standard input it writes the rest of the bound memory and prints `FILLED`.
// It ends when standard input closes. It checks then that all memory has its content, and prints `INTACT`.
#define _GNU_SOURCE
#include <linux/io_uring.h>
#include <linux/mempolicy.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define PAGE_BYTES 4096UL
#define MAX_REGIONS 8
#define USER 1000

struct region {
    char *memory;
    unsigned long pages, written;
};

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void write_pages(struct region *region, unsigned long pages) {
    for (; region->written < pages; region->written++)
        *(unsigned long *)(region->memory + region->written * PAGE_BYTES) = region->written + 1;
}

static char *map(unsigned long pages, int flags) {
    char *memory = mmap(NULL, pages * PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    if (memory == MAP_FAILED)
        fail("mmap");
    if (!(flags & MAP_HUGETLB) && madvise(memory, pages * PAGE_BYTES, MADV_NOHUGEPAGE))
        fail("madvise");
    return memory;
}

static void pin(const struct region *region) {
    struct io_uring_params parameters = {0};
    struct iovec buffer = {region->memory, region->pages * PAGE_BYTES};
    int ring = syscall(SYS_io_uring_setup, 1, &parameters);
    if (ring < 0)
        fail("io_uring_setup");
    if (syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, &buffer, 1))
        fail("IORING_REGISTER_BUFFERS");
}

static void bind_to_own_node(const struct region *region) {
    unsigned cpu, node;
    if (getcpu(&cpu, &node))
        fail("getcpu");
    unsigned long nodes = 1UL << node;
    if (syscall(SYS_mbind, region->memory, region->pages * PAGE_BYTES, MPOL_BIND, &nodes, sizeof nodes * 8, 0))
        fail("mbind");
}

/* Memory that ends in a page without access, so that the kernel does not join it with the next mapping. */
static char *map_apart(unsigned long pages) {
    char *memory = map(pages + 1, 0);
    if (mprotect(memory + pages * PAGE_BYTES, PAGE_BYTES, PROT_NONE))
        fail("mprotect");
    return memory;
}

static void read_until_input(const struct region *regions, int count) {
    struct pollfd input = {STDIN_FILENO, POLLIN, 0};
    while (!poll(&input, 1, 0))
        for (int i = 0; i < count; i++)
            for (unsigned long page = 0; page < regions[i].written; page++)
                (void)*(volatile unsigned long *)(regions[i].memory + page * PAGE_BYTES);
}

int main(int count, char **arguments) {
    struct region regions[MAX_REGIONS], *bound = NULL;
    int region_count = 0, is_busy = 0;
    for (int i = 1; i < count && region_count < MAX_REGIONS; i++) {
        char kind[16];
        struct region *region = &regions[region_count++];
        region->written = 0;
        if (sscanf(arguments[i], "%15[a-z]=%lu", kind, &region->pages) != 2)
            exit(2);
        if (!strcmp(kind, "busy")) {
            is_busy = 1;
            region->memory = map_apart(region->pages);
        } else {
            region->memory = map(region->pages, strcmp(kind, "hugetlb") ? 0 : MAP_HUGETLB);
        }
        if (!strcmp(kind, "bound")) {
            bind_to_own_node(region);
            bound = region;
        }
        if (strcmp(kind, "mapped"))
            write_pages(region, region == bound ? region->pages / 2 : region->pages);
        if (!strcmp(kind, "counted") && setresuid(USER, USER, USER))
            fail("setresuid");
        if (!strcmp(kind, "counted") || !strcmp(kind, "pinned"))
            pin(region);
    }
    printf("READY pid=%d\n", getpid());
    fflush(stdout);
    char line[16];
    for (;;) {
        if (is_busy)
            read_until_input(regions, region_count);
        if (!fgets(line, sizeof line, stdin))
            break;
        if (bound)
            write_pages(bound, bound->pages);
        puts("FILLED");
        fflush(stdout);
    }
    for (int i = 0; i < region_count; i++)
        for (unsigned long page = 0; page < regions[i].written; page++)
            if (*(unsigned long *)(regions[i].memory + page * PAGE_BYTES) != page + 1)
                exit(3);
    puts("INTACT");
    return 0;
}
