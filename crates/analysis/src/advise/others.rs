//! Settings of jemalloc, mimalloc and tcmalloc: freed memory that they return to the kernel and use
//! again, huge pages, and arenas.

use super::costs::Costs;
use super::findings::Findings;
use super::item::{Apply, Item, Open};
use super::linked::{EAGER, Linked};
use super::named::{self, DELAY};
use super::sysfs::Mode;
use super::time::{folio_saving, remark, touch_time};
use super::{commit, metadata, retain};
use crate::number::{grouped, plural};
use faultless::PAGE_SIZE;
use faultless_trace::Trace;
use faultless_trace::anticipate::folio::{Folios, folios_of};
use faultless_trace::discard::AGES;
use faultless_trace::event::{Backing, Event, Kind};
use faultless_trace::plan::PlanError;

const MADV_HUGEPAGE: u32 = 14;
const MAP_STACK: u32 = 0x2_0000;
/// Threads from which a limit of arenas is worth a line.
const THREADS: usize = 4;

/// Returns the folios if the allocator requests huge pages of `huge` pages for its mappings, with
/// the orders `all` for all memory and `asked` for memory with a request.
///
/// # Errors
/// The trace does not pass [`Trace::check`].
pub fn huge_arenas(
    trace: &Trace,
    huge: u64,
    all: &[u8],
    asked: &[u8],
) -> Result<Folios, PlanError> {
    folios_of(trace, requesting(trace, huge), all, asked)
}

/// Returns the events of a program whose allocator requests huge pages for each mapping of at least
/// a huge page, of `huge` pages.
fn requesting(trace: &Trace, huge: u64) -> impl Iterator<Item = Event> {
    trace.events.iter().flat_map(move |event| {
        let request = match event.kind {
            Kind::Map { start, len, flags, backing: Backing::Anon, .. }
                if flags & MAP_STACK == 0 && len >= huge * PAGE_SIZE =>
            {
                let kind = Kind::Advise { start, len, advice: MADV_HUGEPAGE };
                Some(Event { kind, ..event })
            }
            _ => None,
        };
        [event].into_iter().chain(request)
    })
}

/// Returns the predicted items.
pub fn predicted(findings: &Findings, costs: &Costs) -> Vec<Item> {
    let mut items = Vec::new();
    for linked in &findings.program.others {
        items.extend(keeps(linked, findings, costs));
        items.extend(later(linked, findings, costs));
        items.extend(huge(linked, findings, costs));
        items.extend(retain::predicted(linked, findings, costs));
        items.extend(commit::predicted(linked, findings, costs));
    }
    items.extend(metadata::predicted(findings, costs));
    items
}

/// The allocator keeps freed memory.
fn keeps(linked: &Linked, findings: &Findings, costs: &Costs) -> Option<Item> {
    let purged = is_purged(linked, findings) || retain::is_off(linked, findings);
    let apply = named::keeps(linked).filter(|_| !purged)?;
    let discards = findings.discards;
    let refilled = discards.refilled as f64;
    (discards.calls > 0).then(|| Item {
        name: format!("{} keeps memory", short(linked)),
        action: format!(
            "{} spares {} of MADV_DONTNEED, and {} faults on their pages",
            shown(&apply),
            plural(discards.calls, "call"),
            grouped(discards.refilled)
        ),
        saving: refilled * touch_time(findings, costs) + discards.calls as f64 * costs.mapping,
        spared: Some(findings.spared(refilled * findings.single())),
        unused: discards.peak_free * PAGE_SIZE,
        apply,
        at_best: 0.0,
        remarks: vec!["memory that the program no longer uses stays resident; interrupts to other CPUs are not counted"],
    })
}

/// Returns whether mimalloc already waits [`DELAY`] before it returns free pages: by a variable, or
/// in version 3 by default.
fn waits(linked: &Linked, findings: &Findings) -> bool {
    let Linked::Mimalloc { delay: Some(variable), eager, .. } = linked else { return false };
    let set = findings.program.variables.get(variable);
    match set.and_then(|value| value.parse::<i64>().ok()) {
        // A negative value keeps all pages.
        Some(set) => set < 0 || set.unsigned_abs() >= DELAY,
        None => *eager == EAGER[2..],
    }
}

/// mimalloc returns free pages later.
fn later(linked: &Linked, findings: &Findings, costs: &Costs) -> Option<Item> {
    let apply = named::delay(linked, DELAY).filter(|_| !waits(linked, findings))?;
    let discards = findings.discards;
    let at = AGES.iter().position(|age| *age == DELAY * 1000)?;
    let spared = discards.refilled_within[at];
    // A page that comes back is one of those that a call frees.
    let calls = discards.calls as f64 * spared as f64 / discards.pages.max(1) as f64;
    (spared > 0).then(|| Item {
        name: "mimalloc returns memory later".into(),
        action: format!(
            "{} spares {} faults on pages that came back within this time",
            shown(&apply),
            grouped(spared)
        ),
        saving: spared as f64 * touch_time(findings, costs) + calls * costs.mapping,
        spared: Some(findings.spared(spared as f64 * findings.single())),
        unused: discards.peak_free * PAGE_SIZE,
        apply,
        at_best: 0.0,
        remarks: vec!["memory that the program no longer uses stays resident for this time"],
    })
}

/// Returns whether mimalloc commits at least half of the memory on demand. It requests huge pages
/// only for memory that it commits at once.
fn commits_in_parts(linked: &Linked, findings: &Findings) -> bool {
    let committed = 2 * findings.commits.pages;
    matches!(linked, Linked::Mimalloc { .. })
        && committed > 0
        && committed >= findings.without.outcome.peak_resident
}

/// The allocator requests huge pages.
fn huge(linked: &Linked, findings: &Findings, costs: &Costs) -> Option<Item> {
    let apply = named::huge(linked).filter(|_| !commits_in_parts(linked, findings))?;
    let with = findings.arenas_huge.as_ref()?;
    let now = &findings.now;
    // A request has no effect if all memory gets huge pages.
    let permitted = findings.sizes.thp_mode() == Mode::Madvise;
    (permitted && with.mapped[usize::from(findings.sizes.thp)] > 0).then(|| Item {
        name: format!("{} on THP", short(linked)),
        action: shown(&apply),
        saving: folio_saving(findings, now, with, costs),
        spared: Some(findings.fewer(now, with)),
        unused: with.outcome.peak_untouched.saturating_sub(now.outcome.peak_untouched) * PAGE_SIZE,
        apply,
        at_best: 0.0,
        remarks: vec![remark(costs)],
    })
}

/// Returns the advice without a prediction.
pub fn open(findings: &Findings) -> Vec<Open> {
    let mut out = Vec::new();
    for linked in &findings.program.others {
        match linked {
            Linked::Jemalloc { variable, .. } => {
                jemalloc(variable, linked, findings, &mut out);
                out.extend(retain::open(linked, findings));
            }
            Linked::Gperftools if findings.sizes.thp_mode() == Mode::Madvise => {
                out.push(none(
                    "tcmalloc on THP",
                    "gperftools does not request huge pages; TCMALLOC_MEMFS_MALLOC_PATH needs a mounted hugetlbfs with reserved pages",
                ));
            }
            Linked::Google if findings.discards.calls > 0 => out.push(none(
                "tcmalloc keeps memory",
                "the program itself limits the release of memory, by MallocExtension::SetBackgroundReleaseRate; GLIBC_TUNABLES have no effect, and the allocator already fills and releases whole huge pages",
            )),
            _ => {}
        }
    }
    out.extend(metadata::open(findings));
    out
}

/// Returns whether the program itself requests the allocator to return memory.
fn is_purged(linked: &Linked, findings: &Findings) -> bool {
    findings.program.purges && matches!(linked, Linked::Jemalloc { .. })
}

/// Adds the advice for jemalloc.
fn jemalloc(variable: &str, linked: &Linked, findings: &Findings, out: &mut Vec<Open>) {
    let settings = |text: &str| Apply::environment([(variable, text.to_owned())]);
    let threads = findings.threads;
    if threads >= THREADS {
        let apply = settings("narenas:1");
        out.push(Open {
            name: "fewer jemalloc arenas".into(),
            action: shown(&apply),
            why: format!(
                "{threads} threads use up to 4 arenas for each CPU, each with its own free pages; \
                 threads that share an arena reuse freed pages of other threads and contend for \
                 its lock: a recording of faults shows neither"
            ),
            apply,
        });
    }
    if is_purged(linked, findings)
        && findings.discards.refilled > 0
        && let Some(apply) = named::keeps(linked)
    {
        out.push(Open {
            name: "jemalloc keeps memory".into(),
            action: shown(&apply),
            why: format!(
                "{} faults are on pages that were returned. The program itself requests jemalloc \
                 to return memory (arena.purge), as Redis does after FLUSHALL, and no setting \
                 prevents these calls",
                grouped(findings.discards.refilled)
            ),
            apply,
        });
    }
    let decays = matches!(linked, Linked::Jemalloc { decays: true, .. });
    if decays && findings.discards.calls > 0 {
        let apply = settings("background_thread:true");
        out.push(Open {
            name: "jemalloc background thread".into(),
            action: shown(&apply),
            why: "a thread of its own returns memory: the calls take as long, and no longer delay \
                  the program's threads"
                .into(),
            apply,
        });
    }
}

/// Returns the statement that no setting helps.
fn none(name: &str, why: &str) -> Open {
    Open {
        name: name.into(),
        action: "no setting helps".into(),
        why: why.into(),
        apply: Apply::Nothing,
    }
}

/// Returns the name of an allocator for rows.
fn short(linked: &Linked) -> &'static str {
    match linked {
        Linked::Jemalloc { .. } => "jemalloc",
        Linked::Mimalloc { .. } => "mimalloc",
        Linked::Gperftools | Linked::Google => "tcmalloc",
    }
}

/// Returns variables in the form of a shell.
pub fn shown(apply: &Apply) -> String {
    let Apply::Environment(variables) = apply else { return String::new() };
    let words = variables.iter().map(|(name, value)| format!("{name}={value}"));
    words.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::super::costs::tests::costs;
    use super::super::items::tests::{find, findings, sizes};
    use super::super::time::folio_time;
    use super::*;
    use faultless_trace::anticipate::folio::THP;
    use faultless_trace::discard::Discards;
    use faultless_trace::recordings;

    fn rust() -> Linked {
        let variable = "_RJEM_MALLOC_CONF".to_owned();
        Linked::Jemalloc { variable, version: None, decays: true, huge: true, retains: true }
    }

    /// Returns a program with these allocators, 5 calls, and 3,000 pages that come back.
    fn with(others: Vec<Linked>) -> Findings {
        let mut findings = findings("python", sizes(Mode::Madvise));
        findings.discards =
            Discards { calls: 5, refilled: 3000, peak_free: 700, ..Discards::default() };
        findings.program.others = others;
        findings.arenas_huge = None;
        // A small heap, whose metadata is not worth a line.
        findings.now.outcome.faults = findings.now.mapped[0].min(1000);
        findings.now.mapped[0] = findings.now.outcome.faults;
        findings
    }

    #[test]
    fn pages_that_come_back_soon_are_spared_by_a_longer_delay() {
        let delay = Some("MIMALLOC_PURGE_DELAY");
        let (purges, decommits, allows, requests) = (true, false, true, false);
        let eager = Vec::new();
        let mut findings =
            with(vec![Linked::Mimalloc { purges, decommits, allows, requests, delay, eager }]);
        findings.discards.pages = 4000;
        let names = |findings: &Findings| {
            let items = predicted(findings, &costs());
            items.into_iter().map(|item| item.name).collect::<Vec<_>>()
        };
        assert_eq!(names(&findings), ["mimalloc keeps memory"]);
        findings.discards.refilled_within = [100, 200, 2000, 3000];
        let items = predicted(&findings, &costs());
        let got = find(&items, "mimalloc returns memory later");
        // Half of the freed pages come back within one second.
        assert_eq!(got.saving, 2000.0 * 2300.0 + 5.0 * 0.5 * 500.0);
        assert_eq!((got.spared, got.unused), (Some(2000.0), 700 * PAGE_SIZE));
        let value = "1000".to_owned();
        assert_eq!(got.apply, Apply::environment([("MIMALLOC_PURGE_DELAY", value)]));
        for (set, advised) in [("-1", false), ("1000", false), ("5", true), ("", true)] {
            findings.program.variables.set("MIMALLOC_PURGE_DELAY", set);
            assert_eq!(names(&findings).len(), if advised { 2 } else { 1 }, "{set}");
        }
        // Version 3 waits by default.
        let Some(Linked::Mimalloc { eager, .. }) = findings.program.others.first_mut() else {
            panic!("mimalloc")
        };
        *eager = EAGER[2..].to_vec();
        assert_eq!(names(&findings), ["mimalloc keeps memory"]);
    }

    #[test]
    fn kept_memory_saves_the_faults_that_come_back() {
        let mut findings = with(vec![rust()]);
        let items = predicted(&findings, &costs());
        let got = find(&items, "jemalloc keeps memory");
        assert_eq!(got.saving, 3000.0 * 2300.0 + 5.0 * 500.0);
        assert_eq!((got.spared, got.unused), (Some(3000.0), 700 * PAGE_SIZE));
        let value = "dirty_decay_ms:-1,muzzy_decay_ms:-1,lg_extent_max_active_fit:20".to_owned();
        assert_eq!(got.apply, Apply::environment([("_RJEM_MALLOC_CONF", value)]));
        findings.discards = Discards::default();
        assert!(predicted(&findings, &costs()).is_empty());
        // glibc has other settings.
        assert!(predicted(&with(Vec::new()), &costs()).is_empty());
    }

    #[test]
    fn allocator_requests_huge_pages_for_its_mappings() {
        let trace = recordings::find("redis").expect("bundled").trace().expect("valid");
        let requested = huge_arenas(&trace, 512, &[], &[THP]).expect("valid");
        assert!(requested.mapped[usize::from(THP)] > 0, "{requested:?}");
        let none = huge_arenas(&trace, 512, &[], &[]).expect("valid");
        assert_eq!(none.mapped[usize::from(THP)], 0);
        let mut findings = with(vec![rust()]);
        findings.now = none;
        findings.arenas_huge = Some(requested);
        let items = predicted(&findings, &costs());
        let got = find(&items, "jemalloc on THP");
        assert_eq!(got.saving, folio_time(&none, &costs()) - folio_time(&requested, &costs()));
        assert!(got.spared.is_some_and(|spared| spared > 0.0));
        findings.sizes = sizes(Mode::Always);
        let names: Vec<_> =
            predicted(&findings, &costs()).into_iter().map(|item| item.name).collect();
        assert_eq!(names, ["jemalloc keeps memory"]);
    }

    #[test]
    fn memory_committed_in_parts_gets_no_huge_pages_by_request() {
        let trace = recordings::find("redis").expect("bundled").trace().expect("valid");
        let (purges, decommits, allows, requests) = (true, false, true, true);
        let (delay, eager) = (None, Vec::new());
        let linked = Linked::Mimalloc { purges, decommits, allows, requests, delay, eager };
        let mut findings = with(vec![linked]);
        findings.arenas_huge = Some(huge_arenas(&trace, 512, &[], &[THP]).expect("valid"));
        let has = |findings: &Findings| {
            predicted(findings, &costs()).iter().any(|item| item.name == "mimalloc on THP")
        };
        findings.commits.pages = findings.without.outcome.peak_resident.div_ceil(2) - 1;
        assert!(has(&findings));
        findings.commits.pages += 1;
        assert!(!has(&findings));
    }

    #[test]
    fn advice_without_a_prediction_depends_on_the_allocator() {
        let names = |findings: &Findings| {
            open(findings).into_iter().map(|open| open.name).collect::<Vec<_>>()
        };
        let mut findings = with(vec![rust()]);
        findings.threads = 1;
        assert_eq!(names(&findings), ["jemalloc background thread"]);
        findings.program.purges = true;
        let purged = ["jemalloc keeps memory", "jemalloc background thread"];
        assert_eq!(names(&findings), purged);
        let predicted = predicted(&findings, &costs());
        assert!(predicted.is_empty(), "the program returns memory itself: {predicted:?}");
        findings.program.purges = false;
        findings.threads = 8;
        assert_eq!(names(&findings), ["fewer jemalloc arenas", "jemalloc background thread"]);
        let google = with(vec![Linked::Google]);
        let [open] = &open(&google)[..] else { panic!("{:?}", names(&google)) };
        assert_eq!((&*open.action, &open.apply), ("no setting helps", &Apply::Nothing));
        assert_eq!(names(&with(vec![Linked::Gperftools])), ["tcmalloc on THP"]);
    }
}
