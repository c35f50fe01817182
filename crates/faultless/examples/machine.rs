//! A complete machine: memory, and one CPU without a TLB. A program stores and loads on the
//! machine, and faults.
//!
//! `cargo run -p faultless --example machine`
//!
//! A kernel's code is in three places: the [`Machine`], the page-fault handler
//! ([`Program::reach`]), and the life of a space from its creation to its end ([`main`]).

use core::ptr;
use core::sync::atomic::{AtomicU64, Ordering};
use faultless::audit::audit;
use faultless::prefault::Streams;
use faultless::{
    Access, Cpu, CpuId, FaultError, FrameNumber, Invalidate, Machine, MapFlags, MemoryRegion,
    PAGE_SIZE, Prot, Space, SpaceId, ThreadStreams, Vm,
};
use std::error::Error;
use std::io::Write;

/// 16 MiB.
const FRAMES: u32 = 4096;

/// The bytes of a frame. Programs on several CPUs may store to a word at the same time, so words
/// are atomics.
#[repr(C, align(4096))]
struct Frame([AtomicU64; PAGE_SIZE as usize / 8]);

struct Tiny {
    memory: Vec<Frame>,
    regions: [MemoryRegion; 1],
}

impl Tiny {
    fn new() -> Self {
        let frame = |_| Frame([const { AtomicU64::new(0) }; _]);
        // Frame 0 stays out: no page has the physical address 0.
        let regions = [MemoryRegion { node: 0, first: FrameNumber(1), frames: FRAMES - 1 }];
        Self { memory: (0..FRAMES).map(frame).collect(), regions }
    }
}

// SAFETY: by the trait's points:
// - CPUs and regions never change, and the frames are the elements of a vector without other users.
// - `frame_bytes` is the address of such an element, which is a page, aligned to a page, and made
//   of atomics, so that it may be written through a shared reference.
// - There is one CPU, and no TLB. So there are no translations to drop and no CPU to interrupt.
// - A program's accesses go through `Space::walk`, which sets the accessed and dirty bits as
//   hardware does.
unsafe impl Machine for Tiny {
    type Predictor = Streams;

    fn cpus(&self) -> usize {
        1
    }

    fn regions(&self) -> &[MemoryRegion] {
        &self.regions
    }

    fn frame_bytes(&self, frame: FrameNumber) -> *mut u8 {
        ptr::from_ref(&self.memory[frame.0 as usize]).cast_mut().cast()
    }

    fn invalidate(&self, _: CpuId, _: SpaceId, _: Invalidate) {}

    fn invalidate_all(&self, _: CpuId) {}

    fn interrupt(&self, _: CpuId) {}
}

/// A thread of a program, on the CPU, in the space that the CPU runs.
struct Program<'a> {
    cpu: &'a Cpu<'a, Tiny>,
    space: &'a Space<Tiny>,
    /// The predictions from the thread's faults so far.
    thread: ThreadStreams,
}

impl<'a> Program<'a> {
    /// Returns the word at `addr`, which is aligned. The MMU walks the tables. If they do not allow
    /// the access, the page-fault handler calls the subsystem, and the access is retried.
    fn reach(&self, addr: u64, access: Access) -> Result<&'a AtomicU64, FaultError> {
        loop {
            if let Some(to) = self.space.walk(self.cpu, addr, access) {
                let frame = &self.cpu.vm().machine().memory[to.frame.0 as usize];
                return Ok(&frame.0[to.offset / 8]);
            }
            self.space.fault(self.cpu, &self.thread, addr, access)?;
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
    let vm = Vm::new(Tiny::new())?;
    // SAFETY: the only handle of CPU 0, used by this thread alone.
    let cpu = unsafe { vm.cpu(CpuId(0)) };

    let space = Space::new(&cpu)?;
    let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS;
    let at = space.mmap(&cpu, None, 64 * PAGE_SIZE, Prot::READ | Prot::WRITE, flags)?;

    // A kernel loads the page-table base, `space.root()`, after this.
    space.activate(&cpu);
    let program = Program { cpu: &cpu, space: &space, thread: ThreadStreams::new() };
    assert_eq!(program.load(at)?, 0, "a read of untouched memory maps the zero page");
    for page in 0..64 {
        program.store(at + page * PAGE_SIZE, 100 + page)?;
    }
    assert_eq!(program.load(at + 63 * PAGE_SIZE)?, 163);
    let refused = program.load(at + 64 * PAGE_SIZE);
    assert_eq!(refused, Err(FaultError::Segv { mapped: false }));

    // A debugger reads the program's memory from outside.
    let mut word = [0; 8];
    space.read_bytes(&cpu, at + PAGE_SIZE, &mut word)?;
    assert_eq!(u64::from_ne_bytes(word), 101);

    // The reader may have closed the output.
    let _ = write!(std::io::stdout(), "{}{}", space.maps(&cpu), vm.totals());
    // SAFETY: the program has ended, and the machine keeps no translations.
    unsafe { space.deactivate(&cpu) };
    space.exit(&cpu);

    // Every frame is accounted for: all are free, but for the zero page.
    cpu.drain();
    assert_eq!(audit(&cpu, &[])?.taken(), 1);
    Ok(())
}

#[test]
fn it_runs() {
    main().unwrap();
}
