//! The memory of a process: its address space, and what the kernel remembers about its contents.
//!
//! Shared by the threads of a process, and by a child of `vfork` until it calls `execve`.
//!
//! *Who has pages of a file.* Whoever takes pages out of a file takes them out of every memory ([`revoke`]): so every
//! memory is listed before a file is mapped in it, whether a process has it yet or not. A copy of a memory
//! has the mappings from its beginning, but is listed at its end; so while pages are taken out none is
//! being made.

use crate::errno::Result;
use alloc::boxed::Box;
use core::mem::{ManuallyDrop, MaybeUninit};
use core::ops::Range;
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};
use faultless::Object;
use faultless::locks::RwLock;
use faultless::{Copies, Space, VirtRange};
use faultless::{Shared, try_box_with};
use faultless_bare::machine::Bare;
use faultless_bare::percpu;
use faultless_bare::sync::Mutex;
use faultless_collections::{Arc, Map, Slot, String, Weak};

/// Every memory there is, by the number of its space.
static ALL: Mutex<Map<u64, Weak<Memory>>> = Mutex::new(Map::new());
/// Inside are those who copy a memory and list the copy, or, alone, who takes pages of a file out of all of
/// them, who holds the lock of that file. Outside of the locks of the subsystem, and of that of the list.
static COPYING: RwLock = RwLock::new();

/// Shows every memory there is, until `show` says no. Needs no memory itself.
pub fn each(mut show: impl FnMut(&Memory) -> bool) {
    let mut last = None;
    loop {
        let next = {
            let all = ALL.lock();
            let Some((&number, memory)) = all.after(last.as_ref()) else { return };
            last = Some(number);
            memory.upgrade()
        };
        // Dropped without the lock, as it may be the last share.
        if next.is_some_and(|next| !show(&next)) {
            return;
        }
    }
}

/// Takes the pages of `object` with the numbers `pages`, which have left it, out of every memory, and
/// treats their private copies as `copies` says. The caller keeps the object from getting pages there
/// meanwhile: a program may store to a private mapping of them at once, and that must not be lost.
pub fn revoke(object: &Shared<Object>, pages: Range<u64>, copies: Copies) {
    let _alone = COPYING.write(percpu::cpu());
    each(|memory| {
        memory.space().revoke(percpu::cpu(), object, pages.clone(), copies);
        true
    });
}

/// What `/proc/self` tells about the program in a space.
#[derive(Debug, Default)]
pub struct Image {
    /// The path of the program.
    pub path: String,
    /// Where its arguments lie in its memory.
    pub arguments: Option<VirtRange>,
    /// Where its environment lies in its memory.
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
    /// Not in place: it is large, and kernel stacks are small.
    space: ManuallyDrop<Box<Space<Bare>>>,
    /// The program.
    pub image: Mutex<Image>,
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
        let memory = Arc::try_new(Self { space, image: Mutex::new(image) })?;
        ALL.lock().insert(slot, number, Arc::downgrade(&memory));
        Ok(memory)
    }

    /// The space.
    #[inline]
    pub fn space(&self) -> &Space<Bare> {
        &self.space
    }
}

// What these two need of the stack they need alone.

#[inline(never)]
fn empty() -> Result<Box<Space<Bare>>> {
    // A space ends only in `exit`: so the room is there before it.
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
        ALL.lock().remove(&self.space.id().0);
        // SAFETY: not used again: this is the end of its owner.
        let space = unsafe { ManuallyDrop::take(&mut self.space) };
        space.exit(percpu::cpu());
    }
}

/// The memory that a process has at the time.
pub struct OwnMemory {
    memory: Mutex<Option<Arc<Memory>>>,
    /// The space in `memory`, for the scheduler; null where there is none.
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

    /// Gives it other memory, or none at its end, and returns the old. Called by its only thread, which
    /// then runs in the new memory ([`scheduler::run_memory`](super::scheduler::run_memory)) before it drops the old.
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
