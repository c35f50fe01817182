//! Shared ownership.
//!
//! As `alloc`'s: all strong owners together have one weak share, so that the memory goes with the last weak one.

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

/// A value with its counts; only for [`Arc::cast`] to name.
#[repr(C)]
pub struct Counted<T: ?Sized> {
    strong: AtomicUsize,
    /// The weak owners, and one for all strong owners.
    weak: AtomicUsize,
    value: T,
}

impl<T: ?Sized> fmt::Debug for Counted<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} shares", self.strong.load(Ordering::Relaxed))
    }
}

/// A share of a value, which is dropped with the last share.
pub struct Arc<T: ?Sized> {
    at: NonNull<Counted<T>>,
    owns: PhantomData<Counted<T>>,
}

// SAFETY: the value is shared between, and dropped by, whichever thread owns it last.
unsafe impl<T: ?Sized + Send + Sync> Send for Arc<T> {}
// SAFETY: as above.
unsafe impl<T: ?Sized + Send + Sync> Sync for Arc<T> {}

/// A share of a value that does not keep it, only its place.
pub struct Weak<T> {
    /// None: of nothing.
    at: Option<NonNull<Counted<T>>>,
    owns: PhantomData<Counted<T>>,
}

// SAFETY: as `Arc`, which it may become.
unsafe impl<T: Send + Sync> Send for Weak<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Weak<T> {}

impl<T> Arc<T> {
    /// A first share of `value`.
    ///
    /// # Errors
    /// [`OutOfMemory`](super::OutOfMemory) when the heap is exhausted; `value` is dropped.
    pub fn try_new(value: T) -> Result<Self> {
        let counted =
            try_box(Counted { strong: AtomicUsize::new(1), weak: AtomicUsize::new(1), value })?;
        Ok(Self { at: NonNull::from(Box::leak(counted)), owns: PhantomData })
    }

    /// A weak share.
    pub fn downgrade(this: &Self) -> Weak<T> {
        this.counted().weak.fetch_add(1, Ordering::Relaxed);
        Weak { at: Some(this.at), owns: PhantomData }
    }

    /// One more share of the value at `value`.
    ///
    /// # Safety
    /// `value` is where an `Arc` that exists during the call [is](Self::as_ptr).
    pub unsafe fn another(value: *const T) -> Self {
        let at = value.wrapping_byte_sub(offset_of!(Counted<T>, value)).cast_mut();
        // SAFETY: where the value of an existing one is; its counts are before it.
        let existing = ManuallyDrop::new(unsafe {
            Self { at: NonNull::new_unchecked(at.cast()), owns: PhantomData }
        });
        Self::clone(&existing)
    }

    /// The same share as one of another type.
    ///
    /// # Safety
    /// `cast` gives what it gets, with the type changed as the language changes it by itself (to a trait object).
    pub unsafe fn cast<U: ?Sized>(
        this: Self,
        cast: impl FnOnce(*mut Counted<T>) -> *mut Counted<U>,
    ) -> Arc<U> {
        let at = cast(ManuallyDrop::new(this).at.as_ptr());
        // SAFETY: the caller's promise: the same place.
        Arc { at: unsafe { NonNull::new_unchecked(at) }, owns: PhantomData }
    }
}

impl<T: ?Sized> Arc<T> {
    fn counted(&self) -> &Counted<T> {
        // SAFETY: alive as long as a share is.
        unsafe { self.at.as_ref() }
    }

    /// Whether both are shares of the same value.
    pub fn ptr_eq(one: &Self, other: &Self) -> bool {
        ptr::addr_eq(one.at.as_ptr(), other.at.as_ptr())
    }

    /// Where the value is.
    pub fn as_ptr(this: &Self) -> *const T {
        &raw const this.counted().value
    }

    /// How many shares there are.
    pub fn strong_count(this: &Self) -> usize {
        this.counted().strong.load(Ordering::Acquire)
    }

    #[cold]
    fn drop_value(&mut self) {
        fence(Ordering::Acquire);
        let at = self.at;
        // SAFETY: this was the last share, so nobody else reaches the value. The share that all strong owners have of
        // the memory is given up afterwards, even if the value's end should not come back.
        unsafe {
            let layout = Layout::for_value(at.as_ref());
            ptr::drop_in_place(&raw mut (*at.as_ptr()).value);
            release(at.as_ptr().cast(), layout);
        }
    }
}

/// Gives up a weak share; the last one frees the memory.
///
/// # Safety
/// The share is the caller's; `layout` is that of the memory at `at`, which begins with the two counts.
unsafe fn release(at: *mut Counted<()>, layout: Layout) {
    // SAFETY: alive until the last weak share is given up, and the caller has one.
    if unsafe { &(*at).weak }.fetch_sub(1, Ordering::Release) == 1 {
        fence(Ordering::Acquire);
        // SAFETY: the last share; allocated with this layout by `try_new`.
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
    /// A share of nothing.
    pub const fn new() -> Self {
        Self { at: None, owns: PhantomData }
    }

    /// A share of the value, if it is still there.
    pub fn upgrade(&self) -> Option<Arc<T>> {
        let at = self.at?;
        // SAFETY: the memory is there as long as a weak share is; only its counts are looked at.
        let strong = unsafe { &(*at.as_ptr()).strong };
        let more = |count: usize| (count != 0).then_some(count + 1);
        strong.fetch_update(Ordering::Acquire, Ordering::Relaxed, more).ok()?;
        Some(Arc { at, owns: PhantomData })
    }

    /// Where the value is or was.
    pub fn as_ptr(&self) -> *const T {
        match self.at {
            // SAFETY: the place is in the memory that the share keeps.
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
            // SAFETY: this share, given up once; the layout is that of `try_new`.
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
    fn the_value_goes_with_its_last_share_and_weak_ones_see_it() {
        let dropped = AtomicU32::new(0);
        let first = Arc::try_new(Tell(&dropped, 5)).unwrap();
        let weak = Arc::downgrade(&first);
        // SAFETY: where `first` is.
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
    fn a_share_as_a_trait_object_is_the_same_share() {
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
    fn shares_on_many_threads() {
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
