//! Where a mapping goes whose address is left open, beside other CPUs that map and unmap.

use super::guest::{self, cpu};
use super::races::finish;
use crate::addr::{PAGE_SIZE, VirtRange};
use crate::knob::Setting;
use crate::machine::Machine;
use crate::space::place::REGION;
use crate::space::write::NOWHERE;
use crate::space::{MMAP_BASE, MapFlags, Prot, Space};
use crate::testing::TestMachine;
use crate::vm::Cpu;

const P: u64 = PAGE_SIZE;
const APART: u64 = 9;

fn map(cpu: &Cpu<'_, TestMachine>, space: &Space<TestMachine>, hint: u64, len: u64) -> u64 {
    let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS | MapFlags::NORESERVE;
    space.mmap(cpu, hint, len, Prot::READ, flags).unwrap()
}

#[test]
fn who_finds_the_highest_hole_claimed_maps_in_its_own_region() {
    let vm = guest::vm(3, 64);
    vm.set(Setting::EditInPlace(false));
    vm.set(Setting::MapApart(APART as u32));
    let [cpu0, cpu1, cpu2] = [0, 1, 2].map(|id| cpu(&vm, id));
    let space = Space::new(&cpu0).unwrap();
    let [one, two] = [1, 2].map(|index| MMAP_BASE - (index + 1) * REGION);
    {
        // As CPU 0 that unmaps there, and has not flushed yet.
        let page = VirtRange::new(MMAP_BASE - P, MMAP_BASE);
        let _unmaps = space.write(&cpu0, [page, NOWHERE], P);
        assert_eq!(map(&cpu1, &space, 0, P), one - P);
        assert_eq!(map(&cpu2, &space, 0, 2 * P), two - 2 * P);
        assert_eq!(map(&cpu1, &space, 0, P), one - 2 * P);
        // A hint counts as before.
        assert_eq!(map(&cpu1, &space, 16 * P, P), 16 * P);
    }
    // What is larger than a region goes where all is free.
    assert_eq!(map(&cpu2, &space, 0, REGION + P), MMAP_BASE - REGION - P);
    // Those that have met nobody.
    assert_eq!(map(&cpu0, &space, 0, P), MMAP_BASE - REGION - 2 * P);
    // The others stay where they are, for some time.
    for call in 4..=APART {
        assert_eq!(map(&cpu1, &space, 0, P), one - (call - 1) * P, "{call}");
    }
    let after = map(&cpu1, &space, 0, P);
    assert_eq!(after, MMAP_BASE - REGION - 3 * P);
    finish(cpu0, space);
}

#[test]
fn whom_a_cpu_met_in_one_space_does_not_count_in_another() {
    let vm = guest::vm(2, 64);
    vm.set(Setting::EditInPlace(false));
    let [cpu0, cpu1] = [0, 1].map(|id| cpu(&vm, id));
    let [here, there] = [0, 1].map(|_| Space::new(&cpu0).unwrap());
    {
        let page = VirtRange::new(MMAP_BASE - P, MMAP_BASE);
        let _unmaps = here.write(&cpu0, [page, NOWHERE], P);
        assert_eq!(map(&cpu1, &here, 0, P), MMAP_BASE - 2 * REGION - P);
    }
    assert_eq!(map(&cpu1, &there, 0, P), MMAP_BASE - P);
    // Nor does it if the knob says that nobody maps apart.
    vm.set(Setting::MapApart(0));
    assert_eq!(map(&cpu1, &here, 0, P), MMAP_BASE - P);
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
        assert_eq!(map(&cpu1, &space, 0, P), MMAP_BASE - 2 * REGION - P);
    }
    let (lowest, top) = (vm.machine().lowest_address(), MMAP_BASE - 2 * REGION);
    let fixed = MapFlags::PRIVATE | MapFlags::ANONYMOUS | MapFlags::NORESERVE | MapFlags::FIXED;
    space.mmap(&cpu0, lowest, top - lowest, Prot::READ, fixed).unwrap();
    assert_eq!(map(&cpu1, &space, 0, P), MMAP_BASE - P);
    finish(cpu0, space);
}
