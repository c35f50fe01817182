//! The tree against a model, with every invariant checked by brute force after every step.

mod shards;

use super::node::{FANOUT, MIN_FILL, ledger};
use super::*;
use crate::machine::CpuId;
use crate::sync::wait::Spin;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::vec::Vec;

/// Start to end and value.
type Model = BTreeMap<u64, (u64, NonNull<u8>)>;

/// A tree and the requirements of edits.
struct Fixture {
    tree: Tree<u8>,
    grace: Grace,
    local: Local,
}

impl Fixture {
    fn new() -> Self {
        let grace = Grace::try_new(3).unwrap();
        // SAFETY: the only `Local` with this number in this grace period.
        Self { tree: Tree::new(), grace, local: unsafe { Local::claim(CpuId(0)) } }
    }

    fn edit(&self) -> Edit<'_, u8> {
        // SAFETY: the fixture has one grace period, and readers use it.
        unsafe { self.tree.edit(&self.local, &self.grace, &Spin) }.unwrap()
    }

    fn entries(&self) -> Vec<Entry<u8>> {
        let section = self.grace.enter(&self.local);
        self.tree.snapshot(&section).iter().map(plain).collect()
    }

    /// Frees the retired nodes that are due.
    fn collect(&self) {
        for link in self.grace.collect(&self.local) {
            // SAFETY: only nodes and shards of trees are retired here.
            unsafe { free_retired(link) };
        }
    }

    /// Frees everything retired. No section is open.
    fn reclaim(&self) {
        while self.grace.pending(&self.local) > 0 {
            self.collect();
        }
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        for link in self.grace.drain() {
            // SAFETY: only nodes and shards of trees are retired here.
            unsafe { free_retired(link) };
        }
    }
}

/// Returns the entry. The values of these tests are not alive.
fn plain(found: Found<'_, u8>) -> Entry<u8> {
    *found
}

/// Returns a value to distinguish entries; never dereferenced.
fn value(number: usize) -> NonNull<u8> {
    NonNull::without_provenance(core::num::NonZero::new(number + 1).unwrap())
}

fn entry(start: u64, end: u64, number: usize) -> Entry<u8> {
    Entry { start, end, value: value(number) }
}

/// A small generator, for choices inside a step.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// Checks the structure under `node`. Returns its entries, and adds the number of its nodes to
/// `nodes`.
fn validate(node: NonNull<Node>, root: bool, nodes: &mut isize) -> Vec<Slot> {
    *nodes += 1;
    // SAFETY: the caller's tree is not being changed.
    let this = unsafe { node.as_ref() };
    let count = this.count();
    assert!(count <= FANOUT);
    assert!(
        count
            >= if !root {
                MIN_FILL
            } else if this.level > 0 {
                2
            } else {
                1
            }
    );
    // The last shard ends at the first unused key.
    let used = count - usize::from(this.keys().1.last() == Some(&u64::MAX));
    assert_eq!(this.rank(u64::MAX - 1), used.min(FANOUT - 1), "unused keys");
    let mut entries = Vec::new();
    for at in 0..count {
        let slot = this.slot(at);
        if this.level == 0 {
            assert_eq!(slot.gap, 0);
            assert!(slot.start < slot.end);
            entries.push(slot);
            continue;
        }
        // SAFETY: an inner node's slot.
        let child = unsafe { this.child(at) };
        // SAFETY: as for the node itself.
        assert_eq!(unsafe { child.as_ref() }.level + 1, this.level, "depth");
        let below = validate(child, false, nodes);
        let widest = below.windows(2).map(|w| w[1].start - w[0].end).max().unwrap();
        assert_eq!((slot.start, slot.end), (below[0].start, below[below.len() - 1].end));
        assert_eq!(slot.gap, widest);
        entries.extend(below);
    }
    assert!(entries.windows(2).all(|w| w[0].end <= w[1].start), "order");
    if root {
        assert_eq!(this.entries as usize, entries.len());
        assert_eq!(this.limit, entries[entries.len() - 1].end);
        let bytes = entries.iter().map(|entry| entry.end - entry.start).sum();
        assert_eq!(this.bytes, bytes);
    }
    entries
}

/// Checks a view against the model in every way of asking; returns how many nodes it has.
fn compare(view: View<'_, u8>, model: &Model, dice: &mut Dice) -> isize {
    let mut nodes = 0;
    let mut check = |root: Option<&Node>| {
        root.map_or(Vec::new(), |root| validate(NonNull::from(root), true, &mut nodes))
    };
    let directory = check(view.directory());
    let mut slots = 0;
    for (at, (part, version)) in view.parts().enumerate() {
        let own = check(version.root);
        assert!(own.iter().all(|slot| part.covers(VirtRange::new(slot.start, slot.end))));
        slots += own.len();
        if let Some(shard) = directory.get(at) {
            assert_eq!(
                part,
                VirtRange::new(shard.start, shard.end),
                "the shards cover every address"
            );
        }
    }
    assert!(directory.len() != 1, "one shard covers everything");
    let all: Vec<_> =
        model.iter().map(|(&start, &(end, value))| Entry { start, end, value }).collect();
    assert_eq!(slots, all.len());
    assert_eq!((view.len(), view.is_empty()), (all.len(), all.is_empty()));
    assert_eq!(view.iter().map(plain).collect::<Vec<_>>(), all);

    let mut addrs = std::vec![0, 1, u64::MAX - 1, u64::MAX];
    for _ in 0..24 {
        if !all.is_empty() {
            let entry = all[dice.below(all.len() as u64) as usize];
            addrs.extend([entry.start.saturating_sub(1), entry.start, entry.end - 1, entry.end]);
        }
    }
    for &addr in &addrs {
        let next = all.partition_point(|e| e.end <= addr);
        assert_eq!(view.find(addr).map(plain), all.get(next).copied());
        assert_eq!(view.at(addr).map(plain), all.get(next).copied().filter(|e| e.start <= addr));
        assert_eq!(view.before(addr).map(plain), next.checked_sub(1).map(|last| all[last]));
    }
    let from = addrs[dice.below(addrs.len() as u64) as usize];
    assert!(view.iter_from(from).map(plain).eq(all.iter().copied().filter(|e| e.end > from)));

    let mut free = Vec::new();
    let mut from = 0;
    for entry in &all {
        free.push((from, entry.start));
        from = entry.end;
    }
    free.push((from, u64::MAX));
    for _ in 0..16 {
        let longest = [8, 200][dice.below(2) as usize];
        let len = 1 + dice.below(longest);
        let bound = |dice: &mut Dice| match dice.below(8) {
            0 => 0,
            1 => u64::MAX,
            _ => addrs[dice.below(addrs.len() as u64) as usize],
        };
        let (low, high) = (bound(dice), bound(dice));
        // Of each free range, the part in the window.
        let fits = free.iter().map(|&(from, to)| (from.max(low), to.min(high)));
        let fits = fits.filter(|&(from, to)| from < to && to - from >= len);
        let gap = view.gap(len, low, high);
        assert_eq!(gap.map(|gap| gap.start), fits.clone().map(|(_, to)| to - len).max());
        if let Some(Gap { start, end }) = gap {
            assert!(
                free.iter().any(|&(from, to)| from <= start && start + len <= end && end <= to)
            );
        }
        assert_eq!(view.gap_bottom_up(len, low, high), fits.map(|(from, _)| from).min());
    }
    nodes
}

#[derive(Clone, Debug)]
enum Change {
    /// An entry, if the range is free.
    Insert { start: u64, len: u64 },
    /// The entry at or after an address.
    Remove { from: u64 },
    /// Replaces a range, widened to whole entries, by `new` entries.
    Replace { start: u64, len: u64, new: u64 },
}

fn change(pages: u64) -> impl Strategy<Value = Change> {
    prop_oneof![
        6 => (0..pages, 1..6_u64).prop_map(|(start, len)| Change::Insert { start, len }),
        2 => (0..pages).prop_map(|from| Change::Remove { from }),
        2 => (0..pages, prop_oneof![1..30_u64, 1..pages], 0..12_u64)
            .prop_map(|(start, len, new)| Change::Replace { start, len, new }),
    ]
}

/// Makes the change in the edit and in the model. Returns whether there was anything to change.
fn apply(
    edit: &mut Edit<'_, u8>,
    model: &mut Model,
    change: &Change,
    number: usize,
) -> Result<(), OutOfMemory> {
    let overlaps = |model: &Model, range: VirtRange| -> Vec<(u64, u64)> {
        let all = model.iter().map(|(&start, &(end, _))| (start, end));
        all.filter(|&(start, end)| range.overlaps(VirtRange::new(start, end))).collect()
    };
    match *change {
        Change::Insert { start, len } => {
            let range = VirtRange::new(start, start + len);
            if overlaps(model, range).is_empty() {
                edit.insert(range.start, range.end, value(number))?;
                model.insert(range.start, (range.end, value(number)));
            }
        }
        Change::Remove { from } => {
            let Some((&start, &(end, value))) = model.range(from..).next() else {
                assert_eq!(edit.remove(from)?, None);
                return Ok(());
            };
            assert_eq!(edit.remove(start)?, Some(Entry { start, end, value }));
            model.remove(&start);
        }
        Change::Replace { start, len, new } => {
            let mut range = VirtRange::new(start, start + len);
            for (start, end) in overlaps(model, range) {
                range = range.hull(VirtRange::new(start, end));
            }
            let new = new.min(range.len());
            let size = range.len() / new.max(1);
            let entries: Vec<_> = (0..new)
                .map(|i| range.start + i * size)
                // Some entries touch the next entry and some do not.
                .map(|at| entry(at, at + (size - at % 2).max(1), number + at as usize))
                .collect();
            edit.replace(range, &entries, |_| {})?;
            model.retain(|&start, _| !range.contains(start));
            model.extend(entries.iter().map(|e| (e.start, (e.end, e.value))));
        }
    }
    Ok(())
}

/// Makes the change in place, if possible. Returns whether it was made.
fn amend(fixture: &Fixture, model: &mut Model, change: &Change, number: usize) -> bool {
    let all = model.iter().map(|(&start, &(end, value))| Entry { start, end, value });
    let all: Vec<_> = all.collect();
    let (cut, new) = match *change {
        Change::Insert { start, len } => {
            let range = VirtRange::new(start, start + len);
            if all.iter().any(|entry| entry.range().overlaps(range)) {
                return false;
            }
            (range, Some(entry(range.start, range.end, number)))
        }
        Change::Remove { from } => match all.iter().find(|entry| entry.start >= from) {
            Some(entry) => (entry.range(), None),
            None => return false,
        },
        Change::Replace { start, len, .. } => (VirtRange::new(start, start + len), None),
    };
    // The first and the last overlapping entry stay in part, or one entry in two parts.
    let near: Vec<_> = all.iter().filter(|entry| entry.range().overlaps(cut)).copied().collect();
    let low = near.first().filter(|entry| entry.start < cut.start).copied();
    let high = near.last().filter(|entry| entry.end > cut.end).copied();
    let rest = high.filter(|_| low == high).map(|entry| Entry { start: cut.end, ..entry });
    let high = high.filter(|_| low != high);
    let were: Vec<_> = near.iter().filter(|&&e| Some(e) != low && Some(e) != high).collect();
    // Some begin at the entry before.
    let before = all.iter().rfind(|entry| entry.end <= cut.start);
    let before = before.filter(|_| low.is_none() && number.is_multiple_of(3));
    let (mut spot, section) = (Spot::nowhere(), fixture.grace.enter(&fixture.local));
    let from = before.map_or(cut.start, |entry| entry.start);
    // SAFETY: one thread has the tree, which has no shards.
    unsafe { fixture.tree.lead(&mut spot, &section, from) };
    let mut at = usize::from(before.is_some() || low.is_some());
    let needed = at + were.len() + usize::from(high.is_some());
    let added = usize::from(new.is_some()) + usize::from(rest.is_some());
    // SAFETY: as above, and the thread has no view of the tree.
    let Some(mut leaf) = (unsafe { spot.amend(needed, were.len(), added) }) else { return false };
    let mut gone = Vec::new();
    leaf.remove(at, were.len(), |entry| gone.push(entry));
    assert!(gone.iter().eq(were));
    model.retain(|&start, _| !gone.iter().any(|entry| entry.start == start));
    if let Some(low) = low {
        leaf.bound(0, low.start, cut.start);
        model.insert(low.start, (cut.start, low.value));
    }
    for entry in new.into_iter().chain(rest) {
        leaf.insert(at, entry);
        at += 1;
        model.insert(entry.start, (entry.end, entry.value));
    }
    if let Some(high) = high {
        leaf.bound(at, cut.end, high.end);
        model.remove(&high.start);
        model.insert(cut.end, (high.end, high.value));
    }
    leaf.finish();
    true
}

/// Runs edits of one to three changes each, one eighth of which are dropped, and changes in place
/// between the edits.
fn run(changes: &[Change], seed: u64) {
    let before = ledger::live();
    let fixture = Fixture::new();
    let mut model = Model::new();
    let mut dice = Dice(seed);
    let mut number = 0;
    let mut changes = changes.iter();
    let (mut tried, mut amended) = (0, 0);
    while changes.len() > 0 {
        if let Some(change) = changes.clone().next().filter(|_| dice.below(2) > 0) {
            number += 1000;
            tried += 1;
            if amend(&fixture, &mut model, change, number) {
                amended += 1;
                changes.next();
            }
        }
        let mut edit = fixture.edit();
        let mut next = model.clone();
        for change in changes.by_ref().take(1 + dice.below(3) as usize) {
            number += 1000;
            apply(&mut edit, &mut next, change, number).unwrap();
            compare(edit.view(), &next, &mut dice);
        }
        if dice.below(8) > 0 {
            edit.publish();
            model = next;
        } else {
            drop(edit);
        }
        fixture.reclaim();
        let section = fixture.grace.enter(&fixture.local);
        let nodes = compare(fixture.tree.snapshot(&section), &model, &mut dice);
        assert_eq!(ledger::live() - before, nodes, "leaked or lost nodes");
    }
    assert!(tried < 40 || amended > tried / 8, "{amended} of {tried} changes were done in place");
    drop(fixture);
    assert_eq!(ledger::live(), before);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn small_trees_follow_the_model(
        changes in prop::collection::vec(change(150), 1..150),
        seed: u64,
    ) {
        run(&changes, seed);
    }

    #[test]
    fn tall_trees_follow_the_model(
        changes in prop::collection::vec(change(6000), 400..600),
        seed: u64,
    ) {
        let changes: Vec<_> = changes
            .into_iter()
            .map(|change| match change {
                // Wide replacements would keep the tree low.
                Change::Replace { start, new, .. } => Change::Replace { start, len: 40, new },
                other => other,
            })
            .collect();
        run(&changes, seed);
    }
}

/// A fixture with `count` entries of two pages, three pages apart.
fn rows(count: u64) -> Fixture {
    let fixture = Fixture::new();
    let mut edit = fixture.edit();
    for i in 0..count {
        edit.insert(i * 3, i * 3 + 2, value(i as usize)).unwrap();
    }
    edit.publish();
    fixture.reclaim();
    fixture
}

#[test]
fn growing_and_shrinking_at_either_end_keeps_the_invariants() {
    let mut dice = Dice(7);
    for descending in [false, true] {
        let fixture = Fixture::new();
        let mut model = Model::new();
        let key = |i: u64| if descending { 3000 - i } else { i };
        for i in 0..1200 {
            let mut edit = fixture.edit();
            edit.insert(key(i), key(i) + 1, value(0)).unwrap();
            edit.publish();
            model.insert(key(i), (key(i) + 1, value(0)));
            if i % 37 == 0 {
                compare(fixture.edit().view(), &model, &mut dice);
            }
        }
        let tall = fixture.edit().own().root.unwrap().level;
        assert!(tall >= 2, "three levels are reached");
        for i in 0..1200 {
            let mut edit = fixture.edit();
            edit.remove(key(i)).unwrap().unwrap();
            edit.publish();
            model.remove(&key(i));
            if i % 37 == 0 || i > 1150 {
                compare(fixture.edit().view(), &model, &mut dice);
            }
        }
        assert!(fixture.edit().view().is_empty());
        fixture.reclaim();
    }
}

#[test]
fn an_edit_without_memory_changes_no_entry() {
    let start = ledger::live();
    let fixture = rows(400);
    let (live, old) = (ledger::live(), fixture.entries());
    let new: Vec<_> = (0..60).map(|i| entry(300 + i * 5, 304 + i * 5, 1)).collect();
    let mut failures = 0;
    loop {
        let mut edit = fixture.edit();
        ledger::allow(failures);
        let result = (|| {
            // Splits, joins and redistributions, in the edit's own and in shared nodes.
            for i in 0..40 {
                edit.insert(1200 + i, 1201 + i, value(2))?;
            }
            for i in 100..150 {
                edit.remove(i * 3 + 600)?;
            }
            edit.replace(VirtRange::new(300, 600), &new, |_| {})
        })();
        ledger::allow(usize::MAX);
        if result.is_ok() {
            edit.publish();
            break;
        }
        failures += 1;
        drop(edit);
        assert_eq!(fixture.entries(), old);
        assert_eq!(ledger::live(), live);
    }
    assert!(failures > 20, "the edit allocates {failures} nodes");
    assert_ne!(fixture.entries(), old);
    fixture.reclaim();
    drop(fixture);
    assert_eq!(ledger::live(), start);
}

#[test]
fn a_failed_insert_or_remove_keeps_the_edit() {
    let fixture = rows(400);
    let mut edit = fixture.edit();
    let mut failed = 0;
    for i in 0..200 {
        let before: Vec<_> = edit.view().iter().map(plain).collect();
        for allowed in 0.. {
            ledger::allow(allowed);
            let result = if i % 2 == 0 {
                edit.insert(i * 6 + 2, i * 6 + 3, value(3))
            } else {
                edit.remove(i * 3).map(|_| ())
            };
            ledger::allow(usize::MAX);
            if result.is_ok() {
                break;
            }
            failed += 1;
            assert!(edit.view().iter().map(plain).eq(before.iter().copied()));
        }
    }
    assert!(failed > 50);
    drop(edit);
    fixture.reclaim();
}

#[test]
fn an_older_view_keeps_its_version() {
    let fixture = rows(300);
    let section = fixture.grace.enter(&fixture.local);
    let view = fixture.tree.snapshot(&section);
    let old: Vec<_> = view.iter().map(plain).collect();
    let mut edit = fixture.edit();
    edit.replace(VirtRange::new(0, 800), &[], |_| {}).unwrap();
    assert!(view.iter().map(plain).eq(old.iter().copied()), "before the edit is published");
    edit.publish();
    assert!(view.iter().map(plain).eq(old.iter().copied()), "and after");
    assert_eq!(fixture.tree.snapshot(&section).find(0).unwrap().start, 801);
    drop(section);
    fixture.reclaim();
}

#[test]
fn a_reader_sees_a_whole_edit_or_no_part() {
    const PAIRS: u64 = 100;
    const EDITS: u64 = 20_000;
    let fixture = Fixture::new();
    let mut edit = fixture.edit();
    for i in 0..PAIRS {
        edit.insert(i * 20, i * 20 + 5, value(0)).unwrap();
    }
    edit.publish();
    let (tree, grace) = (&fixture.tree, &fixture.grace);
    let done = core::sync::atomic::AtomicBool::new(false);
    // Each edit moves three entries between the two places of their pairs.
    let moves = core::sync::atomic::AtomicU64::new(0);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            // SAFETY: the only local with this number.
            let local = unsafe { Local::claim(CpuId(1)) };
            let mut dice = Dice(11);
            let mut states = [false; PAIRS as usize];
            while !done.load(Ordering::Relaxed) {
                let section = grace.enter(&local);
                let view = tree.snapshot(&section);
                assert_eq!(view.len() as u64, PAIRS);
                for _ in 0..8 {
                    let pair = dice.below(PAIRS);
                    let places = [view.at(pair * 20 + 2), view.at(pair * 20 + 12)];
                    let moved = places[1].is_some();
                    assert_ne!(places[0].is_some(), moved, "{places:?}");
                    assert_eq!(
                        places.into_iter().flatten().next().unwrap().value,
                        value(moved.into())
                    );
                    let state = &mut states[pair as usize];
                    moves.fetch_add(u64::from(*state != moved), Ordering::Relaxed);
                    *state = moved;
                }
                if dice.below(64) == 0 {
                    let pairs = view.iter().map(|e| e.start / 20);
                    assert!(pairs.eq(0..PAIRS));
                }
            }
        });
        let mut dice = Dice(5);
        let mut moved = [false; PAIRS as usize];
        // A busy host may run both threads one after the other: continue until they have
        // overlapped.
        let enough = |edits| edits >= EDITS && moves.load(Ordering::Relaxed) > 100;
        for edits in 0..100 * EDITS {
            if enough(edits) {
                break;
            }
            let mut edit = fixture.edit();
            for _ in 0..3 {
                let pair = dice.below(PAIRS);
                let (from, to) = match moved[pair as usize] {
                    false => (pair * 20, pair * 20 + 10),
                    true => (pair * 20 + 10, pair * 20),
                };
                edit.remove(from).unwrap().unwrap();
                moved[pair as usize] ^= true;
                edit.insert(to, to + 5, value(moved[pair as usize].into())).unwrap();
            }
            edit.publish();
            fixture.collect();
        }
        done.store(true, Ordering::Relaxed);
        reader.join().unwrap();
    });
    let moves = moves.into_inner();
    assert!(moves > 100, "the reader ran concurrently with the writer and saw {moves} moves");
    fixture.reclaim();
}

#[test]
fn writers_take_turns() {
    const EDITS: u64 = 6_000;
    let fixture = Fixture::new();
    let (tree, grace) = (&fixture.tree, &fixture.grace);
    // Two writers, each with its own places between the other's; each creates three entries and
    // removes one of them.
    std::thread::scope(|scope| {
        for writer in 0..2 {
            scope.spawn(move || {
                // SAFETY: the only local with this number.
                let local = unsafe { Local::claim(CpuId(1 + writer)) };
                for i in 0..EDITS {
                    // SAFETY: one grace period for all edits.
                    let mut edit = unsafe { tree.edit(&local, grace, &Spin) }.unwrap();
                    let at = i * 10 + u64::from(writer) * 5;
                    edit.insert(at, at + 5, value(writer.into())).unwrap();
                    if i % 3 == 2 {
                        assert_eq!(edit.remove(at - 10).unwrap().unwrap().start, at - 10);
                    }
                    edit.publish();
                    for link in grace.collect(&local) {
                        // SAFETY: only nodes and shards of trees are retired here.
                        unsafe { free_retired(link) };
                    }
                }
            });
        }
    });
    let kept = (0..EDITS).filter(|i| i % 3 != 1).flat_map(|i| [i * 10, i * 10 + 5]);
    let model = kept.map(|at| (at, (at + 5, value((at % 10 / 5) as usize)))).collect();
    compare(fixture.edit().view(), &model, &mut Dice(3));
}
