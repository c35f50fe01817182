//! The calls.

use super::guest::{AT, P, PRIVATE, RW, SHARED, Small, TestCpu, TestVm, World};
use super::shim::{live, with};
use super::{Case, Left, Refused, exhaust};
use faultless::{
    Advice, AnonVmaCheck, Backing, CacheMode, CpuId, DeviceMemory, Errno, FrameNumber, MapFlags,
    MemPolicy, NodeSet, Object, PrivateCopies, Prot, RemapFlags, Space,
};

/// Calls make no pages, or make them in faults, which are tested by themselves.
const LATE: &[AnonVmaCheck] = &[AnonVmaCheck::Late];

type Setup<'c> = &'c dyn Fn(&TestCpu<'_>, &mut World);
type Call<'c> = &'c dyn Fn(&TestCpu<'_>, &mut World) -> Result<(), Refused>;

/// Exhausts `call` among few VMAs, and among as many as make the tree's nodes full, split and deep.
fn exhaust_crowded(name: &str, setup: Setup<'_>, call: Call<'_>, left: Left) {
    for crowd in [0, 14, 40] {
        let setup = |cpu: &TestCpu<'_>, world: &mut World| {
            // Single pages with holes between.
            for number in 0..crowd {
                let below = number % 2 == 0;
                let at =
                    if below { AT - (2 * number + 600) * P } else { AT + (2 * number + 600) * P };
                world.spaces[0].mmap(cpu, at, P, Prot::READ, PRIVATE).unwrap();
            }
            setup(cpu, world);
        };
        let name = format!("{name}, {crowd} other VMAs");
        exhaust(&Case { name: &name, setup: &setup, call, left, checks: LATE, may_fail: true });
    }
}

fn exhaust_call(name: &str, setup: Setup<'_>, call: Call<'_>, left: Left) {
    exhaust(&Case { name, setup, call, left, checks: LATE, may_fail: true });
}

/// Checks that the call succeeds without any free memory.
fn exhaust_infallible(name: &str, setup: Setup<'_>, call: Call<'_>) {
    let left = Left::Nothing;
    exhaust(&Case { name, setup, call, left, checks: LATE, may_fail: false });
}

/// Maps pages 0..8 of private memory, with stores to some pages.
fn eight(cpu: &TestCpu<'_>, world: &mut World) {
    world.map(cpu, 0, 8, RW, PRIVATE);
    [0, 1, 4, 7].into_iter().for_each(|page| world.store(cpu, page, 100 + page));
}

/// Maps the pages of [`eight`], pages of an object both shared and private, and shared memory.
fn all_kinds(cpu: &TestCpu<'_>, world: &mut World) {
    eight(cpu, world);
    world.map_object(cpu, 10, 4, MapFlags::SHARED | MapFlags::FIXED, 0);
    world.map_object(cpu, 14, 4, MapFlags::PRIVATE | MapFlags::FIXED, 2);
    world.map(cpu, 18, 4, RW, SHARED);
    [10, 11, 14, 18, 21].into_iter().for_each(|page| world.store(cpu, page, 100 + page));
}

fn mmap(
    first: u64,
    pages: u64,
    flags: MapFlags,
) -> impl Fn(&TestCpu<'_>, &mut World) -> Result<(), Refused> {
    move |cpu, world| {
        world.spaces[0].mmap(cpu, AT + first * P, pages * P, RW, flags)?;
        Ok(())
    }
}

fn mremap(
    (from, old): (u64, u64),
    (to, new): (u64, u64),
    flags: RemapFlags,
) -> impl Fn(&TestCpu<'_>, &mut World) -> Result<(), Refused> {
    move |cpu, world| {
        let (at, to) = (AT + from * P, AT + to * P);
        world.spaces[0].mremap(cpu, at, old * P, new * P, flags, to)?;
        Ok(())
    }
}

#[test]
fn mmap_of_a_free_address() {
    exhaust_crowded("mmap", &eight, &mmap(20, 4, PRIVATE), Left::Nothing);
    exhaust_crowded("mmap that merges", &eight, &mmap(8, 4, PRIVATE), Left::Nothing);
    exhaust_crowded("mmap of shared memory", &eight, &mmap(20, 4, SHARED), Left::Nothing);
    let anywhere = |cpu: &TestCpu<'_>, world: &mut World| {
        let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS;
        world.spaces[0].mmap(cpu, None, 4 * P, RW, flags)?;
        Ok(())
    };
    exhaust_crowded("mmap anywhere", &eight, &anywhere, Left::Nothing);
}

#[test]
fn mmap_over_existing_mappings() {
    exhaust_crowded("mmap inside", &eight, &mmap(2, 3, SHARED), Left::Nothing);
    exhaust_crowded("mmap over both ends", &all_kinds, &mmap(6, 14, PRIVATE), Left::Nothing);
    exhaust_crowded("mmap over all", &all_kinds, &mmap(0, 22, SHARED), Left::Nothing);
}

#[test]
fn mmap_of_an_object() {
    for flags in [MapFlags::SHARED, MapFlags::PRIVATE] {
        let call = |cpu: &TestCpu<'_>, world: &mut World| {
            let backing = Backing { object: &world.objects[0], first: 3, may_write: true };
            let flags = flags | MapFlags::FIXED;
            world.spaces[0].mmap_object(cpu, AT + 5 * P, 6 * P, RW, flags, backing)?;
            Ok(())
        };
        exhaust_crowded("mmap of an object", &all_kinds, &call, Left::Nothing);
    }
}

#[test]
fn mmap_of_device_memory() {
    let call = |cpu: &TestCpu<'_>, world: &mut World| {
        let (first, cache) = (FrameNumber(1 << 20), CacheMode::Uncached);
        let device = DeviceMemory { first, cache, tag: 3, may_write: true };
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: frames of no region, without accesses.
        unsafe { world.spaces[0].mmap_device(cpu, AT + 5 * P, 6 * P, RW, flags, device) }?;
        Ok(())
    };
    exhaust_crowded("mmap of device memory", &all_kinds, &call, Left::Nothing);
}

/// Faulted pages stay, and no page stays pinned.
#[test]
fn pin_leaves_no_page_pinned() {
    let call = |cpu: &TestCpu<'_>, world: &mut World| {
        drop(world.spaces[0].pin(cpu, AT, 8 * P, true)?);
        Ok(())
    };
    exhaust_call("a pin", &eight, &call, Left::Pages);
    // Pages shared with a child: a pin for loads copies them.
    let forked = |cpu: &TestCpu<'_>, world: &mut World| {
        eight(cpu, world);
        let child = world.spaces[0].fork(cpu).unwrap();
        world.spaces.push(child);
        world.spaces[0].mprotect(cpu, AT, 8 * P, Prot::READ).unwrap();
    };
    let call = |cpu: &TestCpu<'_>, world: &mut World| {
        drop(world.spaces[0].pin(cpu, AT + 4 * P, P, false)?);
        Ok(())
    };
    exhaust_call("a pin of shared pages", &forked, &call, Left::Pages);
}

#[test]
fn fork_of_pinned_pages() {
    let call = |cpu: &TestCpu<'_>, world: &mut World| {
        let pins = world.spaces[0].pin(cpu, AT, 2 * P, true)?;
        let child = world.spaces[0].fork(cpu)?;
        drop(pins);
        world.spaces.push(child);
        Ok(())
    };
    exhaust_call("fork of pinned pages", &eight, &call, Left::ReadOnly);
}

/// As on Linux, the call succeeds and what could not be populated is left for faults.
#[test]
fn mmap_with_populate_always_maps() {
    let call = |cpu: &TestCpu<'_>, world: &mut World| {
        world.spaces[0].mmap(cpu, AT + 18 * P, 4 * P, RW, PRIVATE | MapFlags::POPULATE)?;
        // Makes the end state independent of the populated pages.
        world.spaces[0].madvise(cpu, AT + 18 * P, 4 * P, Advice::PopulateWrite)?;
        Ok(())
    };
    // The second call replaces the mapping of the first.
    let setup = |cpu: &TestCpu<'_>, world: &mut World| {
        eight(cpu, world);
        world.map(cpu, 18, 4, RW, PRIVATE);
    };
    exhaust_call("mmap that populates", &setup, &call, Left::Pages);
}

#[test]
fn munmap() {
    for (name, first, pages) in [
        ("inside", 2, 2),
        ("the start", 0, 3),
        ("the end", 5, 3),
        ("several", 5, 11),
        ("all", 0, 22),
    ] {
        let call = |cpu: &TestCpu<'_>, world: &mut World| {
            Ok(world.spaces[0].munmap(cpu, AT + first * P, pages * P)?)
        };
        let name = format!("munmap {name}");
        exhaust_crowded(&name, &all_kinds, &call, Left::Nothing);
    }
}

#[test]
fn mprotect() {
    let protect = |first: u64, pages: u64, prot: Prot| {
        move |cpu: &TestCpu<'_>, world: &mut World| {
            Ok(world.spaces[0].mprotect(cpu, AT + first * P, pages * P, prot)?)
        }
    };
    for prot in [Prot::READ, Prot::empty(), RW | Prot::EXEC] {
        exhaust_crowded("mprotect inside", &eight, &protect(1, 4, prot), Left::Nothing);
        exhaust_crowded("mprotect the start", &eight, &protect(0, 4, prot), Left::Nothing);
        exhaust_crowded("mprotect the end", &eight, &protect(4, 4, prot), Left::Nothing);
        exhaust_crowded("mprotect all", &eight, &protect(0, 8, prot), Left::Nothing);
    }
    let three = |cpu: &TestCpu<'_>, world: &mut World| {
        eight(cpu, world);
        world.spaces[0].mprotect(cpu, AT + 2 * P, 3 * P, Prot::READ).unwrap();
    };
    exhaust_crowded("mprotect that merges three", &three, &protect(2, 3, RW), Left::Nothing);
    exhaust_crowded("mprotect that merges two", &three, &protect(2, 1, RW), Left::Nothing);
}

#[test]
fn mremap_in_place() {
    let none = RemapFlags::empty();
    exhaust_crowded("mremap shrinks", &eight, &mremap((0, 8), (0, 3), none), Left::Nothing);
    exhaust_crowded(
        "mremap shrinks a middle",
        &eight,
        &mremap((2, 4), (0, 2), none),
        Left::Nothing,
    );
    exhaust_crowded("mremap grows", &eight, &mremap((0, 8), (0, 12), none), Left::Nothing);
    exhaust_crowded("mremap grows the end", &eight, &mremap((5, 3), (0, 9), none), Left::Nothing);
}

#[test]
fn mremap_with_a_move() {
    let to = RemapFlags::MAYMOVE | RemapFlags::FIXED;
    let keep = to | RemapFlags::DONTUNMAP;
    for (name, from, there, flags) in [
        ("moves all", (0, 8), (30, 8), to),
        ("moves the start", (0, 3), (30, 3), to),
        ("moves a middle", (1, 4), (30, 4), to),
        ("moves the end", (4, 4), (30, 4), to),
        ("moves and shrinks", (0, 8), (30, 3), to),
        ("moves a middle and shrinks", (1, 5), (30, 2), to),
        ("moves and grows", (3, 5), (30, 9), to),
        ("moves within one VMA", (0, 2), (4, 2), to),
        ("moves to its neighbour", (0, 2), (2, 2), to),
        ("moves down within one VMA", (6, 2), (2, 2), to),
        ("moves over other mappings", (1, 4), (13, 4), to),
        ("moves over the end of other mappings", (1, 4), (20, 4), to),
        ("moves far", (1, 4), (5000, 4), to),
        ("copies all", (0, 8), (30, 8), keep),
        ("copies a middle", (1, 4), (30, 4), keep),
        ("copies over other mappings", (1, 4), (13, 4), keep),
        ("copies within one VMA", (0, 2), (4, 2), keep),
        ("moves an object's", (10, 4), (30, 4), to),
        ("moves a middle of an object's", (11, 2), (30, 2), to),
        ("maps shared memory again", (18, 0), (30, 4), to),
    ] {
        let name = format!("mremap {name}");
        exhaust_crowded(&name, &all_kinds, &mremap(from, there, flags), Left::Nothing);
    }
    let blocked = |cpu: &TestCpu<'_>, world: &mut World| {
        eight(cpu, world);
        world.map(cpu, 8, 1, Prot::READ, PRIVATE);
    };
    // Tables of upper levels are for more than the place that is locked, and stay.
    let grow = mremap((0, 8), (0, 12), RemapFlags::MAYMOVE);
    exhaust_crowded("mremap grows elsewhere", &blocked, &grow, Left::Ways);
    let grow = mremap((2, 3), (0, 12), RemapFlags::MAYMOVE);
    exhaust_crowded("mremap grows a middle elsewhere", &blocked, &grow, Left::Ways);
}

/// Pages shared by two children, with page numbers of two mappings. The audit finds all pages
/// through the reverse map, whether or not the call moved them.
#[test]
fn mremap_of_shared_pages() {
    let to = RemapFlags::MAYMOVE | RemapFlags::FIXED;
    let keep = to | RemapFlags::DONTUNMAP;
    let shared = |cpu: &TestCpu<'_>, world: &mut World| {
        eight(cpu, world);
        let fork = |world: &mut World| {
            let child = world.spaces[0].fork(cpu).unwrap();
            world.spaces.push(child);
        };
        fork(world);
        mremap((0, 8), (30, 8), to)(cpu, world).unwrap();
        [32, 35].into_iter().for_each(|page| world.store(cpu, page, 100 + page));
        fork(world);
    };
    for (name, from, there, flags) in [
        ("moves shared pages", (30, 8), (50, 8), to),
        ("moves the middle of shared pages", (31, 4), (51, 4), to),
        ("moves shared pages home", (30, 8), (0, 8), to),
        ("copies shared pages", (30, 8), (50, 8), keep),
    ] {
        let name = format!("mremap {name}");
        exhaust_crowded(&name, &shared, &mremap(from, there, flags), Left::Nothing);
    }
}

#[test]
fn madvise() {
    let advise = |first: u64, pages: u64, advice: Advice| {
        move |cpu: &TestCpu<'_>, world: &mut World| {
            match world.spaces[0].madvise(cpu, AT + first * P, pages * P, advice) {
                // As on Linux, if the space has as many VMAs as it may have.
                Err(error) if error.errno == Errno::EAGAIN => Err(Refused),
                result => Ok(result?),
            }
        }
    };
    for advice in [
        Advice::Sequential,
        Advice::Random,
        Advice::DontFork,
        Advice::WipeOnFork,
        Advice::HugePage,
        Advice::NoHugePage,
    ] {
        exhaust_crowded(&format!("{advice:?}"), &eight, &advise(2, 3, advice), Left::Nothing);
        exhaust_call(&format!("{advice:?} of all"), &eight, &advise(0, 8, advice), Left::Nothing);
    }
    let bind = |first: u64, pages: u64| {
        let policy = MemPolicy::Interleave(NodeSet::only(0));
        move |cpu: &TestCpu<'_>, world: &mut World| {
            Ok(world.spaces[0].mbind(cpu, AT + first * P, pages * P, policy)?)
        }
    };
    exhaust_crowded("mbind", &eight, &bind(2, 3), Left::Nothing);
    exhaust_call("mbind of all", &eight, &bind(0, 8), Left::Nothing);
    let undone = |cpu: &TestCpu<'_>, world: &mut World| {
        eight(cpu, world);
        for advice in [Advice::Sequential, Advice::DontFork, Advice::WipeOnFork] {
            world.spaces[0].madvise(cpu, AT + 2 * P, 3 * P, advice).unwrap();
        }
    };
    for advice in [Advice::Normal, Advice::DoFork, Advice::KeepOnFork] {
        exhaust_crowded(&format!("{advice:?}"), &undone, &advise(2, 3, advice), Left::Nothing);
    }
    for advice in [Advice::PopulateRead, Advice::PopulateWrite] {
        exhaust_call(&format!("{advice:?}"), &all_kinds, &advise(10, 12, advice), Left::Pages);
    }
    let (read, write) = (Advice::PopulateRead, Advice::PopulateWrite);
    exhaust_call("PopulateWrite of memory", &eight, &advise(0, 8, write), Left::Pages);
    // Zero pages need no memory.
    exhaust_infallible("PopulateRead of memory", &eight, &advise(0, 8, read));
    for advice in [Advice::DontNeed, Advice::Free, Advice::WillNeed] {
        exhaust_infallible(&format!("{advice:?}"), &eight, &advise(1, 5, advice));
    }
    exhaust_infallible("DontNeed of all", &all_kinds, &advise(10, 12, Advice::DontNeed));
}

#[test]
fn fork() {
    let call = |cpu: &TestCpu<'_>, world: &mut World| {
        let child = world.spaces[0].fork(cpu)?;
        world.spaces.push(child);
        Ok(())
    };
    exhaust_crowded("fork", &all_kinds, &call, Left::ReadOnly);
    let grandchild = |cpu: &TestCpu<'_>, world: &mut World| {
        all_kinds(cpu, world);
        world.store(cpu, 2, 9);
        let child = world.spaces[0].fork(cpu).unwrap();
        world.spaces.insert(0, child);
        world.store(cpu, 3, 9);
    };
    exhaust_crowded("fork of a child", &grandchild, &call, Left::ReadOnly);
}

#[test]
fn brk() {
    let start = |cpu: &TestCpu<'_>, world: &mut World| {
        all_kinds(cpu, world);
        world.spaces[0].set_heap_start(cpu, AT + 100 * P).unwrap();
        let end = AT + 104 * P;
        assert_eq!(world.spaces[0].brk(cpu, end), end);
        world.store(cpu, 101, 5);
        world.store(cpu, 103, 5);
    };
    for pages in [102, 110] {
        let call = |cpu: &TestCpu<'_>, world: &mut World| {
            let end = AT + pages * P;
            if world.spaces[0].brk(cpu, end) == end { Ok(()) } else { Err(Refused) }
        };
        exhaust_crowded("brk", &start, &call, Left::Nothing);
    }
}

#[test]
fn creation_of_spaces_and_objects() {
    let call = |cpu: &TestCpu<'_>, world: &mut World| {
        let space = Space::new(cpu)?;
        space.activate(cpu);
        // SAFETY: the machine has no MMU.
        unsafe { space.deactivate(cpu) };
        world.spaces.push(space);
        Ok(())
    };
    exhaust_call("a new space", &all_kinds, &call, Left::Nothing);
    let call = |cpu: &TestCpu<'_>, world: &mut World| {
        world.objects.push(Object::try_new(cpu, 5, 9)?);
        Ok(())
    };
    exhaust_call("a new object", &all_kinds, &call, Left::Nothing);
}

#[test]
fn pages_that_need_more_levels_of_an_object() {
    let grown = |cpu: &TestCpu<'_>, world: &mut World| {
        all_kinds(cpu, world);
        let object = Object::try_new(cpu, 1, 9).unwrap();
        object.write_page(cpu, 0, |_| {}).unwrap();
        object.set_pages(cpu, Object::MAX_PAGES).unwrap();
        world.objects.push(object);
    };
    for index in [512, 512 * 512, 512 * 512 * 512] {
        let call = |cpu: &TestCpu<'_>, world: &mut World| {
            world.objects[1].write_page(cpu, index, |_| {})?;
            Ok(())
        };
        exhaust_call("a page beyond the tables", &grown, &call, Left::Ways);
    }
}

#[test]
fn calls_that_free_memory_need_none() {
    let forked = |cpu: &TestCpu<'_>, world: &mut World| {
        all_kinds(cpu, world);
        let child = world.spaces[0].fork(cpu).unwrap();
        world.spaces.insert(0, child);
        world.store(cpu, 4, 9);
        let other = Object::try_new(cpu, 4, 8).unwrap();
        other.write_page(cpu, 2, |_| {}).unwrap();
        world.objects.push(other);
    };
    let exit = |cpu: &TestCpu<'_>, world: &mut World| {
        let space = world.spaces.remove(0);
        space.exit(cpu);
        Ok(())
    };
    exhaust_infallible("exit", &forked, &exit);
    let release = |cpu: &TestCpu<'_>, world: &mut World| {
        Object::release(world.objects.pop().unwrap(), cpu);
        Ok(())
    };
    exhaust_infallible("release", &forked, &release);
    let dropped = |cpu: &TestCpu<'_>, world: &mut World| {
        drop((world.spaces.remove(0), world.objects.pop()));
        assert_eq!(cpu.end_dropped(), 2);
        Ok(())
    };
    exhaust_infallible("drop", &forked, &dropped);
    let truncate = |cpu: &TestCpu<'_>, world: &mut World| {
        world.objects[0].set_pages(cpu, 1)?;
        world
            .spaces
            .iter()
            .for_each(|space| space.revoke(cpu, &world.objects[0], 1..700, PrivateCopies::Drop));
        world.objects[0].set_pages(cpu, 700)?;
        Ok(())
    };
    exhaust_infallible("truncate", &forked, &truncate);
    let punch = |cpu: &TestCpu<'_>, world: &mut World| {
        world.objects[0].free_pages(cpu, 0..3);
        world
            .spaces
            .iter()
            .for_each(|space| space.revoke(cpu, &world.objects[0], 0..3, PrivateCopies::Keep));
        Ok(())
    };
    exhaust_infallible("punch a hole", &forked, &punch);
}

/// Kernel blocks need no heap memory, and use frames only if the allocation succeeds.
#[test]
fn blocks_of_frames() {
    for order in [0, 2] {
        let call = |cpu: &TestCpu<'_>, _: &mut World| {
            let block = cpu.alloc_block(order).map_err(|_| Refused)?;
            drop(block);
            Ok(())
        };
        exhaust_call("a block", &all_kinds, &call, Left::Nothing);
    }
}

/// Spaces and objects that outlive their subsystem free their heap memory.
#[test]
fn spaces_and_objects_that_outlive_the_subsystem_free_their_heap() {
    for first in [false, true] {
        let start = live();
        {
            let vm = TestVm::new(Small::new(256)).unwrap();
            // SAFETY: the only CPU handle.
            let cpu = unsafe { vm.cpu(CpuId(0)) };
            let mut world = World {
                spaces: vec![Space::new(&cpu).unwrap()],
                objects: vec![Object::try_new(&cpu, 16, 7).unwrap()],
            };
            all_kinds(&cpu, &mut world);
            let child = world.spaces[0].fork(&cpu).unwrap();
            world.spaces.push(child);
            // Retired memory of the calls belongs to the CPU.
            cpu.drain();
            if first {
                drop(world);
            } else {
                drop(vm);
                drop(world);
            }
        }
        assert_eq!(live(), start);
    }
}

/// The subsystem itself.
#[test]
fn creation_of_a_subsystem() {
    for plan in [super::Plan::Only as fn(u64) -> _, super::Plan::From] {
        for step in 0.. {
            let machine = Small::new(64);
            let before = live();
            let (made, refused) = with(plan(step), || TestVm::new(machine));
            if refused == 0 {
                assert!(made.is_ok() && step > 4);
                break;
            }
            assert_eq!(made.map(drop), Err(Errno::ENOMEM), "{:?}", plan(step));
            assert!(live() <= before, "{:?}", plan(step));
        }
    }
}
