//! Page tables, in one format on every machine.
//!
//! - [`format`]: the bits of an entry, and the levels;
//! - [`protocol`]: which CPU may change an entry, and how;
//! - [`node`]: a single table;
//! - [`walk`]: a single address;
//! - [`range`]: many addresses.
//!
//! A fault adds a table by publishing it into the entry above, under the same protocol and the same
//! validation as a page. A table is removed when all VMAs over its whole span are gone
//! ([`range::prune`]): unlinked, flushed, and freed after a grace period.

pub mod format;
pub mod node;
pub mod protocol;
pub mod range;
pub mod walk;

pub use format::Entry;
