//! A recording on the virtual machine: each of its threads has a separate CPU, and they wait for
//! each other as in a [replay](super::native) on the native machine.
//!
//! A CPU is idle while its thread waits, before the start of its thread, and after its end: the CPU
//! runs no process, and its time is in no account.

use super::act::{Departures, act};
use super::native::ReplayError;
use crate::sample::Sample;
use faultless_trace::plan::{At, Op, Plan};
use faultless_virtual::{Accounts, Idle, Process, Spent, Stop, ThreadStreams, Virtual, VirtualCpu};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// The number of checks for another thread before the thread leaves its process to wait.
const LOOKS: u32 = 64;
/// Picoseconds in a second.
const SECOND: f64 = 1e12;

/// Replays `plan` on an unused machine, with a CPU for each thread. The state of processes from
/// before the recording is restored first, by one CPU. The counts include the whole replay after
/// that.
///
/// # Errors
/// The first operation that failed.
pub fn replay(system: &Virtual, plan: &Plan) -> Result<Sample, ReplayError> {
    let threads = plan.threads().len();
    let replay = Replay {
        plan,
        done: vec![Cell::new(0); threads],
        begun: (0..threads).map(|_| RefCell::new(None)).collect(),
        departures: Departures::default(),
        failure: RefCell::new(None),
    };
    for process in plan.processes() {
        let first = |thread: &&u32| plan.threads()[**thread as usize].start.is_none();
        let first: Vec<u32> = process.threads.iter().filter(first).copied().collect();
        let Some(&one) = first.first() else { continue };
        let space = system.process().map_err(|stop| replay.error(one, 0, stop))?;
        let space = Rc::new(space);
        first.iter().for_each(|thread| replay.begin(*thread, Rc::clone(&space)));
    }
    let restores = plan.threads().iter().any(|thread| thread.restoring() > 0);
    let begun =
        if restores { system.run_idle(1, |cpu, _| replay.restore(cpu)).remove(0) } else { 0 };
    let counted = system.counters();
    let ends = system.run_idle(threads, |cpu, thread| replay.thread(cpu, thread as u32));
    if let Some(error) = replay.failure.into_inner() {
        return Err(error);
    }
    let counters: Vec<_> = system
        .counters()
        .into_iter()
        .zip(counted)
        .map(|((name, count), (_, before))| (name, count - before))
        .collect();
    let faults = counters.iter().find(|(name, _)| *name == faultless::Counter::Faults.name());
    let Accounts { spent, .. } = system.accounts();
    let user = spent[Spent::Program as usize];
    Ok(Sample {
        operations: plan.op_count() as u64,
        faults: faults.map_or(0, |(_, count)| *count),
        wall: ends.into_iter().max().unwrap_or(0).saturating_sub(begun) as f64 / SECOND,
        user: user as f64 / SECOND,
        system: (spent.iter().sum::<u64>() - user) as f64 / SECOND,
        counters,
    })
}

/// The reason for a thread to leave its process.
enum Pause {
    Wait(At),
    Exec,
    Exit,
    End,
}

struct Replay<'p> {
    plan: &'p Plan,
    /// Operations that each thread has completed.
    done: Vec<Cell<u32>>,
    /// The process in which a thread will start.
    begun: Vec<RefCell<Option<Rc<Process>>>>,
    departures: Departures,
    failure: RefCell<Option<ReplayError>>,
}

impl Replay<'_> {
    fn begin(&self, thread: u32, process: Rc<Process>) {
        *self.begun[thread as usize].borrow_mut() = Some(process);
    }

    fn begin_process(&self, number: u32, process: Process) {
        if let Some(&first) = self.plan.processes()[number as usize].threads.first() {
            self.begin(first, Rc::new(process));
        }
    }

    /// Restores the state of each process from before the recording. Returns the time of the end.
    fn restore(&self, cpu: &Idle<'_>) -> u64 {
        for (number, thread) in (0..).zip(self.plan.threads()) {
            let begun = self.begun[number as usize].borrow().clone();
            let (Some(process), 1..) = (begun, thread.restoring()) else { continue };
            let done = &self.done[number as usize];
            let restored = cpu.run_as(&process, &ThreadStreams::new(), |cpu| {
                cpu.set_aside(true);
                for op in thread.ops.iter().take(thread.restoring() as usize) {
                    act(cpu, &op, &self.departures)?;
                    done.set(done.get() + 1);
                }
                cpu.set_aside(false);
                Ok(())
            });
            if let Err(stop) = restored {
                self.failure.replace(Some(self.error(number, done.get(), stop)));
            }
        }
        cpu.now()
    }

    fn passed(&self, on: At) -> bool {
        self.done[on.thread as usize].get() > on.op
    }

    fn failed(&self) -> bool {
        self.failure.borrow().is_some()
    }

    fn error(&self, thread: u32, op: u32, why: Stop) -> ReplayError {
        let name = self.plan.threads()[thread as usize].name.clone();
        ReplayError { thread: (thread, name), op, why: why.to_string() }
    }

    /// Runs one thread. Returns the time of its end, or 0 if the thread never started.
    fn thread(&self, cpu: &Idle<'_>, number: u32) -> u64 {
        let begun = || self.begun[number as usize].take();
        let Some(mut process) = wait(cpu, || self.failed(), begun) else { return 0 };
        let done = &self.done[number as usize];
        let streams = ThreadStreams::new();
        let steps = self.plan.threads()[number as usize].steps();
        let mut steps = steps.skip(done.get() as usize);
        let mut current = steps.next();
        loop {
            let paused = cpu.run_as(&process, &streams, |cpu| {
                while let Some((op, waits)) = &mut current {
                    if self.failed() {
                        return Ok(Pause::End);
                    }
                    let brief = |on: &At| {
                        (0..LOOKS).any(|looks| {
                            if looks > 0 {
                                cpu.rest(looks);
                            }
                            self.passed(*on)
                        })
                    };
                    if let Some(on) = waits.find(|on| !brief(on)) {
                        return Ok(Pause::Wait(on));
                    }
                    match op {
                        Op::Exec | Op::Exit => {
                            cpu.end_thread();
                            return Ok(if *op == Op::Exec { Pause::Exec } else { Pause::Exit });
                        }
                        op => self.step(cpu, op, &process)?,
                    }
                    done.set(done.get() + 1);
                    current = steps.next();
                }
                cpu.end_thread();
                Ok(Pause::End)
            });
            match paused {
                Ok(Pause::Wait(on)) => {
                    let passed = || self.passed(on).then_some(());
                    if wait(cpu, || self.failed(), passed).is_none() {
                        break;
                    }
                }
                // The old space is destroyed with its last thread, which is this thread.
                Ok(Pause::Exec) => match cpu.process() {
                    Ok(empty) => {
                        end(cpu, std::mem::replace(&mut process, Rc::new(empty)));
                        done.set(done.get() + 1);
                        current = steps.next();
                    }
                    Err(stop) => {
                        self.failure.replace(Some(self.error(number, done.get(), stop)));
                        break;
                    }
                },
                // Before any waiting thread proceeds, because other spaces share pages of this
                // space.
                Ok(Pause::Exit) => {
                    end(cpu, process);
                    done.set(done.get() + 1);
                    return cpu.now();
                }
                Ok(Pause::End) => break,
                Err(stop) => {
                    self.failure.replace(Some(self.error(number, done.get(), stop)));
                    break;
                }
            }
        }
        end(cpu, process);
        cpu.now()
    }

    fn step(&self, cpu: &VirtualCpu<'_>, op: &Op, process: &Rc<Process>) -> Result<(), Stop> {
        match *op {
            Op::SpawnThread { thread } => self.begin(thread, Rc::clone(process)),
            Op::Fork { child } => self.begin_process(child, cpu.fork()?),
            Op::Launch { child } => self.begin_process(child, cpu.process()?),
            ref op => act(cpu, op, &self.departures)?,
        }
        Ok(())
    }
}

/// Waits on an idle CPU until `what` returns a value; `None` if `stopped` returns true first.
fn wait<R>(cpu: &Idle<'_>, stopped: impl Fn() -> bool, what: impl Fn() -> Option<R>) -> Option<R> {
    let mut looks = 0u32;
    loop {
        if let Some(found) = what() {
            return Some(found);
        }
        if stopped() {
            return None;
        }
        cpu.rest(looks);
        looks = looks.saturating_add(1);
    }
}

/// Removes a thread from its process. The last thread ends the process.
fn end(cpu: &Idle<'_>, process: Rc<Process>) {
    if let Ok(last) = Rc::try_unwrap(process) {
        cpu.exit(last);
    }
}
