//! What `compare` compares: the workloads, sized for short runs, and the recordings.

use crate::error::CliError;
use crate::interrupt;
use crate::replay::{self, source::Source};
use crate::report::columns::Column;
use crate::report::json::Context;
use crate::run::{self, Sample};
use crate::settings::Settings;
use faultless::{AnonVmaCheck, Locking};
use faultless_native::Native;
use faultless_trace::recordings::{self, Recording};
use faultless_workload::{Linux, System, Workload};

/// A workload of the comparison: `{threads}` and the time of a run are added to its parameters.
pub struct Entry {
    /// As `--only` names it.
    pub name: &'static str,
    workload: &'static str,
    params: &'static [&'static str],
    /// Compare the settings of `anon_vma_check` too.
    checks: bool,
}

const fn entry(name: &'static str, params: &'static [&'static str]) -> Entry {
    Entry { name, workload: name, params, checks: false }
}

/// The workloads. Sizes are of passes that are short against a run.
pub static ENTRIES: [Entry; 10] = [
    entry("pft", &["size=32M"]),
    entry("page_fault1", &["size=8M"]),
    entry("page_fault_read", &["size=64M"]),
    entry("page_fault1_churn", &["size=32M"]),
    Entry {
        name: "page_fault_read_churn",
        workload: "page_fault1_churn",
        params: &["size=64M", "access=read"],
        checks: false,
    },
    Entry { checks: true, ..entry("small_allocs", &["size=10M"]) },
    entry("ebizzy", &["touch=yes"]),
    entry("forks", &[]),
    entry("brk1", &[]),
    entry("mmap1", &[]),
];

/// Something that runs under several configurations.
pub enum Subject {
    /// A workload.
    Workload(&'static Entry, Workload),
    /// A recording, read when its turn comes.
    Recording(&'static Recording),
}

/// A subject whose turn has come.
pub enum Ready<'n> {
    Workload(&'n Native, Workload),
    Recording(Box<(Source, Native)>),
}

/// The shape of a comparison.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// Threads of each workload.
    pub threads: usize,
    /// Seconds of a workload's run.
    pub seconds: f64,
    /// Repetitions of a workload's run.
    pub rounds: usize,
    /// Repetitions of a replay.
    pub replays: usize,
}

impl Entry {
    fn workload(&self, scale: &Scale) -> Result<Workload, CliError> {
        let common = [format!("threads={}", scale.threads), format!("seconds={}", scale.seconds)];
        let params = self.params.iter().map(|param| (*param).to_owned()).chain(common);
        Workload::parse(self.workload, params).map_err(|error| CliError::Failed(error.to_string()))
    }
}

/// The subjects named by `only`, or all.
pub fn subjects(only: &[String], scale: &Scale) -> Result<Vec<Subject>, CliError> {
    let names = || {
        let entries = ENTRIES.iter().map(|entry| entry.name);
        entries.chain(recordings::all().iter().map(|recording| recording.name))
    };
    // As results name a recording, too.
    let bare = |name: &str| name.strip_prefix("replay:").unwrap_or(name).to_owned();
    let only: Vec<_> = only.iter().map(|name| bare(name)).collect();
    if let Some(unknown) = only.iter().find(|name| !names().any(|known| known == **name)) {
        let known: Vec<_> = names().collect();
        return Err(CliError::Usage(format!(
            "--only {unknown}: no such workload or recording; there are {}",
            known.join(", ")
        )));
    }
    let wanted = |name: &str| only.is_empty() || only.iter().any(|wanted| wanted == name);
    let mut subjects = Vec::new();
    for entry in ENTRIES.iter().filter(|entry| wanted(entry.name)) {
        subjects.push(Subject::Workload(entry, entry.workload(scale)?));
    }
    let recordings = recordings::all().iter().filter(|recording| wanted(recording.name));
    subjects.extend(recordings.map(Subject::Recording));
    Ok(subjects)
}

impl Subject {
    /// As progress names it.
    pub fn name(&self) -> String {
        match self {
            Self::Workload(entry, _) => entry.name.to_owned(),
            Self::Recording(recording) => format!("replay:{}", recording.name),
        }
    }

    /// Runs of each configuration.
    pub fn rounds(&self, scale: &Scale) -> usize {
        match self {
            Self::Workload(..) => scale.rounds,
            Self::Recording(_) => scale.replays,
        }
    }

    /// How many configurations there are under `policies`.
    pub fn width(&self, policies: &[Locking]) -> usize {
        match self {
            Self::Workload(entry, _) => configurations(entry, policies).len() + 1,
            Self::Recording(_) => policies.len(),
        }
    }

    /// What it is, what its operations are, its configurations, and itself ready to run. `native`
    /// is for the workloads; a recording gets a machine of its own size.
    pub fn prepare<'n>(
        self,
        native: &'n Native,
        policies: &[Locking],
        settings: &Settings,
    ) -> Result<(String, &'static str, Vec<Column>, Ready<'n>), CliError> {
        match self {
            Self::Workload(entry, workload) => {
                let info = workload.info();
                let context = |machine: String, setting| Context {
                    machine,
                    workload: entry.name.to_owned(),
                    cpus: workload.crew().workers,
                    setting,
                };
                let mut columns: Vec<_> = configurations(entry, policies)
                    .into_iter()
                    .map(|(name, locking, check)| {
                        let settings = settings.with_locking(locking);
                        let settings = check.map_or(settings.clone(), |c| settings.with_check(c));
                        let context = context("native".into(), settings.label());
                        Column::new(name, context, Some(settings))
                    })
                    .collect();
                let linux = Linux::new().machine();
                columns.push(Column::new(linux.clone(), context(linux, "default".into()), None));
                let threads = workload.crew().workers;
                let title = format!(
                    "{} - {}\n  {threads} {}, {}",
                    entry.name,
                    info.summary,
                    workload.crew().mode.name(),
                    if entry.params.is_empty() {
                        "defaults".into()
                    } else {
                        entry.params.join(" ")
                    },
                );
                Ok((title, info.unit, columns, Ready::Workload(native, workload)))
            }
            Self::Recording(recording) => {
                let source = Source::shipped(recording)?;
                let columns = policies
                    .iter()
                    .map(|locking| {
                        let settings = settings.with_locking(*locking);
                        Column::new(locking.name(), source.context(&settings), Some(settings))
                    })
                    .collect();
                let title = format!(
                    "replay:{} - {}\n  {} threads in {} processes",
                    source.name,
                    source.trace.header.program,
                    source.plan.threads().len(),
                    source.plan.processes().len(),
                );
                let machine = run::machine(source.memory(), source.cpus())?;
                Ok((title, "operations", columns, Ready::Recording(Box::new((source, machine)))))
            }
        }
    }
}

/// Name, policy and check of each configuration of `entry` on the native machine.
fn configurations(
    entry: &Entry,
    policies: &[Locking],
) -> Vec<(String, Locking, Option<AnonVmaCheck>)> {
    let mut all = Vec::new();
    for &locking in policies {
        if entry.checks && locking != Locking::MmapLock {
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
    /// One run under the configuration of `column`; `None` where the user interrupted it.
    pub fn sample(&self, column: &Column) -> Result<Option<Sample>, CliError> {
        match (self, column.settings()) {
            (Self::Workload(native, workload), Some(settings)) => {
                Ok(Some(Sample::of(&run::on_native(native, settings, workload)?)))
            }
            (Self::Workload(_, workload), None) => match run::on_linux(workload) {
                Ok(outcome) => Ok(Some(Sample::of(&outcome))),
                // Ctrl-C reaches the processes of the workload as well.
                Err(_) if interrupt::requested() => Ok(None),
                Err(error) => Err(error),
            },
            (Self::Recording(ready), settings) => {
                let (source, native) = &**ready;
                let Some(settings) = settings else { return Ok(None) };
                let replayed = replay::once(native, source, settings)?;
                Ok(replayed.complete.then_some(replayed.sample))
            }
        }
    }
}
