//! `counts [PHASE…] [rounds=N] [strict=yes] [settle=SECONDS]`: page faults and TLB shootdowns
//! of operations on several CPUs.
//!
//! Each phase runs in its own process, on all the CPUs allowed for this program, and prints
//! `count PHASE NAME VALUE` for the number of its `operations`, and for the machine's counts
//! during the phase: `pgfault` of `/proc/vmstat`, and the row `TLB` of `/proc/interrupts`, as a sum
//! (`shootdowns`) and for each CPU (`shootdowns_cpuN`).
//!
//! If `may_shoot` is 0, only the CPU that changes a mapping can hold a translation of the mapping:
//! with `strict=yes` a shootdown is a failure. (The counts belong to the machine, so no other
//! program may run.)
//!
//! As the first process of a machine, the program sets up its own environment (`settle`: the wait
//! for the kernel's own start) and ignores words: Linux passes unknown words to its first process.

use faultless_guest::args::Args;
use faultless_guest::init::Init;
use faultless_guest::mem::{PAGE, READ, Region, WRITE};
use faultless_guest::proc::{self, Meeting, Status, fork, futex_wait, futex_wake, outcome, pin};
use faultless_guest::procfs::{shootdowns, vmstat};
use faultless_guest::sys::doing;
use faultless_guest::{check::Verdict, clock, ensure, same};
use std::ops::Range;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::thread;

/// Pages touched in a round.
const PAGES: u64 = 16;

/// The parameters of the phases.
struct Plan {
    cpus: Vec<usize>,
    rounds: u64,
}

static PLAN: OnceLock<Plan> = OnceLock::new();

fn plan() -> &'static Plan {
    PLAN.get_or_init(|| Plan { cpus: vec![0], rounds: 200 })
}

/// A phase: its function, and whether a shootdown can be necessary. The function returns the number
/// of operations.
struct Phase {
    name: &'static str,
    shoots: bool,
    run: fn() -> Result<u64, String>,
}

const PHASES: &[Phase] = &[
    Phase { name: "one_thread", shoots: false, run: one_thread },
    Phase { name: "sleeping_threads", shoots: false, run: sleeping_threads },
    Phase { name: "processes", shoots: false, run: processes },
    Phase { name: "forks", shoots: false, run: forks },
    Phase { name: "moved_process", shoots: true, run: moved_process },
    Phase { name: "threads", shoots: true, run: threads },
    Phase { name: "readers", shoots: true, run: readers },
    Phase { name: "confined_threads", shoots: true, run: confined_threads },
];

/// Maps, touches, protects, discards and unmaps in each of `rounds`: five operations each.
fn work(rounds: Range<u64>) -> Result<u64, String> {
    let operations = 5 * (rounds.end - rounds.start);
    for round in rounds {
        let region = doing("mmap", Region::anonymous(PAGES * PAGE))?;
        region.fill(round);
        doing("mprotect", region.protect(0, 4 * PAGE, READ))?;
        doing("mprotect", region.protect(0, 4 * PAGE, WRITE))?;
        doing("madvise", region.advise(4 * PAGE, 8 * PAGE, libc::MADV_DONTNEED))?;
        same!(region.load(0), round, "a protected page");
        same!(region.load(4 * PAGE), 0, "a discarded page");
        doing("munmap", region.end())?;
    }
    Ok(operations)
}

fn first() -> Result<usize, String> {
    plan().cpus.first().copied().ok_or_else(|| "no CPU".into())
}

/// A process of one thread that stays on one CPU of many.
fn one_thread() -> Result<u64, String> {
    work(0..plan().rounds)
}

/// A process with a thread on each CPU; all threads except one have been asleep for a while.
fn sleeping_threads() -> Result<u64, String> {
    let word = AtomicU32::new(0);
    let asleep = AtomicU32::new(0);
    thread::scope(|scope| {
        for &cpu in &plan().cpus[1..] {
            let (word, asleep) = (&word, &asleep);
            scope.spawn(move || {
                let _ = pin(cpu);
                asleep.fetch_add(1, Release);
                while word.load(Acquire) == 0 {
                    let _ = futex_wait(word, 0, None, false);
                }
            });
        }
        proc::wait_until(|| asleep.load(Acquire) as usize == plan().cpus.len() - 1);
        clock::sleep_ms(50);
        let done = measured(|| work(0..plan().rounds));
        word.store(1, Release);
        let _ = futex_wake(&word, u32::MAX >> 1, false);
        done
    })
}

/// Runs `body` on each CPU, in a process forked on this CPU.
fn everywhere(body: fn() -> Result<u64, String>) -> Result<u64, String> {
    let mut children = Vec::new();
    for &cpu in &plan().cpus {
        // Forked on its own CPU: its space has never run elsewhere.
        doing("sched_setaffinity", pin(cpu))?;
        children.push(doing(
            "fork",
            fork(|| match body() {
                Ok(_) => 0,
                Err(why) => {
                    println!("{why}");
                    1
                }
            }),
        )?);
    }
    for child in children {
        same!(doing("wait4", child.wait())?, Status::Exited(0), "a process of the crew");
    }
    Ok(plan().cpus.len() as u64 * plan().rounds * 5)
}

/// A process on each CPU.
fn processes() -> Result<u64, String> {
    everywhere(|| work(0..plan().rounds))
}

/// A process on each CPU that forks, writes to memory shared with its child, and waits for the
/// child.
fn forks() -> Result<u64, String> {
    everywhere(|| {
        let region = doing("mmap", Region::anonymous(PAGES * PAGE))?;
        for round in 0..plan().rounds / 10 + 1 {
            region.fill(round);
            let child = doing(
                "fork",
                fork(|| {
                    let right = region.pages().all(|at| region.load(at) == round);
                    region.fill(!0);
                    i32::from(!right)
                }),
            )?;
            region.fill(round + 1);
            same!(doing("wait4", child.wait())?, Status::Exited(0), "round {round}: the child");
            same!(region.load(0), round + 1, "round {round}: the parent's page");
        }
        Ok(0)
    })?;
    Ok(plan().cpus.len() as u64 * (plan().rounds / 10 + 1))
}

/// A process of one thread that migrates between CPUs and changes memory used on the previous CPU.
fn moved_process() -> Result<u64, String> {
    let region = doing("mmap", Region::anonymous(PAGES * PAGE))?;
    let rounds = plan().rounds;
    for round in 0..rounds {
        doing("sched_setaffinity", pin(plan().cpus[round as usize % plan().cpus.len()]))?;
        for at in region.pages() {
            same!(region.load(at), 0, "round {round}: a page discarded on another CPU");
            region.store(at, round + 1);
        }
        doing("madvise", region.advise(0, PAGES * PAGE, libc::MADV_DONTNEED))?;
    }
    Ok(rounds)
}

/// Threads of one process, on `cpus` in turn. The threads meet before each round, so that all
/// threads run in every round, independent of their share of the machine.
fn crew(cpus: &[usize]) -> Result<u64, String> {
    let count = plan().cpus.len().max(2);
    let meeting = Meeting::new();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..count)
            .map(|number| {
                let (meeting, cpu) = (&meeting, cpus[number % cpus.len()]);
                scope.spawn(move || {
                    let mut verdict = doing("sched_setaffinity", pin(cpu)).map(|()| 0);
                    for round in 1..=plan().rounds {
                        // The other threads also wait for a failed thread.
                        meeting.wait(count as u32);
                        verdict = verdict.and_then(|done| Ok(done + work(round..round + 1)?));
                    }
                    verdict
                })
            })
            .collect();
        threads.into_iter().try_fold(0, |sum, thread| {
            let done = thread.join().unwrap_or_else(|_| Err("a thread panicked".into()));
            done.map(|done| sum + done)
        })
    })
}

/// A thread on each CPU, each with its own memory in one space.
fn threads() -> Result<u64, String> {
    crew(&plan().cpus)
}

/// The same threads on half the CPUs: the other CPUs never run the space.
fn confined_threads() -> Result<u64, String> {
    crew(&plan().cpus[..plan().cpus.len().div_ceil(2)])
}

/// A thread changes memory that threads on all other CPUs read all the time.
fn readers() -> Result<u64, String> {
    let region = doing("mmap", Region::anonymous(PAGES * PAGE))?;
    let stop = AtomicU32::new(0);
    let seen = AtomicU32::new(0);
    thread::scope(|scope| {
        for &cpu in &plan().cpus[1..] {
            let (region, stop, seen) = (&region, &stop, &seen);
            scope.spawn(move || {
                let _ = pin(cpu);
                seen.fetch_add(1, Release);
                while stop.load(Relaxed) == 0 {
                    for at in region.pages() {
                        region.load(at);
                    }
                }
            });
        }
        proc::wait_until(|| seen.load(Acquire) as usize == plan().cpus.len() - 1);
        let change = || -> Verdict {
            for round in 0..plan().rounds {
                region.fill(round);
                doing("madvise", region.advise(0, PAGES * PAGE, libc::MADV_DONTNEED))?;
                same!(region.load(0), 0, "round {round}: a discarded page");
            }
            Ok(())
        };
        let verdict = change();
        stop.store(1, Relaxed);
        verdict.map(|()| plan().rounds)
    })
}

/// Counts only a part of a phase.
fn measured(body: impl FnOnce() -> Result<u64, String>) -> Result<u64, String> {
    let before = counts()?;
    let done = body()?;
    *MEASURED.lock().map_err(|error| error.to_string())? = Some((before, counts()?));
    Ok(done)
}

/// The machine's counts: faults, and shootdowns by CPU.
type Counts = (u64, Vec<u64>);

static MEASURED: std::sync::Mutex<Option<(Counts, Counts)>> = std::sync::Mutex::new(None);

fn counts() -> Result<Counts, String> {
    let faults = vmstat()?.get("pgfault").copied().ok_or("/proc/vmstat has no pgfault")?;
    Ok((faults, shootdowns()?))
}

/// Runs a phase, in this process, and prints its counts.
fn count(phase: &Phase, strict: bool) -> Verdict {
    doing("sched_setaffinity", pin(first()?))?;
    // First touches of the program's own text and heap do not belong to the phase.
    work(0..1)?;
    counts()?;
    let before = counts()?;
    let operations = (phase.run)()?;
    let after = counts()?;
    let own = MEASURED.lock().map_err(|error| error.to_string())?.take();
    let ((faults, shot), (faults_after, shot_after)) = own.unwrap_or((before, after));
    let by_cpu: Vec<u64> =
        shot.iter().zip(&shot_after).map(|(before, after)| after - before).collect();
    let total: u64 = by_cpu.iter().sum();
    let name = phase.name;
    println!("count {name} operations {operations}");
    println!("count {name} pgfault {}", faults_after - faults);
    println!("count {name} may_shoot {}", u8::from(phase.shoots));
    println!("count {name} shootdowns {total}");
    for (cpu, shot) in by_cpu.iter().enumerate() {
        println!("count {name} shootdowns_cpu{cpu} {shot}");
    }
    ensure!(operations > 0, "no operation was done");
    ensure!(!strict || phase.shoots || total == 0, "{total} unneeded shootdowns");
    Ok(())
}

fn main() -> ExitCode {
    let args = Args::read("counts", &["rounds", "strict", "settle"]);
    let init = match Init::begin(args.get("settle", 3)) {
        Ok(init) => init,
        Err(why) => args.refuse(&why),
    };
    let words = if init.is_some() { &[] } else { args.words() };
    if let Some(word) = words.iter().find(|word| PHASES.iter().all(|phase| phase.name != **word)) {
        let names: Vec<_> = PHASES.iter().map(|phase| phase.name).collect();
        args.refuse(&format!("unknown phase {word:?}; the phases are: {}", names.join(", ")));
    }
    let cpus = match proc::cpus() {
        Ok(cpus) if !cpus.is_empty() => cpus,
        other => args.refuse(&format!("the CPUs of this process: {other:?}")),
    };
    let strict = args.text("strict") == Some("yes");
    let start = cpus[0];
    let _ = PLAN.set(Plan { cpus, rounds: args.get("rounds", 200) });
    proc::no_huge_pages();
    // Processes forked from here have never run on another CPU.
    let mut failed = false;
    for phase in
        PHASES.iter().filter(|phase| words.is_empty() || words.contains(&phase.name.into()))
    {
        let status = doing("sched_setaffinity", pin(start)).and_then(|()| {
            outcome(|| match count(phase, strict) {
                Ok(()) => 0,
                Err(why) => {
                    println!("FAIL {}: {why}", phase.name);
                    1
                }
            })
        });
        match status {
            Ok(Status::Exited(0)) => println!("ok {}", phase.name),
            other => {
                failed = true;
                println!("FAIL {}: the process ended with {other:?}", phase.name);
            }
        }
    }
    ExitCode::from(u8::from(failed))
}
