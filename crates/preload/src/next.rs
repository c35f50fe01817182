//! The functions behind the hooks: `malloc` and its relatives of the next library in the order of
//! the loader.
//!
//! A program can have another allocator in a library, such as jemalloc. The hooks then call that
//! library, because the program's `free` accepts only its blocks. The functions are found by the
//! symbol tables of the loaded objects. C's `dlsym` is not used: older versions of glibc have the
//! function in a library that not all programs load, and a failed `dlsym` allocates memory.

use crate::symbols::{self, Object, ProgramHeader};
use core::ffi::{CStr, c_char, c_int};
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The allocator that serves the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocator {
    /// glibc's.
    Glibc,
    /// musl's.
    Musl,
    /// An allocator in another library.
    Other,
}

const UNKNOWN: usize = 0;
const GLIBC: usize = 1;
const MUSL: usize = 2;
const OTHER: usize = 3;

static ALLOCATOR: AtomicUsize = AtomicUsize::new(UNKNOWN);

/// Returns the allocator that serves the program.
#[inline]
pub fn allocator() -> Allocator {
    match ALLOCATOR.load(Ordering::Relaxed) {
        GLIBC => Allocator::Glibc,
        MUSL => Allocator::Musl,
        OTHER => Allocator::Other,
        _ => identify(),
    }
}

/// Identifies the allocator. The first call comes from the start of the program, before the program
/// has threads.
#[cold]
fn identify() -> Allocator {
    let malloc = look_up(c"malloc");
    let (kind, number) = match symbols::libc_malloc() {
        Some(own) if malloc.address == own as usize => (Allocator::Glibc, GLIBC),
        None if malloc.in_libc => (Allocator::Musl, MUSL),
        _ => (Allocator::Other, OTHER),
    };
    ALLOCATOR.store(number, Ordering::Relaxed);
    kind
}

/// A function of the next library.
#[derive(Debug)]
pub struct Next {
    name: &'static CStr,
    /// The address, [`UNREAD`] or [`MISSING`].
    address: AtomicUsize,
    /// The function belongs to the C library. Valid after the address was found.
    in_libc: AtomicBool,
}

const UNREAD: usize = 0;
const MISSING: usize = 1;

impl Next {
    /// Declares the function `name`.
    pub const fn new(name: &'static CStr) -> Self {
        Self { name, address: AtomicUsize::new(UNREAD), in_libc: AtomicBool::new(false) }
    }

    /// Returns the address of the function, or `None` if no library after this library has the
    /// function.
    #[inline]
    pub fn address(&self) -> Option<usize> {
        let address = match self.address.load(Ordering::Acquire) {
            UNREAD => self.find(),
            known => known,
        };
        (address != MISSING).then_some(address)
    }

    /// Returns whether the function belongs to the C library. Another library between this library
    /// and the C library can replace some functions of an allocator.
    #[inline]
    pub fn is_in_libc(&self) -> bool {
        self.address().is_some() && self.in_libc.load(Ordering::Relaxed)
    }

    #[cold]
    fn find(&self) -> usize {
        let found = look_up(self.name);
        let address = found.address.max(MISSING);
        self.in_libc.store(found.in_libc, Ordering::Relaxed);
        self.address.store(address, Ordering::Release);
        address
    }
}

/// A search for a function.
struct Search {
    name: &'static CStr,
    /// This library has been visited.
    behind: bool,
    /// The address, or 0.
    address: usize,
    /// The object with the function contains the C library.
    in_libc: bool,
}

/// Finds the first function `name` in the objects after this library.
fn look_up(name: &'static CStr) -> Search {
    let mut search = Search { name, behind: false, address: 0, in_libc: false };
    symbols::visit_objects(visit, &mut search);
    search
}

unsafe extern "C" fn visit(object: &Object, _: usize, search: &mut Search) -> c_int {
    if !search.behind {
        search.behind = contains(object, visit as *const () as usize);
        return 0;
    }
    let Some(tables) = Tables::of(object) else { return 0 };
    let Some(address) = tables.find(search.name) else { return 0 };
    let errno = symbols::errno_location().map_or(0, |function| function as usize);
    search.address = address;
    search.in_libc = contains(object, errno);
    1
}

/// Returns the program headers of an object.
pub fn headers(object: &Object) -> &[ProgramHeader] {
    if object.headers.is_null() {
        return &[];
    }
    // SAFETY: the loader describes its program headers, which stay while the object is visited.
    unsafe { core::slice::from_raw_parts(object.headers, object.count.into()) }
}

/// Returns whether a loaded segment of the object contains the address.
pub fn contains(object: &Object, address: usize) -> bool {
    const LOAD: u32 = 1;
    headers(object).iter().any(|header| {
        let start = object.base.wrapping_add(header.address);
        header.kind == LOAD && address.wrapping_sub(start) < header.size
    })
}

/// A symbol of an ELF file of 64 bits.
#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: usize,
    size: usize,
}

/// The dynamic symbols of an object.
struct Tables {
    base: usize,
    symbols: *const Symbol,
    strings: *const c_char,
    /// The table by GNU's hash, or null.
    gnu: *const u32,
    /// The table by the older hash, or null.
    hash: *const u32,
}

impl Tables {
    fn of(object: &Object) -> Option<Self> {
        const DYNAMIC: u32 = 2;
        let header = headers(object).iter().find(|header| header.kind == DYNAMIC)?;
        let mut entry = object.base.wrapping_add(header.address) as *const [usize; 2];
        let (mut symbols, mut strings, mut gnu, mut hash) = (0, 0, 0, 0);
        // SAFETY: the dynamic section is a list of pairs that ends with the tag zero.
        unsafe {
            while (*entry)[0] != 0 {
                let [tag, value] = *entry;
                // glibc has added the base to the addresses, musl has not.
                let address =
                    if value < object.base { object.base.wrapping_add(value) } else { value };
                match tag {
                    4 => hash = address,
                    5 => strings = address,
                    6 => symbols = address,
                    0x6fff_fef5 => gnu = address,
                    _ => {}
                }
                entry = entry.add(1);
            }
        }
        (symbols != 0 && strings != 0).then_some(Self {
            base: object.base,
            symbols: symbols as *const Symbol,
            strings: strings as *const c_char,
            gnu: gnu as *const u32,
            hash: hash as *const u32,
        })
    }

    /// Returns the address of the defined function `name`.
    fn find(&self, name: &CStr) -> Option<usize> {
        if self.gnu.is_null() { self.find_by_number(name) } else { self.find_by_hash(name) }
    }

    /// Searches the chain of the name's GNU hash.
    fn find_by_hash(&self, name: &CStr) -> Option<usize> {
        let hash = name
            .to_bytes()
            .iter()
            .fold(5381_u32, |hash, byte| hash.wrapping_mul(33).wrapping_add(u32::from(*byte)));
        // SAFETY: the table begins with four numbers: buckets, the first symbol, and the size of
        // the filter in words of 64 bits. The filter, the buckets and the chains follow. A chain
        // ends with a hash whose bit 0 is set.
        unsafe {
            let [buckets, first, filter] = [0, 1, 2].map(|index| *self.gnu.add(index) as usize);
            if buckets == 0 {
                return None;
            }
            let bucket = self.gnu.add(4 + 2 * filter);
            let chain = bucket.add(buckets);
            let mut index = *bucket.add(hash as usize % buckets) as usize;
            if index < first {
                return None;
            }
            loop {
                let known = *chain.add(index - first);
                if known | 1 == hash | 1
                    && let Some(address) = self.defined(index, name)
                {
                    return Some(address);
                }
                if known & 1 != 0 {
                    return None;
                }
                index += 1;
            }
        }
    }

    /// Searches all symbols. The older table has as many chains as symbols.
    fn find_by_number(&self, name: &CStr) -> Option<usize> {
        if self.hash.is_null() {
            return None;
        }
        // SAFETY: the second number of the table is the number of symbols.
        let count = unsafe { *self.hash.add(1) } as usize;
        (0..count).find_map(|index| self.defined(index, name))
    }

    /// Returns the address of the symbol if it is a defined function of this name.
    fn defined(&self, index: usize, name: &CStr) -> Option<usize> {
        const FUNCTION: u8 = 2;
        // SAFETY: the index comes from the object's own tables.
        let symbol = unsafe { &*self.symbols.add(index) };
        if symbol.section == 0 || symbol.info & 0xf != FUNCTION {
            return None;
        }
        // SAFETY: the names of symbols are in the string table.
        let known = unsafe { CStr::from_ptr(self.strings.add(symbol.name as usize)) };
        (known == name).then_some(self.base.wrapping_add(symbol.value))
    }
}
