//! The hook of `dlsym`, which detects libraries that the program has opened.
//!
//! A program looks up a function of a new library before it uses the library. The hook is a
//! [jump](crate::jump): the C library finds the caller of `dlsym` by the return address, which is
//! the program's. A hook of `dlopen` could not run code after the original function without a
//! change of this address, and the original function then would use this library's search path and
//! namespace.

use crate::jump::jump;
use crate::next::Next;
use crate::text;

static DLSYM: Next = Next::new(c"dlsym");

/// Finds the function of the next library. At the start the program has one thread.
pub fn find_next() {
    DLSYM.address();
}

/// Moves the text of new libraries. Returns the address of the next `dlsym`.
extern "C" fn before_dlsym() -> usize {
    text::move_opened();
    DLSYM.address().unwrap_or(missing as *const () as usize)
}

/// Returns null: without a `dlsym` in a library of the program, no symbol is found.
extern "C" fn missing() -> usize {
    0
}

jump!(dlsym, before_dlsym);
