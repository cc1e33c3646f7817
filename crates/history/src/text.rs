//! The report for the terminal: the figures, side by side.

use super::figures::Unit;
use super::html::{percent, signed};
use super::report::{HistoryReport, Side};
use super::svg::utc;
use pagefold_output::text::{Style, cut, printable};

/// What it came to, with so many members at most.
pub fn render(report: &HistoryReport, top: usize, style: Style) -> String {
    let mut text = String::new();
    for side in &report.sides {
        let host = if side.name == side.host { String::new() } else { format!(" (host {})", printable(&side.host)) };
        let samples = Unit::Count.tell(Some(side.samples as f64));
        let line =
            format!("{}{host}: {} to {} UTC, {samples} samples.", printable(&side.name), utc(side.from), utc(side.to));
        text.push_str(&style.paragraph(&line, 2));
    }
    text.push('\n');
    match &report.differences {
        Some(_) => text.push_str(&differences(report, style)),
        None => text.push_str(&figures(&report.sides, style)),
    }
    for side in report.sides.iter().filter(|side| !side.members.is_empty()) {
        let of = if report.sides.len() > 1 { format!(": {}", printable(&side.name)) } else { String::new() };
        text.push_str(&style.heading(&format!("Largest members by footprint{of}")));
        text.push_str(&members(side, top, style));
    }
    text
}

fn figures(sides: &[Side], style: Style) -> String {
    let names: Vec<String> = sides.iter().map(|side| format!(">{}", cut(&side.name, 30))).collect();
    let headings: Vec<&str> = std::iter::once("figure").chain(names.iter().map(String::as_str)).collect();
    let mut table = style.table(&headings);
    let columns: Vec<_> = sides.iter().map(|side| side.figures.rows()).collect();
    for (i, (name, unit, _)) in columns.first().into_iter().flatten().enumerate() {
        let values = columns.iter().map(|column| unit.tell(column[i].2));
        table.add_row(std::iter::once((*name).to_owned()).chain(values));
    }
    style.render(&table)
}

fn differences(report: &HistoryReport, style: Style) -> String {
    let names: Vec<String> = report.sides.iter().map(|side| format!(">{}", cut(&side.name, 40))).collect();
    let mut table = style.table(&["figure", &names[0], &names[1], ">by", ">in percent"]);
    for one in report.differences.iter().flatten() {
        let by = one.by.map_or_else(|| "–".to_owned(), |by| signed(one.unit, by));
        let percent = one.by_percent.map_or_else(String::new, percent);
        table.add_row([one.figure.clone(), one.unit.tell(one.first), one.unit.tell(one.second), by, percent]);
    }
    style.render(&table)
}

fn members(side: &Side, top: usize, style: Style) -> String {
    let mut table =
        style.table(&["member", "trust domain", ">processes", ">footprint, mean", ">at most", ">saved, mean"]);
    for member in side.members.iter().take(top) {
        table.add_row([
            cut(&member.label, 30),
            cut(&member.domain, 24),
            Unit::Count.tell(Some(member.processes as f64)),
            Unit::Bytes.tell(member.footprint_mean),
            Unit::Bytes.tell(member.footprint_highest.map(|bytes| bytes as f64)),
            Unit::Bytes.tell(member.saved_mean),
        ]);
    }
    let left = side.members.len().saturating_sub(top) as u64 + side.members_left_out;
    let more = if left > 0 { format!("and {left} more\n") } else { String::new() };
    style.render(&table) + &more
}
