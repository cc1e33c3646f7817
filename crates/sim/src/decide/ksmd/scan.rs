//! The scan: which page ksmd visits next, and the metadata of pages.

use std::ops::Range;
use std::time::Duration;

use super::super::entry_runs::EntryRun;
use super::super::memory::{Memory, PAGE_LIMIT, PageEntry, PageKey, SimulatedProcessId};
use super::super::stable_tree::{StableId, StableTree};
use super::super::unstable_tree::UnstableTree;
use super::items::{ItemRun, Link};
use super::{Cursor, KsmModel, RunState, Visit};
use pagefold_merge::decide::policy::advisor::AdvisorContext;

impl KsmModel {
    /// One batch (`ksm_do_scan`): visits until `pages_to_scan` are done or the scan ends. Returns the number of visits.
    /// Does nothing unless ksmd runs and has a process on its list (`ksmd_should_run`).
    pub fn run_batch(&mut self) -> u64 {
        self.begin_batch();
        self.run_visits(self.settings.pages_to_scan)
    }

    /// Begin a batch after a pause. [`Self::run_visits`] carries out its parts.
    pub fn begin_batch(&mut self) {
        if self.ksmd_should_run() {
            self.work.batches += 1;
            (self.reached_stable, self.reached_unstable) = Default::default();
        }
    }

    /// Whether ksmd runs and has a process on its list (`ksmd_should_run`).
    #[must_use]
    pub fn ksmd_should_run(&self) -> bool {
        self.run == RunState::Merging && !self.slots.is_empty()
    }

    /// A part of a batch: at most this many visits. With fewer, the scan ended, and the batch with it.
    pub fn run_visits(&mut self, limit: u64) -> u64 {
        if !self.ksmd_should_run() {
            return 0;
        }
        let mut visits = 0;
        while visits < limit {
            let Some(visit) = self.next_visit(limit - visits) else { break };
            self.compare_and_merge(visit);
            self.join_items(&visit);
            visits += visit.pages;
            self.tally.pages_scanned += visit.pages;
        }
        visits
    }

    pub(super) fn tree_number(&self, node: u8) -> u8 {
        if self.settings.merge_across_nodes { 0 } else { node }
    }

    pub(super) fn unstable_tree(&mut self, number: u8) -> &mut UnstableTree {
        let index = usize::from(number);
        if self.unstable.len() <= index {
            let is_index = !self.is_exact;
            self.unstable.resize_with(index + 1, || UnstableTree::new(is_index));
        }
        &mut self.unstable[index]
    }

    /// Pages change, are unmapped or are no longer mergeable: if they are in the unstable tree, searches of the scan in
    /// progress may meet them.
    pub(super) fn disturb_scan(&mut self, process: SimulatedProcessId, start: u64, pages: u64) {
        if self.cursor.process.is_none() {
            return;
        }
        let scan = self.scan_number();
        if !self.is_exact {
            for (page, item) in self.items[process.0 as usize].runs_in(start..start + pages) {
                if let Link::Unstable { scan: inserted, tree } = item.link
                    && inserted == scan
                {
                    let content = item.last_content().expect("a page in the tree was visited");
                    self.unstable_tree(tree).remove(PageKey::new(process, page), item.pages.into(), content);
                }
            }
            return;
        }
        let is_in_tree =
            |item: &ItemRun| matches!(item.link, Link::Unstable { scan: inserted, .. } if inserted == scan);
        if self.items[process.0 as usize].any_in(start..start + pages, is_in_tree) {
            self.unstable.iter_mut().for_each(UnstableTree::take_shape);
        }
    }

    /// The number of the scan in progress.
    pub(super) fn scan_number(&self) -> u32 {
        u32::try_from(self.tally.full_scans).expect("fewer than 2^32 scans")
    }

    /// The next pages to visit, at most this many (`scan_get_next_rmap_item`); `None` at the end of a scan.
    fn next_visit(&mut self, limit: u64) -> Option<Visit> {
        let &first = self.slots.first()?;
        if self.cursor.process.is_none() {
            self.scan_started_ms = self.now_ms;
            self.unstable.iter_mut().for_each(UnstableTree::clear);
            self.cursor = Cursor { process: Some(first), page: 0, unvisited: 0 };
        }
        while let Some(process) = self.cursor.process {
            if let Some(visit) = self.next_visit_of(process, limit) {
                return Some(visit);
            }
            self.leave_process(process);
        }
        self.end_scan();
        None
    }

    /// The next pages of the cursor's process that are not skipped. Their metadata is one run that begins at the first.
    fn next_visit_of(&mut self, process: SimulatedProcessId, limit: u64) -> Option<Visit> {
        while let Some((page, entries)) = self.next_run(process) {
            self.free_items_before(process, page);
            let known = self.items[process.0 as usize].run_from(page);
            let mut item = known.unwrap_or_else(|| {
                let next = self.items[process.0 as usize].next_page(page).unwrap_or(u64::MAX);
                ItemRun::new(entries.pages.min(next - page))
            });
            let is_merged = self.memory.merged_frame(entries.entry()).is_some();
            let is_shared = matches!(entries.entry(), PageEntry::Frame(frame) if item.link != Link::Stable(frame));
            let is_run = self.visits_runs && !is_shared;
            let pages = if is_run { entries.pages.min(item.pages.into()) } else { 1 };
            let has_age = !self.rules.stable_tree_forgets_history || !matches!(item.link, Link::Stable(_));
            let ages = self.rules.has_smart_scan && self.settings.smart_scan && !is_merged && has_age;
            let is_skipped = ages && item.skips();
            let node = self.memory.node_of(process, page);
            let content = self.memory.content(entries.entry()).expect("a page that ksmd visits is present");
            let mut visit = Visit { process, page, pages, content, ascends: entries.ascends, node };
            if !is_skipped {
                visit.pages = pages.min(limit);
                visit.pages = self.uniform_pages(&visit, entries.entry(), &item);
            }
            self.begin_visit(&visit, item, known.is_none());
            if !is_skipped {
                return Some(visit);
            }
            self.tally.pages_skipped += visit.pages;
            self.unlink(&visit);
            self.join_items(&visit);
        }
        None
    }

    /// Give the pages of a visit metadata of their own, and move the cursor behind them.
    fn begin_visit(&mut self, visit: &Visit, mut item: ItemRun, is_new: bool) {
        item.pages = u32::try_from(visit.pages).expect("a run has fewer than 2^32 pages");
        self.items[visit.process.0 as usize].set(visit.page, item);
        let end = visit.page + visit.pages;
        self.cursor = Cursor { page: end, unvisited: end, ..self.cursor };
        if is_new {
            self.tally.rmap_items += visit.pages;
            self.work.allocated_items += visit.pages;
            self.memory.process_mut(visit.process).rmap_items += visit.pages.cast_signed();
        }
    }

    /// Join the metadata of visited pages with that of the pages before them.
    fn join_items(&mut self, visit: &Visit) {
        if self.visits_runs {
            self.items[visit.process.0 as usize].join_at(visit.page);
        }
    }

    /// The next present anonymous pages from the cursor on. The cursor moves to the end of the regions that it passes.
    fn next_run(&mut self, process: SimulatedProcessId) -> Option<(u64, EntryRun)> {
        let process = self.memory.process(process);
        if !process.is_alive {
            return None;
        }
        let from = self.cursor.page;
        let before = process.vmas.range(..from).next_back().map(|(_, vma)| vma).filter(|vma| from < vma.end());
        let rest = process.vmas.range(from..).map(|(_, vma)| vma);
        for vma in before.into_iter().chain(rest).filter(|vma| vma.is_mergeable) {
            let from = self.cursor.page.max(vma.start);
            let found = if vma.has_anonymous { Memory::next_anonymous(vma, from) } else { None };
            self.cursor.page = found.map_or(vma.end(), |(page, _)| page);
            if found.is_some() {
                return found;
            }
        }
        None
    }

    /// Free the metadata between the last visit and a page (`get_next_rmap_item`): those pages are no longer mapped or
    /// mergeable.
    fn free_items_before(&mut self, process: SimulatedProcessId, page: u64) {
        if self.cursor.unvisited < page {
            self.free_items(process, self.cursor.unvisited..page);
        }
    }

    /// Free metadata (`remove_trailing_rmap_items`).
    pub(super) fn free_items(&mut self, process: SimulatedProcessId, pages: Range<u64>) {
        while let Some(page) = self.items[process.0 as usize].next_page(pages.start).filter(|&page| page < pages.end) {
            let item = self.items[process.0 as usize].run_from(page).expect("the page has metadata");
            let end = pages.end.min(page + u64::from(item.pages));
            self.unlink_range(process, page..end);
            self.items[process.0 as usize].take(page..end);
            let freed = end - page;
            self.memory.process_mut(process).rmap_items -= freed.cast_signed();
            self.tally.rmap_items -= freed;
        }
    }

    /// The end of a process's turn. A process that ended, or without mergeable regions, leaves the list.
    fn leave_process(&mut self, process: SimulatedProcessId) {
        if !self.memory.process(process).is_alive {
            self.cursor = Cursor { process: Some(process), page: 0, unvisited: 0 };
        }
        self.free_items(process, self.cursor.unvisited..PAGE_LIMIT);
        let position = self.slot_position(process).expect("the cursor's process is on the list");
        let next = self.slots.get(position + 1).copied();
        if self.cursor.page == 0 {
            self.slots.remove(position);
            self.memory.process_mut(process).is_registered = false;
        }
        self.cursor = Cursor { process: next, page: 0, unvisited: 0 };
    }

    fn end_scan(&mut self) {
        self.tally.full_scans += 1;
        if let (Some(rule), Some(context), true) = (self.settings.advisor, self.advisor, self.rules.has_advisor) {
            let context = AdvisorContext { pages_to_scan: self.settings.pages_to_scan, ..context };
            let scan_time = Duration::from_millis(self.now_ms - self.scan_started_ms);
            let context = context.step(&rule, scan_time, Duration::from_nanos(self.cpu_ns));
            self.settings.pages_to_scan = context.pages_to_scan;
            self.advisor = Some(context);
        }
    }

    /// Take the pages of a visit out of their tree.
    pub(super) fn unlink(&mut self, visit: &Visit) {
        self.unlink_range(visit.process, visit.range());
    }

    /// Take pages with metadata of one run out of their tree (`remove_rmap_item_from_tree`).
    pub(super) fn unlink_range(&mut self, process: SimulatedProcessId, range: Range<u64>) {
        let items = &mut self.items[process.0 as usize];
        let item = items.run_from(range.start).expect("the pages have metadata");
        let pages = range.end - range.start;
        match item.link {
            Link::Unlinked => return,
            Link::Unstable { scan, tree } => {
                if scan == self.scan_number() {
                    let content = item.last_content().expect("a page in the tree was visited");
                    self.unstable_tree(tree).remove(PageKey::new(process, range.start), pages, content);
                }
                self.tally.pages_unshared -= pages;
            }
            Link::Stable(_) => {
                for page in 0..pages {
                    let node = item.stable_node(page).expect("the link is to stable nodes");
                    self.unlink_from_stable(PageKey::new(process, range.start + page), node);
                }
            }
        }
        self.items[process.0 as usize].update(range, |_, item| item.set_link(Link::Unlinked, false));
    }

    /// Take a page from a stable node. A node whose frame is freed is removed, and all of its pages are unlinked; a later
    /// page of the same run may find it removed.
    fn unlink_from_stable(&mut self, key: PageKey, node: StableId) {
        let max = self.settings.max_page_sharing;
        if self.stable.linked_pages(node).is_none() {
            return;
        }
        if StableTree::is_stale(&self.memory, node) {
            self.stable.remove(&mut self.memory, node, max, &mut self.tally);
            self.unlink_pages_of(&[node]);
        } else {
            self.stable.unlink(node, max, &mut self.tally);
            self.unmapped.remove(&(node, key));
            self.memory.process_mut(key.process()).merging_pages -= 1;
        }
    }
}
