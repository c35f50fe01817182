//! Workloads on many simulated CPUs under each locking policy. A recording has a CPU for each of
//! its threads.

use super::words;
use crate::error::CliError;
use crate::interrupt;
use crate::report::json::Json;
use crate::report::number::scaled;
use crate::report::progress::Progress;
use crate::report::{Style, filled, table};
use crate::scale;
use crate::scale::subject::Subject;
use crate::settings::{Ahead, Settings};
use faultless::Locking;
use faultless_virtual::Profile;
use std::io::Write;
use std::sync::Arc;

/// The most informative workloads with short runs: faults of one process and of several, with calls
/// and without.
pub const WORKLOADS: [&str; 6] =
    ["pft", "page_fault_read", "small_allocs", "ebizzy", "mmap1", "forks"];

/// One row: the subject, its CPUs, and its operations per second under each policy.
#[derive(Debug)]
struct Row {
    name: String,
    unit: &'static str,
    cpus: usize,
    rates: Vec<(Locking, f64)>,
}

/// The results of workloads on many CPUs.
#[derive(Debug)]
pub struct Many {
    profile: String,
    rows: Vec<Row>,
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
        json: &mut Json,
        progress: &Progress,
        failures: &mut Vec<String>,
    ) -> Result<Self, CliError> {
        let mut rows = Vec::new();
        'subjects: for subject in subjects {
            let cpus = match &**subject {
                Subject::Workload(..) => cpus,
                Subject::Recording(source) => source.cpus(),
            };
            progress.begin(&format!("{}, {cpus} simulated CPUs", subject.name()));
            let mut row =
                Row { name: subject.name(), unit: subject.unit(), cpus, rates: Vec::new() };
            for &policy in policies {
                let settings = settings.with_locking(policy).with_ahead(Ahead::OFF);
                match subject.run(profile, cpus, 0, &settings) {
                    Ok(None) => break 'subjects,
                    Ok(Some((ran, context))) => {
                        scale::write_json(json, &context, &ran)?;
                        row.rates.push((policy, ran.sample.operation_rate()));
                    }
                    Err(error) => failures.push(error.to_string()),
                }
                progress.advance(1);
            }
            rows.push(row);
            if interrupt::requested() {
                break;
            }
        }
        Ok(Self { profile: profile.name.clone(), rows })
    }

    /// Prints the table and its verdict.
    ///
    /// # Errors
    /// The output is closed.
    pub fn print(&self, out: &mut dyn Write, style: Style) -> Result<(), CliError> {
        let Some(first) = self.rows.iter().find(|row| !row.rates.is_empty()) else {
            return Ok(());
        };
        writeln!(
            out,
            "\nMany CPUs: simulated (profile {}), a second, prefault off; the same figures on every run",
            self.profile
        )?;
        let mut head = ["workload", "CPUs", "of"].map(str::to_owned).to_vec();
        head.extend(first.rates.iter().map(|(policy, _)| policy.name().to_owned()));
        head.extend(
            first.beside_best().map(|(last, _)| format!("{} to the best lock", last.name())),
        );
        let mut table = table::numbers(&head, style);
        for row in &self.rows {
            let mut cells = vec![row.name.clone(), row.cpus.to_string(), row.unit.to_owned()];
            cells.extend(row.rates.iter().map(|(_, rate)| scaled(*rate).trim().to_owned()));
            cells.extend(row.beside_best().map(|(_, ratio)| words::rate(ratio)));
            table::row(&mut table, cells);
        }
        writeln!(out, "{table}")?;
        if let Some(verdict) = self.verdict() {
            writeln!(out, "{}", filled(&verdict, style.width))?;
        }
        Ok(())
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

    fn verdict(&self) -> Option<String> {
        let ratios: Vec<_> = self.rows.iter().filter_map(Row::beside_best).collect();
        let (last, _) = *ratios.first()?;
        let count = |is: fn(f64) -> bool| ratios.iter().filter(|(_, ratio)| is(*ratio)).count();
        let more = count(|ratio| ratio > 1.0 && !words::is_same(ratio));
        let same = count(words::is_same);
        let less = ratios.len() - more - same;
        let (least, most) = words::ends(ratios.iter().map(|(_, ratio)| *ratio));
        let parts = [(more, "more"), (same, "the same"), (less, "less")];
        let parts = parts.iter().filter(|(count, _)| *count > 0);
        let parts: Vec<_> = parts.map(|(count, what)| format!("{what} in {count}")).collect();
        Some(format!(
            "Verdict: {} does {} times as much as the best lock: {}.",
            last.name(),
            words::range(words::times(least), words::times(most)),
            parts.join(", "),
        ))
    }
}

impl Row {
    /// Returns the last policy, and its rate relative to the best of the other policies.
    fn beside_best(&self) -> Option<(Locking, f64)> {
        let ((last, rate), others) = self.rates.split_last()?;
        let best = others.iter().map(|(_, rate)| *rate).fold(0.0, f64::max);
        (best > 0.0).then(|| (*last, rate / best))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_policy_is_compared_with_the_best_other() {
        let row = |rates: [f64; 3]| Row {
            name: "w".into(),
            unit: "pages",
            cpus: 64,
            rates: Locking::ALL.into_iter().zip(rates).collect(),
        };
        let rows = vec![row([10.0, 20.0, 60.0]), row([30.0, 10.0, 30.0]), row([2.0, 1.0, 1.0])];
        let many = Many { profile: "p".into(), rows };
        let mut out = Vec::new();
        many.print(&mut out, Style { terminal: false, width: 100 }).expect("it is a vector");
        let out = String::from_utf8(out).expect("text").replace("\n  ", " ");
        for said in [
            "3.0 times as much",
            "the same",
            "50 % less",
            "as the best lock: more in 1, the same in 1, less in 1",
        ] {
            assert!(out.contains(said), "no {said:?} in {out}");
        }
    }
}
