//! CPUs that begin to read a structure, against a CPU that closes the structure and waits for the
//! readers.
//!
//! Bounds: one CPU that reads up to three times, all executions; two reading CPUs, at most three
//! forced switches.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p faultless --test models --target-dir target/loom region_counter::`

use crate::support::{Fair, Guarded, explore};
use faultless::sync::atomic::{AtomicBool, Ordering};
use faultless::sync::region_counter::{RegionCounter, await_all};
use loom::thread;
use std::sync::Arc;

/// The structure that CPUs read while it is open.
struct Shared {
    counters: [RegionCounter; 2],
    any: AtomicBool,
    closed: AtomicBool,
    looked_at: Guarded,
}

/// `cpus` CPUs read `looks` times each, while one CPU closes the structure and then writes to it.
fn looks_against_an_end(switches: Option<usize>, cpus: usize, looks: usize) {
    explore(switches, move || {
        let shared = Arc::new(Shared {
            counters: Default::default(),
            any: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            looked_at: Guarded::new(),
        });
        let looker = |cpu: usize| {
            let shared = shared.clone();
            thread::spawn(move || {
                for _ in 0..looks {
                    let _region = shared.counters[cpu].begin_checked(&shared.any);
                    if !shared.closed.load(Ordering::Relaxed) {
                        shared.looked_at.get();
                    }
                }
            })
        };
        let lookers: Vec<_> = (0..cpus).map(looker).collect();
        shared.closed.store(true, Ordering::Relaxed);
        await_all(&shared.any, &shared.counters, &Fair);
        shared.looked_at.add();
        lookers.into_iter().for_each(|looker| looker.join().unwrap());
    });
}

/// One CPU, whose next read may begin before the closing CPU sees the end of the last read.
fn looks_of_one() {
    looks_against_an_end(None, 1, 3);
}

fn looks_of_two() {
    looks_against_an_end(Some(3), 2, 1);
}

#[test]
fn a_closed_structure_is_not_read() {
    looks_of_one();
}

#[test]
fn a_closed_structure_is_not_read_by_two_cpus() {
    looks_of_two();
}

caught! {
    a_reader_needs_its_fence:
        without LookFence, looks_of_one(), says "Causality violation";
    closing_needs_its_fence:
        without CloseFence, looks_of_one(), says "Causality violation";
}
