//! Memory is not out as long as another CPU holds pages that may leave; and it is out soon where other CPUs look for such pages and find none.

use super::guest::{
    AT, P, RW, SHARED, TestCpu, TestSpace, TestVm, cpu, load, map, map_object, store,
};
use super::store::{Memory, file, finish};
use super::tiers::tiers;
use crate::heap::Shared;
use crate::space::{Advice, Lock, Prot, Space};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use std::vec::Vec;

/// Pages of the file, which may leave.
const PAGES: u64 = 8;
/// How long a CPU that waits for another is let wait.
const WHILE: Duration = Duration::from_millis(20);

/// One CPU does `what`, on two nodes, the first of which is short. In the middle of it, when it looks at a frame for the `nth` time, another takes frames until
/// there are none. Returns whether it came to that, and how many pages that may leave were in memory then.
fn taken_at(
    nth: u64,
    what: impl Fn(&TestCpu<'_>, &TestSpace, &Shared<crate::file::Object>),
) -> (bool, u64) {
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
    let (goes, left) = (AtomicBool::new(false), AtomicU64::new(0));
    let is_reached = thread::scope(|scope| {
        let taker = scope.spawn(|| {
            let there = cpu(vm, 1);
            while !goes.load(Ordering::Acquire) {
                thread::yield_now();
            }
            (0..1000).find(|page| store(&there, &other, AT + page * P, *page).is_err()).unwrap();
            left.store(file.resident_pages(&there), Ordering::Relaxed);
        });
        let meanwhile = || {
            goes.store(true, Ordering::Release);
            let since = Instant::now();
            while !taker.is_finished() && since.elapsed() < WHILE {
                thread::yield_now();
            }
        };
        let is_reached = vm.machine().at_look(nth, meanwhile, || what(&here, &space, &file));
        goes.store(true, Ordering::Release);
        while !taker.is_finished() {
            here.serve_flushes();
            thread::yield_now();
        }
        is_reached
    });
    other.exit(&here);
    finish(&here, space, Vec::from([file]));
    (is_reached, left.load(Ordering::Relaxed))
}

/// At one of `each` looks of `what`.
fn nothing_is_left(
    each: usize,
    what: impl Fn(&TestCpu<'_>, &TestSpace, &Shared<crate::file::Object>),
) {
    let mut reached = 0;
    for nth in (1..400).step_by(if cfg!(miri) { 100 } else { each }) {
        let (is_reached, left) = taken_at(nth, &what);
        if !is_reached {
            break;
        }
        reached += 1;
        assert_eq!(left, 0, "pages might have left when memory was out, at look {nth}");
    }
    assert!(reached > 0, "it looks at no frame");
}

#[test]
fn memory_is_not_out_while_another_cpu_demotes() {
    nothing_is_left(20, |cpu, _, _| _ = cpu.balance(0));
}

#[test]
fn memory_is_not_out_while_another_cpu_looks_for_pages() {
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

/// Others look again and again, and find nothing that may leave.
#[test]
fn memory_is_out_soon_while_others_look_for_pages() {
    const OTHERS: u16 = 4;
    let vm: &TestVm = &super::guest::vm(OTHERS as usize + 2, 1024);
    let here = cpu(vm, 0);
    let space = &Space::new(&here).unwrap();
    let memory = Memory::new(PAGES, 0);
    let file = file(&here, &memory);
    map_object(&here, space, (0, PAGES), Prot::READ, SHARED, (&file, 0));
    map(&here, space, 1000, 2000, RW);
    space.mlock(&here, AT, PAGES * P, Lock::OnFault).unwrap();
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
        assert!(is_told, "a CPU waits for others that look for pages and find none");
    });
    assert_eq!(file.resident_pages(&here), PAGES);
}
