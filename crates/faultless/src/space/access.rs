//! Access to a space's memory from outside: for a debugger, a hypervisor, a software MMU, or a
//! kernel's call about another process.
//!
//! No CPU need run the space. [`read_bytes`](Space::read_bytes) and
//! [`write_bytes`](Space::write_bytes) proceed page by page, with one visit for each page (see
//! [`visit`](super::visit)): a shared claim, which excludes operations that change mappings. So
//! `munmap`, `mprotect`, `mremap` and `fork` come completely before or after the access to a page:
//! a child of `fork` has either all bytes written to a page, or none. One exception: under a
//! baseline policy (`mmap_lock`, `per_vma`) an unmapping operation admits readers once its VMAs are
//! out of the tree (see [`unmap`](super::unmap)). Then an access may still find the page's entry
//! until the entry is cleared, and copies from or to the page's frame, which its reference keeps.
//! The copy may end after the operation has returned, but before a new mapping is made there, since
//! this needs the lock for writing.
//!
//! Under the claim the access proceeds like a CPU:
//!
//! 1. It reads the entry. If the entry does not allow the access, it serves a fault, without the
//!    claim, and then retries. So missing pages are read in, shared pages are copied before a
//!    store, and forbidden accesses are refused.
//! 2. It sets the accessed bit, and for a store the dirty bit, so that a lazily freed page stays.
//! 3. It takes a reference to the frame and reads the entry again. If the entry is unchanged, the
//!    reference is to the right frame.
//! 4. It copies, and drops the reference.
//!
//! Discards and revocations also hold shared claims, so they may remove the page between 3 and 4.
//! Then the access takes effect before them, on the frame kept by the reference.
//!
//! Aligned words of 8 bytes are copied whole, other bytes individually, each as a relaxed atomic
//! access, because programs may load and store them concurrently.

use super::Space;
use super::area::Prot;
use crate::addr::{FrameNumber, PAGE_SIZE, VirtRange, page_down};
use crate::fault::{Access, FaultError};
use crate::file::pages::Lent;
use crate::machine::Machine;
use crate::sync::grace::Section;
use crate::sync::mutant::{Mutant, lost};
use crate::sync::wait::Wait;
use crate::table::Entry;
use crate::table::format::{CacheMode, USER_END};
use crate::table::walk::{Reached, descend};
use crate::table::{node, protocol};
use crate::vm::Cpu;
use core::fmt;
// Bytes of programs do not belong to the subsystem's state.
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// The number of bytes copied at once, if aligned.
const WORD: usize = size_of::<u64>();

/// The frame of an address of a space, and the permissions of the MMU, for an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Translation {
    /// The frame.
    pub frame: FrameNumber,
    /// The byte offset of the address in the frame.
    pub offset: usize,
    /// The accesses that need no further [walk](Space::walk). A page that a fault would copy before
    /// a store is not `WRITE`.
    pub prot: Prot,
    /// The cache mode of device memory; `None` for the subsystem's memory. Frames of device memory
    /// belong to the kernel, and [`Machine::frame_bytes`] does not accept them.
    pub device: Option<CacheMode>,
}

/// Returns the accesses that `entry`, which maps a page, allows without a fault.
pub(super) fn prot_of(entry: Entry) -> Prot {
    if !entry.is_present() {
        return Prot::empty();
    }
    let mut prot = Prot::READ;
    prot.set(Prot::WRITE, entry.is_writable());
    prot.set(Prot::EXEC, entry.is_executable());
    prot
}

/// An access from outside that reached an address at which a program's own access would be refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AccessError {
    /// The number of bytes before this address, which were read or written.
    pub done: usize,
    /// The error that a program would receive.
    pub error: FaultError,
}

impl fmt::Display for AccessError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "after {} bytes: {}", self.done, self.error)
    }
}

impl core::error::Error for AccessError {}

impl<M: Machine> Space<M> {
    /// Performs the walk of an MMU for an `access` to `addr` without a TLB entry: sets the accessed
    /// bit, and for a store the dirty bit, and returns the translation. `None`: the access
    /// [faults](Self::fault).
    ///
    /// For machines with a software MMU. The translation is valid on a CPU that
    /// [runs](Self::activate) the space, until the CPU [serves flushes](Cpu::serve_flushes) or
    /// makes another call of the subsystem; afterwards the CPU may keep translations that
    /// [`Machine::invalidate`] did not drop. The translation is valid for the accesses in its
    /// `prot`, which contains `WRITE` only if the dirty bit is set: the first store after loads
    /// requires another walk, as on hardware.
    pub fn walk(&self, cpu: &Cpu<'_, M>, addr: u64, access: Access) -> Option<Translation> {
        let section = self.section(cpu);
        let entry = self.touch(cpu, &section, addr, access)?;
        let mut prot = prot_of(entry);
        prot.set(Prot::WRITE, entry.is_writable() && entry.is_dirty());
        Some(Translation {
            frame: entry.frame(),
            offset: (addr % PAGE_SIZE) as usize,
            prot,
            device: cpu.vm().device(entry),
        })
    }

    /// Reads the bytes starting at `addr` into `to`, like a load of a program: missing pages are
    /// faulted in, and the protection applies. No stack grows. Concurrent stores of other CPUs are
    /// seen or not, by aligned words.
    ///
    /// Not allowed inside the closure of [`areas`](Self::areas) or another listing.
    ///
    /// # Errors
    /// The number of bytes copied, and the error of a program's own load of the next byte. Device
    /// memory, which only the kernel can access, is refused like memory protected by the mapping.
    pub fn read_bytes(
        &self,
        cpu: &Cpu<'_, M>,
        addr: u64,
        to: &mut [u8],
    ) -> Result<(), AccessError> {
        self.each_page(cpu, addr, to.len(), Access::Read, |page, done, len| {
            // SAFETY: bytes of a referenced page.
            unsafe { load_bytes(page, &mut to[done..done + len]) };
        })
    }

    /// Writes `from` to the bytes starting at `addr`, like a store of a program: missing pages are
    /// faulted in, pages shared with another space are copied first, and the protection applies. No
    /// stack grows. Other CPUs see the written bytes by aligned words.
    ///
    /// Not allowed inside the closure of [`areas`](Self::areas) or another listing.
    ///
    /// # Errors
    /// The number of bytes copied, and the error of a program's own store of the next byte; device
    /// memory as in [`read_bytes`](Self::read_bytes).
    pub fn write_bytes(&self, cpu: &Cpu<'_, M>, addr: u64, from: &[u8]) -> Result<(), AccessError> {
        self.each_page(cpu, addr, from.len(), Access::Write, |page, done, len| {
            // SAFETY: bytes of a referenced page that the space may store to.
            unsafe { store_bytes(page, &from[done..done + len]) };
        })
    }

    /// Calls `copy` for each part of a page in the `len` bytes starting at `addr`: with the address
    /// of the page's bytes, the number of bytes before the part, and the length of the part.
    fn each_page(
        &self,
        cpu: &Cpu<'_, M>,
        addr: u64,
        len: usize,
        access: Access,
        mut copy: impl FnMut(*mut u8, usize, usize),
    ) -> Result<(), AccessError> {
        self.check_vm(cpu);
        let mut done = 0;
        while done < len {
            // Beyond the last address there is no page.
            let at = addr.saturating_add(done as u64);
            let offset = (at % PAGE_SIZE) as usize;
            let part = (PAGE_SIZE as usize - offset).min(len - done);
            let copy = |page: *mut u8| copy(page.wrapping_add(offset), done, part);
            self.reach(cpu, at, access, copy).map_err(|error| AccessError { done, error })?;
            done += part;
        }
        Ok(())
    }

    /// Calls `copy` with the bytes of the page of `addr`, if `access` is allowed.
    fn reach(
        &self,
        cpu: &Cpu<'_, M>,
        addr: u64,
        access: Access,
        mut copy: impl FnMut(*mut u8),
    ) -> Result<(), FaultError> {
        let page = page_down(addr);
        loop {
            if page < USER_END {
                let visit = self.visit(cpu, VirtRange::page(page));
                if let Some(entry) = self.touch(cpu, &visit.section, page, access) {
                    if cpu.vm().device(entry).is_some() {
                        return Err(FaultError::Segv { mapped: true });
                    }
                    if let Some(lent) = self.refer(cpu, &visit.section, page, entry) {
                        copy(lent.bytes());
                        return Ok(());
                    }
                    continue;
                }
            }
            self.fault_mapped(cpu, page, access)?;
        }
    }

    /// Returns the result of `get` for the entry of the page at `addr`, if there is a table or a
    /// huge leaf. If a huge leaf is split before `get` has read it, the page has another entry, and
    /// `get` is called again.
    pub(super) fn entry_by(
        &self,
        cpu: &Cpu<'_, M>,
        _section: &Section<'_>,
        addr: u64,
        mut get: impl FnMut(&Slot<'_>) -> Option<Entry>,
    ) -> Option<Entry> {
        if addr >= USER_END {
            return None;
        }
        let at = node::index(addr, node::LAST);
        loop {
            // SAFETY: inside the grace section, which outlives the reference.
            let slot = match unsafe { descend(cpu.vm().machine(), self.root(), addr) } {
                Reached::Last(slots) => Slot { slot: &slots[at], at: None },
                Reached::Above { slot, seen, .. } if seen.is_huge() => Slot { slot, at: Some(at) },
                Reached::Above { .. } => return None,
            };
            if let Some(entry) = get(&slot) {
                return Some(entry);
            }
        }
    }

    /// Marks the entry of the page at `addr` as used by `access`, and returns the entry, if the
    /// access is allowed.
    pub(super) fn touch(
        &self,
        cpu: &Cpu<'_, M>,
        section: &Section<'_>,
        addr: u64,
        access: Access,
    ) -> Option<Entry> {
        let allowed = |entry: Entry| {
            entry.is_present()
                && match access {
                    Access::Read => true,
                    Access::Write => entry.is_writable(),
                    Access::Execute => entry.is_executable(),
                }
        };
        let mark = |entry: Entry| match access {
            _ if !allowed(entry) => entry,
            Access::Write => entry.used().dirty(),
            Access::Read | Access::Execute => entry.used(),
        };
        let entry = self.entry_by(cpu, section, addr, |slot| slot.replace(cpu, mark))?;
        allowed(entry).then_some(entry)
    }

    /// Returns the page mapped by `entry`, a recent value of the entry of the page at `addr`, with
    /// a reference. `None`: the entry has changed.
    fn refer<'a, 'v>(
        &self,
        cpu: &'a Cpu<'v, M>,
        section: &Section<'_>,
        addr: u64,
        entry: Entry,
    ) -> Option<Lent<'a, 'v, M>> {
        let lent = Lent::try_new(cpu, entry.frame())?;
        let now = self.entry_by(cpu, section, addr, |slot| slot.load())?;
        // The MMU may have set its bits.
        let same = !now.is_locked() && !now.needs_flush(entry) && now.is_present();
        (same || lost(Mutant::AccessLooksAgain)).then_some(lent)
    }
}

/// The slot of a page's entry: in a last-level table, or a huge leaf, which contains the page as a
/// [part](Entry::part).
pub(super) struct Slot<'s> {
    slot: &'s crate::sync::atomic::AtomicU64,
    /// The page's place in the huge leaf.
    at: Option<usize>,
}

impl Slot<'_> {
    /// Returns the page's entry for the value `entry` of the slot. `None`: the slot now points to a
    /// table.
    fn of_page(&self, entry: Entry) -> Option<Entry> {
        match self.at {
            None => Some(entry),
            Some(at) => entry.is_huge().then(|| entry.part(at)),
        }
    }

    /// Returns the page's entry, which a CPU may hold.
    pub(super) fn load(&self) -> Option<Entry> {
        self.of_page(node::load(self.slot))
    }

    /// Returns the page's entry, after waiting until no CPU holds it.
    pub(super) fn wait_and_load(&self, wait: &impl Wait) -> Option<Entry> {
        self.of_page(protocol::wait_and_load(self.slot, wait))
    }

    /// Changes the entry; of a huge leaf only the accessed bit may change. Returns the page's new
    /// entry.
    fn replace(&self, wait: &impl Wait, mut change: impl FnMut(Entry) -> Entry) -> Option<Entry> {
        let is_page = |entry: Entry| self.at.is_none() || entry.is_huge();
        let change = |entry: Entry| if is_page(entry) { change(entry) } else { entry };
        self.of_page(protocol::wait_and_replace(self.slot, wait, change).1)
    }
}

/// Loads the bytes starting at `from`.
///
/// # Safety
/// The bytes are memory of one frame that stays allocated.
unsafe fn load_bytes(from: *mut u8, to: &mut [u8]) {
    let mut done = 0;
    while done < to.len() {
        let (at, rest) = (from.wrapping_add(done), &mut to[done..]);
        if at.addr().is_multiple_of(WORD) && rest.len() >= WORD {
            // SAFETY: aligned, and the caller's promise.
            let word = unsafe { AtomicU64::from_ptr(at.cast()) }.load(Ordering::Relaxed);
            rest[..WORD].copy_from_slice(&word.to_ne_bytes());
            done += WORD;
        } else {
            // SAFETY: the caller's promise.
            rest[0] = unsafe { AtomicU8::from_ptr(at) }.load(Ordering::Relaxed);
            done += 1;
        }
    }
}

/// Stores the bytes starting at `to`.
///
/// # Safety
/// The bytes are memory of one frame that stays allocated.
unsafe fn store_bytes(to: *mut u8, from: &[u8]) {
    let mut done = 0;
    while done < from.len() {
        let (at, rest) = (to.wrapping_add(done), &from[done..]);
        match rest.first_chunk::<WORD>() {
            Some(word) if at.addr().is_multiple_of(WORD) => {
                let word = u64::from_ne_bytes(*word);
                // SAFETY: aligned, and the caller's promise.
                unsafe { AtomicU64::from_ptr(at.cast()) }.store(word, Ordering::Relaxed);
                done += WORD;
            }
            _ => {
                // SAFETY: the caller's promise.
                unsafe { AtomicU8::from_ptr(at) }.store(rest[0], Ordering::Relaxed);
                done += 1;
            }
        }
    }
}
