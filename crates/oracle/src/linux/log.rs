//! Memory shared by the processes of a case with this process: the current turn, and the
//! observations.

use super::LinuxError;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Words of what was seen in a case; a thousand times more than the usual case has.
const WORDS: usize = 4 << 20;
const BYTES: usize = size_of::<Head>() + WORDS * size_of::<AtomicU64>();
/// The time limit for a turn, after which the process with the turn counts as dead.
const PATIENCE: Duration = Duration::from_secs(20);

#[repr(C)]
struct Head {
    turn: AtomicU32,
    count: AtomicU64,
}

/// The shared memory.
#[derive(Debug)]
pub struct Log {
    head: NonNull<Head>,
}

impl Log {
    /// Creates shared memory for one case at a time.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn new() -> Result<Self, LinuxError> {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at a free address.
        let start = unsafe { libc::mmap(ptr::null_mut(), BYTES, prot, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(LinuxError::last("mmap"));
        }
        NonNull::new(start.cast()).map(|head| Self { head }).ok_or(LinuxError::last("mmap"))
    }

    fn head(&self) -> &Head {
        // SAFETY: mapped for as long as `self` lives; zeros are valid.
        unsafe { self.head.as_ref() }
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: mapped behind the head, for as long as `self` lives; zeros are valid.
        unsafe { std::slice::from_raw_parts(self.head.add(1).cast().as_ptr(), WORDS) }
    }

    /// Empties the memory, for a new case. No process of an old case is alive.
    pub fn clear(&self) {
        self.head().turn.store(0, Ordering::Relaxed);
        self.head().count.store(0, Ordering::Relaxed);
    }

    /// Waits for the turn of step `step`. Returns false after the time limit.
    pub fn wait_for(&self, step: usize) -> bool {
        let (turn, step) = (&self.head().turn, step as u32);
        let begin = Instant::now();
        loop {
            let seen = turn.load(Ordering::Acquire);
            if seen == step {
                return true;
            }
            if begin.elapsed() > PATIENCE {
                return false;
            }
            let timeout = libc::timespec { tv_sec: 1, tv_nsec: 0 };
            let no = ptr::null::<u32>();
            // SAFETY: the word is mapped; the call reads it and sleeps.
            unsafe {
                libc::syscall(
                    libc::SYS_futex,
                    turn.as_ptr(),
                    libc::FUTEX_WAIT,
                    seen,
                    &raw const timeout,
                    no,
                    0,
                );
            }
        }
    }

    /// Passes the turn to step `step`; `wake` wakes the waiting processes.
    pub fn pass_to(&self, step: usize, wake: bool) {
        let turn = &self.head().turn;
        turn.store(step as u32, Ordering::Release);
        if wake {
            // SAFETY: the word is mapped; the call only wakes.
            unsafe { libc::syscall(libc::SYS_futex, turn.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
        }
    }

    /// Appends a word. The process with the turn is the only writer.
    pub fn put(&self, word: u64) {
        let count = self.head().count.load(Ordering::Relaxed);
        if let Some(slot) = self.words().get(count as usize) {
            slot.store(word, Ordering::Relaxed);
            self.head().count.store(count + 1, Ordering::Release);
        }
    }

    /// All words.
    pub fn read(&self) -> impl Iterator<Item = u64> {
        let count = self.head().count.load(Ordering::Acquire) as usize;
        self.words()[..count].iter().map(|word| word.load(Ordering::Relaxed))
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, to which no reference outlives `self`.
        unsafe { libc::munmap(self.head.as_ptr().cast(), BYTES) };
    }
}
