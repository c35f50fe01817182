//! What the storms look for is found: each test plants one fault that they are there to find.

use crate::common::stress::{Latest, Value};
use crate::common::{PAGE, PRIVATE, RW};
use core::sync::atomic::{AtomicU32, Ordering};
use faultless::{CpuId, MapFlags};
use faultless_native::{Checked, Config, Native, NativeCpu, Stale, Stop};

const AT: u64 = 0x10_0000;

fn machine(cpus: usize) -> Native {
    Native::new(Config { cpus, checked: Checked::Record, ..Config::default() }).unwrap()
}

fn map(cpu: &NativeCpu<'_, '_>) -> Result<u64, Stop> {
    Ok(cpu.mmap(AT, PAGE, RW, PRIVATE | MapFlags::FIXED)?)
}

/// Has `cpu` leave out what `meanwhile` makes it drop.
fn leaving_out<R>(native: &Native, cpu: CpuId, meanwhile: impl FnOnce() -> R) -> R {
    // SAFETY: the guests here only load through what stays behind, or store to pages that stay theirs
    // or a child's; the plant is taken away again.
    unsafe { native.machine().plant_skipped_invalidations(cpu, u32::MAX) };
    let result = meanwhile();
    // SAFETY: as above.
    unsafe { native.machine().plant_skipped_invalidations(cpu, 0) };
    result
}

/// A frame that comes back to use before all CPUs have dropped it: the other CPU says that it has
/// served the request, and has not.
#[test]
fn a_frame_used_again_too_early_is_caught() {
    let native = machine(2);
    let process = native.process().unwrap();
    let step = AtomicU32::new(0);
    let until = |cpu: &NativeCpu<'_, '_>, wanted| {
        while step.load(Ordering::Acquire) < wanted {
            cpu.poll();
            std::thread::yield_now();
        }
    };
    process.run(|cpu| map(cpu)).unwrap();
    process
        .run_threads(2, |cpu, number| {
            if number == 0 {
                cpu.store(AT, 1u64)?;
                leaving_out(&native, cpu.id(), || {
                    step.store(1, Ordering::Release);
                    until(cpu, 2);
                });
                assert_eq!(native.machine().violation_count(), 0);
                // The translation is there, and the frame is another's.
                cpu.load::<u64>(AT)?;
                assert!(native.machine().violation_count() > 0);
            } else {
                until(cpu, 1);
                cpu.munmap(AT, PAGE)?;
                let other = crate::common::map(cpu, 64)?;
                cpu.fill(other, 64 * PAGE, 2)?;
                step.store(2, Ordering::Release);
            }
            Ok(())
        })
        .unwrap();
    assert_eq!(native.machine().violations()[0].addr, AT);
}

/// A permission to store that outlives a fork: the frame's owner is the same, but the entry tells, and so
/// does the child's snapshot.
#[test]
fn a_permission_to_store_that_was_kept_is_caught() {
    let native = machine(1);
    let process = native.process().unwrap();
    let latest = Latest::<1>::new();
    let changed = process.run(|cpu| {
        map(cpu)?;
        let value = latest.next(0);
        value.store(cpu, AT)?;
        let child = leaving_out(&native, cpu.id(), || cpu.fork())?;
        let most = latest.of(0);
        latest.next(0).store(cpu, AT)?;
        let found = cpu.switch(&child, |cpu| Ok(Value::load(cpu, AT)?))?;
        cpu.exit(child);
        Ok(!found.may_be(0, most))
    });
    assert_eq!(changed, Ok(true), "the child has what was stored after the fork");
    let seen = native.machine().violations();
    assert!(seen.iter().any(|violation| violation.stale == Stale::Entry), "{seen:?}");
    // Without the plant it has not.
    let kept = process.run(|cpu| {
        let value = latest.next(0);
        value.store(cpu, AT)?;
        let child = cpu.fork()?;
        latest.next(0).store(cpu, AT)?;
        cpu.switch(&child, |cpu| Ok(value.check(cpu, AT)?))?;
        cpu.exit(child);
        Ok(())
    });
    assert_eq!(kept, Ok(()));
}

/// A book that is wrong by one frame.
#[test]
fn a_frame_that_is_lost_is_missed_by_the_audit() {
    let native = machine(1);
    let process = native.process().unwrap();
    process.run(|cpu| map(cpu).and_then(|at| Ok(cpu.store(at, 1u64)?))).unwrap();
    native.audit(&[&process]).unwrap();
    // To an audit that is not told of the process, its page and tables are lost.
    assert!(native.audit(&[]).is_err());
    process.exit();
    assert_eq!(native.audit(&[]).unwrap().taken(), 1);
}
