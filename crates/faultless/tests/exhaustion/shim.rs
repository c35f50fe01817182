//! An allocator that refuses requests on demand, and counts the allocated bytes of a thread.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The number of refused requests in one call after which the caller is assumed to retry forever.
/// From then on requests succeed, so that the call ends and the test can report the loop.
const PATIENCE: u64 = 1000;

/// Which of a thread's requests are refused, counted from 0 when this is armed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    /// None.
    Grant,
    /// This one.
    Only(u64),
    /// This request and all later requests.
    From(u64),
    /// All requests before this one.
    Before(u64),
}

thread_local! {
    static PLAN: Cell<Plan> = const { Cell::new(Plan::Grant) };
    static ASKED: Cell<u64> = const { Cell::new(0) };
    static REFUSED: Cell<u64> = const { Cell::new(0) };
    static LIVE: Cell<i64> = const { Cell::new(0) };
}

/// Arms the allocator for this thread while `body` runs. Returns the number of refused requests as
/// well.
pub(crate) fn with<R>(plan: Plan, body: impl FnOnce() -> R) -> (R, u64) {
    /// Disarms the allocator even if `body` panics: the panic message needs memory.
    struct Disarm;
    impl Drop for Disarm {
        fn drop(&mut self) {
            PLAN.set(Plan::Grant);
        }
    }
    ASKED.set(0);
    REFUSED.set(0);
    PLAN.set(plan);
    let disarm = Disarm;
    let result = body();
    drop(disarm);
    let refused = REFUSED.get();
    assert!(refused < PATIENCE, "the operation retries failed allocations without end");
    (result, refused)
}

/// Returns the allocated bytes of this thread.
pub(crate) fn live() -> i64 {
    LIVE.get()
}

fn refuses() -> bool {
    let at = ASKED.get();
    ASKED.set(at + 1);
    let refuses = match PLAN.get() {
        Plan::Grant => false,
        Plan::Only(this) => at == this,
        Plan::Before(end) => at < end,
        Plan::From(first) => at >= first && !std::thread::panicking() && REFUSED.get() < PATIENCE,
    };
    REFUSED.set(REFUSED.get() + u64::from(refuses));
    refuses
}

struct Shim;

// SAFETY: every request goes to the system's allocator unchanged, or is refused with null.
unsafe impl GlobalAlloc for Shim {
    // SAFETY: as `System`.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if refuses() {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promises are passed on.
        let at = unsafe { System.alloc(layout) };
        LIVE.set(LIVE.get() + layout.size() as i64);
        at
    }

    // SAFETY: as `System`.
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.set(LIVE.get() - layout.size() as i64);
        // SAFETY: the caller's promises are passed on; `alloc` returned memory of `System`.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Shim = Shim;
