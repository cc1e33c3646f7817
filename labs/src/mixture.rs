//! Memory in which duplicates lie in runs among unique pages: what stands where, and what of it is redundant.
//!
//! A mixture is cut into runs of equal length. Some runs hold content that every process of the same seed holds too, at
//! places of its own; some are unique but for one such page, astray among them; all others are unique. Everything here
//! is pure; the binary's `mixture` lays it out.

use crate::content::Origin;

/// What a mixture is made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mixture {
    /// Base pages in all, a multiple of `run`.
    pub pages: u64,
    /// Base pages of a run.
    pub run: u64,
    /// The share of the runs whose pages all have copies in the other processes.
    pub duplicate: f64,
    /// The share of the runs of which one page has.
    pub stray: f64,
}

/// What a run holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Run {
    /// Content of this process alone.
    Own,
    /// The shared contents from this number on.
    Duplicate(u64),
    /// Own content, but for the shared content of this number at this page of the run.
    Stray(u64, u64),
}

impl Mixture {
    /// Runs whose pages all have copies.
    #[must_use]
    pub fn duplicate_runs(&self) -> u64 {
        (self.duplicate * (self.pages / self.run) as f64).round() as u64
    }

    /// Runs of which one page has.
    #[must_use]
    pub fn stray_runs(&self) -> u64 {
        (self.stray * (self.pages / self.run) as f64).round() as u64
    }

    /// Pages of one process that every other process of the seed holds too.
    #[must_use]
    pub fn duplicate_pages(&self) -> u64 {
        self.duplicate_runs() * self.run + self.stray_runs()
    }

    /// The runs in their order, which depends on the salt, so that copies lie elsewhere in each process.
    #[must_use]
    pub fn runs(&self, salt: &str) -> Vec<Run> {
        let order = Origin::of(&[salt, "order"]);
        let (duplicate, stray) = (self.duplicate_runs(), self.stray_runs());
        let mut runs: Vec<Run> = (0..self.pages / self.run)
            .map(|number| match number {
                _ if number < duplicate => Run::Duplicate(number * self.run),
                _ if number < duplicate + stray => {
                    Run::Stray(duplicate * self.run + number - duplicate, order.number(!number) % self.run)
                }
                _ => Run::Own,
            })
            .collect();
        // R. Durstenfeld, "Algorithm 235: Random permutation", CACM 1964.
        for last in (1..runs.len()).rev() {
            runs.swap(last, (order.number(last as u64) % (last as u64 + 1)) as usize);
        }
        runs
    }

    /// Fill memory of `pages` pages.
    pub fn fill(&self, memory: &mut [u8], page_size: usize, seed: &str, salt: &str) {
        let (shared, own) = (Origin::of(&["mixture", seed]), Origin::of(&[salt, "own"]));
        let run_bytes = self.run as usize * page_size;
        let mut numbers = 0..;
        for (run, bytes) in self.runs(salt).into_iter().zip(memory.chunks_mut(run_bytes)) {
            for (i, page) in (0..).zip(bytes.chunks_mut(page_size)) {
                let number = numbers.next().expect("numbers do not end");
                match run {
                    Run::Duplicate(first) => shared.write(page, first + i),
                    Run::Stray(content, place) if place == i => shared.write(page, content),
                    Run::Stray(..) | Run::Own => own.write(page, number),
                }
            }
        }
    }
}

/// A number that changes with every bit of memory: the words, weighted by the powers of an odd number.
#[must_use]
pub fn checksum(memory: &[u8]) -> u64 {
    let word = |bytes: &[u8; 8]| u64::from_ne_bytes(*bytes);
    memory
        .as_chunks::<8>()
        .0
        .iter()
        .fold(0, |sum: u64, bytes| sum.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(word(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{HashMap, HashSet};

    const PAGE: usize = 64;

    fn filled(mixture: &Mixture, salt: &str) -> Vec<u8> {
        let mut memory = vec![0; mixture.pages as usize * PAGE];
        mixture.fill(&mut memory, PAGE, "seed", salt);
        memory
    }

    #[test]
    fn processes_have_in_common_exactly_what_the_mixture_says() {
        let shapes = [(1024, 16, 0.1, 0.0), (1024, 1, 0.1, 0.0), (512, 64, 0.95, 0.0), (1024, 32, 0.06, 0.45)];
        for (pages, run, duplicate, stray) in shapes {
            let mixture = Mixture { pages, run, duplicate, stray };
            let memories = ["a", "b", "c"].map(|salt| filled(&mixture, salt));
            let mut holders: HashMap<&[u8], HashSet<usize>> = HashMap::new();
            for (process, memory) in memories.iter().enumerate() {
                assert_eq!(memory.chunks(PAGE).collect::<HashSet<_>>().len() as u64, pages, "no copies within one");
                memory.chunks(PAGE).for_each(|page| {
                    holders.entry(page).or_default().insert(process);
                });
            }
            let by = |count| holders.values().filter(|holders| holders.len() == count).count() as u64;
            assert_eq!((by(3), by(2)), (mixture.duplicate_pages(), 0), "{mixture:?}");
        }
    }

    #[test]
    fn duplicates_lie_elsewhere_in_each_process() {
        let mixture = Mixture { pages: 4096, run: 64, duplicate: 0.3, stray: 0.0 };
        assert_ne!(mixture.runs("a"), mixture.runs("b"));
        assert_eq!(mixture.runs("a").iter().filter(|run| **run != Run::Own).count(), 19);
    }

    #[test]
    fn a_changed_bit_changes_the_checksum() {
        let mut memory = filled(&Mixture { pages: 8, run: 4, duplicate: 0.5, stray: 0.0 }, "a");
        let before = checksum(&memory);
        memory[300] ^= 1;
        assert_ne!(checksum(&memory), before);
    }
}
