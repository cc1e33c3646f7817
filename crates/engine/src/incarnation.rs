//! One incarnation of a domain: the shared files that belong together, identified by their inodes.
//!
//! Any file of the directory may be removed at any time: cleaners of `/dev/shm` do that. So names never decide which
//! files a member shares. An incarnation is one inode of `domain`. That file names by inode the `lock` that guards it,
//! its `slots` and its store. Index files have names that no other incarnation uses, and members' files have the inode
//! of the store in their names.
//!
//! - A process that joins uses an incarnation only if all these names lead to the inodes in `domain`, and it can open
//!   the store through a member. Otherwise it creates another incarnation, in which every file and the store are new.
//! - A member changes shared state only under the lock of its own incarnation ([`is_current`]). If any name leads
//!   elsewhere or nowhere, it joins again.
//! - So two incarnations share only the directory, and at most one thread changes an incarnation at a time: once the
//!   name of its lock is gone, no other thread can take that lock.
//! - A member that moves to another incarnation may still map the store of its former one, and releases its references
//!   to that. Before the release it abandons the former incarnation ([`mark_abandoned`]): the remaining members free no
//!   more slots, and join again, too. The memory of the former store is freed once no process maps it: merges copy
//!   pages that map it into ordinary memory ([`crate::survey::MemorySurvey::drain_former_store`]).
//!
//! The number of members' files reveals removed ones ([`HeaderField::MemberFiles`]): it is raised before a file is
//! made, and lowered after one was removed, so it is never too low.

use crate::content_index::ContentIndex;
use crate::domain::{DOMAIN_MAGIC, HeaderField};
use crate::domain_directory;
use crate::domain_lock::DomainLock;
use crate::shared_words::SharedWords;
use crate::slot_references::DomainReferences;
use crate::store::{ContentStore, FileIdentity, SlotBitmap};
use pagefold_sys::fault;
use rustix::rand::{GetRandomFlags, getrandom};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The header of a domain.
pub const DOMAIN_FILE: &str = "domain";
/// File that members lock.
pub const LOCK_FILE: &str = "lock";
/// Bitmap of the taken slots.
pub const SLOTS_FILE: &str = "slots";
/// Prefix of the names of indexes; the generation follows.
pub const INDEX_PREFIX: &str = "index-";

/// Entries of the first index: 64 KiB, for two thousand contents.
pub const FIRST_INDEX_ENTRIES: usize = 4096;

/// The files of one incarnation, as this process has them.
#[derive(Debug)]
pub struct DomainIncarnation {
    pub header: SharedWords,
    /// Of the file `domain`.
    pub identity: FileIdentity,
    pub slots: SlotBitmap,
    pub store: ContentStore,
    /// Key of fingerprints.
    pub fingerprint_key: Vec<u8>,
}

impl DomainIncarnation {
    /// Find the incarnation that the names in a directory lead to, if it is complete and a member has its store open.
    /// An incomplete one is abandoned. Requires the lock.
    ///
    /// # Errors
    /// Those of files; `InvalidData` if another version of pagefold made the directory; `Unsupported` if its members
    /// are in another PID namespace than this process.
    pub fn find(
        path: &Path,
        page_bytes: u64,
        namespace: u64,
        lock: &DomainLock,
        references: &DomainReferences,
    ) -> io::Result<Option<Self>> {
        let Some(file) = open_existing(&path.join(DOMAIN_FILE))? else { return Ok(None) };
        let header = map_header(&file, page_bytes)?;
        let read_field = |field: HeaderField| header[field as usize].load(Ordering::SeqCst);
        match read_field(HeaderField::Magic) {
            DOMAIN_MAGIC => {}
            // Its creator died before it was complete.
            0 => return Ok(None),
            _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "made by another version of pagefold")),
        }
        if references.member_count() > 0 && read_field(HeaderField::PidNamespace) != namespace {
            let message =
                "its members are in another PID namespace: share that, or set PAGEFOLD_RUNTIME to another directory";
            return Err(io::Error::new(io::ErrorKind::Unsupported, message));
        }
        let files = (|| {
            if read_field(HeaderField::LockInode) != lock.inode()? {
                return Ok(None);
            }
            let Some(slots) = open_existing(&path.join(SLOTS_FILE))?
                .filter(|file| inode(file) == read_field(HeaderField::SlotsInode))
            else {
                return Ok(None);
            };
            let slots = SlotBitmap::map(&slots, read_field(HeaderField::SlotCount) as u32)?;
            let store = (read_field(HeaderField::StoreDevice), read_field(HeaderField::StoreInode));
            Ok(open_store_of_member(references, store, page_bytes)?.map(|store| (slots, store)))
        })();
        let files: io::Result<Option<(SlotBitmap, ContentStore)>> = files;
        let Some((slots, store)) = files? else {
            mark_abandoned(&header);
            return Ok(None);
        };
        let mut key = vec![0; page_bytes as usize];
        file.read_exact_at(&mut key, page_bytes)?;
        Ok(Some(Self { identity: file_identity(&file)?, header, slots, store, fingerprint_key: key }))
    }

    /// Create an incarnation. All its files are new, and files of a former one lose their names. Its store prefers
    /// memory of `node`, if given. Requires the lock.
    ///
    /// # Errors
    /// Those of files; `Interrupted` if another process creates one under another lock.
    pub fn create(
        path: &Path,
        page_bytes: u64,
        node: Option<u32>,
        namespace: u64,
        lock: &DomainLock,
    ) -> io::Result<Self> {
        let memory = rustix::system::sysinfo();
        let pages = memory.totalram as u64 * u64::from(memory.mem_unit) / page_bytes;
        let slot_count = pages.min(u64::from(u32::MAX - 1)) as u32;
        let store = ContentStore::new(slot_count, page_bytes)?;
        if let Some(node) = node {
            // A preference only. If it fails, as in containers that forbid it, the kernel allocates memory where its
            // writers run.
            let _ = store.prefer_node(slot_count, node);
        }
        let file = create_replacing(&path.join(DOMAIN_FILE))?;
        let slots = create_replacing(&path.join(SLOTS_FILE))?;
        let header = map_header(&file, page_bytes)?;
        let write_field = |field: HeaderField, value| header[field as usize].store(value, Ordering::SeqCst);
        let mut key = vec![0; page_bytes as usize];
        let mut random_generation = [0; 8];
        fill_random(&mut key)?;
        fill_random(&mut random_generation)?;
        file.write_all_at(&key, page_bytes)?;
        for name in domain_directory::list_names(path)? {
            if name.to_str().is_some_and(|name| name.starts_with(INDEX_PREFIX)) {
                // Members of a former incarnation have it mapped. One that cannot be removed uses memory until the next
                // incarnation is created.
                let _ = std::fs::remove_file(path.join(name));
            }
        }
        // Counts from a random number, so that no two incarnations have an index of the same name.
        write_field(HeaderField::Generation, create_index(path, u64::from_ne_bytes(random_generation) >> 1)?);
        write_field(HeaderField::SlotCount, u64::from(slot_count));
        write_field(HeaderField::StoreDevice, store.identity().0);
        write_field(HeaderField::StoreInode, store.identity().1);
        write_field(HeaderField::PidNamespace, namespace);
        write_field(HeaderField::LockInode, lock.inode()?);
        write_field(HeaderField::SlotsInode, inode(&slots));
        fault::point("before a domain is created");
        write_field(HeaderField::Magic, DOMAIN_MAGIC);
        Ok(Self {
            identity: file_identity(&file)?,
            header,
            slots: SlotBitmap::map(&slots, slot_count)?,
            store,
            fingerprint_key: key,
        })
    }
}

/// Open the store of an incarnation through any member that has it open.
fn open_store_of_member(
    references: &DomainReferences,
    store: FileIdentity,
    page_bytes: u64,
) -> io::Result<Option<ContentStore>> {
    for (pid, descriptor) in references.store_sources(store.1) {
        match ContentStore::open_from_member(pid, descriptor, store, page_bytes) {
            Ok(store) => return Ok(Some(store)),
            // The member has ended and its child holds its references, or it has closed the store.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => {}
            // This member may have the store, but it cannot be examined.
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// Mark an incarnation as abandoned: no member frees slots of its store any more, and all members join again. Works
/// without the lock, since that may have lost its name. Call this before releasing references to the store; a member
/// that frees slots checks the mark after it has found the references
/// ([`crate::domain::JoinedDomain::collect_unreferenced_slots`]).
pub fn mark_abandoned(header: &SharedWords) {
    header[HeaderField::StoreInode as usize].store(0, Ordering::SeqCst);
}

/// Whether the names in the directory lead to the files of an incarnation. `lock_inode` is the inode of its lock, if
/// known already.
pub fn is_current(path: &Path, header: &SharedWords, domain: FileIdentity, lock_inode: Option<u64>) -> bool {
    let read_field = |field: HeaderField| header[field as usize].load(Ordering::SeqCst);
    let identity_at =
        |name: &str| path.join(name).symlink_metadata().map_or((0, 0), |metadata| (metadata.dev(), metadata.ino()));
    let lock = lock_inode.unwrap_or_else(|| identity_at(LOCK_FILE).1);
    identity_at(DOMAIN_FILE) == domain
        && identity_at(SLOTS_FILE) == (domain.0, read_field(HeaderField::SlotsInode))
        && lock == read_field(HeaderField::LockInode)
}

/// Open the slots file of an incarnation.
///
/// # Errors
/// Those of open(2); see [`files_removed_error`] if the name leads to another file.
pub fn open_slots_file(path: &Path, header: &SharedWords) -> io::Result<File> {
    let file = domain_directory::open_file(&path.join(SLOTS_FILE), false).map_err(absent_to_files_removed)?;
    let is_own = inode(&file) == header[HeaderField::SlotsInode as usize].load(Ordering::SeqCst);
    if is_own { Ok(file) } else { Err(files_removed_error()) }
}

/// The error of a member that finds that its files were removed.
pub fn files_removed_error() -> io::Error {
    let message = "files of the domain were removed while it was in use: the next merge joins it again";
    io::Error::new(io::ErrorKind::StaleNetworkFileHandle, message)
}

/// Convert the error of using a file or the directory of a domain: `NotFound` becomes [`files_removed_error`]. Do not
/// use this for other files, such as those of `/proc`: a retry would not find them either.
pub fn absent_to_files_removed(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::NotFound { files_removed_error() } else { error }
}

/// Whether an operation failed because files of the domain were removed meanwhile: a retry creates the domain again.
pub fn is_files_removed(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StaleNetworkFileHandle | io::ErrorKind::Interrupted)
}

/// Interval between tries: each takes the lock of the domain.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// Whether to retry after an error, until the deadline. Sleeps first.
pub fn wait_to_retry(error: &io::Error, deadline: Instant) -> bool {
    let may_retry = is_files_removed(error) && Instant::now() < deadline;
    if may_retry {
        std::thread::sleep(RETRY_INTERVAL);
    }
    may_retry
}

/// Retry while files are removed meanwhile, until the deadline.
///
/// # Errors
/// The last one.
pub fn retry_while_removed<T>(deadline: Instant, mut join: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match join() {
            Err(error) if wait_to_retry(&error, deadline) => {}
            result => return result,
        }
    }
}

/// Create the empty index that follows a generation, and remove the index of that generation. Returns the new
/// generation.
///
/// # Errors
/// Those of files.
pub fn create_index(directory: &Path, generation: u64) -> io::Result<u64> {
    let new_generation = generation + 1;
    ContentIndex::map(&create_replacing(&index_path(directory, new_generation))?, FIRST_INDEX_ENTRIES)?;
    let _ = std::fs::remove_file(index_path(directory, generation));
    Ok(new_generation)
}

/// Path of the index of a generation.
pub fn index_path(directory: &Path, generation: u64) -> PathBuf {
    directory.join(format!("{INDEX_PREFIX}{generation}"))
}

/// Create a file, replacing one that a dead process left unfinished, or one of a former incarnation.
///
/// # Errors
/// Those of open(2); `Interrupted` if another process creates it at the same time.
pub fn create_replacing(path: &Path) -> io::Result<File> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    domain_directory::create_new_file(path).map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => io::ErrorKind::Interrupted.into(),
        _ => absent_to_files_removed(error),
    })
}

fn open_existing(path: &Path) -> io::Result<Option<File>> {
    match domain_directory::open_file(path, false) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Map the header, which has a page of its own. The key is in the next page.
fn map_header(file: &File, page_bytes: u64) -> io::Result<SharedWords> {
    let words = 2 * (page_bytes / crate::shared_words::WORD_BYTES) as usize;
    SharedWords::allocate_blocks(file, 0..words as u64)?;
    SharedWords::map(file, words)
}

fn file_identity(file: &File) -> io::Result<FileIdentity> {
    file.metadata().map(|metadata| (metadata.dev(), metadata.ino()))
}

/// Returns 0 on failure: no file has that inode.
fn inode(file: &File) -> u64 {
    file.metadata().map_or(0, |metadata| metadata.ino())
}

fn fill_random(bytes: &mut [u8]) -> io::Result<()> {
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
    fn join_is_retried_while_files_are_removed() {
        const RETRY_TIME: Duration = Duration::from_millis(100);
        let mut tries = 0;
        let result: io::Result<()> = retry_while_removed(Instant::now() + RETRY_TIME, || {
            tries += 1;
            Err(files_removed_error())
        });
        assert!(is_files_removed(&result.unwrap_err()));
        // A pause is never shorter than requested; a loaded machine makes fewer tries.
        assert!((2..=1 + RETRY_TIME.as_millis()).contains(&tries), "{tries} tries");
    }

    #[test]
    fn only_absent_domain_files_are_retried() {
        let absent = || io::Error::from(io::ErrorKind::NotFound);
        let mut tries = 0;
        let result: io::Result<()> = retry_while_removed(Instant::now() + Duration::from_secs(10), || {
            tries += 1;
            Err(absent())
        });
        assert_eq!((tries, result.unwrap_err().kind()), (1, io::ErrorKind::NotFound));
        assert!(is_files_removed(&absent_to_files_removed(absent())));
        let denied = absent_to_files_removed(io::ErrorKind::PermissionDenied.into());
        assert!(!is_files_removed(&denied));
        // The directory itself is gone.
        let directory = tempfile::tempdir().unwrap().path().to_owned();
        assert!(is_files_removed(&create_replacing(&directory.join(DOMAIN_FILE)).unwrap_err()));
        assert!(is_files_removed(&DomainReferences::find(&directory).unwrap_err()));
        assert!(is_files_removed(
            &DomainLock::acquire(&directory.join(LOCK_FILE), Instant::now() + Duration::from_secs(60)).unwrap_err()
        ));
    }
}
