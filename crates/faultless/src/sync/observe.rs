//! Atomics that report every access (feature `observe`): writes, for tests that count written cache
//! lines; and all accesses in advance, for a machine that simulates CPUs and their caches. A
//! scheduler can also run another thread before every access (`--cfg shuttle`), for scenarios of
//! the whole subsystem.
//!
//! Each type wraps core's type, with the same layout and the same operations. After each operation
//! that takes the cache line for writing, a hook is called with the address, the size, the kind,
//! and the source location of the operation (for a spin lock, the location of the lock call). The
//! one hook of the process runs on the writing thread, after the write, and must not panic. Writes
//! of plain data are not reported: no two CPUs write the same plain data concurrently.
//!
//! A [`Watch`] is called *before* each access, including loads. The watch may run other CPUs first;
//! the access follows immediately after the return. Plain data read through a published pointer
//! (tree nodes, VMAs) is reported at the dereference ([`reads`](super::atomic::reads)), and new
//! memory at the allocation ([`made`](super::atomic::made)).

use core::panic::Location;
use core::sync::atomic::{self as plain, AtomicPtr as Plain, Ordering};

/// The kind of a write to a cache line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Write {
    /// A plain store.
    Store,
    /// A read-modify-write, or a successful compare-exchange.
    Modify,
    /// A failed compare-exchange: no value changed, but the hardware has taken the line for writing
    /// from its former CPU.
    FailedCompare,
}

/// A callback for a write to the `bytes` bytes at `address`, made `at` a source location.
pub type Hook = fn(address: usize, bytes: usize, kind: Write, at: &'static Location<'static>);

/// The kind of an access that is about to happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Intent {
    /// An atomic load.
    Load,
    /// A plain read of data behind a published pointer.
    Read,
    /// A store.
    Store,
    /// A read-modify-write, or a compare-exchange, which may fail.
    Modify,
}

/// Callbacks for accesses before they happen.
#[derive(Clone, Copy, Debug)]
pub struct Watch {
    /// Called when the `bytes` bytes at `address` are about to be accessed, `at` a source location.
    pub before: fn(address: usize, bytes: usize, intent: Intent, at: &'static Location<'static>),
    /// Called when the `bytes` bytes at `address` were allocated for a value of the type `what`.
    pub made: fn(address: usize, bytes: usize, what: &'static str),
}

/// The hook as a pointer; null if there is none.
static HOOK: Plain<()> = Plain::new(core::ptr::null_mut());
static WATCH: Plain<Watch> = Plain::new(core::ptr::null_mut());

/// Sets the watch for all accesses, or removes it.
///
/// # Safety
/// The callbacks run in the middle of operations, and must not call the subsystem on the current
/// CPU. A callback may switch to the stack of another CPU, and back.
pub unsafe fn watch(watch: Option<&'static Watch>) {
    let watch = watch.map_or(core::ptr::null_mut(), |watch| core::ptr::from_ref(watch).cast_mut());
    WATCH.store(watch, Ordering::Release);
}

#[inline]
fn watching() -> Option<&'static Watch> {
    // SAFETY: null, or from a `'static` reference that `watch` stored.
    unsafe { WATCH.load(Ordering::Acquire).as_ref() }
}

#[inline]
#[track_caller]
pub(super) fn before<T: ?Sized>(place: &T, intent: Intent) {
    if let Some(watch) = watching() {
        let address = core::ptr::from_ref(place).addr();
        (watch.before)(address, size_of_val(place), intent, Location::caller());
    }
}

#[cfg(feature = "observe")]
#[inline]
pub(super) fn tell_made(address: usize, bytes: usize, what: &'static str) {
    if let Some(watch) = watching() {
        (watch.made)(address, bytes, what);
    }
}

/// Sets the hook for writes, or removes it.
///
/// # Safety
/// The hook runs in the middle of operations, and must not call the subsystem.
pub unsafe fn install(hook: Option<Hook>) {
    HOOK.store(hook.map_or(core::ptr::null_mut(), |hook| hook as *mut ()), Ordering::Release);
}

#[inline]
#[track_caller]
fn report<T>(place: &T, kind: Write) {
    let hook = HOOK.load(Ordering::Acquire);
    if !hook.is_null() {
        // SAFETY: only `install` stores here, and a non-null value was a `Hook`.
        let hook = unsafe { core::mem::transmute::<*mut (), Hook>(hook) };
        hook(core::ptr::from_ref(place).addr(), size_of::<T>(), kind, Location::caller());
    }
}

/// Lets a scheduler that interleaves threads run another thread.
#[inline(always)]
fn interleave() {
    #[cfg(shuttle)]
    if !moment::lasts() {
        // The first step of the scheduler's own atomics. The rest of their work costs more than
        // this step.
        shuttle_engine::runtime::thread::switch();
    }
}

#[cfg(shuttle)]
pub use moment::at_once;

#[cfg(shuttle)]
mod moment {
    use core::cell::Cell;

    std::thread_local! {
        static LASTS: Cell<bool> = const { Cell::new(false) };
    }

    #[inline]
    pub(super) fn lasts() -> bool {
        LASTS.get()
    }

    /// Restores the flag also if the check has failed.
    struct Restore(bool);

    impl Drop for Restore {
        fn drop(&mut self) {
            LASTS.set(self.0);
        }
    }

    /// Calls `what` while no other thread runs, for reads or preparations of a check. `what` must
    /// not wait for another thread.
    pub fn at_once<R>(what: impl FnOnce() -> R) -> R {
        let _restore = Restore(LASTS.replace(true));
        what()
    }
}

macro_rules! observed {
    ($(#[$doc:meta])* $name:ident $(<$t:ident>)?, $value:ty, [$($rmw:ident),*]) => {
        $(#[$doc])*
        #[derive(Debug, Default)]
        #[repr(transparent)]
        pub struct $name $(<$t>)? (plain::$name $(<$t>)?);

        impl $(<$t>)? $name $(<$t>)? {
            /// As core's.
            #[inline]
            pub const fn new(value: $value) -> Self {
                Self(plain::$name::new(value))
            }

            /// As core's; reported.
            #[inline]
            #[track_caller]
            pub fn load(&self, order: Ordering) -> $value {
                interleave();
                before(self, Intent::Load);
                self.0.load(order)
            }

            /// As core's; reported.
            #[inline]
            #[track_caller]
            pub fn store(&self, value: $value, order: Ordering) {
                interleave();
                before(self, Intent::Store);
                self.0.store(value, order);
                report(self, Write::Store);
            }

            observed!(@modify $value, swap $(, $rmw)*);

            /// As core's; reported.
            ///
            /// # Errors
            /// The value found, if it is not `current`.
            #[inline]
            #[track_caller]
            pub fn compare_exchange(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                interleave();
                before(self, Intent::Modify);
                self.compared(self.0.compare_exchange(current, new, success, failure))
            }

            /// As core's; reported.
            ///
            /// # Errors
            /// The value found, if it is not `current`, or on a spurious failure.
            #[inline]
            #[track_caller]
            pub fn compare_exchange_weak(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                interleave();
                before(self, Intent::Modify);
                self.compared(self.0.compare_exchange_weak(current, new, success, failure))
            }

            #[track_caller]
            fn compared(&self, result: Result<$value, $value>) -> Result<$value, $value> {
                report(self, if result.is_ok() { Write::Modify } else { Write::FailedCompare });
                result
            }

            /// As core's; not reported, because no other CPU can reach the value.
            #[inline]
            pub fn get_mut(&mut self) -> &mut $value {
                self.0.get_mut()
            }

            /// As core's.
            #[inline]
            pub fn into_inner(self) -> $value {
                self.0.into_inner()
            }
        }
    };
    (@modify $value:ty, $($rmw:ident),*) => {$(
        /// As core's; reported.
        #[inline]
        #[track_caller]
        pub fn $rmw(&self, value: $value, order: Ordering) -> $value {
            interleave();
            before(self, Intent::Modify);
            let old = self.0.$rmw(value, order);
            report(self, Write::Modify);
            old
        }
    )*};
}

observed!(
    /// Core's `AtomicBool`, reporting.
    AtomicBool, bool, [fetch_or, fetch_and]
);
observed!(
    /// Core's `AtomicPtr`, reporting.
    AtomicPtr<T>, *mut T, []
);
observed!(
    /// Core's `AtomicU8`, reporting.
    AtomicU8, u8, [fetch_add, fetch_sub, fetch_or, fetch_and, fetch_max]
);
observed!(
    /// Core's `AtomicU32`, reporting.
    AtomicU32, u32, [fetch_add, fetch_sub, fetch_or, fetch_and, fetch_max]
);
observed!(
    /// Core's `AtomicU64`, reporting.
    AtomicU64, u64, [fetch_add, fetch_sub, fetch_or, fetch_and, fetch_max]
);

impl AtomicU64 {
    /// See [`load_beside`](crate::sync::atomic::load_beside).
    #[inline]
    pub(super) fn load_beside(&self, order: Ordering) -> u64 {
        interleave();
        self.0.load(order)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::thread_local;
    use std::vec::Vec;

    thread_local! {
        static HEARD: RefCell<Vec<(usize, usize, Write)>> = const { RefCell::new(Vec::new()) };
    }

    /// The hook is shared by the process: threads of other tests record into their own lists.
    fn hear(address: usize, bytes: usize, kind: Write, at: &'static Location<'static>) {
        assert!(at.file().ends_with("sync/observe.rs"), "{at}");
        HEARD.with(|heard| heard.borrow_mut().push((address, bytes, kind)));
    }

    #[test]
    fn the_hook_reports_writes_but_no_reads() {
        let mut word = AtomicU32::new(1);
        let flag = AtomicBool::new(false);
        let at = (core::ptr::from_ref(&word).addr(), 4);
        // SAFETY: the hook only records its arguments.
        unsafe { install(Some(hear)) };
        word.store(2, Ordering::Relaxed);
        assert_eq!(word.load(Ordering::Relaxed), 2);
        assert_eq!(word.fetch_add(1, Ordering::Relaxed), 2);
        assert_eq!(word.compare_exchange(9, 0, Ordering::Relaxed, Ordering::Relaxed), Err(3));
        assert_eq!(word.compare_exchange(3, 4, Ordering::Relaxed, Ordering::Relaxed), Ok(3));
        assert!(!flag.swap(true, Ordering::Relaxed));
        // SAFETY: removes the hook.
        unsafe { install(None) };
        *word.get_mut() = 5;
        word.store(6, Ordering::Relaxed);
        let kinds = [Write::Store, Write::Modify, Write::FailedCompare, Write::Modify];
        let mut expected: Vec<_> = kinds.map(|kind| (at.0, at.1, kind)).into();
        expected.push((core::ptr::from_ref(&flag).addr(), 1, Write::Modify));
        assert_eq!(HEARD.take(), expected);
    }
}
