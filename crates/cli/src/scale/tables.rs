//! `faultless scale --table`: published tables, with simulated figures beside the published
//! figures.
//!
//! The published machines no longer exist, or their costs are unknown. Figures should therefore be
//! compared by their ratio to a row of the same table, the *base*: the locking replaced by the
//! published change. Each CPU does less work than in the published runs, so that a table takes
//! minutes on one CPU of the host.

use super::counts::Counts;
use super::print::column;
use super::subject::{Ran, Subject};
use super::write_json;
use crate::args::{ScaleArgs, TableArg};
use crate::error::CliError;
use crate::interrupt;
use crate::profiles;
use crate::report::json::{Context, Json, Number};
use crate::report::number::{grouped, plural};
use crate::report::progress::Progress;
use crate::report::{self, Style, table};
use crate::settings::{Assignment, Settings};
use faultless_virtual::Spent;
use faultless_virtual::published::{self, Published};
use std::collections::BTreeSet;
use std::io::Write;
use std::sync::Arc;

/// The workloads of the last table, in the order of the paper.
const VMA: [&str; 5] =
    ["vma_mmap", "vma_mmap_touch", "vma_fault", "vma_unmap_untouched", "vma_unmap"];

/// A published table.
#[derive(Debug)]
struct Table {
    /// The name on the command line.
    name: &'static str,
    title: &'static str,
    /// The differences from the published runs.
    differs: &'static str,
    rows: Vec<Row>,
}

/// A row: its simulation, and its published figure.
#[derive(Debug)]
struct Row {
    label: String,
    profile: &'static str,
    cpus: usize,
    subject: Arc<Subject>,
    /// Knobs.
    set: Vec<&'static str>,
    /// The published figure.
    published: Option<f64>,
    /// The published ratio to the base, for rows without a published figure.
    ratio: Option<Ratio>,
    /// The publication of the figure or the ratio.
    source: Option<String>,
    /// The distance in rows to the base, which precedes this row.
    base: usize,
}

/// A published ratio.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ratio {
    Exactly(f64),
    AtLeast(f64),
    /// The range of several rows, whose single ratios were not published.
    Between(f64, f64),
}

impl Ratio {
    /// Returns the least and the most.
    const fn ends(self) -> (f64, Option<f64>) {
        match self {
            Self::Exactly(ratio) => (ratio, Some(ratio)),
            Self::AtLeast(least) => (least, None),
            Self::Between(least, most) => (least, Some(most)),
        }
    }

    fn show(self) -> String {
        match self {
            Self::Exactly(ratio) => times(ratio),
            Self::AtLeast(least) => format!("at least {}", times(least)),
            Self::Between(least, most) => format!("{} to {}", times(least), times(most)),
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

    fn published(self, published: Option<&Published>) -> Self {
        let source = published.map(|it| it.source.clone());
        Self { published: published.map(|it| it.value), source, ..self }
    }

    fn ratio(self, ratio: Option<(Ratio, String)>) -> Self {
        let (ratio, source) = ratio.unzip();
        Self { ratio, source, ..self }
    }

    fn settings(&self) -> Result<Settings, CliError> {
        let given: Result<Vec<Assignment>, String> = self.set.iter().map(|it| it.parse()).collect();
        Ok(Settings::new(&given.map_err(CliError::Failed)?))
    }
}

const OFF: &str = "prefault_max_order=0";
const AHEAD: &str = "prefault_max_order=3";
const MMAP_LOCK: &str = "locking=mmap_lock";
const PER_VMA: &str = "locking=per_vma";
const SPECULATIVE: &str = "locking=speculative";

/// The published figures by table, row and CPUs.
struct Figures(Vec<Published>);

impl Figures {
    fn of(&self, table: &str, row: &str, cpus: usize) -> Option<&Published> {
        let is = |it: &&Published| it.table == table && it.row == row && it.cpus == cpus;
        self.0.iter().find(is)
    }
}

/// Returns the tables selected by `which`, with the rows for the given numbers of CPUs.
///
/// # Errors
/// No row has any of these numbers of CPUs.
fn chosen(which: TableArg, cpus: Option<&Counts>) -> Result<Vec<Table>, CliError> {
    let mut tables = tables(which);
    let Some(Counts(wanted)) = cpus else { return Ok(tables) };
    let known: BTreeSet<_> =
        tables.iter().flat_map(|table| table.rows.iter().map(|row| row.cpus)).collect();
    for table in &mut tables {
        // A row and its base have the same number of CPUs, so the base of a row stays.
        table.rows.retain(|row| wanted.contains(&row.cpus));
    }
    tables.retain(|table| !table.rows.is_empty());
    if tables.is_empty() {
        let known: Vec<_> = known.iter().map(usize::to_string).collect();
        let why = format!("--cpus: the table has rows for {} CPUs only", known.join(", "));
        return Err(CliError::Usage(why));
    }
    Ok(tables)
}

/// Returns the tables selected by `which`.
fn tables(which: TableArg) -> Vec<Table> {
    let figures = Figures(published::all());
    let all = [
        (TableArg::Prefault, prefault as fn(&Figures) -> Table),
        (TableArg::Ebizzy, ebizzy),
        (TableArg::PageFault, page_fault),
        (TableArg::SmallAllocs, small_allocs),
        (TableArg::Vma, vma),
    ];
    let wanted = all.into_iter().filter(|(name, _)| which == TableArg::All || *name == which);
    wanted.map(|(_, table)| table(&figures)).collect()
}

fn prefault(figures: &Figures) -> Table {
    const TABLE: &str = "prefault 32 GB";
    let mut rows = Vec::new();
    for cpus in [1, 8, 16, 64, 128, 512] {
        let size = format!("size={}M", 4 * cpus);
        let kinds = [
            ("standard", [MMAP_LOCK, OFF]),
            ("prefault", [MMAP_LOCK, AHEAD]),
            ("prefault and scalable faults", [SPECULATIVE, AHEAD]),
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

fn ebizzy(figures: &Figures) -> Table {
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

fn page_fault(figures: &Figures) -> Table {
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

fn small_allocs(figures: &Figures) -> Table {
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

fn vma(figures: &Figures) -> Table {
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
            let order_param = format!("order={order}");
            let all = [order_param.as_str(), "chunks=4", "passes=1"];
            let params = if workload == "mmap1" { &["passes=4"][..] } else { &all[..] };
            if workload == "mmap1" && order == "shuffled" {
                continue;
            }
            for (base, (label, locking)) in
                [("per_vma", PER_VMA), ("speculative", SPECULATIVE)].into_iter().enumerate()
            {
                let label = format!("{workload}, {order}, {label}");
                let row = Row::new((&label, workload), params, ("384-core", cpus), &[locking, OFF]);
                rows.push(row.ratio(published.clone().filter(|_| base == 1)).against(base));
            }
        }
    }
    Table {
        name: "vma",
        title: "mmap, munmap and faults on 384 CPUs (2 × EPYC 9965, CortenMM against Linux 6.13, 2025)",
        differs: "1 pass over 4 chunks of 16 KiB per CPU, mmap1: 4 pairs; per_vma represents Linux; the published ratios are those of CortenMM (adv), of which\nonly the smallest and the largest of all threads are known.",
        rows,
    }
}

/// Formats a ratio.
fn times(ratio: f64) -> String {
    let places = if ratio < 10.0 { 2 } else { 0 };
    format!("{ratio:.places$}x")
}

/// Runs the tables.
pub fn run(args: &ScaleArgs, which: TableArg) -> Result<(), CliError> {
    let tables = chosen(which, args.cpus.as_ref())?;
    let mut json = Json::open(&args.json, &[])?;
    let (mut out, style) = report::output(&args.json);
    let progress = Progress::new(tables.iter().map(|table| table.rows.len() as u64).sum());
    let mut failures = Vec::new();
    for table in &tables {
        let mut runs: Vec<Option<Ran>> = Vec::new();
        for row in &table.rows {
            if interrupt::requested() {
                break;
            }
            let what = plural(row.cpus as u64, "CPU");
            progress.begin(&format!("{}, {}, {what}", row.subject.name(), row.label));
            match simulate(row, args.seed) {
                Ok(None) => break,
                Ok(Some((ran, context))) => {
                    runs.push(Some(ran));
                    write(&mut json, table, &runs, &context)?;
                }
                Err(error) => {
                    failures.push(error.to_string());
                    runs.push(None);
                }
            }
            progress.advance(1);
        }
        if !runs.is_empty() {
            progress.print(|| {
                print(&mut *out, table, &runs, style)?;
                if args.details { details(&mut *out, table, &runs, style) } else { Ok(()) }
            })?;
        }
    }
    drop(progress);
    if interrupt::requested() {
        writeln!(out, "{}", interrupt::NOT_COMPLETE)?;
    }
    if failures.is_empty() { json.complete() } else { Err(CliError::Failed(failures.join("\n"))) }
}

fn simulate(row: &Row, seed: u64) -> Result<Option<(Ran, Context)>, CliError> {
    row.subject.run(&profiles::bundled(row.profile)?, row.cpus, seed, &row.settings()?)
}

fn rate(run: &Option<Ran>) -> Option<f64> {
    run.as_ref().map(|ran| ran.sample.operation_rate())
}

impl Table {
    /// Returns the simulated ratio of row `at` to its base, or `None` for a base.
    fn simulated(&self, at: usize, runs: &[Option<Ran>]) -> Option<f64> {
        let base = self.rows[at].base;
        let (one, base) = (rate(&runs[at])?, rate(&runs[at - base]).filter(|_| base > 0)?);
        (base > 0.0).then(|| one / base)
    }

    /// Returns the published ratio of row `at` to its base.
    fn published(&self, at: usize) -> Option<Ratio> {
        let row = &self.rows[at];
        let figures = row.published.zip(self.rows[at - row.base].published);
        let computed = figures.filter(|(_, base)| row.base > 0 && *base > 0.0);
        row.ratio.or_else(|| computed.map(|(one, base)| Ratio::Exactly(one / base)))
    }
}

/// Writes the last of `runs`, with the published figures of its row.
fn write(
    json: &mut Json,
    table: &Table,
    runs: &[Option<Ran>],
    context: &Context,
) -> Result<(), CliError> {
    let at = runs.len() - 1;
    let Some(ran) = &runs[at] else { return Ok(()) };
    let row = &table.rows[at];
    let mut context = context.clone();
    context.params.insert("table".into(), table.name.into());
    context.params.insert("row".into(), row.label.as_str().into());
    if let Some(source) = &row.source {
        context.params.insert("published_by".into(), source.as_str().into());
    }
    write_json(json, &context, ran)?;
    let mut real = |metric, unit, value: Option<f64>| match value {
        Some(value) => json.write(&context, metric, unit, Number::Real(value)),
        None => Ok(()),
    };
    real("to_base", "ratio", table.simulated(at, runs))?;
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

/// Prints the completed rows of a table.
fn print(
    out: &mut dyn Write,
    of: &Table,
    runs: &[Option<Ran>],
    style: Style,
) -> Result<(), CliError> {
    writeln!(out, "\n{}, simulated", of.title)?;
    writeln!(out, "What differs: {}\n", of.differs)?;
    let head = ["", "CPUs", "", "simulated,\na second", "to base", "published", "to base"];
    let mut table = table::numbers(&head.map(str::to_owned), style);
    for (at, row) in of.rows.iter().enumerate().take(runs.len()) {
        let number = |it: Option<f64>| it.map_or("-".to_owned(), |it| grouped(it.round() as u64));
        table::row(
            &mut table,
            [
                row.label.clone(),
                row.cpus.to_string(),
                row.subject.unit().to_owned(),
                number(rate(&runs[at])),
                of.simulated(at, runs).map(times).unwrap_or_default(),
                number(row.published),
                of.published(at).map(Ratio::show).unwrap_or_default(),
            ],
        );
    }
    writeln!(out, "{table}")?;
    let profiles: BTreeSet<_> = of.rows.iter().map(|row| row.profile).collect();
    let profiles = profiles.into_iter().collect::<Vec<_>>().join(", ");
    writeln!(out, "The figures of faultless are simulated (profile {profiles}). Published by:")?;
    let sources: BTreeSet<_> = of.rows.iter().filter_map(|row| row.source.as_deref()).collect();
    for source in sources {
        writeln!(out, "  {source}")?;
    }
    Ok(())
}

/// Prints the CPU time of each row by purpose, its faults and its cache lines, per unit.
fn details(
    out: &mut dyn Write,
    of: &Table,
    runs: &[Option<Ran>],
    style: Style,
) -> Result<(), CliError> {
    writeln!(
        out,
        "\nFor each unit: CPU time in ns by purpose, as the columns of `scale` without --table; faults; lines from other CPUs and from \
         memory\n"
    )?;
    let mut head = ["", "CPUs", "time"].map(str::to_owned).to_vec();
    head.extend(Spent::ALL.map(|on| column(on).to_owned()));
    head.extend(["faults", "lines from\nCPUs", "lines from\nmemory"].map(str::to_owned));
    let mut table = table::numbers(&head, style);
    for (row, ran) in of.rows.iter().zip(runs) {
        let Some(ran) = ran else { continue };
        let units = ran.sample.operations.max(1) as f64;
        let nanoseconds = |spent: u64| format!("{:.0}", spent as f64 / 1000.0 / units);
        let each = |count: u64| format!("{:.2}", count as f64 / units);
        let mut cells = vec![row.label.clone(), row.cpus.to_string()];
        cells.push(nanoseconds(ran.accounts.spent.iter().sum()));
        cells.extend(ran.accounts.spent.map(nanoseconds));
        cells.extend([ran.sample.faults, ran.accounts.transfers, ran.accounts.fetches].map(each));
        table::row(&mut table, cells);
    }
    writeln!(out, "{table}")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::Sample;
    use crate::scale::sizes;
    use faultless_virtual::Accounts;

    #[test]
    fn every_row_can_run_and_every_table_has_published_figures() {
        let all = tables(TableArg::All);
        assert_eq!(all.len(), 5);
        for table in &all {
            for (at, row) in table.rows.iter().enumerate() {
                assert!(row.settings().is_ok() && row.base <= at, "{row:?}");
                assert!(profiles::bundled(row.profile).is_ok(), "{row:?}");
                let Subject::Workload(name, params) = &*row.subject else { panic!("{row:?}") };
                assert!(sizes::workload(name, params, row.cpus).is_ok(), "{row:?}");
                let base = &table.rows[at - row.base];
                assert!(base.base == 0 && base.cpus == row.cpus && base.profile == row.profile);
            }
            let known = |row: &&Row| row.published.is_some() || row.ratio.is_some();
            assert!(table.rows.iter().any(|row| known(&row)), "{}", table.title);
        }
        let figures = |which: TableArg| {
            let known = |row: &&Row| row.published.is_some() || row.ratio.is_some();
            tables(which)[0].rows.iter().filter(known).count()
        };
        assert_eq!(figures(TableArg::Prefault), 18);
        assert_eq!(figures(TableArg::Ebizzy), 4);
        assert_eq!(figures(TableArg::PageFault), 4);
        assert_eq!(figures(TableArg::SmallAllocs), 1);
        assert_eq!(figures(TableArg::Vma), 5 + 2 + 5);
    }

    /// Returns a run of `operations` in a second.
    fn ran(operations: u64) -> Option<Ran> {
        let counters = Vec::new();
        let (faults, wall, user, system) = (operations, 1.0, 0.0, 0.0);
        Some(Ran {
            sample: Sample { operations, faults, wall, user, system, counters },
            accounts: Accounts::default(),
            hottest: Vec::new(),
            latencies: Default::default(),
        })
    }

    #[test]
    fn rows_are_compared_with_their_base() {
        let table = prefault(&Figures(published::all()));
        let runs = [ran(1000), None, ran(3500), ran(10), ran(25)];
        let mut out = Vec::new();
        print(&mut out, &table, &runs, Style { terminal: false, width: 100 })
            .expect("it is a vector");
        let out = String::from_utf8(out).expect("text");
        let cells = |at: usize| {
            let row = out.lines().filter(|line| line.contains("| pages")).nth(at).expect("a row");
            row.split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(cells(0)[4..8], ["1,000", "", "45,097", ""], "{out}");
        assert_eq!(cells(1)[4..8], ["-", "", "45,058", "1.00x"], "{out}");
        assert_eq!(cells(2)[4..8], ["3,500", "3.50x", "45,544", "1.01x"], "{out}");
        assert_eq!(cells(4)[4..8], ["25", "2.50x", "342,934", "2.89x"], "{out}");
        assert!(out.contains("C. Lameter"), "{out}");
    }

    #[test]
    fn selected_cpus_keep_rows_with_their_bases() {
        let chosen = |which, cpus: &str| chosen(which, Some(&cpus.parse().expect("numbers")));
        let prefault = chosen(TableArg::Prefault, "1,64..128").expect("it has such rows");
        let cpus: Vec<_> = prefault[0].rows.iter().map(|row| row.cpus).collect();
        assert_eq!(cpus, [1, 1, 1, 64, 64, 64, 128, 128, 128]);
        let all = chosen(TableArg::All, "24,72").expect("two tables have such rows");
        assert_eq!(
            all.iter().map(|table| table.name).collect::<Vec<_>>(),
            ["ebizzy", "page_fault"]
        );
        for table in &all {
            let runs: Vec<_> = table.rows.iter().map(|_| ran(7)).collect();
            let ratios = (0..runs.len()).filter_map(|at| table.simulated(at, &runs)).count();
            assert_eq!(ratios * 2, table.rows.len(), "each second row has its base");
        }
        let error = chosen(TableArg::Prefault, "2").expect_err("no row has 2 CPUs").to_string();
        assert!(error.contains("1, 8, 16, 64, 128, 512 CPUs"), "{error}");
    }
}
