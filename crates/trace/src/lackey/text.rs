//! Infers a program's code, and its pages of 2 MiB, from the fetched pages.
//!
//! A trace of addresses has no mappings. A page with fetches and without stores is code. Pages
//! between two such pages belong to the same *extent*, a series of pages that may be one mapping of
//! code, if they have no stores and are fewer than 512. They contain code unused in this run, and
//! constants. Pages before the first and after the last fetched page are unknown, so the size of an
//! extent is a lower bound.

use super::{Access, Kind};
use faultless::{PAGE_SHIFT, PAGE_SIZE};
use std::collections::HashMap;

/// Pages of 4 KiB in a page of 2 MiB.
pub const FOLIO: u64 = 512;

/// The accesses to a page.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    fetches: u64,
    stored: bool,
}

/// The pages of a program, and their accesses.
#[derive(Clone, Debug, Default)]
pub struct Pages {
    pages: HashMap<u64, Use>,
    /// Accesses to pages: fetches, loads, stores. An access across two pages counts for each page.
    /// A modification is a load and a store.
    pub counts: [u64; 3],
}

impl Pages {
    /// Records an access.
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

    /// Returns the number of pages.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Returns whether there are no pages.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// Returns the extents of code, by address.
    pub fn text(&self) -> Text {
        let mut pages: Vec<_> = self.pages.iter().map(|(&page, &used)| (page, used)).collect();
        pages.sort_unstable_by_key(|(page, _)| *page);
        let mut extents: Vec<Extent> = Vec::new();
        // Whether a following page may belong to the last extent.
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

/// Returns the numbers of the accessed pages.
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
    /// Fetched pages, and the number of fetches.
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

    /// Returns the number of pages from the first to the last.
    pub fn pages(&self) -> u64 {
        self.last - self.first + 1
    }

    /// Returns the pages of 2 MiB inside the extent, by the number of their first page of 4 KiB.
    pub fn whole(&self) -> impl Iterator<Item = u64> {
        let first = self.first.next_multiple_of(FOLIO);
        (first..(self.last + 1) / FOLIO * FOLIO).step_by(FOLIO as usize)
    }

    /// Returns the pages of 2 MiB of the extent if aligned, with the last page padded.
    pub fn padded(&self) -> u64 {
        self.pages().div_ceil(FOLIO)
    }
}

/// A page of 2 MiB with code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Folio {
    /// The address.
    pub addr: u64,
    /// Fetched pages of 4 KiB.
    pub fetched: u64,
    /// The number of fetches.
    pub fetches: u64,
}

/// The code of a program.
#[derive(Clone, Debug)]
pub struct Text {
    /// The extents by address, without overlap.
    pub extents: Vec<Extent>,
    /// All fetches, including those from pages that are not code.
    pub fetches: u64,
}

impl Text {
    /// Returns the number of the extent that contains `page`.
    #[inline]
    pub fn find(&self, page: u64) -> Option<usize> {
        let at = self.extents.partition_point(|extent| extent.last < page);
        self.extents.get(at).filter(|extent| extent.first <= page).map(|_| at)
    }

    /// Returns the pages of 2 MiB inside an extent, by address: pages that a kernel may map huge
    /// without moving the code.
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

    /// Returns the fetches from extents.
    pub fn covered(&self) -> u64 {
        self.extents.iter().flat_map(|extent| &extent.fetched).map(|(_, fetches)| fetches).sum()
    }

    /// Returns the pages from first to last of all extents.
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
            // Across two pages.
            (Fetch, at(13) - 2, 4),
            (Fetch, at(20), 1),
            (Store, at(21), 8),
            (Fetch, at(22), 1),
            (Fetch, at(22 + 512), 1),
            (Fetch, at(22 + 512 + 513), 1),
            // Code that writes to itself does not count.
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
        // From the middle of one page of 2 MiB to the middle of the third.
        let text = fetches(&[700, 1024, 1030, 1535, 1700]);
        assert_eq!(text.extents[0].whole().collect::<Vec<_>>(), [1024]);
        assert_eq!(text.whole(), [Folio { addr: at(1024), fetched: 3, fetches: 3 }]);
        assert_eq!(text.extents[0].padded(), 2);
        assert!(fetches(&[1025, 1535]).whole().is_empty());
        assert_eq!(fetches(&[1024, 1535]).whole().len(), 1);
        assert!(fetches(&[]).whole().is_empty());
    }
}
