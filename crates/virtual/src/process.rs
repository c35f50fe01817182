//! The virtual machine with its subsystem: processes, files, and their threads.
//!
//! Values not allocated by the subsystem (the `Vm`, a `Space`) are boxed and named here, to have
//! separate cache lines at any host address.

use crate::accounts::Accounts;
use crate::contents::Contents;
use crate::cpu::{Idle, Stop, VirtualCpu};
use crate::disk::Disk;
use crate::log::LineUse;
use crate::machine::VirtualMachine;
use crate::profile::{Profile, Time};
use crate::rates::{Operation, Rates};
use crate::simulation::Simulation;
use crate::window::{Moment, Steady, Window};
use core::cell::{Cell, RefCell};
use core::fmt;
use core::marker::PhantomData;
use faultless_native::{Memory, TlbStats};
use faultless_observed::audit::audit_with;
use faultless_observed::{
    Cpu, CpuId, Errno, MAX_CPUS, MAX_NODES, Object, PAGE_SIZE, Setting, Shared, Space, Totals, Vm,
};
use std::rc::Rc;
use std::sync::Arc;

/// The tag of files in listings of a space.
const FILE_TAG: u64 = 1;

/// The configuration of a virtual machine.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// CPUs, `1..=1024`.
    pub cpus: usize,
    /// Bytes of physical memory. The host has less: see [`Virtual`].
    pub memory_bytes: u64,
    /// Bytes of a slow memory node; 0 for no slow node. With a slow node, all other memory is one
    /// node, shared by all CPUs.
    pub slow_bytes: u64,
    /// The number of the schedule; 0 has no random delays.
    pub seed: u64,
}

/// A machine of N simulated CPUs, with the subsystem.
///
/// If programs store at most one word to each page, memory uses 74 bytes of the host per page, so a
/// run may touch more memory than the host has.
///
/// The machine is used on one thread, and the same calls give the same results and the same times.
pub struct Virtual {
    vm: Box<Vm<VirtualMachine>>,
    rates: Rates,
    profile: String,
    /// The steady window of the next run, or of the last.
    window: RefCell<Option<Window>>,
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
    /// The number of CPUs running the process.
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
        // SAFETY: the contract is passed on to the caller.
        unsafe { self.space.deactivate(cpu) };
    }

    /// Returns the space in the subsystem's type.
    ///
    /// # Safety
    /// As for [`VirtualCpu::parts`].
    pub unsafe fn space(&self) -> &Space<VirtualMachine> {
        &self.space
    }
}

/// A file in memory, as in tmpfs, with zeros until the first store; or a file on a
/// [disk](Virtual::stored_file).
#[derive(Debug)]
pub struct File {
    pub(crate) object: Shared<Object>,
}

impl fmt::Debug for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Process({:?})", self.space.id())
    }
}

/// A place at which CPUs wait for lines of other CPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HotPlace {
    /// The type that contains the line, or `other`.
    pub of: String,
    /// The source file, from the subsystem's `src/` on.
    pub file: String,
    /// The line in the source file.
    pub line: u32,
    /// The number of transfers of cache lines.
    pub transfers: u64,
    /// The waiting time of CPUs, in picoseconds.
    pub waited: Time,
}

impl Virtual {
    /// Creates a machine with the costs of `profile`. With more CPUs than the profile has, the
    /// machine has more sockets of the same kind.
    ///
    /// # Errors
    /// `EINVAL` for a configuration out of range, `ENOMEM` if memory is insufficient.
    pub fn new(profile: &Profile, config: Config) -> Result<Self, faultless::Errno> {
        if config.cpus == 0 || config.cpus > MAX_CPUS {
            return Err(faultless::Errno::EINVAL);
        }
        let simulation = Rc::new(Simulation::new(profile, config.cpus, config.seed));
        // Each socket has a part of the memory, up to the maximum number of nodes.
        let nodes = if config.slow_bytes == 0 { simulation.sockets().min(MAX_NODES) } else { 1 };
        let memory = Memory::tiered(config.memory_bytes, nodes, config.slow_bytes)?;
        let contents = Contents::new(memory);
        // The subsystem only accesses frames that are tables.
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
        Ok(Self { vm, rates, profile, window: RefCell::new(None), one_thread: PhantomData })
    }

    /// Returns the name of its profile.
    pub fn profile(&self) -> &str {
        &self.profile
    }

    pub(crate) fn machine(&self) -> &VirtualMachine {
        self.vm.machine()
    }

    pub(crate) fn rates(&self) -> &Rates {
        &self.rates
    }

    /// Returns the number of CPUs.
    pub fn cpus(&self) -> usize {
        faultless_observed::Machine::cpus(self.machine())
    }

    /// Sets a knob, as `name=value`.
    ///
    /// # Errors
    /// Describes an invalid setting.
    pub fn set(&self, setting: &str) -> Result<(), String> {
        let setting: Setting = setting.parse().map_err(|error| format!("{setting}: {error}"))?;
        self.vm.set(setting);
        Ok(())
    }

    /// Returns the subsystem's counters so far, by name.
    pub fn counters(&self) -> Vec<(&'static str, u64)> {
        named(&self.vm.totals())
    }

    /// Returns the subsystem's counters of one CPU.
    pub fn counters_of(&self, cpu: usize) -> Vec<(&'static str, u64)> {
        named(&self.vm.totals_of(CpuId(cpu as u16)))
    }

    /// Lets idle CPUs zero free frames in advance, up to the knob `zeroed_pool`.
    pub fn zero_ahead(&self) {
        self.quietly(|cpu| while cpu.zero_ahead(usize::MAX) != 0 {});
    }

    /// Returns the number of frames of memory.
    pub fn frames(&self) -> u64 {
        self.vm.total_frames()
    }

    fn cpu(&self, number: usize) -> Cpu<'_, VirtualMachine> {
        // SAFETY: `run` and `alone`, which cannot run at the same time (one thread), have one `Cpu`
        // of each number.
        unsafe { self.vm.cpu(CpuId(number as u16)) }
    }

    /// Creates an empty process.
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

    /// Creates a file of `bytes` bytes, in whole pages, of zeros.
    ///
    /// # Errors
    /// `EFBIG`, `ENOMEM`.
    pub fn file(&self, bytes: u64) -> Result<File, Stop> {
        let made = self.quietly(|cpu| Object::try_new(cpu, bytes / PAGE_SIZE, FILE_TAG));
        made.map(|object| File { object }).map_err(|errno| refused_file(bytes, errno))
    }

    /// Creates a file of `bytes` bytes, in whole pages, on a disk. Its pages are read on demand,
    /// and evicted when memory is short. Each page starts with its number in the file.
    ///
    /// # Errors
    /// `EFBIG`, `ENOMEM`.
    pub fn stored_file(&self, bytes: u64) -> Result<File, Stop> {
        let disk = Arc::new(Disk::new(Rc::clone(&self.machine().simulation), bytes));
        let made = self.quietly(|cpu| Object::of_store(cpu, disk, FILE_TAG));
        made.map(|object| File { object }).map_err(|errno| refused_file(bytes, errno))
    }

    /// Returns the TLB statistics of all CPUs so far.
    pub fn tlb_stats(&self) -> TlbStats {
        self.machine().tlb_stats()
    }

    /// Returns the frames that are not free.
    pub fn used_frames(&self) -> u64 {
        self.vm.total_frames() - self.vm.free_frames()
    }

    /// Deletes a file that no process maps any more.
    pub fn delete(&self, file: File) {
        self.quietly(|cpu| Object::release(file.object, cpu));
    }

    /// Runs `what` on a CPU without advancing time.
    fn quietly<R>(&self, what: impl FnOnce(&Cpu<'_, VirtualMachine>) -> R) -> R {
        assert!(!self.machine().simulation.is_running(), "a call from outside while CPUs run");
        self.machine().simulation.enter(|| what(&self.cpu(0)))
    }

    /// Runs one thread in `process` without accounting, for preparation and checks of a program.
    /// The time passes without being accounted.
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

    /// Runs `threads` threads, all from the same time on, each on a separate CPU; thread `number`
    /// runs in `process(number)`. Results are in the order of the numbers.
    ///
    /// # Panics
    /// With more threads than CPUs, and if all CPUs wait for each other.
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

    /// Runs `cpus` CPUs, all from the same time on, which enter and leave processes in `body`.
    /// Results are in the order of the numbers.
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

    /// Measures the following run in its steady window: the time in which all of the first `cpus`
    /// CPUs [work](VirtualCpu::begin_work), each after `warm_up` calls and faults. Only waits and
    /// times of operations in this window are recorded.
    pub fn measure_steady(&self, cpus: usize, warm_up: u64) {
        self.window.replace(Some(Window::new(cpus, warm_up)));
        self.machine().simulation.set_recording(false);
    }

    /// Returns the counts of the steady window, if one was [requested](Self::measure_steady).
    pub fn steady(&self) -> Option<Steady> {
        self.window.borrow().as_ref().map(Window::steady)
    }

    /// Applies `change` to the steady window, if any, at the time of the running CPU `cpu`.
    pub(crate) fn in_window(&self, cpu: CpuId, change: impl FnOnce(&mut Window, usize, Time)) {
        let mut window = self.window.borrow_mut();
        let Some(window) = &mut *window else { return };
        let simulation = &self.machine().simulation;
        change(window, cpu.index(), simulation.now());
        if window.is_due() {
            let counters = simulation.unobserved(|| self.counters());
            window.turn(Moment { at: simulation.now(), accounts: self.accounts(), counters });
            simulation.set_recording(window.is_open());
        }
    }

    /// Returns the activity of all CPUs so far.
    pub fn accounts(&self) -> Accounts {
        let mut all = Accounts::default();
        (0..self.cpus()).for_each(|cpu| all += self.machine().simulation.accounts(cpu));
        all
    }

    /// Returns the activity of one CPU so far.
    pub fn accounts_of(&self, cpu: usize) -> Accounts {
        self.machine().simulation.accounts(cpu)
    }

    /// Returns the times of operations of this kind, in picoseconds, including kernel entry;
    /// unsorted.
    pub fn latencies(&self, operation: Operation) -> Vec<Time> {
        self.machine().simulation.log.latencies(operation)
    }

    /// Returns the accesses of operations to cache lines since the last call, in order. The first
    /// call starts the collection.
    pub fn take_line_uses(&self) -> Vec<LineUse> {
        self.machine().simulation.log.take_uses()
    }

    /// Clears the recorded hot places.
    pub fn cool(&self) {
        self.machine().simulation.lines().cool();
    }

    /// Returns the places of the longest waits of CPUs for lines of other CPUs, since
    /// [`cool`](Self::cool).
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

    /// Runs the subsystem's audit while no thread runs. `processes` are all existing processes.
    ///
    /// # Errors
    /// Describes an inconsistency.
    pub fn audit(&self, processes: &[&Process]) -> Result<(), String> {
        self.audit_with(processes, &[])
    }

    /// Audits like [`audit`](Self::audit), with existing references to `objects`.
    ///
    /// # Errors
    /// Describes an inconsistency.
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

/// Returns a type's name without its paths.
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
