//! Errors: Linux's numbers, with the call and the range of a refused call.

use crate::addr::VirtRange;
use core::fmt;

/// The Linux error numbers that address-space calls return.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(i32)]
#[non_exhaustive]
pub enum Errno {
    /// Operation not permitted.
    EPERM = 1,
    /// The page does not exist.
    ENOENT = 2,
    /// Input or output failed.
    EIO = 5,
    /// Resource temporarily unavailable.
    EAGAIN = 11,
    /// Cannot allocate memory, or the range has a hole.
    ENOMEM = 12,
    /// Permission denied.
    EACCES = 13,
    /// Bad address.
    EFAULT = 14,
    /// Resource in use.
    EBUSY = 16,
    /// The range is occupied.
    EEXIST = 17,
    /// The memory node does not exist.
    ENODEV = 19,
    /// Invalid argument.
    EINVAL = 22,
    /// Beyond the largest size or the end of the object.
    EFBIG = 27,
    /// No space is left on the device.
    ENOSPC = 28,
    /// A page offset does not fit.
    EOVERFLOW = 75,
    /// The operation is not supported.
    EOPNOTSUPP = 95,
}

impl Errno {
    /// Returns Linux's number for this error.
    pub const fn number(self) -> i32 {
        self as i32
    }

    /// Returns the error with Linux's number `number`; `EIO` if no variant has this number.
    #[must_use]
    pub fn of_number(number: i32) -> Self {
        const ALL: [Errno; 15] = [
            Errno::EPERM,
            Errno::ENOENT,
            Errno::EIO,
            Errno::EAGAIN,
            Errno::ENOMEM,
            Errno::EACCES,
            Errno::EFAULT,
            Errno::EBUSY,
            Errno::EEXIST,
            Errno::ENODEV,
            Errno::EINVAL,
            Errno::EFBIG,
            Errno::ENOSPC,
            Errno::EOVERFLOW,
            Errno::EOPNOTSUPP,
        ];
        ALL.into_iter().find(|errno| errno.number() == number).unwrap_or(Self::EIO)
    }

    /// Returns Linux's symbol for this error.
    pub const fn name(self) -> &'static str {
        match self {
            Self::EPERM => "EPERM",
            Self::ENOENT => "ENOENT",
            Self::EIO => "EIO",
            Self::EAGAIN => "EAGAIN",
            Self::ENOMEM => "ENOMEM",
            Self::EACCES => "EACCES",
            Self::EFAULT => "EFAULT",
            Self::EBUSY => "EBUSY",
            Self::EEXIST => "EEXIST",
            Self::ENODEV => "ENODEV",
            Self::EINVAL => "EINVAL",
            Self::EFBIG => "EFBIG",
            Self::ENOSPC => "ENOSPC",
            Self::EOVERFLOW => "EOVERFLOW",
            Self::EOPNOTSUPP => "EOPNOTSUPP",
        }
    }
}

/// Heap memory or frames were exhausted; the operation changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfMemory;

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("out of memory")
    }
}

impl core::error::Error for OutOfMemory {}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl core::error::Error for Errno {}

impl From<OutOfMemory> for Errno {
    fn from(_: OutOfMemory) -> Self {
        Self::ENOMEM
    }
}

/// A refused address-space call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Error {
    /// The refused call, by its Linux name.
    pub operation: &'static str,
    /// The range of the call, as given (rounded to pages if it was valid), or
    /// [`NO_RANGE`](Self::NO_RANGE).
    pub range: VirtRange,
    /// The reason.
    pub errno: Errno,
}

impl Error {
    /// The range in the errors of calls without a range: empty, at the end of the address space.
    pub const NO_RANGE: VirtRange = VirtRange { start: u64::MAX, end: u64::MAX };
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operation, range, errno } = self;
        if *range == Self::NO_RANGE {
            write!(f, "{operation}: {errno}")
        } else if range.is_empty() {
            write!(f, "{operation} {range:?} (length 0): {errno}")
        } else {
            write!(f, "{operation} {range:?}: {errno}")
        }
    }
}

impl core::error::Error for Error {}
