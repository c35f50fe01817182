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

impl Deferral {
    fn lost(&self, mutant: Mutant) -> bool {
        self.lost == Some(mutant)
    }

    /// The next step of CPU `cpu`, but for stores.
    fn cpu(&self, state: &mut State, cpu: usize) -> Option<()> {
        state.cpus[cpu] = match state.cpus[cpu] {
            At::Away => {
                state.in_set[cpu] = true;
                At::Program
            }
            At::Program => match (state.tlb[cpu], state.entry) {
                (Some((frame, _)), _) => {
                    state.load(frame);
                    At::Program
                }
                (None, Slot::Leaf(frame, stores)) => {
                    state.accessed = self.ages != 0;
                    At::Walked(frame, stores)
                }
                (None, Slot::Busy) => return None,
                (None, Slot::Out) => {
                    let frame = state.free()?;
                    state.frames[frame as usize] = Owner::Page;
                    state.bytes[frame as usize] = state.stored;
                    state.entry = Slot::Leaf(frame, false);
                    state.accessed = self.ages != 0;
                    At::Program
                }
            },
            At::Walked(frame, stores) => {
                state.tlb[cpu] = Some((frame, stores));
                state.load(frame);
                At::Program
            }
            At::Fault(_) if state.is_pending() && !self.lost(Mutant::WriteFlushesPending) => {
                return None;
            }
            At::Fault(frame) if state.entry == Slot::Leaf(frame, false) => {
                state.entry = Slot::Busy;
                At::Held(frame)
            }
            At::Fault(_) => At::Program,
            At::Held(frame) => {
                state.entry = Slot::Leaf(frame, true);
                state.accessed = self.ages != 0;
                state.tlb[cpu] = None;
                At::Program
            }
            At::Serving(before) => {
                state.note_flush(cpu, before);
                state.posted[cpu] = false;
                At::Program
            }
            At::Flushing(before) => {
                state.note_flush(cpu, before);
                At::Program
            }
            At::Leaving => {
                state.note_flush(cpu, state.clock);
                state.posted[cpu] = false;
                At::Away
            }
        };
        Some(())
    }

    /// CPU `cpu` stores, or takes the next step of a fault for the store.
    fn store(&self, state: &mut State, cpu: usize) -> Option<()> {
        if state.cpus[cpu] != At::Program || state.stores == 0 {
            return None;
        }
        match (state.tlb[cpu], state.entry) {
            (Some((frame, true)), _) => {
                state.stores -= 1;
                state.shows += 1;
                state.stale |= !state.is_pages(frame);
                state.bytes[frame as usize] = state.shows;
            }
            (_, Slot::Leaf(frame, false)) => state.cpus[cpu] = At::Fault(frame),
            _ => return None,
        }
        Some(())
    }

    /// CPU `cpu` is interrupted, or serves a request during a wait.
    fn serve(state: &mut State, cpu: usize) -> Option<()> {
        if !state.posted[cpu] || !matches!(state.cpus[cpu], At::Program | At::Fault(_)) {
            return None;
        }
        state.tlb[cpu] = None;
        // A waiting fault restarts.
        state.cpus[cpu] = At::Serving(state.clock);
        Some(())
    }

    /// CPU `cpu` drops all translations. It may hold translations for a waiting frame, or of an
    /// aged page.
    fn flush(state: &mut State, cpu: usize) -> Option<()> {
        let owes = state.flushed[cpu] < state.owes[cpu] && state.owes();
        let is_aged = state.aged.is_some_and(|stamp| state.flushed[cpu] < stamp);
        if state.cpus[cpu] != At::Program || !(owes || is_aged) {
            return None;
        }
        // Without an aged page the number is not read, and would only multiply the states.
        if state.aged.is_some() {
            state.clock = state.clock.checked_add(1)?;
        }
        (state.tlb[cpu], state.cpus[cpu]) = (None, At::Flushing(state.clock));
        Some(())
    }

    fn leave(state: &mut State, cpu: usize) -> Option<()> {
        if state.cpus[cpu] != At::Program {
            return None;
        }
        (state.tlb[cpu], state.in_set[cpu], state.cpus[cpu]) = (None, false, At::Leaving);
        Some(())
    }

    fn age(state: &mut State) -> Option<()> {
        let (Kernel::Idle, Slot::Leaf(..), true) = (state.kernel, state.entry, state.accessed)
        else {
            return None;
        };
        state.ages = state.ages.checked_sub(1)?;
        (state.accessed, state.kernel) = (false, Kernel::Ages);
        Some(())
    }

    /// Returns whether no CPU can have a translation of the page, whose entry is busy.
    fn is_flush_free(&self, state: &State) -> bool {
        let since = |stamp| {
            let has_flushed = |cpu: usize| state.flushed[cpu] >= stamp || !state.in_set[cpu];
            (0..RUNNING).all(has_flushed) || self.lost(Mutant::FlushFreeChecksStamps)
        };
        !state.accessed && state.aged.is_some_and(since)
    }

    /// The kernel begins an operation.
    fn begin(state: &mut State, then: impl FnOnce(&mut State) -> Option<Then>) -> Option<()> {
        let (Kernel::Idle, Slot::Leaf(frame, stores)) = (state.kernel, state.entry) else {
            return None;
        };
        state.rounds = state.rounds.checked_sub(1)?;
        let then = then(state)?;
        state.entry = Slot::Busy;
        state.kernel = Kernel::Has(then, frame, stores);
        Some(())
    }

    /// The kernel writes to the page, as `write` to a file does.
    fn write(&self, state: &mut State) -> Option<()> {
        let there = match (state.kernel, state.entry) {
            (Kernel::Idle, Slot::Leaf(frame, _)) => Some(frame),
            (Kernel::Idle, Slot::Out) => None,
            _ => return None,
        };
        let line =
            if there.is_some() { Mutant::WriteFlushesPending } else { Mutant::OverwriteSettles };
        if state.is_pending() && !self.lost(line) {
            return None;
        }
        state.rounds = state.rounds.checked_sub(1)?;
        state.shows += 1;
        match there {
            Some(frame) => state.bytes[frame as usize] = state.shows,
            None => state.stored = state.shows,
        }
        Some(())
    }

    /// The kernel's next step.
    fn kernel(&self, state: &mut State) -> Option<()> {
        state.kernel = match state.kernel {
            Kernel::Idle => return None,
            Kernel::Ages => {
                state.aged = state.aged.max(Some(state.clock.checked_add(1)?));
                Kernel::Idle
            }
            Kernel::Has(then, frame, stores)
                if then != Then::Protect && self.is_flush_free(state) =>
            {
                Kernel::Flushed(then, frame, stores, None)
            }
            Kernel::Has(then, frame, stores) => {
                let flushes = match then {
                    Then::Move(_) => !self.lost(Mutant::MigrateFlush),
                    Then::Evict => !self.lost(Mutant::EvictFlush),
                    Then::Protect => true,
                };
                let defers =
                    (!stores || self.lost(Mutant::DeferLooksAtStores)) && then != Then::Protect;
                if !flushes {
                    Kernel::Flushed(then, frame, stores, None)
                } else if !defers {
                    for cpu in 0..RUNNING {
                        state.posted[cpu] |= state.in_set[cpu];
                    }
                    Kernel::Awaits(then, frame, stores)
                } else if matches!(
                    state.settlement,
                    Settlement::Looks(..) | Settlement::Collects(..)
                ) {
                    // The lock of the stamps.
                    return None;
                } else {
                    state.clock = state.clock.checked_add(1)?;
                    Kernel::Defers(then, frame, state.clock, 0)
                }
            }
            Kernel::Awaits(then, frame, stores) => {
                let awaited = |cpu| state.posted[cpu] && state.in_set[cpu];
                if (0..RUNNING).any(awaited) {
                    return None;
                }
                Kernel::Flushed(then, frame, stores, None)
            }
            Kernel::Defers(then, frame, stamp, looked) if usize::from(looked) < RUNNING => {
                let cpu = usize::from(looked);
                if state.in_set[cpu] {
                    state.owes[cpu] = stamp;
                }
                Kernel::Defers(then, frame, stamp, looked + 1)
            }
            Kernel::Defers(then, frame, stamp, _) => {
                state.pending = stamp;
                Kernel::Flushed(then, frame, false, Some(stamp))
            }
            Kernel::Flushed(then, frame, stores, stamp) => {
                let left = stamp.map_or(Owner::Free, Owner::Owed);
                match then {
                    Then::Move(to) => {
                        state.bytes[to as usize] = state.bytes[frame as usize];
                        state.frames[to as usize] = Owner::Page;
                        state.frames[frame as usize] = left;
                        state.entry = Slot::Leaf(to, stores);
                        // The new frame has any stamp.
                        state.aged = state.aged.map(|_| 0);
                    }
                    Then::Evict => {
                        state.stored = state.bytes[frame as usize];
                        state.frames[frame as usize] = left;
                        state.entry = Slot::Out;
                        state.aged = None;
                    }
                    Then::Protect => state.entry = Slot::Leaf(frame, false),
                }
                Kernel::Idle
            }
        };
        Some(())
    }

    /// The next step of a settlement.
    fn settle(&self, state: &mut State) -> Option<()> {
        state.settlement = match state.settlement {
            // The lock of the stamps.
            _ if matches!(state.kernel, Kernel::Defers(..))
                && !matches!(state.settlement, Settlement::Awaits(..)) =>
            {
                return None;
            }
            Settlement::None if state.paid == state.clock => return None,
            Settlement::None => Settlement::Looks(0, [false; RUNNING]),
            Settlement::Looks(looked, mut owing) if usize::from(looked) < RUNNING => {
                let cpu = usize::from(looked);
                owing[cpu] = state.flushed[cpu] < state.owes[cpu] && state.in_set[cpu];
                state.posted[cpu] |= owing[cpu];
                Settlement::Looks(looked + 1, owing)
            }
            Settlement::Looks(_, owing) => Settlement::Awaits(owing, state.clock),
            Settlement::Awaits(owing, stamp) => {
                let awaited = |cpu: usize| {
                    let due = state.owes[cpu].min(stamp);
                    owing[cpu] && state.flushed[cpu] < due && state.in_set[cpu]
                };
                if (0..RUNNING).any(awaited) && !self.lost(Mutant::FlushAwaitsCpus) {
                    return None;
                }
                self.pay(state, stamp);
                Settlement::None
            }
            Settlement::Collects(looked, floor) if usize::from(looked) < RUNNING => {
                let cpu = usize::from(looked);
                let may_hold = state.flushed[cpu] < state.owes[cpu] && state.in_set[cpu];
                let counts = may_hold && !self.lost(Mutant::CollectLooks);
                let floor = if counts { floor.min(state.flushed[cpu]) } else { floor };
                Settlement::Collects(looked + 1, floor)
            }
            Settlement::Collects(_, floor) => {
                self.pay(state, floor);
                Settlement::None
            }
        };
        Some(())
    }

    /// A collection begins.
    fn collect(state: &mut State) -> Option<()> {
        let may = state.settlement == Settlement::None
            && state.owes()
            && !matches!(state.kernel, Kernel::Defers(..));
        state.settlement = may.then_some(Settlement::Collects(0, state.clock))?;
        Some(())
    }

    /// Marks stamps up to `stamp` as paid, and frees the frames that wait for them.
    fn pay(&self, state: &mut State, stamp: Stamp) {
        state.paid = state.paid.max(stamp);
        for owner in &mut state.frames {
            if let Owner::Owed(stamp) = *owner
                && (stamp <= state.paid || self.lost(Mutant::ReleaseLooksAtStamps))
            {
                *owner = Owner::Free;
            }
        }
    }
}

impl State {
    fn free(&self) -> Option<Frame> {
        self.frames.iter().position(|owner| *owner == Owner::Free).map(|at| at as Frame)
    }

    /// Returns whether `frame` still belongs to the page, or waits for the flush of its
    /// translations.
    fn is_pages(&self, frame: Frame) -> bool {
        matches!(self.frames[frame as usize], Owner::Page | Owner::Owed(_))
    }

    /// A load by a translation to `frame`.
    fn load(&mut self, frame: Frame) {
        self.stale |= !self.is_pages(frame);
        self.lost |= self.bytes[frame as usize] != self.shows;
    }

    fn is_pending(&self) -> bool {
        self.pending > self.paid
    }

    fn note_flush(&mut self, cpu: usize, before: Stamp) {
        self.flushed[cpu] = self.flushed[cpu].max(before);
    }

    /// Law 6: each frame is at the place named by its owner, and nowhere else.
    fn is_accounted(&self) -> bool {
        self.frames.iter().enumerate().all(|(at, owner)| {
            let frame = at as Frame;
            let mapped = matches!(self.entry, Slot::Leaf(it, _) if it == frame);
            let in_fault = self.cpus.contains(&At::Held(frame));
            let (from, to) = match self.kernel {
                Kernel::Idle | Kernel::Ages => (None, None),
                Kernel::Has(then, from, _)
                | Kernel::Awaits(then, from, _)
                | Kernel::Defers(then, from, ..)
                | Kernel::Flushed(then, from, ..) => {
                    (Some(from), if let Then::Move(to) = then { Some(to) } else { None })
                }
            };
            let uses = [mapped, in_fault, from == Some(frame)];
            let used = uses.into_iter().filter(|used| *used).count();
            match owner {
                Owner::Page => used == 1 && to != Some(frame),
                Owner::Taken => used == 0 && to == Some(frame),
                Owner::Free | Owner::Owed(_) => used == 0 && to != Some(frame),
            }
        })
    }

    /// Returns whether any frame waits.
    fn owes(&self) -> bool {
        self.frames.iter().any(|owner| matches!(owner, Owner::Owed(_)))
    }
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
                "a page that may be stored to is flush-free",
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
            Property::sometimes("a CPU uses a frame that waits", |_, state: &State| {
                let owed = |frame: Frame| matches!(state.frames[frame as usize], Owner::Owed(_));
                state.tlb.iter().flatten().any(|(frame, _)| owed(*frame))
            }),
            Property::sometimes("a settlement interrupts nobody", |_, state: &State| {
                state.owes() && matches!(state.settlement, Settlement::Awaits([false, false], _))
            }),
            Property::sometimes(
                "a frame is free since its CPUs have flushed by themselves",
                |_, state: &State| {
                    let waits = |floor| {
                        let is_up_to =
                            |owner: &Owner| matches!(owner, Owner::Owed(stamp) if *stamp <= floor);
                        state.frames.iter().any(is_up_to) && state.in_set.contains(&true)
                    };
                    matches!(state.settlement, Settlement::Collects(2, floor) if waits(floor))
                },
            ),
            Property::sometimes("a fault waits for a settlement", |_, state: &State| {
                state.is_pending() && state.cpus.iter().any(|cpu| matches!(cpu, At::Fault(_)))
            }),
            Property::sometimes("the last stamp is given", |_, state: &State| {
                state.clock == Stamp::MAX
            }),
        ]);
        all
    }
}
