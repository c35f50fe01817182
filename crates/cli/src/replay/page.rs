//! A recording as a page: the times and addresses of its faults, the faults saved by prefault, its
//! resident memory, and the cost of its faults.

use crate::error::CliError;
use crate::html::Page;
use crate::html::plot::{Frame, Picture, Series, SeriesLabelPosition, cells, linear, lines, ranks};
use crate::profile;
use crate::scale::page::{latencies, time};
use faultless::Knobs;
use faultless_analysis::number::label;
use faultless_analysis::replay::prefault::{gauged, in_turn_with_times};
use faultless_analysis::replay::{Gauged, Source};
use faultless_analysis::scale::{PROFILE, Ran, Subject};
use faultless_analysis::settings::{Regime, Settings};
use faultless_trace::bound::{Done, Took};
use faultless_trace::plan::{Op, Plan};
use faultless_virtual::rates::Operation;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Points of a line.
const POINTS: usize = 600;
/// The name of the horizontal axis: the recording's time.
const TIME: &str = "ms since the recording began";
/// A gap between addresses of pages, in bytes, after which the axis of addresses has a new run.
const GAP: u64 = 1 << 20;

/// A recording replayed in its own order, with prefault off and on.
struct Compared {
    plan: Plan,
    off: Gauged,
    on: Gauged,
    settings: [Settings; 2],
    names: [String; 2],
}

impl Compared {
    /// Replays under `settings`, and with prefault off. If prefault is off in `settings`, the
    /// default order is used. Returns `None` if the user interrupted the replays.
    fn of(source: &Arc<Source>, settings: &Settings) -> Result<Option<Self>, CliError> {
        let regime = match settings.regime {
            Regime { order: 0, pool } => {
                Regime { order: Knobs::default().prefault_max_order(), pool }
            }
            regime => regime,
        };
        let plan = in_turn_with_times(source)?;
        let settings = [Regime::OFF, regime].map(|regime| settings.with_regime(regime));
        let off = gauged(source, &plan, &settings[0])?;
        let on = gauged(source, &plan, &settings[1])?;
        let names = ["prefault off".to_owned(), format!("prefault up to {}", regime.name())];
        let complete = off.replayed.complete && on.replayed.complete;
        Ok(complete.then_some(Self { plan, off, on, settings, names }))
    }

    /// Draws the faults so far, over time.
    fn saved(&self, white: bool) -> Result<Picture, CliError> {
        let taken = |gauged: &Gauged| {
            let mut count = 0.0;
            let fault = |took: Took| if took == Took::Nothing { 0.0 } else { 1.0 };
            gauged
                .done
                .iter()
                .map(|done| {
                    count += fault(done.took());
                    count
                })
                .collect::<Vec<_>>()
        };
        let values = [taken(&self.off), taken(&self.on)];
        curves(("Faults", "faults"), &self.names, (&self.times(), values), white)
    }

    /// Returns the time in the recording, in milliseconds, of each operation in order.
    fn times(&self) -> Vec<f64> {
        let mut next = vec![0; self.plan.threads().len()];
        let time = |done: &Done| {
            let at: &mut usize = &mut next[done.thread() as usize];
            let time = self.plan.threads()[done.thread() as usize].times.get(*at);
            *at += 1;
            time.copied().unwrap_or(0) as f64 / 1000.0
        };
        self.off.done.iter().map(time).collect()
    }
}

/// Draws the picture of `--plot`: the faults of a replay with prefault off and on, on white.
/// Returns `None` if the user interrupted the replays.
///
/// # Errors
/// A replay failed, or the drawing library failed.
pub fn plot(source: &Arc<Source>, settings: &Settings) -> Result<Option<String>, CliError> {
    Compared::of(source, settings)?.map(|it| Ok(it.saved(true)?.wide)).transpose()
}

/// Creates the page of a replay under `settings`, beside a replay with prefault off. Returns `None`
/// if the user interrupted the replays.
///
/// # Errors
/// A replay failed, or the drawing library failed.
pub fn page(
    source: &Arc<Source>,
    settings: &Settings,
    text: &str,
) -> Result<Option<Page>, CliError> {
    let Some(compared) = Compared::of(source, settings)? else { return Ok(None) };
    let Compared { plan, off, on, settings, names } = &compared;
    let times = compared.times();
    let mut page = Page::new(format!(
        "{}: a recording of the program {}",
        source.name, source.trace.header.program
    ));
    page.plot(
        "Faults over time and address",
        "Each page fault of a replay with prefault off: by the time in the recording, and by the \
         address of the page. The axis of addresses omits addresses that are not touched, so \
         distances on this axis are numbers of touched pages. Saved: with prefault the touch \
         causes no fault.",
        &faults(plan, &times, off, on)?,
    );
    page.plot("Savings of prefault", "Faults so far.", &compared.saved(false)?);
    let resident = |gauged: &Gauged| {
        gauged.resident.iter().map(|pages| f64::from(*pages) * MIB_PER_PAGE).collect::<Vec<_>>()
    };
    page.plot(
        "Resident memory",
        "The memory of all processes together.",
        &curves(("Resident memory", "MiB"), names, (&times, [resident(off), resident(on)]), false)?,
    );
    let subject = Arc::new(Subject::Recording(Arc::clone(source)));
    let simulated = profile::bundled(PROFILE)?;
    let mut runs: Vec<(String, Ran)> = Vec::new();
    for (name, settings) in names.iter().zip(settings) {
        let Some((ran, _)) = subject.run(&simulated, source.cpus(), 0, settings)? else {
            return Ok(None);
        };
        runs.push((name.clone(), ran));
    }
    let runs: Vec<_> = runs.iter().map(|(name, ran)| (name.clone(), ran)).collect();
    if let Some(picture) = latencies(&runs, Operation::Fault, "Latency of faults")? {
        let meaning = format!(
            "Share of faults that take at most the time on the axis, on simulated CPUs ({PROFILE}), one per thread."
        );
        page.plot("Latencies", &meaning, &picture);
    }
    page.plot(
        "Time by activity",
        "Time of each operation on simulated CPUs, divided by the activity of the CPU.",
        &time(&runs, "operations", &source.name)?,
    );
    page.text("In figures", text);
    Ok(Some(page))
}

const MIB_PER_PAGE: f64 = faultless::PAGE_SIZE as f64 / (1 << 20) as f64;

/// Returns the touched page of each operation of `plan` that is a touch, in the order of `gauged`.
fn touches(plan: &Plan, gauged: &Gauged) -> Vec<Option<u64>> {
    let mut ops: Vec<_> = plan.threads().iter().map(|thread| thread.ops.iter()).collect();
    let page = |done: &Done| match ops[done.thread() as usize].next() {
        Some(Op::Touch { page, .. }) => Some(page),
        _ => None,
    };
    gauged.done.iter().map(page).collect()
}

fn faults(plan: &Plan, times: &[f64], off: &Gauged, on: &Gauged) -> Result<Picture, CliError> {
    let pages = touches(plan, off);
    let order: Vec<u64> =
        pages.iter().flatten().copied().collect::<BTreeSet<_>>().into_iter().collect();
    let mut kinds = ["saved by prefault", "first touches, not saved", "other faults"]
        .map(|name| Series { name: name.to_owned(), points: Vec::new() });
    for (at, (page, (off, on))) in pages.iter().zip(off.done.iter().zip(&on.done)).enumerate() {
        let Some(page) = page.filter(|_| off.took() != Took::Nothing) else { continue };
        let kind = match (off.took(), on.took()) {
            (_, Took::Nothing) => 0,
            (Took::First, _) => 1,
            _ => 2,
        };
        let place = order.partition_point(|other| *other < page);
        kinds[kind].points.push((times[at], place as f64));
    }
    let last = order.len().saturating_sub(1);
    let address = |place: f64| {
        let page = order.get((place.max(0.0) as usize).min(last));
        page.map_or(String::new(), |page| format!("{page:x}"))
    };
    let frame = Frame {
        title: "Page faults",
        x: TIME,
        y: "address (hexadecimal)",
        show_x: &label,
        show_y: &address,
        y_chars: order.last().map_or(1, |page| format!("{page:x}").len() as u32),
        white: false,
    };
    let begins = |at: &usize| *at == 0 || order[*at] - order[*at - 1] > GAP;
    let begins: Vec<usize> = (0..order.len()).filter(begins).collect();
    let end = times.iter().copied().fold(0.001, f64::max);
    let vertical = |range| ranks(range, begins.clone(), order.len());
    cells(&frame, (0.0..end, 0.0..order.len().max(1) as f64), vertical, &kinds)
}

/// Draws two lines over time, with a title and a name of the vertical axis: on white, or on the
/// background of a page.
fn curves(
    (title, y): (&str, &str),
    names: &[String; 2],
    (times, values): (&[f64], [Vec<f64>; 2]),
    white: bool,
) -> Result<Picture, CliError> {
    let most = values.iter().flatten().copied().fold(1.0, f64::max);
    let step = times.len().div_ceil(POINTS).max(1);
    let thinned = |values: Vec<f64>| -> Vec<(f64, f64)> {
        let last = values.len().saturating_sub(1);
        let kept = values.into_iter().enumerate().filter(|(at, _)| at % step == 0 || *at == last);
        kept.map(|(at, value)| (times[at], value)).collect()
    };
    let series: Vec<_> = names
        .iter()
        .zip(values)
        .map(|(name, values)| Series { name: name.clone(), points: thinned(values) })
        .collect();
    let frame = Frame { title, x: TIME, y, show_x: &label, show_y: &label, y_chars: 6, white };
    let end = times.iter().copied().fold(0.001, f64::max);
    let axes = || (linear(0.0..end), linear(0.0..most * 1.1));
    lines(&frame, axes, &series, (0, SeriesLabelPosition::UpperLeft))
}
