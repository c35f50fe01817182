//! Every operation against every other operation on one space, from two CPUs, in every relative
//! position: each pair must end like one of its two sequential orders. See `pairs`.
//!
//! Each pair runs under some schedules from each starting state, and under more schedules if both
//! operations write state read by both. `FAULTLESS_SCHEDULES` multiplies the numbers, relative to
//! its default of 2000. The boundary in the window of a pair is a multiple of a power of two that
//! the number of the pair determines. `FAULTLESS_PAIR` selects the pairs whose line contains the
//! given text, such as `MapHint MapFixed`; with `FAULTLESS_REPLAY`, under the failed schedule. The
//! programs that failed before, not all of them pairs, run as well.

use crate::pairs;
use crate::pairs::arena::{Arena, POWERS};
use crate::pairs::file::Which;
use crate::pairs::op::{BOUNDARY, Hand, How, Op, RW, Ret, Span};
use crate::pairs::place::{Base, Relation};
use crate::pairs::table::{Kind, Omitted, Pair, Touches, places, reveal};
use crate::pairs::{Case, Order, Outcome};
use crate::support;
use crate::support::disk::Disk;
use crate::support::machine::Board;
use crate::support::world::Body;
use crate::support::{AHEAD, Guest, MMAP_LOCK, PER_VMA, Regime, SPECULATIVE, Space, World};
use faultless::{Counter, Cpu, Errno, FaultError, FrameNumber, MapFlags};
use shuttle::rand::Rng;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// Frames of a pair's machine.
const FRAMES: u32 = 160;
/// The same, with a huge leaf.
const TEXT_FRAMES: u32 = 2600;

thread_local! {
    /// The arena of the case. All threads of a schedule run on one thread of the host.
    static ARENA: Cell<Arena> = const { Cell::new(Arena::whole(*POWERS.start())) };
}

impl Hand for Guest<'_> {
    type Machine = Board;
    type Child = Space;

    fn arena(&self) -> Arena {
        ARENA.get()
    }

    fn space(&self) -> &Space {
        self.space
    }

    fn cpu(&self) -> &Cpu<'_, Board> {
        self.cpu
    }

    fn poll(&self) {
        Guest::poll(self);
    }

    fn load(&self, addr: u64) -> Result<u64, FaultError> {
        Guest::load(self, addr)
    }

    fn store(&self, addr: u64, value: u64) -> Result<(), FaultError> {
        Guest::store(self, addr, value)
    }

    fn fork(&self) -> Result<Space, Errno> {
        self.space.fork(self.cpu).map_err(|error| error.errno)
    }

    fn exit(&self, child: Space) {
        child.exit(self.cpu);
    }

    fn space_of(child: &Space) -> &Space {
        child
    }

    fn random(&self, below: usize) -> usize {
        shuttle::rand::thread_rng().gen_range(0..below)
    }

    fn device(&self) -> Option<FrameNumber> {
        Some(self.world.vm.machine().device())
    }
}

/// The outcomes of every order of a case.
type Orders = Arc<OnceLock<Vec<(Order, Outcome)>>>;

/// Runs the case under the current schedule, and judges its outcome.
fn try_once(case: &Case, orders: &Orders) {
    ARENA.set(case.whole());
    let frames = if case.is_text() { TEXT_FRAMES } else { FRAMES };
    let world = World::unwatched(2 + usize::from(case.is_slow()), frames);
    if case.swaps() {
        world.swap_on(Disk::scratch(64, 4));
    }
    let [space, elsewhere] = [(); 2].map(|()| world.space(|_| {}));
    let orders = orders.get_or_init(|| world.within(&space, |hand| case.orders(hand)));
    let besides = world.within(&space, |hand| {
        // A folio needs adjacent frames.
        hand.cpu.drain();
        let leaves = || world.vm.totals().get(Counter::ThpFileMapped);
        let before = leaves();
        let besides = case.prepare(hand);
        if hand.random(2) == 0 {
            // Steps on both sides of the boundary belong to different shards, and steps across the
            // boundary join the shards.
            space.part_tree(hand.cpu(), hand.arena().addr(BOUNDARY));
        }
        assert!(!case.is_text() || leaves() != before, "no huge leaf:\n{case}");
        case.begin(hand, &besides);
        besides
    });
    let returned: [Mutex<Vec<Ret>>; 2] = Default::default();
    let running = AtomicUsize::new(2);
    let side = |hand: &Guest<'_>, side: usize| {
        for step in 0..case.sides[side].len() {
            let ret = case.step(hand, side, step, &besides);
            returned[side].lock().unwrap().push(ret);
        }
        running.fetch_sub(1, Ordering::Relaxed);
    };
    // The device of a slow file.
    let device = |hand: &Guest<'_>| {
        while running.load(Ordering::Relaxed) != 0 {
            if !besides.slow().is_some_and(|words| words.complete(hand, Which::Oldest)) {
                shuttle::thread::yield_now();
            }
        }
        case.end(hand, &besides);
    };
    let bodies: [Body<'_>; 3] =
        [(&space, &|hand| side(hand, 0)), (&space, &|hand| side(hand, 1)), (&elsewhere, &device)];
    world.run(if case.is_slow() { &bodies } else { &bodies[..2] });
    let returned = returned.map(|returned| returned.into_inner().unwrap());
    {
        let [first, second] = &besides.new;
        let born = [&besides.old, first, second].map(|born| born.lock().unwrap());
        let spaces: Vec<_> =
            born.iter().flat_map(|born| born.iter()).chain([&space, &elsewhere]).collect();
        world.audit(&spaces, &Vec::from_iter(besides.object.get()));
    }
    let judged = world.within(&space, |hand| {
        let found = case.conclude(hand, returned, besides);
        case.judge(hand, &found, orders)
    });
    judged.unwrap_or_else(|wrong| panic!("{wrong}"));
    world.finish(vec![space, elsewhere]);
}

/// The numbers of runs and omissions for the pairs of two kinds.
#[derive(Default)]
struct Row {
    starts: usize,
    schedules: usize,
    omitted: BTreeMap<Omitted, usize>,
}

/// Returns the power of two at the boundary of the case called `name`: a hash, so that a replay and
/// a selection of pairs have the same boundary.
fn power(name: &str) -> u32 {
    let hash = |sum: u32, byte: u8| (sum ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    let powers = POWERS.end() - POWERS.start() + 1;
    POWERS.start() + name.bytes().fold(0x811c_9dc5, hash) % powers
}

/// The pairs of the matrix have boundaries at multiples of each power of two.
#[test]
fn boundaries_are_multiples_of_every_power() {
    let mut found = BTreeMap::<u32, usize>::new();
    for (pair, run) in pairs::table::pairs().flat_map(places) {
        if run.is_ok() {
            let power = power(&pair.to_string());
            let boundary = Arena::whole(power).addr(BOUNDARY);
            assert_eq!(boundary.trailing_zeros(), power);
            *found.entry(power).or_default() += 1;
        }
    }
    assert!(
        found.keys().copied().eq(POWERS) && found.values().all(|pairs| *pairs > 100),
        "{found:?}"
    );
}

/// Returns the default number of schedules at a place, in the default regime and in other regimes.
fn schedules(pair: &Pair, regime: Regime) -> usize {
    let all = match (pair.shares(), regime == SPECULATIVE) {
        (true, true) => 16,
        (false, true) => 8,
        (true, false) => 4,
        (false, false) => 0,
    };
    let all = match pair.base {
        // With a third thread.
        Base::Slow | Base::SlowShared => all / 2,
        // With some hundred pages.
        Base::Text => all / 4,
        _ => all,
    };
    (all * support::schedules()).div_ceil(2000)
}

/// Runs all pairs selected by `chosen`, and prints the matrix.
fn run_pairs(regime: Regime, chosen: impl Fn([Touches; 2]) -> bool) {
    let only = std::env::var("FAULTLESS_PAIR").ok();
    let (mut failed, mut rows) = (Vec::new(), Vec::new());
    for kinds in pairs::table::pairs().filter(|kinds| chosen(kinds.map(Kind::touches))) {
        let mut row = Row::default();
        for (pair, run) in places(kinds) {
            if only.as_ref().is_some_and(|only| !pair.to_string().contains(only)) {
                continue;
            }
            match run {
                Ok(()) => {}
                Err(why) => {
                    *row.omitted.entry(why).or_default() += 1;
                    continue;
                }
            }
            let count = schedules(&pair, regime);
            if count == 0 {
                *row.omitted.entry(Omitted::OtherRegime).or_default() += 1;
                continue;
            }
            let mut case = pair.case();
            case.pages &= regime != AHEAD;
            case.power = power(&pair.to_string());
            let orders = Orders::default();
            let one = move || try_once(&case, &orders);
            // The scheduler cannot use a thread after a failure.
            let tried = std::thread::scope(|scope| {
                scope.spawn(|| support::explore_under(regime, count, one)).join()
            });
            row.starts += 1;
            row.schedules += count;
            if tried.is_err() {
                println!("failed under {regime:?}: {pair}");
                failed.push(pair);
            }
        }
        rows.push((kinds, row));
    }
    for (kinds, Row { starts, schedules, omitted }) in rows {
        let [first, second] = kinds.map(|kind| format!("{kind:?}"));
        print!("{first:14} {second:14} {starts:3} starts {schedules:5} schedules");
        omitted.iter().for_each(|(why, count)| print!("; not {count}: {}", why.why()));
        println!();
    }
    assert!(failed.is_empty(), "{} pairs failed", failed.len());
}

/// Runs the programs known to have failed.
fn run_known(regime: Regime) {
    for (name, mut case) in pairs::known::known() {
        case.pages &= regime != AHEAD;
        case.power = power(name);
        let orders = Orders::default();
        println!("{name}");
        support::explore_under(regime, (64 * support::schedules()).div_ceil(2000), move || {
            try_once(&case, &orders);
        });
    }
}

macro_rules! regimes {
    ($($name:ident: $regime:ident),+ $(,)?) => { $(
        mod $name {
            use super::{Touches, run_known, run_pairs};

            #[test]
            fn known() {
                run_known(super::$regime);
            }

            /// Both change VMAs.
            #[test]
            fn vmas_against_vmas() {
                run_pairs(super::$regime, |touch| touch == [Touches::Vmas; 2]);
            }

            /// One operation changes VMAs, and the other uses pages.
            #[test]
            fn vmas_against_pages() {
                run_pairs(super::$regime, |touch| {
                    touch.contains(&Touches::Vmas) && touch.contains(&Touches::Pages)
                });
            }

            /// The rest: pages against pages, and everything against the whole space.
            #[test]
            fn others() {
                run_pairs(super::$regime, |touch| {
                    touch == [Touches::Pages; 2] || touch.contains(&Touches::Space)
                });
            }
        }
    )+ };
}

regimes!(speculative: SPECULATIVE, per_vma: PER_VMA, mmap_lock: MMAP_LOCK, ahead: AHEAD);

/// A page is unmapped, and mapped and stored to: what was stored must not be taken away.
fn two_on_a_page() {
    let page = Span::new(2, 1);
    let map = Op::Map(page, How::Fixed, RW, MapFlags::PRIVATE);
    let (start, sides) =
        (vec![map, Op::Store(2, 1)], [vec![Op::Unmap(page)], vec![map, Op::Store(2, 100)]]);
    try_once(&Case::new(start, sides, reveal([page; 2])), &Orders::default());
}

fn try_pair(kinds: [Kind; 2], relation: Relation, base: Base) {
    let pair = Pair { kinds, spans: relation.spans(), base };
    try_once(&pair.case(), &Orders::default());
}

/// A mapping between a page under change and an equal VMA merges with both.
fn a_mapping_beside_another() {
    try_pair([Kind::MapHint, Kind::MapFixed], Relation::AboveAcross, Base::Parts);
}

/// A mapping next to a VMA with an anon_vma adopts the anon_vma, even if that VMA is unmapped
/// before the merge.
fn a_mapping_beside_an_unmapped_vma() {
    try_pair([Kind::MapFixed, Kind::MapShared], Relation::Above, Base::Parts);
}

/// Two map over a page of a VMA each, and no more VMAs are allowed than there were.
fn two_changes_that_keep_the_vma_count() {
    try_pair([Kind::MapFixed; 2], Relation::Apart, Base::Full);
}

fn try_known(name: &str) {
    let is_it = |(of, _): &(&str, Case)| *of == name;
    let (_, case) = pairs::known::known().into_iter().find(is_it).expect("a known case");
    try_once(&case, &Orders::default());
}

/// The remains of a move are part of the future merge with a mapping under change.
fn the_remains_of_a_move() {
    try_known("kept beside a change");
}

/// A mapping is placed between a VMA without an anon_vma, which gets one, and a VMA with an
/// anon_vma.
fn a_first_store_beside() {
    try_known("first store beside a change");
}

/// Advice for a page during its unmapping, and a load from the page.
fn advice_of_a_hole() {
    try_known("advice on a hole");
}

/// A store below a stack during the replacement of the stack, and another store to the stack.
fn a_store_below_a_replaced_stack() {
    try_known("below a replaced stack");
}

/// mincore of a page during the copy by its first store.
fn a_page_during_its_copy() {
    try_known("mincore at the first store");
}

/// The same, of populating.
fn populating_a_hole() {
    try_known("populated a hole");
}

/// A part is locked and kept while a mapping beside it is under change.
fn a_part_equal_again() {
    try_known("equal again beside a change");
}

/// A part is cut off between a VMA and a change with which it will merge.
fn a_cut_before_a_merge() {
    try_known("cut before a merge");
}

/// A pin of a page that another CPU maps at the same time.
fn a_pin_of_an_unmapped_page() {
    try_known("pinned without a page");
}

/// A store to a page during its writeback.
fn a_store_during_writeback() {
    try_pair([Kind::Store, Kind::WriteBack], Relation::Same, Base::FileShared);
}

/// A program and the kernel wait for a read, which ends in the meantime.
fn two_waiters_for_one_read() {
    try_pair([Kind::Load, Kind::ReadPage], Relation::Same, Base::SlowShared);
}

/// A page leaves the file during its read.
fn a_page_removed_during_its_read() {
    try_pair([Kind::Load, Kind::Truncate], Relation::Same, Base::SlowShared);
}

/// The kernel overwrites a page during its read.
fn a_page_overwritten_during_its_read() {
    try_pair([Kind::ReadPage, Kind::Overwrite], Relation::Same, Base::SlowShared);
}

/// The kernel overwrites a page while the page leaves the file.
fn a_page_removed_during_its_overwrite() {
    try_pair([Kind::Truncate, Kind::Overwrite], Relation::Same, Base::SlowShared);
}

/// A file is truncated within a page whose read has no waiter.
fn an_end_in_a_page_during_its_read() {
    try_pair([Kind::InCore, Kind::TruncateIn], Relation::Same, Base::SlowShared);
}

/// The kernel needs a page while the page becomes a hole.
fn a_page_needed_during_its_punch() {
    try_pair([Kind::PunchHole, Kind::WritePage], Relation::Same, Base::SlowShared);
}

mod needs {
    use crate::support;
    use faultless::sync::mutant::Mutant;

    needs!(
        conflicts: RangeConflict in [two_on_a_page],
        neighbours_merge_later: MergesLater in [a_mapping_beside_another],
        a_root_is_adopted: RootAdopted in [a_mapping_beside_an_unmapped_vma],
        a_group_is_sealed: SealsGroup in [a_first_store_beside],
        a_part_keeps_its_root: RenewsParts in [the_remains_of_a_move],
        a_stack_is_flushed: StackIsFlushed in [a_store_below_a_replaced_stack],
        mincore_waits_for_the_entry: QueryWaits in [a_page_during_its_copy],
        neighbours_part: PartsNeighbours in [a_part_equal_again],
        a_cut_merges_before: CutsUnmerged in [a_cut_before_a_merge],
        a_pin_without_a_mapping_serves_no_fault: PinFindsNothing in [a_pin_of_an_unmapped_page],
        a_hole_is_flushed: HoleIsFlushed in [advice_of_a_hole, populating_a_hole] under MMAP_LOCK,
        a_first_store_is_noted: FaultMarksDirty in [a_store_during_writeback],
        a_page_is_protected_first: WriteBackProtects in [a_store_during_writeback],
        a_joined_read_needs_the_held_entry: JoinHoldsEntry in [two_waiters_for_one_read],
        a_read_page_is_freed: EndFreesFrame in [a_page_removed_during_its_read],
        a_read_looks_at_the_end: ReadLooksAgain in [a_page_removed_during_its_read],
        an_overwritten_page_is_freed: EndFreesFrame in [a_page_overwritten_during_its_read],
        an_overwrite_looks_at_the_end: ReadLooksAgain in [a_page_removed_during_its_overwrite],
        a_cut_drops_reads: CutDropsReads in [an_end_in_a_page_during_its_read],
        a_read_looks_for_a_cut: ReadLooksForCut in [a_page_needed_during_its_punch],
        vmas_with_a_deferred_merge_count_as_one: CountsMerged in [two_changes_that_keep_the_vma_count],
    );
}
