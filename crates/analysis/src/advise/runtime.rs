//! Settings of Go and of Java virtual machines.

use super::collector::{GOGC, Saved};
use super::costs::Costs;
use super::findings::Findings;
use super::item::{Item, Open, size};
use super::named;
use super::sysfs::Mode;
use super::time::{folio_saving, touch_time};
use faultless::PAGE_SIZE;
use faultless_trace::reserve::Reserved;

/// Touched pages below which a heap is not worth a line: the first size at which Go collects.
const SMALL: u64 = 1024;
/// Variables by which a user configures the time of Go's collections.
const CHOSEN: [&str; 2] = ["GOGC", "GOMEMLIMIT"];

/// Returns the predicted items.
pub fn predicted(findings: &Findings, costs: &Costs) -> Vec<Item> {
    let all = [
        lazily(findings, costs),
        collects_less(findings, costs),
        java_huge(findings, costs),
        pretouch(findings, costs),
    ];
    all.into_iter().flatten().collect()
}

/// Go keeps freed pages mapped until the kernel needs them.
fn lazily(findings: &Findings, costs: &Costs) -> Option<Item> {
    (findings.program.go && findings.census.discarded > 0).then(|| Item {
        name: "Go frees lazily".into(),
        action: "GODEBUG=madvdontneed=0".into(),
        saving: findings.census.discarded as f64 * touch_time(findings, costs),
        spared: Some(findings.spared(findings.census.discarded as f64 * findings.single())),
        unused: 0,
        apply: named::go_frees_lazily(),
        at_best: 0.0,
        remarks: vec!["freed memory counts as resident until the kernel needs it"],
    })
}

/// Go collects less often, and has a larger heap.
fn collects_less(findings: &Findings, costs: &Costs) -> Option<Item> {
    let Saved { cpu_ms, bytes, .. } = findings.collector.as_ref()?.saved()?;
    Some(Item {
        name: format!("Go with GOGC={GOGC}"),
        action: format!(
            "GOGC={GOGC}, or a GOMEMLIMIT: collections take {cpu_ms:.0} ms less, faults {:.0} ms more",
            (bytes / PAGE_SIZE) as f64 * costs.page / 1e6
        ),
        saving: cpu_ms * 1e6 - (bytes / PAGE_SIZE) as f64 * costs.page,
        spared: None,
        unused: bytes,
        apply: named::gogc(GOGC.into()),
        at_best: 0.0,
        remarks: vec![
            "from the collector's trace of one run, which excludes sweeping and write barriers; unused memory is garbage not yet collected",
        ],
    })
}

/// A Java heap in huge pages.
fn java_huge(findings: &Findings, costs: &Costs) -> Option<Item> {
    let (_, with) = findings.with.iter().find(|(order, _)| *order == findings.sizes.thp)?;
    let permitted = findings.sizes.thp_mode() == Mode::Madvise;
    (findings.program.java && permitted).then(|| Item {
        name: "Java heap on THP".into(),
        action: "-XX:+UseTransparentHugePages".into(),
        saving: folio_saving(findings, &findings.now, with, costs),
        spared: Some(findings.fewer(&findings.now, with)),
        unused: with.outcome.peak_untouched * PAGE_SIZE,
        apply: named::java_thp(),
        at_best: 0.0,
        remarks: Vec::new(),
    })
}

/// A Java virtual machine touches its heap before it starts the program.
fn pretouch(findings: &Findings, costs: &Costs) -> Option<Item> {
    let heap = java_heap(findings)?;
    let unused = (heap.usable / PAGE_SIZE).saturating_sub(heap.touched);
    let saving = heap.touched as f64 * findings.single() * (costs.page - costs.pretouched)
        - unused as f64 * costs.taken();
    Some(Item {
        name: "Java touches its heap".into(),
        action: format!(
            "-XX:+AlwaysPreTouch; the heap has {}, and the program uses {}; with -Xms of that size no memory is unused",
            size(heap.usable),
            size(heap.touched * PAGE_SIZE)
        ),
        saving,
        spared: None,
        unused: unused * PAGE_SIZE,
        apply: named::java_touches_heap(),
        at_best: 0.0,
        remarks: vec![
            "moves faults to the start: the program starts later and waits less afterwards",
        ],
    })
}

/// Returns the advice without a prediction: the cost of collections depends on more than faults.
pub fn open(findings: &Findings) -> Vec<Open> {
    let mut out = Vec::new();
    let large = findings.census.zeroed >= SMALL;
    let measured = findings.collector.as_ref().is_some_and(|collector| collector.saved().is_some());
    if findings.program.go && large && !measured && !chosen() {
        out.push(Open {
            name: format!("Go with GOGC={GOGC}"),
            action: format!("GOGC={GOGC}, or a GOMEMLIMIT"),
            why: "fewer collections and more touched pages; a recording does not contain the \
                  cost of collections; `advise -- PROGRAM` measures the cost for a single \
                  process that does not request collections itself"
                .into(),
            apply: named::gogc(GOGC.into()),
        });
    }
    if let Some(heap) = java_heap(findings).filter(|heap| heap.begun < heap.usable) {
        let megabytes = named::mebibytes(heap.usable);
        out.push(Open {
            name: "Java heap of one size".into(),
            action: format!("-Xms{megabytes}m"),
            why: format!(
                "the heap grew from {} to {}; a heap of the final size from the start collects \
                 less often and touches more pages between collections: a recording does not \
                 contain the time of collections",
                size(heap.begun),
                size(heap.usable)
            ),
            apply: named::java_heap(heap.usable),
        });
    }
    out
}

/// Returns whether the user has configured the time of Go's collections.
pub fn chosen() -> bool {
    CHOSEN.iter().any(|name| std::env::var_os(name).is_some())
}

/// Returns the Java heap: the reservation with the most usable memory.
fn java_heap(findings: &Findings) -> Option<&Reserved> {
    let mut heaps = findings.reserved.iter().filter(|one| !one.arena && one.touched >= SMALL);
    let first = heaps.next().filter(|_| findings.program.java)?;
    Some(heaps.fold(first, |most, one| if one.usable > most.usable { one } else { most }))
}

#[cfg(test)]
mod tests {
    use super::super::collector::Collector;
    use super::super::costs::tests::{costs, taken};
    use super::super::item::Apply;
    use super::super::items::tests::{find, findings, sizes};
    use super::super::program::Program;
    use super::*;

    const HEAP: Reserved = Reserved {
        len: 1 << 30,
        begun: 64 << 20,
        usable: 256 << 20,
        touched: 20_000,
        refilled: 0,
        arena: false,
    };

    fn of(program: Program) -> Findings {
        Findings { program, ..findings("python", sizes(Mode::Madvise)) }
    }

    fn names(findings: &Findings) -> Vec<String> {
        open(findings).into_iter().map(|open| open.name).collect()
    }

    #[test]
    fn pretouched_heap_costs_its_unused_pages() {
        let mut findings = of(Program { java: true, ..Program::default() });
        // Neither an arena nor the smaller reservation is the heap.
        let others = [Reserved { usable: 8 << 20, ..HEAP }, Reserved { arena: true, ..HEAP }];
        findings.reserved = vec![others[1], others[0], HEAP];
        let items = predicted(&findings, &costs());
        let got = find(&items, "Java touches its heap");
        let unused = 65_536 - 20_000;
        assert_eq!(got.saving, 20_000.0 * 300.0 - f64::from(unused) * 2000.0);
        assert_eq!(got.unused, u64::from(unused as u32) * PAGE_SIZE);
        let on_taken = predicted(&findings, &taken(&costs()));
        assert!(find(&on_taken, "Java touches its heap").saving < got.saving);
        assert_eq!(names(&findings), ["Java heap of one size"]);
        let options = Apply::environment([("JAVA_TOOL_OPTIONS", "-Xms256m".to_owned())]);
        assert_eq!(open(&findings)[0].apply, options);
        // A heap that starts at its full size.
        findings.reserved = vec![Reserved { begun: HEAP.usable, ..HEAP }];
        assert!(names(&findings).is_empty());
        findings.program.java = false;
        assert!(predicted(&findings, &costs()).is_empty());
    }

    #[test]
    fn saving_of_gogc_is_predicted_from_a_collector_trace() {
        let mut findings = of(Program { go: true, ..Program::default() });
        let advice = format!("Go with GOGC={GOGC}");
        assert_eq!(names(&findings), [&*advice], "no trace of the collector");
        findings.collector = Some(Collector::default());
        assert_eq!(names(&findings), [&*advice], "an empty trace of the collector");
        let line = |number, heap| {
            format!(
                "gc {number} @1s 0%: 1+1+1 ms clock, 10+10/10/0+0 ms cpu, {heap}->{heap}->10 MB, 20 MB goal"
            )
        };
        let lines: Vec<_> = (1..=100).map(|number| line(number, 20)).collect();
        let collector = Collector::of(&lines.join("\n"));
        let saved = collector.saved().expect("a trace with collections");
        findings.collector = Some(collector);
        assert!(names(&findings).is_empty());
        let items = predicted(&findings, &costs());
        let got = find(&items, &advice);
        let pages = (saved.bytes / PAGE_SIZE) as f64;
        assert_eq!((got.saving, got.unused), (saved.cpu_ms * 1e6 - pages * 2300.0, saved.bytes));
        assert!(got.saving > 0.0);
    }
}
