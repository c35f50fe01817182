//! A CPU that runs guest code: the accesses and the calls of a program.
//!
//! An access is one instruction: check the interrupt line, translate by the TLB or by a walk, move
//! the bytes. A page fault goes to the subsystem, and the access is retried. No interrupt is taken
//! between the translation and the last byte. A CPU that shoots a translation down and has this
//! CPU's acknowledgement therefore knows that no access still uses the translation.
//!
//! In checked mode a TLB entry records the ownership of its frame at the time of the fill, and
//! every access compares the ownership, before and after the bytes move. An entry of 2 MiB covers
//! 512 frames: it may be used only while none of them has been freed.

use crate::machine::{Checked, CpuState, NativeMachine, Stale, Violation};
use crate::memory::{Memory, Word};
use crate::mmu::{self, Step, Translation};
use crate::process::{Native, Process, whole_life};
use core::fmt;
use faultless::audit::stable_entry;
use faultless::format::CANONICAL_END;
use faultless::{
    Access, Advice, Cpu, CpuId, Errno, Error, FaultError, FaultKind, FrameNumber, MapFlags,
    PAGE_SHIFT, PAGE_SIZE, Prot, RemapFlags, Space, ThreadStreams,
};

/// The signal of a program whose access cannot be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// SIGSEGV.
    Segv {
        /// The accessed address.
        addr: u64,
        /// Whether the address is mapped: `SEGV_ACCERR` if so, otherwise `SEGV_MAPERR`.
        mapped: bool,
    },
    /// SIGBUS: the page lies beyond the end of its object, or could not be read from the object's
    /// store or the swap area.
    Bus {
        /// The accessed address.
        addr: u64,
    },
    /// SIGKILL, as the out-of-memory killer sends it: no frame was left for the page.
    OutOfMemory {
        /// The accessed address.
        addr: u64,
    },
}

impl Signal {
    fn new(addr: u64, error: FaultError) -> Self {
        match error {
            FaultError::Segv { mapped } => Self::Segv { addr, mapped },
            FaultError::Bus => Self::Bus { addr },
            FaultError::OutOfMemory => Self::OutOfMemory { addr },
        }
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Segv { addr, mapped: true } => write!(f, "SIGSEGV (SEGV_ACCERR) at {addr:#x}"),
            Self::Segv { addr, mapped: false } => write!(f, "SIGSEGV (SEGV_MAPERR) at {addr:#x}"),
            Self::Bus { addr } => write!(f, "SIGBUS at {addr:#x}"),
            Self::OutOfMemory { addr } => write!(f, "out of memory at {addr:#x}"),
        }
    }
}

impl core::error::Error for Signal {}

/// Why guest code stopped early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// An access got a signal.
    Signal(Signal),
    /// A call was refused.
    Refused(Error),
}

impl From<Signal> for Stop {
    fn from(signal: Signal) -> Self {
        Self::Signal(signal)
    }
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Refused(error)
    }
}

/// For calls that return an error number alone, such as `Object::of_store` and `Cpu::swap_on`.
impl From<Errno> for Stop {
    fn from(errno: Errno) -> Self {
        Self::Refused(Error { operation: "subsystem call", range: Error::NO_RANGE, errno })
    }
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Signal(signal) => signal.fmt(f),
            Self::Refused(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for Stop {}

/// A thread inside a process, on a CPU.
///
/// Other CPUs may wait until this CPU drops translations, which happens at its next access, call or
/// [`poll`](Self::poll). Guest code that does other work for a long time should run that work
/// inside [`idle`](Self::idle).
pub struct NativeCpu<'a, 'n> {
    cpu: &'a Cpu<'n, NativeMachine>,
    process: &'a Process<'n>,
    thread: &'a ThreadStreams,
    state: &'a CpuState,
    memory: &'a Memory,
    root: FrameNumber,
    checked: bool,
}

impl fmt::Debug for NativeCpu<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NativeCpu({}, {:?})", self.cpu.id().0, self.process)
    }
}

impl Drop for NativeCpu<'_, '_> {
    fn drop(&mut self) {
        // SAFETY: a dropped `NativeCpu` runs no more guest code.
        unsafe { self.leave() };
    }
}

impl<'a, 'n> NativeCpu<'a, 'n> {
    /// Starts running `process` on `cpu`, which must be idle.
    pub(crate) fn enter(
        process: &'a Process<'n>,
        cpu: &'a Cpu<'n, NativeMachine>,
        thread: &'a ThreadStreams,
    ) -> Self {
        let machine = cpu.vm().machine();
        // Activated before a value exists whose drop deactivates the space, because this call may
        // panic.
        process.space().activate(cpu);
        let this = Self {
            cpu,
            process,
            thread,
            state: machine.cpu_state(cpu.id()),
            memory: machine.memory(),
            root: process.space().root(),
            checked: machine.checked() != Checked::Off,
        };
        this.load_tables();
        this
    }

    /// Joins the space's CPUs and loads its tables.
    fn resume(&self) {
        self.space().activate(self.cpu);
        self.load_tables();
    }

    fn load_tables(&self) {
        self.state.load_space(self.space().id());
    }

    /// Leaves the space's CPUs: from now on no CPU waits for this CPU.
    ///
    /// # Safety
    /// Guest code does not continue before this CPU has [resumed](Self::resume).
    unsafe fn leave(&self) {
        // SAFETY: only guest code uses the tables and the TLB.
        unsafe { self.space().deactivate(self.cpu) };
    }

    fn space(&self) -> &Space<NativeMachine> {
        self.process.space()
    }

    /// Leaves the space while `meanwhile` runs.
    fn away<R>(&mut self, meanwhile: impl FnOnce(&Cpu<'n, NativeMachine>) -> R) -> R {
        struct Back<'b, 'a, 'n>(&'b NativeCpu<'a, 'n>);
        impl Drop for Back<'_, '_, '_> {
            fn drop(&mut self) {
                self.0.resume();
            }
        }
        // SAFETY: guest code goes on when `away` has returned, or unwound, and `back` was dropped.
        unsafe { self.leave() };
        let back = Back(self);
        meanwhile(back.0.cpu)
    }

    /// The CPU's number.
    pub fn id(&self) -> CpuId {
        self.cpu.id()
    }

    /// The subsystem's side of this CPU, for what is not among the calls here.
    pub fn cpu(&self) -> &'a Cpu<'n, NativeMachine> {
        self.cpu
    }

    /// Returns the running process.
    pub fn running(&self) -> &'a Process<'n> {
        self.process
    }

    /// Returns the machine of the process.
    pub fn native(&self) -> &'n Native {
        self.process.native()
    }

    /// Ends the thread's part in the process: the thread ends, or starts another program. The
    /// predictions from its faults are dropped, except for the part that later threads may learn
    /// from.
    pub fn end_thread(&self) {
        self.process.space().exit_thread(self.cpu(), self.thread);
    }

    /// Runs work other than guest code, such as waiting for another thread. No CPU waits for this
    /// CPU in the meantime. The work may not use this CPU, nor claim another CPU.
    pub fn idle<R>(&mut self, meanwhile: impl FnOnce() -> R) -> R {
        self.away(|_| meanwhile())
    }

    /// Switches to another process on the same CPU, runs guest code there, and switches back.
    ///
    /// # Errors
    /// What the guest code ended with.
    pub fn switch<R>(
        &mut self,
        process: &Process<'n>,
        guest: impl FnOnce(&mut NativeCpu<'_, 'n>) -> Result<R, Stop>,
    ) -> Result<R, Stop> {
        let thread = ThreadStreams::new();
        self.away(|cpu| whole_life(guest)(&mut NativeCpu::enter(process, cpu, &thread)))
    }

    /// Takes a waiting interrupt. Every access and call does so too.
    #[inline(always)]
    pub fn poll(&self) {
        if self.state.interrupted() {
            self.attend();
        }
    }

    #[cold]
    fn attend(&self) {
        self.state.take_interrupt();
        self.cpu.serve_flushes();
    }

    // Translation

    /// Translates `addr` for `access`, serving page faults, and calls `then` with its physical
    /// address before any interrupt is taken.
    #[inline(always)]
    fn access<R>(
        &self,
        addr: u64,
        access: Access,
        then: impl FnOnce(&Memory, u64) -> R,
    ) -> Result<R, Signal> {
        self.poll();
        let translation = self.translate(addr, access)?;
        Ok(self.guard(addr, access, translation, || then(self.memory, translation.phys(addr))))
    }

    /// The TLB's translation, or a walk's. The result is good until an interrupt is taken or the
    /// subsystem called.
    #[inline(always)]
    fn translate(&self, addr: u64, access: Access) -> Result<Translation, Signal> {
        if addr < CANONICAL_END
            && let Some(found) = self.state.tlb.lookup(addr, access)
        {
            return Ok(found);
        }
        self.miss(addr, access)
    }

    #[inline(never)]
    fn miss(&self, addr: u64, access: Access) -> Result<Translation, Signal> {
        loop {
            let start = self.start_of_walk(addr);
            self.state.tlb.count_walk(access, !start.is_root());
            let owner = |table| if self.checked { self.owner(table) } else { 0 };
            let learn = |step| self.state.tlb.fill_table(addr, step);
            let walked = mmu::walk(self.memory, start, addr, access, owner, learn);
            // A table unlinked since its lookup here may not be used: no interrupt was taken.
            self.check_table(addr, start);
            match walked {
                Ok(walk) => {
                    let mut found = walk.translation;
                    if self.checked {
                        found.owner = self.owners(found);
                        // The owner must belong to the same entry.
                        if !walk.still_holds(self.memory) {
                            continue;
                        }
                    }
                    self.state.tlb.fill(addr, access, found);
                    return Ok(found);
                }
                Err(fault) => {
                    assert!(!fault.is_reserved(), "malformed tables: {fault:?} at {addr:#x}");
                    // Hardware drops its translations of a faulting page.
                    if addr < CANONICAL_END {
                        self.state.tlb.forget(addr);
                    }
                    let served = self.space().fault(self.cpu, self.thread, addr, access);
                    let kind = served.map_err(|error| Signal::new(addr, error))?;
                    if kind == FaultKind::Pending {
                        // The thread is the CPU, and has no other work.
                        let read = self.cpu.await_read();
                        read.map_err(|_| Signal::new(addr, FaultError::Bus))?;
                    }
                    self.poll();
                }
            }
        }
    }

    /// The deepest table on the way to `addr` that this CPU knows, or the root.
    #[inline]
    fn start_of_walk(&self, addr: u64) -> Step {
        if addr >= CANONICAL_END {
            return Step::root(self.root);
        }
        let known = self.state.tlb.table(addr);
        known.inspect(|&step| self.check_table(addr, step)).unwrap_or(Step::root(self.root))
    }

    #[inline]
    fn check_table(&self, addr: u64, step: Step) {
        if self.checked && !step.is_root() && self.owner(step.table()) != step.owner {
            self.violated(Stale::Table, addr, step.table());
        }
    }

    fn owner(&self, frame: FrameNumber) -> u64 {
        self.cpu.vm().frame_owner(frame)
    }

    /// Returns the sum of the ownership numbers of all frames of a translation. Each number only
    /// grows, so the sum shows any change.
    fn owners(&self, of: Translation) -> u64 {
        of.frames().fold(0, |sum, frame| sum.wrapping_add(self.owner(frame)))
    }

    /// Runs the access. In checked mode, asserts before and after the access that the translation
    /// is valid.
    #[inline(always)]
    fn guard<R>(
        &self,
        addr: u64,
        kind: Access,
        translation: Translation,
        access: impl FnOnce() -> R,
    ) -> R {
        if !self.checked {
            return access();
        }
        self.check_owner(addr, translation);
        let result = access();
        self.check_owner(addr, translation);
        self.check_entry(addr, kind, translation);
        result
    }

    fn check_owner(&self, addr: u64, translation: Translation) {
        if self.owners(translation) != translation.owner {
            self.violated(Stale::Owner, addr, frame_of(addr, translation));
        }
    }

    fn check_entry(&self, addr: u64, access: Access, translation: Translation) {
        // No interrupt was taken since the translation was found.
        if let Some(entry) = stable_entry(self.cpu, self.space(), addr)
            && !translation.agrees(entry, addr, access)
        {
            self.violated(Stale::Entry, addr, frame_of(addr, translation));
        }
    }

    #[cold]
    fn violated(&self, stale: Stale, addr: u64, frame: FrameNumber) {
        let (cpu, space) = (self.id(), self.space().id());
        self.native().machine().violated(Violation { stale, cpu, space, addr, frame });
    }

    // Accesses of a program

    /// Loads the word at `addr`. A misaligned word is moved byte by byte.
    ///
    /// # Errors
    /// The signal for the program.
    #[inline(always)]
    pub fn load<T: Word>(&self, addr: u64) -> Result<T, Signal> {
        if !addr.is_multiple_of(T::SIZE) {
            return self.load_bytes(addr);
        }
        self.access(addr, Access::Read, |memory, phys| memory.load(phys))
    }

    /// Stores `value` at `addr`. A misaligned word is moved byte by byte.
    ///
    /// # Errors
    /// The signal for the program.
    #[inline(always)]
    pub fn store<T: Word>(&self, addr: u64, value: T) -> Result<(), Signal> {
        if !addr.is_multiple_of(T::SIZE) {
            return self.write_bytes(addr, &value.to_le()[..T::SIZE as usize]);
        }
        self.access(addr, Access::Write, |memory, phys| memory.store(phys, value))
    }

    #[cold]
    fn load_bytes<T: Word>(&self, addr: u64) -> Result<T, Signal> {
        let mut bytes = [0; 8];
        self.read_bytes(addr, &mut bytes[..T::SIZE as usize])?;
        Ok(T::from_le(bytes))
    }

    /// Adds `value` to the aligned word at `addr`, atomically and wrapping around. Returns the old
    /// value.
    ///
    /// # Errors
    /// The signal for the program; SIGBUS for a misaligned word.
    pub fn fetch_add<T: Word>(&self, addr: u64, value: T) -> Result<T, Signal> {
        aligned::<T>(addr)?;
        self.access(addr, Access::Write, |memory, phys| memory.fetch_add(phys, value))
    }

    /// Replaces the aligned word at `addr` by `new` if it is `old`, atomically. Returns
    /// `Ok(Err(found))` for any other value.
    ///
    /// # Errors
    /// The signal for the program; SIGBUS for a misaligned word.
    pub fn compare_exchange<T: Word>(
        &self,
        addr: u64,
        old: T,
        new: T,
    ) -> Result<Result<T, T>, Signal> {
        aligned::<T>(addr)?;
        self.access(addr, Access::Write, |memory, phys| memory.compare_exchange(phys, old, new))
    }

    /// Fetches the instruction byte at `addr`.
    ///
    /// # Errors
    /// The signal that the program would get.
    #[inline]
    pub fn fetch(&self, addr: u64) -> Result<u8, Signal> {
        self.access(addr, Access::Execute, |memory, phys| memory.load(phys))
    }

    /// Makes an access to `addr` that changes no byte: a load, an addition of 0 or a fetch.
    ///
    /// # Errors
    /// The signal for the program.
    #[inline]
    pub fn touch(&self, addr: u64, access: Access) -> Result<(), Signal> {
        self.access(addr, access, |memory, phys| match access {
            Access::Read | Access::Execute => {
                memory.load::<u8>(phys);
            }
            Access::Write => {
                memory.fetch_add(phys, 0u8);
            }
        })
    }

    /// Calls `step` with address and length of each part of a page in `addr..addr + len`.
    fn by_page(
        addr: u64,
        len: u64,
        mut step: impl FnMut(u64, u64) -> Result<(), Signal>,
    ) -> Result<(), Signal> {
        let mut done = 0;
        while done < len {
            // Beyond the last address is no address: the access there faults.
            let at = addr.saturating_add(done);
            let part = (PAGE_SIZE - (at & (PAGE_SIZE - 1))).min(len - done);
            step(at, part)?;
            done += part;
        }
        Ok(())
    }

    /// Sets `len` bytes from `addr` to `byte`, page by page.
    ///
    /// # Errors
    /// The signal for the program; the pages before its address are set.
    pub fn fill(&self, addr: u64, len: u64, byte: u8) -> Result<(), Signal> {
        Self::by_page(addr, len, |at, part| {
            self.access(at, Access::Write, |memory, phys| memory.fill(phys, part, byte))
        })
    }

    /// Loads the bytes from `addr` on into `to`, page by page.
    ///
    /// # Errors
    /// The signal that the program would get.
    pub fn read_bytes(&self, addr: u64, to: &mut [u8]) -> Result<(), Signal> {
        let len = to.len() as u64;
        Self::by_page(addr, len, |at, part| {
            let to = &mut to[(at - addr) as usize..][..part as usize];
            self.access(at, Access::Read, |memory, phys| memory.read(phys, to))
        })
    }

    /// Stores `from` to the bytes from `addr` on, page by page.
    ///
    /// # Errors
    /// The signal for the program; the pages before its address are stored.
    pub fn write_bytes(&self, addr: u64, from: &[u8]) -> Result<(), Signal> {
        Self::by_page(addr, from.len() as u64, |at, part| {
            let from = &from[(at - addr) as usize..][..part as usize];
            self.access(at, Access::Write, |memory, phys| memory.write(phys, from))
        })
    }

    /// Copies `len` bytes from `from` to `to`, lowest address first.
    ///
    /// # Errors
    /// The signal for the program; the bytes before its address are copied.
    pub fn copy(&self, to: u64, from: u64, len: u64) -> Result<(), Signal> {
        Self::by_page(to, len, |to_at, part| {
            Self::by_page(from.saturating_add(to_at - to), part, |from_at, part| {
                let to_at = to.saturating_add(from_at - from);
                let (source, target) = self.translate_both(from_at, to_at)?;
                self.guard(from_at, Access::Read, source, || {
                    self.guard(to_at, Access::Write, target, || {
                        self.memory.copy(target.phys(to_at), source.phys(from_at), part);
                    });
                });
                Ok(())
            })
        })
    }

    /// Translations to load from `from` and to store to `to`, good at the same time.
    fn translate_both(&self, from: u64, to: u64) -> Result<(Translation, Translation), Signal> {
        loop {
            self.poll();
            let source = self.translate(from, Access::Read)?;
            let cached = |addr| {
                (addr < CANONICAL_END).then(|| self.state.tlb.lookup(addr, Access::Write)).flatten()
            };
            match cached(to) {
                Some(target) => return Ok((source, target)),
                // A fault may take `source` away: afterwards both are looked up again.
                None => self.miss(to, Access::Write)?,
            };
        }
    }

    // Calls of a program

    /// Makes a call that may unmap pages.
    fn call<R>(&self, call: impl FnOnce(&Space<NativeMachine>, &Cpu<'n, NativeMachine>) -> R) -> R {
        self.poll();
        self.cpu.for_thread(self.thread, || call(self.space(), self.cpu))
    }

    /// Creates an anonymous mapping as [`Space::mmap`], and returns its address. The flag
    /// `ANONYMOUS` is implied: Linux fails with `EBADF` without this flag and without a file.
    ///
    /// # Errors
    /// The errors of Linux's `mmap`.
    pub fn mmap(
        &self,
        at: impl Into<Option<u64>>,
        len: u64,
        prot: Prot,
        flags: MapFlags,
    ) -> Result<u64, Error> {
        self.call(|space, cpu| space.mmap(cpu, at, len, prot, flags))
    }

    /// As [`Space::munmap`].
    ///
    /// # Errors
    /// Linux's.
    pub fn munmap(&self, addr: u64, len: u64) -> Result<(), Error> {
        self.call(|space, cpu| space.munmap(cpu, addr, len))
    }

    /// As [`Space::mprotect`].
    ///
    /// # Errors
    /// Linux's.
    pub fn mprotect(&self, addr: u64, len: u64, prot: Prot) -> Result<(), Error> {
        self.poll();
        self.space().mprotect(self.cpu, addr, len, prot)
    }

    /// As [`Space::mremap`]; the address of the mapping afterwards.
    ///
    /// # Errors
    /// Linux's.
    pub fn mremap(
        &self,
        addr: u64,
        old_len: u64,
        new_len: u64,
        flags: RemapFlags,
        new_addr: u64,
    ) -> Result<u64, Error> {
        self.call(|space, cpu| space.mremap(cpu, addr, old_len, new_len, flags, new_addr))
    }

    /// As [`Space::madvise`].
    ///
    /// # Errors
    /// Linux's.
    pub fn madvise(&self, addr: u64, len: u64, advice: Advice) -> Result<(), Error> {
        self.call(|space, cpu| space.madvise(cpu, addr, len, advice))
    }

    /// As [`Space::brk`]; the break afterwards, which is the old one when the call was refused.
    pub fn brk(&self, end: u64) -> u64 {
        self.call(|space, cpu| space.brk(cpu, end))
    }

    /// As [`Space::mincore`]: `tell` is called once a page.
    ///
    /// # Errors
    /// Linux's.
    pub fn mincore(&self, addr: u64, len: u64, tell: impl FnMut(bool)) -> Result<(), Error> {
        self.poll();
        self.space().mincore(self.cpu, addr, len, tell)
    }

    /// A copy of the process, made as `fork` does.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn fork(&self) -> Result<Process<'n>, Error> {
        self.poll();
        let space = self.space().fork(self.cpu)?;
        self.thread.reset();
        Ok(Process::new(self.process.native(), space))
    }

    /// Creates a process without mappings.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn process(&self) -> Result<Process<'n>, Error> {
        self.poll();
        Ok(Process::new(self.process.native(), Space::new(self.cpu)?))
    }

    /// Ends another process, on this CPU.
    pub fn exit(&self, process: Process<'_>) {
        self.poll();
        process.exit_on(self.cpu);
    }
}

/// Returns the frame that an access to `addr` reaches through `translation`.
fn frame_of(addr: u64, translation: Translation) -> FrameNumber {
    FrameNumber((translation.phys(addr) >> PAGE_SHIFT) as u32)
}

fn aligned<T: Word>(addr: u64) -> Result<(), Signal> {
    if addr.is_multiple_of(T::SIZE) { Ok(()) } else { Err(Signal::Bus { addr }) }
}
