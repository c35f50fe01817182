//! The start of the library, before the program's `main`, and its end.

use crate::{
    advice, ahead, allocator, calls, dlsym, environment, mapping, populate, report, symbols, text,
    warning,
};
use core::ffi::{CStr, c_char, c_int};

/// The loader calls this function after it has loaded the program and the program's libraries.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn(c_int, *const *const c_char, *const *const c_char) = start;

/// glibc's loader passes the environment, and can call this function before its C library has set
/// `environ`. musl passes no arguments, and sets `environ` first.
extern "C" fn start(_: c_int, _: *const *const c_char, environment: *const *const c_char) {
    allocator::find_next();
    mapping::find_next();
    advice::find_next();
    dlsym::find_next();
    calls::find_next();
    let environment = symbols::environment().unwrap_or(environment);
    // SAFETY: the list of the C library, or of the loader, before the program starts.
    let variable = |name| unsafe { environment::find(environment, name) };
    let warns = variable(b"FAULTLESS_REPORT=").is_some_and(report::start);
    ahead::start();
    match variable(b"FAULTLESS_HUGE_TEXT=").map(CStr::to_bytes) {
        Some(b"collapse") => text::start(text::Way::Collapse),
        Some(b"copy") => text::start(text::Way::Copy),
        _ => {}
    }
    if warns {
        populate::probe();
        warning::start();
    }
}

/// The C library calls this function when the program returns from `main` or calls `exit`.
#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = warning::end;
