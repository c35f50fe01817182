//! Files with a backing store: pages that are read and written back, against programs, kernel
//! calls, truncation and each other.

use crate::support::disk::{
    Disk, End, Plan, end_read, nothing_is_lost, overwrite_page, read_page, write_back, write_page,
};
use crate::support::{AT, Guest, PAGE, RW, Space, World, page};
use faultless::{Errno, FaultError, MapFlags, Object, PrivateCopies, Shared, ThreadStreams};
use shuttle::rand::Rng;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Frames of a scenario's machine.
const FRAMES: u32 = 160;
/// The number of repetitions of a program: the duration of a call.
const ROUNDS: u64 = 4;

type File = Shared<Object>;

/// Creates a space that maps `file`, and 8 pages of private memory at page 8.
fn mapping(world: &World, file: &File, kind: MapFlags) -> Space {
    world.space(|guest| {
        guest.map_object(AT, file.pages(), file, RW, kind);
        guest.map(page(8), 8, RW);
    })
}

fn drop_clean(guest: &Guest<'_>, file: &File) -> u64 {
    guest.poll();
    file.drop_clean(guest.cpu, 0..u64::MAX)
}

/// Shortens the file to `pages` pages.
fn truncate(guest: &Guest<'_>, spaces: &[&Space], file: &File, pages: u64) {
    guest.poll();
    file.set_len(guest.cpu, pages * PAGE).unwrap();
    let revoke =
        |space: &&Space| space.revoke(guest.cpu, file, pages..u64::MAX, PrivateCopies::Drop);
    spaces.iter().for_each(revoke);
}

/// The number of readers that still wait for reads. The completing thread continues until the count
/// is zero.
struct Readers(AtomicUsize);

impl Readers {
    fn done(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    /// Ends reads until the readers are done.
    fn serve(&self, guest: &Guest<'_>, disk: &Disk, end: impl Fn() -> End) {
        loop {
            let last = self.0.load(Ordering::Relaxed) == 0;
            if !end_read(guest, disk, end()) {
                if last {
                    return;
                }
                shuttle::thread::yield_now();
            }
        }
    }
}

/// Two programs and the kernel need pages of one run, which the store has at hand.
fn faults_on_absent_pages() {
    let world = World::unwatched(3, FRAMES);
    let disk = Disk::new(4, 2);
    let file = world.file(disk.clone());
    let space = mapping(&world, &file, MapFlags::SHARED);
    let other = mapping(&world, &file, MapFlags::PRIVATE);
    world.run(&[
        (&space, &|guest| {
            [0, 1, 3].into_iter().for_each(|at| assert_eq!(guest.load(page(at)), Ok(at + 1)))
        }),
        (&other, &|guest| {
            guest.store(page(1) + 8, 70).unwrap();
            assert_eq!(guest.load(page(1)), Ok(2));
            assert_eq!(guest.load(page(0)), Ok(1));
        }),
        (&space, &|guest| {
            assert_eq!(read_page(guest, &file, 1), Ok(2));
            guest.store(page(2), 30).unwrap();
        }),
    ]);
    (0..4).for_each(|at| assert_eq!(disk.asked(at), 1, "page {at} was read more than once"));
    nothing_is_lost(&world, &[&space, &other], &file, &disk, &[1, 2, 30, 4]);
    world.finish_with(vec![space, other], vec![file]);
}

/// The same for a store that completes reads later: with success, with an error, or by dropping the
/// read.
fn pending_faults_against_their_end() {
    let world = World::unwatched(3, FRAMES);
    let disk = Disk::new(4, 2);
    disk.plan_reads(Some(Plan::Later));
    let file = world.file(disk.clone());
    let space = mapping(&world, &file, MapFlags::SHARED);
    let readers = Readers(2.into());
    world.run(&[
        (&space, &|guest| {
            for at in [1, 0, 2] {
                let found = guest.load(page(at));
                assert!(found == Ok(at + 1) || found == Err(FaultError::Bus), "{found:?}");
            }
            readers.done();
        }),
        (&space, &|guest| {
            let mut stored = Err(FaultError::Bus);
            while stored.is_err() {
                stored = guest.store(page(1) + 8, 20);
            }
            let read = read_page(guest, &file, 0);
            assert!(matches!(read, Ok(1) | Err(Errno::EIO)), "{read:?}");
            readers.done();
        }),
        (&space, &|guest| {
            let ends = [End::Good, End::Error, End::Dropped];
            readers.serve(guest, &disk, || ends[shuttle::rand::thread_rng().gen_range(0..3)]);
        }),
    ]);
    nothing_is_lost(&world, &[&space], &file, &disk, &[1, 2, 3, 4]);
    world.within(&space, |guest| assert_eq!(guest.load(page(1) + 8), Ok(20), "a lost store"));
    world.finish_with(vec![space], vec![file]);
}

/// A page is read while the file becomes too short for it, and longer again.
fn a_read_against_truncation() {
    let world = World::unwatched(3, FRAMES);
    let disk = Disk::new(3, 2);
    let file = world.file(disk.clone());
    let space = mapping(&world, &file, MapFlags::SHARED);
    world.run(&[
        (&space, &|guest| {
            let found = guest.load(page(2));
            assert!(found == Ok(3) || found == Err(FaultError::Bus), "{found:?}");
        }),
        (&space, &|guest| {
            let read = read_page(guest, &file, 1);
            assert!(matches!(read, Ok(2 | 0)), "{read:?}");
        }),
        (&space, &|guest| truncate(guest, &[&space], &file, 1)),
    ]);
    world.within(&space, |guest| {
        let left = [1, 2].map(|at| file.has_page(guest.cpu, at));
        assert_eq!(left, [false; 2], "behind the end");
        file.set_len(guest.cpu, 3 * PAGE).unwrap();
        assert_eq!([1, 2].map(|at| guest.load(page(at))), [Ok(0); 2], "of the old length");
    });
    world.finish_with(vec![space], vec![file]);
}

/// The store keeps the read of a page. The read ends after the file was truncated within the page
/// and extended again.
fn a_pending_read_against_truncation() {
    let world = World::unwatched(3, FRAMES);
    let disk = Disk::new(2, 2);
    disk.plan_reads(Some(Plan::Later));
    let file = world.file(disk.clone());
    let space = mapping(&world, &file, MapFlags::SHARED);
    let readers = Readers(2.into());
    world.run(&[
        (&space, &|guest| {
            let found = guest.load(page(1) + 8);
            assert!(matches!(found, Ok(2 | 0)), "{found:?}");
            readers.done();
        }),
        (&space, &|guest| {
            file.set_len(guest.cpu, PAGE + 8).unwrap();
            guest.space.revoke(guest.cpu, &file, 2..u64::MAX, PrivateCopies::Drop);
            file.set_len(guest.cpu, 2 * PAGE).unwrap();
            let words = [0, 8].map(|word| guest.load(page(1) + word));
            assert_eq!(words, [Ok(2), Ok(0)], "truncated bytes are back");
            readers.done();
        }),
        (&space, &|guest| readers.serve(guest, &disk, || End::Good)),
    ]);
    world.finish_with(vec![space], vec![file]);
}

/// Programs store to pages during their writeback, which sometimes fails.
fn stores_against_write_back() {
    let world = World::unwatched(3, FRAMES);
    let disk = Disk::new(2, 2);
    let file = world.file(disk.clone());
    let [space, other] = [(); 2].map(|()| mapping(&world, &file, MapFlags::SHARED));
    disk.plan_write(Plan::Fail(shuttle::rand::thread_rng().gen_range(0..2) * PAGE as usize));
    world.run(&[
        (&space, &|guest| {
            (1..=ROUNDS).for_each(|round| guest.store(page(0), 10 * round).unwrap());
        }),
        (&other, &|guest| {
            for round in 1..=ROUNDS {
                guest.store(page(1), 100 * round).unwrap();
                assert_eq!(guest.load(page(1)), Ok(100 * round));
            }
        }),
        (&space, &|guest| {
            let mut seen = file.errors_seen();
            for _ in 0..3 {
                let written = write_back(guest, &[&space, &other], &file);
                assert_eq!(file.write_error(&mut seen), written.err());
                drop_clean(guest, &file);
            }
        }),
    ]);
    nothing_is_lost(&world, &[&space, &other], &file, &disk, &[10 * ROUNDS, 100 * ROUNDS]);
    world.finish_with(vec![space, other], vec![file]);
}

/// The first stores to pages that were only read so far, and to absent pages; then the pages are
/// unmapped.
fn first_stores_against_write_back() {
    let world = World::unwatched(2, FRAMES);
    let disk = Disk::new(3, 1);
    let file = world.file(disk.clone());
    let space = mapping(&world, &file, MapFlags::SHARED);
    world.within(&space, |guest| assert_eq!(guest.load(page(0)), Ok(1)));
    world.run(&[
        (&space, &|guest| {
            for at in 0..3 {
                guest.store(page(at), 10 + at).unwrap();
                guest.unmap(page(at), 1);
            }
        }),
        (&space, &|guest| {
            for _ in 0..3 {
                write_back(guest, &[&space], &file).unwrap();
                drop_clean(guest, &file);
            }
        }),
    ]);
    nothing_is_lost(&world, &[&space], &file, &disk, &[10, 11, 12]);
    world.finish_with(vec![space], vec![file]);
}

/// The kernel stores to pages that are written back and dropped in the meantime.
fn kernel_writes_against_write_back() {
    let world = World::unwatched(3, FRAMES);
    let disk = Disk::new(2, 2);
    let file = world.file(disk.clone());
    let space = world.space(|guest| guest.map(page(8), 8, RW));
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                write_page(guest, &file, 0, 10 * round).unwrap();
                assert_eq!(read_page(guest, &file, 0), Ok(10 * round), "a lost write");
            }
        }),
        (&space, &|guest| {
            write_page(guest, &file, 1, 20).unwrap();
            for _ in 0..2 {
                write_back(guest, &[], &file).unwrap();
                drop_clean(guest, &file);
                assert_eq!(read_page(guest, &file, 1), Ok(20), "a lost write");
            }
        }),
        (&space, &|guest| {
            for _ in 0..2 {
                write_back(guest, &[], &file).unwrap();
                drop_clean(guest, &file);
                guest.store(page(8), 1).unwrap();
            }
        }),
    ]);
    nothing_is_lost(&world, &[&space], &file, &disk, &[10 * ROUNDS, 20]);
    world.finish_with(vec![space], vec![file]);
}

/// Clean pages are dropped, and their frames reused at once, while programs and the kernel use the
/// pages.
fn dropping_against_uses() {
    let world = World::unwatched(3, FRAMES);
    let disk = Disk::new(4, 2);
    let file = world.file(disk.clone());
    let space = mapping(&world, &file, MapFlags::SHARED);
    world.within(&space, |guest| {
        (0..4).for_each(|at| assert_eq!(read_page(guest, &file, at), Ok(at + 1)));
    });
    world.run(&[
        (&space, &|guest| {
            assert_eq!(guest.load(page(0)), Ok(1));
            guest.store(page(1) + 8, 11).unwrap();
            assert_eq!(guest.load(page(1)), Ok(2));
        }),
        (&space, &|guest| {
            for round in 0..2 {
                for at in [2, 0, 3] {
                    assert_eq!(read_page(guest, &file, at), Ok(at + 1), "in round {round}");
                }
            }
        }),
        (&space, &|guest| {
            for at in 8..11 {
                drop_clean(guest, &file);
                guest.store(page(at), at).unwrap();
            }
            (8..11).for_each(|at| assert_eq!(guest.load(page(at)), Ok(at), "another's page"));
        }),
    ]);
    nothing_is_lost(&world, &[&space], &file, &disk, &[1, 2, 3, 4]);
    world.finish_with(vec![space], vec![file]);
}

/// The page is unmapped during its read for a program at the same address.
fn munmap_against_a_read() {
    let world = World::unwatched(3, FRAMES);
    let disk = Disk::new(2, 1);
    disk.plan_reads(Some(Plan::Later));
    let file = world.file(disk.clone());
    let space = mapping(&world, &file, MapFlags::SHARED);
    let readers = Readers(2.into());
    world.run(&[
        (&space, &|guest| {
            let gone = Err(FaultError::Segv { mapped: false });
            let found = guest.load(page(0));
            assert!(found == Ok(1) || found == gone, "{found:?}");
            let stored = guest.store(page(1), 20);
            assert!(stored == Ok(()) || stored == gone.map(drop), "{stored:?}");
            readers.done();
        }),
        (&space, &|guest| {
            guest.unmap(AT, 2);
            drop_clean(guest, &file);
            guest.store(page(8), 8).unwrap();
            readers.done();
        }),
        (&space, &|guest| readers.serve(guest, &disk, || End::Good)),
    ]);
    world.finish_with(vec![space], vec![file]);
}

/// A private mapping copies pages of the file while they are dropped, and cut off.
fn copies_against_dropping_and_truncation() {
    let world = World::unwatched(3, FRAMES);
    let disk = Disk::new(3, 1);
    let file = world.file(disk.clone());
    let space = mapping(&world, &file, MapFlags::PRIVATE);
    world.within(&space, |guest| {
        (0..3).for_each(|at| assert_eq!(read_page(guest, &file, at), Ok(at + 1)));
    });
    world.run(&[
        (&space, &|guest| {
            for at in [0, 2] {
                let stored = guest.store(page(at) + 8, 50);
                assert!(
                    stored == Ok(()) || (at, stored) == (2, Err(FaultError::Bus)),
                    "{stored:?}"
                );
            }
            assert_eq!([0, 8].map(|word| guest.load(page(0) + word)), [Ok(1), Ok(50)]);
            guest.store(page(1) + 8, 60).unwrap();
            assert_eq!([0, 8].map(|word| guest.load(page(1) + word)), [Ok(2), Ok(60)]);
        }),
        (&space, &|guest| {
            for at in 8..10 {
                drop_clean(guest, &file);
                guest.store(page(at), at).unwrap();
            }
        }),
        (&space, &|guest| truncate(guest, &[&space], &file, 2)),
    ]);
    world.within(&space, |guest| {
        assert_eq!(guest.load(page(2)), Err(FaultError::Bus), "a copy of a truncated page");
    });
    nothing_is_lost(&world, &[&space], &file, &disk, &[1, 2]);
    world.finish_with(vec![space], vec![file]);
}

/// The first store to a read page, which leaves the file at the same time.
fn a_first_store_against_truncation() {
    let world = World::unwatched(2, FRAMES);
    let disk = Disk::new(2, 1);
    let file = world.file(disk.clone());
    let space = mapping(&world, &file, MapFlags::SHARED);
    world.within(&space, |guest| assert_eq!(guest.load(page(1)), Ok(2)));
    world.run(&[
        (&space, &|guest| {
            let stored = guest.store(page(1), 20);
            assert!(matches!(stored, Ok(()) | Err(FaultError::Bus)), "{stored:?}");
        }),
        (&space, &|guest| {
            file.set_len(guest.cpu, PAGE).unwrap();
            // Another thread of the same CPU may run before the mappings are revoked.
            let stored = guest.store(page(1), 30);
            assert!(matches!(stored, Ok(()) | Err(FaultError::Bus)), "{stored:?}");
            guest.space.revoke(guest.cpu, &file, 1..2, PrivateCopies::Drop);
            assert_eq!(guest.store(page(1), 40), Err(FaultError::Bus));
        }),
    ]);
    world.finish_with(vec![space], vec![file]);
}

/// A hole is punched while a program and the kernel use its pages: later stores to the hole stay.
fn uses_against_a_hole() {
    let world = World::unwatched(3, FRAMES);
    let disk = Disk::new(3, 1);
    let file = world.file(disk.clone());
    let space = mapping(&world, &file, MapFlags::SHARED);
    world.within(&space, |guest| assert_eq!(guest.load(page(0)), Ok(1)));
    world.run(&[
        (&space, &|guest| {
            for at in [1, 0] {
                let found = guest.load(page(at)).unwrap();
                assert!(found == 0 || found == at + 1, "{found}");
                guest.store(page(at), 50).unwrap();
                let left = guest.load(page(at)).unwrap();
                assert!(left == 50 || found != 0 && left == 0, "{left} after {found}");
            }
        }),
        (&space, &|guest| {
            let found = read_page(guest, &file, 2).unwrap();
            assert!(found == 0 || found == 3, "{found}");
            write_page(guest, &file, 2, 60).unwrap();
            let left = read_page(guest, &file, 2).unwrap();
            assert!(left == 60 || found != 0 && left == 0, "{left} after {found}");
        }),
        (&space, &|guest| {
            file.punch(guest.cpu, 0..3).unwrap();
            guest.space.revoke(guest.cpu, &file, 0..3, PrivateCopies::Keep);
        }),
    ]);
    let words = world.within(&space, |guest| [0, 1, 2].map(|at| guest.load(page(at)).unwrap()));
    nothing_is_lost(&world, &[&space], &file, &disk, &words);
    world.finish_with(vec![space], vec![file]);
}

/// Another process writes to the mapping during its writeback.
fn remote_writes_against_write_back() {
    let world = World::outside(2, FRAMES);
    let disk = Disk::new(2, 2);
    let file = world.file(disk.clone());
    let space = mapping(&world, &file, MapFlags::SHARED);
    let other = world.space(|_| {});
    world.run(&[
        (&other, &|guest| {
            for round in 1..=ROUNDS {
                let word = (10 * round).to_ne_bytes();
                let words = [(page(0), word), (page(1), word)];
                for (at, word) in words {
                    guest.poll();
                    space.write_bytes(guest.cpu, at, &word).unwrap();
                }
            }
        }),
        (&other, &|guest| {
            for _ in 0..3 {
                write_back(guest, &[&space], &file).unwrap();
            }
        }),
    ]);
    nothing_is_lost(&world, &[&space], &file, &disk, &[10 * ROUNDS; 2]);
    world.finish_with(vec![space, other], vec![file]);
}

/// The kernel reads an open file in sequence, with read-ahead, while a program stores to it, and
/// the file is written back, dropped, punched and truncated.
fn reads_in_sequence_against_changes() {
    let world = World::unwatched(3, FRAMES);
    let disk = Disk::new(8, 1);
    let file = world.file(disk.clone());
    let space = mapping(&world, &file, MapFlags::SHARED);
    let other = world.space(|_| {});
    world.run(&[
        (&other, &|guest| {
            let reader = ThreadStreams::new();
            for at in 0..8 {
                guest.poll();
                file.read_in_sequence(guest.cpu, &reader, at..at + 2).unwrap();
                let found = read_page(guest, &file, at).unwrap();
                assert!([0, at + 1, 70 + at].contains(&found), "page {at}: {found}");
                assert!(found != 0 || at > 3, "page {at} is lost");
            }
        }),
        (&space, &|guest| {
            guest.store(page(2), 72).unwrap();
            write_back(guest, &[&space], &file).unwrap();
            drop_clean(guest, &file);
            assert_eq!(guest.load(page(2)), Ok(72), "a lost write");
        }),
        (&other, &|guest| {
            file.punch(guest.cpu, 4..6).unwrap();
            space.revoke(guest.cpu, &file, 4..6, PrivateCopies::Keep);
            assert_eq!(read_page(guest, &file, 4), Ok(0));
            truncate(guest, &[&space], &file, 7);
            assert_eq!(read_page(guest, &file, 7), Ok(0));
        }),
    ]);
    nothing_is_lost(&world, &[&space], &file, &disk, &[1, 2, 72, 4, 0, 0, 7]);
    world.finish_with(vec![space, other], vec![file]);
}

/// The kernel overwrites whole pages during reads for a program, writeback and drops.
fn whole_pages_against_reads() {
    let world = World::unwatched(3, FRAMES);
    let disk = Disk::new(4, 2);
    disk.plan_reads(Some(Plan::Later));
    let file = world.file(disk.clone());
    let space = mapping(&world, &file, MapFlags::SHARED);
    let readers = Readers(2.into());
    world.run(&[
        (&space, &|guest| {
            let words = [0, 8].map(|word| guest.load(page(1) + word).unwrap());
            assert!(matches!(words, [2, 2 | 10 | 20] | [10, 10 | 20] | [20, 20]), "{words:?}");
            readers.done();
        }),
        (&space, &|guest| {
            for (at, value) in [(1, 10), (2, 30), (1, 20)] {
                assert_eq!(overwrite_page(guest, &file, at, value), Ok(PAGE as usize));
                assert_eq!(read_page(guest, &file, at), Ok(value), "a lost write");
                write_back(guest, &[&space], &file).unwrap();
                drop_clean(guest, &file);
            }
            readers.done();
        }),
        (&space, &|guest| readers.serve(guest, &disk, || End::Good)),
    ]);
    nothing_is_lost(&world, &[&space], &file, &disk, &[1, 20, 30, 4]);
    world.finish_with(vec![space], vec![file]);
}

/// The read of a page fails after the page was overwritten: a program that waits for the read finds
/// the new page.
fn a_whole_page_against_a_failing_read() {
    let world = World::unwatched(3, FRAMES);
    let disk = Disk::new(2, 2);
    disk.plan_reads(Some(Plan::Later));
    let file = world.file(disk.clone());
    let space = mapping(&world, &file, MapFlags::SHARED);
    let (readers, stored) = (Readers(1.into()), AtomicUsize::new(0));
    world.run(&[
        (&space, &|guest| {
            assert_eq!(guest.load(page(1)), Ok(20));
            readers.done();
        }),
        (&space, &|guest| {
            overwrite_page(guest, &file, 1, 20).unwrap();
            stored.store(1, Ordering::Relaxed);
        }),
        (&space, &|guest| {
            while stored.load(Ordering::Relaxed) == 0 {
                guest.poll();
                shuttle::thread::yield_now();
            }
            readers.serve(guest, &disk, || End::Error);
        }),
    ]);
    nothing_is_lost(&world, &[&space], &file, &disk, &[1, 20]);
    world.finish_with(vec![space], vec![file]);
}

/// The disk cannot read page 0: programs can load from the page that is read together with it.
fn loads_beside_a_bad_page() {
    let world = World::unwatched(2, FRAMES);
    let disk = Disk::new(2, 2);
    disk.plan_reads(Some(Plan::Bad(0)));
    let file = world.file(disk.clone());
    let space = mapping(&world, &file, MapFlags::SHARED);
    world.run(&[
        (&space, &|guest| assert_eq!(guest.load(page(1)), Ok(2))),
        (&space, &|guest| assert_eq!(guest.load(page(0)), Err(FaultError::Bus))),
    ]);
    disk.heal();
    nothing_is_lost(&world, &[&space], &file, &disk, &[1, 2]);
    world.finish_with(vec![space], vec![file]);
}

/// A hole is punched, and the file is truncated, while the kernel overwrites whole pages. Later
/// stores to the hole stay.
fn whole_pages_against_cuts() {
    let world = World::unwatched(3, FRAMES);
    let disk = Disk::new(4, 1);
    let file = world.file(disk.clone());
    let space = mapping(&world, &file, MapFlags::SHARED);
    world.run(&[
        (&space, &|guest| {
            for at in [1, 0] {
                let found = read_page(guest, &file, at).unwrap();
                assert!(found == 0 || found == at + 1, "{found}");
                overwrite_page(guest, &file, at, 50).unwrap();
                let left = guest.load(page(at)).unwrap();
                assert!(left == 50 || found != 0 && left == 0, "{left} after {found}");
            }
        }),
        (&space, &|guest| {
            let stored = overwrite_page(guest, &file, 3, 70);
            assert!(matches!(stored, Ok(_) | Err(Errno::EFBIG)), "{stored:?}");
        }),
        (&space, &|guest| {
            file.punch(guest.cpu, 0..2).unwrap();
            guest.space.revoke(guest.cpu, &file, 0..2, PrivateCopies::Keep);
            truncate(guest, &[&space], &file, 3);
        }),
    ]);
    let words = world.within(&space, |guest| {
        assert!(!file.has_page(guest.cpu, 3), "behind the end");
        file.set_len(guest.cpu, 4 * PAGE).unwrap();
        [0, 1, 2, 3].map(|at| guest.load(page(at)).unwrap())
    });
    assert_eq!(words[2..], [3, 0], "of the old length");
    nothing_is_lost(&world, &[&space], &file, &disk, &words);
    world.finish_with(vec![space], vec![file]);
}

mod tests {
    holds!(
        whole_pages_against_reads,
        a_whole_page_against_a_failing_read,
        loads_beside_a_bad_page,
        whole_pages_against_cuts,
        reads_in_sequence_against_changes,
        faults_on_absent_pages,
        pending_faults_against_their_end,
        a_read_against_truncation,
        a_pending_read_against_truncation,
        stores_against_write_back,
        first_stores_against_write_back,
        kernel_writes_against_write_back,
        dropping_against_uses,
        munmap_against_a_read,
        copies_against_dropping_and_truncation,
        a_first_store_against_truncation,
        uses_against_a_hole,
        remote_writes_against_write_back,
    );
}

mod needs {
    use crate::support;
    use faultless::sync::mutant::Mutant;

    needs!(
        a_look_at_the_length_by_a_read: ReadLooksAgain in [a_read_against_truncation],
        a_mark_by_a_fault: FaultMarksDirty in [first_stores_against_write_back],
        protection_before_writing: WriteBackProtects in [stores_against_write_back],
        a_mark_of_failed_pages: FailedStaysDirty in [stores_against_write_back],
        a_look_at_the_mark_by_dropping: DropsDirty in [kernel_writes_against_write_back],
        a_look_for_a_hole_by_a_read: ReadLooksForCut in [uses_against_a_hole],
        an_end_of_reads_by_a_cut: CutDropsReads in [a_pending_read_against_truncation],
        no_error_for_overwritten_pages: OverwrittenIsNoError in [a_whole_page_against_a_failing_read],
        a_look_at_the_length_by_an_overwrite: ReadLooksAgain in [whole_pages_against_cuts],
        a_look_for_a_hole_by_an_overwrite: ReadLooksForCut in [whole_pages_against_cuts],
        an_entry_held_while_joining: JoinHoldsEntry in [faults_on_absent_pages],
        a_frame_freed_by_the_end: EndFreesFrame in [a_pending_read_against_truncation],
        a_reference_dropped_in_one_step: DropsSole in [dropping_against_uses],
        a_note_of_failed_pages: FailedIsNoted in [loads_beside_a_bad_page],
        a_turn: TurnExcludes in [kernel_writes_against_write_back],
    );
}
