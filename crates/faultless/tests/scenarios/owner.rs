//! The owner of a space, the only CPU in the space, against arriving CPUs: CPUs that begin to run
//! the space, and CPUs that read it remotely.

use crate::support::{AT, Guest, RW, Space, World, page};
use faultless::{Access, Advice, MapFlags, Prot};

const FIXED: MapFlags = MapFlags::PRIVATE.union(MapFlags::FIXED);

/// Creates a world of three CPUs, a space with six VMAs that cannot merge, and another space.
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

/// The changes of the owner: VMAs are created, removed, split and merged.
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

/// An owner unmaps and maps a VMA used by other CPUs.
fn goes_and_comes(guest: &Guest<'_>) {
    for _ in 0..3 {
        guest.unmap(page(8), 1);
        guest.map(page(8), 1, RW);
    }
}

/// One CPU runs the space and changes it. Other CPUs read the space from another space, and map
/// there.
fn changes_against_remote_readers() {
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

/// One CPU runs the space and changes it. Another CPU leaves its own space, runs this space
/// briefly, and goes back.
fn changes_against_a_visiting_cpu() {
    let (world, space, elsewhere) = with_parts();
    world.run(&[
        (&space, &changes),
        (&elsewhere, &|guest| {
            guest.switch(&space, |guest| {
                // A page unmapped before the end of the fault does not exist: the audit checks this
                // at the end.
                let _ = space.fault_remote(guest.cpu, page(8), Access::Write);
                guest.store(page(0), 10).unwrap();
            });
            guest.store(page(1), 12).unwrap();
        }),
    ]);
    world.finish(vec![space, elsewhere]);
}

/// A CPU begins to run the space while the only running CPU tries to own it. Both use the same
/// page, whose VMA is unmapped and mapped.
fn a_try_to_own_against_a_beginning_cpu() {
    let (world, space, elsewhere) = with_parts();
    world.run(&[
        (&space, &goes_and_comes),
        (&elsewhere, &|guest| {
            // This CPU reads the space, and thereby makes it shared.
            space.areas(guest.cpu, |_| {});
            for _ in 0..2 {
                guest.switch(&space, |guest| {
                    for _ in 0..2 {
                        let _ = space.fault_remote(guest.cpu, page(8), Access::Write);
                    }
                });
            }
        }),
    ]);
    world.finish(vec![space, elsewhere]);
}

/// A CPU becomes the owner just before a step with a claim. Another CPU has just changed a distant
/// page, and begins to run the space. The step must not split the tree, which its CPU changes in
/// place next.
fn a_step_of_an_owner_since_its_claim() {
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

/// One CPU discards remotely, under a claim, while another CPU, alone in the space, becomes the
/// owner.
fn changes_against_a_claim() {
    let (world, space, elsewhere) = with_parts();
    world.run(&[
        (&space, &changes),
        (&elsewhere, &|guest| {
            let advice = Advice::DontNeed;
            let _ = space.madvise(guest.cpu, page(0), 3 * 4096, advice);
            space.fault_remote(guest.cpu, page(4), Access::Write).unwrap();
        }),
    ]);
    world.finish(vec![space, elsewhere]);
}

/// Owners of two spaces use a page, and use the page again after each of their changes: no CPU uses
/// the VMA of its last fault once the VMA is gone.
fn accesses_of_the_owner_after_its_changes() {
    let world = World::new(2);
    let [space, elsewhere] = [(); 2].map(|()| world.space(|guest| guest.map(page(8), 1, RW)));
    // VMAs that one CPU frees are reused by the other.
    let changes = |guest: &Guest<'_>| {
        for _ in 0..3 {
            guest.store(page(8), 1).unwrap();
            guest.unmap(page(8), 1);
            assert!(guest.store(page(8), 2).is_err(), "a store to unmapped memory");
            guest.map(page(8), 1, Prot::READ);
            assert!(guest.store(page(8), 3).is_err(), "a store to read-only memory");
            guest.map(page(8), 1, RW);
        }
    };
    world.run(&[(&space, &changes), (&elsewhere, &changes)]);
    world.finish(vec![space, elsewhere]);
}

mod tests {
    holds!(
        accesses_of_the_owner_after_its_changes,
        changes_against_remote_readers,
        changes_against_a_visiting_cpu,
        changes_against_a_claim,
        a_try_to_own_against_a_beginning_cpu,
        a_step_of_an_owner_since_its_claim,
    );
}

mod needs {
    use crate::support;
    use faultless::sync::mutant::Mutant;

    needs!(
        the_end_of_a_vma_counts: EndCounts in [accesses_of_the_owner_after_its_changes],
        a_remote_reader_checks_the_owner: UserLooksAtOwner in [changes_against_remote_readers],
        a_remote_reader_waits_for_the_owner: JoinAwaitsOwner in [changes_against_remote_readers],
        a_try_to_own_checks_again: OwnerLooksAgain in [a_try_to_own_against_a_beginning_cpu],
        a_step_of_an_owner_does_not_split_the_tree: OwnerPartsNothing in [a_step_of_an_owner_since_its_claim],
        a_running_cpu_checks_the_owner: RunnerLooksAtOwner in [changes_against_a_visiting_cpu],
    );
}
