//! Anticipatory prefault: pages mapped before they are asked for.

pub mod streams;

pub use streams::{Audit, Kind, Miss, Seen, Streams, Window};
