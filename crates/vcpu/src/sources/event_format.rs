//! Layouts of tracepoints: the `format` files of tracefs, and the block of them in files of perf and trace-cmd.
//!
//! The offsets of fields differ between kernels, so a recording contains them. The block is written by
//! tools/perf/util/trace-event-info.c and described by trace-cmd.dat(5). Text of the files: kernel/trace/trace_events.c.

use crate::schedule::CpuSchedule;
use thiserror::Error;

/// The signature of the block.
pub(super) const MAGIC: &[u8] = b"\x17\x08\x44tracing";

/// The longest recording. Its time on all CPUs of a host, in nanoseconds, has less than 64 bits.
const MAX_RECORDED_DAYS: u64 = 30;

/// Refuses the schedule of a recording whose times cannot be true.
pub(super) fn check_span(schedule: &CpuSchedule) -> Result<(), EventFormatError> {
    let days = schedule.duration() / (24 * 3600 * 1_000_000_000);
    if days < MAX_RECORDED_DAYS { Ok(()) } else { Err(EventFormatError::Span) }
}

/// Why layouts cannot be read.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum EventFormatError {
    /// The block ends early.
    #[error("the descriptions of events end at byte {0}, before their end")]
    Truncated(usize),
    /// It is no such block.
    #[error("the descriptions of events have no signature of trace data")]
    Signature,
    /// A record is shorter than its layout says.
    #[error("an event {event} has {bytes} bytes, which do not contain its field {field}")]
    ShortRecord {
        /// The event.
        event: String,
        /// Its field.
        field: String,
        /// Bytes of the record.
        bytes: usize,
    },
    /// Times are not of one recording.
    #[error("the times of the events are more than {MAX_RECORDED_DAYS} days apart: the file is damaged")]
    Span,
    /// An event lacks a field.
    #[error("the kernel's event {event} has no field {field}; this kernel is not supported")]
    MissingField {
        /// The event.
        event: String,
        /// The field.
        field: &'static str,
    },
}

/// The order of bytes of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ByteOrder {
    /// Least significant byte first.
    Little,
    /// Most significant byte first.
    Big,
}

impl ByteOrder {
    /// The unsigned number in at most eight bytes.
    pub fn read(self, bytes: &[u8]) -> u64 {
        let append = |number: u64, byte: &u8| number << 8 | u64::from(*byte);
        match self {
            Self::Little => bytes.iter().rev().fold(0, append),
            Self::Big => bytes.iter().fold(0, append),
        }
    }
}

/// A field of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventField {
    /// Its name.
    pub name: String,
    /// Its first byte.
    pub offset: usize,
    /// Its length in bytes.
    pub size: usize,
}

/// The layout of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventFormat {
    /// The event's number on the recorded host.
    pub id: u16,
    /// Its name, without the subsystem.
    pub name: String,
    /// Its fields, with the common ones.
    pub fields: Vec<EventField>,
}

impl EventFormat {
    /// The layout from the text of a `format` file; none if it has no name or number.
    pub fn parse(text: &str) -> Option<Self> {
        let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
        Some(Self {
            id: value("ID:")?.parse().ok()?,
            name: value("name:")?.to_owned(),
            fields: text.lines().filter_map(parse_field).collect(),
        })
    }

    /// A field by its name.
    ///
    /// # Errors
    ///
    /// If the event has none.
    pub fn field(&self, name: &'static str) -> Result<&EventField, EventFormatError> {
        self.fields
            .iter()
            .find(|field| field.name == name)
            .ok_or_else(|| EventFormatError::MissingField { event: self.name.clone(), field: name })
    }

    /// The bytes of a field in a record.
    ///
    /// # Errors
    ///
    /// If the record is too short.
    pub fn field_bytes<'a>(&self, field: &EventField, record: &'a [u8]) -> Result<&'a [u8], EventFormatError> {
        let end = field.offset.saturating_add(field.size);
        record.get(field.offset..end).ok_or_else(|| EventFormatError::ShortRecord {
            event: self.name.clone(),
            field: field.name.clone(),
            bytes: record.len(),
        })
    }
}

/// A line such as `field:pid_t prev_pid; offset:24; size:4; signed:1;`, with tabs between its parts.
pub(super) fn parse_field(line: &str) -> Option<EventField> {
    let mut parts = line.trim().split(';').map(str::trim);
    let declaration = parts.next()?.strip_prefix("field:")?;
    let name = declaration.split_whitespace().next_back()?.split('[').next()?.to_owned();
    let (mut offset, mut size) = (None, None);
    for part in parts {
        if let Some(value) = part.strip_prefix("offset:") {
            offset = value.parse().ok();
        } else if let Some(value) = part.strip_prefix("size:") {
            size = value.parse().ok();
        }
    }
    Some(EventField { name, offset: offset?, size: size? })
}

/// The layouts of the events of the subsystem `sched` in a block.
///
/// # Errors
///
/// If the block is malformed.
pub fn parse_scheduler_formats(block: &[u8]) -> Result<Vec<EventFormat>, EventFormatError> {
    let (mut reader, _) = BlockReader::open(block)?;
    reader.header_page()?;
    reader.ftrace_formats()?;
    reader.scheduler_formats()
}

/// Reads a block, or a file of trace-cmd, whose first parts are such a block.
pub(super) struct BlockReader<'a> {
    block: &'a [u8],
    position: usize,
    order: ByteOrder,
}

impl<'a> BlockReader<'a> {
    /// A reader of other data with lengths.
    pub(super) fn new(block: &'a [u8], order: ByteOrder) -> Self {
        Self { block, position: 0, order }
    }

    /// A reader after the beginning of a block, with the version and the size of a page.
    pub(super) fn open(block: &'a [u8]) -> Result<(Self, BlockStart<'a>), EventFormatError> {
        let mut reader = Self { block, position: 0, order: ByteOrder::Little };
        if reader.take(MAGIC.len() as u64)? != MAGIC {
            return Err(EventFormatError::Signature);
        }
        let version = reader.string()?;
        if reader.take(1)? == [1] {
            reader.order = ByteOrder::Big;
        }
        let long_bytes = reader.number(1)?;
        let page_bytes = reader.number(4)?;
        Ok((reader, BlockStart { version, long_bytes, page_bytes }))
    }

    /// A reader of another part of the same block.
    pub(super) fn at(&self, position: u64) -> Result<Self, EventFormatError> {
        let position = usize::try_from(position).ok().filter(|&position| position <= self.block.len());
        let position = position.ok_or(EventFormatError::Truncated(self.block.len()))?;
        Ok(Self { block: self.block, position, order: self.order })
    }

    /// A reader of the next bytes alone.
    pub(super) fn part(&mut self, bytes: u64) -> Result<Self, EventFormatError> {
        Ok(Self { block: self.take(bytes)?, position: 0, order: self.order })
    }

    /// The order of bytes.
    pub(super) fn order(&self) -> ByteOrder {
        self.order
    }

    /// The layout of the pages of the ring buffer; the next part, that of records' headers, is skipped.
    pub(super) fn header_page(&mut self) -> Result<&'a [u8], EventFormatError> {
        self.string()?;
        let page = self.sized_data()?;
        self.string()?;
        self.sized_data()?;
        Ok(page)
    }

    /// Skips the layouts of the events of ftrace.
    pub(super) fn ftrace_formats(&mut self) -> Result<(), EventFormatError> {
        for _ in 0..self.number(4)? {
            self.sized_data()?;
        }
        Ok(())
    }

    /// The layouts of the scheduler's events.
    pub(super) fn scheduler_formats(&mut self) -> Result<Vec<EventFormat>, EventFormatError> {
        let mut formats = Vec::new();
        for _ in 0..self.number(4)? {
            let is_scheduler = self.string()? == b"sched";
            for _ in 0..self.number(4)? {
                let text = self.sized_data()?;
                if is_scheduler {
                    formats.extend(EventFormat::parse(&String::from_utf8_lossy(text)));
                }
            }
        }
        Ok(formats)
    }

    /// The next bytes.
    pub(super) fn take(&mut self, bytes: u64) -> Result<&'a [u8], EventFormatError> {
        let end = usize::try_from(bytes).ok().and_then(|bytes| self.position.checked_add(bytes));
        let taken = end.and_then(|end| self.block.get(self.position..end));
        let taken = taken.ok_or(EventFormatError::Truncated(self.block.len()))?;
        self.position += taken.len();
        Ok(taken)
    }

    /// The next number of at most eight bytes.
    pub(super) fn number(&mut self, bytes: u64) -> Result<u64, EventFormatError> {
        Ok(self.order.read(self.take(bytes)?))
    }

    /// Data after its length.
    pub(super) fn sized_data(&mut self) -> Result<&'a [u8], EventFormatError> {
        let bytes = self.number(8)?;
        self.take(bytes)
    }

    /// A string without its zero byte.
    pub(super) fn string(&mut self) -> Result<&'a [u8], EventFormatError> {
        let rest = &self.block[self.position..];
        let length = rest.iter().position(|&byte| byte == 0).ok_or(EventFormatError::Truncated(self.block.len()))?;
        self.position += length + 1;
        Ok(&rest[..length])
    }
}

/// The beginning of a block.
pub(super) struct BlockStart<'a> {
    /// The version of the format.
    pub(super) version: &'a [u8],
    /// Bytes of a `long` of the recorded host.
    pub(super) long_bytes: u64,
    /// Bytes of a page of the recorded host.
    pub(super) page_bytes: u64,
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) const SWITCH_FORMAT: &str = "name: sched_switch
ID: 314
format:
\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;
\tfield:unsigned char common_flags;\toffset:2;\tsize:1;\tsigned:0;
\tfield:unsigned char common_preempt_count;\toffset:3;\tsize:1;\tsigned:0;
\tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;

\tfield:char prev_comm[16];\toffset:8;\tsize:16;\tsigned:0;
\tfield:pid_t prev_pid;\toffset:24;\tsize:4;\tsigned:1;
\tfield:int prev_prio;\toffset:28;\tsize:4;\tsigned:1;
\tfield:long prev_state;\toffset:32;\tsize:8;\tsigned:1;
\tfield:char next_comm[16];\toffset:40;\tsize:16;\tsigned:0;
\tfield:pid_t next_pid;\toffset:56;\tsize:4;\tsigned:1;
\tfield:int next_prio;\toffset:60;\tsize:4;\tsigned:1;

print fmt: \"prev_comm=%s\", REC->prev_comm
";
    pub(crate) const WAKEUP_FORMAT: &str = "name: sched_wakeup
ID: 317
format:
\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;
\tfield:char comm[16];\toffset:8;\tsize:16;\tsigned:0;
\tfield:pid_t pid;\toffset:24;\tsize:4;\tsigned:1;
\tfield:int prio;\toffset:28;\tsize:4;\tsigned:1;
\tfield:int target_cpu;\toffset:32;\tsize:4;\tsigned:1;
";

    /// A block with the two formats, as perf writes it on a little-endian host.
    pub(crate) fn block() -> Vec<u8> {
        let mut block = [MAGIC, b"0.6\0", &[0, 8], &4096u32.to_le_bytes()].concat();
        let add_data = |block: &mut Vec<u8>, data: &str| {
            block.extend((data.len() as u64).to_le_bytes());
            block.extend(data.as_bytes());
        };
        for name in ["header_page\0", "header_event\0"] {
            block.extend(name.as_bytes());
            add_data(&mut block, "some text");
        }
        block.extend(1u32.to_le_bytes());
        add_data(&mut block, "name: function\nID: 1\n");
        block.extend(2u32.to_le_bytes());
        block.extend(b"kvm\0");
        block.extend(1u32.to_le_bytes());
        add_data(&mut block, "name: kvm_exit\nID: 900\n");
        block.extend(b"sched\0");
        block.extend(2u32.to_le_bytes());
        add_data(&mut block, SWITCH_FORMAT);
        add_data(&mut block, WAKEUP_FORMAT);
        block
    }

    #[test]
    fn block_has_the_events_of_the_scheduler() {
        let formats = parse_scheduler_formats(&block()).unwrap();
        let names: Vec<_> = formats.iter().map(|format| (format.id, format.name.as_str())).collect();
        assert_eq!(names, [(314, "sched_switch"), (317, "sched_wakeup")]);
        let field = formats[0].field("next_comm").unwrap();
        assert_eq!((field.offset, field.size), (40, 16));
        assert_eq!(
            formats[1].field("next_pid"),
            Err(EventFormatError::MissingField { event: "sched_wakeup".to_owned(), field: "next_pid" })
        );
        assert!(formats[0].field_bytes(field, &[0; 55]).is_err());
        assert_eq!(formats[0].field_bytes(field, &[7; 56]), Ok(&[7; 16][..]));
    }

    #[test]
    fn every_shorter_block_is_refused() {
        let block = block();
        for length in 0..block.len() {
            assert_eq!(parse_scheduler_formats(&block[..length]), Err(EventFormatError::Truncated(length)), "{length}");
        }
        assert_eq!(parse_scheduler_formats(&[0; 100]), Err(EventFormatError::Signature));
    }

    #[test]
    fn numbers_have_the_order_of_the_recording() {
        assert_eq!(ByteOrder::Little.read(&[1, 2, 0, 0]), 0x201);
        assert_eq!(ByteOrder::Big.read(&[1, 2]), 0x102);
        assert_eq!(ByteOrder::Big.read(&[]), 0);
    }

    proptest! {
        #[test]
        fn nothing_panics(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8), text in any::<String>()) {
            let mut block = block();
            for (index, byte) in changes {
                let index = index.index(block.len());
                block[index] = byte;
            }
            let _ = parse_scheduler_formats(&block);
            let _ = EventFormat::parse(&text);
        }
    }
}
