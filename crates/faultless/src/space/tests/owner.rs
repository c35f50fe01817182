//! Limits on the owner of a space, who edits the space in place, while other CPUs read the space.

use crate::addr::{PAGE_SIZE as P, VirtRange};
use crate::audit::audit;
use crate::knob::Setting;
use crate::space::write::NOWHERE;
use crate::space::{Advice, MapFlags, Prot, RemapFlags, Space};
use crate::stat::Counter;
use crate::sync::wait::{Yield, until};
use crate::testing::TestMachine;
use crate::testing::guest::{self, between, cpu, store};
use crate::vm::Cpu;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::vec::Vec;

const AT: u64 = 1 << 30;
const TO: u64 = 2 << 30;
const RW: Prot = Prot::READ.union(Prot::WRITE);
const FIXED: MapFlags = MapFlags::PRIVATE.union(MapFlags::ANONYMOUS).union(MapFlags::FIXED);
const MOVE: RemapFlags = RemapFlags::MAYMOVE.union(RemapFlags::FIXED);

/// A space of this CPU with `pages` pages at `AT`.
fn with_pages(cpu: &Cpu<'_, TestMachine>, pages: u64) -> Space<TestMachine> {
    let space = Space::new(cpu).unwrap();
    space.mmap(cpu, AT, pages * P, RW, FIXED).unwrap();
    space
}

fn end(cpu: &Cpu<'_, TestMachine>, space: Space<TestMachine>) {
    cpu.drain();
    audit(cpu, &[&space]).unwrap();
    space.exit(cpu);
    cpu.drain();
    assert_eq!(audit(cpu, &[]).unwrap().taken(), 1);
}

#[test]
fn reclaim_finds_pages_moved_by_the_owner() {
    let vm = guest::vm(3, 512);
    let owner = cpu(&vm, 0);
    let space = with_pages(&owner, 3);
    for page in 0..3 {
        store(&owner, &space, AT + page * P, 1).unwrap();
    }
    space.madvise(&owner, AT, 3 * P, Advice::Free).unwrap();
    let moving = AtomicBool::new(false);
    thread::scope(|scope| {
        let reclaim = scope.spawn(|| {
            until(&Yield, || moving.load(Ordering::Acquire));
            let cpu = cpu(&vm, 2);
            let freed = cpu.reclaim_lazy(3);
            cpu.drain();
            freed
        });
        let meanwhile = |_: &Cpu<'_, TestMachine>| {
            moving.store(true, Ordering::Release);
            until(&Yield, || space.core.owner.is_awaited());
        };
        let moved = between(&vm, meanwhile, || space.mremap(&owner, AT, 3 * P, 3 * P, MOVE, TO));
        assert_eq!(moved, Ok(TO));
        assert_eq!(reclaim.join().unwrap(), 3);
    });
    assert_eq!(vm.totals().get(Counter::LazilyFreed), 3);
    end(&owner, space);
}

#[test]
fn a_limit_lowered_during_an_edit_applies_to_the_next_edit() {
    const HOLES: u64 = if cfg!(miri) { 20 } else { 300 };
    let vm = guest::vm(1, 1024);
    let cpu = cpu(&vm, 0);
    let space = with_pages(&cpu, 2 * HOLES + 1);
    for hole in 0..HOLES {
        let page = VirtRange::page(AT + (2 * hole + 1) * P);
        let writing = space.write(&cpu, [page, NOWHERE], P);
        assert!(writing.owns());
        let done = writing.step(page.with_neighbours(), |step| {
            step.remove(page)?;
            vm.set(Setting::MaxMapCount(1));
            Ok(())
        });
        drop(writing);
        assert_eq!(done, Ok(()));
        cpu.collect();
        assert_eq!(space.map_count(&cpu) as u64, hole + 2);
        vm.set(Setting::MaxMapCount(65530));
    }
    end(&cpu, space);
}

/// The VMA found by the last fault is reused without a grace period: no fault uses the VMA again.
#[test]
fn no_hint_outlives_its_vma() {
    let vm = guest::vm(2, 512);
    let cpu = cpu(&vm, 0);
    let space = with_pages(&cpu, 1);
    space.activate(&cpu);
    let knows = || {
        let section = cpu.section();
        cpu.state().hint.get(&section, space.id()).is_some()
    };
    let fault = || {
        store(&cpu, &space, AT, 1).unwrap();
        assert!(knows());
    };
    fault();
    space.munmap(&cpu, AT, P).unwrap();
    assert!(!knows(), "the VMA is unmapped by the owner");
    space.mmap(&cpu, AT, P, RW, FIXED).unwrap();
    fault();
    // SAFETY: this CPU makes no access to user space.
    unsafe { space.deactivate(&cpu) };
    assert!(!knows(), "another CPU may now own the space");
    end(&cpu, space);
}

/// A CPU does not begin to own a space in which another has a claim.
#[test]
fn a_claimed_space_gets_no_owner() {
    let vm = guest::vm(2, 512);
    let (first, second) = (cpu(&vm, 0), cpu(&vm, 1));
    let space = with_pages(&first, 1);
    space.activate(&first);
    // This CPU reads the space, and thereby makes it shared.
    assert_eq!(space.map_count(&second), 1);
    assert!(space.core.owner.was_shared());
    let claim = space.share(&second, VirtRange::page(AT), Counter::RangeLockShared);
    assert!(!space.try_own(&first));
    drop(claim);
    assert!(space.try_own(&first));
    // SAFETY: this CPU makes no access to user space.
    unsafe { space.deactivate(&first) };
    end(&first, space);
}

/// A call during a listing of a space owned by the CPU creates a new version. The listed VMAs stay
/// unchanged.
#[test]
fn no_edit_in_place_during_a_listing() {
    let vm = guest::vm(1, 512);
    let cpu = cpu(&vm, 0);
    let space = with_pages(&cpu, 3);
    let unmap = || space.munmap(&cpu, AT + P, P);
    let mut listed = Vec::new();
    space.each_area(&cpu, VirtRange::USER, |area| {
        unmap().unwrap();
        // Reads memory which the call might have freed at its end.
        listed.push(area.range);
        true
    });
    assert_eq!(listed, [VirtRange::new(AT, AT + 3 * P)]);
    assert_eq!(space.map_count(&cpu), 2);
    end(&cpu, space);
}

/// Written pages become part of a VMA without an anon_vma. The VMA adopts their anon_vma, which the
/// audit compares with the anon_vma of the pages.
#[test]
fn a_vma_adopts_the_anon_vma_of_merged_pages() {
    let vm = guest::vm(1, 512);
    let cpu = cpu(&vm, 0);
    // The written page lies below the other VMA, above, and between two VMAs.
    for (untouched, written) in [(&[1][..], 0), (&[0], 1), (&[0, 2], 1)] {
        let space = Space::new(&cpu).unwrap();
        space.activate(&cpu);
        for page in untouched {
            space.mmap(&cpu, AT + page * P, P, RW, FIXED).unwrap();
        }
        space.mmap(&cpu, AT + written * P, P, RW | Prot::EXEC, FIXED).unwrap();
        store(&cpu, &space, AT + written * P, 1).unwrap();
        assert_eq!(space.map_count(&cpu), untouched.len() + 1);
        space.mprotect(&cpu, AT + written * P, P, RW).unwrap();
        assert_eq!(space.map_count(&cpu), 1, "all merged");
        // SAFETY: this CPU makes no access to user space.
        unsafe { space.deactivate(&cpu) };
        end(&cpu, space);
    }
}
