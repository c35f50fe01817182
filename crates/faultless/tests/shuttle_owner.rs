//! The owner of a space, who is alone in it, against others who come: to run it, and to look at it from outside.

use crate::scenario::{AT, Guest, RW, Space, World, page};
use faultless::{Access, Advice, MapFlags, Prot};

const FIXED: MapFlags = MapFlags::PRIVATE.union(MapFlags::FIXED);

/// A world of three CPUs, a space with six VMAs in which nothing merges, and one that is elsewhere.
fn with_parts() -> (World, Space, Space) {
    let world = World::new(3);
    let space = world.space(|guest| {
        guest.fill(AT, 5);
        guest.protect(page(1), 1, Prot::READ);
        guest.protect(page(3), 1, Prot::READ);
        guest.map(page(8), 1, RW);
    });
    let elsewhere = world.space(|guest| guest.map(AT, 2, RW));
    (world, space, elsewhere)
}

/// What the owner does: VMAs come, go, split and merge.
fn changes(guest: &Guest<'_>) {
    guest.unmap(page(1), 1);
    guest.map(page(1), 1, RW);
    guest.protect(page(2), 1, Prot::READ);
    guest.unmap(page(8), 1);
    guest.unmap(page(3), 1);
    guest.map(page(6), 1, RW);
    guest.protect(page(2), 1, RW);
    guest.unmap(page(6), 1);
}

/// What an owner does whose VMA is used by others: it goes, and comes back.
fn goes_and_comes(guest: &Guest<'_>) {
    for _ in 0..3 {
        guest.unmap(page(8), 1);
        guest.map(page(8), 1, RW);
    }
}

/// One CPU runs the space and changes it; another looks at it from another space, and maps there.
fn changes_against_who_looks_from_outside() {
    let (world, space, elsewhere) = with_parts();
    world.run(&[
        (&space, &changes),
        (&elsewhere, &|guest| {
            for _ in 0..4 {
                let mut end = AT;
                space.areas(guest.cpu, |area| {
                    assert!(end <= area.range.start && area.range.start < area.range.end);
                    end = area.range.end;
                });
                guest.store(page(0), 1).unwrap();
            }
        }),
        (&elsewhere, &|guest| {
            space.mmap(guest.cpu, page(9), 4096, RW, FIXED).unwrap();
            space.munmap(guest.cpu, page(9), 4096).unwrap();
        }),
    ]);
    world.finish(vec![space, elsewhere]);
}

/// One CPU runs the space and changes it; another leaves its own, runs this one for a moment, and goes back.
fn changes_against_who_comes_and_goes() {
    let (world, space, elsewhere) = with_parts();
    world.run(&[
        (&space, &changes),
        (&elsewhere, &|guest| {
            guest.switch(&space, |guest| {
                // What is gone when the fault is served has no page: the books say so in the end.
                let _ = space.fault(guest.cpu, page(8), Access::Write);
                guest.store(page(0), 10).unwrap();
            });
            guest.store(page(1), 12).unwrap();
        }),
    ]);
    world.finish(vec![space, elsewhere]);
}

/// A CPU begins to run the space while the only one that runs it tries to own it. Both use the same page, whose VMA goes and
/// comes.
fn a_try_against_who_begins_to_run() {
    let (world, space, elsewhere) = with_parts();
    world.run(&[
        (&space, &goes_and_comes),
        (&elsewhere, &|guest| {
            // It reads the space, which shares it.
            space.areas(guest.cpu, |_| {});
            for _ in 0..2 {
                guest.switch(&space, |guest| {
                    for _ in 0..2 {
                        let _ = space.fault(guest.cpu, page(8), Access::Write);
                    }
                });
            }
        }),
    ]);
    world.finish(vec![space, elsewhere]);
}

/// A CPU owns the space just before a step that it makes with a claim, another has just changed a page far off, and begins to run
/// the space: the step may not part the tree, which its CPU changes in place next.
fn a_step_of_who_owns_since_its_claim() {
    /// Over the next last-level table: the tree may be parted between.
    const FAR: u64 = 520;
    let (world, space, elsewhere) = with_parts();
    world.within(&space, |guest| guest.map(page(FAR), 1, RW));
    world.run(&[
        (&space, &goes_and_comes),
        (&elsewhere, &|guest| {
            for round in 0..3 {
                space.munmap(guest.cpu, page(FAR), 4096).unwrap();
                space.mmap(guest.cpu, page(FAR), 4096, RW, FIXED).unwrap();
                guest.switch(&space, |guest| guest.store(page(0), round).unwrap());
            }
        }),
    ]);
    world.finish(vec![space, elsewhere]);
}

/// One CPU discards from outside, under a claim, while another that has come alone begins to own the space.
fn changes_against_a_claim() {
    let (world, space, elsewhere) = with_parts();
    world.run(&[
        (&space, &changes),
        (&elsewhere, &|guest| {
            let advice = Advice::DontNeed;
            let _ = space.madvise(guest.cpu, page(0), 3 * 4096, advice);
            space.fault(guest.cpu, page(4), Access::Write).unwrap();
        }),
    ]);
    world.finish(vec![space, elsewhere]);
}

mod tests {
    holds!(
        changes_against_who_looks_from_outside,
        changes_against_who_comes_and_goes,
        changes_against_a_claim,
        a_try_against_who_begins_to_run,
        a_step_of_who_owns_since_its_claim,
    );
}

mod needs {
    use crate::scenario;
    use faultless::sync::mutant::Mutant;

    needs!(
        who_looks_asks_for_the_owner: UserLooksAtOwner in [changes_against_who_looks_from_outside],
        who_waits_for_the_owner: JoinAwaitsOwner in [changes_against_who_looks_from_outside],
        who_tries_looks_again: OwnerLooksAgain in [a_try_against_who_begins_to_run],
        a_step_of_an_owner_parts_nothing: OwnerPartsNothing in [a_step_of_who_owns_since_its_claim],
        who_runs_asks_for_the_owner: RunnerLooksAtOwner in [changes_against_who_comes_and_goes],
    );
}
