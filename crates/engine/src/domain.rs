//! What the members of a domain share, as one of them has it: the store, the index of its contents, and who refers to
//! what. ARCHITECTURE of a domain's directory:
//!
//! | file | holds | changed |
//! |---|---|---|
//! | `lock` | nothing; who locks it changes what follows | |
//! | `domain` | a page of numbers ([`Header`]) and the key of fingerprints | under the lock |
//! | `slots` | one bit for each slot of the store that is taken | under the lock |
//! | `index-N` | contents ([`crate::index`]); N is the generation | by atomic operations |
//! | `member-*` | slots that a member refers to ([`crate::references`]) | by its member |
//! | `status-*` | what a member tells of itself ([`crate::record`]) | by its member |
//!
//! # Why no content goes away under anybody
//! A member that wants to map a slot first adds it to its references, then checks that the index is still the one that
//! it looked into, then that the entry still says that slot and is not condemned. Who frees slots ([`Domain::collect`])
//! first condemns entries, then looks at everybody's references, and frees only what nobody refers to. All these are
//! sequentially consistent, so either the member sees the entry condemned, or its reference is seen. An index that
//! replaces another is announced before anything is condemned in it. `protocol` checks this in all orders of steps.
//!
//! # Memory model
//! - **generation**: written with the lock; sequentially consistent. A reader may see that of an index which was the
//!   present one. If it still is after a slot was referred to, whoever condemns in a later one sees the reference.
//! - **other numbers of the header**, but for `Passes` and `Moment`: written with the lock; sequentially consistent.
//!   Who has the lock sees the last ones; who has not may see a store that others have left since, which is noticed
//!   under the lock.
//! - **`Passes`**: counted by every member; relaxed. It says when to collect, and not what.
//! - **`Moment`**: set by every member, by compare and exchange; relaxed. It says when to merge, and not what.
//! - **bits of `slots`**: read and written with the lock; relaxed, since the lock orders them.
//! - **the key**: written with the lock, before `Magic` says that it is there.
//! - **bytes of a slot**: written by who has reserved it, before the index says that it holds a content. Who refers to
//!   it and then finds that said sees these bytes, until nobody refers to it any more.
//!
//! The lock is fcntl(2)'s: who gets it has gone through the kernel after who gave it back, and sees all that was done
//! before. Between threads of a process the number that says which process has it is acquired and released.

use crate::directory;
use crate::index::Index;
use crate::lock::Lock;
use crate::record::{self, Record};
use crate::references::{Everybody, References};
use crate::store::{Slots, Store};
use crate::words::Words;
use pagefold_sys::fault;
use pagefold_sys::fingerprint::Hasher;
use rustix::rand::{GetRandomFlags, getrandom};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// "pagefold", and the version of the layout in the lowest byte.
pub const MAGIC: u64 = u64::from_be_bytes(*b"pagefol\x02");

/// `TMPFS_MAGIC` (include/uapi/linux/magic.h).
const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;

/// Entries of the first index: 64 KiB, for two thousand contents.
const FIRST_ENTRIES: usize = 4096;

/// How long a merge, or who leaves, waits for the domain's lock: a hundred times as long as anybody at work has it.
pub const PATIENCE: Duration = Duration::from_secs(1);

/// An index is made larger before more of it than this is used, of 8.
const FULL: usize = 5;

/// Numbers in the file `domain`.
#[derive(Clone, Copy, Debug)]
pub enum Header {
    /// [`MAGIC`].
    Magic,
    /// Which index is the present one.
    Generation,
    /// Files of members that there are, those that are no more counted until they are removed; never more than that.
    Members,
    /// Of sightings: the lowest byte, counted on by collections, once a second at most; above it, the second of that.
    Epoch,
    /// Merges since the last collection.
    Passes,
    /// Slots were taken below it only.
    Bound,
    /// How many slots there are.
    Slots,
    /// The device and inode of the store.
    StoreDevice,
    /// See `StoreDevice`.
    StoreInode,
    /// The moment that was named last for all to merge ([`pagefold_model::turn`]), in nanoseconds of the clock that
    /// members share.
    Moment,
    /// The PID namespace of its members, by its inode: they know each other by numbers in it.
    Namespace,
}

/// The domain, as this process has it.
#[derive(Debug)]
pub struct Domain {
    path: PathBuf,
    page: u64,
    header: Words,
    /// Contents of members.
    pub store: Store,
    slots: Slots,
    /// What is known of contents.
    pub index: Index,
    generation: u64,
    /// What this process refers to.
    pub references: References,
    /// What this process tells of itself.
    pub record: Record,
    /// Until when a merge waits for the lock.
    patience: Instant,
}

impl Domain {
    /// Join the domain that is kept in a directory, or found it; with its hasher. Waits until some time for the lock.
    /// If a store is founded, its memory is to be on a node, if one is named.
    ///
    /// # Errors
    /// Those of files and of the lock, `InvalidData` where the directory holds something else.
    pub fn join(path: &Path, page: u64, node: Option<u32>, until: Instant) -> io::Result<(Self, Hasher)> {
        let _lock = Lock::wait(&path.join("lock"), until)?;
        // A file system that answers for others, as over a network, cannot be relied on to tell who is there.
        if rustix::fs::statfs(path)?.f_type != TMPFS_MAGIC {
            return Err(io::Error::new(io::ErrorKind::Unsupported, format!("{} is not on a tmpfs", path.display())));
        }
        let file = directory::open(&path.join("domain"), true)?;
        let words = (page / crate::words::WORD) as usize;
        Words::allocate(&file, 0..2 * words as u64)?;
        let header = Words::map(&file, 2 * words)?;
        let number = |of: Header| header[of as usize].load(Ordering::SeqCst);
        let set = |of: Header, value| header[of as usize].store(value, Ordering::SeqCst);
        let mut key = vec![0; page as usize];
        match number(Header::Magic) {
            MAGIC => file.read_exact_at(&mut key, page)?,
            0 => {
                let mut filled = 0;
                while filled < key.len() {
                    filled += getrandom(&mut key[filled..], GetRandomFlags::empty())?;
                }
                file.write_all_at(&key, page)?;
                let memory = rustix::system::sysinfo();
                let pages = memory.totalram as u64 * u64::from(memory.mem_unit) / page;
                set(Header::Slots, pages.min(u64::from(u32::MAX - 1)));
                fault::point("before a domain is founded");
                set(Header::Magic, MAGIC);
            }
            _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "made by another version of pagefold")),
        }
        let count = number(Header::Slots) as u32;
        let mut everybody = Everybody::find(path)?;
        set(Header::Members, number(Header::Members).saturating_sub(everybody.gone() as u64));
        everybody.bury();
        record::sweep(path);
        let namespace = std::fs::metadata("/proc/thread-self/ns/pid")?.ino();
        // None is told where the file was removed under its members.
        if everybody.count() > 0 && ![0, namespace].contains(&number(Header::Namespace)) {
            let why =
                "its members are in another PID namespace: share that, or set PAGEFOLD_RUNTIME to another directory";
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        }
        set(Header::Namespace, namespace);
        let identity = (number(Header::StoreDevice), number(Header::StoreInode));
        let slots = Slots::map(&directory::open(&path.join("slots"), true)?, count)?;
        let mut found = None;
        for &(pid, descriptor) in &everybody.sources {
            match Store::of_member(pid, descriptor, identity, page) {
                Ok(store) => found = Some(store),
                // It has ended, and a child of it has its references; or it has closed the store.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => {}
                // A member that may have the store, of which nothing is known.
                Err(error) => return Err(error),
            }
        }
        let store = match found {
            Some(store) => store,
            None => {
                // Whoever still maps something of a former store keeps that, and joins anew.
                let store = Store::new(count, page)?;
                if let Some(node) = node {
                    // A preference: where it cannot be told, as in containers that forbid it, or there is no such
                    // memory, memory is where its writers run.
                    let _ = store.stay_on(count, node);
                }
                set(Header::StoreInode, 0);
                slots.set(0..number(Header::Bound) as u32, false);
                set(Header::Bound, 0);
                set(Header::Members, everybody.count() as u64);
                fault::point("before a store is announced");
                set(Header::Generation, new_index(path, number(Header::Generation))?);
                set(Header::StoreDevice, store.identity().0);
                set(Header::StoreInode, store.identity().1);
                store
            }
        };
        if !index_path(path, number(Header::Generation)).exists() {
            set(Header::Generation, new_index(path, number(Header::Generation))?);
        }
        let generation = number(Header::Generation);
        let index = present(path, generation)?;
        let references = References::new(path, count, store.identity().1, store.descriptor())?;
        set(Header::Members, number(Header::Members) + 1);
        let record = Record::new(path)?;
        let path = path.to_owned();
        let domain = Self { path, page, header, store, slots, index, generation, references, record, patience: until };
        Ok((domain, Hasher::with_key(&key)))
    }

    fn number(&self, of: Header) -> u64 {
        self.header[of as usize].load(Ordering::SeqCst)
    }

    fn set(&self, of: Header, value: u64) {
        self.header[of as usize].store(value, Ordering::SeqCst);
    }

    /// Wait for the lock until some time, from now on.
    pub fn wait_until(&mut self, patience: Instant) {
        self.patience = patience;
    }

    fn lock(&self) -> io::Result<Lock> {
        Lock::wait(&self.path.join("lock"), self.patience)
    }

    /// Of sightings, now.
    pub fn epoch(&self) -> u8 {
        self.number(Header::Epoch) as u8
    }

    /// Whether the index that this member has is the present one.
    pub fn is_present(&self) -> bool {
        self.number(Header::Generation) == self.generation
    }

    /// Whether there is no other member.
    pub fn is_alone(&self) -> bool {
        self.number(Header::Members) <= 1
    }

    /// The moment that was named last for all to merge.
    pub fn moment(&self) -> Duration {
        Duration::from_nanos(self.number(Header::Moment))
    }

    /// Name another one, if nobody has named one since.
    pub fn name_moment(&self, named: Duration, moment: Duration) {
        let word = &self.header[Header::Moment as usize];
        let nanoseconds = |moment: Duration| moment.as_nanos() as u64;
        let _ = word.compare_exchange(nanoseconds(named), nanoseconds(moment), Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Whether this member has the domain's store, and its files are where others find them.
    pub fn is_whole(&self) -> bool {
        self.has_store() && self.references.is_listed()
    }

    fn has_store(&self) -> bool {
        self.store.is_open()
            && self.store.identity() == (self.number(Header::StoreDevice), self.number(Header::StoreInode))
    }

    /// See to it that the index is the present one and has room for the contents that are missing in it.
    ///
    /// # Errors
    /// Those of files and of the lock; `ENOSPC` where there is no memory for a larger one.
    pub fn make_room(&mut self, missing: impl Fn(&Index) -> usize) -> io::Result<()> {
        let _lock = loop {
            self.follow()?;
            // In this order: what others note meanwhile is not counted twice.
            let used = self.index.used();
            let contents = missing(&self.index);
            if used + contents <= self.index.capacity() / 8 * FULL {
                return Ok(());
            }
            let lock = self.lock()?;
            // Else a member has made a larger one meanwhile, which may have what is missing here: members that merge
            // together hold the same, and whoever is at work with an index that is replaced has worked in vain.
            if self.is_present() {
                break lock;
            }
        };
        let epoch = self.epoch();
        let used = self.index.entries().filter(|&number| self.index.is_alive(number, epoch)).count();
        let contents = missing(&self.index);
        let capacity = ((used + contents) * 8 / FULL + 1).next_power_of_two().max(FIRST_ENTRIES);
        let generation = self.generation + 1;
        let path = index_path(&self.path, generation);
        // One that a member was making when it died.
        let _ = std::fs::remove_file(&path);
        let larger = Index::map(&directory::open(&path, true)?, capacity)?;
        larger.take_over(&self.index, epoch);
        fault::point("before an index is announced");
        self.set(Header::Generation, generation);
        fault::point("after an index is announced");
        let _ = std::fs::remove_file(index_path(&self.path, self.generation));
        (self.index, self.generation) = (larger, generation);
        Ok(())
    }

    /// Take up the present index, if this member has an older one.
    ///
    /// # Errors
    /// Those of mapping it.
    pub fn follow(&mut self) -> io::Result<()> {
        while !self.is_present() {
            let generation = self.number(Header::Generation);
            // Between two numbers another one may have come, and its file be gone.
            let index = match present(&self.path, generation) {
                Ok(index) => index,
                Err(error)
                    if error.kind() == io::ErrorKind::NotFound && self.number(Header::Generation) != generation =>
                {
                    continue;
                }
                Err(error) => return Err(error),
            };
            (self.index, self.generation) = (index, generation);
        }
        Ok(())
    }

    /// Reserve so many slots, which this member then refers to and nobody else has, together if possible; fewer if
    /// there are no more.
    ///
    /// # Errors
    /// Those of the lock; `ENOSPC` where there is no memory for references.
    pub fn reserve(&self, wanted: u32) -> io::Result<Vec<Range<u32>>> {
        let _lock = self.lock_whole()?;
        let count = self.number(Header::Slots) as u32;
        let bound = self.number(Header::Bound) as u32;
        let upto = bound.saturating_add(wanted).min(count);
        Words::allocate(&directory::open(&self.path.join("slots"), false)?, 0..u64::from(upto.div_ceil(64)))?;
        let found = self.slots.find(wanted, upto);
        let end = found.iter().map(|slots| slots.end).max().unwrap_or(0);
        self.set(Header::Bound, u64::from(end.max(bound)));
        // Referred to before they are taken: what is taken, not referred to and in no entry is free for others.
        for slots in &found {
            self.references.add(slots.clone())?;
        }
        fault::point("before slots are taken");
        for slots in &found {
            self.slots.set(slots.clone(), true);
        }
        fault::point("after slots are taken");
        Ok(found)
    }

    /// A merge is done. Whether it is time to collect: each member has merged once since, on average.
    pub fn passed(&self) -> bool {
        let passes = self.header[Header::Passes as usize].fetch_add(1, Ordering::Relaxed) + 1;
        passes >= self.number(Header::Members)
    }

    /// Free the slots that nobody refers to.
    ///
    /// # Errors
    /// Those of files: then nothing, or not everything, was freed.
    pub fn collect(&mut self) -> io::Result<()> {
        let _lock = self.lock_whole()?;
        self.follow()?;
        self.set(Header::Passes, 0);
        let (epoch, second) = (self.number(Header::Epoch), crate::clock().as_secs());
        if epoch >> 8 != second {
            self.set(Header::Epoch, second << 8 | u64::from((epoch as u8).wrapping_add(1)));
        }
        let mut everybody = Everybody::find(&self.path)?;
        let store = self.store.identity().1;
        if (everybody.listed() as u64) < self.number(Header::Members) {
            // Somebody has removed files of members, and what those refer to is not known. With another store all begin
            // anew, and keep what they have of this one.
            self.set(Header::StoreInode, 0);
            return Ok(());
        }
        self.set(Header::Members, everybody.count() as u64);
        everybody.bury();
        record::sweep(&self.path);
        let before = everybody.all(store)?;
        let mut condemned = Vec::new();
        for number in self.index.entries() {
            let state = self.index.state(number);
            let Some(slot) = state.any_slot() else { continue };
            if !before.has(slot) {
                self.index.condemn(number, true);
                condemned.push((number, slot));
            } else if state.is_condemned() {
                // By one who died over it.
                self.index.condemn(number, false);
            }
        }
        fault::point("after contents are condemned");
        let after = everybody.all(store)?;
        for (number, slot) in condemned {
            if after.has(slot) {
                self.index.condemn(number, false);
            } else {
                self.index.forget_slot(number);
            }
        }
        fault::point("before slots are freed");
        // What no entry says is free, too, unless somebody is about to say it.
        let mut stays = after;
        stays.extend(self.index.entries().filter_map(|number| self.index.state(number).any_slot()));
        let bound = self.number(Header::Bound) as u32;
        let mut freed: Vec<Range<u32>> = Vec::new();
        for slot in (0..bound).filter(|&slot| self.slots.is_taken(slot) && !stays.has(slot)) {
            match freed.last_mut() {
                Some(last) if last.end == slot => last.end += 1,
                _ => freed.push(slot..slot + 1),
            }
        }
        for slots in freed {
            self.store.punch(slots.clone())?;
            fault::point("between punching and freeing");
            self.slots.set(slots, false);
        }
        Ok(())
    }

    /// Refer to some slots only, from now on. What was referred to before is given up by this process, and kept by
    /// those that it has forked.
    ///
    /// # Errors
    /// Those of files: then everything stays as it is.
    pub fn refer_only(&mut self, slots: impl IntoIterator<Item = u32>) -> io::Result<()> {
        let _lock = self.lock_whole()?;
        let count = self.number(Header::Slots) as u32;
        let references = References::new(&self.path, count, self.store.identity().1, self.store.descriptor())?;
        self.set(Header::Members, self.number(Header::Members) + 1);
        references.add(slots)?;
        self.references = references;
        Ok(())
    }

    /// The lock, of a domain that is what this member knows: with its store, and its files where others find them.
    fn lock_whole(&self) -> io::Result<Lock> {
        let lock = self.lock()?;
        let moved = |what: &str| io::Error::new(io::ErrorKind::NotFound, format!("the domain has another {what} now"));
        if !self.references.is_listed() {
            return Err(moved("directory"));
        }
        if !self.has_store() {
            return Err(moved("store"));
        }
        Ok(lock)
    }

    /// Be no member any more: nothing of the store is mapped. The last one takes the directory with it.
    pub fn leave(&mut self) {
        self.references.give_up();
        self.patience = Instant::now() + PATIENCE;
        let Ok(_lock) = self.lock() else { return };
        // Nothing more can be done about what cannot be removed; the next to join finds it.
        if Everybody::find(&self.path).is_ok_and(|everybody| everybody.count() == 0) {
            let _ = directory::remove(&self.path);
        }
    }

    /// The process of this member is about to end: if there is no other member, the directory goes now. Who looks for
    /// the domain afterwards founds it anew; what this process maps of the store stays as it is.
    pub fn end(&mut self) {
        self.patience = Instant::now();
        let Ok(_lock) = self.lock_whole() else { return };
        if Everybody::find(&self.path).is_ok_and(|everybody| everybody.count() <= 1) {
            let _ = directory::remove(&self.path);
        }
    }

    /// Bytes in a page.
    pub fn page(&self) -> u64 {
        self.page
    }
}

/// Remove the domains under a root whose members were all killed.
pub fn sweep(root: &Path) {
    for name in directory::names(root).unwrap_or_default() {
        let path = root.join(name);
        if path.join("domain").exists()
            && let Ok(_lock) = Lock::wait(&path.join("lock"), Instant::now())
            && Everybody::find(&path).is_ok_and(|everybody| everybody.count() == 0)
        {
            // What cannot be removed now is found again.
            let _ = directory::remove(&path);
        }
    }
}

/// Make an empty index, and remove the one of a generation: the next.
fn new_index(directory: &Path, generation: u64) -> io::Result<u64> {
    let next = generation + 1;
    // One that a member was making when it died.
    let _ = std::fs::remove_file(index_path(directory, next));
    Index::map(&directory::open(&index_path(directory, next), true)?, FIRST_ENTRIES)?;
    let _ = std::fs::remove_file(index_path(directory, generation));
    Ok(next)
}

/// The index of a generation.
fn present(directory: &Path, generation: u64) -> io::Result<Index> {
    let file = directory::open(&index_path(directory, generation), false)?;
    let entries = Index::entries_in(file.metadata()?.len());
    Index::map(&file, entries)
}

fn index_path(directory: &Path, generation: u64) -> PathBuf {
    directory.join(format!("index-{generation}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};

    #[test]
    fn who_finds_a_larger_index_counts_anew_before_it_makes_another() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let until = Instant::now() + 300 * PATIENCE;
        let join = || Domain::join(directory.path(), 4096, None, until).unwrap().0;
        let (first, mut second) = (RefCell::new(join()), join());
        let counts = Cell::new(0);
        // Both are to note the same. While the second counts what is missing the first makes room for it, and while it
        // counts anew the first notes it.
        let missing = |index: &Index| {
            counts.set(counts.get() + 1);
            let count = (1..=FIRST_ENTRIES as u64).filter(|&print| index.find(print).is_none()).count();
            let mut first = first.borrow_mut();
            if counts.get() == 1 {
                first.make_room(|_| FIRST_ENTRIES).unwrap();
            } else {
                (1..=FIRST_ENTRIES as u64).for_each(|print| assert!(first.index.entry(print).is_some()));
            }
            count
        };
        second.make_room(missing).unwrap();
        assert_eq!(counts.get(), 2);
        let first = first.borrow();
        assert!(first.is_present() && second.is_present(), "what the first does with its index is not in vain");
        assert_eq!(second.index.used(), FIRST_ENTRIES);
    }
}
