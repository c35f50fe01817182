//! Cached upper-level entries of a CPU: an unlinked table is no longer used.

use crate::common::{PAGE, PRIVATE, RW};
use core::sync::atomic::{AtomicU32, Ordering};
use faultless::{MapFlags, Prot};
use faultless_native::{Checked, Config, Native, NativeCpu, Signal, Stale, Violation};

/// The first page below a last-level table, and the next.
const AT: u64 = 0x4000_0000;
const BESIDE: u64 = AT + PAGE;

/// Returns the violations of one CPU that has cached a last-level table which another CPU then
/// unlinks. If `kept` is set, the CPU ignores the invalidation requests.
fn after_a_table_went(kept: bool) -> Vec<Violation> {
    let config = Config { cpus: 2, checked: Checked::Record, ..Config::default() };
    let native = Native::new(config).unwrap();
    let process = native.process().unwrap();
    let step = AtomicU32::new(0);
    let until = |cpu: &NativeCpu<'_, '_>, wanted| {
        while step.load(Ordering::Acquire) < wanted {
            cpu.poll();
            std::thread::yield_now();
        }
    };
    let done = |now| step.store(now, Ordering::Release);
    let skip = |cpu: &NativeCpu<'_, '_>, many| {
        // SAFETY: the guests only load through what stays behind; the plant is taken away again.
        unsafe { native.machine().plant_skipped_invalidations(cpu.id(), many) };
    };
    process
        .run_threads(2, |cpu, number| {
            if number == 0 {
                until(cpu, 1);
                // The walk caches the table, although the entry found there forbids the access.
                let forbidden = cpu.load::<u64>(BESIDE);
                assert!(matches!(forbidden, Err(Signal::Segv { .. })), "{forbidden:?}");
                if kept {
                    skip(cpu, u32::MAX);
                }
                done(2);
                until(cpu, 3);
                skip(cpu, 0);
                let gone = cpu.load::<u64>(BESIDE);
                assert!(matches!(gone, Err(Signal::Segv { .. })), "{gone:?}");
            } else {
                let fixed = PRIVATE | MapFlags::FIXED;
                cpu.mmap(BESIDE, PAGE, Prot::empty(), fixed)?;
                cpu.mmap(AT, PAGE, RW, fixed)?;
                cpu.store(AT, 1u64)?;
                cpu.munmap(AT, PAGE)?;
                done(1);
                until(cpu, 2);
                // No page requires a flush, only the table.
                cpu.munmap(BESIDE, PAGE)?;
                // After a grace period, for which operations wait now and then, the frame is
                // reused. These bytes, read as an entry, mean an absent page.
                for _ in 0..1000 {
                    let at = crate::common::map(cpu, 1)?;
                    cpu.munmap(at, PAGE)?;
                }
                let other = crate::common::map(cpu, 256)?;
                cpu.fill(other, 256 * PAGE, 2)?;
                done(3);
            }
            Ok(())
        })
        .unwrap();
    native.machine().violations()
}

#[test]
fn an_unlinked_table_is_not_used() {
    assert_eq!(after_a_table_went(false), []);
}

#[test]
fn the_use_of_an_unlinked_table_is_detected() {
    let seen = after_a_table_went(true);
    let table = seen.iter().find(|violation| violation.stale == Stale::Table);
    assert!(table.is_some_and(|violation| violation.addr == BESIDE), "{seen:?}");
}
