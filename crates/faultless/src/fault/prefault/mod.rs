//! Anticipatory prefault: a thread that faults in sequence gets the pages that it is predicted to touch
//! next in the same fault.
//!
//! [`Streams`] choose the pages: that is the policy. This module is the mechanism. The entries of a window lie
//! in one table and belong to one VMA. The fault counts those that a fault of this kind would fill (empty ones; for a store
//! also those of the zero page), and allocates and zeroes frames for them while it holds
//! nothing. Then, as for the pages around a file's:
//!
//! 1. it takes all entries, at most [`RUN`] at once, each by a compare-and-swap from the value read;
//!    it leaves out an entry that changed meanwhile;
//! 2. it validates the ticket, once for all. A full barrier is between each swap and that read of the sequence, so the
//!    protocol holds for each entry by itself;
//! 3. where the zero page was mapped, it flushes, while the entries are busy;
//! 4. it commits all entries, or reverts all. A window larger than a run is done run by run, beginning with the run of the
//!    faulting page.
//!
//! The faulting page is served as by any fault. The other pages are optional: the fault
//! does not wait for them, and takes no frames for them while memory is short. Frames that were not needed go back to the
//! CPU's own list, still zeroed, where the attempt after an abort finds them. Prefaulted pages are
//! mapped with the accessed bit clear. So the thread can check later which were used, and its
//! windows shrink if pages were unused. The check also runs just before a call of the thread [unmaps them](Cpu::for_thread).

pub mod habits;
pub mod past;
pub mod streams;

pub use habits::Habits;
pub use past::{Footprints, Past};
pub use streams::{Audit, Kind, Miss, Seen, Streams, Window};

use super::{Access, Attempt, FaultKind, overtaken};
use crate::addr::{FrameNumber, PAGE_SHIFT, PAGE_SIZE, VirtRange};
use crate::fault::prepared::Prepared;
use crate::fault::ticket::Abort;
use crate::frame::{self, Use};
use crate::machine::Machine;
use crate::space::Space;
use crate::space::batch::shoot;
use crate::space::vma::{Vma, VmaFlags};
use crate::stat::Counter;
use crate::sync::atomic::AtomicU64;
use crate::sync::mutant::{Mutant, lost};
use crate::table::Entry;
use crate::table::node::{self, ENTRIES, LAST};
use crate::table::protocol::{self, RUN, Slots};
use crate::table::walk::{Reached, descend};
use crate::vm::Cpu;
use core::cell::{RefCell, RefMut};
use core::ops::Range;

/// What one thread's faults so far let expect. A new thread starts with a new one.
#[derive(Debug, Default)]
pub struct ThreadStreams(RefCell<Streams>);

impl ThreadStreams {
    /// Of a thread that has not faulted.
    pub const fn new() -> Self {
        Self(RefCell::new(Streams::new()))
    }

    /// Forgets everything: for a thread that has forked.
    pub fn reset(&self) {
        self.0.replace(Streams::new());
    }

    /// The streams, for one fault; none to a fault inside a fault, which expects nothing.
    pub(super) fn of_fault(&self) -> Option<RefMut<'_, Streams>> {
        self.0.try_borrow_mut().ok()
    }
}

/// Whether a fault on an entry that was `seen` may map more than its page: a first touch of private
/// anonymous memory of which the program has not said that it goes to and fro in it.
pub(super) fn goes_ahead(vma: &Vma, access: Access, seen: Entry) -> bool {
    let zeros = seen.is_present() && seen.is_special() && !seen.is_locked();
    vma.area.object.is_none()
        && (seen.is_none() || zeros && access == Access::Write)
        && !vma.area.flags.contains(VmaFlags::RANDOM)
}

/// What is to be filled of a window at once: of the entries of `table`, whose first belongs to page `first`,
/// those of the window in `span`, of which the first is one and that holds no more than [`RUN`].
#[derive(Clone)]
struct Run<'t> {
    table: &'t [AtomicU64; ENTRIES],
    first: u64,
    span: Range<usize>,
    window: &'t Window,
}

impl<M: Machine> Attempt<'_, '_, M> {
    /// Whether the fault on the page's entry in `table` is one of those without evidence that are let pass. No
    /// more is looked at than that entry and the one beside it: who touches memory in no order pays for a load.
    #[inline(always)]
    pub(super) fn passes(self, thread: &ThreadStreams, table: &[AtomicU64; ENTRIES]) -> bool {
        let page = self.page >> PAGE_SHIFT;
        let nothing = |page: u64| node::load(&table[page as usize % ENTRIES]).is_none();
        let passes = nothing(page)
            && nothing(streams::beside(page))
            && thread
                .of_fault()
                .is_some_and(|mut streams| streams.lets_pass(self.space.id(), page));
        if passes {
            self.cpu.count(Counter::PrefaultMiss);
        }
        passes
    }

    /// Serves the fault on the page's entry in `table`, which was `seen`, one that a first touch fills, and
    /// maps what is expected next with it. `None`: the entry changed first.
    #[inline(never)]
    pub(super) fn serve_ahead(
        self,
        streams: &mut Streams,
        prepared: &mut Prepared,
        table: &[AtomicU64; ENTRIES],
        seen: Entry,
    ) -> Result<Option<FaultKind>, Abort> {
        let (kind, counter, done) = match (self.access, seen.is_none()) {
            (Access::Write, true) => (Kind::Write, Counter::AnonPage, FaultKind::Anon),
            (Access::Write, false) => (Kind::Copy, Counter::CowCopy, FaultKind::Copy),
            _ => (Kind::Read, Counter::ZeroPage, FaultKind::ZeroPage),
        };
        let root = if kind == Kind::Read { 0 } else { self.root()? };
        let asked = node::index(self.page, LAST);
        let first = (self.page >> PAGE_SHIFT) - asked as u64;
        let window = &self.window(streams, kind, table, first);
        let span = window.span();
        if window.is_single() && kind != Kind::Copy {
            // Nothing is expected: it is served as any other.
            let slot = &table[asked];
            let done = if kind == Kind::Write {
                self.write_untouched(prepared, slot, root)?
            } else {
                self.read_untouched(slot)?
            };
            if done.is_some() {
                streams.mapped(window, span);
                self.cpu.count(Counter::PrefaultMiss);
            }
            return Ok(done);
        }
        let (low, high) = ((span.start - first) as usize, (span.end - first) as usize);
        let wide = RUN * window.stride();
        let run = |start: usize| Run { table, first, span: start..high.min(start + wide), window };
        // That of the page asked for comes first.
        let start = low + (asked - low) / wide * wide;
        let Some(mut mapped) = self.fill(run(start), asked, prepared, root)? else {
            return self.outrun();
        };
        for more in (low..high).step_by(wide).filter(|more| *more != start) {
            match self.fill(run(more), asked, prepared, root) {
                Ok(Some(more)) if !more.is_empty() => {
                    mapped = mapped.start.min(more.start)..mapped.end.max(more.end);
                }
                Ok(_) => {}
                // Overtaken: the page itself is there, and that is what was asked for.
                Err(_) => break,
            }
        }
        streams.mapped(window, first + mapped.start as u64..first + mapped.end as u64);
        self.cpu.count(counter);
        self.cpu.count(if window.is_single() {
            Counter::PrefaultMiss
        } else {
            Counter::PrefaultHit
        });
        Ok(Some(done))
    }

    /// The pages to map, once it has been looked at what came of earlier ones.
    fn window(
        self,
        streams: &mut Streams,
        kind: Kind,
        table: &[AtomicU64; ENTRIES],
        first: u64,
    ) -> Window {
        while let Some(audit) = streams.to_audit() {
            judge(self.cpu, self.space, streams, &audit);
        }
        let area = self.vma.area.range;
        let end = first + ENTRIES as u64;
        let miss = Miss {
            space: self.space.id(),
            page: self.page >> PAGE_SHIFT,
            kind,
            reach: first.max(area.start >> PAGE_SHIFT)..end.min(area.end >> PAGE_SHIFT),
            past: self.space.past.recall(self.page >> PAGE_SHIFT),
        };
        let look = |page: u64| seen_as(kind, node::load(&table[page as usize % ENTRIES]));
        let vm = self.cpu.vm();
        let window = streams.predict(&miss, vm.knobs.prefault_max_order(), &vm.habits, look);
        let span = window.span();
        debug_assert!(window.pages().any(|page| page == miss.page), "{window:?} misses {miss:?}");
        debug_assert!(miss.reach.start <= span.start && span.end <= miss.reach.end, "{window:?}");
        window
    }

    /// Fills what can be filled of a run; the range of places that it mapped. A run in which place `asked`
    /// lies is filled with it or not at all, which is `None`.
    #[inline(never)]
    fn fill(
        self,
        run: Run<'_>,
        asked: usize,
        prepared: &mut Prepared,
        root: u64,
    ) -> Result<Option<Range<usize>>, Abort> {
        let (cpu, write) = (self.cpu, self.access == Access::Write);
        let zeros = self.leaf(cpu.vm().zero).special();
        let page = if write { zeros } else { Entry::NONE };
        let (start, stride) = (run.span.start, run.window.stride());
        let slots = Slots::every(stride, &run.table[run.span.clone()]);
        let asks = run.span.contains(&asked);
        let mine = if asks { (asked - start) / stride } else { RUN };
        // What is to be filled besides, by its place in the run. It is looked at once: others go on meanwhile.
        let meant = run.window.among(run.first + start as u64);
        let place = |at: usize| start + at * stride;
        let mut wanted = 0u64;
        for at in protocol::places(meant) {
            let seen = slots.get(at).map_or(Entry::BUSY, node::load);
            let empty = seen.is_none() || seen.unused() == page.unused();
            wanted |= u64::from(empty && at != mine) << at;
        }
        let mut buffer = [FrameNumber(0); RUN];
        let (mut own, mut others) = (None, frame::Run::empty());
        if write {
            if asks {
                own = Some(prepared.zeroed(cpu).ok_or(Abort::NoMemory)?);
            }
            others = cpu.alloc_zeroed_run(&mut buffer[..wanted.count_ones() as usize]);
            // With fewer frames, those farthest from the page are left out.
            while wanted.count_ones() as usize > others.len() {
                let (low, high) = (wanted.trailing_zeros(), wanted.ilog2());
                let far = |at: u32| asked.abs_diff(place(at as usize));
                wanted &= !(1 << if far(high) >= far(low) { high } else { low });
            }
        }
        let all = if asks { wanted | 1 << mine } else { wanted };
        let held = protocol::take_run(slots, page, all, cpu);
        let stands = lost(Mutant::BatchAsks) || self.ticket.stands();
        if !stands || asks && !held.holds(mine) {
            held.revert();
            own.into_iter().for_each(|frame| prepared.keep_zeroed(frame));
            if !lost(Mutant::BatchGivesBack) {
                cpu.free_run(others);
            }
            return if stands {
                Ok(None)
            } else {
                Err(overtaken(cpu, self.space, self.page, &run.table[asked]))
            };
        }
        let addr = |at: usize| (run.first + place(at) as u64) << PAGE_SHIFT;
        if let Some(zeros) = held.present()
            && !lost(Mutant::ZeroPageFlush)
        {
            // Nobody may read zeros there once somebody may have stored.
            let range = VirtRange::new(addr(zeros.start), addr(zeros.end - 1) + PAGE_SIZE);
            shoot(cpu, self.space, range);
        }
        let taken = held.held();
        let count = taken.count_ones();
        held.commit(|at| {
            let entry = if write {
                // There is one for each: nothing more was taken than was counted.
                let frame = if at == mine { own.take() } else { others.pop() };
                let Some(frame) = frame else { return Entry::NONE };
                let entry = self.leaf(frame.number()).writable_dirty();
                cpu.vm().frames.publish(frame, Use::Anon, root, self.vma.area.index_of(addr(at)));
                entry
            } else {
                zeros
            };
            if at == mine { entry } else { entry.unused() }
        });
        cpu.free_run(others);
        if write {
            cpu.add_resident(self.space, count.into());
        }
        cpu.state().counts.add(Counter::PrefaultPage, u64::from(count) - u64::from(asks));
        let Some(last) = taken.checked_ilog2() else { return Ok(Some(start..start)) };
        Ok(Some(place(taken.trailing_zeros() as usize)..place(last as usize) + 1))
    }
}

impl ThreadStreams {
    /// Checks which prefaulted pages in `range` of `space` were used: its pages are about to be unmapped or moved. In
    /// a grace section.
    pub(crate) fn judge<M: Machine>(&self, cpu: &Cpu<'_, M>, space: &Space<M>, range: VirtRange) {
        let Some(mut streams) = self.of_fault() else { return };
        let pages = range.start >> PAGE_SHIFT..range.end >> PAGE_SHIFT;
        while let Some(audit) = streams.to_audit_in(space.id(), &pages) {
            judge(cpu, space, &mut streams, &audit);
        }
    }
}

impl<M: Machine> Space<M> {
    /// The thread that `thread` belongs to leaves the space: it ends, or starts another program. All that it
    /// prefaulted is checked for use, and later threads begin with the widths that it learned.
    pub fn thread_leaves(&self, cpu: &Cpu<'_, M>, thread: &ThreadStreams) {
        let _section = self.section(cpu);
        let Some(mut streams) = thread.of_fault() else { return };
        while let Some(audit) = streams.to_audit_in(self.id(), &(0..u64::MAX)) {
            judge(cpu, self, &mut streams, &audit);
        }
        streams.leave(&cpu.vm().habits);
    }
}

/// Looks which pages of an earlier window were accessed. In a grace section; nothing is learned of a space
/// that the thread has left.
#[cold]
fn judge<M: Machine>(cpu: &Cpu<'_, M>, space: &Space<M>, streams: &mut Streams, audit: &Audit) {
    if audit.space != space.id() {
        return;
    }
    let pages = audit.pages();
    let start = pages.start << PAGE_SHIFT;
    // SAFETY: the caller is in a grace section, which outlives this.
    let reach = || match unsafe { descend(cpu.vm().machine(), space.root(), start) } {
        Reached::Last(table) => Some(table),
        Reached::Above { .. } => None,
    };
    let mut table = None;
    let at = node::index(start, LAST);
    let tally = streams.audited(audit, |page| {
        let place = at + (page - pages.start) as usize;
        table
            .get_or_insert_with(reach)
            .and_then(|table| table.get(place))
            .map_or(Seen::Empty, |slot| seen_as(audit.kind(), node::load(slot)))
    });
    let counts = &cpu.state().counts;
    counts.add(Counter::PrefaultUsed, tally.used.into());
    counts.add(Counter::PrefaultUnused, tally.unused.into());
}

/// What an entry tells a stream of `kind`.
fn seen_as(kind: Kind, entry: Entry) -> Seen {
    if entry.is_none() || kind != Kind::Read && entry.is_present() && entry.is_special() {
        Seen::Empty
    } else if entry.is_mapped() && !entry.was_used() {
        Seen::Unused
    } else {
        Seen::Used
    }
}
