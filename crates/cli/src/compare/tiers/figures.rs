//! The figures of a run in tiers, and what deferral changes of them.

use crate::report::number::grouped;
use faultless::Counter;
use faultless_workload::Outcome;
use statrs::distribution::{ContinuousCDF, StudentsT};
use statrs::statistics::Statistics;

/// The least count that a change is told of in percent.
const FEWEST: f64 = 10.0;

/// What ran with the same parameters, without deferral and with it: an outcome for each seed.
#[derive(Clone, Debug, Default)]
pub struct Runs {
    pub off: Vec<Outcome>,
    pub on: Vec<Outcome>,
}

/// A figure of a run: its name, as results have it, its unit, and how it is told.
#[derive(Clone, Copy)]
pub struct Figure {
    pub title: &'static str,
    pub metric: &'static str,
    pub unit: &'static str,
    /// What a unit of the table is of the figure's.
    scale: f64,
    pub of: fn(&Outcome) -> Option<f64>,
}

const COUNT: &str = "count";
const NS: &str = "ns";

const fn figure(
    unit: &'static str,
    title: &'static str,
    metric: &'static str,
    of: fn(&Outcome) -> Option<f64>,
) -> Figure {
    Figure { title, metric, unit, scale: 1.0, of }
}

fn count(outcome: &Outcome, name: &str) -> Option<f64> {
    outcome.counter(name).map(|count| count as f64)
}

/// What all allocations but the slowest ones take at most; `None` where there are too few to tell: fewer than one is slower.
fn percentile(outcome: &Outcome, of_thousand: usize) -> Option<f64> {
    let slower = outcome.allocations.len() * (1000 - of_thousand) / 1000;
    if slower == 0 { None } else { outcome.allocation(of_thousand) }
}

/// CPUs that were interrupted.
pub const INTERRUPTS: Figure = figure(COUNT, "shootdown interrupts", "tlb_shootdown_sent", |it| {
    count(it, Counter::TlbShootdownSent.name())
});
/// From the first worker's begin to the last one's end.
pub const TIME: Figure = Figure {
    title: "run time, ms",
    metric: "wall_seconds",
    unit: "s",
    scale: 1e3,
    of: |it| Some(it.wall),
};
/// Memory in use.
pub const FRAMES: Figure =
    figure(COUNT, "frames in use, mean", "frames_in_use_mean", |it| it.footprint.mean());
/// What all but one in a hundred allocations take at most.
pub const P99: Figure =
    figure(NS, "allocation p99, ns", "allocation_p99", |it| percentile(it, 990));
/// What all but one in a thousand take.
pub const P999: Figure =
    figure(NS, "allocation p99.9, ns", "allocation_p99_9", |it| percentile(it, 999));

/// All that are told, in this order.
pub const FIGURES: [Figure; 16] = [
    INTERRUPTS,
    figure(COUNT, "flushes at once", "tlb_flush", |it| count(it, Counter::TlbFlush.name())),
    figure(COUNT, "flushes deferred", "flush_deferred", |it| {
        count(it, Counter::FlushDeferred.name())
    }),
    figure(COUNT, "pages without a flush", "flush_needless", |it| {
        count(it, Counter::FlushNeedless.name())
    }),
    figure(COUNT, "settlements", "deferred_settled", |it| {
        count(it, Counter::DeferredSettled.name())
    }),
    figure(COUNT, "TLB misses, loads", "dtlb_load_misses", |it| count(it, "dTLB-load-misses")),
    figure(COUNT, "TLB misses, stores", "dtlb_store_misses", |it| count(it, "dTLB-store-misses")),
    figure(COUNT, "TLB misses, code", "itlb_load_misses", |it| count(it, "iTLB-load-misses")),
    figure(COUNT, "pages moved", "pgmigrate_success", |it| {
        count(it, Counter::MigrateSuccess.name())
    }),
    figure(COUNT, "pages evicted", "pgsteal", |it| count(it, Counter::PageStolen.name())),
    TIME,
    FRAMES,
    figure(COUNT, "allocations", "allocations", |it| Some(it.allocations.len() as f64)),
    figure(NS, "allocation p50, ns", "allocation_p50", |it| percentile(it, 500)),
    P99,
    P999,
];

/// What deferral makes of a figure: the mean with it to the mean without, and the least and the most of that of one seed. Seeds with too little to compare with
/// are in the mean alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change {
    pub ratio: f64,
    pub range: (f64, f64),
    /// Whether it may be chance: zero lies within the confidence interval (95 %) of the mean difference. Not told of one seed.
    pub by_chance: bool,
}

impl Change {
    /// As a table has it.
    pub fn told(&self) -> String {
        let mark = if self.by_chance { "~" } else { "" };
        format!("{mark}{:+.1} %", 100.0 * (self.ratio - 1.0))
    }
}

/// Whether the mean of more differences like these may be zero: Student's t for pairs, both sides, at a confidence of 95 %.
fn may_be_zero(differences: &[f64]) -> bool {
    let count = differences.len() as f64;
    let Ok(t) = StudentsT::new(0.0, 1.0, count - 1.0) else { return false };
    let error = differences.std_dev() / count.sqrt();
    let mean = differences.mean();
    mean != 0.0 && mean.abs() <= t.inverse_cdf(0.975) * error
}

impl Figure {
    fn mean(&self, outcomes: &[Outcome]) -> Option<f64> {
        let values: Vec<f64> = outcomes.iter().map(self.of).collect::<Option<_>>()?;
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    }

    /// Whether there is no mean of all seeds.
    pub fn is_unknown(&self, runs: &Runs) -> bool {
        self.mean(&runs.off).and(self.mean(&runs.on)).is_none()
    }

    /// Whether `value` is so few that a ratio to it says nothing.
    fn is_few(&self, value: f64) -> bool {
        self.unit == COUNT && value < FEWEST
    }

    /// What deferral changes; `None` where there is nothing, or too little, to compare with.
    pub fn change(&self, runs: &Runs) -> Option<Change> {
        let (off, on) = (self.mean(&runs.off)?, self.mean(&runs.on)?);
        if off == 0.0 || self.is_few(off) {
            return None;
        }
        let ratio = on / off;
        let each = runs.off.iter().zip(&runs.on);
        let each: Vec<_> =
            each.filter_map(|(off, on)| Some(((self.of)(off)?, (self.of)(on)?))).collect();
        let ratios = each.iter().filter(|(off, _)| *off != 0.0 && !self.is_few(*off));
        let ratios = ratios.map(|(off, on)| on / off);
        let differences: Vec<_> = each.iter().map(|(off, on)| on - off).collect();
        Some(Change {
            ratio,
            range: crate::compare::words::ends(ratios.chain([ratio])),
            by_chance: may_be_zero(&differences),
        })
    }

    /// The figure without deferral, and its change with it, as a table has it.
    pub fn cell(&self, runs: &Runs) -> String {
        let (Some(off), Some(on)) = (self.mean(&runs.off), self.mean(&runs.on)) else {
            return "-".into();
        };
        let [off, on] = [off, on].map(|value| value * self.scale);
        let told = |value: f64| match value {
            value if value >= 100.0 || value.fract() == 0.0 => grouped(value.round() as u64),
            value => format!("{value:.1}"),
        };
        match self.change(runs) {
            Some(change) => format!("{} {}", told(off), change.told()),
            None if on == off => told(off),
            None => format!("{} -> {}", told(off), told(on)),
        }
    }

    /// Whether a cell is marked because it may be chance.
    pub fn is_marked(&self, runs: &Runs) -> bool {
        self.change(runs).is_some_and(|change| change.by_chance)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use faultless_workload::Workload;

    /// Runs whose times are those, in seconds.
    pub fn runs(off: &[f64], on: &[f64]) -> Runs {
        let workload = Workload::parse("pft", ["size=64K".to_owned()]).expect("a workload");
        let native = crate::run::machine_for(&workload).expect("a machine");
        let outcome = workload.run(&native).expect("it runs");
        let of = |times: &[f64]| {
            times.iter().map(|wall| Outcome { wall: *wall, ..outcome.clone() }).collect()
        };
        Runs { off: of(off), on: of(on) }
    }

    #[test]
    fn means_are_compared_and_changes_that_may_be_chance_are_marked() {
        let same = runs(&[1.0, 3.0], &[0.5, 2.5]);
        assert_eq!(TIME.cell(&same), "2,000 -25.0 %");
        assert!(!TIME.is_marked(&same));
        let mixed = runs(&[1.0, 3.0], &[1.5, 2.0]);
        assert_eq!(TIME.change(&mixed).map(|it| it.range), Some((2.0 / 3.0, 1.5)));
        assert_eq!(TIME.cell(&mixed), "2,000 ~-12.5 %");
        // All have more, but differ so much that it says little.
        let apart = runs(&[1.0, 1.0, 1.0], &[1.01, 1.02, 1.2]);
        assert_eq!(TIME.cell(&apart), "1,000 ~+7.7 %");
        let close = runs(&[1.0, 1.0, 1.0], &[1.06, 1.07, 1.1]);
        assert_eq!(TIME.cell(&close), "1,000 +7.7 %");
        // One of which nothing is known without deferral says nothing of a ratio.
        let one = TIME.change(&runs(&[0.0, 30.0], &[5.0, 3.0])).expect("a change");
        assert_eq!(one.range, (0.1, 8.0 / 30.0));
        // There are none: nothing to compare with.
        assert_eq!((P99.cell(&mixed), P99.change(&mixed)), ("-".to_owned(), None));
        assert_eq!([P99, TIME].map(|it| it.is_unknown(&mixed)), [true, false]);
    }

    #[test]
    fn percentiles_are_told_where_an_allocation_is_slower() {
        let told = |allocations: usize| {
            let mut runs = runs(&[1.0], &[1.0]);
            runs.off[0].allocations = (1..=allocations).map(|it| it as f64).collect();
            [P99, P999].map(|figure| (figure.of)(&runs.off[0]))
        };
        assert_eq!(told(99), [None, None]);
        assert_eq!(told(100), [Some(100.0), None]);
        assert_eq!(told(1000), [Some(991.0), Some(1000.0)]);
    }
}
