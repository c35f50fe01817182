//! The subjects of a comparison: the workloads, sized for short runs, and the recordings.

use crate::columns::{Column, Report, Topic};
use crate::context::Context;
use crate::error::Error;
use crate::number::{plural, processes};
use crate::replay::prefault::effects;
use crate::replay::{self, Source};
use crate::run;
use crate::sample::Sample;
use crate::settings::{Regime, Settings};
use crate::stop;
use crate::turns::Turns;
use faultless::{AnonVmaCheck, Locking};
use faultless_native::Native;
use faultless_trace::recordings::Recording;
use faultless_workload::{Linux, Mode, System, Workload};
use std::sync::Arc;

/// A workload of the comparison. `{threads}` is added to its parameters, and for a comparison of
/// policies the time of a run.
#[derive(Debug)]
pub struct Entry {
    /// The name in results: the workload, and a distinction from other entries with the same
    /// workload.
    pub name: &'static str,
    topic: Topic,
    /// The name used by `stat` and `--only`.
    workload: &'static str,
    params: &'static [&'static str],
    /// Compare the settings of `anon_vma_check` too.
    checks: bool,
}

const fn entry(name: &'static str, params: &'static [&'static str]) -> Entry {
    Entry { name, topic: Topic::Locking, workload: name, params, checks: false }
}

/// Creates a workload that runs to its end. It touches at most the pages that the pool of zeroed
/// frames can serve, and no page twice, so that pre-zeroed frames are zeroed before the run and not
/// during the run.
const fn once(name: &'static str, params: &'static [&'static str]) -> Entry {
    Entry { topic: Topic::Prefault, ..entry(name, params) }
}

/// The workloads. Their passes are short compared with a run.
pub static ENTRIES: [Entry; 25] = [
    entry("pft", &["size=32M"]),
    entry("page_fault1", &["size=8M"]),
    entry("page_fault2", &["size=8M"]),
    entry("page_fault3", &["size=8M"]),
    entry("page_fault_read", &["size=64M"]),
    entry("page_fault1_churn", &["size=32M"]),
    Entry {
        name: "page_fault1_churn access=read",
        ..entry("page_fault1_churn", &["size=64M", "access=read"])
    },
    entry("discard", &["size=4M"]),
    entry("vma_mmap", &["chunks=256"]),
    entry("vma_mmap_touch", &["chunks=256"]),
    Entry {
        name: "vma_mmap_touch order=shuffled",
        ..entry("vma_mmap_touch", &["chunks=256", "order=shuffled"])
    },
    entry("vma_fault", &["chunks=256"]),
    entry("vma_unmap", &["chunks=256"]),
    Entry {
        name: "vma_unmap order=shuffled",
        ..entry("vma_unmap", &["chunks=256", "order=shuffled"])
    },
    entry("vma_unmap_untouched", &["chunks=256"]),
    Entry { checks: true, ..entry("small_allocs", &["size=10M"]) },
    entry("ebizzy", &["touch=yes"]),
    entry("forks", &[]),
    entry("brk1", &[]),
    entry("mmap1", &[]),
    once("pft", &["size=128M"]),
    once("page_fault1", &["size=4M", "passes=8"]),
    once("page_fault_read", &["size=128M"]),
    once("small_allocs", &["size=10M"]),
    once("ebizzy", &["touch=yes", "records=60"]),
];

/// A subject that runs under several configurations.
#[derive(Debug)]
pub struct Subject {
    /// The difference between the configurations.
    pub topic: Topic,
    what: What,
}

#[derive(Debug)]
enum What {
    Workload(&'static Entry, Workload),
    Recording(Recorded),
}

/// A recording to compare.
#[derive(Clone, Debug)]
pub enum Recorded {
    /// Read at the start of its runs.
    Shipped(&'static Recording),
    /// Read in advance, because the file may be a pipe, and errors should be reported at once.
    File(Arc<Source>),
}

impl Recorded {
    fn name(&self) -> &str {
        match self {
            Self::Shipped(recording) => recording.name,
            Self::File(source) => &source.name,
        }
    }

    fn source(&self) -> Result<Arc<Source>, Error> {
        match self {
            Self::Shipped(recording) => Source::shipped(recording).map(Arc::new),
            Self::File(source) => Ok(Arc::clone(source)),
        }
    }
}

/// The configurations to compare.
#[derive(Clone, Debug)]
pub struct Choice {
    /// Under [`Topic::Locking`]; prefault off.
    pub policies: Vec<Locking>,
    /// Under [`Topic::Prefault`]; the first is [`Regime::OFF`].
    pub regimes: Vec<Regime>,
    /// The other knobs.
    pub settings: Settings,
}

/// A subject ready to run.
#[derive(Debug)]
pub enum Ready<'n> {
    /// With the machine of all workloads.
    Workload(&'n Native, Workload),
    /// With a machine, or `None` if each run has a new machine, because a machine keeps the stream
    /// history of threads.
    Recording(Box<(Arc<Source>, Option<Native>)>),
}

/// The size of a comparison.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// Threads of each workload.
    pub threads: usize,
    /// Seconds of a workload's run.
    pub seconds: f64,
    /// Repetitions of a workload's run.
    pub rounds: usize,
    /// Repetitions of a replay.
    pub replays: Turns,
    /// The number of simulated CPUs.
    pub cpus: usize,
}

impl Entry {
    /// Returns whether the workload runs under every locking policy.
    pub fn compares_policies(&self) -> bool {
        self.topic == Topic::Locking
    }

    /// Returns the workload, and its parameters.
    pub const fn given(&self) -> (&'static str, &'static [&'static str]) {
        (self.workload, self.params)
    }

    /// Returns whether the user may call the entry by `name`.
    pub fn is_called(&self, name: &str) -> bool {
        name == self.workload || name == self.name
    }

    fn workload(&self, scale: &Scale) -> Result<Workload, Error> {
        let limit = (self.topic == Topic::Locking).then(|| format!("seconds={}", scale.seconds));
        let common = std::iter::once(format!("threads={}", scale.threads)).chain(limit);
        let params = self.params.iter().map(|param| (*param).to_owned()).chain(common);
        Workload::parse(self.workload, params).map_err(Error::Sizes)
    }
}

/// Returns the subjects: the workloads with these names, and `recordings`.
///
/// # Errors
/// The parameters of a workload do not fit the scale.
pub fn subjects(
    workloads: &[&str],
    recordings: &[Recorded],
    scale: &Scale,
) -> Result<Vec<Subject>, Error> {
    let wanted = |entry: &&Entry| workloads.iter().any(|it| entry.is_called(it));
    let mut subjects = Vec::new();
    for topic in [Topic::Locking, Topic::Prefault] {
        for entry in ENTRIES.iter().filter(|entry| entry.topic == topic).filter(wanted) {
            subjects.push(Subject { topic, what: What::Workload(entry, entry.workload(scale)?) });
        }
        let recordings = recordings.iter().cloned().map(What::Recording);
        subjects.extend(recordings.map(|what| Subject { topic, what }));
    }
    Ok(subjects)
}

impl Subject {
    /// Returns the name for progress messages.
    pub fn name(&self) -> String {
        match &self.what {
            What::Workload(entry, _) => entry.name.to_owned(),
            What::Recording(recording) => format!("replay:{}", recording.name()),
        }
    }

    /// Returns whether the subject is a recording.
    pub fn is_recording(&self) -> bool {
        matches!(self.what, What::Recording(_))
    }

    /// Returns the recording, or `None` for a workload.
    ///
    /// # Errors
    /// The recording is damaged.
    pub fn source(&self) -> Option<Result<Arc<Source>, Error>> {
        match &self.what {
            What::Workload(..) => None,
            What::Recording(recording) => Some(recording.source()),
        }
    }

    /// Returns the name of the workload, or `None` for a recording.
    pub fn workload_name(&self) -> Option<&'static str> {
        match &self.what {
            What::Workload(entry, _) => Some(entry.workload),
            What::Recording(_) => None,
        }
    }

    /// Returns the repetitions of each configuration.
    pub fn turns(&self, scale: &Scale) -> Turns {
        match (&self.what, self.topic) {
            (What::Workload(..), _) => Turns::exactly(scale.rounds),
            (What::Recording(_), Topic::Locking) => scale.replays,
            // Only the counts of these replays matter.
            (What::Recording(_), Topic::Prefault) => Turns::exactly(scale.replays.most.min(3)),
        }
    }

    /// Returns the number of configurations.
    pub fn width(&self, choice: &Choice) -> usize {
        match (&self.what, self.topic) {
            (_, Topic::Prefault) => choice.regimes.len(),
            (What::Workload(entry, _), _) => {
                configurations(entry.checks, &choice.policies).len() + 1
            }
            (What::Recording(_), _) => choice.policies.len(),
        }
    }

    /// Returns the report without samples, and the subject ready to run. `native` is for the
    /// workloads; a recording gets a machine of its own size. Returns `None` if the user
    /// interrupted the command.
    ///
    /// # Errors
    /// The recording is damaged, the host has too little memory, or a workload has no machine.
    pub fn prepare<'n>(
        self,
        native: Option<&'n Native>,
        choice: &Choice,
    ) -> Result<Option<(Report, Ready<'n>)>, Error> {
        let topic = self.topic;
        Ok(Some(match self.what {
            What::Workload(entry, workload) => {
                let native = native.ok_or_else(|| Error::run(entry.name, "it has no machine"))?;
                let report = workload_report(entry, &workload, choice);
                (report, Ready::Workload(native, workload))
            }
            What::Recording(recording) => {
                let source = recording.source()?;
                let title = format!(
                    "replay:{} - a recording of the program {}\n  {} in {}",
                    source.name,
                    source.trace.header.program,
                    plural(source.trace.threads.len() as u64, "thread"),
                    processes(source.trace.processes.len()),
                );
                let named = match topic {
                    Topic::Locking => locking_settings(false, choice),
                    Topic::Prefault => regime_settings(choice),
                };
                let column = |(name, settings): (String, Settings)| {
                    Column::new(name, source.context(&settings), Some(settings))
                };
                let mut columns: Vec<_> = named.into_iter().map(column).collect();
                if let (Topic::Prefault, [_off, regimes @ ..]) = (topic, &*choice.regimes) {
                    let Some(effects) = effects(&source, &choice.settings, regimes)? else {
                        return Ok(None);
                    };
                    for (column, effect) in columns.iter_mut().skip(1).zip(effects) {
                        column.effect = Some(effect);
                    }
                }
                let report = Report { title, unit: "operations", topic, columns };
                let machine = match topic {
                    Topic::Locking => Some(run::machine(source.memory(), source.cpus())?),
                    Topic::Prefault => None,
                };
                (report, Ready::Recording(Box::new((source, machine))))
            }
        }))
    }
}

/// Returns the report of a workload: its description and its configurations.
fn workload_report(entry: &Entry, workload: &Workload, choice: &Choice) -> Report {
    let info = workload.info();
    let threads = workload.crew().workers;
    let context = |machine: String, settings: Option<&Settings>| Context {
        workload: entry.name.to_owned(),
        ..Context::of(workload, machine, settings)
    };
    let named = match entry.topic {
        Topic::Locking => locking_settings(entry.checks, choice),
        Topic::Prefault => regime_settings(choice),
    };
    let column = |(name, settings): (String, Settings)| {
        let context = context("native".into(), Some(&settings));
        Column::new(name, context, Some(settings))
    };
    let mut columns: Vec<_> = named.into_iter().map(column).collect();
    if entry.topic == Topic::Locking {
        let linux = Linux::new().machine();
        columns.push(Column::new(linux.clone(), context(linux, None), None));
    }
    let params = if entry.params.is_empty() { "defaults".into() } else { entry.params.join(" ") };
    let title = format!(
        "{} - {}\n  {}, {params}",
        entry.name,
        info.summary,
        match workload.crew().mode {
            Mode::Threads => plural(threads as u64, "thread"),
            Mode::Processes => processes(threads),
        },
    );
    Report { title, unit: info.unit, topic: entry.topic, columns }
}

/// Returns the configurations that differ in locking, with prefault off.
fn locking_settings(checks: bool, choice: &Choice) -> Vec<(String, Settings)> {
    let alone = choice.settings.with_regime(Regime::OFF);
    let settings = |(name, locking, check): (String, Locking, Option<AnonVmaCheck>)| {
        let settings = alone.with_locking(locking);
        (name, check.map_or(settings.clone(), |check| settings.with_check(check)))
    };
    configurations(checks, &choice.policies).into_iter().map(settings).collect()
}

/// Returns the configurations that differ in prefault.
fn regime_settings(choice: &Choice) -> Vec<(String, Settings)> {
    let settings = |regime: &Regime| (regime.name(), choice.settings.with_regime(*regime));
    choice.regimes.iter().map(settings).collect()
}

/// Returns the name, policy and check of each configuration that differs in locking, and in the
/// check if `checks` are compared too.
fn configurations(
    checks: bool,
    policies: &[Locking],
) -> Vec<(String, Locking, Option<AnonVmaCheck>)> {
    let mut all = Vec::new();
    for &locking in policies {
        if checks && locking != Locking::MmapLock {
            for check in [AnonVmaCheck::Early, AnonVmaCheck::Late] {
                let name = format!("{}, {}", locking.name(), check.name());
                all.push((name, locking, Some(check)));
            }
        } else {
            all.push((locking.name().to_owned(), locking, None));
        }
    }
    all
}

impl Ready<'_> {
    /// Runs once under the configuration of `column`; `None` if the user interrupted the run.
    ///
    /// # Errors
    /// The run failed.
    pub fn sample(&self, column: &Column) -> Result<Option<Sample>, Error> {
        match (self, column.settings()) {
            (Self::Workload(native, workload), Some(settings)) => {
                Ok(Some(Sample::of(&run::on_native(native, settings, workload)?)))
            }
            (Self::Workload(_, workload), None) => match run::on_linux(workload) {
                Ok(outcome) => Ok(Some(Sample::of(&outcome))),
                // Ctrl-C reaches the processes of the workload as well.
                Err(_) if stop::requested() => Ok(None),
                Err(error) => Err(error),
            },
            (Self::Recording(ready), settings) => {
                let (source, native) = &**ready;
                let Some(settings) = settings else { return Ok(None) };
                let replayed = match native {
                    Some(native) => replay::once(native, source, settings)?,
                    None => {
                        let native = run::machine(source.memory(), source.cpus())?;
                        replay::once(&native, source, settings)?
                    }
                };
                Ok(replayed.complete.then_some(replayed.sample))
            }
        }
    }
}
