//! The census for people.

use crate::wire::{CensusReport, GroupReport, MatrixReport, ReachReport};
use comfy_table::{Cell, Color};
use pagefold_base::Bytes;
use pagefold_output::text::{Style, bar, bytes, coloured, cut, cut_front, net, number, percent, printable};
use pagefold_output::wire::{Classes, NotSeen};
use std::fmt::Write;

/// Which parts are shown.
#[derive(Clone, Copy, Debug)]
pub struct View {
    /// Rows of each table.
    pub top: usize,
    /// Whether regions are shown.
    pub regions: bool,
    /// Whether extents are shown.
    pub extents: bool,
    /// What to do about processes that could not be seen for lack of permission.
    pub remedy: &'static str,
}

/// Columns of the bars.
const BAR: usize = 24;

/// The whole report.
pub fn render(report: &CensusReport, view: View, style: Style) -> String {
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
    text.push_str(&classes(&report.pages, &report.bytes, style));
    if report.estimate.is_some() {
        text.push_str(&estimate(report, style));
    } else {
        text.push_str(&savings(report, style));
    }
    text.push_str(&processes(report, view, style));
    for (title, groups) in [
        ("By virtual machine", &report.vms),
        ("By job", &report.jobs),
        ("By cgroup", &report.cgroups),
        ("By trust domain", &report.domains),
    ] {
        // A table of one row, or of one row for each process, says nothing new.
        if (2..report.processes.len()).contains(&groups.len()) {
            text.push_str(&group_table(title, groups, view, style));
        }
    }
    text.push_str(&matrix(&report.matrix, report.page_size, style));
    text.push_str(&contents(report, view, style));
    if view.extents {
        text.push_str(&extents(report, style));
    }
    if view.regions {
        text.push_str(&regions(report, style));
    }
    text.push('\n');
    for note in notes(report, view).lines() {
        text.push_str(&style.paragraph(note, 2));
    }
    text
}

fn classes(pages: &Classes, memory: &Classes, style: Style) -> String {
    let mut table = style.table(&["class", ">memory", ">share", ">pages", ""]);
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
    for (name, memory_here, pages_here, colour) in rows {
        table.add_row(vec![
            Cell::new(name),
            Cell::new(bytes(memory_here)),
            Cell::new(percent(memory_here, memory.resident)),
            Cell::new(number(pages_here)),
            coloured(bar(memory_here as f64 / memory.resident.max(1) as f64, BAR), colour),
        ]);
    }
    table.add_row(vec![
        Cell::new("resident"),
        Cell::new(bytes(memory.resident)),
        Cell::new(""),
        Cell::new(number(pages.resident)),
    ]);
    format!("\n{}", style.render(&table))
}

fn savings(report: &CensusReport, style: Style) -> String {
    let mut table =
        style.table(&["merging would give back", ">gross", ">net", ">metadata", ">pages scanned", ">huge pages split"]);
    let savings = &report.savings;
    let guided = format!("KSM, guided: {} ranges", number(savings.guided_ranges));
    let rows: [(&str, &ReachReport); 4] = [
        ("at most", &savings.upper_bound),
        ("KSM, whole processes", &savings.whole),
        ("  within trust domains only", &savings.within_domains),
        (&guided, &savings.guided),
    ];
    for (name, reach) in rows {
        table.add_row(vec![
            name.to_owned(),
            bytes(reach.gross),
            net(reach.net),
            bytes(reach.metadata),
            if reach.pages_scanned == 0 { "·".to_owned() } else { number(reach.pages_scanned) },
            if reach.huge_pages_split == 0 { "·".to_owned() } else { number(reach.huge_pages_split) },
        ]);
    }
    format!("\n{}", style.render(&table))
}

fn estimate(report: &CensusReport, style: Style) -> String {
    let Some(estimate) = &report.estimate else { return String::new() };
    let mut table = style.table(&["of the whole, estimated", ">memory", ">from", ">to"]);
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
    format!("\n{}Intervals hold with {:.0} % confidence.\n", style.render(&table), estimate.confidence * 100.0)
}

/// Cells for one row of memory by class, and the bar of its mergeable share: zero and duplicate.
fn class_cells(memory: &Classes) -> Vec<Cell> {
    let mergeable = (memory.zero + memory.duplicate) as f64 / memory.resident.max(1) as f64;
    vec![
        Cell::new(bytes(memory.resident)),
        Cell::new(bytes(memory.zero)),
        Cell::new(bytes(memory.duplicate)),
        Cell::new(bytes(memory.merged)),
        Cell::new(bytes(memory.volatile)),
        Cell::new(bytes(memory.unique)),
        coloured(bar(mergeable, BAR / 2), Color::Green),
    ]
}

const CLASS_HEADINGS: [&str; 7] = [">resident", ">zero", ">duplicate", ">merged", ">volatile", ">unique", "mergeable"];

fn processes(report: &CensusReport, view: View, style: Style) -> String {
    let mut headings = vec![">pid", "name", "trust domain"];
    headings.extend(CLASS_HEADINGS);
    let mut table = style.table(&headings);
    let mut processes: Vec<_> = report.processes.iter().filter(|process| process.bytes.resident > 0).collect();
    processes.sort_by_key(|process| std::cmp::Reverse(process.bytes.resident));
    for process in processes.iter().take(view.top) {
        let mut row = vec![
            Cell::new(process.who.pid),
            Cell::new(cut(&process.who.label(), 24)),
            Cell::new(cut(process.who.domain.as_deref().unwrap_or("-"), 24)),
        ];
        row.extend(class_cells(&process.bytes));
        table.add_row(row);
    }
    let mut text = style.heading("Processes");
    text.push_str(&style.render(&table));
    text.push_str(&more(processes.len(), view.top, "processes"));
    text
}

/// A line that says how much was left out.
fn more(all: usize, shown: usize, what: &str) -> String {
    if all > shown { format!("… and {} more {what} (--top {all} shows all)\n", all - shown) } else { String::new() }
}

fn group_table(title: &str, groups: &[GroupReport], view: View, style: Style) -> String {
    // What the other columns leave.
    let name = usize::from(style.width).saturating_sub(86).clamp(12, 60);
    let mut headings = vec!["name", ">processes"];
    headings.extend(CLASS_HEADINGS);
    let mut table = style.table(&headings);
    for group in groups.iter().take(view.top) {
        let mut row = vec![Cell::new(cut_front(&group.name, name)), Cell::new(group.processes)];
        row.extend(class_cells(&group.bytes));
        table.add_row(row);
    }
    format!("{}{}{}", style.heading(title), style.render(&table), more(groups.len(), view.top, "of these"))
}

fn matrix(matrix: &MatrixReport, page_size: u64, style: Style) -> String {
    if matrix.parties.len() < 2 {
        return String::new();
    }
    let columns: Vec<String> = (1..=matrix.parties.len()).map(|column| format!(">{column}")).collect();
    let mut headings = vec![">", "shares with"];
    headings.extend(columns.iter().map(String::as_str));
    let mut table = style.table(&headings);
    for (i, (party, row)) in matrix.parties.iter().zip(&matrix.pages).enumerate() {
        let mut cells = vec![(i + 1).to_string(), cut(party, 24)];
        cells.extend(row.iter().map(|&pages| bytes(pages * page_size)));
        table.add_row(cells);
    }
    format!(
        "{}{}",
        style.heading("Who shares with whom (pages of the row whose content the column has too, zeros apart)"),
        style.render(&table)
    )
}

fn contents(report: &CensusReport, view: View, style: Style) -> String {
    if report.contents.is_empty() {
        return String::new();
    }
    let mut table = style.table(&["content", ">memory", ">pages", ">merged", ">processes", ">trust domains"]);
    let count = |value: Option<u32>| value.map_or("-".to_owned(), |value| number(u64::from(value)));
    for content in report.contents.iter().take(view.top) {
        let kind = match &content.pattern {
            Some(pattern) => format!("pattern {pattern}"),
            None => content.kind.to_owned(),
        };
        table.add_row(vec![
            kind,
            bytes(content.pages * report.page_size),
            number(content.pages),
            number(content.merged),
            count(content.processes),
            count(content.domains),
        ]);
    }
    format!("{}{}", style.heading("Most frequent contents"), style.render(&table))
}

fn extents(report: &CensusReport, style: Style) -> String {
    let mut table = style.table(&[">pid", "range", ">memory", ">zero", ">duplicate", ">redundant", ">density"]);
    for extent in &report.extents {
        table.add_row(vec![
            extent.pid.to_string(),
            format!("{}-{}", extent.start, extent.end),
            bytes(extent.pages * report.page_size),
            bytes(extent.zero * report.page_size),
            bytes(extent.duplicate * report.page_size),
            bytes(extent.redundant * report.page_size),
            format!("{:.0} %", extent.density * 100.0),
        ]);
    }
    let title = format!("Largest of {} extents of mergeable pages", number(report.extents_total));
    format!("{}{}", style.heading(&title), style.render(&table))
}

fn regions(report: &CensusReport, style: Style) -> String {
    let mut headings = vec![">pid", "range", "name"];
    headings.extend(CLASS_HEADINGS);
    let mut table = style.table(&headings);
    for process in &report.processes {
        for region in &process.regions {
            let name = match region.ineligible {
                Some(reason) => format!("{} ({reason}: {})", region.name, Bytes(region.rss)),
                None => region.name.clone(),
            };
            let mut row = vec![
                Cell::new(process.who.pid),
                Cell::new(format!("{}-{}", region.start, region.end)),
                Cell::new(cut(name.trim(), 40)),
            ];
            row.extend(class_cells(&region.bytes));
            table.add_row(row);
        }
    }
    format!("{}{}", style.heading("Regions"), style.render(&table))
}

/// What is not among the classes, how sure the result is, what it took.
fn notes(report: &CensusReport, view: View) -> String {
    let mut text = String::new();
    let not_counted = &report.not_counted;
    if !not_counted.ineligible.is_empty() {
        let reasons: Vec<String> =
            not_counted.ineligible.iter().map(|part| format!("{} {}", part.reason, Bytes(part.bytes))).collect();
        let _ = writeln!(text, "Resident and not for KSM: {}.", reasons.join(", "));
    }
    if not_counted.pinned_bytes > 0 {
        let _ = writeln!(
            text,
            "Pinned by drivers, so not mergeable now whatever its class: {}.",
            Bytes(not_counted.pinned_bytes)
        );
    }
    if report.exactness.nodes_unknown {
        text.push_str(
            "merge_across_nodes is 0 and the pages' nodes are not known without root: savings may be too high.\n",
        );
    }
    if not_counted.swapped_bytes > 0 {
        let _ = writeln!(text, "Swapped out and not touched: {}.", Bytes(not_counted.swapped_bytes));
    }
    if not_counted.pages_gone > 0 {
        let _ = writeln!(text, "Left memory meanwhile: {} pages.", number(not_counted.pages_gone));
    }
    if report.partial {
        let what = match not_counted.pages_unread {
            0 => "before what changes was told apart".to_owned(),
            pages => format!("{} pages were not read", number(pages)),
        };
        let _ = writeln!(text, "PARTIAL: stopped early, {what}.");
    } else if not_counted.pages_unread > 0 {
        let _ = writeln!(text, "{} pages could not be read.", number(not_counted.pages_unread));
    }
    text.push_str(&unseen(&not_counted.processes, view.remedy));
    if report.settle_seconds.is_none() {
        text.push_str(match report.partial {
            false => "One pass: what changes was not told apart.\n",
            true => "The second pass was not finished: what changes was not told apart everywhere.\n",
        });
    }
    if report.exactness.pages_indistinct > 0 {
        let _ = writeln!(
            text,
            "{} pages are mapped more than once, as after a fork, and were taken for copies: only root may tell.",
            number(report.exactness.pages_indistinct),
        );
    }
    let _ = writeln!(
        text,
        "Equal means equal fingerprints: among {} contents any two share one with probability below {:.0e}.",
        number(report.exactness.distinct_contents),
        report.exactness.collision_probability.max(1e-19),
    );
    let pause = report.settle_seconds.map(|pause| format!(", {pause} s of it between the passes")).unwrap_or_default();
    let _ = writeln!(
        text,
        "Read {} in {:.2} s{pause}; index {}.",
        Bytes(report.bytes_read),
        report.seconds,
        Bytes(report.cost.index_bytes),
    );
    text
}

/// Who was not seen, by reason, with the remedy.
pub fn unseen(processes: &[NotSeen], remedy: &str) -> String {
    let mut text = String::new();
    let denied: Vec<_> = processes.iter().filter(|process| process.reason == "denied").collect();
    if !denied.is_empty() {
        let names: Vec<String> = denied
            .iter()
            .take(5)
            .map(|process| format!("{} ({})", process.pid, printable(process.comm.as_deref().unwrap_or("?"))))
            .collect();
        let _ = writeln!(
            text,
            "Not seen for lack of permission: {} process{}, such as {}. {remedy}",
            denied.len(),
            if denied.len() == 1 { "" } else { "es" },
            printable(&names.join(", "))
        );
    }
    for process in processes.iter().filter(|process| process.reason != "denied") {
        let name = printable(process.comm.as_deref().unwrap_or("?"));
        let _ = writeln!(text, "Not seen: {} ({name}): {}.", process.pid, printable(&process.detail));
    }
    text
}
