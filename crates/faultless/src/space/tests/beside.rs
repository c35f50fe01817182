//! Concurrent writers in one space, which meet VMAs under change by each other.

use crate::addr::{PAGE_SIZE, VirtRange};
use crate::audit::audit;
use crate::fault::Access;
use crate::knob::{Locking, Setting};
use crate::space::{Advice, MapFlags, Prot, RemapFlags, Space};
use crate::sync::atomic::AtomicU64;
use crate::table::node::{self, LAST};
use crate::table::protocol;
use crate::table::walk::{Reached, descend};
use crate::testing::TestMachine;
use crate::testing::guest::{self, cpu, load, store};
use crate::vm::Cpu;
use std::sync::atomic::{AtomicBool, AtomicU64 as Count, Ordering};
use std::thread;
use std::time::Duration;
use std::vec::Vec;

const AT: u64 = 1 << 30;
const P: u64 = PAGE_SIZE;
const RW: Prot = Prot::READ.union(Prot::WRITE);
const RX: Prot = Prot::READ.union(Prot::EXEC);
const FIXED: MapFlags = MapFlags::PRIVATE.union(MapFlags::ANONYMOUS).union(MapFlags::FIXED);

/// Waits long enough for another CPU to reach its wait.
fn nap() {
    thread::sleep(Duration::from_millis(100));
}

#[test]
fn neighbours_with_different_roots_stay_apart() {
    let vm = guest::vm(4, 256);
    let (cpu0, cpu1, cpu2, cpu3) = (cpu(&vm, 0), cpu(&vm, 1), cpu(&vm, 2), cpu(&vm, 3));
    let space = Space::new(&cpu0).unwrap();
    space.mmap(&cpu0, AT - 8 * P, 4 * P, RW, FIXED).unwrap();
    store(&cpu0, &space, AT - 8 * P, 1).unwrap();
    space.mmap(&cpu0, AT, 2 * P, RW, FIXED).unwrap();
    store(&cpu0, &space, AT, 2).unwrap();
    space.mprotect(&cpu0, AT, 2 * P, RX).unwrap();
    {
        let section = cpu0.section();
        // SAFETY: inside a grace section.
        let reached = unsafe { descend(vm.machine(), space.root(), AT) };
        let Reached::Last(slots) = reached else { panic!() };
        let slot = &slots[node::index(AT, LAST)];
        let held = protocol::take(slot, node::load(slot), &cpu0).unwrap();
        thread::scope(|scope| {
            let space = &space;
            space.activate(&cpu3);
            let one = scope.spawn(move || {
                space.mprotect(&cpu1, AT, 2 * P, RW).unwrap();
                cpu1
            });
            nap();
            assert!(!one.is_finished());
            let two = scope.spawn(move || {
                space.mremap(&cpu2, AT - 8 * P, 4 * P, 8 * P, RemapFlags::empty(), 0).unwrap();
                cpu2
            });
            let cpu2 = two.join().unwrap();
            // SAFETY: a test's.
            unsafe { space.deactivate(&cpu3) };
            held.revert();
            drop(section);
            one.join().unwrap().drain();
            cpu2.drain();
        });
    }
    let mut areas = Vec::new();
    space.each_area(&cpu0, VirtRange::USER, |area| {
        areas.push((area.range.start as i64 - AT as i64) / P as i64);
        true
    });
    let moved = space.mremap(
        &cpu0,
        AT - 8 * P,
        8 * P,
        8 * P,
        RemapFlags::MAYMOVE | RemapFlags::FIXED,
        AT + 512 * P,
    );
    assert_eq!(areas, [-8, 0]);
    assert_eq!(moved, Ok(AT + 512 * P), "one VMA moves");
    space.exit(&cpu0);
}

#[test]
fn a_root_set_in_a_vma_under_change_is_kept() {
    let vm = guest::vm(4, 256);
    let (cpu0, cpu1, cpu2, cpu3) = (cpu(&vm, 0), cpu(&vm, 1), cpu(&vm, 2), cpu(&vm, 3));
    let space = Space::new(&cpu0).unwrap();
    space.mmap(&cpu0, AT, 4 * P, RW, FIXED).unwrap();
    load(&cpu0, &space, AT + P).unwrap();
    {
        let section = cpu0.section();
        // SAFETY: inside a grace section.
        let reached = unsafe { descend(vm.machine(), space.root(), AT) };
        let Reached::Last(slots) = reached else { panic!() };
        let (slot1, slot3) = (&slots[node::index(AT, LAST) + 1], &slots[node::index(AT, LAST) + 3]);
        let held1 = protocol::take(slot1, node::load(slot1), &cpu0).unwrap();
        let held3 = protocol::take(slot3, node::load(slot3), &cpu0).unwrap();
        thread::scope(|scope| {
            let space = &space;
            let one = scope.spawn(move || {
                space.mmap(&cpu1, AT + P, P, RW, FIXED).unwrap();
                cpu1
            });
            nap();
            assert!(!one.is_finished());
            space.mmap(&cpu2, AT + 4 * P, P, RW, FIXED).unwrap();
            let two = scope.spawn(move || {
                space.fault_remote(&cpu3, AT + 3 * P, Access::Write).unwrap();
                cpu3
            });
            nap();
            held1.revert();
            let cpu1 = one.join().unwrap();
            assert!(!two.is_finished());
            held3.revert();
            drop(section);
            two.join().unwrap().drain();
            cpu1.drain();
            cpu2.drain();
        });
    }
    store(&cpu0, &space, AT + 3 * P, 7).unwrap();
    cpu0.drain();
    audit(&cpu0, &[&space]).unwrap();
    let child = space.fork(&cpu0).unwrap();
    let got = load(&cpu0, &child, AT + 3 * P);
    assert_eq!(got, Ok(7), "the child lost a page");
}

/// A VMA under change has a deferred merge with the VMA above, which is then unmapped, and a stack
/// grows down to the VMA under change. A growth merges no VMAs, and the end of the change must not
/// merge these two VMAs.
#[test]
fn growth_down_to_a_vma_under_change_does_not_merge() {
    let vm = guest::vm(4, 256);
    let (cpu0, cpu1, cpu2, cpu3) = (cpu(&vm, 0), cpu(&vm, 1), cpu(&vm, 2), cpu(&vm, 3));
    let space = Space::new(&cpu0).unwrap();
    let stack = FIXED | MapFlags::GROWSDOWN;
    space.mmap(&cpu0, AT, 2 * P, RX, FIXED).unwrap();
    load(&cpu0, &space, AT).unwrap();
    space.mmap(&cpu0, AT + 2 * P, 2 * P, RW, stack).unwrap();
    space.mmap(&cpu0, AT + 8 * P, 2 * P, RW, stack).unwrap();
    {
        let section = cpu0.section();
        let slot = slot_of(&cpu0, &space, AT);
        let held = protocol::take(slot, node::load(slot), &cpu0).unwrap();
        thread::scope(|scope| {
            let space = &space;
            space.activate(&cpu3);
            let change = scope.spawn(move || {
                space.mmap(&cpu1, AT, 2 * P, RW, stack).unwrap();
                cpu1
            });
            nap();
            assert!(!change.is_finished());
            space.munmap(&cpu2, AT + 2 * P, 2 * P).unwrap();
            space.fault_remote(&cpu2, AT + 2 * P, Access::Write).unwrap();
            assert!(!change.is_finished());
            // SAFETY: a test's.
            unsafe { space.deactivate(&cpu3) };
            held.revert();
            drop(section);
            change.join().unwrap().drain();
            cpu2.drain();
        });
    }
    let mut areas = Vec::new();
    space.each_area(&cpu0, VirtRange::USER, |area| {
        areas.push(((area.range.start - AT) / P, (area.range.end - AT) / P));
        true
    });
    assert_eq!(areas, [(0, 2), (2, 10)]);
    space.exit(&cpu0);
}

/// A reusable barrier for threads. If one thread panics, the waiting threads panic as well.
struct Meeting {
    threads: u64,
    arrived: Count,
    broken: AtomicBool,
}

/// A thread's membership in a `Meeting`.
struct Attendance<'m>(&'m Meeting);

impl Drop for Attendance<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.broken.store(true, Ordering::Relaxed);
        }
    }
}

impl Meeting {
    fn of(threads: u64) -> Self {
        Self { threads, arrived: Count::new(0), broken: AtomicBool::new(false) }
    }

    fn attend(&self) -> Attendance<'_> {
        Attendance(self)
    }
}

impl Attendance<'_> {
    /// Waits until all have arrived as often as this thread.
    fn wait(&self) {
        let Meeting { threads, arrived, broken } = self.0;
        let before = arrived.fetch_add(1, Ordering::AcqRel);
        let all = before - before % threads + threads;
        while arrived.load(Ordering::Acquire) < all {
            assert!(!broken.load(Ordering::Relaxed), "another thread panicked");
            thread::yield_now();
        }
    }
}

#[test]
#[should_panic(expected = "a scoped thread panicked")]
fn a_meeting_ends_with_the_first_panic() {
    let meeting = Meeting::of(3);
    thread::scope(|scope| {
        for number in 0..3 {
            let meeting = &meeting;
            scope.spawn(move || {
                let meeting = meeting.attend();
                meeting.wait();
                assert!(number != 1, "planted");
                meeting.wait();
            });
        }
    });
}

#[test]
fn growth_beside_mprotect_down() {
    let vm = guest::vm(3, 1024);
    let (cpu0, cpu1, cpu2) = (cpu(&vm, 0), cpu(&vm, 1), cpu(&vm, 2));
    let space = Space::new(&cpu0).unwrap();
    let meeting = Meeting::of(3);
    let rounds = 2000;
    let mut bad = None;
    thread::scope(|scope| {
        let (space, meeting) = (&space, &meeting);
        scope.spawn(move || {
            let meeting = meeting.attend();
            for _ in 0..rounds {
                meeting.wait();
                space.mprotect(&cpu1, AT + P, P, Prot::READ | Prot::GROWSDOWN).unwrap();
                meeting.wait();
            }
            cpu1.drain();
        });
        scope.spawn(move || {
            let meeting = meeting.attend();
            for round in 0..rounds {
                meeting.wait();
                for _ in 0..round % 400 {
                    std::hint::spin_loop();
                }
                space.fault_remote(&cpu2, AT - P, Access::Read).unwrap();
                meeting.wait();
            }
            cpu2.drain();
        });
        let meeting = meeting.attend();
        for round in 0..rounds {
            space.mmap(&cpu0, AT, 2 * P, RW, FIXED | MapFlags::GROWSDOWN).unwrap();
            meeting.wait();
            meeting.wait();
            let mut areas = Vec::new();
            space.each_area(&cpu0, VirtRange::USER, |area| {
                areas.push(((area.range.start as i64 - AT as i64) / P as i64, area.prot));
                true
            });
            if areas.iter().any(|area| area.1 != Prot::READ) {
                bad.get_or_insert((round, areas));
            }
            space.munmap(&cpu0, AT - 16 * P, 32 * P).unwrap();
        }
    });
    assert!(bad.is_none(), "a page with the old rights: {bad:?}");
}

/// Returns the entry of the page at `addr`. The page table must exist.
fn slot_of<'v>(cpu: &Cpu<'v, TestMachine>, space: &Space<TestMachine>, addr: u64) -> &'v AtomicU64 {
    // SAFETY: the tests keep something mapped in the table.
    match unsafe { descend(cpu.vm().machine(), space.root(), addr) } {
        Reached::Last(slots) => &slots[node::index(addr, LAST)],
        Reached::Above { .. } => panic!("no table"),
    }
}

#[test]
fn parts_of_a_table_are_unmapped_side_by_side() {
    let vm = guest::vm(4, 256);
    let (cpu0, cpu1, cpu2, cpu3) = (cpu(&vm, 0), cpu(&vm, 1), cpu(&vm, 2), cpu(&vm, 3));
    let space = Space::new(&cpu0).unwrap();
    space.mmap(&cpu0, AT, 8 * P, RW, FIXED).unwrap();
    store(&cpu0, &space, AT + P, 1).unwrap();
    cpu0.drain();
    let before = audit(&cpu0, &[&space]).unwrap().tables;
    let slot = slot_of(&cpu0, &space, AT + P);
    let held = protocol::take(slot, node::load(slot), &cpu0).unwrap();
    thread::scope(|scope| {
        let space = &space;
        let first = scope.spawn(move || {
            space.munmap(&cpu1, AT, 2 * P).unwrap();
            cpu1.drain();
        });
        nap();
        let second = scope.spawn(move || {
            space.munmap(&cpu2, AT + 2 * P, 2 * P).unwrap();
            cpu2
        });
        nap();
        let done = [first.is_finished(), second.is_finished()];
        // The table maps no other page.
        let last = scope.spawn(move || {
            space.munmap(&cpu3, AT + 4 * P, 4 * P).unwrap();
            cpu3.drain();
        });
        nap();
        let early = last.is_finished();
        held.revert();
        assert_eq!(done, [false, true], "the second call covers no page of the first call");
        assert!(!early, "a table is freed while another call empties its entries");
        second.join().unwrap().drain();
    });
    cpu0.drain();
    assert_eq!(audit(&cpu0, &[&space]).unwrap().tables, before - 1);
    space.exit(&cpu0);
}

#[test]
fn baselines_admit_readers_during_an_unmapping() {
    type Call = fn(&Space<TestMachine>, &Cpu<'_, TestMachine>);
    let calls: [(&str, Call); 3] = [
        ("munmap", |space, cpu| space.munmap(cpu, AT, 2 * P).unwrap()),
        ("mremap", |space, cpu| {
            let (below, flags) = (AT - 2 * P, RemapFlags::empty());
            assert_eq!(space.mremap(cpu, below, 4 * P, 2 * P, flags, 0), Ok(below));
        }),
        ("brk", |space, cpu| assert_eq!(space.brk(cpu, AT), AT)),
    ];
    for locking in [Locking::MmapLock, Locking::PerVma] {
        for (name, call) in calls {
            let vm = guest::vm(4, 256);
            vm.set(Setting::Locking(locking));
            let (cpu0, cpu1, cpu2, cpu3) = (cpu(&vm, 0), cpu(&vm, 1), cpu(&vm, 2), cpu(&vm, 3));
            let space = Space::new(&cpu0).unwrap();
            // Two pages stay, two go, and there is another mapping in the same table.
            space.set_heap_start(&cpu0, AT - 2 * P).unwrap();
            assert_eq!(space.brk(&cpu0, AT + 2 * P), AT + 2 * P);
            space.mmap(&cpu0, AT + 8 * P, 4 * P, RW, FIXED).unwrap();
            store(&cpu0, &space, AT + P, 1).unwrap();
            let slot = slot_of(&cpu0, &space, AT + P);
            let held = protocol::take(slot, node::load(slot), &cpu0).unwrap();
            thread::scope(|scope| {
                let space = &space;
                let unmapping = scope.spawn(move || {
                    call(space, &cpu1);
                    cpu1.drain();
                });
                nap();
                // Faults and advice continue, while `mmap` waits.
                let reading = scope.spawn(move || {
                    space.fault_remote(&cpu2, AT + 8 * P, Access::Write).unwrap();
                    space.madvise(&cpu2, AT + 8 * P, P, Advice::DontNeed).unwrap();
                    space.fault_remote(&cpu2, AT - P, Access::Write).unwrap();
                    cpu2
                });
                // The time limit only stops a hang: the reading thread does not wait for any other
                // thread.
                let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
                while !reading.is_finished() && std::time::Instant::now() < until {
                    nap();
                }
                let read = reading.is_finished();
                let writing = scope.spawn(move || {
                    space.mmap(&cpu3, AT, P, RW, FIXED).unwrap();
                    cpu3.drain();
                });
                nap();
                let done = [unmapping.is_finished(), read, writing.is_finished()];
                held.revert();
                assert_eq!(done, [false, true, false], "{name}, {locking:?}");
                reading.join().unwrap().drain();
            });
            cpu0.drain();
            audit(&cpu0, &[&space]).unwrap();
            space.exit(&cpu0);
        }
    }
}

#[test]
fn revoke_runs_beside_an_unmapping_of_another_mapping() {
    use crate::file::Object;
    use crate::space::{Backing, PrivateCopies};
    let mut early = Vec::new();
    let policies = Locking::ALL.into_iter();
    for (locking, twice) in policies.flat_map(|locking| [false, true].map(|twice| (locking, twice)))
    {
        let vm = guest::vm(3, 256);
        vm.set(Setting::Locking(locking));
        let (cpu0, cpu1, cpu2) = (cpu(&vm, 0), cpu(&vm, 1), cpu(&vm, 2));
        let space = Space::new(&cpu0).unwrap();
        let file = Object::try_new(&cpu0, 2, 77).unwrap();
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        for at in [AT, AT + (1 << 24)].into_iter().take(1 + usize::from(twice)) {
            let backing = Backing { object: &file, first: 0, may_write: true };
            space.mmap_object(&cpu0, at, 2 * P, RW, flags, backing).unwrap();
        }
        store(&cpu0, &space, AT, 5).unwrap();
        store(&cpu0, &space, AT + P, 5).unwrap();
        let section = cpu0.section();
        // SAFETY: inside a grace section.
        let reached = unsafe { descend(vm.machine(), space.root(), AT) };
        let Reached::Last(slots) = reached else { panic!() };
        // Page 0's entry is emptied and not flushed while page 1's is waited for.
        let slot = &slots[node::index(AT, LAST) + 1];
        let held = protocol::take(slot, node::load(slot), &cpu0).unwrap();
        thread::scope(|scope| {
            let (space, file) = (&space, &file);
            let one = scope.spawn(move || {
                space.munmap(&cpu1, AT, 2 * P).unwrap();
            });
            nap();
            assert!(!one.is_finished());
            file.set_pages(&cpu2, 0).unwrap();
            let two =
                scope.spawn(move || space.revoke(&cpu2, file, 0..u64::MAX, PrivateCopies::Drop));
            nap();
            nap();
            if two.is_finished() {
                early.push((locking, twice));
            }
            held.revert();
            drop(section);
        });
    }
    assert_eq!(early, [], "returned before the flush of the unmapping");
}
