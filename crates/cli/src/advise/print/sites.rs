//! The call sites with the largest cost.

use crate::error::CliError;
use crate::report::{Style, shortened, table};
use faultless::PAGE_SIZE;
use faultless_analysis::advise::answer::{Answer, SITES};
use faultless_analysis::advise::creators::Creator;
use faultless_analysis::advise::item::size;
use faultless_analysis::advise::sites::{Site, short_name};
use faultless_analysis::number::{fixed, grouped, plural};
use faultless_trace::fork::Copied;
use std::io::Write;

/// The share of the time of all call sites below which a call site has no row.
pub const LEAST: f64 = 0.005;
/// The saving in nanoseconds below which a change would be printed as 0.
const PRINTED: f64 = 5e5;
/// Calls with a place each, for each call site.
const CALLS: usize = 3;
/// The explanation of call sites and calls without a function of the program.
const UNKNOWN: &str = concat!(
    " caller unknown: these call stacks have no function outside the C library and allocators. Code without\n",
    " frame pointers hides its callers; a recording with --stacks=dwarf shows the callers."
);
/// The columns of a label. Names of templates and closures are longer.
const COLUMNS: usize = 56;

/// Prints the call sites, each with the change that saves the most.
pub fn print(answer: &Answer<'_>, out: &mut dyn Write, style: Style) -> Result<(), CliError> {
    let sites = &answer.sites;
    if sites.is_empty() {
        return Ok(());
    }
    let all: f64 = sites.iter().map(|site| site.nanoseconds).sum();
    let head = ["call site", "predicted time", "of all", "faults", "memory"].map(str::to_owned);
    let mut table = table::numbers(&head, style);
    let large = |site: &&Site| site.nanoseconds >= LEAST * all;
    let shown = &sites[..sites.iter().take(SITES).filter(large).count().max(1)];
    for (number, site) in (1..).zip(shown) {
        let cells = [
            format!("{number}. {}", short(&site.label())),
            format!("{} s", fixed(site.nanoseconds / 1e9, 3)),
            format!("{} %", fixed(100.0 * site.nanoseconds / all.max(1.0), 1)),
            grouped(site.faults),
            size(site.bytes()),
        ];
        table::row(&mut table, cells);
    }
    writeln!(out, "\n{table}\n")?;
    for (number, site) in (1..).zip(shown) {
        writeln!(out, " {number}. {}", described(site))?;
        if let Some(calls) = calls(&site.creators) {
            writeln!(out, "    memory of {calls}")?;
        }
        if let Some(calls) = calls(&site.freed) {
            writeln!(out, "    touches again the memory freed by {calls}")?;
        }
    }
    if shown.iter().any(is_unknown) {
        writeln!(out, "{UNKNOWN}")?;
    }
    if sites.len() > shown.len() {
        let rest: u64 = sites[shown.len()..].iter().map(|site| site.faults).sum();
        let have = match sites.len() - shown.len() {
            1 => "1 further call site has".to_owned(),
            count => format!("{} further call sites have", grouped(count as u64)),
        };
        writeln!(out, " {have} {} faults.", grouped(rest))?;
    }
    Ok(())
}

/// Returns whether a caller is unknown: of `site`, or of a call that is printed for `site`.
fn is_unknown(site: &Site) -> bool {
    let printed = |calls: &[Creator]| calls.iter().take(CALLS).any(|call| call.function.is_none());
    site.function.is_none() || printed(&site.creators) || printed(&site.freed)
}

/// Describes the caller of `site`, and the change that saves the most.
fn described(site: &Site) -> String {
    let caller = match &site.caller {
        Some(caller) => format!("called by {}: ", short(short_name(caller))),
        None => String::new(),
    };
    let change = site.change.as_ref().map(|change| (&*change.action, change.saving));
    format!("{caller}{}{}", described_change(change), copies(site.copied))
}

/// Describes a change by its action and its saving in nanoseconds.
fn described_change(change: Option<(&str, f64)>) -> String {
    match change {
        Some((action, saving)) if saving >= PRINTED => {
            format!("{action} (predicted to save {} s)", fixed(saving / 1e9, 3))
        }
        Some(_) => "no change is worth it".to_owned(),
        None => "no change of this code helps".to_owned(),
    }
}

/// Describes the calls that created or freed the memory of a call site, the largest memory first,
/// if the calls are known.
fn calls(creators: &[Creator]) -> Option<String> {
    let (shown, others) = creators.split_at(creators.len().min(CALLS));
    let call = |creator: &Creator| format!("{}: {}", creator.label(), size(creator.bytes));
    let mut calls: Vec<_> = shown.iter().map(call).collect();
    if !others.is_empty() {
        let bytes = others.iter().map(|creator| creator.bytes).sum();
        calls.push(format!("{}: {}", plural(others.len() as u64, "further call"), size(bytes)));
    }
    (!calls.is_empty()).then(|| calls.join("; "))
}

/// Describes the pages that were copied after a fork, if there are any.
fn copies(copied: Copied) -> String {
    if copied == Copied::default() {
        return String::new();
    }
    format!(
        "; {} copied after a fork ({}): {} by parents and {} by children",
        plural(copied.total(), "page"),
        size(copied.total() * PAGE_SIZE),
        grouped(copied.by_parent),
        grouped(copied.by_child)
    )
}

/// Returns `label` with the columns of a label at most.
fn short(label: &str) -> String {
    shortened(label, COLUMNS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use faultless_trace::callers::Call;
    use faultless_trace::event::Function;

    #[test]
    fn copies_after_a_fork_are_described_by_process() {
        assert_eq!(copies(Copied::default()), "");
        let text = copies(Copied { by_parent: 700, by_child: 1024 });
        assert_eq!(
            text,
            "; 1724 pages copied after a fork (6 MiB): 700 by parents and 1,024 by children"
        );
    }

    #[test]
    fn change_below_the_printed_precision_is_not_worth_it() {
        assert_eq!(described_change(Some(("reuse", 2e6))), "reuse (predicted to save 0.002 s)");
        assert_eq!(described_change(Some(("reuse", 4e5))), "no change is worth it");
        assert_eq!(described_change(None), "no change of this code helps");
    }

    #[test]
    fn calls_beyond_the_largest_are_added_up() {
        let function = |name: &str| Function { name: name.into(), ..Function::default() };
        let creator = |(name, mib): (&str, u64)| Creator {
            call: Call::Mmap,
            function: Some(function(name)),
            line: 0,
            allocator: (name == "grow").then(|| function("malloc")),
            bytes: mib << 20,
        };
        let all = [("load", 9), ("grow", 5), ("a", 3), ("b", 2), ("c", 1)].map(creator);
        assert_eq!(calls(&[]), None);
        assert_eq!(calls(&all[..1]).as_deref(), Some("mmap in load: 9 MiB"));
        let want = "mmap in load: 9 MiB; mmap in grow, by malloc: 5 MiB; mmap in a: 3 MiB; \
                    2 further calls: 3 MiB";
        assert_eq!(calls(&all).as_deref(), Some(want));
    }
}
