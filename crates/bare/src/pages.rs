//! Allocation of runs of pages, with one bit per page.

/// Pages, of which runs are allocated and freed.
#[derive(Debug)]
pub struct Pages<'a> {
    /// A set bit: the page is used. Bits beyond `len` are set.
    words: &'a mut [u64],
    len: usize,
    free: usize,
    /// All pages below this one are used.
    first: usize,
}

/// Returns the number of words required for [`Pages`] of `len` pages.
pub const fn words(len: usize) -> usize {
    len.div_ceil(64)
}

impl<'a> Pages<'a> {
    /// `len` pages, all free. `words` are [`words(len)`](words).
    pub fn new(words: &'a mut [u64], len: usize) -> Self {
        words.fill(0);
        let pages = Self { words, len, free: len, first: 0 };
        for beyond in len..pages.words.len() * 64 {
            pages.words[beyond / 64] |= 1 << (beyond % 64);
        }
        pages
    }

    /// Returns the number of free pages.
    pub const fn free(&self) -> usize {
        self.free
    }

    /// Takes the first free run of `count` pages at a multiple of `align`, a power of two.
    pub fn take(&mut self, count: usize, align: usize) -> Option<usize> {
        if count == 0 || count > self.free {
            return None;
        }
        self.first = self.next(self.first, self.len, false);
        let mut at = self.first.next_multiple_of(align);
        loop {
            let end = at.checked_add(count).filter(|&end| end <= self.len)?;
            let used = self.next(at, end, true);
            if used == end {
                self.mark(at, count, true);
                self.free -= count;
                return Some(at);
            }
            at = self.next(used, self.len, false).next_multiple_of(align);
        }
    }

    /// Frees a run, or a part of a run.
    pub fn give(&mut self, at: usize, count: usize) {
        debug_assert!(self.next(at, at + count, false) == at + count, "freed twice");
        self.mark(at, count, false);
        self.free += count;
        self.first = self.first.min(at);
    }

    /// Returns the first page in `at..end` that is used (or, without `used`, free); `end` if there
    /// is no such page.
    fn next(&self, mut at: usize, end: usize, used: bool) -> usize {
        while at < end {
            let word = self.words[at / 64];
            let wanted = (if used { word } else { !word }) >> (at % 64);
            if wanted != 0 {
                return (at + wanted.trailing_zeros() as usize).min(end);
            }
            at = (at / 64 + 1) * 64;
        }
        end
    }

    fn mark(&mut self, mut at: usize, count: usize, used: bool) {
        let end = at + count;
        while at < end {
            let bits = (end - at).min(64 - at % 64);
            let mask = (u64::MAX >> (64 - bits)) << (at % 64);
            let word = &mut self.words[at / 64];
            *word = if used { *word | mask } else { *word & !mask };
            at += bits;
        }
    }
}
