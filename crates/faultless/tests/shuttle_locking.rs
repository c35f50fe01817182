//! Writers against writers, under each locking policy, and while the policy changes.
#![cfg(shuttle)]

#[macro_use]
mod scenario;

use faultless::{Locking, Prot, Setting};
use scenario::{AT, Guest, PAGE, RW, World};

/// How often programs do the same: as long as a call may take.
const ROUNDS: u64 = 3;

fn page(number: u64) -> u64 {
    AT + number * PAGE
}

/// A world in which `locking` is in force, and a space with three pages.
fn under(locking: Locking) -> (World, faultless::Space<scenario::machine::Board>) {
    let world = World::new(3);
    world.vm.set(Setting::Locking(locking));
    let space = world.space(|guest| {
        guest.map(AT, 3, RW);
        (0..3).for_each(|at| guest.store(page(at), 1 + at).unwrap());
    });
    (world, space)
}

/// Uses all pages, whether they are there or not.
fn user(guest: &Guest<'_>) {
    for round in 1..=ROUNDS {
        let _ = guest.load(page(0));
        let _ = guest.store(page(1), 100 * round);
        let _ = guest.load(page(2));
        let _ = guest.store(page(0), 100 * round + 1);
    }
}

/// Two CPUs change ranges that overlap, a third uses them.
fn two_writers(locking: Locking) {
    let (world, space) = under(locking);
    world.run(&[
        (&space, &user),
        (&space, &|guest| {
            guest.unmap(AT, 2);
            guest.map(AT, 2, RW);
            guest.empty(page(1), 2);
            let _ = guest.store(page(1), 20);
        }),
        (&space, &|guest| {
            guest.map(page(1), 2, Prot::READ);
            guest.unmap(page(1), 1);
            guest.map(page(1), 3, RW);
            let _ = guest.load(page(1));
        }),
    ]);
    world.finish(vec![space]);
}

/// A fork against the changes of another CPU, and a third that stores.
fn fork_against_a_writer(locking: Locking) {
    let (world, space) = under(locking);
    let born = std::sync::Mutex::new(None);
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                guest.store(page(0), 100 * round).unwrap();
                let _ = guest.store(page(1), 100 * round + 1);
            }
        }),
        (&space, &|guest| {
            guest.empty(page(1), 1);
            guest.protect(page(1), 2, Prot::READ);
            guest.load(page(1)).unwrap();
        }),
        (&space, &|guest| {
            let child = guest.fork(|_| false);
            guest.switch(&child, |guest| {
                guest.load(page(0)).unwrap();
                guest.store(page(0), 30).unwrap();
                guest.load(page(1)).unwrap();
            });
            *born.lock().unwrap() = Some(child);
        }),
    ]);
    world.finish(vec![space, born.into_inner().unwrap().unwrap()]);
}

fn two_writers_speculative() {
    two_writers(Locking::Speculative);
}

fn two_writers_under_vma_locks() {
    two_writers(Locking::PerVma);
}

fn two_writers_under_one_lock() {
    two_writers(Locking::MmapLock);
}

fn fork_against_a_writer_speculative() {
    fork_against_a_writer(Locking::Speculative);
}

fn fork_against_a_writer_under_vma_locks() {
    fork_against_a_writer(Locking::PerVma);
}

fn fork_against_a_writer_under_one_lock() {
    fork_against_a_writer(Locking::MmapLock);
}

/// The policy changes under faults and calls.
fn policies_change() {
    let (world, space) = under(Locking::Speculative);
    world.run(&[
        (&space, &user),
        (&space, &|guest| {
            guest.unmap(AT, 1);
            guest.map(AT, 2, RW);
            guest.protect(page(1), 2, Prot::READ);
            guest.load(page(1)).unwrap();
        }),
        (&space, &|guest| {
            for locking in [Locking::PerVma, Locking::MmapLock, Locking::Speculative] {
                guest.world.vm.set(Setting::Locking(locking));
                let _ = guest.load(page(2));
                let _ = guest.store(page(2), 30 + locking as u64);
            }
        }),
    ]);
    world.finish(vec![space]);
}

mod tests {
    holds!(
        two_writers_speculative,
        two_writers_under_vma_locks,
        two_writers_under_one_lock,
        fork_against_a_writer_speculative,
        fork_against_a_writer_under_vma_locks,
        fork_against_a_writer_under_one_lock,
        policies_change,
    );
}

mod needs {
    use crate::scenario;
    use faultless::sync::mutant::Mutant;

    needs!(
        conflicts: RangeConflict in [two_writers_speculative, fork_against_a_writer_speculative],
        exclusion: SpinExcludes in [two_writers_speculative],
        waiting_for_readers: WriterWaitsForReaders in [two_writers_under_one_lock, policies_change],
    );
}
