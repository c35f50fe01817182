//! What a process knows of files: its descriptors, its root and its directory.
//!
//! Each of the two is shared by whoever was cloned so.

use super::device::Device;
use super::file::{File, Kind};
use super::inode::{Body, Inode};
use super::lock;
use super::walk::{Links, Start, walk};
use crate::sync::Mutex;
use crate::syscall::{Errno, Result};
use crate::task::current;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem;
use core::sync::atomic::{AtomicU32, Ordering};
use linux_raw_sys::general as linux;

/// Most descriptors, whatever the limit of the process.
const MOST: usize = 1 << 20;

/// A descriptor.
#[derive(Clone, Debug)]
struct Slot {
    file: Arc<File>,
    close_on_exec: bool,
}

#[derive(Debug, Default)]
struct Table {
    slots: Vec<Option<Slot>>,
    /// No descriptor below it is free.
    full_below: usize,
}

/// Descriptors.
#[derive(Debug, Default)]
struct Descriptors(Mutex<Table>);

impl Table {
    fn get(&self, fd: i32) -> Result<&Slot> {
        let slot = usize::try_from(fd).ok().and_then(|at| self.slots.get(at));
        slot.and_then(Option::as_ref).ok_or(Errno::EBADF)
    }

    fn get_mut(&mut self, fd: i32) -> Result<&mut Slot> {
        let slot = usize::try_from(fd).ok().and_then(|at| self.slots.get_mut(at));
        slot.and_then(Option::as_mut).ok_or(Errno::EBADF)
    }

    fn put(&mut self, at: usize, slot: Slot) -> Result<Option<Slot>> {
        if at >= self.slots.len() {
            if crate::heap::tight() {
                return Err(Errno::ENOMEM);
            }
            self.slots.try_reserve(at + 1 - self.slots.len()).map_err(|_| Errno::ENOMEM)?;
            self.slots.resize(at + 1, None);
        }
        if self.full_below == at {
            self.full_below += 1;
        }
        Ok(self.slots[at].replace(slot))
    }

    fn take(&mut self, at: usize) -> Option<Slot> {
        let slot = self.slots.get_mut(at)?.take();
        if slot.is_some() {
            self.full_below = self.full_below.min(at);
        }
        slot
    }

    fn copy(&self) -> Result<Self> {
        let mut slots = Vec::new();
        slots.try_reserve(self.slots.len()).map_err(|_| Errno::ENOMEM)?;
        slots.extend_from_slice(&self.slots);
        Ok(Self { slots, full_below: self.full_below })
    }
}

/// The root, the directory, and the mask of new files.
#[derive(Debug)]
struct Context {
    start: Mutex<Start>,
    umask: AtomicU32,
}

/// What a process knows of files.
#[derive(Debug)]
pub struct ProcessFiles {
    descriptors: Mutex<Arc<Descriptors>>,
    context: Mutex<Arc<Context>>,
}

impl ProcessFiles {
    /// Those of the first program: the console, and the directory `here`, or the root if it is empty.
    ///
    /// # Errors
    /// `ENOENT` and others of a path that leads nowhere; `ENOTDIR`.
    pub fn first(here: &[u8]) -> Result<Self> {
        let open = |device: Device, flags| {
            let inode = Inode::numbered(1, Body::Device(device), 0o600);
            inode.call(b"dev/console", false);
            let file = File::new(inode, Kind::Stream(device.open()), flags);
            Some(Slot { file, close_on_exec: false })
        };
        let console = open(Device::Console, linux::O_RDWR);
        let complaints = open(Device::Complaints, linux::O_RDWR);
        let slots = Vec::from([console.clone(), console, complaints]);
        let table = Table { full_below: slots.len(), slots };
        let root = super::root().clone();
        let mut start = Start { here: root.clone(), root };
        if !here.is_empty() {
            start.here = walk(&start, here, Links::Follow)?.existing()?;
        }
        if !start.here.is_directory() {
            return Err(Errno::ENOTDIR);
        }
        let context = Context { start: Mutex::new(start), umask: AtomicU32::new(0o022) };
        Ok(Self {
            descriptors: Mutex::new(Arc::new(Descriptors(Mutex::new(table)))),
            context: Mutex::new(Arc::new(context)),
        })
    }

    /// Those of a process that has no program: no descriptors, and the root.
    pub fn none() -> Self {
        let root = super::root().clone();
        let start = Mutex::new(Start { here: root.clone(), root });
        let context = Context { start, umask: AtomicU32::new(0o022) };
        Self { descriptors: Mutex::default(), context: Mutex::new(Arc::new(context)) }
    }

    /// Those of a child, which shares what is to be shared and gets copies of the rest.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn fork(&self, share_descriptors: bool, share_context: bool) -> Result<Self> {
        if crate::heap::low() {
            return Err(Errno::ENOMEM);
        }
        let (descriptors, context) = (self.descriptors(), self.context());
        let descriptors = if share_descriptors { descriptors } else { descriptors.copy()? };
        let context = if share_context { context } else { context.copy() };
        Ok(Self { descriptors: Mutex::new(descriptors), context: Mutex::new(context) })
    }

    /// Shares descriptors, or root and directory, with nobody any more.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn unshare(&self, descriptors: bool, context: bool) -> Result<()> {
        let own = self.fork(!descriptors, !context)?;
        let old = (
            mem::replace(&mut *self.descriptors.lock(), own.descriptors()),
            mem::replace(&mut *self.context.lock(), own.context()),
        );
        drop(old);
        Ok(())
    }

    /// What `execve` does: closes what is marked so, in a table of its own.
    pub fn close_on_exec(&self) {
        if Arc::strong_count(&*self.descriptors.lock()) > 1 && self.unshare(true, false).is_err() {
            // It cannot be told any more: the old program is gone. What it shared stays open.
            return;
        }
        self.descriptors().close(0, usize::MAX, |slot| slot.close_on_exec);
    }

    /// What the end of a process does.
    pub fn close_all(&self) {
        let old = mem::take(&mut *self.descriptors.lock());
        drop(old);
    }

    fn descriptors(&self) -> Arc<Descriptors> {
        self.descriptors.lock().clone()
    }

    fn context(&self) -> Arc<Context> {
        self.context.lock().clone()
    }

    /// The file that `fd` stands for.
    ///
    /// # Errors
    /// `EBADF`.
    pub fn get(&self, fd: i32) -> Result<Arc<File>> {
        let descriptors = self.descriptors.lock();
        let table = descriptors.0.lock();
        Ok(table.get(fd)?.file.clone())
    }

    /// Gives `file` the lowest free descriptor that is not below `least`.
    ///
    /// # Errors
    /// `EMFILE`, `ENOMEM`; `EINVAL`: `least` is beyond the limit.
    pub fn add(&self, file: Arc<File>, close_on_exec: bool, least: usize) -> Result {
        let limit = limit();
        if least >= limit && least != 0 {
            return Err(Errno::EINVAL);
        }
        let descriptors = self.descriptors();
        let mut table = descriptors.0.lock();
        let from = least.max(table.full_below);
        let at = (from..table.slots.len())
            .find(|&at| table.slots[at].is_none())
            .unwrap_or(from.max(table.slots.len()));
        if at >= limit {
            return Err(Errno::EMFILE);
        }
        if from == table.full_below {
            table.full_below = at;
        }
        table.put(at, Slot { file, close_on_exec })?;
        Ok(at as u64)
    }

    /// Makes `fd` stand for `file`, in place of whatever it stood for.
    ///
    /// # Errors
    /// `EBADF`: beyond the limit. `ENOMEM`.
    pub fn set(&self, fd: i32, file: Arc<File>, close_on_exec: bool) -> Result {
        let at = usize::try_from(fd).ok().filter(|&at| at < limit()).ok_or(Errno::EBADF)?;
        let descriptors = self.descriptors();
        let old = descriptors.0.lock().put(at, Slot { file, close_on_exec })?;
        if let Some(old) = old {
            descriptors.closed(old);
        }
        Ok(at as u64)
    }

    /// Closes `fd`.
    ///
    /// # Errors
    /// `EBADF`.
    pub fn close(&self, fd: i32) -> Result<()> {
        let at = usize::try_from(fd).map_err(|_| Errno::EBADF)?;
        let descriptors = self.descriptors();
        let old = descriptors.0.lock().take(at);
        old.map(|old| descriptors.closed(old)).ok_or(Errno::EBADF)
    }

    /// Closes, or with `mark` marks to be closed by `execve`, all from `first` to `last`.
    pub fn close_range(&self, first: usize, last: usize, mark: bool) {
        let descriptors = self.descriptors();
        if !mark {
            return descriptors.close(first, last, |_| true);
        }
        let mut table = descriptors.0.lock();
        let end = table.slots.len().min(last.saturating_add(1));
        let slots = table.slots.get_mut(first..end).unwrap_or_default();
        slots.iter_mut().flatten().for_each(|slot| slot.close_on_exec = true);
    }

    /// Whether `execve` closes `fd`.
    ///
    /// # Errors
    /// `EBADF`.
    pub fn closes_on_exec(&self, fd: i32) -> Result<bool> {
        Ok(self.descriptors().0.lock().get(fd)?.close_on_exec)
    }

    /// Sets whether `execve` closes `fd`.
    ///
    /// # Errors
    /// `EBADF`.
    pub fn set_close_on_exec(&self, fd: i32, close_on_exec: bool) -> Result<()> {
        self.descriptors().0.lock().get_mut(fd)?.close_on_exec = close_on_exec;
        Ok(())
    }

    /// Tells of the descriptors that stand for something, with the table locked.
    ///
    /// # Errors
    /// What `tell` gives.
    pub fn each_open(&self, tell: impl FnMut(i32) -> Result<()>) -> Result<()> {
        let descriptors = self.descriptors();
        let table = descriptors.0.lock();
        let is_open = |at: &usize| table.slots[*at].is_some();
        (0..table.slots.len()).filter(is_open).map(|at| at as i32).try_for_each(tell)
    }

    /// What the descriptors are known by as an owner of [locks](lock).
    pub fn table(&self) -> usize {
        self.descriptors().place()
    }

    /// Whether any descriptor stands for `file`.
    pub fn get_any(&self, file: &Arc<File>) -> bool {
        let descriptors = self.descriptors();
        let table = descriptors.0.lock();
        table.slots.iter().flatten().any(|slot| Arc::ptr_eq(&slot.file, file))
    }

    /// How many of them there are.
    pub fn count(&self) -> usize {
        let descriptors = self.descriptors();
        let table = descriptors.0.lock();
        table.slots.iter().flatten().count()
    }

    /// Where paths start.
    pub fn start(&self) -> Start {
        self.context().start.lock().clone()
    }

    /// Changes where paths start.
    pub fn set_start(&self, change: impl FnOnce(&mut Start)) {
        let context = self.context();
        let mut start = context.start.lock();
        // What it was is dropped after the lock.
        let _old = start.clone();
        change(&mut start);
        drop(start);
    }

    /// The permissions that new files do not get.
    pub fn umask(&self) -> u32 {
        self.context().umask.load(Ordering::Relaxed)
    }

    /// Sets them, and gives the old.
    pub fn set_umask(&self, umask: u32) -> u32 {
        self.context().umask.swap(umask & 0o777, Ordering::Relaxed)
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        lock::table_ended(self.place());
    }
}

impl Descriptors {
    /// What it is known by as an owner of locks.
    fn place(&self) -> usize {
        core::ptr::from_ref(self) as usize
    }

    /// Drops what a descriptor stood for that was taken out, without the table locked.
    fn closed(&self, slot: Slot) {
        lock::closed(self.place(), &slot.file);
        drop(slot);
    }

    /// Closes those from `first` to `last` that are meant. One at a time: files end without the lock, and a
    /// list of them may be larger than the heap.
    fn close(&self, first: usize, last: usize, is_meant: impl Fn(&Slot) -> bool) {
        let mut from = first;
        loop {
            let taken = {
                let mut table = self.0.lock();
                let end = table.slots.len().min(last.saturating_add(1));
                let is_meant = |at: &usize| table.slots[*at].as_ref().is_some_and(&is_meant);
                let Some(at) = (from..end).find(is_meant) else { return };
                from = at + 1;
                table.take(at)
            };
            if let Some(taken) = taken {
                self.closed(taken);
            }
        }
    }

    fn copy(&self) -> Result<Arc<Self>> {
        Ok(Arc::new(Self(Mutex::new(self.0.lock().copy()?))))
    }
}

impl Context {
    fn copy(&self) -> Arc<Self> {
        let start = Mutex::new(self.start.lock().clone());
        Arc::new(Self { start, umask: AtomicU32::new(self.umask.load(Ordering::Relaxed)) })
    }
}

/// How many descriptors the running thread's process may have.
fn limit() -> usize {
    let limit = current().process.limits.lock()[linux::RLIMIT_NOFILE as usize][0];
    usize::try_from(limit).unwrap_or(MOST).min(MOST)
}
