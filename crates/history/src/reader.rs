//! Reads a history.

use crate::Error;
use crate::database::{database_error, open_readable};
use crate::record::{FootprintSample, HistoryPass, HistorySample, HistorySpan};
use pagefold_daemon::wire::{DecisionReport, WorkloadKind};
use rusqlite::{Connection, Row, TransactionBehavior};
use std::path::{Path, PathBuf};

/// A history opened for reading.
pub struct HistoryReader {
    path: PathBuf,
    connection: Connection,
}

impl HistoryReader {
    /// Open a file. The daemon may be writing to it.
    pub fn open(path: &Path) -> Result<Self, Error> {
        Ok(Self { path: path.to_owned(), connection: open_readable(path)? })
    }

    /// The time of the last sample, in seconds since 1970.
    pub fn last_sample_time(&self) -> Result<Option<f64>, Error> {
        let last = self.connection.query_row("SELECT max(time_ms) FROM sample", [], |row| row.get::<_, Option<i64>>(0));
        Ok(last.map_err(database_error(&self.path, "read"))?.map(millis_to_seconds))
    }

    /// The samples within a span of time, in seconds since 1970.
    pub fn samples(&self, since: f64, until: f64) -> Result<Vec<HistorySample>, Error> {
        let span = (seconds_to_millis(since), seconds_to_millis(until));
        query_rows(&self.connection, SELECT_SAMPLES, span, sample_from_row).map_err(database_error(&self.path, "read"))
    }

    /// All rows within a span of time, in seconds since 1970, from one consistent snapshot.
    pub fn load_span(&mut self, since: f64, until: f64) -> Result<HistorySpan, Error> {
        self.read_span(seconds_to_millis(since), seconds_to_millis(until)).map_err(database_error(&self.path, "read"))
    }

    fn read_span(&mut self, since: i64, until: i64) -> rusqlite::Result<HistorySpan> {
        let transaction = self.connection.transaction_with_behavior(TransactionBehavior::Deferred)?;
        let span = (since, until);
        let host =
            transaction.query_row("SELECT host FROM run ORDER BY id DESC LIMIT 1", [], |row| row.get(0)).or_else(
                |error| if error == rusqlite::Error::QueryReturnedNoRows { Ok(String::new()) } else { Err(error) },
            )?;
        Ok(HistorySpan {
            host,
            samples: query_rows(&transaction, SELECT_SAMPLES, span, sample_from_row)?,
            passes: query_rows(&transaction, SELECT_PASSES, span, pass_from_row)?,
            decisions: query_rows(&transaction, SELECT_DECISIONS, span, decision_from_row)?,
            footprints: query_rows(&transaction, SELECT_FOOTPRINTS, span, footprint_from_row)?,
        })
    }
}

fn query_rows<T>(
    connection: &Connection,
    select: &str,
    span: (i64, i64),
    from_row: fn(&Row<'_>) -> rusqlite::Result<T>,
) -> rusqlite::Result<Vec<T>> {
    let query = format!("{select} WHERE time_ms BETWEEN ?1 AND ?2 ORDER BY time_ms");
    connection.prepare(&query)?.query_map([span.0, span.1], from_row)?.collect()
}

const SELECT_SAMPLES: &str =
    "SELECT time_ms, run_id, saved_gross, saved_net, total, available, keep_available, ksmd_seconds,
    pagefold_seconds, bound_percent, tracked_processes FROM sample";

fn sample_from_row(row: &Row<'_>) -> rusqlite::Result<HistorySample> {
    Ok(HistorySample {
        time: millis_to_seconds(row.get(0)?),
        run_id: row.get(1)?,
        saved_gross: to_optional_unsigned(row.get(2)?),
        saved_net: row.get(3)?,
        total: to_optional_unsigned(row.get(4)?),
        available: to_optional_unsigned(row.get(5)?),
        keep_available: to_optional_unsigned(row.get(6)?),
        ksmd_seconds: row.get(7)?,
        pagefold_seconds: row.get(8)?,
        bound_percent: row.get(9)?,
        tracked_processes: to_unsigned(row.get(10)?),
    })
}

const SELECT_PASSES: &str = "SELECT run_id, number, time_ms, seconds, cpu_seconds, processes, predicted, measured,
    arrival_wait_seconds, seconds_to_90, seconds_to_99 FROM pass";

fn pass_from_row(row: &Row<'_>) -> rusqlite::Result<HistoryPass> {
    Ok(HistoryPass {
        run_id: row.get(0)?,
        number: to_unsigned(row.get(1)?),
        ended_at: millis_to_seconds(row.get(2)?),
        seconds: row.get(3)?,
        cpu_seconds: row.get(4)?,
        processes: to_unsigned(row.get(5)?),
        predicted: to_unsigned(row.get(6)?),
        measured: row.get(7)?,
        arrival_wait_seconds: row.get(8)?,
        seconds_to_90: row.get(9)?,
        seconds_to_99: row.get(10)?,
    })
}

const SELECT_DECISIONS: &str =
    "SELECT time_ms, kind, subject, reason, explanation, predicted, carried_out FROM decision";

fn decision_from_row(row: &Row<'_>) -> rusqlite::Result<DecisionReport> {
    Ok(DecisionReport {
        time_ms: to_unsigned(row.get(0)?),
        kind: row.get(1)?,
        subject: row.get(2)?,
        reason: row.get(3)?,
        explanation: row.get(4)?,
        predicted: to_optional_unsigned(row.get(5)?),
        carried_out: row.get(6)?,
    })
}

const SELECT_FOOTPRINTS: &str = "SELECT time_ms, label, kind, domain, pid, resident, footprint, saved FROM footprint";

fn footprint_from_row(row: &Row<'_>) -> rusqlite::Result<FootprintSample> {
    let kind: String = row.get(2)?;
    Ok(FootprintSample {
        time: millis_to_seconds(row.get(0)?),
        label: row.get(1)?,
        kind: serde_json::from_value(kind.into()).unwrap_or(WorkloadKind::Process),
        domain: row.get(3)?,
        pid: row.get(4)?,
        resident: to_optional_unsigned(row.get(5)?),
        footprint: to_optional_unsigned(row.get(6)?),
        saved: to_optional_unsigned(row.get(7)?),
    })
}

/// A value that was written as unsigned.
fn to_unsigned(value: i64) -> u64 {
    value.max(0).unsigned_abs()
}

fn to_optional_unsigned(value: Option<i64>) -> Option<u64> {
    value.map(to_unsigned)
}

fn millis_to_seconds(milliseconds: i64) -> f64 {
    milliseconds as f64 / 1e3
}

/// Milliseconds of seconds. The conversion saturates, so infinities become the earliest and latest times.
pub fn seconds_to_millis(seconds: f64) -> i64 {
    (seconds * 1e3).round() as i64
}
