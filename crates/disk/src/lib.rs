//! A virtio disk of the bare machine, and extents of it as the [backing stores](faultless::BackingStore) of files.
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
//! The disk is only read. What programs store stays in memory, in the pages of the file, for as long as the file exists. So an extent only
//! notes the shortest length that the file had: what is beyond reads as zeros, also once the file is longer again.
//!
//! # Errors
//!
//! If a read of several pages fails, one of them may be readable. The run then ends with `EAGAIN`, on which waiting faults look again, and from then
//! on the extent is read page by page. A page that cannot be read by itself ends with `EIO`.
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
pub use device::{MOST_SEGMENTS, StartError, interrupted, is_idle, pages, poll, start};
#[cfg(target_os = "none")]
pub use extent::Extent;
