//! Device memory: fixed ranges of physical memory that are not the subsystem's, as registers of devices, framebuffers and
//! tables of the firmware. It is what Linux maps by `remap_pfn_range`.
//!
//! A VMA of device memory has the frame number as its page offset ([`Memory::Device`](super::Memory)). So its parts, its moves and its
//! merges need nothing of their own, and a fault computes the frame. Pages are mapped by faults, like any other
//! memory, and not all at once by the call: a range may be large, its tables are made where it is used, and a child of
//! `fork`, or what `mremap` moves, needs no path of its own. `MAP_POPULATE` maps the range at once.
//!
//! Its entries are *special*: no frame is counted, none has metadata or an anon_vma, and none is resident. No page is
//! copied, so a mapping is shared.
//!
//! | operation | on device memory, as on Linux |
//! |---|---|
//! | `munmap`, `mprotect`, `mremap` | as on other memory; `EFAULT` where it is to grow, `EINVAL` for `DONTUNMAP` |
//! | `fork` | the child has the same frames, unless `MADV_DONTFORK` |
//! | `DONTNEED`, `DONTNEED_LOCKED`, `FREE`, `DOFORK`, `WIPEONFORK`, `POPULATE_*` | `EINVAL` |
//! | `mlock` | succeeds, and locks nothing; so does `MAP_LOCKED` |
//! | `mincore` | not in core |
//! | access from outside, pins | refused as a protection that forbids it |
//!
//! One thing is not as on Linux: VMAs that are alike merge.

use super::Space;
use super::map::What;
use super::vma::Prot;
use crate::addr::FrameNumber;
use crate::error::{Errno, Error};
use crate::machine::Machine;
use crate::space::MapFlags;
use crate::table::format::CacheMode;
use crate::vm::Cpu;

/// A range of physical memory that is not the subsystem's. A mapping of it says how long it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Its first frame. Frame numbers end at 16 TiB, so memory at higher physical addresses cannot be mapped.
    pub first: FrameNumber,
    /// How CPUs cache it.
    pub cache: CacheMode,
    /// What the kernel knows it by in listings ([`AreaInfo::tag`](crate::AreaInfo::tag)); 0 is nameless.
    pub tag: u64,
    /// Whether a mapping may ever be written (the device was opened for writing).
    pub may_write: bool,
}

impl DeviceMemory {
    /// Makes sure that its `pages` pages exist, and that none of them is of the machine's regions.
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
    /// Maps `len` bytes (rounded up to pages) of device memory, from the frame `device.first` on, otherwise as
    /// [`mmap`](Self::mmap) does. The mapping is shared: there are no private copies of device memory.
    ///
    /// # Errors
    /// As [`mmap`](Self::mmap), and `EACCES` (for writing, of what may not be written), `EINVAL` (a private mapping; frames of the
    /// machine's [regions](Machine::regions), or beyond the last frame number).
    ///
    /// # Safety
    /// As long as the range is mapped here, or in a space that [`fork`](Self::fork) made of this one:
    /// - the MMU of each CPU that runs such a space reaches the frames (one that is software knows them);
    /// - whatever programs do there, nothing breaks that the kernel relies on: the frames hold no memory of Rust's, and a device
    ///   that they control has no access to any, but for what is given to it;
    /// - every other mapping of the frames, the kernel's own included, is cached in the same way.
    pub unsafe fn mmap_device(
        &self,
        cpu: &Cpu<'_, M>,
        addr: u64,
        len: u64,
        prot: Prot,
        flags: MapFlags,
        device: DeviceMemory,
    ) -> Result<u64, Error> {
        self.map_and_populate(cpu, (addr, len), prot, flags, What::Device(device))
    }
}
