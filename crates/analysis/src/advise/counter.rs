//! Page faults of a program and of all its descendants.
//!
//! `getrusage` counts pages populated by a call as faults, and misses processes without a waiting
//! parent. The kernel's counter of page-fault exceptions has neither error.

use perf_event::events::Software;
use perf_event::{Builder, Counter};

/// The fault counter of the next program started by the calling thread.
#[derive(Debug)]
pub struct FaultCounter(Option<Counter>);

impl FaultCounter {
    /// Prepares the counter. Counting begins when a child of this thread executes a program.
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
