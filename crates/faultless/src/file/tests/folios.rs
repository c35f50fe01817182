//! Obstacles for folios and huge leaves: unusual ranges, pages being moved, late store errors,
//! locked memory.

use crate::error::Errno;
use crate::fault::{Access, FaultError, FaultKind};
use crate::file::StoreError;
use crate::knob::{HugeText, Locking, Setting};
use crate::machine::Invalidate;
use crate::space::{Advice, MemoryLock, PrivateCopies, Prot, Space};
use crate::stat::Counter;
use crate::testing::guest::{self, AT, P, PRIVATE, SHARED, TestSpace, TestVm, cpu, map_object};
use crate::testing::store::{File, Memory, Plan, file, finish, write_back};
use std::sync::Arc;
use std::vec::Vec;

const RX: Prot = Prot::READ.union(Prot::EXEC);
/// Pages of a folio.
const F: u64 = 512;
const FRAMES: u32 = 8192;

/// A mostly unmapped range is refused at once, as on Linux, which checks VMAs and not addresses.
#[test]
fn a_collapse_of_a_mostly_unmapped_range_is_refused() {
    let vm = guest::vm(2, FRAMES);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let collapse = |at: u64, len: u64| {
        space.madvise(&cpu, at, len, Advice::Collapse).map_err(|error| error.errno)
    };
    for (at, len) in [
        (0u64.wrapping_sub(2 * P), P),
        (0u64.wrapping_sub(1 << 22), (1 << 22) - P),
        (1 << 62, 1 << 62),
    ] {
        assert_eq!(collapse(at, len), Err(Errno::ENOMEM), "{at:#x} and {len:#x}");
    }
    finish(&cpu, space, Vec::new());
}

struct Text<'v> {
    cpu: guest::TestCpu<'v>,
    space: TestSpace,
    memory: Arc<Memory>,
    file: File,
}

/// Each call that unmaps a huge leaf, or reduces the leaf's rights, flushes all its pages.
#[test]
fn changes_of_a_leaf_are_flushed() {
    type Call = fn(&Text<'_>);
    let calls: [(&str, Call); 6] = [
        ("munmap", |text| text.space.munmap(&text.cpu, AT, F * P).unwrap()),
        ("discard", |text| text.space.madvise(&text.cpu, AT, F * P, Advice::DontNeed).unwrap()),
        ("revoke", |text| text.space.revoke(&text.cpu, &text.file, 0..F, PrivateCopies::Drop)),
        ("protect", |text| text.space.mprotect(&text.cpu, AT, F * P, Prot::READ).unwrap()),
        ("hide", |text| text.space.mprotect(&text.cpu, AT, F * P, Prot::empty()).unwrap()),
        ("split", |text| text.space.munmap(&text.cpu, AT, 0x10 * P).unwrap()),
    ];
    for (name, call) in calls {
        let vm = guest::vm(2, FRAMES);
        let text = Text::new(&vm, RX, PRIVATE);
        text.space.activate(&text.cpu);
        assert_eq!(text.fetch(1), Ok(FaultKind::Huge));
        vm.machine().invalidated.lock().unwrap().clear();
        call(&text);
        let flushed = vm.machine().invalidated.lock().unwrap().clone();
        let whole = |(_, _, what): &(_, _, Invalidate)| matches!(what, Invalidate::All);
        assert!(flushed.iter().any(whole), "{name}: {flushed:?}");
        // SAFETY: no program runs in the space.
        unsafe { text.space.deactivate(&text.cpu) };
        finish(&text.cpu, text.space, Vec::from([text.file]));
    }
}

/// Inaccessible memory stays inaccessible after a collapse.
#[test]
fn a_collapse_gives_no_access() {
    let vm = guest::vm(2, FRAMES);
    let text = Text::new(&vm, RX, PRIVATE);
    vm.set(Setting::HugeText(HugeText::Never));
    assert_eq!(text.fetch(1), Ok(FaultKind::Shared));
    text.space.mprotect(&text.cpu, AT, F * P, Prot::empty()).unwrap();
    text.space.madvise(&text.cpu, AT, F * P, Advice::Collapse).unwrap();
    assert_eq!(vm.totals().get(Counter::FilePmdMapped), 1);
    assert!(!text.space.entry_at(&text.cpu, AT).is_present());
    assert_eq!(text.fetch(1), Err(FaultError::Segv { mapped: true }));
    finish(&text.cpu, text.space, Vec::from([text.file]));
}

/// A call scans a limited number of places without success. The next call continues there.
#[test]
fn a_scan_for_text_is_bounded() {
    const MAPPINGS: u64 = 100;
    let vm = guest::vm(2, FRAMES);
    vm.set(Setting::HugeText(HugeText::Never));
    let text = Text::new(&vm, RX, PRIVATE);
    for at in 1..MAPPINGS {
        map_object(&text.cpu, &text.space, (at * F, F), RX, PRIVATE, (&text.file, 0));
    }
    let last = (MAPPINGS - 1) * F;
    assert!((last..last + F).all(|page| text.fetch(page).is_ok()));
    vm.set(Setting::HugeText(HugeText::Always));
    let (mut from, mut calls) = (0, 0);
    while let Some(next) = text.space.collapse_text(&text.cpu, from, 300) {
        assert!(next > from, "{next:#x} after {from:#x}");
        let collapsed = vm.totals().get(Counter::ThpCollapsed) != 0;
        assert_eq!(collapsed, next == AT + (last + F) * P, "at {next:#x}");
        (from, calls) = (next, calls + 1);
    }
    assert_eq!(vm.totals().get(Counter::ThpCollapsed), 1);
    assert!(calls > 2, "{calls} calls for {MAPPINGS} mappings");
    finish(&text.cpu, text.space, Vec::from([text.file]));
}

/// Text whose other pages must be read first is collapsed after these reads. The CPU is left with
/// no pending read without a waiter.
#[test]
fn a_scan_for_text_waits_for_no_read() {
    let vm = guest::vm(2, FRAMES);
    vm.set(Setting::HugeText(HugeText::Never));
    let text = Text::new(&vm, RX, PRIVATE);
    assert_eq!(text.fetch(1), Ok(FaultKind::Shared));
    vm.set(Setting::HugeText(HugeText::Always));
    text.memory.plan([Plan::Later]);
    let look = || text.space.collapse_text(&text.cpu, AT, 1);
    assert_eq!(look(), Some(AT + F * P));
    assert_eq!(vm.totals().get(Counter::ThpCollapsed), 0);
    assert!(text.cpu.pending_read().is_none());
    assert_eq!(text.fetch(1), Ok(FaultKind::Spurious), "base pages stay mapped");
    text.memory.complete(&text.cpu, None);
    look();
    assert_eq!(vm.totals().get(Counter::ThpCollapsed), 1);
    finish(&text.cpu, text.space, Vec::from([text.file]));
}

/// The same for locked text: its other pages must be read first, and no CPU waits. Only touched
/// pages are mapped (`MLOCK_ONFAULT`).
#[test]
fn a_scan_for_locked_text_waits_for_no_read() {
    let vm = guest::vm(2, FRAMES);
    vm.set(Setting::HugeText(HugeText::Never));
    let text = Text::new(&vm, RX, PRIVATE);
    text.space.mlock(&text.cpu, AT, F * P, MemoryLock::OnFault).unwrap();
    assert_eq!(text.fetch(1), Ok(FaultKind::Shared));
    let resident = text.space.resident_pages(&text.cpu);
    vm.set(Setting::HugeText(HugeText::Always));
    text.memory.plan([Plan::Later]);
    let (sender, receiver) = std::sync::mpsc::channel();
    let waited = std::thread::scope(|scope| {
        let (vm, space) = (&vm, &text.space);
        scope.spawn(move || {
            space.collapse_text(&cpu(vm, 1), AT, 1);
            sender.send(()).unwrap();
        });
        let waited = receiver.recv_timeout(std::time::Duration::from_secs(5)).is_err();
        text.memory.complete(&text.cpu, None);
        waited
    });
    let now = text.space.resident_pages(&text.cpu);
    assert_eq!((waited, now), (false, resident));
    finish(&text.cpu, text.space, Vec::from([text.file]));
}

/// A failed collapse copies no page of locked private memory: no page was stored to, and most pages
/// were not even touched.
#[test]
fn a_failed_collapse_copies_no_locked_page() {
    let vm = guest::vm(2, FRAMES);
    vm.set(Setting::HugeText(HugeText::Never));
    let text = Text::new(&vm, RX.union(Prot::WRITE), PRIVATE);
    text.space.mlock(&text.cpu, AT, F * P, MemoryLock::OnFault).unwrap();
    assert_eq!(text.fetch(1), Ok(FaultKind::Shared));
    let pins = text.space.pin(&text.cpu, AT + P, P, false).unwrap();
    vm.set(Setting::HugeText(HugeText::Always));
    text.space.collapse_text(&text.cpu, AT, 1);
    assert_eq!(vm.totals().get(Counter::ThpCollapsed), 0);
    drop(pins);
    // A private copy would not show the new word.
    guest::write_object(&text.cpu, &text.file, 300, 9).unwrap();
    let found = guest::load(&text.cpu, &text.space, AT + 300 * P);
    finish(&text.cpu, text.space, Vec::from([text.file]));
    assert_eq!(found, Ok(9), "a copy");
}

/// One call unmaps more huge leaves than a batch holds.
#[test]
fn many_leaves_are_unmapped_at_once() {
    let vm = guest::vm(2, FRAMES);
    let text = Text::new(&vm, RX, PRIVATE);
    for at in 0..70 {
        map_object(&text.cpu, &text.space, (at * F, F), RX, PRIVATE, (&text.file, 0));
        assert_eq!(text.fetch(at * F), Ok(FaultKind::Huge));
    }
    text.space.munmap(&text.cpu, AT, 70 * F * P).unwrap();
    assert_eq!(vm.totals().get(Counter::FilePmdMapped), 0);
    finish(&text.cpu, text.space, Vec::from([text.file]));
}

impl<'v> Text<'v> {
    fn new(vm: &'v TestVm, prot: Prot, flags: crate::space::MapFlags) -> Self {
        let cpu = cpu(vm, 0);
        let space = Space::new(&cpu).unwrap();
        let memory = Memory::new(F, 0);
        let file = file(&cpu, &memory);
        map_object(&cpu, &space, (0, F), prot, flags, (&file, 0));
        Self { cpu, space, memory, file }
    }

    fn fetch(&self, page: u64) -> Result<FaultKind, FaultError> {
        self.space.fault_remote(&self.cpu, AT + page * P, Access::Execute)
    }

    /// Fetches like a program that waits for pending reads. All reads of the store complete later;
    /// a read which includes page `bad` fails with `errno`.
    fn fetch_later(&self, page: u64, bad: u64, errno: Errno) -> Result<FaultKind, FaultError> {
        for _ in 0..8 {
            self.memory.plans.lock().unwrap().clear();
            self.memory.plan([Plan::Later; 4]);
            let kind = self.fetch(page)?;
            if kind != FaultKind::Pending {
                return Ok(kind);
            }
            let pending = self.cpu.pending_read().unwrap();
            let (first, bytes) = *self.memory.reads.lock().unwrap().last().unwrap();
            let has_it = (first..first + bytes as u64 / P).contains(&bad);
            let error = has_it.then(|| StoreError { done: ((bad - first) * P) as usize, errno });
            self.memory.complete(&self.cpu, error);
            if pending.outcome().unwrap().is_err() {
                return Err(FaultError::Bus);
            }
        }
        panic!("page {page} is never read");
    }
}

/// A device cannot read page 300. A program that needs only page 1 sees no error.
#[test]
fn a_bad_page_elsewhere_in_the_folio_is_no_error() {
    for choice in [HugeText::Never, HugeText::Always] {
        let vm = guest::vm(2, FRAMES);
        vm.set(Setting::HugeText(choice));
        let text = Text::new(&vm, RX, PRIVATE);
        let found = text.fetch_later(1, 300, Errno::EIO);
        assert_eq!(found, Ok(FaultKind::Shared), "{choice:?}");
        finish(&text.cpu, text.space, Vec::from([text.file]));
    }
}

/// A device that needs smaller requests reports the limit later.
#[test]
fn a_device_that_cannot_read_a_folio_gets_smaller_requests() {
    let vm = guest::vm(2, FRAMES);
    let text = Text::new(&vm, RX, PRIVATE);
    for _ in 0..16 {
        text.memory.plan([Plan::Later]);
        match text.fetch(1).unwrap() {
            FaultKind::Pending => {
                let (_, bytes) = *text.memory.reads.lock().unwrap().last().unwrap();
                let error = StoreError { done: 0, errno: Errno::EAGAIN };
                text.memory.complete(&text.cpu, (bytes > 64 * P as usize).then_some(error));
                assert_eq!(text.cpu.pending_read().unwrap().outcome(), Some(Ok(())));
            }
            _ => {
                text.memory.plans.lock().unwrap().clear();
                finish(&text.cpu, text.space, Vec::from([text.file]));
                return;
            }
        }
    }
    panic!("the same read again and again: {:?}", text.memory.reads.lock().unwrap());
}

/// One of the pages has the maximum number of mappings. The other pages can be mapped as base
/// pages.
#[test]
fn a_folio_with_a_page_at_the_mapping_limit_is_mapped_in_base_pages() {
    use crate::frame::FrameMeta;
    for locking in Locking::ALL {
        let vm = guest::vm(2, FRAMES);
        vm.set(Setting::Locking(locking));
        let text = Text::new(&vm, RX, PRIVATE);
        assert_eq!(text.fetch(1), Ok(FaultKind::Huge));
        text.space.madvise(&text.cpu, AT, F * P, Advice::DontNeed).unwrap();
        let frame = text.file.get(&text.cpu, 300).unwrap();
        let meta = vm.frames.meta(frame);
        let refs = meta.refs();
        meta.preset_refs(FrameMeta::MAX_MAPPINGS);
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let (vm, space) = (&vm, &text.space);
            scope.spawn(move || {
                let result = space.fault_remote(&cpu(vm, 1), AT + P, Access::Execute);
                sender.send(result).unwrap();
            });
            let found = receiver.recv_timeout(std::time::Duration::from_secs(5));
            let Ok(found) = found else {
                std::eprintln!("{locking:?}: the fault does not end");
                std::process::abort();
            };
            assert_eq!(found, Ok(FaultKind::Shared), "{locking:?}");
        });
        text.space.madvise(&text.cpu, AT, F * P, Advice::DontNeed).unwrap();
        meta.preset_refs(refs);
        // SAFETY: the reference acquired by `get`.
        unsafe { text.cpu.put_unmapped(frame) };
        finish(&text.cpu, text.space, Vec::from([text.file]));
    }
}

/// Pages of locked memory stay mapped if their collapse fails.
#[test]
fn a_failed_collapse_keeps_locked_memory_mapped() {
    let vm = guest::vm(2, FRAMES);
    vm.set(Setting::HugeText(HugeText::Never));
    let text = Text::new(&vm, RX, SHARED);
    let (cpu, space) = (&text.cpu, &text.space);
    space.mlock(cpu, AT, F * P, MemoryLock::Now).unwrap();
    space.madvise(cpu, AT, F * P, Advice::PopulateRead).unwrap();
    let resident = || space.resident_pages(cpu);
    assert_eq!(resident(), F);
    let pins = space.pin(cpu, AT + 9 * P, P, false).unwrap();
    let done = space.madvise(cpu, AT, F * P, Advice::Collapse).map_err(|error| error.errno);
    assert_eq!(done, Err(Errno::EAGAIN));
    drop(pins);
    let dropped = text.file.drop_clean(cpu, 0..F);
    assert_eq!((dropped, resident()), (0, F), "locked pages were evicted");
    finish(&text.cpu, text.space, Vec::from([text.file]));
}

/// If no frames for a folio are available, locked pages unmapped for the folio are mapped again.
#[test]
fn a_collapse_without_memory_keeps_locked_memory_mapped() {
    for locking in Locking::ALL {
        let vm = guest::vm(2, FRAMES);
        vm.set(Setting::Locking(locking));
        vm.set(Setting::HugeText(HugeText::Never));
        let text = Text::new(&vm, RX, SHARED);
        let (cpu, space) = (&text.cpu, &text.space);
        space.madvise(cpu, AT, F * P, Advice::PopulateRead).unwrap();
        let collapse = || space.madvise(cpu, AT, F * P, Advice::Collapse);
        let resident = || space.resident_pages(cpu);
        for locked in [true, false] {
            space
                .mlock(cpu, AT, F * P, if locked { MemoryLock::Now } else { MemoryLock::No })
                .unwrap();
            vm.set(Setting::FrameLimit(vm.total_frames() - vm.free_frames() + F / 2));
            assert_eq!(collapse().map_err(|error| error.errno), Err(Errno::EAGAIN));
            assert_eq!(
                (resident(), text.file.resident_pages(cpu)),
                (if locked { F } else { 0 }, F)
            );
            vm.set(Setting::FrameLimit(u64::MAX));
        }
        collapse().unwrap();
        assert_eq!((resident(), vm.totals().get(Counter::FilePmdMapped)), (F, 1));
        finish(&text.cpu, text.space, Vec::from([text.file]));
    }
}

/// A CPU that needs a folio during the truncation of one of its pages waits for the truncation, and
/// then gets the folio.
#[test]
fn a_fault_waits_for_the_truncation_of_a_folio() {
    for locking in Locking::ALL {
        let vm = guest::vm(3, FRAMES);
        vm.set(Setting::Locking(locking));
        let text = Text::new(&vm, RX, PRIVATE);
        // The store waits for the lock of its bytes.
        let bytes = text.memory.bytes.lock().unwrap();
        let served = std::thread::scope(|scope| {
            let (vm, Text { file, space, .. }) = (&vm, &text);
            let while_it_waits = || std::thread::sleep(std::time::Duration::from_millis(50));
            let punched = scope.spawn(move || file.punch(&cpu(vm, 1), 0..3).unwrap());
            while_it_waits();
            let fetch = move || space.fault_remote(&cpu(vm, 2), AT + 9 * P, Access::Execute);
            let fetched = scope.spawn(fetch);
            while_it_waits();
            drop(bytes);
            punched.join().unwrap();
            fetched.join().unwrap()
        });
        assert_eq!((served, vm.totals().get(Counter::ThpFileFallback)), (Ok(FaultKind::Huge), 0));
        cpu(&vm, 2).drain();
        assert_eq!(guest::load(&text.cpu, &text.space, AT + 2 * P), Ok(0));
        assert_eq!(guest::load(&text.cpu, &text.space, AT + 3 * P), Ok(4));
        finish(&text.cpu, text.space, Vec::from([text.file]));
    }
}

/// A dirty page stays mapped until its writeback, so no page is unmapped for the impossible folio.
#[test]
fn a_collapse_of_a_dirty_page_unmaps_none() {
    let vm = guest::vm(2, FRAMES);
    vm.set(Setting::HugeText(HugeText::Never));
    let text = Text::new(&vm, RX, PRIVATE);
    let (cpu, space) = (&text.cpu, &text.space);
    space.madvise(cpu, AT, F * P, Advice::PopulateRead).unwrap();
    guest::write_object(cpu, &text.file, 300, 9).unwrap();
    let collapse = || space.madvise(cpu, AT, F * P, Advice::Collapse);
    assert_eq!(collapse().map_err(|error| error.errno), Err(Errno::EAGAIN));
    assert_eq!(space.resident_pages(cpu), F);
    assert_eq!(write_back(cpu, &[space], &text.file), Ok(1));
    collapse().unwrap();
    assert_eq!(guest::load(cpu, space, AT + 300 * P), Ok(9));
    finish(&text.cpu, text.space, Vec::from([text.file]));
}

/// One unreadable page does not prevent reads of its neighbours.
#[test]
fn a_bad_page_does_not_prevent_reads_of_other_pages() {
    let vm = guest::vm(1, 256);
    vm.set(Setting::HugeText(HugeText::Never));
    let text = Text::new(&vm, Prot::READ, SHARED);
    // Page 0 of the block 0..4 is bad: each run that includes this page fails there.
    let mut found = Err(FaultError::Bus);
    for _ in 0..4 {
        text.memory.plans.lock().unwrap().clear();
        text.memory.plan([Plan::Fail(0), Plan::Fail(0)]);
        found = text.space.fault_remote(&text.cpu, AT + 2 * P, Access::Read);
        let reads = core::mem::take(&mut *text.memory.reads.lock().unwrap());
        if reads.iter().any(|(first, _)| *first != 0) {
            return;
        }
    }
    panic!("page 2 is never read by itself: {found:?}");
}
