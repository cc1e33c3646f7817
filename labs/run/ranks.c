/* An MPI program: every rank prints whether it is enrolled in KSM, the ranks sum their numbers, and all exit with the
 * given status.
 *
 * ranks STATUS */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int enrolled(void) {
    char line[128];
    int found = 0;
    FILE *file = fopen("/proc/self/ksm_stat", "r");
    while (file && fgets(line, sizeof line, file)) found |= !strcmp(line, "ksm_merge_any: yes\n");
    if (file) fclose(file);
    return found;
}

int main(int count, char **words) {
    int rank, size, sum, is = enrolled(), all;
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Reduce(&rank, &sum, 1, MPI_INT, MPI_SUM, 0, MPI_COMM_WORLD);
    MPI_Reduce(&is, &all, 1, MPI_INT, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0) {
        printf("size=%d sum=%d\n", size, sum);
        fprintf(stderr, "enrolled=%d\n", all);
    }
    MPI_Finalize();
    return count > 1 ? atoi(words[1]) : 0;
}
