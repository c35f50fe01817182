//! Memory in tiers: a machine with a fast and a slow node, and a swap area. A program uses more
//! memory than available, and a part of it continuously.
//!
//! `cargo run -p faultless --example tiers`
//!
//! A kernel adds to the machine of the example `machine` in three places: [`Machine::node_cost`],
//! which marks the slow node; the swap area, a [`BackingStore`] ([`Area`]); and the background work
//! ([`background`]).

use core::ptr;
use core::sync::atomic::{AtomicU64, Ordering};
use faultless::audit::audit;
use faultless::prefault::Streams;
use faultless::{
    Access, BackingStore, Counter, Cpu, CpuId, Errno, FaultError, FaultKind, FrameNumber,
    Invalidate, Machine, MapFlags, MemoryRegion, PAGE_SIZE, Prot, ReadRun, Setting, Space, SpaceId,
    StoreError, ThreadStreams, Vm, WriteRun,
};
use std::error::Error;
use std::io::Write;
use std::slice;
use std::sync::{Arc, Mutex};

/// 4 MiB of fast memory, and 12 MiB of slow memory.
const FAST: u32 = 1024;
const SLOW: u32 = 3072;
/// 16 MiB for swapped pages.
const AREA: u64 = 4096;

#[repr(C, align(4096))]
struct Frame([AtomicU64; PAGE_SIZE as usize / 8]);

struct Tiered {
    memory: Vec<Frame>,
    regions: [MemoryRegion; 2],
}

impl Tiered {
    fn new() -> Self {
        let frame = |_| Frame([const { AtomicU64::new(0) }; _]);
        let region = |node, first, frames| MemoryRegion { node, first: FrameNumber(first), frames };
        let regions = [region(0, 1, FAST - 1), region(1, FAST, SLOW)];
        Self { memory: (0..FAST + SLOW).map(frame).collect(), regions }
    }
}

// SAFETY: as in the example `machine`.
unsafe impl Machine for Tiered {
    type Predictor = Streams;

    fn cpus(&self) -> usize {
        1
    }

    fn regions(&self) -> &[MemoryRegion] {
        &self.regions
    }

    fn node_cost(&self, node: u8) -> u32 {
        [10, 30][usize::from(node)]
    }

    fn frame_bytes(&self, frame: FrameNumber) -> *mut u8 {
        ptr::from_ref(&self.memory[frame.0 as usize]).cast_mut().cast()
    }

    fn invalidate(&self, _: CpuId, _: SpaceId, _: Invalidate) {}

    fn invalidate_all(&self, _: CpuId) {}

    fn interrupt(&self, _: CpuId) {}
}

/// A swap area in the host's memory.
#[derive(Debug)]
struct Area(Mutex<Vec<u8>>);

impl BackingStore for Area {
    fn len(&self) -> u64 {
        AREA * PAGE_SIZE
    }

    fn read(&self, run: &mut ReadRun) -> Result<usize, StoreError> {
        let (bytes, start) = (self.0.lock().unwrap(), run.offset() as usize);
        let mut at = start;
        for to in run.memory() {
            to.copy_from_slice(&bytes[at..at + to.len()]);
            at += to.len();
        }
        Ok(at - start)
    }

    fn write(&self, run: &WriteRun<'_>) -> Result<(), StoreError> {
        let (mut bytes, mut at) = (self.0.lock().unwrap(), run.offset() as usize);
        for (from, len) in run.memory() {
            // SAFETY: valid for reads during the call. Pages of a swap area belong to no program
            // during their writeback.
            let from = unsafe { slice::from_raw_parts(from, len) };
            bytes[at..at + len].copy_from_slice(from);
            at += len;
        }
        Ok(())
    }

    fn set_len(&self, _: u64) -> Result<(), Errno> {
        Err(Errno::EPERM)
    }
}

/// Does a kernel's background work, called repeatedly.
fn background(cpu: &Cpu<'_, Tiered>) {
    // So that programs need not evict pages themselves.
    cpu.reclaim_ahead();
    // So that new pages are allocated in fast memory, and used pages are promoted: 32 at a time.
    cpu.balance(32);
}

/// A thread of a program.
struct Program<'a> {
    cpu: &'a Cpu<'a, Tiered>,
    space: &'a Space<Tiered>,
    thread: ThreadStreams,
}

impl<'a> Program<'a> {
    /// The word at `addr`, as in the example `machine`; but pages may be in the swap area.
    fn reach(&self, addr: u64, access: Access) -> Result<&'a AtomicU64, FaultError> {
        loop {
            if let Some(to) = self.space.walk(self.cpu, addr, access) {
                let frame = &self.cpu.vm().machine().memory[to.frame.0 as usize];
                return Ok(&frame.0[to.offset / 8]);
            }
            let fault = self.space.fault(self.cpu, &self.thread, addr, access)?;
            // With a device that reads later, other threads would run until the read ends.
            assert!(
                !matches!(fault, FaultKind::Pending),
                "this area reads and writes without waiting"
            );
        }
    }

    fn load(&self, addr: u64) -> Result<u64, FaultError> {
        Ok(self.reach(addr, Access::Read)?.load(Ordering::Relaxed))
    }

    fn store(&self, addr: u64, value: u64) -> Result<(), FaultError> {
        self.reach(addr, Access::Write)?.store(value, Ordering::Relaxed);
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let vm = Vm::new(Tiered::new())?;
    vm.set(Setting::PrefaultMaxOrder(0));
    // SAFETY: the only handle of CPU 0, used by this thread alone.
    let cpu = unsafe { vm.cpu(CpuId(0)) };
    cpu.swap_on(Arc::new(Area(Mutex::new(vec![0; (AREA * PAGE_SIZE) as usize]))))?;

    // 24 MiB, of which the first MiB is used all the time.
    const PAGES: u64 = 6144;
    const USED: u64 = 256;
    let space = Space::new(&cpu)?;
    let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS;
    let at = space.mmap(&cpu, None, PAGES * PAGE_SIZE, Prot::READ | Prot::WRITE, flags)?;
    let addr = |page: u64| at + page * PAGE_SIZE;
    space.activate(&cpu);
    let program = Program { cpu: &cpu, space: &space, thread: ThreadStreams::new() };
    for page in 0..PAGES {
        program.store(addr(page), page)?;
        if page % 32 == 0 {
            for used in 0..USED.min(page) {
                assert_eq!(program.load(addr(used))?, used);
            }
            background(&cpu);
        }
    }

    let places = |pages: core::ops::Range<u64>| {
        let pages: Vec<_> = pages.map(addr).collect();
        let mut nodes = vec![Err(Errno::ENOENT); pages.len()];
        space.page_nodes(&cpu, &pages, &mut nodes);
        [Ok(0), Ok(1), Err(Errno::ENOENT)]
            .map(|place| nodes.iter().filter(|it| **it == place).count())
    };
    let (used, others) = (places(0..USED), places(USED..PAGES));
    // The reader may close the output.
    let mut out = std::io::stdout();
    let _ =
        writeln!(out, "pages                in fast memory   in slow memory   in the swap area");
    for (name, [fast, slow, swapped]) in [("used all the time", used), ("used once", others)] {
        let _ = writeln!(out, "{name:20} {fast:14} {slow:16} {swapped:18}");
    }
    assert!(used[0] as u64 > USED * 9 / 10, "pages in use are in fast memory");
    assert!(others[2] as u64 > PAGES / 4, "unused pages are in the swap area");
    for page in 0..PAGES {
        assert_eq!(program.load(addr(page))?, page, "no page is lost");
    }
    let totals = vm.totals();
    for counter in [Counter::Demoted, Counter::SwapOut, Counter::SwapIn] {
        let _ = writeln!(out, "{:20} {:14}", counter.name(), totals.get(counter));
    }

    // SAFETY: the program has ended, and the machine keeps no translations.
    unsafe { space.deactivate(&cpu) };
    space.exit(&cpu);
    cpu.drain();
    audit(&cpu, &[])?;
    Ok(())
}

#[test]
fn it_runs() {
    main().unwrap();
}
