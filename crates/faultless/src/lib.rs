//! faultless: a virtual-memory subsystem that serves page faults without a lock.
#![no_std]

extern crate alloc;
#[cfg(any(test, loom))]
extern crate std;

pub mod addr;
pub mod error;
pub mod frame;
pub mod machine;
pub mod sync;
#[cfg(test)]
mod testing;

pub use addr::{FrameNumber, PAGE_SHIFT, PAGE_SIZE, USER_END, VirtRange};
pub use error::{Errno, Error, OutOfMemory};
pub use machine::{CpuId, Invalidate, MAX_CPUS, Machine, MemoryRegion, SpaceId};
