//! The virtio disks of the bare machine: extents of one are the [backing stores](faultless::BackingStore) of files, and another is that of the
//! swap area.
//!
//! The command line says where the disk's registers are and which interrupt line is its own, in Linux's words:
//! `virtio_mmio.device=SIZE@ADDRESS:LINE`. `start` prepares the disk, and an `Extent` of it is a file. A page of it that is needed is read
//! by DMA into the frame where it stays. The disk says by an interrupt that it is done, and the kernel then calls `interrupted`. A CPU
//! that waits with interrupts off calls `poll`.
//!
//! # Reads
//!
//! A run of pages is one or more requests, each for at most `MOST_SEGMENTS` pages, which need not be neighbours in memory. Requests end in
//! any order; the run ends with the last of them. If the queue is full, whoever wants to read completes what is done until it is not.
//!
//! # Stores
//!
//! The disk with files is only read. What programs store stays in memory, in the pages of the file, for as long as the file exists. So an extent only
//! notes the shortest length that the file had: what is beyond reads as zeros, also once the file is longer again.
//!
//! # The swap disk
//!
//! Its place is said by a word of its own, `swap=SIZE@ADDRESS:LINE`: where a device's registers are is certain on the machine's board, and the order in which
//! devices are found is not. It is written, too. Who writes waits until the disk has the pages, and meanwhile does what a CPU does that
//! waits for its turn to read: it completes reads, and serves flush requests. How long CPUs did so is counted, `waited`. What is written is nobody's after the machine has ended, so there is no
//! order to flush the disk's cache.
//!
//! # Errors
//!
//! If a read of several pages fails, one of them may be readable. The run then ends with `EAGAIN`, on which waiting faults look again, and from then
//! on the extent is read page by page. A page that cannot be read by itself ends with `EIO`. A write that fails has written nothing, as
//! far as anybody is told.
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
