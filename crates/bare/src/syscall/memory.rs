//! The calls that change the address space. The subsystem does the work.

use super::{Args, Errno, Result};
use crate::arch::user;
use crate::fs;
use crate::fs::regular::Held;
use crate::heap::{Vec, try_push};
use crate::machine::Bare;
use crate::percpu;
use crate::task::{breathe, current};
use core::sync::atomic::Ordering;
use faultless::{
    Advice, Area, Backing, Cpu, MapFlags, PAGE_SHIFT, Prot, RemapFlags, Shared, Space, USER_END,
    VirtRange, VmaFlags,
};

/// The space of the caller.
pub(super) fn space<'a>() -> &'a Space<Bare> {
    // SAFETY: a thread runs, so this CPU runs the space of its process, which lives at least as long as
    // the call: only `execve` and the end of the process replace it, and these calls do neither.
    unsafe { &*percpu::this().space.get() }
}

/// Makes a call of the subsystem that may take pages of the caller away.
fn of_caller<R>(call: impl FnOnce(&Space<Bare>, &Cpu<'static, Bare>) -> R) -> R {
    let cpu = percpu::cpu();
    cpu.for_thread(&current().streams, || call(space(), cpu))
}

/// Calls that need memory of the kernel are refused while it is short of it.
fn room() -> Result<()> {
    if crate::heap::low() { Err(Errno::ENOMEM) } else { Ok(()) }
}

/// [`room`], and whether the caller's limit leaves its address space so many bytes more.
pub(super) fn room_for(bytes: u64) -> Result<()> {
    room()?;
    let limit = current().process.address_space.load(Ordering::Relaxed);
    let has = || space().mapped_pages() << PAGE_SHIFT;
    if limit != u64::MAX && has().saturating_add(bytes) > limit {
        return Err(Errno::ENOMEM);
    }
    Ok(())
}

/// Whether the caller has what it maps locked, and so faulted in, at once.
fn locks_future() -> bool {
    current().process.locks_future.load(Ordering::Relaxed)
}

/// Of `mmap`: the mapping is locked.
const LOCKED: u64 = 0x2000;
/// Of `mmap`: fault it in.
const POPULATE: u64 = MapFlags::POPULATE.bits() as u64;
/// Of `mmap`: but not now; of `remap_file_pages`: do not fault it in.
const NONBLOCK: u64 = 0x1_0000;

/// `mmap(addr, length, prot, flags, fd, offset)`.
pub fn mmap(args: Args<'_>) -> Result {
    room_for(args.b())?;
    let (addr, len, prot, offset) = (args.a(), args.b(), args.c(), args.f());
    let prot = Prot::from_bits_truncate(prot as u32);
    let flags = MapFlags::from_bits_truncate(args.d() as u32);
    if offset & (faultless::PAGE_SIZE - 1) != 0 {
        return Err(Errno::EINVAL);
    }
    let populates = args.d() & (POPULATE | NONBLOCK) == POPULATE;
    let at_once = populates || args.d() & LOCKED != 0 || locks_future();
    let flags = flags - MapFlags::POPULATE;
    let start = if flags.contains(MapFlags::ANONYMOUS) {
        of_caller(|space, cpu| space.mmap(cpu, addr, len, prot, flags))?
    } else {
        let mapped = fs::object_to_map(args.e() as i32, prot, flags)?;
        let backing = mapped.starting_at(offset >> PAGE_SHIFT);
        of_caller(|space, cpu| space.mmap_object(cpu, addr, len, prot, flags, backing))?
    };
    if at_once {
        // As on Linux, what cannot be had is left for later faults.
        let _ = populate(start, len, prot.contains(Prot::WRITE));
    }
    Ok(start)
}

/// Faults pages in, for writing or for reading, a piece at a time, so that others get a turn.
fn populate(start: u64, len: u64, write: bool) -> Result<()> {
    let advice = if write { Advice::PopulateWrite } else { Advice::PopulateRead };
    in_pieces(start, len, |at, piece| {
        space().madvise(percpu::cpu(), at, piece, advice).map_err(Errno::from)
    })
}

/// What is mapped in `range`, and whether the program may write there.
fn areas(range: VirtRange) -> Result<Vec<(VirtRange, bool)>> {
    let mut areas = Vec::new();
    let mut room = Ok(());
    space().each_area(percpu::cpu(), range, |area| {
        room = try_push(&mut areas, (area.range.intersect(range), area.allows(Prot::WRITE)));
        room.is_ok()
    });
    room.map(|()| areas)
}

/// Does something to a range that may be large, a piece at a time.
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
        if !breathe() {
            return Err(Errno::RESTART);
        }
    }
}

/// `munmap(addr, length)`.
pub fn munmap(args: Args<'_>) -> Result {
    of_caller(|space, cpu| space.munmap(cpu, args.a(), args.b()))?;
    Ok(0)
}

/// `mprotect(addr, length, prot)`.
pub fn mprotect(args: Args<'_>) -> Result {
    room()?;
    let prot = u32::try_from(args.c()).map_err(|_| Errno::EINVAL)?;
    let prot = Prot::from_bits_retain(prot);
    space().mprotect(percpu::cpu(), args.a(), args.b(), prot)?;
    Ok(0)
}

/// `mremap(old, old_length, new_length, flags, new)`.
pub fn mremap(args: Args<'_>) -> Result {
    room_for(args.c().saturating_sub(args.b()))?;
    let flags = RemapFlags::from_bits(args.d() as u32).ok_or(Errno::EINVAL)?;
    let (old, new) = (args.b(), args.c());
    let start = of_caller(|space, cpu| space.mremap(cpu, args.a(), old, new, flags, args.e()))?;
    if new > old && locks_future() {
        let added = faultless::addr::page_down(old);
        let len = faultless::addr::page_up(new - added).unwrap_or(0);
        let _ = populate(start + added, len, true);
    }
    Ok(start)
}

/// `madvise(addr, length, advice)`.
pub fn madvise(args: Args<'_>) -> Result {
    room()?;
    let advice = Advice::from_number(args.c() as u32).ok_or(Errno::EINVAL)?;
    let (start, len) = (args.a(), args.b());
    let act = |at, len| Ok(of_caller(|space, cpu| space.madvise(cpu, at, len, advice))?);
    let ends = faultless::addr::page_up(len).is_some_and(|len| start.checked_add(len).is_some());
    match advice {
        Advice::PopulateRead | Advice::PopulateWrite if ends => in_pieces(start, len, act)?,
        _ => act(start, len)?,
    }
    Ok(0)
}

/// `brk(addr)`: never an error; the break stays where it is instead.
pub fn brk(args: Args<'_>) -> Result {
    let growth = args.a().saturating_sub(space().heap_range().end);
    let wanted = if room_for(growth).is_ok() { args.a() } else { 0 };
    let end = of_caller(|space, cpu| space.brk(cpu, wanted));
    if growth != 0 && end == args.a() && locks_future() {
        let start = faultless::addr::page_down(end - growth);
        let len = faultless::addr::page_up(end).unwrap_or(end) - start;
        let _ = populate(start, len, true);
    }
    Ok(end)
}

/// `mincore(addr, length, vector)`.
pub fn mincore(args: Args<'_>) -> Result {
    let (addr, len, vector) = (args.a(), args.b(), args.c());
    if len > USER_END {
        return Err(Errno::ENOMEM);
    }
    // The vector may be larger than the kernel's heap.
    let mut pages = Vec::new();
    in_pieces(addr, len, |at, piece| {
        pages.clear();
        // For as many as there are in a piece.
        pages.try_reserve((piece >> PAGE_SHIFT) as usize + 1)?;
        let mut room = Ok(());
        space().mincore(percpu::cpu(), at, piece, |there| {
            room = room.and(pages.try_push(u8::from(there)));
        })?;
        room?;
        user::write_bytes(vector.wrapping_add((at - addr) >> PAGE_SHIFT), &pages)
    })?;
    Ok(0)
}

/// `msync(addr, length, flags)`: the files are memory, so there is nothing to write back.
pub fn msync(args: Args<'_>) -> Result {
    const ASYNC_AND_SYNC: u64 = 1 | 4;
    let flags = args.c();
    if args.a() & (faultless::PAGE_SIZE - 1) != 0
        || flags & !(1 | 2 | 4) != 0
        || flags & ASYNC_AND_SYNC == ASYNC_AND_SYNC
    {
        return Err(Errno::EINVAL);
    }
    mapped(args.a(), args.b())?;
    Ok(0)
}

/// The pages that a call to lock or unlock is about.
fn to_lock(args: &Args<'_>) -> Result<VirtRange> {
    let start = faultless::addr::page_down(args.a());
    let len = args.b().wrapping_add(args.a() - start);
    // As on Linux, a length that is nearly all there is comes round to nothing.
    let len = faultless::addr::page_up(len).unwrap_or(0);
    let end = start.checked_add(len).ok_or(Errno::EINVAL)?;
    mapped(start, len)?;
    Ok(VirtRange::new(start, end))
}

/// `mlock(addr, length)`: nothing is ever paged out, so to lock is to fault in.
pub fn mlock(args: Args<'_>) -> Result {
    let range = to_lock(&args)?;
    for (part, write) in areas(range)? {
        populate(part.start, part.len(), write).map_err(|errno| match errno {
            Errno::RESTART => errno,
            _ => Errno::ENOMEM,
        })?;
    }
    Ok(0)
}

/// `mlock2(addr, length, flags)`.
pub fn mlock2(args: Args<'_>) -> Result {
    const ON_FAULT: u64 = 1;
    match args.c() {
        0 => mlock(args),
        ON_FAULT => munlock(args),
        _ => Err(Errno::EINVAL),
    }
}

/// `munlock(addr, length)`: pages that are there stay.
pub fn munlock(args: Args<'_>) -> Result {
    to_lock(&args)?;
    Ok(0)
}

/// `mlockall(flags)`.
pub fn mlockall(args: Args<'_>) -> Result {
    const CURRENT: u64 = 1;
    const FUTURE: u64 = 2;
    const ON_FAULT: u64 = 4;
    let flags = args.a();
    if flags & !(CURRENT | FUTURE | ON_FAULT) != 0 || flags & (CURRENT | FUTURE) == 0 {
        return Err(Errno::EINVAL);
    }
    let at_once = flags & ON_FAULT == 0;
    current().process.locks_future.store(flags & FUTURE != 0 && at_once, Ordering::Relaxed);
    if flags & CURRENT != 0 && at_once {
        for (part, write) in areas(VirtRange::USER)? {
            // What else cannot be had is left out.
            if populate(part.start, part.len(), write) == Err(Errno::RESTART) {
                return Err(Errno::RESTART);
            }
        }
    }
    Ok(0)
}

/// `munlockall()`.
pub fn munlockall(_: Args<'_>) -> Result {
    current().process.locks_future.store(false, Ordering::Relaxed);
    Ok(0)
}

/// `remap_file_pages(addr, length, prot, page, flags)`: a new mapping of another part of what is mapped there,
/// shared, as Linux has it since it has no mappings out of order any more.
pub fn remap_file_pages(args: Args<'_>) -> Result {
    room()?;
    let (start, len) = (faultless::addr::page_down(args.a()), faultless::addr::page_down(args.b()));
    let first = args.d();
    let end = start.checked_add(len).filter(|&end| end > start && end <= USER_END);
    let pages_end = first.checked_add(len >> PAGE_SHIFT);
    let (Some(end), 0, Some(_)) = (end, args.c(), pages_end) else { return Err(Errno::EINVAL) };
    // All of it must be of one object, alike, and without holes.
    let mut whole: Option<Area> = None;
    let mut reached = start;
    space().each_area(percpu::cpu(), VirtRange::new(start, end), |area| {
        let alike = match &whole {
            None => !area.is_private(),
            Some(first) => {
                first.flags == area.flags
                    && first.prot == area.prot
                    && first.object.as_ref().map(Shared::id) == area.object.as_ref().map(Shared::id)
            }
        };
        let joins = area.range.start <= reached && alike;
        if joins {
            reached = area.range.end;
            whole.get_or_insert_with(|| area.clone());
        }
        joins
    });
    let area = whole.ok_or(Errno::EINVAL)?;
    let object = Held::new(area.object.ok_or(Errno::EINVAL)?);
    if reached < end {
        return Err(Errno::EINVAL);
    }
    let may_write = !area.flags.contains(VmaFlags::NOWRITE);
    let backing = Backing { object: &object, first, may_write };
    let flags = MapFlags::SHARED | MapFlags::FIXED;
    space().mmap_object(percpu::cpu(), start, len, area.prot, flags, backing)?;
    if args.e() & NONBLOCK == 0 {
        // What cannot be had is left for later faults.
        let _ = populate(start, len, area.prot.contains(Prot::WRITE));
    }
    Ok(0)
}

/// Whether all of a range is mapped.
fn mapped(addr: u64, len: u64) -> Result<()> {
    let end = faultless::addr::page_up(len)
        .and_then(|len| addr.checked_add(len))
        .filter(|&end| end <= USER_END)
        .ok_or(Errno::ENOMEM)?;
    let all = space().is_mapped(percpu::cpu(), VirtRange::new(addr, end));
    if all { Ok(()) } else { Err(Errno::ENOMEM) }
}
