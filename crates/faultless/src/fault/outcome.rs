//! The results of a fault.

use core::fmt;

/// How a fault was served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FaultKind {
    /// With the zero page.
    ZeroPage,
    /// With a new zeroed page.
    Anon,
    /// With a copy of a page that has other users.
    Copy,
    /// By reuse of the page, whose last user is this space.
    Reuse,
    /// With the object's page itself.
    Shared,
    /// With a huge leaf that maps pages of the object.
    Huge,
    /// With device memory.
    Device,
    /// With the page itself, which was swapped out.
    Swapped,
    /// Not yet: the page is being read from the store of its object, or from the swap area.
    /// [`Cpu::pending_read`](crate::Cpu::pending_read) returns the read to wait for before the
    /// access is retried.
    Pending,
    /// The entry already allowed the access: another CPU was faster, or the TLB was out of date.
    Spurious,
}

/// A fault that cannot be served: the error to report to the program. Not `non_exhaustive`, since a
/// page-fault handler must handle each variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultError {
    /// SIGSEGV. `mapped` distinguishes `SEGV_ACCERR` from `SEGV_MAPERR`.
    Segv {
        /// Whether the address is mapped.
        mapped: bool,
    },
    /// SIGBUS: the page lies beyond the end of its object, or could not be read from the object's
    /// store or the swap area, or the object is [charged](crate::Object::try_new_charged) and the
    /// limit is reached.
    Bus,
    /// No frame or no heap memory is available; or the page has the maximum number of mappings
    /// (2^22 less 2^16).
    OutOfMemory,
}

impl fmt::Display for FaultError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Segv { mapped: false } => "SIGSEGV: no mapping at the address",
            Self::Segv { mapped: true } => "SIGSEGV: the mapping forbids the access",
            Self::Bus => "SIGBUS: the page lies beyond the end of the object, or could not be read",
            Self::OutOfMemory => "out of memory",
        })
    }
}

impl core::error::Error for FaultError {}
