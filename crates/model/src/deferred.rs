//! Deferred flushes: one page, two CPUs that run the program, one CPU that ages, moves, evicts and
//! writes the page, settlements and collections.
//!
//! **A program's CPU** loads from the page by the translation in its TLB, and stores by the
//! translation if it allows stores. Without a translation the MMU walks: it reads the entry, sets
//! its accessed bit, and fills the TLB in a later step. A store forbidden by the entry is a fault:
//! read the entry; check the stamp of the space, and wait while its flush is pending; make the
//! entry busy; commit a writable entry. An evicted page is read from its store. The CPU leaves the
//! space and comes back: it drops all translations, leaves the CPU set, and then notes the clock.
//!
//! **The kernel's CPU** runs one operation after the other, for some rounds, in any order: it moves
//! the page to another frame, evicts the page, forbids stores, or writes to the page. To age the
//! page, it clears the accessed bit, and then notes the stamp after the clock's. To move or evict
//! the page, it makes the entry busy. If the entry is aged, unused since then, and all CPUs in the
//! set have flushed since then, no flush is needed. If the entry allows stores, the translations
//! are flushed: a request is posted to all CPUs in the set, and awaited. Otherwise the flush is
//! deferred: advance the clock; raise the debt of each CPU in the set, one after the other; note
//! the stamp for the space. Then the bytes are copied or stored, the entry changes, and the old
//! frame is free, or kept with its stamp.
//!
//! **A settlement** checks one CPU after the other, posts a flush to the CPUs that owe a flush and
//! run the space, awaits them, and raises the paid stamp. Frames with paid stamps are then free. A
//! settlement excludes deferrals during its checks.
//!
//! **A flush** is served between two instructions, or while a fault waits: read the clock and drop
//! the translation; then note the flushed stamp, and acknowledge. A CPU that flushes by itself
//! advances the clock first. (A CPU with a request to drop everything does the same; the model
//! omits this case.)
//!
//! Stamps begin directly below the end of their range. A waiting frame is in no list of the
//! allocator. No block with a stamp is therefore split or merged, and no block is split between its
//! allocation and its flush. The release of frames is a step here
//! ([`Mutant::ReleaseLooksAtStamps`]).
//!
//! Omitted: a second space, operations with claims, and memory orderings; the scenarios and the
//! loom models cover these.

mod state;
mod steps;

use faultless::Mutant;
use stateright::{Model, Property};

/// The number of CPUs that run the program.
pub const RUNNING: usize = 2;
/// The number of frames: the page's frame, two waiting frames, and a target for moves.
pub const FRAMES: usize = 4;

/// Number of a frame.
type Frame = u8;
/// A stamp.
type Stamp = u64;

/// The owner of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Owner {
    /// The allocator's.
    Free,
    /// The page's.
    Page,
    /// The kernel is about to fill the frame.
    Taken,
    /// A former frame of the page, which waits for the flush with this stamp.
    Owed(Stamp),
}

/// The page-table entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Slot {
    /// Evicted.
    Out,
    /// Taken by a fault, or by the kernel.
    Busy,
    /// Mapped, and whether stores are allowed.
    Leaf(Frame, bool),
}

/// The state of a CPU of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum At {
    /// The CPU runs another program.
    Away,
    /// Between two instructions.
    Program,
    /// The walk has read a leaf, and not filled the TLB yet.
    Walked(Frame, bool),
    /// In the fault of a store, which has seen the page in this frame, read-only.
    Fault(Frame),
    /// The CPU holds the busy entry.
    Held(Frame),
    /// The CPU has dropped its translation, and will note a flush up to this stamp.
    Serving(Stamp),
    /// The same without a request: no CPU waits for this flush.
    Flushing(Stamp),
    /// The CPU has dropped its translation, and left the set.
    Leaving,
}

/// The kernel's operation on the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Then {
    /// A move to this frame.
    Move(Frame),
    /// An eviction.
    Evict,
    /// The page becomes read-only.
    Protect,
}

/// The state of the kernel's CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// Between two operations.
    Idle,
    /// The CPU holds the entry; the old leaf had this content.
    Has(Then, Frame, bool),
    /// The CPU has cleared the accessed bit.
    Ages,
    /// The CPU has posted flushes, and waits.
    Awaits(Then, Frame, bool),
    /// The CPU defers the flush with this stamp, and has checked this many CPUs.
    Defers(Then, Frame, Stamp, u8),
    /// All flushes are done, or a flush is deferred.
    Flushed(Then, Frame, bool, Option<Stamp>),
}

/// The state of a settlement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Settlement {
    /// No settlement.
    None,
    /// The settlement has checked this many CPUs, of which the marked CPUs owe a flush.
    Looks(u8, [bool; RUNNING]),
    /// The settlement waits for the marked CPUs, up to this stamp.
    Awaits([bool; RUNNING], Stamp),
    /// No settlement, but a collection: it has checked this many CPUs, all of which have flushed up
    /// to this stamp.
    Collects(u8, Stamp),
}

/// All there is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    entry: Slot,
    /// The accessed bit, if the kernel ages the page.
    accessed: bool,
    /// Whether the page was aged, and the stamp of its frame.
    aged: Option<Stamp>,
    frames: [Owner; FRAMES],
    /// The content of each frame: the number of its last store.
    bytes: [u8; FRAMES],
    /// The content of the page's store.
    stored: u8,
    /// The content of the page: the number of its last store.
    shows: u8,
    tlb: [Option<(Frame, bool)>; RUNNING],
    in_set: [bool; RUNNING],
    posted: [bool; RUNNING],
    cpus: [At; RUNNING],
    kernel: Kernel,
    settlement: Settlement,
    clock: Stamp,
    paid: Stamp,
    /// The last deferral of a page of the space.
    pending: Stamp,
    owes: [Stamp; RUNNING],
    flushed: [Stamp; RUNNING],
    rounds: u8,
    ages: u8,
    stores: u8,
    /// An access has reached a frame through a translation older than the frame's ownership.
    stale: bool,
    /// A load has found something else than the last store's.
    lost: bool,
}

/// One step of a CPU or a settlement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// A load of a program's CPU, or the next step of its MMU or of its fault.
    Cpu(usize),
    /// A store of a program's CPU.
    Store(usize),
    /// A program's CPU serves its flush: the first step of two.
    Serve(usize),
    /// A program's CPU leaves the space.
    Leave(usize),
    /// A program's CPU flushes by itself: the first step of two.
    Own(usize),
    /// The kernel begins to age the page.
    Age,
    /// The kernel begins to move the page.
    Move,
    /// The kernel begins to evict the page.
    Evict,
    /// The kernel begins to take stores away.
    Protect,
    /// The kernel writes to the page.
    Write,
    /// The next step of the kernel's operation.
    Kernel,
    /// The next step of a settlement or collection, or the first of a settlement.
    Settle,
    /// A collection begins.
    Collect,
}

/// The machine, whole or less a line.
#[derive(Clone, Copy, Debug)]
pub struct Deferral {
    /// The number of operations of the kernel.
    pub rounds: u8,
    /// The number of times the kernel ages the page.
    pub ages: u8,
    /// The number of stores of the program.
    pub stores: u8,
    /// The removed step.
    pub lost: Option<Mutant>,
}

impl Model for Deferral {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let mut frames = [Owner::Free; FRAMES];
        frames[0] = Owner::Page;
        // Each operation defers at most once. For each deferral, and for each aging of the page,
        // each CPU flushes by itself.
        let flushes = if self.ages == 0 { 0 } else { (self.rounds + self.ages) * RUNNING as u8 };
        let stamp = Stamp::MAX - Stamp::from(self.rounds + flushes);
        vec![State {
            entry: Slot::Leaf(0, false),
            accessed: false,
            aged: None,
            frames,
            bytes: [0; FRAMES],
            stored: 0,
            shows: 0,
            tlb: [None; RUNNING],
            in_set: [true, false],
            posted: [false; RUNNING],
            cpus: [At::Program, At::Away],
            kernel: Kernel::Idle,
            settlement: Settlement::None,
            clock: stamp,
            paid: stamp,
            pending: 0,
            owes: [0; RUNNING],
            flushed: [0; RUNNING],
            rounds: self.rounds,
            ages: self.ages,
            stores: self.stores,
            stale: false,
            lost: false,
        }]
    }

    fn actions(&self, _: &State, steps: &mut Vec<Step>) {
        for cpu in 0..RUNNING {
            steps.extend([Step::Cpu(cpu), Step::Store(cpu), Step::Serve(cpu)]);
            steps.extend([Step::Own(cpu), Step::Leave(cpu)]);
        }
        steps.extend([Step::Age, Step::Move, Step::Evict, Step::Protect, Step::Write]);
        steps.extend([Step::Kernel, Step::Settle, Step::Collect]);
    }

    fn next_state(&self, last: &State, step: Step) -> Option<State> {
        let mut next = last.clone();
        match step {
            Step::Cpu(cpu) => self.cpu(&mut next, cpu),
            Step::Store(cpu) => self.store(&mut next, cpu),
            Step::Serve(cpu) => Self::serve(&mut next, cpu),
            Step::Own(cpu) => Self::flush(&mut next, cpu),
            Step::Leave(cpu) => Self::leave(&mut next, cpu),
            Step::Age => Self::age(&mut next),
            Step::Move => Self::begin(&mut next, |state| {
                let to = state.free()?;
                state.frames[to as usize] = Owner::Taken;
                Some(Then::Move(to))
            }),
            Step::Evict => Self::begin(&mut next, |_| Some(Then::Evict)),
            Step::Protect => Self::begin(&mut next, |_| Some(Then::Protect)),
            Step::Write => self.write(&mut next),
            Step::Kernel => self.kernel(&mut next),
            Step::Settle => self.settle(&mut next),
            Step::Collect => Self::collect(&mut next),
        }?;
        (next != *last).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut all = vec![
            Property::always("law 1: never a stale owner", |_, state: &State| !state.stale),
            Property::always("law 2: never a lost write", |_, state: &State| !state.lost),
            Property::always("law 6: every frame is accounted for", |_, state: &State| {
                state.is_accounted()
            }),
            Property::sometimes("all rounds end", |_, state: &State| {
                state.rounds == 0 && state.kernel == Kernel::Idle && !state.owes()
            }),
        ];
        if self.ages != 0 {
            all.push(Property::sometimes(
                "a writable page is flush-free",
                |model: &Self, state: &State| {
                    matches!(state.kernel, Kernel::Has(_, _, true)) && model.is_flush_free(state)
                },
            ));
        }
        if self.rounds == 1 {
            return all;
        }
        all.extend([
            Property::sometimes("two frames wait for different flushes", |_, state: &State| {
                let mut stamps = state.frames.iter().filter_map(|owner| match owner {
                    Owner::Owed(stamp) => Some(stamp),
                    _ => None,
                });
                matches!((stamps.next(), stamps.next()), (Some(one), Some(other)) if one != other)
            }),
            Property::sometimes(
                "a CPU uses a frame that waits for its flush",
                |_, state: &State| {
                    let owed =
                        |frame: Frame| matches!(state.frames[frame as usize], Owner::Owed(_));
                    state.tlb.iter().flatten().any(|(frame, _)| owed(*frame))
                },
            ),
            Property::sometimes(
                "a flush of deferred frames interrupts no CPU",
                |_, state: &State| {
                    state.owes()
                        && matches!(state.settlement, Settlement::Awaits([false, false], _))
                },
            ),
            Property::sometimes(
                "a frame is free because all CPUs have flushed without a request",
                |_, state: &State| {
                    let waits = |floor| {
                        let is_up_to =
                            |owner: &Owner| matches!(owner, Owner::Owed(stamp) if *stamp <= floor);
                        state.frames.iter().any(is_up_to) && state.in_set.contains(&true)
                    };
                    matches!(state.settlement, Settlement::Collects(2, floor) if waits(floor))
                },
            ),
            Property::sometimes(
                "a fault waits for a flush of deferred frames",
                |_, state: &State| {
                    state.is_pending() && state.cpus.iter().any(|cpu| matches!(cpu, At::Fault(_)))
                },
            ),
            Property::sometimes("the last stamp is assigned", |_, state: &State| {
                state.clock == Stamp::MAX
            }),
        ]);
        all
    }
}
