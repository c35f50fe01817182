//! One recorded operation on a CPU of a machine.

use faultless::{Access, Advice, Errno, MapFlags, Prot, RemapFlags, VirtRange};
use faultless_native::{NativeCpu, Stop as NativeStop};
use faultless_trace::event::{self, Backing};
use faultless_trace::plan::Op;
use faultless_virtual::{Stop as VirtualStop, VirtualCpu};
use std::sync::atomic::{AtomicU64, Ordering};

/// The operations that a replay requires of a machine's thread.
pub trait Guest {
    /// The reason for a failed step.
    type Stop;
    /// Makes an access.
    fn touch(&self, addr: u64, access: Access) -> Result<(), Self::Stop>;
    /// Maps anonymous memory at a fixed address.
    fn mmap(&self, range: VirtRange, prot: Prot, flags: MapFlags) -> Result<(), Self::Stop>;
    /// Executes the call of the same name. The same applies to the following methods.
    fn munmap(&self, range: VirtRange) -> Result<(), Self::Stop>;
    fn mprotect(&self, range: VirtRange, prot: Prot) -> Result<(), Self::Stop>;
    fn mremap(&self, old: VirtRange, new: VirtRange, flags: RemapFlags) -> Result<(), Self::Stop>;
    fn madvise(&self, range: VirtRange, advice: Advice) -> Result<(), Self::Stop>;
    fn brk(&self, end: u64) -> u64;
    /// Sets the start of an empty heap. A heap that is not empty stays unchanged.
    fn set_heap_start(&self, start: u64);
    /// Returns the frames of the machine's memory.
    fn frames(&self) -> u64;
    /// Returns the error for a heap that cannot have its recorded size.
    fn no_heap(range: VirtRange) -> Self::Stop;
}

impl Guest for NativeCpu<'_, '_> {
    type Stop = NativeStop;

    #[inline]
    fn touch(&self, addr: u64, access: Access) -> Result<(), NativeStop> {
        Ok(self.touch(addr, access)?)
    }

    fn mmap(&self, range: VirtRange, prot: Prot, flags: MapFlags) -> Result<(), NativeStop> {
        Ok(self.mmap(range.start, range.len(), prot, flags).map(drop)?)
    }

    fn munmap(&self, range: VirtRange) -> Result<(), NativeStop> {
        Ok(self.munmap(range.start, range.len())?)
    }

    fn mprotect(&self, range: VirtRange, prot: Prot) -> Result<(), NativeStop> {
        Ok(self.mprotect(range.start, range.len(), prot)?)
    }

    fn mremap(&self, old: VirtRange, new: VirtRange, flags: RemapFlags) -> Result<(), NativeStop> {
        Ok(self.mremap(old.start, old.len(), new.len(), flags, new.start).map(drop)?)
    }

    fn madvise(&self, range: VirtRange, advice: Advice) -> Result<(), NativeStop> {
        Ok(self.madvise(range.start, range.len(), advice)?)
    }

    fn brk(&self, end: u64) -> u64 {
        self.brk(end)
    }

    fn set_heap_start(&self, start: u64) {
        let _ = self.running().space().set_heap_start(self.cpu(), start);
    }

    fn frames(&self) -> u64 {
        self.native().vm().total_frames()
    }

    fn no_heap(range: VirtRange) -> NativeStop {
        faultless::Error { operation: "brk", range, errno: Errno::ENOMEM }.into()
    }
}

impl Guest for VirtualCpu<'_> {
    type Stop = VirtualStop;

    fn touch(&self, addr: u64, access: Access) -> Result<(), VirtualStop> {
        self.touch(addr, access)
    }

    fn mmap(&self, range: VirtRange, prot: Prot, flags: MapFlags) -> Result<(), VirtualStop> {
        self.mmap(range.start, range.len(), prot, flags).map(drop)
    }

    fn munmap(&self, range: VirtRange) -> Result<(), VirtualStop> {
        self.munmap(range.start, range.len())
    }

    fn mprotect(&self, range: VirtRange, prot: Prot) -> Result<(), VirtualStop> {
        self.mprotect(range.start, range.len(), prot)
    }

    fn mremap(&self, old: VirtRange, new: VirtRange, flags: RemapFlags) -> Result<(), VirtualStop> {
        self.mremap((old.start, old.len()), new.len(), flags, new.start).map(drop)
    }

    fn madvise(&self, range: VirtRange, advice: Advice) -> Result<(), VirtualStop> {
        self.madvise(range.start, range.len(), advice)
    }

    fn brk(&self, end: u64) -> u64 {
        self.brk(end)
    }

    fn set_heap_start(&self, start: u64) {
        self.set_heap_start(start);
    }

    fn frames(&self) -> u64 {
        self.frames()
    }

    fn no_heap(range: VirtRange) -> VirtualStop {
        let errno = Errno::ENOMEM.number();
        VirtualStop::Refused { call: "brk", addr: range.start, len: range.len(), errno }
    }
}

/// Differences between a replay and its recording.
#[derive(Debug, Default)]
pub struct Departures {
    /// Omitted `madvise` calls: advice unknown to the subsystem, or refused for anonymous memory
    /// that represents a file.
    pub advice_ignored: AtomicU64,
    /// Mappings larger than the machine's memory, mapped as with `MAP_NORESERVE`.
    pub unreserved: AtomicU64,
}

/// Executes an operation of guest code. The caller handles the start and end of threads and
/// processes.
///
/// # Errors
/// The operation failed.
#[inline]
pub fn act<G: Guest>(cpu: &G, op: &Op, departures: &Departures) -> Result<(), G::Stop> {
    match *op {
        Op::Touch { page, access, .. } => {
            let access = match access {
                event::Access::Write => Access::Write,
                event::Access::Exec => Access::Execute,
                event::Access::Read | event::Access::Unknown => Access::Read,
            };
            cpu.touch(page, access)?;
        }
        Op::Map { range, prot, shared, grows_down, populate, noreserve, backing } => {
            let mut flags = MapFlags::FIXED | MapFlags::ANONYMOUS;
            flags |= if shared { MapFlags::SHARED } else { MapFlags::PRIVATE };
            flags.set(MapFlags::GROWSDOWN, grows_down && !shared);
            flags.set(MapFlags::POPULATE, populate);
            flags.set(MapFlags::NORESERVE, noreserve);
            if range.pages() > cpu.frames() && !noreserve {
                flags |= MapFlags::NORESERVE;
                departures.unreserved.fetch_add(1, Ordering::Relaxed);
            }
            cpu.mmap(range, permission(prot), flags)?;
            if !shared && matches!(backing, Backing::File | Backing::Special) {
                // Anonymous memory represents the mapping, and must not be prefaulted like
                // anonymous memory.
                cpu.madvise(range, Advice::Random)?;
            }
        }
        Op::Populate { range, write } => {
            let advice = if write { Advice::PopulateWrite } else { Advice::PopulateRead };
            cpu.madvise(range, advice)?;
        }
        Op::Unmap { range } => cpu.munmap(range)?,
        Op::Protect { range, prot } => cpu.mprotect(range, permission(prot))?,
        Op::Remap { old, new, keep_old } => {
            let mut flags = RemapFlags::empty();
            flags.set(RemapFlags::DONTUNMAP, keep_old);
            if old.start != new.start {
                flags |= RemapFlags::MAYMOVE | RemapFlags::FIXED;
            }
            cpu.mremap(old, new, flags)?;
        }
        Op::Advise { range, advice } => {
            let given = Advice::from_number(advice);
            if given.is_none_or(|advice| cpu.madvise(range, advice).is_err()) {
                departures.advice_ignored.fetch_add(1, Ordering::Relaxed);
            }
        }
        Op::Brk { old, new } => {
            if old == new {
                // The first call of a program shows the start of the heap chosen by its loader.
                cpu.set_heap_start(old);
            }
            let end = cpu.brk(new);
            if end != new {
                return Err(G::no_heap(VirtRange::new(end.min(new), end.max(new))));
            }
        }
        Op::Fork { .. } | Op::Launch { .. } | Op::SpawnThread { .. } | Op::Exec | Op::Exit => {}
    }
    Ok(())
}

fn permission(prot: event::Prot) -> Prot {
    // Both types use Linux's PROT_* values.
    Prot::from_bits_truncate(prot.bits().into())
}
