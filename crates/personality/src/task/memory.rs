//! The memory of a process: its address space, and the kernel's data about its program.
//!
//! Threads of a process share the memory, and so does a child of `vfork` until it calls `execve`.
//!
//! *Revocation.* Pages that leave a file are removed from every memory ([`revoke`]). So every
//! memory is in the list before a file is mapped in it, even if no process uses the memory yet. A
//! copy of a memory has its mappings from the start, but is listed only after its completion; so no
//! copy is made during a revocation.

use crate::errno::Result;
use alloc::boxed::Box;
use core::mem::{ManuallyDrop, MaybeUninit};
use core::ops::Range;
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use faultless::Object;
use faultless::locks::{ReadGuard, RwLock};
use faultless::{PrivateCopies, Space, VirtRange, VmaFlags};
use faultless::{Shared, try_box_with};
use faultless_bare::machine::Bare;
use faultless_bare::percpu;
use faultless_bare::sync::Mutex;
use faultless_collections::{Arc, Map, Slot, String, Weak};

/// All memories, by the number of their space.
static ALL: Mutex<Map<u64, Weak<Memory>>> = Mutex::new(Map::new());
/// Held shared to copy a memory and list the copy, and to make a mapping from another mapping. Held
/// exclusively, inside the lock of a file, to remove pages of this file from all memories, and to
/// look for mappings that may store to the file. Taken before the locks of the subsystem, and the
/// lock of the list.
static COPYING: RwLock = RwLock::new();

/// The function called for each freed memory, with its number.
static WATCHER: Mutex<fn(u64)> = Mutex::new(|_| {});

/// Sets the function called for each freed memory, with its number.
pub fn watch(tell: fn(u64)) {
    *WATCHER.lock() = tell;
}

/// Calls `show` for each memory, until `show` returns false. Allocates no memory.
pub fn each(mut show: impl FnMut(&Memory) -> bool) {
    let mut last = None;
    loop {
        let next = {
            let all = ALL.lock();
            let Some((&number, memory)) = all.after(last.as_ref()) else { return };
            last = Some(number);
            memory.upgrade()
        };
        // Dropped without the lock, because the reference may be the last one.
        if next.is_some_and(|next| !show(&next)) {
            return;
        }
    }
}

/// Removes the pages of `object` with the numbers `pages`, which have left the object, from every
/// memory, and keeps or drops private copies by `copies`. The caller ensures that the object gets
/// no pages in this range during the call: a program could store to a private mapping of these
/// pages at once, and this store must not be lost.
pub fn revoke(object: &Shared<Object>, pages: Range<u64>, copies: PrivateCopies) {
    let _alone = COPYING.write(percpu::cpu());
    each(|memory| {
        memory.space().revoke(percpu::cpu(), object, pages.clone(), copies);
        true
    });
}

/// Prevents [`may_store_to`] while the result exists: for a call that makes a new mapping of an
/// object from another mapping.
///
/// *Order of locks.* The caller holds no lock of a file, and takes none while the result exists:
/// [`may_store_to`] and [`revoke`] wait for this lock inside the lock of a file. `mremap` and
/// `remap_file_pages` hold this lock during a call of the subsystem, which takes its own locks
/// inside.
pub fn keep_stores() -> ReadGuard<'static> {
    COPYING.read(percpu::cpu())
}

/// Returns whether a mapping may store to `object`. No copy of a memory or of a mapping is made
/// during the call.
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
    /// The addresses of the arguments.
    pub arguments: Option<VirtRange>,
    /// The addresses of the environment.
    pub environment: Option<VirtRange>,
}

impl Image {
    fn try_clone(&self) -> Result<Self> {
        Ok(Self { path: self.path.try_clone()?, ..*self })
    }
}

/// An address space with a program.
#[derive(Debug)]
pub struct Memory {
    /// Boxed, because spaces are large, and kernel stacks are small. Taken by the drop.
    space: ManuallyDrop<Box<Space<Bare>>>,
    /// The program.
    pub image: Mutex<Image>,
    /// The peaks of mapped and resident pages, at the last update.
    peaks: [AtomicU64; 2],
}

/// A field whose drop ends the dropped spaces and objects. A structure with this field below a
/// space or an object so frees the frames at once.
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

    /// Makes a copy, as `fork` requires.
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

    /// Updates the peaks of mapped and resident pages: before pages are removed, and periodically.
    /// Returns the peaks.
    pub fn note_peaks(&self) -> [u64; 2] {
        let cpu = percpu::cpu();
        let now = [self.space.mapped_pages(cpu), self.space.resident_pages(cpu)];
        let mut peaks = now;
        for (peak, most) in peaks.iter_mut().zip(&self.peaks) {
            *peak = most.fetch_max(*peak, Ordering::Relaxed).max(*peak);
        }
        peaks
    }

    /// Returns the number of page tables: the minimum for the mapped pages.
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
        // By this CPU, not by another that ends dropped spaces: the frames are free when this
        // returns.
        space.exit(percpu::cpu());
        let tell = *WATCHER.lock();
        tell(number);
    }
}

/// The present memory of a process.
pub struct OwnMemory {
    memory: Mutex<Option<Arc<Memory>>>,
    /// The space in `memory`, for the scheduler; null without a memory.
    space: AtomicPtr<Space<Bare>>,
}

impl OwnMemory {
    /// Returns a cell with `memory`, which may be `None`.
    pub fn new(memory: Option<Arc<Memory>>) -> Self {
        let space = space_of(memory.as_ref());
        Self { memory: Mutex::new(memory), space: AtomicPtr::new(space.cast_mut()) }
    }

    /// Returns the memory; `None` after the end of the process, and in process 1.
    pub fn get(&self) -> Option<Arc<Memory>> {
        self.memory.lock().clone()
    }

    /// Replaces the memory, by `None` at the end of the process, and returns the old memory. Called
    /// by the only thread, which runs the new memory
    /// ([`scheduler::run_memory`](super::scheduler::run_memory)) before it drops the old.
    #[must_use = "the caller must drop the old memory after all CPUs have left it"]
    pub fn replace(&self, new: Option<Arc<Memory>>) -> Option<Arc<Memory>> {
        let mut memory = self.memory.lock();
        self.space.store(space_of(new.as_ref()).cast_mut(), Ordering::Release);
        core::mem::replace(&mut *memory, new)
    }

    /// Returns the space, null after the end of the process.
    pub(super) fn space(&self) -> *const Space<Bare> {
        self.space.load(Ordering::Acquire)
    }
}

/// Returns the space in `memory`, null without a memory.
fn space_of(memory: Option<&Arc<Memory>>) -> *const Space<Bare> {
    memory.map_or(ptr::null(), |memory| ptr::from_ref(memory.space()))
}
