//! Reclaim of lazily freed pages by a CPU without free frames: against stores, calls, and the end
//! of the space.

use crate::support::{AT, Guest, RW, Space, World, page};
use faultless::{Advice, Prot};
use std::sync::Mutex;

/// The number of lazily freed pages.
const LAZY: u64 = 4;
/// The first untouched page.
const UNTOUCHED: u64 = 8;

/// A world, and a space in which pages are lazily freed.
fn freed_lazily() -> (World, Space) {
    let (world, space) = World::with_pages(LAZY);
    world.within(&space, |guest| {
        guest.map(page(UNTOUCHED), 6, RW);
        guest.advise(AT, LAZY, Advice::Free);
    });
    (world, space)
}

/// Needs `pages` frames, which are there or have to be reclaimed.
fn wants_frames(guest: &Guest<'_>, from: u64, pages: u64) {
    for at in from..from + pages {
        // Another CPU may have the reclaimed frames.
        if guest.store(page(at), 100 + at).is_ok() {
            guest.load(page(at)).unwrap();
        }
    }
}

/// Uses three of the pages.
fn uses(guest: &Guest<'_>) {
    let _ = guest.load(page(0));
    let _ = guest.store(page(0), 10);
    let _ = guest.load(page(0));
    let _ = guest.load(page(1));
    let _ = guest.store(page(2) + 8, 11);
    let _ = guest.load(page(2));
}

/// Stores to a lazily freed page are kept, whenever its reclaim begins.
fn stores_against_reclaim() {
    let (world, space) = freed_lazily();
    world.leave_frames(1);
    world.run(&[
        (&space, &uses),
        (&space, &|guest| {
            let _ = guest.store(page(1), 20);
            let _ = guest.load(page(0));
            let _ = guest.store(page(0) + 8, 21);
            let _ = guest.load(page(1));
            let _ = guest.load(page(2) + 8);
        }),
        (&space, &|guest| wants_frames(guest, UNTOUCHED, 3)),
    ]);
    world.finish(vec![space]);
}

/// The same for another space, in which no memory is short.
fn stores_against_reclaim_by_another_space() {
    let (world, space) = freed_lazily();
    let other = world.space(|guest| {
        guest.map(page(UNTOUCHED), 6, RW);
        guest.store(page(UNTOUCHED), 1).unwrap();
    });
    world.leave_frames(1);
    world.run(&[
        (&space, &|guest| {
            for round in 1..=2 {
                let _ = guest.load(page(0));
                let _ = guest.store(page(0), 10 * round);
                let _ = guest.load(page(1));
            }
        }),
        (&space, &|guest| {
            let _ = guest.load(page(1));
            let _ = guest.store(page(1), 20);
            let _ = guest.load(page(0));
            let _ = guest.load(page(1));
        }),
        (&other, &|guest| wants_frames(guest, UNTOUCHED + 1, 3)),
    ]);
    world.finish(vec![space, other]);
}

/// Stores to a lazily freed page are kept, whenever advice evicts the page.
fn stores_against_eviction() {
    let (world, space) = freed_lazily();
    world.run(&[
        (&space, &uses),
        (&space, &|guest| {
            let _ = guest.store(page(1), 20);
            let _ = guest.load(page(0));
            guest.advise(page(2), 2, Advice::Free);
            let _ = guest.store(page(0) + 8, 21);
            let _ = guest.load(page(1));
            let _ = guest.load(page(2));
        }),
        (&space, &|guest| {
            guest.swap_out(AT, 2);
            guest.swap_out(AT, LAZY);
        }),
    ]);
    world.finish(vec![space]);
}

/// Advice, calls that move and take away, and a fork, while pages are reclaimed.
fn calls_against_reclaim() {
    let (world, space) = freed_lazily();
    world.leave_frames(2);
    let child = Mutex::new(None);
    world.run(&[
        (&space, &|guest| {
            guest.protect(page(1), 1, Prot::READ);
            let _ = guest.store(page(0), 10);
            guest.advise(page(0), 2, Advice::Free);
            let _ = guest.load(page(0));
            guest.unmap(page(0), 1);
            let _ = guest.load(page(1));
        }),
        (&space, &|guest| {
            *child.lock().unwrap() = guest.try_fork(|_| false);
            let _ = guest.store(page(2), 20);
            let _ = guest.load(page(2));
            guest.empty(page(3), 1);
        }),
        (&space, &|guest| wants_frames(guest, UNTOUCHED, 4)),
    ]);
    let child = child.into_inner().unwrap();
    world.finish([Some(space), child].into_iter().flatten().collect());
}

/// Pages are lazily freed during stores, and are reclaimed: later stores are kept.
fn stores_against_advice_and_reclaim() {
    let (world, space) = World::with_pages(2);
    world.within(&space, |guest| guest.map(page(UNTOUCHED), 6, RW));
    world.leave_frames(1);
    world.run(&[
        (&space, &|guest| {
            for round in 1..=4 {
                let _ = guest.store(page(0), 10 * round);
                let _ = guest.load(page(0));
            }
        }),
        (&space, &|guest| {
            let _ = guest.store(page(1), 20);
            guest.advise(AT, 2, Advice::Free);
            let _ = guest.store(page(1), 21);
            let _ = guest.load(page(1));
        }),
        (&space, &|guest| wants_frames(guest, UNTOUCHED, 3)),
    ]);
    world.finish(vec![space]);
}

/// A space ends while another CPU searches for pages in the space. The frames of the space soon
/// have other owners, who store words there that look like an entry of a lazily freed page.
fn the_end_of_a_space_against_reclaim() {
    let (world, lazy) = freed_lazily();
    let home = world.space(|guest| {
        guest.map(page(UNTOUCHED), 8, RW);
        guest.store(page(UNTOUCHED + 7), 1).unwrap();
    });
    let lazy = Mutex::new(Some(lazy));
    let stored = world.quietly(|cpu| home.page_at(cpu, page(UNTOUCHED + 7)).unwrap());
    let entry = u64::from(stored.frame.0) << 12 | 0x25;
    // The page's content also looks like a table of such entries.
    world.within(&home, |guest| {
        [0, 8].into_iter().for_each(|word| guest.store(page(UNTOUCHED + 7) + word, entry).unwrap());
    });
    world.leave_frames(0);
    let wants_frames = |guest: &Guest<'_>, from: u64, pages: u64| {
        for at in (from..from + pages).map(page) {
            if guest.store(at, entry).is_ok() && guest.store(at + 8, entry).is_ok() {
                assert_eq!(guest.load(at), Ok(entry));
            }
        }
    };
    world.run(&[
        (&home, &|guest| {
            let lazy = lazy.lock().unwrap().take().unwrap();
            lazy.exit(guest.cpu);
            wants_frames(guest, UNTOUCHED, 3);
            guest.load(page(UNTOUCHED + 7)).unwrap();
        }),
        (&home, &|guest| wants_frames(guest, UNTOUCHED + 3, 2)),
    ]);
    world.finish(vec![home]);
}

/// One CPU unlinks tables and idles. Another CPU finds their frames.
fn frames_retired_by_an_idle_cpu() {
    let world = World::new(2);
    let far = AT + (1 << 30);
    let space = world.space(|guest| {
        for table in [far, far + (512 << 12)] {
            guest.map(table, 2, RW);
            guest.store(table, 1).unwrap();
        }
        guest.map(page(UNTOUCHED), 4, RW);
        guest.store(page(UNTOUCHED), 1).unwrap();
    });
    world.leave_frames(0);
    world.run(&[
        (&space, &|guest| {
            guest.unmap(far, 2);
            guest.unmap(far + (512 << 12), 2);
        }),
        (&space, &|guest| {
            let _ = guest.load(far);
            wants_frames(guest, UNTOUCHED + 1, 3);
        }),
    ]);
    world.finish(vec![space]);
}

mod tests {
    holds!(
        stores_against_reclaim,
        stores_against_reclaim_by_another_space,
        stores_against_advice_and_reclaim,
        stores_against_eviction,
        calls_against_reclaim,
        the_end_of_a_space_against_reclaim,
        frames_retired_by_an_idle_cpu,
    );
}

mod needs {
    use crate::support;
    use faultless::sync::mutant::Mutant;

    needs!(
        checking_the_dirty_bit: ReclaimLooksAtDirty in [stores_against_reclaim],
        checking_the_dirty_bit_of_an_evicted_page: ReclaimLooksAtDirty in [stores_against_eviction],
        flushing_evicted_pages: EvictFlush in [stores_against_eviction],
        flushing_before_reuse: ReclaimFlush in [stores_against_reclaim],
        flushing_another_space: ReclaimFlush in [stores_against_reclaim_by_another_space],
        flushing_lazily_freed_pages: FreeFlush in [stores_against_advice_and_reclaim],
        waiting_for_reclaim: ExitAwaitsReclaim in [the_end_of_a_space_against_reclaim],
    );
}
