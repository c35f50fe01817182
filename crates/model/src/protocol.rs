//! One page, one VMA, two CPUs that run the program and a CPU that changes the mappings.
//!
//! **A program's CPU** loads from the page repeatedly. If its TLB has the translation, the load
//! goes to this frame. Otherwise the MMU walks: it reads the entry, and in a later step fills the
//! TLB and loads. No interrupt on this CPU can separate the two steps. An empty entry is a fault:
//! read the sequence; allocate a free frame; swap the entry from none to busy; read the sequence
//! again; commit or revert. Each of these is a separate step.
//!
//! **The writer** unmaps and maps again, for some rounds. It makes the sequence odd, a store that
//! stays in its store buffer until the buffer drains or the fence drains it; fences; waits while
//! the entry is busy, and empties the entry; posts a flush to both CPUs; waits for both
//! acknowledgements; frees the frame; allocates a free frame for another purpose; publishes the VMA
//! of the next round, whose sequence is another even number.
//!
//! **A flush** is served between two instructions of the program, or while its fault waits: drop
//! the translation, then acknowledge.
//!
//! Omitted: hardware's bits (present entries change by compare-and-swap in the code, and no step
//! here depends on the bits), upper tables, and memory orderings except the store buffer's. The
//! loom models cover these.

use faultless::Mutant;
use stateright::{Model, Property};

/// The number of CPUs that run the program.
pub const RUNNING: usize = 2;
/// The number of frames: one for each frame that a CPU may hold, and one more.
pub const FRAMES: usize = 4;

/// Number of a frame.
type Frame = u8;

/// The owner of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Owner {
    /// On the allocator's list.
    Free,
    /// Taken by the fault of this CPU, and not mapped yet.
    Prepared(u8),
    /// Mapped by the entry.
    Page,
    /// Unmapped; the writer owns the frame until the flush is done.
    Owed,
    /// The writer's, for something else.
    Other,
}

/// The page-table entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Slot {
    /// Nothing mapped.
    None,
    /// Taken by a fault.
    Busy,
    /// Mapped.
    Leaf(Frame),
}

/// The state of a CPU of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum At {
    /// Between two instructions.
    Program,
    /// The walk has read a leaf, and not filled the TLB yet.
    Walked(Frame),
    /// In a fault that has read this even sequence.
    Fault(u8),
    /// The CPU has allocated a frame as well.
    Ready(u8, Frame),
    /// The CPU has read the sequence before it made the entry busy, which only a fault without its
    /// barrier does.
    LookedEarly(bool, Frame),
    /// The CPU holds the busy entry.
    Held(u8, Frame),
    /// The CPU has read the sequence again, and will commit or revert.
    Looked(bool, Frame),
    /// The CPU has dropped its translation, and will acknowledge.
    Serving,
}

/// The state of the writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Writer {
    /// About to begin a round.
    Begin,
    /// The sequence is odd, or the odd value is in the store buffer.
    Stopped,
    /// After the fence: the writer visits the entry.
    Settling,
    /// The entry is empty; the old mapping must be flushed.
    Unmapped(Option<Frame>),
    /// The flush is posted.
    Posted(Frame),
    /// The frame is let go; a free frame may be taken for something else.
    Unowned,
    /// The writer has allocated this frame.
    Reusing(Frame),
    /// All rounds are over.
    Done,
}

/// All there is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    entry: Slot,
    sequence: u8,
    /// A store of the writer not yet visible to other CPUs.
    buffered: Option<u8>,
    frames: [Owner; FRAMES],
    tlb: [Option<Frame>; RUNNING],
    posted: [bool; RUNNING],
    cpus: [At; RUNNING],
    writer: Writer,
    rounds: u8,
    /// A load has reached a frame through a translation older than the frame's ownership.
    stale: bool,
}

/// One step of a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// The next of a program's CPU.
    Cpu(usize),
    /// A program's CPU serves its flush: the first step of two.
    Serve(usize),
    /// The next of the writer.
    Writer,
    /// The writer's store buffer drains.
    Drain,
}

/// The machine, whole or less a line.
#[derive(Clone, Copy, Debug)]
pub struct Protocol {
    /// The number of unmappings of the writer.
    pub rounds: u8,
    /// The removed step.
    pub lost: Option<Mutant>,
}

impl Protocol {
    fn lost(&self, mutant: Mutant) -> bool {
        self.lost == Some(mutant)
    }

    /// The next step of CPU `cpu`'s program, MMU or fault.
    fn cpu(&self, state: &mut State, cpu: usize) -> Option<()> {
        state.cpus[cpu] = match state.cpus[cpu] {
            At::Program => match (state.tlb[cpu], state.entry) {
                (Some(frame), _) => {
                    state.stale |= !state.is_pages(frame);
                    At::Program
                }
                (None, Slot::Leaf(frame)) => At::Walked(frame),
                // The fault waits for the holder of the entry, and serves requests in the meantime.
                (None, Slot::Busy) => return None,
                // Odd: the fault takes the locked path, which is not part of this machine.
                (None, Slot::None) if state.sequence & 1 != 0 => return None,
                (None, Slot::None) => At::Fault(state.sequence),
            },
            At::Walked(frame) => {
                state.tlb[cpu] = Some(frame);
                state.stale |= !state.is_pages(frame);
                At::Program
            }
            At::Fault(seen) => {
                let frame = state.free()?;
                state.frames[frame as usize] = Owner::Prepared(cpu as u8);
                At::Ready(seen, frame)
            }
            At::Ready(seen, frame) if self.lost(Mutant::FaultFence) => {
                At::LookedEarly(state.sequence == seen, frame)
            }
            At::Ready(seen, frame) => state.take(frame, At::Held(seen, frame)),
            At::LookedEarly(stands, frame) => state.take(frame, At::Looked(stands, frame)),
            At::Held(seen, frame) => {
                let stands = state.sequence == seen || self.lost(Mutant::SecondLook);
                At::Looked(stands, frame)
            }
            At::Looked(stands, frame) => {
                (state.entry, state.frames[frame as usize]) = if stands {
                    (Slot::Leaf(frame), Owner::Page)
                } else {
                    (Slot::None, Owner::Free)
                };
                At::Program
            }
            At::Serving => {
                state.posted[cpu] = false;
                At::Program
            }
        };
        Some(())
    }

    /// CPU `cpu` is interrupted, or serves a request during a wait.
    fn serve(&self, state: &mut State, cpu: usize) -> Option<()> {
        if !state.posted[cpu] || state.cpus[cpu] != At::Program {
            return None;
        }
        if !self.lost(Mutant::DropTranslations) {
            state.tlb[cpu] = None;
        }
        state.cpus[cpu] = At::Serving;
        Some(())
    }

    /// The writer's next step.
    fn writer(&self, state: &mut State) -> Option<()> {
        state.writer = match state.writer {
            Writer::Begin if state.rounds == 0 => Writer::Done,
            Writer::Begin => {
                state.rounds -= 1;
                state.buffered = Some(state.sequence + 1);
                Writer::Stopped
            }
            Writer::Stopped => {
                if !self.lost(Mutant::WriterFence) {
                    state.drain();
                }
                Writer::Settling
            }
            Writer::Settling => match state.entry {
                Slot::Busy if !self.lost(Mutant::ReplaceWaits) => return None,
                Slot::Leaf(frame) => {
                    state.entry = Slot::None;
                    state.frames[frame as usize] = Owner::Owed;
                    Writer::Unmapped(Some(frame))
                }
                Slot::None | Slot::Busy => {
                    state.entry = Slot::None;
                    Writer::Unmapped(None)
                }
            },
            Writer::Unmapped(None) => Writer::Unowned,
            Writer::Unmapped(Some(frame)) => {
                state.posted = [true; RUNNING];
                if self.lost(Mutant::FlushFirst) {
                    state.frames[frame as usize] = Owner::Free;
                }
                Writer::Posted(frame)
            }
            Writer::Posted(frame) => {
                if state.posted.contains(&true) && !self.lost(Mutant::AwaitAnswers) {
                    return None;
                }
                if !self.lost(Mutant::FlushFirst) {
                    state.frames[frame as usize] = Owner::Free;
                }
                Writer::Unowned
            }
            Writer::Unowned => {
                let frame = state.free()?;
                state.frames[frame as usize] = Owner::Other;
                Writer::Reusing(frame)
            }
            Writer::Reusing(frame) => {
                state.drain();
                state.frames[frame as usize] = Owner::Free;
                // The VMA of the next round: another sequence, which has never been seen.
                state.sequence += 1;
                Writer::Begin
            }
            Writer::Done => return None,
        };
        Some(())
    }
}

impl State {
    fn free(&self) -> Option<Frame> {
        self.frames.iter().position(|owner| *owner == Owner::Free).map(|at| at as Frame)
    }

    /// Returns whether `frame` still belongs to the page: mapped, or unmapped and not yet freed.
    fn is_pages(&self, frame: Frame) -> bool {
        matches!(self.frames[frame as usize], Owner::Page | Owner::Owed)
    }

    /// The compare-and-swap from none to busy. If it fails, the frame is freed.
    fn take(&mut self, frame: Frame, taken: At) -> At {
        if self.entry == Slot::None {
            self.entry = Slot::Busy;
            return taken;
        }
        self.frames[frame as usize] = Owner::Free;
        At::Program
    }

    fn drain(&mut self) {
        if let Some(value) = self.buffered.take() {
            self.sequence = value;
        }
    }

    /// Law 6: each frame is at the place named by its owner, and nowhere else.
    fn is_accounted(&self) -> bool {
        self.frames.iter().enumerate().all(|(at, owner)| {
            let frame = at as Frame;
            let mapped = self.entry == Slot::Leaf(frame);
            let in_hand = self.cpus.iter().position(|cpu| match *cpu {
                At::Ready(_, held)
                | At::LookedEarly(_, held)
                | At::Held(_, held)
                | At::Looked(_, held) => held == frame,
                At::Program | At::Walked(_) | At::Fault(_) | At::Serving => false,
            });
            match *owner {
                Owner::Free | Owner::Owed | Owner::Other => !mapped && in_hand.is_none(),
                Owner::Prepared(cpu) => !mapped && in_hand == Some(cpu as usize),
                Owner::Page => mapped && in_hand.is_none(),
            }
        })
    }

    /// Returns whether the page is mapped after the writer's visit, while there is no VMA.
    fn is_haunted(&self) -> bool {
        let unmapped = matches!(
            self.writer,
            Writer::Unmapped(_) | Writer::Posted(_) | Writer::Unowned | Writer::Reusing(_)
        );
        unmapped && matches!(self.entry, Slot::Leaf(_))
    }
}

impl Model for Protocol {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            entry: Slot::None,
            sequence: 0,
            buffered: None,
            frames: [Owner::Free; FRAMES],
            tlb: [None; RUNNING],
            posted: [false; RUNNING],
            cpus: [At::Program; RUNNING],
            writer: Writer::Begin,
            rounds: self.rounds,
            stale: false,
        }]
    }

    fn actions(&self, _: &State, steps: &mut Vec<Step>) {
        for cpu in 0..RUNNING {
            steps.extend([Step::Cpu(cpu), Step::Serve(cpu)]);
        }
        steps.extend([Step::Writer, Step::Drain]);
    }

    fn next_state(&self, last: &State, step: Step) -> Option<State> {
        let mut next = last.clone();
        match step {
            Step::Cpu(cpu) => self.cpu(&mut next, cpu),
            Step::Serve(cpu) => self.serve(&mut next, cpu),
            Step::Writer => self.writer(&mut next),
            Step::Drain => next.buffered.is_some().then(|| next.drain()),
        }?;
        (next != *last).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("law 1: never a stale owner", |_, state: &State| !state.stale),
            Property::always("law 6: every frame is accounted for", |_, state: &State| {
                state.is_accounted()
            }),
            Property::always("nothing is mapped behind a writer's back", |_, state: &State| {
                !state.is_haunted()
            }),
            Property::sometimes("all rounds end", |_, state: &State| state.writer == Writer::Done),
            Property::sometimes("a fault aborts", |_, state: &State| {
                state.cpus.iter().any(|cpu| matches!(cpu, At::Looked(false, _)))
            }),
            Property::sometimes("a writer waits for a fault", |_, state: &State| {
                state.writer == Writer::Settling && state.entry == Slot::Busy
            }),
            Property::sometimes("a TLB holds an unmapped frame", |_, state: &State| {
                state.tlb.iter().flatten().any(|frame| state.frames[*frame as usize] == Owner::Owed)
            }),
        ]
    }
}
