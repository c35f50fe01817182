//! A machine of one CPU without a TLB, and the visible state of its spaces and objects.

use faultless::audit::audit_with;
use faultless::{
    Access, Backing, Cpu, CpuId, FaultError, FrameNumber, Invalidate, Machine, MapFlags,
    MemoryRegion, Object, PAGE_SIZE, Prot, Shared, Space, SpaceId, Vm,
};
use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) const P: u64 = PAGE_SIZE;
/// The address of the calls; a table's range ends 20 pages above.
pub(crate) const AT: u64 = (1 << 30) - 20 * P;
pub(crate) const RW: Prot = Prot::READ.union(Prot::WRITE);
pub(crate) const PRIVATE: MapFlags =
    MapFlags::PRIVATE.union(MapFlags::ANONYMOUS).union(MapFlags::FIXED);
pub(crate) const SHARED: MapFlags =
    MapFlags::SHARED.union(MapFlags::ANONYMOUS).union(MapFlags::FIXED);

pub(crate) type TestVm = Vm<Small>;
pub(crate) type TestCpu<'v> = Cpu<'v, Small>;
pub(crate) type TestSpace = Space<Small>;

/// The machine.
pub(crate) struct Small {
    memory: *mut u8,
    layout: Layout,
    regions: [MemoryRegion; 1],
}

impl Small {
    pub(crate) fn new(frames: u32) -> Self {
        let layout = Layout::from_size_align((u64::from(frames) * P) as usize, P as usize).unwrap();
        // SAFETY: the layout is not of size 0.
        let memory = unsafe { alloc(layout) };
        assert!(!memory.is_null());
        let first = FrameNumber(1);
        Self { memory, layout, regions: [MemoryRegion { node: 0, first, frames: frames - 1 }] }
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout; the subsystem above is gone.
        unsafe { dealloc(self.memory, self.layout) };
    }
}

// SAFETY: the memory is reached through raw pointers only, under `Machine`'s contract.
unsafe impl Send for Small {}
// SAFETY: as above.
unsafe impl Sync for Small {}
// SAFETY: a page of memory for each frame of the one region; there is no TLB and no other CPU.
unsafe impl Machine for Small {
    type Predictor = faultless::prefault::Streams;

    fn cpus(&self) -> usize {
        1
    }

    fn regions(&self) -> &[MemoryRegion] {
        &self.regions
    }

    fn frame_bytes(&self, frame: FrameNumber) -> *mut u8 {
        self.memory.wrapping_add(frame.0 as usize * P as usize)
    }

    fn invalidate(&self, _: CpuId, _: SpaceId, _: Invalidate) {}

    fn invalidate_all(&self, _: CpuId) {}

    fn interrupt(&self, _: CpuId) {}
}

/// All there is above a machine.
pub(crate) struct World {
    pub(crate) spaces: Vec<TestSpace>,
    pub(crate) objects: Vec<Shared<Object>>,
}

/// The state of a page: the entry's flags, the frame, and the first and last word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Page {
    flags: u64,
    frame: u64,
    first: u64,
    last: u64,
}

/// The complete visible state of a world.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sight {
    spaces: Vec<SpaceSight>,
    objects: Vec<(u64, Vec<Option<u64>>)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct SpaceSight {
    maps: String,
    flags: Vec<String>,
    heap: (u64, u64),
    resident: u64,
    mapped: u64,
    pages: BTreeMap<u64, Page>,
}

impl Sight {
    /// Removes the frame numbers, which differ between runs.
    pub(crate) fn anywhere(mut self) -> Self {
        for space in &mut self.spaces {
            space.pages.values_mut().for_each(|page| page.frame = 0);
        }
        self
    }

    /// Removes the write permission and the dirty bit, which a fault restores.
    pub(crate) fn read_only(mut self) -> Self {
        for space in &mut self.spaces {
            space.pages.values_mut().for_each(|page| page.flags &= !0x42);
        }
        self
    }

    /// Removes file pages that were read since `before`. These pages show the store's contents:
    /// page `n` starts with `n + 1`.
    pub(crate) fn but_read(mut self, before: &Self) -> Self {
        for (object, old) in self.objects.iter_mut().zip(&before.objects) {
            for ((number, page), then) in (1..).zip(&mut object.1).zip(&old.1) {
                if then.is_none() && *page == Some(number) {
                    *page = None;
                }
            }
        }
        self
    }

    /// Keeps only pages already mapped in `before`.
    pub(crate) fn within(mut self, before: &Self) -> Self {
        for (space, old) in self.spaces.iter_mut().zip(&before.spaces) {
            let (now, then) = (space.pages.len() as u64, old.pages.len() as u64);
            space.pages.retain(|addr, _| old.pages.contains_key(addr));
            assert_eq!(space.pages.len() as u64, then, "pages are missing");
            assert!(space.resident <= old.resident + (now - then));
            space.resident = old.resident;
        }
        for (object, old) in self.objects.iter_mut().zip(&before.objects) {
            // A created page contains zeros.
            for (page, then) in object.1.iter_mut().zip(&old.1) {
                if then.is_none() && *page == Some(0) {
                    *page = None;
                }
            }
        }
        self
    }
}

impl Sight {
    /// Keeps the pages of `before`'s map, and ignores the map itself.
    pub(crate) fn pages_of(mut self, before: &Self) -> Self {
        for (space, old) in self.spaces.iter_mut().zip(&before.spaces) {
            (space.maps, space.flags) = (old.maps.clone(), old.flags.clone());
            space.mapped = old.mapped;
        }
        self
    }
}

/// Calls `tell` with each entry of `table`, of `level` (4 the root, 1 the last), that maps a page.
fn each_page(
    vm: &TestVm,
    table: FrameNumber,
    level: u32,
    base: u64,
    tell: &mut impl FnMut(u64, u64),
) {
    let entries = if level == 4 { 256 } else { 512 };
    for at in 0..entries {
        // SAFETY: a table of the subsystem, at a quiet moment; its entries are changed atomically.
        let entry = unsafe { &*vm.machine().frame_bytes(table).cast::<AtomicU64>().add(at) };
        let entry = entry.load(Ordering::Acquire);
        let addr = base + ((at as u64) << (12 + 9 * (level - 1)));
        if entry == 0 {
            continue;
        }
        if level == 1 {
            tell(addr, entry);
        } else {
            each_page(vm, FrameNumber((entry >> 12) as u32), level - 1, addr, tell);
        }
    }
}

impl World {
    /// Returns the present state.
    pub(crate) fn sight(&self, cpu: &TestCpu<'_>) -> Sight {
        let vm = cpu.vm();
        // The accessed and aged bits, which reclaim changes when it scans for private pages to swap
        // out.
        let age = if cpu.swap_usage().0 != 0 { 1 << 5 | 1 << 52 } else { 0 };
        let spaces = self.spaces.iter().map(|space| {
            let mut flags = Vec::new();
            space.areas(cpu, |area| flags.push(format!("{:?} {:?}", area.range, area.flags)));
            let mut pages = BTreeMap::new();
            each_page(vm, space.root(), 4, 0, &mut |addr, entry| {
                const FRAME: u64 = ((1 << 40) - 1) << 12;
                const SWAPPED: u64 = 1 << 8;
                if entry & (SWAPPED | 1) == SWAPPED {
                    // The slot number differs between runs.
                    let page = Page { flags: SWAPPED, frame: 0, first: 0, last: 0 };
                    pages.insert(addr, page);
                    return;
                }
                let frame = (entry & FRAME) >> 12;
                let bytes = vm.machine().frame_bytes(FrameNumber(frame as u32)).cast::<u64>();
                // SAFETY: the frame is mapped, and no other CPU stores to the page.
                let (first, last) = unsafe { (bytes.read(), bytes.add(511).read()) };
                pages.insert(addr, Page { flags: entry & !FRAME & !age, frame, first, last });
            });
            let heap = space.heap_range();
            SpaceSight {
                maps: space.maps(cpu).to_string(),
                flags,
                heap: (heap.start, heap.end),
                resident: space.resident_pages(cpu),
                mapped: space.mapped_pages(cpu),
                pages,
            }
        });
        let spaces = spaces.collect();
        let objects = self.objects.iter().map(|object| {
            // SAFETY: the bytes of a page, aligned.
            let word = |at: *const u8| unsafe { at.cast::<u64>().read() };
            // Absent pages are not read from the store.
            let page = |index| {
                let there = object.has_page(cpu, index);
                there.then(|| object.read_page(cpu, index, |at| at.map(word)).unwrap()).flatten()
            };
            (object.pages(), (0..object.pages().min(64)).map(page).collect())
        });
        Sight { spaces, objects: objects.collect() }
    }

    /// Law 6.
    pub(crate) fn audit(&self, cpu: &TestCpu<'_>) {
        let spaces: Vec<_> = self.spaces.iter().collect();
        let objects: Vec<_> = self.objects.iter().collect();
        audit_with(cpu, &spaces, &objects).unwrap_or_else(|error| panic!("{error}"));
    }

    /// Ends everything.
    pub(crate) fn end(self, cpu: &TestCpu<'_>) {
        self.spaces.into_iter().for_each(|space| space.exit(cpu));
        self.objects.into_iter().for_each(|object| Object::release(object, cpu));
    }

    /// Maps pages `first..first + pages` from [`AT`] on.
    pub(crate) fn map(
        &self,
        cpu: &TestCpu<'_>,
        first: u64,
        pages: u64,
        prot: Prot,
        flags: MapFlags,
    ) {
        let at = AT + first * P;
        assert_eq!(self.spaces[0].mmap(cpu, at, pages * P, prot, flags), Ok(at));
    }

    /// Maps pages of the first object.
    pub(crate) fn map_object(
        &self,
        cpu: &TestCpu<'_>,
        first: u64,
        pages: u64,
        flags: MapFlags,
        from: u64,
    ) {
        let backing = Backing { object: &self.objects[0], first: from, may_write: true };
        let at = AT + first * P;
        let got = self.spaces[0].mmap_object(cpu, at, pages * P, RW, flags, backing);
        assert_eq!(got, Ok(at));
    }

    /// Stores `value` to the first word of a page.
    pub(crate) fn store(&self, cpu: &TestCpu<'_>, page: u64, value: u64) {
        store(cpu, &self.spaces[0], AT + page * P, value).unwrap();
    }
}

/// Stores as an MMU without a TLB does.
pub(crate) fn store(
    cpu: &TestCpu<'_>,
    space: &TestSpace,
    addr: u64,
    value: u64,
) -> Result<(), FaultError> {
    loop {
        let mut entry = u64::from(space.root().0) << 12 | 3;
        for level in (0..4).rev() {
            if entry & 3 == 3 {
                let table = cpu.vm().machine().frame_bytes(FrameNumber((entry >> 12) as u32));
                let at = (addr >> (12 + 9 * level)) as usize % 512;
                // SAFETY: a table of the subsystem; its entries are changed atomically.
                entry = unsafe { &*table.cast::<AtomicU64>().add(at) }.load(Ordering::Acquire);
            }
        }
        // Present and writable.
        if entry & 3 == 3 {
            let frame = FrameNumber((entry >> 12) as u32);
            // SAFETY: a page to which the program may store.
            unsafe { cpu.vm().machine().frame_bytes(frame).cast::<u64>().write(value) };
            return Ok(());
        }
        space.fault_remote(cpu, addr, Access::Write)?;
    }
}
