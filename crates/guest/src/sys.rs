//! System calls, made directly: there is no C library in between that caches or changes values.

use std::arch::asm;
use std::fmt;

/// A Linux error number.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(pub i32);

impl Errno {
    /// Returns the `errno` of the C library's last call.
    pub fn last() -> Self {
        Self(std::io::Error::last_os_error().raw_os_error().unwrap_or(0))
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", std::io::Error::from_raw_os_error(self.0))
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<Errno> for String {
    fn from(errno: Errno) -> Self {
        errno.to_string()
    }
}

/// The outcome of a system call.
pub type Result<T> = std::result::Result<T, Errno>;

/// Makes the system call `number` and returns `rax` unchanged.
///
/// # Safety
/// The caller is allowed to make the changes that the call makes to this process's memory.
#[inline(always)]
pub unsafe fn raw(number: i64, args: [u64; 6]) -> i64 {
    let result: i64;
    // SAFETY: by the caller's contract. The kernel keeps all registers except these.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") args[0],
            in("rsi") args[1],
            in("rdx") args[2],
            in("r10") args[3],
            in("r8") args[4],
            in("r9") args[5],
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result
}

/// Converts the value of [`raw`] to a result.
///
/// # Errors
/// The error number in the value.
pub fn result(value: i64) -> Result<u64> {
    match value {
        -4095..=-1 => Err(Errno(-value as i32)),
        _ => Ok(value as u64),
    }
}

/// Makes the system call `number`; missing arguments are 0.
///
/// # Errors
/// The kernel's.
///
/// # Safety
/// As for [`raw`].
pub unsafe fn call<const N: usize>(number: i64, args: [u64; N]) -> Result<u64> {
    let mut six = [0; 6];
    six[..N].copy_from_slice(&args);
    // SAFETY: by the caller's contract.
    result(unsafe { raw(number, six) })
}

/// Checks the `result` of a call of the C library: -1 becomes the error in `errno`.
///
/// # Errors
/// The error in `errno`.
pub fn checked<T: PartialEq + From<i8>>(result: T) -> Result<T> {
    if result == T::from(-1) { Err(Errno::last()) } else { Ok(result) }
}

/// Returns `result`, with the operation in its error.
///
/// # Errors
/// The error of `result`, as a message.
pub fn doing<T>(what: &str, result: Result<T>) -> std::result::Result<T, String> {
    result.map_err(|errno| format!("{what}: {errno}"))
}
