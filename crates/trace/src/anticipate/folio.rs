//! The effect of larger folios on a recorded program: Linux's multi-size THP (mTHP), and THP
//! itself.
//!
//! The rules are those of Linux 6.8 and later for private anonymous memory. A store to an untouched
//! page maps the largest enabled folio that contains the page, is aligned, lies in its VMA, and has
//! no mapped page yet. A load maps only the zero page. All pages of a folio are zeroed, used or
//! not.

use super::{Fault, Outcome, Policy, walk_over};
use crate::event::{Access, Event, Trace};
use crate::plan::PlanError;

/// The order of THP with base pages of 4 KiB: a folio of 2 MiB, mapped by one entry of the level
/// above the last. Orders are of pages of 4 KiB for each size of base pages.
pub const THP: u8 = 9;
/// The largest order: THP of 512 MiB, with base pages of 64 KiB.
pub const LARGEST: u8 = thp(16);

/// Returns the order of THP of a host whose base pages have `small_pages` pages of 4 KiB: 1, 4 or
/// 16. One entry maps as much as a table of base pages, whose entries have 8 bytes: 2 MiB, 32 MiB
/// or 512 MiB.
pub const fn thp(small_pages: u64) -> u8 {
    THP + 2 * small_pages.ilog2() as u8
}

/// Returns the order of the smallest folio of anonymous memory (mTHP) of such a host: 4 base pages.
pub const fn smallest(small_pages: u64) -> u8 {
    2 + small_pages.ilog2() as u8
}

/// The effect of folios.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Folios {
    /// Faults and pages. The other pages of a folio count as mapped ahead.
    pub outcome: Outcome,
    /// Mapped folios by order. Folios of order 0 are single pages, including the zero page.
    pub mapped: [u64; LARGEST as usize + 1],
}

/// Returns the faults and folios of `trace` with folios of the orders `all`, each 1 to [`LARGEST`],
/// enabled for all anonymous memory, and the orders `asked` for memory with `MADV_HUGEPAGE`. Memory
/// with `MADV_NOHUGEPAGE` gets single pages. Without any order, each fault maps one page.
///
/// # Errors
/// The trace does not pass [`Trace::check`].
pub fn folios(trace: &Trace, all: &[u8], asked: &[u8]) -> Result<Folios, PlanError> {
    folios_of(trace, trace.events.iter(), all, asked)
}

/// Returns the same as [`folios`], with `events` instead of the events of `trace`.
///
/// # Errors
/// The trace does not pass [`Trace::check`].
pub fn folios_of(
    trace: &Trace,
    events: impl Iterator<Item = Event>,
    all: &[u8],
    asked: &[u8],
) -> Result<Folios, PlanError> {
    let sorted = |orders: &[&[u8]]| {
        let mut orders = orders.concat();
        orders.retain(|order| *order <= LARGEST);
        orders.sort_unstable_by(|a, b| b.cmp(a));
        orders
    };
    let mut policy = Enabled {
        all: sorted(&[all]),
        asked: sorted(&[all, asked]),
        mapped: [0; LARGEST as usize + 1],
    };
    let outcome = walk_over(trace, events, &mut policy)?;
    Ok(Folios { outcome, mapped: policy.mapped })
}

/// The enabled orders, the largest first.
struct Enabled {
    all: Vec<u8>,
    /// For memory with `MADV_HUGEPAGE`.
    asked: Vec<u8>,
    mapped: [u64; LARGEST as usize + 1],
}

impl Policy for Enabled {
    fn fault(&mut self, fault: &Fault<'_>) -> Vec<u64> {
        let block = |order: u8| {
            let first = fault.page >> order << order;
            first..first + (1 << order)
        };
        let fits = |order: &u8| {
            let block = block(*order);
            let inside = fault.alike.start <= block.start && block.end <= fault.alike.end;
            inside && fault.pages.range(block).all(|(page, _)| *page == fault.page)
        };
        let reads = matches!(fault.access, Access::Read | Access::Exec);
        let orders: &[u8] = match fault.huge {
            None => &self.all,
            Some(true) => &self.asked,
            Some(false) => &[],
        };
        let order = orders.iter().copied().find(fits).filter(|_| !reads).unwrap_or(0);
        self.mapped[usize::from(order)] += 1;
        block(order).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Backing, Kind, Prot};
    use faultless::PAGE_SIZE;

    /// An address at which every folio may start.
    const START: u64 = 1 << 40;

    fn with(orders: &[u8], events: &[Kind]) -> Folios {
        let trace = Trace::of_one_thread(events.iter().copied());
        folios(&trace, orders, &[]).unwrap()
    }

    fn map(page: u64, pages: u64) -> Kind {
        let prot = Prot::READ | Prot::WRITE;
        let (start, len) = (START + page * PAGE_SIZE, pages * PAGE_SIZE);
        Kind::Map { start, len, prot, flags: 0x22, backing: Backing::Anon }
    }

    fn touch(page: u64, access: Access) -> Kind {
        Kind::first(START + page * PAGE_SIZE, access)
    }

    #[test]
    fn store_maps_the_aligned_folio_around_it() {
        let w = Access::Write;
        let got = with(&[2], &[map(0, 16), touch(5, w), touch(4, w), touch(7, w), touch(8, w)]);
        assert_eq!((got.outcome.faults, got.outcome.left, got.mapped[2]), (4, 2, 2));
        // Page 6 of the first folio, three of the second.
        assert_eq!((got.outcome.peak_untouched, got.outcome.wasted), (4, 4));
    }

    #[test]
    fn largest_fitting_folio_is_mapped() {
        let w = Access::Write;
        // The mapping starts in the middle of a block of 8, and the next block has a page.
        let got = with(&[1, 3], &[map(4, 20), touch(5, w), touch(9, w), touch(17, w)]);
        assert_eq!((got.mapped[0], got.mapped[1], got.mapped[3]), (0, 1, 2));
        // A heap that grows in small steps never has a large empty block.
        let mut grown = Vec::new();
        for part in 0..4 {
            grown.extend([map(part * 2, 2), touch(part * 2, w), touch(part * 2 + 1, w)]);
        }
        let got = with(&[3], &grown);
        assert_eq!((got.outcome.left, got.mapped[0], got.mapped[3]), (8, 8, 0));
    }

    #[test]
    fn load_maps_only_the_zero_page() {
        let got = with(&[9], &[map(0, 512), touch(0, Access::Read), touch(1, Access::Write)]);
        assert_eq!((got.mapped[0], got.mapped[9]), (2, 0), "{got:?}");
    }

    #[test]
    fn advised_memory_gets_the_orders_of_madvise() {
        let advise = |page: u64, pages: u64, advice| {
            let (start, len) = (START + page * PAGE_SIZE, pages * PAGE_SIZE);
            Kind::Advise { start, len, advice }
        };
        let of = |all: &[u8], asked: &[u8], events: &[Kind]| {
            let trace = Trace::of_one_thread(events.iter().copied());
            folios(&trace, all, asked).unwrap()
        };
        let touches: Vec<_> = (0..2048).map(|page| touch(page, Access::Write)).collect();
        // The middle of the mapping has the advice, so the kernel splits the mapping in three.
        let asks = [&[map(0, 2048), advise(512, 1024, 14)], &touches[..]].concat();
        let got = of(&[], &[9], &asks);
        assert_eq!((got.outcome.left, got.mapped[0], got.mapped[9]), (1026, 1024, 2));
        assert_eq!(of(&[], &[], &asks).outcome.left, 2048);
        let refuses = [&[map(0, 2048), advise(512, 1024, 15)], &touches[..]].concat();
        assert_eq!(of(&[9], &[], &refuses).outcome.left, 1026);
        // A folio does not extend beyond the memory with the advice.
        let part = [&[map(0, 2048), advise(256, 512, 14)], &touches[..]].concat();
        assert_eq!(of(&[], &[9], &part).outcome.left, 2048);
        // A new mapping has no advice.
        let again = [&[map(0, 2048), advise(0, 2048, 14), map(0, 2048)], &touches[..]].concat();
        assert_eq!(of(&[], &[9], &again).outcome.left, 2048);
    }

    /// A folio needs a range without any mapped page.
    #[test]
    fn pages_resident_at_the_start_prevent_folios() {
        let (prot, backing) = (Prot::READ | Prot::WRITE, Backing::Anon);
        let area = Kind::Area { start: START, len: 16 * PAGE_SIZE, prot, backing };
        let resident = Kind::Resident { start: START, len: 3 * PAGE_SIZE, written: true };
        let w = Access::Write;
        let got = with(&[2], &[area, resident, touch(3, w), touch(8, w)]);
        assert_eq!((got.mapped[0], got.mapped[2]), (1, 1));
        assert_eq!(got.outcome.peak_resident, 5);
    }

    #[test]
    fn sizes_of_folios_follow_the_base_page() {
        let kib = |order: u8| 4_u64 << order;
        for (base, small, large) in [(4, 16, 2 << 10), (16, 64, 32 << 10), (64, 256, 512 << 10)] {
            assert_eq!(kib(smallest(base / 4)), small, "base pages of {base} KiB");
            assert_eq!(kib(thp(base / 4)), large, "base pages of {base} KiB");
        }
        // A huge page of 512 MiB, requested for 1 GiB, is one fault.
        let pages = 1 << (LARGEST + 1);
        let got = with(&[LARGEST], &[map(0, pages), touch(7, Access::Write)]);
        assert_eq!((got.mapped[usize::from(LARGEST)], got.outcome.left), (1, 1));
        let short = with(&[LARGEST], &[map(1, pages / 2), touch(7, Access::Write)]);
        assert_eq!((short.mapped[0], short.outcome.left), (1, 1));
    }

    #[test]
    fn without_orders_each_fault_maps_a_page() {
        let trace = crate::recordings::find("python").unwrap().trace().unwrap();
        let none = folios(&trace, &[], &[]).unwrap();
        assert_eq!(none.outcome.left, none.outcome.faults);
        assert_eq!(none.mapped[0], none.outcome.faults);
        let some = folios(&trace, &[4], &[]).unwrap();
        assert!(some.outcome.left < none.outcome.left / 2, "{some:?}");
        assert_eq!(some.mapped.iter().sum::<u64>(), some.outcome.left);
    }
}
