//! The owner of a space used by one CPU only: no other CPU reads memory during the owner's changes
//! in place.
//!
//! Bounds: two threads, all executions; three threads, at most three forced switches.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p faultless --test models --target-dir target/loom owner::`

use crate::support::{Fair, Guarded, explore, local};
use faultless::CpuId;
use faultless::sync::atomic::{AtomicBool, Ordering};
use faultless::sync::grace::Grace;
use faultless::sync::owner::Owner;
use loom::thread;
use std::sync::Arc;

/// The state initially owned by CPU 0.
struct Shared {
    grace: Grace,
    owner: Owner,
    /// Changed in place.
    tree: Guarded,
    /// A lock under which the tree is read without a section.
    locked: AtomicBool,
}

impl Shared {
    fn new() -> Arc<Self> {
        let (grace, owner) = (Grace::try_new(3).unwrap(), Owner::new(CpuId(0)));
        Arc::new(Self { grace, owner, tree: Guarded::new(), locked: AtomicBool::new(false) })
    }

    /// One call of `cpu`, which changes the tree in place if possible. Returns whether the change
    /// was made in place.
    fn edits(&self, cpu: u16) -> bool {
        let held = self.owner.hold(CpuId(cpu), &Fair);
        if held.is_some() {
            self.tree.add();
        }
        held.is_some()
    }

    /// Reads the tree twice in a section. The value does not change in between.
    fn reads(&self, cpu: u16) -> u32 {
        let here = local(cpu);
        let section = self.grace.enter(&here);
        self.owner.share(&section, CpuId(cpu), &Fair);
        let seen = self.tree.get();
        thread::yield_now();
        assert_eq!(self.tree.get(), seen);
        seen
    }
}

/// One CPU edits in place, and another CPU begins to read.
fn an_edit_against_a_joining_cpu() {
    explore(None, || {
        let shared = Shared::new();
        let editor = {
            let shared = shared.clone();
            thread::spawn(move || u32::from(shared.edits(0)) + u32::from(shared.edits(0)))
        };
        let seen = shared.reads(1);
        assert_eq!(editor.join().unwrap(), seen, "all in-place edits came before");
        assert!(!shared.edits(0) && !shared.edits(1));
    });
}

#[test]
fn a_joining_cpu_sees_all_edits_of_the_owner() {
    an_edit_against_a_joining_cpu();
}

/// One CPU tries to own shared state, while another CPU reads in a section.
fn a_try_against_a_reader() {
    explore(None, || {
        let shared = Shared::new();
        shared.reads(1);
        let reader = {
            let shared = shared.clone();
            thread::spawn(move || shared.reads(1))
        };
        let owns = shared.owner.try_take(CpuId(0), &shared.grace, || true);
        let edited = shared.edits(0);
        assert!(owns || !edited);
        reader.join().unwrap();
        assert_eq!(shared.tree.get(), u32::from(edited));
    });
}

#[test]
fn a_reader_prevents_ownership() {
    a_try_against_a_reader();
}

/// One CPU tries to own shared state, while another CPU reads under a lock. The reader checks the
/// owner once, in a section.
fn a_try_against_a_lock() {
    explore(None, || {
        let shared = Shared::new();
        shared.reads(1);
        let reader = {
            let shared = shared.clone();
            thread::spawn(move || {
                let here = local(1);
                assert!(!shared.locked.swap(true, Ordering::SeqCst));
                let section = shared.grace.enter(&here);
                shared.owner.share(&section, CpuId(1), &Fair);
                drop(section);
                let _seen = shared.tree.get();
                shared.locked.store(false, Ordering::Release);
            })
        };
        let free = || !shared.locked.load(Ordering::Acquire);
        let owns = shared.owner.try_take(CpuId(0), &shared.grace, free);
        let edited = shared.edits(0);
        assert!(owns || !edited);
        reader.join().unwrap();
        assert_eq!(shared.tree.get(), u32::from(edited));
    });
}

#[test]
fn a_lock_prevents_ownership() {
    a_try_against_a_lock();
}

/// One CPU takes over the ownership from another CPU, which reads, and then edits if still
/// possible.
fn a_take_over() {
    explore(None, || {
        let shared = Shared::new();
        let other = {
            let shared = shared.clone();
            thread::spawn(move || {
                shared.reads(0);
                u32::from(shared.edits(0))
            })
        };
        let owns = shared.owner.try_take(CpuId(1), &shared.grace, || true);
        let edits = u32::from(shared.edits(1));
        assert!(owns || edits == 0);
        let all = other.join().unwrap() + edits;
        assert_eq!(shared.tree.get(), all);
    });
}

#[test]
fn a_take_over_leaves_one_owner() {
    a_take_over();
}

/// A reader joins while one CPU takes over from another.
#[test]
fn a_reader_joins_during_a_take_over() {
    explore(Some(3), || {
        let shared = Shared::new();
        let editor = {
            let shared = shared.clone();
            thread::spawn(move || shared.edits(0))
        };
        let taker = {
            let shared = shared.clone();
            thread::spawn(move || {
                shared.owner.try_take(CpuId(1), &shared.grace, || true);
                shared.edits(1)
            })
        };
        let seen = shared.reads(2);
        let edits = u32::from(editor.join().unwrap()) + u32::from(taker.join().unwrap());
        // The taker may come after the reader.
        assert!(seen <= edits && edits == shared.tree.get());
    });
}

caught! {
    a_joining_cpu_waits_for_the_owner:
        without JoinAwaitsOwner, an_edit_against_a_joining_cpu(), says "Causality violation";
    trying_to_own_checks_sections:
        without TryLooks, a_try_against_a_reader(), says "Causality violation";
    a_take_over_checks_sections:
        without TryLooks, a_take_over(), says "Causality violation";
    a_section_needs_its_mark:
        without SectionMark, a_try_against_a_reader(), says "Causality violation";
    a_section_needs_its_barrier:
        without SectionFence, a_try_against_a_reader(), says "Causality violation";
}
