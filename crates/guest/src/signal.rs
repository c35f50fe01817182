//! Signal handlers and masks.

use crate::sys::{self, checked};
use std::mem::zeroed;
use std::ptr::{null, null_mut};
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::atomic::{AtomicI32, AtomicU64};

/// A handler for `SA_SIGINFO`: the signal, its information, and the interrupted context.
pub type Handler = unsafe extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void);

/// A set of signals.
pub type Set = libc::sigset_t;

/// Returns the set of `signals`.
pub fn set(signals: &[i32]) -> Set {
    // SAFETY: the set is a local, and is emptied before its use.
    unsafe {
        let mut set: Set = zeroed();
        libc::sigemptyset(&raw mut set);
        for &signal in signals {
            libc::sigaddset(&raw mut set, signal);
        }
        set
    }
}

/// Returns whether `signal` is in the set.
pub fn contains(set: &Set, signal: i32) -> bool {
    // SAFETY: reads the set.
    unsafe { libc::sigismember(&raw const *set, signal) == 1 }
}

/// Makes `handler` handle `signal`, with `SA_SIGINFO` and `flags`, and with `masked` blocked during
/// the handler.
///
/// # Errors
/// `sigaction`'s.
pub fn handle_with(signal: i32, handler: Handler, flags: i32, masked: &[i32]) -> sys::Result<()> {
    install(signal, handler as *const () as usize, flags | libc::SA_SIGINFO, masked)
}

/// Calls [`handle_with`] without additional blocked signals.
///
/// # Errors
/// `sigaction`'s.
pub fn handle(signal: i32, handler: Handler, flags: i32) -> sys::Result<()> {
    handle_with(signal, handler, flags, &[])
}

/// Restores the default action of `signal`.
///
/// # Errors
/// `sigaction`'s.
pub fn default(signal: i32) -> sys::Result<()> {
    install(signal, libc::SIG_DFL, 0, &[])
}

/// Ignores `signal`.
///
/// # Errors
/// `sigaction`'s.
pub fn ignore(signal: i32) -> sys::Result<()> {
    install(signal, libc::SIG_IGN, 0, &[])
}

fn install(signal: i32, handler: usize, flags: i32, masked: &[i32]) -> sys::Result<()> {
    // SAFETY: an action of zeros is valid; the handler has the kind selected by the flags, and
    // handlers of these programs only perform operations allowed in a handler.
    unsafe {
        let mut action: libc::sigaction = zeroed();
        action.sa_sigaction = handler;
        action.sa_flags = flags;
        action.sa_mask = set(masked);
        checked(libc::sigaction(signal, &raw const action, null_mut())).map(|_| ())
    }
}

/// Changes this thread's mask by `how`, and returns the old mask.
///
/// # Errors
/// `sigprocmask`'s.
pub fn mask(how: i32, signals: &[i32]) -> sys::Result<Set> {
    let set = set(signals);
    // SAFETY: both sets are locals.
    unsafe {
        let mut old: Set = zeroed();
        let done = libc::pthread_sigmask(how, &raw const set, &raw mut old);
        if done == 0 { Ok(old) } else { Err(sys::Errno(done)) }
    }
}

/// This thread's mask.
pub fn blocked() -> Set {
    // SAFETY: a query; the set is a local.
    unsafe {
        let mut old: Set = zeroed();
        libc::pthread_sigmask(libc::SIG_BLOCK, null(), &raw mut old);
        old
    }
}

/// Returns the signals that are blocked and pending for this thread.
pub fn pending() -> Set {
    // SAFETY: the set is a local.
    unsafe {
        let mut set: Set = zeroed();
        libc::sigpending(&raw mut set);
        set
    }
}

/// Waits for a signal with only `signals` blocked.
pub fn suspend(signals: &[i32]) {
    let set = set(signals);
    // SAFETY: the set is a local.
    unsafe { libc::sigsuspend(&raw const set) };
}

/// The last signal seen by [`note`].
#[derive(Debug)]
pub struct Noted {
    /// The signal number.
    pub signal: AtomicI32,
    /// The reason: `si_code`.
    pub code: AtomicI32,
    /// The address: `si_addr`.
    pub addr: AtomicU64,
    /// The sender: `si_pid`.
    pub sender: AtomicI32,
    /// The number of signals.
    pub count: AtomicU64,
}

/// The record of [`note`].
pub static NOTED: Noted = Noted {
    signal: AtomicI32::new(0),
    code: AtomicI32::new(0),
    addr: AtomicU64::new(0),
    sender: AtomicI32::new(0),
    count: AtomicU64::new(0),
};

/// Records the signal in [`NOTED`], as a handler.
///
/// # Safety
/// Called like a handler by the kernel: `info` describes the signal.
pub unsafe extern "C" fn note(signal: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes valid information about the signal.
    let (code, addr, sender) =
        unsafe { ((*info).si_code, (*info).si_addr() as u64, (*info).si_pid()) };
    NOTED.signal.store(signal, Relaxed);
    NOTED.code.store(code, Relaxed);
    NOTED.addr.store(addr, Relaxed);
    NOTED.sender.store(sender, Relaxed);
    NOTED.count.fetch_add(1, Release);
}
