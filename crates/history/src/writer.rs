//! Keeping a history: what is noted is written in one transaction, what is old is thinned out, and the file keeps to
//! its bound.

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

/// Members that are kept at a time at most: those with the largest footprint.
const MAX_FOOTPRINTS_PER_NOTE: usize = 32;

/// Samples that are remembered to follow a pass by: at four a second, those of a quarter of an hour.
const MAX_RECENT_SAMPLES: usize = 4096;

/// What is noted and not written at most: it is lost where nothing can be written for so long.
const MAX_PENDING_ROWS: usize = 4096;

/// Characters of a text at most: processes choose their names.
const MAX_TEXT_CHARS: usize = 300;

/// Bytes that a row takes at most, about: to delete so many rows that the log keeps to its bound.
const MAX_ROW_BYTES: u64 = 256;

/// How large a history may become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistoryLimits {
    /// Bytes of the database and its log together.
    pub max_bytes: u64,
}

impl Default for HistoryLimits {
    /// 64 MiB: a day at full rate, a month of minutes and a year of hours take some 40.
    fn default() -> Self {
        Self { max_bytes: 64 << 20 }
    }
}

impl HistoryLimits {
    /// The least that can be kept to: 1 MiB.
    pub const MIN_BYTES: u64 = 1 << 20;

    fn max_total_bytes(self) -> u64 {
        self.max_bytes.max(Self::MIN_BYTES)
    }

    /// What the log may take: a quarter.
    fn max_log_bytes(self) -> u64 {
        self.max_total_bytes() / 4
    }

    /// Pages of the database.
    fn max_database_pages(self) -> u64 {
        (self.max_total_bytes() - self.max_log_bytes()) / DATABASE_PAGE_BYTES
    }
}

/// A history that is kept by a daemon. What was noted since the last commit is lost when it is dropped.
pub struct HistoryWriter {
    path: PathBuf,
    connection: Connection,
    limits: HistoryLimits,
    run_id: i64,
    samples: Vec<HistorySample>,
    footprints: Vec<(f64, Vec<TrackedProcessReport>)>,
    decisions: Vec<DecisionReport>,
    passes: BTreeMap<u64, HistoryPass>,
    /// The last pass until its course is known.
    last_pass: Option<HistoryPass>,
    recent_samples: VecDeque<HistorySample>,
    /// When those were first seen who have not been looked at yet.
    arrival_times: BTreeMap<(u32, u64), f64>,
    /// When the first of those was seen who were looked at since the last merge.
    oldest_arrival_time: Option<f64>,
    /// How many decisions were noted.
    decision_count: u64,
    commit_count: u64,
}

/// Seconds after which a pass is no longer for the sake of who came so long before.
const MAX_ARRIVAL_WAIT_SECONDS: f64 = 120.0;

/// How many commits lie between two rounds of thinning.
const COMMITS_PER_THINNING: u64 = 60;

impl HistoryWriter {
    /// Open the history of a host, or begin one, for a daemon that starts at a time (seconds since 1970).
    pub fn open(path: &Path, limits: HistoryLimits, host: &str, version: &str, time: f64) -> Result<Self, Error> {
        let mut connection = open_writable(path)?;
        let prepare = |connection: &mut Connection| -> rusqlite::Result<i64> {
            // Where it is larger already, it is made smaller before anything else is written.
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
        let run = prepare(&mut connection).map_err(database_error(path, "begin"))?;
        let (samples, members, decisions, passes) = Default::default();
        let (open, recent, arrivals, waited) = Default::default();
        let path = path.to_owned();
        Ok(Self {
            path,
            connection,
            limits,
            run_id: run,
            samples,
            footprints: members,
            decisions,
            passes,
            last_pass: open,
            recent_samples: recent,
            arrival_times: arrivals,
            oldest_arrival_time: waited,
            decision_count: 0,
            commit_count: 0,
        })
    }

    /// Note how the daemon stands. Of members only those are looked at who have just come.
    pub fn note_status(&mut self, status: &StatusReport) {
        let sample = HistorySample::from_status(status, self.run_id);
        if self.samples.len() < MAX_PENDING_ROWS {
            self.samples.push(sample);
        }
        // The course of a pass is what KSM counts: what splitting huge pages frees is known only at its end.
        let split_zero = status.saved.split_zero.unwrap_or(0);
        let counted = sample.saved_gross.map(|gross| gross.saturating_sub(split_zero));
        self.add_recent_sample(HistorySample { saved_gross: counted, ..sample });
        self.note_arrivals(status);
        self.note_pass(status);
        // By their number, since clocks are set back.
        let decided: u64 = status.decisions_by_reason.values().sum();
        let new = decided.saturating_sub(self.decision_count) as usize;
        let room = MAX_PENDING_ROWS.saturating_sub(self.decisions.len());
        self.decisions.extend(status.decisions.iter().take(new).rev().take(room).cloned());
        self.decision_count = decided;
    }

    /// Note what the largest members take at a time (seconds since 1970).
    pub fn note_footprints(&mut self, time: f64, processes: &[TrackedProcessReport]) {
        let mut members = processes.to_vec();
        members.sort_by_key(|member| std::cmp::Reverse(member.footprint.or(member.resident)));
        members.truncate(MAX_FOOTPRINTS_PER_NOTE);
        if self.footprints.len() < COMMITS_PER_THINNING as usize {
            self.footprints.push((time, members));
        }
    }

    /// Note what KSM counts of what merging saves, gross, at a time (seconds since 1970): to know the course of a pass,
    /// and not to be kept.
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
        let new: BTreeMap<(u32, u64), f64> = status
            .members
            .iter()
            .filter(|member| member.state == TrackingState::Arriving)
            .map(|member| (member.pid, member.start_time))
            .map(|who| (who, self.arrival_times.get(&who).copied().unwrap_or(status.time)))
            .collect();
        let looked = self.arrival_times.iter().filter(|(who, _)| !new.contains_key(who)).map(|(_, seen)| *seen);
        self.oldest_arrival_time = looked.chain(self.oldest_arrival_time).reduce(f64::min);
        self.arrival_times = new;
    }

    fn note_pass(&mut self, status: &StatusReport) {
        if let Some(last) = status.passes.last {
            let number = status.passes.passes;
            let known = self.last_pass.filter(|open| open.number == number);
            let waited = match known {
                Some(known) => known.arrival_wait_seconds,
                None => self.oldest_arrival_time.map(|seen| (last.time - last.seconds - seen).max(0.0)),
            };
            // Newcomers are often looked at in one pass and merged in one of the next.
            let merged = last.reached.is_some() && known.is_none_or(|known| known.measured.is_none());
            if merged || waited > Some(MAX_ARRIVAL_WAIT_SECONDS) && known.is_none() {
                self.oldest_arrival_time = None;
            }
            let waited = waited.filter(|waited| *waited <= MAX_ARRIVAL_WAIT_SECONDS);
            let pass = HistoryPass {
                run_id: self.run_id,
                number,
                ended_at: last.time,
                seconds: last.seconds,
                cpu_seconds: last.cpu_seconds,
                processes: last.processes,
                predicted: last.predicted,
                measured: last.reached,
                arrival_wait_seconds: waited,
                seconds_to_90: None,
                seconds_to_99: None,
            };
            match known {
                None => self.measure_convergence(),
                Some(known) if (HistoryPass { seconds_to_90: None, seconds_to_99: None, ..known }) == pass => {
                    return self.measure_finished_pass(status.time);
                }
                Some(_) => {}
            }
            self.last_pass = Some(pass);
            self.passes.insert(number, pass);
        }
    }

    /// Follow the last pass once the samples after it are there.
    fn measure_finished_pass(&mut self, now: f64) {
        if self
            .last_pass
            .is_some_and(|pass| pass.seconds_to_90.is_none() && now > pass.ended_at + convergence::SECONDS_AFTER_PASS)
        {
            self.measure_convergence();
        }
    }

    /// Find out how long the last pass took to most of what it saved.
    fn measure_convergence(&mut self) {
        let Some(pass) = self.last_pass.as_mut().filter(|pass| pass.measured > Some(0) && pass.seconds_to_90.is_none())
        else {
            return;
        };
        let course = self.recent_samples.make_contiguous();
        if let Some((to_90, to_99)) = convergence::convergence_times(pass, course) {
            (pass.seconds_to_90, pass.seconds_to_99) = (Some(to_90), Some(to_99));
            self.passes.insert(pass.number, *pass);
        }
    }

    /// Whether anything is noted that is not written.
    pub fn is_pending(&self) -> bool {
        !self.samples.is_empty() || !self.passes.is_empty() || !self.decisions.is_empty() || !self.footprints.is_empty()
    }

    /// Write what was noted, all of it or nothing. What cannot be written because the log is held stays noted, up to a
    /// number; otherwise it is given up.
    pub fn commit(&mut self) -> Result<(), Error> {
        self.bound_log()?;
        self.make_room()?;
        let mut done = self.write();
        if done.as_ref().is_err_and(|error| error.sqlite_error_code() == Some(rusqlite::ErrorCode::DiskFull)) {
            // Its bound was met all the same, or the disk is full: less of the past may help.
            done = shrink(&mut self.connection, self.limits).and_then(|()| self.write());
        }
        self.samples.clear();
        self.footprints.clear();
        self.decisions.clear();
        self.passes.clear();
        done.map_err(database_error(&self.path, "write"))?;
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
        for (time, members) in &self.footprints {
            insert_footprints(&transaction, seconds_to_millis(*time), members)?;
        }
        transaction.commit()
    }

    /// Thin out what is old by the time of the last sample.
    fn thin_old_rows(&mut self) -> Result<(), Error> {
        let Some(now) = self.recent_samples.back().map(|sample| seconds_to_millis(sample.time)) else { return Ok(()) };
        thin_tables(&mut self.connection, now, self.limits).map_err(database_error(&self.path, "thin out"))
    }

    /// Let the oldest go where the bound is near.
    fn make_room(&mut self) -> Result<(), Error> {
        let check = |connection: &mut Connection| {
            let (all, free) = count_pages(connection)?;
            if all - free > self.limits.max_database_pages() / 10 * 8 {
                shrink(connection, self.limits)
            } else {
                Ok(())
            }
        };
        check(&mut self.connection).map_err(database_error(&self.path, "shrink"))
    }

    /// Nothing is written while the log is so long that it could outgrow its bound.
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

/// Move the log into the database as far as readers let it.
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
            decision.what,
            truncate_text(&decision.whom),
            decision.reason,
            truncate_text(&decision.why),
            to_optional_signed(decision.predicted),
            decision.acted,
        ])?;
    }
    Ok(())
}

fn insert_footprints(
    transaction: &Transaction<'_>,
    time_ms: i64,
    members: &[TrackedProcessReport],
) -> rusqlite::Result<()> {
    let mut insert = transaction.prepare("INSERT INTO member VALUES (NULL, ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)")?;
    for member in members {
        let kind = serde_json::to_value(member.kind).unwrap_or_default();
        insert.execute(params![
            time_ms,
            truncate_text(&member.label),
            kind.as_str().unwrap_or("process"),
            truncate_text(&member.domain),
            member.pid,
            to_optional_signed(member.resident),
            to_optional_signed(member.footprint),
            to_optional_signed(member.saved),
        ])?;
    }
    Ok(())
}

/// The beginning of a text.
fn truncate_text(text: &str) -> String {
    text.chars().take(MAX_TEXT_CHARS).collect()
}

/// Pages of the database, and those of them that are free.
fn count_pages(connection: &Connection) -> rusqlite::Result<(u64, u64)> {
    let number = |name| connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
    Ok((number("page_count")?.unsigned_abs(), number("freelist_count")?.unsigned_abs()))
}

/// The tables that have times, and what tells a row of them.
const TABLES_WITH_TIMES: [(&str, &str); 4] =
    [("sample", "time_ms"), ("member", "id"), ("decision", "id"), ("pass", "rowid")];

/// Thin everything out that is old at a time, in milliseconds.
fn thin_tables(connection: &mut Connection, now: i64, limits: HistoryLimits) -> rusqlite::Result<()> {
    for (table, tiers) in [("sample", &tiers::SAMPLE_TIERS[..]), ("member", &tiers::FOOTPRINT_TIERS[..])] {
        for RetentionTier { min_age_millis: age, interval_millis: step } in tiers {
            match step {
                Some(step) => delete_rows(connection, table, &superseded_rows_before(table, *step), now - age, limits)?,
                None => delete_rows(connection, table, &rows_before(table, "1"), now - age, limits)?,
            }
        }
    }
    delete_rows(connection, "decision", &rows_before("decision", "1"), now - tiers::MAX_EVENT_AGE_MILLIS, limits)?;
    delete_rows(connection, "pass", &rows_before("pass", "1"), now - tiers::MAX_EVENT_AGE_MILLIS, limits)?;
    delete_rows(
        connection,
        "pass",
        &rows_before("pass", "reached IS NULL"),
        now - tiers::MAX_IDLE_PASS_AGE_MILLIS,
        limits,
    )?;
    let unused = "DELETE FROM run WHERE id < (SELECT max(id) FROM run) AND id NOT IN (SELECT run FROM sample)";
    connection.execute(unused, [])?;
    Ok(())
}

/// What tells a row of a table.
fn row_key(table: &str) -> &'static str {
    TABLES_WITH_TIMES.iter().find(|(name, _)| *name == table).map_or("rowid", |(_, id)| id)
}

/// The rows of a table before a time for which something holds.
fn rows_before(table: &str, which: &str) -> String {
    format!("SELECT {} FROM {table} WHERE time_ms < ?1 AND {which}", row_key(table))
}

/// The rows of a table before a time that are not the latest of their slice of time; of samples also not of their life
/// of the daemon, to lose no CPU time.
fn superseded_rows_before(table: &str, step: i64) -> String {
    let (id, same) = (row_key(table), if table == "sample" { ", run" } else { "" });
    format!(
        "SELECT {id} FROM (SELECT {id}, time_ms, max(time_ms) OVER (PARTITION BY time_ms / {step}{same}) AS latest \
         FROM {table} WHERE time_ms < ?1) WHERE time_ms < latest"
    )
}

/// Delete rows of a table that lie before a time, the oldest first and some at a time, so that the log stays short.
fn delete_rows(
    connection: &mut Connection,
    table: &str,
    which: &str,
    before: i64,
    limits: HistoryLimits,
) -> rusqlite::Result<()> {
    let rows = limits.max_log_bytes() / 8 / MAX_ROW_BYTES;
    let text = format!("DELETE FROM {table} WHERE {} IN ({which} ORDER BY time_ms LIMIT {rows})", row_key(table));
    while connection.execute(&text, [before])? as u64 == rows {
        checkpoint_log(connection)?;
    }
    Ok(())
}

/// Let the oldest go until a good part of the database is free: what is older than a sixteenth of the rows of the
/// longest table, again and again. By rows and not by time, since a clock that was wrong for a while may have left rows
/// far away.
fn shrink(connection: &mut Connection, limits: HistoryLimits) -> rusqlite::Result<()> {
    // A sixteenth and a sixteenth of the rest, until a thousandth is left.
    for _ in 0..110 {
        let (all, free) = count_pages(connection)?;
        if all - free <= limits.max_database_pages() / 10 * 7 {
            break;
        }
        let Some(cut) = oldest_rows_time(connection)? else { break };
        for (table, _) in TABLES_WITH_TIMES {
            delete_rows(connection, table, &rows_before(table, "1"), cut, limits)?;
        }
        checkpoint_log(connection)?;
    }
    Ok(())
}

/// The time before which a sixteenth of the rows of the longest table lie; `None` where nothing is in any.
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
    let text = format!("SELECT time_ms FROM {table} ORDER BY time_ms LIMIT 1 OFFSET ?1");
    Ok(Some(connection.query_row(&text, [rows / 16], |row| row.get::<_, i64>(0))? + 1))
}

#[cfg(test)]
mod tests;
