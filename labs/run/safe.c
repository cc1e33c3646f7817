/* An unmodified MPI program. Every rank fills memory, of which half is equal in all ranks and a quarter is zeros. It
 * steps from barrier to barrier, with nonblocking receives into its own memory all the time. Rank 0 prints at the end
 * how much the PSS of all ranks has shrunk. With -DFORTRAN the program calls barriers and reductions as a Fortran
 * compiler does, by the module `mpi` and by `mpi_f08`.
 *
 * safe MEBIBYTES STEPS [threads] */
#include <mpi.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef FORTRAN
void mpi_init_(int *error);
void mpi_barrier_(int *comm, int *error);
void mpi_allreduce_f08_(void *from, void *to, int *count, int *type, int *op, int *comm, int *error);

static void start(void) {
    int error;
    mpi_init_(&error);
}

static void meet(void) {
    int comm = MPI_Comm_c2f(MPI_COMM_WORLD), error;
    mpi_barrier_(&comm, &error);
}

static void add(double *from, double *to) {
    int one = 1, type = MPI_Type_c2f(MPI_DOUBLE), op = MPI_Op_c2f(MPI_SUM), comm = MPI_Comm_c2f(MPI_COMM_WORLD), error;
    mpi_allreduce_f08_(from, to, &one, &type, &op, &comm, &error);
}
#else
static void start(void) { MPI_Init(NULL, NULL); }
static void meet(void) { MPI_Barrier(MPI_COMM_WORLD); }
static void add(double *from, double *to) { MPI_Allreduce(from, to, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD); }
#endif

static long share(void) {
    char line[128];
    long kib = -1;
    FILE *file = fopen("/proc/self/smaps_rollup", "r");
    while (file && fgets(line, sizeof line, file)) sscanf(line, "Pss: %ld", &kib);
    if (file) fclose(file);
    return kib;
}

/* Whether an address is merged. */
static int merged(void *address) {
    char line[256];
    unsigned long from, to, found = 0;
    FILE *file = fopen("/proc/self/maps", "r");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "%lx-%lx", &from, &to) == 2 && from <= (unsigned long)address && (unsigned long)address < to)
            found = strstr(line, "pagefold-store") != NULL;
    if (file) fclose(file);
    return found;
}

static void *idles(void *argument) {
    (void)argument;
    pause();
    return NULL;
}

static unsigned long word(size_t at, size_t words, int rank) {
    return at < words / 2 ? at * 0x9e3779b97f4a7c15ul : at < words / 4 * 3 ? 0 : at + 1 + (unsigned long)rank * words;
}

int main(int count, char **arguments) {
    int rank, size;
    start();
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    size_t words = (size_t)atoi(arguments[1]) << 17, halo = 1 << 19;
    unsigned long *memory = malloc(words * sizeof *memory), *from = malloc(halo), *to = malloc(halo);
    int steps = atoi(arguments[2]);
    if (count > 3) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, idles, NULL)) return 4;
    }
    for (size_t at = 0; at < words; at++) memory[at] = word(at, words, rank);
    meet();
    long before = share(), after, all_before, all_after;
    meet();
    for (int step = 0; step < steps; step++) {
        MPI_Request request;
        /* Equal in all ranks, so it would be merged. */
        memset(to, step & 0xff, halo);
        MPI_Irecv(from, halo, MPI_BYTE, (rank + 1) % size, 0, MPI_COMM_WORLD, &request);
        meet();
        /* The last received data are equal in all ranks. MPI may now write to them, bypassing page tables. */
        if (merged(from)) return 3;
        usleep(20000);
        MPI_Send(to, halo, MPI_BYTE, (rank + size - 1) % size, 0, MPI_COMM_WORLD);
        double one = 1, sum;
        add(&one, &sum);
        MPI_Wait(&request, MPI_STATUS_IGNORE);
        if (sum != size || memcmp(from, to, halo)) return 1;
        /* Merged pages are written, too. */
        memory[step % words] = memory[step % words];
    }
    for (size_t at = 0; at < words; at++)
        if (memory[at] != word(at, words, rank)) return 2;
    meet();
    after = share();
    MPI_Reduce(&before, &all_before, 1, MPI_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
    MPI_Reduce(&after, &all_after, 1, MPI_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0) printf("ranks=%d shrunk=%ld\n", size, (all_before - all_after) >> 10);
    MPI_Finalize();
    return 0;
}
