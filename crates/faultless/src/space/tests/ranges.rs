//! Ranges that no page or no user space has: each call returns, with Linux's result, and changes no
//! other page.

use super::guest::{self, TestVm, cpu, load, store};
use crate::addr::{PAGE_SIZE, VirtRange};
use crate::error::{Errno, Error};
use crate::space::{Advice, Lock, MapFlags, MemPolicy, Prot, Space};
use crate::table::format::USER_END;
use crate::testing::TestMachine;
use crate::vm::Cpu;
use std::string::String;
use std::sync::Mutex;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;
use std::vec::Vec;

const AT: u64 = 1 << 30;
const P: u64 = PAGE_SIZE;
/// Mapped pages from `AT` on, of which each second one is touched.
const PAGES: u64 = 4;
const RW: Prot = Prot::READ.union(Prot::WRITE);
const FIXED: MapFlags = MapFlags::PRIVATE.union(MapFlags::ANONYMOUS).union(MapFlags::FIXED);

type TestSpace = Space<TestMachine>;

/// Starts and ends around the mapping, the end of user space and the end of all addresses.
fn edges() -> Vec<u64> {
    let places = [0, AT, AT + P, AT + PAGES * P, USER_END - P, USER_END, 1 << 63, u64::MAX - P + 1];
    let around = |at: u64| [at.wrapping_sub(P), at.wrapping_sub(1), at, at.wrapping_add(1)];
    let mut all: Vec<u64> = places.into_iter().flat_map(around).collect();
    all.extend([AT + P / 2, u64::MAX]);
    all.sort_unstable();
    all.dedup();
    all
}

/// Runs `each` for all pairs of edges, and ends the process if a pair takes too long.
fn for_each_pair(mut each: impl FnMut(u64, u64)) {
    let current = Mutex::new(String::new());
    std::thread::scope(|scope| {
        let (sender, done) = channel::<()>();
        let current = &current;
        scope.spawn(move || {
            loop {
                match done.recv_timeout(Duration::from_secs(60)) {
                    Ok(()) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                    Err(RecvTimeoutError::Timeout) => {
                        std::eprintln!("no return: {}", current.lock().unwrap());
                        std::process::abort();
                    }
                }
            }
        });
        for &start in &edges() {
            for &end in &edges() {
                *current.lock().unwrap() = std::format!("{start:#x}, {end:#x}");
                each(start, end);
                sender.send(()).unwrap();
            }
        }
    });
}

fn mapped(cpu: &Cpu<'_, TestMachine>) -> TestSpace {
    let space = Space::new(cpu).unwrap();
    space.mmap(cpu, AT, PAGES * P, RW, FIXED).unwrap();
    touch(cpu, &space);
    space
}

fn touch(cpu: &Cpu<'_, TestMachine>, space: &TestSpace) {
    (0..PAGES).step_by(2).for_each(|page| store(cpu, space, AT + page * P, page + 1).unwrap());
}

fn vm() -> TestVm {
    guest::vm(1, 64)
}

#[test]
fn listings_of_any_range_agree_with_a_list_of_pages() {
    let vm = vm();
    let cpu = cpu(&vm, 0);
    let space = mapped(&cpu);
    for_each_pair(|start, end| {
        let range = VirtRange { start, end };
        let touches = |at: u64| start < end && start < at + P && at < end;
        let mut told = Vec::new();
        space.pages(&cpu, range, |addr, _| told.push(addr));
        let there = (0..PAGES).step_by(2).map(|page| AT + page * P);
        assert_eq!(told, there.filter(|at| touches(*at)).collect::<Vec<_>>(), "{range:?}");
        let mut areas = 0;
        space.each_area(&cpu, range, |_| {
            areas += 1;
            true
        });
        let overlaps = start < end && start < AT + PAGES * P && AT < end;
        assert_eq!(areas, u32::from(overlaps), "{range:?}");
        let covered = start >= end || AT <= start && end <= AT + PAGES * P;
        assert_eq!(space.is_mapped(&cpu, range), covered, "{range:?}");
    });
    space.exit(&cpu);
}

/// A call with an address and a length, and whether a length of 0 is an error.
type Call =
    (&'static str, bool, fn(&Cpu<'_, TestMachine>, &TestSpace, u64, u64) -> Result<(), Error>);

const CALLS: &[Call] = &[
    ("munmap", true, |cpu, space, addr, len| space.munmap(cpu, addr, len)),
    ("evict", true, |cpu, space, addr, len| space.evict(cpu, addr, len)),
    ("mprotect", false, |cpu, space, addr, len| space.mprotect(cpu, addr, len, Prot::READ)),
    ("mlock", false, |cpu, space, addr, len| space.mlock(cpu, addr, len, Lock::Now)),
    ("mincore", false, |cpu, space, addr, len| space.mincore(cpu, addr, len, |_| ())),
    ("mbind", false, |cpu, space, addr, len| space.mbind(cpu, addr, len, MemPolicy::Local)),
    ("madvise", false, |cpu, space, addr, len| space.madvise(cpu, addr, len, Advice::DontNeed)),
];

/// Returns whether `len`, rounded up to pages, is 2^64. Linux's `mlock` and `mbind` use the result,
/// 0, as the length.
const fn wraps_to_zero(len: u64) -> bool {
    len > u64::MAX - P + 1
}

#[test]
fn calls_with_any_address_and_length_return_as_linux_does() {
    let vm = vm();
    let cpu = cpu(&vm, 0);
    for (name, zero_fails, call) in CALLS {
        let space = mapped(&cpu);
        for_each_pair(|addr, len| {
            let done = call(&cpu, &space, addr, len).map_err(|error| error.errno);
            let what = || std::format!("{name} of {addr:#x}, {len:#x}: {done:?}");
            if addr % P != 0 {
                assert_eq!(done, Err(Errno::EINVAL), "{}", what());
            } else if len == 0 && (addr <= USER_END || *name != "mincore") {
                let expected = if *zero_fails { Err(Errno::EINVAL) } else { Ok(()) };
                assert_eq!(done, expected, "{}", what());
            } else if wraps_to_zero(len) && ["mlock", "mbind"].contains(name) {
                assert_eq!(done, Ok(()), "{}", what());
            } else if len > USER_END || addr > USER_END - len {
                assert!(done.is_err(), "{}", what());
            }
            if done.is_ok() || addr % P == 0 {
                // As on Linux, a call that fails at a hole may have changed the pages below the hole.
                space.mmap(&cpu, AT, PAGES * P, RW, FIXED).unwrap();
                touch(&cpu, &space);
            } else {
                assert_eq!(load(&cpu, &space, AT), Ok(1), "{}", what());
                assert_eq!(store(&cpu, &space, AT, 1), Ok(()), "{}", what());
            }
        });
        space.exit(&cpu);
    }
}
