//! The report of `unmerge` for people.

use crate::wire::unmerge::{GuardReport, TakenReport, UnmergeReport, UnmergedProcess};
use comfy_table::{Cell, Color};
use pagefold_base::Bytes;
use pagefold_base::units::NetBytes;
use pagefold_output::text::{Style, bytes, coloured, cut, cut_front, number, printable};

/// The whole report, with `top` rows of processes; `remedy` says what to do about those that could not be seen.
pub fn render(report: &UnmergeReport, top: usize, remedy: &str, style: Style) -> String {
    let mut text = style.paragraph(&title(report), 0);
    if !report.processes.is_empty() {
        text.push('\n');
        text.push_str(&processes(report, top, style));
        text.push_str(&style.heading("Room"));
        text.push_str(&limits(report.stopped.as_ref().unwrap_or(&report.guard), style));
    }
    if let Some(taken) = &report.taken {
        text.push_str(&style.heading("Taken"));
        text.push_str(&taken_lines(taken, report.page_size, style));
    }
    for note in notes(report, remedy) {
        text.push_str(&style.paragraph(&printable(&note), 2));
    }
    text
}

fn title(report: &UnmergeReport) -> String {
    let host = &report.host;
    let (merged, needed) = (merged(report), Bytes(needed(report)));
    let count = report.processes.len() as u64;
    let they = format!("{} process{}", number(count), if count == 1 { "" } else { "es" });
    let binds = binding(report.stopped.as_ref().unwrap_or(&report.guard));
    match report.outcome {
        "nothing" => format!(
            "Nothing to unmerge on {host}: none of {} chosen processes is enrolled in KSM.",
            number(report.not_enrolled)
        ),
        "planned" => format!(
            "Dry run on {host}: {they} with {merged} merged would take {needed}; {}. Nothing was changed.",
            if report.guard.verdict == "fits" { "it fits".to_owned() } else { format!("it does not fit: {binds}") }
        ),
        "refused" => format!(
            "Refused on {host}: giving {they} pages of their own takes {needed}, and {binds}. Nothing was changed."
        ),
        "done" => format!(
            "Unmerged on {host}: {they} with {merged} merged: pages of their own again, and none is merged any more."
        ),
        _ => format!(
            "Unmerged in part on {host}: of {they} with {merged} merged, {} still is{}.",
            left(report),
            match report.processes.iter().filter(|process| process.state == "ended").count() {
                0 => String::new(),
                ended => format!("; {} ended meanwhile", number(ended as u64)),
            }
        ),
    }
}

fn merged(report: &UnmergeReport) -> Bytes {
    let pages: u64 = report.processes.iter().map(|process| process.merged_pages + process.zero_pages).sum();
    Bytes(pages * report.page_size)
}

fn left(report: &UnmergeReport) -> Bytes {
    let of =
        |process: &UnmergedProcess| process.merged_pages_after.unwrap_or(0) + process.zero_pages_after.unwrap_or(0);
    Bytes(report.processes.iter().map(of).sum::<u64>() * report.page_size)
}

fn needed(report: &UnmergeReport) -> u64 {
    let of =
        |process: &UnmergedProcess| (process.merged_pages + process.zero_pages).saturating_sub(process.returned_pages);
    report.processes.iter().map(of).sum::<u64>() * report.page_size
}

/// What keeps it from being done.
fn binding(guard: &GuardReport) -> String {
    match (guard.limits.iter().find(|limit| !limit.fits), guard.unknown.first()) {
        (Some(limit), _) => {
            let swap = if guard.verdict == "swaps" { "; the rest would be swapped out" } else { "" };
            format!("{} of {} leaves {}{swap}", limit.rule, printable(&limit.place), Bytes(limit.room))
        }
        (None, Some(unknown)) => {
            format!("the limit of {} cannot be read ({})", printable(&unknown.place), unknown.reason)
        }
        (None, None) => "it fits".to_owned(),
    }
}

fn processes(report: &UnmergeReport, top: usize, style: Style) -> String {
    let mut table =
        style.table(&[">pid", "name", "by", ">merged", ">zero pages", ">takes", ">left", ">longest stop", "state"]);
    let size = report.page_size;
    for process in report.processes.iter().take(top) {
        let takes = (process.merged_pages + process.zero_pages).saturating_sub(process.returned_pages) * size;
        let bound = if process.estimated.is_some() { "≤" } else { "" };
        let left = process
            .merged_pages_after
            .map(|pages| bytes((pages + process.zero_pages_after.unwrap_or(0)) * size))
            .unwrap_or_default();
        let state = match process.state {
            "withdrawn" => coloured(process.state, Color::Green),
            "planned" | "untouched" | "ended" => Cell::new(process.state),
            state => coloured(state, Color::Yellow),
        };
        table.add_row([
            Cell::new(process.who.pid),
            Cell::new(cut(&process.who.label(), 32)),
            Cell::new(process.way),
            Cell::new(bytes(process.merged_pages * size)),
            Cell::new(bytes(process.zero_pages * size)),
            Cell::new(format!("{bound}{}", bytes(takes))),
            Cell::new(left),
            Cell::new(process.longest_stop_ms.map(|ms| format!("{ms:.2} ms")).unwrap_or_default()),
            state,
        ]);
    }
    let mut text = style.render(&table);
    if report.processes.len() > top {
        text.push_str(&format!(" and {} more\n", report.processes.len() - top));
    }
    text
}

fn limits(guard: &GuardReport, style: Style) -> String {
    let mut table = style.table(&["of", "limit", ">is", ">leaves", ">needed", ">swap", ""]);
    for limit in &guard.limits {
        let fits = if limit.fits { coloured("fits", Color::Green) } else { coloured("binds", Color::Red) };
        table.add_row([
            Cell::new(cut_front(&limit.place, 48)),
            Cell::new(limit.rule),
            Cell::new(Bytes(limit.limit)),
            Cell::new(Bytes(limit.room)),
            Cell::new(bytes(limit.needed)),
            Cell::new(bytes(limit.swap)),
            fits,
        ]);
    }
    for unknown in &guard.unknown {
        table.add_row([
            Cell::new(cut_front(&unknown.place, 48)),
            Cell::new(printable(&unknown.reason)),
            Cell::new(""),
            Cell::new(""),
            Cell::new(""),
            Cell::new(""),
            coloured("unknown", Color::Red),
        ]);
    }
    style.render(&table)
}

fn taken_lines(taken: &TakenReport, page_size: u64, style: Style) -> String {
    let mut table = style.table(&["", ">predicted", ">found", "by"]);
    let found = |value: Option<i64>| value.map_or_else(|| "?".to_owned(), |value| NetBytes(value).to_string());
    let predicted = Bytes(taken.predicted).to_string();
    table.add_row(["memory taken", &predicted, &Bytes(taken.withdrawn).to_string(), "parts that were withdrawn"]);
    table.add_row(["", "", &found(taken.anon_pages), "AnonPages, everybody's"]);
    table.add_row(["", "", &found(taken.mem_available), "MemAvailable, everybody's"]);
    let copies = taken.copies.map_or_else(|| "?".to_owned(), number);
    table.add_row(["pages copied", &number(taken.copies_predicted), &copies, "cow_ksm, everybody's"]);
    let mut text = style.render(&table);
    if let Some(copies) = taken.copies.filter(|copies| *copies < taken.copies_predicted) {
        let pages = taken.copies_predicted - copies;
        text.push_str(&style.paragraph(
            &format!(
                "{} fewer copies: {} of pages that were written, unmapped or left merged.",
                number(pages),
                Bytes(pages * page_size)
            ),
            2,
        ));
    }
    text
}

fn notes(report: &UnmergeReport, remedy: &str) -> Vec<String> {
    let mut notes = Vec::new();
    let refused = report.outcome == "refused" || (report.outcome == "planned" && report.guard.verdict != "fits");
    if refused {
        let parts = report.parts;
        notes.push(format!(
            "`--staged` would withdraw {} of {} parts now; `--wait TIME` waits for memory; `--force` goes on all the same.",
            number(parts.fit),
            number(parts.all)
        ));
    }
    let whole = |process: &&UnmergedProcess| process.way == "qmp" && matches!(process.state, "planned" | "untouched");
    if (refused || report.stopped.is_some())
        && let Some(guest) = report.processes.iter().find(whole)
    {
        notes.push(format!(
            "{} is reached by its control socket and goes all at once: `--staged --inject` withdraws virtual \
             machines from within, range by range.",
            guest.who.label()
        ));
    }
    if report.forced && report.guard.verdict != "fits" {
        for limit in report.guard.limits.iter().filter(|limit| !limit.fits) {
            notes.push(format!(
                "Forced past {} of {}: {}.",
                limit.rule,
                limit.place,
                GuardReport::consequence(limit.rule)
            ));
        }
    }
    if report.stopped.is_some() {
        notes
            .push("Stopped before the part that does not fit. What was withdrawn stays so; run it again later.".into());
    }
    if report.interrupted {
        notes.push("Interrupted: what was withdrawn stays so.".into());
    }
    for process in &report.processes {
        if let Some(error) = &process.error {
            notes.push(format!("{} ({}): {error}", process.who.pid, process.who.label()));
        }
    }
    let beside: u64 = report.processes.iter().filter_map(|process| process.beside_pages).sum();
    if beside > 0 {
        notes.push(format!(
            "{} of firmware and video memory stay merged, which no memory backend rules: `--inject` reaches them.",
            Bytes(beside * report.page_size)
        ));
    }
    if report.processes.iter().any(|process| process.estimated.is_some()) {
        notes.push(
            "≤ marks upper bounds from the kernel's sums, frames that come free left out: run as root to count frames."
                .into(),
        );
    }
    let (mut before, mut unmerged, mut collapsed, mut any) = (0, 0, 0, false);
    for huge in report.processes.iter().filter_map(|process| process.huge) {
        (before, unmerged, collapsed, any) =
            (before + huge.before, unmerged + huge.unmerged, collapsed + huge.collapsed, true);
    }
    if any {
        notes.push(format!(
            "Huge pages: {} before, {} after unmerging, {} after putting them together.",
            Bytes(before),
            Bytes(unmerged),
            Bytes(collapsed)
        ));
    }
    if let Some(first) = report.not_seen.first() {
        notes.push(format!(
            "{} process{} not seen, the first {} ({}). {remedy}",
            number(report.not_seen.len() as u64),
            if report.not_seen.len() == 1 { "" } else { "es" },
            first.pid,
            first.detail
        ));
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::unmerge::PartsReport;
    use pagefold_base::guard::{Limit, Need, Place, Room, Rule, judge};
    use pagefold_base::{PageSize, Pages};
    use pagefold_output::wire::{VmName, Who};

    /// A report on 16 MiB that are needed in `/vms`, of which there is a half.
    fn report(outcome: &'static str, swap: u64, forced: bool) -> UnmergeReport {
        let limit =
            |place, rule, room| Limit { place, rule, limit: Bytes(1 << 30), room: Bytes(room), swap: Bytes(swap) };
        let limits = vec![
            limit(Place::Host, Rule::Available, 1 << 30),
            limit(Place::Cgroup("/vms\u{1b}[2J".to_owned()), Rule::High, 8 << 20),
        ];
        let need = Need::of(Some("/vms\u{1b}[2J"), Pages(4096), Pages(1024));
        let page = PageSize::new(4096).unwrap();
        UnmergeReport {
            schema: "pagefold.unmerge/1",
            host: "this host".to_owned(),
            page_size: 4096,
            seconds: 0.0,
            outcome,
            guard: GuardReport::of(&judge(&need, &Room { limits, unknown: Vec::new() }, page)),
            parts: PartsReport { all: 3, fit: 1 },
            stopped: None,
            forced,
            interrupted: false,
            taken: None,
            processes: Vec::new(),
            not_enrolled: 2,
            not_seen: Vec::new(),
        }
    }

    #[test]
    fn a_refusal_names_what_binds_and_what_can_be_done() {
        let text = render(&report("refused", 0, false), 10, "", Style::default());
        let text = text.replace('\n', " ");
        assert!(text.contains("memory.high of /vms\\u{1b}[2J leaves 8.00 MiB. Nothing was changed."), "{text}");
        assert!(text.contains("`--staged` would withdraw 1 of 3 parts now"), "{text}");
        let text = render(&report("refused", 8 << 20, false), 10, "", Style::default());
        assert!(text.contains("the rest would be swapped out"), "{text}");
    }

    #[test]
    fn a_guest_that_goes_all_at_once_is_told_with_the_way_in_parts() {
        let guest = |state| UnmergedProcess {
            who: Who {
                pid: 7,
                start_time: 9,
                comm: "qemu".to_owned(),
                uid: None,
                domain: None,
                cgroup: None,
                vm: Some(VmName { monitor: "qemu", name: Some("web1".to_owned()), memory: None }),
                container: None,
                job: None,
                rank: None,
            },
            way: "qmp",
            merged_pages: 4096,
            zero_pages: 0,
            returned_pages: 0,
            estimated: None,
            parts: 1,
            parts_withdrawn: 0,
            state,
            merged_pages_after: None,
            zero_pages_after: None,
            beside_pages: None,
            longest_stop_ms: None,
            huge: None,
            error: None,
        };
        let told = |outcome, stopped: bool, state| {
            let mut report = report(outcome, 0, false);
            report.stopped = stopped.then(|| report.guard.clone());
            report.processes = vec![guest(state)];
            let text = render(&report, 10, "", Style::default());
            text.split_whitespace().collect::<Vec<_>>().join(" ").contains(
                "web1 is reached by its control socket and goes all at once: `--staged --inject` withdraws virtual \
                 machines from within",
            )
        };
        assert!(told("refused", false, "planned"));
        assert!(told("partial", true, "untouched"));
        assert!(!told("partial", true, "withdrawn"), "it fitted");
        assert!(!told("done", false, "withdrawn"));
    }

    #[test]
    fn force_says_what_may_happen() {
        let text = render(&report("done", 0, true), 10, "", Style::default());
        assert!(text.contains("Forced past memory.high of /vms\\u{1b}[2J: its processes are throttled."), "{text}");
        assert!(!text.contains("MemAvailable of"), "{text}");
    }
}
