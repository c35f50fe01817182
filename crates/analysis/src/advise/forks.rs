//! Copies of address spaces: the time of `fork` on this host, and the copies of pages afterwards.

use super::costs::Costs;
use super::findings::Findings;
use super::item::{Apply, Item, Open};
use super::sysfs::{Mode, Sizes};
use crate::error::Error;
use crate::number::{grouped, plural};
use crate::rates::median;
use faultless::PAGE_SIZE;
use faultless_trace::anticipate::folio::THP;
use faultless_trace::fork::{Forks, HugeForks};
use memmap2::{Advice, MmapMut};
use nix::sys::wait::waitpid;
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{ForkResult, fork, read};
use std::io::{Write, pipe};
use std::os::fd::AsFd;
use std::time::Duration;

/// Pages of the memory whose copy is measured: 64 MiB.
const PAGES: usize = 16 << 10;
/// Bytes of a huge page with base pages of 4 KiB.
const HUGE: usize = (PAGE_SIZE as usize) << THP;
/// Stores after a fork whose time is measured, each to another 2 MiB.
const STORES: usize = PAGES * PAGE_SIZE as usize / HUGE - 1;
/// The rounds of the measurement.
const ROUNDS: usize = 7;
/// Copied pages from which a line is worth the reader's time.
const FEW: u64 = 1000;

/// The processor time of a fork on this host, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ForkCost {
    /// A fork of a small process.
    pub base: f64,
    /// The copy of the entry of one page.
    pub entry: f64,
    /// Memory in huge pages; `None` if the host permits no huge pages, or has huge pages above
    /// 2 MiB, which are not measured.
    pub huge: Option<HugeCost>,
}

/// The processor time of huge pages at a fork, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HugeCost {
    /// The copy of the entry of one huge page.
    pub entry: f64,
    /// The first store after the fork to a huge page, beyond the copy of a page: the kernel splits
    /// the huge page.
    pub split: f64,
}

impl ForkCost {
    /// Measures forks of this process, with and without additional memory.
    ///
    /// # Errors
    /// The host has too little memory, or permits no further process.
    pub fn measure() -> Result<Self, Error> {
        let sizes = Sizes::read();
        let permitted = sizes.thp == THP && sizes.thp_mode() != Mode::Never;
        let mut times: [Vec<f64>; 3] = Default::default();
        let mut stores: [Vec<f64>; 2] = Default::default();
        for _ in 0..ROUNDS {
            times[0].push(time(&mut [])?.0);
            for (at, huge) in [false, true].into_iter().enumerate() {
                if huge && !permitted {
                    continue;
                }
                let mut memory = touched(huge)?;
                let (fork, store) = time(&mut memory)?;
                times[at + 1].push(fork);
                stores[at].push(store / STORES as f64);
            }
        }
        let [small, single, huge] = times.map(|times| median(&times).unwrap_or(0.0));
        let [copy, split] = stores.map(|stores| median(&stores).unwrap_or(0.0));
        let entry = |all: f64, count: usize| ((all - small) / count as f64).max(0.0);
        let huge = permitted.then(|| HugeCost {
            entry: entry(huge, PAGES * PAGE_SIZE as usize / HUGE),
            split: (split - copy).max(0.0),
        });
        Ok(Self { base: small, entry: entry(single, PAGES), huge })
    }

    /// Returns the time of a fork that copies this number of entries, in nanoseconds.
    pub fn time(&self, entries: u64) -> f64 {
        self.base + entries as f64 * self.entry
    }

    /// Returns the nanoseconds of a fork that copies the entries of this number of huge pages, and
    /// of other pages; `None` if the host permits no huge pages.
    pub fn time_of_huge(&self, [blocks, entries]: [u64; 2]) -> Option<f64> {
        Some(self.time(entries) + blocks as f64 * self.huge?.entry)
    }

    /// Returns the nanoseconds of forks with these huge pages, and of the splits afterwards. The
    /// copies of pages are not included.
    fn with_huge(&self, forks: HugeForks) -> Option<f64> {
        let huge = self.huge?;
        Some(
            forks.entries as f64 * self.entry
                + forks.blocks as f64 * huge.entry
                + forks.splits as f64 * huge.split,
        )
    }
}

/// Returns the nanoseconds that forks and splits take longer with huge pages for all memory than
/// with the host's settings; negative if they are shorter.
pub fn longer_with_huge(findings: &Findings) -> f64 {
    time_with(findings, Mode::Always) - time_with(findings, findings.sizes.thp_mode())
}

/// Returns the nanoseconds that forks and splits take longer with the host's settings than without
/// huge pages.
pub fn longer_than_single(findings: &Findings) -> f64 {
    time_with(findings, findings.sizes.thp_mode()) - time_with(findings, Mode::Never)
}

/// Returns the nanoseconds of all forks and splits with this setting of huge pages; 0 without a
/// measurement.
fn time_with(findings: &Findings, mode: Mode) -> f64 {
    let Some(cost) = findings.fork_cost else { return 0.0 };
    let [all, asked] = findings.forks.huge;
    let single = findings.forks.entries as f64 * cost.entry;
    match mode {
        Mode::Always => cost.with_huge(all).unwrap_or(single),
        Mode::Madvise => cost.with_huge(asked).unwrap_or(single),
        Mode::Never => single,
    }
}

/// Returns memory that is all resident, in huge pages if the host permits them, or in single pages.
fn touched(huge: bool) -> Result<MmapMut, Error> {
    let failed = |error| Error::host("memory for the measurement of a fork", error);
    let mut memory = MmapMut::map_anon(PAGES * PAGE_SIZE as usize).map_err(failed)?;
    // A kernel without huge pages refuses the advice, and has single pages anyway.
    _ = memory.advise(if huge { Advice::HugePage } else { Advice::NoHugePage });
    memory.iter_mut().step_by(PAGE_SIZE as usize).for_each(|byte| *byte = 1);
    Ok(memory)
}

/// Returns the nanoseconds of one fork, and of [`STORES`] stores to `memory` while a child shares
/// it: processor time of this thread, which other programs hardly affect. Stores nothing to empty
/// memory.
fn time(memory: &mut [u8]) -> Result<(f64, f64), Error> {
    let failed = |error: nix::Error| Error::host("a fork", std::io::Error::from(error));
    let now = || clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from);
    let nanoseconds =
        |begin: Duration, end: Duration| end.saturating_sub(begin).as_secs_f64() * 1e9;
    let (end, mut other_end) = pipe().map_err(|error| Error::host("a pipe", error))?;
    let begin = now().map_err(failed)?;
    // SAFETY: the child only calls read and _exit, which are async-signal-safe.
    let forked = unsafe { fork() }.map_err(failed)?;
    match forked {
        ForkResult::Child => {
            // The parent writes after its stores. Other children may have the parent's end, too, so
            // the end of the pipe is no sign.
            _ = read(end.as_fd(), &mut [0]);
            // SAFETY: _exit ends the child without running any code of this process.
            unsafe { libc::_exit(0) }
        }
        ForkResult::Parent { child } => {
            let forked = now();
            let skip = memory.as_ptr().align_offset(HUGE).min(memory.len());
            for byte in memory[skip..].iter_mut().step_by(HUGE).take(STORES) {
                *byte = 2;
            }
            let stored = now();
            other_end.write_all(&[0]).map_err(|error| Error::host("a pipe", error))?;
            waitpid(child, None).map_err(failed)?;
            let (forked, stored) = (forked.map_err(failed)?, stored.map_err(failed)?);
            Ok((nanoseconds(begin, forked), nanoseconds(forked, stored)))
        }
    }
}

/// Returns the predicted item: a program that starts others by `vfork`.
pub fn predicted(findings: &Findings, costs: &Costs) -> Option<Item> {
    let Forks { to_execute, execute_entries, .. } = findings.forks;
    let cost = findings.fork_cost?;
    // A parent also faults at the first store to each page after the fork.
    let saving = execute_entries as f64 * cost.entry;
    (to_execute > 0).then(|| Item {
        name: "programs started by vfork".into(),
        action: format!(
            "posix_spawn or vfork in the program for {}: spares the copy of {} entries of page tables",
            plural(to_execute, "fork"),
            grouped(execute_entries)
        ),
        saving: saving.min(execute_entries as f64 * costs.page),
        spared: Some(0.0),
        unused: 0,
        apply: Apply::Nothing,
        at_best: 0.0,
        remarks: vec!["the faults of the parent after each fork are not counted"],
    })
}

/// Returns the advice about copied pages, which no setting avoids.
pub fn open(findings: &Findings) -> Option<Open> {
    let copied = findings.forks.copied;
    let advice = |name: &str, why: &str| {
        Some(Open {
            name: name.into(),
            action: "no setting helps".into(),
            why: why.into(),
            apply: Apply::Nothing,
        })
    };
    if copied.by_child >= FEW && findings.program_name().starts_with("ruby") {
        return advice(
            "copies in children of Ruby",
            "the collector marks objects in separate bitmaps, and moves and ages them in place. \
             Process.warmup (Ruby 3.3) or GC.compact before the fork spares copies",
        );
    }
    if copied.by_parent >= FEW {
        return advice(
            "copies in the parent",
            "each first store to a page while a child has it copies the page: a shorter life of \
             the child, or fewer stores, spare copies. With huge pages the kernel splits the huge \
             page at the first store, and copies single pages",
        );
    }
    None
}

#[cfg(test)]
mod tests {
    use super::super::costs::tests::costs;
    use super::super::items::tests::{findings, sizes};
    use super::super::sysfs::Mode;
    use super::*;

    #[test]
    fn fork_of_more_pages_takes_longer() {
        let plausible = |cost: ForkCost| {
            // A huge page has one entry.
            let huge = |huge: HugeCost| huge.entry < 512.0 * cost.entry && huge.split > 100.0;
            cost.base > 1e3
                && cost.entry > 0.5
                && cost.entry < 1e4
                && cost.time(1 << 18) > cost.base
                && cost.huge.is_none_or(huge)
        };
        // Other programs disturb single measurements.
        let measured = || ForkCost::measure().expect("memory");
        assert!((0..9).any(|_| plausible(measured())), "{:?}", measured());
    }

    #[test]
    fn huge_pages_make_forks_shorter_and_stores_longer() {
        let mut findings = findings("python", sizes(Mode::Madvise));
        let all = HugeForks { blocks: 10, entries: 100, splits: 8, most: [10, 100] };
        let asked = HugeForks { blocks: 4, entries: 3000, splits: 1, most: [4, 3000] };
        findings.forks = Forks { entries: 5000, huge: [all, asked], ..Forks::default() };
        assert_eq!((longer_with_huge(&findings), longer_than_single(&findings)), (0.0, 0.0));
        let huge = Some(HugeCost { entry: 200.0, split: 9000.0 });
        findings.fork_cost = Some(ForkCost { base: 1e5, entry: 20.0, huge });
        let [always, requests, never] =
            [2000.0 + 2000.0 + 72_000.0, 60_000.0 + 800.0 + 9000.0, 100_000.0];
        assert_eq!(longer_with_huge(&findings), always - requests);
        assert_eq!(longer_than_single(&findings), requests - never);
        findings.sizes = sizes(Mode::Always);
        assert_eq!(longer_than_single(&findings), always - never);
        let cost = findings.fork_cost.expect("measured");
        assert_eq!(cost.time_of_huge(all.most), Some(1e5 + 2000.0 + 2000.0));
        findings.fork_cost = Some(ForkCost { base: 1e5, entry: 20.0, huge: None });
        assert_eq!(longer_than_single(&findings), 0.0);
    }

    #[test]
    fn vfork_saves_the_copy_of_entries() {
        let mut findings = findings("python", sizes(Mode::Madvise));
        let forks = Forks { forks: 3, to_execute: 2, execute_entries: 50_000, ..Forks::default() };
        findings.forks = forks;
        assert!(predicted(&findings, &costs()).is_none(), "without a measurement");
        findings.fork_cost = Some(ForkCost { base: 1e5, entry: 20.0, huge: None });
        let got = predicted(&findings, &costs()).expect("two forks");
        assert_eq!((got.saving, got.apply), (1e6, Apply::Nothing));
        findings.forks.to_execute = 0;
        assert!(predicted(&findings, &costs()).is_none(), "children that go on as copies");
    }

    #[test]
    fn copies_are_explained_for_each_runtime() {
        let mut findings = findings("python", sizes(Mode::Madvise));
        let names = |findings: &Findings| open(findings).map(|open| open.name);
        findings.forks.copied.by_child = 5000;
        findings.name = "/usr/bin/ruby".into();
        assert_eq!(names(&findings).as_deref(), Some("copies in children of Ruby"));
        findings.name = "redis-server".into();
        assert_eq!(names(&findings), None);
        findings.forks.copied.by_parent = 5000;
        assert_eq!(names(&findings).as_deref(), Some("copies in the parent"));
    }
}
