//! The host's kernel: a case runs in separate processes, forked from this process.
//!
//! ```text
//! this process ── fork ── process 0 ── fork (Op::Fork) ── process 1 …
//! ```
//!
//! Every process knows all steps, and thus the turn of each process. The process with the turn
//! writes its observations to [shared memory](log::Log), and passes the turn on. Huge pages are
//! off, as are execute-only mappings by protection keys, which not every x86-64 processor supports.

mod access;
mod log;
mod maps;

use crate::op::{FETCH, OBJECT_PAGES, OBJECTS, Op, PAGE, READ_ONLY, Roster, SEEN_PAGES, Window};
use crate::seen::{ELSEWHERE, Outcome, Seen, digest, near};
use log::Log;
use std::ffi::CString;

/// The beginning of an object's path in listings; its number follows.
const OBJECT_PATH: &str = "/memfd:oracle";

/// An error unrelated to the case.
#[derive(Debug, thiserror::Error)]
pub enum LinuxError {
    /// The kernel refused a call needed by every case.
    #[error("{call}: {error}")]
    Refused {
        /// Which.
        call: &'static str,
        /// Why.
        error: std::io::Error,
    },
    /// A process ended early.
    #[error("the processes of the case ended with status {status:#x} after {steps} steps")]
    Died {
        /// The status reported by `waitpid`.
        status: i32,
        /// The number of observed steps.
        steps: usize,
    },
}

impl LinuxError {
    fn last(call: &'static str) -> Self {
        Self::Refused { call, error: std::io::Error::last_os_error() }
    }
}

/// The host's kernel as a side of the comparison.
#[derive(Debug)]
pub struct Linux {
    log: Log,
}

impl Linux {
    /// Prepares for cases, one after the other.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new() -> Result<Self, LinuxError> {
        Ok(Self { log: Log::new()? })
    }

    /// Returns the observations of each of `steps`, which concern `window`.
    ///
    /// # Errors
    /// [`LinuxError`]; never because of the steps.
    pub fn run(&mut self, steps: &[Op], window: Window) -> Result<Vec<Seen>, LinuxError> {
        self.log.clear();
        // SAFETY: the child never returns. This process may have threads; the C library ensures
        // that the child can allocate, and the child takes no other lock.
        let status = match unsafe { libc::fork() } {
            -1 => return Err(LinuxError::last("fork")),
            0 => {
                let ran = Subject::new(&self.log, window).map(|mut subject| subject.run(steps));
                // SAFETY: ends the process.
                unsafe { libc::_exit(ran.map_or(1, |()| 0)) }
            }
            child => wait(child).ok_or(LinuxError::last("waitpid"))?,
        };
        let mut words = self.log.read();
        let seen: Vec<_> = std::iter::from_fn(|| Seen::read(&mut words)).collect();
        if status != 0 || seen.len() != steps.len() {
            return Err(LinuxError::Died { status, steps: seen.len() });
        }
        Ok(seen)
    }
}

/// Waits for `process`, or for any child (-1). Returns its status.
fn wait(process: i32) -> Option<i32> {
    let mut status = 0;
    loop {
        // SAFETY: a plain call.
        if unsafe { libc::waitpid(process, &raw mut status, 0) } >= 0 {
            return Some(status);
        }
        if std::io::Error::last_os_error().kind() != std::io::ErrorKind::Interrupted {
            return None;
        }
    }
}

/// A file in memory.
struct Object {
    /// Opened for reading and writing.
    file: i32,
    /// The descriptor for mappings.
    mapped: i32,
}

/// A process of a case.
struct Subject<'a> {
    log: &'a Log,
    window: Window,
    me: usize,
    objects: Vec<Object>,
    buffer: Vec<u8>,
}

impl<'a> Subject<'a> {
    /// Makes this process, just forked, the first of a case.
    fn new(log: &'a Log, window: Window) -> Result<Self, LinuxError> {
        // SAFETY: plain calls.
        unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1);
            libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0);
            // Without a free key, the kernel maps execute-only memory as without keys.
            while libc::syscall(libc::SYS_pkey_alloc, 0, 0) >= 0 {}
        }
        access::install();
        let objects = (0..OBJECTS).map(object).collect::<Result<_, _>>()?;
        Ok(Self { log, window, me: 0, objects, buffer: Vec::with_capacity(64 << 10) })
    }

    fn run(&mut self, steps: &[Op]) {
        let mut roster = Roster::default();
        for (at, op) in steps.iter().enumerate() {
            let doer = roster.doer(op);
            if doer != self.me {
                roster.after(op);
                continue;
            }
            if !self.log.wait_for(at) {
                break;
            }
            let outcome = self.step(op, &roster);
            let ends = roster.ended_by(op).is_some();
            if let Some(made) = roster.made_by(op) {
                // SAFETY: the child continues with the loop, as the new process.
                if unsafe { libc::fork() } == 0 {
                    self.me = made;
                    roster.after(op);
                    continue;
                }
            }
            let areas = maps::areas(&mut self.buffer, self.window).unwrap_or_default();
            Seen { outcome, areas }.write(|word| self.log.put(word));
            roster.after(op);
            let next = steps.get(at + 1).map(|op| roster.doer(op));
            self.log.pass_to(at + 1, next != Some(self.me));
            if ends {
                // SAFETY: ends the process.
                unsafe { libc::_exit(0) }
            }
        }
        // This includes orphans, left to the first process by parents that ended earlier.
        while wait(-1).is_some() {}
        if self.me != 0 {
            // SAFETY: ends the process.
            unsafe { libc::_exit(0) }
        }
    }

    fn step(&mut self, op: &Op, roster: &Roster) -> Outcome {
        match *op {
            Op::Map { addr, len, prot, flags, object } => {
                let (file, offset) = match object {
                    Some((number, first)) => {
                        (self.objects[number].mapped, first.wrapping_mul(PAGE))
                    }
                    None => (-1, 0),
                };
                let args = [addr, len, prot, flags, file as u64, offset];
                self.placed(call(libc::SYS_mmap, args), len)
            }
            Op::Unmap { addr, len } => outcome(call(libc::SYS_munmap, [addr, len])),
            Op::Protect { addr, len, prot } => outcome(call(libc::SYS_mprotect, [addr, len, prot])),
            Op::Remap { addr, len, new_len, flags, target } => {
                let args = [addr, len, new_len, flags, target];
                self.placed(call(libc::SYS_mremap, args), new_len)
            }
            Op::Advise { addr, len, advice } => {
                outcome(call(libc::SYS_madvise, [addr, len, advice]))
            }
            Op::Resident { addr, len } => {
                // Longer ranges are refused because of their addresses.
                let mut vector = vec![u8::MAX; (len.div_ceil(PAGE)).min(4096) as usize];
                let errno = resident(addr, len, &mut vector);
                Outcome::Resident(errno, vector)
            }
            Op::Census => {
                let mut vector = vec![u8::MAX; SEEN_PAGES as usize];
                for (slot, number) in vector.iter_mut().zip(0..) {
                    resident(self.window.page(number), PAGE, std::slice::from_mut(slot));
                }
                Outcome::Resident(0, vector)
            }
            Op::Load { addr } => accessed(access::load(addr)),
            // SAFETY: operations access only the window, which contains no memory of this program.
            Op::Store { addr, value } => accessed(unsafe { access::store(addr, value) }.map(|_| 0)),
            // SAFETY: operations fetch only at addresses that are never stored to.
            Op::Fetch { addr } => accessed(unsafe { access::fetch(addr) }),
            Op::Look => {
                let look = |number| look(self.window.page(number));
                Outcome::Pages((0..SEEN_PAGES).map(look).collect())
            }
            Op::Touch => {
                let at = |number| self.window.page(number) + FETCH;
                let touch = |number| access::touch(at(number)).map(|_| 0);
                Outcome::Pages((0..SEEN_PAGES).map(touch).collect())
            }
            Op::Write { object, offset, value } => {
                let bytes = value.to_le_bytes();
                let file = self.objects[object].file as u64;
                let written = call(libc::SYS_pwrite64, [file, bytes.as_ptr() as u64, 8, offset]);
                // Objects are whole pages long.
                if let Ok(length) = call(libc::SYS_lseek, [file, 0, libc::SEEK_END as u64])
                    && length % PAGE != 0
                {
                    let _ = call(libc::SYS_ftruncate, [file, length.next_multiple_of(PAGE)]);
                }
                outcome(written)
            }
            Op::Truncate { object, pages } => {
                let file = self.objects[object].file as u64;
                outcome(call(libc::SYS_ftruncate, [file, pages.wrapping_mul(PAGE)]))
            }
            Op::Fork => Outcome::Done(roster.made_by(op).unwrap_or(0) as u64),
            Op::Switch { .. } | Op::Exit { .. } => Outcome::Done(0),
        }
    }

    /// Returns the outcome of a call that chooses an address; a mapping elsewhere is unmapped
    /// again.
    fn placed(&self, result: Result<u64, i32>, len: u64) -> Outcome {
        outcome(result.map(|addr| {
            let chosen = near(addr, self.window);
            if chosen == ELSEWHERE {
                let _ = call(libc::SYS_munmap, [addr, len]);
            }
            chosen
        }))
    }
}

fn object(number: usize) -> Result<Object, LinuxError> {
    let name = CString::new(format!("oracle{number}")).unwrap_or_default();
    // SAFETY: plain calls; the names are strings.
    unsafe {
        let file = libc::memfd_create(name.as_ptr(), 0);
        if file < 0 || libc::ftruncate(file, (OBJECT_PAGES * PAGE) as i64) != 0 {
            return Err(LinuxError::last("memfd_create"));
        }
        let mut mapped = file;
        if number == READ_ONLY {
            let path = CString::new(format!("/proc/self/fd/{file}")).unwrap_or_default();
            mapped = libc::open(path.as_ptr(), libc::O_RDONLY);
        }
        if mapped < 0 { Err(LinuxError::last("open")) } else { Ok(Object { file, mapped }) }
    }
}

/// Makes a system call directly, and returns the kernel's result.
fn call<const N: usize>(number: i64, args: [u64; N]) -> Result<u64, i32> {
    let mut all = [0; 6];
    all[..N].copy_from_slice(&args);
    let [a, b, c, d, e, f] = all;
    // SAFETY: cases name only memory near the window, outside of this program's memory, or
    // addresses that the kernel refuses.
    let value = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    if value == -1 {
        return Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(0));
    }
    Ok(value as u64)
}

/// Calls `mincore`. Returns the error, or 0.
fn resident(addr: u64, len: u64, vector: &mut [u8]) -> i32 {
    call(libc::SYS_mincore, [addr, len, vector.as_mut_ptr() as u64]).err().unwrap_or(0)
}

fn outcome(result: Result<u64, i32>) -> Outcome {
    result.map_or_else(Outcome::Refused, Outcome::Done)
}

fn accessed(result: Result<u64, crate::seen::Signal>) -> Outcome {
    result.map_or_else(Outcome::Signal, Outcome::Done)
}

/// A digest of a page.
fn look(addr: u64) -> Result<u64, crate::seen::Signal> {
    access::load(addr)?;
    let words = addr as *const u64;
    // SAFETY: the page can be loaded from, and no other process runs.
    Ok(digest((0..PAGE as usize / 8).map(|at| unsafe { words.add(at).read_volatile() })))
}
