//! Memory objects: what is behind a mapping of a file or of shared memory.

mod life;
pub mod object;
pub mod pages;

pub use object::Object;
