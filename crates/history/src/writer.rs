//! Writes a history: recorded rows are written in one transaction, old rows are thinned, and the file stays within its
//! size limit.

use crate::Error;
use crate::convergence;
use crate::database::{database_error, log_path, open_writable};
use crate::reader::seconds_to_millis;
use crate::record::{HistoryPass, HistorySample};
use crate::tiers::{self, RetentionTier};
use pagefold_daemon::wire::{DecisionReport, StatusReport, TrackedProcessReport, TrackingState};
use rusqlite::{Connection, Transaction, params};
use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};

/// Bytes of a page of the database.
const DATABASE_PAGE_BYTES: u64 = 4096;

/// The maximum number of footprints recorded at a time: the largest ones.
const MAX_FOOTPRINTS_PER_NOTE: usize = 32;

/// Samples kept in memory to measure a pass: at four a second, those of a quarter of an hour.
const MAX_RECENT_SAMPLES: usize = 4096;

/// The maximum number of rows waiting to be written. More are lost if writing fails for that long.
const MAX_PENDING_ROWS: usize = 4096;

/// The maximum length of a text in characters, because processes choose their names.
const MAX_TEXT_CHARS: usize = 300;

/// The approximate maximum size of a row in bytes. It limits the rows of one deletion, so that the log stays within its
/// limit.
const MAX_ROW_BYTES: u64 = 256;

/// The size limits of a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistoryLimits {
    /// Bytes of the database and its log together.
    pub max_bytes: u64,
}

impl Default for HistoryLimits {
    /// 64 MiB: a day at full rate, a month of minutes and a year of hours take about 40.
    fn default() -> Self {
        Self { max_bytes: 64 << 20 }
    }
}

impl HistoryLimits {
    /// The smallest possible limit: 1 MiB.
    pub const MIN_BYTES: u64 = 1 << 20;

    fn max_total_bytes(self) -> u64 {
        self.max_bytes.max(Self::MIN_BYTES)
    }

    /// The limit of the log: a quarter.
    fn max_log_bytes(self) -> u64 {
        self.max_total_bytes() / 4
    }

    /// The limit of the database in pages.
    fn max_database_pages(self) -> u64 {
        (self.max_total_bytes() - self.max_log_bytes()) / DATABASE_PAGE_BYTES
    }
}

/// The history that a daemon writes. Rows since the last commit are lost when it is dropped.
pub struct HistoryWriter {
    path: PathBuf,
    connection: Connection,
    limits: HistoryLimits,
    run_id: i64,
    samples: Vec<HistorySample>,
    footprints: Vec<(f64, Vec<TrackedProcessReport>)>,
    decisions: Vec<DecisionReport>,
    passes: BTreeMap<u64, HistoryPass>,
    /// The last pass until its duration is measured.
    last_pass: Option<HistoryPass>,
    recent_samples: VecDeque<HistorySample>,
    /// When processes that are not scanned yet were first seen.
    arrival_times: BTreeMap<(u32, u64), f64>,
    /// When the first of the processes scanned since the last merge was seen.
    oldest_arrival_time: Option<f64>,
    /// How many decisions were recorded.
    decision_count: u64,
    commit_count: u64,
}

/// A pass is not attributed to an arrival more than this many seconds before it.
const MAX_ARRIVAL_WAIT_SECONDS: f64 = 120.0;

/// The number of commits between two rounds of thinning.
const COMMITS_PER_THINNING: u64 = 60;

impl HistoryWriter {
    /// Open or create the history of a host, for a daemon that starts at a time (seconds since 1970).
    pub fn open(path: &Path, limits: HistoryLimits, host: &str, version: &str, time: f64) -> Result<Self, Error> {
        let mut connection = open_writable(path)?;
        let prepare = |connection: &mut Connection| -> rusqlite::Result<i64> {
            // If it is too large already, it is shrunk before the first write.
            if count_pages(connection)?.0 > limits.max_database_pages() {
                shrink(connection, limits)?;
                connection.execute_batch("VACUUM")?;
            }
            connection.pragma_update(None, "synchronous", "normal")?;
            connection.pragma_update(None, "cache_size", -512)?;
            connection.pragma_update_and_check(
                None,
                "wal_autocheckpoint",
                (limits.max_log_bytes() / 4 / DATABASE_PAGE_BYTES).cast_signed(),
                |_| Ok(()),
            )?;
            connection.pragma_update_and_check(
                None,
                "journal_size_limit",
                (limits.max_log_bytes() / 4).cast_signed(),
                |_| Ok(()),
            )?;
            connection.pragma_update_and_check(
                None,
                "max_page_count",
                limits.max_database_pages().cast_signed(),
                |_| Ok(()),
            )?;
            let insert = "INSERT INTO run (host, version, started_ms) VALUES (?1, ?2, ?3)";
            connection.execute(insert, params![truncate_text(host), version, seconds_to_millis(time)])?;
            Ok(connection.last_insert_rowid())
        };
        let run_id = prepare(&mut connection).map_err(database_error(path, "begin"))?;
        let (samples, footprints, decisions, passes) = Default::default();
        let (last_pass, recent_samples, arrival_times, oldest_arrival_time) = Default::default();
        let path = path.to_owned();
        Ok(Self {
            path,
            connection,
            limits,
            run_id,
            samples,
            footprints,
            decisions,
            passes,
            last_pass,
            recent_samples,
            arrival_times,
            oldest_arrival_time,
            decision_count: 0,
            commit_count: 0,
        })
    }

    /// Record the status of the daemon. Of the tracked processes it only uses new arrivals.
    pub fn note_status(&mut self, status: &StatusReport) {
        let sample = HistorySample::from_status(status, self.run_id);
        if self.samples.len() < MAX_PENDING_ROWS {
            self.samples.push(sample);
        }
        // A pass is measured by KSM's counters: memory freed by splitting huge pages is known only at its end.
        let split_zero = status.saved.split_zero.unwrap_or(0);
        let counted_by_ksm = sample.saved_gross.map(|gross| gross.saturating_sub(split_zero));
        self.add_recent_sample(HistorySample { saved_gross: counted_by_ksm, ..sample });
        self.note_arrivals(status);
        self.note_pass(status);
        // By their number, because clocks may be set back.
        let decision_count: u64 = status.decisions_by_reason.values().sum();
        let new_count = decision_count.saturating_sub(self.decision_count) as usize;
        let free_rows = MAX_PENDING_ROWS.saturating_sub(self.decisions.len());
        self.decisions.extend(status.decisions.iter().take(new_count).rev().take(free_rows).cloned());
        self.decision_count = decision_count;
    }

    /// Record the footprints of the largest tracked processes at a time (seconds since 1970).
    pub fn note_footprints(&mut self, time: f64, processes: &[TrackedProcessReport]) {
        let mut largest = processes.to_vec();
        largest.sort_by_key(|process| std::cmp::Reverse(process.footprint.or(process.resident)));
        largest.truncate(MAX_FOOTPRINTS_PER_NOTE);
        if self.footprints.len() < COMMITS_PER_THINNING as usize {
            self.footprints.push((time, largest));
        }
    }

    /// Add KSM's count of gross savings at a time (seconds since 1970). It is only used to measure a pass, and not
    /// stored.
    pub fn note_saved_by_ksm(&mut self, time: f64, saved_gross_bytes: u64) {
        self.add_recent_sample(HistorySample {
            time,
            run_id: self.run_id,
            saved_gross: Some(saved_gross_bytes),
            ..HistorySample::default()
        });
    }

    fn add_recent_sample(&mut self, sample: HistorySample) {
        self.recent_samples.push_back(sample);
        if self.recent_samples.len() > MAX_RECENT_SAMPLES {
            self.recent_samples.pop_front();
        }
    }

    fn note_arrivals(&mut self, status: &StatusReport) {
        let arriving: BTreeMap<(u32, u64), f64> = status
            .tracked_processes
            .iter()
            .filter(|process| process.state == TrackingState::Arriving)
            .map(|process| (process.pid, process.start_time))
            .map(|id| (id, self.arrival_times.get(&id).copied().unwrap_or(status.time)))
            .collect();
        let scanned =
            self.arrival_times.iter().filter(|(id, _)| !arriving.contains_key(id)).map(|(_, first_seen)| *first_seen);
        self.oldest_arrival_time = scanned.chain(self.oldest_arrival_time).reduce(f64::min);
        self.arrival_times = arriving;
    }

    fn note_pass(&mut self, status: &StatusReport) {
        if let Some(last) = status.passes.last {
            let number = status.passes.passes;
            let recorded = self.last_pass.filter(|pass| pass.number == number);
            let arrival_wait_seconds = match recorded {
                Some(recorded) => recorded.arrival_wait_seconds,
                None => self.oldest_arrival_time.map(|arrival| (last.time - last.seconds - arrival).max(0.0)),
            };
            // New processes are often scanned in one pass and merged in one of the next.
            let merged = last.measured.is_some() && recorded.is_none_or(|recorded| recorded.measured.is_none());
            if merged || arrival_wait_seconds > Some(MAX_ARRIVAL_WAIT_SECONDS) && recorded.is_none() {
                self.oldest_arrival_time = None;
            }
            let arrival_wait_seconds = arrival_wait_seconds.filter(|seconds| *seconds <= MAX_ARRIVAL_WAIT_SECONDS);
            let pass = HistoryPass {
                run_id: self.run_id,
                number,
                ended_at: last.time,
                seconds: last.seconds,
                cpu_seconds: last.cpu_seconds,
                processes: last.processes,
                predicted: last.predicted,
                measured: last.measured,
                arrival_wait_seconds,
                seconds_to_90: None,
                seconds_to_99: None,
            };
            match recorded {
                None => self.measure_convergence(),
                Some(recorded) if (HistoryPass { seconds_to_90: None, seconds_to_99: None, ..recorded }) == pass => {
                    return self.measure_finished_pass(status.time);
                }
                Some(_) => {}
            }
            self.last_pass = Some(pass);
            self.passes.insert(number, pass);
        }
    }

    /// Measure the last pass once the samples after it have arrived.
    fn measure_finished_pass(&mut self, now: f64) {
        if self
            .last_pass
            .is_some_and(|pass| pass.seconds_to_90.is_none() && now > pass.ended_at + convergence::SECONDS_AFTER_PASS)
        {
            self.measure_convergence();
        }
    }

    /// Measure how long the last pass took to reach most of its savings.
    fn measure_convergence(&mut self) {
        let Some(pass) = self.last_pass.as_mut().filter(|pass| pass.measured > Some(0) && pass.seconds_to_90.is_none())
        else {
            return;
        };
        let samples = self.recent_samples.make_contiguous();
        if let Some((to_90, to_99)) = convergence::convergence_times(pass, samples) {
            (pass.seconds_to_90, pass.seconds_to_99) = (Some(to_90), Some(to_99));
            self.passes.insert(pass.number, *pass);
        }
    }

    /// Whether rows are waiting to be written.
    pub fn is_pending(&self) -> bool {
        !self.samples.is_empty() || !self.passes.is_empty() || !self.decisions.is_empty() || !self.footprints.is_empty()
    }

    /// Write all waiting rows in one transaction. If a reader blocks the log, they keep waiting, up to a number; after
    /// other errors they are discarded.
    pub fn commit(&mut self) -> Result<(), Error> {
        self.bound_log()?;
        self.make_room()?;
        let mut result = self.write();
        if result.as_ref().is_err_and(|error| error.sqlite_error_code() == Some(rusqlite::ErrorCode::DiskFull)) {
            // The size limit was reached nevertheless, or the disk is full: deleting old rows may help.
            result = shrink(&mut self.connection, self.limits).and_then(|()| self.write());
        }
        self.samples.clear();
        self.footprints.clear();
        self.decisions.clear();
        self.passes.clear();
        result.map_err(database_error(&self.path, "write"))?;
        self.commit_count += 1;
        if self.commit_count.is_multiple_of(COMMITS_PER_THINNING) {
            self.thin_old_rows()?;
        }
        Ok(())
    }

    fn write(&mut self) -> rusqlite::Result<()> {
        let transaction = self.connection.transaction()?;
        insert_samples(&transaction, &self.samples)?;
        insert_passes(&transaction, self.passes.values())?;
        insert_decisions(&transaction, &self.decisions)?;
        for (time, processes) in &self.footprints {
            insert_footprints(&transaction, seconds_to_millis(*time), processes)?;
        }
        transaction.commit()
    }

    /// Thin old rows, relative to the time of the last sample.
    fn thin_old_rows(&mut self) -> Result<(), Error> {
        let Some(now) = self.recent_samples.back().map(|sample| seconds_to_millis(sample.time)) else { return Ok(()) };
        thin_tables(&mut self.connection, now, self.limits).map_err(database_error(&self.path, "thin out"))
    }

    /// Delete the oldest rows if the limit is near.
    fn make_room(&mut self) -> Result<(), Error> {
        let check = |connection: &mut Connection| {
            let (total, free) = count_pages(connection)?;
            if total - free > self.limits.max_database_pages() / 10 * 8 {
                shrink(connection, self.limits)
            } else {
                Ok(())
            }
        };
        check(&mut self.connection).map_err(database_error(&self.path, "shrink"))
    }

    /// Nothing is written while the log is so long that it could exceed its limit.
    fn bound_log(&mut self) -> Result<(), Error> {
        let length = || std::fs::metadata(log_path(&self.path)).map_or(0, |log| log.len());
        if length() <= self.limits.max_log_bytes() / 2 {
            return Ok(());
        }
        checkpoint_log(&self.connection).map_err(database_error(&self.path, "flush"))?;
        if length() <= self.limits.max_log_bytes() / 2 {
            Ok(())
        } else {
            Err(Error::LogBlockedByReader(self.path.clone()))
        }
    }
}

/// Move the log into the database as far as readers allow.
fn checkpoint_log(connection: &Connection) -> rusqlite::Result<()> {
    connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()))
}

fn to_optional_signed(value: Option<u64>) -> Option<i64> {
    value.map(u64::cast_signed)
}

fn insert_samples(transaction: &Transaction<'_>, samples: &[HistorySample]) -> rusqlite::Result<()> {
    let mut insert =
        transaction.prepare("INSERT OR REPLACE INTO sample VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)")?;
    for sample in samples {
        insert.execute(params![
            seconds_to_millis(sample.time),
            sample.run_id,
            to_optional_signed(sample.saved_gross),
            sample.saved_net,
            to_optional_signed(sample.total),
            to_optional_signed(sample.available),
            to_optional_signed(sample.keep_available),
            sample.ksmd_seconds,
            sample.pagefold_seconds,
            sample.bound_percent,
            sample.tracked_processes.cast_signed(),
        ])?;
    }
    Ok(())
}

fn insert_passes<'a>(
    transaction: &Transaction<'_>,
    passes: impl Iterator<Item = &'a HistoryPass>,
) -> rusqlite::Result<()> {
    let mut insert =
        transaction.prepare("INSERT OR REPLACE INTO pass VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)")?;
    for pass in passes {
        insert.execute(params![
            pass.run_id,
            pass.number.cast_signed(),
            seconds_to_millis(pass.ended_at),
            pass.seconds,
            pass.cpu_seconds,
            pass.processes.cast_signed(),
            pass.predicted.cast_signed(),
            pass.measured,
            pass.arrival_wait_seconds,
            pass.seconds_to_90,
            pass.seconds_to_99,
        ])?;
    }
    Ok(())
}

fn insert_decisions(transaction: &Transaction<'_>, decisions: &[DecisionReport]) -> rusqlite::Result<()> {
    let mut insert = transaction.prepare("INSERT INTO decision VALUES (NULL, ?1, ?2, ?3, ?4, ?5, ?6, ?7)")?;
    for decision in decisions {
        insert.execute(params![
            decision.time_ms.cast_signed(),
            decision.kind,
            truncate_text(&decision.subject),
            decision.reason,
            truncate_text(&decision.explanation),
            to_optional_signed(decision.predicted),
            decision.carried_out,
        ])?;
    }
    Ok(())
}

fn insert_footprints(
    transaction: &Transaction<'_>,
    time_ms: i64,
    processes: &[TrackedProcessReport],
) -> rusqlite::Result<()> {
    let mut insert = transaction.prepare("INSERT INTO footprint VALUES (NULL, ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)")?;
    for process in processes {
        let kind = serde_json::to_value(process.kind).unwrap_or_default();
        insert.execute(params![
            time_ms,
            truncate_text(&process.label),
            kind.as_str().unwrap_or("process"),
            truncate_text(&process.domain),
            process.pid,
            to_optional_signed(process.resident),
            to_optional_signed(process.footprint),
            to_optional_signed(process.saved),
        ])?;
    }
    Ok(())
}

/// Truncate a text.
fn truncate_text(text: &str) -> String {
    text.chars().take(MAX_TEXT_CHARS).collect()
}

/// Pages of the database, and free pages among them.
fn count_pages(connection: &Connection) -> rusqlite::Result<(u64, u64)> {
    let number = |name| connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
    Ok((number("page_count")?.unsigned_abs(), number("freelist_count")?.unsigned_abs()))
}

/// The tables with times, and the key of each.
const TABLES_WITH_TIMES: [(&str, &str); 4] =
    [("sample", "time_ms"), ("footprint", "id"), ("decision", "id"), ("pass", "rowid")];

/// Thin all rows that are old at a time, in milliseconds.
fn thin_tables(connection: &mut Connection, now: i64, limits: HistoryLimits) -> rusqlite::Result<()> {
    for (table, tiers) in [("sample", &tiers::SAMPLE_TIERS[..]), ("footprint", &tiers::FOOTPRINT_TIERS[..])] {
        for RetentionTier { min_age_millis: min_age, interval_millis: interval } in tiers {
            match interval {
                Some(interval) => {
                    delete_rows(connection, table, &superseded_rows_before(table, *interval), now - min_age, limits)?
                }
                None => delete_rows(connection, table, &rows_before(table, "1"), now - min_age, limits)?,
            }
        }
    }
    delete_rows(connection, "decision", &rows_before("decision", "1"), now - tiers::MAX_EVENT_AGE_MILLIS, limits)?;
    delete_rows(connection, "pass", &rows_before("pass", "1"), now - tiers::MAX_EVENT_AGE_MILLIS, limits)?;
    delete_rows(
        connection,
        "pass",
        &rows_before("pass", "measured IS NULL"),
        now - tiers::MAX_IDLE_PASS_AGE_MILLIS,
        limits,
    )?;
    let unused = "DELETE FROM run WHERE id < (SELECT max(id) FROM run) AND id NOT IN (SELECT run_id FROM sample)";
    connection.execute(unused, [])?;
    Ok(())
}

/// The key of a table.
fn row_key(table: &str) -> &'static str {
    TABLES_WITH_TIMES.iter().find(|(name, _)| *name == table).map_or("rowid", |(_, id)| id)
}

/// A query for the rows of a table before a time for which a condition is true.
fn rows_before(table: &str, condition: &str) -> String {
    format!("SELECT {} FROM {table} WHERE time_ms < ?1 AND {condition}", row_key(table))
}

/// A query for the rows of a table before a time that are not the latest of their interval. For samples also the latest
/// of each run of the daemon stays, so that no CPU time is lost.
fn superseded_rows_before(table: &str, interval: i64) -> String {
    let (id, run_column) = (row_key(table), if table == "sample" { ", run_id" } else { "" });
    format!(
        "SELECT {id} FROM (SELECT {id}, time_ms, max(time_ms) OVER (PARTITION BY time_ms / {interval}{run_column}) AS latest \
         FROM {table} WHERE time_ms < ?1) WHERE time_ms < latest"
    )
}

/// Delete rows of a table before a time, the oldest first and in batches, so that the log stays short.
fn delete_rows(
    connection: &mut Connection,
    table: &str,
    rows_query: &str,
    before_ms: i64,
    limits: HistoryLimits,
) -> rusqlite::Result<()> {
    let batch_rows = limits.max_log_bytes() / 8 / MAX_ROW_BYTES;
    let statement =
        format!("DELETE FROM {table} WHERE {} IN ({rows_query} ORDER BY time_ms LIMIT {batch_rows})", row_key(table));
    while connection.execute(&statement, [before_ms])? as u64 == batch_rows {
        checkpoint_log(connection)?;
    }
    Ok(())
}

/// Delete the oldest rows until enough of the database is free: repeatedly those older than a sixteenth of the rows of
/// the longest table. It counts rows and not time, because a wrong clock may have left rows far away.
fn shrink(connection: &mut Connection, limits: HistoryLimits) -> rusqlite::Result<()> {
    // Each step removes a sixteenth of the rest, until a thousandth is left.
    for _ in 0..110 {
        let (total, free) = count_pages(connection)?;
        if total - free <= limits.max_database_pages() / 10 * 7 {
            break;
        }
        let Some(cutoff) = oldest_rows_time(connection)? else { break };
        for (table, _) in TABLES_WITH_TIMES {
            delete_rows(connection, table, &rows_before(table, "1"), cutoff, limits)?;
        }
        checkpoint_log(connection)?;
    }
    Ok(())
}

/// The time before which a sixteenth of the rows of the longest table lie; `None` if all tables are empty.
fn oldest_rows_time(connection: &Connection) -> rusqlite::Result<Option<i64>> {
    let count = |table| connection.query_row(&format!("SELECT count(*) FROM {table}"), [], |row| row.get::<_, i64>(0));
    let mut longest = (0, "sample");
    for (table, _) in TABLES_WITH_TIMES {
        longest = longest.max((count(table)?, table));
    }
    let (rows, table) = longest;
    if rows == 0 {
        return Ok(None);
    }
    let query = format!("SELECT time_ms FROM {table} ORDER BY time_ms LIMIT 1 OFFSET ?1");
    Ok(Some(connection.query_row(&query, [rows / 16], |row| row.get::<_, i64>(0))? + 1))
}

#[cfg(test)]
mod tests;
