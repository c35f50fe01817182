//! Forks and the following stores: copies, and reuse by the last owner.

use crate::support::{AT, PAGE, RW, World, page};
use faultless::MapFlags;
use std::sync::Mutex;

/// The number of repetitions of a program: the duration of a call.
const ROUNDS: u64 = 6;

/// Two CPUs store while a third CPU forks. The child has the values of the moment of the fork, and
/// keeps them.
fn stores_against_fork() {
    let (world, space) = World::with_pages(2);
    let born = Mutex::new(None);
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                guest.store(page(0), 100 * round).unwrap();
                guest.load(page(1)).unwrap();
                guest.store(page(1), 100 * round + 1).unwrap();
            }
        }),
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                guest.store(page(1), 100 * round + 2).unwrap();
                guest.load(page(0)).unwrap();
                guest.store(page(0), 100 * round + 3).unwrap();
            }
        }),
        (&space, &|guest| {
            let child = guest.fork(|_| false);
            guest.switch(&child, |guest| {
                guest.load(page(0)).unwrap();
                guest.load(page(1)).unwrap();
                guest.load(page(0)).unwrap();
                guest.store(page(0), 30).unwrap();
                guest.load(page(0)).unwrap();
            });
            *born.lock().unwrap() = Some(child);
            guest.load(page(0)).unwrap();
        }),
    ]);
    let child = born.into_inner().unwrap().unwrap();
    world.finish(vec![space, child]);
}

/// Parent and child store to a shared page, and other CPUs read it: one copies, the other may reuse
/// it.
fn parent_and_child_write_shared_pages() {
    let (world, space) = World::with_pages(2);
    let child = world.within(&space, |guest| guest.fork(|_| false));
    world.run(&[
        (&space, &|guest| {
            guest.load(page(0)).unwrap();
            guest.store(page(0), 10).unwrap();
            guest.load(page(0)).unwrap();
            guest.store(page(1), 11).unwrap();
        }),
        (&space, &|guest| {
            (0..20).for_each(|_| assert!(guest.load(page(0)).is_ok()));
            guest.store(page(0) + 8, 21).unwrap();
            guest.load(page(0)).unwrap();
        }),
        (&child, &|guest| {
            guest.load(page(0)).unwrap();
            guest.store(page(0), 30).unwrap();
            guest.load(page(1)).unwrap();
            guest.load(page(0)).unwrap();
        }),
    ]);
    world.finish(vec![space, child]);
}

/// The child ends while the parent stores: who is the last owner changes under the fault.
fn stores_against_the_child_s_exit() {
    let (world, space) = World::with_pages(2);
    let child = Mutex::new(Some(world.within(&space, |guest| guest.fork(|_| false))));
    world.run(&[
        (&space, &|guest| {
            guest.store(page(0), 10).unwrap();
            guest.load(page(0)).unwrap();
            guest.store(page(1), 11).unwrap();
        }),
        (&space, &|guest| {
            guest.load(page(1)).unwrap();
            guest.store(page(1) + 8, 21).unwrap();
            guest.store(page(0) + 8, 20).unwrap();
            guest.load(page(0)).unwrap();
        }),
        (&space, &|guest| {
            let child = child.lock().unwrap().take().unwrap();
            guest.poll();
            child.exit(guest.cpu);
            guest.store(page(0), 30).unwrap();
        }),
    ]);
    world.finish(vec![space]);
}

/// A fault copies a page while the page becomes exclusive to its space, is stored to, and is shared
/// again: the entry has the old value, but the page does not.
fn a_copy_against_reuse_and_fork() {
    let (world, born) = (World::new(2), Mutex::new(None));
    let space = world.space(|guest| guest.fill(AT, 1));
    let child = world.within(&space, |guest| guest.fork(|_| false));
    world.run(&[
        (&space, &|guest| guest.store(page(0) + 8, 10).unwrap()),
        (&space, &|guest| {
            child.munmap(guest.cpu, AT, PAGE).unwrap();
            guest.store(page(0), 20).unwrap();
            *born.lock().unwrap() = Some(guest.fork(|_| false));
        }),
    ]);
    world.within(&space, |guest| assert!(guest.load(page(0)).is_ok()));
    world.finish(vec![space, child, born.into_inner().unwrap().unwrap()]);
}

/// A fault copies while the page is emptied, comes back in the same frame, and is shared again.
fn a_copy_against_a_new_page_in_the_old_frame() {
    let (world, born) = (World::new(2), Mutex::new(None));
    let space = world.space(|guest| guest.fill(AT, 1));
    let child = world.within(&space, |guest| guest.fork(|_| false));
    world.run(&[
        (&space, &|guest| guest.store(page(0) + 8, 10).unwrap()),
        (&space, &|guest| {
            child.munmap(guest.cpu, AT, PAGE).unwrap();
            guest.empty(page(0), 1);
            (20..30).for_each(|value| guest.store(page(0), value).unwrap());
            *born.lock().unwrap() = Some(guest.fork(|_| false));
        }),
    ]);
    world.within(&space, |guest| assert!(guest.load(page(0)).is_ok()));
    world.finish(vec![space, child, born.into_inner().unwrap().unwrap()]);
}

/// Shared memory stays shared across a fork, whichever process touches it first.
fn shared_memory_across_fork() {
    let world = World::new(3);
    let space = world.space(|guest| {
        let flags = MapFlags::SHARED | MapFlags::ANONYMOUS | MapFlags::FIXED;
        guest.change((AT, 2), Some(RW), true, || {
            guest.space.mmap(guest.cpu, AT, 2 * PAGE, RW, flags).unwrap();
        });
        guest.store(page(0), 1).unwrap();
    });
    world.run(&[
        (&space, &|guest| {
            guest.store(page(0), 10).unwrap();
            guest.store(page(1), 11).unwrap();
            guest.load(page(1)).unwrap();
        }),
        (&space, &|guest| {
            guest.load(page(1)).unwrap();
            guest.store(page(1), 21).unwrap();
            guest.load(page(0)).unwrap();
        }),
        (&space, &|guest| {
            let child = guest.fork(|_| true);
            guest.switch(&child, |guest| {
                guest.load(page(0)).unwrap();
                guest.store(page(1), 31).unwrap();
                guest.store(page(0), 30).unwrap();
                guest.load(page(1)).unwrap();
            });
            child.exit(guest.cpu);
        }),
    ]);
    world.finish(vec![space]);
}

mod tests {
    holds!(
        stores_against_fork,
        parent_and_child_write_shared_pages,
        stores_against_the_child_s_exit,
        a_copy_against_reuse_and_fork,
        a_copy_against_a_new_page_in_the_old_frame,
        shared_memory_across_fork,
    );
}

mod needs {
    use crate::support;
    use faultless::sync::mutant::Mutant;

    needs!(
        flushing_pages_shared_by_a_fork: ForkFlush in [stores_against_fork],
        flushing_copied_pages: CopyFlush in [parent_and_child_write_shared_pages],
    );
}
