//! Pairs of operations on many simulated CPUs in one address space, each checked against the
//! sequential orders of its operations: see `pairs`.
//!
//! Each CPU has an arena of the space, and leads a case there: the CPU creates the starting state,
//! and checks the result. CPUs form fixed pairs, which share their cases: first both do their sides
//! of the case led by one CPU, then of the case led by the other. No pair waits for another pair,
//! so operations of a case run concurrently with those of some dozen other cases, with preparations
//! and checks of others, and with forks of the whole space. The orders are computed on a separate
//! machine with one CPU. After a few cases of each CPU all stop, before the checks of the last
//! case, for the audit.
//!
//! # Selection of cases
//!
//! The whole matrix: any two kinds, from any starting state, at any two spans of a window of eight
//! pages; one in three cases has a third operation. Exceptions:
//!
//! - *Tables.* In every other block of eight arenas windows are 2 MiB apart, so each last-level
//!   table is shared by two adjacent arenas, and all tables of a block by unmappings, which claim
//!   at most 2 MiB beyond their range. Huge leaves do not fit there; they are selected in the other
//!   blocks, in which arenas are 64 MiB apart.
//! - *Boundaries.* The seed determines the place of all arenas: the boundary of one arena is a
//!   multiple of a power of two from 2 MiB to 8 TiB. The boundaries of the other arenas follow
//!   from their distance.
//! - *Placement* may choose any address, and 64 CPUs compete for the highest hole. Mappings outside
//!   the arena are checked separately: their VMAs, contents, and exclusive use. Checks of a single
//!   pair cover a placed mapping adjacent to another mapping of its case.
//! - *The heap* is in one CPU's arena: operations on the heap are selected only there.
//! - *Whole spaces.* While pages of an object are removed from the spaces that map it, these must
//!   be all spaces (`may_meet`), and a fork copies all arenas. Cases that fork, end or list a space
//!   therefore alternate with cases that truncate and punch, for all CPUs at once. Children are
//!   checked in the arena.
//! - *The limit of VMAs* is common to all CPUs, so there is no [`Base::Full`]. The machine has no
//!   device memory.
//! - *Prefault* is off, because pages beyond the requested one are not guaranteed. Slow files have
//!   one device, which is an additional CPU without cases.

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
use std::ops::{Range, RangeInclusive};
use std::rc::Rc;

/// The place of the arenas: far below the start of placement, and the regions of CPUs.
const PLACE: u64 = 0x1000_0000_0000;
/// The powers of two of which one divides the boundary of one arena.
pub const POWERS: RangeInclusive<u32> = 21..=43;
/// Arenas of a block, and its bytes.
const BLOCK: usize = 8;
const BLOCK_BYTES: u64 = 1 << 30;
/// The distance of the windows of a block, and the pages around them, in a narrow and in a wide
/// block.
const NARROW: (u64, i64) = (2 << 20, 128);
const WIDE: (u64, i64) = (64 << 20, 640);

/// Rounds of a case before the next is drawn.
const TRIES: u64 = 4;
/// Cases of a CPU between two audits.
const CASES: u64 = 2;
/// The bits of a case's number that contain its CPU.
const CPU_BITS: u32 = 10;
/// The time after which a round is stuck, in simulated picoseconds. Behind one global lock a round
/// takes some 40 ms.
const STUCK: u64 = 500_000_000_000;

/// A thread of a process, in an arena.
pub struct Thread<'t, 'a> {
    pub cpu: &'t VirtualCpu<'a>,
    pub arena: Arena,
    pub random: &'t RefCell<Rng>,
}

impl<'a> Thread<'_, 'a> {
    fn parts(&self) -> (&'a Cpu<'a, VirtualMachine>, &'a Space<VirtualMachine>) {
        // SAFETY: all of this code runs on one thread.
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
        // SAFETY: all of this code runs on one thread.
        unsafe { child.space() }
    }
}

/// The parameters of a run.
#[derive(Clone, Copy, Debug)]
pub struct Crowd<'a> {
    pub profile: &'a Profile,
    /// An even number.
    pub cpus: usize,
    pub seed: u64,
    pub locking: &'a str,
    /// Cases of each CPU.
    pub cases: u64,
    /// The only case to lead for the CPU that led this case.
    pub only: Option<u64>,
}

/// The results of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ran {
    /// The number of checked pairs.
    pub rounds: u64,
    /// Simulated picoseconds.
    pub took: u64,
    pub counters: Vec<(&'static str, u64)>,
    /// The failures, in order.
    pub bad: Vec<String>,
}

impl Crowd<'_> {
    /// Returns the arena of a CPU.
    pub fn arena(&self, cpu: usize) -> Arena {
        let (_, margin) = if (cpu / BLOCK).is_multiple_of(2) { NARROW } else { WIDE };
        let boundary = self.origin() + Self::distance(cpu);
        Arena::at(boundary, margin, cpu == 0, (cpu * 4) as u8)
    }

    /// Returns the distance of the boundary of a CPU's arena from the origin.
    fn distance(cpu: usize) -> u64 {
        let (block, at) = (cpu / BLOCK, (cpu % BLOCK) as u64);
        let (apart, _) = if block.is_multiple_of(2) { NARROW } else { WIDE };
        (block as u64) * BLOCK_BYTES + at * apart
    }

    /// Returns the origin of the arenas, which the seed determines.
    fn origin(&self) -> u64 {
        let mut random = Rng::with_seed(self.seed);
        let (power, cpu) = (random.u32(POWERS), random.usize(..self.cpus));
        let odd = ((PLACE >> power) + 1) | 1;
        (odd << power) - Self::distance(cpu)
    }

    /// Returns case `number` of the seed: the lower bits are the CPU.
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

    /// Runs until all cases are done or a check fails; calls `progress` with the rounds checked so
    /// far.
    ///
    /// # Panics
    /// If the subsystem panics, or all CPUs wait for each other.
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
            // After a failure, dropping them may fail, too.
            core::mem::forget((stage.slots, process, aside));
        }
        ran
    }
}

/// A case, and the outcome of every order of its operations.
#[derive(Debug)]
struct Drawn {
    number: u64,
    case: Case,
    orders: Vec<(Order, Outcome)>,
}

/// One round of a case.
#[derive(Debug)]
struct Round {
    drawn: Rc<Drawn>,
    besides: Besides<Process>,
    returned: [RefCell<Vec<Ret>>; 2],
}

/// The case led by a CPU.
#[derive(Debug)]
struct Slot {
    arena: Arena,
    random: RefCell<Rng>,
    now: RefCell<Option<Round>>,
    /// Whether both CPUs may be executing the case, so that the device must read for them.
    running: Cell<bool>,
    /// The time at which its CPU began a round.
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

/// Data shared by CPUs outside the machine.
struct Stage<'s> {
    crowd: &'s Crowd<'s>,
    /// The machine that computes the orders.
    model: &'s Virtual,
    alone: &'s Process,
    /// By CPU.
    slots: Vec<Slot>,
    twos: Vec<Meeting>,
    device: RefCell<Rng>,
    /// The number of CPUs that need the device.
    working: Cell<usize>,
    /// The CPU whose read the device completes now.
    served: Cell<Option<usize>>,
    ran: RefCell<Ran>,
}

impl Stage<'_> {
    /// Runs one CPU, which leads a case in each turn, for several rounds. The results of the last
    /// round are checked at the start of the next turns.
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

    /// Runs the device, which completes reads. Waiting threads may have completed reads before.
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

    /// Panics if a round does not end, which no CPU detects itself.
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

    /// Runs `what` on the machine that computes the orders.
    fn on_model<R>(&self, arena: Arena, what: impl FnOnce(&Thread<'_, '_>) -> R) -> R {
        self.model.alone(self.alone, |cpu| {
            let random = RefCell::new(Rng::with_seed(0));
            let hand = Thread { cpu, arena, random: &random };
            // A folio needs contiguous frames.
            hand.cpu().drain();
            what(&hand)
        })
    }

    /// Returns the case of a turn.
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

    /// Ends the round after both sides of the case.
    fn end(&self, hand: &Thread<'_, '_>, number: usize) {
        let slot = &self.slots[number];
        slot.running.set(false);
        let mut looks = 0;
        while self.served.get() == Some(number) {
            looks += 1;
            hand.cpu.rest(looks);
        }
        let now = slot.now.borrow();
        let Round { drawn, besides, .. } = now.as_ref().expect("a prepared round");
        hand.cpu.in_kernel(|| drawn.case.end(hand, besides));
    }

    /// Checks the results of the round, if there was one.
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

    /// Runs the audit, with all objects currently held by cases.
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

/// Does one side of the case led in `slot`.
fn take_side(slot: &Slot, hand: &Thread<'_, '_>, side: usize) {
    let now = slot.now.borrow();
    let Round { drawn, besides, returned } = now.as_ref().expect("a prepared round");
    let hand = Thread { arena: slot.arena, ..*hand };
    if hand.random(2) == 0 {
        // An operation takes about as long as some dozen to some hundred iterations.
        let most = 1 << hand.random(9);
        (0..hand.random(most)).for_each(|_| hand.cpu.rest(0));
    }
    for step in 0..drawn.case.sides[side].len() {
        let ret = hand.cpu.in_kernel(|| drawn.case.step(&hand, side, step, besides));
        returned[side].borrow_mut().push(ret);
    }
}
