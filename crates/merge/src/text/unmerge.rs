//! The report of `unmerge` as text.

use crate::wire::unmerge::{
    GuardReport, GuardVerdict, TakenReport, UnenrollMethodKind, UnenrollState, UnmergeOutcomeKind, UnmergeReport,
    UnmergedProcessReport,
};
use comfy_table::{Cell, Color};
use pagefold_base::Bytes;
use pagefold_base::units::NetBytes;
use pagefold_output::text::{
    TextStyle, colored_cell, cut_end, cut_start, escape_unprintable, format_bytes, format_number,
};

/// The whole report, with at most `max_rows` rows of processes. `remedy` says how to see processes that were not
/// readable.
pub fn render(report: &UnmergeReport, max_rows: usize, remedy: &str, style: TextStyle) -> String {
    let mut text = style.format_paragraph(&render_title(report), 0);
    if !report.processes.is_empty() {
        text.push('\n');
        text.push_str(&render_processes(report, max_rows, style));
        text.push_str(&style.format_heading("Limits"));
        text.push_str(&render_limits(report.stopped_by_guard.as_ref().unwrap_or(&report.guard), style));
    }
    if let Some(taken) = &report.taken {
        text.push_str(&style.format_heading("Taken"));
        text.push_str(&render_taken(taken, report.page_size, style));
    }
    for note in build_notes(report, remedy) {
        text.push_str(&style.format_paragraph(&escape_unprintable(&note), 2));
    }
    text
}

fn render_title(report: &UnmergeReport) -> String {
    let host = &report.host;
    let (merged, needed) = (merged_bytes(report), Bytes(needed_bytes(report)));
    let count = report.processes.len() as u64;
    let processes = format!("{} process{}", format_number(count), if count == 1 { "" } else { "es" });
    let binding_limit = describe_binding_limit(report.stopped_by_guard.as_ref().unwrap_or(&report.guard));
    match report.outcome {
        UnmergeOutcomeKind::Nothing => format!(
            "Nothing to unmerge on {host}: none of {} chosen processes is enrolled in KSM.",
            format_number(report.not_enrolled)
        ),
        UnmergeOutcomeKind::Planned => format!(
            "Dry run on {host}: {processes} with {merged} merged would take {needed}; {}. Nothing was changed.",
            if report.guard.verdict == GuardVerdict::Fits {
                "it fits".to_owned()
            } else {
                format!("it does not fit: {binding_limit}")
            }
        ),
        UnmergeOutcomeKind::Refused => {
            format!(
                "Refused on {host}: unmerging {processes} takes {needed}, and {binding_limit}. Nothing was changed."
            )
        }
        UnmergeOutcomeKind::Done => {
            format!("Unmerged on {host}: {processes} with {merged} merged: no page is merged any more.")
        }
        UnmergeOutcomeKind::Partial => format!(
            "Unmerged in part on {host}: of {processes} with {merged} merged, {} still is{}.",
            still_merged_bytes(report),
            match report.processes.iter().filter(|process| process.state == UnenrollState::Ended).count() {
                0 => String::new(),
                ended => format!("; {} ended meanwhile", format_number(ended as u64)),
            }
        ),
    }
}

fn merged_bytes(report: &UnmergeReport) -> Bytes {
    let pages: u64 = report.processes.iter().map(|process| process.merged_pages + process.zero_pages).sum();
    Bytes(pages * report.page_size)
}

fn still_merged_bytes(report: &UnmergeReport) -> Bytes {
    let pages = |process: &UnmergedProcessReport| {
        process.merged_pages_after.unwrap_or(0) + process.zero_pages_after.unwrap_or(0)
    };
    Bytes(report.processes.iter().map(pages).sum::<u64>() * report.page_size)
}

fn needed_bytes(report: &UnmergeReport) -> u64 {
    let pages = |process: &UnmergedProcessReport| {
        (process.merged_pages + process.zero_pages).saturating_sub(process.freed_frames)
    };
    report.processes.iter().map(pages).sum::<u64>() * report.page_size
}

/// The limit that prevents unmerging.
fn describe_binding_limit(guard: &GuardReport) -> String {
    match (guard.limits.iter().find(|limit| !limit.fits), guard.unreadable.first()) {
        (Some(limit), _) => {
            let swap = if guard.verdict == GuardVerdict::Swaps { "; the rest would be swapped out" } else { "" };
            format!("{} of {} leaves {}{swap}", limit.kind, escape_unprintable(&limit.scope), Bytes(limit.headroom))
        }
        (None, Some(unknown)) => {
            format!("the limit of {} cannot be read ({})", escape_unprintable(&unknown.scope), unknown.reason)
        }
        (None, None) => "it fits".to_owned(),
    }
}

fn render_processes(report: &UnmergeReport, max_rows: usize, style: TextStyle) -> String {
    let mut table =
        style.new_table(&[">pid", "name", "by", ">merged", ">zero pages", ">takes", ">left", ">longest stop", "state"]);
    let size = report.page_size;
    for process in report.processes.iter().take(max_rows) {
        let needed = (process.merged_pages + process.zero_pages).saturating_sub(process.freed_frames) * size;
        let prefix = if process.estimate_reason.is_some() { "≤" } else { "" };
        let remaining = process
            .merged_pages_after
            .map(|pages| format_bytes((pages + process.zero_pages_after.unwrap_or(0)) * size))
            .unwrap_or_default();
        let state = match process.state {
            state @ UnenrollState::Unenrolled => colored_cell(state, Color::Green),
            state @ (UnenrollState::Planned | UnenrollState::Untouched | UnenrollState::Ended) => Cell::new(state),
            state @ (UnenrollState::Partial | UnenrollState::Failed) => colored_cell(state, Color::Yellow),
        };
        table.add_row([
            Cell::new(process.process.pid),
            Cell::new(cut_end(&process.process.label(), 32)),
            Cell::new(process.method),
            Cell::new(format_bytes(process.merged_pages * size)),
            Cell::new(format_bytes(process.zero_pages * size)),
            Cell::new(format!("{prefix}{}", format_bytes(needed))),
            Cell::new(remaining),
            Cell::new(process.longest_stop_ms.map(|ms| format!("{ms:.2} ms")).unwrap_or_default()),
            state,
        ]);
    }
    let mut text = style.render_table(&table);
    if report.processes.len() > max_rows {
        text.push_str(&format!(" and {} more\n", report.processes.len() - max_rows));
    }
    text
}

fn render_limits(guard: &GuardReport, style: TextStyle) -> String {
    let mut table = style.new_table(&["scope", "limit", ">value", ">headroom", ">needed", ">swap headroom", ""]);
    for limit in &guard.limits {
        let fits =
            if limit.fits { colored_cell("fits", Color::Green) } else { colored_cell("does not fit", Color::Red) };
        table.add_row([
            Cell::new(cut_start(&limit.scope, 48)),
            Cell::new(limit.kind),
            Cell::new(Bytes(limit.limit)),
            Cell::new(Bytes(limit.headroom)),
            Cell::new(format_bytes(limit.needed)),
            Cell::new(format_bytes(limit.swap_headroom)),
            fits,
        ]);
    }
    for unknown in &guard.unreadable {
        table.add_row([
            Cell::new(cut_start(&unknown.scope, 48)),
            Cell::new(escape_unprintable(&unknown.reason)),
            Cell::new(""),
            Cell::new(""),
            Cell::new(""),
            Cell::new(""),
            colored_cell("unknown", Color::Red),
        ]);
    }
    style.render_table(&table)
}

fn render_taken(taken: &TakenReport, page_size: u64, style: TextStyle) -> String {
    let mut table = style.new_table(&["", ">predicted", ">found", "by"]);
    let format_measured =
        |value: Option<i64>| value.map_or_else(|| "?".to_owned(), |value| NetBytes(value).to_string());
    let predicted = Bytes(taken.predicted).to_string();
    table.add_row(["memory taken", &predicted, &Bytes(taken.unenrolled).to_string(), "unenrolled parts"]);
    table.add_row(["", "", &format_measured(taken.anon_pages), "AnonPages, all processes"]);
    table.add_row(["", "", &format_measured(taken.mem_available), "MemAvailable, all processes"]);
    let copies = taken.copies.map_or_else(|| "?".to_owned(), format_number);
    table.add_row(["pages copied", &format_number(taken.copies_predicted), &copies, "cow_ksm, all processes"]);
    let mut text = style.render_table(&table);
    if let Some(copies) = taken.copies.filter(|copies| *copies < taken.copies_predicted) {
        let pages = taken.copies_predicted - copies;
        text.push_str(&style.format_paragraph(
            &format!(
                "{} fewer copies: {} of pages were written, unmapped or left merged.",
                format_number(pages),
                Bytes(pages * page_size)
            ),
            2,
        ));
    }
    text
}

fn build_notes(report: &UnmergeReport, remedy: &str) -> Vec<String> {
    let mut notes = Vec::new();
    let refused = report.outcome == UnmergeOutcomeKind::Refused
        || (report.outcome == UnmergeOutcomeKind::Planned && report.guard.verdict != GuardVerdict::Fits);
    if refused {
        let batches = report.batches;
        notes.push(format!(
            "`--staged` would unenroll {} of {} parts now; `--max-wait TIME` waits for memory; `--force` skips the check.",
            format_number(batches.fitting),
            format_number(batches.total)
        ));
    }
    let is_unmerged_at_once = |process: &&UnmergedProcessReport| {
        process.method == UnenrollMethodKind::Qmp
            && matches!(process.state, UnenrollState::Planned | UnenrollState::Untouched)
    };
    if (refused || report.stopped_by_guard.is_some())
        && let Some(guest) = report.processes.iter().find(is_unmerged_at_once)
    {
        notes.push(format!(
            "{} is reached by its control socket and is unmerged all at once: `--staged --inject` unenrolls virtual \
             machines from within, range by range.",
            guest.process.label()
        ));
    }
    if report.forced && report.guard.verdict != GuardVerdict::Fits {
        for limit in report.guard.limits.iter().filter(|limit| !limit.fits) {
            notes.push(format!(
                "Forced past {} of {}: {}.",
                limit.kind,
                limit.scope,
                GuardReport::limit_consequence(limit.kind)
            ));
        }
    }
    if report.stopped_by_guard.is_some() {
        notes.push("Stopped before the part that does not fit. Unenrolled parts stay so; run it again later.".into());
    }
    if report.interrupted {
        notes.push("Interrupted: unenrolled parts stay unenrolled.".into());
    }
    for process in &report.processes {
        if let Some(error) = &process.error {
            notes.push(format!("{} ({}): {error}", process.process.pid, process.process.label()));
        }
    }
    let uncovered_pages: u64 = report.processes.iter().filter_map(|process| process.uncovered_pages).sum();
    if uncovered_pages > 0 {
        notes.push(format!(
            "{} of firmware and video memory stay merged: they belong to no memory backend; `--inject` reaches them.",
            Bytes(uncovered_pages * report.page_size)
        ));
    }
    if report.processes.iter().any(|process| process.estimate_reason.is_some()) {
        notes.push(
            "≤ marks upper bounds from the kernel's sums, without freed frames; run as root to count frames.".into(),
        );
    }
    let (mut before, mut unmerged, mut collapsed, mut any_huge) = (0, 0, 0, false);
    for huge in report.processes.iter().filter_map(|process| process.huge) {
        (before, unmerged, collapsed, any_huge) =
            (before + huge.before, unmerged + huge.unmerged, collapsed + huge.collapsed, true);
    }
    if any_huge {
        notes.push(format!(
            "Huge pages: {} before, {} after unmerging, {} after the collapse.",
            Bytes(before),
            Bytes(unmerged),
            Bytes(collapsed)
        ));
    }
    if let Some(first) = report.unscanned_processes.first() {
        notes.push(format!(
            "{} process{} not seen, the first {} ({}). {remedy}",
            format_number(report.unscanned_processes.len() as u64),
            if report.unscanned_processes.len() == 1 { "" } else { "es" },
            first.pid,
            first.detail
        ));
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::unmerge::BatchesReport;
    use pagefold_base::guard::{FrameNeed, LimitKind, LimitScope, MemoryHeadroom, MemoryLimit, check_memory};
    use pagefold_base::{PageSize, Pages};
    use pagefold_output::wire::{ProcessInfo, VmInfo};

    /// A report on 16 MiB that are needed in `/vms`, of which half is available.
    fn sample_report(outcome: UnmergeOutcomeKind, swap: u64, forced: bool) -> UnmergeReport {
        let limit = |scope, kind, headroom| MemoryLimit {
            scope,
            kind,
            limit: Bytes(1 << 30),
            headroom: Bytes(headroom),
            swap_headroom: Bytes(swap),
        };
        let limits = vec![
            limit(LimitScope::Host, LimitKind::Available, 1 << 30),
            limit(LimitScope::Cgroup("/vms\u{1b}[2J".to_owned()), LimitKind::High, 8 << 20),
        ];
        let need = FrameNeed::for_cgroup(Some("/vms\u{1b}[2J"), Pages(4096), Pages(1024));
        let page = PageSize::new(4096).unwrap();
        UnmergeReport {
            schema: "pagefold.unmerge/1",
            host: "this host".to_owned(),
            page_size: 4096,
            seconds: 0.0,
            outcome,
            guard: GuardReport::from_judgement(&check_memory(
                &need,
                &MemoryHeadroom { limits, unreadable: Vec::new() },
                page,
            )),
            batches: BatchesReport { total: 3, fitting: 1 },
            stopped_by_guard: None,
            forced,
            interrupted: false,
            taken: None,
            processes: Vec::new(),
            not_enrolled: 2,
            unscanned_processes: Vec::new(),
        }
    }

    #[test]
    fn refusal_names_the_limit_and_remedies() {
        let text = render(&sample_report(UnmergeOutcomeKind::Refused, 0, false), 10, "", TextStyle::default());
        let text = text.replace('\n', " ");
        assert!(text.contains("memory.high of /vms\\u{1b}[2J leaves 8.00 MiB. Nothing was changed."), "{text}");
        assert!(text.contains("`--staged` would unenroll 1 of 3 parts now"), "{text}");
        let text = render(&sample_report(UnmergeOutcomeKind::Refused, 8 << 20, false), 10, "", TextStyle::default())
            .replace('\n', " ");
        assert!(text.contains("the rest would be swapped out"), "{text}");
    }

    #[test]
    fn guest_report_offers_staged_unmerge() {
        let guest = |state| UnmergedProcessReport {
            process: ProcessInfo {
                pid: 7,
                start_time: 9,
                comm: "qemu".to_owned(),
                uid: None,
                domain: None,
                cgroup: None,
                vm: Some(VmInfo { monitor: "qemu", name: Some("web1".to_owned()), memory_bytes: None }),
                container: None,
                job: None,
                rank: None,
            },
            method: UnenrollMethodKind::Qmp,
            merged_pages: 4096,
            zero_pages: 0,
            freed_frames: 0,
            estimate_reason: None,
            batches: 1,
            batches_unenrolled: 0,
            state,
            merged_pages_after: None,
            zero_pages_after: None,
            uncovered_pages: None,
            longest_stop_ms: None,
            huge: None,
            error: None,
        };
        let offers_staged = |outcome, stopped: bool, state| {
            let mut report = sample_report(outcome, 0, false);
            report.stopped_by_guard = stopped.then(|| report.guard.clone());
            report.processes = vec![guest(state)];
            let text = render(&report, 10, "", TextStyle::default());
            text.split_whitespace().collect::<Vec<_>>().join(" ").contains(
                "web1 is reached by its control socket and is unmerged all at once: `--staged --inject` unenrolls \
                 virtual machines from within",
            )
        };
        assert!(offers_staged(UnmergeOutcomeKind::Refused, false, UnenrollState::Planned));
        assert!(offers_staged(UnmergeOutcomeKind::Partial, true, UnenrollState::Untouched));
        assert!(!offers_staged(UnmergeOutcomeKind::Partial, true, UnenrollState::Unenrolled), "the part fitted");
        assert!(!offers_staged(UnmergeOutcomeKind::Done, false, UnenrollState::Unenrolled));
    }

    #[test]
    fn forced_report_states_the_risks() {
        let text = render(&sample_report(UnmergeOutcomeKind::Done, 0, true), 10, "", TextStyle::default());
        assert!(text.contains("Forced past memory.high of /vms\\u{1b}[2J: its processes are throttled."), "{text}");
        assert!(!text.contains("MemAvailable of"), "{text}");
    }
}
