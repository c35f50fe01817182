//! The answer as a page: call sites, resident memory over time, and the settings, with the runs of
//! `--try` before and after.

use super::trial::Tried;
use crate::error::CliError;
use crate::html::Page;
use crate::html::plot::{Bar, Frame, Picture, Series, SeriesLabelPosition, bars, linear, lines};
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
/// The title and the unit of bars of time.
const TIME: (&str, &str) = ("Processor time", "ms");

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
    let sites = &answer.sites[..answer.sites.len().min(SITES)];
    if !sites.is_empty() {
        let names: Vec<_> = sites.iter().map(|site| site.label()).collect();
        let meaning = format!("Predicted processor time of the faults. {}", numbered(&names));
        let heights = sites.iter().map(|site| vec![Bar::from(site.nanoseconds / 1e6)]);
        let picture = numbered_bars(TIME, "call site", &["predicted"], heights)?;
        page.plot("Call sites", &meaning, &picture);
    }
    let mut calls = by_creator(&answer.sites);
    calls.truncate(SITES);
    if !calls.is_empty() {
        let names: Vec<_> = calls.iter().map(|(name, _)| name.clone()).collect();
        let meaning = format!(
            "Touched pages of the memory that these calls created. MAP_POPULATE and advice about \
             memory belong to these calls. {}",
            numbered(&names)
        );
        let heights = calls.iter().map(|(_, bytes)| vec![Bar::from(*bytes as f64 / MIB)]);
        let picture = numbered_bars(("Touched memory", "MiB"), "call", &["touched"], heights)?;
        page.plot("Calls that create memory", &meaning, &picture);
    }
    page.plot(
        "Resident memory",
        "Pages that the program has touched and not freed, in the recorded run. Reclaim by the \
         kernel is not recorded.",
        &resident(answer, trace)?,
    );
    let rows: Vec<&Item> = answer.shown().into_iter().filter(|item| answer.saves(item)).collect();
    if !rows.is_empty() {
        let names: Vec<_> = rows.iter().map(|item| item.name.clone()).collect();
        let meaning = format!("Predicted savings of processor time. {}", numbered(&names));
        let heights = rows.iter().map(|item| vec![Bar::from(item.saving / 1e6)]);
        let picture = numbered_bars(TIME, "setting", &["predicted saving"], heights)?;
        page.plot("Settings", &meaning, &picture);
    }
    if !tried.is_empty() {
        let names: Vec<_> = tried.iter().map(|tried| tried.name.clone()).collect();
        let meaning = format!(
            "Measured {} of the runs of --try: medians, with lines from the shortest run to the \
             longest. {}",
            if cold { "elapsed time, with a cold page cache," } else { "processor time" },
            numbered(&names)
        );
        let bar = |times: &Vec<f64>| {
            let ms = times.iter().map(|time| time * 1e3);
            let (low, high) = ms.fold((f64::INFINITY, 0.0), |(low, high): (f64, f64), time| {
                (low.min(time), high.max(time))
            });
            Bar { height: median(times).unwrap_or(0.0) * 1e3, range: Some((low, high)) }
        };
        let heights = tried.iter().map(|tried| tried.times.iter().map(bar).collect());
        let names = ["without the setting", "with the setting"];
        let title = if cold { ("Elapsed time", "ms") } else { TIME };
        let picture = numbered_bars(title, "setting", &names, heights)?;
        page.plot("Before and after", &meaning, &picture);
    }
    page.text("In figures", text);
    Ok(page)
}

/// Returns the numbers of `names` with the names.
fn numbered(names: &[String]) -> String {
    let names: Vec<_> =
        (1..).zip(names).map(|(number, name)| format!("{number}: {name}")).collect();
    format!("{}.", names.join("; "))
}

/// Draws groups of bars with a title and a unit. The numbers below the groups fit each width of a
/// screen.
fn numbered_bars(
    (title, unit): (&str, &str),
    x: &str,
    names: &[&str],
    heights: impl Iterator<Item = Vec<Bar>>,
) -> Result<Picture, CliError> {
    let groups: Vec<_> =
        (1..).zip(heights).map(|(number, bars): (u32, _)| (number.to_string(), bars)).collect();
    let frame =
        Frame { title, x, y: unit, show_x: &label, show_y: &label, y_chars: 6, white: false };
    bars(&frame, names, &groups, false)
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
    fn names_are_numbered_from_one() {
        assert_eq!(numbered(&["a".to_owned(), "b".to_owned()]), "1: a; 2: b.");
    }
}
