//! Which slots of the store a process may map: what keeps contents from being taken away under it.
//!
//! A member's references are a file of one bit a slot, mapped shared by the member, and locked by flock(2) through the
//! open file of that mapping, whose descriptor is closed at once. So the lock lives exactly as long as the mapping
//! does: in the member, and in every process that was forked of it, however (the kernel releases such a lock with the
//! last reference to the open file, fs/file_table.c `__fput`; a mapping is a reference). It ends when all of those have
//! ended, were killed or called exec. Whoever can take the lock knows that nobody refers to what the file says.
//!
//! References are only ever added. A process that forked may map whatever it did when it forked, and the child cannot
//! be asked. So to drop references a member makes a new file of what it maps now, and lets go of the old one, which a
//! child still holds.
//!
//! # Memory model
//! - **bits**: written by the threads of one member, from 0 to 1 only; sequentially consistent.
//! - **`backed`**: written by the same, upwards only; relaxed. Who sees too little gives blocks once more.
//!
//! Others read the file by read(2) and not by a mapping, behind a fence ([`DomainReferences::referenced_slots`]). A page of it that nobody
//! has touched is a hole to lseek(2). It is no more once its first bit is set, so who finds a hole comes before that
//! bit in the order, as who finds a 0. What is read is no state of one moment, but what is missing in it was not there
//! when the reading began.

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

/// How the names of these files begin; the inode of the store that they are about follows, the process, its descriptor
/// of the store, and a random number.
pub const REFERENCES_PREFIX: &str = "member-";

/// So many words are given blocks at once: a page of them.
const WORDS_PER_ALLOCATION: u64 = 512;

/// The references of this process. Given up when dropped.
#[derive(Debug)]
pub struct SlotReferences {
    /// Always there, until they are kept.
    words: Option<SharedWords>,
    path: PathBuf,
    /// So many words have blocks.
    allocated_words: AtomicU64,
}

impl SlotReferences {
    /// New ones, none yet, to one of so many slots of a store, which this process has open by a descriptor. Under the
    /// domain's lock, so that nobody takes a file that is not locked yet for one that no longer is.
    ///
    /// # Errors
    /// Those of open(2), flock(2) and mmap(2); then there is no file.
    pub fn new(directory: &Path, slot_count: u32, store_inode: u64, descriptor: u32) -> io::Result<Self> {
        let mut random = [0; 8];
        getrandom(&mut random, GetRandomFlags::empty())?;
        let (process, random) = (std::process::id(), u64::from_ne_bytes(random));
        let path = directory.join(format!("{REFERENCES_PREFIX}{store_inode}-{process}-{descriptor}-{random:016x}"));
        let file = domain_directory::open_file(&path, true).map_err(absent_to_files_removed)?;
        let made = flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(io::Error::from);
        let made = made.and_then(|()| SharedWords::map(&file, (slot_count as usize).div_ceil(64)));
        let words = made.inspect_err(|_| {
            let _ = std::fs::remove_file(&path);
        })?;
        Ok(Self { words: Some(words), path, allocated_words: AtomicU64::new(0) })
    }

    fn mapped_words(&self) -> &SharedWords {
        self.words.as_ref().expect("until they are kept")
    }

    /// Give them up now.
    pub fn drop_now(&mut self) {
        self.words = None;
    }

    /// Keep them until the process and all that it forked have ended.
    pub fn keep_until_exit(&mut self) {
        if let Some(words) = self.words.take() {
            words.leak_mapping();
        }
    }

    /// Refer to slots. What others do after they saw these is ordered after it.
    ///
    /// # Errors
    /// `ENOSPC` where there is no memory for it, those of open(2).
    pub fn add(&self, slots: impl IntoIterator<Item = u32>) -> io::Result<()> {
        for slot in slots {
            let word = u64::from(slot) / 64;
            if word >= self.allocated_words.load(Ordering::Relaxed) {
                let upto = (word + 1).next_multiple_of(WORDS_PER_ALLOCATION).min(self.mapped_words().len() as u64);
                let file = domain_directory::open_file(&self.path, false).map_err(absent_to_files_removed)?;
                SharedWords::allocate_blocks(&file, 0..upto)?;
                self.allocated_words.fetch_max(upto, Ordering::Relaxed);
            }
            self.mapped_words()[word as usize].fetch_or(1 << (slot % 64), Ordering::SeqCst);
        }
        Ok(())
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the file is still where others look for it.
    pub fn is_listed(&self) -> bool {
        self.path.exists()
    }

    /// How many slots are referred to.
    pub fn count(&self) -> u64 {
        let backed = self.allocated_words.load(Ordering::Relaxed) as usize;
        self.mapped_words()[..backed].iter().map(|word| u64::from(word.load(Ordering::Relaxed).count_ones())).sum()
    }
}

/// Whether a process has the references that are in a file.
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

/// Whether a member has references in a domain's directory. Looks no further than the first. Under its lock.
///
/// # Errors
/// Those of reading the directory and of [`has_live_process`].
pub fn has_any_live_member(directory: &Path) -> io::Result<bool> {
    for name in domain_directory::list_names(directory)? {
        if name.to_str().is_some_and(|name| name.starts_with(REFERENCES_PREFIX)) {
            match has_live_process(&directory.join(name)) {
                Ok(false) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                held => return held,
            }
        }
    }
    Ok(false)
}

/// The references of all members that there are.
#[derive(Debug)]
pub struct DomainReferences {
    /// Each with the inode of the store that it is about.
    files: Vec<(u64, File)>,
    /// Stores, processes and their descriptors of these, as their files are called.
    store_sources: Vec<(u64, u32, u32)>,
    /// Files of members that are no more, to be removed, with the inode of the store.
    dead_files: Vec<(u64, PathBuf)>,
}

impl DomainReferences {
    /// Found in a domain's directory, under its lock.
    ///
    /// # Errors
    /// Those of reading the directory and of open(2): where one cannot be asked, nothing is known of all.
    pub fn find(directory: &Path) -> io::Result<Self> {
        let (mut files, mut sources, mut gone) = (Vec::new(), Vec::new(), Vec::new());
        for name in domain_directory::list_names(directory).map_err(absent_to_files_removed)? {
            let path = directory.join(&name);
            let Some(name) = name.to_str().and_then(|name| name.strip_prefix(REFERENCES_PREFIX)) else { continue };
            let file = match domain_directory::open_file(&path, false) {
                // It was removed meanwhile, which its number tells.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                file => file?,
            };
            let numbers: Vec<u64> = name.split('-').map_while(|number| number.parse().ok()).collect();
            let number = |at: usize| numbers.get(at).copied().unwrap_or(0);
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => gone.push((number(0), path)),
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    files.push((number(0), file));
                    sources.push((number(0), number(1) as u32, number(2) as u32));
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Self { files, store_sources: sources, dead_files: gone })
    }

    /// How many members there are, of any store.
    pub fn member_count(&self) -> usize {
        self.files.len()
    }

    /// Processes that have had a store open by a descriptor.
    pub fn store_sources(&self, store_inode: u64) -> impl Iterator<Item = (u32, u32)> {
        self.store_sources
            .iter()
            .filter(move |of| of.0 == store_inode)
            .map(|&(_, process, descriptor)| (process, descriptor))
    }

    /// How many files there are for a store, of members that are no more, too.
    pub fn count_files(&self, store_inode: u64) -> usize {
        self.files.iter().filter(|of| of.0 == store_inode).count()
            + self.dead_files.iter().filter(|of| of.0 == store_inode).count()
    }

    /// Remove the files of members that are no more; how many of those for a store are no longer there.
    pub fn remove_dead_files(&mut self, store_inode: u64) -> usize {
        let is_removed = |path: &PathBuf| match std::fs::remove_file(path) {
            Ok(()) => true,
            // One that cannot be removed now is found again.
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        };
        self.dead_files.drain(..).filter(|(_, path)| is_removed(path)).filter(|(of, _)| *of == store_inode).count()
    }

    /// One bit for each slot of a store that anybody refers to, as far as there are any.
    ///
    /// # Errors
    /// Those of lseek(2) and read(2).
    pub fn referenced_slots(&self, store_inode: u64) -> io::Result<SlotSet> {
        // What was changed in the index before is seen by whoever refers to a slot after this.
        std::sync::atomic::fence(Ordering::SeqCst);
        let mut all = SlotSet::default();
        for (_, file) in self.files.iter().filter(|(of, _)| *of == store_inode) {
            let length = file.metadata()?.len();
            let mut at = 0;
            while at < length {
                let start = match seek(file, SeekFrom::Data(at)) {
                    Ok(start) => start,
                    Err(rustix::io::Errno::NXIO) => break,
                    Err(error) => return Err(error.into()),
                };
                let end = seek(file, SeekFrom::Hole(start))?.min(length);
                let mut bytes = vec![0; (end - start) as usize];
                file.read_exact_at(&mut bytes, start)?;
                all.add_words(start / WORD_BYTES, &bytes);
                at = end;
            }
        }
        Ok(all)
    }
}

/// A set of slots.
#[derive(Clone, Debug, Default)]
pub struct SlotSet(Vec<u64>);

impl SlotSet {
    /// Whether a slot is one of them.
    pub fn contains(&self, slot: u32) -> bool {
        self.0.get(slot as usize / 64).is_some_and(|word| word >> (slot % 64) & 1 == 1)
    }

    /// With more.
    pub fn extend(&mut self, slots: impl IntoIterator<Item = u32>) {
        for slot in slots {
            let word = slot as usize / 64;
            if self.0.len() <= word {
                self.0.resize(word + 1, 0);
            }
            self.0[word] |= 1 << (slot % 64);
        }
    }

    /// Those that are in it, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        let slots = |word: usize| (0..64).map(move |bit| word as u32 * 64 + bit);
        (0..self.0.len()).flat_map(slots).filter(|&slot| self.contains(slot))
    }

    fn add_words(&mut self, first: u64, mut bytes: &[u8]) {
        let mut word = [0; WORD_BYTES as usize];
        let mut at = first as usize;
        while bytes.read_exact(&mut word).is_ok() {
            let word = u64::from_ne_bytes(word);
            if word != 0 {
                if self.0.len() <= at {
                    self.0.resize(at + 1, 0);
                }
                self.0[at] |= word;
            }
            at += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find_members_and_slots(directory: &Path) -> (usize, Vec<u32>) {
        let mut everybody = DomainReferences::find(directory).unwrap();
        everybody.remove_dead_files(1);
        let all = everybody.referenced_slots(1).unwrap();
        (everybody.member_count(), (0..100_000).filter(|&slot| all.contains(slot)).collect())
    }

    #[test]
    fn references_live_as_long_as_their_member() {
        let directory = tempfile::tempdir().unwrap();
        let first = SlotReferences::new(directory.path(), 100_000, 1, 3).unwrap();
        let second = SlotReferences::new(directory.path(), 100_000, 1, 4).unwrap();
        let former = SlotReferences::new(directory.path(), 100_000, 2, 5).unwrap();
        former.add([7]).unwrap();
        assert!(former.is_listed());
        assert_eq!(find_members_and_slots(directory.path()), (3, Vec::new()), "of another store");
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
