//! How vCPUs ran and waited, as text for the terminal.

use crate::wire::status::{
    CoRunReport, MachineStatusReport, OvercommitReport, StackingReport, VcpuStatusReport, VcpuUsageReport,
};
use pagefold_output::text::{TextStyle, cut_end, escape_unprintable, format_number};

/// Columns of the name of a machine.
pub(super) const NAME_COLUMNS: usize = 24;

/// Machines whose vCPUs are listed each, unless all are asked for.
const MAX_DETAILED_MACHINES: usize = 4;

/// Renders the report. `remedy` says what to do about processes that could not be read.
pub fn render(report: &VcpuStatusReport, lists_all_vcpus: bool, remedy: &str, style: TextStyle) -> String {
    let observation = &report.observation;
    let mut text = style.format_paragraph(&render_title(report), 0);
    let mut table = style.new_table(&[
        ">pid",
        "name",
        ">vCPUs",
        ">run",
        ">ready",
        ">ready ms",
        ">idle",
        ">steal seen",
        ">preempted",
        "co-run",
        "stacked",
    ]);
    for machine in &observation.machines {
        let name = cut_end(&escape_unprintable(&machine.name), NAME_COLUMNS);
        let mut row = vec![machine.pid.to_string(), name, machine.vcpus.len().to_string()];
        row.extend(usage_cells(machine.usage.as_ref()));
        row.extend([format_co_run(machine.co_run), format_stacking(machine.stacking)]);
        table.add_row(row);
    }
    text.push('\n');
    text.push_str(&style.render_table(&table));
    let detailed = observation.machines.iter().filter(|machine| machine.usage.is_some());
    let shown = if lists_all_vcpus { usize::MAX } else { MAX_DETAILED_MACHINES };
    for machine in detailed.take(shown) {
        text.push_str(&style.format_heading(&format!(
            "vCPUs of {} ({})",
            escape_unprintable(&machine.name),
            machine.pid
        )));
        text.push_str(&render_vcpus(machine, style));
    }
    for note in notes(report) {
        text.push('\n');
        text.push_str(&style.format_paragraph(&note, 0));
    }
    if !report.unscanned_processes.is_empty() {
        let count = report.unscanned_processes.len();
        let processes = if count == 1 { "process" } else { "processes" };
        text.push('\n');
        text.push_str(&style.format_paragraph(&format!("{count} {processes} could not be read. {remedy}"), 0));
    }
    text
}

fn render_title(report: &VcpuStatusReport) -> String {
    let observation = &report.observation;
    let steal = match observation.host_steal_percent {
        Some(percent) if percent >= 0.1 => format!(" A hypervisor below took {percent:.1} % of all CPU time."),
        _ => String::new(),
    };
    format!(
        "vCPUs of {}: {}. Observed for {:.1} s in {} samples.{steal}",
        report.host,
        format_overcommit(report.overcommit),
        observation.interval_seconds,
        observation.samples,
    )
}

/// `4 vCPUs on 2 CPUs (2.00 for each)`.
fn format_overcommit(overcommit: OvercommitReport) -> String {
    let ratio = overcommit.vcpus_per_cpu.map_or_else(String::new, |ratio| format!(" ({ratio:.2} for each)"));
    let (vcpus, cpus) = (format_number(overcommit.host_vcpus), format_number(overcommit.online_cpus));
    format!("{vcpus} vCPUs on {cpus} CPUs{ratio}")
}

/// Run, ready, ready ms, idle, steal, involuntary switches.
fn usage_cells(usage: Option<&VcpuUsageReport>) -> [String; 6] {
    let unknown = || "?".to_owned();
    let Some(usage) = usage else { return std::array::from_fn(|_| unknown()) };
    let percent = |percent: f64| format!("{percent:.1} %");
    [
        percent(usage.run_percent),
        percent(usage.ready_percent),
        format!("{:.0}", usage.ready_ms),
        percent(usage.idle_percent),
        usage.guest_steal_percent.map_or_else(unknown, percent),
        usage.involuntary_switches.map_or_else(unknown, format_number),
    ]
}

/// `40-75 %`.
pub(super) fn format_co_run(co_run: Option<CoRunReport>) -> String {
    match co_run {
        None => "-".to_owned(),
        Some(share) if share.lowest_percent.round() == share.highest_percent.round() => {
            format!("{:.0} %", share.lowest_percent)
        }
        Some(share) => format!("{:.0}-{:.0} %", share.lowest_percent, share.highest_percent),
    }
}

/// `3 of 20, 2 beside a free CPU`.
pub(super) fn format_stacking(stacking: StackingReport) -> String {
    let StackingReport { samples, stacked_samples, stacked_beside_free_cpu, stacked_by_affinity } = stacking;
    let mut text = format!("{stacked_samples} of {samples}");
    if stacked_beside_free_cpu > 0 {
        text.push_str(&format!(", {stacked_beside_free_cpu} beside a free CPU"));
    }
    if stacked_by_affinity > 0 {
        text.push_str(&format!(", {stacked_by_affinity} by affinity"));
    }
    text
}

fn render_vcpus(machine: &MachineStatusReport, style: TextStyle) -> String {
    let mut table = style.new_table(&[
        ">vCPU",
        ">thread",
        ">on CPU",
        "may run on",
        ">run",
        ">ready",
        ">ready ms",
        ">idle",
        ">steal seen",
        ">preempted",
    ]);
    for vcpu in &machine.vcpus {
        let mut row =
            vec![vcpu.vcpu.to_string(), vcpu.tid.to_string(), vcpu.cpu.to_string(), vcpu.allowed_cpus.clone()];
        row.extend(usage_cells(vcpu.usage.as_ref()));
        table.add_row(row);
    }
    style.render_table(&table)
}

fn notes(report: &VcpuStatusReport) -> Vec<String> {
    let machines = &report.observation.machines;
    let mut notes: Vec<String> = machines
        .iter()
        .filter_map(|machine| {
            let why = machine.missing.as_ref()?;
            Some(format!("{} ({}): {}", escape_unprintable(&machine.name), machine.pid, escape_unprintable(why)))
        })
        .collect();
    if machines.iter().any(|machine| machine.usage.is_some()) {
        notes.push(
            "ready: runnable, and waiting for a CPU. co-run: of the time with a runnable vCPU, the share in which all \
             runnable vCPUs ran; bounds that hold however waits overlapped. stacked: samples with two runnable vCPUs on \
             one run queue."
                .to_owned(),
        );
    }
    if machines
        .iter()
        .any(|machine| machine.stacking.stacked_beside_free_cpu > 0 || machine.stacking.stacked_by_affinity > 0)
    {
        notes.push(
            "vCPUs share a run queue beside a free CPU, or because of their affinity: see `pagefold vcpu spread \
             --dry-run`."
                .to_owned(),
        );
    }
    notes
}
