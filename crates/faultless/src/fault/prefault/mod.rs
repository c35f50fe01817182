//! Anticipatory prefault: pages mapped before they are asked for.

pub mod past;
pub mod streams;

pub use past::{Footprints, Past};
pub use streams::{Audit, Kind, Miss, Seen, Streams, Tally, Window};
