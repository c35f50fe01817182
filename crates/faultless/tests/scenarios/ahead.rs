//! Batches: faults that prefault pages, against each other and against calls that remove these
//! pages. In each scenario, the first faults certainly prefault batches of four pages, because
//! eight used pages lie below.

use crate::support::{AT, Guest, PAGE, RW, Space, World, page};
use faultless::Prot;

/// Used pages from which the predictor infers the next pages.
const BEFORE: u64 = 8;
/// The pages of a scenario: the used pages, and the pages mapped in batches.
const PAGES: u64 = 16;

/// Creates the world and the space shared by three CPUs.
fn before_a_batch() -> (World, Space) {
    let world = World::new(3);
    let space = world.space(|guest| {
        guest.map(AT, PAGES, RW);
        (0..BEFORE).for_each(|at| guest.store(page(at), 1 + at).unwrap());
    });
    (world, space)
}

/// Pages in the middle of a batch are unmapped, and come back.
fn batches_against_munmap() {
    let (world, space) = before_a_batch();
    world.run(&[
        (&space, &|guest| {
            for at in BEFORE..BEFORE + 6 {
                let _ = guest.store(page(at), 100 + at);
                let _ = guest.load(page(at));
            }
        }),
        (&space, &|guest| {
            guest.unmap(page(BEFORE + 1), 2);
            let _ = guest.load(page(BEFORE));
            guest.map(page(BEFORE + 1), 1, RW);
            guest.load(page(BEFORE + 1)).unwrap();
        }),
        (&space, &|guest| {
            let _ = guest.load(page(BEFORE + 2));
            let _ = guest.store(page(BEFORE + 3), 200);
            let _ = guest.load(page(BEFORE + 1));
        }),
    ]);
    world.finish(vec![space]);
}

/// Two want the same pages at the same time, and a third empties them.
fn batches_against_each_other() {
    let (world, space) = before_a_batch();
    let user = |guest: &Guest<'_>, first: u64| {
        for at in [first, first + 1, 1 - first, first + 2, 3] {
            guest.store(page(BEFORE + at) + 8 * first, 100 + 10 * first + at).unwrap();
            guest.load(page(BEFORE + at)).unwrap();
        }
    };
    world.run(&[
        (&space, &|guest| user(guest, 0)),
        (&space, &|guest| user(guest, 1)),
        (&space, &|guest| {
            guest.empty(page(BEFORE + 1), 2);
            guest.load(page(BEFORE + 2)).unwrap();
        }),
    ]);
    world.finish(vec![space]);
}

/// Zero pages are stored to, by a CPU whose fault also copies their neighbours, while other CPUs
/// read the pages.
fn batches_over_zeros() {
    let (world, space) = before_a_batch();
    world.within(&space, |guest| {
        (BEFORE..PAGES).for_each(|at| assert_eq!(guest.load(page(at)), Ok(0)));
    });
    let reader = |guest: &Guest<'_>| {
        for at in [1, 2, 1, 3, 1, 2] {
            guest.load(page(BEFORE + at)).unwrap();
        }
    };
    world.run(&[
        (&space, &|guest| {
            for at in 0..4 {
                guest.store(page(BEFORE + at), 100 + at).unwrap();
            }
        }),
        (&space, &reader),
        (&space, &reader),
    ]);
    world.finish(vec![space]);
}

/// Zero pages are stored to in batches, while mprotect adds one permission to all pages. A store to
/// a page which mprotect has not reached finds the old permissions in the entry. The fault must not
/// mistake these for the new permissions, and a CPU with busy entries waits for mprotect's flush.
fn batches_over_zeros_against_mprotect() {
    let (world, space) = before_a_batch();
    world.within(&space, |guest| {
        (BEFORE..PAGES).for_each(|at| assert_eq!(guest.load(page(at)), Ok(0)));
    });
    world.run(&[
        (&space, &|guest| guest.store(page(BEFORE), 100).unwrap()),
        (&space, &|guest| guest.protect(AT, PAGES, RW | Prot::EXEC)),
        (&space, &|guest| {
            guest.store(page(PAGES - 1), 200).unwrap();
            assert_eq!(guest.load(page(PAGES - 1)), Ok(200));
        }),
    ]);
    world.finish(vec![space]);
}

/// Prefaulted pages are moved, shared with a child, and evaluated during their unmapping.
fn batches_against_fork_and_moves() {
    let (world, space) = before_a_batch();
    let there = AT + 64 * PAGE;
    world.run(&[
        (&space, &|guest| {
            for at in BEFORE..BEFORE + 6 {
                let _ = guest.store(page(at), 100 + at);
            }
        }),
        (&space, &|guest| {
            let child = guest.fork(|_| false);
            guest.switch(&child, |guest| {
                guest.store(page(BEFORE + 2), 300).unwrap();
                guest.unmap(page(BEFORE), 2);
            });
            child.exit(guest.cpu);
        }),
        (&space, &|guest| {
            let _ = guest.store(page(BEFORE + 4), 200);
            guest.relocate(page(BEFORE + 4), there, 2);
            guest.load(there).unwrap();
        }),
    ]);
    world.finish(vec![space]);
}

mod tests {
    holds!(
        batches_against_munmap,
        batches_against_each_other,
        batches_over_zeros,
        batches_over_zeros_against_mprotect,
        batches_against_fork_and_moves,
    );
}

mod needs {
    use crate::support;
    use faultless::sync::mutant::Mutant;

    needs!(
        asking_the_ticket: BatchAsks in [batches_against_munmap] under AHEAD,
        taking_each_entry: BatchTakesEach in [batches_against_each_other] under AHEAD,
        giving_frames_back: BatchGivesBack in [batches_against_munmap] under AHEAD,
        flushing_zeros: ZeroPageFlush in [batches_over_zeros] under AHEAD,
        looking_again_without_a_window:
            RetriesAlone in [batches_over_zeros_against_mprotect] under AHEAD,
        waiting_for_held_entries: ReplaceWaits in [batches_against_munmap] under AHEAD,
    );
}
