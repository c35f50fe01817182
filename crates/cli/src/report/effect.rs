//! The effect of prefault on a recorded program, in words.

use faultless_analysis::number::{grouped, percent};
use faultless_analysis::replay::Effect;

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

/// Returns the effect in words: a count, its name, and a remark.
pub fn rows(effect: &Effect) -> [(u64, &'static str, String); 4] {
    let [saved, bound, _, growth] = Share::ALL.map(|share| format!("{:>9}", share.show(effect)));
    let touches = grouped(effect.touches);
    [
        (
            effect.saved,
            "faults saved",
            format!("{saved} of {touches} first touches of anonymous memory"),
        ),
        (
            effect.bound,
            "faults saved, upper bound",
            format!("{bound} of them: a perfect predictor with windows of the same size"),
        ),
        (effect.copies, "zero page copies saved", "each a fault with order 0".into()),
        (
            effect.peak,
            "peak resident pages",
            format!("{growth} more than the {} with order 0", grouped(effect.peak_off)),
        ),
    ]
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
