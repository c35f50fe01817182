//! A hypervisor's guest memory: a space is the guest-physical memory of a virtual machine.
//!
//! `cargo run -p faultless --example guest_memory`
//!
//! Two guests start from one image, a memory object mapped privately by each guest: they share its
//! pages, and copy the pages they write. The hypervisor loads and reads their memory remotely, and
//! reclaims memory by a balloon. A snapshot is a fork of the space. A guest has a framebuffer,
//! which is device memory, and a network card writes to its pinned pages.
//!
//! On hardware the space's tables are the nested page tables, and a violation is a fault of the
//! space. Here a guest's access is [`Guest::access`].

use core::ptr;
use core::sync::atomic::{AtomicU64, Ordering};
use faultless::audit::audit;
use faultless::prefault::Streams;
use faultless::{
    Access, Advice, Backing, CacheMode, Cpu, CpuId, DeviceMemory, FaultError, FrameNumber,
    Invalidate, Machine, MapFlags, MemoryRegion, Object, PAGE_SIZE, PrivateCopies, Prot, Shared,
    Space, SpaceId, Vm,
};
use std::error::Error;

/// Frames of the host: 8 MiB.
const FRAMES: u32 = 2048;
/// Frames of a framebuffer, which lie above and are not the subsystem's.
const FRAMEBUFFER: u32 = 4;
/// Pages of a guest's memory: 1 MiB.
const PAGES: u64 = 256;
const RWX: Prot = Prot::READ.union(Prot::WRITE).union(Prot::EXEC);

/// The bytes of a frame.
#[repr(C, align(4096))]
struct Frame([AtomicU64; PAGE_SIZE as usize / 8]);

struct Host {
    memory: Vec<Frame>,
    regions: [MemoryRegion; 1],
}

impl Host {
    fn new() -> Self {
        let frame = |_| Frame([const { AtomicU64::new(0) }; _]);
        let regions = [MemoryRegion { node: 0, first: FrameNumber(1), frames: FRAMES - 1 }];
        Self { memory: (0..FRAMES + FRAMEBUFFER).map(frame).collect(), regions }
    }
}

// SAFETY: CPUs and regions never change; frames are the elements of a vector, made of atomics,
// without other users. There is one CPU, without a TLB, whose guests' accesses go through
// `Space::walk`.
unsafe impl Machine for Host {
    type Predictor = Streams;

    fn cpus(&self) -> usize {
        1
    }

    fn regions(&self) -> &[MemoryRegion] {
        &self.regions
    }

    /// A guest's physical memory starts at 0.
    fn lowest_address(&self) -> u64 {
        0
    }

    fn frame_bytes(&self, frame: FrameNumber) -> *mut u8 {
        ptr::from_ref(&self.memory[frame.0 as usize]).cast_mut().cast()
    }

    fn invalidate(&self, _: CpuId, _: SpaceId, _: Invalidate) {}

    fn invalidate_all(&self, _: CpuId) {}

    fn interrupt(&self, _: CpuId) {}
}

/// A virtual machine: its memory.
struct Guest {
    memory: Space<Host>,
}

impl Guest {
    /// Creates a guest whose memory is `image`.
    fn boot(cpu: &Cpu<'_, Host>, image: &Shared<Object>) -> Result<Self, faultless::Error> {
        let memory = Space::new(cpu)?;
        let backing = Backing { object: image, first: 0, may_write: true };
        let flags = MapFlags::PRIVATE | MapFlags::FIXED;
        memory.mmap_object(cpu, Some(0), PAGES * PAGE_SIZE, RWX, flags, backing)?;
        Ok(Self { memory })
    }

    /// Runs `program` on a virtual CPU, whose accesses go to this guest's memory.
    fn run<R>(&self, cpu: &Cpu<'_, Host>, program: impl FnOnce(&Self) -> R) -> R {
        self.memory.activate(cpu);
        let result = program(self);
        // SAFETY: the program has ended, and the machine keeps no translations.
        unsafe { self.memory.deactivate(cpu) };
        result
    }

    /// Makes an access of the guest to the word at `addr`. A violation of the nested tables is a
    /// fault of the space.
    fn access<'m>(
        &self,
        cpu: &Cpu<'m, Host>,
        addr: u64,
        access: Access,
    ) -> Result<&'m AtomicU64, FaultError> {
        loop {
            if let Some(to) = self.memory.walk(cpu, addr, access) {
                let frame = &cpu.vm().machine().memory[to.frame.0 as usize];
                return Ok(&frame.0[to.offset / 8]);
            }
            self.memory.fault_remote(cpu, addr, access)?;
        }
    }

    /// Lets the guest's balloon take pages, which the guest does not use in the meantime; the host
    /// gets their frames. If the guest accesses the pages anyway, they show the image again.
    fn balloon(&self, cpu: &Cpu<'_, Host>, first: u64, pages: u64) -> Result<(), faultless::Error> {
        self.memory.madvise(cpu, first * PAGE_SIZE, pages * PAGE_SIZE, Advice::DontNeed)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let vm = Vm::new(Host::new())?;
    // SAFETY: the only handle of CPU 0, used by this thread alone.
    let cpu = unsafe { vm.cpu(CpuId(0)) };

    // The image: the hypervisor maps the object shared, to fill it.
    let image = Object::try_new(&cpu, PAGES, 1)?;
    let loader = Space::new(&cpu)?;
    let backing = Backing { object: &image, first: 0, may_write: true };
    let at = loader.mmap_object(&cpu, None, PAGES * PAGE_SIZE, RWX, MapFlags::SHARED, backing)?;
    for page in 0..32 {
        loader.write_bytes(
            &cpu,
            at + page * PAGE_SIZE,
            format!("page {page} of the image").as_bytes(),
        )?;
    }
    loader.exit(&cpu);
    assert_eq!(image.resident_pages(&cpu), 32);

    let guests = [Guest::boot(&cpu, &image)?, Guest::boot(&cpu, &image)?];
    let frames_of = |guest: &Guest| {
        let own = |page: &u64| {
            let shared = guest.memory.page_at(&cpu, page * PAGE_SIZE);
            shared.is_some_and(|page| page.usage == faultless::FrameUse::Anon)
        };
        (0..PAGES).filter(own).count()
    };

    // Each guest stores to some pages, and has copies of only these pages.
    for (number, guest) in guests.iter().enumerate() {
        guest.run(&cpu, |guest| {
            for page in 0..8 {
                let word = guest.access(&cpu, page * PAGE_SIZE, Access::Write)?;
                word.store(number as u64, Ordering::Relaxed);
                guest.access(&cpu, (page + 16) * PAGE_SIZE, Access::Read)?;
            }
            Ok::<(), FaultError>(())
        })?;
        assert_eq!(frames_of(guest), 8);
    }
    let read = |space: &Space<Host>, page: u64, len: usize| {
        let mut bytes = vec![0; len];
        space.read_bytes(&cpu, page * PAGE_SIZE, &mut bytes).map(|()| bytes)
    };
    assert_eq!(read(&guests[1].memory, 3, 8)?, 1u64.to_ne_bytes());
    assert_eq!(read(&guests[1].memory, 20, 20)?, b"page 20 of the image");

    // A snapshot is a fork. The guest continues, and the snapshot is written out remotely, page by
    // page.
    let snapshot = guests[0].memory.fork(&cpu)?;
    guests[0].memory.write_bytes(&cpu, 0, &77u64.to_ne_bytes())?;
    assert_eq!(read(&snapshot, 0, 8)?, 0u64.to_ne_bytes());
    assert_eq!(read(&guests[0].memory, 0, 8)?, 77u64.to_ne_bytes());
    snapshot.exit(&cpu);

    // A framebuffer above the guest's memory. The guest's drawings are visible there at once.
    let (first, at) = (FrameNumber(FRAMES), PAGES * PAGE_SIZE);
    let device = DeviceMemory { first, cache: CacheMode::WriteCombining, tag: 2, may_write: true };
    let (len, flags) = (u64::from(FRAMEBUFFER) * PAGE_SIZE, MapFlags::SHARED | MapFlags::FIXED);
    let rw = Prot::READ | Prot::WRITE;
    // SAFETY: a virtual CPU's accesses find the frames, which hold numbers, in the host's memory;
    // the frames have no other user.
    unsafe { guests[1].memory.mmap_device(&cpu, at, len, rw, flags, device) }?;
    guests[1].run(&cpu, |guest| {
        let pixels = guest.access(&cpu, at + PAGE_SIZE + 8, Access::Write)?;
        pixels.store(0x00ff_7f00, Ordering::Relaxed);
        Ok::<(), FaultError>(())
    })?;
    assert_eq!(vm.machine().memory[FRAMES as usize + 1].0[1].load(Ordering::Relaxed), 0x00ff_7f00);

    // A network card writes to pages of a guest, which stay in their frames. A snapshot has copies
    // of the pages.
    let pins = guests[1].memory.pin(&cpu, 4 * PAGE_SIZE, 2 * PAGE_SIZE, true)?;
    let snapshot = guests[1].memory.fork(&cpu)?;
    let received = &vm.machine().memory[pins.frames()[1].0 as usize].0[0];
    received.store(88, Ordering::Relaxed);
    assert_eq!(read(&guests[1].memory, 5, 8)?, 88u64.to_ne_bytes());
    assert_eq!(read(&snapshot, 5, 8)?, 1u64.to_ne_bytes());
    snapshot.exit(&cpu);
    drop(pins);

    // The balloon: frames released by the guest are free.
    let free = || {
        cpu.drain();
        vm.free_frames()
    };
    let before = free();
    guests[0].balloon(&cpu, 0, 8)?;
    assert_eq!((free() - before, frames_of(&guests[0])), (8, 0));
    assert_eq!(read(&guests[0].memory, 3, 19)?, b"page 3 of the image");

    // The image is replaced: its pages leave the image and all guests.
    let pages = 16..32;
    image.free_pages(&cpu, pages.clone());
    for guest in &guests {
        guest.memory.revoke(&cpu, &image, pages.clone(), PrivateCopies::Keep);
    }
    assert_eq!(read(&guests[1].memory, 20, 4)?, [0; 4]);

    // A guest, and the image, end when they are dropped, as soon as a CPU has time.
    drop((guests, image));
    assert_ne!(cpu.end_dropped(), 0);
    cpu.drain();
    assert_eq!(audit(&cpu, &[])?.taken(), 1, "the zero page");
    Ok(())
}

#[test]
fn it_runs() {
    main().unwrap();
}
