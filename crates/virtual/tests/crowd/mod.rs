//! Pairs of operations on many simulated CPUs in one address space, each judged by the sequential orders of its operations: see `pairs`.
//!
//! Each CPU has an arena of the space, and leads a case there: it makes the starting state, and looks at what came of it. CPUs are in twos, and
//! the two of a case are those of a two: first both do their sides of the case that one leads, then those of the other's. Nobody waits for other
//! twos, so operations of a case meet with those of some dozen other cases, with what others prepare and look at, and with
//! forks of the whole space. The orders are worked out on a machine of its own, with one CPU. After a few cases of each CPU all stop, before they look at
//! what came of the last: then is the audit.
//!
//! # What is drawn
//!
//! All of the matrix: any two kinds, from any starting state, at any two spans of a window of eight pages; one in three has a third operation. But:
//!
//! - *Tables.* In every other block of eight arenas windows are 2 MiB apart, so each last-level table is shared by two neighbours, and all of a
//!   block by unmappings, which claim 2 MiB at most beyond their range. Huge leaves do not fit there; they are drawn in the other blocks, where
//!   arenas are 64 MiB apart. All arenas are below one entry of the root table.
//! - *Placement* chooses anywhere, and 64 CPUs want the highest hole. What goes outside of the arena is judged by itself: its VMAs, contents, and that
//!   nobody else has it. That a placed mapping lands beside something else of its case is left to checks of one pair.
//! - *The heap* is in one CPU's arena: only there are operations on it drawn.
//! - *Whole spaces.* While pages of an object leave the spaces that map it, these are all there are (`may_meet`), and a fork copies all arenas. So cases that
//!   fork, end a space or list one alternate with those that truncate and punch, for all CPUs at once. Children are judged in the arena.
//! - *The limit of VMAs* is one for all, so there is no [`Base::Full`]. The machine has no device memory.
//! - *Prefault* is off, as pages that nobody asked for are not promised. Slow files have one device, a CPU besides, which runs no case.

#[path = "../../../faultless/tests/pairs/mod.rs"]
pub mod pairs;

use fastrand::Rng;
use faultless::{Cpu, Errno, FaultError, Space};
use faultless_virtual::{
    Config, Meeting, Process, Profile, Stop, Virtual, VirtualCpu, VirtualMachine,
};
use pairs::arena::Arena;
use pairs::draw::draw;
use pairs::file::Which;
use pairs::op::{Besides, Hand, Ret};
use pairs::place::Base;
use pairs::table::Kind;
use pairs::{Case, Order, Outcome};
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;

/// Where the arenas are: far below where placement starts, and the regions of CPUs.
const ORIGIN: u64 = 0x1000_0000_0000;
/// Arenas of a block, and its bytes.
const BLOCK: usize = 8;
const BLOCK_BYTES: u64 = 1 << 30;
/// Between the windows of a block, and pages around them: of a narrow one, and of a wide one.
const NARROW: (u64, i64) = (2 << 20, 128);
const WIDE: (u64, i64) = (64 << 20, 640);

/// Rounds of a case before the next is drawn.
const TRIES: u64 = 4;
/// Cases of a CPU between two audits.
const CASES: u64 = 2;
/// The bits of a case's number that name its CPU.
const CPU_BITS: u32 = 10;
/// A round that takes longer than this does not end: simulated picoseconds. Behind one lock for all it takes some 40 ms.
const STUCK: u64 = 500_000_000_000;

/// A thread of a process, in an arena.
pub struct Thread<'t, 'a> {
    pub cpu: &'t VirtualCpu<'a>,
    pub arena: Arena,
    pub random: &'t RefCell<Rng>,
}

impl<'a> Thread<'_, 'a> {
    fn parts(&self) -> (&'a Cpu<'a, VirtualMachine>, &'a Space<VirtualMachine>) {
        // SAFETY: all here is of one thread.
        unsafe { self.cpu.parts() }
    }
}

fn refused(stop: Stop) -> FaultError {
    match stop {
        Stop::Signal { error, .. } => error,
        Stop::Refused { .. } => unreachable!("{stop}"),
    }
}

impl Hand for Thread<'_, '_> {
    type Machine = VirtualMachine;
    type Child = Process;

    fn space(&self) -> &Space<VirtualMachine> {
        self.parts().1
    }

    fn cpu(&self) -> &Cpu<'_, VirtualMachine> {
        self.parts().0
    }

    fn arena(&self) -> Arena {
        self.arena
    }

    fn poll(&self) {
        self.cpu.poll();
    }

    fn load(&self, addr: u64) -> Result<u64, FaultError> {
        self.cpu.load(addr).map_err(refused)
    }

    fn store(&self, addr: u64, value: u64) -> Result<(), FaultError> {
        self.cpu.store(addr, value).map_err(refused)
    }

    fn fork(&self) -> Result<Process, Errno> {
        self.cpu.fork().map_err(|_| Errno::ENOMEM)
    }

    fn exit(&self, child: Process) {
        self.cpu.exit(child);
    }

    fn random(&self, below: usize) -> usize {
        self.random.borrow_mut().usize(..below)
    }

    fn space_of(child: &Process) -> &Space<VirtualMachine> {
        // SAFETY: all here is of one thread.
        unsafe { child.space() }
    }
}

/// What to run.
#[derive(Clone, Copy, Debug)]
pub struct Crowd<'a> {
    pub profile: &'a Profile,
    /// An even number.
    pub cpus: usize,
    pub seed: u64,
    pub locking: &'a str,
    /// Cases of each CPU.
    pub cases: u64,
    /// The CPU that has led this case leads no other.
    pub only: Option<u64>,
}

/// What came of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ran {
    /// Pairs that were judged.
    pub rounds: u64,
    /// Simulated picoseconds.
    pub took: u64,
    pub counters: Vec<(&'static str, u64)>,
    /// What is wrong, the first first.
    pub bad: Vec<String>,
}

impl Crowd<'_> {
    /// The arena of a CPU.
    fn arena(&self, cpu: usize) -> Arena {
        let (block, at) = (cpu / BLOCK, (cpu % BLOCK) as u64);
        let (apart, margin) = if block.is_multiple_of(2) { NARROW } else { WIDE };
        // Above the first are the places that its moves come from and go to.
        let boundary = ORIGIN + (block as u64) * BLOCK_BYTES + WIDE.0 + at * apart;
        Arena::at(boundary, margin, cpu == 0, (cpu * 4) as u8)
    }

    /// Case `number` of the seed: the lower bits are the CPU.
    pub fn case(&self, number: u64) -> Case {
        let (cpu, turn) = (number as usize & ((1 << CPU_BITS) - 1), number >> CPU_BITS);
        let arena = self.arena(cpu);
        let whole = (turn / CASES + self.seed).is_multiple_of(2);
        let kinds = |kind| match kind {
            Kind::MapDevice => false,
            Kind::Fork | Kind::Exit | Kind::Drop | Kind::Maps => whole,
            Kind::Truncate | Kind::TruncateIn | Kind::PunchHole | Kind::GrowFile => !whole,
            kind => arena.admits(kind),
        };
        let bases = |base| base != Base::Device && arena.admits_base(base);
        let mut random = Rng::with_seed(self.seed << 40 ^ number);
        draw(&mut |below| random.usize(..below), kinds, bases).beside_others()
    }

    /// Runs it, until all is done or something is bad; tells `progress` of the rounds that were judged so far.
    ///
    /// # Panics
    /// When the subsystem does, and when all CPUs wait for each other.
    pub fn run(&self, mut progress: impl FnMut(u64)) -> Ran {
        let Self { cpus, seed, locking, .. } = *self;
        assert!(cpus.is_multiple_of(2) && cpus < 1 << CPU_BITS, "twos of CPUs");
        let machine = |cpus: usize, memory, seed| {
            let config = Config { cpus, memory_bytes: memory, slow_bytes: 0, seed };
            let system = Virtual::new(self.profile, config).expect("a valid machine");
            let locking = format!("locking={locking}");
            for setting in [&locking, "prefault_max_order=0", "max_map_count=65536"] {
                system.set(setting).expect("a valid setting");
            }
            system
        };
        let system = machine(cpus + 1, (256 << 20) + cpus as u64 * (4 << 20), seed);
        let model = machine(1, 64 << 20, 0);
        let processes = [system.process(), system.process(), model.process()];
        let [process, aside, alone] = processes.map(|process| process.expect("memory for a space"));
        let stage = Stage {
            crowd: self,
            model: &model,
            alone: &alone,
            slots: (0..cpus)
                .map(|cpu| Slot::new(self.arena(cpu), seed << 16 | cpu as u64))
                .collect(),
            twos: (0..cpus / 2).map(|_| Meeting::of(2)).collect(),
            device: RefCell::new(Rng::with_seed(seed)),
            working: Cell::new(0),
            served: Cell::new(None),
            ran: RefCell::default(),
        };
        let mut turn = 0;
        loop {
            let turns = turn..(turn + CASES).min(self.cases);
            stage.working.set(cpus);
            let ends = system.run(
                cpus + 1,
                |number| if number < cpus { &process } else { &aside },
                |cpu, number| {
                    match number {
                        _ if number < cpus => stage.lead(cpu, number, turns.clone()),
                        _ => stage.serve(cpu),
                    }
                    cpu.now()
                },
            );
            let audited = stage.audit(&system, &[&process, &aside]);
            let mut ran = stage.ran.borrow_mut();
            ran.took = ends.into_iter().max().unwrap_or(0);
            ran.bad.extend(audited.err().map(|wrong| format!("after turn {turn}: {wrong}")));
            progress(ran.rounds);
            if turn >= self.cases || !ran.bad.is_empty() {
                break;
            }
            turn += CASES;
        }
        let ran = Ran { counters: system.counters(), ..stage.ran.take() };
        if ran.bad.is_empty() {
            drop(stage);
            system.exit(process);
            system.exit(aside);
        } else {
            // What is wrong may make their end go wrong, too.
            core::mem::forget((stage.slots, process, aside));
        }
        ran
    }
}

/// A case, and what every order of it gives.
#[derive(Debug)]
struct Drawn {
    number: u64,
    case: Case,
    orders: Vec<(Order, Outcome)>,
}

/// One round of it.
#[derive(Debug)]
struct Round {
    drawn: Rc<Drawn>,
    besides: Besides<Process>,
    returned: [RefCell<Vec<Ret>>; 2],
}

/// What a CPU leads.
#[derive(Debug)]
struct Slot {
    arena: Arena,
    random: RefCell<Rng>,
    now: RefCell<Option<Round>>,
    /// Both may be at it: the device reads for them.
    running: Cell<bool>,
    /// When its CPU began a round.
    since: Cell<u64>,
}

impl Slot {
    fn new(arena: Arena, seed: u64) -> Self {
        let random = RefCell::new(Rng::with_seed(seed));
        Self {
            arena,
            random,
            now: RefCell::default(),
            running: Cell::new(false),
            since: Cell::new(u64::MAX),
        }
    }
}

/// What CPUs tell each other beside the machine.
struct Stage<'s> {
    crowd: &'s Crowd<'s>,
    /// Where the orders are worked out.
    model: &'s Virtual,
    alone: &'s Process,
    /// By CPU.
    slots: Vec<Slot>,
    twos: Vec<Meeting>,
    device: RefCell<Rng>,
    /// CPUs that need the device.
    working: Cell<usize>,
    /// Whose read the device completes now.
    served: Cell<Option<usize>>,
    ran: RefCell<Ran>,
}

impl Stage<'_> {
    /// What one CPU does: it leads a case in each turn, some rounds of it. What comes of the last round it leaves to the next turns, and begins with
    /// what the last ones left.
    fn lead(&self, cpu: &VirtualCpu<'_>, number: usize, turns: Range<u64>) {
        let slot = &self.slots[number];
        let hand = Thread { cpu, arena: slot.arena, random: &slot.random };
        let two = &self.twos[number / 2];
        self.judge(&hand, slot);
        for turn in turns.clone() {
            let drawn = Rc::new(self.draw(slot.arena, number, turn));
            for round in 0..TRIES {
                slot.since.set(cpu.now());
                self.prepare(&hand, slot, &drawn);
                for leader in [number & !1, number | 1] {
                    cpu.meet(two);
                    take_side(&self.slots[leader], &hand, number % 2);
                }
                cpu.meet(two);
                self.end(&hand, number);
                if turn + 1 != turns.end || round + 1 != TRIES {
                    self.judge(&hand, slot);
                }
            }
        }
        slot.since.set(u64::MAX);
        self.working.set(self.working.get() - 1);
    }

    /// What the device does: it completes reads, which threads that wait for them may have completed before.
    fn serve(&self, cpu: &VirtualCpu<'_>) {
        let mut looks = 0;
        while self.working.get() != 0 {
            looks += 1;
            self.find_stuck(cpu.now());
            for (number, slot) in self.slots.iter().enumerate() {
                let words =
                    slot.now.borrow().as_ref().and_then(|now| now.besides.words.get().cloned());
                let Some(words) = words.filter(|words| slot.running.get() && words.is_slow())
                else {
                    continue;
                };
                self.served.set(Some(number));
                let hand = Thread { cpu, arena: slot.arena, random: &self.device };
                if cpu.in_kernel(|| words.complete(&hand, Which::Oldest)) {
                    looks = 0;
                }
                self.served.set(None);
            }
            cpu.rest(looks);
        }
    }

    /// Panics where a round does not end, which no CPU says of itself.
    fn find_stuck(&self, now: u64) {
        let eldest = self.slots.iter().min_by_key(|slot| slot.since.get());
        if let Some(slot) = eldest.filter(|slot| now.saturating_sub(slot.since.get()) > STUCK) {
            let case = slot
                .now
                .borrow()
                .as_ref()
                .map(|now| format!("{}\n{}", now.drawn.number, now.drawn.case));
            panic!("a round does not end: --case {}", case.unwrap_or_default());
        }
    }

    /// Does something on the machine where the orders are worked out.
    fn on_model<R>(&self, arena: Arena, what: impl FnOnce(&Thread<'_, '_>) -> R) -> R {
        self.model.alone(self.alone, |cpu| {
            let random = RefCell::new(Rng::with_seed(0));
            let hand = Thread { cpu, arena, random: &random };
            // A folio needs frames that are neighbours.
            hand.cpu().drain();
            what(&hand)
        })
    }

    /// The case of a turn.
    fn draw(&self, arena: Arena, cpu: usize, turn: u64) -> Drawn {
        let cpu = cpu as u64;
        let only = self.crowd.only.filter(|number| number & ((1 << CPU_BITS) - 1) == cpu);
        let number = only.unwrap_or(turn << CPU_BITS | cpu);
        let case = self.crowd.case(number);
        let orders = self.on_model(arena, |hand| case.orders(hand));
        Drawn { number, case, orders }
    }

    fn prepare(&self, hand: &Thread<'_, '_>, slot: &Slot, drawn: &Rc<Drawn>) {
        let besides = hand.cpu.in_kernel(|| {
            let besides = drawn.case.prepare(hand);
            drawn.case.begin(hand, &besides);
            besides
        });
        let drawn = Rc::clone(drawn);
        slot.now.replace(Some(Round { drawn, besides, returned: Default::default() }));
        slot.running.set(true);
    }

    /// Both sides of the case are done.
    fn end(&self, hand: &Thread<'_, '_>, number: usize) {
        let slot = &self.slots[number];
        slot.running.set(false);
        let mut looks = 0;
        while self.served.get() == Some(number) {
            looks += 1;
            hand.cpu.rest(looks);
        }
        let now = slot.now.borrow();
        let Round { drawn, besides, .. } = now.as_ref().expect("it was prepared");
        hand.cpu.in_kernel(|| drawn.case.end(hand, besides));
    }

    /// Looks at what came of the round, if there was one.
    fn judge(&self, hand: &Thread<'_, '_>, slot: &Slot) {
        let Some(Round { drawn, besides, returned }) = slot.now.take() else { return };
        let Drawn { number, case, orders } = &*drawn;
        let returned = returned.map(RefCell::into_inner);
        let found = hand.cpu.in_kernel(|| case.conclude(hand, returned, besides));
        let judged = self.on_model(slot.arena, |hand| case.judge(hand, &found, orders));
        let mut ran = self.ran.borrow_mut();
        ran.rounds += 1;
        ran.bad.extend(judged.err().map(|wrong| format!("--case {number}: {wrong}")));
    }

    /// Checks the books, with all that cases have now.
    fn audit(&self, system: &Virtual, processes: &[&Process]) -> Result<(), String> {
        let rounds: Vec<_> = self.slots.iter().map(|slot| slot.now.borrow()).collect();
        let all = || rounds.iter().filter_map(|round| Some(&round.as_ref()?.besides));
        let born = all().flat_map(|Besides { old, new: [first, second], .. }| {
            [old, first, second].map(|children| children.lock().unwrap())
        });
        let born: Vec<_> = born.collect();
        let children = born.iter().flat_map(|children| children.iter());
        let spaces: Vec<_> = processes.iter().copied().chain(children).collect();
        let objects: Vec<_> = all().filter_map(|besides| besides.object.get()).collect();
        system.audit_with(&spaces, &objects).map_err(|wrong| format!("audit: {wrong}"))
    }
}

/// Does one side of the case that is led in `slot`.
fn take_side(slot: &Slot, hand: &Thread<'_, '_>, side: usize) {
    let now = slot.now.borrow();
    let Round { drawn, besides, returned } = now.as_ref().expect("it was prepared");
    let hand = Thread { arena: slot.arena, ..*hand };
    if hand.random(2) == 0 {
        // An operation takes about as long as some dozen to some hundred looks.
        let most = 1 << hand.random(9);
        (0..hand.random(most)).for_each(|_| hand.cpu.rest(0));
    }
    for step in 0..drawn.case.sides[side].len() {
        let ret = hand.cpu.in_kernel(|| drawn.case.step(&hand, side, step, besides));
        returned[side].borrow_mut().push(ret);
    }
}
