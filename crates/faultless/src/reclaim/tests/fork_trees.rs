//! Fork trees that use more memory than available make random calls, and a model compares every
//! load.

use super::swap::{count, finish, swap_on};
use crate::audit::audit;
use crate::fault::FaultError;
use crate::knob::{Locking, Setting};
use crate::space::{Advice, MapFlags, Prot, RemapFlags, Space};
use crate::stat::Counter;
use crate::testing::guest::{self, AT, FIXED, P, RW, TestSpace, cpu, load, map, store};
use crate::testing::store::Plan;
use std::collections::BTreeMap;
use std::vec::Vec;

/// A space of a random run, and its expected contents.
struct Process {
    space: TestSpace,
    words: BTreeMap<u64, u64>,
    writable: BTreeMap<u64, bool>,
}

/// A sequence of numbers (xorshift).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

/// Runs fork trees that use more memory than available, make random calls, and compare every load
/// with a model. If `bad` is set, the store fails now and then. Only programs that need such a page
/// get an error.
fn random_run(seed: u64, locking: Locking, bad: bool) {
    const PAGES: u64 = 24;
    let vm = guest::vm(1, 128);
    vm.set(Setting::Locking(locking));
    vm.set(Setting::DeferredFlush(seed.is_multiple_of(2)));
    let cpu = cpu(&vm, 0);
    let memory = swap_on(&cpu, 160);
    let mut numbers = Numbers(seed * 7919 + 1);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, PAGES, RW);
    let writable = (0..PAGES).map(|page| (page, true)).collect();
    let mut all = Vec::from([Process { space, words: BTreeMap::new(), writable }]);
    let mut errors = 0;
    for step in 0..1500 {
        let which = numbers.below(all.len() as u64) as usize;
        let page = numbers.below(PAGES);
        let addr = AT + page * P;
        if bad && numbers.below(8) == 0 {
            memory.plan([Plan::Fail(0)]);
        }
        let count = all.len();
        let Process { space, words, writable } = &mut all[which];
        let expected = |words: &BTreeMap<u64, u64>| words.get(&page).copied().unwrap_or(0);
        match numbers.below(24) {
            0..8 => match load(&cpu, space, addr) {
                Err(FaultError::Bus | FaultError::OutOfMemory) if bad => errors += 1,
                found => assert_eq!(found, Ok(expected(words)), "seed {seed}, step {step}"),
            },
            8..14 => match store(&cpu, space, addr, step) {
                Ok(()) => drop(words.insert(page, step)),
                Err(FaultError::Bus | FaultError::OutOfMemory) if bad => errors += 1,
                Err(error) => {
                    assert_eq!(error, FaultError::Segv { mapped: true });
                    assert!(!writable[&page], "seed {seed}, step {step}");
                }
            },
            14 if count < 5 => {
                let Process { space, words, writable } = &all[which];
                if let Ok(child) = space.fork(&cpu) {
                    let (words, writable) = (words.clone(), writable.clone());
                    all.push(Process { space: child, words, writable });
                }
            }
            15 if count > 1 => all.swap_remove(which).space.exit(&cpu),
            16 => {
                cpu.reclaim(numbers.below(30));
            }
            17 | 18 => {
                let pages = 1 + numbers.below(PAGES - page);
                space.madvise(&cpu, addr, pages * P, Advice::PageOut).unwrap();
            }
            19 => {
                space.madvise(&cpu, addr, P, Advice::DontNeed).unwrap();
                words.remove(&page);
            }
            20 => {
                let allow = numbers.below(2) == 0;
                space.mprotect(&cpu, addr, P, if allow { RW } else { Prot::READ }).unwrap();
                writable.insert(page, allow);
            }
            21 => {
                let other = numbers.below(PAGES);
                let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
                if other != page && space.mremap(&cpu, addr, P, P, flags, AT + other * P).is_ok() {
                    match words.remove(&page) {
                        Some(word) => words.insert(other, word),
                        None => words.remove(&other),
                    };
                    writable.insert(other, writable[&page]);
                    space.mmap(&cpu, addr, P, RW, FIXED | MapFlags::NORESERVE).unwrap();
                    writable.insert(page, true);
                }
            }
            22 => {
                space.mmap(&cpu, addr, P, RW, FIXED | MapFlags::NORESERVE).unwrap();
                words.remove(&page);
                writable.insert(page, true);
            }
            _ => {
                if let Ok(pins) = space.pin(&cpu, addr, P, false) {
                    cpu.reclaim(4);
                    assert!(!space.entry_at(&cpu, addr).is_swapped());
                    drop(pins);
                }
            }
        }
        memory.plans.lock().unwrap().clear();
        if step % 100 == 0 {
            cpu.drain();
            audit(&cpu, &all.iter().map(|process| &process.space).collect::<Vec<_>>()).unwrap();
        }
    }
    for Process { space, words, .. } in &all {
        for page in 0..PAGES {
            let expected = words.get(&page).copied().unwrap_or(0);
            assert_eq!(load(&cpu, space, AT + page * P), Ok(expected), "seed {seed}");
        }
    }
    let [read, written] = [Counter::SwapIn, Counter::SwapOut].map(|it| count(&cpu, it));
    assert!(read > 20 && written > 20, "{read} read, {written} written");
    assert!(bad || errors == 0);
    finish(&cpu, all.into_iter().map(|process| process.space).collect());
}

#[test]
fn fork_trees_in_little_memory() {
    for seed in 1..if cfg!(miri) { 2 } else { 40 } {
        for locking in Locking::ALL {
            random_run(seed, locking, false);
        }
    }
}

#[test]
fn a_failing_store_affects_only_programs_that_need_its_pages() {
    for seed in 1..if cfg!(miri) { 2 } else { 40 } {
        random_run(seed, Locking::Speculative, true);
    }
}
