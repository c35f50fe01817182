//! A spin lock, for critical sections of a few instructions without waits.
//!
//! Test-and-test-and-set: a waiter reads until the lock looks free, and only then writes the line.
//! The lock is not fair; fair users have their own queue ([`range`](super::range)).
//!
//! A waiter backs off exponentially (see [`Pauses`]). A queue of waiters would move the line less
//! often; but on virtual CPUs all waiters would wait for the one that the host has descheduled.

use super::atomic::{AtomicBool, Ordering};
use super::mutant::{Mutant, lost};
use super::order::{self, Class, Mark, Outside};
use super::wait::{Pauses, Wait};
use core::fmt;
use core::marker::PhantomData;
use core::ops::{Deref, DerefMut};

#[cfg(loom)]
use loom::cell::UnsafeCell;

/// Core's cell with the interface of the model checker's cell, which checks each access.
#[cfg(not(loom))]
struct UnsafeCell<T>(core::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    const fn new(value: T) -> Self {
        Self(core::cell::UnsafeCell::new(value))
    }

    #[inline(always)]
    fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    #[inline(always)]
    fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

/// A value that one CPU at a time may access. `C` is the class of the lock in the [lock
/// order](super::order).
///
/// *Invariant (lock owns):* while `held` is true, only the one live [`SpinGuard`] accesses `value`.
pub struct SpinLock<T, C = Outside> {
    held: AtomicBool,
    class: PhantomData<fn() -> C>,
    value: UnsafeCell<T>,
}

// SAFETY: `value` is accessed by one thread at a time (lock owns), which amounts to sending the
// value.
unsafe impl<T: Send, C> Sync for SpinLock<T, C> {}
// SAFETY: the lock owns the value.
unsafe impl<T: Send, C> Send for SpinLock<T, C> {}

impl<T> SpinLock<T> {
    /// Returns a free lock around `value`, outside the subsystem's order.
    #[cfg(not(loom))]
    pub const fn new(value: T) -> Self {
        Self::ordered(value)
    }

    /// Returns a free lock around `value`, outside the subsystem's order.
    #[cfg(loom)]
    pub fn new(value: T) -> Self {
        Self::ordered(value)
    }
}

impl<T, C> SpinLock<T, C> {
    /// Returns a free lock around `value`.
    #[cfg(not(loom))]
    pub const fn ordered(value: T) -> Self {
        let held = AtomicBool::new(false);
        Self { held, class: PhantomData, value: UnsafeCell::new(value) }
    }

    /// Returns a free lock around `value`.
    #[cfg(loom)]
    pub fn ordered(value: T) -> Self {
        let held = AtomicBool::new(false);
        Self { held, class: PhantomData, value: UnsafeCell::new(value) }
    }

    /// Takes the lock, waiting as `wait` does.
    ///
    /// # Panics
    /// In builds with debug assertions, on a violation of the lock order; see [`order`].
    #[inline]
    #[cfg_attr(feature = "observe", track_caller)]
    pub fn lock<'a, W: Wait + ?Sized>(&'a self, wait: &'a W) -> SpinGuard<'a, T, C>
    where
        C: Class,
    {
        order::before::<C>(wait);
        let mut guard = match self.try_lock() {
            Some(guard) => guard,
            None => self.lock_at_length(wait),
        };
        guard.mark = order::hold::<C>(wait);
        guard
    }

    /// [`lock`](Self::lock), but returns `None` as soon as `given_up` returns true during the wait.
    ///
    /// # Panics
    /// As [`lock`](Self::lock).
    #[inline]
    #[cfg_attr(feature = "observe", track_caller)]
    pub fn lock_unless<'a, W: Wait + ?Sized>(
        &'a self,
        wait: &'a W,
        given_up: impl Fn() -> bool,
    ) -> Option<SpinGuard<'a, T, C>>
    where
        C: Class,
    {
        order::before::<C>(wait);
        let mut guard = match self.try_lock() {
            Some(guard) => guard,
            None => self.lock_at_length_unless(wait, &given_up)?,
        };
        guard.mark = order::hold::<C>(wait);
        Some(guard)
    }

    /// Takes the lock after waiting for another CPU.
    #[cold]
    #[inline(never)]
    #[cfg_attr(feature = "observe", track_caller)]
    fn lock_at_length<'a, W: Wait + ?Sized>(&'a self, wait: &'a W) -> SpinGuard<'a, T, C> {
        loop {
            if let Some(guard) = self.lock_at_length_unless(wait, &|| false) {
                return guard;
            }
        }
    }

    /// [`lock_at_length`](Self::lock_at_length), until `given_up` returns true.
    #[cold]
    #[inline(never)]
    #[cfg_attr(feature = "observe", track_caller)]
    fn lock_at_length_unless<'a, W: Wait + ?Sized>(
        &'a self,
        wait: &'a W,
        given_up: &dyn Fn() -> bool,
    ) -> Option<SpinGuard<'a, T, C>> {
        let mut pauses = Pauses::default();
        loop {
            pauses.pause(wait);
            if given_up() {
                return None;
            }
            if !self.held.load(Ordering::Relaxed)
                && let Some(guard) = self.try_lock()
            {
                return Some(guard);
            }
        }
    }

    /// Takes the lock, which no other CPU can access now. So the lock order does not apply.
    #[inline]
    pub fn lock_mut(&mut self) -> SpinGuard<'_, T, C> {
        self.held.store(true, Ordering::Relaxed);
        SpinGuard { lock: self, mark: Mark::none() }
    }

    /// Takes the lock if it is free. Not recorded in the lock order.
    #[inline]
    #[cfg_attr(feature = "observe", track_caller)]
    pub fn try_lock(&self) -> Option<SpinGuard<'_, T, C>> {
        // Acquire synchronises with the Release of the guard's drop. Not a swap, which would store
        // even on failure: the model checker then could not order the holder's release after it.
        let taken =
            self.held.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok();
        // Lazy, because dropping a guard that does not hold the lock would free the lock.
        (taken || lost(Mutant::SpinExcludes)).then(|| SpinGuard { lock: self, mark: Mark::none() })
    }

    /// Returns the value, which no other CPU can access now.
    #[inline]
    pub fn get_mut(&mut self) -> &mut T {
        // SAFETY: `&mut self` excludes guards and other threads.
        self.value.with_mut(|value| unsafe { &mut *value })
    }
}

impl<T: Default, C> Default for SpinLock<T, C> {
    fn default() -> Self {
        Self::ordered(T::default())
    }
}

impl<T: fmt::Debug, C> fmt::Debug for SpinLock<T, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.try_lock() {
            Some(guard) => write!(f, "SpinLock({:?})", *guard),
            None => f.write_str("SpinLock(held)"),
        }
    }
}

/// Holds a [`SpinLock`]; the drop frees the lock.
#[must_use = "the drop of the guard releases the lock"]
pub struct SpinGuard<'a, T, C = Outside> {
    lock: &'a SpinLock<T, C>,
    mark: Mark<'a>,
}

// SAFETY: sharing the guard shares only `&T`. (Without this bound, a guard of a
// `T: Send + !Sync` would be `Sync`, because the lock is.)
unsafe impl<T: Sync, C> Sync for SpinGuard<'_, T, C> {}

impl<T, C> Deref for SpinGuard<'_, T, C> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: this guard has the only access to the value (lock owns), borrowed shared.
        self.lock.value.with(|value| unsafe { &*value })
    }
}

impl<T, C> DerefMut for SpinGuard<'_, T, C> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this guard has the only access to the value (lock owns), borrowed exclusively.
        self.lock.value.with_mut(|value| unsafe { &mut *value })
    }
}

impl<T, C> Drop for SpinGuard<'_, T, C> {
    #[inline]
    fn drop(&mut self) {
        self.lock.held.store(false, Ordering::Release);
    }
}

impl<T: fmt::Debug, C> fmt::Debug for SpinGuard<'_, T, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SpinGuard({:?})", **self)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sync::wait::{LOOKS_BEFORE_PARKING, MOST_PAUSES, Spin, Yield};
    use core::cell::{Cell, RefCell};

    #[test]
    fn one_holder_at_a_time() {
        let mut lock = SpinLock::new(1);
        let mut guard = lock.lock(&Spin);
        *guard += 1;
        assert!(lock.try_lock().is_none());
        assert!(lock.try_lock().is_none(), "a failed attempt does not change the lock");
        drop(guard);
        assert_eq!(*lock.try_lock().unwrap(), 2);
        *lock.get_mut() += 1;
        assert_eq!(*lock.lock(&Spin), 3);
    }

    #[test]
    fn no_increment_is_lost() {
        const TIMES: u64 = if cfg!(miri) { 50 } else { 20_000 };
        let lock = SpinLock::new(0u64);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..TIMES {
                        *lock.lock(&Yield) += 1;
                    }
                });
            }
        });
        assert_eq!(*lock.lock(&Spin), 4 * TIMES);
    }

    /// A waiter's clock, and the guard it waits for, which is dropped at `free_at`. Releasing the
    /// core takes much longer than another read.
    struct Clock<'a> {
        now: Cell<u64>,
        looks: Cell<u32>,
        free_at: u64,
        holder: RefCell<Option<SpinGuard<'a, ()>>>,
    }

    impl Clock<'_> {
        const LONG: u64 = 1000;
    }

    impl Wait for Clock<'_> {
        fn wait(&self, looks: u32) {
            assert_eq!(looks, self.looks.replace(looks + 1));
            let long = looks >= LOOKS_BEFORE_PARKING;
            self.now.update(|now| now + if long { Self::LONG } else { 1 });
            if self.now.get() >= self.free_at {
                self.holder.take();
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "on one thread; the interpreter takes minutes")]
    fn waiters_read_rarely_and_wait_at_most_twice_the_needed_time() {
        let waited = |free_at| {
            let lock = SpinLock::new(());
            let holder = RefCell::new(Some(lock.try_lock().unwrap()));
            let clock = Clock { now: Cell::new(0), looks: Cell::new(0), free_at, holder };
            drop(lock.lock(&clock));
            clock.now.get()
        };
        assert_eq!([1, 2, 4, 8, 33].map(waited), [1, 3, 7, 15, 63]);
        let parking = u64::from(LOOKS_BEFORE_PARKING);
        let most = u64::from(MOST_PAUSES) * Clock::LONG;
        for looks in 0..4 * u64::from(MOST_PAUSES) {
            let free_at = looks.min(parking) + looks.saturating_sub(parking) * Clock::LONG;
            let waited = waited(free_at);
            assert!(waited <= (2 * free_at).max(1), "{waited} of {free_at}");
            assert!(waited < free_at.max(1) + most, "{waited} of {free_at}");
        }
    }
}
