//! `tlb [CHECK…] [rounds=N] [seed=N]`: the rules of translations, seen from user mode.
//!
//! 1. *Never a stale owner*: no CPU reads or writes a frame through a translation older than the
//!    frame's present ownership.
//! 2. *Never a lost write*: every later load sees the value of a store.
//!
//! Each check changes a mapping and probes it at once, in the mode and on the CPU that used the old
//! mapping: a translation that was not flushed is soon evicted by chance, and then the probe
//! detects nothing. A page probed for its write protection has been written before, so that the CPU
//! holds a writable, dirty translation. Every value contains its round and its place, which
//! identify the origin of a wrong value.
//!
//! If several CPUs take part, a CPU is a thread or process pinned to one CPU. The CPUs take turns
//! through a word in shared memory that they only read and write (the program orders the steps), so
//! an access after the unmapping must see the unmapping. On one CPU the same checks run in turns on
//! this CPU.

use faultless_guest::args::Args;
use faultless_guest::check::{Check, Verdict};
use faultless_guest::mem::{NONE, PAGE, READ, Shared, WRITE, load, store};
use faultless_guest::proc::{self, Status, fork, pin, wait_until};
use faultless_guest::random::Random;
use faultless_guest::sys::doing;
use faultless_guest::turns::{Outcome, anonymous, mark, ordered};
use faultless_guest::{check, ensure, same};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

mod trap {
    //! Probes that may fault: the access returns whether it faulted.

    use std::arch::global_asm;
    use std::mem::{MaybeUninit, zeroed};

    // rdi is the address, rsi the value. Each access is the first instruction; the handler puts the
    // label behind it into rip, and the outcome in rax.
    global_asm!(
        ".globl faultless_probe_load",
        "faultless_probe_load:",
        "mov rax, [rdi]",
        "mov [rsi], rax",
        "xor eax, eax",
        "ret",
        ".globl faultless_probe_store",
        "faultless_probe_store:",
        "mov [rdi], rsi",
        "xor eax, eax",
        "ret",
        ".globl faultless_probe_fault",
        "faultless_probe_fault:",
        "mov eax, 1",
        "ret",
    );

    unsafe extern "C" {
        fn faultless_probe_load(addr: u64, value: *mut u64) -> u64;
        fn faultless_probe_store(addr: u64, value: u64) -> u64;
        fn faultless_probe_fault();
    }

    extern "C" fn handler(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
        let context = context.cast::<libc::ucontext_t>();
        let rip = libc::REG_RIP as usize;
        // SAFETY: the kernel passes the context of the instruction that faulted.
        let at = unsafe { (*context).uc_mcontext.gregs[rip] } as usize;
        let probes = [
            faultless_probe_load as *const () as usize,
            faultless_probe_store as *const () as usize,
        ];
        if !probes.contains(&at) {
            // Not a probe: the repeated fault ends the process. SAFETY: plain calls.
            unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
            return;
        }
        // SAFETY: as above; at the label, the stack pointer is the same as at the call of the
        // probe.
        unsafe { (*context).uc_mcontext.gregs[rip] = faultless_probe_fault as *const () as i64 };
    }

    /// Allows faults of probes in this process from now on.
    pub fn catch() {
        // SAFETY: an action of zeros is valid; the handler has the kind selected by the flag.
        unsafe {
            let mut action: libc::sigaction = zeroed();
            action.sa_sigaction = handler as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            libc::sigaction(libc::SIGSEGV, &raw const action, std::ptr::null_mut());
            libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut());
        }
    }

    /// Loads 8 bytes; `None` after a fault.
    pub fn load(addr: u64) -> Option<u64> {
        let mut value = MaybeUninit::uninit();
        // SAFETY: the probe reads `addr`, or faults without an effect; without a fault the value is
        // initialised.
        unsafe {
            (faultless_probe_load(addr, value.as_mut_ptr()) == 0).then(|| value.assume_init())
        }
    }

    /// Stores 8 bytes; returns whether the store succeeded without a fault.
    ///
    /// # Safety
    /// The address contains no Rust object.
    pub unsafe fn store(addr: u64, value: u64) -> bool {
        // SAFETY: by the caller's contract.
        unsafe { faultless_probe_store(addr, value) == 0 }
    }
}

/// The parsed arguments.
struct Settings {
    rounds: u64,
    seed: u64,
}

static SETTINGS: OnceLock<Settings> = OnceLock::new();

fn settings() -> &'static Settings {
    SETTINGS.get_or_init(|| Settings { rounds: 1000, seed: 1 })
}

/// On one CPU: a page mapped again at the same address reads as zero, not as the old page.
fn remap_reads_fresh() -> Verdict {
    let region = anonymous(8)?;
    for round in 0..settings().rounds {
        let at = round % 8 * PAGE;
        region.store(at, mark(round, at));
        same!(region.load(at), mark(round, at), "round {round}: a store was lost");
        doing("munmap", region.unmap(at, PAGE))?;
        doing(
            "mmap",
            region.replace(at, PAGE, WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0),
        )?;
        same!(region.load(at), 0, "round {round}: a new page reads the old frame");
    }
    Ok(())
}

/// On one CPU: a store after remapping goes to the new page. With a stale translation it would go
/// to the old frame, which is now a page of the witness.
fn store_through_stale() -> Verdict {
    let region = anonymous(1)?;
    let witness = anonymous(4)?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    for round in 0..settings().rounds {
        region.store(0, mark(round, 1));
        doing("mmap", region.replace(0, PAGE, WRITE, flags, -1, 0))?;
        // The frame that was just freed is likely to be allocated next.
        doing("madvise", witness.advise(0, 4 * PAGE, libc::MADV_DONTNEED))?;
        witness.fill(mark(round, 2));
        region.store(0, mark(round, 3));
        for at in witness.pages() {
            same!(witness.load(at), mark(round, 2), "round {round}: a store hit another's frame");
        }
        same!(region.load(0), mark(round, 3), "round {round}: a store was lost");
    }
    Ok(())
}

/// An access after `munmap` faults, and so does an access after `PROT_NONE`, and a write after
/// `PROT_READ`.
fn revoked_here() -> Verdict {
    trap::catch();
    for round in 0..settings().rounds {
        let region = anonymous(2)?;
        let addr = region.start();
        region.fill(mark(round, 0));
        doing("mprotect", region.protect(0, PAGE, READ))?;
        // SAFETY: the page is the region's.
        let stored = unsafe { trap::store(addr, 1) };
        ensure!(!stored, "round {round}: a write to a read-only page succeeded");
        same!(trap::load(addr), Some(mark(round, 0)), "round {round}: a protected page changed");
        doing("mprotect", region.protect(0, PAGE, NONE))?;
        same!(trap::load(addr), None, "round {round}: a read of a PROT_NONE page succeeded");
        doing("mprotect", region.protect(0, PAGE, WRITE))?;
        same!(trap::load(addr), Some(mark(round, 0)), "round {round}: the page lost its content");
        doing("munmap", region.unmap(0, PAGE))?;
        same!(trap::load(addr), None, "round {round}: a read after munmap succeeded");
    }
    Ok(())
}

/// After `MADV_DONTNEED`, one page or many pages read as zeros.
fn dontneed_reads_zero() -> Verdict {
    let region = anonymous(64)?;
    let mut random = Random::new(settings().seed);
    for round in 0..settings().rounds {
        let first = random.below(64);
        let pages = 1 + random.below(64 - first).min(if round % 8 == 0 { 64 } else { 2 });
        for page in first..first + pages {
            region.store(page * PAGE, mark(round, page));
        }
        doing("madvise", region.advise(first * PAGE, pages * PAGE, libc::MADV_DONTNEED))?;
        for page in first..first + pages {
            same!(region.load(page * PAGE), 0, "round {round}: page {page} after MADV_DONTNEED");
        }
    }
    Ok(())
}

/// `mremap` moves the pages; new pages at the old address are fresh, and do not give access to the
/// moved pages.
fn remap_moves() -> Verdict {
    for round in 0..settings().rounds / 4 + 1 {
        let from = anonymous(4)?;
        let to = anonymous(4)?;
        let old = from.start();
        for at in from.pages() {
            from.store(at, mark(round, at));
            to.store(at, !mark(round, at));
        }
        doing("mremap", to.take(0, from))?;
        for at in to.pages() {
            same!(to.load(at), mark(round, at), "round {round}: the moved page at {at:#x}");
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        let args = [old, 4 * PAGE, WRITE as u64, flags as u64, u64::MAX, 0];
        // SAFETY: the range is unmapped: the flags ensure this.
        doing("mmap", unsafe { faultless_guest::sys::call(libc::SYS_mmap, args) })?;
        for at in to.pages() {
            same!(load(old + at), 0, "round {round}: a new page at the source of a move");
            // SAFETY: the mapping is new.
            unsafe { store(old + at, 7) };
            same!(
                to.load(at),
                mark(round, at),
                "round {round}: the old address still reaches the page"
            );
        }
        // SAFETY: as above.
        doing("munmap", unsafe { faultless_guest::sys::call(libc::SYS_munmap, [old, 4 * PAGE]) })?;
    }
    Ok(())
}

/// After `fork` neither process sees the other's writes.
fn fork_isolates() -> Verdict {
    let region = anonymous(16)?;
    let shared = doing("mmap", Shared::new((AtomicU64::new(0), AtomicU64::new(0))))?;
    let (turn, found) = (&shared.0, &shared.1);
    for round in 0..settings().rounds / 20 + 1 {
        // Both pages have been written, with dirty translations in the CPU, when the fork removes
        // the write permission.
        for at in region.pages() {
            region.store(at, mark(round, 1));
        }
        turn.store(0, Ordering::Release);
        let child = doing(
            "fork",
            fork(|| {
                wait_until(|| turn.load(Ordering::Acquire) == 1);
                let changed = region.pages().find(|at| region.load(*at) != mark(round, 1));
                if let Some(at) = changed {
                    found.store(region.load(at), Ordering::Release);
                    return 1;
                }
                region.fill(mark(round, 3));
                turn.store(2, Ordering::Release);
                0
            }),
        )?;
        region.fill(mark(round, 2));
        turn.store(1, Ordering::Release);
        let status = doing("wait4", child.wait())?;
        ensure!(
            status == Status::Exited(0),
            "round {round}: the child saw the parent's write: {:#x}, or ended otherwise: {status:?}",
            found.load(Ordering::Acquire)
        );
        for at in region.pages() {
            same!(
                region.load(at),
                mark(round, 2),
                "round {round}: the parent saw the child's write"
            );
        }
    }
    Ok(())
}

/// If this CPU replaces a page, another CPU that had read the old page sees the new page.
fn remap_seen_elsewhere() -> Verdict {
    let region = anonymous(1)?;
    ordered(
        settings().rounds,
        |round| {
            region.store(0, mark(round, 1));
            same!(region.load(0), mark(round, 1), "round {round}: a store was lost");
            Ok(())
        },
        |_| {
            doing("munmap", region.unmap(0, PAGE))?;
            doing(
                "mmap",
                region.replace(0, PAGE, WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0),
            )
        },
        |round| {
            same!(region.load(0), 0, "round {round}: another CPU reads the old frame");
            Ok(())
        },
    )
}

/// The same for `MADV_DONTNEED`; the frame gets a new owner at once.
fn reuse_seen_elsewhere() -> Verdict {
    let region = anonymous(1)?;
    let witness = anonymous(8)?;
    ordered(
        settings().rounds,
        |round| {
            region.store(0, mark(round, 1));
            Ok(())
        },
        |round| {
            doing("madvise", region.advise(0, PAGE, libc::MADV_DONTNEED))?;
            doing("madvise", witness.advise(0, 8 * PAGE, libc::MADV_DONTNEED))?;
            witness.fill(mark(round, 2));
            Ok(())
        },
        |round| {
            region.store(0, mark(round, 3));
            for at in witness.pages() {
                let found = witness.load(at);
                same!(found, mark(round, 2), "round {round}: another CPU stores to a reused frame");
            }
            same!(region.load(0), mark(round, 3), "round {round}: a store was lost");
            Ok(())
        },
    )
}

/// Permissions removed by one CPU are gone on another CPU that has used them.
fn revoked_elsewhere() -> Verdict {
    trap::catch();
    let region = anonymous(1)?;
    let addr = region.start();
    ordered(
        settings().rounds,
        |round| {
            region.store(0, mark(round, 1));
            Ok(())
        },
        |round| {
            doing("mprotect", region.protect(0, PAGE, if round % 2 == 0 { READ } else { NONE }))
        },
        |round| {
            // SAFETY: the page is the region's.
            let stored = unsafe { trap::store(addr, 1) };
            ensure!(!stored, "round {round}: another CPU wrote to a page after mprotect");
            let expected = (round % 2 == 0).then(|| mark(round, 1));
            same!(trap::load(addr), expected, "round {round}: another CPU's read after mprotect");
            doing("mprotect", region.protect(0, PAGE, WRITE))
        },
    )
}

/// Pages moved by one CPU are not accessible to another CPU through the old address.
fn move_seen_elsewhere() -> Verdict {
    trap::catch();
    let place = anonymous(1)?;
    let from = AtomicU64::new(0);
    ordered(
        settings().rounds / 2 + 1,
        |round| {
            let region = anonymous(1)?;
            region.store(0, mark(round, 1));
            from.store(region.start(), Ordering::Release);
            std::mem::forget(region);
            Ok(())
        },
        |_| {
            let (old, flags) =
                (from.load(Ordering::Acquire), libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED);
            let args = [old, PAGE, PAGE, flags as u64, place.start()];
            // SAFETY: both are regions.
            doing("mremap", unsafe { faultless_guest::sys::call(libc::SYS_mremap, args) })
                .map(|_| ())
        },
        |round| {
            let old = from.load(Ordering::Acquire);
            same!(trap::load(old), None, "round {round}: another CPU reads the source of a move");
            same!(place.load(0), mark(round, 1), "round {round}: the moved page on another CPU");
            Ok(())
        },
    )
}

/// Threads store to pages all the time while the process forks: a child's memory does not change
/// after the fork, although a CPU had a writable translation at the fork.
fn fork_stops_writers() -> Verdict {
    const PAGES: u64 = 16;
    let region = anonymous(PAGES)?;
    let stop = AtomicU64::new(0);
    let cpus = doing("sched_getaffinity", proc::cpus())?;
    std::thread::scope(|scope| {
        for (index, &cpu) in cpus.iter().enumerate().skip(1).take(3) {
            let (region, stop) = (&region, &stop);
            scope.spawn(move || {
                let _ = pin(cpu);
                let mut count = 0;
                while stop.load(Ordering::Relaxed) == 0 {
                    count += 1;
                    for page in 0..PAGES {
                        region.store(page * PAGE + 64 * index as u64, count);
                    }
                }
            });
        }
        let forks = || -> Outcome {
            for round in 0..settings().rounds / 20 + 1 {
                let child = doing(
                    "fork",
                    fork(|| {
                        let copy = |at: &[u64]| {
                            at.iter().map(|at| region.load(*at)).fold(0, u64::wrapping_add)
                        };
                        let places: [u64; 64] = std::array::from_fn(|n| {
                            n as u64 % PAGES * PAGE + 64 * (n as u64 / PAGES)
                        });
                        let before = copy(&places);
                        for _ in 0..100 {
                            if copy(&places) != before {
                                return 1;
                            }
                            std::hint::spin_loop();
                        }
                        0
                    }),
                )?;
                let status = doing("wait4", child.wait())?;
                same!(
                    status,
                    Status::Exited(0),
                    "round {round}: a thread's store reached a forked child"
                );
            }
            Ok(())
        };
        let outcome = forks();
        stop.store(1, Ordering::Relaxed);
        outcome
    })
}

/// A frame passes from process to process: each in turn maps, marks, checks and unmaps, while the
/// others keep the addresses through which they accessed theirs.
fn hand_over() -> Verdict {
    const PAGES: u64 = 32;
    let cpus = doing("sched_getaffinity", proc::cpus())?;
    let crew = cpus.len().max(2);
    let turn = doing("mmap", Shared::new((AtomicU64::new(0), AtomicI32::new(0))))?;
    let rounds = settings().rounds / 4 + 1;
    let members: Vec<_> = (0..crew)
        .map(|member| {
            fork(|| {
                let work = || -> Outcome {
                    doing("sched_setaffinity", pin(cpus[member % cpus.len()]))?;
                    let region = anonymous(PAGES)?;
                    for round in 0..rounds {
                        let mine = round * crew as u64 + member as u64;
                        wait_until(|| {
                            turn.0.load(Ordering::Acquire) >= mine
                                || turn.1.load(Ordering::Relaxed) != 0
                        });
                        if turn.1.load(Ordering::Relaxed) != 0 {
                            return Ok(());
                        }
                        for at in region.pages() {
                            same!(region.load(at), 0, "turn {mine}: fresh memory");
                            region.store(at, mark(mine, at / PAGE));
                        }
                        for at in region.pages() {
                            same!(
                                region.load(at),
                                mark(mine, at / PAGE),
                                "turn {mine}: a store was lost"
                            );
                        }
                        doing("madvise", region.advise(0, PAGES * PAGE, libc::MADV_DONTNEED))?;
                        turn.0.store(mine + 1, Ordering::Release);
                    }
                    Ok(())
                };
                match work() {
                    Ok(()) => 0,
                    Err(why) => {
                        turn.1.store(1, Ordering::Relaxed);
                        println!("{why}");
                        1
                    }
                }
            })
        })
        .collect();
    let mut verdict = Ok(());
    for (number, member) in members.into_iter().enumerate() {
        let status = doing("fork", member).and_then(|child| doing("wait4", child.wait()));
        if status != Ok(Status::Exited(0)) {
            verdict = Err(format!("process {number}: {status:?}"));
        }
    }
    verdict
}

/// Every CPU maps, writes, checks and unmaps in one address space; no thread sees another's values.
fn churn() -> Verdict {
    let cpus = doing("sched_getaffinity", proc::cpus())?;
    let crew = cpus.len().max(2);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..crew)
            .map(|member| {
                let cpu = cpus[member % cpus.len()];
                scope.spawn(move || -> Outcome {
                    doing("sched_setaffinity", pin(cpu))?;
                    let mut random = Random::new(settings().seed + member as u64);
                    for round in 0..settings().rounds {
                        let pages = 1 + random.below(16);
                        let region = anonymous(pages)?;
                        let tag = |at: u64| mark(round, ((member as u64) << 8) + at / PAGE);
                        for at in region.pages() {
                            same!(
                                region.load(at),
                                0,
                                "thread {member}, round {round}: fresh memory"
                            );
                            region.store(at, tag(at));
                        }
                        if random.below(2) == 0 {
                            doing("mprotect", region.protect(0, PAGE, READ))?;
                        }
                        for at in region.pages() {
                            same!(
                                region.load(at),
                                tag(at),
                                "thread {member}, round {round}: a store was lost"
                            );
                        }
                    }
                    Ok(())
                })
            })
            .collect();
        threads.into_iter().try_for_each(|thread| {
            thread.join().unwrap_or_else(|_| Err("a thread panicked".into()))
        })
    })
}

const CHECKS: &[Check] = &[
    ("remap_reads_fresh", remap_reads_fresh),
    ("store_through_stale", store_through_stale),
    ("revoked_here", revoked_here),
    ("dontneed_reads_zero", dontneed_reads_zero),
    ("remap_moves", remap_moves),
    ("fork_isolates", fork_isolates),
    ("remap_seen_elsewhere", remap_seen_elsewhere),
    ("reuse_seen_elsewhere", reuse_seen_elsewhere),
    ("revoked_elsewhere", revoked_elsewhere),
    ("move_seen_elsewhere", move_seen_elsewhere),
    ("fork_stops_writers", fork_stops_writers),
    ("hand_over", hand_over),
    ("churn", churn),
];

fn main() {
    let args = Args::read("tlb", &["rounds", "seed"]);
    let given = Settings { rounds: args.get("rounds", 1000), seed: args.get("seed", 1) };
    if SETTINGS.set(given).is_err() {
        args.refuse("the settings must be read once");
    }
    proc::no_huge_pages();
    std::process::exit(check::run(&args, CHECKS))
}
