//! An address space built by a user of `memory_set`: the set and a page table behind a `RwLock`,
//! with frames mapped by the backend.

use faultless::FrameNumber;
use faultless::locks::Padded;
use faultless_native::Memory;
use memory_addr::{AddrRange, VirtAddr};
use memory_set::{MappingBackend, MemoryArea, MemorySet};
use spin::RwLock;
use std::array;
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

const PAGE: usize = 4096;
const SPAN: usize = 512;
/// The present bit of an entry. The frame number is above.
const PRESENT: u64 = 1;
/// The bit of an entry that permits stores.
const WRITABLE: u64 = 2;

/// The permissions of an area: bit 0 loads, bit 1 stores.
pub const READ_WRITE: u8 = 3;

thread_local! {
    /// The list of free frames of this thread.
    static LIST: Cell<usize> = const { Cell::new(0) };
}

/// Assigns the list `number` to the calling thread.
pub fn enlist(number: usize) {
    LIST.set(number);
}

/// Frames, with a list of free frames for each thread, whose lock is always free.
pub struct Frames {
    memory: Memory,
    lists: Vec<Padded<Mutex<Vec<u32>>>>,
}

impl Frames {
    /// Distributes all frames of `memory` except the first two among `threads` threads.
    pub fn new(memory: Memory, threads: usize) -> Self {
        // Frame 0 is unused; frame 1 is the zero page.
        let each = (memory.frames() - 2) / threads as u32;
        let list = |thread: u32| (2 + thread * each..2 + (thread + 1) * each).rev().collect();
        let lists = (0..threads as u32).map(|at| Padded(Mutex::new(list(at)))).collect();
        Self { memory, lists }
    }

    fn with_list<R>(&self, act: impl FnOnce(&mut Vec<u32>) -> R) -> R {
        act(&mut self.lists[LIST.get()].0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn alloc_zeroed(&self) -> Option<u32> {
        let frame = self.with_list(Vec::pop)?;
        // SAFETY: a page of the mapping that has no other user.
        unsafe { self.memory.frame_bytes(FrameNumber(frame)).write_bytes(0, PAGE) };
        Some(frame)
    }

    fn free(&self, frame: u32) {
        self.with_list(|list| list.push(frame));
    }
}

/// A table of three upper levels.
struct Upper<T>([OnceLock<Box<T>>; SPAN]);

impl<T> Default for Upper<T> {
    fn default() -> Self {
        Self(array::from_fn(|_| OnceLock::new()))
    }
}

struct Leaf([AtomicU64; SPAN]);

impl Default for Leaf {
    fn default() -> Self {
        Self(array::from_fn(|_| AtomicU64::new(0)))
    }
}

/// A page table of four levels. Tables are added and entries change by atomic operations, so a
/// fault needs only shared access.
#[derive(Default)]
pub struct PageTable(Upper<Upper<Upper<Leaf>>>);

const fn index(addr: usize, level: u32) -> usize {
    addr >> (12 + 9 * level) & (SPAN - 1)
}

impl PageTable {
    fn entry(&self, addr: usize) -> &AtomicU64 {
        let second = self.0.0[index(addr, 3)].get_or_init(Box::default);
        let third = second.0[index(addr, 2)].get_or_init(Box::default);
        let leaf = third.0[index(addr, 1)].get_or_init(Box::default);
        &leaf.0[index(addr, 0)]
    }

    fn leaf_mut(&mut self, addr: usize) -> Option<&mut Leaf> {
        let second = self.0.0[index(addr, 3)].get_mut()?;
        let third = second.0[index(addr, 2)].get_mut()?;
        third.0[index(addr, 1)].get_mut().map(|leaf| &mut **leaf)
    }

    /// Clears the entries of a range and calls `tell` for each present entry.
    fn clear(&mut self, start: usize, size: usize, mut tell: impl FnMut(u64)) {
        let mut at = start;
        while at < start + size {
            let end = (start + size).min((at | (PAGE * SPAN - 1)) + 1);
            if let Some(leaf) = self.leaf_mut(at) {
                for page in (at..end).step_by(PAGE) {
                    let entry = std::mem::take(leaf.0[index(page, 0)].get_mut());
                    if entry & PRESENT != 0 {
                        tell(entry);
                    }
                }
            }
            at = end;
        }
    }
}

/// A backend that maps frames on the first touch.
#[derive(Clone)]
struct OnDemand(Arc<Frames>);

/// The frame of zeros.
const ZERO_FRAME: u32 = 1;

impl MappingBackend for OnDemand {
    type Addr = VirtAddr;
    type Flags = u8;
    type PageTable = PageTable;

    fn map(&self, _: VirtAddr, _: usize, _: u8, _: &mut PageTable) -> bool {
        true
    }

    fn unmap(&self, start: VirtAddr, size: usize, table: &mut PageTable) -> bool {
        table.clear(start.as_usize(), size, |entry| {
            let frame = (entry >> 12) as u32;
            if frame != ZERO_FRAME {
                self.0.free(frame);
            }
        });
        true
    }

    fn protect(&self, _: VirtAddr, _: usize, _: u8, _: &mut PageTable) -> bool {
        // The bench does not change protections.
        false
    }
}

#[derive(Default)]
struct Inner {
    set: MemorySet<OnDemand>,
    table: PageTable,
}

/// The way in which faults take the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultLock {
    /// Shared: the best mode possible with the API, with a page table made for this mode.
    Read,
    /// Exclusive: required with a page table changed through `&mut`, like the backend's.
    Write,
}

/// See the module.
pub struct Peer {
    inner: RwLock<Inner>,
    frames: Arc<Frames>,
    fault_lock: FaultLock,
}

impl Peer {
    /// Creates an empty space over `frames`.
    pub fn new(frames: Arc<Frames>, fault_lock: FaultLock) -> Self {
        Self { inner: RwLock::default(), frames, fault_lock }
    }

    /// Maps `size` bytes near `hint`.
    pub fn map(&self, hint: usize, size: usize) -> Option<usize> {
        let mut inner = self.inner.write();
        let Inner { set, table } = &mut *inner;
        let limit = AddrRange::new(VirtAddr::from(PAGE), VirtAddr::from(1 << 47));
        let start = set.find_free_area(hint.into(), size, limit, PAGE)?;
        let area = MemoryArea::new(start, size, READ_WRITE, OnDemand(self.frames.clone()));
        set.map(area, table, false).ok()?;
        Some(start.as_usize())
    }

    /// Unmaps the mappings in this range.
    pub fn unmap(&self, start: usize, size: usize) -> Option<()> {
        let mut inner = self.inner.write();
        let Inner { set, table } = &mut *inner;
        set.unmap(start.into(), size, table).ok()
    }

    /// Serves a page fault. Returns `None` without a mapping at the address, or without a free
    /// frame.
    pub fn fault(&self, addr: usize, write: bool) -> Option<()> {
        match self.fault_lock {
            FaultLock::Read => self.serve(&self.inner.read(), addr, write),
            FaultLock::Write => self.serve(&self.inner.write(), addr, write),
        }
    }

    #[inline(always)]
    fn serve(&self, inner: &Inner, addr: usize, write: bool) -> Option<()> {
        let area = inner.set.find(addr.into())?;
        if area.flags() >> u8::from(write) & 1 == 0 {
            return None;
        }
        let entry = inner.table.entry(addr);
        let seen = entry.load(Ordering::Acquire);
        if seen & PRESENT != 0 && (!write || seen & WRITABLE != 0) {
            return Some(());
        }
        if !write {
            let zero = u64::from(ZERO_FRAME) << 12 | PRESENT;
            // A faster thread has already served the fault.
            let _ = entry.compare_exchange(seen, zero, Ordering::AcqRel, Ordering::Relaxed);
            return Some(());
        }
        let frame = self.frames.alloc_zeroed()?;
        let new = u64::from(frame) << 12 | PRESENT | WRITABLE;
        if entry.compare_exchange(seen, new, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            self.frames.free(frame);
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peer_maps_faults_and_unmaps() {
        let frames = Arc::new(Frames::new(Memory::new(64 << 12, 1).unwrap(), 1));
        let free = || frames.with_list(|list| list.len());
        let before = free();
        for fault_lock in [FaultLock::Read, FaultLock::Write] {
            let peer = Peer::new(frames.clone(), fault_lock);
            let area = peer.map(0x10_0000, 4 * PAGE).unwrap();
            assert_eq!(peer.fault(area, false), Some(()));
            assert_eq!(free(), before);
            for _ in 0..2 {
                assert_eq!(peer.fault(area, true), Some(()));
                assert_eq!(peer.fault(area + PAGE, true), Some(()));
            }
            assert_eq!(free(), before - 2);
            assert_eq!(peer.fault(area + 4 * PAGE, true), None);
            assert_eq!(peer.unmap(area, 4 * PAGE), Some(()));
            assert_eq!(peer.fault(area, true), None);
            assert_eq!(free(), before);
        }
    }
}
