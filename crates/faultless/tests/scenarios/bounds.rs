//! Decisions in a tree with shards, against changes on the other side of a shard boundary.

use crate::support::{Guest, NONE, PAGE, PRIVATE, RW, World, page};
use faultless::{Access, Counter, FaultError, MapFlags, RemapFlags, VirtRange};

/// The first page of the next last-level table: where a tree may be parted.
const NEXT: u64 = 512;
const GUARD: u64 = 256;

fn map_fixed(guest: &Guest<'_>, start: u64, len: u64, more: MapFlags) {
    guest.space.mmap(guest.cpu, start, len, NONE, PRIVATE | MapFlags::FIXED | more).unwrap();
}

/// Maps a stack of one page, and stores to it.
fn with_stack(guest: &Guest<'_>, at: u64) {
    let flags = PRIVATE | MapFlags::FIXED | MapFlags::GROWSDOWN;
    guest.change((page(at), 1), Some(RW), true, || {
        guest.space.mmap(guest.cpu, page(at), PAGE, RW, flags).unwrap();
    });
    guest.store(page(at), 1).unwrap();
}

/// A stack above a boundary grows until its guard gap reaches across. This joins the shards.
/// Meanwhile, a mapping is placed below the boundary, in an empty range. The tree is split again
/// before the placement's step: the lower shard is still empty, but the stack is nearer.
fn a_stack_whose_guard_reaches_into_an_empty_shard() {
    const STACK: u64 = NEXT + 200;
    let world = World::new(2);
    let space = world.space(|guest| {
        with_stack(guest, STACK);
        guest.doubt(page(NEXT + 100), 100);
        guest.space.part_tree(guest.cpu, page(NEXT));
    });
    world.run(&[
        (&space, &|guest| {
            guest.space.mmap(guest.cpu, page(NEXT - 100), 10 * PAGE, RW, PRIVATE).unwrap();
        }),
        (&space, &|guest| {
            let _ = guest.load(page(NEXT + 100));
            guest.space.part_tree(guest.cpu, page(NEXT));
        }),
    ]);
    let areas = world.within(&space, |guest| guest.areas());
    let stack = areas.iter().find(|area| area.end == page(STACK + 1)).unwrap();
    let below = areas.iter().filter(|area| area.end <= stack.start).map(|area| area.end).max();
    assert!(below.is_none_or(|end| stack.start - end >= GUARD * PAGE), "{areas:x?}");
    world.finish(vec![space]);
}

/// All addresses are in use, except above the common top. A stack is unmapped there while another
/// CPU searches for a place: a place exists at every moment.
fn a_place_above_an_unmapped_stack_is_found() {
    const BASE: u64 = 0x7fff_f7ff_f000;
    let stack = BASE + 100 * PAGE;
    let world = World::new(2);
    let space = world.space(|guest| {
        map_fixed(guest, 16 * PAGE, BASE - 16 * PAGE, MapFlags::NORESERVE);
        map_fixed(guest, stack, PAGE, MapFlags::GROWSDOWN);
        guest.space.part_tree(guest.cpu, (stack + PAGE).next_multiple_of(NEXT * PAGE));
        assert_eq!(guest.space.shards(guest.cpu), 2);
    });
    world.run(&[
        (&space, &|guest| {
            let placed = guest.space.mmap(guest.cpu, None, 10 * PAGE, NONE, PRIVATE);
            let placed = placed.expect("a free place with and without the stack");
            assert!(placed == BASE || placed == stack + PAGE, "{placed:x}");
        }),
        (&space, &|guest| guest.space.munmap(guest.cpu, stack, PAGE).unwrap()),
    ]);
    world.finish(vec![space]);
}

/// A move from one boundary to another boundary is atomic, even if a second VMA is mapped at the
/// old address before the claim.
fn a_move_across_boundaries_is_atomic() {
    const TO: u64 = 3 * NEXT;
    let world = World::new(3);
    let space = world.space(|guest| {
        map_fixed(guest, page(NEXT - 4), 4 * PAGE, MapFlags::empty());
        map_fixed(guest, page(NEXT + 100), PAGE, MapFlags::empty());
        for bound in [NEXT, TO] {
            guest.space.part_tree(guest.cpu, page(bound));
        }
        assert_eq!(guest.space.shards(guest.cpu), 3);
    });
    world.run(&[
        (&space, &|guest| {
            let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
            let (from, to, len) = (page(NEXT - 4), page(TO - 4), 8 * PAGE);
            guest.space.mremap(guest.cpu, from, len, len, flags, to).unwrap();
        }),
        (&space, &|guest| {
            map_fixed(guest, page(NEXT + 2), PAGE, MapFlags::empty());
            guest.space.munmap(guest.cpu, page(NEXT + 100), PAGE).unwrap();
        }),
        (&space, &|guest| guest.space.munmap(guest.cpu, page(TO - 4), 8 * PAGE).unwrap()),
    ]);
    let areas = world.within(&space, |guest| guest.areas());
    let moved = |first, pages| areas.contains(&VirtRange::new(page(first), page(first + pages)));
    let (low, high) = (moved(TO - 4, 4), moved(TO + 2, 1));
    let stays = moved(NEXT + 2, 1);
    assert!(low == high || stays, "half of the mapping was unmapped: {areas:x?}");
    world.finish(vec![space]);
}

/// A CPU maps over a future boundary of the tree, and cuts the mapping. If the VMA lay across the
/// boundary, one shard would keep the uncut VMA.
fn a_mapping_over_a_future_boundary_is_cut() {
    let world = World::new(3);
    let space = world.space(|guest| {
        guest.map(page(0), 1, RW);
        guest.map(page(2 * NEXT + 8), 1, RW);
        guest.space.part_tree(guest.cpu, page(2 * NEXT));
    });
    let part = |guest: &Guest<'_>| guest.space.part_tree(guest.cpu, page(NEXT));
    world.run(&[
        (&space, &|guest| {
            guest.map(page(NEXT - 1), 2, RW);
            guest.unmap(page(NEXT - 1), 1);
            guest.store(page(NEXT), 7).unwrap();
        }),
        (&space, &part),
        (&space, &|guest| {
            guest.map(page(2 * NEXT + 4), 1, RW);
            part(guest);
        }),
    ]);
    let areas = world.within(&space, |guest| guest.areas());
    assert!(areas.contains(&VirtRange::new(page(NEXT), page(NEXT + 1))), "{areas:x?}");
    world.finish(vec![space]);
}

/// Two CPUs unmap the last two VMAs over a last-level table, all in one shard: the table goes.
fn the_last_of_two_over_a_table_of_a_shard() {
    let world = World::new(2);
    let space = world.space(|guest| {
        for at in [0, 2, NEXT + 4] {
            guest.fill(page(at), 1);
        }
        guest.space.part_tree(guest.cpu, page(NEXT));
    });
    let pruned = || world.vm.totals().get(Counter::TablePruned);
    let before = pruned();
    world.run(&[
        (&space, &|guest| guest.unmap(page(0), 1)),
        (&space, &|guest| guest.unmap(page(2), 1)),
    ]);
    assert_eq!(pruned(), before + 1, "a table without a mapping remains");
    world.finish(vec![space]);
}

/// A CPU faults below a stack. Another CPU maps a second stack in a lower shard, and then unmaps
/// the first stack. A stack exists at every moment, so the fault must not fail for lack of a stack.
fn a_stack_in_one_shard_after_another() {
    const STACK: u64 = NEXT + 100;
    let world = World::new(2);
    let space = world.space(|guest| {
        with_stack(guest, STACK);
        guest.space.part_tree(guest.cpu, page(NEXT));
    });
    world.run(&[
        (&space, &|guest| {
            let served = guest.space.fault_remote(guest.cpu, page(NEXT - 40), Access::Read);
            assert!(!matches!(served, Err(FaultError::Segv { .. })), "{served:?}");
        }),
        (&space, &|guest| {
            with_stack(guest, NEXT - 20);
            guest.unmap(page(STACK), 1);
        }),
    ]);
    world.finish(vec![space]);
}

/// A listing shows a single moment: if the VMA unmapped first is listed, then the VMA unmapped
/// second is listed as well.
fn a_listing_shows_one_moment() {
    let world = World::new(2);
    let (low, high) = (page(0), page(NEXT + 4));
    let space = world.space(|guest| {
        map_fixed(guest, low, PAGE, MapFlags::empty());
        map_fixed(guest, high, PAGE, MapFlags::empty());
        guest.space.part_tree(guest.cpu, page(NEXT));
    });
    world.run(&[
        (&space, &|guest| {
            let areas = guest.areas();
            let has = |at| areas.contains(&VirtRange::new(at, at + PAGE));
            assert!(has(high) || !has(low), "areas of no single moment: {areas:x?}");
        }),
        (&space, &|guest| {
            guest.space.munmap(guest.cpu, low, PAGE).unwrap();
            guest.space.munmap(guest.cpu, high, PAGE).unwrap();
        }),
    ]);
    world.finish(vec![space]);
}

mod tests {
    use crate::support::{self, SPECULATIVE};

    #[test]
    fn a_stack_whose_guard_reaches_into_an_empty_shard() {
        support::explore(SPECULATIVE, super::a_stack_whose_guard_reaches_into_an_empty_shard);
    }

    #[test]
    fn a_place_above_an_unmapped_stack_is_found() {
        support::explore(SPECULATIVE, super::a_place_above_an_unmapped_stack_is_found);
    }

    #[test]
    fn a_move_across_boundaries_is_atomic() {
        support::explore(SPECULATIVE, super::a_move_across_boundaries_is_atomic);
    }

    #[test]
    fn a_mapping_over_a_future_boundary_is_cut() {
        support::explore(SPECULATIVE, super::a_mapping_over_a_future_boundary_is_cut);
    }

    #[test]
    fn the_last_of_two_over_a_table_of_a_shard() {
        support::explore(SPECULATIVE, super::the_last_of_two_over_a_table_of_a_shard);
    }

    #[test]
    fn a_stack_in_one_shard_after_another() {
        // The failure requires two calls between two loads.
        let all = 10 * support::schedules();
        support::explore_under(SPECULATIVE, all, super::a_stack_in_one_shard_after_another);
    }

    #[test]
    fn a_listing_shows_one_moment() {
        support::explore(SPECULATIVE, super::a_listing_shows_one_moment);
    }
}
