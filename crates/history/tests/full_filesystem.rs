//! A full disk under the history. A failed write is an error that names the file, no committed row is lost, and writing
//! continues once there is space again. The test needs root, to mount a small file system.

use pagefold_daemon::wire::StatusReport;
use pagefold_history::{HistoryLimits, HistoryReader, HistoryWriter};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The time of the first sample, in seconds since 1970; others follow at seconds.
const START_SECONDS: f64 = 1_795_000_000.0;

/// A file system of a few megabytes, mounted until dropped.
struct SmallFilesystem(PathBuf);

impl SmallFilesystem {
    fn mount(path: &Path) -> Option<Self> {
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=3m", "pagefold-test"]).arg(path).status();
        mounted.is_ok_and(|status| status.success()).then(|| Self(path.to_owned()))
    }

    /// Fill it to the last byte.
    fn fill(&self) {
        let mut file = File::options().create(true).append(true).open(self.0.join("filler")).expect("a file");
        let mut length = 1 << 20;
        while length > 0 {
            match file.write(&vec![0; length]) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::StorageFull => length /= 2,
                Err(error) => panic!("the disk cannot be filled: {error}"),
            }
        }
    }

    fn free_space(&self) {
        std::fs::remove_file(self.0.join("filler")).expect("the filler is removed");
    }
}

impl Drop for SmallFilesystem {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["--lazy"]).arg(&self.0).status();
    }
}

fn status() -> StatusReport {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/status.json");
    serde_json::from_slice(&std::fs::read(path).expect("the fixture")).expect("a status")
}

/// Record a second and commit it.
fn commit_second(
    writer: &mut HistoryWriter,
    status: &mut StatusReport,
    second: u32,
) -> Result<(), pagefold_history::Error> {
    status.time = START_SECONDS + f64::from(second);
    writer.note_status(status);
    writer.note_footprints(status.time, &status.tracked_processes);
    writer.commit()
}

fn committed_seconds(path: &Path) -> Vec<u32> {
    let samples = HistoryReader::open(path).and_then(|reader| reader.samples(0.0, f64::INFINITY)).expect("it is read");
    samples.iter().map(|sample| (sample.time - START_SECONDS) as u32).collect()
}

#[test]
fn full_disk_loses_no_committed_rows() {
    let folder = tempfile::tempdir().unwrap();
    let Some(disk) = SmallFilesystem::mount(folder.path()) else {
        return println!("skipped: no file system can be mounted here");
    };
    let path = disk.0.join("history.db");
    let (mut status, mut refused) = (status(), 0);
    let mut writer =
        HistoryWriter::open(&path, HistoryLimits::default(), "host", "0", START_SECONDS).expect("it opens");
    (0..20).for_each(|second| commit_second(&mut writer, &mut status, second).expect("there is space"));
    disk.fill();
    for second in 100..300 {
        if let Err(error) = commit_second(&mut writer, &mut status, second) {
            refused += 1;
            assert!(error.to_string().contains("history.db"), "{error}");
        }
    }
    assert!(refused > 0, "the disk was not full");
    // A daemon that starts on a full disk gets the error, or keeps its history.
    if let Err(error) = HistoryWriter::open(&path, HistoryLimits::default(), "host", "0", START_SECONDS) {
        assert!(error.to_string().contains("history.db"), "{error}");
    }
    assert!(
        committed_seconds(&path).iter().filter(|second| **second < 20).count() >= 10,
        "{:?}",
        committed_seconds(&path)
    );
    disk.free_space();
    (400..420).for_each(|second| commit_second(&mut writer, &mut status, second).expect("there is space again"));
    drop(writer);
    let kept = committed_seconds(&path);
    assert!((400..420).all(|second| kept.contains(&second)), "{kept:?}");
    let mut writer =
        HistoryWriter::open(&path, HistoryLimits::default(), "host", "0", START_SECONDS).expect("it is intact");
    commit_second(&mut writer, &mut status, 500).expect("writing continues");
}
