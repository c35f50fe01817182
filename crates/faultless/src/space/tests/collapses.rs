//! Collapse: mapped base pages become a huge leaf, or the call reports the reason for the failure.

use crate::error::Errno;
use crate::fault::FaultKind;
use crate::fault::tests::huge::{F, FRAMES, PAGES, RWX, RX, Setup, each_policy};
use crate::knob::{HugeText, Setting};
use crate::space::{Advice, Space};
use crate::stat::Counter;
use crate::testing::guest::{self, AT, P, PRIVATE, RW, SHARED, TestVm, load, map_object, store};

#[test]
fn base_pages_in_use_collapse() {
    each_policy(|vm| {
        vm.set(Setting::HugeText(HugeText::Never));
        let setup = Setup::mapped(vm, RX, PRIVATE);
        (0..F).for_each(|page| assert_eq!(setup.load(page), Ok(page + 1)));
        assert_eq!(setup.load(F), Ok(F + 1));
        let collapse_all = |least| {
            let mut from = Some(0);
            while let Some(at) = from {
                from = setup.space.collapse_text(&setup.cpu, at, least);
            }
        };
        collapse_all(1);
        assert_eq!(setup.huge(), 0, "the knob is off");
        vm.set(Setting::HugeText(HugeText::Always));
        collapse_all(300);
        assert_eq!((setup.huge(), setup.count(Counter::ThpCollapsed)), (F, 1));
        setup.check();
        let faults = setup.count(Counter::Faults);
        (0..F).for_each(|page| assert_eq!(setup.load(page), Ok(page + 1)));
        assert_eq!(setup.count(Counter::Faults), faults);
        collapse_all(1);
        assert_eq!(setup.huge(), 2 * F);
        setup.shows_all();
        setup.finish();
    });
}

/// Text in base pages, ten of each folio's accessed.
fn used(vm: &TestVm) -> Setup<'_> {
    vm.set(Setting::HugeText(HugeText::Never));
    vm.set(Setting::FaultAroundPages(1));
    let setup = Setup::mapped(vm, RX, PRIVATE);
    [0, F].into_iter().flat_map(|first| first..first + 10).for_each(|page| {
        assert_eq!(setup.load(page), Ok(page + 1));
    });
    vm.set(Setting::HugeText(HugeText::Always));
    setup
}

#[test]
fn text_is_collapsed_if_enough_of_it_is_used() {
    each_policy(|vm| {
        let setup = used(vm);
        let look = |least| setup.space.collapse_text(&setup.cpu, 0, least);
        assert_eq!((look(11), setup.huge()), (None, 0));
        let found = |at: u64| Some(AT + (at + F) * P);
        assert_eq!((look(10), setup.huge()), (found(0), F));
        setup.shows_all();
        setup.finish();
    });
}

/// A block of pages that cannot be collapsed does not hide later blocks from the following scans.
#[test]
fn text_scans_continue_behind_uncollapsible_pages() {
    let vm = guest::vm(2, FRAMES);
    let setup = used(&vm);
    let pins = setup.space.pin(&setup.cpu, AT + P, P, false).unwrap();
    let (mut from, mut looks) = (Some(0), 0);
    while let Some(at) = from {
        from = setup.space.collapse_text(&setup.cpu, at, 1);
        looks += 1;
        assert!(looks < 9, "again and again from {at:#x}");
    }
    assert_eq!((setup.huge(), setup.count(Counter::ThpCollapsed)), (F, 1));
    drop(pins);
    setup.finish();
}

/// Scans for text end like other calls: retired memory is freed and does not accumulate.
#[test]
fn text_scans_free_retired_tables() {
    const MAPPINGS: u64 = 400;
    let vm = guest::vm(1, FRAMES);
    let setup = Setup::mapped(&vm, RX, PRIVATE);
    // The file's pages are a folio.
    assert_eq!(setup.fetch(1), Ok(FaultKind::Huge));
    vm.set(Setting::HugeText(HugeText::Never));
    for at in (2..MAPPINGS).map(|mapping| mapping * 2 * F) {
        map_object(&setup.cpu, &setup.space, (at, F), RX, PRIVATE, (&setup.file, 0));
        assert_eq!(setup.fetch(at), Ok(FaultKind::Shared));
    }
    vm.set(Setting::HugeText(HugeText::Always));
    setup.cpu.drain();
    let (mut from, mut most) = (Some(0), 0);
    while let Some(at) = from {
        from = setup.space.collapse_text(&setup.cpu, at, 1);
        most = most.max(vm.grace.pending(setup.cpu.local()));
    }
    assert_eq!(setup.count(Counter::ThpCollapsed), MAPPINGS - 2);
    assert!(most < MAPPINGS as usize / 2, "{most} frames are retired");
    setup.finish();
}

#[test]
fn a_failed_collapse_returns_its_reason_and_keeps_the_pages() {
    let vm = guest::vm(2, FRAMES);
    vm.set(Setting::HugeText(HugeText::Never));
    let setup = Setup::mapped(&vm, RWX, PRIVATE);
    let collapse = |at: u64, pages: u64| {
        let (at, len) = (AT + at * P, pages * P);
        setup.space.madvise(&setup.cpu, at, len, Advice::Collapse).map_err(|error| error.errno)
    };
    // A copy, which is not the file's.
    store(&setup.cpu, &setup.space, AT + 7 * P, 70).unwrap();
    assert_eq!(collapse(0, F), Err(Errno::EAGAIN));
    assert_eq!(setup.load(7), Ok(70));
    // A page mapped by another space.
    let other = Space::new(&setup.cpu).unwrap();
    map_object(&setup.cpu, &other, (0, PAGES), RX, SHARED, (&setup.file, 0));
    assert_eq!(load(&setup.cpu, &other, AT + (F + 1) * P), Ok(F + 2));
    assert_eq!(setup.load(F), Ok(F + 1));
    assert_eq!(collapse(F, F), Err(Errno::EAGAIN));
    assert!(
        setup.space.page_at(&setup.cpu, AT + F * P).is_some(),
        "unmapped, but the page cannot move"
    );
    setup.check_with(&other);
    other.exit(&setup.cpu);
    assert_eq!(collapse(F, F), Ok(()));
    assert_eq!(collapse(F, F), Ok(()), "already a folio");
    assert_eq!(setup.huge(), F);
    // Too short for a huge leaf: an error only if the range contains no place for a leaf.
    assert_eq!((collapse(1, 5), collapse(F + 1, F - 2)), (Err(Errno::EINVAL), Err(Errno::EINVAL)));
    let short = [collapse(0, 5), collapse(1, F - 1), collapse(F - 1, 2)];
    assert_eq!((short, setup.huge()), ([Ok(()); 3], F));
    // Not a file's, and a hole.
    guest::map(&setup.cpu, &setup.space, 8 * F, F, RW);
    assert_eq!(collapse(8 * F, F), Err(Errno::EINVAL));
    assert_eq!(collapse(10 * F, F), Err(Errno::ENOMEM));
    setup.space.madvise(&setup.cpu, AT, F * P, Advice::NoHugePage).unwrap();
    assert_eq!(collapse(0, F), Err(Errno::EINVAL));
    // The pages are not mapped, so the collapse reads and maps the pages.
    setup.space.madvise(&setup.cpu, AT, F * P, Advice::HugePage).unwrap();
    setup.space.madvise(&setup.cpu, AT, F * P, Advice::DontNeed).unwrap();
    assert_eq!(collapse(0, F), Ok(()));
    setup.finish();
}

/// A collapse without an error leaves a huge leaf, whatever the knob's value, and whether or not a
/// folio was possible before.
#[test]
fn a_collapse_of_unmapped_pages_makes_a_leaf() {
    each_policy(|vm| {
        let setup = Setup::mapped(vm, RX, PRIVATE);
        let collapse = |at: u64| {
            setup.space.madvise(&setup.cpu, AT + at * P, F * P, Advice::Collapse).unwrap();
        };
        vm.set(Setting::HugeText(HugeText::Never));
        collapse(0);
        assert_eq!(setup.huge(), F, "the knob is off");
        // A page in use prevents the second folio. Later the page is unused.
        assert_eq!(setup.load(F + 1), Ok(F + 2));
        vm.set(Setting::HugeText(HugeText::Always));
        let other = Space::new(&setup.cpu).unwrap();
        map_object(&setup.cpu, &other, (0, PAGES), RX, SHARED, (&setup.file, 0));
        assert_eq!(load(&setup.cpu, &other, AT + (F + 1) * P), Ok(F + 2));
        other.exit(&setup.cpu);
        setup.space.madvise(&setup.cpu, AT + F * P, F * P, Advice::DontNeed).unwrap();
        setup.space.munmap(&setup.cpu, AT, PAGES * P).unwrap();
        setup.map(0, RX, PRIVATE);
        collapse(F);
        assert_eq!(setup.huge(), F, "no folio was possible before");
        setup.shows_all();
        setup.finish();
    });
}
