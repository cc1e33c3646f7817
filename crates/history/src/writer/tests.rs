use super::*;
use crate::HistoryReader;
use crate::tiers::MILLIS_PER_DAY;
use pagefold_daemon::wire::WorkloadKind;
use tempfile::TempDir;

/// The status of the shared test fixture, at a time.
fn status(time: f64) -> StatusReport {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/status.json");
    let mut status: StatusReport = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    status.time = time;
    status.decisions.clear();
    status.passes.last = None;
    status
}

fn new_writer(limits: HistoryLimits, time: f64) -> (TempDir, PathBuf, HistoryWriter) {
    // In memory, so that the disk's speed does not matter.
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = folder.path().join("history.db");
    let writer = HistoryWriter::open(&path, limits, "node17", "0.1.0", time).unwrap();
    (folder, path, writer)
}

fn total_file_bytes(path: &Path) -> u64 {
    [path.to_owned(), log_path(path)].iter().map(|file| std::fs::metadata(file).map_or(0, |file| file.len())).sum()
}

const NOW_SECONDS: f64 = 1_795_000_000.0;

#[test]
fn committed_rows_are_read_back() {
    let (_folder, path, mut writer) = new_writer(HistoryLimits::default(), NOW_SECONDS);
    let mut status = status(NOW_SECONDS);
    let decision = |time_ms| DecisionReport {
        time_ms,
        kind: "merge".to_owned(),
        subject: "web-7".to_owned(),
        reason: "arrived".to_owned(),
        explanation: "it pays".to_owned(),
        predicted: Some(7),
        carried_out: true,
    };
    let decide = |status: &mut StatusReport, time_ms| {
        status.decisions.insert(0, decision(time_ms));
        *status.decisions_by_reason.entry("arrived".to_owned()).or_default() += 1;
    };
    (status.decisions, status.decisions_by_reason) = Default::default();
    decide(&mut status, 1_795_000_000_000);
    writer.note_status(&status);
    // The latest come first, and recorded decisions are not recorded again; clocks may be set back.
    status.time += 10.0;
    decide(&mut status, 1_795_000_009_000);
    decide(&mut status, 1_795_000_009_000);
    writer.note_status(&status);
    decide(&mut status, 1_794_999_000_000);
    writer.note_status(&status);
    writer.note_footprints(status.time, &status.tracked_processes);
    assert!(writer.is_pending());
    writer.commit().unwrap();
    assert!(!writer.is_pending());
    let mut reader = HistoryReader::open(&path).unwrap();
    assert_eq!(reader.last_sample_time().unwrap(), Some(NOW_SECONDS + 10.0));
    let span = reader.load_span(0.0, f64::INFINITY).unwrap();
    assert_eq!((span.host.as_str(), span.samples.len()), ("node17", 2));
    assert_eq!(span.samples[1], HistorySample::from_status(&status, 1));
    let times: Vec<u64> = span.decisions.iter().map(|decision| decision.time_ms).collect();
    assert_eq!(times, [1_794_999_000_000, 1_795_000_000_000, 1_795_000_009_000, 1_795_000_009_000]);
    assert_eq!(span.footprints.len(), status.tracked_processes.len().min(MAX_FOOTPRINTS_PER_NOTE));
    assert!(span.footprints.iter().any(|footprint| footprint.kind == WorkloadKind::Vm));
    assert_eq!(reader.load_span(NOW_SECONDS + 1.0, NOW_SECONDS + 20.0).unwrap().samples.len(), 1);
}

#[test]
fn pass_is_timed_from_arrival_to_end() {
    let (_folder, path, mut writer) = new_writer(HistoryLimits::default(), NOW_SECONDS);
    let mut moment = status(NOW_SECONDS);
    let newcomer =
        TrackedProcessReport { state: TrackingState::Arriving, start_time: 1, ..moment.tracked_processes[0].clone() };
    for second in 0..30_u32 {
        let at = f64::from(second);
        moment.time = NOW_SECONDS + at;
        // Seen at 2, scanned from 5 on; the census ends at 7, the merge at 15.
        moment.tracked_processes = if (2..5).contains(&second) { vec![newcomer.clone()] } else { Vec::new() };
        let merged = (at - 8.0).clamp(0.0, 5.0) / 5.0;
        moment.saved.gross = Some(((100.0 * merged) as u64) << 20);
        moment.passes.passes = u64::from(second >= 7);
        let last = |ended: f64, reached| pagefold_daemon::wire::PassReport {
            time: NOW_SECONDS + ended,
            seconds: ended - 5.0,
            cpu_seconds: 1.0,
            processes: 1,
            predicted: 100 << 20,
            measured: reached,
        };
        moment.passes.last = match second {
            0..7 => None,
            7..15 => Some(last(7.0, None)),
            _ => Some(last(15.0, Some(99 << 20))),
        };
        writer.note_status(&moment);
    }
    writer.commit().unwrap();
    let passes = HistoryReader::open(&path).unwrap().load_span(0.0, f64::INFINITY).unwrap().passes;
    assert_eq!(passes.len(), 1, "one row for the pass: {passes:#?}");
    let pass = passes[0];
    assert_eq!((pass.number, pass.measured, pass.arrival_wait_seconds), (1, Some(99 << 20), Some(3.0)));
    let (to_90, to_99) = (pass.seconds_to_90.unwrap(), pass.seconds_to_99.unwrap());
    // 90 % of the savings are reached 4.5 s after the eighth second, which is the third of the pass.
    assert!((to_90 - 7.5).abs() < 0.01 && (to_99 - 7.95).abs() < 0.01, "{to_90} {to_99}");
}

#[test]
fn short_pass_is_timed_between_samples() {
    let (_folder, path, mut writer) = new_writer(HistoryLimits::default(), NOW_SECONDS);
    let mut moment = status(NOW_SECONDS);
    moment.saved.gross = Some(0);
    writer.note_status(&moment);
    // A pass of one second that merges in its second half.
    for quarter in 1..8_u32 {
        let at = f64::from(quarter) / 4.0;
        writer.note_saved_by_ksm(NOW_SECONDS + at, (((at - 0.5).clamp(0.0, 0.5) * 200.0) as u64) << 20);
    }
    let (seconds, cpu_seconds, processes, predicted) = (1.0, 0.5, 1, 100 << 20);
    let reached = Some(100 << 20);
    moment.time = NOW_SECONDS + 5.0;
    moment.saved.gross = Some(100 << 20);
    moment.passes.passes = 1;
    moment.passes.last = Some(pagefold_daemon::wire::PassReport {
        time: NOW_SECONDS + 1.0,
        seconds,
        cpu_seconds,
        processes,
        predicted,
        measured: reached,
    });
    writer.note_status(&moment);
    moment.time += 10.0;
    writer.note_status(&moment);
    writer.commit().unwrap();
    let span = HistoryReader::open(&path).unwrap().load_span(0.0, f64::INFINITY).unwrap();
    assert_eq!(span.samples.len(), 3, "samples for measuring a pass are not stored");
    assert!((span.passes[0].seconds_to_90.unwrap() - 0.95).abs() < 0.01, "{:?}", span.passes[0]);
}

#[test]
fn old_samples_are_thinned() {
    let (_folder, path, mut writer) = new_writer(HistoryLimits::default(), NOW_SECONDS);
    let end = seconds_to_millis(NOW_SECONDS);
    // At equal intervals within each tier, and before all of them.
    let ages = |from: i64, to: i64, step: i64| (from..to).step_by(usize::try_from(step).unwrap());
    let spans = [
        (0, 2 * MILLIS_PER_DAY, 20_000),
        (30 * MILLIS_PER_DAY, 32 * MILLIS_PER_DAY, 60_000),
        (365 * MILLIS_PER_DAY, 368 * MILLIS_PER_DAY, 3_600_000),
    ];
    let all: Vec<i64> = spans.into_iter().flat_map(|(from, to, step)| ages(from, to, step)).collect();
    let sample = |age: i64| {
        let time = (end - age) as f64 / 1e3;
        HistorySample { time, run_id: 1, ksmd_seconds: Some(time), ..HistorySample::default() }
    };
    writer.samples = all.into_iter().map(sample).collect();
    writer.commit().unwrap();
    thin_tables(&mut writer.connection, end, HistoryLimits::default()).unwrap();
    let thinned = HistoryReader::open(&path).unwrap().load_span(0.0, f64::INFINITY).unwrap().samples;
    let within = |from: i64, to: i64| {
        thinned.iter().filter(|sample| (from..to).contains(&(end - seconds_to_millis(sample.time)))).count() as i64
    };
    let near = |count: i64, expect: i64| assert!((count - expect).abs() <= 2, "{count} instead of {expect}");
    near(within(0, MILLIS_PER_DAY), MILLIS_PER_DAY / 20_000);
    near(within(MILLIS_PER_DAY, 2 * MILLIS_PER_DAY), MILLIS_PER_DAY / 60_000);
    near(within(30 * MILLIS_PER_DAY, 31 * MILLIS_PER_DAY), MILLIS_PER_DAY / 60_000);
    near(within(31 * MILLIS_PER_DAY, 32 * MILLIS_PER_DAY), 24);
    near(within(365 * MILLIS_PER_DAY, 366 * MILLIS_PER_DAY), 24);
    assert_eq!(within(366 * MILLIS_PER_DAY + 1, i64::MAX), 0);
    // Thinning again changes nothing.
    thin_tables(&mut writer.connection, end, HistoryLimits::default()).unwrap();
    assert_eq!(HistoryReader::open(&path).unwrap().load_span(0.0, f64::INFINITY).unwrap().samples, thinned);
}

#[test]
fn files_stay_within_their_bound() {
    let limits = HistoryLimits { max_bytes: HistoryLimits::MIN_BYTES };
    let (_folder, path, mut writer) = new_writer(limits, NOW_SECONDS);
    let mut status = status(NOW_SECONDS);
    let long = TrackedProcessReport { label: "x".repeat(5000), ..status.tracked_processes[0].clone() };
    let mut max_bytes = 0;
    for minute in 0..250_u32 {
        for second in 0..6_u32 {
            status.time = NOW_SECONDS + f64::from(minute * 60 + second * 10);
            let explanation = "long ".repeat(1000);
            let time_ms = seconds_to_millis(status.time).unsigned_abs();
            status.decisions = vec![DecisionReport { time_ms, explanation, ..decision() }];
            *status.decisions_by_reason.entry("word".to_owned()).or_default() += 1;
            writer.note_status(&status);
        }
        writer.note_footprints(status.time, &vec![long.clone(); 100]);
        writer.commit().unwrap();
        max_bytes = max_bytes.max(total_file_bytes(&path));
    }
    assert!(max_bytes <= limits.max_bytes, "{max_bytes} bytes");
    assert!(max_bytes >= limits.max_bytes / 3, "{max_bytes} bytes: the limit was not reached");
    let span = HistoryReader::open(&path).unwrap().load_span(0.0, f64::INFINITY).unwrap();
    assert_eq!(span.samples.last().map(|sample| sample.time), Some(status.time), "the latest sample stays");
    assert!(span.samples.len() < 1500 && !span.footprints.is_empty());
}

fn decision() -> DecisionReport {
    let word = || "word".to_owned();
    DecisionReport {
        time_ms: 0,
        kind: word(),
        subject: word(),
        reason: word(),
        explanation: word(),
        predicted: None,
        carried_out: false,
    }
}

#[test]
fn reader_of_the_log_only_delays_writes() {
    let limits = HistoryLimits { max_bytes: HistoryLimits::MIN_BYTES };
    let (_folder, path, mut writer) = new_writer(limits, NOW_SECONDS);
    let mut status = status(NOW_SECONDS);
    let mut write = |writer: &mut HistoryWriter, minutes: u32| -> Result<(), Error> {
        for _ in 0..minutes {
            status.time += 60.0;
            writer.note_status(&status);
            writer.note_footprints(status.time, &vec![status.tracked_processes[0].clone(); 32]);
            writer.commit()?;
        }
        Ok(())
    };
    write(&mut writer, 2).unwrap();
    writer.connection.busy_timeout(std::time::Duration::ZERO).unwrap();
    let reader = Connection::open(&path).unwrap();
    reader.execute_batch("BEGIN; SELECT count(*) FROM sample;").unwrap();
    let result = write(&mut writer, 1000);
    assert!(matches!(result, Err(Error::LogBlockedByReader(_)) | Err(Error::Database(..))), "{result:?}");
    assert!(total_file_bytes(&path) <= limits.max_bytes, "{} bytes", total_file_bytes(&path));
    drop(reader);
    write(&mut writer, 2).unwrap();
}

#[test]
fn oversized_history_is_shrunk() {
    let (_folder, path, mut writer) = new_writer(HistoryLimits::default(), NOW_SECONDS);
    let status = status(NOW_SECONDS);
    for minute in 0..600_u32 {
        writer.note_footprints(NOW_SECONDS + f64::from(minute), &vec![status.tracked_processes[0].clone(); 32]);
        if minute % 50 == 49 {
            writer.note_status(&StatusReport { time: NOW_SECONDS + f64::from(minute), ..status.clone() });
            writer.commit().unwrap();
        }
    }
    drop(writer);
    let limits = HistoryLimits { max_bytes: HistoryLimits::MIN_BYTES };
    assert!(total_file_bytes(&path) > limits.max_bytes);
    let mut writer = HistoryWriter::open(&path, limits, "node17", "0.1.0", NOW_SECONDS).unwrap();
    writer.note_status(&status);
    writer.commit().unwrap();
    drop(writer);
    assert!(total_file_bytes(&path) <= limits.max_bytes, "{} bytes", total_file_bytes(&path));
}

#[test]
fn foreign_file_is_left_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let open = || HistoryWriter::open(&path, HistoryLimits::default(), "node17", "0.1.0", NOW_SECONDS).err();
    for foreign in [&b"notes"[..], &[7; 10_000]] {
        std::fs::write(&path, foreign).unwrap();
        assert!(matches!(open(), Some(Error::NotAHistory(_))));
        assert!(matches!(HistoryReader::open(&path).err(), Some(Error::NotAHistory(_))));
        assert_eq!(std::fs::read(&path).unwrap(), foreign);
        std::fs::remove_file(&path).unwrap();
    }
    let other = Connection::open(&path).unwrap();
    other.execute_batch("CREATE TABLE theirs (a)").unwrap();
    drop(other);
    let before = std::fs::read(&path).unwrap();
    assert!(matches!(open(), Some(Error::NotAHistory(_))));
    assert_eq!(std::fs::read(&path).unwrap(), before);
    std::fs::remove_file(&path).unwrap();
    assert!(matches!(HistoryReader::open(&path).err(), Some(Error::Open(..))), "opening for reading creates no file");
    assert!(!path.exists());

    assert!(open().is_none());
    let connection = Connection::open(&path).unwrap();
    connection.pragma_update(None, "user_version", 3).unwrap();
    drop(connection);
    assert!(matches!(open(), Some(Error::UnknownVersion(_, 3))));
}

#[test]
fn damaged_file_is_reported() {
    let (_folder, path, mut writer) = new_writer(HistoryLimits::default(), NOW_SECONDS);
    for minute in 0..500_u32 {
        writer.note_status(&status(NOW_SECONDS + f64::from(minute)));
    }
    writer.note_footprints(NOW_SECONDS, &status(NOW_SECONDS).tracked_processes);
    writer.commit().unwrap();
    drop(writer);
    let mut bytes = std::fs::read(&path).unwrap();
    for page in bytes.chunks_mut(4096).skip(2) {
        page[..1000].fill(0x5a);
    }
    std::fs::write(&path, &bytes).unwrap();
    let error = HistoryWriter::open(&path, HistoryLimits::default(), "node17", "0.1.0", NOW_SECONDS).err();
    assert!(matches!(error, Some(Error::Damaged(..))), "{error:?}");
    assert_eq!(std::fs::read(&path).unwrap(), bytes);
}

#[test]
fn file_is_readable_by_owner_only() {
    use std::os::unix::fs::PermissionsExt;
    let (_folder, path, mut writer) = new_writer(HistoryLimits::default(), NOW_SECONDS);
    writer.note_status(&status(NOW_SECONDS));
    writer.commit().unwrap();
    for file in [path.clone(), log_path(&path)] {
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600, "{}", file.display());
    }
}
