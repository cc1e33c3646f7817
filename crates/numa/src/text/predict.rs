//! What a placement would mean, as text for the terminal.

use super::apply::format_parts;
use super::map::render_unscanned;
use super::plan::gain_cells;
use crate::wire::map::AccessReport;
use crate::wire::predict::{ForbiddenNodeReport, MachinePredictionReport, NodeArrivalReport, NumaPredictReport};
use comfy_table::Cell;
use pagefold_output::text::{TextStyle, escape_unprintable, format_bytes, format_number};

/// Neighbors that are named for each machine.
const MAX_NAMED_NEIGHBORS: usize = 5;

/// Renders the predictions. `remedy` says what to do about processes that could not be read.
pub fn render(report: &NumaPredictReport, remedy: &str, style: TextStyle) -> String {
    let mut text = String::new();
    for (position, machine) in report.machines.iter().enumerate() {
        if position > 0 {
            text.push('\n');
        }
        text.push_str(&render_machine(report, machine, style));
    }
    text.push_str(&style.format_paragraph("\nNothing was changed.", 0));
    text.push_str(&render_unscanned(report.unscanned_processes.len(), remedy, style));
    text
}

fn render_machine(report: &NumaPredictReport, machine: &MachinePredictionReport, style: TextStyle) -> String {
    let name = escape_unprintable(&machine.name);
    let title = format!("{name} ({}) on node {}:", machine.pid, format_parts(&machine.parts));
    let mut table = style.new_table(&["", ">now", ">then"]);
    let share = |access: &Option<AccessReport>| access.as_ref().map(|access| 100.0 * access.remote_share);
    let percent = |value: Option<f64>| value.map_or_else(|| "?".to_owned(), |value| format!("{value:.1} %"));
    let distance = |access: &Option<AccessReport>| {
        access.as_ref().map_or_else(|| "?".to_owned(), |access| format!("{:.2}", access.relative_distance))
    };
    table.add_row([
        Cell::new("remote accesses"),
        Cell::new(percent(share(&machine.accesses_before))),
        Cell::new(percent(share(&machine.accesses_after))),
    ]);
    table.add_row([
        Cell::new("mean distance"),
        Cell::new(distance(&machine.accesses_before)),
        Cell::new(distance(&machine.accesses_after)),
    ]);
    table.add_row([
        Cell::new("copies with merge_across_nodes=0"),
        Cell::new(format_bytes(machine.copies_before_bytes)),
        Cell::new(format_bytes(machine.copies_after_bytes)),
    ]);
    let mut text = style.format_heading(&title).trim_start_matches('\n').to_owned();
    text.push_str(&style.render_table(&table));
    let mut gains = style.new_table(&[
        "gain in CPU s/h",
        ">memory saved",
        ">remote reads",
        ">CPU",
        ">huge pages",
        ">crowding",
        ">net",
    ]);
    gains.add_row([Cell::new("")].into_iter().chain(gain_cells(&machine.gain)));
    text.push_str(&style.render_table(&gains));
    let forbidden = machine.forbidden_nodes.iter().map(forbidden_line);
    for line in forbidden.chain(machine_lines(report, machine)) {
        text.push_str(&style.format_paragraph(&line, 4));
    }
    text
}

fn machine_lines(report: &NumaPredictReport, machine: &MachinePredictionReport) -> Vec<String> {
    let bytes = |pages: u64| format_bytes(pages * report.page_size);
    let kinds = machine.moved_pages;
    if machine.moved_bytes == 0 {
        let mut lines = vec!["All memory that can be moved is there already.".to_owned()];
        lines.extend(machine.nodes.iter().map(cpu_line));
        return lines;
    }
    let mut lines = vec![format!(
        "To move: {} ({} huge, {} hugetlb, {} shared), {:.1} s at {}/s.",
        format_bytes(machine.moved_bytes),
        bytes(kinds.huge),
        bytes(kinds.hugetlb),
        bytes(kinds.shared),
        machine.seconds,
        format_bytes(report.bandwidth),
    )];
    lines.extend(machine.nodes.iter().flat_map(|node| [memory_line(node), cpu_line(node)]));
    if machine.kept_merged_pages + machine.kept_file_pages > 0 {
        lines.push(format!(
            "Stays on other nodes: {} merged by KSM, {} of files.",
            bytes(machine.kept_merged_pages),
            bytes(machine.kept_file_pages)
        ));
    }
    if let Some(pinned) = machine.pinned_pages.filter(|&pinned| pinned > 0) {
        lines.push(format!("Devices pin {}, which stays where it is.", bytes(pinned)));
    }
    if machine.shared_frames > 0 {
        let named = machine.dragged_neighbors.iter().take(MAX_NAMED_NEIGHBORS);
        let mut neighbors: Vec<String> = named
            .map(|neighbor| {
                format!("{} of {} ({})", bytes(neighbor.pages), escape_unprintable(&neighbor.name), neighbor.pid)
            })
            .collect();
        let more = machine.dragged_neighbors.len() - neighbors.len();
        if more > 0 {
            neighbors.push(format!("{more} more"));
        }
        lines.push(format!(
            "It shares {} merged frames. `numa apply` leaves them; a write of cpuset.mems would move with them {}.",
            format_number(machine.shared_frames),
            neighbors.join(", ")
        ));
    }
    lines
}

fn forbidden_line(forbidden: &ForbiddenNodeReport) -> String {
    let ForbiddenNodeReport { node, virtual_node, reason, .. } = forbidden;
    match virtual_node {
        Some(id) => format!("Virtual node {id} may not use node {node} now: {reason}."),
        None => format!("It may not use node {node} now: {reason}."),
    }
}

fn memory_line(node: &NodeArrivalReport) -> String {
    let room = node.room_bytes.map_or_else(|| "an unknown amount".to_owned(), format_bytes);
    let mut line =
        format!("Node {} has room for {room}, and {} would come.", node.node, format_bytes(node.arriving_bytes));
    if node.arriving_hugetlb_bytes > 0 {
        line.push_str(&format!(
            " Hugetlb pages: {} free, {} would come.",
            node.free_hugetlb_bytes.map_or_else(|| "an unknown amount".to_owned(), format_bytes),
            format_bytes(node.arriving_hugetlb_bytes)
        ));
    }
    line.push_str(match node.memory_suffices {
        Some(true) => " It fits.",
        Some(false) => " It does not fit.",
        None => "",
    });
    line
}

fn cpu_line(node: &NodeArrivalReport) -> String {
    let verdict = match node.cpus_suffice {
        true if node.vcpus > node.vcpu_capacity => "No more than now.",
        true => "They fit.",
        false => "They do not fit.",
    };
    format!(
        "Node {} may run {:.1} vCPUs, and {:.1} of all machines would run there. {verdict}",
        node.node, node.vcpu_capacity, node.vcpus
    )
}
