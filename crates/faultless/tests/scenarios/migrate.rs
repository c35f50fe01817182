//! Pages that move to other frames while programs use them: against accesses, remote accesses,
//! forks, and calls that change the mappings or remove pages.

use crate::support::{AT, Guest, PAGE, RW, Space, World, page};
use faultless::sync::atomic::{AtomicBool, Ordering, spin_hint};
use faultless::{FaultError, Object, Prot, Shared};

/// The number of repetitions of a program: the duration of a call.
const ROUNDS: u64 = 4;
const READ: Prot = Prot::READ;
/// Frames of the near node.
const FRAMES: u32 = 64;
/// The target of `mremap`: below another last-level table.
const TO: u64 = AT + (4 << 20);

/// Moves two pages there and back.
fn there_and_back(guest: &Guest<'_>) {
    for round in 0..2 {
        guest.migrate(AT, 2, 1 - round);
    }
}

/// Maps the first `pages` pages of `object` at `at`, shared.
fn map_object(guest: &Guest<'_>, object: &Shared<Object>, (at, pages): (u64, u64), prot: Prot) {
    let backing = faultless::Backing { object, first: 0, may_write: true };
    let flags = faultless::MapFlags::SHARED | faultless::MapFlags::FIXED;
    guest.space.mmap_object(guest.cpu, at, pages * PAGE, prot, flags, backing).unwrap();
}

/// Two CPUs load and store, each loading the other's values, in moving pages.
fn accesses_against_migrations() {
    let (world, space) = World::with_pages(2);
    world.run(&[
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
        (&space, &there_and_back),
    ]);
    world.finish(vec![space]);
}

/// A remote write holds no entry during its copy, but a reference to the frame.
fn remote_writes_against_migrations() {
    let world = World::outside(2, FRAMES);
    let (space, other) = (world.numbered(1, 2), world.numbered(0, 2));
    world.run(&[
        (&other, &|guest| {
            for value in [5, 6] {
                let bytes = [value, value].map(u64::to_ne_bytes).concat();
                space.write_bytes(guest.cpu, page(0), &bytes).unwrap();
            }
        }),
        (&space, &|guest| {
            guest.migrate(AT, 1, 1);
            let words = [0, 8].map(|at| guest.load(page(0) + at).unwrap());
            guest.migrate(AT, 1, 0);
            let later = [0, 8].map(|at| guest.load(page(0) + at).unwrap());
            assert!(later.iter().zip(words).all(|(now, before)| *now >= before || *now >= 5));
        }),
    ]);
    world.within(&space, |guest| {
        assert_eq!([0, 8].map(|at| guest.load(page(0) + at)), [Ok(6), Ok(6)], "a lost write");
    });
    world.finish(vec![space, other]);
}

/// Pages shared by a fork may move before the child has them. Afterwards they move in both spaces.
fn forks_against_migrations() {
    let (world, space) = World::with_pages(2);
    world.run(&[
        (&space, &|guest| {
            let child = guest.fork(|_| false);
            guest.store(page(0), 5).unwrap();
            guest.switch(&child, |guest| {
                guest.load(page(0)).unwrap();
                guest.store(page(1), 6).unwrap();
                guest.load(page(1)).unwrap();
            });
            guest.load(page(1)).unwrap();
            child.exit(guest.cpu);
        }),
        (&space, &|guest| {
            guest.store(page(1), 7).unwrap();
            guest.load(page(0)).unwrap();
            guest.load(page(1)).unwrap();
        }),
        (&space, &there_and_back),
    ]);
    world.finish(vec![space]);
}

/// Pages that are already read-only because another child shares them: a fork changes no entry, and
/// the old frames are reused.
fn forks_of_shared_pages_against_migrations() {
    let world = World::unwatched(2, FRAMES);
    let (space, other) = (world.numbered(2, 2), world.numbered(0, 2));
    let first = world.within(&space, |guest| guest.space.fork(guest.cpu).unwrap());
    world.run(&[
        // No CPU runs the space, so the migration waits for no flush.
        (&other, &|guest| {
            let child = space.fork(guest.cpu).unwrap();
            let mut words = [0; 8];
            for (at, value) in [1, 2].into_iter().enumerate() {
                child.read_bytes(guest.cpu, page(at as u64), &mut words).unwrap();
                assert_eq!(u64::from_ne_bytes(words), value, "another page");
            }
            child.exit(guest.cpu);
        }),
        (&other, &|guest| {
            let mut status = [Ok(0); 2];
            space.move_pages(guest.cpu, &[page(0), page(1)], 1, true, &mut status).unwrap();
            guest.store(page(0), 7).unwrap();
            guest.store(page(1), 8).unwrap();
        }),
    ]);
    world.finish(vec![space, other, first]);
}

/// Pages that are moved to another address, forbidden, and unmapped in the meantime.
fn calls_against_migrations() {
    let world = World::unwatched(3, FRAMES);
    let space = world.numbered(2, 2);
    world.run(&[
        (&space, &|guest| {
            guest.relocate(AT, TO, 2);
            assert_eq!(guest.load(TO), Ok(1));
            guest.store(TO + PAGE, 8).unwrap();
            guest.relocate(TO, AT, 2);
            assert_eq!(guest.load(page(1)), Ok(8), "a lost write");
            guest.protect(AT, 1, faultless::Prot::READ);
            guest.store(page(0), 9).unwrap_err();
            guest.unmap(AT, 1);
            assert_eq!(guest.load(page(0)), Err(FaultError::Segv { mapped: false }));
        }),
        (&space, &|guest| {
            guest.migrate(AT, 2, 1);
            guest.migrate(TO, 2, 1);
            guest.migrate(AT, 2, 0);
        }),
        (&space, &|guest| {
            guest.migrate(TO, 2, 0);
            guest.migrate(AT, 2, 1);
        }),
    ]);
    world.finish(vec![space]);
}

/// Pages of an object that two spaces map, the kernel writes, and a truncation cuts off.
fn objects_against_migrations() {
    let world = World::unwatched(3, FRAMES);
    let object = world.object(2, 2);
    let map = |guest: &Guest<'_>| {
        map_object(guest, &object, (AT, 2), RW);
        guest.load(page(0)).unwrap();
    };
    let spaces = [world.space(map), world.space(map)];
    world.run(&[
        (&spaces[0], &|guest| {
            guest.store(page(0), 50).unwrap();
            // The page may be truncated by then.
            let _ = guest.store(page(1), 51);
            assert_eq!(guest.load(page(0)), Ok(50), "a lost write");
        }),
        (&spaces[1], &|guest| {
            // SAFETY: the bytes of a page, aligned.
            let write = |at: *mut u8| unsafe { at.cast::<u64>().add(1).write(52) };
            object.write_page(guest.cpu, 0, write).unwrap();
            assert_eq!(guest.load(page(0) + 8), Ok(52), "a lost write");
            object.set_pages(guest.cpu, 1).unwrap();
            for space in &spaces {
                space.revoke(guest.cpu, &object, 1..u64::MAX, faultless::PrivateCopies::Drop);
            }
            assert_eq!(guest.load(page(1)), Err(FaultError::Bus));
        }),
        (&spaces[0], &there_and_back),
    ]);
    world.within(&spaces[1], |guest| {
        assert_eq!([0, 8].map(|at| guest.load(page(0) + at)), [Ok(50), Ok(52)]);
    });
    let [first, second] = spaces;
    world.finish_with(vec![first, second], vec![object]);
}

/// A space ends while its pages move together with the pages of related spaces.
fn ends_against_migrations() {
    let world = World::unwatched(3, FRAMES);
    let space = world.numbered(2, 2);
    world.run(&[
        (&space, &|guest| {
            for _ in 0..2 {
                let child = guest.space.fork(guest.cpu).unwrap();
                child.exit(guest.cpu);
            }
        }),
        (&space, &|guest| {
            let child = guest.space.fork(guest.cpu).unwrap();
            let grandchild = child.fork(guest.cpu).unwrap();
            child.exit(guest.cpu);
            let mut word = [0; 8];
            grandchild.read_bytes(guest.cpu, page(0), &mut word).unwrap();
            assert_eq!(u64::from_ne_bytes(word), 1);
            grandchild.exit(guest.cpu);
        }),
        (&space, &there_and_back),
    ]);
    world.finish(vec![space]);
}

/// Read-only pages move without a flush. A CPU that still reads the old frames prevents their
/// reuse.
fn loads_against_deferred_flushes() {
    let (world, space) = World::with_pages(2);
    world.within(&space, |guest| guest.protect(AT, 2, READ));
    let loads = |guest: &Guest<'_>| {
        for _ in 0..ROUNDS {
            guest.load(page(0)).unwrap();
            guest.load(page(1)).unwrap();
        }
    };
    world.run(&[
        (&space, &loads),
        (&space, &|guest| {
            guest.migrate(page(1), 1, 1);
            loads(guest);
        }),
        (&space, &|guest| {
            guest.map(TO, 4, RW);
            guest.migrate(AT, 1, 1);
            guest.cpu.flush_deferred();
            (0..4).for_each(|at| guest.store(TO + at * PAGE, 40 + at).unwrap());
        }),
    ]);
    world.finish(vec![space]);
}

/// A page with a cleared accessed bit moves without a flush if no CPU can have a translation. A CPU
/// that begins to run the space, has dropped its translations, or uses the page again, does not
/// lose its stores.
fn stores_against_migrations_of_aged_pages() {
    let world = World::unwatched(2, FRAMES);
    let object = world.object(1, 1);
    let space = world.space(|guest| {
        map_object(guest, &object, (AT, 1), RW);
        guest.store(page(0), 1).unwrap();
    });
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                guest.store(page(0), 100 * round).unwrap();
                guest.cpu.flush_local();
                assert_eq!(guest.load(page(0)), Ok(100 * round), "a lost store");
            }
        }),
        (&space, &|guest| {
            for node in [1, 0] {
                guest.advise(AT, 1, faultless::Advice::Cold);
                guest.cpu.flush_local();
                guest.migrate(AT, 1, node);
            }
        }),
    ]);
    world.finish_with(vec![space], vec![object]);
}

/// Kernel writes to a moved page are visible to a CPU that read the page before the move.
fn writes_against_deferred_flushes() {
    let world = World::unwatched(2, FRAMES);
    let object = world.object(1, 1);
    let space = world.space(|guest| {
        map_object(guest, &object, (AT, 1), READ);
        guest.load(page(0)).unwrap();
    });
    let written = AtomicBool::new(false);
    world.run(&[
        (&space, &|guest| {
            assert!(matches!(guest.load(page(0)), Ok(7 | 9)));
            let was_written = written.load(Ordering::SeqCst);
            let now = guest.load(page(0)).unwrap();
            assert!(now == 9 || !was_written && now == 7, "an old page: {now}");
        }),
        (&space, &|guest| {
            guest.migrate(AT, 1, 1);
            // SAFETY: the bytes of a page, aligned.
            let write = |at: *mut u8| unsafe { at.cast::<u64>().write(9) };
            object.write_page(guest.cpu, 0, write).unwrap();
            written.store(true, Ordering::SeqCst);
        }),
    ]);
    world.finish_with(vec![space], vec![object]);
}

/// Program stores to a moved page are visible to a CPU that read the page before the move. The
/// store goes through another mapping, or through a mapping that forbade stores before.
fn stores_against_deferred_flushes(elsewhere: bool) {
    let world = World::unwatched(2, FRAMES);
    let object = world.object(1, 1);
    let map = |guest: &Guest<'_>, at, prot| map_object(guest, &object, (at, 1), prot);
    let space = world.space(|guest| {
        map(guest, AT, READ);
        map(guest, TO, RW);
        guest.load(page(0)).unwrap();
    });
    let stored = AtomicBool::new(false);
    world.run(&[
        (&space, &|guest| {
            assert!(matches!(guest.load(page(0)), Ok(7 | 9)));
            let was_stored = stored.load(Ordering::SeqCst);
            let now = guest.load(page(0)).unwrap();
            assert!(now == 9 || !was_stored && now == 7, "an old page: {now}");
        }),
        (&space, &|guest| {
            guest.migrate(AT, 1, 1);
            let at = if elsewhere { TO } else { AT };
            guest.protect(at, 1, RW);
            guest.store(at, 9).unwrap();
            stored.store(true, Ordering::SeqCst);
        }),
    ]);
    world.finish_with(vec![space], vec![object]);
}

fn stores_elsewhere_against_deferred_flushes() {
    stores_against_deferred_flushes(true);
}

fn stores_here_against_deferred_flushes() {
    stores_against_deferred_flushes(false);
}

/// A page moves away and back to its old frame, while a fault that has done the deferred flush
/// makes the entry busy. The fault's store is visible to a CPU that has read the page in the
/// intermediate frame. The fault runs on a CPU that does not run the space: a CPU of the space
/// would have to serve a flush.
fn stores_against_moves_and_back(world: &World, space: Space, object: Option<Shared<Object>>) {
    let other = world.numbered(0, 2);
    let stored = AtomicBool::new(false);
    world.run(&[
        (&other, &|guest| {
            space.write_bytes(guest.cpu, page(0), &9_u64.to_ne_bytes()).unwrap();
            stored.store(true, Ordering::SeqCst);
        }),
        (&space, &|guest| {
            guest.migrate(AT, 1, 1);
            guest.cpu.flush_deferred();
            assert!(matches!(guest.load(page(0)), Ok(1 | 9)));
            guest.migrate(AT, 1, 0);
            while !stored.load(Ordering::SeqCst) {
                guest.load(page(0)).unwrap();
                spin_hint();
            }
            assert_eq!(guest.load(page(0)), Ok(9), "an old page");
        }),
    ]);
    world.finish_with(vec![space, other], object.into_iter().collect());
}

/// A private page, which another program had, too.
fn stores_against_private_moves_and_back() {
    let world = World::unwatched(2, FRAMES);
    let space = world.numbered(1, 2);
    world.within(&space, |guest| guest.space.fork(guest.cpu).unwrap().exit(guest.cpu));
    stores_against_moves_and_back(&world, space, None);
}

/// A page of an object, which could only be read.
fn stores_against_shared_moves_and_back() {
    let world = World::unwatched(2, FRAMES);
    let object = world.object(1, 1);
    let space = world.space(|guest| {
        map_object(guest, &object, (AT, 1), RW);
        guest.store(page(0), 1).unwrap();
        guest.protect(AT, 1, READ);
        guest.protect(AT, 1, RW);
    });
    stores_against_moves_and_back(&world, space, Some(object));
}

/// A store by a translation that `mprotect` is about to flush is not lost.
fn protection_against_migrations() {
    let (world, space) = World::with_pages(1);
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                let _ = guest.store(page(0), 100 * round);
                guest.load(page(0)).unwrap();
            }
        }),
        (&space, &|guest| {
            guest.protect(AT, 1, READ);
            guest.load(page(0)).unwrap();
            guest.protect(AT, 1, RW);
            guest.store(page(0), 7).unwrap();
        }),
        (&space, &there_and_back),
    ]);
    world.finish(vec![space]);
}

/// The same for an mprotect that also forbids loads: the entry is hidden before the flush.
fn forbidding_against_migrations() {
    let (world, space) = World::with_pages(1);
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                let _ = guest.store(page(0), 100 * round);
                let _ = guest.load(page(0));
            }
        }),
        (&space, &|guest| {
            guest.protect(AT, 1, Prot::empty());
            guest.protect(AT, 1, RW);
            guest.store(page(0), 7).unwrap();
        }),
        (&space, &there_and_back),
    ]);
    world.finish(vec![space]);
}

/// The same for `mremap`: the entry is at its new address before the flush of the old address.
fn moving_against_migrations() {
    let world = World::unwatched(3, FRAMES);
    let space = world.numbered(3, 1);
    world.run(&[
        (&space, &|guest| {
            // As long as both calls take.
            for round in 1..=60 {
                let _ = guest.store(page(0), 100 * round);
            }
        }),
        (&space, &|guest| {
            // The other pages are moved between the first page and the flush.
            guest.relocate(AT, TO, 3);
            guest.store(TO, 8).unwrap();
            assert_eq!(guest.load(TO), Ok(8));
        }),
        (&space, &|guest| {
            for node in [1, 0] {
                guest.migrate(TO, 1, node);
            }
        }),
    ]);
    world.finish(vec![space]);
}

/// Two CPUs settle at a time, and a third CPU serves their requests.
fn settlements_against_settlements() {
    let world = World::unwatched(3, FRAMES);
    let space = world.numbered(2, 2);
    world.within(&space, |guest| guest.protect(AT, 2, READ));
    let settles = |at| {
        move |guest: &Guest<'_>| {
            guest.migrate(page(at), 1, 1);
            guest.cpu.flush_deferred();
        }
    };
    world.run(&[
        (&space, &|guest| {
            for _ in 0..ROUNDS {
                guest.load(page(0)).unwrap();
                guest.load(page(1)).unwrap();
            }
        }),
        (&space, &settles(0)),
        (&space, &settles(1)),
    ]);
    world.finish(vec![space]);
}

/// A CPU leaves the space, and serves no requests from then on, while another CPU settles.
fn departures_against_settlements() {
    let world = World::unwatched(2, FRAMES);
    let space = world.numbered(2, 2);
    world.within(&space, |guest| guest.protect(AT, 2, READ));
    world.run(&[
        (&space, &|guest| {
            guest.load(page(0)).unwrap();
        }),
        (&space, &|guest| {
            guest.migrate(page(0), 1, 1);
            guest.migrate(page(1), 1, 1);
            guest.cpu.flush_deferred();
        }),
    ]);
    world.finish(vec![space]);
}

/// A store to one of two pages that move together is not lost, although it uses a translation that
/// an `mprotect` of only this page is about to flush.
fn protection_of_one_of_two_against_migrations() {
    let (world, space) = World::with_pages(2);
    world.within(&space, |guest| guest.protect(page(0), 1, READ));
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                let _ = guest.store(page(1), 100 * round);
                guest.load(page(1)).unwrap();
            }
        }),
        (&space, &|guest| {
            guest.protect(page(1), 1, READ);
            guest.load(page(1)).unwrap();
            guest.protect(page(1), 1, RW);
            guest.store(page(1), 7).unwrap();
        }),
        (&space, &there_and_back),
    ]);
    world.finish(vec![space]);
}

/// A page mapped by two spaces moves without a flush: CPUs of both spaces prevent the reuse of the
/// old frame.
fn loads_of_two_spaces_against_deferred_flushes() {
    let world = World::unwatched(3, FRAMES);
    let object = world.object(1, 1);
    let map = |guest: &Guest<'_>| {
        map_object(guest, &object, (AT, 1), READ);
        guest.load(page(0)).unwrap();
    };
    let spaces = [world.space(map), world.space(map)];
    let loads = |guest: &Guest<'_>| {
        for _ in 0..ROUNDS {
            assert_eq!(guest.load(page(0)), Ok(7), "another page");
        }
    };
    world.run(&[
        (&spaces[0], &loads),
        (&spaces[1], &loads),
        (&spaces[0], &|guest| {
            guest.map(TO, 4, RW);
            guest.migrate(AT, 1, 1);
            guest.cpu.flush_deferred();
            (0..4).for_each(|at| guest.store(TO + at * PAGE, 40 + at).unwrap());
        }),
    ]);
    world.finish_with(spaces.into(), vec![object]);
}

mod tests {
    holds!(
        protection_of_one_of_two_against_migrations,
        loads_of_two_spaces_against_deferred_flushes,
        stores_elsewhere_against_deferred_flushes,
        stores_here_against_deferred_flushes,
        stores_against_private_moves_and_back,
        stores_against_shared_moves_and_back,
        settlements_against_settlements,
        departures_against_settlements,
        stores_against_migrations_of_aged_pages,
        accesses_against_migrations,
        remote_writes_against_migrations,
        forks_against_migrations,
        forks_of_shared_pages_against_migrations,
        calls_against_migrations,
        objects_against_migrations,
        ends_against_migrations,
        loads_against_deferred_flushes,
        writes_against_deferred_flushes,
        protection_against_migrations,
        forbidding_against_migrations,
        moving_against_migrations,
    );
}

mod needs {
    use crate::support;
    use faultless::sync::mutant::Mutant;

    needs!(
        a_flush_before_the_copy: MigrateFlush in [accesses_against_migrations],
        a_count_of_the_references: MigrateCounts in [remote_writes_against_migrations],
        a_second_look_of_a_fork: ForkLooksAgain in [forks_of_shared_pages_against_migrations],
        a_look_at_the_stamps: ReleaseLooksAtStamps in [loads_against_deferred_flushes],
        a_settlement_that_waits: FlushAwaitsCpus in [loads_against_deferred_flushes],
        a_flush_before_the_write: WriteFlushesPending in [writes_against_deferred_flushes],
        a_flush_before_the_first_store: WriteFlushesPending in [stores_elsewhere_against_deferred_flushes],
        a_flush_before_stores_are_allowed: WriteFlushesPending in [stores_here_against_deferred_flushes],
        a_second_look_at_a_private_page: StoreLooksAgain in [stores_against_private_moves_and_back],
        a_second_look_at_a_shared_page: StoreLooksAgain in [stores_against_shared_moves_and_back],
        a_look_at_the_right_to_store: DeferLooksAtStores in [accesses_against_migrations],
        a_flush_of_hidden_pages: FlushLooksAtClaims in [forbidding_against_migrations],
        a_check_of_the_flushed_cpus: FlushFreeChecksStamps in [stores_against_migrations_of_aged_pages],
        a_look_at_the_claims: DeferLooksAtClaims in [protection_against_migrations],
    );
}
