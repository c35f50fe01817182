//! The figures of a run in tiers, and the effect of deferral on them.

use crate::rates::ends;
use faultless::Counter;
use faultless_workload::Outcome;
use statrs::distribution::{ContinuousCDF, StudentsT};
use statrs::statistics::Statistics;

/// The smallest count for which a change is reported in percent.
const FEWEST: f64 = 10.0;

/// Runs with the same parameters, without deferral and with deferral: an outcome for each seed.
#[derive(Clone, Debug, Default)]
pub struct Runs {
    /// Without deferral.
    pub off: Vec<Outcome>,
    /// With deferral.
    pub on: Vec<Outcome>,
}

/// A figure of a run: its title in tables, its name in results, and its unit.
#[derive(Clone, Copy, Debug)]
pub struct Figure {
    /// The title in tables.
    pub title: &'static str,
    /// The name in results.
    pub metric: &'static str,
    /// The unit.
    pub unit: &'static str,
    /// The factor from the unit of the figure to the unit of the table.
    pub scale: f64,
    of: Of,
}

/// The source of a figure.
#[derive(Clone, Copy, Debug)]
enum Of {
    /// One run. For several runs the figure is the mean.
    Run(fn(&Outcome) -> Option<f64>),
    /// A percentile of allocation times, in thousandths. For several runs it is computed over all
    /// their allocations: a single run has too few slow allocations for a stable percentile.
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

/// Returns the percentile of the allocation times of these runs, in thousandths.
fn percentile<'o>(outcomes: impl Iterator<Item = &'o Outcome>, of_thousand: usize) -> Option<f64> {
    let mut all: Vec<f64> = outcomes.flat_map(|it| &it.allocations).copied().collect();
    all.sort_by(f64::total_cmp);
    faultless_workload::percentile(&all, of_thousand)
}

/// Interrupted CPUs.
pub const INTERRUPTS: Figure = figure(COUNT, "shootdown interrupts", "tlb_shootdown_sent", |it| {
    count(it, Counter::TlbShootdownSent.name())
});
/// From the start of the first worker to the end of the last worker.
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
/// The time of the 99th percentile of allocations.
pub const P99: Figure = latency("allocation p99, ns", "allocation_p99", 990);
/// The time of the 99.9th percentile of allocations.
pub const P999: Figure = latency("allocation p99.9, ns", "allocation_p99_9", 999);

/// All reported figures, in this order.
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

/// The effect of deferral on a figure: the ratio of the value with deferral to the value without
/// deferral, and the smallest and largest ratio of a single seed. Seeds with counts too small for a
/// comparison contribute only to the values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change {
    /// The ratio of the values.
    pub ratio: f64,
    /// The ratios of single seeds, the smallest and the largest.
    pub range: (f64, f64),
    /// Whether the change may be chance: the confidence interval (95 %) of the difference contains
    /// zero. Always false with one seed.
    pub by_chance: bool,
}

/// Returns whether the true mean of such differences may be zero: Student's t for pairs, two-sided,
/// at a confidence of 95 %.
fn may_be_zero(differences: &[f64]) -> bool {
    let count = differences.len() as f64;
    let Ok(t) = StudentsT::new(0.0, 1.0, count - 1.0) else { return false };
    let error = differences.std_dev() / count.sqrt();
    let mean = differences.mean();
    mean != 0.0 && mean.abs() <= t.inverse_cdf(0.975) * error
}

impl Figure {
    /// Returns the figure of several runs.
    fn of_all<'o>(&self, outcomes: impl Iterator<Item = &'o Outcome>) -> Option<f64> {
        match self.of {
            Of::Allocations(of_thousand) => percentile(outcomes, of_thousand),
            Of::Run(of) => {
                let values: Vec<f64> = outcomes.map(of).collect::<Option<_>>()?;
                (!values.is_empty()).then(|| values.mean())
            }
        }
    }

    /// Returns the figure of one run.
    pub fn of(&self, outcome: &Outcome) -> Option<f64> {
        self.of_all(std::iter::once(outcome))
    }

    /// Returns the values without deferral and with deferral, over all seeds except `left_out`;
    /// `None` if a value is unknown.
    pub fn values(&self, runs: &Runs, left_out: Option<usize>) -> Option<(f64, f64)> {
        let of_all = |side: &[Outcome]| {
            let each = side.iter().enumerate().filter(|(seed, _)| Some(*seed) != left_out);
            self.of_all(each.map(|(_, outcome)| outcome))
        };
        of_all(&runs.off).zip(of_all(&runs.on))
    }

    /// Returns whether the value over all seeds is unknown.
    pub fn is_unknown(&self, runs: &Runs) -> bool {
        self.values(runs, None).is_none()
    }

    /// Returns the difference of each seed, as the jackknife's pseudo-values. For a mean, they are
    /// the seeds' own differences. For a percentile the method is sound because a seed has many
    /// allocations (Shao and Wu, *A General Theory for Jackknife Variance Estimation*, Annals of
    /// Statistics 17, 1989).
    fn differences(&self, runs: &Runs) -> Vec<f64> {
        let count = runs.off.len();
        let of_all = |left_out| self.values(runs, left_out).map(|(off, on)| on - off);
        let Some(all) = of_all(None) else { return Vec::new() };
        let pseudo = |others: f64| count as f64 * all - (count - 1) as f64 * others;
        (0..count).filter_map(|seed| of_all(Some(seed))).map(pseudo).collect()
    }

    /// Returns whether `value` is too small for a meaningful ratio.
    fn is_few(&self, value: f64) -> bool {
        self.unit == COUNT && value < FEWEST
    }

    /// Returns the effect of deferral; `None` without a value for comparison, or with too small a
    /// value.
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
            range: ends(ratios.chain([ratio])),
            by_chance: may_be_zero(&self.differences(runs)),
        })
    }

    /// Returns whether a cell is marked as possible chance.
    pub fn is_marked(&self, runs: &Runs) -> bool {
        self.change(runs).is_some_and(|change| change.by_chance)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use faultless_workload::Workload;

    /// Returns runs with these run times, in seconds.
    pub fn runs(off: &[f64], on: &[f64]) -> Runs {
        let workload = Workload::parse("pft", ["size=64K".to_owned()]).expect("a workload");
        let native = crate::run::machine_for(&workload).expect("a machine");
        let outcome = workload.run(&native).expect("a run of the workload");
        let of = |times: &[f64]| {
            times.iter().map(|wall| Outcome { wall: *wall, ..outcome.clone() }).collect()
        };
        Runs { off: of(off), on: of(on) }
    }

    #[test]
    fn percentiles_need_a_slower_allocation() {
        let percentiles = |allocations: usize| {
            let mut runs = runs(&[1.0], &[1.0]);
            runs.off[0].allocations = (1..=allocations).map(|it| it as f64).collect();
            [P99, P999].map(|figure| figure.of(&runs.off[0]))
        };
        assert_eq!(percentiles(99), [None, None]);
        assert_eq!(percentiles(100), [Some(100.0), None]);
        assert_eq!(percentiles(1000), [Some(991.0), Some(1000.0)]);
    }
}
