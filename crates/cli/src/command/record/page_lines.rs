//! The pages of a process as lines of a recording: address, frame and content of each page.

use pagefold_base::{Absent, AddressRange, Fingerprint, PageClass, Pfn, Reading};
use pagefold_census::index::{PageIndex, PageMark};
use pagefold_census::results::{Census, SubjectCensus};
use pagefold_host::observe::NumaNodes;
use pagefold_host::{FrameFlags, Host, PagemapEntry};
use pagefold_recording::lines::{FrameLine, PageLine, RecordedContent};
use std::collections::BTreeMap;

/// Page table entries that are read at once.
const PAGES_PER_READ: u64 = 1 << 16;

/// Joins the current page tables with the results of the census. It takes some 100 bytes for each line. A line is one
/// page unless adjacent pages are alike: use it for recordings, not for a census of a big host.
pub struct PageLineBuilder<'a> {
    host: &'a dyn Host,
    index: &'a PageIndex,
    nodes: &'a NumaNodes,
    fingerprints: Vec<Fingerprint>,
    frames: BTreeMap<Pfn, (FrameFlags, u64)>,
}

impl<'a> PageLineBuilder<'a> {
    /// A builder for a census and its complete index.
    pub fn new(host: &'a dyn Host, index: &'a PageIndex, nodes: &'a NumaNodes) -> Self {
        let mut fingerprints = vec![Fingerprint::ZERO_PAGE; index.page_count()];
        for entry in index.entries() {
            fingerprints[entry.ordinal as usize] = entry.fingerprint();
        }
        Self { host, index, nodes, fingerprints, frames: BTreeMap::new() }
    }

    /// The resident pages of one process, in address order.
    pub fn process_lines(&mut self, census: &Census, subject: usize) -> Reading<Vec<PageLine>> {
        let SubjectCensus { process, regions, .. } = &census.subjects[subject];
        let handle = self.host.open(process.id.pid)?;
        if handle.id() != process.id {
            return Err(Absent::Vanished);
        }
        let page_len = self.host.page_size().bytes();
        let indexed = self.indexed_pages(subject);
        let mut lines: Vec<PageLine> = Vec::new();
        for region in regions.iter().map(|region| &region.region).filter(|region| (region.rss + region.hugetlb).0 > 0) {
            for start in (region.range.start..region.range.end).step_by((PAGES_PER_READ * page_len) as usize) {
                let end = region.range.end.min(start + PAGES_PER_READ * page_len);
                let mappings = handle.mappings(AddressRange { start, end })?;
                let frames = self.lookup_frame_flags(&mappings);
                for (i, mapping) in mappings.iter().enumerate().filter(|(_, mapping)| mapping.present) {
                    let flags = mapping.frame.and_then(|frame| frames.get(&frame)).copied().unwrap_or_default();
                    let address = start + i as u64 * page_len;
                    let line = self.page_line(address, *mapping, flags, indexed.get(&address).copied());
                    // Frames of two memory blocks are renumbered apart from each other, so they need two lines.
                    let begins_block = mapping.frame.is_some_and(|frame| self.nodes.block_start(frame) == frame);
                    if begins_block || !lines.last_mut().is_some_and(|last| last.try_append(&line, page_len)) {
                        lines.push(line);
                    }
                }
            }
        }
        Ok(lines)
    }

    /// Renumber all frames that the processes map, in their order, also in `lines`. Numbers begin with 1. With several
    /// NUMA nodes they begin with the first number of each memory block, so that frames stay on their node.
    pub fn renumber_frames(self, lines: &mut [Vec<PageLine>]) -> Vec<FrameLine> {
        let mut next = 1;
        let mut number = |frame: Pfn| {
            // A number never exceeds its block: a block has no more frames than numbers, and no process maps frame 0.
            let number = self.nodes.block_start(frame).0.max(next);
            next = number + 1;
            number
        };
        let numbers: BTreeMap<Pfn, u64> = self.frames.keys().map(|&frame| (frame, number(frame))).collect();
        for line in lines.iter_mut().flatten() {
            line.first_frame = line.first_frame.and_then(|frame| numbers.get(&frame)).copied().map(Pfn);
        }
        let mut frames: Vec<FrameLine> = Vec::new();
        for ((flags, mappings), &number) in self.frames.into_values().zip(numbers.values()) {
            let line = FrameLine { first_frame: Pfn(number), frame_count: 1, flags, mappings };
            if !frames.last_mut().is_some_and(|last| last.try_append(&line)) {
                frames.push(line);
            }
        }
        frames
    }

    /// The pages of a subject in the census: address to ordinal, and whether a huge page maps it.
    fn indexed_pages(&self, subject: usize) -> BTreeMap<u64, (u32, bool)> {
        let page_len = self.index.page_bytes();
        self.index
            .runs(self.index.subject_ordinals(subject))
            .flat_map(|(run, first)| {
                (0..run.pages).map(move |i| (run.address + u64::from(i) * page_len, (first + i, run.huge)))
            })
            .collect()
    }

    /// The flags of the mapped frames; empty without privilege.
    fn lookup_frame_flags(&mut self, mappings: &[PagemapEntry]) -> BTreeMap<Pfn, FrameFlags> {
        let mut frames: Vec<Pfn> = mappings.iter().filter_map(|mapping| mapping.frame).collect();
        frames.sort_unstable();
        frames.dedup();
        let (Ok(flags), Ok(counts)) = (self.host.frame_flags(&frames), self.host.frame_mappings(&frames)) else {
            return BTreeMap::new();
        };
        let facts = flags.iter().copied().zip(counts);
        self.frames.extend(frames.iter().copied().zip(facts));
        frames.into_iter().zip(flags).collect()
    }

    fn page_line(
        &self,
        address: u64,
        mapping: PagemapEntry,
        flags: FrameFlags,
        indexed: Option<(u32, bool)>,
    ) -> PageLine {
        let mark = indexed.map_or(PageMark::NOT_READ, |(ordinal, _)| self.index.mark(ordinal));
        let content = match (indexed, mark.class()) {
            (_, None) | (None, _) => RecordedContent::Unknown,
            (_, Some(PageClass::Volatile)) => RecordedContent::Volatile,
            (Some((ordinal, _)), Some(_)) => RecordedContent::Known(self.fingerprints[ordinal as usize]),
        };
        PageLine {
            address,
            pages: 1,
            first_frame: mapping.frame,
            file: mapping.file,
            exclusive: mapping.exclusive,
            huge: indexed.is_some_and(|(_, huge)| huge),
            merged: flags.is_ksm() || mark.class() == Some(PageClass::Merged),
            zero_page: flags.is_zero_page(),
            content,
        }
    }
}
