//! The path by which each policy serves faults and calls, according to its counters. Comparisons of
//! the policies rely on these paths.

use crate::addr::PAGE_SIZE as P;
use crate::fault::FaultError;
use crate::knob::{Locking, Setting};
use crate::space::{MapFlags, Prot, Space};
use crate::stat::Counter::{self, *};
use crate::testing::TestMachine;
use crate::testing::guest::{self, cpu, load, store};
use crate::vm::Cpu;
use std::vec::Vec;

const AT: u64 = 1 << 30;
const RW: Prot = Prot::READ.union(Prot::WRITE);
const FIXED: MapFlags = MapFlags::PRIVATE.union(MapFlags::ANONYMOUS).union(MapFlags::FIXED);
/// How a fault or a call went.
const WAYS: [Counter; 11] = [
    Spf,
    SpfVmaChanged,
    SpfVmaNoanon,
    SpfVmaAccess,
    VmaLockSuccess,
    VmaLockAbort,
    VmaLockRetry,
    MmapLockRead,
    MmapLockWrite,
    RangeLockFault,
    RangeLockWrite,
];

/// Returns the counters of [`WAYS`] that increased while `call` ran.
fn counted<R>(cpu: &Cpu<'_, TestMachine>, call: impl FnOnce() -> R) -> Vec<Counter> {
    let before = cpu.vm().totals();
    call();
    let during = cpu.vm().totals().since(&before);
    assert!(WAYS.iter().all(|&way| during.get(way) <= 1), "{during}");
    WAYS.into_iter().filter(|&way| during.get(way) == 1).collect()
}

#[test]
fn each_policy_takes_its_own_path() {
    for locking in Locking::ALL {
        let (served, refused, called) = match locking {
            Locking::MmapLock => (MmapLockRead, Vec::from([MmapLockRead]), MmapLockWrite),
            Locking::PerVma => (VmaLockSuccess, [VmaLockAbort, MmapLockRead].into(), MmapLockWrite),
            Locking::Speculative => (Spf, [SpfVmaAccess, RangeLockFault].into(), RangeLockWrite),
        };
        let vm = guest::vm(1, 64);
        vm.set(Setting::Locking(locking));
        vm.set(Setting::EditInPlace(false));
        let cpu = cpu(&vm, 0);
        let space = Space::new(&cpu).unwrap();
        space.mmap(&cpu, AT, 8 * P, RW, FIXED).unwrap();
        store(&cpu, &space, AT, 1).unwrap();
        let way = |page: u64| counted(&cpu, || store(&cpu, &space, AT + page * P, 1).unwrap());
        assert_eq!(way(1), [served], "a store, {locking:?}");
        let way = counted(&cpu, || load(&cpu, &space, AT + 2 * P).unwrap());
        assert_eq!(way, [served], "a load, {locking:?}");
        let way = counted(&cpu, || space.mprotect(&cpu, AT + 4 * P, 4 * P, Prot::READ).unwrap());
        assert_eq!(way, [called], "a call, {locking:?}");
        let way = counted(&cpu, || {
            assert_eq!(store(&cpu, &space, AT + 4 * P, 1), Err(FaultError::Segv { mapped: true }));
        });
        assert_eq!(way, refused, "a store that is refused, {locking:?}");
        space.exit(&cpu);
    }
}
