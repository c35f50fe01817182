//! The memory that khugepaged adds to a program, by the limit of empty pages in a huge page.

use super::findings::Findings;
use super::item::{Apply, Open, size};
use super::sysfs::{Mode, THP};
use faultless::PAGE_SIZE;
use faultless_trace::anticipate::folio::LARGEST;
use faultless_trace::blocks::{Collapsed, PAGES};
use std::fs;
use std::path::{Path, PathBuf};

/// The advised limit of empty pages: an eighth of a huge page.
const ADVISED: u64 = PAGES / 8;
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
    let applies = match findings.sizes.mode(LARGEST) {
        Mode::Always => true,
        Mode::Madvise => findings.census.asks_for_huge,
        Mode::Never => false,
    };
    let [now, with] = [limit, ADVISED].map(|limit| findings.blocks.collapsed(limit));
    let bytes = |collapsed: Collapsed| collapsed.unused * PAGE_SIZE;
    let less = bytes(now).saturating_sub(bytes(with));
    (applies && limit > ADVISED && less >= FEW).then(|| Open {
        name: "khugepaged keeps empty pages".into(),
        action: format!("echo {ADVISED} > {}", file().display()),
        why: format!(
            "with max_ptes_none={limit} khugepaged can make {} huge pages of memory that stays \
             mapped, and adds {} that the program has not touched; with {ADVISED} it makes {} and \
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
        assert!(with_limit(&findings, ADVISED).is_none(), "the advised limit");
        findings.sizes = sizes(Mode::Madvise);
        assert!(with_limit(&findings, 511).is_none(), "no huge pages");
    }

    /// Returns 4 blocks with one page each.
    fn sparse() -> faultless_trace::blocks::Blocks {
        let mut blocks = faultless_trace::blocks::Blocks::default();
        (0..4).for_each(|_| blocks.add_block(1));
        blocks
    }
}
