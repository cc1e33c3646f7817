//! Writes files as `perf record` does, with samples of tracepoints.
//!
//! Format: tools/perf/Documentation/perf.data-file-format.txt, and tools/perf/util/header.c for the features. The block
//! of layouts is that of tools/perf/util/trace-event-info.c. Numbers have the order of bytes of this machine.

use super::record_type;
use pagefold_host::scheduler_trace::{
    ATTRIBUTE_FLAGS, CLOCK, SAMPLE_FIELDS, THREAD_FLAGS, TraceDescription, TracedEvent,
};
use std::io::{self, Seek, SeekFrom, Write};

/// Bytes of `perf_file_header`.
const HEADER_BYTES: u64 = 104;
/// Bytes of `perf_event_attr` up to its field for the size of raw data (`PERF_ATTR_SIZE_VER5`).
const ATTRIBUTE_BYTES: usize = 112;
/// Offset of `clockid` in `perf_event_attr`.
const CLOCK_OFFSET: usize = 92;
/// `PERF_TYPE_TRACEPOINT`.
const TRACEPOINT_TYPE: u32 = 2;
/// Bytes of a name in `PERF_RECORD_COMM`: `TASK_COMM_LEN`.
const NAME_BYTES: usize = 16;

/// Bits of the features in the header, which are also the order of their sections.
mod feature {
    pub const TRACING_DATA: u64 = 1;
    pub const KERNEL_RELEASE: u64 = 4;
    pub const CPU_COUNTS: u64 = 7;
    pub const EVENT_DESCRIPTIONS: u64 = 12;
    pub const CLOCK_RESOLUTION: u64 = 23;
}

/// A file that is being written.
pub struct PerfDataWriter<W> {
    file: W,
    description: TraceDescription,
    kernel: String,
    data_offset: u64,
    data_bytes: u64,
}

impl<W: Write + Seek> PerfDataWriter<W> {
    /// Begins an empty file with the recorded events.
    pub fn create(mut file: W, description: TraceDescription, kernel: &str) -> io::Result<Self> {
        file.write_all(&[0; HEADER_BYTES as usize])?;
        let mut ids_offset = HEADER_BYTES;
        for event in &description.events {
            file.write_all(&numbers(&event.sample_ids))?;
        }
        for (index, event) in description.events.iter().enumerate() {
            let ids_bytes = 8 * event.sample_ids.len() as u64;
            file.write_all(&attribute(event, index))?;
            file.write_all(&numbers(&[ids_offset, ids_bytes]))?;
            ids_offset += ids_bytes;
        }
        let data_offset = ids_offset + description.events.len() as u64 * ATTRIBUTE_ENTRY_BYTES;
        Ok(Self { file, description, kernel: kernel.to_owned(), data_offset, data_bytes: 0 })
    }

    /// Adds a record of the kernel with its header.
    pub fn add_record(&mut self, record: &[u8]) -> io::Result<()> {
        self.data_bytes += record.len() as u64;
        self.file.write_all(record)
    }

    /// Adds the name that a thread had before the first event.
    pub fn add_thread_name(&mut self, process: u32, tid: u32, name: &str) -> io::Result<()> {
        let mut body = [process.to_ne_bytes(), tid.to_ne_bytes()].concat();
        // A name needs a zero byte at its end.
        let bytes = &name.as_bytes()[..name.len().min(NAME_BYTES - 1)];
        body.extend(bytes);
        body.resize(8 + NAME_BYTES, 0);
        // What `sample_id_all` adds to each record: thread, time, CPU, identifier.
        body.extend([process.to_ne_bytes(), tid.to_ne_bytes()].concat());
        let identifier = self.description.events.first().and_then(|event| event.sample_ids.first());
        body.extend(numbers(&[0, 0, identifier.copied().unwrap_or(0)]));
        let size = (8 + body.len()) as u16;
        self.add_record(&[&record_type::COMM.to_ne_bytes()[..], &[0; 2], &size.to_ne_bytes(), &body].concat())
    }

    /// Ends the file.
    pub fn finish(mut self) -> io::Result<()> {
        let sections = [
            (feature::TRACING_DATA, layout_block(&self.description)),
            (feature::KERNEL_RELEASE, string(&self.kernel)),
            (feature::CPU_COUNTS, [self.description.cpus.len() as u32; 2].map(u32::to_ne_bytes).concat()),
            (feature::EVENT_DESCRIPTIONS, event_descriptions(&self.description.events)),
            (feature::CLOCK_RESOLUTION, numbers(&[1])),
        ];
        let mut offset = self.data_offset + self.data_bytes + 16 * sections.len() as u64;
        for (_, section) in &sections {
            self.file.write_all(&numbers(&[offset, section.len() as u64]))?;
            offset += section.len() as u64;
        }
        for (_, section) in &sections {
            self.file.write_all(section)?;
        }
        let attribute_bytes = self.description.events.len() as u64 * ATTRIBUTE_ENTRY_BYTES;
        let features = sections.iter().fold(0, |features, (feature, _)| features | 1 << feature);
        self.file.seek(SeekFrom::Start(0))?;
        // A number, by which readers find out the order of bytes.
        self.file.write_all(&u64::from_le_bytes(*b"PERFILE2").to_ne_bytes())?;
        self.file.write_all(&numbers(&[
            HEADER_BYTES,
            ATTRIBUTE_ENTRY_BYTES,
            self.data_offset - attribute_bytes,
            attribute_bytes,
            self.data_offset,
            self.data_bytes,
            0,
            0,
            features,
        ]))?;
        self.file.flush()
    }
}

/// An attribute, and the section of its identifiers.
const ATTRIBUTE_ENTRY_BYTES: u64 = ATTRIBUTE_BYTES as u64 + 16;

fn numbers(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

/// `perf_event_attr` of an event. Only the first records names and starts of threads.
fn attribute(event: &TracedEvent, index: usize) -> Vec<u8> {
    let flags = ATTRIBUTE_FLAGS | if index == 0 { THREAD_FLAGS } else { 0 };
    let mut bytes = [TRACEPOINT_TYPE.to_ne_bytes(), (ATTRIBUTE_BYTES as u32).to_ne_bytes()].concat();
    let (sample_period, read_format) = (1, 0);
    bytes.extend(numbers(&[event.id, sample_period, SAMPLE_FIELDS, read_format, flags]));
    bytes.resize(CLOCK_OFFSET, 0);
    bytes.extend(CLOCK.to_ne_bytes());
    bytes.resize(ATTRIBUTE_BYTES, 0);
    bytes
}

/// A string with its length, as in the features of perf: with a zero byte, filled up to 64 bytes.
fn string(text: &str) -> Vec<u8> {
    let length = (text.len() + 1).next_multiple_of(64);
    let mut bytes = (length as u32).to_ne_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes.resize(4 + length, 0);
    bytes
}

fn event_descriptions(events: &[TracedEvent]) -> Vec<u8> {
    let mut bytes = [(events.len() as u32).to_ne_bytes(), (ATTRIBUTE_BYTES as u32).to_ne_bytes()].concat();
    for (index, event) in events.iter().enumerate() {
        bytes.extend(attribute(event, index));
        bytes.extend((event.sample_ids.len() as u32).to_ne_bytes());
        bytes.extend(string(&format!("sched:{}", event.name)));
        bytes.extend(numbers(&event.sample_ids));
    }
    bytes
}

/// The layouts of the events. Symbols, formats of printk and names of threads are left empty.
fn layout_block(description: &TraceDescription) -> Vec<u8> {
    let sized = |data: &[u8]| [&(data.len() as u64).to_ne_bytes(), data].concat();
    let is_big_endian = u8::from(cfg!(target_endian = "big"));
    let mut block = b"\x17\x08\x44tracing0.6\0".to_vec();
    block.extend([is_big_endian, size_of::<usize>() as u8]);
    block.extend(4096u32.to_ne_bytes());
    for (name, data) in [("header_page\0", &description.header_page), ("header_event\0", &description.header_event)] {
        block.extend(name.as_bytes());
        block.extend(sized(data));
    }
    let [ftrace_events, subsystems] = [0u32, 1];
    block.extend(ftrace_events.to_ne_bytes());
    block.extend(subsystems.to_ne_bytes());
    block.extend(b"sched\0");
    block.extend((description.events.len() as u32).to_ne_bytes());
    for event in &description.events {
        block.extend(sized(&event.format));
    }
    let [symbols, printk_formats] = [0u32; 2];
    block.extend(symbols.to_ne_bytes());
    block.extend(printk_formats.to_ne_bytes());
    block.extend(sized(&[]));
    block
}
