//! Objects: pages come into one and leave it. The real calls of [`Object`], on two CPUs of a small
//! machine.
//!
//! Bounds: two threads, at most three forced switches.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p faultless --test loom_object`
#![cfg(loom)]

#[macro_use]
mod models;

use faultless::sync::atomic::{AtomicU64, Ordering};
use faultless::{Cpu, CpuId, Object, Shared, Vm};
use loom::thread;
use models::explore;
use models::machine::{Toy, cpu};
use std::sync::Arc;

const BOUND: Option<usize> = Some(3);

/// Runs `left` on CPU 0 and `right` on CPU 1, with an object of one page. At the end no frame is lost.
fn two(
    before: fn(&Cpu<'_, Toy>, &Object),
    left: fn(&Cpu<'_, Toy>, &Object),
    right: fn(&Cpu<'_, Toy>, &Object),
) {
    explore(BOUND, move || {
        let vm = Toy::vm(2, 14);
        let here = cpu(&vm, CpuId(0));
        let object = Object::try_new(&here, 1, 0).unwrap();
        before(&here, &object);
        let other = {
            let (vm, object): (Arc<Vm<Toy>>, Shared<Object>) = (Arc::clone(&vm), object.clone());
            thread::spawn(move || {
                let there = cpu(&vm, CpuId(1));
                right(&there, &object);
                Object::release(object, &there);
                there.drain();
            })
        };
        left(&here, &object);
        other.join().unwrap();
        assert_eq!(object.has_page(&here, 0), object.pages() == 1, "a page is beyond the end");
        Object::release(object, &here);
        here.drain();
        let census = vm.audit(&here).unwrap();
        assert_eq!((census.free, census.zero), (13, 1), "a frame is lost");
    });
}

/// The word of a page.
fn word(bytes: *const u8) -> &'static AtomicU64 {
    // SAFETY: a page of this machine is an array of words, which outlives its use.
    unsafe { &*bytes.cast() }
}

/// An object is shortened to nothing while somebody writes its page.
fn a_page_against_truncation() {
    two(
        |_, _| {},
        |cpu, object| object.set_pages(cpu, 0).unwrap(),
        |cpu, object| {
            let _ = object.write_page(cpu, 0, |bytes| word(bytes).store(1, Ordering::Relaxed));
        },
    );
}

#[test]
fn no_page_is_beyond_the_end() {
    a_page_against_truncation();
}

/// An object loses its page, whose frame another object then uses, while somebody reads the page.
fn a_reference_against_reuse() {
    two(
        |cpu, object| {
            object.write_page(cpu, 0, |bytes| word(bytes).store(1, Ordering::Relaxed)).unwrap();
        },
        |cpu, object| {
            object.set_pages(cpu, 0).unwrap();
            let next = Object::try_new(cpu, 1, 0).unwrap();
            next.write_page(cpu, 0, |bytes| word(bytes).store(2, Ordering::Relaxed)).unwrap();
            Object::release(next, cpu);
        },
        |cpu, object| {
            object.read_page(cpu, 0, |bytes| {
                if let Some(bytes) = bytes {
                    assert_eq!(word(bytes).load(Ordering::Relaxed), 1, "somebody else's page");
                }
            });
        },
    );
}

#[test]
fn a_reference_is_to_the_page_that_was_found() {
    a_reference_against_reuse();
}

caught! {
    who_shortens_needs_its_fence:
        without TruncateFence, a_page_against_truncation(), says "a page is beyond the end";
    who_makes_a_page_looks_at_the_length_again:
        without ObjectLooksAgain, a_page_against_truncation(), says "a page is beyond the end";
    who_shortens_waits_for_who_makes_a_page:
        without SettleWaits, a_page_against_truncation(), says "a frame is lost";
    who_finds_a_page_looks_at_its_entry_again:
        without ReferLooksAgain, a_reference_against_reuse(), says "somebody else's page";
    the_next_life_begins_with_a_release:
        without FreshCountReleases, a_reference_against_reuse(), says "Causality violation";
}
