//! Translation look-aside buffers: which CPUs may hold translations, and how they drop them.
//!
//! - [`cpuset`]: the CPUs that may hold translations of a space;
//! - [`deferred`]: flushes that are delayed until a frame is needed;
//! - [`gather`]: the frames that a CPU drops after the flush;
//! - [`shootdown`]: requests to other CPUs, and their acknowledgement.
//!
//! The pending flush of one operation (ranges to flush, then frames whose references to drop) is in
//! `space::batch`.

pub mod cpuset;
pub mod deferred;
pub mod gather;
pub mod shootdown;

#[cfg(all(test, not(loom)))]
pub(crate) mod tests;
