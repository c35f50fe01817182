//! Faults that tests plant, with `plant=NAME` on the command line, to see that they are seen.
//!
//! - `skip-invlpg`: a CPU does not drop its own translations when it should;
//! - `lost-ipi`: a CPU that is to serve flush requests is not interrupted, nor does the tick serve them;
//! - `early-reuse`: a CPU that is interrupted to serve flush requests says that it has, and drops the
//!   translations at the next tick only;
//! - `overrun-thread`, `overrun-idle`: a tick runs over the stack it is on, a thread's or that of the idle loop;
//! - `overrun-fatal`: both, and then the stack of fatal exceptions is run over too.

use core::sync::atomic::{AtomicU8, Ordering};

/// A planted fault.
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

/// That which is planted; 0: none.
static PLANTED: AtomicU8 = AtomicU8::new(0);

/// Plants the fault with this name. `false`: there is none.
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

/// Whether this fault is planted.
#[inline(always)]
pub(crate) fn is(plant: Plant) -> bool {
    PLANTED.load(Ordering::Relaxed) == plant as u8
}

/// Whether any is.
pub(crate) fn any() -> bool {
    PLANTED.load(Ordering::Relaxed) != 0
}

/// Runs over the stack if `plant` is planted.
#[cold]
pub(crate) fn run_over(plant: Plant) {
    if is(plant) {
        deeper(0);
    }
}

/// Calls itself for ever.
#[expect(unconditional_recursion, reason = "this is the fault that is planted")]
fn deeper(depth: u64) -> u64 {
    let words = core::hint::black_box([depth; 32]);
    deeper(depth + 1) + words[depth as usize % 32]
}
