//! The entry protocol: the functions used by faults and writers, on one entry and one sequence,
//! with every reordering known to the model checker.
//!
//! Bounds: two threads, all executions; three threads, at most four forced switches.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p faultless --test models --target-dir target/loom entry::`

use crate::support::{Fair, explore};
use faultless::FrameNumber;
use faultless::sync::atomic::{AtomicU64, Ordering};
use faultless::sync::sequence::Sequence;
use faultless::table::Entry;
use faultless::table::protocol::{self, Slots};
use loom::thread;
use std::sync::Arc;

/// A mapping of one page: the sequence, a field guarded by the sequence (the frame that a fault
/// installs), and the entry.
struct Page {
    entry: AtomicU64,
    sequence: Sequence,
    field: AtomicU64,
}

fn page(entry: Entry) -> Arc<Page> {
    let field = AtomicU64::new(1);
    Arc::new(Page { entry: AtomicU64::new(entry.0), sequence: Sequence::new(), field })
}

fn now(page: &Page) -> Entry {
    Entry(page.entry.load(Ordering::Acquire))
}

/// A write fault on an empty entry, as in `write_untouched`. Returns the installed frame.
fn fault(page: &Page) -> Option<FrameNumber> {
    let seen = page.sequence.read()?;
    let frame = FrameNumber(page.field.load(Ordering::Relaxed) as u32);
    let held = protocol::take(&page.entry, Entry::NONE, &Fair).ok()?;
    if !page.sequence.unchanged(seen) {
        held.revert();
        return None;
    }
    held.commit(Entry::leaf(frame).writable_dirty());
    Some(frame)
}

/// A writer that empties the entry and leaves the VMA stopped. Returns the old entry.
fn unmap(page: &Page) -> Entry {
    page.sequence.begin_write();
    Sequence::writer_fence();
    protocol::wait_and_replace(&page.entry, &Fair, |_| Entry::NONE).0
}

/// Faults against one unmap. In the end the page is unmapped, and the writer has found each
/// installed frame.
fn faults_against_one_unmap<const FAULTS: usize>(bound: Option<usize>) {
    explore(bound, || {
        let page = page(Entry::NONE);
        let faults = [(); FAULTS].map(|()| {
            let page = Arc::clone(&page);
            thread::spawn(move || fault(&page))
        });
        let found = unmap(&page);
        let installed = faults.map(|fault| fault.join().unwrap()).into_iter().flatten().count();
        assert!(now(&page).is_none(), "behind the writer's back");
        let found = usize::from(found.is_present());
        assert_eq!(installed, found, "behind the writer's back a frame is lost");
    });
}

#[test]
fn no_fault_installs_behind_the_writer() {
    faults_against_one_unmap::<1>(None);
}

#[test]
fn two_faults_do_not_install_behind_the_writer() {
    faults_against_one_unmap::<2>(Some(4));
}

/// mprotect to read-only against a fault that makes the page writable again: after the writer has
/// finished, with the VMA still stopped, the entry allows no store.
fn a_permission_against_its_removal() {
    explore(None, || {
        let mapped = Entry::leaf(FrameNumber(3));
        let page = page(mapped);
        let other = Arc::clone(&page);
        let fault = thread::spawn(move || {
            let Some(seen) = other.sequence.read() else {
                return;
            };
            let Ok(held) = protocol::pin(&other.entry, mapped, &Fair) else {
                return;
            };
            if other.sequence.unchanged(seen) {
                held.commit(mapped.writable_dirty());
            } else {
                held.revert();
            }
        });
        page.sequence.begin_write();
        Sequence::writer_fence();
        protocol::wait_and_replace(&page.entry, &Fair, Entry::read_only);
        fault.join().unwrap();
        assert!(!now(&page).is_locked());
        assert!(!now(&page).is_writable(), "a removed permission was restored");
        assert_eq!(now(&page).frame(), FrameNumber(3));
    });
}

#[test]
fn no_permission_comes_back_behind_the_writer() {
    a_permission_against_its_removal();
}

/// A writer that changes the field and admits faults again. A fault installs either the old field,
/// which the writer then finds, or the new field.
fn an_entry_against_a_finishing_writer() {
    explore(None, || {
        let page = page(Entry::NONE);
        let other = Arc::clone(&page);
        let late = thread::spawn(move || fault(&other));
        page.sequence.begin_write();
        Sequence::writer_fence();
        page.field.store(2, Ordering::Relaxed);
        let (found, _) = protocol::wait_and_replace(&page.entry, &Fair, |_| Entry::NONE);
        page.sequence.end_write();
        let installed = late.join().unwrap();
        let before = installed == Some(FrameNumber(1));
        assert_eq!(found.is_present(), before, "the old field is installed, and not found");
        let after = installed == Some(FrameNumber(2));
        assert_eq!(now(&page).is_present(), after, "the new field is not installed");
    });
}

#[test]
fn an_entry_matches_its_sequence() {
    an_entry_against_a_finishing_writer();
}

/// Hardware marks a page dirty while a fault has pinned the entry and a writer removes the write
/// permission: the mark stays.
fn a_mark_against_a_pinned_entry() {
    explore(None, || {
        let mapped = Entry::leaf(FrameNumber(3)).writable().clean();
        let page = page(mapped);
        let fault = {
            let page = Arc::clone(&page);
            thread::spawn(move || {
                if let Ok(held) = protocol::pin(&page.entry, mapped, &Fair) {
                    held.revert();
                }
            })
        };
        let hardware = {
            let page = Arc::clone(&page);
            thread::spawn(move || {
                let dirty = mapped.writable_dirty().0;
                let mark = |now| Entry(now).is_writable().then_some(now | dirty);
                page.entry.fetch_update(Ordering::AcqRel, Ordering::Acquire, mark).is_ok()
            })
        };
        protocol::wait_and_replace(&page.entry, &Fair, Entry::read_only);
        fault.join().unwrap();
        let stored = hardware.join().unwrap();
        assert_eq!(now(&page).is_dirty(), stored, "a store is lost");
        assert!(!now(&page).is_writable() && !now(&page).is_locked());
    });
}

#[test]
fn a_hardware_mark_stays() {
    a_mark_against_a_pinned_entry();
}

/// Fault-around runs against an unmap of the same entries: no thread waits while it holds entries,
/// and no entry stays held.
fn runs_against_unmap<const RUNS: u32>(bound: Option<usize>) {
    explore(bound, || {
        let slots = Arc::new([0, 0].map(AtomicU64::new));
        let others: Vec<_> = (1..=RUNS)
            .map(|frame| {
                let slots = Arc::clone(&slots);
                thread::spawn(move || {
                    let leaf = Entry::leaf(FrameNumber(frame));
                    let held = protocol::take_runs(Slots::all(&slots[..]), Entry::NONE, !0, &Fair);
                    let count = (0..2).filter(|&at| held.holds(at)).count();
                    held.commit(|_| leaf);
                    count
                })
            })
            .collect();
        // The model checker remembers only the last access to each atomic. A run's read of an entry
        // before its swap would hide the writer's earlier read, and the checker would try no other
        // order. Starting the runs first avoids this.
        thread::yield_now();
        let found =
            slots.each_ref().map(|slot| protocol::wait_and_replace(slot, &Fair, |_| Entry::NONE).0);
        let made: usize = others.into_iter().map(|other| other.join().unwrap()).sum();
        let left = slots.each_ref().map(|slot| Entry(slot.load(Ordering::Acquire)));
        let held = found.iter().chain(&left).any(|entry| entry.is_locked());
        assert!(!held, "a held entry was changed or not released");
        let present = found.iter().chain(&left).filter(|entry| entry.is_present()).count();
        assert_eq!(made, present, "a frame is lost");
    });
}

#[test]
fn runs_take_free_entries_and_release_all() {
    runs_against_unmap::<1>(None);
    runs_against_unmap::<2>(Some(4));
}

/// A prefault batch, which validates the ticket once for all its entries, against an unmap of these
/// entries.
fn a_batch_against_unmap() {
    explore(None, || {
        let shared = Arc::new(([0, 0].map(AtomicU64::new), Sequence::new()));
        let other = Arc::clone(&shared);
        let batch = thread::spawn(move || {
            let (slots, sequence) = &*other;
            let Some(seen) = sequence.read() else {
                return 0;
            };
            let held = protocol::take_some(Slots::all(slots), Entry::NONE, !0, &Fair);
            if !sequence.unchanged(seen) {
                held.revert();
                return 0;
            }
            let count = (0..2).filter(|&at| held.holds(at)).count();
            held.commit(|_| Entry::leaf(FrameNumber(3)));
            count
        });
        let (slots, sequence) = &*shared;
        sequence.begin_write();
        Sequence::writer_fence();
        // As in `runs_against_unmap`.
        thread::yield_now();
        let found =
            slots.each_ref().map(|slot| protocol::wait_and_replace(slot, &Fair, |_| Entry::NONE).0);
        let installed = batch.join().unwrap();
        let left = slots.each_ref().map(|slot| Entry(slot.load(Ordering::Acquire)));
        assert!(left.iter().all(|entry| entry.is_none()), "behind the writer's back");
        let found = found.iter().filter(|entry| entry.is_present()).count();
        assert_eq!(installed, found, "behind the writer's back a frame is lost");
    });
}

#[test]
fn no_batch_installs_behind_the_writer() {
    a_batch_against_unmap();
}

caught! {
    a_batch_needs_its_barrier:
        without FaultFence, a_batch_against_unmap(), says "behind the writer's back";
    a_batch_reads_the_sequence_again:
        without SecondLook, a_batch_against_unmap(), says "behind the writer's back";
    a_batch_takes_each_entry:
        without BatchTakesEach, a_batch_against_unmap(), says "behind the writer's back";
    the_writer_needs_its_fence_for_batches:
        without WriterFence, a_batch_against_unmap(), says "behind the writer's back";
    the_writer_needs_its_fence:
        without WriterFence, faults_against_one_unmap::<1>(None), says "behind the writer's back";
    the_fault_needs_its_barrier:
        without FaultFence, faults_against_one_unmap::<1>(None), says "behind the writer's back";
    the_fault_reads_the_sequence_again:
        without SecondLook, faults_against_one_unmap::<1>(None), says "behind the writer's back";
    the_writer_waits_for_a_held_entry:
        without ReplaceWaits, faults_against_one_unmap::<1>(None), says "behind the writer's back";
    the_writer_needs_its_fence_for_permissions:
        without WriterFence, a_permission_against_its_removal(), says "a removed permission was restored";
    the_fault_needs_its_barrier_for_permissions:
        without FaultFence, a_permission_against_its_removal(), says "a removed permission was restored";
    the_writer_needs_its_fence_for_fields:
        without WriterFence, an_entry_against_a_finishing_writer(), says "the old field is installed";
    the_second_read_protects_fields:
        without SecondLook, an_entry_against_a_finishing_writer(), says "the old field is installed";
    a_pinned_entry_keeps_gained_bits:
        without KeepGained, a_mark_against_a_pinned_entry(), says "a store is lost";
    the_writer_waits_for_every_entry_of_a_run:
        without ReplaceWaits, runs_against_unmap::<1>(None), says "a held entry was changed";
}
