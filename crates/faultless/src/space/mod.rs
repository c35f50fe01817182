//! An address space: its VMAs, its page tables, its counts, and the CPUs that run the space.
//!
//! Each operation has a file: [`map`](Space::mmap), unmap, protect, remap, advise, brk, fork, exit,
//! and the growth of stacks. An operation starts with a [claim](write) on its pages, changes VMAs
//! in a [step], and ends with a [flush](batch). [`query`] lists the mapped areas.
//!
//! # Lock order
//!
//! [`order`](crate::sync::order) states and checks the lock order.

mod access;
mod advise;
mod alone;
pub(crate) mod area;
mod baseline;
pub(crate) mod batch;
mod brk;
mod clean;
mod collapse;
pub(crate) mod core;
mod device;
mod discard;
pub(crate) mod dropped;
mod exit;
mod finish;
mod fork;
mod grow;
mod harvest;
pub(crate) mod huge;
mod lock;
mod made;
mod map;
mod mbind;
pub(crate) mod merge;
mod move_pages;
mod page_info;
mod page_out;
mod pages;
mod pin;
mod place;
mod populate;
mod protect;
mod query;
mod remap;
mod resident;
mod revoke;
mod step;
pub(crate) mod stock;
pub(crate) mod tree;
mod unmap;
mod versions;
mod visit;
pub(crate) mod vma;
mod will_need;
mod write;

#[cfg(all(test, not(loom)))]
pub(crate) mod tests;

pub use access::{AccessError, Translation};
pub use advise::Advice;
pub use area::{Area, PageSource, Prot, VmaFlags};
pub use device::DeviceMemory;
pub use lock::MemoryLock;
pub use map::{Backing, MapFlags};
pub use mbind::{MemPolicy, NodeSet};
pub use page_info::{PageInfo, PagePlace};
pub use pin::Pins;
pub(crate) use place::Apart;
pub use query::{AreaInfo, Label, Maps};
pub use remap::RemapFlags;
pub use revoke::PrivateCopies;
pub use stock::VmaUsage;

use self::core::Core;
use crate::addr::{FrameNumber, PAGE_SIZE, VirtRange};
use crate::ended::Place;
use crate::error::{Errno, Error};
use crate::fault::prefault::history::HistoryCell;
use crate::frame::FrameUse;
use crate::heap::Shared;
use crate::identity::Identity;
use crate::knob::{Locking, Policy};
use crate::machine::{Invalidate, Machine, SpaceId};
use crate::stat::Counter;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::grace::Section;
use crate::sync::mutant::{Mutant, lost};
use crate::sync::range::{RangeGuard, Wanted};
use crate::sync::rwlock::{ReadGuard, WriteGuard};
use crate::table::node::ROOT;
use crate::vm::Cpu;
use ::core::fmt;
use ::core::marker::PhantomData;
use brk::bounds::{Heap, HeapBounds};
use tree::{Tree, View};
use vma::Vma;

/// Bytes that stay free below a stack, so that the stack cannot run unnoticed into the mapping
/// below.
const STACK_GUARD: u64 = 256 * PAGE_SIZE;
/// The address below which automatic placement starts, downwards: below the usual place of a main
/// stack.
const MMAP_BASE: u64 = 0x7fff_f7ff_f000;
/// The start of the heap unless the program loader sets another start.
const HEAP_START: u64 = 0x5555_5575_7000;

/// One address space: its VMAs, its page tables, and the faults and calls that change them.
///
/// [`exit`](Space::exit) ends a space at once. A dropped space is ended later, by a CPU that makes
/// or ends another space or is asked to ([`Cpu::end_dropped`]), because the subsystem can free
/// nothing without a CPU.
///
/// A space belongs to the [`Vm`](crate::Vm) of the CPU that made the space. Every operation panics
/// if the given CPU is of another [`Vm`](crate::Vm).
pub struct Space<M: Machine> {
    // Every fault reads the first fields. The fields that faults and calls write are on separate
    // cache lines, so that calls do not take the first fields from the caches of faulting CPUs.
    id: SpaceId,
    root: FrameNumber,
    /// The word by which the space's anonymous pages name their anchor.
    anchor: u64,
    /// The locking policy in force, which follows the knob at the next call or fault; and the
    /// [identity](crate::identity) of the subsystem, which never changes.
    locking: AtomicU64,
    /// How the program used the space's pages before the pages were taken away.
    pub(crate) history: HistoryCell,
    pub(crate) tree: Tree<Vma>,
    /// The part of the space that CPUs other than the owner may find.
    pub(crate) core: Shared<Core>,
    heap: HeapBounds,
    /// The place of the space in the list of spaces that end, after a drop.
    place: Place,
    machine: PhantomData<fn() -> M>,
}

impl<M: Machine> fmt::Debug for Space<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.id)
    }
}

/// A lock that excludes writers of a range. The policy decides the kind.
#[derive(Debug)]
pub(crate) enum Guard<'a> {
    /// No lock: this CPU owns the space.
    Owner,
    Range {
        _guard: RangeGuard<'a>,
    },
    Reading {
        guard: ReadGuard<'a>,
    },
    Writing {
        guard: WriteGuard<'a>,
    },
}

impl<M: Machine> Space<M> {
    /// Makes an empty space.
    ///
    /// # Errors
    /// `ENOMEM` if no frame is left for the root table, or the heap is exhausted.
    pub fn new(cpu: &Cpu<'_, M>) -> Result<Self, Error> {
        Self::new_of(cpu, None)
    }

    /// Makes an empty space of the family of `parent`, which does not end during the call, or of a
    /// new family.
    pub(super) fn new_of(cpu: &Cpu<'_, M>, parent: Option<&Self>) -> Result<Self, Error> {
        let refused =
            |_| Error { operation: "new space", range: Error::NO_RANGE, errno: Errno::ENOMEM };
        cpu.end_dropped();
        let place = cpu.vm().ended.place().map_err(refused)?;
        let frame = cpu.alloc_table_or_wait().map_err(refused)?;
        let root = cpu.vm().frames.publish(frame, FrameUse::Table, 0, u64::from(ROOT));
        let id = cpu.vm().new_space_id();
        let anchors = &cpu.vm().anchors;
        let own = || anchors.found_family(cpu);
        let anchor = parent.map_or_else(own, |parent| Ok(parent.core.kin.anchor));
        let made = anchor.and_then(|anchor| {
            let core = Shared::try_new(Core::new(id, root, anchor, cpu.id()));
            core.inspect_err(|_| {
                if parent.is_none() {
                    anchors.give_up(anchor);
                }
            })
        });
        let core = made.map_err(|oom| {
            // SAFETY: no CPU has seen the table.
            unsafe { cpu.free_tables(root, ROOT) };
            refused(oom)
        })?;
        anchors.join(&core, cpu);
        let heap = HEAP_START.max(cpu.vm().machine().lowest_address());
        Ok(Self {
            id,
            root,
            anchor: core.kin.anchor.word(id),
            locking: AtomicU64::new(cpu.vm().knobs.locking_word()),
            history: HistoryCell::new(),
            tree: Tree::new(),
            core,
            heap: HeapBounds::new(Heap { start: heap, end: heap }),
            place,
            machine: PhantomData,
        })
    }

    /// Returns the name of the space in TLBs and traces.
    #[inline(always)]
    pub const fn id(&self) -> SpaceId {
        self.id
    }

    /// Returns the frame of the root table. The upper half of the table (on x86-64 entries 256 to
    /// 511) belongs to the kernel. The kernel may fill that half, through [`Machine::frame_bytes`],
    /// before the space first runs; the subsystem neither reads nor changes these entries.
    ///
    /// A CPU may load the root only while the CPU [runs](Self::activate) the space.
    #[inline(always)]
    pub const fn root(&self) -> FrameNumber {
        self.root
    }

    /// Returns the word by which the space's anonymous pages name their anchor.
    #[inline(always)]
    pub(crate) const fn anchor(&self) -> u64 {
        self.anchor
    }

    /// Starts to run the space on this CPU. Until [`deactivate`](Self::deactivate), the CPU may use
    /// the tables of the space, and must answer flush requests: the CPU calls
    /// [`Cpu::serve_flushes`] when the machine interrupts the CPU for a request. Until the CPU
    /// answers, calls of other CPUs that take pages away (`munmap`, `mprotect`, `DONTNEED`) wait,
    /// without a limit.
    ///
    /// # Panics
    /// Panics if the CPU already runs a space, even this space, or if the CPU is of another
    /// [`Vm`](crate::Vm). (A CPU that runs a space which was dropped, not ended, runs the space for
    /// ever.)
    pub fn activate(&self, cpu: &Cpu<'_, M>) {
        self.check_vm(cpu);
        let resident = &cpu.state().resident;
        let before = resident.space.load(Ordering::Relaxed);
        assert!(before != self.id.0, "{cpu:?} already runs {:?}", self.id);
        assert!(before == 0, "{cpu:?} should run {:?}, but runs {:?}", self.id, SpaceId(before));
        resident.space.store(self.id.0, Ordering::Relaxed);
        self.core.cpus.insert(cpu.id());
        // From here on the space is this CPU's or shared, as long as this CPU runs the space.
        let owner = &self.core.owner;
        let known = owner.was(cpu.id()) || owner.was_shared() || lost(Mutant::RunnerLooksAtOwner);
        if !known && !self.try_own(cpu) {
            self.core.enter(cpu.id(), cpu, &cpu.section());
        }
    }

    /// Makes this CPU, which runs the space, the owner, if no other CPU runs the space. The caller
    /// is in no section and holds no claim.
    #[cold]
    pub(crate) fn try_own(&self, cpu: &Cpu<'_, M>) -> bool {
        let cpus = cpu.vm().machine().cpus();
        let alone = || !self.core.cpus.any_but(cpu.id(), cpus);
        let take = || {
            self.core.owner.try_take(cpu.id(), &cpu.vm().grace, || {
                // A CPU that begins to run the space at the same time does so before reading the
                // owner word.
                (lost(Mutant::OwnerLooksAgain) || alone())
                    && !self.tree.is_parted()
                    && !self.is_claimed(cpu, VirtRange::USER)
            })
        };
        // SAFETY: the subsystem has one grace period, and all trees are read in its sections.
        let unite = || unsafe { self.tree.unite(cpu.local(), &cpu.vm().grace, cpu) };
        // An owner edits an undivided tree. No CPU divides the tree of an owned space: only a step
        // of another CPU divides a tree, after making the space shared, and the owner's own steps
        // do not.
        alone() && unite().is_ok() && take()
    }

    /// Stops running the space on this CPU, and drops the CPU's translations.
    ///
    /// # Panics
    /// Panics if the CPU does not run this space, or is of another [`Vm`](crate::Vm).
    ///
    /// # Safety
    /// From this call until the next [`activate`](Self::activate) of the space, the CPU uses
    /// neither the tables of the space nor translations that came from the tables (the call drops
    /// the translations in the CPU's TLB). Either the CPU has loaded another root, or the CPU makes
    /// no access to user space. The CPU receives no more flush requests for the space.
    pub unsafe fn deactivate(&self, cpu: &Cpu<'_, M>) {
        self.check_vm(cpu);
        let resident = &cpu.state().resident;
        let runs = resident.space.load(Ordering::Relaxed);
        assert!(
            runs == self.id.0,
            "{cpu:?} cannot deactivate {:?}, which it does not run",
            self.id
        );
        if !lost(Mutant::LeaveFlush) {
            cpu.vm().machine().invalidate(cpu.id(), self.id, Invalidate::All);
        }
        self.core.cpus.remove(cpu.id());
        cpu.vm().deferred.left_space(cpu.local());
        self.core.ranges.leave(cpu.id());
        // The flush above also serves the requests posted since. Their senders may be waiting.
        cpu.serve_flushes();
        self.core.resident.fetch_add(resident.pages.load(Ordering::Relaxed), Ordering::Relaxed);
        resident.pages.store(0, Ordering::Relaxed);
        // The flush above comes first: see `tlb::deferred`.
        resident.space.store(0, Ordering::Release);
        // The next owner reuses VMAs without a grace period.
        cpu.state().hint.forget();
    }

    /// Checks that `cpu` is of the subsystem that made this space. Every operation on a space
    /// starts with this call or [`locking`](Self::locking).
    ///
    /// # Panics
    /// Panics if `cpu` is of another subsystem.
    #[inline(always)]
    pub(crate) fn check_vm(&self, cpu: &Cpu<'_, M>) {
        Identity::of(self.locking.load(Ordering::Relaxed)).check(cpu.identity());
    }

    /// Opens a grace section, in which the caller may read this space.
    ///
    /// # Panics
    /// Panics if `cpu` is of another subsystem.
    #[inline]
    pub(crate) fn section<'c>(&self, cpu: &'c Cpu<'_, M>) -> Section<'c> {
        self.check_vm(cpu);
        cpu.section()
    }

    /// Returns the current tree. Every section that reads the tree begins with this call, so that
    /// no other CPU changes the tree in place during the section.
    #[inline]
    pub(crate) fn view<'s>(&'s self, cpu: &Cpu<'_, M>, section: &'s Section<'_>) -> View<'s, Vma> {
        self.core.enter(cpu.id(), cpu, section);
        self.tree.snapshot(section)
    }

    /// [`view`](Self::view) on a CPU that runs the space. No other CPU owns the space then, so the
    /// CPU need not check.
    #[inline(always)]
    pub(crate) fn view_of_runner<'s>(
        &'s self,
        cpu: &Cpu<'_, M>,
        section: &'s Section<'_>,
    ) -> View<'s, Vma> {
        if cfg!(any(debug_assertions, shuttle)) {
            let another = self.core.owner.is_other(cpu.id());
            assert!(!another, "{:?} is run by {cpu:?}, and owned by another CPU", self.id);
        }
        self.tree.snapshot(section)
    }

    /// Returns whether this CPU runs the space.
    #[inline]
    pub(crate) fn is_run_by(&self, cpu: &Cpu<'_, M>) -> bool {
        cpu.state().resident.space.load(Ordering::Relaxed) == self.id.0
    }

    /// Returns the policy in force: the policy of the knob, once all CPUs under another policy have
    /// left.
    ///
    /// # Panics
    /// Panics if `cpu` is of another subsystem.
    #[inline(always)]
    pub(crate) fn locking(&self, cpu: &Cpu<'_, M>) -> Policy {
        let wanted = cpu.vm().knobs.locking_word();
        if self.locking.load(Ordering::Acquire) != wanted {
            self.switch_locking(cpu, wanted);
        }
        Policy::of(wanted)
    }

    #[inline(always)]
    pub(crate) fn locking_in_force(&self) -> Policy {
        Policy::of(self.locking.load(Ordering::Acquire))
    }

    /// Returns whether a CPU has had a claim on a part of `range`, or has waited for one, since
    /// before the caller's last full fence.
    pub(crate) fn is_claimed(&self, cpu: &Cpu<'_, M>, range: VirtRange) -> bool {
        self.core.mmap_lock.is_held() || self.core.ranges.is_claimed(&cpu.vm().claims, range)
    }

    /// Locks `range` against writers. Several CPUs can hold such a lock at once. `counted` is the
    /// counter of the caller. The caller is in no grace section.
    #[inline(always)]
    pub(crate) fn share<'a>(
        &'a self,
        cpu: &'a Cpu<'_, M>,
        range: VirtRange,
        counted: Counter,
    ) -> Guard<'a> {
        loop {
            let locking = self.locking(cpu);
            let guard = if locking == Locking::Speculative {
                self.claim_shared(cpu, range, counted)
            } else {
                self.mmap_read_lock(cpu)
            };
            if self.locking_in_force() == locking {
                return guard;
            }
        }
    }

    /// Out of line, because faults of the baselines also lock, but do not need this part.
    #[inline(never)]
    pub(crate) fn claim_shared<'a>(
        &'a self,
        cpu: &'a Cpu<'_, M>,
        range: VirtRange,
        counted: Counter,
    ) -> Guard<'a> {
        cpu.count(counted);
        let wanted = Wanted::shared(range);
        let guard = self.core.ranges.acquire(&cpu.vm().claims, cpu.local(), wanted, cpu);
        Guard::Range { _guard: guard }
    }

    /// Claims `ranges` in the range lock, if no other CPU has a claim there.
    fn try_claim<'a>(&'a self, cpu: &'a Cpu<'_, M>, ranges: [VirtRange; 2]) -> Option<Guard<'a>> {
        let claims = &cpu.vm().claims;
        let guard = self.core.ranges.try_acquire(claims, cpu.local(), ranges, cpu)?;
        cpu.count(Counter::RangeLockWrite);
        Some(Guard::Range { _guard: guard })
    }

    /// Claims `ranges` in the range lock, and runs `leave` before a wait.
    fn claim<'a>(
        &'a self,
        cpu: &'a Cpu<'_, M>,
        ranges: [VirtRange; 2],
        leave: impl FnOnce(),
    ) -> Guard<'a> {
        let claims = &cpu.vm().claims;
        let guard = self.core.ranges.acquire_leaving(claims, cpu.local(), ranges, cpu, leave);
        Guard::Range { _guard: guard }
    }
}
