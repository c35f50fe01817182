//! The memory of a process: its address space, and what the kernel knows about the program in it.
//!
//! Threads of a process share it, and so does a child of `vfork` until it calls `execve`.
//!
//! *Revocation.* Pages that leave a file are taken out of every memory ([`revoke`]). So every
//! memory is in the list before a file is mapped in it, whether a process uses it yet or not. A copy of a memory
//! has its mappings from the start, but is listed only when it is complete; so no copy is made
//! while pages are taken out.

use crate::errno::Result;
use alloc::boxed::Box;
use core::mem::{ManuallyDrop, MaybeUninit};
use core::ops::Range;
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use faultless::Object;
use faultless::locks::RwLock;
use faultless::{Copies, Space, VirtRange, VmaFlags};
use faultless::{Shared, try_box_with};
use faultless_bare::machine::Bare;
use faultless_bare::percpu;
use faultless_bare::sync::Mutex;
use faultless_collections::{Arc, Map, Slot, String, Weak};

/// All memories, by the number of their space.
static ALL: Mutex<Map<u64, Weak<Memory>>> = Mutex::new(Map::new());
/// Held shared to copy a memory and list the copy; held exclusively, inside the lock of a file, to take pages of that file
/// out of all of them. Taken before the locks of the subsystem, and that of the list.
static COPYING: RwLock = RwLock::new();

/// Who is told of each memory that is free, by its number.
static WATCHER: Mutex<fn(u64)> = Mutex::new(|_| {});

/// From now on `tell` is called with the number of each memory that is free.
pub fn watch(tell: fn(u64)) {
    *WATCHER.lock() = tell;
}

/// Calls `show` for each memory, until it returns false. Allocates nothing.
pub fn each(mut show: impl FnMut(&Memory) -> bool) {
    let mut last = None;
    loop {
        let next = {
            let all = ALL.lock();
            let Some((&number, memory)) = all.after(last.as_ref()) else { return };
            last = Some(number);
            memory.upgrade()
        };
        // Dropped without the lock: it may be the last reference.
        if next.is_some_and(|next| !show(&next)) {
            return;
        }
    }
}

/// Takes the pages of `object` with the numbers `pages`, which have left it, out of every memory, and
/// keeps or drops their private copies by `copies`. The caller ensures that the object gets no pages there
/// meanwhile: a program could store to a private mapping of them at once, and that store must not be lost.
pub fn revoke(object: &Shared<Object>, pages: Range<u64>, copies: Copies) {
    let _alone = COPYING.write(percpu::cpu());
    each(|memory| {
        memory.space().revoke(percpu::cpu(), object, pages.clone(), copies);
        true
    });
}

/// Whether a mapping may store to `object`. No copy of a memory is made meanwhile.
pub fn may_store_to(object: &Shared<Object>) -> bool {
    let _alone = COPYING.write(percpu::cpu());
    let mut found = false;
    each(|memory| {
        memory.space().each_area(percpu::cpu(), VirtRange::USER, |area| {
            let maps = area.memory.object().is_some_and(|mapped| mapped.id() == object.id());
            let flags = area.flags;
            found |= maps && flags.contains(VmaFlags::SHARED) && !flags.contains(VmaFlags::NOWRITE);
            !found
        });
        !found
    });
    found
}

/// The program in a space, for `/proc/self`.
#[derive(Debug, Default)]
pub struct Image {
    /// The path of the program.
    pub path: String,
    /// The addresses of its arguments.
    pub arguments: Option<VirtRange>,
    /// The addresses of its environment.
    pub environment: Option<VirtRange>,
}

impl Image {
    fn try_clone(&self) -> Result<Self> {
        Ok(Self { path: self.path.try_clone()?, ..*self })
    }
}

/// An address space with a program in it.
#[derive(Debug)]
pub struct Memory {
    /// Boxed: it is large, and kernel stacks are small. Taken by the drop.
    space: ManuallyDrop<Box<Space<Bare>>>,
    /// The program.
    pub image: Mutex<Image>,
    /// The most pages that were mapped, and that were resident, when that was last noted.
    peaks: [AtomicU64; 2],
}

/// Its drop ends the spaces and objects that were dropped. A structure that has it below a space or object so gives the
/// frames back at once.
#[derive(Debug)]
pub struct EndsDropped;

impl Drop for EndsDropped {
    fn drop(&mut self) {
        percpu::cpu().end_dropped();
    }
}

impl Memory {
    /// An empty space.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_new() -> Result<Arc<Self>> {
        let slot = Slot::try_new()?;
        Self::around(empty()?, Image::default(), slot)
    }

    /// A copy, as `fork` makes it.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_fork(&self) -> Result<Arc<Self>> {
        let image = self.image.lock().try_clone()?;
        let slot = Slot::try_new()?;
        let _copying = COPYING.read(percpu::cpu());
        Self::around(copy(self.space())?, image, slot)
    }

    fn around(
        space: Box<Space<Bare>>,
        image: Image,
        slot: Slot<u64, Weak<Self>>,
    ) -> Result<Arc<Self>> {
        faultless_bare::machine::adopt(&space);
        let number = space.id().0;
        let space = ManuallyDrop::new(space);
        let memory =
            Arc::try_new(Self { space, image: Mutex::new(image), peaks: Default::default() })?;
        ALL.lock().insert(slot, number, Arc::downgrade(&memory));
        Ok(memory)
    }

    /// The space.
    #[inline]
    pub fn space(&self) -> &Space<Bare> {
        &self.space
    }

    /// Notes the mapped and resident pages if there were never more: before some are taken away,
    /// and now and then. Returns the most pages that were mapped and resident.
    pub fn note_peaks(&self) -> [u64; 2] {
        let cpu = percpu::cpu();
        let now = [self.space.mapped_pages(cpu), self.space.resident_pages(cpu)];
        let mut peaks = now;
        for (peak, most) in peaks.iter_mut().zip(&self.peaks) {
            *peak = most.fetch_max(*peak, Ordering::Relaxed).max(*peak);
        }
        peaks
    }

    /// Its page tables: the least number that the mapped pages need.
    pub fn table_pages(&self) -> u64 {
        let mut tables = 1;
        let mut last = [u64::MAX; 3];
        self.space.areas(percpu::cpu(), |area| {
            for (last, shift) in last.iter_mut().zip([21, 30, 39]) {
                let (first, end) = (area.range.start >> shift, (area.range.end - 1) >> shift);
                if area.resident + area.zero != 0 {
                    let used = area.resident + area.zero;
                    tables += (end - first + u64::from(first != *last)).min(used);
                    *last = end;
                }
            }
        });
        tables
    }
}

// Not inlined: both need much of the stack.

#[inline(never)]
fn empty() -> Result<Box<Space<Bare>>> {
    let room = try_box_with(MaybeUninit::uninit)?;
    Ok(Box::write(room, Space::new(percpu::cpu())?))
}

#[inline(never)]
fn copy(space: &Space<Bare>) -> Result<Box<Space<Bare>>> {
    let room = try_box_with(MaybeUninit::uninit)?;
    Ok(Box::write(room, space.fork(percpu::cpu())?))
}

impl Drop for Memory {
    fn drop(&mut self) {
        let number = self.space.id().0;
        ALL.lock().remove(&number);
        // SAFETY: taken once, here, and not used afterwards.
        let space = unsafe { ManuallyDrop::take(&mut self.space) };
        // By this CPU, not by another that ends what was dropped: the frames are free when this returns.
        space.exit(percpu::cpu());
        let tell = *WATCHER.lock();
        tell(number);
    }
}

/// The present memory of a process.
pub struct OwnMemory {
    memory: Mutex<Option<Arc<Memory>>>,
    /// The space in `memory`, for the scheduler; null if there is none.
    space: AtomicPtr<Space<Bare>>,
}

impl OwnMemory {
    /// `memory`, or none.
    pub fn new(memory: Option<Arc<Memory>>) -> Self {
        let space = space_of(memory.as_ref());
        Self { memory: Mutex::new(memory), space: AtomicPtr::new(space.cast_mut()) }
    }

    /// The memory; none once the process has ended, or in process 1.
    pub fn get(&self) -> Option<Arc<Memory>> {
        self.memory.lock().clone()
    }

    /// Replaces the memory, by none at the end, and returns the old. Called by the only thread, which
    /// runs the new memory ([`scheduler::run_memory`](super::scheduler::run_memory)) before it drops the old.
    #[must_use = "the old memory may be dropped only when no CPU runs it"]
    pub fn replace(&self, new: Option<Arc<Memory>>) -> Option<Arc<Memory>> {
        let mut memory = self.memory.lock();
        self.space.store(space_of(new.as_ref()).cast_mut(), Ordering::Release);
        core::mem::replace(&mut *memory, new)
    }

    /// The space in it, null once the process has ended.
    pub(super) fn space(&self) -> *const Space<Bare> {
        self.space.load(Ordering::Acquire)
    }
}

/// The space in `memory`, null without one.
fn space_of(memory: Option<&Arc<Memory>>) -> *const Space<Bare> {
    memory.map_or(ptr::null(), |memory| ptr::from_ref(memory.space()))
}
