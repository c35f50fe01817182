//! Pairs of runs with and without each advice, and predictions beside measurements.
//!
//! Costs are measured between the runs, so that predictions are made under the load of the runs.
//! The comparison uses processor time, which other programs affect less than elapsed time. With a
//! cold page cache it uses elapsed time, because the processor does other work while a disk reads.
//! The two runs of a pair follow each other directly, in random order, because load changes within
//! seconds.
//! If the host takes free memory back, memory is used and freed before each run, so that all runs
//! start with the same memory state. With a cold page cache this includes the memory of the files:
//! the first load from a page that the disk wrote to memory taken back takes several microseconds.
//! The effect of memory taken back is therefore only predicted.
//!
//! A run with another exit status than the plain run has done other work. Its pair is excluded from
//! the statistics.

use super::answer::Answer;
use super::cold::{ColdSetting, ColdStart, DataFiles};
use super::costs::Meter;
use super::file::Advice;
use super::interval::Saving;
use super::item::{Apply, Item, Open};
use super::once::{Run, once};
use crate::context::{Basis, Context};
use crate::error::Error;
use crate::figures::{Figures, Number};
use crate::host;
use crate::observer::Observer;
use crate::rates::median;
use std::ffi::OsString;
use std::process::ExitStatus;

/// The bytes of files whose memory is used before each run, at most.
const MOST_OF_FILES: u64 = 1 << 30;

/// A setting to try, with or without a prediction.
#[derive(Clone, Copy, Debug)]
pub struct Tried<'a> {
    /// The name of the advice.
    pub name: &'a str,
    /// The way to apply the advice.
    pub apply: &'a Apply,
    /// The prediction.
    pub item: Option<&'a Item>,
    /// The predicted saving of elapsed time with a cold page cache, in seconds.
    pub elapsed: Option<Saving>,
}

impl<'a> Tried<'a> {
    fn of_item(item: &'a Item) -> Self {
        Self { name: &item.name, apply: &item.apply, item: Some(item), elapsed: None }
    }

    fn of_open(open: &'a Open) -> Self {
        Self { name: &open.name, apply: &open.apply, item: None, elapsed: None }
    }

    fn of_cold(setting: &'a ColdSetting) -> Self {
        Self { elapsed: Some(setting.saving.scaled(1e-9)), ..Self::of_open(&setting.open) }
    }
}

/// Returns the advice of `answer` to try, and the items that require a change of system-wide
/// settings, which `consent` permits.
pub fn candidates<'a>(answer: &'a Answer<'_>, consent: bool) -> (Vec<Tried<'a>>, Vec<&'a Item>) {
    let claimed = answer
        .shown()
        .into_iter()
        .filter(|item| answer.worth(item.saving) || answer.worth(item.at_best));
    let (able, mut left): (Vec<&Item>, Vec<&Item>) = claimed.partition(|item| match item.apply {
        Apply::Nothing => false,
        Apply::Sysfs(..) => consent,
        _ => true,
    });
    left.retain(|item| matches!(item.apply, Apply::Sysfs(..)));
    let open = answer.open.iter().filter(|open| match open.apply {
        Apply::Nothing => false,
        Apply::Sysfs(..) => consent,
        _ => true,
    });
    let open = open.map(Tried::of_open);
    (able.into_iter().map(Tried::of_item).chain(open).collect(), left)
}

/// Returns the settings to try with a cold page cache, and those that require a change of
/// system-wide settings, which `consent` permits.
pub fn cold_candidates(start: &ColdStart, consent: bool) -> (Vec<Tried<'_>>, Vec<&Open>) {
    let of_system = |setting: &&ColdSetting| matches!(setting.open.apply, Apply::Sysfs(..));
    let able = start.settings.iter().filter(|it| it.open.apply != Apply::Nothing);
    let (system, process): (Vec<_>, Vec<_>) = able.partition(of_system);
    let left = system.iter().filter(|_| !consent).map(|setting| &setting.open).collect();
    let system = system.into_iter().filter(|_| consent);
    (process.into_iter().chain(system).map(Tried::of_cold).collect(), left)
}

/// The runs of one advice.
#[derive(Debug)]
pub struct Trial<'a> {
    /// The advice.
    pub tried: Tried<'a>,
    /// The runs without the advice.
    pub before: Vec<Run>,
    /// The runs with the advice, in the same order.
    pub with: Vec<Run>,
    /// The number of runs with an unexpected exit status. Their pairs are excluded from the runs
    /// above.
    pub failed: u64,
}

impl<'a> Trial<'a> {
    fn new(tried: Tried<'a>) -> Self {
        Self { tried, before: Vec::new(), with: Vec::new(), failed: 0 }
    }

    /// Adds a pair of runs, unless the status of a run is not `expected`.
    fn push(&mut self, before: Run, with: Run, expected: ExitStatus) {
        let failed = [before, with].iter().filter(|run| run.status != expected).count();
        self.failed += failed as u64;
        if failed == 0 {
            self.before.push(before);
            self.with.push(with);
        }
    }
}

/// Runs `command` in `rounds` pairs for each of `tried`, with a measurement of costs by `meter`
/// before each round. The files `cold` are dropped from the page cache before each run. `expected`
/// is the exit status of the plain run. After a request to stop or a failure the result has the
/// complete pairs. Also returns the failure: the program cannot be started, a setting cannot be
/// changed, a file cannot be read, or the host has too little memory.
pub fn run<'a>(
    (command, expected): (&[OsString], ExitStatus),
    tried: &[Tried<'a>],
    rounds: u16,
    meter: (&mut Meter, u64),
    cold: Option<&DataFiles>,
    observer: &dyn Observer,
) -> (Vec<Trial<'a>>, Option<Error>) {
    let mut trials: Vec<_> = tried.iter().copied().map(Trial::new).collect();
    let ended = add_pairs((command, expected), &mut trials, rounds, meter, cold, observer);
    (trials, ended.err())
}

/// Adds the pairs to `trials`, until the user requests a stop.
fn add_pairs(
    (command, expected): (&[OsString], ExitStatus),
    trials: &mut [Trial<'_>],
    rounds: u16,
    (meter, memory): (&mut Meter, u64),
    cold: Option<&DataFiles>,
    observer: &dyn Observer,
) -> Result<(), Error> {
    // A random order prevents that a setting always follows the same other setting.
    let mut random = fastrand::Rng::with_seed(1);
    let memory = memory + cold.map_or(0, |files| of_files(memory, files));
    let mut order: Vec<usize> = (0..trials.len()).collect();
    for round in 1..=rounds {
        meter.round(observer)?;
        random.shuffle(&mut order);
        for &at in &order {
            let trial = &mut trials[at];
            let first = random.usize(..2);
            let mut pair = [None, None];
            for with in [first, 1 - first] {
                let (name, apply) = match with {
                    0 => ("unchanged", &Apply::Nothing),
                    _ => (trial.tried.name, trial.tried.apply),
                };
                observer.begin(&format!("run {round} of {rounds}, {name}"));
                meter.prepare(memory, observer)?;
                cold.map_or(Ok(()), DataFiles::drop_pages)?;
                // An incomplete pair is discarded.
                let Some(run) = once(command, apply, observer)? else { return Ok(()) };
                pair[with] = Some(run);
                observer.advance(1);
            }
            if let [Some(before), Some(with)] = pair {
                trial.push(before, with, expected);
            }
        }
    }
    Ok(())
}

/// Returns the bytes of page cache to use before each run, beside `memory`; 0 if the host lacks
/// this memory.
fn of_files(memory: u64, files: &DataFiles) -> u64 {
    let bytes = files.bytes().min(MOST_OF_FILES);
    // `Meter::prepare` uses a quarter more.
    let all = (memory + bytes) / 4 * 5;
    if host::afford("the page cache of the files", all).is_ok() { bytes } else { 0 }
}

/// The measured effect of a setting, beside its prediction.
#[derive(Clone, Debug)]
pub struct Compared<'a> {
    /// The name of the advice.
    pub name: &'a str,
    /// The way to apply the advice.
    pub apply: &'a Apply,
    /// The predicted saving, in seconds; `None` without a prediction.
    pub predicted: Option<f64>,
    /// The measured saving, in seconds of processor time; `None` if no pair succeeded.
    pub saving: Option<Saving>,
    /// The predicted saving of elapsed time with a cold page cache, in seconds.
    pub predicted_elapsed: Option<Saving>,
    /// The measured saving of elapsed time, in seconds; `None` if no pair succeeded.
    pub elapsed: Option<Saving>,
    /// The saving of the median number of faults; negative for more faults.
    pub faults: f64,
    /// Whether the number of faults changed as predicted.
    pub moved: bool,
    /// Seconds of processor time of each run, without the advice and with the advice.
    pub times: [Vec<f64>; 2],
    /// The kernel's part of `times`.
    pub kernel: [Vec<f64>; 2],
    /// Seconds of elapsed time of the same runs.
    pub walls: [Vec<f64>; 2],
    /// Bytes that the same runs read from disks.
    pub reads: [Vec<f64>; 2],
    /// The number of runs with an unexpected exit status. Their pairs are excluded.
    pub failed: u64,
}

impl Trial<'_> {
    /// Returns the runs without the advice, of complete pairs.
    pub fn unchanged(&self) -> &[Run] {
        &self.before
    }

    /// Returns all runs.
    pub fn runs(&self) -> impl Iterator<Item = &Run> {
        self.before.iter().chain(&self.with)
    }

    /// Returns the effect of the advice beside its prediction in `predicted`, which uses the costs
    /// measured between the runs. Returns `None` without a pair, if no run failed.
    pub fn compared(&self, predicted: &[Item]) -> Option<Compared<'_>> {
        let each = |of: fn(&Run) -> f64| {
            [&self.before, &self.with].map(|runs| runs.iter().map(of).collect::<Vec<_>>())
        };
        let (times, kernel) = (each(|run| run.processor), each(|run| run.system));
        let (walls, reads) = (each(|run| run.wall), each(|run| run.read as f64));
        let [saving, elapsed] = [&times, &walls].map(|[before, with]| Saving::of(before, with));
        if saving.is_none() && self.failed == 0 {
            return None;
        }
        let faults = self.saving(|run| run.faults as f64);
        let item = self.tried.item;
        let now = item.map(|before| {
            let now = predicted.iter().find(|now| now.name == before.name).unwrap_or(before);
            now.at_best / 1e9
        });
        // The count of `getrusage` includes populated pages, so it does not show their effect.
        let counted = !self.runs().any(|run| run.counts_populated)
            || !matches!(self.tried.apply, Apply::Populate(_) | Apply::PopulateFiles(_));
        Some(Compared {
            name: self.tried.name,
            apply: self.tried.apply,
            predicted: now,
            saving,
            predicted_elapsed: self.tried.elapsed,
            elapsed,
            faults,
            moved: !counted || item.is_none_or(|item| item.moved(faults)),
            times,
            kernel,
            walls,
            reads,
            failed: self.failed,
        })
    }

    /// Returns the saving of the median.
    fn saving(&self, of: fn(&Run) -> f64) -> f64 {
        let middle = |runs: &[Run]| median(&runs.iter().map(of).collect::<Vec<_>>());
        middle(&self.before).unwrap_or(0.0) - middle(&self.with).unwrap_or(0.0)
    }
}

impl Compared<'_> {
    /// Returns whether the saving of processor time is beyond the noise, and the number of faults
    /// confirms it.
    pub fn is_sure(&self) -> bool {
        self.saving.is_some_and(|saving| saving.is_sure()) && self.moved
    }

    /// Returns whether the saving of elapsed time is beyond the noise.
    pub fn is_elapsed_sure(&self) -> bool {
        self.elapsed.is_some_and(|saving| saving.is_sure())
    }

    /// Returns the advice if its measured saving is confirmed: of elapsed time with a cold page
    /// cache, else of processor time.
    pub fn confirmed(&self) -> Option<Advice> {
        let (sure, saving, predicted) = match self.predicted_elapsed {
            Some(predicted) => (self.is_elapsed_sure(), self.elapsed, Some(predicted.middle)),
            None => (self.is_sure(), self.saving, self.predicted),
        };
        let measured = saving.map(|saving| saving.middle);
        let confirmed = sure && measured.is_some_and(|seconds| seconds > 0.0);
        confirmed.then(|| Advice {
            name: self.name.to_owned(),
            predicted,
            measured,
            apply: self.apply.clone(),
        })
    }

    /// Passes the figures of the advice to `figures`.
    ///
    /// # Errors
    /// A figure cannot be written.
    pub fn figures(&self, figures: &mut dyn Figures, context: &Context) -> Result<(), Error> {
        let context = Context { setting: self.name.to_owned(), ..context.clone() };
        let prediction = context.with_basis(Basis::Predicted);
        if let Some(predicted) = self.predicted {
            figures.figure(&prediction, "predicted_seconds", "s", Number::Real(predicted))?;
        }
        if let Some(Saving { middle, interval }) = self.predicted_elapsed {
            let metric = "predicted_elapsed_saving_seconds";
            figures.figure(&prediction, metric, "s", Number::Real(middle))?;
            let metrics = ["predicted_elapsed_from_seconds", "predicted_elapsed_to_seconds"];
            for (metric, end) in metrics.into_iter().zip(interval.into_iter().flatten()) {
                figures.figure(&prediction, metric, "s", Number::Real(end))?;
            }
        }
        let failed = Number::Whole(self.failed);
        figures.figure(&context, "failed_runs", "count", failed)?;
        let (Some(saving), Some(elapsed)) = (self.saving, self.elapsed) else { return Ok(()) };
        let mut seconds =
            |metric: &str, value: f64| figures.figure(&context, metric, "s", Number::Real(value));
        let [before, with] = &self.times;
        for (metric, value) in [
            ("measured_seconds", saving.middle),
            ("processor_seconds", median(with).unwrap_or(0.0)),
            ("processor_seconds_before", median(before).unwrap_or(0.0)),
            ("elapsed_saving_seconds", elapsed.middle),
        ] {
            seconds(metric, value)?;
        }
        if let Some([low, high]) = saving.interval {
            seconds("interval_from_seconds", low)?;
            seconds("interval_to_seconds", high)?;
        }
        if let Some([low, high]) = elapsed.interval {
            seconds("elapsed_interval_from_seconds", low)?;
            seconds("elapsed_interval_to_seconds", high)?;
        }
        let ([kernel_before, kernel], [wall_before, wall]) = (&self.kernel, &self.walls);
        for (metric, runs) in [
            ("run_seconds", with),
            ("run_seconds_before", before),
            ("run_kernel_seconds", kernel),
            ("run_kernel_seconds_before", kernel_before),
            ("run_elapsed_seconds", wall),
            ("run_elapsed_seconds_before", wall_before),
        ] {
            runs.iter().try_for_each(|value| seconds(metric, *value))?;
        }
        // A cold page cache shows in the bytes that a run reads.
        let reads = self.reads.iter().filter(|_| self.predicted_elapsed.is_some());
        for (metric, runs) in ["run_read_bytes_before", "run_read_bytes"].into_iter().zip(reads) {
            for bytes in runs {
                figures.figure(&context, metric, "bytes", Number::Whole(*bytes as u64))?;
            }
        }
        // The key names a change, and so the sign is that of the additional faults.
        figures.figure(&context, "faults_change", "count", Number::Real(0.0 - self.faults))
    }
}

#[cfg(test)]
mod tests {
    use super::super::once::tests::run;
    use super::*;
    use crate::figures::Kept;
    use std::os::unix::process::ExitStatusExt;

    fn trial(name: &'static str) -> Trial<'static> {
        Trial::new(Tried { name, apply: &Apply::Nothing, item: None, elapsed: None })
    }

    /// A program that fails with the advice takes no time, so the advice would seem to save all of
    /// the time.
    #[test]
    fn pairs_with_a_failed_run_are_not_measured() {
        let (good, bad) = (ExitStatus::default(), ExitStatus::from_raw(256));
        let of = |status, processor| Run { processor, status, ..run(0.0, 0) };
        let mut trial = trial("fails");
        for _ in 0..7 {
            trial.push(of(good, 1.0), of(bad, 0.001), good);
        }
        let compared = trial.compared(&[]).expect("failed runs are reported");
        assert_eq!((compared.saving, compared.failed), (None, 7));
        assert!(!compared.is_sure());
        let mut kept = Kept::default();
        compared.figures(&mut kept, &Context::new("native", "w", 1)).expect("no output fails");
        assert_eq!(kept.0, [("failed_runs".to_owned(), "count".to_owned(), Number::Whole(7))]);
        // A status other than 0 is expected if the plain run had this status.
        for saved in 1..=7 {
            trial.push(of(bad, 1.0), of(bad, 0.9 - 0.001 * f64::from(saved)), bad);
        }
        let compared = trial.compared(&[]).expect("pairs");
        assert!(compared.is_sure() && compared.failed == 7, "{compared:?}");
        assert_eq!(compared.times[0].len(), 7);
        // A saving is confirmed, a loss is not.
        let confirmed = compared.confirmed().expect("a saving");
        assert_eq!((&*confirmed.name, confirmed.predicted), ("fails", None));
        assert!(confirmed.measured.is_some_and(|seconds| (seconds - 0.1).abs() < 0.01));
        let loss = compared.saving.map(|Saving { middle, interval }| Saving {
            middle: -middle,
            interval: interval.map(|[low, high]| [-high, -low]),
        });
        let loss = Compared { saving: loss, ..compared };
        assert!(loss.is_sure() && loss.confirmed().is_none());
    }

    /// With a cold page cache the elapsed time decides, and its figures have all runs.
    #[test]
    fn elapsed_time_of_cold_runs_has_an_interval() {
        let good = ExitStatus::default();
        let of = |wall: f64| Run { wall, processor: 1.0 / wall, read: 4096, ..run(0.0, 0) };
        let predicted = Saving { middle: 0.25, interval: Some([0.2, 0.3]) };
        let measured = |elapsed, saved: fn(i32) -> f64| {
            let mut trial = Trial { tried: Tried { elapsed, ..trial("cold").tried }, ..trial("") };
            for pair in 0..7 {
                trial.push(of(2.0), of(2.0 - saved(pair)), good);
            }
            let compared = trial.compared(&[]).expect("pairs");
            let mut kept = Kept::default();
            compared.figures(&mut kept, &Context::new("native", "w", 1)).expect("no output fails");
            (compared.is_elapsed_sure(), compared.confirmed(), kept.0)
        };
        let (sure, confirmed, figures) =
            measured(Some(predicted), |pair| 0.2 + f64::from(pair) / 1e3);
        let confirmed = confirmed.expect("each pair is faster");
        assert!(sure && confirmed.measured.is_some_and(|seconds| (seconds - 0.203).abs() < 1e-9));
        assert_eq!(confirmed.predicted, Some(0.25));
        let count = |name: &str| figures.iter().filter(|(metric, ..)| metric == name).count();
        for (metric, times) in [
            ("elapsed_interval_from_seconds", 1),
            ("predicted_elapsed_to_seconds", 1),
            ("run_elapsed_seconds", 7),
            ("run_elapsed_seconds_before", 7),
            ("run_read_bytes", 7),
        ] {
            assert_eq!(count(metric), times, "{metric}");
        }
        // Without a cold page cache, the processor time decides, which is longer here.
        let (_, confirmed, figures) = measured(None, |pair| 0.2 + f64::from(pair) / 1e3);
        assert!(confirmed.is_none() && figures.iter().all(|it| it.0 != "run_read_bytes"));
        // Every second pair is slower.
        let (sure, confirmed, _) =
            measured(Some(predicted), |pair| if pair % 2 == 0 { 0.2 } else { -0.1 });
        assert!(!sure && confirmed.is_none());
    }

    /// A positive number is a saving in every column; the key `faults_change` names a change.
    #[test]
    fn savings_are_positive() {
        let good = ExitStatus::default();
        let of = |wall, faults| Run { wall, status: good, ..run(0.0, faults) };
        let mut trial = trial("saves");
        (0..3).for_each(|_| trial.push(of(2.0, 500), of(1.5, 100), good));
        let compared = trial.compared(&[]).expect("pairs");
        let elapsed = compared.elapsed.map(|saving| saving.middle);
        assert_eq!((elapsed, compared.faults), (Some(0.5), 400.0));
        let mut kept = Kept::default();
        compared.figures(&mut kept, &Context::new("native", "w", 1)).expect("no output fails");
        let of = |name: &str| kept.0.iter().find(|(metric, ..)| metric == name).map(|one| &one.2);
        assert_eq!(of("elapsed_saving_seconds"), Some(&Number::Real(0.5)));
        assert_eq!(of("faults_change"), Some(&Number::Real(-400.0)));
    }

    #[test]
    fn memory_of_cold_files_is_used_before_each_run() {
        let dir = tempfile::tempdir().expect("a directory");
        let files = |len: u64| {
            let path = dir.path().join("data");
            std::fs::File::create(&path).and_then(|file| file.set_len(len)).expect("written");
            let mut files = DataFiles::default();
            files.add_arguments(&["program".into(), path.into_os_string()]);
            files
        };
        assert_eq!(of_files(1 << 20, &files(2 << 20)), 2 << 20);
        // A host can have less than 1 GiB.
        assert!([0, MOST_OF_FILES].contains(&of_files(1 << 20, &files(1 << 40))));
        assert_eq!(of_files(1 << 50, &files(2 << 20)), 0, "no host has this memory");
    }

    #[test]
    fn failure_keeps_the_complete_pairs() {
        let dir = tempfile::tempdir().expect("a directory");
        let count = dir.path().join("count");
        let program = dir.path().join("program");
        std::os::unix::fs::symlink("/bin/sh", &program).expect("a link");
        // The fourth run removes the program.
        let script = "echo >> $1; [ $(wc -l < $1) = 4 ] && rm $0; exit 0";
        let tried = [Tried { name: "nothing", apply: &Apply::Nothing, item: None, elapsed: None }];
        let mut meter = Meter::new(false, false).expect("memory");
        let command = [
            program.clone().into_os_string(),
            "-c".into(),
            script.into(),
            program.into_os_string(),
            count.into_os_string(),
        ];
        let plain = (&command[..], ExitStatus::default());
        let (trials, failure) = super::run(plain, &tried, 5, (&mut meter, 1 << 20), None, &());
        assert!(matches!(failure, Some(Error::Host { .. })), "{failure:?}");
        assert_eq!(trials[0].with.len(), 2);
    }
}
