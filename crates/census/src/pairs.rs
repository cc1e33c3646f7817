//! Which pages may have a partner, told in a bit or two a page and without sorting.
//!
//! A bitmap notes each fingerprint that was seen once, another each that was seen again. Of different fingerprints that
//! share a bit both may be taken for partners; with at least [`BITS`] bits for each page that is seldom. What the second
//! bitmap does not have has no partner, and that is most of what a host holds: it need be neither sorted nor read again.

use crate::index::{Entry, Index};
use pagefold_model::{Fingerprint, PageClass};
use rayon::prelude::*;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bits of each bitmap for a page, at least: one unique page in sixteen at most is taken for one with a partner.
const BITS: usize = 16;

/// The bitmaps: 4 to 8 bytes for each page while they live.
#[derive(Debug)]
pub struct Pairs {
    again: Vec<AtomicU64>,
    shift: u32,
}

impl Pairs {
    /// Of the pages that were read in the first pass.
    pub fn of(index: &Index) -> Self {
        let bits = (index.pages() * BITS).next_power_of_two().max(64);
        let bitmap = || -> Vec<AtomicU64> { (0..bits / 64).into_par_iter().map(|_| AtomicU64::new(0)).collect() };
        let (once, again) = (bitmap(), bitmap());
        let pairs = Self { again, shift: 64 - bits.trailing_zeros() };
        index.entries.par_iter().filter(|entry| belongs(index, entry)).for_each(|entry| {
            let (word, bit) = pairs.place(entry.fingerprint());
            // A plain load first: most bits are not set yet, and those that are need no second write.
            if once[word].fetch_or(bit, Ordering::Relaxed) & bit != 0
                && pairs.again[word].load(Ordering::Relaxed) & bit == 0
            {
                pairs.again[word].fetch_or(bit, Ordering::Relaxed);
            }
        });
        pairs
    }

    /// Whether another page may have the same fingerprint.
    pub fn may_pair(&self, fingerprint: Fingerprint) -> bool {
        let (word, bit) = self.place(fingerprint);
        self.again[word].load(Ordering::Relaxed) & bit != 0
    }

    /// Whether a page has anything to gain: it holds zeros, or may have a partner. Before pages are grouped.
    pub fn is_candidate(&self, index: &Index, ordinal: u32) -> bool {
        match index.mark(ordinal).class() {
            Some(PageClass::Zero) => true,
            Some(PageClass::Unique) => self.may_pair(index.entries[ordinal as usize].fingerprint()),
            _ => false,
        }
    }

    /// The word of a fingerprint, and its bit. Multiplied, because those of a recording may be small numbers (Fibonacci
    /// hashing: D. Knuth, The Art of Computer Programming 3, 6.4).
    fn place(&self, fingerprint: Fingerprint) -> (usize, u64) {
        let hash = fingerprint.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift;
        ((hash / 64) as usize, 1 << (hash % 64))
    }
}

/// Whether an entry is of a page that can be in a group: read, held still, and no page of zeros unless merged.
pub(crate) fn belongs(index: &Index, entry: &Entry) -> bool {
    *entry != Entry::EMPTY && matches!(index.mark(entry.ordinal).class(), Some(PageClass::Unique | PageClass::Merged))
}
