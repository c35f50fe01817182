//! The tree of mappings: disjoint ranges, in order, which faults find without a lock.
//!
//! The tree is a persistent B+tree. A published version never changes. A writer takes a short spin
//! lock and builds the next version, which shares all nodes with the current version except the
//! nodes on the paths to the change. One release store of the root publishes the next version. A
//! reader inside a grace section loads the root once, with acquire, and then sees that version,
//! whole: a change of several entries has happened in a version completely or not at all. A reader
//! takes no lock and writes nothing.
//!
//! A tree that several CPUs edit may be *parted* into [shards](shard): each shard is a persistent
//! B+tree with a writer's lock and versions of its own. A reader then has one complete version of
//! each shard that it reads, and loads the root of a shard on arriving there.
//!
//! While only one CPU uses a tree, the tree is in one piece and needs no versions: that CPU may
//! [change the current version in place](Spot::amend).
//!
//! After the store, the writer retires the nodes that are not in the next version to the grace
//! period; the section of a reader that can still be in these nodes began before. An edit that is
//! dropped before publishing frees its new nodes and has no other effect, so running out of memory
//! in the middle of a change needs no undoing.
//!
//! The tree does not follow the pointers to its values, and keeps no value alive: the writers do.
//! The sequence of a value tells a reader whether the entry is still in the tree.

mod amend;
mod draft;
mod gap;
mod node;
mod path;
mod shard;
#[cfg(all(test, not(loom)))]
mod tests;
mod version;
mod view;

pub use amend::Spot;
pub use gap::Gap;
pub use node::RETIRE_TREE_NODE;
pub use shard::{Parting, RETIRE_SHARD};
pub use version::{Entry, Found, Version};
pub use view::{EVERYWHERE, UNKNOWN, View};

use crate::addr::VirtRange;
use crate::error::OutOfMemory;
use crate::machine::CpuId;
use crate::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use crate::sync::grace::{Grace, RetireChain, RetireLink, Section};
use crate::sync::order::{self, ShardWriter, TreeWriter};
use crate::sync::percpu::{Local, Padded};
use crate::sync::spin::{SpinGuard, SpinLock};
use crate::sync::wait::{Wait, until_many};
use core::fmt;
use core::marker::PhantomData;
use core::ptr::{self, NonNull};
use draft::{CHUNK, Draft};
use node::{Node, Slot, Slots};
use shard::Shard;

/// A map from disjoint half-open ranges of addresses to `NonNull<T>`.
pub struct Tree<T> {
    /// A [`Root`].
    root: Padded<AtomicPtr<Node>>,
    writer: Padded<SpinLock<Writer, TreeWriter>>,
    /// The sum of the [grants](shard) of the shards. On a cache line of its own, which most edits
    /// only read.
    granted: Padded<AtomicU64>,
    marker: PhantomData<NonNull<T>>,
}

/// The meaning of the pointer to a root.
#[derive(Clone, Copy)]
enum Root {
    /// The tree is in one piece, and the pointer is its root; `None` while the tree has no entry.
    Entries(Option<NonNull<Node>>),
    /// The tree is in shards, and the pointer is the root of their directory. The stored pointer
    /// has `TAG` set.
    Shards(NonNull<Node>),
}

impl Root {
    const TAG: usize = 1;

    #[inline(always)]
    fn of(pointer: *mut Node) -> Self {
        if pointer.addr() & Self::TAG != 0
            && let Some(directory) = NonNull::new(pointer.map_addr(|addr| addr & !Self::TAG))
        {
            return Self::Shards(directory);
        }
        Self::Entries(NonNull::new(pointer))
    }

    fn pointer(self) -> *mut Node {
        match self {
            Self::Entries(root) => shard::pointer(root),
            Self::Shards(directory) => directory.as_ptr().map_addr(|addr| addr | Self::TAG),
        }
    }
}

/// State that the writers of a tree or shard hand on to each other.
#[derive(Debug)]
struct Writer {
    /// The number of edits begun. Edit numbers start at 1.
    edits: u64,
    /// The CPU that made the last edit, and the place.
    last: (CpuId, VirtRange),
    /// The number of *turns* since the tree or shard was parted. A turn is an edit by another CPU,
    /// and in another place, than the edit before.
    turns: u32,
    /// How often the number of turns before the next parting was doubled.
    backoff: u32,
}

impl Default for Writer {
    fn default() -> Self {
        let last = (CpuId(0), VirtRange::new(0, 0));
        Self { edits: 0, last, turns: 0, backoff: 0 }
    }
}

// SAFETY: the tree hands its `NonNull<T>` values to other threads, as a collection of `&T` would,
// and never follows them. Its nodes are shared by the protocol of the module.
unsafe impl<T: Sync> Send for Tree<T> {}
// SAFETY: as for `Send`.
unsafe impl<T: Sync> Sync for Tree<T> {}

impl<T> Tree<T> {
    /// Makes a tree without entries. Allocates nothing.
    pub fn new() -> Self {
        Self {
            root: Padded(AtomicPtr::new(ptr::null_mut())),
            writer: Padded(SpinLock::ordered(Writer::default())),
            granted: Padded(AtomicU64::new(0)),
            marker: PhantomData,
        }
    }

    #[inline(always)]
    fn root_now(&self, order: Ordering) -> Root {
        Root::of(self.root.load(order))
    }

    /// Returns the current tree.
    #[inline(always)]
    pub fn snapshot<'s>(&'s self, _section: &'s Section<'_>) -> View<'s, T> {
        // SAFETY: published nodes do not change, and the nodes of a version that was current during
        // the section outlive the section: they are retired to the grace period that the section
        // belongs to (the contract of `edit`) after the root has ceased to lead to them. The same
        // holds for the directory and the shards.
        unsafe { self.view() }
    }

    /// Returns the current version of a tree that is in one piece.
    ///
    /// # Safety
    /// The tree is in one piece, and stays so for `'s`. The tree of an owned space is, because a
    /// CPU that parts the tree first makes the space shared.
    #[inline(always)]
    pub unsafe fn version<'s>(&'s self, _section: &'s Section<'_>) -> Version<'s, T> {
        self.check_whole();
        // SAFETY: as in `snapshot`; the pointer is not tagged, by the caller's promise.
        unsafe { Version::new(NonNull::new(self.root.load(Ordering::Acquire))) }
    }

    /// # Safety
    /// Everything that the root leads to during `'s` is valid for `'s`.
    #[inline(always)]
    unsafe fn view<'s>(&self) -> View<'s, T> {
        // SAFETY: the caller's promise.
        unsafe {
            match self.root_now(Ordering::Acquire) {
                Root::Entries(root) => View::whole(Version::new(root)),
                Root::Shards(directory) => {
                    let nowhere = VirtRange::new(0, 0);
                    View::of_shards(Version::new(Some(directory)), nowhere, Version::EMPTY)
                }
            }
        }
    }

    /// Returns the whole tree of one moment. The call joins the shards. If there is no memory to
    /// join the shards, the call returns a view of shards, and each question to the view reads a
    /// shard.
    ///
    /// # Safety
    /// As [`edit`](Self::edit), and `section` is a section of the grace period.
    pub unsafe fn of_one_moment<'s>(
        &'s self,
        section: &'s Section<'_>,
        local: &Local,
        grace: &Grace,
        wait: &impl Wait,
    ) -> View<'s, T> {
        loop {
            let view = self.snapshot(section);
            if view.is_whole() || self.join(EVERYWHERE, (local, grace, wait)).is_err() {
                return view;
            }
        }
    }

    /// Returns whether the tree is in shards. Another CPU may part or join the tree at any time.
    #[inline]
    pub fn is_parted(&self) -> bool {
        matches!(self.root_now(Ordering::Relaxed), Root::Shards(_))
    }

    /// Checks that the root is not tagged, for a change in place. Models are compiled without debug
    /// assertions.
    #[inline(always)]
    fn check_whole(&self) {
        if cfg!(any(debug_assertions, shuttle)) {
            assert!(!self.is_parted(), "a tree in shards is changed in place");
        }
    }

    /// Joins all shards, and resets the number of turns before the next parting to the number of a
    /// new tree.
    ///
    /// # Errors
    /// [`OutOfMemory`]; nothing has changed.
    ///
    /// # Safety
    /// As [`edit`](Self::edit).
    pub unsafe fn unite(
        &self,
        local: &Local,
        grace: &Grace,
        wait: &impl Wait,
    ) -> Result<(), OutOfMemory> {
        if self.is_parted() {
            self.join(EVERYWHERE, (local, grace, wait))?;
            self.writer.lock(wait).backoff = 0;
        }
        Ok(())
    }

    /// Begins a change of any part, after a wait for the other writers. If the tree is in shards,
    /// the call joins the shards; otherwise the call allocates nothing.
    ///
    /// # Errors
    /// [`OutOfMemory`]: shards cannot be joined.
    ///
    /// # Safety
    /// - All edits of this tree receive the same `grace`, and every [`snapshot`] is taken in a
    ///   section of this grace period.
    /// - The value of an entry is alive while a published version has the entry, and afterwards
    ///   until the end of a grace period, or as long as no reader can have found the entry.
    ///
    /// [`snapshot`]: Self::snapshot
    pub unsafe fn edit<'e>(
        &'e self,
        local: &'e Local,
        grace: &'e Grace,
        wait: &'e impl Wait,
    ) -> Result<Edit<'e, T>, OutOfMemory> {
        loop {
            let writer = self.writer.lock(wait);
            if !self.is_parted() {
                // SAFETY: the caller's promise.
                return Ok(unsafe { Edit::of_whole(&self.root, writer, local, grace) });
            }
            drop(writer);
            self.join(EVERYWHERE, (local, grace, wait))?;
        }
    }

    /// Begins a change of `place`, after a wait for the other writers of the tree, or of the shard
    /// that has `place`. If `place` is in several shards, the call first joins these shards. If the
    /// tree or the shard is due for parting, and there is a bound, the call first parts the tree or
    /// shard.
    ///
    /// # Errors
    /// [`OutOfMemory`]: shards cannot be joined.
    ///
    /// # Safety
    /// As [`edit`](Self::edit), and `section` is a section of the grace period.
    pub unsafe fn edit_in<'e>(
        &'e self,
        place: VirtRange,
        parting: &Parting<'_, T>,
        _section: &'e Section<'_>,
        local: &'e Local,
        grace: &'e Grace,
        wait: &'e impl Wait,
    ) -> Result<Edit<'e, T>, OutOfMemory> {
        let tools = (local, grace, wait);
        loop {
            let Root::Shards(directory) = self.root_now(Ordering::Acquire) else {
                let mut writer = self.writer.lock(wait);
                let Root::Entries(root) = self.root_now(Ordering::Relaxed) else { continue };
                // SAFETY: the lock keeps other writers out, so this version stays current, and the
                // section keeps its nodes.
                let version = unsafe { Version::new(root) };
                if let Some(last) = writer.turn(local.id(), place, parting.after, || version.len())
                {
                    let bound = parting.bound(version, last, place);
                    if bound.is_some_and(|at| self.part(&mut writer, at, parting, tools).is_ok()) {
                        continue;
                    }
                }
                // SAFETY: the caller's promise.
                return Ok(unsafe { Edit::of_whole(&self.root, writer, local, grace) });
            };
            // SAFETY: the root led to the directory in the section, which keeps the directory and
            // its shards.
            let shards: Version<'_, Shard<T>> = unsafe { Version::new(Some(directory)) };
            let found = shards.at(place.start);
            let Some(found) = found.filter(|shard| shard.range().covers(place)) else {
                self.join(place, tools)?;
                continue;
            };
            // SAFETY: in the directory, whose shards the section keeps.
            let shard: &Shard<T> = unsafe { found.value.as_ref() };
            let writer = shard.writer.lock_unless(wait, || shard.has_ended());
            let Some(mut writer) = writer.filter(|_| !shard.has_ended()) else {
                // A CPU parts or joins the shard, and will publish another directory, or reopen the
                // shard.
                order::before::<TreeWriter>(wait);
                let same = Root::Shards(directory).pointer();
                until_many(wait, || {
                    self.root.load(Ordering::Relaxed) != same || !shard.has_ended()
                });
                continue;
            };
            // SAFETY: the shard was found in the section.
            let version = unsafe { shard.version() };
            if let Some(last) = writer.turn(local.id(), place, parting.after, || version.len())
                && let Some(bound) = parting.bound(version, last, place)
            {
                drop(writer);
                // Without memory for the parting, the shard stays in one piece.
                let _ = self.part(&mut self.writer.lock(wait), bound, parting, tools);
                continue;
            }
            // SAFETY: this is the shard's writer, and the edit keeps its lock.
            let draft = unsafe { writer.begin(&shard.root) };
            let (part, root, lock) = (found.range(), &*shard.root, Held::Shard(writer));
            let shard = Some((shard, &*self.granted));
            return Ok(Edit { root, draft, shard, part, shards, local, grace, lock });
        }
    }

    /// Makes `spot` the first entry of the current version that ends above `addr`, for a change in
    /// place.
    ///
    /// # Safety
    /// As [`version`](Self::version).
    #[inline(always)]
    pub unsafe fn lead<'s>(&'s self, spot: &mut Spot<'s, T>, _section: &'s Section<'_>, addr: u64) {
        self.check_whole();
        // SAFETY: as in `snapshot`; the pointer is not tagged, by the caller's promise.
        unsafe { spot.lead(NonNull::new(self.root.load(Ordering::Acquire)), addr) };
    }

    /// [`edit`](Self::edit) without a wait, for a tree in one piece that no other CPU can reach.
    ///
    /// # Safety
    /// As [`edit`](Self::edit).
    pub unsafe fn edit_mut<'e>(&'e mut self, local: &'e Local, grace: &'e Grace) -> Edit<'e, T> {
        debug_assert!(!self.is_parted());
        // SAFETY: the caller's promise.
        unsafe { Edit::of_whole(&self.root, self.writer.lock_mut(), local, grace) }
    }

    /// Returns the current tree, if nothing else refers to the tree.
    pub fn view_mut(&mut self) -> View<'_, T> {
        // SAFETY: views and edits borrow the tree, so it does not change.
        unsafe { self.view() }
    }

    /// Frees all nodes, which leaves the tree without entries.
    pub fn destroy(&mut self) {
        let root = self.root_now(Ordering::Relaxed);
        if let Root::Shards(directory) = root {
            // SAFETY: views and edits borrow the tree, so there are none.
            let shards: Version<'_, Shard<T>> = unsafe { Version::new(Some(directory)) };
            for shard in shards.iter() {
                // SAFETY: only the directory leads to the shard, and each shard is in the directory
                // once.
                unsafe { shard::free(shard.value.cast()) };
            }
        }
        self.root.store(ptr::null_mut(), Ordering::Relaxed);
        let (Root::Entries(Some(root)) | Root::Shards(root)) = root else { return };
        // SAFETY: views and edits borrow the tree, so there are none.
        unsafe { draft::free_subtree(root, None) };
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

/// Frees the tree node or shard that `link` belongs to, a retired link of kind [`RETIRE_TREE_NODE`]
/// or [`RETIRE_SHARD`].
///
/// # Safety
/// The link was collected from the grace period that [`Tree::edit`] was given, and is freed once.
pub unsafe fn free_retired(link: NonNull<RetireLink>) {
    // SAFETY: the object that holds the link is alive until this call frees the object; its grace
    // period is over, so no reader has a reference.
    unsafe {
        match link.as_ref().kind() {
            RETIRE_SHARD => shard::free(link),
            _ => node::free_link(link),
        }
    }
}

/// A change of the tree, invisible until it is published. A dropped edit changes nothing.
///
/// After an [`OutOfMemory`] the next version may hold a part of the failed call: drop the edit.
pub struct Edit<'e, T> {
    /// The root of the tree, or of the shard that is changed.
    root: &'e AtomicPtr<Node>,
    // Before the lock, so that a dropped edit cleans up under the lock.
    draft: Draft,
    /// If the tree is in shards: the changed shard, and the sum of all grants.
    shard: Option<(&'e Shard<T>, &'e AtomicU64)>,
    /// The addresses whose entries the edit may change: the addresses of the shard, or all.
    part: VirtRange,
    /// The directory of the shards; empty if the tree is in one piece.
    shards: Version<'e, Shard<T>>,
    local: &'e Local,
    grace: &'e Grace,
    lock: Held<'e>,
}

/// The lock that keeps other writers away.
#[expect(dead_code, reason = "held until the drop")]
enum Held<'e> {
    Tree(SpinGuard<'e, Writer, TreeWriter>),
    Shard(SpinGuard<'e, Writer, ShardWriter>),
}

impl Writer {
    /// Returns the draft of the next version of the tree or shard with `root`.
    ///
    /// # Safety
    /// This is the writer of that tree or shard, whose lock is held while the draft lives.
    /// Otherwise as [`Tree::edit`].
    #[inline(always)]
    unsafe fn begin(&mut self, root: &AtomicPtr<Node>) -> Draft {
        self.edits += 1;
        // Only the holder of the lock stores, so this load returns the last version.
        let last = NonNull::new(root.load(Ordering::Relaxed));
        // SAFETY: only a writer retires nodes, and the lock excludes others while the edit lives;
        // the lock also hands on the use of their links. Edit numbers do not repeat.
        unsafe { Draft::new(last, self.edits) }
    }
}

impl<'e, T> Edit<'e, T> {
    /// An edit of a tree in one piece.
    ///
    /// # Safety
    /// `writer` is the lock of the tree with `root`; otherwise as [`Tree::edit`].
    #[inline(always)]
    unsafe fn of_whole(
        root: &'e AtomicPtr<Node>,
        mut writer: SpinGuard<'e, Writer, TreeWriter>,
        local: &'e Local,
        grace: &'e Grace,
    ) -> Self {
        // SAFETY: the caller's promise.
        let draft = unsafe { writer.begin(root) };
        let (part, shards, lock) = (EVERYWHERE, Version::EMPTY, Held::Tree(writer));
        Self { root, draft, shard: None, part, shards, local, grace, lock }
    }

    /// Returns the next version of the tree, or of the changed shard, as built so far.
    #[inline(always)]
    pub fn own(&self) -> Version<'_, T> {
        // SAFETY: the draft's nodes are valid while the draft lives, and change only through
        // `&mut self`.
        unsafe { Version::new(self.draft.root()) }
    }

    /// Returns the tree, with the next version of the changed shard. Each question about another
    /// shard reads that shard.
    #[inline(always)]
    pub fn view(&self) -> View<'_, T> {
        // SAFETY: if there are shards, the edit was begun in a section, which the edit borrows and
        // which keeps the shards (`edit_in`).
        unsafe { View::of_shards(self.shards, self.part, self.own()) }
    }

    /// Returns whether the next version of the tree has at most `most` entries. If the tree is in
    /// shards, false may be wrong, because the call compares the [grants](shard) of the shards.
    /// Only an edit of the whole tree gives the exact answer.
    #[inline(always)]
    pub fn fits(&self, most: u64) -> bool {
        let entries = self.own().len() as u64;
        match self.shard {
            None => entries <= most,
            Some((shard, granted)) => shard.grant(entries, granted, most),
        }
    }

    /// Returns whether the edit changes a tree in one piece, and not one shard.
    #[inline]
    pub fn is_whole(&self) -> bool {
        self.shard.is_none()
    }

    /// Adds an entry. The range must be free and not empty.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the heap is exhausted; the next version stays unchanged.
    pub fn insert(&mut self, start: u64, end: u64, value: NonNull<T>) -> Result<(), OutOfMemory> {
        debug_assert!(self.own().find(start).is_none_or(|next| next.start >= end));
        self.replace(VirtRange::new(start, end), &[Entry { start, end, value }], |_| {})
    }

    /// Removes the entry that starts at `start`, and returns the entry if there was one.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the heap is exhausted; the next version stays unchanged.
    #[cfg(all(test, not(loom)))]
    pub fn remove(&mut self, start: u64) -> Result<Option<Entry<T>>, OutOfMemory> {
        let found = self.own().find(start).filter(|entry| entry.start == start);
        let Some(entry) = found.map(|found| *found) else { return Ok(None) };
        self.replace(entry.range(), &[], |_| {})?;
        Ok(Some(entry))
    }

    /// Removes every entry that overlaps `range`, all of which must be inside the range, and
    /// inserts `new`: disjoint entries inside the range, in order. Calls `gone` with the removed
    /// entries, even on failure.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the heap is exhausted.
    #[inline]
    pub fn replace(
        &mut self,
        range: VirtRange,
        new: &[Entry<T>],
        mut gone: impl FnMut(Entry<T>),
    ) -> Result<(), OutOfMemory> {
        check(range, new);
        debug_assert!(self.part.covers(range));
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

    /// Makes the next version the current one. Cannot fail.
    pub fn publish(self) {
        // SAFETY: nothing is retired.
        unsafe { self.publish_retiring(RetireChain::default()) };
    }

    /// Makes the next version the current one, and retires `objects`, which only entries led to
    /// that are not in the next version. Cannot fail.
    ///
    /// # Safety
    /// As [`Grace::retire_all`], once the next version is current.
    #[inline(always)]
    pub unsafe fn publish_retiring(self, objects: RetireChain) {
        let Self { root, draft, local, grace, lock, .. } = self;
        let (next, mut retired) = draft.finish();
        root.store(shard::pointer(next), Ordering::Release);
        // A retired list has a lock of its own, and a CPU holds one leaf lock at a time.
        drop(lock);
        // SAFETY: the root that was just stored does not lead to the nodes, so no section that
        // begins from now on reaches them; they are retired once, since they were in one version
        // and are not in the next. A node's link is its first field, and the pointer to the node
        // covers the whole node. For the objects, the caller's promise.
        unsafe {
            retired.prepend(objects);
            if !retired.is_empty() {
                grace.retire_all(local, retired);
            }
        }
    }
}

/// Checks the entries that are to replace `range`, in builds with checks.
#[inline(always)]
fn check<T>(range: VirtRange, new: &[Entry<T>]) {
    debug_assert!(new.iter().all(|e| e.start < e.end && range.covers(e.range())));
    debug_assert!(new.is_sorted_by(|a, b| a.end <= b.start));
}

/// Returns the entry in `slot`, of a leaf.
#[inline(always)]
fn entry_of<T>(slot: Slot) -> Entry<T> {
    let Slot { start, end, target, .. } = slot;
    Entry { start, end, value: target.cast() }
}

/// Returns the slot of `entry`, of a leaf.
#[inline(always)]
fn slot_of<T>(entry: Entry<T>) -> Slot {
    let Entry { start, end, value } = entry;
    Slot { start, end, gap: 0, target: value.cast() }
}

/// Returns the slots of `entries`.
fn slots<T>(entries: &[Entry<T>]) -> impl Slots {
    entries.iter().map(|entry| slot_of(*entry))
}

impl<T> fmt::Debug for Edit<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Edit").field("next", &self.view()).finish_non_exhaustive()
    }
}
