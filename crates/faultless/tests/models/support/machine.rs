//! A machine for the models. It is small enough to run the whole subsystem under the model checker.
//!
//! Tables have four entries. A page has four words, which are also the entries of the table that
//! the frame may become. A program that owns a frame therefore sees an entry which a fault installs
//! in a former table. Each CPU has a TLB, and each access of a program is checked: the frame must
//! have the same owner as at the time of the translation. The cleaning of the frame for the next
//! owner must be ordered after the access; otherwise the model checker reports two unordered
//! accesses.

use super::{Fair, Guarded};
use faultless::Census;
use faultless::audit::audit;
use faultless::sync::atomic::{AtomicU64, Ordering};
use faultless::sync::wait::Wait;
use faultless::table::Entry;
use faultless::table::node::ENTRIES;
use faultless::table::walk::{Reached, descend};
use faultless::{Access, Cpu, FaultError, FrameNumber, MapFlags, PAGE_SIZE, Prot, Space, Vm};
use faultless::{CpuId, Invalidate, Machine, MemoryRegion, SpaceId};
use std::cell::{RefCell, UnsafeCell};
use std::sync::Arc;

/// The bytes of a frame: a table, or a page of words.
struct Memory {
    words: UnsafeCell<[AtomicU64; ENTRIES]>,
    /// Written when the frame is cleaned, and read by every access of a program.
    used: Guarded,
}

/// A translation in a TLB.
#[derive(Clone, Copy)]
struct Translation {
    space: SpaceId,
    page: u64,
    entry: Entry,
    owner: u64,
}

/// See the module.
pub struct Toy {
    regions: [MemoryRegion; 1],
    frames: Vec<Memory>,
    tlbs: Vec<RefCell<Vec<Translation>>>,
}

// SAFETY: words are atomics, except for the cleaning of a frame by its only owner; a TLB is used
// only by its CPU.
unsafe impl Sync for Toy {}
// SAFETY: no field belongs to a thread.
unsafe impl Send for Toy {}

fn zeros() -> [AtomicU64; ENTRIES] {
    std::array::from_fn(|_| AtomicU64::new(0))
}

impl Toy {
    /// A subsystem on `cpus` CPUs and `frames` frames.
    pub fn vm(cpus: usize, frames: u32) -> Arc<Vm<Self>> {
        let memory = || Memory { words: UnsafeCell::new(zeros()), used: Guarded::new() };
        Arc::new(
            Vm::new(Self {
                regions: [MemoryRegion { node: 0, first: FrameNumber(1), frames }],
                frames: (0..=frames).map(|_| memory()).collect(),
                tlbs: (0..cpus).map(|_| RefCell::default()).collect(),
            })
            .expect("room for the subsystem"),
        )
    }

    fn memory(&self, frame: FrameNumber) -> &Memory {
        &self.frames[frame.0 as usize]
    }

    fn words(&self, frame: FrameNumber) -> &[AtomicU64; ENTRIES] {
        // SAFETY: the atomics are replaced only by the sole owner of a frame. All threads of a
        // model run on one real thread.
        unsafe { &*self.memory(frame).words.get() }
    }
}

// SAFETY: each frame has its own memory, which never moves; only `touch` uses translations.
unsafe impl Machine for Toy {
    type Predictor = faultless::prefault::Streams;

    fn cpus(&self) -> usize {
        self.tlbs.len()
    }

    fn regions(&self) -> &[MemoryRegion] {
        &self.regions
    }

    fn frame_bytes(&self, frame: FrameNumber) -> *mut u8 {
        self.memory(frame).words.get().cast()
    }

    fn invalidate(&self, cpu: CpuId, space: SpaceId, what: Invalidate) {
        self.tlbs[cpu.index()].borrow_mut().retain(|known| {
            known.space != space
                || match what {
                    Invalidate::All => false,
                    Invalidate::Range(range) => !range.contains(known.page),
                }
        });
    }

    fn invalidate_all(&self, cpu: CpuId) {
        self.tlbs[cpu.index()].borrow_mut().clear();
    }

    // Programs check for requests between any two of their instructions.
    fn interrupt(&self, _: CpuId) {}

    fn relax(&self, looks: u32) {
        Fair.wait(looks);
    }

    unsafe fn zero_frame(&self, frame: FrameNumber) {
        self.memory(frame).used.add();
        // SAFETY: the caller owns the frame.
        unsafe { *self.memory(frame).words.get() = zeros() };
    }

    unsafe fn copy_frame(&self, to: FrameNumber, from: FrameNumber) {
        self.memory(to).used.add();
        self.memory(from).used.get();
        for (to, from) in self.words(to).iter().zip(self.words(from)) {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}

/// CPU `id` inside the subsystem.
pub fn cpu(vm: &Vm<Toy>, id: CpuId) -> Cpu<'_, Toy> {
    // SAFETY: each thread of a model is another CPU, once.
    unsafe { vm.cpu(id) }
}

/// An instruction of the program that `cpu` runs in `space`: an access to the page's word at the
/// index of the page (the position of a table entry for this page). Serves faults as a kernel does.
pub fn touch<R>(
    cpu: &Cpu<'_, Toy>,
    space: &Space<Toy>,
    addr: u64,
    access: Access,
    body: impl FnOnce(&AtomicU64) -> R,
) -> Result<R, FaultError> {
    let toy = cpu.vm().machine();
    let tlb = &toy.tlbs[cpu.id().index()];
    let allows = |entry: Entry| access != Access::Write || entry.is_writable();
    loop {
        cpu.serve_flushes();
        let fits = |known: &&Translation| known.space == space.id() && known.page == addr;
        let known = tlb.borrow().iter().find(fits).copied();
        if let Some(known) = known.filter(|known| allows(known.entry)) {
            let frame = known.entry.frame();
            toy.memory(frame).used.get();
            assert_eq!(cpu.vm().frame_owner(frame), known.owner, "a stale owner");
            return Ok(body(&toy.words(frame)[(addr / PAGE_SIZE) as usize % ENTRIES]));
        }
        let at = (addr / PAGE_SIZE) as usize % ENTRIES;
        // SAFETY: the space lives. A table is freed only after this CPU has acknowledged, which
        // does not happen during its walk.
        let entry = match unsafe { descend(toy, space.root(), addr) } {
            Reached::Last(slots) => Entry(slots[at].load(Ordering::Acquire)),
            Reached::Above { seen, .. } if seen.is_huge() => seen.part(at),
            Reached::Above { .. } => Entry::NONE,
        };
        if entry.is_present() && allows(entry) {
            let owner = cpu.vm().frame_owner(entry.frame());
            tlb.borrow_mut().retain(|known| known.space != space.id() || known.page != addr);
            tlb.borrow_mut().push(Translation { space: space.id(), page: addr, entry, owner });
            continue;
        }
        space.fault_remote(cpu, addr, access)?;
    }
}

/// The address of a page.
pub const fn page(number: u64) -> u64 {
    number * PAGE_SIZE
}

/// The state of a CPU in a model: calls, and programs in a space.
#[derive(Clone, Copy)]
pub struct Stage<'a> {
    pub cpu: &'a Cpu<'a, Toy>,
    pub space: &'a Space<Toy>,
    /// A word through which programs communicate.
    pub word: &'a AtomicU64,
}

impl Stage<'_> {
    /// Stores `value` to a page.
    pub fn store(&self, number: u64, value: u64) -> Result<(), FaultError> {
        let store = |word: &AtomicU64| word.store(value, Ordering::Relaxed);
        touch(self.cpu, self.space, page(number), Access::Write, store)
    }

    /// Loads from a page.
    pub fn load(&self, number: u64) -> Result<u64, FaultError> {
        let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
        touch(self.cpu, self.space, page(number), Access::Read, load)
    }
}

/// Maps private memory for reading and writing.
pub fn map(stage: &Stage<'_>, first: u64, pages: u64) {
    let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS | MapFlags::FIXED;
    let prot = Prot::READ | Prot::WRITE;
    stage.space.mmap(stage.cpu, page(first), page(pages), prot, flags).unwrap();
}

type Act = fn(&Stage<'_>);

/// Runs `before` on CPU 0, and then `left` on CPU 0 and `right` on CPU 1. `after` receives the
/// census at the end. The audit must balance, and no frame is lost when the space ends.
pub fn two(bound: Option<usize>, before: Act, left: Act, right: Act, after: fn(&Census)) {
    super::explore(bound, move || {
        const FRAMES: u32 = 24;
        let vm = Toy::vm(2, FRAMES);
        let cpu = cpu(&vm, CpuId(0));
        let space = Arc::new(Space::new(&cpu).unwrap());
        let word = Arc::new(AtomicU64::new(0));
        let stage = Stage { cpu: &cpu, space: &space, word: &word };
        space.activate(&cpu);
        before(&stage);
        // SAFETY: the program has ended.
        unsafe { space.deactivate(&cpu) };
        let other = {
            let (vm, space, word) = (Arc::clone(&vm), Arc::clone(&space), Arc::clone(&word));
            loom::thread::spawn(move || {
                let cpu = self::cpu(&vm, CpuId(1));
                right(&Stage { cpu: &cpu, space: &space, word: &word });
                cpu.drain();
            })
        };
        // Lets the other thread go first without counting a forced switch.
        loom::thread::yield_now();
        left(&stage);
        other.join().unwrap();
        cpu.drain();
        after(&audit(&cpu, &[&*space]).expect("a clean audit"));
        Arc::into_inner(space).expect("the last reference to the space").exit(&cpu);
        cpu.drain();
        let census = audit(&cpu, &[]).expect("a clean audit");
        assert_eq!((census.free, census.zero), (u64::from(FRAMES) - 1, 1), "a frame is lost");
    });
}
