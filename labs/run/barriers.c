/* Runs through barriers, with many large allocations of equal content, linked with `lonely_mpi.c`. Prints the time in
 * milliseconds.
 *
 * barriers COUNT ALLOCATIONS */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

int MPI_Init(int *count, char ***words);
int MPI_Barrier(void *comm);

/* Called by its address, as in tables of functions. */
static int (*volatile meet)(void *comm);

static long milliseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

int main(int count, char **words) {
    if (count != 3) return 2;
    long barriers = atol(words[1]), allocations = atol(words[2]), bytes = 1 << 17, wrong = 0;
    char **memory = calloc(allocations, sizeof *memory);
    long began = milliseconds();
    meet = MPI_Barrier;
    MPI_Init(&count, &words);
    for (long each = 0; each < allocations; each++) memset(memory[each] = malloc(bytes), 3, bytes);
    for (long each = 0; each < barriers; each++) {
        meet(NULL);
        if (each < 3) usleep(1000);
    }
    for (long each = 0; each < allocations; each++) wrong += memory[each][bytes / 2] != 3;
    printf("%ld\n", milliseconds() - began);
    return wrong != 0;
}
