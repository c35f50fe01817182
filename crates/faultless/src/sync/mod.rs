//! Synchronisation primitives, independent of memory management.
//!
//! All shared state of the subsystem goes through [`atomic`], so that one facade serves normal
//! builds, the model checkers (`--cfg loom`, `--cfg shuttle`) and machines that count written
//! cache lines (`--features observe`).

pub mod atomic;
pub mod cpus;
pub mod grace;
pub mod mutant;
#[cfg(any(shuttle, feature = "observe"))]
pub mod observe;
pub mod order;
pub mod owner;
pub mod park;
pub mod percpu;
pub mod range;
pub mod region_counter;
pub mod rwlock;
pub mod sequence;
pub mod spin;
pub mod wait;
