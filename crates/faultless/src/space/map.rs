//! `mmap`: of anonymous memory, private and shared, of objects, and of [device
//! memory](super::device).

use super::Space;
use super::area::{PageSource, Prot, VmaFlags};
use super::device::DeviceMemory;
use super::made::State;
use super::place::{Places, is_free};
use super::vma::{Piece, Vma};
use super::write::NOWHERE;
use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtRange, is_page_aligned, page_up};
use crate::error::{Errno, Error};
use crate::file::Object;
use crate::heap::Shared;
use crate::knob::HugeText;
use crate::machine::Machine;
use crate::space::batch::FlushBatch;
use crate::space::tree::View;
use crate::table::format::USER_END;
use crate::table::node::{ENTRIES, TABLE_ALIGN};
use crate::vm::Cpu;
use bitflags::bitflags;
use core::cell::Cell;

/// The number of times an automatically placed mapping is moved to another place because of another
/// CPU's claim, before the CPU waits for its turn.
const MOST_PLACES: u32 = 2;

bitflags! {
    /// Linux's `MAP_*` flags that concern memory.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct MapFlags: u32 {
        /// All spaces that inherit the mapping see stores.
        const SHARED = 0x01;
        /// Stores are private to the process.
        const PRIVATE = 0x02;
        /// Exactly at this address, replacing existing mappings.
        const FIXED = 0x10;
        /// Not backed by a file. [`Space::mmap`] maps only such memory; [`Space::mmap_object`] and
        /// [`Space::mmap_device`] ignore the flag.
        const ANONYMOUS = 0x20;
        /// Grows down by faults just below it.
        const GROWSDOWN = 0x0100;
        /// Locked from the beginning, as by [`Space::mlock`].
        const LOCKED = 0x2000;
        /// Do not require that memory for the whole mapping is available.
        const NORESERVE = 0x4000;
        /// Fault in the whole mapping at once.
        const POPULATE = 0x8000;
        /// A stack: no huge pages.
        const STACK = 0x2_0000;
        /// Exactly at this address, and only if the range is free.
        const FIXED_NOREPLACE = 0x10_0000;
    }
}

/// The contents of a mapping: an object, starting at some page.
#[derive(Debug)]
pub struct Backing<'a> {
    /// The object. The mapping gets its own share.
    pub object: &'a Shared<Object>,
    /// The object's page that is mapped first; it need not exist.
    pub first: u64,
    /// Whether a shared mapping may ever be written (the file was opened for writing).
    pub may_write: bool,
}

/// The contents of a new mapping.
pub(super) enum What<'a> {
    Anonymous,
    Object(Backing<'a>),
    Device(DeviceMemory),
}

/// The requested place of a mapping.
struct Request {
    /// The hint; the address of a fixed mapping.
    at: Option<u64>,
    fixed: bool,
    flags: MapFlags,
    /// An error that Linux returns only after it has found a place.
    late: Option<Errno>,
}

impl<M: Machine> Space<M> {
    /// Maps `len` bytes (rounded up to pages) of anonymous memory and returns the address: `at`
    /// with `FIXED` or `FIXED_NOREPLACE`. Without these flags `at` is a hint, an address or `None`:
    /// the result is the page of the hint if that range is free, or the highest possible address.
    /// A hint below [`Machine::lowest_address`] stands for that address. If another CPU is
    /// currently mapping or unmapping the highest free range, the call does not wait, but maps as
    /// high as possible in a region of the calling CPU (64 GiB each, below the others), as do this
    /// CPU's next mappings in this space. Knob `map_apart`. There is no file argument, so
    /// `ANONYMOUS` is implied; Linux returns `EBADF` without it. For a file use
    /// [`mmap_object`](Self::mmap_object).
    ///
    /// # Errors
    /// As Linux: `EINVAL` (length 0, a fixed address that is unaligned or `None`, neither or both
    /// of private and shared, a shared mapping that grows), `ENOMEM` (no free range, too many VMAs,
    /// more than memory and the swap area hold, without `NORESERVE`), `EEXIST` (`FIXED_NOREPLACE`
    /// over a mapping), `EPERM` (fixed below [`Machine::lowest_address`]). A failed call
    /// changes nothing.
    pub fn mmap(
        &self,
        cpu: &Cpu<'_, M>,
        at: impl Into<Option<u64>>,
        len: u64,
        prot: Prot,
        flags: MapFlags,
    ) -> Result<u64, Error> {
        self.map_and_populate(cpu, (at.into(), len), prot, flags, What::Anonymous)
    }

    /// Maps `len` bytes (rounded up to pages) of an object, `backing`, otherwise like
    /// [`mmap`](Self::mmap). Stores to a private mapping go to copies of the object's pages; an
    /// access beyond the end of the object causes SIGBUS.
    ///
    /// # Errors
    /// As Linux: the errors of [`mmap`](Self::mmap), and `EACCES` (a shared writable mapping of an
    /// object that may not be written), `EOVERFLOW` (bytes beyond the largest offset of a file).
    pub fn mmap_object(
        &self,
        cpu: &Cpu<'_, M>,
        at: impl Into<Option<u64>>,
        len: u64,
        prot: Prot,
        flags: MapFlags,
        backing: Backing<'_>,
    ) -> Result<u64, Error> {
        let mut at = at.into();
        if at.is_none() && len >= TABLE_ALIGN {
            at = self.hint_for_leaves(cpu, len, flags, &backing);
        }
        self.map_and_populate(cpu, (at, len), prot, flags, What::Object(backing))
    }

    /// Returns the best address for a mapping of a large file without a requested address: as high
    /// as any, but with the same alignment of address and offset modulo the pages of a huge leaf,
    /// as on Linux. It is a hint, so if another call maps this range, the mapping goes to the usual
    /// place.
    #[cold]
    #[inline(never)]
    fn hint_for_leaves(
        &self,
        cpu: &Cpu<'_, M>,
        len: u64,
        flags: MapFlags,
        backing: &Backing<'_>,
    ) -> Option<u64> {
        let Backing { object, first, .. } = *backing;
        if flags.intersects(MapFlags::FIXED | MapFlags::FIXED_NOREPLACE) {
            return None;
        }
        // Unnamed memory is not a file.
        let large = object.tag() != 0 && object.pages() >= ENTRIES as u64;
        if !large || cpu.vm().knobs.huge_text() == HugeText::Never {
            return None;
        }
        let section = self.section(cpu);
        let span = page_up(len)?.checked_add(TABLE_ALIGN - PAGE_SIZE)?;
        let least = Places::common(cpu).find(&self.view(cpu, &section), None, span)?;
        let offset = first.wrapping_mul(PAGE_SIZE);
        Some(least + (offset.wrapping_sub(least) & (TABLE_ALIGN - 1)))
    }

    pub(super) fn map_and_populate(
        &self,
        cpu: &Cpu<'_, M>,
        (at, len): (Option<u64>, u64),
        prot: Prot,
        flags: MapFlags,
        what: What<'_>,
    ) -> Result<u64, Error> {
        self.check_vm(cpu);
        if let What::Object(backing) = &what {
            backing.object.check_vm(cpu);
        }
        let range = self.map(cpu, (at, len), prot, flags, what).map_err(|errno| {
            let start = at.unwrap_or(0);
            let range = VirtRange::new(start, start.saturating_add(len));
            Error { operation: "mmap", range, errno }
        })?;
        cpu.collect();
        if flags.contains(MapFlags::POPULATE) {
            // As on Linux, pages that cannot be populated are left to later faults.
            let _ = self.populate(cpu, range);
        }
        Ok(range.start)
    }

    fn map(
        &self,
        cpu: &Cpu<'_, M>,
        (at, len): (Option<u64>, u64),
        prot: Prot,
        flags: MapFlags,
        what: What<'_>,
    ) -> Result<VirtRange, Errno> {
        let fixed = flags.intersects(MapFlags::FIXED | MapFlags::FIXED_NOREPLACE);
        if len == 0 {
            return Err(Errno::EINVAL);
        }
        let len = page_up(len).filter(|&len| len != 0 && len <= USER_END).ok_or(Errno::ENOMEM)?;
        if fixed {
            let addr = at.ok_or(Errno::EINVAL)?;
            if addr > USER_END - len {
                return Err(Errno::ENOMEM);
            }
            if !is_page_aligned(addr) {
                return Err(Errno::EINVAL);
            }
            if addr < cpu.vm().machine().lowest_address() {
                return Err(Errno::EPERM);
            }
        }
        let kind = flags & (MapFlags::SHARED | MapFlags::PRIVATE);
        let shared = kind == MapFlags::SHARED;
        let grows = flags.contains(MapFlags::GROWSDOWN);
        let anonymous = matches!(what, What::Anonymous);
        let device = matches!(what, What::Device(_));
        let may_write = match &what {
            What::Anonymous => true,
            What::Object(backing) => backing.may_write,
            What::Device(device) => device.may_write,
        };
        let late = match &what {
            // No file has a byte at such an offset.
            What::Object(backing) if backing.first > (i64::MAX as u64 - len) >> PAGE_SHIFT => {
                Some(Errno::EOVERFLOW)
            }
            // There are no copies of device memory.
            What::Device(_) if !shared => Some(Errno::EINVAL),
            _ if shared && !may_write && prot.contains(Prot::WRITE) => Some(Errno::EACCES),
            // Only private memory without an object grows.
            _ if grows && (shared || !anonymous) => Some(Errno::EINVAL),
            What::Device(device) => device.check(cpu.vm().machine(), len >> PAGE_SHIFT).err(),
            _ if shared || kind == MapFlags::PRIVATE => None,
            _ => Some(Errno::EINVAL),
        };
        // The pages of an object are not accounted to the mapping.
        let promised = if shared { anonymous } else { prot.contains(Prot::WRITE) };
        let commits = !flags.contains(MapFlags::NORESERVE) && promised;
        if commits && !cpu.vm().may_promise(len >> PAGE_SHIFT) {
            return Err(Errno::ENOMEM);
        }
        let mut vma_flags = VmaFlags::empty();
        vma_flags.set(VmaFlags::SHARED, shared);
        vma_flags.set(VmaFlags::GROWSDOWN, grows);
        vma_flags.set(VmaFlags::NOHUGEPAGE, flags.contains(MapFlags::STACK));
        vma_flags.set(VmaFlags::LOCKED, flags.contains(MapFlags::LOCKED) && !device);
        vma_flags.set(VmaFlags::NORESERVE, flags.contains(MapFlags::NORESERVE));
        vma_flags.set(VmaFlags::ACCOUNT, commits && !shared);
        let prot = prot & (Prot::READ | Prot::WRITE | Prot::EXEC);
        vma_flags.set(VmaFlags::NOWRITE, shared && !may_write);
        let (memory, offset) = match what {
            What::Object(Backing { object, first, .. }) => {
                (PageSource::Object(object.clone()), first)
            }
            What::Anonymous if shared && late.is_none() => {
                (PageSource::Object(Object::try_new(cpu, len >> PAGE_SHIFT, 0)?), 0)
            }
            What::Anonymous => (PageSource::Anonymous, 0),
            What::Device(DeviceMemory { first, cache, tag, .. }) => {
                (PageSource::Device { cache, tag }, first.0.into())
            }
        };
        let piece = Piece::new(VirtRange::new(0, len), prot, vma_flags, offset, memory);
        let request = Request { at, fixed, flags, late };
        let done = self.map_area(cpu, &request, &piece);
        // This is the last share if the mapping was refused, or if another CPU has already unmapped
        // it.
        if let PageSource::Object(object) = piece.attributes.memory {
            Object::release(object, cpu);
        }
        done
    }

    /// Finds a free range for `piece`, of which only the length is used, and maps it there.
    #[inline(always)]
    fn map_area(
        &self,
        cpu: &Cpu<'_, M>,
        request: &Request,
        piece: &Piece,
    ) -> Result<VirtRange, Errno> {
        let len = piece.range.len();
        let next = if request.fixed { Places::common(cpu) } else { Places::next(self, cpu) };
        let places = Cell::new(next);
        let chosen = Cell::new(NOWHERE);
        let choose = |view: &View<'_, Vma>| {
            // In the CPU's region any free place is equally good.
            let last = chosen.get();
            let stays = places.get().are_apart() && !last.is_empty() && is_free(view, last);
            let start = if request.fixed {
                request.at
            } else if stays {
                Some(last.start)
            } else {
                places.get().find(view, request.at, len)
            };
            let range = start.map_or(NOWHERE, |start| VirtRange::new(start, start + len));
            chosen.set(range);
            [range, NOWHERE]
        };
        let met = Cell::new(0);
        let elsewhere = || {
            let hint = request.at.map(|at| places.get().hint(at));
            if hint == Some(chosen.get().start) || met.replace(met.get() + 1) >= MOST_PLACES {
                return false;
            }
            let Some(apart) = Places::apart(self, cpu) else { return false };
            places.set(apart);
            chosen.set(NOWHERE);
            true
        };
        let or = (!request.fixed).then_some(&elsewhere as &dyn Fn() -> bool);
        for tries in 0.. {
            // Placing a mapping leaves no range unmapped, so no table is unlinked.
            let writing = self.write_where(cpu, PAGE_SIZE, tries, choose, or);
            let [range, _] = writing.asked;
            if range.is_empty() {
                return Err(Errno::ENOMEM);
            }
            let occupied = request.fixed && writing.vmas(range).next().is_some();
            if occupied && request.flags.contains(MapFlags::FIXED_NOREPLACE) {
                return Err(Errno::EEXIST);
            }
            if let Some(errno) = request.late {
                return Err(errno);
            }
            let was = if occupied { writing.harvest_accessed(range) } else { None };
            let state = if occupied { State::WriteLocked } else { State::Unlocked };
            let placed = writing.step(range.with_neighbours(), |step| {
                if !request.fixed {
                    let view = step.view();
                    if writing.is_outdated(&view) && choose(&view) != writing.asked {
                        return Ok(false);
                    }
                }
                step.replace(range, placed(piece, range), state)?;
                Ok(true)
            });
            match placed {
                Ok(true) => {}
                Ok(false) => {
                    elsewhere();
                    continue;
                }
                // At the common top the mapping may merge with an existing VMA, without a new VMA.
                Err(Errno::ENOMEM) if places.get().are_apart() => {
                    places.set(Places::common(cpu));
                    met.set(MOST_PLACES);
                    continue;
                }
                Err(errno) => return Err(errno),
            }
            if occupied {
                let mut batch = FlushBatch::new(cpu, self);
                writing.zap(range, was.as_ref(), &mut batch);
                batch.finish();
            }
            return Ok(range);
        }
        Err(Errno::ENOMEM)
    }
}

/// Returns `piece`, which begins at address 0, at `range`. Anonymous pages have the numbers of
/// their addresses, as at address 0.
#[inline(always)]
fn placed(piece: &Piece, range: VirtRange) -> Piece {
    let mut placed = Piece { range, ..piece.clone() };
    if !placed.attributes.memory.is_anonymous() {
        placed.move_to(range, piece.area().offset);
    }
    placed
}
