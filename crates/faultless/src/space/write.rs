//! A [`Writing`]: how every change of VMAs starts and ends.
//!
//! 1. **Claim.** [`Space::write`] claims exactly the pages that the operation changes. The claim is
//!    exclusive: no other CPU changes the pages, their VMA, or their entries (except faults without
//!    a lock). If the operation may unlink tables, the claim covers the whole span of the tables. A
//!    writer that chooses its ranges by reading the tree checks the choice again, under the claim
//!    or in the step.
//! 2. **Step.** One [short step](super::step) splits, creates, merges and removes VMAs. The step
//!    reads the current tree. After the step, the VMAs around the claimed pages are unlocked.
//! 3. The writer changes the entries of the claimed pages, and completes the flushes.
//! 4. **[Finish](super::finish).** The writer unlocks the VMAs that the step made write-locked.
//!
//! *Invariant (claimed pages):* only a writer with an exclusive claim on a page changes the
//! properties of the page in its VMA: its protection, flags, object, and offset in the object. So a
//! writer may rely on the properties of its own pages. Outside of a step a writer may not rely on
//! which VMA has the pages, on the start and end of that VMA beyond the claim, or on its anon_vma.

use super::visit::Visit;
use super::vma::Vma;
use super::{Guard, Space};
use crate::addr::VirtRange;
use crate::error::{Errno, OutOfMemory};
use crate::knob::{Locking, Policy};
use crate::machine::Machine;
use crate::space::tree::{UNKNOWN, View};
use crate::stat::Counter;
use crate::sync::grace::{RetireChain, Section};
use crate::sync::mutant::{Mutant, lost};
use crate::sync::owner::Holding;
use crate::sync::sequence::Sequence;
use crate::sync::wait::until;
use crate::vm::Cpu;
use core::cell::Cell;
use core::ops::Deref;
use core::ptr::NonNull;

/// The maximum number of attempts to claim chosen ranges before a writer claims the whole space.
/// Small in models, so that models reach that case.
const MOST_CHOICES: u32 = if cfg!(any(loom, shuttle)) { 1 } else { 16 };

/// The number of calls that change VMAs in shared spaces after which a CPU checks whether it is
/// alone there.
const CALLS_BEFORE_OWNING: u32 = 64;

/// No range.
pub(super) const NOWHERE: VirtRange = VirtRange { start: 0, end: 0 };

/// The VMAs that one writer has under change: the target of a move, and the source, which the move
/// may have split in two, and which counts until it is replaced.
pub(super) type UnderChange = Option<[Option<NonNull<Vma>>; 4]>;

/// Why a step failed. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// The operation fails with this error.
    With(Errno),
    /// The VMA at this address is under change by another writer.
    Busy(u64),
    /// One shard does not know whether the space may have so many VMAs. The step must run on the
    /// whole tree.
    Crowded,
}

impl Refused {
    /// The error of an owner's step, which counts all VMAs, and finds no VMA under change.
    pub(super) fn errno(self) -> Errno {
        match self {
            Self::With(errno) => errno,
            Self::Busy(_) | Self::Crowded => {
                debug_assert!(false, "an owner does not wait");
                Errno::ENOMEM
            }
        }
    }
}

impl From<Errno> for Refused {
    fn from(errno: Errno) -> Self {
        Self::With(errno)
    }
}

impl From<OutOfMemory> for Refused {
    fn from(oom: OutOfMemory) -> Self {
        Self::With(oom.into())
    }
}

/// The locks that a writer holds.
struct Held<'a> {
    locking: Policy,
    guard: Guard<'a>,
    section: Section<'a>,
    /// The [version](View::version) in which the writer chose the ranges.
    seen: usize,
    /// Set if this CPU owns the space.
    owned: Option<Holding<'a>>,
}

impl<'a> Held<'a> {
    /// The locks of an owner.
    #[inline(always)]
    fn alone<M: Machine>(cpu: &'a Cpu<'_, M>, owned: Holding<'a>) -> Self {
        cpu.count(Counter::OwnerWrite);
        let (locking, guard) = (Policy::of(Locking::Speculative as u64), Guard::Owner);
        Self { locking, guard, section: cpu.section(), seen: UNKNOWN, owned: Some(owned) }
    }
}

/// The right to change one or two ranges of a space.
pub(crate) struct Writing<'a, 'v, M: Machine> {
    /// The ranges to claim, before they were widened.
    pub(super) asked: [VirtRange; 2],
    /// The [version](View::version) in which the writer chose the ranges.
    seen: usize,
    /// The VMAs that this writer has under change.
    pub(super) changing: Cell<UnderChange>,
    /// Whether the writer has write-locked all VMAs.
    pub(super) all_locked: Cell<bool>,
    /// The VMAs that the writer removed as the owner, in order.
    pub(super) gone: Cell<RetireChain>,
    /// The ranges that the writer last cut off private anonymous VMAs as the owner.
    pub(super) cut: Cell<[VirtRange; 2]>,
    pub(super) locking: Policy,
    visit: Visit<'a, 'v, M>,
    /// Set if this CPU holds the space as its [owner](crate::sync::owner): then the writer
    /// write-locks no VMA, and edits the tree in place.
    owned: Option<Holding<'a>>,
}

impl<'a, 'v, M: Machine> Deref for Writing<'a, 'v, M> {
    type Target = Visit<'a, 'v, M>;

    fn deref(&self) -> &Self::Target {
        &self.visit
    }
}

impl<M: Machine> Space<M> {
    /// Claims `ranges`, widened to multiples of `align`. The caller is in no grace section.
    #[inline(always)]
    pub(super) fn write<'a, 'v>(
        &'a self,
        cpu: &'a Cpu<'v, M>,
        ranges: [VirtRange; 2],
        align: u64,
    ) -> Writing<'a, 'v, M> {
        match self.hold(cpu) {
            Some(owned) => Writing::new(cpu, self, ranges, align, Held::alone(cpu, owned)),
            None => self.write_beside(cpu, ranges, align),
        }
    }

    /// [`write`](Self::write), if this is not the owner's CPU, or a baseline is in force.
    #[inline(never)]
    fn write_beside<'a, 'v>(
        &'a self,
        cpu: &'a Cpu<'v, M>,
        ranges: [VirtRange; 2],
        align: u64,
    ) -> Writing<'a, 'v, M> {
        if let Some(held) = self.hold_locked(cpu) {
            return Writing::new(cpu, self, ranges, align, held);
        }
        let claimed = ranges.map(|range| range.widen(align));
        loop {
            let locking = self.locking(cpu);
            let guard = if locking == Locking::Speculative {
                self.claim_alone(cpu, claimed, || {})
            } else {
                self.mmap_write_lock(cpu)
            };
            if self.locking_in_force() == locking {
                let section = cpu.section();
                self.view(cpu, &section);
                let held = Held { locking, guard, section, owned: None, seen: UNKNOWN };
                return Writing::new(cpu, self, ranges, align, held);
            }
        }
    }

    /// [`write`](Self::write) by the owner of the space, if this CPU is the owner. The call makes
    /// no claim, and waits for no CPU that makes one.
    #[inline(always)]
    pub(super) fn write_alone<'a, 'v>(
        &'a self,
        cpu: &'a Cpu<'v, M>,
        ranges: [VirtRange; 2],
        align: u64,
    ) -> Option<Writing<'a, 'v, M>> {
        match self.hold(cpu) {
            Some(owned) => Some(Writing::new(cpu, self, ranges, align, Held::alone(cpu, owned))),
            None => self.hold_locked(cpu).map(|held| Writing::new(cpu, self, ranges, align, held)),
        }
    }

    /// Holds the space, if this CPU owns the space. Then the writer makes no claim. Under a
    /// baseline, or if the call cannot hold the space at once, the caller uses
    /// [`hold_locked`](Self::hold_locked).
    #[inline(always)]
    fn hold<'a>(&'a self, cpu: &'a Cpu<'_, M>) -> Option<Holding<'a>> {
        if !self.may_hold(cpu) || self.locking(cpu) != Locking::Speculative {
            return None;
        }
        self.core.owner.hold(cpu.id(), cpu)
    }

    /// Takes the locks of an owner, under any policy. A CPU that does not own the space tries from
    /// time to time to own the space in later calls.
    #[inline(never)]
    fn hold_locked<'a>(&'a self, cpu: &'a Cpu<'_, M>) -> Option<Held<'a>> {
        if !self.may_hold(cpu) {
            self.own_in_time(cpu);
            return None;
        }
        let locking = self.locking(cpu);
        // The baselines also take their lock here, because baselines exist to show the cost of the
        // lock.
        let coarse = (locking != Locking::Speculative).then(|| self.mmap_write_lock(cpu));
        let held = Held::alone(cpu, self.core.owner.hold(cpu.id(), cpu)?);
        Some(Held { locking, guard: coarse.unwrap_or(Guard::Owner), ..held })
    }

    /// Returns whether this CPU owned the space a moment ago, and may change the tree in place.
    #[inline(always)]
    fn may_hold(&self, cpu: &Cpu<'_, M>) -> bool {
        // For example not in a closure that lists areas: the view of the listing must not change.
        self.core.owner.was(cpu.id())
            && cpu.vm().knobs().edit_in_place()
            && !cpu.vm().grace.is_inside(cpu.id())
    }

    /// Tries to become the owner of a shared space, if the last attempt is long enough ago.
    #[inline(always)]
    fn own_in_time(&self, cpu: &Cpu<'_, M>) {
        if cpu.vm().knobs().edit_in_place()
            && self.core.owner.was_shared()
            && self.is_run_by(cpu)
            && cpu.is_time_to_own()
        {
            self.try_own(cpu);
        }
    }

    fn claim_alone<'a>(
        &'a self,
        cpu: &'a Cpu<'_, M>,
        claimed: [VirtRange; 2],
        leave: impl FnOnce(),
    ) -> Guard<'a> {
        cpu.count(Counter::RangeLockWrite);
        self.claim(cpu, claimed, leave)
    }

    /// [`write`](Self::write) for the ranges that `choose` finds in the tree. `choose` runs before
    /// the claim, and again under the claim if the tree has changed since; its last result holds.
    /// If that result needs more than the claimed ranges, the writer starts over. A step that
    /// relies on the whole tree chooses once more if the tree has changed since
    /// ([`is_outdated`](Writing::is_outdated)); then its caller calls again, with `tries` one
    /// higher.
    ///
    /// *Bound.* An attempt fails only if another operation changed the choice, and so made
    /// progress. An operation that changes the tree elsewhere costs no more than another read.
    /// After [`MOST_CHOICES`] attempts the writer claims the whole space, which the range lock
    /// grants in its turn, and which covers every choice.
    ///
    /// If another CPU has a claim on the ranges, and `elsewhere` returns true, the call does not
    /// wait, but runs `choose` again.
    #[inline(always)]
    pub(super) fn write_where<'a, 'v>(
        &'a self,
        cpu: &'a Cpu<'v, M>,
        align: u64,
        tries: u32,
        choose: impl Fn(&View<'_, Vma>) -> [VirtRange; 2],
        elsewhere: Option<&dyn Fn() -> bool>,
    ) -> Writing<'a, 'v, M> {
        match self.hold(cpu) {
            Some(owned) => self.write_chosen(cpu, align, choose, Held::alone(cpu, owned)),
            None => self.write_where_beside(cpu, align, tries, choose, elsewhere),
        }
    }

    /// [`write_where`](Self::write_where) by the owner, with these locks.
    #[inline(always)]
    fn write_chosen<'a, 'v>(
        &'a self,
        cpu: &'a Cpu<'v, M>,
        align: u64,
        choose: impl Fn(&View<'_, Vma>) -> [VirtRange; 2],
        held: Held<'a>,
    ) -> Writing<'a, 'v, M> {
        // SAFETY: this CPU owns the space while it holds the space.
        let version = unsafe { self.tree.version(&held.section) };
        Writing::new(cpu, self, choose(&View::whole(version)), align, held)
    }

    /// [`write_where`](Self::write_where), if this is not the owner's CPU, or a baseline is in
    /// force.
    #[inline(never)]
    fn write_where_beside<'a, 'v>(
        &'a self,
        cpu: &'a Cpu<'v, M>,
        align: u64,
        mut tries: u32,
        choose: impl Fn(&View<'_, Vma>) -> [VirtRange; 2],
        elsewhere: Option<&dyn Fn() -> bool>,
    ) -> Writing<'a, 'v, M> {
        if let Some(held) = self.hold_locked(cpu) {
            return self.write_chosen(cpu, align, choose, held);
        }
        loop {
            let locking = self.locking(cpu);
            let coarse = (locking != Locking::Speculative).then(|| self.mmap_write_lock(cpu));
            let section = cpu.section();
            let view = self.view(cpu, &section);
            let mut asked = choose(&view);
            // In shards, `choose` may have read versions that were replaced since.
            let mut seen = if view.is_whole() { see(&view, asked) } else { UNKNOWN };
            let ranges = if tries < MOST_CHOICES { asked } else { [VirtRange::USER, NOWHERE] };
            let claimed = ranges.map(|range| range.widen(align));
            tries += 1;
            let mut section = Some(section);
            let tried = match (coarse, elsewhere) {
                (None, Some(elsewhere)) => match self.try_claim(cpu, claimed) {
                    None if elsewhere() => continue,
                    tried => tried,
                },
                (coarse, _) => coarse,
            };
            // A CPU must not wait inside a section.
            let guard =
                tried.unwrap_or_else(|| self.claim_alone(cpu, claimed, || drop(section.take())));
            if self.locking_in_force() != locking {
                continue;
            }
            let section = match section {
                // Within one section the same version is the same tree.
                Some(section)
                    if seen != UNKNOWN && seen == see(&self.tree.snapshot(&section), asked) =>
                {
                    section
                }
                section => {
                    let section = section.unwrap_or_else(|| cpu.section());
                    let view = self.view(cpu, &section);
                    let found = asked;
                    seen = see(&view, found);
                    asked = choose(&view);
                    if asked != found && !view.is_whole() {
                        seen = UNKNOWN;
                    }
                    let mut needed = asked.iter().map(|range| range.widen(align));
                    if !needed.all(|range| claimed.iter().any(|own| own.covers(range))) {
                        drop(guard);
                        if let Some(elsewhere) = elsewhere {
                            elsewhere();
                        }
                        continue;
                    }
                    section
                }
            };
            let held = Held { locking, guard, section, owned: None, seen };
            return Writing::over(cpu, self, asked, claimed, held);
        }
    }
}

/// Returns the [version](View::version) in `view` of the hull of two ranges; the second may be
/// empty.
fn see(view: &View<'_, Vma>, [first, second]: [VirtRange; 2]) -> usize {
    view.version(if second.is_empty() { first } else { first.hull(second) })
}

impl<M: Machine> Cpu<'_, M> {
    /// Returns whether this CPU should now check if it is the only CPU that uses a shared space.
    /// The check comes after so many calls that its cost does not matter.
    #[inline]
    fn is_time_to_own(&self) -> bool {
        let calls = self.state().shared_calls.get().wrapping_add(1);
        self.state().shared_calls.set(calls);
        calls.is_multiple_of(if cfg!(any(loom, shuttle)) { 1 } else { CALLS_BEFORE_OWNING })
    }
}

impl<'a, 'v, M: Machine> Writing<'a, 'v, M> {
    /// A writer with a claim on `asked`, widened to multiples of `align`.
    #[inline(always)]
    fn new(
        cpu: &'a Cpu<'v, M>,
        space: &'a Space<M>,
        asked: [VirtRange; 2],
        align: u64,
        held: Held<'a>,
    ) -> Self {
        let [first, second] = asked;
        Self::over(cpu, space, asked, [first.widen(align), second.widen(align)], held)
    }

    #[inline(always)]
    fn over(
        cpu: &'a Cpu<'v, M>,
        space: &'a Space<M>,
        asked: [VirtRange; 2],
        claimed: [VirtRange; 2],
        held: Held<'a>,
    ) -> Self {
        let Held { locking, guard, owned, section, seen } = held;
        let visit = Visit { cpu, space, claimed, section, guard };
        let (changing, all_locked) = (Cell::default(), Cell::new(false));
        let (gone, cut) = (Cell::default(), Cell::new([NOWHERE; 2]));
        Self { asked, seen, changing, all_locked, gone, cut, locking, visit, owned }
    }

    /// Returns whether this CPU holds the space as its owner.
    #[inline(always)]
    pub(super) fn owns(&self) -> bool {
        self.owned.is_some()
    }

    pub(super) fn visit(&self) -> &Visit<'a, 'v, M> {
        &self.visit
    }

    /// Returns the VMA at `addr` in the current tree.
    pub(super) fn vma_at(&self, addr: u64) -> Option<&Vma> {
        self.view().at(addr).map(|entry| entry.get())
    }

    /// Returns whether the tree or shard that has the ranges may have changed between the choice of
    /// the ranges and `view`. A change of another shard does not count.
    pub(super) fn is_outdated(&self, view: &View<'_, Vma>) -> bool {
        !self.owns() && (self.seen == UNKNOWN || see(view, self.asked) != self.seen)
    }

    /// Returns whether other CPUs may use the space at the same time.
    pub(super) fn has_company(&self) -> bool {
        if self.owns() {
            return false;
        }
        let (cpu, cpus) = (self.cpu.id(), self.cpu.vm().machine().cpus());
        self.locking == Locking::Speculative && self.space.core.cpus.any_but(cpu, cpus)
    }

    /// Returns whether a step may part the tree, because the tree of an owner stays in one piece. A
    /// CPU may own the space though this writer does not hold the space: the CPU became the owner
    /// just before its claim. A CPU that does not own the space now does not own the space as long
    /// as this writer exists.
    pub(super) fn may_part(&self) -> bool {
        self.has_company()
            && (!self.space.core.owner.was(self.cpu.id()) || lost(Mutant::OwnerPartsNothing))
    }

    /// Waits until the VMA at `addr` is not under change by another writer.
    #[cold]
    pub(super) fn await_others(&self, addr: u64) {
        until(self.cpu, || self.vma_at(addr).is_none_or(|vma| vma.sequence.read().is_some()));
    }

    /// Write-locks all VMAs: no fault without a lock succeeds in any VMA until this writer has
    /// finished. The writer must have claimed the whole space.
    pub(super) fn write_lock_all(&self) {
        if self.owns() {
            return;
        }
        self.vmas(VirtRange::USER).for_each(|vma| self.write_lock(vma));
        self.all_locked.set(true);
        Sequence::writer_fence();
    }

    /// Write-locks `vma`, which must be unlocked. [`Sequence::writer_fence`] must follow.
    pub(super) fn write_lock(&self, vma: &Vma) {
        self.write_lock_vma(vma);
        vma.sequence.begin_write();
        vma.anon_vma.seal();
    }

    /// Unlocks `vma`, which this writer has write-locked.
    pub(super) fn unlock(&self, vma: &Vma) {
        vma.anon_vma.unseal();
        vma.sequence.end_write();
        self.write_unlock_vma(vma);
    }

    /// Returns whether `vma` is under change by this writer.
    pub(super) fn is_changing(&self, vma: NonNull<Vma>) -> bool {
        self.under_change().any(|change| change == vma)
    }

    /// Returns the error for more VMAs than a space may have: `ENOMEM` that reclaim cannot prevent.
    #[cold]
    pub(super) fn refuse_count(&self) -> Refused {
        self.cpu.state().crowded.set(true);
        Errno::ENOMEM.into()
    }

    pub(super) fn under_change(&self) -> impl Iterator<Item = NonNull<Vma>> + use<M> {
        self.changing.get().into_iter().flatten().flatten()
    }
}
