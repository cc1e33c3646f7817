//! ksmd: its settings, its list of processes, its scan, and all changes of memory that it notices.
//!
//! Mirrors mm/ksm.c function by function, as read in 6.1.192 and 6.12.117 and compared with a running 6.18.44. Each
//! function here names the one that it mirrors. Where kernels differ, [`KsmRules`] decides.
//!
//! Limits: no allocation fails; no page is pinned, locked, migrated or swapped out; a batch is not interrupted. So
//! `try_to_merge_one_page` fails only where a huge page cannot be split or the split took the page away.

mod changes;
mod invariants;
mod items;
mod scan;
mod uniform;
mod visit;

use std::collections::BTreeSet;

use super::counters::{KsmdCounters, PAGE_BYTES, ProcessCounters, RMAP_ITEM_BYTES, ReachedNodes, Tally, WorkCounts};
use super::memory::{Content, FrameId, Memory, PageKey, SimulatedProcessId};
use super::rules::KsmRules;
use super::stable_tree::{StableId, StableTree};
use super::unstable_tree::UnstableTree;
use items::{ItemRuns, Link};
use pagefold_merge::decide::policy::advisor::{Advisor, AdvisorContext};

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
    pub advisor: Option<Advisor>,
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

/// Where the scan is (`struct ksm_scan`).
#[derive(Clone, Copy, Debug, Default)]
struct Cursor {
    /// The process; `None` between two scans.
    process: Option<SimulatedProcessId>,
    page: u64,
    /// The page behind the last one visited; metadata from there on belongs to pages that the scan has not reached.
    unvisited: u64,
}

/// Pages that ksmd visits one after the other and treats alike. A split of its huge page may take a single page out of
/// the page table.
#[derive(Clone, Copy, Debug)]
struct Visit {
    process: SimulatedProcessId,
    page: u64,
    pages: u64,
    /// The content of the first page.
    content: Content,
    /// Whether contents, and the frames of merged pages, have ascending numbers. Else all are equal.
    ascends: bool,
    node: u8,
}

impl Visit {
    fn key(&self) -> PageKey {
        PageKey::new(self.process, self.page)
    }

    fn range(&self) -> std::ops::Range<u64> {
        self.page..self.page + self.pages
    }

    /// The frame of a page, when the first page has this one.
    fn frame(&self, first: FrameId, page: u64) -> FrameId {
        if self.ascends { first + page as FrameId } else { first }
    }
}

/// Memory and ksmd.
#[derive(Clone, Debug)]
pub struct KsmModel {
    rules: KsmRules,
    settings: KsmSettings,
    run: RunState,
    memory: Memory,
    /// ksmd's list of processes.
    slots: Vec<SimulatedProcessId>,
    cursor: Cursor,
    /// The metadata of each process.
    items: Vec<ItemRuns>,
    /// Pages that no longer map a merged frame, and that its node may still count.
    unmapped: BTreeSet<(FrameId, PageKey)>,
    visits_runs: bool,
    is_exact: bool,
    stable: StableTree,
    unstable: Vec<UnstableTree>,
    tally: Tally,
    work: WorkCounts,
    reached_stable: ReachedNodes,
    reached_unstable: ReachedNodes,
    /// What the advisor remembers, while it is on.
    advisor: Option<AdvisorContext>,
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
            unmapped: BTreeSet::new(),
            visits_runs: true,
            is_exact: true,
            stable: StableTree::default(),
            unstable: Vec::new(),
            tally: Tally::default(),
            work: WorkCounts::default(),
            reached_stable: ReachedNodes::default(),
            reached_unstable: ReachedNodes::default(),
            advisor: settings.advisor.map(|rule| rule.start()),
            now_ms: 0,
            cpu_ns: 0,
            scan_started_ms: 0,
        }
    }

    /// Visit single pages only, and join no metadata. The counters are the same, and each takes more time and memory.
    #[must_use]
    pub fn page_by_page(self) -> Self {
        Self { visits_runs: false, ..self }
    }

    /// Approximate what ksmd does with pages that change during a scan. A changed page leaves the unstable tree at once
    /// and leads no search astray, and the stable node of a freed frame is removed at once. So hosts with writers are
    /// scanned by runs, too, and counters differ a little from the kernel's.
    #[must_use]
    pub fn seeing_changes_at_once(self) -> Self {
        Self { is_exact: false, ..self }
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

    /// What `run` says.
    #[must_use]
    pub fn run_state(&self) -> RunState {
        self.run
    }

    /// The counters of `/sys/kernel/mm/ksm`.
    #[must_use]
    pub fn counters(&self) -> KsmdCounters {
        self.tally.counters()
    }

    /// The work done since the start.
    #[must_use]
    pub fn work(&self) -> &WorkCounts {
        &self.work
    }

    /// The counters of a process (`ksm_process_profit` in mm/ksm.c).
    #[must_use]
    pub fn process_counters(&self, process: SimulatedProcessId) -> ProcessCounters {
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
    /// (`max_page_sharing_store`, `merge_across_nodes_store`): nothing changes then, and the result is false. A change
    /// of the advisor sets `pages_to_scan` (`set_advisor_defaults`).
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
            self.advisor = settings.advisor.map(|rule| rule.start());
            let start = self.advisor.map(|context| context.pages_to_scan);
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
        let max = self.settings.max_page_sharing;
        let removed = self.stable.remove_all_unused(&mut self.memory, max, &mut self.tally);
        self.unlink_pages_of(&removed);
    }

    /// Stable nodes were removed: unlink their pages. Since their frames are freed, all are in `unmapped`.
    fn unlink_pages_of(&mut self, removed: &[StableId]) {
        for &node in removed {
            let pages = (node, PageKey::FIRST_KEY)..=(node, PageKey::LAST_KEY);
            let keys: Vec<PageKey> = self.unmapped.range(pages).map(|&(_, key)| key).collect();
            for key in keys {
                self.unmapped.remove(&(node, key));
                let items = &mut self.items[key.process().0 as usize];
                if items.run_from(key.page()).is_some_and(|item| item.link == Link::Stable(node)) {
                    items.update(key.page()..key.page() + 1, |_, item| item.set_link(Link::Unlinked, false));
                    self.memory.process_mut(key.process()).merging_pages -= 1;
                }
            }
        }
    }
}
