//! Signals sent to the recorder are intended for the recorded program.
//!
//! The signals are blocked while they are [held](Signals), and a thread waits for them. Signals
//! sent by a process are forwarded to the program. The kernel has already sent a signal of the
//! keyboard (SIGINT) to perf and to the program, because they are in the same process group.

use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::{fs, thread};

const HELD: [libc::c_int; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];
/// Further signals that [`Signals::run`] forwards.
const FURTHER: [libc::c_int; 4] = [libc::SIGUSR1, libc::SIGUSR2, libc::SIGWINCH, libc::SIGCONT];
/// The interval at which the waiting thread checks for its end, in nanoseconds.
const LOOK: libc::c_long = 20_000_000;

/// Blocks SIGINT, SIGTERM, SIGHUP and SIGQUIT on this thread and on threads that it starts, until
/// the value is dropped. The signals take effect afterwards.
pub struct Signals(libc::sigset_t);

impl std::fmt::Debug for Signals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Signals").finish_non_exhaustive()
    }
}

impl Signals {
    /// Blocks the signals.
    pub fn hold() -> Self {
        let mut before = MaybeUninit::uninit();
        // SAFETY: both sets are valid to read and to write. The call fails only for a wrong first
        // argument.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &held(), before.as_mut_ptr()) };
        // SAFETY: the call above has written it.
        Self(unsafe { before.assume_init() })
    }

    /// Unblocks the signals on the calling thread, also if held several times. For a child, between
    /// fork and exec. Async-signal-safe.
    pub(super) fn let_through() {
        // SAFETY: the set is valid to read.
        unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &held(), ptr::null_mut()) };
    }

    /// Starts `command`, forwards signals sent to this process to the program, and waits for its
    /// end. SIGUSR1, SIGUSR2, SIGWINCH and SIGCONT are forwarded, too, and stay blocked until the
    /// value is dropped.
    ///
    /// # Errors
    /// The program cannot be executed.
    pub fn run(&self, command: &mut Command) -> io::Result<ExitStatus> {
        let mut before = MaybeUninit::uninit();
        // SAFETY: both sets are valid to read and to write. The call fails only for a wrong first
        // argument.
        let before = unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, &set(&FURTHER), before.as_mut_ptr());
            before.assume_init()
        };
        let through = move || {
            // SAFETY: the set is valid to read.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, ptr::null_mut()) };
            Self::let_through();
            Ok(())
        };
        // SAFETY: between fork and exec the closure makes calls that are async-signal-safe.
        let mut child = unsafe { command.pre_exec(through) }.spawn()?;
        let pid = child.id();
        let all = [HELD, FURTHER].concat();
        let forwarder = Self::forward_by(set(&all), move |signal| kill(pid, signal));
        await_end(pid);
        // The identifier of the program is not reused before it is reaped.
        drop(forwarder);
        child.wait()
    }

    /// Forwards signals sent to this process to the children of the process `perf`, until the guard
    /// is dropped.
    pub(super) fn forward(&self, perf: u32) -> Forwarder {
        Self::forward_by(held(), move |signal| send(signal, perf))
    }

    fn forward_by(
        signals: libc::sigset_t,
        send: impl Fn(libc::c_int) + Send + 'static,
    ) -> Forwarder {
        let done = Arc::new(AtomicBool::new(false));
        let over = Arc::clone(&done);
        let thread = thread::spawn(move || {
            while !over.load(Ordering::Acquire) {
                // A signal of the keyboard has reached the program already.
                if let Some((signal, true)) = within(&signals, LOOK) {
                    send(signal);
                }
            }
        });
        Forwarder { done, thread: Some(thread) }
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        // SAFETY: the mask is valid to read.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, ptr::null_mut()) };
    }
}

/// A guard that forwards signals until it is dropped.
pub(super) struct Forwarder {
    done: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        self.done.store(true, Ordering::Release);
        // The thread only ends by returning.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn held() -> libc::sigset_t {
    set(&HELD)
}

fn set(signals: &[libc::c_int]) -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: the set is valid to write; the signals are valid numbers.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for signal in signals {
            libc::sigaddset(set.as_mut_ptr(), *signal);
        }
        set.assume_init()
    }
}

/// Returns the next signal, if one arrives soon, and whether a process sent it.
pub(super) fn next() -> Option<(libc::c_int, bool)> {
    within(&held(), LOOK)
}

/// Returns whether a signal has arrived.
pub(super) fn arrived() -> bool {
    within(&held(), 0).is_some()
}

/// Returns the next of the blocked `signals` within some nanoseconds, and whether a process sent
/// the signal.
fn within(signals: &libc::sigset_t, nanoseconds: libc::c_long) -> Option<(libc::c_int, bool)> {
    let time = libc::timespec { tv_sec: 0, tv_nsec: nanoseconds };
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    // SAFETY: set and time are valid to read, the information to write.
    let signal = unsafe { libc::sigtimedwait(signals, info.as_mut_ptr(), &time) };
    // SAFETY: all zeros are valid, and so is the data written by the call.
    let info = unsafe { info.assume_init() };
    // Codes above zero are the kernel's own.
    (signal > 0).then_some((signal, info.si_code <= 0))
}

/// Sends `signal` to the program: the child of `perf`, or perf itself if perf has no child yet.
fn send(signal: libc::c_int, perf: u32) {
    let program = children(perf).unwrap_or_default();
    let to = if program.is_empty() { vec![perf] } else { program };
    for pid in to {
        kill(pid, signal);
    }
}

fn kill(pid: u32, signal: libc::c_int) {
    // SAFETY: the call touches no memory. A signal to a process that has ended is not delivered.
    unsafe { libc::kill(pid.cast_signed(), signal) };
}

/// Waits until the child `pid` has ended. Its number is not reused until it is reaped.
pub(super) fn await_end(pid: u32) {
    loop {
        let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
        let options = libc::WEXITED | libc::WNOWAIT;
        // SAFETY: the information is valid to write.
        let done = unsafe { libc::waitid(libc::P_PID, pid, info.as_mut_ptr(), options) };
        if done == 0 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return;
        }
    }
}

/// Returns the processes whose parent is `parent`.
pub(super) fn children(parent: u32) -> io::Result<Vec<u32>> {
    let number = |entry: io::Result<fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse().ok();
    let is_child = |pid: &u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // The name before may contain any characters.
        let after = stat.rsplit_once(')').map_or("", |(_, after)| after);
        after.split_whitespace().nth(1).and_then(|pid| pid.parse().ok()) == Some(parent)
    };
    Ok(fs::read_dir("/proc")?.filter_map(number).filter(is_child).collect())
}
