//! Refusing the kernel's own allocations, one after the other, as the tests of the subsystem do.
//!
//! `/proc/thread-self/fail-nth` has the Nth allocation of the thread fail; `N+` that and all that follow. A kernel that
//! has no such file makes every call as it is, once.

use crate::check::Verdict;
use crate::proc::Status;
use crate::sys::{self, Errno, call};
use crate::{clock, ensure, procfs};
use std::cell::Cell;
use std::io::Write;

/// More allocations than any attempt here makes.
const MANY: u32 = 2000;

/// A bit of an exit status, above all error numbers here.
const FAILED: i32 = 128;

/// What refuses the running thread memory.
#[derive(Debug)]
pub struct Refusal {
    /// The open file, if there is one.
    fd: Option<i32>,
    nth: Cell<u32>,
    onwards: Cell<bool>,
    failed: Cell<bool>,
}

impl Refusal {
    /// That of the running thread; it refuses nothing yet.
    pub fn new() -> Self {
        let path = c"/proc/thread-self/fail-nth";
        // SAFETY: the path is read only.
        let fd = unsafe { libc::open(path.as_ptr(), libc::O_RDWR) };
        let mut new = Self {
            fd: (fd >= 0).then_some(fd),
            nth: Cell::new(0),
            onwards: Cell::new(false),
            failed: Cell::new(false),
        };
        // Where it is not wanted it is there, but cannot be written.
        if new.write(0).is_err() {
            new.fd = None;
        }
        new
    }

    /// The same for the thread of a child process, which runs this.
    pub fn inherit(other: &Self) -> Self {
        let new = Self::new();
        new.refuse(other.nth.get(), other.onwards.get());
        new
    }

    /// The exit status that tells the parent how an attempt `ended`, and whether something was refused.
    pub fn tell(&self, ended: sys::Result<()>) -> i32 {
        let failed = if self.failed.get() { FAILED } else { 0 };
        failed | ended.err().map_or(0, |errno| errno.0)
    }

    /// What a child [told](Self::tell). For want of a page it may have been killed, too.
    ///
    /// # Errors
    /// It ended otherwise.
    pub fn told(&self, status: Status) -> Result<sys::Result<()>, String> {
        let code = match status {
            Status::Exited(code) => code,
            Status::Killed(libc::SIGKILL) if self.nth.get() != 0 => FAILED | libc::ENOMEM,
            status => return Err(format!("the child: {status:?}")),
        };
        self.failed.set(code & FAILED != 0);
        match code & !FAILED {
            0 => Ok(Ok(())),
            number => Ok(Err(Errno(number))),
        }
    }

    /// Has allocation `nth` to come fail, and with `onwards` all after it; 0: none.
    pub fn refuse(&self, nth: u32, onwards: bool) {
        self.nth.set(nth);
        self.onwards.set(onwards);
    }

    fn write(&self, nth: u32) -> sys::Result<u64> {
        let Some(fd) = self.fd else { return Ok(0) };
        let mut text = [b' '; 16];
        let mut place = &mut text[..];
        let mark = if self.onwards.get() && nth != 0 { "+" } else { "" };
        // It fits.
        let _ = write!(place, "{nth}{mark}");
        // SAFETY: the text is read only.
        unsafe { call(libc::SYS_pwrite64, [fd as u64, text.as_ptr() as u64, 16, 0]) }
    }

    /// Runs `body`, which is refused memory.
    pub fn during<T>(&self, body: impl FnOnce() -> T) -> T {
        if self.nth.get() == 0 {
            return body();
        }
        let _ = self.write(self.nth.get());
        let result = body();
        let _ = self.write(0);
        self.failed.set(self.failed.get() | (self.left() == b'0'));
        result
    }

    /// The first digit of how many allocations were left when that was last set.
    fn left(&self) -> u8 {
        let mut text = [0u8; 16];
        let fd = self.fd.unwrap_or(-1);
        // SAFETY: the array has room for it.
        let read = unsafe { call(libc::SYS_pread64, [fd as u64, text.as_mut_ptr() as u64, 16, 0]) };
        if read.is_ok() { text[0] } else { 0 }
    }
}

impl Default for Refusal {
    fn default() -> Self {
        Self::new()
    }
}

/// Bytes of the kernel's heap that are allocated; 0 where it does not say so.
fn heap_bytes() -> u64 {
    procfs::vmstat().ok().and_then(|rows| rows.get("heap_bytes").copied()).unwrap_or(0)
}

/// Makes `attempt` with each of its allocations refused, alone and with all that follow it. An attempt takes
/// everything back that it made, and says what is broken, or how its call ended: it may fail with the errors
/// `allowed`, and only when it was refused something.
///
/// # Errors
/// What is wrong, and at which allocation.
pub fn exhaust(
    allowed: &[i32],
    mut attempt: impl FnMut(&Refusal) -> Result<sys::Result<()>, String>,
) -> Verdict {
    let refusal = Refusal::new();
    // What is kept for the next time is there by then.
    for _ in 0..3 {
        refusal.refuse(0, false);
        attempt(&refusal)?.map_err(|errno| format!("without being refused anything: {errno}"))?;
    }
    if refusal.fd.is_none() {
        return Ok(());
    }
    // What the file holds of its text, too.
    refusal.left();
    let before = heap_bytes();
    let mut refused = 0;
    for onwards in [false, true] {
        for nth in 1.. {
            ensure!(nth < MANY, "it never ends");
            let place =
                || format!("refused {nth}{}", if onwards { " and all after it" } else { "" });
            refusal.refuse(nth, onwards);
            refusal.failed.set(false);
            let ended = attempt(&refusal).map_err(|why| format!("{}: {why}", place()))?;
            let failed = refusal.failed.get();
            refused += u32::from(failed);
            match ended {
                Ok(()) if failed => {}
                Ok(()) => break,
                Err(Errno(number)) if failed && allowed.contains(&number) => {}
                Err(errno) => return Err(format!("{}: {errno}", place())),
            }
        }
    }
    refusal.refuse(0, false);
    println!("# refused {refused} times");
    // What the subsystem frees it frees when a grace period has ended.
    let mut after = heap_bytes();
    for _ in 0..100 {
        if after <= before {
            return Ok(());
        }
        clock::sleep_ms(5);
        attempt(&refusal)?.map_err(|errno| format!("afterwards: {errno}"))?;
        after = heap_bytes();
    }
    Err(format!("{after} bytes of the heap are allocated after it, {before} were before"))
}
