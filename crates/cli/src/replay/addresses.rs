//! `faultless replay` of a trace of addresses: the TLB activity of a program, and the effect of
//! code in pages of 2 MiB.

use super::ReplayArgs;
use crate::error::CliError;
use crate::interrupt;
use crate::report::json::Json;
use crate::report::{self, Style, table};
use faultless::PAGE_SIZE;
use faultless_analysis::number::{grouped, percent, plural};
use faultless_analysis::replay::addresses::{COUNTS, Code, Layout, Simulated, simulate};
use faultless_native::TlbStats;
use faultless_native::tlb::PROCESSOR;
use faultless_trace::lackey::Addresses;
use std::io::Write;

/// The number of listed pages of 2 MiB.
const LISTED: usize = 16;

/// Returns the head of a layout's column.
const fn title(layout: Layout) -> &'static str {
    match layout {
        Layout::Small => "4 KiB",
        Layout::Whole => "2 MiB if\nfully mapped",
        Layout::Aligned => "2 MiB, code\nrealigned",
    }
}

/// Simulates the TLBs of a program whose addresses are in `trace`.
pub fn run(args: &ReplayArgs, name: &str, mut trace: Addresses) -> Result<(), CliError> {
    let given = [
        (args.policies, "--policies"),
        (!args.set.set.is_empty(), "--set"),
        (args.html.html.is_some(), "--html"),
        (args.plot.is_some(), "--plot"),
    ];
    if let Some((_, what)) = given.iter().find(|(given, _)| *given) {
        return Err(CliError::Usage(format!(
            "{what} cannot be used with {name}: a trace of addresses has no faults and calls"
        )));
    }
    let mut json = Json::open(&args.json, &[&args.recording])?;
    let (mut out, style) = report::output(&args.json);
    let Some(simulated) = simulate(&mut trace)? else {
        writeln!(out, "{}", interrupt::NOT_COMPLETE)?;
        return Ok(());
    };
    if simulated.pages.is_empty() {
        return Err(CliError::Usage(format!("{name}: the trace contains no accesses")));
    }
    print(&mut *out, name, &simulated, style)?;
    simulated.figures(&mut json, name)?;
    json.complete()
}

fn print(
    out: &mut dyn Write,
    name: &str,
    simulated: &Simulated,
    style: Style,
) -> Result<(), CliError> {
    let Simulated { pages, code, stats, left_out } = simulated;
    let [fetches, loads, stores] = pages.counts.map(grouped);
    let text = &code.text;
    writeln!(out, "\n {name}: a trace of addresses (valgrind's lackey)")?;
    writeln!(
        out,
        "   accesses    {fetches} fetches, {loads} loads, {stores} stores in {} pages",
        grouped(pages.len() as u64)
    )?;
    if *left_out > 0 {
        writeln!(out, "   omitted     {} accesses beyond user space", grouped(*left_out))?;
    }
    let fetched: usize = text.extents.iter().map(|extent| extent.fetched.len()).sum();
    writeln!(
        out,
        "   code        {} of {} KiB; {} pages with fetches",
        plural(text.extents.len() as u64, "extent"),
        grouped(text.pages() * PAGE_SIZE / 1024),
        grouped(fetched as u64)
    )?;
    writeln!(
        out,
        "   assumed     pages of code are pages with fetches and without stores, and gaps \
         between two such pages\n\x20              of less than 2 MiB without stores; all pages \
         are mapped already\n"
    )?;
    writeln!(out, "{}", stats_table(simulated, stats, style))?;
    writeln!(
        out,
        "TLBs are simulated, with the sizes of {PROCESSOR}; a walk is a miss of all levels."
    )?;
    if !code.whole.is_empty() {
        writeln!(out, "\n{}", folios(code, style))?;
    }
    Ok(())
}

fn stats_table(simulated: &Simulated, stats: &[TlbStats; 3], style: Style) -> comfy_table::Table {
    let code = &simulated.code;
    let mut head = vec!["code in pages of".to_owned()];
    head.extend(Layout::ALL.map(|layout| title(layout).to_owned()));
    let mut table = table::numbers(&head, style);
    for (name, _, figure) in COUNTS {
        let cells = stats.iter().map(|stats| grouped(figure(stats)));
        table::row(&mut table, std::iter::once(name.to_owned()).chain(cells));
    }
    let covered = Layout::ALL.map(|layout| code.coverage(layout));
    let folios = covered.map(|(folios, _)| grouped(folios));
    table::row(&mut table, std::iter::once("pages of 2 MiB".to_owned()).chain(folios));
    let shares = covered.map(|(_, fetches)| percent(fetches, code.text.fetches));
    table::row(&mut table, std::iter::once("fetches from these".to_owned()).chain(shares));
    table
}

/// Returns a table of the pages of 2 MiB inside the code with the most fetches.
fn folios(code: &Code, style: Style) -> comfy_table::Table {
    let mut folios = code.whole.clone();
    folios.sort_by_key(|folio| std::cmp::Reverse(folio.fetches));
    let head = ["page of 2 MiB", "with fetches, of 512", "fetches"].map(str::to_owned);
    let mut table = table::numbers(&head, style);
    for folio in folios.iter().take(LISTED) {
        let share = percent(folio.fetches, code.text.fetches);
        table::row(&mut table, [format!("{:#x}", folio.addr), grouped(folio.fetched), share]);
    }
    if folios.len() > LISTED {
        let rest = &folios[LISTED..];
        let share = percent(rest.iter().map(|folio| folio.fetches).sum(), code.text.fetches);
        let fetched = rest.iter().map(|folio| folio.fetched).sum();
        table::row(&mut table, [format!("{} more", rest.len()), grouped(fetched), share]);
    }
    table
}
