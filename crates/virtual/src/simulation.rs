//! The simulation: CPUs as coroutines, each with a clock of its own, on one thread of the host.
//!
//! A CPU runs until it is about to do something that others may notice: to access a cache line that it does not have, to look again
//! in a wait loop, to park, or to take an interrupt. If another CPU is behind it in time then, that one runs first. So lines
//! move in the order of simulated time, and each access is made as a whole when its turn comes: what
//! the subsystem does is one of the orders that real CPUs could have done it in. Accesses to lines that a CPU has need no turn, as no other
//! CPU can notice them.
//!
//! Between two accesses a CPU executes instructions: [`Rates`](crate::rates::Rates) says how many, for each kind of operation.
//!
//! With a *seed* other than 0, CPUs are delayed at random and CPUs at the same time run in random order: each seed is another schedule, and
//! the same seed is the same schedule again.
//!
//! What a program prepares and checks is *off the books*: its time passes, and is in no account; the lines that it waits for heat no place.
//!
//! *Invariant (one thread):* a `Simulation` is used by the thread that called [`Simulation::run`], and by no other meanwhile: it is
//! reached through [`CURRENT`], which is the thread's, or by code that runs in its coroutines.

use crate::accounts::{Accounts, Spent};
use crate::lines::{GRANULE, LINE, LineId, Lines, socket};
use crate::log::Log;
use crate::profile::{Costs, Profile, Time};
use crate::rates::Operation;
use crate::recent::Moment;
use core::cell::{Cell, RefCell};
use core::cmp::Reverse;
use core::fmt;
use core::mem::ManuallyDrop;
use core::panic::Location;
use core::ptr;
use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};
use faultless_observed::PAGE_SIZE;
use faultless_observed::observe::{self, Intent, Watch};
use std::collections::BinaryHeap;

/// Bytes of a CPU's stack: the subsystem's calls are deep in builds without optimisation.
const STACK: usize = 256 << 10;
/// How far a program may run ahead of the CPU that is furthest behind before it looks for interrupts: 0.2 µs.
const AHEAD: Time = 200_000;
/// One access in so many is delayed under a seed.
const DELAYED: u64 = 16;
/// The longest such delay: 1 µs.
const DELAY: u64 = 1_000_000;
/// The most pauses between two looks of a program.
const PAUSES: Time = 32;
/// No CPU is waited for so long in vain: looks of one CPU while no other CPU can run.
const PATIENCE: u32 = 1 << 20;

/// A CPU as the simulation sees it.
struct Clock {
    now: Cell<Time>,
    /// What the instructions between two accesses take.
    rate: Cell<Time>,
    /// When its store buffer is empty.
    stored: Cell<Time>,
    /// Lines that came to it.
    fetched: Cell<u64>,
    /// When it is to take an interrupt.
    interrupted: Cell<Time>,
    /// It has taken one in a wait, which may have ended before what that asks for was looked at.
    unserved: Cell<bool>,
    parked: Cell<bool>,
    permit: Cell<bool>,
    /// Looks since another CPU last ran.
    looks: Cell<u32>,
    yielder: Cell<*const Yielder<(), ()>>,
    accounts: Cell<Accounts>,
    /// What it does now is in no account.
    aside: Cell<bool>,
    /// The same in every run: what lies on it keeps its cache lines.
    stack: Cell<Option<DefaultStack>>,
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Clock({} ps)", self.now.get())
    }
}

/// Where CPUs of a run wait for each other, and go on from one moment.
#[derive(Debug)]
pub struct Meeting {
    crew: usize,
    /// Who waits.
    here: RefCell<Vec<u16>>,
    /// How often all have met.
    times: Cell<usize>,
}

impl Meeting {
    /// A meeting of `crew` CPUs.
    pub const fn of(crew: usize) -> Self {
        Self { crew, here: RefCell::new(Vec::new()), times: Cell::new(0) }
    }
}

const NEVER: Time = Time::MAX;
const NOBODY: u16 = u16::MAX;

impl Clock {
    fn new() -> Self {
        Self {
            now: Cell::new(0),
            rate: Cell::new(0),
            stored: Cell::new(0),
            fetched: Cell::new(0),
            interrupted: Cell::new(NEVER),
            unserved: Cell::new(false),
            parked: Cell::new(false),
            permit: Cell::new(false),
            looks: Cell::new(0),
            yielder: Cell::new(ptr::null()),
            accounts: Cell::default(),
            aside: Cell::new(false),
            stack: Cell::new(None),
        }
    }

    /// Enters something in its accounts, unless it is off the books.
    #[inline]
    fn note(&self, enter: impl FnOnce(&mut Accounts)) {
        if !self.aside.get() {
            let mut accounts = self.accounts.get();
            enter(&mut accounts);
            self.accounts.set(accounts);
        }
    }

    fn spend(&self, time: Time, on: Spent) {
        self.now.set(self.now.get() + time);
        self.note(|accounts| accounts.spent[on as usize] += time);
    }

    fn wait_until(&self, time: Time, on: Spent) {
        self.spend(time.saturating_sub(self.now.get()), on);
    }
}

thread_local! {
    /// The simulation that this thread runs.
    static CURRENT: Cell<*const Simulation> = const { Cell::new(ptr::null()) };
}

/// Whom the subsystem's atomics tell.
static WATCH: Watch = Watch {
    before: |address, bytes, intent, at| {
        if let Some(simulation) = current() {
            simulation.access(address, bytes, intent, at);
        }
    },
    made: |address, bytes, what| {
        if let Some(simulation) = current() {
            simulation.made(address, bytes, what);
        }
    },
};

fn current<'a>() -> Option<&'a Simulation> {
    // SAFETY: what is current is alive: `enter` sets it, and unsets it before the simulation's borrow ends.
    unsafe { CURRENT.get().as_ref() }
}

/// CPUs, cache lines and time.
#[derive(Debug)]
pub(crate) struct Simulation {
    pub(crate) costs: Costs,
    cpus: Box<[Clock]>,
    lines: RefCell<Lines>,
    pub(crate) log: Log,
    /// CPUs that can run: time, order among those of one time, number.
    ready: RefCell<BinaryHeap<Reverse<(Time, u64, u16)>>>,
    /// The time of the first of them.
    soonest: Cell<Time>,
    running: Cell<u16>,
    /// When the memory of each socket is free again.
    memory: Box<[Cell<Time>]>,
    /// Lines that came to all CPUs.
    fetched: Cell<u64>,
    random: Cell<u64>,
    seeded: bool,
    turns: Cell<u64>,
}

impl Simulation {
    pub(crate) fn new(profile: &Profile, cpus: usize, seed: u64) -> Self {
        let costs = Costs::new(profile);
        let sockets = cpus.div_ceil(costs.per_socket);
        // SAFETY: the watch does not call the subsystem, and switches stacks between CPUs alone.
        unsafe { observe::watch(Some(&WATCH)) };
        Self {
            costs,
            cpus: (0..cpus).map(|_| Clock::new()).collect(),
            lines: RefCell::new(Lines::new()),
            log: Log::default(),
            ready: RefCell::default(),
            soonest: Cell::new(NEVER),
            running: Cell::new(NOBODY),
            memory: (0..sockets).map(|_| Cell::new(0)).collect(),
            fetched: Cell::new(0),
            // Not 0, from which xorshift does not come away.
            random: Cell::new(seed ^ 0x9e37_79b9_7f4a_7c15),
            seeded: seed != 0,
            turns: Cell::new(0),
        }
    }

    /// Does `what` with the simulation as the one that hears of accesses.
    pub(crate) fn enter<R>(&self, what: impl FnOnce() -> R) -> R {
        struct Restore(*const Simulation);
        impl Drop for Restore {
            fn drop(&mut self) {
                CURRENT.set(self.0);
            }
        }
        let _restore = Restore(CURRENT.replace(self));
        what()
    }

    /// How many sockets there are.
    pub(crate) fn sockets(&self) -> usize {
        self.memory.len()
    }

    /// The socket of a CPU.
    pub(crate) fn socket(&self, cpu: u16) -> u16 {
        socket(&self.costs, cpu)
    }

    fn random(&self) -> u64 {
        let mut x = self.random.get();
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        self.random.set(x);
        x
    }

    fn clock(&self) -> Option<&Clock> {
        self.cpus.get(usize::from(self.running.get()))
    }

    /// Whether a CPU runs.
    pub(crate) fn is_running(&self) -> bool {
        self.clock().is_some()
    }

    /// The running CPU's time, or 0.
    pub(crate) fn now(&self) -> Time {
        self.clock().map_or(0, |cpu| cpu.now.get())
    }

    pub(crate) fn accounts(&self, cpu: usize) -> Accounts {
        self.cpus[cpu].accounts.get()
    }

    /// The running CPU spends time.
    pub(crate) fn spend(&self, time: Time, on: Spent) {
        if let Some(cpu) = self.clock() {
            cpu.spend(time, on);
        }
    }

    /// What the running CPU does from now on is in the accounts, or is not. What was so before is returned.
    pub(crate) fn set_aside(&self, aside: bool) -> bool {
        self.clock().is_some_and(|cpu| cpu.aside.replace(aside))
    }

    /// The running CPU executes an operation whose instructions take `rate` between two accesses. What it executed before is returned.
    pub(crate) fn execute(&self, rate: Time) -> Time {
        self.clock().map_or(0, |cpu| cpu.rate.replace(rate))
    }

    // Running

    /// Runs `bodies`, each as one CPU, the first as CPU 0, from one moment on, and returns what they return.
    ///
    /// # Panics
    /// When all CPUs wait for each other; and with what a body panics with.
    pub(crate) fn run<'a, R: 'a>(&'a self, bodies: Vec<Box<dyn FnOnce() -> R + 'a>>) -> Vec<R> {
        assert!(bodies.len() <= self.cpus.len(), "more bodies than CPUs");
        assert!(self.running.get() == NOBODY, "a simulation inside itself");
        let begin = self.cpus.iter().map(|cpu| cpu.now.get()).max().unwrap_or(0);
        let mut results: Vec<Option<R>> = bodies.iter().map(|_| None).collect();
        // A panic of one body leaves the others where they are, for good: they cannot be unwound in the middle of a call.
        let mut coroutines: ManuallyDrop<Vec<_>> = ManuallyDrop::new(Vec::new());
        let all = bodies.into_iter().enumerate().map(|(number, body)| {
            let clock = &self.cpus[number];
            let stack = clock.stack.take().unwrap_or_else(|| {
                DefaultStack::new(STACK).expect("memory of the host for a stack")
            });
            let body = move |yielder: &Yielder<(), ()>, ()| {
                clock.yielder.set(yielder);
                body()
            };
            // SAFETY: what the body borrows lives for `'a`, longer than this call; after it the coroutine has returned, or is
            // never resumed nor dropped.
            unsafe { Coroutine::with_stack_unchecked(stack, body) }
        });
        coroutines.extend(all);
        for (number, cpu) in self.cpus.iter().enumerate().take(coroutines.len()) {
            cpu.now.set(begin);
            self.make_ready(number as u16);
        }
        self.enter(|| {
            let mut left = coroutines.len();
            while left != 0 {
                let Some(number) = self.next() else { self.stuck() };
                self.running.set(number);
                let result = coroutines[usize::from(number)].resume(());
                self.running.set(NOBODY);
                match result {
                    CoroutineResult::Yield(()) if self.cpus[usize::from(number)].parked.get() => {}
                    CoroutineResult::Yield(()) => self.make_ready(number),
                    CoroutineResult::Return(result) => {
                        results[usize::from(number)] = Some(result);
                        left -= 1;
                    }
                }
            }
        });
        for (cpu, coroutine) in self.cpus.iter().zip(ManuallyDrop::into_inner(coroutines)) {
            cpu.stack.set(Some(coroutine.into_stack()));
        }
        results.into_iter().map(|result| result.expect("each has returned")).collect()
    }

    fn make_ready(&self, number: u16) {
        let turn = if self.seeded {
            self.random()
        } else {
            self.turns.set(self.turns.get() + 1);
            self.turns.get()
        };
        let time = self.cpus[usize::from(number)].now.get();
        let mut ready = self.ready.borrow_mut();
        ready.push(Reverse((time, turn, number)));
        self.soonest.set(ready.peek().map_or(NEVER, |Reverse((time, ..))| *time));
    }

    fn next(&self) -> Option<u16> {
        let mut ready = self.ready.borrow_mut();
        let Reverse((_, _, number)) = ready.pop()?;
        self.soonest.set(ready.peek().map_or(NEVER, |Reverse((time, ..))| *time));
        Some(number)
    }

    #[cold]
    fn stuck(&self) -> ! {
        let parked = self.cpus.iter().filter(|cpu| cpu.parked.get()).count();
        panic!(
            "all CPUs wait for each other: {parked} are parked, and nobody is left to wake them"
        );
    }

    /// Lets the CPUs that are behind the running one run.
    fn pause(&self, cpu: &Clock) {
        cpu.looks.set(0);
        // SAFETY: the running CPU's coroutine has set it, and is suspended by nobody else (one thread).
        unsafe { &*cpu.yielder.get() }.suspend(());
    }

    /// Lets CPUs run that are behind by more than a little: called by programs, between two of their instructions.
    pub(crate) fn keep_pace(&self) {
        if let Some(cpu) = self.clock()
            && cpu.now.get() > self.soonest.get().saturating_add(AHEAD)
        {
            self.pause(cpu);
        }
    }

    // Accesses

    /// Names what is at `value`.
    pub(crate) fn made_one<T>(&self, value: &T, what: &'static str) {
        self.made(core::ptr::from_ref(value).addr(), size_of::<T>(), what);
    }

    /// Names what is in `bytes` bytes at `address`, which are aligned to lines.
    pub(crate) fn name(&self, address: usize, bytes: usize, what: &'static str) {
        self.lines.borrow_mut().name(address, bytes, what);
    }

    fn made(&self, address: usize, bytes: usize, what: &'static str) {
        self.spend(self.costs.allocate, Spent::Instructions);
        let cpu = self.clock().map(|cpu| (self.running.get(), cpu.fetched.get()));
        self.lines.borrow_mut().made(&self.costs, address, bytes, what, cpu);
    }

    /// The running CPU is about to access memory of the subsystem.
    fn access(&self, address: usize, bytes: usize, intent: Intent, at: &'static Location<'static>) {
        let Some(cpu) = self.clock() else { return };
        cpu.spend(cpu.rate.get(), Spent::Instructions);
        cpu.note(|accounts| accounts.accesses += u64::from(cpu.rate.get() != 0));
        if intent == Intent::Modify {
            cpu.wait_until(cpu.stored.get(), Spent::Lines);
        }
        if self.seeded && self.random().is_multiple_of(DELAYED) {
            cpu.spend(self.random() % DELAY, Spent::Waiting);
            self.pause(cpu);
        }
        // Where its lines begin does not depend on the host's address, so each granule is asked for its line.
        let mut last = None;
        let end = address + bytes.max(1);
        let mut address = address;
        while address < end {
            let line = self.access_line(cpu, address, intent, at, last);
            if last != Some(line) && cpu.rate.get() != 0 {
                self.log.used(self.running.get(), line, intent, at);
            }
            last = Some(line);
            address = (address / GRANULE + 1) * GRANULE;
        }
    }

    /// The running CPU has done an operation that began at `begin`.
    pub(crate) fn completed(&self, operation: Operation, begin: Time) {
        if let Some(cpu) = self.clock().filter(|cpu| !cpu.aside.get()) {
            self.log.took(operation, cpu.now.get() - begin);
        }
    }

    /// Accesses the line of `address`, if it is not the `last`.
    fn access_line(
        &self,
        cpu: &Clock,
        address: usize,
        intent: Intent,
        at: &'static Location<'static>,
        last: Option<LineId>,
    ) -> LineId {
        let number = self.running.get();
        loop {
            let mut lines = self.lines.borrow_mut();
            let id = lines.find(&self.costs, address, number);
            if last == Some(id) {
                return id;
            }
            let fetched = cpu.fetched.get();
            if let Some(hit) = lines.hit(&self.costs, id, number, fetched, intent) {
                cpu.spend(hit, Spent::Lines);
                return id;
            }
            if self.soonest.get() < cpu.now.get() {
                drop(lines);
                self.pause(cpu);
                continue;
            }
            self.came(cpu, 1);
            let now = cpu.now.get();
            let moved = lines.fetch(&self.costs, id, number, (fetched + 1, now), intent);
            let done = moved.begin + moved.takes;
            cpu.note(|accounts| {
                accounts.fetches += u64::from(!moved.from_cpu);
                accounts.transfers += u64::from(moved.from_cpu);
            });
            if intent == Intent::Store {
                // It waits in the store buffer, behind earlier ones.
                cpu.stored.set(cpu.stored.get().max(done));
                cpu.spend(self.costs.own, Spent::Lines);
            } else {
                cpu.wait_until(done, Spent::Lines);
            }
            if moved.from_cpu && !cpu.aside.get() {
                lines.waited(id, at, done - now);
            }
            return id;
        }
    }

    /// The places that CPUs waited at for lines of other CPUs, the hottest first.
    pub(crate) fn lines(&self) -> core::cell::RefMut<'_, Lines> {
        self.lines.borrow_mut()
    }

    // What the machine does

    /// So many lines came to a CPU.
    fn came(&self, cpu: &Clock, lines: u64) {
        cpu.fetched.set(cpu.fetched.get() + lines);
        self.fetched.set(self.fetched.get() + lines);
    }

    /// When the running CPU does what it does now, in lines.
    pub(crate) fn moment(&self) -> Option<Moment> {
        let lines = self.clock()?.fetched.get();
        Some(Moment { cpu: self.running.get(), lines, all_lines: self.fetched.get() })
    }

    /// The running CPU writes `bytes` bytes, or reads and writes them. So many as are `through` pass the memory of `socket`; the others
    /// are in caches.
    pub(crate) fn move_bytes(&self, socket: usize, takes: Time, bytes: u64, through: u64) {
        let Some(cpu) = self.clock() else { return };
        let memory = &self.memory[socket];
        if self.soonest.get() < cpu.now.get() {
            self.pause(cpu);
        }
        if through > 0 {
            let time = self.costs.page_through_memory * through / PAGE_SIZE;
            memory.set(memory.get().max(cpu.now.get()) + time);
        }
        let until = memory.get();
        cpu.spend(takes, Spent::Pages);
        if through > 0 {
            cpu.wait_until(until, Spent::Pages);
        }
        // The bytes' lines push others out of the caches.
        self.came(cpu, bytes / LINE as u64);
    }

    /// The running CPU looks again. It takes interrupts meanwhile: what they ask for is in memory, where it looks.
    pub(crate) fn look_again(&self) {
        self.take_in_wait();
        self.look_after(self.costs.pause);
    }

    /// A program on the running CPU looks again, having looked for `looks` times: the more often, the later. An interrupt comes in between.
    pub(crate) fn rest(&self, looks: u32) {
        let Some(cpu) = self.clock() else { return };
        let pauses = Time::from(looks / 4).clamp(1, PAUSES);
        let interrupted = cpu.interrupted.get().saturating_sub(cpu.now.get());
        self.look_after((self.costs.pause * pauses).min(interrupted.max(self.costs.pause)));
    }

    fn look_after(&self, time: Time) {
        let Some(cpu) = self.clock() else { return };
        cpu.spend(time, Spent::Waiting);
        if self.soonest.get() < cpu.now.get() {
            return self.pause(cpu);
        }
        cpu.looks.set(cpu.looks.get() + 1);
        if cpu.looks.get() > PATIENCE && self.ready.borrow().is_empty() {
            self.stuck();
        }
    }

    /// The running CPU parks.
    pub(crate) fn park(&self) {
        let Some(cpu) = self.clock() else { return };
        if self.soonest.get() < cpu.now.get() {
            self.pause(cpu);
        }
        if !cpu.permit.replace(false) && !self.take_in_wait() {
            cpu.spend(self.costs.park, Spent::Waiting);
            if !cpu.permit.replace(false) {
                let until = cpu.interrupted.get();
                if until == NEVER {
                    cpu.parked.set(true);
                } else {
                    cpu.wait_until(until, Spent::Waiting);
                }
                let before = cpu.now.get();
                self.pause(cpu);
                // Whoever woke it has set its clock.
                let waited = cpu.now.get() - before;
                cpu.note(|accounts| accounts.spent[Spent::Waiting as usize] += waited);
                self.take_in_wait();
            }
            cpu.permit.set(false);
        }
    }

    /// The running CPU waits until all of the meeting's crew are there, and does `meanwhile` when it is interrupted. They go on from one
    /// moment.
    pub(crate) fn meet(&self, meeting: &Meeting, meanwhile: impl Fn()) {
        let Some(cpu) = self.clock() else { return };
        let times = meeting.times.get();
        let all = {
            let mut here = meeting.here.borrow_mut();
            here.push(self.running.get());
            here.len() == meeting.crew
        };
        if all {
            meeting.times.set(times + 1);
            let here = meeting.here.take();
            let clocks = || here.iter().map(|number| &self.cpus[usize::from(*number)]);
            let at = clocks().map(|cpu| cpu.now.get()).max().unwrap_or(0);
            clocks().for_each(|cpu| cpu.now.set(at));
            here.iter().for_each(|number| self.rouse(*number, at));
        }
        while meeting.times.get() == times {
            match cpu.interrupted.get() {
                NEVER => cpu.parked.set(true),
                // One is on its way, and nobody else rouses it.
                until => cpu.wait_until(until, Spent::Waiting),
            }
            self.pause(cpu);
            meanwhile();
        }
    }

    fn rouse(&self, number: u16, at: Time) {
        let cpu = &self.cpus[usize::from(number)];
        if cpu.parked.replace(false) {
            cpu.now.set(cpu.now.get().max(at));
            self.make_ready(number);
        }
    }

    /// The running CPU wakes another.
    pub(crate) fn wake(&self, number: u16) {
        self.spend(self.costs.wake, Spent::Waiting);
        self.cpus[usize::from(number)].permit.set(true);
        self.rouse(number, self.now() + self.costs.woken);
    }

    /// The running CPU interrupts another.
    pub(crate) fn interrupt(&self, number: u16) {
        self.spend(self.costs.send, Spent::Flushes);
        if let Some(cpu) = self.clock() {
            cpu.note(|accounts| accounts.interrupts += 1);
        }
        let target = &self.cpus[usize::from(number)];
        let at = self.now() + self.costs.deliver;
        target.interrupted.set(target.interrupted.get().min(at));
        self.rouse(number, at);
    }

    /// Whether the running CPU is to take an interrupt now, or has taken one in a wait: then it is to serve what was asked for.
    pub(crate) fn take_interrupt(&self) -> bool {
        let Some(cpu) = self.clock() else { return false };
        let unserved = cpu.unserved.replace(false);
        self.take(cpu) || unserved
    }

    /// The running CPU, which waits inside the subsystem, takes an interrupt if it is to. The wait serves what was asked for if it goes on,
    /// and else the program does.
    fn take_in_wait(&self) -> bool {
        let Some(cpu) = self.clock() else { return false };
        let taken = self.take(cpu);
        cpu.unserved.set(cpu.unserved.get() || taken);
        taken
    }

    fn take(&self, cpu: &Clock) -> bool {
        let taken = cpu.interrupted.get() <= cpu.now.get();
        if taken {
            cpu.interrupted.set(NEVER);
            cpu.spend(self.costs.handle, Spent::Flushes);
        }
        taken
    }
}
