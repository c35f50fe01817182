//! Engines for fuzzers: each takes any bytes at all, and panics where a promise is broken.
//!
//! Ordinary tests run them on a fixed corpus and on some thousands of mutations of it;
//! `cargo fuzz` runs them for as long as it is let:
//!
//! ```text
//! cargo +nightly fuzz run operations -- -max_total_time=600
//! ```
//!
//! in the folder `fuzz`, for each of [`ENGINES`].

mod elf;
mod operations;
mod trace;

pub use elf::elf;
pub use operations::operations;
pub use trace::{addresses, body, perf, trace};

/// Takes any bytes.
pub type Engine = fn(&[u8]);

/// All engines, by the names of the fuzz targets.
pub const ENGINES: [(&str, Engine); 6] = [
    ("trace", trace),
    ("body", body),
    ("perf", perf),
    ("addresses", addresses),
    ("elf", elf),
    ("operations", operations),
];
