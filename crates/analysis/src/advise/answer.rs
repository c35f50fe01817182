//! The answer for one program: the time of its faults, and the predicted saving of each setting.

use super::cold::{self, ColdStart};
use super::costs::Costs;
use super::file::Advice;
use super::findings::Findings;
use super::item::{Apply, Item, Open};
use super::items::{open, predict_both, prefault};
use super::kernel_time::fault_limit;
use super::once::Run;
use super::sites::{Site, sites};
use super::time::{most_walks, spent};
use crate::context::{Basis, Context};
use crate::error::Error;
use crate::figures::{Figures, Number};
use crate::replay::Source;
use faultless::PAGE_SIZE;
use faultless_trace::Trace;
use faultless_trace::event::ProcessSummary;
use faultless_trace::files::Reads;
use faultless_trace::resident::host_page_size;
use faultless_workload::{Linux, System};
use serde_json::Map;
use std::ffi::OsString;

/// The share of a run below which a saving is not worth a row. Other load makes a larger
/// difference.
pub const WORTH: f64 = 0.01;
/// The call sites that are reported.
pub const SITES: usize = 10;
/// The saving in nanoseconds below which an item is not worth a row: it would be printed as 0.
const LEAST: f64 = 1e6;

/// The report about a program.
#[derive(Debug)]
pub struct Answer<'a> {
    /// The counts of the recording.
    pub findings: &'a Findings,
    /// The measured costs.
    pub costs: Costs,
    /// The run without the recorder, if there was such a run.
    pub plain: Option<Run>,
    /// Remarks of the reader of the recording.
    pub notes: &'a [String],
    /// The maximum nanoseconds of faults: the kernel time of the run, or the processor time of the
    /// threads in a recording.
    limit: f64,
    /// Seconds of the run: processor time, or for a recording without its processor time the time
    /// from its first event to its last. Shares refer to this time.
    pub seconds: f64,
    /// The elapsed seconds of a recording whose `seconds` are processor time.
    pub elapsed: Option<f64>,
    /// The predicted items, the largest saving first.
    pub items: Vec<Item>,
    /// The items without a prediction.
    pub open: Vec<Open>,
    /// The saving of prefault by the kernel.
    pub prefault: Option<Item>,
    /// The call sites, the largest time first; empty without call stacks.
    pub sites: Vec<Site>,
    /// The recorded processes with a fault, the process with the most faults first.
    pub processes: Vec<ProcessSummary>,
}

impl<'a> Answer<'a> {
    /// Creates the report from counts, costs and the run without a recorder, if there was such a
    /// run.
    pub fn new(findings: &'a Findings, costs: Costs, plain: Option<Run>, trace: &'a Trace) -> Self {
        let recorded = trace.events.last_us() as f64 / 1e6;
        let limit = match &plain {
            Some(run) => fault_limit([run]),
            None => processor_seconds(trace),
        };
        let limit = limit * 1e9;
        let costs = match host_page_size() {
            PAGE_SIZE if findings.small_pages > 1 => {
                costs.with_pages_of(findings.small_pages.ilog2() as u8)
            }
            _ => costs,
        };
        let costs = costs.with_warm_frames(findings.discards.warm_share());
        let bounded = bounded(findings, &costs, limit);
        // Concurrent threads use more processor time than elapses.
        let busy = spent(findings, &bounded) / 1e9;
        let used = trace.header.processor_us as f64 / 1e6;
        let elapsed = (plain.is_none() && used > 0.0).then_some(recorded);
        let base = if elapsed.is_some() { used } else { recorded };
        let seconds = plain.map_or(base.max(busy), |run| run.processor);
        let (open, prefault) = (open(findings), prefault(findings, &bounded));
        let sites = sites(findings, &bounded, &trace.stacks);
        let mut answer = Self {
            findings,
            costs,
            plain,
            notes: &trace.header.notes,
            limit,
            seconds,
            elapsed,
            items: Vec::new(),
            open,
            prefault,
            sites,
            processes: processes(trace, findings.small_pages),
        };
        answer.items = answer.predict(&answer.costs);
        answer
    }

    /// Predicts all items with these costs, each limited to the time that the run can have taken.
    pub fn predict(&self, costs: &Costs) -> Vec<Item> {
        self.predict_within(costs, self.limit)
    }

    /// Predicts all items with these costs for the program whose further `runs`, with unchanged
    /// settings, took their processor time.
    pub fn predict_beside<'r>(
        &self,
        costs: &Costs,
        runs: impl IntoIterator<Item = &'r Run>,
    ) -> Vec<Item> {
        let limit = fault_limit(runs) * 1e9;
        let costs = &costs.with_warm_frames(self.findings.discards.warm_share());
        self.predict_within(costs, if limit.is_finite() { limit } else { self.limit })
    }

    /// Predicts all items; faults take `limit` nanoseconds at most.
    fn predict_within(&self, costs: &Costs, limit: f64) -> Vec<Item> {
        // The run can have found memory taken back or not, and each case has its own bound.
        let [taken, used] =
            [costs, &costs.in_used_memory()].map(|costs| bounded(self.findings, costs, limit));
        let mut items = predict_both(self.findings, &taken, &used);
        let most = self.seconds * 1e9;
        for item in &mut items {
            // Faults and calls are kernel time; fewer collections and page walks save time of the
            // program.
            let collections = self.findings.collections.map_or(0.0, |it| it.inherited + it.later);
            let kernel = limit + most_walks(self.findings, costs) + collections;
            let most = if item.spared.is_some() { kernel.min(most) } else { most };
            item.saving = item.saving.min(most);
            item.at_best = item.at_best.min(most);
        }
        items
    }

    /// Returns the costs, reduced so that the faults of the run take at most their possible time.
    pub fn bounded(&self) -> Costs {
        bounded(self.findings, &self.costs, self.limit)
    }

    /// Returns the predictions for a cold page cache; `None` without large mappings of files, or
    /// without a measurement of a disk.
    pub fn cold_start(&self) -> Option<ColdStart> {
        let cost = self.findings.cold_cost.as_ref()?;
        cold::start(&self.findings.files, cost, self.findings.file_cost)
    }

    /// Returns a saving as a share of the run, from 0 to 1.
    pub fn share(&self, nanoseconds: f64) -> f64 {
        nanoseconds / 1e9 / self.seconds.max(1e-9)
    }

    /// Returns whether a saving or a loss of this number of nanoseconds is worth a row.
    pub fn worth(&self, saving: f64) -> bool {
        saving.abs() >= LEAST && self.share(saving).abs() >= WORTH
    }

    /// Returns whether an item is predicted to save enough for a row.
    pub fn saves(&self, item: &Item) -> bool {
        item.saving > 0.0 && self.worth(item.saving)
    }

    /// Returns the advice that is worth a row, and can be applied.
    pub fn chosen(&self) -> Vec<Advice> {
        let able = |item: &&Item| self.saves(item) && item.apply != Apply::Nothing;
        let advice = |item: &Item| Advice {
            name: item.name.clone(),
            predicted: Some(item.saving / 1e9),
            measured: None,
            apply: item.apply.clone(),
        };
        self.shown().into_iter().filter(able).map(advice).collect()
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

    /// Returns the context of the measurement and prediction: `program` is the command, and
    /// `sysfs` permits changes of system-wide settings.
    pub fn context(&self, source: &Source, program: &[OsString], sysfs: bool) -> Context {
        let command: Vec<_> = program.iter().map(|word| word.to_string_lossy()).collect();
        Context {
            machine: Linux::new().machine(),
            workload: format!("advise:{}", source.name),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            setting: "default".into(),
            params: Map::from_iter([
                ("program".to_owned(), source.trace.header.program.as_str().into()),
                ("command".to_owned(), command.join(" ").into()),
                ("sysfs".to_owned(), sysfs.into()),
                ("shmem_enabled".to_owned(), self.findings.shmem.word.as_str().into()),
            ]),
            knobs: Map::new(),
            basis: None,
        }
    }

    /// Passes every figure to `figures`.
    ///
    /// # Errors
    /// A figure cannot be written.
    pub fn figures(&self, figures: &mut dyn Figures, context: &Context) -> Result<(), Error> {
        let Self { findings, costs, .. } = self;
        let predicted = &context.with_basis(Basis::Predicted);
        figures.figure(context, "seconds", "s", Number::Real(self.seconds))?;
        let spent = Number::Real(spent(findings, &self.bounded()) / 1e9);
        figures.figure(predicted, "fault_seconds", "s", spent)?;
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
            figures.figure(context, metric, "ns", Number::Real(value))?;
        }
        if let Some(walks) = findings.walks {
            figures.figure(predicted, "page_walks", "count", Number::Real(walks))?;
        }
        if let Some(saved) = costs.walk {
            figures.figure(context, "walk_saving_ns", "ns", Number::Real(saved))?;
        }
        let census = &findings.census;
        for (metric, count) in [
            ("faults", findings.faults(census.faults())),
            ("faults_in_sequence", findings.faults(census.in_sequence)),
            ("faults_zeroed", findings.faults(census.zeroed)),
            ("faults_zero_page", findings.faults(census.zero_page)),
            ("faults_copied", findings.faults(census.copies)),
            ("faults_file", findings.faults(census.file)),
            ("faults_shared", findings.faults(census.shared)),
            ("faults_returned", findings.faults(census.returned)),
            ("faults_discarded", findings.faults(census.discarded)),
            ("virtual_machine", costs.virtual_machine.into()),
            ("shadowed_page_tables", costs.shadowed().into()),
        ] {
            figures.figure(context, metric, "count", Number::Whole(count))?;
        }
        for (metric, count) in [
            ("faults_expected", findings.expected_faults()),
            ("faults_on_warm_frames", findings.discards.warm),
        ] {
            figures.figure(predicted, metric, "count", Number::Whole(count))?;
        }
        for site in self.sites.iter().take(SITES) {
            let context =
                Context { setting: format!("call site {}", site.label()), ..context.clone() };
            let seconds = Number::Real(site.nanoseconds / 1e9);
            let predicted = context.with_basis(Basis::Predicted);
            figures.figure(&predicted, "predicted_site_seconds", "s", seconds)?;
            let faults = Number::Whole(site.faults);
            figures.figure(&context, "site_faults", "count", faults)?;
            figures.figure(&context, "site_bytes", "bytes", Number::Whole(site.bytes()))?;
            let copied = Number::Whole(site.copied.total());
            figures.figure(&context, "site_pages_copied_after_forks", "pages", copied)?;
            for creator in &site.creators {
                let mut context = context.clone();
                let label = creator.label();
                context.setting = format!("{}, memory of {label}", context.setting);
                context.params.insert("memory_of".to_owned(), label.into());
                let bytes = Number::Whole(creator.bytes);
                figures.figure(&context, "site_bytes_by_call", "bytes", bytes)?;
            }
            for call in &site.freed {
                let mut context = context.clone();
                let label = call.label();
                context.setting = format!("{}, memory freed by {label}", context.setting);
                context.params.insert("freed_by".to_owned(), label.into());
                let bytes = Number::Whole(call.bytes);
                figures.figure(&context, "site_bytes_touched_again", "bytes", bytes)?;
            }
        }
        self.process_figures(figures, context)?;
        self.fork_figures(figures, context)?;
        if let Some(start) = self.cold_start() {
            let seconds = Number::Real(start.now / 1e9);
            figures.figure(predicted, "predicted_cold_seconds", "s", seconds)?;
            let Reads { around, next, single, .. } = start.reads;
            let reads = Number::Whole(around + next + single);
            figures.figure(predicted, "cold_reads", "count", reads)?;
        }
        for item in self.items.iter().chain(&self.prefault) {
            let context = Context { setting: item.name.clone(), ..predicted.clone() };
            figures.figure(
                &context,
                "predicted_saving_seconds",
                "s",
                Number::Real(item.saving / 1e9),
            )?;
            figures.figure(
                &context,
                "predicted_saving_share",
                "1",
                Number::Real(self.share(item.saving)),
            )?;
            figures.figure(
                &context,
                "predicted_saving_at_best_seconds",
                "s",
                Number::Real(item.at_best / 1e9),
            )?;
            figures.figure(&context, "unused_bytes", "bytes", Number::Whole(item.unused))?;
            if let Some(spared) = item.spared {
                figures.figure(
                    &context,
                    "predicted_faults_saved",
                    "count",
                    Number::Real(spared),
                )?;
            }
        }
        Ok(())
    }
}

impl Answer<'_> {
    /// Passes the figures of forks to `figures`, if the program forks.
    fn fork_figures(&self, figures: &mut dyn Figures, context: &Context) -> Result<(), Error> {
        let forks = &self.findings.forks;
        let Some(cost) = self.findings.fork_cost else { return Ok(()) };
        let predicted = &context.with_basis(Basis::Predicted);
        let times = [
            Some(("fork_largest_ns", cost.time(forks.most))),
            cost.time_of_huge(forks.huge[0].most).map(|time| ("fork_with_thp_ns", time)),
        ];
        for (metric, value) in times.into_iter().flatten() {
            figures.figure(predicted, metric, "ns", Number::Real(value))?;
        }
        let times = [
            Some(("fork_entry_ns", cost.entry.total())),
            cost.huge.map(|huge| ("fork_huge_entry_ns", huge.entry.total())),
            cost.huge.map(|huge| ("fork_split_entry_ns", huge.split_entry.total())),
            cost.huge.map(|huge| ("fork_split_ns", huge.split)),
        ];
        for (metric, value) in times.into_iter().flatten() {
            figures.figure(context, metric, "ns", Number::Real(value))?;
        }
        if let Some(collections) = self.findings.collections {
            let count = Number::Whole(collections.full);
            figures.figure(context, "fork_collections_of_children", "count", count)?;
            for (metric, value) in [
                ("fork_collections_of_children_ns", collections.inherited),
                ("fork_collections_of_parents_ns", collections.later),
                ("fork_collection_before_ns", collections.before),
            ] {
                figures.figure(context, metric, "ns", Number::Real(value))?;
            }
        }
        for (metric, count) in [
            ("forks", forks.forks),
            ("fork_entries", forks.entries),
            ("fork_pages_copied_by_parents", forks.copied.by_parent),
            ("fork_pages_copied_by_children", forks.copied.by_child),
        ] {
            figures.figure(context, metric, "count", Number::Whole(count))?;
        }
        let splits = Number::Whole(forks.huge[0].splits);
        figures.figure(predicted, "fork_huge_pages_split", "count", splits)
    }

    /// Passes the figures of each process to `figures`, if there are several.
    fn process_figures(&self, figures: &mut dyn Figures, context: &Context) -> Result<(), Error> {
        if self.processes.len() < 2 {
            return Ok(());
        }
        for process in &self.processes {
            let setting = format!("process {}", process.label());
            let mut context = Context { setting, ..context.clone() };
            context.params.extend([
                ("process".to_owned(), process.process.into()),
                ("process_name".to_owned(), process.name.as_str().into()),
                ("process_pid".to_owned(), process.pid.into()),
                ("process_parent".to_owned(), process.parent.into()),
            ]);
            for (metric, unit, count) in [
                ("process_faults", "faults", process.faults),
                ("process_pages", "pages", process.pages),
                ("process_first_touches", "faults", process.first_touches),
                ("process_present_faults", "faults", process.present),
            ] {
                figures.figure(&context, metric, unit, Number::Whole(count))?;
            }
        }
        Ok(())
    }
}

/// Returns the processes of `trace` with a fault, with counts of pages of the recorded host, each
/// of which has `small` pages of 4 KiB.
fn processes(trace: &Trace, small: u64) -> Vec<ProcessSummary> {
    let mut processes = trace.processes_by_faults();
    for ProcessSummary { faults, pages, first_touches, present, .. } in &mut processes {
        for count in [faults, pages, first_touches, present] {
            *count /= small;
        }
    }
    processes
}

/// Returns the most processor time that the threads of a recording can have taken, in seconds: the
/// time in the recording, if known.
pub(super) fn processor_seconds(trace: &Trace) -> f64 {
    if trace.header.processor_us > 0 {
        return trace.header.processor_us as f64 / 1e6;
    }
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let cpus = if trace.header.cpus > 0 { trace.header.cpus as usize } else { cpus };
    let at_once = trace.threads.len().clamp(1, cpus) as f64;
    trace.events.last_us() as f64 / 1e6 * at_once
}

/// Reduces `costs` until the faults of the recording take at most `limit` nanoseconds. All costs of
/// faults are reduced alike, because the run only limits their sum.
fn bounded(findings: &Findings, costs: &Costs, limit: f64) -> Costs {
    let spent = spent(findings, costs);
    if spent > limit { costs.scaled(limit / spent) } else { costs.clone() }
}

/// Returns whether `item` enables one more size of folios for all memory.
pub fn is_size(item: &Item) -> bool {
    item.name.starts_with("mTHP")
}

#[cfg(test)]
mod tests {
    use super::super::costs::tests::{costs, taken};
    use super::super::items::tests::{find, findings, sizes};
    use super::super::once::tests::run;
    use super::super::sysfs::Mode;
    use super::*;
    use faultless_trace::recordings;

    #[test]
    fn chosen_advice_saves_and_can_be_applied() {
        let recording = recordings::find("python").expect("a bundled recording");
        let source = Source::shipped(recording).expect("a valid recording");
        let findings = findings("python", sizes(Mode::Madvise));
        let mut answer = Answer::new(&findings, costs(), None, &source.trace);
        let all = answer.seconds * 1e9;
        for item in &mut answer.items {
            item.saving = match &*item.name {
                "malloc keeps memory" | "text on huge pages" => 0.5 * all,
                "mTHP 64 kB" => -0.5 * all,
                _ => 0.0,
            };
        }
        let chosen = answer.chosen();
        let names: Vec<_> = chosen.iter().map(|advice| &*advice.name).collect();
        assert_eq!(names, ["malloc keeps memory"]);
        assert!(answer.items.iter().any(|item| item.name == "text on huge pages"));
        assert_eq!(chosen[0].predicted, Some(0.5 * all / 1e9));
    }

    /// A server that is idle most of the time.
    #[test]
    fn shares_of_a_recording_refer_to_its_processor_time() {
        let recording = recordings::find("python").expect("a bundled recording");
        let source = Source::shipped(recording).expect("a valid recording");
        let findings = findings("python", sizes(Mode::Madvise));
        let mut trace = source.trace.clone();
        let recorded = trace.events.last_us() as f64 / 1e6;
        let unknown = Answer::new(&findings, costs(), None, &trace);
        assert_eq!((unknown.seconds, unknown.elapsed), (recorded, None));
        let used = 0.75 * recorded;
        trace.header.processor_us = (used * 1e6) as u64;
        let answer = Answer::new(&findings, costs(), None, &trace);
        assert!((answer.seconds - used).abs() < 1e-5, "{}", answer.seconds);
        assert!((answer.share(used * 1e9 / 2.0) - 0.5).abs() < 1e-4);
        assert_eq!(answer.elapsed, Some(recorded));
        // The faults take at most this time.
        let dear = Answer::new(&findings, costs().scaled(1e4), None, &trace);
        assert!((spent(&findings, &dear.bounded()) / 1e9 - used).abs() < 1e-5);
        // The time of a run without the recorder comes first.
        let plain = Answer::new(&findings, costs(), Some(run(1.0, 1)), &trace);
        assert_eq!((plain.seconds, plain.elapsed), (run(1.0, 1).processor, None));
    }

    #[test]
    fn walks_save_time_beyond_the_kernel_time_of_the_run() {
        let recording = recordings::find("python").expect("a bundled recording");
        let source = Source::shipped(recording).expect("a valid recording");
        let mut findings = findings("python", sizes(Mode::Never));
        // The faults take almost no time.
        let plain = run(1e-6, 1);
        let most = |findings: &Findings, costs| {
            let answer = Answer::new(findings, costs, Some(plain), &source.trace);
            answer.items.iter().map(|item| item.saving).fold(0.0, f64::max)
        };
        let faults = most(&findings, costs());
        findings.walks = Some(1e6);
        let both = most(&findings, Costs { walk: Some(20.0), ..costs() });
        assert!(both > faults + 1e7, "{both} and {faults}");
        // Walks do not save more than the run.
        findings.walks = Some(1e12);
        let all = most(&findings, Costs { walk: Some(20.0), ..costs() });
        assert!((all - plain.processor * 1e9).abs() < 1.0, "{all}");
    }

    /// A program with huge pages has few other faults, and its run limits the cost of huge pages.
    /// In memory that was not taken back, the limit does not affect other faults.
    #[test]
    fn cost_of_memory_taken_back_does_not_reduce_other_costs() {
        let recording = recordings::find("redis").expect("a bundled recording");
        let source = Source::shipped(recording).expect("a valid recording");
        let findings = findings("redis", sizes(Mode::Always));
        let used = spent(&findings, &costs());
        assert!(used * 1.5 < spent(&findings, &taken(&costs())), "redis has huge pages");
        let plain = run(1.2 * used / 1e9, 1);
        let saving = |costs: Costs| {
            let answer = Answer::new(&findings, costs, Some(plain), &source.trace);
            find(&answer.items, "no THP").at_best
        };
        assert_eq!(saving(taken(&costs())), saving(costs()));
    }

    #[test]
    fn faults_never_take_more_than_the_kernel_time_of_the_run() {
        let recording = recordings::find("python").expect("a bundled recording");
        let source = Source::shipped(recording).expect("a valid recording");
        let findings = findings("python", sizes(Mode::Madvise));
        let warm = costs().with_warm_frames(findings.discards.warm_share());
        let all = spent(&findings, &warm) / 1e9;
        // The division of a short run's time is unreliable.
        let short = Run { processor: all / 2.0, ..run(0.0, 1) };
        let answer = Answer::new(&findings, costs(), Some(short), &source.trace);
        assert!((spent(&findings, &answer.bounded()) / 1e9 - all / 2.0).abs() < 1e-6);
        for system in [all / 3.0, 2.0 * all] {
            let plain = run(system, 1);
            let limit = fault_limit([&plain]);
            let answer = Answer::new(&findings, costs(), Some(plain), &source.trace);
            let took = spent(&findings, &answer.bounded()) / 1e9;
            assert!((took - all.min(limit)).abs() < 1e-6, "{took} of {limit}");
            let most = answer.items.iter().map(|item| item.saving).fold(0.0, f64::max);
            assert!(most > 0.0 && most <= limit * 1e9 + 1.0, "{most} of {limit}");
        }
        // Further runs reduce the uncertainty of the kernel's part.
        let answer = Answer::new(&findings, costs(), Some(run(2.0 * all, 1)), &source.trace);
        let largest = |items: &[Item]| items.iter().map(|item| item.saving).fold(0.0, f64::max);
        let runs = vec![run(all / 4.0, 1); 9];
        let beside = answer.predict_beside(&costs(), &runs);
        assert!(largest(&beside) < largest(&answer.items) / 2.0);
        assert_eq!(largest(&answer.predict_beside(&costs(), &[])), largest(&answer.items));
        // A recording alone: its threads cannot take more than their total time.
        let dear = costs().scaled(1e4);
        let answer = Answer::new(&findings, dear, None, &source.trace);
        assert!(answer.share(spent(&findings, &answer.bounded())) <= 1.0 + 1e-9);
        assert!(answer.items.iter().all(|item| answer.share(item.saving) <= 1.0 + 1e-9));
    }
}
