/* An MPI library with one rank, which has only the functions that tests of safe points need, and spends no time in
 * them. Each function also has its profiling name. */
int PMPI_Init(int *count, char ***words) { return (void)count, (void)words, 0; }
int PMPI_Barrier(void *comm) { return (void)comm, 0; }
int PMPI_Irecv(void *buffer, int count, void *type, int from, int tag, void *comm, void **request) {
    return (void)buffer, (void)count, (void)type, (void)from, (void)tag, (void)comm, (void)request, 0;
}
int MPI_Init(int *count, char ***words) __attribute__((weak, alias("PMPI_Init")));
int MPI_Barrier(void *comm) __attribute__((weak, alias("PMPI_Barrier")));
int MPI_Irecv(void *buffer, int count, void *type, int from, int tag, void *comm, void **request)
    __attribute__((weak, alias("PMPI_Irecv")));
