//! Frames whose contents are in caches, because they were recently written or copied.
//!
//! Time is counted in lines transferred to CPUs, as for [lines](crate::lines). A page is in the
//! next cache level once the number of lines transferred to the CPU since the last use reaches the
//! size of the CPU's caches.

use crate::profile::Costs;
use core::cell::RefCell;

/// The cache level of a page's contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Nearness {
    /// In the CPU's own caches.
    Own,
    /// In the last-level cache.
    Shared,
    /// In memory.
    Memory,
}

/// The time of an event: its CPU, and the number of lines transferred to this CPU, and to all CPUs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    pub(crate) cpu: u16,
    pub(crate) lines: u64,
    pub(crate) all_lines: u64,
}

/// The last use of each frame.
#[derive(Debug)]
pub(crate) struct Recent {
    last: RefCell<Vec<Option<Moment>>>,
    own_lines: u64,
    shared_lines: u64,
}

impl Recent {
    /// Creates the records of `frames` frames; `None` if pages in caches have no separate cost.
    pub(crate) fn new(costs: &Costs, frames: usize) -> Option<Self> {
        let cached = costs.cached?;
        Some(Self {
            last: RefCell::new(vec![None; frames]),
            own_lines: costs.cached_lines,
            shared_lines: cached.lines,
        })
    }

    /// Records a use of a frame, which moves the contents to the CPU's own caches. Returns the
    /// earlier cache level.
    pub(crate) fn used(&self, frame: u32, now: Moment) -> Nearness {
        match self.last.borrow_mut()[frame as usize].replace(now) {
            Some(last) if last.cpu == now.cpu && now.lines - last.lines <= self.own_lines => {
                Nearness::Own
            }
            Some(last) if now.all_lines - last.all_lines <= self.shared_lines => Nearness::Shared,
            _ => Nearness::Memory,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_leaves_the_caches_after_line_transfers() {
        let recent =
            Recent { last: RefCell::new(vec![None; 2]), own_lines: 100, shared_lines: 1000 };
        let at = |cpu, lines, all_lines| Moment { cpu, lines, all_lines };
        assert_eq!(recent.used(1, at(0, 50, 50)), Nearness::Memory);
        assert_eq!(recent.used(1, at(0, 150, 400)), Nearness::Own);
        assert_eq!(recent.used(1, at(0, 251, 1400)), Nearness::Shared);
        assert_eq!(recent.used(1, at(1, 0, 1401)), Nearness::Shared, "another CPU's page");
        assert_eq!(recent.used(1, at(1, 1, 2402)), Nearness::Own);
        assert_eq!(recent.used(1, at(1, 102, 3403)), Nearness::Memory);
        assert_eq!(recent.used(0, at(1, 102, 3403)), Nearness::Memory, "another frame");
    }
}
