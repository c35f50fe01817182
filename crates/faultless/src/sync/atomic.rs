//! The facade for all atomics:
//!
//! - normally: `core::sync::atomic`;
//! - `--cfg loom`: the model checker's atomics, with all reorderings, for models of one protocol;
//! - `--cfg shuttle`: core's, wrapped so that a scheduler may run another thread before every
//!   access, for scenarios of the whole subsystem in sequentially consistent order;
//! - `--features observe`: core's, wrapped so that every access reports its address.

#[cfg(loom)]
pub use loom::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering, fence,
};

#[cfg(not(any(loom, shuttle, feature = "observe")))]
pub use core::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering, fence,
};

#[cfg(all(any(shuttle, feature = "observe"), not(loom)))]
pub use super::observe::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64};
#[cfg(all(any(shuttle, feature = "observe"), not(loom)))]
pub use core::sync::atomic::{Ordering, fence};

use super::mutant::{Mutant, lost};

/// Hints to the CPU that this is a wait loop; under the model checker, lets another thread run.
#[inline(always)]
pub fn spin_hint() {
    #[cfg(loom)]
    loom::thread::yield_now();
    #[cfg(all(shuttle, not(loom)))]
    shuttle::thread::yield_now();
    #[cfg(not(any(loom, shuttle)))]
    core::hint::spin_loop();
}

/// Makes the `SeqCst` read-modify-write immediately before a full fence: all earlier stores are
/// visible to all CPUs before any later read.
///
/// Free on x86-64, where the locked instruction has already drained the store buffer. Elsewhere,
/// and under the model checker, which gives `SeqCst` accesses no additional order, this is a fence.
#[inline(always)]
pub fn fence_after_rmw() {
    if lost(Mutant::FaultFence) {
        return;
    }
    #[cfg(all(target_arch = "x86_64", not(any(loom, miri))))]
    core::sync::atomic::compiler_fence(Ordering::SeqCst);
    #[cfg(not(all(target_arch = "x86_64", not(any(loom, miri)))))]
    fence(Ordering::SeqCst);
}

/// Reports a read of plain data reached through a published pointer: the cache of another CPU may
/// have to supply the data. Does nothing in builds without `observe`.
#[inline(always)]
#[cfg_attr(feature = "observe", track_caller)]
pub fn reads<T: ?Sized>(data: &T) {
    #[cfg(all(feature = "observe", not(loom)))]
    super::observe::before(data, super::observe::Intent::Read);
    #[cfg(not(all(feature = "observe", not(loom))))]
    let _ = data;
}

/// Loads a value on the same cache line as the previous load. Builds that count accesses to lines
/// do not count the line again.
#[inline(always)]
pub fn load_beside(value: &AtomicU64, order: Ordering) -> u64 {
    #[cfg(all(any(shuttle, feature = "observe"), not(loom)))]
    return value.load_beside(order);
    #[cfg(not(all(any(shuttle, feature = "observe"), not(loom))))]
    value.load(order)
}

/// Reports an allocation of memory for `count` values of `T` at `at`. Does nothing in builds
/// without `observe`.
#[inline(always)]
pub fn made<T>(at: *const T, count: usize) {
    #[cfg(all(feature = "observe", not(loom)))]
    super::observe::tell_made(at.addr(), size_of::<T>() * count, core::any::type_name::<T>());
    #[cfg(not(all(feature = "observe", not(loom))))]
    let _ = (at, count);
}
