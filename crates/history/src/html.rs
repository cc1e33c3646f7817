//! The report as one self-contained HTML document: it loads nothing and has no script. Each chart has its numbers in a
//! table beside it.

use super::chart::{self, Chart};
use super::figures::FigureUnit;
use super::report::{HistoryReport, PassRow, ProcessRow, SideDifference, SideReport};
use super::series::SeriesPoint;
use super::svg::{self, escape_markup, format_time, format_utc};
use std::fmt::Write;

/// Passes shown without expanding.
const MAX_EXPANDED_PASSES: usize = 12;

/// The maximum number of rows of a chart's table.
const MAX_TABLE_ROWS: usize = 24;

/// Render the document. `created_at` is in seconds since 1970.
pub fn render_document(report: &HistoryReport, created_at: f64) -> String {
    let charts = chart::build_charts(report);
    let names: Vec<String> = report.sides.iter().map(|side| escape_markup(&side.name)).collect();
    let title = format!("Memory over time: {}", names.join(", "));
    let mut body = render_header(report, &title, created_at);
    if let Some(differences) = &report.differences {
        body.push_str(&render_section("differences", "Differences", &render_differences(differences, &names)));
    }
    for chart in &charts {
        body.push_str(&render_chart_section(chart, report));
    }
    if report.differences.is_none() {
        body.push_str(&render_section("figures", "Figures", &render_figures(&report.sides)));
    }
    for side in &report.sides {
        body.push_str(&render_side(side, report.sides.len() > 1));
    }
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">\n\
         <title>{title}</title>\n<link rel=\"icon\" href=\"data:,\">\n<style>\n{}{}</style>\n</head>\n<body>\n{body}</main>\n\
         </body>\n</html>\n",
        include_str!("page.css"),
        svg::CHART_CSS
    )
}

fn render_header(report: &HistoryReport, title: &str, created_at: f64) -> String {
    let mut text =
        format!("<header>\n<h1>{title}</h1>\n<p class=\"note\">Made by pagefold on {} UTC.", format_utc(created_at));
    for side in &report.sides {
        let host =
            if side.name == side.host { String::new() } else { format!(" (host {})", escape_markup(&side.host)) };
        let samples = FigureUnit::Count.format_value(Some(side.samples as f64));
        let name = escape_markup(&side.name);
        let span = format!("{} to {} UTC, {samples} samples", format_utc(side.from), format_utc(side.to));
        let _ = write!(text, "<br><b>{name}</b>{host}: {span}.");
    }
    text.push_str("</p>\n<ul>\n");
    for side in &report.sides {
        let _ = writeln!(text, "<li>{}</li>", escape_markup(&render_headline(side)));
    }
    text.push_str("</ul>\n</header>\n<main>\n");
    text
}

/// The summary sentence of a side; unknown figures are left out.
fn render_headline(side: &SideReport) -> String {
    let figures = &side.figures;
    let saved = figures.saved_net_mean.zip(figures.saved_net_max).map(|(mean, max)| {
        let (mean, max) =
            (FigureUnit::Bytes.format_value(Some(mean)), FigureUnit::Bytes.format_value(Some(max as f64)));
        format!("net savings {mean} mean, {max} maximum")
    });
    let cpu = figures
        .cpu_percent
        .map(|percent| format!("CPU use {} of one CPU", FigureUnit::Percent.format_value(Some(percent))));
    let convergence = figures.convergence.map(|convergence| {
        let (merges, seconds) = (convergence.merges, FigureUnit::Seconds.format_value(Some(convergence.to_90_median)));
        format!("median time to 90 % of a merge's savings {seconds}, over {merges}")
    });
    let parts: Vec<String> = [saved, cpu, convergence].into_iter().flatten().collect();
    let summary = if parts.is_empty() { "no data".to_owned() } else { parts.join("; ") };
    format!("{}: {summary}.", side.name)
}

fn render_section(id: &str, title: &str, body: &str) -> String {
    format!("<section aria-labelledby=\"{id}-title\">\n<h2 id=\"{id}-title\">{title}</h2>\n{body}</section>\n")
}

/// A table. Headings that begin with `>` are of numeric columns. The first cell of each row is its heading. Cells are
/// markup.
fn render_html_table(name: &str, headings: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let class = |i: usize| if headings[i].starts_with('>') { " class=\"n\"" } else { "" };
    let mut text = format!(
        "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{name}\"><table>\n<caption>{name}</caption>\n<thead><tr>"
    );
    for (i, heading) in headings.iter().enumerate() {
        let _ = write!(text, "<th scope=\"col\"{}>{}</th>", class(i), heading.trim_start_matches('>'));
    }
    text.push_str("</tr></thead>\n<tbody>\n");
    for row in rows {
        text.push_str("<tr>");
        for (i, cell) in row.iter().enumerate() {
            let _ = match i {
                0 => write!(text, "<th scope=\"row\">{cell}</th>"),
                _ => write!(text, "<td{}>{cell}</td>", class(i)),
            };
        }
        text.push_str("</tr>\n");
    }
    text.push_str("</tbody>\n</table></div>\n");
    text
}

fn render_figures(sides: &[SideReport]) -> String {
    let names: Vec<String> = sides.iter().map(|side| format!(">{}", escape_markup(&side.name))).collect();
    let headings: Vec<&str> = std::iter::once("figure").chain(names.iter().map(String::as_str)).collect();
    let columns: Vec<_> = sides.iter().map(|side| side.figures.named_values()).collect();
    let Some(first) = columns.first() else { return String::new() };
    let rows = first.iter().enumerate().map(|(i, (name, unit, _))| {
        let values = columns.iter().map(|column| unit.format_value(column[i].2));
        std::iter::once((*name).to_owned()).chain(values).collect()
    });
    render_html_table("Figures", &headings, rows)
}

fn render_differences(differences: &[SideDifference], names: &[String]) -> String {
    let (first, second) = (format!(">{}", names[0]), format!(">{}", names[1]));
    let rows = differences.iter().map(|difference| {
        let change = difference.change.map_or_else(|| "–".to_owned(), |change| format_signed(difference.unit, change));
        let percent = difference.change_percent.map_or_else(String::new, format_signed_percent);
        vec![
            difference.figure.clone(),
            difference.unit.format_value(difference.first),
            difference.unit.format_value(difference.second),
            change,
            percent,
        ]
    });
    render_html_table("Differences", &["figure", &first, &second, ">change", ">in percent"], rows)
}

/// A value with its sign.
pub(super) fn format_signed(unit: FigureUnit, change: f64) -> String {
    let text = unit.format_value(Some(change.abs()));
    match change {
        // A change that would print as zero has no sign.
        _ if text == unit.format_value(Some(0.0)) => text,
        change if change > 0.0 => format!("+{text}"),
        _ => format!("-{text}"),
    }
}

/// A difference in percent, with its sign.
pub(super) fn format_signed_percent(change: f64) -> String {
    if change.abs() < 0.05 { "0.0 %".to_owned() } else { format!("{change:+.1} %") }
}

fn render_chart_section(chart: &Chart, report: &HistoryReport) -> String {
    let picture = format!("<figure class=\"scroll\">\n{}</figure>\n", svg::render_inline(chart));
    let rows = match chart.id {
        "converge" => return render_section(chart.id, &chart.title, &(picture + CONVERGENCE_NOTE)),
        _ => report.sides.iter().map(|side| render_point_table(side, chart)).collect::<String>(),
    };
    let numbers = format!("<details>\n<summary>The same as a table</summary>\n{rows}</details>\n");
    render_section(chart.id, &chart.title, &(picture + &numbers))
}

/// The definition of a merge's duration.
const CONVERGENCE_NOTE: &str = "<p class=\"note\">Starts at the first arrival of a process since the previous merge, at \
most two minutes before the pass, otherwise at the start of the pass, so it includes the census. Measured by the host's \
savings, sampled four times a second during a pass. The tables of passes below have the numbers.</p>\n";

/// Points of a side at equal intervals, as a table.
fn render_point_table(side: &SideReport, chart: &Chart) -> String {
    let step = side.points.len().div_ceil(MAX_TABLE_ROWS).max(1);
    let bytes = |value: Option<u64>| FigureUnit::Bytes.format_value(value.map(|value| value as f64));
    let row = |point: &SeriesPoint| {
        let offset = if chart.clock == chart::ChartClock::SinceBeginning { side.from } else { 0.0 };
        let time = format_time(chart.clock, point.time - offset);
        match chart.id {
            "memory" => {
                let in_use = point.total.zip(point.available).map(|(total, available)| total.saturating_sub(available));
                vec![time, bytes(in_use), bytes(point.available), bytes(point.total)]
            }
            "saved" => {
                vec![
                    time,
                    FigureUnit::Bytes.format_value(point.saved_net.map(|net| net as f64)),
                    bytes(point.saved_gross),
                ]
            }
            _ => vec![
                time,
                FigureUnit::Percent.format_value(point.ksmd_percent),
                FigureUnit::Percent.format_value(point.pagefold_percent),
            ],
        }
    };
    let headings: &[&str] = match chart.id {
        "memory" => &["time", ">in use", ">available", ">total"],
        "saved" => &["time", ">net savings", ">gross savings"],
        _ => &["time", ">ksmd", ">pagefold"],
    };
    render_html_table(&escape_markup(&side.name), headings, side.points.iter().rev().step_by(step).rev().map(row))
}

fn render_side(side: &SideReport, several: bool) -> String {
    let suffix = if several { format!(": {}", escape_markup(&side.name)) } else { String::new() };
    let id = |prefix: &str| {
        format!("{prefix}-{:x}", side.name.bytes().fold(7_u32, |sum, byte| sum.wrapping_mul(31) ^ u32::from(byte)))
    };
    let mut text =
        render_section(&id("passes"), &format!("Passes, predicted and measured savings{suffix}"), &render_passes(side));
    text.push_str(&render_section(
        &id("members"),
        &format!("Largest processes by footprint{suffix}"),
        &render_processes(side),
    ));
    text.push_str(&render_section(&id("decisions"), &format!("Decisions{suffix}"), &render_decisions(side)));
    text
}

fn render_passes(side: &SideReport) -> String {
    if side.passes.is_empty() {
        return "<p class=\"note\">None.</p>\n".to_owned();
    }
    let headings = [
        "ended, UTC",
        ">duration",
        ">CPU time",
        ">processes",
        ">predicted",
        ">measured",
        ">measured of predicted",
        ">wait before",
        ">time to 90 %",
        ">time to 99 %",
    ];
    let row = |pass: &PassRow| {
        let seconds = |value| FigureUnit::Seconds.format_value(value);
        let measured = pass.measured.map(|measured| measured as f64);
        let share = measured.filter(|_| pass.predicted > 0).map(|measured| 100.0 * measured / pass.predicted as f64);
        // Only passes with a merge have a plan.
        let predicted = pass.measured.map(|_| pass.predicted as f64);
        vec![
            format_utc(pass.ended_at),
            seconds(Some(pass.seconds)),
            seconds(Some(pass.cpu_seconds)),
            FigureUnit::Count.format_value(Some(pass.processes as f64)),
            FigureUnit::Bytes.format_value(predicted),
            FigureUnit::Bytes.format_value(measured),
            share.map_or_else(|| "–".to_owned(), |share| format!("{share:.1} %")),
            seconds(pass.arrival_wait_seconds),
            seconds(pass.seconds_to_90),
            seconds(pass.seconds_to_99),
        ]
    };
    let (expanded, collapsed) = side.passes.split_at(side.passes.len().min(MAX_EXPANDED_PASSES));
    let mut text = render_html_table("Latest passes", &headings, expanded.iter().map(row));
    if !collapsed.is_empty() {
        let more = render_html_table("Passes before", &headings, collapsed.iter().map(row));
        let _ = write!(text, "<details>\n<summary>Passes before</summary>\n{more}</details>\n");
    }
    text + &render_omitted(side.passes_omitted, "earlier passes")
}

fn render_omitted(count: u64, rows: &str) -> String {
    match count {
        0 => String::new(),
        count => format!("<p class=\"note\">And {} {rows}.</p>\n", FigureUnit::Count.format_value(Some(count as f64))),
    }
}

fn render_processes(side: &SideReport) -> String {
    if side.processes.is_empty() {
        return "<p class=\"note\">None.</p>\n".to_owned();
    }
    let headings = [
        "name",
        "trust domain",
        ">processes",
        ">footprint, mean",
        ">maximum",
        ">resident, mean",
        ">saved, mean",
        "last seen, UTC",
    ];
    let cells = |row: &ProcessRow| {
        vec![
            escape_markup(&row.label),
            escape_markup(&row.domain),
            FigureUnit::Count.format_value(Some(row.processes as f64)),
            FigureUnit::Bytes.format_value(row.footprint_mean),
            FigureUnit::Bytes.format_value(row.footprint_max.map(|bytes| bytes as f64)),
            FigureUnit::Bytes.format_value(row.resident_mean),
            FigureUnit::Bytes.format_value(row.saved_mean),
            format_utc(row.last_time),
        ]
    };
    render_html_table("Processes", &headings, side.processes.iter().map(cells))
        + &render_omitted(side.processes_omitted, "smaller processes")
}

fn render_decisions(side: &SideReport) -> String {
    if side.decisions.is_empty() {
        return "<p class=\"note\">None.</p>\n".to_owned();
    }
    let reasons = side.decisions_by_reason.iter();
    let counts: Vec<String> =
        reasons.map(|(reason, count)| format!("{} {count}", escape_markup(&reason.replace('_', " ")))).collect();
    let row = |decision: &pagefold_daemon::wire::DecisionReport| {
        let suffix = if decision.carried_out || matches!(decision.kind.as_str(), "skip" | "refuse" | "idle" | "yield") {
            ""
        } else {
            " <i>not carried out</i>"
        };
        let why = format!(
            "{} ({}){suffix}",
            escape_markup(&decision.explanation),
            escape_markup(&decision.reason.replace('_', " "))
        );
        vec![
            format_utc(decision.time_ms as f64 / 1e3),
            escape_markup(&decision.kind),
            escape_markup(&decision.subject),
            why,
        ]
    };
    let latest = render_html_table(
        "Latest decisions",
        &["time, UTC", "decision", "target", "why"],
        side.decisions.iter().map(row),
    );
    format!(
        "<p class=\"note\">By reason: {}.</p>\n<details>\n<summary>Latest decisions</summary>\n{latest}</details>\n",
        counts.join(", ")
    )
}
