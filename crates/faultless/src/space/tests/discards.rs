//! Discards remove pages, keep the mappings, and abort no fault: chosen interleavings and wait
//! relations.

use crate::addr::PAGE_SIZE;
use crate::audit::{audit, audit_with};
use crate::fault::{Access, FaultError, FaultKind};
use crate::file::Object;
use crate::heap::Shared;
use crate::space::{Advice, Backing, MapFlags, PrivateCopies, Prot, Space};
use crate::stat::Counter;
use crate::testing::TestMachine;
use crate::testing::guest::{self, TestVm, between, cpu, load, store};
use crate::vm::Cpu;
use std::thread;
use std::time::Duration;
use std::vec::Vec;

const AT: u64 = 1 << 30;
const P: u64 = PAGE_SIZE;
const RW: Prot = Prot::READ.union(Prot::WRITE);
const FIXED: MapFlags = MapFlags::PRIVATE.union(MapFlags::ANONYMOUS).union(MapFlags::FIXED);
const TAKING: [Advice; 2] = [Advice::DontNeed, Advice::Free];

type TestSpace = Space<TestMachine>;
type TestCpu<'v> = Cpu<'v, TestMachine>;

/// A space of eight pages, of which page 1 has a 1.
fn space(cpu: &TestCpu<'_>) -> TestSpace {
    let space = Space::new(cpu).unwrap();
    space.mmap(cpu, AT, 8 * P, RW, FIXED).unwrap();
    store(cpu, &space, AT + P, 1).unwrap();
    space
}

/// All frames are accounted for, now and when all is over.
fn finish(own: TestCpu<'_>, spaces: Vec<TestSpace>, objects: Vec<Shared<Object>>) {
    let vm = own.vm();
    let ids = (0..vm.machine().cpus as u16).filter(|id| *id != own.id().0);
    let others: Vec<_> = ids.map(|id| cpu(vm, id)).collect();
    let drain = || others.iter().chain([&own]).for_each(Cpu::drain);
    drain();
    let (living, shares): (Vec<_>, Vec<_>) = (spaces.iter().collect(), objects.iter().collect());
    audit_with(&own, &living, &shares).unwrap();
    spaces.into_iter().for_each(|space| space.exit(&own));
    objects.into_iter().for_each(|object| Object::release(object, &own));
    drain();
    assert_eq!(audit(&own, &[]).unwrap().taken(), 1, "only the zero page remains");
}

/// Checks that no fault was aborted or restarted, or took a lock.
fn assert_no_abort(vm: &TestVm) {
    let totals = vm.totals();
    let locked = totals.get(Counter::RangeLockFault);
    assert_eq!((totals.aborts(), totals.get(Counter::SpfVmaReplaced), locked), (0, 0, 0));
}

#[test]
fn a_first_touch_runs_beside_advice() {
    for advice in TAKING {
        let vm = guest::vm(2, 256);
        let cpu0 = cpu(&vm, 0);
        let space = space(&cpu0);
        // Advice for a range that includes the touched page.
        let got = between(
            &vm,
            |other| space.madvise(other, AT, 8 * P, advice).unwrap(),
            || space.fault_remote(&cpu0, AT, Access::Write),
        );
        assert_eq!(got, Ok(FaultKind::Anon));
        assert_no_abort(&vm);
        assert_eq!(vm.totals().get(Counter::TrylockFailed), 0, "the entry is unchanged");
        let kept = if advice == Advice::Free { 1 } else { 0 };
        assert_eq!([0, P].map(|at| load(&cpu0, &space, AT + at)), [Ok(0), Ok(kept)]);
        finish(cpu0, Vec::from([space]), Vec::new());
    }
}

#[test]
fn a_copy_overtaken_by_advice_retries() {
    for (advice, kind, value) in
        [(Advice::DontNeed, FaultKind::Anon, 0), (Advice::Free, FaultKind::Copy, 1)]
    {
        let vm = guest::vm(2, 256);
        let cpu0 = cpu(&vm, 0);
        let space = space(&cpu0);
        let child = space.fork(&cpu0).unwrap();
        let got = between(
            &vm,
            |other| space.madvise(other, AT + P, P, advice).unwrap(),
            || space.fault_remote(&cpu0, AT + P, Access::Write),
        );
        assert_eq!(got, Ok(kind), "{advice:?}");
        assert_no_abort(&vm);
        assert_eq!(load(&cpu0, &space, AT + P), Ok(value));
        assert_eq!(load(&cpu0, &child, AT + P), Ok(1));
        finish(cpu0, Vec::from([space, child]), Vec::new());
    }
}

#[test]
fn a_first_store_to_discarded_zeros_retries() {
    let vm = guest::vm(2, 256);
    let cpu0 = cpu(&vm, 0);
    let space = space(&cpu0);
    assert_eq!(load(&cpu0, &space, AT), Ok(0));
    let got = between(
        &vm,
        |other| space.madvise(other, AT, P, Advice::DontNeed).unwrap(),
        || space.fault_remote(&cpu0, AT, Access::Write),
    );
    assert_eq!(got, Ok(FaultKind::Anon), "and no copy of zeros");
    assert_eq!(vm.totals().get(Counter::TrylockFailed), 1);
    assert_no_abort(&vm);
    finish(cpu0, Vec::from([space]), Vec::new());
}

/// Inaccessible pages need no flush, and the zero page needs no reference.
#[test]
fn hidden_pages_are_discarded() {
    let vm = guest::vm(1, 256);
    let cpu0 = cpu(&vm, 0);
    let space = space(&cpu0);
    (2..5).for_each(|page| assert_eq!(load(&cpu0, &space, AT + page * P), Ok(0)));
    space.mprotect(&cpu0, AT, 8 * P, Prot::empty()).unwrap();
    space.madvise(&cpu0, AT, 8 * P, Advice::DontNeed).unwrap();
    assert!((0..8).all(|page| space.entry_at(&cpu0, AT + page * P).is_none()));
    assert_eq!(space.resident_pages(&cpu0), 0);
    finish(cpu0, Vec::from([space]), Vec::new());
}

/// A CPU that runs the space acknowledges late. Until the acknowledgement, the pages belong to the
/// first discard. A second discard and a fault wait, and only the first discard flushes.
#[test]
fn conflicting_operations_wait_for_the_flush_of_a_discard() {
    let vm = guest::vm(4, 256);
    let [cpu0, late, second, third] = [0, 1, 2, 3].map(|id| cpu(&vm, id));
    let space = space(&cpu0);
    space.activate(&late);
    let flushes = || vm.totals().get(Counter::TlbFlush);
    let before = flushes();
    thread::scope(|scope| {
        let space = &space;
        let discard = |cpu: TestCpu<'_>| space.madvise(&cpu, AT, 8 * P, Advice::DontNeed).unwrap();
        let first = scope.spawn(move || discard(cpu0));
        while !space.entry_at(&late, AT + P).is_locked() {
            thread::yield_now();
        }
        let others = [
            scope.spawn(move || discard(second)),
            scope.spawn(move || _ = space.fault_remote(&third, AT + P, Access::Read).unwrap()),
        ];
        thread::sleep(Duration::from_millis(30));
        assert!(!first.is_finished(), "the first did not wait for the flush");
        assert!(
            others.iter().all(|other| !other.is_finished()),
            "a later discard did not wait for the first"
        );
        assert!(space.entry_at(&late, AT + P).is_locked());
        // Operations on other pages do not wait.
        assert_eq!(space.fault_remote(&late, AT + 5 * P, Access::Write), Ok(FaultKind::Anon));
        let mut waits = true;
        while waits {
            late.serve_flushes();
            waits = !first.is_finished() || others.iter().any(|other| !other.is_finished());
        }
    });
    assert!(
        (1..=2).contains(&(flushes() - before)),
        "one flush for old pages, one for newer pages"
    );
    assert_no_abort(&vm);
    // SAFETY: the machine has no MMU.
    unsafe { space.deactivate(&late) };
    finish(late, Vec::from([space]), Vec::new());
}

/// An object of 32 pages, of which all but page 4 are there, mapped at `AT`.
fn with_object(cpu: &TestCpu<'_>, kind: MapFlags) -> (TestSpace, Shared<Object>) {
    let space = Space::new(cpu).unwrap();
    let object = Object::try_new(cpu, 32, 1).unwrap();
    for index in (0..32).filter(|&index| index != 4) {
        // SAFETY: the bytes of a page, aligned.
        object.write_page(cpu, index, |at| unsafe { at.cast::<u64>().write(index) }).unwrap();
    }
    let (flags, backing) =
        (kind | MapFlags::FIXED, Backing { object: &object, first: 0, may_write: true });
    space.mmap_object(cpu, AT, 32 * P, RW, flags, backing).unwrap();
    (space, object)
}

fn truncate(cpu: &TestCpu<'_>, space: &TestSpace, object: &Shared<Object>, pages: u64) {
    object.set_pages(cpu, pages).unwrap();
    space.revoke(cpu, object, pages..u64::MAX, PrivateCopies::Drop);
}

#[test]
fn a_fault_runs_beside_a_revocation() {
    let punch = |cpu: &TestCpu<'_>, space: &TestSpace, object: &Shared<Object>| {
        object.free_pages(cpu, 20..32);
        space.revoke(cpu, object, 20..32, PrivateCopies::Keep);
    };
    let shorten = |cpu: &TestCpu<'_>, space: &TestSpace, object: &Shared<Object>| {
        truncate(cpu, space, object, 20);
    };
    type Revoke = fn(&TestCpu<'_>, &TestSpace, &Shared<Object>);
    for revoke in [punch as Revoke, shorten] {
        for (kind, page, access, served) in [
            (MapFlags::SHARED, 4, Access::Read, FaultKind::Shared),
            (MapFlags::PRIVATE, 5, Access::Write, FaultKind::Copy),
            (MapFlags::PRIVATE, 4, Access::Write, FaultKind::Anon),
        ] {
            let vm = guest::vm(2, 512);
            let cpu0 = cpu(&vm, 0);
            let (space, object) = with_object(&cpu0, kind);
            store(&cpu0, &space, AT, 1).unwrap();
            load(&cpu0, &space, AT + 30 * P).unwrap();
            let got = between(
                &vm,
                |other| revoke(other, &space, &object),
                || space.fault_remote(&cpu0, AT + page * P, access),
            );
            assert_eq!(got, Ok(served));
            assert_no_abort(&vm);
            assert!(space.entry_at(&cpu0, AT + 30 * P).is_none());
            finish(cpu0, Vec::from([space]), Vec::from([object]));
        }
    }
}

/// A truncation removes the page or hole while a private mapping copies the page.
#[test]
fn a_private_copy_of_a_truncated_page_is_refused() {
    for page in [4, 5] {
        let vm = guest::vm(2, 512);
        let cpu0 = cpu(&vm, 0);
        let (space, object) = with_object(&cpu0, MapFlags::PRIVATE);
        store(&cpu0, &space, AT, 1).unwrap();
        let got = between(
            &vm,
            |other| truncate(other, &space, &object, 2),
            || space.fault_remote(&cpu0, AT + page * P, Access::Write),
        );
        assert_eq!(got, Err(FaultError::Bus));
        assert_eq!(vm.totals().get(Counter::SpfVmaChanged), 0);
        assert!(space.entry_at(&cpu0, AT + page * P).is_none());
        finish(cpu0, Vec::from([space]), Vec::from([object]));
    }
}

/// The page that a fault copies becomes a hole: the copy is of the hole.
#[test]
fn a_private_copy_of_a_punched_page_is_zeros() {
    let vm = guest::vm(2, 512);
    let cpu0 = cpu(&vm, 0);
    let (space, object) = with_object(&cpu0, MapFlags::PRIVATE);
    store(&cpu0, &space, AT, 1).unwrap();
    let got = between(
        &vm,
        |other| {
            object.free_pages(other, 5..6);
            space.revoke(other, &object, 5..6, PrivateCopies::Keep);
        },
        || store(&cpu0, &space, AT + 5 * P + 8, 9),
    );
    assert_eq!(got, Ok(()));
    assert_no_abort(&vm);
    assert_eq!([0, 8].map(|word| load(&cpu0, &space, AT + 5 * P + word)), [Ok(0), Ok(9)]);
    finish(cpu0, Vec::from([space]), Vec::from([object]));
}
