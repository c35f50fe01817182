//! The end of spaces: by whoever leaves last, of a whole family at once, and under a CPU that idles there.
#![cfg(shuttle)]

#[macro_use]
mod scenario;

use scenario::{AT, Guest, RW, Space, World, page};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Pages of the space that ends; there is one more, which nobody has touched.
const PAGES: u64 = 3;

/// A world of three CPUs, the space where they are at home, and one that is theirs in common: a share for
/// each.
fn with_shares() -> (World, Space, [Mutex<Option<Arc<Space>>>; 3]) {
    let (world, shared) = World::with_pages(PAGES);
    world.within(&shared, |guest| guest.map(page(PAGES), 1, RW));
    let home = world.space(|guest| guest.map(AT, 6, RW));
    let shared = Arc::new(shared);
    let shares = core::array::from_fn(|_| Mutex::new(Some(Arc::clone(&shared))));
    (world, home, shares)
}

/// Takes the CPU's share.
fn share(guest: &Guest<'_>, shares: &[Mutex<Option<Arc<Space>>>; 3]) -> Arc<Space> {
    shares[guest.cpu.id().index()].lock().unwrap().take().unwrap()
}

/// Programs leave a space, which the last of them ends, and go on in its frames.
fn whoever_leaves_last_ends_it() {
    let (world, home, shares) = with_shares();
    let program = |guest: &Guest<'_>| {
        let (shared, mine) = (share(guest, &shares), u64::from(guest.cpu.id().0));
        guest.switch(&shared, |guest| {
            guest.store(page(mine), 10 + mine).unwrap();
            guest.load(page((mine + 1) % PAGES)).unwrap();
            guest.store(page((mine + 2) % PAGES) + 8, 20 + mine).unwrap();
        });
        if let Some(space) = Arc::into_inner(shared) {
            space.exit(guest.cpu);
        }
        guest.store(page(2 * mine), 30 + mine).unwrap();
        guest.store(page(2 * mine + 1), 40 + mine).unwrap();
        guest.load(page(2 * mine)).unwrap();
    };
    world.run(&[(&home, &program), (&home, &program), (&home, &program)]);
    world.finish(vec![home]);
}

/// A CPU idles in a space that another ends: it is told, and knows nothing of it any more.
fn a_cpu_that_idles_is_told_of_the_end() {
    let (world, home, shares) = with_shares();
    let gone = AtomicBool::new(false);
    shares[2].lock().unwrap().take();
    world.run(&[
        (&home, &|guest| {
            let shared = share(guest, &shares);
            guest.switch(&shared, |guest| guest.store(page(0), 10).unwrap());
            while Arc::strong_count(&shared) > 1 {
                guest.poll();
                shuttle::thread::yield_now();
            }
            Arc::into_inner(shared).unwrap().exit(guest.cpu);
            gone.store(true, Ordering::Relaxed);
            guest.store(page(0), 11).unwrap();
        }),
        (&home, &|guest| {
            let shared = share(guest, &shares);
            let id = shared.id();
            guest.poll();
            home.deactivate(guest.cpu);
            let inside = Guest::enter(guest.world, guest.cpu, &shared);
            (0..PAGES).for_each(|at| assert!(inside.load(page(at)).is_ok()));
            inside.store(page(1), 20).unwrap();
            inside.store(page(PAGES), 21).unwrap();
            // It is not left.
            core::mem::forget(inside);
            drop(shared);
            while !gone.load(Ordering::Relaxed) {
                guest.poll();
                shuttle::thread::yield_now();
            }
            let known = |at| guest.world.vm.machine().tlb(guest.cpu.id()).lookup(id, page(at));
            assert!(
                (0..PAGES).all(|at| known(at).is_none()),
                "a translation of a space that ended"
            );
            home.activate(guest.cpu);
            (2..4).for_each(|at| guest.store(page(at), 20 + at).unwrap());
            guest.load(page(2)).unwrap();
        }),
        (&home, &|guest| {
            guest.store(page(4), 30).unwrap();
            guest.load(page(0)).unwrap();
        }),
    ]);
    world.finish(vec![home]);
}

/// Two children end while their parent stores to what it shares with them: one copies, the last keeps.
fn stores_against_the_end_of_two_children() {
    let (world, space) = World::with_pages(2);
    let children = [(), ()].map(|()| world.within(&space, |guest| guest.fork(|_| false)));
    let children = children.map(|child| Mutex::new(Some(child)));
    let end = |guest: &Guest<'_>, number: usize| {
        let child = children[number].lock().unwrap().take().unwrap();
        guest.switch(&child, |guest| {
            guest.load(page(1)).unwrap();
            guest.store(page(number as u64), 30).unwrap();
            guest.load(page(1)).unwrap();
        });
        child.exit(guest.cpu);
    };
    world.run(&[
        (&space, &|guest| {
            guest.store(page(0), 10).unwrap();
            guest.load(page(1)).unwrap();
            guest.store(page(1), 11).unwrap();
            guest.load(page(0)).unwrap();
        }),
        (&space, &|guest| {
            end(guest, 0);
            guest.store(page(1) + 8, 20).unwrap();
        }),
        (&space, &|guest| {
            end(guest, 1);
            guest.load(page(0)).unwrap();
        }),
    ]);
    world.finish(vec![space]);
}

mod tests {
    holds!(
        whoever_leaves_last_ends_it,
        a_cpu_that_idles_is_told_of_the_end,
        stores_against_the_end_of_two_children,
    );
}

mod needs {
    use crate::scenario;
    use faultless::sync::mutant::Mutant;

    needs!(
        dropping_translations: DropTranslations in [a_cpu_that_idles_is_told_of_the_end],
    );
}
