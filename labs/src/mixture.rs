//! Memory with runs of duplicates among unique pages: the content of each run, and the number of redundant pages.
//!
//! A mixture is cut into runs of equal length. Some runs have content that every process with the same seed has too, at
//! other positions. Some runs are unique except for one such stray page. All other runs are unique. All functions here
//! are pure; the binary's `mixture` command creates the memory.

use crate::content::ContentOrigin;

/// The parameters of a mixture.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mixture {
    /// Total number of base pages, a multiple of `run_pages`.
    pub pages: u64,
    /// Base pages of a run.
    pub run_pages: u64,
    /// The share of the runs whose pages all have copies in the other processes.
    pub duplicate_share: f64,
    /// The share of the runs in which exactly one page has copies.
    pub stray_share: f64,
}

/// The content of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MixtureRun {
    /// Content of this process alone.
    Unique,
    /// Shared contents, from this number on.
    Duplicate(u64),
    /// Unique content, except for the shared content of the first number at the page of the second number.
    UniqueButOne(u64, u64),
}

impl Mixture {
    /// Number of runs whose pages all have copies.
    #[must_use]
    pub fn duplicate_runs(&self) -> u64 {
        (self.duplicate_share * (self.pages / self.run_pages) as f64).round() as u64
    }

    /// Number of runs in which exactly one page has copies.
    #[must_use]
    pub fn stray_runs(&self) -> u64 {
        (self.stray_share * (self.pages / self.run_pages) as f64).round() as u64
    }

    /// Pages of one process that every other process with the seed has too.
    #[must_use]
    pub fn duplicate_pages(&self) -> u64 {
        self.duplicate_runs() * self.run_pages + self.stray_runs()
    }

    /// The runs in their order, which depends on the salt, so that copies are at different positions in each process.
    #[must_use]
    pub fn run_order(&self, salt: &str) -> Vec<MixtureRun> {
        let order = ContentOrigin::from_names(&[salt, "order"]);
        let (duplicate, stray) = (self.duplicate_runs(), self.stray_runs());
        let mut runs: Vec<MixtureRun> = (0..self.pages / self.run_pages)
            .map(|i| match i {
                _ if i < duplicate => MixtureRun::Duplicate(i * self.run_pages),
                _ if i < duplicate + stray => MixtureRun::UniqueButOne(
                    duplicate * self.run_pages + i - duplicate,
                    order.random_number(!i) % self.run_pages,
                ),
                _ => MixtureRun::Unique,
            })
            .collect();
        // R. Durstenfeld, "Algorithm 235: Random permutation", CACM 1964.
        for last in (1..runs.len()).rev() {
            runs.swap(last, (order.random_number(last as u64) % (last as u64 + 1)) as usize);
        }
        runs
    }

    /// Fill memory of `pages` pages.
    pub fn fill(&self, memory: &mut [u8], page_size: usize, seed: &str, salt: &str) {
        let (shared, unique) =
            (ContentOrigin::from_names(&["mixture", seed]), ContentOrigin::from_names(&[salt, "own"]));
        let run_bytes = self.run_pages as usize * page_size;
        let mut numbers = 0..;
        for (run, bytes) in self.run_order(salt).into_iter().zip(memory.chunks_mut(run_bytes)) {
            for (i, page) in (0..).zip(bytes.chunks_mut(page_size)) {
                let number = numbers.next().expect("numbers do not end");
                match run {
                    MixtureRun::Duplicate(first) => shared.fill_page(page, first + i),
                    MixtureRun::UniqueButOne(content, position) if position == i => shared.fill_page(page, content),
                    MixtureRun::UniqueButOne(..) | MixtureRun::Unique => unique.fill_page(page, number),
                }
            }
        }
    }
}

/// A checksum that changes with every bit of memory: the words, weighted by the powers of an odd number.
#[must_use]
pub fn memory_checksum(memory: &[u8]) -> u64 {
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

    const PAGE_BYTES: usize = 64;

    fn filled_memory(mixture: &Mixture, salt: &str) -> Vec<u8> {
        let mut memory = vec![0; mixture.pages as usize * PAGE_BYTES];
        mixture.fill(&mut memory, PAGE_BYTES, "seed", salt);
        memory
    }

    #[test]
    fn processes_share_exactly_the_mixture_duplicates() {
        let shapes = [(1024, 16, 0.1, 0.0), (1024, 1, 0.1, 0.0), (512, 64, 0.95, 0.0), (1024, 32, 0.06, 0.45)];
        for (pages, run, duplicate, stray) in shapes {
            let mixture = Mixture { pages, run_pages: run, duplicate_share: duplicate, stray_share: stray };
            let memories = ["a", "b", "c"].map(|salt| filled_memory(&mixture, salt));
            let mut holders: HashMap<&[u8], HashSet<usize>> = HashMap::new();
            for (process, memory) in memories.iter().enumerate() {
                assert_eq!(
                    memory.chunks(PAGE_BYTES).collect::<HashSet<_>>().len() as u64,
                    pages,
                    "no copies within one process"
                );
                memory.chunks(PAGE_BYTES).for_each(|page| {
                    holders.entry(page).or_default().insert(process);
                });
            }
            let by = |count| holders.values().filter(|holders| holders.len() == count).count() as u64;
            assert_eq!((by(3), by(2)), (mixture.duplicate_pages(), 0), "{mixture:?}");
        }
    }

    #[test]
    fn duplicates_have_different_offsets_per_process() {
        let mixture = Mixture { pages: 4096, run_pages: 64, duplicate_share: 0.3, stray_share: 0.0 };
        assert_ne!(mixture.run_order("a"), mixture.run_order("b"));
        assert_eq!(mixture.run_order("a").iter().filter(|run| **run != MixtureRun::Unique).count(), 19);
    }

    #[test]
    fn bit_flip_changes_the_checksum() {
        let mut memory =
            filled_memory(&Mixture { pages: 8, run_pages: 4, duplicate_share: 0.5, stray_share: 0.0 }, "a");
        let before = memory_checksum(&memory);
        memory[300] ^= 1;
        assert_ne!(memory_checksum(&memory), before);
    }
}
