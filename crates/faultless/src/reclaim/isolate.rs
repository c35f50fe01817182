//! Taking pages from the programs that use them: the common part of migration and eviction.
//!
//! A page may be mapped by many entries, in many spaces. The [reverse map](crate::rmap) finds them.
//! A batch of pages is taken in these steps:
//!
//! 1. [`find`](Batch::find): finds the entries of each page, and the page's entry in its object, if
//!    any. No entry is held yet. Huge leaves are split.
//! 2. [`take`](Batch::take): takes all of a page's entries, each by a compare-and-swap from a value
//!    that names the frame, without waiting. If an entry cannot be taken, or the frame has a
//!    different number of references than entries taken, the page stays: the page is pinned, or in
//!    use by the kernel, or a fork or an `mremap` is in progress.
//! 3. [`flush`](Batch::flush): flushes the translations of the whole batch, once for each space. If
//!    all mappings of a page are read-only, its flush is [deferred](crate::tlb::deferred) if
//!    possible; a [flush-free](super::flush_free) page needs no flush. If an operation has a claim
//!    on a page, the whole space is flushed: the operation may have changed the entry without
//!    having flushed the former translations yet, here or at the address that the page has moved
//!    from.
//! 4. The caller stores new entries, and [drops the references](Batch::put_references) to the
//!    frames. Frames with a deferred flush are kept unchanged, all together at the
//!    [end](Batch::end).
//!
//! From step 2 to step 4 the entries are busy: faults and writers wait for them. So no store is
//! lost, because no store can come between the flush and the new entry. The steps read no VMA and
//! claim no page: writers change an entry before it is taken or after the new value is stored.
//!
//! A CPU that takes a reference to a frame through an entry reads the entry again afterwards. So
//! the count in step 2 proves that no other CPU has a reference unknown to this CPU, and any CPU
//! that takes a reference later finds the entry busy and drops the reference.

use crate::addr::{FrameNumber, VirtRange};
use crate::error::{Errno, OutOfMemory};
use crate::file::Object;
use crate::frame::flush_pending::FlushPendingRun;
use crate::frame::{Clean, Frame, FrameUse, Kind};
use crate::heap::{Bounded, Shared, try_push};
use crate::machine::{Machine, SpaceId};
use crate::rmap::visits::Visits;
use crate::rmap::walk::Found;
use crate::rmap::walker::Walk;
use crate::space::batch::shoot_core;
use crate::space::core::Core;
use crate::space::huge::split_leaf;
use crate::stat::Counter;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::mutant::{Mutant, lost};
use crate::table::Entry;
use crate::table::node::{self, TABLE_ALIGN};
use crate::table::protocol::{self, Taken};
use crate::vm::Cpu;
use alloc::vec::Vec;
use arrayvec::ArrayVec;
use core::ops::{ControlFlow, Deref, DerefMut, Range};

/// The maximum number of pages of a batch.
pub(crate) const BATCH: usize = 32;

/// At most [`BATCH`] frames; the owner of the list has a reference to each.
pub(crate) type FrameList = ArrayVec<FrameNumber, BATCH>;

/// A [`FrameList`] with its references; the drop releases the references.
pub(super) struct Referred<'c, 'v, M: Machine> {
    cpu: &'c Cpu<'v, M>,
    frames: FrameList,
}

impl<'c, 'v, M: Machine> Referred<'c, 'v, M> {
    pub(super) const fn new(cpu: &'c Cpu<'v, M>) -> Self {
        Self { cpu, frames: FrameList::new_const() }
    }

    /// Returns a list of `frames`, at most [`BATCH`]. Takes over the caller's reference to each.
    pub(super) fn of(cpu: &'c Cpu<'v, M>, frames: &[FrameNumber]) -> Self {
        let mut list = Self::new(cpu);
        frames.iter().for_each(|frame| list.push(*frame));
        list
    }

    /// Returns the contents of the list with the references, and empties it.
    pub(super) fn take(&mut self) -> FrameList {
        self.frames.take()
    }
}

impl<M: Machine> Deref for Referred<'_, '_, M> {
    type Target = FrameList;

    fn deref(&self) -> &FrameList {
        &self.frames
    }
}

impl<M: Machine> DerefMut for Referred<'_, '_, M> {
    fn deref_mut(&mut self) -> &mut FrameList {
        &mut self.frames
    }
}

impl<M: Machine> Drop for Referred<'_, '_, M> {
    fn drop(&mut self) {
        self.cpu.put_all_unmapped(&self.frames);
    }
}

/// Asks CPUs to flush once 1/`ASKED` of the deferral budget is used. By measurement: with a
/// threshold of 1/4, twice as many frames waited, and more than ten times as many CPUs were
/// interrupted (`xsbench` at 1:1 on simulated CPUs).
const ASKED: u64 = 32;

/// The later steps for the pages of a batch, which decide the kind of flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Then {
    /// The pages move to new frames. Afterwards the entries name the new frames, so an operation
    /// that changes the page at an address flushes this address.
    Move,
    /// The pages leave their object and all mappings. Their empty entries cannot be distinguished
    /// from entries of pages never present, so an operation that maps another page there
    /// does [this flush](crate::space::core::Core::evicted) first.
    Leave,
    /// The pages stay in their frames, unmapped. The flush is not deferred, because the frames
    /// remain in use.
    Stay,
}

/// An entry that maps a page, taken or not.
#[derive(Debug)]
pub(super) struct Mapping<'s> {
    pub(super) found: Found<'s>,
    taken: Option<Taken<'s>>,
    /// The range to flush for this mapping.
    flush: Option<VirtRange>,
}

/// A page of a batch.
#[derive(Debug)]
pub(super) struct Page<'s> {
    /// The frame of the page, to which the caller has a reference.
    pub(super) frame: FrameNumber,
    /// The reason why the page was not taken, or must not be.
    pub(super) failed: Option<Errno>,
    /// The page's mappings, in the list of the batch.
    mappings: Range<usize>,
    /// The page's object, and its entry in the object.
    pub(super) object: Option<Shared<Object>>,
    name: Option<&'s AtomicU64>,
    /// The object's entry once it is taken, with its value.
    taken: Option<(Taken<'s>, Entry)>,
    /// Whether the flush is deferred.
    defers: bool,
    /// Whether all of the mappings' entries were [idle](Entry::is_idle) when they were taken. After
    /// [`flush`](Batch::flush): whether no CPU has a translation of the page
    /// ([`flush_free`](super::flush_free)).
    flush_free: bool,
}

impl Page<'_> {
    /// Returns how many entries name the frame, including the object's.
    pub(super) fn entries(&self) -> u32 {
        self.mappings.len() as u32 + u32::from(self.name_of_object().is_some())
    }

    /// Returns the value of the page's entry in its object at the time it was taken.
    pub(super) fn name_of_object(&self) -> Option<Entry> {
        self.taken.as_ref().map(|(_, seen)| *seen)
    }
}

/// Pages that are taken together. The drop releases shares of objects: if a share is the last, a
/// CPU ends the object later.
#[derive(Debug)]
pub(super) struct Batch<'s> {
    pages: Bounded<Page<'s>>,
    mappings: Vec<Mapping<'s>>,
    visits: Visits<'s>,
    /// The stamp of the deferred flush.
    stamp: u64,
    /// Frames that wait for the deferred flush, until the [end](Self::end).
    flush_pending: FlushPendingRun,
    /// The number of frames added to `flush_pending`.
    added: u64,
    /// Whether any page may be flush-free.
    idle: bool,
}

impl<'s> Batch<'s> {
    /// Returns a batch of at most `most` pages. If the deferral budget is used up, the deferred
    /// flushes are done first. No entry is held yet.
    pub(super) fn try_new<M: Machine>(cpu: &Cpu<'_, M>, most: usize) -> Result<Self, OutOfMemory> {
        if cpu.vm().frames.budget_is_used_up() {
            cpu.free_some_flush_pending();
        } else if cpu.vm().frames.uses_budget(ASKED) {
            cpu.vm().deferred.ask();
            if cpu.vm().frames.uses_budget(2) {
                cpu.free_flushed();
            }
        }
        let mut mappings = Vec::new();
        // Most pages have one mapping.
        mappings.try_reserve(most).map_err(|_| OutOfMemory)?;
        Ok(Self {
            pages: Bounded::try_new(most)?,
            mappings,
            visits: Visits::default(),
            stamp: 0,
            flush_pending: FlushPendingRun::new(),
            added: 0,
            idle: false,
        })
    }

    /// Step 1. Adds the page in `frame`, to which the caller has a reference, or a failed page.
    /// [`put_references`](Self::put_references) identifies the page by its place. No entry is held.
    pub(super) fn find<M: Machine>(
        &mut self,
        cpu: &'s Cpu<'_, M>,
        walk: &'s Walk<'_>,
        frame: FrameNumber,
    ) {
        let mut page = Page {
            frame,
            failed: None,
            mappings: 0..0,
            object: None,
            name: None,
            taken: None,
            defers: false,
            flush_free: false,
        };
        match find_entries(cpu, walk, &mut self.visits, frame, &mut self.mappings) {
            Ok((range, object)) => {
                let index = cpu.vm().frames.meta(frame).index.load(Ordering::Relaxed);
                page.mappings = range;
                page.name = object.as_ref().and_then(|object| object.slot(cpu, index));
                page.object = object;
            }
            Err(errno) => page.failed = Some(errno),
        }
        self.pages.push(page);
    }

    /// Adds a page that must not be taken.
    pub(super) fn fail(&mut self, frame: FrameNumber, errno: Errno) {
        let failed = Some(errno);
        let (mappings, taken) = (0..0, None);
        let (object, name, defers, flush_free) = (None, None, false, false);
        self.pages.push(Page { frame, failed, mappings, object, name, taken, defers, flush_free });
    }

    /// Step 2. Restores pages whose entries could not all be taken, and pages for which `wanted`,
    /// called with each place once the entries are taken, returns an error. From here on the CPU
    /// holds entries, and waits only for flushes.
    pub(super) fn take<M: Machine>(
        &mut self,
        cpu: &'s Cpu<'_, M>,
        mut wanted: impl FnMut(usize, &Page<'_>, &[Mapping<'_>]) -> Result<(), Errno>,
    ) {
        for (at, page) in self.pages.iter_mut().enumerate() {
            if page.failed.is_some() {
                continue;
            }
            let mappings = &mut self.mappings[page.mappings.clone()];
            let taken = if take_page(cpu, page, mappings) {
                wanted(at, page, mappings)
            } else {
                Err(Errno::EBUSY)
            };
            if let Err(errno) = taken {
                (page.failed, page.flush_free) = (Some(errno), false);
                mappings.iter_mut().filter_map(|it| it.taken.take()).for_each(Taken::revert);
                if let Some((taken, _)) = page.taken.take() {
                    taken.revert();
                }
            }
            self.idle |= page.flush_free;
        }
    }

    /// Step 3.
    pub(super) fn flush<M: Machine>(&mut self, cpu: &Cpu<'_, M>, then: Then) {
        let quiet = Quiet::of(cpu, &self.mappings);
        if self.idle {
            self.find_flush_free(cpu);
        }
        if then != Then::Stay && self.defer(cpu, then, quiet) {
            return;
        }
        let mut any = false;
        for page in self.pages.iter().filter(|page| !page.defers && !page.flush_free) {
            for mapping in &mut self.mappings[page.mappings.clone()] {
                mapping.flush = what_to_flush(cpu, mapping, quiet);
                any |= mapping.flush.is_some();
            }
        }
        if !any {
            return;
        }
        let flushed = || self.mappings.iter().filter(|it| it.flush.is_some());
        for (at, Mapping { found: Found { space, .. }, .. }) in flushed().enumerate() {
            let same = |other: &&Mapping<'_>| other.found.space.id == space.id;
            if flushed().take(at).any(|other| same(&other)) {
                continue;
            }
            let ranges = flushed().filter(same).filter_map(|it| it.flush);
            if let Some(hull) = ranges.reduce(VirtRange::hull) {
                shoot_core(cpu, space, hull);
            }
        }
    }

    /// Returns the pages, in the order in which they were added.
    pub(super) fn pages(&self) -> &[Page<'s>] {
        &self.pages
    }

    /// Returns the number of pages.
    pub(super) fn len(&self) -> usize {
        self.pages.len()
    }

    /// Step 4 for the entries of the page at place `at`, whose entries are taken: `mapping` and
    /// `name` compute the new values of the mappings' entries and of the object's entry. The frame
    /// still has the references of the old entries. Returns the number of mappings.
    pub(super) fn store(
        &mut self,
        at: usize,
        mut mapping: impl FnMut(&Found<'s>) -> Entry,
        name: impl FnOnce(Entry) -> Entry,
    ) -> u32 {
        let page = &mut self.pages[at];
        let count = page.mappings.len() as u32;
        for it in &mut self.mappings[page.mappings.clone()] {
            if let Some(taken) = it.taken.take() {
                taken.commit(mapping(&it.found));
            }
        }
        if let Some((taken, seen)) = page.taken.take() {
            taken.commit(name(seen));
        }
        count
    }

    /// The end of step 4 for a page: drops `refs` references to the frame of the page at place
    /// `at`, all known references, whose entries are gone. A free frame is passed to `free`, or
    /// waits for its flush. Returns whether the frame is free, or will be.
    pub(super) fn put_references<M: Machine>(
        &mut self,
        cpu: &Cpu<'_, M>,
        at: usize,
        refs: u32,
        free: impl FnOnce(Frame<Clean>),
    ) -> bool {
        let Page { frame, defers, .. } = self.pages[at];
        if cpu.vm().frames.meta(frame).put_all(refs) {
            // SAFETY: all references belonged to this CPU, and no entry names the frame.
            let flush_pending = unsafe { cpu.vm().frames.reclaim(frame) };
            if defers {
                cpu.vm().frames.add_flush_pending(
                    &mut self.flush_pending,
                    flush_pending,
                    self.stamp,
                    cpu,
                );
                self.added += 1;
            } else {
                // SAFETY: flushed, or no CPU has a translation, because the page is flush-free
                // (`reclaim::flush_free`).
                free(unsafe { flush_pending.assume_flushed() });
            }
            return true;
        }
        // A CPU that has read an old entry briefly has a reference, and may be the one to free the
        // frame.
        if defers {
            cpu.do_deferred_flushes();
        }
        let mut freed = false;
        for _ in 0..refs {
            // SAFETY: drops references of old entries, which are gone and flushed, or the caller's
            // own, which never was a mapping.
            freed |= unsafe { cpu.put_unmapped(frame) };
        }
        freed
    }

    /// Ends the batch: the references to all pages are dropped, or the pages have failed.
    pub(super) fn end<M: Machine>(mut self, cpu: &Cpu<'_, M>) {
        cpu.vm().frames.keep_flush_pending(&mut self.flush_pending, cpu);
        cpu.state().counts.add(Counter::FrameOwed, self.added);
    }

    /// Finds the [flush-free](super::flush_free) pages: no CPU has a translation.
    #[cold]
    #[inline(never)]
    fn find_flush_free<M: Machine>(&mut self, cpu: &Cpu<'_, M>) {
        let (defers, flushed) = (cpu.vm().knobs.deferred_flush(), cpu.flushed_by_all());
        for page in self.pages.iter_mut().filter(|page| page.flush_free) {
            page.flush_free =
                defers && cpu.is_flush_free(cpu.vm().frames.meta(page.frame), flushed);
            if page.flush_free {
                cpu.count(Counter::FlushNeedless);
            }
        }
    }

    /// Chooses the taken pages that need no immediate flush, and stamps their flush. Returns
    /// whether the chosen and the flush-free pages are the whole batch.
    fn defer<M: Machine>(&mut self, cpu: &Cpu<'_, M>, then: Then, quiet: Quiet) -> bool {
        let frames = &cpu.vm().frames;
        // If pages leave because memory is short, their frames are available as soon as all flushes
        // are done, with a single flush for many batches.
        let short = then == Then::Move && frames.is_scarce();
        if short || frames.budget_is_used_up() || !cpu.vm().knobs.deferred_flush() {
            return false;
        }
        let (mut any, mut all) = (false, true);
        for page in self.pages.iter_mut().filter(|page| !page.flush_free) {
            let own = &self.mappings[page.mappings.clone()];
            let may = |mapping: &Mapping<'_>| may_defer(cpu, mapping, quiet);
            page.defers = !own.is_empty() && own.iter().all(may);
            any |= page.defers;
            all &= page.defers;
        }
        if !any {
            return all;
        }
        let deferred = || self.pages.iter().filter(|page| page.defers);
        let mappings = deferred().flat_map(|page| &self.mappings[page.mappings.clone()]);
        // Visits each space once if its pages are adjacent in the batch, which is usual.
        let mut before = None;
        let spaces =
            mappings.take(if quiet.alone { 1 } else { usize::MAX }).filter_map(move |it| {
                let core = it.found.space;
                (before.replace(core.id) != Some(core.id)).then_some(core)
            });
        let stamp = cpu.defer_flush(spaces.clone().map(|space| &*space.cpus));
        // Recorded before the new entries are stored: a CPU that finds a new entry, and then
        // changes the contents of the page, finds the stamp.
        for space in spaces {
            let pending = if then == Then::Leave { &space.evicted } else { &space.pending };
            pending.note(stamp);
        }
        let mut last: Option<&Shared<Object>> = None;
        for object in deferred().filter_map(|page| page.object.as_ref()) {
            if last.replace(object).is_none_or(|last| !last.same(object)) {
                object.pending.note(stamp);
            }
        }
        self.stamp = stamp;
        all
    }
}

/// Adds the entries that map `frame` to `mappings`, and returns their range, and the page's object.
fn find_entries<'s, M: Machine>(
    cpu: &'s Cpu<'_, M>,
    walk: &'s Walk<'_>,
    visits: &mut Visits<'s>,
    frame: FrameNumber,
    mappings: &mut Vec<Mapping<'s>>,
) -> Result<(Range<usize>, Option<Shared<Object>>), Errno> {
    let meta = cpu.vm().frames.meta(frame);
    let first = mappings.len();
    // A huge leaf is split, and the pages are then found individually. Several spaces may have a
    // huge leaf.
    loop {
        // All references except the caller's own, and an object's. Several VMAs of one space may
        // lead to the same entry of an object's page.
        let of_object = meta.kind() == Kind::Used(FrameUse::Shared);
        let most = meta.refs().saturating_sub(1 + u32::from(of_object));
        let most = if of_object && most != 0 { u32::MAX } else { most };
        let (mut leaf, mut failed) = (None, None);
        let object = cpu.each_mapping(walk, visits, frame, most, |found| {
            if found.seen.is_huge() {
                leaf = Some(found);
                return ControlFlow::Break(());
            }
            match try_push(mappings, Mapping { found, taken: None, flush: None }) {
                Ok(()) => ControlFlow::Continue(()),
                Err(OutOfMemory) => {
                    failed = Some(Errno::ENOMEM);
                    ControlFlow::Break(())
                }
            }
        });
        if let Some(errno) = failed {
            mappings.truncate(first);
            return Err(errno);
        }
        let Some(Found { space, addr, slot, .. }) = leaf else {
            if of_object && mappings.len() > first + 1 {
                drop_twice(mappings, first);
            }
            return Ok((first..mappings.len(), object.cloned()));
        };
        mappings.truncate(first);
        split_leaf(cpu, space, addr & !(TABLE_ALIGN - 1), slot);
    }
}

/// Takes all entries of a page. Returns whether all were taken, and there is no other reference;
/// otherwise entries already taken stay taken.
fn take_page<'s, M: Machine>(
    cpu: &'s Cpu<'_, M>,
    page: &mut Page<'s>,
    mappings: &mut [Mapping<'s>],
) -> bool {
    let meta = cpu.vm().frames.meta(page.frame);
    if meta.kind() == Kind::Used(FrameUse::Shared) {
        page.taken = page.name.and_then(|name| take_of(cpu, name, node::load(name), page.frame));
        if page.taken.is_none() {
            // A page that was cut off its object is about to be revoked.
            return false;
        }
    }
    let mut idle = !mappings.is_empty();
    for mapping in &mut *mappings {
        let Found { slot, seen, .. } = mapping.found;
        let Some((taken, seen)) = take_of(cpu, slot, seen, page.frame) else { return false };
        idle &= seen.is_idle();
        mapping.found.seen = seen;
        mapping.taken = Some(taken);
    }
    page.flush_free = idle;
    // The entries' references, and the caller's own.
    let known = page.entries() + 1;
    let alone = meta.refs() == known && !meta.is_pinned();
    known > 1 && (alone || lost(Mutant::MigrateCounts))
}

/// Takes an entry of the last level that was `seen`, if it maps `frame`, and returns its value.
fn take_of<'s, M: Machine>(
    cpu: &'s Cpu<'_, M>,
    slot: &'s AtomicU64,
    mut seen: Entry,
    frame: FrameNumber,
) -> Option<(Taken<'s>, Entry)> {
    while seen.is_mapped() && !seen.is_locked() && seen.frame() == frame {
        match protocol::take(slot, seen, cpu) {
            Ok(taken) => return Some((taken, seen)),
            // The entry is accessed or dirty by now, or maps another page.
            Err(now) => seen = now,
        }
    }
    None
}

/// Information about the spaces of a batch, collected before the mappings are checked individually.
#[derive(Clone, Copy, Debug)]
struct Quiet {
    /// The space of the first mapping, if no operation has a claim on any page in the range of its
    /// mappings: checking the whole range costs as much as checking one page.
    space: Option<SpaceId>,
    /// Whether all mappings belong to one space.
    alone: bool,
}

impl Quiet {
    /// Called after the barriers with which the entries were taken, as for [`is_claimed`].
    fn of<M: Machine>(cpu: &Cpu<'_, M>, mappings: &[Mapping<'_>]) -> Self {
        let Some(first) = mappings.first() else { return Self { space: None, alone: true } };
        let space = first.found.space;
        let (mut low, mut high, mut alone) = (first.found.addr, first.found.addr, true);
        for mapping in mappings {
            if mapping.found.space.id == space.id {
                low = low.min(mapping.found.addr);
                high = high.max(mapping.found.addr);
            } else {
                alone = false;
            }
        }
        let hull = VirtRange::page(low).hull(VirtRange::page(high));
        Self { space: (!is_claimed(cpu, space, hull)).then_some(space.id), alone }
    }
}

/// Returns whether no CPU can store through a translation of an entry, which is taken. No page is
/// claimed in the space that is `quiet`.
fn may_defer<M: Machine>(cpu: &Cpu<'_, M>, mapping: &Mapping<'_>, quiet: Quiet) -> bool {
    let Found { space, addr, seen, .. } = mapping.found;
    let stores = seen.is_writable() && !lost(Mutant::DeferLooksAtStores);
    let claimed = || is_claimed_in(cpu, space, addr, quiet) && !lost(Mutant::DeferLooksAtClaims);
    mapping.taken.is_some() && !stores && !claimed()
}

/// [`is_claimed`] for one page; no page is claimed in the space that is `quiet`.
fn is_claimed_in<M: Machine>(cpu: &Cpu<'_, M>, space: &Core, addr: u64, quiet: Quiet) -> bool {
    quiet.space != Some(space.id) && is_claimed(cpu, space, VirtRange::page(addr))
}

/// Returns the range to flush in an entry's space before its frame is reused, if the entry is
/// taken. The range is the whole space if an operation that has changed the entry may not have
/// flushed yet: the operation has removed permissions here, or moved the entry here from an address
/// with translations still in use.
fn what_to_flush<M: Machine>(
    cpu: &Cpu<'_, M>,
    mapping: &Mapping<'_>,
    quiet: Quiet,
) -> Option<VirtRange> {
    let Found { space, addr, seen, .. } = mapping.found;
    if mapping.taken.is_none() {
        None
    } else if is_claimed_in(cpu, space, addr, quiet) && !lost(Mutant::FlushLooksAtClaims) {
        Some(VirtRange::USER)
    } else {
        Entry::NONE.needs_flush(seen).then(|| VirtRange::page(addr))
    }
}

/// Returns whether an operation has a claim on pages in `range`, whose entries are taken: such an
/// operation removes permissions, or moves entries, before it flushes. The claim is read after the
/// barrier with which the entries were taken: an operation that changed an entry earlier still has
/// its claim, unless it has flushed.
fn is_claimed<M: Machine>(cpu: &Cpu<'_, M>, space: &Core, range: VirtRange) -> bool {
    space.mmap_lock.is_held() || space.ranges.is_claimed(&cpu.vm().claims, range)
}

/// Removes duplicates of the same entry from `mappings`, starting at `first`.
fn drop_twice(mappings: &mut Vec<Mapping<'_>>, first: usize) {
    let slot = |mapping: &Mapping<'_>| core::ptr::from_ref(mapping.found.slot).addr();
    mappings[first..].sort_unstable_by_key(slot);
    let mut kept = first;
    for at in first..mappings.len() {
        if at == first || slot(&mappings[at]) != slot(&mappings[kept - 1]) {
            mappings.swap(kept, at);
            kept += 1;
        }
    }
    mappings.truncate(kept);
}
