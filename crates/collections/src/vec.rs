//! A growable array.

use super::{OutOfMemory, Result};
use alloc::vec;
use core::borrow::Borrow;
use core::fmt;
use core::ops::{Deref, DerefMut, RangeBounds};

/// A growable array like `alloc`'s, with a result for every growth.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub struct Vec<T>(vec::Vec<T>);

impl<T> Vec<T> {
    /// Returns an empty array, which owns no memory.
    pub const fn new() -> Self {
        Self(vec::Vec::new())
    }

    /// Returns an empty array with capacity for `len` elements.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_with_capacity(len: usize) -> Result<Self> {
        let mut new = vec::Vec::new();
        new.try_reserve_exact(len).map_err(|_| OutOfMemory)?;
        Ok(Self(new))
    }

    /// `len` times `value`.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_filled(value: T, len: usize) -> Result<Self>
    where
        T: Copy,
    {
        let mut new = Self::try_with_capacity(len)?;
        new.try_resize(len, value)?;
        Ok(new)
    }

    /// A copy of `from`.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_from_slice(from: &[T]) -> Result<Self>
    where
        T: Clone,
    {
        let mut new = Self::try_with_capacity(from.len())?;
        new.try_extend_from_slice(from)?;
        Ok(new)
    }

    /// Returns the elements of `from`.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_from_iter(from: impl IntoIterator<Item = T>) -> Result<Self> {
        let mut new = Self::new();
        new.try_extend(from)?;
        Ok(new)
    }

    /// Reserves memory for the next `more` elements.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_reserve(&mut self, more: usize) -> Result<()> {
        self.0.try_reserve(more).map_err(|_| OutOfMemory)
    }

    /// Appends an element.
    ///
    /// # Errors
    /// [`OutOfMemory`]; the element is dropped.
    #[inline]
    pub fn try_push(&mut self, value: T) -> Result<()> {
        self.try_reserve(1)?;
        // Not `push`: the kernel must not contain code that could grow without a result.
        if let Some(place) = self.0.spare_capacity_mut().first_mut() {
            place.write(value);
            // SAFETY: one more element was written.
            unsafe { self.0.set_len(self.0.len() + 1) };
        }
        Ok(())
    }

    /// Inserts an element.
    ///
    /// # Errors
    /// [`OutOfMemory`]; the element is dropped.
    ///
    /// # Panics
    /// If `at` is beyond the end.
    pub fn try_insert(&mut self, at: usize, value: T) -> Result<()> {
        self.try_push(value)?;
        self.0[at..].rotate_right(1);
        Ok(())
    }

    /// Appends the elements of `from`.
    ///
    /// # Errors
    /// [`OutOfMemory`]; elements appended before the error stay.
    pub fn try_extend(&mut self, from: impl IntoIterator<Item = T>) -> Result<()> {
        let from = from.into_iter();
        self.try_reserve(from.size_hint().0)?;
        for value in from {
            self.try_push(value)?;
        }
        Ok(())
    }

    /// Appends a copy of `from`.
    ///
    /// # Errors
    /// [`OutOfMemory`]; the array is unchanged.
    pub fn try_extend_from_slice(&mut self, from: &[T]) -> Result<()>
    where
        T: Clone,
    {
        self.try_reserve(from.len())?;
        for (place, value) in self.0.spare_capacity_mut().iter_mut().zip(from) {
            place.write(value.clone());
        }
        // SAFETY: this number of elements was written, since there is room for all.
        unsafe { self.0.set_len(self.0.len() + from.len()) };
        Ok(())
    }

    /// Sets the length to `len` elements; new elements are copies of `value`.
    ///
    /// # Errors
    /// [`OutOfMemory`]; the array is unchanged.
    pub fn try_resize(&mut self, len: usize, value: T) -> Result<()>
    where
        T: Copy,
    {
        self.try_resize_with(len, || value)
    }

    /// Sets the length to `len` elements; `value` makes the new elements.
    ///
    /// # Errors
    /// [`OutOfMemory`]; the array is unchanged.
    pub fn try_resize_with(&mut self, len: usize, mut value: impl FnMut() -> T) -> Result<()> {
        let Some(more) = len.checked_sub(self.0.len()) else {
            self.truncate(len);
            return Ok(());
        };
        self.try_reserve(more)?;
        for place in self.0.spare_capacity_mut().iter_mut().take(more) {
            place.write(value());
        }
        // SAFETY: this number of elements was written, since there is room for all.
        unsafe { self.0.set_len(len) };
        Ok(())
    }

    /// A copy.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_clone(&self) -> Result<Self>
    where
        T: Clone,
    {
        Self::try_from_slice(self)
    }

    /// Removes and returns the last element.
    pub fn pop(&mut self) -> Option<T> {
        self.0.pop()
    }

    /// Removes and returns an element; later elements move down.
    ///
    /// # Panics
    /// If `at` is not below the length.
    pub fn remove(&mut self, at: usize) -> T {
        self.0.remove(at)
    }

    /// Drops the elements beyond the first `len`.
    pub fn truncate(&mut self, len: usize) {
        self.0.truncate(len);
    }

    /// Drops all elements; the capacity stays.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Keeps the elements for which `stays` returns true.
    pub fn retain(&mut self, stays: impl FnMut(&T) -> bool) {
        self.0.retain(stays);
    }

    /// Removes and returns a range of elements.
    ///
    /// # Panics
    /// If the range is beyond the end.
    pub fn drain(&mut self, range: impl RangeBounds<usize>) -> impl Iterator<Item = T> {
        self.0.drain(range)
    }

    /// Drops all except the first of adjacent elements with the same key.
    pub fn dedup_by_key<K: PartialEq>(&mut self, key: impl FnMut(&mut T) -> K) {
        self.0.dedup_by_key(key);
    }

    /// As a slice.
    pub fn as_slice(&self) -> &[T] {
        &self.0
    }

    /// The memory beyond the elements: see [`try_reserve`](Self::try_reserve).
    pub fn spare_capacity_mut(&mut self) -> &mut [core::mem::MaybeUninit<T>] {
        self.0.spare_capacity_mut()
    }

    /// Sets the number of elements.
    ///
    /// # Safety
    /// This number of elements has been written, and fits.
    pub unsafe fn set_len(&mut self, len: usize) {
        // SAFETY: by the contract.
        unsafe { self.0.set_len(len) };
    }
}

impl<T> Default for Vec<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Deref for Vec<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T> DerefMut for Vec<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.0
    }
}

impl<T> Borrow<[T]> for Vec<T> {
    fn borrow(&self) -> &[T] {
        &self.0
    }
}

impl<T> IntoIterator for Vec<T> {
    type Item = T;
    type IntoIter = vec::IntoIter<T>;

    fn into_iter(self) -> vec::IntoIter<T> {
        self.0.into_iter()
    }
}

impl<'a, T> IntoIterator for &'a Vec<T> {
    type Item = &'a T;
    type IntoIter = core::slice::Iter<'a, T>;

    fn into_iter(self) -> core::slice::Iter<'a, T> {
        self.0.iter()
    }
}

impl<T: fmt::Debug> fmt::Debug for Vec<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vec_grows_like_the_standard_vec() {
        let mut all = Vec::try_from_slice(&[1, 2, 4]).unwrap();
        all.try_insert(2, 3).unwrap();
        all.try_extend(5..8).unwrap();
        all.try_resize(9, 0).unwrap();
        assert_eq!(*all, [1, 2, 3, 4, 5, 6, 7, 0, 0]);
        all.try_resize(7, 0).unwrap();
        assert_eq!((all.remove(0), all.pop()), (1, Some(7)));
        all.retain(|value| value % 2 == 0);
        assert_eq!(all.try_clone().unwrap(), Vec::try_from_slice(&[2, 4, 6]).unwrap());
        assert!(all.drain(1..).eq([4, 6]));
    }

    #[test]
    fn failed_growth_leaves_the_vec_unchanged() {
        let mut all = Vec::try_from_slice(b"abc").unwrap();
        assert_eq!(all.try_reserve(usize::MAX), Err(OutOfMemory));
        assert_eq!(all.try_resize(usize::MAX, 0), Err(OutOfMemory));
        assert_eq!(*all, *b"abc");
    }
}
