//! What a run came to.

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
    /// How many workers ran.
    pub threads: usize,
    /// What they shared.
    pub mode: Mode,
    /// What all of them did, in `unit`.
    pub operations: u64,
    /// What is counted: a plural.
    pub unit: &'static str,
    /// Page faults that the machine served meanwhile.
    pub faults: u64,
    /// Seconds from the first worker's begin to the last one's end, on the clock.
    pub wall: f64,
    /// Seconds of processor time in the program itself, of all workers.
    pub user: f64,
    /// Seconds of processor time in the system, of all workers.
    pub system: f64,
    /// What else the machine counted meanwhile, under its own names.
    pub counters: Vec<(&'static str, u64)>,
    /// What there was at the end of the work, where the workload has files: `file_pages`, pages of them in memory;
    /// `shared_frames`, frames of them that more than one process mapped. Empty where the machine does not tell.
    pub left: Vec<(&'static str, u64)>,
    /// What first touches of pages took that the workload measures, in nanoseconds, the shortest first.
    pub allocations: Vec<f64>,
    /// Frames in use meanwhile, where the workload asks for that.
    pub footprint: Footprint,
    /// Worker by worker.
    pub workers: Vec<Report>,
    /// What else this workload tells, by name.
    pub extras: Vec<(&'static str, f64)>,
}

/// The head of [`Outcome::pft_row`].
pub const PFT_HEADER: &str =
    " Gb Rep Threads CLine   User      System     Wall  pages/cpu/s   pages/wsec";

/// What so many of a thousand of `sorted` values are at most. `None` where there are too few to tell: fewer than one is above it.
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

    /// Operations per second of wall time.
    pub fn operations_per_second(&self) -> f64 {
        rate(self.operations, self.wall)
    }

    /// Faults per second of wall time.
    pub fn faults_per_second(&self) -> f64 {
        rate(self.faults, self.wall)
    }

    /// Faults per second of processor time.
    pub fn faults_per_cpu_second(&self) -> f64 {
        rate(self.faults, self.user + self.system)
    }

    /// The extra result named `name`.
    pub fn extra(&self, name: &str) -> Option<f64> {
        self.extras.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
    }

    /// The counter named `name`, or what there was of that name at the end, where the machine has it.
    pub fn counter(&self, name: &str) -> Option<u64> {
        self.counters
            .iter()
            .chain(&self.left)
            .find(|(known, _)| *known == name)
            .map(|(_, count)| *count)
    }

    /// What so many of a thousand allocations took at most, in nanoseconds; `None` where too few were measured to tell, as of 99 or 999 with fewer than 100 or 1000.
    pub fn allocation(&self, of_thousand: usize) -> Option<f64> {
        percentile(&self.allocations, of_thousand)
    }

    /// The classic row of the page fault test, under [`PFT_HEADER`]; `None` for other workloads.
    ///
    /// The original counts a fault for each page touched. With prefault a fault serves several pages, so the head says
    /// pages; the faults that were taken are [`faults`](Self::faults). `CLine` is how many cache lines of a page are written.
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

/// `count` in `seconds`, per second; 0 where no time has passed.
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
    fn nothing_measured_is_no_division_by_zero() {
        let crew = Crew { workers: 0, mode: Mode::Threads, limit: None };
        let outcome = Outcome::new::<Pft>("test".into(), &crew, Vec::new(), Measured::default());
        assert_eq!(outcome.wall, 0.0);
        assert_eq!(outcome.faults_per_second(), 0.0);
        assert_eq!(outcome.pft_row(), None);
    }
}
