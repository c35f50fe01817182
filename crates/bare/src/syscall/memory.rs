//! The calls that change the address space. The subsystem does the work.

use super::{Args, Errno, Result};
use crate::arch::user;
use crate::fs;
use crate::percpu;
use crate::task::{breathe, current};
use alloc::vec::Vec;
use core::sync::atomic::Ordering;
use faultless::{Advice, MapFlags, PAGE_SHIFT, Prot, RemapFlags, Space, USER_END, VirtRange};

/// The space of the caller.
fn space<'a>() -> &'a Space<crate::machine::Bare> {
    // SAFETY: a thread runs, so this CPU runs the space of its process, which lives at least as long as
    // the call: only `execve` and the end of the process replace it, and these calls do neither.
    unsafe { &*percpu::this().space.get() }
}

/// Calls that need memory of the kernel are refused while it is short of it.
fn room() -> Result<()> {
    if crate::heap::low() { Err(Errno::ENOMEM) } else { Ok(()) }
}

/// [`room`], and whether the caller's limit leaves its address space so many bytes more.
fn room_for(bytes: u64) -> Result<()> {
    room()?;
    let limit = current().process.address_space.load(Ordering::Relaxed);
    let has = || space().mapped_pages() << PAGE_SHIFT;
    if limit != u64::MAX && has().saturating_add(bytes) > limit {
        return Err(Errno::ENOMEM);
    }
    Ok(())
}

/// `mmap(addr, length, prot, flags, fd, offset)`.
pub fn mmap(args: Args<'_>) -> Result {
    room_for(args.b())?;
    let (addr, len, prot, offset) = (args.a(), args.b(), args.c(), args.f());
    let prot = Prot::from_bits_truncate(prot as u32);
    let flags = MapFlags::from_bits_truncate(args.d() as u32);
    if offset & (faultless::PAGE_SIZE - 1) != 0 {
        return Err(Errno::EINVAL);
    }
    let at_once = flags.contains(MapFlags::POPULATE);
    let flags = flags - MapFlags::POPULATE;
    let start = if flags.contains(MapFlags::ANONYMOUS) {
        space().mmap(percpu::cpu(), addr, len, prot, flags)?
    } else {
        let mapped = fs::object_to_map(args.e() as i32, prot, flags)?;
        let backing = mapped.starting_at(offset >> PAGE_SHIFT);
        space().mmap_object(percpu::cpu(), addr, len, prot, flags, backing)?
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
    space().munmap(percpu::cpu(), args.a(), args.b())?;
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
    Ok(space().mremap(percpu::cpu(), args.a(), args.b(), args.c(), flags, args.e())?)
}

/// `madvise(addr, length, advice)`.
pub fn madvise(args: Args<'_>) -> Result {
    room()?;
    let advice = Advice::from_number(args.c() as u32).ok_or(Errno::EINVAL)?;
    let (start, len) = (args.a(), args.b());
    let act = |at, len| Ok(space().madvise(percpu::cpu(), at, len, advice)?);
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
    Ok(space().brk(percpu::cpu(), wanted))
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
        space().mincore(percpu::cpu(), at, piece, |there| pages.push(u8::from(there)))?;
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

/// `mlock(addr, length)`: nothing is ever paged out, so to lock is to fault in.
pub fn mlock(args: Args<'_>) -> Result {
    let start = faultless::addr::page_down(args.a());
    let len = args.a() - start + args.b().min(USER_END);
    mapped(start, len)?;
    // What cannot be had is left for later faults.
    let _ = populate(start, len, true).or_else(|_| populate(start, len, false));
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
