//! The metadata of scanned pages, as runs.
//!
//! Neighboring pages with the same history share a record: the same age and skips, equal or ascending contents at the
//! last visit, and the same tree, there with equal or ascending stable nodes. A page with a history of its own has a
//! record of its own. Changes of memory do not touch the records: as in the kernel, the next visit compares.

use std::collections::BTreeMap;
use std::ops::Range;

use super::super::memory::Content;
use super::super::stable_tree::StableId;

/// The tree that holds a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Link {
    Unlinked,
    /// In the unstable tree of a scan.
    Unstable {
        scan: u32,
        tree: u8,
    },
    Stable(StableId),
}

/// No content is as large.
const NO_CONTENT: Content = Content::MAX;

/// The metadata (`struct ksm_rmap_item`) of neighboring pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ItemRun {
    pub(super) pages: u32,
    content: Content,
    content_ascends: bool,
    /// Whether the numbers of stable nodes grow by one from page to page.
    pub(super) link_ascends: bool,
    age: u8,
    remaining_skips: u8,
    pub(super) link: Link,
}

impl ItemRun {
    /// Pages that were never visited.
    pub(super) fn new(pages: u64) -> Self {
        Self {
            pages: run_pages(pages),
            content: NO_CONTENT,
            content_ascends: false,
            link_ascends: false,
            age: 0,
            remaining_skips: 0,
            link: Link::Unlinked,
        }
    }

    /// The content of the first page at its last visit; `None` before the first visit (`oldchecksum` 0).
    pub(super) fn last_content(&self) -> Option<Content> {
        (self.content != NO_CONTENT).then_some(self.content)
    }

    pub(super) fn remember(&mut self, content: Content, ascends: bool) {
        (self.content, self.content_ascends) = (content, ascends);
    }

    /// Forget the last visit and the age.
    pub(super) fn forget_history(&mut self) {
        (self.content, self.content_ascends) = (NO_CONTENT, false);
        (self.age, self.remaining_skips) = (0, 0);
    }

    pub(super) fn set_link(&mut self, link: Link, ascends: bool) {
        (self.link, self.link_ascends) = (link, ascends && matches!(link, Link::Stable(_)));
    }

    /// Whether these contents are all those of the last visit, or none is; `None` if some are.
    pub(super) fn compare(&self, content: Content, ascends: bool, pages: u64) -> Option<bool> {
        if pages == 1 || self.content_ascends == ascends && self.content != NO_CONTENT {
            Some(self.content == content)
        } else {
            (self.content == NO_CONTENT).then_some(false)
        }
    }

    /// The stable node of a page.
    pub(super) fn stable_node(&self, page: u64) -> Option<StableId> {
        let Link::Stable(first) = self.link else { return None };
        Some(if self.link_ascends { first + page as StableId } else { first })
    }

    /// Count a visit of pages that are not merged. Returns whether smart scan leaves it out (`should_skip_rmap_item`,
    /// since 6.7).
    pub(super) fn skips(&mut self) -> bool {
        let age = self.age;
        self.age = age.saturating_add(1);
        if age < 3 {
            return false;
        }
        if self.remaining_skips == 0 {
            self.remaining_skips = skips_at_age(age);
            return false;
        }
        self.remaining_skips -= 1;
        true
    }

    /// The run without its first pages.
    fn after(&self, pages: u64) -> Self {
        let mut rest = Self { pages: self.pages - run_pages(pages), ..*self };
        if self.content_ascends && self.content != NO_CONTENT {
            rest.content += pages as Content;
        }
        if let Link::Stable(node) = &mut rest.link
            && self.link_ascends
        {
            *node += pages as StableId;
        }
        rest
    }

    /// This run and the one that follows, if they are one run.
    fn joined(&self, next: &Self) -> Option<Self> {
        let alike = self.age == next.age && self.remaining_skips == next.remaining_skips;
        let pages = self.pages.checked_add(next.pages).filter(|_| alike)?;
        [(false, false), (true, false), (false, true), (true, true)].into_iter().find_map(
            |(content_ascends, link_ascends)| {
                let is_kept = |run: &Self| {
                    let content = run.content_ascends == content_ascends || run.content == NO_CONTENT;
                    let link = run.link_ascends == link_ascends || !matches!(run.link, Link::Stable(_));
                    run.pages == 1 || content && link
                };
                let all = Self { pages, content_ascends, link_ascends, ..*self };
                let expected = all.after(self.pages.into());
                let continues = expected.content == next.content && expected.link == next.link;
                (continues && is_kept(self) && is_kept(next)).then_some(all)
            },
        )
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

fn run_pages(pages: u64) -> u32 {
    u32::try_from(pages).expect("a run has fewer than 2^32 pages")
}

/// The metadata of a process, by page.
#[derive(Clone, Debug, Default)]
pub(super) struct ItemRuns {
    runs: BTreeMap<u64, ItemRun>,
}

impl ItemRuns {
    pub(super) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// All runs with their first page.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &ItemRun)> {
        self.runs.iter().map(|(&page, run)| (page, run))
    }

    /// The metadata of a page and of the pages behind it with the same history.
    pub(super) fn run_from(&self, page: u64) -> Option<ItemRun> {
        let (&start, run) = self.runs.range(..=page).next_back()?;
        let offset = page - start;
        (offset < run.pages.into()).then(|| run.after(offset))
    }

    /// Whether some page of a range has metadata that fulfills a condition.
    pub(super) fn any_in(&self, range: Range<u64>, mut condition: impl FnMut(&ItemRun) -> bool) -> bool {
        let before = self.runs.range(..range.start).next_back();
        let before = before.filter(|&(&start, run)| start + u64::from(run.pages) > range.start);
        before.into_iter().chain(self.runs.range(range)).any(|(_, run)| condition(run))
    }

    /// The metadata of the pages of a range.
    pub(super) fn runs_in(&self, range: Range<u64>) -> Vec<(u64, ItemRun)> {
        let mut runs = Vec::new();
        let mut page = range.start;
        while let Some(start) = self.next_page(page).filter(|&start| start < range.end) {
            let mut run = self.run_from(start).expect("the page has metadata");
            run.pages = run.pages.min(u32::try_from(range.end - start).unwrap_or(u32::MAX));
            runs.push((start, run));
            page = start + u64::from(run.pages);
        }
        runs
    }

    /// The first page with metadata from a page on.
    pub(super) fn next_page(&self, page: u64) -> Option<u64> {
        if self.run_from(page).is_some() {
            return Some(page);
        }
        self.runs.range(page..).next().map(|(&page, _)| page)
    }

    fn split(&mut self, page: u64) {
        let Some((&start, run)) = self.runs.range_mut(..page).next_back() else { return };
        let offset = page - start;
        if offset < run.pages.into() {
            let upper = run.after(offset);
            run.pages = run_pages(offset);
            self.runs.insert(page, upper);
        }
    }

    /// Take the metadata of a range.
    pub(super) fn take(&mut self, range: Range<u64>) -> Vec<(u64, ItemRun)> {
        self.split(range.start);
        self.split(range.end);
        let taken: Vec<_> = self.runs.range(range).map(|(&page, &run)| (page, run)).collect();
        taken.iter().for_each(|(page, _)| {
            self.runs.remove(page);
        });
        taken
    }

    /// Set the metadata of pages that all have some, or all have none.
    pub(super) fn set(&mut self, page: u64, run: ItemRun) {
        if let Some(present) = self.runs.get_mut(&page)
            && present.pages == run.pages
        {
            *present = run;
            return;
        }
        let end = page + u64::from(run.pages);
        self.split(page);
        self.split(end);
        while let Some((&stale, _)) = self.runs.range(page..end).next_back() {
            self.runs.remove(&stale);
        }
        self.runs.insert(page, run);
    }

    /// Change the metadata of pages that have some; `change` gets each run in turn.
    pub(super) fn update(&mut self, range: Range<u64>, mut change: impl FnMut(u64, &mut ItemRun)) {
        self.split(range.start);
        self.split(range.end);
        self.runs.range_mut(range).for_each(|(&page, run)| change(page, run));
    }

    /// Join the run that begins at a page with the one before it.
    pub(super) fn join_at(&mut self, page: u64) {
        let Some(run) = self.runs.get(&page) else { return };
        let Some((&start, before)) = self.runs.range(..page).next_back() else { return };
        if start + u64::from(before.pages) != page {
            return;
        }
        if let Some(joined) = before.joined(run) {
            self.runs.remove(&page);
            self.runs.insert(start, joined);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_with_one_history_join_and_split_again() {
        let mut items = ItemRuns::default();
        for page in 0..4_u64 {
            let mut run = ItemRun::new(1);
            run.remember(100 + page as Content, false);
            run.set_link(Link::Stable(7 + page as StableId), true);
            items.set(page, run);
            items.join_at(page);
        }
        assert_eq!(items.iter().count(), 1);
        let rest = items.run_from(2).unwrap();
        assert_eq!((rest.pages, rest.last_content(), rest.stable_node(1)), (2, Some(102), Some(10)));
        items.update(1..2, |_, run| run.set_link(Link::Unlinked, false));
        assert_eq!(items.iter().map(|(page, run)| (page, run.pages)).collect::<Vec<_>>(), [(0, 1), (1, 1), (2, 2)]);
        assert_eq!(items.run_from(3).unwrap().link, Link::Stable(10));
        let taken = items.take(1..3);
        assert_eq!(taken.iter().map(|&(page, run)| (page, run.pages)).collect::<Vec<_>>(), [(1, 1), (2, 1)]);
        assert_eq!(items.next_page(1), Some(3));
    }

    #[test]
    fn runs_with_different_histories_do_not_join() {
        let mut items = ItemRuns::default();
        let mut run = ItemRun::new(2);
        run.remember(100, true);
        items.set(0, run);
        run.remember(102, false);
        items.set(2, run);
        items.join_at(2);
        run.remember(102, true);
        assert!(!run.skips());
        items.set(4, run);
        items.join_at(4);
        assert_eq!(items.iter().count(), 3);
    }

    #[test]
    fn contents_that_partly_changed_are_not_compared_at_once() {
        let mut run = ItemRun::new(3);
        assert_eq!(run.compare(5, true, 3), Some(false));
        run.remember(5, true);
        assert_eq!((run.compare(5, true, 3), run.compare(6, true, 3)), (Some(true), Some(false)));
        assert_eq!((run.compare(5, false, 3), run.compare(5, false, 1)), (None, Some(true)));
    }
}
