//! The scan: which page ksmd visits next, and the metadata of pages.

use super::super::memory::{Memory, PageEntry, SimulatedProcessId};
use super::super::unstable_tree::UnstableTree;
use super::{Cursor, Item, ItemId, KsmModel, Link, RunState, Visit};

impl KsmModel {
    /// One batch (`ksm_do_scan`): visits until `pages_to_scan` are done or the scan ends. Returns the number of visits.
    /// Does nothing unless ksmd runs and has a process on its list (`ksmd_should_run`).
    pub fn run_batch(&mut self) -> u64 {
        if self.run != RunState::Merging || self.slots.is_empty() {
            return 0;
        }
        let mut visits = 0;
        for _ in 0..self.settings.pages_to_scan {
            let Some(visit) = self.next_visit() else { break };
            self.compare_and_merge(visit);
            visits += 1;
            self.tally.pages_scanned += 1;
        }
        visits
    }

    pub(super) fn tree_number(&self, node: u8) -> u8 {
        if self.settings.merge_across_nodes { 0 } else { node }
    }

    pub(super) fn unstable_tree(&mut self, number: u8) -> &mut UnstableTree {
        let index = usize::from(number);
        if self.unstable.len() <= index {
            self.unstable.resize_with(index + 1, UnstableTree::default);
        }
        &mut self.unstable[index]
    }

    /// A page changes, is unmapped or is no longer mergeable: searches of the scan in progress may meet it.
    pub(super) fn disturb_scan(&mut self) {
        if self.cursor.process.is_some() {
            self.unstable.iter_mut().for_each(UnstableTree::take_shape);
        }
    }

    /// The next page to visit (`scan_get_next_rmap_item`); `None` at the end of a scan.
    fn next_visit(&mut self) -> Option<Visit> {
        let first = self.slots.first()?.process;
        if self.cursor.process.is_none() {
            self.scan_started_ms = self.now_ms;
            self.unstable.iter_mut().for_each(UnstableTree::clear);
            self.cursor = Cursor { process: Some(first), page: 0, previous: None };
        }
        while let Some(process) = self.cursor.process {
            if let Some(visit) = self.next_visit_of(process) {
                return Some(visit);
            }
            self.leave_process(process);
        }
        self.end_scan();
        None
    }

    /// The next page of the cursor's process that is not skipped.
    fn next_visit_of(&mut self, process: SimulatedProcessId) -> Option<Visit> {
        while let Some(page) = self.next_page(process) {
            let item = self.next_item(process, page);
            self.cursor.previous = Some(item);
            self.cursor.page = page + 1;
            let entry = self.memory.entry(process, page);
            if self.skips(item, entry) {
                continue;
            }
            let content = self.memory.content(entry).expect("a page that ksmd visits is present");
            let node = self.memory.node_of(process, page);
            return Some(Visit { item, process, page, content, node });
        }
        None
    }

    /// The next present anonymous page from the cursor on. The cursor moves to the end of the regions that it passes.
    fn next_page(&mut self, process: SimulatedProcessId) -> Option<u64> {
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
            self.cursor.page = found.unwrap_or(vma.end());
            if found.is_some() {
                return found;
            }
        }
        None
    }

    /// The item of a page, a new one if it has none (`get_next_rmap_item`). Items of pages before it are freed: they
    /// are no longer mapped or mergeable.
    fn next_item(&mut self, process: SimulatedProcessId, page: u64) -> ItemId {
        let mut next = self.item_after(process, self.cursor.previous);
        while let Some(id) = next {
            let item = &self.items[id as usize];
            if item.page == page {
                self.set_item_after(process, self.cursor.previous, Some(id));
                return id;
            }
            if item.page > page {
                break;
            }
            next = item.next;
            self.free_item(id);
        }
        let item = Item { next, process, page, last_content: None, age: 0, remaining_skips: 0, link: Link::Unlinked };
        let id = match self.unused_items.pop() {
            Some(id) => {
                self.items[id as usize] = item;
                id
            }
            None => {
                self.items.push(item);
                ItemId::try_from(self.items.len() - 1).expect("fewer than 2^32 items")
            }
        };
        self.tally.rmap_items += 1;
        self.work.allocated_items += 1;
        self.memory.process_mut(process).rmap_items += 1;
        self.set_item_after(process, self.cursor.previous, Some(id));
        id
    }

    fn item_after(&self, process: SimulatedProcessId, previous: Option<ItemId>) -> Option<ItemId> {
        match previous {
            Some(previous) => self.items[previous as usize].next,
            None => self.slots[self.slot_position(process).expect("the cursor's process is on the list")].first,
        }
    }

    fn set_item_after(&mut self, process: SimulatedProcessId, previous: Option<ItemId>, next: Option<ItemId>) {
        match previous {
            Some(previous) => self.items[previous as usize].next = next,
            None => {
                let position = self.slot_position(process).expect("the cursor's process is on the list");
                self.slots[position].first = next;
            }
        }
    }

    fn free_item(&mut self, id: ItemId) {
        self.unlink(id);
        let process = self.items[id as usize].process;
        self.memory.process_mut(process).rmap_items -= 1;
        self.tally.rmap_items -= 1;
        self.unused_items.push(id);
    }

    /// Free a list of items (`remove_trailing_rmap_items`).
    pub(super) fn free_items_from(&mut self, mut next: Option<ItemId>) {
        while let Some(id) = next {
            next = self.items[id as usize].next;
            self.free_item(id);
        }
    }

    /// The end of a process's turn. A process that ended, or without mergeable regions, leaves the list.
    fn leave_process(&mut self, process: SimulatedProcessId) {
        if !self.memory.process(process).is_alive {
            self.cursor = Cursor { process: Some(process), page: 0, previous: None };
        }
        let trailing = self.item_after(process, self.cursor.previous);
        self.set_item_after(process, self.cursor.previous, None);
        self.free_items_from(trailing);
        let position = self.slot_position(process).expect("the cursor's process is on the list");
        let next = self.slots.get(position + 1).map(|slot| slot.process);
        if self.cursor.page == 0 {
            self.slots.remove(position);
            self.memory.process_mut(process).is_registered = false;
        }
        self.cursor = Cursor { process: next, page: 0, previous: None };
    }

    fn end_scan(&mut self) {
        self.tally.full_scans += 1;
        if let Some(settings) = self.settings.advisor.filter(|_| self.rules.has_advisor) {
            let scan_ms = self.now_ms - self.scan_started_ms;
            self.settings.pages_to_scan =
                self.advisor.pages_to_scan(&settings, self.settings.pages_to_scan, scan_ms, self.cpu_ns);
        }
    }

    /// Whether smart scan leaves this visit out (`should_skip_rmap_item`, since 6.7).
    fn skips(&mut self, id: ItemId, entry: PageEntry) -> bool {
        let is_merged = self.memory.stable_node(entry).is_some();
        if !self.rules.has_smart_scan || !self.settings.smart_scan || is_merged {
            return false;
        }
        let item = &mut self.items[id as usize];
        let age = item.age;
        item.age = age.saturating_add(1);
        if age < 3 {
            return false;
        }
        if item.remaining_skips == 0 {
            item.remaining_skips = skips_at_age(age);
            return false;
        }
        item.remaining_skips -= 1;
        self.tally.pages_skipped += 1;
        self.unlink(id);
        true
    }

    /// Take a page out of its tree (`remove_rmap_item_from_tree`).
    pub(super) fn unlink(&mut self, id: ItemId) {
        match self.items[id as usize].link {
            Link::Unlinked => {}
            Link::Unstable { scan, tree } => {
                if scan == self.tally.full_scans {
                    let content = self.items[id as usize].last_content.expect("a page in the tree was visited");
                    self.unstable_tree(tree).remove(id, content);
                }
                self.tally.pages_unshared -= 1;
                self.items[id as usize].link = Link::Unlinked;
            }
            Link::Stable(stable) if self.stable.is_stale(&self.memory, stable) => {
                let unlinked = self.stable.remove(&mut self.memory, stable, &mut self.tally);
                self.mark_unlinked(&unlinked);
            }
            Link::Stable(stable) => {
                self.stable.unlink(stable, id, &mut self.tally);
                self.mark_unlinked(&[id]);
            }
        }
    }
}

/// How many visits a page of this age is skipped (`skip_age`).
fn skips_at_age(age: u8) -> u8 {
    match age {
        0..=3 => 1,
        4..=5 => 2,
        6..=8 => 4,
        _ => 8,
    }
}
