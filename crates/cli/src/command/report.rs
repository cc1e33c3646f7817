//! `pagefold report`: what daemons have kept of hosts over time, as a page, pictures, tables and figures.

use crate::command_line::{GlobalOptions, parquet_path_parser, parse_duration};
use crate::config::{Config, HistoryLocation};
use crate::{CommandOutcome, output};
use anyhow::{Context, bail};
use clap::Args;
use pagefold_history::HistoryReader;
use pagefold_history::record::HistorySpan;
use pagefold_history::report::HistoryReport;
use pagefold_history::{chart, csv, html, svg, text};
use pagefold_output::wire;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

const EXAMPLES: &str = "\
Examples:
  pagefold report                           pagefold-report.html of this host
  pagefold report --since 24h -o day.html   of the last day
  pagefold report a.db b.db c.db            three hosts side by side
  pagefold report --compare a.db b.db       two, each from its beginning, and what is different
  pagefold report --compare 48h..24h 24h..  the last two days of this host
  pagefold report --compare a.db@2026-11-20..2026-11-21 b.db@2026-11-21..2026-11-22
  pagefold report --svg plots --csv all.csv --json

A span is FROM..TO. Each is a time in UTC (2026-11-20, 2026-11-20T14:30, with seconds), how long it was \
before the last sample (90m, 24h, 7d), or nothing for as far as there is. To take a history along, \
copy the file together with the one beside it that ends in -wal, if there is one.

Exit status: 0 done, 1 nothing was kept in that time, 2 usage or failure.";

/// Where the page goes unless said otherwise.
const DEFAULT_PAGE_FILE: &str = "pagefold-report.html";

/// Arguments of `report`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct ReportArguments {
    /// Histories, one for each host [default: the daemon's, by the configuration or /var/lib/pagefold/history.db]
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
    /// From when on
    #[arg(long, value_name = "TIME", value_parser = parse_time, conflicts_with = "compare")]
    since: Option<TimeArgument>,
    /// Until when
    #[arg(long, value_name = "TIME", value_parser = parse_time, conflicts_with = "compare")]
    until: Option<TimeArgument>,
    /// Put two side by side and tell what is different: files, spans of time of one file, or FILE@SPAN
    #[arg(long, num_args = 2, value_names = ["A", "B"])]
    compare: Option<Vec<String>>,
    /// Write the page to this file [default: pagefold-report.html unless something else is written]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Write the pictures: into one file if its name ends in .svg, otherwise one by one into a folder
    #[arg(long, value_name = "PATH")]
    svg: Option<PathBuf>,
    /// Write every sample as comma-separated values
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Write every sample to a Parquet file, by a build with the feature `parquet`
    #[arg(long, value_name = "FILE", value_parser = parquet_path_parser())]
    parquet: Option<PathBuf>,
    /// Members that are named in the terminal
    #[arg(long, value_name = "N", default_value_t = 12)]
    top: usize,
    /// Print JSON (see `pagefold schema report`)
    #[arg(long)]
    json: bool,
}

/// A time that is said.
#[derive(Clone, Copy, Debug, PartialEq)]
enum TimeArgument {
    /// Seconds since 1970.
    UnixSeconds(f64),
    /// So long before the last sample.
    BeforeLastSample(Duration),
}

/// A span of time that is said; open where nothing is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct TimeSpanArgument {
    from: Option<TimeArgument>,
    to: Option<TimeArgument>,
}

fn parse_time(text: &str) -> Result<TimeArgument, String> {
    if let Ok(ago) = parse_duration(text) {
        return Ok(TimeArgument::BeforeLastSample(ago));
    }
    let day = text.split_once(['T', ' ']).map_or(text, |(day, _)| day);
    let hour = text.get(day.len() + 1..).map_or("00:00:00", |hour| hour.trim_end_matches('Z'));
    let seconds = if hour.matches(':').count() == 1 { ":00" } else { "" };
    match humantime::parse_rfc3339(&format!("{day}T{hour}{seconds}Z")) {
        Ok(time) => {
            Ok(TimeArgument::UnixSeconds(time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()))
        }
        Err(_) => Err("write for example 24h, 7d, 2026-11-20 or 2026-11-20T14:30 (UTC)".to_owned()),
    }
}

fn parse_span(text: &str) -> Option<Result<TimeSpanArgument, String>> {
    let (from, to) = text.split_once("..")?;
    let end = |text: &str| if text.is_empty() { Ok(None) } else { parse_time(text).map(Some) };
    Some(end(from).and_then(|from| Ok(TimeSpanArgument { from, to: end(to)? })))
}

/// Make the report.
pub fn run(options: &ReportArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let sides = match &options.compare {
        Some(compare) => compared_sides(compare, options, global)?,
        None => sides_of_files(options, global)?,
    };
    if sides.iter().all(|(_, kept)| kept.samples.is_empty()) {
        eprintln!("pagefold: there is nothing in that time: {}", join_side_names(&sides));
        return Ok(CommandOutcome::NegativeVerdict);
    }
    let report = HistoryReport::from_spans(&sides, options.compare.is_some());
    let written = write_outputs(options, &sides, &report)?;
    if options.json {
        output::print_stdout(&wire::to_json(&report))?;
        return Ok(CommandOutcome::Done);
    }
    output::print_stdout(&text::render(&report, options.top, output::stdout_style(global)))?;
    let written: Vec<String> = written.iter().map(|path| path.display().to_string()).collect();
    if !written.is_empty() {
        output::print_stdout(&format!("\nWritten: {}\n", written.join(", ")))?;
    }
    Ok(CommandOutcome::Done)
}

fn join_side_names(sides: &[(String, HistorySpan)]) -> String {
    sides.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ")
}

/// A side for each file, by its host's name; by the file too where hosts have the same.
fn sides_of_files(options: &ReportArguments, global: &GlobalOptions) -> anyhow::Result<Vec<(String, HistorySpan)>> {
    let default = [default_history_file(global)?];
    let files = if options.files.is_empty() { &default[..] } else { &options.files };
    let span = TimeSpanArgument { from: options.since, to: options.until };
    let kept = files.iter().map(|file| load_history(file, span)).collect::<anyhow::Result<Vec<HistorySpan>>>()?;
    let name = |(file, one): (&PathBuf, &HistorySpan)| {
        let alike = kept.iter().filter(|other| other.host == one.host).count();
        if alike > 1 { format!("{} ({})", one.host, file.display()) } else { one.host.clone() }
    };
    let names: Vec<String> = files.iter().zip(&kept).map(name).collect();
    Ok(names.into_iter().zip(kept).collect())
}

/// The two sides that are compared, by what was said.
fn compared_sides(
    operands: &[String],
    options: &ReportArguments,
    global: &GlobalOptions,
) -> anyhow::Result<Vec<(String, HistorySpan)>> {
    if options.files.len() > 1 {
        bail!("--compare takes its files itself: name at most one, of which the spans are");
    }
    let side = |text: &String| {
        let (file, span) = parse_operand(text)?;
        let file = match file.or_else(|| options.files.first().cloned()) {
            Some(file) => file,
            None => default_history_file(global)?,
        };
        Ok((text.clone(), load_history(&file, span)?))
    };
    operands.iter().map(side).collect()
}

/// What is compared: `FILE`, `SPAN` or `FILE@SPAN`.
fn parse_operand(text: &str) -> anyhow::Result<(Option<PathBuf>, TimeSpanArgument)> {
    if Path::new(text).exists() {
        return Ok((Some(text.into()), TimeSpanArgument::default()));
    }
    let (file, rest) = match text.rsplit_once('@') {
        Some((file, rest)) => (Some(PathBuf::from(file)), rest),
        None => (None, text),
    };
    match parse_span(rest) {
        Some(Ok(span)) => Ok((file, span)),
        Some(Err(why)) => bail!("{text}: {why}"),
        None => {
            bail!("{text}: there is no such file, and it is no span of time such as 48h..24h or 2026-11-20..2026-11-21")
        }
    }
}

fn default_history_file(global: &GlobalOptions) -> anyhow::Result<PathBuf> {
    Ok(match Config::load(global)?.history {
        Some(HistoryLocation::File(file)) => file,
        Some(HistoryLocation::Off) | None => HistoryLocation::SERVICE_HISTORY_FILE.into(),
    })
}

fn load_history(file: &Path, span: TimeSpanArgument) -> anyhow::Result<HistorySpan> {
    let mut reader = HistoryReader::open(file).with_context(|| {
        format!("{}: the daemon keeps one with --history FILE or `history` in the configuration", file.display())
    })?;
    let last = reader.last_sample_time()?.unwrap_or(0.0);
    let second = |when: TimeArgument| match when {
        TimeArgument::UnixSeconds(second) => second,
        TimeArgument::BeforeLastSample(ago) => last - ago.as_secs_f64(),
    };
    let (from, to) = (span.from.map_or(f64::NEG_INFINITY, second), span.to.map_or(f64::INFINITY, second));
    if from > to {
        bail!("{}: that span of time ends before it begins", file.display());
    }
    Ok(reader.load_span(from, to)?)
}

/// Write all files that are asked for, and name them.
fn write_outputs(
    options: &ReportArguments,
    sides: &[(String, HistorySpan)],
    report: &HistoryReport,
) -> anyhow::Result<Vec<PathBuf>> {
    let mut written = Vec::new();
    let mut put = |path: &Path, text: &str| {
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
        written.push(path.to_owned());
        Ok::<(), anyhow::Error>(())
    };
    let is_asked = options.svg.is_some() || options.csv.is_some() || options.json || options.parquet.is_some();
    let page = options.output.clone().or_else(|| (!is_asked).then(|| DEFAULT_PAGE_FILE.into()));
    if let Some(path) = page {
        let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs_f64();
        put(&path, &html::render_document(report, now))?;
    }
    if let Some(path) = &options.svg {
        let charts = chart::build_charts(report);
        if path.extension().is_some_and(|extension| extension == "svg") {
            put(path, &svg::render_file(&charts))?;
        } else {
            std::fs::create_dir_all(path).with_context(|| format!("cannot make {}", path.display()))?;
            for one in &charts {
                put(&path.join(format!("{}.svg", one.id)), &svg::render_file(std::slice::from_ref(one)))?;
            }
        }
    }
    if let Some(path) = &options.csv {
        put(path, &csv::render_csv(sides))?;
    }
    #[cfg(feature = "parquet")]
    if let Some(path) = &options.parquet {
        pagefold_history::parquet::write_samples(sides, path)
            .with_context(|| format!("cannot write {}", path.display()))?;
        written.push(path.clone());
    }
    Ok(written)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_dates_timestamps_or_relative() {
        let at =
            |text: &str, second: f64| assert_eq!(parse_time(text), Ok(TimeArgument::UnixSeconds(second)), "{text}");
        at("1970-01-02", 86_400.0);
        at("1970-01-01T01:00", 3600.0);
        at("1970-01-01 01:00:05", 3605.0);
        at("1970-01-01T01:00:05Z", 3605.0);
        assert_eq!(parse_time("90m"), Ok(TimeArgument::BeforeLastSample(Duration::from_secs(5400))));
        for wrong in ["", "yesterday", "2026-13-01", "2026-11-20T", "2026-11-20T7", "5", "T", "-1h"] {
            assert!(parse_time(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn time_spans_may_have_open_ends() {
        let ago = |hours: u64| Some(TimeArgument::BeforeLastSample(Duration::from_secs(hours * 3600)));
        assert_eq!(parse_span("48h..24h"), Some(Ok(TimeSpanArgument { from: ago(48), to: ago(24) })));
        assert_eq!(parse_span("24h.."), Some(Ok(TimeSpanArgument { from: ago(24), to: None })));
        assert_eq!(parse_span(".."), Some(Ok(TimeSpanArgument::default())));
        assert_eq!(parse_span("24h"), None);
        assert!(parse_span("24h..soon").unwrap().is_err());
    }

    #[test]
    fn compare_operand_is_file_span_or_both() {
        let (file, span) = parse_operand("a/b.db@24h..").unwrap();
        assert_eq!((file, span.to), (Some("a/b.db".into()), None));
        assert_eq!(parse_operand("/dev/null").unwrap(), (Some("/dev/null".into()), TimeSpanArgument::default()));
        assert_eq!(parse_operand("2026-11-20..2026-11-21").unwrap().0, None);
        assert!(parse_operand("nothing.db").is_err() && parse_operand("a.db@now").is_err());
    }
}
