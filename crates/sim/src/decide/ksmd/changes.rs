//! Changes of memory by its processes, and what ksmd does at once: enrollment, copies back, `run` 2.

use std::ops::Range;

use super::super::entry_runs::{EntryRun, EntryRuns};
use super::super::memory::{
    CONTENT_LIMIT, Content, PAGE_LIMIT, PAGES_IN_HUGE_PAGE, PageEntry, PageKey, SimulatedProcess, SimulatedProcessId,
    Vma, ZERO_CONTENT,
};
use super::items::ItemRuns;
use super::{Advice, Cursor, KsmModel, RunState};
use pagefold_base::memory::MemoryPolicy;

impl KsmModel {
    /// Start a process without memory.
    pub fn spawn(&mut self) -> SimulatedProcessId {
        self.items.push(ItemRuns::default());
        self.memory.add_process(SimulatedProcess { is_alive: true, ..SimulatedProcess::default() })
    }

    /// Map untouched private memory.
    ///
    /// # Panics
    /// If a region is there already, or the range exceeds the address space.
    pub fn map(&mut self, process: SimulatedProcessId, start: u64, pages: u64, node: u8) {
        let vmas = &mut self.memory.process_mut(process).vmas;
        let end = start + pages;
        assert!(vmas.range(..end).next_back().is_none_or(|(_, vma)| vma.end() <= start), "the range is in use");
        assert!(end <= PAGE_LIMIT, "the range exceeds the address space");
        let entries = EntryRuns::absent(pages);
        let policy = MemoryPolicy::Default;
        let vma = Vma { start, entries, is_mergeable: false, has_anonymous: false, node, default_node: node, policy };
        vmas.insert(start, vma);
    }

    /// Put the pages of a range on a NUMA node, but for frames that cannot migrate. Returns the ranges that were elsewhere.
    pub(crate) fn place_pages(&mut self, process: SimulatedProcessId, range: Range<u64>, node: u8) -> Vec<Range<u64>> {
        self.memory.place_pages(process, range, node)
    }

    /// Set from which NUMA node new pages of a range come.
    pub(crate) fn set_memory_policy(&mut self, process: SimulatedProcessId, range: Range<u64>, policy: MemoryPolicy) {
        let record = self.memory.process_mut(process);
        record.split_vma(range.start);
        record.split_vma(range.end);
        record.vmas.range_mut(range).for_each(|(_, vma)| vma.policy = policy);
    }

    /// Unmap a range.
    pub fn unmap(&mut self, process: SimulatedProcessId, start: u64, pages: u64) {
        self.clear_range(process, start, pages);
        let record = self.memory.process_mut(process);
        record.split_vma(start);
        record.split_vma(start + pages);
        record.vmas.retain(|&first, _| !(start..start + pages).contains(&first));
    }

    /// Fill untouched memory with a huge page of zeros.
    ///
    /// # Panics
    /// If the range is not aligned, or not untouched.
    pub fn fault_huge_page(&mut self, process: SimulatedProcessId, start: u64) {
        assert!(start.is_multiple_of(PAGES_IN_HUGE_PAGE), "a huge page is aligned");
        let runs = self.memory.runs(process, start..start + PAGES_IN_HUGE_PAGE);
        assert!(runs.iter().all(|(_, run)| run.entry() == PageEntry::Absent), "the range was touched");
        let parts = EntryRun { pages: PAGES_IN_HUGE_PAGE, ..EntryRun::single(PageEntry::HugePart(ZERO_CONTENT)) };
        self.memory.set_run(process, start, parts);
    }

    /// Read a page: an untouched one is mapped to the zero page.
    pub fn read(&mut self, process: SimulatedProcessId, page: u64) {
        if self.memory.entry(process, page) == PageEntry::Absent {
            self.memory.set_entry(process, page, PageEntry::ZeroPage);
        }
    }

    /// Give a page a content. A page with several mappings and a merged page are copied first (`do_wp_page` in
    /// mm/memory.c); a merged frame is never reused, also with one mapping.
    ///
    /// # Panics
    /// If the page is in no region.
    pub fn write(&mut self, process: SimulatedProcessId, page: u64, content: Content) {
        self.disturb_scan(process, page, 1);
        let entry = match self.memory.entry(process, page) {
            PageEntry::HugePart(_) => PageEntry::HugePart(content),
            PageEntry::Frame(frame) => {
                let record = self.memory.frame_mut(frame);
                if record.mappings == 1 && !record.is_merged {
                    record.content = content;
                    return;
                }
                self.work.cow_breaks += u64::from(record.is_merged);
                PageEntry::Private(content)
            }
            _ => PageEntry::Private(content),
        };
        self.replace_entries(process, page, EntryRun::single(entry));
    }

    /// Give neighboring pages contents: the same one, or ascending ones from this one on.
    ///
    /// # Panics
    /// If a page is in no region, or a content is too large.
    pub fn write_pages(&mut self, process: SimulatedProcessId, pages: Range<u64>, content: Content, ascends: bool) {
        let content_of = |page: u64| if ascends { content + (page - pages.start) as Content } else { content };
        self.disturb_scan(process, pages.start, pages.end - pages.start);
        let runs = self.memory.runs(process, pages.clone());
        let found: u64 = runs.iter().map(|(_, run)| run.pages).sum();
        assert_eq!(found, pages.end - pages.start, "the pages are in regions");
        assert!(pages.is_empty() || content_of(pages.end - 1) < CONTENT_LIMIT, "content {content} is too large");
        for (page, run) in runs {
            let first = match run.entry() {
                PageEntry::Frame(_) => {
                    (page..page + run.pages).for_each(|page| self.write(process, page, content_of(page)));
                    continue;
                }
                PageEntry::HugePart(_) => PageEntry::HugePart(content_of(page)),
                _ => PageEntry::Private(content_of(page)),
            };
            self.replace_entries(process, page, EntryRun { ascends, pages: run.pages, ..EntryRun::single(first) });
        }
    }

    /// Map something else, with the accounting for what was mapped (`ksm_might_unmap_zero_page`).
    pub(super) fn replace_entries(&mut self, process: SimulatedProcessId, page: u64, entries: EntryRun) {
        let mut freed = Vec::new();
        for (start, run) in self.memory.runs(process, page..page + entries.pages) {
            match run.entry() {
                PageEntry::KsmZeroPage if self.rules.tracks_zero_pages => {
                    self.tally.zero_pages -= run.pages.cast_signed();
                    self.memory.process_mut(process).zero_pages -= run.pages.cast_signed();
                }
                PageEntry::Frame(first) => {
                    for offset in 0..run.pages {
                        let frame = if run.ascends { first + offset as u32 } else { first };
                        if self.memory.frame(frame).is_merged {
                            self.unmapped.insert((frame, PageKey::new(process, start + offset)));
                        }
                        self.memory.drop_mapping(frame);
                        freed.extend(self.memory.is_stale(frame).then_some(frame));
                    }
                }
                _ => {}
            }
        }
        self.memory.set_run(process, page, entries);
        if !self.is_exact {
            let max = self.settings.max_page_sharing;
            freed.iter().for_each(|&node| self.stable.remove(&mut self.memory, node, max, &mut self.tally));
            self.unlink_pages_of(&freed);
        }
    }

    /// Drop the pages of a range.
    fn clear_range(&mut self, process: SimulatedProcessId, start: u64, pages: u64) {
        self.disturb_scan(process, start, pages);
        for (page, run) in self.memory.runs(process, start..start + pages) {
            if run.entry() != PageEntry::Absent {
                let absent = EntryRun { pages: run.pages, ..EntryRun::single(PageEntry::Absent) };
                self.replace_entries(process, page, absent);
            }
        }
    }

    /// Give advice about a range of one or several regions (`ksm_madvise`).
    pub fn advise(&mut self, process: SimulatedProcessId, start: u64, pages: u64, advice: Advice) {
        if advice == Advice::DontNeed {
            self.clear_range(process, start, pages);
            return;
        }
        self.disturb_scan(process, start, pages);
        let range = start..start + pages;
        let record = self.memory.process_mut(process);
        record.split_vma(range.start);
        record.split_vma(range.end);
        let is_mergeable = advice == Advice::Mergeable;
        let mut changed = Vec::new();
        for vma in record.vmas.range_mut(range).map(|(_, vma)| vma).filter(|vma| vma.is_mergeable != is_mergeable) {
            vma.is_mergeable = is_mergeable;
            changed.push(vma.start..vma.end());
        }
        if is_mergeable {
            if !changed.is_empty() && !self.memory.process(process).is_registered {
                self.enter(process);
            }
        } else {
            changed.into_iter().for_each(|range| self.break_merged(process, range));
        }
    }

    /// Copy merged pages back (`break_ksm`). Zero pages that ksmd mapped are copied back where they are known.
    fn break_merged(&mut self, process: SimulatedProcessId, range: Range<u64>) {
        for (start, run) in self.memory.runs(process, range) {
            match run.entry() {
                PageEntry::KsmZeroPage if self.rules.tracks_zero_pages => {
                    self.work.breaks += run.pages;
                    let zeros = EntryRun { pages: run.pages, ..EntryRun::single(PageEntry::Private(ZERO_CONTENT)) };
                    self.replace_entries(process, start, zeros);
                }
                PageEntry::Frame(_) => {
                    for page in start..start + run.pages {
                        let entry = self.memory.entry(process, page);
                        if let Some(frame) = self.memory.merged_frame(entry) {
                            self.work.breaks += 1;
                            self.work.cow_breaks += 1;
                            let content = self.memory.frame(frame).content;
                            self.replace_entries(process, page, EntryRun::single(PageEntry::Private(content)));
                        }
                    }
                }
                _ => {}
            }
        }
    }

    /// Fork a process (`dup_mmap`, `ksm_fork`). The child is on ksmd's list if the parent is.
    pub fn fork(&mut self, parent: SimulatedProcessId) -> SimulatedProcessId {
        for (start, run) in self.memory.runs(parent, 0..PAGE_LIMIT) {
            if run.first.is_anonymous() {
                for page in start..start + run.pages {
                    let frame = self.memory.number_frame(parent, page);
                    self.memory.frame_mut(frame).mappings += 1;
                }
            }
        }
        let mut child = SimulatedProcess { is_registered: false, ..self.memory.process(parent).clone() };
        let enters = self.memory.process(parent).is_registered;
        if enters && self.rules.fork_resets_counters {
            child.rmap_items = 0;
            child.merging_pages = 0;
            self.tally.zero_pages += child.zero_pages;
        }
        self.items.push(ItemRuns::default());
        let child = self.memory.add_process(child);
        if enters {
            self.enter(child);
        }
        child
    }

    /// End a process (`__ksm_exit`, then `exit_mmap`). A process with items stays on the list for ksmd, behind the
    /// cursor's process; one under the cursor stays where it is.
    pub fn exit(&mut self, process: SimulatedProcessId) {
        self.disturb_scan(process, 0, PAGE_LIMIT);
        self.memory.process_mut(process).is_alive = false;
        if let Some(position) = self.slot_position(process).filter(|_| self.cursor.process != Some(process)) {
            self.slots.remove(position);
            if self.items[process.0 as usize].is_empty() {
                self.memory.process_mut(process).is_registered = false;
            } else {
                let after = self.cursor.process.and_then(|cursor| self.slot_position(cursor));
                self.slots.insert(after.map_or(0, |cursor| cursor + 1), process);
            }
        }
        let ranges: Vec<_> = self.memory.process(process).vmas.values().map(|vma| (vma.start, vma.end())).collect();
        for (start, end) in ranges {
            self.unmap(process, start, end - start);
        }
    }

    pub(super) fn slot_position(&self, process: SimulatedProcessId) -> Option<usize> {
        self.slots.iter().position(|&listed| listed == process)
    }

    /// Put a process on ksmd's list (`__ksm_enter`): just before the cursor's process, so that the scan in progress
    /// does not reach it; after `run` 2, at the end.
    fn enter(&mut self, process: SimulatedProcessId) {
        let cursor = self.cursor.process.filter(|_| self.run != RunState::Unmerged);
        let position = cursor.and_then(|cursor| self.slot_position(cursor)).unwrap_or(self.slots.len());
        self.slots.insert(position, process);
        self.memory.process_mut(process).is_registered = true;
    }

    /// `run` 2 (`unmerge_and_remove_all_rmap_items`): copy all merged pages back and forget all metadata.
    pub(super) fn unmerge_all(&mut self) {
        for process in self.slots.clone() {
            let mergeable = self.memory.process(process).vmas.values().filter(|vma| vma.is_mergeable);
            let ranges: Vec<_> = mergeable.map(|vma| vma.start..vma.end()).collect();
            ranges.into_iter().for_each(|range| self.break_merged(process, range));
            self.free_items(process, 0..PAGE_LIMIT);
            let position = self.slot_position(process).expect("the slot is on the list");
            if !self.memory.process(process).is_alive {
                self.slots.remove(position);
                self.memory.process_mut(process).is_registered = false;
            }
        }
        self.cursor = Cursor::default();
        self.remove_unused_stable_nodes();
        self.tally.full_scans = 0;
    }
}
