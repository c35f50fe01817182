//! Pages that are mapped before they are asked for: what is mapped, what is left alone, and what is left
//! behind when it fails.

use super::guest::{self, TestVm, cpu, load, store};
use crate::addr::{PAGE_SIZE, USER_END};
use crate::audit::audit;
use crate::fault::prefault::ThreadStreams;
use crate::fault::{Access, FaultKind};
use crate::knob::{Locking, Setting};
use crate::space::{Advice, MapFlags, Prot, Space};
use crate::stat::Counter;
use crate::table::entry::Entry;
use crate::testing::TestMachine;
use crate::vm::Cpu;

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
        let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS | MapFlags::FIXED | MapFlags::NORESERVE;
        assert_eq!(space.mmap(&cpu, at, pages * PAGE_SIZE, RW, flags), Ok(at));
        Self { cpu, space, at }
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

    /// Stores to pages one by one; how many faults that took.
    fn faults_of(&self, pages: impl Iterator<Item = u64>) -> u64 {
        let before = self.count(Counter::Faults);
        pages.for_each(|page| self.store(page));
        self.count(Counter::Faults) - before
    }

    /// Pages of the mapping's first `pages` that are there.
    fn there(&self, pages: u64) -> u64 {
        (0..pages).filter(|page| self.entry(*page).is_mapped()).count() as u64
    }

    fn finish(self) {
        self.cpu.drain();
        audit(&self.cpu, &[&self.space]).unwrap();
        self.space.exit(&self.cpu);
        self.cpu.drain();
        assert_eq!(audit(&self.cpu, &[]).unwrap().taken(), 1, "only the page of zeros is left");
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
fn a_window_goes_down_as_well_as_up() {
    let vm = guest::vm(1, 2000);
    let bench = Bench::new(&vm, AT, 1024, 3);
    let faults = bench.faults_of((0..1024).rev());
    assert!(faults <= 1024 / 7, "{faults}");
    bench.finish();
}

#[test]
fn forty_straight_hits_are_forty_windows_of_the_order_set() {
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
fn what_is_there_stays_as_it_is() {
    for access in [Access::Read, Access::Write] {
        let vm = guest::vm(1, 400);
        let bench = Bench::new(&vm, AT, 128, 5);
        // A page of its own, one shared with a child, one that nobody may reach, and one of zeros.
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
    assert!(
        vm.machine().invalidated.lock().unwrap().len() as u64 >= faults,
        "old zeros are read on"
    );
    (0..256).for_each(|page| assert_eq!(bench.load(page), page + 1));
    bench.space.deactivate(&bench.cpu);
    bench.finish();
}

#[test]
fn memory_that_ends_inside_a_batch_ends_the_batch_alone() {
    // One after the other every number of frames is what is left.
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
        // Nothing that was to be had was lost to a guess.
        assert!(served >= 63 + spare, "{served} of {spare}");
        vm.set(Setting::FrameLimit(u64::MAX));
        (0..served).for_each(|page| assert_eq!(bench.load(page), page + 1));
        bench.finish();
    }
}

#[test]
fn an_abort_of_a_batch_leaves_no_trace() {
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
        vm.machine().interpose(worst, || space.fault_of(&bench.cpu, &thread, addr, Access::Write));
    assert_eq!(kind, Ok(FaultKind::Anon), "the page itself is still mapped");
    assert_eq!(bench.count(Counter::SpfVmaChanged), 1);
    assert!((1..101).all(|page| bench.entry(next + page).is_none()));
    assert_eq!(bench.resident(), resident + 1);
    cpu(&vm, 1).drain();
    bench.finish();
}

#[test]
fn random_advice_and_order_zero_map_what_is_asked_for() {
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
fn pages_mapped_ahead_show_whether_they_were_used() {
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
fn a_sparse_toucher_gets_nothing_that_it_does_not_ask_for() {
    let vm = guest::vm(1, 1200);
    let bench = Bench::new(&vm, AT, 16 * 1024, 5);
    let asked = 1024;
    assert_eq!(bench.faults_of((0..asked).map(|at| at * 16)), asked);
    // Each is counted once, those that are let pass without a look as well.
    assert_eq!(bench.count(Counter::PrefaultMiss), asked);
    assert!(bench.resident() <= asked + asked / 100, "{}", bench.resident());
    bench.finish();
}
