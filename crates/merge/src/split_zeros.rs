//! Records how much memory merging freed by splitting huge pages, by process, in a file beside the journal.
//!
//! When ksmd has a huge page split, the kernel maps its zero pages to the kernel's zero page (mm/migrate.c,
//! `try_to_map_unused_to_zeropage`, since 6.12). That memory is free until the process writes to it, but no counter
//! shows it. Page tables do not distinguish such pages from memory that was read and never written. So each merge
//! records what it measured, and reports of savings add that number, up to the zero pages that the page tables still
//! show. Pages that other programs have ksmd merge are not recorded.

use crate::process_pages;
use pagefold_base::{Absent, Pages, Pid, ProcessId, Reading};
use pagefold_host::transaction::journal::StateDirectory;
use pagefold_host::transaction::session;
use pagefold_host::{Host, ProcessHandle};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The file name.
pub const SPLIT_ZEROS_FILE: &str = "splitting.json";

/// Maximum bytes of the file: about 100,000 processes.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// Freed zero pages, by process.
pub type FreedZeroPages = BTreeMap<ProcessId, Pages>;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SplitZerosFile {
    /// The boot ID.
    boot: String,
    /// PID, start time and pages of each process.
    freed: Vec<(u32, u64, u64)>,
}

/// Add the pages that a merge freed to the record of running processes.
///
/// # Errors
/// If the boot ID cannot be read, or the file cannot be read or written.
pub fn note(host: &dyn Host, directory: &StateDirectory, freed: &FreedZeroPages) -> io::Result<()> {
    if freed.is_empty() {
        return Ok(());
    }
    let boot = session::read_boot_id(host).map_err(io::Error::other)?;
    let mut record = read_file(directory, &boot)?;
    record.retain(|process, _| pagefold_host::hold(host, *process).is_ok());
    for (process, pages) in freed {
        *record.entry(*process).or_default() += *pages;
    }
    let freed = record.into_iter().map(|(process, pages)| (process.pid.0, process.start_time, pages.0)).collect();
    directory.replace(SPLIT_ZEROS_FILE, &serde_json::to_vec(&SplitZerosFile { boot, freed })?)
}

/// The record of this boot; its processes may have ended since. Empty if no merge has recorded anything.
///
/// # Errors
/// If the boot ID cannot be read, the directory belongs to another user, or the file cannot be read.
pub fn load_freed(host: &dyn Host, directory: &Path) -> io::Result<FreedZeroPages> {
    let directory = match StateDirectory::open(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(FreedZeroPages::new()),
        directory => directory?,
    };
    if !directory.is_private()? {
        return Err(io::Error::other("another user owns the directory or can write in it"));
    }
    read_file(&directory, &session::read_boot_id(host).map_err(io::Error::other)?)
}

/// The recorded pages of a process that are still free: at most the zero pages that it maps and KSM does not count.
///
/// # Errors
/// If page tables cannot be read.
pub fn count_still_free(host: &dyn Host, handle: &dyn ProcessHandle, recorded: Pages) -> Reading<Pages> {
    if recorded == Pages::ZERO {
        Ok(recorded)
    } else {
        Ok(recorded.min(process_pages::uncounted_zero_pages(host, handle)?))
    }
}

fn read_file(directory: &StateDirectory, boot: &str) -> io::Result<FreedZeroPages> {
    let mut bytes = Vec::new();
    match directory.open_file(SPLIT_ZEROS_FILE, OFlags::RDONLY) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(FreedZeroPages::new()),
        file => file?.take(MAX_FILE_BYTES).read_to_end(&mut bytes)?,
    };
    // A file that cannot be parsed is from another version; only figures are lost.
    let Ok(record) = serde_json::from_slice::<SplitZerosFile>(&bytes) else { return Ok(FreedZeroPages::new()) };
    let process = |(pid, start_time, pages)| (ProcessId { pid: Pid(pid), start_time }, Pages(pages));
    Ok(if record.boot == boot { record.freed.into_iter().map(process).collect() } else { FreedZeroPages::new() })
}

/// A reader of the record that follows later merges.
#[derive(Debug)]
pub struct Notes {
    directory: PathBuf,
    /// Inode and modification time of the file at the last read: each merge replaces the file.
    file_version: Option<(u64, i64, i64)>,
    last_loaded: FreedZeroPages,
}

impl Notes {
    /// A reader of a directory's record that has read nothing yet.
    pub fn new(directory: &Path) -> Self {
        Self { directory: directory.to_owned(), file_version: None, last_loaded: FreedZeroPages::new() }
    }

    /// Update `still_free`: add pages recorded since the last call, and drop processes that are no longer recorded.
    /// Returns the processes with added pages. An unchanged file is not read.
    ///
    /// # Errors
    /// The errors of [`load_freed`], once for each change of the file.
    pub fn update(&mut self, host: &dyn Host, still_free: &mut FreedZeroPages) -> io::Result<Vec<ProcessId>> {
        let file = std::fs::metadata(self.directory.join(SPLIT_ZEROS_FILE)).ok();
        let version = file.map(|file| (file.ino(), file.mtime(), file.mtime_nsec()));
        if version == self.file_version {
            return Ok(Vec::new());
        }
        self.file_version = version;
        let previous = std::mem::replace(&mut self.last_loaded, load_freed(host, &self.directory)?);
        still_free.retain(|process, _| self.last_loaded.contains_key(process));
        let mut changed = Vec::new();
        for (process, pages) in &self.last_loaded {
            let added = pages.saturating_sub(previous.get(process).copied().unwrap_or_default());
            if added > Pages::ZERO {
                *still_free.entry(*process).or_default() += added;
                changed.push(*process);
            }
        }
        Ok(changed)
    }
}

/// The reading that stands for an error of this record.
pub fn absent_from_error(error: &io::Error) -> Absent {
    match error.kind() {
        io::ErrorKind::PermissionDenied => Absent::Denied,
        _ => Absent::Malformed(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_host::fake_host::FakeHost;

    fn process(pid: u32, start_time: u64) -> ProcessId {
        ProcessId { pid: Pid(pid), start_time }
    }

    #[test]
    fn notes_sum_up_until_process_or_boot_ends() {
        let (host, folder) = (FakeHost::booted(), tempfile::tempdir().unwrap());
        let directory = StateDirectory::open(folder.path()).unwrap();
        assert_eq!(load_freed(&host, folder.path()).unwrap(), FreedZeroPages::new());
        [1, 2].into_iter().for_each(|pid| host.start_process(pid, 1));
        let freed = |all: &[(u32, u64)]| -> FreedZeroPages {
            all.iter().map(|&(pid, n)| (process(pid, 1), Pages(n))).collect()
        };
        note(&host, &directory, &freed(&[(1, 10), (2, 20)])).unwrap();
        note(&host, &directory, &freed(&[(1, 5)])).unwrap();
        assert_eq!(load_freed(&host, folder.path()).unwrap(), freed(&[(1, 15), (2, 20)]));
        host.remove_process(2);
        note(&host, &directory, &freed(&[(1, 1)])).unwrap();
        assert_eq!(load_freed(&host, folder.path()).unwrap(), freed(&[(1, 16)]));
        // A PID that was reused by another process.
        std::fs::write(folder.path().join(SPLIT_ZEROS_FILE), r#"{"boot":"this-boot","freed":[[1,9,7]]}"#).unwrap();
        note(&host, &directory, &freed(&[(1, 1)])).unwrap();
        assert_eq!(load_freed(&host, folder.path()).unwrap(), freed(&[(1, 1)]));
        host.put_file("proc/sys/kernel/random/boot_id", "another-boot\n");
        assert_eq!(load_freed(&host, folder.path()).unwrap(), FreedZeroPages::new());
        for garbage in ["", "{", r#"{"boot":"another-boot","freed":[[-1,0,0]]}"#] {
            std::fs::write(folder.path().join(SPLIT_ZEROS_FILE), garbage).unwrap();
            assert_eq!(load_freed(&host, folder.path()).unwrap(), FreedZeroPages::new(), "{garbage}");
        }
    }

    #[test]
    fn later_notes_add_to_pages_still_free() {
        let (host, folder) = (FakeHost::booted(), tempfile::tempdir().unwrap());
        let directory = StateDirectory::open(folder.path()).unwrap();
        [1, 2].into_iter().for_each(|pid| host.start_process(pid, 1));
        let freed = |all: &[(u32, u64)]| -> FreedZeroPages {
            all.iter().map(|&(pid, n)| (process(pid, 1), Pages(n))).collect()
        };
        let (mut notes, mut still_free) = (Notes::new(folder.path()), FreedZeroPages::new());
        assert_eq!(notes.update(&host, &mut still_free).unwrap(), []);
        note(&host, &directory, &freed(&[(1, 10), (2, 20)])).unwrap();
        assert_eq!(notes.update(&host, &mut still_free).unwrap(), [process(1, 1), process(2, 1)]);
        assert_eq!(still_free, freed(&[(1, 10), (2, 20)]));
        // Four of them were written since: they stay excluded after later updates.
        still_free.extend(freed(&[(1, 6)]));
        assert_eq!(notes.update(&host, &mut still_free).unwrap(), []);
        host.remove_process(2);
        note(&host, &directory, &freed(&[(1, 5)])).unwrap();
        assert_eq!(notes.update(&host, &mut still_free).unwrap(), [process(1, 1)]);
        assert_eq!(still_free, freed(&[(1, 11)]));
        std::fs::remove_file(folder.path().join(SPLIT_ZEROS_FILE)).unwrap();
        assert_eq!(notes.update(&host, &mut still_free).unwrap(), []);
        assert_eq!(still_free, FreedZeroPages::new());
    }

    #[test]
    fn notes_of_another_user_are_refused() {
        use std::os::unix::fs::PermissionsExt;
        let (host, folder) = (FakeHost::booted(), tempfile::tempdir().unwrap());
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(load_freed(&host, folder.path()).is_err());
        assert_eq!(load_freed(&host, &folder.path().join("missing")).unwrap(), FreedZeroPages::new());
    }
}
