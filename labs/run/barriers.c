/* Goes through barriers without end in sight, with many large allocations that are equal, linked with `lonely_mpi.c`.
 * Says how many milliseconds that took.
 *
 * barriers COUNT ALLOCATIONS */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

int MPI_Init(int *count, char ***words);
int MPI_Barrier(void *comm);

/* Called by its address, as tables of functions are. */
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
