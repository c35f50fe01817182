//! Memory objects: what is behind a shared mapping.

pub mod shmem;
