//! The start of the library, before the program's `main`.

use crate::{ahead, allocator, environment, mapping, symbols, text};
use core::ffi::{c_char, c_int};

/// The loader calls this function after it has loaded the program and the program's libraries.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn(c_int, *const *const c_char, *const *const c_char) = start;

/// glibc's loader passes the environment, and can call this function before its C library has set
/// `environ`. musl passes no arguments, and sets `environ` first.
extern "C" fn start(_: c_int, _: *const *const c_char, environment: *const *const c_char) {
    allocator::find_next();
    mapping::find_next();
    ahead::start();
    let environment = symbols::environment().unwrap_or(environment);
    // SAFETY: the list of the C library, or of the loader, before the program starts.
    match unsafe { environment::find(environment, b"FAULTLESS_HUGE_TEXT=") } {
        Some(b"collapse") => text::move_to_huge_pages(text::Way::Collapse),
        Some(b"copy") => text::move_to_huge_pages(text::Way::Copy),
        _ => {}
    }
}
