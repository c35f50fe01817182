//! The causes of faults beyond their kinds: allocators that return memory, forks, and stalls of the
//! whole system.

use crate::error::CliError;
use faultless_analysis::advise::cold;
use faultless_analysis::advise::findings::Findings;
use faultless_analysis::advise::item::size;
use faultless_analysis::number::{fixed, grouped, plural};
use std::io::Write;

/// Pages of a cause below which a line is not worth the reader's time.
const FEW: u64 = 1000;

/// Prints the causes.
///
/// # Errors
/// The output is closed.
pub fn print(findings: &Findings, out: &mut dyn Write) -> Result<(), CliError> {
    print_allocators(findings, out)?;
    print_forks(findings, out)?;
    print_cold(findings, out)?;
    print_stalls(findings, out)
}

/// Prints the allocators, and the memory that came back.
fn print_allocators(findings: &Findings, out: &mut dyn Write) -> Result<(), CliError> {
    let Findings { program, discards, .. } = findings;
    let names: Vec<_> = program.others.iter().map(ToString::to_string).collect();
    if !names.is_empty() {
        writeln!(out, " The allocator is {}.", names.join(", or "))?;
    }
    if discards.back() >= FEW {
        let freed = |name, calls, pages, back| {
            format!(
                "{} of {name} freed {}, and {} of them came back",
                plural(calls, "call"),
                plural(pages, "page"),
                grouped(back)
            )
        };
        let mut parts = Vec::new();
        if discards.calls > 0 {
            parts.push(freed("MADV_DONTNEED", discards.calls, discards.pages, discards.refilled));
        }
        if discards.unmaps > 0 {
            parts.push(freed("munmap", discards.unmaps, discards.unmapped, discards.remapped));
        }
        writeln!(out, " {}.", parts.join("; "))?;
        if discards.interrupts > 0 {
            writeln!(
                out,
                " These calls interrupted other CPUs {} at most (TLB shootdowns).",
                plural(discards.interrupts, "time")
            )?;
        }
    }
    Ok(())
}

/// Prints the forks, their time, and the copies afterwards.
fn print_forks(findings: &Findings, out: &mut dyn Write) -> Result<(), CliError> {
    let forks = &findings.forks;
    let Some(cost) = findings.fork_cost.filter(|_| forks.most >= FEW) else { return Ok(()) };
    writeln!(
        out,
        " {} copied {} entries of page tables; the largest fork has {}, and is predicted to take {:.1} ms of processor time.\n {} were copied afterwards: {} by parents and {} by children. {} of children stayed shared.",
        plural(forks.forks, "fork"),
        grouped(forks.entries),
        grouped(forks.most),
        cost.time(forks.most) / 1e6,
        plural(forks.copied.total(), "page"),
        grouped(forks.copied.by_parent),
        grouped(forks.copied.by_child),
        plural(forks.still_shared, "page")
    )?;
    let huge = forks.huge[0];
    if let (Some(cost), Some(time)) = (cost.huge, cost.time_of_huge(huge.most))
        && huge.most.huge > 0
    {
        writeln!(
            out,
            " With THP for all memory the fork of the most huge pages, {}, is predicted to take {:.1} ms, and each of {} to a shared huge page {:.1} µs more, for the split.",
            grouped(huge.most.huge),
            time / 1e6,
            plural(huge.splits, "first store"),
            cost.split / 1e3
        )?;
    }
    Ok(())
}

/// Prints the reads of a cold start, and the settings that save elapsed time.
fn print_cold(findings: &Findings, out: &mut dyn Write) -> Result<(), CliError> {
    let Some(cost) = &findings.cold_cost else { return Ok(()) };
    let start = cold::start(&findings.files, cost, findings.file_cost);
    let Some(start) = start else { return Ok(()) };
    writeln!(
        out,
        " With a cold page cache the mapped files are predicted to need {}.",
        start.describe()
    )?;
    let worth: Vec<_> = start.settings.iter().filter(|it| start.is_worth(it)).collect();
    if worth.is_empty() {
        writeln!(
            out,
            "   No setting saves 10 % of this time: neither read-ahead nor populated mappings."
        )?;
    }
    for setting in worth {
        let open = &setting.open;
        let saving = format!("predicted to save {} s", fixed(setting.saving.middle / 1e9, 3));
        let interval = match setting.saving.interval {
            Some([low, high]) => {
                format!(" ({} to {} s)", fixed(low / 1e9, 3), fixed(high / 1e9, 3))
            }
            None => String::new(),
        };
        if !setting.is_sure() {
            writeln!(
                out,
                "   {}: {saving} of elapsed time, not beyond the noise of the measured reads{interval}",
                open.name
            )?;
            continue;
        }
        let more = match setting.more {
            0 => String::new(),
            more @ 1.. => format!("; {} more in the page cache", size(more.unsigned_abs())),
            fewer => format!("; {} less in the page cache", size(fewer.unsigned_abs())),
        };
        writeln!(
            out,
            "   {}: {saving}{interval} of elapsed time: {}{more}\n     {}",
            open.name, open.why, open.action
        )?;
    }
    Ok(())
}

/// Prints the events of the whole system during the run.
fn print_stalls(findings: &Findings, out: &mut dyn Write) -> Result<(), CliError> {
    let Some(stalls) = findings.stalls else { return Ok(()) };
    let mut counts = vec![
        (stalls.major, "faults read from disk (a cold page cache)"),
        (stalls.compaction, "stalls for compaction"),
        (stalls.fallback, "faults found no free huge page"),
        (stalls.collapsed, "huge pages made by khugepaged"),
        (stalls.shootdowns, "interrupts for TLB flushes"),
    ];
    counts.retain(|(count, _)| *count > 0);
    if !counts.is_empty() {
        let counts: Vec<_> =
            counts.iter().map(|(count, what)| format!("{} {what}", grouped(*count))).collect();
        writeln!(out, " The whole system during the run: {}.", counts.join(", "))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use faultless_analysis::advise::cold_cost::{ColdCost, ReadTimes, Sequence};
    use faultless_analysis::advise::forks::{EntryCost, ForkCost, HugeCost};
    use faultless_analysis::advise::linked::Linked;
    use faultless_analysis::advise::program::Program;
    use faultless_analysis::advise::stalls::Stalls;
    use faultless_analysis::advise::sysfs::{Shmem, Sizes};
    use faultless_analysis::replay::Source;
    use faultless_trace::discard::Discards;
    use faultless_trace::files::{Files, Reads};
    use faultless_trace::fork::{Entries, Forks, HugeForks};
    use faultless_trace::recordings;

    #[test]
    fn each_cause_has_a_line() {
        let recording = recordings::find("sort").expect("a bundled recording");
        let source = Source::shipped(recording).expect("a valid recording");
        let sizes = Sizes::none(9);
        let mut findings = Findings::of(&source, Program::default(), sizes, Shmem::NONE, &())
            .expect("a valid recording");
        let printed = |findings: &Findings| {
            let mut out = Vec::new();
            print(findings, &mut out).expect("memory");
            String::from_utf8(out).expect("text")
        };
        findings.discards = Discards::default();
        findings.forks = Forks::default();
        assert_eq!(printed(&findings), "");
        findings.program.others = vec![Linked::Gperftools];
        findings.discards = Discards {
            calls: 2,
            pages: 1500,
            refilled: 1200,
            interrupts: 6,
            ..Discards::default()
        };
        let most = Entries { huge: 9, single: 392, split: 0 };
        let huge = HugeForks { splits: 7, most, ..HugeForks::default() };
        let most = 5000;
        findings.forks =
            Forks { forks: 1, entries: most, most, huge: [huge; 2], ..Forks::default() };
        let of = |copy| EntryCost { copy, removal: 0.0 };
        let (entry, split_entry) = (of(20_000.0), of(10.0));
        let huge = Some(HugeCost { entry, split_entry, split: 4500.0 });
        findings.fork_cost = Some(ForkCost { base: 1e5, entry: of(100.0), huge });
        findings.stalls = Some(Stalls { major: 3, ..Stalls::default() });
        let reads = |around, pages| Reads { around, pages, ..Reads::default() };
        findings.files = Files {
            data_pages: 16_384,
            data_used: 200,
            cold: [reads(200, 6400), reads(200, 25_600), reads(60, 16_384), reads(8, 16_384)],
            ..Files::default()
        };
        let times = ReadTimes {
            read: [2e5, 4e5, 8e5, 3e6],
            around: 4e5,
            single: 1e5,
            in_sequence: Sequence::steady(1e3),
            populated: Sequence::steady(1e4),
        };
        let setting = Some("/sys/x/read_ahead_kb".into());
        findings.cold_cost = Some(ColdCost { rounds: vec![times; 6], now: 1, setting });
        findings.file_cost = None;
        let text = printed(&findings);
        for part in [
            "The allocator is tcmalloc of gperftools.",
            "2 calls of MADV_DONTNEED freed 1500 pages, and 1,200 of them came back",
            "interrupted other CPUs 6 times at most",
            "1 fork copied 5,000 entries of page tables",
            "predicted to take 0.6 ms of processor time",
            "are predicted to need 200 reads (0 in sequence) of 100 MiB in sum, 0.080 s of elapsed",
            "read-ahead 8 MiB: predicted to save 0.056 s (0.056 to 0.056 s) of elapsed time: 8 reads \
             of 64 MiB in sum; 36 MiB less in the page cache",
            "echo 8192 > /sys/x/read_ahead_kb",
            "the fork of the most huge pages, 9, is predicted to take 0.3 ms, and each of 7 first",
            "4.5 µs more, for the split",
            "during the run: 3 faults read from disk (a cold page cache).",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("populate file mappings"), "costs 0.084 s: {text}");
        assert!(!text.contains("0 calls of munmap"), "{text}");
        let all = Discards { unmaps: 2, unmapped: 3000, remapped: 2500, ..Discards::default() };
        let before = std::mem::replace(&mut findings.discards, all);
        let text = printed(&findings);
        let want = " 2 calls of munmap freed 3000 pages, and 2,500 of them came back.\n 1 fork";
        assert!(text.contains(want) && !text.contains("MADV_DONTNEED"), "{text}");
        findings.discards = before;
        let cost = findings.cold_cost.as_mut().expect("above");
        let times = ReadTimes { read: [1e6; 4], around: 1e6, ..times };
        (cost.now, cost.rounds) = (3, vec![times; 6]);
        let text = printed(&findings);
        assert!(text.contains("No setting saves 10 % of this time"), "{text}");
        // In three rounds of six, a populated mapping takes longer.
        let cost = findings.cold_cost.as_mut().expect("above");
        let populated = [1e2, 1e2, 1e2, 6e2, 6e2, 6e2];
        let round = |page| ReadTimes { populated: Sequence::steady(page), read: [1e6; 4], ..times };
        cost.rounds = populated.map(round).to_vec();
        let text = printed(&findings);
        let noise = "populate file mappings: predicted to save 0.002 s of elapsed time, not beyond the \
                     noise of the measured reads";
        assert!(text.contains(noise), "{text}");
    }
}
