//! Page tables, in one format on every machine.
//!
//! - [`format`]: the bits of an entry, and the levels; - [`protocol`]: which CPU may change an entry, and how; - [`node`]: one table;
//! - [`walk`]: one address; - [`range`]: many.
//!
//! Tables appear when a fault publishes one into the entry above, under the same protocol and the
//! same validation as a page. They go when the VMAs over their whole span are gone
//! ([`range::prune`]): unlinked, flushed, and freed after a grace period.

pub mod format;
pub mod node;
pub mod protocol;
pub mod range;
pub mod walk;

pub use format::Entry;
