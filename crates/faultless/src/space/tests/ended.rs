//! Spaces and objects that are dropped without an explicit end.

use crate::audit::{audit, audit_with};
use crate::file::Object;
use crate::heap::Shared;
use crate::knob::Setting;
use crate::space::{Advice, Backing, MapFlags, Space};
use crate::testing::guest::{self, AT, FIXED, P, RW, TestCpu, TestSpace, TestVm, cpu, load, store};
use crate::vm::Cpu;
#[cfg(debug_assertions)]
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::string::ToString;
use std::thread;
use std::vec::Vec;

/// Creates a space with private pages and pages of `object`.
fn used(cpu: &TestCpu<'_>, object: &Shared<Object>) -> TestSpace {
    let space = Space::new(cpu).unwrap();
    space.mmap(cpu, AT, 8 * P, RW, FIXED).unwrap();
    let backing = Backing { object, first: 0, may_write: true };
    let flags = MapFlags::SHARED | MapFlags::FIXED;
    space.mmap_object(cpu, AT + 8 * P, 4 * P, RW, flags, backing).unwrap();
    (0..12).for_each(|page| store(cpu, &space, AT + page * P, page).unwrap());
    // Reclaim knows the space.
    space.madvise(cpu, AT, 2 * P, Advice::Free).unwrap();
    space
}

fn object(cpu: &TestCpu<'_>) -> Shared<Object> {
    Object::try_new(cpu, 4, 0).unwrap()
}

/// Checks that only the zero page is still allocated.
fn assert_clean(cpu: &TestCpu<'_>) {
    cpu.drain();
    assert_eq!(audit(cpu, &[]).unwrap().taken(), 1);
}

#[test]
fn a_cpu_ends_dropped_spaces_and_objects() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    assert_eq!(cpu.end_dropped(), 0);
    let file = object(&cpu);
    let space = used(&cpu, &file);
    let child = space.fork(&cpu).unwrap();
    // One of the child's VMAs has the last reference to the object.
    drop((file, space));
    assert_eq!(load(&cpu, &child, AT + 3 * P), Ok(3));
    assert_eq!(load(&cpu, &child, AT + 9 * P), Ok(9));
    cpu.drain();
    audit(&cpu, &[&child]).unwrap();
    drop((child, object(&cpu)));
    assert_eq!(cpu.end_dropped(), 2);
    assert_clean(&cpu);
}

#[test]
fn a_drop_without_a_cpu_is_ended_by_a_later_call() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    let stays = Space::new(&cpu).unwrap();
    let file = object(&cpu);
    let spaces: Vec<_> = (0..4).map(|_| used(&cpu, &file)).collect();
    thread::scope(|scope| {
        for space in spaces {
            let file = file.clone();
            scope.spawn(move || drop((file, space)));
        }
    });
    let another = Space::new(&cpu).unwrap();
    assert_eq!(cpu.end_dropped(), 0, "creating a space ended the dropped spaces");
    another.exit(&cpu);
    cpu.drain();
    audit_with(&cpu, &[&stays], &[&file]).unwrap();
    drop((stays, file));
    assert_clean(&cpu);
}

/// An idle CPU ends dropped spaces and objects.
#[test]
fn an_idle_cpu_ends_dropped_spaces_and_objects() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    drop(used(&cpu, &object(&cpu)));
    cpu.zero_ahead(0);
    assert_eq!(cpu.end_dropped(), 0, "the idle CPU ended the dropped space");
    assert_clean(&cpu);
}

#[test]
fn concurrent_drops_and_ends_leak_no_frames() {
    let vm = guest::vm(3, 4096);
    thread::scope(|scope| {
        for id in 0..3 {
            let vm = &vm;
            scope.spawn(move || {
                let cpu = cpu(vm, id);
                for round in 0..if cfg!(miri) { 3 } else { 200 } {
                    let file = object(&cpu);
                    drop(used(&cpu, &file));
                    if round % 4 == 0 {
                        cpu.end_dropped();
                    }
                }
            });
        }
    });
    (0..3).for_each(|id| cpu(&vm, id).drain());
    assert_clean(&cpu(&vm, 0));
}

/// A fault ends dropped spaces and objects before it returns an out-of-memory error.
#[test]
fn a_fault_reclaims_dropped_spaces_and_objects() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    space.mmap(&cpu, AT, 4 * P, RW, FIXED).unwrap();
    store(&cpu, &space, AT, 1).unwrap();
    let file = object(&cpu);
    let other = used(&cpu, &file);
    // There are no lazily freed pages at this point.
    (0..2).for_each(|page| store(&cpu, &other, AT + page * P, 1).unwrap());
    cpu.drain();
    vm.set(Setting::FrameLimit(vm.total_frames() - vm.free_frames()));
    assert!(store(&cpu, &space, AT + P, 2).is_err());
    drop(other);
    store(&cpu, &space, AT + P, 2).unwrap();
    drop(file);
    store(&cpu, &space, AT + 2 * P, 3).unwrap();
    drop(space);
    vm.set(Setting::FrameLimit(u64::MAX));
    assert_clean(&cpu);
}

/// The frames in the stock and the retired frames are not lost: the audit names the call to make.
#[test]
fn an_audit_without_a_drain_names_the_call() {
    let vm = guest::vm(2, 256);
    let cpus = [cpu(&vm, 0), cpu(&vm, 1)];
    let spaces = [0, 1].map(|_| Space::new(&cpus[0]).unwrap());
    for (cpu, space) in cpus.iter().zip(&spaces) {
        space.mmap(cpu, AT, 8 * P, RW, FIXED).unwrap();
        (0..8).for_each(|page| store(cpu, space, AT + page * P, page).unwrap());
        space.munmap(cpu, AT, 4 * P).unwrap();
    }
    for cpu in &cpus {
        let error = audit_with(cpu, &spaces.each_ref(), &[]).unwrap_err().to_string();
        assert!(error.contains("call `Cpu::drain` on every CPU before the audit"), "{error}");
        cpu.drain();
    }
    audit_with(&cpus[0], &spaces.each_ref(), &[]).unwrap();
    spaces.into_iter().for_each(|space| space.exit(&cpus[0]));
    cpus.iter().for_each(Cpu::drain);
    assert_eq!(audit(&cpus[0], &[]).unwrap().taken(), 1);
}

/// The space's tables may stay in use forever, so its frames stay allocated. The audit reports the
/// frames.
#[test]
fn dropping_a_running_space_does_not_end_it() {
    let vm = guest::vm(2, 256);
    let cpus = [cpu(&vm, 0), cpu(&vm, 1)];
    let file = object(&cpus[0]);
    let space = used(&cpus[0], &file);
    space.activate(&cpus[1]);
    drop((space, file));
    assert_eq!(cpus[0].end_dropped(), 0);
    cpus.iter().for_each(Cpu::drain);
    assert!(audit(&cpus[0], &[]).is_err());
}

/// A CPU of another subsystem refuses to end a space; a CPU of the same subsystem ends the space.
#[test]
fn dropped_spaces_belong_to_their_vm() {
    let vms: [TestVm; 2] = [(); 2].map(|()| guest::vm(1, 256));
    let [mine, other] = [0, 1].map(|at| cpu(&vms[at], 0));
    let file = object(&mine);
    let space = used(&mine, &file);
    drop((file, space));
    // The last share of the object is a VMA's.
    assert_eq!([other.end_dropped(), mine.end_dropped()], [0, 1]);
    assert_clean(&mine);
    assert_clean(&other);
}

/// An end inside a listing would wait in a section. It is refused before anything has changed.
#[cfg(debug_assertions)]
#[test]
fn an_end_inside_a_listing_is_refused() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    let file = object(&cpu);
    let listed = used(&cpu, &file);
    let mut ends = Some(used(&cpu, &file));
    let exit = || listed.areas(&cpu, |_| ends.take().unwrap().exit(&cpu));
    assert!(catch_unwind(AssertUnwindSafe(exit)).is_err());
    drop((listed, file));
    assert_eq!(cpu.end_dropped(), 2);
    assert_clean(&cpu);
}

/// The same rule for dropped spaces and objects.
#[cfg(debug_assertions)]
#[test]
fn dropped_spaces_are_not_ended_inside_a_listing() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    let listed = used(&cpu, &object(&cpu));
    drop(object(&cpu));
    let end = || listed.areas(&cpu, |_| assert_eq!(cpu.end_dropped(), 0));
    assert!(catch_unwind(AssertUnwindSafe(end)).is_err());
    drop(listed);
    assert_eq!(cpu.end_dropped(), 2, "and the object");
    assert_clean(&cpu);
}

/// No CPU remains to end these spaces and objects. Their heap memory is freed at once.
#[test]
fn spaces_and_objects_may_outlive_their_vm() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    let file = object(&cpu);
    let [before, after] = [(); 2].map(|()| used(&cpu, &file));
    drop(before);
    drop(vm);
    drop((after, file));
}
