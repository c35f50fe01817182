//! Resident pages, by `mincore`.
//!
//! The kernel writes a byte for each of its pages. QEMU's emulation of programs passes the call to
//! the host, also if the program gets larger pages than the host has (`qemu-aarch64 -p 65536`): the
//! host then writes more bytes than the program expects. So each buffer has a byte for each 4 KiB,
//! and the number of written bytes shows the size of the page that the kernel has used.

use crate::{page, syscall};

/// The smallest page of a kernel.
const SMALLEST: usize = 4096;
/// The largest page of a kernel that runs programs of x86-64 or aarch64.
const LARGEST: usize = 64 << 10;
/// The bytes for one page of each size.
const ONE: usize = LARGEST / SMALLEST;
/// The bytes of a call for many pages.
const MANY: usize = 512;
/// A byte that the kernel has not written. The kernel uses bit 0 alone.
const UNWRITTEN: u8 = 0xff;

/// Returns whether the page at `start` is resident. A page that is not mapped is not resident.
pub fn is_resident(start: usize) -> bool {
    first_absent::<ONE>(start, start.saturating_add(page::size())).is_some_and(|at| at != start)
}

/// Returns the first address from `start` whose page is not resident, or `end`. `None` if a part is
/// not mapped. Both addresses are those of pages.
pub fn first_absent_page(start: usize, end: usize) -> Option<usize> {
    first_absent::<MANY>(start, end)
}

fn first_absent<const BYTES: usize>(start: usize, end: usize) -> Option<usize> {
    let page = page::size();
    let mut at = start;
    while at < end {
        let count = ((end - at) / page).min(BYTES * SMALLEST / page);
        if count == 0 {
            return None;
        }
        let mut states = [UNWRITTEN; BYTES];
        // SAFETY: the buffer has a byte for each 4 KiB of the range.
        unsafe { syscall::mincore(at, count * page, &mut states) }.ok()?;
        let written = states.iter().position(|state| *state == UNWRITTEN).unwrap_or(BYTES);
        // The kernel's pages in a page of the program. A touch of one makes the page resident.
        let parts = (written / count).max(1);
        let is_resident = |states: &[u8]| states.iter().any(|state| state & 1 != 0);
        let resident = states.chunks(parts).take(count).take_while(|states| is_resident(states));
        let resident = resident.count();
        at += resident * page;
        if resident < count {
            return Some(at);
        }
    }
    Some(end)
}
