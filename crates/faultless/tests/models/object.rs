//! Objects: pages added to and removed from an object, and spaces that map the object. The model
//! runs the real calls of [`Object`] and [`Space`] on two CPUs of a small machine.
//!
//! Bounds: two threads, at most three forced switches; two if a space maps the object.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p faultless --test models --target-dir target/loom object::`

use crate::support::explore;
use crate::support::machine::{Toy, cpu, page};
use faultless::audit::audit_with;
use faultless::sync::atomic::{AtomicU64, Ordering};
use faultless::{
    Access, Backing, Cpu, CpuId, Locking, MapFlags, Object, PrivateCopies, Prot, Setting, Shared,
    Space, Vm,
};
use loom::thread;
use std::sync::Arc;

/// The first page beyond one table.
const FAR: u64 = 4;

const BOUND: Option<usize> = Some(3);
const BOUND_WITH_SPACE: Option<usize> = Some(2);

/// Runs `left` on CPU 0 and `right` on CPU 1, with an object of one page. At the end no frame is
/// lost.
fn two(
    before: fn(&Cpu<'_, Toy>, &Shared<Object>),
    left: fn(&Cpu<'_, Toy>, &Shared<Object>),
    right: fn(&Cpu<'_, Toy>, &Shared<Object>),
) {
    explore(BOUND, move || {
        let vm = Toy::vm(2, 14);
        let here = cpu(&vm, CpuId(0));
        let object = Object::try_new(&here, 1, 0).unwrap();
        before(&here, &object);
        let other = {
            let (vm, object): (Arc<Vm<Toy>>, Shared<Object>) = (Arc::clone(&vm), object.clone());
            thread::spawn(move || {
                let there = cpu(&vm, CpuId(1));
                right(&there, &object);
                Object::release(object, &there);
                there.drain();
            })
        };
        left(&here, &object);
        other.join().unwrap();
        let beyond = [0, FAR].into_iter().filter(|&index| index >= object.pages());
        assert!(!{ beyond }.any(|index| object.has_page(&here, index)), "a page is beyond the end");
        Object::release(object, &here);
        here.drain();
        let census = vm.census(&here).unwrap();
        assert_eq!((census.free, census.zero), (13, 1), "a frame is lost");
    });
}

/// The word of a page.
fn word(bytes: *const u8) -> &'static AtomicU64 {
    // SAFETY: a page of this machine is an array of words, which outlives its use.
    unsafe { &*bytes.cast() }
}

/// An object is truncated to zero pages while another CPU writes its page.
fn a_page_against_truncation() {
    two(
        |_, _| {},
        |cpu, object| object.set_pages(cpu, 0).unwrap(),
        |cpu, object| {
            let _ = object.write_page(cpu, 0, |bytes| word(bytes).store(1, Ordering::Relaxed));
        },
    );
}

#[test]
fn no_page_stays_beyond_the_end() {
    a_page_against_truncation();
}

/// An object is shortened while somebody adds a page for which it needs another root.
fn a_new_root_against_truncation() {
    two(
        |cpu, object| {
            object.write_page(cpu, 0, |bytes| word(bytes).store(1, Ordering::Relaxed)).unwrap();
            object.set_pages(cpu, FAR + 1).unwrap();
        },
        |cpu, object| object.set_pages(cpu, 1).unwrap(),
        |cpu, object| {
            let _ = object.write_page(cpu, FAR, |bytes| word(bytes).store(1, Ordering::Relaxed));
        },
    );
}

#[test]
fn no_page_below_a_new_root_stays_beyond_the_end() {
    a_new_root_against_truncation();
}

/// Two add pages for which the object needs another root.
fn two_new_roots() {
    const PAGES: [u64; 2] = [FAR, 2 * FAR];
    fn write(cpu: &Cpu<'_, Toy>, object: &Shared<Object>, index: u64) {
        object.write_page(cpu, index, |bytes| word(bytes).store(index, Ordering::Relaxed)).unwrap();
        assert!(object.has_page(cpu, index), "a page is lost");
    }
    two(
        |cpu, object| object.set_pages(cpu, PAGES[1] + 1).unwrap(),
        |cpu, object| write(cpu, object, PAGES[0]),
        |cpu, object| write(cpu, object, PAGES[1]),
    );
}

#[test]
fn an_object_gets_one_root() {
    two_new_roots();
}

/// An object loses its page, whose frame another object then uses, while a CPU reads the page.
fn a_reference_against_reuse() {
    two(
        |cpu, object| {
            object.write_page(cpu, 0, |bytes| word(bytes).store(1, Ordering::Relaxed)).unwrap();
        },
        |cpu, object| {
            object.set_pages(cpu, 0).unwrap();
            let next = Object::try_new(cpu, 1, 0).unwrap();
            next.write_page(cpu, 0, |bytes| word(bytes).store(2, Ordering::Relaxed)).unwrap();
            Object::release(next, cpu);
        },
        |cpu, object| {
            let look = |bytes| {
                if let Some(bytes) = bytes {
                    assert_eq!(word(bytes).load(Ordering::Relaxed), 1, "a page of another owner");
                }
            };
            object.read_page(cpu, 0, look).unwrap();
        },
    );
}

#[test]
fn a_reference_belongs_to_the_found_page() {
    a_reference_against_reuse();
}

/// A space maps an object of two pages, and has touched the first page. The second page is removed
/// and revoked while another CPU touches this page for the first time: in the end it is unmapped.
fn a_first_touch_against_revocation(kind: MapFlags, access: Access, locking: Locking) {
    const AT: u64 = 16;
    explore(BOUND_WITH_SPACE, move || {
        const FRAMES: u32 = 24;
        let vm = Toy::vm(2, FRAMES);
        vm.set(Setting::FaultAroundPages(1));
        vm.set(Setting::Locking(locking));
        let here = cpu(&vm, CpuId(0));
        let object = Object::try_new(&here, 2, 0).unwrap();
        for index in 0..2 {
            object.write_page(&here, index, |_| {}).unwrap();
        }
        let space = Arc::new(Space::new(&here).unwrap());
        let (flags, backing) =
            (kind | MapFlags::FIXED, Backing { object: &object, first: 0, may_write: true });
        let rw = Prot::READ | Prot::WRITE;
        space.mmap_object(&here, page(AT), page(2), rw, flags, backing).unwrap();
        space.fault_remote(&here, page(AT), access).unwrap();
        let other = {
            let (vm, space): (Arc<Vm<Toy>>, _) = (Arc::clone(&vm), Arc::clone(&space));
            thread::spawn(move || {
                let there = cpu(&vm, CpuId(1));
                let _ = space.fault_remote(&there, page(AT + 1), access);
                there.drain();
            })
        };
        object.set_pages(&here, 1).unwrap();
        space.revoke(&here, &object, 1..2, PrivateCopies::Drop);
        other.join().unwrap();
        assert!(space.page_at(&here, page(AT + 1)).is_none(), "a page beyond the end is mapped");
        here.drain();
        audit_with(&here, &[&*space], &[&object]).expect("a clean audit");
        Arc::into_inner(space).expect("the last reference to the space").exit(&here);
        Object::release(object, &here);
        here.drain();
        let census = vm.census(&here).unwrap();
        assert_eq!((census.free, census.zero), (u64::from(FRAMES) - 1, 1), "a frame is lost");
    });
}

fn a_mapping_against_revocation(locking: Locking) {
    a_first_touch_against_revocation(MapFlags::SHARED, Access::Read, locking);
}

fn a_copy_against_revocation(locking: Locking) {
    a_first_touch_against_revocation(MapFlags::PRIVATE, Access::Write, locking);
}

#[test]
fn a_revoked_page_is_not_mapped_again() {
    a_mapping_against_revocation(Locking::Speculative);
}

#[test]
fn a_revoked_page_is_not_copied_again() {
    a_copy_against_revocation(Locking::Speculative);
}

/// Under this policy the revocation claims no range of its pages. The fence of such a claim could
/// replace the fence of the section.
#[test]
fn a_revoked_page_is_not_mapped_again_under_mmap_lock() {
    a_mapping_against_revocation(Locking::MmapLock);
    a_copy_against_revocation(Locking::MmapLock);
}

caught! {
    a_revocation_needs_its_fence:
        without SectionFence, a_mapping_against_revocation(Locking::MmapLock), says "a page beyond the end";
    a_mapping_fault_needs_its_barrier:
        without FaultFence, a_mapping_against_revocation(Locking::MmapLock), says "a page beyond the end";
    a_copy_needs_its_barrier:
        without FaultFence, a_copy_against_revocation(Locking::MmapLock), says "a page beyond the end";
    a_copy_reads_the_length_again:
        without CopyLooksAgain, a_copy_against_revocation(Locking::MmapLock), says "a page beyond the end";
    a_truncation_needs_its_fence:
        without TruncateFence, a_page_against_truncation(), says "a page is beyond the end";
    adding_a_page_reads_the_length_again:
        without ObjectLooksAgain, a_page_against_truncation(), says "a page is beyond the end";
    a_truncation_needs_its_fence_below_a_new_root:
        without TruncateFence, a_new_root_against_truncation(), says "a page is beyond the end";
    adding_a_page_below_a_new_root_reads_the_length_again:
        without ObjectLooksAgain, a_new_root_against_truncation(), says "a page is beyond the end";
    a_new_root_is_added_above_the_latest:
        without GrowsOnce, two_new_roots(), says "lost";
    a_truncation_waits_for_an_added_page:
        without ReplaceWaits, a_page_against_truncation(), says "a frame is lost";
    finding_a_page_reads_its_entry_again:
        without ReferLooksAgain, a_reference_against_reuse(), says "a page of another owner";
    the_next_life_begins_with_a_release:
        without FreshCountReleases, a_reference_against_reuse(), says "Causality violation";
}
