//! Trees in shards.

use super::*;
use std::sync::atomic::AtomicBool;

/// Parts after `after` turns, anywhere.
fn parting(after: u32, most: u64) -> Parting<'static, u8> {
    Parting { after, align: 1, most, may: &|_, _| true }
}

/// Edits `place` as `local`.
fn edit_as<'e>(
    fixture: &'e Fixture,
    local: &'e Local,
    section: &'e Section<'_>,
    place: VirtRange,
    parting: &Parting<'_, u8>,
) -> Result<Edit<'e, u8>, OutOfMemory> {
    // SAFETY: the fixture has one grace period, and readers use it.
    unsafe { fixture.tree.edit_in(place, parting, section, local, &fixture.grace, &Spin) }
}

/// Returns the range that `change` may change, and its neighbours.
fn place_of(change: &Change, model: &Model) -> VirtRange {
    let range = match *change {
        Change::Insert { start, len } => VirtRange::new(start, start + len),
        Change::Remove { from } => model
            .range(from..)
            .next()
            .map_or(VirtRange::new(from, from + 1), |(&start, &(end, _))| {
                VirtRange::new(start, end)
            }),
        Change::Replace { start, len, .. } => {
            let range = VirtRange::new(start, start + len);
            let all = model.iter().map(|(&start, &(end, _))| VirtRange::new(start, end));
            all.filter(|entry| entry.overlaps(range)).fold(range, VirtRange::hull)
        }
    };
    VirtRange::new(range.start.saturating_sub(1), range.end + 1)
}

/// Two CPUs make changes in turns, in steps of one, some of which fail for want of memory.
fn run_in_turns(changes: &[Change], seed: u64, after: u32) {
    let before = ledger::live();
    let fixture = Fixture::new();
    // SAFETY: the only local with this number.
    let other = unsafe { Local::claim(CpuId(1)) };
    let (mut model, mut dice) = (Model::new(), Dice(seed));
    for (number, change) in changes.iter().enumerate() {
        let local = if dice.below(3) == 0 { &fixture.local } else { &other };
        {
            let mut next = model.clone();
            let section = fixture.grace.enter(local);
            let old = fixture.tree.snapshot(&section);
            ledger::allow(if dice.below(4) == 0 { dice.below(12) as usize } else { usize::MAX });
            let parting = parting(after, 10_000);
            let place = place_of(change, &model);
            let done = edit_as(&fixture, local, &section, place, &parting).and_then(|mut edit| {
                assert!(edit.is_whole() == edit.view().is_whole());
                apply(&mut edit, &mut next, change, (number + 1) * 1000)?;
                Ok(edit)
            });
            ledger::allow(usize::MAX);
            if let Ok(edit) = done {
                compare(edit.view(), &next, &mut dice);
                edit.publish();
                model = next;
            }
            compare(fixture.tree.snapshot(&section), &model, &mut dice);
            assert!(old.len() < 10_000, "earlier snapshots are unchanged");
        }
        if dice.below(40) == 0 {
            // SAFETY: as for edits.
            unsafe { fixture.tree.unite(local, &fixture.grace, &Spin) }.unwrap();
            assert!(!fixture.tree.is_parted());
        }
        for local in [&fixture.local, &other] {
            while fixture.grace.pending(local) > 0 {
                for link in fixture.grace.collect(local) {
                    // SAFETY: only nodes and shards of trees are retired here.
                    unsafe { free_retired(link) };
                }
            }
        }
        let section = fixture.grace.enter(&fixture.local);
        let view = fixture.tree.snapshot(&section);
        let nodes = compare(view, &model, &mut dice);
        assert_eq!(ledger::live() - before, nodes, "leaked or lost nodes");
        assert_eq!(view.parts().count() > 1, fixture.tree.is_parted());
    }
    drop(fixture);
    assert_eq!(ledger::live(), before);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn trees_in_shards_follow_the_model(
        changes in prop::collection::vec(change(6000), 300..400),
        seed: u64,
    ) {
        let changes: Vec<_> = changes
            .into_iter()
            .map(|change| match change {
                // Wide replacements would join everything.
                Change::Replace { start, new, .. } => Change::Replace { start, len: 40, new },
                other => other,
            })
            .collect();
        run_in_turns(&changes, seed, 1);
    }

    #[test]
    fn small_trees_in_shards_follow_the_model(
        changes in prop::collection::vec(change(150), 1..150),
        seed: u64,
    ) {
        run_in_turns(&changes, seed, 2);
    }
}

/// Creates a tree that CPUs 0 and 1 have edited in turns, each near its own place. Returns the tree
/// and CPU 1's local.
fn parted() -> (Fixture, Local) {
    let fixture = Fixture::new();
    // SAFETY: the only local with this number.
    let other = unsafe { Local::claim(CpuId(1)) };
    for i in 0..8 {
        for (local, base) in [(&fixture.local, 0), (&other, 1000)] {
            let section = fixture.grace.enter(local);
            let at = base + i * 10;
            let place = VirtRange::new(at, at + 5);
            let mut edit = edit_as(&fixture, local, &section, place, &parting(4, 10_000)).unwrap();
            edit.insert(at, at + 5, value(0)).unwrap();
            edit.publish();
        }
    }
    fixture.reclaim();
    (fixture, other)
}

#[test]
fn alternating_distant_edits_create_a_shard() {
    let (fixture, _other) = parted();
    let section = fixture.grace.enter(&fixture.local);
    let parts: Vec<_> = fixture.tree.snapshot(&section).parts().map(|(part, _)| part).collect();
    let [low, high] = parts[..] else { panic!("{parts:?}") };
    assert_eq!((low.start, high.end, low.end), (0, u64::MAX, high.start));
    assert_eq!(low.end, 512, "a round bound");
}

#[test]
fn a_boundary_is_only_at_permitted_places() {
    let fixture = rows(10);
    let section = fixture.grace.enter(&fixture.local);
    let edit = fixture.edit();
    let whole = edit.own();
    let bound = |parting: &Parting<'_, u8>, one, other| {
        let pages = |(start, end)| VirtRange::new(start, end);
        parting.bound(whole, pages(one), pages(other))
    };
    // Entries are at 0..2, 3..5, 6..8 and so on.
    assert_eq!(bound(&parting(1, 100), (0, 2), (24, 26)), Some(24));
    assert_eq!(bound(&parting(1, 100), (24, 26), (0, 2)), Some(24), "in either order");
    assert_eq!(bound(&parting(1, 100), (3, 4), (4, 5)), None, "inside an entry");
    let aligned = Parting { align: 16, ..parting(1, 100) };
    assert_eq!(bound(&aligned, (0, 2), (24, 26)), None, "16 is inside 15..17");
    drop((edit, section));
    let fixture = Fixture::new();
    let mut edit = fixture.edit();
    for at in [0, 8] {
        edit.insert(at, at + 8, value(at as usize)).unwrap();
    }
    let touching = |may: &dyn Fn(Found<'_, u8>, Found<'_, u8>) -> bool| {
        let parting = Parting { may, ..parting(1, 100) };
        parting.bound(edit.own(), VirtRange::new(0, 4), VirtRange::new(12, 16))
    };
    assert_eq!(touching(&|_, _| true), Some(8));
    assert_eq!(touching(&|low, high| (low.end, high.start) != (8, 8)), None);
}

#[test]
fn an_edit_across_a_boundary_joins_and_the_limit_covers_all_shards() {
    let (fixture, other) = parted();
    let section = fixture.grace.enter(&other);
    let no = parting(0, 10_000);
    let mut edit = edit_as(&fixture, &other, &section, VirtRange::new(2000, 2001), &no).unwrap();
    edit.insert(2000, 2001, value(1)).unwrap();
    assert!(!edit.is_whole() && edit.fits(10_000));
    assert!(!edit.fits(16), "all shards together may have more");
    drop(edit);
    let mut edit = edit_as(&fixture, &other, &section, EVERYWHERE, &no).unwrap();
    assert!(edit.is_whole() && edit.fits(16) && !edit.fits(15));
    edit.insert(500, 520, value(2)).unwrap();
    edit.publish();
    drop(section);
    assert_eq!(fixture.entries().len(), 17);
    assert!(!fixture.tree.is_parted());
}

#[test]
fn shards_get_their_entries_and_a_reserve() {
    let (fixture, other) = parted();
    let granted = || fixture.tree.granted.load(crate::sync::atomic::Ordering::Relaxed);
    assert!(granted() > 16);
    let mut entries = 16;
    // Two shards grow in turns: together they may reach the limit, however it is divided.
    for i in 0..400 {
        let (local, at) = if i % 2 == 0 { (&fixture.local, 100 + i) } else { (&other, 2000 + i) };
        let section = fixture.grace.enter(local);
        let place = VirtRange::new(at, at + 1);
        let mut edit = edit_as(&fixture, local, &section, place, &parting(0, 300)).unwrap();
        assert!(!edit.is_whole());
        edit.insert(at, at + 1, value(0)).unwrap();
        if edit.fits(300) {
            edit.publish();
            entries += 1;
        }
    }
    assert!((200..=300).contains(&entries), "{entries}");
    // SAFETY: as for edits.
    unsafe { fixture.tree.unite(&other, &fixture.grace, &Spin) }.unwrap();
    assert_eq!((fixture.entries().len(), granted()), (entries, 0), "no grant without a shard");
    fixture.reclaim();
}

#[test]
fn near_the_limit_a_tree_is_not_split() {
    let fixture = Fixture::new();
    // SAFETY: the only local with this number.
    let other = unsafe { Local::claim(CpuId(1)) };
    for i in 0..100 {
        let (local, at) = if i % 2 == 0 { (&fixture.local, i) } else { (&other, 1000 + i) };
        let section = fixture.grace.enter(local);
        let place = VirtRange::new(at, at + 1);
        let mut edit = edit_as(&fixture, local, &section, place, &parting(1, 200)).unwrap();
        edit.insert(at, at + 1, value(0)).unwrap();
        edit.publish();
    }
    assert!(!fixture.tree.is_parted());
}

#[test]
fn writers_split_and_join_during_reads() {
    const EDITS: u64 = if cfg!(miri) { 60 } else { 4_000 };
    const SPAN: u64 = 1 << 20;
    let fixture = Fixture::new();
    let done = AtomicBool::new(false);
    let parted = std::sync::atomic::AtomicUsize::new(0);
    let (tree, grace) = (&fixture.tree, &fixture.grace);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..2u16)
            .map(|writer| {
                let parted = &parted;
                scope.spawn(move || {
                    // SAFETY: the only local with this number.
                    let local = unsafe { Local::claim(CpuId(1 + writer)) };
                    let base = u64::from(writer) * SPAN;
                    // A busy host may run both threads one after the other: continue until they
                    // have overlapped.
                    let enough = |edits| edits >= EDITS && parted.load(Ordering::Relaxed) > 10;
                    for i in 0..100 * EDITS {
                        if enough(i) {
                            break;
                        }
                        let section = grace.enter(&local);
                        // Each writer has an entry that it replaces by an adjacent entry: exactly
                        // one exists at any time.
                        let (old, new) = (base + i % 2 * 8, base + (i + 1) % 2 * 8);
                        let wide = i % 64 == 63;
                        let place = VirtRange::new(base, if wide { 2 * SPAN } else { base + 16 });
                        let place = if wide { VirtRange::new(0, place.end) } else { place };
                        // SAFETY: the fixture has one grace period, and readers use it.
                        let edit = unsafe {
                            tree.edit_in(place, &parting(2, 1000), &section, &local, grace, &Spin)
                        };
                        let mut edit = edit.unwrap();
                        let gone = edit.remove(old).unwrap();
                        assert!(gone.is_some() || i == 0, "an edit was lost");
                        edit.insert(new, new + 8, value(writer.into())).unwrap();
                        edit.publish();
                        parted.fetch_add(usize::from(tree.is_parted()), Ordering::Relaxed);
                        drop(section);
                        for link in grace.collect(&local) {
                            // SAFETY: only nodes and shards of trees are retired here.
                            unsafe { free_retired(link) };
                        }
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            // SAFETY: the only local with this number.
            let local = unsafe { Local::claim(CpuId(0)) };
            let mut seen = [false; 2];
            while !done.load(Ordering::Relaxed) {
                let section = grace.enter(&local);
                let view = tree.snapshot(&section);
                let all: Vec<_> = view.iter().collect();
                assert!(all.is_sorted_by_key(|entry| entry.start), "{all:?}");
                for (writer, seen) in seen.iter_mut().enumerate() {
                    let own = all.iter().filter(|entry| entry.value == value(writer)).count();
                    assert!(own == 1 || own == 0 && !*seen, "{all:?}");
                    *seen |= own == 1;
                }
            }
        });
        for writer in writers {
            writer.join().unwrap();
        }
        done.store(true, Ordering::Relaxed);
    });
    let parted = parted.into_inner();
    assert!(parted > 10, "in shards after {parted} edits");
    fixture.reclaim();
}

#[test]
fn repeatedly_joined_trees_are_split_less_often() {
    let (fixture, other) = parted();
    let mut parted = 0;
    for i in 0..4000 {
        let (local, at) = if i % 2 == 0 { (&fixture.local, 100) } else { (&other, 1100) };
        let section = fixture.grace.enter(local);
        // Now and then a change of everything.
        let place = if i % 16 == 15 { EVERYWHERE } else { VirtRange::new(at, at + 5) };
        let was = fixture.tree.is_parted();
        drop(edit_as(&fixture, local, &section, place, &parting(1, 10_000)).unwrap());
        parted += u32::from(!was && fixture.tree.is_parted());
        drop(section);
        fixture.reclaim();
    }
    assert!((4..40).contains(&parted), "parted {parted} times of 250");
}
