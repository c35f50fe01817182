//! Memory objects: what is behind a mapping of a file or of shared memory.

pub mod object;

pub(crate) use object::Lent;
pub use object::Object;
