//! Engines for fuzzers: each engine accepts any bytes, and panics if a promise is broken.
//!
//! Ordinary tests run the engines on a fixed corpus and on thousands of mutations; `cargo fuzz`
//! runs the engines without a limit:
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

/// Accepts any bytes.
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
