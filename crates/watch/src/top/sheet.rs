//! The tables of `pagefold top`: cells, and what is told of the row that is selected.

use pagefold_base::Bytes;
use pagefold_daemon::text::footprint;
use pagefold_daemon::wire::{Kind, Member, MemberState, Status};
use pagefold_doctor::wire::VerdictName;
use pagefold_output::text::{bar, bytes, number, printable};
use std::cmp::{Ordering, Reverse};

/// How much a row asks for attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    Plain,
    Dim,
    Good,
    Warn,
    Bad,
}

#[derive(Debug)]
pub struct Column {
    pub title: String,
    pub width: u16,
    /// Numbers stand at the right.
    pub right: bool,
}

#[derive(Debug)]
pub struct Row {
    pub cells: Vec<Cell>,
    pub mark: Mark,
    /// All of it in words, once it is selected; in lines.
    pub detail: String,
}

#[derive(Debug)]
pub struct Cell {
    pub text: String,
    /// How dark it is in a heat map, to 1.
    pub heat: f64,
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Self {
        Self { text: text.into(), heat: 0.0 }
    }
}

#[derive(Debug)]
pub struct Sheet {
    pub columns: Vec<Column>,
    pub rows: Vec<Row>,
    /// What to say where there is no row.
    pub empty: &'static str,
}

impl Sheet {
    fn new(columns: &[(&str, u16, bool)], empty: &'static str) -> Self {
        let columns = columns.iter().map(|&(title, width, right)| Column { title: title.to_owned(), width, right });
        Self { columns: columns.collect(), rows: Vec::new(), empty }
    }

    fn row(&mut self, cells: impl IntoIterator<Item = Cell>, mark: Mark, detail: String) {
        self.rows.push(Row { cells: cells.into_iter().collect(), mark, detail });
    }

    /// Keep the rows in which a text occurs, in whatever case.
    pub fn keep(&mut self, wanted: &str) {
        let wanted = wanted.to_lowercase();
        let fits = |text: &str| text.to_lowercase().contains(&wanted);
        self.rows.retain(|row| fits(&row.detail) || row.cells.iter().any(|cell| fits(&cell.text)));
    }

    /// Leave out the last columns that a width has no room for.
    pub fn fit(&mut self, width: u16) {
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

/// By what members are sorted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    /// The column, among [`SORTED`].
    by: usize,
    /// The largest, or last in the alphabet, first.
    pub down: bool,
}

impl Default for Order {
    fn default() -> Self {
        Self { by: 1, down: true }
    }
}

/// The columns by which members are sorted, in the order of their choice, and which of them begin with the largest.
const SORTED: [(&str, bool); 6] =
    [("Member", false), ("Footprint", true), ("Saved", true), ("Resident", true), ("Kind", false), ("Domain", false)];

impl Order {
    /// The next column.
    pub fn next(&mut self) {
        self.by = (self.by + 1) % SORTED.len();
        self.down = SORTED[self.by].1;
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        SORTED[self.by].0
    }

    fn compare(self, a: &Member, b: &Member) -> Ordering {
        // What is not known comes last, whichever way round.
        let figure = |of: fn(&Member) -> Option<u64>| match (of(a), of(b)) {
            (Some(a), Some(b)) if self.down => b.cmp(&a),
            (Some(a), Some(b)) => a.cmp(&b),
            (a, b) => b.is_some().cmp(&a.is_some()),
        };
        let word = |order: Ordering| if self.down { order.reverse() } else { order };
        match self.name() {
            "Member" => word(a.label.cmp(&b.label)),
            "Kind" => word(a.kind.cmp(&b.kind)),
            "Domain" => word(a.domain.cmp(&b.domain)),
            "Footprint" => figure(|member| member.footprint),
            "Saved" => figure(|member| member.saved),
            _ => figure(|member| member.resident),
        }
    }
}

/// A figure that may be absent.
pub fn told<T>(value: Option<T>, write: impl Fn(T) -> String) -> String {
    value.map_or_else(|| "-".to_owned(), write)
}

const BAR: u16 = 16;

pub fn members(status: &Status, order: Order) -> Sheet {
    let mut sheet = Sheet::new(
        &[
            ("Member", 18, false),
            ("Footprint", 9, true),
            ("Saved", 9, true),
            ("State", 10, false),
            ("Resident", 9, true),
            ("", BAR, false),
            ("Kind", 9, false),
            ("Domain", 20, false),
            ("Ranges", 7, true),
        ],
        "nobody is known yet",
    );
    let mut members: Vec<&Member> = status.members.iter().collect();
    members.sort_by(|a, b| order.compare(a, b));
    let most = members.iter().filter_map(|member| member.footprint).max();
    for member in members {
        let (state, mark) = state(member.state);
        let cells = [
            printable(&member.label).into(),
            told(member.footprint, |value| footprint(value, member.footprint_age_seconds)).into(),
            told(member.saved, bytes).into(),
            state.into(),
            told(member.resident, bytes).into(),
            part(member.footprint, most).into(),
            kind(member.kind).into(),
            printable(&member.domain).into(),
            number(member.ranges).into(),
        ];
        let cgroup = member.cgroup.as_ref().map_or_else(String::new, |cgroup| format!(", {cgroup}"));
        let detail = format!(
            "{}: {state}, {}. pid {}{cgroup}, {}; {} merged in {} ranges.",
            member.label,
            member.why,
            member.pid,
            member.domain,
            amount(member.merged),
            number(member.ranges)
        );
        sheet.row(cells, mark, detail);
    }
    sheet
}

/// Virtual machines, containers, jobs and other processes, the largest first.
pub fn workloads(status: &Status) -> Sheet {
    let columns = [
        ("Name", 24, false),
        ("Footprint", 9, true),
        ("Saved", 9, true),
        ("Processes", 9, true),
        ("", BAR, false),
        ("Kind", 9, false),
        ("Domain", 20, false),
    ];
    let mut sheet = Sheet::new(&columns, "nobody is known yet");
    let most = status.workloads.iter().filter_map(|workload| workload.sum.footprint).max();
    for workload in &status.workloads {
        let sum = &workload.sum;
        let cells = [
            printable(&workload.name).into(),
            told(sum.footprint, |value| footprint(value, sum.footprint_age_seconds)).into(),
            told(sum.saved, bytes).into(),
            number(sum.processes).into(),
            part(sum.footprint, most).into(),
            kind(workload.kind).into(),
            printable(&workload.domain).into(),
        ];
        let (name, kind, merged) = (&workload.name, kind(workload.kind), amount(sum.merged));
        let detail = format!("{name}: {kind}, {}; {merged} merged.", workload.domain);
        sheet.row(cells, Mark::Plain, detail);
    }
    sheet
}

fn kind(kind: Kind) -> &'static str {
    match kind {
        Kind::Vm => "vm",
        Kind::Container => "container",
        Kind::Job => "job",
        Kind::Process => "process",
    }
}

fn amount(value: Option<u64>) -> String {
    value.map_or_else(|| "an unknown amount".to_owned(), |value| Bytes(value).to_string())
}

/// A figure as a part of the largest.
fn part(figure: Option<u64>, most: Option<u64>) -> String {
    let share = figure.zip(most).map_or(0.0, |(figure, most)| figure as f64 / most.max(1) as f64);
    bar(share, usize::from(BAR))
}

fn state(state: MemberState) -> (&'static str, Mark) {
    match state {
        MemberState::Arriving => ("arriving", Mark::Warn),
        MemberState::Followed => ("followed", Mark::Plain),
        MemberState::Merged => ("merged", Mark::Good),
        MemberState::BackedOff => ("backed off", Mark::Dim),
        MemberState::Excluded => ("excluded", Mark::Dim),
        MemberState::Withdrawn => ("withdrawn", Mark::Dim),
    }
}

pub fn decisions(status: &Status) -> Sheet {
    let columns = [
        ("Ago", 8, true),
        ("What", 9, false),
        ("Whom", 16, false),
        ("Save", 9, true),
        ("Reason", 12, false),
        ("Why", 20, false),
    ];
    let mut sheet = Sheet::new(&columns, "nothing was decided yet");
    for decision in &status.decisions {
        let ago = (status.time - decision.time_ms as f64 / 1e3).max(0.0);
        let cells = [
            duration(ago).into(),
            printable(&decision.what).into(),
            printable(&decision.whom).into(),
            decision.predicted.map(bytes).unwrap_or_default().into(),
            printable(&decision.reason).into(),
            printable(&decision.why).into(),
        ];
        let done = if decision.acted { "" } else { " It was not carried out." };
        let save = decision.predicted.map_or_else(String::new, |save| format!(" It should save {}.", bytes(save)));
        let detail =
            format!("{} {}, because {} ({}).{save}{done}", decision.what, decision.whom, decision.why, decision.reason);
        sheet.row(cells, if decision.acted { Mark::Plain } else { Mark::Dim }, detail);
    }
    sheet
}

pub fn findings(status: &Status) -> Sheet {
    let mut sheet =
        Sheet::new(&[("Verdict", 8, false), ("Rule", 16, false), ("Finding", 40, false)], "nothing is wrong");
    for finding in &status.findings {
        let (word, mark) = match finding.verdict {
            VerdictName::Fail => ("fail", Mark::Bad),
            VerdictName::Warn => ("warn", Mark::Warn),
            VerdictName::Unknown => ("unknown", Mark::Dim),
            VerdictName::Ok => ("ok", Mark::Good),
            VerdictName::NotApplicable => ("-", Mark::Dim),
        };
        let remedy = finding.remedy.join("\n");
        let detail = format!("{}: {}. {}\n{remedy}", finding.source, finding.value, finding.why);
        sheet.row([word.into(), printable(&finding.rule).into(), printable(&finding.title).into()], mark, detail);
    }
    sheet
}

pub fn sharing(status: &Status) -> Sheet {
    let mut sheet = Sheet::new(&[("shares with", 18, false)], "no census was taken yet");
    let Some(sharing) = &status.sharing else { return sheet };
    let most = sharing.shared.iter().flatten().copied().max().unwrap_or(1).max(1);
    for number in 1..=sharing.parties.len() {
        sheet.columns.push(Column { title: number.to_string(), width: 5, right: true });
    }
    for (row, (party, shared)) in sharing.parties.iter().zip(&sharing.shared).enumerate() {
        let mut cells = vec![Cell::from(format!("{:>2} {}", row + 1, printable(party)))];
        cells
            .extend(shared.iter().map(|&value| Cell { text: short(value), heat: (value as f64 / most as f64).sqrt() }));
        let mut others: Vec<(u64, usize)> =
            shared.iter().copied().zip(0..).filter(|(_, other)| *other != row).collect();
        others.sort_by_key(|&(value, _)| Reverse(value));
        let most: Vec<String> = others
            .iter()
            .take(3)
            .map(|(value, other)| format!("{} with {}", bytes(*value), sharing.parties[*other]))
            .collect();
        let own = shared.get(row).copied().unwrap_or_default();
        sheet.row(
            cells,
            Mark::Plain,
            format!("{party} shares {}; {} have another copy in itself.", most.join(", "), bytes(own)),
        );
    }
    sheet
}

/// Bytes in at most four characters, nothing below a MiB.
fn short(value: u64) -> String {
    let mebi = value >> 20;
    match mebi {
        0 => String::new(),
        1..1000 => format!("{mebi}M"),
        _ if mebi < 10 << 10 => format!("{:.1}G", mebi as f64 / 1024.0),
        _ => format!("{}G", mebi >> 10),
    }
}

pub fn kernel(status: &Status) -> Sheet {
    let mut sheet = Sheet::new(&[("Counter", 20, false), ("Value", 18, true)], "this kernel has no KSM");
    let Some(ksm) = &status.ksm else { return sheet };
    let counters: [(&str, Option<i64>, &str); 13] = [
        ("run", ksm.run.map(u64::cast_signed), "0 stopped with merges kept, 1 running, 2 unmerging everything."),
        ("pages_to_scan", ksm.pages_to_scan.map(u64::cast_signed), "Pages of a batch."),
        ("sleep_millisecs", ksm.sleep_millisecs.map(u64::cast_signed), "Milliseconds between two batches."),
        ("pages_shared", ksm.pages_shared.map(u64::cast_signed), "Frames that are shared."),
        ("pages_sharing", ksm.pages_sharing.map(u64::cast_signed), "Further mappings of those frames."),
        ("pages_unshared", ksm.pages_unshared.map(u64::cast_signed), "Pages that were looked at and have no copy."),
        ("pages_volatile", ksm.pages_volatile.map(u64::cast_signed), "Pages that changed between scans."),
        ("pages_scanned", ksm.pages_scanned.map(u64::cast_signed), "Pages looked at since boot, each time counted."),
        ("pages_skipped", ksm.pages_skipped.map(u64::cast_signed), "Pages passed over by smart scan."),
        ("ksm_zero_pages", ksm.ksm_zero_pages, "Pages that KSM mapped to the kernel's page of zeros."),
        ("full_scans", ksm.full_scans.map(u64::cast_signed), "Complete scans since boot."),
        ("general_profit", ksm.general_profit, "Bytes saved less metadata."),
        ("cow_ksm", ksm.cow_ksm.map(u64::cast_signed), "Merged pages that were written and copied since boot."),
    ];
    for (name, value, meaning) in counters {
        let digits = |value: i64| format!("{}{}", if value < 0 { "-" } else { "" }, number(value.unsigned_abs()));
        let mark = if value.is_some() { Mark::Plain } else { Mark::Dim };
        sheet.row([name.into(), told(value, digits).into()], mark, format!("{name}: {meaning}"));
    }
    sheet
}

/// A time in the two units that tell most.
pub fn duration(seconds: f64) -> String {
    let seconds = seconds as u64;
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        3600..86400 => format!("{} h {} m", seconds / 3600, seconds / 60 % 60),
        _ => format!("{} d {} h", seconds / 86400, seconds / 3600 % 24),
    }
}
