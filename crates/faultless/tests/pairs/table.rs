//! The table of operations, and the resulting pairs.
//!
//! A new operation is a row of [`Kind`]. The compiler then requires its effect and its needs, and
//! the operation is paired with every other operation, in every [`Relation`] and from every
//! [`Base`].

use super::Case;
use super::op::{APART, How, LEAF, NONE, Op, Part, RW, Span, WINDOW};
use super::place::{Base, Relation, fill};
use faultless::{Advice, MapFlags, MemoryLock, PrivateCopies, Prot, RemapFlags};
use std::fmt;

listed! {
    /// A kind of operation.
    Kind {
        MapHint,
        MapFixed,
        MapNoReplace,
        MapPlaced,
        MapShared,
        MapStack,
        MapPopulate,
        MapObject,
        MapObjectShared,
        MapDevice,
        Unmap,
        ProtectRead,
        ProtectNone,
        GrowInPlace,
        GrowOrMove,
        Shrink,
        MoveHere,
        MoveAway,
        MoveKeep,
        KeepAway,
        Lock,
        DontNeed,
        Free,
        Collapse,
        Random,
        DontFork,
        Bind,
        PopulateRead,
        PopulateWrite,
        WillNeed,
        MovePages,
        Compact,
        BrkGrow,
        BrkShrink,
        Load,
        Store,
        ReadOutside,
        WriteOutside,
        PinRead,
        PinWrite,
        StackGrowth,
        Truncate,
        TruncateIn,
        PunchHole,
        WriteBack,
        DropClean,
        Evict,
        PageOut,
        SwapOut,
        ReadPage,
        WritePage,
        Overwrite,
        GrowFile,
        InCore,
        Maps,
        Fork,
        Exit,
        Drop,
    }
}

/// The memory state that an operation changes, as far as it can disturb another operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touches {
    /// Creates, splits or removes VMAs: two such operations may disturb each other even if their
    /// ranges only touch.
    Vmas,
    /// The pages of the span.
    Pages,
    /// The whole space, independent of the other operation's span.
    Space,
}

impl Kind {
    /// The operation about `span`, by CPU `side`.
    pub fn op(self, span: Span, side: usize) -> Op {
        let Span { at, pages } = span;
        let (below, apart) = (Span::new(at - 1, 1), Span::new(APART[side], pages));
        let private = MapFlags::PRIVATE;
        let moves = RemapFlags::MAYMOVE;
        match self {
            Self::MapHint => Op::Map(span, How::Hint, RW, private),
            Self::MapFixed => Op::Map(span, How::Fixed, RW, private),
            Self::MapNoReplace => Op::Map(span, How::NoReplace, RW, private),
            Self::MapPlaced => Op::Map(span, How::Placed, RW, private),
            Self::MapShared => Op::Map(span, How::Fixed, RW, MapFlags::SHARED),
            Self::MapStack => Op::Map(span, How::Fixed, RW, private | MapFlags::GROWSDOWN),
            Self::MapPopulate => Op::Map(span, How::Fixed, RW, private | MapFlags::POPULATE),
            Self::MapObject => Op::MapObject(span, private),
            Self::MapObjectShared => Op::MapObject(span, MapFlags::SHARED),
            Self::MapDevice => Op::MapDevice(span),
            Self::Unmap => Op::Unmap(span),
            Self::ProtectRead => Op::Protect(span, Prot::READ),
            Self::ProtectNone => Op::Protect(span, NONE),
            Self::GrowInPlace => Op::Remap(below, pages + 1, RemapFlags::empty(), 0),
            Self::GrowOrMove => Op::Remap(below, pages + 1, moves, 0),
            Self::Shrink => Op::Remap(Span::new(at - 1, pages + 1), 1, RemapFlags::empty(), 0),
            Self::MoveHere => Op::Remap(apart, pages, moves | RemapFlags::FIXED, at),
            Self::MoveAway => Op::Remap(span, pages, moves | RemapFlags::FIXED, apart.at),
            Self::MoveKeep => Op::Remap(span, pages, moves | RemapFlags::DONTUNMAP, 0),
            Self::KeepAway => {
                let flags = moves | RemapFlags::FIXED | RemapFlags::DONTUNMAP;
                Op::Remap(span, pages, flags, apart.at)
            }
            Self::Lock => Op::Lock(span, MemoryLock::Now),
            Self::DontNeed => Op::Advise(span, Advice::DontNeed),
            Self::Free => Op::Advise(span, Advice::Free),
            Self::Collapse => Op::Advise(LEAF, Advice::Collapse),
            Self::Random => Op::Advise(span, Advice::Random),
            Self::DontFork => Op::Advise(span, Advice::DontFork),
            Self::Bind => Op::Bind(span),
            Self::PopulateRead => Op::Advise(span, Advice::PopulateRead),
            Self::PopulateWrite => Op::Advise(span, Advice::PopulateWrite),
            Self::WillNeed => Op::Advise(span, Advice::WillNeed),
            Self::MovePages => Op::MovePages(span),
            Self::Compact => Op::Compact,
            Self::BrkGrow => Op::Brk(span.end()),
            Self::BrkShrink => Op::Brk(at),
            Self::Load => Op::Load(at),
            Self::ReadOutside => Op::ReadOutside(at),
            Self::WriteOutside => Op::WriteOutside(at, 100 + side as u64),
            Self::PinRead => Op::PinRead(at),
            Self::PinWrite => Op::PinWrite(at, 100 + side as u64),
            Self::Store | Self::StackGrowth => Op::Store(at, 100 + side as u64),
            Self::Truncate => Op::Leave(span, PrivateCopies::Drop, Part::Both),
            Self::TruncateIn => Op::EndIn(at, Part::Both),
            Self::PunchHole => Op::Leave(span, PrivateCopies::Keep, Part::Both),
            Self::WriteBack => Op::WriteBack(span),
            Self::DropClean => Op::DropClean(span),
            Self::Evict => Op::Evict(span),
            Self::PageOut => Op::Advise(span, Advice::PageOut),
            Self::SwapOut => Op::SwapOut(span),
            Self::ReadPage => Op::ReadPage(at),
            Self::WritePage => Op::WritePage(at, 100 + side as u64),
            Self::Overwrite => Op::Overwrite(at, 100 + side as u64),
            Self::GrowFile => Op::Extend(WINDOW),
            Self::InCore => Op::InCore(at),
            Self::Maps => Op::Maps,
            Self::Fork => Op::Fork,
            Self::Exit => Op::Exit,
            Self::Drop => Op::Drop,
        }
    }

    pub fn touches(self) -> Touches {
        match self {
            Self::MapHint
            | Self::MapFixed
            | Self::MapNoReplace
            | Self::MapPlaced
            | Self::MapShared
            | Self::MapStack
            | Self::MapPopulate
            | Self::MapObject
            | Self::MapObjectShared
            | Self::MapDevice
            | Self::Unmap
            | Self::ProtectRead
            | Self::ProtectNone
            | Self::GrowInPlace
            | Self::GrowOrMove
            | Self::Shrink
            | Self::MoveHere
            | Self::MoveAway
            | Self::MoveKeep
            | Self::KeepAway
            | Self::Lock
            | Self::Random
            | Self::DontFork
            | Self::Bind
            | Self::BrkGrow
            | Self::BrkShrink
            | Self::StackGrowth => Touches::Vmas,
            Self::DontNeed
            | Self::Free
            | Self::PopulateRead
            | Self::PopulateWrite
            | Self::WillNeed
            | Self::MovePages
            | Self::Load
            | Self::Store
            | Self::ReadOutside
            | Self::WriteOutside
            | Self::PinRead
            | Self::PinWrite
            | Self::PunchHole
            | Self::WriteBack
            | Self::DropClean
            | Self::Evict
            | Self::PageOut
            | Self::SwapOut
            | Self::ReadPage
            | Self::WritePage
            | Self::Overwrite
            | Self::InCore => Touches::Pages,
            Self::Truncate
            | Self::TruncateIn
            | Self::GrowFile
            | Self::Collapse
            | Self::Compact
            | Self::Maps
            | Self::Fork
            | Self::Exit
            | Self::Drop => Touches::Space,
        }
    }

    /// Returns whether the operation needs a free span, and otherwise has another effect or none.
    fn wants_free(self) -> bool {
        match self {
            Self::MapHint
            | Self::MapNoReplace
            | Self::MapPlaced
            | Self::GrowInPlace
            | Self::GrowOrMove
            | Self::BrkGrow
            | Self::StackGrowth => true,
            Self::MapFixed
            | Self::MapShared
            | Self::MapStack
            | Self::MapPopulate
            | Self::MapObject
            | Self::MapObjectShared
            | Self::MapDevice
            | Self::Unmap
            | Self::ProtectRead
            | Self::ProtectNone
            | Self::Shrink
            | Self::MoveHere
            | Self::MoveAway
            | Self::MoveKeep
            | Self::KeepAway
            | Self::Lock
            | Self::DontNeed
            | Self::Free
            | Self::Collapse
            | Self::Random
            | Self::DontFork
            | Self::Bind
            | Self::PopulateRead
            | Self::PopulateWrite
            | Self::WillNeed
            | Self::MovePages
            | Self::Compact
            | Self::BrkShrink
            | Self::Load
            | Self::Store
            | Self::ReadOutside
            | Self::WriteOutside
            | Self::PinRead
            | Self::PinWrite
            | Self::Truncate
            | Self::TruncateIn
            | Self::PunchHole
            | Self::WriteBack
            | Self::DropClean
            | Self::Evict
            | Self::PageOut
            | Self::SwapOut
            | Self::ReadPage
            | Self::WritePage
            | Self::Overwrite
            | Self::GrowFile
            | Self::InCore
            | Self::Maps
            | Self::Fork
            | Self::Exit
            | Self::Drop => false,
        }
    }

    /// Adds the needs of the operation to the starting state, beyond the base.
    fn needs(self, span: Span, side: usize, ops: &mut Vec<Op>) {
        let Span { at, pages } = span;
        match self {
            Self::GrowInPlace | Self::GrowOrMove => fill(Span::new(at - 1, 1), ops),
            Self::MoveHere => fill(Span::new(APART[side], pages), ops),
            Self::BrkGrow => ops.extend([Op::HeapAt(at - 1), Op::Brk(at)]),
            Self::BrkShrink => ops.extend([Op::HeapAt(at - 1), Op::Brk(span.end())]),
            Self::StackGrowth => {
                let stack = Span::new(span.end(), 1);
                // Only other stacks may be near below.
                ops.push(Op::Unmap(Span::new(0, span.end().max(1))));
                let flags = MapFlags::PRIVATE | MapFlags::GROWSDOWN;
                ops.push(Op::Map(stack, How::Fixed, RW, flags));
                ops.push(Op::Store(stack.at, 1));
            }
            Self::MapObject | Self::MapObjectShared | Self::Truncate | Self::PunchHole => {
                ops.push(Op::Object);
            }
            Self::WriteBack
            | Self::DropClean
            | Self::Evict
            | Self::PageOut
            | Self::SwapOut
            | Self::ReadPage
            | Self::WritePage
            | Self::Overwrite
            | Self::TruncateIn => {
                ops.push(Op::File);
            }
            Self::GrowFile => {
                ops.extend([Op::File, Op::Leave(span, PrivateCopies::Drop, Part::Both)]);
            }
            Self::MapDevice => ops.push(Op::Device),
            Self::Exit | Self::Drop => ops.push(Op::Fork),
            Self::MapHint
            | Self::MapFixed
            | Self::MapNoReplace
            | Self::MapPlaced
            | Self::MapShared
            | Self::MapStack
            | Self::MapPopulate
            | Self::Unmap
            | Self::ProtectRead
            | Self::ProtectNone
            | Self::Shrink
            | Self::MoveAway
            | Self::MoveKeep
            | Self::KeepAway
            | Self::Lock
            | Self::DontNeed
            | Self::Free
            | Self::Collapse
            | Self::Random
            | Self::DontFork
            | Self::Bind
            | Self::PopulateRead
            | Self::PopulateWrite
            | Self::WillNeed
            | Self::MovePages
            | Self::Compact
            | Self::Load
            | Self::Store
            | Self::ReadOutside
            | Self::WriteOutside
            | Self::PinRead
            | Self::PinWrite
            | Self::InCore
            | Self::Maps
            | Self::Fork => {}
        }
    }

    /// Returns whether the operation treats a huge leaf, or one of its pages, differently from base
    /// pages, with at most 512 times the work.
    pub fn meets_leaf(self) -> bool {
        matches!(
            self,
            Self::MapFixed
                | Self::Unmap
                | Self::ProtectRead
                | Self::ProtectNone
                | Self::MoveAway
                | Self::Lock
                | Self::DontNeed
                | Self::Collapse
                | Self::Random
                | Self::Bind
                | Self::MovePages
                | Self::Compact
                | Self::Load
                | Self::Store
                | Self::ReadOutside
                | Self::PinWrite
                | Self::Truncate
                | Self::PunchHole
                | Self::DropClean
                | Self::Evict
                | Self::PageOut
                | Self::WritePage
                | Self::Fork
        )
    }

    /// Returns whether placement chooses the address.
    fn is_placed(self) -> bool {
        match self {
            Self::MapPlaced | Self::GrowOrMove | Self::MoveKeep => true,
            Self::MapHint
            | Self::MapFixed
            | Self::MapNoReplace
            | Self::MapShared
            | Self::MapStack
            | Self::MapPopulate
            | Self::MapObject
            | Self::MapObjectShared
            | Self::MapDevice
            | Self::Unmap
            | Self::ProtectRead
            | Self::ProtectNone
            | Self::GrowInPlace
            | Self::Shrink
            | Self::MoveHere
            | Self::MoveAway
            | Self::KeepAway
            | Self::Lock
            | Self::DontNeed
            | Self::Free
            | Self::Collapse
            | Self::Random
            | Self::DontFork
            | Self::Bind
            | Self::PopulateRead
            | Self::PopulateWrite
            | Self::WillNeed
            | Self::MovePages
            | Self::Compact
            | Self::BrkGrow
            | Self::BrkShrink
            | Self::Load
            | Self::Store
            | Self::ReadOutside
            | Self::WriteOutside
            | Self::PinRead
            | Self::PinWrite
            | Self::StackGrowth
            | Self::Truncate
            | Self::TruncateIn
            | Self::PunchHole
            | Self::WriteBack
            | Self::DropClean
            | Self::Evict
            | Self::PageOut
            | Self::SwapOut
            | Self::ReadPage
            | Self::WritePage
            | Self::Overwrite
            | Self::GrowFile
            | Self::InCore
            | Self::Maps
            | Self::Fork
            | Self::Exit
            | Self::Drop => false,
        }
    }
}

/// A pair, and its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    pub kinds: [Kind; 2],
    pub spans: [Span; 2],
    pub base: Base,
}

/// The reason for omitting a pair at a place, where it would be redundant or impossible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Omitted {
    /// The pair equals another pair with the sides exchanged.
    Mirrored,
    /// Both operations ignore spans.
    NoSpan,
    /// Both operations concern pages, and the pages differ.
    OtherPages,
    /// There is one heap with one end.
    OneHeap,
    /// The kernel serializes the operations.
    KeptApart,
    /// No object page is concerned, or only pages of one object.
    NoObject,
    /// The pair runs only at a huge leaf.
    Leaf,
    /// The two share little, and are run under the default policy.
    OtherRegime,
}

impl Omitted {
    pub const fn why(self) -> &'static str {
        match self {
            Self::Mirrored => "the same with the CPUs exchanged",
            Self::NoSpan => "both operations apply to the whole space at any address",
            Self::OtherPages => "both operations apply to single pages, and to different pages",
            Self::OneHeap => "a space has one heap with one end",
            Self::KeptApart => "the kernel serialises the two operations",
            Self::NoObject => "no operation, or no other operation, applies to pages of an object",
            Self::Leaf => {
                "the case needs a huge leaf and has none, or the operations treat the leaf as base pages"
            }
            Self::OtherRegime => "run under the default policy only",
        }
    }
}

/// All pairs of kinds, each once.
pub fn pairs() -> impl Iterator<Item = [Kind; 2]> {
    Kind::ALL
        .iter()
        .enumerate()
        .flat_map(|(at, &first)| Kind::ALL[at..].iter().map(move |&second| [first, second]))
}

/// Returns whether a kernel permits both operations at the same time. During the removal of object
/// pages from the spaces, the set of spaces must not change. During a truncation, the length must
/// not change otherwise.
pub fn may_meet([first, second]: [Kind; 2]) -> bool {
    let sets_length = |kind| matches!(kind, Kind::Truncate | Kind::TruncateIn | Kind::GrowFile);
    let leave = |kind| matches!(kind, Kind::Truncate | Kind::TruncateIn | Kind::PunchHole);
    let spaces = |kind| matches!(kind, Kind::Fork | Kind::Exit | Kind::Drop);
    !(leave(first) && spaces(second)
        || spaces(first) && leave(second)
        || sets_length(first) && sets_length(second))
}

/// Returns whether `base` adds information on the pair beyond other bases.
fn concerns([first, second]: [Kind; 2], base: Base) -> bool {
    let any = |is: fn(Kind) -> bool| is(first) || is(second);
    let leaves = any(|kind| matches!(kind, Kind::Truncate | Kind::PunchHole));
    let maps = any(|kind| matches!(kind, Kind::MapObject | Kind::MapObjectShared));
    let uses = any(|kind| {
        matches!(
            kind,
            Kind::Load
                | Kind::Store
                | Kind::ReadOutside
                | Kind::WriteOutside
                | Kind::PinRead
                | Kind::PinWrite
                | Kind::InCore
        )
    });
    // Only file bases concern file operations.
    let files = any(|kind| {
        matches!(
            kind,
            Kind::WriteBack
                | Kind::DropClean
                | Kind::Evict
                | Kind::PageOut
                | Kind::ReadPage
                | Kind::WritePage
                | Kind::Overwrite
                | Kind::TruncateIn
                | Kind::GrowFile
        )
    });
    let begins = any(|kind| kind == Kind::WillNeed);
    let reads = any(|kind| matches!(kind, Kind::PopulateRead | Kind::PopulateWrite | Kind::Lock));
    if files {
        return matches!(base, Base::File | Base::FileShared | Base::Slow | Base::SlowShared);
    }
    match base {
        Base::Empty | Base::Parts => maps || !leaves,
        Base::Whole | Base::Untouched | Base::Shared => !maps && !leaves,
        // Operations that temporarily create more VMAs than remain in the end.
        Base::Full => {
            [first, second].map(Kind::touches) == [Touches::Vmas; 2]
                && any(|kind| matches!(kind, Kind::MapFixed | Kind::MoveHere))
        }
        Base::Locked => {
            !maps && !leaves && any(|kind| matches!(kind, Kind::MoveKeep | Kind::KeepAway))
        }
        Base::Object | Base::ObjectShared => maps || leaves || uses,
        Base::File | Base::FileShared => maps || leaves || uses || begins,
        Base::Slow | Base::SlowShared => maps || leaves || uses || begins || reads,
        Base::Device => any(|kind| kind == Kind::MapDevice),
        Base::Text => first.meets_leaf() && second.meets_leaf(),
    }
}

/// Returns the places of a pair, and the reason for each omitted place.
pub fn places([first, second]: [Kind; 2]) -> impl Iterator<Item = (Pair, Result<(), Omitted>)> {
    let kinds = [first, second];
    let mirrored = |relation| {
        matches!(
            relation,
            Relation::Above
                | Relation::AboveAcross
                | Relation::OverlappingAbove
                | Relation::Inside
                | Relation::OfLeaf
        )
    };
    let heap = kinds.map(|kind| matches!(kind, Kind::BrkGrow | Kind::BrkShrink)) == [true; 2];
    Relation::ALL.iter().flat_map(move |&relation| {
        let touch = kinds.map(Kind::touches);
        let run = if first == second && mirrored(relation) {
            Err(Omitted::Mirrored)
        } else if touch == [Touches::Space; 2] && relation != Relation::Same {
            Err(Omitted::NoSpan)
        } else if !may_meet(kinds) {
            Err(Omitted::KeptApart)
        } else if heap && relation != Relation::Same && relation != Relation::Overlapping {
            Err(Omitted::OneHeap)
        } else if relation.disjoint()
            && !touch.contains(&Touches::Space)
            && (touch == [Touches::Pages; 2]
                || relation.parted() && touch.contains(&Touches::Pages))
        {
            Err(Omitted::OtherPages)
        } else {
            Ok(())
        };
        Base::ALL.iter().map(move |&base| {
            let of_leaf = relation.is_of_leaf() || kinds.contains(&Kind::Collapse);
            let run = match base {
                Base::Text if kinds.into_iter().all(Kind::meets_leaf) => match relation {
                    Relation::Same | Relation::SameAcross => run,
                    _ if relation.is_of_leaf() => run,
                    _ => Err(Omitted::Leaf),
                },
                Base::Text => Err(Omitted::Leaf),
                _ if of_leaf => Err(Omitted::Leaf),
                _ if concerns(kinds, base) => run,
                _ => Err(Omitted::NoObject),
            };
            (Pair { kinds, spans: relation.spans(), base }, run)
        })
    })
}

impl fmt::Display for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kinds: [first, second], spans, base } = self;
        write!(f, "{first:?} {second:?}")?;
        spans.iter().try_for_each(|span| write!(f, " {}+{}", span.at, span.pages))?;
        write!(f, " {base:?}")
    }
}

impl Pair {
    /// Returns whether both operations write state read by both, which deserves more schedules.
    pub fn shares(&self) -> bool {
        let touch = self.kinds.map(Kind::touches);
        let [first, second] = self.spans;
        let near = first.at <= second.end() && second.at <= first.end();
        touch == [Touches::Vmas; 2] && near
    }

    /// The pair as a case.
    pub fn case(&self) -> Case {
        let Self { kinds, spans, base } = *self;
        // Free frames between the frames of the pages give compaction some work.
        let compacts = kinds.contains(&Kind::Compact);
        let mut start = if compacts { scatter() } else { Vec::new() };
        start.extend(base.ops());
        if compacts {
            start.push(Op::Unmap(SCATTERED));
        }
        if !matches!(base, Base::Parts | Base::Full) {
            for (kind, span) in kinds.into_iter().zip(spans) {
                if kind.wants_free() {
                    start.push(Op::Unmap(span));
                }
            }
        }
        for side in [0, 1] {
            kinds[side].needs(spans[side], side, &mut start);
        }
        if kinds.into_iter().any(Kind::is_placed) {
            // Placed mappings go directly below the upper span, or to a hole there.
            start.push(Op::Roof(spans[0].end().max(spans[1].end())));
        }
        if base == Base::Full {
            start.push(Op::NoMoreAreas);
        }
        let sides = [0, 1].map(|side| vec![kinds[side].op(spans[side], side)]);
        Case::new(start, sides, reveal(spans))
    }
}

/// Pages present during the creation of the base's pages.
const SCATTERED: Span = Span::new(APART[0] + 100, 24);

/// Allocates frames, and frees every second frame again for the next pages.
fn scatter() -> Vec<Op> {
    let mut ops = vec![Op::Map(SCATTERED, How::Fixed, RW, MapFlags::PRIVATE)];
    ops.extend(SCATTERED.each().map(|page| Op::Store(page.at, 1)));
    ops.extend(SCATTERED.each().step_by(2).map(Op::Unmap));
    ops
}

/// Returns operations that reveal errors in the VMAs: a part is protected, another part unmapped,
/// and all pages are used.
pub fn reveal([first, second]: [Span; 2]) -> Vec<Op> {
    let apart = APART.into_iter().flat_map(|at| [at, at + 1]);
    let pages: Vec<i64> = (-1..=WINDOW).chain(apart).collect();
    let mut after: Vec<Op> = pages.iter().map(|&page| Op::Load(page)).collect();
    after.push(Op::Protect(Span::new(first.at, 1), Prot::READ));
    after.extend([Op::Store(first.at, 7), Op::Store(first.end(), 8)]);
    after.push(Op::Unmap(Span::new(second.at, 1)));
    after.extend([Op::Load(second.at), Op::Store(second.end(), 9), Op::Store(second.at - 1, 10)]);
    after.extend(pages.iter().map(|&page| Op::Load(page)));
    after
}
