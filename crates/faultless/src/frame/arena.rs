//! Arenas: parts of a node's free memory, each with its own lock.
//!
//! A single lock for all CPUs of a socket would be a contended cache line. So the memory of a node
//! is divided into *arenas* of whole [gibibytes](super::MAX_ORDER), one for each [`CPUS`] CPUs
//! nearest to the node, if the node has enough gibibytes. Each arena has a lock, a [buddy
//! allocator](Buddy) and a [pool of zeroed frames](super::zeroed).
//!
//! A CPU has a *home*, one of the arenas of its nearest node. The CPU takes frames from its home
//! first, then from the other arenas of the node, and then from the other nodes, in the order of
//! their numbers. A freed frame returns to its own arena, so blocks merge regardless of the freeing
//! CPU.

use super::buddy::Buddy;
use super::flush_pending::FlushPendingList;
use super::meta::{FrameTable, Kind};
use super::{FrameNumber, MAX_ORDER};
use crate::error::OutOfMemory;
use crate::machine::{MAX_NODES, MemoryRegion};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering, made};
use crate::sync::order::ArenaBuddy;
use crate::sync::percpu::Padded;
use crate::sync::spin::SpinLock;
use crate::sync::wait::{Spin, Wait};
use alloc::vec::Vec;
use core::ops::Range;

/// The number of CPUs that share an arena, if there is enough memory for several arenas. A CPU that
/// only takes faults allocates a block of 512 frames once in half a millisecond, and holds the lock
/// for about a microsecond.
const CPUS: usize = 8;
/// The maximum number of arenas of all nodes together: the metadata of a frame stores the arena in
/// a byte.
const MOST: usize = u8::MAX as usize;

/// A part of a node's free memory.
#[derive(Debug)]
pub(super) struct Arena {
    lists: Padded<SpinLock<Lists, ArenaBuddy>>,
    /// A summary of the lists, for callers that only check whether taking the lock is worthwhile.
    /// Written only on changes, so that the line stays in the readers' caches.
    pub(super) seen: Padded<Seen>,
    /// The arena's frames with a deferred flush.
    pub(super) flush_pending: Padded<FlushPendingList>,
    /// The number of arenas of the node.
    parts: usize,
}

#[derive(Debug)]
pub(super) struct Seen {
    pub(super) zeroed: AtomicU64,
    /// Whether the arena has a free frame that is not zeroed.
    pub(super) others: AtomicBool,
    pub(super) credit: AtomicU64,
}

/// The free frames of an arena.
#[derive(Debug)]
pub(super) struct Lists {
    pub(super) free: Buddy,
    /// The pool.
    pub(super) zeroed: Buddy,
    /// Frames on these lists or on other arenas' lists that already [count](super::count) as
    /// taken.
    pub(super) credit: u64,
}

impl Lists {
    /// Fills `run` with single frames of any kind, zeroed frames last, and returns their number.
    pub(super) fn alloc_bulk(&mut self, table: &FrameTable, run: &mut [FrameNumber]) -> usize {
        let got = self.free.alloc_bulk(table, run);
        if self.free.free_count() != 0 {
            return got;
        }
        got + self.zeroed.alloc_bulk(table, &mut run[got..])
    }

    /// Returns whether no frame is free.
    pub(super) const fn is_empty(&self) -> bool {
        self.free_count() == 0
    }

    /// Returns the number of free frames.
    pub(super) const fn free_count(&self) -> u64 {
        self.free.free_count() + self.zeroed.free_count()
    }

    /// Returns how many further frames the pool may hold, for a maximum of `limit`.
    pub(super) const fn zeroed_room(&self, limit: u64) -> u64 {
        limit.saturating_sub(self.zeroed.free_count())
    }

    /// Takes a block of any kind.
    pub(super) fn alloc(&mut self, table: &FrameTable, order: u8) -> Option<FrameNumber> {
        self.free.alloc(table, order).or_else(|| self.zeroed.alloc(table, order))
    }
}

impl Arena {
    fn new(number: u8, parts: usize) -> Self {
        let free = Buddy::new(number, Kind::Free);
        let lists = Lists { free, zeroed: Buddy::new(number, Kind::Zeroed), credit: 0 };
        let seen = Seen {
            zeroed: AtomicU64::new(0),
            others: AtomicBool::new(false),
            credit: AtomicU64::new(0),
        };
        Self {
            lists: Padded(SpinLock::ordered(lists)),
            seen: Padded(seen),
            flush_pending: Padded(FlushPendingList::new()),
            parts,
        }
    }

    /// Calls `then` under the lock, and updates the summary.
    #[inline]
    pub(super) fn locked<R>(&self, wait: &impl Wait, then: impl FnOnce(&mut Lists) -> R) -> R {
        let mut lists = self.lists.lock(wait);
        let result = then(&mut lists);
        let (zeroed, others) = (lists.zeroed.free_count(), lists.free.free_count() != 0);
        if self.seen.zeroed.load(Ordering::Relaxed) != zeroed {
            self.seen.zeroed.store(zeroed, Ordering::Relaxed);
        }
        if self.seen.others.load(Ordering::Relaxed) != others {
            self.seen.others.store(others, Ordering::Relaxed);
        }
        if self.seen.credit.load(Ordering::Relaxed) != lists.credit {
            // Release: see `Frames::collect_credits`.
            self.seen.credit.store(lists.credit, Ordering::Release);
        }
        result
    }

    /// Returns the arena's share of the maximum of a node's pool.
    pub(super) fn part_of(&self, pool: u64) -> u64 {
        pool.div_ceil(self.parts as u64)
    }
}

/// The arenas of a node.
#[derive(Clone, Debug, Default)]
struct Node {
    arenas: Range<usize>,
    /// The node's gibibytes of frame numbers, from the one of its first frame to the one of its
    /// last.
    chunks: Range<u32>,
}

/// The arenas of all nodes.
#[derive(Debug)]
pub(super) struct Layout {
    nodes: [Node; MAX_NODES],
}

const fn chunk(frame: u32) -> u32 {
    frame >> MAX_ORDER
}

impl Layout {
    /// Returns the layout for `cpus` CPUs; the nearest node of CPU `n` is `nearest(n)`.
    pub(super) fn new(
        cpus: usize,
        regions: &[MemoryRegion],
        nearest: impl Fn(usize) -> u8,
    ) -> Self {
        let mut nodes: [Node; MAX_NODES] = Default::default();
        let last = regions.iter().map(|region| region.node).max().unwrap_or(0);
        let mut begin = 0;
        for (node, place) in (0..=last).zip(&mut nodes) {
            let near = (0..cpus).filter(|cpu| nearest(*cpu) == node).count();
            let own = || regions.iter().filter(|region| region.node == node && region.frames != 0);
            let first = own().map(|region| chunk(region.first.0)).min().unwrap_or(0);
            let end = own().map(|region| chunk(region.first.0 + region.frames - 1) + 1);
            let chunks = first..end.max().unwrap_or(first);
            let most = chunks.len().min(MOST / MAX_NODES);
            let count = near.div_ceil(CPUS).min(most).max(1);
            *place = Node { arenas: begin..begin + count, chunks };
            begin += count;
        }
        Self { nodes }
    }

    /// Returns the arena of frame `frame` of node `node`.
    pub(super) fn of(&self, node: u8, frame: u32) -> u8 {
        let Node { arenas, chunks } = &self.nodes[usize::from(node)];
        let at = chunk(frame).saturating_sub(chunks.start) as usize;
        // Below `MOST`.
        (arenas.start + at * arenas.len() / chunks.len().max(1)) as u8
    }

    /// Returns the node of an arena; 0 for an unknown arena.
    pub(super) fn node(&self, arena: u8) -> u8 {
        let has = |node: &Node| node.arenas.contains(&usize::from(arena));
        self.nodes.iter().position(has).unwrap_or(0) as u8
    }

    /// Returns the arenas of a node.
    pub(super) fn arenas_of(&self, node: u8) -> Range<usize> {
        self.nodes.get(usize::from(node)).map_or(0..0, |node| node.arenas.clone())
    }

    /// Returns the home of a CPU: the first [`CPUS`] CPUs of a node share its first arena, the next
    /// [`CPUS`] CPUs the second.
    pub(super) fn home(&self, cpu: usize, nearest: impl Fn(usize) -> u8) -> u8 {
        let node = nearest(cpu);
        let Some(Node { arenas, .. }) = self.nodes.get(usize::from(node)) else { return 0 };
        if arenas.is_empty() {
            return 0;
        }
        let before = (0..cpu).filter(|other| nearest(*other) == node).count();
        (arenas.start + before / CPUS % arenas.len()) as u8
    }

    /// Returns the arenas of the nodes, with the memory of `regions`.
    pub(super) fn try_fill(
        &self,
        table: &FrameTable,
        regions: &[MemoryRegion],
    ) -> Result<Vec<Arena>, OutOfMemory> {
        let mut all = Vec::new();
        let count = self.nodes.iter().map(|node| node.arenas.len()).sum();
        all.try_reserve_exact(count).map_err(|_| OutOfMemory)?;
        made(all.as_ptr(), count);
        for node in &self.nodes {
            let parts = node.arenas.len();
            all.extend(node.arenas.clone().map(|number| Arena::new(number as u8, parts)));
        }
        for region in regions {
            let (mut at, end) = (region.first.0, region.first.0 + region.frames);
            while at < end {
                let frames = (at | ((1 << MAX_ORDER) - 1)).min(end - 1) - at + 1;
                let adopt = |lists: &mut Lists| lists.free.adopt(table, FrameNumber(at), frames);
                all[usize::from(self.of(region.node, at))].locked(&Spin, adopt);
                at += frames;
            }
        }
        Ok(all)
    }

    /// Iterates over all arenas in the order in which a CPU with this home takes frames from them.
    /// Finding the home costs nothing.
    pub(super) fn from(&self, home: u8) -> impl Iterator<Item = usize> + '_ {
        let home = usize::from(home);
        let farther = move || {
            let near = self.nodes.iter().find(|node| node.arenas.contains(&home));
            let near = near.map_or(home..home + 1, |node| node.arenas.clone());
            let others = self.nodes.iter().flat_map(|node| node.arenas.clone());
            let others = others.filter({
                let near = near.clone();
                move |arena| !near.contains(arena)
            });
            (home + 1..near.end).chain(near.start..home).chain(others)
        };
        core::iter::once(home).chain(core::iter::once_with(farther).flatten())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    const GIB: u32 = 1 << MAX_ORDER;

    fn region(node: u8, first: u32, frames: u32) -> MemoryRegion {
        MemoryRegion { node, first: FrameNumber(first), frames }
    }

    fn order(layout: &Layout, home: u8) -> Vec<usize> {
        layout.from(home).collect()
    }

    #[test]
    fn nodes_have_an_arena_for_each_eight_cpus_if_memory_allows() {
        let regions = [region(0, 1, 4 * GIB - 1), region(1, 4 * GIB, 3 * GIB / 2)];
        let nearest = |cpu: usize| u8::from(cpu >= 20);
        let layout = Layout::new(60, &regions, nearest);
        // Three for twenty CPUs; two for forty, as there are no more gibibytes.
        assert_eq!(layout.nodes[0].arenas, 0..3);
        assert_eq!(layout.nodes[1].arenas, 3..5);
        let homes: Vec<_> =
            [0, 7, 8, 19, 20, 28, 36, 59].map(|cpu| layout.home(cpu, nearest)).into();
        assert_eq!(homes, [0, 0, 1, 2, 3, 4, 3, 3]);
        // All frames of a gibibyte belong to one arena.
        for (frame, arena) in
            [(1, 0), (2 * GIB - 1, 0), (2 * GIB, 1), (3 * GIB, 2), (4 * GIB - 1, 2)]
        {
            assert_eq!(layout.of(0, frame), arena, "{frame:#x}");
        }
        assert_eq!((layout.of(1, 4 * GIB), layout.of(1, 5 * GIB + 1)), (3, 4));
        assert_eq!([0, 2, 3, 4].map(|arena| layout.node(arena)), [0, 0, 1, 1]);
    }

    #[test]
    fn allocation_tries_the_home_then_its_node_then_others() {
        let regions = [region(0, 0, 3 * GIB), region(1, 3 * GIB, GIB), region(2, 4 * GIB, 2 * GIB)];
        let nearest = |cpu: usize| if cpu < 24 { 0 } else { 2 };
        let layout = Layout::new(48, &regions, nearest);
        assert_eq!(order(&layout, 1), [1, 2, 0, 3, 4, 5]);
        assert_eq!(order(&layout, layout.home(40, nearest)), [4, 5, 0, 1, 2, 3]);
    }

    #[test]
    fn arenas_share_the_pool_of_their_node() {
        let part = |parts, pool| Arena::new(0, parts).part_of(pool);
        assert_eq!([part(1, 100), part(4, 100), part(3, 100), part(2, 0)], [100, 25, 34, 0]);
    }

    #[test]
    fn the_home_of_a_cpu_without_near_memory_is_the_first_arena() {
        let layout = Layout::new(4, &[region(1, 5, 10)], |_| 7);
        assert_eq!(layout.home(3, |_| 7), 0);
        assert_eq!(order(&layout, 0), [0, 1]);
        assert_eq!(layout.of(1, 7), 1);
    }
}
