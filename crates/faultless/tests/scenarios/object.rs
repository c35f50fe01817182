//! Pages of objects: shared and private mappings in two spaces, against truncation.

use crate::support::{AT, Guest, NONE, RW, Space, World, page};
use faultless::{MapFlags, Object, PrivateCopies, Shared};

/// The number of repetitions of a program: the duration of a call.
const ROUNDS: u64 = 5;

/// Truncates the object to `left` of its two pages, in both spaces, and extends it to its old
/// length.
fn truncate_and_extend(
    guest: &Guest<'_>,
    object: &Shared<Object>,
    spaces: [&Space; 2],
    meanwhile: impl Fn(),
) {
    let range = (page(1), 1);
    let [first, second] = spaces;
    guest.change_of(first.id(), range, Some(NONE), true, || {
        guest.change_of(second.id(), range, Some(NONE), false, || {
            object.set_pages(guest.cpu, 1).unwrap();
            meanwhile();
            spaces
                .iter()
                .for_each(|space| space.revoke(guest.cpu, object, 1..2, PrivateCopies::Drop));
        });
    });
    guest.change_of(first.id(), range, Some(RW), false, || {
        guest.change_of(second.id(), range, Some(RW), false, || {
            object.set_pages(guest.cpu, 2).unwrap();
        });
    });
}

/// Two spaces use an object that a third CPU shortens, and makes longer again.
fn accesses_against_truncation() {
    let world = World::new(3);
    let object = world.object(2, 2);
    let space = world.space(|guest| {
        guest.map_object(AT, 2, &object, RW, MapFlags::SHARED);
        guest.written(2);
    });
    let other = world.space(|guest| {
        guest.map_object(AT, 2, &object, RW, MapFlags::SHARED);
        let mut oracle = guest.world.oracle();
        (0..2).for_each(|at| oracle.alias((space.id(), page(at)), (guest.space.id(), page(at))));
    });
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                guest.store(page(0), 100 * round).unwrap();
                let _ = guest.load(page(1));
                let _ = guest.store(page(1), 100 * round + 1);
            }
        }),
        (&other, &|guest| {
            for round in 1..=ROUNDS {
                let _ = guest.store(page(1), 100 * round + 2);
                guest.load(page(0)).unwrap();
                let _ = guest.load(page(1));
            }
        }),
        (&space, &|guest| {
            truncate_and_extend(guest, &object, [&space, &other], || {});
            guest.load(page(1)).unwrap();
            guest.load(page(0)).unwrap();
        }),
    ]);
    world.finish_with(vec![space, other], vec![object]);
}

/// The object's page is present, but unmapped. Its frame has another owner before the mapping is
/// revoked.
fn a_mapping_against_a_removed_page() {
    let world = World::new(2);
    let object = world.object(2, 2);
    let space = world.space(|guest| {
        guest.map_object(AT, 2, &object, RW, MapFlags::SHARED);
        guest.map(page(8), 2, RW);
        guest.store(page(9), 1).unwrap();
        guest.written(2);
    });
    let other = world.space(|_| {});
    world.run(&[
        (&space, &|guest| {
            for _ in 0..ROUNDS {
                let _ = guest.load(page(1));
            }
        }),
        (&space, &|guest| {
            truncate_and_extend(guest, &object, [&space, &other], || {
                guest.store(page(8), 80).unwrap();
            });
            guest.load(page(8)).unwrap();
        }),
    ]);
    world.finish_with(vec![space, other], vec![object]);
}

/// A page is created while the object becomes too short for it.
fn a_first_touch_against_truncation() {
    let world = World::new(2);
    let object = world.object(2, 0);
    let space = world.space(|guest| {
        guest.map_object(AT, 2, &object, RW, MapFlags::SHARED);
        guest.store(page(0), 1).unwrap();
    });
    world.run(&[
        (&space, &|guest| {
            let _ = guest.store(page(1), 10);
        }),
        (&space, &|guest| {
            guest.change((page(1), 1), Some(NONE), true, || {
                object.set_pages(guest.cpu, 1).unwrap();
                guest.space.revoke(guest.cpu, &object, 1..2, PrivateCopies::Drop);
            });
        }),
    ]);
    world.finish_with(vec![space], vec![object]);
}

/// A private mapping copies an object's pages, which stay unchanged. Another mapping reads them.
fn private_copies() {
    let world = World::new(3);
    let object = world.object(2, 1);
    let space = world.space(|guest| {
        guest.map_object(AT, 2, &object, RW, MapFlags::PRIVATE);
        guest.written(1);
    });
    let other = world.space(|guest| {
        guest.map_object(AT, 2, &object, RW, MapFlags::SHARED);
        guest.written(1);
    });
    world.run(&[
        (&space, &|guest| {
            guest.load(page(0)).unwrap();
            for round in 1..=ROUNDS {
                guest.store(page(0), 100 * round).unwrap();
                guest.load(page(0)).unwrap();
                guest.store(page(1), 100 * round + 1).unwrap();
            }
        }),
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                guest.load(page(0)).unwrap();
                guest.store(page(0) + 8, 100 * round + 2).unwrap();
                guest.load(page(1)).unwrap();
            }
        }),
        (&other, &|guest| {
            for _ in 0..ROUNDS {
                guest.load(page(0)).unwrap();
                guest.load(page(0) + 8).unwrap();
            }
        }),
    ]);
    world.finish_with(vec![space, other], vec![object]);
}

/// Pages are added beyond the range of the object's tables, while other pages are read and
/// truncated.
fn pages_beyond_the_tables() {
    const FAR: [u64; 3] = [512, 1024, 512 * 512];
    let world = World::unwatched(3, 160);
    let object = world.object(1, 1);
    world.quietly(|cpu| object.set_pages(cpu, FAR[2] + 1).unwrap());
    let space = world.space(|_| {});
    let write = |guest: &Guest<'_>, index| {
        guest.poll();
        // SAFETY: a word of a lent page; one thread runs at a time.
        object.write_page(guest.cpu, index, |at| unsafe { at.cast::<u64>().write(index) })
    };
    let read = |guest: &Guest<'_>, index| {
        guest.poll();
        // SAFETY: as above.
        let word = |at: *const u8| unsafe { at.cast::<u64>().read() };
        object.read_page(guest.cpu, index, |at| at.map(word)).unwrap()
    };
    world.run(&[
        (&space, &|guest| {
            write(guest, FAR[0]).unwrap();
            assert_eq!(read(guest, FAR[0]), Some(FAR[0]), "a lost write");
        }),
        (&space, &|guest| {
            write(guest, FAR[1]).unwrap();
            assert_eq!(read(guest, FAR[1]), Some(FAR[1]), "a lost write");
            let _ = write(guest, FAR[2]);
        }),
        (&space, &|guest| {
            assert_eq!(read(guest, 0), Some(7));
            object.set_pages(guest.cpu, FAR[1] + 1).unwrap();
            assert_eq!(read(guest, FAR[2]), None);
            assert_eq!(read(guest, 0), Some(7));
        }),
    ]);
    world.within(&space, |guest| {
        assert_eq!([FAR[0], FAR[1]].map(|index| read(guest, index)), [FAR[0], FAR[1]].map(Some));
    });
    world.finish_with(vec![space], vec![object]);
}

mod tests {
    holds!(
        pages_beyond_the_tables,
        accesses_against_truncation,
        a_mapping_against_a_removed_page,
        a_first_touch_against_truncation,
        private_copies,
    );
}

mod needs {
    use crate::support;
    use faultless::sync::mutant::Mutant;

    needs!(
        a_root_that_is_the_only_one: GrowsOnce in [pages_beyond_the_tables],
        a_look_at_the_length_below_a_new_root: ObjectLooksAgain in [pages_beyond_the_tables],
        a_look_at_the_length: ObjectLooksAgain in [a_first_touch_against_truncation],
        a_second_look_at_a_referenced_page: ReferLooksAgain in [a_mapping_against_a_removed_page],
    );
}
