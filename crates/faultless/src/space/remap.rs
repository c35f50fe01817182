//! `mremap`: shrinks a mapping, grows it in place, or moves it with its pages.

use super::Space;
use super::area::VmaFlags;
use super::lock::MemoryLock;
use super::made::State;
use super::merge::range_later;
use super::pages::{Leaf, each_leaf};
use super::place::Places;
use super::unmap::with_tables;
use super::versions::Versions;
use super::vma::{Piece, Vma};
use super::write::Refused;
use super::write::{NOWHERE, Writing};
use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtRange, is_page_aligned, page_up};
use crate::error::{Errno, Error, OutOfMemory};
use crate::frame::{FrameMeta, FrameUse, Kind};
use crate::machine::Machine;
use crate::rmap::moved::{Note, Reserved};
use crate::space::batch::FlushBatch;
use crate::space::tree::View;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::mutant::{Mutant, lost};
use crate::table::Entry;
use crate::table::format::USER_END;
use crate::table::node::{self, LAST};
use crate::table::protocol;
use crate::table::range::{self, Leaves};
use crate::table::walk::{Reached, descend};
use crate::vm::Cpu;
use bitflags::bitflags;
use core::cell::Cell;
use core::convert::Infallible;

bitflags! {
    /// Linux's `MREMAP_*`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct RemapFlags: u32 {
        /// May move.
        const MAYMOVE = 1;
        /// Must move to the given address, and replaces the mappings there.
        const FIXED = 2;
        /// The old range stays mapped, empty.
        const DONTUNMAP = 4;
    }
}

/// A checked request.
struct Request {
    old: VirtRange,
    new_len: u64,
    flags: RemapFlags,
    target: u64,
    /// Bytes below `old` and `target` that have been moved already.
    moved: u64,
    /// The places for a mapping without a given target.
    places: Places,
}

/// The shared pages among the pages that move.
#[derive(Default)]
struct Moving {
    /// Whether a page had several references before the move. Then there is room for all notes.
    shares: bool,
    /// The pages of the next note.
    run: Option<Note>,
    reserved: Reserved,
}

impl<M: Machine> Space<M> {
    /// Resizes or moves the mapping at `addr`, and returns its address. `target` counts with
    /// `FIXED`, and is a hint with `DONTUNMAP`, unless it is 0.
    ///
    /// # Errors
    /// As Linux: `EINVAL` (unaligned, unknown or contradictory flags, new length 0, ranges that
    /// overlap or leave user space, old length 0 of a private mapping), `EFAULT` (nothing mapped at
    /// `addr`, or a mapping that ends before the old length), `ENOMEM`, `EPERM` (`FIXED` below
    /// [`lowest_address`](Machine::lowest_address)). A failed call changes nothing, except if
    /// several VMAs move at once: as on Linux, the VMAs before the first that cannot move have
    /// moved.
    pub fn mremap(
        &self,
        cpu: &Cpu<'_, M>,
        addr: u64,
        old_len: u64,
        new_len: u64,
        flags: RemapFlags,
        target: u64,
    ) -> Result<u64, Error> {
        self.check_vm(cpu);
        let given = VirtRange::new(addr, addr.saturating_add(old_len));
        let refused = |errno| Error { operation: "mremap", range: given, errno };
        let places = Places::common(cpu);
        let request = check(addr, old_len, new_len, flags, target, places).map_err(refused)?;
        // Moved parts stay moved: a second attempt continues with the rest.
        let done = Cell::new(0);
        let moved = cpu.with_memory(|| self.remap(cpu, &request, &done));
        cpu.collect();
        moved.map_err(refused)
    }

    /// Chooses a course, claims the ranges needed, and executes the course.
    fn remap(&self, cpu: &Cpu<'_, M>, request: &Request, done: &Cell<u64>) -> Result<u64, Errno> {
        let course = Cell::new(Course::Refused);
        for tries in 0.. {
            let request = request.after(done.get());
            let choose = |view: &View<'_, Vma>| {
                course.set(Course::choose(view, &request));
                request.ranges(view, course.get())
            };
            let writing = self.write_where(cpu, PAGE_SIZE, tries, choose, None);
            if let Some(start) = writing.remap(&request, course.get(), done)? {
                return Ok(start);
            }
        }
        Err(Errno::ENOMEM)
    }
}

/// How the call changes a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Course {
    /// The mapping shrinks, stays, or grows in place.
    InPlace,
    /// The mapping moves to this address, if there is enough free space.
    To(Option<u64>),
    /// All VMAs of the range move to a fixed address, with the holes between them kept.
    Each,
    /// The mapping may not move, and cannot stay.
    Refused,
}

impl Course {
    /// Returns the course of `request` in `view`.
    fn choose(view: &View<'_, Vma>, request: &Request) -> Self {
        let Request { old, new_len, flags, target, .. } = *request;
        if flags.contains(RemapFlags::FIXED) {
            // Linux moves several VMAs since 6.17, if nothing is resized.
            let each = new_len == old.len() && !old.is_empty();
            return if each { Self::Each } else { Self::To(Some(target)) };
        }
        if flags.contains(RemapFlags::DONTUNMAP) {
            // As on Linux, 0 is no hint.
            let hint = (target != 0).then_some(target);
            return Self::To(request.places.find(view, hint, new_len));
        }
        let more = VirtRange::new(old.end, old.start + new_len);
        let at_end = view.at(old.start).is_some_and(|entry| entry.end == old.end);
        let room =
            more.end <= USER_END && view.find(more.start).is_none_or(|e| e.start >= more.end);
        if new_len <= old.len() || (at_end && !old.is_empty() && room) {
            Self::InPlace
        } else if flags.contains(RemapFlags::MAYMOVE) {
            Self::To(request.places.find(view, None, new_len))
        } else {
            Self::Refused
        }
    }
}

impl Request {
    /// Returns the rest of the request after the first `moved` bytes.
    fn after(&self, moved: u64) -> Self {
        Self {
            old: VirtRange::new(self.old.start + moved, self.old.end),
            new_len: self.new_len - moved,
            flags: self.flags,
            // Without `FIXED` nothing moves in parts, and the target may be any number.
            target: self.target.wrapping_add(moved),
            moved,
            places: self.places,
        }
    }

    /// Returns the ranges to claim for `course`: at least one page of the old place, to find the
    /// mapping there; and all of the locked VMAs that the call unlocks.
    fn ranges(&self, view: &View<'_, Vma>, course: Course) -> [VirtRange; 2] {
        let old = VirtRange::new(self.old.start, self.old.start + self.old.len().max(PAGE_SIZE));
        let second = view.iter_from(self.old.start).nth(1);
        let several = second.is_some_and(|entry| entry.start < self.old.end);
        let unlocks = self.flags.contains(RemapFlags::DONTUNMAP);
        let locked = |addr| {
            let entry = view.at(addr).filter(|_| unlocks)?;
            let vma = entry.get();
            (vma.area().lock() != MemoryLock::No).then(|| range_later(*view, vma))
        };
        let ends = [old.start, old.end - PAGE_SIZE].map(locked);
        let old = ends.into_iter().flatten().fold(old, VirtRange::hull);
        // If the old place stays mapped, its tables stay. The tables of the new place go if the
        // move fails.
        let left = if unlocks { old } else { with_tables(view, old) };
        let taken = |start| with_tables(view, self.target_at(start));
        match course {
            Course::InPlace if self.new_len < self.old.len() => {
                [old.hull(with_tables(view, self.cut())), NOWHERE]
            }
            Course::InPlace => [old.hull(self.target_at(self.old.start)), NOWHERE],
            Course::To(Some(start)) => [left, taken(start)],
            // No other operation may see that some VMAs have moved and some have not.
            Course::Each if several => [VirtRange::USER, NOWHERE],
            Course::Each => [left, taken(self.target)],
            Course::To(None) | Course::Refused => [old, NOWHERE],
        }
    }

    /// Returns the range to unmap, if the mapping shrinks in place.
    fn cut(&self) -> VirtRange {
        VirtRange::new(self.old.start + self.new_len, self.old.end)
    }

    /// Returns the target range that begins at `start`.
    fn target_at(&self, start: u64) -> VirtRange {
        VirtRange::new(start, start + self.new_len)
    }
}

/// Returns the errors that Linux returns before reading the space.
fn check(
    addr: u64,
    old_len: u64,
    new_len: u64,
    flags: RemapFlags,
    target: u64,
    places: Places,
) -> Result<Request, Errno> {
    let fixed = flags.contains(RemapFlags::FIXED);
    let keep = flags.contains(RemapFlags::DONTUNMAP);
    let moves = flags.contains(RemapFlags::MAYMOVE);
    if flags.bits() & !RemapFlags::all().bits() != 0
        || (fixed && !moves)
        || (keep && !moves)
        || !is_page_aligned(addr)
    {
        return Err(Errno::EINVAL);
    }
    // As on Linux, the length of the last page of the address space wraps around to 0.
    let old_len = page_up(old_len).unwrap_or(0);
    let new_len = page_up(new_len).filter(|&len| len != 0 && len <= USER_END);
    let new_len = new_len.ok_or(Errno::EINVAL)?;
    let old = VirtRange::new(addr, addr.saturating_add(old_len));
    if fixed || keep {
        if !is_page_aligned(target) || target > USER_END - new_len {
            return Err(Errno::EINVAL);
        }
        // An end beyond all addresses also wraps around.
        let overlaps = addr < target + new_len && target < addr.wrapping_add(old_len);
        if overlaps || (keep && old_len != new_len) {
            return Err(Errno::EINVAL);
        }
    }
    if addr >= USER_END {
        return Err(Errno::EFAULT);
    }
    Ok(Request { old, new_len, flags, target, moved: 0, places })
}

impl<M: Machine> Writing<'_, '_, M> {
    /// Executes the request by `course`, whose ranges must be claimed. `None`: the chosen address
    /// is no longer the best.
    fn remap(
        &self,
        request: &Request,
        course: Course,
        done: &Cell<u64>,
    ) -> Result<Option<u64>, Errno> {
        let Request { old, new_len, target, moved, .. } = *request;
        if old.end > USER_END {
            // No VMA reaches so far, and the range beyond cannot be unmapped.
            let cut = self.vma_at(old.start).is_some() && new_len < old.len();
            return Err(if cut { Errno::EINVAL } else { Errno::EFAULT });
        }
        if course == Course::Each {
            let all = self.relocate_each(request, done)?;
            return Ok(all.then_some(target - moved));
        }
        self.vma_at(old.start).ok_or(Errno::EFAULT)?;
        if course == Course::InPlace && new_len <= old.len() {
            if new_len < old.len() {
                let cut = request.cut();
                let unmapped = self.unmap(cut, |view| self.claims_tables(view, cut))?;
                return Ok(unmapped.then_some(old.start));
            }
            return Ok(Some(old.start));
        }
        self.check_resize(request)?;
        match course {
            Course::InPlace => {
                self.grow_up(old, request.target_at(old.start)).map(|()| Some(old.start))
            }
            Course::To(Some(start)) => {
                let moved = self.relocate(request, course, request.target_at(start))?;
                Ok(moved.then_some(start))
            }
            _ => Err(Errno::ENOMEM),
        }
    }

    /// Extends the VMA over `old` from the end of `old` to all of `to`, in which nothing else is
    /// mapped.
    fn grow_up(&self, old: VirtRange, to: VirtRange) -> Result<(), Errno> {
        self.step(old.hull(to).with_neighbours(), |step| {
            let more = VirtRange::new(old.end, to.end);
            let piece = Piece { range: more, ..step.take(old)? };
            step.replace(more, piece, State::Unlocked)
        })
    }

    /// Moves all VMAs in the range, one after the other, and keeps the holes between them. If a
    /// move fails, the VMAs before have moved; `done` counts the bytes of the request that are
    /// done. Returns whether all bytes are done: a part may need more than the claim by now.
    fn relocate_each(&self, request: &Request, done: &Cell<u64>) -> Result<bool, Errno> {
        let Request { old, target, moved, .. } = *request;
        if moved == 0 {
            self.vma_at(old.start).ok_or(Errno::EFAULT)?;
        }
        let mut at = old.start;
        while let Some(next) = self.view().find(at) {
            let part = next.range().intersect(VirtRange::new(at, old.end));
            if part.is_empty() {
                break;
            }
            let new = target + (part.start - old.start);
            let request = Request { old: part, new_len: part.len(), target: new, ..*request };
            self.check_resize(&request)?;
            if !self.relocate(&request, Course::Each, request.target_at(new))? {
                return Ok(false);
            }
            at = part.end;
            done.set(moved + (at - old.start));
        }
        Ok(true)
    }

    /// Returns the errors that Linux returns after finding the VMA.
    fn check_resize(&self, request: &Request) -> Result<(), Errno> {
        let Request { old, new_len, .. } = *request;
        let area = self.vma_at(old.start).ok_or(Errno::EFAULT)?.area();
        if old.is_empty() && area.is_private() {
            return Err(Errno::EINVAL);
        }
        // The memory behind a device's range does not belong to the mapping.
        let device = area.memory.is_device();
        if device && request.flags.contains(RemapFlags::DONTUNMAP) {
            return Err(Errno::EINVAL);
        }
        // An empty range overlaps nothing, but the mapping made in its place would remove it.
        let fixed = request.flags.contains(RemapFlags::FIXED);
        if fixed && (request.target..request.target + new_len).contains(&old.start) {
            return Err(Errno::EFAULT);
        }
        // A range that shrinks during the move may end beyond the VMA: only the part kept must be
        // in the VMA.
        let kept = old.len().min(new_len);
        if kept > area.range.end - old.start {
            return Err(Errno::EFAULT);
        }
        if device && new_len > old.len() {
            return Err(Errno::EFAULT);
        }
        let growth = new_len.saturating_sub(old.len()) >> PAGE_SHIFT;
        if area.flags.contains(VmaFlags::ACCOUNT) && !self.cpu.vm().may_promise(growth) {
            return Err(Errno::ENOMEM);
        }
        // Linux also checks this last.
        if fixed && request.target < self.cpu.vm().machine().lowest_address() {
            return Err(Errno::EPERM);
        }
        Ok(())
    }

    /// Moves the VMA's part `request.old` to `new`, with its pages, if `course` is still the choice
    /// in the current tree, and its ranges are claimed. The caller has claimed both given ranges.
    /// Returns whether the pages moved.
    fn relocate(&self, request: &Request, course: Course, new: VirtRange) -> Result<bool, Errno> {
        let old = request.old;
        let stands = |view: &View<'_, Vma>| {
            lost(Mutant::UnmapLooksAgain)
                || !self.is_outdated(view)
                || (Course::choose(view, request) == course
                    && request.ranges(view, course).iter().all(|range| self.claims(*range)))
        };
        let keep = request.flags.contains(RemapFlags::DONTUNMAP);
        // An empty old range means a second mapping of the same object.
        let moved = VirtRange::new(old.start, old.start + old.len().min(new.len()));
        let there = self.vmas(new).next().is_some();
        // The moved pages are not freed, but leave this range.
        let (was_here, was_there) =
            (self.visit().harvest_accessed(old), self.visit().harvest_accessed(new));
        if keep {
            // The source VMA stays, without `mlock`, and is renewed as a whole.
            self.merge_at(old.start);
        }
        // Everything that can fail comes first, and both ranges change at once.
        let mut moving = Moving::default();
        let planned = self.step_versions(old.hull(new).with_neighbours(), |step| {
            let stands = stands(&step.view());
            if stands {
                replace_both(step, old, new, keep)?;
                // From here on no fault adds a table to the old place, and no page there becomes
                // shared.
                self.make_tables(moved, new.start)?;
                moving = self.reserve_notes(moved)?;
            }
            Ok(stands)
        });
        if planned != Ok(true) {
            self.clear_gaps(new);
            return planned;
        }
        let mut batch = FlushBatch::new(self.cpu, self.space);
        if there {
            self.zap(new, was_there.as_ref(), &mut batch);
            batch.finish();
            batch = FlushBatch::new(self.cpu, self.space);
        }
        self.move_pages(moved, new.start, moving, &mut batch);
        batch.finish();
        self.space.core.lazy.moved(self.cpu, moved, new);
        if !keep && !old.is_empty() {
            self.clear(old, was_here.as_ref());
        }
        self.finish();
        Ok(true)
    }

    /// Frees the tables that were made in the parts of `range` without a VMA.
    #[cold]
    fn clear_gaps(&self, range: VirtRange) {
        let mut at = range.start;
        while at < range.end {
            let next = self.vmas(VirtRange::new(at, range.end)).next().map(|vma| vma.range());
            let gap = VirtRange::new(at, next.map_or(range.end, |next| next.start.max(at)));
            if !gap.is_empty() {
                self.clear(gap, None);
            }
            at = next.map_or(range.end, |next| next.end);
        }
    }

    /// Looks for shared pages in `from`, which is about to move, and allocates the memory of their
    /// notes. Skips the pages of a space without relatives, which shares its pages with no other
    /// space: a fork that begins now waits for the claim.
    fn reserve_notes(&self, from: VirtRange) -> Result<Moving, OutOfMemory> {
        if self.cpu.vm().anchors.is_alone(&self.space.core, self.cpu) {
            return Ok(Moving::default());
        }
        let (mut shares, mut runs, mut last) = (false, 0, None);
        let mut look = |addr: u64, slot: &AtomicU64| {
            // Another CPU may migrate the page at this time; then the metadata may be of another
            // page.
            while let seen = protocol::wait_and_load(slot, self.cpu)
                && let Some(meta) = self.anon_page(seen)
            {
                let (shared, index) = (meta.refs() != 1, meta.index.load(Ordering::Relaxed));
                let now = node::load(slot);
                if now.is_mapped() && now.frame() == seen.frame() {
                    // The pages of a run have the same distance from the addresses of their
                    // numbers.
                    let distance = Some((index << PAGE_SHIFT).wrapping_sub(addr));
                    runs += usize::from(last != distance);
                    last = distance;
                    shares |= shared;
                    break;
                }
            }
        };
        let visit = |leaves: Leaves<'_>| {
            // The pages of a huge leaf are a file's.
            if let Leaves::Pages { start, slots } = leaves {
                self.cpu.serve_flushes();
                let addrs = (start..).step_by(PAGE_SIZE as usize);
                addrs.zip(slots).for_each(|(addr, slot)| look(addr, slot));
            }
            Ok::<(), Infallible>(())
        };
        let machine = self.cpu.vm().machine();
        // SAFETY: the range is locked.
        let Ok(()) = unsafe { range::visit(machine, self.space.root(), from, self.cpu, visit) };
        let reserved = if shares { Reserved::try_new(runs)? } else { Reserved::default() };
        Ok(Moving { shares, run: None, reserved })
    }

    /// Returns the metadata of the anonymous page that `entry` maps, if there is one.
    #[inline]
    fn anon_page(&self, entry: Entry) -> Option<&FrameMeta> {
        if !entry.is_mapped() || entry.is_special() {
            return None;
        }
        let meta = self.cpu.vm().frames.meta(entry.frame());
        (meta.kind() == Kind::Used(FrameUse::Anon)).then_some(meta)
    }

    /// Moves the entries of `from` to `to`, where tables exist and entries are empty.
    fn move_pages(
        &self,
        from: VirtRange,
        to: u64,
        mut moving: Moving,
        batch: &mut FlushBatch<'_, '_, M>,
    ) {
        let machine = self.cpu.vm().machine();
        let moves = &self.space.core.moves;
        if moving.shares {
            let target = VirtRange::new(to, to + from.len());
            moves.forget_all(target, &mut moving.reserved, self.cpu);
        }
        // SAFETY: both ranges are locked.
        unsafe {
            each_leaf(self.cpu, self.space.root(), from, |leaf| {
                let (addr, slot) = match leaf {
                    Leaf::Page { addr, slot } => (addr, slot),
                    // The pages of the leaf come next.
                    Leaf::Huge { start, slot, .. } => {
                        return self.space.split(self.cpu, start, slot);
                    }
                };
                if node::load(slot).is_none() {
                    return;
                }
                let there = to + (addr - from.start);
                let Reached::Last(slots) = descend(machine, self.space.root(), there) else {
                    debug_assert!(false, "no table for {there:#x}");
                    return;
                };
                let (old, _) = protocol::wait_and_replace(slot, self.cpu, |_| Entry::NONE);
                self.take_along(old, there, &mut moving);
                // A fault of an earlier mapping may still hold the empty entry busy, and will store
                // "empty" again. Wait for the fault.
                let slot = &slots[node::index(there, LAST)];
                let (before, _) = protocol::wait_and_replace(slot, self.cpu, |_| old);
                debug_assert!(before.is_none(), "{there:#x} was not empty: {before:?}");
                if Entry::NONE.needs_flush(old) {
                    batch.flush(VirtRange::page(addr));
                }
            });
        }
        let Moving { shares, run, mut reserved } = moving;
        if let Some(note) = run {
            moves.note(note, &mut reserved, self.cpu);
        }
        if shares {
            moves.forget_all(from, &mut reserved, self.cpu);
        } else {
            moves.forget(from, self.cpu);
        }
    }

    /// Makes the reverse map find the page of `entry`, which moves to `to` and has no entry at the
    /// moment. An anonymous page with other mappings keeps its index. The call adds the page to the
    /// run of such pages, or notes the run, and begins the next run with the page.
    #[inline]
    fn take_along(&self, entry: Entry, to: u64, moving: &mut Moving) {
        let Some(meta) = self.anon_page(entry) else { return };
        // The entry, which no other CPU can reach, has the only mapping. If no page was shared
        // before the move, a second reference is a transient one.
        if !moving.shares || meta.refs() == 1 {
            meta.anchor.store(self.space.anchor(), Ordering::Relaxed);
            meta.index.store(to >> PAGE_SHIFT, Ordering::Relaxed);
            return;
        }
        let index = meta.index.load(Ordering::Relaxed);
        if moving.run.as_mut().is_some_and(|run| run.extend(index, to)) {
            return;
        }
        if let Some(note) = moving.run.replace(Note::page(index, to)) {
            self.space.core.moves.note(note, &mut moving.reserved, self.cpu);
        }
    }
}

/// Maps the mapping at the start of `old` in all of `new`. `old` becomes unmapped, or, with `keep`,
/// stays mapped.
fn replace_both<M: Machine>(
    step: &mut Versions<'_, '_, '_, M>,
    old: VirtRange,
    new: VirtRange,
    keep: bool,
) -> Result<(), Refused> {
    let first = VirtRange::page(old.start);
    let view = step.view();
    let vma = view.at(old.start).map(|entry| entry.get());
    let all = vma.map_or(old, Vma::range);
    let is_part =
        vma.is_some_and(|vma| range_later(view, vma) != old) && !lost(Mutant::RenewsParts);
    let mut piece =
        if old.is_empty() { Piece { root: None, ..step.look(first)? } } else { step.take(first)? };
    // Without any store so far, the mapping takes the offset of a new mapping there.
    let is_new = piece.attributes.memory.is_anonymous() && piece.root.is_none();
    let offset = if is_new { new.start >> PAGE_SHIFT } else { piece.area().offset };
    piece.move_to(new, offset);
    if keep {
        // A whole VMA that stays is like a new VMA. As on Linux, none of the VMA stays locked, even
        // if only a part moves, or if the moved part merges with the rest.
        let locked = piece.area().lock() != MemoryLock::No;
        let mut stays = step.look(if locked { all } else { old })?;
        let alike = stays.attributes.agree(&piece.attributes);
        if locked && alike && (all.end == new.start || new.end == all.start) {
            piece.attributes.flags -= VmaFlags::ANY_LOCK;
        }
        stays.attributes.flags -= VmaFlags::ANY_LOCK;
        if stays.range == all {
            step.renew(Piece { root: piece.root.filter(|_| is_part), ..stays })?;
        } else {
            let stays = Piece { root: piece.root, ..stays };
            step.replace(old, Some(stays), State::WriteLocked)?;
        }
    } else if !old.is_empty() {
        step.replace(old, None, State::Unlocked)?;
    }
    step.replace(new, Some(piece), State::WriteLocked)
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests;
