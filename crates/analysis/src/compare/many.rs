//! Workloads on many simulated CPUs under each locking policy. A recording has a CPU for each of
//! its threads.

use crate::error::Error;
use crate::figures::Figures;
use crate::observer::Observer;
use crate::scale::Subject;
use crate::settings::{Regime, Settings};
use crate::stop;
use faultless::Locking;
use faultless_virtual::Profile;
use std::sync::Arc;

/// The most informative workloads with short runs: faults of one process and of several, with calls
/// and without.
pub const WORKLOADS: [&str; 6] =
    ["pft", "page_fault_read", "small_allocs", "ebizzy", "mmap1", "forks"];

/// One row: the subject, its CPUs, and its operations per second under each policy.
#[derive(Debug)]
pub struct Row {
    /// The name of the subject.
    pub name: String,
    /// The unit of the operations, in the plural.
    pub unit: &'static str,
    /// The number of simulated CPUs.
    pub cpus: usize,
    /// Operations per second under each policy; `None` if the run failed.
    pub rates: Vec<(Locking, Option<f64>)>,
}

/// The results of workloads on many CPUs.
#[derive(Debug)]
pub struct Many {
    /// The name of the profile.
    pub profile: String,
    /// The rows.
    pub rows: Vec<Row>,
}

impl Many {
    /// Runs each of `subjects` on `cpus` CPUs under each of `policies`. Failures are added to
    /// `failures`.
    ///
    /// # Errors
    /// Results cannot be written.
    pub fn run(
        (profile, cpus): (&Profile, usize),
        subjects: &[Arc<Subject>],
        (policies, settings): (&[Locking], &Settings),
        figures: &mut dyn Figures,
        observer: &dyn Observer,
        failures: &mut Vec<String>,
    ) -> Result<Self, Error> {
        let mut rows = Vec::new();
        'subjects: for subject in subjects {
            let cpus = match &**subject {
                Subject::Workload(..) => cpus,
                Subject::Recording(source) => source.simulated_cpus()?,
            };
            observer.begin(&format!("{}, {cpus} simulated CPUs", subject.name()));
            let mut row =
                Row { name: subject.name(), unit: subject.unit(), cpus, rates: Vec::new() };
            for &policy in policies {
                let settings = settings.with_locking(policy).with_regime(Regime::OFF);
                let rate = match subject.run(profile, cpus, 0, &settings) {
                    Ok(None) => break 'subjects,
                    Ok(Some((ran, context))) => {
                        ran.figures(figures, &context)?;
                        Some(ran.sample.operation_rate())
                    }
                    Err(error) => {
                        failures.push(error.to_string());
                        None
                    }
                };
                row.rates.push((policy, rate));
                observer.advance(1);
            }
            rows.push(row);
            if stop::requested() {
                break;
            }
        }
        Ok(Self { profile: profile.name.clone(), rows })
    }

    /// Returns the policies, and for each row its name and the rate of each policy relative to the
    /// best policy except the last; 0 for a failed run. Omits rows without this comparison.
    pub fn ratios(&self) -> (Vec<&'static str>, Vec<(String, Vec<f64>)>) {
        let policies = self.rows.first().map_or(&[][..], |row| &row.rates);
        let policies = policies.iter().map(|(policy, _)| policy.name()).collect();
        let ratios = |row: &Row| {
            let (_, ratio) = row.beside_best()?;
            let best = row.rates.last()?.1? / ratio;
            let ratios = row.rates.iter().map(|(_, rate)| rate.map_or(0.0, |rate| rate / best));
            Some((row.name.clone(), ratios.collect()))
        };
        (policies, self.rows.iter().filter_map(ratios).collect())
    }
}

impl Row {
    /// Returns the last policy, and its rate relative to the best of the other policies. Returns
    /// `None` if a run failed.
    pub fn beside_best(&self) -> Option<(Locking, f64)> {
        let ((last, rate), others) = self.rates.split_last()?;
        let others: Option<Vec<f64>> = others.iter().map(|(_, rate)| *rate).collect();
        let best = others?.into_iter().fold(0.0, f64::max);
        (best > 0.0).then_some((*last, (*rate)? / best))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_policy_keeps_the_places_of_the_others() {
        let row = |rates: [Option<f64>; 3]| Row {
            name: "w".into(),
            unit: "pages",
            cpus: 64,
            rates: Locking::ALL.into_iter().zip(rates).collect(),
        };
        let complete = row([Some(10.0), Some(20.0), Some(60.0)]);
        assert_eq!(complete.beside_best(), Some((Locking::Speculative, 3.0)));
        let failed = row([Some(10.0), None, Some(60.0)]);
        assert_eq!(failed.beside_best(), None, "the failed policy may be the best");
        assert_eq!(row([Some(10.0), Some(20.0), None]).beside_best(), None);
        let many = Many { profile: "p".into(), rows: vec![failed, complete] };
        let (policies, rows) = many.ratios();
        assert_eq!(policies, Locking::ALL.map(Locking::name));
        assert_eq!(rows, [("w".to_owned(), vec![0.5, 1.0, 3.0])]);
    }
}
