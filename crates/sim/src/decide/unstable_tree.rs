//! The unstable tree: pages that did not change since the last scan, by content, built anew in each scan.
//!
//! Mirrors the tree of `unstable_tree_search_insert` (mm/ksm.c, 6.12). While no page of the tree changes during a scan,
//! a search finds a page exactly if the tree has one of its content, so an index by content and a record of all
//! insertions and removals are enough; in both, neighboring pages with ascending contents share an entry. At the first
//! change the record gives the tree in the kernel's shape, since from then on the result of a search depends on the
//! pages that it passes. A tree that is an index only has no record, and pages that change leave it at once.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;

use super::memory::{Content, PageKey};
use super::red_black_tree::{ChildSide, NodeId, RedBlackTree};

/// A hash of one number, by a multiplication (Fibonacci hashing, Knuth, TAOCP volume 3, section 6.4).
#[derive(Clone, Copy, Debug, Default)]
struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(byte.into()));
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 ^= self.0 >> 32;
    }
}

type PageMap<V> = HashMap<PageKey, V, BuildHasherDefault<NumberHasher>>;

/// Neighboring pages with ascending contents.
#[derive(Clone, Copy, Debug)]
struct PageRun {
    first: PageKey,
    pages: u32,
}

/// A change of the tree during a scan.
#[derive(Clone, Copy, Debug)]
enum Change {
    Insert { run: PageRun, content: Content },
    Remove { run: PageRun },
}

/// The tree in the kernel's shape.
#[derive(Clone, Debug, Default)]
struct ShapedTree {
    tree: RedBlackTree<PageKey>,
    nodes: PageMap<NodeId>,
}

/// The unstable tree of a scan.
#[derive(Clone, Debug, Default)]
pub(crate) struct UnstableTree {
    /// Runs by their first content.
    by_content: BTreeMap<Content, PageRun>,
    /// Pages in the index.
    len: u64,
    is_index: bool,
    record: Vec<Change>,
    shaped: Option<ShapedTree>,
}

/// What a search found.
pub(crate) enum Search {
    /// A page of this content.
    Found(PageKey),
    /// No page: the place for a new one.
    Missing(Option<(NodeId, ChildSide)>),
    /// A page that is gone: the search gives up.
    Lost,
}

impl UnstableTree {
    /// An empty tree, with the kernel's shape or as an index only.
    pub(crate) fn new(is_index: bool) -> Self {
        Self { is_index, ..Self::default() }
    }

    /// Begin a scan.
    pub(crate) fn clear(&mut self) {
        *self = Self::new(self.is_index);
    }

    /// A page changes during the scan: from now on searches walk the tree.
    pub(crate) fn take_shape(&mut self) {
        if self.shaped.is_some() {
            return;
        }
        let mut shaped = ShapedTree::default();
        let mut contents = PageMap::<Content>::default();
        let pages_of = |run: PageRun| (0..run.pages).map(move |page| (page, run.first.plus(page.into())));
        for change in std::mem::take(&mut self.record) {
            match change {
                Change::Insert { run, content } => {
                    for (page, key) in pages_of(run) {
                        let content = content + page;
                        let (search, _) = shaped.search(content, |other| contents.get(&other).copied());
                        let Search::Missing(parent) = search else { unreachable!("recorded contents are distinct") };
                        shaped.insert(parent, key);
                        contents.insert(key, content);
                    }
                }
                Change::Remove { run } => pages_of(run).for_each(|(_, key)| shaped.remove(key)),
            }
        }
        self.by_content.clear();
        self.shaped = Some(shaped);
    }

    /// How many of the pages with ascending contents from this one on a search treats as the first: none is in the
    /// tree, or neighboring pages are. Returns also the first page found. `None` in a tree that has taken shape.
    pub(crate) fn uniform_pages(&self, content: Content, pages: u64) -> Option<(u64, Option<PageKey>)> {
        if self.shaped.is_some() {
            return None;
        }
        if let Some((found, left)) = self.indexed(content) {
            return Some((pages.min(left.into()), Some(found)));
        }
        let next = self.by_content.range(content..).next().map_or(u64::MAX, |(&next, _)| u64::from(next - content));
        Some((pages.min(next), None))
    }

    /// The page of a content in the index, and how many pages its run has from there on.
    fn indexed(&self, content: Content) -> Option<(PageKey, u32)> {
        let (&first, run) = self.by_content.range(..=content).next_back()?;
        let offset = content - first;
        (offset < run.pages).then(|| (run.first.plus(offset.into()), run.pages - offset))
    }

    /// Search the contents from `content` on of one or more pages that are treated alike, with the contents that pages
    /// have now. Returns also the number of pages compared, which is an estimate, the depth of a full tree that grows by
    /// these pages, while no page changed during the scan.
    pub(crate) fn search(
        &self,
        content: Content,
        pages: u64,
        content_of: impl Fn(PageKey) -> Option<Content>,
    ) -> (Search, u64) {
        if let Some(shaped) = &self.shaped {
            return shaped.search(content, content_of);
        }
        match self.indexed(content) {
            // Each page found leaves the tree.
            Some((found, _)) => (Search::Found(found), sum_of_depths(self.len + 1 - pages, pages)),
            None => (Search::Missing(None), sum_of_depths(self.len, pages)),
        }
    }

    /// Insert pages with ascending contents where a search ended.
    pub(crate) fn insert(&mut self, parent: Option<(NodeId, ChildSide)>, key: PageKey, pages: u64, content: Content) {
        if let Some(shaped) = &mut self.shaped {
            shaped.insert(parent, key);
            return;
        }
        let run = PageRun { first: key, pages: u32::try_from(pages).expect("a run has fewer than 2^32 pages") };
        self.len += pages;
        match self.by_content.range_mut(..content).next_back() {
            Some((&first, before)) if before.is_continued_by(first, run, content) => before.pages += run.pages,
            _ => {
                self.by_content.insert(content, run);
            }
        }
        if self.is_index {
            return;
        }
        match self.record.last_mut() {
            Some(Change::Insert { run: last, content: first }) if last.is_continued_by(*first, run, content) => {
                last.pages += run.pages;
            }
            _ => self.record.push(Change::Insert { run, content }),
        }
    }

    /// Remove pages that were inserted with ascending contents from this one on. Some may have left an index before.
    pub(crate) fn remove(&mut self, key: PageKey, pages: u64, content: Content) {
        if let Some(shaped) = &mut self.shaped {
            (0..pages).for_each(|page| shaped.remove(key.plus(page)));
            return;
        }
        let run = PageRun { first: key, pages: u32::try_from(pages).expect("a run has fewer than 2^32 pages") };
        let before = self.len;
        self.remove_from_index(run, content);
        if !self.is_index {
            assert_eq!(before - self.len, pages, "the pages are in the tree");
            self.record.push(Change::Remove { run });
        }
    }

    /// Remove those of the pages that are in the index.
    fn remove_from_index(&mut self, run: PageRun, content: Content) {
        let end = content + run.pages;
        let mut next = content;
        while next < end {
            let before = self.by_content.range(..=next).next_back();
            let Some((&first, &found)) = before.filter(|&(&first, found)| next - first < found.pages) else {
                next = self.by_content.range(next..).next().map_or(end, |(&first, _)| first);
                continue;
            };
            let offset = next - first;
            let removed = (end - next).min(found.pages - offset);
            if found.first.plus(offset.into()) == run.first.plus((next - content).into()) {
                self.cut(first, found, offset..offset + removed);
            }
            next += removed;
        }
    }

    /// Remove pages from a run of the index.
    fn cut(&mut self, first: Content, run: PageRun, removed: Range<u32>) {
        self.len -= u64::from(removed.end - removed.start);
        if removed.start == 0 {
            self.by_content.remove(&first);
        } else {
            self.by_content.insert(first, PageRun { pages: removed.start, ..run });
        }
        if removed.end < run.pages {
            let rest = PageRun { first: run.first.plus(removed.end.into()), pages: run.pages - removed.end };
            self.by_content.insert(first + removed.end, rest);
        }
    }
}

impl PageRun {
    /// Whether another run follows in pages and in contents.
    fn is_continued_by(self, content: Content, next: Self, next_content: Content) -> bool {
        self.first.plus(self.pages.into()) == next.first
            && u64::from(content) + u64::from(self.pages) == u64::from(next_content)
            && self.pages.checked_add(next.pages).is_some()
    }
}

/// The sum of the depths of full trees with `len`, `len + 1` and further nodes, for this many trees.
fn sum_of_depths(len: u64, trees: u64) -> u64 {
    let (mut next, end) = (len + 1, len + 1 + trees);
    let mut sum = 0;
    while next < end {
        let depth = next.ilog2();
        let deeper = end.min(1 << (depth + 1));
        sum += u64::from(depth) * (deeper - next);
        next = deeper;
    }
    sum
}

impl ShapedTree {
    fn search(&self, content: Content, content_of: impl Fn(PageKey) -> Option<Content>) -> (Search, u64) {
        let (mut next, mut parent, mut compared) = (self.tree.root(), None, 0);
        while let Some(node) = next {
            let key = self.tree.value(node);
            let Some(other) = content_of(key) else { return (Search::Lost, compared) };
            compared += 1;
            let side = match content.cmp(&other) {
                Ordering::Less => ChildSide::Left,
                Ordering::Greater => ChildSide::Right,
                Ordering::Equal => return (Search::Found(key), compared),
            };
            parent = Some((node, side));
            next = self.tree.child(node, side);
        }
        (Search::Missing(parent), compared)
    }

    fn insert(&mut self, parent: Option<(NodeId, ChildSide)>, key: PageKey) {
        self.nodes.insert(key, self.tree.insert(parent, key));
    }

    fn remove(&mut self, key: PageKey) {
        let node = self.nodes.remove(&key).expect("the page is in the tree");
        self.tree.remove(node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::memory::SimulatedProcessId;
    use proptest::prelude::*;

    fn key(page: Content) -> PageKey {
        PageKey::new(SimulatedProcessId(1), page.into())
    }

    fn content_of(key: PageKey) -> Option<Content> {
        Some(key.page() as Content)
    }

    /// Insert a page of a content, or remove the page that has it. Pages are numbered by their content.
    fn toggle(tree: &mut UnstableTree, content: Content) {
        match tree.search(content, 1, content_of).0 {
            Search::Found(found) => tree.remove(found, 1, content),
            Search::Missing(parent) => tree.insert(parent, key(content), 1, content),
            Search::Lost => unreachable!("no page is gone"),
        }
    }

    fn nodes(tree: &UnstableTree) -> Vec<(NodeId, PageKey, Option<NodeId>, Option<NodeId>)> {
        let shaped = tree.shaped.as_ref().unwrap();
        let mut nodes: Vec<_> = shaped
            .nodes
            .iter()
            .map(|(&key, &node)| {
                (node, key, shaped.tree.child(node, ChildSide::Left), shaped.tree.child(node, ChildSide::Right))
            })
            .collect();
        nodes.sort_unstable();
        nodes
    }

    #[test]
    fn a_search_that_meets_a_page_that_is_gone_gives_up() {
        let mut tree = UnstableTree::default();
        [5, 3, 8].into_iter().for_each(|content| toggle(&mut tree, content));
        tree.take_shape();
        let content_of = |found| content_of(found).filter(|&content| content != 3);
        assert!(matches!(tree.search(1, 1, content_of).0, Search::Lost));
        let (search, compared) = tree.search(8, 1, content_of);
        assert!(matches!(search, Search::Found(found) if found == key(8)));
        assert_eq!(compared, 2);
    }

    #[test]
    fn depths_add_up() {
        let expected: u64 = (7_u64..20).map(|len| u64::from((len + 1).ilog2())).sum();
        assert_eq!(sum_of_depths(7, 13), expected);
        assert_eq!(sum_of_depths(0, 1), 0);
    }

    proptest! {
        #[test]
        fn the_shape_does_not_depend_on_when_it_is_taken(
            contents in prop::collection::vec(0_u32..40, 1..120),
            moment in 0_usize..120,
        ) {
            let (mut early, mut late) = (UnstableTree::default(), UnstableTree::default());
            early.take_shape();
            for (number, &content) in contents.iter().enumerate() {
                if number == moment {
                    late.take_shape();
                }
                toggle(&mut early, content);
                toggle(&mut late, content);
            }
            late.take_shape();
            prop_assert_eq!(nodes(&early), nodes(&late));
        }

        #[test]
        fn runs_give_the_tree_of_their_pages(
            steps in prop::collection::vec((0_u32..60, 1_u64..20), 1..40),
        ) {
            let (mut pages, mut runs) = (UnstableTree::default(), UnstableTree::default());
            pages.take_shape();
            for (content, count) in steps {
                let (count, found) = runs.uniform_pages(content, count).unwrap();
                match found {
                    Some(found) => {
                        prop_assert_eq!(found, key(content));
                        runs.remove(found, count, content);
                    }
                    None => runs.insert(None, key(content), count, content),
                }
                (content..content + count as Content).for_each(|content| toggle(&mut pages, content));
            }
            prop_assert_eq!(runs.len, runs.by_content.values().map(|run| u64::from(run.pages)).sum::<u64>());
            runs.take_shape();
            prop_assert_eq!(nodes(&pages), nodes(&runs));
        }
    }
}
