//! Invariants that tests check.

use std::collections::BTreeMap;

use super::super::memory::{FrameId, PageEntry};
use super::{KsmModel, Link};

impl KsmModel {
    /// The first broken invariant, if there is one: each merged frame has exactly its mappings, each linked page maps
    /// the frame of its node or was changed since the last visit, and the counters are the sums of what they count.
    #[must_use]
    pub fn broken_invariant(&self) -> Option<String> {
        let mut mappings = BTreeMap::<FrameId, u32>::new();
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
            let recorded = self.memory.frame(frame).mappings;
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
