//! Advice to populate large blocks ahead of their use, by a thread of the preloaded library.
//!
//! The saving is not predicted: a recording shows neither free CPUs nor whether a block is used in
//! order.

use super::findings::Findings;
use super::item::{Apply, Open, size};
use super::items::MOSTLY;
use crate::number::plural;
use faultless::PAGE_SIZE;
use faultless_trace::census::Mappings;

/// The smallest distance in bytes.
pub const LEAST: u64 = 256 << 10;
/// The largest advised distance in bytes.
const MOST: u64 = 64 << 20;
/// The share of a block's touched bytes by which the library is ahead, which bounds the unused
/// pages.
const SHARE: u64 = 8;
/// The smallest block in bytes that is worth a line.
const BLOCK: u64 = 16 << 20;
/// From this size on, populating a whole block at once delays the program.
const LARGE: u64 = 64 << 20;
/// The share of faults for single pages below which huge pages serve the blocks.
const SINGLE: f64 = 0.5;

/// Returns the advice for blocks that are used in parts, or are too large to populate at once.
pub fn open(findings: &Findings) -> Option<Open> {
    if !findings.program.populates() || findings.single() < SINGLE {
        return None;
    }
    let in_parts =
        |group: &&Mappings| group.len >= LARGE || group.len >= BLOCK && group.used() < MOSTLY;
    let groups: Vec<_> = findings.census.mappings.iter().filter(in_parts).collect();
    let count: u64 = groups.iter().map(|group| group.count).sum();
    let touched: u64 = groups.iter().map(|group| group.touched * PAGE_SIZE).sum();
    let each = touched.checked_div(count)?;
    let distance = (each / SHARE).next_power_of_two().clamp(LEAST, MOST);
    (each >= BLOCK / SHARE).then(|| Open {
        name: "prefault ahead".into(),
        action: format!("faultless run --apply prefault-ahead={}K", distance >> 10),
        why: format!(
            "{} of {} and more, with {} touched; this needs a free CPU, and a program that uses a \
             block in order: a recording of faults shows neither",
            plural(count, "mapping"),
            size(groups.iter().map(|group| group.len).min().unwrap_or(0)),
            size(touched)
        ),
        apply: Apply::PrefaultAhead(distance),
    })
}

#[cfg(test)]
mod tests {
    use super::super::items::tests::{findings, sizes};
    use super::super::sysfs::Mode;
    use super::*;

    #[test]
    fn distance_is_a_share_of_the_touched_bytes() {
        let mut findings = findings("python", sizes(Mode::Madvise));
        assert!(open(&findings).is_none(), "no large mapping: {:?}", findings.census.mappings);
        let mappings = |mib: u64, count, touched_mib: u64| Mappings {
            len: mib << 20,
            count,
            touched: touched_mib << 8,
            unused: 0,
        };
        findings.census.mappings = vec![mappings(1, 9, 9), mappings(32, 1, 32)];
        assert!(open(&findings).is_none(), "a mapping that is used as a whole");
        findings.census.mappings = vec![mappings(1, 9, 9), mappings(32, 2, 16)];
        let got = open(&findings).expect("two mappings, each used by a quarter");
        assert_eq!(got.apply, Apply::PrefaultAhead(1 << 20));
        assert!(
            got.why.starts_with("2 mappings of 32 MiB and more, with 16 MiB touched"),
            "{got:?}"
        );
        findings.census.mappings = vec![mappings(1024, 1, 1024)];
        assert_eq!(open(&findings).expect("large").apply, Apply::PrefaultAhead(MOST));
        findings.program.glibc = false;
        assert!(open(&findings).is_none(), "blocks that the library does not see");
    }
}
