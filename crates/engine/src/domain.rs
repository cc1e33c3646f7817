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
//! | `ending-*` | nothing; that a member is about to end ([`crate::ending`]) | by its member, under the lock |
//!
//! Any of them may be removed at any time; what belongs together is known by inodes: see [`incarnation`].
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
//! - **`StoreInode`**: written by the founder, and set to 0 by any member that abandons the incarnation, without the
//!   lock; sequentially consistent. A member that frees loads it after it has found whose references there are.
//! - **other numbers of the header**, but for `Passes` and `Moment`: written with the lock; sequentially consistent.
//!   Who has the lock sees the last ones.
//! - **`Passes`**: counted by every member; relaxed. It says when to collect, and not what.
//! - **`Moment`**: set by every member, by compare and exchange; relaxed. It says when to merge, and not what.
//! - **bits of `slots`**: read and written with the lock; relaxed, since the lock orders them.
//! - **the key**: written by the founder, before `Magic` says that it is there.
//! - **bytes of a slot**: written by who has reserved it, before the index says that it holds a content. Who refers to
//!   it and then finds that said sees these bytes, until nobody refers to it any more.
//!
//! The lock is fcntl(2)'s: who gets it has gone through the kernel after who gave it back, and sees all that was done
//! before. Between threads of a process the number that says which process has it is acquired and released.

use crate::fits::is_full;
use crate::incarnation::{self, DOMAIN, FIRST_ENTRIES, Incarnation, LOCK, SLOTS, index_path, new_index};
use crate::index::Index;
use crate::lock::Lock;
use crate::record::{self, Record};
use crate::references::{self, Everybody, References, is_any_held};
use crate::store::{Identity, Slots, Store};
use crate::words::Words;
use crate::{directory, ending};
use pagefold_sys::fault;
use pagefold_sys::fingerprint::Hasher;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// "pagefold", and the version of the layout in the lowest byte.
pub const MAGIC: u64 = u64::from_be_bytes(*b"pagefol\x03");

/// `TMPFS_MAGIC` (include/uapi/linux/magic.h).
const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;

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
    /// Files of members that there are for this store, those that are no more counted until they are removed; never
    /// too low, so that files which others have removed are noticed.
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
    /// See `StoreDevice`. 0 once the incarnation is abandoned.
    StoreInode,
    /// The moment that was named last for all to merge ([`pagefold_model::turn`]), in nanoseconds of the clock that
    /// members share.
    Moment,
    /// The PID namespace of its members, by its inode: they know each other by numbers in it.
    Namespace,
    /// The inode of the file that members lock.
    Lock,
    /// The inode of the file `slots`.
    SlotsFile,
}

/// The domain, as this process has it.
#[derive(Debug)]
pub struct Domain {
    path: PathBuf,
    page: u64,
    header: Words,
    /// Of the file that the header is.
    identity: Identity,
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
        let namespace = pid_namespace()?;
        Self::join_within(path, page, node, namespace, until).map_err(incarnation::lost_if_absent)
    }

    /// The same, with the PID namespace of this process: of files, it needs none but those of the domain.
    fn join_within(
        path: &Path,
        page: u64,
        node: Option<u32>,
        namespace: u64,
        until: Instant,
    ) -> io::Result<(Self, Hasher)> {
        let lock = Lock::wait(&path.join(LOCK), until)?;
        // A file system that answers for others, as over a network, cannot be relied on to tell who is there.
        if rustix::fs::statfs(path)?.f_type != TMPFS_MAGIC {
            return Err(io::Error::new(io::ErrorKind::Unsupported, format!("{} is not on a tmpfs", path.display())));
        }
        let mut everybody = Everybody::find(path)?;
        record::sweep(path);
        let Incarnation { header, identity, slots, store, key } =
            match Incarnation::find(path, page, namespace, &lock, &everybody)? {
                Some(found) => found,
                None => Incarnation::found(path, page, node, namespace, &lock)?,
            };
        let number = |of: Header| header[of as usize].load(Ordering::SeqCst);
        let set = |of: Header, value| header[of as usize].store(value, Ordering::SeqCst);
        // In this order, so that the number is never too low.
        let buried = everybody.bury(store.identity().1) as u64;
        set(Header::Members, number(Header::Members).saturating_sub(buried));
        if !index_path(path, number(Header::Generation)).exists() {
            set(Header::Generation, new_index(path, number(Header::Generation))?);
        }
        let generation = number(Header::Generation);
        let index = present(path, generation)?;
        let references = enlist(&header, path, &store)?;
        let record = Record::new(path)?;
        let path = path.to_owned();
        let patience = until;
        let domain =
            Self { path, page, header, identity, store, slots, index, generation, references, record, patience };
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
        Lock::wait(&self.path.join(LOCK), self.patience)
    }

    /// Of sightings, now.
    pub fn epoch(&self) -> u8 {
        self.number(Header::Epoch) as u8
    }

    /// Whether the index that this member has is the present one.
    pub fn is_present(&self) -> bool {
        self.number(Header::Generation) == self.generation
    }

    /// How many members there are, or more.
    pub fn members(&self) -> u64 {
        self.number(Header::Members)
    }

    /// Whether there is no other member.
    pub fn is_alone(&self) -> bool {
        self.members() <= 1
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

    /// Whether this member has the domain's store, and all files of its incarnation are where others find them.
    pub fn is_whole(&self) -> bool {
        self.has_store()
            && self.references.is_listed()
            && self.record.is_listed()
            && incarnation::is_named(&self.path, &self.header, self.identity, None)
            && index_path(&self.path, self.number(Header::Generation)).exists()
    }

    /// What this member has of the domain is no longer the domain's: no member frees slots of its store any more. To
    /// be called before it gives up references to what it may still map.
    pub fn abandon(&self) {
        incarnation::abandon(&self.header);
    }

    fn has_store(&self) -> bool {
        self.store.is_open()
            && self.store.identity() == (self.number(Header::StoreDevice), self.number(Header::StoreInode))
    }

    /// See to it that the index is the present one and has room for the contents that are missing in it, or for as many
    /// as fit into so many bytes. For how many it has room.
    ///
    /// # Errors
    /// Those of files and of the lock; `ENOSPC` where there is no memory for a larger one.
    pub fn make_room(&mut self, missing: impl Fn(&Index) -> usize, at_most: u64) -> io::Result<usize> {
        let _lock = loop {
            self.follow()?;
            // In this order: what others note meanwhile is not counted twice.
            let used = self.index.used();
            let contents = missing(&self.index);
            if used + contents <= self.index.capacity() / 8 * FULL {
                return Ok(self.index.room(used));
            }
            let lock = self.lock_whole()?;
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
        let fitting = Index::entries_in(at_most).checked_ilog2().map_or(0, |exponent| 1 << exponent);
        let capacity = if fitting < capacity && fitting <= self.index.capacity() {
            return Err(rustix::io::Errno::NOSPC.into());
        } else {
            capacity.min(fitting)
        };
        let generation = self.generation + 1;
        let path = index_path(&self.path, generation);
        let larger = Index::map(&incarnation::replace(&path)?, capacity)?;
        larger.take_over(&self.index, epoch);
        fault::point("before an index is announced");
        self.set(Header::Generation, generation);
        fault::point("after an index is announced");
        let _ = std::fs::remove_file(index_path(&self.path, self.generation));
        (self.index, self.generation) = (larger, generation);
        Ok(self.index.room(used))
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
                Err(error) => return Err(incarnation::lost_if_absent(error)),
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
        let backed = incarnation::slots_file(&self.path, &self.header)
            .and_then(|file| Words::allocate(&file, 0..u64::from(upto.div_ceil(64))));
        let upto = match backed {
            // There may be free ones among those that were taken before.
            Err(error) if is_full(&error) => bound,
            backed => backed.map(|()| upto)?,
        };
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
        fault::point("before references are found");
        let mut everybody = Everybody::find(&self.path)?;
        let store = self.store.identity().1;
        let listed = everybody.listed(store) as u64;
        if listed < self.number(Header::Members) {
            // Files of members were removed, and what those refer to is not known: nothing is ever freed again.
            self.abandon();
        }
        // A member that went to another incarnation has said so before it gave up its references: if those were not
        // found any more, this is seen.
        if !self.has_store() {
            return Ok(());
        }
        let buried = everybody.bury(store) as u64;
        self.set(Header::Members, listed - buried);
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
        let references = enlist(&self.header, &self.path, &self.store)?;
        references.add(slots)?;
        self.references = references;
        Ok(())
    }

    /// The lock of the incarnation that this member knows, whose files are where others find them. A lock that has
    /// taken the name of a removed one is not it.
    fn lock_whole(&self) -> io::Result<Lock> {
        let lock = self.lock()?;
        let named = incarnation::is_named(&self.path, &self.header, self.identity, Some(lock.inode()?));
        if named && self.references.is_listed() && self.has_store() { Ok(lock) } else { Err(incarnation::lost()) }
    }

    /// Be no member any more: nothing of the store is mapped. The last one takes the directory with it.
    pub fn leave(&mut self) {
        self.references.give_up();
        self.patience = Instant::now() + PATIENCE;
        let Ok(_lock) = self.lock() else { return };
        // Nothing more can be done about what cannot be removed; the next to join finds it.
        if is_any_held(&self.path).is_ok_and(|is_held| !is_held) {
            let _ = directory::remove(&self.path);
        }
    }

    /// The process of this member is about to end: if all others are, the directory goes now. Who looks for the domain
    /// afterwards founds it anew; what this process maps of the store stays as it is.
    pub fn end(&mut self) {
        // Others that end at the same time have the lock for a moment each.
        self.patience = Instant::now() + PATIENCE;
        let Ok(_lock) = self.lock_whole() else { return };
        if ending::all_end(&self.path, self.references.path()).unwrap_or(false) {
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
        let names = directory::names(&path).unwrap_or_default();
        // Files of others may be here where PAGEFOLD_RUNTIME names a directory that is used for more.
        if !names.is_empty()
            && names.iter().all(|name| name.to_str().is_some_and(is_file_name))
            && let Ok(_lock) = Lock::wait(&path.join(LOCK), Instant::now())
            && is_any_held(&path).is_ok_and(|is_held| !is_held)
        {
            // What cannot be removed now is found again.
            let _ = directory::remove(&path);
        }
    }
}

/// Whether a file in a domain's directory may have a name.
fn is_file_name(name: &str) -> bool {
    let prefixes = [incarnation::INDEX, references::PREFIX, record::PREFIX, ending::ENDING];
    [DOMAIN, LOCK, SLOTS].contains(&name) || prefixes.iter().any(|prefix| name.starts_with(prefix))
}

/// New references to a store, counted before others can find them.
fn enlist(header: &Words, path: &Path, store: &Store) -> io::Result<References> {
    let members = &header[Header::Members as usize];
    let count = header[Header::Slots as usize].load(Ordering::SeqCst) as u32;
    members.fetch_add(1, Ordering::SeqCst);
    References::new(path, count, store.identity().1, store.descriptor()).inspect_err(|_| {
        // It has left no file.
        members.fetch_sub(1, Ordering::SeqCst);
    })
}

/// The inode of the PID namespace of this process.
fn pid_namespace() -> io::Result<u64> {
    const PATH: &str = "/proc/thread-self/ns/pid";
    let failed = |error: io::Error| io::Error::new(error.kind(), format!("cannot read {PATH}: {error}; mount /proc"));
    Ok(std::fs::metadata(PATH).map_err(failed)?.ino())
}

/// The index of a generation.
fn present(directory: &Path, generation: u64) -> io::Result<Index> {
    let file = directory::open(&index_path(directory, generation), false)?;
    let entries = Index::entries_in(file.metadata()?.len());
    Index::map(&file, entries)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};

    #[test]
    fn what_killed_members_left_is_removed_whichever_files_it_is() {
        let root = tempfile::tempdir_in("/dev/shm").unwrap();
        let make = |domain: &str, files: &[&str]| {
            std::fs::create_dir(root.path().join(domain)).unwrap();
            files.iter().for_each(|file| std::fs::write(root.path().join(domain).join(file), "").unwrap());
        };
        for file in [DOMAIN, SLOTS, LOCK, "index-7", "member-1-2-3-4", "status-1-2", "ending-member-1-2-3-4"] {
            make(file, &[file]);
        }
        make("other", &["domain", "notes.txt"]);
        make("empty", &[]);
        make("used", &["domain"]);
        let _member = References::new(&root.path().join("used"), 64, 1, 3).unwrap();
        sweep(root.path());
        let mut left = directory::names(root.path()).unwrap();
        left.sort();
        assert_eq!(left, ["empty", "other", "used"]);
    }

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
                first.make_room(|_| FIRST_ENTRIES, u64::MAX).unwrap();
            } else {
                (1..=FIRST_ENTRIES as u64).for_each(|print| assert!(first.index.entry(print).is_some()));
            }
            count
        };
        second.make_room(missing, u64::MAX).unwrap();
        assert_eq!(counts.get(), 2);
        let first = first.borrow();
        assert!(first.is_present() && second.is_present(), "what the first does with its index is not in vain");
        assert_eq!(second.index.used(), FIRST_ENTRIES);
    }
}
