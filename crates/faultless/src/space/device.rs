//! Device memory: fixed ranges of physical memory outside the subsystem's frames, such as registers
//! of devices, framebuffers and tables of the firmware. Linux maps such memory by
//! `remap_pfn_range`.
//!
//! A VMA of device memory stores the frame number as its page offset
//! ([`PageSource::Device`](super::PageSource)). So splits, moves and merges need no special code,
//! and a fault computes the frame. Pages are mapped by faults, like other memory, and not all at
//! once by the call: a range may be large, its tables are made only where used, and a child of
//! `fork`, or a range moved by `mremap`, needs no separate path. `MAP_POPULATE` maps the range at
//! once.
//!
//! Entries of device memory are *special*: their frames are not counted, have no metadata or
//! anon_vma, and are not resident. Pages are never copied, so a mapping is shared.
//!
//! | operation | on device memory, as on Linux |
//! |---|---|
//! | `munmap`, `mprotect`, `mremap` | as on other memory; `EFAULT` for growth, `EINVAL` for `DONTUNMAP` |
//! | `fork` | the child has the same frames, unless `MADV_DONTFORK` |
//! | `DONTNEED`, `DONTNEED_LOCKED`, `FREE`, `DOFORK`, `WIPEONFORK`, `POPULATE_*` | `EINVAL` |
//! | `mlock` | succeeds without an effect, as does `MAP_LOCKED` |
//! | `mincore` | not in core |
//! | access from outside, pins | refused, as for a missing permission |
//!
//! One difference to Linux: equal adjacent VMAs merge.

use super::Space;
use super::area::Prot;
use super::map::What;
use crate::addr::FrameNumber;
use crate::error::{Errno, Error};
use crate::machine::Machine;
use crate::space::MapFlags;
use crate::table::format::CacheMode;
use crate::vm::Cpu;

/// A range of physical memory outside the subsystem's frames. A mapping determines its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// The first frame. Frame numbers end at 16 TiB, so memory at higher physical addresses cannot
    /// be mapped.
    pub first: FrameNumber,
    /// The cache mode.
    pub cache: CacheMode,
    /// The kernel's tag in listings ([`AreaInfo::tag`](crate::AreaInfo::tag)); 0 is unnamed.
    pub tag: u64,
    /// Whether a mapping may ever be written (the device was opened for writing).
    pub may_write: bool,
}

impl DeviceMemory {
    /// Checks that `pages` pages exist, and that none of them belongs to the machine's regions.
    ///
    /// # Errors
    /// `EINVAL`.
    pub(super) fn check<M: Machine>(&self, machine: &M, pages: u64) -> Result<(), Errno> {
        let (first, frames) = (u64::from(self.first.0), 1 << (u64::from(u32::BITS)));
        let end = first.checked_add(pages).filter(|&end| end <= frames).ok_or(Errno::EINVAL)?;
        let overlaps = machine.regions().iter().any(|region| {
            let start = u64::from(region.first.0);
            region.frames != 0 && first < start + u64::from(region.frames) && start < end
        });
        if overlaps { Err(Errno::EINVAL) } else { Ok(()) }
    }
}

impl<M: Machine> Space<M> {
    /// Maps `len` bytes (rounded up to pages) of device memory, starting with the frame
    /// `device.first`, otherwise like [`mmap`](Self::mmap). The mapping is shared: there are no
    /// private copies of device memory.
    ///
    /// # Errors
    /// As [`mmap`](Self::mmap), and `EACCES` (a writable mapping of memory that may not be
    /// written), `EINVAL` (a private mapping; frames of the machine's [regions](Machine::regions),
    /// or beyond the last frame number).
    ///
    /// # Safety
    /// While the range is mapped here, or in a space that [`fork`](Self::fork) made of this one:
    /// - the MMU of each CPU that runs such a space can access the frames (a software MMU knows
    ///   them);
    /// - no access by programs breaks an assumption of the kernel: the frames contain no memory of
    ///   Rust's, and a device controlled through them has access only to memory assigned to the
    ///   device;
    /// - every other mapping of the frames, including the kernel's own, has the same cache mode.
    pub unsafe fn mmap_device(
        &self,
        cpu: &Cpu<'_, M>,
        at: impl Into<Option<u64>>,
        len: u64,
        prot: Prot,
        flags: MapFlags,
        device: DeviceMemory,
    ) -> Result<u64, Error> {
        self.map_and_populate(cpu, (at.into(), len), prot, flags, What::Device(device))
    }
}
