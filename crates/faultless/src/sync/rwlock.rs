//! A fair reader-writer lock, without data, to show the cost of one coarse lock around an address
//! space.
//!
//! The lock has the inherent cost of this kind: every reader writes one shared word twice, as with
//! a kernel's reader-writer semaphore. Protocol:
//!
//! - A reader adds 1 reader to the word; if no writer holds the lock or is next, the reader has
//!   entered.
//! - Otherwise the reader subtracts the 1 again and queues; a writer that finds the lock held also
//!   queues.
//! - The queue is a ticket lock, in the order of arrival. The head of the queue waits for the word:
//!   a reader until no writer is inside, a writer, after marking the word so that new readers queue
//!   behind it, until the lock is free.
//! - A writer may become a reader without releasing the lock
//!   ([`downgrade`](WriteGuard::downgrade)). The word has a bit for this reader, since there is at
//!   most one, so that readers can [wait](ReadGuard::await_downgraded) until the former writer has
//!   left.
//!
//! So neither readers nor writers starve: only the readers already inside when a writer becomes the
//! head go before the writer, and the queue's head is the next to enter.

use super::atomic::{AtomicU32, Ordering};
use super::mutant::{Mutant, lost};
use super::order::{self, Mark, MmapLock};
use super::wait::{Wait, until};
use core::cell::Cell;

/// In the word: a writer is inside.
const WRITER: u32 = 1;
/// In the word: a writer is at the head of the queue.
const NEXT_IS_WRITER: u32 = 2;
/// In the word: a downgraded writer is inside as a reader.
const DOWNGRADED: u32 = 4;
/// In the word: one reader.
const READER: u32 = 8;

/// A reader-writer spin lock, in the order of arrival. In the lock order this is the one lock of a
/// space. The holder must not wait for an earlier rank, neither a grace period nor a store.
#[derive(Debug)]
pub struct RwLock {
    word: AtomicU32,
    /// The next ticket.
    tickets: AtomicU32,
    /// The ticket of the queue's head.
    head: AtomicU32,
}

impl RwLock {
    /// Returns a free lock.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self { word: AtomicU32::new(0), tickets: AtomicU32::new(0), head: AtomicU32::new(0) }
    }

    /// Returns a free lock.
    #[cfg(loom)]
    pub fn new() -> Self {
        Self { word: AtomicU32::new(0), tickets: AtomicU32::new(0), head: AtomicU32::new(0) }
    }

    /// Enters as a reader, waiting as `wait` does. Not re-entrant: a writer may queue in between.
    ///
    /// # Panics
    /// In builds with debug assertions, on a violation of the lock order; see [`order`].
    #[inline]
    pub fn read<'a, W: Wait + ?Sized>(&'a self, wait: &'a W) -> ReadGuard<'a> {
        order::before::<MmapLock>(wait);
        if let Some(mut guard) = self.try_read() {
            guard.mark = order::hold::<MmapLock>(wait);
            return guard;
        }
        self.queued(wait, || {
            // While this reader is the head, no writer sets `NEXT_IS_WRITER`, and a writer inside
            // will leave. The reader is already counted in the word, which keeps the next writer
            // out.
            self.word.fetch_add(READER, Ordering::Relaxed);
            until(wait, || self.word.load(Ordering::Acquire) & WRITER == 0);
        });
        ReadGuard { lock: self, mark: order::hold::<MmapLock>(wait) }
    }

    /// Enters as a reader if no writer is inside or next. Not recorded in the lock order.
    #[inline]
    pub fn try_read(&self) -> Option<ReadGuard<'_>> {
        // Acquire synchronises with the Release of a leaving writer.
        let word = self.word.fetch_add(READER, Ordering::Acquire);
        let guard = ReadGuard { lock: self, mark: Mark::none() };
        // The drop of the guard removes the reader again.
        (word & (WRITER | NEXT_IS_WRITER) == 0).then_some(guard)
    }

    /// Returns whether any CPU is inside, or next.
    pub fn is_held(&self) -> bool {
        self.word.load(Ordering::Acquire) != 0
    }

    /// Enters exclusively, waiting as `wait` does.
    ///
    /// # Panics
    /// As [`read`](Self::read).
    #[inline]
    pub fn write<'a, W: Wait + ?Sized>(&'a self, wait: &'a W) -> WriteGuard<'a> {
        order::before::<MmapLock>(wait);
        if !self.enter_alone(0) {
            self.queued(wait, || {
                self.word.fetch_or(NEXT_IS_WRITER, Ordering::Relaxed);
                until(wait, || self.enter_alone(NEXT_IS_WRITER));
            });
        }
        WriteGuard { lock: self, inside: Cell::new(WRITER), mark: order::hold::<MmapLock>(wait) }
    }

    /// Makes this CPU the writer inside, if the word is `from`.
    #[inline]
    fn enter_alone(&self, from: u32) -> bool {
        if lost(Mutant::WriterWaitsForReaders) {
            self.word.fetch_or(WRITER, Ordering::Acquire);
            return true;
        }
        self.word.load(Ordering::Relaxed) == from
            // Acquire synchronises with the Release of every earlier holder.
            && self
                .word
                .compare_exchange(from, WRITER, Ordering::Acquire, Ordering::Relaxed)
                .is_ok()
    }

    /// Runs `enter` at the head of the queue.
    #[cold]
    fn queued<W: Wait + ?Sized>(&self, wait: &W, enter: impl FnOnce()) {
        let ticket = self.tickets.fetch_add(1, Ordering::Relaxed);
        until(wait, || self.head.load(Ordering::Acquire) == ticket);
        enter();
        self.head.store(ticket.wrapping_add(1), Ordering::Release);
    }
}

impl Default for RwLock {
    fn default() -> Self {
        Self::new()
    }
}

/// A reader inside an [`RwLock`].
#[derive(Debug)]
#[must_use = "the drop of the guard ends the read"]
pub struct ReadGuard<'a> {
    lock: &'a RwLock,
    mark: Mark<'a>,
}

impl ReadGuard<'_> {
    /// Waits until a downgraded writer inside has left, if there is one. No second one can enter
    /// during the wait. The call does not wait for the remaining readers, so a caller that holds
    /// the lock delays no leaving CPU.
    pub fn await_downgraded(&self, wait: &(impl Wait + ?Sized)) {
        // Acquire synchronises with the Release of the leaving reader.
        until(wait, || self.lock.word.load(Ordering::Acquire) & DOWNGRADED == 0);
    }
}

impl Drop for ReadGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.lock.word.fetch_sub(READER, Ordering::Release);
    }
}

/// The writer inside an [`RwLock`], or the reader after its downgrade.
#[derive(Debug)]
#[must_use = "the drop of the guard releases the lock"]
pub struct WriteGuard<'a> {
    lock: &'a RwLock,
    /// This holder's part of the word.
    inside: Cell<u32>,
    #[expect(dead_code, reason = "the drop removes the mark")]
    mark: Mark<'a>,
}

impl WriteGuard<'_> {
    /// Makes the writer a reader, without a moment in which another writer could enter. Readers may
    /// enter from now on.
    pub fn downgrade(&self) {
        let reader = if lost(Mutant::DowngradeStays) { 0 } else { DOWNGRADED };
        let before = self.inside.replace(reader);
        // Release: readers that enter see the writer's stores.
        self.lock.word.fetch_add(reader.wrapping_sub(before), Ordering::Release);
    }
}

impl Drop for WriteGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        // Not a store, because queued readers have counted themselves meanwhile.
        self.lock.word.fetch_sub(self.inside.get(), Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sync::wait::{Spin, Yield};
    use core::sync::atomic::{AtomicBool, AtomicU64};
    use core::time::Duration;

    #[test]
    fn readers_share_and_writers_do_not() {
        let lock = RwLock::new();
        let first = lock.read(&Spin);
        let second = lock.try_read().unwrap();
        assert!(!lock.enter_alone(0) && lock.is_held());
        drop((first, second));
        assert!(!lock.is_held());
        let writer = lock.write(&Spin);
        assert!(lock.is_held());
        assert!(lock.try_read().is_none());
        drop(writer);
        assert!(lock.try_read().is_some());
        assert_eq!(lock.word.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_waiting_writer_blocks_new_readers() {
        let lock = RwLock::new();
        let inside = lock.read(&Spin);
        std::thread::scope(|scope| {
            scope.spawn(|| drop(lock.write(&Yield)));
            until(&Yield, || lock.try_read().is_none());
            drop(inside);
        });
        assert!(lock.try_read().is_some());
    }

    #[test]
    fn a_reader_at_the_head_waits_for_the_writer_inside() {
        let (lock, has_left) = (RwLock::new(), AtomicBool::new(false));
        let writer = lock.write(&Spin);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _reader = lock.read(&Yield);
                assert!(has_left.load(Ordering::Relaxed));
            });
            until(&Yield, || lock.tickets.load(Ordering::Relaxed) == 1);
            std::thread::sleep(Duration::from_millis(5));
            has_left.store(true, Ordering::Relaxed);
            drop(writer);
        });
    }

    #[test]
    fn a_downgraded_writer_admits_readers_and_excludes_writers() {
        let (lock, has_left) = (RwLock::new(), AtomicBool::new(false));
        let writer = lock.write(&Spin);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let reader = lock.read(&Yield);
                reader.await_downgraded(&Yield);
                assert!(has_left.load(Ordering::Relaxed));
            });
            // The reader is at the head, and enters as soon as no writer is inside.
            until(&Yield, || lock.word.load(Ordering::Relaxed) == WRITER + READER);
            writer.downgrade();
            writer.downgrade();
            assert!(lock.try_read().is_some());
            assert!(!lock.enter_alone(0));
            std::thread::sleep(Duration::from_millis(5));
            has_left.store(true, Ordering::Relaxed);
            drop(writer);
        });
        assert_eq!(lock.word.load(Ordering::Relaxed), 0);
        lock.read(&Spin).await_downgraded(&Spin);
    }

    #[test]
    fn readers_see_whole_writes() {
        const WRITES: u64 = if cfg!(miri) { 20 } else { 5_000 };
        let lock = RwLock::new();
        let (left, right) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..WRITES {
                        let _writer = lock.write(&Yield);
                        let value = left.load(Ordering::Relaxed) + 1;
                        left.store(value, Ordering::Relaxed);
                        right.store(value, Ordering::Relaxed);
                    }
                });
                scope.spawn(|| {
                    while left.load(Ordering::Relaxed) < 2 * WRITES {
                        let _reader = lock.read(&Yield);
                        let seen = left.load(Ordering::Relaxed);
                        assert_eq!(seen, right.load(Ordering::Relaxed));
                    }
                });
            }
        });
        assert_eq!(right.load(Ordering::Relaxed), 2 * WRITES);
    }
}
