//! A space's memory from outside: for a debugger, a hypervisor, a software MMU, or a kernel's call about another process.
//!
//! No CPU need run the space. [`read_bytes`](Space::read_bytes) and [`write_bytes`](Space::write_bytes) go page by page, and
//! each page is one visit (see [`visit`](super::visit)): a shared claim, which excludes operations that change mappings. So
//! `munmap`, `mprotect`, `mremap` and `fork` come completely before or after the access to a page: a child of `fork` has all
//! of what was written to a page, or nothing. One exception: under a baseline policy (`mmap_lock`, `per_vma`) an operation that
//! unmaps lets readers in once its VMAs are out of the tree (see [`unmap`](super::unmap)). An access may then still find the
//! page's entry, as long as it is not cleared, and copies from or to the page's frame, which its reference keeps. The copy may
//! end after that operation has returned, but before anything else is mapped there, since that needs the lock to write.
//!
//! Under the claim the access does what a CPU does:
//!
//! 1. It looks at the entry. One that does not allow the access leads to a fault, without the claim, and then it looks again.
//!    So missing pages come in, shared ones are copied before a store, and what the protection forbids is refused.
//! 2. It sets the accessed bit, and for a store the dirty bit, so that a lazily freed page stays.
//! 3. It takes a reference to the frame and looks at the entry again. If it is the same, the reference is to the right frame.
//! 4. It copies, and drops the reference.
//!
//! Discards and revocations also hold shared claims, so they may take the page away between 3 and 4. The access then
//! takes effect before them, on the frame that the reference keeps.
//!
//! Aligned words of 8 bytes are copied whole, other bytes one by one, each as a relaxed atomic access: programs may load and
//! store them meanwhile.

use super::Space;
use super::vma::Prot;
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
// Bytes of programs are no state of the subsystem.
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// Bytes that are copied at once, where they are aligned.
const WORD: usize = size_of::<u64>();

/// Where an address of a space leads, and what the MMU allows there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Translation {
    /// The frame.
    pub frame: FrameNumber,
    /// The byte of the frame that the address names.
    pub offset: usize,
    /// The accesses that need no fault, or, of a [walk](Space::walk), no further walk. A page that a fault would copy before a store is not `WRITE`; a page of a
    /// mapping without any permission has none.
    pub prot: Prot,
    /// How device memory is cached; none for the subsystem's own. The frame of device memory is the kernel's, and
    /// [`Machine::frame_bytes`] knows nothing of it.
    pub device: Option<CacheMode>,
}

impl Translation {
    fn new<M: Machine>(cpu: &Cpu<'_, M>, entry: Entry, addr: u64) -> Self {
        let mut prot = Prot::READ;
        prot.set(Prot::WRITE, entry.is_writable());
        prot.set(Prot::EXEC, entry.is_executable());
        Self {
            frame: entry.frame(),
            offset: (addr % PAGE_SIZE) as usize,
            prot: if entry.is_present() { prot } else { Prot::empty() },
            device: cpu.vm().device(entry),
        }
    }
}

/// An access from outside that came to a place where a program's own access would be refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AccessError {
    /// The bytes before that place, which were read or written.
    pub done: usize,
    /// What the program would be told.
    pub error: FaultError,
}

impl fmt::Display for AccessError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "after {} bytes: {}", self.done, self.error)
    }
}

impl core::error::Error for AccessError {}

impl<M: Machine> Space<M> {
    /// Where `addr` leads at present, if a page is mapped there. It may lead elsewhere a moment later, and the frame may
    /// have another owner by then. Nothing changes, and no page is faulted in. It is not to be cached: see [`walk`](Self::walk).
    pub fn translate(&self, cpu: &Cpu<'_, M>, addr: u64) -> Option<Translation> {
        let section = self.section(cpu);
        let entry = self.entry_by(cpu, &section, addr, |slot| slot.look(cpu))?;
        entry.is_mapped().then(|| Translation::new(cpu, entry, addr))
    }

    /// Does what the MMU of a CPU does when its TLB has no translation of `addr` for `access`: sets the accessed bit, and
    /// for a store the dirty bit, and says where the address leads. `None`: the access [faults](Self::fault_of).
    ///
    /// This is for machines whose MMU is software. The translation is good on a CPU that [runs](Self::activate) the space, until it
    /// [serves flushes](Cpu::serve_flushes) or makes another call of the subsystem; it then keeps only what
    /// [`Machine::invalidate`] has not told it to drop. It is good for the accesses of its `prot`, which has `WRITE` only where the
    /// dirty bit is set: the first store to a page that was only loaded from is a walk of its own, as on hardware.
    pub fn walk(&self, cpu: &Cpu<'_, M>, addr: u64, access: Access) -> Option<Translation> {
        let section = self.section(cpu);
        let entry = self.touch(cpu, &section, addr, access)?;
        let mut found = Translation::new(cpu, entry, addr);
        if !entry.is_dirty() {
            found.prot.remove(Prot::WRITE);
        }
        Some(found)
    }

    /// Reads the bytes from `addr` on into `to`, as a load of a program does: pages that are missing are faulted in, and
    /// the protection holds. No stack grows. What other CPUs store meanwhile is seen or not, aligned word by word.
    ///
    /// Not inside the closure of [`areas`](Self::areas) or another listing.
    ///
    /// # Errors
    /// How many bytes came through, and what the program's own load would be told at the next. Device memory, which only the
    /// kernel can reach, is refused like memory that the mapping protects.
    pub fn read_bytes(
        &self,
        cpu: &Cpu<'_, M>,
        addr: u64,
        to: &mut [u8],
    ) -> Result<(), AccessError> {
        self.each_page(cpu, addr, to.len(), Access::Read, |page, done, len| {
            // SAFETY: bytes of a page that is referred to.
            unsafe { load_bytes(page, &mut to[done..done + len]) };
        })
    }

    /// Writes `from` to the bytes from `addr` on, as a store of a program does: pages that are missing are faulted in, those that
    /// are shared with another space are copied first, and the protection holds. No stack grows. Other CPUs see what is
    /// written aligned word by word.
    ///
    /// Not inside the closure of [`areas`](Self::areas) or another listing.
    ///
    /// # Errors
    /// How many bytes came through, and what the program's own store would be told at the next; device memory as in
    /// [`read_bytes`](Self::read_bytes).
    pub fn write_bytes(&self, cpu: &Cpu<'_, M>, addr: u64, from: &[u8]) -> Result<(), AccessError> {
        self.each_page(cpu, addr, from.len(), Access::Write, |page, done, len| {
            // SAFETY: bytes of a page that is referred to, and that the space may store to.
            unsafe { store_bytes(page, &from[done..done + len]) };
        })
    }

    /// Calls `copy` for each part of a page in the `len` bytes from `addr` on: with its bytes in memory, how many came
    /// before it, and how many it has.
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

    /// Calls `copy` with the bytes of the page of `addr`, when `access` is allowed there.
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

    /// What `get` makes of the entry of the page at `addr`, if there is a table for it, or a huge leaf. Where such a leaf is split before `get` has seen it, the page has another
    /// entry, and `get` is called again.
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

    /// Marks the entry of the page at `addr` as used by `access`, and returns it, if it allows that.
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
        let entry = self.entry_by(cpu, section, addr, |slot| slot.settle(cpu, mark))?;
        allowed(entry).then_some(entry)
    }

    /// The page that `entry` maps, which was the entry of the page at `addr` a moment ago, with a reference. `None`: it is not
    /// any more.
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

/// Where a page has its entry: in a last-level table, or in a huge leaf, whose [part](Entry::part) the page is.
pub(super) struct Slot<'s> {
    slot: &'s crate::sync::atomic::AtomicU64,
    /// The page's place in the huge leaf.
    at: Option<usize>,
}

impl Slot<'_> {
    /// What `entry`, the value of the slot, says of the page. `None`: it leads to a table now.
    fn of_page(&self, entry: Entry) -> Option<Entry> {
        match self.at {
            None => Some(entry),
            Some(at) => entry.is_huge().then(|| entry.part(at)),
        }
    }

    /// The page's entry, which a CPU may have at the moment.
    pub(super) fn load(&self) -> Option<Entry> {
        self.of_page(node::load(self.slot))
    }

    /// The page's entry, once no CPU has it.
    pub(super) fn look(&self, wait: &impl Wait) -> Option<Entry> {
        self.of_page(protocol::look(self.slot, wait))
    }

    /// Changes the entry, of which a huge leaf's may change in its accessed bit alone. Returns what the page's is then.
    fn settle(&self, wait: &impl Wait, mut change: impl FnMut(Entry) -> Entry) -> Option<Entry> {
        let is_page = |entry: Entry| self.at.is_none() || entry.is_huge();
        let change = |entry: Entry| if is_page(entry) { change(entry) } else { entry };
        self.of_page(protocol::settle(self.slot, wait, change).1)
    }
}

/// Loads the bytes from `from` on.
///
/// # Safety
/// They are memory of one frame that stays allocated.
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

/// Stores the bytes from `to` on.
///
/// # Safety
/// They are memory of one frame that stays allocated.
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
