//! The reverse map: finds all page-table entries that map a frame.
//!
//! A program's page tables lead from an address to a frame. Reclaim and migration need the reverse.
//! A frame has no list of its entries, because a fault would have to write more lines than the
//! entry's and the frame's. Instead, a frame stores two values in its metadata, which the fault
//! writes anyway:
//!
//! - its *anchor* ([`anchor`]): the family of spaces that may map an anonymous page, or the memory
//!   object of a page;
//! - its *index*: the page number of the address at which an anonymous page was made, or the page's
//!   number in its object.
//!
//! These values determine the addresses at which the frame can be mapped. Reading the page tables
//! there shows whether it is:
//!
//! | page | spaces | address in each |
//! |---|---|---|
//! | anonymous | the family's: all spaces that came from one space by `fork` | the index; and the addresses to which `mremap` [has moved](moved) shared pages of this address |
//! | of an object | the spaces of VMAs that [map the object](mapping) | the index plus the VMA's distance |
//!
//! No VMA is looked up: an entry that names the frame is a mapping of the frame, and no other entry
//! is. So the metadata and the lists are hints. A place may be missed because of a fork or an
//! `mremap` in progress, or may contain another page by now. The only consequence is that the
//! number of mappings found differs from the frame's reference count; then the caller leaves the
//! frame unchanged.
//!
//! # The cost of a walk
//!
//! A [walk](walk) for an anonymous page ends after it has found as many entries as the frame has
//! references. The page's space of origin is searched first, and then the remaining spaces, the
//! latest fork first. So a page with one mapping costs one search, for any size of its family, and
//! a page mapped by all spaces costs one search for each. (A page shared by two spaces of a large
//! family may cost a search in all spaces.) Families do not grow with the generations of a fork
//! tree: an ending space leaves its family, and a family ends with its last space. For a page of an
//! object a walk reads the page's entry in each mapping of the object.
//!
//! # Locks
//!
//! A walk holds a lock only to copy a few places from a list, and reads tables in a grace section.
//! Spaces that are about to end [wait](walker) for the walk. A change of an entry takes only the
//! entry, and claims no page.

pub(crate) mod anchor;
mod anon_vma;
mod interval_tree;
pub(crate) mod locked;
pub(crate) mod mapping;
pub(crate) mod moved;
pub(crate) mod visits;
pub(crate) mod walk;
pub(crate) mod walker;

pub use anon_vma::{AnonVma, AnonVmaSlot, AnonVmas};
