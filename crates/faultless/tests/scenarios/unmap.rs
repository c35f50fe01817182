//! Faults against calls that remove pages: munmap, mmap over mapped pages, advice; and the tables
//! above them.
//!
//! No test here fails without `TableValidated`: a table published for an unmapped VMA stays empty,
//! because the page is refused, and is freed with the table above or with the space.

use crate::support::{AT, Guest, RW, World, page};
use faultless::Advice;
use std::sync::atomic::{AtomicBool, Ordering};

const PAGES: u64 = 3;

/// The number of repetitions of a program: the duration of a call.
const ROUNDS: u64 = 4;

/// Two CPUs load and store while a third unmaps and maps again.
fn faults_against_munmap() {
    let (world, space) = World::with_pages(PAGES);
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

/// As above, but a mapping exists at every moment: no access may be refused.
fn faults_against_mapping_over() {
    let (world, space) = World::with_pages(PAGES);
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

/// Pages are emptied during their use.
fn faults_against_dontneed() {
    let (world, space) = World::with_pages(PAGES);
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

/// Freed frames are at once used by another space.
fn unmapped_frames_are_reused() {
    let (world, space) = World::with_pages(PAGES);
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
            guest.cpu.wait_grace();
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

/// Pages are lazily freed during stores. A later store marks the page dirty; otherwise, a CPU short
/// of memory would reclaim the page together with the store.
fn stores_against_lazy_freeing() {
    let (world, space) = World::with_pages(PAGES);
    let free = AtomicBool::new(false);
    let stored = [const { AtomicBool::new(false) }; 2];
    let user = |guest: &Guest<'_>, at: u64, stored: &AtomicBool| {
        for round in 1..=ROUNDS {
            let after = free.load(Ordering::Relaxed);
            guest.store(page(at), 100 * round + at).unwrap();
            stored.fetch_or(after, Ordering::Relaxed);
            guest.load(page(1 - at)).unwrap();
        }
    };
    world.run(&[
        (&space, &|guest| user(guest, 0, &stored[0])),
        (&space, &|guest| user(guest, 1, &stored[1])),
        (&space, &|guest| {
            guest.advise(AT, PAGES, Advice::Free);
            free.store(true, Ordering::Relaxed);
            guest.store(page(2), 30).unwrap();
        }),
    ]);
    world.within(&space, |guest| {
        assert!(guest.is_dirty(page(2)), "the store of the freeing CPU is lost");
        for (at, stored) in (0..2).zip(&stored) {
            let marked = guest.is_dirty(page(at));
            assert!(marked || !stored.load(Ordering::Relaxed), "a store to page {at} is lost");
        }
    });
    world.finish(vec![space]);
}

/// Advice that changes, splits and joins VMAs removes no pages from programs that use them.
fn faults_against_advice() {
    let (world, space) = World::with_pages(2);
    world.within(&space, |guest| guest.map(page(2), 1, RW));
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                guest.store(page(0), 100 * round).unwrap();
                guest.load(page(2)).unwrap();
                guest.store(page(1), 100 * round + 1).unwrap();
            }
        }),
        (&space, &|guest| {
            guest.advise(page(1), 1, Advice::Random);
            guest.advise(page(0), 2, Advice::WipeOnFork);
            guest.load(page(0)).unwrap();
            guest.advise(page(0), 3, Advice::KeepOnFork);
            guest.advise(page(1), 1, Advice::Normal);
        }),
        (&space, &|guest| {
            guest.advise(page(1), 2, Advice::PopulateWrite);
            guest.store(page(2), 32).unwrap();
            guest.advise(page(2), 1, Advice::DontFork);
            guest.load(page(1)).unwrap();
        }),
    ]);
    world.finish(vec![space]);
}

/// A call populates memory that another call unmaps.
fn populating_against_munmap() {
    let world = World::new(2);
    let space = world.space(|guest| guest.map(AT, PAGES, RW));
    world.run(&[
        (&space, &|guest| {
            for advice in [Advice::PopulateWrite, Advice::PopulateRead] {
                guest.advise(AT, PAGES, advice);
            }
        }),
        (&space, &|guest| {
            guest.unmap(page(1), 1);
            guest.map(page(1), 2, RW);
            guest.load(page(1)).unwrap();
        }),
    ]);
    world.finish(vec![space]);
}

mod tests {
    holds!(
        faults_against_munmap,
        faults_against_mapping_over,
        faults_against_dontneed,
        unmapped_frames_are_reused,
        tables_against_prune,
        stores_against_lazy_freeing,
        faults_against_advice,
        populating_against_munmap,
    );
}

mod needs {
    use crate::support;
    use faultless::sync::mutant::Mutant;

    needs!(
        the_second_look: SecondLook in [faults_against_munmap, faults_against_dontneed],
        waiting_for_held_entries: ReplaceWaits in [faults_against_munmap, faults_against_dontneed],
        flushing_first: FlushFirst in [unmapped_frames_are_reused],
        dropping_translations: DropTranslations in [unmapped_frames_are_reused],
        awaiting_answers: AwaitAnswers in [unmapped_frames_are_reused],
        flushing_freed_pages: FreeFlush in [stores_against_lazy_freeing],
        flushing_the_old_space: LeaveFlush in [unmapped_frames_are_reused],
        a_table_s_grace: TableGrace in [tables_against_prune],
    );
}
