//! Waiting for pages that are read from the disk.
//!
//! A thread that needs such a page sleeps in one of a few queues, and the end of the read wakes
//! this queue. Copies from and to user memory may hold locks, so they wait on their CPU
//! (`faultless_bare::trap`). A system call therefore [fetches](fetch) the pages of a file before it
//! copies from the file.

use super::thread::{WaitQueue, try_current};
use super::wait;
use crate::errno::{Errno, Result};
use core::ops::Range;
use core::sync::atomic::{AtomicBool, Ordering};
use faultless::locks::until;
use faultless::{Object, PendingRead, Shared, ThreadStreams};
use faultless_bare::percpu;
use faultless_bare::sync::Mutex;

/// The maximum number of needed pages to read at a time.
const AHEAD: u64 = 64;

/// The queues of threads waiting for reads, hashed by the name of the read. A thread may be woken
/// for another read, and then waits again.
static QUEUES: [WaitQueue; 16] = [const { WaitQueue::new() }; 16];

fn queue(read: u64) -> &'static WaitQueue {
    // Names are addresses, and their low bits are always equal.
    &QUEUES[(read >> 5) as usize % QUEUES.len()]
}

/// Wakes the threads that wait for a completed read.
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

/// The read-ahead state of an open file, in pages of its object.
#[derive(Debug)]
pub struct Reader {
    streams: Mutex<ThreadStreams>,
    /// Set if the program reads in random order (`POSIX_FADV_RANDOM`).
    at_random: AtomicBool,
}

impl Reader {
    /// Returns the state of an open file without reads and without advice.
    pub const fn new() -> Self {
        Self { streams: Mutex::new(ThreadStreams::new()), at_random: AtomicBool::new(false) }
    }

    /// Sets whether future reads of the open file are in random order.
    pub fn at_random(&self, at_random: bool) {
        self.at_random.store(at_random, Ordering::Relaxed);
    }

    /// Begins to read the missing pages of `pages`, and the pages predicted to be needed next.
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

/// Waits until `pages` of `object` are present, and begins to read the following pages predicted by
/// the open file's `reader`. Returns the number of present pages at the start of the range. The
/// caller holds no lock.
///
/// # Errors
/// The error of the first page: `EIO`, `ENOMEM`; `EINTR`: the thread is killed.
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
        // A single attempt: if a read of many pages fails, the loop below reads the needed page by
        // itself. An error of the attempt either appears again below, or belongs to a later page,
        // which is tried in its turn.
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
