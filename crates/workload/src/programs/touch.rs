//! Touches pages, with checks that the right page was touched.
//!
//! A written page holds its own address in its first word, which reveals pages mapped twice or at
//! the wrong address. Another word of the page shows that the page was zero. This word is read
//! after the write, because a read before the write would turn the write fault into a read fault.

use crate::program::Passes;
use crate::system::{Failure, Task, Worker};
use faultless::{Access, Advice, MapFlags, PAGE_SIZE, Prot, VirtRange};

/// Words of 8 bytes in a page.
const WORDS: u64 = PAGE_SIZE / 8;

/// Maps `len` bytes of private zeros, at any address.
#[inline]
pub(crate) fn map<T: Task>(task: &mut T, len: u64) -> Result<VirtRange, Failure> {
    let start =
        task.mmap(None, len, Prot::READ | Prot::WRITE, MapFlags::PRIVATE | MapFlags::ANONYMOUS)?;
    Ok(VirtRange::new(start, start + len))
}

/// Unmaps `range`.
#[inline]
pub(crate) fn unmap<T: Task>(task: &mut T, range: VirtRange) -> Result<(), Failure> {
    task.munmap(range.start, range.len())
}

/// Returns `worker`'s part of `range`. The parts of all workers cover each page exactly once.
pub(crate) fn part(range: VirtRange, worker: Worker) -> VirtRange {
    let page_at = |index: usize| {
        let pages = u128::from(range.pages()) * index as u128 / worker.count.max(1) as u128;
        range.start + pages as u64 * PAGE_SIZE
    };
    VirtRange::new(page_at(worker.index), page_at(worker.index + 1))
}

/// Touches the untouched page at `page`. `salt` selects the word that is checked for zero, so that
/// the passes check every word.
#[inline]
pub(crate) fn touch<T: Task>(
    task: &mut T,
    page: u64,
    access: Access,
    salt: u64,
) -> Result<(), Failure> {
    if access == Access::Write {
        task.store(page, page)?;
    }
    probe(task, page, salt)
}

/// Checks that a word of the page at `page` is zero: never the first word, and a different word for
/// each `salt`.
#[inline]
pub(crate) fn probe<T: Task>(task: &mut T, page: u64, salt: u64) -> Result<(), Failure> {
    let word = page + 8 + salt % (WORDS - 1) * 8;
    Failure::check("a word of a fresh page", word, 0, task.load(word)?)
}

/// [`touch`]es all pages of `range` and returns their number.
#[inline]
pub(crate) fn touch_all<T: Task>(
    task: &mut T,
    range: VirtRange,
    access: Access,
    salt: u64,
) -> Result<u64, Failure> {
    let mut page = range.start;
    while page < range.end {
        touch(task, page, access, salt)?;
        page += PAGE_SIZE;
    }
    Ok(range.pages())
}

/// Touches all pages of `part` in each of `passes`, and frees them in between. Calls `between`
/// after each page with the number of pages so far. Returns the touched pages and the passes.
#[inline]
pub(crate) fn sweep<T, B>(
    task: &mut T,
    part: VirtRange,
    access: Access,
    passes: Passes,
    mut between: B,
) -> Result<(u64, u64), Failure>
where
    T: Task,
    B: FnMut(&mut T, u64) -> Result<(), Failure>,
{
    let (mut touched, mut done) = (0, 0);
    while passes.more(task, done) {
        if done > 0 && !part.is_empty() {
            task.madvise(part.start, part.len(), Advice::DontNeed)?;
        }
        let mut page = part.start;
        while page < part.end {
            touch(task, page, access, done)?;
            touched += 1;
            between(task, touched)?;
            page += PAGE_SIZE;
        }
        done += 1;
    }
    Ok((touched, done))
}

/// Checks that the page at `page` has the contents left by [`touch`].
pub(crate) fn verify<T: Task>(task: &mut T, page: u64, access: Access) -> Result<(), Failure> {
    let expected = if access == Access::Write { page } else { 0 };
    Failure::check("the first word of a touched page", page, expected, task.load(page)?)
}

/// [`verify`]s all pages of `range`.
pub(crate) fn verify_all<T: Task>(
    task: &mut T,
    range: VirtRange,
    access: Access,
) -> Result<(), Failure> {
    (range.start..range.end)
        .step_by(PAGE_SIZE as usize)
        .try_for_each(|page| verify(task, page, access))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_tile_the_range(pages in 0u64..100_000, count in 1usize..70) {
            let range = VirtRange::new(1 << 30, (1 << 30) + pages * PAGE_SIZE);
            let mut at = range.start;
            for index in 0..count {
                let part = part(range, Worker { index, count });
                prop_assert_eq!(part.start, at);
                prop_assert!(part.pages() <= pages / count as u64 + 1);
                at = part.end;
            }
            prop_assert_eq!(at, range.end);
        }
    }
}
