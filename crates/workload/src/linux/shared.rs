//! Memory shared by the processes of one run: the signals of the start and the end, and a slot for
//! each worker's report.
//!
//! A report is plain memory without pointers, except for `&'static str`s, which are valid in every
//! process forked from the same parent. A slot has one writer at a time, and is read after the end
//! of this writer.

use super::task::refused;
use crate::start::Start;
use crate::system::{Failure, Measured, Report};
use std::cell::UnsafeCell;
use std::fmt;
use std::mem::size_of;
use std::ops::Deref;
use std::ptr::NonNull;

/// A place for one result, on separate cache lines.
#[repr(align(128))]
pub(super) struct Slot<T>(UnsafeCell<Option<Result<T, Failure>>>);

// SAFETY: as documented for the module, the end of the writer orders its put before any take.
unsafe impl<T: Send> Sync for Slot<T> {}

impl<T: Copy> Slot<T> {
    const fn new() -> Self {
        Self(UnsafeCell::new(None))
    }

    /// Stores `result`.
    pub(super) fn put(&self, result: Result<T, Failure>) {
        // SAFETY: there is one writer at a time, and no reader while the writer lives, as
        // documented for the module.
        unsafe { *self.0.get() = Some(result) }
    }

    /// Takes the stored result.
    ///
    /// # Safety
    /// The writer has ended.
    pub(super) unsafe fn take(&self) -> Option<Result<T, Failure>> {
        // SAFETY: by the contract there is no writer now.
        unsafe { (*self.0.get()).take() }
    }
}

/// The failure of a forked child of a worker, which is the part of a slot used by a
/// [`LinuxTask`](super::LinuxTask).
pub(super) trait ChildFailure: Sync {
    /// Stores the failure for the parent.
    fn leave(&self, failure: Failure);
    /// Takes the failure stored by the child.
    ///
    /// # Safety
    /// The child has ended, and there is no other writer.
    unsafe fn find(&self) -> Option<Failure>;
}

impl<T: Copy + Send> ChildFailure for Slot<T> {
    fn leave(&self, failure: Failure) {
        self.put(Err(failure));
    }

    unsafe fn find(&self) -> Option<Failure> {
        // SAFETY: the contract is passed on to the caller.
        unsafe { self.take() }.and_then(Result::err)
    }
}

/// The result of a worker: the report, and the page faults.
pub(super) type WorkerReport = (Report, u64);

/// The head of the shared memory.
pub(super) struct Head {
    /// The signals to start and to stop.
    pub(super) start: Start,
    /// The result of the subject itself.
    pub(super) coordinator: Slot<()>,
    workers: usize,
}

/// The shared memory: a [`Head`] followed by the slots. Unmapped on drop.
pub(super) struct Shared {
    head: NonNull<Head>,
}

// SAFETY: the pointer refers to `Sync` data that lives as long as `self`.
unsafe impl Sync for Shared {}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("workers", &self.workers).finish_non_exhaustive()
    }
}

impl Shared {
    /// Creates shared memory for `workers` workers.
    pub(super) fn new(workers: usize) -> Result<Self, Failure> {
        let len = Self::len(workers);
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an unused address.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0) };
        let Some(head) = NonNull::new(start.cast::<Head>()).filter(|_| start != libc::MAP_FAILED)
        else {
            return Err(refused("mmap", 0, len as u64));
        };
        // SAFETY: the mapping is page-aligned and long enough for the head and the slots, and not
        // shared with any other process yet.
        unsafe {
            head.write(Head { start: Start::default(), coordinator: Slot::new(), workers });
            let slots = head.add(1).cast::<Slot<WorkerReport>>();
            for index in 0..workers {
                slots.add(index).write(Slot::new());
            }
        }
        Ok(Self { head })
    }

    const fn len(workers: usize) -> usize {
        size_of::<Head>() + workers * size_of::<Slot<WorkerReport>>()
    }

    /// Returns the workers' slots.
    pub(super) fn workers(&self) -> &[Slot<WorkerReport>] {
        // SAFETY: `new` has initialised this number of slots behind the head, both aligned to the
        // same 128 bytes.
        unsafe { std::slice::from_raw_parts(self.head.add(1).cast().as_ptr(), self.workers) }
    }

    /// Returns all reports, or the most specific failure.
    ///
    /// # Safety
    /// The subject and all workers have ended.
    pub(super) unsafe fn collect(&self) -> Result<Measured, Failure> {
        // SAFETY: by the contract there is no writer; the same applies below.
        let coordinator = unsafe { self.coordinator.take() };
        // A worker's own failure is more specific than the failure of the subject.
        let reports: Result<Vec<_>, _> = self
            .workers()
            .iter()
            .enumerate()
            // SAFETY: as above.
            .map(|(worker, slot)| unsafe { slot.take() }.unwrap_or(Err(Failure::Lost { worker })))
            .collect();
        match (reports, coordinator) {
            (Err(Failure::Lost { .. }) | Ok(_), Some(Err(failure))) => Err(failure),
            (Ok(_), None) => Err(Failure::Lost { worker: 0 }),
            (reports, _) => {
                let reports = reports?;
                let faults = reports.iter().map(|(_, faults)| faults).sum();
                let workers = reports.into_iter().map(|(report, _)| report).collect();
                Ok(Measured { workers, faults, ..Measured::default() })
            }
        }
    }
}

impl Deref for Shared {
    type Target = Head;

    fn deref(&self) -> &Head {
        // SAFETY: `new` initialised the head, which stays mapped until `self` is dropped.
        unsafe { self.head.as_ref() }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let len = Self::len(self.workers);
        // SAFETY: the mapping of `new`, to which no reference outlives `self`.
        unsafe { libc::munmap(self.head.as_ptr().cast(), len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_specific_failure_is_returned() {
        let wrong = Failure::Wrong { what: "test", addr: 0, expected: 0, found: 1 };
        let killed = Failure::Killed { signal: 9 };
        let collect = |coordinator, workers: [Option<Result<WorkerReport, Failure>>; 2]| {
            let shared = Shared::new(2).expect("two slots are small");
            if let Some(result) = coordinator {
                shared.coordinator.put(result);
            }
            for (slot, result) in shared.workers().iter().zip(workers) {
                if let Some(result) = result {
                    slot.put(result);
                }
            }
            // SAFETY: this thread was the only writer.
            unsafe { shared.collect() }
        };
        let report = Report::default();
        let good = Some(Ok((report, 3)));
        let all = Measured { workers: vec![report; 2], faults: 6, ..Measured::default() };
        assert_eq!(collect(Some(Ok(())), [good, good]), Ok(all));
        assert_eq!(collect(Some(Err(killed)), [good, None]), Err(killed));
        assert_eq!(collect(Some(Err(killed)), [good, Some(Err(wrong))]), Err(wrong));
        assert_eq!(collect(Some(Ok(())), [good, None]), Err(Failure::Lost { worker: 1 }));
        assert_eq!(collect(None, [good, good]), Err(Failure::Lost { worker: 0 }));
    }
}
