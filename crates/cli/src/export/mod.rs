//! `--export FORMAT=FILE`: results in the formats of other tools.
//!
//! Formats of profilers need the call stacks of a recording: [`stacks`] has collapsed stacks and
//! the flame graph, [`firefox`] the format of the Firefox Profiler, and [`pprof`] the format of
//! pprof. [`figures`] has the figures of any result, as CSV and OpenMetrics.

mod figures;
mod firefox;
mod pprof;
mod stacks;

use crate::error::CliError;
use crate::output::{self, Replacing};
use clap::ValueEnum;
use faultless_analysis::advise::answer::Answer;
use faultless_analysis::advise::creators::creator;
use faultless_analysis::advise::sites::{StackCost, stack_costs};
use faultless_trace::Trace;
use faultless_trace::event::{Recorded, StackId};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

pub use figures::Kept;

/// A format of another tool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Collapsed stacks: a line for each stack, with the number of its faults
    Collapsed,
    /// Flame graph as SVG, by predicted time
    Flamegraph,
    /// JSON of the Firefox Profiler
    Firefox,
    /// pprof, compressed
    Pprof,
    /// Figures as CSV
    Csv,
    /// Figures as OpenMetrics text, for Prometheus
    Openmetrics,
}

impl Format {
    /// Returns whether the format has the call stacks of a recording.
    const fn of_stacks(self) -> bool {
        !matches!(self, Self::Csv | Self::Openmetrics)
    }
}

/// A format and its file.
#[derive(Clone, Debug)]
pub struct Target {
    format: Format,
    file: PathBuf,
}

/// Parses `FORMAT=FILE`.
fn target(text: &str) -> Result<Target, String> {
    let formats = || {
        let values = Format::value_variants().iter().filter_map(ValueEnum::to_possible_value);
        values.map(|value| value.get_name().to_owned()).collect::<Vec<_>>().join(", ")
    };
    let Some((format, file)) = text.split_once('=') else {
        return Err(format!("want FORMAT=FILE, with one of the formats {}", formats()));
    };
    let Ok(format) = Format::from_str(format, true) else {
        return Err(format!("no format {format}; the formats are {}", formats()));
    };
    if matches!(file, "" | "-") {
        return Err("want a file; /dev/stdout is standard output".into());
    }
    Ok(Target { format, file: file.into() })
}

#[derive(Debug, clap::Args)]
pub struct ExportArgs {
    /// Also write the results to FILE, in the format of another tool: collapsed (stacks),
    /// flamegraph (SVG), firefox (profiler), pprof, csv or openmetrics. Can be repeated
    #[arg(long, value_name = "FORMAT=FILE", value_parser = target)]
    export: Vec<Target>,
}

impl ExportArgs {
    /// Returns whether a format has the call stacks of a recording.
    pub fn needs_stacks(&self) -> bool {
        self.export.iter().any(|target| target.format.of_stacks())
    }

    /// Returns the files, each with its option.
    pub fn files(&self) -> impl Iterator<Item = (&'static str, Option<&Path>)> {
        self.export.iter().map(|target| ("--export", Some(&*target.file)))
    }

    /// Returns an error for the recording `name`, which omits faults, if there is an export.
    pub fn every_fault(&self, name: &str) -> Result<(), CliError> {
        let Some(Target { file, .. }) = self.export.first() else { return Ok(()) };
        let why = format!("{name} omits faults: record a shorter time, by --seconds");
        Err(CliError::Usage(format!("--export for {}: {why}", file.display())))
    }

    /// Returns an error for a format that needs call stacks, for a command without a recording.
    pub fn without_stacks(&self) -> Result<(), CliError> {
        let stacks = self.export.iter().find(|target| target.format.of_stacks());
        let Some(Target { file, .. }) = stacks else { return Ok(()) };
        let why = "this format has the call stacks of a recording; use csv or openmetrics here, \
                   or faultless advise --stacks";
        Err(CliError::Usage(format!("--export for {}: {why}", file.display())))
    }
}

/// The files of an export, which are written when the results are complete.
#[derive(Debug)]
pub struct Export(Vec<(Format, Replacing)>);

impl Export {
    /// Checks that the files can be written, and differ from the `inputs`.
    pub fn open(args: &ExportArgs, inputs: &[&Path]) -> Result<Self, CliError> {
        let open = |Target { format, file }: &Target| {
            output::spare("--export", file, inputs)?;
            Ok((*format, Replacing::new(file)?))
        };
        args.export.iter().map(open).collect::<Result<_, _>>().map(Self)
    }

    /// Returns whether a file has figures.
    pub fn has_figures(&self) -> bool {
        self.0.iter().any(|(format, _)| !format.of_stacks())
    }

    /// Writes the files with figures.
    pub fn figures(&self, kept: &Kept) -> Result<(), CliError> {
        for (format, file) in &self.0 {
            match format {
                Format::Csv => file.write(&kept.csv()?)?,
                Format::Openmetrics => file.write(kept.openmetrics()?.as_bytes())?,
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns an error if a file needs call stacks, and the recording `trace` has none.
    pub fn check(&self, trace: &Trace) -> Result<(), CliError> {
        let needs = self.0.iter().any(|(format, _)| format.of_stacks());
        if needs && !trace.header.recorded.contains(Recorded::STACKS) {
            let why = "--export: the recording has no call stacks; record with --stacks";
            return Err(CliError::Usage(why.into()));
        }
        Ok(())
    }

    /// Writes the files with call stacks.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn stacks(&self, answer: &Answer<'_>, trace: &Trace) -> Result<(), CliError> {
        if !self.0.iter().any(|(format, _)| format.of_stacks()) {
            return Ok(());
        }
        let costs = stack_costs(answer.findings, &answer.bounded());
        let mut memory: Memory = BTreeMap::new();
        for (stack, caller) in answer.findings.census.callers.keys() {
            let creator = creator(&trace.stacks, *caller);
            memory.entry(*stack).or_default().extend(creator.map(|creator| creator.label()));
        }
        let profile = Profile { name: &answer.findings.name, trace, costs, memory };
        for (format, file) in &self.0 {
            match format {
                Format::Collapsed => file.write(stacks::collapsed(&profile).as_bytes())?,
                Format::Flamegraph => file.write(&stacks::flame_graph(&profile)?)?,
                Format::Firefox => file.write(&firefox::json(&profile)?)?,
                Format::Pprof => file.write(&pprof::encoded(&profile)?)?,
                Format::Csv | Format::Openmetrics => {}
            }
        }
        Ok(())
    }
}

/// The call stacks of a recording, with their costs.
struct Profile<'a> {
    /// The name of the recording.
    name: &'a str,
    trace: &'a Trace,
    costs: Vec<StackCost>,
    memory: Memory,
}

/// The calls that created the memory in which each call stack has faults, as labels.
type Memory = BTreeMap<StackId, BTreeSet<String>>;

#[cfg(test)]
mod tests {
    use super::*;
    use faultless_analysis::advise::sites::StackCost;
    use faultless_trace::event::{
        Access, Backing, Event, Frame, Function, Header, Kind, ProcessInfo, Prot, Recorded,
        StackId, Stacks, ThreadInfo,
    };

    /// Returns a recording with a fault of `load`, called by `main`, in memory that `main` has
    /// mapped, and three faults of `main`.
    pub fn trace() -> Trace {
        let function =
            |name: &str| Function { name: name.into(), module: "app".into(), file: "app.c".into() };
        let frame = |caller, function, line| Frame { caller: StackId::new(caller), function, line };
        let fault = |(page, stack): (u64, u32)| {
            let mut kind = Kind::first(page << 12, Access::Write);
            if let Kind::Fault { stack: of, .. } = &mut kind {
                *of = StackId::new(stack);
            }
            Event { time_us: page * 1000, thread: 0, kind }
        };
        let faults = [(1, 2), (2, 1), (3, 1), (4, 1)];
        // The memory of the first fault.
        let (prot, backing) = (Prot::READ | Prot::WRITE, Backing::Anon);
        let map = Kind::Map { start: 4096, len: 4096, prot, flags: 0x22, backing };
        let called = [Kind::Caller { stack: StackId::new(1) }, map].map(|kind| Event {
            time_us: 0,
            thread: 0,
            kind,
        });
        Trace {
            header: Header {
                page_size: 4096,
                program: "app".into(),
                recorded: Recorded::USER_FAULTS | Recorded::STACKS,
                ..Header::default()
            },
            processes: vec![ProcessInfo { parent: None, pid: Some(77) }],
            threads: vec![ThreadInfo { process: 0, name: "app".into() }],
            events: called.into_iter().chain(faults.map(fault)).collect(),
            stacks: Stacks {
                functions: ["main; loop", "load"].map(function).to_vec(),
                frames: vec![frame(0, 0, 9), frame(1, 1, 3)],
            },
        }
    }

    /// Returns the profile of `trace`.
    pub fn profile(trace: &Trace) -> Profile<'_> {
        let memory = [(StackId::new(2), ["mmap in main".to_owned()].into())].into();
        Profile { name: "app", trace, costs: costs(), memory }
    }

    /// Returns the costs of the stacks of [`trace`].
    fn costs() -> Vec<StackCost> {
        let cost = |stack, faults| StackCost {
            stack: StackId::new(stack),
            faults,
            bytes: faults * 4096,
            nanoseconds: 1000.0 * faults as f64,
        };
        vec![cost(1, 3), cost(2, 1)]
    }

    #[test]
    fn target_is_a_format_and_a_file() {
        let good = target("pprof=a=b.gz").expect("a format and a file");
        assert_eq!((good.format, &*good.file), (Format::Pprof, Path::new("a=b.gz")));
        for (text, why) in [
            ("pprof", "want FORMAT=FILE"),
            ("perfetto=a", "no format perfetto; the formats are collapsed, flamegraph"),
            ("csv=-", "want a file"),
            ("csv=", "want a file"),
        ] {
            let error = target(text).expect_err("wrong");
            assert!(error.contains(why), "{error}");
        }
    }
}
