use super::*;
use std::vec::Vec;

fn numbers(range: Range<u32>) -> Vec<FrameNumber> {
    range.map(FrameNumber).collect()
}

/// Removes all frames, the last frame first.
fn drain(list: &Magazine) -> Vec<u32> {
    core::iter::from_fn(|| list.pop()).map(|frame| frame.0).collect()
}

/// After a refill of four frames a list is full at eight frames, although the array has room for
/// more.
#[test]
fn push_all_respects_the_lowered_limit() {
    let list = Magazine::new();
    list.refill(&numbers(0..4));
    for (size, room) in [(5, false), (BATCH as u32, false), (3, true), (2, false), (1, true)] {
        let before = list.len();
        assert_eq!(list.push_all(&numbers(10 * size..11 * size)), room, "{size} frames");
        let added = if room { size as usize } else { 0 };
        assert_eq!(list.len(), before + added, "{size} frames");
    }
    assert_eq!(list.len(), 8);
    assert!(!list.push(FrameNumber(99)) && !list.push_all(&numbers(99..100)), "full");
    assert!(list.push_all(&[]));
    assert_eq!(drain(&list), [10, 32, 31, 30, 0, 1, 2, 3]);
}

#[test]
fn push_all_fills_a_list_to_its_capacity() {
    let list = Magazine::new();
    let most = CAPACITY as u32;
    assert!(list.push_all(&numbers(0..most - 1)));
    assert!(!list.push_all(&numbers(500..502)));
    assert!(list.push_all(&numbers(500..501)));
    assert!(!list.push_all(&numbers(600..601)));
    assert_eq!(list.len(), CAPACITY);
    assert_eq!(drain(&list)[..2], [500, most - 2]);
}

#[test]
fn a_closed_list_accepts_no_batch() {
    let list = Magazine::closed();
    assert!(!list.push_all(&numbers(0..1)) && !list.is_open());
    assert_eq!((list.len(), list.pop()), (0, None));
}
