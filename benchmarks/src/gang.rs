//! `pagefold vcpu gang` against the kernel's own scheduler, with guests of emulated KVM in an emulated machine whose time is
//! virtual. `pagefold` must be built with the feature `gang`.

use crate::BenchmarkEffort;
use crate::findings::{Findings, MarkdownTable, ThresholdCheck};
use anyhow::{Result, anyhow};
use pagefold_labs::gang_machine::{LoadFigures, load_figures, machine_rates, run_gang_scenes};
use std::time::Duration;

/// The machine takes a quarter of an hour.
const TIMEOUT: Duration = Duration::from_secs(3600);
/// Targets: the rate of several gangs relative to one alone, fairness, and co-run.
const MIN_RATE: f64 = 0.93;
const MIN_FAIRNESS: f64 = 0.98;
const MIN_CORUN: f64 = 0.95;
/// Target: the rate with one busy ordinary task for each CPU, relative to that without.
const MIN_RATE_WITH_TASKS: f64 = 0.8;
/// Target: the rate without over-commit, relative to the kernel's scheduler.
const MIN_RATE_ALONE: f64 = 0.98;

/// A load and the schedulers that are compared on it.
struct Scene {
    cpus: u32,
    /// The name of the load, and the arguments of `gang-load`.
    load: &'static str,
    arguments: &'static str,
    /// Busy ordinary tasks.
    tasks: u32,
    /// Whether the kernel's scheduler has the VM in the end, because it is alone and wider than the machine.
    is_handed_over: bool,
    /// The policies, beside the kernel's scheduler.
    policies: &'static [&'static str],
}

const fn scene(
    cpus: u32,
    load: &'static str,
    arguments: &'static str,
    tasks: u32,
    policies: &'static [&'static str],
) -> Scene {
    Scene { cpus, load, arguments, tasks, is_handed_over: false, policies }
}

/// A VM wider than the machine, and no other.
const fn handed_over(scene: Scene) -> Scene {
    Scene { is_handed_over: true, ..scene }
}

const SCENES: [Scene; 12] = [
    scene(4, "kvm-1x4", "1 4 kvm", 0, &["gang"]),
    scene(4, "kvm-2x4", "2 4 kvm", 0, &["gang"]),
    scene(4, "kvm-2x4-ple", "2 4 kvm 40", 0, &["spread", "throttled-yield", "gang"]),
    handed_over(scene(4, "kvm-1x8-ple", "1 8 kvm 40", 0, &["gang"])),
    scene(4, "kvm-2x8-ple", "2 8 kvm 40", 0, &["gang"]),
    scene(4, "kvm-8+4-ple", "2 8,4 kvm 40", 0, &["gang"]),
    scene(4, "threads-1x4", "1 4 threads", 0, &["gang"]),
    scene(4, "threads-4x4", "4 4 threads", 0, &["gang"]),
    handed_over(scene(4, "threads-1x8", "1 8 threads", 0, &["gang"])),
    scene(4, "kvm-2x4-tasks", "2 4 kvm", 4, &["gang"]),
    scene(8, "threads-1x8-on-8", "1 8 threads", 0, &["gang"]),
    scene(8, "threads-2x8-on-8", "2 8 threads", 0, &["gang"]),
];

/// The name of the kernel's scheduler in samples.
const KERNEL: &str = "kernel";

/// Run the measurement.
pub fn measure(effort: BenchmarkEffort) -> Result<Findings> {
    let (rounds, window_ms) = if effort.quick { (1, 100) } else { (3, 300) };
    let pagefold = std::env::current_exe()?.with_file_name("pagefold");
    let mut output = String::new();
    for cpus in [4, 8] {
        let scenes: String =
            SCENES.iter().filter(|scene| scene.cpus == cpus).map(|s| script(s, rounds, window_ms)).collect();
        output += &run_gang_scenes(&pagefold, cpus, &scenes, TIMEOUT).map_err(|why| anyhow!(why))?;
    }
    let mut findings = Findings::new("load,scheduler,round,operations_per_second,fairness,corun");
    let mut table = MarkdownTable::new(
        "Median of the rounds",
        &["load (VMs x vCPUs)", "scheduler", "operations/s", "range", "fairness", "co-run"],
    );
    for scene in &SCENES {
        for policy in std::iter::once(&KERNEL).chain(scene.policies) {
            let samples = samples(&output, scene.load, policy, rounds);
            for (round, sample) in samples.iter().enumerate() {
                let LoadFigures { rate, fairness, corun, .. } = sample;
                findings.samples.push(format!("{},{policy},{round},{rate:.0},{fairness:.4},{corun:.4}", scene.load));
            }
            let rates = || samples.iter().map(|sample| sample.rate);
            let (low, high) = (rates().fold(f64::INFINITY, f64::min), rates().fold(0.0, f64::max));
            let median = median_figures(&samples);
            table.rows.push(vec![
                scene.load.to_owned(),
                (*policy).to_owned(),
                format!("{:.0}", median.rate),
                format!("{low:.0} to {high:.0}"),
                format!("{:.3}", median.fairness),
                format!("{:.3}", median.corun),
            ]);
        }
    }
    let median = |load: &str, policy: &str| median_figures(&samples(&output, load, policy, rounds));
    for (load, alone) in
        [("kvm-2x4", "kvm-1x4"), ("threads-4x4", "threads-1x4"), ("threads-2x8-on-8", "threads-1x8-on-8")]
    {
        let (gang, ideal) = (median(load, "gang"), median(alone, KERNEL));
        let ratio = gang.rate / ideal.rate;
        findings.checks.push(ThresholdCheck {
            claim: format!(
                "{load}: at least {MIN_RATE} of one VM alone, fairness at least {MIN_FAIRNESS}, co-run at least {MIN_CORUN}"
            ),
            measured: format!("{ratio:.3}, {:.3}, {:.3}", gang.fairness, gang.corun),
            met: ratio >= MIN_RATE && gang.fairness >= MIN_FAIRNESS && gang.corun >= MIN_CORUN,
        });
    }
    for (claim, rate, base, target) in [
        (
            "one busy ordinary task for each CPU, against none",
            median("kvm-2x4-tasks", "gang"),
            median("kvm-2x4", "gang"),
            MIN_RATE_WITH_TASKS,
        ),
        ("no over-commit, KVM", median("kvm-1x4", "gang"), median("kvm-1x4", KERNEL), MIN_RATE_ALONE),
        ("no over-commit, stand-ins", median("threads-1x4", "gang"), median("threads-1x4", KERNEL), MIN_RATE_ALONE),
        ("two wider than the machine, KVM with PLE", median("kvm-2x8-ple", "gang"), median("kvm-2x8-ple", KERNEL), 1.0),
    ] {
        let ratio = rate.rate / base.rate;
        findings.checks.push(ThresholdCheck {
            claim: format!("{claim}: at least {target} of the rate"),
            measured: format!("{ratio:.3}"),
            met: ratio >= target,
        });
    }
    let wide_rate = |policy: &str| {
        let mut rates: Vec<f64> =
            (0..rounds).map(|round| machine_rates(&output, &format!("kvm-8+4-ple-{policy}-{round}"))[0]).collect();
        rates.sort_by(f64::total_cmp);
        rates[rounds / 2]
    };
    let ratio = wide_rate("gang") / wide_rate(KERNEL);
    findings.checks.push(ThresholdCheck {
        claim: "the wider of two, KVM with PLE: at least 1 of the rate".to_owned(),
        measured: format!("{ratio:.3}"),
        met: ratio >= 1.0,
    });
    for scene in SCENES.iter().filter(|scene| scene.is_handed_over) {
        // The same scheduler has the VM then: the rates differ by chance, and the ratio is not a target.
        let line = format!("SAID {}-gang handed over to the kernel's scheduler", scene.load);
        findings.checks.push(ThresholdCheck {
            claim: format!("{}: wider than the machine and alone: handed over to the kernel's scheduler", scene.load),
            measured: format!("{:.3} of its rate", median(scene.load, "gang").rate / median(scene.load, KERNEL).rate),
            met: output.contains(&line),
        });
    }
    findings.tables.push(table);
    Ok(findings)
}

/// The script of a scene: after a warm-up, each scheduler measures all rounds.
fn script(scene: &Scene, rounds: usize, window_ms: u32) -> String {
    let Scene { load, arguments, tasks, policies, is_handed_over, .. } = scene;
    let wait = if *is_handed_over { "handed_over\n" } else { "" };
    let measure = |policy: &str| -> String {
        (0..rounds).map(|round| format!("measure {load}-{policy}-{round} {window_ms}\n")).collect()
    };
    let mut script = format!("load {arguments}\nsay 'hogs {tasks}'\nmeasure {load}-warm-up {window_ms}\n");
    script += &measure(KERNEL);
    for policy in *policies {
        script += &format!("gang --policy {policy}\n{wait}{}end_gang {load}-{policy}\n", measure(policy));
    }
    script + "end_load\n"
}

fn samples(output: &str, load: &str, policy: &str, rounds: usize) -> Vec<LoadFigures> {
    (0..rounds).map(|round| load_figures(output, &format!("{load}-{policy}-{round}"))).collect()
}

/// The sample with the median rate.
fn median_figures(samples: &[LoadFigures]) -> LoadFigures {
    let mut samples = samples.to_vec();
    samples.sort_by(|a, b| a.rate.total_cmp(&b.rate));
    samples[samples.len() / 2]
}
