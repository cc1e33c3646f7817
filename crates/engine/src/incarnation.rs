//! One founding of a domain: the shared files that belong together, known by their inodes.
//!
//! Any file of the directory may be removed at any time: cleaners of `/dev/shm` do that. So a name never decides what
//! a member shares. One incarnation is one inode of `domain`, which names by inode the `lock` that guards it, its
//! `slots` and its store. Indexes have names that no other incarnation uses, files of members carry the inode of the
//! store.
//!
//! - A process that joins uses an incarnation only if all these names lead to the inodes that `domain` has, and a
//!   member hands it the store. Otherwise it founds another one, in which every file and the store are new.
//! - A member changes what is shared only under the lock of its own incarnation ([`is_named`]). If any name leads
//!   elsewhere or nowhere, it joins anew.
//! - So two incarnations share nothing but the directory, and at most one thread changes an incarnation at a time:
//!   once the name of its lock is gone, no thread can get that lock any more.
//! - A member that goes to another incarnation may still map the store of its former one, and gives up its references
//!   to it. Before that it abandons the former incarnation ([`abandon`]): the members that are left free nothing any
//!   more, and join anew, too. The memory of that store is free once no process maps it: merges copy what they find
//!   of it into ordinary memory ([`crate::survey::Survey::drain`]).
//!
//! Removed files of members are noticed by their number ([`Header::Members`]): it is raised before a file is made, and
//! lowered after one was removed, so that it is never too low.

use crate::directory;
use crate::domain::{Header, MAGIC};
use crate::index::Index;
use crate::lock::Lock;
use crate::references::Everybody;
use crate::store::{Identity, Slots, Store};
use crate::words::Words;
use pagefold_sys::fault;
use rustix::rand::{GetRandomFlags, getrandom};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The header of a domain.
pub const DOMAIN: &str = "domain";
/// What members lock.
pub const LOCK: &str = "lock";
/// Which slots are taken.
pub const SLOTS: &str = "slots";
/// How the names of indexes begin; the generation follows.
pub const INDEX: &str = "index-";

/// Entries of the first index: 64 KiB, for two thousand contents.
pub const FIRST_ENTRIES: usize = 4096;

/// The files of one incarnation, as this process has them.
#[derive(Debug)]
pub struct Incarnation {
    pub header: Words,
    /// Of the file `domain`.
    pub identity: Identity,
    pub slots: Slots,
    pub store: Store,
    /// Of fingerprints.
    pub key: Vec<u8>,
}

impl Incarnation {
    /// The one that the names of a directory lead to, if it is complete and a member has its store. One that is not is
    /// abandoned. Under the lock.
    ///
    /// # Errors
    /// Those of files; `InvalidData` where the directory holds something else; `Unsupported` if its members are in
    /// another PID namespace than this one.
    pub fn find(
        path: &Path,
        page: u64,
        namespace: u64,
        lock: &Lock,
        everybody: &Everybody,
    ) -> io::Result<Option<Self>> {
        let Some(file) = existing(&path.join(DOMAIN))? else { return Ok(None) };
        let header = map_header(&file, page)?;
        let number = |of: Header| header[of as usize].load(Ordering::SeqCst);
        match number(Header::Magic) {
            MAGIC => {}
            // Its founder died over it.
            0 => return Ok(None),
            _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "made by another version of pagefold")),
        }
        if everybody.count() > 0 && number(Header::Namespace) != namespace {
            let why =
                "its members are in another PID namespace: share that, or set PAGEFOLD_RUNTIME to another directory";
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        }
        let found = (|| {
            if number(Header::Lock) != lock.inode()? {
                return Ok(None);
            }
            let Some(slots) = existing(&path.join(SLOTS))?.filter(|file| inode(file) == number(Header::SlotsFile))
            else {
                return Ok(None);
            };
            let slots = Slots::map(&slots, number(Header::Slots) as u32)?;
            let store = (number(Header::StoreDevice), number(Header::StoreInode));
            Ok(handed_on(everybody, store, page)?.map(|store| (slots, store)))
        })();
        let found: io::Result<Option<(Slots, Store)>> = found;
        let Some((slots, store)) = found? else {
            abandon(&header);
            return Ok(None);
        };
        let mut key = vec![0; page as usize];
        file.read_exact_at(&mut key, page)?;
        Ok(Some(Self { identity: identity(&file)?, header, slots, store, key }))
    }

    /// A new one. All its files are new, and those of a former one lose their names. The memory of its store is to be
    /// on a node, if one is named. Under the lock.
    ///
    /// # Errors
    /// Those of files; `Interrupted` if another process founds one under another lock.
    pub fn found(path: &Path, page: u64, node: Option<u32>, namespace: u64, lock: &Lock) -> io::Result<Self> {
        let memory = rustix::system::sysinfo();
        let pages = memory.totalram as u64 * u64::from(memory.mem_unit) / page;
        let count = pages.min(u64::from(u32::MAX - 1)) as u32;
        let store = Store::new(count, page)?;
        if let Some(node) = node {
            // A preference: where it cannot be told, as in containers that forbid it, or there is no such memory,
            // memory is where its writers run.
            let _ = store.stay_on(count, node);
        }
        let file = replace(&path.join(DOMAIN))?;
        let slots = replace(&path.join(SLOTS))?;
        let header = map_header(&file, page)?;
        let set = |of: Header, value| header[of as usize].store(value, Ordering::SeqCst);
        let mut key = vec![0; page as usize];
        let mut first = [0; 8];
        random(&mut key)?;
        random(&mut first)?;
        file.write_all_at(&key, page)?;
        for name in directory::names(path)? {
            if name.to_str().is_some_and(|name| name.starts_with(INDEX)) {
                // Members of a former incarnation have it mapped. One that stays takes memory until the next founding.
                let _ = std::fs::remove_file(path.join(name));
            }
        }
        // Counted from a random number, so that no two incarnations have an index of the same name.
        set(Header::Generation, new_index(path, u64::from_ne_bytes(first) >> 1)?);
        set(Header::Slots, u64::from(count));
        set(Header::StoreDevice, store.identity().0);
        set(Header::StoreInode, store.identity().1);
        set(Header::Namespace, namespace);
        set(Header::Lock, lock.inode()?);
        set(Header::SlotsFile, inode(&slots));
        fault::point("before a domain is founded");
        set(Header::Magic, MAGIC);
        Ok(Self { identity: identity(&file)?, header, slots: Slots::map(&slots, count)?, store, key })
    }
}

/// The store of an incarnation, by whichever member has it open.
fn handed_on(everybody: &Everybody, store: Identity, page: u64) -> io::Result<Option<Store>> {
    for (pid, descriptor) in everybody.sources(store.1) {
        match Store::of_member(pid, descriptor, store, page) {
            Ok(store) => return Ok(Some(store)),
            // It has ended, and a child of it has its references; or it has closed the store.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => {}
            // A member that may have the store, of which nothing is known.
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// No member frees slots of the store any more, and all join anew: without the lock, since that may have lost its name.
/// To be called before references to the store are given up; a member that frees looks at this after it has found
/// the references ([`crate::domain::Domain::collect`]).
pub fn abandon(header: &Words) {
    header[Header::StoreInode as usize].store(0, Ordering::SeqCst);
}

/// Whether the names in the directory lead to the files of an incarnation, whose lock has an inode, if that is known
/// already.
pub fn is_named(path: &Path, header: &Words, domain: Identity, locked: Option<u64>) -> bool {
    let number = |of: Header| header[of as usize].load(Ordering::SeqCst);
    let leads = |name: &str| path.join(name).symlink_metadata().map_or((0, 0), |found| (found.dev(), found.ino()));
    let lock = locked.unwrap_or_else(|| leads(LOCK).1);
    leads(DOMAIN) == domain && leads(SLOTS) == (domain.0, number(Header::SlotsFile)) && lock == number(Header::Lock)
}

/// The file of the slots of an incarnation.
///
/// # Errors
/// Those of open(2); see [`lost`] if the name leads to another file.
pub fn slots_file(path: &Path, header: &Words) -> io::Result<File> {
    let file = directory::open(&path.join(SLOTS), false).map_err(lost_if_absent)?;
    let own = inode(&file) == header[Header::SlotsFile as usize].load(Ordering::SeqCst);
    if own { Ok(file) } else { Err(lost()) }
}

/// What is told where a member finds that its files were removed.
pub fn lost() -> io::Error {
    let why = "files of the domain were removed while it was in use: the next merge joins it anew";
    io::Error::new(io::ErrorKind::StaleNetworkFileHandle, why)
}

/// The error of using a file or the directory of a domain: [`lost`] if it is not there. Of other files, as of `/proc`,
/// that would be wrong: they are not there at the next try, either.
pub fn lost_if_absent(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::NotFound { lost() } else { error }
}

/// Whether something failed because files of the domain were removed meanwhile: trying again founds the domain anew.
pub fn is_lost(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StaleNetworkFileHandle | io::ErrorKind::Interrupted)
}

/// The pause before another try: each takes the lock of the domain.
const RETRY_PAUSE: Duration = Duration::from_millis(1);

/// Whether to try again after an error, until some time; pauses first.
pub fn may_retry(error: &io::Error, until: Instant) -> bool {
    let may = is_lost(error) && Instant::now() < until;
    if may {
        std::thread::sleep(RETRY_PAUSE);
    }
    may
}

/// Try again while files are removed meanwhile, until some time.
///
/// # Errors
/// The last one.
pub fn retry_lost<T>(until: Instant, mut join: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match join() {
            Err(error) if may_retry(&error, until) => {}
            done => return done,
        }
    }
}

/// Make an empty index, and remove the one of a generation: the next.
///
/// # Errors
/// Those of files.
pub fn new_index(directory: &Path, generation: u64) -> io::Result<u64> {
    let next = generation + 1;
    Index::map(&replace(&index_path(directory, next))?, FIRST_ENTRIES)?;
    let _ = std::fs::remove_file(index_path(directory, generation));
    Ok(next)
}

/// Where the index of a generation is.
pub fn index_path(directory: &Path, generation: u64) -> PathBuf {
    directory.join(format!("{INDEX}{generation}"))
}

/// A new file in the place of one that a process was making when it died, or that belongs to a former incarnation.
///
/// # Errors
/// Those of open(2); `Interrupted` if another process makes one at the same time.
pub fn replace(path: &Path) -> io::Result<File> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    directory::create(path).map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => io::ErrorKind::Interrupted.into(),
        _ => lost_if_absent(error),
    })
}

fn existing(path: &Path) -> io::Result<Option<File>> {
    match directory::open(path, false) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The header, on a page of its own, with another one behind it for the key.
fn map_header(file: &File, page: u64) -> io::Result<Words> {
    let words = 2 * (page / crate::words::WORD) as usize;
    Words::allocate(file, 0..words as u64)?;
    Words::map(file, words)
}

fn identity(file: &File) -> io::Result<Identity> {
    file.metadata().map(|found| (found.dev(), found.ino()))
}

/// 0 is the inode of no file.
fn inode(file: &File) -> u64 {
    file.metadata().map_or(0, |found| found.ino())
}

fn random(bytes: &mut [u8]) -> io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        filled += getrandom(&mut bytes[filled..], GetRandomFlags::empty())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_join_is_tried_again_after_a_pause_while_files_are_removed() {
        const LIMIT: Duration = Duration::from_millis(100);
        let mut tries = 0;
        let result: io::Result<()> = retry_lost(Instant::now() + LIMIT, || {
            tries += 1;
            Err(lost())
        });
        assert!(is_lost(&result.unwrap_err()));
        // A pause is never shorter than asked for; a loaded machine makes fewer tries.
        assert!((2..=1 + LIMIT.as_millis()).contains(&tries), "{tries} tries");
    }

    #[test]
    fn only_absent_files_of_a_domain_are_a_reason_to_try_again() {
        let absent = || io::Error::from(io::ErrorKind::NotFound);
        let mut tries = 0;
        let result: io::Result<()> = retry_lost(Instant::now() + Duration::from_secs(10), || {
            tries += 1;
            Err(absent())
        });
        assert_eq!((tries, result.unwrap_err().kind()), (1, io::ErrorKind::NotFound));
        assert!(is_lost(&lost_if_absent(absent())));
        let denied = lost_if_absent(io::ErrorKind::PermissionDenied.into());
        assert!(!is_lost(&denied));
        // The directory itself is gone.
        let directory = tempfile::tempdir().unwrap().path().to_owned();
        assert!(is_lost(&replace(&directory.join(DOMAIN)).unwrap_err()));
        assert!(is_lost(&Everybody::find(&directory).unwrap_err()));
        assert!(is_lost(&Lock::wait(&directory.join(LOCK), Instant::now() + Duration::from_secs(60)).unwrap_err()));
    }
}
