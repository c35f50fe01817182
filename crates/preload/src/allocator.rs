//! Hooks of `malloc` and its relatives.
//!
//! The operations get a block only if the allocator makes a mapping for it: blocks of a heap, which
//! the allocator reuses, are skipped. Blocks of an allocator in another library are skipped, too:
//! the hook of `mmap` sees the mappings of such an allocator.

use crate::next::{Allocator, Next, allocator};
use crate::symbols::{self, Calloc, Free, Malloc, Realloc};
use crate::{ahead, blocks, errno};
use core::ffi::{c_int, c_void};
use core::mem::transmute;
use core::ptr;

/// The flag of a block with a separate mapping, in glibc's word before the block (`IS_MMAPPED`).
const IS_MAPPED: usize = 2;
/// musl makes a mapping for each block of this size and more, in both of its allocators.
const MAPPED_BY_MUSL: usize = 256 << 10;
const ENOMEM: c_int = 12;

static MALLOC: Next = Next::new(c"malloc");
static CALLOC: Next = Next::new(c"calloc");
static REALLOC: Next = Next::new(c"realloc");
static FREE: Next = Next::new(c"free");
static MEMALIGN: Next = Next::new(c"memalign");
static ALIGNED_ALLOC: Next = Next::new(c"aligned_alloc");

/// Passes a new block of the function `by` to the operations if the allocator of the C library has
/// made a mapping for the block.
#[inline]
fn made(by: &Next, block: *mut c_void, bytes: usize) -> *mut c_void {
    if !block.is_null() && bytes >= blocks::smallest() && by.is_in_libc() && mapped(block, bytes) {
        blocks::made(block as usize, bytes);
    }
    block
}

/// Ends the operations on a block that the function `by` frees or moves. A function of another
/// library also gets blocks of that library, which have no word of glibc.
#[inline]
fn freed(by: &Next, block: *mut c_void) {
    if !block.is_null() && ahead::is_watching() && (!by.is_in_libc() || mapped(block, usize::MAX)) {
        ahead::forget_block(block as usize);
    }
}

/// Returns whether the block has a separate mapping.
fn mapped(block: *mut c_void, bytes: usize) -> bool {
    match allocator() {
        // SAFETY: glibc keeps the size of a block and its flags in the word before the block.
        // The program does not write to this word. (glibc's `malloc_usable_size` reads the word,
        // too.)
        Allocator::Glibc => unsafe { block.cast::<usize>().sub(1).read() & IS_MAPPED != 0 },
        Allocator::Musl => bytes >= MAPPED_BY_MUSL,
        Allocator::Other => false,
    }
}

/// Returns glibc's function if glibc's allocator serves the program and no other library replaces
/// the function, or else the next function.
macro_rules! original {
    ($libc:ident, $next:ident, $type:ty) => {
        match allocator() {
            Allocator::Glibc if $next.is_in_libc() => symbols::$libc(),
            // SAFETY: the symbol table has returned this function by its name.
            _ => $next.address().map(|address| unsafe { transmute::<usize, $type>(address) }),
        }
    };
}

/// Reports that memory is missing, because no library has the function.
#[cold]
fn missing() -> *mut c_void {
    errno::set(ENOMEM);
    ptr::null_mut()
}

/// C's `malloc`.
#[unsafe(no_mangle)]
pub extern "C" fn malloc(bytes: usize) -> *mut c_void {
    match original!(libc_malloc, MALLOC, Malloc) {
        // SAFETY: the original function, with the same meaning.
        Some(original) => made(&MALLOC, unsafe { original(bytes) }, bytes),
        None => missing(),
    }
}

/// C's `calloc`.
#[unsafe(no_mangle)]
pub extern "C" fn calloc(count: usize, bytes: usize) -> *mut c_void {
    // musl's `calloc` reads all pages of a block if `malloc` has a hook. A new mapping is zero.
    if let Some(all @ MAPPED_BY_MUSL..) = count.checked_mul(bytes)
        && allocator() == Allocator::Musl
        && CALLOC.is_in_libc()
    {
        return malloc(all);
    }
    match original!(libc_calloc, CALLOC, Calloc) {
        Some(original) => {
            // SAFETY: the original function, with the same meaning.
            let block = unsafe { original(count, bytes) };
            made(&CALLOC, block, count.wrapping_mul(bytes))
        }
        None => missing(),
    }
}

/// C's `aligned_alloc`.
#[unsafe(no_mangle)]
pub extern "C" fn aligned_alloc(align: usize, bytes: usize) -> *mut c_void {
    match original!(libc_memalign, ALIGNED_ALLOC, Calloc) {
        // SAFETY: the original function, with the same meaning.
        Some(original) => made(&ALIGNED_ALLOC, unsafe { original(align, bytes) }, bytes),
        None => missing(),
    }
}

/// The `memalign` of glibc and musl.
#[unsafe(no_mangle)]
pub extern "C" fn memalign(align: usize, bytes: usize) -> *mut c_void {
    match original!(libc_memalign, MEMALIGN, Calloc) {
        // SAFETY: the original function, with the same meaning.
        Some(original) => made(&MEMALIGN, unsafe { original(align, bytes) }, bytes),
        None => missing(),
    }
}

/// C's `realloc`.
///
/// # Safety
/// The block was allocated by this library's functions, and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(block: *mut c_void, bytes: usize) -> *mut c_void {
    freed(&REALLOC, block);
    match original!(libc_realloc, REALLOC, Realloc) {
        // SAFETY: the original function, with the same meaning; by the contract, the block is
        // valid.
        Some(original) => made(&REALLOC, unsafe { original(block, bytes) }, bytes),
        None => missing(),
    }
}

/// C's `free`.
///
/// # Safety
/// The block was allocated by this library's functions, and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(block: *mut c_void) {
    freed(&FREE, block);
    if let Some(original) = original!(libc_free, FREE, Free) {
        // SAFETY: the original function, with the same meaning; by the contract, the block is
        // valid.
        unsafe { original(block) };
    }
}

/// Finds the functions of the next library. At the start the program has one thread.
pub fn find_next() {
    for next in [&MALLOC, &CALLOC, &REALLOC, &FREE, &MEMALIGN, &ALIGNED_ALLOC] {
        next.address();
    }
}
