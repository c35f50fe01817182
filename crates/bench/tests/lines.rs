//! The third law, counted: a successful speculative fault writes one shared cache line, the line of
//! the entry. Also checks the counts of lines written by calls.
#![cfg(feature = "observe")]

use faultless::Locking;
use faultless_bench::lines::calls::{self, Call};
use faultless_bench::lines::huge::{self, Leaves};
use faultless_bench::lines::{
    FETCH, Kind, Line, WINDOW, Written, count, count_ahead, promised, run,
};

fn each(kind: Kind, locking: Locking, check: impl Fn(&Written)) {
    let faults = count(kind, locking).unwrap();
    assert_eq!(faults.len(), 64);
    faults.iter().for_each(check);
}

#[test]
fn speculative_fault_writes_only_the_line_of_the_entry() {
    for kind in [Kind::Write, Kind::PooledWrite, Kind::Read, Kind::Reuse] {
        each(kind, Locking::Speculative, |written| {
            assert_eq!(written.of(Line::Entry), 1, "{kind:?}: {written:?}");
            assert_eq!(written.shared(), 1, "{kind:?}: {written:?}");
        });
    }
}

#[test]
fn copy_or_file_fault_also_writes_the_count_of_its_frame() {
    for kind in [Kind::Copy, Kind::FileRead, Kind::FileWrite, Kind::FileCopy] {
        each(kind, Locking::Speculative, |written| {
            let shared = [Line::Entry, Line::Source].map(|line| written.of(line));
            assert_eq!((shared, written.shared()), ([1, 1], 2), "{kind:?}: {written:?}");
        });
    }
}

/// The entries of the page in the page table and in the memory object, which has the dirty bit.
#[test]
fn first_write_to_a_stored_page_writes_two_entries() {
    each(Kind::StoredWrite, Locking::Speculative, |written| {
        let shared = [Line::Entry, Line::Source].map(|line| written.of(line));
        assert_eq!((shared, written.shared()), ([2, 1], 3), "{written:?}");
    });
}

/// The entry above the last level, and the first frame of the folio, which counts its leaves. The
/// first leaf adds a reference to every frame.
#[test]
fn huge_leaf_writes_its_entry_and_the_count_of_its_folio() {
    let Leaves { first, more } = huge::count(Locking::Speculative).unwrap();
    assert_eq!(more.len(), 64);
    for written in more {
        let shared = [Line::Entry, Line::Source].map(|line| written.of(line));
        assert_eq!((shared, written.shared()), ([1, 1], huge::PROMISED), "{written:?}");
    }
    let shared = [Line::Entry, Line::Source].map(|line| first.of(line));
    assert_eq!((shared, first.shared()), ([1, 512], huge::FIRST), "{first:?}");
}

#[test]
fn window_writes_the_line_of_its_entries_and_rarely_the_allocator() {
    for pooled in [false, true] {
        let faults = count_ahead(pooled).unwrap();
        assert!(faults.len() > 40, "{pooled}: {}", faults.len());
        let (few, many): (Vec<_>, Vec<_>) =
            faults.iter().partition(|written| written.shared() == 1);
        for written in few {
            let own = [Line::Entry, Line::Installed].map(|line| written.of(line));
            assert_eq!(own, [1, WINDOW], "{pooled}: {written:?}");
        }
        assert!(many.len() <= faults.len().div_ceil(FETCH), "{pooled}: {many:?}");
    }
}

#[test]
fn faults_under_a_lock_write_more_lines() {
    for kind in Kind::ALL {
        for locking in [Locking::MmapLock, Locking::PerVma] {
            each(kind, locking, |written| {
                assert!(written.of(Line::Other) > 0, "{kind:?} {locking:?}: {written:?}");
                assert!(written.shared() > promised(kind), "{kind:?} {locking:?}: {written:?}");
            });
        }
    }
    for locking in [Locking::MmapLock, Locking::PerVma] {
        for written in huge::count(locking).unwrap().more {
            assert!(written.of(Line::Other) > 0, "{locking:?}: {written:?}");
            assert!(written.shared() > huge::PROMISED, "{locking:?}: {written:?}");
        }
    }
}

/// Checks the counting: a write fault writes its own frame's metadata and its CPU's counters, which
/// are detected and distinguished from the shared line.
#[test]
fn private_lines_are_detected_and_distinguished() {
    each(Kind::Write, Locking::Speculative, |written| {
        assert_eq!(written.of(Line::Installed), 1, "{written:?}");
        assert!(written.of(Line::Own) >= 2, "{written:?}");
    });
    each(Kind::Read, Locking::Speculative, |written| {
        assert_eq!(written.of(Line::Installed), 0, "{written:?}");
    });
}

#[test]
fn bench_gates_are_met() {
    let report = run().unwrap();
    assert!(report.met(), "{:?}", report.gates());
}

/// Counts calls with each CPU in its own part: their shared lines are the same each time, and
/// private lines are distinguished.
#[test]
fn lines_of_calls_are_counted_exactly() {
    for call in Call::ALL {
        for vmas in calls::VMAS {
            let count = || calls::count(call, Locking::Speculative, vmas).unwrap();
            let written = count();
            assert_eq!(written, count(), "{call:?}, {vmas} VMAs");
            assert_eq!(written.len(), 64);
            for written in written {
                // At least the claim and the counters are private to the CPU.
                assert!(written.lines >= written.shared() + 2, "{call:?}, {vmas}: {written:?}");
            }
        }
    }
}

/// Calls of two CPUs on separate VMAs write no common line of the tree, because each CPU has its
/// own shard. Both write a word of the set of CPUs that may have claims, because here they leave
/// the space between their calls, and sometimes an epoch.
#[test]
fn calls_on_separate_vmas_share_no_line_of_the_tree() {
    for call in Call::ALL.into_iter().filter(|call| !call.name().ends_with("_touched")) {
        for vmas in [2, 64] {
            for written in calls::count(call, Locking::Speculative, vmas).unwrap() {
                let tree = written.shared.keys().find(|file| file.contains("space/"));
                assert_eq!(tree, None, "{call:?}, {vmas} VMAs: {written:?}");
            }
        }
    }
    // Halves of one VMA mapped by one table are in one shard.
    let halves = calls::count(Call::MunmapSplitting, Locking::Speculative, 1).unwrap();
    assert!(halves.iter().any(|written| written.shared.contains_key("space/tree.rs")));
}

/// A global lock is a line shared by every call, and the file that writes the line shows this.
#[test]
fn calls_under_one_lock_share_its_line() {
    for call in Call::ALL {
        for written in calls::count(call, Locking::MmapLock, 2).unwrap() {
            assert_eq!(written.shared.get("sync/rwlock.rs"), Some(&1), "{call:?}: {written:?}");
        }
        for written in calls::count(call, Locking::Speculative, 2).unwrap() {
            assert_eq!(written.shared.get("sync/rwlock.rs"), None, "{call:?}: {written:?}");
        }
    }
}
