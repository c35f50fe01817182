//! The steps of the guide's chapter *Embedding*, in one file.
//!
//! `cargo run -p faultless --example embedding`
//!
//! The file contains a machine with one CPU, a page-fault handler, a disk that completes reads
//! later, background work, and the check of all frames at the end.

use core::ptr;
use core::sync::atomic::{AtomicU64, Ordering};
use faultless::audit::audit;
use faultless::prefault::Streams;
use faultless::{
    Access, Backing, BackingStore, Cpu, CpuId, Errno, FaultError, FaultKind, FrameNumber,
    Invalidate, Machine, MapFlags, MemoryRegion, Object, PAGE_SIZE, PendingRead, Prot, ReadRun,
    Reading, Shared, Space, SpaceId, StoreError, ThreadStreams, Vm, WriteRun,
};
use std::collections::VecDeque;
use std::error::Error;
use std::io::Write;
use std::slice;
use std::sync::{Arc, Mutex};

// ANCHOR: machine
/// 16 MiB.
const FRAMES: u32 = 4096;

/// The bytes of one frame, as words that several CPUs may access at the same time.
#[repr(C, align(4096))]
struct Frame([AtomicU64; PAGE_SIZE as usize / 8]);

struct Board {
    memory: Vec<Frame>,
    regions: [MemoryRegion; 1],
}

impl Board {
    fn new() -> Self {
        let frame = |_| Frame([const { AtomicU64::new(0) }; _]);
        let regions = [MemoryRegion { node: 0, first: FrameNumber(1), frames: FRAMES - 1 }];
        Self { memory: (0..FRAMES).map(frame).collect(), regions }
    }
}

// SAFETY: by the points of the trait:
// - The number of CPUs and the regions are constant. Only this vector contains the frames.
// - `frame_bytes` returns the address of an element of the vector: a page, aligned as a page.
// - There is one CPU without a TLB. So `invalidate` has no translations to drop, and no other CPU
//   exists to interrupt.
// - Programs access memory through `Space::walk`, which sets the accessed and dirty bits.
unsafe impl Machine for Board {
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
// ANCHOR_END: machine

// ANCHOR: handler
/// The decision of the page-fault handler.
enum Verdict {
    /// Return from the exception: the access runs again.
    Retry,
    /// Put the thread to sleep until this read completes, and then retry the access.
    Sleep(PendingRead),
    /// Send the thread SIGSEGV or SIGBUS, or handle the lack of memory.
    Fail(FaultError),
}

fn page_fault(
    cpu: &Cpu<'_, Board>,
    space: &Space<Board>,
    thread: &ThreadStreams,
    addr: u64,
    access: Access,
) -> Verdict {
    match space.fault(cpu, thread, addr, access) {
        Ok(FaultKind::Pending) => cpu.pending_read().map_or(Verdict::Retry, Verdict::Sleep),
        Ok(_) => Verdict::Retry,
        Err(error) => Verdict::Fail(error),
    }
}
// ANCHOR_END: handler

// ANCHOR: program
/// A thread of a program. Its MMU is `Space::walk`.
struct Program<'a> {
    cpu: &'a Cpu<'a, Board>,
    space: &'a Space<Board>,
    thread: ThreadStreams,
    disk: &'a Disk,
}

impl<'a> Program<'a> {
    fn reach(&self, addr: u64, access: Access) -> Result<&'a AtomicU64, FaultError> {
        loop {
            if let Some(to) = self.space.walk(self.cpu, addr, access) {
                let frame = &self.cpu.vm().machine().memory[to.frame.0 as usize];
                return Ok(&frame.0[to.offset / 8]);
            }
            match page_fault(self.cpu, self.space, &self.thread, addr, access) {
                Verdict::Retry => {}
                // A kernel with several threads puts this thread to sleep. This kernel has one
                // thread, and completes transfers itself until the read ends. The read may belong
                // to any store: a kernel with several stores completes the transfers of all stores,
                // the swap area included.
                Verdict::Sleep(read) => {
                    while read.outcome().is_none() {
                        self.disk.interrupt(self.cpu);
                    }
                }
                Verdict::Fail(error) => return Err(error),
            }
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
// ANCHOR_END: program

// ANCHOR: store
/// A disk that completes reads later.
#[derive(Debug)]
struct Disk {
    bytes: Mutex<Vec<u8>>,
    transfers: Mutex<VecDeque<Reading>>,
}

impl BackingStore for Disk {
    fn len(&self) -> u64 {
        self.bytes.lock().unwrap().len() as u64
    }

    fn read(&self, run: &mut ReadRun) -> Result<usize, StoreError> {
        // A driver passes the frames of `reading.buffers()` to the device here.
        self.transfers.lock().unwrap().extend(run.take_along());
        Ok(0)
    }

    fn write(&self, run: &WriteRun<'_>) -> Result<(), StoreError> {
        let (mut bytes, mut at) = (self.bytes.lock().unwrap(), run.offset() as usize);
        for (from, len) in run.memory() {
            // SAFETY: valid for reads during the call. The one CPU of this machine stores to no
            // page of the file during the call.
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

impl Disk {
    /// The interrupt handler of the disk: completes the oldest transfer.
    fn interrupt(&self, cpu: &Cpu<'_, Board>) {
        let Some(mut reading) = self.transfers.lock().unwrap().pop_front() else { return };
        let mut at = (reading.first() * PAGE_SIZE) as usize;
        let mut done = 0;
        {
            let bytes = self.bytes.lock().unwrap();
            for page in reading.memory(cpu) {
                page.copy_from_slice(&bytes[at..at + page.len()]);
                (at, done) = (at + page.len(), done + page.len());
            }
        }
        // A kernel with threads also wakes those that wait for `reading.id()`.
        reading.complete(cpu, Ok(done));
    }
}
// ANCHOR_END: store

// ANCHOR: background
/// The body of a kernel thread that a timer wakes every few milliseconds. Evicts pages before
/// programs run out of frames, and moves at most 32 pages to fast memory. (The interrupt handler
/// itself must not call this function, because it may interrupt a call of the same CPU.)
fn tick(cpu: &Cpu<'_, Board>) {
    cpu.background(32);
}

/// The idle loop of a CPU. Zeroes frames (knob `zeroed_pool`), and makes free blocks of 2 MiB on
/// machines with at least 32 MiB. A kernel with threads ends the loop if a thread can run.
fn idle(cpu: &Cpu<'_, Board>) {
    while !cpu.background(256).is_idle() {}
    // Other CPUs need not interrupt this CPU for the translations dropped here.
    cpu.flush_local();
}
// ANCHOR_END: background

fn main() -> Result<(), Box<dyn Error>> {
    // ANCHOR: start
    let vm = Vm::new(Board::new())?;
    // SAFETY: the only `Cpu` of CPU 0, used by this thread alone.
    let cpu = unsafe { vm.cpu(CpuId(0)) };

    let space = Space::new(&cpu)?;
    let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS;
    let heap = space.mmap(&cpu, None, 64 * PAGE_SIZE, Prot::READ | Prot::WRITE, flags)?;
    // ANCHOR_END: start

    // ANCHOR: file
    let content = (0..64 * PAGE_SIZE / 8).flat_map(u64::to_ne_bytes).collect();
    let disk =
        Arc::new(Disk { bytes: Mutex::new(content), transfers: Mutex::new(VecDeque::new()) });
    let file: Shared<Object> = Object::of_store(&cpu, disk.clone(), 1)?;
    let backing = Backing { object: &file, first: 0, may_write: true };
    let prot = Prot::READ | Prot::WRITE;
    let mapped = space.mmap_object(&cpu, None, 64 * PAGE_SIZE, prot, MapFlags::SHARED, backing)?;
    // ANCHOR_END: file

    // ANCHOR: run
    // A kernel with page tables in hardware loads `space.root()` after this call.
    space.activate(&cpu);
    let program = Program { cpu: &cpu, space: &space, thread: ThreadStreams::new(), disk: &disk };
    for page in 0..64 {
        program.store(heap + page * PAGE_SIZE, 100 + page)?;
    }
    assert_eq!(program.load(heap + 63 * PAGE_SIZE)?, 163);
    let beyond = program.load(heap - 64 * PAGE_SIZE - PAGE_SIZE);
    assert_eq!(beyond, Err(FaultError::Segv { mapped: false }));
    // ANCHOR_END: run

    assert_eq!(program.load(mapped + 8)?, 1, "the second word of the file");
    // ANCHOR: dirty
    program.store(mapped, 42)?;
    // ANCHOR_END: dirty
    tick(&cpu);
    idle(&cpu);

    // ANCHOR: write_back
    let pages = file.write_back(&cpu, 0..file.pages(), |range| {
        // All spaces that may map the file.
        space.write_protect(&cpu, &file, range);
    })?;
    assert_eq!(pages, 1, "one dirty page");
    // ANCHOR_END: write_back
    assert_eq!(disk.bytes.lock().unwrap()[..8], 42u64.to_ne_bytes());

    // The reader may have closed the output.
    let _ = write!(std::io::stdout(), "{}{}", space.maps(&cpu), vm.totals());

    // ANCHOR: end
    space.exit_thread(&cpu, &program.thread);
    // SAFETY: the program has ended, and the machine caches no translations.
    unsafe { space.deactivate(&cpu) };
    space.exit(&cpu);
    Object::release(file, &cpu);

    // Returns the frames that this CPU keeps for itself, and then counts all frames.
    cpu.drain();
    assert_eq!(audit(&cpu, &[])?.taken(), 1, "only the zero page is in use");
    // ANCHOR_END: end
    Ok(())
}

#[test]
fn it_runs() {
    main().unwrap();
}
