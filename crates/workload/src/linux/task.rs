//! One thread's calls and accesses, made directly to the kernel and the processor.

use super::shared::ChildFailure;
use crate::file::RUNS;
use crate::host::{Usage, now, rest, thread_usage};
use crate::start::Start;
use crate::system::{Child, Failure, Task};
use faultless::{Advice, MapFlags, Prot};
use std::fmt;
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};

/// A thread on Linux.
///
/// Only [`Linux`](super::Linux) creates tasks, for a [`Program`](crate::Program), in a process that
/// belongs to this program.
pub struct LinuxTask<'a> {
    start: &'a Start,
    /// The files of the run.
    files: &'a [File],
    /// The place for the failure of a forked child.
    failure: &'a dyn ChildFailure,
    /// The usage of forked children.
    children: Usage,
    /// The usage off the clock, and its seconds.
    aside: Usage,
    aside_wall: f64,
}

impl fmt::Debug for LinuxTask<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LinuxTask").field("children", &self.children).finish_non_exhaustive()
    }
}

impl<'a> LinuxTask<'a> {
    pub(super) fn new(start: &'a Start, files: &'a [File], failure: &'a dyn ChildFailure) -> Self {
        let none = Usage::default();
        Self { start, files, failure, children: none, aside: none, aside_wall: 0.0 }
    }

    /// Returns the usage of this thread since `before` on the clock, including its forked children.
    pub(super) fn used_since(&self, before: Usage) -> Usage {
        let mut usage = thread_usage().since(before).since(self.aside);
        usage += self.children;
        usage
    }

    /// Returns the seconds off the clock.
    pub(super) fn aside_wall(&self) -> f64 {
        self.aside_wall
    }
}

/// Returns the failure of `call`, which has just set `errno`.
pub(super) fn refused(call: &'static str, addr: u64, len: u64) -> Failure {
    let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
    Failure::Refused { call, addr, len, errno }
}

/// Returns `Ok`, or for a `result` of -1 the failure of `call`.
fn checked(result: i32, call: &'static str, addr: u64, len: u64) -> Result<(), Failure> {
    if result == -1 { Err(refused(call, addr, len)) } else { Ok(()) }
}

/// Waits for the child `pid`. Returns the status and the usage of the child.
pub(super) fn wait(pid: libc::pid_t) -> Result<(i32, Usage), Failure> {
    let mut status = 0;
    // SAFETY: an `rusage` of zeros is valid.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    loop {
        // SAFETY: both pointers are to locals.
        let found = unsafe { libc::wait4(pid, &raw mut status, 0, &raw mut usage) };
        if found == pid {
            return Ok((status, usage.into()));
        }
        let failure = refused("wait4", 0, 0);
        if !matches!(failure, Failure::Refused { errno: libc::EINTR, .. }) {
            return Err(failure);
        }
    }
}

/// Returns the status of the child `pid` if the child has ended. With `block`, waits for its end.
pub(super) fn try_wait(pid: libc::pid_t, block: bool) -> Option<i32> {
    if block {
        return wait(pid).ok().map(|(status, _)| status);
    }
    let mut status = 0;
    // SAFETY: the pointer is to a local.
    let found = unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) };
    (found == pid).then_some(status)
}

fn pointer(addr: u64) -> *mut libc::c_void {
    with_exposed_provenance_mut(addr as usize)
}

/// Calls `mmap` of `fd`, or without a file if `fd` is -1.
#[inline]
fn map(
    (at, len): (Option<u64>, u64),
    prot: Prot,
    flags: MapFlags,
    fd: RawFd,
    offset: u64,
) -> Result<u64, Failure> {
    let (prot, flags) = (prot.bits() as i32, flags.bits() as i32);
    let (addr, offset) = (at.unwrap_or(0), offset as libc::off_t);
    // SAFETY: a `Program` maps only over its own memory.
    let start = unsafe { libc::mmap(pointer(addr), len as usize, prot, flags, fd, offset) };
    if start == libc::MAP_FAILED {
        return Err(refused("mmap", addr, len));
    }
    Ok(start.expose_provenance() as u64)
}

impl Task for LinuxTask<'_> {
    #[inline]
    fn mmap(
        &mut self,
        at: impl Into<Option<u64>>,
        len: u64,
        prot: Prot,
        flags: MapFlags,
    ) -> Result<u64, Failure> {
        map((at.into(), len), prot, flags, -1, 0)
    }

    #[inline]
    fn mmap_file(
        &mut self,
        file: usize,
        place: (Option<u64>, u64),
        prot: Prot,
        flags: MapFlags,
        offset: u64,
    ) -> Result<u64, Failure> {
        map(place, prot, flags, self.files[file].as_raw_fd(), offset)
    }

    #[inline]
    fn munmap(&mut self, addr: u64, len: u64) -> Result<(), Failure> {
        // SAFETY: a `Program` unmaps only its own memory.
        checked(unsafe { libc::munmap(pointer(addr), len as usize) }, "munmap", addr, len)
    }

    #[inline]
    fn mprotect(&mut self, addr: u64, len: u64, prot: Prot) -> Result<(), Failure> {
        // SAFETY: a `Program` changes only its own memory.
        let result = unsafe { libc::mprotect(pointer(addr), len as usize, prot.bits() as i32) };
        checked(result, "mprotect", addr, len)
    }

    #[inline]
    fn madvise(&mut self, addr: u64, len: u64, advice: Advice) -> Result<(), Failure> {
        // SAFETY: as for `mprotect`.
        let result = unsafe { libc::madvise(pointer(addr), len as usize, advice as i32) };
        checked(result, "madvise", addr, len)
    }

    fn mremap(&mut self, addr: u64, len: u64, new_len: u64) -> Result<u64, Failure> {
        let flags = libc::MREMAP_MAYMOVE;
        // SAFETY: as for `mprotect`. The kernel moves the mapping to an unused address.
        let start = unsafe { libc::mremap(pointer(addr), len as usize, new_len as usize, flags) };
        if start == libc::MAP_FAILED {
            return Err(refused("mremap", addr, len));
        }
        Ok(start.expose_provenance() as u64)
    }

    #[inline]
    fn brk(&mut self, addr: u64) -> u64 {
        // Uses the kernel's call, because the C library records the break for its heap. The C
        // library requires an unchanged break, which a `Program` restores.
        // SAFETY: only the program uses the memory between the breaks.
        let end: libc::c_long = unsafe { libc::syscall(libc::SYS_brk, addr) };
        end as u64
    }

    #[inline]
    fn load(&mut self, addr: u64) -> Result<u64, Failure> {
        let word = with_exposed_provenance::<u64>(addr as usize);
        // SAFETY: the word belongs to the program, and no other worker stores to the word now.
        Ok(unsafe { word.read_volatile() })
    }

    #[inline]
    fn store(&mut self, addr: u64, value: u64) -> Result<(), Failure> {
        let word = with_exposed_provenance_mut::<u64>(addr as usize);
        // SAFETY: the word belongs to the program, and no other worker accesses the word now.
        unsafe { word.write_volatile(value) };
        Ok(())
    }

    #[inline]
    fn copy(&mut self, to: u64, from: u64, len: u64) -> Result<(), Failure> {
        let (to, from) = (
            with_exposed_provenance_mut::<u8>(to as usize),
            with_exposed_provenance::<u8>(from as usize),
        );
        // SAFETY: both ranges belong to the program and do not overlap. No other worker stores to
        // the source or accesses the destination now.
        unsafe { to.copy_from_nonoverlapping(from, len as usize) };
        Ok(())
    }

    #[inline]
    fn call(&mut self, addr: u64) -> Result<(), Failure> {
        if !RUNS {
            let reason = "code exists only for x86-64";
            return Err(Failure::Access { access: "call", addr, reason });
        }
        let function = with_exposed_provenance::<()>(addr as usize);
        // SAFETY: a `Program` calls only functions of its files of code, which have no parameters,
        // and return at once.
        unsafe { std::mem::transmute::<*const (), extern "C" fn()>(function)() };
        Ok(())
    }

    fn fork<C: Child>(&mut self, child: C) -> Result<(), Failure> {
        // SAFETY: the child runs only `child`, which does not allocate, and never returns from
        // here.
        let pid = match unsafe { libc::fork() } {
            -1 => return Err(refused("fork", 0, 0)),
            0 => {
                let status = match catch_unwind(AssertUnwindSafe(|| child.run(self))) {
                    Ok(Ok(())) => 0,
                    Ok(Err(failure)) => {
                        self.failure.leave(failure);
                        1
                    }
                    Err(_) => super::PANICKED,
                };
                // SAFETY: ends the process.
                unsafe { libc::_exit(status) }
            }
            pid => pid,
        };
        let (status, usage) = wait(pid)?;
        self.children += usage;
        if libc::WIFSIGNALED(status) {
            return Err(Failure::Killed { signal: libc::WTERMSIG(status) });
        }
        match libc::WEXITSTATUS(status) {
            0 => Ok(()),
            // SAFETY: the child has ended, and this worker stores a result only after its work.
            _ => Err(unsafe { self.failure.find() }.unwrap_or(Failure::Lost { worker: 0 })),
        }
    }

    fn aside<R>(&mut self, what: impl FnOnce(&mut Self) -> R) -> R {
        let (begin, before) = (now(), thread_usage());
        let result = what(self);
        self.aside += thread_usage().since(before);
        self.aside_wall += now() - begin;
        result
    }

    fn rest(&mut self, looks: u32) {
        rest(looks);
    }

    #[inline]
    fn expired(&self) -> bool {
        self.start.expired()
    }
}
