//! anon_vma: shared by the VMAs that may contain the same private anonymous pages.
//!
//! The parts of a split VMA share an [`AnonVma`], as do neighbours that may merge again. A VMA has
//! no anon_vma until its first anonymous page is made: until then a fork need not copy its entries.
//! A forked child gets new anon_vmas. Linux's rules determine from the anon_vmas which VMAs merge.
//!
//! Frames do not name anon_vmas. Frames name their space of origin and its [family](super::anchor),
//! which lead to all of their entries, so anon_vmas of earlier generations of processes need not be
//! kept.

use crate::error::OutOfMemory;
use crate::heap::Shared;
use crate::sync::atomic::{AtomicPtr, Ordering};
use core::fmt;
use core::marker::PhantomData;
use core::ptr::{self, NonNull};

/// An anon_vma.
#[derive(Debug)]
pub struct AnonVma {
    inherited: bool,
}

/// A counted reference to an anon_vma.
pub type SharedAnonVma = Shared<AnonVma>;

impl AnonVma {
    /// Creates an anon_vma: a new one of the space, or the replacement of a parent's anon_vma in a
    /// forked child (`inherited`).
    ///
    /// # Errors
    /// [`OutOfMemory`] if the heap is exhausted.
    pub fn try_new(inherited: bool) -> Result<SharedAnonVma, OutOfMemory> {
        Shared::try_new(Self { inherited })
    }

    /// Returns whether VMAs under this anon_vma came from a parent process.
    pub const fn is_inherited(&self) -> bool {
        self.inherited
    }
}

/// A VMA's slot for its anon_vma: empty, then set once.
///
/// | value | meaning |
/// |---|---|
/// | null | no anon_vma; the next fault that needs an anon_vma sets it |
/// | [`SEALED`](Self::SEALED) | no anon_vma, and none may be set: a writer changes the VMA, or has replaced it |
/// | other | an owner of the anon_vma, as a raw pointer |
///
/// A writer seals the slots of the VMAs it write-locks, so that all of its steps see the same
/// anon_vmas. Otherwise a fault in progress could set an anon_vma at any time, although the fault
/// cannot install a page.
pub struct AnonVmaSlot {
    at: AtomicPtr<()>,
}

impl Default for AnonVmaSlot {
    fn default() -> Self {
        Self { at: AtomicPtr::new(ptr::null_mut()) }
    }
}

impl AnonVmaSlot {
    /// The [`id`](Self::id) of a sealed slot.
    pub(crate) const SEALED_ID: u64 = 1;
    const SEALED: *mut () = ptr::without_provenance_mut(Self::SEALED_ID as usize);

    /// Returns a slot that is already set to `anon_vma`.
    pub fn new(anon_vma: Option<SharedAnonVma>) -> Self {
        Self { at: AtomicPtr::new(anon_vma.map_or(ptr::null_mut(), Shared::into_raw)) }
    }

    /// Returns the anon_vma's number; 0 if there is none, or [`SEALED_ID`](Self::SEALED_ID) while
    /// none can be set: then no page may be made here.
    #[inline(always)]
    pub fn id(&self) -> u64 {
        self.at.load(Ordering::Acquire) as u64
    }

    /// Returns the anon_vma, if there is one. Unless the slot is sealed, another CPU may set it a
    /// moment later.
    #[inline]
    pub fn peek(&self) -> Option<AnonVmaRef<'_>> {
        let raw = self.at.load(Ordering::Acquire);
        // Set once, from `into_raw`, and owned by this slot for its lifetime.
        let raw = if raw == Self::SEALED { None } else { NonNull::new(raw) };
        raw.map(|raw| AnonVmaRef { raw, owner: PhantomData })
    }

    /// Prevents changes of an empty slot until it is [unsealed](Self::unseal).
    #[inline]
    pub(crate) fn seal(&self) {
        if self.at.load(Ordering::Relaxed).is_null() {
            let (release, relaxed) = (Ordering::Release, Ordering::Relaxed);
            // Release: a fault that finds the slot sealed also finds the VMA's sequence changed. If
            // the swap fails, an anon_vma was set just before.
            let _ = self.at.compare_exchange(ptr::null_mut(), Self::SEALED, release, relaxed);
        }
    }

    /// Sets the slot to `anon_vma`, if it has none, sealed or not.
    pub(crate) fn give(&self, anon_vma: AnonVmaRef<'_>) {
        let raw = anon_vma.get().into_raw();
        let (acq_rel, relaxed) = (Ordering::AcqRel, Ordering::Relaxed);
        let put = |seen| self.at.compare_exchange(seen, raw, acq_rel, relaxed).is_ok();
        if !put(ptr::null_mut()) && !put(Self::SEALED) {
            // SAFETY: `raw` came from `into_raw` just now and was not stored.
            drop(unsafe { SharedAnonVma::from_raw(NonNull::new_unchecked(raw)) });
        }
    }

    /// Allows setting an anon_vma again, if there is none.
    #[inline]
    pub(crate) fn unseal(&self) {
        if self.at.load(Ordering::Relaxed) == Self::SEALED {
            self.at.store(ptr::null_mut(), Ordering::Relaxed);
        }
    }

    /// Returns another owner of the anon_vma, if there is one.
    pub fn get(&self) -> Option<SharedAnonVma> {
        self.peek().map(AnonVmaRef::get)
    }

    /// Sets the anon_vma, unless another CPU was faster; then `anon_vma` is dropped. Returns the
    /// number of the anon_vma in the slot, or `None` if the slot is sealed.
    pub fn set(&self, anon_vma: SharedAnonVma) -> Option<u64> {
        let id = anon_vma.id();
        let raw = anon_vma.into_raw();
        match self.at.compare_exchange(ptr::null_mut(), raw, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Some(id),
            Err(now) => {
                // SAFETY: `raw` came from `into_raw` just now and was not stored.
                drop(unsafe { SharedAnonVma::from_raw(NonNull::new_unchecked(raw)) });
                (now != Self::SEALED).then_some(now as u64)
            }
        }
    }
}

/// An anon_vma kept alive for `'a` by an owner, for example a slot.
///
/// *Invariant (kept):* `raw` came from an owner's [`as_raw`](Shared::as_raw), and the owner lives
/// for `'a`.
#[derive(Clone, Copy, Debug)]
pub struct AnonVmaRef<'a> {
    raw: NonNull<()>,
    owner: PhantomData<&'a AnonVma>,
}

impl<'a> AnonVmaRef<'a> {
    /// Returns a reference to the anon_vma of `owner`.
    #[inline(always)]
    pub fn of(owner: &'a SharedAnonVma) -> Self {
        Self { raw: owner.as_raw(), owner: PhantomData }
    }

    /// Returns the anon_vma's number.
    #[inline(always)]
    pub fn id(self) -> u64 {
        self.raw.as_ptr() as u64
    }

    /// Returns the anon_vma itself.
    #[inline(always)]
    pub fn anon_vma(self) -> &'a AnonVma {
        // SAFETY: an owner keeps the anon_vma for `'a` (kept).
        unsafe { SharedAnonVma::peek_raw(self.raw) }
    }

    /// Returns another owner of the anon_vma.
    #[inline]
    pub fn get(self) -> SharedAnonVma {
        // SAFETY: as in `anon_vma`; the temporary owner for the clone is not dropped.
        let owner = core::mem::ManuallyDrop::new(unsafe { SharedAnonVma::from_raw(self.raw) });
        (*owner).clone()
    }
}

impl Drop for AnonVmaSlot {
    fn drop(&mut self) {
        if let Some(AnonVmaRef { raw, .. }) = self.peek() {
            // SAFETY: set once, from `into_raw`; this slot's ownership ends here.
            drop(unsafe { SharedAnonVma::from_raw(raw) });
        }
    }
}

impl fmt::Debug for AnonVmaSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AnonVmaSlot({:#x})", self.id())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_set_once_and_the_second_anon_vma_is_dropped() {
        let slot = AnonVmaSlot::default();
        assert!(slot.get().is_none() && slot.id() == 0);
        let first = AnonVma::try_new(false).unwrap();
        let id = slot.set(first.clone()).unwrap();
        assert_eq!(id, first.id());
        assert_eq!(slot.set(AnonVma::try_new(false).unwrap()), Some(id));
        slot.seal();
        slot.unseal();
        assert!(slot.get().unwrap().same(&first));
        drop(slot);
        assert!(first.into_last().is_some(), "the slot dropped its reference");
    }

    #[test]
    fn a_sealed_slot_takes_no_anon_vma() {
        let (slot, anon_vma) = (AnonVmaSlot::default(), AnonVma::try_new(false).unwrap());
        slot.seal();
        assert!(
            slot.set(anon_vma.clone()).is_none() && slot.peek().is_none() && slot.get().is_none()
        );
        slot.unseal();
        assert_eq!(slot.set(anon_vma.clone()), Some(anon_vma.id()));
        let sealed = AnonVmaSlot::default();
        sealed.seal();
        drop((sealed, slot));
        assert!(anon_vma.into_last().is_some(), "refused and kept anon_vmas are freed");
    }
}
