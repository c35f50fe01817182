//! The state after a case: the listing of `maps`, the counts, the children.

use super::arena::Arena;
use super::op::{Hand, Op, Ret, Span};
use faultless::{Area, AreaInfo, Cpu, Machine, Object, PAGE_SHIFT, PAGE_SIZE, PageSource, Prot};
use faultless::{FrameUse, Shared, Space, VirtRange, VmaFlags};
use std::fmt;

/// A VMA as listed in `maps`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AreaSeen {
    start: i64,
    end: i64,
    prot: Prot,
    flags: VmaFlags,
    offset: u64,
    name: &'static str,
    resident: u64,
    zero: u64,
}

impl AreaSeen {
    /// Removes the counts that are exact only at a quiet moment.
    pub fn without_pages(self) -> Self {
        Self { resident: 0, zero: 0, ..self }
    }

    /// Without the name, too: the heap's end may be another moment's.
    pub fn without_name(self) -> Self {
        Self { name: "", ..self.without_pages() }
    }

    fn goes_on_in(&self, next: &Self) -> bool {
        let here = (self.end - self.start) as u64 * PAGE_SIZE;
        let offset = if self.offset == 0 && next.offset == 0 { 0 } else { self.offset + here };
        self.end == next.start
            && (self.prot, self.flags, self.name) == (next.prot, next.flags, next.name)
            && offset == next.offset
    }
}

impl AreaSeen {
    fn listed(info: AreaInfo, arena: &Arena) -> Self {
        let AreaInfo { range, prot, flags, offset, name, resident, zero, .. } = info;
        let [start, end] = [range.start, range.end].map(|addr| arena.page(addr));
        Self { start, end, prot, flags, offset, name, resident, zero }
    }

    /// Creates the record without a name, and without the page counts.
    fn found(area: Area<'_>, arena: &Arena) -> Self {
        let Area { range, prot, flags, offset, memory, .. } = area;
        let [start, end] = [range.start, range.end].map(|addr| arena.page(addr));
        let offset = match memory {
            PageSource::Anonymous => 0,
            _ => offset << PAGE_SHIFT,
        };
        Self { start, end, prot, flags, offset, name: "", resident: 0, zero: 0 }
    }

    /// Returns the part in `span`, relative to the start of `span`.
    fn part_in(self, span: Span) -> Self {
        let (start, end) = (self.start.max(span.at), self.end.min(span.end()));
        let skipped = (start - self.start) as u64 * PAGE_SIZE;
        let offset = if self.offset == 0 { 0 } else { self.offset + skipped };
        Self { start: start - span.at, end: end - span.at, offset, ..self }
    }

    fn pages(&self) -> std::ops::Range<i64> {
        self.start..self.end
    }
}

impl fmt::Display for AreaSeen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bit = |prot, mark| if self.prot.contains(prot) { mark } else { '-' };
        let Self { start, end, flags, offset, name, resident, zero, .. } = self;
        let (r, w, x) = (bit(Prot::READ, 'r'), bit(Prot::WRITE, 'w'), bit(Prot::EXEC, 'x'));
        write!(f, "{start}..{end} {r}{w}{x} {flags:?} {offset:x} {name}({resident}+{zero} pages)")
    }
}

/// Returns a listing of the space, limited to the arena.
pub fn areas<H: Hand>(hand: &H, keep: impl Fn(AreaSeen) -> AreaSeen) -> Vec<AreaSeen> {
    let (arena, mut seen) = (hand.arena(), Vec::new());
    hand.space().areas(hand.cpu(), |area| {
        if arena.has(area.range.start) {
            seen.push(keep(AreaSeen::listed(area, &arena)));
        }
    });
    seen
}

/// Returns the whole VMAs in a range of a space, at a moment without changes there. A listing would
/// join the tree's shards, and read other cases' VMAs.
fn areas_in<M: Machine>(
    space: &Space<M>,
    cpu: &Cpu<'_, M>,
    arena: &Arena,
    range: VirtRange,
) -> Vec<AreaSeen> {
    let mut seen = Vec::new();
    space.each_area(cpu, range, |area| {
        seen.push(AreaSeen::found(area, arena));
        true
    });
    seen
}

/// A space, or the arena there, at a quiet moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub areas: Vec<AreaSeen>,
    mapped: u64,
    resident: u64,
    heap: (i64, i64),
    /// The words in a child's private pages. Loads of the parent show the parent's pages.
    words: Vec<(i64, u64)>,
}

impl Seen {
    pub fn of<H: Hand>(hand: &H) -> Self {
        Self::of_space(hand, hand.space())
    }

    fn of_space<H: Hand>(hand: &H, space: &Space<H::Machine>) -> Self {
        let (cpu, arena) = (hand.cpu(), hand.arena());
        let heap = if arena.has_heap() { space.heap_range() } else { VirtRange::new(0, 0) };
        let heap = (arena.page(heap.start), arena.page(heap.end));
        let words = Vec::new();
        if arena.is_whole() {
            let mut areas = Vec::new();
            space.areas(cpu, |area| areas.push(AreaSeen::listed(area, &arena)));
            let (mapped, resident) = (space.mapped_pages(cpu), space.resident_pages(cpu));
            return Self { areas, mapped, resident, heap, words };
        }
        let parts = arena.parts().into_iter();
        let mut areas: Vec<_> = parts.flat_map(|part| areas_in(space, cpu, &arena, part)).collect();
        for area in &mut areas {
            let pages = area.pages();
            for found in pages.filter_map(|page| space.page_at(cpu, arena.addr(page))) {
                match found.usage {
                    FrameUse::Zero => area.zero += 1,
                    FrameUse::Device => {}
                    _ => area.resident += 1,
                }
            }
        }
        let mapped = areas.iter().map(|area| area.pages().count() as u64).sum();
        let resident = areas.iter().map(|area| area.resident).sum();
        Self { areas, mapped, resident, heap, words }
    }

    /// Returns the state of a child, which runs on no CPU. The child's zero pages are not compared:
    /// a fork copies no pages of a VMA without an anon_vma, and a concurrent fault may have created
    /// the anon_vma.
    pub fn child<H: Hand>(hand: &H, child: &H::Child) -> Self {
        let (space, cpu, arena) = (H::space_of(child), hand.cpu(), hand.arena());
        let mut seen = Self::of_space(hand, space);
        seen.areas.iter_mut().for_each(|area| area.zero = 0);
        let swaps = space.swapped_pages(cpu) != 0;
        for area in seen.areas.iter().filter(|area| area.resident != 0 || swaps) {
            for number in area.pages() {
                let addr = arena.addr(number);
                if swaps && space.page_at(cpu, addr).is_none() {
                    // Swaps in unreadable pages as well. The child ends afterwards.
                    let allowed = area.prot.union(Prot::READ);
                    let _ = space.mprotect(cpu, addr, PAGE_SIZE, allowed);
                    let _absent = space.read_bytes(cpu, addr, &mut [0; 8]);
                }
                let at = space.page_at(cpu, addr);
                let Some(at) = at.filter(|at| at.usage == FrameUse::Anon) else { continue };
                let bytes = cpu.vm().machine().frame_bytes(at.frame).cast::<u64>();
                // SAFETY: a frame mapped by the child, without writers at a quiet moment.
                let word = unsafe { bytes.read() };
                if word != 0 {
                    seen.words.push((number, word));
                }
            }
        }
        seen
    }

    /// Removes the resident pages, and the effects of written pages: whether a read-only VMA is
    /// accounted, and whether two equal VMAs are merged.
    pub fn without_pages(self) -> Self {
        Self { areas: without_pages(self.areas), resident: 0, ..self }
    }
}

/// VMAs, as [`Seen::without_pages`].
fn without_pages(all: Vec<AreaSeen>) -> Vec<AreaSeen> {
    let mut areas: Vec<AreaSeen> = Vec::new();
    for area in all {
        // The name depends on the VMAs touched by the heap.
        let flags = area.flags - VmaFlags::ACCOUNT;
        let area = AreaSeen { flags, ..area.without_name() };
        match areas.last_mut() {
            Some(last) if last.goes_on_in(&area) => last.end = area.end,
            _ => areas.push(area),
        }
    }
    areas
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { areas, mapped, resident, heap: (start, end), words } = self;
        writeln!(f, "{mapped} pages mapped, {resident} resident, heap {start}..{end}")?;
        areas.iter().try_for_each(|area| writeln!(f, "      {area}"))?;
        if words.is_empty() { Ok(()) } else { writeln!(f, "      words {words:?}") }
    }
}

/// Mappings placed outside of the arena: the VMAs of each mapping, relative to its first page, and
/// the contents of the pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placed {
    areas: Vec<Vec<AreaSeen>>,
    found: Vec<Ret>,
}

impl Placed {
    /// Checks that no other case shares these pages: each page gets a number of this arena, and
    /// still has it after all pages have got theirs.
    pub fn of<H: Hand>(hand: &H, spans: &[Span]) -> Self {
        let arena = hand.arena();
        let words = || spans.iter().flat_map(|span| span.each()).zip(arena.marks());
        let change = words().flat_map(|(page, word)| [Op::Load(page.at), Op::Store(page.at, word)]);
        let look = words().map(|(page, _)| Op::Load(page.at));
        let found = change.chain(look).map(|op| op.alone(hand)).collect();
        let areas = |span: &Span| {
            let range = arena.range(*span);
            let areas = areas_in(hand.space(), hand.cpu(), &arena, range).into_iter();
            areas.map(|area| area.part_in(*span)).collect()
        };
        Self { areas: spans.iter().map(areas).collect(), found }
    }

    /// See [`Seen::without_pages`].
    pub fn without_pages(self) -> Self {
        Self { areas: self.areas.into_iter().map(without_pages).collect(), ..self }
    }
}

impl fmt::Display for Placed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.areas.iter().flatten().try_for_each(|area| write!(f, "{area}; "))?;
        let found: Vec<_> = self.found.iter().map(Ret::to_string).collect();
        writeln!(f, "{}", found.join(", "))
    }
}

/// An object at a quiet moment: the first word of each page, if that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectSeen(Vec<Option<u64>>);

impl ObjectSeen {
    pub fn of<M: Machine>(object: &Shared<Object>, cpu: &Cpu<'_, M>) -> Self {
        // SAFETY: a lent page, without writers at a quiet moment.
        let word = |at: *const u8| unsafe { at.cast::<u64>().read() };
        let word = |index| object.read_page(cpu, index, |page| page.map(word)).unwrap();
        Self((0..object.pages()).map(word).collect())
    }

    /// Returns whether the pages have these words.
    pub fn is(&self, words: &[u64]) -> bool {
        self.0.iter().map(|word| word.unwrap_or(0)).eq(words.iter().copied())
    }

    /// Without which pages are there.
    pub fn without_pages(self) -> Self {
        Self(self.0.into_iter().map(|word| Some(word.unwrap_or(0))).collect())
    }
}
