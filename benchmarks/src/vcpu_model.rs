//! The over-commit model: its speed on one thread, and its residuals against published measurements.

use crate::BenchmarkEffort;
use crate::findings::{Findings, MarkdownTable, SampleSpread, ThresholdCheck};
use anyhow::Result;
use pagefold_vcpu::decide::model::calibration::{CalibrationEffort, FigureUse, published_host, residuals};
use pagefold_vcpu::decide::model::costs::model_constants;
use pagefold_vcpu::decide::model::{Kernel, SchedulingPolicy, SimulationSettings, simulate};
use pagefold_vcpu::wire::sim::VcpuResidualsReport;
use rustix::time::{ClockId, clock_gettime};

/// Target: CPU time of simulating 10 s of 8 VMs with 20 vCPUs each under a policy, in seconds.
const MAX_CPU_SECONDS: f64 = 5.0;
/// Simulated time of the target, in seconds.
const TARGET_SECONDS: f64 = 10.0;

/// CPU time of this thread, in seconds: other programs of a shared machine do not count.
fn thread_cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Run the measurement.
pub fn measure(effort: BenchmarkEffort) -> Result<Findings> {
    let (seconds, rounds) = if effort.quick { (0.1, 1) } else { (TARGET_SECONDS, 3) };
    let mut findings = Findings::new("kind,name,round,simulated_seconds,cpu_seconds,events,of_gang");
    measure_speed(&mut findings, seconds, rounds);
    measure_residuals(&mut findings, if effort.quick { 20_000_000 } else { 2_000_000_000 });
    Ok(findings)
}

fn measure_speed(findings: &mut Findings, seconds: f64, rounds: u32) {
    let scenario = published_host(8, 20);
    let mut table = MarkdownTable::new(
        format!("CPU time of simulating 8 VMs with 20 vCPUs for {seconds} s, Linux 3.6"),
        &["policy", "CPU time, s", "events, million", "ns an event"],
    );
    let mut times = vec![Vec::new(); SchedulingPolicy::ALL.len()];
    let mut events = vec![0; SchedulingPolicy::ALL.len()];
    for round in 0..rounds {
        for (index, policy) in SchedulingPolicy::ALL.into_iter().enumerate() {
            let mut settings = SimulationSettings::new(Kernel::Linux36, policy, (seconds * 1e9) as u64, 1);
            // The warm-up is not part of the simulated time that the target names.
            settings.warm_up_ns = 0;
            let before = thread_cpu_seconds();
            let outcome = simulate(&scenario, &settings);
            let used = thread_cpu_seconds() - before;
            times[index].push(used);
            events[index] = outcome.events;
            let name = policy.name();
            findings.samples.push(format!("speed,{name},{round},{seconds},{used},{},", outcome.events));
        }
    }
    for (index, policy) in SchedulingPolicy::ALL.into_iter().enumerate() {
        let spread = SampleSpread::from_samples(times[index].iter().copied());
        table.rows.push(vec![
            policy.name().to_owned(),
            format!("{:.2} ({:.2} to {:.2})", spread.median, spread.min, spread.max),
            format!("{:.1}", events[index] as f64 / 1e6),
            format!("{:.0}", spread.median * 1e9 / events[index].max(1) as f64),
        ]);
        findings.checks.push(ThresholdCheck {
            claim: format!("`{}`: {seconds} s of 8 x 20 vCPUs in under {MAX_CPU_SECONDS} s of one CPU", policy.name()),
            measured: format!("{:.2} s", spread.median),
            met: spread.median < MAX_CPU_SECONDS,
        });
    }
    findings.tables.push(table);
}

fn measure_residuals(findings: &mut Findings, duration_ns: u64) {
    let residuals = residuals(CalibrationEffort { duration_ns, seed: 1 });
    let report = VcpuResidualsReport::new(&residuals, &model_constants());
    let mut table = MarkdownTable::new(
        "The model against published figures",
        &["figure", "unit", "published", "model", "error", "fitted"],
    );
    table.text_columns = 2;
    for figure in &report.figures {
        let bound = if figure.is_lower_bound { ">= " } else { "" };
        let error =
            if figure.is_lower_bound { "-".to_owned() } else { format!("{:+.0} %", figure.relative_error * 100.0) };
        table.rows.push(vec![
            figure.figure.to_owned(),
            figure.unit.to_owned(),
            format!("{bound}{:.4}", figure.published),
            format!("{:.4}", figure.modeled),
            error,
            if figure.fitted { "fitted" } else { "not fitted" }.to_owned(),
        ]);
        let name = figure.figure.replace(',', ";");
        findings.samples.push(format!("residual,{name},0,,,,{}", figure.modeled));
    }
    for residual in &residuals {
        if residual.figure_use == FigureUse::Fitted {
            findings.checks.push(ThresholdCheck {
                claim: format!("{}: within {:.0} %", residual.figure, report.tolerance * 100.0),
                measured: format!("{:+.0} %", residual.relative_error() * 100.0),
                met: residual.is_met(),
            });
        }
    }
    findings.tables.push(table);
}
