//! Linux's error numbers, as system calls return them.

use linux_raw_sys::errno;

/// An error number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub u16);

/// The result of a system call.
pub type Result<T = u64> = core::result::Result<T, Errno>;

macro_rules! errnos {
    ($($name:ident)*) => {
        impl Errno {
            $(#[doc = concat!("Linux's `", stringify!($name), "`.")]
            pub const $name: Self = Self(errno::$name as u16);)*

            /// Returns Linux's name for the error; `?` for internal errors.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name),)*
                    _ => "?",
                }
            }
        }
    };
}

errnos! {
    EPERM ENOENT ESRCH EINTR EIO E2BIG ENOEXEC EBADF ECHILD EAGAIN ENOMEM EACCES EFAULT EBUSY EEXIST
    EXDEV ENODEV ENOTDIR EISDIR EINVAL ENFILE EMFILE ENOTTY ETXTBSY EFBIG ENOSPC ESPIPE EROFS EMLINK
    EPIPE ERANGE EDEADLK ENOLCK ENAMETOOLONG ENOSYS ENOTEMPTY ELOOP EOVERFLOW EOPNOTSUPP ETIMEDOUT
    ENODATA ENXIO ENOTSOCK EISCONN EAFNOSUPPORT ENOMSG EIDRM ELIBBAD
}

impl Errno {
    /// Internal: a signal interrupted the call. The call is restarted, unless a handler without
    /// `SA_RESTART` runs: then the call returns `EINTR`.
    pub const RESTART: Self = Self(512);
    /// Internal: like [`RESTART`](Self::RESTART), but any handler causes `EINTR`.
    pub const RESTART_UNHANDLED: Self = Self(514);
}

impl From<faultless::Errno> for Errno {
    fn from(errno: faultless::Errno) -> Self {
        // All numbers fit.
        Self(errno.number() as u16)
    }
}

impl From<faultless::Error> for Errno {
    fn from(error: faultless::Error) -> Self {
        error.errno.into()
    }
}

impl From<faultless::OutOfMemory> for Errno {
    fn from(_: faultless::OutOfMemory) -> Self {
        Self::ENOMEM
    }
}
