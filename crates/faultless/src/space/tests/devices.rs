//! Device memory: fixed physical ranges outside the subsystem's memory.

use crate::addr::{FrameNumber, PAGE_SIZE as P};
use crate::audit::audit;
use crate::error::Errno;
use crate::fault::{Access, FaultError, FaultKind};
use crate::frame::FrameUse;
use crate::knob::{Locking, Setting};
use crate::machine::Machine;
use crate::space::{
    AccessError, Advice, DeviceMemory, MapFlags, MemoryLock, Prot, RemapFlags, Space, VmaFlags,
};
use crate::stat::Counter;
use crate::table::format::CacheMode;
use crate::testing::guest::{self, cpu, load, store};
use crate::testing::{DEVICE_FRAMES, TestMachine};
use crate::vm::Cpu;
use std::string::ToString;
use std::vec::Vec;

const AT: u64 = 1 << 30;
const TO: u64 = 2 << 30;
const RW: Prot = Prot::READ.union(Prot::WRITE);
const FIXED: MapFlags = MapFlags::SHARED.union(MapFlags::FIXED);
const SEGV: FaultError = FaultError::Segv { mapped: true };

type TestCpu<'v> = Cpu<'v, TestMachine>;
type TestSpace = Space<TestMachine>;

fn device(cpu: &TestCpu<'_>, cache: CacheMode) -> DeviceMemory {
    let first = cpu.vm().machine().device();
    DeviceMemory { first, cache, tag: 0, may_write: true }
}

fn map(
    cpu: &TestCpu<'_>,
    space: &TestSpace,
    pages: u64,
    (prot, flags): (Prot, MapFlags),
    device: DeviceMemory,
) -> Result<u64, Errno> {
    // SAFETY: device memory of the test machine, without other users and without caches. Otherwise,
    // the call is refused.
    unsafe { space.mmap_device(cpu, AT, pages * P, prot, flags, device) }
        .map_err(|error| error.errno)
}

/// Runs `test` under each locking policy with a space that maps the first pages of the device
/// uncached at `AT`. The audit must balance in the end.
fn with_device(pages: u64, test: impl Fn(&TestCpu<'_>, &TestSpace)) {
    for locking in Locking::ALL {
        let vm = guest::vm(2, 256);
        vm.set(Setting::Locking(locking));
        let cpu = cpu(&vm, 0);
        let space = Space::new(&cpu).unwrap();
        let uncached = device(&cpu, CacheMode::Uncached);
        assert_eq!(map(&cpu, &space, pages, (RW, FIXED), uncached), Ok(AT));
        test(&cpu, &space);
        cpu.drain();
        audit(&cpu, &[&space]).unwrap();
        space.exit(&cpu);
        cpu.drain();
        assert_eq!(vm.free_frames() + 1, vm.total_frames());
    }
}

/// Which pages of the device are mapped from `at` on.
fn mapped(cpu: &TestCpu<'_>, space: &TestSpace, at: u64, pages: u64) -> Vec<Option<u32>> {
    let page = |page| space.page_at(cpu, at + page * P);
    let first = cpu.vm().machine().device().0;
    (0..pages).map(|at| page(at).map(|at| at.frame.0 - first)).collect()
}

#[test]
fn a_fault_maps_device_frames_with_their_cache_mode() {
    with_device(8, |cpu, space| {
        let before = cpu.vm().totals();
        assert_eq!(space.fault_remote(cpu, AT + 3 * P, Access::Write), Ok(FaultKind::Device));
        let all: Vec<_> = (0..8).map(Some).collect();
        assert_eq!(mapped(cpu, space, AT, 8), all, "neighbouring pages are also mapped");
        let at = space.page_at(cpu, AT + 3 * P + 8).unwrap();
        assert_eq!((at.device, at.prot), (Some(CacheMode::Uncached), RW));
        assert!(space.entry_at(cpu, AT + 3 * P).is_dirty() && !space.entry_at(cpu, AT).is_dirty());
        let page = space.page_at(cpu, AT).unwrap();
        assert_eq!((page.usage, page.exclusive), (FrameUse::Device, false));
        let counts = cpu.vm().totals().since(&before);
        assert_eq!((counts.get(Counter::DevicePage), counts.get(Counter::AnonPage)), (1, 0));
        assert_eq!(space.resident_pages(cpu), 0);
        // A store through one mapping is visible through every other mapping.
        store(cpu, space, AT + 5 * P, 55).unwrap();
        let frame = FrameNumber(cpu.vm().machine().device().0 + 5);
        // SAFETY: a page of the machine, aligned.
        let word = unsafe { cpu.vm().machine().frame_bytes(frame).cast::<u64>().read() };
        assert_eq!((word, load(cpu, space, AT + 5 * P)), (55, Ok(55)));
        assert_eq!(cpu.vm().frame_owner(frame), 0);
    });
}

#[test]
fn every_cache_mode_round_trips() {
    with_device(1, |cpu, space| {
        let modes = [
            CacheMode::WriteBack,
            CacheMode::WriteThrough,
            CacheMode::WriteCombining,
            CacheMode::Uncached,
        ];
        for mode in modes {
            assert_eq!(map(cpu, space, 2, (Prot::READ, FIXED), device(cpu, mode)), Ok(AT));
            load(cpu, space, AT + P).unwrap();
            assert_eq!(space.page_at(cpu, AT + P).unwrap().device, Some(mode));
            // Through every change.
            space.mprotect(cpu, AT, 2 * P, Prot::empty()).unwrap();
            assert_eq!(space.page_at(cpu, AT).unwrap().device, Some(mode));
            space.mprotect(cpu, AT, 2 * P, RW).unwrap();
            store(cpu, space, AT, 1).unwrap();
            assert_eq!(space.page_at(cpu, AT).unwrap().device, Some(mode));
        }
        // The subsystem's own.
        let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS | MapFlags::FIXED;
        space.mmap(cpu, AT, 2 * P, RW, flags).unwrap();
        load(cpu, space, AT).unwrap();
        store(cpu, space, AT + P, 1).unwrap();
        assert!([AT, AT + P].iter().all(|at| space.page_at(cpu, *at).unwrap().device.is_none()));
    });
}

#[test]
fn ranges_outside_device_memory_are_refused() {
    with_device(1, |cpu, space| {
        let own = device(cpu, CacheMode::Uncached);
        let first = own.first.0;
        let at = |first| DeviceMemory { first: FrameNumber(first), ..own };
        let try_map = |pages, kind, device| map(cpu, space, pages, kind, device);
        // A frame of the machine's at the end, at the start, inside, and all.
        for (from, pages) in [(0, 2), (first - 1, 2), (100, 1), (0, 1000)] {
            assert_eq!(try_map(pages, (RW, FIXED), at(from)), Err(Errno::EINVAL), "{from} {pages}");
        }
        assert_eq!(try_map(1, (Prot::READ, FIXED), at(0)), Ok(AT), "no frame of a region");
        assert_eq!(try_map(2, (RW, FIXED), at(u32::MAX)), Err(Errno::EINVAL));
        assert_eq!(try_map(1, (RW, FIXED), at(u32::MAX)), Ok(AT));
        for flags in [MapFlags::PRIVATE, MapFlags::empty(), FIXED | MapFlags::PRIVATE] {
            assert_eq!(try_map(1, (Prot::READ, flags), own), Err(Errno::EINVAL), "{flags:?}");
        }
        assert_eq!(try_map(1, (RW, FIXED | MapFlags::GROWSDOWN), own), Err(Errno::EINVAL));
        assert_eq!(try_map(0, (RW, FIXED), own), Err(Errno::EINVAL));
        let read_only = DeviceMemory { may_write: false, ..own };
        assert_eq!(try_map(1, (RW, FIXED), read_only), Err(Errno::EACCES));
        assert_eq!(try_map(1, (Prot::READ, FIXED), read_only), Ok(AT));
        let refused = space.mprotect(cpu, AT, P, RW).unwrap_err();
        assert_eq!(refused.errno, Errno::EACCES);
        assert_eq!(store(cpu, space, AT, 1), Err(SEGV));
    });
}

#[test]
fn device_memory_can_be_populated_and_listed() {
    with_device(1, |cpu, space| {
        let named = DeviceMemory { tag: 9, ..device(cpu, CacheMode::WriteCombining) };
        let flags = FIXED | MapFlags::POPULATE | MapFlags::LOCKED;
        assert_eq!(map(cpu, space, 20, (RW, flags), named), Ok(AT));
        assert!(mapped(cpu, space, AT, 20).iter().all(Option::is_some));
        let mut seen = Vec::new();
        space.areas(cpu, |area| {
            seen.push((area.tag, area.offset, area.resident, area.zero, area.name));
            assert_eq!(area.flags, VmaFlags::SHARED);
        });
        assert_eq!(seen, [(9, u64::from(named.first.0) * P, 0, 0, "")]);
        assert!(space.maps(cpu).to_string().contains("rw-s"));
        assert_eq!(space.shared_place(cpu, AT), None);
    });
}

#[test]
fn moved_parts_keep_their_frames() {
    with_device(12, |cpu, space| {
        load(cpu, space, AT).unwrap();
        // A hole, a protected page, a moved end.
        space.munmap(cpu, AT + 3 * P, P).unwrap();
        space.mprotect(cpu, AT + 5 * P, P, Prot::READ).unwrap();
        let to = RemapFlags::MAYMOVE | RemapFlags::FIXED;
        space.mremap(cpu, AT + 8 * P, 4 * P, 4 * P, to, TO).unwrap();
        assert_eq!(mapped(cpu, space, TO, 4), [8, 9, 10, 11].map(Some));
        assert_eq!(mapped(cpu, space, AT + 2 * P, 3), [Some(2), None, Some(4)]);
        assert_eq!(load(cpu, space, AT + 3 * P), Err(FaultError::Segv { mapped: false }));
        assert_eq!(store(cpu, space, AT + 5 * P, 1), Err(SEGV));
        store(cpu, space, TO + P, 9).unwrap();
        // For unmapped pages, the fault finds the same frames.
        let fresh = device(cpu, CacheMode::Uncached);
        assert_eq!(map(cpu, space, 12, (RW, FIXED), fresh), Ok(AT));
        space.munmap(cpu, AT, 2 * P).unwrap();
        space.mremap(cpu, AT + 6 * P, 6 * P, 6 * P, to, TO).unwrap();
        assert_eq!(mapped(cpu, space, TO, 6), [None; 6]);
        assert_eq!(load(cpu, space, TO + 3 * P), Ok(9));
        assert_eq!(space.map_count(cpu), 2);
        // At the old address, the parts merge to one VMA again.
        space.mremap(cpu, TO, 6 * P, 6 * P, to, AT + 6 * P).unwrap();
        assert_eq!(space.map_count(cpu), 1);
        let remap = |new, flags| {
            let done = space.mremap(cpu, AT + 2 * P, 10 * P, new, flags, TO);
            done.map_err(|error| error.errno)
        };
        assert_eq!(remap(11 * P, RemapFlags::MAYMOVE), Err(Errno::EFAULT));
        assert_eq!(remap(11 * P, RemapFlags::empty()), Err(Errno::EFAULT));
        let keep = RemapFlags::MAYMOVE | RemapFlags::DONTUNMAP;
        assert_eq!(remap(10 * P, keep), Err(Errno::EINVAL));
        let again = space.mremap(cpu, AT + 2 * P, 0, P, to, TO);
        assert_eq!(again.map_err(|error| error.errno), Err(Errno::EFAULT));
        assert_eq!(remap(4 * P, RemapFlags::empty()), Ok(AT + 2 * P));
    });
}

#[test]
fn a_child_has_the_same_frames() {
    with_device(4, |cpu, space| {
        store(cpu, space, AT, 1).unwrap();
        let child = space.fork(cpu).unwrap();
        store(cpu, &child, AT, 2).unwrap();
        assert_eq!(load(cpu, space, AT), Ok(2));
        assert_eq!(mapped(cpu, &child, AT, 1), [Some(0)]);
        cpu.drain();
        audit(cpu, &[space, &child]).unwrap();
        child.exit(cpu);
        space.madvise(cpu, AT, 4 * P, Advice::DontFork).unwrap();
        let child = space.fork(cpu).unwrap();
        assert_eq!(load(cpu, &child, AT), Err(FaultError::Segv { mapped: false }));
        child.exit(cpu);
        assert_eq!(load(cpu, space, AT), Ok(2));
    });
}

#[test]
fn advice_and_locks_are_as_on_linux() {
    with_device(4, |cpu, space| {
        store(cpu, space, AT, 1).unwrap();
        let advise = |advice| space.madvise(cpu, AT, 4 * P, advice).map_err(|error| error.errno);
        for advice in [
            Advice::DontNeed,
            Advice::DontNeedLocked,
            Advice::Free,
            Advice::DoFork,
            Advice::WipeOnFork,
            Advice::PopulateRead,
            Advice::PopulateWrite,
        ] {
            assert_eq!(advise(advice), Err(Errno::EINVAL), "{advice:?}");
        }
        for advice in [Advice::Normal, Advice::WillNeed, Advice::DontFork, Advice::KeepOnFork] {
            assert_eq!(advise(advice), Ok(()), "{advice:?}");
        }
        assert!(mapped(cpu, space, AT, 4).iter().all(Option::is_some));
        space.mlock(cpu, AT, 4 * P, MemoryLock::Now).unwrap();
        assert_eq!(space.locked_pages(cpu), 0);
        space.mincore(cpu, AT, 4 * P, |there| assert!(!there)).unwrap();
    });
}

#[test]
fn remote_access_to_device_memory_is_refused() {
    with_device(DEVICE_FRAMES.into(), |cpu, space| {
        let refused = Err(AccessError { done: 0, error: SEGV });
        assert_eq!(space.read_bytes(cpu, AT, &mut [0; 8]), refused);
        assert_eq!(space.write_bytes(cpu, AT + P, &[0; 8]), refused);
        // A software MMU learns that the frame belongs to the kernel.
        let at = space.walk(cpu, AT + P, Access::Write).unwrap();
        assert_eq!(at.device, Some(CacheMode::Uncached));
    });
}
