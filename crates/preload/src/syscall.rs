//! System calls without the C library: `errno` stays, and no symbol is needed.

use core::arch::asm;
use core::ffi::{CStr, c_int, c_uint, c_void};
use core::ptr;
use core::sync::atomic::AtomicU32;

/// The numbers of the calls.
#[cfg(target_arch = "x86_64")]
pub(crate) mod number {
    pub const READ: usize = 0;
    pub const WRITE: usize = 1;
    pub const CLOSE: usize = 3;
    pub const FSTAT: usize = 5;
    pub const LSEEK: usize = 8;
    pub const MMAP: usize = 9;
    pub const MPROTECT: usize = 10;
    pub const MUNMAP: usize = 11;
    pub const SIGPROCMASK: usize = 14;
    pub const PREAD: usize = 17;
    pub const MREMAP: usize = 25;
    pub const MADVISE: usize = 28;
    pub const MINCORE: usize = 27;
    pub const FSTATFS: usize = 138;
    pub const FUTEX: usize = 202;
    pub const GETPID: usize = 39;
    pub const KILL: usize = 62;
    pub const SIGTIMEDWAIT: usize = 128;
    pub const PRCTL: usize = 157;
    pub const EXIT_GROUP: usize = 231;
    pub const OPENAT: usize = 257;
    pub const PPOLL: usize = 271;
    pub const PROCESS_VM_READV: usize = 310;
    pub const PROCESS_MADVISE: usize = 440;
}
/// The numbers of the calls.
#[cfg(target_arch = "aarch64")]
pub(crate) mod number {
    pub const OPENAT: usize = 56;
    pub const CLOSE: usize = 57;
    pub const LSEEK: usize = 62;
    pub const READ: usize = 63;
    pub const WRITE: usize = 64;
    pub const PREAD: usize = 67;
    pub const PPOLL: usize = 73;
    pub const FSTAT: usize = 80;
    pub const SIGPROCMASK: usize = 135;
    pub const SIGTIMEDWAIT: usize = 137;
    pub const PRCTL: usize = 167;
    pub const MUNMAP: usize = 215;
    pub const MREMAP: usize = 216;
    pub const MMAP: usize = 222;
    pub const MPROTECT: usize = 226;
    pub const MADVISE: usize = 233;
    pub const MINCORE: usize = 232;
    pub const FSTATFS: usize = 44;
    pub const FUTEX: usize = 98;
    pub const GETPID: usize = 172;
    pub const KILL: usize = 129;
    pub const EXIT_GROUP: usize = 94;
    pub const PROCESS_VM_READV: usize = 270;
    pub const PROCESS_MADVISE: usize = 440;
}

/// The first result that is an error: `-4095` as an unsigned number.
const FIRST_ERROR: usize = -4095_isize as usize;
const SIGABRT: usize = 6;

/// Makes the system call `number`. Returns the result, or the negative error code.
///
/// # Safety
/// The contract of the call.
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn call(number: usize, arguments: [usize; 6]) -> usize {
    let [a, b, c, d, e, f] = arguments;
    let result;
    // SAFETY: the caller answers for the call. The kernel changes the named registers alone.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    result
}

/// Makes the system call `number`. Returns the result, or the negative error code.
///
/// # Safety
/// The contract of the call.
#[cfg(target_arch = "aarch64")]
#[inline]
unsafe fn call(number: usize, arguments: [usize; 6]) -> usize {
    let [a, b, c, d, e, f] = arguments;
    let result;
    // SAFETY: the caller answers for the call. The kernel changes the named registers alone.
    unsafe {
        asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") a => result,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x5") f,
            options(nostack),
        );
    }
    result
}

/// Returns the result of a call as a value, or the error code.
#[inline]
fn checked(result: usize) -> Result<usize, c_int> {
    if result >= FIRST_ERROR { Err(-(result as isize) as c_int) } else { Ok(result) }
}

/// Maps memory or a file.
///
/// # Errors
/// The error code of the kernel.
///
/// # Safety
/// The contract of the system call: with `MAP_FIXED`, the caller owns the range.
pub unsafe fn mmap(
    at: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    file: c_int,
    offset: i64,
) -> Result<*mut c_void, c_int> {
    let arguments =
        [at as usize, len, prot as usize, flags as usize, file as usize, offset as usize];
    // SAFETY: the caller's contract.
    checked(unsafe { call(number::MMAP, arguments) }).map(|address| address as *mut c_void)
}

/// Gives advice on pages.
///
/// # Errors
/// The error code of the kernel.
///
/// # Safety
/// The advice must not discard memory in use.
pub unsafe fn madvise(start: usize, len: usize, advice: c_int) -> Result<(), c_int> {
    // SAFETY: the caller's contract.
    checked(unsafe { call(number::MADVISE, [start, len, advice as usize, 0, 0, 0]) }).map(drop)
}

/// Gives advice on `count` ranges of a process. Returns the number of advised bytes.
///
/// # Errors
/// The error code of the kernel.
///
/// # Safety
/// The advice must not discard memory in use.
pub unsafe fn process_madvise(
    process: c_int,
    ranges: *const c_void,
    count: usize,
    advice: c_int,
    flags: c_uint,
) -> Result<usize, c_int> {
    let arguments = [process as usize, ranges as usize, count, advice as usize, flags as usize, 0];
    // SAFETY: the caller's contract.
    checked(unsafe { call(number::PROCESS_MADVISE, arguments) })
}

/// Writes into `states` for each page of `len` bytes from `start` whether the page is resident, in
/// bit 0.
///
/// # Errors
/// The error code of the kernel; a part of the range is not mapped.
///
/// # Safety
/// `states` has a byte for each page.
pub unsafe fn mincore(start: usize, len: usize, states: &mut [u8]) -> Result<(), c_int> {
    // SAFETY: the kernel writes one byte for each page.
    checked(unsafe { call(number::MINCORE, [start, len, states.as_mut_ptr() as usize, 0, 0, 0]) })
        .map(drop)
}

/// Changes the permissions of pages.
///
/// # Errors
/// The error code of the kernel.
///
/// # Safety
/// The caller owns the pages.
pub unsafe fn mprotect(start: usize, len: usize, prot: c_int) -> Result<(), c_int> {
    // SAFETY: the caller's contract.
    checked(unsafe { call(number::MPROTECT, [start, len, prot as usize, 0, 0, 0]) }).map(drop)
}

/// Unmaps pages.
///
/// # Errors
/// The error code of the kernel.
///
/// # Safety
/// The caller owns the pages.
pub unsafe fn munmap(start: usize, len: usize) -> Result<(), c_int> {
    // SAFETY: the caller's contract.
    checked(unsafe { call(number::MUNMAP, [start, len, 0, 0, 0, 0]) }).map(drop)
}

/// Moves pages to the address `to`, in place of the pages there. Another thread sees the pages
/// before or after the move.
///
/// # Errors
/// The error code of the kernel.
///
/// # Safety
/// The caller owns the pages, and no code depends on the contents at `to` before the move.
pub unsafe fn replace(from: usize, len: usize, to: usize) -> Result<(), c_int> {
    /// `MREMAP_MAYMOVE` and `MREMAP_FIXED`.
    const FIXED: usize = 1 | 2;
    // SAFETY: the caller's contract.
    checked(unsafe { call(number::MREMAP, [from, len, len, FIXED, to, 0]) }).map(drop)
}

/// Copies memory of the process by the kernel. The copy fails if the source is not mapped.
///
/// # Errors
/// The error code of the kernel; `EFAULT` also after a copy of a part.
///
/// # Safety
/// The caller owns the memory at `to`.
pub unsafe fn read_own_memory(from: usize, to: usize, len: usize) -> Result<(), c_int> {
    const EFAULT: c_int = 14;
    let (local, remote) = ([to, len], [from, len]);
    let (local, remote) = (local.as_ptr() as usize, remote.as_ptr() as usize);
    // SAFETY: the kernel reads the two vectors, and writes to memory of the caller.
    let copied =
        checked(unsafe { call(number::PROCESS_VM_READV, [getpid(), local, 1, remote, 1, 0]) })?;
    if copied == len { Ok(()) } else { Err(EFAULT) }
}

/// Names private anonymous memory in `/proc/PID/maps`, if the kernel supports names.
pub fn name_memory(start: usize, len: usize, name: &CStr) {
    const PR_SET_VMA: usize = 0x5356_4d41;
    // SAFETY: the kernel reads the name.
    unsafe { call(number::PRCTL, [PR_SET_VMA, 0, start, len, name.as_ptr() as usize, 0]) };
}

/// Returns the name of the calling thread in two words, which zeros end.
pub fn process_name() -> [u64; 2] {
    const PR_GET_NAME: usize = 16;
    let mut name = [0; 2];
    // SAFETY: the kernel writes 16 bytes.
    unsafe { call(number::PRCTL, [PR_GET_NAME, name.as_mut_ptr() as usize, 0, 0, 0, 0]) };
    name
}

/// Opens a file for reading.
///
/// # Errors
/// The error code of the kernel.
pub fn open(path: &CStr) -> Result<c_int, c_int> {
    open_with(path, 0)
}

/// Opens a file for reading and writing.
///
/// # Errors
/// The error code of the kernel.
pub fn open_writable(path: &CStr) -> Result<c_int, c_int> {
    const O_RDWR: usize = 2;
    open_with(path, O_RDWR)
}

fn open_with(path: &CStr, flags: usize) -> Result<c_int, c_int> {
    const AT_FDCWD: usize = -100_isize as usize;
    const O_CLOEXEC: usize = 0o2_000_000;
    let arguments = [AT_FDCWD, path.as_ptr() as usize, flags | O_CLOEXEC, 0, 0, 0];
    // SAFETY: the kernel reads the path.
    checked(unsafe { call(number::OPENAT, arguments) }).map(|file| file as c_int)
}

/// Returns the size of a file in bytes.
///
/// # Errors
/// The error code of the kernel.
pub fn size(file: c_int) -> Result<usize, c_int> {
    const SEEK_END: usize = 2;
    // SAFETY: the call touches no memory.
    checked(unsafe { call(number::LSEEK, [file as usize, 0, SEEK_END, 0, 0, 0]) })
}

/// Returns the device and the inode of an open file.
///
/// # Errors
/// The error code of the kernel.
pub fn identity(file: c_int) -> Result<[u64; 2], c_int> {
    stat(file).map(|stat| [stat[0], stat[1]])
}

/// Returns whether a file has holes: fewer blocks than bytes.
///
/// # Errors
/// The error code of the kernel.
pub fn has_holes(file: c_int) -> Result<bool, c_int> {
    stat(file).map(|stat| stat[8].saturating_mul(512) < stat[6])
}

/// Returns the words of C's `struct stat`, which has at most 144 bytes.
fn stat(file: c_int) -> Result<[u64; 18], c_int> {
    let mut stat = [0_u64; 18];
    // SAFETY: the kernel writes into the words.
    checked(unsafe {
        call(number::FSTAT, [file as usize, stat.as_mut_ptr() as usize, 0, 0, 0, 0])
    })?;
    Ok(stat)
}

/// Returns the number of a file's kind of file system.
///
/// # Errors
/// The error code of the kernel.
pub fn file_system(file: c_int) -> Result<u64, c_int> {
    // C's `struct statfs` has 120 bytes.
    let mut system = [0_u64; 15];
    // SAFETY: the kernel writes into the words.
    checked(unsafe {
        call(number::FSTATFS, [file as usize, system.as_mut_ptr() as usize, 0, 0, 0, 0])
    })?;
    Ok(system[0])
}

/// Writes bytes to a file in one call, if the file accepts them at once. A failed write has no
/// effect: the thread gets no `SIGPIPE` from a pipe without a reader, and no `SIGTTOU` from the
/// terminal of another process group.
pub fn write(file: c_int, bytes: &[u8]) {
    const PIPE: u64 = 1 << (13 - 1);
    const TERMINAL: u64 = 1 << (22 - 1);
    const BLOCK: usize = 0;
    const SET: usize = 2;
    let (signals, mut before) = (PIPE | TERMINAL, 0);
    set_signals(BLOCK, signals, Some(&mut before));
    if accepts(file) {
        // SAFETY: the kernel reads the bytes.
        let written = unsafe {
            call(number::WRITE, [file as usize, bytes.as_ptr() as usize, bytes.len(), 0, 0, 0])
        };
        if checked(written).is_err() && before & PIPE == 0 {
            take_signal(PIPE);
        }
    }
    set_signals(SET, before, None);
}

/// The size of a set of signals in bytes.
const SIGNALS: usize = size_of::<u64>();

/// Changes the blocked signals of the thread.
fn set_signals(how: usize, signals: u64, before: Option<&mut u64>) {
    let before = before.map_or(0, |before| ptr::from_mut(before) as usize);
    let signals = &raw const signals as usize;
    // SAFETY: the kernel reads and writes sets of signals.
    unsafe { call(number::SIGPROCMASK, [how, signals, before, SIGNALS, 0, 0]) };
}

/// Removes a pending signal of the thread.
fn take_signal(signals: u64) {
    let time = [0_u64; 2];
    let (signals, time) = (&raw const signals as usize, time.as_ptr() as usize);
    // SAFETY: the kernel reads the set of signals and the time.
    unsafe { call(number::SIGTIMEDWAIT, [signals, 0, time, SIGNALS, 0, 0]) };
}

/// Returns whether a write to the file does not wait.
fn accepts(file: c_int) -> bool {
    const POLLOUT: u32 = 4;
    // C's `struct pollfd` for the descriptor: the results are in the upper half.
    let mut request = [file as u32, POLLOUT];
    let time = [0_u64; 2];
    let arguments = [request.as_mut_ptr() as usize, 1, time.as_ptr() as usize, 0, 0, 0];
    // SAFETY: the kernel reads the time, and writes to the request.
    unsafe { call(number::PPOLL, arguments) };
    (request[1] >> 16) & POLLOUT != 0
}

/// Reads the next bytes of a file. Returns their number: 0 at the end.
///
/// # Errors
/// The error code of the kernel.
pub fn read(file: c_int, bytes: &mut [u8]) -> Result<usize, c_int> {
    // SAFETY: the kernel writes into the bytes.
    checked(unsafe {
        call(number::READ, [file as usize, bytes.as_mut_ptr() as usize, bytes.len(), 0, 0, 0])
    })
}

/// Reads words of a file from the byte `offset`. Returns the number of bytes.
///
/// # Errors
/// The error code of the kernel.
pub fn read_words(file: c_int, words: &mut [u64], offset: usize) -> Result<usize, c_int> {
    let (start, len) = (words.as_mut_ptr() as usize, size_of_val(words));
    // SAFETY: the kernel writes into the words.
    checked(unsafe { call(number::PREAD, [file as usize, start, len, offset, 0, 0]) })
}

/// Waits until another thread calls [`wake`] for the word, for `microseconds`, or until a signal.
/// Returns at once if the word has another value than `value`.
pub fn wait(word: &AtomicU32, value: u32, microseconds: u64) {
    const WAIT: usize = 128;
    let time = [microseconds / 1_000_000, microseconds % 1_000_000 * 1000];
    // SAFETY: the kernel reads the word and the time.
    unsafe {
        call(
            number::FUTEX,
            [word.as_ptr() as usize, WAIT, value as usize, time.as_ptr() as usize, 0, 0],
        )
    };
}

/// Wakes the thread that waits for the word.
pub fn wake(word: &AtomicU32) {
    const WAKE: usize = 129;
    // SAFETY: the kernel uses the address alone.
    unsafe { call(number::FUTEX, [word.as_ptr() as usize, WAKE, 1, 0, 0, 0]) };
}

/// Returns the process identifier.
pub fn getpid() -> usize {
    // SAFETY: the call has no condition.
    unsafe { call(number::GETPID, [0; 6]) }
}

/// Closes a file.
pub fn close(file: c_int) {
    // SAFETY: the library closes only its own files.
    unsafe { call(number::CLOSE, [file as usize, 0, 0, 0, 0, 0]) };
}

/// Ends the process by a signal.
pub fn abort() -> ! {
    // SAFETY: neither call touches memory.
    unsafe {
        call(number::KILL, [getpid(), SIGABRT, 0, 0, 0, 0]);
        loop {
            call(number::EXIT_GROUP, [127, 0, 0, 0, 0, 0]);
        }
    }
}
