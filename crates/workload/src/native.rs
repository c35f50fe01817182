//! The subsystem on its native machine, as a system for programs.
//!
//! A worker is a thread of the host on a CPU of the machine; in [`Mode::Processes`] each has a
//! separate address space. The current settings of the machine apply to the run, so the caller
//! changes them between runs. Counters are those of the subsystem and the machine's TLBs, from the
//! common start to the end of the last worker, without work done aside. `prefault_wasted` extends
//! to the end of the processes, which reveals the unused pages. Processor time is the host's count
//! for the threads. Nearly all of it is user time, because the subsystem itself runs in user mode
//! here.
//!
//! A run needs a CPU for each worker, and exclusive use of the machine, because workers wait for
//! each other on their CPUs.

use crate::file::FileSpec;
use crate::host::{Usage, now, rest, thread_usage};
use crate::program::Program;
use crate::start::Start;
use crate::system::{
    Child, Crew, Failure, Footprint, Measured, Mode, Report, System, Task, Worker,
};
use faultless::Counter;
use faultless::{
    Access, Advice, Backing, Errno, Error, Machine, MapFlags, Object, PAGE_SIZE, Prot, RemapFlags,
    Shared, Totals,
};
use faultless_native::{HostFile, Native, NativeCpu, Process, Signal, Stop, TlbStats};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let (addr, len) = (error.range.start, error.range.len());
        Self::Refused { call: error.operation, addr, len, errno: error.errno.number() }
    }
}

impl From<Stop> for Failure {
    fn from(stop: Stop) -> Self {
        match stop {
            Stop::Signal(signal) => access("access", signal),
            Stop::Refused(error) => error.into(),
        }
    }
}

/// Returns the failure of an access that received `signal`.
#[cold]
fn access(access: &'static str, signal: Signal) -> Failure {
    let (addr, reason) = match signal {
        Signal::Segv { addr, mapped: true } => (addr, "SIGSEGV (SEGV_ACCERR)"),
        Signal::Segv { addr, mapped: false } => (addr, "SIGSEGV (SEGV_MAPERR)"),
        Signal::Bus { addr } => (addr, "SIGBUS"),
        Signal::OutOfMemory { addr } => (addr, "out of memory"),
    };
    Failure::Access { access, addr, reason }
}

/// A thread on a CPU of the native machine.
#[derive(Debug)]
pub struct NativeTask<'t, 'a, 'n> {
    cpu: &'t mut NativeCpu<'a, 'n>,
    start: &'t Start,
    files: &'t Files,
    aside: Aside,
    told: Told,
}

/// Results of a worker beside its report.
#[derive(Debug, Default)]
struct Told {
    /// Nanoseconds.
    allocations: Vec<f64>,
    footprint: Footprint,
}

/// Work of a worker off the clock.
#[derive(Debug, Default)]
struct Aside {
    seconds: f64,
    usage: Usage,
    /// The counts of its CPU, in the order of [`Counted::since`].
    counts: Vec<u64>,
}

impl Aside {
    fn count(&mut self, from: &Counted, to: &Counted) {
        let counts = to.since(from);
        self.counts.resize(counts.len(), 0);
        self.counts.iter_mut().zip(counts).for_each(|(sum, (_, count))| *sum += count);
    }

    /// Subtracts this worker's counts off the clock from the counts of the machine.
    fn taken_from(&self, counted: &mut [(&'static str, u64)]) {
        for ((_, count), aside) in counted.iter_mut().zip(&self.counts) {
            *count = count.saturating_sub(*aside);
        }
    }
}

/// The counts of the subsystem and the TLBs, on one CPU or all.
struct Counted {
    subsystem: Totals,
    tlb: TlbStats,
}

impl Counted {
    fn of_all(native: &Native) -> Self {
        Self { subsystem: native.vm().totals(), tlb: native.machine().total_tlb_stats() }
    }

    /// Returns the counts since `before`, by name.
    fn since(&self, before: &Self) -> Vec<(&'static str, u64)> {
        let subsystem = self.subsystem.since(&before.subsystem);
        let subsystem = subsystem.iter().map(|(counter, count)| (counter.name(), count));
        let tlb = self.tlb.named().into_iter().zip(before.tlb.named());
        subsystem.chain(tlb.map(|((name, now), (_, then))| (name, now - then))).collect()
    }
}

impl<'t, 'a, 'n> NativeTask<'t, 'a, 'n> {
    fn new(cpu: &'t mut NativeCpu<'a, 'n>, start: &'t Start, files: &'t Files) -> Self {
        Self { cpu, start, files, aside: Aside::default(), told: Told::default() }
    }

    /// Returns the counts of the CPU so far.
    fn counted(&self) -> Counted {
        let (native, id) = (self.cpu.native(), self.cpu.id());
        Counted { subsystem: native.vm().totals_of(id), tlb: native.machine().tlb_stats(id) }
    }
}

impl Task for NativeTask<'_, '_, '_> {
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
        (at, len): (Option<u64>, u64),
        prot: Prot,
        flags: MapFlags,
        offset: u64,
    ) -> Result<u64, Failure> {
        let object = &self.files.0[file];
        let backing = Backing { object, first: offset / PAGE_SIZE, may_write: true };
        let cpu = &self.cpu;
        Ok(cpu.running().space().mmap_object(cpu.cpu(), at, len, prot, flags, backing)?)
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
        Ok(self.cpu.mremap(addr, len, new_len, RemapFlags::MAYMOVE, 0)?)
    }

    fn brk(&mut self, addr: u64) -> u64 {
        self.cpu.brk(addr)
    }

    #[inline]
    fn load(&mut self, addr: u64) -> Result<u64, Failure> {
        self.cpu.load(addr).map_err(|signal| access("load", signal))
    }

    #[inline]
    fn store(&mut self, addr: u64, value: u64) -> Result<(), Failure> {
        self.cpu.store(addr, value).map_err(|signal| access("store", signal))
    }

    fn copy(&mut self, to: u64, from: u64, len: u64) -> Result<(), Failure> {
        self.cpu.copy(to, from, len).map_err(|signal| access("copy", signal))
    }

    fn call(&mut self, addr: u64) -> Result<(), Failure> {
        self.cpu.touch(addr, Access::Execute).map_err(|signal| access("call", signal))
    }

    fn fork<C: Child>(&mut self, child: C) -> Result<(), Failure> {
        let process = self.cpu.fork()?;
        let (start, files) = (self.start, self.files);
        let result =
            self.cpu.switch(&process, |cpu| Ok(child.run(&mut NativeTask::new(cpu, start, files))));
        self.cpu.exit(process);
        result?
    }

    fn aside<R>(&mut self, what: impl FnOnce(&mut Self) -> R) -> R {
        let (begin, before, counted) = (now(), thread_usage(), self.counted());
        let result = what(self);
        self.aside.count(&counted, &self.counted());
        self.aside.usage += thread_usage().since(before);
        self.aside.seconds += now() - begin;
        result
    }

    fn allocate(&mut self, addr: u64, value: u64) -> Result<(), Failure> {
        let begin = Instant::now();
        let stored = self.store(addr, value);
        self.told.allocations.push(begin.elapsed().as_nanos() as f64);
        stored
    }

    fn background(&mut self, promoted: u64) {
        let cpu = self.cpu.cpu();
        cpu.reclaim_ahead();
        cpu.balance(promoted);
        let vm = cpu.vm();
        self.told.footprint.note(vm.total_frames() - vm.free_frames());
    }

    fn rest(&mut self, looks: u32) {
        self.cpu.poll();
        rest(looks);
    }

    #[inline]
    fn expired(&self) -> bool {
        self.start.expired()
    }
}

impl System for Native {
    fn machine(&self) -> String {
        "native".into()
    }

    fn run<P: Program>(&self, program: &P, crew: &Crew) -> Result<Measured, Failure> {
        if crew.workers > self.machine().cpus() {
            let errno = Errno::EAGAIN.number();
            return Err(Failure::Refused { call: "clone", addr: 0, len: 0, errno });
        }
        let files = Files::open(self, &program.files(crew))?;
        let run = Run { program, start: &Start::default(), files: &files };
        let spaces = match crew.mode {
            Mode::Threads => 1,
            Mode::Processes => crew.workers,
        };
        let mut prepared = Vec::with_capacity(spaces);
        for _ in 0..spaces {
            let process = self.process()?;
            let state = run.alone(&process, |task| program.prepare(task))?;
            prepared.push((process, state));
        }

        let mut before = Counted::of_all(self);
        let reports: Result<Vec<Worked>, Failure> = std::thread::scope(|scope| {
            let mut threads = Vec::with_capacity(crew.workers);
            for index in 0..crew.workers {
                let worker = Worker { index, count: crew.workers };
                let (process, state) = &prepared[index % spaces];
                let run = &run;
                let builder = std::thread::Builder::new().name(format!("worker {index}"));
                match builder.spawn_scoped(scope, move || run.work(process, state, worker)) {
                    Ok(thread) => threads.push(thread),
                    Err(error) => {
                        run.start.dismiss();
                        let errno = error.raw_os_error().unwrap_or(Errno::EAGAIN.number());
                        return Err(Failure::Refused { call: "clone", addr: 0, len: 0, errno });
                    }
                }
            }
            run.start.conduct(crew.limit, || crew.workers, || before = Counted::of_all(self));
            let joined = threads
                .into_iter()
                .enumerate()
                .map(|(worker, thread)| thread.join().unwrap_or(Err(Failure::Lost { worker })));
            joined.collect()
        });
        let mut counters = Counted::of_all(self).since(&before);
        let mut workers = Vec::with_capacity(crew.workers);
        let (mut allocations, mut footprint) = (Vec::new(), Footprint::default());
        for (report, aside, told) in reports? {
            workers.push(report);
            aside.taken_from(&mut counters);
            allocations.extend(told.allocations);
            footprint.merge(told.footprint);
        }
        allocations.sort_unstable_by(f64::total_cmp);
        let left = files.left(prepared.iter().map(|(process, _)| process))?;

        for (index, (process, state)) in prepared.iter().enumerate() {
            let of = Worker { index, count: spaces };
            run.alone(process, |task| program.finish(task, state, of))?;
        }
        drop(prepared);
        let ended = self.vm().totals().since(&before.subsystem);
        let mut faults = 0;
        for (name, count) in &mut counters {
            if *name == Counter::Faults.name() {
                faults = *count;
            } else if *name == Counter::PrefaultWasted.name() {
                *count = ended.get(Counter::PrefaultWasted);
            }
        }
        files.close(self)?;
        Ok(Measured { workers, faults, counters, left, allocations, footprint })
    }
}

/// The files of a run: each is a file of the host, and its object, which all processes map.
#[derive(Debug, Default)]
struct Files(Vec<Shared<Object>>);

impl Files {
    fn open(native: &Native, specs: &[FileSpec]) -> Result<Self, Failure> {
        if specs.is_empty() {
            return Ok(Self::default());
        }
        let refused = |call, errno: Errno, spec: &FileSpec| Failure::Refused {
            call,
            addr: 0,
            len: spec.bytes,
            errno: errno.number(),
        };
        native.process()?.run(|cpu| {
            let open = |(spec, tag): (&FileSpec, u64)| {
                let store = HostFile::new(spec.make()?).map_err(|e| refused("open", e, spec))?;
                Object::of_store(cpu.cpu(), Arc::new(store), tag)
                    .map_err(|errno| refused("open", errno, spec))
            };
            Ok(specs.iter().zip(1..).map(open).collect::<Result<_, _>>().map(Self))
        })?
    }

    /// Returns the number of pages of the files in memory, and the number of frames mapped by more
    /// than one process.
    fn left<'p, 'n: 'p>(
        &self,
        processes: impl Iterator<Item = &'p Process<'n>> + Clone,
    ) -> Result<Vec<(&'static str, u64)>, Failure> {
        let (Some(one), false) = (processes.clone().next(), self.0.is_empty()) else {
            return Ok(Vec::new());
        };
        Ok(one.run(|cpu| {
            let cpu = cpu.cpu();
            let pages = self.0.iter().map(|file| file.resident_pages(cpu)).sum();
            let mut mapped = HashMap::new();
            for process in processes {
                let mut areas = Vec::new();
                process.space().areas(cpu, |area| {
                    areas.extend((area.tag != 0).then_some(area.range));
                });
                let addresses = areas
                    .iter()
                    .flat_map(|area| (area.start..area.end).step_by(PAGE_SIZE as usize));
                let frame = |addr| process.space().page_at(cpu, addr).map(|found| found.frame);
                // A frame mapped twice by the same process counts once.
                for frame in addresses.filter_map(frame).collect::<HashSet<_>>() {
                    *mapped.entry(frame).or_insert(0) += 1;
                }
            }
            let shared = mapped.values().filter(|&&processes| processes > 1).count() as u64;
            Ok(vec![("file_pages", pages), ("shared_frames", shared)])
        })?)
    }

    /// Deletes the files. Stored data is dropped without being written to the host's files.
    fn close(self, native: &Native) -> Result<(), Failure> {
        if self.0.is_empty() {
            return Ok(());
        }
        Ok(native.process()?.run(|cpu| {
            for file in self.0 {
                // Data that is not truncated would be written, which takes longer.
                let _ = file.set_len(cpu.cpu(), 0);
                Object::release(file, cpu.cpu());
            }
            Ok(())
        })?)
    }
}

/// The results of a worker.
type Worked = (Report, Aside, Told);

/// A run of a program.
struct Run<'a, P> {
    program: &'a P,
    start: &'a Start,
    files: &'a Files,
}

impl<P: Program> Run<'_, P> {
    /// Runs `body` in `process`, without any other worker.
    fn alone<R>(
        &self,
        process: &Process<'_>,
        body: impl FnOnce(&mut NativeTask<'_, '_, '_>) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        process.run(|cpu| Ok(body(&mut NativeTask::new(cpu, self.start, self.files))))?
    }

    /// Runs a worker: waits for the others, works, and reports.
    fn work(
        &self,
        process: &Process<'_>,
        state: &P::State,
        worker: Worker,
    ) -> Result<Worked, Failure> {
        let measured = process.run(|cpu| {
            self.start.arrive(|| cpu.poll());
            let _done = self.start.until_done();
            let mut task = NativeTask::new(cpu, self.start, self.files);
            let (before, begin) = (thread_usage(), now());
            let tally = self.program.work(&mut task, state, worker);
            let span = (begin, now());
            let (aside, told) = (task.aside, task.told);
            let Usage { user, system, .. } = thread_usage().since(before).since(aside.usage);
            let report = |tally| Report { tally, user, system, span, aside: aside.seconds };
            Ok(tally.map(report).map(|report| (report, aside, told)))
        });
        match measured {
            Ok(result) => result,
            Err(stop) => {
                // Without a CPU the worker has not arrived.
                self.start.absent();
                Err(stop.into())
            }
        }
    }
}
