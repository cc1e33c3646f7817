//! The stable tree: merged frames by content, with chains of duplicates.
//!
//! Mirrors `stable_tree_search`, `stable_tree_insert`, `stable_node_dup` and `remove_node_from_stable_tree` (mm/ksm.c,
//! 6.1 and 6.12). A walk has side effects: it removes nodes whose frame is freed, drops chains and reorders them. So
//! the tree keeps the kernel's shape.
//!
//! Limits: merged frames never migrate between NUMA nodes, so the list of migrated nodes is always empty.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use super::counters::{Tally, WorkCounts};
use super::entry_runs::EntryRun;
use super::memory::{Content, FrameId, Memory};
use super::red_black_tree::{ChildSide, NodeId, RedBlackTree};
use super::rules::KsmRules;

/// A stable node: a merged frame and its known mappings. It has the number of its frame.
pub type StableId = FrameId;

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
    /// Known mappings.
    linked: u32,
    place: Place,
    node: u8,
}

#[derive(Clone, Debug)]
struct Chain {
    /// The last is the one at the head of the kernel's list.
    duplicates: Vec<StableId>,
    /// Duplicates with room for a page.
    open: u32,
    pruned_at_ms: u64,
    tree_node: NodeId,
    node: u8,
    content: Content,
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
    /// The contents in each tree.
    contents: Vec<ContentSet>,
    nodes: Vec<Option<StableNode>>,
    chains: Vec<Option<Chain>>,
    unused_chains: Vec<ChainId>,
}

/// A set of contents, as ranges: the end of each by its start.
#[derive(Clone, Debug, Default)]
struct ContentSet(BTreeMap<Content, Content>);

impl ContentSet {
    fn insert(&mut self, content: Content) {
        let end = self.0.remove(&(content + 1)).unwrap_or(content + 1);
        match self.0.range_mut(..content).next_back() {
            Some((_, before)) if *before == content => *before = end,
            _ => {
                self.0.insert(content, end);
            }
        }
    }

    fn remove(&mut self, content: Content) {
        let (&start, &end) = self.0.range(..=content).next_back().expect("the content is in the set");
        if start == content {
            self.0.remove(&start);
        } else {
            self.0.insert(start, content);
        }
        if content + 1 < end {
            self.0.insert(content + 1, end);
        }
    }

    /// How many contents from this one on are missing.
    fn missing_from(&self, content: Content) -> u64 {
        let mut neighbors = self.0.range(..=content).next_back().into_iter();
        if neighbors.any(|(_, &end)| content < end) {
            return 0;
        }
        self.0.range(content..).next().map_or(u64::MAX, |(&next, _)| u64::from(next - content))
    }
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
            self.contents.resize_with(index + 1, ContentSet::default);
        }
        &mut self.trees[index]
    }

    /// The number of known mappings of a stable node; `None` if there is no such node.
    #[must_use]
    pub fn linked_pages(&self, id: StableId) -> Option<u32> {
        self.nodes.get(id as usize)?.as_ref().map(|stable| stable.linked)
    }

    /// All stable nodes.
    pub fn stable_ids(&self) -> impl Iterator<Item = StableId> + '_ {
        (0..).zip(&self.nodes).filter(|(_, node)| node.is_some()).map(|(id, _)| id)
    }

    /// Whether a frame was freed: its node is removed by the next walk that meets it (`ksm_get_folio`).
    pub(crate) fn is_stale(memory: &Memory, id: StableId) -> bool {
        memory.frame(id).mappings == 0
    }

    /// How many pages ksmd may still link to a node (`__is_page_sharing_candidate`). A node without known pages takes
    /// none.
    fn room(&self, id: StableId, max_page_sharing: usize) -> u64 {
        match self.stable(id).linked {
            0 => 0,
            linked => (max_page_sharing as u64).saturating_sub(linked.into()),
        }
    }

    /// Count a change of the pages of a node in its chain.
    fn change_linked(&mut self, id: StableId, max_page_sharing: usize, change: impl FnOnce(&mut u32)) -> u32 {
        let was_open = self.room(id, max_page_sharing) > 0;
        let stable = self.stable_mut(id);
        change(&mut stable.linked);
        let (linked, place) = (stable.linked, stable.place);
        if let Place::Chain(chain) = place {
            let is_open = self.room(id, max_page_sharing) > 0;
            let open = &mut self.chain_mut(chain).open;
            *open = *open + u32::from(is_open) - u32::from(was_open);
        }
        linked
    }

    /// Link a page to a node (`stable_tree_append`).
    pub(crate) fn append(&mut self, id: StableId, max_page_sharing: usize, tally: &mut Tally) {
        if self.change_linked(id, max_page_sharing, |linked| *linked += 1) > 1 {
            tally.pages_sharing += 1;
        } else {
            tally.pages_shared += 1;
        }
    }

    /// Unlink a page from a node whose frame is in use (`remove_rmap_item_from_tree`).
    pub(crate) fn unlink(&mut self, id: StableId, max_page_sharing: usize, tally: &mut Tally) {
        if self.change_linked(id, max_page_sharing, |linked| *linked -= 1) == 0 {
            tally.pages_shared -= 1;
        } else {
            tally.pages_sharing -= 1;
        }
    }

    /// Remove a node (`remove_node_from_stable_tree`). The caller unlinks its pages.
    pub(crate) fn remove(&mut self, memory: &mut Memory, id: StableId, max_page_sharing: usize, tally: &mut Tally) {
        let is_open = self.room(id, max_page_sharing) > 0;
        let stable = self.nodes[id as usize].take().expect("the stable node exists");
        if stable.linked > 0 {
            tally.pages_shared -= 1;
            tally.pages_sharing -= u64::from(stable.linked) - 1;
        }
        match stable.place {
            Place::Tree(node) => {
                self.tree_mut(stable.node).remove(node);
                self.contents[usize::from(stable.node)].remove(memory.frame(id).content);
            }
            Place::Chain(chain) => {
                let chain = self.chain_mut(chain);
                chain.duplicates.retain(|&duplicate| duplicate != id);
                chain.open -= u32::from(is_open);
                tally.dups -= 1;
            }
        }
        memory.forget_frame(id);
    }

    fn free_chain(&mut self, id: ChainId, tally: &mut Tally) {
        let chain = self.chains[id as usize].take().expect("the chain exists");
        self.unused_chains.push(id);
        self.tree_mut(chain.node).remove(chain.tree_node);
        self.contents[usize::from(chain.node)].remove(chain.content);
        tally.chains -= 1;
    }

    /// Remove all nodes whose frames are freed and all chains without duplicates (`remove_all_stable_nodes`). Returns
    /// the removed nodes.
    #[must_use]
    pub(crate) fn remove_all_unused(
        &mut self,
        memory: &mut Memory,
        max_page_sharing: usize,
        tally: &mut Tally,
    ) -> Vec<StableId> {
        let stale: Vec<_> = self.stable_ids().filter(|&id| Self::is_stale(memory, id)).collect();
        for &id in &stale {
            self.remove(memory, id, max_page_sharing, tally);
        }
        for id in 0..self.chains.len() {
            if self.chains[id].as_ref().is_some_and(|chain| chain.duplicates.is_empty()) {
                self.free_chain(u32::try_from(id).expect("numbers of chains are 32-bit"), tally);
            }
        }
        stale
    }

    /// Find a node to merge a page with (`stable_tree_search`). Nodes that the walk removed go to `removed`.
    pub(crate) fn search(
        &mut self,
        memory: &mut Memory,
        content: Content,
        node: u8,
        walk: &mut Walk<'_>,
    ) -> Option<StableId> {
        match self.walk(memory, content, node, true, walk) {
            WalkEnd::Leaf(_) => None,
            WalkEnd::Equal { duplicate, .. } => {
                duplicate.filter(|&id| self.room(id, walk.settings.max_page_sharing) > 0)
            }
        }
    }

    /// Add a node for a frame that was just merged (`stable_tree_insert`).
    pub(crate) fn insert(&mut self, memory: &mut Memory, frame: FrameId, node: u8, walk: &mut Walk<'_>) -> StableId {
        let content = memory.frame(frame).content;
        let end = self.walk(memory, content, node, false, walk);
        let id = frame;
        if self.nodes.len() <= id as usize {
            self.nodes.resize_with(id as usize + 1, || None);
        }
        let place = match end {
            WalkEnd::Leaf(parent) => {
                let place = Place::Tree(self.tree_mut(node).insert(parent, Entry::Single(id)));
                self.contents[usize::from(node)].insert(content);
                place
            }
            WalkEnd::Equal { node: tree_node, .. } => {
                let chain = match self.tree_mut(node).value(tree_node) {
                    Entry::Chain(chain) => chain,
                    Entry::Single(first) => self.start_chain(first, content, tree_node, node, walk),
                };
                self.chain_mut(chain).duplicates.push(id);
                walk.tally.dups += 1;
                Place::Chain(chain)
            }
        };
        self.nodes[id as usize] = Some(StableNode { linked: 0, place, node });
        memory.frame_mut(frame).is_merged = true;
        id
    }

    /// Put a chain in the position of a node, with the node as its first duplicate (`alloc_stable_node_chain`).
    fn start_chain(
        &mut self,
        first: StableId,
        content: Content,
        tree_node: NodeId,
        node: u8,
        walk: &mut Walk<'_>,
    ) -> ChainId {
        let open = u32::from(self.room(first, walk.settings.max_page_sharing) > 0);
        let chain =
            Chain { duplicates: vec![first], open, pruned_at_ms: walk.settings.now_ms, tree_node, node, content };
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
                let side = match content.cmp(&memory.frame(any).content) {
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
        if !Self::is_stale(memory, id) {
            return true;
        }
        self.remove(memory, id, walk.settings.max_page_sharing, walk.tally);
        walk.removed.push(id);
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
        let max = walk.settings.max_page_sharing;
        if let Some(head) = self.head_of_quiet_chain(memory, id, prunes, max) {
            return Resolved::Found { duplicate: Some(head), any: head };
        }
        let mut found: Option<(StableId, u32)> = None;
        for duplicate in self.chain(id).duplicates.clone().into_iter().rev() {
            if !self.keep_or_remove(memory, duplicate, walk) {
                continue;
            }
            let linked = self.stable(duplicate).linked;
            let has_room = self.room(duplicate, max) > 0;
            let is_better =
                found.is_none_or(|(best, best_linked)| has_room && (self.room(best, max) == 0 || linked > best_linked));
            if is_better {
                found = Some((duplicate, linked));
                if !prunes && has_room {
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
            self.move_to_head(id, found, max);
        }
        Resolved::Found { duplicate: Some(found), any: found }
    }

    /// The head of a chain, if a walk finds it and leaves the chain as it is: no frame is freed, there is another
    /// duplicate, and either none has room, or the head has room and is the only one or the first that a walk which
    /// does not prune meets.
    fn head_of_quiet_chain(
        &self,
        memory: &Memory,
        id: ChainId,
        prunes: bool,
        max_page_sharing: usize,
    ) -> Option<StableId> {
        let chain = self.chain(id);
        let &head = chain.duplicates.last()?;
        let has_room = || self.room(head, max_page_sharing) > 0;
        let is_quiet = match chain.open {
            0 => true,
            1 => has_room(),
            _ => !prunes && has_room(),
        };
        (is_quiet && chain.duplicates.len() > 1 && !memory.has_stale_frames()).then_some(head)
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
                let duplicate = (self.room(id, walk.settings.max_page_sharing) > 0).then_some(id);
                let kept = self.keep_or_remove(memory, id, walk);
                return if kept { Resolved::Found { duplicate, any: id } } else { Resolved::Restart };
            }
            Entry::Chain(id) => id,
        };
        let prunes = self.starts_pruning(id, prunes, walk.settings);
        let max = walk.settings.max_page_sharing;
        if let Some(head) = self.head_of_quiet_chain(memory, id, prunes, max) {
            let duplicate = (self.room(head, max) > 0).then_some(head);
            return Resolved::Found { duplicate, any: head };
        }
        let mut found: Option<(StableId, u32)> = None;
        let mut present = 0;
        for duplicate in self.chain(id).duplicates.clone().into_iter().rev() {
            if !self.keep_or_remove(memory, duplicate, walk) {
                continue;
            }
            present += 1;
            let linked = self.stable(duplicate).linked;
            let is_longer = found.is_none_or(|(_, best_linked)| linked > best_linked);
            if is_longer && self.room(duplicate, max) > 0 {
                found = Some((duplicate, linked));
                if !prunes {
                    break;
                }
            }
        }
        if let Some((found, _)) = found {
            if prunes && present == 1 {
                self.collapse_chain(id, found, walk.tally);
            } else {
                self.move_to_head(id, found, max);
            }
            return Resolved::Found { duplicate: Some(found), any: found };
        }
        let Some(&any) = self.chain(id).duplicates.last() else {
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
    fn move_to_head(&mut self, id: ChainId, found: StableId, max_page_sharing: usize) {
        if self.room(found, max_page_sharing) > 1 {
            let duplicates = &mut self.chain_mut(id).duplicates;
            let position = duplicates.iter().rposition(|&duplicate| duplicate == found).expect("it is in the chain");
            duplicates[position..].rotate_left(1);
        }
    }

    /// How many of the pages that follow each other a search treats as it treats the first, without a change of the
    /// tree: their walks end in the same gap of the tree, or find room in one node, or in nodes of ascending contents
    /// and frames. `None` if a walk may change the tree. Else the number, and whether nodes were found.
    pub(crate) fn uniform_pages(
        &self,
        memory: &Memory,
        contents: EntryRun,
        content: Content,
        node: u8,
        settings: &TreeSettings,
    ) -> Option<(u64, bool)> {
        let Some(tree) = self.trees.get(usize::from(node)) else { return Some((contents.pages, false)) };
        let missing = self.quietly_missing(memory, content, node, settings);
        if missing > 0 {
            return Some((if contents.ascends { contents.pages.min(missing) } else { contents.pages }, false));
        }
        let mut next = tree.root();
        let mut above = u64::MAX;
        while let Some(tree_node) = next {
            let id = self.quiet_node(memory, tree.value(tree_node), settings)?;
            let other = memory.frame(id).content;
            let side = match content.cmp(&other) {
                Ordering::Less => {
                    above = other.into();
                    ChildSide::Left
                }
                Ordering::Greater => ChildSide::Right,
                Ordering::Equal if self.room(id, settings.max_page_sharing) == 0 => return None,
                Ordering::Equal if !contents.ascends => {
                    let pages = contents.pages.min(self.room(id, settings.max_page_sharing));
                    return Some((pages, true));
                }
                Ordering::Equal => {
                    let pages = self.ascending_nodes(memory, node, tree_node, contents.pages, settings);
                    return Some((pages, true));
                }
            };
            next = tree.child(tree_node, side);
        }
        let pages = if contents.ascends { contents.pages.min(above - u64::from(content)) } else { contents.pages };
        Some((pages, false))
    }

    /// How many contents from this one on are in no node, as far as walks for them change nothing. 0 if the first is in
    /// one, or if it would take long to tell.
    fn quietly_missing(&self, memory: &Memory, content: Content, node: u8, settings: &TreeSettings) -> u64 {
        let Some(contents) = self.contents.get(usize::from(node)) else { return u64::MAX };
        match self.pages_before_loud_chains(memory, node, content, settings) {
            0 | 1 => 0,
            quiet => contents.missing_from(content).min(quiet),
        }
    }

    /// The number of comparisons of a walk that finds nothing and changes nothing, if the walk for this content is
    /// known to be one. It is an estimate, the depth of a full tree.
    pub(crate) fn quiet_miss(
        &self,
        memory: &Memory,
        content: Content,
        node: u8,
        settings: &TreeSettings,
    ) -> Option<u64> {
        let nodes = self.trees.get(usize::from(node)).map_or(0, RedBlackTree::len);
        (self.quietly_missing(memory, content, node, settings) > 0).then(|| (nodes + 1).ilog2().into())
    }

    /// The node that a walk finds at an entry, unless it changes something there.
    fn quiet_node(&self, memory: &Memory, entry: Entry, settings: &TreeSettings) -> Option<StableId> {
        match entry {
            Entry::Single(id) => Some(id).filter(|&id| !Self::is_stale(memory, id)),
            Entry::Chain(id) => {
                let chain = self.chain(id);
                let prunes = settings.now_ms >= chain.pruned_at_ms + settings.prune_ms;
                let is_stamped = !prunes || chain.pruned_at_ms == settings.now_ms;
                self.head_of_quiet_chain(memory, id, prunes, settings.max_page_sharing).filter(|_| is_stamped)
            }
        }
    }

    /// How many nodes with room follow each other with ascending contents and frames, where no walk can meet a freed
    /// frame or a chain that it changes.
    fn ascending_nodes(&self, memory: &Memory, node: u8, first: NodeId, pages: u64, settings: &TreeSettings) -> u64 {
        let tree = &self.trees[usize::from(node)];
        let Entry::Single(id) = tree.value(first) else { return 1 };
        let content = memory.frame(id).content;
        let pages = pages.min(self.pages_before_loud_chains(memory, node, content, settings));
        let mut last = first;
        let mut found = 1;
        while found < pages {
            let Some(next) = tree.successor(last) else { break };
            let expected = id.wrapping_add(found as u32);
            let continues = tree.value(next) == Entry::Single(expected)
                && u64::from(memory.frame(expected).content) == u64::from(content) + found
                && self.room(expected, settings.max_page_sharing) > 0;
            if !continues {
                break;
            }
            last = next;
            found += 1;
        }
        found
    }

    /// How many contents from this one on have walks that change nothing. 1 if it would take long to tell.
    fn pages_before_loud_chains(&self, memory: &Memory, node: u8, content: Content, settings: &TreeSettings) -> u64 {
        if memory.has_stale_frames() || self.chains.len() > MAX_CHECKED_CHAINS {
            return 1;
        }
        let tree = &self.trees[usize::from(node)];
        let content_of = |node| match tree.value(node) {
            Entry::Single(id) => Some(memory.frame(id).content),
            Entry::Chain(id) => self.chain(id).duplicates.last().map(|&id| memory.frame(id).content),
        };
        let mut pages = u64::MAX;
        for chain in self.chains.iter().flatten().filter(|chain| chain.node == node) {
            if self.quiet_node(memory, tree.value(chain.tree_node), settings).is_some() {
                continue;
            }
            // Walks for contents between these two pass the chain.
            let (below, above) = tree.bounds_of_subtree(chain.tree_node);
            let above = above.map(content_of);
            match below.map(content_of) {
                Some(None) => return 1,
                Some(Some(below)) if content <= below => pages = pages.min(u64::from(below - content) + 1),
                _ => match above {
                    Some(Some(above)) if content >= above => {}
                    _ => return 1,
                },
            }
        }
        pages
    }
}

/// With more chains, it is not checked which walks pass them.
const MAX_CHECKED_CHAINS: usize = 64;

/// What a walk reads and changes beside the tree.
pub(crate) struct Walk<'a> {
    pub(crate) settings: &'a TreeSettings,
    pub(crate) tally: &'a mut Tally,
    pub(crate) work: &'a mut WorkCounts,
    /// Nodes that the walk removed.
    pub(crate) removed: &'a mut Vec<StableId>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn a_set_of_contents_knows_what_is_missing(steps in prop::collection::vec(0_u32..30, 1..80)) {
            let (mut set, mut expected) = (ContentSet::default(), BTreeSet::new());
            for content in steps {
                if expected.remove(&content) {
                    set.remove(content);
                } else {
                    expected.insert(content);
                    set.insert(content);
                }
                for content in 0..32 {
                    let next = expected.range(content..).next();
                    let missing = next.map_or(u64::MAX, |next| u64::from(next - content));
                    prop_assert_eq!(set.missing_from(content), missing);
                }
            }
        }
    }
}
