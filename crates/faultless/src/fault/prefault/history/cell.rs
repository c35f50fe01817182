//! The cell in which a space stores its access history.

use super::{BlockHistory, History};
use crate::heap;
use crate::sync::atomic::{AtomicPtr, Ordering};
use alloc::boxed::Box;
use core::ptr::{self, NonNull};

/// A space's [`History`], allocated at the first record.
#[derive(Debug)]
pub(crate) struct HistoryCell(AtomicPtr<History>);

impl HistoryCell {
    pub(crate) fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Returns the access history of the block of `page` (a page number).
    #[inline]
    pub(crate) fn recall(&self, page: u64) -> BlockHistory {
        self.get().map_or(BlockHistory::default(), |history| history.recall(page))
    }

    #[inline]
    fn get(&self) -> Option<&History> {
        // SAFETY: a non-null pointer came from a box, which is freed only when this cell is
        // dropped.
        unsafe { self.0.load(Ordering::Acquire).as_ref() }
    }

    /// Returns the history, and allocates it if necessary; `None` if the heap is exhausted.
    pub(crate) fn get_or_make(&self) -> Option<&History> {
        if self.get().is_none() {
            let made = Box::into_raw(heap::try_box_with(History::default).ok()?);
            let (none, release, relaxed) = (ptr::null_mut(), Ordering::Release, Ordering::Relaxed);
            if self.0.compare_exchange(none, made, release, relaxed).is_err() {
                // SAFETY: the pointer came from a box just now, and no other CPU has it.
                drop(unsafe { Box::from_raw(made) });
            }
        }
        self.get()
    }
}

impl Drop for HistoryCell {
    fn drop(&mut self) {
        if let Some(made) = NonNull::new(self.0.load(Ordering::Relaxed)) {
            // SAFETY: the pointer came from a box, and there are no references, because each
            // reference borrows this cell.
            drop(unsafe { Box::from_raw(made.as_ptr()) });
        }
    }
}
