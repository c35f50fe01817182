//! Fallible heap allocation: the subsystem never aborts because memory is short.

use crate::error::OutOfMemory;
use crate::sync::atomic::{AtomicU64, Ordering, fence, made};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::alloc::Layout;
use core::fmt;
use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;

/// Returns a box of `value`.
///
/// # Errors
/// [`OutOfMemory`] if the heap is exhausted; `value` is dropped.
pub fn try_box<T>(value: T) -> Result<Box<T>, OutOfMemory> {
    try_box_with(|| value)
}

/// Returns a box of the result of `make`, constructed in place.
///
/// # Errors
/// [`OutOfMemory`] if the heap is exhausted; `make` is not called.
#[inline(always)]
pub fn try_box_with<T>(make: impl FnOnce() -> T) -> Result<Box<T>, OutOfMemory> {
    const { assert!(size_of::<T>() != 0) };
    // SAFETY: the layout is of a sized type that is not zero-sized.
    let at = unsafe { alloc::alloc::alloc(Layout::new::<T>()) }.cast::<T>();
    let at = NonNull::new(at).ok_or(OutOfMemory)?;
    made(at.as_ptr(), 1);
    // SAFETY: just allocated for a `T` by the global allocator, which `Box` uses to free.
    unsafe {
        at.write(make());
        Ok(Box::from_raw(at.as_ptr()))
    }
}

/// A list with a fixed capacity: `push` allocates no memory.
#[derive(Debug)]
pub(crate) struct Bounded<T>(Vec<T>);

impl<T> Bounded<T> {
    /// Returns a list with room for at least `most` values.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the heap is exhausted.
    pub(crate) fn try_new(most: usize) -> Result<Self, OutOfMemory> {
        let mut list = Vec::new();
        list.try_reserve_exact(most).map_err(|_| OutOfMemory)?;
        Ok(Self(list))
    }

    /// Adds `value` at the end, unless the list is full. Returns whether it was added.
    pub(crate) fn push(&mut self, value: T) -> bool {
        push_within_capacity(&mut self.0, value)
    }

    pub(crate) fn is_full(&self) -> bool {
        self.0.len() == self.0.capacity()
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

impl<T> Deref for Bounded<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T> DerefMut for Bounded<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.0
    }
}

/// Adds `value` at the end of `list`.
///
/// # Errors
/// [`OutOfMemory`] if the heap is exhausted; `value` is dropped.
pub(crate) fn try_push<T>(list: &mut Vec<T>, value: T) -> Result<(), OutOfMemory> {
    list.try_reserve(1).map_err(|_| OutOfMemory)?;
    if push_within_capacity(list, value) { Ok(()) } else { Err(OutOfMemory) }
}

/// Adds `value` at the end, unless the list is full. Returns whether it was added.
fn push_within_capacity<T>(list: &mut Vec<T>, value: T) -> bool {
    // Not `Vec::push`: its code for a full list aborts the program if the heap is exhausted.
    let Some(free) = list.spare_capacity_mut().first_mut() else { return false };
    free.write(value);
    // SAFETY: within the capacity, and written just now.
    unsafe { list.set_len(list.len() + 1) };
    true
}

struct Counted<T> {
    owners: AtomicU64,
    value: T,
}

/// Shared ownership like `alloc::sync::Arc`, but with fallible allocation.
pub struct Shared<T> {
    at: NonNull<Counted<T>>,
}

// SAFETY: as for `Arc`: the value is shared between all owning threads, and dropped by the last of
// them.
unsafe impl<T: Send + Sync> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// Returns the first owner of `value`.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the heap is exhausted; `value` is dropped.
    pub fn try_new(value: T) -> Result<Self, OutOfMemory> {
        let counted = try_box(Counted { owners: AtomicU64::new(1), value })?;
        Ok(Self { at: NonNull::from(Box::leak(counted)) })
    }

    fn counted(&self) -> &Counted<T> {
        // SAFETY: the value is alive while an owner exists.
        unsafe { self.at.as_ref() }
    }

    /// Returns whether both own the same value.
    pub fn same(&self, other: &Self) -> bool {
        self.at == other.at
    }

    /// Returns a number that differs between simultaneously alive values.
    pub fn id(&self) -> u64 {
        self.at.as_ptr() as u64
    }

    /// Drops the ownership; the last owner gets the value.
    pub fn into_last(self) -> Option<T> {
        self.into_last_after(|_| {})
    }

    /// As [`into_last`](Self::into_last), but calls `moves` for a value that is about to move.
    pub(crate) fn into_last_after(self, moves: impl FnOnce(&mut T)) -> Option<T> {
        let at = self.at;
        core::mem::forget(self);
        // SAFETY: the caller's ownership, not dropped before, is dropped here.
        unsafe { Self::was_last(at) }.then(|| {
            // The value is not accessed through a box here, because a box would claim the count as
            // well. SAFETY: this was the last ownership, so the value belongs to this thread.
            moves(unsafe { &mut (*at.as_ptr()).value });
            // SAFETY: as above; the box was allocated by `try_new`.
            unsafe { Box::from_raw(at.as_ptr()) }.value
        })
    }

    /// Drops an ownership. Returns whether it was the last; if so, all earlier accesses to the
    /// value happen before the return.
    ///
    /// # Safety
    /// The caller has the ownership `at`, and does not use it afterwards.
    #[inline]
    unsafe fn was_last(at: NonNull<Counted<T>>) -> bool {
        // SAFETY: alive until the count reaches zero, which the caller's ownership prevented so
        // far.
        let last = unsafe { at.as_ref() }.owners.fetch_sub(1, Ordering::Release) == 1;
        if last {
            fence(Ordering::Acquire);
        }
        last
    }

    /// Drops the value. A separate function, to keep this code off the common path of a drop.
    ///
    /// # Safety
    /// No owner is left.
    #[cold]
    #[inline(never)]
    unsafe fn end(at: NonNull<Counted<T>>) {
        // SAFETY: allocated by `try_new`; the caller's promise.
        drop(unsafe { Box::from_raw(at.as_ptr()) });
    }

    /// Returns the pointer that [`into_raw`](Self::into_raw) would return.
    #[inline(always)]
    pub fn as_raw(&self) -> NonNull<()> {
        self.at.cast()
    }

    /// Returns the ownership as a raw pointer, for an atomic.
    pub fn into_raw(self) -> *mut () {
        let raw = self.at.as_ptr().cast();
        core::mem::forget(self);
        raw
    }

    /// Returns the value of an ownership returned by [`into_raw`](Self::into_raw).
    ///
    /// # Safety
    /// `raw` was returned by `into_raw` of the same type, and is not converted back during `'a`.
    #[inline]
    pub unsafe fn peek_raw<'a>(raw: NonNull<()>) -> &'a T {
        // SAFETY: alive as long as the ownership; the caller's promise.
        unsafe { &(*raw.cast::<Counted<T>>().as_ptr()).value }
    }

    /// Returns another ownership of the value behind a pointer from [`as_raw`](Self::as_raw).
    ///
    /// # Safety
    /// `raw` was returned by `as_raw` of the same type, and an owner exists during the call.
    pub unsafe fn clone_raw(raw: NonNull<()>) -> Self {
        let owner = core::mem::ManuallyDrop::new(Self { at: raw.cast() });
        Self::clone(&owner)
    }

    /// As [`clone_raw`](Self::clone_raw), if an owner still exists.
    ///
    /// # Safety
    /// `raw` was returned by `as_raw` of the same type, and the value's memory is not freed during
    /// the call.
    pub(crate) unsafe fn clone_raw_unless_last(raw: NonNull<()>) -> Option<Self> {
        let at = raw.cast::<Counted<T>>();
        // Only the count is accessed, because the last owner may be changing the value. SAFETY: the
        // caller's promise.
        let owners = unsafe { &(*at.as_ptr()).owners };
        let mut now = owners.load(Ordering::Relaxed);
        while now != 0 {
            let (acquire, relaxed) = (Ordering::Acquire, Ordering::Relaxed);
            match owners.compare_exchange_weak(now, now + 1, acquire, relaxed) {
                Ok(_) => return Some(Self { at }),
                Err(changed) => now = changed,
            }
        }
        None
    }

    /// Returns the ownership which [`into_raw`](Self::into_raw) turned into `raw`.
    ///
    /// # Safety
    /// `raw` was returned by `into_raw` of the same type, and is converted back once.
    pub unsafe fn from_raw(raw: NonNull<()>) -> Self {
        Self { at: raw.cast() }
    }
}

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        self.counted().owners.fetch_add(1, Ordering::Relaxed);
        Self { at: self.at }
    }
}

impl<T> Deref for Shared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.counted().value
    }
}

impl<T> Drop for Shared<T> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: a dropped owner drops its ownership once.
        if unsafe { Self::was_last(self.at) } {
            // SAFETY: no owner is left.
            unsafe { Self::end(self.at) };
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for Shared<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    struct Tell<'a>(&'a AtomicU32);

    impl Drop for Tell<'_> {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_bounded_list_takes_values_up_to_its_capacity() {
        let mut list = Bounded::try_new(3).unwrap();
        let pushed = (0..1000).take_while(|value| list.push(*value)).count();
        assert!((3..1000).contains(&pushed) && list.is_full());
        assert!((0..pushed).eq(list.iter().copied()));
        list.clear();
        assert!(list.push(7) && *list == [7]);
        assert!(Bounded::<u64>::try_new(usize::MAX).is_err());
    }

    #[test]
    fn the_last_owner_drops_the_value() {
        let dropped = AtomicU32::new(0);
        let first = Shared::try_new(Tell(&dropped)).unwrap();
        let second = first.clone();
        assert!(first.same(&second));
        assert!(first.into_last().is_none());
        assert_eq!(dropped.load(Ordering::Relaxed), 0);
        // SAFETY: the raw ownership is converted back once.
        let third: Shared<Tell<'_>> =
            unsafe { Shared::from_raw(NonNull::new(second.into_raw()).unwrap()) };
        assert!(third.into_last().is_some());
        assert_eq!(dropped.load(Ordering::Relaxed), 1);
    }
}
