//! Settings in the environment of the program.

use crate::symbols;
use core::ffi::{CStr, c_char};
use core::sync::atomic::{AtomicUsize, Ordering};

/// A size in bytes in a variable.
#[derive(Debug)]
pub struct Size {
    /// The name of the variable, and the character `=`.
    name: &'static [u8],
    /// The smallest effective value.
    least: usize,
    /// The value; [`UNREAD`] before the variable was read.
    value: AtomicUsize,
}

/// The variable has not been read.
const UNREAD: usize = 0;
/// The operation is off. No block has this size.
pub const OFF: usize = usize::MAX;

impl Size {
    /// Declares the variable `name`, which ends with the character `=`. Smaller values count as
    /// `least`.
    pub const fn new(name: &'static [u8], least: usize) -> Self {
        Self { name, least, value: AtomicUsize::new(UNREAD) }
    }

    /// Returns the value, or [`OFF`] without a number in the variable. The variable is read once.
    #[inline]
    pub fn get(&self) -> usize {
        match self.value.load(Ordering::Relaxed) {
            UNREAD => self.read(),
            known => known,
        }
    }

    #[cold]
    fn read(&self) -> usize {
        // The loader allocates memory before the C library has set the environment.
        let Some(environment) = symbols::environment() else { return OFF };
        // SAFETY: the C library's list, and the hook returns to the program later.
        let bytes = unsafe { find(environment, self.name) };
        let bytes = bytes.and_then(|value| number(value.to_bytes()));
        let bytes = bytes.map_or(OFF, |bytes| bytes.max(self.least));
        self.value.store(bytes, Ordering::Relaxed);
        bytes
    }
}

/// Returns the value of the variable with this start, which is the name and the character `=`.
///
/// # Safety
/// `environment` is a list of texts that ends with a null pointer. The value is used before the
/// program can change its environment.
pub unsafe fn find(
    mut environment: *const *const c_char,
    start: &'static [u8],
) -> Option<&'static CStr> {
    // SAFETY: by the contract, a null pointer ends the list. Each text ends with a zero byte.
    unsafe {
        while !(*environment).is_null() {
            let text = CStr::from_ptr(*environment);
            if text.to_bytes().starts_with(start) {
                return Some(CStr::from_ptr(text.as_ptr().add(start.len())));
            }
            environment = environment.add(1);
        }
    }
    None
}

/// Returns the decimal number, unless it is 0, too large, or not a number.
pub fn number(text: &[u8]) -> Option<usize> {
    let mut value = 0_usize;
    for byte in text {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        value = value.checked_mul(10)?.checked_add(digit.into())?;
    }
    (value != 0).then_some(value)
}
