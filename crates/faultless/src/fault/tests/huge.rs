//! Huge text: the conditions for mapping a file's pages with one huge leaf, and the calls that
//! split, unmap and restore the leaf.

use crate::fault::{Access, FaultError, FaultKind};
use crate::file::Object;
use crate::heap::Shared;
use crate::knob::{HugeText, Locking, Setting};
use crate::space::{Advice, Backing, MapFlags, PrivateCopies, Prot, RemapFlags, Space};
use crate::stat::Counter;
use crate::testing::guest::{
    self, AT, P, PRIVATE, RW, SHARED, TestCpu, TestSpace, TestVm, cpu, load, store,
};
use crate::testing::guest::{check, map_object, read_object, write_object};
use crate::testing::store::{Memory, Plan, file, finish};
use std::sync::Arc;
use std::vec::Vec;

pub(crate) const RX: Prot = Prot::READ.union(Prot::EXEC);
pub(crate) const RWX: Prot = RW.union(Prot::EXEC);
/// Pages of a folio.
pub(crate) const F: u64 = 512;
/// Two folios and a tail.
pub(crate) const PAGES: u64 = 2 * F + 5;
pub(crate) const FRAMES: u32 = 8192;

pub(crate) struct Setup<'v> {
    pub(crate) cpu: TestCpu<'v>,
    pub(crate) space: TestSpace,
    pub(crate) memory: Arc<Memory>,
    pub(crate) file: Shared<Object>,
}

impl<'v> Setup<'v> {
    /// Creates an unmapped file of [`PAGES`] pages.
    pub(crate) fn new(vm: &'v TestVm) -> Self {
        let cpu = cpu(vm, 0);
        let space = Space::new(&cpu).unwrap();
        let memory = Memory::new(PAGES, 0);
        let file = file(&cpu, &memory);
        Self { cpu, space, memory, file }
    }

    /// Creates a file mapped at `AT`.
    pub(crate) fn mapped(vm: &'v TestVm, prot: Prot, flags: MapFlags) -> Self {
        let setup = Self::new(vm);
        setup.map(0, prot, flags);
        setup
    }

    pub(crate) fn map(&self, at: u64, prot: Prot, flags: MapFlags) {
        map_object(&self.cpu, &self.space, (at, PAGES), prot, flags, (&self.file, 0));
    }

    pub(crate) fn fetch(&self, page: u64) -> Result<FaultKind, FaultError> {
        self.space.fault_remote(&self.cpu, AT + page * P, Access::Execute)
    }

    pub(crate) fn load(&self, page: u64) -> Result<u64, FaultError> {
        load(&self.cpu, &self.space, AT + page * P)
    }

    /// Returns the number of pages mapped by huge leaves.
    pub(crate) fn huge(&self) -> u64 {
        let mut huge = 0;
        self.space.areas(&self.cpu, |area| huge += area.huge);
        let leaves = self.count(Counter::FilePmdMapped);
        assert_eq!(leaves * F, huge, "the gauge");
        huge
    }

    pub(crate) fn count(&self, counter: Counter) -> u64 {
        self.cpu.vm().totals().get(counter)
    }

    /// Checks that every mapped page shows the content of the file.
    pub(crate) fn shows_all(&self) {
        self.check();
        (0..PAGES).for_each(|page| assert_eq!(self.load(page), Ok(page + 1), "page {page}"));
        self.check();
    }

    pub(crate) fn check(&self) {
        check(&self.cpu, &[&self.space], &[&self.file], 0);
    }

    pub(crate) fn check_with(&self, other: &TestSpace) {
        check(&self.cpu, &[&self.space, other], &[&self.file], 0);
    }

    pub(crate) fn finish(self) {
        finish(&self.cpu, self.space, Vec::from([self.file]));
    }
}

pub(crate) fn each_policy(test: impl Fn(&TestVm)) {
    for locking in Locking::ALL {
        let vm = guest::vm(2, FRAMES);
        vm.set(Setting::Locking(locking));
        test(&vm);
    }
}

#[test]
fn the_first_fetch_maps_two_mebibytes_by_one_read_and_one_leaf() {
    each_policy(|vm| {
        let setup = Setup::mapped(vm, RX, PRIVATE);
        assert_eq!(setup.fetch(7), Ok(FaultKind::Huge));
        let reads = setup.memory.reads.lock().unwrap().clone();
        assert_eq!(reads, [(0, (F * P) as usize)]);
        assert_eq!((setup.huge(), setup.space.resident_pages(&setup.cpu)), (F, F));
        (0..F).for_each(|page| assert_eq!(setup.load(page), Ok(page + 1)));
        assert_eq!(setup.count(Counter::Faults), 1);
        assert_eq!(setup.fetch(F + 1), Ok(FaultKind::Huge));
        assert_eq!(setup.fetch(2 * F), Ok(FaultKind::Shared), "the tail has base pages");
        assert_eq!(setup.huge(), 2 * F);
        assert_eq!(setup.count(Counter::ThpFileAlloc), 2);
        assert_eq!(setup.count(Counter::MajorFault), 3);
        setup.shows_all();
        setup.finish();
    });
}

/// Text with random-access advice is not read 2 MiB at a time, unless the program also requests
/// huge pages.
#[test]
fn text_with_random_advice_is_read_page_by_page() {
    each_policy(|vm| {
        let setup = Setup::mapped(vm, RX, PRIVATE);
        let advise = |advice| setup.space.madvise(&setup.cpu, AT, PAGES * P, advice).unwrap();
        advise(Advice::Random);
        assert_eq!(setup.fetch(7), Ok(FaultKind::Shared));
        assert_eq!(*setup.memory.reads.lock().unwrap(), [(7, P as usize)]);
        assert_eq!(setup.space.collapse_text(&setup.cpu, 0, 1), None);
        assert_eq!(setup.huge(), 0);
        advise(Advice::HugePage);
        assert_eq!(setup.fetch(F + 7), Ok(FaultKind::Huge));
        setup.shows_all();
        setup.finish();
    });
}

#[test]
fn a_second_space_shares_the_folio_and_needs_only_tables() {
    each_policy(|vm| {
        let setup = Setup::mapped(vm, RX, PRIVATE);
        setup.fetch(0).unwrap();
        let (reads, free) = (setup.count(Counter::StoreRead), vm.free_frames());
        let other = Space::new(&setup.cpu).unwrap();
        map_object(&setup.cpu, &other, (0, PAGES), RX, SHARED, (&setup.file, 0));
        assert_eq!(
            other.fault_remote(&setup.cpu, AT + 9 * P, Access::Execute),
            Ok(FaultKind::Huge)
        );
        assert_eq!(load(&setup.cpu, &other, AT + 511 * P), Ok(512));
        setup.cpu.drain();
        assert_eq!(setup.count(Counter::StoreRead), reads);
        assert!(free <= vm.free_frames() + 64, "{free} frames were free");
        check(&setup.cpu, &[&setup.space, &other], &[&setup.file], 0);
        // The last space with the leaf has the last references to the folio.
        assert_eq!(setup.space.munmap(&setup.cpu, AT, PAGES * P), Ok(()));
        check(&setup.cpu, &[&setup.space, &other], &[&setup.file], 0);
        assert_eq!(load(&setup.cpu, &other, AT + 3 * P), Ok(4));
        other.exit(&setup.cpu);
        setup.finish();
    });
}

#[test]
fn the_knob_and_the_advice_select_huge_text() {
    let cases = [
        (HugeText::Always, RX, None, true),
        (HugeText::Always, Prot::READ, None, false),
        (HugeText::Always, Prot::READ, Some(Advice::HugePage), true),
        (HugeText::Always, RX, Some(Advice::NoHugePage), false),
        (HugeText::Madvise, RX, None, false),
        (HugeText::Madvise, RX, Some(Advice::HugePage), true),
        (HugeText::Never, RX, Some(Advice::HugePage), false),
    ];
    for (choice, prot, advice, huge) in cases {
        let vm = guest::vm(2, FRAMES);
        vm.set(Setting::HugeText(choice));
        let setup = Setup::mapped(&vm, prot, PRIVATE);
        if let Some(advice) = advice {
            setup.space.madvise(&setup.cpu, AT, PAGES * P, advice).unwrap();
        }
        assert_eq!(setup.load(1), Ok(2));
        assert_eq!(setup.huge(), if huge { F } else { 0 }, "{choice:?} {prot:?} {advice:?}");
        setup.finish();
    }
}

/// A misaligned offset, a VMA that begins or ends too late or too early, and the last pages of a
/// file, which do not fill a folio.
#[test]
fn misaligned_ranges_are_mapped_in_base_pages() {
    let vm = guest::vm(2, FRAMES);
    let setup = Setup::new(&vm);
    for (at, first, pages) in [(1, 0, F), (0, 1, F), (0, 0, F - 1), (1, 1, F - 1), (0, F, F + 5)] {
        map_object(&setup.cpu, &setup.space, (at, pages), RX, SHARED, (&setup.file, first));
        assert_eq!(setup.load(at + 5), Ok(first + 6));
        let huge = if first == F { F } else { 0 };
        assert_eq!(setup.huge(), huge, "{pages} pages at {at} of page {first}");
        setup.space.munmap(&setup.cpu, AT, 2 * F * P).unwrap();
        setup.check();
    }
    // A byte less than the second folio.
    setup.file.set_len(&setup.cpu, 2 * F * P - 1).unwrap();
    setup.map(0, RX, SHARED);
    assert_eq!(setup.load(F), Ok(F + 1));
    assert_eq!((setup.huge(), setup.load(2 * F)), (0, Err(FaultError::Bus)));
    setup.finish();
}

/// A kernel has read the file's first page, as it does to start a program.
#[test]
fn cached_pages_move_into_the_folio() {
    each_policy(|vm| {
        let setup = Setup::mapped(vm, RX, PRIVATE);
        assert_eq!(read_object(&setup.cpu, &setup.file, 3), Some(4));
        assert_eq!(read_object(&setup.cpu, &setup.file, 100), Some(101));
        let before = vm.free_frames();
        assert_eq!(setup.fetch(0), Ok(FaultKind::Huge));
        let pages: u64 = setup.count(Counter::PageRead);
        assert_eq!(pages, F, "no page was read twice");
        setup.cpu.drain();
        assert!(before <= vm.free_frames() + F + 64, "no page has two frames");
        setup.shows_all();
        setup.finish();
    });
}

/// A page that is pinned by another mapping, dirty, or in use cannot move.
#[test]
fn a_missing_folio_is_counted_and_base_pages_are_mapped() {
    each_policy(|vm| {
        let setup = Setup::mapped(vm, RX, PRIVATE);
        let other = Space::new(&setup.cpu).unwrap();
        map_object(&setup.cpu, &other, (0, PAGES), RW, SHARED, (&setup.file, 0));
        assert_eq!(load(&setup.cpu, &other, AT + 3 * P), Ok(4));
        store(&setup.cpu, &other, AT + (F + 3) * P, F + 4).unwrap();
        for page in [1, F] {
            assert_eq!(setup.fetch(page), Ok(FaultKind::Shared));
        }
        assert_eq!((setup.huge(), setup.count(Counter::ThpFileFallback)), (0, 2));
        setup.check_with(&other);
        other.exit(&setup.cpu);
        setup.shows_all();
        setup.finish();
    });
    // No frames.
    let vm = guest::vm(2, 400);
    let setup = Setup::mapped(&vm, RX, PRIVATE);
    assert_eq!(setup.fetch(1), Ok(FaultKind::Shared));
    assert_eq!((setup.huge(), setup.count(Counter::ThpFileFallback)), (0, 1));
    assert!(setup.count(Counter::PageRead) < 64, "no read-ahead when memory is short");
    setup.finish();
}

#[test]
fn a_store_splits_and_copies_one_page() {
    each_policy(|vm| {
        let setup = Setup::mapped(vm, RWX, PRIVATE);
        assert_eq!(setup.load(1), Ok(2));
        assert_eq!(setup.huge(), F);
        store(&setup.cpu, &setup.space, AT + 7 * P, 70).unwrap();
        assert_eq!((setup.huge(), setup.count(Counter::ThpSplitPmd)), (0, 1));
        let faults = setup.count(Counter::Faults);
        for page in (0..F).filter(|page| *page != 7) {
            assert_eq!(setup.load(page), Ok(page + 1));
        }
        assert_eq!(setup.count(Counter::Faults), faults, "the other pages stay mapped");
        assert_eq!(setup.load(7), Ok(70));
        assert_eq!(read_object(&setup.cpu, &setup.file, 7), Some(8));
        setup.check();
        setup.finish();
    });
}

#[test]
fn a_store_to_shared_text_is_written_back() {
    let vm = guest::vm(2, FRAMES);
    let setup = Setup::mapped(&vm, RWX, SHARED);
    assert_eq!(setup.load(1), Ok(2));
    store(&setup.cpu, &setup.space, AT + 7 * P, 70).unwrap();
    assert!(setup.file.is_dirty(&setup.cpu, 7) && !setup.file.is_dirty(&setup.cpu, 6));
    let protect = |pages| setup.space.write_protect(&setup.cpu, &setup.file, pages);
    assert_eq!(setup.file.write_back(&setup.cpu, 0..PAGES, protect), Ok(1));
    assert_eq!(setup.memory.word(7), 70);
    // The split folio is collapsed again.
    setup.space.madvise(&setup.cpu, AT, F * P, Advice::Collapse).unwrap();
    assert_eq!((setup.huge(), setup.count(Counter::ThpCollapsed)), (F, 1));
    assert_eq!(setup.load(7), Ok(70));
    setup.finish();
}

/// The kernel writes to a file during its execution: programs see the new bytes, and no other page
/// is written back.
#[test]
fn a_write_call_is_visible_through_the_leaf() {
    let vm = guest::vm(2, FRAMES);
    let setup = Setup::mapped(&vm, RX, PRIVATE);
    assert_eq!(setup.load(1), Ok(2));
    write_object(&setup.cpu, &setup.file, 5, 50).unwrap();
    assert_eq!((setup.load(5), setup.huge()), (Ok(50), F));
    assert_eq!(setup.file.write_back(&setup.cpu, 0..PAGES, |_| {}), Ok(1));
    assert_eq!(setup.memory.word(5), 50);
    setup.finish();
}

#[test]
fn a_poke_splits() {
    let vm = guest::vm(2, FRAMES);
    let setup = Setup::mapped(&vm, RWX, PRIVATE);
    assert_eq!(setup.load(1), Ok(2));
    setup.space.write_bytes(&setup.cpu, AT + 9 * P, &77u64.to_ne_bytes()).unwrap();
    assert_eq!((setup.load(9), setup.load(10), setup.huge()), (Ok(77), Ok(11), 0));
    let mut bytes = [0; 8];
    setup.space.read_bytes(&setup.cpu, AT + 9 * P, &mut bytes).unwrap();
    assert_eq!(u64::from_ne_bytes(bytes), 77);
    setup.finish();
}

/// A page of a huge leaf reports the same information as a base page.
#[test]
fn a_page_of_a_leaf_reports_like_a_base_page() {
    let vm = guest::vm(2, FRAMES);
    let setup = Setup::mapped(&vm, RX, SHARED);
    assert_eq!(setup.load(0), Ok(1));
    let (cpu, space) = (&setup.cpu, &setup.space);
    let there = |page: u64| space.page_at(cpu, AT + page * P + 8).unwrap();
    assert_eq!(there(9).frame.0, there(0).frame.0 + 9);
    assert_eq!(there(9).prot, RX);
    assert!(space.walk(cpu, AT + 9 * P, Access::Execute).is_some());
    assert!(space.walk(cpu, AT + 9 * P, Access::Write).is_none());
    let mut in_core = 0;
    space.mincore(cpu, AT, PAGES * P, |core| in_core += u64::from(core)).unwrap();
    assert_eq!(in_core, F);
    let pins = space.pin(cpu, AT + 9 * P, P, false).unwrap();
    assert_eq!(pins.frames(), [there(9).frame]);
    drop(pins);
    space.madvise(cpu, AT, PAGES * P, Advice::PopulateRead).unwrap();
    assert_eq!(setup.huge(), 2 * F);
    setup.finish();
    // A pin of a private page copies the page for the space.
    let vm = guest::vm(2, FRAMES);
    let setup = Setup::mapped(&vm, RX, PRIVATE);
    assert_eq!(setup.load(0), Ok(1));
    let pins = setup.space.pin(&setup.cpu, AT + 9 * P, P, false).unwrap();
    assert_eq!((setup.load(9), setup.load(8), setup.huge()), (Ok(10), Ok(9), 0));
    drop(pins);
    setup.finish();
}

/// Calls on a whole leaf, and on parts of a leaf.
#[test]
fn only_calls_on_a_part_split_the_leaf() {
    type Call = fn(&Setup<'_>, u64, u64);
    let calls: [(&str, Call, u64); 5] = [
        ("munmap", |setup, at, len| setup.space.munmap(&setup.cpu, at, len).unwrap(), 0),
        (
            "discard",
            |setup, at, len| setup.space.madvise(&setup.cpu, at, len, Advice::DontNeed).unwrap(),
            0,
        ),
        (
            "protect",
            |setup, at, len| setup.space.mprotect(&setup.cpu, at, len, Prot::READ).unwrap(),
            F,
        ),
        (
            "revoke",
            |setup, at, len| {
                let pages = (at - AT) / P..(at - AT + len) / P;
                setup.space.revoke(&setup.cpu, &setup.file, pages, PrivateCopies::Keep);
            },
            0,
        ),
        (
            "move",
            |setup, at, len| {
                let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
                setup.space.mremap(&setup.cpu, at, len, len, flags, AT + 8 * F * P).unwrap();
            },
            0,
        ),
    ];
    for (name, call, stays) in calls {
        for flags in [PRIVATE, SHARED] {
            for (at, pages) in [(0, F), (0, 1), (5, 100), (F - 1, 1), (F - 3, 6), (0, 2 * F)] {
                let vm = guest::vm(2, FRAMES);
                let setup = Setup::mapped(&vm, RX, flags);
                assert_eq!((setup.load(0), setup.load(F)), (Ok(1), Ok(F + 1)));
                call(&setup, AT + at * P, pages * P);
                let whole = if at == 0 { pages / F } else { 0 };
                let touched = (at + pages).div_ceil(F) - at / F;
                let huge = 2 * F - touched * F + whole * stays;
                assert_eq!(setup.huge(), huge, "{name} of {pages} pages from {at} on, {flags:?}");
                let is_split = name == "move" || touched != whole;
                assert_eq!(setup.count(Counter::ThpSplitPmd) != 0, is_split, "{name}");
                setup.check();
                for page in (0..PAGES).filter(|page| !(at..at + pages).contains(page)) {
                    assert_eq!(setup.load(page), Ok(page + 1), "{name}: page {page}");
                }
                for page in at..at + pages {
                    let expected = match name {
                        "munmap" => Err(FaultError::Segv { mapped: false }),
                        "move" => {
                            let moved = AT + (8 * F + page - at) * P;
                            assert_eq!(load(&setup.cpu, &setup.space, moved), Ok(page + 1));
                            Err(FaultError::Segv { mapped: false })
                        }
                        _ => Ok(page + 1),
                    };
                    assert_eq!(setup.load(page), expected, "{name}: page {page}");
                }
                setup.check();
                setup.finish();
            }
        }
    }
}

/// If there is no frame for a split, the leaf is dropped. No contents are lost, and the next
/// accesses map the pages again.
#[test]
fn a_split_without_memory_drops_the_leaf() {
    let vm = guest::vm(2, FRAMES);
    let setup = Setup::mapped(&vm, RX, SHARED);
    assert_eq!(setup.load(0), Ok(1));
    setup.cpu.drain();
    vm.set(Setting::FrameLimit(1));
    setup.space.madvise(&setup.cpu, AT, 3 * P, Advice::DontNeed).unwrap();
    assert_eq!((setup.huge(), setup.space.resident_pages(&setup.cpu)), (0, 0));
    vm.set(Setting::FrameLimit(u64::MAX));
    setup.check();
    assert_eq!(setup.fetch(9), Ok(FaultKind::Huge));
    setup.shows_all();
    setup.finish();
}

/// All access is removed and restored. An executable leaf and a non-executable leaf remain
/// distinct.
#[test]
fn protection_of_a_leaf_changes_in_place() {
    let vm = guest::vm(2, FRAMES);
    let setup = Setup::mapped(&vm, RX, PRIVATE);
    assert_eq!(setup.load(0), Ok(1));
    let protect = |prot| setup.space.mprotect(&setup.cpu, AT, F * P, prot).unwrap();
    protect(Prot::empty());
    assert_eq!(setup.load(0), Err(FaultError::Segv { mapped: true }));
    setup.check();
    protect(Prot::READ);
    assert_eq!((setup.load(0), setup.huge()), (Ok(1), F));
    assert_eq!(setup.fetch(0), Err(FaultError::Segv { mapped: true }));
    protect(RX);
    assert_eq!(setup.fetch(0), Ok(FaultKind::Spurious));
    protect(Prot::empty());
    setup.space.munmap(&setup.cpu, AT, 3 * P).unwrap();
    setup.check();
    setup.space.munmap(&setup.cpu, AT, F * P).unwrap();
    setup.finish();
}

#[test]
fn a_child_maps_the_text_and_keeps_its_parents_stores() {
    let vm = guest::vm(2, FRAMES);
    let setup = Setup::mapped(&vm, RWX, PRIVATE);
    assert_eq!((setup.load(0), setup.load(F)), (Ok(1), Ok(F + 1)));
    store(&setup.cpu, &setup.space, AT + 3 * P, 30).unwrap();
    let child = setup.space.fork(&setup.cpu).unwrap();
    check(&setup.cpu, &[&setup.space, &child], &[&setup.file], 0);
    let loaded = |page: u64| load(&setup.cpu, &child, AT + page * P);
    assert_eq!((loaded(3), loaded(4), loaded(F + 9)), (Ok(30), Ok(5), Ok(F + 10)));
    store(&setup.cpu, &child, AT + (F + 9) * P, 90).unwrap();
    assert_eq!((setup.load(F + 9), setup.huge()), (Ok(F + 10), F));
    check(&setup.cpu, &[&setup.space, &child], &[&setup.file], 0);
    child.exit(&setup.cpu);
    setup.finish();
}

/// A file is truncated within a folio, at the folio's end, and before the folio: `SIGBUS` beyond
/// the end, and the remaining pages stay.
#[test]
fn truncation_removes_pages_of_a_leaf() {
    for pages in [0, 100, F, F + 1, 2 * F] {
        for flags in [PRIVATE, SHARED] {
            let vm = guest::vm(2, FRAMES);
            let setup = Setup::mapped(&vm, RX, flags);
            assert_eq!((setup.load(0), setup.load(F)), (Ok(1), Ok(F + 1)));
            setup.file.set_len(&setup.cpu, pages * P).unwrap();
            setup.space.revoke(&setup.cpu, &setup.file, pages..u64::MAX, PrivateCopies::Drop);
            setup.check();
            for page in 0..PAGES {
                let there = if page < pages { Ok(page + 1) } else { Err(FaultError::Bus) };
                assert_eq!(setup.load(page), there, "page {page} of {pages}");
            }
            // After the file grows again, the new part is zeros, and a complete folio is mapped as
            // a huge leaf again.
            setup.file.set_len(&setup.cpu, PAGES * P).unwrap();
            assert_eq!(setup.load(2 * F - 1), Ok(if pages == 2 * F { 2 * F } else { 0 }));
            setup.check();
            setup.finish();
        }
    }
}

/// The frame of a punched page is not freed while the huge leaf maps the frame.
#[test]
fn frames_of_a_leaf_stay_while_the_leaf_exists() {
    let vm = guest::vm(2, FRAMES);
    let setup = Setup::mapped(&vm, RX, SHARED);
    assert_eq!(setup.load(0), Ok(1));
    setup.file.punch(&setup.cpu, 3..4).unwrap();
    // The page is not revoked yet: programs still see the old page.
    assert_eq!(setup.load(3), Ok(4));
    setup.space.revoke(&setup.cpu, &setup.file, 3..4, PrivateCopies::Keep);
    assert_eq!((setup.load(3), setup.load(4)), (Ok(0), Ok(5)));
    setup.check();
    setup.finish();
}

/// A page in use prevented a folio. Its replacement pages may form a folio at once.
#[test]
fn replacement_pages_form_a_folio() {
    let vm = guest::vm(2, FRAMES);
    vm.set(Setting::HugeText(HugeText::Never));
    let setup = Setup::mapped(&vm, RX, PRIVATE);
    assert_eq!(setup.load(1), Ok(2));
    vm.set(Setting::HugeText(HugeText::Always));
    let other = Space::new(&setup.cpu).unwrap();
    map_object(&setup.cpu, &other, (0, PAGES), RX, SHARED, (&setup.file, 0));
    for _ in 0..2 {
        assert_eq!(other.fault_remote(&setup.cpu, AT, Access::Execute), Ok(FaultKind::Shared));
        other.madvise(&setup.cpu, AT, F * P, Advice::DontNeed).unwrap();
    }
    setup.file.punch(&setup.cpu, 0..F).unwrap();
    setup.space.revoke(&setup.cpu, &setup.file, 0..F, PrivateCopies::Keep);
    other.munmap(&setup.cpu, AT, PAGES * P).unwrap();
    map_object(&setup.cpu, &other, (0, PAGES), RX, SHARED, (&setup.file, 0));
    assert_eq!(other.fault_remote(&setup.cpu, AT, Access::Execute), Ok(FaultKind::Huge));
    setup.check_with(&other);
    other.exit(&setup.cpu);
    setup.finish();
}

/// A short read, or a read that fails in the middle, leaves base pages. The fault waits for a
/// pending read.
#[test]
fn failed_and_short_reads_leave_base_pages() {
    each_policy(|vm| {
        let setup = Setup::mapped(vm, RX, PRIVATE);
        setup.memory.plan([Plan::Fail(100 * P as usize)]);
        assert_eq!(setup.fetch(1), Ok(FaultKind::Shared));
        assert_eq!((setup.huge(), setup.count(Counter::ThpFileFallback)), (0, 1));
        setup.check();
        setup.memory.plan([Plan::Later]);
        assert_eq!(setup.fetch(F + 1), Ok(FaultKind::Pending));
        let pending = setup.cpu.pending_read().unwrap();
        assert_eq!(setup.fetch(F + 2), Ok(FaultKind::Pending));
        assert_eq!(setup.cpu.pending_read().unwrap().id(), pending.id());
        setup.memory.complete(&setup.cpu, None);
        assert_eq!(pending.outcome(), Some(Ok(())));
        assert_eq!(setup.fetch(F + 1), Ok(FaultKind::Huge));
        setup.shows_all();
        setup.finish();
    });
}

/// Another CPU unmaps, cuts off, or writes while the first reads, or copies into, the folio.
#[test]
fn concurrent_changes_are_detected() {
    for cached in [false, true] {
        let vm = guest::vm(2, FRAMES);
        let setup = Setup::mapped(&vm, RX, PRIVATE);
        if cached {
            assert_eq!(read_object(&setup.cpu, &setup.file, 0), Some(1));
        }
        let space = &setup.space;
        let gone = |other: &TestCpu<'_>| space.munmap(other, AT, PAGES * P).unwrap();
        // The tables above the folio's table exist.
        guest::map(&setup.cpu, space, 3 * F, 1, RW);
        store(&setup.cpu, space, AT + 3 * F * P, 1).unwrap();
        let served = if cached {
            // While the first page is copied.
            guest::between(&vm, gone, || setup.fetch(1))
        } else {
            setup.memory.plan([Plan::Later]);
            assert_eq!(setup.fetch(1), Ok(FaultKind::Pending));
            gone(&cpu(&vm, 1));
            setup.memory.complete(&setup.cpu, None);
            setup.fetch(1)
        };
        assert_eq!(served, Err(FaultError::Segv { mapped: false }));
        assert_eq!((setup.huge(), setup.count(Counter::ThpFileAlloc)), (0, 1));
        setup.finish();
    }
}

#[test]
fn an_object_without_a_store_collapses() {
    let vm = guest::vm(2, FRAMES);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let object = Object::try_new(&cpu, F, 5).unwrap();
    for page in 0..F - 1 {
        write_object(&cpu, &object, page, page + 1).unwrap();
    }
    map_object(&cpu, &space, (0, F), RX, PRIVATE, (&object, 0));
    assert_eq!(
        space.fault_remote(&cpu, AT, Access::Execute),
        Ok(FaultKind::Shared),
        "a page is missing"
    );
    space.munmap(&cpu, AT, F * P).unwrap();
    write_object(&cpu, &object, F - 1, F).unwrap();
    map_object(&cpu, &space, (0, F), RX, PRIVATE, (&object, 0));
    assert_eq!(space.fault_remote(&cpu, AT, Access::Execute), Ok(FaultKind::Huge));
    (0..F).for_each(|page| assert_eq!(load(&cpu, &space, AT + page * P), Ok(page + 1)));
    finish(&cpu, space, Vec::from([object]));
}

/// A large file without a fixed address is mapped at an aligned address, if there is room. Small
/// files and anonymous memory are not aligned.
#[test]
fn large_files_are_aligned_for_leaves() {
    let vm = guest::vm(2, FRAMES);
    let setup = Setup::new(&vm);
    let map = |first: u64, pages: u64| {
        let backing = Backing { object: &setup.file, first, may_write: false };
        setup
            .space
            .mmap_object(&setup.cpu, None, pages * P, RX, MapFlags::PRIVATE, backing)
            .unwrap()
    };
    let agrees = |at: u64, first: u64| (at / P).wrapping_sub(first).is_multiple_of(F);
    for first in [0, 1, 511, F + 3] {
        assert!(agrees(map(first, F), first));
        // The next mapping would otherwise be aligned by chance.
        let anonymous = MapFlags::PRIVATE | MapFlags::ANONYMOUS;
        setup.space.mmap(&setup.cpu, None, 7 * P, RW, anonymous).unwrap();
    }
    let small = [map(3, F - 1), map(3, F - 1)];
    assert!(small.iter().any(|at| !agrees(*at, 3)), "mappings are placed downwards");
    vm.set(Setting::HugeText(HugeText::Never));
    let plain = [map(0, F), map(0, F + 1), map(0, F)];
    assert!(plain.iter().any(|at| !agrees(*at, 0)));
    vm.set(Setting::HugeText(HugeText::Always));
    let at = map(0, PAGES);
    assert_eq!(setup.space.fault_remote(&setup.cpu, at, Access::Execute), Ok(FaultKind::Huge));
    setup.finish();
}

/// The accessed bit of the first page counts for all pages of the leaf.
#[test]
fn text_in_use_stays_huge_while_other_pages_are_evicted() {
    let vm = guest::vm(2, FRAMES);
    let setup = Setup::mapped(&vm, RX, PRIVATE);
    let memory = Memory::new(1000, 0);
    let other = file(&setup.cpu, &memory);
    setup.fetch(0).unwrap();
    other.read_ahead(&setup.cpu, 0..1000).unwrap();
    // These pages were never used. Finding all of them requires a scan of nearly all frames.
    assert_eq!(setup.cpu.reclaim(1000), 1000);
    assert_eq!((other.resident_pages(&setup.cpu), setup.huge()), (0, F));
    let scanned = setup.count(Counter::PageScanned);
    assert!(scanned >= 1000 + F, "{scanned}");
    // The leaf is unused since then, so its folio is evicted as a whole.
    assert_eq!(setup.cpu.reclaim(u64::MAX), F);
    assert_eq!(setup.count(Counter::PageScanned) - scanned, F);
    Object::release(other, &setup.cpu);
    setup.finish();
}
