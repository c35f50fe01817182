//! The results of a run.

use crate::program::Program;
use crate::programs::Pft;
use crate::system::{Crew, Failure, Footprint, Measured, Mode, Report, System};

/// A workload's results.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The workload's name.
    pub workload: &'static str,
    /// The machine's name.
    pub machine: String,
    /// The number of workers.
    pub threads: usize,
    /// The memory shared by the workers.
    pub mode: Mode,
    /// The operations of all workers, in `unit`.
    pub operations: u64,
    /// The unit of operations, in the plural.
    pub unit: &'static str,
    /// Page faults served by the machine during the run.
    pub faults: u64,
    /// Seconds from the start of the first worker to the end of the last, on the clock.
    pub wall: f64,
    /// Seconds of processor time in the program itself, of all workers.
    pub user: f64,
    /// Seconds of processor time in the system, of all workers.
    pub system: f64,
    /// Other counters of the machine during the run, by name.
    pub counters: Vec<(&'static str, u64)>,
    /// Counts at the end of the work, for workloads with files: `file_pages`, their pages in
    /// memory; `shared_frames`, their frames mapped by more than one process. Empty if the machine
    /// does not report them.
    pub left: Vec<(&'static str, u64)>,
    /// The times of the first touches measured by the workload, in nanoseconds, in ascending order.
    pub allocations: Vec<f64>,
    /// Frames in use during the run, if the workload measures them.
    pub footprint: Footprint,
    /// The reports of the workers.
    pub workers: Vec<Report>,
    /// Further results of this workload, by name.
    pub extras: Vec<(&'static str, f64)>,
}

/// The head of [`Outcome::pft_row`].
pub const PFT_HEADER: &str =
    " Gb Rep Threads CLine   User      System     Wall  pages/cpu/s   pages/wsec";

/// Returns a percentile of `sorted` values, in thousandths. `None` if there are too few values:
/// fewer than one is above the percentile.
pub fn percentile(sorted: &[f64], of_thousand: usize) -> Option<f64> {
    let above = sorted.len() * 1000_usize.saturating_sub(of_thousand) / 1000;
    if above == 0 { None } else { sorted.get(sorted.len() * of_thousand / 1000).copied() }
}

impl Outcome {
    /// Runs `program` on `system`.
    pub(crate) fn of<S, P>(system: &S, program: &P, crew: &Crew) -> Result<Self, Failure>
    where
        S: System,
        P: Program,
    {
        let measured = system.run(program, crew)?;
        Ok(Self::new::<P>(system.machine(), crew, program.extras(&measured), measured))
    }

    fn new<P: Program>(
        machine: String,
        crew: &Crew,
        extras: Vec<(&'static str, f64)>,
        measured: Measured,
    ) -> Self {
        Self {
            workload: P::NAME,
            machine,
            threads: crew.workers,
            mode: crew.mode,
            operations: measured.tally().operations,
            unit: P::UNIT,
            faults: measured.faults,
            wall: measured.wall(),
            user: measured.workers.iter().map(|worker| worker.user).sum(),
            system: measured.workers.iter().map(|worker| worker.system).sum(),
            counters: measured.counters,
            left: measured.left,
            allocations: measured.allocations,
            footprint: measured.footprint,
            workers: measured.workers,
            extras,
        }
    }

    /// Returns the operations per second of wall time.
    pub fn operations_per_second(&self) -> f64 {
        rate(self.operations, self.wall)
    }

    /// Returns the faults per second of wall time.
    pub fn faults_per_second(&self) -> f64 {
        rate(self.faults, self.wall)
    }

    /// Returns the faults per second of processor time.
    pub fn faults_per_cpu_second(&self) -> f64 {
        rate(self.faults, self.user + self.system)
    }

    /// Returns the extra result named `name`.
    pub fn extra(&self, name: &str) -> Option<f64> {
        self.extras.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
    }

    /// Returns the counter or final count named `name`, if the machine has it.
    pub fn counter(&self, name: &str) -> Option<u64> {
        self.counters
            .iter()
            .chain(&self.left)
            .find(|(known, _)| *known == name)
            .map(|(_, count)| *count)
    }

    /// Returns a percentile of allocation times, in thousandths and nanoseconds. `None` with too
    /// few measurements, such as fewer than 100 for 990 or fewer than 1000 for 999.
    pub fn allocation(&self, of_thousand: usize) -> Option<f64> {
        percentile(&self.allocations, of_thousand)
    }

    /// Returns the classic row of the page fault test, under [`PFT_HEADER`]; `None` for other
    /// workloads.
    ///
    /// The original counts a fault for each touched page. With prefault a fault serves several
    /// pages, so the head shows pages; see [`faults`](Self::faults) for the actual faults. `CLine`
    /// is the number of written cache lines per page.
    pub fn pft_row(&self) -> Option<String> {
        let size = self.extra(Pft::GIGABYTES)?;
        let repetitions = self.extra(Pft::REPETITIONS)?;
        let size = if size.fract() == 0.0 { format!("{size}") } else { format!("{size:.2}") };
        Some(format!(
            "{size:>3} {repetitions:>3.0} {:>4} {:>7} {:>9.3}s {:>10.3}s {:>7.3}s {:>12.3} {:>12.3}",
            self.threads,
            Pft::CACHE_LINES,
            self.user,
            self.system,
            self.wall,
            rate(self.operations, self.user + self.system),
            self.operations_per_second(),
        ))
    }
}

/// Returns `count` per second over `seconds`; 0 if no time has passed.
fn rate(count: u64, seconds: f64) -> f64 {
    // Counts are far below 2^53.
    if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::system::Tally;

    #[test]
    fn sums_and_rates() {
        let worker = |begin, end| Report {
            tally: Tally { operations: 100, extra: 1 },
            user: 0.25,
            system: 0.75,
            span: (begin, end),
            aside: 0.0,
        };
        let measured = Measured {
            workers: vec![worker(1.0, 2.0), worker(1.5, 3.0)],
            faults: 220,
            counters: vec![("spf", 5)],
            left: vec![("file_pages", 7)],
            ..Measured::default()
        };
        let crew = Crew { workers: 2, mode: Mode::Threads, limit: None };
        let extras = vec![(Pft::GIGABYTES, 4.0), (Pft::REPETITIONS, 3.0)];
        let outcome = Outcome::new::<Pft>("test".into(), &crew, extras, measured);
        assert_eq!((outcome.operations, outcome.faults, outcome.wall), (200, 220, 2.0));
        assert_eq!(outcome.counter("spf"), Some(5));
        assert_eq!((outcome.counter("file_pages"), outcome.counter("sfp")), (Some(7), None));
        assert_eq!(outcome.operations_per_second(), 100.0);
        assert_eq!(outcome.faults_per_second(), 110.0);
        assert_eq!(outcome.faults_per_cpu_second(), 110.0);
        assert_eq!(
            outcome.pft_row().as_deref(),
            Some("  4   3    2       1     0.500s      1.500s   2.000s      100.000      100.000"),
        );
    }

    #[test]
    fn empty_measurement_does_not_divide_by_zero() {
        let crew = Crew { workers: 0, mode: Mode::Threads, limit: None };
        let outcome = Outcome::new::<Pft>("test".into(), &crew, Vec::new(), Measured::default());
        assert_eq!(outcome.wall, 0.0);
        assert_eq!(outcome.faults_per_second(), 0.0);
        assert_eq!(outcome.pft_row(), None);
    }
}
