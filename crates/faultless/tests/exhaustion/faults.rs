//! The faults.

use super::guest::{AT, P, PRIVATE, RW, SHARED, TestCpu, World};
use super::{Case, Left, Refused, exhaust};
use faultless::{Access, AnonVmaCheck, FaultKind, MapFlags, MemPolicy, NodeSet, Prot};

const BOTH: &[AnonVmaCheck] = &[AnonVmaCheck::Late, AnonVmaCheck::Early];

type Setup<'c> = &'c dyn Fn(&TestCpu<'_>, &mut World);

/// The distance of the faulting page from the mapped pages: in the same table, or below one, two or
/// three missing tables.
const AWAY: [u64; 4] = [1, 512, 512 * 512, 512 * 512 * 512];

/// Exhausts a fault at page `page`, which ends as `kind`.
fn exhaust_fault(
    name: &str,
    setup: Setup<'_>,
    page: u64,
    access: Access,
    kind: FaultKind,
    may_fail: bool,
) {
    let call = |cpu: &TestCpu<'_>, world: &mut World| {
        let got = world.spaces[0].fault_remote(cpu, AT + page * P, access)?;
        assert_eq!(got, kind);
        Ok::<_, Refused>(())
    };
    exhaust(&Case { name, setup, call: &call, left: Left::Ways, checks: BOTH, may_fail });
}

fn object(cpu: &TestCpu<'_>, world: &mut World, flags: MapFlags, page: u64, from: u64) {
    world.map_object(cpu, page, 4, flags | MapFlags::FIXED, from);
}

#[test]
fn faults_on_untouched_private_memory() {
    for away in AWAY {
        let setup = |cpu: &TestCpu<'_>, world: &mut World| {
            world.map(cpu, 0, 1, RW, SHARED);
            world.store(cpu, 0, 1);
            world.map(cpu, away, 4, RW, PRIVATE);
        };
        let may = away > 1;
        exhaust_fault("read", &setup, away, Access::Read, FaultKind::ZeroPage, may);
        exhaust_fault("write", &setup, away, Access::Write, FaultKind::Anon, true);
    }
    // A VMA with a policy: the prepared frame is freed.
    let bound = |cpu: &TestCpu<'_>, world: &mut World| {
        world.map(cpu, 1, 4, RW, PRIVATE);
        let policy = MemPolicy::Preferred(NodeSet::only(0));
        world.spaces[0].mbind(cpu, AT + P, 4 * P, policy).unwrap();
    };
    exhaust_fault("write bound", &bound, 1, Access::Write, FaultKind::Anon, true);
    // The VMA has a root, or a neighbour with a root.
    let setup = |cpu: &TestCpu<'_>, world: &mut World| {
        world.map(cpu, 0, 4, RW, PRIVATE);
        world.store(cpu, 0, 1);
        world.spaces[0].mprotect(cpu, AT + 2 * P, P, Prot::READ).unwrap();
    };
    exhaust_fault("write beside", &setup, 1, Access::Write, FaultKind::Anon, true);
    exhaust_fault("write behind", &setup, 3, Access::Write, FaultKind::Anon, true);
}

#[test]
fn faults_on_present_private_pages() {
    let forked = |cpu: &TestCpu<'_>, world: &mut World| {
        world.map(cpu, 0, 4, RW, PRIVATE);
        [0, 2].into_iter().for_each(|page| world.store(cpu, page, 7));
        world.spaces[0].fault_remote(cpu, AT + P, Access::Read).unwrap();
        let child = world.spaces[0].fork(cpu).unwrap();
        world.spaces.push(child);
    };
    exhaust_fault("copy", &forked, 0, Access::Write, FaultKind::Copy, true);
    exhaust_fault("zero page replaced", &forked, 1, Access::Write, FaultKind::Copy, true);
    let copied = |cpu: &TestCpu<'_>, world: &mut World| {
        forked(cpu, world);
        world.spaces.pop().unwrap().exit(cpu);
    };
    exhaust_fault("reuse", &copied, 0, Access::Write, FaultKind::Reuse, false);
    exhaust_fault("spurious", &copied, 2, Access::Read, FaultKind::Spurious, false);
    // A mapping that was only read has no root.
    let read = |cpu: &TestCpu<'_>, world: &mut World| {
        world.map(cpu, 0, 4, RW, PRIVATE);
        world.spaces[0].fault_remote(cpu, AT, Access::Read).unwrap();
    };
    exhaust_fault("first page after zeros", &read, 0, Access::Write, FaultKind::Copy, true);
}

#[test]
fn faults_on_object_pages() {
    for (away, from) in AWAY.into_iter().zip([0, 600, 512 * 512, 512 * 512 * 512]) {
        for there in [false, true] {
            let setup = |flags| {
                move |cpu: &TestCpu<'_>, world: &mut World| {
                    world.objects[0].set_pages(cpu, from + 16).unwrap();
                    world.map(cpu, 0, 1, RW, SHARED);
                    world.store(cpu, 0, 1);
                    object(cpu, world, flags, away, from);
                    if there {
                        let write = |at: *mut u8| {
                            // SAFETY: the bytes of a page, aligned.
                            unsafe { at.cast::<u64>().write(5) };
                        };
                        world.objects[0].write_page(cpu, from, write).unwrap();
                        world.objects[0].write_page(cpu, from + 2, write).unwrap();
                    }
                }
            };
            let shared = setup(MapFlags::SHARED);
            let private = setup(MapFlags::PRIVATE);
            let may = !there || away > 1;
            let (read, write) = (Access::Read, Access::Write);
            exhaust_fault("object read", &shared, away, read, FaultKind::Shared, may);
            exhaust_fault("object write", &shared, away, write, FaultKind::Shared, may);
            exhaust_fault("private object read", &private, away, read, FaultKind::Shared, may);
            let kind = if there { FaultKind::Copy } else { FaultKind::Anon };
            exhaust_fault("private object write", &private, away, write, kind, true);
        }
    }
    let mapped = |cpu: &TestCpu<'_>, world: &mut World| {
        object(cpu, world, MapFlags::PRIVATE, 0, 0);
        world.spaces[0].fault_remote(cpu, AT, Access::Read).unwrap();
    };
    exhaust_fault("object copied", &mapped, 0, Access::Write, FaultKind::Copy, true);
}

/// A remote access faults its pages in one by one: the pages before a failed page are written.
#[test]
fn faults_of_remote_accesses() {
    let setup = |cpu: &TestCpu<'_>, world: &mut World| {
        world.map(cpu, 0, 1, RW, PRIVATE);
        world.store(cpu, 0, 1);
        world.map(cpu, 500, 30, RW, PRIVATE);
        world.map(cpu, 530, 2, RW, SHARED);
        let child = world.spaces[0].fork(cpu).unwrap();
        world.spaces.push(child);
    };
    let read = |cpu: &TestCpu<'_>, world: &mut World| {
        let mut bytes = [0; 16];
        world.spaces[0].read_bytes(cpu, AT + 531 * P - 8, &mut bytes)?;
        Ok::<_, Refused>(())
    };
    let (left, checks, may_fail) = (Left::Pages, BOTH, true);
    exhaust(&Case { name: "read_bytes", setup: &setup, call: &read, left, checks, may_fail });
    let write = |cpu: &TestCpu<'_>, world: &mut World| {
        Ok(world.spaces[0].write_bytes(cpu, AT + 515 * P - 8, &[1; 16])?)
    };
    exhaust(&Case { name: "write_bytes", setup: &setup, call: &write, left, checks, may_fail });
    let copy = |cpu: &TestCpu<'_>, world: &mut World| {
        Ok(world.spaces[0].write_bytes(cpu, AT, &1u64.to_ne_bytes())?)
    };
    let left = Left::Ways;
    exhaust(&Case { name: "a copy", setup: &setup, call: &copy, left, checks, may_fail });
}

#[test]
fn faults_that_grow_a_stack() {
    let setup = |cpu: &TestCpu<'_>, world: &mut World| {
        world.map(cpu, 2000, 2, RW, PRIVATE | MapFlags::GROWSDOWN);
        world.store(cpu, 2000, 1);
    };
    // As far as the next table, too. A stack that has grown stays so.
    for page in [1999, 1400] {
        let call = |cpu: &TestCpu<'_>, world: &mut World| {
            world.spaces[0].fault_remote(cpu, AT + page * P, Access::Write)?;
            Ok::<_, Refused>(())
        };
        exhaust(&Case {
            name: "stack",
            setup: &setup,
            call: &call,
            left: Left::Grown,
            checks: BOTH,
            may_fail: true,
        });
    }
}

#[test]
fn kernel_writes_to_an_object() {
    for index in [0, 600, 512 * 512, 512 * 512 * 512] {
        let setup = |cpu: &TestCpu<'_>, world: &mut World| {
            world.objects[0].set_pages(cpu, index + 1).unwrap();
        };
        let call = |cpu: &TestCpu<'_>, world: &mut World| {
            world.objects[0].write_page(cpu, index, |_| {})?;
            Ok::<_, Refused>(())
        };
        let (left, may_fail) = (Left::Ways, true);
        exhaust(&Case {
            name: "write_page",
            setup: &setup,
            call: &call,
            left,
            checks: BOTH,
            may_fail,
        });
    }
}
