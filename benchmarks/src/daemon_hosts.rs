//! The daemon on simulated hosts of real size: real code in virtual time, beside the policies of the kernel and ksmtuned.
//!
//! Of each shipped scenario one Nth is simulated (`sim compare --scale`), so that a day takes minutes. The daemon has its
//! default bound.
//!
//! Where all machines start at once and stay, the target is what ksmd itself would need: a host that has only the pages that
//! can merge, none of them in huge pages, is simulated with ksmd at full speed. Its CPU time until 90 % are merged, at the
//! rate of the daemon's bound, is the time for these savings. The daemon's bucket is full at the start, so the CPU time until
//! then is compared, too.

use crate::BenchmarkEffort;
use crate::findings::{Findings, MarkdownTable, ThresholdCheck};
use anyhow::{Context, Result, ensure};
use pagefold_daemon::decide::{CpuBound, DaemonRules};
use pagefold_sim::decide::host_state::Exactness;
use pagefold_sim::decide::policies::ComparedPolicy;
use pagefold_sim::decide::scale::divide_memory;
use pagefold_sim::decide::scenario::Scenario;
use pagefold_sim::decide::simulation::simulate;
use pagefold_sim::scenario::{parse_scenario, shipped_text};
use serde::Deserialize;
use std::num::NonZeroU32;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// A simulated host.
struct SimulatedHost {
    scenario: &'static str,
    /// The part that is simulated.
    divisor: u32,
    /// Whether all machines start at once and stay.
    is_steady: bool,
}

const HOSTS: [SimulatedHost; 4] = [
    SimulatedHost { scenario: "lab-cloud", divisor: 64, is_steady: false },
    SimulatedHost { scenario: "htc-64", divisor: 32, is_steady: true },
    SimulatedHost { scenario: "giant-700", divisor: 32, is_steady: true },
    SimulatedHost { scenario: "containers-2000", divisor: 8, is_steady: false },
];

/// The daemon, which merges across trust domains as all other policies do.
const DAEMON: &str = "guided:across-domains";
/// Policies beside it.
const OTHER_POLICIES: &str = "default,ksmtuned,advisor,flat-out";

/// Target: 90 % of the savings after so many times the shortest time.
const MAX_TIME_RATIO: f64 = 1.3;
/// Target: CPU time in the last half of the day, as a share of one CPU, of the whole host.
const MAX_CONVERGED_CORES: f64 = 0.01;
const CONVERGED_SECONDS: f64 = 12.0 * 3600.0;
/// Target: real time for a simulated run of the daemon.
const MAX_REAL_TIME: Duration = Duration::from_secs(600);
/// The bucket may be exceeded by what a census takes beyond its prediction, as a share of the burst.
const BURST_TOLERANCE: f64 = 0.1;

#[derive(Deserialize)]
struct ComparisonReport {
    seconds: f64,
    policies: Vec<PolicyReport>,
}

#[derive(Deserialize)]
struct PolicyReport {
    policy: String,
    saved_gib_hours: SpreadReport,
    times: Vec<TimeReport>,
    scan_wait: Option<ScanWaitReport>,
    samples: Vec<SampleReport>,
}

#[derive(Deserialize)]
struct TimeReport {
    share: f64,
    seconds: Option<SpreadReport>,
}

#[derive(Deserialize)]
struct SpreadReport {
    mean: f64,
}

#[derive(Deserialize)]
struct ScanWaitReport {
    longest_seconds: f64,
    priority_seconds: f64,
}

#[derive(Deserialize)]
struct SampleReport {
    seconds: f64,
    saved_bytes: i64,
    ksmd_cpu_seconds: f64,
    pagefold_cpu_seconds: f64,
    cow_breaks: u64,
    huge_pages_split: u64,
}

impl SampleReport {
    fn cpu_seconds(&self) -> f64 {
        self.ksmd_cpu_seconds + self.pagefold_cpu_seconds
    }
}

impl PolicyReport {
    fn last(&self) -> &SampleReport {
        self.samples.last().expect("a run has samples")
    }

    /// Seconds until 90 % of the duplicates are merged.
    fn seconds_to_most(&self) -> Option<f64> {
        let most = self.times.iter().find(|time| time.share == 0.9)?;
        most.seconds.as_ref().map(|seconds| seconds.mean)
    }

    /// CPU time until then; between two samples, as if it grew evenly.
    fn cpu_seconds_to_most(&self) -> Option<f64> {
        let seconds = self.seconds_to_most()?;
        let pair = self.samples.windows(2).find(|pair| pair[1].seconds >= seconds)?;
        let part = (seconds - pair[0].seconds) / (pair[1].seconds - pair[0].seconds);
        Some(pair[0].cpu_seconds() + part * (pair[1].cpu_seconds() - pair[0].cpu_seconds()))
    }

    /// The most CPU time of any window between two samples beyond what a rate permits, in seconds: the size of the token
    /// bucket that the run needs.
    fn needed_burst(&self, rate: f64) -> f64 {
        let mut lowest = f64::INFINITY;
        let beyond = self.samples.iter().map(|sample| {
            let balance = sample.cpu_seconds() - rate * sample.seconds;
            lowest = lowest.min(balance);
            balance - lowest
        });
        beyond.fold(0.0, f64::max)
    }

    /// CPU time in the last part of the run, as a share of one CPU.
    fn converged_cores(&self) -> f64 {
        let last = self.last();
        let first = self.samples.iter().rfind(|sample| sample.seconds <= last.seconds - CONVERGED_SECONDS);
        first.map_or(f64::NAN, |first| (last.cpu_seconds() - first.cpu_seconds()) / (last.seconds - first.seconds))
    }
}

/// Run the measurement.
pub fn measure(effort: BenchmarkEffort) -> Result<Findings> {
    let mut findings = Findings::new(
        "scenario,divisor,policy,seconds,saved_bytes,ksmd_cpu_seconds,pagefold_cpu_seconds,cow_breaks,huge_pages_split",
    );
    let hosts = if effort.quick { &HOSTS[2..3] } else { &HOSTS[..] };
    for host in hosts {
        // A quick run has a small host.
        let divisor = if effort.quick { host.divisor * 32 } else { host.divisor };
        measure_host(&SimulatedHost { divisor, ..*host }, &mut findings).with_context(|| host.scenario.to_owned())?;
    }
    Ok(findings)
}

fn measure_host(host: &SimulatedHost, findings: &mut Findings) -> Result<()> {
    let divisor = host.divisor;
    let mut rules = DaemonRules::default();
    CpuBound::default().apply(Some(shipped_scenario(host)?.host.cpus as usize), &mut rules)?;
    let rules = rules.for_part(divisor);
    let (rate, burst) = (rules.cpu_rate, rules.burst.as_secs_f64());
    let started = Instant::now();
    let (guided, others) = thread::scope(|scope| {
        let guided = scope.spawn(|| compare(host, DAEMON).map(|report| (report, started.elapsed())));
        let others = compare(host, OTHER_POLICIES);
        (guided.join().expect("the thread does not panic"), others)
    });
    let (guided, real_time) = guided?;
    let others = others?;
    let policies: Vec<&PolicyReport> = guided.policies.iter().chain(&others.policies).collect();
    let hours = guided.seconds / 3600.0;
    report_policies(host, (rate, hours), &policies, findings);
    let mut check = |claim: &str, measured: String, met: bool| {
        findings.checks.push(ThresholdCheck { claim: format!("{}: {claim}", host.scenario), measured, met });
    };
    let daemon = policies[0];
    let needed = daemon.needed_burst(rate);
    check(
        &format!("the bound on CPU time holds in every window, with a burst of {burst:.1} s"),
        format!("{needed:.1} s"),
        needed <= burst * (1.0 + BURST_TOLERANCE),
    );
    let wait = daemon.scan_wait.as_ref().context("the daemon's run has no wait for scans")?;
    let max_wait = wait.priority_seconds + burst / rate;
    check(
        "each process is scanned within the time after which it precedes all others, and one refill of the burst",
        format!("{:.0} of {max_wait:.0} s", wait.longest_seconds),
        wait.longest_seconds <= max_wait,
    );
    if host.is_steady {
        check_savings_over_time(host, daemon, rate, &mut check)?;
    } else {
        let fastest =
            others.policies.iter().find(|policy| policy.policy == "flat-out").context("flat-out is missing")?;
        let share = daemon.saved_gib_hours.mean / fastest.saved_gib_hours.mean;
        findings.unjudged.push(format!(
            "{}: {:.0} % of what a whole CPU saves over time on 1/{divisor} of the host, with {:.1} % of a CPU",
            host.scenario,
            share * 1e2,
            daemon.last().cpu_seconds() / guided.seconds * 1e2
        ));
    }
    findings.checks.push(ThresholdCheck {
        claim: format!(
            "{}: {hours} h of the daemon in less than {} minutes",
            host.scenario,
            MAX_REAL_TIME.as_secs() / 60
        ),
        measured: format!("{:.1} minutes", real_time.as_secs_f64() / 60.0),
        met: real_time < MAX_REAL_TIME,
    });
    Ok(())
}

/// Checks when a host whose machines all stay is merged, and what that costs then and later.
fn check_savings_over_time(
    host: &SimulatedHost,
    daemon: &PolicyReport,
    rate: f64,
    check: &mut dyn FnMut(&str, String, bool),
) -> Result<()> {
    let needed = ksmd_cpu_seconds(host)?;
    let (seconds, shortest) = (daemon.seconds_to_most(), needed / rate);
    check(
        &format!("90 % of the savings within {MAX_TIME_RATIO} times what ksmd needs for these pages"),
        match seconds {
            Some(seconds) => format!("{:.2} times: {seconds:.0} s of {shortest:.0} s", seconds / shortest),
            None => format!("not reached; ksmd needs {shortest:.0} s"),
        },
        seconds.is_some_and(|seconds| seconds <= MAX_TIME_RATIO * shortest),
    );
    let used = daemon.cpu_seconds_to_most();
    check(
        &format!("the same for CPU time, whatever was in the bucket: {MAX_TIME_RATIO} times"),
        used.map_or_else(
            || "not reached".to_owned(),
            |used| format!("{:.2} times: {used:.1} s of {needed:.1} s", used / needed),
        ),
        used.is_some_and(|used| used <= MAX_TIME_RATIO * needed),
    );
    let cores = daemon.converged_cores() * f64::from(host.divisor);
    check(
        &format!("less than {:.0} % of a CPU when converged, for the whole host", MAX_CONVERGED_CORES * 1e2),
        format!("{:.1} %", cores * 1e2),
        cores < MAX_CONVERGED_CORES,
    );
    Ok(())
}

/// Adds a table of the policies, and their samples of each minute.
fn report_policies(
    host: &SimulatedHost,
    (rate, hours): (f64, f64),
    policies: &[&PolicyReport],
    findings: &mut Findings,
) {
    let divisor = host.divisor;
    let mut table = MarkdownTable::new(
        format!(
            "`{}`, 1/{divisor} of its memory, {hours} h; the daemon with {:.2} % of one CPU",
            host.scenario,
            rate * 1e2
        ),
        &[
            "policy",
            "saved, GiB x h",
            "saved at the end, GiB",
            "90 % after, s",
            "CPU s",
            "COW breaks",
            "huge pages split",
        ],
    );
    for policy in policies {
        let last = policy.last();
        table.rows.push(vec![
            policy.policy.clone(),
            format!("{:.2}", policy.saved_gib_hours.mean),
            format!("{:.2}", last.saved_bytes as f64 / f64::from(1 << 30)),
            policy.seconds_to_most().map_or_else(|| "-".to_owned(), |seconds| format!("{seconds:.0}")),
            format!("{:.1}", last.cpu_seconds()),
            last.cow_breaks.to_string(),
            last.huge_pages_split.to_string(),
        ]);
        let whole_minutes = policy.samples.iter().filter(|sample| sample.seconds % 60.0 == 0.0);
        findings.samples.extend(whole_minutes.map(|sample| {
            let SampleReport { seconds, saved_bytes, ksmd_cpu_seconds, pagefold_cpu_seconds, .. } = sample;
            format!(
                "{},{divisor},{},{seconds},{saved_bytes},{ksmd_cpu_seconds:.3},{pagefold_cpu_seconds:.3},{},{}",
                host.scenario, policy.policy, sample.cow_breaks, sample.huge_pages_split
            )
        }));
    }
    table.notes.push("`flat-out` has a whole CPU for a part of the host.".to_owned());
    findings.tables.push(table);
}

/// Simulates policies with the command.
fn compare(host: &SimulatedHost, policies: &str) -> Result<ComparisonReport> {
    let program = std::env::current_exe()?.with_file_name("pagefold");
    ensure!(program.exists(), "{} is missing: cargo build --release -p pagefold", program.display());
    let output = Command::new(&program)
        .args(["sim", "compare", host.scenario, "--scale", &host.divisor.to_string(), "--policy", policies])
        .args(["--threads", "1", "--json"])
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start {}", program.display()))?;
    ensure!(output.status.success(), "`sim compare` ended with {}", output.status);
    serde_json::from_slice(&output.stdout).context("`sim compare` printed no JSON")
}

/// The whole host.
fn shipped_scenario(host: &SimulatedHost) -> Result<Scenario> {
    let text = shipped_text(host.scenario).context("the scenario is not shipped")?;
    Ok(parse_scenario(text)?)
}

/// ksmd's CPU time until 90 % of a host's duplicates are merged, if it visits no other page.
fn ksmd_cpu_seconds(host: &SimulatedHost) -> Result<f64> {
    let mut scenario = shipped_scenario(host)?;
    divide_memory(&mut scenario, NonZeroU32::new(host.divisor).context("the divisor is 0")?);
    keep_mergeable_pages(&mut scenario);
    let run = simulate(&scenario, &ComparedPolicy::FlatOut, scenario.seed, Exactness::Exact, &mut |_| ())?;
    let most = run.duplicates as f64 * 0.9;
    let reached = run.samples.iter().find(|sample| sample.saved_pages as f64 >= most);
    let reached = reached.context("ksmd does not merge 90 % of the duplicates in time")?;
    Ok(reached.cpu_seconds())
}

/// Leaves pages out that no other page equals, writes and huge pages.
fn keep_mergeable_pages(scenario: &mut Scenario) {
    for template in &mut scenario.templates {
        let kept = template.zero + template.common + template.tenant;
        assert!(kept > 0.0, "template {} has nothing to merge", template.name);
        let part = |share: f64| share / kept;
        (template.zero, template.common, template.tenant) =
            (part(template.zero), part(template.common), part(template.tenant));
        template.pages = (template.pages as f64 * kept).round().max(1.0) as u64;
        (template.unique, template.huge_pages, template.growth) = (0.0, 0.0, None);
        template.writes.clear();
    }
    scenario.duration_ms = Duration::from_secs(600).as_millis() as u64;
    (scenario.tick_ms, scenario.sample_ms) = (100, 100);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(cpu_by_minute: &[f64]) -> PolicyReport {
        let sample = |(minute, &cpu): (usize, &f64)| SampleReport {
            seconds: minute as f64 * 60.0,
            saved_bytes: 1 << 30,
            ksmd_cpu_seconds: cpu / 2.0,
            pagefold_cpu_seconds: cpu / 2.0,
            cow_breaks: 0,
            huge_pages_split: 0,
        };
        let samples = cpu_by_minute.iter().enumerate().map(sample).collect();
        PolicyReport {
            policy: "guided".to_owned(),
            saved_gib_hours: SpreadReport { mean: 1.0 },
            times: Vec::new(),
            scan_wait: None,
            samples,
        }
    }

    #[test]
    fn needed_burst_is_the_worst_window() {
        // A rate of 0.1 permits 6 s a minute: the third minute takes 10, and so does the fourth.
        assert!((report(&[0.0, 2.0, 8.0, 18.0, 28.0, 28.0]).needed_burst(0.1) - 8.0).abs() < 1e-9);
        assert_eq!(report(&[0.0, 5.0, 10.0]).needed_burst(0.1), 0.0);
    }

    #[test]
    fn converged_share_is_that_of_the_last_half_day() {
        let minutes: Vec<f64> = (0..=24 * 60).map(|minute| 60.0 * f64::from(minute.min(600))).collect();
        assert_eq!(report(&minutes).converged_cores(), 0.0);
        let always: Vec<f64> = (0..=24 * 60).map(|minute| 6.0 * f64::from(minute)).collect();
        assert!((report(&always).converged_cores() - 0.1).abs() < 1e-9);
    }

    #[test]
    fn only_mergeable_pages_are_kept() {
        let mut scenario = parse_scenario(shipped_text("htc-64").unwrap()).unwrap();
        let pages = scenario.templates[0].pages;
        keep_mergeable_pages(&mut scenario);
        let template = &scenario.templates[0];
        assert_eq!(template.pages, (pages as f64 * 0.13).round() as u64);
        assert!((template.zero + template.common - 1.0).abs() < 1e-9 && template.writes.is_empty());
    }
}
