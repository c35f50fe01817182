//! Page faults of a program and of all processes that it starts.
//!
//! `getrusage` counts pages that one call populates as faults, and misses processes that nobody
//! waits for. The kernel's own counter of page-fault exceptions does neither.

use perf_event::events::Software;
use perf_event::{Builder, Counter};

/// The counter of a program that the calling thread starts next.
pub struct FaultCounter(Option<Counter>);

impl FaultCounter {
    /// Prepares the counter: counting begins when a child of this thread executes a program.
    /// Without permission for the kernel's counters, [`count`](Self::count) returns `None`.
    pub fn new() -> Self {
        let mut builder = Builder::new(Software::PAGE_FAULTS);
        builder.observe_self().any_cpu().inherit(true).enable_on_exec(true).enabled(false);
        let counter = builder.include_kernel().exclude_hv(false).build();
        Self(counter.ok())
    }

    /// Returns the faults so far.
    pub fn count(&mut self) -> Option<u64> {
        self.0.as_mut().and_then(|counter| counter.read().ok())
    }
}
