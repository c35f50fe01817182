//! The scheduler: when and on which CPU each thread runs.
//!
//! Each CPU has a FIFO run queue, and takes threads from the other queues when its own is empty. A
//! CPU without a thread idles in the kernel's own page tables, so that no flush interrupts the CPU.
//! Threads are preempted in user mode only, by the tick.
//!
//! *Sleep and wake-up.* A thread that is about to wait is `BLOCKED` from [`block`] on, while it
//! checks whether it has to wait. [`wake`] makes the thread `RUNNABLE` and queues it at once,
//! although its CPU may still use its stack; the CPU that takes the thread from the queue waits
//! until `on_cpu` is clear. Only the change of the state from `BLOCKED` queues, so a thread is in
//! at most one queue, once.
//!
//! *Switching.* The switch from a thread is completed by the next code on this CPU, on another
//! stack: this code clears `on_cpu`, and drops the reference to an ended thread. Only the idle
//! loop, after its own switch is complete, waits until another CPU has left a stack. Otherwise two
//! CPUs could deadlock, each on the stack of the thread that the other CPU waits for.
//!
//! *Attention.* To make a thread act, a CPU first stores the request, and then checks whether the
//! thread is on a CPU; a switch first puts the thread on the CPU, and then makes it check for
//! requests. So either the CPU is interrupted, or the thread sees the request by itself.

use super::thread::{BLOCKED, ENDED, RUNNABLE, Thread, current, try_current};
use super::wait_queue::Wake;
use crate::time::{self, CpuTime, Times};
use core::cell::{Cell, UnsafeCell};
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use faultless::CpuId;
use faultless::ZEROED_RUN;
use faultless::locks::Padded;
use faultless::locks::until;
use faultless_bare::arch::{apic, clock};
use faultless_bare::heap::FailNth;
use faultless_bare::percpu;
use faultless_bare::sync::Mutex;
use faultless_bare::task::context::{self, Context};
use faultless_bare::task::set_current;
use faultless_bare::{arch, machine};
use faultless_collections::{Arc, Chain, Link, Linked, Vec};

/// The run queues, as a kind of [chains](Chain).
#[derive(Debug)]
pub struct Ready;

// SAFETY: the field has no other use.
unsafe impl Linked<Ready> for Thread {
    fn link(&self) -> &Link<Self> {
        &self.ready
    }
}

/// The scheduler's per-CPU data. All CPUs use `ready` and the atomics; only the CPU itself uses the
/// cells.
struct Local {
    ready: Mutex<Chain<Thread, Ready>>,
    /// The length of `ready`, for readers without the lock.
    length: AtomicU32,
    /// Set while the CPU is idle. The CPU that clears this flag sends the interrupt.
    idle: AtomicBool,
    /// The running thread's time slice is over.
    turn_over: AtomicBool,
    /// A time slice has ended since the running thread last returned to user mode.
    slice_ended: AtomicBool,
    /// The time spent in threads.
    busy: CpuTime,
    running: Cell<Option<Arc<Thread>>>,
    /// The thread that ran before the current switch.
    previous: Cell<Option<Arc<Thread>>>,
    /// The idle loop, while a thread runs.
    idle_context: UnsafeCell<Context>,
}

/// The data of all CPUs, made at boot.
struct Locals(UnsafeCell<Vec<Padded<Local>>>);

// SAFETY: written once, by `init`, before the other CPUs start; only the CPU itself uses the cells
// of its entry.
unsafe impl Sync for Locals {}

static LOCALS: Locals = Locals(UnsafeCell::new(Vec::new()));
/// Context switches since boot, for `/proc/stat`.
pub static SWITCHES: AtomicU64 = AtomicU64::new(0);

fn locals() -> &'static [Padded<Local>] {
    // SAFETY: written before the first read.
    unsafe { &*LOCALS.0.get() }
}

fn local() -> &'static Local {
    &locals()[percpu::id().index()]
}

/// Makes the queues.
///
/// # Safety
/// Called once, by the boot CPU, before the others start and before anything else here.
pub unsafe fn init(cpus: usize) {
    let local = |_| {
        Padded(Local {
            ready: Mutex::default(),
            length: AtomicU32::new(0),
            idle: AtomicBool::new(false),
            turn_over: AtomicBool::new(false),
            slice_ended: AtomicBool::new(false),
            busy: CpuTime::default(),
            running: Cell::new(None),
            previous: Cell::new(None),
            idle_context: UnsafeCell::new(Context::default()),
        })
    };
    let all = Vec::try_from_iter((0..cpus).map(local)).expect("the heap is empty yet");
    // SAFETY: by the contract, there is no concurrent access.
    unsafe { *LOCALS.0.get() = all };
}

/// Runs the idle loop of a CPU, from the end of its start.
pub fn idle_loop() -> ! {
    let own = local();
    let mut drained = false;
    loop {
        finish_switch();
        if !drained && DRAIN.load(Ordering::SeqCst) {
            drained = true;
            percpu::cpu().drain();
            DRAINED.fetch_add(1, Ordering::SeqCst);
        }
        if let Some(next) = next() {
            // The previous CPU may still be on the stack of this thread.
            until(percpu::cpu(), || !next.on_cpu.load(Ordering::Acquire));
            time::begin_turn();
            switch_to(Some(next));
            continue;
        }
        // Either a CPU that queues a thread now sees this CPU idle and interrupts it, or this CPU
        // sees the thread.
        own.idle.store(true, Ordering::SeqCst);
        if !could_run_something() && (drained || !DRAIN.load(Ordering::SeqCst)) {
            // The audit requires that no frames are zeroed in advance.
            if !drained && percpu::cpu().zero_ahead(ZEROED_RUN) != 0 {
                arch::serve_interrupts();
            } else {
                time::before_idle();
                arch::idle();
            }
        }
        own.idle.store(false, Ordering::Relaxed);
    }
}

/// The number of CPUs that have returned their cached frames after [`DRAIN`] was set.
static DRAINED: AtomicUsize = AtomicUsize::new(0);
static DRAIN: AtomicBool = AtomicBool::new(false);

/// Makes every CPU return its cached frames, for the audit. Called once, by the last thread.
pub(super) fn drain_all() {
    DRAIN.store(true, Ordering::SeqCst);
    let here = percpu::id();
    let all = locals().len();
    (0..all as u16)
        .map(CpuId)
        .filter(|&cpu| cpu != here)
        .for_each(|cpu| apic::interrupt(cpu, apic::Vector::Reschedule));
    until(percpu::cpu(), || DRAINED.load(Ordering::SeqCst) == all - 1);
    percpu::cpu().drain();
}

/// Queues a new thread.
pub fn start(thread: Arc<Thread>) {
    enqueue(thread);
}

/// Marks the running thread as about to wait; from this point [`wake`] has an effect.
pub(super) fn block() {
    current().state.store(BLOCKED, Ordering::SeqCst);
}

/// Undoes [`block`]: the thread need not wait.
pub(super) fn unblock() {
    let thread = current();
    let taken =
        thread.state.compare_exchange(BLOCKED, RUNNABLE, Ordering::SeqCst, Ordering::SeqCst);
    if taken.is_err() {
        // A wake-up has queued the thread, which continues from the queue.
        leave();
    }
}

/// Gives the CPU away until the running thread, which is [blocked](block), is woken.
pub(super) fn sleep() {
    current().switches[0].fetch_add(1, Ordering::Relaxed);
    leave();
}

/// Makes `thread` runnable if it waits.
pub fn wake(thread: &Arc<Thread>) {
    // Sequentially consistent with `block`, and with the condition accessed by waiter and waker.
    let woken =
        thread.state.compare_exchange(BLOCKED, RUNNABLE, Ordering::SeqCst, Ordering::SeqCst);
    if woken.is_ok() {
        enqueue(thread.clone());
    }
}

impl Wake for Thread {
    fn wake(this: &Arc<Self>) {
        wake(this);
    }
}

/// Makes the CPU that runs `thread`, if any, check for requests to the thread.
pub fn notify(thread: &Thread) {
    if thread.on_cpu.load(Ordering::SeqCst) {
        interrupt(thread.last_cpu());
    }
}

/// Gives the CPU to the next ready thread, and continues in turn.
pub fn yield_now() {
    let thread = current();
    if local().length.load(Ordering::Relaxed) == 0 && allowed(&thread, percpu::id()) {
        return;
    }
    thread.switches[1].fetch_add(1, Ordering::Relaxed);
    enqueue(thread.arc());
    leave();
}

/// Yields the CPU if the running thread's time slice is over, or if its affinity excludes this CPU.
pub(super) fn give_way() {
    if local().turn_over.swap(false, Ordering::Relaxed) || !allowed(&current(), percpu::id()) {
        yield_now();
    }
}

/// Ends the running thread.
pub(super) fn end() -> ! {
    current().state.store(ENDED, Ordering::Release);
    leave();
    unreachable!("an ended thread ran again")
}

/// Runs the present space of the running thread's process on this CPU.
pub(super) fn run_memory() {
    run_space_of(&current());
}

/// The timer interrupt: ends the time slice if another thread waits.
pub(super) fn tick() {
    let own = local();
    if own.length.load(Ordering::Relaxed) != 0 {
        own.turn_over.store(true, Ordering::Relaxed);
        percpu::this().attention.store(true, Ordering::Relaxed);
    }
}

/// Accounts for the end of a time slice, with `thread` running on this CPU: from now on its time is
/// counted as the kernel's, or as the program's.
pub fn sample(thread: &Thread, kernel: bool) {
    thread.cpu_time.sample(kernel);
    let own = local();
    own.busy.sample(kernel);
    thread.process.text.ran(time::TURN);
    own.slice_ended.store(true, Ordering::Relaxed);
    percpu::this().attention.store(true, Ordering::Relaxed);
}

/// Returns whether a time slice has ended on this CPU since the last call.
pub(super) fn take_slice_end() -> bool {
    local().slice_ended.swap(false, Ordering::Relaxed)
}

/// Returns the time that a CPU has spent in threads.
pub fn busy(cpu: CpuId) -> Times {
    locals()[cpu.index()].busy.times()
}

/// Returns the number of running and ready threads.
pub fn runnable() -> usize {
    let count = |local: &Padded<Local>| {
        local.length.load(Ordering::Relaxed) as usize
            + usize::from(!local.idle.load(Ordering::Relaxed))
    };
    locals().iter().map(count).sum()
}

fn allowed(thread: &Thread, cpu: CpuId) -> bool {
    thread.affinity.load(Ordering::Relaxed) & (1 << cpu.0) != 0
}

fn interrupt(cpu: CpuId) {
    if cpu == percpu::id() {
        percpu::this().attention.store(true, Ordering::Relaxed);
    } else {
        apic::interrupt(cpu, apic::Vector::Reschedule);
    }
}

/// Queues a runnable thread on its last CPU, or on an idle CPU.
fn enqueue(thread: Arc<Thread>) {
    let last = thread.last_cpu();
    let cpus = || (0..locals().len() as u16).map(CpuId).filter(|&cpu| allowed(&thread, cpu));
    // Claims an idle CPU, so that the next thread goes to another CPU.
    let claim = |cpu: CpuId| {
        let idle = &locals()[cpu.index()].idle;
        idle.load(Ordering::SeqCst)
            && idle.compare_exchange(true, false, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    };
    let claimed = if allowed(&thread, last) && claim(last) {
        Some(last)
    } else {
        cpus().find(|&cpu| claim(cpu))
    };
    let target = claimed.unwrap_or_else(|| {
        if allowed(&thread, last) {
            last
        } else {
            let length = |cpu: &CpuId| locals()[cpu.index()].length.load(Ordering::Relaxed);
            // Every affinity contains an existing CPU.
            cpus().min_by_key(length).unwrap_or(last)
        }
    });
    let affinity = thread.affinity.load(Ordering::Relaxed);
    let local = &locals()[target.index()];
    {
        let mut ready = local.ready.lock();
        let queued = ready.push(thread);
        debug_assert!(queued, "a thread is in two queues");
        local.length.store(ready.len() as u32, Ordering::SeqCst);
    }
    // A CPU that became idle in between may not have seen the thread.
    let idle = |cpu: &CpuId| {
        affinity & (1 << cpu.0) != 0 && locals()[cpu.index()].idle.swap(false, Ordering::SeqCst)
    };
    let wakes = claimed.or_else(|| (0..locals().len() as u16).map(CpuId).find(|cpu| idle(cpu)));
    if let Some(cpu) = wakes.filter(|&cpu| cpu != percpu::id()) {
        apic::interrupt(cpu, apic::Vector::Reschedule);
    }
}

/// Returns whether any queue contains a thread that may run here.
fn could_run_something() -> bool {
    let here = percpu::id();
    locals().iter().any(|local| {
        local.length.load(Ordering::SeqCst) != 0
            && local.ready.lock().iter().any(|thread| allowed(thread, here))
    })
}

/// Returns the thread to run next here, from this CPU's queue or another. In a call by a thread,
/// skips threads with a stack in use by another CPU.
fn next() -> Option<Arc<Thread>> {
    let here = percpu::id();
    let current = try_current();
    let fits = |thread: &Arc<Thread>| {
        allowed(thread, here)
            && (current.as_ref().is_none_or(|current| current.is(thread))
                || !thread.on_cpu.load(Ordering::Acquire))
    };
    let cpus = locals().len();
    (0..cpus).find_map(|step| {
        let local = &locals()[(here.index() + step) % cpus];
        if local.length.load(Ordering::SeqCst) == 0 {
            return None;
        }
        let mut ready = local.ready.lock();
        let thread = ready.take(fits)?;
        local.length.store(ready.len() as u32, Ordering::SeqCst);
        Some(thread)
    })
}

/// Switches from the running thread, which is queued, waits, or has ended, to another thread or to
/// the idle loop.
fn leave() {
    switch_to(next());
    finish_switch();
}

fn switch_to(next: Option<Arc<Thread>>) {
    let here = percpu::this();
    let own = local();
    let now = clock::now();
    let previous = own.running.take();
    if let (Some(previous), Some(next)) = (&previous, &next)
        && Arc::ptr_eq(previous, next)
    {
        // Queued, and chosen again at once.
        own.running.set(Some(next.clone()));
        return;
    }
    SWITCHES.fetch_add(1, Ordering::Relaxed);
    let from = match &previous {
        Some(thread) => {
            let registers = &thread.task.registers;
            // SAFETY: this CPU runs the thread, and has its registers.
            unsafe { registers.save() };
            if time::samples_switch(now) {
                sample(thread, true);
            }
            thread.cpu_time.stop(now);
            thread.fail_nth.set(FailNth::default().set());
            registers.context.get()
        }
        None => {
            own.busy.start(now);
            own.idle_context.get()
        }
    };
    let to = match &next {
        Some(thread) => {
            // A CPU that sees `on_cpu` must also see this store.
            thread.last_cpu.store(percpu::id().0, Ordering::Relaxed);
            thread.on_cpu.store(true, Ordering::SeqCst);
            thread.cpu_time.start(now);
            thread.fail_nth.get().set();
            let registers = &thread.task.registers;
            // SAFETY: no other CPU runs the thread: `on_cpu` was clear when it came out of a queue.
            unsafe { registers.load() };
            context::set_kernel_stack(thread.task.stack.top());
            run_space_of(thread);
            // A new thread goes straight to user mode, and completes the switch on its way; an old
            // thread must check for requests made since it last ran.
            own.turn_over.store(false, Ordering::Relaxed);
            here.attention.store(true, Ordering::Relaxed);
            registers.context.get().cast_const()
        }
        None => {
            own.busy.stop(now);
            machine::run_none();
            // The stack may be freed before the next is set.
            context::set_kernel_stack(0);
            own.idle_context.get().cast_const()
        }
    };
    // SAFETY: this CPU drops its reference to the thread only when another thread runs.
    unsafe { set_current(here, next.as_ref().map_or(ptr::null(), Thread::task_of)) };
    own.running.set(next);
    own.previous.set(previous);
    // SAFETY: `from` is the context of the running code. No other CPU runs `to`, which is the idle
    // loop of this CPU, or a thread whose `on_cpu` was clear.
    unsafe { context::switch(from, to) };
}

fn run_space_of(thread: &Thread) {
    let space = thread.process.memory.space();
    if percpu::this().space.get() != space {
        // SAFETY: the process has threads, so its memory with the space exists until the memory is
        // replaced, by the process's own thread, which runs another space first.
        match unsafe { space.as_ref() } {
            // SAFETY: as above: this CPU then runs another space.
            Some(space) => unsafe { machine::run(space) },
            None => machine::run_none(),
        }
    }
}

/// Completes the switch to the running code.
pub(super) fn finish_switch() {
    if let Some(previous) = local().previous.take() {
        previous.on_cpu.store(false, Ordering::Release);
    }
}
