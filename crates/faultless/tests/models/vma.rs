//! The memory of a VMA, which is reused while a CPU still has a hint for the former VMA.
//!
//! Bounds: two threads, all executions.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p faultless --test models --target-dir target/loom vma::`

use crate::support::{Guarded, explore, local};
use faultless::sync::grace::{Grace, RetireLink};
use faultless::sync::sequence::Sequence;
use loom::thread;
use std::ptr::NonNull;
use std::sync::Arc;

/// The memory of a VMA.
#[repr(C)]
struct Memory {
    link: RetireLink,
    sequence: Sequence,
    /// The attributes: plain memory, written when the memory is reused.
    attributes: Guarded,
}

/// A fault finds a VMA by its hint, which was stored before, while another CPU replaces the VMA and
/// reuses its memory.
fn a_hint_against_reuse() {
    explore(None, || {
        let memory = Memory {
            link: RetireLink::new(7),
            sequence: Sequence::new(),
            attributes: Guarded::new(),
        };
        let seen = memory.sequence.read().unwrap();
        let shared = Arc::new((Grace::try_new(2).unwrap(), memory));
        let fault = {
            let shared = shared.clone();
            thread::spawn(move || {
                let (grace, vma) = &*shared;
                let here = local(0);
                for _ in 0..2 {
                    let _section = grace.enter(&here);
                    if vma.sequence.is_still(seen) {
                        // The model checker reports a write not ordered after this read.
                        assert_eq!(vma.attributes.get(), 0, "the attributes of another VMA");
                    }
                }
            })
        };
        let (grace, vma) = &*shared;
        let here = local(1);
        vma.sequence.begin_write();
        Sequence::writer_fence();
        // SAFETY: detached just now, once; the memory lives as long as the model.
        unsafe { grace.retire(&here, NonNull::from(&vma.link)) };
        for _ in 0..3 {
            for _ in grace.collect(&here) {
                vma.sequence.detach();
                vma.attributes.add();
                vma.sequence.end_write();
            }
        }
        fault.join().unwrap();
        let reused = vma.sequence.read();
        assert_eq!(reused.is_some(), vma.attributes.get() == 1);
        assert_ne!(reused, Some(seen), "a sequence that repeats");
    });
}

#[test]
fn a_fault_uses_no_reused_memory() {
    a_hint_against_reuse();
}

caught! {
    a_hint_needs_its_check:
        without HintLooks, a_hint_against_reuse(), says "Causality violation";
    a_hint_needs_the_section:
        without SectionMark, a_hint_against_reuse(), says "Causality violation";
    a_hint_needs_two_epochs:
        without SecondEpoch, a_hint_against_reuse(), says "Causality violation";
}
