//! Two threads that run pairs of operations on one space, round after round, each judged by the
//! sequential orders of its operations: see `pairs`. A third thread is the device of files with
//! slow reads.
//!
//! One thread leads. It computes the orders of a case and creates the starting state in some
//! spaces. Then both threads run through these spaces, and start at the same moment in each. The
//! leader then compares the outcomes, and empties the spaces while the other thread sleeps. A case
//! is drawn from a seed and its number.

#[path = "../../../faultless/tests/pairs/mod.rs"]
pub mod pairs;

use core::hint::spin_loop;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use faultless::audit::audit_with;
use faultless::{Counter, Cpu, Errno, FaultError, Locking, Setting, Space};
use faultless_native::{Checked, Config, Native, NativeCpu, NativeMachine, Process, Signal};
use pairs::Case;
use pairs::arena::Arena;
use pairs::draw::draw;
use pairs::file::Which;
use pairs::op::{Besides, Hand, Ret};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Rounds of a case before the next is drawn.
const TRIES: usize = 32;
/// The same, with a huge leaf.
const TEXT_TRIES: usize = 4;
/// One of this many batches of rounds is followed by an audit.
const AUDIT: u64 = 2;

/// A thread of a process, in the arena of a case.
pub struct Thread<'t, 'a, 'n>(pub &'t NativeCpu<'a, 'n>, pub Arena);

fn refused(signal: Signal) -> FaultError {
    match signal {
        Signal::Segv { mapped, .. } => FaultError::Segv { mapped },
        Signal::Bus { .. } => FaultError::Bus,
        Signal::OutOfMemory { .. } => FaultError::OutOfMemory,
    }
}

impl<'n> Hand for Thread<'_, '_, 'n> {
    type Machine = NativeMachine;
    type Child = Process<'n>;

    fn space(&self) -> &Space<NativeMachine> {
        self.0.running().space()
    }

    fn cpu(&self) -> &Cpu<'_, NativeMachine> {
        self.0.cpu()
    }

    fn arena(&self) -> Arena {
        self.1
    }

    fn poll(&self) {
        self.0.poll();
    }

    fn load(&self, addr: u64) -> Result<u64, FaultError> {
        self.0.load(addr).map_err(refused)
    }

    fn store(&self, addr: u64, value: u64) -> Result<(), FaultError> {
        self.0.store(addr, value).map_err(refused)
    }

    fn fork(&self) -> Result<Process<'n>, Errno> {
        self.0.fork().map_err(|error| error.errno)
    }

    fn exit(&self, child: Process<'n>) {
        self.0.exit(child);
    }

    fn random(&self, below: usize) -> usize {
        fastrand::usize(..below)
    }

    fn space_of<'c>(child: &'c Process<'n>) -> &'c Space<NativeMachine> {
        child.space()
    }
}

/// The source of the cases.
#[derive(Clone, Debug)]
pub enum Source {
    /// Drawn one after the other.
    Drawn,
    /// This case, repeatedly.
    One(Box<Case>),
}

/// The parameters of a run.
#[derive(Clone, Debug)]
pub struct Plan {
    pub source: Source,
    pub rounds: u64,
    pub seed: u64,
    pub locking: Locking,
    /// See [`Config::jitter`].
    pub jitter: u32,
    /// As the knob.
    pub prefault: u8,
}

/// The progress, for an observer.
#[derive(Debug, Default)]
pub struct Progress {
    pub rounds: AtomicU64,
    pub bad: AtomicU64,
    /// The mapped huge leaves, and the split huge leaves.
    pub leaves: AtomicU64,
    pub splits: AtomicU64,
    /// Set to end the run early.
    pub enough: AtomicBool,
    /// The number of the case, and the case.
    pub now: Mutex<Option<(u64, Case)>>,
}

impl Plan {
    /// Case `number` of the seed.
    pub fn case(&self, number: u64) -> Case {
        match &self.source {
            Source::Drawn => {
                let mut random = fastrand::Rng::with_seed(self.seed << 40 ^ number);
                draw(&mut |below| random.usize(..below), |_| true, |_| true)
            }
            Source::One(case) => Case::clone(case),
        }
    }

    /// Runs the rounds until the end or an early end. Reports each failed round to `failed`, with
    /// the number of its case and a description.
    pub fn run(&self, progress: &Progress, mut failed: impl FnMut(u64, &str)) {
        let mut number = 0;
        while let Some(bad) = self.run_until_bad(&mut number, progress) {
            progress.bad.fetch_add(1, Ordering::Relaxed);
            failed(number, &bad);
            number += 1;
        }
    }

    /// As [`run`](Self::run), from case `number` on, until a round fails: the state after a failure
    /// must not be used further.
    fn run_until_bad(&self, number: &mut u64, progress: &Progress) -> Option<String> {
        let config = Config {
            memory_bytes: 64 << 20,
            cpus: 3,
            checked: Checked::Record,
            jitter: self.jitter,
            nodes: 2,
            ..Config::default()
        };
        let native = Native::new(config).expect("a machine of 64 MiB");
        native.vm().set(Setting::Locking(self.locking));
        native.vm().set(Setting::PrefaultMaxOrder(self.prefault));
        let process = || native.process().expect("memory for a process");
        let (home, spaces): (_, Vec<_>) = (process(), (0..TRIES).map(|_| process()).collect());
        let meets: [Meeting<'_>; 2] = Default::default();
        let bad = Mutex::new(None);
        let now = AtomicU64::new(*number);
        let ran = home.run_threads(3, |cpu, side| {
            let alarm = Alarm(&meets);
            match side {
                0 | 1 => stay_on_core(side),
                _ => {}
            }
            if side != 0 {
                follow(cpu, &spaces, &meets[side - 1], side);
            } else {
                let number = now.load(Ordering::Relaxed);
                let mut lead =
                    Lead { plan: self, spaces: &spaces, meets: &meets, progress, number };
                let found = lead.run(cpu);
                now.store(lead.number, Ordering::Relaxed);
                *bad.lock().unwrap() = found.err();
            }
            drop(alarm);
            Ok(())
        });
        ran.unwrap_or_else(|stop| panic!("{stop}"));
        *number = now.into_inner();
        let totals = native.vm().totals();
        progress.leaves.fetch_add(totals.get(Counter::ThpFileMapped), Ordering::Relaxed);
        progress.splits.fetch_add(totals.get(Counter::ThpSplitPmd), Ordering::Relaxed);
        let bad = bad.into_inner().unwrap()?;
        // The failure may break the end of the spaces as well.
        spaces.into_iter().for_each(core::mem::forget);
        Some(bad)
    }
}

/// Keeps this thread on a separate core, if the host has two: threads that take turns on one core
/// never meet.
fn stay_on_core(side: usize) {
    // SAFETY: the sets belong to this function, and have the given size.
    unsafe {
        let mut all: libc::cpu_set_t = core::mem::zeroed();
        if libc::sched_getaffinity(0, size_of_val(&all), &mut all) != 0 {
            return;
        }
        let mut cores = (0..libc::CPU_SETSIZE as usize).filter(|&core| libc::CPU_ISSET(core, &all));
        if let (Some(first), Some(second)) = (cores.next(), cores.next()) {
            let mut own: libc::cpu_set_t = core::mem::zeroed();
            libc::CPU_SET([first, second][side], &mut own);
            libc::sched_setaffinity(0, size_of_val(&own), &own);
        }
    }
}

/// The rounds of a case that both threads run before the outcomes are compared, each in its own
/// space. The threads therefore meet often while the host runs both.
#[derive(Debug)]
struct Batch<'n> {
    case: Case,
    besides: Vec<Besides<Process<'n>>>,
    /// The loop iterations each thread waits before each round.
    delays: Vec<[u32; 2]>,
    /// The number of meetings of the threads.
    met: AtomicU32,
    /// Whether both threads have finished all rounds.
    over: AtomicBool,
}

/// The sleep of the device between two checks.
const DEVICE_SLEEPS: Duration = Duration::from_micros(20);

/// The tasks of a follower, which sleeps between tasks.
#[derive(Debug, Default)]
enum Task<'n> {
    #[default]
    Wait,
    /// Free the CPU's stock of frames.
    Drain,
    Batch(Arc<Batch<'n>>),
    /// The task is finished; the values returned by a batch.
    Done(Vec<Vec<Ret>>),
    End,
}

/// The place where the leader hands tasks to a follower.
#[derive(Debug, Default)]
struct Meeting<'n> {
    task: Mutex<Task<'n>>,
    told: Condvar,
}

/// Ends the other threads together with this thread.
struct Alarm<'m, 'n>(&'m [Meeting<'n>; 2]);

impl Drop for Alarm<'_, '_> {
    fn drop(&mut self) {
        self.0.iter().for_each(|meet| meet.tell(Task::End));
    }
}

impl<'n> Meeting<'n> {
    fn tell(&self, task: Task<'n>) {
        *self.task.lock().unwrap_or_else(PoisonError::into_inner) = task;
        self.told.notify_all();
    }

    /// Sleeps until there is a task accepted by `wanted`.
    fn wait(&self, cpu: &mut NativeCpu<'_, '_>, wanted: impl Fn(&Task<'n>) -> bool) -> Task<'n> {
        cpu.idle(|| {
            let task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
            let told =
                self.told.wait_while(task, |task| !wanted(task) && !matches!(task, Task::End));
            let mut task = told.unwrap_or_else(PoisonError::into_inner);
            match &mut *task {
                Task::End => Task::End,
                task => core::mem::take(task),
            }
        })
    }
}

/// Turns of a waiting loop before the host may run something else.
const PATIENCE: u32 = 2_000;

impl<'n> Batch<'n> {
    /// Waits until both threads are at round `round`, taking interrupts.
    fn meet(&self, cpu: &NativeCpu<'_, '_>, round: usize) {
        self.met.fetch_add(1, Ordering::AcqRel);
        let mut turns = 0;
        while self.met.load(Ordering::Acquire) < 2 * (round as u32 + 1) {
            cpu.poll();
            turns += 1;
            if turns < PATIENCE {
                spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
    }

    /// Runs one side of all rounds. Returns the return values.
    fn side(
        &self,
        cpu: &mut NativeCpu<'_, 'n>,
        spaces: &[Process<'n>],
        side: usize,
    ) -> Vec<Vec<Ret>> {
        let each = spaces.iter().zip(&self.besides).zip(&self.delays).enumerate();
        let rounds = each.map(|(round, ((space, besides), delays))| {
            within(cpu, (space, self.case.whole()), |hand| {
                let steps = self.case.sides[side].len();
                let mut returned = Vec::with_capacity(steps);
                self.meet(hand.0, round);
                (0..delays[side]).for_each(|turn| {
                    core::hint::black_box(turn);
                });
                returned.extend((0..steps).map(|step| self.case.step(hand, side, step, besides)));
                returned
            })
        });
        rounds.collect()
    }

    /// The device's part: completes reads, unless waiting threads have already completed them.
    fn serve(&self, cpu: &mut NativeCpu<'_, 'n>) {
        while !self.over.load(Ordering::Acquire) {
            let slow = self.besides.iter().filter_map(Besides::slow);
            let completed =
                slow.filter(|words| words.complete(&Thread(cpu, self.case.whole()), Which::Oldest));
            if completed.count() == 0 {
                cpu.idle(|| std::thread::sleep(DEVICE_SLEEPS));
            }
        }
    }
}

/// Does something in an arena of another space.
fn within<'n, R>(
    cpu: &mut NativeCpu<'_, 'n>,
    (space, arena): (&Process<'n>, Arena),
    what: impl FnOnce(&Thread<'_, '_, 'n>) -> R,
) -> R {
    cpu.switch(space, |cpu| Ok(what(&Thread(cpu, arena)))).expect("no refused operation")
}

fn follow<'n>(
    cpu: &mut NativeCpu<'_, 'n>,
    spaces: &[Process<'n>],
    meet: &Meeting<'n>,
    side: usize,
) {
    loop {
        let task = meet.wait(cpu, |task| matches!(task, Task::Drain | Task::Batch(_)));
        let returned = match task {
            // The batch is dropped before the leader is informed.
            Task::Batch(batch) if side == 1 => batch.side(cpu, spaces, 1),
            Task::Batch(batch) => {
                batch.serve(cpu);
                Vec::new()
            }
            Task::Drain => {
                cpu.cpu().drain();
                Vec::new()
            }
            _ => return,
        };
        meet.tell(Task::Done(returned));
    }
}

/// The leading thread.
struct Lead<'l, 'n> {
    plan: &'l Plan,
    spaces: &'l [Process<'n>],
    /// The meetings with the follower and with the device.
    meets: &'l [Meeting<'n>; 2],
    progress: &'l Progress,
    /// The number of the case.
    number: u64,
}

impl<'n> Lead<'_, 'n> {
    /// Runs until the end; the error describes the failure.
    fn run(&mut self, cpu: &mut NativeCpu<'_, 'n>) -> Result<(), String> {
        let mut random = fastrand::Rng::with_seed(self.plan.seed ^ self.number << 20);
        let mut batches = 0;
        loop {
            let case = self.plan.case(self.number);
            *self.progress.now.lock().unwrap() = Some((self.number, case.clone()));
            let done = self.progress.rounds.load(Ordering::Relaxed);
            if done >= self.plan.rounds || self.progress.enough.load(Ordering::Relaxed) {
                return Ok(());
            }
            if case.is_text() {
                // A folio needs adjacent frames.
                self.drain(cpu);
            }
            let place = (&self.spaces[0], case.whole());
            let orders = within(cpu, place, |hand| case.orders(hand));
            let (batch, returned) = self.batch(cpu, case, &mut random);
            let audited = match batches % AUDIT {
                0 => self.audit(cpu, &batch.besides),
                _ => Ok(()),
            };
            let case = batch.case;
            audited.map_err(|wrong| format!("{wrong}, after\n{case}"))?;
            for ((space, besides), returned) in self.spaces.iter().zip(batch.besides).zip(returned)
            {
                within(cpu, (space, case.whole()), |hand| {
                    self.progress.rounds.fetch_add(1, Ordering::Relaxed);
                    let found = case.conclude(hand, returned, besides);
                    case.judge(hand, &found, &orders)
                })?;
            }
            if let Some(violation) = cpu.native().machine().violations().first() {
                return Err(format!("{violation}, after\n{case}"));
            }
            self.number += 1;
            batches += 1;
        }
    }

    /// Runs the case on both threads. Returns the batch, and the return values of each round.
    fn batch(
        &self,
        cpu: &mut NativeCpu<'_, 'n>,
        case: Case,
        random: &mut fastrand::Rng,
    ) -> (Batch<'n>, Vec<[Vec<Ret>; 2]>) {
        let prepare = |space| {
            within(cpu, (space, case.whole()), |hand| {
                let besides = case.prepare(hand);
                case.begin(hand, &besides);
                besides
            })
        };
        let spaces = match case.is_text() {
            true => &self.spaces[..TEXT_TRIES],
            false => self.spaces,
        };
        let besides = spaces.iter().map(prepare).collect();
        let delays = spaces.iter().map(|_| {
            // An operation takes some hundred to some thousand turns.
            let most = 1 << random.u32(7..13);
            let mut delays = [0; 2];
            delays[random.usize(0..2)] = random.u32(0..most);
            delays
        });
        let delays = delays.collect();
        let (met, over, slow) = (AtomicU32::new(0), AtomicBool::new(false), case.is_slow());
        let batch = Arc::new(Batch { case, besides, delays, met, over });
        let [follower, device] = self.meets;
        if slow {
            device.tell(Task::Batch(batch.clone()));
        }
        follower.tell(Task::Batch(batch.clone()));
        let mine = batch.side(cpu, spaces, 0);
        let theirs = Self::done(follower, cpu);
        if slow {
            batch.over.store(true, Ordering::Release);
            Self::done(device, cpu);
        }
        for (space, besides) in spaces.iter().zip(&batch.besides) {
            within(cpu, (space, batch.case.whole()), |hand| batch.case.end(hand, besides));
        }
        let batch = Arc::into_inner(batch).expect("the last reference to the batch");
        let returned = mine.into_iter().zip(theirs).map(|(mine, theirs)| [mine, theirs]);
        (batch, returned.collect())
    }

    /// Waits for a follower. Returns its return values.
    fn done(meet: &Meeting<'n>, cpu: &mut NativeCpu<'_, 'n>) -> Vec<Vec<Ret>> {
        match meet.wait(cpu, |task| matches!(task, Task::Done(_))) {
            Task::Done(returned) => returned,
            _ => panic!("the other thread failed"),
        }
    }

    /// All CPUs give their stocks of frames back.
    fn drain(&self, cpu: &mut NativeCpu<'_, 'n>) {
        for meet in self.meets {
            meet.tell(Task::Drain);
            Self::done(meet, cpu);
        }
        cpu.cpu().drain();
    }

    /// Runs the audit, after a batch that left these children and objects.
    fn audit(
        &self,
        cpu: &mut NativeCpu<'_, 'n>,
        besides: &[Besides<Process<'n>>],
    ) -> Result<(), String> {
        self.drain(cpu);
        let born = besides.iter().flat_map(|Besides { old, new: [first, second], .. }| {
            [old, first, second].map(|children| children.lock().unwrap())
        });
        let born: Vec<_> = born.collect();
        let all =
            self.spaces.iter().chain([cpu.running()]).chain(born.iter().flat_map(|it| it.iter()));
        let spaces: Vec<_> = all.map(|process| process.space()).collect();
        let objects: Vec<_> = besides.iter().filter_map(|it| it.object.get()).collect();
        audit_with(cpu.cpu(), &spaces, &objects)
            .map(drop)
            .map_err(|wrong| format!("audit: {wrong}"))
    }
}
