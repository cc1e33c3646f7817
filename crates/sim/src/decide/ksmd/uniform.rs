//! When ksmd's visits of neighboring pages are one step.
//!
//! Pages whose entries are one run and whose metadata is one run are visited as one if each visit does what the first
//! does, and no visit changes what a later one meets. Then the counters are those of single visits. This holds:
//!
//! - for merged pages linked to the stable nodes of their frames: the visits do nothing;
//! - for pages that smart scan skips: their metadata is the same;
//! - for pages that are not merged and not linked to a stable node, all changed since the last visit or all unchanged
//!   (those of ascending contents that became equal ones are visited singly), as far as all of these hold:
//!   - no two of them have one content, or all merge with one node that has room for them, or with the zero page;
//!   - walks through the stable tree change nothing ([`StableTree::uniform_pages`]): they meet no freed frame, and no
//!     chain that they prune, reorder or drop. All end in the same gap of the tree, or all find nodes with room whose
//!     contents and frames ascend;
//!   - no page in the unstable tree changed during the scan, and all pages are missing there, or their contents belong to
//!     neighboring pages ([`UnstableTree::uniform_pages`]);
//!   - a merge involves base pages with one mapping only.
//!
//! Where a condition fails for the first page, that page is visited alone, by the code that mirrors the kernel.
//!
//! [`StableTree::uniform_pages`]: super::super::stable_tree::StableTree::uniform_pages
//! [`UnstableTree::uniform_pages`]: super::super::unstable_tree::UnstableTree::uniform_pages

use super::super::entry_runs::EntryRun;
use super::super::memory::{PackedEntry, PageEntry, ZERO_CONTENT};
use super::items::{ItemRun, Link};
use super::{KsmModel, Visit};

impl KsmModel {
    /// How many pages of a visit are visited as one, at least one. `entry` and `item` are those of the first page.
    pub(super) fn uniform_pages(&self, visit: &Visit, entry: PageEntry, item: &ItemRun) -> u64 {
        if visit.pages == 1 {
            return 1;
        }
        if let PageEntry::Frame(frame) = entry {
            let is_linked = item.link == Link::Stable(frame) && item.link_ascends == visit.ascends;
            return if is_linked { visit.pages } else { 1 };
        }
        if matches!(item.link, Link::Stable(_)) {
            return 1;
        }
        let Some(is_unchanged) = item.compare(visit.content, visit.ascends, visit.pages) else { return 1 };
        let is_base = matches!(entry, PageEntry::Private(_));
        let pages = if self.rules.checksum_before_stable_tree {
            if !is_unchanged {
                return visit.pages;
            }
            match self.pages_for_zero_page(visit, is_base) {
                Some(pages) => return pages,
                None => self.pages_in_stable_tree(visit),
            }
        } else {
            match self.pages_in_stable_tree(visit) {
                Some((pages, false)) if !is_unchanged => return pages,
                Some((pages, false)) => match self.pages_for_zero_page(visit, is_base) {
                    Some(merged) => return merged.min(pages),
                    None => Some((pages, false)),
                },
                found => found,
            }
        };
        match pages {
            None => 1,
            Some((pages, true)) if is_base => pages,
            Some((_, true)) => 1,
            Some((pages, false)) => self.pages_in_unstable_tree(visit, pages, is_base),
        }
    }

    /// The number of pages that become the zero page, if the first does.
    fn pages_for_zero_page(&self, visit: &Visit, is_base: bool) -> Option<u64> {
        let merges = self.settings.use_zero_pages && visit.content == ZERO_CONTENT;
        merges.then_some(if is_base && !visit.ascends { visit.pages } else { 1 })
    }

    fn pages_in_stable_tree(&self, visit: &Visit) -> Option<(u64, bool)> {
        let contents = EntryRun {
            first: PackedEntry::pack(PageEntry::Private(visit.content)),
            ascends: visit.ascends,
            pages: visit.pages,
        };
        let tree = self.tree_number(visit.node);
        self.stable.uniform_pages(&self.memory, contents, visit.content, tree, &self.tree_settings())
    }

    fn pages_in_unstable_tree(&self, visit: &Visit, pages: u64, is_base: bool) -> u64 {
        if !visit.ascends {
            return 1;
        }
        let Some(tree) = self.unstable.get(usize::from(self.tree_number(visit.node))) else { return pages };
        match tree.uniform_pages(visit.content, pages) {
            None => 1,
            Some((pages, None)) => pages,
            Some((pages, Some(partner))) => {
                let vma = self.memory.process(partner.process()).vma_of(partner.page());
                let run = vma.expect("no page in the tree changed").run_from(partner.page());
                let merges = is_base && matches!(run.entry(), PageEntry::Private(_));
                if merges { pages.min(run.pages) } else { 1 }
            }
        }
    }
}
