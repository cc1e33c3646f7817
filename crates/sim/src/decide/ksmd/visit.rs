//! One visit: the checksum, the search in both trees, and the merge. Pages of one visit are treated alike
//! ([`super::uniform`]).

use super::super::entry_runs::EntryRun;
use super::super::memory::{
    Content, Frame, FrameId, Memory, PAGES_IN_HUGE_PAGE, PackedEntry, PageEntry, PageKey, SimulatedProcessId,
    ZERO_CONTENT,
};
use super::super::stable_tree::{StableId, StableTree, TreeSettings, Walk};
use super::super::unstable_tree::Search;
use super::items::{ItemRun, Link};
use super::{KsmModel, Visit};

impl KsmModel {
    /// `cmp_and_merge_page`.
    pub(super) fn compare_and_merge(&mut self, visit: Visit) {
        let entry = self.memory.entry(visit.process, visit.page);
        let stable = self.memory.merged_frame(entry);
        if stable.is_some_and(|stable| self.item(visit.key()).link == Link::Stable(stable)) {
            return;
        }
        let early = self.rules.checksum_before_stable_tree;
        if stable.is_none() && early {
            self.unlink(&visit);
            if !self.is_unchanged(&visit) || self.merge_with_zero_page(&visit) {
                return;
            }
        }
        // A merged page that a fork mapped here is its own match (`stable_tree_search`).
        let target = if stable.is_some() { stable } else { self.search_stable(&visit) };
        self.unlink(&visit);
        if let Some(target) = target {
            if self.map_to_stable(&visit, target) {
                self.append(target, &visit);
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

    /// The metadata of a visited page and of those behind it.
    fn item(&self, key: PageKey) -> ItemRun {
        self.items[key.process().0 as usize].run_from(key.page()).expect("a visited page has metadata")
    }

    fn update_items(&mut self, visit: &Visit, change: impl FnMut(u64, &mut ItemRun)) {
        self.items[visit.process.0 as usize].update(visit.range(), change);
    }

    /// Whether the checksums are those of the last visit; they are remembered.
    fn is_unchanged(&mut self, visit: &Visit) -> bool {
        self.work.checksums += visit.pages;
        let is_unchanged = self.item(visit.key()).last_content() == Some(visit.content);
        if !is_unchanged {
            self.update_items(visit, |_, item| item.remember(visit.content, visit.ascends));
        }
        is_unchanged
    }

    /// Whether the page of a visit is still mapped: a split may have mapped the zero page there.
    fn is_mapped(&self, visit: &Visit) -> bool {
        let vma = self.memory.process(visit.process).vma_of(visit.page);
        vma.is_some_and(|vma| vma.run_from(visit.page).first.is_anonymous())
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
        self.work.merges += visit.pages;
        let zero_pages = EntryRun { pages: visit.pages, ..EntryRun::single(PageEntry::KsmZeroPage) };
        self.replace_entries(visit.process, visit.page, zero_pages);
        if self.rules.tracks_zero_pages {
            self.tally.zero_pages += visit.pages.cast_signed();
            self.memory.process_mut(visit.process).zero_pages += visit.pages.cast_signed();
        }
        true
    }

    /// Split the huge page of a page, if it has one. Pages of zeros in it may become the zero page.
    fn split_huge_page(&mut self, process: SimulatedProcessId, page: u64) {
        if !matches!(self.memory.entry(process, page), PageEntry::HugePart(_)) {
            return;
        }
        self.work.splits += 1;
        let start = page - page % PAGES_IN_HUGE_PAGE;
        for (page, run) in self.memory.runs(process, start..start + PAGES_IN_HUGE_PAGE) {
            let PageEntry::HugePart(content) = run.entry() else { continue };
            let zeros = match (content, run.ascends) {
                (ZERO_CONTENT, false) => run.pages,
                (ZERO_CONTENT, true) => 1,
                _ => 0,
            };
            self.memory.set_run(
                process,
                page,
                EntryRun { first: PackedEntry::pack(PageEntry::Private(content)), ..run },
            );
            if zeros > 0 && self.rules.split_maps_zero_pages {
                self.disturb_scan(process, page, zeros);
                self.work.zero_pages_of_splits += zeros;
                let zero_page = EntryRun { pages: zeros, ..EntryRun::single(PageEntry::ZeroPage) };
                self.memory.set_run(process, page, zero_page);
            }
        }
    }

    pub(super) fn tree_settings(&self) -> TreeSettings {
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
        let mut removed = Vec::new();
        let mut walk =
            Walk { settings: &settings, tally: &mut self.tally, work: &mut self.work, removed: &mut removed };
        let result = walks(&mut self.stable, &mut self.memory, &mut walk);
        self.unlink_pages_of(&removed);
        result
    }

    /// Search the content of the first page. The walks of the others change nothing, and are counted as long as the
    /// first.
    fn search_stable(&mut self, visit: &Visit) -> Option<StableId> {
        if let Some(compared) = self.quiet_miss(visit.content, visit.node) {
            self.count_stable_walks(visit.pages, compared);
            return None;
        }
        let (tree, before) = (self.tree_number(visit.node), self.work.stable_comparisons);
        let found = self.walk_stable(|stable, memory, walk| stable.search(memory, visit.content, tree, walk));
        let compared = self.work.stable_comparisons - before;
        self.work.stable_comparisons = before;
        self.count_stable_walks(visit.pages, compared);
        found
    }

    fn count_stable_walks(&mut self, walks: u64, compared_by_each: u64) {
        self.work.stable_comparisons += compared_by_each * walks;
        self.work.first_comparisons += self.reached_stable.add_walks(walks, compared_by_each);
    }

    /// The comparisons of a walk that is known to find nothing and to change nothing.
    fn quiet_miss(&self, content: Content, node: u8) -> Option<u64> {
        let tree = self.tree_number(node);
        let settings = self.tree_settings();
        self.stable.quiet_miss(&self.memory, content, tree, &settings).filter(|_| self.visits_runs)
    }

    /// Map the frames of stable nodes in place of pages (`try_to_merge_with_ksm_page`).
    fn map_to_stable(&mut self, visit: &Visit, target: StableId) -> bool {
        if self.memory.entry(visit.process, visit.page) == PageEntry::Frame(target) {
            return true;
        }
        self.split_huge_page(visit.process, visit.page);
        if !self.is_mapped(visit) {
            return false;
        }
        self.map_frames(visit, target);
        true
    }

    /// Map frames from one on in place of pages.
    fn map_frames(&mut self, visit: &Visit, first: FrameId) {
        self.work.merges += visit.pages;
        for page in 0..visit.pages {
            self.memory.frame_mut(visit.frame(first, page)).mappings += 1;
        }
        let frames =
            EntryRun { pages: visit.pages, ascends: visit.ascends, ..EntryRun::single(PageEntry::Frame(first)) };
        self.replace_entries(visit.process, visit.page, frames);
    }

    /// `stable_tree_append`.
    fn append(&mut self, target: StableId, visit: &Visit) {
        for page in 0..visit.pages {
            self.stable.append(visit.frame(target, page), self.settings.max_page_sharing, &mut self.tally);
        }
        let link = |start: u64| Link::Stable(visit.frame(target, start - visit.page));
        let forgets = self.rules.stable_tree_forgets_history;
        self.update_items(visit, |start, item| {
            item.set_link(link(start), visit.ascends);
            if forgets {
                item.forget_history();
            }
        });
        self.memory.process_mut(visit.process).merging_pages += visit.pages.cast_signed();
    }

    /// Find pages of the same contents in the unstable tree, or put these there (`unstable_tree_search_insert`). A walk
    /// that meets a page that is gone, or this very page, gives up.
    fn search_or_insert_unstable(&mut self, visit: &Visit) -> Option<PageKey> {
        let tree = self.tree_number(visit.node);
        let is_mapped = self.is_mapped(visit);
        if !is_mapped && !self.is_exact {
            return None;
        }
        let unstable = self.unstable_tree(tree);
        if !is_mapped {
            // A split took the page away after its checksum was computed, and it is inserted nevertheless.
            unstable.take_shape();
        }
        let unstable = &self.unstable[usize::from(tree)];
        let (search, compared) = unstable.search(visit.content, visit.pages, |key| self.mergeable_content(key));
        self.work.unstable_comparisons += compared;
        self.work.first_comparisons += self.reached_unstable.add_walks(visit.pages, compared / visit.pages);
        let parent = match search {
            Search::Found(partner) => return Some(partner).filter(|&partner| !self.is_same_page(visit, partner)),
            Search::Lost => return None,
            Search::Missing(parent) => parent,
        };
        self.unstable_tree(tree).insert(parent, visit.key(), visit.pages, visit.content);
        let scan = self.scan_number();
        self.update_items(visit, |_, item| item.set_link(Link::Unstable { scan, tree }, false));
        self.tally.pages_unshared += visit.pages;
        None
    }

    /// The content of a page, while it is present, anonymous and mergeable (`get_mergeable_page`).
    fn mergeable_content(&self, key: PageKey) -> Option<Content> {
        let process = self.memory.process(key.process());
        let vma = process.vma_of(key.page()).filter(|vma| process.is_alive && vma.is_mergeable)?;
        match vma.entry(key.page()) {
            PageEntry::Absent | PageEntry::ZeroPage | PageEntry::KsmZeroPage => None,
            entry => self.memory.content(entry),
        }
    }

    fn is_same_page(&self, visit: &Visit, partner: PageKey) -> bool {
        let entry = self.memory.entry(visit.process, visit.page);
        matches!(entry, PageEntry::Frame(_)) && entry == self.memory.entry(partner.process(), partner.page())
    }

    /// Merge pages with pages of the same contents into new nodes (`try_to_merge_two_pages`, `stable_tree_insert`). Two
    /// parts of one huge page do not merge: each holds the other, so the split fails, and comes after the attempt.
    fn merge_with_partner(&mut self, visit: &Visit, partner: PageKey) {
        let (process, page) = (partner.process(), partner.page());
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
        let partner_visit = Visit { process, page, ..*visit };
        self.split_huge_page(process, page);
        if !self.is_mapped(&partner_visit) {
            return;
        }
        let first = self.number_frames(visit);
        self.map_frames(&partner_visit, first);
        self.unlink(&partner_visit);
        let tree = self.tree_number(visit.node);
        for page in 0..visit.pages {
            // The first page was searched before.
            let content = visit.content + page as Content;
            if page > 0 {
                self.search_stable(&Visit { content, pages: 1, ..*visit });
            }
            let frame = visit.frame(first, page);
            self.walk_stable(|stable, memory, walk| stable.insert(memory, frame, tree, walk));
        }
        self.append(first, &partner_visit);
        self.append(first, visit);
    }

    /// Give pages numbered frames, and return the first.
    fn number_frames(&mut self, visit: &Visit) -> FrameId {
        if visit.pages == 1 {
            return self.memory.number_frame(visit.process, visit.page);
        }
        let frame =
            |page| Frame { content: visit.content + page as Content, mappings: 1, is_merged: false, node: visit.node };
        let first = self.memory.add_frames((0..visit.pages).map(frame));
        let frames =
            EntryRun { pages: visit.pages, ascends: visit.ascends, ..EntryRun::single(PageEntry::Frame(first)) };
        self.memory.set_run(visit.process, visit.page, frames);
        first
    }
}
