//! The effect of prefault on a recorded program: the faults saved, and the cost.

use super::json::{Context, Json, Number};
use super::number::{grouped, percent};
use crate::error::CliError;
use crate::run::Sample;
use faultless::Counter;

/// The counters of prefault. If an [`Effect`] is known, its counters replace those of a replay at
/// full speed in all output: the windows of concurrent threads depend on their order, so such a
/// replay has slightly different counts each time.
pub const PREFAULT: [Counter; 6] = [
    Counter::PrefaultHit,
    Counter::PrefaultMiss,
    Counter::PrefaultPage,
    Counter::PrefaultWasted,
    Counter::PrefaultUsed,
    Counter::PrefaultUnused,
];

/// The effect, in pages and faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Effect {
    /// All faults with order 0.
    pub faults_off: u64,
    /// First touches of private anonymous memory, each a fault with order 0.
    pub touches: u64,
    /// First touches that no longer fault.
    pub saved: u64,
    /// Copies of the zero page that fault with order 0, and not with prefault.
    pub copies: u64,
    /// The maximum number of first touches that windows of the same size could save.
    pub bound: u64,
    /// The counts of [`PREFAULT`].
    pub prefault: [u64; PREFAULT.len()],
    /// The peak pages of each process with order 0, added up.
    pub peak_off: u64,
    /// The same with prefault.
    pub peak: u64,
}

/// A part of a whole.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    /// The head of a column.
    pub head: &'static str,
    /// The name of a row.
    pub name: &'static str,
    /// Part and whole.
    pub of: fn(&Effect) -> (u64, u64),
}

impl Share {
    /// The shares in tables.
    pub const ALL: [Self; 4] = [
        Self {
            head: "faults\nsaved",
            name: "faults saved, of first touches of anonymous memory",
            of: |effect| (effect.saved, effect.touches),
        },
        Self {
            head: "upper\nbound",
            name: "upper bound of faults saved (perfect predictor)",
            of: |effect| (effect.bound, effect.touches),
        },
        Self {
            head: "unused\nprefaulted",
            name: "unused, of prefaulted pages",
            of: |effect| (effect.unused(), effect.mapped()),
        },
        Self {
            head: "resident\ngrowth",
            name: "growth of peak resident memory",
            of: |effect| (effect.peak.saturating_sub(effect.peak_off), effect.peak_off),
        },
    ];

    /// Formats the share in percent.
    pub fn show(self, effect: &Effect) -> String {
        let (part, whole) = (self.of)(effect);
        percent(part, whole)
    }

    /// Returns the mean over programs with equal weights, in percent.
    pub fn mean(self, effects: &[&Effect]) -> String {
        let share = |effect: &&Effect| {
            let (part, whole) = (self.of)(effect);
            part as f64 / whole.max(1) as f64
        };
        let mean = effects.iter().map(share).sum::<f64>() / effects.len().max(1) as f64;
        format!("{:.2} %", 100.0 * mean)
    }
}

impl Effect {
    /// Returns the prefaulted pages.
    pub fn mapped(&self) -> u64 {
        self.counted(Counter::PrefaultPage)
    }

    /// Returns the prefaulted pages without a use before their unmapping or the end of their
    /// process.
    pub fn unused(&self) -> u64 {
        self.counted(Counter::PrefaultWasted)
    }

    fn counted(&self, counter: Counter) -> u64 {
        let at = PREFAULT.iter().position(|known| *known == counter);
        at.map_or(0, |at| self.prefault[at])
    }

    /// Returns `sample` with the prefault counters of this effect.
    pub fn told(&self, mut sample: Sample) -> Sample {
        for (counter, count) in PREFAULT.into_iter().zip(self.prefault) {
            let own = sample.counters.iter_mut().find(|(name, _)| *name == counter.name());
            own.into_iter().for_each(|(_, told)| *told = count);
        }
        sample
    }

    /// Returns the effect in words: a count, its name, and a remark.
    pub fn rows(&self) -> [(u64, &'static str, String); 4] {
        let [saved, bound, _, growth] = Share::ALL.map(|share| format!("{:>9}", share.show(self)));
        let touches = grouped(self.touches);
        [
            (
                self.saved,
                "faults saved",
                format!("{saved} of {touches} first touches of anonymous memory"),
            ),
            (
                self.bound,
                "faults saved, upper bound",
                format!("{bound} of them: a perfect predictor with windows of the same size"),
            ),
            (self.copies, "zero page copies saved", "each a fault with order 0".into()),
            (
                self.peak,
                "peak resident pages",
                format!("{growth} more than the {} with order 0", grouped(self.peak_off)),
            ),
        ]
    }

    /// Writes the effect.
    pub fn json(&self, json: &mut Json, context: &Context) -> Result<(), CliError> {
        let counts = [
            ("first_touches", "faults", self.touches),
            ("faults_saved", "faults", self.saved),
            ("zero_page_copies_saved", "faults", self.copies),
            ("faults_saved_upper_bound", "faults", self.bound),
            ("peak_resident_pages_off", "pages", self.peak_off),
            ("peak_resident_pages", "pages", self.peak),
        ];
        counts
            .into_iter()
            .try_for_each(|(metric, unit, n)| json.write(context, metric, unit, Number::Whole(n)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_relative_to_the_right_whole() {
        let effect = Effect {
            touches: 1000,
            saved: 800,
            copies: 7,
            bound: 900,
            faults_off: 1500,
            prefault: [300, 20, 840, 42, 790, 50],
            peak_off: 2000,
            peak: 2010,
        };
        let shown = Share::ALL.map(|share| share.show(&effect));
        assert_eq!(shown, ["80.00 %", "90.00 %", "5.00 %", "0.50 %"]);
        let none = Effect { saved: 0, bound: 0, prefault: [0; 6], peak: 1990, ..effect };
        assert_eq!(Share::ALL[2].show(&none), "-");
        assert_eq!(Share::ALL[3].show(&none), "0.00 %");
        let means = Share::ALL.map(|share| share.mean(&[&effect, &none]));
        assert_eq!(means, ["40.00 %", "45.00 %", "2.50 %", "0.25 %"]);
    }
}
