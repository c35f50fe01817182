//! Memory objects: pages by index, shared by all mappings, and read and written by the kernel. A memory file
//! system, System V shared memory and shared anonymous mappings are made of them.
//!
//! An object finds its pages through a page table of its own, in which the "address" is the byte
//! offset: the same walk, the same entry protocol and the same publication of tables as a space, and as many
//! levels as its pages [need](super::root). A
//! missing page is added by the first CPU that needs it, without a lock. The object
//! holds one reference to each of its pages, each mapping one more, and each copy in progress to or
//! from a page one more. So a page may leave the object at any time; dropping the last reference frees
//! its frame.
//!
//! # The length is the sequence
//!
//! Shrinking stores the new length, issues a full fence, and then empties the entries beyond, waiting
//! for busy ones. A CPU that adds a page takes the entry (a full fence) and then reads the length
//! again. At least one of them sees the other's store, as with a VMA's sequence: no page is beyond the end.
//!
//! # References
//!
//! A CPU that finds a page takes a reference, unless the count is zero, and then reads the object's entry
//! again: if the entry still names the frame, the reference is to the right frame, and keeps it there.
//!
//! # Truncation
//!
//! 1. [`set_pages`](Object::set_pages) shortens the object: no fault that begins now maps a page beyond.
//! 2. [`Space::revoke`](crate::Space::revoke) for each space that may map it: a fault that began before
//!    has its entry busy, and is waited for, or finds, once it has the entry, that the page has left. The pages are
//!    gone everywhere.
//!
//! Between the two steps programs may use what they had mapped, as if they had run before the truncation. The object must not grow
//! before step 2 ends: that step drops private copies too, and would drop new copies of pages that were added.
//!
//! A hole is made the same way, by [`free_pages`](Object::free_pages) and `revoke`, which then
//! [keeps](crate::Copies::Keep) private copies.

use super::length::Cut;
use super::root::{Root, Top};
use super::store::{BackingStore, Store};
use super::write_back::{Turn, WriteErrors};
use crate::addr::PAGE_SHIFT;
use crate::ended::{Left, Place};
use crate::identity::Identity;
use crate::rmap::anchor::ObjectAnchor;
use crate::rmap::mapping::Mappings;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::table::format::USER_END;
use crate::tlb::deferred::Pending;
use alloc::boxed::Box;

/// Pages in order, as many as its length says; those that were never written are zeros, and not there.
///
/// It is owned in [shares](crate::Shared), of which each VMA that maps it has one. A kernel that has one gives it
/// up by [`release`](Self::release), or drops it. If a share that is dropped is the last, a CPU that makes another object, or is asked to
/// ([`Cpu::end_dropped`](crate::Cpu::end_dropped)), ends the object later.
#[derive(Debug)]
pub struct Object {
    pub(super) root: Root,
    pub(super) pages: AtomicU64,
    pub(super) tag: u64,
    /// The subsystem that its frames are of.
    pub(super) identity: Identity,
    /// Bit n: of pages whose table has a number that is n modulo 64 no folio could be made, and it is seldom tried again.
    pub(super) unfit: AtomicU64,
    /// What is behind it, if anything is.
    pub(super) stored: Option<Box<Stored>>,
    /// Whether its pages are [charged](super::charge).
    pub(super) charged: bool,
    /// Where it goes when its last share is dropped.
    pub(super) place: Place,
    /// What its pages name.
    pub(super) anchor: ObjectAnchor,
    /// The VMAs that map it.
    pub(crate) mappings: Mappings,
    /// The last deferred flush of a page of it.
    pub(crate) pending: Pending,
}

/// What an object with a [backing store](super::store) has besides its pages.
#[derive(Debug)]
pub(crate) struct Stored {
    pub(super) store: Store,
    /// Its length in bytes. The object's length in pages follows from it.
    pub(super) bytes: AtomicU64,
    pub(super) turn: Turn,
    pub(super) cut: Cut,
    pub(super) errors: WriteErrors,
    /// Bit n: a read failed in a table of pages whose number is n modulo 64. What is set stays set: reads there are smaller.
    pub(super) failed: AtomicU64,
}

impl Drop for Object {
    fn drop(&mut self) {
        // The reverse map finds it no more: its memory is about to be freed.
        self.anchor.give_up();
        let left = self.parts();
        self.place.leave(|| Left::Object(left));
    }
}

/// What is left of an object whose last share is gone.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(super) top: Top,
    pub(super) pages: u64,
    pub(super) stored: Option<Box<Stored>>,
    pub(super) charged: bool,
}

#[cfg(all(test, not(loom)))]
impl Parts {
    pub(crate) const fn of_root(top: Top, pages: u64) -> Self {
        Self { top, pages, stored: None, charged: false }
    }

    pub(crate) const fn pages(&self) -> u64 {
        self.pages
    }
}

/// Why there is no page at an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoPage {
    /// It is beyond the object's end.
    Beyond,
    /// It must be read from the object's store first.
    Absent,
    /// No frame is left for it.
    OutOfMemory,
    /// As many pages are charged as the knob `file_limit` allows.
    Full,
}

impl Object {
    /// The most pages that an object may have: 128 TiB.
    pub const MAX_PAGES: u64 = USER_END.next_power_of_two() >> PAGE_SHIFT;

    /// Its length in bytes: that of its pages, unless it has a store.
    pub fn bytes(&self) -> u64 {
        let of_store = |stored: &Stored| stored.bytes.load(Ordering::Acquire);
        self.stored.as_deref().map_or_else(|| self.pages() << PAGE_SHIFT, of_store)
    }

    /// Whether a [store](BackingStore) is behind it.
    #[inline(always)]
    pub const fn is_stored(&self) -> bool {
        self.stored.is_some()
    }

    pub(super) fn store(&self) -> Option<&dyn BackingStore> {
        self.stored.as_deref().map(|stored| &*stored.store)
    }

    /// What is to be ended of it.
    pub(super) fn parts(&mut self) -> Parts {
        let charged = self.charged;
        Parts { top: self.top(), pages: self.pages(), stored: self.stored.take(), charged }
    }

    /// The word by which its pages name their anchor.
    #[inline]
    pub(crate) const fn anchor(&self) -> u64 {
        self.anchor.word()
    }

    /// Its length in pages.
    pub fn pages(&self) -> u64 {
        self.pages.load(Ordering::Acquire)
    }

    /// What the kernel knows it by.
    pub const fn tag(&self) -> u64 {
        self.tag
    }
}
