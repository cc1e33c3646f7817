//! Files of `perf record -e sched:sched_switch,sched:sched_wakeup -a`.
//!
//! The file's structure is read by linux-perf-data. The records of tracepoints are decoded by the layouts that the file
//! contains. `sched:sched_wakeup_new` and `sched:sched_migrate_task` are used if they were recorded.
//!
//! Limits: compressed files (`perf record -z`) and streams (`perf record -o -`) are refused. CPUs without an event are not
//! part of the schedule. Yield and preemption cannot be told apart by `sched_switch`.
//! Lengths of sections are checked; counts within the descriptions of events are trusted by the library.

use super::event_format::{ByteOrder, EventField, EventFormat, EventFormatError, parse_scheduler_formats};
use super::threads::{Grouping, RecordedThreads};
use crate::schedule::{CpuSchedule, ScheduleBuilder, SchedulerEvent, SchedulerEventKind, Tid};
use linux_perf_data::linux_perf_event_reader::{Endianness, EventRecord, PerfEventType, SampleRecord};
use linux_perf_data::{Feature, PerfFileReader, PerfFileRecord};
use std::io::{self, Read, Seek, SeekFrom};
use thiserror::Error;

/// Bytes of `perf_file_header` (tools/perf/util/header.h).
const HEADER_BYTES: usize = 104;
/// The first bits of `prev_state` are the states in which a task waits for an event; zero is runnable
/// (`__trace_sched_switch_state`, include/trace/events/sched.h). Kernels set higher bits for a preempted task.
const SLEEP_STATES: u64 = 0xff;

/// Why a file cannot be read.
#[derive(Debug, Error)]
pub enum PerfDataError {
    /// Reading failed.
    #[error("cannot read the file")]
    Io(#[from] io::Error),
    /// It is another kind of file.
    #[error("this is no file of perf record: it does not begin with PERFILE2")]
    Signature,
    /// It was written as a stream.
    #[error("this is a stream of perf record; record into a file: perf record -o FILE")]
    Stream,
    /// A section reaches beyond the end.
    #[error("the file is truncated: a section ends at byte {end} of {length}; let perf record end by itself")]
    Truncated {
        /// End of the section.
        end: u64,
        /// Length of the file.
        length: u64,
    },
    /// The structure is not as expected.
    #[error("the file is malformed or of an unsupported version")]
    Structure(#[source] Box<linux_perf_data::Error>),
    /// Nothing says when tasks were switched.
    #[error(
        "the file has no events of the scheduler; record them: perf record -e sched:sched_switch,sched:sched_wakeup -a"
    )]
    NoSwitches,
    /// The layouts of events, or an event, are not as expected.
    #[error(transparent)]
    Event(#[from] EventFormatError),
    /// A sample lacks an attribute.
    #[error("samples have no {0}; record with: perf record -e sched:sched_switch,sched:sched_wakeup -a")]
    MissingAttribute(&'static str),
}

impl From<linux_perf_data::Error> for PerfDataError {
    fn from(error: linux_perf_data::Error) -> Self {
        Self::Structure(Box::new(error))
    }
}

/// What a file contains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedSchedule {
    /// The schedule of the CPUs with events.
    pub schedule: CpuSchedule,
    /// Online CPUs of the recorded host, if the file says it.
    pub online_cpus: Option<u32>,
    /// Events of the scheduler in the file.
    pub events: u64,
}

/// Reads a file.
///
/// # Errors
///
/// See [`PerfDataError`].
pub fn read_perf_data(mut file: impl Read + Seek, grouping: Grouping<'_>) -> Result<RecordedSchedule, PerfDataError> {
    check_sections(&mut file)?;
    let PerfFileReader { mut perf_file, mut record_iter } = PerfFileReader::parse_file(file)?;
    let order = match perf_file.endian() {
        Endianness::LittleEndian => ByteOrder::Little,
        Endianness::BigEndian => ByteOrder::Big,
    };
    let block = perf_file.feature_section_data(Feature::TRACING_DATA).ok_or(PerfDataError::NoSwitches)?;
    let decoder = EventDecoder::new(&parse_scheduler_formats(block)?, order)?;
    let recorded_ids: Vec<u64> = perf_file.event_attributes().iter().filter_map(tracepoint_id).collect();
    let mut builder = ScheduleBuilder::new();
    if !decoder.wakeups.iter().any(|layout| recorded_ids.contains(&u64::from(layout.format.id))) {
        builder.set_without_wakeups();
    }
    let mut threads = RecordedThreads::default();
    while let Some(record) = record_iter.next_record(&mut perf_file)? {
        let PerfFileRecord::EventRecord { record, .. } = record else { continue };
        match record.parse()? {
            EventRecord::Sample(sample) => decoder.add_sample(&sample, &mut builder, &mut threads)?,
            EventRecord::Comm(comm) => {
                if let (Ok(process), Ok(tid)) = (u32::try_from(comm.pid), u32::try_from(comm.tid)) {
                    threads.set_process(tid, process);
                    threads.set_name(tid, &String::from_utf8_lossy(&comm.name.as_slice()));
                }
            }
            EventRecord::Fork(fork) => {
                if let (Ok(process), Ok(tid)) = (u32::try_from(fork.pid), u32::try_from(fork.tid)) {
                    threads.set_process(tid, process);
                }
            }
            EventRecord::Lost(lost) => builder.add_lost_events(lost.count),
            _ => {}
        }
    }
    let events = builder.event_count() as u64;
    if events == 0 {
        return Err(PerfDataError::NoSwitches);
    }
    threads.describe(&mut builder, grouping);
    let online_cpus = perf_file.nr_cpus()?.map(|cpus| cpus.nr_cpus_online);
    Ok(RecordedSchedule { schedule: builder.finish(), online_cpus, events })
}

/// Refuses files whose sections reach beyond their end, so that no length from the file is trusted.
fn check_sections(file: &mut (impl Read + Seek)) -> Result<(), PerfDataError> {
    let length = file.seek(SeekFrom::End(0))?;
    file.seek(SeekFrom::Start(0))?;
    let mut header = [0; HEADER_BYTES];
    let is_short = (&mut *file).take(HEADER_BYTES as u64).read(&mut header)? < 16;
    let order = match &header[..8] {
        b"PERFILE2" if !is_short => ByteOrder::Little,
        b"2ELIFREP" if !is_short => ByteOrder::Big,
        _ => return Err(PerfDataError::Signature),
    };
    let number = |at: usize| order.read(&header[at..at + 8]);
    if number(8) < HEADER_BYTES as u64 {
        return Err(PerfDataError::Stream);
    }
    let check = |offset: u64, size: u64| match offset.checked_add(size) {
        Some(end) if end <= length => Ok(end),
        end => Err(PerfDataError::Truncated { end: end.unwrap_or(u64::MAX), length }),
    };
    check(number(24), number(32))?;
    let data_end = check(number(40), number(48))?;
    check(number(56), number(64))?;
    let features: u32 = header[72..].iter().map(|byte| byte.count_ones()).sum();
    check(data_end, 16 * u64::from(features))?;
    file.seek(SeekFrom::Start(data_end))?;
    let mut section = [0; 16];
    for _ in 0..features {
        file.read_exact(&mut section)?;
        check(order.read(&section[..8]), order.read(&section[8..]))?;
    }
    file.seek(SeekFrom::Start(0))?;
    Ok(())
}

fn tracepoint_id(attribute: &linux_perf_data::AttributeDescription) -> Option<u64> {
    match attribute.attributes().type_ {
        PerfEventType::Tracepoint(id) => Some(id),
        _ => None,
    }
}

/// Decodes records of the scheduler.
struct EventDecoder {
    order: ByteOrder,
    switch: SwitchLayout,
    wakeups: Vec<PlacementLayout>,
    migrations: Vec<PlacementLayout>,
}

struct SwitchLayout {
    format: EventFormat,
    previous_name: EventField,
    previous: EventField,
    previous_state: EventField,
    next_name: EventField,
    next: EventField,
}

/// An event that names a task and a CPU.
struct PlacementLayout {
    format: EventFormat,
    name: EventField,
    task: EventField,
    cpu: EventField,
}

impl PlacementLayout {
    fn new(formats: &[EventFormat], event: &str, cpu: &'static str) -> Result<Option<Self>, EventFormatError> {
        let Some(format) = formats.iter().find(|format| format.name == event) else { return Ok(None) };
        let field = |name| format.field(name).cloned();
        Ok(Some(Self { name: field("comm")?, task: field("pid")?, cpu: field(cpu)?, format: format.clone() }))
    }
}

impl EventDecoder {
    fn new(formats: &[EventFormat], order: ByteOrder) -> Result<Self, PerfDataError> {
        let format = formats.iter().find(|format| format.name == "sched_switch").ok_or(PerfDataError::NoSwitches)?;
        let field = |name| format.field(name).cloned();
        let switch = SwitchLayout {
            previous_name: field("prev_comm")?,
            previous: field("prev_pid")?,
            previous_state: field("prev_state")?,
            next_name: field("next_comm")?,
            next: field("next_pid")?,
            format: format.clone(),
        };
        let wakeups =
            ["sched_wakeup", "sched_wakeup_new"].map(|event| PlacementLayout::new(formats, event, "target_cpu"));
        let migrations = [PlacementLayout::new(formats, "sched_migrate_task", "dest_cpu")?];
        let wakeups = wakeups.into_iter().collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            order,
            switch,
            wakeups: wakeups.into_iter().flatten().collect(),
            migrations: migrations.into_iter().flatten().collect(),
        })
    }

    /// Adds the event of a sample, if it is one of the scheduler.
    fn add_sample(
        &self,
        sample: &SampleRecord<'_>,
        builder: &mut ScheduleBuilder,
        threads: &mut RecordedThreads,
    ) -> Result<(), PerfDataError> {
        let Some(raw) = &sample.raw else { return Ok(()) };
        let record = raw.as_slice();
        let Some(type_bytes) = record.get(..2) else { return Ok(()) };
        let id = self.order.read(type_bytes);
        let is = |format: &EventFormat| u64::from(format.id) == id;
        // The event belongs to the thread that runs, which is the previous one of a switch.
        if let (Some(tid), Some(process)) = (positive(sample.tid), positive(sample.pid)) {
            threads.set_process(tid, process);
        }
        let kind = if is(&self.switch.format) {
            let cpu = sample.cpu.ok_or(PerfDataError::MissingAttribute("CPU"))?;
            self.decode_switch(&record, cpu, threads)?
        } else if let Some(layout) = self.wakeups.iter().find(|layout| is(&layout.format)) {
            let (task, cpu) = self.decode_placement(layout, &record, threads)?;
            SchedulerEventKind::Wakeup { task, cpu }
        } else if let Some(layout) = self.migrations.iter().find(|layout| is(&layout.format)) {
            let (task, cpu) = self.decode_placement(layout, &record, threads)?;
            SchedulerEventKind::Migrate { task, cpu }
        } else {
            return Ok(());
        };
        let time = sample.timestamp.ok_or(PerfDataError::MissingAttribute("time"))?;
        builder.add_event(SchedulerEvent { time, kind });
        Ok(())
    }

    fn decode_switch(
        &self,
        record: &[u8],
        cpu: u32,
        threads: &mut RecordedThreads,
    ) -> Result<SchedulerEventKind, EventFormatError> {
        let SwitchLayout { format, previous_name, previous, previous_state, next_name, next } = &self.switch;
        let number = |field: &EventField| Ok(self.order.read(format.field_bytes(field, record)?));
        let (previous, next) = (number(previous)? as Tid, number(next)? as Tid);
        for (tid, name) in [(previous, previous_name), (next, next_name)] {
            threads.add_event(tid);
            threads.set_name(tid, &text(format.field_bytes(name, record)?));
        }
        let previous_runnable = number(previous_state)? & SLEEP_STATES == 0;
        Ok(SchedulerEventKind::Switch { cpu, previous, previous_runnable, next })
    }

    fn decode_placement(
        &self,
        layout: &PlacementLayout,
        record: &[u8],
        threads: &mut RecordedThreads,
    ) -> Result<(Tid, u32), EventFormatError> {
        let bytes = |field: &EventField| layout.format.field_bytes(field, record);
        let task = self.order.read(bytes(&layout.task)?) as Tid;
        threads.add_event(task);
        threads.set_name(task, &text(bytes(&layout.name)?));
        Ok((task, self.order.read(bytes(&layout.cpu)?) as u32))
    }
}

fn positive(number: Option<i32>) -> Option<u32> {
    number.and_then(|number| u32::try_from(number).ok()).filter(|&number| number > 0)
}

/// A string that ends at its first zero byte.
fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

#[cfg(test)]
#[path = "perf_data_tests.rs"]
mod tests;
