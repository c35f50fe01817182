//! An out-of-memory error waits for other CPUs that hold evictable pages. It comes soon if other
//! CPUs search for such pages without success.

use super::swap::swap_on;
use super::tiers::tiers;
use crate::file::Object;
use crate::heap::Shared;
use crate::space::{Advice, MemoryLock, Prot, Space};
use crate::testing::guest::{
    self, AT, P, RW, SHARED, TestCpu, TestSpace, TestVm, cpu, load, map, map_object, store,
};
use crate::testing::store::{Memory, file, finish};
use core::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use std::vec::Vec;

/// The evictable pages of the file.
const PAGES: u64 = 8;
/// The time limit for a CPU that waits for another CPU.
const WHILE: Duration = Duration::from_millis(20);

/// Runs `what` on one CPU. When `what` inspects a frame for the `nth` time, another CPU runs
/// `then`, for which the first CPU waits up to `WHILE`. Returns whether the `nth` inspection was
/// reached.
pub(crate) fn beside(
    vm: &TestVm,
    here: &TestCpu<'_>,
    nth: u64,
    what: impl FnOnce(),
    then: impl FnOnce(&TestCpu<'_>) + Send,
) -> bool {
    let goes = AtomicBool::new(false);
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            while !goes.load(Ordering::Acquire) {
                thread::yield_now();
            }
            then(&cpu(vm, 1));
        });
        let meanwhile = || {
            goes.store(true, Ordering::Release);
            let since = Instant::now();
            while !other.is_finished() && since.elapsed() < WHILE {
                thread::yield_now();
            }
        };
        let is_reached = vm.machine().at_look(nth, meanwhile, what);
        goes.store(true, Ordering::Release);
        while !other.is_finished() {
            here.serve_flushes();
            thread::yield_now();
        }
        is_reached
    })
}

/// Stores to pages until there is no memory. Returns to how many.
fn fill(cpu: &TestCpu<'_>, space: &TestSpace) -> u64 {
    (0..1000).find(|page| store(cpu, space, AT + page * P, *page).is_err()).unwrap()
}

/// Runs `what` on a machine with two nodes, the first short of memory. In the middle of `what`,
/// another CPU allocates frames until memory is out. Returns whether that moment was reached, and
/// the number of evictable pages in memory then.
fn taken_at(nth: u64, what: impl Fn(&TestCpu<'_>, &TestSpace, &Shared<Object>)) -> (bool, u64) {
    let vm = &tiers(2, &[128, 256]);
    let here = cpu(vm, 0);
    let [space, other] = [(); 2].map(|()| Space::new(&here).unwrap());
    let memory = Memory::new(PAGES, 0);
    let file = file(&here, &memory);
    map_object(&here, &space, (0, PAGES), Prot::READ, SHARED, (&file, 0));
    map(&here, &space, 1000, 110, RW);
    map(&here, &other, 0, 1000, RW);
    (0..PAGES).for_each(|page| assert_eq!(load(&here, &space, AT + page * P), Ok(page + 1)));
    space.madvise(&here, AT, PAGES * P, Advice::Cold).unwrap();
    (0..105).for_each(|page| store(&here, &space, AT + (1000 + page) * P, page).unwrap());
    let mut left = 0;
    let is_reached = beside(
        vm,
        &here,
        nth,
        || what(&here, &space, &file),
        |there| {
            fill(there, &other);
            left = file.resident_pages(there);
        },
    );
    other.exit(&here);
    finish(&here, space, Vec::from([file]));
    (is_reached, left)
}

/// Checks, at every `each`th inspection of a call, that `left_at` counts zero.
fn at_looks(each: usize, left_at: impl Fn(u64) -> (bool, u64)) {
    let mut reached = 0;
    for nth in (1..400).step_by(if cfg!(miri) { 100 } else { each }) {
        let (is_reached, left) = left_at(nth);
        if !is_reached {
            break;
        }
        reached += 1;
        assert_eq!(left, 0, "frames remain while memory is exhausted, at check {nth}");
    }
    assert!(reached > 0, "no frame was checked");
}

/// Checks that no evictable page is left when memory is out.
fn nothing_is_left(each: usize, what: impl Fn(&TestCpu<'_>, &TestSpace, &Shared<Object>)) {
    at_looks(each, |nth| taken_at(nth, &what));
}

#[test]
fn memory_is_not_out_while_another_cpu_demotes() {
    nothing_is_left(20, |cpu, _, _| _ = cpu.balance(0));
}

#[test]
fn memory_is_not_out_while_another_cpu_scans_for_pages() {
    nothing_is_left(20, |cpu, _, _| _ = cpu.reclaim(1));
}

#[test]
fn memory_is_not_out_while_another_cpu_moves_pages() {
    nothing_is_left(4, |cpu, space, _| {
        let pages: Vec<_> = (0..PAGES).map(|page| AT + page * P).collect();
        let mut status = [Ok(0); PAGES as usize];
        space.move_pages(cpu, &pages, 1, true, &mut status).unwrap();
    });
}

#[test]
fn memory_is_not_out_while_another_cpu_pages_out() {
    nothing_is_left(2, |cpu, space, _| space.evict(cpu, AT, PAGES * P).unwrap());
    nothing_is_left(2, |cpu, _, file| _ = file.evict(cpu, 0..PAGES));
}

/// As [`taken_at`], but the other CPU first releases an object, to which the scanning CPU may have
/// the last reference. Returns the number of objects not yet ended when memory was out.
fn released_at(nth: u64, what: impl Fn(&TestCpu<'_>)) -> (bool, u64) {
    let vm = &tiers(2, &[128, 256]);
    let here = cpu(vm, 0);
    let [space, other] = [(); 2].map(|()| Space::new(&here).unwrap());
    map(&here, &space, 1000, 110, RW);
    map(&here, &other, 0, 1000, RW);
    let object = Object::try_new(&here, PAGES, 1).unwrap();
    map_object(&here, &space, (0, PAGES), RW, SHARED, (&object, 0));
    let private = |page| store(&here, &space, AT + (1000 + page) * P, page).unwrap();
    (0..20).for_each(private);
    (0..PAGES).for_each(|page| store(&here, &space, AT + page * P, page + 1).unwrap());
    let memory = Memory::new(PAGES, 0);
    let file = file(&here, &memory);
    map_object(&here, &space, (50, PAGES), Prot::READ, SHARED, (&file, 0));
    (0..PAGES).for_each(|page| assert_eq!(load(&here, &space, AT + (50 + page) * P), Ok(page + 1)));
    space.madvise(&here, AT + 50 * P, PAGES * P, Advice::Cold).unwrap();
    (20..95).for_each(private);
    space.munmap(&here, AT, PAGES * P).unwrap();
    here.wait_grace();
    let mut left = 0;
    let is_reached = beside(
        vm,
        &here,
        nth,
        || what(&here),
        |there| {
            Object::release(object, there);
            fill(there, &other);
            left = there.end_dropped() as u64;
        },
    );
    other.exit(&here);
    finish(&here, space, Vec::from([file]));
    (is_reached, left)
}

#[test]
fn objects_scanned_by_another_cpu_are_ended_before_memory_is_out() {
    at_looks(7, |nth| released_at(nth, |cpu| _ = cpu.reclaim(1)));
    at_looks(7, |nth| released_at(nth, |cpu| _ = cpu.balance(0)));
}

/// This is the state of a call that holds pages and finds no memory.
#[test]
fn a_cpu_does_not_wait_for_its_own_call() {
    let vm = crate::testing::guest::vm(1, 64);
    let cpu = cpu(&vm, 0);
    let _stay = cpu.hold_pages();
    cpu.await_holders(|| false);
}

/// Other CPUs scan repeatedly, and find no evictable page.
#[test]
fn memory_is_out_soon_while_other_cpus_scan_for_pages() {
    const OTHERS: u16 = 4;
    let vm: &TestVm = &crate::testing::guest::vm(OTHERS as usize + 2, 1024);
    let here = cpu(vm, 0);
    let space = &Space::new(&here).unwrap();
    let memory = Memory::new(PAGES, 0);
    let file = file(&here, &memory);
    map_object(&here, space, (0, PAGES), Prot::READ, SHARED, (&file, 0));
    map(&here, space, 1000, 2000, RW);
    space.mlock(&here, AT, PAGES * P, MemoryLock::OnFault).unwrap();
    (0..PAGES).for_each(|page| assert_eq!(load(&here, space, AT + page * P), Ok(page + 1)));
    let ended = &AtomicBool::new(false);
    thread::scope(|scope| {
        for id in 2..2 + OTHERS {
            scope.spawn(move || {
                let cpu = cpu(vm, id);
                while !ended.load(Ordering::Relaxed) {
                    cpu.reclaim(1);
                }
            });
        }
        let taker = scope.spawn(move || {
            let there = cpu(vm, 1);
            (1000..3000).find(|page| store(&there, space, AT + page * P, *page).is_err())
        });
        let since = Instant::now();
        while !taker.is_finished() && since.elapsed() < Duration::from_secs(20) {
            here.serve_flushes();
            thread::yield_now();
        }
        let is_told = taker.is_finished();
        ended.store(true, Ordering::Relaxed);
        assert!(taker.join().unwrap().is_some());
        assert!(is_told, "a CPU waits for scans of other CPUs that find no page");
    });
    assert_eq!(file.resident_pages(&here), PAGES);
}

/// A CPU stores to more private memory than available. Another CPU repeatedly scans for evictable
/// pages where no page is evictable, and holds the turn to write to the swap area most of the time.
fn stores_beside(
    looks: impl Fn(&TestCpu<'_>, &TestSpace) + Sync,
    keeps: impl Fn(&TestCpu<'_>, &TestSpace),
) {
    let vm = guest::vm(3, 512);
    let main = cpu(&vm, 2);
    swap_on(&main, 4096);
    let [kept, space] = [0, 1].map(|_| Space::new(&main).unwrap());
    map(&main, &kept, 0, 32, RW);
    (0..32).for_each(|page| store(&main, &kept, AT + page * P, page).unwrap());
    keeps(&main, &kept);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let cpu0 = cpu(&vm, 0);
            while !done.load(Ordering::Relaxed) {
                looks(&cpu0, &kept);
            }
        });
        let cpu1 = cpu(&vm, 1);
        map(&cpu1, &space, 0, 2000, RW);
        let stored = (0..2000).filter(|page| store(&cpu1, &space, AT + page * P, *page).is_ok());
        let stored = stored.count();
        done.store(true, Ordering::Relaxed);
        assert_eq!(stored, 2000);
    });
    space.exit(&main);
    kept.exit(&main);
}

#[test]
fn a_cpu_without_evictions_passes_the_turn_on() {
    let locks = |cpu: &TestCpu<'_>, space: &TestSpace| {
        space.mlock(cpu, AT, 32 * P, MemoryLock::Now).unwrap();
    };
    stores_beside(|cpu, space| space.evict(cpu, AT, 32 * P).unwrap(), locks);
    // These pins last for the whole test.
    stores_beside(
        |cpu, space| space.madvise(cpu, AT, 32 * P, Advice::PageOut).unwrap(),
        |cpu, space| core::mem::forget(space.pin(cpu, AT, 32 * P, true).unwrap()),
    );
}
