//! Measures the claims about speed in Pagefold's documentation.
//!
//! Each section measures its alternatives side by side in one run. Their order in each round ([`rounds`]) and the
//! analysis of their ratios ([`findings::PairedRatio`]) are those of `pagefold ab`. A run is kept in a folder below
//! `benchmarks/runs/`: `settings.toml`, every sample as CSV, and `summary.md`, which is also printed. Exit status: 0 all
//! targets are met, 1 a target is missed, 2 a measurement failed. A quick run is too short to judge.
//!
//! The measured processes are children of this program ([`target_process`]); whole censuses run in children too
//! ([`census_process`]). Memory is allocated only as far as it is available. The argument `merge` measures merging
//! instead ([`merge`]), and `daemon` the daemon ([`daemon`]).

#![forbid(unsafe_code)]

mod ab_harness;
mod ab_real;
mod audit;
mod census_process;
mod chart;
mod competitor;
mod daemon;
mod daemon_hosts;
mod findings;
mod gang;
mod hashes;
mod memory_shapes;
mod merge;
mod numa_map;
mod numa_move;
mod numa_plan;
mod numad_advice;
mod numad_hosts;
mod read_rates;
mod rescan;
mod rounds;
mod run_settings;
mod scaling;
mod target_process;
mod threads;
mod vcpu_model;

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, ValueEnum};
use findings::Findings;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// Measure Pagefold's claims about its speed.
#[derive(Debug, Parser)]
struct BenchmarkArguments {
    /// Sections to measure; all if none is named
    sections: Vec<BenchmarkSection>,
    /// Small sizes and few rounds: shows that it works, not how fast
    #[arg(long)]
    quick: bool,
    /// Simulated campaigns of each kind of noise and number of blocks (ab-harness)
    #[arg(long, value_name = "NUMBER", default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..))]
    campaigns: u64,
    /// Where to keep the run, instead of benchmarks/runs/DATE-REVISION
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum BenchmarkSection {
    /// Hashing against reading alone
    ReadRate,
    /// The fingerprint against common hashes
    Hashes,
    /// One thread against two
    Threads,
    /// Time and memory by size
    Scaling,
    /// 20 TiB of nothing, 100,000 regions, 2,000 processes
    Shapes,
    /// Repeated scans of the same process
    Rescan,
    /// `pagefold doctor` for a host with 200 virtual machines
    Audit,
    /// Reading the NUMA map, against a status query and the kernel's own account
    NumaMap,
    /// Moving memory to another NUMA node, in an emulated machine
    NumaMove,
    /// Plans for generated hosts: time, distance to the optimum, and remote reads against simple placements
    NumaPlan,
    /// The plan against the advice of the real numad, in an emulated machine
    Numad,
    /// The plan against the advice of the real numad, on the generated hosts
    NumadHosts,
    /// Gang scheduling of virtual machines, in an emulated machine
    Gang,
    /// The analysis of experiments, over simulated campaigns with known effects
    AbHarness,
    /// Real campaigns of `pagefold ab` in which nothing differs, alone and beside a competitor for the CPUs
    AbReal,
    /// The over-commit model: speed, and residuals against published measurements
    VcpuModel,
    /// The daemon on simulated hosts of real size
    DaemonHosts,
}

impl BenchmarkSection {
    fn name(self) -> &'static str {
        match self {
            Self::ReadRate => "read-rate",
            Self::Hashes => "hashes",
            Self::Threads => "threads",
            Self::Scaling => "scaling",
            Self::Shapes => "shapes",
            Self::Rescan => "rescan",
            Self::Audit => "audit",
            Self::NumaMap => "numa-map",
            Self::NumaMove => "numa-move",
            Self::NumaPlan => "numa-plan",
            Self::Numad => "numad",
            Self::NumadHosts => "numad-hosts",
            Self::Gang => "gang",
            Self::AbHarness => "ab-harness",
            Self::AbReal => "ab-real",
            Self::VcpuModel => "vcpu-model",
            Self::DaemonHosts => "daemon-hosts",
        }
    }

    fn measure(self, effort: BenchmarkEffort) -> Result<Findings> {
        match self {
            Self::ReadRate => read_rates::measure(effort),
            Self::Hashes => hashes::measure(effort),
            Self::Threads => threads::measure(effort),
            Self::Scaling => scaling::measure(effort),
            Self::Shapes => memory_shapes::measure(effort),
            Self::Rescan => rescan::measure(effort),
            Self::Audit => audit::measure(effort),
            Self::NumaMap => numa_map::measure(effort),
            Self::NumaMove => numa_move::measure(effort),
            Self::NumaPlan => numa_plan::measure(effort),
            Self::Numad => numad_advice::measure(effort),
            Self::NumadHosts => numad_hosts::measure(effort),
            Self::Gang => gang::measure(effort),
            Self::AbHarness => ab_harness::measure(effort),
            Self::AbReal => ab_real::measure(effort),
            Self::VcpuModel => vcpu_model::measure(effort),
            Self::DaemonHosts => daemon_hosts::measure(effort),
        }
    }
}

/// The size of the measurements.
#[derive(Clone, Copy, Debug)]
pub struct BenchmarkEffort {
    /// Small sizes and few rounds.
    pub quick: bool,
    /// Simulated campaigns of each kind of noise and number of blocks.
    pub campaigns: u64,
}

impl BenchmarkEffort {
    /// The number of processes of `bytes` each that fit into three quarters of the available memory: a power of two, at
    /// most `limit`.
    pub fn max_processes(self, bytes: usize, limit: usize) -> Result<usize> {
        let available = run_settings::meminfo_kib("MemAvailable:")? << 10;
        let fits = usize::try_from(available / 4 * 3)? / bytes;
        ensure!(fits > 0, "only {available} bytes of memory are available: too few for {bytes}");
        Ok(limit.min(1 << fits.ilog2()))
    }

    /// The bytes that each of `processes` may use: `bytes`, halved until all fit.
    pub fn max_bytes_per_process(self, mut bytes: usize, processes: usize) -> Result<usize> {
        while self.max_processes(bytes, processes)? < processes {
            bytes /= 2;
        }
        Ok(bytes)
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run() -> Result<bool> {
    let words: Vec<String> = std::env::args().collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [_, "hold", layout, ..] => target_process::run_target(serde_json::from_str(layout)?).map(|()| true),
        [_, "measure", order] => {
            let outcome = serde_json::from_str::<census_process::CensusJob>(order)?.run_here()?;
            println!("{}", serde_json::to_string(&outcome)?);
            Ok(true)
        }
        [_, "held", how, program, ref arguments @ ..] => {
            merge::exec_as_first_oom_victim(how, program, arguments).map(|()| true)
        }
        [_, "peak-memory", program, ref arguments @ ..] => audit::print_peak_memory(program, arguments).map(|()| true),
        [_, "probe"] => merge::run_probe().map(|()| true),
        [_, "merge", ..] => merge::run_benchmark(&merge::MergeBenchmarkArguments::parse_from(&words[1..])),
        [_, "daemon", ..] => daemon::run_benchmark(&daemon::DaemonBenchmarkArguments::parse_from(&words[1..])),
        _ => run_benchmark(&BenchmarkArguments::parse()),
    }
}

fn run_benchmark(arguments: &BenchmarkArguments) -> Result<bool> {
    let all = BenchmarkSection::value_variants();
    let chosen = |section: &&BenchmarkSection| arguments.sections.is_empty() || arguments.sections.contains(section);
    let sections: Vec<BenchmarkSection> = all.iter().filter(chosen).copied().collect();
    if !arguments.quick && cfg!(debug_assertions) {
        bail!("built without optimization: use `make bench`, or --quick for a functional test");
    }
    // Children inherit the priority. Without permission it stays as it is.
    let nice = rustix::process::nice(-5).or_else(|_| rustix::process::nice(0)).context("cannot read the priority")?;
    let names = sections.iter().map(|section| section.name().to_owned()).collect();
    let settings = run_settings::RunSettings::observe(arguments.quick, names, nice)?;
    let folder = match &arguments.out {
        Some(folder) => folder.clone(),
        None => new_run_folder(&settings.date, &settings.revision),
    };
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let settings = toml::to_string(&settings)?;
    write_file(&folder, "settings.toml", &settings)?;

    let mut summary = "# Benchmarks\n".to_owned();
    if arguments.quick {
        summary.push_str("\nA quick run: it shows that the benchmarks work, and its figures mean little.\n");
    }
    let mut met = true;
    for section in sections {
        let started = Instant::now();
        let effort = BenchmarkEffort { quick: arguments.quick, campaigns: arguments.campaigns };
        let findings = section.measure(effort).with_context(|| section.name().to_owned())?;
        met &= findings.checks.iter().all(|bar| bar.met);
        let text = findings.to_markdown(section.name(), !arguments.quick);
        println!("{text}");
        eprintln!("{} took {:.0} s\n", section.name(), started.elapsed().as_secs_f64());
        write_file(&folder, &format!("{}.csv", section.name()), &format!("{}\n", findings.samples.join("\n")))?;
        summary.push('\n');
        summary.push_str(&text);
        write_file(&folder, "summary.md", &summary)?;
    }
    eprintln!("kept in {}", folder.display());
    Ok(met || arguments.quick)
}

/// A folder for this run that does not exist yet.
fn new_run_folder(date: &str, revision: &str) -> PathBuf {
    let runs = Path::new(env!("CARGO_MANIFEST_DIR")).join("runs");
    let numbered = (2..).map(|number| runs.join(format!("{date}-{revision}-{number}")));
    let first = runs.join(format!("{date}-{revision}"));
    std::iter::once(first).chain(numbered).find(|folder| !folder.exists()).expect("numbers do not end")
}

fn write_file(folder: &Path, name: &str, text: &str) -> Result<()> {
    let path = folder.join(name);
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
}
