//! The page table entries of a region, as runs.
//!
//! Neighboring pages mostly map the same thing or things with ascending numbers: an untouched range, a file of an image,
//! frames that were merged one after the other. Such a run takes eight bytes for up to [`CHUNK_PAGES`] pages. Where runs
//! are so short that they would take more memory than single entries, a chunk holds four bytes for each page.

use super::memory::{PackedEntry, PageEntry};

/// Pages whose entries are stored together. A run ends at the end of its chunk.
const CHUNK_PAGES: u64 = 4096;

/// With more runs, single entries take less memory.
const MAX_RUNS: usize = CHUNK_PAGES as usize * size_of::<PackedEntry>() / size_of::<StoredRun>();

/// Equal or ascending entries of neighboring pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryRun {
    /// The entry of the first page.
    pub first: PackedEntry,
    /// Whether the content or the number of the frame grows by one from page to page. Else all entries are equal.
    pub ascends: bool,
    /// The number of pages.
    pub pages: u64,
}

impl EntryRun {
    /// A run of one page.
    #[must_use]
    pub fn single(entry: PageEntry) -> Self {
        Self { first: PackedEntry::pack(entry), ascends: false, pages: 1 }
    }

    /// The entry of the first page.
    #[must_use]
    pub fn entry(&self) -> PageEntry {
        self.first.unpack()
    }

    /// The entry of a page of the run.
    fn at(&self, page: u64) -> PackedEntry {
        if self.ascends { self.first.plus(page) } else { self.first }
    }

    /// The run without its first pages.
    fn after(&self, pages: u64) -> Self {
        Self { first: self.at(pages), pages: self.pages - pages, ..*self }
    }

    /// This run and the one that follows, if they are one run.
    fn joined(&self, next: &Self) -> Option<Self> {
        let continues = |ascends: bool| {
            let expected = if ascends { self.first.plus(self.pages) } else { self.first };
            let is_kept = |run: &Self| run.pages == 1 || run.ascends == ascends;
            is_kept(self) && is_kept(next) && expected == next.first && self.first.is_kind_of(next.first)
        };
        let ascends = continues(true);
        (ascends || continues(false)).then_some(Self { ascends, pages: self.pages + next.pages, ..*self })
    }
}

#[derive(Clone, Copy, Debug)]
struct StoredRun {
    offset: u16,
    ascends: bool,
    first: PackedEntry,
}

#[derive(Clone, Debug)]
enum Chunk {
    Runs(Vec<StoredRun>),
    Pages(Box<[PackedEntry]>),
}

/// One entry for each page of a region.
#[derive(Clone, Debug, Default)]
pub struct EntryRuns {
    pages: u64,
    chunks: Vec<Chunk>,
}

impl EntryRuns {
    /// Entries that map nothing.
    #[must_use]
    pub fn absent(pages: u64) -> Self {
        let first = PackedEntry::pack(PageEntry::Absent);
        let chunk = || Chunk::Runs(vec![StoredRun { offset: 0, ascends: false, first }]);
        Self { pages, chunks: (0..pages.div_ceil(CHUNK_PAGES)).map(|_| chunk()).collect() }
    }

    /// The number of pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages
    }

    fn chunk_pages(&self, chunk: usize) -> u64 {
        (self.pages - chunk as u64 * CHUNK_PAGES).min(CHUNK_PAGES)
    }

    /// The entry of a page.
    ///
    /// # Panics
    /// If the page is beyond the last.
    #[must_use]
    pub fn entry(&self, page: u64) -> PageEntry {
        let local = page % CHUNK_PAGES;
        match &self.chunks[(page / CHUNK_PAGES) as usize] {
            Chunk::Pages(entries) => entries[local as usize].unpack(),
            Chunk::Runs(runs) => {
                let run = runs[position_after(runs, local) - 1];
                if run.ascends { run.first.plus(local - u64::from(run.offset)).unpack() } else { run.first.unpack() }
            }
        }
    }

    /// The run that a page begins, up to the end of the chunk at most.
    ///
    /// # Panics
    /// If the page is beyond the last.
    #[must_use]
    pub fn run_from(&self, page: u64) -> EntryRun {
        let chunk = (page / CHUNK_PAGES) as usize;
        let local = page % CHUNK_PAGES;
        match &self.chunks[chunk] {
            Chunk::Runs(runs) => {
                let next = position_after(runs, local);
                let stored = stored_run(runs, next - 1, self.chunk_pages(chunk));
                stored.after(local - u64::from(runs[next - 1].offset))
            }
            Chunk::Pages(entries) => {
                let mut run = EntryRun { first: entries[local as usize], ascends: false, pages: 1 };
                for &first in &entries[local as usize + 1..] {
                    let Some(joined) = run.joined(&EntryRun { first, ascends: false, pages: 1 }) else { break };
                    run = joined;
                }
                run
            }
        }
    }

    /// All runs with their first page.
    pub fn runs(&self) -> impl Iterator<Item = (u64, EntryRun)> + '_ {
        let mut page = 0;
        std::iter::from_fn(move || {
            let run = (page < self.pages).then(|| self.run_from(page))?;
            page += run.pages;
            Some((page - run.pages, run))
        })
    }

    /// Replace entries.
    ///
    /// # Panics
    /// If a page is beyond the last.
    pub fn fill(&mut self, start: u64, run: EntryRun) {
        assert!(start + run.pages <= self.pages, "the pages are in the region");
        let mut done = 0;
        while done < run.pages {
            let page = start + done;
            let chunk = (page / CHUNK_PAGES) as usize;
            let local = page % CHUNK_PAGES;
            let chunk_pages = self.chunk_pages(chunk);
            let part = EntryRun { pages: (run.pages - done).min(chunk_pages - local), ..run.after(done) };
            self.chunks[chunk].fill(local, part, chunk_pages);
            done += part.pages;
        }
    }

    /// Take the entries from a page on.
    #[must_use]
    pub fn split_off(&mut self, page: u64) -> Self {
        let mut upper = Self::absent(self.pages - page);
        let mut from = page;
        while from < self.pages {
            let run = self.run_from(from);
            upper.fill(from - page, run);
            from += run.pages;
        }
        self.pages = page;
        self.chunks.truncate(page.div_ceil(CHUNK_PAGES) as usize);
        let rest = page % CHUNK_PAGES;
        match self.chunks.last_mut().filter(|_| rest > 0) {
            Some(Chunk::Runs(runs)) => runs.retain(|run| u64::from(run.offset) < rest),
            Some(Chunk::Pages(entries)) => *entries = entries[..rest as usize].into(),
            None => {}
        }
        upper
    }
}

/// The position of the first run that begins after a page.
fn position_after(runs: &[StoredRun], page: u64) -> usize {
    runs.partition_point(|run| u64::from(run.offset) <= page)
}

fn stored_run(runs: &[StoredRun], position: usize, chunk_pages: u64) -> EntryRun {
    let StoredRun { offset, ascends, first } = runs[position];
    let end = runs.get(position + 1).map_or(chunk_pages, |next| u64::from(next.offset));
    EntryRun { first, ascends, pages: end - u64::from(offset) }
}

impl Chunk {
    fn fill(&mut self, local: u64, run: EntryRun, chunk_pages: u64) {
        if run.pages == chunk_pages {
            *self = Self::Runs(vec![StoredRun { offset: 0, ascends: run.ascends, first: run.first }]);
            return;
        }
        match self {
            Self::Pages(entries) => {
                (0..run.pages).for_each(|page| entries[(local + page) as usize] = run.at(page));
            }
            Self::Runs(runs) => {
                replace_in(runs, local, run, chunk_pages);
                if runs.len() > MAX_RUNS {
                    let parts = (0..runs.len()).map(|position| stored_run(runs, position, chunk_pages));
                    let entries = parts.flat_map(|part| (0..part.pages).map(move |page| part.at(page))).collect();
                    *self = Self::Pages(entries);
                }
            }
        }
    }
}

/// Put a run in the place of what is there, and join it with its neighbors.
fn replace_in(runs: &mut Vec<StoredRun>, local: u64, mut run: EntryRun, chunk_pages: u64) {
    let end = local + run.pages;
    let mut first = runs.partition_point(|stored| u64::from(stored.offset) < local);
    let mut behind = runs.partition_point(|stored| u64::from(stored.offset) < end);
    let mut start = local;
    if let Some(position) = first.checked_sub(1) {
        let before = stored_run(runs, position, chunk_pages);
        let offset = u64::from(runs[position].offset);
        let before = EntryRun { pages: local - offset, ..before };
        if let Some(joined) = before.joined(&run) {
            (run, start, first) = (joined, offset, position);
        }
    }
    let mut rest = None;
    let last = stored_run(runs, behind - 1, chunk_pages);
    let last_end = u64::from(runs[behind - 1].offset) + last.pages;
    let next = if last_end > end { Some(last.after(last.pages - (last_end - end))) } else { None };
    if let Some(next) = next {
        match run.joined(&next) {
            Some(joined) => run = joined,
            None => rest = Some((end, next)),
        }
    } else if behind < runs.len()
        && let Some(joined) = run.joined(&stored_run(runs, behind, chunk_pages))
    {
        run = joined;
        behind += 1;
    }
    let store = |offset: u64, run: EntryRun| StoredRun {
        offset: u16::try_from(offset).expect("a chunk has fewer pages"),
        ascends: run.ascends,
        first: run.first,
    };
    let stored = std::iter::once(store(start, run)).chain(rest.map(|(offset, run)| store(offset, run)));
    runs.splice(first..behind, stored);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entry(kind: u32, number: u32) -> PageEntry {
        match kind {
            0 => PageEntry::Absent,
            1 => PageEntry::ZeroPage,
            2 => PageEntry::HugePart(number),
            3 => PageEntry::Frame(number),
            _ => PageEntry::Private(number),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn runs_hold_the_entries_that_were_filled_in(
            pages in 4000_u64..9000,
            fills in prop::collection::vec((0_u64..9000, 1_u64..200, 0_u32..7, 0_u32..4, any::<bool>()), 0..60),
            whole in any::<bool>(),
            cut in 0_u64..4000,
        ) {
            let mut runs = EntryRuns::absent(pages);
            let mut expected = vec![PackedEntry::pack(PageEntry::Absent); pages as usize];
            let all = (0, pages, 5, 7, whole);
            for (start, count, kind, number, ascends) in [all].into_iter().chain(fills) {
                let start = start.min(pages - 1);
                let first = PackedEntry::pack(entry(kind, number));
                let run = EntryRun { first, ascends: ascends && kind > 1, pages: count.min(pages - start) };
                runs.fill(start, run);
                (0..run.pages).for_each(|page| expected[(start + page) as usize] = run.at(page));
            }
            let upper = runs.split_off(cut);
            for (part, expected) in [(&runs, &expected[..cut as usize]), (&upper, &expected[cut as usize..])] {
                prop_assert_eq!(part.pages(), expected.len() as u64);
                let mut page = 0;
                for (start, run) in part.runs() {
                    prop_assert_eq!(start, page);
                    for offset in 0..run.pages {
                        prop_assert_eq!(run.at(offset), expected[(page + offset) as usize]);
                        prop_assert_eq!(part.entry(page + offset), expected[(page + offset) as usize].unpack());
                    }
                    page += run.pages;
                }
                prop_assert_eq!(page, part.pages());
            }
        }
    }

    #[test]
    fn pages_filled_one_by_one_become_one_run() {
        let mut runs = EntryRuns::absent(100);
        for page in (0..100).rev() {
            runs.fill(page, EntryRun::single(PageEntry::Private(500 + page as u32)));
        }
        let run = runs.run_from(0);
        assert_eq!((run.pages, run.ascends, run.entry()), (100, true, PageEntry::Private(500)));
        assert!(matches!(&runs.chunks[0], Chunk::Runs(stored) if stored.len() == 1));
    }

    #[test]
    fn runs_of_one_page_take_four_bytes_a_page() {
        let mut runs = EntryRuns::absent(CHUNK_PAGES);
        for page in 0..CHUNK_PAGES {
            runs.fill(page, EntryRun::single(PageEntry::Private((page as u32 * 7919) % 4096)));
        }
        assert!(matches!(&runs.chunks[0], Chunk::Pages(entries) if entries.len() == CHUNK_PAGES as usize));
        assert_eq!(runs.entry(4095), PageEntry::Private((4095 * 7919) % 4096));
    }
}
