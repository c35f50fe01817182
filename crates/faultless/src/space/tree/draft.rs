//! The next version of a tree, while one writer builds it.
//!
//! A draft shares with the published version every node that it has not changed. A node is the
//! draft's own when it was born in this edit, and is then changed in place; any other is copied
//! first, together with the path above it, and goes to the list of the replaced.
//!
//! Every change is a *splice*: in one leaf, a run of slots gives way to others; that leaf, or the
//! two that it became, replace it in the parent, and so on up. A splice counts the nodes that it
//! will need and reserves them before it touches anything. So it happens wholly or not at all,
//! and from the reservation on nothing can fail.

use super::node::{self, Chain, Extent, FANOUT, Node, Slot, Slots};
use super::path::{Fit, Path};
use crate::addr::VirtRange;
use crate::error::OutOfMemory;
use crate::sync::grace::RetireChain;
use core::ptr::NonNull;

/// New entries that one splice takes, at most.
pub(super) const CHUNK: usize = 3;

/// The next version.
///
/// *Invariant (private nodes):* a node with `born == self.born` is reachable through this draft
/// alone. Ancestors of a private node are private.
pub(super) struct Draft {
    root: Option<NonNull<Node>>,
    born: u64,
    /// Nodes of the old version that the next has no more.
    replaced: RetireChain,
    spare: Chain,
}

/// What a change of one level means for the one above: `removed` slots from `at` on give way to the
/// first `len` of `slots`.
struct Up {
    at: usize,
    removed: usize,
    slots: [Slot; 2],
    len: usize,
}

impl Draft {
    /// A draft that equals the version under `root`, made by edit number `born`.
    ///
    /// # Safety
    /// The version stays valid for the life of the draft and its nodes' links are left to it. No
    /// node of that version was made by an edit of this number.
    pub(super) unsafe fn new(root: Option<NonNull<Node>>, born: u64) -> Self {
        Self { root, born, replaced: RetireChain::default(), spare: Chain::default() }
    }

    /// The next version's root.
    pub(super) fn root(&self) -> Option<NonNull<Node>> {
        self.root
    }

    /// Ends the draft: its version now belongs to the caller, and so do the nodes of the old
    /// version that are not part of it.
    pub(super) fn finish(mut self) -> (Option<NonNull<Node>>, RetireChain) {
        (self.root.take(), self.replaced)
    }

    /// Removes every entry that overlaps `range`, of which it tells `gone`, and inserts `new`, at
    /// most [`CHUNK`] entries in order inside it.
    ///
    /// # Errors
    /// [`OutOfMemory`]. A change within one leaf is one splice: nothing of it was made. Of any
    /// other, a part may have been.
    #[inline]
    pub(super) fn replace(
        &mut self,
        range: VirtRange,
        new: impl Slots,
        mut gone: impl FnMut(Slot),
    ) -> Result<(), OutOfMemory> {
        let mut path = Path::new();
        loop {
            let Some(root) = self.root else {
                return if new.len() == 0 { Ok(()) } else { self.plant(new) };
            };
            path.lead(root, range.start);
            let (leaf, mut at) = (path.node(0), path.at(0));
            while at < leaf.count() && leaf.keys().0[at] < range.end {
                gone(leaf.slot(at));
                at += 1;
            }
            let removed = at - path.at(0);
            if at < leaf.count() || path.above >= range.end {
                return self.splice(&path, removed, new);
            }
            // The next leaf has some, too, and the new entries.
            self.splice(&path, removed, [].into_iter())?;
        }
    }

    /// Makes the first leaf of an empty tree.
    fn plant(&mut self, new: impl Slots) -> Result<(), OutOfMemory> {
        self.reserve(1)?;
        let mut root = self.blank(0);
        let extent = new.extent();
        // SAFETY: made just now, so private.
        unsafe { root.as_mut() }.splice(0, 0, new);
        self.crown(root, extent);
        Ok(())
    }

    /// Puts `new` in the place of the `removed` entries from the end of `path` on, all in one leaf.
    #[inline(always)]
    fn splice(&mut self, path: &Path, removed: usize, new: impl Slots) -> Result<(), OutOfMemory> {
        if removed == 0 && new.len() == 0 {
            return Ok(());
        }
        self.reserve(self.needed(path, removed, new.len()))?;
        let less = path.node(0).extent_of(path.at(0), removed);
        let extent = path.node(path.top).extent().change(less, new.extent());
        // At each level some slots give way to others.
        let mut up = self.amend(path, 0, path.at(0), removed, new);
        for level in 1..=path.top {
            let new = up.slots.into_iter().take(up.len);
            up = self.amend(path, level, up.at, up.removed, new);
        }
        let mut root = up.slots[0].target.cast::<Node>();
        if up.len == 2 {
            root = self.blank(path.top as u8 + 1);
            // SAFETY: private, as `blank` makes it.
            unsafe { root.as_mut() }.splice(0, 0, up.slots.into_iter());
        } else {
            // SAFETY: a node of the draft.
            let node = unsafe { root.as_ref() };
            // Only the join of the last two children leaves one, and its fill is enough.
            if node.level > 0 && node.count() == 1 {
                // SAFETY: an inner node with one slot.
                let child = unsafe { node.child(0) };
                self.discard(root);
                root = child;
            }
        }
        self.crown(root, extent);
        Ok(())
    }

    /// Puts `new` in the place of the `removed` slots from `at` on in the node of `path` at
    /// `level`; returns what that means for the level above, where there may be none: then only the
    /// targets are of meaning.
    #[inline(always)]
    fn amend(
        &mut self,
        path: &Path,
        level: usize,
        at: usize,
        removed: usize,
        new: impl Slots,
    ) -> Up {
        let fit = path.fit(level, path.node(level).count() - removed + new.len());
        let mut this = self.own(path.step(level).node);
        // SAFETY: `own` gives a private node, and nothing else refers to it while this is used.
        let node = unsafe { this.as_mut() };
        let parent = if level < path.top { path.at(level + 1) } else { 0 };
        let one = |slot| [slot, Slot::BLANK];
        match fit {
            Fit::Fits => {
                node.splice(at, removed, new);
                let root = Slot { target: this.cast(), ..Slot::BLANK };
                let slot = if level < path.top { node.summary(this) } else { root };
                Up { at: parent, removed: 1, slots: one(slot), len: 1 }
            }
            Fit::Splits => {
                let slots = self.split(this, at, removed, new);
                Up { at: parent, removed: 1, slots, len: 2 }
            }
            Fit::Joins(sibling) => {
                node.splice(at, removed, new);
                let mut all = Run::default();
                all.extend(sibling.node(), 0..sibling.node().count());
                node.splice(if sibling.left { 0 } else { node.count() }, 0, all.slots());
                self.discard(sibling.node);
                let at = parent - usize::from(sibling.left);
                Up { at, removed: 2, slots: one(node.summary(this)), len: 1 }
            }
            Fit::Shares(sibling) => {
                node.splice(at, removed, new);
                let other = self.own(sibling.node);
                let (low, high) = if sibling.left { (other, this) } else { (this, other) };
                let at = parent - usize::from(sibling.left);
                Up { at, removed: 2, slots: share(low, high), len: 2 }
            }
        }
    }

    /// Makes `root`, a private node, the root of the draft, whose entries have this extent.
    fn crown(&mut self, mut root: NonNull<Node>, extent: Extent) {
        // SAFETY: private (invariant *private nodes*), and no other reference is in use.
        let node = unsafe { root.as_mut() };
        debug_assert_eq!(node.born, self.born);
        node.crown(extent);
        self.root = (extent.entries > 0).then_some(root);
        if extent.entries == 0 {
            self.discard(root);
        }
    }

    /// How many new nodes a splice takes.
    #[inline(always)]
    fn needed(&self, path: &Path, removed: usize, new: usize) -> usize {
        let mut need = 0;
        let (mut removed, mut new) = (removed, new);
        for level in 0..=path.top {
            need += usize::from(!self.owns(path.step(level).node));
            (removed, new) = match path.fit(level, path.node(level).count() - removed + new) {
                Fit::Fits => (1, 1),
                Fit::Splits => {
                    // A root that splits gets another above it.
                    need += if level == path.top { 2 } else { 1 };
                    (1, 2)
                }
                Fit::Joins(_) => (2, 1),
                Fit::Shares(sibling) => {
                    need += usize::from(!self.owns(sibling.node));
                    (2, 2)
                }
            };
        }
        need
    }

    /// Deals the slots of a private node, as they are after a splice, to it and a new node.
    fn split(
        &mut self,
        mut this: NonNull<Node>,
        at: usize,
        removed: usize,
        new: impl Slots,
    ) -> [Slot; 2] {
        // SAFETY: the caller's node is private and `blank` gives another private one.
        let node = unsafe { this.as_mut() };
        let high = self.blank(node.level);
        let mut all = Run::default();
        all.extend(node, 0..at);
        all.append(new);
        all.extend(node, at + removed..node.count());
        all.deal(this, high)
    }

    /// Whether the node is private to this draft.
    fn owns(&self, node: NonNull<Node>) -> bool {
        // SAFETY: nodes of the old version and of the draft are valid while the draft lives.
        unsafe { node.as_ref() }.born == self.born
    }

    /// The node itself if it is private, else a private copy of it, for which one is in reserve.
    fn own(&mut self, node: NonNull<Node>) -> NonNull<Node> {
        if self.owns(node) {
            return node;
        }
        let mut copy = self.take();
        // SAFETY: `take` gives memory for a node that nothing else refers to; the old node is
        // valid, and only this writer writes to its links.
        unsafe {
            copy.copy_from_nonoverlapping(node, 1);
            copy.as_mut().born = self.born;
        }
        self.discard(node);
        copy
    }

    /// A private node without slots, for which one is in reserve.
    fn blank(&mut self, level: u8) -> NonNull<Node> {
        let node = self.take();
        // SAFETY: `take` gives memory for a node that nothing else refers to.
        unsafe { node.write(Node::blank(level, self.born)) };
        node
    }

    /// Sees to it that `nodes` nodes are in reserve.
    fn reserve(&mut self, nodes: usize) -> Result<(), OutOfMemory> {
        while self.spare.len() < nodes {
            // SAFETY: a new allocation, which only the draft knows, and frees after the chain.
            unsafe { self.spare.push(node::allocate()?) };
        }
        Ok(())
    }

    /// Takes a node out of the reserve.
    fn take(&mut self) -> NonNull<Node> {
        let node = self.spare.pop();
        // `needed` follows the same steps as `splice`; the tests count the reserve.
        node.expect("a splice reserves all of its nodes")
    }

    /// Drops a node from the next version.
    fn discard(&mut self, node: NonNull<Node>) {
        // SAFETY: a private node is known to this draft alone, and is now out of its version. An
        // old one stays valid for the life of the draft, which alone uses its link; it is discarded
        // once, since the version that held it held it once.
        unsafe {
            if self.owns(node) {
                self.spare.push(node);
            } else {
                self.replaced.push(node::retire_link(node));
            }
        }
    }
}

impl Drop for Draft {
    /// Frees what is private. The old version is as it was.
    fn drop(&mut self) {
        while let Some(node) = self.spare.pop() {
            // SAFETY: nodes in reserve are known to this draft alone.
            unsafe { node::free(node) };
        }
        if let Some(root) = self.root {
            // SAFETY: the private nodes under this root are reachable through the draft alone.
            unsafe { free_subtree(root, Some(self.born)) };
        }
    }
}

/// Frees the nodes of the subtree, or only those of one edit, below which all others lie.
///
/// # Safety
/// Those nodes are reachable through `node` alone, and are not being read.
pub(super) unsafe fn free_subtree(node: NonNull<Node>, born: Option<u64>) {
    // SAFETY: valid until it is freed below.
    let this = unsafe { node.as_ref() };
    if born.is_some_and(|born| this.born != born) {
        return;
    }
    if this.level > 0 {
        for at in 0..this.count() {
            // SAFETY: an inner node and a slot in use; the child is as reachable as this node.
            unsafe { free_subtree(this.child(at), born) };
        }
    }
    // SAFETY: the caller's promise; the reference above is not used any more.
    unsafe { node::free(node) };
}

/// The slots of up to two nodes, on their way into others.
struct Run {
    slots: [Slot; 2 * FANOUT],
    len: usize,
}

impl Default for Run {
    fn default() -> Self {
        Self { slots: [Slot::BLANK; 2 * FANOUT], len: 0 }
    }
}

impl Run {
    fn slots(&self) -> impl Slots {
        self.slots[..self.len].iter().copied()
    }

    fn append(&mut self, new: impl Slots) {
        for slot in new {
            self.slots[self.len] = slot;
            self.len += 1;
        }
    }

    fn extend(&mut self, node: &Node, range: core::ops::Range<usize>) {
        for at in range {
            self.slots[self.len] = node.slot(at);
            self.len += 1;
        }
    }

    /// Gives one half of the slots to each of two private nodes; returns their summaries.
    fn deal(&self, mut low: NonNull<Node>, mut high: NonNull<Node>) -> [Slot; 2] {
        let (first, second) = self.slots[..self.len].split_at(self.len / 2);
        // SAFETY: both are private to the draft that deals, distinct, and not otherwise in use.
        let (l, h) = unsafe { (low.as_mut(), high.as_mut()) };
        l.splice(0, l.count(), first.iter().copied());
        h.splice(0, h.count(), second.iter().copied());
        [l.summary(low), h.summary(high)]
    }
}

/// Evens out two private neighbours; returns their summaries.
fn share(low: NonNull<Node>, high: NonNull<Node>) -> [Slot; 2] {
    let mut all = Run::default();
    for node in [low, high] {
        // SAFETY: the draft's nodes are valid while it lives.
        let node = unsafe { node.as_ref() };
        all.extend(node, 0..node.count());
    }
    all.deal(low, high)
}
