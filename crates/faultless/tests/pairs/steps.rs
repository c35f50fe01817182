//! What may happen to an operation while it goes on: its steps, and what is not promised of it.

use super::op::{Op, Part, Span};
use faultless::{Access, Advice, MapFlags, RemapFlags};

/// How operations are done that may be done in several ways.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fine {
    /// What populates does so page by page.
    pub by_page: bool,
    /// The faults of an access that only begin, a bit for each: what follows finds the page undone.
    pub begun: u32,
    /// The pages that eviction has references to while they are lazily freed, a bit for each: they stay as they are.
    pub used: u32,
}

impl Op {
    /// Another CPU may do something between these; those marked return something. The first that is refused is the
    /// last, and what it returns is what all return. The other CPU does `others` operations, so an access may fault
    /// that often.
    pub fn steps(self, others: usize, fine: Fine) -> Vec<(Self, bool)> {
        let Fine { begun, by_page, used } = fine;
        let (at, access) = match self {
            Self::Load(at) | Self::ReadOutside(at) => (at, Access::Read),
            Self::Store(at, _) | Self::WriteOutside(at, _) => (at, Access::Write),
            // A pin makes a private page the space's own.
            Self::PinRead(at) | Self::PinWrite(at, _) => (at, Access::Write),
            Self::Leave(span, copies, Part::Both) => {
                let step = |part| (Self::Leave(span, copies, part), true);
                return [Part::First, Part::Second].map(step).into();
            }
            Self::EndIn(at, Part::Both) => {
                return [Part::First, Part::Second]
                    .map(|part| (Self::EndIn(at, part), true))
                    .into();
            }
            Self::Advise(span, advice) if by_page && self.is_by_page() => {
                return span.each().map(|page| (Self::Advise(page, advice), true)).collect();
            }
            Self::Map(span, how, prot, flags) if by_page && self.is_by_page() => {
                let map = Self::Map(span, how, prot, flags - MapFlags::POPULATE);
                let populate = span.each().map(|page| (Self::Populate(page.at), false));
                return std::iter::once((map, true)).chain(populate).collect();
            }
            Self::Advise(span, Advice::Free) if used != 0 => {
                return vec![(Self::FreeBut(span, used), true)];
            }
            _ => return vec![(self, true)],
        };
        let [begin, fault] = match self {
            Self::Load(_) | Self::Store(..) => [Self::Begin(at, access), Self::Fault(at, access)],
            // Its faults are those of a store, or copy what is read-only.
            Self::PinRead(_) | Self::PinWrite(..) => {
                [Self::BeginOutside(at, access), Self::PinRead(at)]
            }
            _ => [Self::BeginOutside(at, access), Self::FaultOutside(at, access)],
        };
        let attempt = |number: usize| {
            let goes_on = (begun >> number & 1 == 0).then_some(fault);
            std::iter::once(begin).chain(goes_on)
        };
        let faults = (0..others).flat_map(attempt).map(|step| (step, false));
        faults.chain([(self, true)]).collect()
    }

    /// Pages of the mapping that it makes, or moves, if it may be placed.
    pub fn placed_pages(self) -> Option<i64> {
        match self {
            Self::Map(span, ..) => Some(span.pages),
            Self::Remap(_, pages, ..) => Some(pages),
            _ => None,
        }
    }

    /// Whether it changes one VMA after the other, each at once.
    pub fn is_by_vma(self) -> bool {
        match self {
            Self::Remap(old, pages, flags, _) => {
                flags.contains(RemapFlags::FIXED) && old.pages == pages && pages > 1
            }
            Self::Protect(span, _)
            | Self::Advise(span, _)
            | Self::Lock(span, _)
            | Self::Bind(span) => span.pages > 1,
            _ => false,
        }
    }

    /// Whether a page that is there may be in none of its VMAs' entries while this goes on.
    pub fn moves_pages(self) -> bool {
        match self {
            Self::Map(..)
            | Self::MapObject(..)
            | Self::MapDevice(_)
            | Self::Unmap(_)
            | Self::Remap(..)
            | Self::Brk(_) => true,
            Self::Protect(..)
            | Self::Advise(..)
            | Self::FreeBut(..)
            | Self::Lock(..)
            | Self::Bind(_)
            | Self::NoMoreAreas
            | Self::Roof(_)
            | Self::HeapAt(_)
            | Self::Load(_)
            | Self::Store(..)
            | Self::ReadOutside(_)
            | Self::WriteOutside(..)
            | Self::Fault(..)
            | Self::Begin(..)
            | Self::FaultOutside(..)
            | Self::BeginOutside(..)
            | Self::Object
            | Self::File
            | Self::SlowFile
            | Self::Text
            | Self::WriteBack(_)
            | Self::DropClean(_)
            | Self::Evict(_)
            | Self::SwapOut(_)
            | Self::ReadPage(_)
            | Self::WritePage(..)
            | Self::Overwrite(..)
            | Self::Extend(_)
            | Self::Device
            | Self::PinRead(_)
            | Self::PinWrite(..)
            | Self::Leave(..)
            | Self::EndIn(..)
            | Self::Populate(_)
            | Self::MovePages(_)
            | Self::Compact
            | Self::Maps
            | Self::InCore(_)
            | Self::Fork
            | Self::Exit
            | Self::Drop => false,
        }
    }

    /// Whether it may let private pages leave memory.
    pub fn swaps(self) -> bool {
        matches!(self, Self::SwapOut(_) | Self::Advise(_, Advice::PageOut))
    }

    /// What it frees lazily.
    pub fn lazily_freed(self) -> Option<Span> {
        match self {
            Self::Advise(span, Advice::Free) => Some(span),
            _ => None,
        }
    }

    /// Whether it maps pages of an object.
    pub fn maps_object(self) -> bool {
        match self {
            Self::Map(_, _, _, flags) => flags.contains(MapFlags::SHARED),
            _ => matches!(self, Self::MapObject(..)),
        }
    }

    /// Whether it is a program's access.
    pub fn is_access(self) -> bool {
        matches!(
            self,
            Self::Load(_)
                | Self::Store(..)
                | Self::ReadOutside(_)
                | Self::WriteOutside(..)
                | Self::PinRead(_)
                | Self::PinWrite(..)
        )
    }

    /// Whether it does its work page by page, or maps pages that nobody asked for: then which pages are
    /// resident afterwards is not promised.
    pub fn is_by_page(self) -> bool {
        match self {
            Self::SwapOut(_) => true,
            Self::Map(_, _, _, flags) => flags.contains(MapFlags::POPULATE),
            Self::Advise(_, advice) => {
                matches!(advice, Advice::PopulateRead | Advice::PopulateWrite)
            }
            _ => false,
        }
    }
}
