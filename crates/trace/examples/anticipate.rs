//! Reports the savings and the waste of anticipatory prefault: `anticipate [ORDER] [FILE]...`.
//!
//! Without files, uses the bundled recordings and simple artificial patterns: 64 MiB touched
//! upwards and downwards, one page in 64 KiB, and random pages. The recordings then run again with
//! a predictor that maps an aligned block around every fault, for comparison.

mod output;

use faultless::prefault::{FixedWindow, Streams};
use faultless_trace::anticipate::{self, Outcome};
use faultless_trace::event::{Access, Backing, Event, Header, Kind, ProcessInfo, Prot, ThreadInfo};
use faultless_trace::plan::PlanError;
use faultless_trace::{Trace, read, recordings};
use std::error::Error;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    output::run(|out| anticipate(out))
}

fn anticipate(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1).peekable();
    let order = args.next_if(|arg| arg.parse::<u8>().is_ok());
    let order: u8 = order.map_or(Ok(5), |order| order.parse())?;
    if order > 9 {
        return Err(format!("order {order}: a window is at most one table, order 9").into());
    }
    let mut programs = Vec::new();
    for file in args {
        let path = Path::new(&file);
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        programs.push((name, read(path)?));
    }
    let shipped = programs.is_empty();
    if shipped {
        for recording in recordings::all() {
            programs.push((recording.name.to_owned(), recording.trace()?));
        }
    }
    writeln!(
        out,
        "Windows of at most {} pages. Never touched: of the pages mapped ahead.",
        1 << order
    )?;
    table(out, &programs, anticipate::predicted::<Streams>, order)?;
    if shipped {
        writeln!(out)?;
        for (name, trace) in patterns() {
            let got = anticipate::predicted::<Streams>(&trace, order)?;
            let each = got.faults as f64 / got.left as f64;
            writeln!(
                out,
                "{name}: {} faults for {} pages, {each:.2} each; {} never touched",
                got.left, got.faults, got.wasted
            )?;
        }
    }
    writeln!(out, "\nAn aligned block of at most {} pages around every fault.", 1 << order.min(6))?;
    table(out, &programs, anticipate::predicted::<FixedWindow>, order)
}

/// Prints a row for each program, and the totals.
fn table(
    out: &mut impl Write,
    programs: &[(String, Trace)],
    predicted: impl Fn(&Trace, u8) -> Result<Outcome, PlanError>,
    order: u8,
) -> Result<(), Box<dyn Error>> {
    writeln!(
        out,
        "| program | faults | remaining | avoided | ahead | never touched | peak untouched, of resident |"
    )?;
    writeln!(out, "|---|---|---|---|---|---|---|")?;
    let mut all = Vec::new();
    for (name, trace) in programs {
        let got = predicted(trace, order)?;
        row(out, name, &got)?;
        all.push(got);
    }
    let mean = all.iter().map(Outcome::avoided).sum::<f64>() / all.len() as f64;
    let worst = all.iter().map(Outcome::avoided).fold(1.0, f64::min);
    let sums = |(ahead, wasted), got: &Outcome| (ahead + got.ahead, wasted + got.wasted);
    let (ahead, wasted) = all.iter().fold((0, 0), sums);
    writeln!(
        out,
        "Avoided {:.1}% on average and {:.1}% at worst; {:.2}% never touched.",
        100.0 * mean,
        100.0 * worst,
        100.0 * wasted as f64 / ahead.max(1) as f64,
    )?;
    Ok(())
}

fn row(out: &mut impl Write, name: &str, got: &Outcome) -> std::io::Result<()> {
    writeln!(
        out,
        "| {name} | {} | {} | {:.1}% | {} | {} ({:.2}%) | {} ({:.1}%) |",
        got.faults,
        got.left,
        100.0 * got.avoided(),
        got.ahead,
        got.wasted,
        100.0 * got.waste(),
        got.peak_untouched,
        100.0 * got.peak_untouched as f64 / got.peak_resident.max(1) as f64,
    )
}

fn patterns() -> Vec<(&'static str, Trace)> {
    const MANY: u64 = 16384;
    let mut state = 1u64;
    let mut random = move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % (64 * MANY)
    };
    vec![
        ("64 MiB upwards", touches((0..MANY).collect())),
        ("64 MiB downwards", touches((0..MANY).rev().collect())),
        ("one page in 64 KiB", touches((0..MANY).map(|n| 16 * n).collect())),
        ("16,384 of 1,048,576 pages at random", touches((0..MANY).map(|_| random()).collect())),
    ]
}

/// Returns a trace of one thread that writes to each of `pages` of a large mapping once.
fn touches(mut pages: Vec<u64>) -> Trace {
    const PAGE: u64 = 4096;
    let start = 1 << 40;
    let mut seen = std::collections::HashSet::new();
    pages.retain(|page| seen.insert(*page));
    let map = Kind::Map {
        start,
        len: (64 << 20) * 64,
        prot: Prot::READ | Prot::WRITE,
        flags: 0x22,
        backing: Backing::Anon,
    };
    let write = |page: u64| Kind::first(start + page * PAGE, Access::Write);
    let kinds = std::iter::once(map).chain(pages.into_iter().map(write));
    Trace {
        header: Header { page_size: PAGE as u32, ..Header::default() },
        processes: vec![ProcessInfo { parent: None, pid: None }],
        threads: vec![ThreadInfo { process: 0, name: String::new() }],
        events: kinds.map(|kind| Event { time_us: 0, thread: 0, kind }).collect(),
        ..Trace::default()
    }
}
