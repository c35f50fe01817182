//! Accesses against mprotect, first stores to zero pages, and the lifetime of the memory read by
//! faults.

use crate::support::{AT, NONE, RW, World, page};
use faultless::Prot;
use faultless::sync::observe::at_once;

/// The number of repetitions of a program: the duration of a call.
const ROUNDS: u64 = 4;

/// Stores, while the right to store is taken and given.
fn stores_against_downgrade() {
    let world = World::new(3);
    let space = world.space(|guest| {
        guest.map(AT, 3, RW);
        (0..2).for_each(|at| guest.store(page(at), 1 + at).unwrap());
    });
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                let _ = guest.store(page(0), 100 * round);
                guest.load(page(0)).unwrap();
                let _ = guest.store(page(1), 100 * round + 1);
                let _ = guest.store(page(2), 100 * round + 2);
            }
        }),
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                guest.load(page(1)).unwrap();
                let _ = guest.store(page(1), 100 * round + 3);
                let _ = guest.store(page(0), 100 * round + 4);
            }
        }),
        (&space, &|guest| {
            guest.protect(AT, 3, Prot::READ);
            guest.load(page(0)).unwrap();
            guest.protect(page(0), 2, RW);
            guest.store(page(0), 30).unwrap();
        }),
    ]);
    world.finish(vec![space]);
}

/// Pages are hidden, and restored unchanged.
fn accesses_against_hiding() {
    let world = World::new(3);
    let space = world.space(|guest| {
        guest.map(AT, 3, RW);
        (0..2).for_each(|at| guest.store(page(at), 1 + at).unwrap());
    });
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                let _ = guest.load(page(0));
                let _ = guest.store(page(1), 100 * round);
                let _ = guest.load(page(1));
                let _ = guest.load(page(2));
            }
        }),
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                let _ = guest.load(page(1));
                let _ = guest.store(page(2), 100 * round + 1);
                let _ = guest.load(page(0));
            }
        }),
        (&space, &|guest| {
            guest.protect(page(0), 2, NONE);
            guest.empty(page(1), 1);
            guest.protect(AT, 3, RW);
            guest.load(page(0)).unwrap();
            guest.load(page(1)).unwrap();
        }),
    ]);
    world.finish(vec![space]);
}

/// Rights are only ever added, so every access that is in order before is served.
fn doubt_against_upgrade() {
    let world = World::new(3);
    let space = world.space(|guest| guest.map(AT, 3, Prot::READ));
    world.run(&[
        (&space, &|guest| {
            guest.load(page(0)).unwrap();
            let _ = guest.store(page(0), 10);
            guest.load(page(1)).unwrap();
            let _ = guest.store(page(1), 11);
        }),
        (&space, &|guest| {
            guest.load(page(1)).unwrap();
            let _ = guest.store(page(1), 21);
            guest.load(page(0)).unwrap();
        }),
        (&space, &|guest| {
            guest.protect(page(1), 1, RW);
            guest.store(page(1), 31).unwrap();
            guest.protect(AT, 3, RW);
            guest.store(page(0), 30).unwrap();
        }),
    ]);
    world.finish(vec![space]);
}

/// All CPUs read the zero page, and two of them store first.
fn first_stores_to_zeros() {
    let world = World::new(3);
    let space = world.space(|guest| {
        guest.map(AT, 2, RW);
        guest.store(page(1), 1).unwrap();
    });
    world.run(&[
        (&space, &|guest| {
            guest.load(page(0)).unwrap();
            guest.store(page(0), 10).unwrap();
            guest.load(page(0)).unwrap();
        }),
        (&space, &|guest| {
            guest.load(page(0)).unwrap();
            guest.store(page(0) + 8, 20).unwrap();
            guest.load(page(0)).unwrap();
            guest.load(page(0) + 8).unwrap();
        }),
        (&space, &|guest| {
            (0..3).for_each(|_| assert!(guest.load(page(0)).is_ok()));
            guest.load(page(0) + 8).unwrap();
        }),
    ]);
    world.finish(vec![space]);
}

/// VMAs, nodes of the tree and tables are freed during faults that read them. The memory of a VMA
/// becomes the VMA of other pages at once.
fn faults_against_the_freeing_of_their_structures() {
    let world = World::new(3);
    let space = world.space(|guest| {
        guest.map(AT, 4, RW);
        guest.store(page(0), 1).unwrap();
    });
    world.run(&[
        (&space, &|guest| {
            for at in 0..4 {
                let _ = guest.store(page(at), 10 + at);
            }
            let _ = guest.load(page(0));
        }),
        (&space, &|guest| {
            guest.protect(page(1), 1, Prot::READ);
            guest.cpu.wait_grace();
            guest.protect(page(1), 1, RW);
            guest.cpu.wait_grace();
            guest.unmap(AT, 4);
            guest.cpu.wait_grace();
            (4..8).for_each(|at| guest.map(page(2 * at), 1, RW));
        }),
        (&space, &|guest| {
            for at in 0..4 {
                let _ = guest.load(page(3 - at));
            }
            guest.cpu.wait_grace();
        }),
    ]);
    world.finish(vec![space]);
}

/// Objects unlinked long ago are freed in small parts, as many accumulate.
fn faults_against_collection() {
    let world = World::new(2);
    let space = world.space(|guest| {
        // The pages are untouched: a call that drops translations waits for faults.
        guest.map(AT, 2, RW);
        guest.map(page(4), 2, RW);
    });
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                let _ = guest.store(page(0), 100 * round);
                let _ = guest.load(page(1));
            }
        }),
        (&space, &|guest| {
            guest.protect(AT, 2, Prot::READ);
            // Retires objects elsewhere. The single calls do not matter.
            for _ in 0..40 {
                at_once(|| {
                    guest.protect(page(4), 1, Prot::READ);
                    guest.protect(page(4), 1, RW);
                });
            }
            guest.protect(AT, 2, RW);
        }),
    ]);
    world.finish(vec![space]);
}

mod tests {
    holds!(
        stores_against_downgrade,
        accesses_against_hiding,
        doubt_against_upgrade,
        first_stores_to_zeros,
        faults_against_the_freeing_of_their_structures,
        faults_against_collection,
    );
}

mod needs {
    use crate::support;
    use faultless::sync::mutant::Mutant;

    needs!(
        the_second_look: SecondLook in [stores_against_downgrade, accesses_against_hiding],
        waiting_for_held_entries: ReplaceWaits in [stores_against_downgrade, accesses_against_hiding],
        flushing_lost_rights: ProtectFlush in [stores_against_downgrade],
        flushing_zeros: ZeroPageFlush in [first_stores_to_zeros],
        marks: SectionMark in [faults_against_collection],
        looking_at_marks: LookAtMarks in [faults_against_collection],
        both_epochs: SecondEpoch in [faults_against_collection],
    );
}
