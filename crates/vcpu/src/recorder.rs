//! Records the scheduler of a running host into a file of perf.
//!
//! The file is one that `perf script` and [`crate::sources::perf_data`] read. It has the names of all threads that ran
//! at the start. With a selection of processes, the names of other threads are left out of the file; their events stay,
//! because the measures need to know which CPUs were free.

mod name_filter;
mod perf_data_writer;

use name_filter::NameFilter;
use pagefold_base::Pid;
use pagefold_host::scheduler_trace::{SchedulerTrace, SchedulerTraceError};
use pagefold_host::{Host, elapsed_since};
use perf_data_writer::PerfDataWriter;
use std::collections::BTreeSet;
use std::io::{self, Seek, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use thiserror::Error;

/// Bytes of buffer for each event and CPU: more than 2,000 events, which a CPU needs at least 20 ms for.
pub const BUFFER_BYTES: usize = 256 << 10;

/// Time between two times at which the buffers are emptied.
const DRAIN_INTERVAL: Duration = Duration::from_millis(20);

/// `PERF_RECORD_LOST`, `PERF_RECORD_COMM`, `PERF_RECORD_FORK` and `PERF_RECORD_SAMPLE` (include/uapi/linux/perf_event.h).
mod record_type {
    pub const LOST: u32 = 2;
    pub const COMM: u32 = 3;
    pub const FORK: u32 = 7;
    pub const SAMPLE: u32 = 9;
}

/// Why a recording failed.
#[derive(Debug, Error)]
pub enum ScheduleRecordingError {
    /// The host cannot record.
    #[error(transparent)]
    Trace(#[from] SchedulerTraceError),
    /// The file cannot be written.
    #[error("cannot write the recording")]
    Write(#[from] io::Error),
    /// The recording cannot be ended.
    #[error("cannot end the recording")]
    Stop(#[source] io::Error),
}

/// What to record.
#[derive(Clone, Debug)]
pub struct RecordingOptions {
    /// How long.
    pub duration: Duration,
    /// The processes whose threads keep their names; all, if there are none.
    pub processes: BTreeSet<Pid>,
    /// Bytes of buffer for each event and CPU, rounded up to a power of two.
    pub buffer_bytes: usize,
}

/// What a recording has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScheduleRecordingSummary {
    /// Time from its start to its end.
    pub duration: Duration,
    /// The recorded CPUs.
    pub cpus: Vec<u32>,
    /// Events of the scheduler.
    pub events: u64,
    /// Events that did not fit into the buffers.
    pub lost_events: u64,
}

/// Records until the time is over, or `stop` is set, into an empty file.
///
/// # Errors
/// See [`ScheduleRecordingError`].
pub fn record(
    host: &dyn Host,
    options: &RecordingOptions,
    stop: &AtomicBool,
    file: impl Write + Seek,
) -> Result<ScheduleRecordingSummary, ScheduleRecordingError> {
    let mut trace = host.trace_scheduler(options.buffer_bytes)?;
    let start = host.now();
    let kernel = host.read("proc/sys/kernel/osrelease").unwrap_or_default();
    let description = trace.description();
    let mut summary =
        ScheduleRecordingSummary { cpus: description.cpus.clone(), ..ScheduleRecordingSummary::default() };
    let mut filter = NameFilter::new(description, &options.processes);
    let mut writer = PerfDataWriter::create(file, description.clone(), String::from_utf8_lossy(&kernel).trim())?;
    for (process, tid, name) in thread_names(host, &options.processes) {
        filter.add_thread(tid);
        writer.add_thread_name(process, tid, &name)?;
    }
    loop {
        take_records(&mut *trace, &mut filter, &mut writer, &mut summary)?;
        let elapsed = elapsed_since(host, start);
        if elapsed >= options.duration || stop.load(Ordering::Relaxed) {
            break;
        }
        host.sleep(DRAIN_INTERVAL.min(options.duration - elapsed));
    }
    trace.stop().map_err(ScheduleRecordingError::Stop)?;
    summary.duration = elapsed_since(host, start);
    take_records(&mut *trace, &mut filter, &mut writer, &mut summary)?;
    writer.finish()?;
    Ok(summary)
}

fn take_records(
    trace: &mut dyn SchedulerTrace,
    filter: &mut NameFilter,
    writer: &mut PerfDataWriter<impl Write + Seek>,
    summary: &mut ScheduleRecordingSummary,
) -> Result<(), ScheduleRecordingError> {
    let mut result = Ok(());
    trace.take_records(&mut |record| {
        if result.is_err() {
            return;
        }
        match record_kind(record) {
            Some(record_type::SAMPLE) => summary.events += 1,
            Some(record_type::LOST) => summary.lost_events += read_u64(record, LOST_COUNT_OFFSET).unwrap_or(0),
            _ => {}
        }
        result = filter.apply(record).map_or(Ok(()), |record| writer.add_record(&record));
    });
    Ok(result?)
}

/// The count in a record of lost events, after its header and the event's identifier.
const LOST_COUNT_OFFSET: usize = 16;

fn record_kind(record: &[u8]) -> Option<u32> {
    read_u32(record, 0)
}

fn read_u32(bytes: &[u8], offset: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(offset..offset + 4)?.try_into().ok()?))
}

fn read_u64(bytes: &[u8], offset: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(offset..offset + 8)?.try_into().ok()?))
}

/// Process, number and name of each thread, of all processes or those that are selected. Threads that end meanwhile are
/// left out.
fn thread_names(host: &dyn Host, processes: &BTreeSet<Pid>) -> Vec<(u32, u32, String)> {
    let mut names = Vec::new();
    let all = if processes.is_empty() { host.pids().unwrap_or_default() } else { Vec::new() };
    for process in processes.iter().copied().chain(all) {
        for tid in host.list(&format!("proc/{process}/task")).unwrap_or_default() {
            let (Ok(name), Ok(tid)) = (host.read(&format!("proc/{process}/task/{tid}/comm")), tid.parse()) else {
                continue;
            };
            names.push((process.0, tid, String::from_utf8_lossy(name.trim_ascii_end()).into_owned()));
        }
    }
    names
}

#[cfg(test)]
mod tests;
