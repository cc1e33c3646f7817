//! The stable tree: merged frames by content, with chains of duplicates.
//!
//! Mirrors `stable_tree_search`, `stable_tree_insert`, `stable_node_dup` and `remove_node_from_stable_tree` (mm/ksm.c,
//! 6.1 and 6.12). A walk has side effects: it removes nodes whose frame is freed, drops chains and reorders them. So
//! the tree keeps the kernel's shape.
//!
//! Limits: frames never migrate between NUMA nodes, so the list of migrated nodes is always empty.

use std::cmp::Ordering;

use super::counters::{Tally, WorkCounts};
use super::ksmd::ItemId;
use super::memory::{Content, FrameId, Memory};
use super::red_black_tree::{ChildSide, NodeId, RedBlackTree};
use super::rules::KsmRules;

/// A stable node: a merged frame and its known mappings.
pub type StableId = u32;

/// A chain.
type ChainId = u32;

/// Where a stable node is linked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Tree(NodeId),
    Chain(ChainId),
}

/// What a tree node holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entry {
    Single(StableId),
    Chain(ChainId),
}

#[derive(Clone, Debug)]
struct StableNode {
    frame: FrameId,
    items: Vec<ItemId>,
    place: Place,
    node: u8,
}

#[derive(Clone, Debug)]
struct Chain {
    /// The first is the one at the head of the kernel's list.
    duplicates: Vec<StableId>,
    pruned_at_ms: u64,
    tree_node: NodeId,
    node: u8,
}

/// Settings that the tree depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TreeSettings {
    pub(crate) rules: KsmRules,
    pub(crate) max_page_sharing: usize,
    pub(crate) prune_ms: u64,
    pub(crate) now_ms: u64,
}

/// What a walk found at a node.
enum Resolved {
    /// Something was removed: walk again from the root.
    Restart,
    /// The duplicate to merge with, if there is one with room or any, and the entry after changes.
    Found { duplicate: Option<StableId>, any: StableId },
}

/// Where a walk for a content ended.
enum WalkEnd {
    /// At this leaf; `None` in an empty tree.
    Leaf(Option<(NodeId, ChildSide)>),
    /// At a node of this content.
    Equal { node: NodeId, duplicate: Option<StableId> },
}

/// The trees: one, or one for each NUMA node.
#[derive(Clone, Debug, Default)]
pub struct StableTree {
    trees: Vec<RedBlackTree<Entry>>,
    nodes: Vec<Option<StableNode>>,
    unused_nodes: Vec<StableId>,
    chains: Vec<Option<Chain>>,
    unused_chains: Vec<ChainId>,
}

impl StableTree {
    fn stable(&self, id: StableId) -> &StableNode {
        self.nodes[id as usize].as_ref().expect("the stable node exists")
    }

    fn stable_mut(&mut self, id: StableId) -> &mut StableNode {
        self.nodes[id as usize].as_mut().expect("the stable node exists")
    }

    fn chain(&self, id: ChainId) -> &Chain {
        self.chains[id as usize].as_ref().expect("the chain exists")
    }

    fn chain_mut(&mut self, id: ChainId) -> &mut Chain {
        self.chains[id as usize].as_mut().expect("the chain exists")
    }

    fn tree_mut(&mut self, node: u8) -> &mut RedBlackTree<Entry> {
        let index = usize::from(node);
        if self.trees.len() <= index {
            self.trees.resize_with(index + 1, RedBlackTree::default);
        }
        &mut self.trees[index]
    }

    /// The frame of a stable node.
    #[must_use]
    pub fn frame(&self, id: StableId) -> FrameId {
        self.stable(id).frame
    }

    /// The known mappings of a stable node.
    #[must_use]
    pub fn items(&self, id: StableId) -> &[ItemId] {
        &self.stable(id).items
    }

    /// All stable nodes.
    pub fn stable_ids(&self) -> impl Iterator<Item = StableId> + '_ {
        (0..).zip(&self.nodes).filter(|(_, node)| node.is_some()).map(|(id, _)| id)
    }

    /// Whether a frame was freed: its node is removed by the next walk that meets it (`ksm_get_folio`).
    pub(crate) fn is_stale(&self, memory: &Memory, id: StableId) -> bool {
        memory.frame(self.stable(id).frame).mappings == 0
    }

    /// `__is_page_sharing_candidate`: mapped by a known page, and with room for `more + 1` further ones.
    fn has_room(&self, id: StableId, more: usize, settings: &TreeSettings) -> bool {
        let len = self.stable(id).items.len();
        len > 0 && len + more < settings.max_page_sharing
    }

    /// Link a page to a node (`stable_tree_append`).
    pub(crate) fn append(&mut self, id: StableId, item: ItemId, tally: &mut Tally) {
        let items = &mut self.stable_mut(id).items;
        items.push(item);
        if items.len() > 1 {
            tally.pages_sharing += 1;
        } else {
            tally.pages_shared += 1;
        }
    }

    /// Unlink a page from a node whose frame is in use (`remove_rmap_item_from_tree`).
    pub(crate) fn unlink(&mut self, id: StableId, item: ItemId, tally: &mut Tally) {
        let items = &mut self.stable_mut(id).items;
        let position = items.iter().position(|&linked| linked == item).expect("the page is linked");
        items.swap_remove(position);
        if items.is_empty() {
            tally.pages_shared -= 1;
        } else {
            tally.pages_sharing -= 1;
        }
    }

    /// Remove a node (`remove_node_from_stable_tree`). Returns the pages that were linked.
    #[must_use]
    pub(crate) fn remove(&mut self, memory: &mut Memory, id: StableId, tally: &mut Tally) -> Vec<ItemId> {
        let stable = self.nodes[id as usize].take().expect("the stable node exists");
        self.unused_nodes.push(id);
        if !stable.items.is_empty() {
            tally.pages_shared -= 1;
            tally.pages_sharing -= stable.items.len() as u64 - 1;
        }
        match stable.place {
            Place::Tree(node) => self.tree_mut(stable.node).remove(node),
            Place::Chain(chain) => {
                self.chain_mut(chain).duplicates.retain(|&duplicate| duplicate != id);
                tally.dups -= 1;
            }
        }
        memory.forget_frame(stable.frame);
        stable.items
    }

    fn free_chain(&mut self, id: ChainId, tally: &mut Tally) {
        let chain = self.chains[id as usize].take().expect("the chain exists");
        self.unused_chains.push(id);
        self.tree_mut(chain.node).remove(chain.tree_node);
        tally.chains -= 1;
    }

    /// Remove all nodes whose frames are freed and all chains without duplicates (`remove_all_stable_nodes`). Returns
    /// the pages that were linked.
    #[must_use]
    pub(crate) fn remove_all_unused(&mut self, memory: &mut Memory, tally: &mut Tally) -> Vec<ItemId> {
        let stale: Vec<_> = self.stable_ids().filter(|&id| self.is_stale(memory, id)).collect();
        let mut unlinked = Vec::new();
        for id in stale {
            unlinked.extend(self.remove(memory, id, tally));
        }
        for id in 0..self.chains.len() {
            if self.chains[id].as_ref().is_some_and(|chain| chain.duplicates.is_empty()) {
                self.free_chain(u32::try_from(id).expect("numbers of chains are 32-bit"), tally);
            }
        }
        unlinked
    }

    /// Find a node to merge a page with (`stable_tree_search`). Pages of nodes that the walk removed go to `unlinked`.
    pub(crate) fn search(
        &mut self,
        memory: &mut Memory,
        content: Content,
        node: u8,
        walk: &mut Walk<'_>,
    ) -> Option<StableId> {
        match self.walk(memory, content, node, true, walk) {
            WalkEnd::Leaf(_) => None,
            WalkEnd::Equal { duplicate, .. } => duplicate.filter(|&id| self.has_room(id, 0, walk.settings)),
        }
    }

    /// Add a node for a frame that was just merged (`stable_tree_insert`).
    pub(crate) fn insert(&mut self, memory: &mut Memory, frame: FrameId, node: u8, walk: &mut Walk<'_>) -> StableId {
        let content = memory.frame(frame).content;
        let end = self.walk(memory, content, node, false, walk);
        let id = self.unused_nodes.pop().unwrap_or_else(|| {
            self.nodes.push(None);
            StableId::try_from(self.nodes.len() - 1).expect("fewer than 2^32 stable nodes")
        });
        let place = match end {
            WalkEnd::Leaf(parent) => Place::Tree(self.tree_mut(node).insert(parent, Entry::Single(id))),
            WalkEnd::Equal { node: tree_node, .. } => {
                let chain = match self.tree_mut(node).value(tree_node) {
                    Entry::Chain(chain) => chain,
                    Entry::Single(first) => self.start_chain(first, tree_node, node, walk),
                };
                self.chain_mut(chain).duplicates.insert(0, id);
                walk.tally.dups += 1;
                Place::Chain(chain)
            }
        };
        self.nodes[id as usize] = Some(StableNode { frame, items: Vec::new(), place, node });
        memory.frame_mut(frame).stable = Some(id);
        id
    }

    /// Put a chain in the position of a node, with the node as its first duplicate (`alloc_stable_node_chain`).
    fn start_chain(&mut self, first: StableId, tree_node: NodeId, node: u8, walk: &mut Walk<'_>) -> ChainId {
        let chain = Chain { duplicates: vec![first], pruned_at_ms: walk.settings.now_ms, tree_node, node };
        let id = self.unused_chains.pop().unwrap_or_else(|| {
            self.chains.push(None);
            ChainId::try_from(self.chains.len() - 1).expect("fewer than 2^32 chains")
        });
        self.chains[id as usize] = Some(chain);
        self.stable_mut(first).place = Place::Chain(id);
        self.tree_mut(node).replace_value(tree_node, Entry::Chain(id));
        walk.tally.chains += 1;
        walk.tally.dups += 1;
        id
    }

    fn walk(&mut self, memory: &mut Memory, content: Content, node: u8, prunes: bool, walk: &mut Walk<'_>) -> WalkEnd {
        'root: loop {
            let mut parent = None;
            let mut next = self.tree_mut(node).root();
            while let Some(tree_node) = next {
                let entry = self.tree_mut(node).value(tree_node);
                let resolved = if walk.settings.rules.search_takes_any_duplicate {
                    self.resolve(memory, entry, prunes, walk)
                } else {
                    self.resolve_before_6_11(memory, entry, prunes, walk)
                };
                let Resolved::Found { duplicate, any } = resolved else { continue 'root };
                walk.work.stable_comparisons += 1;
                let side = match content.cmp(&memory.frame(self.stable(any).frame).content) {
                    Ordering::Less => ChildSide::Left,
                    Ordering::Greater => ChildSide::Right,
                    Ordering::Equal => return WalkEnd::Equal { node: tree_node, duplicate },
                };
                parent = Some((tree_node, side));
                next = self.tree_mut(node).child(tree_node, side);
            }
            return WalkEnd::Leaf(parent);
        }
    }

    /// `ksm_get_folio`: false if the frame is freed; the node is removed then.
    fn keep_or_remove(&mut self, memory: &mut Memory, id: StableId, walk: &mut Walk<'_>) -> bool {
        if !self.is_stale(memory, id) {
            return true;
        }
        walk.unlinked.extend(self.remove(memory, id, walk.tally));
        false
    }

    /// Whether this search prunes the chain; it then is the last for some time.
    fn starts_pruning(&mut self, chain: ChainId, prunes: bool, settings: &TreeSettings) -> bool {
        let chain = self.chain_mut(chain);
        let due = prunes && settings.now_ms >= chain.pruned_at_ms + settings.prune_ms;
        if due {
            chain.pruned_at_ms = settings.now_ms;
        }
        due
    }

    /// `__stable_node_chain` and `stable_node_dup` since 6.11.
    fn resolve(&mut self, memory: &mut Memory, entry: Entry, prunes: bool, walk: &mut Walk<'_>) -> Resolved {
        let id = match entry {
            Entry::Single(id) => {
                let kept = self.keep_or_remove(memory, id, walk);
                return if kept { Resolved::Found { duplicate: Some(id), any: id } } else { Resolved::Restart };
            }
            Entry::Chain(id) => id,
        };
        let prunes = self.starts_pruning(id, prunes, walk.settings);
        let mut found: Option<(StableId, usize)> = None;
        for duplicate in self.chain(id).duplicates.clone() {
            if !self.keep_or_remove(memory, duplicate, walk) {
                continue;
            }
            let len = self.stable(duplicate).items.len();
            let is_better = found.is_none_or(|(best, best_len)| {
                self.has_room(duplicate, 0, walk.settings) && (!self.has_room(best, 0, walk.settings) || len > best_len)
            });
            if is_better {
                found = Some((duplicate, len));
                if !prunes && self.has_room(duplicate, 0, walk.settings) {
                    break;
                }
            }
        }
        let Some((found, _)) = found else {
            self.free_chain(id, walk.tally);
            return Resolved::Restart;
        };
        if self.chain(id).duplicates.len() == 1 {
            self.collapse_chain(id, found, walk.tally);
        } else {
            self.move_to_head(id, found, walk.settings);
        }
        Resolved::Found { duplicate: Some(found), any: found }
    }

    /// `stable_node_dup` and `stable_node_dup_any` before 6.11: only a duplicate with room is taken, and any other one
    /// only shows the way.
    fn resolve_before_6_11(
        &mut self,
        memory: &mut Memory,
        entry: Entry,
        prunes: bool,
        walk: &mut Walk<'_>,
    ) -> Resolved {
        let id = match entry {
            Entry::Single(id) => {
                let duplicate = self.has_room(id, 0, walk.settings).then_some(id);
                let kept = self.keep_or_remove(memory, id, walk);
                return if kept { Resolved::Found { duplicate, any: id } } else { Resolved::Restart };
            }
            Entry::Chain(id) => id,
        };
        let prunes = self.starts_pruning(id, prunes, walk.settings);
        let mut found: Option<(StableId, usize)> = None;
        let mut present = 0;
        for duplicate in self.chain(id).duplicates.clone() {
            if !self.keep_or_remove(memory, duplicate, walk) {
                continue;
            }
            present += 1;
            let len = self.stable(duplicate).items.len();
            let is_longer = found.is_none_or(|(_, best_len)| len > best_len);
            if is_longer && self.has_room(duplicate, 0, walk.settings) {
                found = Some((duplicate, len));
                if !prunes {
                    break;
                }
            }
        }
        if let Some((found, _)) = found {
            if prunes && present == 1 {
                self.collapse_chain(id, found, walk.tally);
            } else {
                self.move_to_head(id, found, walk.settings);
            }
            return Resolved::Found { duplicate: Some(found), any: found };
        }
        let Some(&any) = self.chain(id).duplicates.first() else {
            self.free_chain(id, walk.tally);
            return Resolved::Restart;
        };
        Resolved::Found { duplicate: None, any }
    }

    /// Put the only duplicate of a chain in the chain's position.
    fn collapse_chain(&mut self, id: ChainId, only: StableId, tally: &mut Tally) {
        let chain = self.chains[id as usize].take().expect("the chain exists");
        self.unused_chains.push(id);
        self.tree_mut(chain.node).replace_value(chain.tree_node, Entry::Single(only));
        self.stable_mut(only).place = Place::Tree(chain.tree_node);
        tally.chains -= 1;
        tally.dups -= 1;
    }

    /// A duplicate with room for two further pages goes to the head of its chain.
    fn move_to_head(&mut self, id: ChainId, found: StableId, settings: &TreeSettings) {
        if self.has_room(found, 1, settings) {
            let duplicates = &mut self.chain_mut(id).duplicates;
            let position = duplicates.iter().position(|&duplicate| duplicate == found).expect("it is in the chain");
            duplicates[..=position].rotate_right(1);
        }
    }
}

/// What a walk reads and changes beside the tree.
pub(crate) struct Walk<'a> {
    pub(crate) settings: &'a TreeSettings,
    pub(crate) tally: &'a mut Tally,
    pub(crate) work: &'a mut WorkCounts,
    /// Pages of nodes that the walk removed.
    pub(crate) unlinked: &'a mut Vec<ItemId>,
}
