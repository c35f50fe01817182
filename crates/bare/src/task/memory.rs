//! The memory of a process: its address space, and what the kernel remembers about its contents.
//!
//! Shared by the threads of a process, and by a child of `vfork` until it calls `execve`.
//!
//! *Who has pages of a file.* Whoever takes pages out of a file takes them out of every memory ([`revoke`]): so every
//! memory is listed before a file is mapped in it, whether a process has it yet or not. A copy of a memory
//! has the mappings from its beginning, but is listed at its end; so while pages are taken out none is
//! being made.

use crate::machine::Bare;
use crate::percpu;
use crate::sync::Mutex;
use crate::syscall::Result;
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;
use core::mem::ManuallyDrop;
use core::ops::Range;
use faultless::file::Object;
use faultless::heap::Shared;
use faultless::sync::rwlock::RwLock;
use faultless::{Copies, Space, VirtRange};

/// Every memory there is, by the number of its space.
static ALL: Mutex<BTreeMap<u64, Weak<Memory>>> = Mutex::new(BTreeMap::new());
/// Inside are those who copy a memory and list the copy, or, alone, who takes pages of a file out of all of
/// them, who holds the lock of that file. Outside of the locks of the subsystem, and of that of the list.
static COPYING: RwLock = RwLock::new();

/// Every memory there is.
pub fn all() -> Vec<Arc<Memory>> {
    ALL.lock().values().filter_map(Weak::upgrade).collect()
}

/// Takes the pages of `object` with the numbers `pages`, which have left it, out of every memory, and
/// treats their private copies as `copies` says. The caller keeps the object from getting pages there
/// meanwhile: a program may store to a private mapping of them at once, and that must not be lost.
pub fn revoke(object: &Shared<Object>, pages: Range<u64>, copies: Copies) {
    let _alone = COPYING.write(percpu::cpu());
    for memory in all() {
        memory.space().revoke(percpu::cpu(), object, pages.clone(), copies);
    }
}

/// What `/proc/self` tells about the program in a space.
#[derive(Clone, Debug, Default)]
pub struct Image {
    /// The path of the program.
    pub path: String,
    /// Where its arguments lie in its memory.
    pub arguments: Option<VirtRange>,
    /// Where its environment lies in its memory.
    pub environment: Option<VirtRange>,
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
        Ok(Self::around(empty()?, Image::default()))
    }

    /// A copy, as `fork` makes it.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_fork(&self) -> Result<Arc<Self>> {
        let image = self.image.lock().clone();
        let _copying = COPYING.read(percpu::cpu());
        Ok(Self::around(copy(self.space())?, image))
    }

    fn around(space: Box<Space<Bare>>, image: Image) -> Arc<Self> {
        crate::machine::adopt(&space);
        let number = space.id().0;
        let memory = Arc::new(Self { space: ManuallyDrop::new(space), image: Mutex::new(image) });
        ALL.lock().insert(number, Arc::downgrade(&memory));
        memory
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
    Ok(Box::new(Space::new(percpu::cpu())?))
}

#[inline(never)]
fn copy(space: &Space<Bare>) -> Result<Box<Space<Bare>>> {
    let child = Box::new(space.fork(percpu::cpu())?);
    // Every page is shared from now on: what comes is copies.
    crate::task::current().streams.reset();
    Ok(child)
}

impl Drop for Memory {
    fn drop(&mut self) {
        ALL.lock().remove(&self.space.id().0);
        // SAFETY: not used again: this is the end of its owner.
        let space = unsafe { ManuallyDrop::take(&mut self.space) };
        space.exit(percpu::cpu());
    }
}
