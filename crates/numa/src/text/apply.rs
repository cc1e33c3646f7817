//! What `numa apply` did, and what `numa verify` found, as text for the terminal.

use super::format_machine_count;
use super::map::{NAME_COLUMNS, render_unscanned, right};
use super::plan::render_not_measured;
use crate::wire::apply::{MachineApplyReport, MachineVerifyReport, NumaApplyReport, NumaVerifyReport, PartNodesReport};
use comfy_table::Cell;
use pagefold_base::count_text;
use pagefold_output::text::{TextStyle, cut_end, escape_unprintable, format_bytes, format_number, format_percent};
use std::fmt::Write;

/// Renders what was done. `remedy` says what to do about processes that could not be read, and
/// `next_commands` what to do with a placement that was made.
pub fn render_apply(report: &NumaApplyReport, (remedy, next_commands): (&str, &str), style: TextStyle) -> String {
    let mut text = style.format_paragraph(&render_apply_title(report), 0);
    if !report.machines.is_empty() {
        text.push('\n');
        text.push_str(&render_machines(report, style));
    }
    for machine in &report.machines {
        for note in machine_notes(machine, report.page_size) {
            let name = escape_unprintable(&machine.name);
            text.push_str(&style.format_paragraph(&format!("{name} ({}): {note}", machine.pid), 4));
        }
    }
    for node in &report.crowded_nodes {
        let verb = if report.dry_run { "would run" } else { "run" };
        let note = format!(
            "Node {}: {:.1} vCPUs {verb} there, more than the {:.1} that it has room for.",
            node.node, node.vcpus, node.vcpu_capacity
        );
        text.push_str(&style.format_paragraph(&note, 4));
    }
    for failed in &report.failed_undos {
        text.push_str(&style.format_paragraph(&format!("Not undone: {}", escape_unprintable(failed)), 4));
    }
    text.push_str(&render_not_measured(&report.hotness_source, style));
    if matches!(report.outcome, "done" | "partial" | "memory_pressure") && !report.machines.is_empty() {
        let _ = writeln!(text, "\n{next_commands}");
    }
    text.push_str(&render_unscanned(report.unscanned_processes.len(), remedy, style));
    text
}

fn render_apply_title(report: &NumaApplyReport) -> String {
    let machines = format_machine_count(report.machines.len());
    if report.machines.is_empty() {
        return format!("Nothing on {} is worth moving. Nothing was changed.", report.host);
    }
    let moved = format_bytes(report.moved_pages * report.page_size);
    let speed = (report.moved_pages * report.page_size) as f64 / report.moving_seconds.max(1e-9);
    let moved = format!("{moved} moved in {:.1} s ({}/s)", report.moving_seconds, format_bytes(speed as u64));
    match report.outcome {
        "planned" => {
            let pages: u64 = report.machines.iter().map(|machine| machine.planned_pages).sum();
            let bytes = format_bytes(pages * report.page_size);
            format!("Would place {machines} and move {bytes} of memory. Nothing was changed.")
        }
        "done" => format!("Placed {machines}: {moved}."),
        "interrupted" => "Interrupted. All changes were undone.".to_owned(),
        "memory_pressure" => {
            format!("Stopped, because tasks of the host wait for memory. {moved}. Try again later, or undo.")
        }
        _ => format!("Placed {machines} in part: {moved}. The notes below name what stays."),
    }
}

fn render_machines(report: &NumaApplyReport, style: TextStyle) -> String {
    let headings =
        [">pid", "name", "nodes", ">threads", ">to move", ">moved", ">remote before", ">predicted", ">measured"];
    let mut table = style.new_table(&headings);
    for machine in &report.machines {
        table.add_row([
            right(machine.pid),
            Cell::new(cut_end(&escape_unprintable(&machine.name), NAME_COLUMNS)),
            Cell::new(format_parts(&machine.parts)),
            right(if report.dry_run { machine.planned_threads } else { machine.placed_threads }),
            right(format_bytes(machine.planned_pages * report.page_size)),
            right(if report.dry_run { "-".to_owned() } else { format_bytes(machine.moved_pages * report.page_size) }),
            right(format_share(machine.remote_share_before)),
            right(format_share(machine.predicted_remote_share)),
            right(format_share(machine.measured_remote_share)),
        ]);
    }
    style.render_table(&table)
}

/// `0`, `0,1` for a machine over two nodes, `0 | 1` for a machine with two virtual nodes.
pub(super) fn format_parts(parts: &[PartNodesReport]) -> String {
    let nodes = |part: &PartNodesReport| part.nodes.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    parts.iter().map(nodes).collect::<Vec<_>>().join(" | ")
}

fn format_share(share: Option<f64>) -> String {
    share.map_or_else(|| "-".to_owned(), |share| format!("{:.1} %", 100.0 * share))
}

fn machine_notes(machine: &MachineApplyReport, page_size: u64) -> Vec<String> {
    let mut notes: Vec<String> =
        machine.failure.iter().map(|why| format!("not finished: {}", escape_unprintable(why))).collect();
    notes.extend(machine.kept_pages.iter().map(|(why, pages)| {
        format!("{} stays on another node: {}", format_bytes(pages * page_size), escape_unprintable(why))
    }));
    notes.extend(machine.split_pages.filter(|&pages| pages > 0).map(|pages| {
        format!(
            "{} is no longer in huge pages: the kernel splits one where the node has no free one",
            format_bytes(pages * page_size)
        )
    }));
    let mut threads: std::collections::BTreeMap<&str, Vec<String>> = std::collections::BTreeMap::new();
    for thread in &machine.kept_threads {
        threads.entry(&thread.why).or_default().push(thread.tid.to_string());
    }
    notes.extend(
        threads.into_iter().map(|(why, tids)| format!("threads {} stay: {}", tids.join(", "), escape_unprintable(why))),
    );
    notes.extend(machine.kept_policies.iter().map(|(why, &bytes)| {
        format!("{} keeps its policy for memory touched later: {}", format_bytes(bytes), escape_unprintable(why))
    }));
    notes
}

/// Renders a verification.
pub fn render_verify(report: &NumaVerifyReport, style: TextStyle) -> String {
    if report.machines.is_empty() {
        return "No machine was placed since boot: `pagefold numa apply` places them.\n".to_owned();
    }
    let count = |state: &str| report.machines.iter().filter(|machine| machine.state == state).count() as u64;
    let running = report.machines.iter().filter(|machine| machine.state != "ended").count();
    let differing = match (count("changed"), count("incomplete")) {
        (0, 0) => "none has changed".to_owned(),
        (changed, 0) => format!("{} changed", format_number(changed)),
        (0, incomplete) => format!("{} incomplete", format_number(incomplete)),
        (changed, incomplete) => {
            format!("{} changed and {} incomplete", format_number(changed), format_number(incomplete))
        }
    };
    let running = format_number(running as u64);
    let title = format!("Placed machines that run on {}: {running}, of which {differing}.", report.host);
    let mut text = style.format_paragraph(&title, 0);
    text.push('\n');
    let headings = [">pid", "name", "nodes", ">elsewhere", ">remote before", ">predicted", ">now", "state"];
    let mut table = style.new_table(&headings);
    for machine in &report.machines {
        table.add_row([
            right(machine.pid),
            Cell::new(cut_end(&escape_unprintable(&machine.name), NAME_COLUMNS)),
            Cell::new(format_parts(&machine.parts)),
            right(format_percent(machine.misplaced_pages, machine.movable_pages)),
            right(format_share(machine.remote_share_before)),
            right(format_share(machine.predicted_remote_share)),
            right(format_share(machine.measured_remote_share)),
            Cell::new(describe_state(machine)),
        ]);
    }
    text.push_str(&style.render_table(&table));
    let _ = writeln!(text, "\n{}", describe_balancing(report));
    if !report.machines.is_empty() {
        text.push_str(
            "To measure what the placement gains: `pagefold numa undo`, then `pagefold ab --before-b 'pagefold numa apply' \
             --after-b 'pagefold numa undo' -- COMMAND`.\n",
        );
    }
    text
}

fn describe_state(machine: &MachineVerifyReport) -> String {
    match machine.state {
        "as_planned" => "as planned".to_owned(),
        "incomplete" => "incomplete: memory stayed elsewhere".to_owned(),
        "changed" if machine.changed_threads.is_empty() => "memory has moved".to_owned(),
        "changed" => format!("CPUs of {} changed", count_text(machine.changed_threads.len(), "thread")),
        state => state.to_owned(),
    }
}

fn describe_balancing(report: &NumaVerifyReport) -> String {
    let faults = match report.local_hint_fault_share {
        Some(share) => format!(
            " Of its page faults on the whole host since the placement, {:.1} % found the page local.",
            100.0 * share
        ),
        None => String::new(),
    };
    match (report.numa_balancing, report.balancing_advice) {
        (None, _) => "This kernel has no NUMA balancing.".to_owned(),
        (Some(_), "turn_off") => format!(
            "NUMA balancing is on, and all virtual machines are placed. Memory with a policy, which `numa apply` sets for \
             large mappings, takes none of its page faults, so turning it off gains little.{faults} `echo 0 > \
             /proc/sys/kernel/numa_balancing` turns it off."
        ),
        (Some(_), "turn_on") => "NUMA balancing is off, and some virtual machines read remote memory: place them, or \
                                 `echo 1 > /proc/sys/kernel/numa_balancing`."
            .to_owned(),
        (Some(true), _) => {
            format!(
                "NUMA balancing is on: keep it while virtual machines are not placed or read remote memory.{faults}"
            )
        }
        (Some(false), _) => "NUMA balancing is off.".to_owned(),
    }
}
