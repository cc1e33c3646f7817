//! The census as text for the terminal.

use crate::wire::{CensusReport, GroupReport, MatrixReport, MergeEffectReport};
use comfy_table::{Cell, Color};
use pagefold_base::Bytes;
use pagefold_output::text::{
    TextStyle, colored_cell, cut_end, cut_start, escape_unprintable, format_bar, format_bytes, format_net,
    format_number, format_percent,
};
use pagefold_output::wire::{PageClasses, UnscannedProcessReport};
use std::fmt::Write;

/// Which parts of the report are shown.
#[derive(Clone, Copy, Debug)]
pub struct CensusView {
    /// Maximum number of rows of each table.
    pub max_rows: usize,
    /// Whether regions are shown.
    pub show_regions: bool,
    /// Whether extents are shown.
    pub show_extents: bool,
    /// Advice for processes that could not be scanned for lack of permission.
    pub remedy: &'static str,
}

/// Width of the bars, in columns.
const BAR_COLUMNS: usize = 24;

/// Renders the whole report.
pub fn render(report: &CensusReport, view: CensusView, style: TextStyle) -> String {
    let mut text = String::new();
    let resident = report.bytes.resident;
    let _ = writeln!(
        text,
        "Census of {}: {} of private anonymous memory resident in {} process{}.",
        report.host,
        Bytes(resident),
        report.processes.len(),
        if report.processes.len() == 1 { "" } else { "es" },
    );
    if let Some(sample) = report.sample {
        let _ = writeln!(text, "A sample of {:.3} % of the pages; the classes below count the sample.", sample * 100.0);
    }
    text.push_str(&render_classes(&report.pages, &report.bytes, style));
    if report.estimate.is_some() {
        text.push_str(&render_estimate(report, style));
    } else {
        text.push_str(&render_savings(report, style));
    }
    text.push_str(&render_processes(report, view, style));
    for (title, groups) in [
        ("By virtual machine", &report.vms),
        ("By job", &report.jobs),
        ("By cgroup", &report.cgroups),
        ("By trust domain", &report.domains),
    ] {
        // A table with one row, or with one row for each process, adds nothing.
        if (2..report.processes.len()).contains(&groups.len()) {
            text.push_str(&render_groups(title, groups, view, style));
        }
    }
    text.push_str(&render_matrix(&report.matrix, report.page_size, style));
    text.push_str(&render_contents(report, view, style));
    if view.show_extents {
        text.push_str(&render_extents(report, style));
    }
    if view.show_regions {
        text.push_str(&render_regions(report, style));
    }
    text.push('\n');
    for note in render_notes(report, view).lines() {
        text.push_str(&style.format_paragraph(note, 2));
    }
    text
}

fn render_classes(pages: &PageClasses, memory: &PageClasses, style: TextStyle) -> String {
    let mut table = style.new_table(&["class", ">memory", ">share", ">pages", ""]);
    let rows = [
        ("zero", memory.zero, pages.zero, Color::Cyan),
        ("duplicate within a process", memory.duplicate_within_process, pages.duplicate_within_process, Color::Green),
        (
            "duplicate within a trust domain",
            memory.duplicate_within_domain,
            pages.duplicate_within_domain,
            Color::Green,
        ),
        (
            "duplicate across trust domains",
            memory.duplicate_across_domains,
            pages.duplicate_across_domains,
            Color::Yellow,
        ),
        ("merged already", memory.merged, pages.merged, Color::Blue),
        ("volatile", memory.volatile, pages.volatile, Color::Red),
        ("unique", memory.unique, pages.unique, Color::White),
    ];
    for (name, memory_here, pages_here, color) in rows {
        table.add_row(vec![
            Cell::new(name),
            Cell::new(format_bytes(memory_here)),
            Cell::new(format_percent(memory_here, memory.resident)),
            Cell::new(format_number(pages_here)),
            colored_cell(format_bar(memory_here as f64 / memory.resident.max(1) as f64, BAR_COLUMNS), color),
        ]);
    }
    table.add_row(vec![
        Cell::new("resident"),
        Cell::new(format_bytes(memory.resident)),
        Cell::new(""),
        Cell::new(format_number(pages.resident)),
    ]);
    format!("\n{}", style.render_table(&table))
}

fn render_savings(report: &CensusReport, style: TextStyle) -> String {
    let mut table = style.new_table(&[
        "merging would give back",
        ">gross",
        ">net",
        ">metadata",
        ">pages scanned",
        ">huge pages split",
    ]);
    let savings = &report.savings;
    let guided = format!("KSM, guided: {} ranges", format_number(savings.guided_ranges));
    let rows: [(&str, &MergeEffectReport); 4] = [
        ("at most", &savings.upper_bound),
        ("KSM, whole processes", &savings.whole_processes),
        ("  within trust domains only", &savings.within_domains),
        (&guided, &savings.guided),
    ];
    for (name, effect) in rows {
        table.add_row(vec![
            name.to_owned(),
            format_bytes(effect.gross),
            format_net(effect.net),
            format_bytes(effect.metadata),
            if effect.pages_scanned == 0 { "·".to_owned() } else { format_number(effect.pages_scanned) },
            if effect.huge_pages_split == 0 { "·".to_owned() } else { format_number(effect.huge_pages_split) },
        ]);
    }
    format!("\n{}", style.render_table(&table))
}

fn render_estimate(report: &CensusReport, style: TextStyle) -> String {
    let Some(estimate) = &report.estimate else { return String::new() };
    let mut table = style.new_table(&["all pages, estimated", ">memory", ">from", ">to"]);
    let memory = |pages: f64| Bytes((pages.max(0.0) * report.page_size as f64) as u64).to_string();
    for (name, interval) in [
        ("zero", estimate.zero),
        ("duplicate", estimate.duplicate),
        ("  redundant", estimate.redundant),
        ("merged already", estimate.merged),
        ("volatile", estimate.volatile),
        ("unique", estimate.unique),
    ] {
        table.add_row(vec![name.to_owned(), memory(interval.estimate), memory(interval.low), memory(interval.high)]);
    }
    table.add_row(vec!["resident".to_owned(), memory(estimate.resident as f64), "exact".to_owned(), String::new()]);
    format!("\n{}Intervals hold with {:.0} % confidence.\n", style.render_table(&table), estimate.confidence * 100.0)
}

/// Cells for one row of memory by class, and the bar of its mergeable share: zero and duplicate pages.
fn class_cells(memory: &PageClasses) -> Vec<Cell> {
    let mergeable = (memory.zero + memory.duplicate) as f64 / memory.resident.max(1) as f64;
    vec![
        Cell::new(format_bytes(memory.resident)),
        Cell::new(format_bytes(memory.zero)),
        Cell::new(format_bytes(memory.duplicate)),
        Cell::new(format_bytes(memory.merged)),
        Cell::new(format_bytes(memory.volatile)),
        Cell::new(format_bytes(memory.unique)),
        colored_cell(format_bar(mergeable, BAR_COLUMNS / 2), Color::Green),
    ]
}

const CLASS_HEADINGS: [&str; 7] = [">resident", ">zero", ">duplicate", ">merged", ">volatile", ">unique", "mergeable"];

fn render_processes(report: &CensusReport, view: CensusView, style: TextStyle) -> String {
    let mut headings = vec![">pid", "name", "trust domain"];
    headings.extend(CLASS_HEADINGS);
    let mut table = style.new_table(&headings);
    let mut processes: Vec<_> = report.processes.iter().filter(|process| process.bytes.resident > 0).collect();
    processes.sort_by_key(|process| std::cmp::Reverse(process.bytes.resident));
    for process in processes.iter().take(view.max_rows) {
        let mut row = vec![
            Cell::new(process.process.pid),
            Cell::new(cut_end(&process.process.label(), 24)),
            Cell::new(cut_end(process.process.domain.as_deref().unwrap_or("-"), 24)),
        ];
        row.extend(class_cells(&process.bytes));
        table.add_row(row);
    }
    let mut text = style.format_heading("Processes");
    text.push_str(&style.render_table(&table));
    text.push_str(&render_omitted(processes.len(), view.max_rows, "processes"));
    text
}

/// A line with the number of rows left out; empty if none was.
fn render_omitted(all: usize, shown: usize, what: &str) -> String {
    if all > shown { format!("… and {} more {what} (--top {all} shows all)\n", all - shown) } else { String::new() }
}

fn render_groups(title: &str, groups: &[GroupReport], view: CensusView, style: TextStyle) -> String {
    // The width left by the other columns.
    let name = usize::from(style.width).saturating_sub(86).clamp(12, 60);
    let mut headings = vec!["name", ">processes"];
    headings.extend(CLASS_HEADINGS);
    let mut table = style.new_table(&headings);
    for group in groups.iter().take(view.max_rows) {
        let mut row = vec![Cell::new(cut_start(&group.name, name)), Cell::new(group.processes)];
        row.extend(class_cells(&group.bytes));
        table.add_row(row);
    }
    format!(
        "{}{}{}",
        style.format_heading(title),
        style.render_table(&table),
        render_omitted(groups.len(), view.max_rows, "of these")
    )
}

fn render_matrix(matrix: &MatrixReport, page_size: u64, style: TextStyle) -> String {
    if matrix.parties.len() < 2 {
        return String::new();
    }
    let columns: Vec<String> = (1..=matrix.parties.len()).map(|column| format!(">{column}")).collect();
    let mut headings = vec![">", "shares with"];
    headings.extend(columns.iter().map(String::as_str));
    let mut table = style.new_table(&headings);
    for (i, (party, row)) in matrix.parties.iter().zip(&matrix.pages).enumerate() {
        let mut cells = vec![(i + 1).to_string(), cut_end(party, 24)];
        cells.extend(row.iter().map(|&pages| format_bytes(pages * page_size)));
        table.add_row(cells);
    }
    format!(
        "{}{}",
        style.format_heading("Shared memory (pages of the row whose content the column also has, without zero pages)"),
        style.render_table(&table)
    )
}

fn render_contents(report: &CensusReport, view: CensusView, style: TextStyle) -> String {
    if report.contents.is_empty() {
        return String::new();
    }
    let mut table = style.new_table(&["content", ">memory", ">pages", ">merged", ">processes", ">trust domains"]);
    let count = |value: Option<u32>| value.map_or("-".to_owned(), |value| format_number(u64::from(value)));
    for content in report.contents.iter().take(view.max_rows) {
        let kind = match &content.pattern {
            Some(pattern) => format!("pattern {pattern}"),
            None => content.kind.to_owned(),
        };
        table.add_row(vec![
            kind,
            format_bytes(content.pages * report.page_size),
            format_number(content.pages),
            format_number(content.merged),
            count(content.processes),
            count(content.domains),
        ]);
    }
    format!("{}{}", style.format_heading("Most frequent contents"), style.render_table(&table))
}

fn render_extents(report: &CensusReport, style: TextStyle) -> String {
    let mut table = style.new_table(&[">pid", "range", ">memory", ">zero", ">duplicate", ">redundant", ">density"]);
    for extent in &report.extents {
        table.add_row(vec![
            extent.pid.to_string(),
            format!("{}-{}", extent.start, extent.end),
            format_bytes(extent.pages * report.page_size),
            format_bytes(extent.zero * report.page_size),
            format_bytes(extent.duplicate * report.page_size),
            format_bytes(extent.redundant * report.page_size),
            format!("{:.0} %", extent.density * 100.0),
        ]);
    }
    let title = format!("Largest of {} extents of mergeable pages", format_number(report.extents_total));
    format!("{}{}", style.format_heading(&title), style.render_table(&table))
}

fn render_regions(report: &CensusReport, style: TextStyle) -> String {
    let mut headings = vec![">pid", "range", "name"];
    headings.extend(CLASS_HEADINGS);
    let mut table = style.new_table(&headings);
    for process in &report.processes {
        for region in &process.regions {
            let name = match region.ineligible {
                Some(reason) => format!("{} ({reason}: {})", region.name, Bytes(region.rss)),
                None => region.name.clone(),
            };
            let mut row = vec![
                Cell::new(process.process.pid),
                Cell::new(format!("{}-{}", region.start, region.end)),
                Cell::new(cut_end(name.trim(), 40)),
            ];
            row.extend(class_cells(&region.bytes));
            table.add_row(row);
        }
    }
    format!("{}{}", style.format_heading("Regions"), style.render_table(&table))
}

/// Memory outside the classes, the reliability of the result, and the cost of the census.
fn render_notes(report: &CensusReport, view: CensusView) -> String {
    let mut text = String::new();
    let not_counted = &report.not_counted;
    if !not_counted.ineligible.is_empty() {
        let reasons: Vec<String> =
            not_counted.ineligible.iter().map(|part| format!("{} {}", part.reason, Bytes(part.bytes))).collect();
        let _ = writeln!(text, "Resident but not mergeable by KSM: {}.", reasons.join(", "));
    }
    if not_counted.pinned_bytes > 0 {
        let _ =
            writeln!(text, "Pinned by drivers and not mergeable while pinned: {}.", Bytes(not_counted.pinned_bytes));
    }
    if report.exactness.nodes_unknown {
        text.push_str(
            "merge_across_nodes is 0 and only root can read the pages' NUMA nodes: savings may be too high.\n",
        );
    }
    if not_counted.swapped_bytes > 0 {
        let _ = writeln!(text, "Swapped out and not read: {}.", Bytes(not_counted.swapped_bytes));
    }
    if not_counted.pages_no_longer_resident > 0 {
        let _ = writeln!(
            text,
            "Left memory during the census: {} pages.",
            format_number(not_counted.pages_no_longer_resident)
        );
    }
    if report.partial {
        let what = match not_counted.pages_unread {
            0 => "before volatile pages were identified".to_owned(),
            pages => format!("{} pages were not read", format_number(pages)),
        };
        let _ = writeln!(text, "PARTIAL: stopped early, {what}.");
    } else if not_counted.pages_unread > 0 {
        let _ = writeln!(text, "{} pages could not be read.", format_number(not_counted.pages_unread));
    }
    text.push_str(&unseen(&not_counted.unscanned_processes, view.remedy));
    if report.pass_interval_seconds.is_none() {
        text.push_str(match report.partial {
            false => "One pass: volatile pages were not identified.\n",
            true => "The second pass was not finished: some volatile pages were not identified.\n",
        });
    }
    if report.exactness.unknown_shared_pages > 0 {
        let _ = writeln!(
            text,
            "{} pages are mapped more than once, as after a fork, and were counted as copies; only root can tell.",
            format_number(report.exactness.unknown_shared_pages),
        );
    }
    let _ = writeln!(
        text,
        "Pages are compared by fingerprint: the probability of a collision among {} contents is below {:.0e}.",
        format_number(report.exactness.distinct_contents),
        report.exactness.collision_probability.max(1e-19),
    );
    let pause =
        report.pass_interval_seconds.map(|pause| format!(", {pause} s of it between the passes")).unwrap_or_default();
    let _ = writeln!(
        text,
        "Read {} in {:.2} s{pause}; index {}.",
        Bytes(report.bytes_read),
        report.seconds,
        Bytes(report.cost.index_bytes),
    );
    text
}

/// The processes that were not scanned, by reason, with the remedy.
pub fn unseen(processes: &[UnscannedProcessReport], remedy: &str) -> String {
    let mut text = String::new();
    let denied: Vec<_> = processes.iter().filter(|process| process.reason == "denied").collect();
    if !denied.is_empty() {
        let names: Vec<String> = denied
            .iter()
            .take(5)
            .map(|process| format!("{} ({})", process.pid, escape_unprintable(process.comm.as_deref().unwrap_or("?"))))
            .collect();
        let _ = writeln!(
            text,
            "Not scanned for lack of permission: {} process{}, such as {}. {remedy}",
            denied.len(),
            if denied.len() == 1 { "" } else { "es" },
            escape_unprintable(&names.join(", "))
        );
    }
    for process in processes.iter().filter(|process| process.reason != "denied") {
        let name = escape_unprintable(process.comm.as_deref().unwrap_or("?"));
        let _ = writeln!(text, "Not scanned: {} ({name}): {}.", process.pid, escape_unprintable(&process.detail));
    }
    text
}
