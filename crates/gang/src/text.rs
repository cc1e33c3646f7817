//! The report as text for the terminal.

use crate::wire::{EndReason, GangRunReport};
use pagefold_output::text::{TextStyle, escape_unprintable};
use std::fmt::Write;

/// Prints what the scheduler did.
pub fn run_report(report: &GangRunReport, style: TextStyle) -> String {
    let mut text = String::new();
    let end = match report.end {
        EndReason::Requested => "ended as requested",
        EndReason::NoVms => "ended because no selected virtual machine runs any more",
        EndReason::DoesNotHelp => "ended because it does not help this load",
        EndReason::Ejected => "was removed by the kernel",
    };
    let seconds = report.scheduled_ms as f64 / 1000.0;
    let _ = writeln!(text, "Policy {}: scheduled for {seconds:.1} s, {end}.", report.policy);
    if report.handed_over_ms > 0 {
        let seconds = report.handed_over_ms as f64 / 1000.0;
        let _ = writeln!(
            text,
            "The kernel's own scheduler had the virtual machines for {seconds:.1} s, in which a single one had several \
             runnable vCPUs, and more of them than CPUs."
        );
    }
    if let Some(why) = &report.ejection {
        let _ = writeln!(text, "The kernel: {}", escape_unprintable(why));
    }
    if let Some(trial) = &report.trial {
        let verdict = if trial.helps { "helps" } else { "does not help" };
        let (metric, benefit) = (escape_unprintable(&trial.metric), trial.benefit);
        let _ = writeln!(
            text,
            "Compared with the kernel's scheduler it {verdict}: {benefit:.2} times as much work, by `{metric}`."
        );
    }
    let headings =
        ["virtual machine", "PID", "vCPUs", "weight", "home node", "CPU s", "slots", "yields", "directed yields"];
    let mut table = style.new_table(&headings);
    for gang in &report.gangs {
        table.add_row([
            escape_unprintable(&gang.name).to_string(),
            gang.pid.to_string(),
            gang.vcpus.to_string(),
            gang.weight.to_string(),
            gang.home_node.map_or_else(|| "-".to_owned(), |node| node.to_string()),
            format!("{:.2}", gang.cpu_ms as f64 / 1000.0),
            gang.slots.to_string(),
            gang.yields.to_string(),
            gang.directed_yields.to_string(),
        ]);
    }
    let _ = writeln!(text, "{}", style.render_table(&table));
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{GangReport, VcpuPolicy};

    #[test]
    fn report_names_end_and_gangs() {
        let gang = GangReport {
            pid: 7,
            name: "db\u{1b}".to_owned(),
            vcpus: 4,
            weight: 100,
            home_node: Some(31),
            cpu_ms: 1500,
            slots: 3,
            yields: 0,
            directed_yields: 0,
        };
        let report = GangRunReport {
            policy: VcpuPolicy::ThrottledYield,
            end: EndReason::Ejected,
            ejection: Some("runnable task stall".to_owned()),
            scheduled_ms: 2500,
            handed_over_ms: 700,
            rotations: 0,
            ordinary_slots: 0,
            gangs: vec![gang],
            trial: None,
        };
        let text = run_report(&report, TextStyle { width: 100, color: false });
        for expected in
            ["throttled-yield: scheduled for 2.5 s, was removed", "for 0.7 s", "runnable task stall", "1.50", "31"]
        {
            assert!(text.contains(expected), "{text}");
        }
        assert!(!text.contains('\u{1b}'), "{text}");
    }
}
