//! Processes: after a fork, the writes of one process are invisible to the other process.

use crate::common::{PAGE, PRIVATE, RW, SHARED, machine, map};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use faultless::Advice;
use faultless_native::{Signal, Stop};

#[test]
fn parent_and_child_are_separate_after_the_fork() {
    let native = machine(1);
    let process = native.process().unwrap();
    process
        .run(|cpu| {
            let a = map(cpu, 3)?;
            let s = cpu.mmap(None, PAGE, RW, SHARED)?;
            for page in 0..2 {
                cpu.store(a + page * PAGE, 10 + page)?;
            }
            cpu.store(s, 1u64)?;
            let child = cpu.fork()?;
            cpu.store(a, 99u64)?;
            cpu.switch(&child, |cpu| {
                assert_eq!(cpu.load::<u64>(a)?, 10);
                assert_eq!(cpu.load::<u64>(a + PAGE)?, 11);
                assert_eq!(cpu.load::<u64>(a + 2 * PAGE)?, 0);
                cpu.store(a + PAGE, 77u64)?;
                cpu.store(a + 2 * PAGE, 78u64)?;
                cpu.store(s, 2u64)?;
                Ok(())
            })?;
            assert_eq!(cpu.load::<u64>(a)?, 99);
            assert_eq!(cpu.load::<u64>(a + PAGE)?, 11);
            assert_eq!(cpu.load::<u64>(a + 2 * PAGE)?, 0);
            assert_eq!(cpu.load::<u64>(s)?, 2, "shared memory is shared");
            cpu.exit(child);
            cpu.store(a + PAGE, 12u64)?;
            Ok(())
        })
        .unwrap();
    native.audit(&[&process]).unwrap();
    process.exit();
    native.audit(&[]).unwrap();
}

#[test]
fn a_store_racing_with_fork_reaches_exactly_one_side() {
    let native = machine(2);
    let process = native.process().unwrap();
    let a = process.run(|cpu| map(cpu, 1)).unwrap();
    let (done, stores) = (AtomicBool::new(false), AtomicU64::new(0));
    process
        .run_threads(2, |cpu, number| {
            if number == 0 {
                let mut value = 0u64;
                while !done.load(Ordering::Acquire) {
                    assert_eq!(cpu.load::<u64>(a)?, value, "a write was lost");
                    value += 1;
                    cpu.store(a, value)?;
                    stores.store(value, Ordering::Release);
                }
                return Ok(());
            }
            for _ in 0..100 {
                let child = cpu.fork()?;
                let parent = cpu.load::<u64>(a)?;
                let seen = cpu.switch(&child, |cpu| {
                    let seen = cpu.load::<u64>(a)?;
                    let before = stores.load(Ordering::Acquire);
                    while stores.load(Ordering::Acquire) == before {
                        cpu.poll();
                        std::thread::yield_now();
                    }
                    assert_eq!(cpu.load::<u64>(a)?, seen, "the parent wrote into the child");
                    cpu.store(a, u64::MAX)?;
                    Ok(seen)
                })?;
                assert!(seen <= parent);
                cpu.exit(child);
            }
            done.store(true, Ordering::Release);
            Ok(())
        })
        .unwrap();
    native.audit(&[&process]).unwrap();
    process.exit();
    native.audit(&[]).unwrap();
}

#[test]
fn fork_advice_is_followed() {
    let native = machine(1);
    let process = native.process().unwrap();
    process
        .run(|cpu| {
            let [kept, wiped] = [0x10_0000, 0x20_0000];
            let fixed = PRIVATE.union(faultless::MapFlags::FIXED);
            for a in [kept, wiped] {
                cpu.mmap(a, PAGE, RW, fixed)?;
                cpu.store(a, 5u8)?;
            }
            cpu.madvise(kept, PAGE, Advice::DontFork)?;
            cpu.madvise(wiped, PAGE, Advice::WipeOnFork)?;
            let child = cpu.fork()?;
            cpu.switch(&child, |cpu| {
                assert_eq!(cpu.load::<u8>(wiped)?, 0);
                let loaded = cpu.load::<u8>(kept);
                assert_eq!(loaded, Err(Signal::Segv { addr: kept, mapped: false }));
                Ok(())
            })?;
            assert_eq!((cpu.load::<u8>(kept)?, cpu.load::<u8>(wiped)?), (5, 5));
            Ok(())
        })
        .unwrap();
    native.audit(&[&process]).unwrap();
    process.exit();
    native.audit(&[]).unwrap();
}

#[test]
fn dropped_processes_are_ended_even_by_guest_code() {
    let native = machine(1);
    let process = native.process().unwrap();
    native.audit(&[&process]).unwrap();
    let started = native.vm().free_frames();
    for _ in 0..3 {
        let stopped: Result<(), Stop> = process.run(|cpu| {
            let child = cpu.fork()?;
            let other = cpu.process()?;
            cpu.switch(&child, |cpu| {
                let a = map(cpu, 4)?;
                cpu.fill(a, 4 * PAGE, 1)?;
                Ok(())
            })?;
            drop((child, other));
            Ok(())
        });
        stopped.unwrap();
        native.audit(&[&process]).unwrap();
        assert_eq!(native.vm().free_frames(), started);
    }
}
