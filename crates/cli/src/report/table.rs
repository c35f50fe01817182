//! Tables, and the rows of counters shared by comparisons.

use super::{Style, terminal_columns};
use comfy_table::presets::{ASCII_MARKDOWN, NOTHING};
use comfy_table::{Cell, CellAlignment, ContentArrangement, LineStyle, Table, TableStyle};
use faultless::Counter;
use faultless_analysis::Sample;
use faultless_analysis::columns::Topic;
use faultless_analysis::number::{grouped, percent};

/// Creates a table of words without lines, filled to the width of the terminal.
pub fn plain() -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    if let Some(columns) = terminal_columns() {
        table.set_width(columns);
    }
    table
}

/// A single line below the head.
const RULED: TableStyle =
    TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));

/// Creates a table of numbers. The first column has names, and the other columns are aligned to the
/// right.
pub fn numbers(head: &[String], style: Style) -> Table {
    let mut table = Table::new();
    table.load_style(if style.terminal { RULED } else { ASCII_MARKDOWN });
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

/// The counters that differ between policies, in groups.
const LOCKING: [(&str, &[Counter]); 5] = [
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
        ],
    ),
    ("", &[Counter::AbortSingleThreaded, Counter::TrylockFailed]),
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

/// The counters of prefault and of pre-zeroed frames.
const PREFAULT: [(&str, &[Counter]); 1] = [(
    "",
    &[
        Counter::Faults,
        Counter::PrefaultHit,
        Counter::PrefaultPage,
        Counter::PrefaultWasted,
        Counter::ZeroedInFault,
        Counter::ZeroedPoolHit,
        Counter::ZeroedPoolMiss,
    ],
)];

/// Adds the rows for the counters of `topic` above 0 in any of `columns`.
pub fn counters(table: &mut Table, topic: Topic, columns: &[&Sample]) {
    let groups = match topic {
        Topic::Locking => &LOCKING[..],
        Topic::Prefault => &PREFAULT[..],
    };
    for (group, counters) in groups {
        for &counter in *counters {
            let idle = |sample: &&Sample| sample.counter(counter).unwrap_or(0) == 0;
            if counter != Counter::Faults && columns.iter().all(idle) {
                continue;
            }
            let cell = |sample: &&Sample| match (counter, sample.counter(counter)) {
                (Counter::Faults, _) => grouped(sample.faults),
                (_, None) => "-".to_owned(),
                (Counter::Spf, Some(count)) => percent(count, sample.faults),
                (_, Some(count)) => grouped(count),
            };
            let name = match counter {
                Counter::Spf => "spf: handled without a lock".to_owned(),
                counter => format!("{group}{}", counter.name()),
            };
            row(table, std::iter::once(name).chain(columns.iter().map(cell)));
        }
    }
}
