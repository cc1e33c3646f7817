//! The report for the terminal: the figures, side by side.

use super::figures::FigureUnit;
use super::html::{format_signed, format_signed_percent};
use super::report::{HistoryReport, SideReport};
use super::svg::format_utc;
use pagefold_output::text::{TextStyle, cut_end, escape_unprintable};

/// Render the report with at most `max_rows` tracked processes.
pub fn render(report: &HistoryReport, max_rows: usize, style: TextStyle) -> String {
    let mut text = String::new();
    for side in &report.sides {
        let host =
            if side.name == side.host { String::new() } else { format!(" (host {})", escape_unprintable(&side.host)) };
        let samples = FigureUnit::Count.format_value(Some(side.samples as f64));
        let line = format!(
            "{}{host}: {} to {} UTC, {samples} samples.",
            escape_unprintable(&side.name),
            format_utc(side.from),
            format_utc(side.to)
        );
        text.push_str(&style.format_paragraph(&line, 2));
    }
    text.push('\n');
    match &report.differences {
        Some(_) => text.push_str(&render_differences(report, style)),
        None => text.push_str(&render_figures(&report.sides, style)),
    }
    for side in report.sides.iter().filter(|side| !side.processes.is_empty()) {
        let suffix =
            if report.sides.len() > 1 { format!(": {}", escape_unprintable(&side.name)) } else { String::new() };
        text.push_str(&style.format_heading(&format!("Largest processes by footprint{suffix}")));
        text.push_str(&render_processes(side, max_rows, style));
    }
    text
}

fn render_figures(sides: &[SideReport], style: TextStyle) -> String {
    let names: Vec<String> = sides.iter().map(|side| format!(">{}", cut_end(&side.name, 30))).collect();
    let headings: Vec<&str> = std::iter::once("figure").chain(names.iter().map(String::as_str)).collect();
    let mut table = style.new_table(&headings);
    let columns: Vec<_> = sides.iter().map(|side| side.figures.named_values()).collect();
    for (i, (name, unit, _)) in columns.first().into_iter().flatten().enumerate() {
        let values = columns.iter().map(|column| unit.format_value(column[i].2));
        table.add_row(std::iter::once((*name).to_owned()).chain(values));
    }
    style.render_table(&table)
}

fn render_differences(report: &HistoryReport, style: TextStyle) -> String {
    let names: Vec<String> = report.sides.iter().map(|side| format!(">{}", cut_end(&side.name, 40))).collect();
    let mut table = style.new_table(&["figure", &names[0], &names[1], ">change", ">in percent"]);
    for difference in report.differences.iter().flatten() {
        let change = difference.change.map_or_else(|| "–".to_owned(), |change| format_signed(difference.unit, change));
        let percent = difference.change_percent.map_or_else(String::new, format_signed_percent);
        table.add_row([
            difference.figure.clone(),
            difference.unit.format_value(difference.first),
            difference.unit.format_value(difference.second),
            change,
            percent,
        ]);
    }
    style.render_table(&table)
}

fn render_processes(side: &SideReport, max_rows: usize, style: TextStyle) -> String {
    let mut table =
        style.new_table(&["name", "trust domain", ">processes", ">footprint, mean", ">maximum", ">saved, mean"]);
    for row in side.processes.iter().take(max_rows) {
        table.add_row([
            cut_end(&row.label, 30),
            cut_end(&row.domain, 24),
            FigureUnit::Count.format_value(Some(row.processes as f64)),
            FigureUnit::Bytes.format_value(row.footprint_mean),
            FigureUnit::Bytes.format_value(row.footprint_max.map(|bytes| bytes as f64)),
            FigureUnit::Bytes.format_value(row.saved_mean),
        ]);
    }
    let omitted = side.processes.len().saturating_sub(max_rows) as u64 + side.processes_omitted;
    let omitted_line = if omitted > 0 { format!("and {omitted} more\n") } else { String::new() };
    style.render_table(&table) + &omitted_line
}
