//! Two threads that take turns, each on its own CPU, and the values they store in memory.

use crate::mem::{PAGE, Region};
use crate::proc::{self, pin, wait_until};
use crate::sys::doing;
use std::sync::atomic::{AtomicU64, Ordering};

/// The result of a step, with the reason for a failure.
pub type Outcome = Result<(), String>;

/// Returns a value that contains, in decimal digits, the place of its store.
pub fn mark(round: u64, page: u64) -> u64 {
    7_000_000_000_000 + round * 100_000 + page
}

/// Maps new memory.
///
/// # Errors
/// `mmap`'s, as a message.
pub fn anonymous(pages: u64) -> Result<Region, String> {
    doing("mmap", Region::anonymous(pages * PAGE))
}

/// Returns two CPUs allowed for this process; the same CPU twice if there is only one.
///
/// # Errors
/// The process has no allowed CPU.
pub fn two_cpus() -> Result<(usize, usize), String> {
    let cpus = doing("sched_getaffinity", proc::cpus())?;
    let first = *cpus.first().ok_or("this process may run on no CPU")?;
    Ok((first, cpus.get(1).copied().unwrap_or(first)))
}

/// Runs two threads, each on its own CPU, in turns. `begin` runs in the first, `probe` in the
/// second after the first is done, and `warm` in the second before that.
///
/// `warm(round)` makes the second CPU hold the translation. The steps are ordered by release and
/// acquire of the turn, so `probe` must see the result of `change`.
///
/// # Errors
/// The first failed step.
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
    // A failing thread ends the other's wait.
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
