//! CPUs that come to look at something, against one that closes it and waits for them.
//!
//! Bounds: one CPU that looks up to three times, all executions; two that look, at most three forced switches.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p faultless --test models loom_stays`

use crate::models::{Fair, Guarded, explore};
use faultless::sync::atomic::{AtomicBool, Ordering};
use faultless::sync::stays::{Stays, await_all};
use loom::thread;
use std::sync::Arc;

/// What CPUs look at as long as it is not closed.
struct Shared {
    stays: [Stays; 2],
    any: AtomicBool,
    closed: AtomicBool,
    looked_at: Guarded,
}

/// So many CPUs look, so many times each, while one closes what they look at and then writes it.
fn looks_against_an_end(switches: Option<usize>, cpus: usize, looks: usize) {
    explore(switches, move || {
        let shared = Arc::new(Shared {
            stays: Default::default(),
            any: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            looked_at: Guarded::new(),
        });
        let looker = |cpu: usize| {
            let shared = shared.clone();
            thread::spawn(move || {
                for _ in 0..looks {
                    let _stay = shared.stays[cpu].begin_looking(&shared.any);
                    if !shared.closed.load(Ordering::Relaxed) {
                        shared.looked_at.get();
                    }
                }
            })
        };
        let lookers: Vec<_> = (0..cpus).map(looker).collect();
        shared.closed.store(true, Ordering::Relaxed);
        await_all(&shared.any, &shared.stays, &Fair);
        shared.looked_at.add();
        lookers.into_iter().for_each(|looker| looker.join().unwrap());
    });
}

/// One CPU, whose next look may begin before the other CPU reads that the last has ended.
fn looks_of_one() {
    looks_against_an_end(None, 1, 3);
}

fn looks_of_two() {
    looks_against_an_end(Some(3), 2, 1);
}

#[test]
fn what_is_closed_is_not_looked_at() {
    looks_of_one();
}

#[test]
fn what_is_closed_is_not_looked_at_by_others() {
    looks_of_two();
}

caught! {
    who_looks_needs_its_fence:
        without LookFence, looks_of_one(), says "Causality violation";
    who_closes_needs_its_fence:
        without CloseFence, looks_of_one(), says "Causality violation";
}
