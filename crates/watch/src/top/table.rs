//! The tables of `pagefold top`: cells, and the details of the selected row.

use pagefold_base::Bytes;
use pagefold_daemon::text::format_footprint;
use pagefold_daemon::wire::{StatusReport, TrackedProcessReport, TrackingState, WorkloadKind};
use pagefold_doctor::wire::VerdictName;
use pagefold_output::text::{escape_unprintable, format_bar, format_bytes, format_number};
use std::cmp::{Ordering, Reverse};

/// The highlighting of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowMark {
    Plain,
    Dim,
    Good,
    Warn,
    Bad,
}

#[derive(Debug)]
pub struct TableColumn {
    pub title: String,
    pub width: u16,
    /// Whether the column is right-aligned, for numbers.
    pub right_aligned: bool,
}

#[derive(Debug)]
pub struct TableRow {
    pub cells: Vec<TableCell>,
    pub mark: RowMark,
    /// Details shown when the row is selected, in lines.
    pub detail: String,
}

#[derive(Debug)]
pub struct TableCell {
    pub text: String,
    /// The heat map level, from 0 to 1.
    pub heat_level: f64,
}

impl<T: Into<String>> From<T> for TableCell {
    fn from(text: T) -> Self {
        Self { text: text.into(), heat_level: 0.0 }
    }
}

#[derive(Debug)]
pub struct DataTable {
    pub columns: Vec<TableColumn>,
    pub rows: Vec<TableRow>,
    /// The text shown if there are no rows.
    pub empty_text: &'static str,
}

impl DataTable {
    fn new(columns: &[(&str, u16, bool)], empty_text: &'static str) -> Self {
        let columns = columns.iter().map(|&(title, width, right_aligned)| TableColumn {
            title: title.to_owned(),
            width,
            right_aligned,
        });
        Self { columns: columns.collect(), rows: Vec::new(), empty_text }
    }

    fn add_row(&mut self, cells: impl IntoIterator<Item = TableCell>, mark: RowMark, detail: String) {
        self.rows.push(TableRow { cells: cells.into_iter().collect(), mark, detail });
    }

    /// Keep the rows that contain a text, ignoring case.
    pub fn filter_rows(&mut self, search_text: &str) {
        let needle = search_text.to_lowercase();
        let matches = |text: &str| text.to_lowercase().contains(&needle);
        self.rows.retain(|row| matches(&row.detail) || row.cells.iter().any(|cell| matches(&cell.text)));
    }

    /// Remove the last columns that do not fit the width.
    pub fn fit_columns(&mut self, width: u16) {
        let mut used = 0;
        let fitting = self.columns.iter().take_while(|column| {
            used += column.width + 1;
            used <= width + 1
        });
        let count = fitting.count().max(1);
        self.columns.truncate(count);
        for row in &mut self.rows {
            row.cells.truncate(count);
        }
    }
}

/// The sort order of processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SortOrder {
    /// The index of the column in [`SORT_COLUMNS`].
    column: usize,
    /// Whether the largest value, or the last name, comes first.
    pub descending: bool,
}

impl Default for SortOrder {
    fn default() -> Self {
        Self { column: 1, descending: true }
    }
}

/// The sort columns in selection order, and whether each is descending at first.
const SORT_COLUMNS: [(&str, bool); 6] =
    [("Process", false), ("Footprint", true), ("Saved", true), ("Resident", true), ("Kind", false), ("Domain", false)];

impl SortOrder {
    /// Select the next column.
    pub fn select_next_column(&mut self) {
        self.column = (self.column + 1) % SORT_COLUMNS.len();
        self.descending = SORT_COLUMNS[self.column].1;
    }

    /// The name of the column.
    pub fn column_name(self) -> &'static str {
        SORT_COLUMNS[self.column].0
    }

    fn compare(self, a: &TrackedProcessReport, b: &TrackedProcessReport) -> Ordering {
        // Unknown values come last in both directions.
        let figure = |field: fn(&TrackedProcessReport) -> Option<u64>| match (field(a), field(b)) {
            (Some(a), Some(b)) if self.descending => b.cmp(&a),
            (Some(a), Some(b)) => a.cmp(&b),
            (a, b) => b.is_some().cmp(&a.is_some()),
        };
        let directed = |order: Ordering| if self.descending { order.reverse() } else { order };
        match self.column_name() {
            "Process" => directed(a.label.cmp(&b.label)),
            "Kind" => directed(a.kind.cmp(&b.kind)),
            "Domain" => directed(a.domain.cmp(&b.domain)),
            "Footprint" => figure(|process| process.footprint),
            "Saved" => figure(|process| process.saved),
            _ => figure(|process| process.resident),
        }
    }
}

/// A figure that may be absent.
pub fn format_optional<T>(value: Option<T>, format: impl Fn(T) -> String) -> String {
    value.map_or_else(|| "-".to_owned(), format)
}

const BAR_COLUMNS: u16 = 16;

pub fn process_table(status: &StatusReport, sort_order: SortOrder) -> DataTable {
    let mut table = DataTable::new(
        &[
            ("Process", 18, false),
            ("Footprint", 9, true),
            ("Saved", 9, true),
            ("State", 10, false),
            ("Resident", 9, true),
            ("", BAR_COLUMNS, false),
            ("Kind", 9, false),
            ("Domain", 20, false),
            ("Ranges", 7, true),
        ],
        "no process is tracked yet",
    );
    let mut processes: Vec<&TrackedProcessReport> = status.tracked_processes.iter().collect();
    processes.sort_by(|a, b| sort_order.compare(a, b));
    let max_footprint = processes.iter().filter_map(|process| process.footprint).max();
    for process in processes {
        let (state, mark) = state_label(process.state);
        let cells = [
            escape_unprintable(&process.label).into(),
            format_optional(process.footprint, |value| format_footprint(value, process.footprint_age_seconds)).into(),
            format_optional(process.saved, format_bytes).into(),
            state.into(),
            format_optional(process.resident, format_bytes).into(),
            share_bar(process.footprint, max_footprint).into(),
            kind_name(process.kind).into(),
            escape_unprintable(&process.domain).into(),
            format_number(process.enrolled_ranges).into(),
        ];
        let cgroup = process.cgroup.as_ref().map_or_else(String::new, |cgroup| format!(", {cgroup}"));
        let detail = format!(
            "{}: {state}, {}. pid {}{cgroup}, {}; {} merged in {} ranges.",
            process.label,
            process.why,
            process.pid,
            process.domain,
            format_optional_amount(process.merged),
            format_number(process.enrolled_ranges)
        );
        table.add_row(cells, mark, detail);
    }
    table
}

/// Virtual machines, containers, jobs and other processes, the largest first.
pub fn workload_table(status: &StatusReport) -> DataTable {
    let columns = [
        ("Name", 24, false),
        ("Footprint", 9, true),
        ("Saved", 9, true),
        ("Processes", 9, true),
        ("", BAR_COLUMNS, false),
        ("Kind", 9, false),
        ("Domain", 20, false),
    ];
    let mut table = DataTable::new(&columns, "no process is tracked yet");
    let max_footprint = status.workloads.iter().filter_map(|workload| workload.sum.footprint).max();
    for workload in &status.workloads {
        let sum = &workload.sum;
        let cells = [
            escape_unprintable(&workload.name).into(),
            format_optional(sum.footprint, |value| format_footprint(value, sum.footprint_age_seconds)).into(),
            format_optional(sum.saved, format_bytes).into(),
            format_number(sum.processes).into(),
            share_bar(sum.footprint, max_footprint).into(),
            kind_name(workload.kind).into(),
            escape_unprintable(&workload.domain).into(),
        ];
        let (name, kind, merged) = (&workload.name, kind_name(workload.kind), format_optional_amount(sum.merged));
        let detail = format!("{name}: {kind}, {}; {merged} merged.", workload.domain);
        table.add_row(cells, RowMark::Plain, detail);
    }
    table
}

fn kind_name(kind: WorkloadKind) -> &'static str {
    match kind {
        WorkloadKind::Vm => "vm",
        WorkloadKind::Container => "container",
        WorkloadKind::Job => "job",
        WorkloadKind::Process => "process",
    }
}

fn format_optional_amount(value: Option<u64>) -> String {
    value.map_or_else(|| "an unknown amount".to_owned(), |value| Bytes(value).to_string())
}

/// A bar for a figure, relative to the largest.
fn share_bar(figure: Option<u64>, max: Option<u64>) -> String {
    let share = figure.zip(max).map_or(0.0, |(figure, max)| figure as f64 / max.max(1) as f64);
    format_bar(share, usize::from(BAR_COLUMNS))
}

fn state_label(state: TrackingState) -> (&'static str, RowMark) {
    match state {
        TrackingState::Arriving => ("arriving", RowMark::Warn),
        TrackingState::Tracked => ("tracked", RowMark::Plain),
        TrackingState::Merged => ("merged", RowMark::Good),
        TrackingState::BackedOff => ("backed off", RowMark::Dim),
        TrackingState::Excluded => ("excluded", RowMark::Dim),
        TrackingState::Unenrolled => ("unenrolled", RowMark::Dim),
    }
}

pub fn decision_table(status: &StatusReport) -> DataTable {
    let columns = [
        ("Ago", 8, true),
        ("Action", 9, false),
        ("Target", 16, false),
        ("Save", 9, true),
        ("Reason", 14, false),
        ("Why", 20, false),
    ];
    let mut table = DataTable::new(&columns, "no decision yet");
    for decision in &status.decisions {
        let ago = (status.time - decision.time_ms as f64 / 1e3).max(0.0);
        let cells = [
            format_duration(ago).into(),
            escape_unprintable(&decision.kind).into(),
            escape_unprintable(&decision.subject).into(),
            decision.predicted.map(format_bytes).unwrap_or_default().into(),
            escape_unprintable(&decision.reason).into(),
            escape_unprintable(&decision.explanation).into(),
        ];
        let carried_out_note = if decision.carried_out { "" } else { " Not carried out." };
        let savings = decision
            .predicted
            .map_or_else(String::new, |savings| format!(" Predicted savings: {}.", format_bytes(savings)));
        let detail = format!(
            "{} {}, because {} ({}).{savings}{carried_out_note}",
            decision.kind, decision.subject, decision.explanation, decision.reason
        );
        table.add_row(cells, if decision.carried_out { RowMark::Plain } else { RowMark::Dim }, detail);
    }
    table
}

pub fn finding_table(status: &StatusReport) -> DataTable {
    let mut table =
        DataTable::new(&[("Verdict", 8, false), ("Rule", 16, false), ("Finding", 40, false)], "no findings");
    for finding in &status.findings {
        let (word, mark) = match finding.verdict {
            VerdictName::Fail => ("fail", RowMark::Bad),
            VerdictName::Warn => ("warn", RowMark::Warn),
            VerdictName::Unknown => ("unknown", RowMark::Dim),
            VerdictName::Ok => ("ok", RowMark::Good),
            VerdictName::NotApplicable => ("-", RowMark::Dim),
        };
        let remedy = finding.remedy.join("\n");
        let detail = format!("{}: {}. {}\n{remedy}", finding.source, finding.value, finding.why);
        table.add_row(
            [word.into(), escape_unprintable(&finding.rule).into(), escape_unprintable(&finding.title).into()],
            mark,
            detail,
        );
    }
    table
}

pub fn sharing_table(status: &StatusReport) -> DataTable {
    let mut table = DataTable::new(&[("shares with", 18, false)], "no census yet");
    let Some(sharing) = &status.sharing else { return table };
    let max_shared = sharing.shared_bytes.iter().flatten().copied().max().unwrap_or(1).max(1);
    for number in 1..=sharing.parties.len() {
        table.columns.push(TableColumn { title: number.to_string(), width: 5, right_aligned: true });
    }
    for (row, (party, shared)) in sharing.parties.iter().zip(&sharing.shared_bytes).enumerate() {
        let mut cells = vec![TableCell::from(format!("{:>2} {}", row + 1, escape_unprintable(party)))];
        cells.extend(shared.iter().map(|&value| TableCell {
            text: format_short_bytes(value),
            heat_level: (value as f64 / max_shared as f64).sqrt(),
        }));
        let mut others: Vec<(u64, usize)> =
            shared.iter().copied().zip(0..).filter(|(_, other)| *other != row).collect();
        others.sort_by_key(|&(value, _)| Reverse(value));
        let partners: Vec<String> = others
            .iter()
            .take(3)
            .map(|(value, other)| format!("{} with {}", format_bytes(*value), sharing.parties[*other]))
            .collect();
        let duplicated_within = shared.get(row).copied().unwrap_or_default();
        table.add_row(
            cells,
            RowMark::Plain,
            format!(
                "{party} shares {}; {} are duplicated within it.",
                partners.join(", "),
                format_bytes(duplicated_within)
            ),
        );
    }
    table
}

/// Bytes in at most four characters, empty below 1 MiB.
fn format_short_bytes(value: u64) -> String {
    let mebi = value >> 20;
    match mebi {
        0 => String::new(),
        1..1000 => format!("{mebi}M"),
        _ if mebi < 10 << 10 => format!("{:.1}G", mebi as f64 / 1024.0),
        _ => format!("{}G", mebi >> 10),
    }
}

pub fn ksm_table(status: &StatusReport) -> DataTable {
    let mut table = DataTable::new(&[("Counter", 20, false), ("Value", 18, true)], "this kernel has no KSM");
    let Some(ksm) = &status.ksm else { return table };
    let counters: [(&str, Option<i64>, &str); 13] = [
        ("run", ksm.run.map(u64::cast_signed), "0 stopped with merges kept, 1 running, 2 unmerging all pages."),
        ("pages_to_scan", ksm.pages_to_scan.map(u64::cast_signed), "Pages in a batch."),
        ("sleep_millisecs", ksm.sleep_millisecs.map(u64::cast_signed), "Milliseconds between two batches."),
        ("pages_shared", ksm.pages_shared.map(u64::cast_signed), "Shared frames."),
        ("pages_sharing", ksm.pages_sharing.map(u64::cast_signed), "Additional mappings of those frames."),
        ("pages_unshared", ksm.pages_unshared.map(u64::cast_signed), "Scanned pages without a copy."),
        ("pages_volatile", ksm.pages_volatile.map(u64::cast_signed), "Pages that changed between scans."),
        ("pages_scanned", ksm.pages_scanned.map(u64::cast_signed), "Page scans since boot."),
        ("pages_skipped", ksm.pages_skipped.map(u64::cast_signed), "Pages skipped by smart scan."),
        ("ksm_zero_pages", ksm.ksm_zero_pages, "Pages that KSM mapped to the kernel's zero page."),
        ("full_scans", ksm.full_scans.map(u64::cast_signed), "Complete scans since boot."),
        ("general_profit", ksm.general_profit, "Bytes saved less metadata."),
        (
            "cow_ksm",
            ksm.cow_ksm.map(u64::cast_signed),
            "COW breaks since boot: merged pages that were written and copied.",
        ),
    ];
    for (name, value, meaning) in counters {
        let digits =
            |value: i64| format!("{}{}", if value < 0 { "-" } else { "" }, format_number(value.unsigned_abs()));
        let mark = if value.is_some() { RowMark::Plain } else { RowMark::Dim };
        table.add_row([name.into(), format_optional(value, digits).into()], mark, format!("{name}: {meaning}"));
    }
    table
}

/// A duration in its two largest units.
pub fn format_duration(seconds: f64) -> String {
    let seconds = seconds as u64;
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        3600..86400 => format!("{} h {} m", seconds / 3600, seconds / 60 % 60),
        _ => format!("{} d {} h", seconds / 86400, seconds / 3600 % 24),
    }
}
