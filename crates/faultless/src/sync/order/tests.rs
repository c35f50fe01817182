//! Plants each kind of inversion, which must be detected even without a conflicting CPU.

use super::*;
use crate::addr::{FrameNumber, PAGE_SIZE, VirtRange};
use crate::fault::Access;
use crate::file::Object;
use crate::knob::{Locking, Setting};
use crate::machine::CpuId;
use crate::space::{MapFlags, Prot, Space};
use crate::sync::atomic::AtomicU64;
use crate::sync::grace::Grace;
use crate::sync::owner::Owner;
use crate::sync::percpu::Local;
use crate::sync::range::{ClaimSlots, RangeLock};
use crate::sync::rwlock::RwLock;
use crate::sync::spin::SpinLock;
use crate::table::{Entry, protocol};
use crate::testing::{TestMachine, Zeros};
use crate::tlb::cpuset::CpuSet;
use crate::tlb::shootdown::{Inbox, shoot};
use crate::{Invalidate, SpaceId, Vm};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::string::String;

/// A CPU that spins, and keeps a record.
struct Here(Local);

impl Wait for Here {
    fn wait(&self, _: u32) {
        unreachable!("no other CPU exists");
    }

    fn order(&self) -> Option<&Record> {
        Some(self.0.order())
    }
}

fn here() -> Here {
    // SAFETY: each test creates its own per-CPU values, and claims one CPU.
    Here(unsafe { Local::claim(CpuId(0)) })
}

/// Returns the panic message when `body` violates the order. Checks also that the CPU holds no lock
/// afterwards.
fn violation(here: &Here, body: impl FnOnce()) -> String {
    let violation = catch_unwind(AssertUnwindSafe(body)).expect_err("no violation");
    assert_eq!(here.0.order().names().next(), None, "still held");
    here.0.order().broken.set(false);
    *violation.downcast::<String>().unwrap()
}

#[track_caller]
fn reports(violation: &str, waited: &str, held: &str) {
    let expected = std::format!("lock order: {waited} is waited for while {held} is held");
    assert!(violation.starts_with(&expected), "{violation}");
}

fn page(number: u64) -> [VirtRange; 2] {
    [VirtRange::page(number * PAGE_SIZE), VirtRange { start: 0, end: 0 }]
}

#[test]
fn the_right_order_is_silent() {
    let here = here();
    let (coarse, fine) = (RwLock::new(), RangeLock::new());
    let slots = ClaimSlots::try_new(1, |_| Default::default()).unwrap();
    let grace = Grace::try_new(1).unwrap();
    let slot = AtomicU64::new(0);
    let leaf = SpinLock::<_, ArenaBuddy>::ordered(());
    {
        let _coarse = coarse.write(&here);
        let _fine = fine.acquire(&slots, &here.0, page(1), &here);
        grace.synchronize_locked(&here.0, &crate::sync::wait::Spin);
        let _section = grace.enter(&here.0);
        before::<VmaLock>(&here);
        let _vma = hold::<VmaLock>(&here);
        before::<VmaLock>(&here);
        let held = protocol::take(&slot, Entry::NONE, &here).unwrap();
        before::<Flush>(&here);
        drop(leaf.lock(&here));
        assert_eq!(here.0.order().names().count(), 5);
        held.revert();
    }
    assert_eq!(here.0.order().names().next(), None);
    grace.synchronize(&here.0, &crate::sync::wait::Spin);
}

#[test]
fn waiting_for_a_space_lock_in_a_section_or_under_a_later_lock_panics() {
    let here = here();
    let (coarse, fine) = (RwLock::new(), RangeLock::new());
    let slots = ClaimSlots::try_new(1, |_| Default::default()).unwrap();
    let grace = Grace::try_new(1).unwrap();
    let (of_coarse, of_fine) = ("a space's mmap_lock", "a space's range lock");
    let heard = violation(&here, || {
        let _section = grace.enter(&here.0);
        drop(coarse.read(&here));
    });
    reports(&heard, of_coarse, "a grace section");
    let heard = violation(&here, || {
        let _section = grace.enter(&here.0);
        drop(fine.acquire(&slots, &here.0, page(1), &here));
    });
    reports(&heard, of_fine, "a grace section");
    let heard = violation(&here, || {
        let _fine = fine.acquire(&slots, &here.0, page(1), &here);
        drop(coarse.write(&here));
    });
    reports(&heard, of_coarse, of_fine);
    let heard = violation(&here, || {
        let _fine = fine.acquire(&slots, &here.0, page(1), &here);
        drop(fine.acquire(&slots, &here.0, page(2), &here));
    });
    reports(&heard, of_fine, of_fine);
    let heard = violation(&here, || {
        let _vma = hold::<VmaLock>(&here);
        drop(coarse.read(&here));
    });
    reports(&heard, of_coarse, "a VMA's lock");
}

/// Waiting for another space is forbidden as well: the other space's owner might wait for this
/// owner.
#[test]
fn an_owner_waiting_for_a_space_lock_panics() {
    let (here, fine) = (here(), RangeLock::new());
    let slots = ClaimSlots::try_new(1, |_| Default::default()).unwrap();
    let grace = Grace::try_new(1).unwrap();
    let [own, other] = [0, 1].map(|id| Owner::new(CpuId(id)));
    let owner = "a space's owner";
    let heard = violation(&here, || {
        let _held = own.hold(CpuId(0), &here).unwrap();
        drop(fine.acquire(&slots, &here.0, page(1), &here));
    });
    reports(&heard, "a space's range lock", owner);
    let heard = violation(&here, || {
        let _held = own.hold(CpuId(0), &here).unwrap();
        other.share(&grace.enter(&here.0), CpuId(0), &here);
    });
    reports(&heard, owner, owner);
    // A finished call holds no lock.
    drop(own.hold(CpuId(0), &here).unwrap());
    other.share(&grace.enter(&here.0), CpuId(0), &here);
}

/// A waiting claim ends its section before the wait. A claim that does not is detected.
#[test]
fn a_waiting_claim_has_left_its_section() {
    let (here, fine) = (here(), RangeLock::new());
    let slots = ClaimSlots::try_new(2, |_| Default::default()).unwrap();
    let grace = Grace::try_new(1).unwrap();
    // SAFETY: the other CPU.
    let other = Here(unsafe { Local::claim(CpuId(1)) });
    let blocker = fine.acquire(&slots, &other.0, page(1), &other);
    let heard = violation(&here, || {
        let _section = grace.enter(&here.0);
        drop(fine.acquire_leaving(&slots, &here.0, page(1), &here, || {}));
    });
    reports(&heard, "a space's range lock", "a grace section");
    drop(blocker);
    let section = grace.enter(&here.0);
    // No conflict, and therefore no wait.
    drop(fine.acquire_leaving(&slots, &here.0, page(1), &here, || {}));
    drop(section);
}

#[test]
fn waiting_for_an_entry_while_holding_one_panics() {
    let here = here();
    let slots = [0, 0].map(AtomicU64::new);
    let there = AtomicU64::new(Entry::leaf(FrameNumber(7)).0);
    let seen = Entry::leaf(FrameNumber(7));
    let heard = violation(&here, || {
        let held = protocol::take(&slots[0], Entry::NONE, &here).unwrap();
        protocol::wait_and_load(&slots[1], &here);
        held.revert();
    });
    reports(&heard, "a busy entry", "a busy entry");
    let heard = violation(&here, || {
        let held = protocol::pin(&there, seen, &here).unwrap();
        protocol::wait_and_replace(&slots[1], &here, |entry| entry);
        held.revert();
    });
    reports(&heard, "a busy entry", "a pinned entry");
    let heard = violation(&here, || {
        let held = protocol::take_some(protocol::Slots::all(&slots[1..]), Entry::NONE, !0, &here);
        protocol::wait_and_load(&slots[1], &here);
        held.revert();
    });
    reports(&heard, "a busy entry", "a busy entry");
}

#[test]
fn waiting_for_a_flush_while_holding_a_mapped_entry_panics() {
    let here = here();
    let machine = TestMachine::new(1, 2);
    let inboxes = crate::sync::percpu::PerCpu::try_new(1, |_| Inbox::new()).unwrap();
    let nobody = CpuSet::new();
    let flush = || shoot(&machine, &inboxes, &here.0, &here, SpaceId(1), &nobody, Invalidate::All);
    let seen = Entry::leaf(FrameNumber(7));
    let slot = AtomicU64::new(seen.0);
    let heard = violation(&here, || {
        let held = protocol::pin(&slot, seen, &here).unwrap();
        flush();
        held.revert();
    });
    reports(&heard, "a flush", "a pinned entry");
    let leaf = SpinLock::<_, LazyHull>::ordered(());
    let heard = violation(&here, || {
        let _leaf = leaf.lock(&here);
        flush();
    });
    reports(&heard, "a flush", "a space's lazily freed range");
    let busy = AtomicU64::new(0);
    let held = protocol::take(&busy, Entry::NONE, &here).unwrap();
    assert_eq!(flush(), 0);
    held.revert();
}

/// A CPU that protects pages during its turn must not keep other CPUs, for which it waits, out of a
/// space.
#[test]
fn a_store_is_called_with_only_the_turn_held() {
    let vm = Vm::new(TestMachine::new(1, 64)).unwrap();
    // SAFETY: the only handle of the CPU.
    let cpu = unsafe { vm.cpu(CpuId(0)) };
    let file = Object::of_store(&cpu, std::sync::Arc::new(Zeros(4)), 1).unwrap();
    file.write_page(&cpu, 0, |_| ()).unwrap();
    let (turn, claim) = ("an object's turn to write", "a space's range lock");
    let (fine, record) = (RangeLock::new(), cpu.local().order());
    let slots = ClaimSlots::try_new(1, |_| Default::default()).unwrap();
    let refused = |call: &dyn Fn(), waited: &str| {
        let violation = catch_unwind(AssertUnwindSafe(|| {
            let _claim = fine.acquire(&slots, cpu.local(), page(1), &cpu);
            call();
        }));
        record.broken.set(false);
        assert_eq!(record.names().next(), None, "still held");
        reports(
            violation.expect_err("no violation").downcast_ref::<String>().unwrap(),
            waited,
            claim,
        );
    };
    let all = 0..u64::MAX;
    refused(&|| assert!(file.write_back(&cpu, all.clone(), |_| {}).is_ok()), turn);
    refused(&|| assert!(file.set_len(&cpu, PAGE_SIZE).is_ok()), turn);
    refused(&|| assert!(file.punch(&cpu, 0..1).is_ok()), turn);
    let read = || assert!(file.read_page(&cpu, 3, |_| ()).is_ok());
    refused(&read, "a store");
    // During the turn, claims are made, and the turn of another object is taken, on which the store
    // may be based.
    let other = Object::of_store(&cpu, std::sync::Arc::new(Zeros(4)), 1).unwrap();
    file.write_page(&cpu, 1, |_| ()).unwrap();
    let protected = core::cell::Cell::new(false);
    let protect = |_| {
        drop(fine.acquire(&slots, cpu.local(), page(1), &cpu));
        other.set_len(&cpu, PAGE_SIZE).unwrap();
        cpu.wait_grace();
        protected.set(record.names().eq([turn]));
    };
    file.write_back(&cpu, all, protect).unwrap();
    assert!(protected.get() && record.names().next().is_none());
    Object::release(file, &cpu);
    Object::release(other, &cpu);
}

/// Each operation waits for walking CPUs, and would thus wait for its own CPU.
#[test]
fn waiting_for_walks_inside_a_walk_panics() {
    let vm = Vm::new(TestMachine::new(1, 64)).unwrap();
    // SAFETY: the only handle of the CPU.
    let cpu = unsafe { vm.cpu(CpuId(0)) };
    let spaces = [(); 2].map(|()| Space::new(&cpu).unwrap());
    let [ended, dropped] = spaces;
    drop(dropped);
    let refused = |what: &mut dyn FnMut()| {
        let walk = cpu.walk();
        let violation = catch_unwind(AssertUnwindSafe(what)).expect_err("no violation");
        cpu.local().order().broken.set(false);
        drop(walk);
        assert_eq!(cpu.local().order().names().next(), None, "still held");
        let reclaim = "a space's reclaim";
        reports(violation.downcast_ref::<String>().unwrap(), reclaim, reclaim);
    };
    refused(&mut || drop(cpu.walk()));
    refused(&mut || _ = cpu.end_dropped());
    let mut ended = Some(ended);
    refused(&mut || ended.take().unwrap().exit(&cpu));
    // The space was dropped then.
    assert_eq!(cpu.end_dropped(), 2);
    cpu.drain();
    assert_eq!(vm.free_frames() + 1, vm.total_frames());
}

#[test]
fn waiting_for_a_grace_period_in_a_section_or_under_a_lock_panics() {
    let here = here();
    let grace = Grace::try_new(1).unwrap();
    let (coarse, slot) = (RwLock::new(), AtomicU64::new(0));
    let spin = crate::sync::wait::Spin;
    let grace_period = "a grace period";
    let heard = violation(&here, || {
        let _section = grace.enter(&here.0);
        grace.synchronize(&here.0, &spin);
    });
    reports(&heard, grace_period, "a grace section");
    let heard = violation(&here, || {
        let _coarse = coarse.read(&here);
        grace.synchronize(&here.0, &spin);
    });
    reports(&heard, grace_period, "a space's mmap_lock");
    let heard = violation(&here, || {
        let held = protocol::take(&slot, Entry::NONE, &here).unwrap();
        grace.synchronize(&here.0, &spin);
        held.revert();
    });
    reports(&heard, grace_period, "a busy entry");
    // A CPU that may hold the locks of a space may not hold further locks either.
    let heard = violation(&here, || {
        let _vma = hold::<VmaLock>(&here);
        grace.synchronize_locked(&here.0, &spin);
    });
    reports(&heard, "a grace section", "a VMA's lock");
}

#[test]
fn waiting_while_holding_a_leaf_lock_panics() {
    let here = here();
    let tree = SpinLock::<_, LazyHull>::ordered(());
    let buddy = SpinLock::<_, ArenaBuddy>::ordered(());
    let coarse = RwLock::new();
    let leaf = "an arena's buddy allocator";
    let heard = violation(&here, || {
        let _buddy = buddy.lock(&here);
        drop(tree.lock(&here));
    });
    reports(&heard, "a space's lazily freed range", leaf);
    let heard = violation(&here, || {
        let _buddy = buddy.lock(&here);
        drop(coarse.write(&here));
    });
    reports(&heard, "a space's mmap_lock", leaf);
    // A kernel's own locks are not checked; a lock known to no other CPU has no place in the order.
    let outside = SpinLock::new(());
    let mut own = SpinLock::<_, LazyHull>::ordered(());
    let (_outside, _own) = (outside.lock(&here), own.lock_mut());
    drop(buddy.lock(&here));
}

/// Calls record the locks they hold, under every policy, and hold no locks after their end.
#[test]
fn a_call_in_a_section_is_detected_if_it_waits() {
    for locking in Locking::ALL {
        let vm = Vm::new(TestMachine::new(1, 64)).unwrap();
        vm.set(Setting::Locking(locking));
        // SAFETY: the only handle of the CPU.
        let cpu = unsafe { vm.cpu(CpuId(0)) };
        let record = cpu.local().order();
        let space = Space::new(&cpu).unwrap();
        let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS;
        let at = space.mmap(&cpu, None, PAGE_SIZE, Prot::READ | Prot::WRITE, flags).unwrap();
        space.fault_remote(&cpu, at, Access::Write).unwrap();
        assert_eq!(record.names().next(), None, "{locking:?}");
        let refused = |call: &dyn Fn()| {
            let _section = cpu.section();
            let refused = catch_unwind(AssertUnwindSafe(call)).is_err();
            record.broken.set(false);
            refused
        };
        // A claim without a wait is permitted in a section.
        let unmap = || space.munmap(&cpu, at, PAGE_SIZE).unwrap();
        assert_eq!(refused(&unmap), locking != Locking::Speculative, "{locking:?}");
        assert!(refused(&|| cpu.wait_grace()), "{locking:?}");
        space.exit(&cpu);
        cpu.drain();
    }
}
