//! Remote access to a space, by a CPU that runs another space, while the CPUs of the space change
//! it; and spaces dropped during calls of other CPUs.

use crate::support::{Guest, PAGE, PRIVATE, RW, Space, World, page};
use faultless::{Advice, FaultError};

/// Frames of a scenario's machine.
const FRAMES: u32 = 160;

/// The first two words of a page.
fn read(guest: &Guest<'_>, space: &Space, at: u64) -> Result<[u64; 2], FaultError> {
    let mut words = [[0; 8]; 2];
    let read = space.read_bytes(guest.cpu, at, words.as_flattened_mut());
    read.map(|()| words.map(u64::from_ne_bytes)).map_err(|error| error.error)
}

fn write(guest: &Guest<'_>, space: &Space, at: u64, value: u64) -> Result<(), FaultError> {
    let words = [value.to_ne_bytes(); 2];
    space.write_bytes(guest.cpu, at, words.as_flattened()).map_err(|error| error.error)
}

/// A page is unmapped during a remote read, and its frame is reused at once.
fn reads_against_reuse() {
    let world = World::outside(2, FRAMES);
    let (space, other) = (world.numbered(2, 2), world.numbered(0, 2));
    world.run(&[
        (&other, &|guest| {
            for _ in 0..3 {
                let found = read(guest, &space, page(0));
                assert!(matches!(found, Ok([1, 1] | [0, 0])), "another's page: {found:?}");
            }
        }),
        (&space, &|guest| {
            guest.space.madvise(guest.cpu, page(0), PAGE, Advice::DontNeed).unwrap();
            guest.store(page(8), 9).unwrap();
            guest.space.munmap(guest.cpu, page(1), PAGE).unwrap();
            guest.store(page(9), 9).unwrap();
        }),
    ]);
    world.finish(vec![space, other]);
}

/// A remote write either reaches the child at the fork, or never.
fn writes_against_fork() {
    let world = World::outside(3, FRAMES);
    let (space, other) = (world.numbered(2, 2), world.numbered(0, 2));
    world.run(&[
        (&other, &|guest| {
            write(guest, &space, page(0), 5).unwrap();
            assert_eq!(read(guest, &space, page(0)), Ok([5; 2]), "a lost write");
            write(guest, &space, page(3), 6).unwrap();
        }),
        (&space, &|guest| {
            let child = guest.space.fork(guest.cpu).unwrap();
            let seen = [0, 3].map(|at| read(guest, &child, page(at)).unwrap());
            assert!(matches!(seen, [[1, 1] | [5, 5], [0, 0] | [6, 6]]), "{seen:?}");
            write(guest, &child, page(1), 7).unwrap();
            let later = [0, 3].map(|at| read(guest, &child, page(at)).unwrap());
            assert_eq!(later, seen, "a store to the parent");
            // A later call ends the child.
            drop(child);
        }),
        (&space, &|guest| {
            guest.store(page(1), 8).unwrap();
            assert!(matches!(guest.load(page(0)), Ok(1 | 5)));
            assert_eq!(guest.load(page(1)), Ok(8), "a lost write");
        }),
    ]);
    world.within(&space, |guest| {
        let words = [0, 1, 3].map(|at| guest.load(page(at)).unwrap());
        assert_eq!(words, [5, 8, 6]);
    });
    world.finish(vec![space, other]);
}

/// A page unmapped and mapped again shows later writes or zeros.
fn writes_against_munmap() {
    let world = World::outside(2, FRAMES);
    let (space, other) = (world.numbered(1, 2), world.numbered(0, 2));
    world.run(&[
        (&other, &|guest| {
            let written = write(guest, &space, page(0), 5);
            let gone = Err(FaultError::Segv { mapped: false });
            assert!(written == Ok(()) || written == gone, "{written:?}");
        }),
        (&space, &|guest| {
            guest.space.munmap(guest.cpu, page(0), PAGE).unwrap();
            let fixed = PRIVATE | faultless::MapFlags::FIXED;
            guest.space.mmap(guest.cpu, page(0), PAGE, RW, fixed).unwrap();
            assert!(matches!(guest.load(page(0)), Ok(0 | 5)));
        }),
    ]);
    world.finish(vec![space, other]);
}

/// Once stores are forbidden, earlier remote writes store no more bytes.
fn writes_against_mprotect() {
    let world = World::outside(2, FRAMES);
    let (space, other) = (world.numbered(1, 2), world.numbered(0, 2));
    world.run(&[
        (&other, &|guest| {
            let written = write(guest, &space, page(0), 5);
            let refused = Err(FaultError::Segv { mapped: true });
            assert!(written == Ok(()) || written == refused, "{written:?}");
        }),
        (&space, &|guest| {
            guest.space.mprotect(guest.cpu, page(0), PAGE, faultless::Prot::READ).unwrap();
            let seen = guest.load(page(0)).unwrap();
            guest.store(page(8), 9).unwrap();
            assert_eq!(guest.load(page(0)), Ok(seen), "a store to a read-only page");
            assert_eq!(guest.load(page(0) + 8), Ok(seen), "half of a store");
        }),
    ]);
    world.finish(vec![space, other]);
}

/// Children without an explicit exit: calls of all CPUs end them, while other CPUs fault on the
/// pages they shared.
fn children_that_are_dropped() {
    let world = World::unwatched(3, FRAMES);
    let space = world.numbered(3, 2);
    let forks = |guest: &Guest<'_>| {
        for round in 0..2 {
            drop(guest.space.fork(guest.cpu).unwrap());
            guest.store(page(round), 40 + round).unwrap();
            guest.cpu.end_dropped();
        }
    };
    world.run(&[
        (&space, &forks),
        (&space, &forks),
        (&space, &|guest| {
            guest.space.munmap(guest.cpu, page(4), PAGE).unwrap();
            guest.store(page(2), 42).unwrap();
            guest.space.munmap(guest.cpu, page(5), PAGE).unwrap();
            assert_eq!(guest.load(page(2)), Ok(42));
        }),
    ]);
    world.finish(vec![space]);
}

mod tests {
    holds!(
        reads_against_reuse,
        writes_against_fork,
        writes_against_munmap,
        writes_against_mprotect,
        children_that_are_dropped,
    );
}

mod needs {
    use crate::support;
    use faultless::sync::mutant::Mutant;

    needs!(a_second_look_from_outside: AccessLooksAgain in [reads_against_reuse]);
}
