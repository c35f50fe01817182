//! The locks: spin lock, reader-writer lock, range lock.
//!
//! Bounds: two threads, all executions; three threads, at most three forced switches. Claims read
//! many words when they check each other: two threads, at most three forced switches; three
//! threads, at most one.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p faultless --test models --target-dir target/loom locks::`

use crate::support::{Fair, Guarded, explore, local};
use faultless::sync::atomic::{AtomicBool, Ordering};
use faultless::sync::park::Permit;
use faultless::sync::range::{ClaimSlots, RangeLock};
use faultless::sync::rwlock::RwLock;
use faultless::sync::spin::SpinLock;
use faultless::sync::wait::Wait;
use faultless::{CpuId, VirtRange};
use loom::sync::{Condvar, Mutex};
use loom::thread;
use std::sync::Arc;

const NONE: VirtRange = VirtRange { start: 0, end: 0 };

/// The place where a parked CPU sleeps.
struct Bed {
    permit: Permit,
    asleep: Mutex<()>,
    woken: Condvar,
}

impl Bed {
    fn new() -> Self {
        Self { permit: Permit::new(), asleep: Mutex::new(()), woken: Condvar::new() }
    }

    fn wake(&self) {
        if self.permit.give() {
            drop(self.asleep.lock().unwrap());
            self.woken.notify_one();
        }
    }
}

/// CPUs that sleep when they park. A CPU without a wake-up sleeps forever, and the model deadlocks.
struct Sleeps<'a>(&'a [Bed], usize);

impl Wait for Sleeps<'_> {
    fn wait(&self, looks: u32) {
        Fair.wait(looks);
    }

    fn park(&self) {
        let bed = &self.0[self.1];
        let mut asleep = bed.asleep.lock().unwrap();
        if bed.permit.park() {
            while !bed.permit.is_given() {
                asleep = bed.woken.wait(asleep).unwrap();
            }
            bed.permit.resume();
        }
    }

    fn wake(&self, cpu: CpuId) {
        self.0[cpu.index()].wake();
    }
}

/// One thread waits for an event of the other thread, and parks.
fn permit_model() {
    explore(None, || {
        let shared = Arc::new((Guarded::new(), AtomicBool::new(false), Bed::new()));
        let other = shared.clone();
        let thread = thread::spawn(move || {
            other.0.add();
            other.1.store(true, Ordering::Relaxed);
            other.2.wake();
        });
        let beds = core::slice::from_ref(&shared.2);
        while !shared.1.load(Ordering::Relaxed) {
            Sleeps(beds, 0).park();
        }
        thread.join().unwrap();
        assert_eq!(shared.0.get(), 1);
    });
}

#[test]
fn a_wake_up_before_parking_is_not_lost() {
    permit_model();
}

fn spin_lock_model() {
    explore(None, || {
        let lock = Arc::new(SpinLock::new(0));
        let other = lock.clone();
        let thread = thread::spawn(move || *other.lock(&Fair) += 1);
        *lock.lock(&Fair) += 1;
        thread.join().unwrap();
        assert_eq!(*lock.lock(&Fair), 2);
    });
}

#[test]
fn spin_lock_excludes() {
    spin_lock_model();
}

/// Two writers and a reader, or a writer and two readers.
fn rwlock_model(writers: u32) {
    explore(Some(3), move || {
        let shared = Arc::new((RwLock::new(), Guarded::new()));
        let write = |shared: &(RwLock, Guarded)| {
            let _guard = shared.0.write(&Fair);
            shared.1.add();
        };
        let threads: Vec<_> = (0..2)
            .map(|number| {
                let shared = shared.clone();
                thread::spawn(move || {
                    if number + 1 < writers {
                        write(&shared);
                    } else {
                        let _guard = shared.0.read(&Fair);
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

/// A writer that becomes a reader, next to a writer and a reader.
fn downgrade_model() {
    explore(Some(3), || {
        let shared = Arc::new((RwLock::new(), Guarded::new()));
        let threads = [true, false].map(|writes| {
            let shared = shared.clone();
            thread::spawn(move || {
                if writes {
                    let _guard = shared.0.write(&Fair);
                    shared.1.add();
                } else {
                    let guard = shared.0.read(&Fair);
                    let seen = shared.1.get();
                    guard.await_downgraded(&Fair);
                    assert_eq!(shared.1.get(), seen);
                }
            })
        });
        {
            let guard = shared.0.write(&Fair);
            shared.1.add();
            let wrote = shared.1.get();
            guard.downgrade();
            assert_eq!(shared.1.get(), wrote);
        }
        for thread in threads {
            thread.join().unwrap();
        }
        let _guard = shared.0.try_read().expect("free at the end");
        assert_eq!(shared.1.get(), 2);
    });
}

#[test]
fn rwlock_downgrade_keeps_writers_out() {
    downgrade_model();
}

/// Each CPU claims its ranges once and adds to the counters of their pages.
fn range_model<const CPUS: usize>(preemptions: Option<usize>, claims: [[VirtRange; 2]; CPUS]) {
    explore(preemptions, move || {
        let slots = ClaimSlots::try_new(CPUS, |_| Default::default()).unwrap();
        let beds = [(); CPUS].map(|()| Bed::new());
        let shared = Arc::new((slots, RangeLock::new(), [(); 3].map(|()| Guarded::new()), beds));
        let run = move |cpu: usize, shared: &(ClaimSlots, RangeLock, [Guarded; 3], [Bed; CPUS])| {
            let (slots, lock, pages, beds) = shared;
            let here = local(cpu as u16);
            let sleeps = Sleeps(beds, cpu);
            let guard = lock.acquire(slots, &here, claims[cpu], &sleeps);
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
        // No claim is left, and no page was missed.
        let here = local(0);
        let all = [VirtRange::USER, NONE];
        assert!(shared.1.try_acquire(&shared.0, &here, all, &Fair).is_some());
        for (number, page) in shared.2.iter().enumerate() {
            let number = number as u64;
            let holders = claims.iter().flatten().filter(|range| range.contains(number)).count();
            assert_eq!(page.get(), holders as u32);
        }
    });
}

fn two_claims_that_overlap(preemptions: usize) {
    let claims = [[VirtRange::new(0, 1), VirtRange::new(2, 3)], [VirtRange::new(1, 3), NONE]];
    range_model(Some(preemptions), claims);
}

#[test]
fn range_lock_two_claims_that_overlap() {
    two_claims_that_overlap(3);
}

#[test]
fn range_lock_three_claims_in_a_chain() {
    range_model(
        Some(1),
        [[VirtRange::new(0, 2), NONE], [VirtRange::new(1, 3), NONE], [VirtRange::new(2, 3), NONE]],
    );
}

/// Three claims of one page, which wait for each other: a parked claim may be overtaken.
fn three_claims_of_one_page(preemptions: usize) {
    range_model(Some(preemptions), [[VirtRange::new(0, 1), NONE]; 3]);
}

#[test]
fn range_lock_three_claims_of_one_page() {
    three_claims_of_one_page(1);
}

/// The bits of the two CPUs in the lock's set are in different words.
#[test]
fn range_lock_cpus_far_apart() {
    const APART: u16 = 64;
    explore(Some(2), || {
        let slots = ClaimSlots::try_new(APART as usize + 1, |_| Default::default()).unwrap();
        let shared = Arc::new((slots, RangeLock::new(), Guarded::new()));
        let run = |cpu: u16, (slots, lock, page): &(_, RangeLock, Guarded)| {
            let here = local(cpu);
            let guard = lock.acquire(slots, &here, [VirtRange::new(0, 1), NONE], &Fair);
            page.add();
            drop(guard);
            lock.leave(CpuId(cpu));
        };
        let other = shared.clone();
        let thread = thread::spawn(move || run(APART, &other));
        run(0, &shared);
        thread.join().unwrap();
        assert_eq!(shared.2.get(), 2);
    });
}

/// The home of a CPU covers a long claim only while the claim is held. A CPU that finds the home
/// empty sees all writes made under the claim.
#[test]
fn range_lock_a_shrinking_home_is_ordered() {
    explore(Some(2), || {
        let slots = ClaimSlots::try_new(2, |_| Default::default()).unwrap();
        let shared = Arc::new((slots, RangeLock::new(), Guarded::new()));
        let run = |cpu: u16, end: u64, (slots, lock, page): &(_, RangeLock, Guarded)| {
            let here = local(cpu);
            let guard = lock.acquire(slots, &here, [VirtRange::new(0, end), NONE], &Fair);
            page.add();
            drop(guard);
        };
        let other = shared.clone();
        let thread = thread::spawn(move || run(1, 1 << 30, &other));
        run(0, 1, &shared);
        thread.join().unwrap();
        assert_eq!(shared.2.get(), 2);
    });
}

/// A CPU makes its next claim in another lock. A CPU that finds the home there sees all writes made
/// under the claims of the first lock.
#[test]
fn range_lock_a_home_moving_to_another_lock_is_ordered() {
    explore(Some(2), || {
        let slots = ClaimSlots::try_new(2, |_| Default::default()).unwrap();
        let shared = Arc::new((slots, [RangeLock::new(), RangeLock::new()], Guarded::new()));
        let here = [VirtRange::new(0, 1), NONE];
        let other = shared.clone();
        let thread = thread::spawn(move || {
            let (slots, [first, second], page) = &*other;
            let local = local(1);
            let guard = first.acquire(slots, &local, here, &Fair);
            page.add();
            drop(guard);
            drop(second.acquire(slots, &local, here, &Fair));
        });
        let (slots, [first, _], page) = &*shared;
        let local = local(0);
        let guard = first.acquire(slots, &local, here, &Fair);
        page.add();
        drop(guard);
        thread.join().unwrap();
        assert_eq!(shared.2.get(), 2);
    });
}

/// Each CPU tries to claim two pages, one after the other, as given by `places`. The pages are so
/// far apart that each page belongs to a different home.
fn claims_in_places(places: [[u64; 2]; 2]) {
    explore(Some(2), move || {
        let slots = ClaimSlots::try_new(2, |_| Default::default()).unwrap();
        let pages = [Guarded::new(), Guarded::new()];
        let shared = Arc::new((slots, RangeLock::with_near(), pages));
        let run = move |cpu: u16, (slots, lock, pages): &(_, RangeLock, [Guarded; 2])| {
            let here = local(cpu);
            for page in places[usize::from(cpu)] {
                let claim = [VirtRange::new(page << 30, (page << 30) + 1), NONE];
                if let Some(_guard) = lock.try_acquire(slots, &here, claim, &Fair) {
                    pages[page as usize].add();
                }
            }
        };
        let other = shared.clone();
        let thread = thread::spawn(move || run(1, &other));
        run(0, &shared);
        thread.join().unwrap();
    });
}

/// Both CPUs change the published position of their home.
#[test]
fn range_lock_two_moving_homes_conflict() {
    claims_in_places([[0, 1], [1, 0]]);
}

/// One home moves to the home of the other CPU.
#[test]
fn range_lock_an_approaching_home_is_noticed() {
    claims_in_places([[0, 0], [1, 0]]);
}

/// One CPU makes one claim after the other. Another CPU that reads the claims finds one whole
/// claim, and never parts of two.
#[test]
fn range_lock_a_reader_finds_whole_claims() {
    explore(Some(3), || {
        let slots = ClaimSlots::try_new(2, |_| Default::default()).unwrap();
        let shared = Arc::new((slots, RangeLock::new()));
        let (other, here) = (shared.clone(), local(0));
        let claim = |page| [VirtRange::new(page, page + 1), NONE];
        let first = shared.1.acquire(&shared.0, &here, claim(0), &Fair);
        let thread = thread::spawn(move || {
            assert!(!other.1.is_claimed(&other.0, VirtRange::new(1, 2)));
        });
        drop(first);
        drop(shared.1.acquire(&shared.0, &here, claim(2), &Fair));
        thread.join().unwrap();
    });
}

caught! {
    a_wake_up_before_parking_is_kept:
        without WakeLeavesPermit, permit_model(), says "deadlock";
    a_release_wakes_the_parked_claim:
        without ReleaseWakes, two_claims_that_overlap(4), says "deadlock";
    a_claim_is_published_before_other_claims_are_read:
        without ClaimFence, two_claims_that_overlap(4), says "Causality violation";
    a_home_covers_its_claims:
        without HomeCovers, two_claims_that_overlap(3), says "Causality violation";
    an_extended_home_is_counted:
        without HomeCounts, claims_in_places([[0, 0], [1, 0]]), says "Causality violation";
    a_parked_claim_retries:
        without ParkedTriesAgain, three_claims_of_one_page(2), says "Causality violation";
    a_spin_lock_is_held_by_one:
        without SpinExcludes, spin_lock_model(), says "Causality violation";
    a_writer_waits_for_readers:
        without WriterWaitsForReaders, rwlock_model(1), says "Causality violation";
    a_writer_waits_for_writers:
        without WriterWaitsForReaders, rwlock_model(2), says "Causality violation";
    a_downgraded_writer_counts_as_a_reader:
        without DowngradeStays, downgrade_model(), says "Causality violation";
    conflicting_claims_wait:
        without RangeConflict, two_claims_that_overlap(4), says "Causality violation";
}
