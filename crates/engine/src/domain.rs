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
use rustix::fs::{AtFlags, CWD, unlinkat};
use std::ffi::OsString;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
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
    /// The moment that was named last for all to merge ([`crate::decide::turn`]), in nanoseconds of the clock that
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

/// Remove the domains under a root whose members were all killed. The root and each domain have to be directories of
/// this user which no other user can change, as [`directory::of_domain`] makes them. Each is opened before it is
/// checked, and only what was opened is worked on, so no name can lead elsewhere.
pub fn sweep(root: &Path) {
    let user = rustix::process::geteuid().as_raw();
    let Ok(Some(root)) = directory::open_private(CWD, root, user, 0o022) else { return };
    for name in directory::names_in(&root).unwrap_or_default() {
        if let Ok(Some(domain)) = directory::open_private(&root, &name, user, 0o077)
            && sweep_domain(&domain)
        {
            // What cannot be removed now is found again.
            let _ = unlinkat(&root, &name, AtFlags::REMOVEDIR);
        }
    }
}

/// Remove the files of a domain whose members were all killed; whether all are gone.
fn sweep_domain(domain: &OwnedFd) -> bool {
    // The dot has the descriptor followed where symbolic links are not.
    let path = PathBuf::from(format!("/proc/thread-self/fd/{}/.", domain.as_raw_fd()));
    let names = directory::names_in(domain).unwrap_or_default();
    is_domain(&path, &names)
        && Lock::wait(&path.join(LOCK), Instant::now()).is_ok_and(|_lock| {
            is_any_held(&path).is_ok_and(|is_held| !is_held) && directory::remove_files(&path).is_ok()
        })
}

/// Whether a directory with files of some names is a domain's: `PAGEFOLD_RUNTIME` may name one that is used for more.
/// Each name is one that a domain may have, and one of the files at least is what no other program makes: a header, or a
/// file of a member.
fn is_domain(path: &Path, names: &[OsString]) -> bool {
    let names: Option<Vec<&str>> = names.iter().map(|name| name.to_str()).collect();
    let is_shared = |name: &str| {
        [DOMAIN, LOCK, SLOTS].contains(&name) || name.strip_prefix(incarnation::INDEX).is_some_and(is_number)
    };
    names.is_some_and(|names| {
        names.iter().all(|name| is_shared(name) || is_of_member(name))
            && names.iter().any(|name| is_of_member(name) || *name == DOMAIN && is_header(&path.join(name)))
    })
}

/// Whether a file of a member may have a name, of which a random number is the end.
fn is_of_member(name: &str) -> bool {
    let has = |name: &str, prefix: &str, numbers: usize| {
        let rest = name.strip_prefix(prefix).and_then(|rest| rest.rsplit_once('-'));
        rest.is_some_and(|(rest, random)| {
            let is_random = random.len() == 16 && random.bytes().all(|digit| digit.is_ascii_hexdigit());
            is_random && rest.split('-').count() == numbers && rest.split('-').all(is_number)
        })
    };
    match name.strip_prefix(ending::ENDING) {
        Some(member) => has(member, references::PREFIX, 3),
        None => has(name, references::PREFIX, 3) || has(name, record::PREFIX, 1),
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|digit| digit.is_ascii_digit())
}

/// Whether a file is the header of a domain that was founded.
fn is_header(path: &Path) -> bool {
    let mut magic = [0; 8];
    let read = directory::open(path, false).and_then(|file| file.read_exact_at(&mut magic, 0));
    read.is_ok() && u64::from_ne_bytes(magic) == MAGIC
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
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn chmod(path: &Path, mode: u32) {
        std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    /// A root that is this user's alone.
    fn root() -> tempfile::TempDir {
        let root = tempfile::tempdir_in("/dev/shm").unwrap();
        chmod(root.path(), 0o700);
        root
    }

    /// Make a directory that is this user's alone, with some files. The header is one that a founder has completed.
    fn make(root: &Path, domain: &str, files: &[&str]) {
        let path = root.join(domain);
        std::fs::create_dir(&path).unwrap();
        chmod(&path, 0o700);
        for file in files {
            let content = if *file == DOMAIN { MAGIC.to_ne_bytes().to_vec() } else { Vec::new() };
            std::fs::write(path.join(file), content).unwrap();
        }
    }

    /// What a sweep leaves under a root.
    fn swept(root: &Path) -> Vec<OsString> {
        sweep(root);
        let mut left = directory::names(root).unwrap();
        left.sort();
        left
    }

    const MEMBER: &str = "member-7-8-9-0123456789abcdef";

    #[test]
    fn what_killed_members_left_is_removed_and_files_of_other_programs_are_not() {
        let root = root();
        let make = |domain: &str, files: &[&str]| make(root.path(), domain, files);
        for file in [DOMAIN, MEMBER, "status-8-0123456789abcdef", &format!("ending-{MEMBER}")] {
            make(file, &[file]);
        }
        make("all", &[DOMAIN, SLOTS, LOCK, "index-7", MEMBER]);
        make("headless", &[SLOTS, LOCK, "index-7", MEMBER]);
        let others: [(&str, &[&str]); 6] = [
            ("o-1", &[]),
            ("o-2", &[LOCK]),
            ("o-3", &[LOCK, SLOTS, "index-7"]),
            ("o-4", &[DOMAIN, "notes.txt"]),
            ("o-5", &["member-1-2-3-4", "status-1-2", "index-new"]),
            ("o-6", &["status-0123456789abcdef", LOCK]),
        ];
        others.iter().for_each(|(domain, files)| make(domain, files));
        make("o-7", &[LOCK]);
        std::fs::write(root.path().join("o-7").join(DOMAIN), "example.org\n").unwrap();
        make("used", &[DOMAIN]);
        let _member = References::new(&root.path().join("used"), 64, 1, 3).unwrap();
        assert_eq!(swept(root.path()), ["o-1", "o-2", "o-3", "o-4", "o-5", "o-6", "o-7", "used"]);
        for (domain, files) in others {
            assert_eq!(directory::names(&root.path().join(domain)).unwrap().len(), files.len(), "{domain}");
        }
    }

    #[test]
    fn a_sweep_follows_no_symbolic_link_and_touches_nothing_that_others_can_change() {
        let (root, elsewhere) = (root(), root());
        make(elsewhere.path(), "x", &[DOMAIN, LOCK]);
        symlink(elsewhere.path().join("x"), root.path().join("link")).unwrap();
        make(root.path(), "open", &[DOMAIN, LOCK]);
        chmod(&root.path().join("open"), 0o750);
        assert_eq!(swept(root.path()), ["link", "open"]);
        symlink(elsewhere.path(), root.path().join("root")).unwrap();
        sweep(&root.path().join("root"));
        assert_eq!(directory::names(&elsewhere.path().join("x")).unwrap().len(), 2);
        chmod(elsewhere.path(), 0o770);
        assert_eq!(swept(elsewhere.path()), ["x"], "a group can change what is there");
        chmod(elsewhere.path(), 0o700);
        assert!(swept(elsewhere.path()).is_empty(), "nothing else kept it");
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
