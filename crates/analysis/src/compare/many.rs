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
    /// Operations per second under each policy.
    pub rates: Vec<(Locking, f64)>,
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
                Subject::Recording(source) => source.cpus(),
            };
            observer.begin(&format!("{}, {cpus} simulated CPUs", subject.name()));
            let mut row =
                Row { name: subject.name(), unit: subject.unit(), cpus, rates: Vec::new() };
            for &policy in policies {
                let settings = settings.with_locking(policy).with_regime(Regime::OFF);
                match subject.run(profile, cpus, 0, &settings) {
                    Ok(None) => break 'subjects,
                    Ok(Some((ran, context))) => {
                        ran.figures(figures, &context)?;
                        row.rates.push((policy, ran.sample.operation_rate()));
                    }
                    Err(error) => failures.push(error.to_string()),
                }
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
    /// best policy except the last.
    pub fn ratios(&self) -> (Vec<&'static str>, Vec<(String, Vec<f64>)>) {
        let policies = self.rows.first().map_or(&[][..], |row| &row.rates);
        let policies = policies.iter().map(|(policy, _)| policy.name()).collect();
        let ratios = |row: &Row| {
            let (_, ratio) = row.beside_best()?;
            let (_, last) = *row.rates.last()?;
            let best = last / ratio;
            Some((row.name.clone(), row.rates.iter().map(|(_, rate)| rate / best).collect()))
        };
        (policies, self.rows.iter().filter_map(ratios).collect())
    }
}

impl Row {
    /// Returns the last policy, and its rate relative to the best of the other policies.
    pub fn beside_best(&self) -> Option<(Locking, f64)> {
        let ((last, rate), others) = self.rates.split_last()?;
        let best = others.iter().map(|(_, rate)| *rate).fold(0.0, f64::max);
        (best > 0.0).then(|| (*last, rate / best))
    }
}
