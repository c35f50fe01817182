//! Prefaulted pages: the pages that are mapped and skipped, and the state after a failure.

use crate::addr::{PAGE_SIZE, VirtRange};
use crate::audit::audit;
use crate::fault::prefault::ThreadStreams;
use crate::fault::{Access, FaultKind};
use crate::knob::{Locking, Setting};
use crate::machine::Invalidate;
use crate::space::{Advice, MapFlags, Prot, RemapFlags, Space};
use crate::stat::Counter;
use crate::sync::atomic::Ordering;
use crate::table::Entry;
use crate::table::format::USER_END;
use crate::table::node::{self, LAST};
use crate::table::walk::{Reached, descend};
use crate::testing::TestMachine;
use crate::testing::guest::{self, TestVm, cpu, load, store};
use crate::vm::Cpu;
use core::ops::Range;
use std::vec::Vec;

const RW: Prot = Prot::READ.union(Prot::WRITE);
/// The start of a last-level table.
const AT: u64 = 1 << 30;

/// A machine, its CPU 0, and pages mapped at `at`, with windows of up to 2^`order` pages.
struct Bench<'v> {
    cpu: Cpu<'v, TestMachine>,
    space: Space<TestMachine>,
    at: u64,
}

impl<'v> Bench<'v> {
    fn new(vm: &'v TestVm, at: u64, pages: u64, order: u8) -> Self {
        vm.set(Setting::PrefaultMaxOrder(order));
        let cpu = cpu(vm, 0);
        let space = Space::new(&cpu).unwrap();
        let bench = Self { cpu, space, at };
        bench.map(0..pages);
        bench
    }

    fn addr(&self, page: u64) -> u64 {
        self.at + page * PAGE_SIZE
    }

    fn store(&self, page: u64) {
        store(&self.cpu, &self.space, self.addr(page), page + 1).unwrap();
    }

    fn load(&self, page: u64) -> u64 {
        load(&self.cpu, &self.space, self.addr(page)).unwrap()
    }

    fn entry(&self, page: u64) -> Entry {
        self.space.entry_at(&self.cpu, self.addr(page))
    }

    fn count(&self, counter: Counter) -> u64 {
        self.cpu.vm().totals().get(counter)
    }

    fn resident(&self) -> u64 {
        self.space.resident_pages(&self.cpu)
    }

    /// Maps pages anew, and replaces the old mapping.
    fn map(&self, pages: Range<u64>) {
        let (at, len) = (self.addr(pages.start), (pages.end - pages.start) * PAGE_SIZE);
        let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS | MapFlags::FIXED | MapFlags::NORESERVE;
        assert_eq!(self.space.mmap(&self.cpu, at, len, RW, flags), Ok(at));
    }

    fn unmap(&self, pages: Range<u64>) {
        let (at, len) = (self.addr(pages.start), (pages.end - pages.start) * PAGE_SIZE);
        self.space.munmap(&self.cpu, at, len).unwrap();
    }

    fn dont_need(&self, pages: Range<u64>) {
        let (at, len) = (self.addr(pages.start), (pages.end - pages.start) * PAGE_SIZE);
        self.space.madvise(&self.cpu, at, len, Advice::DontNeed).unwrap();
    }

    /// Moves pages to the address `to`.
    fn relocate(&self, pages: Range<u64>, to: u64) {
        let (at, len) = (self.addr(pages.start), (pages.end - pages.start) * PAGE_SIZE);
        let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
        assert_eq!(self.space.mremap(&self.cpu, at, len, len, flags, to), Ok(to));
    }

    /// Stores to pages one by one. Returns the number of faults.
    fn faults_of(&self, pages: impl Iterator<Item = u64>) -> u64 {
        let before = self.count(Counter::Faults);
        pages.for_each(|page| self.store(page));
        self.count(Counter::Faults) - before
    }

    /// Stores to at least `pages` pages, so that all prefaulted pages are used. Returns the next
    /// page.
    fn stream(&self, pages: u64) -> u64 {
        let goes_on = |page: &u64| *page < pages || self.entry(*page).is_mapped();
        (0..).take_while(goes_on).inspect(|page| self.store(*page)).count() as u64
    }

    /// Returns the number of mapped pages among the first `pages` of the mapping.
    fn there(&self, pages: u64) -> u64 {
        (0..pages).filter(|page| self.entry(*page).is_mapped()).count() as u64
    }

    fn finish(self) {
        self.cpu.drain();
        audit(&self.cpu, &[&self.space]).unwrap();
        self.space.exit(&self.cpu);
        self.cpu.drain();
        assert_eq!(audit(&self.cpu, &[]).unwrap().taken(), 1, "only the zero page remains");
    }
}

#[test]
fn a_sequence_takes_a_fraction_of_the_faults_under_every_policy() {
    for (order, fraction) in [(0, 1.0), (3, 7.9), (5, 31.0), (9, 100.0)] {
        for locking in Locking::ALL {
            let vm = guest::vm(1, 20000);
            vm.set(Setting::Locking(locking));
            // 64 MiB.
            let pages = 16384;
            let bench = Bench::new(&vm, AT, pages, order);
            let faults = bench.faults_of(0..pages);
            assert!(faults as f64 <= pages as f64 / fraction, "order {order}: {faults}");
            assert_eq!(bench.count(Counter::PrefaultPage), pages - faults);
            assert_eq!(bench.resident(), pages);
            (0..pages).for_each(|page| assert_eq!(bench.load(page), page + 1));
            bench.finish();
        }
    }
}

#[test]
fn a_window_extends_down_as_well_as_up() {
    let vm = guest::vm(1, 2000);
    let bench = Bench::new(&vm, AT, 1024, 3);
    let faults = bench.faults_of((0..1024).rev());
    assert!(faults <= 1024 / 7, "{faults}");
    bench.finish();
}

#[test]
fn forty_sequential_windows_have_the_maximum_order() {
    let vm = guest::vm(1, 9000);
    let bench = Bench::new(&vm, AT, 8192, 3);
    let mut next = 0;
    for fault in 0..60 {
        let before = bench.there(8192);
        bench.store(next);
        let mapped = bench.there(8192) - before;
        assert!(mapped <= 8, "{mapped} pages at once");
        if fault > 10 {
            assert_eq!(mapped, 8, "fault {fault}");
        }
        next += mapped;
        // A stream's pages are used.
        (next - mapped..next).for_each(|page| bench.store(page));
    }
    bench.finish();
}

#[test]
fn windows_end_with_the_space_and_with_the_mapping() {
    let vm = guest::vm(1, 200);
    let at = USER_END - 64 * PAGE_SIZE;
    let bench = Bench::new(&vm, at, 64, 9);
    bench.faults_of(0..64);
    assert_eq!(bench.there(64), 64);
    bench.finish();
    let vm = guest::vm(1, 200);
    let bench = Bench::new(&vm, AT, 21, 5);
    let next = AT + 21 * PAGE_SIZE;
    let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS | MapFlags::FIXED;
    bench.space.mmap(&bench.cpu, next, 16 * PAGE_SIZE, Prot::READ, flags).unwrap();
    bench.faults_of(0..21);
    assert!((21..37).all(|page| bench.entry(page).is_none()));
    bench.finish();
}

#[test]
fn present_pages_are_unchanged() {
    for access in [Access::Read, Access::Write] {
        let vm = guest::vm(1, 400);
        let bench = Bench::new(&vm, AT, 128, 5);
        // A private page, a page shared with a child, a hidden page, and a zero page.
        for page in [70, 71, 72] {
            bench.store(page);
        }
        let child = bench.space.fork(&bench.cpu).unwrap();
        store(&bench.cpu, &bench.space, bench.addr(70), 71).unwrap();
        bench.space.mprotect(&bench.cpu, bench.addr(72), PAGE_SIZE, Prot::empty()).unwrap();
        bench.space.mprotect(&bench.cpu, bench.addr(72), PAGE_SIZE, RW).unwrap();
        bench.load(100);
        for page in 0..128 {
            match access {
                Access::Write if !(70..73).contains(&page) => bench.store(page),
                _ => assert_eq!(
                    bench.load(page),
                    if (70..73).contains(&page) { page + 1 } else { 0 }
                ),
            }
        }
        for page in 70..73 {
            assert_eq!(bench.load(page), page + 1);
            assert_eq!(load(&bench.cpu, &child, bench.addr(page)), Ok(page + 1));
        }
        assert!(bench.count(Counter::PrefaultPage) > 60);
        child.exit(&bench.cpu);
        bench.finish();
    }
}

#[test]
fn zeros_become_copies_in_batches_and_are_flushed_first() {
    let vm = guest::vm(1, 400);
    let bench = Bench::new(&vm, AT, 256, 5);
    bench.space.activate(&bench.cpu);
    (0..256).for_each(|page| assert_eq!(bench.load(page), 0));
    let reads = bench.count(Counter::ZeroPage);
    assert!(reads < 32, "{reads}");
    assert_eq!(bench.resident(), 0);
    vm.machine().invalidated.lock().unwrap().clear();
    let faults = bench.faults_of(0..256);
    assert!(faults < 32, "{faults}");
    assert_eq!(bench.resident(), 256);
    let flushed = vm.machine().invalidated.lock().unwrap().split_off(0);
    let is_flushed = |addr: u64| {
        let has = |range: VirtRange| range.contains(addr);
        flushed.iter().any(|(_, _, what)| matches!(what, Invalidate::Range(range) if has(*range)))
    };
    assert!((0..256).all(|page| is_flushed(bench.addr(page))), "old zeros are read on");
    (0..256).for_each(|page| assert_eq!(bench.load(page), page + 1));
    // SAFETY: the machine has no MMU.
    unsafe { bench.space.deactivate(&bench.cpu) };
    bench.finish();
}

#[test]
fn memory_exhausted_in_a_batch_ends_only_the_batch() {
    // Each number of remaining frames in turn.
    for spare in 1..60 {
        let vm = guest::vm(1, 4096);
        let bench = Bench::new(&vm, AT, 512, 5);
        bench.faults_of(0..63);
        vm.set(Setting::FrameLimit(vm.total_frames() - vm.free_frames() + spare));
        let mut served = 63;
        while store(&bench.cpu, &bench.space, bench.addr(served), served + 1).is_ok() {
            served += 1;
        }
        assert_eq!(bench.count(Counter::Oom), 1);
        // No available frame was wasted on a prediction.
        assert!(served >= 63 + spare, "{served} of {spare}");
        vm.set(Setting::FrameLimit(u64::MAX));
        (0..served).for_each(|page| assert_eq!(bench.load(page), page + 1));
        bench.finish();
    }
}

#[test]
fn pages_without_a_frame_are_not_evaluated() {
    // Enough frames for none or some of the window's pages.
    for spare in [20, 30, 45, 70] {
        let vm = guest::vm(1, 4096);
        let bench = Bench::new(&vm, AT, 1024, 9);
        bench.faults_of(0..512);
        vm.set(Setting::FrameLimit(vm.total_frames() - vm.free_frames() + spare));
        let counters = [Counter::PrefaultUsed, Counter::PrefaultUnused];
        let before = counters.map(|counter| bench.count(counter));
        bench.store(512);
        let last = (512..1024).rfind(|page| bench.entry(*page).is_mapped()).unwrap() - 512;
        guest::call(&bench.cpu, || bench.unmap(512..1024));
        let [used, unused] = counters.map(|counter| bench.count(counter));
        assert_eq!((used - before[0], unused - before[1]), (0, last), "{spare} frames to spare");
        vm.set(Setting::FrameLimit(u64::MAX));
        bench.finish();
    }
}

#[test]
fn a_reverted_batch_leaves_no_trace() {
    let vm = guest::vm(2, 400);
    let bench = Bench::new(&vm, AT, 256, 4);
    bench.faults_of(0..31);
    let next = (0..256).find(|page| bench.entry(*page).is_none()).unwrap();
    let resident = bench.resident();
    let other = cpu(&vm, 1);
    let (addr, thread) = (bench.addr(next), ThreadStreams::new());
    let gone = (bench.addr(next + 1), 100 * PAGE_SIZE);
    let space = &bench.space;
    let worst = move || space.munmap(&other, gone.0, gone.1).unwrap();
    let kind =
        vm.machine().interpose(worst, || space.fault(&bench.cpu, &thread, addr, Access::Write));
    assert_eq!(kind, Ok(FaultKind::Anon), "the page itself is still mapped");
    assert_eq!(bench.count(Counter::SpfVmaReplaced), 1);
    assert_eq!(bench.count(Counter::SpfVmaChanged), 0, "another part of the VMA was changed");
    assert!((1..101).all(|page| bench.entry(next + page).is_none()));
    assert_eq!(bench.resident(), resident + 1);
    cpu(&vm, 1).drain();
    bench.finish();
}

#[test]
fn random_advice_and_order_zero_map_only_the_faulting_page() {
    for random in [false, true] {
        let vm = guest::vm(1, 400);
        let bench = Bench::new(&vm, AT, 256, if random { 5 } else { 0 });
        if random {
            bench.space.madvise(&bench.cpu, AT, 256 * PAGE_SIZE, Advice::Random).unwrap();
        }
        assert_eq!(bench.faults_of(0..256), 256);
        assert_eq!(bench.count(Counter::PrefaultPage), 0);
        bench.finish();
    }
}

#[test]
fn prefaulted_pages_show_their_use() {
    let vm = guest::vm(1, 400);
    let bench = Bench::new(&vm, AT, 256, 3);
    let mut touched = 0;
    while touched < 16 || bench.there(256) < touched + 4 {
        bench.store(touched);
        touched += 1;
    }
    assert!((0..touched).all(|page| bench.entry(page).is_accessed()));
    let ahead = touched..bench.there(256);
    assert!(ahead.clone().all(|page| !bench.entry(page).is_accessed()), "{ahead:?}");
    bench.finish();
}

#[test]
fn irregular_accesses_prefault_no_pages() {
    let vm = guest::vm(1, 1200);
    let bench = Bench::new(&vm, AT, 16 * 1024, 5);
    let asked = 1024;
    // No distance comes twice.
    assert_eq!(bench.faults_of((0..asked).map(|at| at * 16 + (at * at + at / 7) % 13)), asked);
    // Each miss is counted once, including the misses that skip the predictor.
    assert_eq!(bench.count(Counter::PrefaultMiss), asked);
    assert!(bench.resident() <= asked + asked / 100, "{}", bench.resident());
    // The same applies to a VMA without a root in an existing table.
    for hole in [100, 200, 300].map(|at| at * 16 + 13) {
        bench.unmap(hole..hole + 3);
        bench.map(hole + 1..hole + 2);
        bench.store(hole + 1);
    }
    assert_eq!(bench.count(Counter::PrefaultMiss), asked + 3);
    bench.finish();
}

#[test]
fn strided_accesses_prefault_only_the_stride() {
    let vm = guest::vm(1, 2000);
    let bench = Bench::new(&vm, AT, 16 * 1024, 5);
    let asked = 1024;
    let faults = bench.faults_of((0..asked).map(|at| at * 16));
    assert!(20 * faults < asked, "{faults}");
    assert!(bench.resident() <= asked + asked / 100, "{}", bench.resident());
    bench.finish();
}

#[test]
fn windows_are_evaluated_when_the_thread_leaves() {
    let vm = guest::vm(1, 600);
    let bench = Bench::new(&vm, AT, 64, 0);
    (0..16).for_each(|page| bench.store(page));
    vm.set(Setting::PrefaultMaxOrder(5));
    let thread = ThreadStreams::new();
    bench.space.fault(&bench.cpu, &thread, bench.addr(16), Access::Write).unwrap();
    let before = bench.count(Counter::PrefaultUnused);
    bench.space.exit_thread(&bench.cpu, &thread);
    let judged = bench.count(Counter::PrefaultUnused) - before;
    assert!(judged > 0);
    bench.space.exit_thread(&bench.cpu, &thread);
    assert_eq!(bench.count(Counter::PrefaultUnused), before + judged, "no stream remains");
    bench.finish();
}

/// Ways to take all pages of a bench away and have them empty again.
const TAKINGS: [fn(&Bench<'_>, u64); 3] = [
    |bench, pages| {
        bench.unmap(0..pages);
        bench.map(0..pages);
    },
    |bench, pages| bench.map(0..pages),
    |bench, pages| bench.dont_need(0..pages),
];

#[test]
fn one_fault_maps_the_previously_used_pages_again() {
    for take in TAKINGS {
        let vm = guest::vm(1, 600);
        let bench = Bench::new(&vm, AT, 256, 5);
        let used = || (72..84).chain([90]);
        bench.faults_of(used());
        take(&bench, 256);
        assert_eq!(bench.there(256), 0);
        bench.store(75);
        let there: Vec<_> = (0..256).filter(|page| bench.entry(*page).is_mapped()).collect();
        assert_eq!(there, used().collect::<Vec<_>>());
        assert_eq!(bench.faults_of(used()), 0);
        bench.finish();
    }
}

#[test]
fn a_shrinking_heap_is_remembered() {
    let vm = guest::vm(1, 600);
    let bench = Bench::new(&vm, AT, 1, 5);
    let heap = 2 * AT;
    bench.space.set_heap_start(&bench.cpu, heap).unwrap();
    let end = heap + 64 * PAGE_SIZE;
    let touch = |page: u64| store(&bench.cpu, &bench.space, heap + page * PAGE_SIZE, page).unwrap();
    assert_eq!(bench.space.brk(&bench.cpu, end), end);
    (10..20).for_each(touch);
    assert_eq!(bench.space.brk(&bench.cpu, heap), heap);
    assert_eq!(bench.space.brk(&bench.cpu, end), end);
    let before = bench.resident();
    touch(10);
    assert_eq!(bench.resident() - before, 10);
    bench.finish();
}

#[test]
fn unmapped_pages_of_a_sharded_tree_are_remembered() {
    let vm = guest::vm(1, 600);
    let bench = Bench::new(&vm, AT, 256, 5);
    let known = |page: u64| bench.space.history.recall(AT / PAGE_SIZE + page).known;
    bench.map(1024..1028);
    bench.space.part_tree(&bench.cpu, bench.addr(512));
    bench.store(3);
    bench.store(130);
    bench.unmap(2..6);
    assert_eq!(known(0), 0b11_1100, "within one shard");
    bench.unmap(100..1028);
    assert_eq!(known(128), !0, "across a bound");
    bench.finish();
}

#[test]
fn only_mapped_private_pages_are_remembered() {
    let vm = guest::vm(1, 600);
    let bench = Bench::new(&vm, AT, 256, 0);
    let first = AT / PAGE_SIZE;
    let known = |page: u64| bench.space.history.recall(first + page).known;
    bench.faults_of(0..8);
    bench.map(0..64);
    assert_eq!(known(0), 0, "no prefault without the knob");
    vm.set(Setting::PrefaultMaxOrder(5));
    bench.map(0..256);
    assert_eq!(known(0), 0, "no earlier mapping");
    bench.store(3);
    bench.store(130);
    bench.unmap(2..6);
    assert_eq!(known(0), 0b11_1100, "the rest of the block is unchanged");
    bench.map(2..256);
    assert_eq!([known(64), known(128)], [0, !0], "no earlier mapping in the block between");
    bench.store(70);
    bench.space.mprotect(&bench.cpu, bench.addr(96), 32 * PAGE_SIZE, Prot::READ).unwrap();
    bench.unmap(64..128);
    assert_eq!(known(64), !0 >> 32, "no record of the other mapping");
    let flags = MapFlags::SHARED | MapFlags::ANONYMOUS | MapFlags::FIXED;
    bench.space.mmap(&bench.cpu, bench.addr(192), 64 * PAGE_SIZE, RW, flags).unwrap();
    bench.store(192);
    bench.unmap(192..256);
    assert_eq!(known(192), 0, "shared memory keeps its pages");
    bench.finish();
}

#[test]
fn pages_are_evaluated_before_their_removal() {
    type Take = fn(&Bench<'_>);
    let takings: [Take; 4] = [
        |bench| bench.unmap(0..128),
        |bench| bench.map(0..128),
        |bench| bench.dont_need(0..128),
        |bench| bench.relocate(0..128, 2 * AT),
    ];
    for take in takings {
        for known in [true, false] {
            let vm = guest::vm(1, 600);
            let bench = Bench::new(&vm, AT, 512, 3);
            bench.stream(64);
            let judged =
                || [Counter::PrefaultUsed, Counter::PrefaultUnused].map(|it| bench.count(it));
            assert_eq!(judged(), [0, 0], "too early");
            if known {
                guest::call(&bench.cpu, || take(&bench));
                assert_eq!(judged(), [bench.count(Counter::PrefaultPage), 0]);
            } else {
                take(&bench);
                assert_eq!(judged(), [0, 0]);
            }
            bench.finish();
        }
    }
}

#[test]
fn for_thread_restores_the_previous_thread() {
    let vm = guest::vm(1, 100);
    let (cpu, outer, inner) = (cpu(&vm, 0), ThreadStreams::new(), ThreadStreams::new());
    let is = |thread| cpu.thread().is_some_and(|now| core::ptr::eq(now, thread));
    cpu.for_thread(&outer, || {
        cpu.for_thread(&inner, || assert!(is(&inner)));
        assert!(is(&outer));
    });
    assert!(cpu.thread().is_none());
}

/// Creates a bench of 512 pages, of which the first pages are used and some more were prefaulted
/// without use. Returns the range of the unused pages as well.
fn with_some_unused(vm: &TestVm) -> (Bench<'_>, Range<u64>) {
    let bench = Bench::new(vm, AT, 512, 3);
    let mut touched = 0;
    while bench.there(512) < touched + 4 {
        bench.store(touched);
        touched += 1;
    }
    let unused = touched..bench.there(512);
    (bench, unused)
}

#[test]
fn unused_prefaulted_pages_are_wasted_once() {
    let vm = guest::vm(1, 600);
    let (bench, unused) = with_some_unused(&vm);
    let (wasted, count) =
        (|| vm.totals().get(Counter::PrefaultWasted), unused.clone().count() as u64);
    bench.unmap(unused.start..unused.start + 1);
    assert_eq!(wasted(), 1);
    // The page was also not used through a removed or restored right.
    let rest = (bench.addr(unused.start + 1), (count - 1) * PAGE_SIZE);
    bench.space.mprotect(&bench.cpu, rest.0, rest.1, Prot::empty()).unwrap();
    bench.unmap(unused.start + 1..unused.start + 2);
    assert_eq!(wasted(), 2);
    bench.space.mprotect(&bench.cpu, rest.0 + PAGE_SIZE, rest.1 - PAGE_SIZE, RW).unwrap();
    bench.store(unused.start + 2);
    bench.finish();
    assert_eq!(wasted(), count - 1, "one prefaulted page was used");
}

#[test]
fn a_childs_unused_prefaulted_pages_are_wasted_once() {
    let vm = guest::vm(1, 600);
    let (bench, unused) = with_some_unused(&vm);
    let (wasted, count) =
        (|| vm.totals().get(Counter::PrefaultWasted), unused.clone().count() as u64);
    let resident = bench.resident();
    let child = bench.space.fork(&bench.cpu).unwrap();
    assert_eq!(child.resident_pages(&bench.cpu), resident);
    // One page is copied. Another page is reused after the child's end.
    bench.store(unused.start);
    assert_eq!(bench.count(Counter::CowCopy), 1);
    child.exit(&bench.cpu);
    assert_eq!(wasted(), 0);
    bench.store(unused.start + 1);
    assert_eq!(bench.count(Counter::CowReuse), 1);
    assert_eq!(bench.resident(), resident);
    bench.finish();
    assert_eq!(wasted(), count - 2);
}

#[test]
fn moved_prefaulted_pages_are_not_wasted() {
    let vm = guest::vm(1, 600);
    let (bench, unused) = with_some_unused(&vm);
    let (resident, count) = (bench.resident(), unused.clone().count() as u64);
    guest::call(&bench.cpu, || bench.relocate(0..512, 2 * AT));
    let faults = bench.count(Counter::Faults);
    assert_eq!([bench.count(Counter::PrefaultWasted), bench.resident()], [0, resident]);
    store(&bench.cpu, &bench.space, 2 * AT + unused.start * PAGE_SIZE, 1).unwrap();
    assert_eq!(bench.count(Counter::Faults), faults, "the prefaulted page moved with the mapping");
    bench.finish();
    assert_eq!(vm.totals().get(Counter::PrefaultWasted), count - 1);
}

#[test]
fn concurrent_entries_in_a_window_are_kept() {
    let vm = guest::vm(2, 600);
    let bench = Bench::new(&vm, AT, 512, 5);
    let next = bench.stream(64);
    let (thread, other, space) = (ThreadStreams::new(), cpu(&vm, 1), &bench.space);
    // Another CPU fills one entry, and still works on another entry.
    let (filled, busy) = (bench.addr(next + 2), bench.addr(next + 4));
    let section = bench.cpu.section();
    // SAFETY: inside a grace section.
    let Reached::Last(table) = (unsafe { descend(vm.machine(), space.root(), busy) }) else {
        panic!("the neighbours have a table");
    };
    let slot = &table[node::index(busy, LAST)];
    let worst = move || {
        space.fault_remote(&other, filled, Access::Write).unwrap();
        slot.store(Entry::BUSY.0, Ordering::Release);
    };
    let served = vm
        .machine()
        .interpose(worst, || space.fault(&bench.cpu, &thread, bench.addr(next), Access::Write));
    assert_eq!(served, Ok(FaultKind::Anon));
    let mapped = |by: u64| bench.entry(next + by).is_present();
    assert_eq!([0, 1, 2, 3, 4, 5].map(mapped), [true, true, true, true, false, true]);
    assert!(bench.entry(next + 2).is_accessed(), "the page of the other CPU");
    assert_eq!(bench.entry(next + 4), Entry::BUSY);
    slot.store(Entry::NONE.0, Ordering::Release);
    drop(section);
    cpu(&vm, 1).drain();
    bench.finish();
}

#[test]
fn predictions_end_with_their_pages() {
    let vm = guest::vm(1, 2000);
    let bench = Bench::new(&vm, AT, 1024, 5);
    let stream = |bench: &Bench<'_>| {
        bench.faults_of(0..256);
        assert_eq!(bench.there(1024), 256);
    };
    let first_window = |bench: &Bench<'_>, page: u64| {
        let before = bench.there(1024);
        bench.store(page);
        bench.there(1024) - before
    };
    stream(&bench);
    assert_eq!(first_window(&bench, 256), 32, "the stream continues");
    bench.finish();
    // Another address, another program, and a new mapping of the earlier pages.
    let bench = Bench::new(&vm, AT, 1024, 5);
    stream(&bench);
    assert!(first_window(&bench, 700) <= 2, "one stream continued from its first page to the next");
    bench.finish();
    let bench = Bench::new(&vm, AT, 1024, 5);
    assert_eq!(first_window(&bench, 256), 1);
    bench.finish();
    let bench = Bench::new(&vm, AT, 1024, 5);
    stream(&bench);
    bench.map(0..256);
    assert!(first_window(&bench, 256) <= 2);
    bench.finish();
    // A child does not inherit its parent's confidence.
    let bench = Bench::new(&vm, AT, 1024, 5);
    stream(&bench);
    let space = bench.space.fork(&bench.cpu).unwrap();
    let child = Bench { cpu: cpu(&vm, 0), space, at: AT };
    assert!(first_window(&child, 256) < 16);
    bench.space.exit(&bench.cpu);
    child.finish();
}
