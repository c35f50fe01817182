//! Published tables, with simulated figures beside the published figures.
//!
//! The published machines no longer exist, or their costs are unknown. Figures should therefore be
//! compared by their ratio to a row of the same table, the *base*: the locking replaced by the
//! published change. Each CPU does less work than in the published runs, so that a table takes
//! minutes on one CPU of the host.

use super::steady::WarmUp;
use super::subject::{Ran, Subject};
use crate::context::{Basis, Context};
use crate::error::Error;
use crate::figures::{Figures, Number};
use crate::number::plural;
use crate::observer::Observer;
use crate::profile;
use crate::settings::{Assignment, Settings};
use crate::stop;
use faultless_virtual::published::{self, Published};
use std::sync::Arc;

/// The workloads of the last table, in the order of the paper.
const VMA: [&str; 5] =
    ["vma_mmap", "vma_mmap_touch", "vma_fault", "vma_unmap_untouched", "vma_unmap"];

/// A published table.
#[derive(Debug)]
pub struct Table {
    /// The name in results.
    pub name: &'static str,
    /// The title.
    pub title: &'static str,
    /// The differences from the published runs.
    pub differs: &'static str,
    /// The rows.
    pub rows: Vec<Row>,
}

/// A row: its simulation, and its published figure.
#[derive(Debug)]
pub struct Row {
    /// The name of the row.
    pub label: String,
    /// The name of the profile.
    pub profile: &'static str,
    /// The number of CPUs.
    pub cpus: usize,
    /// The workload.
    pub subject: Arc<Subject>,
    /// Knobs.
    set: Vec<&'static str>,
    /// The excluded start of the run. If it leaves no steady state, the figures are those of the
    /// whole run.
    pub warm_up: Option<WarmUp>,
    /// The published figure, in operations per second.
    pub published: Option<f64>,
    /// The published ratio to the base, for rows without a published figure.
    pub ratio: Option<Ratio>,
    /// The publication of the figure or the ratio.
    pub source: Option<String>,
    /// The distance in rows to the base, which precedes this row.
    pub base: usize,
}

/// A published ratio.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Ratio {
    /// This ratio.
    Exactly(f64),
    /// This ratio or a larger one.
    AtLeast(f64),
    /// The range of several rows, whose single ratios were not published.
    Between(f64, f64),
}

impl Ratio {
    /// Returns the least and the most.
    pub const fn ends(self) -> (f64, Option<f64>) {
        match self {
            Self::Exactly(ratio) => (ratio, Some(ratio)),
            Self::AtLeast(least) => (least, None),
            Self::Between(least, most) => (least, Some(most)),
        }
    }
}

impl Row {
    fn new(
        (label, workload): (&str, &str),
        params: &[&str],
        (profile, cpus): (&'static str, usize),
        set: &[&'static str],
    ) -> Self {
        let params = params.iter().map(|&param| param.to_owned()).collect();
        Self {
            label: label.to_owned(),
            profile,
            cpus,
            subject: Arc::new(Subject::Workload(workload.to_owned(), params)),
            set: set.to_vec(),
            warm_up: None,
            published: None,
            ratio: None,
            source: None,
            base: 0,
        }
    }

    /// Compares the row with the row `base` rows before it.
    fn against(self, base: usize) -> Self {
        Self { base, ..self }
    }

    /// Measures the steady state after this number of calls and faults of each CPU.
    fn after(self, calls: u64) -> Self {
        Self { warm_up: Some(WarmUp { calls, optional: true }), ..self }
    }

    fn published(self, published: Option<&Published>) -> Self {
        let source = published.map(|it| it.source.clone());
        Self { published: published.map(|it| it.value), source, ..self }
    }

    fn ratio(self, ratio: Option<(Ratio, String)>) -> Self {
        let (ratio, source) = ratio.unzip();
        Self { ratio, source, ..self }
    }

    fn settings(&self) -> Result<Settings, Error> {
        let parse = |it: &&str| it.parse().map_err(|why: String| Error::setting(it, why));
        let given: Result<Vec<Assignment>, Error> = self.set.iter().map(parse).collect();
        Ok(Settings::new(&given?))
    }
}

const OFF: &str = "prefault_max_order=0";
const PREFAULT: &str = "prefault_max_order=3";
const MMAP_LOCK: &str = "locking=mmap_lock";
const PER_VMA: &str = "locking=per_vma";
const SPECULATIVE: &str = "locking=speculative";

/// The published figures by table, row and CPUs.
struct Known(Vec<Published>);

impl Known {
    fn of(&self, table: &str, row: &str, cpus: usize) -> Option<&Published> {
        let is = |it: &&Published| it.table == table && it.row == row && it.cpus == cpus;
        self.0.iter().find(is)
    }
}

/// The name of a published table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Name {
    /// Prefault, 32 GB, on 1 to 512 CPUs (2004).
    Prefault,
    /// ebizzy on 24 and 1,024 CPUs (2019).
    Ebizzy,
    /// page_fault1, 2 and 3 on 72 CPUs (2019).
    PageFault,
    /// small_allocs on 224 CPUs (2024).
    SmallAllocs,
    /// mmap, munmap and faults, private and shuffled, on 384 CPUs (2025).
    Vma,
}

/// Returns the table named `which`, or all tables.
pub fn tables(which: Option<Name>) -> Vec<Table> {
    let figures = Known(published::all());
    let all = [
        (Name::Prefault, prefault as fn(&Known) -> Table),
        (Name::Ebizzy, ebizzy),
        (Name::PageFault, page_fault),
        (Name::SmallAllocs, small_allocs),
        (Name::Vma, vma),
    ];
    let wanted = all.into_iter().filter(|(name, _)| which.is_none_or(|which| *name == which));
    wanted.map(|(_, table)| table(&figures)).collect()
}

fn prefault(figures: &Known) -> Table {
    const TABLE: &str = "prefault 32 GB";
    let mut rows = Vec::new();
    for cpus in [1, 8, 16, 64, 128, 512] {
        let size = format!("size={}M", 4 * cpus);
        let kinds = [
            ("standard", [MMAP_LOCK, OFF]),
            ("prefault", [MMAP_LOCK, PREFAULT]),
            ("prefault and scalable faults", [SPECULATIVE, PREFAULT]),
        ];
        for (base, (label, set)) in kinds.into_iter().enumerate() {
            let row = Row::new((label, "pft"), &[size.as_str()], ("eight-socket", cpus), &set);
            rows.push(row.published(figures.of(TABLE, label, cpus)).against(base));
        }
    }
    Table {
        name: "prefault",
        title: "prefault, 32 GB in one address space (512-CPU SGI machine, 2004)",
        differs: "4 MiB per CPU, not 32 GB shared by all; pages of 4 KiB, not 16 KiB; up to order 3; eight sockets of a current kind.",
        rows,
    }
}

fn ebizzy(figures: &Known) -> Table {
    const TABLE: &str = "ebizzy -mTt";
    let mut rows = Vec::new();
    let places = [
        (("two-socket", 24), &["touch=yes"][..]),
        (("eight-socket", 1024), &["touch=yes", "chunk=16K", "records=1"]),
    ];
    for (place, params) in places {
        for (base, (label, locking)) in
            [("base", MMAP_LOCK), ("speculative", SPECULATIVE)].into_iter().enumerate()
        {
            let row = Row::new((label, "ebizzy"), params, place, &[locking, OFF]);
            rows.push(row.published(figures.of(TABLE, label, place.1)).against(base));
        }
    }
    Table {
        name: "ebizzy",
        title: "ebizzy -mTt (24-CPU x86, and a POWER8 guest of 1,024 CPUs; 2019)",
        differs: "2 records for each of 24 CPUs, one of 16 KiB for each of 1,024; the published runs took seconds; 1,024 CPUs are 16 sockets of the profile's kind.",
        rows,
    }
}

fn page_fault(figures: &Known) -> Table {
    const CPUS: usize = 72;
    let mut rows = Vec::new();
    for workload in ["page_fault1", "page_fault2", "page_fault3"] {
        let kinds = [("base", MMAP_LOCK, "off"), ("speculative", SPECULATIVE, "on")];
        for (base, (label, locking, switched)) in kinds.into_iter().enumerate() {
            let label = format!("{workload}, {label}");
            let row = Row::new((&label, workload), &[], ("two-socket", CPUS), &[locking, OFF]);
            let published = format!("patched, switched {switched}, huge pages off");
            let published = figures.of(&format!("will-it-scale {workload}"), &published, CPUS);
            rows.push(row.published(published).against(base));
        }
    }
    Table {
        name: "page_fault",
        title: "page_fault1, 2 and 3 of will-it-scale as threads (72-CPU Skylake, 2019)",
        differs: "2 passes over 512 KiB per CPU, not over 128 MiB; the base is the same kernel with the change switched off.",
        rows,
    }
}

fn small_allocs(figures: &Known) -> Table {
    const PLACE: (&str, usize) = ("eight-socket", 224);
    let least = figures
        .of("small_allocs", "throughput, patched over base (at least)", PLACE.1)
        .map(|it| (Ratio::AtLeast(it.value), it.source.clone()));
    let row =
        |label, set: &[&'static str]| Row::new((label, "small_allocs"), &["size=200K"], PLACE, set);
    Table {
        name: "small_allocs",
        title: "small_allocs (224 threads of the kernel test robot, 2024)",
        differs: "one pass over 200 KiB per CPU, not over 80 MiB; no absolute figure was published.",
        rows: vec![
            row("base", &[PER_VMA, "anon_vma_check=early", OFF]),
            row("anon_vma checked late", &[PER_VMA, OFF]).ratio(least).against(1),
            row("speculative", &[SPECULATIVE, OFF]).against(2),
        ],
    }
}

/// Returns the parameters of two rounds with `chunks` chunks, or pairs of `mmap1`, for each CPU,
/// and the calls and faults of a CPU in a round.
fn rounds(workload: &str, order: &str, chunks: u64) -> (Vec<String>, u64) {
    // A chunk has four pages.
    let calls = match workload {
        "mmap1" => 2,
        "vma_fault" => 4,
        "vma_mmap_touch" => 5,
        _ => 1,
    };
    let params = match workload {
        "mmap1" => vec![format!("passes={}", 2 * chunks)],
        _ => vec![format!("order={order}"), format!("chunks={chunks}"), "passes=2".to_owned()],
    };
    (params, chunks * calls)
}

fn vma(figures: &Known) -> Table {
    const ALL: &str = "CortenMM all threads";
    const CPUS: usize = 384;
    let ends = |of: &str, from: &str, to: &str| {
        let [from, to] = [from, to].map(|end| figures.of(ALL, &format!("{end} {of}, adv"), CPUS));
        let of = |(from, to): (&Published, &Published)| {
            (Ratio::Between(from.value, to.value), from.source.clone())
        };
        from.zip(to).map(of)
    };
    let shared = ends("of five, shared", "smallest", "largest");
    let mut rows = Vec::new();
    for (order, cpus) in [("private", 1), ("private", CPUS), ("shuffled", CPUS)] {
        for workload in VMA.into_iter().chain(["mmap1"]) {
            let published = match (order, cpus) {
                _ if workload == "mmap1" => None,
                (_, 1) => figures
                    .of("CortenMM one thread", &format!("{workload}, adv"), 1)
                    .map(|it| (Ratio::Exactly(1.0 + it.value / 100.0), it.source.clone())),
                ("private", _) => ["smallest", "largest"]
                    .iter()
                    .find_map(|end| {
                        figures.of(ALL, &format!("{workload}, disjoint, adv (the {end})"), CPUS)
                    })
                    .map(|it| (Ratio::Exactly(it.value), it.source.clone())),
                _ => shared.clone(),
            };
            if workload == "mmap1" && order == "shuffled" {
                continue;
            }
            for (base, (label, locking)) in
                [("per_vma", PER_VMA), ("speculative", SPECULATIVE)].into_iter().enumerate()
            {
                // The simulation of hundreds of CPUs that wait for each other takes long.
                let chunks = match (workload, order) {
                    _ if cpus == 1 => 64,
                    ("vma_unmap", _) => 4,
                    ("vma_mmap" | "vma_mmap_touch" | "vma_fault", "private") if base == 1 => 24,
                    _ => 6,
                };
                let (params, calls) = rounds(workload, order, chunks);
                let params: Vec<_> = params.iter().map(String::as_str).collect();
                let label = format!("{workload}, {order}, {label}");
                let place = ("384-core", cpus);
                let row = Row::new((&label, workload), &params, place, &[locking, OFF]);
                // The first round is the warm-up.
                let row = row.after(calls).against(base);
                rows.push(row.ratio(published.clone().filter(|_| base == 1)));
            }
        }
    }
    Table {
        name: "vma",
        title: "mmap, munmap and faults on 384 CPUs (2 × EPYC 9965, CortenMM against Linux 6.13, 2025)",
        differs: "the steady state: the second of two rounds over 4 to 64 chunks of 16 KiB per CPU, or as many pairs of mmap1; without a start-up, the whole\nrun; per_vma represents Linux; the published ratios are those of CortenMM (adv), of which only the smallest and the largest of all threads are known.",
        rows,
    }
}

/// Runs the rows of `table`. A failed run is added to `failures`, and is `None` in the result.
/// After a request to stop the result has the completed rows.
///
/// # Errors
/// A figure cannot be written.
pub fn run(
    table: &Table,
    seed: u64,
    figures: &mut dyn Figures,
    observer: &dyn Observer,
    failures: &mut Vec<String>,
) -> Result<Vec<Option<Ran>>, Error> {
    let mut runs: Vec<Option<Ran>> = Vec::new();
    for row in &table.rows {
        if stop::requested() {
            break;
        }
        let what = plural(row.cpus as u64, "CPU");
        observer.begin(&format!("{}, {}, {what}", row.subject.name(), row.label));
        match simulate(row, seed) {
            Ok(None) => break,
            Ok(Some((ran, context))) => {
                runs.push(Some(ran));
                write(figures, table, &runs, &context)?;
            }
            Err(error) => {
                failures.push(error.to_string());
                runs.push(None);
            }
        }
        observer.advance(1);
    }
    Ok(runs)
}

fn simulate(row: &Row, seed: u64) -> Result<Option<(Ran, Context)>, Error> {
    let (profile, settings) = (profile::bundled(row.profile)?, row.settings()?);
    row.subject.run_after(row.warm_up, &profile, row.cpus, seed, &settings)
}

/// Returns the operations per second of a run.
pub fn rate(run: &Option<Ran>) -> Option<f64> {
    run.as_ref().map(|ran| ran.sample.operation_rate())
}

impl Table {
    /// Returns the simulated ratio of row `at` to its base, or `None` for a base.
    pub fn simulated(&self, at: usize, runs: &[Option<Ran>]) -> Option<f64> {
        let base = self.rows[at].base;
        let (one, base) = (rate(&runs[at])?, rate(&runs[at - base]).filter(|_| base > 0)?);
        (base > 0.0).then(|| one / base)
    }

    /// Returns the published ratio of row `at` to its base.
    pub fn published(&self, at: usize) -> Option<Ratio> {
        let row = &self.rows[at];
        let figures = row.published.zip(self.rows[at - row.base].published);
        let computed = figures.filter(|(_, base)| row.base > 0 && *base > 0.0);
        row.ratio.or_else(|| computed.map(|(one, base)| Ratio::Exactly(one / base)))
    }
}

/// Passes the last of `runs` to `figures`, with the published figures of its row.
fn write(
    figures: &mut dyn Figures,
    table: &Table,
    runs: &[Option<Ran>],
    context: &Context,
) -> Result<(), Error> {
    let at = runs.len() - 1;
    let Some(ran) = &runs[at] else { return Ok(()) };
    let row = &table.rows[at];
    let mut context = context.clone();
    context.params.insert("table".into(), table.name.into());
    context.params.insert("row".into(), row.label.as_str().into());
    if let Some(source) = &row.source {
        context.params.insert("published_by".into(), source.as_str().into());
    }
    ran.figures(figures, &context)?;
    if let Some(ratio) = table.simulated(at, runs) {
        figures.figure(&context, "to_base", "ratio", Number::Real(ratio))?;
    }
    let context = context.with_basis(Basis::Published);
    let mut real = |metric, unit, value: Option<f64>| match value {
        Some(value) => figures.figure(&context, metric, unit, Number::Real(value)),
        None => Ok(()),
    };
    real("published", "1/s", row.published)?;
    match table.published(at) {
        Some(Ratio::Exactly(ratio)) => real("published_to_base", "ratio", Some(ratio)),
        Some(range) => {
            let (least, most) = range.ends();
            real("published_to_base_min", "ratio", Some(least))?;
            real("published_to_base_max", "ratio", most)
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::sizes;
    use super::*;

    #[test]
    fn every_row_can_run_and_every_table_has_published_figures() {
        let all = tables(None);
        assert_eq!(all.len(), 5);
        for table in &all {
            for (at, row) in table.rows.iter().enumerate() {
                assert!(row.settings().is_ok() && row.base <= at, "{row:?}");
                assert!(profile::bundled(row.profile).is_ok(), "{row:?}");
                let Subject::Workload(name, params) = &*row.subject else { panic!("{row:?}") };
                assert!(sizes::workload(name, params, row.cpus).is_ok(), "{row:?}");
                let base = &table.rows[at - row.base];
                assert!(base.base == 0 && base.cpus == row.cpus && base.profile == row.profile);
            }
            let known = |row: &&Row| row.published.is_some() || row.ratio.is_some();
            assert!(table.rows.iter().any(|row| known(&row)), "{}", table.title);
        }
        let figures = |which: Name| {
            let known = |row: &&Row| row.published.is_some() || row.ratio.is_some();
            tables(Some(which))[0].rows.iter().filter(known).count()
        };
        assert_eq!(figures(Name::Prefault), 18);
        assert_eq!(figures(Name::Ebizzy), 4);
        assert_eq!(figures(Name::PageFault), 4);
        assert_eq!(figures(Name::SmallAllocs), 1);
        assert_eq!(figures(Name::Vma), 5 + 2 + 5);
    }
}
