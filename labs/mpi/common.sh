# What the decks share: a deck is called with a verb (prepare, run, result) and a size (full, quick), in a folder of its
# own. `run` prints to standard output, which the caller keeps in the file `output`; `result` prints what was computed.

# Four ranks over whatever CPUs there are, moved by the scheduler as it likes. Open MPI wants consent to run as root.
launch() {
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1
    exec mpirun -np 4 --oversubscribe --bind-to none "$@"
}
