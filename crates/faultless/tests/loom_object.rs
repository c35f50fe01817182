//! Pages that come into an object and leave it, under every interleaving and every reordering that the
//! model checker knows.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p faultless --test loom_object`
#![cfg(loom)]

use faultless::FrameNumber;
use faultless::sync::wait::Wait;
use faultless::table::{Entry, protocol};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use loom::thread;

struct Yield;

impl Wait for Yield {
    fn wait(&self, _: u32) {
        thread::yield_now();
    }
}

/// An object of one page that is shortened to none while somebody puts the page in place, as
/// `Object::page` and `Object::set_pages` do it: when both are done nothing is beyond the end.
fn a_page_against_truncation(look_again: bool, full_fence: bool) {
    loom::model(move || {
        let object = Arc::new((AtomicU64::new(Entry::NONE.0), AtomicU64::new(1)));
        let other = Arc::clone(&object);
        let maker = thread::spawn(move || {
            let (entry, pages) = &*other;
            if pages.load(Ordering::Acquire) == 0 {
                return false;
            }
            let Ok(held) = protocol::take(entry, Entry::NONE, &Yield) else {
                return false;
            };
            if look_again && pages.load(Ordering::Acquire) == 0 {
                held.revert();
                return false;
            }
            held.commit(Entry::leaf(FrameNumber(1)));
            true
        });
        let (entry, pages) = &*object;
        pages.swap(0, Ordering::SeqCst);
        if full_fence {
            fence(Ordering::SeqCst);
        }
        let (found, _) = protocol::settle(entry, &Yield, |_| Entry::NONE);
        let made = maker.join().unwrap();
        let left = Entry(entry.load(Ordering::Acquire));
        assert!(left.is_none(), "{left:?} is beyond the end");
        assert_eq!(made, found.is_present(), "a frame is lost");
    });
}

#[test]
fn no_page_is_beyond_the_end() {
    a_page_against_truncation(true, true);
}

#[test]
#[should_panic]
fn without_the_second_look_at_the_length_one_is() {
    a_page_against_truncation(false, true);
}

#[test]
#[should_panic]
fn without_the_fence_of_who_shortens_one_is() {
    a_page_against_truncation(true, false);
}

/// What a frame is: its references, and in which of its lives it is.
struct Frame {
    entry: AtomicU64,
    references: AtomicU32,
    life: AtomicU32,
}

/// Somebody takes a reference to an object's page, as `Object::refer` does it, while the page leaves the
/// object and its frame is used for something else: who has a reference has it to the page.
fn a_reference_against_reuse(look_again: bool, publish: Ordering) {
    loom::model(move || {
        let named = Entry::leaf(FrameNumber(1));
        let frame = Arc::new(Frame {
            entry: AtomicU64::new(named.0),
            references: AtomicU32::new(1),
            life: AtomicU32::new(0),
        });
        let other = Arc::clone(&frame);
        let user = thread::spawn(move || {
            if Entry(other.entry.load(Ordering::Acquire)) != named {
                return;
            }
            let more = |now| (now != 0).then_some(now + 1);
            let (acquire, relaxed) = (Ordering::Acquire, Ordering::Relaxed);
            if other.references.fetch_update(acquire, relaxed, more).is_err() {
                return;
            }
            if !look_again || Entry(other.entry.load(Ordering::Acquire)) == named {
                assert_eq!(other.life.load(Ordering::Relaxed), 0, "somebody else's");
            }
            other.references.fetch_sub(1, Ordering::Release);
        });
        protocol::settle(&frame.entry, &Yield, |_| Entry::NONE);
        if frame.references.fetch_sub(1, Ordering::Release) == 1 {
            fence(Ordering::Acquire);
            frame.life.store(1, Ordering::Relaxed);
            frame.references.store(1, publish);
        }
        user.join().unwrap();
    });
}

#[test]
fn a_reference_is_to_the_page_that_was_found() {
    a_reference_against_reuse(true, Ordering::Release);
}

#[test]
#[should_panic]
fn without_the_second_look_at_the_entry_it_may_be_to_another() {
    a_reference_against_reuse(false, Ordering::Release);
}

#[test]
#[should_panic]
fn a_relaxed_count_of_the_next_life_lets_it_be_to_another() {
    a_reference_against_reuse(true, Ordering::Relaxed);
}
