//! What merging has freed by splitting huge pages, by process, beside the journal.
//!
//! When ksmd has a huge page split, the kernel maps its pages of zeros to the zero page (mm/migrate.c,
//! `try_to_map_unused_to_zeropage`, since 6.12). That memory is free until the process writes to it, and no counter tells
//! of it; nor do page tables tell such pages from memory that was read and never written. So each merge notes what it
//! measured, and whoever shows what merging saves adds that, as far as the page tables still have as many pages of zeros.
//! What other programs have ksmd merge is not noted.

use crate::verify;
use pagefold_base::{Absent, Pages, Pid, ProcessId, Reading};
use pagefold_host::transaction::journal::Directory;
use pagefold_host::transaction::session;
use pagefold_host::{Host, Process};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The file.
pub const FILE: &str = "splitting.json";

/// Bytes of the file at most: of about 100,000 processes.
const LONGEST: u64 = 4 << 20;

/// Pages of zeros that were freed, by process.
pub type Freed = BTreeMap<ProcessId, Pages>;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    /// Under which boot.
    boot: String,
    /// Number, start time and pages of each process.
    freed: Vec<(u32, u64, u64)>,
}

/// Add what a merge has freed to what is noted of processes that live.
///
/// # Errors
/// Where the boot cannot be told, or the file cannot be read or written.
pub fn note(host: &dyn Host, directory: &Directory, freed: &Freed) -> io::Result<()> {
    if freed.is_empty() {
        return Ok(());
    }
    let boot = session::boot(host).map_err(io::Error::other)?;
    let mut all = read(directory, &boot)?;
    all.retain(|process, _| pagefold_host::hold(host, *process).is_ok());
    for (process, pages) in freed {
        *all.entry(*process).or_default() += *pages;
    }
    let freed = all.into_iter().map(|(process, pages)| (process.pid.0, process.start_time, pages.0)).collect();
    directory.replace(FILE, &serde_json::to_vec(&Record { boot, freed })?)
}

/// What is noted under this boot of processes that may have ended since. Nothing where no merge has noted anything.
///
/// # Errors
/// Where the boot cannot be told, the directory is another user's, or the file cannot be read.
pub fn noted(host: &dyn Host, directory: &Path) -> io::Result<Freed> {
    let directory = match Directory::open(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Freed::new()),
        directory => directory?,
    };
    if !directory.is_private()? {
        return Err(io::Error::other("another user owns the directory or can write in it"));
    }
    read(&directory, &session::boot(host).map_err(io::Error::other)?)
}

/// What of the pages noted of a process is still free: no more than the zero pages that it maps and KSM does not count.
///
/// # Errors
/// Where page tables cannot be read.
pub fn held(host: &dyn Host, handle: &dyn Process, noted: Pages) -> Reading<Pages> {
    if noted == Pages::ZERO { Ok(noted) } else { Ok(noted.min(verify::uncounted_zeros(host, handle)?)) }
}

fn read(directory: &Directory, boot: &str) -> io::Result<Freed> {
    let mut bytes = Vec::new();
    match directory.file(FILE, OFlags::RDONLY) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Freed::new()),
        file => file?.take(LONGEST).read_to_end(&mut bytes)?,
    };
    // What cannot be understood is of another version, and only figures are lost with it.
    let Ok(record) = serde_json::from_slice::<Record>(&bytes) else { return Ok(Freed::new()) };
    let process = |(pid, start_time, pages)| (ProcessId { pid: Pid(pid), start_time }, Pages(pages));
    Ok(if record.boot == boot { record.freed.into_iter().map(process).collect() } else { Freed::new() })
}

/// The notes as they are read while merges add to them.
#[derive(Debug)]
pub struct Notes {
    directory: PathBuf,
    /// Inode and time of change of the file that was read last: each merge replaces it.
    file: Option<(u64, i64, i64)>,
    noted: Freed,
}

impl Notes {
    /// Those in a directory, of which nothing was read so far.
    pub fn new(directory: &Path) -> Self {
        Self { directory: directory.to_owned(), file: None, noted: Freed::new() }
    }

    /// Bring up to date what is known to be still free: what was noted since the last call is added, and processes of
    /// which nothing is noted any more are dropped. Tells whose pages were added. An unchanged file is not read.
    ///
    /// # Errors
    /// Those of [`noted`], once for each change of the file.
    pub fn update(&mut self, host: &dyn Host, held: &mut Freed) -> io::Result<Vec<ProcessId>> {
        let file = std::fs::metadata(self.directory.join(FILE)).ok();
        let file = file.map(|file| (file.ino(), file.mtime(), file.mtime_nsec()));
        if file == self.file {
            return Ok(Vec::new());
        }
        self.file = file;
        let before = std::mem::replace(&mut self.noted, noted(host, &self.directory)?);
        held.retain(|process, _| self.noted.contains_key(process));
        let mut grown = Vec::new();
        for (process, pages) in &self.noted {
            let more = pages.saturating_sub(before.get(process).copied().unwrap_or_default());
            if more > Pages::ZERO {
                *held.entry(*process).or_default() += more;
                grown.push(*process);
            }
        }
        Ok(grown)
    }
}

/// Why what is noted cannot be told.
pub fn why(error: &io::Error) -> Absent {
    match error.kind() {
        io::ErrorKind::PermissionDenied => Absent::Denied,
        _ => Absent::Malformed(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_host::fake::Fake;

    fn process(pid: u32, start_time: u64) -> ProcessId {
        ProcessId { pid: Pid(pid), start_time }
    }

    #[test]
    fn notes_add_up_and_end_with_their_process_and_boot() {
        let (host, folder) = (Fake::booted(), tempfile::tempdir().unwrap());
        let directory = Directory::open(folder.path()).unwrap();
        assert_eq!(noted(&host, folder.path()).unwrap(), Freed::new());
        [1, 2].into_iter().for_each(|pid| host.start(pid, 1));
        let freed = |all: &[(u32, u64)]| -> Freed { all.iter().map(|&(pid, n)| (process(pid, 1), Pages(n))).collect() };
        note(&host, &directory, &freed(&[(1, 10), (2, 20)])).unwrap();
        note(&host, &directory, &freed(&[(1, 5)])).unwrap();
        assert_eq!(noted(&host, folder.path()).unwrap(), freed(&[(1, 15), (2, 20)]));
        host.ended(2);
        note(&host, &directory, &freed(&[(1, 1)])).unwrap();
        assert_eq!(noted(&host, folder.path()).unwrap(), freed(&[(1, 16)]));
        // A number that was given to another process.
        std::fs::write(folder.path().join(FILE), r#"{"boot":"this-boot","freed":[[1,9,7]]}"#).unwrap();
        note(&host, &directory, &freed(&[(1, 1)])).unwrap();
        assert_eq!(noted(&host, folder.path()).unwrap(), freed(&[(1, 1)]));
        host.file("proc/sys/kernel/random/boot_id", "another-boot\n");
        assert_eq!(noted(&host, folder.path()).unwrap(), Freed::new());
        for garbage in ["", "{", r#"{"boot":"another-boot","freed":[[-1,0,0]]}"#] {
            std::fs::write(folder.path().join(FILE), garbage).unwrap();
            assert_eq!(noted(&host, folder.path()).unwrap(), Freed::new(), "{garbage}");
        }
    }

    #[test]
    fn notes_of_later_merges_are_added_to_what_is_still_free() {
        let (host, folder) = (Fake::booted(), tempfile::tempdir().unwrap());
        let directory = Directory::open(folder.path()).unwrap();
        [1, 2].into_iter().for_each(|pid| host.start(pid, 1));
        let freed = |all: &[(u32, u64)]| -> Freed { all.iter().map(|&(pid, n)| (process(pid, 1), Pages(n))).collect() };
        let (mut notes, mut held) = (Notes::new(folder.path()), Freed::new());
        assert_eq!(notes.update(&host, &mut held).unwrap(), []);
        note(&host, &directory, &freed(&[(1, 10), (2, 20)])).unwrap();
        assert_eq!(notes.update(&host, &mut held).unwrap(), [process(1, 1), process(2, 1)]);
        assert_eq!(held, freed(&[(1, 10), (2, 20)]));
        // Four of them were written since: that stays so, whatever else comes.
        held.extend(freed(&[(1, 6)]));
        assert_eq!(notes.update(&host, &mut held).unwrap(), []);
        host.ended(2);
        note(&host, &directory, &freed(&[(1, 5)])).unwrap();
        assert_eq!(notes.update(&host, &mut held).unwrap(), [process(1, 1)]);
        assert_eq!(held, freed(&[(1, 11)]));
        std::fs::remove_file(folder.path().join(FILE)).unwrap();
        assert_eq!(notes.update(&host, &mut held).unwrap(), []);
        assert_eq!(held, Freed::new());
    }

    #[test]
    fn notes_of_another_user_are_refused() {
        use std::os::unix::fs::PermissionsExt;
        let (host, folder) = (Fake::booted(), tempfile::tempdir().unwrap());
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(noted(&host, folder.path()).is_err());
        assert_eq!(noted(&host, &folder.path().join("missing")).unwrap(), Freed::new());
    }
}
