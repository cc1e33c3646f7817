//! The plan and the outcome of a merge as text.

use crate::wire::merge::{
    DifferenceFigure, FailedChangeKind, MergeEndKind, MergeReport, OutcomeReport, PlanReport, TargetReport,
    TemporaryUnenrollReport,
};
use pagefold_base::Bytes;
use pagefold_census::text::unseen;
use pagefold_output::text::{
    COUNTED_BY_KSM, TextStyle, ZEROS_IN_SPLIT_HUGE_PAGES, cut_end, escape_unprintable, format_bar, format_bytes,
    format_net, format_number, format_percent, format_split_zeros,
};
use std::cmp::Reverse;
use std::fmt::Write;

/// Columns of the bar chart.
const BAR_COLUMNS: usize = 12;

/// Maximum number of named processes whose own enrollment is suspended.
const MAX_NAMED_UNENROLLED: usize = 4;

/// Maximum number of lines about ranges that could not be enrolled.
const MAX_FAILED_CHANGE_LINES: usize = 5;

/// The whole report. Tables have at most `max_rows` rows.
pub fn render(report: &MergeReport, max_rows: usize, remedy: &str, style: TextStyle) -> String {
    let mut text = style.format_paragraph(&render_title(report), 0);
    if let Some(outcome) = &report.outcome {
        text.push('\n');
        text.push_str(&render_comparison(report, outcome, style));
        text.push_str(&render_costs(outcome, report.page_size, style));
    }
    text.push_str(&render_targets(report, max_rows, style));
    if report.outcome.is_none() && !report.plan.targets.is_empty() {
        text.push_str(&render_forecast(&report.plan, style));
    }
    text.push_str(&render_notes(report, max_rows, remedy, style));
    text
}

fn format_process_count(count: u64) -> String {
    format!("{} process{}", format_number(count), if count == 1 { "" } else { "es" })
}

fn render_title(report: &MergeReport) -> String {
    let plan = &report.plan;
    let scanned = format_process_count(report.processes);
    let Some(outcome) = &report.outcome else {
        if plan.targets.is_empty() {
            return format!("Nothing to merge: merging has no net savings in the {scanned} of {}.", report.host);
        }
        return format!(
            "Plan for {}: {} net savings in {} of {scanned}. Nothing was changed.",
            report.host,
            format_net(plan.savings.net),
            format_number(plan.targets.len() as u64),
        );
    };
    let end = match outcome.end {
        MergeEndKind::Settled => "Finished: nothing more merges.".to_owned(),
        MergeEndKind::Deadline => "Ended by its deadline before it settled.".to_owned(),
        MergeEndKind::Stopped => "Stopped before it settled; merged pages stay merged.".to_owned(),
        MergeEndKind::Yielded => {
            format!("Yielded: {}.", outcome.yielded_to.as_deref().unwrap_or("another program drives KSM"))
        }
    };
    format!(
        "Merged {} of {}: {} saved, {} net of metadata{}. {end}",
        format_process_count(plan.targets.len() as u64),
        report.host,
        Bytes(outcome.saved),
        format_net(outcome.net),
        format_split_zeros(outcome.saved_by_splitting),
    )
}

fn format_seconds(seconds: f64) -> String {
    if seconds < 10.0 { format!("{seconds:.2} s") } else { format!("{seconds:.1} s") }
}

fn format_optional_seconds(seconds_used: Option<f64>) -> String {
    seconds_used.map_or_else(|| "?".to_owned(), format_seconds)
}

/// Predicted and measured figures side by side.
fn render_comparison(report: &MergeReport, outcome: &OutcomeReport, style: TextStyle) -> String {
    let plan = &report.plan;
    let mut table = style.new_table(&["", ">predicted", ">measured", ">ratio"]);
    let metadata = outcome.saved as i64 - outcome.net;
    table.add_row([
        "saved, gross".to_owned(),
        Bytes(plan.savings.gross).to_string(),
        Bytes(outcome.saved).to_string(),
        format_percent(outcome.saved, plan.savings.gross),
    ]);
    if outcome.saved_by_splitting > 0 {
        let parts = [outcome.saved - outcome.saved_by_splitting, outcome.saved_by_splitting];
        for (name, bytes) in [COUNTED_BY_KSM, ZEROS_IN_SPLIT_HUGE_PAGES].into_iter().zip(parts) {
            table.add_row([format!("  {name}"), String::new(), Bytes(bytes).to_string(), String::new()]);
        }
    }
    table.add_row([
        "metadata".to_owned(),
        Bytes(plan.savings.metadata).to_string(),
        format_net(metadata),
        String::new(),
    ]);
    table.add_row([
        "saved, net".to_owned(),
        format_net(plan.savings.net),
        format_net(outcome.net),
        format_percent(outcome.net.max(0) as u64, plan.savings.net.max(0) as u64),
    ]);
    table.add_row([
        "CPU of ksmd".to_owned(),
        format_seconds(plan.ksmd_seconds),
        format_optional_seconds(outcome.ksmd_seconds),
        String::new(),
    ]);
    let huge = |bytes: u64| format_number(bytes.div_ceil(report.huge_page_size.max(1)));
    if let (before @ 1.., Some(after)) = (outcome.huge_before, outcome.huge_after) {
        table.add_row([
            "huge pages split".to_owned(),
            format_number(plan.savings.huge_pages_split),
            format!("{} of {}", huge(before.saturating_sub(after)), huge(before)),
            String::new(),
        ]);
    }
    table.add_row([
        "regions added".to_owned(),
        format_number(plan.regions_added),
        format!(
            "{}{}",
            if outcome.regions_added < 0 { "-" } else { "" },
            format_number(outcome.regions_added.unsigned_abs())
        ),
        String::new(),
    ]);
    if let Some(seconds) = outcome.seconds_to_99 {
        let seconds = format_seconds(seconds - outcome.census_seconds);
        table.add_row(["time to 99 %".to_owned(), format_seconds(plan.wall_seconds), seconds, String::new()]);
    }
    if let (Some(before), Some(after)) = (outcome.available_before, outcome.available_after) {
        let change = format_net(after as i64 - before as i64);
        table.add_row(["gain in MemAvailable".to_owned(), format_net(plan.savings.net), change, String::new()]);
    }
    let mut text = style.render_table(&table);
    text.push_str(&render_differences(outcome, style));
    text
}

/// The reasons for the differences between predicted and measured.
fn render_differences(outcome: &OutcomeReport, style: TextStyle) -> String {
    let mut table = style.new_table(&["differs in", ">by", "reason"]);
    let mut rows = 0;
    for difference in &outcome.differences {
        let rounded = difference.amount.abs().round() as u64;
        let (name, amount) = match difference.figure {
            DifferenceFigure::Saved => ("saved, gross", Bytes(rounded).to_string()),
            DifferenceFigure::Metadata => ("metadata", Bytes(rounded).to_string()),
            DifferenceFigure::KsmdSeconds => ("CPU of ksmd", format_seconds(difference.amount.abs())),
            DifferenceFigure::Available => ("MemAvailable", Bytes(rounded).to_string()),
        };
        if amount.bytes().any(|digit| (b'1'..=b'9').contains(&digit)) {
            let sign = if difference.amount < 0.0 { '-' } else { '+' };
            table.add_row([name, &format!("{sign}{amount}"), difference.reason]);
            rows += 1;
        }
    }
    if rows > 0 { format!("\n{}", style.render_table(&table)) } else { String::new() }
}

/// Time, CPU, memory, stops.
fn render_costs(outcome: &OutcomeReport, page_size: u64, style: TextStyle) -> String {
    let mut text = String::from("\n");
    let mut line = |sentence: String| text.push_str(&style.format_paragraph(&sentence, 2));
    line(format!(
        "Time from the start: {} to 50 %, {} to 90 %, {} to 99 %; the census took {} of it.",
        format_optional_seconds(outcome.seconds_to_50),
        format_optional_seconds(outcome.seconds_to_90),
        format_optional_seconds(outcome.seconds_to_99),
        format_seconds(outcome.census_seconds),
    ));
    let gib = outcome.saved as f64 / f64::from(1 << 30);
    let cpu = outcome.ksmd_seconds.map(|ksmd| ksmd + outcome.pagefold_seconds);
    line(format!(
        "CPU: {} of ksmd, {} of pagefold{}.",
        format_optional_seconds(outcome.ksmd_seconds),
        format_seconds(outcome.pagefold_seconds),
        cpu.filter(|_| gib > 0.0)
            .map(|cpu| format!("; {} for each GiB saved", format_seconds(cpu / gib)))
            .unwrap_or_default(),
    ));
    if let (Some(before), Some(after)) = (outcome.available_before, outcome.available_after) {
        line(format!("MemAvailable: {} before, {} after.", Bytes(before), Bytes(after)));
    }
    if let (Some(median), Some(longest)) = (outcome.stop_median_us, outcome.stop_max_us) {
        line(format!(
            "A thread of a target was stopped {}, {:.0} us at the median, {:.0} us at most.",
            match outcome.stops {
                1 => "once".to_owned(),
                stops => format!("{} times", format_number(stops)),
            },
            median,
            longest
        ));
    }
    if let Some(watched) = &outcome.merged_watch {
        line(format!(
            "Watched {} merged pages of running programs for {} each: {} had a COW break; {} unenrolled as unstable.",
            format_number(watched.merged_pages),
            format_seconds(watched.page_seconds / watched.merged_pages.max(1) as f64),
            format_number(watched.cow_breaks),
            Bytes(watched.unenrolled_pages * page_size),
        ));
    }
    text
}

fn render_targets(report: &MergeReport, max_rows: usize, style: TextStyle) -> String {
    let plan = &report.plan;
    if plan.targets.is_empty() {
        return String::new();
    }
    let page = report.page_size;
    let mut rows: Vec<&TargetReport> = plan.targets.iter().collect();
    rows.sort_by_key(|target| (Reverse(target.merging_pages), target.process.pid));
    let max_pages = rows.first().map_or(1, |target| target.merging_pages.max(1));
    let column = if plan.whole_processes { "by" } else { ">ranges" };
    let mut table = style.new_table(&[">PID", "name", "domain", column, ">to scan", ">to merge", ">zeros", ""]);
    for target in rows.iter().take(max_rows) {
        table.add_row([
            target.process.pid.to_string(),
            cut_end(&target.process.label(), 24),
            cut_end(target.process.domain.as_deref().unwrap_or("?"), 24),
            if plan.whole_processes { target.method.to_owned() } else { format_number(target.ranges.len() as u64) },
            format_bytes(target.pages * page),
            format_bytes(target.merging_pages * page),
            format_bytes(target.zero_pages * page),
            format_bar(target.merging_pages as f64 / max_pages as f64, BAR_COLUMNS),
        ]);
    }
    let mut text = style.format_heading(match &report.outcome {
        None => "Planned enrollment",
        Some(outcome) if outcome.end == MergeEndKind::Settled => "Enrolled",
        Some(_) => "Planned, not all enrolled",
    });
    text.push_str(&style.render_table(&table));
    if rows.len() > max_rows {
        let _ = writeln!(text, "... and {} more (--top)", format_number((rows.len() - max_rows) as u64));
    }
    text
}

fn render_forecast(plan: &PlanReport, style: TextStyle) -> String {
    let mut text = String::from("\n");
    let mut line = |sentence: String| text.push_str(&style.format_paragraph(&sentence, 2));
    line(format!(
        "Should save {} gross, {} net of {} of metadata.",
        Bytes(plan.savings.gross),
        format_net(plan.savings.net),
        Bytes(plan.savings.metadata),
    ));
    line(format!(
        "Should take {} and {} of ksmd's CPU.",
        format_seconds(plan.wall_seconds),
        format_seconds(plan.ksmd_seconds),
    ));
    line(format!(
        "Adds {} memory regions at most; splits {} huge pages.",
        format_number(plan.regions_added),
        format_number(plan.savings.huge_pages_split),
    ));
    text
}

fn render_notes(report: &MergeReport, max_rows: usize, remedy: &str, style: TextStyle) -> String {
    let mut text = render_temporary_unenrolls(report, style);
    text.push_str(&render_skipped(report, max_rows));
    if report.enrolled_may_be_hidden {
        text.push_str(&style.format_paragraph(
            "Other processes may be enrolled that are not visible from here: those outside of a container, those of \
             other users without root, and before Linux 6.14 those that ksmd has not visited. Enrolled pages may merge \
             with theirs. A process that shares a page can tell by the time of a write that another one has the same \
             content.",
            2,
        ));
    }
    if report.foreign_processes > 0 {
        let foreign = if report.foreign_processes == 1 {
            "1 process of another trust domain is".to_owned()
        } else {
            format!("{} of other trust domains are", format_process_count(report.foreign_processes))
        };
        text.push_str(&style.format_paragraph(
            &format!(
                "{foreign} enrolled already. Their contents were left out: a process that shares a page can tell by \
                 the time of a write that another one has the same content. `--across-domains` merges them all the \
                 same."
            ),
            2,
        ));
    }
    if let Some(outcome) = &report.outcome {
        text.push_str(&render_incomplete_changes(outcome, style));
    }
    text.push_str(&unseen(&report.unscanned_processes, remedy));
    if text.is_empty() { text } else { format!("\n{text}") }
}

/// The unprofitable memory that programs enrolled themselves.
fn render_temporary_unenrolls(report: &MergeReport, style: TextStyle) -> String {
    let mut unenrolled: Vec<&TemporaryUnenrollReport> = report.plan.temporary_unenrolls.iter().collect();
    if unenrolled.is_empty() {
        return String::new();
    }
    unenrolled.sort_by_key(|unenroll| Reverse(unenroll.bytes));
    let bytes: u64 = unenrolled.iter().map(|unenroll| unenroll.bytes).sum();
    let describe = |unenroll: &&TemporaryUnenrollReport| {
        format!("{} of {} ({})", Bytes(unenroll.bytes), unenroll.pid, escape_unprintable(&unenroll.comm))
    };
    let mut named: Vec<String> = unenrolled.iter().take(MAX_NAMED_UNENROLLED).map(describe).collect();
    if unenrolled.len() > MAX_NAMED_UNENROLLED {
        named.push(format!("and {} more", format_number((unenrolled.len() - MAX_NAMED_UNENROLLED) as u64)));
    }
    style.format_paragraph(
        &format!(
            "Merging does not pay in {} that programs enrolled; they {} unenrolled while ksmd works: {}.",
            Bytes(bytes),
            if report.outcome.is_some() { "were" } else { "would be" },
            named.join(", "),
        ),
        2,
    )
}

/// The processes that would not be enrolled, and those that were left out on purpose.
fn render_skipped(report: &MergeReport, max_rows: usize) -> String {
    let mut text = String::new();
    if report.outcome.is_none() {
        for target in report.plan.targets.iter().take(max_rows) {
            let Some(why) = &target.error else { continue };
            let (pid, label) = (target.process.pid, target.process.label());
            let _ = writeln!(
                text,
                "Would not be enrolled: {pid} ({}): {}.",
                escape_unprintable(&label),
                escape_unprintable(why)
            );
        }
    }
    for skipped in report.plan.skipped.iter().take(max_rows) {
        let _ = writeln!(
            text,
            "Not enrolled: {} ({}): {}.",
            skipped.pid,
            escape_unprintable(&skipped.comm),
            escape_unprintable(&skipped.why)
        );
    }
    text
}

/// What else was enrolled, and which changes were not made or not undone.
fn render_incomplete_changes(outcome: &OutcomeReport, style: TextStyle) -> String {
    let mut text = String::new();
    if let Some(count @ 1..) = outcome.other_enrolled_processes {
        let others =
            if count == 1 { "1 process is".to_owned() } else { format!("{} are", format_process_count(count)) };
        text.push_str(&style.format_paragraph(
            &format!(
                "Outside of the plan {others} enrolled too: KSM has one tree and may have merged their pages with these."
            ),
            2,
        ));
    }
    for failed in outcome.failed_changes.iter().take(MAX_FAILED_CHANGE_LINES) {
        let range = match (failed.start, failed.end) {
            (Some(start), Some(end)) => format!(" {start:08x}-{end:08x}"),
            _ => String::new(),
        };
        let comm = escape_unprintable(&failed.comm);
        let action = match failed.change {
            FailedChangeKind::Unenroll => "unenrolled",
            FailedChangeKind::Enroll => "enrolled",
        };
        let _ = writeln!(text, "Not {action}: {} ({comm}){range}: {}.", failed.pid, escape_unprintable(&failed.why));
    }
    if outcome.failed_changes.len() > MAX_FAILED_CHANGE_LINES {
        let _ = writeln!(
            text,
            "... and {} more ranges not enrolled or unenrolled (--json)",
            outcome.failed_changes.len() - MAX_FAILED_CHANGE_LINES
        );
    }
    for failed_undo in &outcome.failed_undos {
        let _ = writeln!(text, "Not restored: {}.", escape_unprintable(failed_undo));
    }
    text
}
