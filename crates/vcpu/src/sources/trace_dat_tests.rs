//! Files that trace-cmd 3.1.6 recorded on Linux 6.18, with three busy processes named as vCPUs. Beside each is the output
//! of `trace-cmd report -t`, from which the expected figures are computed.

use super::*;
use crate::schedule::CpuSchedule;
use pagefold_base::IdSet;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Cursor;

const VERSIONS: [u32; 2] = [6, 7];

fn fixture(version: u32, suffix: &str) -> Vec<u8> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/vcpu");
    fs::read(format!("{folder}/three-vcpus.version-{version}.{suffix}")).unwrap()
}

fn read(bytes: Vec<u8>) -> Result<RecordedSchedule, TraceDatError> {
    read_trace_dat(Cursor::new(bytes), Grouping::Machines)
}

/// CPU, time, event and its description of each line of a report.
fn report_lines(text: &str) -> Vec<(u32, u64, &str, &str)> {
    let lines = text.lines().filter_map(|line| {
        let (_, line) = line.split_once(" [")?;
        let (cpu, line) = line.split_once("] ")?;
        let (time, line) = line.trim_start().split_once(": ")?;
        let (seconds, nanoseconds) = time.split_once('.')?;
        let time = seconds.parse::<u64>().ok()? * 1_000_000_000 + nanoseconds.parse::<u64>().ok()?;
        let (event, description) = line.split_once(':')?;
        Some((cpu.parse().ok()?, time, event, description.trim()))
    });
    lines.collect()
}

/// The number of a thread in a description such as `CPU 0/KVM:7963 [120] R`.
fn tid(thread: &str) -> u32 {
    let (_, rest) = thread.rsplit_once(':').unwrap();
    rest.split(' ').next().unwrap().parse().unwrap()
}

/// The nanoseconds for which each thread ran according to a report: a CPU runs the thread to which it switched last. The
/// kernel did not record one switch in each file, that away from thread 68.
fn reported_run_times(text: &str) -> BTreeMap<u32, u64> {
    let lines = report_lines(text);
    let (start, end) = (lines.iter().map(|line| line.1).min().unwrap(), lines.iter().map(|line| line.1).max().unwrap());
    let mut run_times = BTreeMap::new();
    let cpus: BTreeSet<u32> = lines.iter().map(|line| line.0).collect();
    for cpu in cpus {
        let mut since = start;
        let mut current = None;
        for (_, time, _, description) in lines.iter().filter(|line| line.0 == cpu && line.2 == "sched_switch") {
            let (previous, next) = description.split_once(" ==> ").unwrap();
            *run_times.entry(current.unwrap_or(tid(previous))).or_default() += time - since;
            (since, current) = (*time, Some(tid(next)));
        }
        *run_times.entry(current.unwrap()).or_default() += end - since;
    }
    run_times
}

fn run_times(schedule: &CpuSchedule) -> BTreeMap<u32, u64> {
    let mut run_times = BTreeMap::new();
    for run in &schedule.runs {
        *run_times.entry(schedule.tasks[run.task].tid).or_default() += run.to - run.from;
    }
    run_times
}

#[test]
fn events_and_run_times_are_those_of_trace_cmd() {
    for version in VERSIONS {
        let text = String::from_utf8(fixture(version, "txt")).unwrap();
        let recorded = read(fixture(version, "trace.dat")).unwrap();
        assert_eq!(recorded.events, report_lines(&text).len() as u64, "{version}");
        assert_eq!((recorded.online_cpus, recorded.schedule.lost_events), (Some(2), 0), "{version}");
        assert!(recorded.schedule.has_wakeups);
        let mut expected = reported_run_times(&text);
        // Idle tasks run in no interval of the schedule.
        expected.remove(&0);
        expected.retain(|_, run_time| *run_time > 0);
        assert_eq!(run_times(&recorded.schedule), expected, "{version}");
    }
}

#[test]
fn vcpus_without_known_process_are_measured_by_their_numbers() {
    let recorded = read(fixture(7, "trace.dat")).unwrap();
    assert!(recorded.schedule.vms.is_empty());
    assert_eq!(recorded.unassigned_vcpus.len(), 3);
    let tids: IdSet = recorded.unassigned_vcpus.iter().copied().collect();
    let machines = [("web".to_owned(), tids)];
    let grouped = read_trace_dat(Cursor::new(fixture(7, "trace.dat")), Grouping::Threads(&machines)).unwrap();
    let names: Vec<_> =
        grouped.schedule.vcpus(0).into_iter().map(|task| grouped.schedule.tasks[task].name.as_str()).collect();
    assert_eq!(names, ["CPU 0/KVM", "CPU 1/KVM", "CPU 2/KVM"]);
}

#[test]
fn compressed_and_other_files_are_refused_with_a_remedy() {
    let mut compressed = fixture(7, "trace.dat");
    // The flags of the first section, that of the layout of pages, follow its number.
    let section = 0x20;
    assert_eq!(compressed[section..section + 4], [16, 0, 0, 0]);
    compressed[section + 2] = 1;
    let error = read(compressed).unwrap_err().to_string();
    assert!(error.contains("trace-cmd convert --compression none"), "{error}");
    let mut newer = fixture(7, "trace.dat");
    newer[10] = b'8';
    assert!(matches!(read(newer), Err(TraceDatError::Version(version)) if version == "8"));
    assert!(matches!(
        read(b"PERFILE2".to_vec()),
        Err(TraceDatError::Event(EventFormatError::Signature | EventFormatError::Truncated(_)))
    ));
}

#[test]
fn clock_that_does_not_count_nanoseconds_is_refused() {
    let mut bytes = fixture(6, "trace.dat");
    let at = bytes.windows(8).position(|part| part == b"[local] ").unwrap();
    let clocks = b"local [x86-tsc] ";
    bytes[at..at + clocks.len()].copy_from_slice(clocks);
    assert!(matches!(read(bytes), Err(TraceDatError::Clock(clock)) if clock == "x86-tsc"));
}

#[test]
fn truncated_files_are_refused() {
    for version in VERSIONS {
        let bytes = fixture(version, "trace.dat");
        for length in (0..bytes.len()).step_by(97) {
            // The last option of version 7 is not needed.
            let is_cut = length + 100 < bytes.len();
            assert!(read(bytes[..length].to_vec()).is_err() || !is_cut, "{version}: {length}");
        }
    }
}

/// A page at 1000 ns with records of four bytes, in the layout of a kernel of 64 bits.
fn page_of(words: &[u32], commit_flags: u64) -> Vec<u8> {
    let mut page = [1000u64.to_le_bytes(), ((4 * words.len() as u64) | commit_flags).to_le_bytes()].concat();
    page.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    page
}

fn layout() -> PageLayout {
    let text = b"\tfield: u64 timestamp;\toffset:0;\tsize:8;\tsigned:0;\n\tfield: local_t commit;\toffset:8;\tsize:8;\tsigned:1;\n\
        \tfield: int overwrite;\toffset:8;\tsize:1;\tsigned:1;\n\tfield: char data;\toffset:16;\tsize:4080;\tsigned:0;\n";
    PageLayout::parse(text, 8, ByteOrder::Little).unwrap()
}

/// Times and first words of the records of a page, and lost events.
fn records_of(page: &[u8]) -> Option<(Vec<(u64, u32)>, u64)> {
    let mut records = Vec::new();
    let lost = layout().read_page(page, |time, record| {
        records.push((time, u32::from_le_bytes(record[..4].try_into().unwrap())));
        Ok::<_, ()>(())
    });
    lost.map(|lost| (records, lost.unwrap()))
}

#[test]
fn records_of_all_kinds_are_read() {
    let header = |kind: u32, delta: u32| kind | delta << 5;
    let words = [
        header(1, 5), // one word
        71,
        header(30, 2), // 2 and 1 << 27 ns later
        1,
        header(0, 3), // two words after the length of twelve bytes
        12,
        72,
        0,
        header(29, 4), // a discarded record of two words
        8,
        0,
        header(31, 7), // the time 7
        0,
        header(1, 1),
        73,
        header(29, 0), // the end
        9,
    ];
    let late = 1000 + 5 + (1 << 27) + 2 + 3;
    assert_eq!(records_of(&page_of(&words, 0)), Some((vec![(1005, 71), (late, 72), (8, 73)], 0)));
}

#[test]
fn lost_events_of_a_page_are_counted() {
    assert_eq!(records_of(&page_of(&[1 | 5 << 5, 71], MISSED_EVENTS)), Some((vec![(1005, 71)], 1)));
    let mut page = page_of(&[1 | 5 << 5, 71], MISSED_EVENTS | MISSED_STORED);
    page.extend(40u64.to_le_bytes());
    assert_eq!(records_of(&page), Some((vec![(1005, 71)], 40)));
    // A record that is longer than the page.
    assert_eq!(records_of(&page_of(&[28], 0)), None);
}

proptest! {
    #[test]
    fn damaged_files_do_not_panic(
        version in prop::sample::select(&VERSIONS[..]),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut bytes = fixture(version, "trace.dat");
        for (index, byte) in changes {
            let index = index.index(bytes.len());
            bytes[index] = byte;
        }
        let _ = read(bytes);
    }
}
