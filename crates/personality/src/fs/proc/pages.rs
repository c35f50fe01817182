//! `/proc/PID/pagemap`: eight bytes for each page of the address space, describing its mapping.

use super::super::transfer::Transfer;
use crate::errno::{Errno, Result};
use crate::task::ids::is_root;
use crate::task::process::find;
use faultless::{FrameUse, PAGE_SHIFT, PageInfo, PagePlace, USER_END, VirtRange};
use faultless_bare::percpu;

/// The page is present; the low bits are its frame number.
const PRESENT: u64 = 1 << 63;
/// The page is in the swap area: the five lowest bits are the area's number, and the bits above are
/// the page's slot.
const SWAPPED: u64 = 1 << 62;
const AREA_BITS: u32 = 5;
/// The page belongs to a file or to shared memory.
const OF_FILE: u64 = 1 << 61;
/// The page is mapped only once.
const EXCLUSIVE: u64 = 1 << 56;
/// Bytes of an entry.
const ENTRY: u64 = 8;

const fn state(page: &PageInfo) -> u64 {
    let of_file = if matches!(page.usage, FrameUse::Shared) { OF_FILE } else { 0 };
    let exclusive = if page.exclusive { EXCLUSIVE } else { 0 };
    PRESENT | of_file | exclusive
}

/// Reads from `offset` on. As on Linux, only root gets the numbers of frames and slots; other users
/// get 0.
///
/// # Errors
/// `EINVAL`: not whole entries, or a negative offset. `EFAULT`.
pub(in super::super) fn read(pid: u32, to: &mut Transfer<'_>, offset: u64) -> Result {
    let is_negative = offset > i64::MAX as u64;
    if is_negative || !offset.is_multiple_of(ENTRY) || !to.left().is_multiple_of(ENTRY) {
        return Err(Errno::EINVAL);
    }
    // An ended process has no memory.
    let Some(memory) = find(pid).and_then(|process| process.memory()) else { return Ok(0) };
    let shows_numbers = is_root();
    let shown = |number: u64| if shows_numbers { number } else { 0 };
    let mut page = offset / ENTRY;
    while to.left() != 0 && page < USER_END.div_ceil(1 << PAGE_SHIFT) {
        let (cpu, space, addr) = (percpu::cpu(), memory.space(), page << PAGE_SHIFT);
        let mut told = 0;
        space.pages(cpu, VirtRange::page(addr), |_, place| {
            told = match place {
                PagePlace::Mapped(page) => state(&page) | shown(page.frame.0.into()),
                PagePlace::Swapped { slot, .. } => SWAPPED | shown(slot << AREA_BITS),
                _ => 0,
            };
        });
        to.put_bytes(&told.to_le_bytes());
        page += 1;
        cpu.serve_flushes();
    }
    to.result()
}
