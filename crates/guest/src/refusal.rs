//! Failing the kernel's own allocations, one after the other, like the tests of the subsystem.
//!
//! `/proc/thread-self/fail-nth` makes the Nth allocation of the thread fail; `N+` also makes all
//! later allocations fail. On a kernel without this file, every call is made once, without
//! failures.

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

/// Makes allocations of the running thread fail.
#[derive(Debug)]
pub struct Refusal {
    /// The open file, if it exists.
    fd: Option<i32>,
    nth: Cell<u32>,
    onwards: Cell<bool>,
    failed: Cell<bool>,
}

impl Refusal {
    /// Opens the file of the running thread; no allocation fails yet.
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
        // If the kernel has not enabled the test, the file exists but cannot be written.
        if new.write(0).is_err() {
            new.fd = None;
        }
        new
    }

    /// Opens the file for the thread of a child process, which calls this.
    pub fn inherit(other: &Self) -> Self {
        let new = Self::new();
        new.refuse(other.nth.get(), other.onwards.get());
        new
    }

    /// Returns the exit status that reports the result `ended` of an attempt, and whether an
    /// allocation failed, to the parent.
    pub fn tell(&self, ended: sys::Result<()>) -> i32 {
        let failed = if self.failed.get() { FAILED } else { 0 };
        failed | ended.err().map_or(0, |errno| errno.0)
    }

    /// Decodes a child's [report](Self::tell). The child may also have been killed for lack of a
    /// page.
    ///
    /// # Errors
    /// The child ended in another way.
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

    /// Makes the next allocation number `nth` fail, and with `onwards` all later ones; 0: no
    /// failures.
    pub fn refuse(&self, nth: u32, onwards: bool) {
        self.nth.set(nth);
        self.onwards.set(onwards);
    }

    fn write(&self, nth: u32) -> sys::Result<u64> {
        let Some(fd) = self.fd else { return Ok(0) };
        let mut text = [b' '; 16];
        let mut place = &mut text[..];
        let mark = if self.onwards.get() && nth != 0 { "+" } else { "" };
        // The text fits.
        let _ = write!(place, "{nth}{mark}");
        // SAFETY: the text is read only.
        unsafe { call(libc::SYS_pwrite64, [fd as u64, text.as_ptr() as u64, 16, 0]) }
    }

    /// Runs `body` with failing allocations.
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

    /// Returns the first digit of the number of allocations left at the last setting.
    fn left(&self) -> u8 {
        let mut text = [0u8; 16];
        let fd = self.fd.unwrap_or(-1);
        // SAFETY: the array has space for the text.
        let read = unsafe { call(libc::SYS_pread64, [fd as u64, text.as_mut_ptr() as u64, 16, 0]) };
        if read.is_ok() { text[0] } else { 0 }
    }
}

impl Default for Refusal {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns the allocated bytes of the kernel's heap; 0 if the kernel does not report this number.
fn heap_bytes() -> u64 {
    procfs::vmstat().ok().and_then(|rows| rows.get("heap_bytes").copied()).unwrap_or(0)
}

/// Runs `attempt` with each of its allocations failing, alone and with all later ones. An attempt
/// undoes all its effects. It returns either a broken check or the result of its call, which may be
/// one of the errors `allowed`, only after a failed allocation.
///
/// # Errors
/// The broken check, with the number of the allocation.
pub fn exhaust(
    allowed: &[i32],
    mut attempt: impl FnMut(&Refusal) -> Result<sys::Result<()>, String>,
) -> Verdict {
    let refusal = Refusal::new();
    // Fills the caches that the kernel keeps for later calls.
    for _ in 0..3 {
        refusal.refuse(0, false);
        attempt(&refusal)?.map_err(|errno| format!("without a refusal: {errno}"))?;
    }
    if refusal.fd.is_none() {
        return Ok(());
    }
    // Includes the kernel's memory for the text of this file.
    refusal.left();
    let before = heap_bytes();
    let mut refused = 0;
    for onwards in [false, true] {
        for nth in 1.. {
            ensure!(nth < MANY, "the test never ends");
            let place =
                || format!("refused {nth}{}", if onwards { " and all later requests" } else { "" });
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
    // The subsystem frees memory at the end of a grace period.
    let mut after = heap_bytes();
    for _ in 0..100 {
        if after <= before {
            return Ok(());
        }
        clock::sleep_ms(5);
        attempt(&refusal)?.map_err(|errno| format!("afterwards: {errno}"))?;
        after = heap_bytes();
    }
    Err(format!("{after} bytes of the heap are allocated afterwards, {before} before"))
}
