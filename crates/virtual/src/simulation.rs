//! The simulation: CPUs as coroutines, each with its own clock, on one thread of the host.
//!
//! A CPU runs until its next action is visible to other CPUs: an access to a cache line of another
//! holder, another iteration of a wait loop, parking, or taking an interrupt. If another CPU is
//! behind in time at this point, the other CPU runs first. Lines therefore move in the order of
//! simulated time, and each access is executed atomically at its turn, so every result of the
//! subsystem is possible on real CPUs. Accesses to lines held by the CPU need no turn, because they
//! are invisible to other CPUs.
//!
//! Between two accesses a CPU executes instructions: [`Rates`](crate::rates::Rates) gives their
//! number, for each kind of operation.
//!
//! With a *seed* other than 0, CPUs are delayed at random and CPUs with equal times run in random
//! order: each seed is another schedule, and the same seed gives the same schedule.
//!
//! Preparation and checks of a program are *off the books*: their time passes without being
//! accounted, and their waits for lines add no heat.
//!
//! *Invariant (one thread):* only the thread that called [`Simulation::run`] uses a `Simulation`
//! during the run: through [`CURRENT`], which is thread-local, or by code in its coroutines.

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

/// Bytes of a CPU's stack. The subsystem's calls are deep in builds without optimisation.
const STACK: usize = 256 << 10;
/// The time by which a program may run ahead of the slowest CPU without a check for interrupts: 0.2
/// µs.
const AHEAD: Time = 200_000;
/// The number of accesses per delayed access under a seed.
const DELAYED: u64 = 16;
/// The longest such delay: 1 µs.
const DELAY: u64 = 1_000_000;
/// The largest number of pauses between two checks of a waiting program.
const PAUSES: Time = 32;
/// The number of checks of a waiting CPU without any other runnable CPU after which the simulation
/// is stuck.
const PATIENCE: u32 = 1 << 20;

/// The simulated state of a CPU.
struct Clock {
    now: Cell<Time>,
    /// The time of the instructions between two accesses.
    rate: Cell<Time>,
    /// The time at which its store buffer is empty.
    stored: Cell<Time>,
    /// Lines transferred to the CPU.
    fetched: Cell<u64>,
    /// The time from which an interrupt is pending.
    interrupted: Cell<Time>,
    /// The CPU has taken an interrupt in a wait, which may have ended before its request was
    /// served.
    unserved: Cell<bool>,
    parked: Cell<bool>,
    permit: Cell<bool>,
    /// Checks since another CPU last ran.
    looks: Cell<u32>,
    yielder: Cell<*const Yielder<(), ()>>,
    accounts: Cell<Accounts>,
    /// Whether current work is excluded from the accounts.
    aside: Cell<bool>,
    /// The stack, kept between runs to preserve the cache lines of data on the stack.
    stack: Cell<Option<DefaultStack>>,
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Clock({} ps)", self.now.get())
    }
}

/// A meeting at which CPUs of a run wait for each other, and continue at the same time.
#[derive(Debug)]
pub struct Meeting {
    crew: usize,
    /// The waiting CPUs.
    here: RefCell<Vec<u16>>,
    /// The number of completed meetings.
    times: Cell<usize>,
}

impl Meeting {
    /// Creates a meeting of `crew` CPUs.
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

    /// Updates the accounts, unless the CPU is off the books.
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
    /// The simulation run by this thread.
    static CURRENT: Cell<*const Simulation> = const { Cell::new(ptr::null()) };
}

/// The callbacks of the subsystem's atomics.
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

/// Runs `what` with `simulation` as the current one, or with none.
fn with_current<R>(simulation: *const Simulation, what: impl FnOnce() -> R) -> R {
    struct Restore(*const Simulation);
    impl Drop for Restore {
        fn drop(&mut self) {
            CURRENT.set(self.0);
        }
    }
    let _restore = Restore(CURRENT.replace(simulation));
    what()
}

fn current<'a>() -> Option<&'a Simulation> {
    // SAFETY: the current simulation is alive: `enter` sets the pointer, and resets it before the
    // simulation's borrow ends.
    unsafe { CURRENT.get().as_ref() }
}

/// CPUs, cache lines and time.
#[derive(Debug)]
pub(crate) struct Simulation {
    pub(crate) costs: Costs,
    cpus: Box<[Clock]>,
    lines: RefCell<Lines>,
    pub(crate) log: Log,
    /// Runnable CPUs: time, order among CPUs with the same time, number.
    ready: RefCell<BinaryHeap<Reverse<(Time, u64, u16)>>>,
    /// The time of the first runnable CPU.
    soonest: Cell<Time>,
    running: Cell<u16>,
    /// The time at which the memory of each socket is free again.
    memory: Box<[Cell<Time>]>,
    /// Lines transferred to all CPUs.
    fetched: Cell<u64>,
    random: Cell<u64>,
    seeded: bool,
    turns: Cell<u64>,
    /// Whether waits for lines and times of operations are recorded.
    recording: Cell<bool>,
}

impl Simulation {
    pub(crate) fn new(profile: &Profile, cpus: usize, seed: u64) -> Self {
        let costs = Costs::new(profile);
        let sockets = cpus.div_ceil(costs.per_socket);
        // SAFETY: the watch does not call the subsystem, and only switches stacks between CPUs.
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
            // Not 0, which is a fixed point of xorshift.
            random: Cell::new(seed ^ 0x9e37_79b9_7f4a_7c15),
            seeded: seed != 0,
            turns: Cell::new(0),
            recording: Cell::new(true),
        }
    }

    /// Runs `what` with this simulation as the current one, which receives the accesses.
    pub(crate) fn enter<R>(&self, what: impl FnOnce() -> R) -> R {
        with_current(self, what)
    }

    /// Runs `what` without a current simulation: its accesses take no time and move no line.
    pub(crate) fn unobserved<R>(&self, what: impl FnOnce() -> R) -> R {
        with_current(ptr::null(), what)
    }

    /// Sets whether waits for lines and times of operations are recorded.
    pub(crate) fn set_recording(&self, recording: bool) {
        self.recording.set(recording);
    }

    /// Returns the number of sockets.
    pub(crate) fn sockets(&self) -> usize {
        self.memory.len()
    }

    /// Returns the socket of a CPU.
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

    /// Returns whether a CPU runs.
    pub(crate) fn is_running(&self) -> bool {
        self.clock().is_some()
    }

    /// Returns the running CPU's time, or 0.
    pub(crate) fn now(&self) -> Time {
        self.clock().map_or(0, |cpu| cpu.now.get())
    }

    pub(crate) fn accounts(&self, cpu: usize) -> Accounts {
        self.cpus[cpu].accounts.get()
    }

    /// Spends time on the running CPU.
    pub(crate) fn spend(&self, time: Time, on: Spent) {
        if let Some(cpu) = self.clock() {
            cpu.spend(time, on);
        }
    }

    /// Sets whether work of the running CPU is excluded from the accounts. Returns the earlier
    /// setting.
    pub(crate) fn set_aside(&self, aside: bool) -> bool {
        self.clock().is_some_and(|cpu| cpu.aside.replace(aside))
    }

    /// Starts an operation on the running CPU, whose instructions take `rate` between two accesses.
    /// Returns the earlier rate.
    pub(crate) fn execute(&self, rate: Time) -> Time {
        self.clock().map_or(0, |cpu| cpu.rate.replace(rate))
    }

    // Running

    /// Runs `bodies`, each as one CPU, the first as CPU 0, all from the same time on, and returns
    /// their results.
    ///
    /// # Panics
    /// If all CPUs wait for each other, or a body panics.
    pub(crate) fn run<'a, R: 'a>(&'a self, bodies: Vec<Box<dyn FnOnce() -> R + 'a>>) -> Vec<R> {
        assert!(bodies.len() <= self.cpus.len(), "more bodies than CPUs");
        assert!(self.running.get() == NOBODY, "a simulation inside itself");
        let begin = self.cpus.iter().map(|cpu| cpu.now.get()).max().unwrap_or(0);
        let mut results: Vec<Option<R>> = bodies.iter().map(|_| None).collect();
        // After a panic of one body, the remaining bodies stay suspended permanently, because
        // unwinding is impossible in the middle of a call.
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
            // SAFETY: the borrows of the body live for `'a`, longer than this call. Afterwards the
            // coroutine has returned, or is neither resumed nor dropped.
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
        results.into_iter().map(|result| result.expect("a result of each body")).collect()
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
        panic!("deadlock: {parked} CPUs are parked, and no other CPU can wake them");
    }

    /// Runs the CPUs behind the running CPU.
    fn pause(&self, cpu: &Clock) {
        cpu.looks.set(0);
        // SAFETY: the running CPU's coroutine has set the pointer, and is suspended only here (one
        // thread).
        unsafe { &*cpu.yielder.get() }.suspend(());
    }

    /// Runs CPUs that are behind by more than a little. Called by programs between two of their
    /// instructions.
    pub(crate) fn keep_pace(&self) {
        if let Some(cpu) = self.clock()
            && cpu.now.get() > self.soonest.get().saturating_add(AHEAD)
        {
            self.pause(cpu);
        }
    }

    // Accesses

    /// Names the contents of `value`.
    pub(crate) fn made_one<T>(&self, value: &T, what: &'static str) {
        self.made(core::ptr::from_ref(value).addr(), size_of::<T>(), what);
    }

    /// Names the contents of `bytes` bytes at `address`, which are aligned to lines.
    pub(crate) fn name(&self, address: usize, bytes: usize, what: &'static str) {
        self.lines.borrow_mut().name(address, bytes, what);
    }

    fn made(&self, address: usize, bytes: usize, what: &'static str) {
        self.spend(self.costs.allocate, Spent::Instructions);
        let cpu = self.clock().map(|cpu| (self.running.get(), cpu.fetched.get()));
        self.lines.borrow_mut().made(&self.costs, address, bytes, what, cpu);
    }

    /// Handles an access of the running CPU to memory of the subsystem, before the access.
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
        // The start of its lines does not depend on the host's address, so the line of each granule
        // is looked up.
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

    /// Records an operation of the running CPU that began at `begin`.
    pub(crate) fn completed(&self, operation: Operation, begin: Time) {
        if let Some(cpu) = self.clock().filter(|cpu| !cpu.aside.get() && self.recording.get()) {
            self.log.took(operation, cpu.now.get() - begin);
        }
    }

    /// Accesses the line of `address`, unless it is the `last`.
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
                // The store waits in the store buffer, behind earlier stores.
                cpu.stored.set(cpu.stored.get().max(done));
                cpu.spend(self.costs.own, Spent::Lines);
            } else {
                cpu.wait_until(done, Spent::Lines);
            }
            if moved.from_cpu && !cpu.aside.get() && self.recording.get() {
                lines.waited(id, at, done - now);
            }
            return id;
        }
    }

    /// Returns the lines, with the places at which CPUs waited for lines of other CPUs.
    pub(crate) fn lines(&self) -> core::cell::RefMut<'_, Lines> {
        self.lines.borrow_mut()
    }

    // Operations of the machine

    /// Counts lines transferred to a CPU.
    fn came(&self, cpu: &Clock, lines: u64) {
        cpu.fetched.set(cpu.fetched.get() + lines);
        self.fetched.set(self.fetched.get() + lines);
    }

    /// Returns the current time of the running CPU, in lines.
    pub(crate) fn moment(&self) -> Option<Moment> {
        let lines = self.clock()?.fetched.get();
        Some(Moment { cpu: self.running.get(), lines, all_lines: self.fetched.get() })
    }

    /// Charges writing, or reading and writing, `bytes` bytes on the running CPU. `through` of them
    /// pass the memory of `socket`; the others are in caches.
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
        // The lines of the moved bytes evict cached lines.
        self.came(cpu, bytes / LINE as u64);
    }

    /// Repeats a wait loop on the running CPU. The CPU takes interrupts during the wait; the wait
    /// loop finds their requests in memory.
    pub(crate) fn look_again(&self) {
        self.take_in_wait();
        self.look_after(self.costs.pause);
    }

    /// Waits in a program on the running CPU after `looks` checks. The wait grows with the number
    /// of checks. An interrupt ends it early.
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

    /// Parks the running CPU.
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
                // The waker has set the clock of this CPU.
                let waited = cpu.now.get() - before;
                cpu.note(|accounts| accounts.spent[Spent::Waiting as usize] += waited);
                self.take_in_wait();
            }
            cpu.permit.set(false);
        }
    }

    /// Waits on the running CPU until the meeting's whole crew has arrived, and calls `meanwhile`
    /// on an interrupt. All continue at the same time.
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
                // An interrupt is pending, without another wake-up.
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

    /// Wakes another CPU from the running CPU.
    pub(crate) fn wake(&self, number: u16) {
        self.spend(self.costs.wake, Spent::Waiting);
        self.cpus[usize::from(number)].permit.set(true);
        self.rouse(number, self.now() + self.costs.woken);
    }

    /// Interrupts another CPU from the running CPU.
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

    /// Returns whether the running CPU takes an interrupt now, or has taken one in a wait. The
    /// caller must then serve the request.
    pub(crate) fn take_interrupt(&self) -> bool {
        let Some(cpu) = self.clock() else { return false };
        let unserved = cpu.unserved.replace(false);
        self.take(cpu) || unserved
    }

    /// Takes a pending interrupt on the running CPU, which waits inside the subsystem. The wait
    /// serves the request if it continues; otherwise the program does.
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
