//! Frames run out in the middle of faults and forks, on all CPUs: a refused operation leaves no
//! traces.

use crate::support::{AT, Guest, RW, World, page};

/// The number of pages wanted by programs, of which only some can be allocated.
const PAGES: u64 = 6;

/// All CPUs want more frames than available, and one CPU frees frames.
fn faults_without_frames() {
    let world = World::new(3);
    let space = world.space(|guest| guest.map(AT, PAGES, RW));
    world.leave_frames(6);
    world.run(&[
        (&space, &|guest| {
            (0..PAGES).for_each(|at| _ = guest.store(page(at), 10 + at));
            let _ = guest.load(page(0));
        }),
        (&space, &|guest| {
            (0..PAGES).rev().for_each(|at| _ = guest.store(page(at) + 8, 20 + at));
            let _ = guest.load(page(5));
        }),
        (&space, &|guest| {
            let _ = guest.store(page(2), 30);
            guest.empty(page(1), 3);
            let _ = guest.store(page(3), 31);
            guest.unmap(page(4), 2);
            guest.cpu.drain();
            let _ = guest.store(page(1), 32);
        }),
    ]);
    world.finish(vec![space]);
}

/// Forks, and the following copies, while another CPU allocates the missing frames.
fn forks_without_frames() {
    let (world, space) = World::with_pages(2);
    world.within(&space, |guest| guest.map(page(2), PAGES - 2, RW));
    world.leave_frames(8);
    let parent = |guest: &Guest<'_>| {
        let Some(child) = guest.try_fork(|_| false) else { return };
        guest.switch(&child, |guest| {
            let _ = guest.store(page(0), 30);
            let _ = guest.load(page(1));
            let _ = guest.store(page(1), 31);
        });
        child.exit(guest.cpu);
    };
    world.run(&[
        (&space, &|guest| {
            (0..PAGES).for_each(|at| _ = guest.store(page(at), 10 + at));
        }),
        (&space, &parent),
        (&space, &|guest| {
            parent(guest);
            let _ = guest.store(page(0), 40);
        }),
    ]);
    world.finish(vec![space]);
}

mod tests {
    holds!(faults_without_frames, forks_without_frames);
}
