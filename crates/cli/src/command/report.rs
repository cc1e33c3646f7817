//! `pagefold report`: what daemons have kept of hosts over time, as a page, pictures, tables and figures.

use crate::arguments::{Global, duration, parquet_file};
use crate::config::{Config, History};
use crate::{Outcome, output};
use anyhow::{Context, bail};
use clap::Args;
use pagefold_history::Reader;
use pagefold_history::record::Kept;
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
const PAGE: &str = "pagefold-report.html";

/// Arguments of `report`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Options {
    /// Histories, one for each host [default: the daemon's, by the configuration or /var/lib/pagefold/history.db]
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
    /// From when on
    #[arg(long, value_name = "TIME", value_parser = time, conflicts_with = "compare")]
    since: Option<When>,
    /// Until when
    #[arg(long, value_name = "TIME", value_parser = time, conflicts_with = "compare")]
    until: Option<When>,
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
    #[arg(long, value_name = "FILE", value_parser = parquet_file())]
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
enum When {
    /// Seconds since 1970.
    At(f64),
    /// So long before the last sample.
    Ago(Duration),
}

/// A span of time that is said; open where nothing is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Span {
    from: Option<When>,
    to: Option<When>,
}

fn time(text: &str) -> Result<When, String> {
    if let Ok(ago) = duration(text) {
        return Ok(When::Ago(ago));
    }
    let day = text.split_once(['T', ' ']).map_or(text, |(day, _)| day);
    let hour = text.get(day.len() + 1..).map_or("00:00:00", |hour| hour.trim_end_matches('Z'));
    let seconds = if hour.matches(':').count() == 1 { ":00" } else { "" };
    match humantime::parse_rfc3339(&format!("{day}T{hour}{seconds}Z")) {
        Ok(time) => Ok(When::At(time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64())),
        Err(_) => Err("write for example 24h, 7d, 2026-11-20 or 2026-11-20T14:30 (UTC)".to_owned()),
    }
}

fn span(text: &str) -> Option<Result<Span, String>> {
    let (from, to) = text.split_once("..")?;
    let end = |text: &str| if text.is_empty() { Ok(None) } else { time(text).map(Some) };
    Some(end(from).and_then(|from| Ok(Span { from, to: end(to)? })))
}

/// Make the report.
pub fn run(options: &Options, global: &Global) -> anyhow::Result<Outcome> {
    let sides = match &options.compare {
        Some(compare) => compared(compare, options, global)?,
        None => of_files(options, global)?,
    };
    if sides.iter().all(|(_, kept)| kept.samples.is_empty()) {
        eprintln!("pagefold: there is nothing in that time: {}", names(&sides));
        return Ok(Outcome::VerdictNo);
    }
    let report = HistoryReport::of(&sides, options.compare.is_some());
    let written = write(options, &sides, &report)?;
    if options.json {
        output::print(&wire::json(&report))?;
        return Ok(Outcome::Done);
    }
    output::print(&text::render(&report, options.top, output::style(global)))?;
    let written: Vec<String> = written.iter().map(|path| path.display().to_string()).collect();
    if !written.is_empty() {
        output::print(&format!("\nWritten: {}\n", written.join(", ")))?;
    }
    Ok(Outcome::Done)
}

fn names(sides: &[(String, Kept)]) -> String {
    sides.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ")
}

/// A side for each file, by its host's name; by the file too where hosts have the same.
fn of_files(options: &Options, global: &Global) -> anyhow::Result<Vec<(String, Kept)>> {
    let default = [default_file(global)?];
    let files = if options.files.is_empty() { &default[..] } else { &options.files };
    let span = Span { from: options.since, to: options.until };
    let kept = files.iter().map(|file| load(file, span)).collect::<anyhow::Result<Vec<Kept>>>()?;
    let name = |(file, one): (&PathBuf, &Kept)| {
        let alike = kept.iter().filter(|other| other.host == one.host).count();
        if alike > 1 { format!("{} ({})", one.host, file.display()) } else { one.host.clone() }
    };
    let names: Vec<String> = files.iter().zip(&kept).map(name).collect();
    Ok(names.into_iter().zip(kept).collect())
}

/// The two sides that are compared, by what was said.
fn compared(said: &[String], options: &Options, global: &Global) -> anyhow::Result<Vec<(String, Kept)>> {
    if options.files.len() > 1 {
        bail!("--compare takes its files itself: name at most one, of which the spans are");
    }
    let side = |text: &String| {
        let (file, span) = operand(text)?;
        let file = match file.or_else(|| options.files.first().cloned()) {
            Some(file) => file,
            None => default_file(global)?,
        };
        Ok((text.clone(), load(&file, span)?))
    };
    said.iter().map(side).collect()
}

/// What is compared: `FILE`, `SPAN` or `FILE@SPAN`.
fn operand(text: &str) -> anyhow::Result<(Option<PathBuf>, Span)> {
    if Path::new(text).exists() {
        return Ok((Some(text.into()), Span::default()));
    }
    let (file, rest) = match text.rsplit_once('@') {
        Some((file, rest)) => (Some(PathBuf::from(file)), rest),
        None => (None, text),
    };
    match span(rest) {
        Some(Ok(span)) => Ok((file, span)),
        Some(Err(why)) => bail!("{text}: {why}"),
        None => {
            bail!("{text}: there is no such file, and it is no span of time such as 48h..24h or 2026-11-20..2026-11-21")
        }
    }
}

fn default_file(global: &Global) -> anyhow::Result<PathBuf> {
    Ok(match Config::load(global)?.history {
        Some(History::File(file)) => file,
        Some(History::Off) | None => History::FILE.into(),
    })
}

fn load(file: &Path, span: Span) -> anyhow::Result<Kept> {
    let mut reader = Reader::open(file).with_context(|| {
        format!("{}: the daemon keeps one with --history FILE or `history` in the configuration", file.display())
    })?;
    let last = reader.last()?.unwrap_or(0.0);
    let second = |when: When| match when {
        When::At(second) => second,
        When::Ago(ago) => last - ago.as_secs_f64(),
    };
    let (from, to) = (span.from.map_or(f64::NEG_INFINITY, second), span.to.map_or(f64::INFINITY, second));
    if from > to {
        bail!("{}: that span of time ends before it begins", file.display());
    }
    Ok(reader.load(from, to)?)
}

/// Write all files that are asked for, and name them.
fn write(options: &Options, sides: &[(String, Kept)], report: &HistoryReport) -> anyhow::Result<Vec<PathBuf>> {
    let mut written = Vec::new();
    let mut put = |path: &Path, text: &str| {
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
        written.push(path.to_owned());
        Ok::<(), anyhow::Error>(())
    };
    let is_asked = options.svg.is_some() || options.csv.is_some() || options.json || options.parquet.is_some();
    let page = options.output.clone().or_else(|| (!is_asked).then(|| PAGE.into()));
    if let Some(path) = page {
        let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs_f64();
        put(&path, &html::document(report, now))?;
    }
    if let Some(path) = &options.svg {
        let charts = chart::all(report);
        if path.extension().is_some_and(|extension| extension == "svg") {
            put(path, &svg::file(&charts))?;
        } else {
            std::fs::create_dir_all(path).with_context(|| format!("cannot make {}", path.display()))?;
            for one in &charts {
                put(&path.join(format!("{}.svg", one.id)), &svg::file(std::slice::from_ref(one)))?;
            }
        }
    }
    if let Some(path) = &options.csv {
        put(path, &csv::write(sides))?;
    }
    #[cfg(feature = "parquet")]
    if let Some(path) = &options.parquet {
        pagefold_history::parquet::write(sides, path).with_context(|| format!("cannot write {}", path.display()))?;
        written.push(path.clone());
    }
    Ok(written)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_days_moments_or_ago() {
        let at = |text: &str, second: f64| assert_eq!(time(text), Ok(When::At(second)), "{text}");
        at("1970-01-02", 86_400.0);
        at("1970-01-01T01:00", 3600.0);
        at("1970-01-01 01:00:05", 3605.0);
        at("1970-01-01T01:00:05Z", 3605.0);
        assert_eq!(time("90m"), Ok(When::Ago(Duration::from_secs(5400))));
        for wrong in ["", "yesterday", "2026-13-01", "2026-11-20T", "2026-11-20T7", "5", "T", "-1h"] {
            assert!(time(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn spans_have_two_ends_which_may_be_open() {
        let ago = |hours: u64| Some(When::Ago(Duration::from_secs(hours * 3600)));
        assert_eq!(span("48h..24h"), Some(Ok(Span { from: ago(48), to: ago(24) })));
        assert_eq!(span("24h.."), Some(Ok(Span { from: ago(24), to: None })));
        assert_eq!(span(".."), Some(Ok(Span::default())));
        assert_eq!(span("24h"), None);
        assert!(span("24h..soon").unwrap().is_err());
    }

    #[test]
    fn what_is_compared_is_a_file_a_span_or_both() {
        let (file, span) = operand("a/b.db@24h..").unwrap();
        assert_eq!((file, span.to), (Some("a/b.db".into()), None));
        assert_eq!(operand("/dev/null").unwrap(), (Some("/dev/null".into()), Span::default()));
        assert_eq!(operand("2026-11-20..2026-11-21").unwrap().0, None);
        assert!(operand("nothing.db").is_err() && operand("a.db@now").is_err());
    }
}
