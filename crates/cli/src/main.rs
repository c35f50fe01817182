//! The `faultless` command.
fn main() {}
