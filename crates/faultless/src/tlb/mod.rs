//! Translation look-aside buffers: who may hold what, and how it is dropped.
//!
//! - [`cpuset`]: the CPUs that may hold translations of a space;
//! - [`shootdown`]: requests to other CPUs, and their acknowledgement.
//!
//! What one operation owes — ranges to flush, then frames to let go — is in `space::batch`.

pub mod cpuset;
pub mod shootdown;
