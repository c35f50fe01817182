//! The report on one screen, and as JSON.

use super::costs::Costs;
use super::findings::Findings;
use super::items::{Item, Open, open, predict, prefault, size, spent};
use super::once::Run;
use crate::args::AdviseArgs;
use crate::error::CliError;
use crate::replay::source::Source;
use crate::report::json::{Context, Json, Number};
use crate::report::number::grouped;
use crate::report::{Style, table};
use faultless_trace::Trace;
use faultless_workload::{Linux, System};
use serde_json::Map;
use std::io::Write;

/// The share of a run below which a saving is not worth a row. Other load makes a larger
/// difference.
pub const WORTH: f64 = 0.01;
/// The saving in nanoseconds below which an item is not worth a row: it would be printed as 0.
const LEAST: f64 = 1e6;

/// The report about a program.
#[derive(Debug)]
pub struct Answer<'a> {
    findings: &'a Findings,
    costs: Costs,
    plain: Option<Run>,
    /// Remarks of the reader of the recording.
    notes: &'a [String],
    /// The maximum nanoseconds of faults: the kernel time of the run, or the processor time of the
    /// threads in a recording.
    limit: f64,
    /// Seconds of the run: processor time, or for a recording the time from its first event to its
    /// last.
    seconds: f64,
    /// The predicted items, the largest saving first.
    pub items: Vec<Item>,
    /// The items without a prediction.
    pub open: Vec<Open>,
    prefault: Option<Item>,
}

impl<'a> Answer<'a> {
    /// Creates the report from counts, costs and the run without a recorder, if there was such a
    /// run.
    pub fn new(findings: &'a Findings, costs: Costs, plain: Option<Run>, trace: &'a Trace) -> Self {
        let recorded = trace.events.last().map_or(0, |event| event.time_us);
        let recorded = recorded as f64 / 1e6;
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let cpus = if trace.header.cpus > 0 { trace.header.cpus as usize } else { cpus };
        let at_once = trace.threads.len().clamp(1, cpus) as f64;
        let limit = plain.map_or(recorded * at_once, |run| run.fault_limit()) * 1e9;
        let bounded = bounded(findings, &costs, limit);
        // Concurrent threads use more processor time than elapses.
        let busy = spent(findings, &bounded) / 1e9;
        let seconds = plain.map_or(recorded.max(busy), |run| run.processor);
        let (open, prefault) = (open(findings), prefault(findings, &bounded));
        let mut answer = Self {
            findings,
            costs,
            plain,
            notes: &trace.header.notes,
            limit,
            seconds,
            items: Vec::new(),
            open,
            prefault,
        };
        answer.items = answer.predict(&answer.costs);
        answer
    }

    /// Predicts all items with these costs, each limited to the time that the run can have taken.
    pub fn predict(&self, costs: &Costs) -> Vec<Item> {
        let mut items = predict(self.findings, &bounded(self.findings, costs, self.limit));
        let most = self.seconds * 1e9;
        for item in &mut items {
            // Faults and calls are kernel time; fewer collections save time of the program.
            let most = if item.spared.is_some() { self.limit.min(most) } else { most };
            item.saving = item.saving.min(most);
            item.at_best = item.at_best.min(most);
        }
        items
    }

    /// Returns the costs, reduced so that the faults of the run take at most their possible time.
    fn bounded(&self) -> Costs {
        bounded(self.findings, &self.costs, self.limit)
    }

    /// Returns a saving as a share of the run, from 0 to 1.
    pub fn share(&self, nanoseconds: f64) -> f64 {
        nanoseconds / 1e9 / self.seconds.max(1e-9)
    }

    /// Returns whether a saving or a loss of this number of nanoseconds is worth a row.
    pub fn worth(&self, saving: f64) -> bool {
        saving.abs() >= LEAST && self.share(saving).abs() >= WORTH
    }

    /// Returns the items with a row each. Of the mTHP sizes, only the best has a row.
    pub fn shown(&self) -> Vec<&Item> {
        let mut sizes = 0;
        let first_size = |item: &&Item| {
            sizes += usize::from(is_size(item));
            !is_size(item) || sizes == 1
        };
        self.items.iter().filter(first_size).collect()
    }

    /// Prints the report.
    pub fn print(&self, out: &mut dyn Write, style: Style) -> Result<(), CliError> {
        self.print_faults(out)?;
        let (worth, rest): (Vec<_>, Vec<_>) =
            self.shown().into_iter().partition(|item| item.saving > 0.0 && self.worth(item.saving));
        if worth.is_empty() {
            writeln!(
                out,
                "\n No setting of today's Linux is predicted to save {:.0} % of the run.",
                100.0 * WORTH
            )?;
        }
        // Prefault by the kernel is reported even if no setting is worth a row.
        let rows: Vec<_> = worth.iter().copied().chain(&self.prefault).collect();
        if !rows.is_empty() {
            let head =
                ["on today's Linux", "saves", "of the run", "unused memory"].map(str::to_owned);
            let mut table = table::numbers(&head, style);
            for item in &rows {
                table::row(&mut table, self.cells(item));
            }
            writeln!(out, "\n{table}\n")?;
            for item in &rows {
                writeln!(out, " {}: {}", item.name, item.action)?;
                for remark in &item.remarks {
                    writeln!(out, "   note: {remark}")?;
                }
            }
        }
        let sizes: Vec<_> = self.items.iter().filter(|item| is_size(item)).collect();
        if sizes.len() > 1 {
            let told = |item: &&Item| {
                format!(
                    "{} {:.3} s ({})",
                    item.name.replace("mTHP ", ""),
                    item.saving / 1e9,
                    size(item.unused)
                )
            };
            writeln!(
                out,
                " other sizes of mTHP: {}",
                sizes[1..].iter().map(told).collect::<Vec<_>>().join(", ")
            )?;
        }
        let (costly, little): (Vec<_>, Vec<_>) =
            rest.into_iter().partition(|item| item.saving < 0.0 && self.worth(item.saving));
        for item in costly {
            if item.depends() {
                writeln!(
                    out,
                    " depends: {} costs {:.3} s, and saves {:.3} s if the host has not taken the memory back",
                    item.name,
                    -item.saving / 1e9,
                    item.at_best / 1e9
                )?;
                continue;
            }
            writeln!(
                out,
                " do not: {} costs {:.3} s ({:.1} %)",
                item.name,
                -item.saving / 1e9,
                -100.0 * self.share(item.saving)
            )?;
        }
        for Open { name, action, why, .. } in &self.open {
            writeln!(out, " not predicted: {name}: {action}\n   {why}")?;
        }
        if !little.is_empty() {
            let names: Vec<_> = little.iter().map(|item| &*item.name).collect();
            writeln!(
                out,
                " predicted to change less than {:.0} % of the run: {}",
                100.0 * WORTH,
                names.join(", ")
            )?;
        }
        Ok(())
    }

    /// Prints the current cost of the faults.
    fn print_faults(&self, out: &mut dyn Write) -> Result<(), CliError> {
        let Findings { name, census, .. } = self.findings;
        let measured = spent(self.findings, &self.costs);
        let spent = spent(self.findings, &self.bounded());
        writeln!(
            out,
            "\n {name}: {:.2} s of {:.2} s ({:.0} %) are spent in {} faults;",
            spent / 1e9,
            self.seconds,
            100.0 * self.share(spent),
            grouped(self.findings.expected_faults())
        )?;
        if measured > 1.05 * spent {
            writeln!(
                out,
                " At most: a fault cost {:.1} times as much when it was measured, which is more than the run had{}. Savings are reduced to match.",
                measured / spent.max(1.0),
                if self.plain.is_some_and(|run| run.fault_limit() == run.system) {
                    " in the kernel"
                } else {
                    ""
                }
            )?;
        }
        if self.findings.expected_faults() < census.faults() {
            writeln!(
                out,
                " {} were recorded, without huge pages; with huge pages as they are set here {} remain{}.",
                grouped(census.faults()),
                grouped(self.findings.expected_faults()),
                if census.asks_for_huge {
                    ", as the program asks for huge pages (MADV_HUGEPAGE)"
                } else {
                    ""
                }
            )?;
        }
        writeln!(
            out,
            " {} of them are the second to eighth page of a sequence.",
            grouped(census.in_sequence)
        )?;
        let mut kinds = vec![
            (census.zeroed, "zero a page"),
            (census.zero_page, "map the zero page"),
            (census.copies, "copy a page or change its protection"),
            (census.shared, "zero a page of shared memory"),
            (census.file, "map a page of a file or of shared memory"),
        ];
        kinds.retain(|(count, _)| *count > 0);
        let kinds: Vec<_> =
            kinds.iter().map(|(count, what)| format!("{} {what}", grouped(*count))).collect();
        writeln!(out, " {}.", kinds.join(", "))?;
        if let Some(file) = self.findings.shmem.file.as_deref().filter(|_| census.shared > 0) {
            writeln!(
                out,
                " Huge pages of shared memory are set to `{}` here ({}).",
                self.findings.shmem.word,
                file.display()
            )?;
        }
        let back = census.returned + census.discarded;
        if back > 0 {
            writeln!(
                out,
                " {} zero a page that the program had before, and had given back.",
                grouped(back)
            )?;
        }
        match self.plain {
            Some(run) => writeln!(
                out,
                " Seconds are of processor time, of a run without the recorder: {:.2} s elapsed, {:.2} s in the kernel;\n it had {} faults, with huge pages as they are set here.",
                run.wall,
                run.system,
                grouped(run.faults)
            )?,
            None => writeln!(
                out,
                " The time of the run is that of the recording, which the recorder made longer."
            )?,
        }
        if self.plain.is_none() {
            for note in self.notes {
                writeln!(out, " note: {note}")?;
            }
        }
        if let Some(run) = self.plain {
            if run.thp_off {
                writeln!(
                    out,
                    " The program switches huge pages off for itself (PR_SET_THP_DISABLE): their settings have no effect on it."
                )?;
            }
            if let Some(why) = disagrees(self.findings.expected_faults(), run) {
                writeln!(out, " {why}")?;
            }
            if run.ended > 0 {
                writeln!(
                    out,
                    " {} of its processes ran on after the program had ended, and were ended: their time is not complete.",
                    run.ended
                )?;
            }
        }
        let costs = &self.costs;
        let alone = costs.quiet.touch;
        writeln!(
            out,
            "{}",
            page_told(costs.page, alone, [costs.quiet.exception(), costs.path(), costs.zeroing])
        )?;
        if costs.shadowed() {
            writeln!(
                out,
                " This is a virtual machine in which a first touch takes {:.1} µs: several times what it takes on hardware. Its host may\n \
                 shadow its page tables. On hardware savings are smaller.",
                alone / 1e3
            )?;
        } else if costs.virtual_machine {
            writeln!(
                out,
                " This is a virtual machine; a first touch takes {:.1} µs.",
                alone / 1e3
            )?;
        }
        Ok(())
    }

    fn cells(&self, item: &Item) -> [String; 4] {
        [
            item.name.clone(),
            format!("{:.3} s", item.saving / 1e9),
            format!("{:.1} %", 100.0 * self.share(item.saving)),
            size(item.unused),
        ]
    }

    /// Returns the context of the measurement and prediction.
    pub fn context(&self, source: &Source, args: &AdviseArgs) -> Context {
        let command: Vec<_> = args.program.iter().map(|word| word.to_string_lossy()).collect();
        Context {
            machine: Linux::new().machine(),
            workload: format!("advise:{}", source.name),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            setting: "default".into(),
            params: Map::from_iter([
                ("program".to_owned(), source.trace.header.program.as_str().into()),
                ("command".to_owned(), command.join(" ").into()),
                ("sysfs".to_owned(), args.sysfs.into()),
                ("shmem_enabled".to_owned(), self.findings.shmem.word.as_str().into()),
            ]),
            knobs: Map::new(),
        }
    }

    /// Writes every figure.
    pub fn json(&self, json: &mut Json, context: &Context) -> Result<(), CliError> {
        let Self { findings, costs, .. } = self;
        let times =
            [("seconds", self.seconds), ("fault_seconds", spent(findings, &self.bounded()) / 1e9)];
        for (metric, value) in times {
            json.write(context, metric, "s", Number::Real(value))?;
        }
        for (metric, value) in [
            ("page_ns", costs.page),
            ("populated_page_ns", costs.populated),
            ("exception_ns", costs.quiet.exception()),
            ("kernel_path_ns", costs.path()),
            ("zeroing_ns", costs.zeroing),
            ("first_touch_ns", costs.quiet.touch),
            ("pretouched_page_ns", costs.pretouched),
            ("mapping_call_ns", costs.mapping),
            ("shared_page_ns", costs.shared()),
        ] {
            json.write(context, metric, "ns", Number::Real(value))?;
        }
        let census = &findings.census;
        for (metric, count) in [
            ("faults", census.faults()),
            ("faults_expected", findings.expected_faults()),
            ("faults_in_sequence", census.in_sequence),
            ("faults_zeroed", census.zeroed),
            ("faults_zero_page", census.zero_page),
            ("faults_copied", census.copies),
            ("faults_file", census.file),
            ("faults_shared", census.shared),
            ("faults_returned", census.returned),
            ("faults_discarded", census.discarded),
            ("virtual_machine", costs.virtual_machine.into()),
            ("shadowed_page_tables", costs.shadowed().into()),
        ] {
            json.write(context, metric, "count", Number::Whole(count))?;
        }
        for item in self.items.iter().chain(&self.prefault) {
            let context = Context { setting: item.name.clone(), ..context.clone() };
            json.write(&context, "predicted_saving_seconds", "s", Number::Real(item.saving / 1e9))?;
            json.write(
                &context,
                "predicted_saving_share",
                "1",
                Number::Real(self.share(item.saving)),
            )?;
            json.write(
                &context,
                "predicted_saving_at_best_seconds",
                "s",
                Number::Real(item.at_best / 1e9),
            )?;
            json.write(&context, "unused_bytes", "bytes", Number::Whole(item.unused))?;
        }
        Ok(())
    }
}

/// Reduces `costs` until the faults of the recording take at most `limit` nanoseconds. All costs of
/// faults are reduced alike, because the run only limits their sum.
fn bounded(findings: &Findings, costs: &Costs, limit: f64) -> Costs {
    let spent = spent(findings, costs);
    if spent > limit { costs.scaled(limit / spent) } else { costs.clone() }
}

/// The smallest difference in faults that is reported, of all faults and as a number.
const DISAGREES: (f64, u64) = (0.2, 500);

/// Explains why the faults of a run without the recorder differ from the number expected from the
/// recording.
fn disagrees(expected: u64, run: Run) -> Option<String> {
    let (share, few) = DISAGREES;
    let off = expected.abs_diff(run.faults);
    let populated =
        if run.counts_populated { ", or pages that a call populates are counted" } else { "" };
    (off >= few && off as f64 > share * expected.max(run.faults) as f64).then(|| {
        let why = if run.faults < expected {
            "the program takes another course when it is recorded, or the kernel collapses its memory to huge pages".to_owned()
        } else {
            format!("the program takes another course when it is recorded{populated}")
        };
        format!(
            "Predictions are uncertain: the recording leads to expect {} faults, the run without the recorder had {}: {why}.",
            grouped(expected),
            grouped(run.faults)
        )
    })
}

/// Describes the cost of a zeroed page, of a first touch `alone`, and its parts: nanoseconds each.
fn page_told(page: f64, alone: f64, parts: [f64; 3]) -> String {
    let [page, alone] = [page, alone].map(|ns| ns / 1e3);
    let [exception, path, zeroing] = parts.map(|ns| ns / 1e3);
    let parts = format!("exception {exception:.2}, kernel path {path:.2}, zeroing {zeroing:.2}");
    if page >= alone {
        let rest = page - alone;
        return format!(
            " A zeroed page costs {page:.2} µs here: {parts}; cold caches and unmapping {rest:.2}."
        );
    }
    format!(
        " A zeroed page costs {page:.2} µs here, less than a first touch alone ({alone:.2} µs: {parts}): other programs were\n running \
         while they were measured, and savings are uncertain."
    )
}

fn is_size(item: &Item) -> bool {
    item.name.starts_with("mTHP")
}

#[cfg(test)]
mod tests {
    use super::super::costs::tests::costs;
    use super::super::items::tests::{findings, sizes};
    use super::super::sysfs::Mode;
    use super::*;
    use crate::replay::source::{Input, open};
    use std::path::Path;

    #[test]
    fn page_cheaper_than_its_parts_is_reported_as_uncertain() {
        let parts = [1000.0, 500.0, 500.0];
        let told = page_told(2500.0, 2000.0, parts);
        assert!(
            told.contains("costs 2.50 µs here: exception 1.00, kernel path 0.50, zeroing 0.50")
        );
        assert!(told.ends_with("cold caches and unmapping 0.50."), "{told}");
        let told = page_told(500.0, 2000.0, parts);
        assert!(told.contains("0.50 µs here, less than a first touch alone (2.00 µs: "), "{told}");
    }

    /// Returns a run with this kernel time, in seconds.
    fn run(system: f64, faults: u64) -> Run {
        Run {
            wall: 1.2,
            processor: 1.1,
            system,
            faults,
            counts_populated: false,
            thp_off: false,
            status: std::process::ExitStatus::default(),
            ended: 0,
        }
    }

    #[test]
    fn faults_never_take_more_than_the_kernel_time_of_the_run() {
        let Ok(Input::Recording(source)) = open(Path::new("python")) else {
            panic!("python is bundled")
        };
        let findings = findings("python", sizes(Mode::Madvise));
        let all = spent(&findings, &costs()) / 1e9;
        // The division of a short run's time is unreliable.
        let short = Run { processor: all / 2.0, ..run(0.0, 1) };
        let answer = Answer::new(&findings, costs(), Some(short), &source.trace);
        assert!((spent(&findings, &answer.bounded()) / 1e9 - all / 2.0).abs() < 1e-6);
        for system in [all / 3.0, 2.0 * all] {
            let answer = Answer::new(&findings, costs(), Some(run(system, 1)), &source.trace);
            let took = spent(&findings, &answer.bounded()) / 1e9;
            assert!((took - all.min(system)).abs() < 1e-6, "{took} of {system}");
            let most = answer.items.iter().map(|item| item.saving).fold(0.0, f64::max);
            assert!(most > 0.0 && most <= system * 1e9 + 1.0, "{most} of {system}");
        }
        // A recording alone: its threads cannot take more than their total time.
        let dear = costs().scaled(1e4);
        let answer = Answer::new(&findings, dear, None, &source.trace);
        assert!(answer.share(spent(&findings, &answer.bounded())) <= 1.0 + 1e-9);
        assert!(answer.items.iter().all(|item| answer.share(item.saving) <= 1.0 + 1e-9));
    }

    #[test]
    fn run_with_unexpected_faults_gets_a_remark() {
        assert_eq!(disagrees(20_000, run(1.0, 19_000)), None);
        assert_eq!(disagrees(100, run(1.0, 300)), None);
        let fewer = disagrees(20_000, run(1.0, 1_000)).expect("far off");
        assert!(fewer.contains("expect 20,000 faults") && fewer.contains("huge pages"), "{fewer}");
        let populated = Run { counts_populated: true, ..run(1.0, 90_000) };
        assert!(disagrees(20_000, populated).expect("far off").contains("populates"));
    }

    #[test]
    fn prefault_by_the_kernel_is_reported_without_other_advice() {
        let Ok(Input::Recording(source)) = open(Path::new("python")) else {
            panic!("python is bundled")
        };
        let findings = findings("python", sizes(Mode::Madvise));
        let mut answer = Answer::new(&findings, costs(), None, &source.trace);
        let printed = |answer: &Answer<'_>| {
            let mut out = Vec::new();
            answer.print(&mut out, Style { terminal: false, width: 100 }).expect("memory");
            String::from_utf8(out).expect("text")
        };
        let (none, kernel) = ("No setting of today's Linux", "prefault by the kernel: no setting");
        let told = printed(&answer);
        assert!(told.contains(kernel) && !told.contains(none), "{told}");
        answer.items.clear();
        let told = printed(&answer);
        assert!(told.contains(kernel) && told.contains(none), "{told}");
    }
}
