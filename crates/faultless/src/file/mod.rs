//! Memory objects: what is behind a mapping of a file or of shared memory.

pub mod object;

pub use object::Object;
