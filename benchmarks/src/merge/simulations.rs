//! Programs that rewrite merged pages: simulations on four ranks over all CPUs, run to their end under each policy.
//!
//! Two results count. One is the run time, relative to the run without merging in the same round. The other is the
//! memory saved in their control group, as the mean over the run and over its last quarter. The latter are the lasting
//! savings: during setup a program holds zeros that it is about to overwrite, and their merges are soon broken. The
//! inputs are in `labs/mpi`, each with a script that prepares, runs, and prints the physical result. The result must be
//! the same under each policy.
//!
//! Targets are judged on CP2K alone. It was added before any run of it with KSM, its input was chosen by plain runs and
//! one census, and no setting was made for it. If a setting is changed after an inspection of its runs, another code
//! must take its place. Targets of the other codes are reported and not judged. Quantum ESPRESSO was held out before:
//! its first kept run missed the target of lasting savings (10.3 of 17.1 %). Then the second round of guided runs was
//! moved forward (commit 98ce66d), and the next run met the target.
//!
//! A second set, `debian`, tests whether guided merging serves codes that it was not developed on. LAMMPS is the known
//! case: `run --policy guided` kept a quarter of the savings of whole-process KSM at 2000/20. Five further codes were
//! chosen before any of them was installed, run or examined, for different methods and different use of memory:
//!
//! - GROMACS: molecular dynamics of water, C++ with its own allocators.
//! - NWChem: density functional theory in a Gaussian basis, Fortran with memory that it manages itself.
//! - ABINIT: density functional theory with plane waves, Fortran.
//! - MrBayes: Bayesian phylogenetics, four chains on four ranks, C.
//! - Gerris: an incompressible flow on an adaptive quadtree, C with many small allocations.
//!
//! If a code does not run on four ranks in Debian's build, Elk (linearized augmented plane waves) takes its place. This
//! happened to MrBayes: the program of `mrbayes-mpi` is not linked to MPI, and each rank does all of the work by
//! itself. No setting is tuned on the five codes. The targets for each, LAMMPS included: at least 70 % of the savings
//! of whole-process KSM at 2000/20 in the last quarter of the run, at a slow-down of at most 3 % beyond the share of
//! the CPU bound. Misses stay in the results. The section `debian` measures the codes in three modes and judges the
//! five; targets of LAMMPS are reported only.
//!
//! Guided merging is `pagefold run --policy guided` before the job. Its companion process merges again and again until
//! the job has ended. The companion is in the job's control group, so that its memory reduces the savings. Its CPU time
//! is read until it ends; then KSM must be set as before.
//!
//! Memory is `rss` of memory.stat in a control group of version 1, or `anon` in version 2. It falls by exactly the
//! frames that merging frees, and costs nothing to read.

use super::policies::PagefoldProgram;
use super::readings::{KsmCounters, cpu_seconds, ksmd_pid};
use super::running_program::command_through_hold;
use super::thresholds::{MAX_SIMULATION_SLOWDOWN, MIN_SIMULATION_SAVINGS_SHARE};
use super::trial::{sleep_unless_signaled, wait_until_ksmd_forgets};
use super::workloads::lab_file;
use super::writable_ksm_settings;
use crate::findings::{Findings, MarkdownTable, PairedRatio, SampleSpread, ThresholdCheck};
use crate::rounds::draw_orders;
use anyhow::{Context, Result, ensure};
use pagefold_base::ksm::{DEFAULT_PAGES_TO_SCAN, DEFAULT_SLEEP_MILLISECS};
use pagefold_labs::ksm::KsmTestGuard;
use rustix::process::{Pid, Signal};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

const BYTES_PER_MIB: f64 = (1 << 20) as f64;
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Time limit for pagefold to undo its changes after the program has ended.
const COMPANION_EXIT_TIMEOUT: Duration = Duration::from_secs(30);

/// A simulation.
#[derive(Clone, Copy, Debug)]
pub struct SimulationCode {
    /// Its folder in `labs/mpi`.
    pub name: &'static str,
    /// What it simulates.
    pub title: &'static str,
    /// Whether its targets are judged: it was added before any run of it with KSM, and no setting was made for it.
    pub is_held_out: bool,
    /// The `pages_to_scan` values with which whole-process KSM is measured.
    pub whole_pages_to_scan: &'static [u32],
    /// The relative tolerance for numbers in the result. 0 if a run repeats its result to the last printed digit.
    pub tolerance: f64,
}

/// The codes that are measured. Without any merging, Meep's result on four ranks differs from run to run by 1e-4.
pub const SIMULATION_CODES: &[SimulationCode] = &[
    tuned_code("meep", "Meep: light and a slab (FDTD), 4 ranks", 1e-3),
    tuned_code("openfoam", "OpenFOAM: a dam of water breaks (VOF), 4 ranks", 0.0),
    tuned_code("espresso", "Quantum ESPRESSO: silane, ground state (SCF), 4 pools", 0.0),
    SimulationCode { is_held_out: true, ..tuned_code("cp2k", "CP2K: a water molecule (GPW, PIMD), 4 beads", 0.0) },
];

/// The codes of the section `debian`.
pub const DEBIAN_CODES: &[SimulationCode] = &[
    debian_code("lammps", "LAMMPS: a melting crystal (molecular dynamics), 4 ranks", false, 1e-6),
    debian_code("gromacs", "GROMACS: water (molecular dynamics), 4 ranks", true, 0.1),
    debian_code("nwchem", "NWChem: water molecules (DFT, Gaussian basis), 4 ranks", true, 1e-6),
    debian_code("abinit", "ABINIT: silicon (DFT, plane waves), 4 ranks", true, 1e-6),
    debian_code("elk", "Elk: aluminum (DFT, augmented plane waves), 4 ranks", true, 1e-6),
    debian_code("gerris", "Gerris: vortices (flow on a quadtree), 4 ranks", true, 1e-3),
];

const fn tuned_code(name: &'static str, title: &'static str, tolerance: f64) -> SimulationCode {
    SimulationCode { name, title, is_held_out: false, whole_pages_to_scan: &[2000, 20_000], tolerance }
}

const fn debian_code(name: &'static str, title: &'static str, held_out: bool, tolerance: f64) -> SimulationCode {
    SimulationCode { name, title, is_held_out: held_out, whole_pages_to_scan: &[2000], tolerance }
}

/// The codes with these names, or all.
pub fn select_codes(codes: &[SimulationCode], names: &[String]) -> Result<Vec<SimulationCode>> {
    let unknown = names.iter().find(|name| codes.iter().all(|code| code.name != **name));
    let all = || codes.iter().map(|code| code.name).collect::<Vec<_>>().join(", ");
    ensure!(unknown.is_none(), "unknown simulation {unknown:?}; those in labs/mpi are {}", all());
    Ok(codes.iter().copied().filter(|code| names.is_empty() || names.iter().any(|name| name == code.name)).collect())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SimulationMode {
    Off,
    /// All memory enrolled, with this `pages_to_scan` and `sleep_millisecs` 20.
    Whole(u32),
    Guided,
}

impl SimulationMode {
    /// The modes in which a code runs.
    fn modes_of(code: SimulationCode) -> Vec<Self> {
        let whole = code.whole_pages_to_scan.iter().map(|&pages| Self::Whole(pages));
        [Self::Off].into_iter().chain(whole).chain([Self::Guided]).collect()
    }

    fn name(self) -> String {
        match self {
            Self::Off => "off".to_owned(),
            Self::Whole(pages) => format!("whole {pages}/20"),
            Self::Guided => "guided".to_owned(),
        }
    }
}

/// A run.
#[derive(Debug)]
struct SimulationRun {
    mode: SimulationMode,
    round: usize,
    seconds: f64,
    /// Mean memory over the run, in bytes.
    mean_memory: f64,
    /// Mean memory over its last quarter, in bytes.
    mean_late_memory: f64,
    faults: u64,
    ksmd_seconds: f64,
    pagefold_seconds: f64,
    result: String,
}

/// The conditions of the runs.
#[derive(Debug)]
pub struct SimulationConditions {
    /// The pagefold binary.
    pub pagefold: PagefoldProgram,
    /// CPU bound of pagefold, in percent of one CPU.
    pub cpu_percent: u32,
    /// Short runs.
    pub quick: bool,
}

/// Run a code in all modes, round by round.
pub fn measure_code(code: SimulationCode, rounds: usize, conditions: &SimulationConditions) -> Result<Findings> {
    let mut findings =
        Findings::new("code,round,mode,seconds,memory_bytes,faults,ksmd_cpu_seconds,pagefold_cpu_seconds");
    let mut runs: Vec<SimulationRun> = Vec::new();
    for (round, order) in (1..).zip(draw_orders(&SimulationMode::modes_of(code), rounds)) {
        for mode in order {
            eprint!("{} round {round}: {} ... ", code.name, mode.name());
            let run = run_code(code, mode, round, conditions, &mut findings.samples)?;
            eprintln!("{:.1} s, {:.0} MiB", run.seconds, run.mean_memory / BYTES_PER_MIB);
            let first = runs.first().map_or(&run.result, |first| &first.result);
            ensure!(
                results_agree(first, &run.result, code.tolerance),
                "{} computed {:?} and then {:?}",
                code.name,
                first,
                run.result
            );
            runs.push(run);
        }
    }
    build_table_and_checks(code, &runs, conditions.cpu_percent, &mut findings)?;
    Ok(findings)
}

/// Whether two results agree: word by word, numbers within a relative tolerance.
fn results_agree(left: &str, right: &str, tolerance: f64) -> bool {
    let words = |text: &str| text.split([' ', ',', '\n']).map(str::to_owned).collect::<Vec<_>>();
    let words_agree = |(left, right): (&String, &String)| match (left.parse::<f64>(), right.parse::<f64>()) {
        (Ok(left), Ok(right)) => (left - right).abs() <= tolerance * left.abs().max(right.abs()),
        _ => left == right,
    };
    let (left, right) = (words(left), words(right));
    left.len() == right.len() && left.iter().zip(&right).all(words_agree)
}

/// Build the table of modes, and the checks; checks of a code that was not held out are reported and not judged.
fn build_table_and_checks(
    code: SimulationCode,
    runs: &[SimulationRun],
    cpu_percent: u32,
    findings: &mut Findings,
) -> Result<()> {
    let runs = SimulationRuns { code, runs };
    let cpus = std::thread::available_parallelism()?.get();
    findings.tables.push(runs.build_table(cpu_percent, cpus));
    let checks = runs.build_checks(cpu_percent, cpus);
    if code.is_held_out {
        findings.checks = checks;
    } else {
        let report = |check: ThresholdCheck| format!("reported, not judged: {}: {}", check.claim, check.measured);
        findings.unjudged = checks.into_iter().map(report).collect();
    }
    Ok(())
}

/// All runs of a code.
struct SimulationRuns<'r> {
    code: SimulationCode,
    runs: &'r [SimulationRun],
}

impl SimulationRuns<'_> {
    /// A figure of each run in a mode, computed from the run and from the run without merging in its round.
    fn figures(&self, mode: SimulationMode, figure: impl Fn(&SimulationRun, &SimulationRun) -> f64) -> Vec<f64> {
        let off = |round| self.runs.iter().find(|run| run.mode == SimulationMode::Off && run.round == round);
        let in_mode = self.runs.iter().filter(|run| run.mode == mode);
        in_mode.filter_map(|run| Some(figure(run, off(run.round)?))).collect()
    }

    /// A figure relative to runs without merging. `None` without rounds.
    fn ratio_to_off(&self, mode: SimulationMode, figure: fn(&SimulationRun) -> f64) -> Option<PairedRatio> {
        PairedRatio::from_rounds(self.figures(mode, |run, off| figure(run) / figure(off)))
    }

    fn relative_time(&self, mode: SimulationMode) -> Option<PairedRatio> {
        self.ratio_to_off(mode, |run| run.seconds)
    }

    /// Memory in the last quarter of the runs.
    fn lasting_memory(&self, mode: SimulationMode) -> Option<PairedRatio> {
        self.ratio_to_off(mode, |run| run.mean_late_memory)
    }

    fn build_table(&self, cpu_percent: u32, cpus: usize) -> MarkdownTable {
        let mut table = MarkdownTable::new(
            self.code.title,
            &[
                "mode",
                "run s",
                "slower",
                "memory MiB",
                "saved on average",
                "in the last quarter",
                "faults",
                "ksmd CPU s",
                "pagefold CPU s",
            ],
        );
        table.rows.extend(SimulationMode::modes_of(self.code).into_iter().map(|mode| self.build_row(mode)));
        let agreement = match self.code.tolerance {
            tolerance if tolerance > 0.0 => format!("within {tolerance:e}"),
            _ => "to the last digit".to_owned(),
        };
        let result = self.runs.first().map_or("", |run| &run.result).split_whitespace().collect::<Vec<_>>().join(" ");
        table.notes.push(format!(
            "Slowdown and savings are geometric means of the ratios to the run without merging of the same round, with \
             95 % intervals. Results agree {agreement}: {result}. Guided is repeated while \
             the program runs, within {cpu_percent} % of one of {cpus} CPUs, by `pagefold run`, whose own memory is \
             counted too."
        ));
        table
    }

    fn build_row(&self, mode: SimulationMode) -> Vec<String> {
        let median = |value: fn(&SimulationRun) -> f64| {
            SampleSpread::from_samples(self.figures(mode, |run, _| value(run))).median
        };
        let relative = |ratio: Option<PairedRatio>, format: fn(PairedRatio) -> String| {
            ratio.filter(|_| mode != SimulationMode::Off).map_or("-".to_owned(), format)
        };
        vec![
            mode.name(),
            format!("{:.1}", median(|run| run.seconds)),
            relative(self.relative_time(mode), PairedRatio::format_increase),
            format!("{:.0}", median(|run| run.mean_memory) / BYTES_PER_MIB),
            relative(self.ratio_to_off(mode, |run| run.mean_memory), PairedRatio::format_decrease),
            relative(self.lasting_memory(mode), PairedRatio::format_decrease),
            format!("{:.0}", median(|run| run.faults as f64)),
            format!("{:.2}", median(|run| run.ksmd_seconds)),
            format!("{:.2}", median(|run| run.pagefold_seconds)),
        ]
    }

    fn build_checks(&self, cpu_percent: u32, cpus: usize) -> Vec<ThresholdCheck> {
        let SimulationCode { name, is_held_out, .. } = self.code;
        let max_slowdown = f64::from(cpu_percent) / 100.0 / cpus as f64 + MAX_SIMULATION_SLOWDOWN;
        let slowdown = self.relative_time(SimulationMode::Guided).map_or(f64::NAN, PairedRatio::increase);
        let lasting = |mode| self.lasting_memory(mode).map_or(f64::NAN, PairedRatio::decrease);
        let whole = self.code.whole_pages_to_scan.iter().map(|&pages| lasting(SimulationMode::Whole(pages)));
        let best_whole = whole.fold(0.0, f64::max);
        let guided = lasting(SimulationMode::Guided);
        vec![
            ThresholdCheck {
                claim: format!(
                    "{name}, {}: at most {:.0} % slower, {:.0} % beyond the CPU bound",
                    if is_held_out { "held out" } else { "not held out" },
                    max_slowdown * 100.0,
                    MAX_SIMULATION_SLOWDOWN * 100.0
                ),
                measured: format!("{:+.1} %", slowdown * 100.0),
                met: slowdown <= max_slowdown,
            },
            ThresholdCheck {
                claim: format!(
                    "{name}: at least {:.0} % of the lasting savings (last quarter of a run)",
                    MIN_SIMULATION_SAVINGS_SHARE * 100.0
                ),
                measured: format!("{:.1} % of memory against {:.1} %", guided * 100.0, best_whole * 100.0),
                met: best_whole > 0.0 && guided >= MIN_SIMULATION_SAVINGS_SHARE * best_whole,
            },
        ]
    }
}

fn run_code(
    code: SimulationCode,
    mode: SimulationMode,
    round: usize,
    conditions: &SimulationConditions,
    samples: &mut Vec<String>,
) -> Result<SimulationRun> {
    let ksm = KsmTestGuard::acquire().map_err(anyhow::Error::msg)?;
    let ksmd = ksmd_pid()?;
    wait_until_ksmd_forgets(&ksm, ksmd)?;
    let group = BenchmarkCgroup::create()?;
    let folder = tempfile::tempdir().context("a folder for the run")?;
    let deck = SimulationScript {
        script: lab_file("mpi").join(code.name).join("deck.sh"),
        folder: folder.path(),
        quick: conditions.quick,
    };
    deck.run_verb("prepare")?;
    let pages_to_scan = match mode {
        SimulationMode::Whole(pages) => Some(u64::from(pages)),
        SimulationMode::Off | SimulationMode::Guided => None,
    };
    ksm.write_setting("pages_to_scan", pages_to_scan.unwrap_or(DEFAULT_PAGES_TO_SCAN));
    ksm.write_setting("sleep_millisecs", DEFAULT_SLEEP_MILLISECS);
    ksm.write_setting("run", u8::from(pages_to_scan.is_some()));
    let settings = writable_ksm_settings();
    let state = tempfile::tempdir().context("a folder for pagefold's state")?;
    let guided = (mode == SimulationMode::Guided)
        .then(|| conditions.pagefold.run_guided_command(state.path(), conditions.cpu_percent));
    let before = KsmCounters::read(ksmd)?;
    let begin = Instant::now();
    let mut program = deck.start(&group, pages_to_scan.is_some(), guided.as_ref())?;
    let companion = guided.map(|_| CompanionMeter::new(program.id(), state.path()));
    let mut meter = RunMeter { begin, ksmd, ksmd_before: before, companion, memory: Vec::new(), page_faults: 0 };
    let label = format!("{},{round},{}", code.name, mode.name());
    let status = meter.watch(&mut program, &group, |figures| samples.push(format!("{label},{figures}")));
    let seconds = begin.elapsed().as_secs_f64();
    if status.is_err() {
        // mpirun ends its ranks on SIGTERM.
        let _ = rustix::process::kill_process(Pid::from_child(&program), Signal::TERM);
        let _ = program.wait();
    }
    // Also after a failure: until it exits, pagefold needs its folder and may set KSM.
    let companion_result = meter.companion.as_mut().map_or(Ok(()), CompanionMeter::wait_for_exit);
    let (status, complaints) = (status?, fs::read_to_string(deck.stderr_path())?);
    ensure!(status.success(), "{} failed: {status}: {complaints}", code.name);
    companion_result?;
    if mode == SimulationMode::Guided {
        let pagefold_errors: Vec<&str> = complaints.lines().filter(|line| line.starts_with("pagefold: ")).collect();
        ensure!(pagefold_errors.is_empty(), "guided merging of {} failed: {pagefold_errors:?}", code.name);
        let after = writable_ksm_settings();
        ensure!(after == settings, "pagefold left KSM with {after:?} instead of {settings:?}");
    }
    let ksmd_seconds = meter.ksmd_seconds()?;
    let mean = |memory: &[f64]| memory.iter().sum::<f64>() / memory.len().max(1) as f64;
    let last_quarter = &meter.memory[meter.memory.len() - meter.memory.len().div_ceil(4)..];
    let result = deck.run_verb("result")?;
    ensure!(!result.is_empty(), "{} printed no result", code.name);
    Ok(SimulationRun {
        mode,
        round,
        seconds,
        mean_memory: mean(&meter.memory),
        mean_late_memory: mean(last_quarter),
        faults: meter.page_faults,
        ksmd_seconds,
        pagefold_seconds: meter.companion.map_or(0.0, |companion| companion.cpu_seconds),
        result,
    })
}

/// Reads the memory and CPU time of a run.
struct RunMeter {
    begin: Instant,
    /// PID of ksmd.
    ksmd: u32,
    ksmd_before: KsmCounters,
    companion: Option<CompanionMeter>,
    /// Anonymous memory at each reading, in bytes.
    memory: Vec<f64>,
    page_faults: u64,
}

impl RunMeter {
    /// Read until the program ends. `sample` gets the figures of each reading as CSV.
    fn watch(
        &mut self,
        program: &mut Child,
        group: &BenchmarkCgroup,
        mut sample: impl FnMut(&str),
    ) -> Result<ExitStatus> {
        loop {
            if let Some(status) = program.try_wait()? {
                return Ok(status);
            }
            let CgroupUsage { anonymous_bytes, page_faults, .. } = group.read_usage()?;
            self.memory.push(anonymous_bytes as f64);
            // When the last process has ended the group is empty, and its counter remains.
            self.page_faults = page_faults;
            let ksmd_seconds = self.ksmd_seconds()?;
            if let Some(companion) = &mut self.companion {
                companion.read_cpu()?;
            }
            sample(&format!(
                "{:.2},{anonymous_bytes},{page_faults},{ksmd_seconds:.3},{:.2}",
                self.begin.elapsed().as_secs_f64(),
                self.companion.as_ref().map_or(0.0, |companion| companion.cpu_seconds)
            ));
            sleep_unless_signaled(POLL_INTERVAL)?;
        }
    }

    /// CPU time of ksmd since the run began.
    fn ksmd_seconds(&self) -> Result<f64> {
        Ok(KsmCounters::read(self.ksmd)?.ksmd_seconds - self.ksmd_before.ksmd_seconds)
    }
}

/// A script of `labs/mpi` with a folder of its own.
struct SimulationScript<'a> {
    script: PathBuf,
    folder: &'a Path,
    quick: bool,
}

impl SimulationScript<'_> {
    fn size_argument(&self) -> &'static str {
        if self.quick { "quick" } else { "full" }
    }

    fn run_verb(&self, verb: &str) -> Result<String> {
        let output = Command::new("sh")
            .arg(&self.script)
            .args([verb, self.size_argument()])
            .current_dir(self.folder)
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()?;
        ensure!(
            output.status.success(),
            "{} {verb}: {} (see labs/setup-bench.sh)",
            self.script.display(),
            output.status
        );
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    /// The file with the standard error of a run.
    fn stderr_path(&self) -> PathBuf {
        self.folder.join("complaints")
    }

    /// Start a run as a member of a control group, through another program if one is given.
    fn start(&self, group: &BenchmarkCgroup, enrolled: bool, launcher: Option<&Command>) -> Result<Child> {
        let hold_command = match launcher {
            Some(command) => {
                let mut hold_command = command_through_hold(command.get_program(), enrolled)?;
                hold_command.args(command.get_args()).arg("sh");
                hold_command
            }
            None => command_through_hold("sh", enrolled)?,
        };
        group
            .command_in_group(&hold_command)
            .arg(&self.script)
            .args(["run", self.size_argument()])
            .current_dir(self.folder)
            .stdin(Stdio::null())
            .stdout(fs::File::create(self.folder.join("output"))?)
            .stderr(fs::File::create(self.stderr_path())?)
            .spawn()
            .context("cannot start a run")
    }
}

/// The companion process of `pagefold run`. It is no child of this process. It is recognized by its state folder, which
/// no other process has.
pub struct CompanionMeter {
    /// The program: before its exec it was pagefold, with the same arguments as the companion.
    program_pid: u32,
    state_directory: Vec<u8>,
    companion_pid: Option<u32>,
    /// CPU seconds at the last reading.
    pub cpu_seconds: f64,
}

impl CompanionMeter {
    /// The meter of a program that was just started with this state folder.
    pub fn new(program: u32, state: &Path) -> Self {
        Self {
            program_pid: program,
            state_directory: state.as_os_str().as_bytes().to_vec(),
            companion_pid: None,
            cpu_seconds: 0.0,
        }
    }

    /// Whether a process is the companion. A process that has ended has no arguments left.
    fn is_companion(&self, pid: u32) -> bool {
        let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        pid != self.program_pid && arguments.split(|&byte| byte == 0).any(|argument| argument == self.state_directory)
    }

    /// Read the CPU time of the companion. Returns whether it is running.
    pub fn read_cpu(&mut self) -> Result<bool> {
        if self.companion_pid.is_none_or(|pid| !self.is_companion(pid)) {
            let pids = fs::read_dir("/proc")?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
            let Some(companion) = pids.into_iter().find(|&pid| self.is_companion(pid)) else { return Ok(false) };
            self.companion_pid = Some(companion);
        }
        // If it is just ending, the last reading remains.
        if let Some(cpu) = self.companion_pid.and_then(|pid| cpu_seconds(pid).ok()) {
            self.cpu_seconds = self.cpu_seconds.max(cpu);
        }
        Ok(true)
    }

    /// Wait until the companion exits, which it does by itself after the program and after undoing its changes.
    pub fn wait_for_exit(&mut self) -> Result<()> {
        let begin = Instant::now();
        while self.read_cpu()? {
            ensure!(
                begin.elapsed() < COMPANION_EXIT_TIMEOUT,
                "pagefold did not end within {COMPANION_EXIT_TIMEOUT:?} after the program"
            );
            sleep(Duration::from_millis(10));
        }
        ensure!(self.companion_pid.is_some(), "pagefold started no companion process");
        Ok(())
    }
}

/// A control group for memory, removed when dropped.
pub struct BenchmarkCgroup {
    folder: PathBuf,
    /// The line of memory.stat with anonymous memory.
    anonymous_line: &'static str,
}

/// The usage of a control group.
#[derive(Clone, Copy, Debug)]
pub struct CgroupUsage {
    /// Bytes of anonymous memory.
    pub anonymous_bytes: u64,
    /// Bytes of shared memory and of files on a tmpfs.
    pub shared_bytes: u64,
    /// Page faults so far.
    pub page_faults: u64,
}

impl BenchmarkCgroup {
    /// A new group without processes.
    pub fn create() -> Result<Self> {
        let first = Path::new("/sys/fs/cgroup/memory");
        let (root, line) = if first.exists() { (first, "rss ") } else { (Path::new("/sys/fs/cgroup"), "anon ") };
        let folder = root.join(format!("pagefold-bench-{}", std::process::id()));
        fs::create_dir(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        Ok(Self { folder, anonymous_line: line })
    }

    /// A command that starts another command as a member of the group.
    pub fn command_in_group(&self, other: &Command) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", "echo $$ > \"$1/cgroup.procs\" && shift && exec \"$@\"", "sh"]);
        command.arg(&self.folder).arg(other.get_program()).args(other.get_args());
        command
    }

    /// Read the usage.
    pub fn read_usage(&self) -> Result<CgroupUsage> {
        let path = self.folder.join("memory.stat");
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let line = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
        Ok(CgroupUsage {
            anonymous_bytes: line(self.anonymous_line).context("no memory")?,
            shared_bytes: line("shmem ").context("no shared memory")?,
            page_faults: line("pgfault ").context("no page faults")?,
        })
    }
}

impl Drop for BenchmarkCgroup {
    fn drop(&mut self) {
        // A group whose last process has just ended is busy for a moment.
        for _ in 0..50 {
            if fs::remove_dir(&self.folder).is_ok() {
                return;
            }
            sleep(POLL_INTERVAL);
        }
        eprintln!("{} could not be removed", self.folder.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_agree_within_tolerance() {
        assert!(
            results_agree("E = 1.0000, eV", "E = 1.0001, eV", 1e-3)
                && !results_agree("E = 1.0000, eV", "E = 1.0001, eV", 0.0)
        );
        assert!(!results_agree("E = 1", "F = 1", 1.0) && !results_agree("E = 1", "E = 1 2", 1.0));
    }

    #[test]
    fn only_held_out_codes_are_judged() {
        let run = |mode: SimulationMode| SimulationRun {
            mode,
            round: 1,
            seconds: 30.0,
            mean_memory: 1e9,
            mean_late_memory: if mode == SimulationMode::Off { 1e9 } else { 9e8 },
            faults: 0,
            ksmd_seconds: 0.0,
            pagefold_seconds: 0.0,
            result: String::new(),
        };
        for &code in SIMULATION_CODES.iter().chain(DEBIAN_CODES) {
            let mut findings = Findings::default();
            let runs: Vec<SimulationRun> = SimulationMode::modes_of(code).into_iter().map(run).collect();
            build_table_and_checks(code, &runs, 10, &mut findings).unwrap();
            let found = (findings.checks.len(), findings.unjudged.len());
            assert_eq!(found, if code.is_held_out { (2, 0) } else { (0, 2) }, "{}", code.name);
            assert!(findings.checks.iter().all(|bar| bar.met));
        }
        assert!(SIMULATION_CODES.iter().any(|code| code.is_held_out));
        assert_eq!(DEBIAN_CODES.iter().filter(|code| code.is_held_out).count(), 5);
    }
}
