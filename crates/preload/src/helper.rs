//! The helper thread of [`ahead`].
//!
//! The thread ends if no block is watched for a second, and if the program has ended all its
//! threads: a process exists until its last thread ends.

use crate::ahead::{self, BUSY, Slot, Table, WATCHED};
use crate::layout::{Count, Reason};
use crate::populate::MADV_POPULATE_WRITE;
use crate::{page, report, residency, stop, syscall};
use core::ffi::c_void;
use core::ptr;
use core::sync::atomic::Ordering;

/// The bytes with one marker, and the smallest number of pages with one marker.
const STRIDE: usize = 256 << 10;
const STRIDE_PAGES: usize = 16;
/// The pages that a program touches in order before the helper populates pages.
const LEAST_RUN: usize = 16;
/// The pauses in microseconds between two reads of the position. A pause doubles without progress.
const SHORTEST: u64 = 250;
const LONGEST: u64 = 32_000;
/// The pauses in microseconds after which the thread checks whether the program has ended.
const CHECKED: u64 = 500_000;
/// The largest part in bytes that is populated while a call of the program can wait, unless a
/// [stride](stride()) is larger.
const PART: usize = 512 << 10;

/// Returns the bytes with one marker: 64 pages of 4 KiB, and 16 pages of 16 or 64 KiB. The helper
/// knows the position of the program to this accuracy, and each marker costs a fault.
pub fn stride() -> usize {
    STRIDE.max(STRIDE_PAGES * page::size())
}

/// Watches the blocks until the thread is not needed.
pub extern "C" fn run(_: *mut c_void) -> *mut c_void {
    if let Some(table) = ahead::table() {
        watch(table);
    }
    ptr::null_mut()
}

fn watch(table: &Table) {
    let (mut pause, mut waited) = (SHORTEST, 0);
    loop {
        let news = table.news.load(Ordering::Acquire);
        if stop::code().is_some() {
            table.helper.store(0, Ordering::Release);
            return;
        }
        let mut found = Found::Unchanged;
        for slot in &table.slots {
            if slot.state.load(Ordering::Relaxed) == WATCHED {
                found = found.max(step(table, slot));
            }
        }
        if found == Found::Populated {
            continue;
        }
        if found == Found::Moved {
            pause = SHORTEST;
        }
        syscall::wait(&table.news, news, pause);
        if table.news.load(Ordering::Relaxed) == news {
            waited += pause;
            pause = (2 * pause).min(LONGEST);
        } else {
            pause = SHORTEST;
        }
        if waited >= CHECKED {
            waited = 0;
            let unused = table.watched.load(Ordering::Relaxed) == 0;
            if (unused || is_alone()) && ends(table, news) {
                return;
            }
        }
    }
}

/// Reports the end of the thread. Returns false if the program has a new block.
fn ends(table: &Table, news: u32) -> bool {
    table.helper.swap(0, Ordering::AcqRel);
    // A thread that adds a block at this time either creates a new helper, or the helper continues.
    table.news.load(Ordering::Acquire) == news || table.helper.swap(1, Ordering::AcqRel) == 1
}

/// Returns whether the main thread has ended, and the helper is the only other thread.
fn is_alone() -> bool {
    let Ok(file) = syscall::open(c"/proc/self/stat") else { return false };
    let mut bytes = [0; 1024];
    let count = syscall::read(file, &mut bytes).unwrap_or(0);
    syscall::close(file);
    let text = bytes.get(..count).unwrap_or_default();
    // The name of the program in parentheses can contain spaces.
    let Some(name_end) = text.iter().rposition(|byte| *byte == b')') else { return false };
    let mut fields = text.get(name_end + 2..).unwrap_or_default().split(|byte| *byte == b' ');
    let ended = fields.next() == Some(b"Z");
    ended && fields.nth(16).is_some_and(|threads| threads.len() == 1 && threads <= b"2")
}

/// The result of a step for one block.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Found {
    /// The program has not moved.
    Unchanged,
    /// The program has moved, and the next pages are populated already.
    Moved,
    /// Pages were populated.
    Populated,
}

/// Populates a part of a block if the program is near the end of the populated pages.
fn step(table: &Table, slot: &Slot) -> Found {
    let Some(held) = Held::new(slot) else { return Found::Unchanged };
    let page = page::size();
    let [begin, end, before, front] = [&slot.begin, &slot.end, &slot.position, &slot.front]
        .map(|field| field.load(Ordering::Relaxed));
    let position = residency::first_absent_page(before, end);
    let (Some(position), true) = (position, front < end) else {
        held.end(table);
        return Found::Unchanged;
    };
    slot.position.store(position, Ordering::Relaxed);
    let touched = position - begin;
    let distance = touched.min(ahead::distance());
    // A program that has overtaken the helper continues alone for half of the distance, while the
    // helper populates the pages behind.
    let stride = stride();
    let from = if front <= position {
        begin + (touched + distance / 2).next_multiple_of(stride)
    } else {
        front
    };
    let to = end.min(from + PART.max(stride)).min(position + distance + distance / 2);
    if touched < LEAST_RUN * page || from >= to {
        return if position > before { Found::Moved } else { Found::Unchanged };
    }
    slot.front.store(populate(from, to, begin, stride), Ordering::Relaxed);
    Found::Populated
}

/// Populates the pages of a range, except the markers. Returns the address after the last page.
fn populate(from: usize, to: usize, begin: usize, stride: usize) -> usize {
    let page = page::size();
    let mut at = from;
    while at < to {
        // The last page of each stride is the marker.
        let marker = begin + ((at - begin) / stride + 1) * stride - page;
        let end = marker.min(to / page * page + page);
        // SAFETY: the caller holds the block, so its pages are mapped. Populating changes no byte
        // of a page.
        match unsafe { syscall::madvise(at, end - at, MADV_POPULATE_WRITE) } {
            Ok(()) => report::add(Count::PrefaultedBytes, end - at),
            Err(code) => report::refuse(Reason::Ahead, code),
        }
        at = if end == marker { marker + page } else { end };
    }
    at
}

/// A block that the program cannot change at this time.
struct Held<'a>(&'a Slot);

impl<'a> Held<'a> {
    fn new(slot: &'a Slot) -> Option<Self> {
        let busy = slot.state.compare_exchange(WATCHED, BUSY, Ordering::Acquire, Ordering::Relaxed);
        busy.is_ok().then(|| Self(slot))
    }

    /// Ends the watch of the block.
    fn end(self, table: &Table) {
        ahead::release(table, self.0, BUSY);
        core::mem::forget(self);
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.state.store(WATCHED, Ordering::Release);
    }
}
