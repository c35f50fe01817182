//! Faults injected by tests with `plant=NAME` on the command line, to check that the faults are
//! detected.
//!
//! - `skip-invlpg`: a CPU does not drop its own translations when required;
//! - `lost-ipi`: no interrupt is sent for a flush request, nor does the tick serve the request;
//! - `early-reuse`: a CPU interrupted for flush requests reports the requests as done, but drops
//!   the translations only at the next tick;
//! - `overrun-thread`, `overrun-idle`: a tick overflows its stack: a thread's stack, or the idle
//!   loop's;
//! - `overrun-fatal`: both, and then the stack of fatal exceptions overflows, too.

use core::sync::atomic::{AtomicU8, Ordering};

/// An injected fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Plant {
    SkipInvlpg = 1,
    LostIpi = 2,
    EarlyReuse = 3,
    OverrunThread = 4,
    OverrunIdle = 5,
    OverrunFatal = 6,
}

/// The injected fault; 0: no fault.
static PLANTED: AtomicU8 = AtomicU8::new(0);

/// Injects the fault with this name. `false`: the name is unknown.
pub(crate) fn set(name: &str) -> bool {
    let plant = match name {
        "skip-invlpg" => Plant::SkipInvlpg,
        "lost-ipi" => Plant::LostIpi,
        "early-reuse" => Plant::EarlyReuse,
        "overrun-thread" => Plant::OverrunThread,
        "overrun-idle" => Plant::OverrunIdle,
        "overrun-fatal" => Plant::OverrunFatal,
        _ => return false,
    };
    PLANTED.store(plant as u8, Ordering::Relaxed);
    true
}

/// Returns whether this fault is injected.
#[inline(always)]
pub(crate) fn is(plant: Plant) -> bool {
    PLANTED.load(Ordering::Relaxed) == plant as u8
}

/// Returns whether any fault is injected.
pub(crate) fn any() -> bool {
    PLANTED.load(Ordering::Relaxed) != 0
}

/// Overflows the stack if `plant` is injected.
#[cold]
pub(crate) fn run_over(plant: Plant) {
    if is(plant) {
        deeper(0);
    }
}

/// Recurses without end.
#[expect(unconditional_recursion, reason = "the planted fault")]
fn deeper(depth: u64) -> u64 {
    let words = core::hint::black_box([depth; 32]);
    deeper(depth + 1) + words[depth as usize % 32]
}
