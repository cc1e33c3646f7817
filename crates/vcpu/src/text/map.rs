//! The measures of a recorded schedule, as text for the terminal.

use super::status::NAME_COLUMNS;
use crate::wire::map::{MachineMapReport, VcpuMapReport};
use pagefold_output::text::{TextStyle, cut_end, escape_unprintable, format_number};

/// Renders the report.
pub fn render(report: &VcpuMapReport, style: TextStyle) -> String {
    let title = format!(
        "Schedule of {}: {} CPUs for {:.3} s, {} events; CPUs ran tasks in {:.1} % of the time.",
        escape_unprintable(&report.source),
        report.cpus.len(),
        report.seconds,
        format_number(report.events),
        report.busy_percent
    );
    let mut text = style.format_paragraph(&title, 0);
    let mut shares = style.new_table(&[
        "name",
        ">vCPUs",
        ">run",
        ">ready",
        ">co-run",
        ">co-run of 2 or more",
        ">stacked",
        ">beside a free CPU",
    ]);
    let mut times = style.new_table(&[
        "name",
        ">preempted ms",
        ">while a sibling ran",
        ">wake to run µs: median",
        ">95 %",
        ">99 %",
        ">longest",
        ">switches/s",
        ">migrations",
    ]);
    for machine in &report.machines {
        shares.add_row(share_cells(machine));
        times.add_row(time_cells(machine));
    }
    text.push('\n');
    text.push_str(&style.render_table(&shares));
    text.push('\n');
    text.push_str(&style.render_table(&times));
    for note in notes(report) {
        text.push('\n');
        text.push_str(&style.format_paragraph(&note, 0));
    }
    text
}

fn name_cell(machine: &MachineMapReport) -> String {
    cut_end(&machine.name, NAME_COLUMNS)
}

fn share_cells(machine: &MachineMapReport) -> Vec<String> {
    let percent = |percent: f64| format!("{percent:.1} %");
    let optional = |share: Option<f64>| share.map_or_else(|| "-".to_owned(), percent);
    vec![
        name_cell(machine),
        machine.vcpus.to_string(),
        percent(machine.run_percent),
        percent(machine.ready_percent),
        optional(machine.co_run_percent),
        optional(machine.siblings_co_run_percent),
        optional(machine.stacked_percent),
        optional(machine.stacked_beside_free_cpu_percent),
    ]
}

fn time_cells(machine: &MachineMapReport) -> Vec<String> {
    let delays = match machine.wake_to_run {
        Some(delays) if delays.count > 0 => {
            [delays.median_us, delays.p95_us, delays.p99_us, delays.max_us].map(|delay| format!("{delay:.1}"))
        }
        _ => std::array::from_fn(|_| "-".to_owned()),
    };
    let mut cells = vec![
        name_cell(machine),
        format!("{:.1}", machine.preempted_ms),
        format!("{:.1}", machine.preempted_while_sibling_runs_ms),
    ];
    cells.extend(delays);
    cells.extend([format!("{:.1}", machine.switches_per_second), format_number(machine.migrations)]);
    cells
}

fn notes(report: &VcpuMapReport) -> Vec<String> {
    let mut notes = vec![
        "run, ready: share of the vCPUs' time in which they ran, or waited in a run queue. co-run: of the time with a \
         runnable vCPU, or with at least two, the share in which all runnable vCPUs ran. stacked: of the time with at \
         least two, the share in which two were in one run queue."
            .to_owned(),
    ];
    for machine in &report.machines {
        if let Some(spins) = machine.preempted_while_sibling_spins_ms {
            notes.push(format!(
                "{}: vCPUs were preempted for {spins:.1} ms while a sibling spun.",
                escape_unprintable(&machine.name)
            ));
        }
    }
    if !report.has_wakeups {
        notes.push(
            "Wake-ups were not recorded, so ready time after them is missing: record with -e \
             sched:sched_switch,sched:sched_wakeup."
                .to_owned(),
        );
    }
    if report.lost_events > 0 {
        notes.push(format!(
            "The recorder lost {} events, so figures are approximate: record with larger buffers, by --buffer of \
             `pagefold vcpu record` or -m of `perf record`.",
            format_number(report.lost_events)
        ));
    }
    if let Some(missing) = report.cpus_without_events() {
        let cpus = if missing == 1 { "1 online CPU".to_owned() } else { format!("{missing} online CPUs") };
        notes.push(format!("No figure includes {cpus} without an event: idle, or busy with one task all the time."));
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{CpuSchedule, ScheduledVm};
    use crate::sources::RecordedSchedule;

    #[test]
    fn missing_data_is_named_with_a_remedy() {
        let schedule = CpuSchedule {
            start: 0,
            end: 2_000_000,
            cpus: vec![0, 1],
            vms: vec![ScheduledVm { name: "web\u{1b}".to_owned() }],
            lost_events: 7,
            ..CpuSchedule::default()
        };
        let recorded = RecordedSchedule { schedule, online_cpus: Some(3), events: 1, unassigned_vcpus: Vec::new() };
        let text = render(&VcpuMapReport::new("perf.data".to_owned(), &recorded), TextStyle::default());
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        for expected in [
            "perf.data: 2 CPUs for 0.002 s",
            "Wake-ups were not recorded",
            "lost 7 events",
            "includes 1 online CPU without an event",
            "web\\u{1b}",
        ] {
            assert!(text.contains(expected), "{expected}: {text}");
        }
    }
}
