//! The events of the kernel's scheduler, recorded while they happen.
//!
//! A trace delivers the records of perf_event_open(2) as the kernel writes them (include/uapi/linux/perf_event.h), with
//! the layouts of its events. All events are samples with the fields of [`SAMPLE_FIELDS`] and the flags of
//! [`ATTRIBUTE_FLAGS`], in nanoseconds of CLOCK_MONOTONIC.

use std::io;
use thiserror::Error;

/// The recorded tracepoints of the subsystem `sched`, by their names (include/trace/events/sched.h).
pub const SCHEDULER_EVENTS: [&str; 4] = ["sched_switch", "sched_wakeup", "sched_wakeup_new", "sched_migrate_task"];

/// `PERF_SAMPLE_TID | TIME | CPU | RAW | IDENTIFIER`: the fields of each sample, as `sample_type`.
pub const SAMPLE_FIELDS: u64 = 1 << 1 | 1 << 2 | 1 << 7 | 1 << 10 | 1 << 16;

/// `sample_id_all` and `use_clockid`: the flags of each event's `perf_event_attr`.
pub const ATTRIBUTE_FLAGS: u64 = 1 << 18 | 1 << 25;

/// `comm` and `task`: additional flags of the first event, by which names and starts of threads are recorded.
pub const THREAD_FLAGS: u64 = 1 << 9 | 1 << 13;

/// `clockid`: CLOCK_MONOTONIC.
pub const CLOCK: u32 = 1;

/// Why the scheduler's events cannot be recorded.
#[derive(Debug, Error)]
pub enum SchedulerTraceError {
    /// The host does not run.
    #[error("the scheduler can be recorded on the live host only: leave out --host")]
    NotLive,
    /// The kernel's descriptions of events are not accessible.
    #[error(
        "cannot read the descriptions of the scheduler's events in tracefs: {0}; run as root on a kernel with \
         CONFIG_EVENT_TRACING, outside a container, or mount tracefs: mount -t tracefs tracefs /sys/kernel/tracing"
    )]
    Tracefs(io::Error),
    /// The kernel does not record the event.
    #[error(
        "the kernel refuses to record {event} on CPU {cpu}: {error} (kernel.perf_event_paranoid is {paranoid}); run as \
         root or with CAP_PERFMON, on a kernel with CONFIG_PERF_EVENTS"
    )]
    Refused {
        /// The event.
        event: &'static str,
        /// The CPU.
        cpu: u32,
        /// The kernel's setting.
        paranoid: String,
        /// The kernel's answer.
        error: io::Error,
    },
    /// There is no memory for a buffer.
    #[error("cannot allocate a buffer of {bytes} bytes for the events of CPU {cpu}: {error}; give a smaller --buffer")]
    Buffer {
        /// Its size.
        bytes: usize,
        /// The CPU.
        cpu: u32,
        /// The kernel's answer.
        error: io::Error,
    },
}

/// An event that is recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracedEvent {
    /// Its name: one of [`SCHEDULER_EVENTS`].
    pub name: &'static str,
    /// Its number on this kernel.
    pub id: u64,
    /// Its layout, as in its `format` file.
    pub format: Vec<u8>,
    /// The identifiers by which samples name it: one for each CPU.
    pub sample_ids: Vec<u64>,
}

/// What is recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TraceDescription {
    /// The events.
    pub events: Vec<TracedEvent>,
    /// The file `events/header_page` of tracefs.
    pub header_page: Vec<u8>,
    /// The file `events/header_event` of tracefs.
    pub header_event: Vec<u8>,
    /// The recorded CPUs: those that were online at the start.
    pub cpus: Vec<u32>,
}

/// A running recording. It ends when this is dropped, and leaves nothing behind.
pub trait SchedulerTrace {
    /// What is recorded.
    fn description(&self) -> &TraceDescription;

    /// Takes the records that have arrived, each with its header. Those of one event on one CPU are in order of time.
    fn take_records(&mut self, take: &mut dyn FnMut(&[u8]));

    /// Ends the recording. Records that were not taken remain.
    ///
    /// # Errors
    /// If the kernel does not end it.
    fn stop(&mut self) -> io::Result<()>;
}
