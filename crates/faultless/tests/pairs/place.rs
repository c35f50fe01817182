//! The places of pairs of operations: the initial mappings, and the relative position of both
//! spans.

use super::op::{BOUNDARY, How, LEAF, Op, RW, Span, WINDOW};
use faultless::{MapFlags, MemoryLock, Prot};

/// Maps private memory, and stores to its pages.
pub fn fill(span: Span, ops: &mut Vec<Op>) {
    ops.push(Op::Map(span, How::Fixed, RW, MapFlags::PRIVATE));
    ops.extend((span.at..span.end()).map(|page| Op::Store(page, word(page))));
}

/// Returns the initial word of a page.
fn word(page: i64) -> u64 {
    1 + page.rem_euclid(64) as u64
}

listed! {
    /// The mappings of the window before the needs of the operations.
    Base {
        /// Nothing.
        Empty,
        /// One VMA with stores to its pages.
        Whole,
        /// One untouched VMA.
        Untouched,
        /// Several VMAs, some of which may merge if the mapping in between is removed or created.
        Parts,
        /// As [`Parts`](Self::Parts), with the limit of VMAs reached.
        Full,
        /// One VMA with stores to its pages; the two pages below the boundary are locked.
        Locked,
        /// Shared memory.
        Shared,
        /// An object, private: some pages were loaded, and some stored to.
        Object,
        /// The same, shared.
        ObjectShared,
        /// A file, private: some pages were loaded, and some stored to.
        File,
        /// The same, shared.
        FileShared,
        /// A private file whose store completes reads later: some pages were loaded, and some are
        /// being read.
        Slow,
        /// The same, shared.
        SlowShared,
        /// Device memory: some pages were loaded, and some stored to.
        Device,
        /// Program text, private and writable: a huge leaf maps the 2 MiB below the boundary.
        Text,
    }
}

impl Base {
    /// Returns the operations that create the state.
    pub fn ops(self) -> Vec<Op> {
        let mut ops = Vec::new();
        let window = Span::new(0, WINDOW);
        let mut map = |span, prot, kind| ops.push(Op::Map(span, How::Fixed, prot, kind));
        let object = |object, kind| {
            let touch = [Op::Load(0), Op::Store(2, word(2)), Op::Store(3, word(3)), Op::Load(5)];
            [object, Op::MapObject(window, kind)].into_iter().chain(touch)
        };
        match self {
            Self::Empty => {}
            Self::Whole => fill(window, &mut ops),
            Self::Untouched => map(window, RW, MapFlags::PRIVATE),
            Self::Locked => {
                fill(window, &mut ops);
                ops.push(Op::Lock(Span::new(BOUNDARY - 2, 2), MemoryLock::Now));
            }
            Self::Parts | Self::Full => {
                map(Span::new(2, 1), Prot::READ, MapFlags::PRIVATE);
                map(Span::new(5, 3), RW, MapFlags::PRIVATE);
                fill(Span::new(0, 2), &mut ops);
                fill(Span::new(3, 1), &mut ops);
                ops.push(Op::Load(5));
            }
            Self::Shared => {
                map(window, RW, MapFlags::SHARED);
                ops.extend((0..WINDOW).step_by(2).map(|page| Op::Store(page, word(page))));
            }
            Self::Object => ops.extend(object(Op::Object, MapFlags::PRIVATE)),
            Self::ObjectShared => ops.extend(object(Op::Object, MapFlags::SHARED)),
            Self::File => ops.extend(object(Op::File, MapFlags::PRIVATE)),
            Self::FileShared => ops.extend(object(Op::File, MapFlags::SHARED)),
            Self::Slow | Self::SlowShared => {
                let private = self == Self::Slow;
                let kind = if private { MapFlags::PRIVATE } else { MapFlags::SHARED };
                // All other pages are absent, or being read.
                let touch = [Op::Load(0), Op::Store(1, word(1))];
                ops.extend([Op::SlowFile, Op::MapObject(window, kind)].into_iter().chain(touch));
            }
            Self::Text => {
                let all = Span::new(LEAF.at, LEAF.pages + WINDOW - BOUNDARY);
                let touch = [Op::Load(0), Op::Load(5)];
                let text = [Op::Text, Op::MapObject(all, MapFlags::PRIVATE)];
                ops.extend(text.into_iter().chain(touch));
            }
            Self::Device => {
                let touch = [Op::Load(0), Op::Store(2, word(2)), Op::Load(5)];
                ops.extend([Op::Device, Op::MapDevice(window)].into_iter().chain(touch));
            }
        }
        ops
    }
}

listed! {
    /// How the spans of two operations lie.
    Relation {
        /// The same page.
        Same,
        /// The same two pages, on both sides of the boundary.
        SameAcross,
        /// The first below the second.
        Below,
        Above,
        /// With the boundary in between.
        BelowAcross,
        AboveAcross,
        /// The spans share some pages.
        Overlapping,
        OverlappingAbove,
        /// The second in the middle of the first.
        Around,
        Inside,
        /// In one VMA, if any, and not adjacent.
        Apart,
        /// Adjacent to the same hole, or the same VMA, of one page.
        Beside,
        /// A whole huge leaf, and one of its pages.
        Leaf,
        OfLeaf,
        /// A whole huge leaf for both.
        SameLeaf,
    }
}

impl Relation {
    pub fn spans(self) -> [Span; 2] {
        let (b, leaf) = (BOUNDARY, (LEAF.at, LEAF.pages));
        let [first, second] = match self {
            Self::Same => [(2, 1), (2, 1)],
            Self::SameAcross => [(b - 1, 2), (b - 1, 2)],
            Self::Below => [(1, 1), (2, 1)],
            Self::Above => [(2, 1), (1, 1)],
            Self::BelowAcross => [(b - 1, 1), (b, 1)],
            Self::AboveAcross => [(b, 1), (b - 1, 1)],
            Self::Overlapping => [(1, 2), (2, 2)],
            Self::OverlappingAbove => [(b - 1, 2), (b - 2, 2)],
            Self::Around => [(1, 4), (2, 1)],
            Self::Inside => [(b, 1), (b - 2, 4)],
            Self::Apart => [(1, 1), (6, 1)],
            Self::Beside => [(b - 2, 1), (b, 1)],
            Self::Leaf => [leaf, (2, 1)],
            Self::OfLeaf => [(2, 1), leaf],
            Self::SameLeaf => [leaf, leaf],
        };
        [first, second].map(|(at, pages)| Span::new(at, pages))
    }

    /// Returns whether an operation concerns a whole huge leaf.
    pub fn is_of_leaf(self) -> bool {
        matches!(self, Self::Leaf | Self::OfLeaf | Self::SameLeaf)
    }

    pub fn disjoint(self) -> bool {
        let [first, second] = self.spans();
        first.end() <= second.at || second.end() <= first.at
    }

    /// Returns whether there is a gap between the spans.
    pub fn parted(self) -> bool {
        matches!(self, Self::Apart | Self::Beside)
    }
}
