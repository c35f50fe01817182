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
    of: Of,
}

/// What a figure is of.
#[derive(Clone, Copy)]
enum Of {
    /// One run. Of several it is the mean.
    Run(fn(&Outcome) -> Option<f64>),
    /// Allocations: what so many of a thousand take at most. Of several runs it is that of all their allocations: few of one run are as slow, so that of each
    /// differs by chance.
    Allocations(usize),
}

const COUNT: &str = "count";
const NS: &str = "ns";

const fn figure(
    unit: &'static str,
    title: &'static str,
    metric: &'static str,
    of: fn(&Outcome) -> Option<f64>,
) -> Figure {
    Figure { title, metric, unit, scale: 1.0, of: Of::Run(of) }
}

const fn latency(title: &'static str, metric: &'static str, of_thousand: usize) -> Figure {
    Figure { title, metric, unit: NS, scale: 1.0, of: Of::Allocations(of_thousand) }
}

fn count(outcome: &Outcome, name: &str) -> Option<f64> {
    outcome.counter(name).map(|count| count as f64)
}

/// What so many of a thousand allocations of these runs take at most.
fn percentile<'o>(outcomes: impl Iterator<Item = &'o Outcome>, of_thousand: usize) -> Option<f64> {
    let mut all: Vec<f64> = outcomes.flat_map(|it| &it.allocations).copied().collect();
    all.sort_by(f64::total_cmp);
    faultless_workload::percentile(&all, of_thousand)
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
    of: Of::Run(|it| Some(it.wall)),
};
/// Memory in use.
pub const FRAMES: Figure =
    figure(COUNT, "frames in use, mean", "frames_in_use_mean", |it| it.footprint.mean());
/// What all but one in a hundred allocations take at most.
pub const P99: Figure = latency("allocation p99, ns", "allocation_p99", 990);
/// What all but one in a thousand take.
pub const P999: Figure = latency("allocation p99.9, ns", "allocation_p99_9", 999);

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
    latency("allocation p50, ns", "allocation_p50", 500),
    P99,
    P999,
];

/// What deferral makes of a figure: its value with it to that without, and the least and the most of that of one seed. Seeds with too little to compare with
/// are in the values alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change {
    pub ratio: f64,
    pub range: (f64, f64),
    /// Whether it may be chance: zero lies within the confidence interval (95 %) of the difference. Not told of one seed.
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
    /// Of several runs.
    fn of_all<'o>(&self, outcomes: impl Iterator<Item = &'o Outcome>) -> Option<f64> {
        match self.of {
            Of::Allocations(of_thousand) => percentile(outcomes, of_thousand),
            Of::Run(of) => {
                let values: Vec<f64> = outcomes.map(of).collect::<Option<_>>()?;
                (!values.is_empty()).then(|| values.mean())
            }
        }
    }

    /// Of one run.
    pub fn of(&self, outcome: &Outcome) -> Option<f64> {
        self.of_all(std::iter::once(outcome))
    }

    /// Without deferral, and with it, of all seeds that are not `left_out`; `None` where one of them is not known.
    fn values(&self, runs: &Runs, left_out: Option<usize>) -> Option<(f64, f64)> {
        let of_all = |side: &[Outcome]| {
            let each = side.iter().enumerate().filter(|(seed, _)| Some(*seed) != left_out);
            self.of_all(each.map(|(_, outcome)| outcome))
        };
        of_all(&runs.off).zip(of_all(&runs.on))
    }

    /// Whether there is no value of all seeds.
    pub fn is_unknown(&self, runs: &Runs) -> bool {
        self.values(runs, None).is_none()
    }

    /// Differences that each seed makes: the jackknife's pseudo-values. Those of a mean are the seeds' own differences. For a
    /// percentile it is sound, as a seed is many allocations (Shao and Wu, *A General Theory for Jackknife Variance Estimation*, Annals of Statistics 17, 1989).
    fn differences(&self, runs: &Runs) -> Vec<f64> {
        let count = runs.off.len();
        let of_all = |left_out| self.values(runs, left_out).map(|(off, on)| on - off);
        let Some(all) = of_all(None) else { return Vec::new() };
        let pseudo = |others: f64| count as f64 * all - (count - 1) as f64 * others;
        (0..count).filter_map(|seed| of_all(Some(seed))).map(pseudo).collect()
    }

    /// Whether `value` is so few that a ratio to it says nothing.
    fn is_few(&self, value: f64) -> bool {
        self.unit == COUNT && value < FEWEST
    }

    /// What deferral changes; `None` where there is nothing, or too little, to compare with.
    pub fn change(&self, runs: &Runs) -> Option<Change> {
        let (off, on) = self.values(runs, None)?;
        if off == 0.0 || self.is_few(off) {
            return None;
        }
        let ratio = on / off;
        let each = runs.off.iter().zip(&runs.on);
        let each = each.filter_map(|(off, on)| self.of(off).zip(self.of(on)));
        let ratios = each.filter(|(off, _)| *off != 0.0 && !self.is_few(*off));
        let ratios = ratios.map(|(off, on)| on / off);
        Some(Change {
            ratio,
            range: crate::compare::words::ends(ratios.chain([ratio])),
            by_chance: may_be_zero(&self.differences(runs)),
        })
    }

    /// The figure without deferral, and its change with it, as a table has it.
    pub fn cell(&self, runs: &Runs) -> String {
        let Some((off, on)) = self.values(runs, None) else { return "-".into() };
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
            [P99, P999].map(|figure| figure.of(&runs.off[0]))
        };
        assert_eq!(told(99), [None, None]);
        assert_eq!(told(100), [Some(100.0), None]);
        assert_eq!(told(1000), [Some(991.0), Some(1000.0)]);
    }

    /// One seed with slow allocations does not decide, as it would a mean.
    #[test]
    fn percentiles_are_of_the_allocations_of_all_seeds() {
        let with = |slow: [[usize; 4]; 2]| {
            let mut runs = runs(&[1.0; 4], &[1.0; 4]);
            for (side, slow) in [&mut runs.off, &mut runs.on].into_iter().zip(slow) {
                for (outcome, slow) in side.iter_mut().zip(slow) {
                    let took = |at| if at < 200 - slow { 100.0 } else { 1000.0 };
                    outcome.allocations = (0..200).map(took).collect();
                }
            }
            runs
        };
        // Of 800 allocations the eighth from the end; that of the first seed alone is slow.
        let one = with([[0; 4], [7, 0, 0, 0]]);
        assert_eq!(P99.cell(&one), "100 ~+0.0 %");
        let by_chance = with([[0; 4], [8, 0, 0, 0]]);
        assert_eq!(P99.cell(&by_chance), "100 ~+900.0 %");
        let all = with([[0; 4], [20; 4]]);
        assert_eq!(P99.cell(&all), "100 +900.0 %");
        // Too few without one of the seeds.
        assert_eq!(P999.cell(&all), "-");
    }
}
