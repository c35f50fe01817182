//! The calls that created the memory of call sites, and the calls that freed memory which call
//! sites touch again: the places of a program at which a change of a mapping belongs.
//!
//! A call has a place like a [call site](super::sites): the innermost frame of its stack outside
//! allocators, the C library and the dynamic linker.

use super::findings::Findings;
use super::fold;
use super::sites::{Folded, Place, Site, UNKNOWN, folded, is_linker, label, short_name};
use faultless::PAGE_SIZE;
use faultless_trace::callers::{Call, Caller};
use faultless_trace::event::{Function, StackId, Stacks};
use std::collections::{BTreeMap, HashMap};

/// A call that created or freed memory, and the faults of a call site in this memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Creator {
    /// The kind of call.
    pub call: Call,
    /// The function that made the call, outside allocators and the C library, if known.
    pub function: Option<Function>,
    /// The line in the source file of the function; 0 if unknown.
    pub line: u32,
    /// The function of the allocator or the C library that `function` called; `None` if `function`
    /// made the call itself.
    pub allocator: Option<Function>,
    /// The bytes of the pages that the faults mapped.
    pub bytes: u64,
}

impl Creator {
    /// Returns the call, with its place, and the allocator if there is one.
    pub fn label(&self) -> String {
        let call = self.call.name();
        let Some(function) = &self.function else { return format!("{call}, {UNKNOWN}") };
        let by = self.allocator.as_ref();
        let by = by.map_or(String::new(), |by| format!(", by {}", allocator_name(by)));
        format!("{call} in {}{by}", label(function, self.line))
    }
}

/// Returns the name of a function of an allocator. A function of the C library has the name of its
/// interface.
fn allocator_name(function: &Function) -> &str {
    let of_library = fold::is_c_library(&function.module);
    if of_library { fold::plain_name(function) } else { short_name(function) }
}

/// A call that created or freed memory, by its kind, its place, and the index of the allocator's
/// function.
type Source = (Call, Place, Option<u32>);

/// Returns the source of the memory that `caller` created or freed.
fn source(stacks: &Stacks, caller: Caller) -> Option<Source> {
    let Folded { place, inner, .. } = folded(stacks, caller.stack)?;
    let is_call = |function: &u32| {
        let name = fold::plain_name(&stacks.functions[*function as usize]);
        [caller.call.name(), "mmap64", "sbrk"].contains(&name)
    };
    let inner = inner.map(|frame| frame.function);
    Some((caller.call, place, inner.filter(|inner| !is_call(inner))))
}

/// Returns the creator of the memory that `caller` created or freed, with no bytes; `None` if its
/// call stack is unknown.
pub fn creator(stacks: &Stacks, caller: Caller) -> Option<Creator> {
    source(stacks, caller).map(|source| of_source(stacks, source, 0))
}

fn of_source(stacks: &Stacks, (call, place, allocator): Source, bytes: u64) -> Creator {
    let (function, line) = place.function(stacks);
    let allocator = allocator.map(|at| stacks.functions[at as usize].clone());
    Creator { call, function, line, allocator, bytes }
}

/// Returns the calls that created the memory of each place, the largest memory first.
pub(super) fn creators(findings: &Findings, stacks: &Stacks) -> HashMap<Place, Vec<Creator>> {
    by_place(&findings.census.callers, stacks)
}

/// Returns the calls that freed the memory which each place touches again, the largest memory
/// first.
pub(super) fn freed(findings: &Findings, stacks: &Stacks) -> HashMap<Place, Vec<Creator>> {
    by_place(&findings.census.freed, stacks)
}

/// Returns the calls of each place, from faults by call stack and call.
fn by_place(
    faults: &BTreeMap<(StackId, Caller), u64>,
    stacks: &Stacks,
) -> HashMap<Place, Vec<Creator>> {
    let mut pages: HashMap<Place, BTreeMap<Source, u64>> = HashMap::new();
    let mut sources: HashMap<Caller, Option<Source>> = HashMap::new();
    for ((stack, caller), count) in faults {
        let source = *sources.entry(*caller).or_insert_with(|| source(stacks, *caller));
        if let (Some(Folded { place, .. }), Some(source)) = (folded(stacks, *stack), source) {
            *pages.entry(place).or_default().entry(source).or_default() += count;
        }
    }
    let creator = |(source, pages): (Source, u64)| of_source(stacks, source, pages * PAGE_SIZE);
    let sorted = |sources: BTreeMap<Source, u64>| {
        let mut creators: Vec<_> = sources.into_iter().map(creator).collect();
        creators.sort_by_key(|creator| (std::cmp::Reverse(creator.bytes), creator.label()));
        creators
    };
    pages.into_iter().map(|(place, sources)| (place, sorted(sources))).collect()
}

/// Returns the bytes of the faults of all `sites` by the call that created the memory, as labels,
/// the most bytes first.
pub fn by_creator(sites: &[Site]) -> Vec<(String, u64)> {
    let mut bytes: BTreeMap<String, u64> = BTreeMap::new();
    for creator in sites.iter().flat_map(|site| &site.creators) {
        *bytes.entry(creator.label()).or_default() += creator.bytes;
    }
    let mut bytes: Vec<_> = bytes.into_iter().collect();
    bytes.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    bytes
}

/// Returns the change that keeps memory, most of which `freed` has freed, if known.
pub(super) fn keep(freed: Option<&Creator>) -> String {
    let memory = match freed {
        Some(freed) => format!("the memory that the {} frees", freed.label()),
        None => "the memory instead of freeing it to the kernel".to_owned(),
    };
    format!("keep {memory}: reuse the block, or a setting of the allocator that keeps memory")
}

/// Memory to populate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Memory {
    /// Private anonymous memory.
    Private,
    /// A mapping of a file.
    File,
}

/// Returns the change that populates `memory`, most of which comes from `creator`, if known.
pub(super) fn populate(creator: Option<&Creator>, memory: Memory) -> String {
    let (advice, part) = match memory {
        Memory::Private => ("MADV_POPULATE_WRITE", "the part that will be used"),
        Memory::File => ("MADV_POPULATE_READ", "the part of the file that will be used"),
    };
    let later = format!("madvise({advice}) on {part}");
    let Some((creator, function)) = creator.and_then(|it| Some((it, it.function.as_ref()?))) else {
        return match memory {
            Memory::Private => format!("MAP_POPULATE at this mapping, or {later}"),
            Memory::File => later,
        };
    };
    if is_linker(function) {
        return later;
    }
    let place = label(function, creator.line);
    match (creator.call, &creator.allocator) {
        (Call::Mmap, None) => format!("MAP_POPULATE at the mmap in {place}, or {later}"),
        (Call::Mremap, _) => {
            format!("reserve the final size before the memory grows in {place}, or {later}")
        }
        (_, Some(by)) => format!("{later}, after {} in {place}", allocator_name(by)),
        (call, None) => format!("{later}, after the {} in {place}", call.name()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::items::tests::{findings, sizes};
    use super::super::sysfs::Mode;
    use super::*;
    use faultless_trace::event::Frame;

    /// Returns the stacks of `main`, which calls `create` in line 12, `malloc` by `grow` in line
    /// 30, and `fill` in line 7.
    fn stacks() -> Stacks {
        let function = |name: &str| Function {
            name: name.into(),
            module: "program".into(),
            file: if name.contains("map") || name == "malloc" { "" } else { "a.c" }.into(),
        };
        let frame = |caller, function, line| Frame { caller: StackId::new(caller), function, line };
        let names = ["main", "create", "grow", "fill", "__GI___mmap64", "__mremap", "malloc"];
        Stacks {
            functions: names.map(function).to_vec(),
            frames: vec![
                frame(0, 0, 3),
                frame(1, 1, 12),
                // 3: mmap by `create`.
                frame(2, 4, 0),
                frame(1, 2, 30),
                frame(4, 6, 0),
                // 6: mmap by `malloc` of `grow`.
                frame(5, 4, 0),
                // 7: mremap by `grow`.
                frame(4, 5, 0),
                frame(1, 3, 7),
            ],
        }
    }

    #[test]
    fn memory_has_the_calls_that_created_it_in_order_of_size() {
        let mut findings = findings("python", sizes(Mode::Never));
        let fill = StackId::new(8);
        let caller = |call, stack| Caller { call, stack: StackId::new(stack) };
        findings.census.callers = [
            ((fill, caller(Call::Mmap, 6)), 5),
            ((fill, caller(Call::Mmap, 3)), 100),
            ((fill, caller(Call::Mremap, 7)), 20),
            // The same function in the same line.
            ((StackId::new(1), caller(Call::Mmap, 3)), 1),
        ]
        .into();
        let creators = creators(&findings, &stacks());
        let [main, fill] = [(0, 3), (3, 7)].map(|(at, line)| &creators[&Place::Function(at, line)]);
        let labels: Vec<_> =
            fill.iter().map(|creator| (creator.label(), creator.bytes / PAGE_SIZE)).collect();
        let want = [
            ("mmap in create a.c:12 (program)", 100),
            ("mremap in grow a.c:30 (program)", 20),
            ("mmap in grow a.c:30 (program), by malloc", 5),
        ];
        assert_eq!(labels, want.map(|(label, pages)| (label.to_owned(), pages)));
        assert_eq!((main.len(), main[0].bytes), (1, PAGE_SIZE));
    }

    #[test]
    fn change_names_the_call_that_creates_the_memory() {
        let function = |name: &str| Function { name: name.into(), ..Function::default() };
        let creator = |call, allocator: Option<&str>| Creator {
            call,
            function: Some(function("grow")),
            line: 0,
            allocator: allocator.map(function),
            bytes: 1,
        };
        let later = "madvise(MADV_POPULATE_WRITE) on the part that will be used";
        for (creator, want) in [
            (None, format!("MAP_POPULATE at this mapping, or {later}")),
            (
                Some(creator(Call::Mmap, None)),
                format!("MAP_POPULATE at the mmap in grow, or {later}"),
            ),
            (Some(creator(Call::Mmap, Some("malloc"))), format!("{later}, after malloc in grow")),
            (
                Some(creator(Call::Mremap, Some("realloc"))),
                format!("reserve the final size before the memory grows in grow, or {later}"),
            ),
            (Some(creator(Call::Brk, None)), format!("{later}, after the brk in grow")),
        ] {
            assert_eq!(populate(creator.as_ref(), Memory::Private), want);
        }
        let own = Function { name: "__GI___libc_malloc".into(), ..Function::default() };
        let of_library = Function { module: "libc.so.6".into(), ..own.clone() };
        assert_eq!((allocator_name(&own), allocator_name(&of_library)), (&*own.name, "malloc"));
        let file = populate(None, Memory::File);
        assert_eq!(file, "madvise(MADV_POPULATE_READ) on the part of the file that will be used");
        let mapped = populate(Some(&creator(Call::Mmap, None)), Memory::File);
        assert_eq!(mapped, format!("MAP_POPULATE at the mmap in grow, or {file}"));
    }
}
