//! Cases drawn at random.

use super::Case;
use super::arena::POWERS;
use super::op::{Span, WINDOW};
use super::place::{Base, Relation};
use super::table::{Kind, Pair, may_meet};

/// One of this many cases has a huge leaf.
const TEXT_SELDOM: usize = 24;

/// Draws a case: usually a pair, occasionally two operations per side. `below` returns a random
/// number below its argument. Only the permitted kinds and starting states are drawn.
pub fn draw(
    below: &mut impl FnMut(usize) -> usize,
    kinds: impl Fn(Kind) -> bool,
    bases: impl Fn(Base) -> bool,
) -> Case {
    let mut kind = || {
        loop {
            let kind = Kind::ALL[below(Kind::ALL.len())];
            // Operations that end or copy a space take as long as many others.
            let often = !matches!(kind, Kind::Fork | Kind::Exit | Kind::Drop);
            if kinds(kind) && (often || below(4) == 0) {
                return kind;
            }
        }
    };
    let (kinds, more) = loop {
        let [first, second, more] = [kind(), kind(), kind()];
        if [[first, second], [first, more], [second, more]].into_iter().all(may_meet) {
            break ([first, second], more);
        }
    };
    // A huge leaf takes as long as many others as well.
    let text = below(TEXT_SELDOM) == 0 && bases(Base::Text);
    let relation = Relation::ALL[below(Relation::ALL.len())];
    let fits = !relation.is_of_leaf() || text && kinds.into_iter().all(Kind::meets_leaf);
    let spans = match below(2) {
        0 if fits => relation.spans(),
        _ => [span(below), span(below)],
    };
    let base = match Base::ALL[below(Base::ALL.len())] {
        _ if text => Base::Text,
        base if base != Base::Text && bases(base) => base,
        _ => Base::Whole,
    };
    let mut case = Pair { kinds, spans, base }.case();
    if below(3) == 0 {
        let side = below(2);
        case.sides[side].push(more.op(span(below), side));
    }
    let power = POWERS.start() + below(POWERS.count()) as u32;
    Case { power, ..Case::new(case.start, case.sides, case.after) }
}

fn span(below: &mut impl FnMut(usize) -> usize) -> Span {
    let at = below(WINDOW as usize) as i64;
    Span::new(at, 1 + below((WINDOW - at).min(3) as usize) as i64)
}
