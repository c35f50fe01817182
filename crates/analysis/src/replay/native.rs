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
    pub resident: Vec<u32>,
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
    resident: Vec<u32>,
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
        log.done.push(Done::new(thread, took));
        let left = &mut log.processes[process as usize];
        left.1 -= usize::from(matches!(op, Op::Exit));
        // The space is destroyed with its last thread, and by an exec.
        let gone = left.1 == 0 || matches!(op, Op::Exec);
        left.0 = if gone { 0 } else { pages };
        let resident: u64 = log.processes.iter().map(|(pages, _)| pages).sum();
        log.resident.push(u32::try_from(resident).unwrap_or(u32::MAX));
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
            for op in thread.ops.iter().take(thread.restoring() as usize) {
                if self.stopped() {
                    break;
                }
                act(&*cpu, &op, &self.departures)?;
                if let Some(gauge) = self.gauge {
                    gauge.look(number, thread.process, cpu, &op);
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
mod tests;
