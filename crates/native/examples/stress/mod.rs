//! Rounds of random operations on small machines, checked by a model of contents and by the audit.

pub mod accesses;
pub mod calls;
pub mod files;
pub mod kernel;
pub mod operations;
pub mod pins;
pub mod plan;
pub mod region;
pub mod stores;
pub mod tally;
pub mod words;
pub mod world;
