//! The report on one screen.

pub mod next;
pub mod sites;

use super::causes;
use crate::error::CliError;
use crate::report::{Style, processes, table};
use faultless_analysis::advise::answer::{Answer, WORTH, is_size};
use faultless_analysis::advise::findings::Findings;
use faultless_analysis::advise::item::{Item, Open, size};
use faultless_analysis::advise::kernel_time::{RELIABLE, fault_limit};
use faultless_analysis::advise::once::Run;
use faultless_analysis::advise::time::spent;
use faultless_analysis::number::{fixed, grouped};
use std::io::Write;

/// The explanation of settings that depend on the host.
const TAKEN_BACK: &str = concat!(
    " The host of a virtual machine can take free memory back (free page reporting, a balloon), and\n",
    " returns it at the next touch, at a higher cost. `faultless advise --try -- PROGRAM` measures\n",
    " such a setting; a setting of the whole system also needs --sysfs."
);
/// Page walks from which a line is worth the reader's time: some milliseconds.
const MANY_WALKS: f64 = 1e6;
/// The share of faults on pages in a cache from which a line is worth the reader's time.
const MANY_WARM: f64 = 0.1;

/// Prints the report.
pub fn print(answer: &Answer<'_>, out: &mut dyn Write, style: Style) -> Result<(), CliError> {
    print_faults(answer, out)?;
    let time = spent(answer.findings, &answer.bounded());
    if let Some(table) = processes::table(&answer.processes, Some(time), style) {
        writeln!(out, "\n{table}")?;
    }
    sites::print(answer, out, style)?;
    let (worth, rest): (Vec<_>, Vec<_>) =
        answer.shown().into_iter().partition(|item| answer.saves(item));
    print_worth(answer, &worth, depending(answer, &rest), out, style)?;
    print_sizes(answer, out)?;
    print_rest(answer, rest, out)
}

/// Returns the number of items whose sign depends on the host, and which save enough at best.
fn depending(answer: &Answer<'_>, rest: &[&Item]) -> usize {
    let depends =
        |item: &&&Item| item.depends() && answer.worth(item.saving) && answer.worth(item.at_best);
    rest.iter().filter(depends).count()
}

/// Returns the line above the settings if none has a row; `depending` of them depend on the host.
fn headline(depending: usize) -> String {
    let share = format!("{:.0} % of the run", 100.0 * WORTH);
    match depending {
        0 => format!(" No setting of today's Linux is predicted to save {share}."),
        1 => format!(
            " No setting of today's Linux is sure to save {share}; one setting depends on the host, \
             see below."
        ),
        more => format!(
            " No setting of today's Linux is sure to save {share}; {more} settings depend on the \
             host, see below."
        ),
    }
}

/// Prints the items that are worth a row each.
fn print_worth(
    answer: &Answer<'_>,
    worth: &[&Item],
    depending: usize,
    out: &mut dyn Write,
    style: Style,
) -> Result<(), CliError> {
    if worth.is_empty() {
        writeln!(out, "\n{}", headline(depending))?;
    } else {
        let head = ["on today's Linux", "saves", "of the run", "unused memory"].map(str::to_owned);
        let mut table = table::numbers(&head, style);
        for item in worth {
            table::row(&mut table, cells(answer, item));
        }
        writeln!(out, "\n{table}\n")?;
        for item in worth {
            writeln!(out, " {}: {}", item.name, item.action)?;
            print_remarks(item, out)?;
        }
    }
    // No setting of today's Linux provides prefault by the kernel, so it has no row.
    if let Some(item) = answer.prefault.as_ref().filter(|item| answer.saves(item)) {
        let [name, saving, share, unused] = cells(answer, item);
        writeln!(
            out,
            " {name}, predicted to save {saving} ({share}, {unused} unused): {}",
            item.action
        )?;
        print_remarks(item, out)?;
    }
    Ok(())
}

/// Prints the remarks of `item`, a line for each.
fn print_remarks(item: &Item, out: &mut dyn Write) -> Result<(), CliError> {
    for remark in &item.remarks {
        writeln!(out, "   note: {remark}")?;
    }
    Ok(())
}

/// Prints the sizes of mTHP other than the best.
fn print_sizes(answer: &Answer<'_>, out: &mut dyn Write) -> Result<(), CliError> {
    let mut sizes = answer.items.iter().filter(|item| is_size(item));
    let best = sizes.next().is_some_and(|item| answer.saves(item));
    let sizes: Vec<_> = sizes.filter(|item| best && answer.saves(item)).collect();
    if !sizes.is_empty() {
        let text = |item: &&Item| {
            format!(
                "{} {} s ({})",
                item.name.replace("mTHP ", ""),
                fixed(item.saving / 1e9, 3),
                size(item.unused)
            )
        };
        writeln!(
            out,
            " other sizes of mTHP: {}",
            sizes.iter().map(text).collect::<Vec<_>>().join(", ")
        )?;
    }
    Ok(())
}

/// Prints the items that cost, depend on the host, have no prediction, or change little.
fn print_rest(answer: &Answer<'_>, rest: Vec<&Item>, out: &mut dyn Write) -> Result<(), CliError> {
    let (costly, little): (Vec<_>, Vec<_>) =
        rest.into_iter().partition(|item| item.saving < 0.0 && answer.worth(item.saving));
    let mut depends = false;
    for item in costly {
        if item.depends() {
            depends = true;
            writeln!(
                out,
                " depends: {} costs {:.3} s, and saves {:.3} s if the host has not taken the memory back\n   {}",
                item.name,
                -item.saving / 1e9,
                item.at_best / 1e9,
                item.action
            )?;
            continue;
        }
        writeln!(
            out,
            " do not: {} costs {:.3} s ({:.1} %)",
            item.name,
            -item.saving / 1e9,
            -100.0 * answer.share(item.saving)
        )?;
    }
    if depends {
        writeln!(out, "{TAKEN_BACK}")?;
    }
    for Open { name, action, why, .. } in &answer.open {
        writeln!(out, " not predicted: {name}: {action}\n   {why}")?;
    }
    if !little.is_empty() {
        let names: Vec<_> = little.iter().map(|item| &*item.name).collect();
        writeln!(
            out,
            " predicted to change less than {:.0} % of the run: {}",
            100.0 * WORTH,
            names.join(", ")
        )?;
    }
    Ok(())
}

/// Prints the current cost of the faults.
fn print_faults(answer: &Answer<'_>, out: &mut dyn Write) -> Result<(), CliError> {
    print_time(answer, out)?;
    print_kinds(answer.findings, out)?;
    causes::print(answer.findings, out)?;
    print_run(answer, out)?;
    print_page(answer, out)
}

/// Prints the time of the faults, and their number.
fn print_time(answer: &Answer<'_>, out: &mut dyn Write) -> Result<(), CliError> {
    let name = &answer.findings.name;
    let recorded = answer.findings.faults(answer.findings.census.faults());
    let measured = spent(answer.findings, &answer.costs);
    let spent = spent(answer.findings, &answer.bounded());
    writeln!(
        out,
        "\n {name}: {:.2} s of {:.2} s{} ({:.0} %) are spent in {} faults (predicted: number times cost);",
        spent / 1e9,
        answer.seconds,
        answer.elapsed.map_or(String::new(), |elapsed| {
            format!(" processor time ({elapsed:.2} s elapsed)")
        }),
        100.0 * answer.share(spent),
        grouped(answer.findings.expected_faults())
    )?;
    if measured > 1.05 * spent {
        writeln!(
            out,
            " At most: the measured cost of a fault was {:.1} times as much, more than the run spent{}. Savings are reduced to match.",
            measured / spent.max(1.0),
            if answer.plain.is_some_and(|run| fault_limit([&run]) < run.processor) {
                " in the kernel"
            } else {
                ""
            }
        )?;
    }
    if answer.findings.expected_faults() < recorded {
        writeln!(
            out,
            " {} were recorded, without huge pages; with the settings of huge pages on this host {} remain{}.",
            grouped(recorded),
            grouped(answer.findings.expected_faults()),
            if answer.findings.census.asks_for_huge {
                ", as the program requests huge pages (MADV_HUGEPAGE)"
            } else {
                ""
            }
        )?;
    }
    Ok(())
}

/// Prints the faults by cause.
fn print_kinds(findings: &Findings, out: &mut dyn Write) -> Result<(), CliError> {
    let census = &findings.census;
    if findings.small_pages == 1 {
        writeln!(
            out,
            " {} of them {} the second to eighth page of a sequence.",
            grouped(census.in_sequence),
            if census.in_sequence == 1 { "is" } else { "are" }
        )?;
    }
    let mut kinds = vec![
        (census.zeroed, "zero a page"),
        (census.zero_page, "map the zero page"),
        (census.copies, "copy a page or change its protection"),
        (census.shared, "zero a page of shared memory"),
        (census.file, "map a page of a file or of shared memory"),
    ];
    kinds.retain(|(count, _)| *count > 0);
    let kinds: Vec<_> = kinds
        .iter()
        .map(|(count, what)| format!("{} {what}", grouped(findings.faults(*count))))
        .collect();
    writeln!(out, " {}.", kinds.join(", "))?;
    if let Some(file) = findings.shmem.file.as_deref().filter(|_| census.shared > 0) {
        writeln!(
            out,
            " Huge pages of shared memory are set to `{}` here ({}).",
            findings.shmem.word,
            file.display()
        )?;
    }
    let warm = findings.discards.warm_share();
    if warm >= MANY_WARM {
        writeln!(
            out,
            " {:.0} % of the touched pages were freed shortly before, and are still in a cache of the \
             processor: their faults cost less.",
            100.0 * warm
        )?;
    }
    if let Some(walks) = findings.walks.filter(|walks| *walks >= MANY_WALKS) {
        writeln!(
            out,
            " About {:.0} million page walks (TLB misses), estimated by samples of accessed bits.",
            walks / 1e6
        )?;
    }
    let back = census.returned + census.discarded;
    if back > 0 {
        writeln!(
            out,
            " {} zero a page that the program had before and had returned to the kernel.",
            grouped(findings.faults(back))
        )?;
    }
    Ok(())
}

/// Prints the run without the recorder, and its differences from the recording.
fn print_run(answer: &Answer<'_>, out: &mut dyn Write) -> Result<(), CliError> {
    match answer.plain {
        Some(run) => writeln!(
            out,
            " Seconds are processor time of a run without the recorder: {:.2} s elapsed, {:.2} s in the kernel;\n the run had {} faults, with the settings of huge pages on this host.",
            run.wall,
            run.system,
            grouped(run.faults)
        )?,
        None if answer.elapsed.is_some() => writeln!(
            out,
            " Processor time is the time of the recorded processes, which includes the recorder's overhead."
        )?,
        None => writeln!(
            out,
            " The time of the run is the time of the recording, which includes the recorder's overhead."
        )?,
    }
    if answer.plain.is_none() {
        for note in answer.notes {
            writeln!(out, " note: {note}")?;
        }
    }
    if let Some(run) = answer.plain {
        if run.processor < RELIABLE {
            writeln!(
                out,
                " The part in the kernel is uncertain for so short a run: the timer divides the time by samples."
            )?;
        }
        if run.thp_off {
            writeln!(
                out,
                " The program disables huge pages for itself (PR_SET_THP_DISABLE): the settings of huge pages have no effect on it."
            )?;
        }
        if !run.status.success() {
            writeln!(
                out,
                " The run without the recorder, whose standard input is empty, failed ({}): its time and faults may be of other work.",
                run.status
            )?;
        }
        if let Some(why) = disagrees(answer.findings.expected_faults(), run) {
            writeln!(out, " {why}")?;
        }
        if run.ended > 0 {
            writeln!(
                out,
                " {} of its processes continued after the end of the program and were killed: their time is incomplete.",
                run.ended
            )?;
        }
    }
    Ok(())
}

/// Prints the cost of a page.
fn print_page(answer: &Answer<'_>, out: &mut dyn Write) -> Result<(), CliError> {
    let costs = &answer.costs;
    let alone = costs.quiet.touch;
    writeln!(
        out,
        "{}",
        describe_page(costs.page, alone, [costs.quiet.exception(), costs.path(), costs.zeroing])
    )?;
    let small_pages = answer.findings.small_pages;
    if small_pages > 1 {
        writeln!(
            out,
            " These are costs of 4 KiB of memory; a fault maps {} KiB, and costs {small_pages} \
             times as much.",
            4 * small_pages
        )?;
    }
    if costs.shadowed() {
        writeln!(
            out,
            " This is a virtual machine in which a first touch takes {:.1} µs, several times as \
             long as on hardware. Its host may\n shadow its page tables. On hardware savings are \
             smaller.",
            alone / 1e3
        )?;
    } else if costs.virtual_machine {
        writeln!(out, " This is a virtual machine; a first touch takes {:.1} µs.", alone / 1e3)?;
    }
    Ok(())
}

fn cells(answer: &Answer<'_>, item: &Item) -> [String; 4] {
    [
        item.name.clone(),
        format!("{} s", fixed(item.saving / 1e9, 3)),
        format!("{} %", fixed(100.0 * answer.share(item.saving), 1)),
        size(item.unused),
    ]
}

/// The smallest difference in faults that is reported, of all faults and as a number.
const DISAGREES: (f64, u64) = (0.2, 500);

/// Explains why the faults of a run without the recorder differ from the number expected from the
/// recording.
fn disagrees(expected: u64, run: Run) -> Option<String> {
    let (share, few) = DISAGREES;
    let off = expected.abs_diff(run.faults);
    let populated = if run.counts_populated { ", or populated pages are counted" } else { "" };
    (off >= few && off as f64 > share * expected.max(run.faults) as f64).then(|| {
        let why = if run.faults < expected {
            "its standard input was empty, the program behaves differently under the recorder, or the kernel collapses its memory to huge pages".to_owned()
        } else {
            format!("its standard input was empty, or the program behaves differently under the recorder{populated}")
        };
        format!(
            "Predictions are uncertain: {} faults are expected from the recording, and the run without the recorder had {}: {why}.",
            grouped(expected),
            grouped(run.faults)
        )
    })
}

/// Describes the cost of a zeroed page, of a first touch `alone`, and its parts: nanoseconds each.
fn describe_page(page: f64, alone: f64, parts: [f64; 3]) -> String {
    let [page, alone] = [page, alone].map(|ns| ns / 1e3);
    let [exception, path, zeroing] = parts.map(|ns| ns / 1e3);
    let parts = format!("exception {exception:.2}, kernel path {path:.2}, zeroing {zeroing:.2}");
    if page >= alone && exception <= 0.0 {
        return format!(
            " A zeroed page costs {page:.2} µs here, and a first touch alone {alone:.2} µs. Its parts are \
             unknown: a populated page cost as much as\n a touched page, because other programs ran \
             during the measurement. Savings are uncertain."
        );
    }
    if page >= alone {
        let rest = page - alone;
        return format!(
            " A zeroed page costs {page:.2} µs here: {parts}; cold caches and unmapping {rest:.2}."
        );
    }
    format!(
        " A zeroed page costs {page:.2} µs here, less than a first touch alone ({alone:.2} µs: \
         {parts}): other programs\n ran during the measurement, and savings are uncertain."
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use faultless_analysis::advise::costs::Costs;
    use faultless_analysis::advise::program::Program;
    use faultless_analysis::advise::sysfs::{Mode, Shmem, Sizes};
    use faultless_analysis::calibrate::faults::Faults;
    use faultless_analysis::replay::Source;
    use faultless_trace::recordings;

    /// Returns the costs of a host with round figures.
    pub(super) fn costs() -> Costs {
        Costs {
            quiet: Faults { touch: 1500.0, populate: 1000.0, call: 100.0 },
            zeroing: 200.0,
            copying: 400.0,
            page: 2300.0,
            populated: 1300.0,
            pretouched: 2000.0,
            mapping: 500.0,
            folios: Default::default(),
            shared: [Some(3000.0), None],
            virtual_machine: true,
            fresh: None,
            walk: None,
            thp: 9,
        }
    }

    #[test]
    fn page_cheaper_than_its_parts_is_reported_as_uncertain() {
        let parts = [1000.0, 500.0, 500.0];
        let text = describe_page(2500.0, 2000.0, parts);
        assert!(
            text.contains("costs 2.50 µs here: exception 1.00, kernel path 0.50, zeroing 0.50")
        );
        assert!(text.ends_with("cold caches and unmapping 0.50."), "{text}");
        // The parts exceed the first touch, and do not add up.
        let text = describe_page(1370.0, 1300.0, [0.0, 2000.0, 160.0]);
        assert!(text.contains("costs 1.37 µs here") && text.contains("are uncertain"), "{text}");
        assert!(!text.contains("2.00"), "{text}");
        let text = describe_page(500.0, 2000.0, parts);
        assert!(text.contains("0.50 µs here, less than a first touch alone (2.00 µs: "), "{text}");
    }

    /// Returns a run with this kernel time, in seconds.
    fn run(system: f64, faults: u64) -> Run {
        Run {
            wall: 1.2,
            processor: 1.1,
            system,
            faults,
            major: 0,
            read: 0,
            counts_populated: false,
            thp_off: false,
            status: std::process::ExitStatus::default(),
            ended: 0,
        }
    }

    #[test]
    fn run_with_unexpected_faults_gets_a_remark() {
        assert_eq!(disagrees(20_000, run(1.0, 19_000)), None);
        assert_eq!(disagrees(100, run(1.0, 300)), None);
        let fewer = disagrees(20_000, run(1.0, 1_000)).expect("far off");
        assert!(
            fewer.contains("20,000 faults are expected") && fewer.contains("huge pages"),
            "{fewer}"
        );
        // A filter such as `sort` reads its input, and has no work without input.
        assert!(fewer.contains("its standard input was empty"), "{fewer}");
        let populated = Run { counts_populated: true, ..run(1.0, 90_000) };
        assert!(disagrees(20_000, populated).expect("far off").contains("populated"));
    }

    #[test]
    fn other_sizes_have_a_line_only_if_they_save() {
        let recording = recordings::find("python").expect("a bundled recording");
        let source = Source::shipped(recording).expect("a valid recording");
        let mode = |order| (order, Mode::Never);
        let sizes = Sizes { all: Some(Mode::Madvise), sizes: [2, 3, 4].map(mode).to_vec(), thp: 9 };
        let findings = Findings::of(&source, Program::default(), sizes, Shmem::NONE, &());
        let findings = findings.expect("a valid recording");
        let mut answer = Answer::new(&findings, costs(), None, &source.trace);
        answer.items.retain(is_size);
        assert!(answer.items.len() >= 3, "{:?}", answer.items);
        let some = answer.seconds * 1e9 / 10.0;
        let printed = |savings: [f64; 3], answer: &mut Answer<'_>| {
            answer.items.truncate(3);
            answer.items.iter_mut().zip(savings).for_each(|(item, saving)| item.saving = saving);
            let mut out = Vec::new();
            print_sizes(answer, &mut out).expect("memory");
            String::from_utf8(out).expect("text")
        };
        assert_eq!(printed([0.0; 3], &mut answer), "");
        assert_eq!(printed([some, 0.0, 0.0], &mut answer), "");
        let text = printed([some, some / 2.0, 0.0], &mut answer);
        assert!(text.contains("other sizes of mTHP") && !text.contains(", "), "{text}");
    }

    #[test]
    fn settings_that_depend_on_the_host_are_counted_and_explained() {
        let recording = recordings::find("python").expect("a bundled recording");
        let source = Source::shipped(recording).expect("a valid recording");
        let sizes = Sizes { all: Some(Mode::Madvise), sizes: vec![(4, Mode::Never)], thp: 9 };
        let findings = Findings::of(&source, Program::default(), sizes, Shmem::NONE, &());
        let findings = findings.expect("a valid recording");
        let mut answer = Answer::new(&findings, costs(), None, &source.trace);
        let some = answer.seconds * 1e9 / 10.0;
        answer.items.truncate(1);
        let item = &mut answer.items[0];
        (item.name, item.action) = ("shared memory on THP".into(), "echo always > file".into());
        let printed = |saving, at_best, answer: &mut Answer<'_>| {
            (answer.items[0].saving, answer.items[0].at_best) = (saving, at_best);
            let mut out = Vec::new();
            print(answer, &mut out, Style { terminal: false, width: 100 }).expect("memory");
            String::from_utf8(out).expect("text")
        };
        let text = printed(-some, some, &mut answer);
        for part in
            ["one setting depends on the host", "echo always > file", " The host of a virtual"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        let text = printed(-some, -some, &mut answer);
        assert!(text.contains("is predicted to save 1 % of the run."), "{text}");
        assert!(!text.contains("free page reporting"), "{text}");
    }

    #[test]
    fn kernel_part_of_a_short_run_is_reported_as_uncertain() {
        let recording = recordings::find("python").expect("a bundled recording");
        let source = Source::shipped(recording).expect("a valid recording");
        let findings = Findings::of(&source, Program::default(), Sizes::none(9), Shmem::NONE, &());
        let findings = findings.expect("a valid recording");
        for (processor, expected) in [(0.05, true), (1.1, false)] {
            let run = Run { processor, ..run(0.03, 24_000) };
            let answer = Answer::new(&findings, costs(), Some(run), &source.trace);
            let mut out = Vec::new();
            print_run(&answer, &mut out).expect("memory");
            let text = String::from_utf8(out).expect("text");
            assert_eq!(text.contains("uncertain for so short a run"), expected, "{text}");
        }
    }

    #[test]
    fn prefault_by_the_kernel_is_reported_without_other_advice() {
        let recording = recordings::find("python").expect("a bundled recording");
        let source = Source::shipped(recording).expect("a valid recording");
        let sizes = Sizes { all: Some(Mode::Madvise), sizes: vec![(4, Mode::Never)], thp: 9 };
        let program = Program { glibc: true, ..Program::default() };
        let findings = Findings::of(&source, program, sizes, Shmem::NONE, &());
        let findings = findings.expect("a valid recording");
        let mut answer = Answer::new(&findings, costs(), None, &source.trace);
        let printed = |answer: &Answer<'_>| {
            let mut out = Vec::new();
            print(answer, &mut out, Style { terminal: false, width: 100 }).expect("memory");
            String::from_utf8(out).expect("text")
        };
        let (none, kernel) =
            ("No setting of today's Linux", " prefault by the kernel, predicted to save ");
        let text = printed(&answer);
        assert!(text.contains(kernel) && !text.contains(none), "{text}");
        assert!(!text.contains("| prefault by the kernel"), "{text}");
        answer.items.clear();
        let text = printed(&answer);
        assert!(text.contains(kernel) && text.contains(none), "{text}");
        answer.prefault.as_mut().expect("above").saving = 0.0;
        let text = printed(&answer);
        assert!(!text.contains(kernel) && text.contains(none), "{text}");
    }
}
