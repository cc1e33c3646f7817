//! A plan as text for the terminal.

use super::format_machine_count;
use super::map::{NAME_COLUMNS, render_unscanned, right};
use crate::decide::plan::VCPU_TOLERANCE;
use crate::decide::plan::baselines::Baseline;
use crate::wire::plan::{AlternativeReport, HotnessSourceReport, MachinePlanReport, NumaPlanReport, PartPlanReport};
use comfy_table::Cell;
use pagefold_base::IdSet;
use pagefold_output::text::{TextStyle, cut_end, escape_unprintable, format_bytes, format_number};
use pagefold_output::wire::GainReport;
use std::fmt::Write;

/// Renders the plan. Machines that stay and are not bound are summed up, unless `shows_all`. `remedy` says what to do about processes that
/// could not be read.
pub fn render(report: &NumaPlanReport, shows_all: bool, remedy: &str, style: TextStyle) -> String {
    let mut text = style.format_paragraph(&render_title(report), 0);
    let shown: Vec<&MachinePlanReport> =
        report.machines.iter().filter(|machine| shows_all || machine.moved || machine.bound).collect();
    if !shown.is_empty() {
        text.push('\n');
        text.push_str(&render_machines(report, &shown, style));
    }
    let hidden = report.machines.len() - shown.len();
    if hidden > 0 {
        let _ = writeln!(text, "… and {hidden} that stay (--all-machines shows them)");
    }
    if report.other_machines > 0 {
        let others = format!(
            "Not selected: {} with {:.0} vCPUs, which count where they run now.",
            format_machine_count(report.other_machines),
            report.other_vcpus
        );
        text.push_str(&style.format_paragraph(&others, 0));
    }
    text.push_str(&render_gains(report, &shown, style));
    text.push_str(&style.format_heading("Compared with simple placements"));
    text.push_str(&render_comparison(report, style));
    let weights = match report.hotness_source.figures {
        "working_set" => "CPU time for each page and by the share of the memory that is accessed within 100 ms",
        _ => "CPU time for each page",
    };
    text.push_str(&style.format_paragraph(
        &format!(
            "Remote memory: pages on other nodes than the CPUs that read them, by the shares of their run time. Remote reads: \
             pages times the extra distance from the CPUs that read them, weighted by {weights}; given as \
             memory of the hottest machine at twice the local distance."
        ),
        0,
    ));
    text.push_str(&render_not_measured(&report.hotness_source, style));
    text.push_str(&render_unscanned(report.unscanned_processes.len(), remedy, style));
    text
}

/// Says why the working sets were not measured, though requested.
pub(super) fn render_not_measured(source: &HotnessSourceReport, style: TextStyle) -> String {
    let Some(why) = &source.not_measured else { return String::new() };
    let note = format!("Working sets were not measured: {}. CPU time was used instead.", escape_unprintable(why));
    style.format_paragraph(&note, 0)
}

fn render_title(report: &NumaPlanReport) -> String {
    let moved = report.machines.iter().filter(|machine| machine.moved);
    let bytes: u64 = moved.clone().map(|machine| machine.moved_pages * report.page_size).sum();
    let proof = match report.gap {
        0.0 => "No other choice of the considered placements is better.".to_owned(),
        gap => format!(
            "Another choice of the considered placements could save at most {:.1} % of the cost that can be avoided.",
            100.0 * gap
        ),
    };
    let bound = match report.machines.iter().filter(|machine| machine.bound).count() {
        0 => String::new(),
        1 => " 1 machine stays and is bound to its nodes.".to_owned(),
        count => format!(" {} stay and are bound to their nodes.", format_machine_count(count)),
    };
    match moved.count() {
        0 => format!("Plan for {}: nothing is worth moving.{bound} {proof} Nothing was changed.", report.host),
        count => format!(
            "Plan for {}: move {} of {}, {} of memory.{bound} {proof} Nothing was changed.",
            report.host,
            format_number(count as u64),
            format_machine_count(report.machines.len()),
            format_bytes(bytes),
        ),
    }
}

fn render_machines(report: &NumaPlanReport, shown: &[&MachinePlanReport], style: TextStyle) -> String {
    let is_measured = report.hotness_source.figures == "working_set";
    let mut headings = vec![">pid", "name", ">vCPUs", ">memory", "nodes"];
    headings.extend(is_measured.then_some(">working set"));
    headings.extend([">to move", ">remote reads now", ">planned", "reason"]);
    let mut table = style.new_table(&headings);
    let bytes = |pages: f64| format_bytes((pages * report.page_size as f64).round() as u64);
    let part_cells = |part: &PartPlanReport| {
        let nodes: Vec<String> = part.nodes.iter().map(u32::to_string).collect();
        let mut cells =
            vec![right(format!("{:.0}", part.vcpus)), right(bytes(part.pages as f64)), Cell::new(nodes.join(","))];
        cells.extend(is_measured.then(|| right(format_working_set(part))));
        cells
    };
    for machine in shown {
        let name = cut_end(&escape_unprintable(&machine.process.label()), NAME_COLUMNS);
        let mut row = vec![right(machine.process.pid), Cell::new(name)];
        match &machine.parts[..] {
            [part] => row.extend(part_cells(part)),
            parts => {
                row.extend([
                    right(format!("{:.0}", parts.iter().map(|part| part.vcpus).sum::<f64>())),
                    right(bytes(parts.iter().map(|part| part.pages as f64).sum())),
                    Cell::new(""),
                ]);
                row.extend(is_measured.then(|| Cell::new("")));
            }
        }
        row.extend([
            right(bytes(machine.moved_pages as f64)),
            right(bytes(machine.remote_reads_before)),
            right(bytes(machine.remote_reads_after)),
            Cell::new(match &machine.parts[..] {
                [part] => format!("{}{}", describe_decision(machine), describe_binding(part, "; ")),
                _ => describe_decision(machine),
            }),
        ]);
        table.add_row(row);
        for part in machine.parts.iter().filter(|part| part.virtual_node.is_some()) {
            let name = format!("  virtual node {}", part.virtual_node.unwrap_or_default());
            let mut row = vec![Cell::new(""), Cell::new(name)];
            row.extend(part_cells(part));
            row.extend([Cell::new(""), Cell::new(""), Cell::new(""), Cell::new(describe_binding(part, ""))]);
            table.add_row(row);
        }
    }
    style.render_table(&table)
}

/// The nodes to which a policy binds the memory, if there is one.
fn describe_binding(part: &PartPlanReport, separator: &str) -> String {
    match part.bound_nodes.as_deref() {
        None => String::new(),
        Some("") => format!("{separator}memory bound to no common node"),
        Some(nodes) => format!("{separator}memory bound to {nodes}"),
    }
}

/// `16 MiB (25 %)`, the share of the resident memory.
fn format_working_set(part: &PartPlanReport) -> String {
    match (part.working_set_bytes, part.accessed_share) {
        (Some(bytes), Some(share)) => format!("{} ({:.0} %)", format_bytes(bytes), 100.0 * share),
        _ => String::new(),
    }
}

fn describe_decision(machine: &MachinePlanReport) -> String {
    let bound = if machine.bound { "; is bound there" } else { "" };
    format!("{}{bound}", describe_reason(machine.reason))
}

fn describe_reason(reason: &str) -> &'static str {
    match reason {
        "fixed" => "stays: its memory is pinned",
        "near_pinned_memory" => "its vCPUs come to its memory, which is pinned",
        "no_permitted_node" => "stays: no node is permitted by its CPUs, its cpuset and policies of its memory",
        "already_local" => "stays: all of it is local",
        "no_better_placement" => "stays: no placement is better",
        "not_worth_moving" => "stays: moving gains less than it costs",
        "nodes_full" => "stays: others need the nodes more",
        "near_equal_pages" => "near machines with equal pages",
        "one_node" => "fits on one node",
        "node_per_part" => "each virtual node on a node",
        "less_crowded" => "leaves nodes with more than their share of vCPUs",
        _ => "no single node has room",
    }
}

/// What each machine gains by its placement, and what it would gain by the next best one. Empty if none is shown.
fn render_gains(report: &NumaPlanReport, shown: &[&MachinePlanReport], style: TextStyle) -> String {
    if shown.is_empty() {
        return String::new();
    }
    let mut text = style.format_heading("Gain by resource, CPU s/h");
    let resources = [">memory saved", ">remote reads", ">CPU", ">huge pages", ">crowding", ">net"];
    let headings: Vec<&str> = [">pid", "name"].into_iter().chain(resources).chain(["next best", ">its net"]).collect();
    let mut table = style.new_table(&headings);
    for machine in shown {
        let name = cut_end(&escape_unprintable(&machine.process.label()), NAME_COLUMNS);
        let [place, net] = match &machine.next_best {
            Some(next) => [describe_alternative(next), format_gain(next.gain.net)],
            None => ["none".to_owned(), String::new()],
        };
        let next_best = [Cell::new(place), right(net)];
        table.add_row(
            [right(machine.process.pid), Cell::new(name)].into_iter().chain(gain_cells(&machine.gain)).chain(next_best),
        );
    }
    text.push_str(&style.render_table(&table));
    let gib = |price: f64| price * (1_u64 << 30) as f64 / report.page_size as f64;
    text.push_str(&style.format_paragraph(
        &format!(
            "CPU s/h: CPU seconds that the resource is worth in an hour. A GiB of memory is worth {:.0}, and a GiB of the \
             hottest machine at twice the local distance costs {:.0}. A vCPU above the even share of its node costs {:.0}. A \
             move must gain {:.1}, and {:.1} if `numa apply` or \
             the daemon has placed the machine before.",
            gib(report.prices.saved_page),
            gib(report.prices.remote_page),
            report.prices.crowded_vcpu,
            report.prices.first_min_gain,
            report.prices.min_gain
        ),
        0,
    ));
    text
}

/// `node 1`, `nodes 1,0` for two virtual nodes, `over 0-1` for both together, or `as it is`; and whether there is no room.
fn describe_alternative(next: &AlternativeReport) -> String {
    let first = next.part_nodes.first().map(Vec::as_slice).unwrap_or_default();
    let is_one_place = next.part_nodes.iter().all(|nodes| nodes == first);
    let place = match (first, is_one_place) {
        ([], _) => "as it is".to_owned(),
        ([node], true) => format!("node {node}"),
        (nodes, true) => format!("over {}", nodes.iter().copied().collect::<IdSet>()),
        (_, false) => {
            let nodes: Vec<String> = next.part_nodes.iter().flatten().map(u32::to_string).collect();
            format!("nodes {}", cut_end(&nodes.join(","), NAME_COLUMNS))
        }
    };
    let has_room = next.excess_vcpus < VCPU_TOLERANCE && next.excess_pages == 0;
    if has_room { place } else { format!("{place} (no room)") }
}

/// The cells of a gain: each resource, and the sum.
pub(super) fn gain_cells(gain: &GainReport) -> [Cell; 6] {
    let GainReport { memory_saved, remote_reads, cpu, huge_pages, crowding, net } = *gain;
    [memory_saved, remote_reads, cpu, huge_pages, crowding, net].map(|gain| right(format_gain(gain)))
}

/// `+12.5`; a dot for nothing.
fn format_gain(gain: f64) -> String {
    if gain.abs() < 0.05 { "·".to_owned() } else { format!("{gain:+.1}") }
}

fn render_comparison(report: &NumaPlanReport, style: TextStyle) -> String {
    let mut table = style.new_table(&[
        "placement",
        ">remote memory",
        ">remote reads",
        ">to move",
        ">net gain",
        ">excess vCPUs",
        ">excess memory",
        ">not permitted",
    ]);
    let bytes = |pages: f64| format_bytes((pages * report.page_size as f64).round() as u64);
    let count = |count: f64| if count > 0.0 { format!("{count:.0}") } else { "·".to_owned() };
    let is_numad = |placement: &str| placement == Baseline::Numad.name();
    let label = |placement| if is_numad(placement) { "numad's heuristic" } else { placement };
    for compared in &report.comparison {
        table.add_row([
            label(compared.placement).to_owned(),
            bytes(compared.remote_pages as f64),
            bytes(compared.remote_reads),
            bytes(compared.moved_pages as f64),
            format_gain(compared.gain.net),
            count(compared.excess_vcpus),
            bytes(compared.excess_pages as f64),
            count(compared.unpermitted_machines as f64),
        ]);
    }
    let mut text = style.render_table(&table);
    if report.comparison.iter().any(|compared| compared.unpermitted_machines > 0) {
        text.push_str(&style.format_paragraph(
            "Not permitted: machines on nodes that their CPUs, their cpuset or policies of their memory do not permit.",
            0,
        ));
    }
    text
}
