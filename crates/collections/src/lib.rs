//! Collections that never abort: what grows says so in its type, and gives [`OutOfMemory`] when the heap is
//! exhausted, before anything has changed.
//!
//! They take the place of the standard ones in kernels, under the same names. None of them can be cloned or
//! collected into without a result, so no system call can grow one by accident. What must not fail is *charged in
//! advance*: a [`Map`] takes an entry that was [reserved](map::Slot), a [`Chain`] links what is there already.

#![no_std]
#![allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "what these wrap")]
#![cfg_attr(test, allow(clippy::disallowed_macros, reason = "tests run where there is memory"))]

extern crate alloc;

#[cfg(test)]
extern crate std;

pub mod arc;
pub mod chain;
pub mod map;
pub mod string;
pub mod vec;

pub use arc::{Arc, Weak};
pub use chain::{Chain, Link, Linked};
pub use faultless::OutOfMemory;
pub use map::{Map, Slot};
pub use string::String;
pub use vec::Vec;

/// What a collection gives that may have to grow.
pub type Result<T> = core::result::Result<T, OutOfMemory>;
