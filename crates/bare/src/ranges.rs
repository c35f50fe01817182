//! Ranges of physical memory, from which boot takes its memory.

/// The maximum number of ranges in a set.
pub const MAX_RANGES: usize = 128;

/// A half-open range of physical addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Range {
    /// First byte.
    pub start: u64,
    /// The byte after the last byte.
    pub end: u64,
}

impl Range {
    /// Returns the range `start..end`; empty if `end` is below `start`.
    pub const fn new(start: u64, end: u64) -> Self {
        Self { start, end: if end < start { start } else { end } }
    }

    /// Returns the size in bytes.
    pub const fn len(self) -> u64 {
        self.end - self.start
    }

    /// Returns whether the range is empty.
    pub const fn is_empty(self) -> bool {
        self.start == self.end
    }
}

/// More than [`MAX_RANGES`] ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooMany;

/// Free memory: disjoint ranges.
#[derive(Clone, Debug)]
pub struct Ranges {
    ranges: [Range; MAX_RANGES],
    len: usize,
}

impl Ranges {
    /// No range.
    pub const EMPTY: Self = Self { ranges: [Range::new(0, 0); MAX_RANGES], len: 0 };

    /// The ranges, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = Range> + '_ {
        self.ranges[..self.len].iter().copied()
    }

    /// Adds the parts of `range` that are not in the set.
    ///
    /// # Errors
    /// [`TooMany`].
    pub fn add(&mut self, range: Range) -> Result<(), TooMany> {
        self.remove(range)?;
        self.push(range)
    }

    /// Removes `range`, as far as it is in the set.
    ///
    /// # Errors
    /// [`TooMany`], when a range is cut in two.
    pub fn remove(&mut self, range: Range) -> Result<(), TooMany> {
        let mut at = 0;
        while at < self.len {
            let old = self.ranges[at];
            if range.is_empty() || old.end <= range.start || range.end <= old.start {
                at += 1;
                continue;
            }
            self.len -= 1;
            self.ranges[at] = self.ranges[self.len];
            self.push(Range::new(old.start, range.start))?;
            self.push(Range::new(range.end, old.end))?;
        }
        Ok(())
    }

    /// Removes and returns `len` bytes at a multiple of `align`, a power of two, from the start of
    /// the lowest range that is large enough. `None` if no range is large enough, or too many
    /// ranges would remain.
    pub fn take(&mut self, len: u64, align: u64) -> Option<Range> {
        let fits = |range: Range| {
            let start = range.start.checked_next_multiple_of(align)?;
            let end = start.checked_add(len)?;
            (end <= range.end).then_some(Range { start, end })
        };
        let found = self.iter().filter_map(fits).min_by_key(|range| range.start)?;
        self.remove(found).ok()?;
        Some(found)
    }

    /// Returns the ranges in order of address, divided into parts with these shares of all pages;
    /// each range comes with the number of its part.
    pub fn parts(&self, shares: &[u16]) -> impl Iterator<Item = (usize, Range)> {
        let mut sorted = self.clone();
        sorted.ranges[..self.len].sort_unstable_by_key(|range| range.start);
        let pages: u64 = self.iter().map(Range::len).sum::<u64>() >> 12;
        let sum = |shares: &[u16]| shares.iter().map(|&share| u64::from(share)).sum::<u64>();
        // Returns the start of a part, with all ranges concatenated.
        let begin = move |part| (pages * sum(&shares[..part]) / sum(shares)) << 12;
        let mut before = 0;
        sorted.ranges.into_iter().flat_map(move |range| {
            let first = before;
            before += range.len();
            let cut =
                move |part| range.start + begin(part).clamp(first, first + range.len()) - first;
            let parts =
                (0..shares.len()).map(move |part| (part, Range::new(cut(part), cut(part + 1))));
            parts.filter(|(_, part)| !part.is_empty())
        })
    }

    fn push(&mut self, range: Range) -> Result<(), TooMany> {
        if range.is_empty() {
            return Ok(());
        }
        *self.ranges.get_mut(self.len).ok_or(TooMany)? = range;
        self.len += 1;
        Ok(())
    }
}
