//! Files with a backing store: the reads and writebacks, their time, and the handling of errors.

use crate::addr::{FrameNumber, PAGE_SIZE};
use crate::audit::audit;
use crate::error::Errno;
use crate::fault::{Access, FaultError, FaultKind};
use crate::file::{BackingStore, Object, ReadRun, StoreError, WriteRun};
use crate::frame::{FrameUse, Kind};
use crate::knob::{Locking, Setting};
use crate::machine::Machine;
use crate::reclaim::tests::holders::beside;
use crate::reclaim::tests::tiers::tiers;
use crate::space::tests::migrations::moved;
use crate::space::{Advice, MemoryLock, PrivateCopies, Prot, Space};
use crate::stat::Counter;
use crate::testing::guest::{
    self, AT, P, PRIVATE, RW, SHARED, TestCpu, TestSpace, cpu, load, store,
};
use crate::testing::guest::{map_object as map, read_object, write_object};
use crate::testing::store::{File, Memory, PAGE, Plan, file, finish, write_back};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::vec::Vec;

/// Runs `test` under each policy with a file of `pages` pages, mapped shared at `AT`, and private
/// behind.
fn each(pages: u64, more: usize, test: impl Fn(&TestCpu<'_>, &TestSpace, &Arc<Memory>, &File)) {
    for locking in [Locking::Speculative, Locking::PerVma, Locking::MmapLock] {
        let vm = guest::vm(1, 256);
        vm.set(Setting::Locking(locking));
        let cpu = cpu(&vm, 0);
        let space = Space::new(&cpu).unwrap();
        let memory = Memory::new(pages, more);
        let file = file(&cpu, &memory);
        let all = file.pages() + 1;
        map(&cpu, &space, (0, all), RW, SHARED, (&file, 0));
        map(&cpu, &space, (all, all), RW, PRIVATE, (&file, 0));
        test(&cpu, &space, &memory, &file);
        finish(&cpu, space, Vec::from([file]));
    }
}

fn reads(memory: &Memory) -> Vec<(u64, usize)> {
    core::mem::take(&mut memory.reads.lock().unwrap())
}

fn writes(memory: &Memory) -> Vec<(u64, usize)> {
    core::mem::take(&mut memory.writes.lock().unwrap())
}

#[test]
fn pages_are_read_once_in_runs() {
    each(10, 100, |cpu, space, memory, file| {
        assert_eq!((file.pages(), file.bytes()), (11, 10 * PAGE_SIZE + 100));
        assert_eq!(load(cpu, space, AT + 5 * P), Ok(6));
        assert_eq!(load(cpu, space, AT + 6 * P), Ok(7));
        assert_eq!(reads(memory), [(4, 4 * PAGE)], "the block of the page");
        assert_eq!(load(cpu, space, AT + 10 * P), Ok(0x0707_0707_0707_0707));
        assert_eq!(load(cpu, space, AT + 10 * P + 96), Ok(0x0707_0707), "zeros behind the end");
        assert_eq!(reads(memory), [(8, 2 * PAGE + 100)]);
        assert_eq!(load(cpu, space, AT + 11 * P), Err(FaultError::Bus));
        // One copy of the page for all mappings and for the kernel.
        assert_eq!(load(cpu, space, AT + 12 * P + 5 * P), Ok(6));
        assert_eq!(read_object(cpu, file, 4), Some(5));
        assert_eq!(
            store(cpu, space, AT + 12 * P + 3 * P, 44),
            Ok(()),
            "a copy of the page that is read"
        );
        assert_eq!(reads(memory), [(0, 4 * PAGE)]);
        assert_eq!(read_object(cpu, file, 3), Some(4));
        assert_eq!(write_back(cpu, &[space], file), Ok(0), "no store to the file");
        assert_eq!(cpu.vm().totals().get(Counter::MajorFault), 3);
    });
}

#[test]
fn dropped_small_files_keep_one_table_each() {
    const FILES: u64 = 48;
    let vm = guest::vm(1, 64);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let tables = || vm.census(&cpu).unwrap().tables;
    let before = tables();
    let files = (0..FILES).map(|_| {
        let file = file(&cpu, &Memory::new(4, 0));
        assert_eq!(read_object(&cpu, &file, 2), Some(3));
        assert_eq!(file.drop_clean(&cpu, 0..u64::MAX), 4);
        file
    });
    let files: Vec<_> = files.collect();
    assert_eq!(tables() - before, FILES);
    finish(&cpu, space, files);
}

#[test]
fn stores_are_written_back_once() {
    each(10, 100, |cpu, space, memory, file| {
        for page in [1, 2, 7, 10] {
            store(cpu, space, AT + page * P + 8, 100 + page).unwrap();
        }
        write_object(cpu, file, 3, 103).unwrap();
        assert!(file.is_dirty(cpu, 3) && !file.is_dirty(cpu, 4));
        assert_eq!(write_back(cpu, &[space], file), Ok(5));
        let runs = [(1, 3 * PAGE), (7, PAGE), (10, 100)];
        assert_eq!(writes(memory), runs, "in order, no byte beyond the end");
        assert_eq!((memory.word(3), memory.len()), (103, 10 * PAGE_SIZE + 100));
        assert_eq!(write_back(cpu, &[space], file), Ok(0));
        // The next store is noticed, though the page is mapped.
        store(cpu, space, AT + 2 * P, 202).unwrap();
        assert_eq!(load(cpu, space, AT + 2 * P + 8), Ok(102));
        assert_eq!(write_back(cpu, &[space], file), Ok(1));
        assert_eq!((writes(memory), memory.word(2)), (Vec::from([(2, PAGE)]), 202));
        // A read page is clean until its first store.
        assert_eq!(load(cpu, space, AT), Ok(1));
        assert!(!file.is_dirty(cpu, 0));
        store(cpu, space, AT, 50).unwrap();
        assert!(file.is_dirty(cpu, 0));
    });
}

/// The page's entry is held at some of the moments.
#[test]
fn a_dirty_page_is_dirty_while_another_cpu_moves_it() {
    for nth in 1.. {
        let vm = &tiers(2, &[128, 256]);
        let cpu = cpu(vm, 0);
        let space = Space::new(&cpu).unwrap();
        let file = file(&cpu, &Memory::new(1, 0));
        map(&cpu, &space, (0, 1), RW, SHARED, (&file, 0));
        store(&cpu, &space, AT, 7).unwrap();
        let mut is_dirty = true;
        let moves = || assert_eq!(moved(&cpu, &space, (0, 1), 1), [Ok(1)]);
        let is_reached = beside(vm, &cpu, nth, moves, |other| is_dirty = file.is_dirty(other, 0));
        assert!(is_dirty, "not dirty at check {nth}");
        finish(&cpu, space, Vec::from([file]));
        if !is_reached {
            assert!(nth > 1, "no frame was checked");
            break;
        }
    }
}

#[test]
fn the_end_of_an_object_writes_back() {
    let vm = guest::vm(1, 64);
    let cpu = cpu(&vm, 0);
    let memory = Memory::new(3, 0);
    for dropped in [false, true] {
        let file = file(&cpu, &memory);
        write_object(&cpu, &file, 1, 70 + u64::from(dropped)).unwrap();
        if dropped {
            drop(file);
            assert_eq!(memory.word(1), 70);
            assert_eq!(cpu.end_dropped(), 1);
        } else {
            Object::release(file, &cpu);
        }
        assert_eq!(memory.word(1), 70 + u64::from(dropped));
    }
    let file = file(&cpu, &memory);
    write_object(&cpu, &file, 1, 90).unwrap();
    memory.plan([Plan::Fail(0)]);
    Object::release(file, &cpu);
    assert_eq!((memory.word(1), vm.totals().get(Counter::WriteBackLost)), (71, 1));
    cpu.drain();
    assert_eq!(audit(&cpu, &[]).unwrap().taken(), 1);
}

#[test]
fn a_failed_read_is_reported_and_retried() {
    each(8, 0, |cpu, space, memory, file| {
        memory.plan([Plan::Fail(PAGE + 50)]);
        assert_eq!(load(cpu, space, AT + P), Err(FaultError::Bus));
        assert_eq!(reads(memory), [(0, 4 * PAGE)], "not read twice for one fault");
        assert!(file.has_page(cpu, 0) && !file.has_page(cpu, 1), "earlier pages are resident");
        assert_eq!(load(cpu, space, AT), Ok(1));
        memory.plan([Plan::Fail(0)]);
        let read = file.read_page(cpu, 3, |_| unreachable!("no page"));
        assert_eq!(read, Err::<(), _>(Errno::EIO));
        assert_eq!(load(cpu, space, AT + P), Ok(2), "the next access reads again");
        assert_eq!(load(cpu, space, AT + 3 * P), Ok(4));
        assert_eq!(reads(memory), [(3, 4 * PAGE), (1, 4 * PAGE)], "from the faulting pages on");
        // Another party has shortened the file: the missing bytes are zeros.
        memory.plan([Plan::Short(4)]);
        assert_eq!(load(cpu, space, AT + 5 * P), Ok(6), "four bytes of the page");
        assert_eq!(load(cpu, space, AT + 6 * P), Ok(0));
    });
}

#[test]
fn a_failed_write_loses_no_stores() {
    each(8, 0, |cpu, space, memory, file| {
        let mut first = file.errors_seen();
        let mut second = first;
        for page in 0..6 {
            store(cpu, space, AT + page * P, 100 + page).unwrap();
        }
        memory.plan([Plan::Fail(PAGE + 7)]);
        assert_eq!(write_back(cpu, &[space], file), Err(Errno::ENOSPC));
        assert_eq!(writes(memory), [(0, 4 * PAGE), (4, 2 * PAGE)], "the other pages are written");
        assert_eq!([0, 1, 4].map(|page| file.is_dirty(cpu, page)), [false, true, false]);
        assert_eq!(file.write_error(&mut first), Some(Errno::ENOSPC));
        assert_eq!(file.write_error(&mut first), None, "each open file reports the error once");
        assert_eq!(file.write_error(&mut second), Some(Errno::ENOSPC));
        assert_eq!(file.drop_clean(cpu, 0..8), 2, "neither mapped nor dirty pages");
        assert_eq!(write_back(cpu, &[space], file), Ok(3));
        assert_eq!(
            (0..6).map(|page| memory.word(page)).collect::<Vec<_>>(),
            [100, 101, 102, 103, 104, 105]
        );
        assert_eq!(file.write_error(&mut first), None);
    });
}

#[test]
fn clean_pages_are_dropped_and_read_again() {
    each(8, 0, |cpu, space, memory, file| {
        assert_eq!(read_object(cpu, file, 0), Some(1));
        assert_eq!(load(cpu, space, AT + P), Ok(2));
        let around = cpu.vm().knobs().fault_around_pages();
        assert_eq!(file.drop_clean(cpu, 0..8), if around > 1 { 0 } else { 3 });
        space.munmap(cpu, AT, 9 * P).unwrap();
        write_object(cpu, file, 2, 33).unwrap();
        let seen = |file: &crate::heap::Shared<Object>| {
            let mut seen = Vec::new();
            file.each_resident(cpu, |frame, dirty| seen.push((cpu.vm().frame_node(frame), dirty)));
            seen
        };
        let [clean, dirty] = [false, true].map(|dirty| (Some(0), dirty));
        assert_eq!(seen(file), [clean, clean, dirty, clean]);
        assert_eq!(file.drop_clean(cpu, 0..8), 3);
        assert_eq!((file.resident_pages(cpu), seen(file)), (1, Vec::from([dirty])));
        reads(memory);
        assert_eq!(read_object(cpu, file, 1), Some(2));
        assert_eq!(reads(memory), [(0, 2 * PAGE)], "up to the first resident page");
        assert_eq!(read_object(cpu, file, 2), Some(33));
    });
}

#[test]
fn pages_are_read_ahead_in_large_runs() {
    each(70, 5, |cpu, space, memory, file| {
        assert_eq!(load(cpu, space, AT + 9 * P), Ok(10));
        reads(memory);
        memory.plan([Plan::Later]);
        file.read_ahead(cpu, 5..u64::MAX).unwrap();
        assert_eq!(reads(memory), [(4, 4 * PAGE), (12, 58 * PAGE + 5)]);
        assert_eq!(file.resident_pages(cpu), 4 + 59);
        memory.complete(cpu, None);
        assert_eq!((file.resident_pages(cpu), load(cpu, space, AT + 4 * P)), (67, Ok(5)));
        file.read_ahead(cpu, 4..70).unwrap();
        assert_eq!(reads(memory), []);
        memory.plan([Plan::Fail(0)]);
        assert_eq!(file.read_ahead(cpu, 0..9), Err(Errno::EIO));
        file.read_ahead(cpu, 71..80).unwrap();
    });
}

#[test]
fn willneed_reads_pages() {
    each(70, 0, |cpu, space, memory, file| {
        let pages = |file: &crate::heap::Shared<Object>| file.resident_pages(cpu);
        memory.plan([Plan::Later]);
        space.madvise(cpu, AT + 8 * P, 20 * P, Advice::WillNeed).unwrap();
        assert_eq!((reads(memory), pages(file)), (Vec::from([(8, 20 * PAGE)]), 0));
        memory.complete(cpu, None);
        assert_eq!((pages(file), space.resident_pages(cpu)), (20, 0), "read, and not mapped");
        // Holes, and unreadable pages.
        space.munmap(cpu, AT + 40 * P, P).unwrap();
        memory.plan([Plan::Fail(PAGE)]);
        let advised = space.madvise(cpu, AT + 36 * P, 8 * P, Advice::WillNeed);
        assert_eq!(advised.map_err(|error| error.errno), Err(Errno::ENOMEM));
        // One page, and from the next page on in blocks.
        assert_eq!(pages(file), 20 + 1 + 4 + 4);
        assert_eq!(load(cpu, space, AT + 36 * P), Ok(37));
    });
}

/// If frames are short, advice reads no pages.
#[test]
fn advice_reads_no_pages_if_memory_is_short() {
    each(70, 0, |cpu, space, memory, file| {
        let (vm, advised) = (cpu.vm(), || space.madvise(cpu, AT, 40 * P, Advice::WillNeed));
        let taken = vm.total_frames() - vm.free_frames();
        vm.set(Setting::FrameLimit(taken + 60));
        assert_eq!((advised(), reads(memory), file.resident_pages(cpu)), (Ok(()), Vec::new(), 0));
        vm.set(Setting::FrameLimit(taken + 100));
        assert_eq!((advised(), file.resident_pages(cpu)), (Ok(()), 40));
    });
}

#[test]
fn the_length_matches_the_store() {
    each(8, 100, |cpu, space, memory, file| {
        store(cpu, space, AT + 8 * P + 200, 5).unwrap();
        store(cpu, space, AT + 7 * P, 5).unwrap();
        memory.plan([Plan::Fail(0)]);
        assert_eq!(file.set_len(cpu, 3), Err(Errno::EIO));
        assert_eq!(file.pages(), 9, "the length is unchanged");
        // The bytes behind the old end are zeros when the file grows.
        file.set_len(cpu, 8 * PAGE_SIZE + 300).unwrap();
        assert_eq!(load(cpu, space, AT + 8 * P + 200), Ok(0));
        assert_eq!(write_back(cpu, &[space], file), Ok(2));
        assert_eq!(memory.len(), 8 * PAGE_SIZE + 300);
        // When the file shrinks, the pages are removed, and the rest of the last page is zeros.
        file.set_len(cpu, 2 * PAGE_SIZE + 4).unwrap();
        space.revoke(cpu, file, 3..u64::MAX, PrivateCopies::Drop);
        assert_eq!(load(cpu, space, AT + 3 * P), Err(FaultError::Bus));
        assert_eq!(memory.len(), 2 * PAGE_SIZE + 4);
        assert_eq!(write_back(cpu, &[space], file).map(|pages| pages < 2), Ok(true));
        assert_eq!(memory.len(), 2 * PAGE_SIZE + 4, "no write beyond the end");
        file.set_len(cpu, 5 * PAGE_SIZE).unwrap();
        assert_eq!(load(cpu, space, AT + 4 * P), Ok(0));
        assert_eq!(load(cpu, space, AT + 2 * P), Ok(3));
        // A hole.
        store(cpu, space, AT, 9).unwrap();
        file.punch(cpu, 0..2).unwrap();
        space.revoke(cpu, file, 0..2, PrivateCopies::Keep);
        assert_eq!([0, P, 2 * P].map(|at| load(cpu, space, AT + at)), [Ok(0), Ok(0), Ok(3)]);
        assert_eq!((memory.word(0), memory.word(2)), (0, 3));
    });
}

#[test]
fn a_fault_waits_for_a_pending_read() {
    for error in [None, Some(StoreError { done: PAGE, errno: Errno::EIO })] {
        each(8, 0, |cpu, space, memory, file| {
            memory.plan([Plan::Later]);
            let fault = |page| space.fault_remote(cpu, AT + page * P, Access::Read);
            assert_eq!(fault(1), Ok(FaultKind::Pending));
            let first = cpu.pending_read().unwrap();
            assert!(cpu.pending_read().is_none() && first.outcome().is_none());
            // Other faults wait for the same read.
            assert_eq!(fault(0), Ok(FaultKind::Pending));
            let second = cpu.pending_read().unwrap();
            assert_eq!((second.id(), reads(memory).len()), (first.id(), 1));
            let read = file.read_page(cpu, 2, |_| unreachable!("no page"));
            assert_eq!(read, Err::<(), _>(Errno::EAGAIN));
            assert_eq!(cpu.pending_read().unwrap().id(), first.id());
            assert_eq!(file.resident_pages(cpu), 0);
            memory.complete(cpu, error);
            assert_eq!(second.outcome(), Some(Ok(())));
            assert_eq!(load(cpu, space, AT), Ok(1));
            let whole = error.is_none();
            assert_eq!(first.outcome(), Some(if whole { Ok(()) } else { Err(Errno::EIO) }));
            assert_eq!(load(cpu, space, AT + P), Ok(2));
            assert_eq!(reads(memory).len(), usize::from(!whole), "the next access reads again");
        });
    }
}

/// A clock hand uses the anchor of a page as a number. During a read no part of an address may be
/// in its place: the hand would find the record of another page, or none, as the address is.
#[test]
fn a_page_has_no_anchor_during_its_read() {
    each(8, 0, |cpu, space, memory, file| {
        let table = cpu.vm().frames.table();
        let anchors = || {
            let frames = (0..1 << 16).filter_map(|number| table.find(FrameNumber(number)));
            let pages = frames.filter(|meta| meta.kind() == Kind::Used(FrameUse::Shared));
            pages.map(|meta| meta.anchor.load(Ordering::Relaxed)).collect::<Vec<_>>()
        };
        memory.plan([Plan::Later]);
        let pending = space.fault_remote(cpu, AT + P, Access::Read);
        assert_eq!(pending, Ok(FaultKind::Pending));
        let during = anchors();
        assert!(during.len() >= 2 && during.iter().all(|word| *word as u32 == 0), "{during:x?}");
        assert_eq!(cpu.reclaim(8), 0, "pages that are being read stay");
        memory.complete(cpu, None);
        let own = file.anchor();
        assert!(own != 0 && anchors().iter().all(|word| *word == own), "after the read");
        assert_eq!(load(cpu, space, AT + P), Ok(2));
    });
}

/// As on Linux, a fault that waits for a read counts once, however often it is repeated.
#[test]
fn a_waiting_fault_counts_once() {
    for error in [None, Some(StoreError { done: 0, errno: Errno::EIO })] {
        each(8, 0, |cpu, space, memory, _| {
            let fault = || {
                let served = space.fault_remote(cpu, AT + P, Access::Read);
                (served, cpu.vm().totals().get(Counter::Faults))
            };
            memory.plan([Plan::Later]);
            assert_eq!(fault(), (Ok(FaultKind::Pending), 0));
            assert_eq!(fault(), (Ok(FaultKind::Pending), 0), "woken too early");
            memory.complete(cpu, error);
            memory.plan(error.map(|_| Plan::Fail(0)));
            let served = if error.is_none() { Ok(FaultKind::Shared) } else { Err(FaultError::Bus) };
            assert_eq!(fault(), (served, 1));
            assert_eq!(load(cpu, space, AT + P), Ok(2));
        });
    }
}

/// A store that needs smaller requests: all waiters retry, including the waiters for pages that
/// were not read.
#[test]
fn a_read_may_request_a_retry() {
    each(8, 0, |cpu, space, memory, file| {
        memory.plan([Plan::Later, Plan::Later]);
        let fault = |page| space.fault_remote(cpu, AT + page * P, Access::Read);
        assert_eq!(fault(2), Ok(FaultKind::Pending));
        let pending = cpu.pending_read().unwrap();
        memory.complete(cpu, Some(StoreError { done: 0, errno: Errno::EAGAIN }));
        assert_eq!((pending.outcome(), file.resident_pages(cpu)), (Some(Ok(())), 0));
        // The next access reads again, and this read fails.
        assert_eq!(fault(2), Ok(FaultKind::Pending));
        let pending = cpu.pending_read().unwrap();
        memory.complete(cpu, Some(StoreError { done: 0, errno: Errno::EIO }));
        assert_eq!(pending.outcome(), Some(Err(Errno::EIO)));
        assert_eq!(load(cpu, space, AT + 2 * P), Ok(3));
    });
}

/// An object may own its store, which ends with the object.
#[test]
fn a_store_may_be_owned_by_its_object() {
    #[derive(Debug)]
    struct Own {
        _mark: Arc<()>,
    }
    impl BackingStore for Own {
        fn len(&self) -> u64 {
            PAGE_SIZE
        }
        fn read(&self, run: &mut ReadRun) -> Result<usize, StoreError> {
            run.memory().for_each(|page| page.fill(3));
            Ok(run.bytes())
        }
        fn write(&self, _: &WriteRun<'_>) -> Result<(), StoreError> {
            Ok(())
        }
        fn set_len(&self, _: u64) -> Result<(), Errno> {
            Err(Errno::EPERM)
        }
    }
    each(1, 0, |cpu, _, _, _| {
        let mark = Arc::new(());
        let store = std::boxed::Box::new(Own { _mark: mark.clone() });
        let file = Object::of_store(cpu, store, 1).unwrap();
        assert_eq!(read_object(cpu, &file, 0), Some(0x0303_0303_0303_0303));
        assert_eq!(file.set_len(cpu, 0), Err(Errno::EPERM));
        Object::release(file, cpu);
        assert_eq!(Arc::strong_count(&mark), 1);
    });
}

#[test]
fn a_dropped_read_fails() {
    each(8, 0, |cpu, space, memory, file| {
        memory.plan([Plan::Later]);
        assert_eq!(space.fault_remote(cpu, AT, Access::Read), Ok(FaultKind::Pending));
        let pending = cpu.pending_read().unwrap();
        memory.later.lock().unwrap().clear();
        assert_eq!(cpu.end_dropped(), 1);
        assert_eq!(pending.outcome(), Some(Err(Errno::EIO)));
        assert_eq!(file.resident_pages(cpu), 0);
        assert_eq!(load(cpu, space, AT), Ok(1));
    });
}

#[test]
fn a_page_truncated_during_its_read_is_absent() {
    each(8, 0, |cpu, space, memory, file| {
        memory.plan([Plan::Later]);
        assert_eq!(space.fault_remote(cpu, AT + 2 * P, Access::Read), Ok(FaultKind::Pending));
        let pending = cpu.pending_read().unwrap();
        file.set_len(cpu, PAGE_SIZE).unwrap();
        space.revoke(cpu, file, 1..u64::MAX, PrivateCopies::Drop);
        // The file grows again, and the same page is read once more.
        file.set_len(cpu, 8 * PAGE_SIZE).unwrap();
        assert_eq!(load(cpu, space, AT + 2 * P), Ok(0));
        memory.complete(cpu, None);
        assert_eq!(pending.outcome(), Some(Ok(())));
        assert_eq!(load(cpu, space, AT + 2 * P), Ok(0));
        assert_eq!(load(cpu, space, AT), Ok(1));
    });
}

/// Populate calls and remote accesses do not return a pending read: they wait.
#[test]
fn calls_wait_for_their_reads() {
    each(8, 0, |cpu, space, _, _| {
        let mut bytes = [0; 8];
        space.read_bytes(cpu, AT + 3 * P, &mut bytes).unwrap();
        assert_eq!(u64::from_ne_bytes(bytes), 4);
        space.write_bytes(cpu, AT + 5 * P, &9u64.to_ne_bytes()).unwrap();
        assert_eq!(load(cpu, space, AT + 5 * P), Ok(9));
        space.madvise(cpu, AT, 8 * P, crate::space::Advice::PopulateRead).unwrap();
    });
}

#[test]
fn the_first_store_after_mprotect_marks_the_page_dirty() {
    each(4, 0, |cpu, space, memory, file| {
        assert_eq!(store(cpu, space, AT, 10), Ok(()));
        space.mprotect(cpu, AT, P, Prot::READ).unwrap();
        assert_eq!(write_back(cpu, &[space], file), Ok(1));
        space.mprotect(cpu, AT, P, RW).unwrap();
        assert_eq!(store(cpu, space, AT, 11), Ok(()));
        let child = space.fork(cpu).unwrap();
        assert_eq!(write_back(cpu, &[space, &child], file), Ok(1));
        assert_eq!(store(cpu, &child, AT, 12), Ok(()));
        assert_eq!(load(cpu, space, AT), Ok(12));
        assert_eq!(write_back(cpu, &[space, &child], file), Ok(1));
        assert_eq!(memory.word(0), 12);
        child.exit(cpu);
    });
}

/// Each of two CPUs stores while the other CPU writes back, at every point: in the end the store
/// contains both words.
#[test]
fn a_store_during_writeback_is_not_lost() {
    for nth in 1..12 {
        let vm = guest::vm(2, 64);
        let (here, there) = (cpu(&vm, 0), cpu(&vm, 1));
        let space = Space::new(&here).unwrap();
        let memory = Memory::new(4, 0);
        let file = file(&here, &memory);
        map(&here, &space, (0, 4), RW, SHARED, (&file, 0));
        store(&here, &space, AT, 1).unwrap();
        let worst = {
            let space = &space;
            move || store(&there, space, AT, 2).unwrap()
        };
        vm.machine().at_look(nth, worst, || {
            write_back(&here, &[&space], &file).unwrap();
        });
        let expected = load(&here, &space, AT).unwrap();
        write_back(&here, &[&space], &file).unwrap();
        assert_eq!(memory.word(0), expected);
        finish(&here, space, Vec::from([file]));
    }
}

/// Locked pages are not written to free memory.
#[test]
fn out_of_memory_loses_no_stores() {
    let vm = guest::vm(1, 24);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let memory = Memory::new(64, 0);
    let file = file(&cpu, &memory);
    map(&cpu, &space, (0, 64), RW, SHARED, (&file, 0));
    space.mlock(&cpu, AT, 64 * P, MemoryLock::OnFault).unwrap();
    let mut stored = 0;
    while store(&cpu, &space, AT + stored * P, 100 + stored).is_ok() {
        stored += 1;
    }
    assert!((4..24).contains(&stored), "{stored}");
    assert_eq!(write_back(&cpu, &[&space], &file), Ok(stored));
    assert!((0..stored).all(|page| memory.word(page) == 100 + page));
    space.munmap(&cpu, AT, stored * P).unwrap();
    cpu.wait_grace();
    assert_eq!(file.drop_clean(&cpu, 0..64), stored);
    assert_eq!(load(&cpu, &space, AT + stored * P), Ok(stored + 1));
    finish(&cpu, space, Vec::from([file]));
}

/// A pin of a read-only private page creates a private copy. The page is read before the copy.
#[test]
fn a_pin_reads_the_page_before_the_copy() {
    each(8, 0, |cpu, space, memory, _| {
        let private = AT + 9 * P;
        space.mprotect(cpu, private, 8 * P, Prot::READ).unwrap();
        let pins = space.pin(cpu, private + 2 * P, P, false).unwrap();
        let at = cpu.vm().machine().frame_bytes(pins.frames()[0]).cast::<u64>();
        // SAFETY: the page is pinned, and no CPU stores to it.
        assert_eq!(unsafe { at.read() }, 3);
        assert_eq!(reads(memory), [(0, 4 * PAGE)]);
        memory.plan([Plan::Fail(0)]);
        let refused = space.pin(cpu, private + 4 * P, P, false);
        assert_eq!(refused.map(drop).map_err(|error| error.errno), Err(Errno::EFAULT));
        assert_eq!(reads(memory), [(4, 4 * PAGE)], "not read twice for one pin");
        drop(pins);
    });
}

/// A kernel call that waits for a read returns an error if the read is dropped.
#[test]
fn a_call_does_not_wait_for_a_read_that_was_dropped() {
    each(8, 0, |cpu, space, memory, file| {
        memory.plan([Plan::Drop, Plan::Drop]);
        let mut bytes = [0; 8];
        let read = space.read_bytes(cpu, AT, &mut bytes);
        assert_eq!(read.map_err(|error| error.error), Err(FaultError::Bus));
        let read = file.read_page(cpu, 0, |_| unreachable!("no page"));
        assert_eq!(read, Err::<(), _>(Errno::EIO));
        assert_eq!(load(cpu, space, AT + P), Ok(2));
    });
}

/// A read completed with a CPU of another subsystem ends like a dropped read.
#[test]
fn a_read_requires_a_cpu_of_its_vm() {
    let other = guest::vm(1, 64);
    let other = cpu(&other, 0);
    each(8, 0, |cpu, space, memory, _| {
        memory.plan([Plan::Later]);
        assert_eq!(space.fault_remote(cpu, AT, Access::Read), Ok(FaultKind::Pending));
        let pending = cpu.pending_read().unwrap();
        let reading = memory.later.lock().unwrap().remove(0);
        let complete = AssertUnwindSafe(|| reading.complete(&other, Ok(0)));
        assert!(catch_unwind(complete).is_err());
        assert_eq!(cpu.end_dropped(), 1);
        assert_eq!(pending.outcome(), Some(Err(Errno::EIO)));
        assert_eq!(load(cpu, space, AT), Ok(1));
    });
}

/// The read-ahead of a sequentially faulting thread grows with each fault. A thread with other
/// faults reads the store's block, and a thread with random advice only its page.
#[test]
fn read_ahead_grows_with_sequential_access() {
    let pages = 512;
    let run_blocks = |block: usize, advice: Option<Advice>, order: u8, at: &dyn Fn(u64) -> u64| {
        let vm = guest::vm(1, 2000);
        vm.set(Setting::PrefaultMaxOrder(order));
        let cpu = cpu(&vm, 0);
        let space = Space::new(&cpu).unwrap();
        let memory = Memory::new(pages, 0);
        memory.preferred.store(block, Ordering::Relaxed);
        let file = file(&cpu, &memory);
        map(&cpu, &space, (0, pages), Prot::READ, SHARED, (&file, 0));
        if let Some(advice) = advice {
            space.madvise(&cpu, AT, pages * P, advice).unwrap();
        }
        for page in (0..pages / 2).map(at) {
            assert_eq!(load(&cpu, &space, AT + page * P), Ok(page + 1));
        }
        let runs: Vec<_> = reads(&memory).iter().map(|(_, bytes)| bytes / PAGE).collect();
        let major = cpu.vm().totals().get(Counter::MajorFault);
        assert_eq!(major, runs.len() as u64);
        finish(&cpu, space, Vec::from([file]));
        runs
    };
    let run = |advice, order, at: &dyn Fn(u64) -> u64| run_blocks(4, advice, order, at);
    let inwards = |page| page;
    for block in [1, 4, 16] {
        let runs = run_blocks(block, None, 3, &inwards);
        let grown = runs.iter().position(|pages| *pages > block);
        assert!(grown.is_some_and(|at| at <= 4), "blocks of {block}: {runs:?}");
    }
    let runs = run(None, 3, &inwards);
    assert_eq!(runs[0], 4, "the store's block");
    assert!(runs.windows(2).all(|two| two[0] <= two[1] || two[1] == *runs.last().unwrap()));
    assert_eq!(runs.iter().max(), Some(&32), "eight blocks: {runs:?}");
    assert!(runs.len() < 20, "{runs:?}");
    assert_eq!(run(None, 0, &inwards).len(), 64, "prefault is off");
    assert_eq!(run(Some(Advice::Random), 3, &inwards), [1].repeat(256), "each by itself");
    assert_eq!(run(Some(Advice::Sequential), 3, &inwards), runs);
    let scattered = run(None, 3, &|page| page * 101 % pages);
    assert!(scattered.iter().all(|pages| *pages <= 8), "{scattered:?}");
}
