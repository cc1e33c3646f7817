//! A recording of many moments: a day of a host.
//!
//! ```text
//! recording.toml   that it is one of many moments
//! 000000/          the first moment: a recording as any other, with `at_seconds` since the first, Unix `time`, and the
//!                  `utc_offset_seconds` of the host's time zone
//! 000001/          the next; files that are as they were a moment before are hard links to those
//! ```
//!
//! So each moment is read by every command on its own, and takes as much room as has changed. A moment that was not
//! finished has no `recording.toml`, and is passed over.

use super::{Error, Recording, field, read_text};
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What `recording.toml` says of many moments.
pub const SCHEMA: &str = "pagefold.recording.moments/1";

/// A host at a moment.
#[derive(Debug)]
pub struct Moment {
    /// The host.
    pub host: Recording,
    /// Since the first moment.
    pub at: Duration,
    /// Unix time.
    pub time: Duration,
    /// By how many seconds the host's own clock was ahead of UTC, where that was recorded.
    pub utc_offset: Option<i64>,
}

impl Moment {
    /// Read it from its folder: pages, frames and contents once somebody asks for them.
    pub fn open(folder: &Path) -> Result<Self, Error> {
        let path = folder.join("recording.toml");
        let about = read_text(&path)?;
        let seconds = |name: &str| {
            let seconds = field(&about, name).and_then(|text| Duration::try_from_secs_f64(text.parse().ok()?).ok());
            seconds.ok_or_else(|| Error::Malformed { path: path.clone(), what: format!("{name} is no time") })
        };
        let utc_offset = field(&about, "utc_offset_seconds").map(|text| {
            let malformed = |what: &str| Error::Malformed { path: path.clone(), what: what.to_owned() };
            text.parse().map_err(|_| malformed("utc_offset_seconds is no number"))
        });
        let (at, time, utc_offset) = (seconds("at_seconds")?, seconds("time")?, utc_offset.transpose()?);
        Ok(Self { host: Recording::open_unread(folder)?, at, time, utc_offset })
    }
}

/// The folders of all moments in their order, if a recording is one of many.
pub fn folders(root: &Path) -> Result<Option<Vec<PathBuf>>, Error> {
    let about = read_text(&root.join("recording.toml"))?;
    if field(&about, "schema") != Some(&format!("\"{SCHEMA}\"")) {
        return Ok(None);
    }
    let io = |source| Error::Io { path: root.to_owned(), source };
    let mut folders = Vec::new();
    for entry in fs::read_dir(root).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.join("recording.toml").is_file() {
            folders.push(path);
        }
    }
    folders.sort();
    if folders.is_empty() {
        return Err(Error::Malformed { path: root.to_owned(), what: "it has no moment".to_owned() });
    }
    Ok(Some(folders))
}

/// Moments that are being recorded.
#[derive(Debug)]
pub struct Moments {
    root: PathBuf,
    last: Option<PathBuf>,
    count: usize,
    bytes: u64,
}

impl Moments {
    /// Begin in a new or empty folder, which only its owner may enter.
    pub fn begin(root: &Path) -> io::Result<Self> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(root)?;
        if fs::read_dir(root)?.next().is_some() {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "the folder is not empty"));
        }
        fs::write(root.join("recording.toml"), format!("schema = \"{SCHEMA}\"\n"))?;
        Ok(Self { root: root.to_owned(), last: None, count: 0, bytes: 0 })
    }

    /// The folder of the next moment.
    pub fn next(&self) -> PathBuf {
        self.root.join(format!("{:06}", self.count))
    }

    /// The next moment was recorded: what has not changed since the one before is linked.
    pub fn add(&mut self) -> io::Result<()> {
        let folder = self.next();
        self.bytes += link_unchanged(self.last.as_deref(), &folder)?;
        self.last = Some(folder);
        self.count += 1;
        Ok(())
    }

    /// The next moment could not be recorded: nothing is left of it.
    pub fn discard(&self) {
        // What stays there has no recording.toml, and is passed over.
        let _ = fs::remove_dir_all(self.next());
    }

    /// How many moments there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Bytes in files that are no links to those of a moment before.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Replace the files of a folder that are as in another by links to those. Tells how many bytes are in all others.
fn link_unchanged(before: Option<&Path>, folder: &Path) -> io::Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let (path, old) = (entry.path(), before.map(|before| before.join(entry.file_name())));
        if entry.file_type()?.is_dir() {
            bytes += link_unchanged(old.as_deref().filter(|old| old.is_dir()), &path)?;
            continue;
        }
        let length = entry.metadata()?.len();
        let same = |old: &&Path| {
            fs::metadata(old).is_ok_and(|old| old.len() == length)
                && fs::read(old).is_ok_and(|old| fs::read(&path).is_ok_and(|new| new == old))
        };
        // File systems bound the links to a file: then it is kept once more.
        let linked = old.as_deref().filter(same).is_some_and(|old| replace_by_link(old, &path).is_ok());
        bytes += if linked { 0 } else { length };
    }
    Ok(bytes)
}

fn replace_by_link(old: &Path, path: &Path) -> io::Result<()> {
    let link = path.with_extension("link");
    fs::hard_link(old, &link)?;
    fs::rename(link, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    fn moment(moments: &mut Moments, at: u32, files: &[(&str, &str)]) {
        let folder = moments.next();
        fs::create_dir_all(folder.join("files/proc")).unwrap();
        for (name, text) in files {
            fs::write(folder.join("files/proc").join(name), text).unwrap();
        }
        let about = format!(
            "schema = \"{}\"\npage_size = 4096\nat_seconds = {at}.5\ntime = 1700000000.25\n\
             utc_offset_seconds = -3600\n",
            crate::SCHEMA
        );
        fs::write(folder.join("recording.toml"), about).unwrap();
        moments.add().unwrap();
    }

    #[test]
    fn what_does_not_change_is_kept_once() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("day");
        let mut moments = Moments::begin(&root).unwrap();
        moment(&mut moments, 0, &[("same", "held"), ("other", "1")]);
        let first = moments.bytes();
        moment(&mut moments, 1, &[("same", "held"), ("other", "2")]);
        let (about, changed) = (fs::metadata(root.join("000001/recording.toml")).unwrap().len(), 1);
        assert_eq!(moments.bytes() - first, about + changed);
        let inode = |path: &str| fs::metadata(root.join(path)).unwrap().ino();
        assert_eq!(inode("000000/files/proc/same"), inode("000001/files/proc/same"));
        assert_ne!(inode("000000/files/proc/other"), inode("000001/files/proc/other"));

        fs::create_dir(moments.next()).unwrap();
        let folders = folders(&root).unwrap().unwrap();
        assert_eq!(folders, [root.join("000000"), root.join("000001")], "what is not finished is passed over");
        let second = Moment::open(&folders[1]).unwrap();
        assert_eq!((second.at, second.time), (Duration::from_millis(1500), Duration::from_millis(1_700_000_000_250)));
        assert_eq!(second.utc_offset, Some(-3600));
        use pagefold_host::Host;
        assert_eq!(Recording::open(&root).unwrap().read("proc/other").unwrap(), b"2", "the last is what is opened");
    }

    #[test]
    fn what_nobody_asks_for_is_not_read() {
        use pagefold_base::{Absent, Pfn, Pid};
        use pagefold_host::Host;
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("day");
        let mut moments = Moments::begin(&root).unwrap();
        let stat = format!("7 (a) R {}", "0 ".repeat(49));
        let there = root.join("000000");
        fs::create_dir_all(there.join("files/proc/7")).unwrap();
        fs::write(there.join("files/proc/7/stat"), stat).unwrap();
        fs::create_dir(there.join("pages")).unwrap();
        for garbled in ["frames.txt", "contents.txt", "pages/7.txt"] {
            fs::write(there.join(garbled), "no such line\n").unwrap();
        }
        moment(&mut moments, 0, &[("meminfo", "MemTotal: 1 kB")]);

        let host = Moment::open(&there).unwrap().host;
        assert_eq!(host.read("proc/meminfo").unwrap(), b"MemTotal: 1 kB");
        let process = host.open(Pid(7)).unwrap();
        let told = |reading: Option<Absent>, file: &str| match reading {
            Some(Absent::Malformed(what)) => assert!(what.contains(file), "{what}"),
            other => panic!("{file}: {other:?}"),
        };
        told(host.frame_flags(&[Pfn(1)]).err(), "frames.txt");
        told(process.resident(&[]).err(), "7.txt");
        fs::remove_file(there.join("pages/7.txt")).unwrap();
        told(process.contents(pagefold_host::Way::Memory { merged: false }, &[], &mut |_, _| ()).err(), "contents.txt");
        assert!(Recording::open(&there).unwrap_err().to_string().contains("frames.txt"), "one alone is looked through");
    }

    #[test]
    fn a_folder_without_moments_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("day");
        Moments::begin(&root).unwrap();
        assert!(folders(&root).unwrap_err().to_string().contains(&root.display().to_string()));
        assert!(Moments::begin(&root).is_err(), "it is not empty");
    }
}
