//! Evictions of file pages while programs and the kernel use the pages: against accesses,
//! writeback, truncation, calls that change the mappings, and with deferred flushes.

use crate::support::disk::{
    Disk, Plan, nothing_is_lost, overwrite_page, read_page, write_back, write_page,
};
use crate::support::{AT, Guest, PAGE, RW, Space, World, page};
use faultless::{Counter, FaultError, MapFlags, MemoryLock, Object, PrivateCopies, Prot, Shared};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Frames of a scenario's machine.
const FRAMES: u32 = 160;
/// The number of repetitions of a program: the duration of a call.
const ROUNDS: u64 = 4;
const READ: Prot = Prot::READ;
/// The address of the files' second mapping: below another last-level table.
const TO: u64 = AT + (4 << 20);

type File = Shared<Object>;

/// Creates a machine of `cpus` CPUs, a file of `pages` pages, and a space that maps the file.
fn mapped(cpus: usize, pages: u64, prot: Prot, kind: MapFlags) -> (World, Arc<Disk>, File, Space) {
    let world = World::unwatched(cpus, FRAMES);
    let disk = Disk::new(pages, 2);
    let file = world.file(disk.clone());
    let space = world.space(|guest| {
        guest.map_object(AT, pages, &file, prot, kind);
        // Keeps the table when the file is unmapped.
        guest.map(page(8), 8, RW);
        (0..pages).for_each(|at| assert_eq!(guest.load(page(at)), Ok(at + 1)));
    });
    (world, disk, file, space)
}

/// Evicts all pages of the file, a few times.
fn evict_all(guest: &Guest<'_>, file: &File) {
    (0..3).for_each(|_| guest.evict(file, 0..u64::MAX));
}

/// Two CPUs store and load in pages that are written and dropped in the meantime, sometimes with
/// write errors.
fn stores_against_evictions() {
    let (world, disk, file, space) = mapped(3, 2, RW, MapFlags::SHARED);
    disk.plan_write(Plan::Fail(0));
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                guest.store(page(0), 10 * round).unwrap();
                assert_eq!(guest.load(page(0)), Ok(10 * round), "a lost store");
            }
        }),
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                guest.store(page(0) + 8, 100 * round).unwrap();
                guest.store(page(1), 100 * round).unwrap();
                assert_eq!(guest.load(page(0) + 8), Ok(100 * round), "a lost store");
            }
        }),
        (&space, &|guest| evict_all(guest, &file)),
    ]);
    nothing_is_lost(&world, &[&space], &file, &disk, &[10 * ROUNDS, 100 * ROUNDS]);
    world.finish_with(vec![space], vec![file]);
}

/// The kernel stores to pages that are evicted in the meantime, and a program reads the stores.
fn kernel_writes_against_evictions() {
    let (world, disk, file, space) = mapped(3, 2, READ, MapFlags::SHARED);
    let written = AtomicBool::new(false);
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                write_page(guest, &file, 0, 10 * round).unwrap();
                assert_eq!(read_page(guest, &file, 0), Ok(10 * round), "a lost write");
                assert_eq!(guest.load(page(0)), Ok(10 * round), "a lost write");
            }
            overwrite_page(guest, &file, 1, 20).unwrap();
            written.store(true, Ordering::SeqCst);
        }),
        (&space, &|guest| {
            for _ in 0..ROUNDS {
                let was_written = written.load(Ordering::SeqCst);
                let now = guest.load(page(1)).unwrap();
                assert!(now == 20 || !was_written && now == 2, "an old page: {now}");
            }
        }),
        (&space, &|guest| evict_all(guest, &file)),
    ]);
    nothing_is_lost(&world, &[&space], &file, &disk, &[10 * ROUNDS, 20]);
    world.finish_with(vec![space], vec![file]);
}

/// An absent page is overwritten: a CPU that read the page before its eviction sees the new bytes.
fn overwriting_against_evictions() {
    let (world, disk, file, space) = mapped(2, 1, READ, MapFlags::SHARED);
    let written = AtomicBool::new(false);
    world.run(&[
        (&space, &|guest| sees(guest, &written, (page(0), 1), Ok(20))),
        (&space, &|guest| {
            guest.evict(&file, 0..1);
            overwrite_page(guest, &file, 0, 20).unwrap();
            written.store(true, Ordering::SeqCst);
        }),
    ]);
    nothing_is_lost(&world, &[&space], &file, &disk, &[20]);
    world.finish_with(vec![space], vec![file]);
}

/// Pages move while reclaim scans the old and the new frames.
fn migrations_against_evictions() {
    let (world, disk, file, space) = mapped(2, 2, RW, MapFlags::SHARED);
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                guest.store(page(0), 10 * round).unwrap();
                guest.migrate(AT, 2, (round % 2) as u8);
            }
        }),
        (&space, &|guest| {
            for _ in 0..ROUNDS {
                guest.cpu.reclaim(1);
                guest.load(page(1)).unwrap();
            }
        }),
    ]);
    nothing_is_lost(&world, &[&space], &file, &disk, &[10 * ROUNDS, 2]);
    world.finish_with(vec![space], vec![file]);
}

/// Loads a word that is to be `new` once `changed` is set, and `old` before.
fn sees(
    guest: &Guest<'_>,
    changed: &AtomicBool,
    (addr, old): (u64, u64),
    new: Result<u64, FaultError>,
) {
    for _ in 0..2 {
        let was_changed = changed.load(Ordering::SeqCst);
        let now = guest.load(addr);
        assert!(now == new || !was_changed && now == Ok(old), "an old page: {now:?}");
    }
}

/// A program stores to its private copy of an evicted page: the program's other CPU sees the copy.
fn copies_against_evictions() {
    let (world, disk, file, space) = mapped(2, 1, RW, MapFlags::PRIVATE);
    let stored = AtomicBool::new(false);
    world.run(&[
        (&space, &|guest| sees(guest, &stored, (page(0), 1), Ok(50))),
        (&space, &|guest| {
            guest.evict(&file, 0..1);
            guest.store(page(0), 50).unwrap();
            stored.store(true, Ordering::SeqCst);
        }),
    ]);
    nothing_is_lost(&world, &[&space], &file, &disk, &[1]);
    world.within(&space, |guest| assert_eq!(guest.load(page(0)), Ok(50)));
    world.finish_with(vec![space], vec![file]);
}

/// An evicted page is unmapped, forbidden, moved, or replaced: the other CPU no longer sees the
/// page.
fn calls_against_evictions(call: usize, moves: bool) {
    let (world, disk, file, space) = mapped(2, 1, READ, MapFlags::SHARED);
    let segv = Err(FaultError::Segv { mapped: call == 1 });
    let new = if call == 3 { Ok(0) } else { segv };
    let changed = AtomicBool::new(false);
    world.run(&[
        (&space, &|guest| sees(guest, &changed, (page(0), 1), new)),
        (&space, &|guest| {
            if moves {
                guest.advise(AT, 1, faultless::Advice::Cold);
                guest.migrate(AT, 1, 1);
            }
            guest.evict(&file, 0..1);
            match call {
                0 => guest.unmap(AT, 1),
                1 => guest.protect(AT, 1, Prot::empty()),
                2 => guest.relocate(AT, TO, 1),
                _ => guest.map(AT, 1, RW),
            }
            changed.store(true, Ordering::SeqCst);
        }),
    ]);
    nothing_is_lost(&world, &[&space], &file, &disk, &[1]);
    world.finish_with(vec![space], vec![file]);
}

fn unmapping_against_evictions() {
    calls_against_evictions(0, false);
}

fn forbidding_against_evictions() {
    calls_against_evictions(1, false);
}

fn moving_against_evictions() {
    calls_against_evictions(2, false);
}

fn replacing_against_evictions() {
    calls_against_evictions(3, false);
}

/// The same for a page that was aged, and moved by a deferred flush: the other CPU may still reach
/// the old frame.
fn replacing_against_evictions_of_moved_pages() {
    calls_against_evictions(3, true);
}

/// The truncated part of an evicted page is no longer visible.
fn truncation_against_evictions() {
    let (world, disk, file, space) = mapped(2, 2, READ, MapFlags::SHARED);
    let [shorter, cut] = [false; 2].map(AtomicBool::new);
    world.run(&[
        (&space, &|guest| {
            sees(guest, &shorter, (page(0) + 8, 1), Ok(0));
            sees(guest, &cut, (page(1), 2), Err(FaultError::Bus));
        }),
        (&space, &|guest| {
            guest.evict(&file, 0..2);
            file.set_len(guest.cpu, 8).unwrap();
            shorter.store(true, Ordering::SeqCst);
            guest.space.revoke(guest.cpu, &file, 1..u64::MAX, PrivateCopies::Drop);
            cut.store(true, Ordering::SeqCst);
        }),
    ]);
    nothing_is_lost(&world, &[&space], &file, &disk, &[1]);
    world.finish_with(vec![space], vec![file]);
}

/// A hole is punched over an evicted page in one space, while another space reads the page.
fn holes_against_evictions() {
    let (world, disk, file, space) = mapped(2, 1, READ, MapFlags::SHARED);
    let other = world.space(|guest| {
        guest.map_object(AT, 1, &file, READ, MapFlags::SHARED);
        guest.load(page(0)).unwrap();
    });
    let cut = AtomicBool::new(false);
    world.run(&[
        (&space, &|guest| sees(guest, &cut, (page(0), 1), Ok(0))),
        (&other, &|guest| {
            let reads = || guest.cpu.vm().totals().get(Counter::StoreRead);
            let before = reads();
            guest.evict(&file, 0..1);
            file.punch(guest.cpu, 0..1).unwrap();
            // No page needs revocation, unless the page was read again in the meantime.
            if reads() == before && !file.has_page(guest.cpu, 0) {
                cut.store(true, Ordering::SeqCst);
            }
            space.revoke(guest.cpu, &file, 0..1, PrivateCopies::Keep);
            other.revoke(guest.cpu, &file, 0..1, PrivateCopies::Keep);
            cut.store(true, Ordering::SeqCst);
        }),
    ]);
    nothing_is_lost(&world, &[&space, &other], &file, &disk, &[0]);
    world.finish_with(vec![space, other], vec![file]);
}

/// Pages are written back by one CPU, and evicted by another, while a third stores.
fn writing_back_against_evictions() {
    let (world, disk, file, space) = mapped(3, 2, RW, MapFlags::SHARED);
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                guest.store(page(0), 10 * round).unwrap();
                guest.store(page(1), 100 * round).unwrap();
            }
        }),
        (&space, &|guest| {
            (0..2).for_each(|_| {
                write_back(guest, &[&space], &file).unwrap();
            });
        }),
        (&space, &|guest| evict_all(guest, &file)),
    ]);
    nothing_is_lost(&world, &[&space], &file, &disk, &[10 * ROUNDS, 100 * ROUNDS]);
    world.finish_with(vec![space], vec![file]);
}

/// Bytes stored before a writeback are in the store afterwards, even if other CPUs evict the page
/// in the meantime.
fn the_store_has_what_was_written_back() {
    let (world, disk, file, space) = mapped(3, 1, RW, MapFlags::SHARED);
    world.run(&[
        (&space, &|guest| {
            for round in 1..=ROUNDS {
                guest.store(page(0), 10 * round).unwrap();
                write_back(guest, &[&space], &file).unwrap();
                assert_eq!(disk.word(0), 10 * round, "not in the store");
            }
        }),
        (&space, &|guest| evict_all(guest, &file)),
        (&space, &|guest| (0..2).for_each(|_| _ = guest.cpu.reclaim(1))),
    ]);
    nothing_is_lost(&world, &[&space], &file, &disk, &[10 * ROUNDS]);
    world.finish_with(vec![space], vec![file]);
}

/// A page stays after a program has locked and used it.
fn locking_against_evictions() {
    let (world, disk, file, space) = mapped(2, 2, READ, MapFlags::SHARED);
    world.run(&[
        (&space, &|guest| {
            guest.space.mlock(guest.cpu, AT, PAGE, MemoryLock::Now).unwrap();
            guest.space.madvise(guest.cpu, AT, PAGE, faultless::Advice::PopulateRead).unwrap();
            let asked = disk.asked(0);
            guest.load(page(0)).unwrap();
            guest.load(page(1)).unwrap();
            assert!(file.has_page(guest.cpu, 0), "a locked page was evicted");
            assert_eq!(disk.asked(0), asked, "a locked page was evicted");
        }),
        (&space, &|guest| evict_all(guest, &file)),
    ]);
    nothing_is_lost(&world, &[&space], &file, &disk, &[1, 2]);
    world.finish_with(vec![space], vec![file]);
}

/// Two CPUs evict the same pages, while a third forks and exits.
fn forks_against_evictions() {
    let (world, disk, file, space) = mapped(3, 2, RW, MapFlags::PRIVATE);
    world.run(&[
        (&space, &|guest| {
            guest.store(page(1), 30).unwrap();
            let child = guest.space.fork(guest.cpu).unwrap();
            guest.switch(&child, |guest| {
                assert_eq!((guest.load(page(0)), guest.load(page(1))), (Ok(1), Ok(30)));
                guest.store(page(0), 40).unwrap();
            });
            assert_eq!((guest.load(page(0)), guest.load(page(1))), (Ok(1), Ok(30)));
            child.exit(guest.cpu);
        }),
        (&space, &|guest| evict_all(guest, &file)),
        (&space, &|guest| evict_all(guest, &file)),
    ]);
    nothing_is_lost(&world, &[&space], &file, &disk, &[1, 2]);
    world.finish_with(vec![space], vec![file]);
}

/// Two programs read more pages than memory holds, and a third program stores to the file.
fn programs_in_little_memory() {
    const PAGES: u64 = 12;
    let world = World::unwatched(3, FRAMES);
    let disk = Disk::new(PAGES, 2);
    let file = world.file(disk.clone());
    let space = world.space(|guest| guest.map_object(AT, PAGES, &file, RW, MapFlags::SHARED));
    world.within(&space, |guest| guest.load(AT).unwrap());
    world.leave_frames(6);
    let reads = |guest: &Guest<'_>| {
        for at in 0..PAGES {
            match guest.load(page(at) + 8) {
                Ok(word) => assert_eq!(word, at + 1),
                // Other CPUs have allocated the frames freed by this CPU.
                Err(error) => assert_eq!(error, FaultError::OutOfMemory),
            }
        }
    };
    let stored = AtomicBool::new(true);
    world.run(&[
        (&space, &reads),
        (&space, &reads),
        (&space, &|guest| {
            for at in 0..PAGES {
                if guest.store(page(at), 100 + at).is_err() {
                    stored.store(false, Ordering::Relaxed);
                }
            }
        }),
    ]);
    if stored.load(Ordering::Relaxed) {
        let words: Vec<_> = (0..PAGES).map(|at| 100 + at).collect();
        nothing_is_lost(&world, &[&space], &file, &disk, &words);
    }
    world.finish_with(vec![space], vec![file]);
}

mod tests {
    holds!(
        stores_against_evictions,
        kernel_writes_against_evictions,
        overwriting_against_evictions,
        migrations_against_evictions,
        copies_against_evictions,
        unmapping_against_evictions,
        forbidding_against_evictions,
        moving_against_evictions,
        replacing_against_evictions,
        replacing_against_evictions_of_moved_pages,
        truncation_against_evictions,
        holes_against_evictions,
        writing_back_against_evictions,
        the_store_has_what_was_written_back,
        locking_against_evictions,
        forks_against_evictions,
        programs_in_little_memory,
    );
}

mod needs {
    use crate::support;
    use faultless::sync::mutant::Mutant;

    needs!(
        a_flush_before_pages_leave: EvictFlush in [stores_against_evictions],
        waiting_for_held_entries_at_write_back: WriteBackAwaits in [the_store_has_what_was_written_back],
        a_check_for_dirty_pages: EvictLooksAtDirty in [kernel_writes_against_evictions],
        a_look_at_locks: EvictLooksAtLocks in [locking_against_evictions],
        a_count_of_the_references: MigrateCounts in [kernel_writes_against_evictions],
        a_stamp_that_moves: MigrateKeepsStamp in [replacing_against_evictions_of_moved_pages],
        a_flush_before_pages_are_unmapped: BatchSettlesEvicted in [unmapping_against_evictions],
        a_flush_before_pages_are_forbidden: BatchSettlesEvicted in [forbidding_against_evictions],
        a_flush_before_pages_move: BatchSettlesEvicted in [moving_against_evictions],
        a_flush_before_pages_are_replaced: BatchSettlesEvicted in [replacing_against_evictions],
        a_flush_before_a_copy: CopySettlesEvicted in [copies_against_evictions],
        a_flush_before_pages_are_overwritten: OverwriteSettles in [overwriting_against_evictions],
        a_flush_before_a_cut: CutSettles in [truncation_against_evictions],
        a_flush_before_a_hole: CutSettles in [holes_against_evictions],
        one_store_of_a_count: CountIsStoredOnce in [migrations_against_evictions],
        a_settlement: WriteFlushesPending in [overwriting_against_evictions],
    );
}
