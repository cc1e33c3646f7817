//! Finds which pages may have a duplicate, with a few bytes for each page and without sorting.
//!
//! One bitmap records each fingerprint that was seen once, a second one each that was seen again. Different
//! fingerprints that share a bit both look like duplicates. Therefore the fingerprints that look like duplicates pass a
//! second pair of bitmaps with other bits, which removes most of these false positives. Fingerprints that a bitmap
//! excludes have no duplicate. These are most pages of a host: they are neither sorted nor read again.
//!
//! The filter compares half fingerprints, because cached pages have no more. Among n pages, one in 2^32 / n is a false
//! positive for this reason alone.

use crate::index::{IndexEntry, PageIndex};
use pagefold_base::{Fingerprint, PageClass};
use pagefold_sys::advise::prefer_huge_pages;
use rayon::prelude::*;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bits of each bitmap for each page. The first pair of bitmaps lets at most one unique page in sixteen pass; few pass
/// both.
const BITS_PER_PAGE: usize = 16;

/// The multipliers that spread half fingerprints over the bits (Fibonacci hashing: D. Knuth, The Art of Computer
/// Programming 3, 6.4). The second one is the first multiplier of SplitMix64.
const HASH_MULTIPLIERS: [u64; 2] = [0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9];

/// The bitmaps. They take 2 bytes for each page and 2 for each page that has a duplicate, and twice that while they are
/// built.
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
    /// A filter of the pages that were read in the first pass.
    pub fn build(index: &PageIndex) -> Self {
        let mut filter = Self { seen_twice: Vec::new() };
        let mut contents = index.page_count();
        for multiplier in HASH_MULTIPLIERS {
            let bitmap = || Bitmap::new(contents * BITS_PER_PAGE, multiplier);
            let (once, twice) = (bitmap(), bitmap());
            index
                .entries
                .par_iter()
                .filter(|entry| can_be_grouped(index, entry) && filter.may_have_duplicate(entry.fingerprint()))
                .for_each(|entry| {
                    if once.set(entry.fingerprint()) && !twice.contains(entry.fingerprint()) {
                        twice.set(entry.fingerprint());
                    }
                });
            // Each bit stands for two contents by chance, or for one content of several pages.
            contents = twice.count_ones() * 2;
            filter.seen_twice.push(twice);
        }
        filter
    }

    /// Whether another page may have the same fingerprint.
    pub fn may_have_duplicate(&self, fingerprint: Fingerprint) -> bool {
        self.seen_twice.iter().all(|bitmap| bitmap.contains(fingerprint))
    }

    /// Whether a page can be merged: it is a zero page or may have a duplicate. Call this before pages are grouped.
    pub fn is_candidate(&self, index: &PageIndex, ordinal: u32) -> bool {
        match index.mark(ordinal).class() {
            Some(PageClass::Zero) => true,
            Some(PageClass::Unique) => self.may_have_duplicate(index.entries[ordinal as usize].fingerprint()),
            _ => false,
        }
    }
}

impl Bitmap {
    /// A bitmap of at least this many bits, all clear.
    fn new(bits: usize, multiplier: u64) -> Self {
        let count = bits.div_ceil(64).max(1);
        let mut words = Vec::with_capacity(count);
        // Accesses are random.
        let _ = prefer_huge_pages(words.spare_capacity_mut());
        words.par_extend((0..count).into_par_iter().map(|_| AtomicU64::new(0)));
        Self { words, multiplier }
    }

    /// The number of bits set.
    fn count_ones(&self) -> usize {
        self.words.par_iter().map(|word| word.load(Ordering::Relaxed).count_ones() as usize).sum()
    }

    /// Sets the bit of a fingerprint. Returns whether it was set before. No other memory access depends on the order.
    fn set(&self, fingerprint: Fingerprint) -> bool {
        let (word, bit) = self.bit_position(fingerprint);
        self.words[word].fetch_or(bit, Ordering::Relaxed) & bit != 0
    }

    fn contains(&self, fingerprint: Fingerprint) -> bool {
        let (word, bit) = self.bit_position(fingerprint);
        self.words[word].load(Ordering::Relaxed) & bit != 0
    }

    /// The word and bit of a fingerprint: the multiplied hash is scaled to the number of bits (D. Lemire, Fast Random
    /// Integer Generation in an Interval, ACM TOMACS 29, 2019).
    fn bit_position(&self, fingerprint: Fingerprint) -> (usize, u64) {
        let hash = u64::from(fingerprint.to_half()).wrapping_mul(self.multiplier);
        let bits = self.words.len() as u128 * 64;
        let bit = ((u128::from(hash) * bits) >> 64) as usize;
        (bit / 64, 1 << (bit % 64))
    }
}

/// Whether the page of an entry can be in a group: it was read, is stable, and is not a zero page unless merged.
pub(crate) fn can_be_grouped(index: &PageIndex, entry: &IndexEntry) -> bool {
    *entry != IndexEntry::EMPTY
        && matches!(index.mark(entry.ordinal).class(), Some(PageClass::Unique | PageClass::Merged))
}
