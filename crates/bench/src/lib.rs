//! What the subsystem promises, measured.
//!
//! | bench | what it measures |
//! |---|---|
//! | [`instructions`] | instructions a fault, counted by callgrind |
//! | `lines` | shared cache lines that a fault or a call writes, counted by an instrumented build (feature `observe`) |
//! | [`scaling`] | two threads beside one, with and without an address space that changes meanwhile |
//! | [`beside`] | what calls of one thread cost those of another in its own part of the same mapping |
//! | [`prefault`] | prefault: faults and time saved, and its cost for threads with random or sparse accesses |
//! | [`zeroing`] | what a zeroed page costs, and whom: in the fault, ahead, on a busy machine |
//! | [`peers`] | the same work through `memory_set` behind a `RwLock` |
//!
//! Each gives figures and gates: a gate is a promise that is met or not. Nothing here is simulated.

#[cfg(not(feature = "observe"))]
pub mod beside;
pub mod facts;
#[cfg(feature = "observe")]
pub mod heap;
mod idle;
#[cfg(not(feature = "observe"))]
pub mod instructions;
#[cfg(feature = "observe")]
pub mod lines;
pub mod machine;
#[cfg(not(feature = "observe"))]
pub mod peers;
#[cfg(not(feature = "observe"))]
pub mod prefault;
pub mod report;
#[cfg(not(feature = "observe"))]
pub mod scaling;
#[cfg(not(feature = "observe"))]
pub mod window;
#[cfg(not(feature = "observe"))]
pub mod zeroing;
