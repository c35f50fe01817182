//! Executes a [`Plan`] on the native machine. Each recorded thread has a host thread, which runs at
//! full speed on a separate CPU, and waits only for the operations named by the plan.
//!
//! A recorded process is a process of the machine, from the operation that creates it to its last
//! thread's exit. A thread releases its CPU while it waits.
//!
//! The mappings and resident pages of processes that ran before the recording are restored one
//! process after the other, before anything is measured.
//!
//! Every touch must succeed. A signal means that the plan or the subsystem is wrong, and ends the
//! replay with an error that names the operation.

use super::act::{Departures, act};
use super::gate::Gate;
use crate::sample::Sample;
use faultless::{Counter, ThreadStreams, Totals};
use faultless_native::{Native, NativeCpu, Process, Stop};
use faultless_trace::bound::{Done, Took};
use faultless_trace::plan::{At, Op, Plan, Thread};
use nix::sys::resource::{UsageWho, getrusage};
use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, Scope};
use std::time::Instant;

/// Host threads run a loop without recursion.
const STACK: usize = 256 << 10;
/// The number of checks of a gate before the thread releases its CPU to wait.
const LOOKS: u32 = 256;

/// The result of a replay.
#[derive(Clone, Debug)]
pub struct Replayed {
    /// The measurements. Operations are those of the plan.
    pub sample: Sample,
    /// Omitted `madvise` calls: advice unknown to the subsystem, or refused for anonymous memory
    /// that represents a file.
    pub advice_ignored: u64,
    /// Mappings larger than the machine's memory, mapped as with `MAP_NORESERVE`. The recorded
    /// machine had enough memory to reserve them.
    pub unreserved: u64,
    /// Whether the whole plan was executed, without an early stop.
    pub complete: bool,
}

/// An operation that did not succeed as recorded.
#[derive(Clone, Debug, thiserror::Error)]
#[error("thread {} ({}), operation {op}: {why}", .thread.0, .thread.1)]
pub struct ReplayError {
    /// The thread, by number and name.
    pub thread: (u32, String),
    /// The number of the operation in its thread.
    pub op: u32,
    /// The reason.
    pub why: String,
}

/// Replays `plan`. `stop` ends the replay early.
///
/// # Errors
/// The first operation that failed.
pub fn replay(native: &Native, plan: &Plan, stop: fn() -> bool) -> Result<Replayed, ReplayError> {
    run(native, plan, stop, None)
}

/// Observations of a replay of one operation at a time.
#[derive(Clone, Debug)]
pub struct Gauged {
    /// The replay.
    pub replayed: Replayed,
    /// The peak pages of each process, measured after each operation, added up over all processes.
    pub peak: u64,
    /// The operations in the order of execution, and their faults.
    pub done: Vec<Done>,
    /// The pages of all processes after each operation.
    pub resident: Vec<u64>,
}

/// Replays like [`replay`], with a measurement after each operation, on a machine with one CPU and
/// for a plan in the order of the recording. (With more CPUs a page might be counted twice while
/// its thread leaves a CPU.)
///
/// # Errors
/// As [`replay`].
pub fn replay_gauged(
    native: &Native,
    plan: &Plan,
    stop: fn() -> bool,
) -> Result<Gauged, ReplayError> {
    let gauge = Gauge::new(native, plan);
    let replayed = run(native, plan, stop, Some(&gauge))?;
    let Log { done, resident, .. } = gauge.log.into_inner().unwrap_or_else(PoisonError::into_inner);
    let peak = gauge.most.into_iter().map(AtomicU64::into_inner).sum();
    Ok(Gauged { replayed, peak, done, resident })
}

fn run(
    native: &Native,
    plan: &Plan,
    stop: fn() -> bool,
    gauge: Option<&Gauge>,
) -> Result<Replayed, ReplayError> {
    let replay = Replay {
        native,
        plan,
        gates: Gate::all(plan),
        gauge,
        interrupted: stop,
        failed: AtomicBool::new(false),
        failure: Mutex::new(None),
        operations: AtomicU64::new(0),
        departures: Departures::default(),
    };
    let spaces = replay.restore();
    let before = native.vm().totals();
    let (user, system) = processor_time();
    let began = Instant::now();
    std::thread::scope(|scope| replay.begin(scope, spaces));
    let wall = began.elapsed().as_secs_f64();
    let (user_after, system_after) = processor_time();
    if let Some(error) = replay.failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    let totals = native.vm().totals().since(&before);
    let operations = replay.operations.into_inner();
    Ok(Replayed {
        sample: Sample {
            operations,
            faults: totals.get(Counter::Faults),
            wall,
            user: user_after - user,
            system: system_after - system,
            counters: Sample::counters(&totals),
        },
        advice_ignored: replay.departures.advice_ignored.into_inner(),
        unreserved: replay.departures.unreserved.into_inner(),
        complete: operations == plan.op_count() as u64,
    })
}

/// Returns the seconds of processor time of this process so far, user and system.
fn processor_time() -> (f64, f64) {
    let seconds =
        |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    getrusage(UsageWho::RUSAGE_SELF)
        .map_or((0.0, 0.0), |usage| (seconds(usage.user_time()), seconds(usage.system_time())))
}

/// Measures after each operation.
#[derive(Debug)]
struct Gauge {
    /// The peak pages of each process, by its number in the plan.
    most: Vec<AtomicU64>,
    log: Mutex<Log>,
}

#[derive(Debug)]
struct Log {
    done: Vec<Done>,
    resident: Vec<u64>,
    /// For each process, its pages, and the number of its running threads.
    processes: Vec<(u64, usize)>,
    /// The counters after the previous operation.
    counted: Totals,
}

impl Gauge {
    fn new(native: &Native, plan: &Plan) -> Self {
        let done = Vec::with_capacity(plan.op_count());
        Self {
            most: plan.processes().iter().map(|_| AtomicU64::new(0)).collect(),
            log: Mutex::new(Log {
                done,
                resident: Vec::with_capacity(plan.op_count()),
                processes: plan.processes().iter().map(|it| (0, it.threads.len())).collect(),
                counted: native.vm().totals(),
            }),
        }
    }

    /// Records that the thread, which belongs to `process`, has executed `op`.
    fn look(&self, thread: u32, process: u32, cpu: &NativeCpu<'_, '_>, op: &Op) {
        let pages = cpu.running().space().resident_pages(cpu.cpu());
        self.most[process as usize].fetch_max(pages, Ordering::Relaxed);
        let counted = cpu.cpu().vm().totals();
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = counted.since(&log.counted);
        let took = match op {
            Op::Touch { .. } => took(|counter| taken.get(counter) > 0),
            _ => Took::Nothing,
        };
        log.done.push(Done { thread, took });
        let left = &mut log.processes[process as usize];
        left.1 -= usize::from(matches!(op, Op::Exit));
        // The space is destroyed with its last thread, and by an exec.
        let gone = left.1 == 0 || matches!(op, Op::Exec);
        left.0 = if gone { 0 } else { pages };
        let resident = log.processes.iter().map(|(pages, _)| pages).sum();
        log.resident.push(resident);
        log.counted = counted;
    }
}

/// Returns the kind of the fault of a touch, according to the counters that `counted` it.
fn took(counted: impl Fn(Counter) -> bool) -> Took {
    if !counted(Counter::Faults) {
        Took::Nothing
    } else if counted(Counter::AnonPage) || counted(Counter::ZeroPage) {
        Took::First
    } else if counted(Counter::CowCopy) {
        Took::Copy
    } else {
        Took::Other
    }
}

/// The reason for a thread to leave its CPU.
enum Pause {
    /// An operation of another thread must complete first.
    Wait(At),
    /// The process starts again, with an empty space.
    Exec,
    /// The thread exits. The last thread destroys the space of its process.
    Exit,
    /// All operations are complete, or the replay was stopped.
    End,
}

struct Replay<'r> {
    native: &'r Native,
    plan: &'r Plan,
    gates: Vec<Gate>,
    gauge: Option<&'r Gauge>,
    interrupted: fn() -> bool,
    failed: AtomicBool,
    failure: Mutex<Option<ReplayError>>,
    operations: AtomicU64,
    departures: Departures,
}

impl<'r> Replay<'r> {
    fn stopped(&self) -> bool {
        self.failed.load(Ordering::Relaxed) || (self.interrupted)()
    }

    /// Returns the initial threads of each process.
    fn initial(&self, process: usize) -> impl Iterator<Item = u32> {
        let threads = &self.plan.processes()[process].threads;
        threads.iter().copied().filter(|thread| self.thread(*thread).start.is_none())
    }

    /// Creates the initial processes, with their state from before the recording. The place of each
    /// is its number.
    fn restore(&self) -> Vec<Option<Arc<Process<'r>>>> {
        let create = |process: usize| {
            let first = self.initial(process).next()?;
            match self.native.process() {
                Ok(space) => {
                    self.initial(process).for_each(|thread| self.restore_as(thread, &space));
                    Some(Arc::new(space))
                }
                Err(error) => {
                    self.fail(first, 0, error);
                    None
                }
            }
        };
        (0..self.plan.processes().len()).map(create).collect()
    }

    /// Executes the operations of the thread `number` that restore the state of its `process`.
    fn restore_as(&self, number: u32, process: &Process<'r>) {
        let thread = self.thread(number);
        if thread.restoring() == 0 {
            return;
        }
        let at = Cell::new(0);
        let restored = process.run(|cpu| {
            for op in &thread.ops[..thread.restoring() as usize] {
                if self.stopped() {
                    break;
                }
                act(&*cpu, op, &self.departures)?;
                if let Some(gauge) = self.gauge {
                    gauge.look(number, thread.process, cpu, op);
                }
                at.set(at.get() + 1);
            }
            Ok(())
        });
        match restored {
            Ok(()) if at.get() > 0 => self.gates[number as usize].publish(at.get() - 1),
            Ok(()) => {}
            Err(stop) => self.fail(number, at.get(), stop),
        }
    }

    /// Starts the initial threads in `spaces`, which start the others.
    fn begin<'s>(&'s self, scope: &'s Scope<'s, '_>, spaces: Vec<Option<Arc<Process<'r>>>>)
    where
        'r: 's,
    {
        for (process, space) in spaces.into_iter().enumerate() {
            let Some(space) = space else { continue };
            self.initial(process).for_each(|thread| self.start(scope, thread, Arc::clone(&space)));
        }
    }

    fn thread(&self, number: u32) -> &'r Thread {
        &self.plan.threads()[number as usize]
    }

    /// Starts a host thread for the recorded thread `number`.
    fn start<'s>(&'s self, scope: &'s Scope<'s, '_>, number: u32, process: Arc<Process<'r>>)
    where
        'r: 's,
    {
        let builder = Builder::new().name(format!("replay {number}")).stack_size(STACK);
        let spawned = builder.spawn_scoped(scope, move || self.run(scope, number, process));
        if let Err(error) = spawned {
            self.fail(number, 0, format_args!("no host thread for it: {error}"));
        }
    }

    fn fail(&self, number: u32, op: u32, why: impl fmt::Display) {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.get_or_insert_with(|| ReplayError {
            thread: (number, self.thread(number).name.clone()),
            op,
            why: why.to_string(),
        });
        self.failed.store(true, Ordering::Relaxed);
    }

    /// Runs one thread, from its start to its exit.
    fn run<'s>(&'s self, scope: &'s Scope<'s, '_>, number: u32, mut process: Arc<Process<'r>>)
    where
        'r: 's,
    {
        let gate = &self.gates[number as usize];
        let restoring = self.thread(number).restoring();
        let awaited = gate.awaited().iter().copied();
        let mut awaited = awaited.skip_while(|op| *op < restoring).peekable();
        let mut complete = |op: u32| {
            if awaited.next_if_eq(&op).is_some() {
                gate.publish(op);
            }
        };
        let streams = ThreadStreams::new();
        let mut steps = (0u32..).zip(self.thread(number).steps()).skip(restoring as usize);
        let mut current = steps.next();
        loop {
            let paused = process.run_as(&streams, |cpu| {
                while let Some((index, (op, waits))) = &mut current {
                    if self.stopped() {
                        return Ok(Pause::End);
                    }
                    if let Some(on) = waits.find(|on| !self.await_briefly(cpu, *on)) {
                        return Ok(Pause::Wait(on));
                    }
                    if let Some(pause) = self.step(scope, number, (cpu, &process), op)? {
                        return Ok(pause);
                    }
                    complete(*index);
                    current = steps.next();
                }
                cpu.end_thread();
                Ok(Pause::End)
            });
            let at = current.as_ref().map(|(index, _)| *index);
            let outcome = match (paused, at) {
                (Ok(Pause::End), _) | (_, None) => break,
                (Ok(Pause::Wait(on)), _) => {
                    self.gates[on.thread as usize].wait(on.op, || self.stopped());
                    continue;
                }
                // Before any waiting thread proceeds, because other spaces share pages of this
                // space.
                (Ok(Pause::Exit), Some(index)) => {
                    drop(process);
                    complete(index);
                    current = steps.next();
                    break;
                }
                // The old space is destroyed with its last thread, which is this thread.
                (Ok(Pause::Exec), Some(index)) => {
                    self.native.process().map_err(Stop::from).map(|empty| {
                        process = Arc::new(empty);
                        complete(index);
                        current = steps.next();
                    })
                }
                (Err(stop), Some(_)) => Err(stop),
            };
            if let (Err(stop), Some(index)) = (outcome, at) {
                self.fail(number, index, stop);
                break;
            }
        }
        let done = current.map_or(self.thread(number).ops.len() as u64, |(index, _)| index.into());
        self.operations.fetch_add(done, Ordering::Relaxed);
    }

    /// Executes one operation of the thread `number`, which runs on `cpu` in `process`. Returns the
    /// reason if the thread must leave its CPU.
    #[inline]
    fn step<'s>(
        &'s self,
        scope: &'s Scope<'s, '_>,
        number: u32,
        (cpu, process): (&mut NativeCpu<'_, 'r>, &Arc<Process<'r>>),
        op: &Op,
    ) -> Result<Option<Pause>, Stop>
    where
        'r: 's,
    {
        let mut pause = None;
        match *op {
            Op::Exec => {
                cpu.end_thread();
                pause = Some(Pause::Exec);
            }
            Op::Exit => {
                cpu.end_thread();
                pause = Some(Pause::Exit);
            }
            Op::SpawnThread { thread } => {
                let process = Arc::clone(process);
                cpu.idle(|| self.start(scope, thread, process));
            }
            Op::Fork { child } => {
                let copy = cpu.fork()?;
                cpu.idle(|| self.start_process(scope, child, copy));
            }
            Op::Launch { child } => {
                let empty = cpu.process()?;
                cpu.idle(|| self.start_process(scope, child, empty));
            }
            _ => act(&*cpu, op, &self.departures)?,
        }
        if let Some(gauge) = self.gauge {
            gauge.look(number, self.thread(number).process, cpu, op);
        }
        Ok(pause)
    }

    /// Returns whether `on` has completed or completes soon. Serves requests of other CPUs during
    /// the wait.
    fn await_briefly(&self, cpu: &NativeCpu<'_, '_>, on: At) -> bool {
        let gate = &self.gates[on.thread as usize];
        gate.passed(on.op)
            || (0..LOOKS).any(|_| {
                cpu.poll();
                std::hint::spin_loop();
                gate.passed(on.op)
            })
    }

    /// Starts the first thread of the process `number`.
    fn start_process<'s>(&'s self, scope: &'s Scope<'s, '_>, number: u32, process: Process<'r>)
    where
        'r: 's,
    {
        if let Some(&first) = self.plan.processes()[number as usize].threads.first() {
            self.start(scope, first, Arc::new(process));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use faultless::{Locking, Setting};
    use faultless_native::{Checked, Config};
    use faultless_trace::event::Backing;
    use faultless_trace::event::{Access as Traced, Header, Prot as TracedProt, Recorded};
    use faultless_trace::event::{Birth, Event, Kind, ProcessInfo, ThreadInfo, Trace};
    use faultless_trace::recordings;

    /// Creates a machine on which each touched page is a fault.
    fn native(cpus: usize, memory_bytes: u64) -> Native {
        let checked = Checked::Panic;
        let native =
            Native::new(Config { memory_bytes, cpus, checked, ..Config::default() }).unwrap();
        native.vm().set(Setting::PrefaultMaxOrder(0));
        native
    }

    fn never() -> bool {
        false
    }

    /// Creates a plan of these `(thread, kind)` events, by threads of these processes.
    fn plan(processes: &[u32], events: &[(u32, Kind)]) -> Plan {
        Plan::new(&source(processes, events)).unwrap()
    }

    fn source(processes: &[u32], events: &[(u32, Kind)]) -> Trace {
        let count = processes.iter().max().map_or(0, |last| last + 1);
        let thread = |&process| ThreadInfo { process, name: "t".into() };
        let event =
            |(time_us, &(thread, kind)): (u64, &(u32, Kind))| Event { time_us, thread, kind };
        Trace {
            header: Header { page_size: 4096, recorded: Recorded::all(), ..Header::default() },
            processes: (0..count).map(|_| ProcessInfo { parent: None }).collect(),
            threads: processes.iter().map(thread).collect(),
            events: (0..).zip(events).map(event).collect(),
        }
    }

    const fn fault(page: u64, access: Traced) -> Kind {
        Kind::Fault { page, access, kernel: false, present: false, instruction: None }
    }

    fn map(start: u64, pages: u64, backing: Backing) -> Kind {
        let prot = TracedProt::READ | TracedProt::WRITE;
        Kind::Map { start, len: pages * 4096, prot, flags: 0x22, backing }
    }

    #[test]
    fn replayed_operations_change_memory_as_recorded() {
        const A: u64 = 0x10_0000;
        const B: u64 = 0x20_0000;
        const HEAP: u64 = 0x40_0000;
        const STACK: u64 = 0x7fff_0000_0000;
        let write = |page| (0, fault(page, Traced::Write));
        let none = TracedProt::empty();
        let plan = plan(
            &[0, 0, 1, 2],
            &[
                (0, map(A, 4, Backing::Anon)),
                write(A),
                (0, fault(A + 4096, Traced::Read)),
                (0, Kind::Protect { start: A + 8192, len: 4096, prot: none }),
                (0, Kind::Remap { old: A, old_len: 8192, new: B, new_len: 16384, flags: 3 }),
                write(B + 8192),
                (0, Kind::Advise { start: B, len: 4096, advice: 4 }),
                write(B),
                (0, Kind::Advise { start: B, len: 4096, advice: 250 }),
                (0, Kind::Brk { end: HEAP + 100 }),
                (0, Kind::Brk { end: HEAP + 8192 + 100 }),
                write(HEAP + 8192),
                (0, Kind::Brk { end: HEAP + 100 }),
                (0, map(STACK, 2, Backing::Stack)),
                write(STACK - 4096),
                (0, Kind::Spawn { child: 1, birth: Birth::Thread }),
                (1, fault(B + 4096, Traced::Write)),
                (0, Kind::Spawn { child: 2, birth: Birth::Fork }),
                (2, fault(B, Traced::Write)),
                (2, Kind::Exec),
                (2, map(A, 1, Backing::Anon)),
                (2, fault(A, Traced::Write)),
                (2, Kind::Exit),
                (0, Kind::Spawn { child: 3, birth: Birth::Vfork }),
                (3, Kind::Exec),
                (3, map(B, 1, Backing::SharedAnon)),
                (3, fault(B, Traced::Read)),
                (3, Kind::Exit),
                (1, Kind::Exit),
                (0, Kind::Unmap { start: B, len: 16384 }),
                (0, Kind::Exit),
            ],
        );
        for locking in Locking::ALL {
            let native = native(4, 8 << 20);
            native.vm().set(Setting::Locking(locking));
            let replayed = replay(&native, &plan, never).unwrap();
            assert!(replayed.complete);
            assert_eq!(replayed.sample.operations, plan.op_count() as u64);
            assert_eq!(replayed.advice_ignored, 1);
            let count = |counter| replayed.sample.counter(counter).unwrap();
            assert_eq!(count(Counter::StackGrowth), 1);
            assert_eq!(count(Counter::ZeroPage), 1);
            // Two copies: the zero page after a write, and a page of the parent, written by the
            // forked child before its exec. The second is a reuse without a copy if the parent has
            // already unmapped the page, since no wait orders these operations.
            assert!(count(Counter::CowCopy) >= 1);
            assert_eq!(count(Counter::CowCopy) + count(Counter::CowReuse), 2);
            assert_eq!(count(Counter::SharedPage), 1);
            native.audit(&[]).unwrap();
        }
    }

    #[test]
    fn fewer_cpus_than_threads_do_not_deadlock() {
        for name in ["cargo", "redis"] {
            let trace = recordings::find(name).unwrap().trace().unwrap();
            let plan = Plan::new(&trace).unwrap();
            for cpus in [1, 3] {
                let native = native(cpus, 512 << 20);
                assert!(replay(&native, &plan, never).unwrap().complete);
                native.audit(&[]).unwrap();
            }
        }
    }

    #[test]
    fn failed_operation_ends_all_threads_and_is_named() {
        let native = native(8, 512 << 20);
        native.vm().set(Setting::FrameLimit(500));
        let trace = recordings::find("javac").unwrap().trace().unwrap();
        let error = replay(&native, &Plan::new(&trace).unwrap(), never).unwrap_err();
        assert!(error.to_string().contains("out of memory at 0x"), "{error}");
        native.vm().set(Setting::FrameLimit(u64::MAX));
        native.audit(&[]).unwrap();
    }

    /// Memory that represents a file is not prefaulted, and resident pages are counted at their
    /// peak.
    #[test]
    fn only_anonymous_memory_is_prefaulted() {
        const AT: u64 = 0x10_0000;
        for (backing, ahead) in [(Backing::Anon, true), (Backing::File, false)] {
            let touches = (0..20).map(|page| (0, fault(AT + page * 4096, Traced::Write)));
            let mut events = vec![(0, map(AT, 64, backing))];
            events.extend(touches);
            events.push((0, Kind::Unmap { start: AT, len: 64 << 12 }));
            events.push((0, Kind::Exit));
            let plan = plan(&[0], &events);
            let native = native(1, 8 << 20);
            native.vm().set(Setting::PrefaultMaxOrder(3));
            let gauged = replay_gauged(&native, &plan, never).unwrap();
            let Gauged { replayed, peak: most, done, resident } = gauged;
            assert_eq!((done.len(), resident.len()), (plan.op_count(), plan.op_count()));
            // No page remains after munmap, or after the end of the process.
            assert_eq!(resident.iter().max(), Some(&most));
            assert_eq!((resident[1], resident[21], resident[22]), (1, 0, 0));
            let faults = done.iter().filter(|done| done.took != Took::Nothing).count() as u64;
            assert_eq!(faults, replayed.sample.faults);
            let count = |counter| replayed.sample.counter(counter).unwrap();
            let (mapped, wasted) = (count(Counter::PrefaultPage), count(Counter::PrefaultWasted));
            assert_eq!((mapped > 0, wasted > 0), (ahead, ahead), "{backing:?}");
            assert_eq!((replayed.sample.faults + mapped, most - wasted), (most, 20), "{backing:?}");
            native.audit(&[]).unwrap();
        }
    }

    /// Pages from before the recording are restored before the measurement, and cause no fault.
    #[test]
    fn resident_pages_are_restored_without_faults() {
        const AT: u64 = 0x10_0000;
        let area = |start, backing| {
            let prot = TracedProt::READ | TracedProt::WRITE;
            (0, Kind::Area { start, len: 64 << 12, prot, backing })
        };
        let resident = |page: u64, pages: u64, written| {
            let start = AT + page * 4096;
            (0, Kind::Resident { start, len: pages << 12, written })
        };
        let store = |page: u64| fault(AT + page * 4096, Traced::Write);
        let events = [
            area(AT, Backing::Anon),
            area(AT + (1 << 20), Backing::Heap),
            resident(0, 8, true),
            resident(8, 4, false),
            resident(256, 2, true),
            (0, store(3)),
            (1, store(9)),
            (0, store(20)),
            (0, Kind::Brk { end: AT + (1 << 20) + (32 << 12) }),
            (0, Kind::Exit),
            (1, Kind::Exit),
        ];
        let plan = plan(&[0, 0], &events);
        // A mapping, the two breaks of the heap, and three ranges.
        assert_eq!(plan.threads()[0].restoring(), 6);
        for gauged in [false, true] {
            let native = native(2, 8 << 20);
            let replayed = if gauged {
                let in_turn = Plan::in_turn(&source(&[0, 0], &events)).unwrap();
                let gauged = replay_gauged(&native, &in_turn, never).unwrap();
                // The zero page does not count.
                assert_eq!((gauged.resident[5], gauged.peak), (10, 12));
                gauged.replayed
            } else {
                replay(&native, &plan, never).unwrap()
            };
            assert!(replayed.complete);
            let count = |counter| replayed.sample.counter(counter).unwrap();
            // The store to the zero page, and the store to an absent page.
            assert_eq!(replayed.sample.faults, 2);
            assert_eq!((count(Counter::CowCopy), count(Counter::ZeroPage)), (1, 0));
            native.audit(&[]).unwrap();
        }
        let profile = faultless_virtual::Profile::bundled("two-socket").unwrap();
        let config =
            faultless_virtual::Config { cpus: 2, memory_bytes: 64 << 20, slow_bytes: 0, seed: 0 };
        let system = faultless_virtual::Virtual::new(&profile, config).unwrap();
        system.set("prefault_max_order=0").unwrap();
        let sample = super::super::simulated::replay(&system, &plan).unwrap();
        assert_eq!((sample.faults, sample.counter(Counter::CowCopy)), (2, Some(1)));
        system.audit(&[]).unwrap();
    }

    #[test]
    fn interrupted_replay_is_incomplete() {
        let native = native(2, 64 << 20);
        let plan = plan(&[0], &[(0, map(0x10_0000, 1, Backing::Anon)), (0, Kind::Exit)]);
        let replayed = replay(&native, &plan, || true).unwrap();
        assert!(!replayed.complete);
        assert_eq!(replayed.sample.operations, 0);
    }
}
