//! `pagefold census`: count identical pages on a host, without changing anything.

use crate::command_line::{
    DomainRuleArgument, GlobalOptions, MatrixRowsArgument, ProcessOptions, parquet_path_parser, parse_duration,
    parse_probability,
};
use crate::config::Config;
use crate::{CommandOutcome, host_selection, output, progress, stop_signal};
use anyhow::Context;
use clap::Args;
use pagefold_census::text;
use pagefold_census::wire::{CensusContext as ReportContext, CensusReport};
use pagefold_output::wire;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  pagefold census                          all processes that may be read
  pagefold census --name 'qemu-*' --top 20 the 20 largest QEMU processes
  pagefold census --pid 1234 --regions     one process, region by region
  pagefold census --cgroup /machine.slice --json > census.json
  pagefold census --sample 5%              a big host, estimated from a twentieth of its pages

A census changes nothing: it faults no page in, unshares no page and stops no process. \
Ctrl-C ends it and prints the results so far.";

/// Arguments of `census`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct CensusArguments {
    /// Pause between the two passes that detect volatile pages; 0 for one pass
    #[arg(long, value_name = "TIME", default_value = "500ms", value_parser = parse_duration)]
    pass_interval: Duration,
    /// Read each page only with this probability, and estimate the totals
    #[arg(long, value_name = "SHARE", value_parser = parse_probability)]
    sample: Option<f64>,
    /// Seed of the sample [default: from the clock]
    #[arg(long, value_name = "N", requires = "sample")]
    seed: Option<u64>,
    /// Number of reading threads [default: one for each CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Rule that sorts processes into trust domains if they are in no group of the configuration [default: from the
    /// configuration, otherwise user]
    #[arg(long, value_enum, value_name = "RULE")]
    domains: Option<DomainRuleArgument>,
    /// Rows of the sharing matrix
    #[arg(long, value_enum, value_name = "KIND", default_value_t = MatrixRowsArgument::Process)]
    matrix: MatrixRowsArgument,
    /// Rows of each table, and extents in JSON
    #[arg(long, value_name = "N", default_value_t = 12)]
    top: usize,
    /// Also show every region
    #[arg(long)]
    regions: bool,
    /// Also show the largest extents of mergeable pages
    #[arg(long)]
    extents: bool,
    /// Print JSON (see `pagefold schema census`)
    #[arg(long)]
    json: bool,
    /// Write every extent of mergeable pages to a Parquet file; needs a build with the feature `parquet`
    #[arg(long, value_name = "FILE", value_parser = parquet_path_parser())]
    parquet: Option<std::path::PathBuf>,
    #[command(flatten)]
    targets: ProcessOptions,
}

/// Take the census and print it.
pub fn run(options: &CensusArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let host = host_selection::open_host(global)?;
    let stop = stop_signal::stop_on_signal().context("cannot handle signals")?;
    let available_cpus = || std::thread::available_parallelism().map_or(1, Into::into);
    let threads = options.threads.map_or_else(available_cpus, usize::from);
    let census_options = pagefold_census::CensusOptions {
        selection: host_selection::process_selection(&options.targets, global)?,
        domains: Config::load(global)?.domains(options.domains),
        pass_interval: options.pass_interval,
        threads,
        sample_probability: options.sample,
        sample_seed: options.seed.unwrap_or_else(seed_from_clock),
        max_top_contents: options.top,
        max_matrix_rows: options.top,
        matrix_row_kind: options.matrix.into(),
        ..Default::default()
    };
    let (census, _) = progress::run_census_with_progress(host.page_size(), &stop, |progress| {
        pagefold_census::take_census(&*host, &census_options, progress, &stop)
    })?;
    host_selection::check_any_seen(
        &*host,
        !census.subjects.is_empty(),
        &census_options.selection,
        &census.unscanned,
        global,
    )?;
    let context = ReportContext { host: host.describe(), page_size: host.page_size(), max_extents: options.top };
    #[cfg(feature = "parquet")]
    if let Some(path) = &options.parquet {
        pagefold_census::parquet::write_extents(&census, host.page_size(), path)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    let report = CensusReport::from_census(&census, &context);
    if options.json {
        output::print_stdout(&wire::to_json(&report))?;
    } else {
        let view = text::CensusView {
            max_rows: options.top,
            show_regions: options.regions,
            show_extents: options.extents,
            remedy: host_selection::permission_remedy(global),
        };
        output::print_stdout(&text::render(&report, view, output::stdout_style(global)))?;
    }
    Ok(if report.is_incomplete() { CommandOutcome::Partial } else { CommandOutcome::Done })
}

fn seed_from_clock() -> u64 {
    std::time::UNIX_EPOCH.elapsed().map_or(0, |elapsed| elapsed.as_nanos() as u64)
}
