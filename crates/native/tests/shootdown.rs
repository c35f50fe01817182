//! Two threads: one thread removes a mapping or right, and the other thread gets a signal.

use crate::common::{PAGE, RW, machine, map};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use faultless::{Advice, Prot};
use faultless_native::{NativeCpu, Signal, Stop};
use std::sync::Barrier;

/// Runs `access` repeatedly on one thread until it fails. The other thread waits for the first
/// access, and then calls `change`. Returns the signal.
fn until_refused(
    access: impl Fn(&NativeCpu<'_, '_>, u64) -> Result<(), Signal> + Sync,
    change: impl Fn(&NativeCpu<'_, '_>, u64) -> Result<(), Stop> + Sync,
) -> (u64, Signal) {
    let native = machine(2);
    let process = native.process().unwrap();
    let a = process.run(|cpu| map(cpu, 1)).unwrap();
    let going = AtomicBool::new(false);
    let stopped = process
        .run_threads(2, |cpu, number| {
            if number == 1 {
                while !going.load(Ordering::Acquire) {
                    cpu.poll();
                    std::thread::yield_now();
                }
                change(cpu, a)?;
                return Ok(None);
            }
            cpu.store(a, 1u8)?;
            loop {
                if let Err(signal) = access(cpu, a) {
                    return Ok(Some(signal));
                }
                going.store(true, Ordering::Release);
            }
        })
        .unwrap();
    native.audit(&[&process]).unwrap();
    process.exit();
    native.audit(&[]).unwrap();
    let sent: u64 =
        [0, 1].map(|cpu| native.machine().interrupts(faultless::CpuId(cpu))).iter().sum();
    assert!(sent > 0, "the running thread was interrupted");
    (a, stopped[0].unwrap())
}

#[test]
fn a_running_thread_traps_on_an_unmapped_page() {
    let (a, stopped) =
        until_refused(|cpu, a| cpu.load::<u8>(a).map(drop), |cpu, a| Ok(cpu.munmap(a, PAGE)?));
    assert_eq!(stopped, Signal::Segv { addr: a, mapped: false });
}

#[test]
fn a_running_writer_traps_on_a_read_only_page() {
    let (a, stopped) =
        until_refused(|cpu, a| cpu.store(a, 1u8), |cpu, a| Ok(cpu.mprotect(a, PAGE, Prot::READ)?));
    assert_eq!(stopped, Signal::Segv { addr: a, mapped: true });
}

#[test]
fn a_running_reader_sees_zeros_after_dontneed() {
    let native = machine(2);
    let process = native.process().unwrap();
    let a = process.run(|cpu| map(cpu, 1)).unwrap();
    let rounds = AtomicU64::new(0);
    process
        .run_threads(2, |cpu, number| {
            for round in 1..=200u64 {
                if number == 0 {
                    cpu.store(a, round)?;
                    rounds.store(2 * round - 1, Ordering::Release);
                    while rounds.load(Ordering::Acquire) < 2 * round {
                        assert!([0, round].contains(&cpu.load::<u64>(a)?));
                        std::thread::yield_now();
                    }
                    assert_eq!(cpu.load::<u64>(a)?, 0, "a stale translation was used");
                } else {
                    while rounds.load(Ordering::Acquire) < 2 * round - 1 {
                        cpu.poll();
                        std::thread::yield_now();
                    }
                    cpu.madvise(a, PAGE, Advice::DontNeed)?;
                    rounds.store(2 * round, Ordering::Release);
                }
            }
            Ok(())
        })
        .unwrap();
    native.audit(&[&process]).unwrap();
    process.exit();
    native.audit(&[]).unwrap();
}

#[test]
fn a_flush_does_not_wait_for_an_idle_cpu() {
    let native = machine(2);
    let process = native.process().unwrap();
    let barrier = Barrier::new(2);
    process
        .run_threads(2, |cpu, number| {
            let a = map(cpu, 1)?;
            cpu.store(a, 1u8)?;
            if number == 0 {
                // Asleep until the other thread has finished, which must not wait for this thread.
                cpu.idle(|| barrier.wait());
                assert_eq!(cpu.load::<u8>(a)?, 1);
            } else {
                for _ in 0..10 {
                    let b = map(cpu, 1)?;
                    cpu.store(b, 1u8)?;
                    cpu.mprotect(b, PAGE, Prot::READ)?;
                    cpu.munmap(b, PAGE)?;
                }
                cpu.idle(|| barrier.wait());
            }
            Ok(())
        })
        .unwrap();
    native.audit(&[&process]).unwrap();
    process.exit();
    native.audit(&[]).unwrap();
}

#[test]
fn threads_waiting_in_guest_memory_see_every_increment() {
    let native = machine(4);
    let process = native.process().unwrap();
    let a = process.run(|cpu| map(cpu, 2)).unwrap();
    process
        .run_threads(4, |cpu, _| {
            for i in 0..2000u64 {
                cpu.fetch_add(a, 1u64)?;
                if i % 100 == 0 {
                    // Removes write access for all threads, and restores it.
                    cpu.mprotect(a + PAGE, PAGE, Prot::READ)?;
                    cpu.mprotect(a + PAGE, PAGE, RW)?;
                }
            }
            Ok(())
        })
        .unwrap();
    assert_eq!(process.run(|cpu| Ok(cpu.load::<u64>(a)?)), Ok(8000));
    native.audit(&[&process]).unwrap();
    process.exit();
    native.audit(&[]).unwrap();
}
