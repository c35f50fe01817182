//! Calls against calls and faults, which must wait for each other and must not deadlock. Each test
//! covers a former bug.

use crate::addr::PAGE_SIZE;
use crate::audit::audit;
use crate::fault::Access;
use crate::knob::{Locking, Setting};
use crate::space::{Advice, MapFlags, Prot, RemapFlags, Space};
use crate::table::Entry;
use crate::table::node::{self, LAST};
use crate::table::protocol;
use crate::table::walk::{Reached, descend};
use crate::testing::guest::{self, cpu, load, store};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

const AT: u64 = 1 << 30;
const RW: Prot = Prot::READ.union(Prot::WRITE);
const FIXED: MapFlags = MapFlags::PRIVATE.union(MapFlags::ANONYMOUS).union(MapFlags::FIXED);

/// A fault of an old mapping may hold an empty entry when a page is moved there. The entry restored
/// by the fault must not overwrite the moved page.
#[test]
fn a_move_waits_for_an_entry_held_by_a_late_fault() {
    let vm = guest::vm(2, 256);
    let (cpu0, cpu1) = (cpu(&vm, 0), cpu(&vm, 1));
    let space = Space::new(&cpu0).unwrap();
    space.mmap(&cpu0, AT, 3 * PAGE_SIZE, RW, FIXED).unwrap();
    store(&cpu0, &space, AT, 7).unwrap();
    let target = AT + 2 * PAGE_SIZE;
    space.munmap(&cpu0, target, PAGE_SIZE).unwrap();
    {
        let section = cpu0.section();
        // SAFETY: inside a grace section.
        let reached = unsafe { descend(vm.machine(), space.root(), target) };
        let Reached::Last(slots) = reached else { panic!("a table of the page below") };
        let slot = &slots[node::index(target, LAST)];
        // Like a fault that found the mapping before its removal.
        let held = protocol::take(slot, Entry::NONE, &cpu0).unwrap();
        thread::scope(|scope| {
            let space = &space;
            let mover = scope.spawn(move || {
                let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
                let moved = space.mremap(&cpu1, AT, PAGE_SIZE, PAGE_SIZE, flags, target);
                (moved, cpu1)
            });
            thread::sleep(Duration::from_millis(30));
            assert!(!mover.is_finished(), "the move did not wait for the entry");
            held.revert();
            drop(section);
            let (moved, cpu1) = mover.join().unwrap();
            assert_eq!(moved, Ok(target));
            cpu1.drain();
        });
    }
    assert_eq!(load(&cpu0, &space, target), Ok(7));
    cpu0.drain();
    audit(&cpu0, &[&space]).unwrap();
    space.exit(&cpu0);
}

/// `brk` changes mappings and the heap's end, `fork` reads both; they took the locks of the two in
/// opposite orders.
#[test]
fn brk_and_fork_do_not_wait_for_each_other() {
    let vm = guest::vm(2, 1024);
    let (cpu0, cpu1) = (cpu(&vm, 0), cpu(&vm, 1));
    let space = Space::new(&cpu0).unwrap();
    let start = space.heap_range().start;
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let (space, done) = (&space, &done);
        scope.spawn(move || {
            while !done.load(Ordering::Relaxed) {
                let child = space.fork(&cpu1).unwrap();
                let heap = child.heap_range();
                assert_eq!(
                    child.mapped_pages(&cpu1),
                    heap.pages(),
                    "the end belongs to the mappings"
                );
                child.exit(&cpu1);
            }
            cpu1.drain();
        });
        for pages in (0..400).map(|round| round % 5) {
            let end = start + pages * PAGE_SIZE;
            assert_eq!(space.brk(&cpu0, end), end);
        }
        done.store(true, Ordering::Relaxed);
    });
    cpu0.drain();
    audit(&cpu0, &[&space]).unwrap();
    space.exit(&cpu0);
}

/// A fork that runs out of memory ends its child. The end of the child used to run inside the
/// parent's lock and section, and met a switch of the locking policy, which waits for sections.
#[test]
fn a_fork_without_memory_survives_a_switch_of_the_policy() {
    let vm = guest::vm(2, 64);
    let cpu0 = cpu(&vm, 0);
    let space = Space::new(&cpu0).unwrap();
    // Pages so far apart that the child needs more tables than there are frames.
    for page in 0..12 {
        let addr = AT + (page << 30);
        space.mmap(&cpu0, addr, PAGE_SIZE, RW, FIXED).unwrap();
        store(&cpu0, &space, addr, page).unwrap();
    }
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let (vm, done) = (&vm, &done);
        scope.spawn(move || {
            while !done.load(Ordering::Relaxed) {
                for locking in Locking::ALL {
                    vm.set(Setting::Locking(locking));
                }
            }
        });
        for _ in 0..300 {
            let child = space.fork(&cpu0);
            assert!(child.is_err(), "memory for a child");
        }
        done.store(true, Ordering::Relaxed);
    });
    for page in 0..12 {
        assert_eq!(load(&cpu0, &space, AT + (page << 30)), Ok(page));
    }
    cpu0.drain();
    audit(&cpu0, &[&space]).unwrap();
    space.exit(&cpu0);
}

/// An `mprotect` that extends to the start of a growing mapping may merge this mapping with the VMA
/// below. The VMA below used to be unlocked.
#[test]
fn mprotect_to_the_start_of_a_stack_locks_the_vma_below() {
    let vm = guest::vm(2, 256);
    let (cpu0, cpu1) = (cpu(&vm, 0), cpu(&vm, 1));
    let space = Space::new(&cpu0).unwrap();
    let flags = FIXED | MapFlags::GROWSDOWN;
    space.mmap(&cpu0, AT, 16 * PAGE_SIZE, RW, flags).unwrap();
    store(&cpu0, &space, AT, 1).unwrap();
    thread::scope(|scope| {
        let space = &space;
        scope.spawn(move || {
            for round in 0..5000 {
                let prot = if round % 3 == 0 { Prot::READ } else { RW };
                space.mprotect(&cpu1, AT, (1 + round % 7) * PAGE_SIZE, prot).unwrap();
            }
            cpu1.drain();
        });
        for round in 0..5000 {
            let prot = if round % 5 < 2 { Prot::READ } else { RW };
            let top = AT + (8 + round % 8) * PAGE_SIZE;
            space.mprotect(&cpu0, top, PAGE_SIZE, prot | Prot::GROWSDOWN).unwrap();
        }
    });
    assert_eq!(space.mapped_pages(&cpu0), 16);
    assert!(space.fault_remote(&cpu0, AT, Access::Read).is_ok());
    space.madvise(&cpu0, AT, 16 * PAGE_SIZE, Advice::DontNeed).unwrap();
    cpu0.drain();
    audit(&cpu0, &[&space]).unwrap();
    space.exit(&cpu0);
}

/// A copying fault acquires a reference to a frame before it validates the frame. In the meantime,
/// the frame may have become a table and been freed.
#[test]
fn a_table_referenced_by_a_late_copy_is_freed_once() {
    let vm = guest::vm(1, 64);
    let cpu0 = cpu(&vm, 0);
    let space = Space::new(&cpu0).unwrap();
    let table = space.root();
    assert!(vm.frames.meta(table).get_ref_unless_zero());
    space.exit(&cpu0);
    // No new owner may get this frame now.
    let other = Space::new(&cpu0).unwrap();
    assert_ne!(other.root(), table);
    // SAFETY: the reference taken above, which never was a mapping.
    unsafe { cpu0.put_unmapped(table) };
    other.exit(&cpu0);
    cpu0.drain();
    assert_eq!(audit(&cpu0, &[]).unwrap().taken(), 1, "only the zero page remains");
}
