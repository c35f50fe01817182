//! Waits between the threads of one process. The documentation of [`plan`](super) contains the
//! rules.

use super::At;
use faultless::VirtRange;
use rangemap::RangeMap;
use std::collections::BTreeMap;

/// The last operations of a process's threads, by address.
#[derive(Clone, Debug, Default)]
pub(super) struct Order {
    /// The last operation that changed the address space at an address.
    changes: RangeMap<u64, At>,
    /// By page and thread, the last touch since that change.
    touches: BTreeMap<(u64, u32), u32>,
    /// The last move of the program break, which is a single value for any range.
    brk: Option<At>,
    /// The process has one thread at all times, so no operation waits.
    alone: bool,
}

impl Order {
    /// Creates the order of a process. A process with a single thread needs no memory for its
    /// touches.
    pub fn new(alone: bool) -> Self {
        Self { alone, ..Self::default() }
    }

    /// Adds the touch of `page` by the operation `at`. Operations for which it must wait are added
    /// to `waits`.
    pub fn touch(&mut self, at: At, page: u64, waits: &mut Vec<At>) {
        if self.alone {
            return;
        }
        waits.extend(self.changes.get(&page).filter(|change| change.thread != at.thread));
        self.touches.insert((page, at.thread), at.op);
    }

    /// Adds a change of the address space in `range` by the operation `at`.
    pub fn change(&mut self, at: At, range: VirtRange, waits: &mut Vec<At>) {
        if range.is_empty() || self.alone {
            return;
        }
        let others = |waited: &At| waited.thread != at.thread;
        let range = range.start..range.end;
        waits.extend(self.changes.overlapping(&range).map(|(_, change)| *change).filter(others));
        let pages = (range.start, 0)..(range.end, 0);
        let touched = self.touches.extract_if(pages, |_, _| true);
        waits.extend(touched.map(|((_, thread), op)| At { thread, op }).filter(others));
        self.changes.insert(range, at);
    }

    /// Adds a move of the program break by the operation `at`.
    pub fn brk(&mut self, at: At, waits: &mut Vec<At>) {
        waits.extend(self.brk.replace(at).filter(|last| last.thread != at.thread));
    }
}
