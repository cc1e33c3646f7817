//! Schedules as traces of Perfetto, which ui.perfetto.dev opens.
//!
//! The messages are the part of protos/perfetto/trace/perfetto_trace.proto that schedules need, with the numbers of its
//! fields. Switches and wake-ups become events of ftrace, one bundle for each CPU; machines become processes.

use crate::schedule::{CpuSchedule, IDLE, RunEnd, RunInterval, Task, WaitCause};
use prost::Message;
use std::collections::{BTreeMap, BTreeSet};

/// The sequence of all packets; any number but zero.
const SEQUENCE_ID: u32 = 1;
/// `prev_state` of a task that waits for an event (`TASK_INTERRUPTIBLE`, include/linux/sched.h).
const SLEEP_STATE: i64 = 1;

#[derive(Clone, PartialEq, Message)]
struct Trace {
    #[prost(message, repeated, tag = "1")]
    packet: Vec<TracePacket>,
}

#[derive(Clone, PartialEq, Message)]
struct TracePacket {
    #[prost(message, optional, tag = "1")]
    ftrace_events: Option<FtraceEventBundle>,
    #[prost(message, optional, tag = "2")]
    process_tree: Option<ProcessTree>,
    #[prost(uint64, optional, tag = "8")]
    timestamp: Option<u64>,
    #[prost(uint32, optional, tag = "10")]
    trusted_packet_sequence_id: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
struct FtraceEventBundle {
    #[prost(uint32, optional, tag = "1")]
    cpu: Option<u32>,
    #[prost(message, repeated, tag = "2")]
    event: Vec<FtraceEvent>,
}

#[derive(Clone, PartialEq, Message)]
struct FtraceEvent {
    #[prost(uint64, optional, tag = "1")]
    timestamp: Option<u64>,
    #[prost(uint32, optional, tag = "2")]
    pid: Option<u32>,
    #[prost(message, optional, tag = "4")]
    sched_switch: Option<SchedSwitch>,
    #[prost(message, optional, tag = "17")]
    sched_wakeup: Option<SchedWakeup>,
}

#[derive(Clone, PartialEq, Message)]
struct SchedSwitch {
    #[prost(string, optional, tag = "1")]
    prev_comm: Option<String>,
    #[prost(int32, optional, tag = "2")]
    prev_pid: Option<i32>,
    #[prost(int64, optional, tag = "4")]
    prev_state: Option<i64>,
    #[prost(string, optional, tag = "5")]
    next_comm: Option<String>,
    #[prost(int32, optional, tag = "6")]
    next_pid: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
struct SchedWakeup {
    #[prost(string, optional, tag = "1")]
    comm: Option<String>,
    #[prost(int32, optional, tag = "2")]
    pid: Option<i32>,
    #[prost(int32, optional, tag = "5")]
    target_cpu: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
struct ProcessTree {
    #[prost(message, repeated, tag = "1")]
    processes: Vec<Process>,
    #[prost(message, repeated, tag = "2")]
    threads: Vec<Thread>,
}

#[derive(Clone, PartialEq, Message)]
struct Process {
    #[prost(int32, optional, tag = "1")]
    pid: Option<i32>,
    #[prost(string, repeated, tag = "3")]
    cmdline: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
struct Thread {
    #[prost(int32, optional, tag = "1")]
    tid: Option<i32>,
    #[prost(string, optional, tag = "2")]
    name: Option<String>,
    #[prost(int32, optional, tag = "3")]
    tgid: Option<i32>,
}

/// The bytes of a trace with the schedule.
pub fn encode(schedule: &CpuSchedule) -> Vec<u8> {
    let packet = |ftrace_events, process_tree, timestamp| TracePacket {
        ftrace_events,
        process_tree,
        timestamp,
        trusted_packet_sequence_id: Some(SEQUENCE_ID),
    };
    let mut events = switch_events(schedule);
    for wait in schedule.waits.iter().filter(|wait| wait.cause == WaitCause::Woken) {
        let task = &schedule.tasks[wait.task];
        let sched_wakeup = SchedWakeup {
            comm: Some(task.name.clone()),
            pid: Some(task.tid as i32),
            target_cpu: Some(wait.cpu as i32),
        };
        let event = FtraceEvent {
            timestamp: Some(wait.from),
            pid: Some(IDLE),
            sched_switch: None,
            sched_wakeup: Some(sched_wakeup),
        };
        events.entry(wait.cpu).or_default().push(event);
    }
    let mut packets = vec![packet(None, Some(process_tree(schedule)), Some(schedule.start))];
    for (cpu, mut event) in events {
        event.sort_by_key(|event| event.timestamp);
        packets.push(packet(Some(FtraceEventBundle { cpu: Some(cpu), event }), None, None));
    }
    Trace { packet: packets }.encode_to_vec()
}

/// The switches of each CPU. A run that no other follows at once is followed by the idle task.
fn switch_events(schedule: &CpuSchedule) -> BTreeMap<u32, Vec<FtraceEvent>> {
    let mut runs_of_cpu: BTreeMap<u32, Vec<&RunInterval>> = BTreeMap::new();
    for run in &schedule.runs {
        runs_of_cpu.entry(run.cpu).or_default().push(run);
    }
    let mut events: BTreeMap<u32, Vec<FtraceEvent>> = BTreeMap::new();
    for (cpu, runs) in runs_of_cpu {
        let of_cpu = events.entry(cpu).or_default();
        let mut previous: Option<&RunInterval> = None;
        for run in runs {
            let is_adjacent = previous.is_some_and(|previous| previous.to == run.from);
            if let Some(ended) = previous.filter(|_| !is_adjacent) {
                of_cpu.push(switch_event(schedule, ended.to, Some(ended), None));
            }
            of_cpu.push(switch_event(schedule, run.from, previous.filter(|_| is_adjacent), Some(run)));
            previous = Some(run);
        }
        if let Some(ended) = previous {
            of_cpu.push(switch_event(schedule, ended.to, Some(ended), None));
        }
    }
    events
}

fn switch_event(
    schedule: &CpuSchedule,
    time: u64,
    previous: Option<&RunInterval>,
    next: Option<&RunInterval>,
) -> FtraceEvent {
    let task = |run: Option<&RunInterval>| run.map(|run| &schedule.tasks[run.task]);
    let name = |task: Option<&Task>| task.map_or_else(|| "swapper".to_owned(), |task| task.name.clone());
    let tid = |task: Option<&Task>| task.map_or(IDLE, |task| task.tid) as i32;
    let sleeps = previous.is_some_and(|run| run.end == RunEnd::Slept);
    let sched_switch = SchedSwitch {
        prev_comm: Some(name(task(previous))),
        prev_pid: Some(tid(task(previous))),
        prev_state: Some(if sleeps { SLEEP_STATE } else { 0 }),
        next_comm: Some(name(task(next))),
        next_pid: Some(tid(task(next))),
    };
    FtraceEvent {
        timestamp: Some(time),
        pid: Some(tid(task(previous)) as u32),
        sched_switch: Some(sched_switch),
        sched_wakeup: None,
    }
}

/// The threads, and the processes of machines by their names.
fn process_tree(schedule: &CpuSchedule) -> ProcessTree {
    let machines: BTreeSet<(u32, &str)> =
        schedule.tasks.iter().filter_map(|task| Some((task.process?, schedule.vms[task.vm?].name.as_str()))).collect();
    let process = |(pid, name): (u32, &str)| Process { pid: Some(pid as i32), cmdline: vec![name.to_owned()] };
    let thread = |task: &Task| Thread {
        tid: Some(task.tid as i32),
        name: Some(task.name.clone()),
        tgid: task.process.map(|process| process as i32),
    };
    ProcessTree {
        processes: machines.into_iter().map(process).collect(),
        threads: schedule.tasks.iter().map(thread).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{ScheduleBuilder, SchedulerEvent, SchedulerEventKind};

    /// Time, previous thread, its state, and next thread of each switch.
    fn switches(bundle: &FtraceEventBundle) -> Vec<(u64, i32, i64, i32)> {
        let switches = bundle.event.iter().filter_map(|event| Some((event.timestamp?, event.sched_switch.clone()?)));
        switches.map(|(time, switch)| (time, switch.prev_pid(), switch.prev_state(), switch.next_pid())).collect()
    }

    #[test]
    fn events_of_a_schedule_come_back() {
        let mut builder = ScheduleBuilder::new();
        let vm = Some(builder.add_vm("web"));
        for tid in [11, 12] {
            builder.set_task(Task { tid, process: Some(10), name: format!("CPU {tid}"), vm, vcpu: Some(tid - 11) });
        }
        let switch = |previous, previous_runnable, next| SchedulerEventKind::Switch {
            cpu: 3,
            previous,
            previous_runnable,
            next,
        };
        for (time, kind) in [
            (100, switch(IDLE, true, 11)),
            (110, SchedulerEventKind::Wakeup { task: 12, cpu: 3 }),
            (120, switch(11, true, 12)),
            (150, switch(12, false, 11)),
            (170, switch(11, false, IDLE)),
            (190, switch(IDLE, true, 12)),
            (200, switch(12, false, IDLE)),
        ] {
            builder.add_event(SchedulerEvent { time, kind });
        }
        let trace = Trace::decode(&encode(&builder.finish())[..]).unwrap();
        let [tree, events] = &trace.packet[..] else { panic!("{trace:?}") };
        let tree = tree.process_tree.as_ref().unwrap();
        assert_eq!(tree.processes, [Process { pid: Some(10), cmdline: vec!["web".to_owned()] }]);
        assert_eq!(
            tree.threads.iter().map(|thread| (thread.tid(), thread.tgid())).collect::<Vec<_>>(),
            [(11, 10), (12, 10)]
        );
        let bundle = events.ftrace_events.as_ref().unwrap();
        assert_eq!(bundle.cpu, Some(3));
        assert_eq!(
            switches(bundle),
            [(100, 0, 0, 11), (120, 11, 0, 12), (150, 12, 1, 11), (170, 11, 1, 0), (190, 0, 0, 12), (200, 12, 1, 0),]
        );
        let wakeups: Vec<_> =
            bundle.event.iter().filter_map(|event| Some((event.timestamp?, event.sched_wakeup.clone()?))).collect();
        assert_eq!(wakeups.len(), 1);
        assert_eq!((wakeups[0].0, wakeups[0].1.pid(), wakeups[0].1.target_cpu()), (110, 12, 3));
    }
}
