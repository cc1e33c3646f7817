//! The results of the over-commit model as tables.

use crate::scenario::DescribedScenario;
use crate::wire::sim::{
    CapacityCurveReport, ModelNote, PolicyReport, ResidualReport, VcpuCapacityReport, VcpuResidualsReport,
    VcpuSimReport,
};
use pagefold_output::text::TextStyle;

fn ratio(value: f64) -> String {
    if value != 0.0 && value < 0.1 { format!("{value:.4}") } else { format!("{value:.3}") }
}

fn rate(value: f64) -> String {
    pagefold_output::text::format_number(value.round() as u64)
}

fn format_note(note: &ModelNote, style: TextStyle) -> String {
    let text = format!(
        "These are figures of a model, not of this host. Against published measurements the model is between {:.2} and \
         {:.2} times the measured ratio (pagefold vcpu sim residuals).",
        note.least_ratio, note.greatest_ratio
    );
    format!("\n{}", style.format_paragraph(&text, 0))
}

/// What the column "of ideal" means.
const IDEAL: &str = "\"Of ideal\" compares with the rate that the VMs have with a CPU for each vCPU, at their share of \
     the CPUs. It can exceed 1: with fewer vCPUs running at a time, a VM waits less for its locks.";

/// The comparison of policies.
pub fn render_comparison(report: &VcpuSimReport, style: TextStyle) -> String {
    let mut text = format!(
        "{}: {}\n{} VMs with {} vCPUs on {} CPUs ({:.2} vCPUs for each), {} s simulated, seed {}\n\n",
        report.scenario,
        report.description,
        report.vms,
        report.vcpus,
        report.cpus,
        f64::from(report.vcpus) / f64::from(report.cpus),
        report.seconds,
        report.seed
    );
    let mut table = style.new_table(&[
        "kernel",
        "policy",
        ">of best",
        ">of ideal",
        ">co-run",
        ">fairness",
        ">lock wait, us",
        ">switches",
        ">exits",
        ">yields to",
        ">failed",
        ">yields",
        ">rq locks",
        ">idle",
    ]);
    for policy in &report.policies {
        table.add_row(policy_row(policy));
    }
    text += &style.render_table(&table);
    text += &style.format_paragraph(
        &format!("\nSwitches, exits because of spinning, directed yields, failed attempts and plain yields are counts in a second \
         on each CPU; \"rq locks\" is the share of CPU time spent on the locks of two run queues. {IDEAL}"
        ),
        0,
    );
    text + &format_note(&report.model, style)
}

fn policy_row(policy: &PolicyReport) -> Vec<String> {
    vec![
        policy.kernel.to_owned(),
        policy.policy.to_owned(),
        ratio(policy.of_best),
        ratio(policy.of_ideal),
        ratio(policy.co_run_fraction),
        ratio(policy.fairness),
        format!("{:.1}", policy.lock_wait_us),
        rate(policy.switches_per_cpu_second),
        rate(policy.spin_exits_per_cpu_second),
        rate(policy.directed_yields_per_cpu_second),
        rate(policy.failed_yields_per_cpu_second),
        rate(policy.plain_yields_per_cpu_second),
        format!("{:.1} %", policy.run_queue_lock_share * 100.0),
        format!("{:.1} %", policy.idle_share * 100.0),
    ]
}

/// The sweep over the number of VMs.
pub fn render_capacity(report: &VcpuCapacityReport, style: TextStyle) -> String {
    let mut text = format!(
        "{}: {} VMs with {} vCPUs, which keep {:.1} CPUs busy, on {} CPUs; kernel {}\n\n",
        report.source,
        report.vms.len(),
        report.vcpus,
        report.busy_cpus,
        report.cpus,
        report.kernel
    );
    let mut headings = vec![">copies".to_owned(), ">vCPUs per CPU".to_owned()];
    for curve in &report.curves {
        headings.extend([format!(">{} total", curve.policy), ">each".to_owned(), ">of ideal".to_owned()]);
    }
    let mut table = style.new_table(&headings.iter().map(String::as_str).collect::<Vec<_>>());
    let points = report.curves.first().map_or(0, |curve| curve.points.len());
    for index in 0..points {
        let first = &report.curves[0].points[index];
        let mut row = vec![first.copies.to_string(), format!("{:.2}", first.overcommit)];
        for point in report.curves.iter().map(|curve| &curve.points[index]) {
            row.extend([ratio(point.total), ratio(point.per_copy), ratio(point.of_ideal)]);
        }
        table.add_row(row);
    }
    text += &style.render_table(&table);
    text += &style.format_paragraph(
        &format!("\nThroughput is relative to one set of these VMs with a CPU for each vCPU. {IDEAL}"),
        0,
    );
    text.push('\n');
    for curve in &report.curves {
        text += &format_knee(curve, report.knee_loss);
    }
    text + &format_note(&report.model, style)
}

fn format_knee(curve: &CapacityCurveReport, knee_loss: f64) -> String {
    let loss = knee_loss * 100.0;
    match curve.knee_copies.and_then(|copies| curve.points.iter().find(|point| point.copies == copies)) {
        Some(knee) if Some(knee.copies) == curve.points.last().map(|point| point.copies) => format!(
            "{}: at most {loss:.0} % are lost up to {} copies, {:.2} vCPUs for each CPU; more were not simulated\n",
            curve.policy, knee.copies, knee.overcommit
        ),
        Some(knee) => format!(
            "{}: more than {loss:.0} % are lost beyond {} copies, {:.2} vCPUs for each CPU\n",
            curve.policy, knee.copies, knee.overcommit
        ),
        None => format!("{}: more than {loss:.0} % are lost with one copy already\n", curve.policy),
    }
}

/// The model against published figures.
pub fn render_residuals(report: &VcpuResidualsReport, style: TextStyle) -> String {
    let mut table =
        style.new_table(&["figure", "unit", ">published", ">model", ">error", "fitted", "within the bound"]);
    for figure in &report.figures {
        table.add_row(residual_row(figure));
    }
    let mut text = style.render_table(&table);
    text += &format!("\nThe bound is {:.0} % of the published figure.\n", report.tolerance * 100.0);
    text += &style.format_heading("Constants of the model");
    let mut table = style.new_table(&["constant", ">value", "origin", "basis"]);
    for constant in &report.constants {
        table.add_row([
            constant.quantity.to_owned(),
            rate(constant.value),
            constant.origin.to_owned(),
            constant.basis.to_owned(),
        ]);
    }
    text + &style.render_table(&table)
}

fn residual_row(figure: &ResidualReport) -> Vec<String> {
    let published =
        if figure.is_lower_bound { format!(">= {}", ratio(figure.published)) } else { ratio(figure.published) };
    let error = if figure.is_lower_bound { "-".to_owned() } else { format!("{:+.0} %", figure.relative_error * 100.0) };
    vec![
        figure.figure.to_owned(),
        figure.unit.to_owned(),
        published,
        ratio(figure.modeled),
        error,
        if figure.fitted { "fitted" } else { "not fitted" }.to_owned(),
        if figure.met { "yes" } else { "no" }.to_owned(),
    ]
}

/// The shipped scenarios.
pub fn render_list(scenarios: &[(&str, DescribedScenario)], style: TextStyle) -> String {
    let mut table = style.new_table(&["scenario", ">CPUs", ">VMs", ">vCPUs", "description"]);
    for (name, described) in scenarios {
        let scenario = &described.scenario;
        table.add_row([
            (*name).to_owned(),
            scenario.cpus.to_string(),
            scenario.vms.len().to_string(),
            scenario.vcpu_count().to_string(),
            described.description.clone(),
        ]);
    }
    style.render_table(&table)
}
