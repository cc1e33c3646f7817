//! Files of `perf record -e sched:sched_switch,sched:sched_wakeup -a`.
//!
//! The file's structure is read by linux-perf-data. The records of tracepoints are decoded by the layouts that the file
//! contains. `sched:sched_wakeup_new` and `sched:sched_migrate_task` are used if they were recorded.
//!
//! Limits: compressed files (`perf record -z`) and streams (`perf record -o -`) are refused. CPUs without an event are not
//! part of the schedule. Yield and preemption cannot be told apart by `sched_switch`.
//! Lengths of sections and counts of events are checked before the library reserves memory for them.

use super::RecordedSchedule;
use super::event_format::{BlockReader, ByteOrder, EventFormatError, check_span, parse_scheduler_formats};
use super::scheduler_events::EventDecoder;
use super::threads::{Grouping, RecordedThreads};
use crate::schedule::{ScheduleBuilder, SchedulerEvent};
use linux_perf_data::linux_perf_event_reader::{Endianness, EventRecord, PerfEventType, SampleRecord};
use linux_perf_data::{Feature, PerfFileReader, PerfFileRecord};
use std::io::{self, Read, Seek, SeekFrom};
use thiserror::Error;

/// Bytes of `perf_file_header` (tools/perf/util/header.h).
const HEADER_BYTES: usize = 104;

/// `PERF_SAMPLE_IP | TID | TIME | ADDR | ID | CPU | PERIOD | STREAM_ID | RAW | IDENTIFIER`.
const SUPPORTED_SAMPLE_FIELDS: u64 = 0x1_07cf;

/// `HEADER_EVENT_DESC`.
const EVENT_DESCRIPTIONS: u64 = 12;

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
    /// Nothing describes the events.
    #[error("the file has no descriptions of its events, which perf record writes at its end; let it end by itself")]
    NoDescriptions,
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
    /// Samples have parts of any length, whose lengths the library trusts.
    #[error("samples have call chains, registers or other data; record without options such as -g, -b and -d")]
    UnsupportedSamples,
    /// A sample lacks an attribute.
    #[error("samples have no {0}; record with: perf record -e sched:sched_switch,sched:sched_wakeup -a")]
    MissingAttribute(&'static str),
}

impl From<linux_perf_data::Error> for PerfDataError {
    fn from(error: linux_perf_data::Error) -> Self {
        Self::Structure(Box::new(error))
    }
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
    let decoder = EventDecoder::new(&parse_scheduler_formats(block)?, order)?.ok_or(PerfDataError::NoSwitches)?;
    let has_only_fixed_fields = |attribute: &linux_perf_data::AttributeDescription| {
        attribute.attributes().sample_format.bits() & !SUPPORTED_SAMPLE_FIELDS == 0
    };
    if !perf_file.event_attributes().iter().all(has_only_fixed_fields) {
        return Err(PerfDataError::UnsupportedSamples);
    }
    let recorded_ids: Vec<u64> = perf_file.event_attributes().iter().filter_map(tracepoint_id).collect();
    let mut builder = ScheduleBuilder::new();
    if !decoder.wakeup_ids().any(|id| recorded_ids.contains(&u64::from(id))) {
        builder.set_without_wakeups();
    }
    let mut threads = RecordedThreads::default();
    while let Some(record) = record_iter.next_record(&mut perf_file)? {
        let PerfFileRecord::EventRecord { record, .. } = record else { continue };
        match record.parse()? {
            EventRecord::Sample(sample) => add_sample(&decoder, &sample, &mut builder, &mut threads)?,
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
    let (schedule, unassigned_vcpus) = (builder.finish(), threads.unassigned_vcpus());
    check_span(&schedule)?;
    Ok(RecordedSchedule { schedule, online_cpus, events, unassigned_vcpus })
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
    // A section for each bit, in the order of the bits. The bits are words of the order of bytes.
    let words = header[72..].chunks(8).map(|word| order.read(word));
    let features: Vec<u64> = (0..).step_by(64).zip(words).flat_map(|(first, word)| bits(word, first)).collect();
    check(data_end, 16 * features.len() as u64)?;
    file.seek(SeekFrom::Start(data_end))?;
    let mut table = vec![0; 16 * features.len()];
    file.read_exact(&mut table)?;
    let sections: Vec<(u64, u64)> =
        table.chunks(16).map(|section| (order.read(&section[..8]), order.read(&section[8..]))).collect();
    for &(offset, size) in &sections {
        check(offset, size)?;
    }
    // They do not overlap in a file of perf, and the library reads each.
    check(0, sections.iter().fold(0, |total, (_, size)| size.saturating_add(total)))?;
    let descriptions = features.iter().position(|&feature| feature == EVENT_DESCRIPTIONS);
    let (offset, size) = sections[descriptions.ok_or(PerfDataError::NoDescriptions)?];
    file.seek(SeekFrom::Start(offset))?;
    let mut descriptions = Vec::new();
    (&mut *file).take(size).read_to_end(&mut descriptions)?;
    check_event_descriptions(BlockReader::new(&descriptions, order))?;
    file.seek(SeekFrom::Start(0))?;
    Ok(())
}

/// The numbers of the bits of a word that are set.
fn bits(word: u64, first: u64) -> impl Iterator<Item = u64> {
    (0..64).filter(move |bit| word & 1 << bit != 0).map(move |bit| first + bit)
}

/// Walks over the descriptions of events (`write_event_desc`, tools/perf/util/header.c): the library reserves memory for
/// as many as their count says.
fn check_event_descriptions(mut section: BlockReader<'_>) -> Result<(), EventFormatError> {
    let (count, attribute_bytes) = (section.number(4)?, section.number(4)?);
    for _ in 0..count {
        section.take(attribute_bytes)?;
        let identifiers = section.number(4)?;
        let name_bytes = section.number(4)?;
        section.take(name_bytes)?;
        section.take(8 * identifiers)?;
    }
    Ok(())
}

fn tracepoint_id(attribute: &linux_perf_data::AttributeDescription) -> Option<u64> {
    match attribute.attributes().type_ {
        PerfEventType::Tracepoint(id) => Some(id),
        _ => None,
    }
}

/// Adds the event of a sample, if it is one of the scheduler.
fn add_sample(
    decoder: &EventDecoder,
    sample: &SampleRecord<'_>,
    builder: &mut ScheduleBuilder,
    threads: &mut RecordedThreads,
) -> Result<(), PerfDataError> {
    let Some(raw) = &sample.raw else { return Ok(()) };
    let record = raw.as_slice();
    if record.len() < 2 {
        return Ok(());
    }
    // The event belongs to the thread that runs, which is the previous one of a switch.
    if let (Some(tid), Some(process)) = (positive(sample.tid), positive(sample.pid)) {
        threads.set_process(tid, process);
    }
    if decoder.is_scheduler_event(&record) {
        let cpu = sample.cpu.ok_or(PerfDataError::MissingAttribute("CPU"))?;
        let time = sample.timestamp.ok_or(PerfDataError::MissingAttribute("time"))?;
        if let Some(kind) = decoder.decode(&record, cpu, threads)? {
            builder.add_event(SchedulerEvent { time, kind });
        }
    }
    Ok(())
}

fn positive(number: Option<i32>) -> Option<u32> {
    number.and_then(|number| u32::try_from(number).ok()).filter(|&number| number > 0)
}

#[cfg(test)]
#[path = "perf_data_tests.rs"]
mod tests;
