//! What a case leaves: what `maps` lists, the counts, the children.

use super::op::{Hand, page};
use faultless::Use;
use faultless::{AreaInfo, Cpu, Machine, Object, PAGE_SIZE, Prot, Shared, Space, VmaFlags};
use std::fmt;

/// A VMA as `maps` lists it.
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
    /// Without what only counts at a quiet moment.
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

impl From<AreaInfo> for AreaSeen {
    fn from(info: AreaInfo) -> Self {
        let AreaInfo { range, prot, flags, offset, name, resident, zero, .. } = info;
        Self {
            start: page(range.start),
            end: page(range.end),
            prot,
            flags,
            offset,
            name,
            resident,
            zero,
        }
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

/// The VMAs of a space.
pub fn areas<M: Machine>(
    space: &Space<M>,
    cpu: &Cpu<'_, M>,
    keep: impl Fn(AreaSeen) -> AreaSeen,
) -> Vec<AreaSeen> {
    let mut seen = Vec::new();
    space.areas(cpu, |area| seen.push(keep(area.into())));
    seen
}

/// A space at a quiet moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub areas: Vec<AreaSeen>,
    mapped: u64,
    resident: u64,
    heap: (i64, i64),
    /// Of a child, what is in its private pages: loads of the parent tell what is in the parent's.
    words: Vec<(i64, u64)>,
}

impl Seen {
    pub fn of<M: Machine>(space: &Space<M>, cpu: &Cpu<'_, M>) -> Self {
        let heap = space.heap_range();
        Self {
            areas: areas(space, cpu, |area| area),
            mapped: space.mapped_pages(cpu),
            resident: space.resident_pages(cpu),
            heap: (page(heap.start), page(heap.end)),
            words: Vec::new(),
        }
    }

    /// A child, which runs nowhere. Which of its pages show the page of zeros depends on whether a fault under
    /// way had made an anon_vma, for want of which fork looks at no page.
    pub fn child<H: Hand>(child: &H::Child, cpu: &Cpu<'_, H::Machine>) -> Self {
        let space = H::space_of(child);
        let mut seen = Self::of(space, cpu);
        seen.areas.iter_mut().for_each(|area| area.zero = 0);
        let mut ranges = Vec::new();
        space.areas(cpu, |area| ranges.push((area.range, area.resident)));
        for (range, _) in ranges.into_iter().filter(|&(_, resident)| resident != 0) {
            for addr in (range.start..range.end).step_by(PAGE_SIZE as usize) {
                let at = space.page_at(cpu, addr);
                let Some(at) = at.filter(|at| at.usage == Use::Anon) else { continue };
                let bytes = cpu.vm().machine().frame_bytes(at.frame).cast::<u64>();
                // SAFETY: a frame that the child maps, of which nobody writes at a quiet moment.
                let word = unsafe { bytes.read() };
                if word != 0 {
                    seen.words.push((page(addr), word));
                }
            }
        }
        seen
    }

    /// Without which pages are resident, and what follows from which were written: whether a read-only VMA
    /// is accounted, and whether two that are alike are one.
    pub fn without_pages(self) -> Self {
        let mut areas: Vec<AreaSeen> = Vec::new();
        for area in self.areas {
            // The name says which VMAs the heap touches.
            let flags = area.flags - VmaFlags::ACCOUNT;
            let area = AreaSeen { flags, ..area.without_name() };
            match areas.last_mut() {
                Some(last) if last.goes_on_in(&area) => last.end = area.end,
                _ => areas.push(area),
            }
        }
        Self { areas, resident: 0, ..self }
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { areas, mapped, resident, heap: (start, end), words } = self;
        writeln!(f, "{mapped} pages mapped, {resident} resident, heap {start}..{end}")?;
        areas.iter().try_for_each(|area| writeln!(f, "      {area}"))?;
        if words.is_empty() { Ok(()) } else { writeln!(f, "      words {words:?}") }
    }
}

/// An object at a quiet moment: the first word of each page, if that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectSeen(Vec<Option<u64>>);

impl ObjectSeen {
    pub fn of<M: Machine>(object: &Shared<Object>, cpu: &Cpu<'_, M>) -> Self {
        // SAFETY: a page that is lent, to which nobody writes at a quiet moment.
        let word = |at: *const u8| unsafe { at.cast::<u64>().read() };
        let word = |index| object.read_page(cpu, index, |page| page.map(word)).unwrap();
        Self((0..object.pages()).map(word).collect())
    }

    /// Whether the pages have these words.
    pub fn is(&self, words: &[u64]) -> bool {
        self.0.iter().map(|word| word.unwrap_or(0)).eq(words.iter().copied())
    }

    /// Without which pages are there.
    pub fn without_pages(self) -> Self {
        Self(self.0.into_iter().map(|word| Some(word.unwrap_or(0))).collect())
    }
}
