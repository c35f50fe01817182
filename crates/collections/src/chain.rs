//! Queues that link existing objects, so that queueing needs no memory.

use super::Arc;
use core::cell::UnsafeCell;
use core::fmt;
use core::marker::PhantomData;
use core::sync::atomic::{AtomicBool, Ordering};

/// The place at which an object is linked into a [`Chain`]: one link for each chain that contains
/// the object at a time.
pub struct Link<T> {
    linked: AtomicBool,
    /// Owned by the chain while the object is linked.
    next: UnsafeCell<Option<Arc<T>>>,
}

// SAFETY: `next` belongs to the single chain that has set `linked`, and is accessed only through
// this chain.
unsafe impl<T: Send + Sync> Send for Link<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Link<T> {}

impl<T> Link<T> {
    /// In no chain.
    pub const fn new() -> Self {
        Self { linked: AtomicBool::new(false), next: UnsafeCell::new(None) }
    }

    /// Returns whether the object is in a chain.
    pub fn is_linked(&self) -> bool {
        self.linked.load(Ordering::Acquire)
    }
}

impl<T> Default for Link<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> fmt::Debug for Link<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_linked() { "linked" } else { "not linked" })
    }
}

/// An object that can be in chains of the kind `K`.
///
/// # Safety
/// `link` always returns the same link, which is used for no other kind.
pub unsafe trait Linked<K>: Sized {
    /// Returns the link for chains of this kind.
    fn link(&self) -> &Link<Self>;
}

/// A queue of references: first in, first out, but any element can be removed.
pub struct Chain<T: Linked<K>, K> {
    first: Option<Arc<T>>,
    /// Points to the object that the last link, or `first`, owns.
    last: *const T,
    len: usize,
    kind: PhantomData<fn() -> K>,
}

// SAFETY: `last` points to an object owned by the chain.
unsafe impl<T: Linked<K> + Send + Sync, K> Send for Chain<T, K> {}
// SAFETY: as above.
unsafe impl<T: Linked<K> + Send + Sync, K> Sync for Chain<T, K> {}

impl<T: Linked<K>, K> Chain<T, K> {
    /// An empty chain.
    pub const fn new() -> Self {
        Self { first: None, last: core::ptr::null(), len: 0, kind: PhantomData }
    }

    /// Returns the number of elements.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the chain is empty.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first.
    pub fn first(&self) -> Option<&Arc<T>> {
        self.first.as_ref()
    }

    /// Appends `one`. False: the object is already in a chain of this kind, and the reference is
    /// dropped.
    pub fn push(&mut self, one: Arc<T>) -> bool {
        let link = one.link();
        if link.linked.swap(true, Ordering::AcqRel) {
            return false;
        }
        let last = core::mem::replace(&mut self.last, Arc::as_ptr(&one));
        if self.first.is_none() {
            self.first = Some(one);
        } else {
            // SAFETY: the last object of this chain, whose link belongs to this chain; `&mut self`
            // excludes other accesses.
            unsafe { *(*last).link().next.get() = Some(one) };
        }
        self.len += 1;
        true
    }

    /// Removes and returns the first element that is `wanted`.
    pub fn take(&mut self, mut wanted: impl FnMut(&Arc<T>) -> bool) -> Option<Arc<T>> {
        let mut before: *const T = core::ptr::null();
        let mut at: *mut Option<Arc<T>> = &raw mut self.first;
        loop {
            // SAFETY: `first`, or the link of an object in this chain; `&mut self` excludes other
            // accesses.
            let place = unsafe { &mut *at };
            let here = place.as_ref()?;
            if wanted(here) {
                let taken = place.take()?;
                // SAFETY: as above: the object is linked until `linked` is cleared.
                let next = unsafe { (*taken.link().next.get()).take() };
                if next.is_none() {
                    self.last = before;
                }
                *place = next;
                self.len -= 1;
                taken.link().linked.store(false, Ordering::Release);
                return Some(taken);
            }
            before = Arc::as_ptr(here);
            at = here.link().next.get();
        }
    }

    /// Takes the first out.
    pub fn pop(&mut self) -> Option<Arc<T>> {
        self.take(|_| true)
    }

    /// Iterates over the elements, in order.
    pub fn iter(&self) -> Iter<'_, T, K> {
        Iter { next: self.first.as_ref(), kind: PhantomData }
    }

    /// Drops the elements for which `stays` returns false.
    pub fn retain(&mut self, mut stays: impl FnMut(&Arc<T>) -> bool) {
        let mut rest = core::mem::take(self);
        while let Some(one) = rest.pop() {
            if stays(&one) {
                self.push(one);
            }
        }
    }

    /// Appends all elements of `other`.
    pub fn append(&mut self, mut other: Self) {
        while let Some(one) = other.pop() {
            self.push(one);
        }
    }
}

/// The elements of a [`Chain`], in order.
pub struct Iter<'a, T, K> {
    next: Option<&'a Arc<T>>,
    kind: PhantomData<fn() -> K>,
}

impl<'a, T: Linked<K>, K> Iterator for Iter<'a, T, K> {
    type Item = &'a Arc<T>;

    fn next(&mut self) -> Option<&'a Arc<T>> {
        let here = self.next?;
        // SAFETY: the link of an object in the chain, which is borrowed, so the link does not
        // change.
        self.next = unsafe { (*here.link().next.get()).as_ref() };
        Some(here)
    }
}

impl<T, K> fmt::Debug for Iter<'_, T, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Iter")
    }
}

impl<T: Linked<K>, K> Default for Chain<T, K> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: Linked<K>, K> Drop for Chain<T, K> {
    fn drop(&mut self) {
        // Element by element: recursion would be as deep as the chain is long.
        while self.pop().is_some() {}
    }
}

impl<T: Linked<K>, K> fmt::Debug for Chain<T, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} linked", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    struct Kind;

    #[derive(Default)]
    struct One(u32, Link<Self>);

    // SAFETY: one field, for one kind.
    unsafe impl Linked<Kind> for One {
        fn link(&self) -> &Link<Self> {
            &self.1
        }
    }

    fn numbers(chain: &Chain<One, Kind>) -> Vec<u32> {
        chain.iter().map(|one| one.0).collect()
    }

    fn one(number: u32) -> Arc<One> {
        Arc::try_new(One(number, Link::new())).unwrap()
    }

    #[test]
    fn chain_is_fifo_and_any_element_can_be_taken() {
        let mut chain = Chain::<One, Kind>::new();
        let all: Vec<_> = (0..5).map(one).collect();
        assert!(all.iter().all(|one| chain.push(one.clone())));
        assert!(!chain.push(all[3].clone()), "the element is already in the chain");
        assert_eq!(chain.take(|one| one.0 == 4).map(|one| one.0), Some(4));
        assert_eq!(chain.take(|one| one.0 == 2).map(|one| one.0), Some(2));
        assert!(chain.take(|one| one.0 == 2).is_none());
        assert!(chain.push(all[2].clone()));
        assert_eq!(numbers(&chain), [0, 1, 3, 2]);
        chain.retain(|one| one.0 % 3 != 0);
        assert_eq!((numbers(&chain), chain.len()), (std::vec![1, 2], 2));
        let mut other = Chain::new();
        other.push(all[0].clone());
        chain.append(other);
        assert_eq!(chain.first().map(|one| one.0), Some(1));
        assert_eq!(chain.pop().map(|one| one.0), Some(1));
        drop(chain);
        assert!(all.iter().all(|one| !one.1.is_linked() && Arc::strong_count(one) == 1));
    }

    #[test]
    fn long_chain_drops_on_a_small_stack() {
        let mut chain = Chain::<One, Kind>::new();
        (0..100_000).for_each(|number| assert!(chain.push(one(number))));
        drop(chain);
    }
}
