//! Which contents the members of a domain hold, and which lie in the store: a table in shared memory, without locks.
//!
//! An entry is two words. The first is the fingerprint of a content; it is written once, by compare and exchange
//! against the 0 of an empty entry, and an entry keeps its fingerprint for as long as the table stands. The second is a
//! [`IndexEntryState`]: where the content lies in the store, if it does, and who saw it last. Entries are found by linear
//! probing. Every change is one atomic operation on one word, so a member that dies at any point leaves a table that is
//! whole.
//!
//! A fingerprint only says where to look: contents are compared byte by byte before anything is mapped, and a sighting
//! that is wrong costs a page moved to the store for nothing.
//!
//! # Memory model
//! - **fingerprint**: written by whoever finds it 0, once; relaxed. A reader sees 0, or what it is for as long as the
//!   table stands. It guards nothing: who sees it goes on to the state, and a state that is still 0 says nothing.
//! - **state**: written by every member, by compare and exchange; sequentially consistent. A reader sees any state that
//!   was there, and all agree in which order they were.
//!
//! States take part in the order that [`domain`](crate::domain) needs: of a reference that is added before a state is
//! loaded, and a state that is condemned before references are read, one is seen. A state that says a slot also
//! publishes what was written to the slot before, as a release that its reader acquires.
//!
//! A table does not grow. Under the domain's lock a larger one is made beside it, without the entries that nobody has
//! seen for long, and takes its place. What members still write into the old one is lost, which
//! [`choose`](crate::run_selection) knows.

use crate::shared_words::SharedWords;
use std::fs::File;
use std::io;
use std::sync::atomic::Ordering;

/// Of a table that is filled as far as it may be, runs are a hundred times shorter.
const MAX_PROBES: usize = 4096;

/// So many of 8 entries are used at most, where there is no memory for a larger table.
const MAX_USED_EIGHTHS: usize = 7;

/// Words of an entry.
const WORDS_PER_ENTRY: usize = 2;

/// A content of which nobody saw a partner in so many epochs is taken to have none: what members look at in the same
/// second is compared, however often they merge.
const MAX_PAIRED_EPOCHS: u8 = 3;

/// Which page was seen to hold a content: a tag of the page among all pages of all members, never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SightingTag(u32);

impl SightingTag {
    const BITS: u32 = 22;

    /// Of a page, by a member's own random number and the page's address. Two pages share one with probability 2^-22,
    /// and are then not known to be partners.
    pub fn new(member: u64, address: u64) -> Self {
        // The mixer of splitmix64 (G. Steele et al., OOPSLA 2014).
        let mut word = member ^ address.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        Self(((word ^ word >> 31) as u32 >> (32 - Self::BITS)).max(1))
    }
}

/// The second word of an entry: bits 0 to 31 the slot in the store and one, 32 whether it is condemned, 33 whether the
/// content was seen in two places, 34 to 55 where it was seen, 56 to 63 the epoch of that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct IndexEntryState(u64);

const SLOT_MASK: u64 = u32::MAX as u64;
const CONDEMNED_BIT: u64 = 1 << 32;
const PAIRED_BIT: u64 = 1 << 33;
const TAG_SHIFT: u32 = 34;
const EPOCH_SHIFT: u32 = 56;

impl IndexEntryState {
    /// Where the content lies, if it does and is there to stay.
    pub fn mappable_slot(self) -> Option<u32> {
        self.any_slot().filter(|_| self.0 & CONDEMNED_BIT == 0)
    }

    /// Where the content lies, if it does.
    pub fn any_slot(self) -> Option<u32> {
        ((self.0 & SLOT_MASK) as u32).checked_sub(1)
    }

    /// Whether it may go away any moment.
    pub fn is_condemned(self) -> bool {
        self.0 & CONDEMNED_BIT != 0
    }

    /// Whether it was seen in two places of late.
    pub fn is_paired(self) -> bool {
        self.0 & PAIRED_BIT != 0
    }

    fn tag(self) -> u32 {
        (self.0 >> TAG_SHIFT) as u32 & ((1 << SightingTag::BITS) - 1)
    }

    fn is_sighting_recent(self, epoch: u8) -> bool {
        self.tag() != 0 && epoch.wrapping_sub((self.0 >> EPOCH_SHIFT) as u8) <= MAX_PAIRED_EPOCHS
    }

    /// With one more sighting.
    fn with_sighting(self, tag: SightingTag, epoch: u8) -> Self {
        let recent = self.is_sighting_recent(epoch);
        let paired = recent && (self.is_paired() || self.tag() != tag.0);
        let kept = self.0 & (SLOT_MASK | CONDEMNED_BIT);
        let paired = if paired { PAIRED_BIT } else { 0 };
        Self(kept | paired | u64::from(tag.0) << TAG_SHIFT | u64::from(epoch) << EPOCH_SHIFT)
    }

    fn with_slot(self, slot: Option<u32>) -> Self {
        Self(self.0 & !(SLOT_MASK | CONDEMNED_BIT) | slot.map_or(0, |slot| u64::from(slot) + 1))
    }

    /// Of a content that was stored, unless it lies somewhere already.
    pub fn to_published(self, slot: u32) -> Option<Self> {
        self.any_slot().is_none().then(|| self.with_slot(Some(slot)))
    }

    /// Condemned or pardoned, if it lies in the store.
    pub fn to_condemned(self, condemned: bool) -> Option<Self> {
        let state = Self(if condemned { self.0 | CONDEMNED_BIT } else { self.0 & !CONDEMNED_BIT });
        self.any_slot().map(|_| state)
    }

    /// Of a content that no longer lies in the store, if it was condemned.
    pub fn to_unstored(self) -> Option<Self> {
        self.is_condemned().then(|| self.with_slot(None))
    }
}

/// The table. A number names an entry for as long as the table stands.
#[derive(Debug)]
pub struct ContentIndex {
    words: SharedWords,
    entry_mask: usize,
}

impl ContentIndex {
    /// The table in a file, of so many entries, a power of two; a new file is a table without any.
    ///
    /// # Errors
    /// Those of mapping, and `ENOSPC` where there is no room for it.
    pub fn map(file: &File, entries: usize) -> io::Result<Self> {
        assert!(entries.is_power_of_two(), "a table of {entries} entries");
        let words = SharedWords::map(file, entries * WORDS_PER_ENTRY)?;
        SharedWords::allocate_blocks(file, 0..words.len() as u64)?;
        Ok(Self { words, entry_mask: entries - 1 })
    }

    /// How many entries there are in a table of so many bytes.
    pub fn entries_for_bytes(bytes: u64) -> usize {
        bytes as usize / WORDS_PER_ENTRY / size_of::<u64>()
    }

    /// How many entries there is room for.
    pub fn capacity(&self) -> usize {
        self.entry_mask + 1
    }

    /// For how many contents beside so many there is room: of a table that is fuller, runs are too long to find anything.
    pub fn free_capacity(&self, used: usize) -> usize {
        (self.capacity() / 8 * MAX_USED_EIGHTHS).saturating_sub(used)
    }

    /// The entry of a fingerprint, which is not 0, made if there is none; `None` if the table is as full as it may be
    /// there.
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

    /// The entry of a fingerprint, which is not 0, if there is one.
    pub fn find(&self, fingerprint: u64) -> Option<usize> {
        self.probe_sequence(fingerprint)
            .map(|number| (number, self.fingerprint(number)))
            .take_while(|&(_, found)| found != 0)
            .find_map(|(number, found)| (found == fingerprint).then_some(number))
    }

    /// Where the entry of a fingerprint may be, in the order in which to look.
    fn probe_sequence(&self, fingerprint: u64) -> impl Iterator<Item = usize> + use<> {
        debug_assert_ne!(fingerprint, 0, "zeros are not stored");
        let mask = self.entry_mask;
        // So many probes are a table that is too full, whatever the counters say.
        (0..=(mask / 2).min(MAX_PROBES)).map(move |probe| (fingerprint as usize).wrapping_add(probe) & mask)
    }

    /// What is known of an entry. Ordered with all other accesses of this kind.
    pub fn state(&self, number: usize) -> IndexEntryState {
        IndexEntryState(self.words[number * WORDS_PER_ENTRY + 1].load(Ordering::SeqCst))
    }

    /// The fingerprint of an entry, 0 if it is empty.
    pub fn fingerprint(&self, number: usize) -> u64 {
        self.words[number * WORDS_PER_ENTRY].load(Ordering::Relaxed)
    }

    /// A page was seen to hold a content. What was known before.
    pub fn record_sighting(&self, number: usize, tag: SightingTag, epoch: u8) -> IndexEntryState {
        self.update_state(number, |state| Some(state.with_sighting(tag, epoch))).unwrap_or_else(|state| state)
    }

    /// Say where a content lies, unless it lies somewhere already; where it lies then.
    ///
    /// # Errors
    /// If it is condemned where it lies.
    pub fn publish(&self, number: usize, slot: u32) -> Result<u32, IndexEntryState> {
        match self.update_state(number, |state| state.to_published(slot)) {
            Ok(_) => Ok(slot),
            Err(other) => other.mappable_slot().ok_or(other),
        }
    }

    /// Condemn a content that lies in the store, or pardon it. Under the domain's lock.
    pub fn set_condemned(&self, number: usize, condemned: bool) {
        let _ = self.update_state(number, |state| state.to_condemned(condemned));
    }

    /// A condemned content no longer lies in the store. Under the domain's lock.
    pub fn clear_slot(&self, number: usize) {
        let _ = self.update_state(number, IndexEntryState::to_unstored);
    }

    /// The entries that are not empty.
    pub fn entries(&self) -> impl Iterator<Item = usize> {
        (0..self.capacity()).filter(|&number| self.fingerprint(number) != 0)
    }

    /// How many entries are not empty.
    pub fn count_used(&self) -> usize {
        self.entries().count()
    }

    /// Whether an entry says anything that is still of use.
    pub fn is_useful(&self, number: usize, epoch: u8) -> bool {
        let state = self.state(number);
        state.any_slot().is_some() || state.is_sighting_recent(epoch)
    }

    /// Take over the entries of another table that are of use, before anybody else sees this one.
    pub fn copy_useful_entries(&self, other: &Self, epoch: u8) {
        for from in other.entries().filter(|&number| other.is_useful(number, epoch)) {
            if let Some(to) = self.find_or_insert(other.fingerprint(from)) {
                self.words[to * WORDS_PER_ENTRY + 1].store(other.state(from).0, Ordering::SeqCst);
            }
        }
    }

    /// Change a state by what it is: what it was, or, if there was nothing to change, what it is.
    fn update_state(
        &self,
        number: usize,
        to: impl Fn(IndexEntryState) -> Option<IndexEntryState>,
    ) -> Result<IndexEntryState, IndexEntryState> {
        let word = &self.words[number * WORDS_PER_ENTRY + 1];
        word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |word| to(IndexEntryState(word)).map(|state| state.0))
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
        assert!(!index.state(number).is_paired(), "the same page twice");
        index.record_sighting(number, page_tag(2), 1);
        assert!(index.state(number).is_paired());
        index.record_sighting(number, page_tag(2), 2);
        assert!(index.state(number).is_paired(), "until nobody has seen it for long");
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
        assert_eq!(index.state(number).mappable_slot(), Some(0), "only what is condemned goes");
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
        let made: Vec<usize> = (1..=16).filter_map(|print| small.find_or_insert(print)).collect();
        assert!(made.len() >= 8);
        assert_eq!(small.count_used(), made.len());
        let (young, old) = (made[0], made[1]);
        small.record_sighting(young, page_tag(1), 9);
        small.record_sighting(old, page_tag(1), 1);
        let _ = small.publish(made[2], 3);
        let large = test_index(64);
        large.copy_useful_entries(&small, 9);
        assert_eq!(large.count_used(), 2);
        let number = large.find_or_insert(small.fingerprint(made[2])).unwrap();
        assert_eq!(large.count_used(), 2, "it was there");
        assert_eq!(large.state(number).mappable_slot(), Some(3));
    }

    #[test]
    fn threads_agree_on_the_slot_of_a_content() {
        // Miri goes a thousand times slower, and through more orders.
        const CONTENT_COUNT: u64 = if cfg!(miri) { 20 } else { 1500 };
        const ENTRY_COUNT: usize = if cfg!(miri) { 64 } else { 4096 };
        let index = &test_index(ENTRY_COUNT);
        let places: Vec<Vec<u32>> = thread::scope(|scope| {
            let threads: Vec<_> = (0..4u32)
                .map(|thread| {
                    scope.spawn(move || {
                        let place = |print| index.publish(index.find_or_insert(print).unwrap(), thread).unwrap();
                        (1..=CONTENT_COUNT).map(place).collect()
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(places.iter().all(|seen| *seen == places[0]));
        assert_eq!(index.count_used(), CONTENT_COUNT as usize);
    }
}
