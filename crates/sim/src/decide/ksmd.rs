//! ksmd: its settings, its list of processes, its scan, and all changes of memory that it notices.
//!
//! Mirrors mm/ksm.c (6.1, 6.12 and 6.18) function by function; each function here names the one that it mirrors. Where
//! kernels differ, [`KsmRules`] decides.
//!
//! Limits: no allocation fails; no page is pinned, locked, migrated or swapped out; a batch is not interrupted. So
//! `try_to_merge_one_page` fails only where a huge page cannot be split or the split took the page away.

use super::advisor::{AdvisorMemory, AdvisorSettings};
use super::counters::{KsmCounters, PAGE_BYTES, ProcessCounters, RMAP_ITEM_BYTES, Tally, WorkCounts};
use super::memory::{
    Content, Frame, FrameId, Memory, PAGES_IN_HUGE_PAGE, PackedEntry, PageEntry, Process, ProcessId, Vma, ZERO_CONTENT,
};
use super::red_black_tree::{NodeId, RedBlackTree, Side};
use super::rules::KsmRules;
use super::stable_tree::{StableId, StableTree, TreeSettings, Walk};

/// The metadata of a scanned page (`struct ksm_rmap_item`).
pub type ItemId = u32;

/// What `/sys/kernel/mm/ksm/run` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunState {
    /// 0: ksmd sleeps; merged pages stay merged.
    Stopped,
    /// 1: ksmd scans.
    Merging,
    /// 2: ksmd sleeps, and all merged pages were copied back.
    Unmerged,
}

/// The settings of `/sys/kernel/mm/ksm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KsmSettings {
    /// Visits in a batch.
    pub pages_to_scan: u64,
    /// Pause between batches.
    pub sleep_millisecs: u64,
    /// Mappings of a merged frame that ksmd makes at most.
    pub max_page_sharing: usize,
    /// Pause between two searches that visit all duplicates of a chain.
    pub stable_node_chains_prune_millisecs: u64,
    /// Map pages of zeros to the zero page.
    pub use_zero_pages: bool,
    /// Skip pages that often failed to merge.
    pub smart_scan: bool,
    /// One tree for all NUMA nodes.
    pub merge_across_nodes: bool,
    /// The scan-time advisor, when it is on.
    pub advisor: Option<AdvisorSettings>,
}

impl Default for KsmSettings {
    fn default() -> Self {
        Self {
            pages_to_scan: 100,
            sleep_millisecs: 20,
            max_page_sharing: 256,
            stable_node_chains_prune_millisecs: 2000,
            use_zero_pages: false,
            smart_scan: true,
            merge_across_nodes: true,
            advisor: None,
        }
    }
}

/// Advice about a range (`madvise`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// ksmd may merge it.
    Mergeable,
    /// ksmd may not merge it; merged pages are copied back.
    Unmergeable,
    /// Drop its pages.
    DontNeed,
}

/// The tree that holds a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    Unlinked,
    /// In the unstable tree of a scan.
    Unstable {
        node: NodeId,
        scan: u64,
        tree: u8,
    },
    Stable(StableId),
}

#[derive(Clone, Debug)]
struct Item {
    next: Option<ItemId>,
    process: ProcessId,
    page: u64,
    /// The content at the last visit; `None` before the first (`oldchecksum` 0).
    last_content: Option<Content>,
    age: u8,
    remaining_skips: u8,
    link: Link,
}

/// A process on ksmd's list, with the first of its items.
#[derive(Clone, Copy, Debug)]
struct Slot {
    process: ProcessId,
    first: Option<ItemId>,
}

/// Where the scan is (`struct ksm_scan`).
#[derive(Clone, Copy, Debug, Default)]
struct Cursor {
    /// The process; `None` between two scans.
    process: Option<ProcessId>,
    page: u64,
    /// The item before the next one.
    previous: Option<ItemId>,
}

/// A page that ksmd visits. A split of its huge page may take it out of the page table.
#[derive(Clone, Copy, Debug)]
struct Visit {
    item: ItemId,
    process: ProcessId,
    page: u64,
    content: Content,
    node: u8,
}

/// Memory and ksmd.
#[derive(Clone, Debug)]
pub struct KsmModel {
    rules: KsmRules,
    settings: KsmSettings,
    run: RunState,
    memory: Memory,
    slots: Vec<Slot>,
    cursor: Cursor,
    items: Vec<Item>,
    unused_items: Vec<ItemId>,
    stable: StableTree,
    unstable: Vec<RedBlackTree<ItemId>>,
    tally: Tally,
    work: WorkCounts,
    advisor: AdvisorMemory,
    now_ms: u64,
    cpu_ns: u64,
    scan_started_ms: u64,
}

impl KsmModel {
    /// An empty host with ksmd stopped.
    #[must_use]
    pub fn new(rules: KsmRules, settings: KsmSettings) -> Self {
        Self {
            rules,
            settings,
            run: RunState::Stopped,
            memory: Memory::default(),
            slots: Vec::new(),
            cursor: Cursor::default(),
            items: Vec::new(),
            unused_items: Vec::new(),
            stable: StableTree::default(),
            unstable: Vec::new(),
            tally: Tally::default(),
            work: WorkCounts::default(),
            advisor: AdvisorMemory::default(),
            now_ms: 0,
            cpu_ns: 0,
            scan_started_ms: 0,
        }
    }

    /// The memory.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The settings. An advisor changes `pages_to_scan`.
    #[must_use]
    pub fn settings(&self) -> &KsmSettings {
        &self.settings
    }

    /// The counters of `/sys/kernel/mm/ksm`.
    #[must_use]
    pub fn counters(&self) -> KsmCounters {
        self.tally.counters()
    }

    /// The work done since the start.
    #[must_use]
    pub fn work(&self) -> &WorkCounts {
        &self.work
    }

    /// The counters of a process (`ksm_process_profit` in mm/ksm.c).
    #[must_use]
    pub fn process_counters(&self, process: ProcessId) -> ProcessCounters {
        let process = self.memory.process(process);
        let saved = process.merging_pages + process.zero_pages;
        ProcessCounters {
            ksm_rmap_items: process.rmap_items,
            ksm_merging_pages: process.merging_pages,
            ksm_zero_pages: process.zero_pages,
            ksm_process_profit: saved * PAGE_BYTES - process.rmap_items * RMAP_ITEM_BYTES,
        }
    }

    /// Set the clock, and ksmd's CPU time since its start.
    pub fn set_time(&mut self, now_ms: u64, cpu_ns: u64) {
        self.now_ms = now_ms;
        self.cpu_ns = cpu_ns;
    }

    /// Write settings. `max_page_sharing` and `merge_across_nodes` are refused while pages are merged
    /// (`max_page_sharing_store`, `merge_across_nodes_store`): then nothing changes and the result is false. A change of
    /// the advisor sets `pages_to_scan` (`set_advisor_defaults`).
    pub fn write_settings(&mut self, mut settings: KsmSettings) -> bool {
        let old = self.settings;
        let alters_tree =
            settings.max_page_sharing != old.max_page_sharing || settings.merge_across_nodes != old.merge_across_nodes;
        if alters_tree {
            if self.tally.pages_shared > 0 {
                return false;
            }
            self.remove_unused_stable_nodes();
            if self.stable.stable_ids().next().is_some() {
                return false;
            }
        }
        if settings.advisor.is_some() != old.advisor.is_some() {
            self.advisor = AdvisorMemory::default();
            let start = settings.advisor.map(|advisor| advisor.min_pages_to_scan);
            settings.pages_to_scan = start.unwrap_or(KsmSettings::default().pages_to_scan);
        }
        self.settings = settings;
        true
    }

    /// Write `run` (`run_store`).
    pub fn write_run(&mut self, run: RunState) {
        if self.run != run {
            self.run = run;
            if run == RunState::Unmerged {
                self.unmerge_all();
            }
        }
    }

    fn remove_unused_stable_nodes(&mut self) {
        let unlinked = self.stable.remove_all_unused(&mut self.memory, &mut self.tally);
        self.mark_unlinked(&unlinked);
    }

    /// Pages whose stable node was removed.
    fn mark_unlinked(&mut self, items: &[ItemId]) {
        for &id in items {
            let item = &mut self.items[id as usize];
            item.link = Link::Unlinked;
            let process = item.process;
            self.memory.process_mut(process).merging_pages -= 1;
        }
    }
}

/// Changes of memory by its processes.
impl KsmModel {
    /// Start a process without memory.
    pub fn spawn(&mut self) -> ProcessId {
        self.memory.add_process(Process { is_alive: true, ..Process::default() })
    }

    /// Map untouched private memory.
    ///
    /// # Panics
    /// If a region is there already.
    pub fn map(&mut self, process: ProcessId, start: u64, pages: u64, node: u8) {
        let vmas = &mut self.memory.process_mut(process).vmas;
        let end = start + pages;
        assert!(vmas.range(..end).next_back().is_none_or(|(_, vma)| vma.end() <= start), "the range is in use");
        let entries = vec![PackedEntry::pack(PageEntry::Absent); usize::try_from(pages).expect("it fits in memory")];
        vmas.insert(start, Vma { start, entries, is_mergeable: false, has_anonymous: false, node });
    }

    /// Unmap a range.
    pub fn unmap(&mut self, process: ProcessId, start: u64, pages: u64) {
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
    pub fn fault_huge_page(&mut self, process: ProcessId, start: u64) {
        assert!(start.is_multiple_of(PAGES_IN_HUGE_PAGE), "a huge page is aligned");
        for page in start..start + PAGES_IN_HUGE_PAGE {
            assert_eq!(self.memory.entry(process, page), PageEntry::Absent, "the range was touched");
            self.memory.set_entry(process, page, PageEntry::HugePart(ZERO_CONTENT));
        }
    }

    /// Read a page: an untouched one is mapped to the zero page.
    pub fn read(&mut self, process: ProcessId, page: u64) {
        if self.memory.entry(process, page) == PageEntry::Absent {
            self.memory.set_entry(process, page, PageEntry::ZeroPage);
        }
    }

    /// Give a page a content. A page with several mappings and a merged page are copied first (`do_wp_page` in
    /// mm/memory.c); a merged frame is never reused, also with one mapping.
    pub fn write(&mut self, process: ProcessId, page: u64, content: Content) {
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
    fn replace_entry(&mut self, process: ProcessId, page: u64, entry: PageEntry) {
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

    fn clear_range(&mut self, process: ProcessId, start: u64, pages: u64) {
        for page in start..start + pages {
            if self.memory.process(process).vma_of(page).is_some() {
                self.replace_entry(process, page, PageEntry::Absent);
            }
        }
    }

    /// Give advice about a range of one or several regions (`ksm_madvise`).
    pub fn advise(&mut self, process: ProcessId, start: u64, pages: u64, advice: Advice) {
        if advice == Advice::DontNeed {
            self.clear_range(process, start, pages);
            return;
        }
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
    fn break_merged(&mut self, process: ProcessId, page: u64) {
        let entry = self.memory.entry(process, page);
        let is_merged =
            self.memory.stable_node(entry).is_some() || entry == PageEntry::KsmZeroPage && self.rules.tracks_zero_pages;
        if let Some(content) = self.memory.content(entry).filter(|_| is_merged) {
            self.work.breaks += 1;
            self.replace_entry(process, page, PageEntry::Private(content));
        }
    }

    /// Fork a process (`dup_mmap`, `ksm_fork`). The child is on ksmd's list if the parent is.
    pub fn fork(&mut self, parent: ProcessId) -> ProcessId {
        let pages: Vec<u64> = self.memory.process(parent).vmas.values().flat_map(|vma| vma.start..vma.end()).collect();
        for page in pages {
            let entry = self.memory.entry(parent, page);
            if matches!(entry, PageEntry::Private(_) | PageEntry::HugePart(_) | PageEntry::Frame(_)) {
                let frame = self.memory.number_frame(parent, page);
                self.memory.frame_mut(frame).mappings += 1;
            }
        }
        let mut child = Process { is_registered: false, ..self.memory.process(parent).clone() };
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
    pub fn exit(&mut self, process: ProcessId) {
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

    fn slot_position(&self, process: ProcessId) -> Option<usize> {
        self.slots.iter().position(|slot| slot.process == process)
    }

    /// Put a process on ksmd's list (`__ksm_enter`): just before the cursor's process, so that the scan in progress
    /// does not reach it; after `run` 2, at the end.
    fn enter(&mut self, process: ProcessId) {
        let cursor = self.cursor.process.filter(|_| self.run != RunState::Unmerged);
        let position = cursor.and_then(|cursor| self.slot_position(cursor)).unwrap_or(self.slots.len());
        self.slots.insert(position, Slot { process, first: None });
        self.memory.process_mut(process).is_registered = true;
    }

    /// `run` 2 (`unmerge_and_remove_all_rmap_items`): copy all merged pages back and forget all metadata.
    fn unmerge_all(&mut self) {
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

/// The scan.
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

    fn tree_number(&self, node: u8) -> u8 {
        if self.settings.merge_across_nodes { 0 } else { node }
    }

    fn unstable_tree(&mut self, number: u8) -> &mut RedBlackTree<ItemId> {
        let index = usize::from(number);
        if self.unstable.len() <= index {
            self.unstable.resize_with(index + 1, RedBlackTree::default);
        }
        &mut self.unstable[index]
    }

    /// The next page to visit (`scan_get_next_rmap_item`); `None` at the end of a scan.
    fn next_visit(&mut self) -> Option<Visit> {
        let first = self.slots.first()?.process;
        if self.cursor.process.is_none() {
            self.scan_started_ms = self.now_ms;
            self.unstable.iter_mut().for_each(RedBlackTree::clear);
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
    fn next_visit_of(&mut self, process: ProcessId) -> Option<Visit> {
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
    fn next_page(&mut self, process: ProcessId) -> Option<u64> {
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

    /// The item of a page, a new one if it has none (`get_next_rmap_item`). Items of pages before it are freed: they are
    /// no longer mapped or mergeable.
    fn next_item(&mut self, process: ProcessId, page: u64) -> ItemId {
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

    fn item_after(&self, process: ProcessId, previous: Option<ItemId>) -> Option<ItemId> {
        match previous {
            Some(previous) => self.items[previous as usize].next,
            None => self.slots[self.slot_position(process).expect("the cursor's process is on the list")].first,
        }
    }

    fn set_item_after(&mut self, process: ProcessId, previous: Option<ItemId>, next: Option<ItemId>) {
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
    fn free_items_from(&mut self, mut next: Option<ItemId>) {
        while let Some(id) = next {
            next = self.items[id as usize].next;
            self.free_item(id);
        }
    }

    /// The end of a process's turn. A process that ended, or without mergeable regions, leaves the list.
    fn leave_process(&mut self, process: ProcessId) {
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
    fn unlink(&mut self, id: ItemId) {
        match self.items[id as usize].link {
            Link::Unlinked => {}
            Link::Unstable { node, scan, tree } => {
                if scan == self.tally.full_scans {
                    self.unstable_tree(tree).remove(node);
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

/// One visit.
impl KsmModel {
    /// `cmp_and_merge_page`.
    fn compare_and_merge(&mut self, visit: Visit) {
        let entry = self.memory.entry(visit.process, visit.page);
        let stable = self.memory.stable_node(entry);
        if stable.is_some_and(|stable| self.items[visit.item as usize].link == Link::Stable(stable)) {
            return;
        }
        let early = self.rules.checksum_before_stable_tree;
        if stable.is_none() && early {
            self.unlink(visit.item);
            if !self.is_unchanged(&visit) || self.merge_with_zero_page(&visit) {
                return;
            }
        }
        // A merged page that a fork mapped here is its own match (`stable_tree_search`).
        let target = if stable.is_some() { stable } else { self.search_stable(&visit) };
        self.unlink(visit.item);
        if let Some(target) = target {
            if self.map_to_stable(&visit, target) {
                self.append(target, visit.item);
            }
            return;
        }
        if !early && (!self.is_unchanged(&visit) || self.merge_with_zero_page(&visit)) {
            return;
        }
        if let Some(partner) = self.search_or_insert_unstable(&visit) {
            self.merge_with_partner(&visit, partner);
        }
    }

    /// Whether the checksum is that of the last visit; it is remembered.
    fn is_unchanged(&mut self, visit: &Visit) -> bool {
        self.work.checksums += 1;
        let item = &mut self.items[visit.item as usize];
        let is_unchanged = item.last_content == Some(visit.content);
        item.last_content = Some(visit.content);
        is_unchanged
    }

    /// Whether the page of a visit is still mapped: a split may have mapped the zero page there.
    fn is_mapped(&self, visit: &Visit) -> bool {
        let vma = self.memory.process(visit.process).vma_of(visit.page);
        vma.is_some_and(|vma| vma.entries[(visit.page - vma.start) as usize].is_anonymous())
    }

    /// `try_to_merge_with_zero_page` (a part of `cmp_and_merge_page` before 6.11).
    fn merge_with_zero_page(&mut self, visit: &Visit) -> bool {
        if !self.settings.use_zero_pages || visit.content != ZERO_CONTENT {
            return false;
        }
        self.split_huge_page(visit.process, visit.page);
        if !self.is_mapped(visit) {
            return false;
        }
        self.work.merges += 1;
        self.replace_entry(visit.process, visit.page, PageEntry::KsmZeroPage);
        if self.rules.tracks_zero_pages {
            self.tally.zero_pages += 1;
            self.memory.process_mut(visit.process).zero_pages += 1;
        }
        true
    }

    /// Split the huge page of a page, if it has one. Pages of zeros in it may become the zero page.
    fn split_huge_page(&mut self, process: ProcessId, page: u64) {
        if !matches!(self.memory.entry(process, page), PageEntry::HugePart(_)) {
            return;
        }
        self.work.splits += 1;
        let start = page - page % PAGES_IN_HUGE_PAGE;
        for part in start..start + PAGES_IN_HUGE_PAGE {
            if let PageEntry::HugePart(content) = self.memory.entry(process, part) {
                let maps_zero = content == ZERO_CONTENT && self.rules.split_maps_zero_pages;
                let entry = if maps_zero { PageEntry::ZeroPage } else { PageEntry::Private(content) };
                self.memory.set_entry(process, part, entry);
            }
        }
    }

    fn tree_settings(&self) -> TreeSettings {
        TreeSettings {
            rules: self.rules,
            max_page_sharing: self.settings.max_page_sharing,
            prune_ms: self.settings.stable_node_chains_prune_millisecs,
            now_ms: self.now_ms,
        }
    }

    /// Walk the stable tree; pages whose nodes the walk removed are unlinked.
    fn walk_stable<T>(&mut self, walks: impl FnOnce(&mut StableTree, &mut Memory, &mut Walk<'_>) -> T) -> T {
        let settings = self.tree_settings();
        let mut unlinked = Vec::new();
        let mut walk =
            Walk { settings: &settings, tally: &mut self.tally, work: &mut self.work, unlinked: &mut unlinked };
        let result = walks(&mut self.stable, &mut self.memory, &mut walk);
        self.mark_unlinked(&unlinked);
        result
    }

    fn search_stable(&mut self, visit: &Visit) -> Option<StableId> {
        let tree = self.tree_number(visit.node);
        self.walk_stable(|stable, memory, walk| stable.search(memory, visit.content, tree, walk))
    }

    /// Map the frame of a stable node in place of a page (`try_to_merge_with_ksm_page`).
    fn map_to_stable(&mut self, visit: &Visit, target: StableId) -> bool {
        let frame = self.stable.frame(target);
        if self.memory.entry(visit.process, visit.page) == PageEntry::Frame(frame) {
            return true;
        }
        self.split_huge_page(visit.process, visit.page);
        if !self.is_mapped(visit) {
            return false;
        }
        self.map_frame(visit.process, visit.page, frame);
        true
    }

    fn map_frame(&mut self, process: ProcessId, page: u64, frame: FrameId) {
        self.work.merges += 1;
        self.memory.frame_mut(frame).mappings += 1;
        self.replace_entry(process, page, PageEntry::Frame(frame));
    }

    /// `stable_tree_append`.
    fn append(&mut self, target: StableId, item: ItemId) {
        self.stable.append(target, item, &mut self.tally);
        let record = &mut self.items[item as usize];
        record.link = Link::Stable(target);
        let process = record.process;
        self.memory.process_mut(process).merging_pages += 1;
    }

    /// Find a page of the same content in the unstable tree, or put this one there (`unstable_tree_search_insert`). A
    /// walk that meets a page that is gone, or this very page, gives up.
    fn search_or_insert_unstable(&mut self, visit: &Visit) -> Option<ItemId> {
        let tree = self.tree_number(visit.node);
        let (mut next, mut parent) = (self.unstable_tree(tree).root(), None);
        while let Some(node) = next {
            let partner = self.unstable_tree(tree).value(node);
            let content = self.mergeable_content(partner)?;
            if self.is_same_page(visit, partner) {
                return None;
            }
            self.work.unstable_comparisons += 1;
            let side = match visit.content.cmp(&content) {
                std::cmp::Ordering::Less => Side::Left,
                std::cmp::Ordering::Greater => Side::Right,
                std::cmp::Ordering::Equal => return Some(partner),
            };
            parent = Some((node, side));
            next = self.unstable_tree(tree).child(node, side);
        }
        let node = self.unstable_tree(tree).insert(parent, visit.item);
        let scan = self.tally.full_scans;
        self.items[visit.item as usize].link = Link::Unstable { node, scan, tree };
        self.tally.pages_unshared += 1;
        None
    }

    /// The content of the page of an item, while it is present, anonymous and mergeable (`get_mergeable_page`).
    fn mergeable_content(&self, item: ItemId) -> Option<Content> {
        let Item { process, page, .. } = self.items[item as usize];
        let process_record = self.memory.process(process);
        let vma = process_record.vma_of(page).filter(|vma| process_record.is_alive && vma.is_mergeable)?;
        let entry = vma.entries[(page - vma.start) as usize];
        if entry.is_anonymous() { self.memory.content(entry.unpack()) } else { None }
    }

    fn is_same_page(&self, visit: &Visit, partner: ItemId) -> bool {
        let Item { process, page, .. } = self.items[partner as usize];
        let entry = self.memory.entry(visit.process, visit.page);
        matches!(entry, PageEntry::Frame(_)) && entry == self.memory.entry(process, page)
    }

    /// Merge two pages of the same content into a new node (`try_to_merge_two_pages`, `stable_tree_insert`). Two parts
    /// of one huge page do not merge: each holds the other, so the split fails, and comes after the attempt.
    fn merge_with_partner(&mut self, visit: &Visit, partner: ItemId) {
        let Item { process, page, .. } = self.items[partner as usize];
        let huge_page_of = |process, page| match self.memory.entry(process, page) {
            PageEntry::HugePart(_) => Some((process, page / PAGES_IN_HUGE_PAGE)),
            _ => None,
        };
        let own = huge_page_of(visit.process, visit.page);
        if own.is_some() && own == huge_page_of(process, page) {
            self.split_huge_page(visit.process, visit.page);
            return;
        }
        self.split_huge_page(visit.process, visit.page);
        if !self.is_mapped(visit) {
            return;
        }
        let partner_visit = Visit { item: partner, process, page, ..*visit };
        self.split_huge_page(process, page);
        if !self.is_mapped(&partner_visit) {
            return;
        }
        let frame = self.memory.number_frame(visit.process, visit.page);
        self.map_frame(process, page, frame);
        self.unlink(partner);
        let tree = self.tree_number(visit.node);
        let target = self.walk_stable(|stable, memory, walk| stable.insert(memory, frame, tree, walk));
        self.append(target, partner);
        self.append(target, visit.item);
    }
}

/// Checks for tests.
impl KsmModel {
    /// The first broken invariant, if there is one: each merged frame has exactly its mappings, each linked page maps
    /// the frame of its node or was changed since the last visit, and the counters are the sums of what they count.
    #[must_use]
    pub fn broken_invariant(&self) -> Option<String> {
        let mut mappings = std::collections::BTreeMap::<FrameId, u32>::new();
        let mut zero_pages = 0;
        for process in &self.memory.processes {
            for entry in process.vmas.values().flat_map(|vma| &vma.entries) {
                match entry.unpack() {
                    PageEntry::Frame(frame) => *mappings.entry(frame).or_default() += 1,
                    PageEntry::KsmZeroPage => zero_pages += 1,
                    _ => {}
                }
            }
        }
        for (&frame, &count) in &mappings {
            let Frame { mappings: recorded, .. } = *self.memory.frame(frame);
            if recorded != count {
                return Some(format!("frame {frame} has {count} mappings and records {recorded}"));
            }
        }
        if self.rules.tracks_zero_pages && self.rules.fork_resets_counters && zero_pages != self.tally.zero_pages {
            return Some(format!("{zero_pages} zero pages, {} counted", self.tally.zero_pages));
        }
        let mut linked = 0;
        for id in self.stable.stable_ids() {
            linked += self.stable.items(id).len() as u64;
            if let Some(item) =
                self.stable.items(id).iter().find(|&&item| self.items[item as usize].link != Link::Stable(id))
            {
                return Some(format!("item {item} is not linked to its stable node {id}"));
            }
        }
        if linked != self.tally.pages_shared + self.tally.pages_sharing {
            return Some(format!("{linked} linked pages, {:?}", self.tally));
        }
        let merging: i64 = self.memory.processes.iter().map(|process| process.merging_pages).sum();
        if self.rules.fork_resets_counters && merging != linked.cast_signed() {
            return Some(format!("{linked} linked pages, {merging} in the processes"));
        }
        None
    }
}
