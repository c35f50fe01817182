//! The places in the program that cause faults, by the call stacks of the recording.
//!
//! A *call site* is the innermost frame of a stack outside allocators, the C library and the
//! dynamic linker ([`fold`]), with its source line if known. Stacks without such a frame
//! share one call site, whose caller is unknown. The time of a call site is predicted: the faults
//! of its stacks, by purpose, multiplied by the costs of this host. The predicted saving of a
//! change at the call site assumes that its pages are all touched, as the recording shows; other
//! savings of the answer are for the whole program, so the savings do not add up.
//!
//! A change of a mapping belongs to the call that creates the memory, which may be at another place
//! than the faults. Each call site has the [calls](super::creators) that created its memory, and
//! the calls that freed memory which the call site touches again.

use super::costs::Costs;
use super::creators::{Creator, Memory, creators, freed, keep, populate};
use super::findings::Findings;
use super::fold::{self, Found};
use super::sysfs::Mode;
use super::time::touch_time;
use faultless::PAGE_SIZE;
use faultless_trace::census::StackFaults;
use faultless_trace::event::{Frame, Function, StackId, Stacks};
use faultless_trace::fork::Copied;
use std::collections::HashMap;

/// A change of the program at a call site.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// The change.
    pub action: String,
    /// The predicted saving, in nanoseconds of processor time.
    pub saving: f64,
}

/// A place in the program, and its faults.
#[derive(Clone, Debug, PartialEq)]
pub struct Site {
    /// The function; `None` for the stacks without a function outside the C library and
    /// allocators.
    pub function: Option<Function>,
    /// The line in the source file of the function; 0 if unknown.
    pub line: u32,
    /// The caller of the function in the stack with the most faults, if known and not the start of
    /// the program.
    pub caller: Option<Function>,
    /// The touches by purpose, of pages of 4 KiB.
    pub touches: StackFaults,
    /// The faults of `touches` that copied a page shared since a fork.
    pub copied: Copied,
    /// The faults, of pages of the recorded host.
    pub faults: u64,
    /// The predicted time of the faults, in nanoseconds of processor time.
    pub nanoseconds: f64,
    /// The calls that created the memory of the faults, the largest memory first. Empty for memory
    /// that existed before the recording, and for a recording without call stacks of calls.
    pub creators: Vec<Creator>,
    /// The calls that freed the memory of the faults of `touches.again`, the largest memory first.
    pub freed: Vec<Creator>,
    /// The change that saves the most, if a change saves time.
    pub change: Option<Change>,
}

impl Site {
    /// Returns the bytes of the pages that the faults mapped.
    pub fn bytes(&self) -> u64 {
        self.touches.total() * PAGE_SIZE
    }

    /// Returns the function, with its source line if known, and the module.
    pub fn label(&self) -> String {
        self.function.as_ref().map_or_else(|| UNKNOWN.to_owned(), |it| label(it, self.line))
    }
}

/// The label of a place without a function of the program.
pub(super) const UNKNOWN: &str = "caller unknown";
/// The name of the place of the dynamic linker.
const LINKER: &str = "dynamic linker";

/// Returns `function` with its source `line`, if known, and the module.
pub(super) fn label(function: &Function, line: u32) -> String {
    let Function { module, file, .. } = function;
    let name = short_name(function);
    let place = match (&**file, line) {
        ("", _) => String::new(),
        (file, 0) => format!(" {file}"),
        (file, line) => format!(" {file}:{line}"),
    };
    let module = match &**module {
        "" => String::new(),
        module if module == name => String::new(),
        module => format!(" ({module})"),
    };
    format!("{name}{place}{module}")
}

/// Returns the label of `function` without the types of its arguments, which are long in C++.
pub fn short_name(function: &Function) -> &str {
    let label = function.label();
    let part_of_name = |at: usize| {
        at == 0
            || label[at..].starts_with("(anonymous namespace)")
            || label[..at].ends_with("operator")
    };
    let end = label.match_indices('(').find(|(at, _)| !part_of_name(*at));
    end.map_or(label, |(at, _)| &label[..at])
}

/// The predicted time of faults by purpose, in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Times {
    touch: f64,
    unzeroed: f64,
    copied: f64,
    shared: f64,
}

impl Times {
    /// Returns the times with the present settings of the host.
    fn new(findings: &Findings, costs: &Costs) -> Self {
        Self {
            touch: touch_time(findings, costs),
            unzeroed: costs.unzeroed(),
            copied: costs.copied(),
            shared: costs.shared(),
        }
    }

    /// Returns the time of `faults`.
    fn of(&self, faults: &StackFaults) -> f64 {
        let unzeroed = faults.zero_page + faults.file + faults.text;
        faults.zeroed as f64 * self.touch
            + unzeroed as f64 * self.unzeroed
            + faults.copies as f64 * self.copied
            + faults.shared as f64 * self.shared
    }
}

/// The predicted cost of the faults of one call stack.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StackCost {
    /// The call stack.
    pub stack: StackId,
    /// The faults, of pages of the recorded host.
    pub faults: u64,
    /// The bytes of their pages.
    pub bytes: u64,
    /// The predicted time, in nanoseconds of processor time.
    pub nanoseconds: f64,
}

/// Returns the predicted cost of each call stack.
pub fn stack_costs(findings: &Findings, costs: &Costs) -> Vec<StackCost> {
    let times = Times::new(findings, costs);
    let cost = |(stack, faults): (&StackId, &StackFaults)| StackCost {
        stack: *stack,
        faults: faults.total() / findings.small_pages,
        bytes: faults.total() * PAGE_SIZE,
        nanoseconds: times.of(faults),
    };
    findings.census.stacks.iter().map(cost).collect()
}

/// A place in a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Place {
    /// A function, by its index, and its line.
    Function(u32, u32),
    /// The dynamic linker.
    Linker,
    /// The stack has no function outside the C library and allocators.
    Unknown,
}

impl Place {
    /// Returns the function, if known, and its line.
    pub fn function(self, stacks: &Stacks) -> (Option<Function>, u32) {
        match self {
            Self::Function(at, line) => (Some(stacks.functions[at as usize].clone()), line),
            Self::Linker => (Some(Function { name: LINKER.into(), ..Function::default() }), 0),
            Self::Unknown => (None, 0),
        }
    }
}

/// Returns whether `function` is the place of the dynamic linker.
pub(super) fn is_linker(function: &Function) -> bool {
    function.name == LINKER && function.module.is_empty()
}

/// A call stack, whose frames inside of its place are folded away.
#[derive(Clone, Copy, Debug)]
pub(super) struct Folded<'a> {
    /// The place of the stack.
    pub place: Place,
    /// The frame of the place.
    pub frame: Option<&'a Frame>,
    /// The frame that `frame` has called.
    pub inner: Option<&'a Frame>,
}

/// Returns the place of `stack`; `None` for an empty stack.
pub(super) fn folded(stacks: &Stacks, stack: StackId) -> Option<Folded<'_>> {
    let (frames, functions): (Vec<&Frame>, Vec<_>) = stacks.of(stack).unzip();
    let (place, at) = match fold::place(&functions)? {
        Found::Frame(at) => (Place::Function(frames[at].function, frames[at].line), Some(at)),
        Found::Linker => (Place::Linker, None),
        Found::Unknown => (Place::Unknown, None),
    };
    let inner = at.and_then(|at| at.checked_sub(1)).map(|at| frames[at]);
    Some(Folded { place, frame: at.map(|at| frames[at]), inner })
}

/// Returns the call sites of a recording with these call stacks, the largest time first.
pub fn sites(findings: &Findings, costs: &Costs, stacks: &Stacks) -> Vec<Site> {
    let times = Times::new(findings, costs);
    let mut by_place: HashMap<Place, (StackFaults, u64, StackId, Copied)> = HashMap::new();
    let (mut creators, mut freed) = (creators(findings, stacks), freed(findings, stacks));
    for (stack, faults) in &findings.census.stacks {
        let Some(Folded { place, frame, .. }) = folded(stacks, *stack) else { continue };
        let (all, most, caller, copied) = by_place.entry(place).or_default();
        all.add(faults);
        if let Some(new) = findings.forks.by_stack.get(stack) {
            copied.add(new);
        }
        if faults.total() > *most {
            (*most, *caller) = (faults.total(), frame.map_or(StackId::NONE, |it| it.caller));
        }
    }
    let mut sites: Vec<_> = by_place
        .into_iter()
        .map(|(place, (faults, _, caller, copied))| {
            let [creators, freed] =
                [&mut creators, &mut freed].map(|calls| calls.remove(&place).unwrap_or_default());
            let (function, line) = place.function(stacks);
            let caller = stacks.of(caller).next().map(|(_, function)| function);
            let calls = [&creators, &freed].map(|calls| known(calls));
            // The code of the dynamic linker does not belong to the program.
            let change = change(&faults, findings, costs, calls).filter(|_| place != Place::Linker);
            Site {
                function,
                line,
                caller: caller.filter(|it| fold::is_caller(it)).cloned(),
                touches: faults,
                copied,
                faults: faults.total() / findings.small_pages,
                nanoseconds: times.of(&faults),
                change,
                creators,
                freed,
            }
        })
        .collect();
    let order = |site: &Site| (site.label(), site.line);
    sites.sort_by(|a, b| {
        b.nanoseconds.total_cmp(&a.nanoseconds).then_with(|| order(a).cmp(&order(b)))
    });
    sites
}

/// Returns the call of the largest memory, if its place is known.
fn known(calls: &[Creator]) -> Option<&Creator> {
    calls.first().filter(|call| call.function.is_some())
}

/// Returns the change at a call site with these faults that saves the most, if a change saves time.
/// Most of the memory comes from `creator`, and most of the memory that is touched again was freed
/// by `freed`, if known.
fn change(
    faults: &StackFaults,
    findings: &Findings,
    costs: &Costs,
    [creator, freed]: [Option<&Creator>; 2],
) -> Option<Change> {
    let touch = touch_time(findings, costs);
    let pages = findings.sizes.thp_pages() as f64;
    let single = findings.single();
    let huge = touch - costs.folio(findings.sizes.thp).0 / pages;
    let huge = if findings.sizes.thp_mode() == Mode::Madvise { huge } else { 0.0 };
    let shared = costs.shared() - costs.shared_huge().0 / pages;
    let memory = match creator {
        Some(creator) => format!("the memory of the {}", creator.label()),
        None => "this memory".to_owned(),
    };
    let changes = [
        (faults.again as f64 * touch, keep(freed)),
        (faults.in_huge as f64 * huge, format!("madvise(MADV_HUGEPAGE) on {memory}")),
        (
            faults.in_mapping as f64 * single * (costs.page - costs.populated),
            populate(creator, Memory::Private),
        ),
        (
            faults.shared as f64 * shared,
            "huge pages for this shared memory: madvise(MADV_HUGEPAGE) with shmem_enabled=advise"
                .to_owned(),
        ),
        (faults.file as f64 * costs.quiet.exception(), populate(creator, Memory::File)),
    ];
    let most = changes.into_iter().max_by(|a, b| a.0.total_cmp(&b.0));
    let (saving, action) = most.filter(|(saving, _)| *saving > 0.0)?;
    Some(Change { action, saving })
}

#[cfg(test)]
mod tests {
    use super::super::costs::tests::costs;
    use super::super::items::tests::{findings, sizes};
    use super::*;
    use faultless_trace::callers::{Call, Caller};

    /// Returns three stacks: `load` in line 7 by `memset`, the same in line 9, and `main`.
    fn stacks() -> Stacks {
        let function = |name: &str| Function {
            name: name.into(),
            module: "program".into(),
            file: "a.c".into(),
        };
        let frame = |caller, function, line| Frame { caller: StackId::new(caller), function, line };
        Stacks {
            functions: ["main", "load", "memset"].map(function).to_vec(),
            frames: vec![frame(0, 0, 3), frame(1, 1, 7), frame(2, 2, 0), frame(1, 1, 9)],
        }
    }

    #[test]
    fn sites_are_sorted_by_time_and_have_a_change() {
        let mut findings = findings("python", sizes(Mode::Madvise));
        let none = StackFaults::default();
        let zeroed = |zeroed| StackFaults { zeroed, ..none };
        findings.census.stacks = [
            (1, StackFaults { copies: 30, ..none }),
            (2, StackFaults { in_mapping: 10, ..zeroed(10) }),
            (3, StackFaults { in_mapping: 100, ..zeroed(100) }),
            (4, StackFaults { again: 50, ..zeroed(60) }),
        ]
        .map(|(stack, faults)| (StackId::new(stack), faults))
        .into();
        let caller = |call, stack| Caller { call, stack: StackId::new(stack) };
        findings.census.freed = [
            ((StackId::new(4), caller(Call::Madvise, 2)), 30),
            ((StackId::new(4), caller(Call::Munmap, 1)), 20),
        ]
        .into();
        let copied = |by_parent, by_child| Copied { by_parent, by_child };
        findings.forks.by_stack =
            [(StackId::new(2), copied(5, 1)), (StackId::new(3), copied(2, 0))].into();
        let costs = costs();
        let sites = sites(&findings, &costs, &stacks());
        let labels: Vec<_> = sites.iter().map(Site::label).collect();
        assert_eq!(
            labels,
            ["load a.c:7 (program)", "load a.c:9 (program)", "main a.c:3 (program)"]
        );
        let touch = touch_time(&findings, &costs);
        assert_eq!(sites[0].nanoseconds, 110.0 * touch);
        assert_eq!(sites[0].bytes(), 110 * PAGE_SIZE);
        // Two stacks have this call site.
        assert_eq!((sites[0].copied, sites[1].copied), (copied(7, 1), Copied::default()));
        assert_eq!(sites[0].caller.as_ref().map(Function::label), Some("main"));
        let change = sites[0].change.as_ref().expect("a mapping");
        assert!(change.action.contains("MAP_POPULATE"), "{change:?}");
        assert_eq!(change.saving, 110.0 * findings.single() * 1000.0);
        let change = sites[1].change.as_ref().expect("freed memory");
        let keeps = "keep the memory that the madvise in load a.c:7 (program) frees: reuse the";
        assert!(change.action.starts_with(keeps), "{change:?}");
        let freed: Vec<_> =
            sites[1].freed.iter().map(|call| (call.label(), call.bytes / PAGE_SIZE)).collect();
        let want =
            [("madvise in load a.c:7 (program)", 30), ("munmap in main a.c:3 (program)", 20)];
        assert_eq!(freed, want.map(|(label, pages)| (label.to_owned(), pages)));
        assert!(sites[0].freed.is_empty());
        assert_eq!(change.saving, 50.0 * touch);
        // No setting avoids a copy after a fork.
        assert_eq!(sites[2].change, None);
        assert_eq!(sites[2].nanoseconds, 30.0 * costs.copied());
    }

    #[test]
    fn stacks_without_a_function_of_the_program_share_a_site() {
        let function = |(name, module): (&str, &str)| Function {
            name: name.into(),
            module: module.into(),
            ..Function::default()
        };
        let frame = |caller, function| Frame { caller: StackId::new(caller), function, line: 0 };
        let functions = [
            ("main", "app"),
            ("fread", "libc.so.6"),
            ("__memset_avx2", "libc.so.6"),
            ("_dl_start", "ld-linux-x86-64.so.2"),
            ("mmap64", "libc.so.6"),
        ];
        let stacks = Stacks {
            functions: functions.map(function).to_vec(),
            // 2: fread by main; 3 to 6: without a caller; 7 and 8: mmap, by fread of main or not.
            frames: vec![
                frame(0, 0),
                frame(1, 1),
                frame(0, 1),
                frame(0, 2),
                frame(4, 1),
                frame(0, 3),
                frame(2, 4),
                frame(0, 4),
            ],
        };
        let mut findings = findings("python", sizes(Mode::Never));
        let mapped = |zeroed| StackFaults { zeroed, in_mapping: zeroed, ..StackFaults::default() };
        let faults = [(2, 50), (3, 10), (4, 10), (5, 10), (6, 20)];
        findings.census.stacks =
            faults.map(|(stack, count)| (StackId::new(stack), mapped(count))).into();
        let mmap = |stack| Caller { call: Call::Mmap, stack: StackId::new(stack) };
        let callers = [((2, 7), 50), ((3, 8), 10), ((4, 8), 5)];
        findings.census.callers =
            callers.map(|((stack, by), count)| ((StackId::new(stack), mmap(by)), count)).into();
        let sites = sites(&findings, &costs(), &stacks);
        let rows: Vec<_> = sites.iter().map(|site| (site.label(), site.faults)).collect();
        let want = [("main (app)", 50), ("caller unknown", 30), ("dynamic linker", 20)];
        assert_eq!(rows, want.map(|(label, faults)| (label.to_owned(), faults)));
        let creators = |at: usize| -> Vec<_> {
            sites[at].creators.iter().map(|it| (it.label(), it.bytes / PAGE_SIZE)).collect()
        };
        assert_eq!(creators(0), [("mmap in main (app), by fread".to_owned(), 50)]);
        assert_eq!(creators(1), [("mmap, caller unknown".to_owned(), 15)]);
        let action = |at: usize| sites[at].change.as_ref().map(|change| &*change.action);
        assert!(action(1).is_some_and(|it| it.starts_with("MAP_POPULATE at this mapping")));
        assert_eq!((action(2), &sites[1].caller), (None, &None));
    }

    #[test]
    fn short_name_has_no_arguments() {
        let of = |name: &str| {
            let function = Function { name: name.into(), ..Function::default() };
            short_name(&function).to_owned()
        };
        for (name, want) in [
            ("v8::Heap::grow(unsigned long, v8::Space)", "v8::Heap::grow"),
            ("v8::(anonymous namespace)::grow(int)", "v8::(anonymous namespace)::grow"),
            ("Less::operator()(int, int) const", "Less::operator()"),
            ("<T as app::Grow>::grow", "<T as app::Grow>::grow"),
            ("JS:*grow /app/a.js:1:14", "JS:*grow /app/a.js:1:14"),
            ("(a)", "(a)"),
        ] {
            assert_eq!(of(name), want);
        }
    }

    #[test]
    fn huge_pages_are_a_change_if_the_host_permits_requests() {
        let faults = StackFaults { zeroed: 512, in_huge: 512, ..StackFaults::default() };
        let of = |mode| change(&faults, &findings("python", sizes(mode)), &costs(), [None; 2]);
        let got = of(Mode::Madvise).expect("permitted");
        assert!(got.action.contains("MADV_HUGEPAGE") && got.saving > 512.0 * 1000.0, "{got:?}");
        assert_eq!(of(Mode::Never), None);
    }
}
