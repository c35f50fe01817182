//! The operations of a thread in memory: one word for a touch, and a few for any other operation.
//!
//! Addresses are multiples of the page size, so the first word of an operation has room for the
//! code (bits 0 to 3) and flags (bits 4 to 11). Programs have many touches, and few operations of
//! another kind.

use super::Op;
use crate::event::{Access, Backing, Prot};
use faultless::VirtRange;
use std::fmt;
use std::iter::FusedIterator;

const TOUCH: u64 = 0;
const MAP: u64 = 1;
const UNMAP: u64 = 2;
const PROTECT: u64 = 3;
const REMAP: u64 = 4;
const ADVISE: u64 = 5;
const BRK: u64 = 6;
const POPULATE: u64 = 7;
const FORK: u64 = 8;
const LAUNCH: u64 = 9;
const SPAWN_THREAD: u64 = 10;
const EXEC: u64 = 11;
const EXIT: u64 = 12;

const CODE: u64 = 0xf;
/// The bits of an address that name a page.
const PAGE: u64 = !0xfff;

/// Operations in order.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Ops {
    words: Vec<u64>,
    count: usize,
}

impl Ops {
    /// Creates an empty list with room for `count` touches.
    pub(super) fn with_capacity(count: usize) -> Self {
        Self { words: Vec::with_capacity(count), count: 0 }
    }

    /// Returns the number of operations.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Returns whether there is no operation.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the operations in order.
    pub fn iter(&self) -> Iter<'_> {
        Iter { words: &self.words, left: self.count }
    }

    /// Adds an operation behind all others.
    pub(super) fn push(&mut self, op: Op) {
        self.count += 1;
        let mut put = |words: &[u64]| self.words.extend_from_slice(words);
        match op {
            Op::Touch { page, access, kernel } => {
                put(&[page | TOUCH | (access as u64) << 4 | u64::from(kernel) << 6]);
            }
            Op::Map { range, prot, shared, grows_down, populate, noreserve, backing } => {
                let flags = [shared, grows_down, populate, noreserve];
                let flags = flags.iter().rev().fold(0, |bits, flag| bits << 1 | u64::from(*flag));
                let more = u64::from(prot.bits()) | flags << 3 | (backing as u64) << 7;
                put(&[range.start | MAP, range.end | more]);
            }
            Op::Unmap { range } => put(&[range.start | UNMAP, range.end]),
            Op::Protect { range, prot } => {
                put(&[range.start | PROTECT | u64::from(prot.bits()) << 4, range.end]);
            }
            Op::Remap { old, new, keep_old } => {
                let first = old.start | REMAP | u64::from(keep_old) << 4;
                put(&[first, old.end, new.start, new.end]);
            }
            Op::Advise { range, advice } => {
                put(&[range.start | ADVISE, range.end, advice.into()]);
            }
            Op::Brk { old, new } => put(&[BRK, old, new]),
            Op::Populate { range, write } => {
                put(&[range.start | POPULATE | u64::from(write) << 4, range.end]);
            }
            Op::Fork { child } => put(&[FORK | u64::from(child) << 32]),
            Op::Launch { child } => put(&[LAUNCH | u64::from(child) << 32]),
            Op::SpawnThread { thread } => put(&[SPAWN_THREAD | u64::from(thread) << 32]),
            Op::Exec => put(&[EXEC]),
            Op::Exit => put(&[EXIT]),
        }
    }
}

impl fmt::Debug for Ops {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self).finish()
    }
}

impl<'a> IntoIterator for &'a Ops {
    type Item = Op;
    type IntoIter = Iter<'a>;

    fn into_iter(self) -> Iter<'a> {
        self.iter()
    }
}

/// Decodes [`Ops`] in order.
#[derive(Clone, Debug)]
pub struct Iter<'a> {
    words: &'a [u64],
    left: usize,
}

impl Iter<'_> {
    #[inline]
    fn word(&mut self) -> u64 {
        let (first, rest) = self.words.split_first().unwrap_or((&0, &[]));
        self.words = rest;
        *first
    }

    /// Decodes an operation that is no touch.
    fn other(&mut self, first: u64) -> Op {
        let start = first & PAGE;
        let flag = |at: u32| first >> at & 1 != 0;
        let number = (first >> 32) as u32;
        match first & CODE {
            MAP => {
                let more = self.word();
                let flag = |at: u32| more >> at & 1 != 0;
                Op::Map {
                    range: VirtRange::new(start, more & PAGE),
                    prot: Prot::from_bits_truncate(more as u8),
                    shared: flag(3),
                    grows_down: flag(4),
                    populate: flag(5),
                    noreserve: flag(6),
                    backing: Backing::ALL[((more >> 7) as usize & 7).min(Backing::ALL.len() - 1)],
                }
            }
            UNMAP => Op::Unmap { range: VirtRange::new(start, self.word()) },
            PROTECT => {
                let prot = Prot::from_bits_truncate((first >> 4) as u8);
                Op::Protect { range: VirtRange::new(start, self.word()), prot }
            }
            REMAP => {
                let old = VirtRange::new(start, self.word());
                let new = VirtRange::new(self.word(), self.word());
                Op::Remap { old, new, keep_old: flag(4) }
            }
            ADVISE => {
                let range = VirtRange::new(start, self.word());
                Op::Advise { range, advice: self.word() as u32 }
            }
            BRK => Op::Brk { old: self.word(), new: self.word() },
            POPULATE => {
                let range = VirtRange::new(start, self.word());
                Op::Populate { range, write: flag(4) }
            }
            FORK => Op::Fork { child: number },
            LAUNCH => Op::Launch { child: number },
            SPAWN_THREAD => Op::SpawnThread { thread: number },
            EXEC => Op::Exec,
            _ => Op::Exit,
        }
    }
}

impl Iterator for Iter<'_> {
    type Item = Op;

    #[inline]
    fn next(&mut self) -> Option<Op> {
        self.left = self.left.checked_sub(1)?;
        let first = self.word();
        if first & CODE != TOUCH {
            return Some(self.other(first));
        }
        let access = Access::ALL[(first >> 4) as usize & 3];
        Some(Op::Touch { page: first & PAGE, access, kernel: first >> 6 & 1 != 0 })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Iter<'_> {}
impl FusedIterator for Iter<'_> {}

#[cfg(test)]
mod tests {
    use super::*;
    use faultless::{PAGE_SIZE, USER_END};
    use proptest::prelude::*;
    use proptest::sample::select;

    fn op() -> impl Strategy<Value = Op> {
        let last = USER_END / PAGE_SIZE;
        let range = || {
            (0..last, 1..=last).prop_map(|(one, other)| {
                let (start, end) = if one < other { (one, other) } else { (other - 1, one) };
                VirtRange::new(start * PAGE_SIZE, (end.max(start + 1)) * PAGE_SIZE)
            })
        };
        let prot = || (0..8u8).prop_map(Prot::from_bits_truncate);
        let page = (0..last).prop_map(|page| page * PAGE_SIZE);
        prop_oneof![
            (page, select(&Access::ALL), any::<bool>())
                .prop_map(|(page, access, kernel)| Op::Touch { page, access, kernel }),
            (range(), prot(), any::<[bool; 4]>(), select(&Backing::ALL)).prop_map(
                |(range, prot, [shared, grows_down, populate, noreserve], backing)| Op::Map {
                    range,
                    prot,
                    shared,
                    grows_down,
                    populate,
                    noreserve,
                    backing
                }
            ),
            range().prop_map(|range| Op::Unmap { range }),
            (range(), prot()).prop_map(|(range, prot)| Op::Protect { range, prot }),
            (range(), range(), any::<bool>()).prop_map(|(old, new, keep_old)| Op::Remap {
                old,
                new,
                keep_old
            }),
            (range(), any::<u32>()).prop_map(|(range, advice)| Op::Advise { range, advice }),
            any::<[u64; 2]>().prop_map(|[old, new]| Op::Brk { old, new }),
            (range(), any::<bool>()).prop_map(|(range, write)| Op::Populate { range, write }),
            any::<u32>().prop_map(|child| Op::Fork { child }),
            any::<u32>().prop_map(|child| Op::Launch { child }),
            any::<u32>().prop_map(|thread| Op::SpawnThread { thread }),
            Just(Op::Exec),
            Just(Op::Exit),
        ]
    }

    proptest! {
        #[test]
        fn operations_are_read_as_they_were_added(
            all in proptest::collection::vec(op(), 0..40),
        ) {
            let mut ops = Ops::default();
            all.iter().for_each(|op| ops.push(*op));
            prop_assert_eq!(ops.iter().len(), all.len());
            prop_assert!(ops.iter().eq(all.iter().copied()));
        }
    }
}
