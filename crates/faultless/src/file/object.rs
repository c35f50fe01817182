//! Memory objects: pages by index, shared by all mappings, and read and written by the kernel. A memory file
//! system, System V shared memory and shared anonymous mappings are made of them.
//!
//! An object finds its pages through a page table of its own, in which the "address" is the byte
//! offset: the same walk, the same entry protocol and the same publication of tables as a space. A
//! missing page is added by the first CPU that needs it, without a lock. The object
//! holds one reference to each of its pages, each mapping one more, and each copy in progress to or
//! from a page one more. So a page may leave the object at any time; dropping the last reference frees
//! its frame.
//!
//! # The length is the sequence
//!
//! Shrinking stores the new length, issues a full fence, and then empties the entries beyond, waiting
//! for busy ones. A CPU that adds a page takes the entry (a full fence) and then reads the length
//! again. At least one of them sees the other's store, as with a VMA's sequence: no page is beyond the end.
//!
//! # References
//!
//! A CPU that finds a page takes a reference, unless the count is zero, and then reads the object's entry
//! again: if the entry still names the frame, the reference is to the right frame, and keeps it there.
//!
//! # Truncation
//!
//! 1. [`set_pages`](Object::set_pages) shortens the object: no fault that begins now maps a page beyond.
//! 2. [`Space::revoke`](crate::Space::revoke) for each space that may map it: a fault that began before
//!    has its entry busy, and is waited for, or finds, once it has the entry, that the page has left. The pages are
//!    gone everywhere.
//!
//! Between the two steps programs may use what they had mapped, as if they had run before the truncation. The object must not grow
//! before step 2 ends: that step drops private copies too, and would drop new copies of pages that were added.
//!
//! A hole is made the same way, by [`free_pages`](Object::free_pages) and `revoke`, which then
//! [keeps](crate::Copies::Keep) private copies.

use crate::addr::{FrameNumber, PAGE_SHIFT, USER_END, VirtRange};
use crate::ended::{Left, Place};
use crate::error::Errno;
use crate::fault::prepared::Prepared;
use crate::fault::table;
use crate::fault::ticket::{Abort, Ticket};
use crate::frame::{FrameMeta, Use};
use crate::heap::Shared;
use crate::identity::Identity;
use crate::machine::Machine;
use crate::sync::atomic::{AtomicU64, Ordering, fence};
use crate::sync::mutant::{Mutant, lost};
use crate::table::entry::Entry;
use crate::table::node::{self, ENTRIES, LAST, ROOT};
use crate::table::protocol;
use crate::table::range::{self, Run};
use crate::table::walk::{Reached, descend};
use crate::vm::Cpu;
use core::convert::Infallible;
use core::ops::Range;

/// Pages in order, as many as its length says; those that were never written are zeros, and not there.
///
/// It is owned in [shares](Shared), of which each VMA that maps it has one. A kernel that has one gives it
/// up by [`release`](Self::release), or drops it. If a share that is dropped is the last, a CPU that is done with a call, or asked to
/// ([`Cpu::end_dropped`]), ends the object a little later.
#[derive(Debug)]
pub struct Object {
    root: FrameNumber,
    pages: AtomicU64,
    tag: u64,
    /// The subsystem that its frames are of.
    identity: Identity,
    /// Where it goes when its last share is dropped.
    place: Place,
}

impl Drop for Object {
    fn drop(&mut self) {
        let (root, pages) = (self.root, self.pages());
        self.place.leave(|| Left::Object(root, pages));
    }
}

/// Why there is no page at an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoPage {
    /// It is beyond the object's end.
    Beyond,
    /// No frame is left for it.
    OutOfMemory,
}

impl Object {
    /// The most pages that an object may have: 128 TiB.
    pub const MAX_PAGES: u64 = USER_END.next_power_of_two() >> PAGE_SHIFT;

    /// An object of `pages` pages of zeros. What `tag` means is up to the kernel, which finds it in
    /// listings ([`AreaInfo::tag`](crate::AreaInfo::tag)); 0 is nameless memory.
    ///
    /// # Errors
    /// `EFBIG`: more than [`MAX_PAGES`](Self::MAX_PAGES). `ENOMEM`.
    pub fn try_new<M: Machine>(
        cpu: &Cpu<'_, M>,
        pages: u64,
        tag: u64,
    ) -> Result<Shared<Self>, Errno> {
        if pages > Self::MAX_PAGES {
            return Err(Errno::EFBIG);
        }
        let place = cpu.vm().ended.place()?;
        let frame = cpu.alloc_or_wait()?.zero(cpu.vm().machine());
        let root = cpu.vm().frames.publish(frame, Use::Table, 0, u64::from(ROOT));
        let identity = cpu.identity();
        let object = Self { root, pages: AtomicU64::new(pages), tag, identity, place };
        Ok(Shared::try_new(object).inspect_err(|_| {
            // It was dropped.
            cpu.end_dropped();
        })?)
    }

    /// Gives up a share. With the last one the object ends; pages of it that somebody is copying from
    /// end a moment later.
    pub fn release<M: Machine>(object: Shared<Self>, cpu: &Cpu<'_, M>) {
        object.check_vm(cpu);
        if let Some(last) = object.into_last() {
            last.destroy(cpu);
        }
    }

    /// Makes sure that `cpu` is of the subsystem that made this object. Every operation that is not of this crate
    /// alone does so first.
    ///
    /// # Panics
    /// Where it is not.
    #[inline]
    pub(crate) fn check_vm<M: Machine>(&self, cpu: &Cpu<'_, M>) {
        self.identity.check(cpu.identity());
    }

    /// The frame of its root table.
    pub(crate) const fn root(&self) -> FrameNumber {
        self.root
    }

    /// Its length in pages.
    pub fn pages(&self) -> u64 {
        self.pages.load(Ordering::Acquire)
    }

    /// What the kernel knows it by.
    pub const fn tag(&self) -> u64 {
        self.tag
    }

    /// Sets the length. Pages beyond it leave the object, and what is mapped of them is to be
    /// [revoked](crate::Space::revoke); pages that are added are zeros.
    ///
    /// # Errors
    /// `EFBIG`: more than [`MAX_PAGES`](Self::MAX_PAGES). Nothing has changed.
    pub fn set_pages<M: Machine>(&self, cpu: &Cpu<'_, M>, pages: u64) -> Result<(), Errno> {
        self.check_vm(cpu);
        if pages > Self::MAX_PAGES {
            return Err(Errno::EFBIG);
        }
        let before = self.pages.swap(pages, Ordering::SeqCst);
        if pages < before {
            if !lost(Mutant::TruncateFence) {
                fence(Ordering::SeqCst);
            }
            self.free_pages(cpu, pages..before);
        }
        Ok(())
    }

    /// Takes the pages of `range` out of the object: they read as zeros from now on, except through
    /// mappings that are not [revoked](crate::Space::revoke). Frames that nobody maps are free.
    pub fn free_pages<M: Machine>(&self, cpu: &Cpu<'_, M>, range: Range<u64>) {
        self.check_vm(cpu);
        // SAFETY: the object's tables are unlinked only in `end`, when no share is left.
        unsafe { Self::free_below(cpu, self.root, range) };
    }

    /// Takes the pages of `range` out of the table in `root`, the root of an object.
    ///
    /// # Safety
    /// The tables stay linked.
    unsafe fn free_below<M: Machine>(cpu: &Cpu<'_, M>, root: FrameNumber, range: Range<u64>) {
        let bytes = |index: u64| index.min(Self::MAX_PAGES) << PAGE_SHIFT;
        if range.is_empty() {
            return;
        }
        let put = |run: Run<'_>| {
            if let Run::Pages { slots, .. } = run {
                for slot in slots.iter().filter(|slot| !node::load(slot).is_none()) {
                    let (old, _) = protocol::settle(slot, cpu, |_| Entry::NONE);
                    if old.is_present() {
                        // SAFETY: the object's own reference, which never was a mapping; those of
                        // the mappings are put when they are flushed.
                        unsafe { cpu.put_unmapped(old.frame()) };
                    }
                }
            }
            Ok::<(), Infallible>(())
        };
        let range = VirtRange::new(bytes(range.start), bytes(range.end));
        // SAFETY: the caller's promise.
        let Ok(()) = unsafe { range::visit(cpu.vm().machine(), root, range, cpu, put) };
    }

    /// Whether the page at `index` is there: it was written, or mapped.
    pub fn has_page<M: Machine>(&self, cpu: &Cpu<'_, M>, index: u64) -> bool {
        self.check_vm(cpu);
        self.slot(cpu, index).is_some_and(|slot| node::load(slot).is_present())
    }

    /// How many of its pages are there, by counting them.
    pub fn resident_pages<M: Machine>(&self, cpu: &Cpu<'_, M>) -> u64 {
        self.check_vm(cpu);
        let mut pages = 0;
        let count = |run: Run<'_>| {
            if let Run::Pages { slots, .. } = run {
                pages += slots.iter().filter(|slot| node::load(slot).is_present()).count() as u64;
            }
            Ok::<(), Infallible>(())
        };
        let all = VirtRange::new(0, self.pages() << PAGE_SHIFT);
        // SAFETY: as in `free_pages`.
        let Ok(()) = unsafe { range::visit(cpu.vm().machine(), self.root, all, cpu, count) };
        pages
    }

    /// Lends the [`PAGE_SIZE`](crate::PAGE_SIZE) bytes of the page at `index` to `read`, or `None` where
    /// no page is there, which reads as zeros. Programs may be storing to them.
    ///
    /// `read` may make calls and faults, but must come back on the same CPU.
    pub fn read_page<M: Machine, R>(
        &self,
        cpu: &Cpu<'_, M>,
        index: u64,
        read: impl FnOnce(Option<*const u8>) -> R,
    ) -> R {
        self.check_vm(cpu);
        let Some(frame) = self.get(cpu, index) else {
            return read(None);
        };
        let lent = Lent { cpu, frame };
        read(Some(lent.bytes().cast_const()))
    }

    /// Lends the [`PAGE_SIZE`](crate::PAGE_SIZE) bytes of the page at `index`, made if it was not there,
    /// to `write`. Programs may be loading and storing them.
    ///
    /// `write` may make calls and faults, but must come back on the same CPU.
    ///
    /// # Errors
    /// `EFBIG`: `index` is beyond the end. `ENOMEM`. `write` was not called.
    pub fn write_page<M: Machine, R>(
        &self,
        cpu: &Cpu<'_, M>,
        index: u64,
        write: impl FnOnce(*mut u8) -> R,
    ) -> Result<R, Errno> {
        self.check_vm(cpu);
        let mut prepared = Prepared::Nothing;
        let frame = loop {
            if let Some(frame) = self.get(cpu, index) {
                break Ok(frame);
            }
            let made = {
                let _section = cpu.section();
                self.page(cpu, index, &mut prepared)
            };
            match made {
                // Others see it too: a reference is to be had as for any other.
                Ok(_) => {}
                Err(NoPage::Beyond) => break Err(Errno::EFBIG),
                Err(NoPage::OutOfMemory) if prepared.wait_for_one(cpu) => {}
                Err(NoPage::OutOfMemory) => break Err(Errno::ENOMEM),
            }
        };
        prepared.finish(cpu);
        let lent = Lent { cpu, frame: frame? };
        Ok(write(lent.bytes()))
    }

    /// The entry of the page at `index`, if there is a table for it.
    pub(crate) fn slot<'v, M: Machine>(
        &self,
        cpu: &Cpu<'v, M>,
        index: u64,
    ) -> Option<&'v AtomicU64> {
        if index >= Self::MAX_PAGES {
            return None;
        }
        // SAFETY: the object's tables are unlinked only in `end`, when no share is left.
        match unsafe { descend(cpu.vm().machine(), self.root, index << PAGE_SHIFT) } {
            Reached::Last(slots) => Some(&slots[node::index(index << PAGE_SHIFT, LAST)]),
            Reached::Above { .. } => None,
        }
    }

    /// The page at `index`, with a reference for the caller, if it is there. The caller owns a share of
    /// the object, or sees one in a VMA.
    pub(crate) fn get<M: Machine>(&self, cpu: &Cpu<'_, M>, index: u64) -> Option<FrameNumber> {
        Self::refer_to_copy(cpu, self.slot(cpu, index)?)
    }

    /// The page that `slot`, an entry of an object, names, with a reference for the caller, if it names one.
    #[inline]
    pub(crate) fn refer_to_copy<M: Machine>(
        cpu: &Cpu<'_, M>,
        slot: &AtomicU64,
    ) -> Option<FrameNumber> {
        Self::refer(cpu, slot, FrameMeta::get_ref_unless_zero)
    }

    /// The page that `slot`, an entry of an object, names, with a reference for a mapping of it; if it names
    /// one, and the page has not as many mappings as can be counted.
    #[inline(always)]
    pub(crate) fn refer_to_map<M: Machine>(
        cpu: &Cpu<'_, M>,
        slot: &AtomicU64,
    ) -> Option<FrameNumber> {
        Self::refer(cpu, slot, FrameMeta::get_mapping_unless_zero)
    }

    /// Whether the page that `slot` names has as many mappings as can be counted.
    pub(crate) fn is_full<M: Machine>(cpu: &Cpu<'_, M>, slot: &AtomicU64) -> bool {
        let seen = node::load(slot);
        seen.is_present() && cpu.vm().frames.meta(seen.frame()).is_full()
    }

    /// One more reference to the page that `slot`, an entry of an object, names, if it names one, and
    /// `take` can take one.
    #[inline(always)]
    fn refer<M: Machine>(
        cpu: &Cpu<'_, M>,
        slot: &AtomicU64,
        take: impl Fn(&FrameMeta) -> bool,
    ) -> Option<FrameNumber> {
        loop {
            let seen = node::load(slot);
            if !seen.is_present() {
                return None;
            }
            let frame = seen.frame();
            let meta = cpu.vm().frames.meta(frame);
            if !take(meta) {
                // On its way out; or it has as many references as can be counted.
                if meta.refs() != 0 && node::load(slot) == seen {
                    return None;
                }
                continue;
            }
            if node::load(slot) == seen || lost(Mutant::ReferLooksAgain) {
                return Some(frame);
            }
            // SAFETY: the reference taken above, which never was a mapping.
            unsafe { cpu.put_unmapped(frame) };
        }
    }

    /// The last-level table of the page at `index`, in which that page is, made if it was not there; it
    /// may leave again at any time. The caller owns a share of the object, or sees one in a VMA.
    ///
    /// # Errors
    /// Why there is no page.
    pub(crate) fn page<'v, M: Machine>(
        &self,
        cpu: &Cpu<'v, M>,
        index: u64,
        prepared: &mut Prepared,
    ) -> Result<&'v [AtomicU64; ENTRIES], NoPage> {
        if index >= self.pages() {
            return Err(NoPage::Beyond);
        }
        let addr = index << PAGE_SHIFT;
        loop {
            // SAFETY: the object's tables are unlinked only in `end`, when no share is left.
            match unsafe { descend(cpu.vm().machine(), self.root, addr) } {
                Reached::Above { slot, level, seen } => {
                    if seen.is_locked() {
                        protocol::look(slot, cpu);
                        continue;
                    }
                    // Tables stay, whatever the length.
                    if table::publish(cpu, Ticket::held(), slot, level, prepared)
                        == Err(Abort::NoMemory)
                    {
                        return Err(NoPage::OutOfMemory);
                    }
                }
                Reached::Last(slots) => {
                    let slot = &slots[node::index(addr, LAST)];
                    if protocol::look(slot, cpu).is_present() {
                        return Ok(slots);
                    }
                    let frame = prepared.zeroed_seldom(cpu).ok_or(NoPage::OutOfMemory)?;
                    let Ok(held) = protocol::take(slot, Entry::NONE, cpu) else {
                        prepared.keep_zeroed(frame);
                        continue;
                    };
                    // The length is the sequence.
                    if index >= self.pages() && !lost(Mutant::ObjectLooksAgain) {
                        held.revert();
                        prepared.keep_zeroed(frame);
                        return Err(NoPage::Beyond);
                    }
                    let number = cpu.vm().frames.publish(frame, Use::Shared, 0, index);
                    held.commit(Entry::leaf(number));
                    return Ok(slots);
                }
            }
        }
    }

    /// Frees all its pages and tables.
    fn destroy<M: Machine>(mut self, cpu: &Cpu<'_, M>) {
        self.place.vacate();
        // SAFETY: the last share of the object is gone, so its tables are ours alone.
        unsafe { Self::end(cpu, self.root, self.pages()) };
    }

    /// Frees the pages and tables of an object whose root table is `root`.
    ///
    /// # Safety
    /// The tables are the caller's alone.
    pub(crate) unsafe fn end<M: Machine>(cpu: &Cpu<'_, M>, root: FrameNumber, pages: u64) {
        // SAFETY: the caller's promise.
        unsafe {
            Self::free_below(cpu, root, 0..pages);
            cpu.free_tables(root, ROOT);
        }
    }
}

/// A page with a transient reference, which goes back when this is dropped.
pub(crate) struct Lent<'a, 'v, M: Machine> {
    cpu: &'a Cpu<'v, M>,
    frame: FrameNumber,
}

impl<'a, 'v, M: Machine> Lent<'a, 'v, M> {
    /// The page in `frame`, unless it has lost its last reference. Whether it is the one that was looked for is the caller's
    /// to check afterwards, by the entry that named it.
    pub(crate) fn try_new(cpu: &'a Cpu<'v, M>, frame: FrameNumber) -> Option<Self> {
        cpu.vm().frames.meta(frame).get_ref_unless_zero().then(|| Self { cpu, frame })
    }

    /// Its bytes, which stay the page's as long as this.
    pub(crate) fn bytes(&self) -> *mut u8 {
        self.cpu.vm().machine().frame_bytes(self.frame)
    }
}

impl<M: Machine> Drop for Lent<'_, '_, M> {
    fn drop(&mut self) {
        // SAFETY: the transient reference, which never was a mapping.
        unsafe { self.cpu.put_unmapped(self.frame) };
    }
}

impl From<NoPage> for Abort {
    fn from(no_page: NoPage) -> Self {
        match no_page {
            NoPage::Beyond => Self::BeyondObject,
            NoPage::OutOfMemory => Self::NoMemory,
        }
    }
}
