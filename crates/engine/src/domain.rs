//! The shared state of a domain, as one member sees it: the store, the index of its contents, and the references of its
//! members. Files in a domain's directory:
//!
//! | file | contains | changed |
//! |---|---|---|
//! | `lock` | nothing; its lock guards changes of the following files | |
//! | `domain` | a page of numbers ([`HeaderField`]) and the key of fingerprints | under the lock |
//! | `slots` | one bit per slot of the store that is taken | under the lock |
//! | `index-N` | contents ([`crate::content_index`]); N is the generation | by atomic operations |
//! | `member-*` | slots that a member refers to ([`crate::slot_references`]) | by its member |
//! | `status-*` | the reported status of a member ([`crate::status_file`]) | by its member |
//! | `exiting-*` | nothing; marks a member as about to exit ([`crate::member_exit`]) | by its member, under the lock |
//!
//! Any of them may be removed at any time. Inodes tell which files belong together: see [`incarnation`].
//!
//! # Why no mapped content is freed
//! A member that wants to map a slot first adds the slot to its references. Then it checks that the index in which it
//! found the slot is still the present one. Then it checks that the entry still names that slot and is not condemned. A
//! member that frees slots ([`JoinedDomain::collect_unreferenced_slots`]) first condemns entries, then reads the
//! references of all members, and frees only slots without references. All these steps are sequentially consistent, so
//! either the mapping member sees the condemned entry, or the freeing member sees the reference. A new index is
//! announced before any entry in it is condemned. `protocol_model` checks this for all orders of steps.
//!
//! # Memory model
//! - **`Generation`**: written with the lock; sequentially consistent. A reader may see the generation of a former
//!   index. If it is unchanged after the reader referred to a slot, a member that condemns in a later index sees the
//!   reference.
//! - **`StoreInode`**: written by the creator of the domain, and set to 0 by any member that abandons the incarnation,
//!   without the lock; sequentially consistent. A member that frees slots loads it after it has found all references.
//! - **other fields of the header**, except `MergesSinceCollection` and `NextMergeTime`: written with the lock;
//!   sequentially consistent. The lock holder sees the latest values.
//! - **`MergesSinceCollection`**: incremented by every member; relaxed. It decides when to collect, and not what.
//! - **`NextMergeTime`**: set by every member, by compare and exchange; relaxed. It decides when to merge, and not
//!   what.
//! - **bits of `slots`**: read and written with the lock; relaxed, since the lock orders them.
//! - **the key**: written by the creator of the domain, before `Magic` announces it.
//! - **bytes of a slot**: written by the member that reserved it, before the index publishes its content. A member that
//!   refers to the slot and then finds it published sees these bytes, until no process refers to it any more.
//!
//! The lock is a lock of fcntl(2): the next holder passes through the kernel after the previous one, and sees all its
//! changes. Between threads of a process, the PID in `HOLDER_PID` is acquired and released.

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

/// How long a merge, or a leaving member, waits for the domain's lock: a hundred times as long as a working member
/// holds it.
pub const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// The index grows before more than this many eighths of it are used.
const GROW_AT_USED_EIGHTHS: usize = 5;

/// Fields of the file `domain`.
#[derive(Clone, Copy, Debug)]
pub enum HeaderField {
    /// [`DOMAIN_MAGIC`].
    Magic,
    /// Generation of the present index.
    Generation,
    /// Number of member files for this store. Files of dead members count until they are removed. It is never too low,
    /// so that files removed by other programs are noticed.
    MemberFiles,
    /// Epoch of sightings. The lowest byte is incremented by collections, at most once a second; the bits above it are
    /// the second of the last increment.
    Epoch,
    /// Merges since the last collection.
    MergesSinceCollection,
    /// Slots were taken only below this one.
    SlotBound,
    /// Number of slots.
    SlotCount,
    /// Device of the store.
    StoreDevice,
    /// Inode of the store. 0 once the incarnation is abandoned.
    StoreInode,
    /// The last proposed time for all members to merge ([`crate::decide::merge_turn`]), in nanoseconds of the clock
    /// that members share.
    NextMergeTime,
    /// Inode of the members' PID namespace: members identify each other by PIDs in it.
    PidNamespace,
    /// Inode of the file that members lock.
    LockInode,
    /// Inode of the file `slots`.
    SlotsInode,
}

/// A joined domain, as this process sees it.
#[derive(Debug)]
pub struct JoinedDomain {
    path: PathBuf,
    page_bytes: u64,
    header: SharedWords,
    /// Of the file that contains the header.
    identity: FileIdentity,
    /// Contents of members.
    pub store: ContentStore,
    slots: SlotBitmap,
    /// Index of contents.
    pub index: ContentIndex,
    index_generation: u64,
    /// Slots that this process refers to.
    pub references: SlotReferences,
    /// Published status of this process.
    pub status_file: StatusFile,
    /// Deadline of a merge for acquiring the lock.
    lock_deadline: Instant,
}

impl JoinedDomain {
    /// Join the domain in a directory, or create it. Also returns its hasher. Waits for the lock until the deadline. A
    /// new store prefers memory of `node`, if given.
    ///
    /// # Errors
    /// Those of files and of the lock; `InvalidData` if the directory contains other files.
    pub fn join(path: &Path, page_bytes: u64, node: Option<u32>, deadline: Instant) -> io::Result<(Self, Hasher)> {
        let namespace = pid_namespace_inode()?;
        Self::join_in_namespace(path, page_bytes, node, namespace, deadline)
            .map_err(incarnation::absent_to_files_removed)
    }

    /// Like `join`, with the PID namespace of this process: opens only files of the domain.
    fn join_in_namespace(
        path: &Path,
        page_bytes: u64,
        node: Option<u32>,
        namespace: u64,
        deadline: Instant,
    ) -> io::Result<(Self, Hasher)> {
        let lock = DomainLock::acquire(&path.join(LOCK_FILE), deadline)?;
        // A file system that proxies another one, as over a network, may not report locks of live members correctly.
        if rustix::fs::statfs(path)?.f_type != TMPFS_MAGIC {
            return Err(io::Error::new(io::ErrorKind::Unsupported, format!("{} is not on a tmpfs", path.display())));
        }
        let mut all_references = DomainReferences::find(path)?;
        status_file::remove_dead_status_files(path);
        let DomainIncarnation { header, identity, slots, store, fingerprint_key: key } =
            match DomainIncarnation::find(path, page_bytes, namespace, &lock, &all_references)? {
                Some(found) => found,
                None => DomainIncarnation::create(path, page_bytes, node, namespace, &lock)?,
            };
        let read_field = |field: HeaderField| header[field as usize].load(Ordering::SeqCst);
        let write_field = |field: HeaderField, value| header[field as usize].store(value, Ordering::SeqCst);
        // In this order, so that the count is never too low.
        let removed_files = all_references.remove_dead_files(store.identity().1) as u64;
        write_field(HeaderField::MemberFiles, read_field(HeaderField::MemberFiles).saturating_sub(removed_files));
        if !index_path(path, read_field(HeaderField::Generation)).exists() {
            write_field(HeaderField::Generation, create_index(path, read_field(HeaderField::Generation))?);
        }
        let generation = read_field(HeaderField::Generation);
        let index = open_present_index(path, generation)?;
        let references = create_references(&header, path, &store)?;
        let status_file = StatusFile::new(path)?;
        let path = path.to_owned();
        let domain = Self {
            path,
            page_bytes,
            header,
            identity,
            store,
            slots,
            index,
            index_generation: generation,
            references,
            status_file,
            lock_deadline: deadline,
        };
        Ok((domain, Hasher::with_key(&key)))
    }

    fn read_field(&self, field: HeaderField) -> u64 {
        self.header[field as usize].load(Ordering::SeqCst)
    }

    fn write_field(&self, field: HeaderField, value: u64) {
        self.header[field as usize].store(value, Ordering::SeqCst);
    }

    /// Set the deadline for acquiring the lock.
    pub fn set_lock_deadline(&mut self, deadline: Instant) {
        self.lock_deadline = deadline;
    }

    fn lock(&self) -> io::Result<DomainLock> {
        DomainLock::acquire(&self.path.join(LOCK_FILE), self.lock_deadline)
    }

    /// Current epoch of sightings.
    pub fn sighting_epoch(&self) -> u8 {
        self.read_field(HeaderField::Epoch) as u8
    }

    /// Whether this member has the present index open.
    pub fn has_present_index(&self) -> bool {
        self.read_field(HeaderField::Generation) == self.index_generation
    }

    /// Upper bound of the number of members.
    pub fn member_count(&self) -> u64 {
        self.read_field(HeaderField::MemberFiles)
    }

    /// Whether there is no other member.
    pub fn is_only_member(&self) -> bool {
        self.member_count() <= 1
    }

    /// The last proposed time for all members to merge.
    pub fn next_merge_time(&self) -> Duration {
        Duration::from_nanos(self.read_field(HeaderField::NextMergeTime))
    }

    /// Propose another merge time, unless another member has proposed one since.
    pub fn propose_merge_time(&self, previous: Duration, proposed: Duration) {
        let word = &self.header[HeaderField::NextMergeTime as usize];
        let nanoseconds = |time: Duration| time.as_nanos() as u64;
        let _ =
            word.compare_exchange(nanoseconds(previous), nanoseconds(proposed), Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Whether this member has the domain's store, and all files of its incarnation exist under their names.
    pub fn is_intact(&self) -> bool {
        self.has_present_store()
            && self.references.is_listed()
            && self.status_file.is_listed()
            && incarnation::is_current(&self.path, &self.header, self.identity, None)
            && index_path(&self.path, self.read_field(HeaderField::Generation)).exists()
    }

    /// Mark the incarnation that this member uses as abandoned: no member frees slots of its store any more. Call this
    /// before releasing references to slots that this process may still map.
    pub fn abandon_incarnation(&self) {
        incarnation::mark_abandoned(&self.header);
    }

    fn has_present_store(&self) -> bool {
        self.store.is_descriptor_valid()
            && self.store.identity()
                == (self.read_field(HeaderField::StoreDevice), self.read_field(HeaderField::StoreInode))
    }

    /// Switch to the present index and grow it, to make room for the missing contents, or for as many as fit into
    /// `max_bytes`. Returns the number of contents it has room for.
    ///
    /// # Errors
    /// Those of files and of the lock; `ENOSPC` if there is no memory for a larger index.
    pub fn grow_index(&mut self, count_missing: impl Fn(&ContentIndex) -> usize, max_bytes: u64) -> io::Result<usize> {
        let _lock = loop {
            self.follow_index()?;
            // In this order: contents that other members record meanwhile are not counted twice.
            let used = self.index.count_used();
            let contents = count_missing(&self.index);
            if used + contents <= self.index.capacity() / 8 * GROW_AT_USED_EIGHTHS {
                return Ok(self.index.free_capacity(used));
            }
            let lock = self.lock_intact()?;
            // Otherwise another member has made a larger index meanwhile, which may have the missing contents: members
            // that merge together have the same contents, and work with a replaced index is lost.
            if self.has_present_index() {
                break lock;
            }
        };
        let epoch = self.sighting_epoch();
        let used = self.index.entries().filter(|&number| self.index.is_useful(number, epoch)).count();
        let contents = count_missing(&self.index);
        let capacity = ((used + contents) * 8 / GROW_AT_USED_EIGHTHS + 1).next_power_of_two().max(FIRST_INDEX_ENTRIES);
        let max_capacity =
            ContentIndex::entries_for_bytes(max_bytes).checked_ilog2().map_or(0, |exponent| 1 << exponent);
        let capacity = if max_capacity < capacity && max_capacity <= self.index.capacity() {
            return Err(rustix::io::Errno::NOSPC.into());
        } else {
            capacity.min(max_capacity)
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

    /// Switch to the present index, if this member has an older one open.
    ///
    /// # Errors
    /// Those of mapping it.
    pub fn follow_index(&mut self) -> io::Result<()> {
        while !self.has_present_index() {
            let generation = self.read_field(HeaderField::Generation);
            // Meanwhile another index may have replaced it, and its file may be gone.
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

    /// Reserve up to `count` slots for this member alone, contiguous if possible; this member then refers to them.
    /// Fewer if there are not enough.
    ///
    /// # Errors
    /// Those of the lock; `ENOSPC` if there is no memory for references.
    pub fn reserve_slots(&self, count: u32) -> io::Result<Vec<Range<u32>>> {
        let _lock = self.lock_intact()?;
        let slot_count = self.read_field(HeaderField::SlotCount) as u32;
        let bound = self.read_field(HeaderField::SlotBound) as u32;
        let new_bound = bound.saturating_add(count).min(slot_count);
        let allocated = incarnation::open_slots_file(&self.path, &self.header)
            .and_then(|file| SharedWords::allocate_blocks(&file, 0..u64::from(new_bound.div_ceil(64))));
        let new_bound = match allocated {
            // Slots below the bound may be free again.
            Err(error) if is_out_of_space(&error) => bound,
            allocated => allocated.map(|()| new_bound)?,
        };
        let reserved = self.slots.find_free(count, new_bound);
        let end = reserved.iter().map(|slots| slots.end).max().unwrap_or(0);
        self.write_field(HeaderField::SlotBound, u64::from(end.max(bound)));
        // Referenced before they are taken: a slot that is taken, unreferenced and in no entry can be freed by others.
        for slots in &reserved {
            self.references.add(slots.clone())?;
        }
        fault::point("before slots are taken");
        for slots in &reserved {
            self.slots.set_taken(slots.clone(), true);
        }
        fault::point("after slots are taken");
        Ok(reserved)
    }

    /// Count a merge. Returns whether it is time to collect: on average, each member has merged once since the last
    /// collection.
    pub fn count_merge(&self) -> bool {
        let merge_count = self.header[HeaderField::MergesSinceCollection as usize].fetch_add(1, Ordering::Relaxed) + 1;
        merge_count >= self.read_field(HeaderField::MemberFiles)
    }

    /// Free the slots that no member refers to.
    ///
    /// # Errors
    /// Those of files: then none or only some of them were freed.
    pub fn collect_unreferenced_slots(&mut self) -> io::Result<()> {
        let _lock = self.lock_intact()?;
        self.follow_index()?;
        self.write_field(HeaderField::MergesSinceCollection, 0);
        let (epoch, second) = (self.read_field(HeaderField::Epoch), crate::merge_clock().as_secs());
        if epoch >> 8 != second {
            self.write_field(HeaderField::Epoch, second << 8 | u64::from((epoch as u8).wrapping_add(1)));
        }
        fault::point("before references are found");
        let mut all_references = DomainReferences::find(&self.path)?;
        let store = self.store.identity().1;
        let file_count = all_references.count_files(store) as u64;
        if file_count < self.read_field(HeaderField::MemberFiles) {
            // Files of members were removed, so their references are unknown: no slot of this incarnation is ever freed
            // again.
            self.abandon_incarnation();
        }
        // A member marks the incarnation as abandoned before it releases its references to it. So if those references
        // were not found, this check sees the mark.
        if !self.has_present_store() {
            return Ok(());
        }
        let removed_files = all_references.remove_dead_files(store) as u64;
        self.write_field(HeaderField::MemberFiles, file_count - removed_files);
        status_file::remove_dead_status_files(&self.path);
        let referenced_before = all_references.referenced_slots(store)?;
        let mut condemned = Vec::new();
        for number in self.index.entries() {
            let state = self.index.state(number);
            let Some(slot) = state.any_slot() else { continue };
            if !referenced_before.contains(slot) {
                self.index.set_condemned(number, true);
                condemned.push((number, slot));
            } else if state.is_condemned() {
                // Condemned by a member that died during its collection.
                self.index.set_condemned(number, false);
            }
        }
        fault::point("after contents are condemned");
        let referenced_after = all_references.referenced_slots(store)?;
        for (number, slot) in condemned {
            if referenced_after.contains(slot) {
                self.index.set_condemned(number, false);
            } else {
                self.index.clear_slot(number);
            }
        }
        fault::point("before slots are freed");
        // A slot that no entry names is free, too, unless a member that refers to it is about to publish it.
        let mut used_slots = referenced_after;
        used_slots.extend(self.index.entries().filter_map(|number| self.index.state(number).any_slot()));
        let bound = self.read_field(HeaderField::SlotBound) as u32;
        let mut freed: Vec<Range<u32>> = Vec::new();
        for slot in (0..bound).filter(|&slot| self.slots.is_taken(slot) && !used_slots.contains(slot)) {
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

    /// Refer only to the given slots from now on. This process releases its former references; forked children keep
    /// them.
    ///
    /// # Errors
    /// Those of files: then nothing has changed.
    pub fn replace_references(&mut self, slots: impl IntoIterator<Item = u32>) -> io::Result<()> {
        let _lock = self.lock_intact()?;
        let references = create_references(&self.header, &self.path, &self.store)?;
        references.add(slots)?;
        self.references = references;
        Ok(())
    }

    /// Acquire the lock of the incarnation that this member uses, if its files exist under their names. A new file
    /// under the name of a removed lock is refused.
    fn lock_intact(&self) -> io::Result<DomainLock> {
        let lock = self.lock()?;
        let is_current = incarnation::is_current(&self.path, &self.header, self.identity, Some(lock.inode()?));
        if is_current && self.references.is_listed() && self.has_present_store() {
            Ok(lock)
        } else {
            Err(incarnation::files_removed_error())
        }
    }

    /// Leave the domain: this process maps no slot of the store. The last member removes the directory.
    pub fn leave(&mut self) {
        self.references.drop_now();
        self.lock_deadline = Instant::now() + LOCK_TIMEOUT;
        let Ok(_lock) = self.lock() else { return };
        // A file that cannot be removed stays; the next process that joins finds it.
        if has_any_live_member(&self.path).is_ok_and(|has_member| !has_member) {
            let _ = domain_directory::remove_directory(&self.path);
        }
    }

    /// Prepare for the end of this process: if all other members are about to exit, too, remove the directory now. A
    /// process that joins afterwards creates the domain again. Slots that this process maps stay mapped.
    pub fn prepare_exit(&mut self) {
        // Other members that exit at the same time hold the lock briefly one after another.
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

/// Remove the domains under a root whose members were all killed. The root and each domain must be directories of this
/// user that no other user can change, as [`domain_directory::prepare_domain_directory`] makes them. Each directory is
/// opened before it is checked, and all work uses the open descriptor, so no name can lead elsewhere.
pub fn remove_dead_domains(root: &Path) {
    let user = rustix::process::geteuid().as_raw();
    let Ok(Some(root)) = domain_directory::open_private(CWD, root, user, 0o022) else { return };
    for name in domain_directory::names_in(&root).unwrap_or_default() {
        if let Ok(Some(domain)) = domain_directory::open_private(&root, &name, user, 0o077)
            && sweep_domain(&domain)
        {
            // A directory that cannot be removed now is found again later.
            let _ = unlinkat(&root, &name, AtFlags::REMOVEDIR);
        }
    }
}

/// Remove the files of a domain whose members were all killed. Returns whether all are gone.
fn sweep_domain(domain: &OwnedFd) -> bool {
    // The dot makes the kernel resolve the descriptor where symbolic links are refused.
    let path = PathBuf::from(format!("/proc/thread-self/fd/{}/.", domain.as_raw_fd()));
    let names = domain_directory::names_in(domain).unwrap_or_default();
    is_domain(&path, &names)
        && DomainLock::acquire(&path.join(LOCK_FILE), Instant::now()).is_ok_and(|_lock| {
            has_any_live_member(&path).is_ok_and(|has_member| !has_member)
                && domain_directory::remove_files(&path).is_ok()
        })
}

/// Whether a directory with these file names belongs to a domain: `PAGEFOLD_RUNTIME` may name a directory that has
/// other uses. Each name must be valid for a domain, and at least one file must be specific to pagefold: a header, or a
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

/// Whether a name is valid for a file of a member, which ends in a random number.
fn is_of_member(name: &str) -> bool {
    let has_format = |name: &str, prefix: &str, numbers: usize| {
        let rest = name.strip_prefix(prefix).and_then(|rest| rest.rsplit_once('-'));
        rest.is_some_and(|(rest, random)| {
            let is_random = random.len() == 16 && random.bytes().all(|digit| digit.is_ascii_hexdigit());
            is_random && rest.split('-').count() == numbers && rest.split('-').all(is_number)
        })
    };
    match name.strip_prefix(member_exit::EXIT_MARKER_PREFIX) {
        Some(member) => has_format(member, slot_references::REFERENCES_PREFIX, 3),
        None => {
            has_format(name, slot_references::REFERENCES_PREFIX, 3)
                || has_format(name, status_file::STATUS_FILE_PREFIX, 1)
        }
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|digit| digit.is_ascii_digit())
}

/// Whether a file is the header of a completely created domain.
fn is_header(path: &Path) -> bool {
    let mut magic = [0; 8];
    let read = domain_directory::open_file(path, false).and_then(|file| file.read_exact_at(&mut magic, 0));
    read.is_ok() && u64::from_ne_bytes(magic) == DOMAIN_MAGIC
}

/// Create references to a store. They are counted before other members can find them.
fn create_references(header: &SharedWords, path: &Path, store: &ContentStore) -> io::Result<SlotReferences> {
    let file_count = &header[HeaderField::MemberFiles as usize];
    let slot_count = header[HeaderField::SlotCount as usize].load(Ordering::SeqCst) as u32;
    file_count.fetch_add(1, Ordering::SeqCst);
    SlotReferences::new(path, slot_count, store.identity().1, store.descriptor()).inspect_err(|_| {
        // The failed call has left no file.
        file_count.fetch_sub(1, Ordering::SeqCst);
    })
}

/// Inode of the PID namespace of this process.
fn pid_namespace_inode() -> io::Result<u64> {
    const PID_NAMESPACE_PATH: &str = "/proc/thread-self/ns/pid";
    let failed = |error: io::Error| {
        io::Error::new(error.kind(), format!("cannot read {PID_NAMESPACE_PATH}: {error}; mount /proc"))
    };
    Ok(std::fs::metadata(PID_NAMESPACE_PATH).map_err(failed)?.ino())
}

/// Open the index of a generation.
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

    /// A root that only this user can access.
    fn root() -> tempfile::TempDir {
        let root = tempfile::tempdir_in("/dev/shm").unwrap();
        chmod(root.path(), 0o700);
        root
    }

    /// Make a directory that only this user can access, with some files. The header is that of a completely created
    /// domain.
    fn make(root: &Path, domain: &str, files: &[&str]) {
        let path = root.join(domain);
        std::fs::create_dir(&path).unwrap();
        chmod(&path, 0o700);
        for file in files {
            let content = if *file == DOMAIN_FILE { DOMAIN_MAGIC.to_ne_bytes().to_vec() } else { Vec::new() };
            std::fs::write(path.join(file), content).unwrap();
        }
    }

    /// Names that a sweep leaves under a root.
    fn swept(root: &Path) -> Vec<OsString> {
        remove_dead_domains(root);
        let mut remaining = domain_directory::list_names(root).unwrap();
        remaining.sort();
        remaining
    }

    const MEMBER: &str = "member-7-8-9-0123456789abcdef";

    #[test]
    fn files_of_killed_members_are_removed_and_others_are_kept() {
        let root = root();
        let make = |domain: &str, files: &[&str]| make(root.path(), domain, files);
        for file in [DOMAIN_FILE, MEMBER, "status-8-0123456789abcdef", &format!("exiting-{MEMBER}")] {
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
        assert!(swept(elsewhere.path()).is_empty(), "only the group permission prevented the removal");
    }

    #[test]
    fn larger_index_is_recounted_before_growing_again() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let deadline = Instant::now() + 300 * LOCK_TIMEOUT;
        let join = || JoinedDomain::join(directory.path(), 4096, None, deadline).unwrap().0;
        let (first, mut second) = (RefCell::new(join()), join());
        let counts = Cell::new(0);
        // Both members are to record the same contents. While the second counts missing contents, the first grows the
        // index; while the second counts again, the first records them.
        let count_missing = |index: &ContentIndex| {
            counts.set(counts.get() + 1);
            let count =
                (1..=FIRST_INDEX_ENTRIES as u64).filter(|&fingerprint| index.find(fingerprint).is_none()).count();
            let mut first = first.borrow_mut();
            if counts.get() == 1 {
                first.grow_index(|_| FIRST_INDEX_ENTRIES, u64::MAX).unwrap();
            } else {
                (1..=FIRST_INDEX_ENTRIES as u64)
                    .for_each(|fingerprint| assert!(first.index.find_or_insert(fingerprint).is_some()));
            }
            count
        };
        second.grow_index(count_missing, u64::MAX).unwrap();
        assert_eq!(counts.get(), 2);
        let first = first.borrow();
        assert!(
            first.has_present_index() && second.has_present_index(),
            "the first member's work on its index is kept"
        );
        assert_eq!(second.index.count_used(), FIRST_INDEX_ENTRIES);
    }
}
