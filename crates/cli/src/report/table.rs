//! Tables, and the rows of counters that comparisons share.

use super::Style;
use super::number::{grouped, percent};
use comfy_table::presets::{ASCII_MARKDOWN, NOTHING, UTF8_HORIZONTAL_ONLY};
use comfy_table::{Cell, CellAlignment, ContentArrangement, Table};
use faultless::{Counter, Totals};

/// A table of words without lines.
pub fn plain(head: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(head.iter().copied());
    table
}

/// A table of numbers: the first column names, the others are aligned to the right.
pub fn numbers(head: &[String], style: Style) -> Table {
    let mut table = Table::new();
    table.load_preset(if style.terminal { UTF8_HORIZONTAL_ONLY } else { ASCII_MARKDOWN });
    table.set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(head.iter().enumerate().map(|(at, name)| aligned(at, name.clone())));
    table
}

/// Adds a row to a table of [`numbers`].
pub fn row(table: &mut Table, cells: impl IntoIterator<Item = String>) {
    table.add_row(cells.into_iter().enumerate().map(|(at, cell)| aligned(at, cell)));
}

fn aligned(column: usize, text: String) -> Cell {
    let side = if column == 0 { CellAlignment::Left } else { CellAlignment::Right };
    Cell::new(text).set_alignment(side)
}

/// The counters that tell policies apart, in groups.
const GROUPS: [(&str, &[Counter]); 4] = [
    ("", &[Counter::Faults, Counter::Spf]),
    (
        "abort: ",
        &[
            Counter::SpfVmaChanged,
            Counter::SpfVmaNoanon,
            Counter::SpfVmaNotsup,
            Counter::SpfVmaAccess,
            Counter::SpfPmdChanged,
            Counter::SpfNomem,
            Counter::AbortSingleThreaded,
            Counter::TrylockFailed,
        ],
    ),
    (
        "lock: ",
        &[
            Counter::MmapLockRead,
            Counter::MmapLockWrite,
            Counter::RangeLockFault,
            Counter::RangeLockWrite,
            Counter::VmaLockSuccess,
            Counter::VmaLockAbort,
            Counter::VmaLockRetry,
            Counter::VmaLockMiss,
        ],
    ),
    ("tlb: ", &[Counter::TlbFlush, Counter::TlbShootdownSent]),
];

/// Adds the rows of the counters that any of `columns` counted; `None` is a machine without them.
pub fn counters(table: &mut Table, columns: &[Option<Totals>]) {
    for (group, counters) in GROUPS {
        for &counter in counters {
            let count = |totals: &Option<Totals>| totals.map_or(0, |totals| totals.get(counter));
            if group != "" && columns.iter().all(|totals| count(totals) == 0) {
                continue;
            }
            let cell = |totals: &Option<Totals>| match totals {
                None => "-".to_owned(),
                Some(totals) if counter == Counter::Spf => {
                    percent(totals.get(counter), totals.get(Counter::Faults))
                }
                Some(totals) => grouped(totals.get(counter)),
            };
            let name = match counter {
                Counter::Spf => "spf: served without a lock".to_owned(),
                counter => format!("{group}{}", counter.name()),
            };
            row(table, std::iter::once(name).chain(columns.iter().map(cell)));
        }
    }
}
