//! Concurrent writers in one VMA: each writer has its own pages under change, and skips the pages
//! of other writers.

use crate::support::{AT, Guest, RW, World, page};
use faultless::{Prot, VirtRange};

/// The number of repetitions of a program: the duration of a call.
const ROUNDS: u64 = 4;

/// Stores to pages that only a new mapping makes writable: once allowed, the stored words stay.
fn store_once_allowed(guest: &Guest<'_>, pages: &[u64]) {
    for round in 1..=ROUNDS {
        for &at in pages {
            let value = 100 * round + at;
            if guest.store(page(at), value).is_ok() {
                assert_eq!(guest.load(page(at)), Ok(value), "the store went to the old mapping");
            }
        }
    }
}

/// Two CPUs map over neighbouring pages in the middle of a VMA, while a third CPU uses these pages
/// and the surrounding pages.
fn two_mappings_over_neighbouring_pages() {
    let world = World::new(3);
    let space = world.space(|guest| {
        guest.fill(AT, 4);
        guest.protect(page(1), 2, Prot::READ);
    });
    world.run(&[
        (&space, &|guest| guest.map(page(1), 1, RW)),
        (&space, &|guest| guest.map(page(2), 1, RW)),
        (&space, &|guest| {
            guest.store(page(0), 100).unwrap();
            store_once_allowed(guest, &[1, 2]);
            guest.load(page(3)).unwrap();
        }),
    ]);
    world.within(&space, |guest| {
        assert_eq!(guest.areas(), [VirtRange::new(AT, page(4))], "equal neighbours are one VMA");
    });
    world.finish(vec![space]);
}

/// One CPU maps over a page, and another CPU maps into the adjacent hole.
fn a_mapping_beside_one_under_change() {
    let world = World::new(3);
    let space = world.space(|guest| {
        guest.fill(AT, 4);
        guest.protect(page(1), 1, Prot::READ);
        guest.unmap(page(2), 1);
    });
    world.run(&[
        (&space, &|guest| guest.map(page(1), 1, RW)),
        (&space, &|guest| guest.map(page(2), 1, RW)),
        (&space, &|guest| store_once_allowed(guest, &[1])),
    ]);
    world.within(&space, |guest| {
        assert_eq!(guest.areas(), [VirtRange::new(AT, page(4))], "equal neighbours are one VMA");
    });
    world.finish(vec![space]);
}

/// One CPU reduces the rights of a page, one unmaps another page, and one discards a third page,
/// all in one VMA.
fn three_changes_of_one_vma() {
    let world = World::new(4);
    let space = world.space(|guest| guest.fill(AT, 5));
    world.run(&[
        (&space, &|guest| guest.protect(page(1), 1, Prot::READ)),
        (&space, &|guest| guest.unmap(page(2), 1)),
        (&space, &|guest| guest.empty(page(3), 1)),
        (&space, &|guest| {
            guest.store(page(0), 100).unwrap();
            guest.load(page(1)).unwrap();
            let _ = guest.load(page(3));
            guest.store(page(4), 104).unwrap();
        }),
    ]);
    world.finish(vec![space]);
}

/// A store allowed only by the new mapping goes to the new mapping.
fn stores_against_a_mapping_that_permits_stores() {
    let world = World::new(2);
    let space = world.space(|guest| {
        guest.fill(AT, 3);
        guest.protect(page(1), 1, Prot::READ);
    });
    world.run(&[
        (&space, &|guest| guest.map(page(1), 1, RW)),
        (&space, &|guest| store_once_allowed(guest, &[1])),
    ]);
    world.finish(vec![space]);
}

mod tests {
    holds!(
        two_mappings_over_neighbouring_pages,
        a_mapping_beside_one_under_change,
        three_changes_of_one_vma,
        stores_against_a_mapping_that_permits_stores,
    );
}

mod needs {
    use crate::support;
    use faultless::sync::mutant::Mutant;

    needs!(
        busy_vmas_are_skipped: BusyIsLeft in [a_mapping_beside_one_under_change],
        changing_vmas_are_stopped: ChangesStopped in [stores_against_a_mapping_that_permits_stores],
    );
}
