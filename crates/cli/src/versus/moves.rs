//! What it costs to move a page from one node of memory to another.

use super::{Done, Part, pairs_of, table_of};
use crate::error::CliError;
use crate::report::Style;
use faultless_boot::linux::Stock;
use std::io::Write;

/// What the figures are.
const MOVED: &str = "\
Pages that `move_pages` moves, 512 in a call, from one node of memory to another and back: private pages that may be stored to; that may be read
only; and pages of a file in memory that is mapped to be read. The bare kernel defers the flushes of the latter two (deferred_flush). Both machines
have two nodes, half of memory each, and their CPU in the first; Linux has no automatic NUMA balancing. Copying a page takes 512 counted steps on both.";

/// Prints what was measured; how many rows miss their target.
pub fn tell(
    out: &mut dyn Write,
    done: &[Done],
    stock: &Stock,
    style: Style,
) -> Result<usize, CliError> {
    let pairs = pairs_of(done, Part::Nodes);
    if pairs.is_empty() {
        return Ok(0);
    }
    let (table, missed) = table_of(&pairs, stock, style);
    writeln!(out, "{table}\n{MOVED}\n")?;
    Ok(missed)
}
