//! Waiting for pages that are read from the disk.
//!
//! A thread that needs such a page sleeps in one of a few queues, and the end of the read wakes that queue. Copies from and to user memory,
//! which may hold locks, wait on their CPU instead (`faultless_bare::trap`); so what a system call copies of a file is
//! [fetched](fetch) first.

use super::thread::{WaitQueue, try_current};
use super::wait;
use crate::errno::{Errno, Result};
use core::ops::Range;
use core::sync::atomic::{AtomicBool, Ordering};
use faultless::locks::until;
use faultless::{Object, PendingRead, Shared, ThreadStreams};
use faultless_bare::percpu;
use faultless_bare::sync::Mutex;

/// Of the pages that are needed, how many are read at a time.
const AHEAD: u64 = 64;

/// The threads that wait for reads, by the names of the reads. A thread may be woken for another read, and then waits again.
static QUEUES: [WaitQueue; 16] = [const { WaitQueue::new() }; 16];

fn queue(read: u64) -> &'static WaitQueue {
    // Names are addresses, of which the last bits are alike.
    &QUEUES[(read >> 5) as usize % QUEUES.len()]
}

/// Wakes the threads that wait for a read, which has ended.
pub fn wake(read: u64) {
    queue(read).wake_all();
}

/// Sleeps until the read has ended. The caller holds no lock.
///
/// # Errors
/// `EIO`: the page could not be read. `EINTR`: the thread is killed.
pub fn wait(pending: &PendingRead) -> Result<()> {
    let outcome = if try_current().is_some() {
        wait::wait_unless_killed(queue(pending.id()), || pending.outcome())
            .map_err(|_| Errno::EINTR)?
    } else {
        // At boot.
        let mut outcome = None;
        until(percpu::cpu(), || {
            faultless_disk::poll();
            outcome = pending.outcome();
            outcome.is_some()
        });
        outcome.unwrap_or(Ok(()))
    };
    outcome.map_err(|_| Errno::EIO)
}

/// What an open file is expected to read next, in the pages of its object.
#[derive(Debug)]
pub struct Reader {
    streams: Mutex<ThreadStreams>,
    /// The program says that it reads in no order (`POSIX_FADV_RANDOM`).
    at_random: AtomicBool,
}

impl Reader {
    /// Of an open file that nobody has read, and of which nothing is said.
    pub const fn new() -> Self {
        Self { streams: Mutex::new(ThreadStreams::new()), at_random: AtomicBool::new(false) }
    }

    /// From now on the open file is read in no order, or in one that may be expected.
    pub fn at_random(&self, at_random: bool) {
        self.at_random.store(at_random, Ordering::Relaxed);
    }

    /// Begins to read those of `pages` that are not there, and with them what is expected to be needed next.
    fn begin(
        &self,
        object: &Shared<Object>,
        pages: Range<u64>,
    ) -> core::result::Result<(), faultless::Errno> {
        let cpu = percpu::cpu();
        if self.at_random.load(Ordering::Relaxed) {
            return object.read_exactly(cpu, pages);
        }
        object.read_in_sequence(cpu, &self.streams.lock(), pages)
    }
}

/// Waits until `pages` of `object` are there; those that its open file's `reader` expects behind them begin to be read. Returns how many from
/// the first on are there. The caller holds no lock.
///
/// # Errors
/// Why the first is not: `EIO`, `ENOMEM`; `EINTR`: the thread is killed.
pub fn fetch(object: &Shared<Object>, pages: Range<u64>, reader: Option<&Reader>) -> Result {
    for index in pages.clone() {
        match fetch_page(object, index, pages.end, reader) {
            Err(errno) if index == pages.start => return Err(errno),
            Err(_) => return Ok(index - pages.start),
            Ok(()) => {}
        }
    }
    Ok(pages.end.saturating_sub(pages.start))
}

fn fetch_page(
    object: &Shared<Object>,
    index: u64,
    end: u64,
    reader: Option<&Reader>,
) -> Result<()> {
    let is_missing = || object.is_stored() && !object.has_page(percpu::cpu(), index);
    if is_missing() {
        // Once: where many pages cannot be read at a time, the page is read by itself below. What hinders this hinders that, or is of a
        // later page, whose turn comes.
        let pages = index..end.min(index + AHEAD);
        let _ = match reader {
            Some(reader) => reader.begin(object, pages),
            None => object.read_ahead(percpu::cpu(), pages),
        };
    }
    while is_missing() && index < object.pages() {
        match object.read_page(percpu::cpu(), index, |_| ()) {
            Ok(()) => break,
            Err(faultless::Errno::EAGAIN) => {
                if let Some(pending) = percpu::cpu().pending_read() {
                    wait(&pending)?;
                }
            }
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}
