//! Events of the whole system during a run that a recording of faults does not contain: stalls for
//! compaction, huge pages that could not be allocated, reads from disk, and interrupts for TLB
//! flushes.

use std::fs;

/// Counts of the whole system during a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stalls {
    /// Faults that waited for compaction.
    pub compaction: u64,
    /// Huge pages allocated by faults.
    pub huge: u64,
    /// Faults that got single pages, because no huge page was free.
    pub fallback: u64,
    /// Huge pages made by khugepaged.
    pub collapsed: u64,
    /// Faults that read from a disk: the page cache was cold.
    pub major: u64,
    /// Interrupts of CPUs for TLB flushes.
    pub shootdowns: u64,
}

impl Stalls {
    /// Reads the counters of this host.
    pub fn read() -> Self {
        let vmstat = fs::read_to_string("/proc/vmstat").unwrap_or_default();
        let interrupts = fs::read_to_string("/proc/interrupts").unwrap_or_default();
        Self::of(&vmstat, &interrupts)
    }

    fn of(vmstat: &str, interrupts: &str) -> Self {
        let count = |name: &str| {
            let of_line = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok();
            vmstat.lines().find_map(of_line).unwrap_or(0)
        };
        let flushes = interrupts.lines().find_map(|line| line.trim_start().strip_prefix("TLB:"));
        let flushes = flushes.unwrap_or_default();
        Self {
            compaction: count("compact_stall"),
            huge: count("thp_fault_alloc"),
            fallback: count("thp_fault_fallback"),
            collapsed: count("thp_collapse_alloc"),
            major: count("pgmajfault"),
            shootdowns: flushes.split_whitespace().map_while(|word| word.parse::<u64>().ok()).sum(),
        }
    }

    /// Returns the counts since `before`.
    pub fn since(&self, before: &Self) -> Self {
        let Self { compaction, huge, fallback, collapsed, major, shootdowns } = *self;
        Self {
            compaction: compaction.saturating_sub(before.compaction),
            huge: huge.saturating_sub(before.huge),
            fallback: fallback.saturating_sub(before.fallback),
            collapsed: collapsed.saturating_sub(before.collapsed),
            major: major.saturating_sub(before.major),
            shootdowns: shootdowns.saturating_sub(before.shootdowns),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_parsed_and_subtracted() {
        let vmstat = "pgmajfault 7\ncompact_stall 3\nthp_fault_alloc 20\nthp_fault_fallback 2\n\
                      thp_fault_fallback_charge 9\nthp_collapse_alloc 4\n";
        let interrupts =
            "      CPU0  CPU1\n LOC:  5  6   Local timer\n TLB:  10  32   TLB shootdowns\n";
        let now = Stalls::of(vmstat, interrupts);
        let (compaction, huge, fallback, collapsed) = (3, 20, 2, 4);
        let want = Stalls { compaction, huge, fallback, collapsed, major: 7, shootdowns: 42 };
        assert_eq!(now, want);
        let before = Stalls { huge: 15, shootdowns: 50, ..Stalls::default() };
        let since = now.since(&before);
        assert_eq!((since.huge, since.shootdowns, since.major), (5, 0, 7));
        assert_eq!(Stalls::of("", ""), Stalls::default());
    }
}
