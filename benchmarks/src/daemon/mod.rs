//! What the daemon saves and costs, on real guests and processes.
//!
//! All figures are measured from outside: savings by page tables, CPU time by the scheduler's figures. Each part holds
//! KSM and restores it ([`pagefold_labs::ksm`]). A section keeps its run in a folder below
//! `benchmarks/runs/DATE-REVISION/`: settings.toml, every sample as CSV, summary.md, charts and the daemon's log.
//! Before the first measurement it checks that the machine is otherwise idle. Needs root.

mod churn;
mod driver;
mod guest;
mod hostile_mix;
mod large_guests;
mod oom;
mod plot;
mod quiet_host;
mod similar_programs;

use crate::findings::Findings;
use crate::merge::policies::PagefoldProgram;
use crate::merge::trial;
use crate::run_settings::RunSettings;
use crate::write_file;
use anyhow::{Context, Result, bail, ensure};
use churn::ChurnBenchmark;
use clap::{Parser, ValueEnum};
use driver::KsmDriverKind;
use guest::GuestShape;
use hostile_mix::HostileMixBenchmark;
use large_guests::LargeGuestsBenchmark;
use oom::OomBenchmark;
use quiet_host::QuietHostBenchmark;
use serde::Serialize;
use similar_programs::SimilarProgramsBenchmark;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The share of one CPU that other processes may use during a measurement.
const MAX_FOREIGN_CPU_SHARE: f64 = 0.1;

/// Measure what the daemon saves and costs.
#[derive(Debug, Parser)]
#[command(name = "bench-daemon")]
pub struct DaemonBenchmarkArguments {
    /// Sections to measure; all if none is named
    sections: Vec<DaemonSection>,
    /// Short and small: shows that it works, not how well
    #[arg(long)]
    quick: bool,
    /// How long guests come and go, under each driver
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = humantime::parse_duration)]
    churn: Duration,
    /// Interval at which guests start
    #[arg(long, value_name = "TIME", default_value = "20s", value_parser = humantime::parse_duration)]
    arrival_interval: Duration,
    /// How long a guest runs
    #[arg(long, value_name = "TIME", default_value = "2m", value_parser = humantime::parse_duration)]
    guest_lifetime: Duration,
    /// Memory of a guest, in MiB
    #[arg(long, value_name = "MiB", default_value_t = 128)]
    memory: u32,
    /// Number of large guests, of 1.75 GiB each
    #[arg(long, value_name = "N", default_value_t = 8)]
    large_guests: usize,
    /// Measure the daemon alone, without the policies beside it
    #[arg(long)]
    daemon_only: bool,
    /// How long a quiet host is measured
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = humantime::parse_duration)]
    quiet: Duration,
    /// Memory of each of the four processes on it, in MiB
    #[arg(long, value_name = "MiB", default_value_t = 3072)]
    quiet_memory: u64,
    /// With a busy process beside the idle ones
    #[arg(long)]
    with_busy_process: bool,
    /// How long the hostile mix runs; with --quick at most, until every event was seen once
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = humantime::parse_duration)]
    hostile: Duration,
    /// Seconds between two program starts on the host that is driven to its memory limit
    #[arg(long, value_name = "SECONDS", default_value_t = 15)]
    pause: u32,
    /// Measure even if other processes use the machine
    #[arg(long)]
    ignore_foreign_load: bool,
    /// The binary to measure [default: the one built beside this program]
    #[arg(long, value_name = "PATH")]
    pagefold: Option<PathBuf>,
    /// Where to keep the run, instead of benchmarks/runs/DATE-REVISION
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DaemonSection {
    /// QEMU guests that come and go
    Churn,
    /// Large QEMU guests with the files of a common image in their page cache (an hour with all drivers)
    LargeGuests,
    /// Programs with similar names and sizes, of which few have equal pages
    SimilarPrograms,
    /// A host without further changes
    Quiet,
    /// Programs that are hostile to merging
    Hostile,
    /// A host that is driven to its memory limit
    Oom,
}

impl DaemonSection {
    fn name(self) -> &'static str {
        match self {
            Self::Churn => "churn",
            Self::LargeGuests => "large-guests",
            Self::SimilarPrograms => "similar-programs",
            Self::Quiet => "quiet",
            Self::Hostile => "hostile",
            Self::Oom => "oom",
        }
    }

    /// Whether a quick run is long enough to judge.
    fn is_judged_when_quick(self, quick: bool) -> bool {
        !quick || self == Self::Hostile
    }
}

/// The fields of `settings.toml` beside those common to all benchmarks.
#[derive(Debug, Serialize)]
struct DaemonRunSettings {
    #[serde(flatten)]
    common: RunSettings,
    churn_seconds: u64,
    arrival_interval_seconds: u64,
    guest_lifetime_seconds: u64,
    memory_mib: u32,
    /// CPU use of other processes before the run, in percent of one CPU.
    others_percent: f64,
    ksm: BTreeMap<String, String>,
    versions: BTreeMap<String, String>,
}

/// Run the benchmark. Returns whether all targets are met.
pub fn run_benchmark(arguments: &DaemonBenchmarkArguments) -> Result<bool> {
    if !arguments.quick && cfg!(debug_assertions) {
        bail!("built without optimization: use `make bench-daemon`, or --quick for a functional test");
    }
    let program = match &arguments.pagefold {
        Some(path) => path.clone(),
        None => std::env::current_exe()?.with_file_name("pagefold"),
    };
    let program = program.canonicalize().with_context(|| format!("no {}", program.display()))?;
    trial::install_signal_handlers()?;
    let sections = DaemonSection::value_variants();
    let chosen = |section: &&DaemonSection| arguments.sections.is_empty() || arguments.sections.contains(section);
    let mut met = true;
    for section in sections.iter().filter(chosen).copied() {
        let foreign_cpu = measure_foreign_cpu(Duration::from_secs(if arguments.quick { 1 } else { 5 }))?;
        ensure!(
            arguments.quick || arguments.ignore_foreign_load || foreign_cpu <= MAX_FOREIGN_CPU_SHARE,
            "other processes use {:.0} % of a CPU: stop them, or pass --ignore-foreign-load",
            foreign_cpu * 100.0
        );
        let settings = collect_settings(section, arguments, &program, foreign_cpu)?;
        let folder =
            crate::merge::new_section_folder(arguments.out.as_deref(), &settings.common, "daemon", section.name())?;
        write_file(&folder, "settings.toml", &toml::to_string(&settings)?)?;
        let started = Instant::now();
        let recorder = DaemonSectionRecorder { arguments, program: &program, folder: &folder };
        let findings = recorder.measure_section(section).with_context(|| section.name())?;
        write_findings(&folder, section, &findings, arguments.quick)?;
        println!("{}", findings.to_markdown(section.name(), section.is_judged_when_quick(arguments.quick)));
        met &= !section.is_judged_when_quick(arguments.quick) || findings.checks.iter().all(|check| check.met);
        eprintln!("{} took {:.0} s, kept in {}\n", section.name(), started.elapsed().as_secs_f64(), folder.display());
    }
    Ok(met)
}

fn collect_settings(
    section: DaemonSection,
    arguments: &DaemonBenchmarkArguments,
    program: &Path,
    foreign_cpu: f64,
) -> Result<DaemonRunSettings> {
    let nice = rustix::process::nice(0).context("cannot read the priority")?;
    let ksm = {
        let _held = pagefold_labs::ksm::KsmTestGuard::acquire().map_err(anyhow::Error::msg)?;
        crate::merge::writable_ksm_settings()
    };
    Ok(DaemonRunSettings {
        common: RunSettings::observe(arguments.quick, vec![format!("daemon-{}", section.name())], nice)?,
        churn_seconds: arguments.churn.as_secs(),
        arrival_interval_seconds: arguments.arrival_interval.as_secs(),
        guest_lifetime_seconds: arguments.guest_lifetime.as_secs(),
        memory_mib: arguments.memory,
        others_percent: foreign_cpu * 100.0,
        ksm,
        versions: crate::merge::program_versions(&PagefoldProgram { program: program.to_owned() }),
    })
}

/// Measures a section and keeps its results.
struct DaemonSectionRecorder<'a> {
    arguments: &'a DaemonBenchmarkArguments,
    program: &'a Path,
    folder: &'a Path,
}

impl DaemonSectionRecorder<'_> {
    fn measure_section(&self, section: DaemonSection) -> Result<Findings> {
        match section {
            DaemonSection::Churn => self.measure_churn(),
            DaemonSection::LargeGuests => self.measure_large_guests(),
            DaemonSection::SimilarPrograms => self.measure_similar_programs(),
            DaemonSection::Quiet => self.measure_quiet_host(),
            DaemonSection::Hostile => self.measure_hostile_mix(),
            DaemonSection::Oom => self.measure_oom(),
        }
    }

    /// The compared programs that control ksmd.
    fn compared_drivers(&self) -> impl Iterator<Item = KsmDriverKind> {
        let daemon_only = self.arguments.daemon_only;
        KsmDriverKind::COMPARED.into_iter().filter(move |driver| !daemon_only || *driver == KsmDriverKind::Daemon)
    }

    fn daemon_log(&self) -> PathBuf {
        self.folder.join("daemon.log")
    }

    fn measure_churn(&self) -> Result<Findings> {
        let churn = ChurnBenchmark {
            duration: self.arguments.churn,
            arrival_interval: self.arguments.arrival_interval,
            guest_lifetime: self.arguments.guest_lifetime,
            mib: self.arguments.memory,
            pagefold: self.program.to_owned(),
        };
        let mut runs = Vec::new();
        for driver in self.compared_drivers() {
            eprintln!("churn: {} for {} s", driver.name(), churn.duration.as_secs());
            runs.push(churn.run(driver, &self.daemon_log())?);
            write_file(self.folder, "guests.csv", &churn::guests_csv(&runs))?;
            plot::draw_chart("Guests that come and go", &runs, &self.folder.join("churn.svg"))?;
            let findings = churn::build_findings(&churn, &runs);
            write_findings(self.folder, DaemonSection::Churn, &findings, self.arguments.quick)?;
        }
        Ok(churn::build_findings(&churn, &runs))
    }

    fn measure_large_guests(&self) -> Result<Findings> {
        let (guests, shape, timeout_seconds) = if self.arguments.quick {
            (2, GuestShape::small(128), 60)
        } else {
            (self.arguments.large_guests, GuestShape { mib: 1792, shared_mib: 900, unique_mib: 600 }, 1800)
        };
        let timeout = Duration::from_secs(timeout_seconds);
        let large = LargeGuestsBenchmark { guests, shape, timeout, pagefold: self.program.to_owned() };
        let mut runs = Vec::new();
        for driver in self.compared_drivers() {
            eprintln!("large guests: {}", driver.name());
            runs.push(large.run(driver, &self.daemon_log())?);
            let findings = large_guests::build_findings(&large, &runs);
            write_findings(self.folder, DaemonSection::LargeGuests, &findings, self.arguments.quick)?;
        }
        Ok(large_guests::build_findings(&large, &runs))
    }

    fn measure_similar_programs(&self) -> Result<Findings> {
        let (templates, mib, timeout_seconds) = if self.arguments.quick { (2, 16, 60) } else { (8, 64, 300) };
        let programs = SimilarProgramsBenchmark {
            templates,
            mib,
            burst: Duration::from_millis(200),
            timeout: Duration::from_secs(timeout_seconds),
            pagefold: self.program.to_owned(),
        };
        let mut runs = Vec::new();
        for driver in self.compared_drivers() {
            eprintln!("similar programs: {}", driver.name());
            runs.push(programs.run(driver, &self.daemon_log())?);
            let findings = similar_programs::build_findings(&programs, &runs);
            write_findings(self.folder, DaemonSection::SimilarPrograms, &findings, self.arguments.quick)?;
        }
        Ok(similar_programs::build_findings(&programs, &runs))
    }

    fn measure_quiet_host(&self) -> Result<Findings> {
        let (settle_seconds, process_mib, guests, guest_mib) =
            if self.arguments.quick { (5, 32, 1, 128) } else { (60, self.arguments.quiet_memory, 4, 512) };
        let quiet = QuietHostBenchmark {
            duration: self.arguments.quiet,
            settle_time: Duration::from_secs(settle_seconds),
            processes: 4,
            process_mib,
            guests,
            guest_mib,
            with_busy_process: self.arguments.with_busy_process,
            pagefold: self.program.to_owned(),
        };
        quiet.measure(&self.daemon_log())
    }

    fn measure_hostile_mix(&self) -> Result<Findings> {
        let (region_count, writer_threads, burst_seconds) =
            if self.arguments.quick { (20_000, 1, 5) } else { (60_000, 2, 10) };
        let hostile = HostileMixBenchmark {
            duration: self.arguments.hostile,
            is_brief: self.arguments.quick,
            region_count,
            writer_threads,
            burst: Duration::from_secs(burst_seconds),
            rewrite_interval: Duration::from_secs(20),
            pagefold: self.program.to_owned(),
        };
        hostile.measure(&self.daemon_log())
    }

    fn measure_oom(&self) -> Result<Findings> {
        let oom = OomBenchmark {
            host_mib: 384,
            program_mib: 24,
            duplicate_percent: 50,
            start_interval_seconds: self.arguments.pause,
            pagefold: self.program.to_owned(),
        };
        oom.measure(self.folder)
    }
}

/// Write the findings.
fn write_findings(folder: &Path, section: DaemonSection, findings: &Findings, quick: bool) -> Result<()> {
    let mut summary = format!("# The daemon: {}\n", section.name());
    if quick {
        summary.push_str("\nA quick run: it shows that the benchmark works, and its figures mean little.\n");
    }
    let text = findings.to_markdown(section.name(), section.is_judged_when_quick(quick));
    write_file(folder, "summary.md", &format!("{summary}\n{text}"))?;
    write_file(folder, "samples.csv", &format!("{}\n", findings.samples.join("\n")))
}

/// CPU use of other processes, in percent of one CPU, over a time in which this program only waits.
fn measure_foreign_cpu(time: Duration) -> Result<f64> {
    let before = busy_cpu_seconds()?;
    trial::sleep_unless_signaled(time)?;
    Ok((busy_cpu_seconds()? - before) / time.as_secs_f64())
}

/// CPU seconds that were not idle, of all CPUs: the first line of `/proc/stat` (proc_stat(5)), without idle and iowait.
fn busy_cpu_seconds() -> Result<f64> {
    let stat = fs::read_to_string("/proc/stat")?;
    let line = stat.lines().next().context("an empty /proc/stat")?;
    let ticks = line.split_ascii_whitespace().skip(1).take(8).enumerate();
    let busy: f64 = ticks.filter(|(i, _)| ![3, 4].contains(i)).filter_map(|(_, ticks)| ticks.parse::<f64>().ok()).sum();
    Ok(busy / rustix::param::clock_ticks_per_second() as f64)
}
