//! An ordered map: a height-balanced binary tree (AVL), in which each entry has its own block.
//!
//! So an entry needs memory once, before any change, and this memory can be [reserved](Slot):
//! inserting the entry then needs no memory, and neither do the other operations.

use super::Result;
use alloc::boxed::Box;
use core::borrow::Borrow;
use core::cmp::Ordering;
use core::fmt;
use core::mem;
use faultless::try_box;

/// No tree of fewer than 2^33 entries is higher.
const HIGHEST: usize = 48;

struct Node<K, V> {
    /// `None` while the node is only reserved.
    entry: Option<(K, V)>,
    left: Tree<K, V>,
    right: Tree<K, V>,
    height: u8,
}

/// A tree, or a removed node.
type Tree<K, V> = Option<Box<Node<K, V>>>;

/// The memory of an entry that is not in a map.
pub struct Slot<K, V>(Box<Node<K, V>>);

impl<K, V> Slot<K, V> {
    /// Memory for an entry.
    ///
    /// # Errors
    /// [`OutOfMemory`](super::OutOfMemory).
    pub fn try_new() -> Result<Self> {
        Ok(Self(try_box(Node { entry: None, left: None, right: None, height: 1 })?))
    }
}

impl<K, V> fmt::Debug for Slot<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Slot")
    }
}

impl<K, V> Node<K, V> {
    fn key(&self) -> &K {
        &self.both().0
    }

    fn both(&self) -> &(K, V) {
        // Every node in a tree has an entry.
        let Some(entry) = &self.entry else { unreachable!("a node without an entry") };
        entry
    }

    fn both_mut(&mut self) -> &mut (K, V) {
        let Some(entry) = &mut self.entry else { unreachable!("a node without an entry") };
        entry
    }

    fn measure(&mut self) {
        self.height = 1 + height(&self.left).max(height(&self.right));
    }
}

fn height<K, V>(tree: &Tree<K, V>) -> u8 {
    tree.as_ref().map_or(0, |node| node.height)
}

/// Makes the left child the root; the child exists.
fn rotate_right<K, V>(mut node: Box<Node<K, V>>) -> Box<Node<K, V>> {
    let Some(mut root) = node.left.take() else { return node };
    node.left = root.right.take();
    node.measure();
    root.right = Some(node);
    root.measure();
    root
}

/// Makes the right child the root; the child exists.
fn rotate_left<K, V>(mut node: Box<Node<K, V>>) -> Box<Node<K, V>> {
    let Some(mut root) = node.right.take() else { return node };
    node.right = root.left.take();
    node.measure();
    root.left = Some(node);
    root.measure();
    root
}

/// Balances a node whose children are balanced, with heights that differ by at most two.
fn balance<K, V>(mut node: Box<Node<K, V>>) -> Box<Node<K, V>> {
    let (left, right) = (height(&node.left), height(&node.right));
    if left > right + 1 {
        if node.left.as_ref().is_some_and(|left| height(&left.right) > height(&left.left)) {
            node.left = node.left.take().map(rotate_left);
        }
        return rotate_right(node);
    }
    if right > left + 1 {
        if node.right.as_ref().is_some_and(|right| height(&right.left) > height(&right.right)) {
            node.right = node.right.take().map(rotate_right);
        }
        return rotate_left(node);
    }
    node.measure();
    node
}

/// Inserts a node; returns the node that had the same key.
fn insert<K: Ord, V>(tree: Tree<K, V>, new: Box<Node<K, V>>) -> (Box<Node<K, V>>, Tree<K, V>) {
    let Some(mut node) = tree else { return (new, None) };
    let old = match new.key().cmp(node.key()) {
        Ordering::Less => {
            let (left, old) = insert(node.left.take(), new);
            node.left = Some(left);
            old
        }
        Ordering::Greater => {
            let (right, old) = insert(node.right.take(), new);
            node.right = Some(right);
            old
        }
        Ordering::Equal => {
            let mut new = new;
            mem::swap(&mut node.entry, &mut new.entry);
            return (node, Some(new));
        }
    };
    (balance(node), old)
}

/// Removes and returns the lowest node.
fn remove_first<K, V>(mut node: Box<Node<K, V>>) -> (Tree<K, V>, Box<Node<K, V>>) {
    match node.left.take() {
        None => (node.right.take(), node),
        Some(left) => {
            let (left, first) = remove_first(left);
            node.left = left;
            (Some(balance(node)), first)
        }
    }
}

fn remove<K, V, Q>(tree: Tree<K, V>, key: &Q) -> (Tree<K, V>, Tree<K, V>)
where
    K: Borrow<Q>,
    Q: Ord + ?Sized,
{
    let Some(mut node) = tree else { return (None, None) };
    let removed = match key.cmp(node.key().borrow()) {
        Ordering::Less => {
            let (left, removed) = remove(node.left.take(), key);
            node.left = left;
            removed
        }
        Ordering::Greater => {
            let (right, removed) = remove(node.right.take(), key);
            node.right = right;
            removed
        }
        Ordering::Equal => {
            let rest = match (node.left.take(), node.right.take()) {
                (left, None) => left,
                (None, right) => right,
                (left, Some(right)) => {
                    let (right, mut next) = remove_first(right);
                    next.left = left;
                    next.right = right;
                    Some(balance(next))
                }
            };
            node.height = 1;
            return (rest, Some(node));
        }
    };
    (Some(balance(node)), removed)
}

/// An ordered map.
pub struct Map<K, V> {
    root: Tree<K, V>,
    len: usize,
}

impl<K, V> Map<K, V> {
    /// An empty map.
    pub const fn new() -> Self {
        Self { root: None, len: 0 }
    }

    /// Returns the number of entries.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the map is empty.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All entries, in order.
    pub fn iter(&self) -> Iter<'_, K, V> {
        let mut iter = Iter { path: [None; HIGHEST], depth: 0 };
        iter.descend(&self.root);
        iter
    }

    /// All keys, in order.
    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.iter().map(|(key, _)| key)
    }

    /// All values, in the order of their keys.
    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.iter().map(|(_, value)| value)
    }

    /// The first entry.
    pub fn first(&self) -> Option<(&K, &V)> {
        let mut node = self.root.as_ref()?;
        while let Some(left) = &node.left {
            node = left;
        }
        let (key, value) = node.both();
        Some((key, value))
    }

    /// The last entry.
    pub fn last(&self) -> Option<(&K, &V)> {
        let mut node = self.root.as_ref()?;
        while let Some(right) = &node.right {
            node = right;
        }
        let (key, value) = node.both();
        Some((key, value))
    }
}

impl<K: Ord, V> Map<K, V> {
    fn node<Q: Ord + ?Sized>(&self, key: &Q) -> Option<&Node<K, V>>
    where
        K: Borrow<Q>,
    {
        let mut node = self.root.as_ref()?;
        loop {
            node = match key.cmp(node.key().borrow()) {
                Ordering::Less => node.left.as_ref()?,
                Ordering::Greater => node.right.as_ref()?,
                Ordering::Equal => return Some(node),
            };
        }
    }

    /// The value of a key.
    pub fn get<Q: Ord + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        Some(&self.node(key)?.both().1)
    }

    /// The value of a key, to be changed.
    pub fn get_mut<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
    {
        let mut node = self.root.as_mut()?;
        loop {
            node = match key.cmp(node.key().borrow()) {
                Ordering::Less => node.left.as_mut()?,
                Ordering::Greater => node.right.as_mut()?,
                Ordering::Equal => return Some(&mut node.both_mut().1),
            };
        }
    }

    /// Returns whether there is an entry for a key.
    pub fn contains_key<Q: Ord + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.node(key).is_some()
    }

    /// Returns the first entry with a key above `key`, or the first entry of all. For iterating
    /// over a map that changes in between.
    pub fn after<Q: Ord + ?Sized>(&self, key: Option<&Q>) -> Option<(&K, &V)>
    where
        K: Borrow<Q>,
    {
        let Some(key) = key else { return self.first() };
        let mut found = None;
        let mut next = self.root.as_ref();
        while let Some(node) = next {
            if node.key().borrow() > key {
                found = Some(node);
                next = node.left.as_ref();
            } else {
                next = node.right.as_ref();
            }
        }
        found.map(|node| (&node.both().0, &node.both().1))
    }

    /// Inserts an entry, and returns the previous value of the key.
    ///
    /// # Errors
    /// [`OutOfMemory`](super::OutOfMemory); the map is unchanged.
    pub fn try_insert(&mut self, key: K, value: V) -> Result<Option<V>> {
        Ok(self.insert(Slot::try_new()?, key, value))
    }

    /// Inserts an entry with reserved memory, and returns the previous value of the key.
    pub fn insert(&mut self, slot: Slot<K, V>, key: K, value: V) -> Option<V> {
        let mut node = slot.0;
        node.entry = Some((key, value));
        let (root, old) = insert(self.root.take(), node);
        self.root = Some(root);
        self.len += usize::from(old.is_none());
        old?.entry.map(|(_, value)| value)
    }

    /// Removes an entry.
    pub fn remove<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        self.take(key).map(|(value, _)| value)
    }

    /// Removes an entry, and returns its memory for another entry.
    pub fn take<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<(V, Slot<K, V>)>
    where
        K: Borrow<Q>,
    {
        let (root, removed) = remove(self.root.take(), key);
        self.root = root;
        let mut node = removed?;
        self.len -= 1;
        let (_, value) = node.entry.take()?;
        Some((value, Slot(node)))
    }

    /// Removes the first entry, and returns its memory for another entry.
    pub fn take_first(&mut self) -> Option<(K, V, Slot<K, V>)> {
        let (root, mut node) = remove_first(self.root.take()?);
        self.root = root;
        self.len -= 1;
        node.height = 1;
        let (key, value) = node.entry.take()?;
        Some((key, value, Slot(node)))
    }

    /// Shows every entry, in order, to be changed.
    pub fn each_mut(&mut self, mut change: impl FnMut(&K, &mut V)) {
        fn visit<K, V>(tree: &mut Tree<K, V>, change: &mut impl FnMut(&K, &mut V)) {
            if let Some(node) = tree {
                visit(&mut node.left, change);
                let (key, value) = node.both_mut();
                change(key, value);
                visit(&mut node.right, change);
            }
        }
        visit(&mut self.root, &mut change);
    }

    /// Drops the entries for which `stays` returns false.
    pub fn retain(&mut self, mut stays: impl FnMut(&K, &mut V) -> bool) {
        let mut rest = mem::take(self);
        while let Some((key, mut value, slot)) = rest.take_first() {
            if stays(&key, &mut value) {
                self.insert(slot, key, value);
            }
        }
    }

    /// Drops all entries.
    pub fn clear(&mut self) {
        drop(mem::take(self));
    }
}

impl<K, V> Default for Map<K, V> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K: fmt::Debug, V: fmt::Debug> fmt::Debug for Map<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

/// The entries of a [`Map`], in order.
pub struct Iter<'a, K, V> {
    /// The next nodes, in reverse order: the right subtree of each node comes between this node and
    /// the one before it in the path.
    path: [Option<&'a Node<K, V>>; HIGHEST],
    depth: usize,
}

impl<'a, K, V> Iter<'a, K, V> {
    fn descend(&mut self, mut tree: &'a Tree<K, V>) {
        while let Some(node) = tree {
            self.path[self.depth] = Some(node);
            self.depth += 1;
            tree = &node.left;
        }
    }
}

impl<'a, K, V> Iterator for Iter<'a, K, V> {
    type Item = (&'a K, &'a V);

    fn next(&mut self) -> Option<(&'a K, &'a V)> {
        self.depth = self.depth.checked_sub(1)?;
        let node = self.path[self.depth]?;
        self.descend(&node.right);
        let (key, value) = node.both();
        Some((key, value))
    }
}

impl<K, V> fmt::Debug for Iter<'_, K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Iter")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::vec::Vec;

    /// Checks that the tree is ordered, balanced, and as high as stored in its nodes.
    fn check(tree: &Tree<u32, u64>, within: core::ops::Range<u32>) -> u8 {
        let Some(node) = tree else { return 0 };
        let key = *node.key();
        assert!(within.contains(&key));
        let (left, right) =
            (check(&node.left, within.start..key), check(&node.right, key + 1..within.end));
        assert!(left.abs_diff(right) <= 1);
        assert_eq!(node.height, 1 + left.max(right));
        node.height
    }

    fn same(map: &Map<u32, u64>, model: &BTreeMap<u32, u64>) {
        check(&map.root, 0..u32::MAX);
        assert_eq!(map.len(), model.len());
        assert!(map.iter().eq(model.iter()));
    }

    #[test]
    fn map_behaves_like_the_standard_map() {
        let (mut map, mut model) = (Map::new(), BTreeMap::new());
        let mut seed = 7u32;
        for step in 0..6000u64 {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let (key, what) = (seed >> 8 & 255, seed >> 24 & 7);
            match what {
                0..4 => assert_eq!(map.try_insert(key, step).unwrap(), model.insert(key, step)),
                4..6 => assert_eq!(map.remove(&key), model.remove(&key)),
                6 => {
                    let after = model.range(key + 1..).next();
                    assert_eq!(map.after(Some(&key)), after);
                    assert_eq!(map.get(&key), model.get(&key));
                    assert_eq!(map.last(), model.last_key_value());
                    assert_eq!(map.after(None), model.first_key_value());
                }
                _ => {
                    if let Some(value) = map.get_mut(&key) {
                        *value += 1;
                        *model.get_mut(&key).unwrap() += 1;
                    }
                }
            }
            if step % 16 == 0 {
                same(&map, &model);
            }
        }
        map.retain(|key, _| key % 3 == 0);
        model.retain(|key, _| key % 3 == 0);
        map.each_mut(|key, value| *value += u64::from(*key));
        model.iter_mut().for_each(|(key, value)| *value += u64::from(*key));
        same(&map, &model);
        let mut all = Vec::new();
        while let Some((key, value, slot)) = map.take_first() {
            all.push((key, value));
            drop(slot);
        }
        assert!(all.into_iter().eq(model));
    }

    #[test]
    fn memory_of_a_taken_entry_is_reusable() {
        let mut map = Map::new();
        map.try_insert(1, "a").unwrap();
        map.try_insert(2, "b").unwrap();
        let (value, slot) = map.take(&1).unwrap();
        assert_eq!((value, map.insert(slot, 3, "c")), ("a", None));
        assert!(map.keys().eq(&[2, 3]) && map.values().eq(&["b", "c"]));
        map.clear();
        assert!(map.is_empty() && map.first().is_none());
    }
}
