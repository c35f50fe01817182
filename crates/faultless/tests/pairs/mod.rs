//! Pairs of operations of two CPUs on one space, judged by both sequential orders.
//!
//! A [`Case`] consists of a starting state, the operations of each of two CPUs, and further
//! operations that reveal errors: a wrongly merged VMA looks correct until a part is protected,
//! unmapped or used. One CPU runs the case alone, in every order of the operations
//! ([`Case::orders`]). Then two CPUs run the case at the same time. The return values, the listing
//! of `maps` (with protection and flags), the counts and the contents of pages must match one of
//! the orders. The subsystem on one CPU is therefore the model of the subsystem on two CPUs.
//!
//! The window of a case lies around a boundary of page tables and of the VMA tree: a multiple of 2
//! MiB, or of a larger power of two, chosen at random ([`Case::power`]). A case has a space of its
//! own, or an [arena] of a space in which other cases run at the same
//! time. In an arena, the case must end as if it had run alone: the orders are run in an empty
//! space. Resources that exist once in a space or a machine are not available to every case: one
//! case has the heap, and no case limits the number of VMAs ([`admits`](arena::Arena::admits)).
//!
//! Results without a guarantee are not compared:
//! - the address of a mapping without a fixed address in a region of its CPU ([`Case::elsewhere`]);
//! - of operations that fault pages in one by one, and with prefault: the resident pages, and their
//!   effect on the VMAs ([`Seen::without_pages`]); nor whether all pages are faulted in at once;
//! - of an access to an object: the pages around it that the fault maps;
//! - of a listing during other operations: its counts of pages, and names;
//! - of three operations, a listing and `mincore`: both report mappings before their pages are in
//!   place;
//! - of `mincore` while another CPU changes mappings: the present pages;
//! - of a listing while another CPU moves, protects or advises several VMAs, one after the other:
//!   all results;
//! - a faulting access may consist of the growth of a stack or the creation of an anon_vma, the
//!   fault, and the access: another CPU may act in between, and undo the fault's first part.

#![allow(dead_code, reason = "each program uses a part")]

/// Declares an enum, and the list of all its variants.
macro_rules! listed {
    ($(#[$about:meta])* $name:ident { $($(#[$what:meta])* $each:ident),+ $(,)? }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum $name { $($(#[$what])* $each),+ }

        impl $name {
            /// All variants.
            pub const ALL: &[Self] = &[$(Self::$each),+];
        }
    };
}

pub mod arena;
pub mod draw;
pub mod file;
pub mod known;
pub mod op;
pub mod place;
pub mod seen;
mod steps;
pub mod table;

use arena::{Arena, POWERS};
use faultless::{Advice, MapFlags, Object, PAGE_SIZE, Setting, VirtRange};
use file::Which;
use op::{Besides, Hand, How, Op, Ret, Span, WINDOW};
use seen::{ObjectSeen, Placed, Seen};
use std::fmt;
use std::ops::Range;
use steps::Fine;

/// Pages of a slow file of which some are being read when two CPUs begin.
const UNDER_WAY: Range<u64> = 2..3;

/// The first page of an empty heap, outside all cases.
const NO_HEAP: i64 = -1 << 14;

/// The regions of CPUs, and no other mappings, are below this page.
const REGIONS: i64 = -1 << 23;

/// The default limit of VMAs in a space: more than any case has.
const AREAS: u64 = 1 << 16;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    pub start: Vec<Op>,
    pub sides: [Vec<Op>; 2],
    pub after: Vec<Op>,
    /// Whether the resident pages are guaranteed.
    pub pages: bool,
    /// In a space of its own: the power of two that divides the boundary of the window, one of
    /// [`POWERS`](arena::POWERS).
    pub power: u32,
    /// The steps of the operations in [`Case::orders`].
    fine: Fine,
}

impl Case {
    pub fn new(start: Vec<Op>, sides: [Vec<Op>; 2], after: Vec<Op>) -> Self {
        let any = |is: fn(&Op) -> bool| sides.iter().flatten().any(is);
        let objects = start.iter().chain(sides.iter().flatten()).any(|op| op.maps_object());
        let around = objects && any(|op| op.is_access());
        // The cached pages of a file depend on chance.
        let file = start.iter().any(|op| matches!(op, Op::File | Op::SlowFile | Op::Text));
        let pages = !around && !file && !any(|op| op.is_by_page());
        Self { start, sides, after, pages, power: *POWERS.start(), fine: Fine::default() }
    }

    /// The arena of the case in a space of its own.
    pub fn whole(&self) -> Arena {
        Arena::whole(self.power)
    }

    /// Adapts the case to an arena. Listings and created objects may meet other cases there, so the
    /// pages around an object's page are not guaranteed.
    pub fn beside_others(self) -> Self {
        let objects =
            self.start.iter().chain(self.sides.iter().flatten()).any(|op| op.maps_object());
        Self { pages: self.pages && !objects, ..self }
    }
}

/// An order of the operations: the side of each next step.
pub type Order = Vec<usize>;

/// The outcome of a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    pub returned: [Vec<Ret>; 2],
    /// Right after the pair, of the space, and of the children: the old ones, and each side's.
    seen: Seen,
    children: [Vec<Seen>; 3],
    after: Vec<Ret>,
    last: Seen,
    placed: Placed,
    /// Right after the pair, and at last.
    object: Option<[ObjectSeen; 2]>,
    /// The store of a file, after the writeback of all pages.
    stored: Option<Vec<u64>>,
}

impl Case {
    /// Makes the starting state in an empty space.
    pub fn prepare<H: Hand>(&self, hand: &H) -> Besides<H::Child> {
        let (besides, arena) = (Besides::default(), hand.arena());
        if arena.is_whole() {
            hand.cpu().vm().set(Setting::MaxMapCount(AREAS));
            // The address of a mapping must not depend on the conflicts of the previous case.
            hand.cpu().vm().set(Setting::MapApart(1));
        }
        if arena.has_heap() {
            // The heap of the previous case must not remain.
            let start = hand.space().set_heap_start(hand.cpu(), arena.addr(NO_HEAP));
            start.expect("the heap is empty");
        }
        let fence = MapFlags::PRIVATE | MapFlags::ANONYMOUS | MapFlags::FIXED;
        for VirtRange { start, .. } in arena.fences() {
            let mapped = hand.space().mmap(hand.cpu(), start, PAGE_SIZE, op::NONE, fence);
            mapped.expect("memory for a VMA");
        }
        for op in &self.start {
            op.apply(hand, &besides, &besides.old);
        }
        besides
    }

    /// Returns whether the case has a huge leaf, which costs hundreds of pages.
    pub fn is_text(&self) -> bool {
        self.start.contains(&Op::Text)
    }

    /// Returns whether private pages may be swapped out, if there is a swap area.
    pub fn swaps(&self) -> bool {
        self.sides.iter().flatten().any(|op| op.swaps())
    }

    /// Returns whether the case's file is slow while two CPUs run.
    pub fn is_slow(&self) -> bool {
        self.start.contains(&Op::SlowFile)
    }

    /// Prepares the run of two CPUs: pages may be aged, and the store of a slow file begins some
    /// reads.
    pub fn begin<H: Hand>(&self, hand: &H, besides: &Besides<H::Child>) {
        if hand.random(2) != 0 {
            let (start, len) = (hand.arena().addr(0), WINDOW as u64 * PAGE_SIZE);
            // Even if some pages are unmapped, the other pages are aged.
            let _holes = hand.space().madvise(hand.cpu(), start, len, Advice::Cold);
            hand.cpu().flush_local();
        }
        let (true, Some(file), Some(words)) =
            (self.is_slow(), besides.object.get(), besides.words.get())
        else {
            return;
        };
        words.set_slow(true);
        if hand.random(4) != 0 {
            file.read_ahead(hand.cpu(), UNDER_WAY).expect("memory for a page");
        }
    }

    /// Ends the run of two CPUs: completes reads without a waiter. From now on the store reads at
    /// once.
    pub fn end<H: Hand>(&self, hand: &H, besides: &Besides<H::Child>) {
        if let Some(words) = besides.slow() {
            words.set_slow(false);
            while words.complete(hand, Which::Oldest) {}
        }
    }

    /// Does operation `number` of `side`.
    pub fn step<H: Hand>(
        &self,
        hand: &H,
        side: usize,
        number: usize,
        besides: &Besides<H::Child>,
    ) -> Ret {
        self.sides[side][number].apply(hand, besides, &besides.new[side])
    }

    /// Records the state after the pair, runs the revealing operations, ends the children and the
    /// object, and empties the space or the arena.
    pub fn conclude<H: Hand>(
        &self,
        hand: &H,
        mut returned: [Vec<Ret>; 2],
        besides: Besides<H::Child>,
    ) -> Outcome {
        let any = |is: fn(Op) -> bool| self.sides.iter().flatten().any(|&op| is(op));
        let three = self.sides.iter().map(Vec::len).sum::<usize>() > 2;
        let (by_vma, may_miss) = (any(Op::is_by_vma), !self.pages || any(Op::moves_pages));
        let each = self.sides.iter().flatten().zip(returned.iter_mut().flatten());
        for (op, ret) in each {
            match ret {
                Ret::Areas(areas) if by_vma || three => areas.clear(),
                _ if three && matches!(op, Op::InCore(_)) => *ret = Ret::Done,
                Ret::InCore(there) if may_miss => *there = false,
                _ => {}
            }
        }
        if hand.arena().is_whole() {
            hand.cpu().vm().set(Setting::MaxMapCount(AREAS));
        }
        let elsewhere = self.elsewhere_of(hand, &mut returned);
        let keep = |seen: Seen| if self.pages { seen } else { seen.without_pages() };
        let seen = keep(Seen::of(hand));
        let Besides { old, new: [first, second], object, words } = besides;
        let (object, words) = (object.into_inner(), words.into_inner());
        let see_object = || {
            let seen = ObjectSeen::of(object.as_ref()?, hand.cpu());
            Some(if self.pages { seen } else { seen.without_pages() })
        };
        let object_seen = see_object();
        let children = [old, first, second].map(|children| {
            let seen = |child: H::Child| {
                let seen = keep(Seen::child(hand, &child));
                hand.exit(child);
                seen
            };
            children.into_inner().unwrap().into_iter().map(seen).collect()
        });
        let after = self.after.iter().map(|op| op.alone(hand)).collect();
        let last = keep(Seen::of(hand));
        let placed = Placed::of(hand, &elsewhere);
        let placed = if self.pages { placed } else { placed.without_pages() };
        let stored = object.as_ref().zip(words).map(|(file, words)| {
            file::write_back(hand.cpu(), hand.space(), file, 0..u64::MAX)
                .expect("a successful write-back");
            // No order loses stored bytes, so this check needs no comparison.
            let stored = words.get();
            let there = ObjectSeen::of(file, hand.cpu());
            assert!(there.is(&stored), "{there:?} was written back as {stored:?}:\n{self}");
            stored
        });
        let objects = object_seen.zip(see_object()).map(|(seen, last)| [seen, last]);
        if let Some(object) = object {
            Object::release(object, hand.cpu());
        }
        Self::clear(hand, &elsewhere);
        Outcome { returned, seen, children, after, last, placed, object: objects, stored }
    }

    /// Returns the mappings placed outside of the arena, and removes them from `returned`.
    fn elsewhere_of<H: Hand>(&self, hand: &H, returned: &mut [Vec<Ret>; 2]) -> Vec<Span> {
        let arena = hand.arena();
        let mut elsewhere = Vec::new();
        let each = self.sides.iter().flatten().zip(returned.iter_mut().flatten());
        for (op, ret) in each {
            if let (&Ret::At(page), Some(pages)) = (&*ret, op.placed_pages())
                && !arena.has(arena.addr(page))
            {
                elsewhere.push(Span::new(page, pages));
                *ret = Ret::Elsewhere;
            }
        }
        elsewhere
    }

    /// Empties the space, or the arena and the mappings placed elsewhere.
    fn clear<H: Hand>(hand: &H, elsewhere: &[Span]) {
        let (space, cpu, arena) = (hand.space(), hand.cpu(), hand.arena());
        hand.poll();
        for range in elsewhere.iter().map(|span| arena.range(*span)).chain(arena.parts()) {
            space.munmap(cpu, range.start, range.len()).expect("all mappings can be unmapped");
        }
        if arena.has_heap() {
            space.brk(cpu, space.heap_range().start);
        }
    }

    /// Every order of the steps of both sides.
    fn all_orders(&self) -> Vec<Order> {
        let [first, second] = [0, 1].map(|side| self.steps(side).len());
        let all = 0u32..1 << (first + second);
        let chosen = all.filter(|bits| bits.count_ones() as usize == second);
        chosen
            .map(|bits| (0..first + second).map(|at| (bits >> at & 1) as usize).collect())
            .collect()
    }

    /// Returns the smallest steps of a side: the number of the operation, the step, and whether the
    /// step returns a value.
    fn steps(&self, side: usize) -> Vec<(usize, Op, bool)> {
        let others = self.sides[1 - side].len();
        let each = |(number, op): (usize, &Op)| {
            let steps = op.steps(others, self.fine).into_iter();
            steps.map(move |(step, tells)| (number, step, tells))
        };
        self.sides[side].iter().enumerate().flat_map(each).collect()
    }

    /// Runs the operations in one order, in an empty space.
    pub fn in_order<H: Hand>(&self, hand: &H, order: &[usize]) -> Outcome {
        let besides = self.prepare(hand);
        let mut returned = [0, 1].map(|side| vec![Ret::Done; self.sides[side].len()]);
        let mut steps = [0, 1].map(|side| self.steps(side).into_iter());
        for &side in order {
            let (number, step, tells) = steps[side].next().expect("a step of the order");
            let so_far = &mut returned[side][number];
            if !matches!(so_far, Ret::Refused(_)) {
                let ret = step.apply(hand, &besides, &besides.new[side]);
                if tells {
                    *so_far = ret;
                }
            }
        }
        self.conclude(hand, returned, besides)
    }

    /// Returns the outcome of every order.
    pub fn orders<H: Hand>(&self, hand: &H) -> Vec<(Order, Outcome)> {
        let all = self.all_orders().into_iter();
        all.map(|order| (order.clone(), self.in_order(hand, &order))).collect()
    }

    /// Returns the same case with other permitted steps.
    fn finer(&self) -> impl Iterator<Item = Self> {
        let any = |is: fn(&Op) -> bool| self.sides.iter().flatten().any(is);
        let by_page = if any(|op| op.is_by_page()) { [false, true].as_slice() } else { &[false] };
        let faults = if any(|op| op.is_access()) {
            self.sides.iter().map(Vec::len).max().unwrap_or(0)
        } else {
            0
        };
        let freed = self.sides.iter().flatten().filter_map(|op| op.lazily_freed());
        let freed = freed.filter(|span| self.swaps() && span.pages <= WINDOW);
        let used = freed.map(|span| span.pages).max().unwrap_or(0);
        let ways = by_page.iter().flat_map(move |&by_page| {
            let begun = move |begun| (0..1 << used).map(move |used| Fine { by_page, begun, used });
            (0..1 << faults).flat_map(begun)
        });
        let others = ways.filter(|&fine| fine != Fine::default());
        others.map(|fine| Self { fine, ..self.clone() })
    }

    /// Returns the case with the actual addresses as hints, if some mappings were placed in a
    /// region of their CPU: the highest hole is guaranteed only to a CPU that maps alone.
    fn elsewhere(&self, found: &Outcome) -> Option<Self> {
        let mut case = self.clone();
        let ops = case.sides.iter_mut().flatten().zip(found.returned.iter().flatten());
        for (op, ret) in ops {
            if let (Op::Map(span, how @ (How::Placed | How::Hint), ..), Ret::At(page)) = (op, ret)
                && *page < REGIONS
            {
                (span.at, *how) = (*page, How::Hint);
            }
        }
        (case != *self).then_some(case)
    }

    /// Checks that `found` matches one of the orders. Runs further orders in `hand`'s space, which
    /// is empty.
    ///
    /// # Errors
    /// A description of the mismatch.
    pub fn judge<H: Hand>(
        &self,
        hand: &H,
        found: &Outcome,
        orders: &[(Order, Outcome)],
    ) -> Result<(), String> {
        if orders.iter().any(|(_, it)| it == found) {
            return Ok(());
        }
        // Rarely needed, and many.
        let any = |case: &Self| case.orders(hand).iter().any(|(_, it)| it == found);
        if self.finer().any(|case| any(&case)) {
            return Ok(());
        }
        if self.elsewhere(found).is_some_and(|case| any(&case) || case.finer().any(|it| any(&it))) {
            return Ok(());
        }
        let mut text = format!("no order of the operations has this outcome:\n{self}");
        text += &format!("  two CPUs:\n{found}");
        for (order, outcome) in orders {
            text += &format!("  in the order {order:?}:\n{outcome}");
        }
        Err(text)
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |f: &mut fmt::Formatter<'_>, name: &str, ops: &[Op]| {
            writeln!(f, "  {name}:")?;
            ops.iter().try_for_each(|op| writeln!(f, "    {op:?}"))
        };
        writeln!(f, "  boundary: 2^{}", self.power)?;
        list(f, "start", &self.start)?;
        list(f, "CPU 0", &self.sides[0])?;
        list(f, "CPU 1", &self.sides[1])?;
        list(f, "after", &self.after)
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rets = |rets: &[Ret]| rets.iter().map(Ret::to_string).collect::<Vec<_>>().join(", ");
        let [first, second] = &self.returned;
        writeln!(f, "    CPU 0: {}; CPU 1: {}", rets(first), rets(second))?;
        write!(f, "    then: {}", self.seen)?;
        for (whose, children) in ["old", "of CPU 0", "of CPU 1"].iter().zip(&self.children) {
            children.iter().try_for_each(|child| write!(f, "    a child, {whose}: {child}"))?;
        }
        writeln!(f, "    after: {}", rets(&self.after))?;
        write!(f, "    at last: {}", self.last)?;
        if self.placed != Placed::default() {
            write!(f, "    elsewhere: {}", self.placed)?;
        }
        match &self.object {
            Some([seen, last]) => writeln!(f, "    the object: {seen:?}, at last {last:?}"),
            None => Ok(()),
        }?;
        match &self.stored {
            Some(stored) => writeln!(f, "    in the store: {stored:?}"),
            None => Ok(()),
        }
    }
}
