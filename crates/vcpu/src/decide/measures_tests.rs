//! Measures of schedules written by hand, with the expected figures computed by hand.

use super::{DelayMeasures, ScheduleMeasures, VmMeasures, measure};
use crate::schedule::{CpuSchedule, IDLE, ScheduleBuilder, SchedulerEvent, SchedulerEventKind, Task, WaitCause};
use proptest::prelude::*;

/// Two machines: vCPUs 0 to 2 of the first are threads 10 to 12, those of the second are 20 to 22. Threads 19 and 29 are
/// other threads of theirs, 90 belongs to none. Times reach from 0 to 100.
fn build(cpus: u32, events: &[(u64, SchedulerEventKind)]) -> CpuSchedule {
    let mut builder = ScheduleBuilder::new();
    builder.set_span(0, 100);
    builder.add_cpus(0..cpus);
    for (name, first) in [("a", 10), ("b", 20)] {
        let vm = builder.add_vm(name);
        for offset in [0, 1, 2, 9] {
            let vcpu = (offset < 9).then_some(offset);
            let tid = first + offset;
            builder.set_task(Task { tid, process: None, name: tid.to_string(), vm: Some(vm), vcpu });
        }
    }
    for &(time, kind) in events {
        builder.add_event(SchedulerEvent { time, kind });
    }
    builder.finish()
}

fn switch(cpu: u32, previous: u32, previous_runnable: bool, next: u32) -> SchedulerEventKind {
    SchedulerEventKind::Switch { cpu, previous, previous_runnable, next }
}

fn wakeup(task: u32, cpu: u32) -> SchedulerEventKind {
    SchedulerEventKind::Wakeup { task, cpu }
}

fn migrate(task: u32, cpu: u32) -> SchedulerEventKind {
    SchedulerEventKind::Migrate { task, cpu }
}

fn vm_a(schedule: &CpuSchedule) -> VmMeasures {
    measure(schedule).vms[0].clone()
}

#[test]
fn co_run_is_the_time_in_which_all_runnable_vcpus_run() {
    let vm = vm_a(&build(
        2,
        &[
            (10, switch(0, IDLE, true, 10)),  // 10 to 20: one runs
            (20, switch(1, IDLE, true, 11)),  // 20 to 50: two run
            (50, switch(1, 11, true, 20)),    // 50 to 70: one runs, one waits
            (70, switch(1, 20, false, 11)),   // 70 to 80: two run
            (80, switch(0, 10, false, IDLE)), // 80 to 90: one runs
            (90, switch(1, 11, false, IDLE)),
        ],
    ));
    assert_eq!((vm.runnable_ns, vm.co_run_ns), (80, 60));
    assert_eq!((vm.siblings_runnable_ns, vm.siblings_co_run_ns), (60, 40));
    assert_eq!((vm.co_run_fraction(), vm.siblings_co_run_fraction()), (Some(0.75), Some(40.0 / 60.0)));
    assert_eq!((vm.run_ns, vm.ready_ns, vm.preempted_ns), (120, 20, 20));
    assert_eq!((vm.preemptions, vm.sleeps, vm.migrations), (1, 2, 0));
    assert_eq!(vm.preempted_while_sibling_runs_ns, 20);
}

#[test]
fn machine_that_has_all_cpus_co_runs() {
    // Three vCPUs on two CPUs: from 20 on, two of them run and one waits.
    let vm = vm_a(&build(2, &[(0, switch(0, IDLE, true, 10)), (0, switch(1, IDLE, true, 11)), (20, wakeup(12, 1))]));
    assert_eq!((vm.siblings_runnable_ns, vm.siblings_co_run_ns), (100, 100));
    assert_eq!((vm.stacked_ns, vm.stacked_beside_free_cpu_ns), (80, 0));
}

#[test]
fn machine_without_runnable_vcpus_has_no_fractions() {
    // Its other thread runs.
    let schedule = build(1, &[(30, switch(0, IDLE, true, 19))]);
    let vm = vm_a(&schedule);
    assert_eq!((vm.co_run_fraction(), vm.siblings_co_run_fraction(), vm.stacked_fraction()), (None, None, None));
    assert_eq!((vm.run_ns, vm.vcpus), (0, 3));
    let ScheduleMeasures { busy_ns, idle_ns, .. } = measure(&schedule);
    assert_eq!((busy_ns, idle_ns), (70, 30));
}

#[test]
fn stacked_siblings_share_a_run_queue() {
    let vm = vm_a(&build(
        3,
        &[
            (0, switch(0, IDLE, true, 10)),
            (10, wakeup(11, 0)),              // 10 on: 10 and 11 are stacked; CPUs 1 and 2 are free
            (30, switch(1, IDLE, true, 90)),  // CPU 2 is free
            (40, switch(2, IDLE, true, 20)),  // none is free
            (60, switch(2, 20, false, IDLE)), // CPU 2 is free
            (70, migrate(11, 2)),             // no longer stacked
            (75, switch(2, IDLE, true, 11)),
        ],
    ));
    assert_eq!((vm.stacked_ns, vm.stacked_beside_free_cpu_ns), (60, 40));
    assert_eq!(vm.stacked_fraction(), Some(60.0 / 90.0));
    assert_eq!(vm.stacked_beside_free_cpu_fraction(), Some(40.0 / 90.0));
}

#[test]
fn siblings_in_different_queues_and_other_threads_are_not_stacked() {
    let vm = vm_a(&build(
        2,
        &[(0, switch(0, IDLE, true, 10)), (0, switch(1, IDLE, true, 11)), (5, wakeup(19, 0)), (5, wakeup(20, 1))],
    ));
    assert_eq!((vm.stacked_ns, vm.siblings_runnable_ns), (0, 100));
}

#[test]
fn preempted_time_counts_each_waiting_vcpu_while_a_sibling_runs() {
    let vm = vm_a(&build(
        3,
        &[
            (0, switch(0, IDLE, true, 10)),
            (0, switch(1, IDLE, true, 11)),
            (0, switch(2, IDLE, true, 12)),
            (20, switch(0, 10, true, 20)), // 10 is preempted: 20 to 40 once
            (40, switch(1, 11, true, 21)), // 10 and 11: 40 to 60 twice
            (60, switch(2, 12, true, 22)), // no sibling runs
            (90, switch(0, 20, true, 10)), // 11 and 12: 90 to 100 twice
        ],
    ));
    assert_eq!(vm.preempted_ns, 70 + 60 + 40);
    assert_eq!(vm.preempted_while_sibling_runs_ns, 20 + 2 * 20 + 2 * 10);
    assert_eq!(vm.preempted_while_sibling_spins_ns, None);
}

#[test]
fn waiting_after_a_wakeup_is_not_preempted_time() {
    let vm = vm_a(&build(2, &[(0, switch(0, IDLE, true, 10)), (30, wakeup(11, 0)), (50, migrate(11, 1))]));
    assert_eq!((vm.ready_ns, vm.preempted_ns, vm.preempted_while_sibling_runs_ns), (70, 0, 0));
}

#[test]
fn moved_wait_keeps_its_first_cause() {
    let vm = vm_a(&build(
        2,
        &[(0, switch(0, IDLE, true, 10)), (20, switch(0, 10, true, 11)), (40, migrate(10, 1)), (60, migrate(10, 0))],
    ));
    assert_eq!((vm.preempted_ns, vm.preempted_while_sibling_runs_ns), (80, 80));
}

#[test]
fn spins_count_only_while_the_spinning_vcpu_runs() {
    let vm = vm_a(&build(
        2,
        &[
            (0, switch(0, IDLE, true, 10)),
            (0, switch(1, IDLE, true, 11)),
            (10, SchedulerEventKind::SpinBegin { task: 11 }),
            (20, switch(0, 10, true, 20)), // 20 to 50: 10 is preempted, 11 spins
            (50, switch(1, 11, true, 21)), // 50 to 70: both are preempted, the spin stands still
            (70, switch(1, 21, true, 11)), // 70 to 80: 11 spins again
            (80, SchedulerEventKind::SpinEnd { task: 11 }),
        ],
    ));
    assert_eq!(vm.preempted_while_sibling_spins_ns, Some(30 + 10));
    assert_eq!(vm.preempted_while_sibling_runs_ns, 30 + 30);
}

#[test]
fn delay_of_a_wakeup_includes_moves() {
    let vm = vm_a(&build(
        2,
        &[
            (5, wakeup(10, 0)),
            (8, migrate(10, 1)),
            (12, switch(1, IDLE, true, 10)), // 7
            (20, switch(1, 10, true, 20)),
            (30, switch(1, 20, true, 10)), // preempted, no wake-up
            (40, switch(1, 10, false, IDLE)),
            (50, wakeup(10, 1)),
            (51, switch(1, IDLE, true, 10)), // 1
            (90, wakeup(11, 0)),             // does not run before the end
        ],
    ));
    let expected = DelayMeasures { count: 2, median_ns: 1, p95_ns: 7, p99_ns: 7, max_ns: 7, unfinished: 1 };
    assert_eq!(vm.wake_to_run, Some(expected));
    assert_eq!((vm.preemptions, vm.sleeps, vm.switches(), vm.migrations), (1, 1, 2, 0));
}

#[test]
fn quantiles_are_nearest_ranks() {
    let delays = DelayMeasures::new((1..=200).rev().collect(), 0);
    assert_eq!((delays.median_ns, delays.p95_ns, delays.p99_ns, delays.max_ns), (100, 190, 198, 200));
    assert_eq!(DelayMeasures::new(Vec::new(), 3), DelayMeasures { unfinished: 3, ..DelayMeasures::default() });
}

#[test]
fn run_on_another_cpu_is_a_migration() {
    let vm = vm_a(&build(
        2,
        &[
            (0, switch(0, IDLE, true, 10)),
            (10, switch(0, 10, true, 20)),
            (20, switch(1, IDLE, true, 10)),
            (30, switch(1, 10, false, IDLE)),
            (40, switch(1, IDLE, true, 10)),
            (50, switch(1, 10, false, IDLE)),
            (60, switch(0, 20, true, 10)),
        ],
    ));
    assert_eq!(vm.migrations, 2);
}

#[test]
fn source_without_wakeups_has_no_delays() {
    let mut builder = ScheduleBuilder::new();
    builder.set_without_wakeups();
    builder.add_vm("a");
    assert_eq!(measure(&builder.finish()).vms[0].wake_to_run, None);
}

/// Events of a scheduler with three CPUs: at each step, a CPU changes its task, or a task wakes up, is moved or spins.
fn events() -> impl Strategy<Value = Vec<(u64, SchedulerEventKind)>> {
    let tid = prop::sample::select(vec![IDLE, 10, 11, 12, 19, 20, 21, 22, 90]);
    let kind = prop_oneof![
        4 => (0..3u32, tid.clone(), any::<bool>(), tid.clone()).prop_map(|(cpu, previous, runnable, next)| switch(
            cpu, previous, runnable, next
        )),
        2 => (tid.clone(), 0..3u32).prop_map(|(task, cpu)| wakeup(task, cpu)),
        1 => (tid.clone(), 0..3u32).prop_map(|(task, cpu)| migrate(task, cpu)),
        1 => tid.clone().prop_map(|task| SchedulerEventKind::SpinBegin { task }),
        1 => tid.prop_map(|task| SchedulerEventKind::SpinEnd { task }),
    ];
    prop::collection::vec((0..=100u64, kind), 0..60)
}

/// The measures by a walk over each nanosecond.
fn measure_by_nanoseconds(schedule: &CpuSchedule, vm: usize) -> VmMeasures {
    let mut measures = VmMeasures::default();
    let mut causes = vec![WaitCause::Woken; schedule.waits.len()];
    for (index, wait) in schedule.waits.iter().enumerate() {
        let before = schedule.waits[..index].iter().rposition(|other| other.task == wait.task);
        causes[index] = match (wait.cause, before) {
            (WaitCause::Moved, Some(before)) if schedule.waits[before].to == wait.from => causes[before],
            (cause, _) => cause,
        };
    }
    let is_mine = |task: usize| schedule.tasks[task].vm == Some(vm) && schedule.tasks[task].vcpu.is_some();
    for time in schedule.start..schedule.end {
        let contains = |from: u64, to: u64| (from..to).contains(&time);
        let runs: Vec<_> = schedule.runs.iter().filter(|run| contains(run.from, run.to)).collect();
        let waits: Vec<_> = (0..causes.len())
            .filter(|&index| contains(schedule.waits[index].from, schedule.waits[index].to))
            .map(|index| (schedule.waits[index], causes[index]))
            .collect();
        let mine: Vec<_> = runs.iter().filter(|run| is_mine(run.task)).collect();
        let my_waits: Vec<_> = waits.iter().filter(|(wait, _)| is_mine(wait.task)).collect();
        let preempted = my_waits.iter().filter(|(_, cause)| *cause == WaitCause::Preempted).count() as u64;
        let spins = mine
            .iter()
            .any(|run| schedule.spins.iter().any(|spin| spin.task == run.task && contains(spin.from, spin.to)));
        let queue = |cpu: u32| {
            let running = runs.iter().filter(move |run| run.cpu == cpu).map(|run| run.task);
            running.chain(waits.iter().filter(move |(wait, _)| wait.cpu == cpu).map(|(wait, _)| wait.task))
        };
        let is_free = schedule.cpus.iter().any(|&cpu| queue(cpu).count() == 0);
        let is_stacked = schedule.cpus.iter().any(|&cpu| queue(cpu).filter(|&task| is_mine(task)).count() >= 2);
        let runnable = mine.len() + my_waits.len();
        let co_runs = my_waits.is_empty() || mine.len() >= schedule.cpus.len();
        measures.run_ns += mine.len() as u64;
        measures.ready_ns += my_waits.len() as u64;
        measures.preempted_ns += preempted;
        measures.runnable_ns += u64::from(runnable >= 1);
        measures.co_run_ns += u64::from(runnable >= 1 && co_runs);
        measures.siblings_runnable_ns += u64::from(runnable >= 2);
        measures.siblings_co_run_ns += u64::from(runnable >= 2 && co_runs);
        measures.stacked_ns += u64::from(is_stacked);
        measures.stacked_beside_free_cpu_ns += u64::from(is_stacked && is_free);
        measures.preempted_while_sibling_runs_ns += if mine.is_empty() { 0 } else { preempted };
        *measures.preempted_while_sibling_spins_ns.get_or_insert(0) += if spins { preempted } else { 0 };
    }
    measures
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn sweep_agrees_with_a_walk_over_nanoseconds(events in events()) {
        let schedule = build(3, &events);
        for (vm, measures) in measure(&schedule).vms.into_iter().enumerate() {
            let expected = VmMeasures {
                vcpus: measures.vcpus,
                wake_to_run: measures.wake_to_run,
                preemptions: measures.preemptions,
                sleeps: measures.sleeps,
                migrations: measures.migrations,
                preempted_while_sibling_spins_ns: measures.preempted_while_sibling_spins_ns.and(
                    measure_by_nanoseconds(&schedule, vm).preempted_while_sibling_spins_ns
                ),
                ..measure_by_nanoseconds(&schedule, vm)
            };
            prop_assert_eq!(measures, expected);
        }
    }

    #[test]
    fn times_sum_to_the_observed_time(events in events()) {
        let schedule = build(3, &events);
        let measures = measure(&schedule);
        prop_assert_eq!(measures.busy_ns + measures.idle_ns, 3 * schedule.duration());
        for vm in &measures.vms {
            prop_assert!(vm.run_ns + vm.ready_ns <= vm.vcpus as u64 * schedule.duration());
            prop_assert!(vm.co_run_ns <= vm.runnable_ns && vm.runnable_ns <= schedule.duration());
            prop_assert!(vm.siblings_co_run_ns <= vm.siblings_runnable_ns && vm.siblings_runnable_ns <= vm.runnable_ns);
            prop_assert!(vm.stacked_beside_free_cpu_ns <= vm.stacked_ns && vm.stacked_ns <= vm.siblings_runnable_ns);
            prop_assert!(vm.preempted_while_sibling_runs_ns <= vm.preempted_ns && vm.preempted_ns <= vm.ready_ns);
            prop_assert!(vm.preempted_while_sibling_spins_ns.unwrap_or(0) <= vm.preempted_while_sibling_runs_ns);
        }
    }
}
