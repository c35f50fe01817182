//! An allocator that refuses when told to, and counts what a thread has.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Requests refused in one call beyond which whoever asks is taken to ask for ever. The heap is given
/// back to it then, so that the call ends and the test can say so.
const PATIENCE: u64 = 1000;

/// Which of a thread's requests are refused, counted from 0 when this is armed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    /// None.
    Grant,
    /// This one.
    Only(u64),
    /// This one and all that follow.
    From(u64),
    /// All before this one.
    Before(u64),
}

thread_local! {
    static PLAN: Cell<Plan> = const { Cell::new(Plan::Grant) };
    static ASKED: Cell<u64> = const { Cell::new(0) };
    static REFUSED: Cell<u64> = const { Cell::new(0) };
    static LIVE: Cell<i64> = const { Cell::new(0) };
}

/// Arms the allocator for this thread while `body` runs. Returns how many requests were refused, too.
pub(crate) fn with<R>(plan: Plan, body: impl FnOnce() -> R) -> (R, u64) {
    /// Disarms it also where `body` panics: the panic's own message needs memory.
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
    assert!(refused < PATIENCE, "the heap is asked again and again");
    (result, refused)
}

/// The bytes that this thread has allocated and not freed.
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
        // SAFETY: the caller's promises are passed on; `alloc` gave what `System` gave.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Shim = Shim;
