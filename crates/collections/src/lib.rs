//! Collections that never abort: operations that may grow return a result, with [`OutOfMemory`]
//! when the heap is exhausted, before any change.
//!
//! In kernels they replace the standard collections, under the same names. No collection can be
//! cloned or collected into without a result, so no system call can grow a collection by accident.
//! Memory for operations that must not fail is *charged in advance*: a [`Map`] takes a
//! [reserved](map::Slot) entry, and a [`Chain`] links existing objects.

#![no_std]
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "the types and methods that these collections wrap"
)]
#![cfg_attr(
    test,
    allow(clippy::disallowed_macros, reason = "tests run on hosts with enough memory")
)]

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

/// The result of an operation that may have to grow a collection.
pub type Result<T> = core::result::Result<T, OutOfMemory>;
