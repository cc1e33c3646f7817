//! Reading a history.

use crate::Error;
use crate::open::{readable, refused};
use crate::record::{Footprint, Kept, Pass, Sample};
use pagefold_daemon::wire::{Decision, Kind};
use rusqlite::{Connection, Row, TransactionBehavior};
use std::path::{Path, PathBuf};

/// A history that is read.
pub struct Reader {
    path: PathBuf,
    connection: Connection,
}

impl Reader {
    /// Open a file. The daemon may be writing to it.
    pub fn open(path: &Path) -> Result<Self, Error> {
        Ok(Self { path: path.to_owned(), connection: readable(path)? })
    }

    /// When the last sample was taken, in seconds since 1970.
    pub fn last(&self) -> Result<Option<f64>, Error> {
        let last = self.connection.query_row("SELECT max(time_ms) FROM sample", [], |row| row.get::<_, Option<i64>>(0));
        Ok(last.map_err(refused(&self.path, "read"))?.map(seconds))
    }

    /// How the host stood within a span of time, in seconds since 1970.
    pub fn samples(&self, since: f64, until: f64) -> Result<Vec<Sample>, Error> {
        let span = (milliseconds(since), milliseconds(until));
        rows(&self.connection, SAMPLES, span, sample).map_err(refused(&self.path, "read"))
    }

    /// What was kept within a span of time, in seconds since 1970, as it is at one moment.
    pub fn load(&mut self, since: f64, until: f64) -> Result<Kept, Error> {
        self.read(milliseconds(since), milliseconds(until)).map_err(refused(&self.path, "read"))
    }

    fn read(&mut self, since: i64, until: i64) -> rusqlite::Result<Kept> {
        let transaction = self.connection.transaction_with_behavior(TransactionBehavior::Deferred)?;
        let span = (since, until);
        let host =
            transaction.query_row("SELECT host FROM run ORDER BY id DESC LIMIT 1", [], |row| row.get(0)).or_else(
                |error| if error == rusqlite::Error::QueryReturnedNoRows { Ok(String::new()) } else { Err(error) },
            )?;
        Ok(Kept {
            host,
            samples: rows(&transaction, SAMPLES, span, sample)?,
            passes: rows(&transaction, PASSES, span, pass)?,
            decisions: rows(&transaction, DECISIONS, span, decision)?,
            footprints: rows(&transaction, MEMBERS, span, footprint)?,
        })
    }
}

fn rows<T>(
    connection: &Connection,
    what: &str,
    span: (i64, i64),
    of: fn(&Row<'_>) -> rusqlite::Result<T>,
) -> rusqlite::Result<Vec<T>> {
    let text = format!("{what} WHERE time_ms BETWEEN ?1 AND ?2 ORDER BY time_ms");
    connection.prepare(&text)?.query_map([span.0, span.1], of)?.collect()
}

const SAMPLES: &str = "SELECT time_ms, run, saved_gross, saved_net, total, available, keep_available, ksmd_seconds,
    pagefold_seconds, bound_percent, members FROM sample";

fn sample(row: &Row<'_>) -> rusqlite::Result<Sample> {
    Ok(Sample {
        time: seconds(row.get(0)?),
        run: row.get(1)?,
        saved_gross: whole(row.get(2)?),
        saved_net: row.get(3)?,
        total: whole(row.get(4)?),
        available: whole(row.get(5)?),
        keep_available: whole(row.get(6)?),
        ksmd_seconds: row.get(7)?,
        pagefold_seconds: row.get(8)?,
        bound_percent: row.get(9)?,
        members: count(row.get(10)?),
    })
}

const PASSES: &str = "SELECT run, number, time_ms, seconds, cpu_seconds, processes, predicted, reached, waited, to_90,
    to_99 FROM pass";

fn pass(row: &Row<'_>) -> rusqlite::Result<Pass> {
    Ok(Pass {
        run: row.get(0)?,
        number: count(row.get(1)?),
        ended: seconds(row.get(2)?),
        seconds: row.get(3)?,
        cpu_seconds: row.get(4)?,
        processes: count(row.get(5)?),
        predicted: count(row.get(6)?),
        reached: row.get(7)?,
        waited: row.get(8)?,
        to_90: row.get(9)?,
        to_99: row.get(10)?,
    })
}

const DECISIONS: &str = "SELECT time_ms, what, whom, reason, why, predicted, acted FROM decision";

fn decision(row: &Row<'_>) -> rusqlite::Result<Decision> {
    Ok(Decision {
        time_ms: count(row.get(0)?),
        what: row.get(1)?,
        whom: row.get(2)?,
        reason: row.get(3)?,
        why: row.get(4)?,
        predicted: whole(row.get(5)?),
        acted: row.get(6)?,
    })
}

const MEMBERS: &str = "SELECT time_ms, label, kind, domain, pid, resident, footprint, saved FROM member";

fn footprint(row: &Row<'_>) -> rusqlite::Result<Footprint> {
    let kind: String = row.get(2)?;
    Ok(Footprint {
        time: seconds(row.get(0)?),
        label: row.get(1)?,
        kind: serde_json::from_value(kind.into()).unwrap_or(Kind::Process),
        domain: row.get(3)?,
        pid: row.get(4)?,
        resident: whole(row.get(5)?),
        footprint: whole(row.get(6)?),
        saved: whole(row.get(7)?),
    })
}

/// What was written as unsigned.
fn count(value: i64) -> u64 {
    value.max(0).unsigned_abs()
}

fn whole(value: Option<i64>) -> Option<u64> {
    value.map(count)
}

fn seconds(milliseconds: i64) -> f64 {
    milliseconds as f64 / 1e3
}

/// Of seconds. Conversion saturates, so that infinities are the ends of time.
pub fn milliseconds(seconds: f64) -> i64 {
    (seconds * 1e3).round() as i64
}
