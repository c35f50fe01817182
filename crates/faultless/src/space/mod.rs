//! The address space: which ranges are mapped, and the calls that change them.

pub mod tree;
