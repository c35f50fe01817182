//! Discards: pages are removed while their mappings stay, and no CPU is locked out. Advice against
//! accesses, against itself, against calls that change the mappings, and the revocation of an
//! object's pages.

use crate::support;
use crate::support::{AT, Guest, NONE, PAGE, RW, Space, World, page};
use faultless::{
    Advice, Counter, Errno, FaultError, MapFlags, Object, PrivateCopies, Prot, RemapFlags, Shared,
};
use std::sync::Mutex;

/// The number of repetitions of a program: the duration of a call.
const ROUNDS: u64 = 4;
/// The target of moves: below another last-level table.
const TO: u64 = AT + (4 << 20);

/// Runs the bodies, none of which changes a VMA. Checks that no fault finds a changed VMA.
fn run_without_aborts(world: &World, bodies: &[support::world::Body<'_>]) {
    let overtaken = || {
        let totals = world.vm.totals();
        totals.get(Counter::SpfVmaChanged) + totals.get(Counter::SpfVmaReplaced)
    };
    let before = overtaken();
    world.run(bodies);
    assert_eq!(overtaken(), before, "a discard overtook a fault");
}

/// Two CPUs load and store, each loading the other's values, in pages emptied by a third CPU.
fn accesses_against_discards() {
    let (world, space) = World::with_pages(2);
    run_without_aborts(
        &world,
        &[
            (&space, &|guest| {
                for round in 1..=ROUNDS {
                    guest.store(page(0), 100 * round).unwrap();
                    guest.load(page(0) + 8).unwrap();
                    guest.load(page(1)).unwrap();
                }
            }),
            (&space, &|guest| {
                for round in 1..=ROUNDS {
                    guest.load(page(0)).unwrap();
                    guest.store(page(0) + 8, 100 * round + 1).unwrap();
                    guest.store(page(1), 100 * round + 2).unwrap();
                }
            }),
            (&space, &|guest| {
                guest.empty(AT, 2);
                guest.load(page(0)).unwrap();
                guest.empty(page(0), 1);
                guest.store(page(0), 30).unwrap();
            }),
        ],
    );
    world.finish(vec![space]);
}

/// Two CPUs empty overlapping ranges, and use the emptied pages. A third CPU uses all pages.
fn discards_that_overlap() {
    let (world, space) = World::with_pages(3);
    run_without_aborts(
        &world,
        &[
            (&space, &|guest| {
                for round in 1..=ROUNDS {
                    guest.store(page(1), 100 * round).unwrap();
                    guest.load(page(1)).unwrap();
                    guest.load(page(round % 3)).unwrap();
                }
            }),
            (&space, &|guest| {
                guest.empty(page(0), 2);
                guest.store(page(1), 20).unwrap();
                guest.load(page(1)).unwrap();
                guest.empty(page(1), 2);
            }),
            (&space, &|guest| {
                guest.empty(page(1), 2);
                guest.load(page(1)).unwrap();
                guest.store(page(1), 30).unwrap();
                guest.empty(page(0), 3);
            }),
        ],
    );
    world.finish(vec![space]);
}

/// One part of a mapping is emptied, twice; in another part pages are touched for the first time.
fn a_discard_beside_faults() {
    let (world, space) = World::with_pages(2);
    world.within(&space, |guest| guest.map(page(2), 6, RW));
    run_without_aborts(
        &world,
        &[
            (&space, &|guest| {
                for at in 2..6 {
                    guest.store(page(at), 100 + at).unwrap();
                    guest.load(page(at)).unwrap();
                }
            }),
            (&space, &|guest| {
                for at in (2..8).rev() {
                    guest.load(page(at)).unwrap();
                }
                guest.store(page(7), 20).unwrap();
            }),
            (&space, &|guest| {
                guest.empty(AT, 2);
                guest.store(page(1), 30).unwrap();
                guest.empty(AT, 2);
                assert_eq!(guest.load(page(1)), Ok(0));
            }),
        ],
    );
    world.within(&space, |guest| {
        (2..6).for_each(|at| assert_eq!(guest.load(page(at)), Ok(100 + at)));
        let touched = (2..6).chain([7]).filter(|at| guest.is_dirty(page(*at))).count();
        assert_eq!(touched, 5, "a page beside the discard was dropped");
    });
    world.finish(vec![space]);
}

/// Pages are emptied while their protection changes.
fn discards_against_protection() {
    let (world, space) = World::with_pages(2);
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                let _ = guest.store(page(0), 100 * round);
                let _ = guest.load(page(1));
                let _ = guest.store(page(1), 100 * round + 1);
            }
        }),
        (&space, &|guest| {
            guest.protect(page(0), 2, NONE);
            guest.protect(page(1), 1, Prot::READ);
            guest.protect(AT, 2, RW);
            guest.store(page(1), 20).unwrap();
        }),
        (&space, &|guest| {
            guest.empty(AT, 2);
            let _ = guest.load(page(0));
            guest.empty(page(1), 1);
            let _ = guest.load(page(1));
        }),
    ]);
    world.finish(vec![space]);
}

/// Pages are emptied while the pages and their tables are unmapped and mapped.
fn discards_against_munmap() {
    let (world, space) = World::with_pages(2);
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                let _ = guest.load(page(0));
                let _ = guest.store(page(1), 100 * round);
                let _ = guest.store(page(0), 100 * round + 1);
            }
        }),
        (&space, &|guest| {
            guest.unmap(page(1), 1);
            guest.map(AT, 2, RW);
            guest.unmap(AT, 2);
            guest.cpu.wait_grace();
            guest.map(AT, 2, RW);
        }),
        (&space, &|guest| {
            guest.empty(AT, 2);
            let _ = guest.store(page(1), 30);
            guest.empty(page(1), 1);
            let _ = guest.load(page(1));
        }),
    ]);
    world.finish(vec![space]);
}

/// Pages are emptied while the space forks: the child has all pages or none.
fn discards_against_fork() {
    let (world, space) = World::with_pages(2);
    let born = Mutex::new(None);
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                guest.load(page(0)).unwrap();
                guest.store(page(0) + 8, 100 * round).unwrap();
                guest.store(page(1) + 8, 100 * round + 1).unwrap();
            }
        }),
        (&space, &|guest| {
            let child = guest.fork(|_| false);
            guest.switch(&child, |guest| {
                let kept = [0, 1].map(|at| guest.load(page(at)).unwrap() != 0);
                assert_eq!(kept[0], kept[1], "the child saw half of a discard");
                guest.store(page(0), 20).unwrap();
                guest.load(page(0) + 8).unwrap();
            });
            *born.lock().unwrap() = Some(child);
            guest.load(page(1)).unwrap();
        }),
        (&space, &|guest| {
            guest.empty(AT, 2);
            guest.load(page(1)).unwrap();
        }),
    ]);
    let child = born.into_inner().unwrap().unwrap();
    world.finish(vec![space, child]);
}

/// Pages are emptied while they are moved: before the move, or not at all.
fn discards_against_moves() {
    let world = World::unwatched(3, 320);
    let space = world.space(|guest| guest.fill(AT, 2));
    let emptied = Mutex::new(false);
    world.run(&[
        (&space, &|guest| {
            for round in 0..ROUNDS {
                let _ = guest.load(page(round % 2));
                let _ = guest.load(TO + round % 2 * PAGE);
            }
        }),
        (&space, &|guest| {
            guest.remap(AT, TO, 2, RemapFlags::empty());
            guest.load(TO).unwrap();
        }),
        (&space, &|guest| {
            let done = guest.space.madvise(guest.cpu, AT, 2 * PAGE, Advice::DontNeed);
            assert!(done.is_ok() || done.is_err_and(|refused| refused.errno == Errno::ENOMEM));
            *emptied.lock().unwrap() = done.is_ok();
            let _ = guest.load(TO + PAGE);
        }),
    ]);
    let words = if emptied.into_inner().unwrap() { [0, 0] } else { [1, 2] };
    world.within(&space, |guest| {
        assert_eq!([TO, TO + PAGE].map(|at| guest.load(at).unwrap()), words, "half of a discard");
    });
    world.finish(vec![space]);
}

/// Pages are freed lazily by two at once, emptied, stored to, and reclaimed.
fn lazy_frees_that_overlap() {
    let (world, space) = World::with_pages(2);
    world.within(&space, |guest| guest.map(page(8), 6, RW));
    world.leave_frames(1);
    run_without_aborts(
        &world,
        &[
            (&space, &|guest| {
                for round in 1..=ROUNDS {
                    let _ = guest.store(page(0), 100 * round);
                    let _ = guest.load(page(0));
                    let _ = guest.store(page(1), 100 * round + 1);
                }
            }),
            (&space, &|guest| {
                guest.advise(AT, 2, Advice::Free);
                let _ = guest.store(page(1), 20);
                let _ = guest.load(page(1));
                guest.empty(page(1), 1);
            }),
            (&space, &|guest| {
                guest.advise(AT, 2, Advice::Free);
                for at in 8..11 {
                    // Another CPU may have the reclaimed frames.
                    if guest.store(page(at), 100 + at).is_ok() {
                        guest.load(page(at)).unwrap();
                    }
                }
            }),
        ],
    );
    world.finish(vec![space]);
}

/// Shortens `object` to its first page, and revokes the second in the guest's space.
fn cut_off(guest: &Guest<'_>, object: &Shared<Object>) {
    guest.change((page(1), 1), Some(NONE), true, || {
        object.set_pages(guest.cpu, 1).unwrap();
        guest.space.revoke(guest.cpu, object, 1..2, PrivateCopies::Drop);
    });
}

/// Creates a world, a space that maps an object of two pages, `there` of which were written by the
/// kernel, and the object.
fn with_object(there: u64, kind: MapFlags) -> (World, Space, Shared<Object>) {
    let world = World::new(3);
    let object = world.object(2, there);
    let space = world.space(|guest| {
        guest.map_object(AT, 2, &object, RW, kind);
        guest.written(there);
        // The tables are there, and of a private mapping the root.
        guest.store(page(0), 1).unwrap();
    });
    (world, space, object)
}

/// Ends most scenarios: checks that no truncated page is mapped.
fn is_cut_off(world: World, space: Space, object: Shared<Object>) {
    world.within(&space, |guest| {
        assert!(space.page_at(guest.cpu, page(1)).is_none(), "a page beyond the end is mapped");
        assert_eq!(guest.load(page(1)), Err(FaultError::Bus));
    });
    world.finish_with(vec![space], vec![object]);
}

/// Two CPUs map an object's page, which is there, for the first time while it is cut off.
fn first_touches_against_truncation() {
    let (world, space, object) = with_object(2, MapFlags::SHARED);
    run_without_aborts(
        &world,
        &[
            (&space, &|guest| {
                let _ = guest.load(page(1));
                let _ = guest.store(page(1), 10);
            }),
            (&space, &|guest| {
                guest.store(page(0), 20).unwrap();
                let _ = guest.store(page(1) + 8, 21);
            }),
            (&space, &|guest| cut_off(guest, &object)),
        ],
    );
    is_cut_off(world, space, object);
}

/// The same of private copies, of a page and of a hole.
fn private_copies_against_truncation(there: u64) {
    let (world, space, object) = with_object(there, MapFlags::PRIVATE);
    run_without_aborts(
        &world,
        &[
            (&space, &|guest| {
                let _ = guest.store(page(1), 10);
                let _ = guest.load(page(1) + 8);
            }),
            (&space, &|guest| {
                let _ = guest.load(page(1));
                let _ = guest.store(page(1) + 8, 20);
            }),
            (&space, &|guest| {
                cut_off(guest, &object);
                assert_eq!(guest.load(page(1)), Err(FaultError::Bus));
            }),
        ],
    );
    is_cut_off(world, space, object);
}

fn copies_of_a_page_against_truncation() {
    private_copies_against_truncation(2);
}

fn copies_of_a_hole_against_truncation() {
    private_copies_against_truncation(1);
}

/// The object is truncated and extended again: later copies are zeros.
fn private_copies_against_regrowth() {
    let (world, space, object) = with_object(2, MapFlags::PRIVATE);
    run_without_aborts(
        &world,
        &[
            (&space, &|guest| {
                for round in 1..=ROUNDS {
                    let _ = guest.store(page(1), 100 * round);
                    let _ = guest.load(page(1) + 8);
                }
            }),
            (&space, &|guest| {
                for _ in 0..ROUNDS {
                    let _ = guest.load(page(1));
                    let _ = guest.load(page(1) + 8);
                }
            }),
            (&space, &|guest| {
                cut_off(guest, &object);
                guest.change((page(1), 1), Some(RW), false, || {
                    object.set_pages(guest.cpu, 2).unwrap();
                });
                assert_eq!(guest.load(page(1) + 8), Ok(0));
            }),
        ],
    );
    world.finish_with(vec![space], vec![object]);
}

/// A hole is punched behind a private mapping: private stores stay, and the rest becomes zeros.
fn private_copies_against_a_hole() {
    let world = World::unwatched(3, 320);
    let object = world.object(3, 3);
    let space = world.space(|guest| {
        guest.map_object(AT, 3, &object, RW, MapFlags::PRIVATE);
        guest.store(page(0), 1).unwrap();
    });
    run_without_aborts(
        &world,
        &[
            (&space, &|guest| {
                assert!([0, 7].contains(&guest.load(page(1)).unwrap()));
                for round in 1..=ROUNDS {
                    guest.store(page(1), 100 * round).unwrap();
                    assert_eq!(guest.load(page(1)), Ok(100 * round), "a lost write");
                }
            }),
            (&space, &|guest| {
                let mut last = [7; 2];
                for round in 0..2 * ROUNDS as usize {
                    let at = round % 2;
                    let found = guest.load(page(1 + at as u64) + 8).unwrap();
                    assert!(found == last[at] || found == 0, "{found} after {last:?}");
                    last[at] = found;
                }
            }),
            (&space, &|guest| {
                object.free_pages(guest.cpu, 0..3);
                guest.space.revoke(guest.cpu, &object, 0..3, PrivateCopies::Keep);
                assert_eq!(guest.load(page(0)), Ok(1), "a lost write");
                assert_eq!(guest.load(page(2)), Ok(0), "an evicted page is mapped");
            }),
        ],
    );
    world.within(&space, |guest| assert_eq!(guest.load(page(1)), Ok(100 * ROUNDS)));
    world.finish_with(vec![space], vec![object]);
}

mod tests {
    holds!(
        accesses_against_discards,
        discards_that_overlap,
        a_discard_beside_faults,
        discards_against_protection,
        discards_against_munmap,
        discards_against_fork,
        discards_against_moves,
        lazy_frees_that_overlap,
        first_touches_against_truncation,
        copies_of_a_page_against_truncation,
        copies_of_a_hole_against_truncation,
        private_copies_against_regrowth,
        private_copies_against_a_hole,
    );
}

mod needs {
    use crate::support;
    use faultless::sync::mutant::Mutant;

    needs!(
        holding_discarded_entries: DiscardHolds in [accesses_against_discards],
        holding_entries_of_two_discards: DiscardHolds in [discards_that_overlap],
        flushing_before_reuse: FlushFirst in [accesses_against_discards],
        a_second_look_at_a_page: CopyLooksAgain in [copies_of_a_page_against_truncation],
        a_second_look_at_a_hole: CopyLooksAgain in [copies_of_a_hole_against_truncation],
        a_second_look_at_a_regrown_page: CopyLooksAgain in [private_copies_against_regrowth],
    );
}
