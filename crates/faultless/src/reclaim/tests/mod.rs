//! Tests of reclaim, swap, tiers and compaction, through whole spaces.

mod compactions;
mod evictions;
mod flush_free;
mod fork_trees;
pub(crate) mod holders;
mod lazy;
mod memory;
mod scan_around;
mod seldom;
mod slots;
pub(crate) mod swap;
pub(crate) mod tiers;
