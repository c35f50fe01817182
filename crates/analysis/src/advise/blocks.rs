//! The memory that khugepaged adds to a program, by the limit of empty pages in a huge page.

use super::findings::Findings;
use super::item::{Apply, Open, size};
use super::sysfs::{Mode, THP};
use faultless::PAGE_SIZE;
use faultless_trace::blocks::Collapsed;
use std::fs;
use std::path::{Path, PathBuf};

/// The share of empty pages in a huge page that is advised as the limit: an eighth.
const ADVISED: u64 = 8;
/// Bytes of additional memory below which a line is not worth the reader's time.
const FEW: u64 = 4 << 20;

/// Returns the file with the limit of empty pages.
fn file() -> PathBuf {
    Path::new(THP).join("khugepaged/max_ptes_none")
}

/// Returns the advice about the limit on this host.
pub fn open(findings: &Findings) -> Option<Open> {
    let limit = fs::read_to_string(file()).ok()?.trim().parse().ok()?;
    with_limit(findings, limit)
}

/// Returns the advice, if the host permits `limit` empty pages.
fn with_limit(findings: &Findings, limit: u64) -> Option<Open> {
    // The limit is a number of base pages.
    let advised = findings.blocks.pages() / findings.small_pages / ADVISED;
    let applies = match findings.sizes.thp_mode() {
        Mode::Always => true,
        Mode::Madvise => findings.census.asks_for_huge,
        Mode::Never => false,
    };
    let [now, with] =
        [limit, advised].map(|limit| findings.blocks.collapsed(limit * findings.small_pages));
    let bytes = |collapsed: Collapsed| collapsed.unused * PAGE_SIZE;
    let less = bytes(now).saturating_sub(bytes(with));
    (applies && limit > advised && less >= FEW).then(|| Open {
        name: "khugepaged keeps empty pages".into(),
        action: format!("echo {advised} > {}", file().display()),
        why: format!(
            "with max_ptes_none={limit} khugepaged can make {} huge pages of memory that stays \
             mapped, and adds {} that the program has not touched; with {advised} it makes {} and \
             adds {}. The saved TLB misses are in no recording",
            now.blocks,
            size(bytes(now)),
            with.blocks,
            size(bytes(with))
        ),
        apply: Apply::Nothing,
    })
}

#[cfg(test)]
mod tests {
    use super::super::items::tests::{findings, sizes};
    use super::*;

    #[test]
    fn empty_pages_are_predicted_if_khugepaged_applies() {
        let mut findings = findings("python", sizes(Mode::Always));
        findings.blocks = faultless_trace::blocks::Blocks::default();
        assert!(with_limit(&findings, 511).is_none(), "no block is used");
        findings.blocks = sparse();
        let got = with_limit(&findings, 511).expect("4 blocks of one page each");
        assert!(got.why.contains("4 huge pages") && got.why.contains("adds 7 MiB"), "{got:?}");
        assert!(with_limit(&findings, 64).is_none(), "the advised limit");
        findings.sizes = sizes(Mode::Madvise);
        assert!(with_limit(&findings, 511).is_none(), "no huge pages");
    }

    #[test]
    fn limit_of_empty_pages_follows_the_base_page() {
        let mut findings = findings("python", sizes(Mode::Always));
        findings.small_pages = 16;
        findings.blocks = faultless_trace::blocks::Blocks::new(1 << 17);
        findings.blocks.add_block(16);
        let got = with_limit(&findings, 8191).expect("a block of one page of 64 KiB");
        assert!(got.action.starts_with("echo 1024 > "), "{got:?}");
        assert!(got.why.contains("1 huge pages") && got.why.contains("adds 511 MiB"), "{got:?}");
        assert!(with_limit(&findings, 8190).is_none(), "too many empty pages");
    }

    /// Returns 4 blocks with one page each.
    fn sparse() -> faultless_trace::blocks::Blocks {
        let mut blocks = faultless_trace::blocks::Blocks::default();
        (0..4).for_each(|_| blocks.add_block(1));
        blocks
    }
}
