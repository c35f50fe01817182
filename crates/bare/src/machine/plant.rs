//! Faults that tests plant, with `plant=NAME` on the command line, to see that they are seen.
//!
//! - `skip-invlpg`: a CPU does not drop its own translations when it should;
//! - `lost-ipi`: a CPU that is to serve flush requests is not interrupted, nor does the tick serve them;
//! - `early-reuse`: a CPU that is interrupted to serve flush requests says that it has, and drops the
//!   translations at the next tick only.

use crate::percpu;
use core::sync::atomic::{AtomicU8, Ordering};

/// A planted fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Plant {
    SkipInvlpg = 1,
    LostIpi = 2,
    EarlyReuse = 3,
}

/// That which is planted; 0: none.
static PLANTED: AtomicU8 = AtomicU8::new(0);

/// Plants the fault with this name. `false`: there is none.
pub(crate) fn set(name: &str) -> bool {
    let plant = match name {
        "skip-invlpg" => Plant::SkipInvlpg,
        "lost-ipi" => Plant::LostIpi,
        "early-reuse" => Plant::EarlyReuse,
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

/// What the tick does about flushes: it serves what an interrupt should have had served already, or
/// what was put off to it.
pub(crate) fn tick() {
    if !is(Plant::LostIpi) {
        percpu::cpu().serve_flushes();
    }
    if percpu::this().late.take() {
        super::reload();
    }
}
