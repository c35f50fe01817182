//! The virtual machine with its subsystem: processes, files, and the threads that run in them.
//!
//! Values of the subsystem that it does not allocate itself (the `Vm`, a `Space`) are boxed here, and named, so that they have cache lines of
//! their own wherever the host puts them.

use crate::accounts::Accounts;
use crate::contents::Contents;
use crate::cpu::{Idle, Stop, VirtualCpu};
use crate::disk::Disk;
use crate::log::LineUse;
use crate::machine::VirtualMachine;
use crate::profile::{Profile, Time};
use crate::rates::{Operation, Rates};
use crate::simulation::Simulation;
use core::cell::Cell;
use core::fmt;
use core::marker::PhantomData;
use faultless_native::{Memory, TlbStats};
use faultless_observed::audit::audit_with;
use faultless_observed::{
    Cpu, CpuId, Errno, MAX_CPUS, MAX_NODES, Object, PAGE_SIZE, Setting, Shared, Space, Totals, Vm,
};
use std::rc::Rc;
use std::sync::Arc;

/// What files are called in listings of a space.
const FILE_TAG: u64 = 1;

/// How a virtual machine is built.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// CPUs, `1..=1024`.
    pub cpus: usize,
    /// Bytes of physical memory. The host has less: see [`Virtual`].
    pub memory_bytes: u64,
    /// Bytes of a slow node of memory; 0: there is none. Where there is one, all other memory is one node, that of all CPUs.
    pub slow_bytes: u64,
    /// Which schedule; 0 is the one without random delays.
    pub seed: u64,
}

/// A machine of N simulated CPUs, with the subsystem over it.
///
/// Memory that programs store at most one word of each page to takes the host 74 bytes a page, so a run may touch more memory
/// than the host has.
///
/// All of it is used on one thread, and the same calls give the same results and the same times.
pub struct Virtual {
    vm: Box<Vm<VirtualMachine>>,
    rates: Rates,
    profile: String,
    one_thread: PhantomData<*const ()>,
}

impl fmt::Debug for Virtual {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Virtual({:?})", self.machine())
    }
}

/// An address space.
pub struct Process {
    pub(crate) space: Box<Space<VirtualMachine>>,
    /// How many CPUs run it.
    pub(crate) running: Cell<u32>,
}

impl Process {
    pub(crate) fn new(system: &Virtual, space: Space<VirtualMachine>) -> Self {
        let space = Box::new(space);
        system.machine().simulation.made_one(&*space, "Space");
        Self { space, running: Cell::new(0) }
    }

    pub(crate) fn activate(&self, cpu: &Cpu<'_, VirtualMachine>) {
        self.space.activate(cpu);
        self.running.set(self.running.get() + 1);
    }

    /// # Safety
    /// As [`Space::deactivate`].
    pub(crate) unsafe fn deactivate(&self, cpu: &Cpu<'_, VirtualMachine>) {
        self.running.set(self.running.get() - 1);
        // SAFETY: handed on.
        unsafe { self.space.deactivate(cpu) };
    }

    /// Its space, as the subsystem has it.
    ///
    /// # Safety
    /// As for [`VirtualCpu::parts`].
    pub unsafe fn space(&self) -> &Space<VirtualMachine> {
        &self.space
    }
}

/// A file in memory, as those of tmpfs: of zeros, until something is stored to it; or one of a [disk](Virtual::stored_file).
#[derive(Debug)]
pub struct File {
    pub(crate) object: Shared<Object>,
}

impl fmt::Debug for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Process({:?})", self.space.id())
    }
}

/// A place where CPUs wait for lines of other CPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HotPlace {
    /// The type that the line is part of, or `other`.
    pub of: String,
    /// The source file, from the subsystem's `src/` on.
    pub file: String,
    /// The line there.
    pub line: u32,
    /// How often a line moved there.
    pub transfers: u64,
    /// How long CPUs waited for it, in picoseconds.
    pub waited: Time,
}

impl Virtual {
    /// A machine with the costs of `profile`. With more CPUs than the profile has, it has more sockets of the same kind.
    ///
    /// # Errors
    /// `EINVAL` for a configuration out of range, `ENOMEM` when there is too little memory.
    pub fn new(profile: &Profile, config: Config) -> Result<Self, faultless::Errno> {
        if config.cpus == 0 || config.cpus > MAX_CPUS {
            return Err(faultless::Errno::EINVAL);
        }
        let simulation = Rc::new(Simulation::new(profile, config.cpus, config.seed));
        // Each socket has its part of the memory, unless there are too many of them.
        let nodes = if config.slow_bytes == 0 { simulation.sockets().min(MAX_NODES) } else { 1 };
        let memory = Memory::tiered(config.memory_bytes, nodes, config.slow_bytes)?;
        let contents = Contents::new(memory);
        // What the subsystem accesses in frames are tables.
        for region in contents.memory().regions() {
            let (at, bytes) =
                (contents.memory().frame_bytes(region.first), region.frames as usize * 4096);
            simulation.name(at.addr(), bytes, "Table");
        }
        let machine = VirtualMachine::new(Rc::clone(&simulation), contents, config.cpus, nodes);
        let vm = simulation.enter(|| Vm::new(machine)).map_err(|errno| {
            if errno == Errno::ENOMEM { faultless::Errno::ENOMEM } else { faultless::Errno::EINVAL }
        })?;
        let vm = Box::new(vm);
        simulation.made_one(&*vm, "Vm");
        let (rates, profile) = (Rates::new(profile), profile.name.clone());
        Ok(Self { vm, rates, profile, one_thread: PhantomData })
    }

    /// The name of its profile.
    pub fn profile(&self) -> &str {
        &self.profile
    }

    pub(crate) fn machine(&self) -> &VirtualMachine {
        self.vm.machine()
    }

    pub(crate) fn rates(&self) -> &Rates {
        &self.rates
    }

    /// How many CPUs there are.
    pub fn cpus(&self) -> usize {
        faultless_observed::Machine::cpus(self.machine())
    }

    /// Sets a knob, as `name=value`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn set(&self, setting: &str) -> Result<(), String> {
        let setting: Setting = setting.parse().map_err(|error| format!("{setting}: {error}"))?;
        self.vm.set(setting);
        Ok(())
    }

    /// What the subsystem counted so far, by name.
    pub fn counters(&self) -> Vec<(&'static str, u64)> {
        named(&self.vm.totals())
    }

    /// What it counted on one CPU.
    pub fn counters_of(&self, cpu: usize) -> Vec<(&'static str, u64)> {
        named(&self.vm.totals_of(CpuId(cpu as u16)))
    }

    /// Lets CPUs that do nothing zero as many free frames ahead as the knob `zeroed_pool` allows.
    pub fn zero_ahead(&self) {
        self.quietly(|cpu| while cpu.zero_ahead(usize::MAX) != 0 {});
    }

    /// Frames of memory.
    pub fn frames(&self) -> u64 {
        self.vm.total_frames()
    }

    fn cpu(&self, number: usize) -> Cpu<'_, VirtualMachine> {
        // SAFETY: `run` and `alone`, which cannot run at the same time (one thread), have one `Cpu` of each number.
        unsafe { self.vm.cpu(CpuId(number as u16)) }
    }

    /// A process with nothing mapped.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn process(&self) -> Result<Process, Stop> {
        Ok(Process::new(self, self.quietly(Space::new)?))
    }

    /// Ends a process.
    pub fn exit(&self, process: Process) {
        self.quietly(|cpu| process.space.exit(cpu));
    }

    /// A file of `bytes` bytes, whole pages, of zeros.
    ///
    /// # Errors
    /// `EFBIG`, `ENOMEM`.
    pub fn file(&self, bytes: u64) -> Result<File, Stop> {
        let made = self.quietly(|cpu| Object::try_new(cpu, bytes / PAGE_SIZE, FILE_TAG));
        made.map(|object| File { object }).map_err(|errno| refused_file(bytes, errno))
    }

    /// A file of `bytes` bytes, whole pages, on a disk: its pages are read when they are needed, and leave memory when it is short.
    /// Each begins with its number in the file.
    ///
    /// # Errors
    /// `EFBIG`, `ENOMEM`.
    pub fn stored_file(&self, bytes: u64) -> Result<File, Stop> {
        let disk = Arc::new(Disk::new(Rc::clone(&self.machine().simulation), bytes));
        let made = self.quietly(|cpu| Object::of_store(cpu, disk, FILE_TAG));
        made.map(|object| File { object }).map_err(|errno| refused_file(bytes, errno))
    }

    /// What the TLBs of all CPUs have done so far.
    pub fn tlb_stats(&self) -> TlbStats {
        self.machine().tlb_stats()
    }

    /// Frames that are not free.
    pub fn used_frames(&self) -> u64 {
        self.vm.total_frames() - self.vm.free_frames()
    }

    /// Deletes a file, which no process maps any more.
    pub fn delete(&self, file: File) {
        self.quietly(|cpu| Object::release(file.object, cpu));
    }

    /// Does `what` on a CPU that takes no time for it.
    fn quietly<R>(&self, what: impl FnOnce(&Cpu<'_, VirtualMachine>) -> R) -> R {
        assert!(!self.machine().simulation.is_running(), "a call from outside while CPUs run");
        self.machine().simulation.enter(|| what(&self.cpu(0)))
    }

    /// Runs one thread in `process` off the books: what a program prepares, or checks. Its time passes, but is in no account.
    pub fn alone<R>(&self, process: &Process, body: impl FnOnce(&mut VirtualCpu<'_>) -> R) -> R {
        let simulation = &self.machine().simulation;
        let whole = || {
            let before = simulation.set_aside(true);
            let cpu = self.cpu(0);
            let result = VirtualCpu::whole_life(self, &cpu, process, body);
            cpu.end_dropped();
            simulation.set_aside(before);
            result
        };
        simulation.run(vec![Box::new(whole) as Box<dyn FnOnce() -> R + '_>]).remove(0)
    }

    /// Runs `threads` threads, all from one moment on, each on a CPU of its own; thread `number` in `process(number)`. Results are in
    /// the order of the numbers.
    ///
    /// # Panics
    /// With more threads than CPUs, and when all CPUs wait for each other.
    pub fn run<'a, R: 'a>(
        &'a self,
        threads: usize,
        process: impl Fn(usize) -> &'a Process,
        body: impl Fn(&mut VirtualCpu<'_>, usize) -> R + 'a,
    ) -> Vec<R> {
        self.run_cpus(threads, |cpu, number| {
            VirtualCpu::whole_life(self, cpu, process(number), |cpu| body(cpu, number))
        })
    }

    /// Runs `cpus` CPUs, all from one moment on, which enter and leave processes as `body` has it. Results are in the order of the numbers.
    ///
    /// # Panics
    /// As [`run`](Self::run).
    pub fn run_idle<'a, R: 'a>(
        &'a self,
        cpus: usize,
        body: impl Fn(&Idle<'_>, usize) -> R + 'a,
    ) -> Vec<R> {
        self.run_cpus(cpus, |cpu, number| body(&Idle::new(self, cpu), number))
    }

    fn run_cpus<R>(
        &self,
        cpus: usize,
        body: impl Fn(&Cpu<'_, VirtualMachine>, usize) -> R,
    ) -> Vec<R> {
        let (body, system) = (&body, self);
        let bodies = (0..cpus).map(|number| {
            Box::new(move || {
                let cpu = system.cpu(number);
                let result = body(&cpu, number);
                cpu.end_dropped();
                result
            }) as Box<dyn FnOnce() -> R + '_>
        });
        self.machine().simulation.run(bodies.collect())
    }

    /// What all CPUs did so far.
    pub fn accounts(&self) -> Accounts {
        let mut all = Accounts::default();
        (0..self.cpus()).for_each(|cpu| all += self.machine().simulation.accounts(cpu));
        all
    }

    /// What one CPU did so far.
    pub fn accounts_of(&self, cpu: usize) -> Accounts {
        self.machine().simulation.accounts(cpu)
    }

    /// What each operation of this kind took, in picoseconds, its entry into the kernel included; not in order.
    pub fn latencies(&self, operation: Operation) -> Vec<Time> {
        self.machine().simulation.log.latencies(operation)
    }

    /// The accesses of operations to cache lines since the last call, in order; the first call begins to collect them.
    pub fn take_line_uses(&self) -> Vec<LineUse> {
        self.machine().simulation.log.take_uses()
    }

    /// Forgets which places were hot.
    pub fn cool(&self) {
        self.machine().simulation.lines().cool();
    }

    /// The places where CPUs waited longest for lines of other CPUs, since [`cool`](Self::cool).
    pub fn hottest(&self, most: usize) -> Vec<HotPlace> {
        let lines = self.machine().simulation.lines();
        let hot = lines.hottest().into_iter().take(most);
        hot.map(|(of, at, heat)| HotPlace {
            of: short_name(of),
            file: at
                .file()
                .rsplit_once("faultless/src/")
                .map_or(at.file(), |(_, file)| file)
                .to_owned(),
            line: at.line(),
            transfers: heat.transfers,
            waited: heat.waited,
        })
        .collect()
    }

    /// Checks the subsystem's books, when no thread runs. `processes` are all there are.
    ///
    /// # Errors
    /// What does not add up.
    pub fn audit(&self, processes: &[&Process]) -> Result<(), String> {
        self.audit_with(processes, &[])
    }

    /// As [`audit`](Self::audit), where there are shares of `objects`.
    ///
    /// # Errors
    /// What does not add up.
    pub fn audit_with(
        &self,
        processes: &[&Process],
        objects: &[&Shared<Object>],
    ) -> Result<(), String> {
        let cpus: Vec<_> = (0..self.cpus()).map(|number| self.cpu(number)).collect();
        let spaces: Vec<_> = processes.iter().map(|process| &*process.space).collect();
        let audited = self.machine().simulation.enter(|| {
            cpus.iter().for_each(Cpu::drain);
            audit_with(&cpus[0], &spaces, objects)
        });
        audited.map(|_| ()).map_err(|error| error.to_string())
    }
}

fn refused_file(bytes: u64, errno: Errno) -> Stop {
    Stop::Refused { call: "open", addr: 0, len: bytes, errno: errno.number() }
}

fn named(totals: &Totals) -> Vec<(&'static str, u64)> {
    totals.iter().map(|(counter, count)| (counter.name(), count)).collect()
}

/// A type's name without the paths in it.
fn short_name(name: &str) -> String {
    let mut short = String::new();
    let mut word = String::new();
    for letter in name.chars() {
        if letter.is_alphanumeric() || letter == '_' {
            word.push(letter);
        } else if letter == ':' {
            word.clear();
        } else {
            short.push_str(&word);
            word.clear();
            short.push(letter);
        }
    }
    short + &word
}
