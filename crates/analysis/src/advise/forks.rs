//! Copies of address spaces: the time of `fork` on this host, and the copies of pages afterwards.

use super::costs::Costs;
use super::findings::Findings;
use super::item::{Apply, Item, Open};
use crate::error::Error;
use crate::number::{grouped, plural};
use crate::rates::median;
use faultless::PAGE_SIZE;
use faultless_trace::fork::Forks;
use memmap2::{Advice, MmapMut};
use nix::sys::wait::waitpid;
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{ForkResult, fork};
use std::time::Duration;

/// Pages of the memory whose copy is measured: 64 MiB.
const PAGES: usize = 16 << 10;
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
}

impl ForkCost {
    /// Measures forks of this process, with and without additional memory.
    ///
    /// # Errors
    /// The host has too little memory, or permits no further process.
    pub fn measure() -> Result<Self, Error> {
        let mut times = [Vec::new(), Vec::new()];
        for _ in 0..ROUNDS {
            times[0].push(time()?);
            let _memory = touched()?;
            times[1].push(time()?);
        }
        let [small, large] = times.map(|times| median(&times).unwrap_or(0.0));
        Ok(Self { base: small, entry: ((large - small) / PAGES as f64).max(0.0) })
    }

    /// Returns the time of a fork that copies this number of entries, in nanoseconds.
    pub fn time(&self, entries: u64) -> f64 {
        self.base + entries as f64 * self.entry
    }
}

/// Returns memory of single pages that are all resident.
fn touched() -> Result<MmapMut, Error> {
    let failed = |error| Error::host("memory for the measurement of a fork", error);
    let mut memory = MmapMut::map_anon(PAGES * PAGE_SIZE as usize).map_err(failed)?;
    // A kernel without huge pages refuses the advice, and has single pages anyway.
    _ = memory.advise(Advice::NoHugePage);
    memory.iter_mut().step_by(PAGE_SIZE as usize).for_each(|byte| *byte = 1);
    Ok(memory)
}

/// Returns the nanoseconds of one fork: processor time of this thread, which other programs hardly
/// affect.
fn time() -> Result<f64, Error> {
    let failed = |error: nix::Error| Error::host("a fork", std::io::Error::from(error));
    let now = || clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from);
    let begin = now().map_err(failed)?;
    // SAFETY: the child only calls _exit, which is async-signal-safe.
    let forked = unsafe { fork() }.map_err(failed)?;
    match forked {
        // SAFETY: _exit ends the child without running any code of this process.
        ForkResult::Child => unsafe { libc::_exit(0) },
        ForkResult::Parent { child } => {
            let took = now().map_err(failed)?.saturating_sub(begin).as_secs_f64() * 1e9;
            waitpid(child, None).map_err(failed)?;
            Ok(took)
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
    let Forks { copied_by_child, copied_by_parent, .. } = findings.forks;
    let program = findings.program_name();
    let advice = |name: &str, why: &str| {
        Some(Open {
            name: name.into(),
            action: "no setting helps".into(),
            why: why.into(),
            apply: Apply::Nothing,
        })
    };
    if copied_by_child >= FEW && program.starts_with("python") {
        return advice(
            "copies in children of Python",
            "reference counts are in the objects, so even a reader copies their pages. \
             gc.collect() and gc.freeze() before the fork spare the copies made by the collector, \
             and no setting spares the copies made by reference counts",
        );
    }
    if copied_by_child >= FEW && program.starts_with("ruby") {
        return advice(
            "copies in children of Ruby",
            "the collector marks objects in separate bitmaps, and moves and ages them in place. \
             Process.warmup (Ruby 3.3) or GC.compact before the fork spares copies",
        );
    }
    if copied_by_parent >= FEW {
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
            cost.base > 1e3
                && cost.entry > 0.5
                && cost.entry < 1e4
                && cost.time(1 << 18) > cost.base
        };
        // Other programs disturb single measurements.
        let measured = || ForkCost::measure().expect("memory");
        assert!((0..9).any(|_| plausible(measured())), "{:?}", measured());
    }

    #[test]
    fn vfork_saves_the_copy_of_entries() {
        let mut findings = findings("python", sizes(Mode::Madvise));
        let forks = Forks { forks: 3, to_execute: 2, execute_entries: 50_000, ..Forks::default() };
        findings.forks = forks;
        assert!(predicted(&findings, &costs()).is_none(), "without a measurement");
        findings.fork_cost = Some(ForkCost { base: 1e5, entry: 20.0 });
        let got = predicted(&findings, &costs()).expect("two forks");
        assert_eq!((got.saving, got.apply), (1e6, Apply::Nothing));
        findings.forks.to_execute = 0;
        assert!(predicted(&findings, &costs()).is_none(), "children that go on as copies");
    }

    #[test]
    fn copies_are_explained_for_each_runtime() {
        let mut findings = findings("python", sizes(Mode::Madvise));
        let names = |findings: &Findings| open(findings).map(|open| open.name);
        findings.forks.copied_by_child = 5000;
        findings.name = "python3".into();
        assert_eq!(names(&findings).as_deref(), Some("copies in children of Python"));
        findings.name = "/usr/bin/ruby".into();
        assert_eq!(names(&findings).as_deref(), Some("copies in children of Ruby"));
        findings.name = "redis-server".into();
        assert_eq!(names(&findings), None);
        findings.forks.copied_by_parent = 5000;
        assert_eq!(names(&findings).as_deref(), Some("copies in the parent"));
    }
}
