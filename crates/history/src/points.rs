//! How hosts stood over time: what the daemon answers of its past, and the report that is made of what it has kept.
//!
//! `record` is what is kept, `report` the document that is made of it, `converge`, `series` and `figures` the
//! arithmetic, `chart` and `svg` the pictures; `text`, `html`, `csv` and `parquet` are the document for people and
//! programs.

use pagefold_daemon::wire::StatusReport;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Points of the past: what `/api/history` of the daemon answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HistoryResponse {
    /// `pagefold.history/1`.
    pub schema: String,
    /// The points, the oldest first.
    pub points: Vec<HistoryPoint>,
}

impl HistoryResponse {
    /// Of these points.
    pub fn new(points: Vec<HistoryPoint>) -> Self {
        Self { schema: "pagefold.history/1".to_owned(), points }
    }
}

/// How a host stood at a moment. What could not be read is absent. Bytes, unless the name says otherwise.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HistoryPoint {
    /// When: seconds since 1970.
    pub time: f64,
    /// What merging saved, gross.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saved_gross: Option<u64>,
    /// The same less metadata.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saved_net: Option<i64>,
    /// `MemAvailable`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub available: Option<u64>,
    /// `MemAvailable` that was to be kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_available: Option<u64>,
    /// Percent of one CPU that ksmd used over the minute before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ksmd_percent: Option<f64>,
    /// Percent of one CPU that the daemon used over the minute before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pagefold_percent: Option<f64>,
    /// Percent of one CPU that both may use together on average.
    pub bound_percent: f64,
}

impl HistoryPoint {
    /// A moment of which nothing is known.
    pub fn unknown(time: f64, bound_percent: f64) -> Self {
        Self {
            time,
            saved_gross: None,
            saved_net: None,
            available: None,
            keep_available: None,
            ksmd_percent: None,
            pagefold_percent: None,
            bound_percent,
        }
    }

    /// Whether nothing is known of it.
    pub fn is_unknown(&self) -> bool {
        self.saved_gross.is_none() && self.saved_net.is_none() && self.available.is_none()
    }

    /// Of a status.
    pub fn from_status(status: &StatusReport) -> Self {
        Self {
            time: status.time,
            saved_gross: status.saved.gross,
            saved_net: status.saved.net,
            available: status.memory.available,
            keep_available: status.goal.keep_available,
            ksmd_percent: status.cpu.ksmd.map(|cpu| cpu.percent),
            pagefold_percent: status.cpu.pagefold.map(|cpu| cpu.percent),
            bound_percent: status.bounds.cpu_percent,
        }
    }
}
