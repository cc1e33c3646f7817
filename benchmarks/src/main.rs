//! What Pagefold's documentation claims about speed, measured.
//!
//! Each section measures what it compares side by side in one run, in turns, and quotes medians of the ratios within
//! rounds. A run is kept in a folder below `benchmarks/runs/`: `settings.toml`, every sample as CSV, and `summary.md`,
//! which is also printed. Exit status: 0 all bars are met, 1 one is missed, 2 it could not be measured. A quick run is
//! too short to judge.
//!
//! What is measured are children of this program ([`target`]), and whole censuses run in children too ([`measure`]).
//! Memory is asked for only as far as it is available. Started with the word `merge` it measures merging instead
//! ([`merge`]), with `daemon` the daemon ([`daemon`]).

#![forbid(unsafe_code)]

mod again;
mod chart;
mod daemon;
mod hashes;
mod measure;
mod merge;
mod rates;
mod report;
mod scaling;
mod settings;
mod shapes;
mod target;
mod threads;

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, ValueEnum};
use report::Findings;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// Measure what Pagefold claims about its speed.
#[derive(Debug, Parser)]
struct Arguments {
    /// What to measure; everything if nothing is named
    sections: Vec<Section>,
    /// Small sizes and few rounds: shows that it works, not how fast
    #[arg(long)]
    quick: bool,
    /// Where to keep the run, instead of benchmarks/runs/DATE-REVISION
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Section {
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
    /// Looking again at whom was looked at before
    Again,
}

impl Section {
    fn name(self) -> &'static str {
        match self {
            Self::ReadRate => "read-rate",
            Self::Hashes => "hashes",
            Self::Threads => "threads",
            Self::Scaling => "scaling",
            Self::Shapes => "shapes",
            Self::Again => "again",
        }
    }

    fn measure(self, effort: Effort) -> Result<Findings> {
        match self {
            Self::ReadRate => rates::measure(effort),
            Self::Hashes => hashes::measure(effort),
            Self::Threads => threads::measure(effort),
            Self::Scaling => scaling::measure(effort),
            Self::Shapes => shapes::measure(effort),
            Self::Again => again::measure(effort),
        }
    }
}

/// How much is to be done.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Small sizes and few rounds.
    pub quick: bool,
}

impl Effort {
    /// How many processes of `bytes` each, at most `most` and a power of two, the machine can hold besides a quarter of
    /// what is available now.
    pub fn affordable_count(self, bytes: usize, most: usize) -> Result<usize> {
        let available = settings::meminfo("MemAvailable:")? << 10;
        let fits = usize::try_from(available / 4 * 3)? / bytes;
        ensure!(fits > 0, "{available} bytes of memory are available: too little for {bytes}");
        Ok(most.min(1 << fits.ilog2()))
    }

    /// How many bytes `processes` may have each: `bytes`, or halved until they fit.
    pub fn affordable(self, mut bytes: usize, processes: usize) -> Result<usize> {
        while self.affordable_count(bytes, processes)? < processes {
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
        [_, "hold", layout] => target::hold(serde_json::from_str(layout)?).map(|()| true),
        [_, "measure", order] => {
            let outcome = serde_json::from_str::<measure::Order>(order)?.carry_out()?;
            println!("{}", serde_json::to_string(&outcome)?);
            Ok(true)
        }
        [_, "held", how, program, ref arguments @ ..] => merge::hold(how, program, arguments).map(|()| true),
        [_, "probe"] => merge::work().map(|()| true),
        [_, "merge", ..] => merge::benchmark(&merge::Arguments::parse_from(&words[1..])),
        [_, "daemon", ..] => daemon::benchmark(&daemon::Arguments::parse_from(&words[1..])),
        _ => benchmark(&Arguments::parse()),
    }
}

fn benchmark(arguments: &Arguments) -> Result<bool> {
    let all = Section::value_variants();
    let chosen = |section: &&Section| arguments.sections.is_empty() || arguments.sections.contains(section);
    let sections: Vec<Section> = all.iter().filter(chosen).copied().collect();
    if !arguments.quick && cfg!(debug_assertions) {
        bail!("built without optimisation: use `make bench`, or --quick to see that it works");
    }
    // Children inherit it. Without the permission it stays as it is.
    let nice = rustix::process::nice(-5).or_else(|_| rustix::process::nice(0)).context("cannot tell the priority")?;
    let names = sections.iter().map(|section| section.name().to_owned()).collect();
    let settings = settings::Settings::observe(arguments.quick, names, nice)?;
    let folder = match &arguments.out {
        Some(folder) => folder.clone(),
        None => vacant(&settings.date, &settings.revision),
    };
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let settings = toml::to_string(&settings)?;
    write(&folder, "settings.toml", &settings)?;

    let mut summary = "# Benchmarks\n".to_owned();
    if arguments.quick {
        summary.push_str("\nA quick run: it shows that the benchmarks work, and its figures mean little.\n");
    }
    let mut met = true;
    for section in sections {
        let started = Instant::now();
        let findings = section.measure(Effort { quick: arguments.quick }).with_context(|| section.name().to_owned())?;
        met &= findings.bars.iter().all(|bar| bar.met);
        let text = findings.markdown(section.name(), !arguments.quick);
        println!("{text}");
        eprintln!("{} took {:.0} s\n", section.name(), started.elapsed().as_secs_f64());
        write(&folder, &format!("{}.csv", section.name()), &format!("{}\n", findings.samples.join("\n")))?;
        summary.push('\n');
        summary.push_str(&text);
        write(&folder, "summary.md", &summary)?;
    }
    eprintln!("kept in {}", folder.display());
    Ok(met || arguments.quick)
}

/// A folder for this run that is not there yet.
fn vacant(date: &str, revision: &str) -> PathBuf {
    let runs = Path::new(env!("CARGO_MANIFEST_DIR")).join("runs");
    let numbered = (2..).map(|number| runs.join(format!("{date}-{revision}-{number}")));
    let first = runs.join(format!("{date}-{revision}"));
    std::iter::once(first).chain(numbered).find(|folder| !folder.exists()).expect("numbers do not end")
}

fn write(folder: &Path, name: &str, text: &str) -> Result<()> {
    let path = folder.join(name);
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
}
