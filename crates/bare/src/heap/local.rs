//! The per-CPU part of the heap: the sizes of blocks, and the lists of free blocks.

use core::cell::Cell;
use core::ptr;
use faultless::PAGE_SIZE;

/// log2 of the smallest block.
const SMALLEST_SHIFT: u32 = 4;
/// Bytes of the largest block.
pub(super) const LARGEST: usize = 32 << 10;
/// One more than the class of the largest block. Class *c* has blocks of 2^(c + 1) bytes; the
/// classes below the smallest block stay empty.
pub(super) const CLASSES: usize = LARGEST.ilog2() as usize;
/// Bytes of a page.
pub(super) const PAGE: usize = PAGE_SIZE as usize;

pub(super) const fn block_bytes(class: usize) -> usize {
    2 << class
}

/// Returns the bytes of a slab of this class, a power of two; slabs are aligned to their size.
pub(super) const fn slab_bytes(class: usize) -> usize {
    let four = 4 * block_bytes(class);
    if four > 4 * PAGE { four } else { 4 * PAGE }
}

/// Returns the number of blocks moved between a CPU and the stock at once; a CPU keeps at most
/// twice this number. The blocks of VMAs and their trees are freed in bursts, at the end of a grace
/// period: the lists are long enough for such a burst.
pub(super) const fn batch(class: usize) -> i32 {
    let bytes = if block_bytes(class) > 1 << 10 { 2 * PAGE } else { 8 * PAGE };
    let blocks = bytes / block_bytes(class);
    if blocks > 128 {
        128
    } else if blocks == 0 {
        1
    } else {
        blocks as i32
    }
}

/// The class of a block of `bytes`, 1 to [`LARGEST`].
#[inline(always)]
pub(super) const fn class_of(bytes: usize) -> usize {
    let low = (1 << SMALLEST_SHIFT) - 1;
    (bytes.wrapping_sub(1) | low).ilog2() as usize
}

/// A free block.
pub(super) struct Block {
    pub(super) next: *mut Block,
}

/// The flag of [`FailNth::ALL`](super::FailNth::ALL).
pub(super) const ALL: u64 = 1 << 63;

/// One CPU's free blocks.
pub(crate) struct Local {
    pub(super) lists: [List; CLASSES],
    /// The index of the running thread's allocation to fail: see [`FailNth`](super::FailNth). 0: no
    /// failure.
    pub(super) fail_nth: Cell<u64>,
}

pub(super) struct List {
    pub(super) head: Cell<*mut Block>,
    /// The number of further blocks that fit into the list.
    pub(super) room: Cell<i32>,
}

impl Local {
    pub(crate) const fn new() -> Self {
        let mut lists =
            [const { List { head: Cell::new(ptr::null_mut()), room: Cell::new(0) } }; CLASSES];
        let mut class = 0;
        while class < CLASSES {
            lists[class].room = Cell::new(2 * batch(class));
            class += 1;
        }
        Self { lists, fail_nth: Cell::new(0) }
    }

    /// Counts an allocation, and returns whether the allocation must fail.
    #[cold]
    #[inline(never)]
    pub(super) fn fails(&self) -> bool {
        let nth = self.fail_nth.get();
        let (all, left) = (nth & ALL, nth & !ALL);
        self.fail_nth.set(all | left.saturating_sub(1));
        left <= 1
    }

    /// Returns the bytes of the free blocks in the lists.
    pub(super) fn free_bytes(&self) -> usize {
        let free = |(class, list): (usize, &List)| {
            (2 * batch(class) - list.room.get()) as usize * block_bytes(class)
        };
        self.lists.iter().enumerate().map(free).sum()
    }
}
