//! Programs: the whole subsystem, calls and faults, on two CPUs with TLBs. Each access of a program
//! is checked for law 1 (see `support::machine`), each loaded value for law 2, and the audit runs
//! at the end.
//!
//! Bounds: two threads, at most two forced switches; one or three if a model says so.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p faultless --test models --target-dir target/loom space::`

use crate::support::machine::{Stage, Toy, map, page, two};
use faultless::sync::atomic::Ordering;
use faultless::{Access, Advice, Prot, Space};
use std::cell::Cell;

const BOUND: Option<usize> = Some(2);

/// Four pages, and the tables of their neighbours.
fn mapped(stage: &Stage<'_>) {
    map(stage, 16, 2);
    map(stage, 20, 2);
    stage.store(16, 1).unwrap();
    stage.store(20, 1).unwrap();
}

/// Runs a complete program in the space.
fn running(stage: &Stage<'_>, program: impl FnOnce()) {
    stage.space.activate(stage.cpu);
    program();
    // SAFETY: the program has ended.
    unsafe { stage.space.deactivate(stage.cpu) };
}

/// A program uses a page that is unmapped, and whose frame becomes another page at once.
fn a_program_against_reuse() {
    two(
        Some(3),
        mapped,
        |stage| {
            stage.space.munmap(stage.cpu, page(16), page(2)).unwrap();
            stage.space.fault_remote(stage.cpu, page(21), Access::Write).unwrap();
        },
        |stage| {
            running(stage, || {
                for _ in 0..2 {
                    if let Ok(value) = stage.load(16) {
                        assert_eq!(value, 1, "a lost write");
                    }
                }
            });
        },
        |_| {},
    );
}

#[test]
fn a_program_uses_no_frame_of_another_owner() {
    a_program_against_reuse();
}

/// A program uses a page that is discarded, and whose frame becomes another page at once.
fn a_program_against_a_discard() {
    two(
        Some(3),
        mapped,
        |stage| {
            stage.space.madvise(stage.cpu, page(16), page(2), Advice::DontNeed).unwrap();
            stage.space.fault_remote(stage.cpu, page(21), Access::Write).unwrap();
        },
        |stage| {
            running(stage, || {
                let first = stage.load(16).unwrap();
                let second = stage.load(16).unwrap();
                assert!(first <= 1 && second <= first, "{first} and then {second}");
            });
        },
        |_| {},
    );
}

#[test]
fn a_program_sees_the_old_page_or_zeros() {
    a_program_against_a_discard();
}

/// A program leaves and comes back, and uses no old translation.
fn a_program_that_leaves() {
    two(
        BOUND,
        mapped,
        |stage| {
            stage.space.munmap(stage.cpu, page(16), page(2)).unwrap();
            stage.space.fault_remote(stage.cpu, page(21), Access::Write).unwrap();
        },
        |stage| {
            running(stage, || _ = stage.load(16));
            running(stage, || _ = stage.load(16));
        },
        |_| {},
    );
}

#[test]
fn a_returning_program_has_no_translations() {
    a_program_that_leaves();
}

/// Two CPUs that run the space each unmap a page for which the other CPU has a translation.
fn two_that_unmap() {
    two(
        Some(1),
        |stage| {
            map(stage, 16, 1);
            map(stage, 20, 1);
        },
        |stage| {
            running(stage, || {
                let _ = stage.store(20, 1);
                stage.space.munmap(stage.cpu, page(16), page(1)).unwrap();
            });
        },
        |stage| {
            running(stage, || {
                let _ = stage.store(16, 1);
                stage.space.munmap(stage.cpu, page(20), page(1)).unwrap();
            });
        },
        |_| {},
    );
}

#[test]
fn two_cpus_that_flush_each_other_finish() {
    two_that_unmap();
}

/// A program reads untouched memory while another CPU stores to the page: after a message about the
/// store, the program reads the new value.
fn zeros_against_a_store() {
    two(
        Some(1),
        |stage| map(stage, 16, 1),
        |stage| {
            running(stage, || {
                stage.store(16, 5).unwrap();
                stage.word.store(1, Ordering::Release);
            });
        },
        |stage| {
            running(stage, || {
                let _ = stage.load(16);
                let heard = stage.word.load(Ordering::Acquire) == 1;
                let value = stage.load(16);
                assert!(!heard || value == Ok(5), "a lost write");
            });
        },
        |_| {},
    );
}

#[test]
fn a_store_is_visible_after_a_message() {
    zeros_against_a_store();
}

/// Memory becomes read-only while a program stores to the page: after the call, the bytes stay
/// unchanged.
fn a_store_against_protection() {
    two(
        BOUND,
        mapped,
        |stage| {
            stage.space.mprotect(stage.cpu, page(16), page(2), Prot::READ).unwrap();
            running(stage, || {
                let before = stage.load(16);
                assert_eq!(stage.load(16), before, "a store to read-only memory");
            });
            stage.word.store(1, Ordering::Release);
        },
        |stage| {
            running(stage, || {
                for value in 2..4 {
                    let refused = stage.word.load(Ordering::Acquire) == 1;
                    let done = stage.store(16, value).is_ok();
                    assert!(!(refused && done), "a store to read-only memory");
                }
            });
        },
        |_| {},
    );
}

#[test]
fn no_store_reaches_read_only_memory() {
    a_store_against_protection();
}

/// A space forks while a program stores: the values seen by the child stay.
fn a_store_against_fork() {
    two(
        BOUND,
        mapped,
        |stage| {
            let child = stage.space.fork(stage.cpu).unwrap();
            let inside = Stage { space: &child, ..*stage };
            running(&inside, || {
                let before = inside.load(16);
                stage.word.store(1, Ordering::Release);
                assert_eq!(inside.load(16), before, "a store of the parent reached the child");
            });
            child.exit(stage.cpu);
        },
        |stage| {
            running(stage, || {
                stage.store(16, 2).unwrap();
                stage.store(16, 3).unwrap();
                assert_eq!(stage.load(16), Ok(3), "a lost write");
            });
        },
        |_| {},
    );
}

#[test]
fn a_child_keeps_the_values_it_has_seen() {
    a_store_against_fork();
}

std::thread_local! {
    /// The child of a model that forks before it begins.
    static CHILD: Cell<Option<Space<Toy>>> = const { Cell::new(None) };
}

/// A program stores to a page shared with its child, while another program reads the page: after a
/// message about the store, the reader reads the copy.
fn a_copy_against_a_reader() {
    two(
        Some(1),
        |stage| {
            map(stage, 16, 1);
            stage.store(16, 1).unwrap();
            CHILD.set(Some(stage.space.fork(stage.cpu).unwrap()));
        },
        |stage| {
            let child = CHILD.take().expect("born before");
            running(stage, || {
                stage.store(16, 5).unwrap();
                stage.word.store(1, Ordering::Release);
            });
            child.exit(stage.cpu);
        },
        |stage| {
            running(stage, || {
                let _ = stage.load(16);
                let heard = stage.word.load(Ordering::Acquire) == 1;
                let value = stage.load(16);
                assert!(!heard || value == Ok(5), "a lost write");
            });
        },
        |_| {},
    );
}

#[test]
fn the_copy_is_visible_after_a_message() {
    a_copy_against_a_reader();
}

caught! {
    a_copied_page_is_flushed:
        without CopyFlush, a_copy_against_a_reader(), says "a stale owner";
    an_unmapping_flushes_before_the_frame_is_freed:
        without FlushFirst, a_program_against_reuse(), says "a stale owner";
    a_discard_flushes_before_the_frame_is_freed:
        without FlushFirst, a_program_against_a_discard(), says "a stale owner";
    a_discard_waits_for_the_acknowledgement:
        without AwaitAnswers, a_program_against_a_discard(), says "Causality violation";
    the_sender_waits_for_the_acknowledgement:
        without AwaitAnswers, a_program_against_reuse(), says "Causality violation";
    an_acknowledging_cpu_has_dropped_the_translations:
        without DropTranslations, a_program_against_reuse(), says "Causality violation";
    a_leaving_cpu_drops_its_translations:
        without LeaveFlush, a_program_that_leaves(), says "Causality violation";
    a_waiting_cpu_serves_requests:
        without WaiterServes, two_that_unmap(), says "maximum number of branches";
    the_first_store_is_flushed:
        without ZeroPageFlush, zeros_against_a_store(), says "a lost write";
    protected_memory_is_flushed:
        without ProtectFlush, a_store_against_protection(), says "a store to read-only memory";
    memory_protected_by_a_fork_is_flushed:
        without ForkFlush, a_store_against_fork(), says "reached the child";
}
