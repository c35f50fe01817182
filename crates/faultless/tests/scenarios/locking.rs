//! Writers against writers, and a program that changes the locking policy during its own calls.

use crate::support::{AT, Guest, RW, World, page};
use faultless::{Locking, Prot, Setting};

/// The number of repetitions of a program: the duration of a call.
const ROUNDS: u64 = 3;

/// Uses all pages, whether mapped or not.
fn user(guest: &Guest<'_>) {
    for round in 1..=ROUNDS {
        let _ = guest.load(page(0));
        let _ = guest.store(page(1), 100 * round);
        let _ = guest.load(page(2));
        let _ = guest.store(page(0), 100 * round + 1);
    }
}

/// Two CPUs change overlapping ranges, and a third CPU uses the pages.
fn two_writers() {
    let (world, space) = World::with_pages(3);
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

/// A fork against the changes of another CPU, and a third CPU that stores.
fn fork_against_a_writer() {
    let (world, space) = World::with_pages(3);
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

/// The policy changes under faults and calls.
fn policies_change() {
    let (world, space) = World::with_pages(3);
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
    holds!(two_writers, fork_against_a_writer, policies_change);
}

mod needs {
    use crate::support;
    use faultless::sync::mutant::Mutant;

    needs!(
        conflicts: RangeConflict in [two_writers, fork_against_a_writer],
        exclusion: SpinExcludes in [two_writers, fork_against_a_writer],
        waiting_for_readers: WriterWaitsForReaders in [two_writers] under MMAP_LOCK,
    );
}
