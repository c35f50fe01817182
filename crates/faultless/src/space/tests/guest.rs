//! A program's view of a space, for tests: loads and stores that walk the tables as an MMU without
//! a TLB does, and fault.

use crate::addr::PAGE_SIZE;
use crate::fault::prefault::ThreadStreams;
use crate::fault::{Access, FaultError};
use crate::knob::Setting;
use crate::machine::{CpuId, Machine};
use crate::space::{MapFlags, Prot, Space};
use crate::sync::atomic::Ordering;
use crate::table::Entry;
use crate::table::node::{self, LAST};
use crate::table::walk::{Reached, descend};
use crate::testing::TestMachine;
use crate::vm::{Cpu, Vm};

pub(crate) type TestVm = Vm<TestMachine>;
pub(crate) type TestSpace = Space<TestMachine>;
pub(crate) type TestCpu<'v> = Cpu<'v, TestMachine>;

/// Where tests map: the start of what a last-level table maps.
pub(crate) const AT: u64 = 1 << 30;
pub(crate) const P: u64 = PAGE_SIZE;
pub(crate) const RW: Prot = Prot::READ.union(Prot::WRITE);
/// Private memory at a fixed address.
pub(crate) const FIXED: MapFlags =
    MapFlags::PRIVATE.union(MapFlags::ANONYMOUS).union(MapFlags::FIXED);

std::thread_local! {
    /// The test's thread is the program's.
    static THREAD: ThreadStreams = const { ThreadStreams::new() };
}

pub(crate) fn vm(cpus: usize, frames: u32) -> TestVm {
    THREAD.with(ThreadStreams::reset);
    let vm = Vm::new(TestMachine::new(cpus, frames)).unwrap();
    // Most tests say themselves which pages are there.
    vm.set(Setting::PrefaultMaxOrder(0));
    vm
}

pub(crate) fn cpu(vm: &TestVm, id: u16) -> Cpu<'_, TestMachine> {
    // SAFETY: each test claims each CPU once.
    unsafe { vm.cpu(CpuId(id)) }
}

fn reach(
    cpu: &Cpu<'_, TestMachine>,
    space: &Space<TestMachine>,
    addr: u64,
    access: Access,
) -> Result<*mut u64, FaultError> {
    for _ in 0..8 {
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
        THREAD.with(|thread| space.fault_of(cpu, thread, addr, access))?;
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
