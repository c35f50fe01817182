//! Writers that edit one VMA tree in place: two leaves, two writers, a fault, a migration, and VMAs
//! that are reused at once.
//!
//! This machine describes a protocol for a future module of the subsystem. The subsystem's present
//! writers follow another protocol. Each step on which the protocol rests has a name here
//! ([`Rule`]), and the laws must break without the step.
//!
//! # The protocol
//!
//! **Leaves.** A leaf covers a fixed range of pages. A leaf has a spin lock, a sequence, an index
//! from pages to VMAs, and a list of marks. The sequence is odd while a writer edits the index. Two
//! neighbouring leaves share a *joined bit*: the pieces on both sides of their bound are one VMA.
//!
//! **VMAs.** A VMA never spans a bound. The memory of VMAs contains only VMAs, of any space. A VMA
//! contains its space, its range, its attributes and a count. The count grows with each change but
//! growth, and never repeats: a reused VMA continues to count. *Invariant (odd count):* while its
//! leaf is unlocked, the count of a VMA is odd if and only if the VMA is free, or an armed mark
//! covers the VMA.
//!
//! **Marks.** A mark is a range of pages in one leaf, its owner, and the waiting CPUs. *Invariant
//! (exclusion):* no two marks overlap, and no writer edits pages of a foreign mark. A mark is
//! *armed* as soon as its owner edits the VMAs. Before, the mark keeps the pages for a writer that
//! waits for the next leaf; faults and migrations ignore such a mark. *Invariant (marked change):*
//! a writer changes entries only below its armed mark. The mark lasts until all CPUs have flushed
//! the old translations.
//!
//! **A writer** takes these steps for each call.
//!
//! 1. Lock the leaves of the range, in ascending order, the next before the last is released. If
//!    the range touches a bound, also lock the leaf beyond the bound, because the joined bit may
//!    change. *Invariant (both locks):* the joined bit changes under the locks of both leaves.
//! 2. After each lock, search the leaf for a foreign mark in the range. If there is a mark, add the
//!    writer to the waiters of this mark, release all locks, wait for the wake-up, and start again.
//!    Otherwise, if the range continues in the next leaf, mark the pages of the range in this
//!    leaf. The mark lasts while the writer waits for a later leaf. *Invariant (all or nothing):*
//!    no VMA changes before the writer has marked or locked all leaves of the range. *Invariant
//!    (ascent):* a waiting writer has only unarmed marks, all below the mark for which the writer
//!    waits. A call with two ranges marks them in the order of addresses.
//! 3. Edit: make the sequences of the leaves odd, and the counts of VMAs that are replaced, cut,
//!    removed or changed. Arm the marks if any entry must change: if mapped pages are replaced,
//!    removed or moved, or lose a permission. Then store the new ranges, index and joined bit. Make
//!    the counts even, but not of VMAs below an armed mark. Release the locks. If no entry changes,
//!    the call returns. New VMAs that equal an unmarked neighbour merge with the neighbour at once.
//! 4. Change the entries, one after the other. Wait for busy entries, and serve flush requests in
//!    the meantime. A move empties the target, and then moves the entry from the source. Post a
//!    flush, and wait for all CPUs. No flush is necessary if no entry of a page has changed, and no
//!    flush of an evicted page is deferred. *Invariant (ranks):* a CPU that holds a leaf waits only
//!    for a higher leaf.
//! 5. For each leaf of the range, lock the leaf, remove the mark, merge VMAs that are equal and
//!    under no mark, unlink page tables whose span has neither a VMA nor a mark, make the counts
//!    even, wake the waiters, and unlock.
//!
//! **A fault** takes no lock. It compares the count in the CPU's *hint* with the count of the
//! hint's VMA. Without a hint it reads the sequence of the leaf, then the index, then the count. If
//! the count is odd, the fault locks the leaf. If an armed mark covers the page, the fault adds
//! its CPU to the waiters of the mark, unlocks, and waits for the wake-up. Then it starts again. If
//! the count is even, the fault checks the space and the range of the VMA, copies the attributes,
//! walks the page table, makes the entry busy, compares the count again, and installs a page or
//! restores the empty entry. *Invariant (bounds before walk):* the fault reads the range before it
//! walks, because growth leaves the count alone, and the table of the walk may be older than the
//! growth. If the index has no VMA, the fault searches for an armed mark, and then reads the
//! sequence again. *Invariant (final answer):* a page is missing if the sequence is the same, and
//! no armed mark covers the page. With a mark the fault waits as above.
//!
//! **A migration** comes from the frame and knows no VMA. It makes the entry busy, and then
//! searches for an armed mark of the page. With a mark it flushes the whole space, because the
//! owner of the mark has perhaps changed or moved the entry, and not flushed. Without a mark it
//! flushes the page if the entry allows stores. Otherwise it defers the flush, and keeps the old
//! frame. Then it copies the page, and stores the new entry. An eviction takes the same steps, and
//! stores an entry without a frame.
//!
//! # The machine
//!
//! Three pages, of which the lower leaf has two. The pages begin as one VMA, stored in two joined
//! pieces. CPUs 0 and 1 run a list of calls each. CPU 2 runs a program with faults, and has the
//! hint. CPU 3 runs the same program, and only translates. CPUs 2 and 3 have TLBs, and a scenario
//! may omit the first. Another space takes a freed VMA from the pool and uses it at the same
//! address. Writers take the free VMA with the lowest number, so a freed VMA is reused first. A
//! spinning CPU serves no flush. The edit has two steps: until the second, the index has no VMA for
//! replaced pages.
//!
//! Each access to a shared location is a step, in an order that is sequentially consistent. Steps
//! under a lock are combined if no CPU reads the locations without the lock. Left to loom: the
//! fence between odd counts and visited entries, the release and acquire of bounds, the lock-free
//! list of marks, and the search of an index that is sorted and moves its places. Also omitted:
//! shared marks, splits of leaves, calls over more than two leaves, the reservation for a writer
//! that lost often, fork, failures, the history that keeps equal neighbours apart, reading evicted
//! pages back, and grace periods. The model `protocol` has the steps of a flush.

mod beside;
mod fault;
pub mod laws;
mod state;
mod writer;

use stateright::{Model, Property};

/// The number of pages.
pub const PAGES: usize = 3;
/// The first page of the upper leaf.
pub const BOUND: u8 = 2;
/// The number of VMAs in the pool and in use.
pub const VMAS: usize = 6;
/// The number of frames.
pub const FRAMES: usize = 6;
/// The number of writers, which are also the first CPUs.
pub const WRITERS: usize = 2;
/// The CPU that faults.
pub const FAULTING: usize = 2;
/// The CPU that only translates.
pub const TRANSLATING: usize = 3;
/// The number of CPUs of the space.
pub const CPUS: usize = 4;
/// The migration, among those that request flushes. Its CPU runs another space.
const MIGRATING: usize = 2;
/// The object that the other space maps.
const STRANGE: u8 = 7;

/// A step of the protocol. Each name describes the step. The comment states the failure without
/// the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// A mark is removed after the flush. Otherwise, a new mapping meets old translations.
    MarkOutlastsFlush,
    /// A fault checks the space of its VMA. Otherwise, the fault uses a VMA of another space.
    SpaceIsChecked,
    /// The removal of a VMA moves its count. Otherwise, a fault installs a page without a VMA.
    RemovalMovesCount,
    /// The fault compares the count after the entry is busy. Otherwise, a writer between the two
    /// misses the fault.
    CheckFollowsBusy,
    /// The fault reads the bounds before its walk. Otherwise, it installs a page in a table that
    /// was unlinked before the growth of the VMA.
    BoundsPrecedeWalk,
    /// A reused VMA continues to count. Otherwise, a fault confuses a VMA with its successor.
    CountNeverRepeats,
    /// A fault waits for a change. Otherwise, it waits for an even count of a VMA that stays in the
    /// pool.
    WaitsForChange,
    /// A fault waits for the removal of a mark, and not for a change of the count. Otherwise, it
    /// waits for the change of a VMA that was in the pool when the fault read its count.
    WaitsAtMark,
    /// Leaves are locked in ascending order. Otherwise, two writers wait for each other.
    LocksAscend,
    /// A CPU becomes a waiter under the lock under which it found the mark. Otherwise, it misses
    /// the wake-up.
    WaiterHoldsLock,
    /// A migration searches for marks. Otherwise, it copies a page to which a CPU still stores.
    MigrationSeesMarks,
    /// A migration of a marked page flushes the whole space. Otherwise, CPUs still access a moved
    /// page at its old address.
    MigrationFlushesSpace,
    /// The joined bit changes under both locks. Otherwise, two writers count the VMAs wrongly.
    JoinedUnderBothLocks,
    /// A page without a VMA is reported if the sequence of the leaf is the same. Otherwise, a
    /// replaced page appears missing.
    MissingChecksSequence,
    /// A page without a VMA is reported if no mark covers the page. Otherwise, CPUs still use the
    /// page after the report.
    MissingSeesMarks,
    /// A writer waits for busy entries without a leaf. Otherwise, the holder of the entry waits
    /// for the flush of a CPU that waits for the leaf.
    BusyWithoutLeaf,
    /// A writer waits for its flush without a leaf. Otherwise, a CPU that waits for the leaf does
    /// not flush.
    FlushWithoutLeaf,
    /// A call that changes no entry also waits for marks. Otherwise, it maps pages that CPUs still
    /// access by old translations.
    GrowthSeesMarks,
    /// A table with a marked page is not unlinked. Otherwise, a writer misses the entries that it
    /// must clear.
    PruneSeesMarks,
    /// A writer also flushes if the flush of an evicted page is deferred. Otherwise, it finds no
    /// entry to flush, and CPUs still access the page by old translations.
    FlushCoversEvicted,
    /// A call that spans leaves edits no VMA before it has marked or locked all leaves. Otherwise,
    /// another call overtakes it between two leaves.
    SpanMarksFirst,
}

/// The attributes of a VMA.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Attributes {
    /// The number of the object.
    pub object: u8,
    /// Whether stores are allowed.
    pub write: bool,
}

/// The change that a call makes in its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// `munmap`.
    Unmap,
    /// `mmap` with `MAP_FIXED`, of an object, for loads and stores.
    Map(u8),
    /// `mprotect` that revokes stores.
    Revoke,
    /// `mprotect` that grants stores.
    Grant,
    /// `mremap` of the first of two pages to the second.
    MoveUp,
    /// `mremap` of the second of two pages to the first.
    MoveDown,
}

/// A call: its change, its first page, and the page behind its last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call(pub Change, pub u8, pub u8);

/// The number of a frame.
type Frame = u8;

/// A VMA, used or free. A free VMA keeps its old contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Vma {
    used: bool,
    /// Space 0 has the writers.
    space: u8,
    start: u8,
    end: u8,
    attributes: Attributes,
    count: u8,
}

/// A mark of one writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mark {
    start: u8,
    end: u8,
    armed: bool,
    /// A bit for each waiting CPU.
    waiters: u8,
}

/// A leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Leaf {
    /// The CPU that holds the lock.
    lock: Option<u8>,
    sequence: u8,
    /// The marks, by owner.
    marks: [Option<Mark>; WRITERS],
}

/// A page-table entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Slot {
    /// No page.
    Empty,
    /// Taken by the fault or the migration.
    Busy,
    /// A page in this frame, and whether stores are allowed.
    Page(Frame, bool),
    /// An evicted page.
    Out,
}

/// The owner of a frame, with the object of the frame's page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Owner {
    /// The allocator's.
    Free,
    /// Mapped, or in the hands of the migration.
    Page(u8),
    /// Unmapped by this writer, which will flush.
    Owed(u8, u8),
    /// The former frame of a moved page, whose flush is deferred.
    Kept(u8),
}

/// The place of a writer in its call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum At {
    /// Between two calls.
    Between,
    /// Waits for the lock of the first leaf.
    First,
    /// Holds the first leaf, if the flag is set, and waits for the lock of the second.
    Second(bool),
    /// Has made counts and sequences odd; the new joined bit, if it changes.
    Edits(Option<bool>),
    /// Has released the leaf, and will wait: only without [`Rule::WaiterHoldsLock`].
    Registers(u8),
    /// Waits for a wake-up. With the flag, only the second leaf is still to be edited, which
    /// happens only without [`Rule::SpanMarksFirst`].
    Parked(bool),
    /// The next page to visit, and whether an entry was changed.
    Visits(u8, bool),
    /// Has visited all pages, and perhaps changed entries.
    Posts(bool),
    /// Waits for the flush.
    Awaits,
    /// Waits for the lock of this leaf, to remove the mark there.
    Locks(u8),
    /// Holds the leaf with the mark.
    Finishes(u8),
}

/// A writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Writer {
    /// The number of calls that have returned.
    done: u8,
    at: At,
}

/// The stage of the fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// The program runs.
    Program,
    /// The sequence of the leaf is read.
    Search,
    /// The index had a VMA.
    Found,
    /// The count is read, and even.
    Counted,
    /// The walk is done, and the bounds are not checked: only without [`Rule::BoundsPrecedeWalk`].
    WalkedEarly,
    /// Space and range are checked, and the attributes are copied.
    Proved,
    /// The walk is done.
    Walked,
    /// The count is compared, and the entry not taken: only without [`Rule::CheckFollowsBusy`].
    CheckedEarly,
    /// The fault has the entry.
    Held,
    /// The count is compared, with this result.
    Checked(bool),
    /// The index had no VMA.
    Missing,
    /// Waits for the lock of the leaf.
    Spins,
    /// Found the mark of this writer: only without [`Rule::WaiterHoldsLock`].
    Registers(u8),
    /// Waits for a wake-up.
    Parked,
    /// Waits for an even count: only without [`Rule::WaitsForChange`].
    AwaitsEven,
    /// Waits for another count: only without [`Rule::WaitsAtMark`].
    AwaitsChange,
}

/// A fault. Fields that a stage does not use are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fault {
    stage: Stage,
    page: u8,
    sequence: u8,
    vma: u8,
    count: u8,
    hinted: bool,
    attributes: Attributes,
    /// The version of the page table in which the entry lies.
    table: u8,
}

/// The state of the migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Migration {
    /// Not begun.
    Idle,
    /// Has the entry of this frame.
    Took(Frame, bool),
    /// Waits for the flush of the page, or of the whole space.
    Awaits(Frame, bool, bool),
    /// Defers the flush.
    Defers(Frame),
    /// Done.
    Done,
}

/// All there is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    /// The calls of the writers, by their number in the scenario.
    pair: u8,
    leaves: [Leaf; 2],
    index: [Option<u8>; PAGES],
    joined: bool,
    vmas: [Vma; VMAS],
    entries: [Slot; PAGES],
    /// The version of each page table.
    tables: [u8; PAGES],
    frames: [Owner; FRAMES],
    /// The translations of CPU 2 and CPU 3.
    tlbs: [[Option<(Frame, bool)>; PAGES]; 2],
    /// For each CPU, a bit for each writer that has requested a flush, and one for the migration.
    posted: [u8; CPUS],
    writers: [Writer; WRITERS],
    fault: Fault,
    hint: Option<(u8, u8)>,
    migration: Migration,
    /// A page was evicted, and its flush deferred.
    deferred: bool,
    /// How often the other space may still take a freed VMA.
    strangers: u8,
    /// A page was installed in an unlinked table, or was left in such a table.
    lost: bool,
    /// A fault relied on a VMA that was not the VMA of its page.
    strange: bool,
    /// A page that is always mapped was reported as missing.
    denied: bool,
    /// A page was reported as missing while a CPU still had a translation.
    shown: bool,
    /// A call has returned while a CPU still had a translation from before the call.
    hasty: bool,
}

/// One step of a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// The program of CPU 2 accesses a page and begins a fault.
    Touch(u8),
    /// The next step of the fault.
    Fault,
    /// The TLB of CPU 2 or 3 takes the translation of a page.
    Fill(usize, u8),
    /// CPU 2 or 3 serves its flush requests.
    Serve(usize),
    /// The next step of a writer.
    Writer(usize),
    /// The next step of the migration.
    Migrate,
    /// Another space takes this VMA.
    Stranger(u8),
}

/// A scenario, with all rules or without one of them.
#[derive(Clone, Debug)]
pub struct Leaves {
    /// The calls of the two writers. Each pair has an initial state.
    pub pairs: Vec<[Vec<Call>; WRITERS]>,
    /// The pages that the program accesses.
    pub touched: Vec<u8>,
    /// The pages with a frame at the beginning.
    pub present: Vec<u8>,
    /// The page that a migration moves.
    pub moved: Option<u8>,
    /// Whether the page is evicted instead.
    pub evicts: bool,
    /// The page table of each page.
    pub tables: [u8; PAGES],
    /// Whether the faulting CPU has a TLB, besides the translating CPU.
    pub both_tlbs: bool,
    /// How often another space takes a freed VMA.
    pub strangers: u8,
    /// Whether, in the end, either all or none of the pages on both sides of the bound must allow
    /// stores: true for each serial order of these calls.
    pub ends_alike: bool,
    /// The removed rule.
    pub lost: Option<Rule>,
}

impl Leaves {
    fn lost(&self, rule: Rule) -> bool {
        self.lost == Some(rule)
    }

    /// Returns the calls of writer `writer`.
    fn calls(&self, state: &State, writer: usize) -> &[Call] {
        &self.pairs[usize::from(state.pair)][writer]
    }

    /// Returns whether all calls have returned, and neither a fault nor a migration is in progress.
    pub fn is_ended(&self, state: &State) -> bool {
        (0..WRITERS).all(|writer| {
            let Writer { done, at } = state.writers[writer];
            at == At::Between && usize::from(done) == self.calls(state, writer).len()
        }) && state.fault.stage == Stage::Program
            && matches!(state.migration, Migration::Idle | Migration::Done)
    }
}

impl Model for Leaves {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        (0..self.pairs.len()).map(|pair| State::new(self, pair as u8)).collect()
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        steps.extend((0..WRITERS).map(Step::Writer));
        steps.extend(self.touched.iter().map(|page| Step::Touch(*page)));
        steps.extend([Step::Fault, Step::Migrate]);
        for tlb in usize::from(!self.both_tlbs)..2 {
            steps.extend(self.touched.iter().map(|page| Step::Fill(tlb, *page)));
            steps.push(Step::Serve(tlb));
        }
        if state.strangers != 0 {
            steps.extend((0..VMAS as u8).map(Step::Stranger));
        }
    }

    fn next_state(&self, last: &State, step: Step) -> Option<State> {
        let mut next = last.clone();
        match step {
            Step::Touch(page) => self.touch(&mut next, page),
            Step::Fault => self.fault(&mut next),
            Step::Fill(tlb, page) => next.fill(tlb, page),
            Step::Serve(tlb) => self.serve(&mut next, tlb),
            Step::Writer(writer) => self.writer(&mut next, writer),
            Step::Migrate => self.migrate(&mut next),
            Step::Stranger(vma) => self.give_away(&mut next, vma),
        }?;
        self.acknowledge(&mut next);
        (next != *last).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        laws::all(self)
    }
}
