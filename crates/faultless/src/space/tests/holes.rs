//! An operation returns an error for a hole after the unmapping of the hole is flushed.

use crate::addr::{PAGE_SIZE, VirtRange};
use crate::error::Errno;
use crate::fault::{Access, FaultError};
use crate::knob::{Locking, Setting};
use crate::machine::CpuId;
use crate::space::{MapFlags, Prot, Space};
use crate::testing::TestMachine;
use crate::testing::guest::{self, cpu, store};
use crate::vm::Cpu;
use core::sync::atomic::{AtomicBool, Ordering};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

const AT: u64 = 1 << 30;
const P: u64 = PAGE_SIZE;
const RW: Prot = Prot::READ.union(Prot::WRITE);
const FIXED: MapFlags = MapFlags::PRIVATE.union(MapFlags::ANONYMOUS).union(MapFlags::FIXED);

/// CPU 0 unmaps a page. CPU 1, which runs the space and serves no request in the meantime, may
/// still use the page. CPU 1 runs `ask` as soon as the tree has the hole. `ask` must not return
/// before CPU 1 has flushed.
fn flushed_before_told(
    locking: Locking,
    above: bool,
    ask: impl Fn(&Cpu<'_, TestMachine>, &Space<TestMachine>) + Sync,
) {
    let vm = guest::vm(2, 128);
    vm.set(Setting::Locking(locking));
    let cpus = [cpu(&vm, 0), cpu(&vm, 1)];
    let space = Space::new(&cpus[0]).unwrap();
    space.mmap(&cpus[0], AT, P, RW, FIXED).unwrap();
    if above {
        space.mmap(&cpus[0], AT + 64 * P, P, RW, FIXED).unwrap();
    }
    store(&cpus[0], &space, AT, 1).unwrap();
    space.activate(&cpus[0]);
    space.activate(&cpus[1]);
    // The space is shared from now on.
    assert!(space.is_mapped(&cpus[1], VirtRange::page(AT)));
    vm.machine().invalidated.lock().unwrap().clear();
    let [first, second] = cpus;
    let done = AtomicBool::new(false);
    let mut flushed = false;
    thread::scope(|scope| {
        let (space, done) = (&space, &done);
        scope.spawn(move || {
            space.munmap(&first, AT, P).unwrap();
            done.store(true, Ordering::Release);
        });
        while space.is_mapped(&second, VirtRange::page(AT)) {
            thread::yield_now();
        }
        // The other thread waits for this CPU, whatever the result of `ask`.
        let outcome = catch_unwind(AssertUnwindSafe(|| ask(&second, space)));
        let all = vm.machine().invalidated.lock().unwrap();
        flushed = all.iter().any(|(cpu, ..)| *cpu == CpuId(1));
        drop(all);
        while !done.load(Ordering::Acquire) {
            second.serve_flushes();
            thread::yield_now();
        }
        outcome.unwrap();
    });
    assert!(flushed, "CPU 1 saw the hole before its flush ({locking:?}, {above})");
}

const NOTHING: FaultError = FaultError::Segv { mapped: false };

#[test]
fn a_fault_in_a_hole_below_a_mapping_returns_after_the_flush() {
    for locking in Locking::ALL {
        flushed_before_told(locking, true, |cpu, space| {
            assert_eq!(space.fault_remote(cpu, AT, Access::Read), Err(NOTHING));
        });
    }
}

/// No mapping is above the address, so no stack is searched, and no lock delays the fault.
#[test]
fn a_fault_in_a_hole_above_everything_returns_after_the_flush() {
    for locking in Locking::ALL {
        flushed_before_told(locking, false, |cpu, space| {
            assert_eq!(space.fault_remote(cpu, AT, Access::Read), Err(NOTHING));
        });
    }
}

#[test]
fn a_remote_access_to_a_hole_returns_after_the_flush() {
    for locking in Locking::ALL {
        flushed_before_told(locking, false, |cpu, space| {
            // Under the lock of a baseline, the page is readable until its entry is empty.
            let error = loop {
                if let Err(error) = space.read_bytes(cpu, AT, &mut [0]) {
                    break error;
                }
            };
            assert_eq!(error.error, NOTHING);
        });
    }
}

#[test]
fn mincore_of_a_hole_returns_after_the_flush() {
    for locking in Locking::ALL {
        flushed_before_told(locking, false, |cpu, space| {
            let outcome = space.mincore(cpu, AT, P, |_| {});
            assert_eq!(outcome.map_err(|error| error.errno), Err(Errno::ENOMEM));
        });
    }
}
