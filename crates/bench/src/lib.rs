//! Measurements of the subsystem's promises.
//!
//! | bench | measurement |
//! |---|---|
//! | [`instructions`] | instructions per fault, counted by callgrind |
//! | `lines` | shared cache lines written by faults and calls (builds with feature `observe`) |
//! | [`scaling`] | two threads compared with one, with and without concurrent `mmap` calls |
//! | [`beside`] | slowdown by another thread in a separate part of the same mapping |
//! | [`prefault`] | savings of prefault, and its cost for random or sparse accesses |
//! | [`zeroing`] | the cost of a zeroed page: in the fault, ahead, on a busy machine |
//! | [`peers`] | the same work through `memory_set` behind a `RwLock` |
//!
//! Each bench reports figures and gates: a gate is a promise with the result of its check. All
//! figures are measured, and none is simulated.

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
