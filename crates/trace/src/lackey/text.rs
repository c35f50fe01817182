//! Which part of a program is its code, and which pages of 2 MiB that has, concluded from what was fetched.
//!
//! A trace of addresses has no mappings. A page that was fetched from and never stored to is code. Pages between two such
//! pages belong to the same *extent*, a series of pages that one mapping of code may have, if none of them was stored to and they are
//! fewer than 512: what a run does not use lies in between, and so do constants. What lies before the first page that was fetched
//! and after the last is not known, so that an extent is at least that large.

use super::{Access, Kind};
use faultless::{PAGE_SHIFT, PAGE_SIZE};
use std::collections::HashMap;

/// Pages of 4 KiB in one of 2 MiB.
pub const FOLIO: u64 = 512;

/// What was done to a page.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    fetches: u64,
    stored: bool,
}

/// The pages of a program, and what was done to them.
#[derive(Clone, Debug, Default)]
pub struct Pages {
    pages: HashMap<u64, Use>,
    /// Accesses to pages: fetches, loads, stores. One that lies in two pages is an access to each; a modification is a load and a
    /// store.
    pub counts: [u64; 3],
}

impl Pages {
    /// Takes note of an access.
    pub fn note(&mut self, access: Access) {
        let (fetch, load, store) = match access.kind {
            Kind::Fetch => (1, 0, 0),
            Kind::Load => (0, 1, 0),
            Kind::Store => (0, 0, 1),
            Kind::Modify => (0, 1, 1),
        };
        for page in pages(access) {
            for (sum, count) in self.counts.iter_mut().zip([fetch, load, store]) {
                *sum += count;
            }
            let used = self.pages.entry(page).or_default();
            used.fetches += fetch;
            used.stored |= store > 0;
        }
    }

    /// How many pages there are.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// The extents of code, by address.
    pub fn text(&self) -> Text {
        let mut pages: Vec<_> = self.pages.iter().map(|(&page, &used)| (page, used)).collect();
        pages.sort_unstable_by_key(|(page, _)| *page);
        let mut extents: Vec<Extent> = Vec::new();
        // Whether a page that follows may belong to the last of them.
        let mut open = false;
        for (page, used) in pages {
            if used.stored {
                open = false;
            } else if used.fetches > 0 {
                match extents.last_mut() {
                    Some(last) if open && page - last.last <= FOLIO => {
                        last.take(page, used.fetches);
                    }
                    _ => extents.push(Extent::new(page, used.fetches)),
                }
                open = true;
            }
        }
        Text { extents, fetches: self.counts[0] }
    }
}

/// The numbers of the pages that an access is to.
pub fn pages(access: Access) -> impl Iterator<Item = u64> {
    access.addr >> PAGE_SHIFT..=(access.addr + (access.size - 1)) >> PAGE_SHIFT
}

/// A series of pages that may be one mapping of code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The first page, by number.
    pub first: u64,
    /// The last page.
    pub last: u64,
    /// Pages that were fetched from, and how often.
    pub fetched: Vec<(u64, u64)>,
}

impl Extent {
    fn new(page: u64, fetches: u64) -> Self {
        Self { first: page, last: page, fetched: vec![(page, fetches)] }
    }

    fn take(&mut self, page: u64, fetches: u64) {
        self.last = page;
        self.fetched.push((page, fetches));
    }

    /// Pages from the first to the last.
    pub fn pages(&self) -> u64 {
        self.last - self.first + 1
    }

    /// The pages of 2 MiB that lie wholly in it, by the number of their first page of 4 KiB.
    pub fn whole(&self) -> impl Iterator<Item = u64> {
        let first = self.first.next_multiple_of(FOLIO);
        (first..(self.last + 1) / FOLIO * FOLIO).step_by(FOLIO as usize)
    }

    /// Pages of 2 MiB that it fills if it begins with one, the last of them padded.
    pub fn padded(&self) -> u64 {
        self.pages().div_ceil(FOLIO)
    }
}

/// A page of 2 MiB with code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Folio {
    /// Its address.
    pub addr: u64,
    /// Pages of 4 KiB in it that were fetched from.
    pub fetched: u64,
    /// How often.
    pub fetches: u64,
}

/// The code of a program.
#[derive(Clone, Debug)]
pub struct Text {
    /// By address; they do not overlap.
    pub extents: Vec<Extent>,
    /// All fetches, those from pages that are no code included.
    pub fetches: u64,
}

impl Text {
    /// The number of the extent that `page` lies in.
    #[inline]
    pub fn find(&self, page: u64) -> Option<usize> {
        let at = self.extents.partition_point(|extent| extent.last < page);
        self.extents.get(at).filter(|extent| extent.first <= page).map(|_| at)
    }

    /// The pages of 2 MiB that lie wholly in an extent, by address: what a kernel may map huge as the program is.
    pub fn whole(&self) -> Vec<Folio> {
        let of = |extent: &Extent| {
            let count = |first: u64| {
                let within =
                    extent.fetched.iter().filter(|(page, _)| page / FOLIO == first / FOLIO);
                let addr = first * PAGE_SIZE;
                within.fold(Folio { addr, fetched: 0, fetches: 0 }, |folio, (_, fetches)| Folio {
                    fetched: folio.fetched + 1,
                    fetches: folio.fetches + fetches,
                    ..folio
                })
            };
            extent.whole().map(count).collect::<Vec<_>>()
        };
        self.extents.iter().flat_map(of).collect()
    }

    /// Fetches from extents.
    pub fn covered(&self) -> u64 {
        self.extents.iter().flat_map(|extent| &extent.fetched).map(|(_, fetches)| fetches).sum()
    }

    /// Pages from first to last of all extents.
    pub fn pages(&self) -> u64 {
        self.extents.iter().map(Extent::pages).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages_of(accesses: &[(Kind, u64, u64)]) -> Pages {
        let mut pages = Pages::default();
        for &(kind, addr, size) in accesses {
            pages.note(Access { kind, addr, size });
        }
        pages
    }

    fn at(page: u64) -> u64 {
        page << PAGE_SHIFT
    }

    #[test]
    fn extents_end_at_stores_and_wide_gaps() {
        use Kind::{Fetch, Load, Modify, Store};
        let pages = pages_of(&[
            (Fetch, at(10), 4),
            (Fetch, at(10), 4),
            // Constants between code.
            (Load, at(11), 8),
            // In two pages.
            (Fetch, at(13) - 2, 4),
            (Fetch, at(20), 1),
            (Store, at(21), 8),
            (Fetch, at(22), 1),
            (Fetch, at(22 + 512), 1),
            (Fetch, at(22 + 512 + 513), 1),
            // Code that writes itself is none.
            (Fetch, at(2000), 1),
            (Modify, at(2000), 1),
        ]);
        assert_eq!((pages.counts, pages.len()), ([9, 2, 2], 10));
        let text = pages.text();
        let ends: Vec<_> = text.extents.iter().map(|it| (it.first, it.last)).collect();
        assert_eq!(ends, [(10, 20), (22, 534), (1047, 1047)]);
        assert_eq!(text.extents[0].fetched, [(10, 2), (12, 1), (13, 1), (20, 1)]);
        assert_eq!((text.covered(), text.fetches, text.pages()), (8, 9, 11 + 513 + 1));
        for (page, extent) in [
            (9, None),
            (10, Some(0)),
            (15, Some(0)),
            (21, None),
            (534, Some(1)),
            (1047, Some(2)),
            (1048, None),
        ] {
            assert_eq!(text.find(page), extent, "{page}");
        }
    }

    #[test]
    fn folios_are_whole_or_padded() {
        let fetches = |pages: &[u64]| {
            let fetches: Vec<_> = pages.iter().map(|&page| (Kind::Fetch, at(page), 1)).collect();
            pages_of(&fetches).text()
        };
        // From the middle of one to the middle of the third.
        let text = fetches(&[700, 1024, 1030, 1535, 1700]);
        assert_eq!(text.extents[0].whole().collect::<Vec<_>>(), [1024]);
        assert_eq!(text.whole(), [Folio { addr: at(1024), fetched: 3, fetches: 3 }]);
        assert_eq!(text.extents[0].padded(), 2);
        assert!(fetches(&[1025, 1535]).whole().is_empty());
        assert_eq!(fetches(&[1024, 1535]).whole().len(), 1);
        assert!(fetches(&[]).whole().is_empty());
    }
}
