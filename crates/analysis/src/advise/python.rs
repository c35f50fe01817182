//! Children of Python: the garbage collector, whose time and copies of pages `gc.freeze` spares,
//! and pages that reference counts copy, which no setting spares.

use super::costs::Costs;
use super::findings::Findings;
use super::item::{Apply, Item, Open, size};
use crate::number::{fixed, grouped, plural};
use faultless::PAGE_SIZE;
use faultless_trace::event::{Function, Stacks};
use faultless_trace::fork::Forks;

/// Copied pages from which a line is worth the reader's time.
const FEW: u64 = 1000;
/// Functions of CPython that run only during a collection, in versions 3.8 to 3.14.
const COLLECTOR: [&str; 16] = [
    "collect",
    "deduce_unreachable",
    "gc_collect",
    "gc_collect_full",
    "gc_collect_generations",
    "gc_collect_increment",
    "gc_collect_main",
    "gc_collect_region",
    "gc_collect_young",
    "move_unreachable",
    "subtract_refs",
    "untrack_dicts",
    "untrack_tuples",
    "update_refs",
    "visit_decref",
    "visit_reachable",
];

/// Returns the pages that children copied in Python's garbage collector; `None` for a recording
/// without call stacks.
pub fn collector_copies(forks: &Forks, stacks: &Stacks) -> Option<u64> {
    if stacks.frames.is_empty() {
        return None;
    }
    let collects = |function: &Function| {
        // Compilers add a suffix to the name of a part of a function.
        let name = function.name.split('.').next().unwrap_or_default();
        COLLECTOR.contains(&name) && function.module.contains("python")
    };
    let copies = forks.by_stack.iter();
    let by_collector =
        copies.filter(|(stack, _)| stacks.of(**stack).any(|(_, function)| collects(function)));
    Some(by_collector.map(|(_, copied)| copied.by_child).sum())
}

/// Returns whether a run with a trace of the collector is worth its time: Python's children copy
/// pages.
pub fn is_worth_a_trace(findings: &Findings) -> bool {
    is_python(findings) && findings.forks.copied.by_child >= FEW
}

/// Returns the predicted item: the parent excludes its objects from collections of its children.
pub fn predicted(findings: &Findings, costs: &Costs) -> Option<Item> {
    let copies = findings.collector_copies.filter(|copies| *copies >= FEW);
    let mut action = "gc.collect() and gc.freeze() in the program before the fork".to_owned();
    if let Some(copies) = copies {
        action += &format!(
            " spare the copies of {} pages ({}) by the collector of children",
            grouped(copies),
            size(copies * PAGE_SIZE)
        );
    }
    let (saving, remark) = match (findings.collections, copies) {
        (Some(measured), _) => {
            let children = match measured.children {
                1 => "1 child".to_owned(),
                children => format!("{} children", grouped(children)),
            };
            action += &format!(
                ": {} of {children} took {} s for inherited objects, copies included, later \
                 collections of the parent {} s, and a collection before the fork {} s",
                plural(measured.full, "full collection"),
                fixed(measured.inherited / 1e9, 3),
                fixed(measured.later / 1e9, 3),
                fixed(measured.before / 1e9, 3)
            );
            (
                measured.saving(),
                "from times of full collections in a run with a trace of the collector",
            )
        }
        (None, Some(copies)) => (
            copies as f64 * costs.copied(),
            "only the copies are counted: the collector of the children also visits fewer objects, \
             which usually saves more time",
        ),
        (None, None) => return None,
    };
    Some(Item {
        name: "gc.freeze before the fork".into(),
        action,
        saving,
        spared: copies.map(|copies| findings.spared(copies as f64)),
        unused: 0,
        apply: Apply::Nothing,
        at_best: 0.0,
        remarks: vec![remark],
    })
}

/// Returns whether the program is a script or a process of Python.
fn is_python(findings: &Findings) -> bool {
    findings.program.python || findings.program_name().starts_with("python")
}

/// Returns the advice about pages that children copy, which no setting spares.
pub fn open(findings: &Findings) -> Option<Open> {
    let copied = findings.forks.copied.by_child;
    let why = match findings.collector_copies {
        Some(collector) => {
            let rest = copied.saturating_sub(collector);
            (rest >= FEW).then(|| {
                format!(
                    "children copied {} pages ({}) outside the collector. Reference counts are in \
                     the objects, so a child that only reads an object stores to its page, and \
                     no longer shares the page with the parent. Python 3.12 and later have no \
                     counts for constants; data in arrays (array, numpy, mmap) has one count for \
                     each array",
                    grouped(rest),
                    size(rest * PAGE_SIZE)
                )
            })
        }
        None => (copied >= FEW).then(|| {
            "reference counts are in the objects, so even a reader copies their pages. \
             gc.collect() and gc.freeze() before the fork spare the copies made by the collector, \
             and no setting spares the copies made by reference counts: `advise --stacks` counts \
             the two apart"
                .to_owned()
        }),
    };
    why.filter(|_| is_python(findings)).map(|why| Open {
        name: "copies in children of Python".into(),
        action: "no setting helps".into(),
        why,
        apply: Apply::Nothing,
    })
}

#[cfg(test)]
mod tests {
    use super::super::collections::Collections;
    use super::super::costs::tests::costs;
    use super::super::items::tests::{findings, sizes};
    use super::super::sysfs::Mode;
    use super::*;
    use faultless_trace::event::{Frame, StackId};
    use faultless_trace::fork::Copied;

    #[test]
    fn copies_of_the_collector_are_counted_apart() {
        let function = |name: &str, module: &str| Function {
            name: name.into(),
            module: module.into(),
            file: String::new(),
        };
        let functions = vec![
            function("main", "python3.11"),
            function("update_refs.isra.0", "libpython3.11.so.1.0"),
            function("visit_decref", "ruby"),
        ];
        let frame = |caller, function| Frame { caller: StackId::new(caller), function, line: 0 };
        let stacks = Stacks { functions, frames: vec![frame(0, 0), frame(1, 1), frame(1, 2)] };
        let copied = |by_child| Copied { by_parent: 7, by_child };
        let by_stack = [(1, copied(50)), (2, copied(600)), (3, copied(9))];
        let by_stack = by_stack.map(|(stack, copied)| (StackId::new(stack), copied)).into();
        let forks = Forks { by_stack, ..Forks::default() };
        assert_eq!(collector_copies(&forks, &stacks), Some(600));
        assert_eq!(collector_copies(&forks, &Stacks::default()), None);
    }

    #[test]
    fn freeze_is_predicted_and_reference_counts_are_named() {
        let mut findings = findings("python", sizes(Mode::Madvise));
        findings.name = "/usr/bin/python3".into();
        findings.forks.copied.by_child = 5000;
        let why = |findings: &Findings| open(findings).map(|open| open.why);
        assert!(why(&findings).is_some_and(|why| why.contains("advise --stacks")));
        assert!(predicted(&findings, &costs()).is_none(), "without call stacks");
        findings.collector_copies = Some(3000);
        let got = predicted(&findings, &costs()).expect("copies by the collector");
        assert_eq!((got.saving, got.spared), (3000.0 * costs().copied(), Some(3000.0)));
        assert!(got.remarks[0].starts_with("only the copies are counted"), "{got:?}");
        assert!(why(&findings).is_some_and(|why| why.contains("2,000 pages (7 MiB)")));
        findings.collector_copies = Some(4500);
        assert_eq!(why(&findings), None, "few copies beside the collector");
        findings.name = "gunicorn".into();
        findings.collector_copies = Some(0);
        assert_eq!(why(&findings), None);
        findings.program.python = true;
        assert!(why(&findings).is_some_and(|why| why.contains("5,000 pages (19 MiB)")));
    }

    #[test]
    fn measured_collections_replace_the_copies() {
        let mut findings = findings("python", sizes(Mode::Madvise));
        findings.name = "/usr/bin/python3".into();
        assert!(!is_worth_a_trace(&findings), "no child");
        findings.forks.copied.by_child = FEW;
        assert!(is_worth_a_trace(&findings));
        let measured =
            Collections { children: 4, full: 8, inherited: 5e7, later: 2e7, before: 1e7 };
        findings.collections = Some(measured);
        // Without call stacks.
        let got = predicted(&findings, &costs()).expect("measured");
        assert_eq!((got.saving, got.spared), (6e7, None));
        assert!(got.action.contains("8 full collections of 4 children took 0.050 s"), "{got:?}");
        findings.collector_copies = Some(3000);
        let got = predicted(&findings, &costs()).expect("measured");
        assert_eq!((got.saving, got.spared), (6e7, Some(3000.0)));
        assert!(got.action.contains("the copies of 3,000 pages (11 MiB)"), "{got:?}");
        assert!(!got.remarks[0].contains("only the copies"), "{got:?}");
        findings.name = "ruby".into();
        assert!(!is_worth_a_trace(&findings));
    }
}
