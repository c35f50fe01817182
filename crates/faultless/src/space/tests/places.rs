//! The choice of an address for a mapping without a fixed address, beside other CPUs that map and
//! unmap.

use super::races::finish;
use crate::addr::{PAGE_SIZE, VirtRange};
use crate::error::Errno;
use crate::knob::Setting;
use crate::machine::Machine;
use crate::space::place::REGION;
use crate::space::write::NOWHERE;
use crate::space::{MMAP_BASE, MapFlags, Prot, STACK_GUARD, Space};
use crate::testing::TestMachine;
use crate::testing::guest::{self, cpu};
use crate::vm::Cpu;
use std::thread;
use std::time::Duration;

const P: u64 = PAGE_SIZE;
const APART: u64 = 9;

fn map(cpu: &Cpu<'_, TestMachine>, space: &Space<TestMachine>, hint: Option<u64>, len: u64) -> u64 {
    let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS | MapFlags::NORESERVE;
    space.mmap(cpu, hint, len, Prot::READ, flags).unwrap()
}

#[test]
fn a_cpu_maps_in_its_region_if_the_highest_hole_is_claimed() {
    let vm = guest::vm(3, 64);
    vm.set(Setting::EditInPlace(false));
    vm.set(Setting::MapApart(APART as u32));
    let [cpu0, cpu1, cpu2] = [0, 1, 2].map(|id| cpu(&vm, id));
    let space = Space::new(&cpu0).unwrap();
    let [one, two] = [1, 2].map(|index| MMAP_BASE - (index + 1) * REGION);
    {
        // CPU 0 unmaps there, and has not flushed yet.
        let page = VirtRange::new(MMAP_BASE - P, MMAP_BASE);
        let _unmaps = space.write(&cpu0, [page, NOWHERE], P);
        assert_eq!(map(&cpu1, &space, None, P), one - P);
        assert_eq!(map(&cpu2, &space, None, 2 * P), two - 2 * P);
        assert_eq!(map(&cpu1, &space, None, P), one - 2 * P);
        // A hint counts as before.
        assert_eq!(map(&cpu1, &space, Some(16 * P), P), 16 * P);
    }
    // A mapping larger than a region goes to the highest free range.
    assert_eq!(map(&cpu2, &space, None, REGION + P), MMAP_BASE - REGION - P);
    // A CPU that has met no conflict.
    assert_eq!(map(&cpu0, &space, None, P), MMAP_BASE - REGION - 2 * P);
    // The other CPUs stay in their regions for some time.
    for call in 4..=APART {
        assert_eq!(map(&cpu1, &space, None, P), one - (call - 1) * P, "{call}");
    }
    let after = map(&cpu1, &space, None, P);
    assert_eq!(after, MMAP_BASE - REGION - 3 * P);
    finish(cpu0, space);
}

#[test]
fn conflicts_in_one_space_do_not_count_in_another() {
    let vm = guest::vm(2, 64);
    vm.set(Setting::EditInPlace(false));
    let [cpu0, cpu1] = [0, 1].map(|id| cpu(&vm, id));
    let [here, there] = [0, 1].map(|_| Space::new(&cpu0).unwrap());
    {
        let page = VirtRange::new(MMAP_BASE - P, MMAP_BASE);
        let _unmaps = here.write(&cpu0, [page, NOWHERE], P);
        assert_eq!(map(&cpu1, &here, None, P), MMAP_BASE - 2 * REGION - P);
    }
    assert_eq!(map(&cpu1, &there, None, P), MMAP_BASE - P);
    // The knob 0 disables the regions.
    vm.set(Setting::MapApart(0));
    assert_eq!(map(&cpu1, &here, None, P), MMAP_BASE - P);
    there.exit(&cpu0);
    finish(cpu0, here);
}

#[test]
fn a_full_region_continues_at_the_common_top() {
    let vm = guest::vm(2, 64);
    vm.set(Setting::EditInPlace(false));
    let [cpu0, cpu1] = [0, 1].map(|id| cpu(&vm, id));
    let space = Space::new(&cpu0).unwrap();
    {
        let page = VirtRange::new(MMAP_BASE - P, MMAP_BASE);
        let _unmaps = space.write(&cpu0, [page, NOWHERE], P);
        assert_eq!(map(&cpu1, &space, None, P), MMAP_BASE - 2 * REGION - P);
    }
    let (lowest, top) = (vm.machine().lowest_address(), MMAP_BASE - 2 * REGION);
    let fixed = MapFlags::PRIVATE | MapFlags::ANONYMOUS | MapFlags::NORESERVE | MapFlags::FIXED;
    space.mmap(&cpu0, lowest, top - lowest, Prot::READ, fixed).unwrap();
    assert_eq!(map(&cpu1, &space, None, P), MMAP_BASE - P);
    finish(cpu0, space);
}

const MAPS: MapFlags = MapFlags::PRIVATE.union(MapFlags::ANONYMOUS).union(MapFlags::NORESERVE);

/// Lets CPU 1 map a writable page in a space created by CPU 0, while CPU 0 has a claim at the
/// common top. Returns the address.
fn map_apart(
    cpu0: &Cpu<'_, TestMachine>,
    cpu1: &Cpu<'_, TestMachine>,
    space: &Space<TestMachine>,
) -> u64 {
    let page = VirtRange::new(MMAP_BASE - P, MMAP_BASE);
    let _unmaps = space.write(cpu0, [page, NOWHERE], P);
    space.mmap(cpu1, None, P, Prot::READ | Prot::WRITE, MAPS).unwrap()
}

#[test]
fn the_owner_of_a_space_maps_at_the_common_top() {
    let vm = guest::vm(2, 64);
    vm.set(Setting::EditInPlace(false));
    let [cpu0, cpu1] = [0, 1].map(|id| cpu(&vm, id));
    let space = Space::new(&cpu0).unwrap();
    assert_eq!(map_apart(&cpu0, &cpu1, &space), MMAP_BASE - 2 * REGION - P);
    vm.set(Setting::EditInPlace(true));
    let own = Space::new(&cpu1).unwrap();
    assert_eq!(map(&cpu1, &own, None, P), MMAP_BASE - P);
    own.exit(&cpu1);
    finish(cpu0, space);
}

/// Every sequential order of the calls permits the mapping.
#[test]
fn a_mapping_that_must_merge_goes_to_the_common_top() {
    let vm = guest::vm(2, 64);
    vm.set(Setting::EditInPlace(false));
    let [cpu0, cpu1] = [0, 1].map(|id| cpu(&vm, id));
    let space = Space::new(&cpu0).unwrap();
    map_apart(&cpu0, &cpu1, &space);
    assert_eq!(map(&cpu0, &space, None, P), MMAP_BASE - P);
    vm.set(Setting::MaxMapCount(2));
    assert_eq!(map(&cpu1, &space, None, P), MMAP_BASE - 2 * P);
    vm.set(Setting::MaxMapCount(3));
    assert_eq!(map(&cpu1, &space, None, P), MMAP_BASE - 2 * REGION - 2 * P);
    finish(cpu0, space);
}

#[test]
fn a_mapping_in_a_region_keeps_the_stack_guard_free() {
    let vm = guest::vm(2, 64);
    vm.set(Setting::EditInPlace(false));
    let [cpu0, cpu1] = [0, 1].map(|id| cpu(&vm, id));
    let space = Space::new(&cpu0).unwrap();
    let top = MMAP_BASE - 2 * REGION;
    let stack = MAPS | MapFlags::FIXED | MapFlags::GROWSDOWN;
    space.mmap(&cpu0, top + 2 * P, P, Prot::READ, stack).unwrap();
    let placed = map_apart(&cpu0, &cpu1, &space);
    assert_eq!(placed, top + 2 * P - STACK_GUARD - P);
    // Nor does a hint go there.
    assert_eq!(map(&cpu1, &space, Some(top), P), placed - P);
    finish(cpu0, space);
}

/// Waits long enough for a call to begin its wait.
fn pause() {
    thread::sleep(Duration::from_millis(100));
}

#[test]
fn a_mapping_waits_for_its_requested_address() {
    let vm = guest::vm(2, 64);
    vm.set(Setting::EditInPlace(false));
    let cpu0 = cpu(&vm, 0);
    let space = Space::new(&cpu0).unwrap();
    thread::scope(|scope| {
        let claim = space.write(&cpu0, [VirtRange::page(16 * P), NOWHERE], P);
        let maps = scope.spawn(|| {
            let cpu1 = cpu(&vm, 1);
            [Some(16 * P), None].map(|hint| map(&cpu1, &space, hint, P))
        });
        pause();
        drop(claim);
        // Afterwards the CPU need not use its region.
        assert_eq!(maps.join().unwrap(), [16 * P, MMAP_BASE - P]);
    });
    finish(cpu0, space);
}

#[test]
fn an_address_taken_during_the_wait_is_not_used() {
    let vm = guest::vm(3, 64);
    vm.set(Setting::EditInPlace(false));
    let cpu0 = cpu(&vm, 0);
    let space = Space::new(&cpu0).unwrap();
    let place = MMAP_BASE - 2 * REGION - P;
    thread::scope(|scope| {
        let claim = space.write(&cpu0, [VirtRange::USER, NOWHERE], P);
        let takes = scope.spawn(|| {
            let there = MAPS | MapFlags::FIXED_NOREPLACE;
            space.mmap(&cpu(&vm, 2), place, P, Prot::READ, there)
        });
        pause();
        let maps = scope.spawn(|| map(&cpu(&vm, 1), &space, None, P));
        pause();
        drop(claim);
        // Either call may be first.
        match takes.join().unwrap() {
            Ok(_) => assert_ne!(maps.join().unwrap(), place),
            Err(error) => {
                assert_eq!((error.errno, maps.join().unwrap()), (Errno::EEXIST, place));
            }
        }
    });
    finish(cpu0, space);
}
