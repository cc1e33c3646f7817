# Common code of the decks. A deck is called with a verb (prepare, run, result) and a size (full, quick), in its own
# directory. `run` prints to standard output, which the caller saves in the file `output`; `result` prints the computed
# values.

# Four ranks on all available CPUs, placed by the scheduler. Open MPI needs explicit permission to run as root.
launch() {
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1
    exec mpirun -np 4 --oversubscribe --bind-to none "$@"
}
