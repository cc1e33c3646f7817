//! Recordings of a trace that is written by hand.

use super::*;
use crate::sources::event_format::tests::{SWITCH_FORMAT, WAKEUP_FORMAT};
use crate::sources::perf_data::read_perf_data;
use crate::sources::threads::Grouping;
use pagefold_host::scheduler_trace::{TraceDescription, TracedEvent};
use std::io::Cursor;

const SWITCH_IDS: [u64; 2] = [70, 71];
const WAKEUP_IDS: [u64; 2] = [80, 81];

fn description() -> TraceDescription {
    let event = |name, id, format: &str, ids: [u64; 2]| TracedEvent {
        name,
        id,
        format: format.as_bytes().to_vec(),
        sample_ids: ids.to_vec(),
    };
    TraceDescription {
        events: vec![
            event("sched_switch", 314, SWITCH_FORMAT, SWITCH_IDS),
            event("sched_wakeup", 317, WAKEUP_FORMAT, WAKEUP_IDS),
        ],
        header_page: b"page".to_vec(),
        header_event: b"event".to_vec(),
        cpus: vec![0, 1],
    }
}

fn record_of(kind: u32, body: &[u8]) -> Vec<u8> {
    let size = (body.len() + 8) as u16;
    [&kind.to_ne_bytes()[..], &[0; 2], &size.to_ne_bytes(), body].concat()
}

fn words(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

fn name_bytes(name: &str) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    bytes
}

fn sample(id: u64, (process, tid): (u32, u32), time: u64, cpu: u32, raw: &[u8]) -> Vec<u8> {
    let mut body = [&id.to_ne_bytes()[..], &words(&[process, tid]), &time.to_ne_bytes(), &words(&[cpu, 0])].concat();
    body.extend((raw.len() as u32).to_ne_bytes());
    body.extend(raw);
    body.resize(body.len().next_multiple_of(8), 0);
    record_of(record_type::SAMPLE, &body)
}

/// A thread: its process, number and name.
type Thread = (u32, u32, &'static str);
const IDLE_THREAD: Thread = (0, 0, "swapper");
const VCPU: Thread = (100, 101, "CPU 0/KVM");
const OTHER: Thread = (200, 201, "CPU 7/KVM");

fn switch(time: u64, cpu: u32, from: Thread, to: Thread) -> Vec<u8> {
    let raw = [
        &314u64.to_ne_bytes()[..],
        &name_bytes(from.2),
        &words(&[from.1, 120, 0, 0]),
        &name_bytes(to.2),
        &words(&[to.1, 120]),
    ];
    sample(SWITCH_IDS[cpu as usize], (from.0, from.1), time, cpu, &raw.concat())
}

fn wakeup(time: u64, thread: Thread, cpu: u32) -> Vec<u8> {
    let raw = [&317u64.to_ne_bytes()[..], &name_bytes(thread.2), &words(&[thread.1, 120, cpu])];
    sample(WAKEUP_IDS[cpu as usize], (0, 0), time, cpu, &raw.concat())
}

fn comm((process, tid, name): Thread) -> Vec<u8> {
    record_of(record_type::COMM, &[&words(&[process, tid])[..], &name_bytes(name), &[0; 32]].concat())
}

fn fork(process: u32, tid: u32) -> Vec<u8> {
    record_of(record_type::FORK, &[&words(&[process, process, tid, process])[..], &[0; 40]].concat())
}

fn lost(count: u64) -> Vec<u8> {
    record_of(record_type::LOST, &[&SWITCH_IDS[0].to_ne_bytes()[..], &count.to_ne_bytes(), &[0; 32]].concat())
}

struct WrittenTrace {
    description: TraceDescription,
    records: Vec<Vec<u8>>,
}

impl SchedulerTrace for WrittenTrace {
    fn description(&self) -> &TraceDescription {
        &self.description
    }

    fn take_records(&mut self, take: &mut dyn FnMut(&[u8])) {
        self.records.drain(..).for_each(|record| take(&record));
    }

    fn stop(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The file of a trace, with the threads that ran before, and the summary.
fn recorded(records: Vec<Vec<u8>>, threads: &[Thread], processes: &[u32]) -> (Vec<u8>, ScheduleRecordingSummary) {
    let mut trace = WrittenTrace { description: description(), records };
    let processes = processes.iter().copied().map(Pid).collect();
    let mut filter = NameFilter::new(&trace.description, &processes);
    let mut file = Cursor::new(Vec::new());
    let mut writer = PerfDataWriter::create(&mut file, description(), "6.18").unwrap();
    for &(process, tid, name) in threads {
        filter.add_thread(tid);
        writer.add_thread_name(process, tid, name).unwrap();
    }
    let mut summary = ScheduleRecordingSummary::default();
    take_records(&mut trace, &mut filter, &mut writer, &mut summary).unwrap();
    writer.finish().unwrap();
    (file.into_inner(), summary)
}

fn two_vms() -> Vec<Vec<u8>> {
    vec![
        switch(1000, 0, IDLE_THREAD, VCPU),
        switch(1010, 1, IDLE_THREAD, OTHER),
        wakeup(1020, VCPU, 0),
        comm(OTHER),
        lost(5),
        switch(1040, 0, VCPU, OTHER),
        switch(1090, 1, OTHER, IDLE_THREAD),
    ]
}

#[test]
fn file_is_read_as_the_schedule_that_was_recorded() {
    let (bytes, summary) = recorded(two_vms(), &[(100, 100, "qemu-system-x86_64"), VCPU], &[]);
    assert_eq!((summary.events, summary.lost_events), (5, 5));
    let read = read_perf_data(Cursor::new(bytes), Grouping::Machines).unwrap();
    let schedule = read.schedule;
    assert_eq!((read.online_cpus, read.events, schedule.lost_events), (Some(2), 5, 5));
    assert_eq!((schedule.start, schedule.end, schedule.has_wakeups), (1000, 1090, true));
    // Names have at most 15 bytes, as in the kernel.
    let vms: Vec<_> = schedule.vms.iter().map(|vm| vm.name.as_str()).collect();
    assert_eq!(vms, ["process 200", "qemu-system-x86 (100)"]);
    let runs: Vec<_> = schedule.runs.iter().map(|run| (schedule.tasks[run.task].tid, run.from, run.to)).collect();
    assert_eq!(runs, [(101, 1000, 1040), (201, 1010, 1040), (201, 1040, 1090)]);
}

#[test]
fn names_of_other_processes_are_left_out_and_their_runs_stay() {
    let (bytes, _) = recorded(two_vms(), &[(100, 100, "qemu"), VCPU], &[100]);
    assert!(!bytes.windows(9).any(|part| part == b"CPU 7/KVM"));
    let schedule = read_perf_data(Cursor::new(bytes), Grouping::Machines).unwrap().schedule;
    assert_eq!(schedule.vms.len(), 1);
    assert_eq!((schedule.runs.len(), &schedule.cpus[..]), (3, &[0, 1][..]));
}

#[test]
fn threads_that_a_selected_process_starts_keep_their_names() {
    let started = (100, 102, "CPU 1/KVM");
    let reused = (200, 101, "CPU 9/KVM");
    let records =
        vec![fork(100, 102), switch(10, 0, IDLE_THREAD, started), fork(200, 101), switch(20, 0, started, reused)];
    let (bytes, _) = recorded(records, &[VCPU], &[100]);
    let has = |name: &[u8]| bytes.windows(name.len()).any(|part| part == name);
    assert!(has(b"CPU 1/KVM") && !has(b"CPU 9/KVM"));
}

#[test]
fn recorded_host_is_refused() {
    let host = pagefold_host::fake_host::FakeHost::booted();
    let options = RecordingOptions { duration: Duration::ZERO, processes: BTreeSet::new(), buffer_bytes: 1 };
    let refused = record(&host, &options, &AtomicBool::new(false), Cursor::new(Vec::new()));
    assert!(matches!(refused, Err(ScheduleRecordingError::Trace(SchedulerTraceError::NotLive))), "{refused:?}");
}
