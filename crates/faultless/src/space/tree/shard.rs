//! Shards: a tree in parts, each of which has a writer and versions of its own.
//!
//! One root is enough for few writers. If many CPUs edit a tree, each edit waits for the one
//! writer's lock, and copies nodes that another CPU has just written. So a tree that CPUs edit in
//! turns, each in its own place, is *parted* between two of these places. Its root then leads to a
//! *directory*, which is a persistent tree, too. The entries of the directory are the shards, and
//! together they cover every address. Protocol:
//!
//! - An *edit* changes one shard. Its writer finds the shard in the directory, takes the shard's
//!   lock, and checks whether the shard has *ended*. If it has, another CPU is replacing the shard:
//!   the writer waits until the root leads to another directory, or the shard is reopened, and
//!   starts over. Edits of different shards write no common line.
//! - If an edit's place is in several shards, its writer *joins* them first.
//! - A CPU that *parts* or *joins* holds the lock of the tree. It ends the shards concerned, each
//!   under the shard's lock; builds new shards, or a tree in one piece, from their entries; and
//!   publishes a new directory, or the new root. If there is no memory for that, it reopens the
//!   shards.
//! - A *reader* loads the root of the tree, and the root of each shard when it comes to it. A shard
//!   that has ended shows its last version, which was current when the directory was. The
//!   directory, its shards and their nodes are freed after a grace period.
//!
//! *Invariant (whole entries):* no entry lies across a bound between shards. Two entries that touch
//! at a bound are such that [may be parted](Parting::may).
//!
//! *Invariant (directory):* only the holder of the tree's lock changes the root of the tree while
//! the tree is in shards, and so the directory. So what the directory has is valid as long as that
//! lock is held.
//!
//! *Invariant (last version):* only the holder of a shard's lock publishes a version of the shard,
//! and only if the shard has not ended. A shard is ended and reopened by the holder of the tree's
//! lock. So while that lock is held, the version of a shard that has ended is final.
//!
//! A tree has a limit of entries. Each shard is *granted* a number of entries, of at least as many
//! as it has. A shard that needs more is granted more, as long as the sum of all grants does not
//! exceed the limit. If it would, the shards are joined, and their entries counted.

use super::draft::{self, Draft};
use super::node::Node;
use super::version::{Entry, Found, Version};
use super::view::EVERYWHERE;
use super::{Root, Tree, Writer, slots};
use crate::addr::VirtRange;
use crate::error::OutOfMemory;
use crate::heap;
use crate::machine::{CpuId, MAX_CPUS};
use crate::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use crate::sync::grace::{Grace, RetireChain, RetireLink};
use crate::sync::mutant::{Mutant, lost};
use crate::sync::order::ShardWriter;
use crate::sync::percpu::{Local, Padded};
use crate::sync::spin::SpinLock;
use crate::sync::wait::Wait;
use alloc::boxed::Box;
use core::marker::PhantomData;
use core::ptr::{self, NonNull};

/// The `kind` by which the reclaimer of retired objects knows a shard.
pub const RETIRE_SHARD: u8 = 3;

/// Shards of a tree, at most.
const MOST_SHARDS: usize = MAX_CPUS;
/// How many more entries than it needs a shard is granted.
const SPARE: u64 = 64;
/// How many entries a search for a bound looks at, at most.
const MOST_LOOKS: usize = 64;
/// A tree or shard is parted only after at least one turn for so many of its entries, as parting
/// copies them all.
const COPIED: usize = 16;
/// How many edits make up for the cost of parting a shard. If it is joined after fewer, the next
/// parting waits for more turns.
const LIFE: u32 = 32;
/// How often the number of turns before a parting doubles, at most.
const MOST_BACKOFF: u32 = 8;

/// A part of a tree.
#[repr(C)]
pub struct Shard<T> {
    /// First, so that a link is a shard.
    retire: RetireLink,
    pub(super) root: Padded<AtomicPtr<Node>>,
    pub(super) writer: Padded<SpinLock<Writer, ShardWriter>>,
    /// How many entries it may have. Only the holder of its lock changes this, and `ended`.
    pub(super) granted: AtomicU64,
    /// Other shards, or a tree in one piece, replace it, or will soon.
    ended: AtomicBool,
    marker: PhantomData<NonNull<T>>,
}

impl<T> Shard<T> {
    /// A shard with the entries under `root`, which it owns from now on. Its writer begins with
    /// this `backoff`.
    ///
    /// # Errors
    /// [`OutOfMemory`]; the entries' nodes are freed.
    fn try_new(root: Option<NonNull<Node>>, backoff: u32) -> Result<NonNull<Self>, OutOfMemory> {
        // SAFETY: the caller has just built what `root` leads to, and no other CPU reaches it.
        let len = root.map_or(0, |root| unsafe { root.as_ref() }.extent().entries);
        let writer = Writer { backoff, ..Writer::default() };
        let made = heap::try_box_with(|| Self {
            retire: RetireLink::new(RETIRE_SHARD),
            root: Padded(AtomicPtr::new(pointer(root))),
            writer: Padded(SpinLock::ordered(writer)),
            granted: AtomicU64::new(len as u64 + SPARE),
            ended: AtomicBool::new(false),
            marker: PhantomData,
        });
        match made {
            Ok(shard) => Ok(NonNull::from(Box::leak(shard))),
            Err(oom) => {
                // SAFETY: as above: nothing else leads to the nodes.
                unsafe { free_entries(root) };
                Err(oom)
            }
        }
    }

    /// Whether it has ended: nothing may be published in it, unless it is reopened.
    #[inline]
    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire) && !lost(Mutant::ShardEnds)
    }

    /// Ends it, which makes its last version final. Returns what `of` says of its writer.
    fn end(&self, wait: &impl Wait, of: impl FnOnce(&Writer) -> u32) -> u32 {
        let writer = self.writer.lock(wait);
        self.ended.store(true, Ordering::Release);
        of(&writer)
    }

    /// Reopens a shard that has ended: it was not replaced.
    fn reopen(&self, wait: &impl Wait) {
        let _writer = self.writer.lock(wait);
        self.ended.store(false, Ordering::Release);
    }

    /// Whether it may have `entries`. If it was granted fewer, it is granted more, which is added
    /// to `granted`, the sum of what all shards of the tree are granted, which must not exceed
    /// `most`. The caller holds its lock.
    pub(super) fn grant(&self, entries: u64, granted: &AtomicU64, most: u64) -> bool {
        let own = self.granted.load(Ordering::Relaxed);
        if entries <= own {
            // The limit may have been lowered.
            return granted.load(Ordering::Relaxed) <= most;
        }
        let more = entries - own + SPARE;
        if granted.fetch_add(more, Ordering::Relaxed) + more > most {
            granted.fetch_sub(more, Ordering::Relaxed);
            return false;
        }
        self.granted.store(own + more, Ordering::Relaxed);
        true
    }

    /// The present version.
    ///
    /// # Safety
    /// The shard was found in a grace section that lasts for `'s`. Or the caller holds the lock of
    /// the tree for `'s`, and the shard is in the directory and has ended.
    #[inline]
    pub(super) unsafe fn version<'s>(&self) -> Version<'s, T> {
        // SAFETY: in a section: nodes are retired after the root has ceased to lead to them, or
        // with the shard. With the lock of the tree: the version is final (last version), and its
        // nodes are retired with the shard, by the caller.
        unsafe { Version::new(NonNull::new(self.root.load(Ordering::Acquire))) }
    }
}

impl<T> Drop for Shard<T> {
    fn drop(&mut self) {
        // SAFETY: the shard is dropped, so nothing refers to it or reads its last version; it owns
        // that version's nodes.
        unsafe { free_entries(NonNull::new(self.root.load(Ordering::Relaxed))) };
    }
}

/// Frees the shard that `link`, a retired link of kind [`RETIRE_SHARD`], belongs to.
///
/// # Safety
/// As [`free_retired`](super::free_retired).
pub(super) unsafe fn free(link: NonNull<RetireLink>) {
    // SAFETY: a link of this kind is the first field of a shard that `try_new` made as a box, and
    // by the caller's promise no reader is left. The layout of a shard does not depend on `T`, and
    // values of entries are not followed.
    drop(unsafe { Box::from_raw(link.cast::<Shard<()>>().as_ptr()) });
}

/// # Safety
/// The nodes are reachable through `root` alone, and are not being read.
unsafe fn free_entries(root: Option<NonNull<Node>>) {
    if let Some(root) = root {
        // SAFETY: handed on.
        unsafe { draft::free_subtree(root, None) };
    }
}

/// A root as a pointer.
#[inline(always)]
pub(super) fn pointer(root: Option<NonNull<Node>>) -> *mut Node {
    root.map_or(ptr::null_mut(), NonNull::as_ptr)
}

/// When a tree is parted, and where.
pub struct Parting<'p, T> {
    /// After how many turns. A turn is an edit by another CPU, and in another place, than the edit
    /// before. 0: never.
    pub after: u32,
    /// The bounds of shards are multiples of this, a power of two.
    pub align: u64,
    /// How many entries a tree may have. One that has, or whose shards are granted, about half as
    /// many is not parted.
    pub most: u64,
    /// Whether a bound may be where two entries touch: the lower one, and the upper one.
    pub may: &'p dyn Fn(Found<'_, T>, Found<'_, T>) -> bool,
}

impl<T> Parting<'_, T> {
    /// The best bound between `one` and `other`, which do not overlap, in a tree or shard: of those
    /// that were looked at, the multiple of the highest power of two. If the places of CPUs are a
    /// round distance apart, such a bound is between two places, and not inside one.
    pub(super) fn bound(
        &self,
        version: Version<'_, T>,
        one: VirtRange,
        other: VirtRange,
    ) -> Option<u64> {
        let (low, high) = if one.start < other.start { (one, other) } else { (other, one) };
        let (mut from, high) = (low.end, high.start);
        let mut best = None;
        for entry in version.iter_from(from).take(MOST_LOOKS) {
            let to = entry.start.min(high);
            let found = roundest(from, to, self.align).filter(|&at| self.is_bound(version, at));
            best = best.into_iter().chain(found).max_by_key(|at: &u64| at.trailing_zeros());
            if entry.end > high {
                return best;
            }
            from = entry.end;
        }
        let last = roundest(from, high, self.align).filter(|&at| self.is_bound(version, at));
        best.into_iter().chain(last).max_by_key(|at| at.trailing_zeros())
    }

    /// Whether a bound may be at `addr`: in no entry, and between no two that must stay together
    /// (whole entries).
    fn is_bound(&self, version: Version<'_, T>, addr: u64) -> bool {
        match version.around(addr) {
            (_, Some(above)) if above.start < addr => false,
            (Some(below), Some(above)) if below.end == addr && above.start == addr => {
                (self.may)(below, above)
            }
            _ => true,
        }
    }
}

/// Of the multiples of `align` from `low` to `high`, that of the highest power of two.
fn roundest(low: u64, high: u64, align: u64) -> Option<u64> {
    let low = low.checked_next_multiple_of(align).filter(|low| *low <= high)?;
    let high = high & !(align - 1);
    let Some(bit) = (low ^ high).checked_ilog2() else { return Some(low) };
    let middle = high >> bit << bit;
    Some(if low.trailing_zeros() > middle.trailing_zeros() { low } else { middle })
}

impl Writer {
    /// Notes an edit of `place` by `cpu`, in a tree or shard with `entries`. If it is time to part
    /// it, returns the place of the edit before.
    #[inline(always)]
    pub(super) fn turn(
        &mut self,
        cpu: CpuId,
        place: VirtRange,
        after: u32,
        entries: impl FnOnce() -> usize,
    ) -> Option<VirtRange> {
        let (by, last) = core::mem::replace(&mut self.last, (cpu, place));
        if by == cpu || after == 0 || last.is_empty() || last.overlaps(place) {
            return None;
        }
        self.turns += 1;
        // Parting copies all entries.
        if self.turns < self.turns_to_part(after) || (self.turns as usize) < entries() / COPIED {
            return None;
        }
        self.turns = 0;
        Some(last)
    }

    /// `after`, doubled as often as `backoff` says.
    fn turns_to_part(&self, after: u32) -> u32 {
        after << self.backoff
    }

    /// The backoff for the shard or tree that this shard is joined into: more, if too few edits
    /// followed the last parting.
    fn backoff_joined(&self) -> u32 {
        let lived = self.edits >= u64::from(self.turns_to_part(LIFE));
        if lived { self.backoff.saturating_sub(1) } else { MOST_BACKOFF.min(self.backoff + 1) }
    }
}

/// Builds nodes for `entries`, which are in order, and returns their root.
fn build<'s, T: 's>(
    entries: impl Iterator<Item = Found<'s, T>>,
) -> Result<Option<NonNull<Node>>, OutOfMemory> {
    // SAFETY: there is no old version. The numbers of edits start with 1, so no edit takes these
    // nodes for its own.
    let mut draft = unsafe { Draft::new(None, 0) };
    for entry in entries {
        draft.replace(entry.range(), slots(&[*entry]), |_| {})?;
    }
    Ok(draft.finish().0)
}

/// What replaces some shards in the directory.
enum Next<'n, T> {
    /// These shards.
    Shards(&'n [Entry<Shard<T>>]),
    /// A tree in one piece, with this root. It replaces all shards.
    Whole(Option<NonNull<Node>>),
}

impl<T> Tree<T> {
    /// Parts the tree, or the shard that has `bound`, at `bound`. Does nothing if there are too
    /// many shards or entries, or if no bound may be there any more. `writer` is behind the lock of
    /// the tree, which the caller holds.
    ///
    /// # Errors
    /// [`OutOfMemory`]; nothing has changed.
    pub(super) fn part(
        &self,
        writer: &mut Writer,
        bound: u64,
        parting: &Parting<'_, T>,
        (local, grace, wait): (&Local, &Grace, &impl Wait),
    ) -> Result<(), OutOfMemory> {
        let (whole, shards) = match self.root_now(Ordering::Relaxed) {
            Root::Entries(root) => (root, Version::<Shard<T>>::EMPTY),
            // SAFETY: the lock of the tree is held (directory).
            Root::Shards(directory) => (None, unsafe { Version::new(Some(directory)) }),
        };
        if shards.len() >= MOST_SHARDS {
            return Ok(());
        }
        let shard = shards.at(bound);
        let range = shard.map_or(EVERYWHERE, |shard| shard.range());
        // SAFETY: in the directory, while the lock of the tree is held (directory).
        let shard = shard.map(|shard| unsafe { shard.value.as_ref() });
        let mut backoff = writer.backoff;
        // SAFETY: if the tree is in one piece, the lock of the tree keeps writers out. Else this is
        // the empty version.
        let mut version = unsafe { Version::new(whole) };
        if let Some(shard) = shard {
            backoff = shard.end(wait, |writer| writer.backoff);
            // SAFETY: it has ended, and the lock of the tree is held (last version).
            version = unsafe { shard.version() };
        }
        let granted = self.granted.load(Ordering::Relaxed);
        let fits = granted.max(version.len() as u64) + 2 * SPARE <= parting.most / 2;
        let may =
            fits && bound > range.start && bound < range.end && parting.is_bound(version, bound);
        let done = if may {
            self.part_between(writer, (range, bound), (version, backoff), (local, grace))
        } else {
            Ok(())
        };
        if let Some(shard) = shard
            && !(may && done.is_ok())
        {
            shard.reopen(wait);
        }
        done
    }

    /// Parts the tree at `bound`, if it may be parted there. For models.
    ///
    /// # Errors
    /// [`OutOfMemory`]; nothing has changed.
    ///
    /// # Safety
    /// As [`edit`](Self::edit), of a tree that no CPU changes in place.
    #[cfg(any(test, loom, shuttle))]
    pub(crate) unsafe fn part_here(
        &self,
        bound: u64,
        parting: &Parting<'_, T>,
        tools: (&Local, &Grace, &impl Wait),
    ) -> Result<(), OutOfMemory> {
        self.part(&mut self.writer.lock(tools.2), bound, parting, tools)
    }

    /// Parts `range` at `bound`: makes two shards of `version`, which no writer changes meanwhile,
    /// and publishes a directory with them.
    fn part_between(
        &self,
        writer: &mut Writer,
        (range, bound): (VirtRange, u64),
        (version, backoff): (Version<'_, T>, u32),
        (local, grace): (&Local, &Grace),
    ) -> Result<(), OutOfMemory> {
        let low = build(version.iter().take_while(|entry| entry.start < bound))?;
        let low = Shard::try_new(low, backoff)?;
        let high = build(version.iter_from(bound)).and_then(|high| Shard::try_new(high, backoff));
        let Ok(high) = high else {
            // SAFETY: made just now.
            unsafe { free(low.cast()) };
            return Err(OutOfMemory);
        };
        let new = [
            Entry { start: range.start, end: bound, value: low },
            Entry { start: bound, end: range.end, value: high },
        ];
        let done = self.redirect(writer, range, Next::Shards(&new), (local, grace));
        if done.is_err() {
            for shard in [low, high] {
                // SAFETY: made just now, and no directory has it.
                unsafe { free(shard.cast()) };
            }
        }
        done
    }

    /// Joins the shards that overlap `range`. If these are all shards, the tree is in one piece
    /// then.
    ///
    /// # Errors
    /// [`OutOfMemory`]; nothing has changed.
    #[cold]
    pub(super) fn join(
        &self,
        range: VirtRange,
        (local, grace, wait): (&Local, &Grace, &impl Wait),
    ) -> Result<(), OutOfMemory> {
        let mut writer = self.writer.lock(wait);
        let Root::Shards(directory) = self.root_now(Ordering::Relaxed) else { return Ok(()) };
        // SAFETY: the lock of the tree is held (directory).
        let shards: Version<'_, Shard<T>> = unsafe { Version::new(Some(directory)) };
        let affected = || shards.iter_from(range.start).take_while(|shard| shard.start < range.end);
        // SAFETY: in the directory, while the lock of the tree is held (directory).
        let each = || affected().map(|shard| unsafe { shard.value.as_ref() });
        let hull = affected().map(|shard| shard.range()).reduce(VirtRange::hull).unwrap_or(range);
        if affected().count() == 1 {
            // Another CPU has joined them.
            return Ok(());
        }
        let mut backoff = 0;
        for shard in each() {
            backoff = backoff.max(shard.end(wait, Writer::backoff_joined));
        }
        // SAFETY: they have ended, and the lock of the tree is held (last version).
        let entries = each().flat_map(|shard| unsafe { shard.version() }.iter());
        let joined = build(entries).and_then(|root| {
            if hull == EVERYWHERE {
                let done = self.redirect(&mut writer, hull, Next::Whole(root), (local, grace));
                if done.is_err() {
                    // SAFETY: built just now.
                    unsafe { free_entries(root) };
                } else {
                    writer.backoff = backoff;
                }
                return done;
            }
            let value = Shard::try_new(root, backoff)?;
            let new = [Entry { start: hull.start, end: hull.end, value }];
            let done = self.redirect(&mut writer, hull, Next::Shards(&new), (local, grace));
            if done.is_err() {
                // SAFETY: made just now, and no directory has it.
                unsafe { free(value.cast()) };
            }
            done
        });
        if joined.is_err() {
            each().for_each(|shard| shard.reopen(wait));
        }
        joined
    }

    /// Publishes `next` in the place of the shards of `hull`, which have ended, or of the tree in
    /// one piece, and retires what `next` replaces. `writer` is behind the lock of the tree, which
    /// the caller holds.
    ///
    /// # Errors
    /// [`OutOfMemory`]; nothing has changed, and what `next` has is still the caller's.
    fn redirect(
        &self,
        writer: &mut Writer,
        hull: VirtRange,
        next: Next<'_, T>,
        (local, grace): (&Local, &Grace),
    ) -> Result<(), OutOfMemory> {
        writer.edits += 1;
        let root = self.root_now(Ordering::Relaxed);
        let directory = if let Root::Shards(directory) = root { Some(directory) } else { None };
        let new = if let Next::Shards(new) = next { new } else { &[] };
        // SAFETY: the lock of the tree is held (directory), which also hands on the use of the
        // nodes' links. Edit numbers do not repeat.
        let mut draft = unsafe { Draft::new(directory, writer.edits) };
        let (mut ended, mut less) = (RetireChain::default(), 0);
        draft.replace(hull, slots(new), |slot| {
            let shard = slot.target.cast::<Shard<T>>();
            // SAFETY: in the directory, while the lock of the tree is held (directory). Only the
            // holder of that lock uses a shard's link.
            unsafe {
                less += shard.as_ref().granted.load(Ordering::Relaxed);
                ended.append(shard.cast());
            }
        })?;
        if let Root::Entries(whole) = root {
            // A shard to retire: it frees the nodes of the tree in one piece when it is freed.
            let nodes = Shard::<T>::try_new(None, 0)?;
            // SAFETY: made just now.
            unsafe {
                nodes.as_ref().root.store(pointer(whole), Ordering::Relaxed);
                ended.append(nodes.cast());
            }
        }
        // SAFETY: the caller has made them just now, and no other CPU reaches them.
        let more = new.iter().map(|shard| unsafe { shard.value.as_ref() });
        let more: u64 = more.map(|shard| shard.granted.load(Ordering::Relaxed)).sum();
        self.granted.fetch_add(more.wrapping_sub(less), Ordering::Relaxed);
        let (directory, mut retired) = draft.finish();
        let next = match next {
            Next::Shards(_) => Root::Shards(directory.unwrap_or(NonNull::dangling())),
            Next::Whole(root) => Root::Entries(root),
        };
        self.root.store(next.pointer(), Ordering::Release);
        // SAFETY: the root that was just stored leads to none of it, so no section that begins from
        // now on reaches it. Nodes and shards are retired once: they were in one directory, and are
        // in none that follows.
        unsafe {
            retired.prepend(ended);
            grace.retire_all(local, retired);
        }
        Ok(())
    }
}
