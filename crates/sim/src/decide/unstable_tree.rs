//! The unstable tree: pages that did not change since the last scan, by content, built anew in each scan.
//!
//! Mirrors the tree of `unstable_tree_search_insert` (mm/ksm.c, 6.12). While no page changes during a scan, a search
//! finds a page exactly if the tree has one of its content, so an index by content and a record of all insertions
//! and removals are enough. At the first change the record gives the tree in the kernel's shape, since from then on the
//! result of a search depends on the pages that it passes.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::ksmd::ItemId;
use super::memory::Content;
use super::red_black_tree::{ChildSide, NodeId, RedBlackTree};

/// A hash of one 32-bit number, by a multiplication (Fibonacci hashing, Knuth, TAOCP volume 3, section 6.4).
#[derive(Clone, Copy, Debug, Default)]
struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u32(byte.into()));
    }

    fn write_u32(&mut self, number: u32) {
        self.0 = (self.0 ^ u64::from(number)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 ^= self.0 >> 32;
    }
}

type NumberMap<V> = HashMap<u32, V, BuildHasherDefault<NumberHasher>>;

/// A change of the tree during a scan.
#[derive(Clone, Copy, Debug)]
enum Change {
    Insert(ItemId, Content),
    Remove(ItemId),
}

/// The tree in the kernel's shape.
#[derive(Clone, Debug, Default)]
struct ShapedTree {
    tree: RedBlackTree<ItemId>,
    nodes: NumberMap<NodeId>,
}

/// The unstable tree of a scan.
#[derive(Clone, Debug, Default)]
pub(crate) struct UnstableTree {
    by_content: NumberMap<ItemId>,
    record: Vec<Change>,
    shaped: Option<ShapedTree>,
}

/// What a search found.
pub(crate) enum Search {
    /// A page of this content.
    Found(ItemId),
    /// No page: the place for a new one.
    Missing(Option<(NodeId, ChildSide)>),
    /// A page that is gone: the search gives up.
    Lost,
}

impl UnstableTree {
    /// Begin a scan.
    pub(crate) fn clear(&mut self) {
        self.by_content.clear();
        self.record.clear();
        self.shaped = None;
    }

    /// A page changes during the scan: from now on searches walk the tree.
    pub(crate) fn take_shape(&mut self) {
        if self.shaped.is_some() {
            return;
        }
        let mut shaped = ShapedTree::default();
        let mut contents = NumberMap::<Content>::default();
        for change in std::mem::take(&mut self.record) {
            match change {
                Change::Insert(item, content) => {
                    let (search, _) = shaped.search(content, |other| contents.get(&other).copied());
                    let Search::Missing(parent) = search else { unreachable!("recorded contents are distinct") };
                    shaped.insert(parent, item);
                    contents.insert(item, content);
                }
                Change::Remove(item) => shaped.remove(item),
            }
        }
        self.shaped = Some(shaped);
    }

    /// Search a content, with the contents that pages have now. Returns also the number of pages compared, which is an
    /// estimate, the depth of a full tree, while no page changed during the scan.
    pub(crate) fn search(&self, content: Content, content_of: impl Fn(ItemId) -> Option<Content>) -> (Search, u64) {
        if let Some(shaped) = &self.shaped {
            return shaped.search(content, content_of);
        }
        let depth = (self.by_content.len() + 1).ilog2().into();
        let found = self.by_content.get(&content);
        (found.map_or(Search::Missing(None), |&item| Search::Found(item)), depth)
    }

    /// Insert a page where a search ended.
    pub(crate) fn insert(&mut self, parent: Option<(NodeId, ChildSide)>, item: ItemId, content: Content) {
        match &mut self.shaped {
            Some(shaped) => shaped.insert(parent, item),
            None => {
                self.by_content.insert(content, item);
                self.record.push(Change::Insert(item, content));
            }
        }
    }

    /// Remove a page that was inserted with this content.
    pub(crate) fn remove(&mut self, item: ItemId, content: Content) {
        match &mut self.shaped {
            Some(shaped) => shaped.remove(item),
            None => {
                self.by_content.remove(&content);
                self.record.push(Change::Remove(item));
            }
        }
    }
}

impl ShapedTree {
    fn search(&self, content: Content, content_of: impl Fn(ItemId) -> Option<Content>) -> (Search, u64) {
        let (mut next, mut parent, mut compared) = (self.tree.root(), None, 0);
        while let Some(node) = next {
            let item = self.tree.value(node);
            let Some(other) = content_of(item) else { return (Search::Lost, compared) };
            compared += 1;
            let side = match content.cmp(&other) {
                Ordering::Less => ChildSide::Left,
                Ordering::Greater => ChildSide::Right,
                Ordering::Equal => return (Search::Found(item), compared),
            };
            parent = Some((node, side));
            next = self.tree.child(node, side);
        }
        (Search::Missing(parent), compared)
    }

    fn insert(&mut self, parent: Option<(NodeId, ChildSide)>, item: ItemId) {
        self.nodes.insert(item, self.tree.insert(parent, item));
    }

    fn remove(&mut self, item: ItemId) {
        let node = self.nodes.remove(&item).expect("the page is in the tree");
        self.tree.remove(node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Insert a page of a content, or remove the page that has it. Pages are numbered by their content.
    fn toggle(tree: &mut UnstableTree, content: Content) {
        match tree.search(content, Some).0 {
            Search::Found(item) => tree.remove(item, content),
            Search::Missing(parent) => tree.insert(parent, content, content),
            Search::Lost => unreachable!("no page is gone"),
        }
    }

    fn nodes(tree: &UnstableTree) -> Vec<(NodeId, ItemId, Option<NodeId>, Option<NodeId>)> {
        let shaped = tree.shaped.as_ref().unwrap();
        let mut nodes: Vec<_> = shaped
            .nodes
            .iter()
            .map(|(&item, &node)| {
                (node, item, shaped.tree.child(node, ChildSide::Left), shaped.tree.child(node, ChildSide::Right))
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
        let content_of = |item| (item != 3).then_some(item);
        assert!(matches!(tree.search(1, content_of).0, Search::Lost));
        assert!(matches!(tree.search(8, content_of), (Search::Found(8), 2)));
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
    }
}
