//! The metadata of each frame: one cache line, indexed by frame number.
//!
//! # Ownership of the line
//!
//! The metadata of a frame belongs to the owner of the frame: the arena's buddy allocator (under
//! its lock), one CPU's list, the holder of a [`Frame`](super::Frame) value, or, after publication,
//! every holder of a mapping or a reference. A line holds the metadata of one frame only, so a
//! fault that installs a new frame writes its metadata without writing a line used by another CPU.
//! Plain stores suffice, because the release store of the page-table entry that publishes the
//! frame's number also publishes them.
//!
//! # Heads and tails
//!
//! Frames are handled in blocks of 2^order, aligned to their size. A block's first frame is its
//! *head* and describes the block; all others are *tails*. So a walk over heads
//! ([`census`](super::Frames::census)) visits every frame exactly once, and one word shows whether
//! a block's buddy can be merged.

use super::MAX_ORDER;
use crate::addr::FrameNumber;
use crate::error::OutOfMemory;
use crate::machine::MemoryRegion;
use crate::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence, made};
use crate::sync::grace::RetireLink;
use crate::sync::mutant::{Mutant, lost};
use alloc::vec::Vec;
use core::cell::Cell;
use core::fmt;
use core::ptr::NonNull;

/// "No frame" in a free list's link; no frame has this number.
pub(super) const NO_FRAME: u32 = u32::MAX;
/// The arena of frames without an arena: holes between regions.
const NO_ARENA: u8 = u8::MAX;

/// The maximum number of huge leaves that map a folio.
pub(super) const MOST_LEAVES: u32 = u32::MAX >> 1;
/// A pin, in the count of a frame's references.
const PIN: u32 = 1 << 22;

/// The use of a published frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum FrameUse {
    /// A page-table node.
    Table = 6,
    /// A private anonymous page.
    Anon = 7,
    /// A page of an object.
    Shared = 8,
    /// The zero page, which reads of untouched memory map.
    Zero = 9,
    /// Unlinked, waiting for the end of a grace period.
    Retired = 10,
    /// Allocated by a kernel ([`Block`](crate::Block)).
    Kernel = 11,
    /// Not a frame of the subsystem: device memory, which has no metadata.
    Device = 12,
}

/// The current kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Not memory: a hole between regions.
    Reserved,
    /// Not the first frame of its block.
    Tail,
    /// Heads a block on a free list of its arena's buddy allocator.
    Free,
    /// Heads a block of zeros in its arena's pool.
    Zeroed,
    /// Outside the buddy allocators and not published: on a CPU's list, or held by the caller that
    /// allocated it, as a [`Frame`](super::Frame) value.
    Pooled,
    /// Free, after its [deferred](super::flush_pending) flush.
    FlushPending,
    /// Published.
    Used(FrameUse),
}

impl Kind {
    /// Returns whether a frame of this kind heads a block on a list of a buddy allocator.
    pub(super) const fn is_listed(self) -> bool {
        matches!(self, Self::Free | Self::Zeroed)
    }

    const fn encode(self) -> u8 {
        match self {
            Self::Reserved => 0,
            Self::Tail => 1,
            Self::Free => 2,
            Self::Pooled => 3,
            Self::Zeroed => 4,
            Self::FlushPending => 5,
            Self::Used(usage) => usage as u8,
        }
    }

    /// Only `encode` writes the byte; values never written decode as the kind whose frames are
    /// never touched.
    const fn decode(byte: u8) -> Self {
        match byte {
            1 => Self::Tail,
            2 => Self::Free,
            3 => Self::Pooled,
            4 => Self::Zeroed,
            5 => Self::FlushPending,
            6 => Self::Used(FrameUse::Table),
            7 => Self::Used(FrameUse::Anon),
            8 => Self::Used(FrameUse::Shared),
            9 => Self::Used(FrameUse::Zero),
            10 => Self::Used(FrameUse::Retired),
            11 => Self::Used(FrameUse::Kernel),
            _ => Self::Reserved,
        }
    }
}

/// The metadata of one frame: 64 bytes.
#[repr(C, align(64))]
pub struct FrameMeta {
    kind: AtomicU8,
    /// log2 of the frames in the block headed by this frame; meaningless in a tail.
    order: AtomicU8,
    /// The arena of the frame, or [`NO_ARENA`]; never changes.
    arena: u8,
    /// The use count of the frame: how often reclaim spares it, see
    /// [`clock`](crate::reclaim::clock). For a private page it is valid after the first scan.
    pub(crate) use_count: AtomicU8,
    /// The number of mappings, transient references and pins of a published frame. The low 22 bits
    /// count mappings and transient references:
    ///
    /// | value | meaning |
    /// |---|---|
    /// | 0 | not published: owned by the allocator or one owner; or kept only by pins; or the last reference was just dropped |
    /// | 1 | one mapping, whose holder may reuse the frame in place under the entry's lock; or one reference that outlived the mappings |
    /// | 2 ..= [`MAX_MAPPINGS`](Self::MAX_MAPPINGS) | several |
    /// | .. [`MAX_REFS`](Self::MAX_REFS) | the maximum number of mappings, and transient references |
    ///
    /// The high 10 bits count [pins](crate::Space::pin), so that one atomic contains both. Neither
    /// count overflows into the other: no mapping and no pin is added at the maximum.
    refs: AtomicU32,
    /// The number of the current ownership: incremented at the end of each ownership, at every
    /// free, and never reset. So a stale translation is detected even before the frame has a new
    /// owner.
    owner: AtomicU64,
    /// The word of the [anchor](crate::rmap) that leads to the possible mappings of this frame.
    /// Written by the owner before it publishes the frame, and by a CPU that holds the entry of the
    /// only mapping. During a read into the frame, the low half is 0, which is no anchor, and the
    /// high half is a part of the [name of the read](Self::set_read).
    pub anchor: AtomicU64,
    /// The page index of this frame under `anchor`; written together with `anchor`.
    pub index: AtomicU64,
    /// The stamp of the last time that reclaim cleared the accessed bit of an entry mapping this
    /// frame. Meaningful only if an entry is [aged](crate::table::Entry::is_aged): see
    /// [`flush_free`](crate::reclaim::flush_free).
    pub(crate) aged: AtomicU64,
    /// Links a retired frame into the list of objects which wait for lock-free readers.
    retire: RetireLink,
    /// Neighbours on the buddy allocator's free list, if `kind` is `Free` or `Zeroed`. In a used
    /// frame, `next` is the [count of huge leaves](super::folio), and `prev` only has a meaning
    /// during a [read](Self::set_read).
    pub(super) prev: AtomicU32,
    pub(super) next: AtomicU32,
}

// Under the model checker an atomic is a handle of another size.
#[cfg(not(loom))]
const _: () = assert!(size_of::<FrameMeta>() == 64);

impl FrameMeta {
    /// The maximum number of references to a frame.
    pub const MAX_REFS: u32 = PIN - 1;
    /// The count at which no further reference for a mapping is granted. The remaining references
    /// up to [`MAX_REFS`](Self::MAX_REFS) are for transient references, of which a CPU has a few at
    /// a time; so a transient reference is always available.
    pub const MAX_MAPPINGS: u32 = Self::MAX_REFS - (1 << 16);
    /// The maximum number of pins of a frame: 1023.
    pub const MAX_PINS: u32 = u32::MAX / PIN;
    /// The kind of a frame's [`RetireLink`]. Other retired objects use other numbers.
    pub const RETIRE_KIND: u8 = 0;

    fn new(kind: Kind, arena: u8) -> Self {
        Self {
            kind: AtomicU8::new(kind.encode()),
            order: AtomicU8::new(0),
            arena,
            use_count: AtomicU8::new(0),
            refs: AtomicU32::new(0),
            owner: AtomicU64::new(0),
            anchor: AtomicU64::new(0),
            index: AtomicU64::new(0),
            aged: AtomicU64::new(0),
            retire: RetireLink::new(Self::RETIRE_KIND),
            prev: AtomicU32::new(NO_FRAME),
            next: AtomicU32::new(0),
        }
    }

    /// Returns whether the frame is of `kind`, with one comparison.
    #[inline(always)]
    pub(super) fn is(&self, kind: Kind) -> bool {
        self.kind.load(Ordering::Relaxed) == kind.encode()
    }

    /// Returns whether the frame is a page of a program or an object, to the extent that
    /// [`kind`](Self::kind) is stable.
    #[inline(always)]
    pub fn is_page(&self) -> bool {
        self.is(Kind::Used(FrameUse::Anon)) || self.is(Kind::Used(FrameUse::Shared))
    }

    /// Returns the kind of the frame. Stable only while the caller owns the frame, or at a quiet
    /// moment.
    #[inline]
    pub fn kind(&self) -> Kind {
        Kind::decode(self.kind.load(Ordering::Relaxed))
    }

    /// Sets the use of an owned frame: a plain store.
    #[inline]
    pub fn set_use(&self, usage: FrameUse) {
        self.kind.store(usage as u8, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn set_kind(&self, kind: Kind) {
        self.kind.store(kind.encode(), Ordering::Relaxed);
    }

    /// Returns log2 of the frames in the block that this frame heads.
    #[inline]
    pub fn order(&self) -> u8 {
        self.order.load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn set_order(&self, order: u8) {
        self.order.store(order, Ordering::Relaxed);
    }

    /// Returns the arena of the frame; meaningless for a reserved frame.
    #[inline]
    pub(super) const fn arena(&self) -> u8 {
        self.arena
    }

    /// Returns the number of the current ownership of the frame. Using a translation from an
    /// earlier ownership violates law 1; checked machines compare this number to detect it.
    #[inline]
    pub fn owner(&self) -> u64 {
        self.owner.load(Ordering::Relaxed)
    }

    /// Ends the current ownership. Only the owner calls this, so no read-modify-write is needed.
    #[inline]
    pub(super) fn end_ownership(&self) {
        self.owner.store(self.owner.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// Returns the number of mappings and transient references. With `Acquire`: a CPU that reads 1
    /// while holding the entry of the only mapping sees all accesses to the frame by holders of
    /// dropped references.
    #[inline]
    pub fn refs(&self) -> u32 {
        self.refs.load(Ordering::Acquire) & Self::MAX_REFS
    }

    /// Returns whether the frame has any reference or pin.
    #[inline]
    pub fn is_referred_to(&self) -> bool {
        self.refs.load(Ordering::Acquire) != 0
    }

    /// Returns whether the frame has one mapping or transient reference, and no pin.
    #[inline]
    pub fn is_sole(&self) -> bool {
        self.refs.load(Ordering::Acquire) == 1
    }

    /// Returns whether the frame has pins.
    #[inline]
    pub fn is_pinned(&self) -> bool {
        self.refs.load(Ordering::Acquire) >= PIN
    }

    /// Returns whether no pin can be added.
    #[inline]
    pub fn is_full_of_pins(&self) -> bool {
        self.refs.load(Ordering::Relaxed) / PIN == Self::MAX_PINS
    }

    /// Takes a pin of a frame that may have lost its last reference. If so, or if the frame has
    /// [`MAX_PINS`](Self::MAX_PINS), returns false and changes nothing. Ordered as
    /// [`get_ref_unless_zero`](Self::get_ref_unless_zero).
    pub fn pin(&self) -> bool {
        let mut refs = self.refs.load(Ordering::Relaxed);
        while refs != 0 && refs / PIN < Self::MAX_PINS {
            let (acquire, relaxed) = (Ordering::Acquire, Ordering::Relaxed);
            match self.refs.compare_exchange_weak(refs, refs + PIN, acquire, relaxed) {
                Ok(_) => return true,
                Err(now) => refs = now,
            }
        }
        false
    }

    /// Drops the caller's `refs` references to a frame without pins, if there are no others. True:
    /// the caller owns the frame, as with [`put_ref`](Self::put_ref). False: nothing has changed.
    #[must_use]
    pub fn put_all(&self, refs: u32) -> bool {
        self.refs.compare_exchange(refs, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Drops a pin. True: no reference or pin remains, and the caller owns the frame, as with
    /// [`put_ref`](Self::put_ref).
    pub fn unpin(&self) -> bool {
        let old = self.refs.fetch_sub(PIN, Ordering::Release);
        debug_assert!(old >= PIN, "a pin dropped twice: {old:#x}");
        if old == PIN {
            fence(Ordering::Acquire);
        }
        old == PIN
    }

    /// Sets the count of an owned frame that is not yet published: a plain store. Release, because
    /// a CPU that takes a reference through an old entry
    /// ([`get_ref_unless_zero`](Self::get_ref_unless_zero)) must see that the entry no longer names
    /// the frame.
    #[inline]
    pub(super) fn set_refs(&self, refs: u32) {
        let lost = lost(Mutant::FreshCountReleases);
        self.refs.store(refs, if lost { Ordering::Relaxed } else { Ordering::Release });
    }

    /// Describes an owned frame: used for `usage`, with `refs` references, under `anchor` at page
    /// `index`. All stores are plain, including the store of the count: afterwards the clock hands,
    /// and CPUs with an old entry of the frame, may take references.
    #[inline(always)]
    pub(super) fn publish(&self, usage: FrameUse, anchor: u64, index: u64, refs: u32) {
        self.set_use(usage);
        self.set_refs(refs);
        self.anchor.store(anchor, Ordering::Relaxed);
        self.index.store(index, Ordering::Relaxed);
    }

    /// Records `read`, the address of the read that fills the frame, whose entry the caller holds.
    /// Until the end of the read the frame has no anchor: the clock hands use each anchor as a
    /// number, so a part of an address in its place would lead them to the record of another page.
    pub(crate) fn set_read(&self, read: u64) {
        self.anchor.store(read >> u32::BITS << u32::BITS, Ordering::Relaxed);
        self.prev.store(read as u32, Ordering::Relaxed);
    }

    /// Returns the address from [`set_read`](Self::set_read). The caller holds the entry of the
    /// page, which is hidden.
    pub(crate) fn read(&self) -> u64 {
        let high = self.anchor.load(Ordering::Relaxed);
        high | u64::from(self.prev.load(Ordering::Relaxed))
    }

    /// Sets the count of a published frame.
    #[cfg(test)]
    pub(crate) fn preset_refs(&self, refs: u32) {
        self.set_refs(refs);
    }

    /// Makes a frame of a divided block a single free frame, on a CPU's list.
    #[inline]
    pub(super) fn make_single(&self) {
        self.order.store(0, Ordering::Relaxed);
        self.set_kind(Kind::Pooled);
    }

    /// Takes a reference for one more mapping of a frame to which the caller already has a
    /// reference (or whose mapping the caller holds locked). Relaxed: the existing reference
    /// provides the ordering. False: the frame has [`MAX_MAPPINGS`](Self::MAX_MAPPINGS), and
    /// nothing has changed.
    #[inline]
    #[must_use]
    pub fn get_mapping(&self) -> bool {
        let old = self.refs.fetch_add(1, Ordering::Relaxed);
        let old = old & Self::MAX_REFS;
        debug_assert!(
            old != 0 && old < Self::MAX_REFS,
            "a reference without an existing reference: {old}"
        );
        let full = old >= Self::MAX_MAPPINGS;
        if full {
            // This is not the last reference, because the caller has one.
            self.refs.fetch_sub(1, Ordering::Relaxed);
        }
        !full
    }

    /// As [`get_mapping_unless_zero`](Self::get_mapping_unless_zero), for a frame without pins:
    /// also returns false if the frame has pins, or if the count changes concurrently.
    #[inline(always)]
    #[must_use]
    pub fn try_get_mapping_unpinned(&self) -> bool {
        // A count with a pin is above every count without one.
        const { assert!(PIN > Self::MAX_MAPPINGS) };
        let refs = self.refs.load(Ordering::Relaxed);
        let (acquire, relaxed) = (Ordering::Acquire, Ordering::Relaxed);
        // 0 wraps around.
        refs.wrapping_sub(1) < Self::MAX_MAPPINGS - 1
            && self.refs.compare_exchange(refs, refs + 1, acquire, relaxed).is_ok()
    }

    /// Returns whether no mapping can be added.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.refs.load(Ordering::Relaxed) & Self::MAX_REFS >= Self::MAX_MAPPINGS
    }

    /// Takes a transient reference to a frame that may have lost its last reference; in this case
    /// returns false and changes nothing. `Acquire` on success. Afterwards the caller must check
    /// that the frame is still the intended one, by reading the entry that named it.
    #[inline]
    pub fn get_ref_unless_zero(&self) -> bool {
        self.get_ref_below(Self::MAX_REFS)
    }

    /// As [`get_ref_unless_zero`](Self::get_ref_unless_zero), for a mapping: also returns false if
    /// the frame has [`MAX_MAPPINGS`](Self::MAX_MAPPINGS).
    #[inline]
    pub fn get_mapping_unless_zero(&self) -> bool {
        self.get_ref_below(Self::MAX_MAPPINGS)
    }

    #[inline(always)]
    fn get_ref_below(&self, limit: u32) -> bool {
        let mut refs = self.refs.load(Ordering::Relaxed);
        while refs != 0 && refs & Self::MAX_REFS < limit {
            let (acquire, relaxed) = (Ordering::Acquire, Ordering::Relaxed);
            match self.refs.compare_exchange_weak(refs, refs + 1, acquire, relaxed) {
                Ok(_) => return true,
                Err(now) => refs = now,
            }
        }
        false
    }

    /// Drops a reference and returns the remaining count, including pins. The CPU that gets 0 owns
    /// the frame and takes it with [`Frames::reclaim`](super::Frames::reclaim).
    ///
    /// `Release`, and `Acquire` for the last reference: all accesses to the frame by any holder
    /// happen before the new owner's first access.
    #[inline]
    pub fn put_ref(&self) -> u32 {
        let old = self.refs.fetch_sub(1, Ordering::Release);
        debug_assert!(old & Self::MAX_REFS != 0, "a reference dropped twice: {old:#x}");
        if old == 1 {
            fence(Ordering::Acquire);
        }
        old.wrapping_sub(1)
    }

    /// Drops the caller's reference if it is the only one, and the frame has no pin. True: the
    /// caller owns the frame, as with [`put_ref`](Self::put_ref), and no CPU can take a reference
    /// any more.
    pub fn put_sole(&self) -> bool {
        self.refs.compare_exchange(1, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Returns the link through which an unlinked frame waits for a grace period.
    /// [`FrameTable::of_link`] is the inverse.
    #[inline]
    pub fn retire_link(&self) -> NonNull<RetireLink> {
        NonNull::from(&self.retire)
    }
}

impl fmt::Debug for FrameMeta {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrameMeta")
            .field("kind", &self.kind())
            .field("order", &self.order())
            .field("arena", &self.arena)
            .field("refs", &self.refs())
            .field("pinned", &self.is_pinned())
            .field("owner", &self.owner())
            .finish_non_exhaustive()
    }
}

/// The metadata of every frame between the first and the last of all regions.
pub struct FrameTable {
    base: u32,
    metas: Vec<FrameMeta>,
}

impl FrameTable {
    /// Creates the metadata for `regions`; frame `f` of node `n` belongs to arena
    /// `arena_of(n, f)`. The frames of the regions are tails until a buddy allocator adopts them;
    /// the holes between regions are reserved. Costs 64 bytes a frame, holes included.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the heap is exhausted.
    pub(super) fn try_new(
        regions: &[MemoryRegion],
        arena_of: impl Fn(u8, u32) -> u8,
    ) -> Result<Self, OutOfMemory> {
        let used = || regions.iter().filter(|region| region.frames != 0);
        let base = used().map(|region| region.first.0).min().unwrap_or(0);
        let end = used().map(|region| region.first.0 + region.frames).max().unwrap_or(0);
        let mut metas = Vec::new();
        metas.try_reserve_exact((end - base) as usize).map_err(|_| OutOfMemory)?;
        made(metas.as_ptr(), (end - base) as usize);
        metas.resize_with((end - base) as usize, || FrameMeta::new(Kind::Reserved, NO_ARENA));
        for region in used() {
            let start = (region.first.0 - base) as usize;
            let own = metas[start..start + region.frames as usize].iter_mut();
            for (meta, frame) in own.zip(region.first.0..) {
                debug_assert_eq!(meta.arena, NO_ARENA, "regions overlap");
                *meta = FrameMeta::new(Kind::Tail, arena_of(region.node, frame));
            }
        }
        Ok(Self { base, metas })
    }

    /// Returns the metadata of `frame`, which must lie between the first and the last frame of all
    /// regions, like every number returned by this module.
    #[inline(always)]
    pub fn meta(&self, frame: FrameNumber) -> &FrameMeta {
        &self.metas[frame.0.wrapping_sub(self.base) as usize]
    }

    /// Iterates over the metadata of `frames`, under the condition of [`meta`](Self::meta).
    #[inline(always)]
    pub(super) fn each(&self, frames: &[FrameNumber]) -> impl Iterator<Item = &FrameMeta> {
        // By value: otherwise the compiler must assume that stores to the metadata change the
        // table.
        let (base, metas) = (self.base, &self.metas[..]);
        frames.iter().map(move |frame| &metas[frame.0.wrapping_sub(base) as usize])
    }

    /// Iterates over the frames `numbers` with their metadata, as [`each`](Self::each).
    #[inline(always)]
    pub(super) fn each_of(
        &self,
        numbers: &[Cell<u32>],
    ) -> impl Iterator<Item = (FrameNumber, &FrameMeta)> {
        let (base, metas) = (self.base, &self.metas[..]);
        numbers.iter().map(move |number| {
            let number = number.get();
            (FrameNumber(number), &metas[number.wrapping_sub(base) as usize])
        })
    }

    /// Returns the metadata of `frame`, if it lies between the first and the last frame of all
    /// regions.
    #[inline]
    pub fn find(&self, frame: FrameNumber) -> Option<&FrameMeta> {
        self.metas.get(frame.0.wrapping_sub(self.base) as usize)
    }

    /// Returns the metadata of the `count` frames starting at `first`, if all lie between the first
    /// and the last frame of all regions.
    #[inline]
    pub(super) fn run(&self, first: FrameNumber, count: u32) -> Option<&[FrameMeta]> {
        let from = first.0.wrapping_sub(self.base) as usize;
        self.metas.get(from..)?.get(..count as usize)
    }

    /// Returns the frame whose metadata contains `link`, a link from [`FrameMeta::retire_link`].
    #[inline]
    pub fn of_link(&self, link: NonNull<RetireLink>) -> FrameNumber {
        let offset = link.as_ptr().addr().wrapping_sub(self.metas.as_ptr().addr());
        FrameNumber(self.base + (offset / size_of::<FrameMeta>()) as u32)
    }

    /// Returns whether the block of 2^`order` frames at `head` is on a list of the allocator of
    /// `arena`, as `kind`. The caller holds this arena's lock; otherwise the result is not stable.
    pub(super) fn is_listed(&self, head: u32, order: u8, arena: u8, kind: Kind) -> bool {
        // The arena is checked first: it never changes, whereas the other fields of another arena's
        // frame must not be read.
        self.metas.get(head.wrapping_sub(self.base) as usize).is_some_and(|meta| {
            meta.arena == arena
                && meta.kind.load(Ordering::Relaxed) == kind.encode()
                && meta.order() == order
        })
    }

    /// Iterates over the metadata of every frame.
    pub(super) fn iter(&self) -> impl Iterator<Item = &FrameMeta> {
        self.metas.iter()
    }

    /// Iterates over all blocks in ascending order, with each head and its metadata. During
    /// concurrent allocations a frame may appear as a tail without a head; such frames are returned
    /// one by one.
    pub(super) fn blocks(&self) -> impl Iterator<Item = (FrameNumber, &FrameMeta)> {
        let mut at = 0;
        core::iter::from_fn(move || {
            let meta = self.metas.get(at)?;
            let head = FrameNumber(self.base + at as u32);
            at += match meta.kind() {
                Kind::Reserved | Kind::Tail => 1,
                _ => 1 << meta.order().min(MAX_ORDER),
            };
            Some((head, meta))
        })
    }
}

impl fmt::Debug for FrameTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FrameTable({} frames from {:#x})", self.metas.len(), self.base)
    }
}
