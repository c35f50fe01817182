//! The CPU's buffer for the frames gathered by its flush batch.

use crate::error::OutOfMemory;
use crate::table::node::ENTRIES;
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::cell::Cell;

/// The minimum capacity of a batch in frames: the entries of one table.
const FEWEST: u64 = ENTRIES as u64;
/// The maximum capacity: 32 MiB of pages, about the size of Linux's batch.
const MOST: u64 = 16 * FEWEST;
/// Between these limits the capacity is the number of all frames divided by this.
const PART: u64 = 64;
/// The folios that a batch holds before it flushes: 64 MiB of pages.
const FOLIOS: usize = 32;

/// The CPU's buffer for the frames of its current batch.
#[derive(Debug)]
pub struct Gather {
    pub(crate) frames: Box<[Cell<u32>]>,
    /// The first frames of folios of which a huge leaf was unmapped.
    pub(crate) folios: [Cell<u32>; FOLIOS],
    pub(crate) busy: Cell<bool>,
}

impl Gather {
    /// Returns a buffer for a machine of `total` frames.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the heap is exhausted.
    pub fn try_new(total: u64) -> Result<Self, OutOfMemory> {
        let capacity = (total / PART).clamp(FEWEST, MOST) as usize;
        let mut frames = Vec::new();
        frames.try_reserve_exact(capacity).map_err(|_| OutOfMemory)?;
        // The length equals the reserved capacity, so `into_boxed_slice` need not reallocate.
        frames.resize(capacity, Cell::new(0));
        let folios = [const { Cell::new(0) }; FOLIOS];
        Ok(Self { frames: frames.into_boxed_slice(), folios, busy: Cell::new(false) })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_batch_is_as_large_as_the_memory_allows() {
        let capacity = |frames| Gather::try_new(frames).unwrap().frames.len();
        let mib = 1 << (20 - crate::addr::PAGE_SHIFT);
        assert_eq!([1, 128 * mib].map(capacity), [ENTRIES; 2]);
        assert_eq!([1024 * mib, 2048 * mib, 1 << 40].map(capacity), [4096, 8192, 8192]);
    }
}
