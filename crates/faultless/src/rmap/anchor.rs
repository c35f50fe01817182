//! Anchors: the roots of the reverse map, named by frames.
//!
//! An anchor is a number for a family of spaces, or for a memory object. When the family or object
//! ends, the number is reused. A frame may briefly outlive the holder of its anchor, while a CPU
//! has a reference to the frame. So the records of anchors are never freed, and objects found
//! through them are only hints.

use crate::error::OutOfMemory;
use crate::file::Object;
use crate::heap::Shared;
use crate::machine::SpaceId;
use crate::rmap::walker::Walk;
use crate::space::core::Core;
use crate::sync::atomic::{AtomicPtr, AtomicU32, Ordering, made};
use crate::sync::order::{AnchorHolder, AnchorList};
use crate::sync::spin::SpinLock;
use crate::sync::wait::{Spin, Wait};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;
use core::ptr::{self, NonNull};

/// Records of the first chunk. Each further chunk has as many records as all chunks before.
const FIRST: u32 = if cfg!(loom) { 8 } else { 64 };
/// The maximum number of chunks: enough for a hundred million anchors.
const CHUNKS: usize = if cfg!(loom) { 2 } else { 22 };

/// The number of an anchor. 0 is no anchor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Anchor(u32);

impl Anchor {
    /// Returns the word by which a frame names this anchor, for a page made by the space `maker`.
    /// The high half identifies the space to search first.
    #[inline]
    pub(crate) const fn word(self, maker: SpaceId) -> u64 {
        maker.0 << u32::BITS | self.0 as u64
    }

    /// Returns the word by which a frame of an object names this anchor.
    #[inline]
    pub(crate) const fn of_object(self) -> u64 {
        self.0 as u64
    }

    /// Returns the anchor named by `word`.
    pub(crate) const fn named(word: u64) -> Self {
        Self(word as u32)
    }

    /// Returns whether the space `id` may have made the page that has `word`.
    pub(crate) const fn may_be_made_by(word: u64, id: SpaceId) -> bool {
        id.0 as u32 == (word >> u32::BITS) as u32
    }

    /// Returns the chunk of the anchor's record, and the place in the chunk.
    const fn place(self) -> (usize, usize) {
        let chunk = if self.0 < FIRST { 0 } else { (self.0 / FIRST).ilog2() + 1 };
        (chunk as usize, (self.0 - chunk_start(chunk)) as usize)
    }
}

/// Returns the first record of a chunk.
const fn chunk_start(chunk: u32) -> u32 {
    if chunk == 0 { 0 } else { FIRST << (chunk - 1) }
}

/// The holder of an anchor.
#[derive(Debug)]
enum Holder {
    Nothing,
    /// The spaces of a family, linked through their cores, the last member first.
    Family(Option<Shared<Core>>),
    /// An object that has not been dropped.
    Object(ObjectPtr),
}

/// A pointer of [`Shared::as_raw`].
///
/// *Invariant (held is there):* while a record contains the pointer, the object's memory is
/// allocated. The object's drop removes the pointer.
#[derive(Clone, Copy, Debug)]
struct ObjectPtr(NonNull<()>);

// SAFETY: objects may be accessed from all CPUs.
unsafe impl Send for ObjectPtr {}

#[derive(Debug)]
struct Record {
    holder: SpinLock<Holder, AnchorHolder>,
    /// The next unused record; written under the lock of the list.
    next: AtomicU32,
}

#[derive(Debug)]
struct Unused {
    /// The first record of the list of unused records; 0 is none.
    first: u32,
    /// The first record that was never used.
    next: u32,
}

/// All anchors.
pub(crate) struct Anchors {
    chunks: [AtomicPtr<Record>; CHUNKS],
    unused: SpinLock<Unused, AnchorList>,
}

impl Anchors {
    /// Creates the first chunk of anchors.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the heap is exhausted.
    pub(crate) fn try_new() -> Result<Self, OutOfMemory> {
        let chunks = core::array::from_fn(|_| AtomicPtr::new(ptr::null_mut()));
        let new = Self { chunks, unused: SpinLock::ordered(Unused { first: 0, next: 1 }) };
        new.add_chunk(0)?;
        Ok(new)
    }

    /// Returns an anchor for a new family without spaces.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the heap is exhausted, or all numbers are in use.
    pub(crate) fn found_family(&self, wait: &impl Wait) -> Result<Anchor, OutOfMemory> {
        self.take(Holder::Family(None), wait)
    }

    /// Returns an anchor for a new object.
    ///
    /// # Errors
    /// As [`found_family`](Self::found_family).
    pub(crate) fn found_object(&self, wait: &impl Wait) -> Result<Anchor, OutOfMemory> {
        self.take(Holder::Nothing, wait)
    }

    /// Sets the holder of `anchor` to `object`.
    pub(crate) fn lead_to(&self, anchor: Anchor, object: &Shared<Object>, wait: &impl Wait) {
        if let Some(record) = self.record(anchor) {
            *record.holder.lock(wait) = Holder::Object(ObjectPtr(object.as_raw()));
        }
    }

    /// Releases the anchor of an object that is being dropped, or of a family without a space.
    pub(crate) fn give_up(&self, anchor: Anchor) {
        let Some(record) = self.record(anchor) else { return };
        // Leaf locks, whose holders do not wait.
        *record.holder.lock(&Spin) = Holder::Nothing;
        let mut unused = self.unused.lock(&Spin);
        record.next.store(unused.first, Ordering::Relaxed);
        unused.first = anchor.0;
    }

    /// Adds a space to the family of its anchor, which must not be released concurrently.
    pub(crate) fn join(&self, core: &Shared<Core>, wait: &impl Wait) {
        let Some(record) = self.record(core.kin.anchor) else { return };
        let mut holder = record.holder.lock(wait);
        if let Holder::Family(first) = &mut *holder {
            let last = first.as_ref().map_or(0, |core| core.kin.number.load(Ordering::Relaxed));
            core.kin.number.store(last + 1, Ordering::Relaxed);
            // SAFETY: the space is not in the list yet, and the list is locked (kin is locked).
            unsafe { *core.kin.next.get() = first.take() };
            *first = Some(core.clone());
        }
    }

    /// Returns whether the space of `core` is the only space of its family: no other space has its
    /// anonymous pages, and no other space gets them until the space forks.
    pub(crate) fn is_alone(&self, core: &Core, wait: &impl Wait) -> bool {
        let Some(record) = self.record(core.kin.anchor) else { return false };
        members(&record.holder.lock(wait)).nth(1).is_none()
    }

    /// Removes an ending space from its family, and ends the family with its last space.
    pub(crate) fn remove(&self, core: &Shared<Core>, wait: &impl Wait) {
        let anchor = core.kin.anchor;
        let Some(record) = self.record(anchor) else { return };
        let (removed, last) = {
            let mut holder = record.holder.lock(wait);
            let Holder::Family(first) = &mut *holder else { return };
            let mut removed = None;
            let mut at: *mut Option<Shared<Core>> = first;
            // SAFETY: the first link, or a link of a space in the list: alive, and accessed only by
            // this CPU (kin is locked).
            while let Some(member) = unsafe { &*at } {
                let next = member.kin.next.get();
                if member.same(core) {
                    // SAFETY: as above; the former target of `at` stays alive in `removed`.
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

    /// Returns the space that made a page with the anchor word `word`, if the space still exists.
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

    /// Stores further spaces of the family named by `word` in `to`, except the page's maker: spaces
    /// that joined before the space numbered `before`, latest first. Returns the number of the last
    /// space, which may be ending, if there may be more.
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

    /// Returns a share of the object named by `word`, if the object exists and has not been
    /// dropped. A page that is being read has no anchor.
    pub(super) fn object(&self, word: u64, wait: &impl Wait) -> Option<Shared<Object>> {
        let anchor = Anchor::named(word);
        if anchor.0 == 0 {
            return None;
        }
        match &*self.record(anchor)?.holder.lock(wait) {
            // SAFETY: the pointer is in the record, so the object's memory is allocated (held is
            // there).
            Holder::Object(ObjectPtr(raw)) => unsafe { Shared::clone_raw_unless_last(*raw) },
            _ => None,
        }
    }

    /// Returns the record of an anchor, if its chunk exists.
    fn record(&self, anchor: Anchor) -> Option<&Record> {
        let (chunk, at) = anchor.place();
        let first = self.chunks.get(chunk)?.load(Ordering::Acquire);
        // SAFETY: a chunk is filled before its publication, and never freed; the place is within
        // the chunk.
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
            // Not under the lock, because the heap may be slow.
            self.add_chunk(next.place().0)?;
        };
        if let Some(record) = self.record(anchor) {
            *record.holder.lock(wait) = holder;
        }
        Ok(anchor)
    }

    /// Adds a chunk, unless another CPU does.
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
            // SAFETY: from `into_raw` just now, and not published.
            drop(unsafe { Box::from_raw(new) });
        }
        Ok(())
    }
}

/// Returns the number of records of a chunk.
const fn chunk_len(chunk: usize) -> usize {
    (if chunk == 0 { FIRST } else { chunk_start(chunk as u32) }) as usize
}

/// Iterates over the spaces of a family whose record is locked.
fn members(holder: &Holder) -> impl Iterator<Item = &Shared<Core>> {
    let first = if let Holder::Family(first) = holder { first.as_ref() } else { None };
    // SAFETY: alive, and accessed only by this CPU while the record is locked, as `holder` proves
    // (kin is locked).
    core::iter::successors(first, |core| unsafe { &*core.kin.next.get() }.as_ref())
}

/// The anchor of an object; its drop releases the anchor.
#[derive(Debug)]
pub(crate) struct ObjectAnchor {
    anchor: Anchor,
    anchors: Option<Shared<Anchors>>,
}

impl ObjectAnchor {
    /// Returns a new anchor without a holder.
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

    /// Returns the word by which a frame names the anchor.
    #[inline]
    pub(crate) const fn word(&self) -> u64 {
        self.anchor.of_object()
    }

    /// Releases the anchor: it no longer leads to the object.
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
            // SAFETY: from `into_raw` in `add_chunk`, with the same length; the subsystem is gone.
            for record in &mut *unsafe { Box::from_raw(records) } {
                // Spaces that were dropped without being ended. Iterative, because a recursion
                // could be too deep.
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
