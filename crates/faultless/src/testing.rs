//! A machine for unit tests: its memory is a vector, its TLBs are empty, and it notes what it is
//! asked to invalidate.

use crate::addr::{FrameNumber, PAGE_SIZE};
use crate::machine::{CpuId, Invalidate, Machine, MemoryRegion, SpaceId};
use core::cell::UnsafeCell;
use std::sync::Mutex;
use std::vec::Vec;

#[repr(align(4096))]
struct Page(UnsafeCell<[u8; PAGE_SIZE as usize]>);

// SAFETY: the bytes are reached through raw pointers only, under `Machine`'s contract.
unsafe impl Sync for Page {}

/// See the module.
pub(crate) struct TestMachine {
    cpus: usize,
    regions: Vec<MemoryRegion>,
    memory: Vec<Page>,
    /// Every call of `invalidate`, in order.
    pub(crate) invalidated: Mutex<Vec<(CpuId, SpaceId, Invalidate)>>,
}

impl TestMachine {
    /// A machine whose frames `0..frames` are of node 0, but for the first, so that no frame has the
    /// physical address 0.
    pub(crate) fn new(cpus: usize, frames: u32) -> Self {
        let page = || Page(UnsafeCell::new([0; PAGE_SIZE as usize]));
        Self {
            cpus,
            regions: Vec::from([MemoryRegion {
                node: 0,
                first: FrameNumber(1),
                frames: frames - 1,
            }]),
            memory: (0..frames).map(|_| page()).collect(),
            invalidated: Mutex::default(),
        }
    }
}

// SAFETY: `memory` has a page of its own for each frame of the one region and never moves; there is
// no TLB to invalidate and no program to interrupt.
unsafe impl Machine for TestMachine {
    fn cpus(&self) -> usize {
        self.cpus
    }

    fn regions(&self) -> &[MemoryRegion] {
        &self.regions
    }

    fn frame_bytes(&self, frame: FrameNumber) -> *mut u8 {
        self.memory[frame.0 as usize].0.get().cast()
    }

    fn invalidate(&self, cpu: CpuId, space: SpaceId, what: Invalidate) {
        self.invalidated.lock().unwrap().push((cpu, space, what));
    }

    fn invalidate_all(&self, _: CpuId) {}

    fn interrupt(&self, _: CpuId) {}
}
