//! What the members of a domain share, as one of them has it: the store, the index of its contents, and who refers to
//! what. ARCHITECTURE of a domain's directory:
//!
//! | file | holds | changed |
//! |---|---|---|
//! | `lock` | nothing; who locks it changes what follows | |
//! | `domain` | a page of numbers ([`HeaderField`]) and the key of fingerprints | under the lock |
//! | `slots` | one bit for each slot of the store that is taken | under the lock |
//! | `index-N` | contents ([`crate::content_index`]); N is the generation | by atomic operations |
//! | `member-*` | slots that a member refers to ([`crate::slot_references`]) | by its member |
//! | `status-*` | what a member tells of itself ([`crate::status_file`]) | by its member |
//! | `ending-*` | nothing; that a member is about to end ([`crate::member_exit`]) | by its member, under the lock |
//!
//! Any of them may be removed at any time; what belongs together is known by inodes: see [`incarnation`].
//!
//! # Why no content goes away under anybody
//! A member that wants to map a slot first adds it to its references, then checks that the index is still the one that
//! it looked into, then that the entry still says that slot and is not condemned. Who frees slots ([`JoinedDomain::collect_unreferenced_slots`])
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

use crate::content_index::ContentIndex;
use crate::domain_lock::DomainLock;
use crate::file_limits::is_out_of_space;
use crate::incarnation::{
    self, DOMAIN_FILE, DomainIncarnation, FIRST_INDEX_ENTRIES, LOCK_FILE, SLOTS_FILE, create_index, index_path,
};
use crate::shared_words::SharedWords;
use crate::slot_references::{self, DomainReferences, SlotReferences, has_any_live_member};
use crate::status_file::{self, StatusFile};
use crate::store::{ContentStore, FileIdentity, SlotBitmap};
use crate::{domain_directory, member_exit};
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
pub const DOMAIN_MAGIC: u64 = u64::from_be_bytes(*b"pagefol\x03");

/// `TMPFS_MAGIC` (include/uapi/linux/magic.h).
const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;

/// How long a merge, or who leaves, waits for the domain's lock: a hundred times as long as anybody at work has it.
pub const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// An index is made larger before more of it than this is used, of 8.
const GROW_AT_USED_EIGHTHS: usize = 5;

/// Numbers in the file `domain`.
#[derive(Clone, Copy, Debug)]
pub enum HeaderField {
    /// [`DOMAIN_MAGIC`].
    Magic,
    /// Which index is the present one.
    Generation,
    /// Files of members that there are for this store, those that are no more counted until they are removed; never
    /// too low, so that files which others have removed are noticed.
    MemberFiles,
    /// Of sightings: the lowest byte, counted on by collections, once a second at most; above it, the second of that.
    Epoch,
    /// Merges since the last collection.
    MergesSinceCollection,
    /// Slots were taken below it only.
    SlotBound,
    /// How many slots there are.
    SlotCount,
    /// The device and inode of the store.
    StoreDevice,
    /// See `StoreDevice`. 0 once the incarnation is abandoned.
    StoreInode,
    /// The moment that was named last for all to merge ([`crate::decide::merge_turn`]), in nanoseconds of the clock that
    /// members share.
    NextMergeTime,
    /// The PID namespace of its members, by its inode: they know each other by numbers in it.
    PidNamespace,
    /// The inode of the file that members lock.
    LockInode,
    /// The inode of the file `slots`.
    SlotsInode,
}

/// The domain, as this process has it.
#[derive(Debug)]
pub struct JoinedDomain {
    path: PathBuf,
    page_bytes: u64,
    header: SharedWords,
    /// Of the file that the header is.
    identity: FileIdentity,
    /// Contents of members.
    pub store: ContentStore,
    slots: SlotBitmap,
    /// What is known of contents.
    pub index: ContentIndex,
    index_generation: u64,
    /// What this process refers to.
    pub references: SlotReferences,
    /// What this process tells of itself.
    pub status_file: StatusFile,
    /// Until when a merge waits for the lock.
    lock_deadline: Instant,
}

impl JoinedDomain {
    /// Join the domain that is kept in a directory, or found it; with its hasher. Waits until some time for the lock.
    /// If a store is founded, its memory is to be on a node, if one is named.
    ///
    /// # Errors
    /// Those of files and of the lock, `InvalidData` where the directory holds something else.
    pub fn join(path: &Path, page_bytes: u64, node: Option<u32>, deadline: Instant) -> io::Result<(Self, Hasher)> {
        let namespace = pid_namespace_inode()?;
        Self::join_in_namespace(path, page_bytes, node, namespace, deadline)
            .map_err(incarnation::absent_to_files_removed)
    }

    /// The same, with the PID namespace of this process: of files, it needs none but those of the domain.
    fn join_in_namespace(
        path: &Path,
        page: u64,
        node: Option<u32>,
        namespace: u64,
        until: Instant,
    ) -> io::Result<(Self, Hasher)> {
        let lock = DomainLock::acquire(&path.join(LOCK_FILE), until)?;
        // A file system that answers for others, as over a network, cannot be relied on to tell who is there.
        if rustix::fs::statfs(path)?.f_type != TMPFS_MAGIC {
            return Err(io::Error::new(io::ErrorKind::Unsupported, format!("{} is not on a tmpfs", path.display())));
        }
        let mut everybody = DomainReferences::find(path)?;
        status_file::remove_dead_status_files(path);
        let DomainIncarnation { header, identity, slots, store, fingerprint_key: key } =
            match DomainIncarnation::find(path, page, namespace, &lock, &everybody)? {
                Some(found) => found,
                None => DomainIncarnation::create(path, page, node, namespace, &lock)?,
            };
        let number = |of: HeaderField| header[of as usize].load(Ordering::SeqCst);
        let set = |of: HeaderField, value| header[of as usize].store(value, Ordering::SeqCst);
        // In this order, so that the number is never too low.
        let buried = everybody.remove_dead_files(store.identity().1) as u64;
        set(HeaderField::MemberFiles, number(HeaderField::MemberFiles).saturating_sub(buried));
        if !index_path(path, number(HeaderField::Generation)).exists() {
            set(HeaderField::Generation, create_index(path, number(HeaderField::Generation))?);
        }
        let generation = number(HeaderField::Generation);
        let index = open_present_index(path, generation)?;
        let references = create_references(&header, path, &store)?;
        let record = StatusFile::new(path)?;
        let path = path.to_owned();
        let patience = until;
        let domain = Self {
            path,
            page_bytes: page,
            header,
            identity,
            store,
            slots,
            index,
            index_generation: generation,
            references,
            status_file: record,
            lock_deadline: patience,
        };
        Ok((domain, Hasher::with_key(&key)))
    }

    fn read_field(&self, field: HeaderField) -> u64 {
        self.header[field as usize].load(Ordering::SeqCst)
    }

    fn write_field(&self, field: HeaderField, value: u64) {
        self.header[field as usize].store(value, Ordering::SeqCst);
    }

    /// Wait for the lock until some time, from now on.
    pub fn set_lock_deadline(&mut self, deadline: Instant) {
        self.lock_deadline = deadline;
    }

    fn lock(&self) -> io::Result<DomainLock> {
        DomainLock::acquire(&self.path.join(LOCK_FILE), self.lock_deadline)
    }

    /// Of sightings, now.
    pub fn sighting_epoch(&self) -> u8 {
        self.read_field(HeaderField::Epoch) as u8
    }

    /// Whether the index that this member has is the present one.
    pub fn has_present_index(&self) -> bool {
        self.read_field(HeaderField::Generation) == self.index_generation
    }

    /// How many members there are, or more.
    pub fn member_count(&self) -> u64 {
        self.read_field(HeaderField::MemberFiles)
    }

    /// Whether there is no other member.
    pub fn is_only_member(&self) -> bool {
        self.member_count() <= 1
    }

    /// The moment that was named last for all to merge.
    pub fn next_merge_time(&self) -> Duration {
        Duration::from_nanos(self.read_field(HeaderField::NextMergeTime))
    }

    /// Name another one, if nobody has named one since.
    pub fn propose_merge_time(&self, previous: Duration, proposed: Duration) {
        let word = &self.header[HeaderField::NextMergeTime as usize];
        let nanoseconds = |moment: Duration| moment.as_nanos() as u64;
        let _ =
            word.compare_exchange(nanoseconds(previous), nanoseconds(proposed), Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Whether this member has the domain's store, and all files of its incarnation are where others find them.
    pub fn is_intact(&self) -> bool {
        self.has_present_store()
            && self.references.is_listed()
            && self.status_file.is_listed()
            && incarnation::is_current(&self.path, &self.header, self.identity, None)
            && index_path(&self.path, self.read_field(HeaderField::Generation)).exists()
    }

    /// What this member has of the domain is no longer the domain's: no member frees slots of its store any more. To
    /// be called before it gives up references to what it may still map.
    pub fn abandon_incarnation(&self) {
        incarnation::mark_abandoned(&self.header);
    }

    fn has_present_store(&self) -> bool {
        self.store.is_descriptor_valid()
            && self.store.identity()
                == (self.read_field(HeaderField::StoreDevice), self.read_field(HeaderField::StoreInode))
    }

    /// See to it that the index is the present one and has room for the contents that are missing in it, or for as many
    /// as fit into so many bytes. For how many it has room.
    ///
    /// # Errors
    /// Those of files and of the lock; `ENOSPC` where there is no memory for a larger one.
    pub fn grow_index(&mut self, missing: impl Fn(&ContentIndex) -> usize, max_bytes: u64) -> io::Result<usize> {
        let _lock = loop {
            self.follow_index()?;
            // In this order: what others note meanwhile is not counted twice.
            let used = self.index.count_used();
            let contents = missing(&self.index);
            if used + contents <= self.index.capacity() / 8 * GROW_AT_USED_EIGHTHS {
                return Ok(self.index.free_capacity(used));
            }
            let lock = self.lock_intact()?;
            // Else a member has made a larger one meanwhile, which may have what is missing here: members that merge
            // together hold the same, and whoever is at work with an index that is replaced has worked in vain.
            if self.has_present_index() {
                break lock;
            }
        };
        let epoch = self.sighting_epoch();
        let used = self.index.entries().filter(|&number| self.index.is_useful(number, epoch)).count();
        let contents = missing(&self.index);
        let capacity = ((used + contents) * 8 / GROW_AT_USED_EIGHTHS + 1).next_power_of_two().max(FIRST_INDEX_ENTRIES);
        let fitting = ContentIndex::entries_for_bytes(max_bytes).checked_ilog2().map_or(0, |exponent| 1 << exponent);
        let capacity = if fitting < capacity && fitting <= self.index.capacity() {
            return Err(rustix::io::Errno::NOSPC.into());
        } else {
            capacity.min(fitting)
        };
        let generation = self.index_generation + 1;
        let path = index_path(&self.path, generation);
        let larger = ContentIndex::map(&incarnation::create_replacing(&path)?, capacity)?;
        larger.copy_useful_entries(&self.index, epoch);
        fault::point("before an index is announced");
        self.write_field(HeaderField::Generation, generation);
        fault::point("after an index is announced");
        let _ = std::fs::remove_file(index_path(&self.path, self.index_generation));
        (self.index, self.index_generation) = (larger, generation);
        Ok(self.index.free_capacity(used))
    }

    /// Take up the present index, if this member has an older one.
    ///
    /// # Errors
    /// Those of mapping it.
    pub fn follow_index(&mut self) -> io::Result<()> {
        while !self.has_present_index() {
            let generation = self.read_field(HeaderField::Generation);
            // Between two numbers another one may have come, and its file be gone.
            let index = match open_present_index(&self.path, generation) {
                Ok(index) => index,
                Err(error)
                    if error.kind() == io::ErrorKind::NotFound
                        && self.read_field(HeaderField::Generation) != generation =>
                {
                    continue;
                }
                Err(error) => return Err(incarnation::absent_to_files_removed(error)),
            };
            (self.index, self.index_generation) = (index, generation);
        }
        Ok(())
    }

    /// Reserve so many slots, which this member then refers to and nobody else has, together if possible; fewer if
    /// there are no more.
    ///
    /// # Errors
    /// Those of the lock; `ENOSPC` where there is no memory for references.
    pub fn reserve_slots(&self, wanted: u32) -> io::Result<Vec<Range<u32>>> {
        let _lock = self.lock_intact()?;
        let count = self.read_field(HeaderField::SlotCount) as u32;
        let bound = self.read_field(HeaderField::SlotBound) as u32;
        let upto = bound.saturating_add(wanted).min(count);
        let backed = incarnation::open_slots_file(&self.path, &self.header)
            .and_then(|file| SharedWords::allocate_blocks(&file, 0..u64::from(upto.div_ceil(64))));
        let upto = match backed {
            // There may be free ones among those that were taken before.
            Err(error) if is_out_of_space(&error) => bound,
            backed => backed.map(|()| upto)?,
        };
        let found = self.slots.find_free(wanted, upto);
        let end = found.iter().map(|slots| slots.end).max().unwrap_or(0);
        self.write_field(HeaderField::SlotBound, u64::from(end.max(bound)));
        // Referred to before they are taken: what is taken, not referred to and in no entry is free for others.
        for slots in &found {
            self.references.add(slots.clone())?;
        }
        fault::point("before slots are taken");
        for slots in &found {
            self.slots.set_taken(slots.clone(), true);
        }
        fault::point("after slots are taken");
        Ok(found)
    }

    /// A merge is done. Whether it is time to collect: each member has merged once since, on average.
    pub fn count_merge(&self) -> bool {
        let passes = self.header[HeaderField::MergesSinceCollection as usize].fetch_add(1, Ordering::Relaxed) + 1;
        passes >= self.read_field(HeaderField::MemberFiles)
    }

    /// Free the slots that nobody refers to.
    ///
    /// # Errors
    /// Those of files: then nothing, or not everything, was freed.
    pub fn collect_unreferenced_slots(&mut self) -> io::Result<()> {
        let _lock = self.lock_intact()?;
        self.follow_index()?;
        self.write_field(HeaderField::MergesSinceCollection, 0);
        let (epoch, second) = (self.read_field(HeaderField::Epoch), crate::merge_clock().as_secs());
        if epoch >> 8 != second {
            self.write_field(HeaderField::Epoch, second << 8 | u64::from((epoch as u8).wrapping_add(1)));
        }
        fault::point("before references are found");
        let mut everybody = DomainReferences::find(&self.path)?;
        let store = self.store.identity().1;
        let listed = everybody.count_files(store) as u64;
        if listed < self.read_field(HeaderField::MemberFiles) {
            // Files of members were removed, and what those refer to is not known: nothing is ever freed again.
            self.abandon_incarnation();
        }
        // A member that went to another incarnation has said so before it gave up its references: if those were not
        // found any more, this is seen.
        if !self.has_present_store() {
            return Ok(());
        }
        let buried = everybody.remove_dead_files(store) as u64;
        self.write_field(HeaderField::MemberFiles, listed - buried);
        status_file::remove_dead_status_files(&self.path);
        let before = everybody.referenced_slots(store)?;
        let mut condemned = Vec::new();
        for number in self.index.entries() {
            let state = self.index.state(number);
            let Some(slot) = state.any_slot() else { continue };
            if !before.contains(slot) {
                self.index.set_condemned(number, true);
                condemned.push((number, slot));
            } else if state.is_condemned() {
                // By one who died over it.
                self.index.set_condemned(number, false);
            }
        }
        fault::point("after contents are condemned");
        let after = everybody.referenced_slots(store)?;
        for (number, slot) in condemned {
            if after.contains(slot) {
                self.index.set_condemned(number, false);
            } else {
                self.index.clear_slot(number);
            }
        }
        fault::point("before slots are freed");
        // What no entry says is free, too, unless somebody is about to say it.
        let mut stays = after;
        stays.extend(self.index.entries().filter_map(|number| self.index.state(number).any_slot()));
        let bound = self.read_field(HeaderField::SlotBound) as u32;
        let mut freed: Vec<Range<u32>> = Vec::new();
        for slot in (0..bound).filter(|&slot| self.slots.is_taken(slot) && !stays.contains(slot)) {
            match freed.last_mut() {
                Some(last) if last.end == slot => last.end += 1,
                _ => freed.push(slot..slot + 1),
            }
        }
        for slots in freed {
            self.store.punch_slots(slots.clone())?;
            fault::point("between punching and freeing");
            self.slots.set_taken(slots, false);
        }
        Ok(())
    }

    /// Refer to some slots only, from now on. What was referred to before is given up by this process, and kept by
    /// those that it has forked.
    ///
    /// # Errors
    /// Those of files: then everything stays as it is.
    pub fn replace_references(&mut self, slots: impl IntoIterator<Item = u32>) -> io::Result<()> {
        let _lock = self.lock_intact()?;
        let references = create_references(&self.header, &self.path, &self.store)?;
        references.add(slots)?;
        self.references = references;
        Ok(())
    }

    /// The lock of the incarnation that this member knows, whose files are where others find them. A lock that has
    /// taken the name of a removed one is not it.
    fn lock_intact(&self) -> io::Result<DomainLock> {
        let lock = self.lock()?;
        let named = incarnation::is_current(&self.path, &self.header, self.identity, Some(lock.inode()?));
        if named && self.references.is_listed() && self.has_present_store() {
            Ok(lock)
        } else {
            Err(incarnation::files_removed_error())
        }
    }

    /// Be no member any more: nothing of the store is mapped. The last one takes the directory with it.
    pub fn leave(&mut self) {
        self.references.drop_now();
        self.lock_deadline = Instant::now() + LOCK_TIMEOUT;
        let Ok(_lock) = self.lock() else { return };
        // Nothing more can be done about what cannot be removed; the next to join finds it.
        if has_any_live_member(&self.path).is_ok_and(|is_held| !is_held) {
            let _ = domain_directory::remove_directory(&self.path);
        }
    }

    /// The process of this member is about to end: if all others are, the directory goes now. Who looks for the domain
    /// afterwards founds it anew; what this process maps of the store stays as it is.
    pub fn prepare_exit(&mut self) {
        // Others that end at the same time have the lock for a moment each.
        self.lock_deadline = Instant::now() + LOCK_TIMEOUT;
        let Ok(_lock) = self.lock_intact() else { return };
        if member_exit::mark_exit_and_check_all(&self.path, self.references.path()).unwrap_or(false) {
            let _ = domain_directory::remove_directory(&self.path);
        }
    }

    /// Bytes in a page.
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }
}

/// Remove the domains under a root whose members were all killed. The root and each domain have to be directories of
/// this user which no other user can change, as [`domain_directory::prepare_domain_directory`] makes them. Each is opened before it is
/// checked, and only what was opened is worked on, so no name can lead elsewhere.
pub fn remove_dead_domains(root: &Path) {
    let user = rustix::process::geteuid().as_raw();
    let Ok(Some(root)) = domain_directory::open_private(CWD, root, user, 0o022) else { return };
    for name in domain_directory::names_in(&root).unwrap_or_default() {
        if let Ok(Some(domain)) = domain_directory::open_private(&root, &name, user, 0o077)
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
    let names = domain_directory::names_in(domain).unwrap_or_default();
    is_domain(&path, &names)
        && DomainLock::acquire(&path.join(LOCK_FILE), Instant::now()).is_ok_and(|_lock| {
            has_any_live_member(&path).is_ok_and(|is_held| !is_held) && domain_directory::remove_files(&path).is_ok()
        })
}

/// Whether a directory with files of some names is a domain's: `PAGEFOLD_RUNTIME` may name one that is used for more.
/// Each name is one that a domain may have, and one of the files at least is what no other program makes: a header, or a
/// file of a member.
fn is_domain(path: &Path, names: &[OsString]) -> bool {
    let names: Option<Vec<&str>> = names.iter().map(|name| name.to_str()).collect();
    let is_shared = |name: &str| {
        [DOMAIN_FILE, LOCK_FILE, SLOTS_FILE].contains(&name)
            || name.strip_prefix(incarnation::INDEX_PREFIX).is_some_and(is_number)
    };
    names.is_some_and(|names| {
        names.iter().all(|name| is_shared(name) || is_of_member(name))
            && names.iter().any(|name| is_of_member(name) || *name == DOMAIN_FILE && is_header(&path.join(name)))
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
    match name.strip_prefix(member_exit::EXIT_MARKER_PREFIX) {
        Some(member) => has(member, slot_references::REFERENCES_PREFIX, 3),
        None => has(name, slot_references::REFERENCES_PREFIX, 3) || has(name, status_file::STATUS_FILE_PREFIX, 1),
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|digit| digit.is_ascii_digit())
}

/// Whether a file is the header of a domain that was founded.
fn is_header(path: &Path) -> bool {
    let mut magic = [0; 8];
    let read = domain_directory::open_file(path, false).and_then(|file| file.read_exact_at(&mut magic, 0));
    read.is_ok() && u64::from_ne_bytes(magic) == DOMAIN_MAGIC
}

/// New references to a store, counted before others can find them.
fn create_references(header: &SharedWords, path: &Path, store: &ContentStore) -> io::Result<SlotReferences> {
    let members = &header[HeaderField::MemberFiles as usize];
    let count = header[HeaderField::SlotCount as usize].load(Ordering::SeqCst) as u32;
    members.fetch_add(1, Ordering::SeqCst);
    SlotReferences::new(path, count, store.identity().1, store.descriptor()).inspect_err(|_| {
        // It has left no file.
        members.fetch_sub(1, Ordering::SeqCst);
    })
}

/// The inode of the PID namespace of this process.
fn pid_namespace_inode() -> io::Result<u64> {
    const PID_NAMESPACE_PATH: &str = "/proc/thread-self/ns/pid";
    let failed = |error: io::Error| {
        io::Error::new(error.kind(), format!("cannot read {PID_NAMESPACE_PATH}: {error}; mount /proc"))
    };
    Ok(std::fs::metadata(PID_NAMESPACE_PATH).map_err(failed)?.ino())
}

/// The index of a generation.
fn open_present_index(directory: &Path, generation: u64) -> io::Result<ContentIndex> {
    let file = domain_directory::open_file(&index_path(directory, generation), false)?;
    let entries = ContentIndex::entries_for_bytes(file.metadata()?.len());
    ContentIndex::map(&file, entries)
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
            let content = if *file == DOMAIN_FILE { DOMAIN_MAGIC.to_ne_bytes().to_vec() } else { Vec::new() };
            std::fs::write(path.join(file), content).unwrap();
        }
    }

    /// What a sweep leaves under a root.
    fn swept(root: &Path) -> Vec<OsString> {
        remove_dead_domains(root);
        let mut left = domain_directory::list_names(root).unwrap();
        left.sort();
        left
    }

    const MEMBER: &str = "member-7-8-9-0123456789abcdef";

    #[test]
    fn what_killed_members_left_is_removed_and_files_of_other_programs_are_not() {
        let root = root();
        let make = |domain: &str, files: &[&str]| make(root.path(), domain, files);
        for file in [DOMAIN_FILE, MEMBER, "status-8-0123456789abcdef", &format!("ending-{MEMBER}")] {
            make(file, &[file]);
        }
        make("all", &[DOMAIN_FILE, SLOTS_FILE, LOCK_FILE, "index-7", MEMBER]);
        make("headless", &[SLOTS_FILE, LOCK_FILE, "index-7", MEMBER]);
        let others: [(&str, &[&str]); 6] = [
            ("o-1", &[]),
            ("o-2", &[LOCK_FILE]),
            ("o-3", &[LOCK_FILE, SLOTS_FILE, "index-7"]),
            ("o-4", &[DOMAIN_FILE, "notes.txt"]),
            ("o-5", &["member-1-2-3-4", "status-1-2", "index-new"]),
            ("o-6", &["status-0123456789abcdef", LOCK_FILE]),
        ];
        others.iter().for_each(|(domain, files)| make(domain, files));
        make("o-7", &[LOCK_FILE]);
        std::fs::write(root.path().join("o-7").join(DOMAIN_FILE), "example.org\n").unwrap();
        make("used", &[DOMAIN_FILE]);
        let _member = SlotReferences::new(&root.path().join("used"), 64, 1, 3).unwrap();
        assert_eq!(swept(root.path()), ["o-1", "o-2", "o-3", "o-4", "o-5", "o-6", "o-7", "used"]);
        for (domain, files) in others {
            assert_eq!(domain_directory::list_names(&root.path().join(domain)).unwrap().len(), files.len(), "{domain}");
        }
    }

    #[test]
    fn a_sweep_follows_no_symbolic_link_and_touches_nothing_that_others_can_change() {
        let (root, elsewhere) = (root(), root());
        make(elsewhere.path(), "x", &[DOMAIN_FILE, LOCK_FILE]);
        symlink(elsewhere.path().join("x"), root.path().join("link")).unwrap();
        make(root.path(), "open", &[DOMAIN_FILE, LOCK_FILE]);
        chmod(&root.path().join("open"), 0o750);
        assert_eq!(swept(root.path()), ["link", "open"]);
        symlink(elsewhere.path(), root.path().join("root")).unwrap();
        remove_dead_domains(&root.path().join("root"));
        assert_eq!(domain_directory::list_names(&elsewhere.path().join("x")).unwrap().len(), 2);
        chmod(elsewhere.path(), 0o770);
        assert_eq!(swept(elsewhere.path()), ["x"], "a group can change what is there");
        chmod(elsewhere.path(), 0o700);
        assert!(swept(elsewhere.path()).is_empty(), "nothing else kept it");
    }

    #[test]
    fn larger_index_is_recounted_before_growing_again() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let until = Instant::now() + 300 * LOCK_TIMEOUT;
        let join = || JoinedDomain::join(directory.path(), 4096, None, until).unwrap().0;
        let (first, mut second) = (RefCell::new(join()), join());
        let counts = Cell::new(0);
        // Both are to note the same. While the second counts what is missing the first makes room for it, and while it
        // counts anew the first notes it.
        let missing = |index: &ContentIndex| {
            counts.set(counts.get() + 1);
            let count = (1..=FIRST_INDEX_ENTRIES as u64).filter(|&print| index.find(print).is_none()).count();
            let mut first = first.borrow_mut();
            if counts.get() == 1 {
                first.grow_index(|_| FIRST_INDEX_ENTRIES, u64::MAX).unwrap();
            } else {
                (1..=FIRST_INDEX_ENTRIES as u64).for_each(|print| assert!(first.index.find_or_insert(print).is_some()));
            }
            count
        };
        second.grow_index(missing, u64::MAX).unwrap();
        assert_eq!(counts.get(), 2);
        let first = first.borrow();
        assert!(
            first.has_present_index() && second.has_present_index(),
            "what the first does with its index is not in vain"
        );
        assert_eq!(second.index.count_used(), FIRST_INDEX_ENTRIES);
    }
}
