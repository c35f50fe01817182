//! Threads map, store, load and unmap pages. Another thread repeatedly compacts memory, forks, and
//! allocates blocks for a kernel. No store is lost, and no CPU uses a frame of another owner. The
//! test runs with and without deferred flushes.

use crate::common::stress::{storm, weather};
use crate::common::{PAGE, RW};
use faultless::{Advice, Counter, MapFlags, Prot, Setting};
use faultless_native::{Checked, Config, Native, NativeCpu, Signal, Stop};

/// Pages of each thread: more than two blocks of 2 MiB.
const PAGES: u64 = 1200;
const AT: u64 = 0x4000_0000;
/// The distance between the threads' pages.
const APART: u64 = 16 << 20;
/// The number of threads that load and store; one more thread compacts.
const USERS: usize = 2;

/// Runs a random operation on one page of the thread, whose word is `last`.
fn use_own(
    cpu: &NativeCpu<'_, '_>,
    at: u64,
    last: &mut u64,
    random: &mut fastrand::Rng,
) -> Result<(), Stop> {
    assert_eq!(cpu.load::<u64>(at), Ok(*last), "{at:#x}");
    match random.u32(0..8) {
        0..5 => {
            cpu.madvise(at, PAGE, Advice::DontNeed)?;
            *last = 0;
        }
        5 => {
            cpu.mprotect(at, PAGE, Prot::READ)?;
            assert_eq!(cpu.load::<u64>(at), Ok(*last), "{at:#x}");
            cpu.mprotect(at, PAGE, RW)?;
        }
        _ => {
            let value = random.u64(1..);
            match cpu.store::<u64>(at, value) {
                Ok(()) => *last = value,
                Err(signal @ Signal::Segv { .. }) => panic!("{signal}"),
                Err(signal) => return Err(signal.into()),
            }
        }
    }
    assert_eq!(cpu.load::<u64>(at), Ok(*last), "{at:#x}");
    Ok(())
}

/// Runs a compaction, or an operation that may interfere.
fn disturb(cpu: &NativeCpu<'_, '_>, random: &mut fastrand::Rng) -> Result<(), Stop> {
    let kernel = cpu.cpu();
    match random.u32(0..10) {
        0..4 => {
            kernel.compact(random.u64(1..4));
        }
        4..7 => {
            kernel.compact_ahead(random.u64(1..100));
        }
        7 => {
            let child = cpu.fork()?;
            kernel.compact(1);
            cpu.exit(child);
        }
        8 => drop(kernel.alloc_block(random.u8(0..10))),
        _ => {
            let at = AT + random.u64(0..USERS as u64) * APART + random.u64(0..PAGES) * PAGE;
            let pins = cpu.running().space().pin(kernel, at, 1, false);
            kernel.compact(2);
            drop(pins);
        }
    }
    Ok(())
}

#[test]
fn compacted_pages_are_neither_lost_nor_stale() {
    let config = Config {
        memory_bytes: 32 << 20,
        cpus: USERS + 1,
        checked: Checked::Panic,
        jitter: 3,
        ..Config::default()
    };
    let native = Native::new(config).unwrap();
    let must = [Counter::MigrateSuccess, Counter::CompactBlock, Counter::CompactIsolated];
    let mut round = 0;
    weather(&native, &must, |mode, length| {
        round += 1;
        native.vm().set(Setting::DeferredFlush(round % 3 != 0));
        let process = native.process().unwrap();
        storm(&process, USERS + 1, mode, length, |cpu, number, clock| {
            let mut random = fastrand::Rng::with_seed(round << 8 | number as u64);
            if number == USERS {
                while clock.goes_on() {
                    disturb(cpu, &mut random)?;
                }
                return Ok(());
            }
            let first = AT + number as u64 * APART;
            let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS | MapFlags::FIXED;
            cpu.mmap(first, PAGES * PAGE, RW, flags)?;
            let mut own = vec![0; PAGES as usize];
            for (at, last) in (first..).step_by(PAGE as usize).zip(&mut own) {
                *last = random.u64(1..);
                cpu.store::<u64>(at, *last)?;
            }
            while clock.goes_on() {
                let page = random.u64(0..PAGES);
                use_own(cpu, first + page * PAGE, &mut own[page as usize], &mut random)?;
            }
            for (at, last) in (first..).step_by(PAGE as usize).zip(&own) {
                assert_eq!(cpu.load::<u64>(at), Ok(*last), "{at:#x}");
            }
            Ok(())
        });
        native.audit(&[&process]).unwrap_or_else(|wrong| panic!("law 6: {wrong}"));
        process.exit();
    });
}
