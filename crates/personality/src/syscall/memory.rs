//! System calls on the address space. The subsystem does the work.

use super::mempolicy::bind_new;
use super::mlock::{future_lock, lock_new};
use super::{Args, Errno, Result};
use crate::fs;
use crate::fs::inode::inode_of_tag;
use crate::fs::regular::Held;
use crate::syscall::args::{Entry, calls};
use crate::task::{cond_resched, current, lack, memory, reads};
use core::sync::atomic::Ordering;
use faultless::{
    Advice, Area, Backing, Cpu, MapFlags, MemoryLock, PAGE_SHIFT, PAGE_SIZE, PageSource,
    PrivateCopies, Prot, RemapFlags, Shared, Space, USER_END, VirtRange, VmaFlags,
};
use faultless_bare::arch::user;
use faultless_bare::heap::try_push;
use faultless_bare::machine::Bare;
use faultless_bare::percpu;
use faultless_collections::Vec;
use linux_raw_sys::general as linux;

/// The system calls of this file, by number.
pub(super) const CALLS: &[Entry] = calls![
    (linux::__NR_mmap, mmap),
    (linux::__NR_munmap, munmap),
    (linux::__NR_mprotect, mprotect),
    (linux::__NR_mremap, mremap),
    (linux::__NR_madvise, madvise),
    (linux::__NR_brk, brk),
    (linux::__NR_mincore, mincore),
    (linux::__NR_msync, msync),
    (linux::__NR_remap_file_pages, remap_file_pages),
];

/// Returns the space of the caller.
pub(super) fn space<'a>() -> &'a Space<Bare> {
    // SAFETY: a thread runs, so this CPU runs the space of its process. The space exists at least
    // until the end of the call: only `execve` and the end of the process replace the space, which
    // are other calls.
    unsafe { &*percpu::this().space.get() }
}

/// Calls the subsystem for an operation that may remove pages of the caller.
fn of_caller<R>(call: impl FnOnce(&Space<Bare>, &Cpu<'static, Bare>) -> R) -> R {
    let cpu = percpu::cpu();
    cpu.for_thread(&current().task.streams, || call(space(), cpu))
}

/// Fails if the kernel is short of memory. The caller holds no lock.
pub(super) fn room() -> Result<()> {
    if faultless_bare::heap::low() {
        // Retired memory may be waiting for a grace period, delayed by a CPU that the host did not
        // run.
        percpu::cpu().wait_grace_all();
        if faultless_bare::heap::low() {
            return Err(Errno::ENOMEM);
        }
    }
    Ok(())
}

/// The memory that a call adds to the caller's space, in bytes.
#[derive(Clone, Copy, Default)]
pub(super) struct Added {
    /// The size of the new mapping.
    pub bytes: u64,
    /// Set if the new memory is private and writable, and no stack.
    pub is_data: bool,
    /// The range of replaced mappings.
    pub replaced: Option<VirtRange>,
}

/// Checks [`room`], and the caller's limits of its address space and its data.
pub(super) fn room_for(added: Added) -> Result<()> {
    room()?;
    let process = &current().process;
    let limits = &process.limits;
    let address_space = limits.address_space.load(Ordering::Relaxed);
    let data = if added.is_data { limits.data.load(Ordering::Relaxed) } else { u64::MAX };
    if (address_space, data) == (u64::MAX, u64::MAX) {
        return Ok(());
    }
    let replaced = added.replaced.map_or(0, |range| bytes_of(range, |_| true));
    let fits = |has: u64, limit: u64| {
        // As on Linux, replaced memory does not count.
        let added = added.bytes.saturating_sub(replaced);
        limit == u64::MAX || has.saturating_add(added) <= limit
    };
    let has_data = || bytes_of(VirtRange::USER, is_data);
    if !fits(space().mapped_pages(percpu::cpu()) << PAGE_SHIFT, address_space)
        || data != u64::MAX && !fits(has_data(), data)
    {
        return Err(Errno::ENOMEM);
    }
    Ok(())
}

/// Returns whether the area counts against `RLIMIT_DATA`.
fn is_data(area: Area<'_>) -> bool {
    let flags = area.flags;
    area.allows(Prot::WRITE) && !flags.intersects(VmaFlags::SHARED | VmaFlags::GROWSDOWN)
}

/// Returns the number of bytes of `range` in mapped areas selected by `meant`.
fn bytes_of(range: VirtRange, meant: impl Fn(Area<'_>) -> bool) -> u64 {
    let mut bytes = 0;
    space().each_area(percpu::cpu(), range, |area| {
        if meant(area) {
            bytes += area.range.intersect(range).len();
        }
        true
    });
    bytes
}

/// Updates the caller's peaks of mapped and resident pages before `bytes` bytes are removed. Skips
/// small removals.
fn note_peaks(bytes: u64) {
    if bytes >= 16 << PAGE_SHIFT
        && let Some(memory) = current().process.memory()
    {
        memory.note_peaks();
    }
}

/// Flag of `mmap`: the mask of the kind.
const TYPE: u64 = 0xf;
/// Flags of `mmap`: the two kinds.
const SHARED: u64 = MapFlags::SHARED.bits() as u64;
const PRIVATE: u64 = MapFlags::PRIVATE.bits() as u64;
/// Flag of `mmap`: shared; unknown flags, or flags not supported by the file, are an error.
const SHARED_VALIDATE: u64 = 3;
/// Flags of `mmap` allowed with `SHARED_VALIDATE`: as on Linux, the older flags.
const VALIDATED: u64 = linux::MAP_SHARED_VALIDATE as u64
    | (linux::MAP_FIXED | linux::MAP_ANONYMOUS | linux::MAP_32BIT | linux::MAP_ABOVE4G) as u64
    | (linux::MAP_DENYWRITE | linux::MAP_EXECUTABLE | linux::MAP_UNINITIALIZED) as u64
    | (linux::MAP_GROWSDOWN | linux::MAP_LOCKED | linux::MAP_NORESERVE | linux::MAP_STACK) as u64
    | (linux::MAP_POPULATE | linux::MAP_NONBLOCK | linux::MAP_HUGETLB) as u64
    | (21 | 30) << linux::MAP_HUGE_SHIFT;
/// Flag of `mmap`: fault the pages in.
const POPULATE: u64 = MapFlags::POPULATE.bits() as u64;
/// Flag of `mmap`: do not fault in now; of `remap_file_pages`: do not fault in.
const NONBLOCK: u64 = 0x1_0000;

/// `mmap(addr, length, prot, flags, fd, offset)`.
pub fn mmap(args: Args<'_>) -> Result {
    let (addr, len, prot, offset) = (args.a(), args.b(), args.c(), args.f());
    let prot = Prot::from_bits_truncate(prot as u32);
    let mut flags = MapFlags::from_bits_truncate(args.d() as u32) - MapFlags::POPULATE;
    if offset & (PAGE_SIZE - 1) != 0 {
        return Err(Errno::EINVAL);
    }
    let file = match flags.contains(MapFlags::ANONYMOUS) {
        true => None,
        false => Some(current().process.files().get(args.e() as i32)?),
    };
    if len == 0 {
        return Err(Errno::EINVAL);
    }
    match args.d() & TYPE {
        SHARED | PRIVATE => {}
        // As on Linux, the failure comes from the subsystem, after the search for an address.
        _ if file.is_none() => flags -= MapFlags::SHARED | MapFlags::PRIVATE,
        SHARED_VALIDATE if args.d() & !VALIDATED != 0 => return Err(Errno::EOPNOTSUPP),
        SHARED_VALIDATE => flags -= MapFlags::PRIVATE,
        _ => return Err(Errno::EINVAL),
    }
    let is_private = !flags.contains(MapFlags::SHARED);
    let replaced = flags.contains(MapFlags::FIXED).then(|| addr.checked_add(len)).flatten();
    room_for(Added {
        bytes: faultless::page_up(len).unwrap_or(len),
        is_data: is_private && prot.contains(Prot::WRITE) && !flags.contains(MapFlags::GROWSDOWN),
        replaced: replaced.filter(|&end| end <= USER_END).map(|end| VirtRange::new(addr, end)),
    })?;
    if replaced.is_some() {
        note_peaks(len);
    }
    let lock = match future_lock() {
        MemoryLock::No if flags.contains(MapFlags::LOCKED) => MemoryLock::Now,
        lock => lock,
    };
    flags.set(MapFlags::LOCKED, lock != MemoryLock::No);
    // As on Linux, a hint in page 0 is no hint.
    let is_fixed = flags.intersects(MapFlags::FIXED | MapFlags::FIXED_NOREPLACE);
    let at = (is_fixed || addr >= PAGE_SIZE).then_some(addr);
    let start = match file {
        None => of_caller(|space, cpu| space.mmap(cpu, at, len, prot, flags))?,
        Some(file) => {
            let mapped = fs::object_to_map(&file, prot, flags)?;
            let backing = mapped.starting_at(offset >> PAGE_SHIFT);
            of_caller(|space, cpu| space.mmap_object(cpu, at, len, prot, flags, backing))?
        }
    };
    bind_new(start, len);
    lock_new(start, len, lock, prot.contains(Prot::WRITE));
    if lock != MemoryLock::Now && args.d() & (POPULATE | NONBLOCK) == POPULATE {
        // As on Linux, pages that cannot be faulted in now are skipped.
        let _ = populate(start, len, prot.contains(Prot::WRITE));
    }
    Ok(start)
}

/// Faults pages in, for writing or for reading, in pieces, so that other threads can run.
pub(super) fn populate(start: u64, len: u64, write: bool) -> Result<()> {
    let advice = if write { Advice::PopulateWrite } else { Advice::PopulateRead };
    in_pieces(start, len, |at, piece| {
        fetch(VirtRange::new(at, at + piece))?;
        lack::with_memory(|| Ok(space().madvise(percpu::cpu(), at, piece, advice)?))
    })
}

/// Waits until the pages of files on the disk mapped in `range` are present, unless they cannot be
/// read.
///
/// # Errors
/// `RESTART`: the thread is killed.
fn fetch(range: VirtRange) -> Result<()> {
    let mut left = range;
    while !left.is_empty() {
        // One area at a time, in its present state.
        let mut found = None;
        space().each_area(percpu::cpu(), left, |area| {
            let stored = area.memory.object().is_some_and(|object| object.is_stored());
            let part = area.part(left);
            found = stored.then(|| (part.range, part.offset, part.memory.clone()));
            !stored
        });
        let Some((range, offset, memory)) = found else { return Ok(()) };
        let object = Held::new(memory.into_object().ok_or(Errno::EINVAL)?);
        let end = (offset + range.pages()).min(object.pages());
        if reads::fetch(&object, offset..end, None) == Err(Errno::EINTR) {
            return Err(Errno::RESTART);
        }
        left = VirtRange::new(range.end, left.end);
    }
    Ok(())
}

/// Returns the mapped parts of `range`, and whether they are writable.
pub(super) fn areas(range: VirtRange) -> Result<Vec<(VirtRange, bool)>> {
    let mut areas = Vec::new();
    let mut room = Ok(());
    space().each_area(percpu::cpu(), range, |area| {
        room = try_push(&mut areas, (area.range.intersect(range), area.allows(Prot::WRITE)));
        room.is_ok()
    });
    room?;
    Ok(areas)
}

/// Calls `act` for a large range in pieces.
fn in_pieces(start: u64, len: u64, mut act: impl FnMut(u64, u64) -> Result<()>) -> Result<()> {
    const PIECE: u64 = 2 << 20;
    let mut done = 0;
    loop {
        let piece = (len - done).min(PIECE);
        act(start + done, piece)?;
        done += piece;
        if done == len {
            return Ok(());
        }
        if !cond_resched() {
            return Err(Errno::RESTART);
        }
    }
}

/// `munmap(addr, length)`.
pub fn munmap(args: Args<'_>) -> Result {
    note_peaks(args.b());
    of_caller(|space, cpu| space.munmap(cpu, args.a(), args.b()))?;
    Ok(0)
}

/// `mprotect(addr, length, prot)`.
pub fn mprotect(args: Args<'_>) -> Result {
    room()?;
    let prot = u32::try_from(args.c()).map_err(|_| Errno::EINVAL)?;
    let prot = Prot::from_bits_retain(prot);
    if prot.contains(Prot::WRITE) {
        data_for_protect(args.a(), args.b())?;
    }
    space().mprotect(percpu::cpu(), args.a(), args.b(), prot)?;
    Ok(0)
}

/// Checks the limit of data for memory that becomes writable.
fn data_for_protect(start: u64, len: u64) -> Result<()> {
    if current().process.limits.data.load(Ordering::Relaxed) == u64::MAX {
        return Ok(());
    }
    let end = faultless::page_up(len).and_then(|len| start.checked_add(len));
    let Some(end) = end.filter(|&end| end <= USER_END) else { return Ok(()) };
    let becomes = |area: Area<'_>| {
        let flags = area.flags;
        !area.allows(Prot::WRITE) && !flags.intersects(VmaFlags::SHARED | VmaFlags::GROWSDOWN)
    };
    let bytes = bytes_of(VirtRange::new(start, end), becomes);
    let (has, limit) = (bytes_of(VirtRange::USER, is_data), &current().process.limits.data);
    let fits = bytes == 0 || has.saturating_add(bytes) <= limit.load(Ordering::Relaxed);
    if fits { Ok(()) } else { Err(Errno::ENOMEM) }
}

/// `mremap(old, old_length, new_length, flags, new)`.
pub fn mremap(args: Args<'_>) -> Result {
    let flags = RemapFlags::from_bits(args.d() as u32).ok_or(Errno::EINVAL)?;
    let (old, new) = (args.b(), args.c());
    let mut moved = None;
    let data_is_limited = current().process.limits.data.load(Ordering::Relaxed) != u64::MAX;
    if data_is_limited && args.a() < USER_END {
        let page = faultless::page_down(args.a());
        space().each_area(percpu::cpu(), VirtRange::page(page), |area| {
            moved = Some(is_data(area));
            false
        });
    }
    let stays = if flags.contains(RemapFlags::DONTUNMAP) { 0 } else { old };
    let to = args.e().checked_add(new).filter(|&end| end <= USER_END);
    // As on Linux, only growth is limited.
    if new > stays {
        room_for(Added {
            bytes: new - stays,
            is_data: moved == Some(true),
            replaced: to
                .filter(|_| flags.contains(RemapFlags::FIXED))
                .map(|end| VirtRange::new(args.e(), end)),
        })?;
    } else {
        room()?;
    }
    note_peaks(old);
    let remap = || {
        // A search for mappings must see the move as one step: the file of a missed mapping could
        // be sealed. The subsystem may move several mappings in several steps.
        let _stores = memory::keep_stores();
        of_caller(|space, cpu| space.mremap(cpu, args.a(), old, new, flags, args.e()))
    };
    let start = lack::with_memory(|| Ok(remap()?))?;
    let mut lock = MemoryLock::No;
    if new > old {
        space().each_area(percpu::cpu(), VirtRange::page(start), |area| {
            lock = area.lock();
            false
        });
    }
    if lock == MemoryLock::Now {
        let added = faultless::page_down(old);
        let len = faultless::page_up(new - added).unwrap_or(0);
        let _ = populate(start + added, len, true);
    }
    Ok(start)
}

/// `madvise(addr, length, advice)`.
pub fn madvise(args: Args<'_>) -> Result {
    room()?;
    let (start, len) = (args.a(), args.b());
    if matches!(
        args.c() as u32,
        linux::MADV_REMOVE
            | linux::MADV_DONTNEED
            | linux::MADV_FREE
            | linux::MADV_PAGEOUT
            | linux::MADV_DONTNEED_LOCKED
    ) {
        note_peaks(len);
    }
    if args.c() as u32 == linux::MADV_REMOVE {
        return remove(start, len);
    }
    let advice = Advice::from_number(args.c() as u32).ok_or(Errno::EINVAL)?;
    let advise = |at, len| of_caller(|space, cpu| space.madvise(cpu, at, len, advice));
    let act = |at, len| lack::with_memory(|| Ok(advise(at, len)?));
    let ends = faultless::page_up(len).is_some_and(|len| start.checked_add(len).is_some());
    match advice {
        Advice::PopulateRead | Advice::PopulateWrite if ends => {
            in_pieces(start, len, |at, piece| {
                // A range beyond user space fails in the subsystem.
                if at + piece <= USER_END && faultless::is_page_aligned(at) {
                    let end = faultless::page_up(at + piece).unwrap_or(USER_END);
                    fetch(VirtRange::new(at, end))?;
                }
                act(at, piece)
            })?;
        }
        _ => act(start, len)?,
    }
    Ok(0)
}

/// `MADV_REMOVE`: punches a hole into the shared objects mapped there, as `fallocate` does.
fn remove(start: u64, len: u64) -> Result {
    let end = faultless::page_up(len).and_then(|len| start.checked_add(len));
    let end = end.filter(|_| faultless::is_page_aligned(start)).ok_or(Errno::EINVAL)?;
    let mut at = start;
    let mut hole = false;
    while at < end {
        // One area at a time, in its present state.
        let mut found = None;
        space().each_area(percpu::cpu(), VirtRange::new(at, end), |area| {
            let part = area.part(VirtRange::new(at, end));
            found = Some((part.range, part.flags, part.offset, part.memory.clone()));
            false
        });
        let Some((range, flags, offset, memory)) = found else {
            hole = true;
            break;
        };
        hole |= range.start > at;
        at = range.end;
        let object = Held::new(memory.into_object().ok_or(Errno::EINVAL)?);
        if object.is_stored() {
            return Err(Errno::EOPNOTSUPP);
        }
        if flags.contains(VmaFlags::LOCKED) {
            return Err(Errno::EINVAL);
        }
        if !flags.contains(VmaFlags::SHARED) || flags.contains(VmaFlags::NOWRITE) {
            return Err(Errno::EACCES);
        }
        let pages = offset..offset + range.pages();
        match inode_of_tag(object.tag()) {
            Some(inode) => {
                let regular = inode.regular().ok_or(Errno::EINVAL)?;
                regular.punch(pages.start << PAGE_SHIFT, pages.end << PAGE_SHIFT)?;
                inode.touch();
            }
            // Memory without a file: a segment, shared anonymous memory, or a file that only
            // mappings keep.
            None => {
                object.free_pages(percpu::cpu(), pages.clone());
                memory::revoke(&object, pages, PrivateCopies::Keep);
            }
        }
        if !cond_resched() && at < end {
            return Err(Errno::RESTART);
        }
    }
    if hole { Err(Errno::ENOMEM) } else { Ok(0) }
}

/// `brk(addr)`: does not fail; instead the break does not move.
pub fn brk(args: Args<'_>) -> Result {
    let heap = space().heap_range();
    let growth = args.a().saturating_sub(heap.end);
    note_peaks(heap.end.saturating_sub(args.a().max(heap.start)));
    let pages_end = |at: u64| faultless::page_up(at).unwrap_or(at);
    let added = Added {
        bytes: pages_end(args.a()).saturating_sub(pages_end(heap.end)),
        is_data: true,
        replaced: None,
    };
    // As on Linux, the end does not move if the range between the new and the old end is unmapped.
    let freed = pages_end(args.a())..pages_end(heap.end);
    if heap.start <= args.a() && !freed.is_empty() {
        let mut is_hole = true;
        space().each_area(percpu::cpu(), VirtRange::new(freed.start, freed.end), |_| {
            is_hole = false;
            false
        });
        if is_hole {
            return Ok(heap.end);
        }
    }
    // Shrinking frees memory, and does not fail for lack of memory.
    let wanted = if growth == 0 || room_for(added).is_ok() { args.a() } else { 0 };
    let end = of_caller(|space, cpu| space.brk(cpu, wanted));
    if growth != 0 && end == args.a() {
        settle_grown(end - growth, end);
    }
    Ok(end)
}

/// Binds the new part of the heap to the caller's nodes, and locks it after `MCL_FUTURE`.
fn settle_grown(from: u64, to: u64) {
    let start = faultless::page_up(from).unwrap_or(to);
    let len = faultless::page_up(to).unwrap_or(to).saturating_sub(start);
    bind_new(start, len);
    let lock = future_lock();
    if lock == MemoryLock::No {
        return;
    }
    // If the VMA cannot be split, the heap grows unlocked.
    let _ = space().mlock(percpu::cpu(), start, len, lock);
    if lock == MemoryLock::Now {
        let _ = populate(start, len, true);
    }
}

/// `mincore(addr, length, vector)`.
pub fn mincore(args: Args<'_>) -> Result {
    let (addr, len, vector) = (args.a(), args.b(), args.c());
    if len > USER_END {
        return Err(Errno::ENOMEM);
    }
    // In pieces: the vector may be larger than the kernel's heap.
    let mut pages = Vec::new();
    in_pieces(addr, len, |at, piece| {
        pages.clear();
        // The bytes of one piece.
        pages.try_reserve((piece >> PAGE_SHIFT) as usize + 1)?;
        let mut room = Ok(());
        space().mincore(percpu::cpu(), at, piece, |there| {
            room = room.and(pages.try_push(u8::from(there)));
        })?;
        room?;
        Ok(user::write_bytes(vector.wrapping_add((at - addr) >> PAGE_SHIFT), &pages)?)
    })?;
    Ok(0)
}

/// `msync(addr, length, flags)`: files are in memory, so there is no data to write back or to
/// read again.
pub fn msync(args: Args<'_>) -> Result {
    const ASYNC: u64 = linux::MS_ASYNC as u64;
    const INVALIDATE: u64 = linux::MS_INVALIDATE as u64;
    const SYNC: u64 = linux::MS_SYNC as u64;
    let flags = args.c();
    if args.a() & (PAGE_SIZE - 1) != 0
        || flags & !(ASYNC | INVALIDATE | SYNC) != 0
        || flags & (ASYNC | SYNC) == ASYNC | SYNC
    {
        return Err(Errno::EINVAL);
    }
    // As on Linux, a length near the maximum is rounded up to 0, without an effect.
    let len = faultless::page_up(args.b()).unwrap_or(0);
    let end = args.a().checked_add(len).ok_or(Errno::ENOMEM)?;
    if len == 0 {
        return Ok(0);
    }
    let range = VirtRange::new(args.a(), end);
    if flags & INVALIDATE != 0 {
        let mut locked = false;
        space().each_area(percpu::cpu(), range, |area| {
            locked = area.lock() != MemoryLock::No;
            !locked
        });
        if locked {
            return Err(Errno::EBUSY);
        }
    }
    mapped(range)?;
    Ok(0)
}

/// `remap_file_pages(addr, length, prot, page, flags)`: makes a new shared mapping of another
/// part of the same object, as Linux does since the removal of nonlinear mappings.
pub fn remap_file_pages(args: Args<'_>) -> Result {
    room()?;
    let (start, len) = (faultless::page_down(args.a()), faultless::page_down(args.b()));
    let first = args.d();
    let end = start.checked_add(len).filter(|&end| end > start && end <= USER_END);
    let pages_end = first.checked_add(len >> PAGE_SHIFT);
    let (Some(end), 0, Some(_)) = (end, args.c(), pages_end) else { return Err(Errno::EINVAL) };
    // Declared first, so that a last reference is dropped after the lock.
    let object;
    // Otherwise, the mapping could end, and the file be sealed, before the new mapping exists.
    let stores = memory::keep_stores();
    // The whole range must map one object, with one protection, without holes.
    let mut whole: Option<(Prot, VmaFlags, MemoryLock, PageSource)> = None;
    let mut reached = start;
    space().each_area(percpu::cpu(), VirtRange::new(start, end), |area| {
        let alike = match &whole {
            // As on Linux, a mapping that may never be written does not count as shared.
            None => !area.is_private() && !area.flags.contains(VmaFlags::NOWRITE),
            Some((prot, flags, _, memory)) => {
                *flags == area.flags
                    && *prot == area.prot
                    && memory.object().map(Shared::id) == area.memory.object().map(Shared::id)
            }
        };
        let joins = area.range.start <= reached && alike;
        if joins {
            reached = area.range.end;
            whole.get_or_insert_with(|| (area.prot, area.flags, area.lock(), area.memory.clone()));
        }
        joins
    });
    let (prot, area_flags, lock, memory) = whole.ok_or(Errno::EINVAL)?;
    let lock = if lock == MemoryLock::No { future_lock() } else { MemoryLock::Now };
    object = Held::new(memory.into_object().ok_or(Errno::EINVAL)?);
    if reached < end {
        return Err(Errno::EINVAL);
    }
    let may_write = !area_flags.contains(VmaFlags::NOWRITE);
    let backing = Backing { object: &object, first, may_write };
    let flags = MapFlags::SHARED | MapFlags::FIXED;
    space().mmap_object(percpu::cpu(), start, len, prot, flags, backing)?;
    drop(stores);
    // As on Linux, locked pages stay locked, and the rest of the call cannot fail.
    if lock != MemoryLock::No {
        let _ = space().mlock(percpu::cpu(), start, len, lock);
    }
    if lock == MemoryLock::Now || args.e() & NONBLOCK == 0 {
        // Skips pages that cannot be faulted in now.
        let _ = populate(start, len, prot.contains(Prot::WRITE));
    }
    Ok(0)
}

/// Checks that the whole range is mapped.
fn mapped(range: VirtRange) -> Result<()> {
    if space().is_mapped(percpu::cpu(), range) { Ok(()) } else { Err(Errno::ENOMEM) }
}
