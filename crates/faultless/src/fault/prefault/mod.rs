//! Anticipatory prefault: a thread that faults in sequence gets the pages it is predicted to touch
//! next in the same fault.
//!
//! The policy, [`Streams`], chooses the pages. This module is the mechanism. The entries of a
//! window lie in one table and belong to one VMA. The fault counts the entries that a fault of this
//! kind would fill (empty entries; for a store also entries of the zero page), and allocates and
//! zeroes frames for them while it holds no entry. Then it proceeds as a fault on a file does for
//! the surrounding pages:
//!
//! 1. It locks all entries, at most [`MOST_TAKEN`] at once, each by a compare-and-swap from the
//!    value read; it skips an entry that has changed since.
//! 2. It validates the ticket, once for all entries. A full barrier lies between each swap and this
//!    read of the sequence, so the protocol holds for each entry individually.
//! 3. If the zero page was mapped, it flushes, while the entries are busy.
//! 4. It commits all entries, or reverts all. A larger window is filled chunk by chunk, beginning
//!    with the chunk of the faulting page.
//!
//! The faulting page is served as in any other fault. The other pages are optional: the fault does
//! not wait for them, and allocates no frames for them while memory is short. Unneeded frames
//! return to the list of the CPU, still zeroed, and are available to the attempt after an abort.
//! Prefaulted pages are mapped with a clear accessed bit, so the thread can check later which pages
//! were used, and its windows shrink if pages were unused. The check also runs just before a call
//! of the thread [unmaps the pages](Cpu::for_thread).

pub mod defaults;
pub mod fixed;
pub mod history;
pub mod predictor;
pub mod streams;
pub mod thread;

pub use predictor::{Check, Kind, Look, MAX_ORDER, Miss, Predictor, Seen, Window, beside};
pub(crate) use thread::ThreadPredictor;
pub use thread::ThreadStreams;

use super::{Access, Attempt, FaultKind, serve_slow};
use crate::addr::{FrameNumber, PAGE_SHIFT, PAGE_SIZE, VirtRange};
use crate::fault::prepared::Prepared;
use crate::fault::ticket::{Abort, Ticket, why_invalid};
use crate::frame::{self, FrameUse};
use crate::machine::Machine;
use crate::space::Space;
use crate::space::area::VmaFlags;
use crate::space::batch::shoot;
use crate::space::vma::Vma;
use crate::stat::Counter;
use crate::sync::atomic::AtomicU64;
use crate::sync::mutant::{Mutant, lost};
use crate::table::Entry;
use crate::table::format::USER_END;
use crate::table::node::{self, ENTRIES, LAST};
use crate::table::protocol::{self, MOST_TAKEN, Slots};
use crate::table::walk::{Reached, descend};
use crate::vm::{Cpu, Vm};
use core::ops::Range;

/// Returns whether a fault on an entry that was `seen` may prefault: a first touch of private
/// anonymous memory without `MADV_RANDOM` and without a memory policy.
pub(super) fn goes_ahead<M: Machine>(
    cpu: &Cpu<'_, M>,
    vma: &Vma,
    access: Access,
    seen: Entry,
) -> bool {
    let zeros = seen.is_present() && cpu.vm().maps_zeros(seen) && !seen.is_locked();
    vma.memory().is_anonymous()
        && (seen.is_none() || zeros && access == Access::Write)
        && !vma.flags().intersects(VmaFlags::RANDOM.union(VmaFlags::POLICY))
}

/// The rest of a fault's attempt for a thread that may prefault. Receives the fields of the attempt
/// separately.
#[cold]
#[inline(never)]
#[expect(clippy::too_many_arguments, reason = "the arguments are the parts of an attempt")]
pub(super) fn serve<M: Machine>(
    cpu: &Cpu<'_, M>,
    space: &Space<M>,
    vma: &Vma,
    ticket: Ticket<'_>,
    page: u64,
    access: Access,
    thread: &ThreadPredictor<M>,
    table: &[AtomicU64; ENTRIES],
    prepared: &mut Prepared,
) -> Result<FaultKind, Abort> {
    let attempt = Attempt { cpu, space, vma, ticket, page, access, ahead: Some(thread) };
    loop {
        let seen = node::load(&table[node::index(page, LAST)]);
        if !goes_ahead(cpu, vma, access, seen) {
            break;
        }
        let Some(mut streams) = thread.of_fault() else { break };
        if let Some(kind) = attempt.serve_ahead(&mut streams, prepared, table, seen)? {
            return Ok(kind);
        }
        // The retry serves this page alone. A window locks no entry whose permissions mprotect is
        // about to change, and waiting for mprotect would mean waiting for a CPU that may wait for
        // this one.
        if !lost(Mutant::RetriesAlone) {
            break;
        }
    }
    serve_slow(cpu, space, vma, ticket, page, access, table, prepared)
}

/// The predictor's record of a window.
type Record<M> = <<M as Machine>::Predictor as Predictor>::Record;

/// The part of a window that is filled at once: the window's entries in `span` of `table`, whose
/// first entry belongs to page `first`. `span` starts with an entry of the window and contains at
/// most [`MOST_TAKEN`] of them.
#[derive(Clone)]
struct Chunk<'t, R> {
    table: &'t [AtomicU64; ENTRIES],
    first: u64,
    span: Range<usize>,
    window: &'t Window<R>,
}

impl<M: Machine> Attempt<'_, '_, M> {
    /// Returns whether the fault on the page's entry in `table` skips prediction. Reads only this
    /// entry and its neighbour in the pair, so a random-access thread pays for one load.
    #[inline(always)]
    pub(super) fn skips_prediction(
        self,
        thread: &ThreadPredictor<M>,
        table: &[AtomicU64; ENTRIES],
    ) -> bool {
        let page = self.page >> PAGE_SHIFT;
        let nothing = |page: u64| node::load(&table[page as usize % ENTRIES]).is_none();
        let skips = nothing(page)
            && nothing(beside(page))
            && thread
                .of_fault()
                .is_some_and(|mut predictor| predictor.skips(self.space.id(), page));
        if skips {
            self.cpu.count(Counter::PrefaultMiss);
        }
        skips
    }

    /// Serves a fault that [may prefault](goes_ahead), on the page's entry in `table`, which was
    /// `seen`, and maps the predicted pages with it. `None`: the entry changed first.
    #[inline(always)]
    pub(super) fn serve_ahead(
        self,
        predictor: &mut M::Predictor,
        prepared: &mut Prepared,
        table: &[AtomicU64; ENTRIES],
        seen: Entry,
    ) -> Result<Option<FaultKind>, Abort> {
        let (kind, counter, done) = match (self.access, seen.is_none()) {
            (Access::Write, true) => (Kind::Write, Counter::AnonPage, FaultKind::Anon),
            (Access::Write, false) => (Kind::Copy, Counter::CowCopy, FaultKind::Copy),
            _ => (Kind::Read, Counter::ZeroPage, FaultKind::ZeroPage),
        };
        if kind != Kind::Read {
            self.prepare_anon_vma()?;
        }
        let asked = node::index(self.page, LAST);
        let first = (self.page >> PAGE_SHIFT) - asked as u64;
        let most = self.cpu.vm().knobs.prefault_max_order();
        let window = &self.window(predictor, kind, table, most);
        let span = window.span();
        if window.is_single() && kind != Kind::Copy {
            // No further page is predicted: serve the fault as any other.
            let slot = &table[asked];
            let done = if kind == Kind::Write {
                self.write_untouched(prepared, slot)?
            } else {
                self.read_untouched(slot)?
            };
            if done.is_some() {
                predictor.mapped(window, span);
                self.cpu.count(Counter::PrefaultMiss);
            }
            return Ok(done);
        }
        let (low, high) = ((span.start - first) as usize, (span.end - first) as usize);
        let wide = MOST_TAKEN * window.stride();
        // The chunk of the faulting page comes first.
        let own = if high - low <= wide { low } else { low + (asked - low) / wide * wide };
        let (mut start, mut next, mut mapped) = (own, low, None::<Range<usize>>);
        loop {
            let chunk = Chunk { table, first, span: start..high.min(start + wide), window };
            let filled = if window.stride() == 1 {
                self.fill::<true>(chunk, asked, prepared)
            } else {
                self.fill_apart(chunk, asked, prepared)
            };
            match (filled, &mut mapped) {
                (Ok(Some(more)), None) => mapped = Some(more),
                (Ok(None), None) => return self.entry_changed(),
                (Err(abort), None) => return Err(abort),
                (Ok(Some(more)), Some(mapped)) if !more.is_empty() => {
                    *mapped = mapped.start.min(more.start)..mapped.end.max(more.end);
                }
                (Ok(_), Some(_)) => {}
                // A writer interfered. The faulting page is mapped, which is sufficient.
                (Err(_), Some(_)) => break,
            }
            next += if next == own { wide } else { 0 };
            if next >= high {
                break;
            }
            (start, next) = (next, next + wide);
        }
        let mapped = mapped.unwrap_or(asked..asked + 1);
        predictor.mapped(window, first + mapped.start as u64..first + mapped.end as u64);
        self.cpu.count(counter);
        self.cpu.count(if window.is_single() {
            Counter::PrefaultMiss
        } else {
            Counter::PrefaultHit
        });
        Ok(Some(done))
    }

    /// Returns the pages to map, at most 2^`most`, after checking the results of earlier windows.
    #[inline(always)]
    fn window(
        self,
        predictor: &mut M::Predictor,
        kind: Kind,
        table: &[AtomicU64; ENTRIES],
        most: u8,
    ) -> Window<Record<M>> {
        while let Some(used) = predictor.known(self.space.id()) {
            self.cpu.state().counts.add(Counter::PrefaultUsed, used.into());
        }
        while let Some(check) = predictor.to_check() {
            check_used(self.cpu, self.space, predictor, &check);
        }
        let page = self.page >> PAGE_SHIFT;
        let first = page - page % ENTRIES as u64;
        let miss = Miss {
            space: self.space.id(),
            page,
            kind,
            reach: self.reach(),
            history: self.space.history.recall(page),
        };
        let vm = self.cpu.vm();
        let window = predictor.predict(&miss, most, &vm.defaults, View { vm, kind, table, first });
        // The predictor is outside this crate and not trusted. Beyond the reach lie other VMAs.
        if window.is_for(&miss) { window } else { Window::single(miss.page) }
    }

    /// Returns the pages of the VMA that the table of the faulting page maps.
    #[inline(always)]
    fn reach(self) -> Range<u64> {
        let (area, page) = (self.vma.range(), self.page >> PAGE_SHIFT);
        let first = page - page % ENTRIES as u64;
        first.max(area.start >> PAGE_SHIFT)..(first + ENTRIES as u64).min(area.end >> PAGE_SHIFT)
    }

    /// Returns the number of pages, starting with the faulting page, that the fault should read
    /// from a file's store: the pages that the thread is predicted to use next, if it faults in
    /// sequence. The largest window is that of prefault, in blocks of 2^`block` pages. The store
    /// reads at least `least` pages in any case. The thread's next such fault checks which pages
    /// were used.
    #[cold]
    #[inline(never)]
    pub(super) fn read_window(self, thread: &ThreadPredictor<M>, block: u8, least: u64) -> u64 {
        // SAFETY: the caller is in a grace section.
        let reached = unsafe { descend(self.cpu.vm().machine(), self.space.root(), self.page) };
        let (Reached::Last(table), Some(mut predictor)) = (reached, thread.of_fault()) else {
            return 1;
        };
        let most = self.cpu.vm().knobs.prefault_max_order() + block;
        // A predictor's largest windows end at multiples of their size. Growing runs need not.
        let window = self.window(&mut predictor, Kind::Read, table, MAX_ORDER);
        let (page, mut span) = (self.page >> PAGE_SHIFT, window.span());
        let run = window.run_from(page).min(1 << most.min(MAX_ORDER));
        if window.stride() == 1 {
            span.end = (page + run.max(least)).min(self.reach().end);
        }
        predictor.mapped(&window, span);
        run
    }

    /// [`fill`](Self::fill) for a window with a stride above 1.
    #[inline(never)]
    fn fill_apart(
        self,
        chunk: Chunk<'_, Record<M>>,
        asked: usize,
        prepared: &mut Prepared,
    ) -> Result<Option<Range<usize>>, Abort> {
        self.fill::<false>(chunk, asked, prepared)
    }

    /// Fills the entries of a chunk that can be filled. Returns the range of places that are mapped
    /// now. If place `asked`, the faulting page, lies in the chunk and cannot be filled, fills no
    /// entry and returns `None`. `SIDE_BY_SIDE`: the window's stride is 1.
    #[inline(always)]
    fn fill<const SIDE_BY_SIDE: bool>(
        self,
        chunk: Chunk<'_, Record<M>>,
        asked: usize,
        prepared: &mut Prepared,
    ) -> Result<Option<Range<usize>>, Abort> {
        let (cpu, write) = (self.cpu, self.access == Access::Write);
        let zeros = self.leaf(cpu.vm().zero).special();
        let page = if write { zeros } else { Entry::NONE };
        let stride = if SIDE_BY_SIDE { 1 } else { chunk.window.stride() };
        let start = chunk.span.start;
        let slots = Slots::every(stride, &chunk.table[chunk.span.clone()]);
        let asks = chunk.span.contains(&asked);
        let mine = if asks { (asked - start) / stride } else { 0 };
        let own_place = u64::from(asks) << mine;
        // The other entries to fill, by their place in the chunk.
        let meant = chunk.window.among(chunk.first + start as u64) & !own_place;
        let mut wanted = slots.fitting(page, meant);
        let mut count = wanted.count_ones() as usize;
        let place = |at: usize| start + at * stride;
        let mut buffer = [FrameNumber(0); MOST_TAKEN];
        let (mut own, mut others) = (None, frame::Bulk::empty());
        if write {
            // The frame of the faulting page is allocated with the others, unless a frame was
            // already prepared or only one frame is left.
            let with_own = asks && prepared.is_nothing();
            others = cpu.alloc_zeroed_bulk(&mut buffer[..count + usize::from(with_own)]);
            if asks {
                own = if with_own { others.pop() } else { None };
                let own_frame = own.take().or_else(|| prepared.zeroed_seldom(cpu));
                own = Some(own_frame.ok_or(Abort::NoMemory)?);
            }
            // If there are fewer frames, drop the pages farthest from the faulting page.
            while count > others.len() {
                let (low, high) = (wanted.trailing_zeros(), wanted.ilog2());
                let far = |at: u32| asked.abs_diff(place(at as usize));
                wanted &= !(1 << if far(high) >= far(low) { high } else { low });
                count -= 1;
            }
        }
        let all = wanted | own_place;
        let mut held = if SIDE_BY_SIDE {
            protocol::take_runs(slots, page, all, cpu)
        } else {
            protocol::take_some(slots, page, all, cpu)
        };
        let valid = lost(Mutant::BatchAsks) || self.ticket.is_valid();
        if !valid || asks && !held.holds(mine) {
            held.revert();
            own.into_iter().for_each(|frame| prepared.keep_zeroed(frame));
            if !lost(Mutant::BatchGivesBack) {
                cpu.free_bulk(others);
            }
            return if valid {
                Ok(None)
            } else {
                Err(why_invalid(cpu, self.space, self.page, &chunk.table[asked]))
            };
        }
        let addr = |at: usize| (chunk.first + place(at) as u64) << PAGE_SHIFT;
        if let Some(zeros) = held.present()
            && !lost(Mutant::ZeroPageFlush)
        {
            // No CPU may read zeros there after another CPU has stored.
            let range = VirtRange::new(addr(zeros.start), addr(zeros.end - 1) + PAGE_SIZE);
            shoot(cpu, self.space, range);
        }
        let taken = held.held();
        let count = if taken == all { count as u32 + u32::from(asks) } else { taken.count_ones() };
        let frames = &cpu.vm().frames;
        let leaf = self.vma.leaf.writable_dirty();
        let (anchor, index) = (self.space.anchor(), |at: usize| chunk.first + place(at) as u64);
        if asks {
            held.commit_one(
                mine,
                own.map_or(zeros, |frame| {
                    leaf.of(frames.publish(frame, FrameUse::Anon, anchor, index(mine)))
                }),
            );
        }
        // There is a frame for each entry: the fault locked no more entries than it counted.
        let unused = leaf.unused();
        if !write {
            held.commit(|_| zeros.unused());
        } else if SIDE_BY_SIDE {
            held.commit_runs(|first, length| {
                let bulk = others.take(length);
                let numbers = frames.publish_bulk(bulk, FrameUse::Anon, anchor, index(first));
                numbers.iter().map(move |frame| unused.of(*frame))
            });
        } else {
            held.commit(|at| {
                others.pop().map_or(Entry::NONE, |frame| {
                    unused.of(frames.publish(frame, FrameUse::Anon, anchor, index(at)))
                })
            });
        }
        cpu.free_bulk(others);
        if write {
            cpu.add_resident(self.space, count.into());
        }
        cpu.state().counts.add(Counter::PrefaultPage, u64::from(count) - u64::from(asks));
        let Some(last) = taken.checked_ilog2() else { return Ok(Some(start..start)) };
        Ok(Some(place(taken.trailing_zeros() as usize)..place(last as usize) + 1))
    }
}

impl<P: Predictor> ThreadStreams<P> {
    /// Checks which prefaulted pages in `range` of `space` were used: the pages are about to be
    /// unmapped or moved. The caller is in a grace section.
    pub(crate) fn check_used<M: Machine<Predictor = P>>(
        &self,
        cpu: &Cpu<'_, M>,
        space: &Space<M>,
        range: VirtRange,
    ) {
        let Some(mut predictor) = self.of_fault() else { return };
        let pages = range.start >> PAGE_SHIFT..range.end >> PAGE_SHIFT;
        while let Some(check) = predictor.to_check_in(space.id(), &pages) {
            check_used(cpu, space, &mut *predictor, &check);
        }
    }
}

impl<M: Machine> Space<M> {
    /// The thread that `thread` belongs to leaves the space: it ends, or starts another program.
    /// All pages that it prefaulted are checked for use, and the widths that it learned influence
    /// the defaults of later threads.
    pub fn exit_thread(&self, cpu: &Cpu<'_, M>, thread: &ThreadPredictor<M>) {
        let _section = self.section(cpu);
        let Some(mut predictor) = thread.of_fault() else { return };
        while let Some(check) = predictor.to_check_in(self.id(), &(0..u64::MAX)) {
            check_used(cpu, self, &mut *predictor, &check);
        }
        predictor.exit(&cpu.vm().defaults);
    }
}

/// Checks which pages of an earlier window were accessed. The caller is in a grace section. The
/// predictor does not learn from a space that the thread has left.
#[cold]
#[inline(never)]
fn check_used<M: Machine>(
    cpu: &Cpu<'_, M>,
    space: &Space<M>,
    predictor: &mut M::Predictor,
    check: &Check<Record<M>>,
) {
    if check.space != space.id() {
        return;
    }
    let vm = cpu.vm();
    let (kind, pages) = M::Predictor::extent(&check.record);
    // The predictor is outside this crate and not trusted. The tables of the kernel half do not
    // belong to the space.
    let is_users = pages.start < USER_END >> PAGE_SHIFT;
    let start = pages.start << PAGE_SHIFT;
    // SAFETY: the caller is in a grace section, which outlives the reference.
    let tally = match is_users.then(|| unsafe { descend(vm.machine(), space.root(), start) }) {
        Some(Reached::Last(table)) => {
            let first = pages.start - pages.start % ENTRIES as u64;
            predictor.checked(check, View { vm, kind, table, first })
        }
        _ => predictor.checked(check, |_| Seen::Empty),
    };
    let counts = &cpu.state().counts;
    counts.add(Counter::PrefaultUsed, tally.used.into());
    counts.add(Counter::PrefaultUnused, tally.unused.into());
}

/// A predictor's view of the entries of `table`, whose first entry belongs to page `first`, for a
/// stream of `kind`.
struct View<'a, M: Machine> {
    vm: &'a Vm<M>,
    kind: Kind,
    table: &'a [AtomicU64; ENTRIES],
    first: u64,
}

impl<M: Machine> View<'_, M> {
    /// Returns the place of `page` in the table, or a place outside the table.
    #[inline(always)]
    fn place(&self, page: u64) -> usize {
        page.wrapping_sub(self.first) as usize
    }
}

impl<M: Machine> Look for View<'_, M> {
    #[inline(always)]
    fn at(&self, page: u64) -> Seen {
        let slot = self.table.get(self.place(page));
        slot.map_or(Seen::Empty, |slot| seen_as(self.vm, self.kind, node::load(slot)))
    }

    #[inline(always)]
    fn all(&self, pages: Range<u64>, seen: Seen) -> bool {
        let places = self.place(pages.start)..self.place(pages.end);
        let Some(slots) = self.table.get(places) else { return false };
        match seen {
            Seen::Empty => node::are_none(slots),
            Seen::Unused => false,
            Seen::Used => {
                // For a store the zero page counts as unused; it is never writable.
                let each = node::common(slots);
                let writable = self.kind == Kind::Read || each.is_writable();
                each.is_present() && each.is_accessed() && writable
            }
        }
    }
}

/// Returns how a stream of `kind` sees an entry.
#[inline(always)]
fn seen_as<M: Machine>(vm: &Vm<M>, kind: Kind, entry: Entry) -> Seen {
    if entry.is_none() || kind != Kind::Read && entry.is_present() && vm.maps_zeros(entry) {
        Seen::Empty
    } else if entry.is_mapped() && !entry.was_used() {
        Seen::Unused
    } else {
        Seen::Used
    }
}
