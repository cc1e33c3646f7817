//! What somebody's memory holds, in a sample of contents, so that whoever holds the same is known without reading it
//! again.
//!
//! Each content has a [`rank`] that depends on nothing but its fingerprint, and a [`Sketch`] keeps those from some rank
//! on. Equal contents are so in both of two sketches or in neither, and what both keep counts for all that both hold
//! (A. Broder, On the resemblance and containment of documents, Compression and Complexity of Sequences 1997; by
//! contents that divide evenly instead of the least ones, which leaves every sketch as it is when another is bigger).
//!
//! Sketches can be compared that were made under one key of fingerprints.

use pagefold_base::content::Fingerprint;
use pagefold_base::splitmix::splitmix64;
use pagefold_base::units::Pages;
use std::cmp::Ordering;

/// Contents in a sketch at most, in the mean: half of that and more, of memory of which no two pages are alike.
const MAX_MEAN_SKETCH_CONTENTS: u64 = 256;

/// How rare a content is: one in two to the power of `n` has rank `n` or more.
pub fn rank(fingerprint: Fingerprint) -> u32 {
    scrambled(fingerprint).leading_zeros()
}

/// Fingerprints of a recording may be small numbers, so that their own bits tell little.
fn scrambled(fingerprint: Fingerprint) -> u64 {
    splitmix64(fingerprint.0)
}

/// A sample of the contents of some memory: 8 bytes for each, some 2 KiB at most.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sketch {
    /// The lowest rank that is kept.
    min_rank: u32,
    /// What is kept, scrambled: ascending, each once.
    kept: Vec<u64>,
}

/// What somebody holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContentSketches {
    /// All of it.
    pub all: Sketch,
    /// What is not merged, and may be with whoever holds it too.
    pub unmerged: Sketch,
}

impl Sketch {
    /// The lowest rank that a sketch of so many pages keeps.
    pub fn min_rank_for(pages: Pages) -> u32 {
        pages.0.div_ceil(MAX_MEAN_SKETCH_CONTENTS).next_power_of_two().ilog2()
    }

    /// Of so many pages and their contents, of which those below [`Sketch::min_rank_for`] may be missing.
    pub fn from_contents(pages: Pages, contents: impl IntoIterator<Item = Fingerprint>) -> Self {
        let least = Self::min_rank_for(pages);
        let kept = contents.into_iter().filter(|&content| rank(content) >= least).map(scrambled);
        Self::new(least, kept.collect())
    }

    /// Whether it has nothing.
    pub fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    /// What it holds and the other does not. Where they share something, at the rarer rate of both.
    pub fn without(self, other: &Self) -> Self {
        if self.shared(other) == Pages::ZERO {
            return self;
        }
        let least = self.min_rank.max(other.min_rank);
        let alone = self.kept_from_rank(least).iter().filter(|content| other.kept.binary_search(content).is_err());
        Self::new(least, alone.copied().collect())
    }

    fn new(least: u32, mut kept: Vec<u64>) -> Self {
        kept.sort_unstable();
        kept.dedup();
        kept.shrink_to_fit();
        Self { min_rank: least, kept }
    }

    /// What it keeps of some rank or more.
    fn kept_from_rank(&self, rank: u32) -> &[u64] {
        &self.kept[..self.kept.partition_point(|content| content.leading_zeros() >= rank)]
    }

    /// How many contents it has, estimated: each that is kept stands for two to the power of the lowest rank.
    pub fn contents(&self) -> Pages {
        Pages((self.kept.len() as u64).saturating_mul(1_u64.checked_shl(self.min_rank).unwrap_or(u64::MAX)))
    }

    /// How many contents both hold, estimated alike, by the higher of their lowest ranks: the variance is the estimate
    /// times what each stands for. No more than either has, and exact where both keep all.
    pub fn shared(&self, other: &Self) -> Pages {
        let least = self.min_rank.max(other.min_rank);
        let (mut a, mut b, mut both) = (self.kept_from_rank(least), other.kept_from_rank(least), 0_u64);
        while let ([first, rest_a @ ..], [second, rest_b @ ..]) = (a, b) {
            match first.cmp(second) {
                Ordering::Less => a = rest_a,
                Ordering::Greater => b = rest_b,
                Ordering::Equal => (a, b, both) = (rest_a, rest_b, both + 1),
            }
        }
        let both = both.saturating_mul(1_u64.checked_shl(least).unwrap_or(u64::MAX));
        Pages(both).min(self.contents()).min(other.contents())
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

    /// A GiB, a terabyte, and more than there is.
    #[test]
    fn sketch_size_is_bounded() {
        for (pages, least) in [(0, 0), (256, 0), (257, 1), (1 << 18, 10), (1 << 28, 20), (1 << 63, 55)] {
            assert_eq!(Sketch::min_rank_for(Pages(pages)), least);
        }
        let kept = sketch(0..1 << 18).kept.len();
        assert!((176..=336).contains(&kept), "{kept}: 256 and five standard deviations");
    }

    /// Whatever fingerprints look like, the mean over many of what a big and a small memory share is what they do, to
    /// five standard errors; one estimate, to five standard deviations.
    #[test]
    fn shared_contents_are_estimated_from_sketches() {
        let (each, times) = (512.0_f64, 100);
        for stride in [1, 4096, 0x9e37_79b9_7f4a_7c15] {
            let told = (0..times).map(|time| {
                let of = |range: std::ops::Range<u64>| {
                    sketch(range.map(|number| (number + time * 1_000_000).wrapping_mul(stride)))
                };
                let (big, small, other) = (of(0..100_000), of(80_000..101_000), of(200_000..300_000));
                assert_eq!(big.shared(&other), Pages(0));
                let told = big.shared(&small).0 as f64;
                assert!((told - 20_000.0).abs() <= 5.0 * (20_000.0 * each).sqrt(), "{told}");
                told
            });
            let mean = told.sum::<f64>() / times as f64;
            assert!((mean - 20_000.0).abs() <= 5.0 * (20_000.0 * each / times as f64).sqrt(), "{mean}");
        }
    }

    /// A rare content that a small memory shares with a big one stands for no more than the small one has.
    #[test]
    fn shared_estimate_is_at_most_the_smaller_memory() {
        let rarest = (0..1 << 20).map(Fingerprint).max_by_key(|content| rank(*content)).unwrap();
        let small = Sketch::from_contents(Pages(100), [rarest]);
        let big = Sketch::from_contents(Pages(MAX_MEAN_SKETCH_CONTENTS << rank(rarest)), [rarest]);
        assert_eq!((small.shared(&big), big.shared(&small)), (Pages(1), Pages(1)));
    }

    proptest! {
        /// Whatever is compared, in either order.
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
