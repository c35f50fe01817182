//! Anchors: what a frame names to be found by its reverse map.
//!
//! An anchor is a number. It stands for a family of spaces, or for a memory object, for as long as that exists, and for another one later.
//! A frame may outlive what its anchor stood for, for a moment, while a CPU that looked at it has a reference; so the records that anchors
//! lead to are never freed, and what is found through them proves nothing by itself.

use crate::error::OutOfMemory;
use crate::file::Object;
use crate::heap::Shared;
use crate::machine::SpaceId;
use crate::rmap::walker::Walk;
use crate::space::fixed::Core;
use crate::sync::atomic::{AtomicPtr, AtomicU32, Ordering, made};
use crate::sync::order::{AnchorHolder, AnchorList};
use crate::sync::spin::SpinLock;
use crate::sync::wait::{Spin, Wait};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;
use core::ptr::{self, NonNull};

/// Records of the first chunk. Each of the others has as many as all before it.
const FIRST: u32 = if cfg!(loom) { 8 } else { 64 };
/// How many chunks there may be: for a hundred million anchors.
const CHUNKS: usize = if cfg!(loom) { 2 } else { 22 };

/// The number of an anchor. 0 is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Anchor(u32);

impl Anchor {
    /// The word by which a frame names it, if the space `maker` made the page. The high half tells in which space a walk looks first.
    #[inline]
    pub(crate) const fn word(self, maker: SpaceId) -> u64 {
        maker.0 << u32::BITS | self.0 as u64
    }

    /// The word by which a frame of an object names it.
    #[inline]
    pub(crate) const fn of_object(self) -> u64 {
        self.0 as u64
    }

    /// The anchor that `word` names.
    pub(crate) const fn named(word: u64) -> Self {
        Self(word as u32)
    }

    /// Whether `word` says that the space `id` may have made the page.
    pub(crate) const fn may_be_made_by(word: u64, id: SpaceId) -> bool {
        id.0 as u32 == (word >> u32::BITS) as u32
    }

    /// The chunk of its record, and the place there.
    const fn place(self) -> (usize, usize) {
        let chunk = if self.0 < FIRST { 0 } else { (self.0 / FIRST).ilog2() + 1 };
        (chunk as usize, (self.0 - chunk_start(chunk)) as usize)
    }
}

/// The first record of a chunk.
const fn chunk_start(chunk: u32) -> u32 {
    if chunk == 0 { 0 } else { FIRST << (chunk - 1) }
}

/// What an anchor stands for.
#[derive(Debug)]
enum Holder {
    Nothing,
    /// The spaces of a family, by the links of their cores, the last that joined first.
    Family(Option<Shared<Core>>),
    /// An object, which has not been dropped.
    Object(ObjectPtr),
}

/// A pointer of [`Shared::as_raw`].
///
/// *Invariant (held is there):* while a record has it, the object's memory is allocated. The object's drop takes it out.
#[derive(Clone, Copy, Debug)]
struct ObjectPtr(NonNull<()>);

// SAFETY: an object may be reached from all CPUs.
unsafe impl Send for ObjectPtr {}

#[derive(Debug)]
struct Record {
    holder: SpinLock<Holder, AnchorHolder>,
    /// The next unused record; written under the lock of the list.
    next: AtomicU32,
}

#[derive(Debug)]
struct Unused {
    /// The first unused record that was used before; 0 is none.
    first: u32,
    /// Records from this one on were never used.
    next: u32,
}

/// All anchors.
pub(crate) struct Anchors {
    chunks: [AtomicPtr<Record>; CHUNKS],
    unused: SpinLock<Unused, AnchorList>,
}

impl Anchors {
    /// # Errors
    /// [`OutOfMemory`] when the heap is exhausted.
    pub(crate) fn try_new() -> Result<Self, OutOfMemory> {
        let chunks = core::array::from_fn(|_| AtomicPtr::new(ptr::null_mut()));
        let new = Self { chunks, unused: SpinLock::ordered(Unused { first: 0, next: 1 }) };
        new.add_chunk(0)?;
        Ok(new)
    }

    /// An anchor for a new family, of no space yet.
    ///
    /// # Errors
    /// [`OutOfMemory`] when the heap is exhausted, or all numbers are in use.
    pub(crate) fn found_family(&self, wait: &impl Wait) -> Result<Anchor, OutOfMemory> {
        self.take(Holder::Family(None), wait)
    }

    /// An anchor for an object that has none yet.
    ///
    /// # Errors
    /// As [`found_family`](Self::found_family).
    pub(crate) fn found_object(&self, wait: &impl Wait) -> Result<Anchor, OutOfMemory> {
        self.take(Holder::Nothing, wait)
    }

    /// From now on `anchor` leads to `object`.
    pub(crate) fn lead_to(&self, anchor: Anchor, object: &Shared<Object>, wait: &impl Wait) {
        if let Some(record) = self.record(anchor) {
            *record.holder.lock(wait) = Holder::Object(ObjectPtr(object.as_raw()));
        }
    }

    /// Gives up an anchor, of an object that is being dropped, or of a family without a space.
    pub(crate) fn give_up(&self, anchor: Anchor) {
        let Some(record) = self.record(anchor) else { return };
        // Leaf locks, whose holders wait for nothing.
        *record.holder.lock(&Spin) = Holder::Nothing;
        let mut unused = self.unused.lock(&Spin);
        record.next.store(unused.first, Ordering::Relaxed);
        unused.first = anchor.0;
    }

    /// Adds a space to the family of its anchor, which nobody gives up meanwhile.
    pub(crate) fn join(&self, core: &Shared<Core>, wait: &impl Wait) {
        let Some(record) = self.record(core.kin.anchor) else { return };
        let mut holder = record.holder.lock(wait);
        if let Holder::Family(first) = &mut *holder {
            let last = first.as_ref().map_or(0, |core| core.kin.number.load(Ordering::Relaxed));
            core.kin.number.store(last + 1, Ordering::Relaxed);
            // SAFETY: not in the list yet, and the list is locked (kin is locked).
            unsafe { *core.kin.next.get() = first.take() };
            *first = Some(core.clone());
        }
    }

    /// Takes a space that is about to end out of its family, and ends the family with its last space.
    pub(crate) fn leave(&self, core: &Shared<Core>, wait: &impl Wait) {
        let anchor = core.kin.anchor;
        let Some(record) = self.record(anchor) else { return };
        let (removed, last) = {
            let mut holder = record.holder.lock(wait);
            let Holder::Family(first) = &mut *holder else { return };
            let mut removed = None;
            let mut at: *mut Option<Shared<Core>> = first;
            // SAFETY: the first, or a link of a space in the list: alive, and ours (kin is locked).
            while let Some(member) = unsafe { &*at } {
                let next = member.kin.next.get();
                if member.same(core) {
                    // SAFETY: as above; what `at` led to stays alive in `removed`.
                    removed = unsafe { core::mem::replace(&mut *at, (*next).take()) };
                    break;
                }
                at = next;
            }
            (removed, first.is_none())
        };
        if removed.is_some() && last {
            self.give_up(anchor);
        }
    }

    /// The space that made a page which names its anchor by `word`, if it is still there.
    pub(super) fn maker<'w>(
        &self,
        word: u64,
        walk: &'w Walk<'_>,
        wait: &impl Wait,
    ) -> Option<&'w Core> {
        let holder = self.record(Anchor::named(word))?.holder.lock(wait);
        let maker = members(&holder).find(|core| Anchor::may_be_made_by(word, core.id))?;
        walk.space(maker)
    }

    /// Spaces of the family that `word` names, but for the page's maker: the next ones that joined before the one numbered `before`, as
    /// many as `to` has places. Returns the number of the last, which may be one that ends, if there may be more.
    pub(super) fn members<'w>(
        &self,
        word: u64,
        before: u64,
        walk: &'w Walk<'_>,
        to: &mut [Option<&'w Core>],
        wait: &impl Wait,
    ) -> Option<u64> {
        let holder = self.record(Anchor::named(word))?.holder.lock(wait);
        let others = |core: &&Shared<Core>| {
            core.kin.number.load(Ordering::Relaxed) < before
                && !Anchor::may_be_made_by(word, core.id)
        };
        let mut others = members(&holder).filter(others);
        let mut last = None;
        for place in to {
            let core = others.next()?;
            *place = walk.space(core);
            last = Some(core.kin.number.load(Ordering::Relaxed));
        }
        last
    }

    /// A share of the object that `word` names, if it names one that has not been dropped.
    pub(super) fn object(&self, word: u64, wait: &impl Wait) -> Option<Shared<Object>> {
        match &*self.record(Anchor::named(word))?.holder.lock(wait) {
            // SAFETY: in the record, so its memory is there (held is there).
            Holder::Object(ObjectPtr(raw)) => unsafe { Shared::clone_raw_unless_last(*raw) },
            _ => None,
        }
    }

    /// The record of an anchor, if there is one.
    fn record(&self, anchor: Anchor) -> Option<&Record> {
        let (chunk, at) = anchor.place();
        let first = self.chunks.get(chunk)?.load(Ordering::Acquire);
        // SAFETY: a chunk is published when it is filled, and stays; the place is within.
        NonNull::new(first).map(|first| unsafe { first.add(at).as_ref() })
    }

    fn take(&self, holder: Holder, wait: &impl Wait) -> Result<Anchor, OutOfMemory> {
        let anchor = loop {
            let next = {
                let mut unused = self.unused.lock(wait);
                if let Some(record) =
                    self.record(Anchor(unused.first)).filter(|_| unused.first != 0)
                {
                    let anchor = Anchor(unused.first);
                    unused.first = record.next.load(Ordering::Relaxed);
                    break anchor;
                }
                let next = Anchor(unused.next);
                if self.record(next).is_some() {
                    unused.next += 1;
                    break next;
                }
                next
            };
            // Not under the lock: the heap may be slow.
            self.add_chunk(next.place().0)?;
        };
        if let Some(record) = self.record(anchor) {
            *record.holder.lock(wait) = holder;
        }
        Ok(anchor)
    }

    /// Adds a chunk, if no other CPU does.
    #[cold]
    fn add_chunk(&self, chunk: usize) -> Result<(), OutOfMemory> {
        let place = self.chunks.get(chunk).ok_or(OutOfMemory)?;
        let len = chunk_len(chunk);
        let mut records = Vec::new();
        records.try_reserve_exact(len).map_err(|_| OutOfMemory)?;
        made(records.as_ptr(), len);
        records.resize_with(len, || Record {
            holder: SpinLock::ordered(Holder::Nothing),
            next: AtomicU32::new(0),
        });
        let new = Box::into_raw(records.into_boxed_slice());
        let (null, first) = (ptr::null_mut(), new.cast());
        if place.compare_exchange(null, first, Ordering::Release, Ordering::Relaxed).is_err() {
            // SAFETY: of `into_raw` just now, and published nowhere.
            drop(unsafe { Box::from_raw(new) });
        }
        Ok(())
    }
}

/// How many records a chunk has.
const fn chunk_len(chunk: usize) -> usize {
    (if chunk == 0 { FIRST } else { chunk_start(chunk as u32) }) as usize
}

/// The spaces of a family whose record is locked.
fn members(holder: &Holder) -> impl Iterator<Item = &Shared<Core>> {
    let first = if let Holder::Family(first) = holder { first.as_ref() } else { None };
    // SAFETY: alive, and ours as long as the record's lock, of which `holder` is (kin is locked).
    core::iter::successors(first, |core| unsafe { &*core.kin.next.get() }.as_ref())
}

/// The anchor of an object, which gives it up when it is dropped.
#[derive(Debug)]
pub(crate) struct ObjectAnchor {
    anchor: Anchor,
    anchors: Option<Shared<Anchors>>,
}

impl ObjectAnchor {
    /// A new one, which leads nowhere yet.
    ///
    /// # Errors
    /// As [`Anchors::found_object`].
    pub(crate) fn try_new(anchors: Shared<Anchors>, wait: &impl Wait) -> Result<Self, OutOfMemory> {
        let anchor = anchors.found_object(wait)?;
        Ok(Self { anchor, anchors: Some(anchors) })
    }

    pub(crate) const fn anchor(&self) -> Anchor {
        self.anchor
    }

    /// The word by which a frame names it.
    #[inline]
    pub(crate) const fn word(&self) -> u64 {
        self.anchor.of_object()
    }

    /// From now on it leads nowhere.
    pub(crate) fn give_up(&mut self) {
        if let Some(anchors) = self.anchors.take() {
            anchors.give_up(self.anchor);
        }
    }
}

impl Drop for ObjectAnchor {
    fn drop(&mut self) {
        self.give_up();
    }
}

impl Drop for Anchors {
    fn drop(&mut self) {
        for (at, chunk) in self.chunks.iter().enumerate() {
            let Some(first) = NonNull::new(chunk.load(Ordering::Relaxed)) else { continue };
            let records = ptr::slice_from_raw_parts_mut(first.as_ptr(), chunk_len(at));
            // SAFETY: of `into_raw` in `add_chunk`, of the same length; the subsystem is gone.
            for record in &mut *unsafe { Box::from_raw(records) } {
                // Spaces that were dropped and not ended, one by one: there may be too many for a recursion.
                let Holder::Family(first) = record.holder.get_mut() else { continue };
                let mut next = first.take();
                while let Some(core) = next {
                    // SAFETY: no other CPU can access the list any more (kin is locked).
                    next = unsafe { (*core.kin.next.get()).take() };
                }
            }
        }
    }
}

impl fmt::Debug for Anchors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Anchors").field("unused", &self.unused).finish_non_exhaustive()
    }
}
