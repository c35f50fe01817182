//! Symbols of the C library that this library uses. All symbols are weak: a symbol that the
//! program's C library lacks has the address zero, and the library loads nevertheless.
//!
//! Rust has no stable weak symbols, so an assembler directive declares them, and the loader writes
//! the addresses into a table.

use core::arch::global_asm;
use core::ffi::{c_char, c_int, c_void};

global_asm!(
    ".pushsection .data.rel.ro.faultless_symbols,\"aw\",%progbits",
    ".balign 8",
    ".globl faultless_symbols",
    ".hidden faultless_symbols",
    ".type faultless_symbols,%object",
    "faultless_symbols:",
    ".irp name,__libc_malloc,__libc_calloc,__libc_memalign,__libc_realloc,__libc_free,\
     __errno_location,environ,dl_iterate_phdr,getauxval,pthread_create,pthread_attr_init,\
     pthread_attr_setstacksize,pthread_attr_setdetachstate,pthread_sigmask",
    ".weak \\name",
    ".quad \\name",
    ".endr",
    ".size faultless_symbols, . - faultless_symbols",
    ".popsection",
);

/// The addresses, in the order of the directive above.
#[repr(C)]
struct Table {
    malloc: usize,
    calloc: usize,
    memalign: usize,
    realloc: usize,
    free: usize,
    errno: usize,
    environ: usize,
    dl_iterate_phdr: usize,
    getauxval: usize,
    pthread_create: usize,
    pthread_attr_init: usize,
    pthread_attr_setstacksize: usize,
    pthread_attr_setdetachstate: usize,
    pthread_sigmask: usize,
}

unsafe extern "C" {
    #[link_name = "faultless_symbols"]
    static TABLE: Table;
}

macro_rules! symbols {
    ($($(#[$doc:meta])* $name:ident: $type:ty = $field:ident;)*) => {$(
        $(#[$doc])*
        #[inline]
        pub fn $name() -> Option<$type> {
            // SAFETY: the loader has written the address of a function or of a variable of this
            // type, or zero. `Option` of such an address is zero for `None`.
            unsafe { core::mem::transmute::<usize, Option<$type>>(TABLE.$field) }
        }
    )*};
}

/// C's `malloc`.
pub type Malloc = unsafe extern "C" fn(usize) -> *mut c_void;
/// C's `calloc`, and functions with an alignment and a size.
pub type Calloc = unsafe extern "C" fn(usize, usize) -> *mut c_void;
/// C's `realloc`.
pub type Realloc = unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void;
/// C's `free`.
pub type Free = unsafe extern "C" fn(*mut c_void);
/// The attributes of a thread. C's type is smaller.
pub type ThreadAttributes = [u64; 16];
/// A set of signals.
pub type Signals = [u64; 16];
/// The start of a thread.
pub type ThreadStart = extern "C" fn(*mut c_void) -> *mut c_void;
/// C's `pthread_create`.
pub type ThreadCreate =
    unsafe extern "C" fn(&mut usize, &ThreadAttributes, ThreadStart, *mut c_void) -> c_int;
/// A visitor of loaded objects.
pub type Visitor<T> = unsafe extern "C" fn(&Object, usize, &mut T) -> c_int;

/// The first fields of C's `dl_phdr_info`.
#[repr(C)]
#[derive(Debug)]
pub struct Object {
    /// The difference between an address in memory and an address in the file.
    pub base: usize,
    /// The path of the file.
    pub name: *const c_char,
    /// The program headers.
    pub headers: *const ProgramHeader,
    /// The number of program headers.
    pub count: u16,
    /// The number of objects that were loaded since the start. Older C libraries lack this field
    /// and the next.
    pub opened: u64,
    /// The number of objects that were unloaded.
    pub closed: u64,
}

/// A program header of an ELF file of 64 bits.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ProgramHeader {
    /// The type of the segment.
    pub kind: u32,
    /// The permissions.
    pub flags: u32,
    /// The place in the file.
    pub offset: usize,
    /// The address in the file.
    pub address: usize,
    /// The physical address; without a meaning.
    pub physical: usize,
    /// The size in the file.
    pub file_size: usize,
    /// The size in memory.
    pub size: usize,
    /// The alignment.
    pub align: usize,
}

symbols! {
    /// glibc's `malloc`.
    libc_malloc: Malloc = malloc;
    /// glibc's `calloc`.
    libc_calloc: Calloc = calloc;
    /// glibc's `memalign`.
    libc_memalign: Calloc = memalign;
    /// glibc's `realloc`.
    libc_realloc: Realloc = realloc;
    /// glibc's `free`.
    libc_free: Free = free;
    /// Creates a thread. Older versions of glibc have this function only in some programs.
    thread_create: ThreadCreate = pthread_create;
    /// Sets the attributes of a thread to the defaults.
    attributes_init: unsafe extern "C" fn(&mut ThreadAttributes) -> c_int = pthread_attr_init;
    /// Sets the size of a thread's stack.
    attributes_set_stack: unsafe extern "C" fn(&mut ThreadAttributes, usize) -> c_int =
        pthread_attr_setstacksize;
    /// Sets whether a thread is detached.
    attributes_set_detached: unsafe extern "C" fn(&mut ThreadAttributes, c_int) -> c_int =
        pthread_attr_setdetachstate;
    /// Changes the blocked signals of the calling thread.
    thread_signals: unsafe extern "C" fn(c_int, &Signals, &mut Signals) -> c_int = pthread_sigmask;
    /// The address of the calling thread's `errno`.
    errno_location: unsafe extern "C" fn() -> *mut c_int = errno;
    /// The value of an entry of the auxiliary vector.
    auxiliary: unsafe extern "C" fn(usize) -> usize = getauxval;
}

/// Returns the environment: pointers to texts, and a null pointer at the end. `None` before the C
/// library has set the environment.
pub fn environment() -> Option<*const *const c_char> {
    // SAFETY: the address is zero, or the address of C's variable `environ`.
    let environment = unsafe { (TABLE.environ as *const *const *const c_char).as_ref() }?;
    (!environment.is_null()).then_some(*environment)
}

/// Calls `visit` for each loaded object in the order of the loader, until `visit` returns a number
/// other than zero.
pub fn visit_objects<T>(visit: Visitor<T>, state: &mut T) {
    type Iterate<T> = unsafe extern "C" fn(Visitor<T>, &mut T) -> c_int;
    // SAFETY: the address is zero, or the address of C's `dl_iterate_phdr`, which passes `state` to
    // `visit` and keeps neither.
    unsafe {
        let iterate: Option<Iterate<T>> =
            core::mem::transmute::<usize, Option<Iterate<T>>>(TABLE.dl_iterate_phdr);
        if let Some(iterate) = iterate {
            iterate(visit, state);
        }
    }
}
