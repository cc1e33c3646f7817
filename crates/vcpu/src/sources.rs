//! Files that contain events of the scheduler.
//!
//! [`perf_data`] reads the files of perf, and of [`crate::recorder`]. [`trace_dat`] reads those of trace-cmd.
//! [`event_format`] has the layouts of the kernel's tracepoints, which such files contain, and [`scheduler_events`]
//! decodes their records. [`threads`] finds out which threads are vCPUs.

pub mod event_format;
pub mod perf_data;
pub mod scheduler_events;
pub mod threads;
pub mod trace_dat;

use crate::schedule::{CpuSchedule, Tid};
use perf_data::{PerfDataError, read_perf_data};
use std::io::{self, Read, Seek, SeekFrom};
use thiserror::Error;
use threads::Grouping;
use trace_dat::{TraceDatError, read_trace_dat};

/// What a file contains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedSchedule {
    /// The schedule of the CPUs with events.
    pub schedule: CpuSchedule,
    /// Online CPUs of the recorded host, if the file says it.
    pub online_cpus: Option<u32>,
    /// Events of the scheduler in the file.
    pub events: u64,
    /// Threads with names of vCPUs whose processes the file does not tell.
    pub unassigned_vcpus: Vec<Tid>,
}

/// Why a file cannot be read.
#[derive(Debug, Error)]
pub enum RecordedScheduleError {
    /// Reading failed.
    #[error("cannot read the file")]
    Io(#[from] io::Error),
    /// It is another kind of file.
    #[error("this is no file of perf record, nor of trace-cmd record")]
    UnknownFormat,
    /// A file of perf.
    #[error(transparent)]
    PerfData(#[from] PerfDataError),
    /// A file of trace-cmd.
    #[error(transparent)]
    TraceDat(#[from] TraceDatError),
}

/// Reads a file of perf or trace-cmd.
///
/// # Errors
///
/// See [`RecordedScheduleError`].
pub fn read_schedule(
    mut file: impl Read + Seek,
    grouping: Grouping<'_>,
) -> Result<RecordedSchedule, RecordedScheduleError> {
    let mut magic = Vec::new();
    (&mut file).take(8).read_to_end(&mut magic)?;
    file.seek(SeekFrom::Start(0))?;
    match &magic[..] {
        b"PERFILE2" | b"2ELIFREP" => Ok(read_perf_data(file, grouping)?),
        magic if event_format::MAGIC.starts_with(magic) && !magic.is_empty() => Ok(read_trace_dat(file, grouping)?),
        _ => Err(RecordedScheduleError::UnknownFormat),
    }
}
