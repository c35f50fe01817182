//! The one place where atomics come from.
//!
//! - normally: `core::sync::atomic`;
//! - `--cfg loom`: the model checker's, for the protocol models;
//! - `--features observe`: core's, wrapped so that every write reports the address it goes to.

#[cfg(loom)]
pub use loom::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering, fence,
};

#[cfg(not(any(loom, feature = "observe")))]
pub use core::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering, fence,
};

#[cfg(all(feature = "observe", not(loom)))]
pub use super::observe::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64};
#[cfg(all(feature = "observe", not(loom)))]
pub use core::sync::atomic::{Ordering, fence};

/// Tells the CPU that this is a wait loop; under the model checker, lets another thread run.
#[inline(always)]
pub fn spin_hint() {
    #[cfg(loom)]
    loom::thread::yield_now();
    #[cfg(not(loom))]
    core::hint::spin_loop();
}

/// Makes the `SeqCst` read-modify-write just before it a full fence: what was stored before it is
/// visible to all before anything after it is read.
///
/// Free on x86-64, where the locked instruction has emptied the store buffer already; elsewhere,
/// and under the model checker, which gives `SeqCst` accesses no order of their own, it is a fence.
#[inline(always)]
pub fn fence_after_rmw() {
    #[cfg(all(target_arch = "x86_64", not(any(loom, miri))))]
    core::sync::atomic::compiler_fence(Ordering::SeqCst);
    #[cfg(not(all(target_arch = "x86_64", not(any(loom, miri)))))]
    fence(Ordering::SeqCst);
}
