//! Huge leaves: folios that are mapped, split, unmapped and created, against programs, the kernel
//! and each other.
//!
//! Operations on all pages of a folio take thousands of steps, so these scenarios have fewer
//! schedules than others.

use crate::support;
use crate::support::disk::Disk;
use crate::support::{AT, Guest, PAGE, RW, Regime, Space, World, page};
use faultless::{
    Advice, Counter, Errno, FaultError, HugeText, MapFlags, Object, PrivateCopies, Prot,
    RemapFlags, Setting, Shared, VirtRange,
};
use shuttle::rand::Rng;
use std::sync::atomic::{AtomicBool, Ordering};

/// Pages of a folio.
const F: u64 = 512;
const FRAMES: u32 = 2600;
const RX: Prot = Prot::READ.union(Prot::EXEC);
const RWX: Prot = RW.union(Prot::EXEC);

type File = Shared<Object>;

/// Creates a file of one folio. If `cached` is set, the cache has all pages, from single reads and
/// not as a folio.
fn file(world: &World, cached: bool) -> File {
    let file = world.file(Disk::new(F, 64));
    let space = mapping(world, &file, RX, MapFlags::SHARED);
    world.vm.set(Setting::HugeText(if cached { HugeText::Never } else { HugeText::Always }));
    world.within(&space, |guest| {
        file.read_ahead(guest.cpu, 0..if cached { F } else { 0 }).unwrap();
        assert_eq!(guest.load(page(9)), Ok(10));
    });
    world.vm.set(Setting::HugeText(HugeText::Always));
    world.quietly(|cpu| space.exit(cpu));
    file
}

fn mapping(world: &World, file: &File, prot: Prot, kind: MapFlags) -> Space {
    world.space(|guest| guest.map_object(AT, F, file, prot, kind))
}

fn count(world: &World, counter: Counter) -> u64 {
    world.vm.totals().get(counter)
}

/// Programs load while the file is truncated in the middle of the folio, for which another space
/// has a leaf. Afterwards, no program sees a page beyond the end.
fn a_first_load_against_truncation() {
    let world = World::unwatched(3, FRAMES);
    let file = file(&world, false);
    let space = mapping(&world, &file, RX, MapFlags::PRIVATE);
    let other = mapping(&world, &file, RX, MapFlags::SHARED);
    world.within(&other, |guest| assert_eq!(guest.load(page(1)), Ok(2)));
    world.run(&[
        (&space, &|guest| {
            assert_eq!(guest.load(page(3)), Ok(4));
            let cut = guest.load(page(400));
            assert!(matches!(cut, Ok(401) | Err(FaultError::Bus)), "{cut:?}");
        }),
        (&space, &|guest| {
            guest.poll();
            file.set_len(guest.cpu, 256 * PAGE).unwrap();
            for space in [&space, &other] {
                space.revoke(guest.cpu, &file, 256..u64::MAX, PrivateCopies::Drop);
            }
            assert_eq!(guest.load(page(400)), Err(FaultError::Bus));
            assert_eq!(guest.load(page(255)), Ok(256));
        }),
    ]);
    world.finish_with(vec![space, other], vec![file]);
}

/// Programs load while a hole is punched into the folio, for which another space may have a leaf,
/// and the pages are read again into other frames. Afterwards, all programs see zeros in the hole.
fn a_first_load_against_a_hole() {
    let world = World::unwatched(3, FRAMES);
    let file = file(&world, false);
    let [space, other] = [(); 2].map(|()| mapping(&world, &file, RX, MapFlags::SHARED));
    let mut random = shuttle::rand::thread_rng();
    if random.gen_bool(0.7) {
        world.within(&other, |guest| assert_eq!(guest.load(page(1)), Ok(2)));
    }
    let hole = if random.gen_bool(0.3) { 0 } else { 5 };
    world.run(&[
        (&space, &|guest| {
            assert_eq!(guest.load(page(3)), Ok(4));
            let found = guest.load(page(hole)).unwrap();
            assert!([0, hole + 1].contains(&found), "{found}");
        }),
        (&other, &|guest| {
            file.punch(guest.cpu, hole..hole + 1).unwrap();
            for space in [&space, &other] {
                space.revoke(guest.cpu, &file, hole..hole + 1, PrivateCopies::Keep);
                guest.poll();
            }
            assert_eq!(guest.load(page(hole)), Ok(0));
        }),
    ]);
    for space in [&space, &other] {
        world.within(space, |guest| {
            assert_eq!((guest.load(page(hole)), guest.load(page(3))), (Ok(0), Ok(4)));
        });
    }
    world.finish_with(vec![space, other], vec![file]);
}

/// A first fetch reads a folio, while other accesses need single pages of the folio.
fn a_first_fetch_against_reads() {
    let world = World::unwatched(3, FRAMES);
    let file = world.file(Disk::new(F, 1));
    world.vm.set(Setting::HugeText(HugeText::Always));
    let space = mapping(&world, &file, RX, MapFlags::PRIVATE);
    let other = mapping(&world, &file, RW, MapFlags::SHARED);
    world.run(&[
        (&space, &|guest| assert_eq!(guest.load(page(3)), Ok(4))),
        (&other, &|guest| {
            assert_eq!(guest.load(page(200)), Ok(201));
            guest.store(page(0) + 8, 7).unwrap();
        }),
    ]);
    world.within(&space, |guest| {
        [3, 200, 511].into_iter().for_each(|at| assert_eq!(guest.load(page(at)), Ok(at + 1)));
        assert_eq!(guest.load(page(0) + 8), Ok(7), "a lost write");
    });
    world.finish_with(vec![space, other], vec![file]);
}

/// A store, a discard and a change of protection each split the leaf, while another program loads.
fn splits_against_each_other() {
    let world = World::unwatched(3, FRAMES);
    let file = file(&world, false);
    let space = mapping(&world, &file, RWX, MapFlags::PRIVATE);
    world.within(&space, |guest| assert_eq!(guest.load(page(0)), Ok(1)));
    world.run(&[
        (&space, &|guest| {
            guest.store(page(7), 70).unwrap();
            assert_eq!((guest.load(page(7)), guest.load(page(8))), (Ok(70), Ok(9)));
        }),
        (&space, &|guest| {
            guest.advise(page(100), 2, Advice::DontNeed);
            assert_eq!(guest.load(page(101)), Ok(102));
        }),
        (&space, &|guest| {
            guest.protect(page(200), 3, Prot::READ);
            assert_eq!(guest.load(page(201)), Ok(202));
            assert_eq!(guest.store(page(201), 1), Err(FaultError::Segv { mapped: true }));
        }),
    ]);
    assert!(count(&world, Counter::ThpSplitPmd) <= 2);
    world.finish_with(vec![space], vec![file]);
}

/// The first leaf of a folio is made in two spaces at once, and the last is dropped in two at once.
fn first_leaves_and_last_ones() {
    let world = World::unwatched(2, FRAMES);
    let file = file(&world, false);
    let [space, other] = [(); 2].map(|()| mapping(&world, &file, RX, MapFlags::SHARED));
    let body = |guest: &Guest<'_>| {
        assert_eq!(guest.load(page(1)), Ok(2));
        guest.advise(AT, F, Advice::DontNeed);
        assert_eq!(guest.load(page(511)), Ok(512));
        guest.unmap(AT, F);
    };
    world.run(&[(&space, &body), (&other, &body)]);
    world.finish_with(vec![space, other], vec![file]);
}

/// Pages move into a folio for a first fetch, while the kernel reads, writes, writes back, and
/// drops the pages.
fn a_folio_is_made_against_the_kernel() {
    let world = World::unwatched(3, FRAMES);
    let file = file(&world, true);
    let space = mapping(&world, &file, RX, MapFlags::SHARED);
    let other = world.space(|_| {});
    world.run(&[
        (&space, &|guest| {
            for at in [1, 300] {
                assert_eq!(guest.load(page(at)), Ok(at + 1));
            }
        }),
        (&other, &|guest| {
            let write = |at: *mut u8| {
                support::machine::step();
                // SAFETY: a word of the lent page; one thread runs at a time.
                unsafe { at.cast::<u64>().write(30) };
            };
            guest.poll();
            while file.write_page(guest.cpu, 250, write) == Err(Errno::EAGAIN) {
                guest.cpu.await_read().unwrap();
            }
            // SAFETY: as above.
            let word =
                |at: Option<*const u8>| at.map_or(0, |at| unsafe { at.cast::<u64>().read() });
            assert_eq!(file.read_page(guest.cpu, 250, word), Ok(30), "a lost write");
        }),
        (&other, &|guest| {
            guest.poll();
            file.drop_clean(guest.cpu, 240..260);
        }),
    ]);
    world.within(&space, |guest| assert_eq!(guest.load(page(250)), Ok(30), "a lost write"));
    world.finish_with(vec![space, other], vec![file]);
}

/// Pages of an object without a store move into a folio, while the kernel reads a page, and a
/// program copies pages. No page is mistaken for a zero page.
fn a_moving_page_stays_present() {
    let world = World::unwatched(3, FRAMES);
    let object = world.object(F, F);
    world.vm.set(Setting::HugeText(HugeText::Always));
    let space = mapping(&world, &object, RX, MapFlags::SHARED);
    let other = mapping(&world, &object, RW, MapFlags::PRIVATE);
    // SAFETY: a word of the lent page; one thread runs at a time.
    let word = |at: Option<*const u8>| at.map_or(0, |at| unsafe { at.cast::<u64>().read() });
    let first = world.quietly(|cpu| object.read_page(cpu, 0, word).unwrap());
    assert_ne!(first, 0);
    world.run(&[
        (&space, &|guest| assert_eq!(guest.load(page(0)), Ok(first))),
        (&other, &|guest| {
            guest.poll();
            assert_eq!(object.read_page(guest.cpu, 0, word), Ok(first), "zeros");
            assert!(object.has_page(guest.cpu, 0), "missing");
        }),
        (&other, &|guest| {
            guest.store(page(0) + 8, 9).unwrap();
            assert_eq!(guest.load(page(0)), Ok(first), "a copy without content");
        }),
    ]);
    world.finish_with(vec![space, other], vec![object]);
}

/// Base pages in use are replaced by a leaf, or the collapse fails, and one page is unmapped in the
/// meantime.
fn a_collapse_against_uses() {
    let world = World::unwatched(3, FRAMES);
    let file = file(&world, true);
    let space = mapping(&world, &file, RWX, MapFlags::PRIVATE);
    world.vm.set(Setting::HugeText(HugeText::Never));
    world.within(&space, |guest| assert_eq!(guest.load(page(5)), Ok(6)));
    world.run(&[
        (&space, &|guest| {
            assert_eq!(guest.load(page(6)), Ok(7));
            guest.store(page(7), 70).unwrap();
            assert_eq!((guest.load(page(7)), guest.load(page(300))), (Ok(70), Ok(301)));
        }),
        (&space, &|guest| {
            guest.poll();
            let done = guest.space.madvise(guest.cpu, AT, F * PAGE, Advice::Collapse);
            let errno = done.map_err(|error| error.errno);
            assert!(
                matches!(errno, Ok(()) | Err(Errno::EAGAIN | Errno::EINVAL | Errno::ENOMEM)),
                "{errno:?}"
            );
        }),
        (&space, &|guest| guest.unmap(page(500), 1)),
    ]);
    world.within(&space, |guest| assert_eq!(guest.load(page(7)), Ok(70), "a lost write"));
    world.finish_with(vec![space], vec![file]);
}

/// A collapse reads the whole folio. The last page is dropped three times, each time as soon as it
/// is present. The store never fails, so `EIO` must not occur.
fn a_collapse_against_drops() {
    let world = World::unwatched(2, FRAMES);
    let file = world.file(Disk::new(F, 64));
    world.vm.set(Setting::HugeText(HugeText::Always));
    let space = mapping(&world, &file, RX, MapFlags::PRIVATE);
    let over = AtomicBool::new(false);
    world.run(&[
        (&space, &|guest| {
            call(guest, guest.space.madvise(guest.cpu, AT, F * PAGE, Advice::Collapse));
            over.store(true, Ordering::Relaxed);
        }),
        (&space, &|guest| {
            let mut dropped = 0;
            for _ in 0..2000 {
                if dropped == 3 || over.load(Ordering::Relaxed) {
                    break;
                }
                guest.poll();
                dropped += file.drop_clean(guest.cpu, F - 1..F);
            }
        }),
    ]);
    world.within(&space, |guest| assert_eq!(guest.load(page(511)), Ok(512)));
    world.finish_with(vec![space], vec![file]);
}

/// An operation on a folio mapped by a leaf or by base pages: on the whole folio, or on a part.
type Op = (&'static str, fn(&Guest<'_>, &File));

/// Reads the page, which shows what the file has, or a program stored; or is gone.
fn look(guest: &Guest<'_>, at: u64) {
    let found = guest.load(page(at));
    let stored = 1000 + at;
    let refused = matches!(found, Err(FaultError::Bus | FaultError::Segv { .. }));
    assert!(refused || found == Ok(at + 1) || found == Ok(stored), "page {at}: {found:?}");
}

fn put(guest: &Guest<'_>, at: u64) {
    match guest.store(page(at), 1000 + at) {
        Ok(()) | Err(FaultError::Bus | FaultError::Segv { .. }) => look(guest, at),
        wrong => panic!("page {at}: {wrong:?}"),
    }
}

/// Makes a call that may find no work.
fn call(guest: &Guest<'_>, made: Result<(), faultless::Error>) {
    guest.poll();
    let errno = made.map_err(|error| error.errno);
    assert!(
        matches!(errno, Ok(()) | Err(Errno::EAGAIN | Errno::EINVAL | Errno::ENOMEM)),
        "{errno:?}"
    );
}

const OPS: [Op; 18] = [
    ("load", |guest, _| [0, 300].into_iter().for_each(|at| look(guest, at))),
    ("store", |guest, _| put(guest, 7)),
    ("store elsewhere", |guest, _| put(guest, 300)),
    ("munmap all", |guest, _| guest.unmap(AT, F)),
    ("munmap a part", |guest, _| guest.unmap(page(6), 3)),
    ("protect all", |guest, _| {
        call(guest, guest.space.mprotect(guest.cpu, AT, F * PAGE, Prot::READ));
    }),
    ("protect a part", |guest, _| {
        call(guest, guest.space.mprotect(guest.cpu, page(5), 10 * PAGE, Prot::empty()));
    }),
    ("discard all", |guest, _| {
        call(guest, guest.space.madvise(guest.cpu, AT, F * PAGE, Advice::DontNeed));
    }),
    ("discard a part", |guest, _| {
        call(guest, guest.space.madvise(guest.cpu, page(250), 10 * PAGE, Advice::DontNeed));
    }),
    ("collapse", |guest, _| {
        call(guest, guest.space.madvise(guest.cpu, AT, F * PAGE, Advice::Collapse));
    }),
    ("move a part", |guest, _| {
        let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
        guest.poll();
        let moved = guest.space.mremap(guest.cpu, page(7), PAGE, PAGE, flags, page(4 * F));
        assert!(matches!(moved.map_err(|error| error.errno), Ok(_) | Err(Errno::EFAULT)));
    }),
    ("fork", |guest, _| {
        guest.poll();
        let child = guest.space.fork(guest.cpu).unwrap();
        child.exit(guest.cpu);
    }),
    ("truncate", |guest, file| {
        guest.poll();
        file.set_len(guest.cpu, 256 * PAGE).unwrap();
        guest.space.revoke(guest.cpu, file, 256..u64::MAX, PrivateCopies::Drop);
        guest.poll();
        assert!(matches!(guest.load(page(300)), Err(FaultError::Bus | FaultError::Segv { .. })));
    }),
    ("write back", |guest, file| {
        guest.poll();
        let protect = |pages| guest.space.write_protect(guest.cpu, file, pages);
        file.write_back(guest.cpu, 0..u64::MAX, protect).unwrap();
        file.drop_clean(guest.cpu, 0..u64::MAX);
    }),
    ("pin", |guest, _| {
        guest.poll();
        drop(guest.space.pin(guest.cpu, page(7), PAGE, false));
    }),
    ("list", |guest, _| {
        guest.poll();
        let mut last = None;
        guest.space.pages(guest.cpu, VirtRange::new(AT, page(F)), |addr, _| {
            assert!(last < Some(addr), "{addr:#x} is reported after {last:x?}");
            last = Some(addr);
        });
    }),
    ("list areas", |guest, _| {
        guest.poll();
        guest.space.areas(guest.cpu, |area| {
            assert!(area.resident <= area.range.pages(), "a page is counted twice: {area:?}");
        });
    }),
    ("write from outside", |guest, _| {
        guest.poll();
        let word = 1007u64.to_ne_bytes();
        let _refused = guest.space.write_bytes(guest.cpu, page(7), &word);
        look(guest, 7);
    }),
];

/// Each operation against each operation, including itself, on writable text in a private or a
/// shared mapping.
fn every_operation_against_every_operation() {
    let mut random = shuttle::rand::thread_rng();
    let [first, second] = [(); 2].map(|()| OPS[random.gen_range(0..OPS.len())]);
    let kind = if random.gen_bool(0.5) { MapFlags::PRIVATE } else { MapFlags::SHARED };
    let world = World::unwatched(2, FRAMES);
    let file = file(&world, random.gen_bool(0.5));
    let space = mapping(&world, &file, RWX, kind);
    if random.gen_bool(0.7) {
        let choice = if random.gen_bool(0.7) { HugeText::Always } else { HugeText::Never };
        world.vm.set(Setting::HugeText(choice));
        world.within(&space, |guest| look(guest, 0));
        world.vm.set(Setting::HugeText(HugeText::Always));
    }
    let visit = std::panic::AssertUnwindSafe(|| {
        world.run(&[
            (&space, &|guest| first.1(guest, &file)),
            (&space, &|guest| second.1(guest, &file)),
        ]);
    });
    if let Err(panic) = std::panic::catch_unwind(visit) {
        eprintln!("{} with {}, {kind:?}", first.0, second.0);
        std::panic::resume_unwind(panic);
    }
    world.within(&space, |guest| {
        [0, 7, 255, 256, 300, 511].into_iter().for_each(|at| look(guest, at))
    });
    world.finish_with(vec![space], vec![file]);
}

/// As [`support::explore`], with fewer schedules.
fn explore(scenario: fn()) {
    let fewer = |part| support::schedules().div_ceil(part);
    for (regime, part) in [
        (support::SPECULATIVE, 20),
        (support::PER_VMA, 100),
        (support::MMAP_LOCK, 100),
        (Regime::Changing, 100),
    ] {
        support::explore_under(regime, fewer(part), scenario);
    }
}

macro_rules! few {
    ($($scenario:ident),+ $(,)?) => { $(
        #[test]
        fn $scenario() {
            super::explore(super::$scenario);
        }
    )+ };
}

mod tests {
    few!(
        a_first_load_against_truncation,
        a_first_fetch_against_reads,
        splits_against_each_other,
        first_leaves_and_last_ones,
        a_folio_is_made_against_the_kernel,
        a_moving_page_stays_present,
        a_collapse_against_uses,
        a_collapse_against_drops,
    );

    /// More schedules, for rare interleavings.
    fn explore(scenario: fn()) {
        use crate::support::{self, MMAP_LOCK, PER_VMA, Regime, SPECULATIVE};
        let few = support::schedules().div_ceil(8);
        for regime in [PER_VMA, MMAP_LOCK, Regime::Changing] {
            support::explore_under(regime, few, scenario);
        }
        support::explore_under(SPECULATIVE, support::schedules(), scenario);
    }

    #[test]
    fn every_operation_against_every_operation() {
        explore(super::every_operation_against_every_operation);
    }

    #[test]
    fn a_first_load_against_a_hole() {
        explore(super::a_first_load_against_a_hole);
    }
}

mod needs {
    use crate::support;
    use faultless::sync::mutant::Mutant;

    needs!(
        a_look_for_copies_by_a_collapse: CollapseLooksAgain in [a_collapse_against_uses],
        validating_all_pages_of_a_leaf: LeafLooksAgain in [a_first_load_against_a_hole],
    );
}
