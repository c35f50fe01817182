//! Counted instructions of prefault. The example `printed` of `crates/bench` includes this file,
//! and fails if `bench instructions` counts other numbers.

/// Instructions of a page in sequence (`sequential_write_per_page`), besides those that fill the
/// page, by `prefault_max_order`.
pub const SEQUENTIAL: [(u32, f64); 3] = [(0, 220.99), (3, 253.57), (5, 115.90)];
