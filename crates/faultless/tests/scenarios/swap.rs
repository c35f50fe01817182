//! Private pages that are swapped out and in while programs use them: against accesses, forks,
//! exits, calls that change the mappings, pins, and the reuse of a slot.

use crate::support::disk::{Disk, End, Plan, end_read};
use crate::support::{AT, Guest, NONE, PAGE, RW, Space, World, page};
use faultless::sync::atomic::{AtomicBool, Ordering, spin_hint};
use faultless::{Advice, FaultError, Machine, MemoryLock, RemapFlags};
use std::sync::Arc;

/// Frames of a scenario's machine.
const FRAMES: u32 = 160;
/// The number of repetitions of a program: the duration of a call.
const ROUNDS: u64 = 4;
/// The target of `mremap`: below another last-level table.
const TO: u64 = AT + (4 << 20);

/// Creates a machine of `cpus` CPUs, a swap area of `slots` slots, and a space with `pages` pages,
/// numbered from 1 on.
fn swapping(cpus: usize, slots: u64, pages: u64) -> (World, Arc<Disk>, Space) {
    let world = World::unwatched(cpus, FRAMES);
    let disk = Disk::scratch(slots, 2);
    world.swap_on(disk.clone());
    let space = world.numbered(pages, 2);
    (world, disk, space)
}

/// Evicts the first two pages, a few times.
fn swap_out(guest: &Guest<'_>) {
    (0..3).for_each(|_| guest.swap_out(AT, 2));
}

/// Two CPUs store and load in pages that are swapped out and in, sometimes with write errors.
fn stores_against_swap() {
    let (world, disk, space) = swapping(3, 4, 2);
    disk.plan_write(Plan::Fail(0));
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                guest.store(page(0), 10 * round).unwrap();
                assert_eq!(guest.load(page(0)), Ok(10 * round), "a lost store");
            }
        }),
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                guest.store(page(0) + 8, 100 * round).unwrap();
                guest.store(page(1), 100 * round).unwrap();
                assert_eq!(guest.load(page(0) + 8), Ok(100 * round), "a lost store");
            }
        }),
        (&space, &swap_out),
    ]);
    world.within(&space, |guest| {
        let words = [page(0), page(0) + 8, page(1)].map(|at| guest.load(at));
        assert_eq!(words, [Ok(10 * ROUNDS), Ok(100 * ROUNDS), Ok(100 * ROUNDS)], "a lost store");
    });
    world.finish(vec![space]);
}

/// A page is freed and created anew during a swap-in fault, and gets the slot of the old page. The
/// fault runs on a CPU that does not run the space: a CPU of the space would have to serve the
/// flush of the new page.
fn reused_slots_against_swap_in() {
    let (world, _, space) = swapping(2, 1, 1);
    let other = world.numbered(0, 2);
    // While the child exists, the page is copied.
    let child = world.within(&space, |guest| {
        let child = guest.space.fork(guest.cpu).unwrap();
        guest.swap_out(AT, 1);
        child
    });
    let ends = std::sync::Mutex::new(Some(child));
    let made = AtomicBool::new(false);
    world.run(&[
        (&other, &|guest| {
            for _ in 0..2 {
                let was_made = made.load(Ordering::SeqCst);
                let mut word = [0; 8];
                space.read_bytes(guest.cpu, page(0), &mut word).unwrap();
                let now = u64::from_ne_bytes(word);
                assert!(now == 50 || !was_made && now < 2, "an old page: {now}");
            }
        }),
        (&space, &|guest| {
            let child = ends.lock().unwrap().take().unwrap();
            child.exit(guest.cpu);
            guest.empty(AT, 1);
            guest.store(page(0), 50).unwrap();
            made.store(true, Ordering::SeqCst);
            guest.swap_out(AT, 1);
            assert_eq!(guest.load(page(0)), Ok(50), "a lost store");
        }),
    ]);
    world.within(&space, |guest| assert_eq!(guest.load(page(0)), Ok(50)));
    world.finish(vec![space, other]);
}

/// A parent and its child each swap in their own page.
fn forks_against_swap() {
    let (world, _, space) = swapping(3, 8, 2);
    world.run(&[
        (&space, &|guest| {
            guest.store(page(1), 30).unwrap();
            let child = guest.space.fork(guest.cpu).unwrap();
            guest.store(page(0), 20).unwrap();
            guest.switch(&child, |guest| {
                assert_eq!((guest.load(page(0)), guest.load(page(1))), (Ok(1), Ok(30)));
                guest.store(page(1), 40).unwrap();
                assert_eq!((guest.load(page(0)), guest.load(page(1))), (Ok(1), Ok(40)));
            });
            assert_eq!((guest.load(page(0)), guest.load(page(1))), (Ok(20), Ok(30)));
            child.exit(guest.cpu);
            assert_eq!((guest.load(page(0)), guest.load(page(1))), (Ok(20), Ok(30)));
        }),
        (&space, &swap_out),
        (&space, &swap_out),
    ]);
    world.finish(vec![space]);
}

/// A space that has forked: three programs swap in one page, each for itself.
fn families_against_swap() {
    let (world, disk, space) = swapping(3, 4, 2);
    // The store does not have the page's contents.
    (0..8).for_each(|_| disk.plan_write(Plan::Fail(0)));
    let children =
        [0, 1].map(|_| world.within(&space, |guest| guest.space.fork(guest.cpu).unwrap()));
    world.within(&space, |guest| guest.swap_out(AT, 2));
    let own = |guest: &Guest<'_>, value: u64| {
        guest.store(page(0), value).unwrap();
        assert_eq!(guest.load(page(1)), Ok(2));
        guest.swap_out(AT, 2);
        assert_eq!(guest.load(page(0)), Ok(value), "another's store");
        assert_eq!(guest.load(page(0) + 8), Ok(1));
    };
    world.run(&[
        (&space, &|guest| own(guest, 50)),
        (&children[0], &|guest| own(guest, 60)),
        (&children[1], &|guest| own(guest, 70)),
    ]);
    let spaces = Vec::from_iter([space].into_iter().chain(children));
    for (space, value) in spaces.iter().zip([50, 60, 70]) {
        world.within(space, |guest| {
            assert_eq!((guest.load(page(0)), guest.load(page(1))), (Ok(value), Ok(2)));
        });
    }
    world.finish(spaces);
}

/// A child ends, with pages in the area and on their way there.
fn exits_against_swap() {
    let (world, _, space) = swapping(3, 8, 2);
    let child = world.within(&space, |guest| guest.space.fork(guest.cpu).unwrap());
    let ends = std::sync::Mutex::new(Some(child));
    world.run(&[
        (&space, &|guest| {
            let child = ends.lock().unwrap().take().unwrap();
            child.exit(guest.cpu);
        }),
        (&space, &swap_out),
        (&space, &|guest| {
            assert_eq!(guest.load(page(0)), Ok(1));
            guest.store(page(1), 7).unwrap();
            assert_eq!(guest.load(page(1)), Ok(7), "a lost store");
        }),
    ]);
    world.finish(vec![space]);
}

/// Permissions are removed from pages that are swapped out in the meantime, and restored.
fn forbidding_against_swap() {
    let (world, _, space) = swapping(3, 4, 1);
    let other = world.numbered(0, 2);
    let stored = faultless::sync::atomic::AtomicU64::new(1);
    world.run(&[
        (&space, &|guest| {
            for value in 10..20 {
                if guest.store(page(0), value).is_err() {
                    break;
                }
                stored.store(value, Ordering::SeqCst);
            }
        }),
        (&space, &|guest| {
            guest.space.mprotect(guest.cpu, AT, PAGE, NONE).unwrap();
            let last = stored.load(Ordering::SeqCst);
            guest.space.mprotect(guest.cpu, AT, PAGE, RW).unwrap();
            assert!(guest.load(page(0)).unwrap() >= last, "a lost store");
        }),
        // The frames are used again at once.
        (&other, &|guest| {
            for at in 0..3 {
                space.evict(guest.cpu, AT, PAGE).unwrap();
                guest.store(page(at), 7).unwrap();
            }
        }),
    ]);
    world.within(&space, |guest| {
        let last = stored.load(Ordering::SeqCst);
        let now = guest.load(page(0)).unwrap();
        assert!(now == last || now == 1 && last == 1, "a lost store: {now} for {last}");
    });
    world.finish(vec![space, other]);
}

/// Pages are moved to another address and swapped out there, while a CPU uses the old address.
fn moving_against_swap() {
    let (world, _, space) = swapping(3, 4, 1);
    let other = world.numbered(0, 2);
    world.within(&space, |guest| guest.map(TO, 2, RW));
    let stored = faultless::sync::atomic::AtomicU64::new(1);
    world.run(&[
        (&space, &|guest| {
            for value in 10..20 {
                if guest.store(page(0), value).is_err() {
                    break;
                }
                stored.store(value, Ordering::SeqCst);
            }
        }),
        (&space, &|guest| guest.remap(AT, TO, 1, RemapFlags::empty())),
        (&other, &|guest| {
            for at in 0..3 {
                space.evict(guest.cpu, TO, PAGE).unwrap();
                guest.store(page(at), 7).unwrap();
            }
        }),
    ]);
    world.within(&space, |guest| {
        assert_eq!(guest.load(TO), Ok(stored.load(Ordering::SeqCst)), "a lost store");
    });
    world.finish(vec![space, other]);
}

/// Swapped pages are moved, discarded, replaced and unmapped during swap-in faults.
fn calls_against_swap() {
    let (world, _, space) = swapping(3, 4, 4);
    world.within(&space, |guest| guest.swap_out(AT, 4));
    world.run(&[
        (&space, &|guest| {
            guest.remap(AT, TO, 1, RemapFlags::empty());
            assert_eq!(guest.load(TO), Ok(1), "a lost page");
            guest.empty(page(1), 1);
            guest.space.madvise(guest.cpu, page(2), PAGE, Advice::Free).unwrap();
            guest.map(page(3), 1, RW);
            assert_eq!(guest.load(page(3)), Ok(0), "an old page");
            guest.unmap(page(1), 1);
            assert_eq!(guest.load(page(1)), Err(FaultError::Segv { mapped: false }));
        }),
        (&space, &|guest| {
            for at in 0..4 {
                match guest.load(page(at)) {
                    Ok(word) => assert!(word == at + 1 || word == 0, "another page: {word}"),
                    Err(error) => assert_eq!(error, FaultError::Segv { mapped: false }),
                }
            }
        }),
        (&space, &|guest| (0..2).for_each(|_| guest.swap_out(AT, 4))),
    ]);
    world.finish(vec![space]);
}

/// A page stays after a program has locked and used it.
fn locking_against_swap() {
    let (world, _, space) = swapping(2, 4, 2);
    world.run(&[
        (&space, &|guest| {
            guest.space.mlock(guest.cpu, AT, PAGE, MemoryLock::Now).unwrap();
            guest.space.madvise(guest.cpu, AT, PAGE, Advice::PopulateRead).unwrap();
            let is_there = || guest.space.page_at(guest.cpu, AT).is_some();
            assert!(is_there(), "a locked page was evicted");
            assert_eq!((guest.load(page(0)), guest.load(page(1))), (Ok(1), Ok(2)));
            assert!(is_there(), "a locked page was evicted");
        }),
        (&space, &swap_out),
    ]);
    world.finish(vec![space]);
}

/// A device uses a page before or after its swap-out.
fn pins_against_swap() {
    let (world, _, space) = swapping(2, 4, 1);
    world.run(&[
        (&space, &|guest| {
            for value in [5, 6] {
                let pins = guest.space.pin(guest.cpu, page(0), PAGE, true).unwrap();
                let word = world.vm.machine().frame_bytes(pins.frames()[0]).cast::<u64>();
                // SAFETY: a word of a pinned page; one thread runs at a time.
                unsafe { word.write(value) };
                assert_eq!(guest.load(page(0)), Ok(value), "the store of the device");
                guest.store(page(0), 10 * value).unwrap();
                // SAFETY: as above.
                assert_eq!(unsafe { word.read() }, 10 * value, "the store of the program");
            }
        }),
        (&space, &swap_out),
    ]);
    world.finish(vec![space]);
}

/// A pinned page's copy for a fork's child is evicted before the copy is filled.
fn pins_and_forks_against_swap() {
    let world = World::unwatched(2, 48);
    world.swap_on(Disk::scratch(8, 2));
    let (space, other) = (world.numbered(1, 2), world.numbered(0, 2));
    world.run(&[
        (&space, &|guest| {
            let pins = guest.space.pin(guest.cpu, page(0), PAGE, true).unwrap();
            let child = guest.space.fork(guest.cpu).unwrap();
            guest.switch(&child, |guest| {
                assert_eq!(
                    [0, 8].map(|at| guest.load(page(0) + at)),
                    [Ok(1), Ok(1)],
                    "another page"
                );
            });
            drop(pins);
            child.exit(guest.cpu);
        }),
        (&other, &|guest| {
            guest.poll();
            guest.cpu.reclaim(2);
            (0..3).for_each(|at| guest.store(page(at), 7).unwrap());
        }),
    ]);
    world.finish(vec![space, other]);
}

/// Programs wait for pages that are read later, and discard them in the meantime.
fn pending_reads(end: End) {
    let (world, disk, space) = swapping(3, 2, 2);
    world.within(&space, |guest| guest.swap_out(AT, 2));
    disk.plan_reads(Some(Plan::Later));
    let done = AtomicBool::new(false);
    world.run(&[
        (&space, &|guest| {
            for at in [0, 1] {
                match guest.load(page(at)) {
                    Ok(word) => assert!(word == at + 1 || word == 0, "another page: {word}"),
                    Err(error) => assert!(error == FaultError::Bus && end != End::Good),
                }
            }
            done.store(true, Ordering::SeqCst);
        }),
        (&space, &|guest| {
            guest.empty(page(1), 1);
            guest.store(page(2), 60).unwrap();
            guest.swap_out(page(2), 1);
            match guest.load(page(2)) {
                Ok(word) => assert_eq!(word, 60, "another page"),
                Err(error) => assert!(error == FaultError::Bus && end != End::Good),
            }
        }),
        (&space, &|guest| {
            for _ in 0..40 {
                end_read(guest, &disk, end);
                if done.load(Ordering::SeqCst) {
                    disk.heal();
                }
            }
            disk.heal();
            while end_read(guest, &disk, end) {}
        }),
    ]);
    disk.heal();
    world.within(&space, |guest| {
        while end_read(guest, &disk, End::Good) {}
        assert_eq!((guest.load(page(0)), guest.load(page(2))), (Ok(1), Ok(60)));
    });
    world.finish(vec![space]);
}

fn pages_with_pending_reads() {
    pending_reads(End::Good);
}

fn unreadable_pages() {
    pending_reads(End::Error);
}

/// A page that was aged, and is freed lazily, moves: `MADV_FREE` has cleared the accessed bit, and
/// has not flushed yet.
fn lazily_freed_pages_against_migrations() {
    let (world, _, space) = swapping(3, 4, 1);
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                guest.cpu.flush_local();
                guest.store(page(0), 10 * round).unwrap();
                guest.store(page(0), 10 * round + 1).unwrap();
                assert_eq!(guest.load(page(0)), Ok(10 * round + 1), "a lost store");
            }
        }),
        (&space, &|guest| {
            guest.space.madvise(guest.cpu, AT, PAGE, Advice::Cold).unwrap();
            guest.cpu.flush_local();
            guest.space.madvise(guest.cpu, AT, PAGE, Advice::Free).unwrap();
        }),
        (&space, &|guest| {
            guest.cpu.flush_local();
            guest.migrate(AT, 1, 1);
            guest.migrate(AT, 1, 0);
        }),
    ]);
    world.within(&space, |guest| assert_eq!(guest.load(page(0)), Ok(10 * ROUNDS + 1)));
    world.finish(vec![space]);
}

/// Pages that were lazily freed, stored to, swapped out, and swapped in: they stay when memory is
/// short.
fn lazily_freed_pages_against_swap() {
    let (world, _, space) = swapping(2, 4, 2);
    world.within(&space, |guest| {
        guest.space.madvise(guest.cpu, AT, 2 * PAGE, Advice::Free).unwrap();
        (0..2).for_each(|at| guest.store(page(at), 50 + at).unwrap());
    });
    world.leave_frames(2);
    world.run(&[
        (&space, &|guest| {
            guest.swap_out(AT, 2);
            (0..2).for_each(|at| {
                let word = guest.load(page(at));
                assert!(matches!(word, Err(FaultError::OutOfMemory)) || word == Ok(50 + at));
            });
        }),
        (&space, &|guest| {
            for at in 4..10 {
                let _short = guest.store(page(at), 7);
            }
        }),
    ]);
    world.vm.set(faultless::Setting::FrameLimit(u64::MAX));
    world.within(&space, |guest| {
        assert_eq!((guest.load(page(0)), guest.load(page(1))), (Ok(50), Ok(51)), "a lost store");
    });
    world.finish(vec![space]);
}

/// A program stores to more pages than memory holds, while another program repeatedly takes the
/// turn to write for pages that cannot be evicted.
fn stores_against_futile_evictions() {
    let (world, _, space) = swapping(2, 16, 1);
    let locked = world.numbered(2, 2);
    world.within(&locked, |guest| {
        guest.space.mlock(guest.cpu, AT, 2 * PAGE, MemoryLock::Now).unwrap();
    });
    world.leave_frames(3);
    let done = AtomicBool::new(false);
    world.run(&[
        (&locked, &|guest| {
            while !done.load(Ordering::SeqCst) {
                guest.swap_out(AT, 2);
                spin_hint();
            }
        }),
        (&space, &|guest| {
            (0..8).for_each(|at| guest.store(page(at), 50 + at).expect("pages can be evicted"));
            done.store(true, Ordering::SeqCst);
        }),
    ]);
    world.finish(vec![space, locked]);
}

/// Two programs store to more than memory holds.
fn programs_in_little_memory() {
    const PAGES: u64 = 6;
    let (world, _, space) = swapping(2, 32, 0);
    let other = world.numbered(0, 2);
    world.within(&space, |guest| guest.store(AT, 1).unwrap());
    world.within(&other, |guest| guest.store(AT, 1).unwrap());
    world.leave_frames(6);
    let uses = |guest: &Guest<'_>| {
        let mut stored = [None; PAGES as usize];
        for round in 0..2 {
            for at in 0..PAGES {
                match guest.store(page(at), 100 * round + at) {
                    Ok(()) => stored[at as usize] = Some(100 * round + at),
                    // Other CPUs have allocated the frames freed by this CPU.
                    Err(error) => assert_eq!(error, FaultError::OutOfMemory),
                }
            }
            for (at, word) in (0..).zip(stored) {
                match (guest.load(page(at)), word) {
                    (Ok(now), Some(word)) => assert_eq!(now, word, "a lost store"),
                    (Ok(_), None) | (Err(FaultError::OutOfMemory), _) => {}
                    (Err(error), _) => panic!("{error:?}"),
                }
            }
        }
    };
    world.run(&[(&space, &uses), (&other, &uses)]);
    world.finish(vec![space, other]);
}

mod tests {
    holds!(
        stores_against_swap,
        lazily_freed_pages_against_migrations,
        reused_slots_against_swap_in,
        forks_against_swap,
        families_against_swap,
        exits_against_swap,
        forbidding_against_swap,
        moving_against_swap,
        calls_against_swap,
        locking_against_swap,
        pins_against_swap,
        pins_and_forks_against_swap,
        pages_with_pending_reads,
        unreadable_pages,
        lazily_freed_pages_against_swap,
        programs_in_little_memory,
        stores_against_futile_evictions,
    );
}

mod needs {
    use crate::support;
    use faultless::sync::mutant::Mutant;

    needs!(
        a_page_that_loses_its_age: FreeUnages in [lazily_freed_pages_against_migrations],
        a_flush_before_pages_leave: SwapFlush in [stores_against_swap],
        a_count_of_the_references: MigrateCounts in [stores_against_swap, pins_against_swap],
        a_second_look_at_the_slot: SwapInLooksAgain in [reused_slots_against_swap_in],
        a_ticket: SecondLook in [calls_against_swap],
        a_look_at_the_count: AdoptLooksAtCount in [families_against_swap],
        a_count_for_a_child: ForkCountsSlots in [forks_against_swap],
        a_flush_while_pages_are_being_forbidden: FlushLooksAtClaims in [forbidding_against_swap],
        a_look_at_locks: EvictLooksAtLocks in [locking_against_swap],
        a_reference_until_a_page_is_filled: FilledIsReferredTo in [pins_and_forks_against_swap],
        a_wait_for_the_turn_to_write: ReclaimAwaitsTurn in [stores_against_futile_evictions],
        a_dirty_page: SwappedIsDirty in [lazily_freed_pages_against_swap],
    );
}
