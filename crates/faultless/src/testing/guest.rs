//! A program's view of a space, for tests: loads and stores that walk the tables as an MMU without
//! a TLB does, and fault.

use crate::addr::{FrameNumber, PAGE_SIZE};
use crate::audit::audit_with;
use crate::error::Errno;
use crate::fault::prefault::ThreadStreams;
use crate::fault::{Access, FaultError, FaultKind};
use crate::file::Object;
use crate::heap::Shared;
use crate::knob::{Locking, Setting};
use crate::machine::{CpuId, Machine, MemoryRegion};
use crate::space::{Backing, MapFlags, Prot, Space};
use crate::sync::atomic::Ordering;
use crate::table::Entry;
use crate::table::node::{self, LAST};
use crate::table::walk::{Reached, descend};
use crate::testing::TestMachine;
use crate::vm::{Cpu, Vm};
use std::time::{Duration, Instant};
use std::vec;

pub(crate) type TestVm = Vm<TestMachine>;
pub(crate) type TestSpace = Space<TestMachine>;
pub(crate) type TestCpu<'v> = Cpu<'v, TestMachine>;

/// The address of the tests' mappings: the start of a last-level table's range.
pub(crate) const AT: u64 = 1 << 30;
pub(crate) const P: u64 = PAGE_SIZE;
pub(crate) const RW: Prot = Prot::READ.union(Prot::WRITE);
/// Private memory at a fixed address.
pub(crate) const FIXED: MapFlags =
    MapFlags::PRIVATE.union(MapFlags::ANONYMOUS).union(MapFlags::FIXED);
/// Mappings of an object at a fixed address.
pub(crate) const SHARED: MapFlags = MapFlags::SHARED.union(MapFlags::FIXED);
pub(crate) const PRIVATE: MapFlags = MapFlags::PRIVATE.union(MapFlags::FIXED);

std::thread_local! {
    /// The test's thread is the program's.
    static THREAD: ThreadStreams = const { ThreadStreams::new() };
}

pub(crate) fn vm(cpus: usize, frames: u32) -> TestVm {
    THREAD.with(ThreadStreams::reset);
    let vm = Vm::new(TestMachine::new(cpus, frames)).unwrap();
    // Most tests choose the present pages explicitly.
    vm.set(Setting::PrefaultMaxOrder(0));
    vm
}

/// A subsystem of two CPUs and two nodes of so many frames, the first of which is near.
pub(crate) fn two_nodes(frames: u32) -> TestVm {
    THREAD.with(ThreadStreams::reset);
    let mut machine = TestMachine::new(2, 2 * frames);
    let region = |node, first, frames| MemoryRegion { node, first: FrameNumber(first), frames };
    machine.regions = vec![region(0, 1, frames - 1), region(1, frames, frames)];
    let vm = Vm::new(machine).unwrap();
    vm.set(Setting::PrefaultMaxOrder(0));
    vm
}

pub(crate) fn cpu(vm: &TestVm, id: u16) -> Cpu<'_, TestMachine> {
    // SAFETY: each test claims each CPU once.
    unsafe { vm.cpu(CpuId(id)) }
}

/// Runs `test` under each locking policy with an empty space on CPU 0 of two, with 256 frames. All
/// frames must be accounted for in the end.
pub(crate) fn with_space(test: impl Fn(&TestCpu<'_>, &TestSpace)) {
    for locking in Locking::ALL {
        let vm = vm(2, 256);
        vm.set(Setting::Locking(locking));
        let cpu = cpu(&vm, 0);
        let space = Space::new(&cpu).unwrap();
        test(&cpu, &space);
        check(&cpu, &[&space], &[], 0);
        space.exit(&cpu);
        cpu.drain();
        assert_eq!(vm.free_frames() + 1, vm.total_frames());
    }
}

/// Every frame is accounted for, and so many pages are kept by pins alone.
pub(crate) fn check(
    cpu: &TestCpu<'_>,
    spaces: &[&TestSpace],
    objects: &[&Shared<Object>],
    pinned: u64,
) {
    cpu.drain();
    assert_eq!(audit_with(cpu, spaces, objects).unwrap().pinned, pinned);
}

/// Maps private memory from the page `page` after [`AT`] on. It may be more than there are frames.
pub(crate) fn map(cpu: &TestCpu<'_>, space: &TestSpace, page: u64, pages: u64, prot: Prot) {
    let flags = FIXED | MapFlags::NORESERVE;
    space.mmap(cpu, AT + page * P, pages * P, prot, flags).unwrap();
}

/// Maps `pages` pages of an object from its page `first` on, from the page `at` after [`AT`] on.
pub(crate) fn map_object(
    cpu: &TestCpu<'_>,
    space: &TestSpace,
    (at, pages): (u64, u64),
    prot: Prot,
    flags: MapFlags,
    (object, first): (&Shared<Object>, u64),
) {
    let backing = Backing { object, first, may_write: true };
    let got = space.mmap_object(cpu, AT + at * P, pages * P, prot, flags, backing);
    assert_eq!(got, Ok(AT + at * P));
}

/// Stores to the first word of an object's page, as a kernel does.
pub(crate) fn write_object(
    cpu: &TestCpu<'_>,
    object: &Shared<Object>,
    index: u64,
    value: u64,
) -> Result<(), Errno> {
    // SAFETY: the bytes of a page, aligned.
    object.write_page(cpu, index, |at| unsafe { at.cast::<u64>().write(value) })
}

/// Returns the first word of an object's page, if the page is present.
pub(crate) fn read_object(cpu: &TestCpu<'_>, object: &Shared<Object>, index: u64) -> Option<u64> {
    // SAFETY: the bytes of a page, aligned.
    object.read_page(cpu, index, |at| at.map(|at| unsafe { at.cast::<u64>().read() })).unwrap()
}

/// The longest time for which an access waits for another CPU's read.
const LONGEST_READ: Duration = Duration::from_secs(60);

fn reach(
    cpu: &Cpu<'_, TestMachine>,
    space: &Space<TestMachine>,
    addr: u64,
    access: Access,
) -> Result<*mut u64, FaultError> {
    let (begin, mut faults) = (Instant::now(), 0);
    while faults < 8 {
        let now = space.entry_at(cpu, addr);
        let allowed = now.is_present()
            && match access {
                Access::Read => true,
                Access::Write => now.is_writable(),
                Access::Execute => now.is_executable(),
            };
        if allowed {
            let section = cpu.section();
            // SAFETY: inside a grace section.
            if let Reached::Last(slots) = unsafe { descend(cpu.vm().machine(), space.root(), addr) }
            {
                let read = Entry::NONE.used();
                let marks = if access == Access::Write { read.dirty() } else { read };
                slots[node::index(addr, LAST)].fetch_or(marks.0, Ordering::AcqRel);
            }
            drop(section);
            let bytes = cpu.vm().machine().frame_bytes(now.frame());
            return Ok(bytes.wrapping_add((addr % PAGE_SIZE) as usize).cast());
        }
        match THREAD.with(|thread| space.fault(cpu, thread, addr, access))? {
            // Another CPU reads the page, which takes long on a busy host.
            FaultKind::Pending if begin.elapsed() < LONGEST_READ => std::thread::yield_now(),
            _ => faults += 1,
        }
    }
    panic!("faults at {addr:#x} make no progress: {:?}", space.entry_at(cpu, addr));
}

pub(crate) fn load(
    cpu: &Cpu<'_, TestMachine>,
    space: &Space<TestMachine>,
    addr: u64,
) -> Result<u64, FaultError> {
    // SAFETY: the frame's bytes, inside the page, aligned.
    reach(cpu, space, addr, Access::Read).map(|at| unsafe { at.read() })
}

pub(crate) fn store(
    cpu: &Cpu<'_, TestMachine>,
    space: &Space<TestMachine>,
    addr: u64,
    value: u64,
) -> Result<(), FaultError> {
    // SAFETY: as in `load`; a store to the zero page would be a bug that the tests look for.
    reach(cpu, space, addr, Access::Write).map(|at| unsafe { at.write(value) })
}

/// Makes a call as the test's thread.
pub(crate) fn call<R>(cpu: &Cpu<'_, TestMachine>, call: impl FnOnce() -> R) -> R {
    THREAD.with(|thread| cpu.for_thread(thread, call))
}

/// Runs `fault` on CPU 0 and `worst` on CPU 1 while CPU 0 is filling its frame.
pub(crate) fn between<R>(
    vm: &TestVm,
    worst: impl FnOnce(&Cpu<'_, TestMachine>) + Send,
    fault: impl FnOnce() -> R,
) -> R {
    let other = cpu(vm, 1);
    let worst = move || worst(&other);
    vm.machine().interpose(worst, fault)
}
