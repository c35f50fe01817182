//! The programs known to have failed.

use super::Case;
use super::op::{APART, BOUNDARY, How, Op, RW, Span, WINDOW};
use super::place::fill;
use super::table::reveal;
use faultless::{Advice, MapFlags, MemoryLock, Prot, RemapFlags};

/// Returns the programs known to have failed, by name.
pub fn known() -> Vec<(&'static str, Case)> {
    let map = |at, pages, how| Op::Map(Span::new(at, pages), how, RW, MapFlags::PRIVATE);
    let read_only = |at| Op::Protect(Span::new(at, 1), Prot::READ);
    let made = |start, first, at, how| {
        // One side creates the lower page. The other side creates the upper page, and then makes it
        // read-only.
        let sides = [vec![first], vec![map(at, 1, how), read_only(at)]];
        Case::new(start, sides, reveal([Span::new(at, 1), Span::new(at - 1, 1)]))
    };
    let filled = |span| {
        let mut ops = Vec::new();
        fill(span, &mut ops);
        ops
    };
    let (moves, stays) = (RemapFlags::MAYMOVE, RemapFlags::empty());
    let to = moves | RemapFlags::FIXED;
    let source = Span::new(APART[0], 1);
    let b = BOUNDARY;
    let pair =
        |start, first, second, spans| Case::new(start, [vec![first], vec![second]], reveal(spans));
    let stack = MapFlags::PRIVATE | MapFlags::GROWSDOWN;
    vec![
        ("hints", made(vec![], map(1, 1, How::Hint), 2, How::Hint)),
        ("fixed", made(vec![], map(b - 1, 1, How::Fixed), b, How::Fixed)),
        ("target", {
            // An untouched VMA merges at every address.
            let start = vec![Op::Map(source, How::Fixed, RW, MapFlags::PRIVATE)];
            made(start, Op::Remap(source, 1, to, b - 1), b, How::Hint)
        }),
        ("growth", {
            let start = Span::new(b - 2, 1);
            made(filled(start), Op::Remap(start, 2, stays, 0), b, How::Hint)
        }),
        ("root", {
            // A first store below, and a mapping between this page and the stored page.
            let mut start = filled(Span::new(3, 1));
            start.push(map(1, 1, How::Fixed));
            let spans = [Span::new(1, 1), Span::new(2, 1)];
            pair(start, Op::Store(1, 100), map(2, 1, How::Fixed), spans)
        }),
        ("split", {
            let spans = [Span::new(1, 2), Span::new(1, 1)];
            pair(filled(spans[0]), Op::Remap(spans[0], 2, to, APART[0]), read_only(1), spans)
        }),
        ("unmapped target", {
            let mut start = filled(Span::new(1, 2));
            start.extend(filled(Span::new(6, 1)));
            let spans = [Span::new(1, 2), Span::new(6, 1)];
            pair(start, Op::Remap(spans[0], 2, to, APART[0]), Op::Unmap(Span::new(2, 5)), spans)
        }),
        ("shrink", {
            // The first operation grows in place after the second, or moves before it.
            let spans = [Span::new(1, 1), Span::new(1, 2)];
            let grow = Op::Remap(spans[0], 2, moves, 0);
            pair(filled(spans[1]), grow, Op::Remap(spans[1], 1, stays, 0), spans)
        }),
        ("place", {
            // Both parts of the move must be unmapped before the search for a place.
            let mut start = filled(Span::new(0, 2));
            start.push(Op::Map(Span::new(2, 1), How::Fixed, Prot::READ, MapFlags::PRIVATE));
            start.push(Op::Roof(3));
            let spans = [Span::new(0, 2), Span::new(0, 3)];
            pair(start, map(0, 2, How::Placed), Op::Remap(spans[1], 3, to, APART[1]), spans)
        }),
        ("first stores", {
            // Both stores go to pages that were in one VMA before the mapping, and will be again.
            let stores = vec![Op::Store(0, 100), Op::Store(2, 102)];
            let sides = [vec![map(1, 1, How::Fixed)], stores];
            let spans = [Span::new(0, 1), Span::new(2, 1)];
            Case::new(vec![map(0, 3, How::Fixed)], sides, reveal(spans))
        }),
        ("first store", {
            // The anon_vma is all that remains of the VMA with the store.
            let sides =
                [vec![map(b, 1, How::Fixed)], vec![Op::Store(b - 1, 100), map(0, b, How::Fixed)]];
            let spans = [Span::new(b, 1), Span::new(6, 1)];
            Case::new(vec![map(0, b + 1, How::Fixed)], sides, reveal(spans))
        }),
        ("unmapped neighbours", {
            // A mapping between two VMAs with an anon_vma adopts the anon_vma, even if both VMAs
            // are unmapped before the merge.
            let start = filled(Span::new(0, WINDOW));
            let above = Span::new(b, 1);
            let gone = vec![Op::Remap(above, 1, to, APART[1]), map(0, b - 1, How::Fixed)];
            let sides = [vec![map(b - 1, 1, How::Fixed)], gone];
            Case::new(start, sides, reveal([Span::new(b - 1, 1), above]))
        }),
        ("first store beside a change", {
            // The mapping in between adopts the anon_vma from above, while the VMA below gets
            // another anon_vma.
            let mut start = filled(Span::new(b, 2));
            start.push(Op::Map(Span::new(b - 1, 1), How::Fixed, RW, stack));
            start.push(map(b - 2, 1, How::Fixed));
            let spans = [Span::new(b - 1, 1), Span::new(b - 2, 1)];
            pair(start, map(b - 1, 1, How::Fixed), Op::Store(b - 2, 100), spans)
        }),
        ("more areas than the limit", {
            // The second of two moved VMAs would exceed the limit; the first VMA has moved by then.
            let mut start = filled(Span::new(b - 1, 1));
            start.extend([map(b + 1, 3, How::Fixed), map(0, 1, How::Fixed)]);
            start.push(Op::Map(Span::new(b - 2, 1), How::Fixed, Prot::READ, MapFlags::PRIVATE));
            start.push(Op::NoMoreAreas);
            let spans = [Span::new(b - 1, 3), Span::new(b - 2, 2)];
            pair(start, Op::Remap(spans[0], 3, to, APART[1]), Op::Unmap(spans[1]), spans)
        }),
        ("cut off a change", {
            // The cut part merges with the change, and has its anon_vma already.
            let mut start = filled(Span::new(b - 1, 1));
            start.push(map(b + 1, 3, How::Fixed));
            let (mapped, above) = (Span::new(b, 3), Span::new(b + 3, 1));
            let protect = Op::Protect(above, Prot::empty());
            pair(start, map(mapped.at, mapped.pages, How::Fixed), protect, [mapped, above])
        }),
        ("cut off from a change", {
            // The finished change of one side merges with its neighbour, although the other side
            // has a change in progress further down.
            let keep = Op::Remap(Span::new(1, 1), 1, to | RemapFlags::DONTUNMAP, APART[0]);
            let leave = Op::Remap(Span::new(b - 1, 1), 4, moves, 0);
            let sides = [vec![keep], vec![map(b + 2, 1, How::Fixed), leave]];
            let reveal = reveal([Span::new(1, 1), Span::new(b + 2, 1)]);
            Case::new(filled(Span::new(0, WINDOW)), sides, reveal)
        }),
        ("kept beside a change", {
            // The remains are part of the future merged VMA, and therefore keep the anon_vma.
            let part = Span::new(b - 4, 3);
            let keep = Op::Remap(part, 3, moves | RemapFlags::DONTUNMAP, 0);
            let kept = vec![keep, Op::Protect(part, Prot::READ)];
            let sides = [vec![map(b - 1, 1, How::Fixed)], kept];
            let mut start = filled(Span::new(0, b));
            start.push(Op::Roof(b));
            Case::new(start, sides, reveal([Span::new(b - 1, 1), part]))
        }),
        ("equal again beside a change", {
            // The locked part differs from the adjacent change. The remains of the part are equal
            // again, and still a separate VMA: one VMA too many.
            let mut start = filled(Span::new(b - 2, 2));
            start.push(Op::Map(Span::new(b, 1), How::Fixed, Prot::READ, MapFlags::PRIVATE));
            start.extend([map(b + 1, 1, How::Fixed), Op::Store(b + 1, 4), Op::NoMoreAreas]);
            let (part, mapped) = (Span::new(b - 1, 1), Span::new(b, 2));
            let keep = Op::Remap(part, 1, to | RemapFlags::DONTUNMAP, APART[0]);
            let sides = [vec![map(b, 2, How::Fixed)], vec![Op::Lock(part, MemoryLock::Now), keep]];
            Case::new(start, sides, reveal([mapped, part]))
        }),
        ("cut before a merge", {
            // The part between a VMA and the cut merges with the VMA, although the change that
            // would have merged all three is still in progress.
            let (mapped, part) = (Span::new(b - 3, 2), Span::new(b - 2, 1));
            let mut start = filled(Span::new(0, b));
            start.push(Op::Unmap(mapped));
            let keep = Op::Remap(Span::new(b - 1, 1), 1, to | RemapFlags::DONTUNMAP, APART[0]);
            let cut = vec![map(b - 3, 2, How::NoReplace), Op::Remap(part, 1, to, APART[1])];
            Case::new(start, [vec![keep], cut], reveal([mapped, part]))
        }),
        ("kept locked beside a change", {
            let part = Span::new(b - 2, 1);
            let keep = Op::Remap(part, 1, moves | RemapFlags::DONTUNMAP, 0);
            let mut start = filled(Span::new(0, b));
            start.push(Op::Lock(Span::new(b - 3, 3), MemoryLock::Now));
            start.push(Op::Roof(b));
            // Split, and merged again.
            let twice = [Prot::READ, RW].map(|prot| Op::Protect(Span::new(b - 1, 1), prot));
            let sides = [twice.to_vec(), vec![keep]];
            Case::new(start, sides, reveal([Span::new(b - 1, 1), part]))
        }),
        ("grown again", {
            // The page to which the stack has grown moves away before the fault goes on, twice.
            let start = vec![Op::Map(Span::new(4, 1), How::Fixed, RW, stack), Op::Store(4, 1)];
            let below = Span::new(2, 1);
            let away = [moves, moves | RemapFlags::DONTUNMAP]
                .map(|flags| Op::Remap(below, if flags == moves { 3 } else { 1 }, flags, 0));
            let sides = [away.to_vec(), vec![Op::Store(2, 101)]];
            Case::new(start, sides, reveal([below, below]))
        }),
        ("below a replaced stack", {
            // A store below the stack fails for lack of a mapping. A later store to the stack must
            // not take effect before the replacement.
            let start = vec![Op::Map(Span::new(7, 1), How::Fixed, RW, stack), Op::Store(7, 1)];
            let start = [start, vec![Op::Object]].concat();
            let spans = [Span::new(6, 1), Span::new(7, 1)];
            let sides = [
                vec![Op::Store(6, 100), Op::Store(7, 100)],
                vec![Op::MapObject(spans[1], MapFlags::SHARED)],
            ];
            Case::new(start, sides, reveal(spans))
        }),
        ("mincore at the first store", {
            // The page is present before, as a zero page, and afterwards.
            let start = vec![map(5, 1, How::Fixed), Op::Load(5)];
            pair(start, Op::Store(5, 100), Op::InCore(5), [Span::new(5, 1); 2])
        }),
        ("pinned without a page", {
            // A failed pin leaves no page in a mapping that moves to the address and away.
            let start = vec![Op::Map(source, How::Fixed, RW, MapFlags::PRIVATE)];
            let page = Span::new(0, 1);
            let moves = vec![Op::Remap(source, 1, to, 0), Op::Remap(page, 1, to, APART[1])];
            Case::new(start, [vec![Op::PinRead(0)], moves], reveal([page, page]))
        }),
        ("advice on a hole", {
            // A CPU that received the error for an unmapped page cannot use the page afterwards.
            let (spans, last) = ([Span::new(7, 1), Span::new(6, 2)], WINDOW - 1);
            let sides = [
                vec![Op::Advise(spans[0], Advice::Free), Op::Load(last)],
                vec![Op::Unmap(spans[1])],
            ];
            Case::new(filled(Span::new(0, WINDOW)), sides, reveal(spans))
        }),
        ("populated a hole", {
            let (spans, last) = ([Span::new(7, 1), Span::new(6, 2)], WINDOW - 1);
            let populate = Op::Advise(spans[0], Advice::PopulateRead);
            let sides = [vec![populate, Op::Load(last)], vec![Op::Unmap(spans[1])]];
            Case::new(filled(Span::new(0, WINDOW)), sides, reveal(spans))
        }),
        ("populate", {
            let (low, high) = (Span::new(1, 2), Span::new(3, 1));
            let start = vec![Op::Map(high, How::Fixed, RW, stack), Op::Store(3, 1)];
            let populate = MapFlags::PRIVATE | MapFlags::POPULATE;
            let map = Op::Map(low, How::Fixed, RW, populate);
            pair(start, map, Op::Unmap(low), [low, low])
        }),
    ]
}
