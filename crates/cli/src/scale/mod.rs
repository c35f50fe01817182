//! `faultless scale`: a workload or a recording on increasing numbers of simulated CPUs.
//!
//! Each run has a new virtual machine (`faultless-virtual`), so runs are independent, and the
//! figures of a run do not depend on its position in the list. Ctrl-C aborts the current run, and
//! ends the list. With `--table` the list is a [published table](tables).

pub mod counts;
pub mod page;
mod plot;
mod print;
mod recording;
pub mod sizes;
pub mod subject;
mod tables;

use crate::args::ScaleArgs;
use crate::error::CliError;
use crate::html::{Drawing, Html};
use crate::interrupt;
use crate::output;
use crate::profiles;
use crate::report;
use crate::report::json::{Context, Json, Number};
use crate::report::number::plural;
use crate::report::progress::Progress;
use crate::settings::{Settings, ahead_of_policies, policies};
use faultless::Locking;
use faultless_virtual::rates::Operation;
use faultless_virtual::{Profile, Spent};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use subject::{Ran, Subject};

/// The number of hot places kept for a run.
const HOTTEST: usize = 10;

/// The run of one policy on one number of CPUs.
#[derive(Debug)]
pub struct Point {
    policy: Locking,
    cpus: usize,
    ran: Ran,
    /// The rate relative to a linear increase from the rate of the same policy on the fewest CPUs;
    /// 1 is linear.
    linear: f64,
    context: Context,
}

/// All runs.
#[derive(Debug)]
pub struct Scaled {
    name: String,
    unit: &'static str,
    /// The profile: its name, and its description in `profile`.
    machine: String,
    profile: String,
    /// The workload's parameters with the most CPUs.
    parameters: String,
    /// The number of the schedule.
    seed: u64,
    points: Vec<Point>,
}

impl Scaled {
    /// Returns whether each run had faults. Transfers are then counted per fault.
    fn by_faults(&self) -> bool {
        self.points.iter().all(|point| point.ran.sample.faults > 0)
    }

    /// Returns whether there are several numbers of CPUs, which allow a comparison with linear
    /// scaling.
    fn scales(&self) -> bool {
        self.policies().any(|points| points.len() > 1)
    }

    /// Returns the points of each policy.
    fn policies(&self) -> impl Iterator<Item = &[Point]> {
        self.points.chunk_by(|one, next| one.policy == next.policy)
    }
}

/// Runs the subject on each number of CPUs under each policy.
pub fn run(args: &ScaleArgs) -> Result<(), CliError> {
    let name = match (&args.subject, args.table) {
        (_, Some(which)) => return tables::run(args, which),
        (Some(name), None) => name,
        (None, None) => return Err(CliError::Usage("a workload, a recording or --table".into())),
    };
    let subject = Arc::new(Subject::find(name, &args.params)?);
    let profile = profiles::find(&args.profile)?;
    let counts = subject.counts(args.cpus.as_ref(), &profile)?;
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
    let settings = Settings::new(&args.set.set).with_ahead(ahead_of_policies(&args.set.set));

    let mut scaled = Scaled {
        name: subject.name(),
        unit: subject.unit(),
        machine: profile.name.clone(),
        profile: profile.to_string(),
        parameters: subject.parameters(counts.0.last().copied().unwrap_or(1))?,
        seed: args.seed,
        points: Vec::new(),
    };
    let progress = Progress::new((policies.len() * counts.0.len()) as u64);
    let mut failures = Vec::new();
    'all: for policy in policies {
        let settings = settings.with_locking(policy);
        let mut first = None;
        for &cpus in &counts.0 {
            if interrupt::requested() {
                break 'all;
            }
            let what = plural(cpus as u64, "CPU");
            progress.begin(&format!("{}, {}, {what}", scaled.name, policy.name()));
            match subject.run(&profile, cpus, args.seed, &settings) {
                Ok(None) => break 'all,
                Ok(Some((ran, context))) => {
                    let each = ran.sample.operation_rate() / cpus as f64;
                    let linear = each / *first.get_or_insert(each);
                    let point = Point { policy, cpus, ran, linear, context };
                    write_json(&mut json, &point.context, &point.ran)?;
                    let of_linear = Number::Real(100.0 * linear);
                    json.write(&point.context, "of_linear", "%", of_linear)?;
                    scaled.points.push(point);
                }
                Err(error) => failures.push(error.to_string()),
            }
            progress.advance(1);
        }
    }
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
            let why = "--policies and --set locking=POLICY both choose policies: give one of them";
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
    format!("Beyond the {has} CPUs of {} there are more sockets of the same kind.", profile.name)
}

/// Writes a simulated run.
pub fn write_json(json: &mut Json, context: &Context, ran: &Ran) -> Result<(), CliError> {
    json.sample(context, &ran.sample)?;
    for (metric, count) in [
        ("line_transfers", ran.accounts.transfers),
        ("line_fetches", ran.accounts.fetches),
        ("interrupts", ran.accounts.interrupts),
    ] {
        json.write(context, metric, "count", Number::Whole(count))?;
    }
    for (on, share) in Spent::ALL.iter().zip(ran.shares()) {
        let metric = format!("time in {}", on.name());
        json.write(context, &metric, "%", Number::Real(share))?;
    }
    for (operation, took) in Operation::ALL.iter().zip(&ran.latencies) {
        let mut took = took.clone();
        took.sort_unstable();
        let Some(last) = took.len().checked_sub(1) else { continue };
        for (name, percent) in [("p50", 50), ("p99", 99), ("max", 100)] {
            let metric = format!("{}_latency_{name}", operation.name());
            let nanoseconds = took[last * percent / 100] as f64 / 1000.0;
            json.write(context, &metric, "ns", Number::Real(nanoseconds))?;
        }
    }
    for place in &ran.hottest {
        let metric = format!("wait for {} at {}:{}", place.of, place.file, place.line);
        json.write(context, &metric, "s", Number::Real(place.waited as f64 * 1e-12))?;
    }
    Ok(())
}
