//! Schedules of event sequences written by hand.

use super::super::{
    CpuSchedule, IDLE, RunEnd, RunInterval, ScheduleBuilder, SchedulerEvent, SchedulerEventKind, WaitCause,
    WaitInterval,
};

fn switch(time: u64, cpu: u32, previous: u32, previous_runnable: bool, next: u32) -> SchedulerEvent {
    SchedulerEvent { time, kind: SchedulerEventKind::Switch { cpu, previous, previous_runnable, next } }
}

fn wakeup(time: u64, task: u32, cpu: u32) -> SchedulerEvent {
    SchedulerEvent { time, kind: SchedulerEventKind::Wakeup { task, cpu } }
}

fn migrate(time: u64, task: u32, cpu: u32) -> SchedulerEvent {
    SchedulerEvent { time, kind: SchedulerEventKind::Migrate { task, cpu } }
}

fn build(events: &[SchedulerEvent]) -> CpuSchedule {
    let mut builder = ScheduleBuilder::new();
    builder.set_span(0, 100);
    for &event in events {
        builder.add_event(event);
    }
    builder.finish()
}

/// Thread number, CPU, start and end of each run.
fn runs(schedule: &CpuSchedule) -> Vec<(u32, u32, u64, u64, RunEnd)> {
    let tid = |run: &RunInterval| schedule.tasks[run.task].tid;
    schedule.runs.iter().map(|run| (tid(run), run.cpu, run.from, run.to, run.end)).collect()
}

/// Thread number, CPU, start and end of each wait.
fn waits(schedule: &CpuSchedule) -> Vec<(u32, u32, u64, u64, WaitCause)> {
    let tid = |wait: &WaitInterval| schedule.tasks[wait.task].tid;
    schedule.waits.iter().map(|wait| (tid(wait), wait.cpu, wait.from, wait.to, wait.cause)).collect()
}

#[test]
fn preempted_task_waits_and_sleeping_task_does_not() {
    let schedule = build(&[switch(10, 0, IDLE, true, 7), switch(30, 0, 7, true, 8), switch(50, 0, 8, false, 7)]);
    assert_eq!(
        runs(&schedule),
        [(7, 0, 10, 30, RunEnd::Preempted), (8, 0, 30, 50, RunEnd::Slept), (7, 0, 50, 100, RunEnd::Unknown)]
    );
    assert_eq!(waits(&schedule), [(7, 0, 30, 50, WaitCause::Preempted)]);
}

#[test]
fn task_that_runs_at_first_switch_ran_since_the_start() {
    let schedule = build(&[switch(40, 1, 7, false, IDLE)]);
    assert_eq!(runs(&schedule), [(7, 1, 0, 40, RunEnd::Slept)]);
    assert_eq!(schedule.cpus, [1]);
}

#[test]
fn woken_task_waits_until_it_runs() {
    let schedule = build(&[wakeup(5, 7, 0), switch(9, 0, IDLE, true, 7)]);
    assert_eq!(waits(&schedule), [(7, 0, 5, 9, WaitCause::Woken)]);
    assert_eq!(runs(&schedule), [(7, 0, 9, 100, RunEnd::Unknown)]);
}

#[test]
fn wakeup_of_a_waiting_task_changes_nothing() {
    let schedule = build(&[wakeup(5, 7, 0), wakeup(6, 7, 1), switch(9, 0, IDLE, true, 7), wakeup(20, 7, 1)]);
    assert_eq!(waits(&schedule), [(7, 0, 5, 9, WaitCause::Woken)]);
}

#[test]
fn move_of_a_waiting_task_splits_its_wait() {
    let schedule = build(&[wakeup(5, 7, 0), migrate(8, 7, 1), switch(9, 1, IDLE, true, 7)]);
    assert_eq!(waits(&schedule), [(7, 0, 5, 8, WaitCause::Woken), (7, 1, 8, 9, WaitCause::Moved)]);
}

#[test]
fn move_of_a_sleeping_task_is_no_wait() {
    let schedule = build(&[switch(10, 0, 7, false, IDLE), migrate(20, 7, 1), wakeup(21, 7, 1)]);
    assert_eq!(waits(&schedule), [(7, 1, 21, 100, WaitCause::Woken)]);
}

#[test]
fn events_of_several_cpus_may_come_in_any_order() {
    let events = [
        switch(10, 0, IDLE, true, 7),
        switch(12, 1, IDLE, true, 8),
        switch(30, 0, 7, true, 9),
        wakeup(31, 10, 1),
        switch(40, 1, 8, false, 10),
    ];
    let mut reversed = events;
    reversed.reverse();
    let sorted = build(&events);
    let unsorted = build(&reversed);
    assert_eq!(runs(&sorted), runs(&unsorted));
    assert_eq!(waits(&sorted), waits(&unsorted));
}

#[test]
fn lost_switch_ends_the_run_that_went_on_elsewhere() {
    // The event at which task 7 left CPU 0 is missing.
    let schedule = build(&[switch(10, 0, IDLE, true, 7), switch(30, 1, IDLE, true, 7), switch(50, 0, 8, false, IDLE)]);
    assert_eq!(runs(&schedule), [(7, 0, 10, 30, RunEnd::Unknown), (7, 1, 30, 100, RunEnd::Unknown)]);
}

#[test]
fn task_with_a_lost_switch_did_not_run_since_the_start() {
    // The events at which task 7 left CPU 0 and came to CPU 1 are missing.
    let schedule = build(&[switch(10, 0, IDLE, true, 7), switch(30, 0, 8, false, IDLE), switch(50, 1, 7, false, IDLE)]);
    assert_eq!(runs(&schedule), [(7, 0, 10, 30, RunEnd::Unknown)]);
}

#[test]
fn spin_ends_with_the_schedule_at_the_latest() {
    let spin = |time, kind| SchedulerEvent { time, kind };
    let schedule = build(&[
        switch(0, 0, IDLE, true, 7),
        spin(10, SchedulerEventKind::SpinBegin { task: 7 }),
        spin(20, SchedulerEventKind::SpinEnd { task: 7 }),
        spin(90, SchedulerEventKind::SpinBegin { task: 7 }),
    ]);
    let spins: Vec<_> = schedule.spins.iter().map(|spin| (spin.from, spin.to)).collect();
    assert_eq!(spins, [(10, 20), (90, 100)]);
    assert!(schedule.has_spins);
}
