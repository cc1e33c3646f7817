//! Invariants that tests check.

use std::collections::BTreeMap;

use super::super::memory::{FrameId, PageEntry, PageTotals};
use super::super::stable_tree::StableId;
use super::KsmModel;

impl KsmModel {
    /// The first broken invariant, if there is one: each merged frame has exactly its mappings, the totals of pages are
    /// those of the page tables, each stable node counts the pages that are linked to it, and the counters are the sums
    /// of what they count.
    #[must_use]
    pub fn broken_invariant(&self) -> Option<String> {
        let mut mappings = BTreeMap::<FrameId, u32>::new();
        let mut zero_pages = 0;
        for (_, run) in
            self.memory.processes.iter().flat_map(|process| process.vmas.values()).flat_map(|vma| vma.entries.runs())
        {
            match run.entry() {
                PageEntry::Frame(first) => (0..run.pages).for_each(|page| {
                    let frame = if run.ascends { first + page as FrameId } else { first };
                    *mappings.entry(frame).or_default() += 1;
                }),
                PageEntry::KsmZeroPage => zero_pages += run.pages.cast_signed(),
                _ => {}
            }
        }
        for process in &self.memory.processes {
            let mut totals = PageTotals::default();
            for (_, run) in process.vmas.values().flat_map(|vma| vma.entries.runs()) {
                match run.entry() {
                    PageEntry::Private(_) => totals.private += run.pages,
                    PageEntry::HugePart(_) => totals.huge += run.pages,
                    PageEntry::Frame(_) => totals.numbered += run.pages,
                    PageEntry::ZeroPage => totals.zero += run.pages,
                    PageEntry::KsmZeroPage => totals.ksm_zero += run.pages,
                    PageEntry::Absent => {}
                }
            }
            if totals != process.totals {
                return Some(format!("{totals:?} in page tables, {:?} counted", process.totals));
            }
        }
        if mappings.len() as u64 != self.memory.used_numbered_frames() {
            return Some(format!("{} mapped frames, {} counted", mappings.len(), self.memory.used_numbered_frames()));
        }
        for (&frame, &count) in &mappings {
            let recorded = self.memory.frame(frame).mappings;
            if recorded != count {
                return Some(format!("frame {frame} has {count} mappings and records {recorded}"));
            }
        }
        if self.rules.tracks_zero_pages && self.rules.fork_resets_counters && zero_pages != self.tally.zero_pages {
            return Some(format!("{zero_pages} zero pages, {} counted", self.tally.zero_pages));
        }
        self.broken_link()
    }

    fn broken_link(&self) -> Option<String> {
        let mut links = BTreeMap::<StableId, u32>::new();
        let mut items = 0;
        for (_, item) in self.items.iter().flat_map(|items| items.iter()) {
            items += u64::from(item.pages);
            (0..item.pages).filter_map(|page| item.stable_node(page.into())).for_each(|node| {
                *links.entry(node).or_default() += 1;
            });
        }
        if items != self.tally.rmap_items {
            return Some(format!("{items} pages with metadata, {:?}", self.tally));
        }
        for node in self.stable.stable_ids() {
            let counted = self.stable.linked_pages(node).unwrap_or(0);
            let linked = links.get(&node).copied().unwrap_or(0);
            if counted != linked {
                return Some(format!("stable node {node} counts {counted} pages of {linked}"));
            }
        }
        let linked: u64 = links.values().map(|&count| u64::from(count)).sum();
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
