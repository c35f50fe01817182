//! How a fault ends.

use core::fmt;

/// How a fault was served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FaultKind {
    /// The zero page.
    ZeroPage,
    /// A fresh page.
    Anon,
    /// A copy of a page that others use too.
    Copy,
    /// The page itself, whose last user this is.
    Reuse,
    /// The object's page itself.
    Shared,
    /// A huge leaf, of the object's pages.
    Huge,
    /// Device memory.
    Device,
    /// The page itself, which was swapped out.
    Swapped,
    /// None yet: the page is being read from its object's store, or from the swap area. [`Cpu::pending_read`](crate::Cpu::pending_read) tells what to wait for before the access is tried
    /// again.
    Pending,
    /// The entry was in order: another CPU was faster, or the TLB was out of date.
    Spurious,
}

/// A fault that cannot be served: what the program is to be told. Not `non_exhaustive`: a page-fault handler
/// answers each of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultError {
    /// SIGSEGV. `mapped` tells `SEGV_ACCERR` from `SEGV_MAPERR`.
    Segv {
        /// Whether something is mapped there.
        mapped: bool,
    },
    /// SIGBUS: the page lies beyond the end of its object, or could not be read from the object's
    /// store or the swap area, or its object is [charged](crate::Object::try_new_charged) and the
    /// limit is reached.
    Bus,
    /// No frame is left for it, or no heap; or the page has as many mappings as can be counted (2^22 less
    /// 2^16).
    OutOfMemory,
}

impl fmt::Display for FaultError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Segv { mapped: false } => "SIGSEGV: nothing is mapped there",
            Self::Segv { mapped: true } => "SIGSEGV: the mapping forbids the access",
            Self::Bus => "SIGBUS: the page lies beyond the end of its object, or could not be read",
            Self::OutOfMemory => "out of memory",
        })
    }
}

impl core::error::Error for FaultError {}
