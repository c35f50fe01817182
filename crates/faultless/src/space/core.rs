//! The pinned part of a space, which does not move with the `Space` value, so that other CPUs can
//! find it.

use crate::addr::FrameNumber;
use crate::heap::Shared;
use crate::machine::{CpuId, Machine, SpaceId};
use crate::reclaim::lazy_list::Lazy;
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

/// The part of a space required by reclaim: its tables, the locks that exclude writers, and the set
/// of CPUs that may have cached translations.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) id: SpaceId,
    /// The frame of the root table. It remains a table until the space ends.
    pub(crate) root: FrameNumber,
    /// The CPU that changes the tree in place, without claims, while it is the only user.
    pub(crate) owner: Padded<Owner>,
    pub(crate) ranges: Padded<RangeLock>,
    pub(crate) mmap_lock: Padded<RwLock>,
    pub(crate) cpus: Padded<CpuSet>,
    /// Resident pages, except those that CPUs running the space have not added yet.
    pub(crate) resident: AtomicU64,
    /// The number of the space's pages in the swap area.
    pub(crate) swapped: AtomicU64,
    /// The maximum number of bytes of a growing stack; 0: the value of the knob.
    pub(crate) stack_limit: AtomicU64,
    pub(crate) lazy: Lazy,
    /// The locked VMAs.
    pub(crate) locked: LockedVmas,
    /// The family of the space: the spaces that may have its anonymous pages.
    pub(crate) kin: Kin,
    /// The addresses of moved shared anonymous pages.
    pub(crate) moves: Moves,
    /// The last deferred flush of a moved page of the space.
    pub(crate) pending: Pending,
    /// The last deferred flush of an evicted page of the space: other CPUs may still see such a
    /// page although there is no entry. An operation that removes permissions, or maps a page at an
    /// address without an entry, does this flush first.
    pub(crate) evicted: Pending,
    /// The number of CPUs that have [entered](Entered) the space; with [`CLOSED`], no further CPU
    /// can enter.
    users: AtomicU64,
}

/// The bit of [`Core::users`] of an ending space.
const CLOSED: u64 = 1 << 63;

/// A space's place in its family.
///
/// *Invariant (kin is locked):* only the CPU that holds the lock of the anchor's record accesses
/// `next`.
#[derive(Debug)]
pub(crate) struct Kin {
    pub(crate) anchor: Anchor,
    /// The position in the order in which spaces joined the family; written before other CPUs can
    /// find the space.
    pub(crate) number: AtomicU64,
    /// The next space of the family.
    pub(crate) next: UnsafeCell<Option<Shared<Core>>>,
}

// SAFETY: one CPU at a time accesses the cell (kin is locked).
unsafe impl Sync for Kin {}
// SAFETY: the link owns the rest of the list.
unsafe impl Send for Kin {}

impl Core {
    /// Returns the core of an empty space made by `cpu`.
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

    /// Prevents CPUs from entering the space or [walking](crate::rmap::walker) in it, and waits
    /// until none does: its tables are about to be freed.
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

    /// Returns whether the space is ending.
    pub(crate) fn is_closed(&self) -> bool {
        self.users.load(Ordering::Relaxed) & CLOSED != 0
    }

    /// Returns whether the space may have made a page that names its anchor by `word`.
    pub(crate) fn may_have_made(&self, word: u64) -> bool {
        self.kin.anchor == Anchor::named(word) && Anchor::may_be_made_by(word, self.id)
    }

    /// Ensures that no CPU except `cpu`, the calling CPU, owns the space while `section` is open.
    #[inline]
    pub(crate) fn enter(&self, cpu: CpuId, wait: &impl Wait, section: &Section<'_>) {
        if !lost(Mutant::UserLooksAtOwner) {
            self.owner.share(section, cpu, wait);
        }
    }
}

/// A space that a CPU has entered: it does not end before this value is dropped, regardless of its
/// owner.
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
        // This CPU's accesses to the tables come before their end.
        self.0.users.fetch_sub(1, Ordering::Release);
    }
}
