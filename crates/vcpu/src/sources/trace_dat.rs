//! Files of `trace-cmd record -e sched:sched_switch -e sched:sched_wakeup`, of the versions 6 and 7.
//!
//! Formats: trace-cmd.dat.v6(5) and trace-cmd.dat.v7(5). The data of a CPU are pages of the kernel's ring buffer
//! (include/linux/ring_buffer.h, kernel/trace/ring_buffer.c), whose layout the file contains.
//!
//! Limits: compressed files are refused, which are those that trace-cmd 3 writes by default. Of a file of version 6 only
//! the buffer of the top instance is read; of version 7, the first buffer with events of the scheduler. Files do not tell
//! to which process a thread belongs. By default trace-cmd records each CPU by a clock of its own.

use super::RecordedSchedule;
use super::event_format::{
    BlockReader, BlockStart, ByteOrder, EventField, EventFormat, EventFormatError, check_span, parse_field,
};
use super::scheduler_events::EventDecoder;
use super::threads::{Grouping, RecordedThreads};
use crate::schedule::{ScheduleBuilder, SchedulerEvent};
use std::io::{self, Read};
use thiserror::Error;

/// Why a file cannot be read.
#[derive(Debug, Error)]
pub enum TraceDatError {
    /// Reading failed.
    #[error("cannot read the file")]
    Io(#[from] io::Error),
    /// Another version of the format.
    #[error("this file of trace-cmd has version {0}; versions 6 and 7 can be read: trace-cmd record --file-version 7")]
    Version(String),
    /// The file is compressed.
    #[error(
        "this file of trace-cmd is compressed by {0}; convert it: trace-cmd convert --compression none -i FILE -o NEW"
    )]
    Compressed(String),
    /// There is text instead of events.
    #[error("this file of trace-cmd has a trace as text; record events: trace-cmd record -e sched:sched_switch")]
    Text,
    /// Times are not in nanoseconds.
    #[error("this file of trace-cmd has times of the clock {0}; record with: trace-cmd record -C mono")]
    Clock(String),
    /// A part that is needed is missing.
    #[error("this file of trace-cmd is incomplete: it has no {0}")]
    Missing(&'static str),
    /// Nothing says when tasks were switched.
    #[error(
        "the file has no events of the scheduler; record them: trace-cmd record -e sched:sched_switch -e \
         sched:sched_wakeup"
    )]
    NoSwitches,
    /// The page of a ring buffer is malformed.
    #[error("the page at byte {0} of the file is malformed")]
    Page(u64),
    /// The layouts of events, an event, or the structure of the file are not as expected.
    #[error(transparent)]
    Event(#[from] EventFormatError),
}

/// Options of the file, by their numbers in trace-cmd.dat.v7(5).
mod option {
    pub const DONE: u64 = 0;
    pub const BUFFER: u64 = 3;
    pub const TRACE_CLOCK: u64 = 4;
    pub const CPU_COUNT: u64 = 8;
    pub const HEADER_INFO: u64 = 16;
    pub const EVENT_FORMATS: u64 = 18;
    pub const THREAD_NAMES: u64 = 21;
}

/// Clocks whose times are nanoseconds (Documentation/trace/ftrace.rst).
const NANOSECOND_CLOCKS: [&str; 7] = ["local", "global", "perf", "mono", "mono_raw", "boot", "tai"];

/// The most sections of options that are followed, so that a cycle of them ends.
const MAX_OPTION_SECTIONS: usize = 1000;

/// Reads a file.
///
/// # Errors
///
/// See [`TraceDatError`].
pub fn read_trace_dat(mut file: impl Read, grouping: Grouping<'_>) -> Result<RecordedSchedule, TraceDatError> {
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    let (reader, start) = BlockReader::open(&bytes)?;
    let contents = match start.version {
        b"6" => read_version_6(reader, &start)?,
        b"7" => read_version_7(reader)?,
        version => return Err(TraceDatError::Version(String::from_utf8_lossy(version).into_owned())),
    };
    let decoder = EventDecoder::new(&contents.formats, contents.order)?.ok_or(TraceDatError::NoSwitches)?;
    let layout = PageLayout::parse(contents.header_page, start.long_bytes, contents.order)?;
    for buffer in &contents.buffers {
        let mut collector = EventCollector {
            decoder: &decoder,
            layout: &layout,
            builder: ScheduleBuilder::new(),
            threads: named_threads(contents.thread_names),
            has_wakeups: false,
        };
        for cpu in &buffer.cpus {
            collector.add_cpu(&bytes, cpu, buffer.page_bytes)?;
        }
        let EventCollector { mut builder, threads, has_wakeups, .. } = collector;
        let events = builder.event_count() as u64;
        if events == 0 {
            continue;
        }
        if !NANOSECOND_CLOCKS.contains(&&*buffer.clock) {
            return Err(TraceDatError::Clock(buffer.clock.clone()));
        }
        if !has_wakeups {
            builder.set_without_wakeups();
        }
        threads.describe(&mut builder, grouping);
        let schedule = builder.finish();
        check_span(&schedule)?;
        return Ok(RecordedSchedule {
            schedule,
            online_cpus: contents.cpu_count,
            events,
            unassigned_vcpus: threads.unassigned_vcpus(),
        });
    }
    Err(TraceDatError::NoSwitches)
}

/// The parts of a file.
struct Contents<'a> {
    order: ByteOrder,
    header_page: &'a [u8],
    formats: Vec<EventFormat>,
    thread_names: &'a [u8],
    cpu_count: Option<u32>,
    buffers: Vec<Buffer>,
}

/// The events of an instance of the tracer.
struct Buffer {
    clock: String,
    page_bytes: u64,
    cpus: Vec<CpuData>,
}

/// The pages of a CPU.
struct CpuData {
    cpu: u32,
    offset: u64,
    bytes: u64,
}

fn read_version_6<'a>(mut reader: BlockReader<'a>, start: &BlockStart<'_>) -> Result<Contents<'a>, TraceDatError> {
    let header_page = reader.header_page()?;
    reader.ftrace_formats()?;
    let formats = reader.scheduler_formats()?;
    let symbol_bytes = reader.number(4)?;
    reader.take(symbol_bytes)?;
    let printk_bytes = reader.number(4)?;
    reader.take(printk_bytes)?;
    let thread_names = reader.sized_data()?;
    let cpu_count = reader.number(4)? as u32;
    let mut clock = "local".to_owned();
    let mut kind = reader.string()?;
    if kind == b"options  " {
        loop {
            let id = reader.number(2)?;
            if id == option::DONE {
                break;
            }
            let bytes = reader.number(4)?;
            let data = reader.take(bytes)?;
            if id == option::TRACE_CLOCK {
                clock = selected_clock(data);
            }
        }
        kind = reader.string()?;
    }
    match kind {
        b"flyrecord" => {}
        b"latency  " => return Err(TraceDatError::Text),
        _ => return Err(TraceDatError::Missing("events")),
    }
    let mut cpus = Vec::new();
    for cpu in 0..cpu_count {
        cpus.push(CpuData { cpu, offset: reader.number(8)?, bytes: reader.number(8)? });
    }
    let buffers = vec![Buffer { clock, page_bytes: start.page_bytes, cpus }];
    Ok(Contents { order: reader.order(), header_page, formats, thread_names, cpu_count: Some(cpu_count), buffers })
}

fn read_version_7(mut reader: BlockReader<'_>) -> Result<Contents<'_>, TraceDatError> {
    let compression = String::from_utf8_lossy(reader.string()?).into_owned();
    reader.string()?; // version of the compression
    let mut options_offset = reader.number(8)?;
    let section = |offset: u64| open_section(&reader, offset, &compression);
    let (mut header_page, mut formats, mut thread_names) = (None, None, &[][..]);
    let (mut cpu_count, mut buffers) = (None, Vec::new());
    for _ in 0..MAX_OPTION_SECTIONS {
        if options_offset == 0 {
            break;
        }
        let mut options = section(options_offset)?;
        loop {
            let id = options.number(2)?;
            let bytes = options.number(4)?;
            let mut data = options.part(bytes)?;
            match id {
                option::DONE => {
                    options_offset = data.number(8)?;
                    break;
                }
                option::HEADER_INFO => header_page = Some(section(data.number(8)?)?.header_page()?),
                option::EVENT_FORMATS => formats = Some(section(data.number(8)?)?.scheduler_formats()?),
                option::THREAD_NAMES => thread_names = section(data.number(8)?)?.sized_data()?,
                option::CPU_COUNT => cpu_count = Some(data.number(4)? as u32),
                option::BUFFER => buffers.push(read_buffer(data, section)?),
                _ => {}
            }
        }
    }
    Ok(Contents {
        order: reader.order(),
        header_page: header_page.ok_or(TraceDatError::Missing("layout of pages"))?,
        formats: formats.ok_or(TraceDatError::Missing("layouts of events"))?,
        thread_names,
        cpu_count,
        buffers,
    })
}

/// A reader of a section after its header.
fn open_section<'a>(file: &BlockReader<'a>, offset: u64, compression: &str) -> Result<BlockReader<'a>, TraceDatError> {
    let mut section = file.at(offset)?;
    section.number(2)?; // number of the section
    let is_compressed = section.number(2)? & 1 != 0;
    section.take(4 + 8)?; // description, size
    if is_compressed { Err(TraceDatError::Compressed(compression.to_owned())) } else { Ok(section) }
}

fn read_buffer<'a>(
    mut data: BlockReader<'a>,
    section: impl Fn(u64) -> Result<BlockReader<'a>, TraceDatError>,
) -> Result<Buffer, TraceDatError> {
    // Refuses compressed data.
    section(data.number(8)?)?;
    data.string()?; // name of the instance
    let clock = String::from_utf8_lossy(data.string()?).into_owned();
    let page_bytes = data.number(4)?;
    let mut cpus = Vec::new();
    for _ in 0..data.number(4)? {
        cpus.push(CpuData { cpu: data.number(4)? as u32, offset: data.number(8)?, bytes: data.number(8)? });
    }
    Ok(Buffer { clock, page_bytes, cpus })
}

/// The clock in brackets of the file `trace_clock`: `[local] global counter`.
fn selected_clock(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let selected = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    selected.map_or_else(|| "local".to_owned(), |(clock, _)| clock.to_owned())
}

/// The threads of the file `saved_cmdlines`: lines of a number and a name.
fn named_threads(text: &[u8]) -> RecordedThreads {
    let mut threads = RecordedThreads::default();
    for line in String::from_utf8_lossy(text).trim_end_matches('\0').lines() {
        if let Some((tid, name)) = line.trim_start().split_once(' ')
            && let Ok(tid) = tid.parse()
        {
            threads.set_name(tid, name);
        }
    }
    threads
}

/// Where the parts of a page of the ring buffer are.
struct PageLayout {
    order: ByteOrder,
    time: EventField,
    commit: EventField,
    data: EventField,
    long_bytes: usize,
}

/// Bits of `commit` that count bytes, as in libtraceevent (src/kbuffer-parse.c).
const COMMIT_BYTES: u64 = (1 << 27) - 1;
/// `RB_MISSED_EVENTS`: events before the page were lost.
const MISSED_EVENTS: u64 = 1 << 31;
/// `RB_MISSED_STORED`: their number follows the data.
const MISSED_STORED: u64 = 1 << 30;

impl PageLayout {
    fn parse(text: &[u8], long_bytes: u64, order: ByteOrder) -> Result<Self, TraceDatError> {
        let text = String::from_utf8_lossy(text);
        let fields: Vec<EventField> = text.lines().filter_map(parse_field).collect();
        let field = |name: &str| {
            let found = fields.iter().find(|field| field.name == name && field.size > 0).cloned();
            found.ok_or(TraceDatError::Missing("layout of pages"))
        };
        let (time, commit, data) = (field("timestamp")?, field("commit")?, field("data")?);
        let is_number = |field: &EventField| field.size <= 8;
        if !(is_number(&time) && is_number(&commit)) {
            return Err(TraceDatError::Missing("layout of pages"));
        }
        Ok(Self { order, time, commit, data, long_bytes: long_bytes.min(8) as usize })
    }

    /// Calls `take` with time and data of each record of a page, and returns how many events before it were lost. None if
    /// the page is malformed.
    fn read_page<'a, E>(
        &self,
        page: &'a [u8],
        mut take: impl FnMut(u64, &'a [u8]) -> Result<(), E>,
    ) -> Option<Result<u64, E>> {
        let number = |field: &EventField| Some(self.order.read(page.get(field.offset..field.offset + field.size)?));
        let (mut time, commit) = (number(&self.time)?, number(&self.commit)?);
        let end = self.data.offset.checked_add((commit & COMMIT_BYTES) as usize)?;
        let data = page.get(self.data.offset..end)?;
        let mut position = 0;
        while position < data.len() {
            let record = RecordHeader::parse(data, position, self.order)?;
            match record.kind {
                RecordKind::End => break,
                RecordKind::Absolute(at) => time = time & !ABSOLUTE_TIME | at,
                RecordKind::Event => {
                    time = time.wrapping_add(record.delta);
                    if let Err(error) = take(time, data.get(record.begin..record.end)?) {
                        return Some(Err(error));
                    }
                }
                RecordKind::Other => time = time.wrapping_add(record.delta),
            }
            position = record.end;
        }
        Some(Ok(if commit & MISSED_EVENTS == 0 {
            0
        } else if commit & MISSED_STORED != 0 {
            self.order.read(page.get(end..end + self.long_bytes)?)
        } else {
            1
        }))
    }
}

/// The bits of a time that an absolute time replaces (`TS_MASK` and `TS_SHIFT`, kernel/trace/ring_buffer.c).
const ABSOLUTE_TIME: u64 = (1 << 59) - 1;

/// The header of a record in a page (`struct ring_buffer_event`).
struct RecordHeader {
    kind: RecordKind,
    /// Nanoseconds since the previous record.
    delta: u64,
    /// Its data.
    begin: usize,
    end: usize,
}

enum RecordKind {
    Event,
    /// The time of the following records.
    Absolute(u64),
    /// A discarded event, or a long time between two records.
    Other,
    /// The rest of the page is unused.
    End,
}

impl RecordHeader {
    fn parse(data: &[u8], position: usize, order: ByteOrder) -> Option<Self> {
        let word = |at: usize| Some(order.read(data.get(at..at.checked_add(4)?)?));
        let header = word(position)?;
        let (kind, delta) = match order {
            ByteOrder::Little => (header & 31, header >> 5),
            ByteOrder::Big => (header >> 27, header & ((1 << 27) - 1)),
        };
        let after = position + 4;
        let extended = |low: u64| Some(word(after)? << 27 | low);
        Some(match kind {
            // RINGBUF_TYPE_PADDING
            29 if delta == 0 => Self { kind: RecordKind::End, delta, begin: after, end: data.len() },
            29 => {
                let end = after.checked_add(word(after)?.max(4) as usize)?;
                Self { kind: RecordKind::Other, delta, begin: after, end }
            }
            // RINGBUF_TYPE_TIME_EXTEND
            30 => Self { kind: RecordKind::Other, delta: extended(delta)?, begin: after, end: after + 4 },
            // RINGBUF_TYPE_TIME_STAMP
            31 => Self { kind: RecordKind::Absolute(extended(delta)?), delta, begin: after, end: after + 4 },
            // The length, with its own four bytes, is in the first word.
            0 => {
                let bytes = word(after)?.checked_sub(4)? as usize;
                let begin = after + 4;
                Self { kind: RecordKind::Event, delta, begin, end: begin.checked_add(bytes.next_multiple_of(4))? }
            }
            words => Self { kind: RecordKind::Event, delta, begin: after, end: after + 4 * words as usize },
        })
    }
}

/// Collects the events of a buffer.
struct EventCollector<'a> {
    decoder: &'a EventDecoder,
    layout: &'a PageLayout,
    builder: ScheduleBuilder,
    threads: RecordedThreads,
    has_wakeups: bool,
}

impl EventCollector<'_> {
    fn add_cpu(&mut self, file: &[u8], data: &CpuData, page_bytes: u64) -> Result<(), TraceDatError> {
        let end = data.offset.checked_add(data.bytes).filter(|&end| end <= file.len() as u64);
        let end = end.ok_or(EventFormatError::Truncated(file.len()))?;
        if data.bytes > 0 && page_bytes == 0 {
            return Err(TraceDatError::Missing("size of pages"));
        }
        let pages = file[data.offset as usize..end as usize].chunks(page_bytes.max(1) as usize);
        for (offset, page) in (data.offset..).step_by(page_bytes.max(1) as usize).zip(pages) {
            let (layout, decoder) = (self.layout, self.decoder);
            let lost = layout.read_page(page, |time, record| {
                self.has_wakeups |= decoder.is_wakeup(record);
                if let Some(kind) = decoder.decode(record, data.cpu, &mut self.threads)? {
                    self.builder.add_event(SchedulerEvent { time, kind });
                }
                Ok::<_, EventFormatError>(())
            });
            self.builder.add_lost_events(lost.ok_or(TraceDatError::Page(offset))??);
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "trace_dat_tests.rs"]
mod tests;
