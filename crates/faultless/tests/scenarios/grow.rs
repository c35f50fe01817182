//! Automatic growth and growth at one end: stacks and the heap, during their use.

use crate::support;
use crate::support::{AT, NONE, PAGE, PRIVATE, RW, Space, World, page};
use faultless::{MapFlags, Prot};

/// The number of repetitions of a program: the duration of a call.
const ROUNDS: u64 = 4;

/// The first page of the stack before its growth.
const STACK: u64 = 8;

/// Creates a stack of one page with a store.
fn with_stack() -> (World, Space) {
    let world = World::new(3);
    let space = world.space(|guest| {
        let flags = PRIVATE | MapFlags::FIXED | MapFlags::GROWSDOWN;
        guest.change((page(STACK), 1), Some(RW), true, || {
            guest.space.mmap(guest.cpu, page(STACK), PAGE, RW, flags).unwrap();
        });
        guest.store(page(STACK), 1).unwrap();
    });
    (world, space)
}

/// All CPUs grow the stack at once: no growth fails.
fn several_that_grow_a_stack() {
    let (world, space) = with_stack();
    world.within(&space, |guest| guest.change((page(3), STACK - 3), Some(RW), true, || {}));
    world.run(&[
        (&space, &|guest| {
            guest.store(page(3), 10).unwrap();
            guest.load(page(6)).unwrap();
            guest.load(page(3)).unwrap();
        }),
        (&space, &|guest| {
            guest.store(page(6), 20).unwrap();
            guest.load(page(STACK)).unwrap();
            guest.store(page(5), 21).unwrap();
        }),
        (&space, &|guest| {
            guest.load(page(STACK - 1)).unwrap();
            guest.store(page(4), 30).unwrap();
            guest.store(page(STACK), 31).unwrap();
        }),
    ]);
    let grown = world.within(&space, |guest| guest.areas());
    assert_eq!(grown, [faultless::VirtRange::new(page(3), page(STACK + 1))]);
    world.finish(vec![space]);
}

/// Something is mapped in the way of a stack, and in its place, and goes away again.
fn a_stack_against_mappings_below() {
    let (world, space) = with_stack();
    world.within(&space, |guest| guest.doubt(page(5), STACK - 5));
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                let _ = guest.store(page(6), 100 * round);
                let _ = guest.load(page(7));
                guest.store(page(STACK), 100 * round + 1).unwrap();
            }
        }),
        (&space, &|guest| {
            guest.map(page(2), 1, RW);
            let _ = guest.store(page(5), 20);
            guest.store(page(2), 21).unwrap();
            guest.unmap(page(2), 1);
            let _ = guest.load(page(5));
        }),
        (&space, &|guest| {
            guest.map(page(6), 1, Prot::READ);
            guest.load(page(6)).unwrap();
            guest.doubt(page(6), 1);
            guest.change((page(6), 1), None, true, || {
                guest.space.munmap(guest.cpu, page(6), PAGE).unwrap();
            });
        }),
    ]);
    // The way below the stack is free.
    world.within(&space, |guest| guest.store(page(7), 40).unwrap());
    world.finish(vec![space]);
}

/// A stack grows while a mapping is placed as near below as the guard gap allows: one of the two
/// yields.
fn a_stack_against_a_mapping_in_its_guard_gap() {
    const GUARD: u64 = 256 * PAGE;
    let (world, space) = with_stack();
    let wanted = page(STACK) - GUARD - PAGE;
    world.within(&space, |guest| guest.doubt(page(STACK - 1), 1));
    world.run(&[
        (&space, &|guest| {
            let _ = guest.load(page(STACK - 1));
        }),
        (&space, &|guest| {
            guest.space.mmap(guest.cpu, wanted, PAGE, RW, PRIVATE).unwrap();
        }),
    ]);
    let areas = world.within(&space, |guest| guest.areas());
    let stack = areas.iter().find(|area| area.end == page(STACK + 1)).unwrap();
    let below = areas.iter().filter(|area| area.end <= stack.start).map(|area| area.end).max();
    assert!(below.is_none_or(|end| stack.start - end >= GUARD), "{areas:x?}");
    world.finish(vec![space]);
}

/// Creates a heap of two pages with stores.
fn with_heap() -> (World, Space) {
    let world = World::new(3);
    let space = world.space(|guest| {
        guest.space.set_heap_start(guest.cpu, AT).unwrap();
        guest.change((AT, 2), Some(RW), true, || guest.space.brk(guest.cpu, page(2)));
        (0..2).for_each(|at| guest.store(page(at), 1 + at).unwrap());
    });
    (world, space)
}

/// The heap shrinks and grows during its use.
fn faults_against_brk() {
    let (world, space) = with_heap();
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                guest.load(page(0)).unwrap();
                let _ = guest.store(page(1), 100 * round);
                let _ = guest.load(page(1));
                let _ = guest.store(page(2), 100 * round + 1);
            }
        }),
        (&space, &|guest| {
            guest.change((page(1), 1), Some(NONE), true, || guest.space.brk(guest.cpu, page(1)));
            guest.change((page(1), 2), Some(RW), true, || guest.space.brk(guest.cpu, page(3)));
            guest.load(page(1)).unwrap();
        }),
        (&space, &|guest| {
            guest.space.brk(guest.cpu, 0);
            guest.store(page(0), 30).unwrap();
            let _ = guest.load(page(2));
        }),
    ]);
    world.finish(vec![space]);
}

/// Two CPUs move the end of the heap up and down: the returned end matches the heap.
fn two_that_move_the_break() {
    let (world, space) = with_heap();
    world.within(&space, |guest| guest.doubt(page(1), 4));
    let to = |guest: &support::Guest<'_>, pages: u64| {
        guest.change((page(pages), 5 - pages), None, true, || {
            guest.space.brk(guest.cpu, page(pages));
        });
    };
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                guest.store(page(0), 100 * round).unwrap();
                let _ = guest.store(page(2), 100 * round + 1);
            }
        }),
        (&space, &|guest| {
            to(guest, 4);
            let _ = guest.store(page(3), 20);
            to(guest, 1);
        }),
        (&space, &|guest| {
            to(guest, 3);
            let _ = guest.load(page(1));
            to(guest, 2);
        }),
    ]);
    world.within(&space, |guest| {
        let heap = guest.space.heap_range();
        assert_eq!(heap.end, guest.space.brk(guest.cpu, 0));
        assert_eq!(guest.areas(), [heap], "the heap is mapped up to its end");
        guest.change((AT, heap.pages()), Some(RW), false, || {});
        (0..heap.pages()).for_each(|at| guest.store(page(at), 40).unwrap());
        guest.change((heap.end, 1), Some(NONE), true, || {});
        assert!(guest.load(heap.end).is_err());
    });
    world.finish(vec![space]);
}

mod tests {
    holds!(
        several_that_grow_a_stack,
        a_stack_against_mappings_below,
        a_stack_against_a_mapping_in_its_guard_gap,
        faults_against_brk,
        two_that_move_the_break,
    );
}

mod needs {
    use crate::support;
    use faultless::sync::mutant::Mutant;

    needs!(
        conflicts: RangeConflict in [several_that_grow_a_stack, two_that_move_the_break],
    );
}
