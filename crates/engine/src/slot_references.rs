//! Store slots that a process may map. References keep the contents of those slots from being freed.
//!
//! A member's references are a file with one bit per slot. The member maps the file shared and locks it with flock(2)
//! through the open file of that mapping, then closes the descriptor at once. So the lock lives exactly as long as the
//! mapping does, in the member and in every process forked from it: the kernel releases such a lock with the last
//! reference to the open file (fs/file_table.c `__fput`), and a mapping is a reference. The lock ends when all these
//! processes have ended, were killed or called exec. A process that can take the lock knows that the file's references
//! are no longer used.
//!
//! References are only ever added. A forked child may map every slot that its parent mapped at the fork, and nothing
//! can ask the child. So to drop references a member creates a new file for the slots that it maps now, and releases
//! the old file, which a child still holds.
//!
//! # Memory model
//! - **bits**: set by the threads of one member, from 0 to 1 only; sequentially consistent.
//! - **`allocated_words`**: raised by the same threads; relaxed. A thread that reads too low a value allocates blocks
//!   again.
//!
//! Other members read the file by read(2) and not by a mapping, behind a fence
//! ([`DomainReferences::referenced_slots`]). An untouched page of the file is a hole to lseek(2). Its first set bit
//! ends the hole, so finding a hole is ordered before that bit, as is reading a 0. A read is no consistent snapshot,
//! but a missing bit was not set when the read began.

use crate::domain_directory;
use crate::incarnation::absent_to_files_removed;
use crate::shared_words::{SharedWords, WORD_BYTES};
use rustix::fs::{FlockOperation, SeekFrom, flock, seek};
use rustix::rand::{GetRandomFlags, getrandom};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Prefix of the names of these files. The inode of the store follows, then the PID, its descriptor of the store, and a
/// random number.
pub const REFERENCES_PREFIX: &str = "member-";

/// Number of words that get blocks at a time: one page.
const WORDS_PER_ALLOCATION: u64 = 512;

/// The references of this process. Released when dropped.
#[derive(Debug)]
pub struct SlotReferences {
    /// Always `Some`, until `keep_until_exit`.
    words: Option<SharedWords>,
    path: PathBuf,
    /// Number of words that have blocks.
    allocated_words: AtomicU64,
}

impl SlotReferences {
    /// Create an empty set of references to `slot_count` slots of a store, which this process has open as `descriptor`.
    /// Requires the domain's lock, so that no process takes a file that is not locked yet for a dead one.
    ///
    /// # Errors
    /// Those of open(2), flock(2) and mmap(2); then no file remains.
    pub fn new(directory: &Path, slot_count: u32, store_inode: u64, descriptor: u32) -> io::Result<Self> {
        let mut random = [0; 8];
        getrandom(&mut random, GetRandomFlags::empty())?;
        let (pid, random) = (std::process::id(), u64::from_ne_bytes(random));
        let path = directory.join(format!("{REFERENCES_PREFIX}{store_inode}-{pid}-{descriptor}-{random:016x}"));
        let file = domain_directory::open_file(&path, true).map_err(absent_to_files_removed)?;
        let mapped = flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(io::Error::from);
        let mapped = mapped.and_then(|()| SharedWords::map(&file, (slot_count as usize).div_ceil(64)));
        let words = mapped.inspect_err(|_| {
            let _ = std::fs::remove_file(&path);
        })?;
        Ok(Self { words: Some(words), path, allocated_words: AtomicU64::new(0) })
    }

    fn mapped_words(&self) -> &SharedWords {
        self.words.as_ref().expect("references are used after keep_until_exit")
    }

    /// Release the references now.
    pub fn drop_now(&mut self) {
        self.words = None;
    }

    /// Keep the references until the process and all processes forked from it have ended.
    pub fn keep_until_exit(&mut self) {
        if let Some(words) = self.words.take() {
            words.leak_mapping();
        }
    }

    /// Add references to slots. Steps that other members take after they saw a reference are ordered after it.
    ///
    /// # Errors
    /// `ENOSPC` if there is no memory for them, those of open(2).
    pub fn add(&self, slots: impl IntoIterator<Item = u32>) -> io::Result<()> {
        for slot in slots {
            let word = u64::from(slot) / 64;
            if word >= self.allocated_words.load(Ordering::Relaxed) {
                let end_word = (word + 1).next_multiple_of(WORDS_PER_ALLOCATION).min(self.mapped_words().len() as u64);
                let file = domain_directory::open_file(&self.path, false).map_err(absent_to_files_removed)?;
                SharedWords::allocate_blocks(&file, 0..end_word)?;
                self.allocated_words.fetch_max(end_word, Ordering::Relaxed);
            }
            self.mapped_words()[word as usize].fetch_or(1 << (slot % 64), Ordering::SeqCst);
        }
        Ok(())
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the file still exists under its name.
    pub fn is_listed(&self) -> bool {
        self.path.exists()
    }

    /// Number of referenced slots.
    pub fn count(&self) -> u64 {
        let allocated = self.allocated_words.load(Ordering::Relaxed) as usize;
        self.mapped_words()[..allocated].iter().map(|word| u64::from(word.load(Ordering::Relaxed).count_ones())).sum()
    }
}

/// Whether a live process holds the references in a file.
///
/// # Errors
/// Those of open(2) and flock(2).
pub fn has_live_process(path: &Path) -> io::Result<bool> {
    match flock(domain_directory::open_file(path, false)?, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(false),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

/// Whether a domain's directory has references of a live process. Stops at the first. Requires the domain's lock.
///
/// # Errors
/// Those of reading the directory and of [`has_live_process`].
pub fn has_any_live_member(directory: &Path) -> io::Result<bool> {
    for name in domain_directory::list_names(directory)? {
        if name.to_str().is_some_and(|name| name.starts_with(REFERENCES_PREFIX)) {
            match has_live_process(&directory.join(name)) {
                Ok(false) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                is_alive => return is_alive,
            }
        }
    }
    Ok(false)
}

/// The references of all members of a domain.
#[derive(Debug)]
pub struct DomainReferences {
    /// Files of live members, each with the inode of its store.
    files: Vec<(u64, File)>,
    /// Inode of the store, PID and descriptor, as in the file names.
    store_sources: Vec<(u64, u32, u32)>,
    /// Files of dead members, to be removed, with the inode of the store.
    dead_files: Vec<(u64, PathBuf)>,
}

impl DomainReferences {
    /// Find the references in a domain's directory. Requires the domain's lock.
    ///
    /// # Errors
    /// Those of reading the directory and of open(2): if one file cannot be checked, the result would be incomplete.
    pub fn find(directory: &Path) -> io::Result<Self> {
        let (mut files, mut store_sources, mut dead_files) = (Vec::new(), Vec::new(), Vec::new());
        for name in domain_directory::list_names(directory).map_err(absent_to_files_removed)? {
            let path = directory.join(&name);
            let Some(name) = name.to_str().and_then(|name| name.strip_prefix(REFERENCES_PREFIX)) else { continue };
            let file = match domain_directory::open_file(&path, false) {
                // It was removed meanwhile; the member count reveals that.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                file => file?,
            };
            let numbers: Vec<u64> = name.split('-').map_while(|text| text.parse().ok()).collect();
            let field = |at: usize| numbers.get(at).copied().unwrap_or(0);
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => dead_files.push((field(0), path)),
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    files.push((field(0), file));
                    store_sources.push((field(0), field(1) as u32, field(2) as u32));
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Self { files, store_sources, dead_files })
    }

    /// Number of live members, of any store.
    pub fn member_count(&self) -> usize {
        self.files.len()
    }

    /// PIDs and descriptors of the members that have opened a store.
    pub fn store_sources(&self, store_inode: u64) -> impl Iterator<Item = (u32, u32)> {
        self.store_sources
            .iter()
            .filter(move |source| source.0 == store_inode)
            .map(|&(_, pid, descriptor)| (pid, descriptor))
    }

    /// Number of files for a store, including those of dead members.
    pub fn count_files(&self, store_inode: u64) -> usize {
        self.files.iter().filter(|file| file.0 == store_inode).count()
            + self.dead_files.iter().filter(|file| file.0 == store_inode).count()
    }

    /// Remove the files of dead members. Returns how many files for the given store no longer exist.
    pub fn remove_dead_files(&mut self, store_inode: u64) -> usize {
        let is_removed = |path: &PathBuf| match std::fs::remove_file(path) {
            Ok(()) => true,
            // A file that cannot be removed now is found again later.
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        };
        self.dead_files
            .drain(..)
            .filter(|(_, path)| is_removed(path))
            .filter(|(inode, _)| *inode == store_inode)
            .count()
    }

    /// Slots of a store that any member refers to.
    ///
    /// # Errors
    /// Those of lseek(2) and read(2).
    pub fn referenced_slots(&self, store_inode: u64) -> io::Result<SlotSet> {
        // A member that refers to a slot after this fence sees all earlier changes of the index.
        std::sync::atomic::fence(Ordering::SeqCst);
        let mut slots = SlotSet::default();
        for (_, file) in self.files.iter().filter(|(inode, _)| *inode == store_inode) {
            let length = file.metadata()?.len();
            let mut position = 0;
            while position < length {
                let start = match seek(file, SeekFrom::Data(position)) {
                    Ok(start) => start,
                    Err(rustix::io::Errno::NXIO) => break,
                    Err(error) => return Err(error.into()),
                };
                let end = seek(file, SeekFrom::Hole(start))?.min(length);
                let mut bytes = vec![0; (end - start) as usize];
                file.read_exact_at(&mut bytes, start)?;
                slots.add_words(start / WORD_BYTES, &bytes);
                position = end;
            }
        }
        Ok(slots)
    }
}

/// A set of slots.
#[derive(Clone, Debug, Default)]
pub struct SlotSet(Vec<u64>);

impl SlotSet {
    /// Whether the set contains a slot.
    pub fn contains(&self, slot: u32) -> bool {
        self.0.get(slot as usize / 64).is_some_and(|word| word >> (slot % 64) & 1 == 1)
    }

    /// Add slots.
    pub fn extend(&mut self, slots: impl IntoIterator<Item = u32>) {
        for slot in slots {
            let word = slot as usize / 64;
            if self.0.len() <= word {
                self.0.resize(word + 1, 0);
            }
            self.0[word] |= 1 << (slot % 64);
        }
    }

    /// The slots in the set, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        let slots = |word: usize| (0..64).map(move |bit| word as u32 * 64 + bit);
        (0..self.0.len()).flat_map(slots).filter(|&slot| self.contains(slot))
    }

    fn add_words(&mut self, first_word: u64, mut bytes: &[u8]) {
        let mut word = [0; WORD_BYTES as usize];
        let mut index = first_word as usize;
        while bytes.read_exact(&mut word).is_ok() {
            let word = u64::from_ne_bytes(word);
            if word != 0 {
                if self.0.len() <= index {
                    self.0.resize(index + 1, 0);
                }
                self.0[index] |= word;
            }
            index += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find_members_and_slots(directory: &Path) -> (usize, Vec<u32>) {
        let mut references = DomainReferences::find(directory).unwrap();
        references.remove_dead_files(1);
        let slots = references.referenced_slots(1).unwrap();
        (references.member_count(), (0..100_000).filter(|&slot| slots.contains(slot)).collect())
    }

    #[test]
    fn references_live_as_long_as_their_member() {
        let directory = tempfile::tempdir().unwrap();
        let first = SlotReferences::new(directory.path(), 100_000, 1, 3).unwrap();
        let second = SlotReferences::new(directory.path(), 100_000, 1, 4).unwrap();
        let former = SlotReferences::new(directory.path(), 100_000, 2, 5).unwrap();
        former.add([7]).unwrap();
        assert!(former.is_listed());
        assert_eq!(find_members_and_slots(directory.path()), (3, Vec::new()), "references to another store");
        drop(former);
        let mut sources: Vec<_> = DomainReferences::find(directory.path()).unwrap().store_sources(1).collect();
        sources.sort_unstable();
        assert_eq!(sources, [(std::process::id(), 3), (std::process::id(), 4)]);
        assert_eq!(find_members_and_slots(directory.path()), (2, Vec::new()));
        first.add([0, 5, 63, 64]).unwrap();
        second.add([5, 99_999]).unwrap();
        assert_eq!(first.count(), 4);
        assert_eq!(find_members_and_slots(directory.path()), (2, vec![0, 5, 63, 64, 99_999]));
        drop(first);
        assert_eq!(find_members_and_slots(directory.path()), (1, vec![5, 99_999]));
        drop(second);
        assert_eq!(find_members_and_slots(directory.path()), (0, Vec::new()));
        assert_eq!(directory.path().read_dir().unwrap().count(), 0);
    }
}
