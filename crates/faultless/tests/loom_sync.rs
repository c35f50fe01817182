//! Exhaustive models of the synchronisation room:
//! `RUSTFLAGS="--cfg loom" cargo test --release -p faultless --test loom_sync`.
//!
//! Each model that must hold stands beside weakened ones that must fail, so that a model that has
//! stopped looking is noticed.
#![cfg(loom)]

use faultless::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence_after_rmw};
use faultless::sync::grace::{Grace, RetireLink};
use faultless::sync::percpu::Local;
use faultless::sync::range::{ClaimSlots, RangeLock};
use faultless::sync::rwlock::RwLock;
use faultless::sync::sequence::Sequence;
use faultless::sync::spin::SpinLock;
use faultless::sync::wait::{Spin, until};
use faultless::{CpuId, VirtRange};
use loom::cell::UnsafeCell;
use loom::model::Builder;
use loom::sync::Arc;
use loom::thread;
use std::ptr::NonNull;

const NONE: VirtRange = VirtRange { start: 0, end: 0 };

fn local(cpu: u16) -> Local {
    // SAFETY: each thread of a model claims another CPU, once.
    unsafe { Local::claim(CpuId(cpu)) }
}

/// A counter that fails the model when two threads are at it without order between them.
struct Guarded(UnsafeCell<u32>);

impl Guarded {
    fn new() -> Self {
        Self(UnsafeCell::new(0))
    }

    fn add(&self) {
        // SAFETY: none is claimed; that the accesses are ordered is what loom checks.
        self.0.with_mut(|value| unsafe { *value += 1 });
    }

    fn get(&self) -> u32 {
        // SAFETY: as in `add`.
        self.0.with(|value| unsafe { *value })
    }
}

// SAFETY: loom checks each access, which is the purpose of the models.
unsafe impl Sync for Guarded {}
// SAFETY: an integer.
unsafe impl Send for Guarded {}

/// Explores all executions with at most `preemptions` forced switches (`None`: all there are).
fn explore(preemptions: Option<usize>, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = preemptions;
    builder.max_branches = 10_000;
    builder.check(model);
}

#[test]
fn spin_lock_excludes() {
    explore(None, || {
        let lock = Arc::new(SpinLock::new(0));
        let other = lock.clone();
        let thread = thread::spawn(move || *other.lock(&Spin) += 1);
        *lock.lock(&Spin) += 1;
        thread.join().unwrap();
        assert_eq!(*lock.lock(&Spin), 2);
    });
}

/// Two writers and a reader, or a writer and two readers.
fn rwlock_model(writers: u32) {
    explore(Some(3), move || {
        let shared = Arc::new((RwLock::new(), Guarded::new()));
        let write = |shared: &(RwLock, Guarded)| {
            let _guard = shared.0.write(&Spin);
            shared.1.add();
        };
        let threads: Vec<_> = (0..2)
            .map(|number| {
                let shared = shared.clone();
                thread::spawn(move || {
                    if number + 1 < writers {
                        write(&shared);
                    } else {
                        let _guard = shared.0.read(&Spin);
                        assert!(shared.1.get() <= writers);
                    }
                })
            })
            .collect();
        write(&shared);
        for thread in threads {
            thread.join().unwrap();
        }
        let _guard = shared.0.try_read().expect("free at the end");
        assert_eq!(shared.1.get(), writers);
    });
}

#[test]
fn rwlock_one_writer_two_readers() {
    rwlock_model(1);
}

#[test]
fn rwlock_two_writers_one_reader() {
    rwlock_model(2);
}

/// Each CPU takes its ranges once and adds to the counters of the pages in them.
fn range_model<const CPUS: usize>(preemptions: Option<usize>, claims: [[VirtRange; 2]; CPUS]) {
    explore(preemptions, move || {
        let slots = ClaimSlots::try_new(CPUS, |_| Default::default()).unwrap();
        let shared = Arc::new((slots, RangeLock::new(), [(); 3].map(|()| Guarded::new())));
        let run = move |cpu: usize, shared: &(ClaimSlots, RangeLock, [Guarded; 3])| {
            let (slots, lock, pages) = shared;
            let here = local(cpu as u16);
            let guard = lock.acquire(slots, &here, claims[cpu], &Spin);
            for (number, page) in pages.iter().enumerate() {
                let number = number as u64;
                if guard.covers(VirtRange::new(number, number + 1)) {
                    page.add();
                }
            }
        };
        let threads: Vec<_> = (1..CPUS)
            .map(|cpu| {
                let shared = shared.clone();
                thread::spawn(move || run(cpu, &shared))
            })
            .collect();
        run(0, &shared);
        for thread in threads {
            thread.join().unwrap();
        }
        // Nothing is left behind, and no page was missed.
        let here = local(0);
        let all = [VirtRange::USER, NONE];
        assert!(shared.1.try_acquire(&shared.0, &here, all, &Spin).is_some());
        for (number, page) in shared.2.iter().enumerate() {
            let number = number as u64;
            let holders = claims.iter().flatten().filter(|range| range.contains(number)).count();
            assert_eq!(page.get(), holders as u32);
        }
    });
}

#[test]
fn range_lock_two_claims_that_overlap() {
    range_model(None, [[VirtRange::new(0, 1), VirtRange::new(2, 3)], [VirtRange::new(1, 3), NONE]]);
}

#[test]
fn range_lock_three_claims_in_a_chain() {
    range_model(
        Some(2),
        [[VirtRange::new(0, 2), NONE], [VirtRange::new(1, 3), NONE], [VirtRange::new(2, 3), NONE]],
    );
}

/// An object that is found through `linked`, and read where the sections allow it.
#[repr(C)]
struct Object {
    link: RetireLink,
    freed: Guarded,
}

/// One reader and one writer that unlinks, retires and frees. `protect`: the reader opens a section;
/// `patient`: the writer waits until the object is given out.
fn grace_model(protect: bool, patient: bool) {
    explore(None, move || {
        let object = Object { link: RetireLink::new(7), freed: Guarded::new() };
        let shared = Arc::new((Grace::try_new(2).unwrap(), AtomicBool::new(true), object));
        let reader = {
            let shared = shared.clone();
            thread::spawn(move || {
                let (grace, linked, object) = &*shared;
                let here = local(0);
                let _section = protect.then(|| grace.enter(&here));
                if linked.load(Ordering::Acquire) {
                    // Freeing writes this: loom finds it if it is not ordered after this read.
                    assert_eq!(object.freed.get(), 0);
                }
            })
        };
        let (grace, linked, object) = &*shared;
        let here = local(1);
        linked.store(false, Ordering::Release);
        // SAFETY: unlinked just now, once; the object lives as long as the model.
        unsafe { grace.retire(&here, NonNull::from(&object.link)) };
        if patient {
            for _ in 0..3 {
                for due in grace.collect(&here) {
                    // SAFETY: the only object retired, which is alive.
                    assert_eq!(unsafe { due.as_ref() }.kind(), 7);
                    object.freed.add();
                }
            }
        } else {
            object.freed.add();
        }
        reader.join().unwrap();
        // Whatever the reader did, nothing is in the way now.
        let given: u32 = (0..3).map(|_| grace.collect(&here).count() as u32).sum();
        assert_eq!(object.freed.get() + given, if patient { 1 } else { 2 });
        assert_eq!(grace.pending(&here), 0);
    });
}

#[test]
fn grace_protects_a_section() {
    grace_model(true, true);
}

#[test]
#[should_panic]
fn grace_does_not_protect_a_read_outside() {
    grace_model(false, true);
}

#[test]
#[should_panic]
fn grace_does_not_protect_from_the_impatient() {
    grace_model(true, false);
}

/// A reader that opens two sections in turn, a second CPU that advances the epoch meanwhile.
#[test]
fn grace_with_another_collector() {
    explore(Some(3), || {
        let objects = [(); 2].map(|()| Object { link: RetireLink::new(0), freed: Guarded::new() });
        let linked = AtomicU64::new(0);
        let shared = Arc::new((Grace::try_new(3).unwrap(), linked, objects));
        let reader = {
            let shared = shared.clone();
            thread::spawn(move || {
                let (grace, linked, objects) = &*shared;
                let here = local(0);
                for _ in 0..2 {
                    let _section = grace.enter(&here);
                    let at = linked.load(Ordering::Acquire) as usize;
                    assert_eq!(objects[at].freed.get(), 0);
                }
            })
        };
        let other = {
            let shared = shared.clone();
            thread::spawn(move || {
                let here = local(2);
                let dummy = RetireLink::new(1);
                // SAFETY: never linked; alive until it has been given out below.
                unsafe { shared.0.retire(&here, NonNull::from(&dummy)) };
                until(&Spin, || shared.0.collect(&here).count() == 1);
            })
        };
        let (grace, linked, objects) = &*shared;
        let here = local(1);
        linked.store(1, Ordering::Release);
        // SAFETY: unlinked just now, once; the object lives as long as the model.
        unsafe { grace.retire(&here, NonNull::from(&objects[0].link)) };
        for _ in 0..2 {
            for _ in grace.collect(&here) {
                objects[0].freed.add();
            }
        }
        reader.join().unwrap();
        other.join().unwrap();
    });
}

#[test]
fn synchronize_waits_for_the_open_section() {
    explore(None, || {
        let object = Object { link: RetireLink::new(0), freed: Guarded::new() };
        let shared = Arc::new((Grace::try_new(2).unwrap(), AtomicBool::new(true), object));
        let reader = {
            let shared = shared.clone();
            thread::spawn(move || {
                let here = local(0);
                let _section = shared.0.enter(&here);
                if shared.1.load(Ordering::Acquire) {
                    assert_eq!(shared.2.freed.get(), 0);
                }
            })
        };
        shared.1.store(false, Ordering::Release);
        shared.0.synchronize(&local(1), &Spin);
        shared.2.freed.add();
        reader.join().unwrap();
    });
}

/// What is taken out of the entry protocol, to see it fail.
#[derive(Clone, Copy, PartialEq)]
enum Without {
    Nothing,
    WriterFence,
    FaultFence,
    SecondRead,
}

const EMPTY: u64 = 0;
const BUSY: u64 = 1;
const PRESENT: u64 = 2;

/// A mapping of one page: the sequence, the fields it guards, and the entry.
struct Mapping {
    sequence: Sequence,
    /// The one field: what the fault is to install, odd once unmapped.
    field: AtomicU64,
    entry: AtomicU64,
}

impl Mapping {
    /// One speculative fault; whether it installed the entry.
    fn fault(&self, without: Without) -> bool {
        let Some(seen) = self.sequence.read() else { return false };
        let field = self.field.load(Ordering::Relaxed);
        // The fault without its fence has a compare-and-swap that orders nothing after it.
        let order =
            if without == Without::FaultFence { Ordering::Release } else { Ordering::SeqCst };
        if self.entry.compare_exchange(EMPTY, BUSY, order, Ordering::Relaxed).is_err() {
            return false;
        }
        let valid = match without {
            Without::SecondRead => true,
            Without::FaultFence => self.sequence.read() == Some(seen),
            _ => self.sequence.unchanged(seen),
        };
        if valid {
            assert_eq!(field, PRESENT, "installs what a writer has taken back");
        }
        self.entry.store(if valid { field } else { EMPTY }, Ordering::Release);
        valid
    }

    /// Unmaps: the sequence stays odd. Whether an entry was found.
    fn unmap(&self, without: Without) -> bool {
        self.sequence.begin_write();
        if without != Without::WriterFence {
            Sequence::writer_fence();
        }
        self.field.store(3, Ordering::Relaxed);
        self.clear()
    }

    fn clear(&self) -> bool {
        let mut entry = EMPTY;
        until(&Spin, || {
            entry = self.entry.load(Ordering::Acquire);
            if entry == PRESENT {
                // A present entry changes by compare-and-swap only.
                return self
                    .entry
                    .compare_exchange(PRESENT, EMPTY, Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok();
            }
            entry == EMPTY
        });
        entry == PRESENT
    }
}

fn entry_model(without: Without) {
    explore(None, move || {
        let mapping = Arc::new(Mapping {
            sequence: Sequence::new(),
            field: AtomicU64::new(PRESENT),
            entry: AtomicU64::new(EMPTY),
        });
        let faults: Vec<_> = (0..2)
            .map(|_| {
                let mapping = mapping.clone();
                thread::spawn(move || mapping.fault(without))
            })
            .collect();
        let found = mapping.unmap(without);
        let installed = faults.into_iter().filter(|_| true).map(|f| f.join().unwrap());
        let installed = installed.filter(|&yes| yes).count();
        fence_after_rmw();
        assert_eq!(mapping.entry.load(Ordering::Acquire), EMPTY, "an entry of a dead mapping");
        assert_eq!(installed, usize::from(found), "each installed entry is found, once");
    });
}

#[test]
fn no_entry_outlives_its_mapping() {
    entry_model(Without::Nothing);
}

#[test]
#[should_panic]
fn the_writer_needs_its_fence() {
    entry_model(Without::WriterFence);
}

#[test]
#[should_panic]
fn the_fault_needs_its_fence() {
    entry_model(Without::FaultFence);
}

#[test]
#[should_panic]
fn the_fault_needs_the_second_read() {
    entry_model(Without::SecondRead);
}

/// A writer that changes the field and lets faults in again: a fault installs the field as it was
/// before or as it is after, and what it installs from before is found.
#[test]
fn an_entry_is_as_old_as_its_sequence() {
    explore(None, || {
        let mapping = Arc::new(Mapping {
            sequence: Sequence::new(),
            field: AtomicU64::new(PRESENT),
            entry: AtomicU64::new(EMPTY),
        });
        let fault = {
            let mapping = mapping.clone();
            thread::spawn(move || {
                let seen = mapping.sequence.read()?;
                let field = mapping.field.load(Ordering::Relaxed);
                mapping
                    .entry
                    .compare_exchange(EMPTY, BUSY, Ordering::SeqCst, Ordering::Relaxed)
                    .ok()?;
                let valid = mapping.sequence.unchanged(seen);
                mapping.entry.store(if valid { field } else { EMPTY }, Ordering::Release);
                valid.then_some(field)
            })
        };
        mapping.sequence.begin_write();
        Sequence::writer_fence();
        mapping.field.store(PRESENT + 2, Ordering::Relaxed);
        let found = mapping.clear();
        mapping.sequence.end_write();
        let left = match fault.join().unwrap() {
            Some(PRESENT) => {
                assert!(found);
                EMPTY
            }
            Some(new) => new,
            None => EMPTY,
        };
        assert_eq!(mapping.entry.load(Ordering::Acquire), left);
    });
}
