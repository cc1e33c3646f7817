//! The report as one HTML document: everything in it, nothing fetched, no script. Each picture has its numbers in a
//! table beside it.

use super::chart::{self, Chart};
use super::figures::Unit;
use super::report::{Difference, HistoryReport, MemberLine, PassLine, Side};
use super::series::Point;
use super::svg::{self, escape, moment, utc};
use std::fmt::Write;

/// Passes that are shown without being asked for.
const SHOWN: usize = 12;

/// Rows of a table that stands for a picture, at most.
const ROWS: usize = 24;

/// The document. `made` is when, in seconds since 1970.
pub fn document(report: &HistoryReport, made: f64) -> String {
    let charts = chart::all(report);
    let names: Vec<String> = report.sides.iter().map(|side| escape(&side.name)).collect();
    let title = format!("Memory over time: {}", names.join(", "));
    let mut body = header(report, &title, made);
    if let Some(differences) = &report.differences {
        body.push_str(&section("differences", "What is different", &differences_table(differences, &names)));
    }
    for chart in &charts {
        body.push_str(&figure(chart, report));
    }
    if report.differences.is_none() {
        body.push_str(&section("figures", "In figures", &figures(&report.sides)));
    }
    for side in &report.sides {
        body.push_str(&details(side, report.sides.len() > 1));
    }
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">\n\
         <title>{title}</title>\n<link rel=\"icon\" href=\"data:,\">\n<style>\n{}{}</style>\n</head>\n<body>\n{body}</main>\n\
         </body>\n</html>\n",
        include_str!("page.css"),
        svg::STYLE
    )
}

fn header(report: &HistoryReport, title: &str, made: f64) -> String {
    let mut text = format!("<header>\n<h1>{title}</h1>\n<p class=\"note\">Made by pagefold on {} UTC.", utc(made));
    for side in &report.sides {
        let host = if side.name == side.host { String::new() } else { format!(" (host {})", escape(&side.host)) };
        let samples = Unit::Count.tell(Some(side.samples as f64));
        let name = escape(&side.name);
        let span = format!("{} to {} UTC, {samples} samples", utc(side.from), utc(side.to));
        let _ = write!(text, "<br><b>{name}</b>{host}: {span}.");
    }
    text.push_str("</p>\n<ul>\n");
    for side in &report.sides {
        let _ = writeln!(text, "<li>{}</li>", escape(&headline(side)));
    }
    text.push_str("</ul>\n</header>\n<main>\n");
    text
}

/// What a side came to, in a sentence; what is not known is left out.
fn headline(side: &Side) -> String {
    let figures = &side.figures;
    let saved = figures.saved_net_mean.zip(figures.saved_net_highest).map(|(mean, most)| {
        let (mean, most) = (Unit::Bytes.tell(Some(mean)), Unit::Bytes.tell(Some(most as f64)));
        format!("{mean} saved on average, {most} at most, net of metadata")
    });
    let cpu = figures.cpu_percent.map(|percent| format!("{} of one CPU for it", Unit::Percent.tell(Some(percent))));
    let converge = figures.converge.map(|converge| {
        let (merges, seconds) = (converge.merges, Unit::Seconds.tell(Some(converge.to_90_median)));
        format!("90 % of what a merge saved was saved {seconds} after its pass began, at the median of {merges}")
    });
    let parts: Vec<String> = [saved, cpu, converge].into_iter().flatten().collect();
    let what = if parts.is_empty() { "nothing is known".to_owned() } else { parts.join("; ") };
    format!("{}: {what}.", side.name)
}

fn section(id: &str, title: &str, body: &str) -> String {
    format!("<section aria-labelledby=\"{id}-title\">\n<h2 id=\"{id}-title\">{title}</h2>\n{body}</section>\n")
}

/// A table. Headings that begin with `>` are of numbers. The first cell of each row is its heading. Cells are markup.
fn table(name: &str, headings: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
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

fn figures(sides: &[Side]) -> String {
    let names: Vec<String> = sides.iter().map(|side| format!(">{}", escape(&side.name))).collect();
    let headings: Vec<&str> = std::iter::once("figure").chain(names.iter().map(String::as_str)).collect();
    let columns: Vec<_> = sides.iter().map(|side| side.figures.rows()).collect();
    let Some(first) = columns.first() else { return String::new() };
    let rows = first.iter().enumerate().map(|(i, (name, unit, _))| {
        let values = columns.iter().map(|column| unit.tell(column[i].2));
        std::iter::once((*name).to_owned()).chain(values).collect()
    });
    table("Figures", &headings, rows)
}

fn differences_table(differences: &[Difference], names: &[String]) -> String {
    let (first, second) = (format!(">{}", names[0]), format!(">{}", names[1]));
    let rows = differences.iter().map(|one| {
        let by = one.by.map_or_else(|| "–".to_owned(), |by| signed(one.unit, by));
        let percent = one.by_percent.map_or_else(String::new, percent);
        vec![one.figure.clone(), one.unit.tell(one.first), one.unit.tell(one.second), by, percent]
    });
    table("Differences", &["figure", &first, &second, ">by", ">in percent"], rows)
}

/// An amount with its sign.
pub(super) fn signed(unit: Unit, by: f64) -> String {
    let text = unit.tell(Some(by.abs()));
    match by {
        // Less than is shown is nothing.
        _ if text == unit.tell(Some(0.0)) => text,
        by if by > 0.0 => format!("+{text}"),
        _ => format!("-{text}"),
    }
}

/// A difference in percent, with its sign.
pub(super) fn percent(by: f64) -> String {
    if by.abs() < 0.05 { "0.0 %".to_owned() } else { format!("{by:+.1} %") }
}

fn figure(chart: &Chart, report: &HistoryReport) -> String {
    let picture = format!("<figure class=\"scroll\">\n{}</figure>\n", svg::within(chart));
    let rows = match chart.id {
        "converge" => return section(chart.id, &chart.title, &(picture + CONVERGE)),
        _ => report.sides.iter().map(|side| points(side, chart)).collect::<String>(),
    };
    let numbers = format!("<details>\n<summary>The same as a table</summary>\n{rows}</details>\n");
    section(chart.id, &chart.title, &(picture + &numbers))
}

/// What is meant by the time that a merge took.
const CONVERGE: &str = "<p class=\"note\">From when the first was seen who came since the merge before, in the two \
minutes before the pass, otherwise from the start of the pass; the census is in it. Followed by the host's savings, \
sampled four times a second while work is under way. The tables of passes below have the numbers.</p>\n";

/// Points of a side at even distances, as a table.
fn points(side: &Side, chart: &Chart) -> String {
    let every = side.points.len().div_ceil(ROWS).max(1);
    let bytes = |value: Option<u64>| Unit::Bytes.tell(value.map(|value| value as f64));
    let row = |point: &Point| {
        let since = if chart.clock == chart::Clock::SinceBeginning { side.from } else { 0.0 };
        let time = moment(chart.clock, point.time - since);
        match chart.id {
            "memory" => {
                let in_use = point.total.zip(point.available).map(|(total, available)| total.saturating_sub(available));
                vec![time, bytes(in_use), bytes(point.available), bytes(point.total)]
            }
            "saved" => {
                vec![time, Unit::Bytes.tell(point.saved_net.map(|net| net as f64)), bytes(point.saved_gross)]
            }
            _ => vec![time, Unit::Percent.tell(point.ksmd_percent), Unit::Percent.tell(point.pagefold_percent)],
        }
    };
    let headings: &[&str] = match chart.id {
        "memory" => &["time", ">in use", ">available", ">in all"],
        "saved" => &["time", ">saved, net", ">saved, gross"],
        _ => &["time", ">ksmd", ">pagefold"],
    };
    table(&escape(&side.name), headings, side.points.iter().rev().step_by(every).rev().map(row))
}

fn details(side: &Side, several: bool) -> String {
    let of = if several { format!(": {}", escape(&side.name)) } else { String::new() };
    let id = |what: &str| {
        format!("{what}-{:x}", side.name.bytes().fold(7_u32, |sum, byte| sum.wrapping_mul(31) ^ u32::from(byte)))
    };
    let mut text = section(&id("passes"), &format!("Passes, predicted against reached{of}"), &passes(side));
    text.push_str(&section(&id("members"), &format!("Largest members by footprint{of}"), &members(side)));
    text.push_str(&section(&id("decisions"), &format!("Decisions{of}"), &decisions(side)));
    text
}

fn passes(side: &Side) -> String {
    if side.passes.is_empty() {
        return "<p class=\"note\">None.</p>\n".to_owned();
    }
    let headings = [
        "ended, UTC",
        ">took",
        ">CPU",
        ">processes",
        ">predicted",
        ">reached",
        ">of it",
        ">waited before",
        ">to 90 %",
        ">to 99 %",
    ];
    let row = |pass: &PassLine| {
        let seconds = |value| Unit::Seconds.tell(value);
        let reached = pass.reached.map(|reached| reached as f64);
        let share = reached.filter(|_| pass.predicted > 0).map(|reached| 100.0 * reached / pass.predicted as f64);
        // A plan is made where something is to be merged alone.
        let predicted = pass.reached.map(|_| pass.predicted as f64);
        vec![
            utc(pass.ended),
            seconds(Some(pass.seconds)),
            seconds(Some(pass.cpu_seconds)),
            Unit::Count.tell(Some(pass.processes as f64)),
            Unit::Bytes.tell(predicted),
            Unit::Bytes.tell(reached),
            share.map_or_else(|| "–".to_owned(), |share| format!("{share:.1} %")),
            seconds(pass.waited_seconds),
            seconds(pass.to_90_seconds),
            seconds(pass.to_99_seconds),
        ]
    };
    let (shown, more) = side.passes.split_at(side.passes.len().min(SHOWN));
    let mut text = table("Latest passes", &headings, shown.iter().map(row));
    if !more.is_empty() {
        let more = table("Passes before", &headings, more.iter().map(row));
        let _ = write!(text, "<details>\n<summary>Passes before</summary>\n{more}</details>\n");
    }
    text + &left_out(side.passes_left_out, "earlier passes")
}

fn left_out(count: u64, what: &str) -> String {
    match count {
        0 => String::new(),
        count => format!("<p class=\"note\">And {} {what}.</p>\n", Unit::Count.tell(Some(count as f64))),
    }
}

fn members(side: &Side) -> String {
    if side.members.is_empty() {
        return "<p class=\"note\">None.</p>\n".to_owned();
    }
    let headings = [
        "member",
        "trust domain",
        ">processes",
        ">footprint, mean",
        ">at most",
        ">resident, mean",
        ">saved, mean",
        "last seen, UTC",
    ];
    let row = |member: &MemberLine| {
        vec![
            escape(&member.label),
            escape(&member.domain),
            Unit::Count.tell(Some(member.processes as f64)),
            Unit::Bytes.tell(member.footprint_mean),
            Unit::Bytes.tell(member.footprint_highest.map(|bytes| bytes as f64)),
            Unit::Bytes.tell(member.resident_mean),
            Unit::Bytes.tell(member.saved_mean),
            utc(member.last),
        ]
    };
    table("Members", &headings, side.members.iter().map(row)) + &left_out(side.members_left_out, "smaller ones")
}

fn decisions(side: &Side) -> String {
    if side.decisions.is_empty() {
        return "<p class=\"note\">None.</p>\n".to_owned();
    }
    let reasons = side.decisions_by_reason.iter();
    let counts: Vec<String> =
        reasons.map(|(reason, count)| format!("{} {count}", escape(&reason.replace('_', " ")))).collect();
    let row = |one: &pagefold_daemon::wire::Decision| {
        let undone = if one.acted || matches!(one.what.as_str(), "leave" | "refuse" | "rest" | "yield") {
            ""
        } else {
            " <i>not carried out</i>"
        };
        let why = format!("{} ({}){undone}", escape(&one.why), escape(&one.reason.replace('_', " ")));
        vec![utc(one.time_ms as f64 / 1e3), escape(&one.what), escape(&one.whom), why]
    };
    let latest = table("Latest decisions", &["time, UTC", "what", "whom", "why"], side.decisions.iter().map(row));
    format!(
        "<p class=\"note\">By reason: {}.</p>\n<details>\n<summary>The latest</summary>\n{latest}</details>\n",
        counts.join(", ")
    )
}
