//! The tree of mappings: ranges that do not overlap, in order, found by faults without a lock.
//!
//! It is a persistent B+tree. A version that was published is never modified: a writer takes a
//! short spin lock, builds the next version, which shares with the present one all nodes but those
//! on the paths to what it changes, and publishes it by one release store of the root. A reader
//! inside a grace section loads the root once, with acquire, and from then on sees that version,
//! whole: each change of several entries at once has happened in it or has not. It takes no lock
//! and writes nothing.
//!
//! While only one CPU uses a tree, it needs no versions. Then the present one may be [changed in place](Tree::amend).
//!
//! Nodes that the next version no longer has are retired to the grace period after the store; a
//! reader that can still be in them began its section before. An edit that is dropped without
//! being published frees what it made and has never happened, so that running out of memory in the
//! middle of a change needs no undoing.
//!
//! The tree knows nothing of what it holds: an entry's value is a pointer that it does not follow.
//! Whether the entry is still in the tree when the reader looks behind the pointer is the business
//! of the sequence there.

mod amend;
mod draft;
mod gap;
mod node;
mod path;
#[cfg(all(test, not(loom)))]
mod tests;
mod view;

pub use node::{RETIRE_TREE_NODE, free_retired};
pub use view::{Entry, View};

use crate::addr::VirtRange;
use crate::error::OutOfMemory;
use crate::sync::atomic::{AtomicPtr, Ordering};
use crate::sync::grace::{Grace, RetireChain, Section};
use crate::sync::order::TreeWriter;
use crate::sync::percpu::{Local, Padded};
use crate::sync::spin::{SpinGuard, SpinLock};
use crate::sync::wait::Wait;
use amend::amend;
use core::fmt;
use core::marker::PhantomData;
use core::ptr::{self, NonNull};
use draft::{CHUNK, Draft};
use node::{Node, Slot, Slots};

/// A map from disjoint half-open ranges of addresses to `NonNull<T>`.
pub struct Tree<T> {
    /// Null while there is no entry.
    root: Padded<AtomicPtr<Node>>,
    writer: Padded<SpinLock<Writer, TreeWriter>>,
    marker: PhantomData<NonNull<T>>,
}

/// What the writers hand on to each other.
#[derive(Debug)]
struct Writer {
    /// How many edits have begun. Their numbers start with 1.
    edits: u64,
}

// SAFETY: the tree hands its `NonNull<T>` values to other threads, as a collection of `&T` would,
// and never follows them. Its nodes are shared as the module's protocol says.
unsafe impl<T: Sync> Send for Tree<T> {}
// SAFETY: as for `Send`.
unsafe impl<T: Sync> Sync for Tree<T> {}

impl<T> Tree<T> {
    /// A tree without entries. Allocates nothing.
    pub fn new() -> Self {
        Self {
            root: Padded(AtomicPtr::new(ptr::null_mut())),
            writer: Padded(SpinLock::ordered(Writer { edits: 0 })),
            marker: PhantomData,
        }
    }

    /// The present version.
    #[inline(always)]
    pub fn snapshot<'s>(&'s self, _section: &'s Section<'_>) -> View<'s, T> {
        let root = NonNull::new(self.root.load(Ordering::Acquire));
        // SAFETY: published nodes do not change, and those of a version that was current during
        // the section outlive it: they are retired to the grace period that the section belongs
        // to (the contract of `edit`) after the root has ceased to lead to them.
        unsafe { View::new(root) }
    }

    /// Begins a change: waits for the other writer, if there is one. Allocates nothing.
    ///
    /// # Safety
    /// All edits of this tree are given the same `grace`, and every [`snapshot`] is taken
    /// in one of its sections.
    ///
    /// [`snapshot`]: Self::snapshot
    pub unsafe fn edit<'e>(
        &'e self,
        local: &'e Local,
        grace: &'e Grace,
        wait: &'e impl Wait,
    ) -> Edit<'e, T> {
        // SAFETY: handed on.
        unsafe { Edit::begin(&self.root, self.writer.lock(wait), local, grace) }
    }

    /// Changes the present version itself, as [`Edit::replace`] makes the next: if all of that is in one leaf, which neither
    /// splits nor joins another, and `new` is short. Returns whether it did; else nothing has changed, and it takes an edit.
    ///
    /// # Safety
    /// No other edit is under way, and no view of the tree is used after this call.
    #[inline(always)]
    pub unsafe fn amend(
        &self,
        range: VirtRange,
        new: &[Entry<T>],
        mut gone: impl FnMut(Entry<T>),
    ) -> bool {
        check(range, new);
        let root = NonNull::new(self.root.load(Ordering::Relaxed));
        let gone = |slot: Slot| gone(entry_of(slot));
        // SAFETY: handed on.
        new.len() <= CHUNK
            && root.is_some_and(|root| unsafe { amend(root, range, slots(new), gone) })
    }

    /// [`edit`](Self::edit) of a tree that no other CPU can reach: it does not wait.
    ///
    /// # Safety
    /// As [`edit`](Self::edit).
    pub unsafe fn edit_mut<'e>(&'e mut self, local: &'e Local, grace: &'e Grace) -> Edit<'e, T> {
        // SAFETY: handed on.
        unsafe { Edit::begin(&self.root, self.writer.lock_mut(), local, grace) }
    }

    /// The present version, of a tree that nothing else refers to.
    pub fn view_mut(&mut self) -> View<'_, T> {
        let root = NonNull::new(self.root.load(Ordering::Relaxed));
        // SAFETY: views and edits borrow the tree, so it does not change.
        unsafe { View::new(root) }
    }

    /// Frees all nodes, which leaves the tree without entries.
    pub fn destroy(&mut self) {
        if let Some(root) = NonNull::new(self.root.load(Ordering::Relaxed)) {
            self.root.store(ptr::null_mut(), Ordering::Relaxed);
            // SAFETY: views and edits borrow the tree, so there are none.
            unsafe { draft::free_subtree(root, None) };
        }
    }
}

impl<T> Drop for Tree<T> {
    fn drop(&mut self) {
        self.destroy();
    }
}

impl<T> Default for Tree<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> fmt::Debug for Tree<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tree").finish_non_exhaustive()
    }
}

/// A change of the tree, invisible until it is published. If it is dropped, nothing has changed.
///
/// After an [`OutOfMemory`] the next version may hold a part of the failed call: drop the edit.
pub struct Edit<'e, T> {
    /// The tree's.
    root: &'e AtomicPtr<Node>,
    // Before the lock, so that an edit that is dropped cleans up under it.
    draft: Draft,
    local: &'e Local,
    grace: &'e Grace,
    writer: SpinGuard<'e, Writer, TreeWriter>,
    marker: PhantomData<&'e Tree<T>>,
}

impl<'e, T> Edit<'e, T> {
    /// # Safety
    /// `writer` is the lock of the tree with `root`; otherwise as [`Tree::edit`].
    unsafe fn begin(
        root: &'e AtomicPtr<Node>,
        mut writer: SpinGuard<'e, Writer, TreeWriter>,
        local: &'e Local,
        grace: &'e Grace,
    ) -> Self {
        writer.edits += 1;
        // Only the holder of the lock stores, so what it loads is the last version.
        let last = NonNull::new(root.load(Ordering::Relaxed));
        // SAFETY: only a writer retires nodes, and the lock excludes others while the edit lives;
        // it also hands on the use of their links. Edit numbers do not repeat.
        let draft = unsafe { Draft::new(last, writer.edits) };
        Self { root, draft, local, grace, writer, marker: PhantomData }
    }

    /// The next version, as far as it is built.
    pub fn view(&self) -> View<'_, T> {
        // SAFETY: the draft's nodes are valid while it lives, and change only through `&mut self`.
        unsafe { View::new(self.draft.root()) }
    }

    /// Adds an entry. Its range must be free and not empty.
    ///
    /// # Errors
    /// [`OutOfMemory`] when the heap is exhausted; the next version is as it was.
    pub fn insert(&mut self, start: u64, end: u64, value: NonNull<T>) -> Result<(), OutOfMemory> {
        debug_assert!(self.view().find(start).is_none_or(|next| next.start >= end));
        self.replace(VirtRange::new(start, end), &[Entry { start, end, value }], |_| {})
    }

    /// Removes the entry that starts at `start` and returns it, if there is one.
    ///
    /// # Errors
    /// [`OutOfMemory`] when the heap is exhausted; the next version is as it was.
    #[cfg(all(test, not(loom)))]
    pub fn remove(&mut self, start: u64) -> Result<Option<Entry<T>>, OutOfMemory> {
        let Some(entry) = self.view().find(start).filter(|entry| entry.start == start) else {
            return Ok(None);
        };
        self.replace(entry.range(), &[], |_| {})?;
        Ok(Some(entry))
    }

    /// Removes every entry that overlaps `range`, which must lie wholly inside it, and inserts
    /// `new`: disjoint entries inside the range, in order. Tells `gone` what was there, even if it
    /// fails.
    ///
    /// # Errors
    /// [`OutOfMemory`] when the heap is exhausted.
    #[inline]
    pub fn replace(
        &mut self,
        range: VirtRange,
        new: &[Entry<T>],
        mut gone: impl FnMut(Entry<T>),
    ) -> Result<(), OutOfMemory> {
        check(range, new);
        let (first, rest) = new.split_at(new.len().min(CHUNK));
        self.draft.replace(range, slots(first), |slot| {
            let entry = entry_of(slot);
            debug_assert!(range.covers(entry.range()));
            gone(entry);
        })?;
        for more in rest.chunks(CHUNK) {
            let range = VirtRange::new(more[0].start, more[more.len() - 1].end);
            self.draft.replace(range, slots(more), |_| {})?;
        }
        Ok(())
    }

    /// Makes the next version the present one. Cannot fail.
    pub fn publish(self) {
        // SAFETY: nothing is retired.
        unsafe { self.publish_retiring(RetireChain::default()) };
    }

    /// Makes the next version the present one, and retires `objects`, which only entries led to that
    /// it has no more. Cannot fail.
    ///
    /// # Safety
    /// As [`Grace::retire_all`], once the next version is the present one.
    #[inline(always)]
    pub unsafe fn publish_retiring(self, objects: RetireChain) {
        let Self { root, draft, local, grace, writer, .. } = self;
        let (next, mut retired) = draft.finish();
        root.store(next.map_or(ptr::null_mut(), NonNull::as_ptr), Ordering::Release);
        // What is retired has a lock of its own, and one leaf is held at a time.
        drop(writer);
        // SAFETY: the root that was just stored does not lead to the nodes, so no section that
        // begins from now on reaches them; they are retired once, since they were in one version and
        // are not in the next. A node's link is its first field, and its pointer covers all of it.
        // For the objects, the caller's promise.
        unsafe {
            retired.prepend(objects);
            if !retired.is_empty() {
                grace.retire_all(local, retired);
            }
        }
    }
}

/// Checks what is to be put in the place of `range`, where checks are made.
#[inline(always)]
fn check<T>(range: VirtRange, new: &[Entry<T>]) {
    debug_assert!(new.iter().all(|e| e.start < e.end && range.covers(e.range())));
    debug_assert!(new.is_sorted_by(|a, b| a.end <= b.start));
}

/// The entry in `slot`, of a leaf.
#[inline(always)]
fn entry_of<T>(slot: Slot) -> Entry<T> {
    let Slot { start, end, target, .. } = slot;
    Entry { start, end, value: target.cast() }
}

/// The slots of `entries`.
fn slots<T>(entries: &[Entry<T>]) -> impl Slots {
    let slot = |entry: &Entry<T>| {
        let Entry { start, end, value } = *entry;
        Slot { start, end, gap: 0, target: value.cast() }
    };
    entries.iter().map(slot)
}

impl<T> fmt::Debug for Edit<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Edit").field("next", &self.view()).finish_non_exhaustive()
    }
}
