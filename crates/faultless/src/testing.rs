//! A machine for unit tests: its memory is a vector, its TLBs are empty, and it records the calls
//! of `invalidate` and `invalidate_all`.

#[cfg(not(loom))]
pub(crate) mod guest;
#[cfg(not(loom))]
pub(crate) mod store;

use crate::addr::{FrameNumber, PAGE_SIZE};
use crate::error::Errno;
use crate::file::{BackingStore, ReadRun, StoreError, WriteRun};
use crate::machine::{CpuId, Invalidate, LOWEST_ADDRESS, Machine, MemoryRegion, SpaceId};
use crate::prefault::{Predictor, Streams};
use core::cell::UnsafeCell;
use core::marker::PhantomData;
use core::ops::Range;
use std::boxed::Box;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::vec::Vec;

#[repr(align(4096))]
struct Page(UnsafeCell<[u8; PAGE_SIZE as usize]>);

// SAFETY: the bytes are accessed only through raw pointers, under `Machine`'s contract.
unsafe impl Sync for Page {}

/// Frames of device memory: memory outside all regions.
pub(crate) const DEVICE_FRAMES: u32 = 24;

/// See the module. Its predictor is `P`.
pub(crate) struct TestMachine<P = Streams> {
    pub(crate) cpus: usize,
    pub(crate) regions: Vec<MemoryRegion>,
    pub(crate) lowest: u64,
    memory: Vec<Page>,
    /// Runs once, when the next frame is filled.
    interposed: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    zeroed: AtomicU64,
    /// Runs once, at the nth access to a frame's bytes.
    countdown: AtomicU64,
    at_bytes: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    /// Every call of `invalidate`, in order.
    pub(crate) invalidated: Mutex<Vec<(CpuId, SpaceId, Invalidate)>>,
    /// The CPUs of all calls of `invalidate_all`, in order.
    pub(crate) emptied: Mutex<Vec<CpuId>>,
    /// A wait with more iterations than this panics as endless.
    pub(crate) most_looks: u32,
    predictor: PhantomData<fn() -> P>,
}

impl TestMachine {
    /// Returns a machine with the frames `0..frames` in node 0, except frame 0, so that no frame
    /// has the physical address 0. [`DEVICE_FRAMES`] frames of device memory follow.
    pub(crate) fn new(cpus: usize, frames: u32) -> Self {
        Self::predicting(cpus, frames)
    }
}

impl<P> TestMachine<P> {
    /// [`new`](TestMachine::new), with any predictor.
    pub(crate) fn predicting(cpus: usize, frames: u32) -> Self {
        let page = || Page(UnsafeCell::new([0; PAGE_SIZE as usize]));
        Self {
            cpus,
            regions: Vec::from([MemoryRegion {
                node: 0,
                first: FrameNumber(1),
                frames: frames - 1,
            }]),
            lowest: LOWEST_ADDRESS,
            memory: (0..frames + DEVICE_FRAMES).map(|_| page()).collect(),
            interposed: Mutex::default(),
            zeroed: AtomicU64::new(0),
            countdown: AtomicU64::new(0),
            at_bytes: Mutex::default(),
            invalidated: Mutex::default(),
            emptied: Mutex::default(),
            most_looks: u32::MAX,
            predictor: PhantomData,
        }
    }

    /// Runs `body`, and runs `worst` when `body` first fills a frame: after `body` has read the
    /// state it is about to change, and before the change.
    pub(crate) fn interpose<'a, R>(
        &self,
        worst: impl FnOnce() + Send + 'a,
        body: impl FnOnce() -> R,
    ) -> R {
        let worst: Box<dyn FnOnce() + Send + 'a> = Box::new(worst);
        // SAFETY: only the lifetime changes; the closure is run or dropped before this returns.
        let worst = unsafe {
            core::mem::transmute::<Box<dyn FnOnce() + Send + 'a>, Box<dyn FnOnce() + Send>>(worst)
        };
        *self.interposed.lock().unwrap() = Some(worst);
        let result = body();
        assert!(self.interposed.lock().unwrap().take().is_none(), "no frame was filled");
        result
    }

    /// Runs `body`, and runs `worst` before `body` accesses the bytes of a frame for the `nth` time
    /// (from 1). Returns whether `worst` ran.
    pub(crate) fn at_look<'a>(
        &self,
        nth: u64,
        worst: impl FnOnce() + Send + 'a,
        body: impl FnOnce(),
    ) -> bool {
        let worst: Box<dyn FnOnce() + Send + 'a> = Box::new(worst);
        // SAFETY: as in `interpose`.
        let worst = unsafe {
            core::mem::transmute::<Box<dyn FnOnce() + Send + 'a>, Box<dyn FnOnce() + Send>>(worst)
        };
        *self.at_bytes.lock().unwrap() = Some(worst);
        self.countdown.store(nth, Ordering::Relaxed);
        body();
        self.countdown.store(0, Ordering::Relaxed);
        self.at_bytes.lock().unwrap().take().is_none()
    }

    /// Returns the first frame of device memory.
    pub(crate) fn device(&self) -> FrameNumber {
        FrameNumber(self.memory.len() as u32 - DEVICE_FRAMES)
    }

    /// Returns how many frames were filled with zeros so far.
    pub(crate) fn zeroed(&self) -> u64 {
        self.zeroed.load(Ordering::Relaxed)
    }

    fn filling(&self) {
        let worst = self.interposed.lock().unwrap().take();
        if let Some(worst) = worst {
            worst();
        }
    }
}

// SAFETY: `memory` has a separate page for each frame of the one region and never moves; there is
// no TLB to invalidate and no program to interrupt.
unsafe impl<P: Predictor + 'static> Machine for TestMachine<P> {
    type Predictor = P;

    fn cpus(&self) -> usize {
        self.cpus
    }

    /// Nodes are tiers.
    fn node_cost(&self, node: u8) -> u32 {
        1 + u32::from(node)
    }

    fn regions(&self) -> &[MemoryRegion] {
        &self.regions
    }

    fn lowest_address(&self) -> u64 {
        self.lowest
    }

    fn frame_bytes(&self, frame: FrameNumber) -> *mut u8 {
        let left = self.countdown.load(Ordering::Relaxed);
        if left != 0 {
            self.countdown.store(left - 1, Ordering::Relaxed);
            if left == 1 {
                let worst = self.at_bytes.lock().unwrap().take();
                if let Some(worst) = worst {
                    worst();
                }
            }
        }
        self.memory[frame.0 as usize].0.get().cast()
    }

    fn invalidate(&self, cpu: CpuId, space: SpaceId, what: Invalidate) {
        self.invalidated.lock().unwrap().push((cpu, space, what));
    }

    fn invalidate_all(&self, cpu: CpuId) {
        self.emptied.lock().unwrap().push(cpu);
    }

    fn interrupt(&self, _: CpuId) {}

    fn relax(&self, looks: u32) {
        assert!(looks <= self.most_looks, "an endless wait");
        core::hint::spin_loop();
    }

    unsafe fn zero_frame(&self, frame: FrameNumber) {
        self.zeroed.fetch_add(1, Ordering::Relaxed);
        self.filling();
        // SAFETY: a page of memory owned by the caller.
        unsafe { self.frame_bytes(frame).write_bytes(0, PAGE_SIZE as usize) };
    }

    unsafe fn copy_frame(&self, to: FrameNumber, from: FrameNumber) {
        self.filling();
        // SAFETY: distinct pages of memory.
        unsafe {
            self.frame_bytes(to).copy_from(self.frame_bytes(from), PAGE_SIZE as usize);
        }
    }
}

/// A store of a number of pages of zeros, which ignores writes.
#[derive(Debug)]
pub(crate) struct Zeros(pub(crate) u64);

impl BackingStore for Zeros {
    fn len(&self) -> u64 {
        self.0 * PAGE_SIZE
    }

    fn preferred_pages(&self) -> usize {
        1
    }

    fn read(&self, run: &mut ReadRun) -> Result<usize, StoreError> {
        Ok(run.bytes())
    }

    fn write(&self, _: &WriteRun<'_>) -> Result<(), StoreError> {
        Ok(())
    }

    fn set_len(&self, _: u64) -> Result<(), Errno> {
        Ok(())
    }

    fn punch(&self, _: Range<u64>) -> Result<(), Errno> {
        Ok(())
    }
}
