//! Programs: the whole subsystem, calls and faults, on two CPUs with TLBs. Each access of a program is
//! checked for law 1 (see `models::machine`), each value that it loads for law 2, and the books at the end.
//!
//! Bounds: two threads, at most two forced switches; one or three where it says so.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p faultless --test models loom_space`

use crate::models::machine::{Stage, Toy, map, page, two};
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

/// Runs a program in the space, from its first instruction to its last.
fn running(stage: &Stage<'_>, program: impl FnOnce()) {
    stage.space.activate(stage.cpu);
    program();
    // SAFETY: the program has ended.
    unsafe { stage.space.deactivate(stage.cpu) };
}

/// A program uses a page that is unmapped, and whose frame is another page a moment later.
fn a_program_against_reuse() {
    two(
        Some(3),
        mapped,
        |stage| {
            stage.space.munmap(stage.cpu, page(16), page(2)).unwrap();
            stage.space.fault(stage.cpu, page(21), Access::Write).unwrap();
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
fn a_program_uses_no_frame_that_is_another_s() {
    a_program_against_reuse();
}

/// A program uses a page that is discarded, and whose frame is another page a moment later.
fn a_program_against_a_discard() {
    two(
        Some(3),
        mapped,
        |stage| {
            stage.space.madvise(stage.cpu, page(16), page(2), Advice::DontNeed).unwrap();
            stage.space.fault(stage.cpu, page(21), Access::Write).unwrap();
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

/// A program leaves and comes back, and uses nothing that it knew before.
fn a_program_that_leaves() {
    two(
        BOUND,
        mapped,
        |stage| {
            stage.space.munmap(stage.cpu, page(16), page(2)).unwrap();
            stage.space.fault(stage.cpu, page(21), Access::Write).unwrap();
        },
        |stage| {
            running(stage, || _ = stage.load(16));
            running(stage, || _ = stage.load(16));
        },
        |_| {},
    );
}

#[test]
fn who_comes_back_knows_nothing() {
    a_program_that_leaves();
}

/// Two CPUs that run the space unmap a page each, of which the other has a translation.
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
fn two_that_flush_each_other_get_done() {
    two_that_unmap();
}

/// A program reads untouched memory while another CPU stores to it: once it has heard of the store, it
/// sees it.
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
fn who_hears_of_a_store_sees_it() {
    zeros_against_a_store();
}

/// Memory is made read-only while a program stores to it: once that is done its bytes stay.
fn a_store_against_protection() {
    two(
        BOUND,
        mapped,
        |stage| {
            stage.space.mprotect(stage.cpu, page(16), page(2), Prot::READ).unwrap();
            running(stage, || {
                let before = stage.load(16);
                assert_eq!(stage.load(16), before, "a store to memory that is read-only");
            });
            stage.word.store(1, Ordering::Release);
        },
        |stage| {
            running(stage, || {
                for value in 2..4 {
                    let refused = stage.word.load(Ordering::Acquire) == 1;
                    let done = stage.store(16, value).is_ok();
                    assert!(!(refused && done), "a store to memory that is read-only");
                }
            });
        },
        |_| {},
    );
}

#[test]
fn no_store_goes_to_memory_that_is_read_only() {
    a_store_against_protection();
}

/// A space forks while a program stores to it: what the child has seen stays.
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
fn a_child_keeps_what_it_has_seen() {
    a_store_against_fork();
}

std::thread_local! {
    /// The child of a model that has one before it begins.
    static CHILD: Cell<Option<Space<Toy>>> = const { Cell::new(None) };
}

/// A program stores to a page that its child has, too, while another reads it: once that has heard of the
/// store, it reads the copy.
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
fn who_hears_of_a_store_reads_the_copy() {
    a_copy_against_a_reader();
}

caught! {
    what_was_copied_is_flushed:
        without CopyFlush, a_copy_against_a_reader(), says "a stale owner";
    flush_first_then_let_go:
        without FlushFirst, a_program_against_reuse(), says "a stale owner";
    flush_first_then_let_go_what_is_discarded:
        without FlushFirst, a_program_against_a_discard(), says "a stale owner";
    who_discards_waits_for_the_answer:
        without AwaitAnswers, a_program_against_a_discard(), says "Causality violation";
    who_flushes_waits_for_the_answer:
        without AwaitAnswers, a_program_against_reuse(), says "Causality violation";
    who_answers_has_forgotten:
        without DropTranslations, a_program_against_reuse(), says "Causality violation";
    who_leaves_forgets:
        without LeaveFlush, a_program_that_leaves(), says "Causality violation";
    who_waits_answers:
        without WaiterAnswers, two_that_unmap(), says "maximum number of branches";
    the_first_store_is_flushed:
        without ZeroPageFlush, zeros_against_a_store(), says "a lost write";
    what_is_protected_is_flushed:
        without ProtectFlush, a_store_against_protection(), says "a store to memory";
    what_a_fork_protects_is_flushed:
        without ForkFlush, a_store_against_fork(), says "reached the child";
}
