//! Accesses against mremap: moves, moves over something, and changes of the size.

use crate::support::{AT, NONE, PAGE, RW, World, page};
use faultless::RemapFlags;
use std::sync::Mutex;

/// The target of moves: below another last-level table.
const TO: u64 = AT + (4 << 20);

/// The number of repetitions of a program: the duration of a call.
const ROUNDS: u64 = 5;

/// Pages are moved away and back, with all stores.
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

/// The target already has pages, and later the old address gets new pages.
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

/// A mapping shrinks, and grows again at another address, because the way is blocked.
fn accesses_against_resizing() {
    let (world, space) = World::with_pages(4);
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

/// `MREMAP_DONTUNMAP` moves pages away while a program stores to them; the old mapping stays, empty
/// and as good as new.
fn stores_against_mremap_dontunmap() {
    let (world, space) = World::with_pages(2);
    // An untouched page.
    world.within(&space, |guest| guest.map(page(2), 1, RW));
    world.run(&[
        (&space, &|guest| {
            guest.store(page(2), 100 * ROUNDS + 2).unwrap();
            for round in 1..=ROUNDS {
                guest.store(page(0), 100 * round).unwrap();
                guest.load(page(1)).unwrap();
            }
        }),
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                guest.load(page(0)).unwrap();
                guest.store(page(1), 100 * round + 1).unwrap();
            }
        }),
        (&space, &|guest| {
            guest.empty_into(AT, TO, 3);
            guest.load(TO).unwrap();
            guest.store(TO + PAGE + 8, 30).unwrap();
            guest.load(page(1)).unwrap();
            guest.store(page(0) + 8, 31).unwrap();
        }),
    ]);
    world.within(&space, |guest| {
        for at in 0..3 {
            let found = [page(at), TO + at * PAGE].map(|place| guest.load(place).unwrap());
            assert!(found.contains(&(100 * ROUNDS + at)), "the last store to page {at} is lost");
        }
    });
    world.finish(vec![space]);
}

/// The only store to an untouched page, while its whole VMA is left empty by `MREMAP_DONTUNMAP`:
/// the remaining VMA has no anon_vma, and gets one with the page.
fn one_store_against_mremap_dontunmap() {
    let (world, space) = World::with_pages(2);
    world.within(&space, |guest| guest.map(page(2), 1, RW));
    world.run(&[
        (&space, &|guest| guest.store(page(2), 202).unwrap()),
        (&space, &|guest| {
            guest.load(page(2)).unwrap();
            guest.load(page(1)).unwrap();
        }),
        (&space, &|guest| guest.empty_into(AT, TO, 3)),
    ]);
    world.within(&space, |guest| {
        let found = [page(2), TO + 2 * PAGE].map(|place| guest.load(place).unwrap());
        assert!(found.contains(&202), "the store is lost");
    });
    world.finish(vec![space]);
}

/// Two CPUs move pages to each other's address: in the end all pages of one CPU are there.
fn two_opposite_moves() {
    let world = World::new(3);
    let space = world.space(|guest| {
        guest.fill(AT, 2);
        guest.fill(TO, 3);
        guest.unmap(TO, 1);
        guest.map(TO - 2 * PAGE, 1, RW);
        guest.map(page(4), 1, RW);
        guest.doubt(AT, 2);
        guest.doubt(TO + PAGE, 2);
    });
    world.run(&[
        (&space, &|guest| {
            guest.poll();
            guest.remap(AT, TO + PAGE, 2, RemapFlags::empty());
        }),
        (&space, &|guest| {
            guest.poll();
            guest.remap(TO + PAGE, AT, 2, RemapFlags::empty());
        }),
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                guest.store(page(4), 100 * round).unwrap();
                guest.store(TO - 2 * PAGE, 100 * round + 1).unwrap();
                guest.load(page(4)).unwrap();
            }
        }),
    ]);
    world.within(&space, |guest| {
        // Page 0 was moved first, or page 1 of the other range.
        let first_there = guest.areas().iter().any(|area| area.contains(AT));
        let (there, gone, value) =
            if first_there { (AT, TO + PAGE, 1) } else { (TO + PAGE, AT, 2) };
        guest.change((gone, 2), Some(NONE), false, || {});
        guest.change((there, 2), Some(RW), false, || {});
        for at in 0..2 {
            guest.world.oracle().renew((guest.space.id(), there + at * PAGE), value + at);
            guest.load(there + at * PAGE).unwrap();
            assert!(guest.load(gone + at * PAGE).is_err());
        }
    });
    world.finish(vec![space]);
}

/// The first store below a missing table, against the move of its page: either the move finds the
/// table, or the fault finds the move.
fn a_first_store_in_a_table_against_a_move() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let world = World::new(2);
    let space = world.space(|guest| {
        guest.map(page(511), 2, RW);
        guest.store(page(511), 1).unwrap();
    });
    // The pages lie in two tables at the target as well.
    let to = TO + 511 * PAGE;
    let stored = AtomicBool::new(false);
    world.run(&[
        (&space, &|guest| {
            stored.store(guest.store(page(512), 202).is_ok(), Ordering::Relaxed);
        }),
        (&space, &|guest| guest.relocate(page(511), to, 2)),
    ]);
    world.within(&space, |guest| {
        assert_eq!(guest.load(to), Ok(1));
        if stored.load(Ordering::Relaxed) {
            assert_eq!(guest.load(to + PAGE), Ok(202), "the store is lost");
        }
    });
    world.finish(vec![space]);
}

/// A fork next to a move of pages shared with an earlier child. The reverse map of both children
/// finds each page.
fn a_fork_against_a_move_of_shared_pages() {
    let (world, space) = World::with_pages(2);
    let first = world.within(&space, |guest| guest.fork(|_| false));
    let born = Mutex::new(None);
    world.run(&[
        (&space, &|guest| {
            *born.lock().unwrap() = Some(guest.fork(|_| false));
        }),
        (&space, &|guest| {
            guest.relocate(AT, TO, 2);
            guest.load(TO).unwrap();
        }),
    ]);
    let second = born.into_inner().unwrap().unwrap();
    world.finish(vec![space, first, second]);
}

mod tests {
    holds!(
        a_fork_against_a_move_of_shared_pages,
        a_first_store_in_a_table_against_a_move,
        accesses_against_moves,
        accesses_against_moves_over,
        accesses_against_resizing,
        stores_against_mremap_dontunmap,
        one_store_against_mremap_dontunmap,
        two_opposite_moves,
    );
}

mod needs {
    use crate::support;
    use faultless::sync::mutant::Mutant;

    needs!(
        the_second_look: SecondLook in [accesses_against_moves],
        waiting_for_held_entries: ReplaceWaits in [accesses_against_moves],
        a_move_looked_at_twice: SecondLook in [one_store_against_mremap_dontunmap],
        awaiting_answers: AwaitAnswers in [accesses_against_moves],
        notes_copied_under_the_claim: ForkCopiesMoves in [a_fork_against_a_move_of_shared_pages],
    );
}
