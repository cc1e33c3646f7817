//! One visit: the checksum, the search in both trees, and the merge.

use super::super::memory::{Content, FrameId, Memory, PAGES_IN_HUGE_PAGE, PageEntry, SimulatedProcessId, ZERO_CONTENT};
use super::super::stable_tree::{StableId, StableTree, TreeSettings, Walk};
use super::super::unstable_tree::Search;
use super::{Item, ItemId, KsmModel, Link, Visit};

impl KsmModel {
    /// `cmp_and_merge_page`.
    pub(super) fn compare_and_merge(&mut self, visit: Visit) {
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
    fn split_huge_page(&mut self, process: SimulatedProcessId, page: u64) {
        if !matches!(self.memory.entry(process, page), PageEntry::HugePart(_)) {
            return;
        }
        self.work.splits += 1;
        self.disturb_scan();
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

    fn map_frame(&mut self, process: SimulatedProcessId, page: u64, frame: FrameId) {
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
        self.unstable_tree(tree);
        let unstable = &self.unstable[usize::from(tree)];
        let (search, compared) = unstable.search(visit.content, |item| self.mergeable_content(item));
        self.work.unstable_comparisons += compared;
        let parent = match search {
            Search::Found(partner) => return Some(partner).filter(|&partner| !self.is_same_page(visit, partner)),
            Search::Lost => return None,
            Search::Missing(parent) => parent,
        };
        self.unstable_tree(tree).insert(parent, visit.item, visit.content);
        let scan = self.tally.full_scans;
        self.items[visit.item as usize].link = Link::Unstable { scan, tree };
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
