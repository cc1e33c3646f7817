//! The state of hosts over time: the daemon's answer about its past, and the report on its history.
//!
//! `record` has the stored rows, `report` the document, `convergence`, `series` and `figures` the arithmetic, `chart`
//! and `svg` the charts. `text`, `html` and `parquet` write the document.

use pagefold_daemon::wire::StatusReport;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The points of the daemon's answer to `/api/history`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HistoryResponse {
    /// `pagefold.history/1`.
    pub schema: String,
    /// The points in ascending order.
    pub points: Vec<HistoryPoint>,
}

impl HistoryResponse {
    /// An answer with these points.
    pub fn new(points: Vec<HistoryPoint>) -> Self {
        Self { schema: "pagefold.history/1".to_owned(), points }
    }
}

/// The state of a host at one time. Values that could not be read are absent. Bytes, unless the name says otherwise.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HistoryPoint {
    /// The time in seconds since 1970.
    pub time: f64,
    /// Gross savings by merging.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saved_gross: Option<u64>,
    /// The same less metadata.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saved_net: Option<i64>,
    /// `MemAvailable`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub available: Option<u64>,
    /// The goal for `MemAvailable`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_available: Option<u64>,
    /// CPU use of ksmd over the previous minute, in percent of one CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ksmd_percent: Option<f64>,
    /// CPU use of the daemon over the previous minute, in percent of one CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pagefold_percent: Option<f64>,
    /// Mean CPU budget of both together, in percent of one CPU.
    pub bound_percent: f64,
}

impl HistoryPoint {
    /// A point without known values.
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

    /// Whether no value is known.
    pub fn is_unknown(&self) -> bool {
        self.saved_gross.is_none() && self.saved_net.is_none() && self.available.is_none()
    }

    /// The point of a status.
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
