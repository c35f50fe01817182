//! The lock order, defined in one place and checked.
//!
//! All locks, entries and other resources that a CPU of the subsystem holds or waits for belong to
//! a [`Class`]. Every class has a rank: the number in the list of `classes!` below. There is one
//! rule:
//!
//! **A CPU that waits for a resource holds no resource of the same or a later rank.**
//!
//! So each wait is for a later rank than all resources held by the waiter, and no cycle of waiters
//! can form. The consequences for each class:
//!
//! - The *turn* to change an object's store is first: the holder calls the *store*, and
//!   write-protects pages in spaces. A CPU that calls a store holds only such turns, since a store
//!   may take long, and may make calls of its own.
//! - A *grace period* is next: a CPU that waits for one holds only turns, and is in no section. One
//!   exception: the switch of the locking policy waits while holding the first two locks, which
//!   excludes all other CPUs from these locks; no section needs the locks to end
//!   ([`Grace::synchronize_locked`]).
//! - *Reclaim* in a space keeps this space alive, and takes the locks of the space afterwards. The
//!   CPU that ends the space waits for reclaim without holding any resource.
//! - The locks of a *space* come before *sections*: no CPU waits for such a lock inside a section.
//!   Opening a section does not wait, so it is allowed anywhere.
//! - The *owner* of a space makes no claim during a call, and enters no other space. A CPU that
//!   enters this space waits in a section for the end of the call.
//! - A *tree's writer* takes one short step, and may wait in the step for the faults in the VMAs
//!   that the step stops. If the tree is in shards, the writer of a *shard* does. A CPU that parts
//!   the tree or joins shards is the tree's writer, and takes the locks of shards one at a time.
//! - *VMA locks* of one space are taken together, by a writer that has the space's lock. Faults
//!   only try them, and then only try the space's lock and no tree's: a try is not a wait.
//! - *Entries* are taken by trying. A CPU that waits for an entry held by another CPU holds no
//!   entry itself, present or not.
//! - A *flush* waits for other CPUs. It is allowed under a *busy* entry, which the MMU cannot use
//!   and for which other CPUs wait only in loops that serve flush requests, but not under a
//!   *pinned* entry.
//! - *Leaves* are last: their holders do not wait, not even for another leaf.
//!
//! In builds with debug assertions each CPU records the held resources in the [`Record`] of the
//! CPU's [`Local`](super::percpu::Local), and panics before the first wait that breaks the rule,
//! even if the wait would not have blocked. The record is reached through the CPU's [`Wait`]. In
//! other builds all of this has size zero and does nothing.
//!
//! [`Grace::synchronize_locked`]: super::grace::Grace::synchronize_locked

use super::wait::Wait;
use core::cell::Cell;
use core::fmt;
use core::marker::PhantomData;

/// A class of resources that CPUs hold and wait for.
pub trait Class {
    /// The position in the list; `None` for locks outside the subsystem.
    const AT: Option<usize>;
}

/// The list's entry for a class.
#[cfg(debug_assertions)]
struct Listed {
    rank: u8,
    /// Whether a holder of the class may wait for more resources of the class.
    several: bool,
    name: &'static str,
}

macro_rules! classes {
    (@several) => { false };
    (@several several) => { true };
    ($($(#[$doc:meta])* $rank:literal $class:ident $name:literal $($several:ident)?;)*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug)]
            pub struct $class;

            impl Class for $class {
                const AT: Option<usize> = Some(Place::$class as usize);
            }
        )*

        enum Place {
            $($class,)*
        }

        #[cfg(debug_assertions)]
        const CLASSES: &[Listed] =
            &[$(Listed { rank: $rank, several: classes!(@several $($several)?), name: $name },)*];
    };
}

// The lock order.
classes! {
    /// The turn to change an object's store. A store may consist of another object, whose turn the
    /// store's calls take.
    0 StoreTurn "an object's turn to write" several;
    /// A call of an object's store. Waited for, never held.
    1 StoreCall "a store";
    /// The end of the open sections. Waited for, never held.
    1 GracePeriod "a grace period";
    /// Reclaim at work in a space, which must not end meanwhile.
    1 Reclaim "a space's reclaim";
    /// The baselines' lock of a space.
    2 MmapLock "a space's mmap_lock";
    /// Held claims in a space's range lock.
    3 RangeClaim "a space's range lock";
    /// An open grace section.
    4 GraceSection "a grace section";
    /// A space, while its owner executes a call. The next CPU that enters the space waits for the
    /// end of the call.
    5 OwnedSpace "a space's owner";
    /// A tree's writer.
    6 TreeWriter "a tree's writer";
    /// The writer of a tree's shard. The tree's writer may wait for it, but not the reverse.
    7 ShardWriter "a shard's writer";
    /// The locks of VMAs of one space.
    8 VmaLock "a VMA's lock" several;
    /// A held page-table entry that is not present.
    9 BusyEntry "a busy entry";
    /// Other CPUs' acknowledgements of flush requests. Waited for, never held.
    10 Flush "a flush";
    /// A held page-table entry that the MMU continues to use.
    11 PinnedEntry "a pinned entry";
    /// The free VMAs that all CPUs share.
    12 FreeVmas "the free VMAs";
    /// The retired objects of a CPU.
    12 RetiredObjects "a CPU's retired objects";
    /// The list of spaces with lazily freed pages.
    12 LazySpaces "the list of spaces with lazily freed pages";
    /// The lazily freed range of a space.
    12 LazyHull "a space's lazily freed range";
    /// The holder of an anchor of the reverse map.
    12 AnchorHolder "an anchor's record";
    /// The list of unused anchors.
    12 AnchorList "the list of unused anchors";
    /// The list of an object's mappings.
    12 ObjectMappings "an object's mappings";
    /// The list of a space's locked VMAs.
    12 LockedAreas "a space's locked VMAs";
    /// The moved shared pages of a space.
    12 MovedPages "a space's moved pages";
    /// An arena's buddy allocator.
    12 ArenaBuddy "an arena's buddy allocator";
    /// The stamps of deferred flushes.
    12 DeferredStamps "the stamps of deferred flushes";
    /// An arena's frames with deferred flushes.
    12 FlushPendingFrames "an arena's frames with deferred flushes";
    /// A CPU's queue of flush requests.
    12 FlushInbox "a flush inbox";
    /// The watcher of the trace points.
    12 TraceWatcher "the trace points' watcher";
}

/// A lock outside the subsystem: not in the list, and not recorded.
#[derive(Clone, Copy, Debug)]
pub struct Outside;

impl Class for Outside {
    const AT: Option<usize> = None;
}

/// The resources held by one CPU.
#[derive(Default)]
pub struct Record {
    /// The number of held resources of each class.
    #[cfg(debug_assertions)]
    held: [Cell<u32>; CLASSES.len()],
    /// Whether a violation was reported: further violations while unwinding are ignored.
    #[cfg(debug_assertions)]
    broken: Cell<bool>,
    not_sync: PhantomData<Cell<()>>,
}

impl fmt::Debug for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        #[cfg(debug_assertions)]
        return f.debug_set().entries(self.names()).finish();
        #[cfg(not(debug_assertions))]
        f.write_str("Record")
    }
}

impl Record {
    /// Returns the record of a CPU without held resources.
    pub const fn new() -> Self {
        Self {
            #[cfg(debug_assertions)]
            held: [const { Cell::new(0) }; CLASSES.len()],
            #[cfg(debug_assertions)]
            broken: Cell::new(false),
            not_sync: PhantomData,
        }
    }

    /// Declares that this CPU is about to wait for a resource of class `C`, or would wait if it
    /// were not free.
    ///
    /// # Panics
    /// In builds with debug assertions, if the CPU holds a resource of the same or a later rank.
    #[inline(always)]
    pub fn before<C: Class>(&self) {
        #[cfg(debug_assertions)]
        if let Some(at) = C::AT {
            self.judge(at);
        }
    }

    /// Records one more held resource of class `C`, until the mark is dropped.
    #[inline(always)]
    pub fn hold<C: Class>(&self) -> Mark<'_> {
        #[cfg(debug_assertions)]
        return Mark { held: C::AT.map(|at| self.enter(at)), on: PhantomData };
        #[cfg(not(debug_assertions))]
        Mark::none()
    }
}

#[cfg(debug_assertions)]
impl Record {
    fn names(&self) -> impl Iterator<Item = &'static str> {
        let held = self.held.iter().zip(CLASSES);
        held.filter(|(held, _)| held.get() != 0).map(|(_, class)| class.name)
    }

    fn judge(&self, at: usize) {
        let wanted = &CLASSES[at];
        for (other, (held, class)) in self.held.iter().zip(CLASSES).enumerate() {
            let fine = class.rank < wanted.rank || (other == at && class.several);
            if held.get() != 0 && !fine && !self.broken.replace(true) {
                let (wanted, held) = (wanted.name, class.name);
                panic!(
                    "lock order: {wanted} is waited for while {held} is held (locks held: {self:?})"
                );
            }
        }
    }

    fn enter(&self, at: usize) -> &Cell<u32> {
        let held = &self.held[at];
        held.set(held.get() + 1);
        held
    }
}

/// A held resource in a [`Record`], removed on drop. The value cannot leave the CPU.
#[derive(Debug)]
#[must_use = "the drop removes the resource from the record"]
pub struct Mark<'a> {
    #[cfg(debug_assertions)]
    held: Option<&'a Cell<u32>>,
    on: PhantomData<&'a Record>,
}

impl Mark<'_> {
    /// Returns a mark without a resource.
    #[inline(always)]
    pub const fn none() -> Self {
        Self {
            #[cfg(debug_assertions)]
            held: None,
            on: PhantomData,
        }
    }
}

#[cfg(debug_assertions)]
impl Drop for Mark<'_> {
    fn drop(&mut self) {
        if let Some(held) = self.held {
            held.set(held.get() - 1);
        }
    }
}

#[cfg(not(debug_assertions))]
const _: () = assert!(size_of::<Record>() == 0 && size_of::<Mark<'_>>() == 0);

/// [`Record::before`] of the CPU behind `wait`, if the CPU keeps a record.
///
/// # Panics
/// As [`Record::before`].
#[inline(always)]
pub fn before<C: Class>(wait: &(impl Wait + ?Sized)) {
    if cfg!(debug_assertions)
        && let Some(record) = wait.order()
    {
        record.before::<C>();
    }
}

/// [`Record::hold`] of the CPU behind `wait`, if the CPU keeps a record.
#[inline(always)]
pub fn hold<C: Class>(wait: &(impl Wait + ?Sized)) -> Mark<'_> {
    match wait.order() {
        Some(record) if cfg!(debug_assertions) => record.hold::<C>(),
        _ => Mark::none(),
    }
}

#[cfg(all(test, debug_assertions, not(loom)))]
mod tests;
