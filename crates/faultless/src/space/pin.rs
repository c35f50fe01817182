//! Pins: pages that a device reads and writes by their frames, as Linux's `pin_user_pages(FOLL_LONGTERM)` has them.
//!
//! A pin keeps a page's frame until it is dropped, whatever becomes of the mapping. And it keeps the *page there*: what the
//! program stores the device reads, and the other way round. So a pinned private page is the space's own, and stays so:
//!
//! - Pinning makes a private page the space's own first, by the fault that a store leads to, or by the same copy without
//!   the right to store ([`unshare`](crate::fault)). So a page that only shows an object's, or that of zeros, becomes a copy.
//! - `fork` copies a pinned private page for the child, and does not share it.
//! - A store to a pinned page that is read-only for a while (`mprotect`, or a fork before the pin) reuses it.
//!
//! A page of a shared mapping is the object's, and is pinned as it is.
//!
//! # The count
//!
//! A pin is a large step in the frame's count of references ([`FrameMeta`](crate::frame::FrameMeta)). So one atomic says how many
//! mappings there are and whether there are pins, exactly. *A frame that a [`Pins`] holds, and that is anonymous, has one mapping at
//! most, in the space that pinned it*: all that is said below keeps this true. For a moment a pin may also be on another frame: that of
//! an entry that has changed since. It goes then. So a store that finds pins and more than one reference neither reuses nor
//! copies the page: it waits until either is gone.
//!
//! # Order
//!
//! Each page is one [visit](super::visit), a shared claim, and four steps:
//!
//! 1. look at the entry, and pin the frame that it names, unless that is free by now; a full fence;
//! 2. for a private page: make sure that it is anonymous and that its only mapping is this one;
//! 3. mark the entry as accessed, and for the device's stores as dirty;
//! 4. if the entry names the same frame still, the pin is on the right one, which has been mapped here all the time. If not, or if the
//!    page is not the space's own, the pin goes, and the page is faulted in without the claim.
//!
//! | against | order |
//! |---|---|
//! | `fork`, `munmap`, `mremap`, `mprotect`, reclaim | by the claims: completely before or after. A fork finds the pin, or the pin finds the entry read-only and the count above 1 (Linux needs `write_protect_seq` for this) |
//! | a discard | by the entry: step 4 finds it changed, or the pin keeps a frame that is no longer mapped |
//! | a fault that copies the page, as it saw it shared | the fault looks at the pins once it has the entry: it reverts, or step 4 finds the entry taken |
//! | `MADV_FREE` | it looks at the pins again once it has cleaned the entry, behind a full fence: it marks the entry dirty again, or step 3 does so |
//!
//! `MADV_FREE` leaves pinned pages alone. Reclaim leaves pages that were given up before they were pinned for loads.

use super::Space;
use super::vma::{Memory, Prot};
use crate::addr::{FrameNumber, PAGE_SHIFT, VirtRange, page_down, page_up};
use crate::error::{Errno, Error, OutOfMemory};
use crate::fault::{Access, FaultError, FaultKind};
use crate::frame::{Kind, Use};
use crate::machine::Machine;
use crate::sync::atomic::{Ordering, fence};
use crate::sync::mutant::{Mutant, lost};
use crate::sync::wait::Wait;
use crate::table::format::USER_END;
use crate::vm::{Cpu, Vm};
use alloc::vec::Vec;
use core::fmt;

/// Pages of a space that a device may use, until this is dropped. It outlives their mappings, and the space. No CPU is needed to drop
/// it.
///
/// A device reaches the page in frame `f` at the physical address [`f.phys()`](FrameNumber::phys), the kernel at
/// [`Machine::frame_bytes`]. Both use it while programs do; how they order their accesses is up to the kernel and the program.
#[must_use = "the pages are unpinned when this is dropped"]
pub struct Pins<'v, M: Machine> {
    vm: &'v Vm<M>,
    frames: Vec<FrameNumber>,
}

impl<M: Machine> Pins<'_, M> {
    /// The frames of the pages, in the order of their addresses.
    pub fn frames(&self) -> &[FrameNumber] {
        &self.frames
    }
}

impl<M: Machine> fmt::Debug for Pins<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pins({} pages)", self.frames.len())
    }
}

impl<M: Machine> Drop for Pins<'_, M> {
    fn drop(&mut self) {
        for &number in &self.frames {
            // SAFETY: its pin.
            unsafe { self.vm.frames.unpin(number) };
        }
    }
}

/// The first capacity of the list of frames: enough for 2 MiB, in 2 KiB of the heap.
const AT_ONCE: usize = 512;

/// Why a page was not pinned at a first try.
enum Miss {
    /// Nothing is mapped there.
    Unmapped,
    /// The access faults.
    Fault(Access),
    /// The page is not there, or not the space's own: a store would make it so.
    Own,
    /// The same, and the protection forbids the store.
    Unshare,
    /// Another CPU changed it first.
    Again,
    /// It has as many pins as can be counted.
    Full,
    /// It is device memory.
    Device,
}

impl<M: Machine> Space<M> {
    /// Pins the pages of the `len` bytes from `addr` on, neither of which need be aligned, for a device, which reads them, or, with
    /// `write`, writes them, too. No bytes are no pages. Missing pages
    /// are faulted in, and the protection holds as for a program's access. No stack grows. No call that is made later lets the
    /// frames go, and the program and the device see what the other stores, as long as the pages are mapped.
    ///
    /// Not inside the closure of [`areas`](Self::areas) or another listing.
    ///
    /// # Errors
    /// `EFAULT`: nothing is mapped there, the protection forbids it, a page lies beyond the end of its object, or is device
    /// memory. `ENOMEM`: memory is out, or a page has as many pins as can be counted (1023). Then no page is pinned; pages that were
    /// faulted in stay.
    pub fn pin<'v>(
        &self,
        cpu: &Cpu<'v, M>,
        addr: u64,
        len: u64,
        write: bool,
    ) -> Result<Pins<'v, M>, Error> {
        self.check_vm(cpu);
        let given = VirtRange::new(addr, addr.saturating_add(len));
        let refused = |errno| Error { operation: "pin", range: given, errno };
        let end = addr.checked_add(len).filter(|&end| end <= USER_END).and_then(page_up);
        let range = VirtRange::new(page_down(addr), end.ok_or(refused(Errno::EFAULT))?);
        let pages = if len == 0 { 0 } else { range.pages() };
        let pins = cpu.with_memory(|| {
            let mut pins = Pins { vm: cpu.vm(), frames: Vec::new() };
            for page in 0..pages {
                reserve_some(&mut pins.frames, pages - page)?;
                let at = range.start + (page << PAGE_SHIFT);
                pins.frames.push(self.pin_page(cpu, at, write)?);
            }
            Ok(pins)
        });
        cpu.collect();
        pins.map_err(refused)
    }

    /// Pins the page at `page`.
    fn pin_page(&self, cpu: &Cpu<'_, M>, page: u64, write: bool) -> Result<FrameNumber, Errno> {
        let mut looks = 0;
        loop {
            let faulted = match self.try_pin(cpu, page, write) {
                Ok(frame) => return Ok(frame),
                Err(Miss::Unmapped) => {
                    // No fault: if something is mapped by now, a load would leave a page there that no pin needs.
                    self.await_unmapping(cpu, VirtRange::page(page));
                    return Err(Errno::EFAULT);
                }
                Err(Miss::Fault(access)) => self.fault_mapped(cpu, page, access).map(drop),
                // Stores may be forbidden by now, and loads still be allowed.
                Err(Miss::Own) => match self.fault_mapped(cpu, page, Access::Write) {
                    Err(FaultError::Segv { mapped: true }) if !write => Ok(()),
                    // Another CPU has a reference for a moment, and may wait for this one.
                    Ok(FaultKind::Spurious) => {
                        cpu.wait(looks);
                        looks += 1;
                        Ok(())
                    }
                    served => served.map(drop),
                },
                Err(Miss::Unshare) => self.unshare(cpu, page),
                Err(Miss::Full) => return Err(Errno::ENOMEM),
                Err(Miss::Device) => return Err(Errno::EFAULT),
                Err(Miss::Again) => {
                    cpu.wait(looks);
                    looks += 1;
                    Ok(())
                }
            };
            faulted.map_err(|error| match error {
                FaultError::OutOfMemory => Errno::ENOMEM,
                FaultError::Segv { .. } | FaultError::Bus => Errno::EFAULT,
            })?;
        }
    }

    /// The four steps.
    fn try_pin(&self, cpu: &Cpu<'_, M>, page: u64, write: bool) -> Result<FrameNumber, Miss> {
        let access = if write { Access::Write } else { Access::Read };
        let visit = self.visit(cpu, VirtRange::page(page));
        let Some(vma) = visit.vmas(VirtRange::page(page)).next() else {
            return Err(if lost(Mutant::PinFindsNothing) {
                Miss::Fault(access)
            } else {
                Miss::Unmapped
            });
        };
        let area = &vma.area;
        if matches!(area.memory, Memory::Device { .. }) {
            return Err(Miss::Device);
        }
        let (own, writable) = (area.is_private(), area.allows(Prot::WRITE));
        let missing = || match (own, writable) {
            (true, true) => Miss::Own,
            (true, false) if !write && !area.prot.is_empty() => Miss::Unshare,
            _ => Miss::Fault(access),
        };
        let seen = self.entry_by(cpu, &visit.section, page, |slot| slot.look(cpu));
        let seen = seen.ok_or_else(missing)?;
        if !seen.is_present() || seen.is_special() || write && !seen.is_writable() {
            return Err(missing());
        }
        let vm = cpu.vm();
        let meta = vm.frames.meta(seen.frame());
        let is_only = || meta.kind() == Kind::Used(Use::Anon) && meta.refs() == 1;
        // No pin, even for a moment, of a page that is shared: see `write_protected`.
        if own && !is_only() {
            return Err(missing());
        }
        if !meta.pin() {
            return Err(if meta.is_full_of_pins() { Miss::Full } else { Miss::Again });
        }
        // From here on the pin goes on each way out but the last.
        let pins = PinOf { vm, frame: seen.frame() };
        // Before the entry is read again: see the module.
        fence(Ordering::SeqCst);
        // The count before the entry: if the mapping is there afterwards, it was one of those counted.
        let only = is_only();
        let now = self.touch(cpu, &visit.section, page, access);
        let same = now.is_some_and(|now| now.frame() == seen.frame());
        if !same && !lost(Mutant::PinLooksAgain) {
            return Err(Miss::Again);
        }
        if own && !only {
            return Err(missing());
        }
        core::mem::forget(pins);
        Ok(seen.frame())
    }
}

/// Reserves capacity for a frame in `frames`, to which `left` are to be added. The capacity for all is not reserved at once, since
/// a range may be much larger than what is mapped of it.
fn reserve_some(frames: &mut Vec<FrameNumber>, left: u64) -> Result<(), OutOfMemory> {
    if frames.len() == frames.capacity() {
        let more = left.min(frames.len().max(AT_ONCE) as u64);
        frames.try_reserve_exact(more as usize).map_err(|_| OutOfMemory)?;
    }
    Ok(())
}

/// One pin, which goes when this is dropped.
struct PinOf<'v, M: Machine> {
    vm: &'v Vm<M>,
    frame: FrameNumber,
}

impl<M: Machine> Drop for PinOf<'_, M> {
    fn drop(&mut self) {
        // SAFETY: its pin.
        unsafe { self.vm.frames.unpin(self.frame) };
    }
}
