//! Processes: address spaces, and their threads.
//!
//! A thread runs guest code on a CPU claimed from the machine's pool. If all CPUs are taken, the
//! thread waits; it returns the CPU when its code ends. There may thus be more threads than CPUs,
//! but threads that wait for one another must get their CPUs together ([`Process::run_threads`]) or
//! wait inside [`NativeCpu::idle`].

use crate::cpu::{NativeCpu, Stop};
use crate::machine::{Config, ConfigError, NativeMachine};
use core::cell::Cell;
use core::fmt;
use faultless::Census;
use faultless::audit::{Discrepancy, audit_with};
use faultless::{Cpu, CpuId, Errno, Error, Object, Shared, Space, ThreadStreams, Vm};
use std::sync::{Condvar, Mutex, PoisonError};

thread_local! {
    /// Whether this thread is running guest code. If the thread waited for a second CPU then, no
    /// thread would serve requests for the first CPU.
    static ON_CPU: Cell<bool> = const { Cell::new(false) };
}

/// A machine with its subsystem, which contains processes.
pub struct Native {
    vm: Vm<NativeMachine>,
    free: Mutex<Vec<CpuId>>,
    freed: Condvar,
}

impl fmt::Debug for Native {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Native").field("vm", &self.vm).finish_non_exhaustive()
    }
}

impl Native {
    /// A machine, and the subsystem over it.
    ///
    /// # Errors
    /// A value of the configuration is out of range, or there is too little memory.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        let vm = Vm::new(NativeMachine::new(config)?)?;
        // The lowest number comes off the end first.
        let free = (0..config.cpus as u16).rev().map(CpuId).collect();
        Ok(Self { vm, free: Mutex::new(free), freed: Condvar::new() })
    }

    /// The subsystem: knobs, counters, trace points.
    #[inline]
    pub fn vm(&self) -> &Vm<NativeMachine> {
        &self.vm
    }

    /// The machine: TLB counters, violations.
    #[inline]
    pub fn machine(&self) -> &NativeMachine {
        self.vm.machine()
    }

    /// Creates a process without mappings. From guest code, use [`NativeCpu::process`].
    ///
    /// # Errors
    /// `ENOMEM` without a frame for its tables; `EAGAIN` on a thread that is running guest code.
    pub fn process(&self) -> Result<Process<'_>, Error> {
        let space = Space::new(&self.claim(Request::Process)?.cpu)?;
        Ok(Process::new(self, space))
    }

    /// Runs the audit of the subsystem (law 6), while no guest code runs on any CPU. `processes`
    /// must be complete, and must map each object that has pages: pages of other objects are not
    /// found.
    ///
    /// # Errors
    /// The first discrepancy.
    ///
    /// # Panics
    /// On a thread that is running guest code, for which the audit would wait.
    pub fn audit(&self, processes: &[&Process<'_>]) -> Result<Census, Discrepancy> {
        self.audit_with(processes, &[])
    }

    /// As [`audit`](Self::audit), with `objects`, which need not be mapped by any process.
    ///
    /// # Errors
    /// The first discrepancy.
    ///
    /// # Panics
    /// On a thread that is running guest code.
    pub fn audit_with(
        &self,
        processes: &[&Process<'_>],
        objects: &[&Shared<Object>],
    ) -> Result<Census, Discrepancy> {
        let everyone = self.claim_many(Request::Audit, self.machine_cpus());
        let everyone = everyone.expect("an audit waits for all guest code to end");
        everyone.iter().for_each(|claimed| claimed.cpu.drain());
        let spaces: Vec<_> = processes.iter().map(|process| process.space()).collect();
        audit_with(&everyone[0].cpu, &spaces, objects)
    }

    /// Does the background work of a CPU without guest code: zeroes up to about `budget` free
    /// frames ahead, into the pools allowed by the knob `zeroed_pool`. Returns the number of zeroed
    /// frames; 0 if there is no work, or if all CPUs are taken. A thread that calls this function
    /// repeatedly, and sleeps a little after a 0, is the machine's idle loop. A thread that needs
    /// the CPU waits until this function returns, so the budget should be small.
    pub fn zero_ahead(&self, budget: usize) -> usize {
        let taken = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let Some(id) = taken else { return 0 };
        // SAFETY: as in `claim_many`.
        let claimed = Claimed { cpu: unsafe { self.vm.cpu(id) }, _slot: Slot { native: self, id } };
        claimed.cpu.zero_ahead(budget)
    }

    fn machine_cpus(&self) -> usize {
        use faultless::Machine;
        self.machine().cpus()
    }

    /// A CPU for this thread, waiting until one is free.
    fn claim(&self, request: Request) -> Result<Claimed<'_>, Error> {
        let mut one = self.claim_many(request, 1)?;
        Ok(one.pop().expect("a machine has at least one CPU"))
    }

    /// `count` CPUs at once, waiting until as many are free.
    fn claim_many(&self, request: Request, count: usize) -> Result<Vec<Claimed<'_>>, Error> {
        if ON_CPU.get() {
            return Err(unavailable(request.in_guest_code(), Errno::EAGAIN));
        }
        if count > self.machine_cpus() {
            let operation =
                "run_threads with more threads than the machine has CPUs (Config::cpus)";
            return Err(unavailable(operation, Errno::EINVAL));
        }
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let enough = self.freed.wait_while(free, |free| free.len() < count);
        let mut free = enough.unwrap_or_else(PoisonError::into_inner);
        let rest = free.len() - count;
        let claim = |id| {
            // SAFETY: a number is in `free` unless a `Claimed` has it; it is below `cpus`; a thread
            // is not interrupted inside a call.
            let cpu = unsafe { self.vm.cpu(id) };
            Claimed { cpu, _slot: Slot { native: self, id } }
        };
        Ok(free.drain(rest..).rev().map(claim).collect())
    }
}

/// A request for CPUs.
#[derive(Clone, Copy)]
enum Request {
    Process,
    Audit,
    Run,
    RunThreads,
    Exit,
}

impl Request {
    /// Describes the request on a thread that already runs guest code.
    fn in_guest_code(self) -> &'static str {
        match self {
            Self::Process => "process inside guest code (use NativeCpu::process there)",
            Self::Audit => "audit inside guest code",
            Self::Run => "run inside guest code (use NativeCpu::switch there)",
            Self::RunThreads => "run_threads inside guest code",
            Self::Exit => "exit inside guest code",
        }
    }
}

fn unavailable(operation: &'static str, errno: Errno) -> Error {
    Error { operation, range: Error::NO_RANGE, errno }
}

/// A CPU out of the pool; returned to the pool when dropped.
pub(crate) struct Claimed<'n> {
    // Before the slot: the `Cpu` is dropped before its number is free again.
    pub(crate) cpu: Cpu<'n, NativeMachine>,
    _slot: Slot<'n>,
}

struct Slot<'n> {
    native: &'n Native,
    id: CpuId,
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        self.native.free.lock().unwrap_or_else(PoisonError::into_inner).push(self.id);
        self.native.freed.notify_all();
    }
}

/// Marks this thread as running guest code.
struct OnCpu;

impl OnCpu {
    fn enter() -> Self {
        ON_CPU.set(true);
        Self
    }
}

impl Drop for OnCpu {
    fn drop(&mut self) {
        ON_CPU.set(false);
    }
}

/// An address space and its threads, shared by reference among the threads.
///
/// Dropping the process ends the space: at once, or, on a thread that is running guest code, when
/// this code ends at the latest.
pub struct Process<'n> {
    // Before `end`: fields are dropped in this order.
    space: Space<NativeMachine>,
    end: End<'n>,
}

/// Ends the spaces of dropped processes when dropped, if this thread can claim a CPU.
struct End<'n>(&'n Native);

impl Drop for End<'_> {
    fn drop(&mut self) {
        if let Ok(claimed) = self.0.claim(Request::Exit) {
            claimed.cpu.end_dropped();
        }
    }
}

impl fmt::Debug for Process<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Process({:?})", self.space.id())
    }
}

impl<'n> Process<'n> {
    pub(crate) fn new(native: &'n Native, space: Space<NativeMachine>) -> Self {
        Self { space, end: End(native) }
    }

    /// The address space: maps, counters.
    #[inline]
    pub fn space(&self) -> &Space<NativeMachine> {
        &self.space
    }

    /// Returns the machine of the process.
    #[inline]
    pub fn native(&self) -> &'n Native {
        self.end.0
    }

    /// Ends the process on `cpu`, which this thread has.
    pub(crate) fn exit_on(self, cpu: &Cpu<'_, NativeMachine>) {
        self.space.exit(cpu);
    }

    /// Runs guest code on this thread, on a newly claimed CPU, and returns its result.
    ///
    /// The closure returns a `Result<R, Stop>`. Calls of the CPU (`mmap`, `munmap`) fail with an
    /// [`Error`], accesses (`load`, `store`) with a [`Signal`](crate::Signal); `?` converts both to
    /// a [`Stop`]. A closure that ends with a call's result therefore wraps it in `Ok(..?)`, which
    /// converts the error type, and a closure without a result ends with `Ok(())`.
    ///
    /// ```
    /// use faultless::{MapFlags, PAGE_SIZE, Prot};
    /// use faultless_native::{Config, Native, Stop};
    ///
    /// let native = Native::new(Config::default())?;
    /// let process = native.process()?;
    /// let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS;
    ///
    /// // A call's result, its `Error` made a `Stop`.
    /// let page = process.run(|cpu| Ok(cpu.mmap(None, PAGE_SIZE, Prot::READ | Prot::WRITE, flags)?))?;
    /// // An access's result.
    /// let word: u64 = process.run(|cpu| {
    ///     cpu.store(page, 7u64)?;
    ///     Ok(cpu.load(page)?)
    /// })?;
    /// assert_eq!(word, 7);
    /// // No result, and an access to an unmapped page.
    /// let stopped = process.run(|cpu| {
    ///     cpu.store(page + PAGE_SIZE, 7u64)?;
    ///     Ok(())
    /// });
    /// assert!(matches!(stopped, Err(Stop::Signal(_))));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The error of the guest code; `EAGAIN` on a thread that is already running guest code (there,
    /// use [`NativeCpu::switch`]).
    pub fn run<R>(
        &self,
        guest: impl FnOnce(&mut NativeCpu<'_, 'n>) -> Result<R, Stop>,
    ) -> Result<R, Stop> {
        self.run_as(&ThreadStreams::new(), whole_life(guest))
    }

    /// As [`run`](Self::run), for a thread that ran before and may run again: `thread` contains the
    /// predictions from its faults so far. When the thread ends, its guest code must call
    /// [`end_thread`](NativeCpu::end_thread).
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_as<R>(
        &self,
        thread: &ThreadStreams,
        guest: impl FnOnce(&mut NativeCpu<'_, 'n>) -> Result<R, Stop>,
    ) -> Result<R, Stop> {
        let claimed = self.native().claim(Request::Run)?;
        self.run_on(claimed, thread, guest)
    }

    fn run_on<R>(
        &self,
        claimed: Claimed<'n>,
        thread: &ThreadStreams,
        guest: impl FnOnce(&mut NativeCpu<'_, 'n>) -> Result<R, Stop>,
    ) -> Result<R, Stop> {
        let on_cpu = OnCpu::enter();
        let result = guest(&mut NativeCpu::enter(self, &claimed.cpu, thread));
        // Processes dropped by the guest code.
        claimed.cpu.end_dropped();
        drop((on_cpu, claimed));
        result
    }

    /// Runs guest code on `threads` threads at once, each on its own CPU and with its number as
    /// argument, and waits for all threads. Results are in the order of the numbers.
    ///
    /// # Errors
    /// The error of the first (by number) of the threads that failed; `EINVAL` if the machine has
    /// fewer CPUs than `threads`; `EAGAIN` if the host refuses a thread, or this thread already
    /// runs guest code.
    pub fn run_threads<R: Send>(
        &self,
        threads: usize,
        guest: impl Fn(&mut NativeCpu<'_, 'n>, usize) -> Result<R, Stop> + Sync,
    ) -> Result<Vec<R>, Stop> {
        let claimed = self.native().claim_many(Request::RunThreads, threads)?;
        let guest = &guest;
        std::thread::scope(|scope| {
            let spawned: Vec<_> = claimed
                .into_iter()
                .enumerate()
                .map(|(number, claimed)| {
                    std::thread::Builder::new()
                        .name(format!("guest {number}"))
                        .spawn_scoped(scope, move || {
                            let guest = whole_life(|cpu: &mut _| guest(cpu, number));
                            self.run_on(claimed, &ThreadStreams::new(), guest)
                        })
                        .map_err(|_| {
                            let operation = "run_threads on a host that refuses another thread";
                            unavailable(operation, Errno::EAGAIN)
                        })
                })
                .collect();
            let joined: Vec<_> = spawned
                .into_iter()
                .map(|thread| thread.map(std::thread::ScopedJoinHandle::join))
                .collect();
            joined
                .into_iter()
                .map(|result| match result? {
                    Ok(result) => result,
                    Err(panic) => std::panic::resume_unwind(panic),
                })
                .collect()
        })
    }

    /// Ends the process and frees all its memory. Dropping the process has the same effect.
    pub fn exit(self) {}
}

/// Runs `guest`, and then ends the thread's part in the process.
pub(crate) fn whole_life<'n, R>(
    guest: impl FnOnce(&mut NativeCpu<'_, 'n>) -> Result<R, Stop>,
) -> impl FnOnce(&mut NativeCpu<'_, 'n>) -> Result<R, Stop> {
    |cpu| {
        let result = guest(cpu);
        cpu.end_thread();
        result
    }
}
