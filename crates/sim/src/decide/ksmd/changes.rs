//! Changes of memory by its processes, and what ksmd does at once: enrollment, copies back, `run` 2.

use super::super::memory::{
    Content, PAGES_IN_HUGE_PAGE, PackedEntry, PageEntry, SimulatedProcess, SimulatedProcessId, Vma, ZERO_CONTENT,
};
use super::{Advice, Cursor, KsmModel, RunState, Slot};

impl KsmModel {
    /// Start a process without memory.
    pub fn spawn(&mut self) -> SimulatedProcessId {
        self.memory.add_process(SimulatedProcess { is_alive: true, ..SimulatedProcess::default() })
    }

    /// Map untouched private memory.
    ///
    /// # Panics
    /// If a region is there already.
    pub fn map(&mut self, process: SimulatedProcessId, start: u64, pages: u64, node: u8) {
        let vmas = &mut self.memory.process_mut(process).vmas;
        let end = start + pages;
        assert!(vmas.range(..end).next_back().is_none_or(|(_, vma)| vma.end() <= start), "the range is in use");
        let entries = vec![PackedEntry::pack(PageEntry::Absent); usize::try_from(pages).expect("it fits in memory")];
        vmas.insert(start, Vma { start, entries, is_mergeable: false, has_anonymous: false, node });
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
        for page in start..start + PAGES_IN_HUGE_PAGE {
            assert_eq!(self.memory.entry(process, page), PageEntry::Absent, "the range was touched");
            self.memory.set_entry(process, page, PageEntry::HugePart(ZERO_CONTENT));
        }
    }

    /// Read a page: an untouched one is mapped to the zero page.
    pub fn read(&mut self, process: SimulatedProcessId, page: u64) {
        if self.memory.entry(process, page) == PageEntry::Absent {
            self.memory.set_entry(process, page, PageEntry::ZeroPage);
        }
    }

    /// Give a page a content. A page with several mappings and a merged page are copied first (`do_wp_page` in
    /// mm/memory.c); a merged frame is never reused, also with one mapping.
    pub fn write(&mut self, process: SimulatedProcessId, page: u64, content: Content) {
        self.disturb_scan();
        let entry = match self.memory.entry(process, page) {
            PageEntry::HugePart(_) => PageEntry::HugePart(content),
            PageEntry::Frame(frame) => {
                let record = self.memory.frame_mut(frame);
                if record.mappings == 1 && record.stable.is_none() {
                    record.content = content;
                    return;
                }
                PageEntry::Private(content)
            }
            _ => PageEntry::Private(content),
        };
        self.replace_entry(process, page, entry);
    }

    /// Map something else, with the accounting for what was mapped (`ksm_might_unmap_zero_page`).
    pub(super) fn replace_entry(&mut self, process: SimulatedProcessId, page: u64, entry: PageEntry) {
        match self.memory.entry(process, page) {
            PageEntry::KsmZeroPage if self.rules.tracks_zero_pages => {
                self.tally.zero_pages -= 1;
                self.memory.process_mut(process).zero_pages -= 1;
            }
            PageEntry::Frame(frame) => self.memory.drop_mapping(frame),
            _ => {}
        }
        self.memory.set_entry(process, page, entry);
    }

    fn clear_range(&mut self, process: SimulatedProcessId, start: u64, pages: u64) {
        self.disturb_scan();
        for page in start..start + pages {
            if self.memory.process(process).vma_of(page).is_some() {
                self.replace_entry(process, page, PageEntry::Absent);
            }
        }
    }

    /// Give advice about a range of one or several regions (`ksm_madvise`).
    pub fn advise(&mut self, process: SimulatedProcessId, start: u64, pages: u64, advice: Advice) {
        if advice == Advice::DontNeed {
            self.clear_range(process, start, pages);
            return;
        }
        self.disturb_scan();
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
            for page in changed.into_iter().flatten() {
                self.break_merged(process, page);
            }
        }
    }

    /// Copy a merged page back (`break_ksm`). Zero pages that ksmd mapped are copied back where they are known.
    fn break_merged(&mut self, process: SimulatedProcessId, page: u64) {
        let entry = self.memory.entry(process, page);
        let is_merged =
            self.memory.stable_node(entry).is_some() || entry == PageEntry::KsmZeroPage && self.rules.tracks_zero_pages;
        if let Some(content) = self.memory.content(entry).filter(|_| is_merged) {
            self.work.breaks += 1;
            self.replace_entry(process, page, PageEntry::Private(content));
        }
    }

    /// Fork a process (`dup_mmap`, `ksm_fork`). The child is on ksmd's list if the parent is.
    pub fn fork(&mut self, parent: SimulatedProcessId) -> SimulatedProcessId {
        let pages: Vec<u64> = self.memory.process(parent).vmas.values().flat_map(|vma| vma.start..vma.end()).collect();
        for page in pages {
            let entry = self.memory.entry(parent, page);
            if matches!(entry, PageEntry::Private(_) | PageEntry::HugePart(_) | PageEntry::Frame(_)) {
                let frame = self.memory.number_frame(parent, page);
                self.memory.frame_mut(frame).mappings += 1;
            }
        }
        let mut child = SimulatedProcess { is_registered: false, ..self.memory.process(parent).clone() };
        let enters = self.memory.process(parent).is_registered;
        if enters && self.rules.fork_resets_counters {
            child.rmap_items = 0;
            child.merging_pages = 0;
            self.tally.zero_pages += child.zero_pages;
        }
        let child = self.memory.add_process(child);
        if enters {
            self.enter(child);
        }
        child
    }

    /// End a process (`__ksm_exit`, then `exit_mmap`). A process with items stays on the list for ksmd, behind the
    /// cursor's process; one under the cursor stays where it is.
    pub fn exit(&mut self, process: SimulatedProcessId) {
        self.disturb_scan();
        self.memory.process_mut(process).is_alive = false;
        if let Some(position) = self.slot_position(process).filter(|_| self.cursor.process != Some(process)) {
            let slot = self.slots.remove(position);
            if slot.first.is_none() {
                self.memory.process_mut(process).is_registered = false;
            } else {
                let after = self.cursor.process.and_then(|cursor| self.slot_position(cursor));
                self.slots.insert(after.map_or(0, |cursor| cursor + 1), slot);
            }
        }
        let ranges: Vec<_> = self.memory.process(process).vmas.values().map(|vma| (vma.start, vma.end())).collect();
        for (start, end) in ranges {
            self.unmap(process, start, end - start);
        }
    }

    pub(super) fn slot_position(&self, process: SimulatedProcessId) -> Option<usize> {
        self.slots.iter().position(|slot| slot.process == process)
    }

    /// Put a process on ksmd's list (`__ksm_enter`): just before the cursor's process, so that the scan in progress
    /// does not reach it; after `run` 2, at the end.
    fn enter(&mut self, process: SimulatedProcessId) {
        let cursor = self.cursor.process.filter(|_| self.run != RunState::Unmerged);
        let position = cursor.and_then(|cursor| self.slot_position(cursor)).unwrap_or(self.slots.len());
        self.slots.insert(position, Slot { process, first: None });
        self.memory.process_mut(process).is_registered = true;
    }

    /// `run` 2 (`unmerge_and_remove_all_rmap_items`): copy all merged pages back and forget all metadata.
    pub(super) fn unmerge_all(&mut self) {
        for Slot { process, first } in self.slots.clone() {
            let mergeable = self.memory.process(process).vmas.values().filter(|vma| vma.is_mergeable);
            let pages: Vec<u64> = mergeable.flat_map(|vma| vma.start..vma.end()).collect();
            for page in pages {
                self.break_merged(process, page);
            }
            self.free_items_from(first);
            let position = self.slot_position(process).expect("the slot is on the list");
            self.slots[position].first = None;
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
