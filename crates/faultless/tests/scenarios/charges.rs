//! Charged pages of files with a read-only store: first stores against calls that free, read and
//! mark the same pages. The charge always counts the dirty pages, and no store is refused while the
//! limit has room for its page.

use crate::support::disk::{Disk, overwrite_page, read_page, write_page};
use crate::support::{Guest, PAGE, RW, Space, World, page};
use faultless::{MapFlags, Object, PrivateCopies, Setting, Shared};

/// Frames of a scenario's machine.
const FRAMES: u32 = 160;
/// Pages of the file.
const PAGES: u64 = 3;

type File = Shared<Object>;

/// A machine of two CPUs, a file with a read-only store, and a space that maps the file. The limit
/// is `limit` pages.
fn mapped(limit: u64) -> (World, File, Space) {
    let world = World::unwatched(2, FRAMES);
    world.vm.set(Setting::FileLimit(limit));
    let file = world.file(Disk::read_only(PAGES));
    let space = world.space(|guest| {
        guest.map_object(page(0), PAGES, &file, RW, MapFlags::SHARED);
    });
    (world, file, space)
}

/// Checks that exactly the dirty pages are charged. Returns their number.
fn charged(guest: &Guest<'_>, file: &File) -> u64 {
    let mut dirty = 0;
    file.each_resident(guest.cpu, |_, is_dirty| dirty += u64::from(is_dirty));
    assert_eq!(guest.world.vm.charged_pages(), dirty, "charged pages differ from dirty pages");
    dirty
}

/// Checks the charge, drops all pages, and ends the space and the file.
fn finish(world: &World, space: Space, file: File) {
    world.within(&space, |guest| {
        charged(guest, &file);
        file.set_len(guest.cpu, 0).unwrap();
        space.revoke(guest.cpu, &file, 0..u64::MAX, PrivateCopies::Drop);
    });
    assert_eq!(world.vm.charged_pages(), 0, "charged without a page");
    world.finish_with(vec![space], vec![file]);
}

/// Frees a page of the file, and reads it again: the new page is clean.
fn renew(guest: &Guest<'_>, file: &File, index: u64) {
    file.free_pages(guest.cpu, index..index + 1);
    guest.space.revoke(guest.cpu, file, index..index + 1, PrivateCopies::Keep);
    read_page(guest, file, index).unwrap();
}

/// A page that is dirty when a store begins is replaced by a clean one: without a mapping, through
/// a mapping that allows loads, and while the kernel stores.
fn stores_against_new_pages() {
    let (world, file, space) = mapped(PAGES);
    world.within(&space, |guest| {
        guest.load(page(1)).unwrap();
        (0..PAGES).for_each(|index| write_page(guest, &file, index, 10).unwrap());
        assert_eq!(charged(guest, &file), PAGES);
    });
    world.run(&[
        (&space, &|guest| {
            guest.store(page(0), 20).unwrap();
            guest.store(page(1), 20).unwrap();
            write_page(guest, &file, 2, 20).unwrap();
        }),
        (&space, &|guest| {
            for index in 0..PAGES {
                renew(guest, &file, index);
            }
            // Through an entry with the value of before, if the frame is the same.
            guest.load(page(1)).unwrap();
        }),
    ]);
    finish(&world, space, file);
}

/// Two CPUs store to one clean page, the last that the limit allows.
fn first_stores_at_the_limit() {
    let (world, file, space) = mapped(1);
    world.within(&space, |guest| assert_eq!(guest.load(page(0)), Ok(1)));
    world.run(&[
        (&space, &|guest| {
            guest.store(page(0), 20).unwrap();
            write_page(guest, &file, 0, 21).unwrap();
        }),
        (&space, &|guest| guest.store(page(0) + 8, 30).unwrap()),
    ]);
    world.within(&space, |guest| {
        assert_eq!(charged(guest, &file), 1);
        assert_eq!([0, 8].map(|word| guest.load(page(0) + word)), [Ok(21), Ok(30)]);
    });
    finish(&world, space, file);
}

/// A first store takes the last page that the limit allows, while other calls store to a page that
/// is charged.
fn a_first_store_against_charged_pages() {
    let (world, file, space) = mapped(2);
    world.within(&space, |guest| {
        write_page(guest, &file, 0, 10).unwrap();
        read_page(guest, &file, 1).unwrap();
    });
    world.run(&[
        (&space, &|guest| guest.store(page(1), 20).unwrap()),
        (&space, &|guest| {
            file.note_stored(guest.cpu, 0..1);
            overwrite_page(guest, &file, 0, 11).unwrap();
            file.set_len(guest.cpu, PAGES * PAGE - 8).unwrap();
        }),
    ]);
    world.within(&space, |guest| assert_eq!(charged(guest, &file), 2));
    finish(&world, space, file);
}

/// Two CPUs overwrite one absent page, the last that the limit allows.
fn overwrites_at_the_limit() {
    let (world, file, space) = mapped(1);
    let overwrite = |guest: &Guest<'_>| {
        overwrite_page(guest, &file, 0, 20).unwrap();
    };
    world.run(&[(&space, &overwrite), (&space, &overwrite)]);
    world.within(&space, |guest| assert_eq!(charged(guest, &file), 1));
    finish(&world, space, file);
}

/// A page of a file in memory leaves the file at the limit: a store that finds the hole finds room
/// for a page.
fn a_store_to_a_hole_at_the_limit() {
    let world = World::unwatched(2, FRAMES);
    world.vm.set(Setting::FileLimit(1));
    let file = world.quietly(|cpu| Object::try_new_charged(cpu, PAGES, 1).unwrap());
    let space = world.space(|guest| {
        guest.map_object(page(0), PAGES, &file, RW, MapFlags::SHARED);
    });
    world.within(&space, |guest| write_page(guest, &file, 0, 10).unwrap());
    world.run(&[
        (&space, &|guest| guest.store(page(0), 20).unwrap()),
        (&space, &|guest| file.free_pages(guest.cpu, 0..1)),
    ]);
    world.within(&space, |guest| {
        let there = u64::from(file.has_page(guest.cpu, 0));
        assert_eq!(world.vm.charged_pages(), there);
        file.set_pages(guest.cpu, 0).unwrap();
        space.revoke(guest.cpu, &file, 0..u64::MAX, PrivateCopies::Drop);
    });
    assert_eq!(world.vm.charged_pages(), 0, "charged without a page");
    world.finish_with(vec![space], vec![file]);
}

mod tests {
    holds!(
        a_store_to_a_hole_at_the_limit,
        stores_against_new_pages,
        first_stores_at_the_limit,
        a_first_store_against_charged_pages,
        overwrites_at_the_limit,
    );
}

mod needs {
    use crate::support;
    use faultless::sync::mutant::Mutant;

    needs!(
        a_charge_of_an_entry_that_is_held: ChargeHoldsEntry in [first_stores_at_the_limit],
        a_look_at_the_charge: StoreLooksAtCharge in [stores_against_new_pages],
    );
}
