//! Page tables in the x86-64 format, four levels, on every machine.
//!
//! - [`entry`]: one value; - [`protocol`]: who may change it, and how; - [`node`]: one table;
//! - [`walk`]: one address; - [`range`]: many.
//!
//! Tables appear when a fault publishes one into the entry above, under the same protocol and the
//! same validation as a page. They go when the VMAs over their whole span are gone
//! ([`range::prune`]): unlinked, flushed, and freed after a grace period.

pub mod entry;
pub mod node;
pub mod protocol;
pub mod range;
pub mod walk;

pub use entry::Entry;
