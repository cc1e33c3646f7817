//! Leaves the names of threads of other processes out of a recording.

use super::{read_u32, record_kind, record_type};
use crate::sources::event_format::{EventField, EventFormat};
use pagefold_base::Pid;
use pagefold_host::scheduler_trace::TraceDescription;
use std::borrow::Cow;
use std::collections::BTreeSet;

/// Offset of an event's own data in a sample with the fields of a trace: after the header, the identifier, the thread,
/// the time, the CPU, and the length of the data.
const EVENT_DATA_OFFSET: usize = 8 + 8 + 8 + 8 + 8 + 4;

/// The processes and threads that keep their names.
pub struct NameFilter {
    /// None if all keep them.
    processes: Option<BTreeSet<u32>>,
    threads: BTreeSet<u32>,
    layouts: Vec<(u32, Vec<NamedThread>)>,
}

/// The fields of an event that name a thread.
struct NamedThread {
    tid: EventField,
    name: EventField,
}

impl NameFilter {
    /// A filter for some processes; without processes, all names are kept.
    pub fn new(description: &TraceDescription, processes: &BTreeSet<Pid>) -> Self {
        let layouts = description.events.iter().filter_map(|event| {
            let format = EventFormat::parse(&String::from_utf8_lossy(&event.format))?;
            let fields = |tid, name| {
                Some(NamedThread { tid: format.field(tid).ok()?.clone(), name: format.field(name).ok()?.clone() })
            };
            let pairs = [("pid", "comm"), ("prev_pid", "prev_comm"), ("next_pid", "next_comm")];
            Some((u32::from(format.id), pairs.into_iter().filter_map(|(tid, name)| fields(tid, name)).collect()))
        });
        Self {
            processes: (!processes.is_empty()).then(|| processes.iter().map(|pid| pid.0).collect()),
            threads: BTreeSet::new(),
            layouts: layouts.collect(),
        }
    }

    /// Notes a thread of a process that keeps its names.
    pub fn add_thread(&mut self, tid: u32) {
        self.threads.insert(tid);
    }

    /// The record as it may be kept. None if nothing of it may.
    pub fn apply<'a>(&mut self, record: &'a [u8]) -> Option<Cow<'a, [u8]>> {
        let Some(processes) = &self.processes else { return Some(Cow::Borrowed(record)) };
        match record_kind(record)? {
            record_type::SAMPLE => Some(Cow::Owned(self.without_names(record))),
            record_type::COMM => processes.contains(&read_u32(record, 8)?).then_some(Cow::Borrowed(record)),
            record_type::FORK => {
                let (process, tid) = (read_u32(record, 8)?, read_u32(record, 16)?);
                if processes.contains(&process) {
                    self.threads.insert(tid);
                } else {
                    self.threads.remove(&tid);
                }
                Some(Cow::Borrowed(record))
            }
            _ => Some(Cow::Borrowed(record)),
        }
    }

    fn without_names(&self, record: &[u8]) -> Vec<u8> {
        let mut bytes = record.to_vec();
        let event = bytes.get(EVENT_DATA_OFFSET..EVENT_DATA_OFFSET + 2).map(|id| u16::from_ne_bytes([id[0], id[1]]));
        let layout = self.layouts.iter().find(|(id, _)| event.map(u32::from) == Some(*id));
        for NamedThread { tid, name } in layout.iter().flat_map(|(_, threads)| threads) {
            let is_kept =
                read_u32(&bytes, EVENT_DATA_OFFSET + tid.offset).is_some_and(|tid| self.threads.contains(&tid));
            let begin = EVENT_DATA_OFFSET + name.offset;
            if !is_kept && let Some(name) = bytes.get_mut(begin..begin + name.size) {
                name.fill(0);
            }
        }
        bytes
    }
}
