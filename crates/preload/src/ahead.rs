//! Prefault ahead: populates parts of a large block before a program that touches the pages in
//! order reaches the parts.
//!
//! The kernel reports no first touches to a program. Faults could be reported by `userfaultfd`,
//! which needs a permission, or by protected pages and `SIGSEGV`, a signal that belongs to the
//! program. This module uses neither: a helper thread ([`helper`]) reads by `mincore`
//! up to which page the pages are resident without a gap. The helper populates the next pages,
//! except one *marker* in each [stride](helper::stride). Only a touch of the program makes
//! a marker resident, so the first marker that is not resident shows the position of the program.
//! The position stays at the beginning of a block whose pages are touched in random order.
//!
//! The helper stays ahead of the position by at most the size in the variable
//! `FAULTLESS_PREFAULT_AHEAD`, and by at most the bytes that the program has touched in order. The
//! cost is a fault for each marker, a thread that wakes up while a block is watched, and the unused
//! pages ahead of the last position. The gain requires a second CPU.
//!
//! # Safety for programs
//!
//! Populating a page changes no contents, and the helper populates only watched blocks. The hooks
//! of `free`, `realloc`, `munmap`, `mremap`, `mprotect`, `madvise`, `process_madvise` and of `mmap`
//! with `MAP_FIXED` end the watch of a block before the call, and wait until the helper has
//! finished the part that it populates at this time. The hook of `syscall` does the same for these
//! calls. The library does not see calls by the program's own instructions. If such a call unmaps a
//! watched block, a new private mapping in its place can have additional resident pages.
//!
//! A forked child inherits no watch: the table is in memory that the kernel clears in the child
//! (`MADV_WIPEONFORK`). A child that shares the memory (`vfork`) uses the parent's table.

use crate::environment::{OFF, Size};
use crate::layout::{Count, Reason};
use crate::{helper, page, report, syscall, thread};
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};

/// The smallest watched block in bytes, and the smallest number of strides in a watched block.
const LEAST_BLOCK: usize = 4 << 20;
const LEAST_STRIDES: usize = 16;
/// The smallest distance in bytes, unless a stride is larger.
const LEAST_DISTANCE: usize = 256 << 10;
/// The number of watched blocks. Further blocks are not watched.
const SLOTS: usize = 32;
/// The pause in microseconds of a program that waits for the helper.
const PART_TIME: u64 = 50;
const MADV_WIPEONFORK: i32 = 18;
const PROT_READ_WRITE: i32 = 3;
/// `MAP_PRIVATE` and `MAP_ANONYMOUS`.
const MEMORY: i32 = 0x22;

/// The largest distance in bytes between the program and the end of the populated pages.
static DISTANCE: Size = Size::new(b"FAULTLESS_PREFAULT_AHEAD=", LEAST_DISTANCE);
/// The table, or null if the operation is off.
static TABLE: AtomicPtr<Table> = AtomicPtr::new(ptr::null_mut());

/// The watched blocks, and the state of the helper. Zeros are an empty table.
#[repr(C)]
#[derive(Debug)]
pub struct Table {
    /// Whether the helper exists: 0 or 1.
    pub helper: AtomicU32,
    /// The number of watched blocks.
    pub watched: AtomicU32,
    /// The number of blocks watched since the start. The helper waits for a change.
    pub news: AtomicU32,
    /// The blocks.
    pub slots: [Slot; SLOTS],
}

/// A watched block.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Slot {
    /// [`FREE`], [`CLAIMED`], [`WATCHED`] or [`BUSY`].
    pub state: AtomicU32,
    /// A number that differs from the number of earlier blocks in this slot.
    pub generation: AtomicU32,
    /// The address of the block in the program.
    block: AtomicUsize,
    /// The first page.
    pub begin: AtomicUsize,
    /// The address after the last page.
    pub end: AtomicUsize,
    /// The address of the first page that the program has not touched, as far as the helper knows.
    /// Only the helper uses the position and the front.
    pub position: AtomicUsize,
    /// The address after the populated pages.
    pub front: AtomicUsize,
}

/// The slot is not in use.
pub const FREE: u32 = 0;
/// A thread of the program fills the slot.
pub const CLAIMED: u32 = 1;
/// The slot contains a watched block.
pub const WATCHED: u32 = 2;
/// The helper uses the slot. The program waits before it changes the block.
pub const BUSY: u32 = 3;

const _: () = assert!(size_of::<Table>() <= 4096);

/// Creates the table if the operation is requested.
pub fn start() {
    if DISTANCE.get() == OFF {
        return;
    }
    let len = page::size();
    // SAFETY: the kernel chooses the place of the new memory, which no other code uses.
    unsafe {
        let memory = syscall::mmap(ptr::null_mut(), len, PROT_READ_WRITE, MEMORY, -1, 0);
        let Ok(memory) = memory else { return };
        if syscall::madvise(memory as usize, len, MADV_WIPEONFORK).is_ok() {
            TABLE.store(memory.cast(), Ordering::Release);
        }
    }
}

/// Returns the table.
#[inline]
pub fn table() -> Option<&'static Table> {
    // SAFETY: `start` has mapped the table, which is never unmapped.
    unsafe { TABLE.load(Ordering::Acquire).as_ref() }
}

/// Returns the size in bytes of the smallest watched block.
#[inline]
pub fn from() -> usize {
    if TABLE.load(Ordering::Relaxed).is_null() {
        OFF
    } else {
        LEAST_BLOCK.max(LEAST_STRIDES * helper::stride())
    }
}

/// Returns the largest distance in bytes between the program and the end of the populated pages.
/// The position of the program is known to the accuracy of a stride.
pub fn distance() -> usize {
    DISTANCE.get().max(helper::stride())
}

/// Returns whether a block is watched.
#[inline]
pub fn is_watching() -> bool {
    table().is_some_and(|table| table.watched.load(Ordering::Relaxed) != 0)
}

/// Watches a new block.
pub fn watch(block: usize, bytes: usize) {
    let Some(table) = table() else { return };
    let (begin, end) = page::whole(block, bytes);
    for slot in &table.slots {
        let claimed =
            slot.state.compare_exchange(FREE, CLAIMED, Ordering::Acquire, Ordering::Relaxed);
        if claimed.is_err() {
            continue;
        }
        slot.generation.fetch_add(1, Ordering::Relaxed);
        for (field, value) in [
            (&slot.block, block),
            (&slot.begin, begin),
            (&slot.end, end),
            (&slot.position, begin),
            (&slot.front, begin),
        ] {
            field.store(value, Ordering::Relaxed);
        }
        table.watched.fetch_add(1, Ordering::Relaxed);
        slot.state.store(WATCHED, Ordering::Release);
        table.news.fetch_add(1, Ordering::Release);
        report::add(Count::WatchedBlocks, 1);
        if table.helper.swap(1, Ordering::AcqRel) == 1 {
            syscall::wake(&table.news);
        } else if !thread::create(helper::run) {
            // Without a thread the operation ends for good.
            TABLE.store(ptr::null_mut(), Ordering::Release);
            report::refuse(Reason::Thread, 0);
        }
        return;
    }
    report::add(Count::UnwatchedBlocks, 1);
}

/// Ends the watch of all blocks, and waits for the end of the helper for 100 ms at most.
pub fn end() {
    /// The number of pauses of [`PART_TIME`].
    const PAUSES: u32 = 2000;
    let Some(table) = table() else { return };
    forget_range(0, usize::MAX);
    table.news.fetch_add(1, Ordering::Release);
    syscall::wake(&table.news);
    for _ in 0..PAUSES {
        if table.helper.load(Ordering::Acquire) == 0 {
            return;
        }
        syscall::wait(&table.helper, 1, PART_TIME);
    }
}

/// Ends the watch of a block that the allocator frees or moves.
#[cold]
pub fn forget_block(block: usize) {
    forget(|slot| slot.block.load(Ordering::Relaxed) == block);
}

/// Ends the watch of blocks in a range.
#[cold]
pub fn forget_range(start: usize, len: usize) {
    let end = start.saturating_add(len);
    forget(|slot| {
        start < slot.end.load(Ordering::Relaxed) && slot.begin.load(Ordering::Relaxed) < end
    });
}

fn forget(is_meant: impl Fn(&Slot) -> bool) {
    let Some(table) = table() else { return };
    for slot in &table.slots {
        loop {
            match slot.state.load(Ordering::Acquire) {
                WATCHED if is_meant(slot) => {
                    if release(table, slot, WATCHED) {
                        break;
                    }
                }
                // The helper needs the CPU even if this thread has a real-time priority.
                BUSY if is_meant(slot) => syscall::wait(&slot.state, BUSY, PART_TIME),
                // A block in a claimed slot is not yet known to the program.
                _ => break,
            }
        }
    }
}

/// Frees a slot in the state `from`. Returns false if the slot has another state.
pub fn release(table: &Table, slot: &Slot, from: u32) -> bool {
    let freed = slot.state.compare_exchange(from, FREE, Ordering::Release, Ordering::Relaxed);
    if freed.is_ok() {
        table.watched.fetch_sub(1, Ordering::Relaxed);
    }
    freed.is_ok()
}
