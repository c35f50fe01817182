//! faultless: a virtual-memory subsystem that serves page faults without a lock.
#![no_std]

extern crate alloc;
#[cfg(any(test, loom))]
extern crate std;

pub mod addr;
pub mod audit;
pub mod error;
pub mod fault;
pub mod file;
pub mod frame;
pub mod heap;
pub mod knob;
pub mod machine;
pub mod rmap;
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
pub use fault::{Access, FaultError, FaultKind};
pub use knob::{AnonVmaCheck, KNOBS, KnobError, Locking, Setting};
pub use machine::{CpuId, Invalidate, MAX_CPUS, Machine, MemoryRegion, SpaceId};
pub use space::{Advice, AreaInfo, MapFlags, Prot, RemapFlags, Space, VmaFlags};
pub use stat::{Counter, Point, Totals, TraceEvent};
pub use vm::{Cpu, Vm};
