//! The host's kernel: the operations as system calls of this process, and of its forked children.
//!
//! Words of this process in the file are loaded and stored by instructions. Accesses that may end
//! in a signal, accesses of children, and remote accesses go through `process_vm_readv` and
//! `process_vm_writev`: these fault as the process would, obey the protection of the mapping, and
//! report a signal as `EFAULT`. Children sleep.

use super::{Known, Op, Outcome, PAGE, Place, Shape, Side, Signal, View, bytes_to_write};
use std::fs::File;
use std::io::Error;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

const NOTHING: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

/// The host's side. *Invariant (window):* the bytes of the shape's window from `window` on belong
/// to this value, and are mapped to the file or inaccessible, until it is dropped.
pub struct Host {
    file: File,
    window: *mut u8,
    shape: Shape,
    children: Vec<Child>,
}

/// A child, which is killed when this is dropped.
struct Child(libc::pid_t);

impl Child {
    fn fork() -> Self {
        // SAFETY: the child makes plain calls only, and never returns.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "fork: {}", Error::last_os_error());
        if pid == 0 {
            // SAFETY: plain calls.
            unsafe {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                loop {
                    libc::pause();
                }
            }
        }
        Self(pid)
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: plain calls, on a child without an earlier wait.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, ptr::null_mut(), 0);
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // SAFETY: the window belongs to this value, and no pointer points into it.
        unsafe { libc::munmap(self.window.cast(), self.shape.window_bytes() as usize) };
    }
}

impl Host {
    pub fn new(file: File, shape: Shape) -> Self {
        let len = shape.window_bytes() as usize;
        // SAFETY: a new mapping at a free address.
        let window = unsafe { libc::mmap(ptr::null_mut(), len, libc::PROT_NONE, NOTHING, -1, 0) };
        assert_ne!(window, libc::MAP_FAILED, "mmap: {}", Error::last_os_error());
        Self { file, window: window.cast(), shape, children: Vec::new() }
    }

    fn slot(&self, slot: usize) -> *mut libc::c_void {
        self.window.wrapping_add(slot * self.shape.slot_bytes() as usize).cast()
    }

    fn part(&self, slot: usize, pages: &Range<u64>) -> (*mut libc::c_void, usize) {
        let at = self.slot(slot).wrapping_byte_add((pages.start * PAGE) as usize);
        (at, ((pages.end - pages.start) * PAGE) as usize)
    }

    /// Makes a whole slot inaccessible. The addresses stay in the window: another thread of this
    /// process may be mapping memory.
    fn clear(&self, slot: usize) {
        let (at, len) = (self.slot(slot), self.shape.slot_bytes() as usize);
        // SAFETY: part of the window.
        let mapped =
            unsafe { libc::mmap(at, len, libc::PROT_NONE, NOTHING | libc::MAP_FIXED, -1, 0) };
        assert_eq!(mapped, at, "mmap: {}", Error::last_os_error());
    }

    fn map(&self, slot: usize, view: View) {
        self.clear(slot);
        let (at, len) = self.part(slot, &(0..view.pages));
        let sharing = if view.shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
        let (fd, offset) = (self.file.as_raw_fd(), (view.first * PAGE) as libc::off_t);
        let prot = protection(view.writable);
        // SAFETY: part of the window.
        let mapped = unsafe { libc::mmap(at, len, prot, sharing | libc::MAP_FIXED, fd, offset) };
        assert_eq!(mapped, at, "mmap: {}", Error::last_os_error());
    }

    fn remap(&self, from: usize, to: usize, view: View) {
        self.clear(to);
        let ((old, len), (new, _)) = (self.part(from, &(0..view.pages)), self.part(to, &(0..0)));
        // The remaining range is replaced by `clear`; a hole would be available to other threads.
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
        // SAFETY: both are parts of the window.
        let moved = unsafe { libc::mremap(old, len, len, flags, new) };
        assert_eq!(moved, new, "mremap: {}", Error::last_os_error());
        self.clear(from);
    }

    /// Returns whether an access by an instruction ends without a signal.
    fn is_safe(known: &Known, place: Place, store: bool) -> bool {
        let instruction = place.who == 0 && !place.outside;
        instruction && known.is_in_file(place) && (known.view(place).writable || !store)
    }

    fn word(&self, place: Place) -> *mut u8 {
        self.window.wrapping_add(place.offset_in_window(self.shape) as usize)
    }

    fn load(&self, known: &Known, place: Place) -> Result<u64, Signal> {
        if Self::is_safe(known, place, false) {
            // SAFETY: an aligned word of the window, mapped to a page that the file has (window).
            return Ok(
                unsafe { AtomicU64::from_ptr(self.word(place).cast()) }.load(Ordering::SeqCst)
            );
        }
        let mut value = 0;
        self.transfer(place, &mut value, libc::process_vm_readv).map_err(|()| Signal::Bus)?;
        Ok(value)
    }

    fn store(&self, known: &Known, place: Place, mut value: u64) -> Result<(), Signal> {
        if Self::is_safe(known, place, true) {
            // SAFETY: as in `load`; the mapping is writable.
            unsafe { AtomicU64::from_ptr(self.word(place).cast()) }.store(value, Ordering::SeqCst);
            return Ok(());
        }
        let stored = self.transfer(place, &mut value, libc::process_vm_writev);
        // Linux checks the mapping first, and then the file.
        let signal = if known.view(place).writable { Signal::Bus } else { Signal::Segv };
        stored.map_err(|()| signal)
    }

    /// Moves a word between this process and the process of `place`.
    fn transfer(&self, place: Place, value: &mut u64, call: Call) -> Result<(), ()> {
        // SAFETY: a plain call.
        let own = || unsafe { libc::getpid() };
        let pid = place.who.checked_sub(1).map_or_else(own, |child| self.children[child].0);
        let here = libc::iovec { iov_base: ptr::from_mut(value).cast(), iov_len: 8 };
        let there = libc::iovec { iov_base: self.word(place).cast(), iov_len: 8 };
        // SAFETY: one part each: the borrowed word, and a word of the window, in this process or a
        // copy of it.
        let moved = unsafe { call(pid, &raw const here, 1, &raw const there, 1, 0) };
        let error = Error::last_os_error();
        match moved {
            8 => Ok(()),
            -1 if error.raw_os_error() == Some(libc::EFAULT) => Err(()),
            _ => panic!("{moved} bytes moved, {error}"),
        }
    }

    fn resident(&self, place: Place) -> bool {
        let at = (self.word(place) as usize & !(PAGE as usize - 1)) as *mut libc::c_void;
        let mut vector = [0_u8];
        // SAFETY: a page of the window, and a byte for it.
        let done = unsafe { libc::mincore(at, PAGE as usize, vector.as_mut_ptr()) };
        check("mincore", done);
        vector[0] & 1 != 0
    }
}

type Call = unsafe extern "C" fn(
    libc::pid_t,
    *const libc::iovec,
    libc::c_ulong,
    *const libc::iovec,
    libc::c_ulong,
    libc::c_ulong,
) -> isize;

impl Side for Host {
    fn step(&mut self, known: &Known, op: &Op) -> Outcome {
        let fd = self.file.as_raw_fd();
        match *op {
            Op::Map { slot, view } => self.map(slot, view),
            Op::Unmap { slot } => self.clear(slot),
            Op::Protect { slot, writable } => {
                let view = known.parent[slot].expect("a mapped slot");
                let (at, len) = self.part(slot, &(0..view.pages));
                // SAFETY: part of the window.
                check("mprotect", unsafe { libc::mprotect(at, len, protection(writable)) });
            }
            Op::Move { from, to } => {
                self.remap(from, to, known.parent[from].expect("a mapped slot"));
            }
            Op::Load(place) => return Outcome::Loaded(self.load(known, place)),
            Op::Store(place, value) => return Outcome::Stored(self.store(known, place, value)),
            Op::Resident(place) => {
                return Outcome::Resident(self.load(known, place), self.resident(place));
            }
            Op::Read { offset, len } => {
                let mut bytes = vec![0; len as usize];
                let done = self.file.read_at(&mut bytes, offset).expect("pread");
                bytes.truncate(done);
                return Outcome::Read(bytes);
            }
            Op::Write { offset, len, seed } => {
                self.file.write_all_at(&bytes_to_write(len, seed), offset).expect("pwrite");
            }
            Op::SetLen(len) => self.file.set_len(len).expect("ftruncate"),
            Op::Punch(ref pages) => {
                let (at, len) = (pages.start * PAGE, (pages.end - pages.start) * PAGE);
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                // SAFETY: a plain call.
                let done = unsafe { libc::fallocate(fd, mode, at as i64, len as i64) };
                check("fallocate", done);
            }
            Op::Msync { slot, ref pages } => {
                let (at, len) = self.part(slot, pages);
                // SAFETY: part of the window.
                check("msync", unsafe { libc::msync(at, len, libc::MS_SYNC) });
            }
            Op::Fsync => self.file.sync_all().expect("fsync"),
            Op::Discard { slot, ref pages } => {
                let (at, len) = self.part(slot, pages);
                // SAFETY: part of the window.
                check("madvise", unsafe { libc::madvise(at, len, libc::MADV_DONTNEED) });
            }
            Op::Collapse { slot } => {
                let view = known.parent[slot].expect("a mapped slot");
                let (at, len) = self.part(slot, &(0..view.pages));
                // SAFETY: part of the window. The file system may refuse the advice.
                unsafe { libc::madvise(at, len, libc::MADV_COLLAPSE) };
            }
            Op::Forget(ref pages) => {
                let (at, len) = (pages.start * PAGE, (pages.end - pages.start) * PAGE);
                let advice = libc::POSIX_FADV_DONTNEED;
                // SAFETY: a plain call.
                let done = unsafe { libc::posix_fadvise(fd, at as i64, len as i64, advice) };
                check("posix_fadvise", done);
            }
            Op::Fork => self.children.push(Child::fork()),
            Op::Exit { child } => drop(self.children.remove(child)),
        }
        Outcome::Done
    }

    fn stored(&self) -> Vec<u8> {
        bytes_of(&self.file)
    }
}

/// All bytes of a file.
pub fn bytes_of(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().expect("fstat").len() as usize];
    file.read_exact_at(&mut bytes, 0).expect("pread");
    bytes
}

fn protection(writable: bool) -> i32 {
    libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 }
}

fn check(call: &str, result: i32) {
    assert_eq!(result, 0, "{call}: {}", Error::last_os_error());
}
