//! Targets of fuzzers: each target accepts any bytes, and panics if a promise is broken.
//!
//! Ordinary tests run the targets on a fixed corpus and on thousands of mutations; `cargo fuzz`
//! runs the targets without a limit:
//!
//! ```text
//! cargo +nightly fuzz run operations -- -max_total_time=600
//! ```
//!
//! in the folder `fuzz`, for each of [`TARGETS`].

mod elf;
mod operations;
mod trace;

pub use elf::elf;
pub use operations::operations;
pub use trace::{addresses, body, perf, trace};

/// Accepts any bytes.
pub type Target = fn(&[u8]);

/// All targets, by the names of the fuzz targets.
pub const TARGETS: [(&str, Target); 6] = [
    ("trace", trace),
    ("body", body),
    ("perf", perf),
    ("addresses", addresses),
    ("elf", elf),
    ("operations", operations),
];
