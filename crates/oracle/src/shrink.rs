//! The smallest case that still fails: operations are removed, in ever smaller pieces, and then the
//! remaining operations are simplified.

use crate::case::Case;
use crate::op::{Op, PAGE, Window};

/// Makes `case`, which `fails`, as small as possible.
pub fn shrink(case: &Case, mut fails: impl FnMut(&Case) -> bool) -> Case {
    let mut least = case.clone();
    for at in (0..least.settings.len()).rev() {
        let mut without = least.clone();
        without.settings.remove(at);
        if fails(&without) {
            least = without;
        }
    }
    loop {
        let before = least.clone();
        leave_out(&mut least, &mut fails);
        make_plainer(&mut least, &mut fails);
        if least == before {
            return least;
        }
    }
}

fn leave_out(least: &mut Case, fails: &mut impl FnMut(&Case) -> bool) {
    let mut piece = least.ops.len().div_ceil(2);
    while piece > 0 {
        let mut at = 0;
        while at < least.ops.len() {
            let mut without = least.clone();
            without.ops.drain(at..(at + piece).min(least.ops.len()));
            if fails(&without) {
                *least = without;
            } else {
                at += piece;
            }
        }
        piece /= 2;
    }
}

fn make_plainer(least: &mut Case, fails: &mut impl FnMut(&Case) -> bool) {
    for at in 0..least.ops.len() {
        let mut tried = 0;
        while let Some(op) = plainer(&least.ops[at], least.window).into_iter().nth(tried) {
            let mut changed = least.clone();
            changed.ops[at] = op;
            if fails(&changed) {
                *least = changed;
                tried = 0;
            } else {
                tried += 1;
            }
        }
    }
}

/// Operations like `op` with less to them. Each is less than `op` by an order without end chains.
fn plainer(op: &Op, window: Window) -> Vec<Op> {
    let mut all = Vec::new();
    // All variants with one flag removed.
    let fewer =
        |flags: u64| (0..64).map(move |bit| flags & !(1 << bit)).filter(move |&f| f != flags);
    let shorter = |len: u64| {
        // Intentionally invalid lengths become invalid by only a page.
        let pages = if len < 1 << 24 { len / PAGE } else { 1 };
        let ends = [1, pages / 2, pages.saturating_sub(1)].map(|pages| pages * PAGE);
        ends.into_iter().filter(move |&end| end != 0 && end < len)
    };
    let lower = |addr: u64| {
        let start = window.start();
        (addr > start && addr < start + (1 << 20) && addr.is_multiple_of(PAGE))
            .then(|| addr - PAGE)
            .into_iter()
    };
    match *op {
        Op::Map { addr, len, prot, flags, object } => {
            let with = |addr, len, prot, flags| Op::Map { addr, len, prot, flags, object };
            all.extend(shorter(len).map(|len| with(addr, len, prot, flags)));
            all.extend(fewer(flags & !0x33).map(|rest| with(addr, len, prot, flags & 0x33 | rest)));
            if let Some((number, first)) = object.filter(|&(_, first)| first != 0) {
                let object = Some((number, first / 2));
                all.push(Op::Map { addr, len, prot, flags, object });
            }
            if object.is_some() && flags & 0x33 == 0x12 {
                all.push(Op::Map { addr, len, prot, flags: flags | 0x20, object: None });
            }
            all.extend(lower(addr).map(|addr| with(addr, len, prot, flags)));
        }
        Op::Unmap { addr, len } => {
            all.extend(shorter(len).map(|len| Op::Unmap { addr, len }));
            all.extend(lower(addr).map(|addr| Op::Unmap { addr, len }));
        }
        Op::Protect { addr, len, prot } => {
            all.extend(shorter(len).map(|len| Op::Protect { addr, len, prot }));
            all.extend(fewer(prot & !7).map(|more| Op::Protect {
                addr,
                len,
                prot: prot & 7 | more,
            }));
            all.extend(lower(addr).map(|addr| Op::Protect { addr, len, prot }));
        }
        Op::Remap { addr, len, new_len, flags, target } => {
            let with = |len, new_len| Op::Remap { addr, len, new_len, flags, target };
            all.extend(shorter(len).map(|less| with(less, new_len)));
            all.extend(shorter(new_len).map(|less| with(len, less)));
            if len == new_len {
                all.extend(shorter(len).map(|less| with(less, less)));
            }
            all.extend(lower(target).map(|target| Op::Remap { addr, len, new_len, flags, target }));
        }
        Op::Advise { addr, len, advice } => {
            all.extend(shorter(len).map(|len| Op::Advise { addr, len, advice }));
        }
        Op::Resident { addr, len } => {
            all.extend(shorter(len).map(|len| Op::Resident { addr, len }));
        }
        Op::Touch => all.push(Op::Look),
        Op::Load { .. }
        | Op::Store { .. }
        | Op::Fetch { .. }
        | Op::Look
        | Op::Census
        | Op::Write { .. }
        | Op::Truncate { .. }
        | Op::Fork
        | Op::Switch { .. }
        | Op::Exit { .. } => {}
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::Generator;

    #[test]
    fn only_failing_operations_remain() {
        let mut case = Generator::new(7).case(60);
        let (start, addr) = (case.window.start(), case.window.page(9));
        case.ops.insert(case.ops.len() / 2, Op::Unmap { addr, len: 20 * PAGE });
        let culprit = |op: &Op| matches!(op, Op::Unmap { len, .. } if *len >= 5 * PAGE);
        let least = shrink(&case, |case| case.ops.iter().any(culprit));
        assert_eq!(least.settings, Vec::<String>::new());
        assert_eq!(least.ops, [Op::Unmap { addr: start, len: 5 * PAGE }]);
    }
}
