//! Read-ahead for reads of the kernel: the predictor of an open file.

use crate::ThreadStreams;
use crate::error::Errno;
use crate::file::Object;
use crate::heap::Shared;
use crate::knob::Setting;
use crate::table::node::load;
use crate::testing::guest::{self, TestCpu, cpu, read_object};
use crate::testing::store::{Memory, PAGE, Plan, file};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::vec::Vec;

const PAGES: u64 = 1536;
/// The preferred block size of the store.
const BLOCK: u64 = 4;

/// A file, of which no page was read.
fn with_file(order: u8, test: impl FnOnce(&TestCpu<'_>, &Arc<Memory>, &Shared<Object>)) {
    let vm = guest::vm(1, 3000);
    vm.set(Setting::PrefaultMaxOrder(order));
    let cpu = cpu(&vm, 0);
    let memory = Memory::new(PAGES, 0);
    let file = file(&cpu, &memory);
    test(&cpu, &memory, &file);
    guest::check(&cpu, &[], &[&file], 0);
    Object::release(file, &cpu);
}

/// A read of `pages` of an open file.
fn read(cpu: &TestCpu<'_>, file: &Shared<Object>, reader: &ThreadStreams, page: u64, pages: u64) {
    file.read_in_sequence(cpu, reader, page..page + pages).unwrap();
    (page..(page + pages).min(PAGES))
        .for_each(|page| assert_eq!(read_object(cpu, file, page), Some(page + 1)));
}

/// Returns the pages of each read requested from the store.
fn runs(memory: &Memory) -> Vec<u64> {
    let reads = std::mem::take(&mut *memory.reads.lock().unwrap());
    reads.iter().map(|(_, bytes)| (bytes / PAGE) as u64).collect()
}

#[test]
fn sequential_reads_enlarge_the_window() {
    for pages in [1, 3, 16] {
        with_file(3, |cpu, memory, file| {
            let reader = ThreadStreams::new();
            (0..PAGES).step_by(pages).for_each(|page| read(cpu, file, &reader, page, pages as u64));
            let runs = runs(memory);
            assert_eq!(runs.iter().sum::<u64>(), PAGES, "each page once");
            assert_eq!(runs[0], BLOCK.max(pages as u64).next_multiple_of(BLOCK), "{runs:?}");
            assert!(runs.contains(&32), "2^3 blocks: {runs:?}");
            assert!(runs.len() < PAGES as usize / 20, "{runs:?}");
        });
    }
}

/// The runs grow from the block of the store to eight blocks, for each size of blocks.
#[test]
fn runs_grow_with_blocks_of_each_size() {
    for block in [1, 4, 16, 64] {
        with_file(3, |cpu, memory, file| {
            memory.preferred.store(block, Ordering::Relaxed);
            let reader = ThreadStreams::new();
            (0..PAGES).for_each(|page| read(cpu, file, &reader, page, 1));
            let runs = runs(memory);
            assert_eq!(runs.iter().sum::<u64>(), PAGES, "each page once");
            let block = block as u64;
            let grown = runs.iter().position(|pages| *pages > block);
            assert!(grown.is_some_and(|at| at <= 4), "blocks of {block}: {runs:?}");
            // Runs of 512 pages would begin with a table.
            let most = (8 * block).min(128);
            let longest = runs.iter().position(|pages| *pages == most);
            assert!(longest.is_some_and(|at| at <= 9), "blocks of {block}: {runs:?}");
        });
    }
}

#[test]
fn other_reads_read_the_preferred_block() {
    // Without prefault there is no predictor.
    with_file(0, |cpu, memory, file| {
        let reader = ThreadStreams::new();
        (0..PAGES / 2).for_each(|page| read(cpu, file, &reader, page, 1));
        assert_eq!(runs(memory), [BLOCK].repeat((PAGES / 2 / BLOCK) as usize));
    });
    with_file(3, |cpu, memory, file| {
        let reader = ThreadStreams::new();
        (0..PAGES / 4).for_each(|at| read(cpu, file, &reader, at * 101 % PAGES, 1));
        let runs = runs(memory);
        assert!(runs.iter().all(|pages| *pages <= 2 * BLOCK), "{runs:?}");
    });
}

/// For an open file with random access advice, only the needed pages are read.
#[test]
fn random_reads_read_only_needed_pages() {
    with_file(3, |cpu, memory, file| {
        let read = |pages: core::ops::Range<u64>| {
            file.read_exactly(cpu, pages.clone()).unwrap();
            pages.for_each(|page| assert_eq!(read_object(cpu, file, page), Some(page + 1)));
        };
        (0..64).for_each(|at| read(at * 101 % PAGES..at * 101 % PAGES + 1));
        assert_eq!(runs(memory), [1].repeat(64));
        // The needed pages are read together, except for the present pages: 0, 101, 202, ….
        read(100..104);
        read(120..139);
        assert_eq!(runs(memory), [1, 2, 19]);
        assert_eq!(file.resident_pages(cpu), 64 + 3 + 19);
        // The range begins beyond the end, so no page is read.
        file.read_exactly(cpu, PAGES..u64::MAX).unwrap();
        memory.plan([Plan::Fail(PAGE), Plan::Fail(0)]);
        assert_eq!(file.read_exactly(cpu, 1000..1003), Err(Errno::EIO));
        assert_eq!(file.resident_pages(cpu), 64 + 3 + 19 + 1);
    });
}

/// Two open files of one object: the first is read in sequence, the second at random.
#[test]
fn each_open_file_has_its_predictor() {
    with_file(3, |cpu, memory, file| {
        let (sequential, random) = (ThreadStreams::new(), ThreadStreams::new());
        for page in 0..PAGES / 2 {
            read(cpu, file, &sequential, page, 1);
            if page % 8 == 0 {
                read(cpu, file, &random, PAGES / 2 + page * 101 % (PAGES / 2), 1);
            }
        }
        let reads = std::mem::take(&mut *memory.reads.lock().unwrap());
        let longest = |upper: bool| {
            let half = reads.iter().filter(|(first, _)| (*first >= PAGES / 2) == upper);
            half.map(|(_, bytes)| bytes / PAGE).max()
        };
        assert_eq!((longest(false), longest(true)), (Some(32), Some(BLOCK as usize)));
    });
}

#[test]
fn only_errors_of_needed_pages_are_returned() {
    with_file(3, |cpu, memory, file| {
        let reader = ThreadStreams::new();
        memory.plan([Plan::Fail(2 * PAGE)]);
        file.read_in_sequence(cpu, &reader, 0..2).unwrap();
        assert_eq!((read_object(cpu, file, 1), file.resident_pages(cpu)), (Some(2), 2));
        memory.plan([Plan::Fail(0)]);
        assert_eq!(file.read_in_sequence(cpu, &reader, 2..3), Err(Errno::EIO));
        // The range begins beyond the end, so no page is read.
        file.read_in_sequence(cpu, &reader, PAGES..PAGES + 9).unwrap();
        file.read_in_sequence(cpu, &reader, PAGES - 1..u64::MAX).unwrap();
        assert_eq!(read_object(cpu, file, PAGES - 1), Some(PAGES));
    });
}

/// A program that reads a record at a fixed stride does not read the pages between the records.
#[test]
fn pages_between_strides_are_not_read() {
    for stride in [16, 32] {
        with_file(3, |cpu, memory, file| {
            let reader = ThreadStreams::new();
            (0..PAGES).step_by(stride).for_each(|page| read(cpu, file, &reader, page, 1));
            let runs = runs(memory);
            let needed = PAGES / stride as u64;
            assert!(runs.iter().sum::<u64>() <= 2 * BLOCK * needed, "{stride}: {runs:?}");
        });
    }
}

/// A program reads the beginning of a file completely, and then the first half of each 64 pages.
/// The number of unused read-ahead pages falls.
#[test]
fn unused_pages_shrink_the_window() {
    for order in [3, 5] {
        with_file(order, |cpu, memory, file| {
            let reader = ThreadStreams::new();
            (0..256).for_each(|page| read(cpu, file, &reader, page, 1));
            assert!(runs(memory).iter().max() >= Some(&32));
            let (halves, half) = ((384..PAGES).step_by(64), 33);
            let needed = halves.clone().count() as u64 * half;
            for first in halves {
                (first..first + half).for_each(|page| read(cpu, file, &reader, page, 1));
            }
            let runs = runs(memory);
            let unused = runs.iter().sum::<u64>() - needed;
            assert!(unused < needed / 2, "{unused} unused, {needed} needed: {runs:?}");
        });
    }
}

/// A read-ahead page counts as used for the predictor only after the kernel reads the page.
#[test]
fn read_ahead_pages_count_as_used_after_a_read() {
    with_file(3, |cpu, _, file| {
        let used = |page| file.slot(cpu, page).map(|slot| load(slot).is_accessed());
        let reader = ThreadStreams::new();
        file.read_in_sequence(cpu, &reader, 1..2).unwrap();
        let all = || [0, 1, 2, 3].map(|page| used(page).unwrap());
        assert_eq!((all(), file.resident_pages(cpu)), ([false; 4], BLOCK));
        assert_eq!(read_object(cpu, file, 2), Some(3));
        assert_eq!(all(), [false, false, true, false]);
    });
}

/// An object without a store has no pages to read.
#[test]
fn an_object_without_a_store_is_not_read_ahead() {
    let vm = guest::vm(1, 64);
    let cpu = cpu(&vm, 0);
    let object = Object::try_new(&cpu, 8, 0).unwrap();
    object.read_in_sequence(&cpu, &ThreadStreams::new(), 0..8).unwrap();
    object.read_ahead(&cpu, 0..8).unwrap();
    assert_eq!(object.resident_pages(&cpu), 0);
    guest::check(&cpu, &[], &[&object], 0);
    Object::release(object, &cpu);
}
