//! The subsystem on the virtual machine, as a system for programs: all times are *simulated*.
//!
//! A worker is a simulated CPU. All start their work at the same moment, when all have arrived.
//! Preparation, checks and work done aside are not accounted: after a run on an unused machine, its
//! [`accounts`](Virtual::accounts) and [hottest places](Virtual::hottest) are those of the work
//! alone. User time is the time of a CPU in the program, with page walks. All other time is system
//! time, including waits for other CPUs.
//!
//! After [`Virtual::measure_steady`], the work of each worker is also measured in the steady
//! window.
//!
//! The same program with the same seed gives the same figures, to the last digit. A program must
//! therefore wait for another worker only in [`Task::rest`]. Data in memory of the host (counts,
//! flags) has no simulated cost.
//!
//! Files are in memory from the start, so faults on them do not read, except for files of numbers,
//! which are on a disk.

use crate::file::{Contents, FileSpec};
use crate::program::Program;
use crate::system::{Child, Crew, Failure, Footprint, Measured, Report, System, Task, Worker};
use faultless::{Advice, Counter, Errno, MapFlags, PAGE_SIZE, Prot, RemapFlags};
use faultless_virtual::{
    Accounts, File, Meeting, Process, Spent, Stop, TlbStats, Virtual, VirtualCpu,
};

/// Picoseconds in a second.
const SECOND: f64 = 1e12;

impl From<Stop> for Failure {
    fn from(stop: Stop) -> Self {
        match stop {
            Stop::Refused { call, addr, len, errno } => Self::Refused { call, addr, len, errno },
            Stop::Signal { addr, error } => {
                Self::Access { access: "access", addr, reason: Stop::reason(error) }
            }
        }
    }
}

/// Returns the failure of an access.
#[cold]
fn access(access: &'static str, stop: Stop) -> Failure {
    match stop.into() {
        Failure::Access { addr, reason, .. } => Failure::Access { access, addr, reason },
        failure => failure,
    }
}

/// A thread on a CPU of the virtual machine.
#[derive(Debug)]
pub struct VirtualTask<'t, 'a> {
    cpu: &'t mut VirtualCpu<'a>,
    files: &'t [File],
    /// The time limit of the crew, in picoseconds of the CPU's clock.
    deadline: u64,
    aside: Aside,
    /// The times of allocations, in picoseconds.
    allocations: Vec<u64>,
    footprint: Footprint,
}

/// Work of a worker off the clock.
#[derive(Debug, Default)]
struct Aside {
    picoseconds: u64,
    /// The counts of its CPU.
    counts: Vec<u64>,
}

impl<'t, 'a> VirtualTask<'t, 'a> {
    fn new(cpu: &'t mut VirtualCpu<'a>, files: &'t [File], deadline: u64) -> Self {
        Self {
            cpu,
            files,
            deadline,
            aside: Aside::default(),
            allocations: Vec::new(),
            footprint: Footprint::default(),
        }
    }
}

impl Task for VirtualTask<'_, '_> {
    fn mmap(
        &mut self,
        at: impl Into<Option<u64>>,
        len: u64,
        prot: Prot,
        flags: MapFlags,
    ) -> Result<u64, Failure> {
        Ok(self.cpu.mmap(at, len, prot, flags)?)
    }

    fn mmap_file(
        &mut self,
        file: usize,
        place: (Option<u64>, u64),
        prot: Prot,
        flags: MapFlags,
        offset: u64,
    ) -> Result<u64, Failure> {
        Ok(self.cpu.mmap_file(&self.files[file], place, prot, flags, offset)?)
    }

    fn munmap(&mut self, addr: u64, len: u64) -> Result<(), Failure> {
        Ok(self.cpu.munmap(addr, len)?)
    }

    fn mprotect(&mut self, addr: u64, len: u64, prot: Prot) -> Result<(), Failure> {
        Ok(self.cpu.mprotect(addr, len, prot)?)
    }

    fn madvise(&mut self, addr: u64, len: u64, advice: Advice) -> Result<(), Failure> {
        Ok(self.cpu.madvise(addr, len, advice)?)
    }

    fn mremap(&mut self, addr: u64, len: u64, new_len: u64) -> Result<u64, Failure> {
        Ok(self.cpu.mremap((addr, len), new_len, RemapFlags::MAYMOVE, 0)?)
    }

    fn brk(&mut self, addr: u64) -> u64 {
        self.cpu.brk(addr)
    }

    #[inline]
    fn load(&mut self, addr: u64) -> Result<u64, Failure> {
        self.cpu.load(addr).map_err(|stop| access("load", stop))
    }

    #[inline]
    fn store(&mut self, addr: u64, value: u64) -> Result<(), Failure> {
        self.cpu.store(addr, value).map_err(|stop| access("store", stop))
    }

    fn copy(&mut self, to: u64, from: u64, len: u64) -> Result<(), Failure> {
        self.cpu.copy(to, from, len).map_err(|stop| access("copy", stop))
    }

    fn call(&mut self, addr: u64) -> Result<(), Failure> {
        self.cpu.fetch(addr).map_err(|stop| access("call", stop))
    }

    fn fork<C: Child>(&mut self, child: C) -> Result<(), Failure> {
        let process = self.cpu.fork()?;
        let (files, deadline) = (self.files, self.deadline);
        let body =
            |cpu: &mut VirtualCpu<'_>| child.run(&mut VirtualTask::new(cpu, files, deadline));
        let result = self.cpu.switch(&process, body);
        self.cpu.exit(process);
        result
    }

    fn aside<R>(&mut self, what: impl FnOnce(&mut Self) -> R) -> R {
        let (begin, before) = (self.cpu.now(), self.cpu.counters());
        let was = self.cpu.set_aside(true);
        let result = what(self);
        self.cpu.set_aside(was);
        self.aside.picoseconds += self.cpu.now() - begin;
        let counts = since(&self.cpu.counters(), &before);
        self.aside.counts.resize(counts.len(), 0);
        self.aside.counts.iter_mut().zip(counts).for_each(|(sum, (_, count))| *sum += count);
        result
    }

    fn allocate(&mut self, addr: u64, value: u64) -> Result<(), Failure> {
        let begin = self.cpu.now();
        let stored = self.store(addr, value);
        self.allocations.push(self.cpu.now() - begin);
        stored
    }

    fn background(&mut self, promoted: u64) {
        self.cpu.as_kernel(|cpu| {
            cpu.reclaim_ahead();
            cpu.balance(promoted);
        });
        self.footprint.note(self.cpu.used_frames());
    }

    fn rest(&mut self, looks: u32) {
        self.cpu.rest(looks);
    }

    #[inline]
    fn expired(&self) -> bool {
        self.cpu.now() >= self.deadline
    }
}

/// Returns the counts since `before`, by name.
fn since(now: &[(&'static str, u64)], before: &[(&'static str, u64)]) -> Vec<(&'static str, u64)> {
    now.iter().zip(before).map(|((name, now), (_, before))| (*name, now - before)).collect()
}

impl System for Virtual {
    fn machine(&self) -> String {
        format!("simulated-{}", self.profile())
    }

    fn run<P: Program>(&self, program: &P, crew: &Crew) -> Result<Measured, Failure> {
        if crew.workers > self.cpus() {
            let errno = Errno::EAGAIN.number();
            return Err(Failure::Refused { call: "clone", addr: 0, len: 0, errno });
        }
        let files = program.files(crew);
        let files = files.iter().map(|spec| open(self, spec)).collect::<Result<Vec<_>, _>>()?;
        let ran = run(self, program, crew, &files);
        files.into_iter().for_each(|file| self.delete(file));
        ran
    }
}

/// Creates a file.
fn open(system: &Virtual, spec: &FileSpec) -> Result<File, Failure> {
    if spec.contents == Contents::Numbers {
        return Ok(system.stored_file(spec.bytes)?);
    }
    let file = system.file(spec.bytes)?;
    if spec.contents == Contents::Code {
        // The functions are never executed: a fetch reads no data.
        let loader = system.process()?;
        let written = system.alone(&loader, |cpu| {
            let all = (None, spec.bytes);
            let at = cpu.mmap_file(&file, all, Prot::READ | Prot::WRITE, MapFlags::SHARED, 0)?;
            for page in 0..spec.bytes / PAGE_SIZE {
                cpu.store(at + page * PAGE_SIZE, page)?;
            }
            Ok::<_, Stop>(())
        });
        system.exit(loader);
        written?;
    }
    Ok(file)
}

/// Runs the program in new processes.
fn run<P: Program>(
    system: &Virtual,
    program: &P,
    crew: &Crew,
    files: &[File],
) -> Result<Measured, Failure> {
    let mut processes = Vec::new();
    for _ in 0..crew.processes() {
        processes.push(system.process()?);
    }
    let ran = in_processes(system, program, crew, files, &processes);
    processes.into_iter().for_each(|process| system.exit(process));
    let (mut measured, before) = ran?;
    // Unused prefaulted pages are detected when the processes end.
    let ended = since(&system.counters(), &before);
    for (name, count) in &mut measured.counters {
        if *name == Counter::PrefaultWasted.name() {
            *count = named(&ended, name);
        } else if *name == Counter::Faults.name() {
            measured.faults = *count;
        }
    }
    Ok(measured)
}

fn named(counts: &[(&'static str, u64)], name: &str) -> u64 {
    counts.iter().find(|(known, _)| *known == name).map_or(0, |(_, count)| *count)
}

/// The results of a run, and the counts before it.
type Ran = (Measured, Vec<(&'static str, u64)>);

fn in_processes<P: Program>(
    system: &Virtual,
    program: &P,
    crew: &Crew,
    files: &[File],
    processes: &[Process],
) -> Result<Ran, Failure> {
    const NEVER: u64 = u64::MAX;
    let mut states = Vec::with_capacity(processes.len());
    for process in processes {
        let prepare =
            |cpu: &mut VirtualCpu<'_>| program.prepare(&mut VirtualTask::new(cpu, files, NEVER));
        states.push(system.alone(process, prepare)?);
    }

    let (before, walks) = (system.counters(), system.tlb_stats());
    let limit = crew.limit.map(|limit| limit.as_nanos() as u64 * 1000);
    let meeting = Meeting::of(crew.workers);
    let accounts: Vec<_> = (0..crew.workers).map(|cpu| system.accounts_of(cpu)).collect();
    let of = |index: usize| index % processes.len();
    let reports = system.run(
        crew.workers,
        |index| &processes[of(index)],
        |cpu, index| {
            cpu.meet(&meeting);
            let begin = cpu.now();
            let deadline = limit.map_or(NEVER, |limit| begin.saturating_add(limit));
            let mut task = VirtualTask::new(cpu, files, deadline);
            let worker = Worker { index, count: crew.workers };
            task.cpu.begin_work();
            let tally = program.work(&mut task, &states[of(index)], worker);
            task.cpu.end_work();
            let VirtualTask { aside, allocations, footprint, .. } = task;
            tally.map(|tally| (tally, (begin, cpu.now()), aside, allocations, footprint))
        },
    );
    let mut counters = since(&system.counters(), &before);
    let tlb = tlb_since(system, &walks);
    counters.extend(tlb);
    let mut workers = Vec::with_capacity(crew.workers);
    let (mut allocations, mut footprint) = (Vec::new(), Footprint::default());
    for (index, (report, before)) in reports.into_iter().zip(&accounts).enumerate() {
        let (tally, span, aside, allocated, used) = report?;
        allocations.extend(allocated.into_iter().map(|time| time as f64 / 1000.0));
        footprint.merge(used);
        for ((_, count), aside) in counters.iter_mut().zip(&aside.counts) {
            *count = count.saturating_sub(*aside);
        }
        let (user, kernel) = times(&system.accounts_of(index), before);
        workers.push(Report {
            tally,
            user,
            system: kernel,
            span: (span.0 as f64 / SECOND, span.1 as f64 / SECOND),
            aside: aside.picoseconds as f64 / SECOND,
        });
    }

    for (index, (process, state)) in processes.iter().zip(&states).enumerate() {
        let worker = Worker { index, count: processes.len() };
        system.alone(process, |cpu| {
            program.finish(&mut VirtualTask::new(cpu, files, NEVER), state, worker)
        })?;
    }
    allocations.sort_unstable_by(f64::total_cmp);
    let measured = Measured { workers, counters, allocations, footprint, ..Measured::default() };
    Ok((measured, before))
}

/// Returns the counts of the TLBs since `before`, by name, including work done aside.
fn tlb_since(system: &Virtual, before: &TlbStats) -> Vec<(&'static str, u64)> {
    let now = system.tlb_stats().named();
    now.into_iter().zip(before.named()).map(|((name, now), (_, then))| (name, now - then)).collect()
}

/// Returns the seconds in the program and in the system since `before`.
fn times(now: &Accounts, before: &Accounts) -> (f64, f64) {
    let spent = |on: Spent| now.spent[on as usize] - before.spent[on as usize];
    let all: u64 = Spent::ALL.map(spent).iter().sum();
    let user = spent(Spent::Program);
    (user as f64 / SECOND, (all - user) as f64 / SECOND)
}
