//! The daemon's status as text.

use crate::wire::{PlacementReport, ProcessDiscovery, StatusReport, TrackedProcessReport, TrackingState};
use pagefold_base::Bytes;
use pagefold_output::text::{TextStyle, cut_end, escape_unprintable, format_bytes, format_net, format_split_zeros};

/// The whole status, with at most this many processes and decisions.
pub fn render(status: &StatusReport, max_rows: usize, style: TextStyle) -> String {
    let mut text = style.format_paragraph(
        &format!(
            "Daemon {} ({}), {}: {}.",
            status.pid,
            json_word(&status.mode),
            json_word(&status.state),
            escape_unprintable(&status.why)
        ),
        2,
    );
    let or_unknown = |value: Option<u64>| value.map_or_else(|| "unknown".to_owned(), |value| Bytes(value).to_string());
    let saved = &status.saved;
    text.push_str(&style.format_paragraph(
        &format!(
            "Saved on this host: {} gross, {} of metadata, {} net{}. Available: {} of {}.",
            or_unknown(saved.gross),
            or_unknown(saved.metadata),
            saved.net.map_or_else(|| "unknown".to_owned(), format_net),
            format_split_zeros(saved.split_zero.unwrap_or(0)),
            or_unknown(status.memory.available),
            or_unknown(status.memory.total)
        ),
        2,
    ));
    let cpu_usage = |name: &str, usage: Option<crate::wire::CpuUsageReport>| match usage {
        Some(usage) => format!("{name} {:.1} s, {:.1} % of the last minute", usage.seconds, usage.percent),
        None => format!("{name} unknown"),
    };
    text.push_str(&style.format_paragraph(
        &format!(
            "CPU: {}; {}; limit {:.0} % on average, {:.1} of {:.0} s left for a burst.",
            cpu_usage("ksmd", status.cpu.ksmd),
            cpu_usage("pagefold", status.cpu.pagefold),
            status.bounds.cpu_percent,
            status.bounds.burst_available_seconds,
            status.bounds.burst_seconds
        ),
        2,
    ));
    let passes = &status.passes;
    text.push_str(&style.format_paragraph(
        &format!(
            "Passes: {}, of which {} merged: {} net predicted, {} net measured. New programs are {}.",
            passes.passes,
            passes.merges,
            Bytes(passes.predicted),
            format_net(passes.measured),
            match status.process_discovery {
                ProcessDiscovery::ProcConnector => "reported by the kernel",
                ProcessDiscovery::Polling => "found by polling",
            }
        ),
        2,
    ));
    if let Some(placement) = &status.placement {
        text.push_str(&style.format_paragraph(&placement_sentences(placement, status.time), 2));
    }
    text.push_str(&render_tracked_processes(status, max_rows, style));
    text.push_str(&render_decisions(status, max_rows, style));
    text
}

fn placement_sentences(placement: &PlacementReport, now: f64) -> String {
    let last_plan = placement.last_plan.as_ref().map_or_else(String::new, |plan| {
        format!(" Last plan {:.0} s ago: {}.", (now - plan.time).max(0.0), escape_unprintable(&plan.result))
    });
    format!(
        "NUMA placement ({}), {}: {}.{last_plan} Virtual machines since the start: {}.",
        json_word(&placement.mode),
        json_word(&placement.state),
        escape_unprintable(&placement.why),
        format_placement_totals(placement)
    )
}

/// How many virtual machines were placed since the start, what failed, and how much memory was moved.
pub fn format_placement_totals(placement: &PlacementReport) -> String {
    let mut text = format!("{} placed", placement.placed_machines);
    if placement.failed_machines > 0 {
        text.push_str(&format!(", {} given up", placement.failed_machines));
    }
    if placement.failed_undos > 0 {
        text.push_str(&format!(", {} changes not undone", placement.failed_undos));
    }
    text.push_str(&format!(", {} moved", Bytes(placement.moved_bytes)));
    if placement.placed_gain.net.round() != 0.0 {
        text.push_str(&format!(", net gain {:.0} CPU s/h", placement.placed_gain.net));
    }
    text
}

/// The tracked processes with the largest resident memory.
fn render_tracked_processes(status: &StatusReport, max_rows: usize, style: TextStyle) -> String {
    if status.tracked_processes.is_empty() {
        return String::new();
    }
    let mut text = style.format_heading("Tracked processes");
    let mut table =
        style.new_table(&[">pid", "name", "trust domain", ">resident", ">merged", ">footprint", "state", "why"]);
    for process in status.tracked_processes.iter().take(max_rows) {
        table.add_row(process_row(process));
    }
    text.push_str(&style.render_table(&table));
    let omitted = status.tracked_processes.len().saturating_sub(max_rows) as u64 + status.tracked_processes_omitted;
    if omitted > 0 {
        text.push_str(&format!("and {omitted} more\n"));
    }
    text.push_str(&style.format_paragraph(FOOTPRINT_NOTE, 2));
    text
}

/// The latest decisions.
fn render_decisions(status: &StatusReport, max_rows: usize, style: TextStyle) -> String {
    if status.decisions.is_empty() {
        return String::new();
    }
    let mut text = style.format_heading("Latest decisions");
    let mut table = style.new_table(&[">ago", "what", "process", "why"]);
    for decision in status.decisions.iter().take(max_rows) {
        let ago = (status.time - decision.time_ms as f64 / 1e3).max(0.0);
        let prefix = if decision.carried_out { "" } else { "not carried out: " };
        let kind = decision.kind.clone();
        let takes_no_action = matches!(kind.as_str(), "skip" | "refuse" | "idle" | "yield");
        let why = format!("{}{}", if takes_no_action { "" } else { prefix }, escape_unprintable(&decision.explanation));
        table.add_row([format!("{ago:.0} s"), kind, cut_end(&decision.subject, 40), why]);
    }
    text.push_str(&style.render_table(&table));
    text
}

/// Explanation of footprints.
const FOOTPRINT_NOTE: &str = "Footprints are fair shares: each page divided by the processes that map it. ~ marks \
                          estimates before the first reading: resident memory less what merging saves, by the host's \
                          mean per merged page.";

fn process_row(process: &TrackedProcessReport) -> [String; 8] {
    let or_unknown = |value: Option<u64>| value.map_or_else(|| "?".to_owned(), format_bytes);
    [
        process.pid.to_string(),
        cut_end(&process.label, 30),
        cut_end(&process.domain, 24),
        or_unknown(process.resident),
        or_unknown(process.merged),
        process
            .footprint
            .map_or_else(|| "?".to_owned(), |value| format_footprint(value, process.footprint_age_seconds)),
        state_label(process.state).to_owned(),
        escape_unprintable(&process.why).into_owned(),
    ]
}

/// A footprint, marked if it is an estimate.
pub fn format_footprint(value: u64, age_seconds: Option<u64>) -> String {
    let mark = if age_seconds.is_none() { "~" } else { "" };
    format!("{mark}{}", format_bytes(value))
}

/// The name in JSON.
pub fn json_word<T: serde::Serialize>(value: &T) -> String {
    serde_json::to_value(value).ok().and_then(|value| Some(value.as_str()?.to_owned())).unwrap_or_default()
}

fn state_label(state: TrackingState) -> &'static str {
    match state {
        TrackingState::Arriving => "arriving",
        TrackingState::Tracked => "tracked",
        TrackingState::Merged => "merged",
        TrackingState::BackedOff => "backed off",
        TrackingState::Excluded => "excluded",
        TrackingState::Unenrolled => "unenrolled",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{LastPlanReport, PlacementStateName};

    #[test]
    fn placement_is_described_with_its_last_plan_and_failures() {
        let mut placement = PlacementReport {
            state: PlacementStateName::Placing,
            why: "1.00 GiB of 2.00 GiB moved, now web-7".to_owned(),
            placed_machines: 1,
            ..PlacementReport::default()
        };
        assert_eq!(
            placement_sentences(&placement, 100.0),
            "NUMA placement (advise), placing: 1.00 GiB of 2.00 GiB moved, now web-7. Virtual machines since the \
             start: 1 placed, 0 B moved."
        );
        placement.last_plan = Some(LastPlanReport { time: 40.0, result: "interrupted".to_owned() });
        (placement.placed_machines, placement.failed_machines, placement.failed_undos) = (0, 3, 2);
        placement.placed_gain.net = 0.4;
        assert_eq!(
            placement_sentences(&placement, 100.0),
            "NUMA placement (advise), placing: 1.00 GiB of 2.00 GiB moved, now web-7. Last plan 60 s ago: interrupted. \
             Virtual machines since the start: 0 placed, 3 given up, 2 changes not undone, 0 B moved."
        );
    }
}
