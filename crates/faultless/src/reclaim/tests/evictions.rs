//! Eviction of file pages: the choice of pages, the time, and the preservation of stored bytes.

use crate::addr::PAGE_SIZE;
use crate::error::Errno;
use crate::file::BackingStore;
use crate::knob::{Locking, Setting};
use crate::reclaim::clock::{Over, Purpose};
use crate::space::{Advice, MemoryLock, PrivateCopies, Prot, Space};
use crate::stat::Counter;
use crate::testing::guest::{
    self, AT, P, PRIVATE, RW, SHARED, TestCpu, TestSpace, cpu, load, store,
};
use crate::testing::guest::{map_object as map, read_object, write_object};
use crate::testing::store::{File, Memory, PAGE, Plan, file, finish};
use crate::tlb::tests::deferred::beside;
use std::sync::Arc;
use std::vec::Vec;

/// Runs `test` with a machine of `frames` frames and a file of `pages` pages mapped shared at `AT`.
fn with_file(
    frames: u32,
    pages: u64,
    test: impl Fn(&TestCpu<'_>, &TestSpace, &Arc<Memory>, &File),
) {
    for locking in Locking::ALL {
        for deferred in [false, true] {
            let vm = guest::vm(1, frames);
            vm.set(Setting::Locking(locking));
            vm.set(Setting::DeferredFlush(deferred));
            let cpu = cpu(&vm, 0);
            let space = Space::new(&cpu).unwrap();
            let memory = Memory::new(pages, 0);
            let file = file(&cpu, &memory);
            map(&cpu, &space, (0, pages), RW, SHARED, (&file, 0));
            test(&cpu, &space, &memory, &file);
            finish(&cpu, space, Vec::from([file]));
        }
    }
}

fn writes(memory: &Memory) -> Vec<(u64, usize)> {
    core::mem::take(&mut memory.writes.lock().unwrap())
}

fn count(cpu: &TestCpu<'_>, counter: Counter) -> u64 {
    cpu.vm().totals().get(counter)
}

#[test]
fn reads_may_exceed_memory() {
    with_file(40, 200, |cpu, space, memory, file| {
        for _ in 0..3 {
            for page in 0..200 {
                assert_eq!(load(cpu, space, AT + page * P), Ok(page + 1));
            }
        }
        assert!(file.resident_pages(cpu) < 40);
        assert_eq!(writes(memory), [], "clean pages are dropped");
        assert!(count(cpu, Counter::PageStolen) > 500, "{}", count(cpu, Counter::PageStolen));
        // The kernel reads the pages as well.
        for page in 0..200 {
            assert_eq!(read_object(cpu, file, page), Some(page + 1));
        }
    });
}

#[test]
fn stores_may_exceed_memory() {
    with_file(40, 100, |cpu, space, memory, file| {
        for round in 1..3 {
            for page in 0..100 {
                store(cpu, space, AT + page * P, 1000 * round + page).unwrap();
            }
            for page in 0..100 {
                assert_eq!(load(cpu, space, AT + page * P), Ok(1000 * round + page));
            }
        }
        for page in 0..100 {
            write_object(cpu, file, page, page).unwrap();
        }
        assert!(count(cpu, Counter::PageLaundered) > 100);
        assert!(!writes(memory).is_empty());
        crate::testing::store::write_back(cpu, &[space], file).unwrap();
        assert!((0..100).all(|page| memory.word(page) == page));
    });
}

#[test]
fn unwritable_pages_stay() {
    with_file(40, 100, |cpu, space, memory, _| {
        (0..8).for_each(|page| store(cpu, space, AT + page * P, 70 + page).unwrap());
        memory.plan([Plan::Fail(2 * PAGE)]);
        space.madvise(cpu, AT, 8 * P, Advice::PageOut).unwrap();
        assert_eq!(writes(memory), [(0, 4 * PAGE), (4, 4 * PAGE)]);
        assert_eq!((memory.word(1), memory.word(2)), (71, 3));
        // The first pages are gone, and read again; the next two are there, and dirty.
        memory.reads.lock().unwrap().clear();
        assert_eq!(load(cpu, space, AT + 3 * P), Ok(73));
        assert!(memory.reads.lock().unwrap().is_empty());
        assert_eq!(load(cpu, space, AT + P), Ok(71));
        assert!(!memory.reads.lock().unwrap().is_empty());
        space.madvise(cpu, AT, 8 * P, Advice::PageOut).unwrap();
        assert_eq!(memory.word(3), 73);
    });
}

#[test]
fn used_pages_stay() {
    with_file(256, 64, |cpu, space, _, file| {
        let resident = || file.resident_pages(cpu);
        (0..64).for_each(|page| assert_eq!(load(cpu, space, AT + page * P), Ok(page + 1)));
        assert_eq!(resident(), 64);
        // A referenced page, a pinned page, and a locked page.
        space.mlock(cpu, AT + 9 * P, P, MemoryLock::Now).unwrap();
        let pins = space.pin(cpu, AT + 17 * P, P, true).unwrap();
        file.read_page(cpu, 30, |_| {
            for part in [0..9, 10..64] {
                let len = (part.end - part.start) * P;
                space.madvise(cpu, AT + part.start * P, len, Advice::PageOut).unwrap();
            }
            assert_eq!(resident(), 3);
        })
        .unwrap();
        for page in [9, 17, 30] {
            assert!(file.has_page(cpu, page), "{page}");
        }
        let refused = space.madvise(cpu, AT, 64 * P, Advice::PageOut).unwrap_err();
        assert_eq!(refused.errno, Errno::EINVAL);
        // Reclaim keeps these pages as well.
        cpu.reclaim(64);
        assert!(file.has_page(cpu, 9) && file.has_page(cpu, 17) && !file.has_page(cpu, 30));
        drop(pins);
        space.mlock(cpu, AT + 9 * P, P, MemoryLock::No).unwrap();
        cpu.reclaim(64);
        assert_eq!(resident(), 0);
        // This space may not page out a page shared with another space.
        load(cpu, space, AT).unwrap();
        let child = space.fork(cpu).unwrap();
        load(cpu, &child, AT).unwrap();
        space.madvise(cpu, AT, P, Advice::PageOut).unwrap();
        assert!(file.has_page(cpu, 0));
        cpu.reclaim(64);
        assert!(!file.has_page(cpu, 0));
        assert_eq!((load(cpu, space, AT), load(cpu, &child, AT)), (Ok(1), Ok(1)));
        child.exit(cpu);
    });
}

/// Pages used repeatedly survive a scan through many pages used once.
#[test]
fn a_scan_does_not_evict_used_pages() {
    with_file(128, 600, |cpu, space, memory, _| {
        let hot =
            || (0..32).for_each(|page| assert_eq!(load(cpu, space, AT + page * P), Ok(page + 1)));
        (0..4).for_each(|_| {
            hot();
            cpu.reclaim(1);
        });
        memory.reads.lock().unwrap().clear();
        for page in 32..600 {
            assert_eq!(load(cpu, space, AT + page * P), Ok(page + 1));
            if page % 8 == 0 {
                hot();
            }
        }
        let again = memory.reads.lock().unwrap().iter().filter(|(first, _)| *first < 32).count();
        assert!(again <= 4, "{again} of 8 blocks in use were read again");
    });
}

/// The previous duration of the use does not matter.
#[test]
fn unused_pages_are_evicted_by_one_call() {
    with_file(128, 600, |cpu, space, _, file| {
        for page in 32..600 {
            load_all(cpu, space, (0..8).chain([page]));
        }
        cpu.reclaim(u64::MAX);
        assert_eq!(file.resident_pages(cpu), 0);
    });
}

#[test]
fn kernel_reads_count_as_use() {
    with_file(256, 64, |cpu, _, _, file| {
        file.read_ahead(cpu, 0..64).unwrap();
        (0..32).for_each(|page| assert_eq!(read_object(cpu, file, page), Some(page + 1)));
        cpu.reclaim(32);
        assert!((0..64).all(|page| file.has_page(cpu, page) == (page < 32)));
        assert_eq!(count(cpu, Counter::FrameOwed), 0, "no CPU had a translation");
    });
}

/// A page read again soon after its eviction is counted, and stays longer.
#[test]
fn refaults_are_counted() {
    with_file(128, 64, |cpu, space, _, _| {
        load(cpu, space, AT).unwrap();
        space.madvise(cpu, AT, 4 * P, Advice::PageOut).unwrap();
        assert_eq!(count(cpu, Counter::WorkingsetRefault), 0);
        load(cpu, space, AT).unwrap();
        // The block of four pages, one of which was mapped.
        assert!((1..=4).contains(&count(cpu, Counter::WorkingsetRefault)));
        assert!(count(cpu, Counter::WorkingsetActivate) >= 1);
    });
}

fn load_all(cpu: &TestCpu<'_>, space: &TestSpace, pages: impl Iterator<Item = u64>) {
    pages.for_each(|page| assert_eq!(load(cpu, space, AT + page * P), Ok(page + 1)));
}

fn page_out(cpu: &TestCpu<'_>, space: &TestSpace, page: u64, pages: u64) {
    space.madvise(cpu, AT + page * P, pages * P, Advice::PageOut).unwrap();
}

#[test]
fn refaulted_pages_outlive_new_pages() {
    with_file(256, 64, |cpu, space, _, file| {
        load_all(cpu, space, 0..32);
        page_out(cpu, space, 0, 32);
        // Alternately, so that the frames of both ranges are interleaved. Both ranges are unused.
        for page in (0..32).step_by(4) {
            for pages in [page..page + 4, 32 + page..36 + page] {
                file.read_ahead(cpu, pages).unwrap();
            }
        }
        let activated = count(cpu, Counter::WorkingsetActivate);
        cpu.reclaim(32);
        let stay = (0..32).filter(|page| file.has_page(cpu, *page)).count() as u64;
        // A new page may be mistaken for an evicted page if their notes collide.
        assert!(activated > 24 && stay + 2 >= activated, "{stay} of {activated}");
    });
}

#[test]
fn a_late_refault_counts_as_a_new_page() {
    with_file(256, 64, |cpu, space, _, _| {
        load_all(cpu, space, 0..8);
        page_out(cpu, space, 0, 8);
        // More evictions of one page than memory has frames, so that the notes of the other pages
        // stay.
        for _ in 0..300 {
            load_all(cpu, space, 32..33);
            page_out(cpu, space, 32, 1);
        }
        let [refault, activate] = [Counter::WorkingsetRefault, Counter::WorkingsetActivate];
        let before = [refault, activate].map(|counter| count(cpu, counter));
        load_all(cpu, space, 0..8);
        assert!(count(cpu, refault) > before[0], "refaults are recognised");
        assert_eq!(count(cpu, activate), before[1]);
    });
}

/// A page that was read again, and is then lost in another way than by eviction.
#[test]
fn a_refault_is_counted_once() {
    with_file(256, 8, |cpu, space, _, file| {
        load_all(cpu, space, 0..1);
        page_out(cpu, space, 0, 1);
        load_all(cpu, space, 0..1);
        assert_eq!(count(cpu, Counter::WorkingsetRefault), 1);
        file.punch(cpu, 0..1).unwrap();
        space.revoke(cpu, file, 0..1, PrivateCopies::Keep);
        assert_eq!(load(cpu, space, AT), Ok(0));
        assert_eq!(count(cpu, Counter::WorkingsetRefault), 1);
    });
}

#[test]
fn first_reads_are_no_refaults() {
    with_file(64, 600, |cpu, space, _, _| {
        load_all(cpu, space, 0..600);
        assert!(count(cpu, Counter::PageStolen) > 500);
        // Two in 4,096 have the same note by chance.
        let again = count(cpu, Counter::WorkingsetRefault);
        assert!(again < 20, "{again}");
    });
}

/// If memory is exhausted, one flush releases the frames of many batches of evicted pages.
#[test]
fn read_only_pages_are_evicted_by_deferred_flushes() {
    let vm = guest::vm(2, 40);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let memory = Memory::new(200, 0);
    let file = file(&cpu, &memory);
    map(&cpu, &space, (0, 200), Prot::READ, SHARED, (&file, 0));
    beside(&vm, &space, || load_all(&cpu, &space, 0..200));
    let quiet = [Counter::FrameOwed, Counter::FlushNeedless].map(|counter| count(&cpu, counter));
    assert!(quiet[0] != 0 && quiet[0] + quiet[1] > 150, "{quiet:?}");
    assert_eq!(count(&cpu, Counter::TlbFlush), 0);
    finish(&cpu, space, Vec::from([file]));
}

/// The order of the pages in memory does not matter.
#[test]
fn adjacent_file_pages_are_written_together() {
    with_file(1200, 16, |cpu, space, memory, _| {
        // Returned frames are allocated in a different order.
        for round in 0..2 {
            writes(memory);
            (0..16).for_each(|page| store(cpu, space, AT + page * P, 70 + page + round).unwrap());
            cpu.reclaim(64);
        }
        let written = writes(memory);
        assert!(written.len() <= 6, "{written:?}");
        assert!((0..16).all(|page| memory.word(page) == 71 + page));
    });
}

#[test]
fn cold_pages_are_evicted_first() {
    with_file(256, 64, |cpu, space, _, file| {
        (0..64).for_each(|page| assert_eq!(load(cpu, space, AT + page * P), Ok(page + 1)));
        space.madvise(cpu, AT + 32 * P, 32 * P, Advice::Cold).unwrap();
        cpu.reclaim(32);
        let there =
            |pages: core::ops::Range<u64>| pages.filter(|page| file.has_page(cpu, *page)).count();
        assert_eq!((there(0..32), there(32..64)), (32, 0));
    });
}

#[test]
fn cold_refaulted_pages_are_evicted_first() {
    with_file(256, 64, |cpu, space, _, file| {
        load_all(cpu, space, 0..32);
        page_out(cpu, space, 0, 32);
        load_all(cpu, space, 0..64);
        space.madvise(cpu, AT, 32 * P, Advice::Cold).unwrap();
        cpu.reclaim(32);
        assert!((0..64).all(|page| file.has_page(cpu, page) == (page >= 32)));
    });
}

/// Private pages cannot be evicted without a swap area, so their age has no effect on other pages.
#[test]
fn private_pages_do_not_become_cold_without_a_swap_area() {
    let vm = guest::vm(1, 64);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    guest::map(&cpu, &space, 0, 4, RW);
    store(&cpu, &space, AT, 1).unwrap();
    space.madvise(&cpu, AT, 4 * P, Advice::Cold).unwrap();
    assert!(space.entry_at(&cpu, AT).is_accessed());
    finish(&cpu, space, Vec::new());
}

/// Memory full of file pages is reclaimed for the frames of a call, whatever their number.
#[test]
fn a_fork_reclaims_frames_for_all_its_copies() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let memory = Memory::new(300, 0);
    let file = file(&cpu, &memory);
    map(&cpu, &space, (0, 300), Prot::READ, SHARED, (&file, 0));
    guest::map(&cpu, &space, 300, 100, RW);
    (300..400).for_each(|page| store(&cpu, &space, AT + page * P, page).unwrap());
    // Pinned pages are copied at once.
    let pins = space.pin(&cpu, AT + 300 * P, 100 * P, true).unwrap();
    load_all(&cpu, &space, 0..300);
    let child = space.fork(&cpu).unwrap();
    (300..400).for_each(|page| assert_eq!(load(&cpu, &child, AT + page * P), Ok(page)));
    drop(pins);
    child.exit(&cpu);
    finish(&cpu, space, Vec::from([file]));
}

/// A demand for one frame evicts 1/32 of memory with one flush.
#[test]
fn many_pages_are_evicted_at_once() {
    let vm = guest::vm(1, 1024);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let memory = Memory::new(3000, 0);
    let file = file(&cpu, &memory);
    map(&cpu, &space, (0, 3000), Prot::READ, SHARED, (&file, 0));
    load_all(&cpu, &space, 0..3000);
    let [gone, flushes] = [Counter::PageStolen, Counter::FlushDeferred].map(|it| count(&cpu, it));
    assert!(gone > 1900 && flushes < gone / 8, "{gone} by {flushes}");
    finish(&cpu, space, Vec::from([file]));
}

/// Freed frames first stay on the CPU's own list, unavailable to other CPUs.
#[test]
fn background_reclaim_continues_until_other_cpus_have_enough() {
    let vm = guest::vm(2, 1024);
    vm.set(Setting::DeferredFlush(false));
    let (here, there) = (cpu(&vm, 0), cpu(&vm, 1));
    let space = Space::new(&here).unwrap();
    let memory = Memory::new(1000, 0);
    let file = file(&here, &memory);
    map(&here, &space, (0, 1000), Prot::READ, SHARED, (&file, 0));
    load_all(&here, &space, 0..1);
    here.drain();
    let mut page = 1;
    while vm.free_frames() > 80 {
        load_all(&there, &space, page..page + 1);
        there.drain();
        page += 1;
    }
    here.reclaim_ahead();
    assert_eq!(vm.frames.missing(), 0);
    finish(&here, space, Vec::from([file]));
}

/// The range's second reference to the page does not count as use by another owner.
#[test]
fn a_page_mapped_twice_by_the_range_is_evicted() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    let file = file(&cpu, &Memory::new(8, 0));
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, (0, 8), Prot::READ, SHARED, (&file, 0));
    map(&cpu, &space, (8, 8), Prot::READ, PRIVATE, (&file, 0));
    load_all(&cpu, &space, 0..8);
    (8..16).for_each(|page| assert_eq!(load(&cpu, &space, AT + page * P), Ok(page - 7)));
    space.evict(&cpu, AT, 16 * P).unwrap();
    assert_eq!(file.resident_pages(&cpu), 0);
    finish(&cpu, space, Vec::from([file]));
}

/// A CPU that has found pages and searches for more counts as evicting. Other CPUs wait for this
/// CPU if these pages are the only evictable pages.
#[test]
fn a_cpu_with_found_pages_counts_as_evicting() {
    // At different moments of a call: the number of scanned frames, whether the CPU counts as
    // evicting, and whether a page has been evicted.
    let seen_at = |look: u64| {
        let vm = guest::vm(1, 1024);
        let cpu = cpu(&vm, 0);
        let space = Space::new(&cpu).unwrap();
        let memory = Memory::new(512, 0);
        let file = file(&cpu, &memory);
        map(&cpu, &space, (0, 512), RW, SHARED, (&file, 0));
        (0..512).for_each(|page| assert_eq!(load(&cpu, &space, AT + page * P), Ok(page + 1)));
        for page in (0..512).step_by(8) {
            space.madvise(&cpu, AT + page * P, P, Advice::Cold).unwrap();
        }
        let [scanned, stolen] = [Counter::PageScanned, Counter::PageStolen];
        let mut seen = (0, false, false);
        let at_look = || {
            let left = vm.totals().get(stolen) != 0;
            seen = (vm.totals().get(scanned), vm.is_held(), left);
        };
        let is_reached = vm.machine().at_look(look, at_look, || assert!(cpu.reclaim(32) >= 32));
        finish(&cpu, space, Vec::from([file]));
        is_reached.then_some(seen)
    };
    let seen: Vec<_> = (1..).map_while(|part| seen_at(part * 50)).collect();
    assert!(
        seen.iter().any(|(scanned, reported, left)| *scanned < 200 && *reported && !left),
        "{seen:?}"
    );
}

#[test]
fn private_copies_stay() {
    let vm = guest::vm(1, 64);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let memory = Memory::new(16, 0);
    let file = file(&cpu, &memory);
    map(&cpu, &space, (0, 16), RW, PRIVATE, (&file, 0));
    (0..16).for_each(|page| assert_eq!(load(&cpu, &space, AT + page * P), Ok(page + 1)));
    (0..8).for_each(|page| store(&cpu, &space, AT + page * P, 90 + page).unwrap());
    cpu.reclaim(64);
    assert_eq!(file.resident_pages(&cpu), 0);
    assert_eq!(space.resident_pages(&cpu), 8);
    for page in 0..16 {
        let expected = if page < 8 { 90 + page } else { page + 1 };
        assert_eq!(load(&cpu, &space, AT + page * P), Ok(expected));
    }
    finish(&cpu, space, Vec::from([file]));
}

#[test]
fn the_truncated_part_of_an_evicted_page_is_zeros() {
    with_file(64, 8, |cpu, space, memory, file| {
        store(cpu, space, AT + 3 * P + 800, 5).unwrap();
        space.madvise(cpu, AT, 8 * P, Advice::PageOut).unwrap();
        file.set_len(cpu, 3 * PAGE_SIZE + 100).unwrap();
        space.revoke(cpu, file, 4..u64::MAX, PrivateCopies::Drop);
        file.set_len(cpu, 8 * PAGE_SIZE).unwrap();
        assert_eq!(load(cpu, space, AT + 3 * P + 800), Ok(0));
        assert_eq!(load(cpu, space, AT + 3 * P), Ok(4));
        assert_eq!((load(cpu, space, AT + 7 * P), memory.len()), (Ok(0), 8 * PAGE_SIZE));
    });
}

#[test]
fn background_reclaim_frees_memory() {
    let vm = guest::vm(1, 1024);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let memory = Memory::new(2000, 0);
    let file = file(&cpu, &memory);
    map(&cpu, &space, (0, 2000), Prot::READ, SHARED, (&file, 0));
    assert_eq!(cpu.reclaim_ahead(), 0);
    for page in 0..2000 {
        assert_eq!(load(&cpu, &space, AT + page * P), Ok(page + 1));
        if page % 16 == 0 {
            cpu.reclaim_ahead();
        }
        assert!(vm.free_frames() > 16, "page {page}");
    }
    // Accessed bits therefore show the used pages.
    let aged = count(&cpu, Counter::FlushAged);
    assert!((2..8).contains(&aged), "{aged}");
    cpu.drain();
    finish(&cpu, space, Vec::from([file]));
}

/// A page that a program uses only through a translation in the CPU's TLB counts as used, because
/// the CPU drops its translations twice in each round of the hand: the next use sets the accessed
/// bit again.
#[test]
fn use_through_a_cached_translation_counts() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let memory = Memory::new(1, 0);
    let file = file(&cpu, &memory);
    map(&cpu, &space, (0, 1), Prot::READ, SHARED, (&file, 0));
    let half = cpu.frames_of(Over::All) / 2;
    let evict = |chosen: &[_]| Some(cpu.evict(chosen));
    let emptied = || vm.machine().emptied.lock().unwrap().len();
    let mut cached = None;
    for half_round in 1..=20 {
        for _ in 0..3 {
            // A use sets the accessed bit only if the TLB has no translation.
            if cached != Some(emptied()) {
                assert_eq!(load(&cpu, &space, AT), Ok(1));
                cached = Some(emptied());
            }
        }
        cpu.go_over(Over::All, half, |_, _| false, Purpose::Evict, evict);
        assert!(file.has_page(&cpu, 0), "half round {half_round}");
        cpu.age_translations();
        cpu.age_translations();
    }
    assert_eq!((emptied(), memory.reads.lock().unwrap().len()), (20, 1));
    // Without further use the page leaves.
    for _ in 0..8 {
        cpu.go_over(Over::All, half, |_, _| false, Purpose::Evict, evict);
    }
    assert!(!file.has_page(&cpu, 0));
    finish(&cpu, space, Vec::from([file]));
}

/// Another CPU frees pages during a scan, which therefore ends early. The next call has the full
/// goal.
#[test]
fn scan_that_ends_early_does_not_lower_the_goal() {
    let ended_at = |nth: u64| {
        let vm = guest::vm(2, 1024);
        let (here, there) = (cpu(&vm, 0), cpu(&vm, 1));
        let (space, other) = (Space::new(&here).unwrap(), Space::new(&here).unwrap());
        let memory = Memory::new(400, 0);
        let file = file(&here, &memory);
        map(&here, &space, (0, 400), Prot::READ, SHARED, (&file, 0));
        (0..400).for_each(|page| assert_eq!(load(&here, &space, AT + page * P), Ok(page + 1)));
        guest::map(&here, &other, 0, 1000, RW);
        let mut private = 0;
        let mut take = || {
            here.drain();
            while vm.free_frames() > 80 {
                store(&here, &other, AT + private * P, private).unwrap();
                private += 1;
            }
        };
        take();
        let (shared, vm) = (&other, &vm);
        let frees = move || {
            // Neither call waits for the grace section of the scan.
            shared.madvise(&there, AT, 40 * P, Advice::DontNeed).unwrap();
            vm.frames.drain(there.local(), &there);
        };
        let is_reached = vm.machine().at_look(nth, frees, || _ = here.reclaim_ahead());
        take();
        assert!(here.reclaim_ahead() >= 32, "memory is freed at look {nth}");
        other.exit(&here);
        finish(&here, space, Vec::from([file]));
        is_reached
    };
    let reached = (1..).step_by(5).take_while(|nth| ended_at(*nth)).count();
    assert!(reached > 2, "{reached} moments of the scan");
}

/// Another access maps the page again during its writeback. The page is not dropped together with
/// the new store.
#[test]
fn a_store_during_eviction_is_not_lost() {
    for nth in 1..20 {
        let vm = guest::vm(2, 64);
        let (here, there) = (cpu(&vm, 0), cpu(&vm, 1));
        let space = Space::new(&here).unwrap();
        let memory = Memory::new(4, 0);
        let file = file(&here, &memory);
        map(&here, &space, (0, 4), RW, SHARED, (&file, 0));
        store(&here, &space, AT, 1).unwrap();
        let worst = {
            let space = &space;
            move || store(&there, space, AT + 8, 2).unwrap()
        };
        let met = vm.machine().at_look(nth, worst, || {
            space.madvise(&here, AT, 4 * P, Advice::PageOut).unwrap();
        });
        assert!(met || nth > 1, "no page was written");
        assert_eq!(load(&here, &space, AT), Ok(1));
        assert_eq!(load(&here, &space, AT + 8), Ok(if met { 2 } else { 0 }));
        finish(&here, space, Vec::from([file]));
    }
}

/// A call at the maximum number of VMAs is not repeated after reclaim. This result does not change
/// the next call, which finds memory full of file pages.
#[test]
fn a_fork_reclaims_frames_after_a_call_at_the_limit_of_vmas() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let memory = Memory::new(300, 0);
    let file = file(&cpu, &memory);
    map(&cpu, &space, (0, 300), Prot::READ, SHARED, (&file, 0));
    guest::map(&cpu, &space, 300, 100, RW);
    (300..400).for_each(|page| store(&cpu, &space, AT + page * P, page).unwrap());
    let pins = space.pin(&cpu, AT + 300 * P, 100 * P, true).unwrap();
    load_all(&cpu, &space, 0..300);
    vm.set(Setting::MaxMapCount(1));
    let refused = space.munmap(&cpu, AT + P, P).unwrap_err();
    assert_eq!(refused.errno, Errno::ENOMEM);
    vm.set(Setting::MaxMapCount(65530));
    let child = space.fork(&cpu).unwrap();
    (300..400).for_each(|page| assert_eq!(load(&cpu, &child, AT + page * P), Ok(page)));
    drop(pins);
    child.exit(&cpu);
    finish(&cpu, space, Vec::from([file]));
}
