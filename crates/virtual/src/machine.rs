//! The platform interface of the subsystem, charged to the running CPU's clock.

use crate::accounts::Spent;
use crate::contents::Contents;
use crate::profile::Time;
use crate::recent::{Nearness, Recent};
use crate::simulation::Simulation;
use core::fmt;
use faultless_native::TlbStats;
use faultless_native::tlb::Tlb;
use faultless_observed::prefault::Streams;
use faultless_observed::{
    CpuId, FrameNumber, Invalidate, Machine, MemoryRegion, PAGE_SIZE, SpaceId,
};
use std::cell::Cell;
use std::rc::Rc;

/// The factor of the time of an access to a slow node over other memory. Memory behind CXL has
/// about twice the latency of a CPU's own memory (Maruf et al., *TPP*, ASPLOS 2023; Li et al.,
/// *Pond*, ASPLOS 2023).
const SLOWER: Time = 2;

/// A CPU's TLBs, of the same type as in the native machine.
pub(crate) struct CpuTlb {
    pub(crate) tlb: Tlb,
    /// The space of the cached translations.
    space: Cell<u64>,
}

/// The machine of N simulated CPUs.
pub struct VirtualMachine {
    pub(crate) simulation: Rc<Simulation>,
    pub(crate) contents: Contents,
    recent: Option<Recent>,
    regions: Vec<MemoryRegion>,
    /// The number of nodes near CPUs. A slow node, if any, follows them.
    fast: usize,
    cpus: Vec<CpuTlb>,
}

// SAFETY: the machine, its subsystem, and all code running on the machine stay on the creating
// thread (one thread), because all access is through `Virtual`, which is not `Send`.
unsafe impl Send for VirtualMachine {}
// SAFETY: as above.
unsafe impl Sync for VirtualMachine {}

impl fmt::Debug for VirtualMachine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VirtualMachine({} CPUs)", self.cpus.len())
    }
}

impl VirtualMachine {
    pub(crate) fn new(
        simulation: Rc<Simulation>,
        contents: Contents,
        cpus: usize,
        fast: usize,
    ) -> Self {
        let region = |region: &faultless::MemoryRegion| MemoryRegion {
            node: region.node,
            first: FrameNumber(region.first.0),
            frames: region.frames,
        };
        let regions = contents.memory().regions().iter().map(region).collect();
        let tlb = |_| CpuTlb { tlb: Tlb::new(), space: Cell::new(0) };
        let recent = Recent::new(&simulation.costs, contents.memory().frames() as usize);
        let cpus = (0..cpus).map(tlb).collect();
        Self { simulation, contents, recent, regions, fast, cpus }
    }

    /// Returns the node of a frame.
    fn node_of(&self, frame: u32) -> usize {
        let has = |region: &&MemoryRegion| {
            (region.first.0..region.first.0 + region.frames).contains(&frame)
        };
        self.regions.iter().find(has).map_or(0, |region| usize::from(region.node))
    }

    /// Returns the first socket nearest to the memory of a frame.
    pub(crate) fn socket_of(&self, frame: u32) -> usize {
        let node = self.node_of(frame).min(self.fast - 1);
        (node * self.simulation.sockets()).div_ceil(self.fast)
    }

    /// Charges the additional cost of a program's access to a frame in tiered memory. The data is
    /// assumed to be in no cache, because otherwise its node would not matter.
    pub(crate) fn charge_tier(&self, frame: u32) {
        if self.regions.len() == self.fast {
            return;
        }
        let times = if self.node_of(frame) < self.fast { 1 } else { SLOWER };
        self.simulation.spend(self.simulation.costs.memory * times, Spent::Program);
    }

    /// Returns the TLB statistics of all CPUs so far.
    pub(crate) fn tlb_stats(&self) -> TlbStats {
        let mut total = TlbStats::default();
        self.cpus.iter().for_each(|cpu| total += cpu.tlb.stats());
        total
    }

    /// Returns the cache level of the contents of a frame, which the running CPU uses now.
    fn nearness(&self, frame: u32) -> Nearness {
        let used = self.recent.as_ref().zip(self.simulation.moment());
        used.map_or(Nearness::Memory, |(recent, now)| recent.used(frame, now))
    }

    /// Charges the zeroing of a frame.
    fn charge_zeroing(&self, frame: u32) {
        let (there, costs) = (self.nearness(frame), &self.simulation.costs);
        let zero = costs.cached.map(|cached| cached.zero);
        let takes = page_takes(there, zero, costs.zero_page);
        let through = if there == Nearness::Memory { PAGE_SIZE } else { 0 };
        self.simulation.move_bytes(self.socket_of(frame), takes, PAGE_SIZE, through);
    }

    /// Charges the copying of `part` bytes of a frame, which are read and written.
    pub(crate) fn charge_copying(&self, to: u32, from: u32, part: u64) {
        let costs = &self.simulation.costs;
        let there = [self.nearness(from), self.nearness(to)];
        let copy = costs.cached.map(|cached| cached.copy);
        let page = page_takes(there[0].max(there[1]), copy, costs.copy_page);
        let far = there.iter().filter(|there| **there == Nearness::Memory).count() as u64;
        let (socket, takes) = (self.socket_of(to), page * part / PAGE_SIZE);
        self.simulation.move_bytes(socket, takes, 2 * part, far * part);
    }

    pub(crate) fn tlb(&self, cpu: CpuId) -> &CpuTlb {
        &self.cpus[cpu.index()]
    }

    /// Loads the tables of a space on the CPU, like a write of CR3.
    pub(crate) fn load_space(&self, cpu: CpuId, space: SpaceId) {
        let cpu = self.tlb(cpu);
        if cpu.space.replace(space.0) != space.0 {
            self.simulation.spend(self.simulation.costs.flush_all, Spent::Flushes);
            cpu.tlb.invalidate_all();
        }
    }
}

/// Returns the cost of a page at this cache level; `far` is the cost in memory.
fn page_takes(there: Nearness, cached: Option<[Time; 2]>, far: Time) -> Time {
    match (there, cached) {
        (Nearness::Own, Some([own, _])) => own,
        (Nearness::Shared, Some([_, shared])) => shared,
        _ => far,
    }
}

// SAFETY: by the trait's points:
// - CPUs and regions never change; regions are those of the native machine's memory, which has no
//   other user.
// - `frame_bytes` moves the frame's contents to this memory before it returns them, and they stay
//   there afterwards; programs reach the same contents through `Contents`.
// - A TLB drops the requested translations (it may drop more, and never returns wrong ones, like
//   the native machine's). Walks are the subsystem's own, and end before the CPU does any other
//   work.
// - `interrupt` sets the time from which the CPU's next access takes the interrupt. All CPUs are on
//   one thread, so no ordering is required.
// - A parked CPU does no work.
unsafe impl Machine for VirtualMachine {
    type Predictor = Streams;

    fn cpus(&self) -> usize {
        self.cpus.len()
    }

    fn regions(&self) -> &[MemoryRegion] {
        &self.regions
    }

    fn nearest_node(&self, cpu: CpuId) -> u8 {
        let socket = usize::from(self.simulation.socket(cpu.0));
        (socket * self.fast / self.simulation.sockets()) as u8
    }

    fn node_cost(&self, node: u8) -> u32 {
        if usize::from(node) < self.fast { 1 } else { SLOWER as u32 }
    }

    fn frame_bytes(&self, frame: FrameNumber) -> *mut u8 {
        self.contents.make_bytes(frame.0);
        self.contents.memory().frame_bytes(faultless::FrameNumber(frame.0))
    }

    fn invalidate(&self, cpu: CpuId, space: SpaceId, what: Invalidate) {
        let costs = &self.simulation.costs;
        let cpu = self.tlb(cpu);
        if cpu.space.get() != space.0 {
            return;
        }
        let all = match what {
            Invalidate::Range(range) => {
                let pages = range.len() / PAGE_SIZE;
                let takes = (costs.flush_page * pages).min(costs.flush_all);
                self.simulation.spend(takes, Spent::Flushes);
                cpu.tlb.invalidate_range(faultless::VirtRange::new(range.start, range.end));
                false
            }
            Invalidate::All => true,
        };
        if all {
            self.simulation.spend(costs.flush_all, Spent::Flushes);
            cpu.tlb.invalidate_all();
        }
    }

    fn invalidate_all(&self, cpu: CpuId) {
        self.simulation.spend(self.simulation.costs.flush_all, Spent::Flushes);
        self.tlb(cpu).tlb.invalidate_all();
    }

    fn interrupt(&self, cpu: CpuId) {
        self.simulation.interrupt(cpu.0);
    }

    fn relax(&self, _looks: u32) {
        self.simulation.look_again();
    }

    fn park(&self, _cpu: CpuId) {
        self.simulation.park();
    }

    fn wake(&self, cpu: CpuId) {
        self.simulation.wake(cpu.0);
    }

    unsafe fn zero_frame(&self, frame: FrameNumber) {
        self.charge_zeroing(frame.0);
        self.contents.zero(frame.0);
    }

    unsafe fn zero_ahead(&self, first: FrameNumber, frames: u32) {
        for frame in first.0..first.0 + frames {
            self.charge_zeroing(frame);
            self.contents.zero(frame);
        }
    }

    fn prefetch_frame(&self, _: FrameNumber) {}

    unsafe fn copy_frame(&self, to: FrameNumber, from: FrameNumber) {
        self.charge_copying(to.0, from.0, PAGE_SIZE);
        self.contents.copy(to.0, from.0);
    }
}
