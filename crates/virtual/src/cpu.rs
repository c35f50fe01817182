//! One simulated CPU running a program: its accesses and its calls.
//!
//! As on the native machine, an access first takes a pending interrupt, then looks up the TLB, and
//! otherwise walks the tables. A page fault calls the subsystem, and the access is retried. The
//! profile contains the cost of entering the kernel.

use crate::accounts::Spent;
use crate::convert;
use crate::machine::VirtualMachine;
use crate::process::{File, Process, Virtual};
use crate::profile::Time;
use crate::rates::Operation;
use crate::simulation::Meeting;
use crate::window::Window;
use core::fmt;
use faultless::{Access, Advice, MapFlags, PAGE_SIZE, Prot, RemapFlags};
use faultless_native::mmu::{PageSize, Translation};
use faultless_observed::{Backing, CpuId, Errno, Error, FaultKind, Space};

pub use faultless_observed::{FaultError, ThreadStreams};

type Cpu<'v> = faultless_observed::Cpu<'v, VirtualMachine>;

/// The reason for a failed step of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// A call failed.
    Refused {
        /// The call, by its Linux name.
        call: &'static str,
        /// The requested address.
        addr: u64,
        /// The requested bytes.
        len: u64,
        /// Linux's error number.
        errno: i32,
    },
    /// An access received a signal.
    Signal {
        /// The address.
        addr: u64,
        /// The error of its fault, which determines the signal.
        error: FaultError,
    },
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        let (addr, len) = (error.range.start, error.range.len());
        Self::Refused { call: error.operation, addr, len, errno: error.errno.number() }
    }
}

/// For calls that return an error number alone, such as `Object::of_store` and `Cpu::swap_on`.
impl From<Errno> for Stop {
    fn from(errno: Errno) -> Self {
        Self::Refused { call: "subsystem call", addr: 0, len: 0, errno: errno.number() }
    }
}

impl Stop {
    /// Returns the name of a signal.
    pub const fn reason(error: FaultError) -> &'static str {
        match error {
            FaultError::Segv { mapped: true } => "SIGSEGV (SEGV_ACCERR)",
            FaultError::Segv { mapped: false } => "SIGSEGV (SEGV_MAPERR)",
            FaultError::Bus => "SIGBUS",
            FaultError::OutOfMemory => "out of memory",
        }
    }
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused { call, addr, len, errno } => {
                let error = std::io::Error::from_raw_os_error(*errno);
                write!(f, "{call} of {len} bytes at {addr:#x}: {error}")
            }
            Self::Signal { addr, error } => write!(f, "{} at {addr:#x}", Self::reason(*error)),
        }
    }
}

impl core::error::Error for Stop {}

/// A thread of a process, on a separate CPU.
pub struct VirtualCpu<'a> {
    cpu: &'a Cpu<'a>,
    process: &'a Process,
    thread: &'a ThreadStreams,
    system: &'a Virtual,
}

/// A CPU that does not run a process.
pub struct Idle<'a> {
    cpu: &'a Cpu<'a>,
    system: &'a Virtual,
}

impl fmt::Debug for Idle<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Idle({})", self.cpu.id().0)
    }
}

impl<'a> Idle<'a> {
    pub(crate) fn new(system: &'a Virtual, cpu: &'a Cpu<'a>) -> Self {
        Self { cpu, system }
    }

    /// Returns the CPU's time, in picoseconds.
    pub fn now(&self) -> u64 {
        self.system.machine().simulation.now()
    }

    /// Waits for another CPU without accounting, as a CPU without work.
    pub fn rest(&self, looks: u32) {
        let simulation = &self.system.machine().simulation;
        let before = simulation.set_aside(true);
        simulation.rest(looks);
        if simulation.take_interrupt() {
            self.cpu.serve_flushes();
        }
        simulation.set_aside(before);
    }

    /// Runs `body` in `process`, as a thread that ran before and may run again. `thread` contains
    /// the stream history of its faults. The end of the thread must be
    /// [reported](VirtualCpu::end_thread).
    pub fn run_as<R>(
        &self,
        process: &Process,
        thread: &ThreadStreams,
        body: impl FnOnce(&mut VirtualCpu<'_>) -> R,
    ) -> R {
        body(&mut VirtualCpu::enter(self.system, self.cpu, process, thread))
    }

    /// Creates an empty process.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn process(&self) -> Result<Process, Stop> {
        Ok(Process::new(self.system, Space::new(self.cpu)?))
    }

    /// Ends a process that no CPU runs.
    pub fn exit(&self, process: Process) {
        let simulation = &self.system.machine().simulation;
        let before = simulation.execute(self.system.rates().of(Operation::Fork, false));
        process.space.exit(self.cpu);
        simulation.execute(before);
    }
}

impl fmt::Debug for VirtualCpu<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VirtualCpu({})", self.cpu.id().0)
    }
}

impl Drop for VirtualCpu<'_> {
    fn drop(&mut self) {
        // SAFETY: the dropped CPU makes no further access.
        unsafe { self.process.deactivate(self.cpu) };
    }
}

impl<'a> VirtualCpu<'a> {
    pub(crate) fn enter(
        system: &'a Virtual,
        cpu: &'a Cpu<'a>,
        process: &'a Process,
        thread: &'a ThreadStreams,
    ) -> Self {
        process.activate(cpu);
        system.machine().load_space(cpu.id(), process.space.id());
        Self { cpu, process, thread, system }
    }

    /// Runs `body` as a new thread, from start to end.
    pub(crate) fn whole_life<R>(
        system: &'a Virtual,
        cpu: &'a Cpu<'a>,
        process: &'a Process,
        body: impl FnOnce(&mut VirtualCpu<'_>) -> R,
    ) -> R {
        let thread = ThreadStreams::new();
        let mut cpu = VirtualCpu::enter(system, cpu, process, &thread);
        let result = body(&mut cpu);
        cpu.end_thread();
        result
    }

    /// Ends the thread.
    pub fn end_thread(&self) {
        self.space().exit_thread(self.cpu, self.thread);
    }

    fn space(&self) -> &'a Space<VirtualMachine> {
        &self.process.space
    }

    /// Returns the CPU and its space in the subsystem's types, for calls not made by programs.
    ///
    /// # Safety
    /// All data reached from here must stay on this thread.
    pub unsafe fn parts(&self) -> (&'a Cpu<'a>, &'a Space<VirtualMachine>) {
        (self.cpu, self.space())
    }

    /// Runs `what` in the kernel for this thread: its calls of the subsystem cost the instructions
    /// and lines of one system call.
    pub fn in_kernel<R>(&self, what: impl FnOnce() -> R) -> R {
        self.call(Operation::Map, |_| what())
    }

    fn machine(&self) -> &'a VirtualMachine {
        self.system.machine()
    }

    /// Returns the CPU's number.
    pub fn id(&self) -> CpuId {
        self.cpu.id()
    }

    /// Returns the CPU's time, in picoseconds.
    pub fn now(&self) -> u64 {
        self.machine().simulation.now()
    }

    /// Takes a pending interrupt. Every access and call does this, too.
    #[inline]
    pub fn poll(&self) {
        let simulation = &self.machine().simulation;
        simulation.keep_pace();
        if simulation.take_interrupt() {
            self.within(Operation::Map, || self.cpu.serve_flushes());
        }
    }

    /// Waits for another thread of the program, after `looks` checks. The wait grows with the
    /// number of checks.
    pub fn rest(&self, looks: u32) {
        self.in_window(Window::wait);
        self.machine().simulation.rest(looks);
        self.poll();
    }

    /// Waits until all CPUs of the meeting have arrived. All continue at the same time.
    pub fn meet(&self, meeting: &Meeting) {
        self.poll();
        self.machine().simulation.meet(meeting, || self.poll());
    }

    /// Sets whether subsequent work is excluded from the accounts: time passes without being
    /// accounted, and waits for lines add no heat. Returns the earlier setting.
    pub fn set_aside(&self, aside: bool) -> bool {
        self.in_window(|window, cpu, now| window.set_aside(cpu, now, aside));
        self.machine().simulation.set_aside(aside)
    }

    /// Begins the work of this CPU in the [steady window](Virtual::measure_steady), if any.
    pub fn begin_work(&self) {
        self.in_window(Window::begin);
    }

    /// Ends the work of this CPU in the steady window.
    pub fn end_work(&self) {
        self.in_window(Window::end);
    }

    fn in_window(&self, change: impl FnOnce(&mut Window, usize, Time)) {
        self.system.in_window(self.cpu.id(), change);
    }

    /// Returns the subsystem's counters of this CPU so far, by name.
    pub fn counters(&self) -> Vec<(&'static str, u64)> {
        self.system.counters_of(self.cpu.id().index())
    }

    /// Executes instructions of the subsystem, at the rate of `operation`.
    fn within<R>(&self, operation: Operation, what: impl FnOnce() -> R) -> R {
        let simulation = &self.machine().simulation;
        let shared = self.process.running.get() > 1;
        let before = simulation.execute(self.system.rates().of(operation, shared));
        let result = what();
        simulation.execute(before);
        result
    }

    /// Enters the kernel, at the cost `entry`, for an operation whose latency is recorded.
    fn serve<R>(&self, operation: Operation, entry: Time, what: impl FnOnce() -> R) -> R {
        let simulation = &self.machine().simulation;
        self.in_window(Window::enter);
        let begin = simulation.now();
        simulation.spend(entry, Spent::Entry);
        let result = self.within(operation, what);
        simulation.completed(operation, begin);
        self.in_window(Window::complete);
        result
    }

    /// Makes a system call.
    fn call<R>(&self, operation: Operation, call: impl FnOnce(&Space<VirtualMachine>) -> R) -> R {
        self.poll();
        let entry = self.machine().simulation.costs.call;
        self.serve(operation, entry, || self.cpu.for_thread(self.thread, || call(self.space())))
    }

    /// Runs `what` as a kernel thread on this CPU: its calls of the subsystem cost the instructions
    /// and lines of one call.
    pub fn as_kernel<R>(&self, what: impl FnOnce(&Cpu<'_>) -> R) -> R {
        self.call(Operation::Map, |_| what(self.cpu))
    }

    /// Returns the frames of the machine's memory that are not free.
    pub fn used_frames(&self) -> u64 {
        self.system.used_frames()
    }

    // Accesses

    /// Returns the physical address of the access, which is valid until an interrupt is taken or
    /// the subsystem is called.
    fn translate(&self, addr: u64, access: Access) -> Result<u64, Stop> {
        let machine = self.machine();
        let simulation = &machine.simulation;
        simulation.spend(simulation.costs.access, Spent::Program);
        let tlb = &machine.tlb(self.cpu.id()).tlb;
        let charged = |phys: u64| {
            machine.charge_tier((phys / PAGE_SIZE) as u32);
            phys
        };
        let canonical = addr < faultless::format::CANONICAL_END;
        if canonical && let Some(found) = tlb.lookup(addr, access) {
            return Ok(charged(found.phys(addr)));
        }
        let wanted = convert::access(access);
        let mut walk = simulation.costs.walk;
        loop {
            tlb.count_walk(access, false);
            simulation.spend(walk, Spent::Program);
            walk = simulation.costs.walk_again;
            if let Some(found) = self.space().walk(self.cpu, addr, wanted) {
                let page = addr & !(PAGE_SIZE - 1);
                let prot = found.prot;
                let writable = prot.contains(faultless_observed::Prot::WRITE);
                let executable = prot.contains(faultless_observed::Prot::EXEC);
                let frame = faultless::FrameNumber(found.frame.0);
                let translation =
                    Translation::new(frame, PageSize::Size4K, writable, writable, executable);
                tlb.fill(page, access, translation);
                return Ok(charged(translation.phys(addr)));
            }
            if canonical {
                tlb.forget(addr);
            }
            let served = self.serve(Operation::Fault, simulation.costs.fault, || {
                self.space().fault(self.cpu, self.thread, addr, wanted)
            });
            let kind = served.map_err(|error| Stop::Signal { addr, error })?;
            if kind == FaultKind::Pending {
                self.cpu.await_read().map_err(|_| Stop::Signal { addr, error: FaultError::Bus })?;
            }
            self.poll();
        }
    }

    /// Loads the 8 bytes at `addr`, a multiple of 8.
    ///
    /// # Errors
    /// The signal for the program; the same applies to all accesses.
    pub fn load(&self, addr: u64) -> Result<u64, Stop> {
        self.poll();
        Ok(self.machine().contents.load(self.translate(addr, Access::Read)?))
    }

    /// Stores 8 bytes at `addr`, a multiple of 8.
    ///
    /// # Errors
    /// As for [`load`](Self::load).
    pub fn store(&self, addr: u64, value: u64) -> Result<(), Stop> {
        self.poll();
        let phys = self.translate(addr, Access::Write)?;
        self.machine().contents.store(phys, value);
        Ok(())
    }

    /// Fetches an instruction at `addr`.
    ///
    /// # Errors
    /// As for [`load`](Self::load).
    pub fn fetch(&self, addr: u64) -> Result<(), Stop> {
        self.poll();
        self.translate(addr, Access::Execute).map(|_| ())
    }

    /// Makes an access without a value.
    ///
    /// # Errors
    /// As for [`load`](Self::load).
    pub fn touch(&self, addr: u64, access: Access) -> Result<(), Stop> {
        self.poll();
        self.translate(addr, access).map(|_| ())
    }

    /// Returns translations to load from `from` and to store to `to`, both valid at the same time.
    fn translate_both(&self, to: u64, from: u64) -> Result<(u64, u64), Stop> {
        loop {
            let source = self.translate(from, Access::Read)?;
            let tlb = &self.machine().tlb(self.cpu.id()).tlb;
            let canonical = to < faultless::format::CANONICAL_END;
            match canonical.then(|| tlb.lookup(to, Access::Write)).flatten() {
                Some(target) => return Ok((target.phys(to), source)),
                // A fault may remove the source, so both are looked up again afterwards.
                None => self.translate(to, Access::Write)?,
            };
        }
    }

    /// Copies `len` bytes from `from` to `to`; all are multiples of 8. Each part within a page is
    /// translated once, and the cost of the copy depends on its bytes.
    ///
    /// # Errors
    /// As for [`load`](Self::load); bytes before the failing address have been copied.
    pub fn copy(&self, to: u64, from: u64, len: u64) -> Result<(), Stop> {
        let frame = |phys: u64| (phys / PAGE_SIZE) as u32;
        let left = |addr: u64| PAGE_SIZE - addr % PAGE_SIZE;
        let mut done = 0;
        while done < len {
            let (to, from) = (to.saturating_add(done), from.saturating_add(done));
            let part = left(to).min(left(from)).min(len - done);
            self.poll();
            let (target, source) = self.translate_both(to, from)?;
            let machine = self.machine();
            machine.charge_copying(frame(target), frame(source), part);
            for offset in (0..part).step_by(8) {
                machine.contents.store(target + offset, machine.contents.load(source + offset));
            }
            done += part;
        }
        Ok(())
    }

    // Calls

    /// Sets the start of an empty heap, as a program's loader does.
    pub fn set_heap_start(&self, start: u64) {
        // A heap that is not empty stays unchanged.
        let _ = self.call(Operation::Break, |space| space.set_heap_start(self.cpu, start));
    }

    /// Returns the frames of the machine's memory.
    pub fn frames(&self) -> u64 {
        self.system.frames()
    }

    /// Calls `Space::mmap` of the subsystem, and returns the address of the mapping.
    ///
    /// # Errors
    /// Linux's; the same applies to all calls.
    pub fn mmap(
        &self,
        at: impl Into<Option<u64>>,
        len: u64,
        prot: Prot,
        flags: MapFlags,
    ) -> Result<u64, Stop> {
        let (prot, flags) = (convert::prot(prot), convert::map_flags(flags));
        Ok(self.call(Operation::Map, |space| space.mmap(self.cpu, at, len, prot, flags))?)
    }

    /// Calls `Space::mmap_object`: maps `len` bytes of `file`, from byte `offset` on, a multiple of
    /// the page size.
    ///
    /// # Errors
    /// Linux's.
    pub fn mmap_file(
        &self,
        file: &File,
        (at, len): (Option<u64>, u64),
        prot: Prot,
        flags: MapFlags,
        offset: u64,
    ) -> Result<u64, Stop> {
        let (prot, flags) = (convert::prot(prot), convert::map_flags(flags));
        let backing = Backing { object: &file.object, first: offset / PAGE_SIZE, may_write: true };
        Ok(self.call(Operation::Map, |space| {
            space.mmap_object(self.cpu, at, len, prot, flags, backing)
        })?)
    }

    /// Calls `Space::munmap`.
    ///
    /// # Errors
    /// Linux's.
    pub fn munmap(&self, addr: u64, len: u64) -> Result<(), Stop> {
        Ok(self.call(Operation::Map, |space| space.munmap(self.cpu, addr, len))?)
    }

    /// Calls `Space::mprotect`.
    ///
    /// # Errors
    /// Linux's.
    pub fn mprotect(&self, addr: u64, len: u64, prot: Prot) -> Result<(), Stop> {
        let prot = convert::prot(prot);
        Ok(self.call(Operation::Protect, |space| space.mprotect(self.cpu, addr, len, prot))?)
    }

    /// Calls `Space::mremap`; `new_addr` is the target with `FIXED`.
    ///
    /// # Errors
    /// Linux's.
    pub fn mremap(
        &self,
        (addr, len): (u64, u64),
        new_len: u64,
        flags: RemapFlags,
        new_addr: u64,
    ) -> Result<u64, Stop> {
        let flags = convert::remap_flags(flags);
        let call = |space: &Space<_>| space.mremap(self.cpu, addr, len, new_len, flags, new_addr);
        Ok(self.call(Operation::Map, call)?)
    }

    /// Calls `Space::madvise`.
    ///
    /// # Errors
    /// Linux's.
    pub fn madvise(&self, addr: u64, len: u64, advice: Advice) -> Result<(), Stop> {
        let unknown = Stop::Refused { call: "madvise", addr, len, errno: Errno::EINVAL.number() };
        let advice = convert::advice(advice).ok_or(unknown)?;
        Ok(self.call(Operation::Map, |space| space.madvise(self.cpu, addr, len, advice))?)
    }

    /// Calls `Space::brk`, and returns the new break.
    pub fn brk(&self, end: u64) -> u64 {
        self.call(Operation::Break, |space| space.brk(self.cpu, end))
    }

    /// Forks the process, and returns the copy.
    ///
    /// # Errors
    /// Linux's.
    pub fn fork(&self) -> Result<Process, Stop> {
        let space = self.call(Operation::Fork, |space| space.fork(self.cpu))?;
        self.thread.reset();
        Ok(Process::new(self.system, space))
    }

    /// Creates an empty process.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn process(&self) -> Result<Process, Stop> {
        let space = self.call(Operation::Fork, |_| Space::new(self.cpu))?;
        Ok(Process::new(self.system, space))
    }

    /// Runs `body` in another process on this CPU, and switches back.
    pub fn switch<R>(
        &mut self,
        process: &Process,
        body: impl FnOnce(&mut VirtualCpu<'_>) -> R,
    ) -> R {
        // SAFETY: this program continues only after the end of `body`, below.
        unsafe { self.process.deactivate(self.cpu) };
        let result = VirtualCpu::whole_life(self.system, self.cpu, process, body);
        self.process.activate(self.cpu);
        self.machine().load_space(self.cpu.id(), self.space().id());
        result
    }

    /// Ends a process that no CPU runs.
    pub fn exit(&self, process: Process) {
        self.within(Operation::Fork, || process.space.exit(self.cpu));
    }
}
