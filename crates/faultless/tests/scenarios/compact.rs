//! Compaction while programs use the moved pages, and other CPUs allocate and free frames: against
//! accesses, forks, unmapping calls, pins, blocks of a kernel, and a second compaction. Blocks have
//! few frames, so that the machines can be small.

use crate::support::{AT, Guest, PAGE, RW, Space, World, page};
use faultless::Prot;

/// Frames of the near node.
const FRAMES: u32 = 64;
/// log2 of the frames of a block.
const ORDER: u8 = 2;
/// The number of repetitions of a program: the duration of a compaction of all memory.
const ROUNDS: u64 = 4;
/// The initial number of pages, and the spacing of the remaining pages.
const PAGES: u64 = 16;
const KEPT: usize = 3;

/// Compacts all memory.
fn compacts(guest: &Guest<'_>) {
    guest.cpu.compact_small(ORDER);
}

/// Creates a space with scattered pages: every third of 16 pages remains.
fn scattered(world: &World) -> Space {
    let space = world.numbered(PAGES, 2);
    world.within(&space, |guest| {
        for at in (0..PAGES).filter(|at| !at.is_multiple_of(KEPT as u64)) {
            guest.unmap(page(at), 1);
        }
        guest.cpu.drain();
    });
    space
}

fn kept() -> impl Iterator<Item = u64> {
    (0..PAGES).step_by(KEPT)
}

fn accesses_against_compaction() {
    let world = World::unwatched(3, FRAMES);
    let space = scattered(&world);
    let uses = |first: usize| {
        move |guest: &Guest<'_>| {
            for round in 1..=ROUNDS {
                for at in kept().skip(first).step_by(2) {
                    guest.store(page(at), 100 * round + at).unwrap();
                    assert_eq!(guest.load(page(at)), Ok(100 * round + at), "a lost write");
                    assert_eq!(guest.load(page(at) + 8), Ok(at + 1), "another page");
                }
            }
        }
    };
    world.run(&[(&space, &uses(0)), (&space, &uses(1)), (&space, &compacts)]);
    world.within(&space, |guest| {
        kept().for_each(|at| assert_eq!(guest.load(page(at)), Ok(100 * ROUNDS + at)));
    });
    world.finish(vec![space]);
}

fn forks_against_compaction() {
    let world = World::unwatched(2, FRAMES);
    let space = scattered(&world);
    world.run(&[
        (&space, &|guest| {
            let child = guest.space.fork(guest.cpu).unwrap();
            let mut word = [0; 8];
            for at in kept() {
                guest.store(page(at), 50).unwrap();
                child.read_bytes(guest.cpu, page(at), &mut word).unwrap();
                assert_eq!(u64::from_ne_bytes(word), at + 1, "the child's page");
            }
            child.exit(guest.cpu);
        }),
        (&space, &compacts),
    ]);
    world.finish(vec![space]);
}

/// Pages are unmapped and other pages mapped in the meantime: frames of the emptied block are
/// freed, and reach another CPU's list.
fn calls_against_compaction() {
    let world = World::unwatched(2, FRAMES);
    let space = scattered(&world);
    world.run(&[
        (&space, &|guest| {
            for at in kept() {
                guest.unmap(page(at), 1);
                guest.map(page(at), 1, RW);
                guest.store(page(at), 60 + at).unwrap();
            }
            kept().for_each(|at| assert_eq!(guest.load(page(at)), Ok(60 + at), "another page"));
        }),
        (&space, &compacts),
    ]);
    world.finish(vec![space]);
}

/// Read-only pages move without a flush: their frames are reported free only after it.
fn loads_against_compaction() {
    let world = World::unwatched(3, FRAMES);
    let space = scattered(&world);
    world.within(&space, |guest| kept().for_each(|at| guest.protect(page(at), 1, Prot::READ)));
    world.run(&[
        (&space, &|guest| {
            for _ in 0..ROUNDS {
                kept().for_each(|at| assert_eq!(guest.load(page(at)), Ok(at + 1), "another page"));
            }
        }),
        (&space, &|guest| {
            // The frames of these pages are reused at once.
            for round in 0..ROUNDS {
                guest.map(AT + 64 * PAGE, 6, RW);
                (64..70).for_each(|at| guest.store(page(at), 70 + round).unwrap());
                guest.unmap(AT + 64 * PAGE, 6);
            }
        }),
        (&space, &compacts),
    ]);
    world.finish(vec![space]);
}

/// A pinned page stays in the device's frame, and a kernel's blocks have no other owner.
fn pins_and_blocks_against_compaction() {
    let world = World::unwatched(2, FRAMES);
    let space = scattered(&world);
    world.run(&[
        (&space, &|guest| {
            for at in kept() {
                let pins = space.pin(guest.cpu, page(at), 1, true).unwrap();
                let block = guest.cpu.alloc_block(ORDER);
                let there = guest.space.page_at(guest.cpu, page(at)).map(|page| page.frame);
                assert_eq!(there, Some(pins.frames()[0]), "a pinned page moved");
                if let Ok(block) = &block {
                    assert!(block.frames().all(|frame| Some(frame) != there), "a page of a block");
                }
            }
        }),
        (&space, &compacts),
    ]);
    world.finish(vec![space]);
}

fn compaction_against_compaction() {
    let world = World::unwatched(3, FRAMES);
    let space = scattered(&world);
    world.run(&[
        (&space, &compacts),
        (&space, &|guest| {
            compacts(guest);
            kept().for_each(|at| assert_eq!(guest.load(page(at)), Ok(at + 1), "another page"));
        }),
        (&space, &compacts),
    ]);
    world.finish(vec![space]);
}

mod tests {
    holds!(
        accesses_against_compaction,
        forks_against_compaction,
        calls_against_compaction,
        loads_against_compaction,
        pins_and_blocks_against_compaction,
        compaction_against_compaction,
    );
}

mod needs {
    use crate::support;
    use faultless::sync::mutant::Mutant;

    needs!(
        a_look_at_all_frames: CompactLooksAgain in [calls_against_compaction],
        a_way_back: IsolatedGoBack in [calls_against_compaction],
    );
}
