//! Scenarios in virtual time: what merges, how fast, at what CPU time, and how much the approximation differs.

#![forbid(unsafe_code)]

use pagefold_sim::comparison::SimulationPlan;
use pagefold_sim::decide::cost::{CostModel, Operation};
use pagefold_sim::decide::host_state::Exactness;
use pagefold_sim::decide::measures::RunMeasures;
use pagefold_sim::decide::policies::ComparedPolicy;
use pagefold_sim::decide::samples::{Sample, SimulatedRun};
use pagefold_sim::decide::scenario::Scenario;
use pagefold_sim::decide::simulation::simulate;
use pagefold_sim::decide::tuning::{TuningGoal, choose};
use pagefold_sim::scenario::parse_scenario;
use pagefold_sim::tuning::{PolicySearch, most_simulations, search};
use std::sync::atomic::AtomicU64;

fn scenario(duration: &str, template: &str, machines: &str) -> Scenario {
    let text = format!(
        "description = 'test'\nduration = '{duration}'\nsample = '10s'\n\
         [host]\nmemory = '1 GiB'\ncpus = 4\nkernel = '6.18.44'\nksm = {{ smart_scan = false }}\n\
         [[template]]\nname = 't'\nsize = '64 MiB'\n{template}\n\
         [[machines]]\nname = 'm'\ntemplate = 't'\n{machines}"
    );
    parse_scenario(&text).unwrap()
}

fn run(scenario: &Scenario, policy: &str, exactness: Exactness) -> SimulatedRun {
    let policy = ComparedPolicy::parse(policy).unwrap();
    let mut last = 0;
    let run = simulate(scenario, &policy, 1, exactness, &mut |now| last = now).unwrap();
    assert_eq!(last, scenario.duration_ms);
    run
}

fn last(run: &SimulatedRun) -> Sample {
    *run.samples.last().unwrap()
}

/// 16,384 pages: a quarter is common, an eighth zero, the rest unique or untouched.
const WITHOUT_WRITERS: &str = "zero = 0.125\ncommon = 0.25\nunique = 0.5";

#[test]
fn everything_equal_merges_on_a_host_without_writers() {
    let scenario = scenario("5min", WITHOUT_WRITERS, "count = 4");
    for exactness in [Exactness::Exact, Exactness::Approximate] {
        let run = run(&scenario, "flat-out", exactness);
        // Three further copies of 4,096 pages; 8,192 zeros are 32 frames of 256 mappings.
        assert_eq!(run.duplicates, 3 * 4096 + 8191);
        assert_eq!(last(&run).saved_pages, 3 * 4096 + 8192 - 32);
        let resident = 4 * 14_336;
        assert_eq!(last(&run).resident_pages, resident);
        let used = (resident - last(&run).saved_pages) * 4096 + resident * 64;
        assert_eq!(last(&run).available_bytes, (1 << 30) - used as i64);
        assert_eq!(RunMeasures::new(&run).unmerged_duplicates, 31.0);
    }
}

#[test]
fn batches_begin_with_ticks() {
    let mut scenario = scenario("10min", WITHOUT_WRITERS, "count = 4");
    scenario.costs = CostModel::new([(Operation::Visit, 1000.0), (Operation::Batch, 50_000.0)]);
    let run = run(&scenario, "whole:500/20", Exactness::Approximate);
    let end = last(&run);
    // The last batch of a scan is shorter: 57,344 pages are 114 batches of 500, and one of 344.
    let batches = end.full_scans * 115 + (end.pages_scanned - end.full_scans * 57_344).div_ceil(500);
    // Each ends within a tick of 4 ms, and the pause of five ticks within the sixth one.
    let seconds = batches as f64 * 0.024;
    assert!((seconds - 600.0).abs() < 0.1, "{seconds} s in {batches} batches");
    assert!((end.pages_scanned * 1000 + batches * 50_000).abs_diff(end.ksmd_cpu_ns) <= 550_000, "{end:?}");
}

#[test]
fn machines_that_exit_take_their_savings_along() {
    let scenario = scenario("10min", WITHOUT_WRITERS, "count = 4\nwave = 1\nevery = '1min'\nlifetime = '5min'");
    let run = run(&scenario, "flat-out", Exactness::Approximate);
    let saved = |minute: usize| run.samples[6 * minute + 5].saved_pages;
    let machines = |minute: usize| run.samples[6 * minute + 5].machines;
    assert_eq!([0, 1, 2, 3, 4, 5, 6, 7, 8].map(machines), [1, 2, 3, 4, 4, 3, 2, 1, 0]);
    assert_eq!(saved(4), 3 * 4096 + 8192 - 32);
    assert_eq!((saved(6), saved(8)), (4096 + 4096 - 16, 0));
    assert_eq!(last(&run).rmap_items, 0);
}

#[test]
fn ksmtuned_waits_for_its_threshold() {
    // 20 % of 1 GiB are 205 MiB: with four machines 800 MiB are free, with fifteen 184 MiB.
    let few = run(&scenario("5min", WITHOUT_WRITERS, "count = 4"), "ksmtuned", Exactness::Approximate);
    assert_eq!((last(&few).saved_pages, last(&few).ksmd_cpu_ns), (0, 0));
    let many = run(&scenario("5min", WITHOUT_WRITERS, "count = 15"), "ksmtuned", Exactness::Approximate);
    assert!(last(&many).saved_pages > 0);
    assert_eq!(
        many.samples[..6].iter().map(|sample| sample.ksmd_cpu_ns).max(),
        Some(0),
        "the first step is after a minute"
    );
}

#[test]
fn advisor_changes_the_pace_after_each_scan() {
    let run = run(&scenario("5min", WITHOUT_WRITERS, "count = 4"), "advisor:20", Exactness::Approximate);
    assert!(last(&run).full_scans >= 3);
    assert!(run.samples.iter().any(|sample| sample.pages_to_scan != 500 && sample.pages_to_scan > 0));
}

#[test]
fn a_split_frees_the_zeros_of_a_huge_page() {
    let template = format!("{WITHOUT_WRITERS}\nhuge_pages = 1.0\nrun_pages = [1, 64]");
    let run = run(&scenario("5min", &template, "count = 4"), "flat-out", Exactness::Approximate);
    let end = last(&run);
    assert_eq!((run.huge_pages, end.huge_pages_split), (4 * 28, 4 * 28), "each has a common page");
    // Zeros that splits map to the zero page need no frame at all.
    assert!(end.saved_pages > 3 * 4096 + 8192 - 32 && end.saved_pages <= 3 * 4096 + 8192, "{end:?}");
}

const WRITTEN: &str = "zero = 0.1\ncommon = 0.3\nunique = 0.4\nrun_pages = [1, 32]\n\
    growth = { per_minute = '1 MiB', common = 0.5 }\n\
    writes = [{ content = 'unique', share = 0.1, pages_per_second = 200.0 }, \
    { content = 'common', share = 0.1, pages_per_second = 20.0 }]";

/// With `PAGEFOLD_SOAK` under three policies, which takes minutes, else under one.
#[test]
fn the_approximation_saves_and_costs_nearly_the_same() {
    let policies = [("10min", "whole:2000/20"), ("10min", "default"), ("3min", "flat-out")];
    let count = if std::env::var_os("PAGEFOLD_SOAK").is_some() { policies.len() } else { 1 };
    for &(duration, policy) in &policies[..count] {
        let scenario = scenario(duration, WRITTEN, "count = 8\nwave = 2\nevery = '1min'\nlifetime = '7min'");
        let exact = RunMeasures::new(&run(&scenario, policy, Exactness::Exact));
        let near = RunMeasures::new(&run(&scenario, policy, Exactness::Approximate));
        assert!(exact.cow_breaks > 100.0 || policy == "default");
        let within = |part: f64, exact: f64, near: f64, what: &str| {
            assert!((near - exact).abs() <= part * exact.abs(), "{policy}: {what}: {exact} exactly, {near}");
        };
        within(0.01, exact.saved_byte_seconds, near.saved_byte_seconds, "saved over time");
        // Comparisons in the unstable tree are those of a full tree, which are fewer.
        within(0.12, exact.ksmd_cores, near.ksmd_cores, "CPU time");
        within(0.03, exact.cow_breaks, near.cow_breaks, "COW breaks");
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let scenario = scenario("3min", WRITTEN, "count = 6\nper_hour = 120.0");
    let runs = [1, 1, 2]
        .map(|seed| simulate(&scenario, &ComparedPolicy::FlatOut, seed, Exactness::Approximate, &mut |_| {}).unwrap());
    assert_eq!(runs[0], runs[1]);
    assert_ne!(runs[0], runs[2]);
}

#[test]
fn a_search_finds_a_pace_that_saves_as_much_as_flat_out_for_less() {
    let scenario = scenario("2min", WRITTEN, "count = 4\nwave = 1\nevery = '10s'");
    let plan = |goal| PolicySearch {
        daemon: None,
        goal,
        max_cores: None,
        rounds: 1,
        plan: SimulationPlan { seeds: vec![1], exactness: Exactness::Approximate, threads: 2, run_daemon: None },
    };
    let flat_out = RunMeasures::new(&run(&scenario, "flat-out", Exactness::Approximate));
    let simulated_ms = AtomicU64::new(0);
    let tried = search(&scenario, &plan(TuningGoal::Saved), &simulated_ms).unwrap();
    assert_eq!(simulated_ms.into_inner(), tried.len() as u64 * scenario.duration_ms);
    assert!(tried.len() as u64 > 17 && tried.len() as u64 <= most_simulations(&scenario, &plan(TuningGoal::Saved)));
    let best = choose(&tried, TuningGoal::Saved, None).unwrap();
    assert!(best.saved_byte_seconds >= 0.99 * flat_out.saved_byte_seconds, "{best:?}, and {flat_out:?}");
    assert!(best.cores < 0.9 * flat_out.cores(), "{best:?}, and {flat_out:?}");
    let cheap = choose(&tried, TuningGoal::Cpu, None).unwrap();
    assert!(cheap.cores < best.cores, "{cheap:?}, and {best:?}");
    let mut names: Vec<String> = tried.iter().map(|tried| tried.policy.to_string()).collect();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), tried.len(), "no policy runs twice");
}
