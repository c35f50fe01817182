//! The machine of the scenarios: real memory for some hundred frames, CPUs that are threads of the
//! scheduler, and for each a TLB, a cache of the way to last-level tables, and an interrupt line.

use faultless::sync::atomic::{AtomicBool, Ordering};
use faultless::sync::park::Permit;
use faultless::{CpuId, FrameNumber, Invalidate, Machine, MemoryRegion, PAGE_SIZE, SpaceId};
use shuttle::rand::Rng;
use shuttle::sync::{Condvar, Mutex as Bed};
use std::cell::{RefCell, UnsafeCell};
use std::sync::atomic::AtomicBool as Reached;
use std::sync::{Mutex, MutexGuard};

/// Frames of device memory.
const DEVICE: usize = 8;

/// The byte pattern of memory not yet zeroed.
const STALE: u8 = 0xa5;

/// The bytes of a frame.
#[derive(Debug)]
#[repr(align(4096))]
struct Page(UnsafeCell<[u8; PAGE_SIZE as usize]>);

// SAFETY: accessed as the subsystem and its page tables permit, by threads of which one runs at a
// time.
unsafe impl Sync for Page {}

impl Page {
    const fn stale() -> Self {
        Self(UnsafeCell::new([STALE; PAGE_SIZE as usize]))
    }
}

/// The frames of a machine, and their used subset.
#[derive(Debug, Default)]
struct Memory {
    pages: Vec<Page>,
    reached: Vec<Reached>,
}

impl Memory {
    /// Resets the memory to `frames` frames that are not zeroed. Most scenarios use few frames.
    fn renew(&mut self, frames: usize) {
        for (page, reached) in self.pages.iter_mut().zip(&mut self.reached) {
            if std::mem::take(reached.get_mut()) {
                *page = Page::stale();
            }
        }
        self.resize(frames);
    }

    fn resize(&mut self, frames: usize) {
        self.pages.resize_with(frames, Page::stale);
        self.reached.resize_with(frames, Reached::default);
    }

    fn bytes(&self, frame: FrameNumber) -> *mut u8 {
        self.reached[frame.0 as usize].store(true, Ordering::Relaxed);
        self.pages[frame.0 as usize].0.get().cast()
    }
}

thread_local! {
    /// The memory of the last machine: allocating new memory from the host takes longer than a
    /// scenario.
    static SPARE: RefCell<Memory> = RefCell::default();
}

/// The TLB's entry for a page.
#[derive(Clone, Copy, Debug)]
pub struct Translation {
    pub space: SpaceId,
    pub page: u64,
    pub frame: FrameNumber,
    /// The ownership of the frame when the entry was read.
    pub owner: u64,
    /// Whether stores are allowed: the entry is writable, and marked dirty.
    pub stores: bool,
    /// Whether the frame is the zero page.
    pub zeros: bool,
}

/// The last-level table of a 2 MiB region, as held by a paging-structure cache.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    pub space: SpaceId,
    pub region: u64,
    pub table: FrameNumber,
    pub owner: u64,
}

/// The number of address bits translated by a last-level table, including the offset.
const REGION_SHIFT: u32 = 21;

/// The translations cached by one CPU, with the space of each: a switch of spaces alone drops no
/// translation.
#[derive(Debug, Default)]
pub struct Tlb {
    pages: Vec<Translation>,
    ways: Vec<Way>,
}

impl Tlb {
    const PAGES: usize = 12;
    const WAYS: usize = 4;

    pub fn lookup(&self, space: SpaceId, page: u64) -> Option<Translation> {
        self.pages.iter().find(|it| it.space == space && it.page == page).copied()
    }

    pub fn way(&self, space: SpaceId, addr: u64) -> Option<Way> {
        let region = addr >> REGION_SHIFT;
        self.ways.iter().find(|it| it.space == space && it.region == region).copied()
    }

    pub fn fill(&mut self, new: Translation) {
        self.pages.retain(|it| it.space != new.space || it.page != new.page);
        if self.pages.len() == Self::PAGES {
            self.pages.remove(0);
        }
        self.pages.push(new);
    }

    pub fn fill_way(&mut self, space: SpaceId, addr: u64, table: FrameNumber, owner: u64) {
        let region = addr >> REGION_SHIFT;
        self.ways.retain(|it| it.space != space || it.region != region);
        if self.ways.len() == Self::WAYS {
            self.ways.remove(0);
        }
        self.ways.push(Way { space, region, table, owner });
    }

    /// Drops the translations that hardware drops for a faulting address.
    pub fn forget(&mut self, space: SpaceId, addr: u64) {
        let page = faultless::VirtRange::page(addr);
        self.drop_of(space, Invalidate::Range(page));
    }

    fn drop_of(&mut self, space: SpaceId, what: Invalidate) {
        let gone = |of: SpaceId, start: u64, shift: u32| {
            of == space
                && match what {
                    Invalidate::All => true,
                    Invalidate::Range(range) => {
                        range.start < start + (1 << shift) && start < range.end
                    }
                }
        };
        self.pages.retain(|it| !gone(it.space, it.page, faultless::PAGE_SHIFT));
        self.ways.retain(|it| !gone(it.space, it.region << REGION_SHIFT, REGION_SHIFT));
    }
}

#[derive(Debug, Default)]
struct Line {
    pending: AtomicBool,
    /// Used only by its CPU; never locked across a step of the scheduler.
    tlb: Mutex<Tlb>,
    permit: Permit,
    bed: Bed<()>,
    woken: Condvar,
}

impl Line {
    fn wake(&self) {
        if self.permit.give() {
            drop(self.bed.lock().unwrap());
            self.woken.notify_one();
        }
    }
}

/// See the module.
#[derive(Debug)]
pub struct Board {
    memory: Memory,
    regions: Vec<MemoryRegion>,
    lines: Vec<Line>,
    /// Whether another thread may run before each access to bytes of a frame.
    steps_at_bytes: bool,
}

impl Board {
    /// Creates a machine of `cpus` CPUs and `frames` frames, numbered from 1 on, with device memory
    /// above.
    pub fn new(cpus: usize, frames: u32) -> Self {
        let mut memory = SPARE.take();
        memory.renew(frames as usize + 1 + DEVICE);
        let regions = vec![MemoryRegion { node: 0, first: FrameNumber(1), frames }];
        let lines = (0..cpus).map(|_| Line::default()).collect();
        Self { memory, regions, lines, steps_at_bytes: false }
    }

    /// Lets another thread run before each access to bytes of a frame, for example between a remote
    /// access and its copy. This adds many steps, because each level of a walk is such an access.
    pub fn with_steps_at_bytes(mut self) -> Self {
        self.steps_at_bytes = true;
        self
    }

    /// Adds a second node of `frames` frames.
    pub fn with_far_node(mut self, frames: u32) -> Self {
        let first = self.device();
        self.memory.resize(self.memory.pages.len() + frames as usize);
        self.regions.push(MemoryRegion { node: 1, first, frames });
        self
    }

    /// The first of 8 frames of device memory.
    pub fn device(&self) -> FrameNumber {
        FrameNumber((self.memory.pages.len() - DEVICE) as u32)
    }

    /// The TLB of `cpu`, which is the calling CPU.
    pub fn tlb(&self, cpu: CpuId) -> MutexGuard<'_, Tlb> {
        self.lines[cpu.index()].tlb.lock().unwrap()
    }

    /// Returns the number of CPUs.
    pub fn lines(&self) -> usize {
        self.lines.len()
    }

    /// Takes a pending interrupt of `cpu`, the calling CPU.
    pub fn interrupted(&self, cpu: CpuId) -> bool {
        let pending = &self.lines[cpu.index()].pending;
        pending.load(Ordering::Acquire) && pending.swap(false, Ordering::AcqRel)
    }
}

impl Drop for Board {
    fn drop(&mut self) {
        SPARE.set(core::mem::take(&mut self.memory));
    }
}

/// A long step, during which other threads may advance far. The scheduler that favours one thread
/// makes this thread wait for the others at once.
fn long_time() {
    step();
    if shuttle::rand::thread_rng().gen_bool(0.5) {
        shuttle::thread::yield_now();
    }
}

/// Another thread may run now.
pub fn step() {
    AtomicBool::new(false).load(Ordering::Relaxed);
}

// SAFETY: one region with its own, page-aligned memory. A TLB drops the requested translations, and
// a walk is done by the CPU's own thread. Guests check the interrupt line before every access. The
// walk sets accessed and dirty bits by compare-and-swap, before the store.
unsafe impl Machine for Board {
    type Predictor = faultless::prefault::Streams;

    fn cpus(&self) -> usize {
        self.lines.len()
    }

    /// Nodes are tiers.
    fn node_cost(&self, node: u8) -> u32 {
        1 + u32::from(node)
    }

    fn regions(&self) -> &[MemoryRegion] {
        &self.regions
    }

    fn frame_bytes(&self, frame: FrameNumber) -> *mut u8 {
        if self.steps_at_bytes {
            step();
        }
        self.memory.bytes(frame)
    }

    fn invalidate(&self, cpu: CpuId, space: SpaceId, what: Invalidate) {
        step();
        self.tlb(cpu).drop_of(space, what);
    }

    fn invalidate_all(&self, cpu: CpuId) {
        step();
        *self.tlb(cpu) = Tlb::default();
    }

    fn interrupt(&self, cpu: CpuId) {
        let line = &self.lines[cpu.index()];
        line.pending.store(true, Ordering::Release);
        line.wake();
    }

    fn relax(&self, _: u32) {
        shuttle::thread::yield_now();
    }

    fn park(&self, cpu: CpuId) {
        let line = &self.lines[cpu.index()];
        let mut bed = line.bed.lock().unwrap();
        if line.permit.park() {
            while !line.permit.is_given() {
                bed = line.woken.wait(bed).unwrap();
            }
            line.permit.resume();
        }
    }

    fn wake(&self, cpu: CpuId) {
        self.lines[cpu.index()].wake();
    }

    unsafe fn zero_frame(&self, frame: FrameNumber) {
        long_time();
        // SAFETY: a whole frame of the machine, the caller's.
        unsafe { self.frame_bytes(frame).write_bytes(0, PAGE_SIZE as usize) };
    }

    unsafe fn copy_frame(&self, to: FrameNumber, from: FrameNumber) {
        step();
        // SAFETY: two whole frames of the machine, the target the caller's.
        unsafe {
            let from = self.frame_bytes(from).cast_const();
            self.frame_bytes(to).copy_from_nonoverlapping(from, PAGE_SIZE as usize);
        }
        // The copy exists; its original may change from here on.
        long_time();
    }
}
