//! Accesses against mremap: moves, moves over something, and changes of the size.
#![cfg(shuttle)]

#[macro_use]
mod scenario;

use faultless::RemapFlags;
use scenario::{AT, NONE, PAGE, RW, World};

/// Where pages are moved: below another last-level table.
const TO: u64 = AT + (4 << 20);

/// How often programs do the same: as long as a call may take.
const ROUNDS: u64 = 5;

fn page(number: u64) -> u64 {
    AT + number * PAGE
}

/// Pages go away and come back, with all that was stored.
fn accesses_against_moves() {
    let world = World::new(3);
    let space = world.space(|guest| {
        guest.map(AT, 2, RW);
        guest.store(page(0), 1).unwrap();
    });
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                let _ = guest.store(page(0), 100 * round);
                let _ = guest.load(page(1));
                let _ = guest.store(page(1), 100 * round + 1);
                let _ = guest.load(page(0));
            }
        }),
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                let _ = guest.load(page(0));
                let _ = guest.load(TO);
                let _ = guest.store(TO + PAGE, 100 * round + 2);
                let _ = guest.load(TO + PAGE);
            }
        }),
        (&space, &|guest| {
            guest.relocate(AT, TO, 2);
            guest.load(TO).unwrap();
            guest.store(TO, 30).unwrap();
            guest.relocate(TO, AT, 2);
            guest.load(page(0)).unwrap();
            guest.load(page(1)).unwrap();
        }),
    ]);
    world.finish(vec![space]);
}

/// The target holds pages already, and then new ones at the place they came from.
fn accesses_against_moves_over() {
    let world = World::new(3);
    let space = world.space(|guest| {
        guest.map(AT, 2, RW);
        guest.store(page(0), 1).unwrap();
        guest.map(TO, 2, RW);
        guest.store(TO, 2).unwrap();
        guest.store(TO + PAGE, 3).unwrap();
        guest.protect(TO, 2, NONE);
    });
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                let _ = guest.load(page(0));
                let _ = guest.store(page(1), 100 * round);
                let _ = guest.store(page(0), 100 * round + 1);
                let _ = guest.load(page(1));
            }
        }),
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                let _ = guest.load(TO);
                let _ = guest.store(TO + PAGE, 100 * round + 2);
                let _ = guest.load(TO + PAGE);
            }
        }),
        (&space, &|guest| {
            guest.relocate(AT, TO, 2);
            guest.map(AT, 2, RW);
            guest.load(page(0)).unwrap();
            guest.load(TO).unwrap();
            guest.store(page(0), 30).unwrap();
        }),
    ]);
    world.finish(vec![space]);
}

/// A mapping shrinks, and grows again elsewhere, for something is in its way.
fn accesses_against_resizing() {
    let world = World::new(3);
    let space = world.space(|guest| {
        guest.map(AT, 4, RW);
        (0..4).for_each(|at| guest.store(page(at), 1 + at).unwrap());
    });
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                let _ = guest.store(page(0), 100 * round);
                let _ = guest.load(page(2));
                let _ = guest.store(page(1), 100 * round + 1);
                let _ = guest.load(page(0));
            }
        }),
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                guest.load(page(3)).unwrap();
                let _ = guest.store(page(2), 100 * round + 2);
                let _ = guest.load(page(1));
                guest.store(page(3), 100 * round + 3).unwrap();
            }
        }),
        (&space, &|guest| {
            let (id, call) = (guest.space.id(), guest.space);
            guest.change((page(2), 1), Some(NONE), true, || {
                let old = guest.space.mremap(
                    guest.cpu,
                    page(0),
                    3 * PAGE,
                    2 * PAGE,
                    RemapFlags::empty(),
                    0,
                );
                old.unwrap();
            });
            guest.map(page(2), 1, NONE);
            let at = guest.change((AT, 2), Some(NONE), false, || {
                call.mremap(guest.cpu, AT, 2 * PAGE, 3 * PAGE, RemapFlags::MAYMOVE, 0).unwrap()
            });
            guest.change((at, 3), Some(RW), false, || {
                let mut oracle = guest.world.oracle();
                (0..2).for_each(|number| {
                    oracle.alias((id, page(number)), (id, at + number * PAGE));
                    oracle.renew((id, page(number)), 0);
                });
            });
            (0..3).for_each(|number| assert!(guest.load(at + number * PAGE).is_ok()));
            guest.store(at + 2 * PAGE, 32).unwrap();
        }),
    ]);
    world.finish(vec![space]);
}

mod tests {
    holds!(accesses_against_moves, accesses_against_moves_over, accesses_against_resizing);
}

mod needs {
    use crate::scenario;
    use faultless::sync::mutant::Mutant;

    needs!(
        the_second_look: SecondLook in [accesses_against_moves],
        waiting_for_held_entries: SettleWaits in [accesses_against_moves],
        awaiting_answers: AwaitAnswers in [accesses_against_moves],
    );
}
