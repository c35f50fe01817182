//! An interpreter of a few RISC-V instructions, with two harts and a software TLB each. First two
//! threads of a program run, and then the program and its forked child, which copy the pages they
//! write.
//!
//! `cargo run -p faultless --example harts`
//!
//! A hart is a thread of the host. Its MMU is [`Hart::translate`]: the TLB, then [`Space::walk`],
//! then the page fault. The [`Machine`] keeps the TLB coherent: `invalidate` drops translations,
//! and `interrupt` raises a line that a hart checks before each instruction.

use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use faultless::audit::audit;
use faultless::prefault::Streams;
use faultless::{
    Access, Cpu, CpuId, FaultError, FrameNumber, Invalidate, Machine, MapFlags, MemoryRegion,
    PAGE_SHIFT, PAGE_SIZE, Prot, Space, SpaceId, ThreadStreams, Vm,
};
use std::io::Write;
use std::sync::{Barrier, Mutex, PoisonError};
use std::thread;

const FRAMES: u32 = 2048;
const HARTS: usize = 2;
const TLB_ENTRIES: usize = 64;

/// The bytes of a frame, as words that harts load and store at the same time.
#[repr(C, align(4096))]
struct Frame([AtomicU64; PAGE_SIZE as usize / 8]);

/// A translation of a page, which allows `access` and every weaker access.
#[derive(Clone, Copy)]
struct Cached {
    page: u64,
    access: Access,
    frame: FrameNumber,
}

/// The machine's state of a hart.
struct HartState {
    /// The interrupt line.
    line: AtomicBool,
    /// The translations of the hart's space. Only the hart's own thread takes the lock.
    tlb: Mutex<[Option<Cached>; TLB_ENTRIES]>,
}

impl HartState {
    fn with_tlb<R>(&self, use_it: impl FnOnce(&mut [Option<Cached>; TLB_ENTRIES]) -> R) -> R {
        use_it(&mut self.tlb.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

struct Board {
    memory: Vec<Frame>,
    regions: [MemoryRegion; 1],
    harts: Vec<HartState>,
}

impl Board {
    fn new() -> Self {
        let frame = |_| Frame([const { AtomicU64::new(0) }; _]);
        let tlb = || Mutex::new([None; TLB_ENTRIES]);
        Self {
            memory: (0..FRAMES).map(frame).collect(),
            regions: [MemoryRegion { node: 0, first: FrameNumber(1), frames: FRAMES - 1 }],
            harts: (0..HARTS)
                .map(|_| HartState { line: AtomicBool::new(false), tlb: tlb() })
                .collect(),
        }
    }
}

// SAFETY: by the trait's points:
// - CPUs and regions never change; frames are the elements of a vector, made of atomics, without
//   other users.
// - A hart uses translations only of the space it runs. `invalidate` drops the translations in the
//   range from its TLB, and a hart has no other cache; the hart's own thread makes the call, so no
//   walk is in progress.
// - A hart checks its line before each instruction, and serves flushes if the line is raised: with
//   acquire, paired with the release of the raise. Between this check and the end of the
//   instruction it uses one translation.
// - Harts change entries only through `Space::walk`.
unsafe impl Machine for Board {
    type Predictor = Streams;

    fn cpus(&self) -> usize {
        HARTS
    }

    fn regions(&self) -> &[MemoryRegion] {
        &self.regions
    }

    fn frame_bytes(&self, frame: FrameNumber) -> *mut u8 {
        ptr::from_ref(&self.memory[frame.0 as usize]).cast_mut().cast()
    }

    // ANCHOR: flushes
    fn invalidate(&self, cpu: CpuId, _: SpaceId, what: Invalidate) {
        let goes = |cached: &Cached| match what {
            Invalidate::Range(range) => range.contains(cached.page << PAGE_SHIFT),
            Invalidate::All => true,
        };
        self.harts[cpu.index()].with_tlb(|tlb| {
            tlb.iter_mut()
                .filter(|slot| slot.as_ref().is_some_and(goes))
                .for_each(|slot| *slot = None);
        });
    }

    fn invalidate_all(&self, cpu: CpuId) {
        self.harts[cpu.index()].with_tlb(|tlb| *tlb = [None; TLB_ENTRIES]);
    }

    fn interrupt(&self, cpu: CpuId) {
        self.harts[cpu.index()].line.store(true, Ordering::Release);
    }
    // ANCHOR_END: flushes

    fn relax(&self, looks: u32) {
        // The host may have fewer cores than there are harts.
        if looks < 100 { core::hint::spin_loop() } else { thread::yield_now() }
    }
}

/// A program's thread on a hart.
struct Hart<'a> {
    cpu: &'a Cpu<'a, Board>,
    space: &'a Space<Board>,
    thread: ThreadStreams,
    pc: u64,
    x: [u64; 32],
}

impl<'a> Hart<'a> {
    /// Runs the program at `pc` until its `ecall`. `a0` (`x10`) is the initial value of register
    /// `a0`, whose final value is returned.
    fn run(
        cpu: &Cpu<'_, Board>,
        space: &Space<Board>,
        pc: u64,
        a0: u64,
    ) -> Result<u64, FaultError> {
        space.activate(cpu);
        let mut hart = Hart { cpu, space, thread: ThreadStreams::new(), pc, x: [0; 32] };
        hart.x[10] = a0;
        let result = loop {
            match hart.step() {
                Ok(true) => {}
                Ok(false) => break Ok(hart.x[10]),
                Err(error) => break Err(error),
            }
        };
        space.exit_thread(cpu, &hart.thread);
        // SAFETY: the program has ended; the call has the TLB emptied.
        unsafe { space.deactivate(cpu) };
        result
    }

    /// Translates `addr` for `access`: by the TLB, or else by the tables, possibly after a page
    /// fault.
    fn translate(&self, addr: u64, access: Access) -> Result<&'a AtomicU64, FaultError> {
        let board = self.cpu.vm().machine();
        let state = &board.harts[self.cpu.id().index()];
        let page = addr >> PAGE_SHIFT;
        let slot = page as usize % TLB_ENTRIES;
        let word =
            |frame: FrameNumber| &board.memory[frame.0 as usize].0[(addr % PAGE_SIZE) as usize / 8];
        let cached = state.with_tlb(|tlb| tlb[slot]);
        // A translation for stores also serves loads, but not fetches.
        let serves = |of: Access| of == access || (of, access) == (Access::Write, Access::Read);
        if let Some(Cached { frame, .. }) = cached.filter(|it| it.page == page && serves(it.access))
        {
            return Ok(word(frame));
        }
        loop {
            if let Some(to) = self.space.walk(self.cpu, addr, access) {
                let frame = to.frame;
                state.with_tlb(|tlb| tlb[slot] = Some(Cached { page, access, frame }));
                return Ok(word(frame));
            }
            self.space.fault(self.cpu, &self.thread, addr, access)?;
        }
    }

    /// Executes one instruction. Returns false for an `ecall`.
    fn step(&mut self) -> Result<bool, FaultError> {
        // ANCHOR: serve
        if self.cpu.vm().machine().harts[self.cpu.id().index()].line.swap(false, Ordering::Acquire)
        {
            self.cpu.serve_flushes();
        }
        // ANCHOR_END: serve
        let pair = self.translate(self.pc, Access::Execute)?.load(Ordering::Relaxed);
        let code = (pair >> (self.pc % 8 * 8)) as u32;
        let [rd, rs1, rs2] = [7, 15, 20].map(|at| (code >> at & 31) as usize);
        let immediate = i64::from(code.cast_signed() >> 20);
        let mut next = self.pc + 4;
        match (code & 0x7f, code >> 12 & 7) {
            // addi
            (0x13, 0) => self.x[rd] = self.x[rs1].wrapping_add_signed(immediate),
            // ld
            (0x03, 3) => {
                let addr = self.x[rs1].wrapping_add_signed(immediate);
                self.x[rd] = self.translate(addr, Access::Read)?.load(Ordering::Relaxed);
            }
            // sd
            (0x23, 3) => {
                let offset = immediate & !31 | i64::from(code >> 7 & 31);
                let addr = self.x[rs1].wrapping_add_signed(offset);
                self.translate(addr, Access::Write)?.store(self.x[rs2], Ordering::Relaxed);
            }
            // bne, backwards by less than 32 bytes
            (0x63, 1) if self.x[rs1] != self.x[rs2] => {
                next = self.pc - (32 - u64::from(code >> 7 & 0x1e));
            }
            (0x63, 1) => {}
            (0x73, 0) => return Ok(false),
            _ => panic!("no such instruction: {code:#x} at {:#x}", self.pc),
        }
        self.x[0] = 0;
        self.pc = next;
        Ok(true)
    }
}

// An assembler for the program's instructions.

const fn addi(rd: u32, rs1: u32, immediate: i32) -> u32 {
    (immediate.cast_unsigned() << 20) | rs1 << 15 | rd << 7 | 0x13
}

const fn ld(rd: u32, rs1: u32) -> u32 {
    rs1 << 15 | 3 << 12 | rd << 7 | 0x03
}

const fn sd(rs2: u32, rs1: u32) -> u32 {
    rs2 << 20 | rs1 << 15 | 3 << 12 | 0x23
}

const fn bne_back(rs1: u32, rs2: u32, bytes: u32) -> u32 {
    0xfe00_0000 | rs2 << 20 | rs1 << 15 | 1 << 12 | (32 - bytes) << 7 | 1 << 7 | 0x63
}

/// Adds 1 to the word at `a0`, 1,000 times, and returns the final value.
const PROGRAM: [u32; 8] = [
    addi(5, 0, 1000),
    ld(6, 10),
    addi(6, 6, 1),
    sd(6, 10),
    addi(5, 5, -1),
    bne_back(5, 0, 16),
    addi(10, 6, 0),
    0x73,
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let vm = Vm::new(Board::new())?;
    // SAFETY: the only handles of their CPUs; each is used by one thread at a time.
    let [first, mut second] = [0, 1].map(|id| unsafe { vm.cpu(CpuId(id)) });

    // The kernel loads the program: its text, and two pages of data.
    let space = Space::new(&first)?;
    let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS;
    let rw = Prot::READ | Prot::WRITE;
    let text = space.mmap(&first, None, PAGE_SIZE, rw, flags)?;
    let data = space.mmap(&first, None, 2 * PAGE_SIZE, rw, flags)?;
    space.write_bytes(&first, text, &PROGRAM.map(u32::to_le_bytes).concat())?;
    space.mprotect(&first, text, PAGE_SIZE, Prot::READ | Prot::EXEC)?;

    // Two threads of the program, each with a separate page.
    let (one, other) = thread::scope(|scope| {
        let (second, space) = (&mut second, &space);
        let other = scope.spawn(move || Hart::run(second, space, text, data + PAGE_SIZE));
        (Hart::run(&first, space, text, data), other.join().expect("a hart"))
    });
    assert_eq!((one?, other?), (1000, 1000));

    // A fork: both spaces share the pages until one of them stores. The parent continues, while the
    // child starts from the same words.
    let child = space.fork(&first)?;
    let start = Barrier::new(2);
    let (parents, childs) = thread::scope(|scope| {
        let (second, child, start) = (&mut second, &child, &start);
        let childs = scope.spawn(move || {
            start.wait();
            let once = Hart::run(second, child, text, data)?;
            Hart::run(second, child, text, data).map(|twice| (once, twice))
        });
        start.wait();
        (Hart::run(&first, &space, text, data), childs.join().expect("a hart"))
    });
    assert_eq!(
        (parents?, childs?),
        (2000, (2000, 3000)),
        "neither process sees the stores of the other"
    );
    // The page without later stores is still shared by both.
    let page = |space: &Space<Board>| space.page_at(&first, data + PAGE_SIZE).map(|to| to.frame);
    assert!(page(&space).is_some() && page(&space) == page(&child));
    // The reader may have closed the output.
    let _ = write!(std::io::stdout(), "{}", vm.totals());

    // Dropped spaces end on the CPU that next finishes a call.
    drop((space, child));
    [&first, &second].into_iter().for_each(Cpu::drain);
    assert_eq!(audit(&first, &[])?.taken(), 1, "the zero page");
    Ok(())
}

#[test]
fn it_runs() {
    main().unwrap();
}
