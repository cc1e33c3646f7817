//! Which pages may have a partner, told in a bit or two a page and without sorting.
//!
//! A bitmap notes each fingerprint that was seen once, another each that was seen again. Of different fingerprints that
//! share a bit both are taken for partners, so what seemed to have one is noted once more by other bits, and little is
//! left that has none. What either does not have has no partner, and that is most of what a host holds: it need be
//! neither sorted nor read again.
//!
//! Fingerprints are told apart by half of them, which is all that is known of pages that are remembered: of n pages one
//! in 2^32 / n is taken for one with a partner by that alone.

use crate::index::{IndexEntry, PageIndex};
use pagefold_base::{Fingerprint, PageClass};
use pagefold_sys::advise::prefer_huge_pages;
use rayon::prelude::*;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bits of each bitmap for a page that it is made for: one unique page in sixteen at most is taken for one with a partner
/// by the first, and seldom by both.
const BITS_PER_PAGE: usize = 16;

/// The multipliers by which halves of fingerprints are spread over the bits (Fibonacci hashing: D. Knuth, The Art of
/// Computer Programming 3, 6.4). The second is the first of SplitMix64's.
const HASH_MULTIPLIERS: [u64; 2] = [0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9];

/// The bitmaps: 2 bytes for each page, and as much again for each that has a partner, while they live; twice that while
/// each is made.
#[derive(Debug)]
pub struct DuplicateFilter {
    seen_twice: Vec<Bitmap>,
}

#[derive(Debug)]
struct Bitmap {
    words: Vec<AtomicU64>,
    multiplier: u64,
}

impl DuplicateFilter {
    /// Of the pages that were read in the first pass.
    pub fn build(index: &PageIndex) -> Self {
        let mut pairs = Self { seen_twice: Vec::new() };
        let mut contents = index.page_count();
        for spread in HASH_MULTIPLIERS {
            let bitmap = || Bitmap::new(contents * BITS_PER_PAGE, spread);
            let (once, again) = (bitmap(), bitmap());
            index
                .entries
                .par_iter()
                .filter(|entry| can_be_grouped(index, entry) && pairs.may_have_duplicate(entry.fingerprint()))
                .for_each(|entry| {
                    if once.set(entry.fingerprint()) && !again.contains(entry.fingerprint()) {
                        again.set(entry.fingerprint());
                    }
                });
            // Each bit is of two contents by chance, or of one that several pages have.
            contents = again.count_ones() * 2;
            pairs.seen_twice.push(again);
        }
        pairs
    }

    /// Whether another page may have the same fingerprint.
    pub fn may_have_duplicate(&self, fingerprint: Fingerprint) -> bool {
        self.seen_twice.iter().all(|again| again.contains(fingerprint))
    }

    /// Whether a page has anything to gain: it holds zeros, or may have a partner. Before pages are grouped.
    pub fn is_candidate(&self, index: &PageIndex, ordinal: u32) -> bool {
        match index.mark(ordinal).class() {
            Some(PageClass::Zero) => true,
            Some(PageClass::Unique) => self.may_have_duplicate(index.entries[ordinal as usize].fingerprint()),
            _ => false,
        }
    }
}

impl Bitmap {
    /// Of at least so many bits, none of them set.
    fn new(bits: usize, multiplier: u64) -> Self {
        let count = bits.div_ceil(64).max(1);
        let mut words = Vec::with_capacity(count);
        // Each access is to another place.
        let _ = prefer_huge_pages(words.spare_capacity_mut());
        words.par_extend((0..count).into_par_iter().map(|_| AtomicU64::new(0)));
        Self { words, multiplier }
    }

    /// How many bits are set.
    fn count_ones(&self) -> usize {
        self.words.par_iter().map(|word| word.load(Ordering::Relaxed).count_ones() as usize).sum()
    }

    /// Set the bit of a fingerprint, and tell whether it was set before. Nobody orders anything by it.
    fn set(&self, fingerprint: Fingerprint) -> bool {
        let (word, bit) = self.bit_position(fingerprint);
        self.words[word].fetch_or(bit, Ordering::Relaxed) & bit != 0
    }

    fn contains(&self, fingerprint: Fingerprint) -> bool {
        let (word, bit) = self.bit_position(fingerprint);
        self.words[word].load(Ordering::Relaxed) & bit != 0
    }

    /// The word of a fingerprint, and its bit: what is spread, as a part of all that it may be (D. Lemire, Fast Random
    /// Integer Generation in an Interval, ACM TOMACS 29, 2019).
    fn bit_position(&self, fingerprint: Fingerprint) -> (usize, u64) {
        let hash = u64::from(fingerprint.to_half()).wrapping_mul(self.multiplier);
        let bits = self.words.len() as u128 * 64;
        let bit = ((u128::from(hash) * bits) >> 64) as usize;
        (bit / 64, 1 << (bit % 64))
    }
}

/// Whether an entry is of a page that can be in a group: read, held still, and no page of zeros unless merged.
pub(crate) fn can_be_grouped(index: &PageIndex, entry: &IndexEntry) -> bool {
    *entry != IndexEntry::EMPTY
        && matches!(index.mark(entry.ordinal).class(), Some(PageClass::Unique | PageClass::Merged))
}
