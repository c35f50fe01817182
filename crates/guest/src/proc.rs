//! Processes, CPUs and waiting.

use crate::sys::{self, Errno, call, checked, doing};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The exit status of a child that panicked.
pub const PANICKED: i32 = 101;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The process exited with this status.
    Exited(i32),
    /// This signal ended the process.
    Killed(i32),
}

impl Status {
    /// Decodes the status of an ended process from `wait4`.
    pub fn of(status: i32) -> Self {
        if libc::WIFSIGNALED(status) {
            Self::Killed(libc::WTERMSIG(status))
        } else {
            Self::Exited(libc::WEXITSTATUS(status))
        }
    }
}

/// A forked child.
#[derive(Debug)]
#[must_use = "only the owner waits for the child"]
pub struct Child {
    /// The process id.
    pub pid: i32,
}

/// Forks; the child runs `body` and exits with the result.
///
/// # Errors
/// `fork`'s.
pub fn fork(body: impl FnOnce() -> i32) -> sys::Result<Child> {
    // Buffered output must not be printed by both processes.
    let _ = std::io::stdout().flush();
    // SAFETY: the child runs only `body` and never returns from this function. If this process has
    // other threads, `body` uses only its own memory, and parts of the C library that its fork
    // makes consistent.
    match checked(unsafe { libc::fork() })? {
        0 => {
            let status = catch_unwind(AssertUnwindSafe(body)).unwrap_or(PANICKED);
            let _ = std::io::stdout().flush();
            exit_now(status)
        }
        pid => Ok(Child { pid }),
    }
}

/// Ends this process without any clean-up.
pub fn exit_now(status: i32) -> ! {
    // SAFETY: the call does not return.
    unsafe { libc::_exit(status) }
}

impl Child {
    /// Waits for the end of the child.
    ///
    /// # Errors
    /// `wait4`'s.
    pub fn wait(self) -> sys::Result<Status> {
        wait(self.pid, 0).map(|ended| ended.map_or(Status::Exited(0), |(_, status)| status))
    }

    /// Returns the child's status if the child has ended.
    ///
    /// # Errors
    /// `wait4`'s.
    pub fn try_wait(&self) -> sys::Result<Option<Status>> {
        Ok(wait(self.pid, libc::WNOHANG)?.map(|(_, status)| status))
    }

    /// Sends the child a signal.
    ///
    /// # Errors
    /// `kill`'s.
    pub fn signal(&self, signal: i32) -> sys::Result<()> {
        kill(self.pid, signal)
    }
}

/// Calls `wait4` for `pid`, and retries after an interruption by a signal. Returns the ended
/// process and its status; `None` if no process has ended and `options` exclude waiting.
///
/// # Errors
/// `wait4`'s.
pub fn wait(pid: i32, options: i32) -> sys::Result<Option<(i32, Status)>> {
    let mut status = 0i32;
    loop {
        // SAFETY: the pointer is to a local.
        let found = checked(unsafe { libc::waitpid(pid, &raw mut status, options) });
        match found {
            Err(Errno(libc::EINTR)) => {}
            Err(errno) => return Err(errno),
            Ok(0) => return Ok(None),
            Ok(pid) => return Ok(Some((pid, Status::of(status)))),
        }
    }
}

/// Returns the status of a forked child that runs `body`.
///
/// # Errors
/// The errors of `fork` and `wait4`, as messages.
pub fn outcome(body: impl FnOnce() -> i32) -> Result<Status, String> {
    doing("wait4", doing("fork", fork(body))?.wait())
}

/// Sends a signal.
///
/// # Errors
/// `kill`'s.
pub fn kill(pid: i32, signal: i32) -> sys::Result<()> {
    // SAFETY: a plain call.
    checked(unsafe { libc::kill(pid, signal) }).map(|_| ())
}

/// This process's id.
pub fn pid() -> i32 {
    std::process::id() as i32
}

/// This thread's id.
pub fn tid() -> i32 {
    // SAFETY: a plain call.
    unsafe { libc::gettid() }
}

/// Confines this thread to `cpus`.
///
/// # Errors
/// `sched_setaffinity`'s.
pub fn pin_to(cpus: &[usize]) -> sys::Result<()> {
    // SAFETY: a set of zeros is valid; the pointer is to a local.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        for &cpu in cpus {
            libc::CPU_SET(cpu, &mut set);
        }
        checked(libc::sched_setaffinity(0, size_of_val(&set), &raw const set)).map(|_| ())
    }
}

/// Confines this thread to one CPU.
///
/// # Errors
/// `sched_setaffinity`'s.
pub fn pin(cpu: usize) -> sys::Result<()> {
    pin_to(&[cpu])
}

/// Returns the CPUs allowed for this thread.
///
/// # Errors
/// `sched_getaffinity`'s.
pub fn cpus() -> sys::Result<Vec<usize>> {
    // SAFETY: a set of zeros is valid; the pointer is to a local.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        checked(libc::sched_getaffinity(0, size_of_val(&set), &raw mut set))?;
        set
    };
    // SAFETY: the numbers are within the set.
    Ok((0..libc::CPU_SETSIZE as usize)
        .filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) })
        .collect())
}

/// Returns the CPU that runs this thread.
pub fn current_cpu() -> usize {
    // SAFETY: a plain call.
    unsafe { libc::sched_getcpu() as usize }
}

/// Lets other threads run.
pub fn yield_now() {
    std::thread::yield_now();
}

/// Waits until `condition` holds, and yields the CPU periodically.
pub fn wait_until(mut condition: impl FnMut() -> bool) {
    let mut spins = 0u32;
    while !condition() {
        spins += 1;
        if spins.is_multiple_of(64) {
            yield_now();
        } else {
            std::hint::spin_loop();
        }
    }
}

/// Uses the CPU indefinitely. (Without `pause`, which is slow in emulators.)
pub fn spin_for_ever() -> ! {
    let mut count = 0u64;
    loop {
        count = std::hint::black_box(count.wrapping_add(1));
    }
}

/// Disables huge pages for this process and its children. A kernel without huge pages may refuse
/// the call, with the same effect.
pub fn no_huge_pages() {
    // SAFETY: a plain call.
    let _ = unsafe { call(libc::SYS_prctl, [libc::PR_SET_THP_DISABLE as u64, 1, 0, 0, 0]) };
}

/// Waits while `word` is `value`, for `timeout` at most, among the threads of this process, or
/// among all processes if the word is `shared`.
///
/// # Errors
/// `EAGAIN` if the word is not `value`, `ETIMEDOUT`, `EINTR`.
pub fn futex_wait(
    word: &AtomicU32,
    value: u32,
    timeout: Option<Duration>,
    shared: bool,
) -> sys::Result<()> {
    let timeout = timeout.map(|time| libc::timespec {
        tv_sec: time.as_secs() as i64,
        tv_nsec: i64::from(time.subsec_nanos()),
    });
    let timeout = timeout.as_ref().map_or(0, |time| (&raw const *time) as u64);
    let operation = libc::FUTEX_WAIT | if shared { 0 } else { libc::FUTEX_PRIVATE_FLAG };
    let args = [word.as_ptr() as u64, operation as u64, u64::from(value), timeout];
    // SAFETY: the word is an atomic and the time a local.
    unsafe { call(libc::SYS_futex, args) }.map(|_| ())
}

/// Wakes up to `count` threads waiting for `word`, and returns the number of woken threads.
///
/// # Errors
/// `futex`'s.
pub fn futex_wake(word: &AtomicU32, count: u32, shared: bool) -> sys::Result<u64> {
    let operation = libc::FUTEX_WAKE | if shared { 0 } else { libc::FUTEX_PRIVATE_FLAG };
    // SAFETY: the word is an atomic.
    unsafe { call(libc::SYS_futex, [word.as_ptr() as u64, operation as u64, u64::from(count)]) }
}

/// A barrier at which `count` threads or processes meet repeatedly. Waiters spin: the only system
/// call is a yield.
#[derive(Debug, Default)]
pub struct Meeting {
    arrived: AtomicU32,
    round: AtomicU32,
}

impl Meeting {
    /// Returns a barrier.
    pub const fn new() -> Self {
        Self { arrived: AtomicU32::new(0), round: AtomicU32::new(0) }
    }

    /// Waits until `count` threads have arrived.
    pub fn wait(&self, count: u32) {
        let round = self.round.load(Ordering::Acquire);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == count {
            self.arrived.store(0, Ordering::Relaxed);
            self.round.fetch_add(1, Ordering::Release);
        } else {
            wait_until(|| self.round.load(Ordering::Acquire) != round);
        }
    }
}
