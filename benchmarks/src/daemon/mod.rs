//! What the daemon brings and costs, on machines and processes that are real.
//!
//! Everything is measured from outside: savings by page tables, CPU time by the scheduler's figures. KSM is held and
//! put back around each part ([`pagefold_labs::ksm`]). A section keeps its run in a folder below
//! `benchmarks/runs/DATE-REVISION/`: settings.toml, every sample as CSV, summary.md, pictures and the daemon's log.
//! Before anything is measured it is seen that nothing else works on the machine. As root.

mod alike;
mod churn;
mod driver;
mod guest;
mod hostile;
mod oom;
mod plot;
mod quiet;

use crate::merge::policies::Pagefold;
use crate::merge::trial;
use crate::report::Findings;
use crate::settings::Settings;
use crate::write;
use alike::Alike;
use anyhow::{Context, Result, bail, ensure};
use churn::Churn;
use clap::{Parser, ValueEnum};
use driver::Way;
use hostile::Hostile;
use oom::Limit;
use quiet::Quiet;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The share of one CPU that others may use while something is measured.
const OTHERS: f64 = 0.1;

/// Measure what the daemon brings and costs.
#[derive(Debug, Parser)]
#[command(name = "bench-daemon")]
pub struct Arguments {
    /// What to measure; everything if nothing is named
    sections: Vec<Section>,
    /// Short and small: shows that it works, not how well
    #[arg(long)]
    quick: bool,
    /// How long machines come and go, for each way
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = humantime::parse_duration)]
    churn: Duration,
    /// A machine comes so often
    #[arg(long, value_name = "TIME", default_value = "20s", value_parser = humantime::parse_duration)]
    every: Duration,
    /// How long a machine lives
    #[arg(long, value_name = "TIME", default_value = "2m", value_parser = humantime::parse_duration)]
    life: Duration,
    /// Memory of a machine, in MiB
    #[arg(long, value_name = "MiB", default_value_t = 128)]
    memory: u32,
    /// Measure the daemon alone, without the policies beside it
    #[arg(long)]
    alone: bool,
    /// For how long a quiet host is measured
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = humantime::parse_duration)]
    quiet: Duration,
    /// Memory of each of the four processes on it, in MiB
    #[arg(long, value_name = "MiB", default_value_t = 3072)]
    quiet_memory: u64,
    /// With a process on it that works a little
    #[arg(long)]
    restless: bool,
    /// For how long a hostile mix goes on; with --quick at most, until everything was seen once
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = humantime::parse_duration)]
    hostile: Duration,
    /// Seconds between two programs on the host that is driven to its memory limit
    #[arg(long, value_name = "SECONDS", default_value_t = 15)]
    pause: u32,
    /// Measure although something else works on the machine
    #[arg(long)]
    regardless: bool,
    /// The binary that is measured [default: the one that was built beside this]
    #[arg(long, value_name = "PATH")]
    pagefold: Option<PathBuf>,
    /// Where to keep the run, instead of benchmarks/runs/DATE-REVISION
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Section {
    /// QEMU guests that come and go
    Churn,
    /// Programs that look alike, of which few hold the same
    Alike,
    /// A host on which nothing happens any more
    Quiet,
    /// Programs that make it hard
    Hostile,
    /// A host that is driven to its memory limit
    Oom,
}

impl Section {
    fn name(self) -> &'static str {
        match self {
            Self::Churn => "churn",
            Self::Alike => "alike",
            Self::Quiet => "quiet",
            Self::Hostile => "hostile",
            Self::Oom => "oom",
        }
    }

    /// Whether a short form is long enough to judge by.
    fn is_judged(self, quick: bool) -> bool {
        !quick || self == Self::Hostile
    }
}

/// What `settings.toml` says beside what holds for every benchmark.
#[derive(Debug, Serialize)]
struct DaemonSettings {
    #[serde(flatten)]
    common: Settings,
    churn_seconds: u64,
    every_seconds: u64,
    life_seconds: u64,
    memory_mib: u32,
    /// What others used of one CPU before.
    others_percent: f64,
    ksm: BTreeMap<String, String>,
    versions: BTreeMap<String, String>,
}

/// Measure; whether all bars are met.
pub fn benchmark(arguments: &Arguments) -> Result<bool> {
    if !arguments.quick && cfg!(debug_assertions) {
        bail!("built without optimisation: use `make bench-daemon`, or --quick to see that it works");
    }
    let program = match &arguments.pagefold {
        Some(path) => path.clone(),
        None => std::env::current_exe()?.with_file_name("pagefold"),
    };
    let program = program.canonicalize().with_context(|| format!("no {}", program.display()))?;
    trial::note_signals()?;
    let all = Section::value_variants();
    let chosen = |section: &&Section| arguments.sections.is_empty() || arguments.sections.contains(section);
    let mut met = true;
    for section in all.iter().filter(chosen).copied() {
        let others = others(Duration::from_secs(if arguments.quick { 1 } else { 5 }))?;
        ensure!(
            arguments.quick || arguments.regardless || others <= OTHERS,
            "others use {:.0} % of a CPU: measure when they have ended, or give --regardless",
            others * 100.0
        );
        let settings = settings(section, arguments, &program, others)?;
        let folder = crate::merge::vacant(arguments.out.as_deref(), &settings.common, "daemon", section.name())?;
        write(&folder, "settings.toml", &toml::to_string(&settings)?)?;
        let started = Instant::now();
        let findings = measure(section, arguments, &program, &folder).with_context(|| section.name())?;
        keep(&folder, section, &findings, arguments.quick)?;
        println!("{}", findings.markdown(section.name(), section.is_judged(arguments.quick)));
        met &= !section.is_judged(arguments.quick) || findings.bars.iter().all(|bar| bar.met);
        eprintln!("{} took {:.0} s, kept in {}\n", section.name(), started.elapsed().as_secs_f64(), folder.display());
    }
    Ok(met)
}

fn settings(section: Section, arguments: &Arguments, program: &Path, others: f64) -> Result<DaemonSettings> {
    let nice = rustix::process::nice(0).context("cannot tell the priority")?;
    let ksm = {
        let _held = pagefold_labs::ksm::Ksm::take().map_err(anyhow::Error::msg)?;
        crate::merge::ksm_settings()
    };
    Ok(DaemonSettings {
        common: Settings::observe(arguments.quick, vec![format!("daemon-{}", section.name())], nice)?,
        churn_seconds: arguments.churn.as_secs(),
        every_seconds: arguments.every.as_secs(),
        life_seconds: arguments.life.as_secs(),
        memory_mib: arguments.memory,
        others_percent: others * 100.0,
        ksm,
        versions: crate::merge::versions(&Pagefold { program: program.to_owned() }),
    })
}

fn measure(section: Section, arguments: &Arguments, program: &Path, folder: &Path) -> Result<Findings> {
    match section {
        Section::Churn => {
            let churn = Churn {
                length: arguments.churn,
                every: arguments.every,
                life: arguments.life,
                mib: arguments.memory,
                pagefold: program.to_owned(),
            };
            let ways = Way::ALL.into_iter().filter(|way| !arguments.alone || *way == Way::Daemon);
            let mut runs = Vec::new();
            for way in ways {
                eprintln!("churn: {} for {} s", way.name(), churn.length.as_secs());
                runs.push(churn.run(way, &folder.join("daemon.log"))?);
                write(folder, "guests.csv", &churn::fates(&runs))?;
                plot::draw("Guests that come and go", &runs, &folder.join("churn.svg"))?;
                keep(folder, section, &churn::findings(&churn, &runs), arguments.quick)?;
            }
            Ok(churn::findings(&churn, &runs))
        }
        Section::Alike => {
            let (templates, mib, patience) = if arguments.quick { (2, 16, 60) } else { (8, 64, 300) };
            let [burst, patience] = [Duration::from_millis(200), Duration::from_secs(patience)];
            let alike = Alike { templates, mib, burst, patience, pagefold: program.to_owned() };
            let mut runs = Vec::new();
            for way in Way::ALL.into_iter().filter(|way| !arguments.alone || *way == Way::Daemon) {
                eprintln!("alike: {}", way.name());
                runs.push(alike.run(way, &folder.join("daemon.log"))?);
                keep(folder, section, &alike::findings(&alike, &runs), arguments.quick)?;
            }
            Ok(alike::findings(&alike, &runs))
        }
        Section::Quiet => {
            let (length, calm) = (arguments.quiet, Duration::from_secs(if arguments.quick { 5 } else { 60 }));
            let mib = if arguments.quick { 32 } else { arguments.quiet_memory };
            let (guests, guest_mib) = if arguments.quick { (1, 128) } else { (4, 512) };
            let (restless, pagefold) = (arguments.restless, program.to_owned());
            let quiet = Quiet { length, calm, processes: 4, mib, guests, guest_mib, restless, pagefold };
            quiet.measure(&folder.join("daemon.log"))
        }
        Section::Hostile => {
            let (regions, writers, burst) = if arguments.quick { (20_000, 1, 5) } else { (60_000, 2, 10) };
            let [burst, tide] = [burst, 20].map(Duration::from_secs);
            let (length, brief, pagefold) = (arguments.hostile, arguments.quick, program.to_owned());
            let hostile = Hostile { length, brief, regions, writers, burst, tide, pagefold };
            hostile.measure(&folder.join("daemon.log"))
        }
        Section::Oom => {
            let limit =
                Limit { memory: 384, mib: 24, duplicate: 50, pause: arguments.pause, pagefold: program.to_owned() };
            limit.measure(folder)
        }
    }
}

/// Write what was found.
fn keep(folder: &Path, section: Section, findings: &Findings, quick: bool) -> Result<()> {
    let mut summary = format!("# The daemon: {}\n", section.name());
    if quick {
        summary.push_str("\nA quick run: it shows that the benchmark works, and its figures mean little.\n");
    }
    let text = findings.markdown(section.name(), section.is_judged(quick));
    write(folder, "summary.md", &format!("{summary}\n{text}"))?;
    write(folder, "samples.csv", &format!("{}\n", findings.samples.join("\n")))
}

/// What others use of one CPU, over some time in which this program only waits.
fn others(time: Duration) -> Result<f64> {
    let before = busy()?;
    trial::pause_for(time)?;
    Ok((busy()? - before) / time.as_secs_f64())
}

/// CPU seconds that were not idle, of all CPUs: the first line of `/proc/stat` (proc_stat(5)), without idle and iowait.
fn busy() -> Result<f64> {
    let stat = fs::read_to_string("/proc/stat")?;
    let line = stat.lines().next().context("an empty /proc/stat")?;
    let ticks = line.split_ascii_whitespace().skip(1).take(8).enumerate();
    let busy: f64 = ticks.filter(|(i, _)| ![3, 4].contains(i)).filter_map(|(_, ticks)| ticks.parse::<f64>().ok()).sum();
    Ok(busy / rustix::param::clock_ticks_per_second() as f64)
}
