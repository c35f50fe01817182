//! Shared ownership.
//!
//! As in `alloc`, all strong owners together hold one weak reference, so that the last weak
//! reference frees the memory.

use super::Result;
use alloc::boxed::Box;
use core::alloc::Layout;
use core::fmt;
use core::marker::PhantomData;
use core::mem::{ManuallyDrop, offset_of};
use core::ops::Deref;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicUsize, Ordering, fence};
use faultless::try_box;

/// A value with its counts; public only for the signature of [`Arc::cast`].
#[repr(C)]
pub struct Counted<T: ?Sized> {
    strong: AtomicUsize,
    /// The number of weak owners, plus one for all strong owners.
    weak: AtomicUsize,
    value: T,
}

impl<T: ?Sized> fmt::Debug for Counted<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} shares", self.strong.load(Ordering::Relaxed))
    }
}

/// A reference to a value, which is dropped with the last reference.
pub struct Arc<T: ?Sized> {
    at: NonNull<Counted<T>>,
    owns: PhantomData<Counted<T>>,
}

// SAFETY: the value is shared between threads, and dropped by the thread that owns the last
// reference.
unsafe impl<T: ?Sized + Send + Sync> Send for Arc<T> {}
// SAFETY: as above.
unsafe impl<T: ?Sized + Send + Sync> Sync for Arc<T> {}

/// A reference that keeps the memory of a value, but not the value.
pub struct Weak<T> {
    /// `None`: a reference to no value.
    at: Option<NonNull<Counted<T>>>,
    owns: PhantomData<Counted<T>>,
}

// SAFETY: as `Arc`, because a weak reference can become an `Arc`.
unsafe impl<T: Send + Sync> Send for Weak<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Weak<T> {}

impl<T> Arc<T> {
    /// Makes the first reference to `value`.
    ///
    /// # Errors
    /// [`OutOfMemory`](super::OutOfMemory) when the heap is exhausted; `value` is dropped.
    pub fn try_new(value: T) -> Result<Self> {
        let counted =
            try_box(Counted { strong: AtomicUsize::new(1), weak: AtomicUsize::new(1), value })?;
        Ok(Self { at: NonNull::from(Box::leak(counted)), owns: PhantomData })
    }

    /// Returns a weak reference.
    pub fn downgrade(this: &Self) -> Weak<T> {
        this.counted().weak.fetch_add(1, Ordering::Relaxed);
        Weak { at: Some(this.at), owns: PhantomData }
    }

    /// Returns another reference to the value at `value`.
    ///
    /// # Safety
    /// `value` is the [address](Self::as_ptr) in an `Arc` that exists during the call.
    pub unsafe fn another(value: *const T) -> Self {
        let at = value.wrapping_byte_sub(offset_of!(Counted<T>, value)).cast_mut();
        // SAFETY: the address of the value of an existing `Arc`; its counts are before the value.
        let existing = ManuallyDrop::new(unsafe {
            Self { at: NonNull::new_unchecked(at.cast()), owns: PhantomData }
        });
        Self::clone(&existing)
    }

    /// Converts the reference to another type.
    ///
    /// # Safety
    /// `cast` returns its argument, with the type changed by a conversion of the language (to a
    /// trait object).
    pub unsafe fn cast<U: ?Sized>(
        this: Self,
        cast: impl FnOnce(*mut Counted<T>) -> *mut Counted<U>,
    ) -> Arc<U> {
        let at = cast(ManuallyDrop::new(this).at.as_ptr());
        // SAFETY: by the contract, the same address.
        Arc { at: unsafe { NonNull::new_unchecked(at) }, owns: PhantomData }
    }
}

impl<T: ?Sized> Arc<T> {
    fn counted(&self) -> &Counted<T> {
        // SAFETY: the memory is alive while a reference exists.
        unsafe { self.at.as_ref() }
    }

    /// Returns whether both are references to the same value.
    pub fn ptr_eq(one: &Self, other: &Self) -> bool {
        ptr::addr_eq(one.at.as_ptr(), other.at.as_ptr())
    }

    /// Returns the address of the value.
    pub fn as_ptr(this: &Self) -> *const T {
        &raw const this.counted().value
    }

    /// Returns the number of strong references.
    pub fn strong_count(this: &Self) -> usize {
        this.counted().strong.load(Ordering::Acquire)
    }

    #[cold]
    fn drop_value(&mut self) {
        fence(Ordering::Acquire);
        let at = self.at;
        // SAFETY: this was the last strong reference, so no other code accesses the value. The weak
        // reference of the strong owners is released afterwards, even if dropping the value
        // unwinds.
        unsafe {
            let layout = Layout::for_value(at.as_ref());
            ptr::drop_in_place(&raw mut (*at.as_ptr()).value);
            release(at.as_ptr().cast(), layout);
        }
    }
}

/// Releases a weak reference; the last release frees the memory.
///
/// # Safety
/// The caller owns the reference; `layout` is the layout of the memory at `at`, which begins with
/// the two counts.
unsafe fn release(at: *mut Counted<()>, layout: Layout) {
    // SAFETY: alive until the last weak reference is released, and the caller owns one.
    if unsafe { &(*at).weak }.fetch_sub(1, Ordering::Release) == 1 {
        fence(Ordering::Acquire);
        // SAFETY: the last reference; allocated with this layout by `try_new`.
        unsafe { alloc::alloc::dealloc(at.cast(), layout) };
    }
}

impl<T: ?Sized> Clone for Arc<T> {
    #[inline]
    fn clone(&self) -> Self {
        self.counted().strong.fetch_add(1, Ordering::Relaxed);
        Self { at: self.at, owns: PhantomData }
    }
}

impl<T: ?Sized> Drop for Arc<T> {
    #[inline]
    fn drop(&mut self) {
        if self.counted().strong.fetch_sub(1, Ordering::Release) == 1 {
            self.drop_value();
        }
    }
}

impl<T: ?Sized> Deref for Arc<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.counted().value
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for Arc<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl<T> Weak<T> {
    /// Returns a reference to no value.
    pub const fn new() -> Self {
        Self { at: None, owns: PhantomData }
    }

    /// Returns a strong reference if the value still exists.
    pub fn upgrade(&self) -> Option<Arc<T>> {
        let at = self.at?;
        // SAFETY: the memory exists while a weak reference exists; only the counts are accessed.
        let strong = unsafe { &(*at.as_ptr()).strong };
        let more = |count: usize| (count != 0).then_some(count + 1);
        strong.fetch_update(Ordering::Acquire, Ordering::Relaxed, more).ok()?;
        Some(Arc { at, owns: PhantomData })
    }

    /// Returns the present or former address of the value.
    pub fn as_ptr(&self) -> *const T {
        match self.at {
            // SAFETY: the address is in the memory kept by this reference.
            Some(at) => unsafe { &raw const (*at.as_ptr()).value },
            None => ptr::null(),
        }
    }
}

impl<T> Default for Weak<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Clone for Weak<T> {
    fn clone(&self) -> Self {
        if let Some(at) = self.at {
            // SAFETY: as `upgrade`.
            unsafe { &(*at.as_ptr()).weak }.fetch_add(1, Ordering::Relaxed);
        }
        Self { at: self.at, owns: PhantomData }
    }
}

impl<T> Drop for Weak<T> {
    fn drop(&mut self) {
        if let Some(at) = self.at {
            // SAFETY: this reference, released once; the layout is the layout of `try_new`.
            unsafe { release(at.as_ptr().cast(), Layout::new::<Counted<T>>()) };
        }
    }
}

impl<T> fmt::Debug for Weak<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(Weak)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::any::Any;
    use std::sync::atomic::AtomicU32;

    struct Tell<'a>(&'a AtomicU32, u64);

    impl Drop for Tell<'_> {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn value_drops_with_the_last_arc_and_upgrade_fails() {
        let dropped = AtomicU32::new(0);
        let first = Arc::try_new(Tell(&dropped, 5)).unwrap();
        let weak = Arc::downgrade(&first);
        // SAFETY: the address of `first`.
        let second = unsafe { Arc::another(Arc::as_ptr(&first)) };
        assert!(Arc::ptr_eq(&first, &second));
        assert_eq!(Arc::strong_count(&second), 2);
        assert_eq!(weak.as_ptr(), Arc::as_ptr(&first));
        drop(first);
        assert_eq!(weak.clone().upgrade().map(|it| it.1), Some(5));
        assert_eq!(dropped.load(Ordering::Relaxed), 0);
        drop(second);
        assert_eq!(dropped.load(Ordering::Relaxed), 1);
        assert!(weak.upgrade().is_none());
        assert!(Weak::<u32>::new().upgrade().is_none());
    }

    #[test]
    fn cast_to_a_trait_object_keeps_the_counts() {
        let number = Arc::try_new(7u16).unwrap();
        // SAFETY: the language's own cast.
        let any: Arc<dyn Any> =
            unsafe { Arc::cast(number.clone(), |at| at as *mut Counted<dyn Any>) };
        assert_eq!(any.downcast_ref::<u16>(), Some(&7));
        assert_eq!(Arc::strong_count(&number), 2);
        drop(number);
        drop(any);
    }

    #[test]
    fn arcs_are_shared_between_threads() {
        let dropped = AtomicU32::new(0);
        let shared = Arc::try_new(Tell(&dropped, 1)).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                let (shared, weak) = (shared.clone(), Arc::downgrade(&shared));
                scope.spawn(move || {
                    for _ in 0..1000 {
                        assert_eq!(weak.upgrade().unwrap().1, shared.clone().1);
                    }
                });
            }
        });
        assert_eq!(Arc::strong_count(&shared), 1);
        drop(shared);
        assert_eq!(dropped.load(Ordering::Relaxed), 1);
    }
}
