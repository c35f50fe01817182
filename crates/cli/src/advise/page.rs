//! The answer as a page: call sites, resident memory over time, and the settings, with the runs of
//! `--try` before and after.

use super::print::sites::LEAST;
use super::trial::Tried;
use crate::error::CliError;
use crate::html::Page;
use crate::html::plot::{
    Bar, Frame, Picture, Series, SeriesLabelPosition, linear, lines, named_bars,
};
use crate::report::processes;
use faultless::PAGE_SIZE;
use faultless_analysis::advise::answer::{Answer, SITES};
use faultless_analysis::advise::creators::by_creator;
use faultless_analysis::advise::item::Item;
use faultless_analysis::number::label;
use faultless_analysis::rates::median;
use faultless_trace::{Trace, footprint};

/// Points of a line.
const POINTS: usize = 600;
/// Processes, or programs with many processes, with a line of their own.
const LINES: usize = 4;
const MIB: f64 = (1 << 20) as f64;
const MIB_PER_PAGE: f64 = PAGE_SIZE as f64 / MIB;

/// Creates the page of `answer`, with the results of `--try` and the `text` on the terminal. The
/// runs of `--try` had a `cold` page cache or not.
///
/// # Errors
/// The drawing library failed.
pub fn page(
    answer: &Answer<'_>,
    trace: &Trace,
    (tried, cold): (&[Tried], bool),
    text: &str,
) -> Result<Page, CliError> {
    let program = &trace.header.program;
    let mut page = Page::new(format!("{}: page faults of {program}", answer.findings.name));
    let sites = answer.sites.iter().map(|site| (site.label(), site.nanoseconds / 1e6));
    let sites = largest(sites.collect());
    if !sites.is_empty() {
        let meaning = "Predicted processor time of the faults of each call site.";
        let bars = sites.into_iter().map(|(name, time)| (name, vec![time.into()]));
        let picture = named(("Predicted time of call sites", "ms"), &["predicted"], bars)?;
        page.plot("Call sites", meaning, &picture);
    }
    let calls = by_creator(&answer.sites).into_iter();
    let calls = largest(calls.map(|(name, bytes)| (name, bytes as f64 / MIB)).collect());
    if !calls.is_empty() {
        let meaning = "Touched pages of the memory that these calls created. MAP_POPULATE and \
                       advice about memory belong to these calls.";
        let bars = calls.into_iter().map(|(name, mib)| (name, vec![mib.into()]));
        let picture = named(("Touched memory by call", "MiB"), &["touched"], bars)?;
        page.plot("Calls that create memory", meaning, &picture);
    }
    page.plot(
        "Resident memory",
        "Pages that the program has touched and not freed, in the recorded run. Reclaim by the \
         kernel is not recorded.",
        &resident(answer, trace)?,
    );
    let rows: Vec<&Item> = answer.shown().into_iter().filter(|item| answer.saves(item)).collect();
    if !rows.is_empty() {
        let meaning = "Predicted savings of processor time.";
        let bars = rows.iter().map(|item| (item.name.clone(), vec![(item.saving / 1e6).into()]));
        let picture = named(("Predicted savings of settings", "ms"), &["saving"], bars)?;
        page.plot("Settings", meaning, &picture);
    }
    if !tried.is_empty() {
        let meaning = format!(
            "Measured {} of the runs of --try: medians, with lines from the shortest run to the \
             longest.",
            if cold { "elapsed time, with a cold page cache," } else { "processor time" }
        );
        let bar = |times: &Vec<f64>| {
            let ms = times.iter().map(|time| time * 1e3);
            let (low, high) = ms.fold((f64::INFINITY, 0.0), |(low, high): (f64, f64), time| {
                (low.min(time), high.max(time))
            });
            Bar { height: median(times).unwrap_or(0.0) * 1e3, range: Some((low, high)) }
        };
        let bars = tried
            .iter()
            .map(|tried| (tried.name.clone(), tried.times.iter().map(bar).collect::<Vec<_>>()));
        let kinds = ["without the setting", "with the setting"];
        let time = if cold { "Elapsed time" } else { "Processor time" };
        let title = format!("{time} of runs, measured");
        let picture = named((&title, "ms"), &kinds, bars)?;
        page.plot("Before and after", &meaning, &picture);
    }
    page.text("In figures", text);
    Ok(page)
}

/// Returns the values that are large enough for a bar, of values in order of size.
fn largest(mut values: Vec<(String, f64)>) -> Vec<(String, f64)> {
    let all: f64 = values.iter().map(|(_, value)| value).sum();
    values.truncate(SITES);
    values.retain(|(_, value)| *value >= LEAST * all && *value > 0.0);
    values
}

/// Draws bars with a title and a unit: for each name, a bar of each kind.
fn named(
    (title, unit): (&str, &str),
    kinds: &[&str],
    bars: impl Iterator<Item = (String, Vec<Bar>)>,
) -> Result<Picture, CliError> {
    let groups: Vec<_> = bars.collect();
    let (x, y) = (unit, "");
    let frame = Frame { title, x, y, show_x: &label, show_y: &label, y_chars: 0, white: false };
    named_bars(&frame, kinds, &groups)
}

/// Draws the resident memory of all processes together, and of the processes with the most faults,
/// or of the programs if there are many processes.
fn resident(answer: &Answer<'_>, trace: &Trace) -> Result<Picture, CliError> {
    let groups = processes::groups(&answer.processes);
    let largest = groups.iter().take(if groups.len() > 1 { LINES } else { 0 });
    let mut of = vec![None; trace.processes.len()];
    let mut series = vec![Series { name: "all".into(), points: Vec::new() }];
    for group in largest {
        for process in &group.processes {
            of[process.process as usize] = Some(series.len());
        }
        let name = group.name(|process| match process.pid {
            Some(pid) => format!("{} (PID {pid})", process.name),
            None => format!("{} ({})", process.name, process.process),
        });
        series.push(Series { name, points: Vec::new() });
    }
    let end = (trace.events.last_us() as f64 / 1e3).max(0.001);
    let mut pages = vec![0_i64; series.len()];
    let step = end / POINTS as f64;
    footprint::changes(trace, |change| {
        let at = change.time_us as f64 / 1e3;
        for line in [Some(0), of[change.process as usize]].into_iter().flatten() {
            pages[line] += change.pages;
            let mib = pages[line] as f64 * MIB_PER_PAGE;
            // One point for each step of time.
            match series[line].points.last_mut() {
                Some(last) if at - last.0 < step => last.1 = mib,
                _ => series[line].points.push((at, mib)),
            }
        }
    });
    let most = series[0].points.iter().map(|(_, mib)| *mib).fold(1.0, f64::max);
    let frame = Frame {
        title: "Resident memory",
        x: "ms since the recording began",
        y: "MiB",
        show_x: &label,
        show_y: &label,
        y_chars: 6,
        white: false,
    };
    let axes = || (linear(0.0..end), linear(0.0..most * 1.2));
    lines(&frame, axes, &series, (0, SeriesLabelPosition::UpperLeft))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_too_small_for_a_bar_are_omitted() {
        let values = |values: &[f64]| values.iter().map(|it| (String::new(), *it)).collect();
        let of = |all: &[f64]| largest(values(all)).len();
        assert_eq!(of(&[100.0, 50.0, 0.1, 0.0]), 2);
        assert_eq!(of(&[1.0; 20]), SITES);
        assert_eq!((of(&[]), of(&[0.0])), (0, 0));
    }
}
