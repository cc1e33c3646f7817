//! `pagefold vcpu gang` against the kernel's own scheduler, with guests of emulated KVM in an emulated machine whose time is
//! virtual. `pagefold` must be built with the feature `gang`.

use crate::BenchmarkEffort;
use crate::findings::{Findings, MarkdownTable, PairedRatio, SampleSpread, ThresholdCheck};
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
    Ok(evaluate(SceneFigures { output: &output, rounds }))
}

/// What the machine printed of all scenes, and how many rounds each had.
#[derive(Clone, Copy)]
struct SceneFigures<'a> {
    output: &'a str,
    rounds: usize,
}

impl SceneFigures<'_> {
    fn samples(self, load: &str, policy: &str) -> Vec<LoadFigures> {
        (0..self.rounds).map(|round| load_figures(self.output, &format!("{load}-{policy}-{round}"))).collect()
    }

    /// The least of a figure over the rounds.
    fn worst(self, load: &str, policy: &str, figure: impl Fn(&LoadFigures) -> f64) -> f64 {
        self.samples(load, policy).iter().map(figure).fold(f64::INFINITY, f64::min)
    }

    /// The rate of a load under a policy relative to that of another one.
    fn ratio(self, [load, policy]: [&str; 2], [base, base_policy]: [&str; 2]) -> PairedRatio {
        let rates = |load, policy| self.samples(load, policy).into_iter().map(|sample| sample.rate);
        pair_rounds(rates(load, policy), rates(base, base_policy))
    }
}

/// The ratio of the rates of rounds. Each scheduler measures all its rounds in a row: virtual time does not drift.
fn pair_rounds(rates: impl Iterator<Item = f64>, base: impl Iterator<Item = f64>) -> PairedRatio {
    PairedRatio::from_rounds(rates.zip(base).map(|(rate, base)| rate / base)).expect("a run has a round at least")
}

fn evaluate(figures: SceneFigures<'_>) -> Findings {
    let mut findings = Findings::new("load,scheduler,round,operations_per_second,fairness,corun");
    tabulate_rates(figures, &mut findings);
    findings.checks.extend(check_over_commit(figures));
    findings.checks.extend(check_rates(figures));
    findings.checks.push(check_wider_of_two(figures));
    findings.checks.extend(check_hand_over(figures));
    findings
}

/// Adds the table of all loads, and every sample.
fn tabulate_rates(figures: SceneFigures<'_>, findings: &mut Findings) {
    let mut table = MarkdownTable::new(
        "Median of the rounds for the rate, and the worst round for fairness and co-run",
        &["load (VMs x vCPUs)", "scheduler", "operations/s", "range", "fairness", "co-run"],
    );
    for scene in &SCENES {
        for policy in std::iter::once(&KERNEL).chain(scene.policies) {
            let samples = figures.samples(scene.load, policy);
            for (round, sample) in samples.iter().enumerate() {
                let LoadFigures { rate, fairness, corun, .. } = sample;
                findings.samples.push(format!("{},{policy},{round},{rate:.0},{fairness:.4},{corun:.4}", scene.load));
            }
            let SampleSpread { median, min, max } =
                SampleSpread::from_samples(samples.iter().map(|sample| sample.rate));
            table.rows.push(vec![
                scene.load.to_owned(),
                (*policy).to_owned(),
                format!("{median:.0}"),
                format!("{min:.0} to {max:.0}"),
                format!("{:.3}", figures.worst(scene.load, policy, |sample| sample.fairness)),
                format!("{:.3}", figures.worst(scene.load, policy, |sample| sample.corun)),
            ]);
        }
    }
    findings.tables.push(table);
}

/// Several gangs against one of them alone. Each round must be fair and run vCPUs together.
fn check_over_commit(figures: SceneFigures<'_>) -> impl Iterator<Item = ThresholdCheck> {
    let loads = [
        ("kvm-2x4", "kvm-1x4"),
        ("kvm-2x4-ple", "kvm-1x4"),
        ("threads-4x4", "threads-1x4"),
        ("threads-2x8-on-8", "threads-1x8-on-8"),
    ];
    loads.into_iter().map(move |(load, alone)| {
        let (fairness, corun) = (
            figures.worst(load, "gang", |sample| sample.fairness),
            figures.worst(load, "gang", |sample| sample.corun),
        );
        let ratio = figures.ratio([load, "gang"], [alone, KERNEL]);
        ThresholdCheck {
            claim: format!(
                "{load}: at least {MIN_RATE} of one VM alone, fairness at least {MIN_FAIRNESS}, co-run at least {MIN_CORUN}"
            ),
            measured: format!("{}, {fairness:.3}, {corun:.3}", ratio.format_factor_to(3)),
            met: ratio.ratio >= MIN_RATE && fairness >= MIN_FAIRNESS && corun >= MIN_CORUN,
        }
    })
}

/// The rates that gangs must not lose.
fn check_rates(figures: SceneFigures<'_>) -> impl Iterator<Item = ThresholdCheck> {
    let claims = [
        (
            "one busy ordinary task for each CPU, against none",
            ["kvm-2x4-tasks", "gang"],
            ["kvm-2x4", "gang"],
            MIN_RATE_WITH_TASKS,
        ),
        ("no over-commit, KVM", ["kvm-1x4", "gang"], ["kvm-1x4", KERNEL], MIN_RATE_ALONE),
        ("no over-commit, stand-ins", ["threads-1x4", "gang"], ["threads-1x4", KERNEL], MIN_RATE_ALONE),
        ("two wider than the machine, KVM with PLE", ["kvm-2x8-ple", "gang"], ["kvm-2x8-ple", KERNEL], 1.0),
        ("one wider than the machine and one not, in sum", ["kvm-8+4-ple", "gang"], ["kvm-8+4-ple", KERNEL], 1.0),
    ];
    claims.into_iter().map(move |(claim, rate, base, target)| {
        let ratio = figures.ratio(rate, base);
        ThresholdCheck {
            claim: format!("{claim}: at least {target} of the rate"),
            measured: ratio.format_factor_to(3),
            met: ratio.ratio >= target,
        }
    })
}

/// The wider of two VMs, which needs more slots than the narrower one.
fn check_wider_of_two(figures: SceneFigures<'_>) -> ThresholdCheck {
    let rates = |policy| {
        (0..figures.rounds).map(move |round| machine_rates(figures.output, &format!("kvm-8+4-ple-{policy}-{round}"))[0])
    };
    let ratio = pair_rounds(rates("gang"), rates(KERNEL));
    ThresholdCheck {
        claim: "the wider of two, KVM with PLE: at least 1 of the rate".to_owned(),
        measured: ratio.format_factor_to(3),
        met: ratio.ratio >= 1.0,
    }
}

/// The kernel's scheduler gets each VM that is wider than the machine and alone.
fn check_hand_over(figures: SceneFigures<'_>) -> impl Iterator<Item = ThresholdCheck> {
    SCENES.iter().filter(|scene| scene.is_handed_over).map(move |Scene { load, .. }| {
        // The same scheduler has the VM then: the rates differ by chance, and the ratio is not a target.
        let line = format!("SAID {load}-gang handed over to the kernel's scheduler");
        ThresholdCheck {
            claim: format!("{load}: wider than the machine and alone: handed over to the kernel's scheduler"),
            measured: format!("{} of its rate", figures.ratio([load, "gang"], [load, KERNEL]).format_factor_to(3)),
            met: figures.output.contains(&line),
        }
    })
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Output in which the rate of each load under each scheduler is 1000, but for these ones, and all VMs that must be
    /// handed over are, but for this one.
    fn evaluate_output(rates: &[(&str, &str, f64)], kept: &str) -> Vec<bool> {
        let mut output = String::new();
        for Scene { load, policies, is_handed_over, .. } in &SCENES {
            for policy in std::iter::once(&KERNEL).chain(*policies) {
                let rate =
                    rates.iter().find(|(of, by, _)| of == load && by == policy).map_or(1000.0, |(.., rate)| *rate);
                for (round, spread) in [0.9, 1.0, 1.1].into_iter().enumerate() {
                    let rate = rate * spread;
                    output += &format!(
                        "RESULT {load}-{policy}-{round} rate={rate} jain=0.99 corun=0.96 idle=0 home=0 rates={rate},{rate}\n"
                    );
                }
            }
            if *is_handed_over && *load != kept {
                output += &format!("SAID {load}-gang handed over to the kernel's scheduler\n");
            }
        }
        let findings = evaluate(SceneFigures { output: &output, rounds: 3 });
        let schedulers: usize = SCENES.iter().map(|scene| 1 + scene.policies.len()).sum();
        assert_eq!((findings.tables[0].rows.len(), findings.samples.len()), (schedulers, 1 + 3 * schedulers));
        assert_eq!(findings.tables[0].rows[0][2..4], ["1000", "900 to 1100"]);
        findings.checks.iter().map(|check| check.met).collect()
    }

    #[test]
    fn each_target_is_met_and_missed_alone() {
        assert_eq!(evaluate_output(&[], ""), [true; 12]);
        for (load, policy, rate, missed) in [
            ("kvm-2x4-ple", "gang", 920.0, vec![1]),
            ("threads-4x4", "gang", 920.0, vec![2]),
            ("threads-1x8-on-8", KERNEL, 1080.0, vec![3]),
            ("kvm-2x4-tasks", "gang", 790.0, vec![4]),
            ("kvm-1x4", "gang", 970.0, vec![5]),
            ("threads-1x4", "gang", 970.0, vec![6]),
            ("kvm-2x8-ple", "gang", 999.0, vec![7]),
            // The rates of its two machines are equal here.
            ("kvm-8+4-ple", "gang", 999.0, vec![8, 9]),
        ] {
            let met = evaluate_output(&[(load, policy, rate)], "");
            let expected: Vec<bool> = (0..12).map(|position| !missed.contains(&position)).collect();
            assert_eq!(met, expected, "{load} {policy}");
        }
        assert_eq!(evaluate_output(&[], "threads-1x8")[10..], [true, false]);
    }
}
