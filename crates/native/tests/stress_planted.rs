//! Tests of the storms' detectors: each test plants one fault that the storms must detect.

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

/// Lets `cpu` skip the invalidations requested during `meanwhile`.
fn leaving_out<R>(native: &Native, cpu: CpuId, meanwhile: impl FnOnce() -> R) -> R {
    // SAFETY: the guests here only load through stale translations, or store to pages that still
    // belong to them or a child; the plant is removed afterwards.
    unsafe { native.machine().plant_skipped_invalidations(cpu, u32::MAX) };
    let result = meanwhile();
    // SAFETY: as above.
    unsafe { native.machine().plant_skipped_invalidations(cpu, 0) };
    result
}

/// A frame is reused before all CPUs have dropped it: the other CPU acknowledges the request
/// without a drop.
#[test]
fn a_frame_reused_early_is_detected() {
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

/// A permission to store outlives a fork: the frame has the same owner, but the entry and the
/// child's snapshot reveal the defect.
#[test]
fn a_kept_permission_to_store_is_detected() {
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
    assert_eq!(changed, Ok(true), "the child has a store from after the fork");
    let seen = native.machine().violations();
    assert!(seen.iter().any(|violation| violation.stale == Stale::Entry), "{seen:?}");
    // Without the plant, the permission is not kept.
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

/// A count that is wrong by one frame.
#[test]
fn a_lost_frame_is_detected_by_the_audit() {
    let native = machine(1);
    let process = native.process().unwrap();
    process.run(|cpu| map(cpu).and_then(|at| Ok(cpu.store(at, 1u64)?))).unwrap();
    native.audit(&[&process]).unwrap();
    // For an audit without this process, its page and tables are lost.
    assert!(native.audit(&[]).is_err());
    process.exit();
    assert_eq!(native.audit(&[]).unwrap().taken(), 1);
}
