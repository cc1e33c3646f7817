//! A recording of the scheduler in JSON.

use crate::recorder::ScheduleRecordingSummary;
use schemars::JsonSchema;
use serde::Serialize;

/// The result of `pagefold vcpu record`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct VcpuRecordReport {
    /// `pagefold.vcpu-record/1`.
    pub schema: &'static str,
    /// The file.
    pub file: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// Time that was recorded, in seconds.
    pub seconds: f64,
    /// The recorded CPUs.
    pub cpus: Vec<u32>,
    /// Events of the scheduler.
    pub events: u64,
    /// Events that did not fit into the buffers.
    pub lost_events: u64,
}

impl VcpuRecordReport {
    /// The report of a recording.
    pub fn new(file: String, bytes: u64, summary: ScheduleRecordingSummary) -> Self {
        Self {
            schema: "pagefold.vcpu-record/1",
            file,
            bytes,
            seconds: summary.duration.as_secs_f64(),
            cpus: summary.cpus,
            events: summary.events,
            lost_events: summary.lost_events,
        }
    }
}
