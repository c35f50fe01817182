//! The memory of a process: its address space, and what the kernel remembers about its contents.
//!
//! Shared by the threads of a process, and by a child of `vfork` until it calls `execve`.

use crate::machine::Bare;
use crate::percpu;
use crate::sync::Mutex;
use crate::syscall::Result;
use alloc::boxed::Box;
use alloc::string::String;
use alloc::sync::Arc;
use core::mem::ManuallyDrop;
use faultless::{Space, VirtRange};

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
        Ok(Self::around(copy(self.space())?, self.image.lock().clone()))
    }

    fn around(space: Box<Space<Bare>>, image: Image) -> Arc<Self> {
        crate::machine::adopt(&space);
        Arc::new(Self { space: ManuallyDrop::new(space), image: Mutex::new(image) })
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
    Ok(Box::new(space.fork(percpu::cpu())?))
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: not used again: this is the end of its owner.
        let space = unsafe { ManuallyDrop::take(&mut self.space) };
        space.exit(percpu::cpu());
    }
}
