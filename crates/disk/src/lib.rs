//! The virtio disks of the bare machine: extents of one disk are the [backing
//! stores](faultless::BackingStore) of files, and another disk is the store of the swap area.
//!
//! The command line contains the address of the disk's registers and its interrupt line, in Linux's
//! words: `virtio_mmio.device=SIZE@ADDRESS:LINE`. `start` prepares the disk, and an `Extent` of the
//! disk is a file. A needed page of an extent is read by DMA directly into its final frame. The
//! disk raises an interrupt at the end of a read, and the kernel then calls `interrupted`. A CPU
//! that waits with interrupts off calls `poll`.
//!
//! # Reads
//!
//! A run of pages is one or more requests, each for at most `MOST_SEGMENTS` pages, which need not
//! be contiguous in memory. Requests end in any order; the run ends with its last request. If the
//! queue is full, a reader completes finished requests until the queue has space.
//!
//! # Stores
//!
//! The disk with files is only read. Data stored by programs stays in memory, in the pages of the
//! file, for the lifetime of the file. So an extent only records the minimum length that the file
//! has had: bytes beyond this length read as zeros, even after the file grows again.
//!
//! # The swap disk
//!
//! A separate word contains the place of the swap disk, `swap=SIZE@ADDRESS:LINE`: the address of a
//! device's registers is fixed on the machine's board, but the order in which devices are found is
//! not. The swap disk is also written. A writer waits until the disk has the pages. During the
//! wait, the CPU completes reads and serves flush requests, as in a wait for a read. `waited`
//! counts the time of these waits. Written data has no use after the end of the machine, so the
//! driver never flushes the disk's cache.
//!
//! # Errors
//!
//! If a read of several pages fails, some of the pages may be readable. The run then ends with
//! `EAGAIN`, on which waiting faults retry, and all later reads of the extent are page by page. A
//! failed read of a single page ends with `EIO`. A failed write is reported as if no page had been
//! written.
#![no_std]

#[cfg(target_os = "none")]
extern crate alloc;

pub mod place;

#[cfg(target_os = "none")]
mod device;
#[cfg(target_os = "none")]
mod extent;
#[cfg(target_os = "none")]
mod memory;
#[cfg(target_os = "none")]
mod swap;

#[cfg(target_os = "none")]
pub use device::{
    MOST_SEGMENTS, StartError, interrupted, is_idle, pages, pages_moved, poll, start, start_swap,
    waited,
};
#[cfg(target_os = "none")]
pub use extent::Extent;
#[cfg(target_os = "none")]
pub use swap::SwapArea;
