//! The file state of a process: descriptors, root and working directory.
//!
//! Descriptors, and root with working directory, may each be shared by `clone`.

use super::device::Device;
use super::file::{File, Kind};
use super::inode::{Body, Inode};
use super::lock;
use super::root::root;
use super::walk::{Links, Start, walk};
use crate::errno::{Errno, Result};
use crate::task::limits::MOST_DESCRIPTORS;
use crate::task::{Process, current};
use core::mem;
use core::sync::atomic::{AtomicU32, Ordering};
use faultless_bare::sync::Mutex;
use faultless_collections::{Arc, Vec};
use linux_raw_sys::general as linux;

/// The maximum number of descriptors, independent of the limit of the process.
const MOST: usize = MOST_DESCRIPTORS as usize;

/// A descriptor.
#[derive(Clone, Debug)]
struct Slot {
    file: Arc<File>,
    close_on_exec: bool,
}

#[derive(Debug, Default)]
struct Table {
    slots: Vec<Option<Slot>>,
    /// All descriptors below this number are used.
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
            if faultless_bare::heap::tight() {
                return Err(Errno::ENOMEM);
            }
            self.slots.try_resize_with(at + 1, || None)?;
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
        // The table ends with a used slot, so that `fork` makes copies of the minimum length.
        while let Some(None) = self.slots.last() {
            self.slots.pop();
        }
        slot
    }

    fn copy(&self) -> Result<Self> {
        Ok(Self { slots: self.slots.try_clone()?, full_below: self.full_below })
    }
}

/// The root, the working directory, and the umask.
#[derive(Debug)]
struct Context {
    start: Mutex<Start>,
    umask: AtomicU32,
}

/// The file state of a process.
#[derive(Debug)]
pub struct ProcessFiles {
    /// `None` after the end of the process.
    descriptors: Mutex<Option<Arc<Descriptors>>>,
    context: Mutex<Arc<Context>>,
}

impl Process {
    /// Returns the descriptors and directories.
    pub fn files(&self) -> &ProcessFiles {
        let files = self.files.downcast_ref();
        files.expect("a process has files from its creation")
    }
}

impl ProcessFiles {
    /// Returns the state of the first program: the console, and the working directory `here`, or
    /// the root if `here` is empty.
    ///
    /// # Errors
    /// `ENOENT` and other errors of a bad path; `ENOTDIR`.
    pub fn first(here: &[u8]) -> Result<Self> {
        let open = |device: Device, flags| -> Result<_> {
            let inode = Inode::numbered(1, Body::Device(device), 0o600)?;
            inode.call(Vec::try_from_slice(b"dev/console")?, false);
            let file = File::try_new(inode, Kind::Stream(device.try_open()?), flags)?;
            Ok(Some(Slot { file, close_on_exec: false }))
        };
        let console = open(Device::Console, linux::O_RDWR)?;
        let complaints = open(Device::Complaints, linux::O_RDWR)?;
        let slots = Vec::try_from_iter([console.clone(), console, complaints])?;
        let table = Table { full_below: slots.len(), slots };
        let root = root().clone();
        let mut start = Start { here: root.clone(), root };
        if !here.is_empty() {
            start.here = walk(&start, here, Links::Follow)?.existing()?;
        }
        if !start.here.is_directory() {
            return Err(Errno::ENOTDIR);
        }
        let context = Context { start: Mutex::new(start), umask: AtomicU32::new(0o022) };
        Ok(Self {
            descriptors: Mutex::new(Some(Arc::try_new(Descriptors(Mutex::new(table)))?)),
            context: Mutex::new(Arc::try_new(context)?),
        })
    }

    /// The state of a process without a program: no descriptors, and the root.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn none() -> Result<Self> {
        let root = root().clone();
        let start = Mutex::new(Start { here: root.clone(), root });
        let context = Context { start, umask: AtomicU32::new(0o022) };
        let context = Mutex::new(Arc::try_new(context)?);
        Ok(Self { descriptors: Mutex::default(), context })
    }

    /// The state of a child, which shares the chosen parts and gets copies of the rest.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn fork(&self, share_descriptors: bool, share_context: bool) -> Result<Self> {
        if faultless_bare::heap::low() {
            return Err(Errno::ENOMEM);
        }
        let (descriptors, context) = (self.descriptors()?, self.context());
        let descriptors = if share_descriptors { descriptors } else { descriptors.copy()? };
        let context = if share_context { context } else { context.copy()? };
        Ok(Self { descriptors: Mutex::new(Some(descriptors)), context: Mutex::new(context) })
    }

    /// Stops sharing descriptors, or root and working directory.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn unshare(&self, descriptors: bool, context: bool) -> Result<()> {
        let own = self.fork(!descriptors, !context)?;
        let old = (
            self.descriptors.lock().replace(own.descriptors()?),
            mem::replace(&mut *self.context.lock(), own.context()),
        );
        drop(old);
        Ok(())
    }

    /// Unshares the table: the part of `execve` that may fail.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn prepare_exec(&self) -> Result<()> {
        let is_shared =
            self.descriptors.lock().as_ref().is_some_and(|it| Arc::strong_count(it) > 1);
        if is_shared { self.unshare(true, false) } else { Ok(()) }
    }

    /// Closes the descriptors marked close-on-exec: the part of `execve` that cannot fail.
    pub fn close_on_exec(&self) {
        if let Ok(descriptors) = self.descriptors() {
            descriptors.close(0, usize::MAX, |slot| slot.close_on_exec);
        }
    }

    /// Closes everything at the end of a process.
    pub fn close_all(&self) {
        let old = self.descriptors.lock().take();
        drop(old);
    }

    /// Returns the table.
    ///
    /// # Errors
    /// `EBADF`: the process has ended.
    fn descriptors(&self) -> Result<Arc<Descriptors>> {
        self.descriptors.lock().clone().ok_or(Errno::EBADF)
    }

    fn context(&self) -> Arc<Context> {
        self.context.lock().clone()
    }

    /// The file of `fd`.
    ///
    /// # Errors
    /// `EBADF`.
    pub fn get(&self, fd: i32) -> Result<Arc<File>> {
        let descriptors = self.descriptors.lock();
        let table = descriptors.as_ref().ok_or(Errno::EBADF)?.0.lock();
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
        let descriptors = self.descriptors()?;
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

    /// Makes `fd` refer to `file`, and closes the previous file of `fd`.
    ///
    /// # Errors
    /// `EBADF`: beyond the limit. `ENOMEM`.
    pub fn set(&self, fd: i32, file: Arc<File>, close_on_exec: bool) -> Result {
        let at = usize::try_from(fd).ok().filter(|&at| at < limit()).ok_or(Errno::EBADF)?;
        let descriptors = self.descriptors()?;
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
        let descriptors = self.descriptors()?;
        let old = descriptors.0.lock().take(at);
        old.map(|old| descriptors.closed(old)).ok_or(Errno::EBADF)
    }

    /// Closes all descriptors from `first` to `last`, or with `mark` marks these descriptors
    /// close-on-exec.
    pub fn close_range(&self, first: usize, last: usize, mark: bool) {
        let Ok(descriptors) = self.descriptors() else { return };
        if !mark {
            return descriptors.close(first, last, |_| true);
        }
        let mut table = descriptors.0.lock();
        let end = table.slots.len().min(last.saturating_add(1));
        let slots = table.slots.get_mut(first..end).unwrap_or_default();
        slots.iter_mut().flatten().for_each(|slot| slot.close_on_exec = true);
    }

    /// Returns whether `execve` closes `fd`.
    ///
    /// # Errors
    /// `EBADF`.
    pub fn closes_on_exec(&self, fd: i32) -> Result<bool> {
        Ok(self.descriptors()?.0.lock().get(fd)?.close_on_exec)
    }

    /// Sets whether `execve` closes `fd`.
    ///
    /// # Errors
    /// `EBADF`.
    pub fn set_close_on_exec(&self, fd: i32, close_on_exec: bool) -> Result<()> {
        self.descriptors()?.0.lock().get_mut(fd)?.close_on_exec = close_on_exec;
        Ok(())
    }

    /// Calls `tell` for each open descriptor, with the table locked.
    ///
    /// # Errors
    /// The errors of `tell`.
    pub fn each_open(&self, tell: impl FnMut(i32) -> Result<()>) -> Result<()> {
        let Ok(descriptors) = self.descriptors() else { return Ok(()) };
        let table = descriptors.0.lock();
        let is_open = |at: &usize| table.slots[*at].is_some();
        (0..table.slots.len()).filter(is_open).map(|at| at as i32).try_for_each(tell)
    }

    /// The identity of the table as an owner of [locks](lock).
    pub fn table(&self) -> usize {
        self.descriptors().map_or(0, |descriptors| descriptors.place())
    }

    /// Returns whether any descriptor refers to `file`.
    pub fn get_any(&self, file: &Arc<File>) -> bool {
        let Ok(descriptors) = self.descriptors() else { return false };
        let table = descriptors.0.lock();
        table.slots.iter().flatten().any(|slot| Arc::ptr_eq(&slot.file, file))
    }

    /// The number of open descriptors.
    pub fn count(&self) -> usize {
        let Ok(descriptors) = self.descriptors() else { return 0 };
        let table = descriptors.0.lock();
        table.slots.iter().flatten().count()
    }

    /// Returns the start directories of path walks.
    pub fn start(&self) -> Start {
        self.context().start.lock().clone()
    }

    /// Changes the start directories of path walks.
    pub fn set_start(&self, change: impl FnOnce(&mut Start)) {
        let context = self.context();
        let mut start = context.start.lock();
        // The old inodes are dropped after the lock.
        let _old = start.clone();
        change(&mut start);
        drop(start);
    }

    /// Returns the permissions withheld from new files.
    pub fn umask(&self) -> u32 {
        self.context().umask.load(Ordering::Relaxed)
    }

    /// Sets the umask and returns the old one.
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
    /// Returns the identity of the table as an owner of locks.
    fn place(&self) -> usize {
        core::ptr::from_ref(self) as usize
    }

    /// Drops the file of a removed descriptor, without the table locked.
    fn closed(&self, slot: Slot) {
        lock::closed(self.place(), &slot.file);
        drop(slot);
    }

    /// Closes the descriptors from `first` to `last` selected by `is_meant`. One at a time: files
    /// are dropped without the lock, and a list of all files may be larger than the heap.
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
        // On an error the copy is dropped without the lock.
        let copy = self.0.lock().copy()?;
        Ok(Arc::try_new(Self(Mutex::new(copy)))?)
    }
}

impl Context {
    fn copy(&self) -> Result<Arc<Self>> {
        let start = Mutex::new(self.start.lock().clone());
        let umask = AtomicU32::new(self.umask.load(Ordering::Relaxed));
        Ok(Arc::try_new(Self { start, umask })?)
    }
}

/// The descriptor limit of the running thread's process.
fn limit() -> usize {
    let limit = current().process.limits.rows.lock()[linux::RLIMIT_NOFILE as usize][0];
    usize::try_from(limit).unwrap_or(MOST).min(MOST)
}
