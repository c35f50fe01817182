//! Memory objects: pages by index, shared by all mappings, and read and written by the kernel.
//! Memory file systems, System V shared memory and shared anonymous mappings consist of memory
//! objects.
//!
//! An object finds its pages through its own page table, indexed by the byte offset as the address.
//! The table uses the same walk, the same entry protocol and the same publication of tables as a
//! space, and as many levels as the pages [need](super::root). The first CPU that needs a missing
//! page adds it, without a lock. The object holds one reference to each of its pages, each mapping
//! one more, and each copy in progress to or from a page one more. So a page may leave the object
//! at any time; dropping the last reference frees its frame.
//!
//! # The length is the sequence
//!
//! Shrinking stores the new length, issues a full fence, and then empties the entries beyond,
//! waiting for busy entries. A CPU that adds a page takes the entry (a full fence) and then reads
//! the length again. At least one of the two sees the other's store, as with the sequence of a VMA.
//! So no page is beyond the end.
//!
//! # References
//!
//! A CPU that finds a page takes a reference, unless the count is zero, and then reads the object's
//! entry again: if the entry still names the frame, the reference is to the right frame, and keeps
//! the page in it.
//!
//! # Truncation
//!
//! 1. [`set_pages`](Object::set_pages) shortens the object: no fault that begins now maps a page
//!    beyond.
//! 2. [`Space::revoke`](crate::Space::revoke) is called for each space that may map the pages. A
//!    fault that began earlier either has its entry busy, so the revocation waits for it, or finds,
//!    after taking the entry, that the page has left. Afterwards no space maps the pages.
//!
//! Between the two steps programs may use their existing mappings, as if they had run before the
//! truncation. The object must not grow before step 2 ends: step 2 also drops private copies, and
//! would drop new copies of added pages.
//!
//! A hole is made in the same way, by [`free_pages`](Object::free_pages) and `revoke`, which then
//! [keeps](crate::PrivateCopies::Keep) private copies.

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

/// A sequence of pages, with a length; pages never written are zeros, and not present.
///
/// An object is owned in [shares](crate::Shared), one for each VMA that maps it. A kernel releases
/// its share by [`release`](Self::release), or drops it. If a dropped share is the last, a CPU that
/// makes another object, or calls [`Cpu::end_dropped`](crate::Cpu::end_dropped), ends the object
/// later.
///
/// The methods of an object, and of its shares, by purpose:
///
/// | purpose | methods |
/// |---|---|
/// | create, end | [`try_new`](Self::try_new), [`try_new_charged`](Self::try_new_charged), [`of_store`](Self::of_store), [`release`](Self::release) |
/// | length | [`pages`](Self::pages), [`bytes`](Self::bytes), [`set_pages`](Self::set_pages), [`set_len`](crate::Shared::set_len), [`punch`](crate::Shared::punch) |
/// | resident pages | [`has_page`](Self::has_page), [`resident_pages`](Self::resident_pages), [`each_resident`](Self::each_resident), [`evict`](Self::evict), [`drop_clean`](Self::drop_clean), [`free_pages`](Self::free_pages) |
/// | contents | [`read_page`](crate::Shared::read_page), [`write_page`](crate::Shared::write_page), [`overwrite_page`](crate::Shared::overwrite_page) |
/// | reads from the store | [`read_ahead`](crate::Shared::read_ahead), [`read_in_sequence`](crate::Shared::read_in_sequence), [`read_exactly`](crate::Shared::read_exactly), [`note_stored`](crate::Shared::note_stored) |
/// | writes to the store | [`is_dirty`](Self::is_dirty), [`write_back`](crate::Shared::write_back), [`sync`](crate::Shared::sync), [`errors_seen`](Self::errors_seen), [`write_error`](Self::write_error) |
#[derive(Debug)]
pub struct Object {
    pub(super) root: Root,
    pub(super) pages: AtomicU64,
    pub(super) tag: u64,
    /// The subsystem of its frames.
    pub(super) identity: Identity,
    /// Bit n: no folio could be made of pages whose table number is n modulo 64; further attempts
    /// are rare.
    pub(super) unfit: AtomicU64,
    /// The backing store, if any.
    pub(super) stored: Option<Box<Stored>>,
    /// Whether its pages are [charged](super::charge).
    pub(super) charged: bool,
    /// The place of its remains when its last share is dropped.
    pub(super) place: Place,
    /// The anchor of its pages in the reverse map.
    pub(super) anchor: ObjectAnchor,
    /// The VMAs that map the object.
    pub(crate) mappings: Mappings,
    /// The last deferred flush of one of its pages.
    pub(crate) pending: Pending,
}

/// The state of an object with a [backing store](super::store).
#[derive(Debug)]
pub(crate) struct Stored {
    pub(super) store: Store,
    /// The length in bytes. The object's length in pages follows from it.
    pub(super) bytes: AtomicU64,
    pub(super) turn: Turn,
    pub(super) cut: Cut,
    pub(super) errors: WriteErrors,
    /// Bit n: a read failed in a table of pages whose number is n modulo 64. Bits are never
    /// cleared: reads there are smaller.
    pub(super) failed: AtomicU64,
}

impl Drop for Object {
    fn drop(&mut self) {
        // The reverse map must not find the object any more, because its memory is about to be
        // freed.
        self.anchor.give_up();
        let left = self.parts();
        self.place.push(|| Left::Object(left));
    }
}

/// The remains of an object after its last reference was dropped.
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

/// The reason why there is no page at an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoPage {
    /// The index is beyond the object's end.
    Beyond,
    /// The page must first be read from the object's store.
    Absent,
    /// No frame is free.
    OutOfMemory,
    /// The number of charged pages has reached the knob `file_limit`.
    Full,
}

impl Object {
    /// The maximum number of pages of an object: 128 TiB.
    pub const MAX_PAGES: u64 = USER_END.next_power_of_two() >> PAGE_SHIFT;

    /// Returns the length in bytes: the length of its pages, unless it has a store.
    pub fn bytes(&self) -> u64 {
        let of_store = |stored: &Stored| stored.bytes.load(Ordering::Acquire);
        self.stored.as_deref().map_or_else(|| self.pages() << PAGE_SHIFT, of_store)
    }

    /// Returns whether the object has a [store](BackingStore).
    #[inline(always)]
    pub const fn is_stored(&self) -> bool {
        self.stored.is_some()
    }

    pub(super) fn store(&self) -> Option<&dyn BackingStore> {
        self.stored.as_deref().map(|stored| &*stored.store)
    }

    /// Returns the parts of the object for its end.
    pub(super) fn parts(&mut self) -> Parts {
        let charged = self.charged;
        Parts { top: self.top(), pages: self.pages(), stored: self.stored.take(), charged }
    }

    /// Returns the word by which the object's pages name their anchor.
    #[inline]
    pub(crate) const fn anchor(&self) -> u64 {
        self.anchor.word()
    }

    /// Returns the length in pages.
    pub fn pages(&self) -> u64 {
        self.pages.load(Ordering::Acquire)
    }

    /// Returns the tag assigned by the kernel.
    pub const fn tag(&self) -> u64 {
        self.tag
    }
}
