//! The reverse map: from a frame to all page-table entries that map it.
//!
//! A program's page tables lead from an address to a frame. Reclaim and migration need the reverse. No frame keeps a list of
//! its entries: that would make a fault write more than the entry and the frame's own line. A frame names two things instead, which the
//! fault stores into the metadata that it writes anyway:
//!
//! - its *anchor* ([`anchor`]): the family of spaces that may map an anonymous page, or the memory object that a page is of;
//! - its *index*: the page number of the address at which an anonymous page was made, or the page's number in its object.
//!
//! From these follow the addresses at which the frame can be mapped, and a look at the page tables there tells where it is:
//!
//! | page | spaces | address in each |
//! |---|---|---|
//! | anonymous | the family's: all that came from one space by `fork` | the index; and where `mremap` [has moved](moved) shared pages of that address |
//! | of an object | those of the VMAs that [map the object](mapping) | the index and the VMA's distance |
//!
//! No VMA is looked up: an entry that names the frame is a mapping of it, and any other is none. So what the metadata and the lists say is
//! a hint. A place that was missed, because a fork or an `mremap` is under way, or that is of another page by now, leads to
//! nothing worse than a count of mappings that is not the frame's count of references; then the caller leaves the frame
//! as it is.
//!
//! # What a walk costs
//!
//! A [walk](walk) for an anonymous page ends once it has found as many entries as the frame has references. The space that made the page
//! comes first, and then the others, the last forked first. So a page that is mapped once costs one look, in however many spaces its family
//! has, and one that all of them map costs one look for each. (A page that two spaces of a large family share may cost a look
//! in the others.) Families do not grow with the generations of a fork tree: a space that ends leaves its family, and a family ends with its
//! last space. For a page of an object a walk looks where each mapping of the object has it.
//!
//! # Locks
//!
//! A walk holds a lock for as long as it copies a few places from a list. It looks at tables in a grace section. Spaces that are about to end [wait](walker)
//! for it. What changes an entry takes the entry alone, and claims nothing.

pub(crate) mod anchor;
mod anon_vma;
mod interval_tree;
pub(crate) mod locked;
pub(crate) mod mapping;
pub(crate) mod moved;
pub(crate) mod visits;
pub(crate) mod walk;
pub(crate) mod walker;

pub use anon_vma::{AnonVma, AnonVmaRef, AnonVmaSlot, SharedAnonVma};
