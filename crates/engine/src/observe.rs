//! Read-only access to domains for other processes. It takes no lock, and joins, maps, creates or removes nothing.
//!
//! The content of a directory is untrusted. Directories and files are opened one below the other, never through a
//! symbolic link, and are checked once they are open. They must belong to the user of the directory, and no other user
//! may be able to change a directory. Reads are bounded by the maximum size of each kind of file, and the data is
//! validated. Opening a file that is not regular does not block.
//!
//! # Limits
//! A member is identified by its process, so members in another PID namespace seem to have ended.

#![forbid(unsafe_code)]

use crate::domain::{DOMAIN_MAGIC, HeaderField};
use crate::shared_words::WORD_BYTES;
use crate::status_file::{self, MAX_STATUS_WORDS, VERSION_WORD};
use pagefold_base::engine::{EngineDomain, EngineMember};
use pagefold_base::{Bytes, PageSize, Pages};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, fstat, openat, statat};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

/// Maximum entries of a directory that are read.
const MAX_DIRECTORY_ENTRIES: usize = 1 << 16;

/// Maximum members that are counted.
const MAX_MEMBERS: usize = 1 << 12;

/// Maximum attempts to read a status file that changes meanwhile, and the interval between them.
const MAX_READ_TRIES: usize = 50;
const READ_RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// Bytes that are read at once from files that may be long.
const READ_CHUNK_BYTES: u64 = 1 << 20;

/// Why a domain cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ObserveError {
    /// It is no directory, or other users may change it.
    #[error("{0} is not a private directory of its user: its content cannot be trusted")]
    NotPrivate(PathBuf),
    /// It contains other data.
    #[error("{0} is not a domain of this version of pagefold")]
    NotADomain(PathBuf),
    /// It cannot be read.
    #[error("cannot read {path}")]
    Io {
        /// Path of the file or directory.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
}

/// A directory of domains, and its user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DomainsRoot {
    /// Path of the directory.
    pub directory: PathBuf,
    /// The only user who may own its content.
    pub owner_uid: u32,
}

/// Existing directories of domains that this process can read: that of its own user, and for root those of all users
/// under `/dev/shm`.
pub fn readable_roots() -> Vec<DomainsRoot> {
    let own_uid = rustix::process::geteuid().as_raw();
    let mut roots = vec![DomainsRoot { directory: crate::domain_directory::default_root(), owner_uid: own_uid }];
    if own_uid == 0 {
        let shared = Path::new("/dev/shm");
        for entry in shared.read_dir().into_iter().flatten().flatten().take(MAX_DIRECTORY_ENTRIES) {
            let name = entry.file_name();
            let owner_uid = name.to_str().and_then(|name| name.strip_prefix("pagefold-")?.parse().ok());
            roots.extend(owner_uid.map(|owner_uid| DomainsRoot { directory: shared.join(name), owner_uid }));
        }
    }
    roots.retain(|root| root.directory.symlink_metadata().is_ok());
    roots.sort_by(|a, b| (a.owner_uid, &a.directory).cmp(&(b.owner_uid, &b.directory)));
    roots.dedup();
    roots
}

/// The names of the domains under a root.
pub fn domain_names(root: &DomainsRoot) -> Result<Vec<String>, ObserveError> {
    let directory = open_root(root)?;
    let mut names: Vec<String> = list_entries(&directory, &root.directory)?
        .into_iter()
        .filter(|name| crate::domain_directory::is_valid_domain_name(name))
        .filter(|name| is_directory(&directory, name))
        .collect();
    names.sort();
    Ok(names)
}

/// Read the current state of a domain.
///
/// # Errors
/// [`ObserveError::Io`] with `NotFound` if no domain has that name, and the other variants.
pub fn read_domain(root: &DomainsRoot, name: &str) -> Result<EngineDomain, ObserveError> {
    let path = root.directory.join(name);
    let failed = |source: io::Error| ObserveError::Io { path: path.clone(), source };
    if !crate::domain_directory::is_valid_domain_name(name) {
        return Err(failed(io::ErrorKind::NotFound.into()));
    }
    let directory = open_private_directory(open_root(root)?, name, root.owner_uid, 0o077, &path)?;
    let page_bytes = rustix::param::page_size() as u64;
    let size = PageSize::new(page_bytes).ok_or_else(|| ObserveError::NotADomain(path.clone()))?;
    let open_file = |name: &str| open_owned_file(&directory, name, root.owner_uid);
    let header = read_words(&open_file("domain").map_err(failed)?, 0, page_bytes / WORD_BYTES).map_err(failed)?;
    let read_field = |field: HeaderField| header.get(field as usize).copied().unwrap_or(0);
    if read_field(HeaderField::Magic) != DOMAIN_MAGIC
        || read_field(HeaderField::SlotBound) > read_field(HeaderField::SlotCount).min(u64::from(u32::MAX))
    {
        return Err(ObserveError::NotADomain(path));
    }
    let stored_pages =
        count_set_bits(&open_file("slots").map_err(failed)?, read_field(HeaderField::SlotBound)).map_err(failed)?;
    let index = format!("index-{}", read_field(HeaderField::Generation));
    let mut domain = EngineDomain {
        name: name.to_owned(),
        owner: root.owner_uid,
        page_size: size,
        members: Vec::new(),
        ended_members: 0,
        unreadable_members: 0,
        stored: Pages(stored_pages),
        index: Bytes::ZERO,
        files: Bytes::ZERO,
    };
    let mut status_file_count = 0;
    for name in list_entries(&directory, &path)? {
        // The file may have been removed meanwhile. Files that are not read are not opened either: closing any
        // descriptor of `lock` would release a lock that a thread of this process may hold (fcntl(2)).
        let Some(bytes) = allocated_bytes(&directory, &name, root.owner_uid) else { continue };
        domain.files += bytes;
        if name == index {
            domain.index = bytes;
        }
        if !name.starts_with(status_file::STATUS_FILE_PREFIX) {
            continue;
        }
        let Ok(file) = open_file(&name) else { continue };
        status_file_count += 1;
        match read_status_file(&file, page_bytes) {
            _ if status_file_count > MAX_MEMBERS => domain.unreadable_members += 1,
            Ok(StatusFileContent::Member(member)) if is_alive(&member) => domain.members.push(member),
            Ok(StatusFileContent::Member(_)) => domain.ended_members += 1,
            Ok(StatusFileContent::NotWritten) => {}
            Ok(StatusFileContent::Invalid) | Err(_) => domain.unreadable_members += 1,
        }
    }
    domain.members.sort_by_key(|member| member.process);
    Ok(domain)
}

/// Whether a member has not ended.
fn is_alive(member: &EngineMember) -> bool {
    status_file::process_start_time(member.process.pid.0).is_ok_and(|start| start == Some(member.process.start_time))
}

fn open_root(root: &DomainsRoot) -> Result<OwnedFd, ObserveError> {
    open_private_directory(rustix::fs::CWD, &root.directory, root.owner_uid, 0o022, &root.directory)
}

/// Open a directory that belongs to a user, and on which other users have none of the forbidden rights.
fn open_private_directory<P: rustix::path::Arg>(
    parent: impl AsFd,
    name: P,
    owner_uid: u32,
    forbidden_mode: u32,
    path: &Path,
) -> Result<OwnedFd, ObserveError> {
    let opened = crate::domain_directory::open_private(parent, name, owner_uid, forbidden_mode);
    let opened = opened.map_err(|source| ObserveError::Io { path: path.to_owned(), source })?;
    opened.ok_or_else(|| ObserveError::NotPrivate(path.to_owned()))
}

/// Open a regular file of a user.
fn open_owned_file(directory: &OwnedFd, name: &str, owner_uid: u32) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = File::from(openat(directory, name, flags, Mode::empty())?);
    let status = fstat(&file)?;
    let is_regular = FileType::from_raw_mode(status.st_mode) == FileType::RegularFile && status.st_uid == owner_uid;
    if is_regular { Ok(file) } else { Err(io::ErrorKind::InvalidData.into()) }
}

/// Allocated size of a regular file of a user, without opening it.
fn allocated_bytes(directory: &OwnedFd, name: &str, owner_uid: u32) -> Option<Bytes> {
    let status = statat(directory, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    let is_regular = FileType::from_raw_mode(status.st_mode) == FileType::RegularFile && status.st_uid == owner_uid;
    is_regular.then(|| Bytes(status.st_blocks.unsigned_abs().saturating_mul(512).min(1 << 48)))
}

fn is_directory(parent: &OwnedFd, name: &str) -> bool {
    statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|status| FileType::from_raw_mode(status.st_mode) == FileType::Directory)
}

/// The UTF-8 names in a directory, without those that begin with a dot.
fn list_entries(directory: &OwnedFd, path: &Path) -> Result<Vec<String>, ObserveError> {
    let failed = |errno: rustix::io::Errno| ObserveError::Io { path: path.to_owned(), source: errno.into() };
    let mut names = Vec::new();
    for entry in Dir::read_from(directory).map_err(failed)?.take(MAX_DIRECTORY_ENTRIES) {
        let entry = entry.map_err(failed)?;
        names.extend(entry.file_name().to_str().ok().filter(|name| !name.starts_with('.')).map(str::to_owned));
    }
    Ok(names)
}

/// Read `word_count` words of a file from `first_word` on, or as many as there are.
fn read_words(file: &File, first_word: u64, word_count: u64) -> io::Result<Vec<u64>> {
    let mut bytes = vec![0; (word_count * WORD_BYTES) as usize];
    let mut filled = 0;
    while filled < bytes.len() {
        match file.read_at(&mut bytes[filled..], first_word * WORD_BYTES + filled as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    bytes.truncate(filled);
    Ok(status_file::bytes_to_words(&bytes))
}

/// Count the set bits among the first `bits` bits of a file.
fn count_set_bits(file: &File, bits: u64) -> io::Result<u64> {
    let word_count = bits.div_ceil(64);
    let mut ones = 0;
    for first_word in (0..word_count).step_by((READ_CHUNK_BYTES / WORD_BYTES) as usize) {
        let words = read_words(file, first_word, (READ_CHUNK_BYTES / WORD_BYTES).min(word_count - first_word))?;
        ones += words.iter().map(|word| u64::from(word.count_ones())).sum::<u64>();
    }
    Ok(ones.min(bits))
}

/// Content of a status file.
#[derive(Debug, PartialEq)]
enum StatusFileContent {
    /// Its member is about to join.
    NotWritten,
    /// A consistent status of the member.
    Member(EngineMember),
    /// It is invalid, or changes all the time.
    Invalid,
}

/// Read a consistent snapshot of a status file.
fn read_status_file(file: &File, page_bytes: u64) -> io::Result<StatusFileContent> {
    // An empty file has version 0.
    let read_version = || Ok::<_, io::Error>(read_words(file, VERSION_WORD as u64, 1)?.first().copied().unwrap_or(0));
    for _ in 0..MAX_READ_TRIES {
        let version_before = read_version()?;
        // The words are read after the first read of the version, and before the second.
        fence(Ordering::SeqCst);
        let words = read_words(file, 0, MAX_STATUS_WORDS as u64)?;
        fence(Ordering::SeqCst);
        if version_before % 2 == 0 && read_version()? == version_before {
            return Ok(match version_before {
                0 => StatusFileContent::NotWritten,
                _ => status_file::decode_member(&words, page_bytes)
                    .map_or(StatusFileContent::Invalid, StatusFileContent::Member),
            });
        }
        std::thread::sleep(READ_RETRY_INTERVAL);
    }
    Ok(StatusFileContent::Invalid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain_lock::DomainLock;
    use crate::status_file::StatusFile;
    use pagefold_base::AddressRange;
    use pagefold_base::engine::{EngineTimeUse, PageTally, RegionTally};
    use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, symlink};
    use std::sync::atomic::AtomicBool;
    use tempfile::TempDir;

    fn domains_root() -> (TempDir, DomainsRoot) {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
        let root =
            DomainsRoot { directory: directory.path().to_owned(), owner_uid: rustix::process::geteuid().as_raw() };
        (directory, root)
    }

    fn make_domain(root: &DomainsRoot, name: &str) -> PathBuf {
        let path = root.directory.join(name);
        std::fs::DirBuilder::new().mode(0o700).create(&path).unwrap();
        path
    }

    /// A member whose figures all follow from one number.
    fn member_from_number(record: &StatusFile, number: u64) -> EngineMember {
        let tally = PageTally {
            pages: Pages(4 * number),
            merged: Pages(number),
            zeros: Pages(number),
            rewritten_pages: Pages(number),
        };
        let range = AddressRange { start: 0x1000, end: 0x1000 + 4 * number * 4096 };
        EngineMember {
            process: record.owner(),
            reported_at: Duration::from_nanos(number),
            last_merge: None,
            merges: number,
            merge_time: Duration::from_nanos(number),
            time_use: EngineTimeUse::default(),
            notes: Bytes(number),
            tally,
            region_count: 900,
            regions: vec![RegionTally { range, tally }; 900],
        }
    }

    #[test]
    fn status_read_is_a_consistent_snapshot() {
        let (_directory, root) = domains_root();
        let path = make_domain(&root, "x");
        let status_file = StatusFile::new(&path).unwrap();
        let file = File::open(path.read_dir().unwrap().next().unwrap().unwrap().path()).unwrap();
        assert_eq!(read_status_file(&file, 4096).unwrap(), StatusFileContent::NotWritten);
        status_file.publish(&member_from_number(&status_file, 1));
        let (stop, merge_counts) = (AtomicBool::new(false), &mut std::collections::BTreeSet::new());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in (1..1000).cycle() {
                    status_file.publish(&member_from_number(&status_file, number));
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    std::thread::sleep(Duration::from_micros(300));
                }
            });
            while merge_counts.len() < 20 {
                // It may have changed during every attempt.
                let StatusFileContent::Member(member) = read_status_file(&file, 4096).unwrap() else { continue };
                assert_eq!(member, member_from_number(&status_file, member.merges));
                merge_counts.insert(member.merges);
            }
            stop.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn files_of_other_users_are_not_read() {
        let (_directory, root) = domains_root();
        let exposed = |name: &str| matches!(read_domain(&root, name), Err(ObserveError::NotPrivate(_)));
        make_domain(&root, "open");
        std::fs::set_permissions(root.directory.join("open"), std::fs::Permissions::from_mode(0o755)).unwrap();
        symlink(root.directory.join("open"), root.directory.join("link")).unwrap();
        std::fs::write(root.directory.join("file"), "").unwrap();
        assert!(exposed("open") && exposed("link") && exposed("file"));
        assert_eq!(domain_names(&root).unwrap(), ["open"]);
        let other = DomainsRoot { owner_uid: root.owner_uid + 1, ..root.clone() };
        assert!(matches!(domain_names(&other), Err(ObserveError::NotPrivate(_))), "the directory has another owner");
        std::fs::set_permissions(&root.directory, std::fs::Permissions::from_mode(0o770)).unwrap();
        assert!(matches!(domain_names(&root), Err(ObserveError::NotPrivate(_))), "a group could change it");
    }

    #[test]
    fn domain_names_cannot_escape_the_root() {
        let (_directory, root) = domains_root();
        for name in ["", ".", "..", "../x", "a/b", "nobody"] {
            let error = read_domain(&root, name).err();
            let Some(ObserveError::Io { source, .. }) = error else { panic!("{name:?}: {error:?}") };
            assert_eq!(source.kind(), io::ErrorKind::NotFound, "{name:?}");
        }
    }

    #[test]
    fn observing_keeps_the_domain_lock_with_its_holder() {
        let (_directory, root) = domains_root();
        let path = make_domain(&root, "x");
        let header = [DOMAIN_MAGIC, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0].map(u64::to_ne_bytes).concat();
        std::fs::write(path.join("domain"), header).unwrap();
        std::fs::write(path.join("slots"), "").unwrap();
        let _lock =
            DomainLock::acquire(&path.join("lock"), std::time::Instant::now() + Duration::from_secs(300)).unwrap();
        // Format of the kernel's list: type, kind, access, PID, file (proc_locks(5)).
        let inode = format!(":{}", path.join("lock").metadata().unwrap().ino());
        let is_held = || {
            let locks = std::fs::read_to_string("/proc/locks").unwrap();
            locks.lines().any(|line| line.contains("POSIX") && line.split(' ').any(|word| word.ends_with(&inode)))
        };
        assert!(is_held());
        read_domain(&root, "x").unwrap();
        assert!(is_held());
        // The check can fail: closing a descriptor of the lock file releases the lock.
        drop(File::open(path.join("lock")).unwrap());
        assert!(!is_held());
    }

    #[test]
    fn arbitrary_files_are_refused_or_bounded() {
        let (_directory, root) = domains_root();
        let path = make_domain(&root, "x");
        let header = |numbers: &[u64]| {
            let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
            std::fs::write(path.join("domain"), bytes).unwrap();
        };
        assert!(matches!(read_domain(&root, "x"), Err(ObserveError::Io { .. })), "no header");
        header(&[]);
        assert!(matches!(read_domain(&root, "x"), Err(ObserveError::NotADomain(_))));
        header(&[DOMAIN_MAGIC, 1, 0, 0, 0, u64::MAX, u64::MAX, 0, 0]);
        assert!(matches!(read_domain(&root, "x"), Err(ObserveError::NotADomain(_))), "more slots than the maximum");
        header(&[DOMAIN_MAGIC, 1, 0, 0, 0, 100, 1000, 0, 0]);
        // Shorter than the header says, and with more bits.
        std::fs::write(path.join("slots"), [0xff; 80]).unwrap();
        std::fs::write(path.join("index-1"), [1; 100]).unwrap();
        let pipe = path.join("status-1-pipe");
        rustix::fs::mknodat(rustix::fs::CWD, pipe, FileType::Fifo, Mode::RUSR, 0).unwrap();
        symlink("/dev/zero", path.join("status-1-link")).unwrap();
        File::create(path.join("status-1-long")).unwrap().set_len(1 << 50).unwrap();
        std::fs::write(path.join("status-1-text"), "\x1b[2J".repeat(10_000)).unwrap();
        let ended = StatusFile::new(&path).unwrap();
        let mut ended_member = member_from_number(&ended, 5);
        ended_member.process.start_time += 1;
        ended.publish(&ended_member);
        let domain = read_domain(&root, "x").unwrap();
        assert_eq!((domain.members.len(), domain.ended_members, domain.unreadable_members), (0, 1, 1));
        assert_eq!((domain.stored, domain.owner), (Pages(100), root.owner_uid));
        assert_eq!(domain.index, Bytes(4096));
        assert!(domain.files.0 > 4 * 4096, "{domain:?}");
    }
}
