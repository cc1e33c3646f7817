//! A sketch summarizes the contents of some memory, so that two memories can be compared without reading them again.
//!
//! Each content has a [`rank`] that depends only on its fingerprint. A [`Sketch`] keeps the contents of some rank or
//! more, so both of two sketches keep an equal content or neither does. The contents that both keep give an estimate of
//! all that both memories share (A. Broder, On the resemblance and containment of documents, Compression and Complexity
//! of Sequences 1997). A sketch keeps the contents whose hash begins with enough zero bits instead of a fixed number of
//! smallest hashes. Therefore a sketch does not depend on the size of the memory it is compared with.
//!
//! Only sketches made under one fingerprint key can be compared.

use pagefold_base::content::Fingerprint;
use pagefold_base::splitmix::splitmix64;
use pagefold_base::units::Pages;
use std::cmp::Ordering;

/// Mean number of contents in a sketch at most. A sketch of memory without equal pages has more than half of that.
const MAX_MEAN_SKETCH_CONTENTS: u64 = 256;

/// The rarity of a content: one content in 2^n has rank `n` or more.
pub fn rank(fingerprint: Fingerprint) -> u32 {
    scrambled(fingerprint).leading_zeros()
}

/// Mixes the bits, because fingerprints in a recording may be small numbers.
fn scrambled(fingerprint: Fingerprint) -> u64 {
    splitmix64(fingerprint.0)
}

/// A sample of the contents of some memory: 8 bytes for each content, at most about 2 KiB.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sketch {
    /// The lowest rank of the contents kept.
    min_rank: u32,
    /// The contents kept, as mixed hashes in ascending order without repetition.
    kept: Vec<u64>,
}

/// The sketches of one process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContentSketches {
    /// All contents.
    pub all: Sketch,
    /// The contents that are not merged and may merge with equal pages of other processes.
    pub unmerged: Sketch,
}

impl Sketch {
    /// The lowest rank that a sketch of this many pages keeps.
    pub fn min_rank_for(pages: Pages) -> u32 {
        pages.0.div_ceil(MAX_MEAN_SKETCH_CONTENTS).next_power_of_two().ilog2()
    }

    /// A sketch of this many pages and their contents. Contents of a rank below [`Sketch::min_rank_for`] may be
    /// missing.
    pub fn from_contents(pages: Pages, contents: impl IntoIterator<Item = Fingerprint>) -> Self {
        let min_rank = Self::min_rank_for(pages);
        let kept = contents.into_iter().filter(|&content| rank(content) >= min_rank).map(scrambled);
        Self::new(min_rank, kept.collect())
    }

    /// Whether the sketch keeps no content.
    pub fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    /// The contents of this sketch that the other lacks. If the sketches share any, the result has the higher of both
    /// lowest ranks.
    pub fn without(self, other: &Self) -> Self {
        if self.shared(other) == Pages::ZERO {
            return self;
        }
        let min_rank = self.min_rank.max(other.min_rank);
        let missing = self.kept_from_rank(min_rank).iter().filter(|content| other.kept.binary_search(content).is_err());
        Self::new(min_rank, missing.copied().collect())
    }

    /// The sketch of two memories with this many pages together.
    pub fn joined(&self, other: &Self, pages: Pages) -> Self {
        let min_rank = self.min_rank.max(other.min_rank).max(Self::min_rank_for(pages));
        Self::new(min_rank, [self.kept_from_rank(min_rank), other.kept_from_rank(min_rank)].concat())
    }

    fn new(min_rank: u32, mut kept: Vec<u64>) -> Self {
        kept.sort_unstable();
        kept.dedup();
        kept.shrink_to_fit();
        Self { min_rank, kept }
    }

    /// The contents kept of this rank or more.
    fn kept_from_rank(&self, rank: u32) -> &[u64] {
        &self.kept[..self.kept.partition_point(|content| content.leading_zeros() >= rank)]
    }

    /// The estimated number of contents: each content kept stands for `2^min_rank` contents.
    pub fn contents(&self) -> Pages {
        Pages((self.kept.len() as u64).saturating_mul(1_u64.checked_shl(self.min_rank).unwrap_or(u64::MAX)))
    }

    /// The estimated number of contents that both memories hold, by the higher of the lowest ranks. The variance is the
    /// estimate times the number of contents that each one kept stands for. The estimate is at most the number of
    /// contents of either, and exact if both sketches keep all contents.
    pub fn shared(&self, other: &Self) -> Pages {
        let min_rank = self.min_rank.max(other.min_rank);
        let (mut a, mut b, mut common) = (self.kept_from_rank(min_rank), other.kept_from_rank(min_rank), 0_u64);
        while let ([first, rest_a @ ..], [second, rest_b @ ..]) = (a, b) {
            match first.cmp(second) {
                Ordering::Less => a = rest_a,
                Ordering::Greater => b = rest_b,
                Ordering::Equal => (a, b, common) = (rest_a, rest_b, common + 1),
            }
        }
        let common = common.saturating_mul(1_u64.checked_shl(min_rank).unwrap_or(u64::MAX));
        Pages(common).min(self.contents()).min(other.contents())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sketch(contents: impl IntoIterator<Item = u64>) -> Sketch {
        let contents: Vec<Fingerprint> = contents.into_iter().map(Fingerprint).collect();
        Sketch::from_contents(Pages(contents.len() as u64), contents)
    }

    #[test]
    fn small_memory_is_sketched_completely() {
        let (a, b) = (sketch(0..200), sketch(150..400));
        assert_eq!((a.shared(&b), b.shared(&a), a.shared(&a)), (Pages(50), Pages(50), Pages(200)));
        assert_eq!(Sketch::default().shared(&a), Pages(0));
        assert_eq!(sketch([7; 300]).shared(&sketch([7])), Pages(u64::from(rank(Fingerprint(7)) >= 1)));
    }

    /// One GiB, one TiB and an impossible size.
    #[test]
    fn sketch_size_is_bounded() {
        for (pages, least) in [(0, 0), (256, 0), (257, 1), (1 << 18, 10), (1 << 28, 20), (1 << 63, 55)] {
            assert_eq!(Sketch::min_rank_for(Pages(pages)), least);
        }
        let kept = sketch(0..1 << 18).kept.len();
        assert!((176..=336).contains(&kept), "{kept} is not within five standard deviations of 256");
    }

    /// For any fingerprints, the mean of many estimates for a big and a small memory is within five standard errors of
    /// the contents they share. A single estimate is within five standard deviations.
    #[test]
    fn shared_contents_are_estimated_from_sketches() {
        let (each, times) = (512.0_f64, 100);
        for stride in [1, 4096, 0x9e37_79b9_7f4a_7c15] {
            let estimates = (0..times).map(|time| {
                let of = |range: std::ops::Range<u64>| {
                    sketch(range.map(|number| (number + time * 1_000_000).wrapping_mul(stride)))
                };
                let (big, small, other) = (of(0..100_000), of(80_000..101_000), of(200_000..300_000));
                assert_eq!(big.shared(&other), Pages(0));
                let estimate = big.shared(&small).0 as f64;
                assert!((estimate - 20_000.0).abs() <= 5.0 * (20_000.0 * each).sqrt(), "{estimate}");
                estimate
            });
            let mean = estimates.sum::<f64>() / times as f64;
            assert!((mean - 20_000.0).abs() <= 5.0 * (20_000.0 * each / times as f64).sqrt(), "{mean}");
        }
    }

    /// A rare content that both memories share counts for at most the contents of the smaller one.
    #[test]
    fn shared_estimate_is_at_most_the_smaller_memory() {
        let rarest = (0..1 << 20).map(Fingerprint).max_by_key(|content| rank(*content)).unwrap();
        let small = Sketch::from_contents(Pages(100), [rarest]);
        let big = Sketch::from_contents(Pages(MAX_MEAN_SKETCH_CONTENTS << rank(rarest)), [rarest]);
        assert_eq!((small.shared(&big), big.shared(&small)), (Pages(1), Pages(1)));
    }

    proptest! {
        /// Holds for any two memories, in either order.
        #[test]
        fn sketches_behave_like_sets(
            one in prop::collection::btree_set(0_u64..2000, 0..700),
            other in prop::collection::btree_set(0_u64..2000, 0..700),
        ) {
            let (a, b) = (sketch(one.iter().copied()), sketch(other.iter().copied()));
            let least = a.min_rank.max(b.min_rank);
            let kept = |contents: &mut dyn Iterator<Item = &u64>| {
                (contents.filter(|content| rank(Fingerprint(**content)) >= least).count() as u64) << least
            };
            let both = Pages(kept(&mut one.intersection(&other))).min(a.contents()).min(b.contents());
            prop_assert_eq!((a.shared(&b), b.shared(&a)), (both, both));
            let union: std::collections::BTreeSet<u64> = one.union(&other).copied().collect();
            let pages = Pages((one.len() + other.len()) as u64);
            let joined = a.joined(&b, pages);
            prop_assert_eq!(&joined, &Sketch::from_contents(pages, union.into_iter().map(Fingerprint)));
            let rest = a.clone().without(&b);
            prop_assert_eq!(rest.shared(&b), Pages(0));
            if both > Pages(0) {
                prop_assert_eq!(rest.contents(), Pages(kept(&mut one.difference(&other))));
            } else {
                prop_assert_eq!(rest, a);
            }
        }
    }
}
