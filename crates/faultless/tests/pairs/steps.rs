//! The steps of an operation, between which another operation may run, and its results without a
//! guarantee.

use super::op::{Op, Part, Span};
use faultless::{Access, Advice, MapFlags, RemapFlags};

/// The variant of operations with several permitted variants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fine {
    /// Populating operations work page by page.
    pub by_page: bool,
    /// The faults of an access that only begin, a bit for each: the following step finds the
    /// fault's work undone.
    pub begun: u32,
    /// The pages referenced by an eviction during lazy freeing, a bit for each: the referenced
    /// pages are unchanged.
    pub used: u32,
}

impl Op {
    /// Returns the steps, between which another CPU may act, and whether each step returns a value.
    /// The first failed step is the last, and its error is the result. The other CPU runs `others`
    /// operations, so an access may fault that often.
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
            // The faults of a pin are the faults of a store, or copy read-only pages.
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

    /// Returns the pages of the created or moved mapping, if its address may be chosen.
    pub fn placed_pages(self) -> Option<i64> {
        match self {
            Self::Map(span, ..) => Some(span.pages),
            Self::Remap(_, pages, ..) => Some(pages),
            _ => None,
        }
    }

    /// Returns whether the operation changes one VMA after the other, each atomically.
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

    /// Returns whether a present page may be temporarily absent from all entries of its VMAs.
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

    /// Returns whether the operation may swap out private pages.
    pub fn swaps(self) -> bool {
        matches!(self, Self::SwapOut(_) | Self::Advise(_, Advice::PageOut))
    }

    /// Returns the pages freed lazily by the operation.
    pub fn lazily_freed(self) -> Option<Span> {
        match self {
            Self::Advise(span, Advice::Free) => Some(span),
            _ => None,
        }
    }

    /// Returns whether the operation maps pages of an object.
    pub fn maps_object(self) -> bool {
        match self {
            Self::Map(_, _, _, flags) => flags.contains(MapFlags::SHARED),
            _ => matches!(self, Self::MapObject(..)),
        }
    }

    /// Returns whether the operation is a program's access.
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

    /// Returns whether the operation works page by page, or maps pages without a request: then the
    /// resident pages are not guaranteed.
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
