/*
 * A small hydrodynamics code in three dimensions, with several materials, on blocks that are refined where the flow
 * changes: a substitute for the large code HERA, for evaluations of memory merging. A shock in air runs into balls and
 * shells of gases, liquids and metal. `physics.hpp` has the flow along a line, `forest.hpp` the octree of blocks,
 * `solver.hpp` the time steps, `memory.hpp` the memory of cells, `comm.hpp` the communication of processes.
 *
 * Interpretation of the evaluation (S. Valat, "An evaluation of Linux Kernel Samepage Merging on simulations", CEA):
 * every material has arrays over all cells, most of them zeros. Either the program stores no groups of zeros, behind an
 * indirection in operator[], or the kernel or an engine merges pages. Here both are modes of one program with
 * bit-identical results.
 *
 * The output is one line per check of the conserved quantities, one line per rank, and a summary, in words and
 * key=value pairs. The program ends with an error as soon as a conserved quantity changes.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#include "solver.hpp"

#include <cinttypes>
#include <getopt.h>
#include <string>

namespace {

struct Options {
    Problem problem;
    Mode mode = Mode::plain;
    std::string trace, domain;
    double max_slowdown = 0.02, min_runtime = 0;
    int ranks = 4, steps = 100, regrid = 4, merge = 1, check = 20, sample = 250;
};

constexpr char kHelp[] =
    "usage: hera [OPTION]...        mpirun -np N hera-mpi [OPTION]...\n"
    "A shock runs into balls of several materials, on adaptively refined blocks in several processes.\n"
    "\n"
    "  --memory MODE         plain, blocks, ksm or engine: memory of the cells (plain)\n"
    "  --max-slowdown SHARE  maximum slowdown of the run by the engine; negative: no bound (0.02)\n"
    "  --min-runtime SECONDS minimum run time that the engine may assume (0)\n"
    "  --merge N             steps from one merge by the engine to the next (1)\n"
    "  --domain NAME         the engine's domain (a new one for this run)\n"
    "  --writes WHICH        arrays to write in a line of cells: all, those of present materials, or values that\n"
    "                        changed (present)\n"
    "  --ranks N             processes, without MPI (4)\n"
    "  --steps N             time steps (100)\n"
    "  --roots N             blocks of 16^3 cells across the box, at the coarsest level (4)\n"
    "  --levels N            levels of refinement and the coarsest one (2)\n"
    "  --regrid N            steps from one regridding to the next (4)\n"
    "  --materials N         up to 8 (6)\n"
    "  --spheres N           balls, each a core and a shell (3)\n"
    "  --mach NUMBER         Mach number of the shock (3)\n"
    "  --cfl NUMBER          cells that the fastest wave crosses in a step, at most (0.4)\n"
    "  --periodic            periodic boundaries; otherwise the box has walls\n"
    "  --slow                as if each function were instrumented; results are the same\n"
    "  --check N             steps from one check of masses, energy and fractions to the next (20)\n"
    "  --trace FILE          append the memory use of each rank R, per step, to FILE.R\n"
    "  --sample MS           from one reading of the memory in use to the next, which costs some ms (250)\n"
    "  --help                this\n";

/* The index of a word in a list. */
int choice(const char *option, const char *word, const std::vector<std::string> &words)
{
    auto found = std::find(words.begin(), words.end(), word);
    if (found == words.end())
        fail("--%s %s: try --help", option, word);
    return static_cast<int>(found - words.begin());
}

double number(const char *option, const char *word, double least, double most)
{
    char *end;
    double value = strtod(word, &end);
    if (*word == 0 || *end != 0 || !(value >= least && value <= most))
        fail("--%s %s: not a number from %g to %g", option, word, least, most);
    return value;
}

Options options_of(int argc, char **argv)
{
    Options options;
    Problem &problem = options.problem;
    const option known[] = {
        { "memory", 1, nullptr, 0 },  { "max-slowdown", 1, nullptr, 0 }, { "domain", 1, nullptr, 0 },
        { "merge", 1, nullptr, 0 },     { "min-runtime", 1, nullptr, 0 },
        { "writes", 1, nullptr, 0 },  { "ranks", 1, nullptr, 0 },        { "steps", 1, nullptr, 0 },
        { "roots", 1, nullptr, 0 },   { "levels", 1, nullptr, 0 },       { "regrid", 1, nullptr, 0 },
        { "materials", 1, nullptr, 0 }, { "spheres", 1, nullptr, 0 },    { "mach", 1, nullptr, 0 },
        { "cfl", 1, nullptr, 0 },     { "periodic", 0, nullptr, 0 },     { "slow", 0, nullptr, 0 },
        { "check", 1, nullptr, 0 },   { "trace", 1, nullptr, 0 },        { "sample", 1, nullptr, 0 },
        { "help", 0, nullptr, 0 },    { nullptr, 0, nullptr, 0 },
    };
    for (int at, found; (found = getopt_long(argc, argv, "", known, &at)) != -1;) {
        if (found == '?')
            fail("try --help");
        const std::string name = known[at].name;
        auto whole = [&](int least, int most) { return static_cast<int>(number(known[at].name, optarg, least, most)); };
        if (name == "memory")
            options.mode = static_cast<Mode>(choice("memory", optarg, { "plain", "blocks", "ksm", "engine" }));
        else if (name == "max-slowdown")
            options.max_slowdown = number("max-slowdown", optarg, -1, 100);
        else if (name == "min-runtime")
            options.min_runtime = number("min-runtime", optarg, 0, 1e9);
        else if (name == "merge")
            options.merge = whole(1, 1000000);
        else if (name == "domain")
            options.domain = optarg;
        else if (name == "writes")
            problem.writes = static_cast<Writes>(choice("writes", optarg, { "all", "present", "changed" }));
        else if (name == "ranks")
            options.ranks = whole(1, 256);
        else if (name == "steps")
            options.steps = whole(0, 1000000);
        else if (name == "roots")
            problem.roots = whole(1, 64);
        else if (name == "levels")
            problem.levels = whole(1, 8);
        else if (name == "regrid")
            options.regrid = whole(1, 1000000);
        else if (name == "materials")
            problem.materials = whole(1, kMostMaterials);
        else if (name == "spheres")
            problem.spheres = whole(0, 1000);
        else if (name == "mach")
            problem.mach = number("mach", optarg, 1, 10);
        else if (name == "cfl")
            problem.cfl = number("cfl", optarg, 0.01, 0.5);
        else if (name == "periodic")
            problem.periodic = true;
        else if (name == "slow")
            problem.slow = true;
        else if (name == "check")
            options.check = whole(1, 1000000);
        else if (name == "trace")
            options.trace = optarg;
        else if (name == "sample")
            options.sample = whole(0, 1000000);
        else {
            fputs(kHelp, stdout);
            exit(0);
        }
    }
    if (optind < argc)
        fail("%s: try --help", argv[optind]);
    return options;
}

double now()
{
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

/* CPU time of this process, in user and kernel mode. */
double cpu_seconds()
{
    timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

/* PSS of this process in bytes (shared pages count in proportion to the number of their processes):
 * /proc/PID/smaps_rollup, proc(5). */
struct Footprint {
    double pss = 0, anonymous = 0, shared = 0;

    static Footprint read()
    {
        Footprint footprint;
        FILE *file = fopen("/proc/self/smaps_rollup", "r");
        if (!file)
            fail("no /proc/self/smaps_rollup: the kernel is older than 4.14, or /proc is not mounted");
        char line[256];
        double kib;
        while (fgets(line, sizeof line, file)) {
            if (sscanf(line, "Pss: %lf", &kib) == 1)
                footprint.pss = kib * 1024;
            else if (sscanf(line, "Pss_Anon: %lf", &kib) == 1)
                footprint.anonymous = kib * 1024;
            else if (sscanf(line, "Pss_Shmem: %lf", &kib) == 1)
                footprint.shared = kib * 1024;
        }
        fclose(file);
        return footprint;
    }
};

/* The memory use of a rank during the run, and of all ranks at the same time. */
class Trace {
public:
    Trace(const Options &options, Comm &comm) : comm_(comm), interval_(options.sample * 1e-3), started_(now())
    {
        if (options.trace.empty())
            return;
        std::string name = options.trace + "." + std::to_string(comm.rank);
        file_ = fopen(name.c_str(), "a");
        if (!file_)
            fail("cannot write %s", name.c_str());
        fputs("step\ttime\tseconds\tpss\tpss_anon\tpss_shmem\tcells\tblocks\tpages_scanned\tzeros_freed\t"
              "pages_merged\tcontents_stored\tcow_breaks\tbacked_off\tincomplete_merges\tprogram_time_ns\n",
              file_);
    }

    ~Trace()
    {
        if (file_)
            fclose(file_);
    }

    double seconds() const { return now() - started_; }
    /* Whether a sample of the memory use is due; the first rank decides for all. */
    bool is_due() const { return comm_.rank == 0 && seconds() >= next_; }

    void sample()
    {
        next_ = seconds() + interval_;
        last_ = Footprint::read();
        double sum = 0;
        for (double pss : comm_.all_gather({ last_.pss }))
            sum += pss;
        own_peak_ = std::max(own_peak_, last_.pss);
        peak_ = std::max(peak_, sum);
        sum_ += sum;
        samples_++;
        spent_ += seconds() - next_ + interval_;
    }

    void line(int step, double time, size_t blocks, const Memory &memory)
    {
        if (!file_)
            return;
        const pagefold_merge_counters &counters = memory.last_merge();
        fprintf(file_, "%d\t%.9g\t%.3f\t%.0f\t%.0f\t%.0f\t%zu\t%zu", step, time, seconds(), last_.pss, last_.anonymous,
            last_.shared, memory.bytes(), blocks);
        for (uint64_t number : { counters.pages_scanned, counters.zeros_freed, counters.pages_merged,
                                 counters.contents_stored, counters.cow_breaks, counters.backed_off,
                                 counters.incomplete_merges, counters.program_time_ns })
            fprintf(file_, "\t%" PRIu64, number);
        fputc('\n', file_);
        fflush(file_);
    }

    /* Of this rank, and the sum of all ranks. */
    double own_peak() const { return own_peak_; }
    double peak() const { return peak_; }
    double mean() const { return samples_ ? sum_ / samples_ : 0; }
    double spent() const { return spent_; }

private:
    Comm &comm_;
    double interval_, started_, next_ = 0, own_peak_ = 0, peak_ = 0, sum_ = 0, spent_ = 0;
    long samples_ = 0;
    Footprint last_;
    FILE *file_ = nullptr;
};

constexpr double kMiB = 1024 * 1024;

/* The relative difference between totals and those of the start. */
struct Drift {
    double mass = 0, energy = 0, momentum = 0;

    Drift(const Totals &first, const Totals &totals, const Problem &problem)
    {
        double all = 0, squares = 0;
        for (int k = 0; k < problem.materials; k++) {
            all += first.mass[k];
            if (first.mass[k] > 0)
                mass = std::max(mass, std::fabs(totals.mass[k] - first.mass[k]) / first.mass[k]);
        }
        energy = std::fabs(totals.energy - first.energy) / first.energy;
        for (int d = 0; d < 3; d++)
            squares += (totals.momentum[d] - first.momentum[d]) * (totals.momentum[d] - first.momentum[d]);
        /* Relative to the possible momentum of a box with that mass and energy; walls change momentum. */
        momentum = problem.periodic ? std::sqrt(squares / (2 * all * first.energy)) : 0;
    }
};

/* Conserved quantities change only by rounding, which is far below these limits. */
constexpr double kTolerance = 1e-12;

void check(const Drift &drift, const Totals &totals)
{
    if (!(drift.mass < kTolerance && drift.energy < kTolerance && drift.momentum < kTolerance))
        fail("not conserved: mass %.2e, energy %.2e, momentum %.2e", drift.mass, drift.energy, drift.momentum);
    if (!(totals.unlike_one < 1e-14))
        fail("the volume fractions of a cell add up to 1 and %.2e more or less", totals.unlike_one);
}

template <class Array> void simulate(const Options &options, Comm &comm)
{
    std::string domain = options.domain;
    if (domain.empty())
        domain = "hera-" + std::to_string(static_cast<long>(comm.all_gather({ double(getpid()) })[0]));
    Memory memory(options.mode, domain.c_str(), options.max_slowdown, options.min_runtime);
    Trace trace(options, comm);
    Solver<Array> solver(options.problem, memory, comm);
    double time = 0, fastest = 0, began = trace.seconds(), cpu_began = cpu_seconds();
    int regridded = 0;
    /* A safe point: no rank writes to arrays from here on until all are done. */
    auto merge = [&] {
        if (options.mode != Mode::engine)
            return;
        comm.barrier();
        memory.merge();
    };
    merge();
    Totals first = solver.totals(), totals = first;
    auto report = [&](int step) {
        totals = solver.totals();
        Drift drift(first, totals, options.problem);
        if (comm.rank == 0) {
            printf("step %d time %.5g seconds %.2f blocks %zu pure %.4f vorticity %.4g mass %.1e energy %.1e "
                   "momentum %.1e fractions %.1e\n",
                   step, time, trace.seconds(), solver.forest.leaves.size(), double(totals.pure) / totals.cells,
                   totals.vorticity, drift.mass, drift.energy, drift.momentum, totals.unlike_one);
            fflush(stdout);
        }
        /* One rank prints it; the others wait for it, and end with it. */
        if (comm.rank == 0)
            check(drift, totals);
        return drift;
    };
    for (int step = 0;; step++) {
        /* The fastest wave of all ranks, and whether a sample is due. */
        std::vector<double> words = comm.all_gather({ solver.fastest, double(trace.is_due()) });
        fastest = 0;
        for (int r = 0; r < comm.size; r++)
            fastest = std::max(fastest, words[2 * r]);
        trace.line(step, time, solver.forest.leaves.size(), memory);
        if (step % options.check == 0 && step < options.steps)
            report(step);
        if (step == options.steps)
            break;
        double dt = solver.step_for(fastest);
        solver.step(dt, step % 2);
        time += dt;
        if ((step + 1) % options.regrid == 0)
            regridded += solver.regrid();
        /* The maximum of memory use: the memory of this step is neither released nor merged yet. */
        solver.derive();
        if (words[1] != 0 || step + 1 == options.steps)
            trace.sample();
        solver.release();
        /* Arrays have been stepped and moved; messages are in other memory. */
        if ((step + 1) % options.merge == 0)
            merge();
    }
    comm.barrier();
    double seconds = trace.seconds() - began, cpu = cpu_seconds() - cpu_began;
    Drift drift = report(options.steps);
    pagefold_member_status status = memory.status();
    pagefold_merge_counters merge_totals = memory.merge_totals();
    std::vector<double> ranks = comm.all_gather(
        { trace.own_peak(), double(memory.bytes()), double(solver.updates), solver.dropped, trace.spent(),
          merge_totals.program_time_ns * 1e-9, double(status.merged), double(merge_totals.zeros_freed), cpu });
    if (comm.rank == 0) {
        double updates = 0, dropped = 0, cells = 0, masses = 0, all_cpu = 0;
        for (int r = 0; r < comm.size; r++) {
            const double *rank = &ranks[9 * r];
            printf("rank %d cpu_s=%.2f peak_mib=%.1f cells_mib=%.1f sampling_s=%.3f engine_s=%.3f "
                   "merged_pages=%.0f zero_pages=%.0f\n",
                   r, rank[8], rank[0] / kMiB, rank[1] / kMiB, rank[4], rank[5], rank[6], rank[7]);
            all_cpu += rank[8];
            cells += rank[1];
            updates += rank[2];
            dropped += rank[3];
        }
        for (double mass : first.mass)
            masses += mass;
        printf("summary seconds=%.3f cpu_s=%.2f peak_mib=%.1f mean_mib=%.1f cells_mib=%.1f store_mib=%.1f "
               "updates=%.0f dropped=%.1e\n",
               seconds, all_cpu, trace.peak() / kMiB, trace.mean() / kMiB, cells / kMiB, status.store_bytes / kMiB,
               updates, dropped / masses);
        printf("result steps=%d time=%.17g blocks=%zu regridded=%d checksum=%016" PRIx64
               " mass=%.1e energy=%.1e momentum=%.1e fractions=%.1e\n",
               options.steps, time, solver.forest.leaves.size(), regridded, totals.checksum, drift.mass, drift.energy,
               drift.momentum, totals.unlike_one);
    }
}

} // namespace

int main(int argc, char **argv)
{
    /* Before other processes exist, each of which would print the error. */
    Options options = options_of(argc, argv);
    return Comm::run(options.ranks, &argc, &argv, [&](Comm &comm) {
        if (options.mode == Mode::blocks)
            simulate<Grouped>(options, comm);
        else
            simulate<Plain>(options, comm);
    });
}
