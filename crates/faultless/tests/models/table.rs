//! Tables: a fault publishes a missing table, a writer unlinks an empty table, and its frame is
//! reused. The model runs the real calls of a [`Space`] on two CPUs of a small machine. For the
//! epochs, the model runs the real grace periods and entries on a table of one entry.
//!
//! Bounds: two threads, at most three forced switches, two if a CPU moves pages; all executions for
//! the table of one entry.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p faultless --test models --target-dir target/loom table::`

use crate::support::machine::{Stage, map, page, touch, two};
use crate::support::{Fair, explore, local};
use faultless::sync::atomic::{AtomicU64, Ordering};
use faultless::sync::grace::{Grace, RetireLink};
use faultless::sync::sequence::Sequence;
use faultless::table::{Entry, protocol};
use faultless::{Access, FrameNumber, RemapFlags};
use loom::thread;
use std::ptr::NonNull;
use std::sync::Arc;

const BOUND: Option<usize> = Some(3);

/// Maps two VMAs over two last-level tables (pages 16 to 19, and 20 to 23). The second table
/// exists.
fn neighbours(stage: &Stage<'_>) {
    map(stage, 16, 4);
    map(stage, 20, 4);
    stage.space.fault_remote(stage.cpu, page(20), Access::Write).unwrap();
}

/// A fault publishes the table of a VMA during the unmapping of the VMA.
fn publication_against_unmap() {
    two(
        BOUND,
        neighbours,
        |stage| stage.space.munmap(stage.cpu, page(16), page(4)).unwrap(),
        |stage| {
            let _ = stage.space.fault_remote(stage.cpu, page(16), Access::Write);
        },
        // The root, one table of each level, and the last-level table of the remaining VMA.
        |census| assert_eq!(census.tables, 4, "a table without a VMA"),
    );
}

#[test]
fn no_table_is_left_without_a_vma() {
    publication_against_unmap();
}

/// Two CPUs each unmap half of a table's range.
fn two_halves_of_a_table() {
    two(
        BOUND,
        |stage| {
            neighbours(stage);
            stage.space.fault_remote(stage.cpu, page(16), Access::Write).unwrap();
        },
        |stage| stage.space.munmap(stage.cpu, page(16), page(2)).unwrap(),
        |stage| stage.space.munmap(stage.cpu, page(18), page(2)).unwrap(),
        |census| assert_eq!(census.tables, 4, "a table without a VMA"),
    );
}

#[test]
fn a_table_is_freed_with_the_last_vma() {
    two_halves_of_a_table();
}

/// One CPU moves half of a table's range away, and another CPU unmaps the other half.
fn a_move_out_of_half_of_a_table() {
    two(
        Some(2),
        |stage| {
            neighbours(stage);
            stage.space.fault_remote(stage.cpu, page(16), Access::Write).unwrap();
        },
        |stage| {
            let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
            let moved = stage.space.mremap(stage.cpu, page(16), page(2), page(2), flags, page(24));
            assert_eq!(moved, Ok(page(24)));
        },
        |stage| stage.space.munmap(stage.cpu, page(18), page(2)).unwrap(),
        // One more table: the last-level table of the target.
        |census| assert_eq!(census.tables, 5, "a table without a VMA"),
    );
}

#[test]
fn a_table_is_freed_when_the_last_vma_leaves() {
    a_move_out_of_half_of_a_table();
}

/// A fault walks a table that is unlinked, and whose frame becomes a page of a program at once.
fn a_walk_against_reuse() {
    two(
        BOUND,
        |stage| {
            neighbours(stage);
            // There is a table, in which the entry of the other page is empty.
            stage.space.fault_remote(stage.cpu, page(16), Access::Write).unwrap();
        },
        |stage| {
            stage.space.munmap(stage.cpu, page(16), page(4)).unwrap();
            // The first gets the frame of the page, the second that of the table.
            for number in [21, 22] {
                let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
                let read = touch(stage.cpu, stage.space, page(number), Access::Write, load);
                assert_eq!(read, Ok(0), "a walk wrote into a page");
            }
        },
        |stage| {
            let _ = stage.space.fault_remote(stage.cpu, page(18), Access::Write);
        },
        |_| {},
    );
}

#[test]
fn no_walk_writes_into_a_page() {
    a_walk_against_reuse();
}

/// A table of one entry, in a frame that later becomes a page.
#[repr(C)]
struct Table {
    link: RetireLink,
    above: AtomicU64,
    entry: AtomicU64,
    sequence: Sequence,
}

/// As [`a_walk_against_reuse`], with only the entries, the sequence and the grace period.
fn an_entry_against_reuse() {
    explore(None, || {
        let table = Table {
            link: RetireLink::new(0),
            above: AtomicU64::new(Entry::table(FrameNumber(1)).0),
            entry: AtomicU64::new(Entry::NONE.0),
            sequence: Sequence::new(),
        };
        let shared = Arc::new((Grace::try_new(2).unwrap(), table));
        let fault = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let (grace, table) = &*shared;
                let here = local(1);
                let _section = grace.enter(&here);
                let seen = table.sequence.read()?;
                if !Entry(table.above.load(Ordering::Acquire)).is_table() {
                    return None;
                }
                let held = protocol::take(&table.entry, Entry::NONE, &Fair).ok()?;
                if table.sequence.unchanged(seen) {
                    held.commit(Entry::leaf(FrameNumber(2)));
                    return Some(());
                }
                held.revert();
                None
            })
        };
        let (grace, table) = &*shared;
        let here = local(0);
        table.sequence.begin_write();
        Sequence::writer_fence();
        protocol::wait_and_replace(&table.entry, &Fair, |_| Entry::NONE);
        protocol::wait_and_replace(&table.above, &Fair, |_| Entry::NONE);
        // SAFETY: unlinked just now, once; the table lives as long as the model.
        unsafe { grace.retire(&here, NonNull::from(&table.link)) };
        for _ in 0..3 {
            for _ in grace.collect(&here) {
                let before = table.entry.swap(7, Ordering::AcqRel);
                assert_eq!(before, 0, "a walk is still active");
                let after = table.entry.load(Ordering::Acquire);
                assert_eq!(after, 7, "a walk wrote into a page");
            }
        }
        fault.join().unwrap();
        let last = table.entry.load(Ordering::Acquire);
        assert!(last == 0 || last == 7, "a walk is still active: {last:#x}");
    });
}

#[test]
fn no_walk_is_left_when_a_frame_is_reused() {
    an_entry_against_reuse();
}

caught! {
    a_table_is_published_while_its_vma_is_in_force:
        without TableValidated, publication_against_unmap(), says "a table without a VMA";
    an_unmapping_checks_again_in_the_step:
        without UnmapLooksAgain, two_halves_of_a_table(), says "a table without a VMA";
    a_move_checks_again_in_the_step:
        without UnmapLooksAgain, a_move_out_of_half_of_a_table(), says "a table without a VMA";
    a_table_is_freed_after_a_grace_period:
        without TableGrace, a_walk_against_reuse(), says "Causality violation";
    the_second_epoch_keeps_a_walk:
        without SecondEpoch, an_entry_against_reuse(), says "a walk is still active";
    the_marks_keep_a_walk:
        without LookAtMarks, an_entry_against_reuse(), says "a walk is still active";
    the_mark_of_a_section_keeps_a_walk:
        without SectionMark, an_entry_against_reuse(), says "a walk is still active";
}
