//! A trace: recordings of a host at many points in time, for example over a day.
//!
//! ```text
//! recording.toml   says that this is a trace
//! 000000/          the first recording, like any other, with `at_seconds` since the first, Unix `time`, and the
//!                  `utc_offset_seconds` of the host's time zone
//! 000001/          the next one; files that have not changed are hard links to those of the previous recording
//! ```
//!
//! So each command can read each recording separately, and a recording only takes space for changed files. An
//! unfinished recording has no `recording.toml`, and is skipped.

use super::{Recording, RecordingError, read_text, toml_value};
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The schema in `recording.toml` of a trace.
pub const TRACE_SCHEMA: &str = "pagefold.recording.moments/1";

/// A host at one point in time.
#[derive(Debug)]
pub struct TimedRecording {
    /// The host.
    pub host: Recording,
    /// Time since the first recording.
    pub since_start: Duration,
    /// Unix time.
    pub unix_time: Duration,
    /// How many seconds the host's local time was ahead of UTC, if recorded.
    pub utc_offset_seconds: Option<i64>,
}

impl TimedRecording {
    /// Open it. Pages, frames and contents are read at the first request.
    pub fn open(folder: &Path) -> Result<Self, RecordingError> {
        let path = folder.join("recording.toml");
        let header = read_text(&path)?;
        let seconds = |name: &str| {
            let seconds =
                toml_value(&header, name).and_then(|text| Duration::try_from_secs_f64(text.parse().ok()?).ok());
            seconds.ok_or_else(|| RecordingError::Malformed { path: path.clone(), what: format!("{name} is no time") })
        };
        let utc_offset_seconds = toml_value(&header, "utc_offset_seconds").map(|text| {
            let malformed = |what: &str| RecordingError::Malformed { path: path.clone(), what: what.to_owned() };
            text.parse().map_err(|_| malformed("utc_offset_seconds is no number"))
        });
        let (since_start, unix_time, utc_offset_seconds) =
            (seconds("at_seconds")?, seconds("time")?, utc_offset_seconds.transpose()?);
        Ok(Self { host: Recording::open_lazily(folder)?, since_start, unix_time, utc_offset_seconds })
    }
}

/// The folders of all recordings in order, if the recording is a trace.
pub fn recording_folders(root: &Path) -> Result<Option<Vec<PathBuf>>, RecordingError> {
    let header = read_text(&root.join("recording.toml"))?;
    if toml_value(&header, "schema") != Some(&format!("\"{TRACE_SCHEMA}\"")) {
        return Ok(None);
    }
    let io_error = |source| RecordingError::Io { path: root.to_owned(), source };
    let mut folders = Vec::new();
    for entry in fs::read_dir(root).map_err(io_error)? {
        let path = entry.map_err(io_error)?.path();
        if path.join("recording.toml").is_file() {
            folders.push(path);
        }
    }
    folders.sort();
    if folders.is_empty() {
        return Err(RecordingError::Malformed { path: root.to_owned(), what: "the trace has no recording".to_owned() });
    }
    Ok(Some(folders))
}

/// Writes a trace.
#[derive(Debug)]
pub struct TraceWriter {
    root: PathBuf,
    last_folder: Option<PathBuf>,
    recording_count: usize,
    written_bytes: u64,
}

impl TraceWriter {
    /// Start in a new or empty folder, which only its owner may enter.
    pub fn create(root: &Path) -> io::Result<Self> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(root)?;
        if fs::read_dir(root)?.next().is_some() {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "the folder is not empty"));
        }
        fs::write(root.join("recording.toml"), format!("schema = \"{TRACE_SCHEMA}\"\n"))?;
        Ok(Self { root: root.to_owned(), last_folder: None, recording_count: 0, written_bytes: 0 })
    }

    /// The folder of the next recording.
    pub fn next_folder(&self) -> PathBuf {
        self.root.join(format!("{:06}", self.recording_count))
    }

    /// Finish the next recording: files that have not changed since the previous one become links.
    pub fn commit_next(&mut self) -> io::Result<()> {
        let folder = self.next_folder();
        self.written_bytes += link_unchanged(self.last_folder.as_deref(), &folder)?;
        self.last_folder = Some(folder);
        self.recording_count += 1;
        Ok(())
    }

    /// Discard the next recording, because it could not be completed.
    pub fn discard_next(&self) {
        // If the folder cannot be removed, readers skip it, because it has no recording.toml.
        let _ = fs::remove_dir_all(self.next_folder());
    }

    /// The number of recordings.
    pub fn recording_count(&self) -> usize {
        self.recording_count
    }

    /// Bytes in files that are no links to files of an earlier recording.
    pub fn written_bytes(&self) -> u64 {
        self.written_bytes
    }
}

/// Replace files of a folder that equal those of another by hard links. Returns the number of bytes in all other files.
fn link_unchanged(previous: Option<&Path>, folder: &Path) -> io::Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let (path, previous_path) = (entry.path(), previous.map(|folder| folder.join(entry.file_name())));
        if entry.file_type()?.is_dir() {
            bytes += link_unchanged(previous_path.as_deref().filter(|previous| previous.is_dir()), &path)?;
            continue;
        }
        let length = entry.metadata()?.len();
        let is_unchanged = |previous: &&Path| {
            fs::metadata(previous).is_ok_and(|metadata| metadata.len() == length)
                && fs::read(previous).is_ok_and(|bytes| fs::read(&path).is_ok_and(|new| new == bytes))
        };
        // File systems limit the number of links to a file. Beyond that the file is stored again.
        let is_linked = previous_path
            .as_deref()
            .filter(is_unchanged)
            .is_some_and(|previous| replace_with_hard_link(previous, &path).is_ok());
        bytes += if is_linked { 0 } else { length };
    }
    Ok(bytes)
}

fn replace_with_hard_link(target: &Path, path: &Path) -> io::Result<()> {
    let link = path.with_extension("link");
    fs::hard_link(target, &link)?;
    fs::rename(link, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    fn write_recording(trace: &mut TraceWriter, second: u32, files: &[(&str, &str)]) {
        let folder = trace.next_folder();
        fs::create_dir_all(folder.join("files/proc")).unwrap();
        for (name, text) in files {
            fs::write(folder.join("files/proc").join(name), text).unwrap();
        }
        let about = format!(
            "schema = \"{}\"\npage_size = 4096\nat_seconds = {second}.5\ntime = 1700000000.25\n\
             utc_offset_seconds = -3600\n",
            crate::RECORDING_SCHEMA
        );
        fs::write(folder.join("recording.toml"), about).unwrap();
        trace.commit_next().unwrap();
    }

    #[test]
    fn unchanged_files_are_hard_linked() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("day");
        let mut moments = TraceWriter::create(&root).unwrap();
        write_recording(&mut moments, 0, &[("same", "held"), ("other", "1")]);
        let first = moments.written_bytes();
        write_recording(&mut moments, 1, &[("same", "held"), ("other", "2")]);
        let (about, changed) = (fs::metadata(root.join("000001/recording.toml")).unwrap().len(), 1);
        assert_eq!(moments.written_bytes() - first, about + changed);
        let inode = |path: &str| fs::metadata(root.join(path)).unwrap().ino();
        assert_eq!(inode("000000/files/proc/same"), inode("000001/files/proc/same"));
        assert_ne!(inode("000000/files/proc/other"), inode("000001/files/proc/other"));

        fs::create_dir(moments.next_folder()).unwrap();
        let folders = recording_folders(&root).unwrap().unwrap();
        assert_eq!(folders, [root.join("000000"), root.join("000001")], "an unfinished recording is skipped");
        let second = TimedRecording::open(&folders[1]).unwrap();
        assert_eq!(
            (second.since_start, second.unix_time),
            (Duration::from_millis(1500), Duration::from_millis(1_700_000_000_250))
        );
        assert_eq!(second.utc_offset_seconds, Some(-3600));
        use pagefold_host::Host;
        assert_eq!(Recording::open(&root).unwrap().read("proc/other").unwrap(), b"2", "the last recording is opened");
    }

    #[test]
    fn pages_frames_and_kinds_are_read_lazily() {
        use pagefold_base::{Absent, Pfn, Pid};
        use pagefold_host::Host;
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("day");
        let mut moments = TraceWriter::create(&root).unwrap();
        let stat = format!("7 (a) R {}", "0 ".repeat(49));
        let there = root.join("000000");
        fs::create_dir_all(there.join("files/proc/7")).unwrap();
        fs::write(there.join("files/proc/7/stat"), stat).unwrap();
        fs::create_dir(there.join("pages")).unwrap();
        for garbled in ["frames.txt", "contents.txt", "pages/7.txt"] {
            fs::write(there.join(garbled), "no such line\n").unwrap();
        }
        write_recording(&mut moments, 0, &[("meminfo", "MemTotal: 1 kB")]);

        let host = TimedRecording::open(&there).unwrap().host;
        assert_eq!(host.read("proc/meminfo").unwrap(), b"MemTotal: 1 kB");
        let process = host.open(Pid(7)).unwrap();
        let told = |reading: Option<Absent>, file: &str| match reading {
            Some(Absent::Malformed(what)) => assert!(what.contains(file), "{what}"),
            other => panic!("{file}: {other:?}"),
        };
        told(host.frame_flags(&[Pfn(1)]).err(), "frames.txt");
        told(process.resident(&[]).err(), "7.txt");
        fs::remove_file(there.join("pages/7.txt")).unwrap();
        told(
            process.contents(pagefold_host::ReadMethod::ProcMem { detect_merged: false }, &[], &mut |_, _| ()).err(),
            "contents.txt",
        );
        assert!(Recording::open(&there).unwrap_err().to_string().contains("frames.txt"), "it is checked on open");
    }

    #[test]
    fn trace_without_recordings_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("day");
        TraceWriter::create(&root).unwrap();
        assert!(recording_folders(&root).unwrap_err().to_string().contains(&root.display().to_string()));
        assert!(TraceWriter::create(&root).is_err(), "it is not empty");
    }
}
