//! `pagefold census`: what the memory of a host holds twice, before anything is changed.

use crate::arguments::{DomainBy, Global, MatrixBy, Targets, duration, parquet_file, probability};
use crate::config::Config;
use crate::{Outcome, output, progress, source};
use anyhow::Context;
use clap::Args;
use pagefold_census::text;
use pagefold_census::wire::{CensusReport, Context as ReportContext};
use pagefold_output::wire;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  pagefold census                          everything that may be read
  pagefold census --name 'qemu-*' --top 20 the 20 largest QEMU processes
  pagefold census --pid 1234 --regions     one process, region by region
  pagefold census --cgroup /machine.slice --json > census.json
  pagefold census --sample 5%              a big host, estimated from a twentieth of its pages

Nothing is changed: no page is faulted in, no sharing is broken, no process is stopped. \
Ctrl-C prints what was seen so far.";

/// Arguments of `census`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Options {
    /// Pause between the two passes that tell volatile pages; 0 for one pass
    #[arg(long, value_name = "TIME", default_value = "500ms", value_parser = duration)]
    settle: Duration,
    /// Look at each page with this probability only, and estimate the whole
    #[arg(long, value_name = "SHARE", value_parser = probability)]
    sample: Option<f64>,
    /// Seed of the sample [default: by the clock]
    #[arg(long, value_name = "N", requires = "sample")]
    seed: Option<u64>,
    /// Threads that read [default: one for each CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// How processes that are in no group of the configuration are sorted into trust domains [default: as the
    /// configuration says, otherwise user]
    #[arg(long, value_enum, value_name = "RULE")]
    domains: Option<DomainBy>,
    /// Who the rows of the sharing matrix are
    #[arg(long, value_enum, value_name = "WHO", default_value_t = MatrixBy::Process)]
    matrix: MatrixBy,
    /// Rows of each table, and extents in JSON
    #[arg(long, value_name = "N", default_value_t = 12)]
    top: usize,
    /// Show every region too
    #[arg(long)]
    regions: bool,
    /// Show the largest extents of mergeable pages too
    #[arg(long)]
    extents: bool,
    /// Print JSON (see `pagefold schema census`)
    #[arg(long)]
    json: bool,
    /// Write every extent of mergeable pages to a Parquet file, by a build with the feature `parquet`
    #[arg(long, value_name = "FILE", value_parser = parquet_file())]
    parquet: Option<std::path::PathBuf>,
    #[command(flatten)]
    targets: Targets,
}

/// Take the census and print it.
pub fn run(options: &Options, global: &Global) -> anyhow::Result<Outcome> {
    let host = source::open(global)?;
    let stop = progress::stop_on_signal().context("cannot handle signals")?;
    let available = || std::thread::available_parallelism().map_or(1, Into::into);
    let threads = options.threads.map_or_else(available, usize::from);
    let census_options = pagefold_census::Options {
        selection: source::selection(&options.targets, global)?,
        domains: Config::load(global)?.domains(options.domains),
        settle: options.settle,
        threads,
        sample: options.sample,
        seed: options.seed.unwrap_or_else(by_the_clock),
        top: options.top,
        rows: options.top,
        matrix: options.matrix.into(),
        ..Default::default()
    };
    let (census, _) = progress::show(host.page_size(), &stop, |progress| {
        pagefold_census::take(&*host, &census_options, progress, &stop)
    })?;
    source::seen(!census.subjects.is_empty(), &census_options.selection, &census.unseen, global)?;
    let context = ReportContext { host: host.describe(), page_size: host.page_size(), top: options.top };
    #[cfg(feature = "parquet")]
    if let Some(path) = &options.parquet {
        pagefold_census::parquet::write(&census, host.page_size(), path)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    let report = CensusReport::of(&census, &context);
    if options.json {
        output::print(&wire::json(&report))?;
    } else {
        let view = text::View {
            top: options.top,
            regions: options.regions,
            extents: options.extents,
            remedy: source::remedy(global),
        };
        output::print(&text::render(&report, view, output::style(global)))?;
    }
    Ok(if report.is_incomplete() { Outcome::Partial } else { Outcome::Done })
}

fn by_the_clock() -> u64 {
    std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos() as u64)
}
