//! Grace periods: an object is freed only after all sections that may still read the object.
//!
//! Bounds: two threads, all executions; three threads, at most three forced switches, or two if two
//! threads collect.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p faultless --test models --target-dir target/loom grace::`

use crate::support::{Fair, Guarded, explore, local};
use faultless::CpuId;
use faultless::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use faultless::sync::grace::{Grace, RetireLink};
use faultless::sync::wait::until;
use loom::thread;
use std::ptr::NonNull;
use std::sync::Arc;

/// An object found through `linked`, and read inside sections.
#[repr(C)]
struct Object {
    link: RetireLink,
    freed: Guarded,
}

/// One reader, and one writer that unlinks, retires and frees.
fn a_section_against_freeing() {
    explore(None, || {
        let object = Object { link: RetireLink::new(7), freed: Guarded::new() };
        let shared = Arc::new((Grace::try_new(2).unwrap(), AtomicBool::new(true), object));
        let reader = {
            let shared = shared.clone();
            thread::spawn(move || {
                let (grace, linked, object) = &*shared;
                let here = local(0);
                let _section = grace.enter(&here);
                if linked.load(Ordering::Acquire) {
                    // Freeing writes this counter. The model checker reports a write not ordered
                    // after this read.
                    assert_eq!(object.freed.get(), 0);
                }
            })
        };
        let (grace, linked, object) = &*shared;
        let here = local(1);
        linked.store(false, Ordering::Release);
        // SAFETY: unlinked just now, once; the object lives as long as the model.
        unsafe { grace.retire(&here, NonNull::from(&object.link)) };
        for _ in 0..3 {
            for due in grace.collect(&here) {
                // SAFETY: the only object retired, which is alive.
                assert_eq!(unsafe { due.as_ref() }.kind(), 7);
                object.freed.add();
            }
        }
        reader.join().unwrap();
        // Whatever the reader did, no section delays the collection now.
        let given: u32 = (0..3).map(|_| grace.collect(&here).count() as u32).sum();
        assert_eq!(object.freed.get() + given, 1);
        assert_eq!(grace.pending(&here), 0);
    });
}

#[test]
fn a_section_keeps_its_objects() {
    a_section_against_freeing();
}

/// A reader opens two sections in turn, while a second CPU advances the epoch.
fn two_sections_against_two_collectors() {
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
                // SAFETY: never linked; alive until its collection below.
                unsafe { shared.0.retire(&here, NonNull::from(&dummy)) };
                until(&Fair, || shared.0.collect(&here).count() == 1);
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
fn each_of_two_sections_keeps_its_objects() {
    two_sections_against_two_collectors();
}

/// A writer that waits for a grace period and does not retire.
fn a_section_against_waiting() {
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
        shared.0.synchronize(&local(1), &Fair);
        shared.2.freed.add();
        reader.join().unwrap();
    });
}

#[test]
fn synchronize_waits_for_the_open_section() {
    a_section_against_waiting();
}

/// A reader, a CPU that retires and collects, and another CPU that collects the first CPU's
/// objects.
fn two_cpus_collect_what_one_retired() {
    explore(Some(2), || {
        let object = Object { link: RetireLink::new(7), freed: Guarded::new() };
        let shared = Arc::new((Grace::try_new(3).unwrap(), AtomicBool::new(true), object));
        let reader = {
            let shared = shared.clone();
            thread::spawn(move || {
                let (grace, linked, object) = &*shared;
                let here = local(0);
                let _section = grace.enter(&here);
                if linked.load(Ordering::Acquire) {
                    assert_eq!(object.freed.get(), 0);
                }
            })
        };
        let other = {
            let shared = shared.clone();
            thread::spawn(move || {
                let (grace, _, object) = &*shared;
                let here = local(2);
                grace.synchronize(&here, &Fair);
                for _ in grace.collect_from(&here, CpuId(1)) {
                    object.freed.add();
                }
            })
        };
        let (grace, linked, object) = &*shared;
        let here = local(1);
        linked.store(false, Ordering::Release);
        // SAFETY: unlinked just now, once; the object lives as long as the model.
        unsafe { grace.retire(&here, NonNull::from(&object.link)) };
        for _ in 0..2 {
            for _ in grace.collect(&here) {
                object.freed.add();
            }
        }
        reader.join().unwrap();
        other.join().unwrap();
        // Whatever the other threads did, no section delays the collection now.
        (0..3).flat_map(|_| grace.collect(&here)).for_each(|_| object.freed.add());
        assert_eq!(object.freed.get(), 1);
        assert_eq!(grace.pending_anywhere(), 0);
    });
}

#[test]
fn each_retired_object_is_collected_once() {
    two_cpus_collect_what_one_retired();
}

caught! {
    every_collector_checks_the_marks:
        without LookAtMarks, two_cpus_collect_what_one_retired(), says "Causality violation";
    every_collector_waits_for_two_epochs:
        without SecondEpoch, two_cpus_collect_what_one_retired(), says "Causality violation";
    one_cpu_at_a_time_uses_the_bags:
        without SpinExcludes, two_cpus_collect_what_one_retired(), says "Causality violation";
    a_section_needs_its_mark:
        without SectionMark, a_section_against_freeing(), says "Causality violation";
    a_section_needs_its_barrier:
        without SectionFence, a_section_against_freeing(), says "Causality violation";
    a_retirement_needs_its_fence:
        without RetireFence, two_sections_against_two_collectors(), says "Causality violation";
    advancing_needs_its_fence:
        without AdvanceFence, two_sections_against_two_collectors(), says "Causality violation";
    advancing_checks_the_marks:
        without LookAtMarks, a_section_against_freeing(), says "Causality violation";
    one_epoch_is_not_enough:
        without SecondEpoch, a_section_against_freeing(), says "Causality violation";
    a_waiting_writer_needs_the_mark:
        without SectionMark, a_section_against_waiting(), says "Causality violation";
    a_waiting_writer_checks_the_marks:
        without LookAtMarks, a_section_against_waiting(), says "Causality violation";
}
