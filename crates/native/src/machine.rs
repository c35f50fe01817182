//! The machine beneath the subsystem: physical memory, and per CPU a TLB and an interrupt line.

use crate::memory::{LEAST_FRAMES, MAX_NODES, Memory};
use crate::parking::Parking;
use crate::tlb::{Tlb, TlbStats};
use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use faultless::locks::LOOKS_BEFORE_PARKING;
use faultless::locks::Padded;
use faultless::{
    CpuId, Errno, FrameNumber, Invalidate, MAX_CPUS, Machine, MemoryRegion, PAGE_SHIFT, PAGE_SIZE,
    SpaceId,
};
use faultless::{nontemporal_done, zero_nontemporal};
use std::sync::{Mutex, PoisonError};

/// How a native machine is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Bytes of physical memory, rounded down to whole frames of 4 KiB: at least 8 KiB for each
    /// node, and together with [`slow_bytes`](Self::slow_bytes) at most 16 TiB - 4 KiB.
    ///
    /// The subsystem needs one frame for zeros, and the first process four for its page tables, so
    /// a useful machine has a MiB or more. The host's memory must hold 64 bytes of metadata for
    /// each frame.
    pub memory_bytes: u64,
    /// Memory nodes, `1..=8` (with the slow node), which share the memory evenly. The nodes are
    /// tiers: node 0 is the nearest to all CPUs, and each later node
    /// [costs](faultless::Machine::node_cost) more than the node before.
    pub nodes: usize,
    /// Bytes of an additional last node, the slowest; 0 for no such node.
    pub slow_bytes: u64,
    /// CPUs, `1..=1024`: the number of threads that can run guest code at the same time.
    pub cpus: usize,
    /// Make the host back all memory at the start, so that no host fault falls into a measurement.
    pub populate: bool,
    /// Whether each access is checked against the ownership of its frame.
    pub checked: Checked,
    /// An instrument of stress tests: one in this many critical moments is prolonged, so that a few
    /// cores show the overlaps of many. A critical moment lies between a check and the step that
    /// relies on it: a frame is zeroed or copied, translations are dropped, or an interrupt is
    /// sent. 0 disables the instrument.
    pub jitter: u32,
}

impl Default for Config {
    /// 256 MiB in one node, no slow node, 4 CPUs, not populated, not checked, no jitter.
    fn default() -> Self {
        Self {
            memory_bytes: 256 << 20,
            nodes: 1,
            slow_bytes: 0,
            cpus: 4,
            populate: false,
            checked: Checked::Off,
            jitter: 0,
        }
    }
}

/// The reason why a [`Config`] gives no machine. Converts to [`Errno`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConfigError {
    /// [`Config::cpus`] is out of range: `EINVAL`.
    Cpus(usize),
    /// The number of nodes is out of range: `EINVAL`.
    Nodes {
        /// [`Config::nodes`].
        nodes: usize,
        /// [`Config::slow_bytes`].
        slow: u64,
    },
    /// The size of the memory is out of range: `EINVAL`.
    Size {
        /// [`Config::memory_bytes`].
        bytes: u64,
        /// [`Config::slow_bytes`].
        slow: u64,
        /// [`Config::nodes`].
        nodes: usize,
    },
    /// The host or the subsystem refused the memory.
    Refused(Errno),
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Cpus(cpus) => write!(f, "cpus is {cpus}; the range is 1 to {MAX_CPUS}"),
            Self::Nodes { nodes, slow } => {
                let most = MAX_NODES - usize::from(slow >> PAGE_SHIFT != 0);
                write!(f, "nodes is {nodes}; the range is 1 to {most}")?;
                f.write_str(if most < MAX_NODES { " besides the slow node" } else { "" })
            }
            Self::Size { bytes, slow, nodes } => {
                let least = (LEAST_FRAMES * nodes) as u64 * PAGE_SIZE;
                let most = u64::from(u32::MAX) * PAGE_SIZE;
                write!(f, "memory_bytes is {bytes} and slow_bytes is {slow}; ")?;
                write!(f, "memory_bytes must be at least {least} with nodes = {nodes}, ")?;
                write!(f, "and the sum at most {most} (16 TiB - 4 KiB)")
            }
            Self::Refused(errno) => write!(f, "the memory is not available: {errno}"),
        }
    }
}

impl core::error::Error for ConfigError {}

impl From<Errno> for ConfigError {
    fn from(errno: Errno) -> Self {
        Self::Refused(errno)
    }
}

impl From<ConfigError> for Errno {
    fn from(error: ConfigError) -> Self {
        match error {
            ConfigError::Refused(errno) => errno,
            _ => Self::EINVAL,
        }
    }
}

/// The handling of law 1: no CPU reads or writes a frame through a translation older than the
/// frame's present ownership. The same check covers a requirement of law 2: no access through a
/// translation that allows more than its entry, after the change of the entry is complete.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checked {
    /// No checks, for benchmarks.
    #[default]
    Off,
    /// Every access is checked, and violations are recorded.
    Record,
    /// Every access is checked, and a violation panics, for tests.
    Panic,
}

/// The defect of a used translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stale {
    /// The translation is older than the frame's present ownership: law 1.
    Owner,
    /// A page table on the way to the page is older than its frame's present ownership: law 1, for
    /// the CPU's cached upper-level entries.
    Table,
    /// The entry, which is not under change, forbids the access, or maps another page: a removed
    /// right or mapping is still in use.
    Entry,
}

/// An access through a translation that should have been dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Why.
    pub stale: Stale,
    /// The accessing CPU.
    pub cpu: CpuId,
    /// The space run by the CPU.
    pub space: SpaceId,
    /// The accessed address.
    pub addr: u64,
    /// The accessed frame.
    pub frame: FrameNumber,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { stale, cpu, space, addr, frame } = self;
        let what = match stale {
            Stale::Owner => "of another owner",
            Stale::Table => "which was a table of the walk",
            Stale::Entry => "which the entry forbids",
        };
        write!(f, "cpu {} of {space:?} used {addr:#x} for {frame:?}, {what}", cpu.0)
    }
}

/// The number of recorded violations; further violations are only counted.
const KEPT_VIOLATIONS: usize = 64;

/// The machine's state of one CPU.
#[derive(Debug)]
pub(crate) struct CpuState {
    /// The interrupt line, on a separate cache line, because other CPUs write it.
    pending: Padded<AtomicBool>,
    interrupts: AtomicU64,
    /// The place where the CPU's thread sleeps.
    parking: Padded<Parking>,
    /// Invalidations yet to be left out, for tests of the checks.
    skip: AtomicU32,
    /// The space whose translations are in the TLB.
    space: AtomicU64,
    pub(crate) tlb: Tlb,
}

impl CpuState {
    /// Returns whether an interrupt is pending. One load, done before every access.
    #[inline(always)]
    pub(crate) fn interrupted(&self) -> bool {
        self.pending.0.load(Ordering::Relaxed)
    }

    /// Takes the interrupt: the sender's earlier writes are visible afterwards.
    pub(crate) fn take_interrupt(&self) {
        self.pending.0.swap(false, Ordering::AcqRel);
    }

    /// Loads the tables of another space, as a write of CR3 does: the old translations go.
    pub(crate) fn load_space(&self, space: SpaceId) {
        if self.space.swap(space.0, Ordering::Relaxed) != space.0 {
            self.tlb.invalidate_all();
        }
    }

    fn skips(&self) -> bool {
        let left = self.skip.load(Ordering::Relaxed);
        if left != 0 {
            self.skip.store(left - 1, Ordering::Relaxed);
        }
        left != 0
    }
}

/// Draws moments out; see [`Config::jitter`].
#[derive(Debug)]
struct Jitter {
    one_in: u32,
    /// The number of moments so far, which makes each moment different.
    moments: AtomicU64,
}

impl Jitter {
    #[inline(always)]
    fn moment(&self) {
        if self.one_in != 0 {
            self.perhaps();
        }
    }

    #[cold]
    fn perhaps(&self) {
        // Fibonacci hashing: neighbouring numbers give unrelated results.
        let moment = self.moments.fetch_add(1, Ordering::Relaxed) + 1;
        let mixed = moment.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_right(29);
        if !mixed.is_multiple_of(u64::from(self.one_in)) {
            return;
        }
        // As long as another CPU's fault, or as long as another thread has the core.
        if mixed >> 32 & 3 == 0 {
            std::thread::yield_now();
        } else {
            (0..mixed >> 40 & 0xfff).for_each(|_| core::hint::spin_loop());
        }
    }
}

/// The native machine: memory of the process, threads for CPUs.
#[derive(Debug)]
pub struct NativeMachine {
    memory: Memory,
    cpus: Vec<Padded<CpuState>>,
    checked: Checked,
    jitter: Jitter,
    violations: AtomicU64,
    kept: Mutex<Vec<Violation>>,
}

impl NativeMachine {
    /// Builds a machine.
    ///
    /// # Errors
    /// A value of the configuration is out of range, or the host refuses the memory.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        if config.cpus == 0 || config.cpus > MAX_CPUS {
            return Err(ConfigError::Cpus(config.cpus));
        }
        let mut memory = Memory::tiered(config.memory_bytes, config.nodes, config.slow_bytes)?;
        if config.populate {
            memory.populate();
        }
        let cpu = |_| {
            Padded(CpuState {
                pending: Padded(AtomicBool::new(false)),
                interrupts: AtomicU64::new(0),
                parking: Padded::default(),
                skip: AtomicU32::new(0),
                space: AtomicU64::new(u64::MAX),
                tlb: Tlb::new(),
            })
        };
        Ok(Self {
            memory,
            cpus: (0..config.cpus).map(cpu).collect(),
            checked: config.checked,
            jitter: Jitter { one_in: config.jitter, moments: AtomicU64::new(0) },
            violations: AtomicU64::new(0),
            kept: Mutex::new(Vec::new()),
        })
    }

    /// The physical memory.
    #[inline]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Returns the handling of accesses through stale translations.
    #[inline]
    pub fn checked(&self) -> Checked {
        self.checked
    }

    #[inline]
    pub(crate) fn cpu_state(&self, cpu: CpuId) -> &CpuState {
        &self.cpus[cpu.index()].0
    }

    /// Returns the statistics of the TLB of `cpu` so far.
    pub fn tlb_stats(&self, cpu: CpuId) -> TlbStats {
        self.cpu_state(cpu).tlb.stats()
    }

    /// Returns the statistics of all TLBs so far.
    pub fn total_tlb_stats(&self) -> TlbStats {
        let mut total = TlbStats::default();
        self.cpus.iter().for_each(|cpu| total += cpu.0.tlb.stats());
        total
    }

    /// Interrupts sent to `cpu` so far.
    pub fn interrupts(&self, cpu: CpuId) -> u64 {
        self.cpu_state(cpu).interrupts.load(Ordering::Relaxed)
    }

    /// Violations of law 1 seen so far; 0 outside checked mode.
    pub fn violation_count(&self) -> u64 {
        self.violations.load(Ordering::Relaxed)
    }

    /// The first 64 violations.
    pub fn violations(&self) -> Vec<Violation> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Records a violation, and panics if configured.
    #[cold]
    pub(crate) fn violated(&self, violation: Violation) {
        self.violations.fetch_add(1, Ordering::Relaxed);
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < KEPT_VIOLATIONS {
            kept.push(violation);
        }
        drop(kept);
        assert!(self.checked != Checked::Panic, "{violation}");
    }

    /// Plants a fault: the next `count` invalidations on `cpu` have no effect. For tests that the
    /// checked mode detects violations.
    ///
    /// # Safety
    /// This breaks the machine's contract. While `cpu` may still hold a translation to a freed
    /// frame, the subsystem must use the frame only for a program's data, and programs must only
    /// load through stale translations.
    pub unsafe fn plant_skipped_invalidations(&self, cpu: CpuId, count: u32) {
        self.cpu_state(cpu).skip.store(count, Ordering::Relaxed);
    }
}

// SAFETY: by the trait's points:
// - CPUs and regions are fixed at construction; regions are disjoint parts of one mapping without
//   other users, and frame bytes belong to this mapping (host mapping, see `memory`).
// - A TLB drops the requested translations (may forget, never lies, see `tlb`), including upper
//   levels; a walk is done by the CPU's own thread, which cannot be inside a walk when it
//   invalidates.
// - `interrupt` raises a line with release. `NativeCpu` checks the line before every access of its
//   program, and takes the interrupt with acquire. `interrupt` also wakes a parked CPU. A
//   `NativeCpu` exists while its CPU runs the space.
// - A parked thread only sleeps.
// - The walk (see `mmu`) only sets accessed and dirty bits, by compare-and-swap of present entries.
unsafe impl Machine for NativeMachine {
    type Predictor = faultless::prefault::Streams;

    fn cpus(&self) -> usize {
        self.cpus.len()
    }

    /// Nodes are tiers.
    fn node_cost(&self, node: u8) -> u32 {
        1 + u32::from(node)
    }

    fn regions(&self) -> &[MemoryRegion] {
        self.memory.regions()
    }

    #[inline(always)]
    fn frame_bytes(&self, frame: FrameNumber) -> *mut u8 {
        self.memory.frame_bytes(frame)
    }

    fn invalidate(&self, cpu: CpuId, space: SpaceId, what: Invalidate) {
        let state = self.cpu_state(cpu);
        // Loading another space's tables has dropped all translations of this space.
        if state.space.load(Ordering::Relaxed) != space.0 || state.skips() {
            return;
        }
        self.jitter.moment();
        match what {
            Invalidate::Range(range) => state.tlb.invalidate_range(range),
            Invalidate::All => state.tlb.invalidate_all(),
        }
    }

    fn invalidate_all(&self, cpu: CpuId) {
        let state = self.cpu_state(cpu);
        if !state.skips() {
            state.tlb.invalidate_all();
        }
    }

    fn interrupt(&self, cpu: CpuId) {
        let state = self.cpu_state(cpu);
        state.interrupts.fetch_add(1, Ordering::Relaxed);
        self.jitter.moment();
        state.pending.0.store(true, Ordering::Release);
        state.parking.0.wake();
    }

    fn relax(&self, looks: u32) {
        // There may be more CPUs than host cores: the CPU waited for may not be running. Callers
        // that can park do so instead.
        if looks < LOOKS_BEFORE_PARKING {
            core::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }

    fn park(&self, cpu: CpuId) {
        self.cpu_state(cpu).parking.0.park();
    }

    fn wake(&self, cpu: CpuId) {
        self.cpu_state(cpu).parking.0.wake();
    }

    #[inline(always)]
    unsafe fn zero_frame(&self, frame: FrameNumber) {
        self.jitter.moment();
        // SAFETY: a whole frame of the mapping (host mapping), which is the caller's.
        unsafe { self.frame_bytes(frame).write_bytes(0, PAGE_SIZE as usize) };
    }

    unsafe fn zero_ahead(&self, first: FrameNumber, frames: u32) {
        self.jitter.moment();
        for frame in first.0..first.0 + frames {
            // SAFETY: a whole frame of the mapping (host mapping), which is the caller's.
            unsafe { zero_nontemporal(self.frame_bytes(FrameNumber(frame))) };
        }
        nontemporal_done();
    }

    #[inline(always)]
    unsafe fn copy_frame(&self, to: FrameNumber, from: FrameNumber) {
        let from = self.frame_bytes(from).cast_const();
        // SAFETY: two whole frames of the mapping (host mapping); the target belongs to the caller.
        // A copy is invalid if a program stores to the source in the meantime, and is then
        // discarded.
        unsafe { self.frame_bytes(to).copy_from_nonoverlapping(from, PAGE_SIZE as usize) };
        // The copy exists; its original may change from here on.
        self.jitter.moment();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mmu::{PageSize, Translation};
    use faultless::{Access, VirtRange};

    fn machine() -> NativeMachine {
        NativeMachine::new(Config { memory_bytes: 1 << 20, cpus: 2, ..Config::default() }).unwrap()
    }

    #[test]
    fn bad_configuration_is_refused_with_its_range() {
        let good = Config { memory_bytes: 2 * PAGE_SIZE, ..Config::default() };
        NativeMachine::new(good).unwrap();
        let limits = "must be at least 8192 with nodes = 1, and the sum at most 17592186040320 \
                      (16 TiB - 4 KiB)";
        for (bad, range) in [
            (Config { cpus: 0, ..good }, "cpus is 0; the range is 1 to 1024"),
            (Config { cpus: MAX_CPUS + 1, ..good }, "cpus is 1025; the range is 1 to 1024"),
            (Config { nodes: 0, ..good }, "nodes is 0; the range is 1 to 8"),
            (Config { nodes: 9, ..good }, "nodes is 9; the range is 1 to 8"),
            (
                Config { nodes: 8, slow_bytes: PAGE_SIZE, ..good },
                "nodes is 8; the range is 1 to 7 besides the slow node",
            ),
            (Config { memory_bytes: 0, ..good }, limits),
            (Config { memory_bytes: 2 * PAGE_SIZE - 1, ..good }, limits),
            (Config { memory_bytes: 1 << 44, ..good }, limits),
            (Config { memory_bytes: 1 << 60, ..good }, limits),
            (Config { slow_bytes: (1 << 44) - 2 * PAGE_SIZE, ..good }, limits),
            (Config { nodes: 2, ..good }, "must be at least 16384 with nodes = 2"),
        ] {
            let error = NativeMachine::new(bad).unwrap_err();
            assert!(error.to_string().contains(range), "{error}");
            assert_eq!(Errno::from(error), Errno::EINVAL);
        }
    }

    #[test]
    fn invalidation_reaches_the_loaded_space_on_one_cpu() {
        let machine = machine();
        let page = Translation::new(FrameNumber(3), PageSize::Size4K, true, true, false);
        let holds = |cpu| machine.cpu_state(cpu).tlb.lookup(0x5000, Access::Read).is_some();
        for cpu in [CpuId(0), CpuId(1)] {
            machine.cpu_state(cpu).load_space(SpaceId(1));
            machine.cpu_state(cpu).tlb.fill(0x5000, Access::Read, page);
        }
        let what = Invalidate::Range(VirtRange::page(0x5000));
        machine.invalidate(CpuId(0), SpaceId(2), what);
        assert!(holds(CpuId(0)));
        machine.invalidate(CpuId(0), SpaceId(1), what);
        assert!(!holds(CpuId(0)) && holds(CpuId(1)));
        machine.cpu_state(CpuId(1)).load_space(SpaceId(1));
        assert!(holds(CpuId(1)), "loading the same space keeps its translations");
        machine.cpu_state(CpuId(1)).load_space(SpaceId(2));
        assert!(!holds(CpuId(1)));
    }

    #[test]
    fn a_parked_cpu_continues_after_a_wake_up_or_interrupt() {
        let machine = machine();
        std::thread::scope(|scope| {
            for rouse in [NativeMachine::wake, NativeMachine::interrupt] {
                let parked = scope.spawn(|| machine.park(CpuId(1)));
                rouse(&machine, CpuId(1));
                parked.join().unwrap();
            }
        });
    }

    #[test]
    fn an_interrupt_waits_until_it_is_taken() {
        let machine = machine();
        machine.interrupt(CpuId(1));
        assert!(machine.cpu_state(CpuId(1)).interrupted());
        assert!(!machine.cpu_state(CpuId(0)).interrupted());
        machine.cpu_state(CpuId(1)).take_interrupt();
        assert!(!machine.cpu_state(CpuId(1)).interrupted());
        assert_eq!(machine.interrupts(CpuId(1)), 1);
    }
}
