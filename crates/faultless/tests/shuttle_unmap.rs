//! Faults against calls that take pages away: munmap, mmap over them, `MADV_DONTNEED`, brk, exit; and
//! the tables above them.
//!
//! No test fails here without `TableValidated`: a table that is published for a VMA that is gone stays
//! empty, for the page is refused, and ends with the table above it, or with the space.
#![cfg(shuttle)]

#[macro_use]
mod scenario;

use scenario::{AT, NONE, PAGE, RW, World};

const PAGES: u64 = 3;

/// How often programs do the same: as long as a call may take.
const ROUNDS: u64 = 4;

fn page(number: u64) -> u64 {
    AT + number * PAGE
}

/// Two CPUs load and store while a third unmaps and maps again.
fn faults_against_munmap() {
    let world = World::new(3);
    let space = world.space(|guest| {
        guest.map(AT, PAGES, RW);
        (0..PAGES).for_each(|at| guest.store(page(at), 1 + at).unwrap());
    });
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                let _ = guest.load(page(0));
                let _ = guest.store(page(1), 100 * round);
                let _ = guest.load(page(1));
                let _ = guest.store(page(0), 100 * round + 1);
            }
        }),
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                let _ = guest.load(page(1));
                let _ = guest.store(page(2), 100 * round + 2);
                let _ = guest.load(page(2));
                let _ = guest.store(page(1), 100 * round + 3);
            }
        }),
        (&space, &|guest| {
            guest.unmap(page(1), 1);
            guest.map(page(1), 1, RW);
            guest.unmap(AT, PAGES);
        }),
    ]);
    world.finish(vec![space]);
}

/// As above, but that something is mapped at any moment: no access may be refused.
fn faults_against_mapping_over() {
    let world = World::new(3);
    let space = world.space(|guest| {
        guest.map(AT, PAGES, RW);
        (0..PAGES).for_each(|at| guest.store(page(at), 1 + at).unwrap());
    });
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                guest.load(page(0)).unwrap();
                guest.store(page(1), 100 * round).unwrap();
                guest.load(page(1)).unwrap();
            }
        }),
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                guest.load(page(1)).unwrap();
                guest.store(page(2), 100 * round + 1).unwrap();
                guest.store(page(0), 100 * round + 2).unwrap();
                guest.load(page(2)).unwrap();
            }
        }),
        (&space, &|guest| {
            guest.map(page(1), 1, RW);
            guest.map(AT, PAGES, RW);
        }),
    ]);
    world.finish(vec![space]);
}

/// Pages are emptied under those who use them.
fn faults_against_dontneed() {
    let world = World::new(3);
    let space = world.space(|guest| {
        guest.map(AT, PAGES, RW);
        (0..PAGES).for_each(|at| guest.store(page(at), 1 + at).unwrap());
    });
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                guest.load(page(0)).unwrap();
                guest.store(page(0), 100 * round).unwrap();
                guest.store(page(1), 100 * round + 1).unwrap();
                guest.load(page(1)).unwrap();
            }
        }),
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                guest.load(page(1)).unwrap();
                guest.store(page(0), 100 * round + 2).unwrap();
                guest.load(page(2)).unwrap();
                guest.load(page(0)).unwrap();
            }
        }),
        (&space, &|guest| {
            guest.empty(page(0), 1);
            guest.load(page(0)).unwrap();
            guest.empty(AT, PAGES);
            guest.store(page(0), 30).unwrap();
        }),
    ]);
    world.finish(vec![space]);
}

/// What is freed is at once used by another space.
fn unmapped_frames_are_used_again() {
    let world = World::new(3);
    let space = world.space(|guest| {
        guest.map(AT, PAGES, RW);
        (0..PAGES).for_each(|at| guest.store(page(at), 1 + at).unwrap());
    });
    let other = world.space(|guest| guest.map(AT, PAGES, RW));
    world.run(&[
        (&space, &|guest| {
            for round in 0..2 * ROUNDS {
                let _ = guest.load(page(round % PAGES));
                let _ = guest.store(page((round + 1) % PAGES), 100 + round);
            }
        }),
        (&space, &|guest| {
            guest.unmap(AT, 2);
            guest.switch(&other, |guest| {
                guest.store(page(1), 41).unwrap();
                guest.load(page(1)).unwrap();
            });
            guest.unmap(page(2), 1);
        }),
        (&other, &|guest| {
            guest.store(page(0), 40).unwrap();
            guest.load(page(0)).unwrap();
            guest.load(page(1)).unwrap();
        }),
    ]);
    world.finish(vec![space, other]);
}

/// A fault publishes the tables that a call unlinks, and the frames of tables are used again.
fn tables_against_prune() {
    let world = World::new(3);
    let space = world.space(|guest| {
        guest.map(AT, 2, RW);
        guest.store(AT, 1).unwrap();
    });
    let other = world.space(|guest| guest.map(AT, PAGES, RW));
    world.run(&[
        (&space, &|guest| {
            for round in 0..2 * ROUNDS {
                let _ = guest.store(page(round % 2), 10 + round);
                let _ = guest.load(page(0));
            }
        }),
        (&space, &|guest| {
            guest.unmap(AT, 2);
            guest.map(AT, 2, RW);
            guest.store(page(0), 30).unwrap();
            guest.unmap(AT, 2);
            guest.cpu.settle_retired();
            guest.switch(&other, |guest| guest.store(page(2), 42).unwrap());
        }),
        (&other, &|guest| {
            guest.store(page(0), 40).unwrap();
            guest.store(page(1), 41).unwrap();
            guest.load(page(0)).unwrap();
        }),
    ]);
    world.finish(vec![space, other]);
}

/// The heap shrinks and grows under those who use it.
fn faults_against_brk() {
    const HEAP: u64 = AT;
    let world = World::new(3);
    let space = world.space(|guest| {
        guest.space.set_heap_start(guest.cpu, HEAP);
        guest.change((HEAP, 2), Some(RW), true, || {
            guest.space.brk(guest.cpu, HEAP + 2 * PAGE);
        });
        guest.store(page(0), 1).unwrap();
        guest.store(page(1), 2).unwrap();
    });
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                guest.load(page(0)).unwrap();
                let _ = guest.store(page(1), 100 * round);
                let _ = guest.load(page(1));
                let _ = guest.store(page(2), 100 * round + 1);
            }
        }),
        (&space, &|guest| {
            guest.change((page(1), 1), Some(NONE), true, || guest.space.brk(guest.cpu, page(1)));
            guest.change((page(1), 2), Some(RW), true, || guest.space.brk(guest.cpu, page(3)));
            guest.load(page(1)).unwrap();
        }),
        (&space, &|guest| {
            guest.space.brk(guest.cpu, 0);
            guest.store(page(0), 30).unwrap();
            let _ = guest.load(page(2));
        }),
    ]);
    world.finish(vec![space]);
}

mod tests {
    holds!(
        faults_against_munmap,
        faults_against_mapping_over,
        faults_against_dontneed,
        unmapped_frames_are_used_again,
        tables_against_prune,
        faults_against_brk,
    );
}

mod needs {
    use crate::scenario;
    use faultless::sync::mutant::Mutant;

    needs!(
        the_second_look: SecondLook in [faults_against_munmap, faults_against_dontneed],
        waiting_for_held_entries: SettleWaits in [faults_against_munmap, faults_against_dontneed],
        flushing_first: FlushFirst in [unmapped_frames_are_used_again],
        dropping_translations: DropTranslations in [unmapped_frames_are_used_again],
        awaiting_answers: AwaitAnswers in [unmapped_frames_are_used_again],
        flushing_what_is_left: LeaveFlush in [unmapped_frames_are_used_again],
        a_table_s_grace: TableGrace in [tables_against_prune],
    );
}
