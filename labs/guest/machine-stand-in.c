// A stand-in for an emulated machine of QEMU, for guests without QEMU: tests install it as qemu-system-x86_64 and give it the
// arguments of a machine. It has a thread `CPU N/TCG` for each virtual CPU of `-smp COUNT`, which waits, and a page of
// memory that may be merged. It prints READY, and ends when standard input closes.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE_BYTES 4096UL

static void *wait_forever(void *number) {
    char name[16];
    snprintf(name, sizeof name, "CPU %u/TCG", (unsigned)(uintptr_t)number);
    pthread_setname_np(pthread_self(), name);
    for (;;)
        pause();
}

int main(int count, char **arguments) {
    unsigned long vcpus = 1;
    for (int i = 1; i + 1 < count; i++)
        if (!strcmp(arguments[i], "-smp"))
            vcpus = strtoul(arguments[i + 1], NULL, 10);
    for (unsigned long number = 0; number < vcpus; number++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, wait_forever, (void *)(uintptr_t)number))
            return 1;
    }
    char *memory = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || madvise(memory, PAGE_BYTES, MADV_MERGEABLE))
        return 1;
    memory[0] = 1;
    printf("READY\n");
    fflush(stdout);
    while (getchar() != EOF) {
    }
    return 0;
}
