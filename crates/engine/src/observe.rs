//! Domains as others see them: read, and nothing else. No lock is taken, nothing is joined, mapped, made or removed.
//!
//! What lies in a directory is what somebody else has put there. Directories and files are opened one below the other,
//! never through a symbolic link, and looked at once they are open: they belong to the user whose directory it is, and
//! nobody else can change a directory. Of a file so much is read as there may be of its kind, and what is read is
//! checked; a file that is no regular one is not waited for.
//!
//! # Limits
//! A member is known by its process, so members in another pid namespace seem to have ended.

#![forbid(unsafe_code)]

use crate::domain::{Header, MAGIC};
use crate::record::{self, MOST, VERSION};
use crate::words::WORD;
use pagefold_base::engine::{Domain, Member};
use pagefold_base::{Bytes, PageSize, Pages};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, fstat, openat, statat};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

/// So many entries of a directory are looked at.
const ENTRIES: usize = 1 << 16;

/// So many members are counted.
const MEMBERS: usize = 1 << 12;

/// How often a record is read that changes while it is read, and how long after one another.
const TRIES: usize = 50;
const PAUSE: Duration = Duration::from_millis(1);

/// How much is read at once of what may be long.
const PIECE: u64 = 1 << 20;

/// Why a domain cannot be looked at.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is not the user's alone, or no directory.
    #[error("{0} is not a directory that its user alone can change: what it says is not to be relied on")]
    Exposed(PathBuf),
    /// It holds something else.
    #[error("{0} holds no domain of this version of pagefold")]
    Foreign(PathBuf),
    /// It cannot be read.
    #[error("cannot read {path}")]
    Io {
        /// Which path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Where domains are kept, and whose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Root {
    /// The directory.
    pub path: PathBuf,
    /// The only user who may own what is in it.
    pub owner: u32,
}

/// Where domains may be kept that this process can look at: its own user's, and for root everybody's under `/dev/shm`.
/// Those that are not there are not among them.
pub fn roots() -> Vec<Root> {
    let this = rustix::process::geteuid().as_raw();
    let mut roots = vec![Root { path: crate::directory::root(), owner: this }];
    if this == 0 {
        let shared = Path::new("/dev/shm");
        for entry in shared.read_dir().into_iter().flatten().flatten().take(ENTRIES) {
            let name = entry.file_name();
            let owner = name.to_str().and_then(|name| name.strip_prefix("pagefold-")?.parse().ok());
            roots.extend(owner.map(|owner| Root { path: shared.join(name), owner }));
        }
    }
    roots.retain(|root| root.path.symlink_metadata().is_ok());
    roots.sort_by(|a, b| (a.owner, &a.path).cmp(&(b.owner, &b.path)));
    roots.dedup();
    roots
}

/// The names of the domains under a root.
///
/// # Errors
/// [`Error::Exposed`], [`Error::Io`].
pub fn names(root: &Root) -> Result<Vec<String>, Error> {
    let directory = open_root(root)?;
    let mut names: Vec<String> = entries(&directory, &root.path)?
        .into_iter()
        .filter(|name| crate::directory::is_name(name))
        .filter(|name| is_directory(&directory, name))
        .collect();
    names.sort();
    Ok(names)
}

/// A domain as it stands.
///
/// # Errors
/// [`Error::Io`] with `NotFound` if there is none of that name, and the others.
pub fn domain(root: &Root, name: &str) -> Result<Domain, Error> {
    let path = root.path.join(name);
    let failed = |source: io::Error| Error::Io { path: path.clone(), source };
    if !crate::directory::is_name(name) {
        return Err(failed(io::ErrorKind::NotFound.into()));
    }
    let directory = open_directory(open_root(root)?, name, root.owner, 0o077, &path)?;
    let page = rustix::param::page_size() as u64;
    let size = PageSize::new(page).ok_or_else(|| Error::Foreign(path.clone()))?;
    let file = |name: &str| open_file(&directory, name, root.owner);
    let header = read(&file("domain").map_err(failed)?, 0, page / WORD).map_err(failed)?;
    let number = |of: Header| header.get(of as usize).copied().unwrap_or(0);
    if number(Header::Magic) != MAGIC || number(Header::Bound) > number(Header::Slots).min(u64::from(u32::MAX)) {
        return Err(Error::Foreign(path));
    }
    let stored = ones(&file("slots").map_err(failed)?, number(Header::Bound)).map_err(failed)?;
    let index = format!("index-{}", number(Header::Generation));
    let mut domain = Domain {
        name: name.to_owned(),
        owner: root.owner,
        page: size,
        members: Vec::new(),
        ended: 0,
        unread: 0,
        stored: Pages(stored),
        index: Bytes::ZERO,
        files: Bytes::ZERO,
    };
    let mut records = 0;
    for name in entries(&directory, &path)? {
        // It may have gone meanwhile. What is not read is not opened either: closing any descriptor of `lock` would
        // give up the lock that a thread of this process may have (fcntl(2)).
        let Some(bytes) = bytes(&directory, &name, root.owner) else { continue };
        domain.files += bytes;
        if name == index {
            domain.index = bytes;
        }
        if !name.starts_with(record::PREFIX) {
            continue;
        }
        let Ok(file) = file(&name) else { continue };
        records += 1;
        match told(&file, page) {
            _ if records > MEMBERS => domain.unread += 1,
            Ok(Told::Member(member)) if lives(&member) => domain.members.push(member),
            Ok(Told::Member(_)) => domain.ended += 1,
            Ok(Told::NothingYet) => {}
            Ok(Told::Nonsense) | Err(_) => domain.unread += 1,
        }
    }
    domain.members.sort_by_key(|member| member.process);
    Ok(domain)
}

/// Whether a member has not ended.
fn lives(member: &Member) -> bool {
    record::start_time(member.process.pid.0).is_ok_and(|start| start == Some(member.process.start_time))
}

fn open_root(root: &Root) -> Result<OwnedFd, Error> {
    open_directory(rustix::fs::CWD, &root.path, root.owner, 0o022, &root.path)
}

/// Open a directory that belongs to a user, and to which others have none of the forbidden rights.
fn open_directory<P: rustix::path::Arg>(
    above: impl AsFd,
    name: P,
    owner: u32,
    forbidden: u32,
    path: &Path,
) -> Result<OwnedFd, Error> {
    let opened = crate::directory::open_private(above, name, owner, forbidden);
    let opened = opened.map_err(|source| Error::Io { path: path.to_owned(), source })?;
    opened.ok_or_else(|| Error::Exposed(path.to_owned()))
}

/// Open a regular file of a user.
fn open_file(directory: &OwnedFd, name: &str, owner: u32) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = File::from(openat(directory, name, flags, Mode::empty())?);
    let status = fstat(&file)?;
    let regular = FileType::from_raw_mode(status.st_mode) == FileType::RegularFile && status.st_uid == owner;
    if regular { Ok(file) } else { Err(io::ErrorKind::InvalidData.into()) }
}

/// What a regular file of a user takes, without opening it.
fn bytes(directory: &OwnedFd, name: &str, owner: u32) -> Option<Bytes> {
    let status = statat(directory, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    let regular = FileType::from_raw_mode(status.st_mode) == FileType::RegularFile && status.st_uid == owner;
    regular.then(|| Bytes(status.st_blocks.unsigned_abs().saturating_mul(512).min(1 << 48)))
}

fn is_directory(above: &OwnedFd, name: &str) -> bool {
    statat(above, name, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|status| FileType::from_raw_mode(status.st_mode) == FileType::Directory)
}

/// The names in a directory that are text, but for its own and the one above.
fn entries(directory: &OwnedFd, path: &Path) -> Result<Vec<String>, Error> {
    let failed = |errno: rustix::io::Errno| Error::Io { path: path.to_owned(), source: errno.into() };
    let mut names = Vec::new();
    for entry in Dir::read_from(directory).map_err(failed)?.take(ENTRIES) {
        let entry = entry.map_err(failed)?;
        names.extend(entry.file_name().to_str().ok().filter(|name| !name.starts_with('.')).map(str::to_owned));
    }
    Ok(names)
}

/// So many words of a file from one on, or as many as there are.
fn read(file: &File, from: u64, count: u64) -> io::Result<Vec<u64>> {
    let mut bytes = vec![0; (count * WORD) as usize];
    let mut filled = 0;
    while filled < bytes.len() {
        match file.read_at(&mut bytes[filled..], from * WORD + filled as u64) {
            Ok(0) => break,
            Ok(more) => filled += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    bytes.truncate(filled);
    Ok(record::words(&bytes))
}

/// How many of the first bits of a file are set.
fn ones(file: &File, bits: u64) -> io::Result<u64> {
    let words = bits.div_ceil(64);
    let mut ones = 0;
    for from in (0..words).step_by((PIECE / WORD) as usize) {
        let found = read(file, from, (PIECE / WORD).min(words - from))?;
        ones += found.iter().map(|word| u64::from(word.count_ones())).sum::<u64>();
    }
    Ok(ones.min(bits))
}

/// What a record tells.
#[derive(Debug, PartialEq)]
enum Told {
    /// Its member is about to join.
    NothingYet,
    /// How the member stood at one moment.
    Member(Member),
    /// It makes no sense, or changes all the time.
    Nonsense,
}

/// What a record tells, as of one moment.
fn told(file: &File, page: u64) -> io::Result<Told> {
    // A file that is still empty has version 0.
    let version = || Ok::<_, io::Error>(read(file, VERSION as u64, 1)?.first().copied().unwrap_or(0));
    for _ in 0..TRIES {
        let before = version()?;
        // The words are read after the version before, and before the version after.
        fence(Ordering::SeqCst);
        let words = read(file, 0, MOST as u64)?;
        fence(Ordering::SeqCst);
        if before % 2 == 0 && version()? == before {
            return Ok(match before {
                0 => Told::NothingYet,
                _ => record::member(&words, page).map_or(Told::Nonsense, Told::Member),
            });
        }
        std::thread::sleep(PAUSE);
    }
    Ok(Told::Nonsense)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::Lock;
    use crate::record::Record;
    use pagefold_base::AddressRange;
    use pagefold_base::engine::{RegionTally, Spending, Tally};
    use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, symlink};
    use std::sync::atomic::AtomicBool;
    use tempfile::TempDir;

    fn root() -> (TempDir, Root) {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
        let root = Root { path: directory.path().to_owned(), owner: rustix::process::geteuid().as_raw() };
        (directory, root)
    }

    fn make(root: &Root, name: &str) -> PathBuf {
        let path = root.path.join(name);
        std::fs::DirBuilder::new().mode(0o700).create(&path).unwrap();
        path
    }

    /// All figures follow from one number.
    fn member(record: &Record, number: u64) -> Member {
        let tally = Tally { pages: Pages(4 * number), merged: Pages(number), zeros: Pages(number), hot: Pages(number) };
        let range = AddressRange { start: 0x1000, end: 0x1000 + 4 * number * 4096 };
        Member {
            process: record.process(),
            told: Duration::from_nanos(number),
            last_merge: None,
            merges: number,
            time: Duration::from_nanos(number),
            spending: Spending::default(),
            notes: Bytes(number),
            tally,
            region_count: 900,
            regions: vec![RegionTally { range, tally }; 900],
        }
    }

    #[test]
    fn what_is_read_is_what_was_told_at_one_moment() {
        let (_directory, root) = root();
        let path = make(&root, "x");
        let record = Record::new(&path).unwrap();
        let file = File::open(path.read_dir().unwrap().next().unwrap().unwrap().path()).unwrap();
        assert_eq!(told(&file, 4096).unwrap(), Told::NothingYet);
        record.tell(&member(&record, 1));
        let (end, seen) = (AtomicBool::new(false), &mut std::collections::BTreeSet::new());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in (1..1000).cycle() {
                    record.tell(&member(&record, number));
                    if end.load(Ordering::Relaxed) {
                        return;
                    }
                    std::thread::sleep(Duration::from_micros(300));
                }
            });
            while seen.len() < 20 {
                // It may have changed whenever it was read.
                let Told::Member(found) = told(&file, 4096).unwrap() else { continue };
                assert_eq!(found, member(&record, found.merges));
                seen.insert(found.merges);
            }
            end.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn what_others_could_have_put_there_is_not_read() {
        let (_directory, root) = root();
        let exposed = |name: &str| matches!(domain(&root, name), Err(Error::Exposed(_)));
        make(&root, "open");
        std::fs::set_permissions(root.path.join("open"), std::fs::Permissions::from_mode(0o755)).unwrap();
        symlink(root.path.join("open"), root.path.join("link")).unwrap();
        std::fs::write(root.path.join("file"), "").unwrap();
        assert!(exposed("open") && exposed("link") && exposed("file"));
        assert_eq!(names(&root).unwrap(), ["open"]);
        let other = Root { owner: root.owner + 1, ..root.clone() };
        assert!(matches!(names(&other), Err(Error::Exposed(_))), "it is not that user's");
        std::fs::set_permissions(&root.path, std::fs::Permissions::from_mode(0o770)).unwrap();
        assert!(matches!(names(&root), Err(Error::Exposed(_))), "a group could change it");
    }

    #[test]
    fn names_lead_nowhere_else() {
        let (_directory, root) = root();
        for name in ["", ".", "..", "../x", "a/b", "nobody"] {
            let missing =
                |error: &Error| matches!(error, Error::Io { source, .. } if source.kind() == io::ErrorKind::NotFound);
            assert!(domain(&root, name).is_err_and(|error| missing(&error)), "{name:?}");
        }
    }

    #[test]
    fn the_lock_of_the_domain_stays_with_who_has_it() {
        let (_directory, root) = root();
        let path = make(&root, "x");
        let header = [MAGIC, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0].map(u64::to_ne_bytes).concat();
        std::fs::write(path.join("domain"), header).unwrap();
        std::fs::write(path.join("slots"), "").unwrap();
        let _held = Lock::wait(&path.join("lock"), std::time::Instant::now() + Duration::from_secs(300)).unwrap();
        // As the kernel lists it: type, kind, access, process, file (proc_locks(5)).
        let inode = format!(":{}", path.join("lock").metadata().unwrap().ino());
        let is_held = || {
            let locks = std::fs::read_to_string("/proc/locks").unwrap();
            locks.lines().any(|line| line.contains("POSIX") && line.split(' ').any(|word| word.ends_with(&inode)))
        };
        assert!(is_held());
        domain(&root, "x").unwrap();
        assert!(is_held());
        // What this shows can be shown.
        drop(File::open(path.join("lock")).unwrap());
        assert!(!is_held());
    }

    #[test]
    fn files_of_any_content_are_refused_or_bounded() {
        let (_directory, root) = root();
        let path = make(&root, "x");
        let header = |numbers: &[u64]| {
            let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
            std::fs::write(path.join("domain"), bytes).unwrap();
        };
        assert!(matches!(domain(&root, "x"), Err(Error::Io { .. })), "no header");
        header(&[]);
        assert!(matches!(domain(&root, "x"), Err(Error::Foreign(_))));
        header(&[MAGIC, 1, 0, 0, 0, u64::MAX, u64::MAX, 0, 0]);
        assert!(matches!(domain(&root, "x"), Err(Error::Foreign(_))), "more slots than there may be");
        header(&[MAGIC, 1, 0, 0, 0, 100, 1000, 0, 0]);
        // Shorter than the header says, and more bits than it says.
        std::fs::write(path.join("slots"), [0xff; 80]).unwrap();
        std::fs::write(path.join("index-1"), [1; 100]).unwrap();
        let pipe = path.join("status-1-pipe");
        rustix::fs::mknodat(rustix::fs::CWD, pipe, FileType::Fifo, Mode::RUSR, 0).unwrap();
        symlink("/dev/zero", path.join("status-1-link")).unwrap();
        File::create(path.join("status-1-long")).unwrap().set_len(1 << 50).unwrap();
        std::fs::write(path.join("status-1-text"), "\x1b[2J".repeat(10_000)).unwrap();
        let ended = Record::new(&path).unwrap();
        let mut stranger = member(&ended, 5);
        stranger.process.start_time += 1;
        ended.tell(&stranger);
        let found = domain(&root, "x").unwrap();
        assert_eq!((found.members.len(), found.ended, found.unread), (0, 1, 1));
        assert_eq!((found.stored, found.owner), (Pages(100), root.owner));
        assert_eq!(found.index, Bytes(4096));
        assert!(found.files.0 > 4 * 4096, "{found:?}");
    }
}
