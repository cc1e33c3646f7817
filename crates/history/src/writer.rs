//! Keeping a history: what is noted is written in one transaction, what is old is thinned out, and the file keeps to
//! its bound.

use crate::Error;
use crate::converge;
use crate::open::{log_of, refused, writable};
use crate::reader::milliseconds;
use crate::record::{Pass, Sample};
use crate::tiers::{self, Tier};
use pagefold_daemon::wire::{Decision, Member, MemberState, Status};
use rusqlite::{Connection, Transaction, params};
use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};

/// Bytes of a page of the database.
const PAGE: u64 = 4096;

/// Members that are kept at a time at most: those with the largest footprint.
const MEMBERS: usize = 32;

/// Samples that are remembered to follow a pass by: at four a second, those of a quarter of an hour.
const RECENT: usize = 4096;

/// What is noted and not written at most: it is lost where nothing can be written for so long.
const PENDING: usize = 4096;

/// Characters of a text at most: processes choose their names.
const LONGEST: usize = 300;

/// Bytes that a row takes at most, about: to delete so many rows that the log keeps to its bound.
const ROW: u64 = 256;

/// How large a history may become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of the database and its log together.
    pub bytes: u64,
}

impl Default for Limits {
    /// 64 MiB: a day at full rate, a month of minutes and a year of hours take some 40.
    fn default() -> Self {
        Self { bytes: 64 << 20 }
    }
}

impl Limits {
    /// The least that can be kept to: 1 MiB.
    pub const LEAST: u64 = 1 << 20;

    fn total(self) -> u64 {
        self.bytes.max(Self::LEAST)
    }

    /// What the log may take: a quarter.
    fn log(self) -> u64 {
        self.total() / 4
    }

    /// Pages of the database.
    fn pages(self) -> u64 {
        (self.total() - self.log()) / PAGE
    }
}

/// A history that is kept by a daemon. What was noted since the last commit is lost when it is dropped.
pub struct Writer {
    path: PathBuf,
    connection: Connection,
    limits: Limits,
    run: i64,
    samples: Vec<Sample>,
    members: Vec<(f64, Vec<Member>)>,
    decisions: Vec<Decision>,
    passes: BTreeMap<u64, Pass>,
    /// The last pass until its course is known.
    open: Option<Pass>,
    recent: VecDeque<Sample>,
    /// When those were first seen who have not been looked at yet.
    arrivals: BTreeMap<(u32, u64), f64>,
    /// When the first of those was seen who were looked at since the last merge.
    waited: Option<f64>,
    /// How many decisions were noted.
    decided: u64,
    commits: u64,
}

/// Seconds after which a pass is no longer for the sake of who came so long before.
const PATIENCE: f64 = 120.0;

/// How many commits lie between two rounds of thinning.
const THIN: u64 = 60;

impl Writer {
    /// Open the history of a host, or begin one, for a daemon that starts at a time (seconds since 1970).
    pub fn open(path: &Path, limits: Limits, host: &str, version: &str, time: f64) -> Result<Self, Error> {
        let mut connection = writable(path)?;
        let prepare = |connection: &mut Connection| -> rusqlite::Result<i64> {
            // Where it is larger already, it is made smaller before anything else is written.
            if pages(connection)?.0 > limits.pages() {
                shrink(connection, limits)?;
                connection.execute_batch("VACUUM")?;
            }
            connection.pragma_update(None, "synchronous", "normal")?;
            connection.pragma_update(None, "cache_size", -512)?;
            connection.pragma_update_and_check(
                None,
                "wal_autocheckpoint",
                (limits.log() / 4 / PAGE).cast_signed(),
                |_| Ok(()),
            )?;
            connection
                .pragma_update_and_check(None, "journal_size_limit", (limits.log() / 4).cast_signed(), |_| Ok(()))?;
            connection.pragma_update_and_check(None, "max_page_count", limits.pages().cast_signed(), |_| Ok(()))?;
            let insert = "INSERT INTO run (host, version, started_ms) VALUES (?1, ?2, ?3)";
            connection.execute(insert, params![cut(host), version, milliseconds(time)])?;
            Ok(connection.last_insert_rowid())
        };
        let run = prepare(&mut connection).map_err(refused(path, "begin"))?;
        let (samples, members, decisions, passes) = Default::default();
        let (open, recent, arrivals, waited) = Default::default();
        let path = path.to_owned();
        Ok(Self {
            path,
            connection,
            limits,
            run,
            samples,
            members,
            decisions,
            passes,
            open,
            recent,
            arrivals,
            waited,
            decided: 0,
            commits: 0,
        })
    }

    /// Note how the daemon stands. Of members only those are looked at who have just come.
    pub fn note(&mut self, status: &Status) {
        let sample = Sample::of(status, self.run);
        if self.samples.len() < PENDING {
            self.samples.push(sample);
        }
        // The course of a pass is what KSM counts: what splitting huge pages frees is known only at its end.
        let split_zero = status.saved.split_zero.unwrap_or(0);
        let counted = sample.saved_gross.map(|gross| gross.saturating_sub(split_zero));
        self.remember(Sample { saved_gross: counted, ..sample });
        self.note_arrivals(status);
        self.note_pass(status);
        // By their number, since clocks are set back.
        let decided: u64 = status.decisions_by_reason.values().sum();
        let new = decided.saturating_sub(self.decided) as usize;
        let room = PENDING.saturating_sub(self.decisions.len());
        self.decisions.extend(status.decisions.iter().take(new).rev().take(room).cloned());
        self.decided = decided;
    }

    /// Note what the largest members take at a time (seconds since 1970).
    pub fn note_members(&mut self, time: f64, members: &[Member]) {
        let mut members = members.to_vec();
        members.sort_by_key(|member| std::cmp::Reverse(member.footprint.or(member.resident)));
        members.truncate(MEMBERS);
        if self.members.len() < THIN as usize {
            self.members.push((time, members));
        }
    }

    /// Note what KSM counts of what merging saves, gross, at a time (seconds since 1970): to know the course of a pass,
    /// and not to be kept.
    pub fn note_counted(&mut self, time: f64, gross: u64) {
        self.remember(Sample { time, run: self.run, saved_gross: Some(gross), ..Sample::default() });
    }

    fn remember(&mut self, sample: Sample) {
        self.recent.push_back(sample);
        if self.recent.len() > RECENT {
            self.recent.pop_front();
        }
    }

    fn note_arrivals(&mut self, status: &Status) {
        let new: BTreeMap<(u32, u64), f64> = status
            .members
            .iter()
            .filter(|member| member.state == MemberState::Arriving)
            .map(|member| (member.pid, member.start_time))
            .map(|who| (who, self.arrivals.get(&who).copied().unwrap_or(status.time)))
            .collect();
        let looked = self.arrivals.iter().filter(|(who, _)| !new.contains_key(who)).map(|(_, seen)| *seen);
        self.waited = looked.chain(self.waited).reduce(f64::min);
        self.arrivals = new;
    }

    fn note_pass(&mut self, status: &Status) {
        if let Some(last) = status.passes.last {
            let number = status.passes.passes;
            let known = self.open.filter(|open| open.number == number);
            let waited = match known {
                Some(known) => known.waited,
                None => self.waited.map(|seen| (last.time - last.seconds - seen).max(0.0)),
            };
            // Newcomers are often looked at in one pass and merged in one of the next.
            let merged = last.reached.is_some() && known.is_none_or(|known| known.reached.is_none());
            if merged || waited > Some(PATIENCE) && known.is_none() {
                self.waited = None;
            }
            let waited = waited.filter(|waited| *waited <= PATIENCE);
            let pass = Pass {
                run: self.run,
                number,
                ended: last.time,
                seconds: last.seconds,
                cpu_seconds: last.cpu_seconds,
                processes: last.processes,
                predicted: last.predicted,
                reached: last.reached,
                waited,
                to_90: None,
                to_99: None,
            };
            match known {
                None => self.follow(),
                Some(known) if (Pass { to_90: None, to_99: None, ..known }) == pass => {
                    return self.follow_after(status.time);
                }
                Some(_) => {}
            }
            self.open = Some(pass);
            self.passes.insert(number, pass);
        }
    }

    /// Follow the last pass once the samples after it are there.
    fn follow_after(&mut self, now: f64) {
        if self.open.is_some_and(|pass| pass.to_90.is_none() && now > pass.ended + converge::AFTER) {
            self.follow();
        }
    }

    /// Find out how long the last pass took to most of what it saved.
    fn follow(&mut self) {
        let Some(pass) = self.open.as_mut().filter(|pass| pass.reached > Some(0) && pass.to_90.is_none()) else {
            return;
        };
        let course = self.recent.make_contiguous();
        if let Some((to_90, to_99)) = converge::times(pass, course) {
            (pass.to_90, pass.to_99) = (Some(to_90), Some(to_99));
            self.passes.insert(pass.number, *pass);
        }
    }

    /// Whether anything is noted that is not written.
    pub fn is_pending(&self) -> bool {
        !self.samples.is_empty() || !self.passes.is_empty() || !self.decisions.is_empty() || !self.members.is_empty()
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
        self.members.clear();
        self.decisions.clear();
        self.passes.clear();
        done.map_err(refused(&self.path, "write"))?;
        self.commits += 1;
        if self.commits.is_multiple_of(THIN) {
            self.thin()?;
        }
        Ok(())
    }

    fn write(&mut self) -> rusqlite::Result<()> {
        let transaction = self.connection.transaction()?;
        insert_samples(&transaction, &self.samples)?;
        insert_passes(&transaction, self.passes.values())?;
        insert_decisions(&transaction, &self.decisions)?;
        for (time, members) in &self.members {
            insert_members(&transaction, milliseconds(*time), members)?;
        }
        transaction.commit()
    }

    /// Thin out what is old by the time of the last sample.
    fn thin(&mut self) -> Result<(), Error> {
        let Some(now) = self.recent.back().map(|sample| milliseconds(sample.time)) else { return Ok(()) };
        thin(&mut self.connection, now, self.limits).map_err(refused(&self.path, "thin out"))
    }

    /// Let the oldest go where the bound is near.
    fn make_room(&mut self) -> Result<(), Error> {
        let check = |connection: &mut Connection| {
            let (all, free) = pages(connection)?;
            if all - free > self.limits.pages() / 10 * 8 { shrink(connection, self.limits) } else { Ok(()) }
        };
        check(&mut self.connection).map_err(refused(&self.path, "shrink"))
    }

    /// Nothing is written while the log is so long that it could outgrow its bound.
    fn bound_log(&mut self) -> Result<(), Error> {
        let length = || std::fs::metadata(log_of(&self.path)).map_or(0, |log| log.len());
        if length() <= self.limits.log() / 2 {
            return Ok(());
        }
        flush(&self.connection).map_err(refused(&self.path, "flush"))?;
        if length() <= self.limits.log() / 2 { Ok(()) } else { Err(Error::Held(self.path.clone())) }
    }
}

/// Move the log into the database as far as readers let it.
fn flush(connection: &Connection) -> rusqlite::Result<()> {
    connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()))
}

fn signed(value: Option<u64>) -> Option<i64> {
    value.map(u64::cast_signed)
}

fn insert_samples(transaction: &Transaction<'_>, samples: &[Sample]) -> rusqlite::Result<()> {
    let mut insert =
        transaction.prepare("INSERT OR REPLACE INTO sample VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)")?;
    for sample in samples {
        insert.execute(params![
            milliseconds(sample.time),
            sample.run,
            signed(sample.saved_gross),
            sample.saved_net,
            signed(sample.total),
            signed(sample.available),
            signed(sample.keep_available),
            sample.ksmd_seconds,
            sample.pagefold_seconds,
            sample.bound_percent,
            sample.members.cast_signed(),
        ])?;
    }
    Ok(())
}

fn insert_passes<'a>(transaction: &Transaction<'_>, passes: impl Iterator<Item = &'a Pass>) -> rusqlite::Result<()> {
    let mut insert =
        transaction.prepare("INSERT OR REPLACE INTO pass VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)")?;
    for pass in passes {
        insert.execute(params![
            pass.run,
            pass.number.cast_signed(),
            milliseconds(pass.ended),
            pass.seconds,
            pass.cpu_seconds,
            pass.processes.cast_signed(),
            pass.predicted.cast_signed(),
            pass.reached,
            pass.waited,
            pass.to_90,
            pass.to_99,
        ])?;
    }
    Ok(())
}

fn insert_decisions(transaction: &Transaction<'_>, decisions: &[Decision]) -> rusqlite::Result<()> {
    let mut insert = transaction.prepare("INSERT INTO decision VALUES (NULL, ?1, ?2, ?3, ?4, ?5, ?6, ?7)")?;
    for decision in decisions {
        insert.execute(params![
            decision.time_ms.cast_signed(),
            decision.what,
            cut(&decision.whom),
            decision.reason,
            cut(&decision.why),
            signed(decision.predicted),
            decision.acted,
        ])?;
    }
    Ok(())
}

fn insert_members(transaction: &Transaction<'_>, time_ms: i64, members: &[Member]) -> rusqlite::Result<()> {
    let mut insert = transaction.prepare("INSERT INTO member VALUES (NULL, ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)")?;
    for member in members {
        let kind = serde_json::to_value(member.kind).unwrap_or_default();
        insert.execute(params![
            time_ms,
            cut(&member.label),
            kind.as_str().unwrap_or("process"),
            cut(&member.domain),
            member.pid,
            signed(member.resident),
            signed(member.footprint),
            signed(member.saved),
        ])?;
    }
    Ok(())
}

/// The beginning of a text.
fn cut(text: &str) -> String {
    text.chars().take(LONGEST).collect()
}

/// Pages of the database, and those of them that are free.
fn pages(connection: &Connection) -> rusqlite::Result<(u64, u64)> {
    let number = |name| connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
    Ok((number("page_count")?.unsigned_abs(), number("freelist_count")?.unsigned_abs()))
}

/// The tables that have times, and what tells a row of them.
const TABLES: [(&str, &str); 4] = [("sample", "time_ms"), ("member", "id"), ("decision", "id"), ("pass", "rowid")];

/// Thin everything out that is old at a time, in milliseconds.
fn thin(connection: &mut Connection, now: i64, limits: Limits) -> rusqlite::Result<()> {
    for (table, tiers) in [("sample", &tiers::SAMPLES[..]), ("member", &tiers::MEMBERS[..])] {
        for Tier { age, step } in tiers {
            match step {
                Some(step) => delete(connection, table, &older_of_slices(table, *step), now - age, limits)?,
                None => delete(connection, table, &all_of(table, "1"), now - age, limits)?,
            }
        }
    }
    delete(connection, "decision", &all_of("decision", "1"), now - tiers::EVENTS, limits)?;
    delete(connection, "pass", &all_of("pass", "1"), now - tiers::EVENTS, limits)?;
    delete(connection, "pass", &all_of("pass", "reached IS NULL"), now - tiers::IDLE, limits)?;
    let unused = "DELETE FROM run WHERE id < (SELECT max(id) FROM run) AND id NOT IN (SELECT run FROM sample)";
    connection.execute(unused, [])?;
    Ok(())
}

/// What tells a row of a table.
fn id(table: &str) -> &'static str {
    TABLES.iter().find(|(name, _)| *name == table).map_or("rowid", |(_, id)| id)
}

/// The rows of a table before a time for which something holds.
fn all_of(table: &str, which: &str) -> String {
    format!("SELECT {} FROM {table} WHERE time_ms < ?1 AND {which}", id(table))
}

/// The rows of a table before a time that are not the latest of their slice of time; of samples also not of their life
/// of the daemon, to lose no CPU time.
fn older_of_slices(table: &str, step: i64) -> String {
    let (id, same) = (id(table), if table == "sample" { ", run" } else { "" });
    format!(
        "SELECT {id} FROM (SELECT {id}, time_ms, max(time_ms) OVER (PARTITION BY time_ms / {step}{same}) AS latest \
         FROM {table} WHERE time_ms < ?1) WHERE time_ms < latest"
    )
}

/// Delete rows of a table that lie before a time, the oldest first and some at a time, so that the log stays short.
fn delete(connection: &mut Connection, table: &str, which: &str, before: i64, limits: Limits) -> rusqlite::Result<()> {
    let rows = limits.log() / 8 / ROW;
    let text = format!("DELETE FROM {table} WHERE {} IN ({which} ORDER BY time_ms LIMIT {rows})", id(table));
    while connection.execute(&text, [before])? as u64 == rows {
        flush(connection)?;
    }
    Ok(())
}

/// Let the oldest go until a good part of the database is free: what is older than a sixteenth of the rows of the
/// longest table, again and again. By rows and not by time, since a clock that was wrong for a while may have left rows
/// far away.
fn shrink(connection: &mut Connection, limits: Limits) -> rusqlite::Result<()> {
    // A sixteenth and a sixteenth of the rest, until a thousandth is left.
    for _ in 0..110 {
        let (all, free) = pages(connection)?;
        if all - free <= limits.pages() / 10 * 7 {
            break;
        }
        let Some(cut) = oldest_part(connection)? else { break };
        for (table, _) in TABLES {
            delete(connection, table, &all_of(table, "1"), cut, limits)?;
        }
        flush(connection)?;
    }
    Ok(())
}

/// The time before which a sixteenth of the rows of the longest table lie; `None` where nothing is in any.
fn oldest_part(connection: &Connection) -> rusqlite::Result<Option<i64>> {
    let count = |table| connection.query_row(&format!("SELECT count(*) FROM {table}"), [], |row| row.get::<_, i64>(0));
    let mut longest = (0, "sample");
    for (table, _) in TABLES {
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
