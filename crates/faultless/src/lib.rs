//! faultless: a virtual-memory subsystem that serves page faults without a lock.
//!
//! For people who build kernels, unikernels, hypervisors and emulators. The subsystem needs a
//! [`Machine`] beneath it — memory, CPUs, their TLBs, a way to interrupt them — and gives you address
//! spaces with Linux's calls and errors, whose faults take no lock.
//!
//! ```
//! use faultless::{Access, CpuId, FrameNumber, Invalidate, Machine, MapFlags, MemoryRegion, Prot};
//! use faultless::{PAGE_SIZE, Space, SpaceId, ThreadStreams, Vm};
//!
//! /// One CPU without a TLB, and 16 MiB of memory.
//! struct Tiny {
//!     memory: *mut u8,
//!     regions: [MemoryRegion; 1],
//! }
//!
//! unsafe impl Send for Tiny {}
//! unsafe impl Sync for Tiny {}
//! unsafe impl Machine for Tiny {
//!     fn cpus(&self) -> usize { 1 }
//!     fn regions(&self) -> &[MemoryRegion] { &self.regions }
//!     fn frame_bytes(&self, frame: FrameNumber) -> *mut u8 {
//!         unsafe { self.memory.add((frame.0 as u64 * PAGE_SIZE) as usize) }
//!     }
//!     fn invalidate(&self, _: CpuId, _: SpaceId, _: Invalidate) {}
//!     fn invalidate_all(&self, _: CpuId) {}
//!     fn interrupt(&self, _: CpuId) {}
//! }
//!
//! let layout = std::alloc::Layout::from_size_align(16 << 20, 4096).unwrap();
//! let memory = unsafe { std::alloc::alloc(layout) };
//! let regions = [MemoryRegion { node: 0, first: FrameNumber(1), frames: 4095 }];
//! let vm = Vm::new(Tiny { memory, regions }).unwrap();
//! let cpu = unsafe { vm.cpu(CpuId(0)) };
//!
//! let space = Space::new(&cpu)?;
//! let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS;
//! let at = space.mmap(&cpu, 0, 1 << 20, Prot::READ | Prot::WRITE, flags)?;
//! space.activate(&cpu); // and load the page-table base with `space.root()`
//! let thread = ThreadStreams::new(); // one for each thread of your programs
//! space.fault_of(&cpu, &thread, at, Access::Write).unwrap(); // what your page-fault handler calls
//! print!("{}{}", space.maps(&cpu), vm.totals());
//! unsafe { space.deactivate(&cpu) }; // once another root is loaded
//! space.exit(&cpu);
//! # Ok::<(), faultless::Error>(())
//! ```
//!
//! # The laws
//!
//! 1. *Never a stale owner.* No CPU reads or writes a frame through a translation older than the
//!    frame's present ownership.
//! 2. *Never a lost write.* What a store wrote, every later load sees.
//! 3. *The entry is the lock.* A speculative fault that succeeds writes one shared cache line, that of
//!    the entry it installs (and the count of a frame that it copies or maps from an object; where it
//!    maps pages around its own, the entries and counts of all).
//! 4. *Doubt never kills.* SIGSEGV, SIGBUS and out-of-memory are decided under the lock only.
//! 5. *An abort leaves no trace.* The page that it prepared goes to the fallback.
//! 6. *Every frame is accounted for* at any quiet moment: [`audit`].
//! 7. *Debt is paid before use*, by the type of a [`frame::Frame`].
//! 8. *One path.* The fault is written once: [`fault`].
//!
//! # Where to look
//!
//! [`space`] has the calls, one file each; [`fault`] the fault; [`table`] the page
//! tables, and in `table::protocol` the protocol that everything rests on; [`tlb`] flushes and
//! shootdowns; [`rmap`] reverse-map roots; [`mod@file`] the objects behind files and shared memory; [`frame`] physical memory;
//! [`sync`] what CPUs agree with, and in `sync::order` the lock order; [`stat`] counters and trace points; [`knob`] what can be switched.
//! [`safety`] says what a kernel promises, and why nothing else can go wrong.
#![no_std]

extern crate alloc;
#[cfg(any(test, loom, shuttle))]
extern crate std;

pub mod addr;
pub mod audit;
pub mod error;
pub mod fault;
pub mod file;
pub mod frame;
pub mod heap;
mod identity;
pub mod knob;
pub mod machine;
mod reclaim;
pub mod rmap;
pub mod safety;
pub mod space;
pub mod stat;
pub mod sync;
pub mod table;
#[cfg(test)]
mod testing;
pub mod tlb;
mod vm;

pub use addr::{FrameNumber, PAGE_SHIFT, PAGE_SIZE, USER_END, VirtRange};
pub use error::{Errno, Error, OutOfMemory};
pub use fault::prefault::ThreadStreams;
pub use fault::{Access, FaultError, FaultKind};
pub use file::Object;
pub use heap::Shared;
pub use knob::{AnonVmaCheck, KNOBS, KnobError, Locking, Setting};
pub use machine::{CpuId, Invalidate, MAX_CPUS, Machine, MemoryRegion, SpaceId};
pub use space::{
    Advice, Area, AreaInfo, Backing, Copies, Label, Lock, MapFlags, PageInfo, Prot, RemapFlags,
    Space, VmaFlags,
};
pub use stat::{Counter, Point, Totals, TraceEvent};
pub use vm::{Cpu, Vm};
