//! Chosen interleavings. In most tests, the test machine calls back while a fault zeroes or copies
//! a frame, that is, between its read of the entry and making the entry busy. At this moment,
//! another CPU makes a conflicting change.

use crate::addr::{PAGE_SIZE, VirtRange};
use crate::audit::audit;
use crate::fault::{Access, FaultError, FaultKind};
use crate::knob::{AnonVmaCheck, Locking, Setting};
use crate::reclaim::tests::swap;
use crate::space::made::State;
use crate::space::vma::Piece;
use crate::space::write::{NOWHERE, Writing};
use crate::space::{Advice, MapFlags, Prot, Space};
use crate::stat::{Counter, TracePoint};
use crate::testing::TestMachine;
use crate::testing::guest::{self, between, cpu, load, store};
use crate::vm::Cpu;
use std::sync::Arc;
use std::sync::Mutex;
use std::thread;
use std::time::Duration;
use std::vec::Vec;

const AT: u64 = 1 << 30;
const RW: Prot = Prot::READ.union(Prot::WRITE);

fn map(cpu: &Cpu<'_, TestMachine>, space: &Space<TestMachine>, pages: u64, prot: Prot) {
    let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS | MapFlags::FIXED;
    assert_eq!(space.mmap(cpu, AT, pages * PAGE_SIZE, prot, flags), Ok(AT));
}

pub(crate) fn finish(cpu0: Cpu<'_, TestMachine>, space: Space<TestMachine>) {
    let vm = cpu0.vm();
    let cpu1 = cpu(vm, 1);
    cpu1.drain();
    cpu0.drain();
    audit(&cpu0, &[&space]).unwrap();
    space.exit(&cpu0);
    cpu0.drain();
    assert_eq!(audit(&cpu0, &[]).unwrap().taken(), 1, "only the zero page remains");
}

#[test]
fn a_write_fault_overtaken_by_munmap_installs_nothing() {
    let vm = guest::vm(2, 256);
    let cpu0 = cpu(&vm, 0);
    let space = Space::new(&cpu0).unwrap();
    map(&cpu0, &space, 4, RW);
    store(&cpu0, &space, AT + PAGE_SIZE, 1).unwrap();
    let got = between(
        &vm,
        |other| space.munmap(other, AT, PAGE_SIZE).unwrap(),
        || space.fault_remote(&cpu0, AT, Access::Write),
    );
    assert_eq!(got, Err(FaultError::Segv { mapped: false }));
    assert_eq!(vm.totals().get(Counter::SpfVmaChanged), 1);
    assert!(space.entry_at(&cpu0, AT).is_none());
    finish(cpu0, space);
}

#[test]
fn a_write_fault_overtaken_by_a_new_mapping_serves_the_new_one() {
    let vm = guest::vm(2, 256);
    let cpu0 = cpu(&vm, 0);
    let space = Space::new(&cpu0).unwrap();
    map(&cpu0, &space, 4, RW);
    store(&cpu0, &space, AT + PAGE_SIZE, 1).unwrap();
    let got = between(
        &vm,
        |other| {
            space.munmap(other, AT, 4 * PAGE_SIZE).unwrap();
            map(other, &space, 4, RW);
        },
        || space.fault_remote(&cpu0, AT, Access::Write),
    );
    // The table used by the fault was unlinked in the meantime.
    assert_eq!(got, Ok(FaultKind::Anon));
    assert_eq!((vm.totals().get(Counter::SpfVmaReplaced), vm.totals().aborts()), (1, 0));
    assert_eq!(load(&cpu0, &space, AT + PAGE_SIZE), Ok(0), "the old mapping was replaced");
    finish(cpu0, space);
}

#[test]
fn a_write_fault_overtaken_by_mprotect_is_refused_under_the_lock() {
    let vm = guest::vm(2, 256);
    let cpu0 = cpu(&vm, 0);
    let space = Space::new(&cpu0).unwrap();
    map(&cpu0, &space, 4, RW);
    store(&cpu0, &space, AT + PAGE_SIZE, 1).unwrap();
    let got = between(
        &vm,
        |other| space.mprotect(other, AT, PAGE_SIZE, Prot::READ).unwrap(),
        || space.fault_remote(&cpu0, AT, Access::Write),
    );
    assert_eq!(got, Err(FaultError::Segv { mapped: true }));
    assert_eq!(vm.totals().get(Counter::Segv), 1);
    finish(cpu0, space);
}

#[test]
fn a_faster_cpu_causes_no_abort() {
    let vm = guest::vm(2, 256);
    let cpu0 = cpu(&vm, 0);
    let space = Space::new(&cpu0).unwrap();
    map(&cpu0, &space, 4, RW);
    store(&cpu0, &space, AT + PAGE_SIZE, 1).unwrap();
    let before = vm.totals();
    let got = between(
        &vm,
        |other| store(other, &space, AT, 7).unwrap(),
        || space.fault_remote(&cpu0, AT, Access::Write),
    );
    assert_eq!(got, Ok(FaultKind::Spurious));
    let counted = vm.totals().since(&before);
    assert_eq!(counted.get(Counter::TrylockFailed), 1);
    assert_eq!((counted.aborts(), counted.get(Counter::Spf)), (0, 2));
    assert_eq!(load(&cpu0, &space, AT), Ok(7), "the store of the faster CPU is visible");
    finish(cpu0, space);
}

#[test]
fn two_cpus_that_need_one_table_create_one() {
    let vm = guest::vm(2, 256);
    let cpu0 = cpu(&vm, 0);
    let space = Space::new(&cpu0).unwrap();
    map(&cpu0, &space, 4, RW);
    between(
        &vm,
        |other| store(other, &space, AT, 7).unwrap(),
        || store(&cpu0, &space, AT + PAGE_SIZE, 8).unwrap(),
    );
    assert_eq!((load(&cpu0, &space, AT), load(&cpu0, &space, AT + PAGE_SIZE)), (Ok(7), Ok(8)));
    assert_eq!(vm.totals().get(Counter::TablePublished), 3);
    finish(cpu0, space);
}

#[test]
fn a_copy_overtaken_by_fork_or_exit_stays_private() {
    let vm = guest::vm(2, 256);
    let cpu0 = cpu(&vm, 0);
    let parent = Space::new(&cpu0).unwrap();
    map(&cpu0, &parent, 1, RW);
    store(&cpu0, &parent, AT, 1).unwrap();
    let child = parent.fork(&cpu0).unwrap();
    // While the parent copies the page, the child (on another CPU) forks and writes.
    let mut grandchild = None;
    between(
        &vm,
        |other| {
            grandchild = Some(child.fork(other).unwrap());
            store(other, &child, AT, 2).unwrap();
        },
        || store(&cpu0, &parent, AT, 3).unwrap(),
    );
    let grandchild = grandchild.unwrap();
    let values = [&parent, &child, &grandchild].map(|space| load(&cpu0, space, AT));
    assert_eq!(values, [Ok(3), Ok(2), Ok(1)]);
    // The last owner of the first page writes in place.
    let before = vm.totals();
    store(&cpu0, &grandchild, AT, 4).unwrap();
    assert_eq!(vm.totals().since(&before).get(Counter::CowReuse), 1);
    grandchild.exit(&cpu0);
    child.exit(&cpu0);
    finish(cpu0, parent);
}

#[test]
fn a_copy_overtaken_by_dontneed_reads_zeros() {
    let vm = guest::vm(2, 256);
    let cpu0 = cpu(&vm, 0);
    let parent = Space::new(&cpu0).unwrap();
    map(&cpu0, &parent, 1, RW);
    store(&cpu0, &parent, AT, 1).unwrap();
    store(&cpu0, &parent, AT + 8, 1).unwrap();
    let child = parent.fork(&cpu0).unwrap();
    between(
        &vm,
        |other| parent.madvise(other, AT, PAGE_SIZE, Advice::DontNeed).unwrap(),
        || store(&cpu0, &parent, AT, 3).unwrap(),
    );
    assert_eq!((load(&cpu0, &parent, AT), load(&cpu0, &parent, AT + 8)), (Ok(3), Ok(0)));
    assert_eq!(load(&cpu0, &child, AT), Ok(1));
    child.exit(&cpu0);
    finish(cpu0, parent);
}

#[test]
fn only_the_early_anon_vma_check_sends_reads_to_the_lock() {
    let vm = guest::vm(2, 256);
    let cpu0 = cpu(&vm, 0);
    let space = Space::new(&cpu0).unwrap();
    map(&cpu0, &space, 4, RW);
    vm.set(Setting::AnonVmaCheck(AnonVmaCheck::Early));
    load(&cpu0, &space, AT).unwrap();
    let early = vm.totals();
    assert_eq!((early.get(Counter::SpfVmaNoanon), early.get(Counter::RangeLockFault)), (1, 1));
    vm.set(Setting::AnonVmaCheck(AnonVmaCheck::Late));
    load(&cpu0, &space, AT + PAGE_SIZE).unwrap();
    store(&cpu0, &space, AT + 2 * PAGE_SIZE, 1).unwrap();
    let late = vm.totals().since(&early);
    assert_eq!((late.get(Counter::SpfVmaNoanon), late.get(Counter::RangeLockFault)), (0, 0));
    assert_eq!((late.get(Counter::Spf), late.get(Counter::AnonVmaPrepared)), (2, 1));
    finish(cpu0, space);
}

#[test]
fn an_access_abort_is_traced_and_resolved_under_the_lock() {
    let vm = guest::vm(2, 256);
    let cpu0 = cpu(&vm, 0);
    let space = Space::new(&cpu0).unwrap();
    map(&cpu0, &space, 1, Prot::READ);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&seen);
    vm.trace.watch(
        &TracePoint::ALL,
        Arc::new(move |event| {
            log.lock().unwrap().push((event.point, event.addr));
        }),
    );
    assert_eq!(store(&cpu0, &space, AT, 1), Err(FaultError::Segv { mapped: true }));
    vm.trace.unwatch();
    assert_eq!(store(&cpu0, &space, AT, 1), Err(FaultError::Segv { mapped: true }));
    assert_eq!(*seen.lock().unwrap(), [(TracePoint::VmaAccess, AT)]);
    assert_eq!(vm.totals().get(Counter::SpfVmaAccess), 2);
    finish(cpu0, space);
}

#[test]
fn an_object_smaller_than_its_mapping_is_not_served_speculatively() {
    let vm = guest::vm(2, 256);
    let cpu0 = cpu(&vm, 0);
    let space = Space::new(&cpu0).unwrap();
    let flags = MapFlags::SHARED | MapFlags::ANONYMOUS | MapFlags::FIXED;
    space.mmap(&cpu0, AT, PAGE_SIZE, RW, flags).unwrap();
    let remap = crate::space::RemapFlags::MAYMOVE;
    let at = space.mremap(&cpu0, AT, PAGE_SIZE, 2 * PAGE_SIZE, remap, 0).unwrap();
    assert_eq!(store(&cpu0, &space, at, 5), Ok(()));
    assert_eq!(store(&cpu0, &space, at + PAGE_SIZE, 5), Err(FaultError::Bus));
    assert_eq!(vm.totals().get(Counter::SpfVmaNotsup), 1);
    finish(cpu0, space);
}

#[test]
fn a_retry_uses_the_page_of_the_first_attempt() {
    let vm = guest::vm(2, 256);
    let cpu0 = cpu(&vm, 0);
    let space = Space::new(&cpu0).unwrap();
    map(&cpu0, &space, 8, RW);
    store(&cpu0, &space, AT + PAGE_SIZE, 1).unwrap();
    let zeroed = vm.machine().zeroed();
    let got = between(
        &vm,
        |other| space.munmap(other, AT + 4 * PAGE_SIZE, PAGE_SIZE).unwrap(),
        || space.fault_remote(&cpu0, AT, Access::Write),
    );
    assert_eq!(got, Ok(FaultKind::Anon));
    assert_eq!((vm.totals().get(Counter::SpfVmaReplaced), vm.totals().aborts()), (1, 0));
    assert_eq!(vm.machine().zeroed() - zeroed, 1, "zeroed once for both");
    finish(cpu0, space);
}

/// A writer has unmapped a page, but has not finished. A populate call must wait before it returns
/// the error.
#[test]
fn populate_waits_for_a_concurrent_unmapping() {
    for advice in [Advice::PopulateRead, Advice::PopulateWrite] {
        let vm = guest::vm(2, 256);
        vm.set(Setting::EditInPlace(false));
        let cpu0 = cpu(&vm, 0);
        let space = Space::new(&cpu0).unwrap();
        map(&cpu0, &space, 4, RW);
        let range = VirtRange::new(AT, AT + 4 * PAGE_SIZE);
        let writing = space.write(&cpu0, [range, NOWHERE], PAGE_SIZE);
        let piece = writing.vma_at(AT).unwrap().part(range);
        let put = |writing: &Writing<'_, '_, TestMachine>, piece: Option<Piece>| {
            writing
                .step(range.with_neighbours(), |step| match piece.clone() {
                    Some(piece) => step.replace(range, piece, State::Unlocked),
                    None => step.remove(range),
                })
                .unwrap();
        };
        put(&writing, None);
        std::thread::scope(|scope| {
            let populate = || space.madvise(&cpu(&vm, 1), AT, 4 * PAGE_SIZE, advice);
            let populates = scope.spawn(populate);
            // The call has seen that the page is unmapped, and requests the lock.
            while vm.totals().get(Counter::RangeLockFault) == 0 && !populates.is_finished() {
                std::thread::yield_now();
            }
            put(&writing, Some(Piece { root: None, ..piece }));
            drop(writing);
            assert_eq!(populates.join().unwrap(), Ok(()), "{advice:?}");
        });
        finish(cpu0, space);
    }
}

/// Two CPUs find a page below a stack unmapped, and each makes the stack grow down to it.
#[test]
fn a_concurrently_grown_stack_is_not_grown_again() {
    for locking in Locking::ALL {
        let vm = guest::vm(3, 256);
        vm.set(Setting::Locking(locking));
        let cpu0 = cpu(&vm, 0);
        let space = Space::new(&cpu0).unwrap();
        let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS | MapFlags::FIXED | MapFlags::GROWSDOWN;
        space.mmap(&cpu0, AT, PAGE_SIZE, RW, flags).unwrap();
        let page = AT - 3 * PAGE_SIZE;
        thread::scope(|scope| {
            let (vm, space) = (&vm, &space);
            // Both CPUs wait for this lock after they have read the end of the stack.
            let held = space.share(&cpu0, VirtRange::page(page), Counter::RangeLockFault);
            let grown = [1, 2].map(|id| scope.spawn(move || space.grow_stack(&cpu(vm, id), page)));
            thread::sleep(Duration::from_millis(10));
            drop(held);
            assert_eq!(grown.map(|grown| grown.join().unwrap()), [Ok(None); 2], "{locking:?}");
        });
        assert_eq!(vm.totals().get(Counter::StackGrowth), 1, "{locking:?}");
        assert_eq!(store(&cpu0, &space, page, 1), Ok(()));
        finish(cpu0, space);
    }
}

/// Another CPU forbids stores while a swapped page is copied.
#[test]
fn a_swapped_in_page_has_the_rights_of_its_mapping() {
    let vm = guest::vm(2, 256);
    let cpu = cpu(&vm, 0);
    swap::swap_on(&cpu, 16);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 1, RW);
    store(&cpu, &space, AT, 5).unwrap();
    swap::page_out(&cpu, &space, 0, 1);
    let child = space.fork(&cpu).unwrap();
    let forbid =
        |other: &Cpu<'_, TestMachine>| space.mprotect(other, AT, PAGE_SIZE, Prot::READ).unwrap();
    let got = between(&vm, forbid, || space.fault_remote(&cpu, AT, Access::Write));
    assert!(got.is_err() && !space.entry_at(&cpu, AT).is_writable(), "{got:?}");
    assert_eq!(load(&cpu, &child, AT), Ok(5));
    swap::finish(&cpu, Vec::from([space, child]));
}
