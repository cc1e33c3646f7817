//! `pagefold report`: the histories that daemons recorded, as an HTML page, charts, tables and figures.

use crate::command_line::{GlobalOptions, parquet_path_parser, parse_duration};
use crate::config::{Config, HistoryLocation};
use crate::{CommandOutcome, output};
use anyhow::{Context, bail};
use clap::Args;
use pagefold_history::HistoryReader;
use pagefold_history::record::HistorySpan;
use pagefold_history::report::HistoryReport;
use pagefold_history::{html, text};
use pagefold_output::wire;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

const EXAMPLES: &str = "\
Examples:
  pagefold report                           pagefold-report.html of this host
  pagefold report --since 24h -o day.html   the last day only
  pagefold report a.db b.db c.db            three hosts side by side
  pagefold report --compare a.db b.db       two histories, each from its start, and their differences
  pagefold report --compare 48h..24h 24h..  the last two days of this host
  pagefold report --compare a.db@2026-11-20..2026-11-21 b.db@2026-11-21..2026-11-22
  pagefold report --json                    every figure, for scripts

A span is FROM..TO. Each end is a time in UTC (2026-11-20, 2026-11-20T14:30, with seconds), a duration \
before the last sample (90m, 24h, 7d), or empty for an open end. To copy a history to another host, \
copy the file together with the -wal file of the same name, if there is one.

Exit status: 0 done, 1 the history has no samples in that span, 2 usage error or failure.";

/// The default file of the page.
const DEFAULT_PAGE_FILE: &str = "pagefold-report.html";

/// Arguments of `report`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct ReportArguments {
    /// History files, one for each host [default: the daemon's, from the configuration, otherwise
    /// /var/lib/pagefold/history.db]
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Start of the span
    #[arg(long, value_name = "TIME", value_parser = parse_time, conflicts_with = "compare")]
    since: Option<TimeArgument>,
    /// End of the span
    #[arg(long, value_name = "TIME", value_parser = parse_time, conflicts_with = "compare")]
    until: Option<TimeArgument>,
    /// Compare two histories and show the differences: files, spans of one file, or FILE@SPAN
    #[arg(long, num_args = 2, value_names = ["A", "B"])]
    compare: Option<Vec<String>>,
    /// Write the page to this file [default: pagefold-report.html, unless another output option is given]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Write every sample to a Parquet file; needs a build with the feature `parquet`
    #[arg(long, value_name = "FILE", value_parser = parquet_path_parser())]
    parquet: Option<PathBuf>,
    /// Number of processes in the terminal output
    #[arg(long, value_name = "N", default_value_t = 12)]
    top: usize,
    /// Print JSON (see `pagefold schema report`)
    #[arg(long)]
    json: bool,
}

/// A time argument.
#[derive(Clone, Copy, Debug, PartialEq)]
enum TimeArgument {
    /// Seconds since 1970.
    UnixSeconds(f64),
    /// This long before the last sample.
    BeforeLastSample(Duration),
}

/// A span argument; `None` is an open end.
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
    let time_of_day = text.get(day.len() + 1..).map_or("00:00:00", |time_of_day| time_of_day.trim_end_matches('Z'));
    let seconds = if time_of_day.matches(':').count() == 1 { ":00" } else { "" };
    match humantime::parse_rfc3339(&format!("{day}T{time_of_day}{seconds}Z")) {
        Ok(time) => {
            Ok(TimeArgument::UnixSeconds(time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()))
        }
        Err(_) => Err("expected for example 24h, 7d, 2026-11-20 or 2026-11-20T14:30 (UTC)".to_owned()),
    }
}

fn parse_span(text: &str) -> Option<Result<TimeSpanArgument, String>> {
    let (from, to) = text.split_once("..")?;
    let parse_end = |text: &str| if text.is_empty() { Ok(None) } else { parse_time(text).map(Some) };
    Some(parse_end(from).and_then(|from| Ok(TimeSpanArgument { from, to: parse_end(to)? })))
}

/// Write the report.
pub fn run(options: &ReportArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let sides = match &options.compare {
        Some(compare) => compared_sides(compare, options, global)?,
        None => sides_of_files(options, global)?,
    };
    if sides.iter().all(|(_, history)| history.samples.is_empty()) {
        eprintln!("pagefold: the history has no samples in that span: {}", join_side_names(&sides));
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

/// One side for each file, named by its host, and also by its file if several hosts have the same name.
fn sides_of_files(options: &ReportArguments, global: &GlobalOptions) -> anyhow::Result<Vec<(String, HistorySpan)>> {
    let default = [default_history_file(global)?];
    let files = if options.files.is_empty() { &default[..] } else { &options.files };
    let span = TimeSpanArgument { from: options.since, to: options.until };
    let histories = files.iter().map(|file| load_history(file, span)).collect::<anyhow::Result<Vec<HistorySpan>>>()?;
    let name = |(file, history): (&PathBuf, &HistorySpan)| {
        let same_name_count = histories.iter().filter(|other| other.host == history.host).count();
        if same_name_count > 1 { format!("{} ({})", history.host, file.display()) } else { history.host.clone() }
    };
    let names: Vec<String> = files.iter().zip(&histories).map(name).collect();
    Ok(names.into_iter().zip(histories).collect())
}

/// The two sides of `--compare`.
fn compared_sides(
    operands: &[String],
    options: &ReportArguments,
    global: &GlobalOptions,
) -> anyhow::Result<Vec<(String, HistorySpan)>> {
    if options.files.len() > 1 {
        bail!("--compare takes its own files: besides it, give at most one FILE, which its spans refer to");
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

/// Parse an operand of `--compare`: `FILE`, `SPAN` or `FILE@SPAN`.
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
            bail!("{text}: no such file, and not a span such as 48h..24h or 2026-11-20..2026-11-21")
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
        format!(
            "cannot read the history {}: the daemon records one with --history FILE or `history` in the configuration",
            file.display()
        )
    })?;
    let last = reader.last_sample_time()?.unwrap_or(0.0);
    let to_seconds = |time: TimeArgument| match time {
        TimeArgument::UnixSeconds(seconds) => seconds,
        TimeArgument::BeforeLastSample(ago) => last - ago.as_secs_f64(),
    };
    let (from, to) = (span.from.map_or(f64::NEG_INFINITY, to_seconds), span.to.map_or(f64::INFINITY, to_seconds));
    if from > to {
        bail!("{}: the span ends before it begins", file.display());
    }
    Ok(reader.load_span(from, to)?)
}

/// Write all requested files, and return their names.
fn write_outputs(
    options: &ReportArguments,
    #[cfg_attr(not(feature = "parquet"), expect(unused_variables, reason = "only Parquet files hold all samples"))]
    sides: &[(String, HistorySpan)],
    report: &HistoryReport,
) -> anyhow::Result<Vec<PathBuf>> {
    let mut written = Vec::new();
    let mut write_file = |path: &Path, text: &str| {
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
        written.push(path.to_owned());
        Ok::<(), anyhow::Error>(())
    };
    let has_other_output = options.json || options.parquet.is_some();
    let page_path = options.output.clone().or_else(|| (!has_other_output).then(|| DEFAULT_PAGE_FILE.into()));
    if let Some(path) = page_path {
        let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs_f64();
        write_file(&path, &html::render_document(report, now))?;
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
