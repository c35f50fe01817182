//! The cost of the faults of a recording with one in several faults.
//!
//! Each recorded fault stands for the omitted faults. The cost of a fault is measured on this host,
//! so the time of the faults and the share of each process can be computed. Which pages the program
//! has touched is unknown, so a setting has no prediction.

use super::ROUNDS;
use super::answer::processor_seconds;
use super::costs::{Costs, Meter};
use crate::context::{Basis, Context};
use crate::error::Error;
use crate::figures::{Figures, Number};
use crate::observer::Observer;
use crate::stop;
use faultless_trace::Trace;
use faultless_trace::event::ProcessSummary;
use faultless_workload::{Linux, System};
use serde_json::Map;

/// The faults of a sampled recording, and their costs on this host.
#[derive(Debug)]
pub struct Sampled {
    /// The name of the recording.
    pub name: String,
    /// The faults of the program for each recorded fault.
    pub period: u64,
    /// Seconds from the first event to the last.
    pub seconds: f64,
    /// The faults of the program by process, the process with the most faults first. The pages are
    /// those of the recorded faults.
    pub processes: Vec<ProcessSummary>,
    /// The measured costs.
    pub costs: Costs,
    /// The most nanoseconds that the threads can have spent.
    limit: f64,
}

impl Sampled {
    /// Steps of progress of [`of`](Self::of).
    pub const STEPS: u64 = ROUNDS as u64;

    /// Counts the faults of `trace`, called `name`, and measures the cost of a page on this host.
    ///
    /// # Errors
    /// The host has too little memory.
    pub fn of(name: &str, trace: &Trace, observer: &dyn Observer) -> Result<Self, Error> {
        let mut meter = Meter::new(false, false)?;
        observer.begin("measures the cost of a page");
        for round in 0..ROUNDS {
            // One round suffices for a result.
            if round > 0 && stop::requested() {
                break;
            }
            meter.round(observer)?;
            observer.advance(1);
        }
        Ok(Self::with(name, trace, meter.costs()))
    }

    fn with(name: &str, trace: &Trace, costs: Costs) -> Self {
        let period = trace.header.period();
        let mut processes = trace.processes_by_faults();
        for process in &mut processes {
            process.faults *= period;
            process.first_touches *= period;
            process.present *= period;
        }
        Self {
            name: name.to_owned(),
            period,
            seconds: trace.events.last_us() as f64 / 1e6,
            processes,
            costs,
            limit: processor_seconds(trace) * 1e9,
        }
    }

    /// Returns the counts of all processes.
    pub fn all(&self) -> ProcessSummary {
        let mut all = ProcessSummary::default();
        self.processes.iter().for_each(|process| all.add(process));
        all
    }

    /// Returns the nanoseconds of the faults of `process`. All faults together take at most the
    /// time that the threads can have spent.
    pub fn time(&self, process: &ProcessSummary) -> f64 {
        let all = self.measured(&self.all());
        self.measured(process) * (self.limit / all.max(1.0)).min(1.0)
    }

    /// Returns whether the measured costs exceed the time that the threads can have spent.
    pub fn exceeds(&self) -> bool {
        self.measured(&self.all()) > self.limit
    }

    /// Returns the nanoseconds of the faults of `process` with the measured costs.
    fn measured(&self, process: &ProcessSummary) -> f64 {
        let others = process.faults - process.first_touches - process.present;
        process.first_touches as f64 * self.costs.page
            + process.present as f64 * self.costs.copied()
            + others as f64 * self.costs.unzeroed()
    }

    /// Passes every figure to `figures`.
    ///
    /// # Errors
    /// A figure cannot be written.
    pub fn figures(&self, figures: &mut dyn Figures) -> Result<(), Error> {
        let context = Context {
            machine: Linux::new().machine(),
            workload: format!("advise:{}", self.name),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            setting: "default".into(),
            params: Map::from_iter([("fault_period".to_owned(), self.period.into())]),
            knobs: Map::new(),
            basis: None,
        };
        let predicted = context.with_basis(Basis::Predicted);
        let all = self.all();
        figures.figure(&context, "seconds", "s", Number::Real(self.seconds))?;
        figures.figure(&context, "page_ns", "ns", Number::Real(self.costs.page))?;
        // Each recorded fault stands for several faults.
        let seconds = Number::Real(self.time(&all) / 1e9);
        figures.figure(&predicted, "fault_seconds", "s", seconds)?;
        figures.figure(&predicted, "faults", "count", Number::Whole(all.faults))?;
        for process in &self.processes {
            let setting = format!("process {}", process.label());
            let mut context = Context { setting, ..predicted.clone() };
            context.params.extend([
                ("process".to_owned(), process.process.into()),
                ("process_name".to_owned(), process.name.as_str().into()),
                ("process_pid".to_owned(), process.pid.into()),
            ]);
            figures.figure(&context, "process_faults", "faults", Number::Whole(process.faults))?;
            let seconds = self.time(process) / 1e9;
            figures.figure(&context, "process_fault_seconds", "s", Number::Real(seconds))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::costs::tests::costs;
    use super::*;
    use crate::figures::Kept;
    use faultless_trace::recordings;

    #[test]
    fn each_recorded_fault_stands_for_the_omitted_faults() {
        let recording = recordings::find("gcc").expect("a bundled recording");
        let mut trace = recording.trace().expect("a valid recording");
        let whole = Sampled::with("gcc", &trace, costs());
        trace.header.omitted = 8;
        let part = Sampled::with("gcc", &trace, costs());
        assert_eq!((whole.period, part.period), (1, 9));
        assert_eq!(part.all().faults, 9 * whole.all().faults);
        assert_eq!(part.all().pages, whole.all().pages);
        let (one, nine) = (whole.time(&whole.all()), part.time(&part.all()));
        assert!(one > 0.0 && (nine / one - 9.0).abs() < 1e-9, "{one} {nine}");
        assert!(!part.exceeds());
        // More faults than the threads have time for.
        trace.header.omitted = 99_999_999;
        let most = Sampled::with("gcc", &trace, costs());
        let all = most.time(&most.all()) / 1e9;
        assert!(most.exceeds() && (all - processor_seconds(&trace)).abs() < 1e-6, "{all}");
        let each: f64 = most.processes.iter().map(|process| most.time(process)).sum();
        assert!((each / 1e9 - all).abs() < 1e-3 * all, "{each}");
        let mut kept = Kept::default();
        part.figures(&mut kept).expect("no output fails");
        assert_eq!(kept.0.iter().filter(|(metric, ..)| metric == "process_faults").count(), 3);
    }
}
