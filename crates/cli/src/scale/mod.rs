//! `faultless scale`: a workload or a recording on increasing numbers of simulated CPUs.
//!
//! With `--table` the list is a [published table](tables).

pub mod counts;
pub mod page;
mod plot;
mod print;
mod tables;

use crate::error::CliError;
use crate::html::{Drawing, Html, HtmlArgs};
use crate::interrupt;
use crate::number::within;
use crate::output;
use crate::profile;
use crate::replay::source::{self, Input, Origin};
use crate::report::json::Json;
use crate::report::progress::Progress;
use crate::report::{self, JsonArgs};
use crate::set::SetArgs;
use clap::ArgGroup;
use counts::Counts;
use faultless::Locking;
use faultless_analysis::scale::{self, PROFILE, Plan, Scaled, Subject, sizes};
use faultless_analysis::settings::{Settings, policies, regime_of_policies};
use faultless_analysis::suggest;
use faultless_trace::recordings;
use faultless_virtual::Profile;
use faultless_workload::all;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use tables::TableArg;

#[derive(Debug, clap::Args)]
#[command(group = ArgGroup::new("what").args(["subject", "table"]).required(true))]
#[command(after_help = "\
Examples:
  faultless scale pft
  faultless scale page_fault1 mode=processes --cpus 1,2,4..512
  faultless scale ebizzy --profile eight-socket --plot ebizzy.svg
  faultless scale vma_mmap --policies speculative --details
  faultless scale mmap1 passes=400 --warm-up 400        without the start-up
  faultless scale mmap1 --profile ./mine.toml --json mmap1.jsonl
  faultless scale --table prefault          beside the published figures
  faultless scale --table prefault --cpus 1,8 --details
  faultless profile list                    bundled profiles and their format")]
pub struct ScaleArgs {
    /// Run this workload or recording: a file, or the name of a bundled one
    #[arg(value_name = "WORKLOAD|RECORDING")]
    pub subject: Option<PathBuf>,
    /// Print a published table, with simulated figures beside the published figures
    #[arg(long, value_name = "NAME", value_enum,
          conflicts_with_all = ["params", "policies", "set", "plot", "html", "profile"])]
    pub table: Option<TableArg>,
    /// Set parameters of the workload, such as `size=4M`; `faultless workloads` lists them
    #[arg(value_name = "KEY=VALUE")]
    pub params: Vec<String>,
    /// Run on these numbers of CPUs; 4..512 is 4, 8, 16 and so on [default: 1, 2, 4 and so on to
    /// the CPUs of the profile]. With --table, print only the rows with these numbers of CPUs
    /// [default: all rows]
    #[arg(long, value_name = "N,N..N")]
    pub cpus: Option<Counts>,
    /// Select the locking policies [default: all]
    #[arg(long, value_name = "POLICY,...", value_delimiter = ',')]
    pub policies: Vec<Policy>,
    /// Take hardware costs from this profile: the name of a bundled profile (`faultless profile
    /// list`), or a file. A word without `/` and without an extension is a bundled name; any other
    /// text is a file, such as mine.toml or ./mine
    #[arg(long, value_name = "NAME|FILE", default_value = PROFILE)]
    pub profile: String,
    /// Select a schedule: 0 delays no CPU. Any other number delays one access in 16 by up to 1 µs,
    /// at random. Use this to find wrong schedules, not for figures, which are several times lower
    /// with delays
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = within(0..=u64::MAX))]
    pub seed: u64,
    /// Measure the steady state: exclude the first N calls and faults of each CPU, and the time
    /// after the first CPU has ended its work. All CPUs are measured in the same time. A column has
    /// the start-up: the calls and faults of each CPU until 90 % of the steady rate. Requires
    /// enough work, such as a larger `passes=`. The table `vma` always measures the steady state
    #[arg(long, value_name = "N", value_parser = within(1..=u64::MAX), conflicts_with = "table")]
    pub warm_up: Option<u64>,
    /// Print the hottest lines for each number of CPUs, not only for the largest. With --table,
    /// print the CPU time, faults and cache lines of each row
    #[arg(long)]
    pub details: bool,
    #[command(flatten)]
    pub set: SetArgs,
    #[command(flatten)]
    pub json: JsonArgs,
    #[command(flatten)]
    pub html: HtmlArgs,
    /// Draw throughput over CPUs as SVG
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
}

/// A locking policy, by its name.
#[derive(Clone, Copy, Debug)]
pub struct Policy(pub Locking);

impl FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Locking::ALL.into_iter().find(|policy| policy.name() == text);
        found.map(Self).ok_or_else(|| {
            let names = Locking::ALL.map(Locking::name);
            format!("one of {}{}", names.join(", "), suggest::hint(text, names))
        })
    }
}

/// Runs the subject on each number of CPUs under each policy.
pub fn run(args: &ScaleArgs) -> Result<(), CliError> {
    args.set.one_value_each(&["locking"])?;
    let name = match (&args.subject, args.table) {
        (_, Some(which)) => return tables::run(args, which),
        (Some(name), None) => name,
        (None, None) => return Err(CliError::Usage("a workload, a recording or --table".into())),
    };
    let subject = Arc::new(find(name, &args.params)?);
    let profile = profile::find(&args.profile)?;
    let counts = counts(&subject, args.cpus.as_ref(), &profile)?;
    if args.warm_up.is_some() {
        subject.check_warm_up()?;
    }
    let policies = chosen(args)?;
    let inputs = [Path::new(&args.profile), name.as_path()];
    output::apart(&[
        ("--json", args.json.json.as_deref()),
        ("--html", args.html.html.as_deref()),
        ("--plot", args.plot.as_deref()),
    ])?;
    let plot = Drawing::open("--plot", args.plot.as_deref(), &inputs)?;
    let html = Html::open(&args.html, &inputs)?;
    let mut json = Json::open(&args.json, &inputs)?;
    let (mut out, style) = report::output(&args.json);
    let settings = Settings::new(&args.set.set).with_regime(regime_of_policies(&args.set.set));

    let progress = Progress::new((policies.len() * counts.0.len()) as u64);
    let mut failures = Vec::new();
    let plan = Plan {
        profile: &profile,
        counts: &counts.0,
        policies: &policies,
        seed: args.seed,
        warm_up: args.warm_up,
        settings: &settings,
    };
    let scaled = scale::run(&subject, plan, &mut json, &progress, &mut failures)?;
    drop(progress);
    let mut text = Vec::new();
    print::print(&mut text, &scaled, &beyond(&profile, &scaled), args.details, style)?;
    out.write_all(&text)?;
    if interrupt::requested() {
        writeln!(out, "{}", interrupt::NOT_COMPLETE)?;
    }
    if failures.is_empty() {
        plot.write(|| Ok(Some(plot::draw(&scaled, true)?.wide)))?;
        html.write(|| page::page(&scaled, &String::from_utf8_lossy(&text)).map(Some))?;
    }
    if failures.is_empty() { json.complete() } else { Err(CliError::Failed(failures.join("\n"))) }
}

/// Finds the subject named `subject`, with the parameters of a workload.
///
/// # Errors
/// No such subject exists, or it does not accept the parameters.
fn find(subject: &Path, params: &[String]) -> Result<Subject, CliError> {
    let name = subject.to_string_lossy();
    if all().iter().any(|info| info.name == name) {
        return Ok(Subject::Workload(name.into_owned(), params.to_vec()));
    }
    if Origin::find(subject).is_some() {
        let Input::Recording(source) = source::open(subject)? else {
            let why = "a trace of addresses has no faults and calls; `faultless replay` runs it";
            return Err(CliError::Usage(format!("{name}: {why}")));
        };
        if let Some(param) = params.first() {
            let why = "a recording has no parameters";
            return Err(CliError::Usage(format!("{name}: {param}: {why}")));
        }
        return Ok(Subject::Recording(Arc::new(source.replayable()?)));
    }
    let mut known: Vec<_> = all().iter().map(|info| info.name).collect();
    known.extend(recordings::all().iter().map(|recording| recording.name));
    Err(CliError::Usage(format!(
        "{name}: no such workload, recording or file; there are {}{}",
        known.join(", "),
        suggest::hint(&name, known.iter().copied())
    )))
}

/// Returns the numbers of CPUs for the runs.
///
/// # Errors
/// The given numbers do not fit the subject.
fn counts(
    subject: &Subject,
    given: Option<&Counts>,
    profile: &Profile,
) -> Result<Counts, CliError> {
    match subject {
        Subject::Workload(name, params) => {
            let counts = given.cloned().unwrap_or_else(|| Counts::doubling(profile.cpus()));
            // Invalid parameters are reported before the first run.
            counts.0.iter().try_for_each(|cpus| sizes::workload(name, params, *cpus).map(drop))?;
            Ok(counts)
        }
        Subject::Recording(source) => {
            if given.is_some() {
                let why = "always runs with one CPU for each thread";
                let (name, threads) = (subject.name(), source.plan.threads().len());
                return Err(CliError::Usage(format!("--cpus: {name} {why}: {threads}")));
            }
            Ok(Counts(vec![source.simulated_cpus()?]))
        }
    }
}

/// Returns the policies to compare.
fn chosen(args: &ScaleArgs) -> Result<Vec<Locking>, CliError> {
    let of_knobs = args.set.set.iter().any(|assignment| assignment.locking().is_some());
    match &args.policies[..] {
        [] => {
            // The newest first, as the policy of main interest.
            let mut policies = policies(&args.set.set);
            policies.reverse();
            Ok(policies)
        }
        _ if of_knobs => {
            let why =
                "--policies and --set locking=POLICY both choose policies: use one of the two";
            Err(CliError::Usage(why.into()))
        }
        given => {
            let mut policies: Vec<Locking> = Vec::new();
            for policy in given.iter().map(|policy| policy.0) {
                if !policies.contains(&policy) {
                    policies.push(policy);
                }
            }
            Ok(policies)
        }
    }
}

/// Returns a remark on runs with more CPUs than the profile's machine.
fn beyond(profile: &Profile, scaled: &Scaled) -> String {
    let most = scaled.points.iter().map(|point| point.cpus).max().unwrap_or(0);
    let has = profile.cpus();
    if most <= has {
        return String::new();
    }
    format!(
        "Runs with more than the {has} CPUs of {} simulate more sockets of the same kind.",
        profile.name
    )
}
