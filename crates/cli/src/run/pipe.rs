//! The disposition of SIGPIPE that the program inherits.
//!
//! Rust's start ignores SIGPIPE in the command, and `Command` sets the default for the program. A
//! program that was started with an ignored SIGPIPE (`trap '' PIPE` of a shell) expects this
//! disposition, so the command reads the disposition before Rust's start.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

/// The command was started with an ignored SIGPIPE.
static IGNORED: AtomicBool = AtomicBool::new(false);

/// The C library calls this function before `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static READ: extern "C" fn() = read;

extern "C" fn read() {
    // SAFETY: zeros are a valid value of the type, and the call only writes to the value.
    let ignored = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGPIPE, ptr::null(), &mut action) == 0
            && action.sa_sigaction == libc::SIG_IGN
    };
    IGNORED.store(ignored, Ordering::Relaxed);
}

/// Starts the program with the disposition of SIGPIPE with which this command was started.
pub fn restore(command: &mut Command) {
    if !IGNORED.load(Ordering::Relaxed) {
        return;
    }
    let ignore = || {
        // SAFETY: the call has no condition, and is async-signal-safe.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes one call, which is async-signal-safe.
    unsafe { command.pre_exec(ignore) };
}
