/* Performs random operations of programs on large memory, beside threads that write, and checks the content of each
 * page. One number determines the content of a page, and there are few numbers, so that most pages are equal.
 *
 * blocks SEED MILLISECONDS */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <malloc.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, WORDS = PAGE / 8, SLOTS = 12, LARGEST = 512, WRITERS = 2 };

struct slot {
    unsigned long *memory; /* a page for each value; NULL if there is none */
    size_t pages;
    int mapped; /* by mmap, not malloc */
    unsigned char values[2 * LARGEST];
};

static struct slot slots[SLOTS];
static volatile int over;
static unsigned long state;

static unsigned long below(unsigned long bound) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state % bound;
}

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "blocks.c:%d: %s: %s\n", __LINE__, #condition, strerror(errno)); \
            abort(); \
        } \
    } while (0)

static unsigned long word(unsigned char value, size_t at) { return value ? value * 0x9e3779b97f4a7c15ul + at : 0; }

static void fill(struct slot *slot, size_t from, size_t to, unsigned char value) {
    for (size_t page = from; page < to; page++) {
        for (size_t at = 0; at < WORDS; at++) slot->memory[page * WORDS + at] = word(value, at);
        slot->values[page] = value;
    }
}

static void check(const struct slot *slot) {
    for (size_t page = 0; page < slot->pages; page++)
        for (size_t at = 0; at < WORDS; at++)
            CHECK(slot->memory[page * WORDS + at] == word(slot->values[page], at));
}

static void check_all(void) {
    for (struct slot *slot = slots; slot < slots + SLOTS; slot++)
        if (slot->memory) check(slot);
}

static void make(struct slot *slot) {
    slot->pages = 1 + below(LARGEST);
    size_t bytes = slot->pages * PAGE;
    int how = below(5), zeros = how == 1 || how == 4;
    slot->mapped = how == 4;
    switch (how) {
    case 0: slot->memory = malloc(bytes); break;
    case 1: slot->memory = calloc(slot->pages, PAGE); break;
    case 2: CHECK(posix_memalign((void **)&slot->memory, 1ul << (12 + below(6)), bytes) == 0); break;
    case 3: slot->memory = aligned_alloc(PAGE, bytes); break;
    default: slot->memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
    CHECK(slot->memory && slot->memory != MAP_FAILED);
    if (!slot->mapped) CHECK(malloc_usable_size(slot->memory) >= bytes);
    memset(slot->values, 0, sizeof slot->values);
    if (zeros) check(slot);
    fill(slot, 0, slot->pages, below(4));
}

static void end(struct slot *slot) {
    if (slot->mapped) CHECK(munmap(slot->memory, slot->pages * PAGE) == 0);
    else {
        errno = 77;
        free(slot->memory);
        CHECK(errno == 77);
    }
    slot->memory = NULL;
}

static void resize(struct slot *slot) {
    size_t before = slot->pages, bytes = before * PAGE;
    slot->pages = 1 + below(LARGEST);
    size_t wanted = slot->pages * PAGE;
    if (slot->mapped && below(3) == 0) {
        /* To an address of its own choice. */
        void *place = mmap(NULL, wanted, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(place != MAP_FAILED);
        void *moved = mremap(slot->memory, bytes, wanted, MREMAP_MAYMOVE | MREMAP_FIXED, place);
        if (moved == MAP_FAILED) {
            CHECK(errno == EFAULT);
            slot->pages = before;
            return;
        }
        CHECK(moved == place);
        slot->memory = place;
    } else if (slot->mapped) {
        void *moved = mremap(slot->memory, bytes, wanted, below(2) ? MREMAP_MAYMOVE : 0);
        if (moved == MAP_FAILED) {
            /* EFAULT if advice has split it into several mappings. */
            CHECK(errno == ENOMEM || errno == EFAULT);
            slot->pages = before;
            return;
        }
        slot->memory = moved;
    } else {
        slot->memory = realloc(slot->memory, wanted);
        CHECK(slot->memory);
        if (slot->pages > before) fill(slot, before, slot->pages, below(4));
    }
    if (slot->pages > before && slot->mapped) memset(slot->values + before, 0, slot->pages - before);
    check(slot);
}

/* A mapping loses pages at one end, or is replaced in the middle. */
static void cut(struct slot *slot) {
    if (!slot->mapped || slot->pages < 3) return;
    size_t pages = 1 + below(slot->pages - 1);
    char *start = (char *)slot->memory;
    switch (below(3)) {
    case 0:
        CHECK(munmap(start, pages * PAGE) == 0);
        slot->memory += pages * WORDS;
        memmove(slot->values, slot->values + pages, slot->pages - pages);
        break;
    case 1: CHECK(munmap(start + (slot->pages - pages) * PAGE, pages * PAGE) == 0); break;
    default:
        CHECK(mmap(start + PAGE, PAGE, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) ==
              start + PAGE);
        slot->values[1] = 0;
        pages = 0;
    }
    slot->pages -= pages;
}

static void advise(struct slot *slot) {
    if ((unsigned long)slot->memory % PAGE) return;
    size_t from = below(slot->pages), to = from + 1 + below(slot->pages - from);
    char *start = (char *)slot->memory + from * PAGE;
    size_t bytes = (to - from) * PAGE;
    switch (below(8)) {
    case 0:
    case 1:
    case 2:
        CHECK(madvise(start, bytes, MADV_DONTNEED) == 0);
        memset(slot->values + from, 0, to - from);
        break;
    case 3:
        CHECK(madvise(start, bytes, MADV_FREE) == 0);
        fill(slot, from, to, below(4));
        break;
    case 4:
        CHECK(mprotect(start, bytes, PROT_READ) == 0);
        check(slot);
        CHECK(mprotect(start, bytes, PROT_READ | PROT_WRITE) == 0);
        break;
    case 5: CHECK(madvise(start, bytes, below(2) ? MADV_HUGEPAGE : MADV_DONTDUMP) == 0); break;
    case 6: CHECK(mlock(start, PAGE) == 0 && munlock(start, PAGE) == 0); break;
    default: {
        int ends[2];
        static char page[PAGE];
        /* The kernel writes, too. */
        CHECK(pipe(ends) == 0 && write(ends[1], page, PAGE) == PAGE && read(ends[0], start, PAGE) == PAGE);
        slot->values[from] = 0;
        close(ends[0]), close(ends[1]);
    }
    }
    check(slot);
}

static void follow(void) {
    pid_t child = fork();
    CHECK(child != -1);
    if (child == 0) {
        check_all();
        struct slot *slot = slots + below(SLOTS);
        if (slot->memory) end(slot);
        make(slot);
        /* Sometimes long enough for the memory to be merged. */
        if (below(8) == 0) usleep(700000);
        check_all();
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

/* Counts in each page of its own memory, most of which stays equal. */
static void *writes(void *argument) {
    size_t pages = 256;
    unsigned long *memory = malloc(pages * PAGE), count = 0;
    CHECK(memory);
    (void)argument;
    memset(memory, 0, pages * PAGE);
    while (!over) {
        for (size_t page = 0; page < pages; page += 1 + count % 7) {
            unsigned long *at = memory + page * WORDS, before = *at;
            *(volatile unsigned long *)at = before + 1;
            CHECK(*(volatile unsigned long *)at == before + 1 && at[1] == before * 3);
            at[1] = (before + 1) * 3;
        }
        count++;
        if (count % 64 == 0) usleep(1000);
    }
    free(memory);
    return NULL;
}

int main(int count, char **words) {
    CHECK(count == 3);
    state = strtoul(words[1], NULL, 0) * 2 + 1;
    struct timespec now, began;
    clock_gettime(CLOCK_MONOTONIC, &began);
    pthread_t writers[WRITERS];
    for (int at = 0; at < WRITERS; at++) CHECK(pthread_create(writers + at, NULL, writes, NULL) == 0);
    do {
        for (int step = 0; step < 40; step++) {
            struct slot *slot = slots + below(SLOTS);
            if (!slot->memory) {
                make(slot);
                continue;
            }
            switch (below(8)) {
            case 0: end(slot); break;
            case 1: resize(slot); break;
            case 2: cut(slot); break;
            case 3: advise(slot); break;
            case 4: fill(slot, below(slot->pages), slot->pages, below(4)); break;
            default: check(slot);
            }
        }
        check_all();
        if (below(4) == 0) follow();
        usleep(20000);
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((now.tv_sec - began.tv_sec) * 1000 + (now.tv_nsec - began.tv_nsec) / 1000000 < atol(words[2]));
    check_all();
    over = 1;
    for (int at = 0; at < WRITERS; at++) pthread_join(writers[at], NULL);
    puts("all memory as it was written");
    return 0;
}
