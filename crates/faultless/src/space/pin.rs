//! Pins: pages that a device reads and writes by their frames, as `pin_user_pages(FOLL_LONGTERM)`
//! of Linux.
//!
//! A pin keeps the frame of a page until the pin is dropped, even after the mapping has gone. A pin
//! also keeps the *mapping of the frame*: the device reads what the program stores, and the program
//! reads what the device stores. So a pinned private page belongs to the space alone, and stays so:
//!
//! - Pinning first makes a private page the space's own, by the fault that a store leads to, or by
//!   the same copy without the right to store ([`unshare`](crate::fault)). So a page that only
//!   shows an object's page, or the zero page, becomes a copy.
//! - `fork` copies a pinned private page for the child, and does not share the page.
//! - A store to a pinned page that is read-only for a while (`mprotect`, or a fork before the pin)
//!   reuses the page.
//!
//! A page of a shared mapping is the object's, and the pin leaves the mapping unchanged.
//!
//! # The count
//!
//! A pin is a large step in the frame's count of references
//! ([`FrameMeta`](crate::frame::FrameMeta)). So one atomic holds the exact number of mappings and
//! whether the frame has pins. *An anonymous frame that a [`Pins`] holds has at most one mapping,
//! in the space that pinned the frame.* The rules below keep this invariant. For a moment a pin may
//! also be on another frame: the frame of an entry that has changed since. The CPU then drops the
//! pin. So a store that finds pins and more than one reference neither reuses nor copies the page,
//! but waits until either is gone.
//!
//! # Order
//!
//! Each page is one [visit](super::visit), a shared claim, and four steps:
//!
//! 1. look at the entry, and pin the frame in the entry, unless the frame is free by now; a full
//!    fence;
//! 2. for a private page: make sure that the frame is anonymous and that this mapping is the only
//!    one;
//! 3. mark the entry as accessed, and for the device's stores as dirty;
//! 4. if the entry still has the same frame, the pin is on the right frame, which has been mapped
//!    here all the time. If not, or if the page is not the space's own, drop the pin, and fault the
//!    page in without the claim.
//!
//! | against | order |
//! |---|---|
//! | `fork`, `munmap`, `mremap`, `mprotect`, reclaim | by the claims: completely before or after. A fork finds the pin, or the pin finds the entry read-only and the count above 1 (Linux needs `write_protect_seq` for this) |
//! | a discard | by the entry: step 4 finds the entry changed, or the pin keeps a frame that is no longer mapped |
//! | a fault that copies the page, which the fault saw shared | the fault looks at the pins once the fault holds the entry: the fault reverts, or step 4 finds the entry taken |
//! | `MADV_FREE` | after cleaning the entry, behind a full fence, `MADV_FREE` looks at the pins again: either `MADV_FREE` marks the entry dirty again, or step 3 does so |
//!
//! `MADV_FREE` leaves pinned pages alone. Reclaim leaves pages that were given up before a pin for
//! loads.

use super::Space;
use super::area::{PageSource, Prot};
use crate::addr::{FrameNumber, PAGE_SHIFT, VirtRange, page_down, page_up};
use crate::error::{Errno, Error, OutOfMemory};
use crate::fault::{Access, FaultError, FaultKind};
use crate::frame::{FrameUse, Kind};
use crate::machine::Machine;
use crate::sync::atomic::{Ordering, fence};
use crate::sync::mutant::{Mutant, lost};
use crate::sync::wait::Wait;
use crate::table::format::USER_END;
use crate::vm::{Cpu, Vm};
use alloc::vec::Vec;
use core::fmt;

/// Pages of a space that a device may use until the value is dropped. A `Pins` may outlive the
/// mappings and the space. Dropping the value needs no CPU.
///
/// A device reaches the page in frame `f` at the physical address [`f.phys()`](FrameNumber::phys),
/// the kernel at [`Machine::frame_bytes`]. Both use the page while programs do. The kernel and the
/// program decide how to order their accesses.
#[must_use = "the drop unpins the pages"]
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
            // SAFETY: the pin of this value.
            unsafe { self.vm.frames.unpin(number) };
        }
    }
}

/// The first capacity of the list of frames: enough for 2 MiB, in 2 KiB of the heap.
const AT_ONCE: usize = 512;

/// Why an attempt to pin a page failed.
enum Miss {
    /// Nothing is mapped there.
    Unmapped,
    /// The access faults.
    Fault(Access),
    /// The page is not there, or not the space's own. A store would make the page the space's own.
    Own,
    /// As `Own`, and the protection forbids the store.
    Unshare,
    /// Another CPU changed the page first.
    Again,
    /// The page has the maximum number of pins.
    Full,
    /// The page is device memory.
    Device,
}

impl<M: Machine> Space<M> {
    /// Pins the pages of the `len` bytes starting at `addr` for a device that reads the pages, and
    /// also writes the pages if `write` is set. Neither `addr` nor `len` need be aligned. No bytes
    /// are no pages. The call faults missing pages in, under the protection rules of a program's
    /// access. No stack grows. No later call frees the frames. As long as the pages are mapped, the
    /// program and the device see each other's stores.
    ///
    /// Not allowed inside the closure of [`areas`](Self::areas) or of another listing.
    ///
    /// # Errors
    /// `EFAULT` if nothing is mapped there, the protection forbids the access, a page is beyond the
    /// end of its object, or a page is device memory. `ENOMEM` if memory is exhausted, or a page
    /// has the maximum number of pins (1023). No page is pinned then; pages that were faulted in
    /// stay.
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
                    // No fault: if something is mapped by now, a load would leave a page there that
                    // no pin needs.
                    self.await_unmapping(cpu, VirtRange::page(page));
                    return Err(Errno::EFAULT);
                }
                Err(Miss::Fault(access)) => self.fault_mapped(cpu, page, access).map(drop),
                // By now stores may be forbidden, and loads still be allowed.
                Err(Miss::Own) => match self.fault_mapped(cpu, page, Access::Write) {
                    Err(FaultError::Segv { mapped: true }) if !write => Ok(()),
                    // Another CPU has a reference for a moment, and may wait for this CPU.
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
        let area = vma.area();
        if matches!(area.memory, PageSource::Device { .. }) {
            return Err(Miss::Device);
        }
        let (own, writable) = (area.is_private(), area.allows(Prot::WRITE));
        let missing = || match (own, writable) {
            (true, true) => Miss::Own,
            (true, false) if !write && !area.prot.is_empty() => Miss::Unshare,
            _ => Miss::Fault(access),
        };
        let seen = self.entry_by(cpu, &visit.section, page, |slot| slot.wait_and_load(cpu));
        let seen = seen.ok_or_else(missing)?;
        if !seen.is_present() || seen.is_special() || write && !seen.is_writable() {
            return Err(missing());
        }
        let vm = cpu.vm();
        let meta = vm.frames.meta(seen.frame());
        let is_only = || meta.kind() == Kind::Used(FrameUse::Anon) && meta.refs() == 1;
        // No pin, even for a moment, on a page that is shared: see `write_protected`.
        if own && !is_only() {
            return Err(missing());
        }
        if !meta.pin() {
            return Err(if meta.is_full_of_pins() { Miss::Full } else { Miss::Again });
        }
        // From here on every exit but the last drops the pin.
        let pins = PinOf { vm, frame: seen.frame() };
        // Before the next load of the entry: see the module documentation.
        fence(Ordering::SeqCst);
        // The count before the entry: if the mapping is there afterwards, the count included this
        // mapping.
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

/// Reserves capacity for a frame in `frames`, which is to receive `left` more. The call does not
/// reserve capacity for all frames at once, since a range may be much larger than its mapped part.
fn reserve_some(frames: &mut Vec<FrameNumber>, left: u64) -> Result<(), OutOfMemory> {
    if frames.len() == frames.capacity() {
        let more = left.min(frames.len().max(AT_ONCE) as u64);
        frames.try_reserve_exact(more as usize).map_err(|_| OutOfMemory)?;
    }
    Ok(())
}

/// One pin, dropped with this value.
struct PinOf<'v, M: Machine> {
    vm: &'v Vm<M>,
    frame: FrameNumber,
}

impl<M: Machine> Drop for PinOf<'_, M> {
    fn drop(&mut self) {
        // SAFETY: the pin of this value.
        unsafe { self.vm.frames.unpin(self.frame) };
    }
}
