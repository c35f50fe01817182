//! Compaction while programs use the pages that it moves, and others take and free frames: against accesses, forks, calls that unmap, pins, blocks of a
//! kernel, and a second compaction. Blocks are of a few frames, so that the machines may be small.

use crate::scenario::{AT, Guest, PAGE, RW, Space, World, page};
use faultless::Prot;

/// Frames of the near node.
const FRAMES: u32 = 64;
/// log2 of the frames of a block.
const ORDER: u8 = 2;
/// How often programs do the same: as long as a compaction of all memory may take.
const ROUNDS: u64 = 4;
/// Pages that are there at first, and those that are left.
const PAGES: u64 = 16;
const KEPT: usize = 3;

/// Compacts all that there is.
fn compacts(guest: &Guest<'_>) {
    guest.cpu.compact_small(ORDER);
}

/// A space whose pages lie scattered: of 16 every third is left.
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

/// Pages are unmapped and others mapped meanwhile: frames of the block that is emptied are freed, and come to another CPU's list.
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
            // Whose frames are others' at once.
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

/// A pinned page stays where the device looks for it; a kernel's blocks are of nobody else.
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
    use crate::scenario;
    use faultless::sync::mutant::Mutant;

    needs!(
        a_look_at_all_frames: CompactLooksAgain in [calls_against_compaction],
        a_way_back: IsolatedGoBack in [calls_against_compaction],
    );
}
