//! For `LD_PRELOAD`: populates large mappings of a program when they are made.
//!
//! The library overrides glibc's `malloc`, `calloc`, `realloc`, `aligned_alloc`, `memalign` and
//! `mmap`, and calls the originals. It requests from the kernel to map all pages of a mapping at
//! once (`MADV_POPULATE_WRITE`, Linux 5.14) if the mapping has at least as many bytes as the
//! variable `FAULTLESS_POPULATE` specifies, and is not resident. A block of `malloc` is populated
//! only if glibc makes a mapping for it: blocks of the heap, which glibc reuses, are left alone.
//! Without the variable, or if the kernel refuses, the library has no effect. Reserved memory
//! (`MAP_NORESERVE`, `MAP_STACK`, `PROT_NONE`) and files are not populated.
//!
//! A program can have another allocator in a library, such as jemalloc. The functions of `malloc`
//! then call that library, because `free` of the program accepts only its blocks.

use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::mem::transmute;
use std::sync::atomic::{AtomicUsize, Ordering};

const MADV_POPULATE_WRITE: c_int = 23;
const PROT_WRITE: c_int = 2;
const MAP_PRIVATE: c_int = 2;
const MAP_ANONYMOUS: c_int = 0x20;
/// `MAP_NORESERVE` and `MAP_STACK`.
const RESERVED: c_int = 0x4000 | 0x2_0000;
const PAGE: usize = 4096;
/// For smaller blocks the call costs more than the faults.
const LEAST: usize = 64 << 10;
/// The flag of a block with a separate mapping, in glibc's word before the block (`IS_MMAPPED`).
const IS_MAPPED: usize = 2;
/// The variable has not been read.
const UNREAD: usize = 0;

/// The minimum size in bytes of a populated mapping.
static FROM: AtomicUsize = AtomicUsize::new(UNREAD);

unsafe extern "C" {
    fn __libc_malloc(bytes: usize) -> *mut c_void;
    fn __libc_calloc(count: usize, bytes: usize) -> *mut c_void;
    fn __libc_memalign(align: usize, bytes: usize) -> *mut c_void;
    fn __libc_realloc(block: *mut c_void, bytes: usize) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    fn getenv(name: *const c_char) -> *const c_char;
    fn strtoul(text: *const c_char, end: *mut *mut c_char, base: c_int) -> usize;
    fn madvise(start: *mut c_void, len: usize, advice: c_int) -> c_int;
    fn mincore(start: *mut c_void, len: usize, resident: *mut u8) -> c_int;
    fn syscall(number: c_long, ...) -> c_long;
    fn __errno_location() -> *mut c_int;
}

/// `mmap` by number.
#[cfg(target_arch = "x86_64")]
const SYS_MMAP: c_long = 9;
#[cfg(not(target_arch = "x86_64"))]
const SYS_MMAP: c_long = 222;

fn from() -> usize {
    let known = FROM.load(Ordering::Relaxed);
    if known != UNREAD {
        return known;
    }
    // SAFETY: the name ends with a zero; so does the value, and `strtoul` accepts a null pointer
    // for the end. Neither function allocates.
    let bytes = unsafe {
        let text = getenv(c"FAULTLESS_POPULATE".as_ptr());
        if text.is_null() { usize::MAX } else { strtoul(text, std::ptr::null_mut(), 10) }
    };
    let bytes = bytes.max(LEAST);
    FROM.store(bytes, Ordering::Relaxed);
    bytes
}

/// The libraries after this one in the order of the loader (`RTLD_NEXT`).
const NEXT: *mut c_void = -1_isize as *mut c_void;
/// The state of a [`Next`] of a program with glibc's allocator.
const GLIBC: usize = 1;

/// A function that another allocator may have.
struct Next {
    name: &'static CStr,
    /// The address, [`GLIBC`] or [`UNREAD`].
    address: AtomicUsize,
}

static MALLOC: Next = Next::new(c"malloc");
static CALLOC: Next = Next::new(c"calloc");
static REALLOC: Next = Next::new(c"realloc");
static MEMALIGN: Next = Next::new(c"memalign");
static ALIGNED_ALLOC: Next = Next::new(c"aligned_alloc");

impl Next {
    const fn new(name: &'static CStr) -> Self {
        Self { name, address: AtomicUsize::new(UNREAD) }
    }

    /// Returns the address of the other allocator's function; `None` if glibc's `malloc` serves the
    /// program, or the other allocator lacks the function.
    #[inline]
    fn find(&self) -> Option<usize> {
        match self.address.load(Ordering::Relaxed) {
            GLIBC => None,
            UNREAD => self.look_up(),
            address => Some(address),
        }
    }

    /// Finds the function. The first call comes from the start of the program, before the program
    /// has threads, so `dlsym` allocates no memory.
    #[cold]
    fn look_up(&self) -> Option<usize> {
        // SAFETY: the names end with a zero; `dlsym` has no other condition.
        let of = |name: &CStr| unsafe { dlsym(NEXT, name.as_ptr()) } as usize;
        let own = __libc_malloc as *const () as usize;
        let malloc = of(c"malloc");
        let other = malloc != 0 && malloc != own;
        let found = if other { of(self.name) } else { 0 };
        self.address.store(if found == 0 { GLIBC } else { found }, Ordering::Relaxed);
        (found != 0).then_some(found)
    }
}

/// Populates a block of `malloc` if glibc has made a mapping for the block.
fn populate_block(block: *mut c_void, bytes: usize) {
    if block.is_null() || bytes < from() {
        return;
    }
    // SAFETY: glibc keeps the size of a block and its flags in the word before the block, of which
    // the program changes nothing. (glibc's `malloc_usable_size` reads this word, too.)
    let word = unsafe { block.cast::<usize>().sub(1).read() };
    if word & IS_MAPPED != 0 {
        populate(block, bytes);
    }
}

/// Populates the whole pages of a mapping, if it is large. Skips a mapping whose last page is
/// already resident, because `realloc` has kept it: checking all pages takes time, too.
fn populate(block: *mut c_void, bytes: usize) {
    if block.is_null() || bytes < from() {
        return;
    }
    let begin = (block as usize).next_multiple_of(PAGE);
    let end = (block as usize + bytes) / PAGE * PAGE;
    let mut last = 0;
    // SAFETY: the pages belong to a block that was just allocated, and populating changes no byte
    // of the pages; `mincore` writes one byte for one page. `errno` is restored, so that the
    // program reads the `errno` of its own call.
    unsafe {
        let errno = *__errno_location();
        let known = mincore((end - PAGE) as *mut c_void, PAGE, &raw mut last) == 0;
        if !known || last & 1 == 0 {
            madvise(begin as *mut c_void, end.saturating_sub(begin), MADV_POPULATE_WRITE);
        }
        *__errno_location() = errno;
    }
}

/// C's `malloc`.
#[unsafe(no_mangle)]
pub extern "C" fn malloc(bytes: usize) -> *mut c_void {
    if let Some(next) = MALLOC.find() {
        // SAFETY: `dlsym` has returned this function by its name.
        return unsafe { transmute::<usize, extern "C" fn(usize) -> *mut c_void>(next)(bytes) };
    }
    // SAFETY: glibc's own function, with the same meaning.
    let block = unsafe { __libc_malloc(bytes) };
    populate_block(block, bytes);
    block
}

/// C's `calloc`.
#[unsafe(no_mangle)]
pub extern "C" fn calloc(count: usize, bytes: usize) -> *mut c_void {
    if let Some(next) = CALLOC.find() {
        type Calloc = extern "C" fn(usize, usize) -> *mut c_void;
        // SAFETY: `dlsym` has returned this function by its name.
        return unsafe { transmute::<usize, Calloc>(next)(count, bytes) };
    }
    // SAFETY: glibc's own function, with the same meaning.
    let block = unsafe { __libc_calloc(count, bytes) };
    populate_block(block, count.wrapping_mul(bytes));
    block
}

/// C's `aligned_alloc`.
#[unsafe(no_mangle)]
pub extern "C" fn aligned_alloc(align: usize, bytes: usize) -> *mut c_void {
    aligned(&ALIGNED_ALLOC, align, bytes)
}

/// glibc's `memalign`.
#[unsafe(no_mangle)]
pub extern "C" fn memalign(align: usize, bytes: usize) -> *mut c_void {
    aligned(&MEMALIGN, align, bytes)
}

fn aligned(next: &Next, align: usize, bytes: usize) -> *mut c_void {
    if let Some(next) = next.find() {
        type Aligned = extern "C" fn(usize, usize) -> *mut c_void;
        // SAFETY: `dlsym` has returned this function by its name.
        return unsafe { transmute::<usize, Aligned>(next)(align, bytes) };
    }
    // SAFETY: glibc's own function, with the same meaning.
    let block = unsafe { __libc_memalign(align, bytes) };
    populate_block(block, bytes);
    block
}

/// C's `realloc`.
///
/// # Safety
/// The block was allocated by this library's functions, and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(block: *mut c_void, bytes: usize) -> *mut c_void {
    if let Some(next) = REALLOC.find() {
        type Realloc = unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void;
        // SAFETY: `dlsym` has returned this function by its name; by the contract, the block is
        // valid.
        return unsafe { transmute::<usize, Realloc>(next)(block, bytes) };
    }
    // SAFETY: glibc's own function, with the same meaning; by the contract, the block is valid.
    let block = unsafe { __libc_realloc(block, bytes) };
    populate_block(block, bytes);
    block
}

/// The C function `mmap`.
///
/// # Safety
/// The contract of the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    at: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    file: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: the arguments come from the caller, who requests this call.
    let block = unsafe { syscall(SYS_MMAP, at, len, prot, flags, file, offset) };
    let whole = flags & RESERVED == 0 && prot & PROT_WRITE != 0;
    if block != -1 && whole && flags & (MAP_PRIVATE | MAP_ANONYMOUS) == MAP_PRIVATE | MAP_ANONYMOUS
    {
        populate(block as *mut c_void, len);
    }
    block as *mut c_void
}

/// The C function `mmap64`.
///
/// # Safety
/// The contract of the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    at: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    file: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: the same call on machines with 64-bit addresses.
    unsafe { mmap(at, len, prot, flags, file, offset) }
}
