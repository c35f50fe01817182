//! The part of a space that does not move with it, so that others than its owner find it.

use crate::addr::FrameNumber;
use crate::heap::Shared;
use crate::machine::{CpuId, Machine, SpaceId};
use crate::reclaim::listed::Lazy;
use crate::rmap::anchor::Anchor;
use crate::rmap::locked::LockedVmas;
use crate::rmap::moved::Moves;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::grace::Section;
use crate::sync::mutant::{Mutant, lost};
use crate::sync::order::{self, Reclaim};
use crate::sync::owner::Owner;
use crate::sync::percpu::Padded;
use crate::sync::range::RangeLock;
use crate::sync::rwlock::RwLock;
use crate::sync::wait::{Wait, until};
use crate::tlb::cpuset::CpuSet;
use crate::tlb::deferred::Pending;
use crate::vm::Cpu;
use core::cell::UnsafeCell;

/// What reclaim needs of a space: its tables, what excludes writers from them, and which CPUs may have cached
/// translations.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) id: SpaceId,
    /// The frame of the root table. It is a table until the space ends.
    pub(crate) root: FrameNumber,
    /// The CPU that changes the tree in place, and claims nothing, as long as it is alone.
    pub(crate) owner: Padded<Owner>,
    pub(crate) ranges: Padded<RangeLock>,
    pub(crate) mmap_lock: Padded<RwLock>,
    pub(crate) cpus: Padded<CpuSet>,
    /// Resident pages, but for what the CPUs that run the space have not added yet.
    pub(crate) resident: AtomicU64,
    /// Its pages in the swap area.
    pub(crate) swapped: AtomicU64,
    /// Bytes that a growing stack may reach; 0: the knob says so.
    pub(crate) stack_limit: AtomicU64,
    pub(crate) lazy: Lazy,
    /// Where VMAs are locked.
    pub(crate) locked: LockedVmas,
    /// Its family: the spaces that may have its anonymous pages.
    pub(crate) kin: Kin,
    /// Where shared anonymous pages are that moved.
    pub(crate) moves: Moves,
    /// The last deferred flush of a page of it that moved.
    pub(crate) pending: Pending,
    /// The last deferred flush of a page of it that was evicted: other CPUs may see such a page where no entry says so. Who takes
    /// permissions away, or maps something else at an address that has no entry, does this flush first.
    pub(crate) evicted: Pending,
    /// How many CPUs have [entered](Entered) the space; with [`CLOSED`], none does so any more.
    users: AtomicU64,
}

/// The bit of [`Core::users`] of a space that ends.
const CLOSED: u64 = 1 << 63;

/// A space's place in its family.
///
/// *Invariant (kin is locked):* only the CPU that holds the lock of the anchor's record accesses `next`.
#[derive(Debug)]
pub(crate) struct Kin {
    pub(crate) anchor: Anchor,
    /// Its place in the order in which spaces joined the family; written before others find it.
    pub(crate) number: AtomicU64,
    /// The next space of the family.
    pub(crate) next: UnsafeCell<Option<Shared<Core>>>,
}

// SAFETY: one CPU at a time reaches the cell (kin is locked).
unsafe impl Sync for Kin {}
// SAFETY: it owns what it leads to.
unsafe impl Send for Kin {}

impl Core {
    /// Of an empty space, which `cpu` makes.
    pub(super) fn new(id: SpaceId, root: FrameNumber, anchor: Anchor, cpu: CpuId) -> Self {
        Self {
            id,
            root,
            owner: Padded(Owner::new(cpu)),
            ranges: Padded(RangeLock::new()),
            mmap_lock: Padded(RwLock::new()),
            cpus: Padded(CpuSet::new()),
            resident: AtomicU64::new(0),
            swapped: AtomicU64::new(0),
            stack_limit: AtomicU64::new(0),
            lazy: Lazy::default(),
            locked: LockedVmas::default(),
            kin: Kin { anchor, number: AtomicU64::new(0), next: UnsafeCell::new(None) },
            moves: Moves::default(),
            pending: Pending::default(),
            evicted: Pending::default(),
            users: AtomicU64::new(0),
        }
    }

    /// Lets no CPU enter the space any more, nor [walk](crate::rmap::walker) in it, and waits until none does: its tables are about to be freed.
    pub(super) fn close<M: Machine>(&self, cpu: &Cpu<'_, M>) {
        order::before::<Reclaim>(cpu);
        self.users.fetch_or(CLOSED, Ordering::Relaxed);
        if !lost(Mutant::ExitAwaitsReclaim) {
            until(cpu, || self.users.load(Ordering::Acquire) == CLOSED);
        }
        if !lost(Mutant::ExitAwaitsWalks) {
            cpu.await_walks();
        }
    }

    /// Whether the space is ending.
    pub(crate) fn is_closed(&self) -> bool {
        self.users.load(Ordering::Relaxed) & CLOSED != 0
    }

    /// Whether the space may have made a page that names its anchor by `word`.
    pub(crate) fn may_have_made(&self, word: u64) -> bool {
        self.kin.anchor == Anchor::named(word) && Anchor::may_be_made_by(word, self.id)
    }

    /// Makes sure that no CPU but `cpu`, this one, owns the space, for as long as `section` is open.
    #[inline]
    pub(crate) fn enter(&self, cpu: CpuId, wait: &impl Wait, section: &Section<'_>) {
        if !lost(Mutant::UserLooksAtOwner) {
            self.owner.share(section, cpu, wait);
        }
    }
}

/// A space that a CPU has entered: it does not end before this is dropped, whoever owns it.
#[derive(Debug)]
pub(crate) struct Entered(Shared<Core>);

impl Entered {
    /// Enters a space, unless it is ending.
    pub(crate) fn new(core: &Shared<Core>) -> Option<Self> {
        let mut users = core.users.load(Ordering::Relaxed);
        while users & CLOSED == 0 {
            let (acquire, relaxed) = (Ordering::Acquire, Ordering::Relaxed);
            match core.users.compare_exchange_weak(users, users + 1, acquire, relaxed) {
                Ok(_) => return Some(Self(core.clone())),
                Err(now) => users = now,
            }
        }
        None
    }
}

impl core::ops::Deref for Entered {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.0
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        // What this CPU did to the tables comes before their end.
        self.0.users.fetch_sub(1, Ordering::Release);
    }
}
