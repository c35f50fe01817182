//! Hooks of `madvise` and `process_madvise`, and the same calls by C's `syscall`.
//!
//! Advice ends the watch of the blocks in its range, and advice that discards pages skips copied
//! text ([`discard`]).
//!
//! `process_madvise` names a process. The hook treats each process as the own process: a comparison
//! of processes needs further system calls. The kernel permits advice that discards contents for
//! the own process alone. For another process, the hook can only end a watch that has the same
//! addresses, or skip advice without an effect on contents, such as `MADV_PAGEOUT`.

use crate::next::Next;
use crate::{ahead, discard, errno, mapping, syscall};
use core::ffi::{c_int, c_uint, c_void};
use core::mem::transmute;

/// `MADV_HUGEPAGE`, which does not discard pages.
const HUGEPAGE: c_int = 14;
/// The largest number of ranges in a call. The kernel refuses more.
const MOST_RANGES: usize = 1024;

static MADVISE: Next = Next::new(c"madvise");
static PROCESS_MADVISE: Next = Next::new(c"process_madvise");

/// Finds the functions of the next library. At the start the program has one thread.
pub fn find_next() {
    for next in [&MADVISE, &PROCESS_MADVISE] {
        next.address();
    }
}

/// A range of addresses: C's `struct iovec`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Range {
    start: usize,
    len: usize,
}

/// Ends the watch of blocks in a range that gets advice.
pub fn before(start: usize, len: usize, advice: c_int) {
    if advice != HUGEPAGE {
        mapping::changes(start, len);
    }
}

/// Ends the watch of blocks in ranges that get advice.
///
/// # Safety
/// The contract of `process_madvise`.
pub unsafe fn before_ranges(ranges: *const Range, count: usize, advice: c_int) {
    if !ahead::is_watching() {
        return;
    }
    // SAFETY: the caller's contract.
    for range in unsafe { each(ranges, count) } {
        before(range.start, range.len, advice);
    }
}

/// Returns the ranges of a call, or no range if the kernel refuses the call.
///
/// # Safety
/// The contract of `process_madvise`.
unsafe fn each(ranges: *const Range, count: usize) -> impl Iterator<Item = Range> {
    let count = if count > MOST_RANGES || ranges.is_null() { 0 } else { count };
    // SAFETY: the caller has `count` ranges.
    (0..count).map(move |index| unsafe { ranges.add(index).read() })
}

/// The C function `madvise`.
///
/// # Safety
/// The contract of the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(start: *mut c_void, len: usize, advice: c_int) -> c_int {
    before(start as usize, len, advice);
    let Some(next) = MADVISE.address() else { return mapping::missing() };
    discard::advise(start as usize, len, advice, |start, len| {
        type Madvise = unsafe extern "C" fn(*mut c_void, usize, c_int) -> c_int;
        // SAFETY: the symbol table has returned this function by its name; the caller's contract.
        unsafe { transmute::<usize, Madvise>(next)(start as *mut c_void, len, advice) }
    })
}

/// The C function `process_madvise`. Without a function of the next library, as in musl, the hook
/// calls the kernel.
///
/// # Safety
/// The contract of the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn process_madvise(
    process: c_int,
    ranges: *const Range,
    count: usize,
    advice: c_int,
    flags: c_uint,
) -> isize {
    type Advise = unsafe extern "C" fn(c_int, *const Range, usize, c_int, c_uint) -> isize;
    let next = PROCESS_MADVISE.address();
    // SAFETY: the caller's contract.
    unsafe {
        before_ranges(ranges, count, advice);
        advise_ranges(ranges, count, advice, |ranges, count| match next {
            // SAFETY: the symbol table has returned this function by its name.
            Some(next) => transmute::<usize, Advise>(next)(process, ranges, count, advice, flags),
            None => by_kernel(process, ranges, count, advice, flags),
        })
    }
}

/// Gives the advice for all ranges in one call of `give`, or, if advice that discards pages can
/// meet copied text, for the other parts of each range. Returns the number of advised bytes, with
/// the skipped bytes, or -1 if the first part fails.
///
/// # Safety
/// The contract of `process_madvise`.
unsafe fn advise_ranges(
    ranges: *const Range,
    count: usize,
    advice: c_int,
    give: impl Fn(*const Range, usize) -> isize,
) -> isize {
    if count > MOST_RANGES || ranges.is_null() || !discard::can_meet_text(advice) {
        return give(ranges, count);
    }
    let mut given = 0;
    // SAFETY: the caller's contract.
    for range in unsafe { each(ranges, count) } {
        let result = discard::advise(range.start, range.len, advice, |start, len| {
            if give(&Range { start, len }, 1) < 0 { -1 } else { 0 }
        });
        if result != 0 {
            return if given == 0 { -1 } else { given };
        }
        given += range.len as isize;
    }
    given
}

/// Gives advice for ranges by the kernel. Sets `errno` of a failed call.
///
/// # Safety
/// The contract of the system call.
unsafe fn by_kernel(
    process: c_int,
    ranges: *const Range,
    count: usize,
    advice: c_int,
    flags: c_uint,
) -> isize {
    // SAFETY: the caller's contract.
    let given = unsafe { syscall::process_madvise(process, ranges.cast(), count, advice, flags) };
    given.map_or_else(failed, |bytes| bytes as isize)
}

/// Sets `errno`. Returns the result of a failed call.
fn failed(code: c_int) -> isize {
    errno::set(code);
    -1
}

/// `syscall(SYS_madvise, start, len, advice)` in a program with copied text.
///
/// # Safety
/// The contract of the system call.
pub unsafe extern "C" fn madvise_by_number(
    _: usize,
    start: usize,
    len: usize,
    advice: c_int,
) -> isize {
    let result = discard::advise(start, len, advice, |start, len| {
        // SAFETY: the caller's contract.
        let given = unsafe { syscall::madvise(start, len, advice) };
        given.map_or_else(|code| failed(code) as c_int, |()| 0)
    });
    result as isize
}

/// `syscall(SYS_process_madvise, process, ranges, count, advice, flags)` in a program with copied
/// text.
///
/// # Safety
/// The contract of the system call.
pub unsafe extern "C" fn process_madvise_by_number(
    _: usize,
    process: c_int,
    ranges: *const Range,
    count: usize,
    advice: c_int,
    flags: c_uint,
) -> isize {
    // SAFETY: the caller's contract.
    unsafe {
        advise_ranges(ranges, count, advice, |ranges, count| {
            by_kernel(process, ranges, count, advice, flags)
        })
    }
}
