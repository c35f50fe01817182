//! The form of `perf stat`: a count, its name, and its relation to other counts.

use faultless::Counter;
use faultless_analysis::number::{grouped, percent, scaled};
use faultless_native::TLB_COUNTERS;
use std::fmt::Write;

/// A run in the form of `perf stat`.
#[derive(Clone, Debug)]
pub struct PerfStat {
    title: String,
    rows: Vec<(String, String, String)>,
    times: Vec<(f64, &'static str)>,
}

impl PerfStat {
    /// Creates a report with this title.
    pub fn new(title: impl Into<String>) -> Self {
        Self { title: title.into(), rows: Vec::new(), times: Vec::new() }
    }

    /// Adds a count over `seconds`.
    pub fn rate(&mut self, count: u64, name: &str, seconds: f64) {
        let note = if seconds > 0.0 {
            format!("{:>9}/sec", scaled(count as f64 / seconds))
        } else {
            String::new()
        };
        self.row(count, name, note);
    }

    /// Adds a count with a remark.
    pub fn row(&mut self, count: u64, name: &str, note: impl Into<String>) {
        self.rows.push((grouped(count), name.to_owned(), note.into()));
    }

    /// Adds a time below the counts.
    pub fn time(&mut self, seconds: f64, what: &'static str) {
        self.times.push((seconds, what));
    }

    /// Adds all counters above 0 of a run of `seconds`, faults first with their rate.
    pub fn counters(&mut self, counters: &[(impl AsRef<str>, u64)], seconds: f64) {
        let all = Counter::Faults.name();
        let value = |wanted: Counter| {
            let known = counters.iter().find(|(name, _)| name.as_ref() == wanted.name());
            known.map_or(0, |(_, count)| *count)
        };
        let (faults, ahead) = (value(Counter::Faults), value(Counter::PrefaultPage));
        for (name, count) in counters {
            let (name, count) = (name.as_ref(), *count);
            if name == all {
                self.rate(count, name, seconds);
            } else if counts_faults(name) && (count > 0 || name == Counter::Spf.name()) {
                self.row(count, name, format!("{:>9} of all faults", percent(count, faults)));
            } else if name == Counter::PrefaultWasted.name() && ahead > 0 {
                let part = percent(count, ahead);
                self.row(count, name, format!("{part:>9} of prefaulted pages: unused"));
            } else if LEARNED.iter().any(|counter| name == counter.name()) {
                // Printed in JSON only.
            } else if count > 0 && TLB_COUNTERS.iter().any(|(known, _)| name == *known) {
                self.row(count, name, "simulated TLBs");
            } else if count > 0 {
                self.rate(count, name, seconds);
            }
        }
    }
}

/// Results that the predictor found when it checked its windows again, some faults later, to learn
/// from them. Final counts of use have separate counters.
const LEARNED: [Counter; 2] = [Counter::PrefaultUsed, Counter::PrefaultUnused];

/// Returns whether the counter counts a part of the faults. A fault may map several pages around
/// its own.
fn counts_faults(name: &str) -> bool {
    let of_faults = name.starts_with("spf") || name.starts_with("fault_");
    of_faults && name != Counter::AroundPage.name() || name == Counter::ReadFaultLocked.name()
}

impl std::fmt::Display for PerfStat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = String::new();
        writeln!(out, "\n Performance counter stats for {}:\n", self.title)?;
        for (count, name, note) in &self.rows {
            let mark = if note.is_empty() { "" } else { "#" };
            let line = format!("{count:>18}      {name:<28} {mark} {note}");
            writeln!(out, "{}", line.trim_end())?;
        }
        for (seconds, what) in &self.times {
            let gap = if *what == "time elapsed" { "\n" } else { "" };
            writeln!(out, "{gap}{seconds:>18.9} seconds {what}{gap}")?;
        }
        f.write_str(out.trim_end_matches('\n'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_aligned_and_explained() {
        let mut stat = PerfStat::new("'pft'");
        stat.rate(2_000_000, "faults", 0.5);
        stat.row(7, "areas", "");
        stat.time(0.5, "time elapsed");
        stat.time(0.25, "user");
        let text = stat.to_string();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(
            lines[3],
            "         2,000,000      faults                       #    4.00 M/sec"
        );
        let mut counted = PerfStat::new("'boot'");
        let counts = [("faults", 10), ("fault_around_page", 40), ("fault_oom", 1)];
        counted.counters(&[&counts[..], &[("iTLB-load-misses", 3)]].concat(), 0.0);
        let counted = counted.to_string();
        assert!(counted.contains("10.00 % of all faults"), "{counted}");
        assert!(counted.contains("3      iTLB-load-misses             # simulated"), "{counted}");
        assert!(!counted.contains("400.00 %"), "pages are not a share of the faults: {counted}");
        assert_eq!(lines[4], "                 7      areas");
        assert_eq!(lines[6], "       0.500000000 seconds time elapsed");
        assert_eq!(lines[8], "       0.250000000 seconds user");
    }
}
