//! Schedules computed by hand, and properties of all schedules.

use super::calibration::{CalibrationEffort, FigureUse, residuals};
use super::capacity::{CapacitySettings, sweep};
use super::engine::Simulation;
use super::*;
use crate::decide::measures::measure;
use proptest::prelude::*;

const MS: u64 = 1_000_000;

fn scenario(cpus: u32, vms: Vec<VmSpec>) -> Scenario {
    Scenario { cpus, vms, costs: HostCosts::default() }
}

fn contended(critical_section_ns: u64) -> Workload {
    Workload { think_ns: 1, critical_section_ns, locks: 1, ..Workload::kernel_locks() }
}

fn run(scenario: &Scenario, kernel: Kernel, policy: SchedulingPolicy, duration_ns: u64) -> Outcome {
    Simulation::run_checked(scenario, &SimulationSettings::new(kernel, policy, duration_ns, 7))
}

/// The lengths of all runs that neither end of the kept time cuts, in nanoseconds.
fn run_lengths(kernel: Kernel) -> Vec<u64> {
    let vms = ["a", "b"].map(|name| VmSpec::new(name, 1, Workload::compute()));
    let scenario = scenario(1, vms.to_vec());
    let mut settings = SimulationSettings::new(kernel, SchedulingPolicy::Plain, 1_000 * MS, 3);
    settings.kept_schedule_ns = Some((0, 1_000 * MS));
    let schedule = Simulation::run_checked(&scenario, &settings).schedule;
    assert!(schedule.windows(2).all(|pair| pair[0].end_ns == pair[1].start_ns && pair[0].vm != pair[1].vm));
    schedule[1..schedule.len() - 1].iter().map(|run| run.end_ns - run.start_ns).collect()
}

#[test]
fn two_tasks_of_linux_3_6_take_turns_of_half_the_latency() {
    // The slice of 12 ms ends at the first tick after it.
    let lengths = run_lengths(Kernel::Linux36);
    assert!(lengths.len() > 70 && lengths.iter().all(|&length| length == 13 * MS), "{lengths:?}");
}

#[test]
fn two_tasks_of_today_take_turns_of_the_base_slice() {
    // The slice of 2.8 ms ends at the first tick after it.
    let lengths = run_lengths(Kernel::Today);
    assert!(lengths.len() > 300 && lengths.iter().all(|&length| length == 3 * MS), "{lengths:?}");
}

#[test]
fn fifo_lock_passes_through_all_vcpus() {
    let scenario = scenario(4, vec![VmSpec::new("vm", 4, contended(100_000))]);
    let outcome = run(&scenario, Kernel::Linux36, SchedulingPolicy::Plain, 1_000 * MS);
    // The lock is never free: an operation each 100 us, and each waits for those of its three siblings.
    assert!(outcome.vms[0].operations.abs_diff(10_000) <= 1, "{}", outcome.vms[0].operations);
    assert!((outcome.mean_lock_wait_ns() - 300_000.0).abs() < 200.0, "{}", outcome.mean_lock_wait_ns());
    assert_eq!((outcome.switches, outcome.idle_ns), (0, 0));
    assert_eq!(outcome.co_run_fraction(), 1.0);
}

#[test]
fn preempted_lock_holder_costs_a_time_slice_for_each_operation() {
    // Two siblings on one CPU. Each slice ends one critical section, whose lock the preempted sibling gets; the rest of
    // the slice is spent spinning for it.
    let scenario = scenario(1, vec![VmSpec::new("vm", 2, contended(MS))]);
    let plain = run(&scenario, Kernel::Linux36, SchedulingPolicy::Plain, 1_300 * MS);
    assert!(plain.vms[0].operations.abs_diff(100) <= 2, "{}", plain.vms[0].operations);
    assert_eq!(plain.spin_exits, 0);
    // The sibling was spinning too when it was preempted, so that only the second search finds it: two windows, exits
    // and searches of 4.8 us, the locks for 0.5 us and a switch of 3 us are 13.1 us for each critical section of 1 ms.
    let yielding = run(&scenario, Kernel::Linux36, SchedulingPolicy::PauseLoopExit, 1_300 * MS);
    assert!((1_281..=1_285).contains(&yielding.vms[0].operations), "{}", yielding.vms[0].operations);
    assert!(yielding.directed_yields.abs_diff(yielding.vms[0].operations) <= 110, "{}", yielding.directed_yields);
}

#[test]
fn gangs_run_together_and_share_by_weight() {
    let vm = |name: &str, weight| VmSpec { weight, ..VmSpec::new(name, 4, contended(5_000)) };
    let scenario = scenario(4, vec![vm("a", 2048), vm("b", 1024), vm("c", 1024)]);
    let outcome = run(&scenario, Kernel::Today, SchedulingPolicy::Gang, 2_000 * MS);
    assert!(outcome.co_run_fraction() > 0.99, "{}", outcome.co_run_fraction());
    let cpu_time = |vm: usize| outcome.vms[vm].cpu_time_ns as f64;
    assert!((cpu_time(0) / cpu_time(1) - 2.0).abs() < 0.1, "{} {}", cpu_time(0), cpu_time(1));
    assert!((cpu_time(1) / cpu_time(2) - 1.0).abs() < 0.05);
    assert!(jain_index(&[cpu_time(0) / 2.0, cpu_time(1), cpu_time(2)]) > 0.99);
}

#[test]
fn smaller_gang_fills_the_gap() {
    let vms = [("a", 3), ("b", 3), ("c", 1)].map(|(name, vcpus)| VmSpec::new(name, vcpus, Workload::compute()));
    let outcome = run(&scenario(4, vms.to_vec()), Kernel::Today, SchedulingPolicy::Gang, 1_000 * MS);
    // The wide ones take turns, and the small one runs beside both.
    assert_eq!(outcome.idle_ns, 0);
    assert!(outcome.vms[2].cpu_time_ns >= 980 * MS, "{}", outcome.vms[2].cpu_time_ns);
}

#[test]
fn gang_wider_than_the_host_reaches_its_share_of_what_it_reaches_alone() {
    let vms = [("wide", 6), ("narrow", 4)].map(|(name, vcpus)| VmSpec::new(name, vcpus, contended(5_000)));
    let operations = |vms: &[VmSpec], policy| {
        let outcome = run(&scenario(4, vms.to_vec()), Kernel::Today, policy, 2_000 * MS);
        outcome.vms.iter().map(|vm| vm.operations as f64).collect::<Vec<_>>()
    };
    let alone = [0, 1].map(|vm| operations(&vms[vm..=vm], SchedulingPolicy::Plain)[0]);
    let gang = operations(&vms, SchedulingPolicy::Gang);
    // Six and four of ten vCPUs. The wide gang's vCPUs share CPUs in its slice, and each slice begins with a stall if
    // the next owner of the lock is not among those that run first: a turn of 3 ms, at most twice in 12 ms.
    assert!(gang[0] > 0.5 * 0.6 * alone[0], "{gang:?} of {alone:?}");
    assert!(gang[1] > 0.9 * 0.4 * alone[1], "{gang:?} of {alone:?}");
    assert!(gang.iter().sum::<f64>() > 10.0 * operations(&vms, SchedulingPolicy::Plain).iter().sum::<f64>());
}

#[test]
fn spread_keeps_siblings_apart() {
    let vms = ["a", "b"].map(|name| VmSpec::new(name, 4, Workload::compute()));
    let mut settings = SimulationSettings::new(Kernel::Today, SchedulingPolicy::Spread, 100 * MS, 1);
    settings.kept_schedule_ns = Some((0, 100 * MS));
    let outcome = Simulation::run_checked(&scenario(4, vms.to_vec()), &settings);
    for cpu in 0..4 {
        for vm in 0..2 {
            let mut siblings: Vec<u32> =
                outcome.schedule.iter().filter(|run| (run.cpu, run.vm) == (cpu, vm)).map(|run| run.vcpu).collect();
            siblings.dedup();
            assert_eq!(siblings.len(), 1, "vCPUs {siblings:?} of VM {vm} on CPU {cpu}");
        }
    }
}

#[test]
fn throttled_yield_is_at_most_one_directed_yield_for_each_tick_and_vm() {
    let scenario = calibration::published_host(2, 20);
    let scenario = Scenario { cpus: 20, ..scenario };
    let outcome = run(&scenario, Kernel::Today, SchedulingPolicy::ThrottledYield, 100 * MS);
    assert!(outcome.directed_yields + outcome.failed_yields <= 2 * 101 * 20, "a search may fail at each sibling");
    assert!(outcome.directed_yields <= 2 * 101);
    assert!(outcome.plain_yields > 1_000);
}

#[test]
fn halted_vcpu_leaves_its_cpu_idle() {
    // 1 ms of work, 3 ms of sleep on the mean: a quarter of the time.
    let workload = Workload { think_ns: MS, halt_ns: 3 * MS, ..Workload::compute() };
    let outcome =
        run(&scenario(1, vec![VmSpec::new("vm", 1, workload)]), Kernel::Today, SchedulingPolicy::Plain, 20_000 * MS);
    let share = outcome.vms[0].cpu_time_ns as f64 / outcome.simulated_ns as f64;
    assert!((share - 0.25).abs() < 0.02, "{share}");
    assert_eq!(outcome.vms[0].ready_time_ns, 0);
}

#[test]
fn para_virtual_lock_halts_instead_of_spinning_for_a_preempted_holder() {
    let workload = |lock_kind| Workload { lock_kind, ..contended(MS) };
    let operations = |kind| {
        let vms = ["a", "b"].map(|name| VmSpec::new(name, 2, workload(kind)));
        let outcome = run(&scenario(2, vms.to_vec()), Kernel::Today, SchedulingPolicy::Plain, 1_000 * MS);
        outcome.vms.iter().map(|vm| vm.operations).sum::<u64>()
    };
    let [fifo, para_virtual] = [LockKind::Fifo, LockKind::ParaVirtual].map(operations);
    assert!(para_virtual > fifo * 5 / 4, "{para_virtual} against {fifo}");
}

#[test]
fn shootdown_waits_for_preempted_siblings() {
    let workload = Workload { think_ns: 20_000, shootdown_probability: 1.0, ..Workload::compute() };
    let vms = |count: usize| ["a", "b"].map(|name| VmSpec::new(name, 4, workload))[..count].to_vec();
    let rate = |count, policy| run(&scenario(4, vms(count)), Kernel::Today, policy, 500 * MS).operations_per_second();
    let alone = rate(1, SchedulingPolicy::Plain);
    assert!(rate(2, SchedulingPolicy::Plain) < alone / 4.0);
    assert!(rate(2, SchedulingPolicy::Gang) > alone * 0.9);
}

#[test]
fn capacity_of_computing_vms_ends_with_the_cpus() {
    let scenario = scenario(4, vec![VmSpec::new("job", 2, Workload::compute())]);
    let settings = CapacitySettings { kernel: Kernel::Today, max_copies: 4, duration_ns: 200 * MS, seed: 1 };
    let mut finished = Vec::new();
    let curve = sweep(&scenario, SchedulingPolicy::Plain, &settings, |copies| finished.push(copies));
    assert_eq!(finished, [1, 2, 3, 4]);
    for (point, total) in curve.points.iter().zip([1.0, 2.0, 2.0, 2.0]) {
        assert!((point.total - total).abs() < 0.05, "{point:?}");
        assert!((point.of_ideal - 1.0).abs() < 0.05, "{point:?}");
    }
    assert_eq!(curve.knee().map(|point| point.copies), Some(4));
}

/// The published figures to which the model was fitted are met, and so is the statement about VMs of 10 vCPUs.
#[test]
fn model_meets_the_published_figures() {
    let residuals = residuals(CalibrationEffort::default());
    assert_eq!(residuals.len(), 11);
    for residual in &residuals {
        let must_hold = residual.figure_use == FigureUse::Fitted || residual.figure.contains("x 10 vCPUs");
        assert!(!must_hold || residual.is_met(), "{residual:?}");
    }
    let of_gang = |part: &str| residuals.iter().find(|residual| residual.figure.ends_with(part)).unwrap().modeled;
    assert!(of_gang("20 vCPUs, PLE off") < of_gang("20 vCPUs, PLE"));
    assert!(of_gang("20 vCPUs, PLE") < of_gang("20 vCPUs, throttled yield"));
}

fn any_workload() -> impl Strategy<Value = Workload> {
    let lock_kind = prop_oneof![Just(LockKind::Fifo), Just(LockKind::TestAndSet), Just(LockKind::ParaVirtual)];
    (
        1_000u64..200_000,
        any::<bool>(),
        0u64..50_000,
        0u32..4,
        lock_kind,
        0.0..0.5f64,
        prop_oneof![Just(0u64), 1..500_000u64],
    )
        .prop_map(
            |(think_ns, think_in_kernel, critical_section_ns, locks, lock_kind, shootdown_probability, halt_ns)| {
                Workload {
                    think_ns,
                    think_in_kernel,
                    critical_section_ns,
                    locks,
                    lock_kind,
                    shootdown_probability,
                    halt_ns,
                    operations_per_halt: 1,
                }
            },
        )
}

fn any_scenario() -> impl Strategy<Value = Scenario> {
    let vm = (1u32..9, 128u64..4096, any_workload())
        .prop_map(|(vcpus, weight, workload)| VmSpec { weight, ..VmSpec::new("vm", vcpus, workload) });
    (1u32..9, prop::collection::vec(vm, 1..4)).prop_map(|(cpus, vms)| scenario(cpus, vms))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn cpu_time_is_conserved_and_the_outcome_follows_the_seed(
        scenario in any_scenario(),
        today in any::<bool>(),
        policy in prop::sample::select(&SchedulingPolicy::ALL),
        seed in any::<u64>(),
    ) {
        let kernel = if today { Kernel::Today } else { Kernel::Linux36 };
        let mut settings = SimulationSettings::new(kernel, policy, 40 * MS, seed);
        settings.kept_schedule_ns = Some((0, 40 * MS));
        let outcome = Simulation::run_checked(&scenario, &settings);
        let used: u64 = outcome.vms.iter().map(|vm| vm.cpu_time_ns).sum();
        prop_assert_eq!(used + outcome.idle_ns, u64::from(scenario.cpus) * 40 * MS);
        let kept: u64 = outcome.schedule.iter().map(|run| run.end_ns - run.start_ns).sum();
        prop_assert_eq!(kept, used);
        let measures = measure(&outcome.to_schedule(&scenario, 40 * MS));
        prop_assert_eq!((measures.busy_ns, measures.idle_ns), (used, outcome.idle_ns));
        let by_vm = measures.vms.iter().map(|vm| vm.run_ns);
        prop_assert!(by_vm.eq(outcome.vms.iter().map(|vm| vm.cpu_time_ns)));
        for (vm, spec) in outcome.vms.iter().zip(&scenario.vms) {
            prop_assert!(vm.co_run_ns <= vm.active_ns && vm.active_ns <= 40 * MS);
            prop_assert!(vm.cpu_time_ns + vm.ready_time_ns <= u64::from(spec.vcpus) * 40 * MS);
        }
        // No CPU runs two vCPUs, and no vCPU runs on two CPUs.
        for key in [|run: &SimulatedRun| (run.cpu, 0), |run: &SimulatedRun| (1_000 + run.vm, run.vcpu)] {
            let mut runs = outcome.schedule.clone();
            runs.sort_by_key(|run| (key(run), run.start_ns));
            prop_assert!(runs.windows(2).all(|pair| key(&pair[0]) != key(&pair[1]) || pair[0].end_ns <= pair[1].start_ns));
        }
        prop_assert_eq!(&outcome, &Simulation::run_checked(&scenario, &settings));
    }
}
