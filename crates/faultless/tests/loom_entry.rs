//! The entry protocol under every interleaving and every reordering that the model checker knows:
//! the functions that faults and writers really use, on one entry, one sequence.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p faultless --test loom_entry`
#![cfg(loom)]

use faultless::FrameNumber;
use faultless::sync::sequence::Sequence;
use faultless::sync::wait::Wait;
use faultless::table::{Entry, protocol};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

struct Yield;

impl Wait for Yield {
    fn wait(&self, _: u32) {
        thread::yield_now();
    }
}

struct Page {
    entry: AtomicU64,
    sequence: Sequence,
}

fn page(entry: Entry) -> Arc<Page> {
    Arc::new(Page { entry: AtomicU64::new(entry.0), sequence: Sequence::new() })
}

fn now(page: &Page) -> Entry {
    Entry(page.entry.load(Ordering::Acquire))
}

/// A write fault on an empty entry, as `write_untouched` does it. Whether it installed its frame.
fn fault(page: &Page, frame: u32, validate: bool) -> bool {
    let Some(seen) = page.sequence.read() else {
        return false;
    };
    let Ok(held) = protocol::take(&page.entry, Entry::NONE, &Yield) else {
        return false;
    };
    if validate && !page.sequence.unchanged(seen) {
        held.revert();
        return false;
    }
    held.commit(Entry::leaf(FrameNumber(frame)).writable_dirty());
    true
}

/// A writer that empties the entry and leaves the VMA dead. What it found.
fn unmap(page: &Page, fence: bool) -> Entry {
    page.sequence.begin_write();
    if fence {
        Sequence::writer_fence();
    }
    protocol::settle(&page.entry, &Yield, |_| Entry::NONE).0
}

/// Two faults against one unmap: when all is over nothing is mapped, and each frame that was
/// installed was found by the writer, or was never installed.
fn two_faults_against_one_unmap(fence: bool, validate: bool) {
    loom::model(move || {
        let page = page(Entry::NONE);
        let faults = [1, 2].map(|frame| {
            let page = Arc::clone(&page);
            thread::spawn(move || fault(&page, frame, validate))
        });
        let found = unmap(&page, fence);
        let installed = faults.map(|fault| fault.join().unwrap());
        assert!(now(&page).is_none(), "mapped in a dead VMA: {:?}", now(&page));
        let count = installed.iter().filter(|&&done| done).count();
        assert_eq!(count, usize::from(found.is_present()), "a frame is lost");
    });
}

#[test]
fn no_fault_installs_behind_a_writers_back() {
    two_faults_against_one_unmap(true, true);
}

#[test]
#[should_panic]
fn without_the_writers_fence_one_does() {
    two_faults_against_one_unmap(false, true);
}

#[test]
#[should_panic]
fn without_the_second_look_at_the_sequence_one_does() {
    two_faults_against_one_unmap(true, false);
}

/// mprotect to read-only against a fault that makes the page writable again: once the writer is done
/// and has not run the VMA again, the entry allows no store.
#[test]
fn no_permission_comes_back_behind_a_writers_back() {
    loom::model(|| {
        let mapped = Entry::leaf(FrameNumber(3));
        let page = page(mapped);
        let other = Arc::clone(&page);
        let fault = thread::spawn(move || {
            let Some(seen) = other.sequence.read() else {
                return;
            };
            let Ok(held) = protocol::pin(&other.entry, mapped, &Yield) else {
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
        protocol::settle(&page.entry, &Yield, Entry::read_only);
        fault.join().unwrap();
        assert!(!now(&page).is_writable() && !now(&page).is_locked());
        assert_eq!(now(&page).frame(), FrameNumber(3));
    });
}

/// A writer that comes and goes, and a fault of before: what the fault installs after the VMA runs
/// again is refused, because the sequence has moved on.
#[test]
fn a_fault_of_before_does_not_survive_a_writer_that_is_gone() {
    loom::model(|| {
        let page = page(Entry::NONE);
        let other = Arc::clone(&page);
        let late = thread::spawn(move || {
            let seen = other.sequence.read()?;
            let held = protocol::take(&other.entry, Entry::NONE, &Yield).ok()?;
            let stands = other.sequence.unchanged(seen);
            if stands {
                held.commit(Entry::leaf(FrameNumber(1)));
            } else {
                held.revert();
            }
            Some((seen, stands))
        });
        let found = unmap(&page, true);
        page.sequence.end_write();
        let done = late.join().unwrap();
        match done {
            // Of before: found by the writer, and gone. Of after: there.
            Some((0, true)) => assert!(found.is_present() && now(&page).is_none()),
            Some((_, true)) => assert!(now(&page).is_present()),
            Some((_, false)) | None => assert!(now(&page).is_none()),
        }
    });
}

/// Last-owner reuse against a copy: the copier takes its reference before it looks at the entry
/// again, the owner takes the entry before it looks at the references again. Never do both go on.
#[test]
fn a_page_is_not_written_in_place_while_it_is_copied() {
    loom::model(|| {
        let mapped = Entry::leaf(FrameNumber(3));
        let page = page(mapped);
        let references = Arc::new(AtomicU64::new(1));
        let (other, count) = (Arc::clone(&page), Arc::clone(&references));
        let copier = thread::spawn(move || {
            count.fetch_add(1, Ordering::AcqRel);
            loom::sync::atomic::fence(Ordering::SeqCst);
            let copies = now(&other) == mapped;
            // The copy is installed only if the entry can be taken from the value seen.
            let installed = copies
                && protocol::take(&other.entry, mapped, &Yield).is_ok_and(|held| {
                    held.commit(Entry::leaf(FrameNumber(4)));
                    true
                });
            count.fetch_sub(1, Ordering::AcqRel);
            installed
        });
        let mut reused = false;
        if let Ok(held) = protocol::pin(&page.entry, mapped, &Yield) {
            if references.load(Ordering::Acquire) == 1 {
                held.commit(mapped.writable_dirty());
                reused = true;
            } else {
                held.revert();
            }
        }
        let copied = copier.join().unwrap();
        assert!(!(reused && copied), "written in place and copied");
    });
}
