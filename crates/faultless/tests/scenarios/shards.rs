//! A tree of VMAs that is split and joined while CPUs change and use its VMAs.

use crate::support::{AT, Guest, PAGE, RW, Space, World, page};
use faultless::{Prot, VirtRange};

/// The first page of the next last-level table: where a tree may be parted.
const NEXT: u64 = 512;

fn range(first: u64, pages: u64) -> VirtRange {
    VirtRange::new(page(first), page(first + pages))
}

/// Two VMAs, of four pages each, on either side of the bound, which they do not touch.
fn two_far_apart(world: &World) -> Space {
    world.space(|guest| {
        guest.fill(AT, 4);
        guest.fill(page(NEXT + 4), 4);
    })
}

fn part(guest: &Guest<'_>) {
    guest.space.part_tree(guest.cpu, page(NEXT));
}

/// Two CPUs unmap on either side of a bound, while a third makes it.
fn unmappings_during_a_split_of_the_tree() {
    let world = World::new(3);
    let space = two_far_apart(&world);
    world.run(&[
        (&space, &|guest| guest.unmap(page(1), 1)),
        (&space, &|guest| guest.unmap(page(NEXT + 5), 1)),
        (&space, &part),
    ]);
    world.within(&space, |guest| {
        let left = [range(0, 1), range(2, 2), range(NEXT + 4, 1), range(NEXT + 6, 2)];
        assert_eq!(guest.areas(), left, "an edit was lost");
    });
    world.finish(vec![space]);
}

/// The tree has two shards: two CPUs change one shard each, and a third CPU maps over the boundary,
/// which joins the shards.
fn changes_of_shards_during_their_join() {
    let world = World::new(3);
    let space = two_far_apart(&world);
    world.within(&space, |guest| {
        part(guest);
        assert_eq!(guest.space.shards(guest.cpu), 2);
    });
    world.run(&[
        (&space, &|guest| guest.protect(page(0), 2, Prot::READ)),
        (&space, &|guest| guest.unmap(page(NEXT + 6), 2)),
        (&space, &|guest| guest.map(page(NEXT - 1), 2, RW)),
    ]);
    world.within(&space, |guest| {
        let left = [range(0, 2), range(2, 2), range(NEXT - 1, 2), range(NEXT + 4, 2)];
        assert_eq!(guest.areas(), left, "an edit was lost");
    });
    world.finish(vec![space]);
}

/// A CPU uses pages on both sides of a boundary and lists VMAs, while other CPUs add and remove the
/// boundary.
fn accesses_and_listings_during_splits_and_joins() {
    let world = World::new(3);
    let space = two_far_apart(&world);
    world.run(&[
        (&space, &|guest| {
            part(guest);
            guest.map(page(NEXT - 1), 2, RW);
        }),
        (&space, &|guest| {
            for at in [0, NEXT + 4] {
                guest.store(page(at), 7).unwrap();
            }
            let areas = guest.areas();
            for there in [range(0, 4), range(NEXT + 4, 4)] {
                assert!(areas.contains(&there), "{areas:?} lacks {there:?}");
            }
        }),
        (&space, &|guest| {
            guest.map(page(NEXT + 32), 1, RW);
            assert_eq!(guest.load(page(NEXT + 4) + PAGE), Ok(2));
        }),
    ]);
    world.finish(vec![space]);
}

/// Pages on either side of a bound, mapped by two CPUs, are one VMA.
fn neighbours_across_a_bound_merge() {
    let world = World::new(2);
    let space = world.space(|guest| {
        guest.fill(page(NEXT - 4), 2);
        // Untouched: VMAs with stores would not merge.
        guest.map(page(NEXT + 2), 2, RW);
        part(guest);
    });
    world.run(&[
        (&space, &|guest| guest.map(page(NEXT - 2), 2, RW)),
        (&space, &|guest| guest.map(page(NEXT), 2, RW)),
    ]);
    world.within(&space, |guest| {
        assert_eq!(guest.areas(), [range(NEXT - 4, 8)], "equal neighbours are one VMA");
    });
    world.finish(vec![space]);
}

/// A child has the VMAs of both shards, of one moment.
fn a_fork_sees_all_shards() {
    let world = World::new(2);
    let space = two_far_apart(&world);
    world.within(&space, part);
    let child = std::sync::Mutex::new(None);
    world.run(&[
        (&space, &|guest| *child.lock().unwrap() = Some(guest.space.fork(guest.cpu).unwrap())),
        (&space, &|guest| guest.unmap(page(NEXT + 4), 4)),
    ]);
    let child = child.into_inner().unwrap().unwrap();
    world.within(&child, |guest| {
        let areas = guest.areas();
        assert!(areas.starts_with(&[range(0, 4)]), "{areas:?}");
        assert!(areas.len() == 1 || areas[1] == range(NEXT + 4, 4), "{areas:?}");
    });
    world.finish(vec![space, child]);
}

mod tests {
    holds!(
        unmappings_during_a_split_of_the_tree,
        changes_of_shards_during_their_join,
        accesses_and_listings_during_splits_and_joins,
        neighbours_across_a_bound_merge,
        a_fork_sees_all_shards,
    );
}

mod needs {
    use crate::support;
    use faultless::sync::mutant::Mutant;

    needs!(
        a_writer_looks_whether_its_shard_has_ended: ShardEnds in [
            unmappings_during_a_split_of_the_tree,
            changes_of_shards_during_their_join
        ],
    );
}
