//! The account as text for the terminal.

use crate::wire::{
    AccountReport, CounterComparisonReport, FootprintReport, GroupAccount, ProcessAccount, ReconciliationReport,
};
use comfy_table::{Cell, CellAlignment, Color};
use pagefold_base::Bytes;
use pagefold_census::text::unseen;
use pagefold_output::text::{
    TextStyle, ZEROS_IN_SPLIT_HUGE_PAGES, colored_cell, cut_end, escape_unprintable, format_bar, format_bytes,
    format_net, format_number, format_split_zeros,
};
use std::fmt::Write;

/// Columns of the share bar.
const BAR_COLUMNS: usize = 12;

/// Renders the whole report. Tables have at most `max_rows` rows. Columns that do not fit are left out by priority.
pub fn render(report: &AccountReport, max_rows: usize, remedy: &str, style: TextStyle) -> String {
    let mut text = style.format_paragraph(&render_title(report), 0);
    text.push_str(&render_account_table(report, max_rows, style));
    if let Some(reconciliation) = &report.reconciliation {
        text.push_str(&render_reconciliation(reconciliation, report.page_size, style));
    }
    text.push_str(&render_notes(report, remedy, style));
    text
}

fn render_title(report: &AccountReport) -> String {
    let total = &report.total;
    if report.processes.is_empty() {
        return format!("Account of {}: no process could be read.", report.host);
    }
    let estimated = report.estimated_count();
    let exactness = match estimated {
        0 => "All frames were read.".to_owned(),
        _ if estimated == report.processes.len() => "All figures are estimates.".to_owned(),
        _ => format!("{estimated} of them estimated."),
    };
    let saved = match total.profit {
        Some(profit) => {
            let split_zeros = format_split_zeros(total.split_zero_pages.unwrap_or(0) * report.page_size);
            format!("merging saves them {} net{split_zeros}", format_net(profit))
        }
        None => "the savings by merging are unknown".to_owned(),
    };
    let engine_savings = match total.engine_saved {
        Some(saved) if saved > 0 => format!("; the user-space engine saves them {}", Bytes(saved)),
        _ => String::new(),
    };
    format!(
        "Account of {}: {} {} {}, by RSS {}; {saved}{engine_savings}. {exactness}",
        report.host,
        format_process_count(report.processes.len() as u64),
        if report.processes.len() == 1 { "costs" } else { "cost" },
        Bytes(total.fair_share),
        Bytes(total.rss),
    )
}

fn format_process_count(count: u64) -> String {
    format!("{} process{}", format_number(count), if count == 1 { "" } else { "es" })
}

/// A row of the table.
struct AccountRow<'a> {
    /// The process number, or the number of processes in the sum.
    number: u64,
    name: String,
    footprint: &'a FootprintReport,
}

impl<'a> AccountRow<'a> {
    fn new((number, name): (u64, String), footprint: &'a FootprintReport) -> Self {
        Self { number, name, footprint }
    }
}

/// A column of figures.
struct AccountColumn {
    heading: &'static str,
    /// Columns with a low priority are left out first.
    priority: u8,
    /// If all cells have one of these values, the column is left out.
    empty_values: &'static [&'static str],
    cell: fn(&FootprintReport, u64) -> String,
}

const ACCOUNT_COLUMNS: [AccountColumn; 12] = [
    AccountColumn { heading: "RSS", priority: 7, empty_values: &[], cell: |footprint, _| format_bytes(footprint.rss) },
    AccountColumn {
        heading: "PSS",
        priority: 3,
        empty_values: &[],
        cell: |footprint, _| format_optional_bytes(footprint.pss),
    },
    AccountColumn {
        heading: "private",
        priority: 4,
        empty_values: &[],
        cell: |footprint, _| format_bytes(footprint.private),
    },
    AccountColumn {
        heading: "KSM",
        priority: 5,
        empty_values: &[],
        cell: |footprint, page_bytes| format_bytes(footprint.ksm_pages * page_bytes),
    },
    AccountColumn {
        heading: "KSM zero",
        priority: 1,
        empty_values: &["·"],
        cell: |footprint, page_bytes| format_optional_bytes(footprint.ksm_zero_pages.map(|pages| pages * page_bytes)),
    },
    AccountColumn {
        heading: "split zero",
        priority: 1,
        empty_values: &["·", "?"],
        cell: |footprint, page_bytes| format_optional_bytes(footprint.split_zero_pages.map(|pages| pages * page_bytes)),
    },
    AccountColumn {
        heading: "fair share",
        priority: 9,
        empty_values: &[],
        cell: |footprint, _| mark_estimate(footprint, format_bytes(footprint.fair_share)),
    },
    AccountColumn {
        heading: "unmerged",
        priority: 6,
        empty_values: &[],
        cell: |footprint, _| mark_estimate(footprint, format_optional_bytes(footprint.fair_share_unmerged)),
    },
    AccountColumn {
        heading: "saved, net",
        priority: 8,
        empty_values: &[],
        cell: |footprint, _| mark_estimate(footprint, format_optional_net(footprint.profit)),
    },
    AccountColumn {
        heading: "engine",
        priority: 8,
        empty_values: &["·", "?"],
        cell: |footprint, page_bytes| format_optional_bytes(footprint.engine_pages.map(|pages| pages * page_bytes)),
    },
    AccountColumn {
        heading: "engine saves",
        priority: 8,
        empty_values: &["·", "?"],
        cell: |footprint, _| format_optional_bytes(footprint.engine_saved),
    },
    AccountColumn {
        heading: "swap",
        priority: 2,
        empty_values: &["·"],
        cell: |footprint, _| format_optional_bytes(footprint.swap),
    },
];

fn format_optional_bytes(figure: Option<u64>) -> String {
    figure.map_or_else(|| "?".to_owned(), format_bytes)
}

fn format_optional_net(figure: Option<i64>) -> String {
    match figure {
        None => "?".to_owned(),
        Some(0) => "·".to_owned(),
        Some(figure) => format_net(figure),
    }
}

/// Marks an estimated figure; zero and unknown are not marked.
fn mark_estimate(footprint: &FootprintReport, figure: String) -> String {
    let is_unmarked = footprint.estimate_reason.is_none() || figure == "·" || figure == "?";
    if is_unmarked { figure } else { format!("~{figure}") }
}

fn render_account_table(report: &AccountReport, max_rows: usize, style: TextStyle) -> String {
    let by_process = report.by == "process";
    let rows: Vec<AccountRow<'_>> = if by_process {
        let heading = |process: &'_ ProcessAccount| (u64::from(process.process.pid), process.process.label());
        report.processes.iter().map(|process| AccountRow::new(heading(process), &process.footprint)).collect()
    } else {
        let heading = |group: &'_ GroupAccount| (group.processes, group.name.clone());
        report.groups.iter().map(|group| AccountRow::new(heading(group), &group.footprint)).collect()
    };
    if rows.is_empty() {
        return String::new();
    }
    let mut shown: Vec<&AccountRow<'_>> = rows.iter().take(max_rows).collect();
    let total = AccountRow::new((report.processes.len() as u64, "total".to_owned()), &report.total);
    shown.push(&total);

    let width = usize::from(style.width);
    let max_name_width = (width / 4).clamp(14, 40);
    let number_label = if by_process { "pid" } else { "processes" };
    let names: Vec<String> = shown.iter().map(|row| shorten_name(&row.name, max_name_width)).collect();
    let fixed_widths = [number_label.len().max(6), names.iter().map(|name| name.chars().count()).max().unwrap_or(0)];
    let (columns, left_out, with_bar) = choose_columns(&shown, report.page_size, width, &fixed_widths);

    let count_heading = format!(">{number_label}");
    let headings: Vec<String> = columns.iter().map(|column| format!(">{}", column.heading)).collect();
    let mut all_headings = vec![if by_process { count_heading.as_str() } else { "name" }];
    all_headings.push(if by_process { "name" } else { count_heading.as_str() });
    all_headings.extend(headings.iter().map(String::as_str));
    if with_bar {
        all_headings.push("share");
    }
    let mut table = style.new_table(&all_headings);
    for (i, (row, name)) in shown.iter().zip(names).enumerate() {
        let is_total = i + 1 == shown.len();
        let number = if is_total && by_process { String::new() } else { row.number.to_string() };
        let number = Cell::new(number).set_alignment(CellAlignment::Right);
        let name = Cell::new(if is_total && by_process { format!("total of {}", row.number) } else { name });
        let mut cells = if by_process { vec![number, name] } else { vec![name, number] };
        cells.extend(columns.iter().map(|column| Cell::new((column.cell)(row.footprint, report.page_size))));
        if with_bar && !is_total {
            let share = row.footprint.fair_share as f64 / report.total.fair_share.max(1) as f64;
            cells.push(colored_cell(format_bar(share, BAR_COLUMNS), Color::Green));
        }
        table.add_row(cells);
    }
    let mut text = format!("\n{}", style.render_table(&table));
    if rows.len() > max_rows {
        let _ = writeln!(text, "… and {} more (--top {} shows all)", rows.len() - max_rows, rows.len());
    }
    if !left_out.is_empty() {
        let _ = writeln!(text, "Columns that do not fit: {} (--json has all).", left_out.join(", "));
    }
    text
}

/// Shortens a name. For a path the end is kept, because it is more specific.
fn shorten_name(name: &str, max_width: usize) -> String {
    let name = &escape_unprintable(name);
    let length = name.chars().count();
    if length > max_width && name.starts_with('/') {
        return ['…'].into_iter().chain(name.chars().skip(length + 1 - max_width)).collect();
    }
    cut_end(name, max_width)
}

/// The columns that fit, the headings of those that do not, and whether the bar fits. Columns that are empty in all
/// rows are left out.
fn choose_columns(
    rows: &[&AccountRow<'_>],
    page_bytes: u64,
    width: usize,
    fixed_widths: &[usize],
) -> (Vec<&'static AccountColumn>, Vec<&'static str>, bool) {
    const COLUMN_GAP: usize = 2;
    let is_empty = |column: &AccountColumn| {
        rows.iter().all(|row| column.empty_values.contains(&(column.cell)(row.footprint, page_bytes).as_str()))
    };
    let column_width = |column: &AccountColumn| {
        let cells = rows.iter().map(|row| (column.cell)(row.footprint, page_bytes).chars().count());
        cells.chain([column.heading.len()]).max().unwrap_or(0) + COLUMN_GAP
    };
    let mut columns: Vec<&AccountColumn> = ACCOUNT_COLUMNS.iter().filter(|column| !is_empty(column)).collect();
    let mut left_out = Vec::new();
    loop {
        let needed_width: usize = fixed_widths.iter().map(|width| width + COLUMN_GAP).sum::<usize>()
            + columns.iter().map(|column| column_width(column)).sum::<usize>();
        let lowest_priority = columns.iter().enumerate().min_by_key(|(_, column)| column.priority).map(|(i, _)| i);
        match lowest_priority {
            Some(column) if needed_width > width => left_out.push(columns.remove(column).heading),
            _ => return (columns, left_out, needed_width + BAR_COLUMNS + COLUMN_GAP <= width),
        }
    }
}

fn render_reconciliation(reconciliation: &ReconciliationReport, page_bytes: u64, style: TextStyle) -> String {
    let mut text = style.format_heading("The fair shares of all processes against the frames in use");
    if reconciliation.processes == 0 {
        text.push_str("There is nothing to compare: no frame could be read. Run as root.\n");
        return text;
    }
    let balance = &reconciliation.balance;
    let mut table = style.new_table(&["", ">bytes", ">"]);
    let signed = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    let fair_label = format!("fair shares of {}", format_process_count(reconciliation.processes));
    let rows = [
        (fair_label.as_str(), signed(balance.fair), true),
        ("+ shares of mappers that were not read", signed(balance.unseen), false),
        ("+ shares of processes that ended meanwhile", signed(balance.partially_read), false),
        ("- mappings read beyond the kernel's count", -signed(balance.excess), false),
        ("+ mappings that changed meanwhile", balance.changed_mappings, false),
        ("= frames in use, each once", signed(balance.frames), true),
    ];
    for (label, value, always_shown) in rows {
        if always_shown || value != 0 {
            table.add_row(vec![label.to_owned(), format_grouped(value), format_net(value)]);
        }
    }
    text.push_str(&style.render_table(&table));
    text.push_str(&style.format_paragraph(
        if balance.exact {
            "They add up exactly, in integers."
        } else {
            "They do not add up to the last page, because processes changed while they were read; run it again on a \
             quieter host."
        },
        0,
    ));

    text.push_str(&style.format_heading("The account against the kernel's counters"));
    text.push_str(&render_comparisons(&reconciliation.comparisons, style));
    text.push_str(&style.format_heading("Why they differ"));
    for line in reconciliation.comparisons.iter().filter(|line| !line.explanation.starts_with("agrees")) {
        let meaningless = line.account == 0 && line.kernel.is_none();
        if !meaningless {
            text.push_str(
                &style.format_paragraph(&format!("{}: {}.", line.counter_or_figure_name(), line.explanation), 2),
            );
        }
    }
    let _ = writeln!(text, "A page is {}.", Bytes(page_bytes));
    text
}

/// The figures of the account and the kernel. If both names do not fit, only the kernel's is shown.
fn render_comparisons(lines: &[CounterComparisonReport], style: TextStyle) -> String {
    let cells = |line: &CounterComparisonReport| {
        let difference = match line.difference {
            Some(0) => "·".to_owned(),
            Some(value) if value > 0 => format!("+{}", format_figure(line, Some(value))),
            value => format_figure(line, value),
        };
        let figures = [format_figure(line, Some(line.account)), format_figure(line, line.kernel), difference];
        [vec![line.figure.to_owned()], figures.to_vec(), vec![line.source.to_owned()]].concat()
    };
    let headings = ["what", ">account", ">kernel", ">difference", "the kernel's counter"];
    let rows: Vec<Vec<String>> = lines.iter().map(cells).collect();
    let total_width: usize = (0..headings.len())
        .map(|i| rows.iter().map(|row| row[i].chars().count()).chain([headings[i].len()]).max().unwrap_or(0) + 2)
        .sum();
    let both_names_fit = total_width <= usize::from(style.width);
    let mut table = style.new_table(if both_names_fit { &headings } else { &headings[..4] });
    for (mut row, line) in rows.into_iter().zip(lines) {
        if !both_names_fit {
            row.truncate(4);
            row[0] = line.counter_or_figure_name().to_owned();
        }
        table.add_row(row);
    }
    style.render_table(&table)
}

impl CounterComparisonReport {
    /// The name of a line in its explanation: the kernel's name, if there is one.
    fn counter_or_figure_name(&self) -> &'static str {
        if self.source == "no counter" { self.figure } else { self.source }
    }
}

/// A figure in the unit of its line: a number of pages, or bytes with a unit.
fn format_figure(line: &CounterComparisonReport, value: Option<i64>) -> String {
    match value {
        None => "-".to_owned(),
        Some(value) if line.unit == "pages" => format_grouped(value),
        Some(0) => "0 B".to_owned(),
        Some(value) => format_net(value),
    }
}

fn format_grouped(value: i64) -> String {
    format!("{}{}", if value < 0 { "-" } else { "" }, format_number(value.unsigned_abs()))
}

/// Which figures are estimated and why, and which processes were not read.
fn render_notes(report: &AccountReport, remedy: &str, style: TextStyle) -> String {
    let mut text = String::new();
    if let Some(why) = report.processes.iter().find_map(|process| process.footprint.estimate_reason.as_ref()) {
        text.push_str(&style.format_paragraph(
            &format!(
                "~ marks estimates ({} of {} processes): the frames could not be read ({why}), so the fair share \
                 is Pss, and the savings by KSM are the host's mean for each merged page. {}",
                report.estimated_count(),
                report.processes.len(),
                if why == "permission denied" { "Run as root for exact figures." } else { "" },
            ),
            0,
        ));
    }
    if report.total.split_zero_pages.is_none() && report.processes.iter().any(|process| process.footprint.ksm_pages > 0)
    {
        text.push_str(&style.format_paragraph(
            &format!(
                "The figures lack {ZEROS_IN_SPLIT_HUGE_PAGES}, which KSM does not count: the records of the merges \
                 cannot be read. They are available on a live host, to root, with the --state directory of the merge."
            ),
            0,
        ));
    }
    text.push_str(&unseen(&report.unscanned_processes, remedy));
    if let Some(reconciliation) = &report.reconciliation {
        let other_unscanned = reconciliation
            .unscanned_processes
            .iter()
            .filter(|process| !report.unscanned_processes.contains(process))
            .cloned()
            .collect::<Vec<_>>();
        text.push_str(&unseen(&other_unscanned, remedy));
        if reconciliation.estimated_processes > 0 && reconciliation.processes > 0 {
            let _ = writeln!(
                text,
                "Not in the balance and not in the comparison: {} with estimated figures.",
                format_process_count(reconciliation.estimated_processes)
            );
        }
    }
    if text.is_empty() { text } else { format!("\n{text}") }
}
