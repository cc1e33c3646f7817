//! Index of the contents that members hold, and of those in the store: a lock-free table in shared memory.
//!
//! An entry is two words. The first is the fingerprint of a content. It is written once, by compare and exchange
//! against the 0 of an empty entry, and an entry keeps its fingerprint as long as the table exists. The second is an
//! [`IndexEntryState`]: the slot of the content in the store, if it is stored, and the last sighting. Entries are found
//! by linear probing. Every change is one atomic operation on one word, so a member that dies at any point leaves a
//! consistent table.
//!
//! A fingerprint is only a hint: contents are compared byte by byte before any mapping is replaced. A wrong sighting
//! only costs an unnecessary page in the store.
//!
//! # Memory model
//! - **fingerprint**: written once, by the first member that finds it 0; relaxed. A reader sees 0 or the final value.
//!   It guards no other data: a reader then loads the state, and a state that is still 0 has no information.
//! - **state**: written by every member, by compare and exchange; sequentially consistent. A reader may see any former
//!   state, and all readers agree on their order.
//!
//! States take part in the order that [`domain`](crate::domain) needs. One member adds a reference before it loads a
//! state, another condemns the state before it reads references: at least one of them sees the other's write. A state
//! that names a slot also publishes the earlier writes to that slot, by release and acquire.
//!
//! A table does not grow. Under the domain's lock a member makes a larger one beside it, without entries that no member
//! has seen for long, and replaces it. Later writes to the old table are lost, which
//! [`run_selection`](crate::run_selection) takes into account.

use crate::shared_words::SharedWords;
use std::fs::File;
use std::io;
use std::sync::atomic::Ordering;

/// In a table at its maximum load, probe sequences are a hundred times shorter.
const MAX_PROBES: usize = 4096;

/// At most this many eighths of the entries are used if there is no memory for a larger table.
const MAX_USED_EIGHTHS: usize = 7;

/// Words per entry.
const WORDS_PER_ENTRY: usize = 2;

/// A content without a second sighting for more than this many epochs counts as unpaired. Pages that members scan in
/// the same second are compared, however often members merge.
const MAX_PAIRED_EPOCHS: u8 = 3;

/// Identifies a page that contains a content, among all pages of all members. Never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SightingTag(u32);

impl SightingTag {
    const BITS: u32 = 22;

    /// Tag of a page, from a member's random number and the page's address. Two pages have the same tag with
    /// probability 2^-22, and then do not count as partners.
    pub fn new(member: u64, address: u64) -> Self {
        // The mixer of splitmix64 (G. Steele et al., OOPSLA 2014).
        let mut word = member ^ address.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        Self(((word ^ word >> 31) as u32 >> (32 - Self::BITS)).max(1))
    }
}

/// The second word of an entry. Bits 0 to 31: the slot in the store plus one. Bit 32: condemned. Bit 33: seen in two
/// places. Bits 34 to 55: tag of the last sighting. Bits 56 to 63: epoch of the last sighting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct IndexEntryState(u64);

const SLOT_MASK: u64 = u32::MAX as u64;
const CONDEMNED_BIT: u64 = 1 << 32;
const PAIRED_BIT: u64 = 1 << 33;
const TAG_SHIFT: u32 = 34;
const EPOCH_SHIFT: u32 = 56;

impl IndexEntryState {
    /// Slot of the content, if it is stored and not condemned.
    pub fn mappable_slot(self) -> Option<u32> {
        self.any_slot().filter(|_| self.0 & CONDEMNED_BIT == 0)
    }

    /// Slot of the content, if it is stored.
    pub fn any_slot(self) -> Option<u32> {
        ((self.0 & SLOT_MASK) as u32).checked_sub(1)
    }

    /// Whether the content may be freed at any time.
    pub fn is_condemned(self) -> bool {
        self.0 & CONDEMNED_BIT != 0
    }

    /// Whether the content was seen in two places recently.
    pub fn is_paired(self) -> bool {
        self.0 & PAIRED_BIT != 0
    }

    fn tag(self) -> u32 {
        (self.0 >> TAG_SHIFT) as u32 & ((1 << SightingTag::BITS) - 1)
    }

    fn is_sighting_recent(self, epoch: u8) -> bool {
        self.tag() != 0 && epoch.wrapping_sub((self.0 >> EPOCH_SHIFT) as u8) <= MAX_PAIRED_EPOCHS
    }

    /// Add a sighting.
    fn with_sighting(self, tag: SightingTag, epoch: u8) -> Self {
        let is_recent = self.is_sighting_recent(epoch);
        let is_paired = is_recent && (self.is_paired() || self.tag() != tag.0);
        let slot_bits = self.0 & (SLOT_MASK | CONDEMNED_BIT);
        let paired_bit = if is_paired { PAIRED_BIT } else { 0 };
        Self(slot_bits | paired_bit | u64::from(tag.0) << TAG_SHIFT | u64::from(epoch) << EPOCH_SHIFT)
    }

    fn with_slot(self, slot: Option<u32>) -> Self {
        Self(self.0 & !(SLOT_MASK | CONDEMNED_BIT) | slot.map_or(0, |slot| u64::from(slot) + 1))
    }

    /// Record the slot of a newly stored content. `None` if it is stored already.
    pub fn to_published(self, slot: u32) -> Option<Self> {
        self.any_slot().is_none().then(|| self.with_slot(Some(slot)))
    }

    /// Set or clear the condemned mark. `None` if the content is not stored.
    pub fn to_condemned(self, condemned: bool) -> Option<Self> {
        let state = Self(if condemned { self.0 | CONDEMNED_BIT } else { self.0 & !CONDEMNED_BIT });
        self.any_slot().map(|_| state)
    }

    /// Remove the slot. `None` unless condemned.
    pub fn to_unstored(self) -> Option<Self> {
        self.is_condemned().then(|| self.with_slot(None))
    }
}

/// The table. A number identifies an entry as long as the table exists.
#[derive(Debug)]
pub struct ContentIndex {
    words: SharedWords,
    entry_mask: usize,
}

impl ContentIndex {
    /// Map the table in a file. `entries` is a power of two; a new file is an empty table.
    ///
    /// # Errors
    /// Those of mapping; `ENOSPC` if there is no space for it.
    pub fn map(file: &File, entries: usize) -> io::Result<Self> {
        assert!(entries.is_power_of_two(), "a table of {entries} entries");
        let words = SharedWords::map(file, entries * WORDS_PER_ENTRY)?;
        SharedWords::allocate_blocks(file, 0..words.len() as u64)?;
        Ok(Self { words, entry_mask: entries - 1 })
    }

    /// Number of entries in a table of this size.
    pub fn entries_for_bytes(bytes: u64) -> usize {
        bytes as usize / WORDS_PER_ENTRY / size_of::<u64>()
    }

    /// Number of entries of the table.
    pub fn capacity(&self) -> usize {
        self.entry_mask + 1
    }

    /// Number of contents that can be added to `used` ones: in a fuller table, probe sequences are too long.
    pub fn free_capacity(&self, used: usize) -> usize {
        (self.capacity() / 8 * MAX_USED_EIGHTHS).saturating_sub(used)
    }

    /// Find the entry of a nonzero fingerprint, or insert it; `None` if the table is full there.
    pub fn find_or_insert(&self, fingerprint: u64) -> Option<usize> {
        for number in self.probe_sequence(fingerprint) {
            let word = &self.words[number * WORDS_PER_ENTRY];
            let mut found = word.load(Ordering::Relaxed);
            if found == 0 {
                match word.compare_exchange(0, fingerprint, Ordering::Relaxed, Ordering::Relaxed) {
                    Ok(_) => return Some(number),
                    Err(other) => found = other,
                }
            }
            if found == fingerprint {
                return Some(number);
            }
        }
        None
    }

    /// Find the entry of a nonzero fingerprint.
    pub fn find(&self, fingerprint: u64) -> Option<usize> {
        self.probe_sequence(fingerprint)
            .map(|number| (number, self.fingerprint(number)))
            .take_while(|&(_, found)| found != 0)
            .find_map(|(number, found)| (found == fingerprint).then_some(number))
    }

    /// Possible positions of the entry of a fingerprint, in probing order.
    fn probe_sequence(&self, fingerprint: u64) -> impl Iterator<Item = usize> + use<> {
        debug_assert_ne!(fingerprint, 0, "zeros are not stored");
        let mask = self.entry_mask;
        // A longer probe sequence means that the table is too full, whatever the counters say.
        (0..=(mask / 2).min(MAX_PROBES)).map(move |probe| (fingerprint as usize).wrapping_add(probe) & mask)
    }

    /// State of an entry. Sequentially consistent.
    pub fn state(&self, number: usize) -> IndexEntryState {
        IndexEntryState(self.words[number * WORDS_PER_ENTRY + 1].load(Ordering::SeqCst))
    }

    /// Fingerprint of an entry, 0 if it is empty.
    pub fn fingerprint(&self, number: usize) -> u64 {
        self.words[number * WORDS_PER_ENTRY].load(Ordering::Relaxed)
    }

    /// Record that a page contains this content. Returns the previous state.
    pub fn record_sighting(&self, number: usize, tag: SightingTag, epoch: u8) -> IndexEntryState {
        self.update_state(number, |state| Some(state.with_sighting(tag, epoch))).unwrap_or_else(|state| state)
    }

    /// Publish the slot of a content, unless it is stored already. Returns the slot where it is stored.
    ///
    /// # Errors
    /// The state, if the stored content is condemned.
    pub fn publish(&self, number: usize, slot: u32) -> Result<u32, IndexEntryState> {
        match self.update_state(number, |state| state.to_published(slot)) {
            Ok(_) => Ok(slot),
            Err(other) => other.mappable_slot().ok_or(other),
        }
    }

    /// Condemn a stored content, or pardon it. Requires the domain's lock.
    pub fn set_condemned(&self, number: usize, condemned: bool) {
        let _ = self.update_state(number, |state| state.to_condemned(condemned));
    }

    /// Remove the slot of a condemned content. Requires the domain's lock.
    pub fn clear_slot(&self, number: usize) {
        let _ = self.update_state(number, IndexEntryState::to_unstored);
    }

    /// The entries that are not empty.
    pub fn entries(&self) -> impl Iterator<Item = usize> {
        (0..self.capacity()).filter(|&number| self.fingerprint(number) != 0)
    }

    /// Number of entries that are not empty.
    pub fn count_used(&self) -> usize {
        self.entries().count()
    }

    /// Whether an entry has a slot or a recent sighting.
    pub fn is_useful(&self, number: usize, epoch: u8) -> bool {
        let state = self.state(number);
        state.any_slot().is_some() || state.is_sighting_recent(epoch)
    }

    /// Copy the useful entries of another table, before other members can see this one.
    pub fn copy_useful_entries(&self, other: &Self, epoch: u8) {
        for from in other.entries().filter(|&number| other.is_useful(number, epoch)) {
            if let Some(to) = self.find_or_insert(other.fingerprint(from)) {
                self.words[to * WORDS_PER_ENTRY + 1].store(other.state(from).0, Ordering::SeqCst);
            }
        }
    }

    /// Update a state atomically. Returns the previous state, or as an error the current state if `update` returns
    /// `None`.
    fn update_state(
        &self,
        number: usize,
        update: impl Fn(IndexEntryState) -> Option<IndexEntryState>,
    ) -> Result<IndexEntryState, IndexEntryState> {
        let word = &self.words[number * WORDS_PER_ENTRY + 1];
        word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |word| update(IndexEntryState(word)).map(|state| state.0))
            .map(IndexEntryState)
            .map_err(IndexEntryState)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    fn test_index(entries: usize) -> ContentIndex {
        ContentIndex { words: SharedWords::anonymous(entries * WORDS_PER_ENTRY), entry_mask: entries - 1 }
    }

    fn page_tag(page: u64) -> SightingTag {
        SightingTag::new(7, page * 4096)
    }

    #[test]
    fn content_is_paired_once_two_pages_hold_it() {
        let index = test_index(16);
        let number = index.find_or_insert(99).unwrap();
        assert_eq!(index.find_or_insert(99), Some(number));
        index.record_sighting(number, page_tag(1), 0);
        index.record_sighting(number, page_tag(1), 1);
        assert!(!index.state(number).is_paired(), "the same page was seen twice");
        index.record_sighting(number, page_tag(2), 1);
        assert!(index.state(number).is_paired());
        index.record_sighting(number, page_tag(2), 2);
        assert!(index.state(number).is_paired(), "it stays paired until its last sighting is old");
        index.record_sighting(number, page_tag(2), 3 + MAX_PAIRED_EPOCHS);
        assert!(!index.state(number).is_paired());
    }

    #[test]
    fn epochs_wrap_around() {
        let index = test_index(16);
        let number = index.find_or_insert(5).unwrap();
        index.record_sighting(number, page_tag(1), 254);
        index.record_sighting(number, page_tag(2), 1);
        assert!(index.state(number).is_paired());
        assert!(index.is_useful(number, 4) && !index.is_useful(number, 5));
    }

    #[test]
    fn first_store_of_a_content_sets_its_slot() {
        let index = test_index(16);
        let number = index.find_or_insert(5).unwrap();
        index.record_sighting(number, page_tag(1), 0);
        assert_eq!(index.publish(number, 0), Ok(0));
        assert_eq!(index.publish(number, 8), Ok(0));
        assert_eq!(index.state(number).mappable_slot(), Some(0));
        index.clear_slot(number);
        assert_eq!(index.state(number).mappable_slot(), Some(0), "only a condemned slot is cleared");
        index.set_condemned(number, true);
        assert_eq!((index.state(number).mappable_slot(), index.state(number).any_slot()), (None, Some(0)));
        assert!(index.publish(number, 8).is_err());
        index.clear_slot(number);
        assert_eq!(index.publish(number, 8), Ok(8));
        assert!(index.is_useful(number, 100));
    }

    #[test]
    fn full_index_is_reported_and_larger_one_copies_useful_entries() {
        let small = test_index(16);
        let numbers: Vec<usize> = (1..=16).filter_map(|fingerprint| small.find_or_insert(fingerprint)).collect();
        assert!(numbers.len() >= 8);
        assert_eq!(small.count_used(), numbers.len());
        let (recent_entry, stale_entry) = (numbers[0], numbers[1]);
        small.record_sighting(recent_entry, page_tag(1), 9);
        small.record_sighting(stale_entry, page_tag(1), 1);
        let _ = small.publish(numbers[2], 3);
        let large = test_index(64);
        large.copy_useful_entries(&small, 9);
        assert_eq!(large.count_used(), 2);
        let number = large.find_or_insert(small.fingerprint(numbers[2])).unwrap();
        assert_eq!(large.count_used(), 2, "the entry was copied");
        assert_eq!(large.state(number).mappable_slot(), Some(3));
    }

    #[test]
    fn threads_agree_on_the_slot_of_a_content() {
        // Miri is a thousand times slower, and explores more orders.
        const CONTENT_COUNT: u64 = if cfg!(miri) { 20 } else { 1500 };
        const ENTRY_COUNT: usize = if cfg!(miri) { 64 } else { 4096 };
        let index = &test_index(ENTRY_COUNT);
        let slots: Vec<Vec<u32>> = thread::scope(|scope| {
            let threads: Vec<_> = (0..4u32)
                .map(|thread| {
                    scope.spawn(move || {
                        let publish_slot =
                            |fingerprint| index.publish(index.find_or_insert(fingerprint).unwrap(), thread).unwrap();
                        (1..=CONTENT_COUNT).map(publish_slot).collect()
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(slots.iter().all(|thread_slots| *thread_slots == slots[0]));
        assert_eq!(index.count_used(), CONTENT_COUNT as usize);
    }
}
