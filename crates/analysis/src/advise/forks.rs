//! Copies of address spaces: the time of `fork` on this host, of the end of the child, and the
//! copies of pages in between.

use super::costs::Costs;
use super::findings::Findings;
use super::item::{Apply, Item, Open};
use super::sysfs::{Mode, Sizes};
use crate::error::Error;
use crate::number::{grouped, plural};
use crate::rates::median;
use faultless::PAGE_SIZE;
use faultless_trace::anticipate::folio::THP;
use faultless_trace::fork::{Entries, Forks, HugeForks};
use memmap2::{Advice, MmapMut};
use nix::errno::Errno;
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{ForkResult, Pid, fork, read};
use std::io::{self, Write, pipe};
use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;

/// Pages of the memory whose copy is measured: 64 MiB.
const PAGES: usize = 16 << 10;
/// Bytes of a huge page with base pages of 4 KiB.
const HUGE: usize = (PAGE_SIZE as usize) << THP;
/// Stores after a fork whose time is measured, each to another 2 MiB.
const STORES: usize = PAGES * PAGE_SIZE as usize / HUGE;
/// The rounds of the measurement.
const ROUNDS: usize = 7;
/// Copied pages from which a line is worth the reader's time.
const FEW: u64 = 1000;

/// The time from the end of a child until its processor time is complete: the kernel adds the last
/// part when the child leaves its processor.
const COMPLETE: Duration = Duration::from_millis(1);

/// The processor time of a fork on this host, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ForkCost {
    /// A fork of a small process.
    pub base: f64,
    /// The entry of a single page.
    pub entry: EntryCost,
    /// Memory in huge pages; `None` if the host permits no huge pages, or has huge pages above
    /// 2 MiB, which are not measured.
    pub huge: Option<HugeCost>,
}

/// The processor time of a page-table entry that a fork copies, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EntryCost {
    /// The copy, in the parent.
    pub copy: f64,
    /// The removal of the copy, when the child ends or executes a program.
    pub removal: f64,
}

/// The processor time of huge pages at a fork, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HugeCost {
    /// The entry of one huge page.
    pub entry: EntryCost,
    /// The entry of one page of a split huge page.
    pub split_entry: EntryCost,
    /// The first store after the fork to a huge page, beyond the copy of a page: the kernel splits
    /// the huge page.
    pub split: f64,
}

/// The processor time of one fork, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
struct Times {
    /// The fork, in the parent.
    fork: f64,
    /// The child, which only waits and ends.
    child: f64,
    /// [`STORES`] stores of the parent while the child lives.
    stores: f64,
}

/// The memory of a measurement of forks.
#[derive(Clone, Copy, Debug)]
enum Memory {
    /// No additional memory.
    Small,
    /// Single pages.
    Single,
    /// Huge pages.
    Huge,
    /// Huge pages, split by a store to each after an earlier fork.
    Split,
}

impl ForkCost {
    /// Measures forks of this process, with and without additional memory.
    ///
    /// # Errors
    /// The host has too little memory, or permits no further process.
    pub fn measure() -> Result<Self, Error> {
        let sizes = Sizes::read();
        let permitted = sizes.thp == THP && sizes.thp_mode() != Mode::Never;
        let mut rounds: [Vec<Times>; 4] = Default::default();
        for _ in 0..ROUNDS {
            rounds[Memory::Small as usize].push(time(&mut [])?);
            let mut memory = map(false)?;
            rounds[Memory::Single as usize].push(time(touched(&mut memory))?);
            drop(memory);
            if permitted {
                let mut memory = map(true)?;
                let memory = touched(&mut memory);
                rounds[Memory::Huge as usize].push(time(memory)?);
                rounds[Memory::Split as usize].push(time(memory)?);
            }
        }
        let middle = |memory: Memory, of: fn(&Times) -> f64| {
            let times: Vec<f64> = rounds[memory as usize].iter().map(of).collect();
            median(&times).unwrap_or(0.0)
        };
        // The entries of `memory`, of which `single` single pages have the cost `cost`.
        let entry = |memory: Memory, count: usize, single: usize, cost: EntryCost| {
            let each = |of: fn(&Times) -> f64, cost: f64| {
                let all = middle(memory, of) - middle(Memory::Small, of) - single as f64 * cost;
                (all / count as f64).max(0.0)
            };
            EntryCost {
                copy: each(|times| times.fork, cost.copy),
                removal: each(|times| times.child, cost.removal),
            }
        };
        let single = entry(Memory::Single, PAGES, 0, EntryCost::default());
        let stores = |memory| middle(memory, |times| times.stores) / STORES as f64;
        let huge = permitted.then(|| HugeCost {
            entry: entry(Memory::Huge, STORES, 0, single),
            // Each block has one copied page, which is a single page.
            split_entry: entry(Memory::Split, PAGES - STORES, STORES, single),
            split: (stores(Memory::Huge) - stores(Memory::Single)).max(0.0),
        });
        Ok(Self { base: middle(Memory::Small, |times| times.fork), entry: single, huge })
    }

    /// Returns the time of a fork that copies this number of entries of single pages, in
    /// nanoseconds.
    pub fn time(&self, entries: u64) -> f64 {
        self.base + entries as f64 * self.entry.copy
    }

    /// Returns the nanoseconds of a fork that copies these entries; `None` if the host permits no
    /// huge pages.
    pub fn time_of_huge(&self, entries: Entries) -> Option<f64> {
        Some(self.base + self.sum(entries, self.huge?, |cost| cost.copy))
    }

    /// Returns the nanoseconds of forks with these huge pages, of the splits afterwards, and of the
    /// ends of the children. The copies of pages are not included.
    fn with_huge(&self, forks: HugeForks) -> Option<f64> {
        let huge = self.huge?;
        let entries = self.sum(forks.entries, huge, EntryCost::total);
        Some(entries + forks.splits as f64 * huge.split)
    }

    /// Returns the part `of` the cost of all `entries`.
    fn sum(&self, entries: Entries, huge: HugeCost, of: fn(&EntryCost) -> f64) -> f64 {
        entries.huge as f64 * of(&huge.entry)
            + entries.split as f64 * of(&huge.split_entry)
            + entries.single as f64 * of(&self.entry)
    }
}

impl EntryCost {
    /// Returns the cost of the copy and its removal.
    pub fn total(&self) -> f64 {
        self.copy + self.removal
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
    let single = findings.forks.entries as f64 * cost.entry.total();
    match mode {
        Mode::Always => cost.with_huge(all).unwrap_or(single),
        Mode::Madvise => cost.with_huge(asked).unwrap_or(single),
        Mode::Never => single,
    }
}

/// Maps memory for [`touched`], in huge pages if the host permits them, or in single pages.
fn map(huge: bool) -> Result<MmapMut, Error> {
    let failed = |error| Error::host("memory for the measurement of a fork", error);
    let memory = MmapMut::map_anon(PAGES * PAGE_SIZE as usize + HUGE).map_err(failed)?;
    // A kernel without huge pages refuses the advice, and has single pages anyway.
    _ = memory.advise(if huge { Advice::HugePage } else { Advice::NoHugePage });
    Ok(memory)
}

/// Returns the part of `memory` that begins at a huge page and has [`PAGES`], after a store to each
/// page.
fn touched(memory: &mut MmapMut) -> &mut [u8] {
    let skip = memory.as_ptr().align_offset(HUGE).min(HUGE);
    let part = &mut memory[skip..skip + PAGES * PAGE_SIZE as usize];
    part.iter_mut().step_by(PAGE_SIZE as usize).for_each(|byte| *byte = 1);
    part
}

/// Measures one fork, and [`STORES`] stores to `memory` while a child shares it: processor time,
/// which other programs hardly affect. Stores nothing to empty memory.
fn time(memory: &mut [u8]) -> Result<Times, Error> {
    let failed = |error: Errno| Error::host("a fork", io::Error::from(error));
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
            memory.iter_mut().step_by(HUGE).for_each(|byte| *byte = 2);
            let stored = now();
            other_end.write_all(&[0]).map_err(|error| Error::host("a pipe", error))?;
            let child = ended(child).map_err(|error| Error::host("a fork", error))?;
            let (forked, stored) = (forked.map_err(failed)?, stored.map_err(failed)?);
            let (fork, stores) = (nanoseconds(begin, forked), nanoseconds(forked, stored));
            Ok(Times { fork, child, stores })
        }
    }
}

/// Waits for the end of `child`. Returns the nanoseconds of its processor time.
fn ended(child: Pid) -> io::Result<f64> {
    waitid(Id::Pid(child), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT)?;
    thread::sleep(COMPLETE);
    // SAFETY: all zeros are a valid value of this structure of numbers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one structure to `usage`, and nothing to the null pointer.
    let waited = unsafe { libc::wait4(child.as_raw(), std::ptr::null_mut(), 0, &raw mut usage) };
    if waited == -1 {
        return Err(io::Error::last_os_error());
    }
    let nanoseconds = |time: libc::timeval| time.tv_sec as f64 * 1e9 + time.tv_usec as f64 * 1e3;
    Ok(nanoseconds(usage.ru_utime) + nanoseconds(usage.ru_stime))
}

/// Returns the predicted item: a program that starts others by `vfork`.
pub fn predicted(findings: &Findings, costs: &Costs) -> Option<Item> {
    let Forks { to_execute, execute_entries, .. } = findings.forks;
    let cost = findings.fork_cost?;
    // A parent also faults at the first store to each page after the fork.
    let saving = execute_entries as f64 * cost.entry.total();
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
            let [copy, removal] = [cost.entry.copy, cost.entry.removal];
            // A huge page has one entry.
            let huge = |huge: HugeCost| {
                huge.entry.total() < 512.0 * cost.entry.total() && huge.split > 100.0
            };
            cost.base > 1e3
                && [copy, removal].iter().all(|one| *one > 0.5 && *one < 1e4)
                && cost.time(1 << 18) > cost.base
                && cost.huge.is_none_or(huge)
        };
        // Other programs disturb single measurements.
        let measured = || ForkCost::measure().expect("memory");
        assert!((0..9).any(|_| plausible(measured())), "{:?}", measured());
    }

    /// Returns a cost in round figures.
    fn cost(huge: Option<HugeCost>) -> ForkCost {
        ForkCost { base: 1e5, entry: EntryCost { copy: 20.0, removal: 10.0 }, huge }
    }

    #[test]
    fn huge_pages_make_forks_shorter_and_stores_longer() {
        let mut findings = findings("python", sizes(Mode::Madvise));
        let most = Entries { huge: 10, split: 0, single: 100 };
        let all = HugeForks { entries: Entries { split: 500, ..most }, splits: 8, most };
        let few = Entries { huge: 4, split: 0, single: 3000 };
        let asked = HugeForks { entries: few, splits: 1, most: few };
        findings.forks = Forks { entries: 5000, huge: [all, asked], ..Forks::default() };
        assert_eq!((longer_with_huge(&findings), longer_than_single(&findings)), (0.0, 0.0));
        let huge = Some(HugeCost {
            entry: EntryCost { copy: 200.0, removal: 50.0 },
            split_entry: EntryCost { copy: 2.0, removal: 1.0 },
            split: 9000.0,
        });
        findings.fork_cost = Some(cost(huge));
        // The ends of the children count, and the pages of split huge pages cost little.
        let [always, requests, never] =
            [3000.0 + 2500.0 + 1500.0 + 72_000.0, 90_000.0 + 1000.0 + 9000.0, 150_000.0];
        assert_eq!(longer_with_huge(&findings), always - requests);
        assert_eq!(longer_than_single(&findings), requests - never);
        findings.sizes = sizes(Mode::Always);
        assert_eq!(longer_than_single(&findings), always - never);
        let measured = findings.fork_cost.expect("measured");
        assert_eq!(measured.time_of_huge(all.most), Some(1e5 + 2000.0 + 2000.0));
        assert_eq!(measured.time_of_huge(all.entries), Some(1e5 + 2000.0 + 1000.0 + 2000.0));
        findings.fork_cost = Some(cost(None));
        assert_eq!(longer_than_single(&findings), 0.0);
    }

    #[test]
    fn vfork_saves_the_copy_of_entries() {
        let mut findings = findings("python", sizes(Mode::Madvise));
        let forks = Forks { forks: 3, to_execute: 2, execute_entries: 50_000, ..Forks::default() };
        findings.forks = forks;
        assert!(predicted(&findings, &costs()).is_none(), "without a measurement");
        findings.fork_cost = Some(cost(None));
        let got = predicted(&findings, &costs()).expect("two forks");
        assert_eq!((got.saving, got.apply), (1.5e6, Apply::Nothing));
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
