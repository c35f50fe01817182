//! The end of spaces: by the last leaving program, and of a whole family at once.

use crate::support::disk::{Disk, read_page};
use crate::support::{AT, Guest, RW, Space, World, page};
use faultless::{MapFlags, Object, Prot};
use std::sync::{Arc, Mutex};

/// Pages of the ending space; one more page stays untouched.
const PAGES: u64 = 3;

/// Creates a world of three CPUs, the home space of their programs, and a common space with a
/// reference for each program.
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

/// Programs leave a space, which the last program ends, and continue in frames of the ended space.
fn the_last_leaving_program_ends_the_space() {
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

/// Two children end while their parent stores to the shared pages: one store copies, the last store
/// reuses.
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

/// A child ends while another CPU searches for the pages shared with the parent, to evict them. The
/// child's frames soon have other owners, who store words there that look like an entry of such a
/// page.
fn the_end_of_a_child_against_eviction() {
    let world = World::unwatched(2, 48);
    world.swap_on(Disk::scratch(8, 2));
    let [parent, home] = [1, 2].map(|pages| world.numbered(pages, 2));
    let frame = world.quietly(|cpu| parent.page_at(cpu, page(0)).unwrap().frame);
    let entry = u64::from(frame.0) << 12 | 0x25;
    let untouched = 2..6;
    let child = world.within(&parent, |guest| {
        // The page's content also looks like a table of such entries.
        [0, 8].into_iter().for_each(|word| guest.store(page(0) + word, entry).unwrap());
        guest.space.fork(guest.cpu).unwrap()
    });
    let child = Mutex::new(Some(child));
    world.within(&home, |guest| guest.map(page(untouched.start), 4, RW));
    world.run(&[
        (&home, &|guest| {
            child.lock().unwrap().take().unwrap().exit(guest.cpu);
            fill_with(guest, entry, untouched.clone());
        }),
        (&home, &|guest| {
            (0..2).for_each(|_| _ = guest.cpu.reclaim(1));
        }),
    ]);
    world.finish(vec![parent, home]);
}

/// A space that maps a file ends while another CPU searches for the file's page. The frames of the
/// space soon have other owners, who store words there that look like an entry of this page.
fn the_end_of_a_space_against_eviction_of_its_file() {
    let world = World::unwatched(2, 64);
    let file = world.file(Disk::new(1, 2));
    let [mapper, home] = [0, 2].map(|pages| world.numbered(pages, 2));
    world.within(&mapper, |guest| {
        guest.map_object(AT, 1, &file, Prot::READ, MapFlags::SHARED);
        guest.load(page(0)).unwrap();
    });
    let frame = world.quietly(|cpu| mapper.page_at(cpu, page(0)).unwrap().frame);
    let entry = u64::from(frame.0) << 12 | 0x25;
    world.quietly(|cpu| {
        // SAFETY: two words of a currently unused page.
        file.write_page(cpu, 0, |at| unsafe { at.cast::<[u64; 2]>().write([entry; 2]) }).unwrap();
    });
    let mapper = Mutex::new(Some(mapper));
    world.run(&[
        (&home, &|guest| {
            mapper.lock().unwrap().take().unwrap().exit(guest.cpu);
            fill_with(guest, entry, 2..8);
        }),
        (&home, &|guest| {
            guest.cpu.reclaim(1);
            guest.evict(&file, 0..1);
        }),
    ]);
    assert_eq!(world.within(&home, |guest| read_page(guest, &file, 0)), Ok(entry));
    world.finish_with(vec![home], vec![file]);
}

/// An object is released while another CPU scans its pages. The releasing CPU needs their frames.
fn the_end_of_an_object_against_reclaim() {
    let world = World::unwatched(2, 64);
    let home = world.space(|guest| {
        guest.map(page(0), 16, RW);
        guest.store(page(0), 1).unwrap();
    });
    let other = world.numbered(1, 1);
    let object = Mutex::new(Some(world.object(8, 8)));
    world.leave_frames(2);
    world.run(&[
        (&home, &|guest| {
            Object::release(object.lock().unwrap().take().unwrap(), guest.cpu);
            (1..9).for_each(|at| guest.store(page(at), at).expect("enough memory"));
        }),
        (&other, &|guest| {
            (0..3).for_each(|_| {
                guest.cpu.reclaim(1);
            });
        }),
    ]);
    world.finish(vec![home, other]);
}

/// Stores two words to each of `pages`, which stay unchanged.
fn fill_with(guest: &Guest<'_>, value: u64, pages: core::ops::Range<u64>) {
    let words = [0, 8];
    for at in pages.clone().map(page) {
        words.iter().for_each(|word| guest.store(at + word, value).unwrap());
    }
    for at in pages.map(page) {
        assert_eq!(words.map(|word| guest.load(at + word)), [Ok(value); 2], "changed");
    }
}

mod tests {
    holds!(
        the_last_leaving_program_ends_the_space,
        stores_against_the_end_of_two_children,
        the_end_of_a_child_against_eviction,
        the_end_of_a_space_against_eviction_of_its_file,
        the_end_of_an_object_against_reclaim,
    );
}

mod needs {
    use crate::support;
    use faultless::sync::mutant::Mutant;

    needs!(
        waiting_for_walks: ExitAwaitsWalks in [the_end_of_a_child_against_eviction],
        walking_in_no_closed_space: WalkLooksAtClosed in [the_end_of_a_space_against_eviction_of_its_file],
    );
}
