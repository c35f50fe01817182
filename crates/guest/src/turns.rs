//! Two threads that take turns, each on a CPU of its own, and what they leave in memory.

use crate::mem::{PAGE, Region};
use crate::proc::{self, pin, wait_until};
use crate::sys::doing;
use std::sync::atomic::{AtomicU64, Ordering};

/// Whether a step went well, or why not.
pub type Outcome = Result<(), String>;

/// A value that says, in decimal digits, where it was written.
pub fn mark(round: u64, page: u64) -> u64 {
    7_000_000_000_000 + round * 100_000 + page
}

/// New memory.
///
/// # Errors
/// `mmap`'s, as a message.
pub fn anonymous(pages: u64) -> Result<Region, String> {
    doing("mmap", Region::anonymous(pages * PAGE))
}

/// Two CPUs that this process may run on; the same one twice where there is no other.
///
/// # Errors
/// If it may run on none.
pub fn two_cpus() -> Result<(usize, usize), String> {
    let cpus = doing("sched_getaffinity", proc::cpus())?;
    let first = *cpus.first().ok_or("this process may run on no CPU")?;
    Ok((first, cpus.get(1).copied().unwrap_or(first)))
}

/// Two threads, each on a CPU of its own, and whose turn it is. `begin` runs in the first, `probe` in
/// the second once the first is done, `warm` before that.
///
/// `warm(round)` makes the second CPU hold the translation. The steps follow one another, by
/// release and acquire of the turn, so what `probe` sees must be what `change` left.
///
/// # Errors
/// The first step that failed.
pub fn ordered(
    rounds: u64,
    warm: impl Fn(u64) -> Outcome + Sync,
    change: impl Fn(u64) -> Outcome,
    probe: impl Fn(u64) -> Outcome + Sync,
) -> Outcome {
    const GIVEN_UP: u64 = u64::MAX;
    let (first, second) = two_cpus()?;
    let turn = AtomicU64::new(0);
    let reached = |step| {
        wait_until(|| turn.load(Ordering::Acquire) >= step);
        turn.load(Ordering::Acquire) != GIVEN_UP
    };
    // Whoever fails ends the other's waiting.
    let guard = |outcome: Outcome| {
        if outcome.is_err() {
            turn.store(GIVEN_UP, Ordering::Release);
        }
        outcome
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            guard((|| {
                doing("sched_setaffinity", pin(second))?;
                for round in 0..rounds {
                    if !reached(4 * round + 1) {
                        return Ok(());
                    }
                    warm(round)?;
                    turn.store(4 * round + 2, Ordering::Release);
                    if !reached(4 * round + 3) {
                        return Ok(());
                    }
                    probe(round)?;
                    turn.store(4 * round + 4, Ordering::Release);
                }
                Ok(())
            })())
        });
        let mine = guard((|| {
            doing("sched_setaffinity", pin(first))?;
            for round in 0..rounds {
                turn.store(4 * round + 1, Ordering::Release);
                if !reached(4 * round + 2) {
                    return Ok(());
                }
                change(round)?;
                turn.store(4 * round + 3, Ordering::Release);
                if !reached(4 * round + 4) {
                    return Ok(());
                }
            }
            Ok(())
        })());
        let theirs = other.join().unwrap_or_else(|_| Err("a thread panicked".into()));
        mine.and(theirs)
    })
}
