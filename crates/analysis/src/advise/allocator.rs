//! Settings of glibc's `malloc`.

use super::costs::Costs;
use super::findings::Findings;
use super::heap::LARGER_PAD;
use super::item::{Item, Open, size};
use super::named::{self, ARENAS, KEEP};
use super::sysfs::Mode;
use super::time::{folio_saving, touch_time};
use crate::number::plural;
use faultless::PAGE_SIZE;
use faultless_trace::reserve::Reserved;

/// Pages of arenas below which their number is not worth a line.
const FEW: u64 = 2048;

/// Returns the predicted items.
pub fn predicted(findings: &Findings, costs: &Costs) -> Vec<Item> {
    let all = [malloc_huge(findings, costs), keep(findings, costs), top_pad(findings, costs)];
    all.into_iter().flatten().collect()
}

/// glibc's `malloc` requests huge pages.
fn malloc_huge(findings: &Findings, costs: &Costs) -> Option<Item> {
    // A request has no effect if all memory gets huge pages.
    let permitted = findings.sizes.thp_mode() == Mode::Madvise;
    let [off, on] = &findings.malloc_huge;
    (permitted && findings.program.glibc).then(|| Item {
        name: "malloc on THP".into(),
        action: "GLIBC_TUNABLES=glibc.malloc.hugetlb=1 (glibc 2.35 or newer)".into(),
        saving: folio_saving(findings, off, on, costs),
        spared: Some(findings.fewer(off, on)),
        unused: on.outcome.peak_untouched.saturating_sub(off.outcome.peak_untouched) * PAGE_SIZE,
        apply: named::malloc_thp(),
        at_best: 0.0,
        remarks: vec!["THP can cost small heaps 40 % memory"],
    })
}

/// glibc's `malloc` keeps freed memory.
fn keep(findings: &Findings, costs: &Costs) -> Option<Item> {
    let kept = findings.kept;
    // The same threshold applies to arenas.
    let refilled: u64 = arenas(findings).map(|one| one.refilled).sum();
    let free: u64 = arenas(findings).filter(|one| one.refilled > 0).map(|one| one.touched).sum();
    let touches = (kept.saved + refilled) as f64;
    let saving = touches * touch_time(findings, costs) + kept.calls as f64 * costs.mapping
        - kept.copied as f64 * costs.copying;
    (findings.program.glibc && kept.saved + kept.calls + refilled > 0).then(|| Item {
        name: "malloc keeps memory".into(),
        action: KEEP.map(|(name, value)| format!("{name}={value}")).join(" "),
        saving,
        // Free parts are reused, so no more are free than malloc has given out at a time.
        unused: (kept.peak_free + free).min(kept.peak_held) * PAGE_SIZE,
        spared: Some(findings.spared(touches * findings.single())),
        apply: named::malloc_keeps_memory(),
        at_best: 0.0,
        remarks: Vec::new(),
    })
}

/// glibc's heap grows in larger steps.
fn top_pad(findings: &Findings, costs: &Costs) -> Option<Item> {
    let padded = findings.padded;
    let (now, with) = (&findings.now, &findings.padded_folios);
    let saving = padded.calls as f64 * costs.mapping + folio_saving(findings, now, with, costs);
    (findings.program.glibc && padded.calls > 0).then(|| Item {
        name: "malloc grows by more".into(),
        action: format!("MALLOC_TOP_PAD_={LARGER_PAD} spares {} calls of brk", padded.calls),
        saving,
        spared: None,
        unused: with.outcome.peak_untouched.saturating_sub(now.outcome.peak_untouched) * PAGE_SIZE,
        apply: named::malloc_grows(LARGER_PAD),
        at_best: 0.0,
        remarks: vec!["every block of 128 KiB or more then gets a separate mapping"],
    })
}

/// Returns the arenas beside the heap.
fn arenas(findings: &Findings) -> impl Iterator<Item = &Reserved> {
    findings.reserved.iter().filter(|one| one.arena)
}

/// Returns the advice without a prediction: fewer arenas.
pub fn open(findings: &Findings) -> Option<Open> {
    let arenas: Vec<&Reserved> = arenas(findings).collect();
    let usable: u64 = arenas.iter().map(|one| one.usable).sum();
    let touched: u64 = arenas.iter().map(|one| one.touched).sum();
    // The heap counts as an arena, and reserves no memory.
    (findings.program.glibc && arenas.len() as u64 >= ARENAS && touched >= FEW).then(|| Open {
        name: "fewer malloc arenas".into(),
        action: format!("MALLOC_ARENA_MAX={ARENAS}"),
        why: format!(
            "{} beside the heap have {}, and {} were touched; threads that share an arena reuse \
             freed blocks of other threads and contend for its lock: a recording of faults shows \
             neither",
            plural(arenas.len() as u64, "arena"),
            size(usable),
            size(touched * PAGE_SIZE)
        ),
        apply: named::malloc_arenas(ARENAS),
    })
}

#[cfg(test)]
mod tests {
    use super::super::costs::tests::costs;
    use super::super::item::Apply;
    use super::super::items::tests::{find, findings, sizes};
    use super::*;

    const ARENA: Reserved = Reserved {
        len: 128 << 20,
        begun: 132 << 10,
        usable: 8 << 20,
        touched: 2000,
        refilled: 500,
        arena: true,
    };

    #[test]
    fn keeping_memory_saves_refills_of_arenas() {
        let mut findings = findings("python", sizes(Mode::Madvise));
        findings.kept.peak_held = 1 << 20;
        let keep = |findings: &Findings| {
            find(&predicted(findings, &costs()), "malloc keeps memory").clone()
        };
        let before = keep(&findings);
        findings.reserved = vec![ARENA, Reserved { arena: false, ..ARENA }];
        let with = keep(&findings);
        assert_eq!(with.saving - before.saving, 500.0 * 2300.0);
        assert_eq!(with.unused - before.unused, 2000 * PAGE_SIZE);
        findings.kept.peak_held = findings.kept.peak_free + 700;
        let bounded = keep(&findings);
        assert_eq!(bounded.unused - before.unused, 700 * PAGE_SIZE);
    }

    #[test]
    fn fewer_arenas_are_advised_without_a_prediction() {
        let mut findings = findings("python", sizes(Mode::Madvise));
        findings.reserved = vec![ARENA];
        assert!(open(&findings).is_none(), "one arena beside the heap");
        findings.reserved = vec![ARENA, ARENA];
        let got = open(&findings).expect("two arenas and the heap");
        assert_eq!(got.apply, Apply::environment([("MALLOC_ARENA_MAX", "2".to_owned())]));
        assert!(got.why.contains("2 arenas beside the heap have 16 MiB"), "{}", got.why);
        findings.program.glibc = false;
        assert!(open(&findings).is_none(), "another allocator than glibc's");
    }

    #[test]
    fn larger_heap_growth_saves_calls() {
        let findings = findings("python", sizes(Mode::Madvise));
        let calls = findings.padded.calls;
        let items = predicted(&findings, &costs());
        let got = find(&items, "malloc grows by more");
        assert!(calls > 10 && calls < findings.census.breaks, "{calls}");
        assert_eq!((got.saving, got.unused), (calls as f64 * 500.0, 0));
        // With THP `always` a heap that grows in such steps gets folios.
        let findings = super::super::items::tests::findings("python", sizes(Mode::Always));
        let items = predicted(&findings, &costs());
        let got = find(&items, "malloc grows by more");
        assert!(got.saving > calls as f64 * 500.0 && got.unused > 0, "{got:?}");
    }
}
