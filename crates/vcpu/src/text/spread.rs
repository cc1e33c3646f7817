//! What `vcpu spread` did, as text for the terminal.

use super::status::{NAME_COLUMNS, format_co_run, format_stacking};
use crate::wire::spread::VcpuSpreadReport;
use crate::wire::status::{MachineStatusReport, ObservationReport};
use pagefold_output::text::{TextStyle, cut_end, escape_unprintable};

/// Renders what was done. `remedy` says what to do about processes that could not be read.
pub fn render(report: &VcpuSpreadReport, remedy: &str, style: TextStyle) -> String {
    let mut text = style.format_paragraph(&render_title(report), 0);
    let mut table = style.new_table(&[">pid", "name", ">vCPU", ">thread", "from CPUs", "to CPUs"]);
    let mut has_steps = false;
    for machine in &report.machines {
        for step in &machine.vcpus {
            has_steps = true;
            let name = cut_end(&escape_unprintable(&machine.name), NAME_COLUMNS);
            let to = match &step.refused {
                Some(_) => "unchanged".to_owned(),
                None if step.by_libvirt => format!("{} (libvirt)", step.to),
                None => step.to.clone(),
            };
            let numbers = [step.vcpu.to_string(), step.tid.to_string()];
            let [vcpu, tid] = numbers;
            table.add_row([machine.pid.to_string(), name, vcpu, tid, step.from.clone(), to]);
        }
    }
    if has_steps {
        text.push('\n');
        text.push_str(&style.render_table(&table));
    }
    text.push_str(&render_measured(report, style));
    for machine in &report.machines {
        let name = escape_unprintable(&machine.name);
        let refused = machine.vcpus.iter().filter_map(|step| {
            step.refused.as_ref().map(|why| format!("vCPU {} keeps its CPUs: {}", step.vcpu, escape_unprintable(why)))
        });
        let spread = machine.is_spread.then(|| "an earlier spread keeps its vCPUs apart".to_owned());
        for note in machine.conflict.clone().into_iter().chain(refused).chain(spread) {
            text.push_str(&style.format_paragraph(&format!("{name} ({}): {note}.", machine.pid), 4));
        }
    }
    for failed in &report.failed_undos {
        text.push_str(&style.format_paragraph(&format!("Not undone: {}", escape_unprintable(failed)), 4));
    }
    if report.after.is_some() {
        text.push_str("\n`pagefold vcpu spread undo` gives the vCPUs their previous CPUs back.\n");
    }
    if !report.unscanned_processes.is_empty() {
        let count = report.unscanned_processes.len();
        let processes = if count == 1 { "process" } else { "processes" };
        text.push_str(&style.format_paragraph(&format!("{count} {processes} could not be read. {remedy}"), 0));
    }
    text
}

fn render_title(report: &VcpuSpreadReport) -> String {
    let changed =
        report.machines.iter().flat_map(|machine| &machine.vcpus).filter(|step| step.refused.is_none()).count();
    let vcpus = if changed == 1 { "1 vCPU".to_owned() } else { format!("{changed} vCPUs") };
    match report.outcome {
        "interrupted" => "Interrupted. All changes were undone.".to_owned(),
        _ if changed == 0 => format!("No vCPU of {} needs other CPUs. Nothing was changed.", report.host),
        "planned" => format!("Would restrict {vcpus} to other CPUs. Nothing was changed."),
        _ => format!("Restricted {vcpus} to other CPUs, so that siblings are on different run queues."),
    }
}

/// What each machine did before and after, side by side.
fn render_measured(report: &VcpuSpreadReport, style: TextStyle) -> String {
    let Some(after) = &report.after else { return String::new() };
    let mut table = style.new_table(&[">pid", "name", "", ">run", ">ready", ">preempted", "co-run", "stacked"]);
    for machine in &report.before.machines {
        let later =
            after.machines.iter().find(|later| (later.pid, later.start_time) == (machine.pid, machine.start_time));
        let name = cut_end(&escape_unprintable(&machine.name), NAME_COLUMNS);
        table.add_row([vec![machine.pid.to_string(), name, "before".to_owned()], measured_cells(machine)].concat());
        let cells = later.map_or_else(|| vec!["ended".to_owned()], measured_cells);
        table.add_row([vec![String::new(), String::new(), "after".to_owned()], cells].concat());
    }
    let seconds = |observation: &ObservationReport| observation.interval_seconds;
    let heading = format!("Measured for {:.1} s before and {:.1} s after", seconds(&report.before), seconds(after));
    format!("{}{}", style.format_heading(&heading), style.render_table(&table))
}

fn measured_cells(machine: &MachineStatusReport) -> Vec<String> {
    let unknown = || "?".to_owned();
    let usage = machine.usage.as_ref();
    vec![
        usage.map_or_else(unknown, |usage| format!("{:.1} %", usage.run_percent)),
        usage.map_or_else(unknown, |usage| format!("{:.1} %", usage.ready_percent)),
        usage.and_then(|usage| usage.involuntary_switches).map_or_else(unknown, |switches| switches.to_string()),
        format_co_run(machine.co_run),
        format_stacking(machine.stacking),
    ]
}
