//! Files written by hand, as perf writes them on a little-endian host.

use super::super::event_format;
use super::*;
use crate::decide::measures::measure;
use crate::schedule::{RunEnd, WaitCause};
use proptest::prelude::*;
use std::io::Cursor;
use std::path::Path;

const SWITCH_EVENT: u64 = 314;
const WAKEUP_EVENT: u64 = 317;
const TRACEPOINT_TYPE: u32 = 2;
const ATTRIBUTE_BYTES: u32 = 128;
/// `PERF_SAMPLE_TID | TIME | CPU | RAW | IDENTIFIER`.
const SAMPLE_FORMAT: u64 = 1 << 1 | 1 << 2 | 1 << 7 | 1 << 10 | 1 << 16;
/// `sample_id_all`.
const FLAGS: u64 = 1 << 18;

fn bytes_of_name(name: &str) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    bytes
}

fn record(kind: u32, body: &[u8]) -> Vec<u8> {
    let size = u16::try_from(body.len() + 8).unwrap();
    [&kind.to_le_bytes()[..], &[0; 2], &size.to_le_bytes(), body].concat()
}

/// A sample of the thread `tid` of the process `pid`.
fn sample(event: u64, (pid, tid): (u32, u32), time: u64, cpu: u32, raw: &[u8]) -> Vec<u8> {
    let raw_size = raw.len() as u32;
    let numbers = [event.to_le_bytes(), (u64::from(tid) << 32 | u64::from(pid)).to_le_bytes(), time.to_le_bytes()];
    let mut body = [&numbers.concat()[..], &u64::from(cpu).to_le_bytes(), &raw_size.to_le_bytes(), raw].concat();
    body.resize(body.len().next_multiple_of(8), 0);
    record(9, &body)
}

type NamedThread<'a> = (u32, &'a str);

fn switch(
    time: u64,
    cpu: u32,
    pid: u32,
    (previous, previous_name): NamedThread<'_>,
    state: u64,
    (next, next_name): NamedThread<'_>,
) -> Vec<u8> {
    let raw = [
        &(SWITCH_EVENT).to_le_bytes()[..],
        &bytes_of_name(previous_name),
        &previous.to_le_bytes(),
        &120u32.to_le_bytes(),
        &state.to_le_bytes(),
        &bytes_of_name(next_name),
        &next.to_le_bytes(),
        &120u32.to_le_bytes(),
    ];
    sample(SWITCH_EVENT, (pid, previous), time, cpu, &raw.concat())
}

fn wakeup(time: u64, (task, name): NamedThread<'_>, target_cpu: u32) -> Vec<u8> {
    let raw = [
        &(WAKEUP_EVENT).to_le_bytes()[..],
        &bytes_of_name(name),
        &task.to_le_bytes(),
        &120u32.to_le_bytes(),
        &target_cpu.to_le_bytes(),
    ];
    sample(WAKEUP_EVENT, (0, 0), time, 0, &raw.concat())
}

/// A name of a thread that existed when the recording began.
fn comm((tid, name): NamedThread<'_>, pid: u32) -> Vec<u8> {
    let sample_id = [0u64, 0, 0, SWITCH_EVENT].map(u64::to_le_bytes).concat();
    record(3, &[&pid.to_le_bytes()[..], &tid.to_le_bytes(), &bytes_of_name(name), &sample_id].concat())
}

fn lost(count: u64) -> Vec<u8> {
    let sample_id = [0u64, 0, 0, SWITCH_EVENT].map(u64::to_le_bytes).concat();
    record(2, &[&SWITCH_EVENT.to_le_bytes()[..], &count.to_le_bytes(), &sample_id].concat())
}

fn attribute(event: u64) -> Vec<u8> {
    let mut bytes = [TRACEPOINT_TYPE.to_le_bytes(), ATTRIBUTE_BYTES.to_le_bytes()].concat();
    for number in [event, 1, SAMPLE_FORMAT, 0, FLAGS] {
        bytes.extend(number.to_le_bytes());
    }
    bytes.resize(ATTRIBUTE_BYTES as usize, 0);
    bytes
}

/// A file with records of the given events; the identifier of an event is its number.
fn file(events: &[(u64, &str)], records: &[Vec<u8>]) -> Vec<u8> {
    let data = records.concat();
    let mut descriptions = [(events.len() as u32).to_le_bytes(), ATTRIBUTE_BYTES.to_le_bytes()].concat();
    for &(event, name) in events {
        descriptions.extend(attribute(event));
        descriptions.extend(1u32.to_le_bytes());
        descriptions.extend(64u32.to_le_bytes());
        let mut name = name.as_bytes().to_vec();
        name.resize(64, 0);
        descriptions.extend(name);
        descriptions.extend(event.to_le_bytes());
    }
    let cpus = [8u32.to_le_bytes(), 4u32.to_le_bytes()].concat();
    // Features 1 (trace data), 7 (CPUs) and 12 (descriptions of events).
    let sections = [event_format::tests::block(), cpus, descriptions];
    let data_end = (HEADER_BYTES + data.len()) as u64;
    let header =
        [104, u64::from(ATTRIBUTE_BYTES) + 16, 104, 0, 104, data.len() as u64, 0, 0, 1 << 1 | 1 << 7 | 1 << 12];
    let mut bytes = b"PERFILE2".to_vec();
    bytes.extend(header.map(u64::to_le_bytes).concat());
    bytes.resize(HEADER_BYTES, 0);
    bytes.extend(data);
    let mut offset = data_end + 16 * sections.len() as u64;
    for section in &sections {
        bytes.extend(offset.to_le_bytes());
        bytes.extend((section.len() as u64).to_le_bytes());
        offset += section.len() as u64;
    }
    bytes.extend(sections.concat());
    bytes
}

const BOTH_EVENTS: [(u64, &str); 2] = [(SWITCH_EVENT, "sched:sched_switch"), (WAKEUP_EVENT, "sched:sched_wakeup")];
const IDLE_THREAD: NamedThread<'_> = (0, "swapper/0");
const VCPU0: NamedThread<'_> = (101, "CPU 0/KVM");
const VCPU1: NamedThread<'_> = (102, "CPU 1/KVM");
const RUNNABLE: u64 = 0;
const PREEMPTED: u64 = 0x100;
const SLEEPS: u64 = 1;

/// A machine of two vCPUs on two CPUs, with times in units of `unit` nanoseconds.
fn two_vcpus_in_units(unit: u64) -> Vec<u8> {
    file(
        &BOTH_EVENTS,
        &[
            comm((100, "qemu-system-x86"), 100),
            comm(VCPU0, 100),
            comm(VCPU1, 100),
            switch(1000 * unit, 0, 0, IDLE_THREAD, RUNNABLE, VCPU0),
            wakeup(1010 * unit, VCPU1, 0),
            switch(1030 * unit, 0, 100, VCPU0, PREEMPTED, VCPU1),
            switch(1040 * unit, 1, 0, IDLE_THREAD, RUNNABLE, VCPU0),
            switch(1090 * unit, 1, 100, VCPU0, SLEEPS, IDLE_THREAD),
            lost(3),
            switch(1100 * unit, 0, 100, VCPU1, SLEEPS, IDLE_THREAD),
        ],
    )
}

fn two_vcpus() -> Vec<u8> {
    two_vcpus_in_units(1)
}

fn read(bytes: Vec<u8>) -> Result<RecordedSchedule, PerfDataError> {
    read_perf_data(Cursor::new(bytes), Grouping::Machines)
}

#[test]
fn events_become_a_schedule() {
    let RecordedSchedule { schedule, online_cpus, events, .. } = read(two_vcpus()).unwrap();
    assert_eq!((online_cpus, events, schedule.lost_events), (Some(4), 6, 3));
    assert_eq!((schedule.start, schedule.end, &schedule.cpus[..]), (1000, 1100, &[0, 1][..]));
    assert_eq!(schedule.vms[0].name, "qemu-system-x86 (100)");
    let tid = |task: usize| schedule.tasks[task].tid;
    let runs: Vec<_> = schedule.runs.iter().map(|run| (tid(run.task), run.cpu, run.from, run.to, run.end)).collect();
    assert_eq!(
        runs,
        [
            (101, 0, 1000, 1030, RunEnd::Preempted),
            (102, 0, 1030, 1100, RunEnd::Slept),
            (101, 1, 1040, 1090, RunEnd::Slept),
        ]
    );
    let waits: Vec<_> =
        schedule.waits.iter().map(|wait| (tid(wait.task), wait.cpu, wait.from, wait.to, wait.cause)).collect();
    assert_eq!(waits, [(102, 0, 1010, 1030, WaitCause::Woken), (101, 0, 1030, 1040, WaitCause::Preempted)]);
}

#[test]
fn measures_of_a_file_are_those_computed_by_hand() {
    let vm = &measure(&read(two_vcpus()).unwrap().schedule).vms[0];
    // Runnable from 1000 to 1100; both from 1010 to 1090; all that are runnable run but from 1010 to 1040.
    assert_eq!((vm.runnable_ns, vm.co_run_ns, vm.siblings_runnable_ns, vm.siblings_co_run_ns), (100, 70, 80, 50));
    // Both are in the queue of CPU 0 from 1010 to 1040, while CPU 1 is free.
    assert_eq!((vm.stacked_ns, vm.stacked_beside_free_cpu_ns), (30, 30));
    assert_eq!((vm.preemptions, vm.sleeps, vm.migrations), (1, 2, 1));
    assert_eq!(vm.wake_to_run.map(|delay| (delay.count, delay.max_ns)), Some((1, 20)));
}

#[test]
fn fixture_of_the_command_is_the_file_of_these_tests() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/vcpu/two-vcpus.perf.data");
    let current = two_vcpus_in_units(10_000);
    if std::env::var_os("UPDATE_FIXTURES").is_some() {
        std::fs::write(&path, &current).unwrap();
    }
    assert!(std::fs::read(&path).unwrap_or_default() == current, "run with UPDATE_FIXTURES=1");
}

#[test]
fn file_without_wakeups_says_so() {
    let schedule = read(file(
        &BOTH_EVENTS[..1],
        &[switch(10, 0, 0, IDLE_THREAD, RUNNABLE, VCPU0), switch(30, 0, 100, VCPU0, SLEEPS, IDLE_THREAD)],
    ));
    let schedule = schedule.unwrap().schedule;
    assert!(!schedule.has_wakeups);
    // The process is known from the sample of the switch.
    assert_eq!(schedule.vms[0].name, "process 100");
}

#[test]
fn files_of_other_kinds_are_refused_with_a_remedy() {
    assert!(matches!(read(b"\x17\x08\x44tracing".to_vec()), Err(PerfDataError::Signature)));
    assert!(matches!(read(Vec::new()), Err(PerfDataError::Signature)));
    let stream = [b"PERFILE2".to_vec(), 16u64.to_le_bytes().to_vec()].concat();
    assert!(matches!(read(stream), Err(PerfDataError::Stream)));
    let empty = read(file(&BOTH_EVENTS, &[]));
    assert!(matches!(&empty, Err(error @ PerfDataError::NoSwitches) if error.to_string().contains("perf record -e")));
}

#[test]
fn damaged_counts_and_times_are_refused() {
    let mut bytes = two_vcpus();
    let descriptions = bytes.windows(8).position(|part| part == [2, 0, 0, 0, 128, 0, 0, 0]).unwrap();
    bytes[descriptions + 3] = 0x7f;
    assert!(matches!(read(bytes), Err(PerfDataError::Event(EventFormatError::Truncated(_)))));
    assert!(matches!(read(two_vcpus_in_units(1 << 50)), Err(PerfDataError::Event(EventFormatError::Span))));
}

#[test]
fn samples_with_call_chains_are_refused() {
    let mut bytes = two_vcpus();
    let fields = SAMPLE_FORMAT.to_le_bytes();
    let positions: Vec<usize> = (0..bytes.len() - 8).filter(|&at| bytes[at..at + 8] == fields).collect();
    for at in positions {
        bytes[at..at + 8].copy_from_slice(&(SAMPLE_FORMAT | 1 << 5).to_le_bytes());
    }
    assert!(matches!(read(bytes), Err(PerfDataError::UnsupportedSamples)));
}

#[test]
fn truncated_files_are_refused() {
    let bytes = two_vcpus();
    for length in 0..bytes.len() {
        assert!(read(bytes[..length].to_vec()).is_err(), "{length}");
    }
}

proptest! {
    #[test]
    fn damaged_files_do_not_panic(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let mut bytes = two_vcpus();
        for (index, byte) in changes {
            let index = index.index(bytes.len());
            bytes[index] = byte;
        }
        let _ = read(bytes);
    }
}
