//! A red-black tree with the shape of the kernel's.
//!
//! Mirrors what lib/rbtree.c does to a tree: the caller walks, links a leaf, and the tree rebalances by the
//! textbook rules; a node with two children is replaced by its successor. The shape matters: ksmd removes freed pages
//! and empty chains only from nodes that a walk passes, and a page of the unstable tree that changed sends later walks
//! the wrong way.

/// A node's number. It stays valid until the node is removed or the tree is cleared.
pub type NodeId = u32;

const NO_NODE: NodeId = NodeId::MAX;

/// The side of a parent on which a node is linked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChildSide {
    /// Smaller contents.
    Left,
    /// Larger contents.
    Right,
}

impl ChildSide {
    fn index(self) -> usize {
        match self {
            Self::Left => 0,
            Self::Right => 1,
        }
    }
}

#[derive(Clone, Debug)]
struct Node<T> {
    parent: NodeId,
    children: [NodeId; 2],
    is_red: bool,
    value: T,
}

/// A red-black tree whose order is the caller's.
#[derive(Clone, Debug)]
pub struct RedBlackTree<T> {
    nodes: Vec<Node<T>>,
    unused: Vec<NodeId>,
    root: NodeId,
}

impl<T: Copy> Default for RedBlackTree<T> {
    fn default() -> Self {
        Self { nodes: Vec::new(), unused: Vec::new(), root: NO_NODE }
    }
}

impl<T: Copy> RedBlackTree<T> {
    /// Forget all nodes.
    pub fn clear(&mut self) {
        self.nodes.clear();
        self.unused.clear();
        self.root = NO_NODE;
    }

    /// The root, unless the tree is empty.
    #[must_use]
    pub fn root(&self) -> Option<NodeId> {
        (self.root != NO_NODE).then_some(self.root)
    }

    /// The child of a node.
    #[must_use]
    pub fn child(&self, node: NodeId, side: ChildSide) -> Option<NodeId> {
        let child = self.nodes[node as usize].children[side.index()];
        (child != NO_NODE).then_some(child)
    }

    /// The next node in order.
    #[must_use]
    pub fn successor(&self, node: NodeId) -> Option<NodeId> {
        let mut below = self.nodes[node as usize].children[1];
        if below != NO_NODE {
            while self.nodes[below as usize].children[0] != NO_NODE {
                below = self.nodes[below as usize].children[0];
            }
            return Some(below);
        }
        self.ancestor_on(node, ChildSide::Right)
    }

    /// The nodes just before and just behind the nodes of a subtree. Walks between them pass the root of the subtree.
    #[must_use]
    pub fn bounds_of_subtree(&self, root: NodeId) -> (Option<NodeId>, Option<NodeId>) {
        (self.ancestor_on(root, ChildSide::Left), self.ancestor_on(root, ChildSide::Right))
    }

    /// The nearest ancestor on a side.
    fn ancestor_on(&self, mut node: NodeId, side: ChildSide) -> Option<NodeId> {
        loop {
            let parent = self.parent(node);
            if parent == NO_NODE {
                return None;
            }
            if self.side_of(node, parent) != side.index() {
                return Some(parent);
            }
            node = parent;
        }
    }

    /// The value of a node.
    #[must_use]
    pub fn value(&self, node: NodeId) -> T {
        self.nodes[node as usize].value
    }

    /// Replace the value of a node; the shape stays.
    pub fn replace_value(&mut self, node: NodeId, value: T) {
        self.nodes[node as usize].value = value;
    }

    /// The number of nodes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.nodes.len() - self.unused.len()
    }

    /// Whether the tree has no nodes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.root == NO_NODE
    }

    /// Link a new leaf where a walk ended, and rebalance. `None` makes it the root of an empty tree.
    pub fn insert(&mut self, parent: Option<(NodeId, ChildSide)>, value: T) -> NodeId {
        let node = Node { parent: NO_NODE, children: [NO_NODE; 2], is_red: true, value };
        let id = match self.unused.pop() {
            Some(id) => {
                self.nodes[id as usize] = node;
                id
            }
            None => {
                self.nodes.push(node);
                NodeId::try_from(self.nodes.len() - 1).expect("fewer than 2^32 nodes")
            }
        };
        match parent {
            None => self.root = id,
            Some((parent, side)) => {
                self.nodes[id as usize].parent = parent;
                self.nodes[parent as usize].children[side.index()] = id;
            }
        }
        self.rebalance_after_insert(id);
        id
    }

    fn is_red(&self, node: NodeId) -> bool {
        node != NO_NODE && self.nodes[node as usize].is_red
    }

    fn parent(&self, node: NodeId) -> NodeId {
        self.nodes[node as usize].parent
    }

    fn side_of(&self, node: NodeId, parent: NodeId) -> usize {
        usize::from(self.nodes[parent as usize].children[1] == node)
    }

    /// Put `new` where `old` hangs below `parent`.
    fn replace_child(&mut self, parent: NodeId, old: NodeId, new: NodeId) {
        if parent == NO_NODE {
            self.root = new;
        } else {
            let side = self.side_of(old, parent);
            self.nodes[parent as usize].children[side] = new;
        }
        if new != NO_NODE {
            self.nodes[new as usize].parent = parent;
        }
    }

    /// Rotate `node` down to `side`; its other child takes its position.
    fn rotate(&mut self, node: NodeId, side: usize) {
        let riser = self.nodes[node as usize].children[1 - side];
        let inner = self.nodes[riser as usize].children[side];
        self.replace_child(self.parent(node), node, riser);
        self.nodes[riser as usize].children[side] = node;
        self.nodes[node as usize].parent = riser;
        self.nodes[node as usize].children[1 - side] = inner;
        if inner != NO_NODE {
            self.nodes[inner as usize].parent = node;
        }
    }

    fn rebalance_after_insert(&mut self, mut node: NodeId) {
        loop {
            let parent = self.parent(node);
            if parent == NO_NODE {
                self.nodes[node as usize].is_red = false;
                return;
            }
            if !self.is_red(parent) {
                return;
            }
            let grandparent = self.parent(parent);
            let side = self.side_of(parent, grandparent);
            let uncle = self.nodes[grandparent as usize].children[1 - side];
            if self.is_red(uncle) {
                self.nodes[parent as usize].is_red = false;
                self.nodes[uncle as usize].is_red = false;
                self.nodes[grandparent as usize].is_red = true;
                node = grandparent;
                continue;
            }
            let mut top = parent;
            if self.side_of(node, parent) != side {
                self.rotate(parent, side);
                top = node;
            }
            self.nodes[top as usize].is_red = false;
            self.nodes[grandparent as usize].is_red = true;
            self.rotate(grandparent, 1 - side);
            return;
        }
    }

    /// Remove a node, and rebalance.
    pub fn remove(&mut self, node: NodeId) {
        let [left, right] = self.nodes[node as usize].children;
        let parent = self.parent(node);
        let was_red = self.is_red(node);
        let short = if left == NO_NODE || right == NO_NODE {
            let child = if left == NO_NODE { right } else { left };
            self.replace_child(parent, node, child);
            if child == NO_NODE {
                (!was_red).then_some((NO_NODE, parent))
            } else {
                // The only child of a node is red, and takes the node's color.
                self.nodes[child as usize].is_red = was_red;
                None
            }
        } else {
            self.replace_by_successor(node)
        };
        if let Some((child, parent)) = short {
            self.rebalance_after_remove(child, parent);
        }
        self.unused.push(node);
    }

    /// Replace a node with two children by the next larger one. Returns the position that lacks a black node, if one
    /// does: the child there and its parent.
    fn replace_by_successor(&mut self, node: NodeId) -> Option<(NodeId, NodeId)> {
        let [left, right] = self.nodes[node as usize].children;
        let mut successor = right;
        while self.nodes[successor as usize].children[0] != NO_NODE {
            successor = self.nodes[successor as usize].children[0];
        }
        let orphan = self.nodes[successor as usize].children[1];
        let successor_was_red = self.is_red(successor);
        let mut orphan_parent = successor;
        if successor != right {
            orphan_parent = self.parent(successor);
            self.replace_child(orphan_parent, successor, orphan);
            self.nodes[successor as usize].children[1] = right;
            self.nodes[right as usize].parent = successor;
        }
        self.nodes[successor as usize].children[0] = left;
        self.nodes[left as usize].parent = successor;
        self.nodes[successor as usize].is_red = self.is_red(node);
        self.replace_child(self.parent(node), node, successor);
        if orphan != NO_NODE {
            self.nodes[orphan as usize].is_red = false;
            return None;
        }
        (!successor_was_red).then_some((NO_NODE, orphan_parent))
    }

    fn rebalance_after_remove(&mut self, mut node: NodeId, mut parent: NodeId) {
        while parent != NO_NODE && !self.is_red(node) {
            let side = usize::from(self.nodes[parent as usize].children[0] != node);
            let mut sibling = self.nodes[parent as usize].children[1 - side];
            if self.is_red(sibling) {
                self.nodes[sibling as usize].is_red = false;
                self.nodes[parent as usize].is_red = true;
                self.rotate(parent, side);
                sibling = self.nodes[parent as usize].children[1 - side];
            }
            let outer = self.nodes[sibling as usize].children[1 - side];
            let inner = self.nodes[sibling as usize].children[side];
            if !self.is_red(outer) && !self.is_red(inner) {
                self.nodes[sibling as usize].is_red = true;
                node = parent;
                parent = self.parent(node);
                continue;
            }
            if !self.is_red(outer) {
                self.nodes[inner as usize].is_red = false;
                self.nodes[sibling as usize].is_red = true;
                self.rotate(sibling, 1 - side);
                sibling = inner;
            }
            self.nodes[sibling as usize].is_red = self.is_red(parent);
            self.nodes[parent as usize].is_red = false;
            let outer = self.nodes[sibling as usize].children[1 - side];
            self.nodes[outer as usize].is_red = false;
            self.rotate(parent, side);
            return;
        }
        if node != NO_NODE {
            self.nodes[node as usize].is_red = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn insert_key(tree: &mut RedBlackTree<u32>, key: u32) -> Option<NodeId> {
        let (mut next, mut parent) = (tree.root(), None);
        while let Some(node) = next {
            let side = match key.cmp(&tree.value(node)) {
                std::cmp::Ordering::Equal => return None,
                std::cmp::Ordering::Less => ChildSide::Left,
                std::cmp::Ordering::Greater => ChildSide::Right,
            };
            parent = Some((node, side));
            next = tree.child(node, side);
        }
        Some(tree.insert(parent, key))
    }

    /// The keys in order, and the number of black nodes on each path; fails where a rule of the tree is broken.
    fn collect(tree: &RedBlackTree<u32>, node: NodeId, keys: &mut Vec<u32>) -> usize {
        if node == NO_NODE {
            return 1;
        }
        let Node { children: [left, right], is_red, value, .. } = tree.nodes[node as usize];
        assert!(!(is_red && (tree.is_red(left) || tree.is_red(right))), "a red node has a red child");
        let black_left = collect(tree, left, keys);
        keys.push(value);
        assert_eq!(black_left, collect(tree, right, keys), "paths with different numbers of black nodes");
        black_left + usize::from(!is_red)
    }

    #[test]
    fn ascending_inserts_give_the_shape_of_the_textbook() {
        let mut tree = RedBlackTree::default();
        for key in 1..=6 {
            insert_key(&mut tree, key);
        }
        // 2 above 1 and 4; 4 above 3 and 5; 5 above 6.
        let root = tree.root().unwrap();
        assert_eq!(tree.value(root), 2);
        let right = tree.child(root, ChildSide::Right).unwrap();
        assert_eq!((tree.value(right), tree.value(tree.child(root, ChildSide::Left).unwrap())), (4, 1));
        assert_eq!(tree.value(tree.child(right, ChildSide::Right).unwrap()), 5);
    }

    #[test]
    fn the_successor_replaces_a_node_with_two_children() {
        let mut tree = RedBlackTree::default();
        for key in [4, 2, 8, 6, 9] {
            insert_key(&mut tree, key);
        }
        let root = tree.root().unwrap();
        assert_eq!(tree.value(root), 4);
        tree.remove(root);
        assert_eq!(tree.value(tree.root().unwrap()), 6);
    }

    proptest! {
        #[test]
        fn rules_hold_after_any_changes(steps in prop::collection::vec((0_u32..64, any::<bool>()), 1..400)) {
            let mut tree = RedBlackTree::default();
            let mut expected = std::collections::BTreeMap::new();
            for (key, inserts) in steps {
                if inserts {
                    if let Some(node) = insert_key(&mut tree, key) {
                        expected.insert(key, node);
                    }
                } else if let Some(node) = expected.remove(&key) {
                    tree.remove(node);
                }
                let mut keys = Vec::new();
                collect(&tree, tree.root, &mut keys);
                for (node, next) in expected.values().zip(expected.values().skip(1).map(Some).chain([None])) {
                    prop_assert_eq!(tree.successor(*node), next.copied());
                }
                prop_assert!(!tree.is_red(tree.root));
                prop_assert_eq!(&keys, &expected.keys().copied().collect::<Vec<_>>());
                prop_assert_eq!(tree.len(), keys.len());
            }
        }
    }
}
