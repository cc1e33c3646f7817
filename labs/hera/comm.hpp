/*
 * The communication between the processes of a run: a barrier, an exchange of messages between all pairs, and a
 * gathering of numbers in the order of ranks. With HERA_MPI that is MPI. Without it, main() forks the processes, which
 * leave messages in shared memory between two barriers.
 *
 * These functions add nothing up: callers add in an order that does not depend on the number of ranks.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#ifdef HERA_MPI
#include <mpi.h>
#else
#include <csignal>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

/* Print an error and end the whole run. */
[[noreturn]] inline void fail(const char *format, ...)
{
    va_list words;
    va_start(words, format);
    fputs("hera: ", stderr);
    vfprintf(stderr, format, words);
    fputc('\n', stderr);
    va_end(words);
#ifdef HERA_MPI
    int started = 0;
    MPI_Initialized(&started);
    if (started)
        MPI_Abort(MPI_COMM_WORLD, 1);
#endif
    fflush(nullptr);
    _Exit(1);
}

using Message = std::vector<double>;

#ifdef HERA_MPI

class Comm {
public:
    int rank = 0, size = 1;

    void barrier() { MPI_Barrier(MPI_COMM_WORLD); }

    /* Send out[r] to each other rank r; the received messages replace them. The rank's own place stays empty. */
    std::vector<Message> exchange(const std::vector<Message> &out)
    {
        std::vector<int> sent(size), coming(size);
        for (int r = 0; r < size; r++)
            sent[r] = r == rank ? 0 : static_cast<int>(out[r].size());
        MPI_Alltoall(sent.data(), 1, MPI_INT, coming.data(), 1, MPI_INT, MPI_COMM_WORLD);
        std::vector<Message> in(size);
        std::vector<MPI_Request> requests;
        for (int r = 0; r < size; r++) {
            if (coming[r]) {
                in[r].resize(coming[r]);
                MPI_Irecv(in[r].data(), coming[r], MPI_DOUBLE, r, 0, MPI_COMM_WORLD, &requests.emplace_back());
            }
        }
        for (int r = 0; r < size; r++)
            if (sent[r])
                MPI_Isend(out[r].data(), sent[r], MPI_DOUBLE, r, 0, MPI_COMM_WORLD, &requests.emplace_back());
        MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE);
        return in;
    }

    /* Run `rank_of_many` as one of the ranks that mpirun started; mpirun sets the number of ranks. */
    static int run(int, int *argc, char ***argv, const std::function<void(Comm &)> &rank_of_many)
    {
        MPI_Init(argc, argv);
        Comm comm;
        MPI_Comm_rank(MPI_COMM_WORLD, &comm.rank);
        MPI_Comm_size(MPI_COMM_WORLD, &comm.size);
        rank_of_many(comm);
        MPI_Finalize();
        return 0;
    }

    std::vector<double> all_gather(const std::vector<double> &mine);
};

#else

class Comm {
public:
    int rank = 0, size = 1;

    void barrier() { pthread_barrier_wait(barrier_); }

    std::vector<Message> exchange(const std::vector<Message> &out)
    {
        size_t *offsets = reinterpret_cast<size_t *>(box(rank));
        size_t at = (size + 1) * sizeof(size_t) / sizeof(double);
        for (int r = 0; r < size; r++) {
            offsets[r] = at;
            size_t doubles = r == rank ? 0 : out[r].size();
            if ((at + doubles) * sizeof(double) > kBox)
                fail("rank %d has more to say than %zu bytes", rank, kBox);
            if (doubles)
                memcpy(box(rank) + at, out[r].data(), doubles * sizeof(double));
            at += doubles;
        }
        offsets[size] = at;
        barrier();
        std::vector<Message> in(size);
        for (int r = 0; r < size; r++) {
            const size_t *theirs = reinterpret_cast<const size_t *>(box(r));
            if (r != rank)
                in[r].assign(box(r) + theirs[rank], box(r) + theirs[rank + 1]);
        }
        barrier();
        /* Blocks that move need much more space than ghost cells do, but rarely. */
        if (at * sizeof(double) > kKept)
            madvise(box(rank) + kKept / sizeof(double), kBox - kKept, MADV_REMOVE);
        return in;
    }

    /* Run `rank_of_many` in so many forked processes, and return the exit status of the run. A rank that fails ends
     * all. */
    static int run(int ranks, int *, char ***, const std::function<void(Comm &)> &rank_of_many)
    {
        int protection = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE;
        Comm comm;
        comm.size = ranks;
        void *boxes = mmap(nullptr, kBox * ranks, protection, flags, -1, 0);
        void *barrier = mmap(nullptr, sizeof(pthread_barrier_t), protection, flags, -1, 0);
        if (boxes == MAP_FAILED || barrier == MAP_FAILED)
            fail("no shared memory for messages");
        comm.boxes_ = static_cast<double *>(boxes);
        comm.barrier_ = static_cast<pthread_barrier_t *>(barrier);
        pthread_barrierattr_t shared;
        pthread_barrierattr_init(&shared);
        pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
        pthread_barrier_init(comm.barrier_, &shared, ranks);
        std::vector<pid_t> children;
        for (comm.rank = 0; comm.rank < ranks; comm.rank++) {
            fflush(nullptr);
            pid_t child = fork();
            if (child < 0)
                fail("cannot fork");
            if (child == 0) {
                /* The process that ends the run ends all other processes. */
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                rank_of_many(comm);
                fflush(nullptr);
                _exit(0);
            }
            children.push_back(child);
        }
        int status, failed = 0;
        for (pid_t ended; (ended = wait(&status)) > 0;) {
            for (pid_t &child : children)
                if (child == ended)
                    child = 0;
            if (status == 0 || failed)
                continue;
            failed = 1;
            for (pid_t child : children)
                if (child)
                    kill(child, SIGKILL);
        }
        return failed;
    }

    std::vector<double> all_gather(const std::vector<double> &mine);

private:
    /* Space for the message of one rank, of which the kernel allocates written pages only; and a copy of it. */
    static constexpr size_t kBox = size_t{1} << 30, kKept = size_t{2} << 20;
    double *boxes_ = nullptr;
    pthread_barrier_t *barrier_ = nullptr;

    double *box(int r) { return boxes_ + r * (kBox / sizeof(double)); }
};

#endif

/* The numbers of all ranks, in the order of ranks. Each rank may have a different count. */
inline std::vector<double> Comm::all_gather(const std::vector<double> &mine)
{
    std::vector<Message> in = exchange(std::vector<Message>(size, mine));
    in[rank] = mine;
    std::vector<double> all;
    for (const Message &part : in)
        all.insert(all.end(), part.begin(), part.end());
    return all;
}
